"""A pruned target against the whole one: identities where nothing or everything passes by, and the command itself."""

import pytest
import torch

from eval.pruned import CHANCE, DROPPED, STATIC, TRAINED, WHOLE, Whole, influences, main, search, to_least, ways
from pipeline.artifacts.reports import read_rows
from pipeline.basics.errors import PipelineError
from pipeline.drafts.skipper import SkipperConfig
from pipeline.recipe.load import load_recipe
from tests.kit import call, dump_here, recipe_tree, save_tiny_target, write_recipe, write_sharegpt
from tests.pipeline.taught import prompt_of
from tests.train.runs import train_here

LAYERS = 5
TEXTS = [prompt_of(seed, 60) for seed in range(3)]
CHECKED_ALL = [(torch.tensor([text]), torch.ones(60, dtype=torch.bool)) for text in TEXTS]
CHECKED = [(torch.tensor([text]), torch.arange(60) > 10) for text in TEXTS]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(recipe file, run folder) of a trained skipper over a target of five blocks."""
    folder = tmp_path_factory.mktemp("pruned")
    target = save_tiny_target(folder / "target", layers=LAYERS)
    tree = recipe_tree(target, write_sharegpt(folder / "data.json"), folder / "dump")
    tree["draft"] = {"eagle": {"kind": "eagle"}, "some": {"kind": "skipper", "sparsity": 0.4}}
    tree["publish"]["draft"] = "some"
    path = write_recipe(tree, folder / "recipe")
    recipe = load_recipe(path)
    dump_here(recipe)
    train_here((path, recipe.features_dir), folder / "run", draft="some")
    return path, folder / "run"


@pytest.fixture(scope="module")
def whole(run):
    return Whole(load_recipe(run[0]))


def test_a_target_that_nothing_passes_by_is_the_whole_one(whole):
    draft = whole.draft(SkipperConfig(sparsity=0.4))
    draft.shares = [0.0] * LAYERS
    sums = whole.compare(draft, CHECKED)
    facts = sums.facts()
    assert (facts["passed by"], facts["agreement"]) == (0, 1) and sums.tokens == 3 * 49
    assert facts["acceptance"] == pytest.approx(1, abs=1e-5) and abs(sums.apart) < 1e-4
    logits = whole.target.head(whole.target.capture(CHECKED[0][0])[0, 10:-1]).log_softmax(-1)
    nats = -logits.gather(1, CHECKED[0][0][0, 11:, None]).sum().item()
    assert whole.compare(draft, CHECKED[:1]).nats == pytest.approx(nats, rel=1e-5)


def test_dropped_blocks_are_not_there(whole, run):
    recipe = load_recipe(run[0], [f"output={run[1]}"])
    made = dict(ways(whole, recipe, "some", TEXTS))
    assert list(made) == [TRAINED, STATIC, CHANCE, DROPPED]
    shares, least = made[DROPPED].shares, influences(made[DROPPED], TEXTS)
    assert shares == made[DROPPED].shares  # put back
    assert sorted(shares) == [0, 0, 0, 1, 1]
    dropped = [block for block, share in enumerate(shares) if share]
    assert sorted(least)[:2] == sorted(least[block] for block in dropped)
    decoder, tokens = whole.target.decoder, CHECKED[0][0]
    x, at = decoder.embed_tokens(tokens), torch.arange(60)[None]
    mask = torch.full((60, 60), torch.finfo(torch.float32).min).triu(1)[None, None]
    with torch.inference_mode():
        for block, share in enumerate(shares):
            if not share:
                x = decoder.layers[block](x, attention_mask=mask, position_embeddings=decoder.rotary_emb(x, at))
        assert torch.allclose(made[DROPPED].through(tokens, None), decoder.norm(x), atol=1e-5)


def test_least_influence_gets_the_whole_sum(whole):
    draft = whole.draft(SkipperConfig(sparsity=[0, 0.5, 0.5, 0.5, 1]))
    least = sorted(range(1, 4), key=lambda block: influences(draft, TEXTS)[block])
    shares = to_least(draft, range(1, 4), 1.5, 0.9, TEXTS)
    assert [shares[block] for block in least] == pytest.approx([0.9, 0.6, 0]) and (shares[0], shares[4]) == (0, 1)


def test_random_tokens_pass_by_as_often_as_they_should(whole, run):
    recipe = load_recipe(run[0], [f"output={run[1]}"])
    facts = [whole.compare(dict(ways(whole, recipe, "some", TEXTS))[CHANCE], CHECKED).facts() for _ in range(2)]
    assert facts[0] == facts[1] and facts[0]["passed by"] == pytest.approx(0.4 * (1 - 4 / 60), abs=0.02)  # 4 are kept


def apart(whole, shares):
    draft = whole.draft(SkipperConfig(sparsity=shares))
    draft.start_from_target(TEXTS)
    return whole.compare(draft, CHECKED_ALL).apart


def test_the_search_starts_from_dropped_blocks_and_keeps_the_sum(whole):
    for given in ([0, 0.4, 0.4, 0.4, 0], [0, 0.2, 0.7, 0.2, 1.0]):
        found = search(whole, SkipperConfig(sparsity=given), TEXTS, 12, seed=0)
        assert sum(found) == pytest.approx(sum(given), abs=0.01) and (found[0], found[4]) == (0, given[4])
        assert apart(whole, found) < apart(whole, given)
    with pytest.raises(PipelineError, match=r"at most 0.98 .* are 0.990 on average"):
        search(whole, SkipperConfig(sparsity=[0, 0.99, 0.99, 0, 0]), TEXTS, 1, seed=0)


def test_the_command_writes_rows_and_shows_them(run, capsys):
    call(main, str(run[0]), "--set", f"output={run[1]}")
    found = {(row.setting["way"], row.figure): row.value for row in read_rows(run[1] / "eval")}
    assert list(dict.fromkeys(way for way, _ in found)) == [WHOLE, TRAINED, STATIC, CHANCE, DROPPED]
    assert found[WHOLE, "agreement"] == 1
    assert all(0 < found[way, "agreement"] < 1 for way in (TRAINED, STATIC, CHANCE, DROPPED))
    assert found[DROPPED, "passed by"] == 0.4 and found[STATIC, "passed by"] == pytest.approx(0.4, abs=0.1)
    assert "|  | some, way blocks dropped | 0.4 |" in capsys.readouterr().out
    call(main, str(run[0]), "--set", f"output={run[1]}", "--search", "some", "--tries", "2")
    assert capsys.readouterr().out.startswith("sparsity = [0.0, ")
