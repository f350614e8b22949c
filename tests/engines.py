"""Environments with a stand-in for vLLM (tests/standin) that has some fault, and the leftovers of their engines."""

import os
import sys
from pathlib import Path

from pipeline.basics.files import ROOT

ALIVE = "engines"  # folder next to an environment's Python: a file of each engine, with the folder of its states


def environment(
    folder: Path,
    fault: str = "",
    version: str = "0.0.0",
    packages: tuple[str, ...] = ("tests/standin", "infra/vllm_jakiro"),
    distribution: str = "vllm",
) -> str:
    """Make an environment and return its Python, which prints some text, as a user's wrapper may. `packages`: folders
    of the checkout that it imports from.
    """
    (folder / ALIVE).mkdir(parents=True)
    metadata = folder / f"{distribution.replace('-', '_')}-{version}.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    paths = os.pathsep.join(map(str, (*(ROOT / package for package in packages), folder)))
    python = folder / "python"
    python.write_text(
        "#!/bin/sh\necho my environment\nprintf '\\377\\n' >&2\n"
        f"FAULT='{fault}' STANDIN='{folder}' PYTHONPATH='{paths}' exec '{sys.executable}' \"$@\"\n"
    )
    python.chmod(0o755)
    return str(python)


def started(python: str) -> dict[int, Path]:
    """Return every engine that an environment's Python has run: its process id, and its folder of states."""
    return {int(path.name): Path(path.read_text()) for path in (Path(python).parent / ALIVE).iterdir()}


def left_of(python: str) -> list[object]:
    """Return the processes and folders that an environment's engines have left over."""
    folder_bytes = str(
        Path(python).parent
    ).encode()  # the full path: the folder's name alone may occur in other processes
    leftovers: list[object] = [folder for folder in started(python).values() if folder.exists()]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if folder_bytes in (process / "environ").read_bytes() + (process / "cmdline").read_bytes():
                leftovers.append(process.name)
        except OSError:  # the process has ended
            continue
    return leftovers
