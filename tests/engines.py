"""Environments with a stand-in for vLLM (tests/standin) that has some fault, and what is left of their engines."""

import os
import sys
from pathlib import Path

from pipeline.basics.files import ROOT

ALIVE = "engines"  # folder beside an environment's Python: a file of each engine, with where it puts states


def environment(folder: Path, fault: str = "", version: str = "0.0.0") -> str:
    """Its Python. Like a user's wrapper it prints something, too."""
    (folder / ALIVE).mkdir(parents=True)
    known = folder / f"vllm-{version}.dist-info/METADATA"
    known.parent.mkdir()
    known.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    paths = os.pathsep.join(map(str, (ROOT / "tests/standin", ROOT / "infra/vllm_jakiro", folder)))
    python = folder / "python"
    python.write_text(
        "#!/bin/sh\necho my environment\nprintf '\\377\\n' >&2\n"
        f"FAULT='{fault}' STANDIN='{folder}' PYTHONPATH='{paths}' exec '{sys.executable}' \"$@\"\n"
    )
    python.chmod(0o755)
    return str(python)


def started(python: str) -> dict[int, Path]:
    """Every engine that an environment's Python has run: its process, and its folder of states."""
    return {int(path.name): Path(path.read_text()) for path in (Path(python).parent / ALIVE).iterdir()}


def left_of(python: str) -> list[object]:
    """What they have left behind: processes and folders."""
    known = str(Path(python).parent).encode()  # the whole path: its name may be anybody's word
    found: list[object] = [folder for folder in started(python).values() if folder.exists()]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if known in (process / "environ").read_bytes() + (process / "cmdline").read_bytes():
                found.append(process.name)
        except OSError:  # it is gone
            continue
    return found
