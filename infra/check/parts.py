"""The parts of `infra.check`, each a function that returns its figures. `infra.check` starts this file in processes of
their own, with FOLDER SHAPE SECONDS PART ... as arguments.

A part's figures are written to FOLDER/PART.json when it is finished; what it says on the way is the process's own
output.
"""

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

from infra.check.lossless import lossless
from infra.check.shapes import GIB, SHAPES, Given, device, documents, new_methods, supported, write_random_features
from infra.plan import speeds as plan_speeds
from infra.plan.memory import step_bytes
from pipeline.artifacts.features import feature_spec
from pipeline.artifacts.provenance import LIBRARIES, hardware, revision
from pipeline.basics.accelerator import now
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import write_json
from pipeline.decoding.generate import Sampling, speculative
from pipeline.drafts import build, objective_of, parameter_count
from pipeline.drafts.parts.layers import shapes_of
from pipeline.features.shards import FeatureStore
from pipeline.lm.attention import behind
from pipeline.lm.model import DTYPES, Target, load_config, load_embed_head
from pipeline.running import entry
from preprocess.dump.task import ShardTask
from train.engine.engine import Engine, start_distributed
from train.input.data import Batches
from train.loop import new_draft

TIMES = 10  # that what is timed is done, behind one that warms up
STEPS = 20  # of training
VERIFIED = (16, 4, 32, 8, 96, 2, 24, 48)  # tokens whose verification is timed, as far as there is time


def seconds_of(work: Callable[[], Any]) -> float:
    """Mean seconds of a call, of `TIMES` behind one that warms up."""
    work()
    begin = now(torch.device(device()))
    for _ in range(TIMES):
        work()
    return (now(torch.device(device())) - begin) / TIMES


def peak() -> dict[str, float]:
    """The GPU memory that this process came to need."""
    return {"peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 2)} if device() == "cuda" else {}


# -- the machine -------------------------------------------------------------------------------------------------


def machine(given: Given) -> dict[str, Any]:
    """What it is, and the three speeds that everything else is made of."""
    found: dict[str, Any] = {"name": hardware(device())}
    shape = "tiny" if given.shape_name == "auto" else given.shape_name
    if device() == "cuda":
        free, total = torch.cuda.mem_get_info()
        shape = shape_that_fits(free / GIB) if given.shape_name == "auto" else given.shape_name
        found = {
            "name": torch.cuda.get_device_name(),
            "count": torch.cuda.device_count(),
            "memory_gib": round(total / GIB, 1),
            "free_gib": round(free / GIB, 1),
            "driver": driver(),
            "cuda": torch.version.cuda or torch.version.hip,
        }
    found |= {"shape": shape, "dtype": given.half, "cores": len(os.sched_getaffinity(0))}
    found |= {"dtypes_of_its_own": ["float32", *(dtype for dtype, known in supported().items() if known)]}
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
    width = 8192 if device() == "cuda" else 256
    one = torch.randn(width, width, device=device(), dtype=DTYPES[given.half])
    other = torch.empty_like(one)
    figures = {
        "matmul_tflops": 2 * width**3 / seconds_of(lambda: one @ other) / 1e12,
        "copy_gb_per_s": 2 * one.nbytes / seconds_of(lambda: other.copy_(one)) / 1e9,
        "to_host_gb_per_s": one.nbytes / seconds_of(lambda: one.cpu()) / 1e9,
    }
    return {name: float(f"{value:.3g}") for name, value in figures.items()}


# -- what things cost --------------------------------------------------------------------------------------------


def dump(given: Given) -> dict[str, Any]:
    """Tokens a second of a dump worker, its writing included, and the plan's, which leaves that out."""
    recipe, folder = given.recipe(), given.folder / "shards"
    folder.mkdir(exist_ok=True)
    found = documents(recipe, given.shape)
    tasks = [ShardTask("train", index, found[index::2]) for index in (0, 1)]
    worker = plan_speeds.dump_worker(recipe, folder)
    seconds = seconds_of(lambda: [worker.work(task) for task in tasks])
    rows = sum(pa.ipc.open_file(path).num_record_batches for path in folder.glob("*.arrow"))
    if rows != len(found):  # those whose states are not finite are left out of a shard
        raise PipelineError(f"{len(found) - rows} of {len(found)} dialogues have no finite states")
    shutil.rmtree(folder)
    tokens = sum(len(document.input_ids) for document in found)
    return _compared(tokens / seconds, plan_speeds.worker_speed(worker, found)) | peak()


def training(name: str, given: Given) -> dict[str, Any]:
    """Tokens a second of training steps, their reading and collating included, and the plan's, which leaves that out;
    on a GPU, a step's memory beside what the plan's formula says.
    """
    start_distributed()
    recipe = given.recipe()
    if not recipe.paths.features.exists():
        write_random_features(recipe, given.shape)
    store = FeatureStore(recipe.paths.shards, "train", feature_spec(recipe))
    draft = new_draft(recipe, name, load_embed_head(recipe.target), store)
    objective = objective_of(draft.config)
    batches = Batches(store, recipe.train, objective, draft.needs, recipe.seed, 0, 1)
    parts = batches.accumulation, batches.order.steps, given.folder / name, name
    engine = Engine(draft, objective.loss, recipe.train, *parts)
    draft.move_embed_head(engine.device, engine.dtype)
    ready = batches.from_step(0, engine.device)
    engine.advance(next(ready)[1])  # brings the optimizer's moments
    if device() == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    tokens, waited, begin = 0, 0.0, now(engine.device)
    for _ in range(STEPS):
        asked = time.perf_counter()
        _, some = next(ready)
        waited += time.perf_counter() - asked
        engine.advance(some)
        tokens += sum(batch.tokens_BT.numel() for batch in some)
    seconds = now(engine.device) - begin
    figures = {"waiting_for_data": round(waited / seconds, 4), "parameters": parameter_count(draft)}
    if device() == "cuda":
        with torch.device("meta"):
            shaped = build(recipe.draft[name], shapes_of(load_config(recipe.target)))
        figures["step_gib"] = round((torch.cuda.max_memory_allocated() - before) / GIB, 2)
        figures["formula_gib"] = round(step_bytes(recipe, shaped) / GIB, 2)
    length = tokens // (STEPS * recipe.train.global_batch)
    planned = plan_speeds.training_speed(recipe, name, length, seconds=5 if device() == "cuda" else 0)
    return _compared(tokens / seconds, planned) | figures | peak()


def _compared(rate: float, planned: float) -> dict[str, float]:
    return {
        "tokens_per_s": round(rate, 1),
        "planned_tokens_per_s": round(planned, 1),
        "ratio": round(rate / planned, 4),
    }


def costs(given: Given) -> dict[str, Any]:
    """Verifying n tokens, and a round of each draft's tree by its parts, eagerly."""
    recipe = given.recipe()
    target = Target(recipe.target, given.half)
    figures = _verifying(given, target, sorted(_sizes(given)))
    prompt, sampling = list(range(5, 5 + given.shape.context)), Sampling(16, frozenset())
    for name, method in new_methods(recipe, target).items():
        speculative(target, method, prompt, sampling)  # warms up
        answer = speculative(target, method, prompt, sampling, exact_split=True)
        split = answer.split | {"rest": answer.seconds - sum(answer.split.values())}
        rounds = answer.acceptance.passes
        figures[f"{name}_round_ms"] = {part: round(1e3 * took / rounds, 3) for part, took in split.items()}
    return figures | peak()


def compiled_costs(given: Given) -> dict[str, Any]:
    """Verifying n tokens, compiled. Every n is compiled by itself: as many of them as there is time for."""
    begin, recipe = time.monotonic(), given.recipe()
    target = Target(recipe.target, given.half)
    target.compile(**given.compiler)
    before = time.monotonic()
    _verifying(given, target, [1])
    each = time.monotonic() - before
    left = 0.8 * given.seconds - (time.monotonic() - begin)
    figures = _verifying(given, target, sorted(_sizes(given)[: 2 + max(0, int(left / each) - 1)]))
    skipped = counters["inductor"].get("cudagraph_skips", 0)
    return figures | {"compile_s": round(each, 1), "graphs_skipped": skipped} | peak()


def _sizes(given: Given) -> list[int]:
    """Numbers of tokens whose verification is timed, those that matter most first."""
    most = given.shape.most
    return list(dict.fromkeys([1, given.recipe().tree("eagle").nodes, most, *(n for n in VERIFIED if n < most)]))


@torch.inference_mode()
def _verifying(given: Given, target: Target, sizes: list[int]) -> dict[str, Any]:
    """Milliseconds of a token of plain decoding, and of verifying so many, behind the shape's context."""
    context, device = given.shape.context, target.device
    tokens, cache = torch.arange(context, device=device) % 1000 + 5, target.new_cache(context + given.shape.most)
    target.forward(tokens, cache)

    def pass_of(size: int, *tree: Any) -> None:
        target.head(target.forward(tokens[:size], cache, *tree).final_ND).argmax(-1).tolist()
        cache.keep(context)

    def verify(size: int) -> None:
        pass_of(size, torch.arange(size, device=device) + context, behind(context, size, device), size)

    verified = {size: round(1e3 * seconds_of(partial(verify, size)), 3) for size in sizes}
    return {"context": context, "plain_ms": round(1e3 * seconds_of(partial(pass_of, 1)), 3), "verify_ms": verified}


PARTS: dict[str, Callable[[Given], dict[str, Any]]] = {
    "machine": machine,
    "lossless": lossless,
    "dump": dump,
    "train-eagle": partial(training, "eagle"),
    "train-jakiro": partial(training, "jakiro"),
    "costs": costs,
    "compiled": compiled_costs,
}


def main() -> None:
    place, shape, seconds, *names = sys.argv[1:]
    folder = Path(place)
    for name in names:
        begin = time.monotonic()
        found = PARTS[name](Given(folder, shape, float(seconds)))
        shape = found.get("shape", shape)  # what the machine has room for
        write_json(folder / f"{name}.json", found | {"seconds": round(time.monotonic() - begin, 1)})


if __name__ == "__main__":
    entry.run(main)
