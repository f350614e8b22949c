"""The validation copy of the draft that trains: the same numbers, and no second storage if a rank holds complete
weights.
"""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from pipeline.decoding.config import TreeConfig
from pipeline.drafts import build
from pipeline.drafts.parts.layers import draft_shapes
from pipeline.features.shards import ANSWERS, FeatureStore, Manifest
from pipeline.recipe.load import load_recipe
from train import acceptance
from train.engine.engine import TrainingEngine


@pytest.fixture(params=["jakiro", "eagle"])
def draft(request, dumped, loaded_target, embed_head):
    config = load_recipe(dumped[0]).draft[request.param]
    made = build(config, draft_shapes(loaded_target.config))
    made.initialise(3)
    if config.vocabulary:
        made.set_vocabulary(torch.arange(config.vocabulary))
    made.bind(embed_head)
    return made.train()


def engine_of(draft, stage: int) -> SimpleNamespace:
    """A stand-in with what `Engine.copy_weights_to` needs, without DeepSpeed."""
    return SimpleNamespace(
        _draft=draft,
        _config=SimpleNamespace(zero_stage=stage),
        _engine=SimpleNamespace(empty_partition_cache=lambda: None),
        device=torch.device("cpu"),
        dtype=torch.float32,
    )


@pytest.fixture
def gathering(monkeypatch) -> list[int]:
    """A record of how many parameters are gathered at a time: under ZeRO-3 a parameter is complete only while it is
    gathered.
    """
    sizes: list[int] = []

    @contextlib.contextmanager
    def gathered(parameters):
        sizes.append(len(parameters))
        yield

    monkeypatch.setattr("train.engine.engine.deepspeed.zero.GatheredParameters", gathered)
    return sizes


TREE = TreeConfig(depth=3, top_k=3, nodes=7)


def estimated(draft, dumped) -> dict[str, float]:
    answers = FeatureStore(dumped[1], ANSWERS, Manifest.load(dumped[1]).spec)
    return acceptance.to_metrics(
        acceptance.estimate_acceptance(draft, acceptance.tree_and_chain(draft, TREE), answers, 0, 1)
    )


def copied(draft):
    """The reference: a separate draft with a copy of the weights."""
    copy = build(draft.config, draft.shapes)
    copy.load_state_dict({name: value.clone() for name, value in draft.state_dict().items()})
    copy._embed_head = [draft.embed_head]
    return copy.eval()


@pytest.mark.parametrize("stage", [0, 3])
def test_the_validation_copy_estimates_to_the_bit_what_a_copy_does(draft, dumped, gathering, stage):
    engine, copy = engine_of(draft, stage), draft.validation_copy()
    for seed in (4, 5):  # the weights move on between two validations
        TrainingEngine.copy_weights_to(engine, copy)
        assert estimated(copy, dumped) == estimated(copied(draft), dumped)
        assert draft.training and not copy.training and not any(module.training for module in copy.modules())
        draft.initialise(seed)


def test_without_zero_3_the_validation_copy_has_no_storage_of_its_own(draft):
    draft.name = "mine"
    copy, before = draft.validation_copy(), dict(draft.named_parameters())
    assert copy.name == "mine"
    assert all(p.is_meta for p in copy.parameters())
    TrainingEngine.copy_weights_to(engine_of(draft, 2), copy)
    assert all(p is before[name] and p.requires_grad for name, p in copy.named_parameters())
    assert dict(draft.named_parameters()) == before and copy.embed_head is draft.embed_head
    assert {name: b.data_ptr() for name, b in copy.named_buffers()} == {
        name: b.data_ptr() for name, b in draft.named_buffers()
    }


def test_under_zero_3_its_storage_is_made_once_and_weights_are_gathered_one_by_one(draft, gathering):
    copy, engine = draft.validation_copy(), engine_of(draft, 3)
    TrainingEngine.copy_weights_to(engine, copy)
    places = {name: value.data_ptr() for name, value in copy.state_dict().items()}
    assert not set(places.values()) & {value.data_ptr() for value in draft.state_dict().values()}
    draft.initialise(9)
    TrainingEngine.copy_weights_to(engine, copy)
    assert {name: value.data_ptr() for name, value in copy.state_dict().items()} == places
    assert all(torch.equal(value, copy.state_dict()[name]) for name, value in draft.state_dict().items())
    assert gathering == [1] * 2 * len(list(draft.parameters()))


def test_decoding_casts_a_copy_and_leaves_the_weights_that_train(draft, dumped):
    """The copy has the target's dtype and its own embedding and head; the second copy uses the same storage."""
    recipe = load_recipe(dumped[0], ["target.dtype=bfloat16"])
    answers = FeatureStore(dumped[1], ANSWERS, Manifest.load(dumped[1]).spec)
    decoder = acceptance.Decoder(recipe, answers, draft, draft.config.resolve(TREE))
    TrainingEngine.copy_weights_to(engine_of(draft, 0), copy := draft.validation_copy())
    before = {name: value.clone() for name, value in draft.state_dict().items()}
    first = decoder.tau(copy.state_dict(), quiet=True)
    place = decoder._draft.fc.weight.data_ptr()
    assert first >= 1 and decoder.tau(copy.state_dict(), quiet=True) == first
    assert decoder._draft.fc.weight.dtype == torch.bfloat16 and decoder._draft.fc.weight.data_ptr() == place
    assert all(torch.equal(value, before[name]) for name, value in draft.state_dict().items())
    assert draft.fc.weight.dtype == torch.float32 and draft.embed_head.head.linear.weight.dtype == torch.float32
