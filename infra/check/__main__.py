"""Measure this machine in one command: what is fast, what is slow, what fails, and whether decoding is lossless.

    python -m infra.check [--shape 8b] [--minutes 10] [--parts dump,costs] [--out FOLDER]

No network is needed. With a GPU the target is a random Llama of the shape of an 8B model, made in the GPU's memory;
if it does not fit, of a 1B model. Without a GPU every part runs on a tiny shape: that shows that the part runs, but its
figures say nothing about real models. The parts (docs/gpu.md explains each figure):

    machine        name, memory, versions, dtypes; a matrix product's speed and those of copies
    lossless       the losslessness gate on a small random target, both dtypes, eager and compiled, T = 0 and T = 1
    widths         masked attention at widths that are new, and at the same again
    steps          the attention of the training-time test, merged and under a mask; the kernel that this device has
    rounds         whole rounds of decoding next to plain tokens, eager and with the target compiled
    train-NAME     tokens/s of training steps, twice, next to the bare forward and backward; a step's memory next to the
                   plan's formula: eagle, jakiro, eagle3, dflash
    dump           tokens/s of a dump worker next to the bare forward; dump-float8: with four states a token
    costs          the time of verifying n tokens, and of each part of a draft's round
    loss           the vocabulary's cross-entropy and gradient, eager and compiled
    p-eagle        its training, and the gradient that was not finite on an H200
    compiled       the time of verifying, compiled

On a GPU each part runs in its own process, so that a part that fails, hangs or exhausts the memory does not affect the
others. With --out each part's figures and log stay in FOLDER. The last line is JSON. Exit status 0: every part ran, and
decoding was lossless; 1: the output says what failed. A goal that is missed is said, and fails nothing.
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

LIMITS = {  # seconds after which a part is stopped
    "machine": 60,
    "lossless": 180,
    "widths": 40,
    "steps": 40,
    "rounds": 150,
    **dict.fromkeys(("train-eagle", "train-jakiro", "train-eagle3", "train-dflash"), 90),
    "dump": 70,
    "dump-float8": 70,
    "costs": 60,
    "loss": 60,
    "p-eagle": 60,
    "compiled": 240,
}
MIN_SECONDS = 15  # a part is not started with fewer seconds left
MIN_DISK = 6e9  # bytes of free disk: the target's embedding and head, random features
SHAPES = ("auto", "8b", "1b", "tiny")  # of the random target
Figures = dict[str, Any]


def measure(gpu: bool, shape: str, parts: list[str], minutes: float, folder: Path) -> Figures:
    """Return the figures of each part, or {"error"} or {"skipped"} with one line. On a CPU one process runs all parts
    until one fails, since no device memory has to be freed between them.
    """
    end, results, pending = time.monotonic() + 60 * minutes, {}, ["machine", *(p for p in parts if p != "machine")]
    while pending:
        group = pending[:1] if gpu else pending
        left = end - time.monotonic()
        if left < MIN_SECONDS:
            if group[0] == "machine":  # the other parts depend on it
                raise PipelineError(f"only {max(left, 0):.0f} s are left for all parts: raise --minutes")
            results[pending.pop(0)] = {"skipped": f"only {max(left, 0):.0f} s were left: raise --minutes"}
            continue
        limit = min(left, sum(LIMITS[part] for part in group))
        shape = results.get("machine", {}).get("shape", shape)
        print(f"{', '.join(group)} ...", flush=True)
        error = run_parts(group, shape, limit, folder)
        for part in group:
            path = folder / f"{part}.json"
            if not path.exists():
                results[part] = {"error": error}
                break  # the parts after it are started again
            results[part] = read_json(path)
            print(f"{part}: {results[part]['seconds']:.0f} s", flush=True)
        pending = [part for part in pending if part not in results]
        if shape == "auto" and "error" in results["machine"]:
            break  # the shape that fits is unknown
    return results


def run_parts(parts: list[str], shape: str, limit: float, folder: Path) -> str:
    """Run the parts in one process; return why it ended before the last one was finished, or ""."""
    command = [sys.executable, "-m", "infra.check.parts", str(folder), shape, str(limit), *parts]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")  # empty, since compile time is measured, too
    if not torch.cuda.is_available():
        environment |= {"DS_ACCELERATOR": "cpu", **NO_GPUS}
    return run_command(command, limit, folder / f"{parts[0]}.log", environment)


def run_command(command: list[str], limit: float, log: Path, environment: dict[str, str]) -> str:
    """Run a command for at most `limit` seconds; return "" or, if it failed, its last error in one line."""
    with ExitStack() as stack:
        streams = {"stdout": stack.enter_context(log.open("w")), "stderr": subprocess.STDOUT}
        process = stack.enter_context(children.start_command(command, environment, cwd=ROOT, **streams))
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            return f"not finished within {limit:.0f} s"
    if not process.returncode:
        return ""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    sys.stderr.write("".join(f"    {line}\n" for line in lines[-25:]))
    messages = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")] or lines
    message = messages[-1] if messages else "without a message"
    return f"status {process.returncode}: {message[:300]}"


def list_failures(parts: Figures) -> Figures:
    """Return the names of the parts that failed, and of those whose losslessness gate failed."""
    failed = [name for name, part in parts.items() if "error" in part]
    lost = [name for name, part in parts.items() if part.get("passed") is False]
    return {"failed": failed, "not_lossless": lost}


def format_figures(figures: Figures) -> str:
    """Format the failures, then all figures as a Markdown table."""
    bad = {"failed": figures["failed"], "NOT LOSSLESS": figures["not_lossless"]}
    lines = [f"{label}: {', '.join(names)}." for label, names in bad.items() if names]
    lines = lines or ["Every part ran, and nothing was lost."]
    on_gpu = "count" in figures["parts"].get("machine", {})  # elsewhere a tiny shape says nothing about speed
    missed = [
        f"{name}, {goal}: {verdict.removeprefix('MISSED: ')}"
        for name, part in figures["parts"].items()
        for goal, verdict in part.get("goals", {}).items()
        if on_gpu and verdict.startswith("MISSED")
    ]
    lines += [f"Goals missed: {'; '.join(missed)}."] if missed else []
    rows = [[name, *row] for name, part in figures["parts"].items() for row in _figure_rows(part)]
    table = markdown.format_table(["part", "what", "figure"], rows)
    return "\n".join([*lines, "", table])


def _figure_rows(part: Figures) -> list[list[str]]:
    rows: list[list[str]] = []
    for name, figure in part.items():
        if name in ("proofs", "goals"):
            rows += [[method, proof] for method, proof in figure.items()]
        elif name != "results" and figure is not None:
            rows.append([name.replace("_", " "), _format_figure(figure).replace("|", "\\|")])
    return rows


def _format_figure(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_format_figure(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_format_figure, value))
    return f"{value:,.6g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="auto", help="shape of the random target")
    parser.add_argument("--minutes", type=float, default=10, help="time limit of all parts together")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(LIMITS), help="NAME,NAME,...")
    parser.add_argument("--out", type=Path, help="folder for each part's figures and log; default: none are kept")
    arguments = parser.parse_args()
    if unknown := [part for part in arguments.parts if part not in LIMITS]:
        parser.error(f"--parts {unknown[0]}: there are {', '.join(LIMITS)}")
    gpu = torch.cuda.is_available()
    if not gpu:
        print(f"torch {torch.__version__} sees no GPU here: a tiny shape on the CPU only shows that every part runs")
    with tempfile.TemporaryDirectory(prefix="check-") as folder:
        if gpu and shutil.disk_usage(folder).free < MIN_DISK:
            raise PipelineError(
                f"{folder} has less than {MIN_DISK / 1e9:.0f} GB of free disk: set TMPDIR to a folder with more"
            )
        parts = measure(gpu, arguments.shape, arguments.parts, arguments.minutes, Path(folder))
        if arguments.out:
            arguments.out.mkdir(parents=True, exist_ok=True)
            for path in [*Path(folder).glob("*.json"), *Path(folder).glob("*.log")]:
                shutil.copy(path, arguments.out)
    figures = {"day": time.strftime("%Y-%m-%d"), **list_failures(parts), "parts": parts}
    print(f"\n{format_figures(figures)}\n")
    print(json.dumps(figures))
    sys.exit(1 if figures["failed"] or figures["not_lossless"] else 0)


if __name__ == "__main__":
    entry.run(main)
