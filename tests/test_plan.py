"""Tests of the plan of a run: against numbers computed by hand, and against the dump that follows."""

import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from infra.plan import engine, speeds
from infra.plan.__main__ import (
    SPEEDS,
    count_answers,
    find_warnings,
    format_disk_warning,
    make_plan,
    warn_of_experts,
    warn_of_idle_gpus,
)
from infra.plan.memory import (
    TEXT_ROW_BYTES,
    activation_bytes,
    all_positions,
    count_shards_ahead,
    disk_bytes,
    evaluation_bytes,
    frame_bytes,
    rank_bytes,
    simulate_window,
    step_bytes,
)
from pipeline.basics.errors import PipelineError
from pipeline.basics.progress import format_duration
from pipeline.decoding.config import TreeConfig
from pipeline.drafts import TrainedDraft, build, parameter_count
from pipeline.drafts.eagle3 import Eagle3Config
from pipeline.drafts.jakiro import JakiroConfig, JakiroOnEagle3Config
from pipeline.drafts.native.skipper import SkipperConfig
from pipeline.drafts.parallel.dflash import DFlashConfig
from pipeline.drafts.parallel.dspark import DSparkConfig
from pipeline.drafts.parallel.p_eagle import PEagleConfig
from pipeline.drafts.parts.layers import draft_shapes
from pipeline.features.batch import Batch
from pipeline.features.schema import FP8, FeatureSpec, TextRow, row_dtype, token_bytes
from pipeline.features.shards import write_features
from pipeline.lm.model import DTYPES, count_parameters, load_config
from pipeline.recipe.load import load_recipe
from pipeline.recipe.recipe import Recipe
from pipeline.recipe.sections import BenchmarkConfig, TrainConfig
from tests.engines import environment, left_of, started
from tests.kit import ROOT, dump_here, recipe_tree, run_warm, wait_until, write_recipe, write_sharegpt


def changed(recipe: Recipe, section: str, **keys) -> Recipe:
    return recipe.model_copy(update={section: getattr(recipe, section).model_copy(update=keys)})


def planned(recipe: Recipe, config=None, **shapes) -> TrainedDraft:
    with torch.device("meta"):
        return build(config or recipe.draft["jakiro"], {**draft_shapes(load_config(recipe.target)), **shapes})


def test_steps_are_whole_global_batches_of_dialogues_or_of_packed_rows(tiny_recipe):
    recipe = changed(tiny_recipe, "train", epochs=3, global_batch=8, micro_batch=4)
    assert recipe.train.steps(47, 2000, 900) == 5 * 3
    assert changed(recipe, "train", pack_tokens=100).train.steps(47, 2000, 900) == 2 * 3
    assert changed(recipe, "train", tokens=1400).train.steps(47, 2000, 1000) == 5 * 1.4


# -- the table -------------------------------------------------------------------------------------------------------


@pytest.mark.real
def test_the_planned_disk_and_tokens_are_those_of_the_dump(tiny_target, tmp_path):
    tree = recipe_tree(tiny_target, write_sharegpt(tmp_path / "data.json", 200), tmp_path / "run")
    tree["data"] |= {"max_tokens": 5000, "validation_dialogues": 1000}
    tree["features"]["batch_tokens"] = 256
    recipe = write_recipe(tree, tmp_path / "recipe")
    plan = [sys.executable, "-m", "infra.plan", str(recipe), "--train-speed", "5000"]
    done = run_warm(plan)
    assert done.returncode == 0, done.stderr
    as_json = run_warm([*plan, "--dump-speed", "5000", "--decode-ms", "5", "--json"])
    figures = json.loads(as_json.stdout)
    assert "WARNING" not in done.stdout
    assert re.fullmatch(
        r"The run takes about .+; its features take 0\.\d{3} GB of disk\.", done.stdout.splitlines()[-1]
    )
    stages = ("dump", "train: eagle", "train: jakiro", "eval")
    assert all(figures[f"{stage}: hours"] > 0 and figures[f"{stage}: memory"] > 0 for stage in stages)
    for row in ("| dump | disk |", "| train | eagle: time |", "| eval | memory |", "| all | time |"):
        assert row in done.stdout
    assert "5,000 tokens/s a rank, as given" in done.stdout and "measured on" in done.stdout
    manifest = dump_here(load_recipe(recipe))
    tokens = sum(shard.tokens for shard in manifest.shards)
    size = sum(file.bytes for file in (*manifest.shards, *manifest.text.values()))
    assert abs(figures["dump: tokens"] / tokens - 1) < 0.1
    assert abs(figures["dump: disk"] / size - 1) < 0.2  # so small shards are mostly frame


def test_the_dump_speed_is_measured_over_full_batches_within_the_time_limit(monkeypatch):
    """The worker takes 0.1 s for a token, and yields the rows of a batch together after it."""
    clock, sizes = [0.0], []

    class Worker:
        def batches(self, documents, rejected):
            return [documents]

        def rows(self, batches, texts, rejected):
            for batch in batches:
                clock[0] += sum(len(document.input_ids) for document in batch) / 10
                sizes.append(len(batch))
                yield from (SimpleNamespace(tokens=len(document.input_ids)) for document in batch)

    monkeypatch.setattr(speeds.time, "perf_counter", lambda: clock[0])
    documents = [SimpleNamespace(input_ids=range(5 + number % 3)) for number in range(99)]
    assert speeds.worker_speed(Worker(), documents) == pytest.approx(10)
    assert sizes == [1, 2, 4, 8, 16] and clock[0] < speeds.PROBE
    assert speeds.worker_speed(Worker(), documents, 1e9) == pytest.approx(10)
    assert speeds.worker_speed(Worker(), documents[:3], 0) == pytest.approx(10)


def test_a_probe_ends_after_its_time_with_what_it_measured(monkeypatch):
    clock = iter(range(0, 10_000, 8))  # seconds: each call takes eight, or what comes between
    monkeypatch.setattr(speeds, "synchronized_time", lambda device: next(clock))
    calls: list[int] = []
    assert speeds.mean_seconds(lambda: calls.append(1), torch.device("cpu"), 4, 5) == 8
    assert len(calls) == 3  # 24 s, and the last one counts: warm ones are better than none
    quick = iter(number / 100 for number in range(100_000))
    monkeypatch.setattr(speeds, "synchronized_time", lambda device: next(quick))
    calls.clear()
    assert speeds.mean_seconds(lambda: calls.append(1), torch.device("cpu"), 4, 20, calls=52) == pytest.approx(0.01)
    assert len(calls) == 52
    calls.clear()
    speeds.mean_seconds(lambda: calls.append(1), torch.device("cpu"), 2, 0.095)
    assert len(calls) == 12


H200 = {  # tokens/s of (a step, bare micro-batches): docs/results/gpu.md
    "eagle": (59_090, 101_313),
    "jakiro": (50_768, 74_067),
    "eagle, another machine": (84_780, 84_780 / 0.71),
    "jakiro, another machine": (58_063, 58_063 / 0.71),
}


@pytest.mark.parametrize("training", H200)
def test_the_planned_speed_of_a_step_is_within_a_quarter_of_an_h200s(training):
    """Two rows of 2,048 tokens, with hidden states and labels of 4,096 values in bfloat16. The bare speed includes
    AdamW after each micro-batch.
    """
    measured, bare = H200[training]
    accumulation = load_recipe(ROOT / "infra/recipes/llama3.1-instruct-8b.toml").train.accumulation(1)
    times = speeds.MicroBatchTimes(4096, 4096 * 2 * 4096 * 2, 4096 / bare, 0.0)
    planned = times.step_speed(accumulation)
    print(f"{training}: planned {planned:,.0f} tokens/s, measured {measured:,}, ratio {planned / measured:.2f}")
    assert accumulation == 8 and planned == pytest.approx(measured, rel=0.25)


def test_the_planned_hours_of_a_dump_are_within_a_quarter_of_an_h200s(tiny_recipe):
    """A worker's bare speed was 28,377 tokens/s, and with writing 25,040; on another machine 0.82 of bare."""
    figures = make_plan(tiny_recipe, {"dump-speed": 28_377.0, "train-speed": 1.0, "decode-ms": 1.0}).figures
    planned = figures["dump: hours"] * tiny_recipe.features.workers
    ratios = [planned / (figures["dump: tokens"] / speed / 3600) for speed in (25_040, 0.82 * 28_377)]
    print(f"dump: planned over measured hours {ratios[0]:.2f}, {ratios[1]:.2f}")
    assert ratios == pytest.approx([1, 1], abs=0.25)


def test_a_step_has_one_step_of_adamw_and_the_measured_times_are_its_parts(tiny_recipe, monkeypatch):
    monkeypatch.setattr(speeds, "mean_seconds", lambda work, *_: 3.0 if work.__name__ == "forward_backward" else 2.0)
    times = speeds.time_training(changed(tiny_recipe, "train", micro_batch=4), "jakiro", 25)
    assert times == speeds.MicroBatchTimes(100, 0, 3.0, 2.0)
    assert (times.bare_speed, times.step_speed(1), times.step_speed(4)) == (100 / 5, 100 / 5, 400 / 14)


def test_the_planned_bytes_and_passes_of_a_window(tiny_recipe):
    """Two drafts train for two epochs; with eight dialogues a shard there are twelve shards in four windows."""
    recipe = changed(changed(tiny_recipe, "train", window=3, epochs=2), "features", keep="window")
    total = disk_bytes(recipe, 96, 9600)
    assert simulate_window(recipe, 96, 9600, 4800) == (pytest.approx(total / 2), 3.0)
    for shards, made in ((6, 3.0), (9, 1.75), (12, 1.0), (20, 1.0)):
        bound = changed(recipe, "features", disk_bytes=int(total * shards / 12) + 1)
        assert simulate_window(bound, 96, 9600, 4800) == (min(bound.features.disk_bytes, total), made)
    both = changed(changed(recipe, "train", together=True), "features", disk_bytes=int(total * 9 / 12) + 1)
    assert simulate_window(both, 96, 9600, 4800)[1] == 1.25  # one pass of two epochs; 1.75 of them one after the other
    assert simulate_window(recipe, 40, 4000, 2000)[0] == disk_bytes(recipe, 40, 4000)
    few = changed(changed(recipe, "train", window=1), "features", disk_bytes=int(total * 5 / 12))  # of 1,000 shards
    assert simulate_window(few, 8000, 800_000, 400_000)[0] == few.features.disk_bytes
    with pytest.raises(PipelineError, match=r"disk_bytes=1,000, but the 6 shards that training may need at once"):
        simulate_window(changed(recipe, "features", disk_bytes=1000), 96, 9600, 4800)
    large = changed(changed(recipe, "train", window=None, tokens=10**9), "features", disk_bytes=None)
    assert simulate_window(large, 1e8, 1e10, 5e9) == (8e9, 0.4)  # a fifth of a pass, for each draft


def test_a_plan_of_a_window_has_the_workers_that_keep_up_with_training(tiny_recipe):
    """The dump has a tenth of training's speed; two drafts of an epoch each read states that are all computed again."""
    known_speeds = {"dump-speed": 100.0, "train-speed": 1000.0, "decode-ms": 36.0}
    recipe = changed(changed(tiny_recipe, "train", window=1, epochs=1, ranks=1), "features", keep="window")
    figures = make_plan(recipe, known_speeds).figures
    train_hours = figures["train: eagle: hours"] + figures["train: jakiro: hours"]
    assert figures["train: dump workers"] == math.ceil(figures["dump: hours"] / train_hours) == 9
    assert 0.9 < figures["train: working share"] < 1, "without padding it would be ten"
    assert figures["dump: hours"] > train_hours
    hours = {key.removesuffix(": hours"): value for key, value in figures.items() if key.endswith(": hours")}
    assert hours.pop("all") == pytest.approx(sum(hours.values()), abs=4e-6)  # on a CPU they share its cores
    elsewhere = make_plan(
        changed(changed(recipe, "target", device="cuda"), "train", together=True), known_speeds
    ).figures
    needs = (elsewhere[f"train: {name}: memory"] for name in recipe.to_train)
    assert elsewhere["train: memory of all"] == pytest.approx(sum(needs))
    assert elsewhere["all: hours"] == pytest.approx(elsewhere["dump: hours"] + hours["eval"], abs=2e-6)


def test_a_plan_warns_of_workers_that_wait_for_room_in_the_window(tiny_recipe):
    recipe = changed(changed(tiny_recipe, "train", window=1, epochs=1), "features", keep="window", workers=6)
    known_speeds = {"dump-speed": 100.0, "train-speed": 1000.0, "decode-ms": 36.0}

    def warnings(**train) -> list[str]:
        plan = make_plan(changed(recipe, "train", **train), known_speeds)
        return [line for line in find_warnings(plan) if "train.window = 3" in line]

    assert "2 are made at a time" in warnings()[0]
    assert not warnings(window=3)
    roomy = changed(recipe, "features", disk_bytes=10**9)
    assert count_shards_ahead(roomy, 96, 9600) == 12


@pytest.mark.parametrize(("dtype", "layers"), [("bfloat16", []), (FP8, [1, 4])])
def test_the_planned_bytes_of_a_row_are_those_of_the_files(tmp_path, dtype, layers):
    spec = FeatureSpec(32, dtype, "", "", "", "", auxiliary_layers=" ".join(map(str, layers)))
    states_TSD = torch.ones(9, 1 + len(layers), 32, dtype=row_dtype(dtype))
    states = [states_TSD[:, 0], states_TSD[:, 1:] if layers else None]
    row = TextRow("abcdefgh-0123", np.ones(9, np.int32), np.ones(9, np.uint8), *states)
    sizes = []
    for count in (10, 110):
        manifest = write_features(tmp_path / str(count), spec, {"train": [[row] * count]})
        sizes.append(sum(file.bytes for file in manifest.files))
    planned = frame_bytes(dtype, len(layers)) + TEXT_ROW_BYTES + 9 * token_bytes(dtype, 32, 1 + len(layers))
    assert (sizes[1] - sizes[0]) / 100 == pytest.approx(planned, rel=0.01)


def test_hours_on_a_missing_device_are_unknown_without_its_speed(tiny_recipe, monkeypatch):
    monkeypatch.setattr("pipeline.basics.accelerator.current_accelerator", lambda: None)
    known_speeds = {"dump-speed": 1000.0, "train-speed": 1000.0}
    recipe = changed(changed(tiny_recipe, "target", device="cuda"), "eval", repeats=2)
    missing = make_plan(recipe, {**known_speeds, "decode-ms": None})
    assert missing.rows[-1][1:3] == ["time", "unknown"] and missing.figures["eval: hours"] is None
    assert ["eval", "time", "unknown with 1 worker, 1 GPUs", "no such device here: give --decode-ms"] in missing.rows
    plan = make_plan(recipe, {**known_speeds, "decode-ms": 36.0})
    assert plan.figures["eval: hours"] == pytest.approx(24 * 8 * 0.036 / 3600, abs=1e-6)
    eight = make_plan(changed(recipe, "eval", workers=8, gpus_per_worker=2), {**known_speeds, "decode-ms": 36.0 * 8e3})
    assert eight.figures["eval: hours"] == pytest.approx(24 * 8 * 36 / 3600, abs=1e-6)
    assert ["eval", "time", "1.9 h with 8 workers, 16 GPUs"] in [row[:3] for row in eight.rows]
    spread = make_plan(changed(recipe, "target", device="spread"), {**known_speeds, "decode-ms": 36.0})
    assert ["eval", "time", "7 s with 1 worker, over all GPUs"] in [row[:3] for row in spread.rows]
    total = sum(plan.figures[f"{stage}: hours"] for stage in ("dump", "train: eagle", "train: jakiro", "eval"))
    assert plan.rows[-1] == ["all", "time", format_duration(3600 * total), "their sum"]


@pytest.mark.parametrize(
    ("gpus", "sections", "warned"),
    [
        (8, {"features": {"workers": 4}, "eval": {"workers": 1}}, ["features.workers = 8", "eval.workers = 8"]),
        (8, {"features": {"workers": 8}, "eval": {"workers": 4, "gpus_per_worker": 2}}, []),
        (8, {"features": {"workers": 8, "gpus_per_worker": 0.5}, "eval": {"workers": 8}}, ["features.workers = 16"]),
        (8, {"features": {"workers": 2, "gpus_per_worker": 3}, "eval": {"workers": 1, "gpus_per_worker": 5}}, []),
        (8, {"features": {"workers": 2, "gpus": (0, 1)}, "eval": {"workers": 8}}, []),
        (0, {"features": {"workers": 1}, "eval": {"workers": 1}}, []),
    ],
)
def test_a_plan_warns_of_gpus_that_stay_idle(tiny_recipe, monkeypatch, gpus, sections, warned):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: gpus)
    recipe = changed(tiny_recipe, "target", device="auto")
    for section, keys in sections.items():
        recipe = changed(recipe, section, **keys)
    lines = list(warn_of_idle_gpus(recipe))
    assert [line.rpartition("set ")[2] for line in lines] == warned
    assert list(warn_of_idle_gpus(changed(recipe, "target", device="cpu"))) == []


@pytest.mark.parametrize(
    ("config", "nodes", "warned"),
    [
        ({"num_experts": 128, "num_experts_per_tok": 8}, 60, "reads about 125 of the 128 experts.*take 16 times"),
        ({"n_routed_experts": 4, "num_experts_per_tok": 2}, 60, None),  # at most twice as many
        ({"num_experts": 8, "num_experts_per_tok": 4}, 3, None),
        ({"num_local_experts": 32, "num_experts_per_tok": 4}, 16, "reads about 28 of the 32 experts.*take 7 times"),
        ({"num_experts": None}, 60, None),
    ],
)
def test_a_plan_warns_of_trees_that_read_most_experts(tiny_recipe, monkeypatch, config, nodes, warned):
    monkeypatch.setattr("infra.plan.__main__.load_config", lambda _: SimpleNamespace(**config))
    recipe = changed(tiny_recipe, "eval", tree=TreeConfig(depth=2, top_k=8, nodes=nodes), methods={})
    lines = list(warn_of_experts(recipe))
    assert len(lines) == (warned is not None) and all(re.search(warned, line) for line in lines)


def test_the_disk_warning_does_not_propose_the_dtype_that_is_used():
    assert "stored_dtype='float8_e4m3fn'" in format_disk_warning("bfloat16")
    assert "stored_dtype" not in format_disk_warning("float8_e4m3fn")


def test_answers_of_all_methods_temperatures_and_turns(tiny_recipe, tmp_path):
    """Two drafts and plain decoding; 3 repeats at each of three temperatures; 2 + 3 questions."""
    path = tmp_path / "two-turns.jsonl"
    lines = [{"question_id": n, "category": "x", "turns": ["a"] * (1 + n)} for n in range(2)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    benchmarks = {"heldout": BenchmarkConfig(source="heldout", prompts=2), "mine": BenchmarkConfig(source=str(path))}
    changes = {"temperatures": [0.0, 0.7, 1.0], "repeats": 3, "benchmarks": benchmarks}
    assert count_answers(changed(tiny_recipe, "eval", **changes)) == (2 + 3) * (3 + 3 + 3) * 3


def test_ranks_default_to_the_gpus_of_the_recipe_or_the_machine():
    assert TrainConfig(ranks=2, gpus=[0, 1, 2]).ranks_of(8) == 2
    assert TrainConfig(gpus=[0, 1, 2]).ranks_of(8) == 3
    assert [TrainConfig().ranks_of(count) for count in (8, 0)] == [8, 1]


# -- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "stage", "ranks", "bytes_a_parameter"),
    [
        ("float32", 0, 1, 4 + 4 + 8),
        ("float32", 0, 4, 4 + 4 + 8),
        ("bfloat16", 0, 4, 2 + 2 + 12),
        ("float32", 1, 4, 4 + 4 + 2 + 4),  # ... + the bucket
        ("bfloat16", 1, 4, 2 + 2 + 4 + 3),
        ("bfloat16", 2, 4, 2 + 1 + 3 + 6),  # a bucket, and its copy in float32
        ("bfloat16", 3, 4, 0.5 + 1 + 3 + 4 + 2),  # ... + the whole weights of a validation
    ],
)
def test_memory_of_a_rank(tiny_recipe, dtype, stage, ranks, bytes_a_parameter):
    """The hidden size is 32; the target has 260 tokens, the draft 128 of them."""
    recipe, size = changed(tiny_recipe, "train", dtype=dtype, zero_stage=stage), 4 if dtype == "float32" else 2
    draft = planned(recipe)
    embed_head = (260 + 128) * 32 * size
    assert rank_bytes(recipe, draft, ranks) - step_bytes(recipe, draft) == pytest.approx(
        parameter_count(draft) * bytes_a_parameter + embed_head
    )


def test_memory_of_decoding_while_training(tiny_recipe):
    """The target is in memory next to a step if it decodes at every validation, else after the last step."""
    recipe = changed(tiny_recipe, "train", dtype="float32")
    draft = planned(recipe)
    kinds = ("never", "always", "last")
    never, always, last = (rank_bytes(changed(recipe, "train", decode=kind), draft, 1) for kind in kinds)
    decoding = (count_parameters(recipe.target) + parameter_count(draft)) * DTYPES[recipe.target.dtype].itemsize
    assert always == never + decoding
    assert last == never + max(0, decoding - step_bytes(recipe, draft))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_of_a_step(tiny_recipe, dtype):
    """Micro-batches have 4 x 159 inputs and two branches; a CPU takes 128 of their rows at a time, a GPU that this
    machine lacks as many as one of 80 GB.
    """
    recipe, size = changed(tiny_recipe, "train", dtype=dtype), 4 if dtype == "float32" else 2
    draft, tokens = planned(recipe), 4 * 159
    inputs = 2 * tokens * 32 * size + 32 * (tokens * size + 4 * (158 + 157) * (2 * size + 4 * 2))
    activations = activation_bytes(recipe, draft, recompute=False)
    assert step_bytes(recipe, draft) == activations + inputs + 128 * 128 * (2 * (size + 4) + 2 * (2 * size + 4))
    elsewhere = changed(recipe, "target", device="auto")
    assert step_bytes(elsewhere, draft) == activations + inputs + tokens * 128 * (2 * (size + 4) + 2 * (2 * size + 4))


FORWARDS = {
    "jakiro": JakiroConfig(vocabulary=128),
    "balanced": JakiroConfig(experts=8, contrast="none", balance_loss=0.01),
    "dflash": DFlashConfig(layers=2, block=4, anchors=40),
    "dspark": DSparkConfig(layers=2, block=4, anchors=40),
    "p-eagle": PEagleConfig(layers=2, depths=4),
    "skipper": SkipperConfig(sparsity=[0.0, 0.5]),
    "eagle3": Eagle3Config(ttt_steps=4),
    "eagle3, anchors": Eagle3Config(ttt_steps=4, anchors=20, window=64),
    "jakiro on eagle-3, anchors": JakiroOnEagle3Config(frame="eagle-3", ttt_steps=4, anchors=20),
}


@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize("recompute", [False, True])
def test_counted_activations_equal_those_of_a_real_forward(tiny_recipe, embed_head, name, recompute):
    recipe, config = changed(tiny_recipe, "train", micro_batch=2), FORWARDS[name]
    draft = build(config, draft_shapes(load_config(recipe.target)))
    draft.initialise(0)
    if config.vocabulary:
        draft.set_vocabulary(torch.arange(128))
    draft.bind(embed_head)
    draft.recompute = recompute
    hidden_BTD, tokens_BT = torch.randn(2, 159, 32), torch.zeros(2, 159, dtype=torch.long)
    states_BTSD = torch.randn(2, 159, len(draft.needs.auxiliary), 32)
    weights = (
        *draft.parameters(),
        *embed_head.decoder.parameters(),
        *embed_head.decoder.buffers(),
        embed_head.embedding_VD,
    )
    excluded = {x.data_ptr() for x in (*weights, hidden_BTD, states_BTSD)}
    sizes, tensors = {}, []

    def keep(tensor):
        tensors.append(tensor)
        if tensor.untyped_storage().data_ptr() not in excluded:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        positions = all_positions(config, 2, 159)
        draft(Batch(hidden_BTD, tokens_BT, positions, {}, None, states_BTSD, tokens_BT, hidden_BTD))
    counted = activation_bytes(recipe, planned(recipe, config), recompute)
    assert counted == pytest.approx(sum(sizes.values()), rel=0.02)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [None, 32])
def test_a_training_time_tests_activations_grow_with_the_length(tiny_recipe, packed, window):
    """Not with its square: a mask over the keys of all steps would."""

    def activations(count):
        recipe = changed(changed(tiny_recipe, "data", max_length=count + 1), "train", micro_batch=1)
        recipe = changed(recipe, "train", pack_tokens=count) if packed else recipe
        return activation_bytes(recipe, planned(recipe, Eagle3Config(ttt_steps=4, window=window)), recompute=False)

    assert 7.5 * activations(512) < activations(4096) < 8.2 * activations(512)


def test_further_steps_after_anchors_keep_little(tiny_recipe):
    """Each the activations of its 20 rows, and keys and values of the first step next to its own."""

    def activations(steps, anchors=None):
        draft = planned(tiny_recipe, Eagle3Config(ttt_steps=steps, anchors=anchors))
        return activation_bytes(tiny_recipe, draft, recompute=False)

    first, recomputed = activations(1), changed(tiny_recipe, "train", recompute=True)
    draft = planned(tiny_recipe, Eagle3Config(ttt_steps=7, anchors=20))
    kept = activation_bytes(tiny_recipe, draft, recompute=True)
    more = step_bytes(recomputed, draft) - step_bytes(tiny_recipe, draft)
    assert more >= kept + first - activations(7, 20), "the first step is recomputed whole"
    share = (activations(7, 20) - first) / (activations(7) - first)
    print(f"20 anchors among 159 inputs keep {share:.3f} of the bytes")
    assert share < 0.3


def test_memory_of_evaluation(tiny_recipe):
    """All is in float32; packing keeps both forms of the weights for a while."""
    weights = 4 * count_parameters(tiny_recipe.target)
    plain = evaluation_bytes(tiny_recipe)
    cache = 2 * 2 * 2 * 8 * (160 + 8) * 4  # keys and values of 2 layers, 2 heads of 8
    assert weights + cache < plain < weights + cache + 1e6
    assert evaluation_bytes(changed(tiny_recipe, "eval", pack_linears=True)) == plain + weights


# -- engines ---------------------------------------------------------------------------------------------------------

LLAMA_70B = {"model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
LLAMA_70B |= {"num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False}


def by_engine(recipe: Recipe, folder: Path, config: dict, **keys) -> Recipe:
    """Return the recipe with vLLM, and a target that has only a configuration."""
    (folder / "config.json").write_text(json.dumps(config))
    target = {
        "model": str(folder),
        "dtype": "bfloat16",
        "engine": "vllm",
        "engine_python": "/no/python",
        "device": "auto",
    }
    return changed(changed(recipe, "target", **target, **keys), "features", auxiliary_layers=[2, 40, 77], workers=2)


@pytest.mark.parametrize(("parallel", "keys_values"), [(4, 2 * 80 * 2 * 128 * 2), (16, 2 * 80 * 1 * 128 * 2)])
def test_a_gpu_of_an_engine_is_divided_as_vllm_divides_it(tiny_recipe, tmp_path, parallel, keys_values):
    """Eight key-value heads are shared by 4 or by 16 GPUs; states are on each GPU. With four GPUs vLLM 0.32 itself
    allocates 2,359,296 bytes for a block of 16 tokens.
    """
    recipe = by_engine(tiny_recipe, tmp_path, LLAMA_70B)
    weights = 2 * 128256 * 8192 + 80 * (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 2 * 8192) + 8192
    step = 16384 * (12 * 8192 + 3 * 28672 / parallel) * 2
    stored = engine.weight_bytes(recipe.target)
    usage = engine.engine_memory(recipe, 80e9, parallel, stored)
    assert (usage.weights, usage.step) == (weights * 2 / parallel, step)
    assert (usage.keys_values, usage.states) == (keys_values, 4 * 8192 * 2)
    assert parallel != 4 or 16 * (usage.keys_values + usage.states) == 2_359_296
    assert usage.cache == pytest.approx(0.92 * 80e9 - weights * 2 / parallel - step)
    assert usage.capacity == int(usage.cache / (keys_values + 65536))
    options = {"gpu_memory_utilization": 0.5, "max_num_batched_tokens": 1024}
    second = engine.engine_memory(changed(recipe, "target", engine_options=options), 80e9, parallel, stored)
    assert second.step == step / 16 and second.cache == pytest.approx(0.5 * 80e9 - weights * 2 / parallel - step / 16)


def test_the_engines_that_fit_the_gpus_of_a_recipe(tiny_recipe, tmp_path):
    recipe = by_engine(tiny_recipe, tmp_path, LLAMA_70B, tensor_parallel=2)
    stored = engine.weight_bytes(recipe.target)
    assert [engine.find_smallest_parallel(recipe, gpu, stored) for gpu in (2e9, 48e9, 80e9, 141e9)] == [None, 4, 4, 2]
    long = changed(recipe, "target", engine_options={"max_model_len": 400_000})
    assert (
        engine.find_smallest_parallel(long, 80e9, stored) == 8
    )  # the text's cache of 58 GB does not fit next to a quarter of the weights
    texts = {
        row[0]: row[2] for row in engine.engine_rows(recipe, 1000.0)
    }  # on GPUs of 80 GB, which are assumed without a GPU
    assert recipe.worker_gpus == 2 and changed(recipe, "target", device="cpu").worker_gpus is None
    assert texts["engines"] == "2 of 2 GPUs, 4 in all; the target does not fit: from tensor_parallel=4 on it does"
    four = {row[0]: row[2] for row in engine.engine_rows(changed(recipe, "target", tensor_parallel=4), 5000.0)}
    page = (ROOT / "docs/a-70b-target.md").read_text()
    for text in (four["memory"].replace(" a GPU", ""), four["cache"].split(" tokens")[0].replace(" a GPU,", ":")):
        assert text in page, text
    eight = {row[0]: row[2] for row in engine.engine_rows(changed(recipe, "target", tensor_parallel=8), None)}
    assert eight["engines"] == "2 of 8 GPUs, 16 in all; with tensor_parallel=4 4 engines fit"
    assert eight["memory"] == "21.2 GB a GPU, 17.6 of it weights"
    assert eight["cache"] == "52.4 GB a GPU, 491,924 tokens of 0.106 MB, 62% of it states"
    windowed = by_engine(tiny_recipe, tmp_path, LLAMA_70B | {"model_type": "mistral", "sliding_window": 4096})
    assert "how many tokens is not known" in {row[0]: row[2] for row in engine.engine_rows(windowed, None)}["cache"]


def test_quantised_weights_take_what_their_files_take(tiny_recipe, tmp_path):
    recipe = by_engine(tiny_recipe, tmp_path, LLAMA_70B | {"quantization_config": {"quant_method": "fp8"}})
    assert engine.weight_bytes(recipe.target) is None  # no file has the size
    assert "unknown" in {row[0]: row[2] for row in engine.engine_rows(recipe, None)}["memory"]
    index = {"metadata": {"total_size": 72_000_000_000}, "weight_map": {}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert engine.weight_bytes(recipe.target) == 72e9


def test_a_plan_with_an_engine_requires_its_speed(tiny_recipe):
    recipe = changed(tiny_recipe, "target", engine="vllm", engine_python="/no/python")
    known_speeds = {"train-speed": 1000.0, "decode-ms": 36.0}
    missing = make_plan(recipe, {**known_speeds, "dump-speed": None})
    assert ["dump", "states", "unknown", "tokens/s are not known"] in missing.rows
    assert "no such engine here: give --dump-speed" in {row[3] for row in missing.rows}
    assert missing.figures["dump: hours"] is missing.figures["dump: states"] is None
    plan = make_plan(recipe, {**known_speeds, "dump-speed": 1000.0})
    assert plan.figures["dump: states"] == 1000 * 32 * 4  # float32 on their way, bfloat16 in the shards
    answering = make_plan(changed(recipe, "data", answers="target"), {**known_speeds, "dump-speed": None})
    assert "answering is not timed: give --dump-speed" in {row[3] for row in answering.rows}
    text = "0.128 MB/s a worker to shared memory, 0.069 MB/s to disk"
    assert ["dump", "states", text, "bytes a token x tokens/s"] in plan.rows


@pytest.mark.long
def test_a_local_engine_is_timed(tiny_recipe, tmp_path):
    python = environment(tmp_path / "environment")
    plan = make_plan(
        changed(tiny_recipe, "target", engine="vllm", engine_python=python),
        {"dump-speed": None, "train-speed": 1000.0, "decode-ms": 36.0},
    )
    (hours,) = (row for row in plan.rows if row[:2] == ["dump", "time"])
    assert plan.figures["dump: states"] > 0 and "tokens/s a worker, measured on" in hours[3]
    assert len(started(python)) == 1
    wait_until(lambda: not left_of(python))  # its guard looks once a second


@pytest.mark.parametrize("parallel", [3, 6, 128])
def test_gpus_that_cannot_share_the_heads_are_refused(tiny_recipe, tmp_path, parallel):
    recipe = by_engine(tiny_recipe, tmp_path, LLAMA_70B | {"num_key_value_heads": 4}, tensor_parallel=parallel)
    with pytest.raises(PipelineError, match=f"tensor_parallel={parallel} does not share .* 64 heads and 4 of keys"):
        make_plan(recipe, dict.fromkeys(("dump-speed", "train-speed", "decode-ms")))


def test_an_engine_uses_gpus_of_one_machine(tiny_recipe, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 2)
    target = by_engine(tiny_recipe, tmp_path, LLAMA_70B, tensor_parallel=4).target
    engine.require_gpus(target, other_machine=True)
    with pytest.raises(PipelineError, match="tensor_parallel=4, but this machine has 2 GPUs"):
        engine.require_gpus(target, other_machine=False)


@pytest.mark.parametrize(
    ("more", "warned"),
    [
        ({}, False),
        ({"warmup_steps": 900, "schedule": "constant"}, False),
        ({"warmup_steps": 900}, True),
    ],
)
def test_a_plan_warns_of_a_warm_up_that_training_may_refuse(more, warned, tiny_target, tmp_path, monkeypatch):
    monkeypatch.setattr("infra.plan.__main__.require_sizes", lambda recipe: None)  # refuses what is clearly too long
    tree = recipe_tree(tiny_target, write_sharegpt(tmp_path / "data.json"), tmp_path / "run")
    tree["train"] |= more
    recipe = load_recipe(str(write_recipe(tree, tmp_path / "tiny.toml")), [])
    lines = list(find_warnings(make_plan(recipe, dict.fromkeys(SPEEDS, 1.0))))
    assert ["refuses train.warmup_steps=900 of about " in line for line in lines] == [True] * warned
