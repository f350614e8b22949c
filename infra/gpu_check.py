"""The whole truth about this machine's GPU, in one command: what is fast, what is slow, what breaks, what is lost.

    python -m infra.gpu_check [--shape 8b] [--minutes 10] [--write docs/gpu.md]
    python -m infra.gpu_check --device cpu                 every part on a tiny shape, in a minute: shows that they run

No network is needed. The parts (docs/gpu.md says what each figure means):

    machine        name, memory, versions, dtypes; a matrix product's speed and those of copies
    lossless       the losslessness gate on a small random target, both dtypes, eager and compiled, T = 0 and T = 1
    dump           tokens/s of the dump beside the target's bare forward
    train-eagle    tokens/s of training steps beside the bare forward and backward; memory beside the plan's formula
    train-jakiro   the same
    costs          what verifying n tokens and a draft step of w nodes cost
    compiled       verifying, compiled
    demo           the demo's recipe on the GPU, where time is left and the embedded packages are installed

The target is a random Llama of the shape of an 8B model, made in the GPU's memory; without room for it, of a 1B model.
Each part runs in a process of its own, so that one that fails, hangs or uses the memory up leaves the others alone. The
last line is JSON. Status 0: every part ran and nothing was lost; 1: see there; 2: there is no GPU.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from pipeline.artifacts.provenance import ROOT
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import read_json, write_text
from pipeline.running import children, entry
from pipeline.running.gpus import NO_GPUS

LIMITS = {  # seconds after which a part is ended
    "machine": 120,
    "lossless": 180,
    "dump": 150,
    "train-eagle": 150,
    "train-jakiro": 150,
    "costs": 150,
    "compiled": 240,
    "demo": 900,
}
LEAST = {"demo": 120}  # seconds without which a part is not begun
ROOM = 6e9  # bytes of disk: the target's embedding and head, random features, the demo
CHOICES = ("auto", "8b", "1b", "tiny")  # of the random target's shape
NOTHING_YET = "Nothing has been measured on a GPU yet."
Figures = dict[str, Any]


def require_gpu() -> None:
    if not torch.cuda.is_available():
        raise PipelineError(
            f"no GPU: torch {torch.__version__} sees no CUDA device here. Needed: one GPU with 30 GiB of free memory "
            "(11 for a smaller shape), its driver, and a build of torch for it. `--device cpu` runs every part on a "
            "tiny shape, without figures that mean anything"
        )


def measure(device: str, shape: str, parts: list[str], minutes: float, folder: Path) -> Figures:
    """By part: its figures, or {"error"} or {"skipped"} with one line. On a CPU, where nothing is left behind in a
    device's memory, one process does all parts that it survives.
    """
    end, found, waiting = time.monotonic() + 60 * minutes, {}, ["machine", *(p for p in parts if p != "machine")]
    while waiting:
        group = waiting if device == "cpu" else waiting[:1]
        left = end - time.monotonic()
        if left < LEAST.get(group[0], 15):
            if group[0] == "machine":  # without it nothing is begun
                raise PipelineError(f"only {max(left, 0):.0f} s for all parts: give it more --minutes")
            found[waiting.pop(0)] = {"skipped": f"only {max(left, 0):.0f} s were left: give it more --minutes"}
            continue
        limit = min(left, sum(LIMITS[part] for part in group))
        shape = found.get("machine", {}).get("shape", shape)
        print(f"{', '.join(group)} ...", flush=True)
        error = run(group, device, shape, limit, folder)
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


def run(parts: list[str], device: str, shape: str, limit: float, folder: Path) -> str:
    """Runs the parts in one process; returns why it ended before the last of them was finished."""
    command = [sys.executable, "-m", "infra.gpu.parts", str(folder), *parts, "--device", device, "--shape", shape]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")  # what compiling takes is measured, too
    if device == "cpu":
        environment |= {"DS_ACCELERATOR": "cpu", **NO_GPUS}
    return ended([*command, "--seconds", str(limit)], limit, folder / f"{parts[0]}.log", environment)


def ended(command: list[str], limit: float, log: Path, environment: dict[str, str]) -> str:
    """Runs a command until its end, at most `limit` seconds; returns in one line what it said last."""
    with log.open("w") as output:
        process = children.start(command, environment, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            return f"not finished within {limit:.0f} s"
        finally:
            children.end(process)
    if not process.returncode:
        return ""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    sys.stderr.write("".join(f"    {line}\n" for line in lines[-25:]))
    told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")] or lines
    said = told[-1] if told else "without a message"
    return f"status {process.returncode}: {said[:300]}"


# -- what is shown -----------------------------------------------------------------------------------------------


def verdict(parts: Figures) -> Figures:
    """The parts that failed, and those whose gate did."""
    failed = [name for name, part in parts.items() if "error" in part]
    lost = [name for name, part in parts.items() if part.get("passed") is False]
    return {"failed": failed, "not_lossless": lost}


def said(figures: Figures) -> str:
    """The verdict, then a table in Markdown."""
    bad = {"failed": figures["failed"], "NOT LOSSLESS": figures["not_lossless"]}
    lines = [f"{what}: {', '.join(names)}." for what, names in bad.items() if names]
    lines = [*(lines or ["Every part ran, and nothing was lost."]), "", "| part | what | figure |", "|---|---|---|"]
    for name, part in figures["parts"].items():
        for what, figure in _rows(name, part):
            lines.append(f"| {name} | {what} | {figure} |")
    return "\n".join(lines)


def _rows(name: str, part: Figures) -> list[tuple[str, str]]:
    for ending in ("error", "skipped"):
        if ending in part:
            return [(ending, part[ending].replace("|", "\\|"))]
    shown = {"machine": _machine_rows, "lossless": _lossless_rows, "dump": _dump_rows, "demo": _demo_rows}
    shown |= {"train-eagle": _train_rows, "train-jakiro": _train_rows, "costs": _cost_rows, "compiled": _cost_rows}
    return shown[name](part)


def _machine_rows(part: Figures) -> list[tuple[str, str]]:
    memory = f", {part['memory_gib']} GiB ({part['free_gib']} free)" if "memory_gib" in part else ""
    versions = {"driver": part.get("driver"), "CUDA": part.get("cuda"), **part["libraries"], "code": part["code"]}
    dtypes = [dtype for dtype, known in part["supported"].items() if known]
    return [
        ("device", f"{part['count']} x {part['name']}{memory}"),
        ("versions", ", ".join(f"{name} {value}" for name, value in versions.items() if value)),
        ("dtypes of its own", ", ".join(["float32", *dtypes])),
        ("C compiler, for `compile`", part["c_compiler"] or "none"),
        ("shape, dtype", f"{part['shape']}, {part['dtype']}"),
        ("matrix product", f"{part['matmul_tflops']:g} TFLOP/s"),
        ("copies: on the device, to the host", f"{part['copy_gb_per_s']:g}, {part['to_host_gb_per_s']:g} GB/s"),
    ]


def _lossless_rows(part: Figures) -> list[tuple[str, str]]:
    rows = []
    for one in part["results"]:
        gate = one["gate"]
        what = (
            f"{one['dtype']}, {'compiled' if one['compiled'] else 'eager'}, T = {one['temperature']:g}, {one['draft']}"
        )
        proof = f"{gate['identical']} of {gate['checked']} identical, {gate['near_ties']} near ties"
        if gate["drawn"]:
            proof = f"fit p = {gate['fit']:.2g}, error {gate['largest_error']:.0e}"
        proof += f", drift {gate['largest_drift']:.0e} in {gate['rounds']} rounds" if gate["rounds"] else ""
        rows.append((what, f"{'lossless' if gate['passed'] else 'NOT LOSSLESS'}: {proof}; tau {one['tau']:.2f}"))
    return rows


def _dump_rows(part: Figures) -> list[tuple[str, str]]:
    rows = [
        ("dump", f"{part['tokens_per_s']:,.0f} tokens/s"),
        ("bare forward", f"{part['forward_tokens_per_s']:,.0f} tokens/s"),
        ("dump over forward", _ratio(part)),
    ]
    return [*rows, *_peak(part)]


def _train_rows(part: Figures) -> list[tuple[str, str]]:
    rows = [
        ("parameters", f"{part['parameters']:,}"),
        ("step", f"{part['tokens_per_s']:,.0f} tokens/s"),
        ("bare forward and backward", f"{part['bare_tokens_per_s']:,.0f} tokens/s"),
        ("step over bare", _ratio(part)),
        ("waiting for data", f"{part['data_wait_share']:.1%} of a step"),
    ]
    if "step_gib" in part:
        rows.append(("a step's memory, the plan's formula", f"{part['step_gib']}, {part['formula_gib']} GiB"))
    return [*rows, *_peak(part)]


def _cost_rows(part: Figures) -> list[tuple[str, str]]:
    rows = [
        ("a token of plain decoding", f"{part['plain_ms']:.2f} ms"),
        (f"verifying n tokens behind {part['context']}", _by_size(part["verify_ms"])),
    ]
    for draft, steps in part.get("draft_step_ms", {}).items():
        rows.append((f"{draft}: a step of w nodes", _by_size(steps)))
        figures = f"{part['draft_first_ms'][draft]:.2f}, {part['bookkeeping_ms'][draft]:.2f} ms"
        rows.append((f"{draft}: a round's first forward, bookkeeping", figures))
    if "compile_s" in part:
        rows.append(("compiling one n; graphs that were skipped", f"{part['compile_s']} s; {part['graphs_skipped']}"))
    return [*rows, *_peak(part)]


def _demo_rows(part: Figures) -> list[tuple[str, str]]:
    rows = [("from the dump to the release", f"{part['seconds']:.0f} s")]
    for one in part["results"]:
        speed = f"{one['speedup']:.2f}x" if one["passed"] else "NOT LOSSLESS, speed withheld"
        rows.append(
            (f"{one['benchmark']}, T = {one['temperature']:g}, {one['draft']}", f"tau {one['tau']:.2f}, {speed}")
        )
    return rows


def _ratio(part: Figures) -> str:
    return f"{part['ratio']:.3f} ({part['ratio_lowest']:.3f} to {part['ratio_highest']:.3f} in {part['turns']} turns)"


def _by_size(milliseconds: dict[str, float]) -> str:
    return ", ".join(f"{size}: {value:.2f}" for size, value in milliseconds.items()) + " ms"


def _peak(part: Figures) -> list[tuple[str, str]]:
    return [("peak memory", f"{part['peak_gib']} GiB")] if part.get("peak_gib") else []


def with_section(text: str, figures: Figures) -> str:
    """docs/gpu.md with this device's section, in the place of the one that it had."""
    name = figures["device"]
    raw = f"<details><summary>JSON</summary>\n\n```json\n{json.dumps(figures)}\n```\n\n</details>\n"
    section = f"## {name}\n\nMeasured on {figures['day']}.\n\n{said(figures)}\n\n{raw}"
    before = re.compile(rf"^## {re.escape(name)}\n.*?(?=^## |\Z)", re.DOTALL | re.MULTILINE)
    if before.search(text):
        return before.sub(lambda _: section + "\n", text).rstrip("\n") + "\n"
    return f"{text.replace(NOTHING_YET, '').rstrip()}\n\n{section}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=CHOICES, default="auto", help="of the random target")
    parser.add_argument("--minutes", type=float, default=10, help="after which no part goes on")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(LIMITS), help="NAME,NAME,...")
    parser.add_argument("--write", type=Path, metavar="FILE", help="where this device's section goes: docs/gpu.md")
    arguments = parser.parse_args()
    if unknown := [part for part in arguments.parts if part not in LIMITS]:
        parser.error(f"--parts {unknown[0]}: there are {', '.join(LIMITS)}")
    if arguments.write and not arguments.write.is_file():
        raise PipelineError(f"--write {arguments.write}: no such file; this device's section is added to docs/gpu.md")
    if arguments.device == "cuda":
        require_gpu()
    with tempfile.TemporaryDirectory(prefix="gpu_check-") as folder:
        if arguments.device == "cuda" and shutil.disk_usage(folder).free < ROOM:
            raise PipelineError(f"{ROOM / 1e9:.0f} GB of disk are needed in {folder}: set TMPDIR to a roomier place")
        parts = measure(arguments.device, arguments.shape, arguments.parts, arguments.minutes, Path(folder))
    device = parts["machine"].get("name", arguments.device)
    figures = {"device": device, "day": time.strftime("%Y-%m-%d"), **verdict(parts), "parts": parts}
    print(f"\n{said(figures)}\n")
    if arguments.write and "name" in parts["machine"]:
        write_text(arguments.write, with_section(arguments.write.read_text(), figures))
    print(json.dumps(figures))
    sys.exit(1 if figures["failed"] or figures["not_lossless"] else 0)


if __name__ == "__main__":
    entry.run(main)
