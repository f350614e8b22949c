"""The truth about this machine, in one command: what is fast, what is slow, what breaks, what is lost.

    python -m infra.check [--shape 8b] [--minutes 10] [--parts dump,costs]

No network is needed. With a GPU the target is a random Llama of the shape of an 8B model, made in the GPU's memory;
without room for it, of a 1B model. Without a GPU every part runs on a tiny shape: that shows that it runs, and its
figures say nothing of real models. The parts (docs/gpu.md says what each figure means):

    machine        name, memory, versions, dtypes; a matrix product's speed and those of copies
    lossless       the losslessness gate on a small random target, both dtypes, eager and compiled, T = 0 and T = 1
    dump           tokens/s of a dump worker beside the plan's figure, which leaves the writing out
    train-eagle    tokens/s of training steps beside the plan's figure, and a step's memory beside its formula
    train-jakiro   the same
    costs          what verifying n tokens and the parts of each draft's round cost
    compiled       verifying, compiled

On a GPU each part runs in a process of its own, so that one that fails, hangs or uses the memory up leaves the others
alone. The last line is JSON. Status 0: every part ran and nothing was lost; 1: see there.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from pipeline.basics.errors import PipelineError
from pipeline.basics.files import ROOT, read_json
from pipeline.running import children, entry, markdown
from pipeline.running.crew import NO_GPUS

LIMITS = {  # seconds after which a part is ended
    "machine": 120,
    "lossless": 180,
    "dump": 150,
    "train-eagle": 150,
    "train-jakiro": 150,
    "costs": 150,
    "compiled": 240,
}
LEAST = 15  # seconds without which a part is not begun
ROOM = 6e9  # bytes of disk: the target's embedding and head, random features
SHAPES = ("auto", "8b", "1b", "tiny")  # of the random target
Figures = dict[str, Any]


def measure(gpu: bool, shape: str, parts: list[str], minutes: float, folder: Path) -> Figures:
    """The figures of each part, or {"error"} or {"skipped"} with one line. On a CPU, where nothing is left behind in a
    device's memory, one process does all parts that it survives.
    """
    end, found, waiting = time.monotonic() + 60 * minutes, {}, ["machine", *(p for p in parts if p != "machine")]
    while waiting:
        group = waiting[:1] if gpu else waiting
        left = end - time.monotonic()
        if left < LEAST:
            if group[0] == "machine":  # without it nothing is begun
                raise PipelineError(f"only {max(left, 0):.0f} s for all parts: give it more --minutes")
            found[waiting.pop(0)] = {"skipped": f"only {max(left, 0):.0f} s were left: give it more --minutes"}
            continue
        limit = min(left, sum(LIMITS[part] for part in group))
        shape = found.get("machine", {}).get("shape", shape)
        print(f"{', '.join(group)} ...", flush=True)
        error = run(group, shape, limit, folder)
        for part in group:
            path = folder / f"{part}.json"
            if not path.exists():
                found[part] = {"error": error}
                break  # those behind it are begun anew
            found[part] = read_json(path)
            print(f"{part}: {found[part]['seconds']:.0f} s", flush=True)
        waiting = [part for part in waiting if part not in found]
        if shape == "auto" and "error" in found["machine"]:
            break  # nobody knows what there is room for
    return found


def run(parts: list[str], shape: str, limit: float, folder: Path) -> str:
    """Runs the parts in one process; returns why it ended before the last of them was finished."""
    command = [sys.executable, "-m", "infra.check.parts", str(folder), shape, str(limit), *parts]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")  # what compiling takes is measured, too
    if not torch.cuda.is_available():
        environment |= {"DS_ACCELERATOR": "cpu", **NO_GPUS}
    return ended(command, limit, folder / f"{parts[0]}.log", environment)


def ended(command: list[str], limit: float, log: Path, environment: dict[str, str]) -> str:
    """Runs a command until its end, at most `limit` seconds; returns in one line what it said last."""
    with ExitStack() as stack:
        streams = {"stdout": stack.enter_context(log.open("w")), "stderr": subprocess.STDOUT}
        process = stack.enter_context(children.started(command, environment, cwd=ROOT, **streams))
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            return f"not finished within {limit:.0f} s"
    if not process.returncode:
        return ""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    sys.stderr.write("".join(f"    {line}\n" for line in lines[-25:]))
    told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")] or lines
    said = told[-1] if told else "without a message"
    return f"status {process.returncode}: {said[:300]}"


def verdict(parts: Figures) -> Figures:
    """The parts that failed, and those whose gate did."""
    failed = [name for name, part in parts.items() if "error" in part]
    lost = [name for name, part in parts.items() if part.get("passed") is False]
    return {"failed": failed, "not_lossless": lost}


def said(figures: Figures) -> str:
    """The verdict, then a table in Markdown."""
    bad = {"failed": figures["failed"], "NOT LOSSLESS": figures["not_lossless"]}
    lines = [f"{what}: {', '.join(names)}." for what, names in bad.items() if names]
    rows = [[name, *row] for name, part in figures["parts"].items() for row in _rows(part)]
    table = markdown.table(["part", "what", "figure"], rows)
    return "\n".join([*(lines or ["Every part ran, and nothing was lost."]), "", table])


def _rows(part: Figures) -> list[list[str]]:
    rows: list[list[str]] = []
    for what, figure in part.items():
        if what == "proofs":
            rows += [[method, proof] for method, proof in figure.items()]
        elif what != "results" and figure is not None:
            rows.append([what.replace("_", " "), _figure(figure).replace("|", "\\|")])
    return rows


def _figure(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_figure(one)}" for name, one in value.items())
    if isinstance(value, list):
        return ", ".join(map(_figure, value))
    return f"{value:,.6g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="auto", help="of the random target")
    parser.add_argument("--minutes", type=float, default=10, help="after which no part goes on")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(LIMITS), help="NAME,NAME,...")
    arguments = parser.parse_args()
    if unknown := [part for part in arguments.parts if part not in LIMITS]:
        parser.error(f"--parts {unknown[0]}: there are {', '.join(LIMITS)}")
    gpu = torch.cuda.is_available()
    if not gpu:
        print(f"torch {torch.__version__} sees no GPU here: a tiny shape on the CPU, which shows that every part runs")
    with tempfile.TemporaryDirectory(prefix="check-") as folder:
        if gpu and shutil.disk_usage(folder).free < ROOM:
            raise PipelineError(f"{ROOM / 1e9:.0f} GB of disk are needed in {folder}: set TMPDIR to a roomier place")
        parts = measure(gpu, arguments.shape, arguments.parts, arguments.minutes, Path(folder))
    figures = {"day": time.strftime("%Y-%m-%d"), **verdict(parts), "parts": parts}
    print(f"\n{said(figures)}\n")
    print(json.dumps(figures))
    sys.exit(1 if figures["failed"] or figures["not_lossless"] else 0)


if __name__ == "__main__":
    entry.run(main)
