"""The parts of `infra.check` that train a draft."""

import time
from typing import Any

import torch

from infra.check.shapes import GIB, CheckSettings, device, write_random_features
from infra.check.timing import judge, peak_memory
from infra.plan import speeds as plan_speeds
from infra.plan.memory import step_bytes
from pipeline.artifacts.features import feature_spec
from pipeline.basics.accelerator import synchronized_time
from pipeline.drafts import build, make_objective, parameter_count
from pipeline.drafts.parts.layers import draft_shapes
from pipeline.features.shards import FeatureStore
from pipeline.lm.attention import additive_mask, grouped_attention
from pipeline.lm.model import DTYPES, load_config, load_embed_head
from train.engine.engine import TrainingEngine, start_distributed
from train.input.data import Batches
from train.start import new_draft

STEPS = 20  # of a turn
MORE_DRAFTS = {"eagle3": '{kind="eagle3"}', "dflash": '{kind="dflash"}', "p-eagle": '{kind="p-eagle"}'}
UNSOUND_KEYS = 1088  # for cuDNN's gradient: 64 more than a multiple of 128 (docs/results/gpu.md)


def measure_training(name: str, settings: CheckSettings) -> dict[str, Any]:
    """Measure the tokens/s of training steps with reading and collating, the same steps twice, the bare speed, which
    excludes both, and the plan's; on a GPU also a step's memory, next to the plan's formula.
    """
    start_distributed()
    recipe = settings.recipe()
    if name in MORE_DRAFTS:
        recipe = settings.recipe_of(
            settings.folder / "target", f"draft.{name}={MORE_DRAFTS[name]}", f"output={settings.folder / name}-run"
        )
    if not recipe.paths.features.exists():
        write_random_features(recipe, settings.shape)
    store = FeatureStore(recipe.paths.shards, "train", feature_spec(recipe))
    draft = new_draft(recipe, name, load_embed_head(recipe.target), store)
    objective = make_objective(draft.config)
    batches = Batches(store, recipe.train, objective, draft.needs, recipe.seed, 0, 1)
    if batches.order.steps <= STEPS:
        raise AssertionError(
            f"the random features give {batches.order.steps} steps, and a turn takes {STEPS} more than 1"
        )
    parts = batches.accumulation, batches.order.steps, settings.folder / name, name
    engine = TrainingEngine(draft, objective.loss, recipe.train, *parts)
    draft.move_embed_head(engine.device, engine.dtype)
    engine.advance(next(batches.from_step(0, engine.device))[1])  # allocates the optimizer's moments
    if device() == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    rates, figures = [], {"parameters": parameter_count(draft)}
    for _ in range(2):
        tokens, waited, begin = 0, 0.0, synchronized_time(engine.device)
        ready = batches.from_step(1, engine.device)
        for _ in range(STEPS):
            wait_begin = time.perf_counter()
            _, micro_batches = next(ready)
            waited += time.perf_counter() - wait_begin
            engine.advance(micro_batches)
            tokens += sum(batch.tokens_BT.numel() for batch in micro_batches)
        seconds = synchronized_time(engine.device) - begin
        rates.append(tokens / seconds)
        figures["waiting_for_data"] = round(waited / seconds, 4)
    if not engine.has_finite_weights():
        raise AssertionError("weights are not finite after random features")
    if device() == "cuda":
        with torch.device("meta"):
            shaped = build(recipe.draft[name], draft_shapes(load_config(recipe.target)))
        figures["step_gib"] = round((torch.cuda.max_memory_allocated() - before) / GIB, 2)
        figures["formula_gib"] = round(step_bytes(recipe, shaped) / GIB, 2)
    length = recipe.train.pack_tokens or tokens // (STEPS * recipe.train.global_batch)
    times = plan_speeds.time_training(recipe, name, length, seconds=5 if device() == "cuda" else 0)
    bare, planned = times.bare_speed, times.step_speed(batches.accumulation)
    goals = {
        "turn 1 over turn 2": (rates[0] / rates[1], ">=", 0.9),
        "a step's speed over bare": (rates[1] / bare, ">=", 0.85),
    }
    speeds = {"tokens_per_s": [round(rate, 1) for rate in rates], "bare_tokens_per_s": round(bare, 1)}
    speeds |= {"planned_tokens_per_s": round(planned, 1)}
    return speeds | figures | judge(goals) | peak_memory()


def measure_p_eagle(settings: CheckSettings) -> dict[str, Any]:
    """Train p-eagle for as many steps as other drafts, and compute the gradient of masked attention for the number of
    keys and the low scores that made cuDNN's NaN. Raise AssertionError if either is not finite.
    """
    config = settings.shape.config
    heads, size = config["num_attention_heads"], config["hidden_size"] // config["num_attention_heads"]
    module, dtype = torch.nn.Module(), DTYPES[settings.half_dtype]
    module.num_key_value_groups = 1  # type: ignore[assignment]
    query, key, value = (
        torch.ones(1, heads, UNSOUND_KEYS, size, device=device(), dtype=dtype).requires_grad_() for _ in range(3)
    )
    visible = torch.ones(UNSOUND_KEYS, UNSOUND_KEYS, dtype=torch.bool, device=device()).tril()
    mask = additive_mask(visible, dtype)[None, None]
    out, _ = grouped_attention(module, query, -key, value, mask, scaling=120 / size)  # all scores are -120
    gradients = torch.autograd.grad(out.float().square().sum(), (query, key, value))
    if not all(gradient.isfinite().all() for gradient in gradients):
        raise AssertionError(f"masked attention of {UNSOUND_KEYS} keys has a gradient that is not finite")
    return {"keys_with_a_sound_gradient": UNSOUND_KEYS} | measure_training("p-eagle", settings)
