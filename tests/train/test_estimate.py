"""The plan of training, against numbers worked out by hand."""

from dataclasses import replace

import pytest
import torch

from pipeline.drafts import build, parameter_count
from pipeline.drafts.jakiro import JakiroConfig
from pipeline.drafts.parts.layers import shapes_of
from pipeline.drafts.skipper import SkipperConfig
from pipeline.features.batch import Batch
from pipeline.lm.model import DTYPES, load_config, parameter_count_of
from pipeline.recipe.recipe import Recipe
from train.estimate import activation_bytes, memory_bytes, ranks_of, step_bytes, steps_of


def changed(recipe: Recipe, **train) -> Recipe:
    return recipe.model_copy(update={"train": recipe.train.model_copy(update=train)})


@pytest.mark.parametrize(
    ("dtype", "stage", "ranks", "bytes_a_parameter"),
    [
        ("float32", 0, 1, 4 + 4 + 8),
        ("float32", 0, 4, 4 + 4 + 8),
        ("bfloat16", 0, 4, 2 + 2 + 12),
        ("float32", 1, 4, 4 + 4 + 2 + 4),  # ... + the bucket
        ("bfloat16", 1, 4, 2 + 2 + 4 + 3),
        ("bfloat16", 2, 4, 2 + 1 + 3 + 2),
        ("bfloat16", 3, 4, 0.5 + 1 + 3 + 2 + 2),  # ... + the whole weights of a validation
    ],
)
def test_memory_of_a_rank(tiny_recipe, dtype, stage, ranks, bytes_a_parameter):
    """d = 32, 260 tokens of which the draft knows 128."""
    recipe, size = changed(tiny_recipe, dtype=dtype, zero_stage=stage), 4 if dtype == "float32" else 2
    with torch.device("meta"):
        draft = build(recipe.draft["jakiro"], shapes_of(load_config(recipe.target)))
    embed_head = (260 + 128) * 32 * size
    assert memory_bytes(recipe, draft, ranks) - step_bytes(recipe, draft) == pytest.approx(
        parameter_count(draft) * bytes_a_parameter + embed_head
    )


def test_memory_of_decoding_while_training(tiny_recipe):
    """The target comes beside a step where it decodes at every validation, after the last one where it decodes once."""
    recipe = changed(tiny_recipe, dtype="float32")
    with torch.device("meta"):
        draft = build(recipe.draft["jakiro"], shapes_of(load_config(recipe.target)))
    kinds = ("never", "always", "last")
    never, always, last = (memory_bytes(changed(recipe, decode=kind), draft, 1) for kind in kinds)
    decoding = (parameter_count_of(recipe.target) + parameter_count(draft)) * DTYPES[recipe.target.dtype].itemsize
    assert always == never + decoding
    assert last == never + max(0, decoding - step_bytes(recipe, draft))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_of_a_step(tiny_recipe, dtype):
    """Micro-batches of 4 x 159 inputs, two branches; a CPU takes 128 of their rows at a time."""
    recipe, size = changed(tiny_recipe, dtype=dtype), 4 if dtype == "float32" else 2
    with torch.device("meta"):
        draft = build(recipe.draft["jakiro"], shapes_of(load_config(recipe.target)))
    tokens = 4 * 159
    rows = tokens * 32 * (size * (1 + 2 * 2) + 4 * 2 * 2)
    logits = 128 * 128 * (2 * (size + 4) + 2 * (2 * size + 4))
    rest = 2 * tokens * 32 * size + rows + logits
    assert step_bytes(recipe, draft) == activation_bytes(recipe, draft, recompute=False) + rest


def test_a_step_of_a_gpu_that_is_not_here_is_planned_for_one_of_80_gb(tiny_recipe, monkeypatch):
    """A vocabulary of 128,256 tokens, two branches, more rows than a chunk of theirs."""
    recipe = changed(tiny_recipe, dtype="bfloat16", micro_batch=4)
    recipe = recipe.model_copy(
        update={
            "target": recipe.target.model_copy(update={"device": "auto"}),
            "data": recipe.data.model_copy(update={"max_length": 2048}),
        }
    )
    monkeypatch.setattr("train.estimate.activation_bytes", lambda *_, **__: 0)
    with torch.device("meta"):
        config = replace(recipe.draft["jakiro"], vocabulary=None)
        draft = build(config, {**shapes_of(load_config(recipe.target)), "vocab_size": 128_256})
    tokens = 4 * 2047
    rest = 2 * tokens * 32 * 2 + tokens * 32 * (2 * (1 + 2 * 2) + 4 * 2 * 2)
    assert step_bytes(recipe, draft) - rest == 2092 * 128_256 * (2 * (2 + 4) + 2 * (2 * 2 + 4))


def test_a_mixture_counts_as_many_branches_as_it_has_features(tiny_recipe, embed_head):
    config = replace(tiny_recipe.draft["jakiro"], mixture_loss=0.1, vocabulary=None)
    draft = build(config, shapes_of(load_config(tiny_recipe.target)))
    draft.bind(embed_head)
    hidden_BTD, tokens_BT = torch.randn(1, 9, 32), torch.zeros(1, 9, dtype=torch.long)
    found = draft.predictions(Batch(hidden_BTD, tokens_BT, hidden_BTD, {}, {}))
    assert draft.trained_features == sum(len(one.features) for one in found.values()) > len(found)


MORE = {
    "balanced": JakiroConfig(experts=8, contrast="none", balance_loss=0.01),
    "by domain": JakiroConfig(experts=3, routing="domain", experts_per_token=1, contrast="none"),
    "skipper": SkipperConfig(sparsity=[0.0, 0.5]),
}


@pytest.mark.parametrize("name", ["jakiro", "eagle", *MORE])
@pytest.mark.parametrize("recompute", [False, True])
def test_what_a_forward_keeps_is_what_a_real_one_keeps(tiny_recipe, embed_head, name, recompute):
    recipe = changed(tiny_recipe, micro_batch=2)
    config = MORE[name] if name in MORE else recipe.draft[name]
    draft = build(config, shapes_of(load_config(recipe.target)))
    draft.initialise(0)
    if config.vocabulary:
        draft.set_vocabulary(torch.arange(128))
    draft.bind(embed_head)
    draft.recompute = recompute
    hidden_BTD, tokens_BT = torch.randn(2, 159, 32), torch.zeros(2, 159, dtype=torch.long)
    weights = (
        *draft.parameters(),
        *embed_head.decoder.parameters(),
        *embed_head.decoder.buffers(),
        embed_head.embedding_VD,
    )
    known = {x.data_ptr() for x in (*weights, hidden_BTD)}
    kept, alive = {}, []

    def keep(tensor):
        alive.append(tensor)
        if tensor.untyped_storage().data_ptr() not in known:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        trained = {1: torch.ones(2, 159, dtype=torch.bool)}
        draft.predictions(Batch(hidden_BTD, tokens_BT, hidden_BTD, trained, {}, before_BT=tokens_BT))
    with torch.device("meta"):
        planned = build(config, shapes_of(load_config(recipe.target)))
    counted = activation_bytes(recipe, planned, recompute)
    assert counted == pytest.approx(sum(kept.values()), rel=0.02)


def test_steps_are_whole_global_batches_of_dialogues_or_of_packed_rows(tiny_recipe):
    recipe = changed(tiny_recipe, epochs=3, global_batch=8, micro_batch=4)
    assert steps_of(recipe.train, 47, 2000) == 5 * 3
    assert steps_of(changed(recipe, pack_tokens=100).train, 47, 2000) == 2 * 3


def test_ranks_are_the_recipes_else_the_machines(tiny_recipe, monkeypatch):
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 8)
    assert ranks_of(changed(tiny_recipe, ranks=2).train) == 2
    assert ranks_of(changed(tiny_recipe, ranks=None).train) == 8
