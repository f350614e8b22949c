"""The parts of `infra.check`, each a function that returns its figures. `infra.check` runs this file in child
processes, with FOLDER SHAPE SECONDS PART ... as arguments.

A part's figures are written to FOLDER/PART.json when it is finished; anything printed before is the process's own
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

from infra.check.kernels import measure_loss, measure_steps, measure_widths
from infra.check.lossless import measure_lossless
from infra.check.rounds import measure_rounds
from infra.check.shapes import (
    GIB,
    SHAPES,
    CheckSettings,
    device,
    native_dtypes,
    new_methods,
    random_documents,
)
from infra.check.timing import judge, peak_memory, time_call
from infra.check.training import measure_p_eagle, measure_training
from infra.plan import speeds as plan_speeds
from pipeline.artifacts.provenance import LIBRARIES, hardware, revision
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import write_json
from pipeline.decoding.generate import Sampling, decode_speculative
from pipeline.lm.attention import causal_mask
from pipeline.lm.model import DTYPES, Target
from pipeline.running import entry
from preprocess.dump.task import ShardTask

VERIFIED = (16, 4, 32, 8, 96, 2, 24, 48)  # tokens whose verification is timed, as far as there is time


# -- the machine -------------------------------------------------------------------------------------------------


def measure_machine(settings: CheckSettings) -> dict[str, Any]:
    """Describe the machine, and measure the three speeds that all other figures depend on."""
    figures: dict[str, Any] = {"name": hardware(device())}
    shape = "tiny" if settings.shape_name == "auto" else settings.shape_name
    if device() == "cuda":
        free, total = torch.cuda.mem_get_info()
        shape = shape_that_fits(free / GIB) if settings.shape_name == "auto" else settings.shape_name
        figures = {
            "name": torch.cuda.get_device_name(),
            "count": torch.cuda.device_count(),
            "memory_gib": round(total / GIB, 1),
            "free_gib": round(free / GIB, 1),
            "driver": driver_version(),
            "cuda": torch.version.cuda or torch.version.hip,
        }
    figures |= {"shape": shape, "dtype": settings.half_dtype, "cores": len(os.sched_getaffinity(0))}
    figures |= {"dtypes_of_its_own": ["float32", *(dtype for dtype, native in native_dtypes().items() if native)]}
    figures |= {
        "c_compiler": shutil.which("cc") or shutil.which("gcc")
    }  # torch.compile's kernels are launched through C
    figures |= {"code": revision(), "libraries": {name: version(name) for name in LIBRARIES}}
    return figures | measure_speeds(settings)


def driver_version() -> str | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30)
    return (done.stdout.split("\n")[0].strip() or None) if done.returncode == 0 else None


def shape_that_fits(free_gib: float) -> str:
    """Return the largest shape that fits. Raise PipelineError if only the tiny one does."""
    fitting = [name for name, shape in SHAPES.items() if 0 < shape.min_gib <= free_gib]
    if not fitting:
        raise PipelineError(
            f"{free_gib:.1f} GiB of the GPU's memory are free, and the smallest meaningful shape requires "
            f"{SHAPES['1b'].min_gib}: stop other processes on it, or use --shape tiny, which only shows that all parts "
            "run"
        )
    return fitting[0]


def measure_speeds(settings: CheckSettings) -> dict[str, float]:
    """Measure a large matrix product, a copy within the device's memory, and a copy from there to the host."""
    width = 8192 if device() == "cuda" else 256
    matrix = torch.randn(width, width, device=device(), dtype=DTYPES[settings.half_dtype])
    second = torch.empty_like(matrix)
    figures = {
        "matmul_tflops": 2 * width**3 / time_call(lambda: matrix @ second) / 1e12,
        "copy_gb_per_s": 2 * matrix.nbytes / time_call(lambda: second.copy_(matrix)) / 1e9,
        "to_host_gb_per_s": matrix.nbytes / time_call(lambda: matrix.cpu()) / 1e9,
    }
    return {name: float(f"{value:.3g}") for name, value in figures.items()}


# -- what things cost --------------------------------------------------------------------------------------------


def measure_dump(settings: CheckSettings, *overrides: str) -> dict[str, Any]:
    """Measure the tokens/s of a dump worker with writing, and the plan's figure, which excludes writing."""
    recipe, folder = settings.recipe(), settings.folder / "shards"
    if overrides:
        recipe = settings.recipe_of(settings.folder / "target", *overrides)
    folder.mkdir(exist_ok=True)
    dialogues = random_documents(recipe, settings.shape)
    tasks = [ShardTask("train", index, dialogues[index::2]) for index in (0, 1)]
    worker = plan_speeds.dump_worker(recipe, folder)
    seconds = time_call(lambda: [worker.work(task) for task in tasks])
    rows = sum(pa.ipc.open_file(path).num_record_batches for path in folder.glob("*.arrow"))
    if rows != len(dialogues):  # dialogues with states that are not finite are left out of a shard
        raise PipelineError(f"{len(dialogues) - rows} of {len(dialogues)} dialogues have no finite states")
    shutil.rmtree(folder)
    tokens = sum(len(document.input_ids) for document in dialogues)
    bare = plan_speeds.worker_speed(worker, dialogues)
    figures = {"tokens_per_s": round(tokens / seconds, 1), "bare_tokens_per_s": round(bare, 1)}
    return figures | judge({"a dump's speed over bare": (tokens / seconds / bare, ">=", 0.9)}) | peak_memory()


def measure_costs(settings: CheckSettings) -> dict[str, Any]:
    """Time the verification of n tokens, and each part of a round of each draft's tree, eagerly."""
    recipe = settings.recipe()
    target = Target(recipe.target, settings.half_dtype)
    figures = _time_verification(settings, target, sorted(_verified_sizes(settings)))
    prompt, sampling = list(range(5, 5 + settings.shape.context)), Sampling(16, frozenset())
    for name, method in new_methods(recipe, target).items():
        decode_speculative(target, method, prompt, sampling)  # warms up
        answer = decode_speculative(target, method, prompt, sampling, exact_split=True)
        split = answer.split | {"rest": answer.seconds - sum(answer.split.values())}
        rounds = answer.acceptance.passes
        figures[f"{name}_round_ms"] = {part: round(1e3 * took / rounds, 3) for part, took in split.items()}
    return figures | peak_memory()


def measure_compiled_costs(settings: CheckSettings) -> dict[str, Any]:
    """Time the verification of n tokens, compiled. Each n is compiled separately, as many as the time limit allows."""
    begin, recipe = time.monotonic(), settings.recipe()
    target = Target(recipe.target, settings.half_dtype)
    target.compile(**settings.compiler)
    before = time.monotonic()
    _time_verification(settings, target, [1])
    each = time.monotonic() - before
    left = 0.8 * settings.seconds - (time.monotonic() - begin)
    figures = _time_verification(
        settings, target, sorted(_verified_sizes(settings)[: 2 + max(0, int(left / each) - 1)])
    )
    skipped = counters["inductor"].get("cudagraph_skips", 0)
    return figures | {"compile_s": round(each, 3), "graphs_skipped": skipped} | peak_memory()


def _verified_sizes(settings: CheckSettings) -> list[int]:
    """Return the numbers of tokens whose verification is timed, the most important ones first."""
    most = settings.shape.max_verified
    return list(dict.fromkeys([1, settings.recipe().tree("eagle").nodes, most, *(n for n in VERIFIED if n < most)]))


@torch.inference_mode()
def _time_verification(settings: CheckSettings, target: Target, sizes: list[int]) -> dict[str, Any]:
    """Measure the milliseconds of a token of plain decoding, and of verifying each size, after the shape's context."""
    context, device = settings.shape.context, target.device
    tokens, cache = (
        torch.arange(context, device=device) % 1000 + 5,
        target.new_cache(context + settings.shape.max_verified),
    )
    target.forward(tokens, cache)

    def pass_of(size: int, *tree: Any) -> None:
        target.head(target.forward(tokens[:size], cache, *tree).final_ND).argmax(-1).tolist()
        cache.keep(context)

    def verify(size: int) -> None:
        pass_of(size, torch.arange(size, device=device) + context, causal_mask(context, size, device), size)

    verified = {size: round(1e3 * time_call(partial(verify, size)), 3) for size in sizes}
    return {"context": context, "plain_ms": round(1e3 * time_call(partial(pass_of, 1)), 3), "verify_ms": verified}


FOUR_STATES = ('draft.eagle3={kind="eagle3"}', "features.stored_dtype=float8_e4m3fn")
PARTS: dict[str, Callable[[CheckSettings], dict[str, Any]]] = {
    "machine": measure_machine,
    "lossless": measure_lossless,
    "widths": measure_widths,
    "steps": measure_steps,
    "rounds": measure_rounds,
    **{f"train-{name}": partial(measure_training, name) for name in ("eagle", "jakiro", "eagle3", "dflash")},
    "dump": measure_dump,
    "dump-float8": lambda settings: measure_dump(settings, *FOUR_STATES),
    "costs": measure_costs,
    "loss": measure_loss,
    "p-eagle": measure_p_eagle,
    "compiled": measure_compiled_costs,
}


def main() -> None:
    place, shape, seconds, *names = sys.argv[1:]
    folder = Path(place)
    for name in names:
        begin = time.monotonic()
        figures = PARTS[name](CheckSettings(folder, shape, float(seconds)))
        shape = figures.get("shape", shape)  # the largest one that fits
        write_json(folder / f"{name}.json", figures | {"seconds": round(time.monotonic() - begin, 1)})


if __name__ == "__main__":
    entry.run(main)
