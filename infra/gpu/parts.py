"""The parts of `gpu_check`, each a function that returns its figures. `gpu_check` starts this file, in processes of
their own:

    python -m infra.gpu.parts FOLDER --device cuda --shape 8b --seconds 120 PART ...

A part's figures are written to FOLDER/PART.json when it is finished; what it says on the way is the process's own
output. Figures of two ways come from turns that they take in one process.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch._dynamo.utils import counters

from eval.measure import report
from eval.tuning.costs import SIZES, Costs, measure_costs
from infra.gpu.lossless import lossless
from infra.gpu.shapes import GIB, SHAPES, Given, dump_tasks, new_methods, supported, write_random_features
from pipeline.artifacts.provenance import LIBRARIES, ROOT, hardware, revision
from pipeline.artifacts.reports import REPORT, read_report
from pipeline.basics import embedded
from pipeline.basics.accelerator import now
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import write_json
from pipeline.decoding.contract import Method
from pipeline.decoding.generate import Sampling
from pipeline.drafts import build, parameter_count
from pipeline.drafts.parts.layers import shapes_of
from pipeline.lm.model import DTYPES, Target, load_config
from pipeline.recipe.load import override_arguments
from pipeline.running import children, entry
from preprocess.bench import Methods
from train.engine.engine import start_distributed
from train.estimate import step_bytes
from train.studies.bench import Way

TURNS = 3  # of each way, at least
STEPS = 2  # of a turn of training
DEMO = ROOT / "infra/recipes/demo.toml"
DEMO_SETS = (  # one GPU, one worker, one rank; the global batch is the recipe's
    "target.device=cuda", "eval.pack_linears=false", "features.workers=1", "features.gpus_per_worker=1",
    "train.ranks=1",
    "train.micro_batch=4",
)  # fmt: skip


def in_turns(ways: dict[str, Callable[[], float]], seconds: float) -> dict[str, list[float]]:
    """What each way returns, turn by turn, after one that warms up; every round begins with another way."""
    for way in ways.values():
        way()
    found: dict[str, list[float]] = {name: [] for name in ways}
    names, begin, turn = list(ways), time.monotonic(), 0
    while turn < TURNS or time.monotonic() - begin < seconds:
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            found[name].append(ways[name]())
        turn += 1
    return found


def ratio(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """Mean and extremes of the turns' own ratios."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    figures = {"ratio": sum(ratios) / len(ratios), "ratio_lowest": min(ratios), "ratio_highest": max(ratios)}
    return {name: round(value, 4) for name, value in figures.items()}


def mean(values: list[float]) -> float:
    return round(sum(values) / len(values), 1)


def peak_gib(given: Given) -> float | None:
    """The GPU memory that this process came to need."""
    return round(torch.cuda.max_memory_allocated() / GIB, 2) if given.device == "cuda" else None


# -- the machine -------------------------------------------------------------------------------------------------


def machine(given: Given) -> dict[str, Any]:
    """What it is, and the three speeds that everything else is made of."""
    found: dict[str, Any] = {"name": hardware(given.device), "count": 1, "shape": given.shape_name}
    if given.device == "cuda":
        free, total = torch.cuda.mem_get_info()
        found |= {
            "name": torch.cuda.get_device_name(),
            "count": torch.cuda.device_count(),
            "memory_gib": round(total / GIB, 1),
            "free_gib": round(free / GIB, 1),
            "capability": ".".join(map(str, torch.cuda.get_device_capability())),
            "driver": driver(),
            "cuda": torch.version.cuda or torch.version.hip,
            "shape": shape_that_fits(free / GIB) if given.shape_name == "auto" else given.shape_name,
        }
    elif given.shape_name == "auto":
        found["shape"] = "tiny"
    found |= {"supported": supported(given.device), "dtype": given.half, "cores": len(os.sched_getaffinity(0))}
    found |= {"c_compiler": shutil.which("cc") or shutil.which("gcc")}  # torch.compile's kernels are launched through C
    found |= {"code": revision(), "libraries": {name: version(name) for name in LIBRARIES}}
    return found | speeds(given)


def driver() -> str | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30)
    return (done.stdout.split("\n")[0].strip() or None) if done.returncode == 0 else None


def shape_that_fits(free_gib: float) -> str:
    """The largest. Raises PipelineError where there is no room for any but the tiny one."""
    fitting = [name for name, shape in SHAPES.items() if 0 < shape.memory <= free_gib]
    if not fitting:
        raise PipelineError(
            f"{free_gib:.1f} GiB of the GPU's memory are free, and the smallest shape that says something wants "
            f"{SHAPES['1b'].memory}: end what else runs there, or try --shape tiny, which only shows that all parts run"
        )
    return fitting[0]


def speeds(given: Given) -> dict[str, float]:
    """A large matrix product's, and those of copies in the device's memory and from there to the host."""
    width = 8192 if given.device == "cuda" else 256
    one = torch.randn(width, width, device=given.device, dtype=DTYPES[given.half])
    other = torch.empty_like(one)

    def seconds(work: Callable[[], Any]) -> float:
        work()
        begin = now(given.torch_device)
        for _ in range(10):
            work()
        return (now(given.torch_device) - begin) / 10

    size = one.nbytes
    figures = {
        "matmul_tflops": 2 * width**3 / seconds(lambda: one @ other) / 1e12,
        "copy_gb_per_s": 2 * size / seconds(lambda: other.copy_(one)) / 1e9,
        "to_host_gb_per_s": size / seconds(lambda: one.cpu()) / 1e9,
    }
    return {name: float(f"{value:.3g}") for name, value in figures.items()}


# -- what things cost --------------------------------------------------------------------------------------------


def dump(given: Given) -> dict[str, Any]:
    """Tokens a second of the whole dump (forward, transfer, writing, hashing) beside the bare forward of its
    batches.
    """
    recipe = given.recipe()
    tasks, folder = dump_tasks(recipe, given.shape), given.folder / "shards"
    folder.mkdir(exist_ok=True)
    methods = Methods(recipe, folder, tasks)
    tokens = sum(len(document.input_ids) for task in tasks for document in task.documents)

    def rate(way: Callable[[], None]) -> float:
        begin = time.perf_counter()
        way()
        return tokens / (time.perf_counter() - begin)

    found = in_turns({name: partial(rate, getattr(methods, name)) for name in ("dump", "bare")}, given.shape.turns)
    rows = sum(pa.ipc.open_file(path).num_record_batches for path in folder.glob("*.arrow"))
    if rows != given.shape.documents:  # those whose states are not finite are left out of a shard
        raise PipelineError(
            f"{given.shape.documents - rows} of {given.shape.documents} dialogues have no finite states"
        )
    shutil.rmtree(folder)
    figures = {"tokens_per_s": mean(found["dump"]), "forward_tokens_per_s": mean(found["bare"])}
    return figures | ratio(found["dump"], found["bare"]) | {"turns": len(found["dump"]), "peak_gib": peak_gib(given)}


def training(draft: str, given: Given) -> dict[str, Any]:
    """Tokens a second of training steps beside the same forward and backward on features that lie ready."""
    start_distributed()
    recipe = given.recipe()
    if not recipe.features_dir.exists():
        write_random_features(recipe, given.shape)
    ways = {name: Way(recipe, draft, name, given.folder / "engines") for name in ("step", "bare")}
    waits = []

    def rate(name: str) -> float:
        seconds = ways[name].turn(0, STEPS)
        if name == "step":
            waits.append(ways[name].waited / seconds)
        return ways[name].tokens / seconds

    found = in_turns({name: partial(rate, name) for name in ways}, given.shape.turns)
    figures = {"tokens_per_s": mean(found["step"]), "bare_tokens_per_s": mean(found["bare"])}
    figures |= ratio(found["step"], found["bare"])
    figures |= {"turns": len(found["step"]), "data_wait_share": round(sum(waits[1:]) / len(waits[1:]), 4)}
    with torch.device("meta"):
        shaped = build(recipe.draft[draft], shapes_of(load_config(recipe.target)))
    figures |= {"parameters": parameter_count(shaped), "peak_gib": peak_gib(given)}
    if given.device == "cuda":  # what follows counts the peak anew
        figures["step_gib"] = round(ways["step"].peak_mb(STEPS) * 1e6 / GIB, 2)
        figures["formula_gib"] = round(step_bytes(recipe, shaped) / GIB, 2)
    return figures


def costs(given: Given) -> dict[str, Any]:
    """Verifying n tokens and a draft step of w nodes, eagerly."""
    recipe = given.recipe()
    target = Target(recipe.target, given.half)
    found = _costs(target, new_methods(recipe, target), given, SIZES)
    first = next(iter(found.values()))
    return {
        "context": given.shape.context,
        **_verifying(first),
        "draft_step_ms": {name: _ms(one.steps[0]) for name, one in found.items()},
        "draft_first_ms": {name: _ms({0: one.start})[0] for name, one in found.items()},
        "bookkeeping_ms": {name: _ms({0: one.rest})[0] for name, one in found.items()},
        "peak_gib": peak_gib(given),
    }


def compiled_costs(given: Given) -> dict[str, Any]:
    """Verifying n tokens, compiled. Every n is compiled by itself: as many of them as there is time for."""
    begin, recipe = time.monotonic(), given.recipe()
    target = Target(recipe.target, given.half)
    target.compile(**given.compiler)
    before = time.monotonic()
    _costs(target, {}, given, (1,))
    each = time.monotonic() - before
    tree, most = recipe.tree("eagle").nodes, given.shape.most
    left = 0.8 * given.seconds - (time.monotonic() - begin)
    order = list(dict.fromkeys([1, tree, most, *(n for n in (16, 4, 32, 8, 96, 2, 24, 48) if n < most)]))
    sizes = sorted(order[: 2 + max(0, int(left / each) - 1)])
    draft = {"eagle": new_methods(recipe, target)["eagle"]}
    found = _costs(target, draft, given, tuple(sizes))["eagle"]
    return {
        "context": given.shape.context,
        **_verifying(found),
        "compile_s": round(each, 1),
        "graphs_skipped": counters["inductor"].get("cudagraph_skips", 0),
        "peak_gib": peak_gib(given),
    }


def _costs(target: Target, methods: dict[str, Method], given: Given, sizes: tuple[int, ...]) -> dict[str, Costs]:
    prompt = list(range(5, 5 + given.shape.context))
    sampling = Sampling(16, frozenset())
    return measure_costs(target, methods, given.shape.context, given.shape.most, [sampling], prompt, sizes)


def _verifying(found: Costs) -> dict[str, Any]:
    return {"plain_ms": _ms({0: found.plain})[0], "verify_ms": _ms(found.verify)}


def _ms(seconds: dict[int, float]) -> dict[int, float]:
    return {size: round(1e3 * value, 3) for size, value in seconds.items()}


def demo(given: Given) -> dict[str, Any]:
    """The demo's recipe, from the dump to the release."""
    if given.device != "cuda":
        return {"skipped": "it is for GPUs: on a CPU, run make demo"}
    try:
        embedded.dialogues(), embedded.human_eval_prompts()
    except PipelineError as error:
        return {"skipped": str(error)}
    output = given.folder / "demo"
    command = [sys.executable, "-m", "pipeline", "run", str(DEMO), *override_arguments(demo_sets(output))]
    if children.call(command, os.environ, ROOT)[0]:
        raise PipelineError("the demo failed; its own message stands above")
    measured = read_report(output / "release" / REPORT)
    kept = ("benchmark", "temperature", "draft", "tau", "speedup")
    results = [{key: one[key] for key in kept} | {"passed": one["gate"]["passed"]} for one in measured["results"]]
    return {"passed": report.lossless(measured["results"]), "results": results, "table": measured["table"]}


def demo_sets(output: Path) -> list[str]:
    return [*DEMO_SETS, f"output={output}"]


PARTS: dict[str, Callable[[Given], dict[str, Any]]] = {
    "machine": machine,
    "lossless": lossless,
    "dump": dump,
    "train-eagle": partial(training, "eagle"),
    "train-jakiro": partial(training, "jakiro"),
    "costs": costs,
    "compiled": compiled_costs,
    "demo": demo,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--shape", choices=("auto", *SHAPES), required=True)
    parser.add_argument("--seconds", type=float, required=True)
    arguments = parser.parse_args()
    shape = arguments.shape
    for name in arguments.parts:
        begin = time.monotonic()
        found = PARTS[name](Given(arguments.folder, arguments.device, shape, arguments.seconds))
        shape = found.get("shape", shape)  # what the machine has room for
        write_json(arguments.folder / f"{name}.json", found | {"seconds": round(time.monotonic() - begin, 1)})


if __name__ == "__main__":
    entry.run(main)
