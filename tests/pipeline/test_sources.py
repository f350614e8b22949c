"""Several sources in one tree: what merging does, and that decoding, the replay and plain decoding agree."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.basics.errors import PipelineError
from pipeline.decoding import replay
from pipeline.decoding.config import LoadedMethod, TreeConfig
from pipeline.decoding.contract import RoundInput
from pipeline.decoding.generate import Sampling, decode_plain, decode_speculative
from pipeline.decoding.pools import CandidatePool, merge
from pipeline.decoding.sources import Sources
from pipeline.decoding.tree import build_tree
from pipeline.drafts import make
from pipeline.drafts.parts.layers import draft_shapes
from pipeline.drafts.prompt_lookup import PromptLookupConfig
from pipeline.recipe.load import load_recipe
from tests.kit import write_recipe
from tests.pipeline.scripted import paths_of
from tests.pipeline.taught import NEVER, VARIANTS, greedy, prompt_of, taught

LEFT = CandidatePool([5, 6, 7], [0, 1, 0], [-0.1, -0.4, -2.0])
RIGHT = CandidatePool([5, 9, 7], [0, 1, 0], [2.0, 2.0, 1.0])


def tree_of(merged, nodes):
    return paths_of(build_tree(1, *merged.likeliest(nodes), torch.device("cpu")))[1:]


def test_the_same_token_below_the_same_node_is_one_node():
    merged = merge([(LEFT, [0.8, 0.5, 0.1]), (RIGHT, [0.5, 0.4, 0.3])])
    assert merged.tokens == [5, 6, 7, 9] and merged.parents == [0, 1, 0, 1]
    assert merged.probabilities == pytest.approx([1 - 0.2 * 0.5, 0.5, 1 - 0.9 * 0.7, 0.4])
    assert tree_of(merged, 5) == [(5,), (5, 6), (5, 9), (7,)]
    assert tree_of(merged, 3) == [(5,), (5, 6)]


def test_no_node_is_likelier_than_its_parent():
    merged = merge([(LEFT, [0.3, 0.9, 0.5])])
    assert merged.probabilities == [0.3, 0.3, 0.5]
    assert tree_of(merged, 3) == [(7,), (5,)]


pools = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6), st.floats(0, 1)), max_size=7).map(
    lambda rows: [(token, min(parent, place), chance) for place, (token, parent, chance) in enumerate(rows)]
)


def unique(rows):
    """A pool in which no parent has a token twice."""
    paths, number, out = set(), {0: 0}, []
    for place, (token, parent, chance) in enumerate(rows, start=1):
        if parent in number and (number[parent], token) not in paths:
            paths.add((number[parent], token))
            out.append((token, number[parent], chance))
            number[place] = len(out)
    return CandidatePool([t for t, _, _ in out], [p for _, p, _ in out], [c for _, _, c in out])


@given(pools, pools, st.integers(2, 12))
def test_any_first_part_of_the_order_is_a_tree_and_ranks_say_what_it_holds(first, second, nodes):
    first, second = unique(first), unique(second)
    merged = merge([(first, first.scores), (second, second.scores)])
    paths = [(), *tree_of(merged, nodes)]
    assert len(set(paths)) == len(paths) == min(nodes, len(merged.tokens) + 1)
    for path in tree_of(merged, 99):
        ranks = merged.ranks([*path, 7])
        assert len(ranks) == len(path)
        assert sum(rank < nodes - 1 for rank in ranks) == sum(
            path[:depth] in paths for depth in range(1, len(path) + 1)
        )


# -- decoding --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drafts(loaded_target, embed_head):
    prompt = prompt_of(3, 20) * 2
    text = prompt, greedy(loaded_target, prompt, 12)
    names = ("eagle", "jakiro", "dflash")
    return {name: taught(loaded_target, embed_head, VARIANTS[name], *text, steps=60) for name in names}


def with_lookup(target, draft):
    lookup = make(PromptLookupConfig(), draft_shapes(target.config))
    return Sources(draft, {"prompt-lookup": lookup})


TREES = [
    {"depth": 1, "top_k": 3, "nodes": 4},
    {"depth": 3, "top_k": 4, "nodes": 24},
    {"depth": 3, "top_k": 2, "nodes": 9, "parallel": 2},
]


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7, "top_k": 9}, {"repetition_penalty": 1.3}])
def test_answers_are_plain_decodings(loaded_target, drafts, settings):
    tree = TREES[1]
    method = LoadedMethod(with_lookup(loaded_target, drafts["eagle"]), TreeConfig(**tree))
    for seed in range(4):
        prompt, sampling = prompt_of(seed, 20) * 2, Sampling(30, NEVER, **settings, seed=seed)
        got = decode_speculative(loaded_target, method, prompt, sampling)
        assert got.tokens == decode_plain(loaded_target, prompt, sampling).tokens
        assert got.draft_forwards == got.acceptance.passes * tree["depth"]


def test_a_tree_holds_what_each_source_proposes(loaded_target, drafts):
    """The text stood there before, so its continuation is likelier than what the draft adds on its last levels."""
    draft, text = drafts["eagle"], [*range(40, 60), *range(40, 50)]
    states = loaded_target.states(text[:-1]).select(draft.needs)
    trees = []
    for source, nodes in ((draft, 13), (with_lookup(loaded_target, draft), 18)):
        method = LoadedMethod(source, TreeConfig(depth=2, top_k=3, nodes=nodes))
        trees.append(paths_of(source.propose(source.open(), RoundInput(text, states), method.tree, None)))
    alone, both = trees
    chains = [tuple(range(50, end)) for end in range(51, 55)]
    assert len(both) == 18 and set(chains) <= set(both) and not set(chains) & set(alone)
    assert len(set(both) & set(alone)) > 3


@pytest.mark.parametrize("name", ["jakiro", "dflash"])
def test_the_replay_counts_what_decoding_does(loaded_target, drafts, name):
    prompt = prompt_of(3, 20) * 2
    tokens = prompt + greedy(loaded_target, prompt, 40)
    both = with_lookup(loaded_target, drafts[name])
    states = loaded_target.states(tokens, [1, 2])
    most = max(drafts[name].config.parallel_choices(3))
    counted = replay.make_counter(both, states, tokens, len(prompt), replay.largest_tree(3, 4, "plain", most))
    for shape in TREES:
        parallel = {"parallel": 1, **shape} if name == "jakiro" else {**shape, "parallel": shape["depth"]}
        tree = LoadedMethod(both, TreeConfig(**parallel)).tree
        decoded = decode_speculative(loaded_target, LoadedMethod(both, tree), prompt, Sampling(40, NEVER)).acceptance
        assert counted(tree) == decoded
        assert replay.replay_decoding(LoadedMethod(both, tree), states, tokens, len(prompt)) == decoded


def test_a_static_tree_is_refused(loaded_target, drafts):
    with pytest.raises(ValueError, match="have no ranks for a static tree"):
        LoadedMethod(with_lookup(loaded_target, drafts["eagle"]), TreeConfig(paths="eagle-1"))


def test_more_nodes_than_all_sources_propose_are_refused(loaded_target, drafts):
    with pytest.raises(ValueError, match="the sources propose at most 34"):
        LoadedMethod(with_lookup(loaded_target, drafts["eagle"]), TreeConfig(depth=1, top_k=3, nodes=35))


@pytest.mark.parametrize(
    ("method", "secondary", "message"),
    [
        # What a draft is trained, saved and shown with is its own.
        ("jakiro", '{secondary=["prompt-lookup"]}', "jakiro: a draft of that name stands alone"),
        (
            "both",
            '{draft="jakiro", secondary=["eagle"]}',
            "secondary='eagle': expected drafts .* that take no forwards",
        ),
        ("both", '{draft="jakiro", secondary=["prompt-lookup", "prompt-lookup"]}', "each once"),
        ("both", '{draft="prompt-lookup", secondary=["prompt-lookup"]}', "draft='prompt-lookup' is not trained"),
        (
            "both",
            '{draft="jakiro", secondary=["prompt-lookup"], tree={depth=1, top_k=3, nodes=35}}',
            "sources propose at most 34",
        ),
        ("both", '{draft="jakiro", secondary=["prompt-lookup"], tree={paths="eagle-1"}}', "no ranks for a static tree"),
    ],
)
def test_what_cannot_stand_beside_a_draft_is_refused(tiny_recipe, tmp_path, method, secondary, message):
    recipe = write_recipe(tiny_recipe.model_dump(mode="json"), tmp_path / "recipe")
    with pytest.raises(PipelineError, match=message):
        load_recipe(recipe, ['draft.prompt-lookup={kind="prompt-lookup"}', f"eval.methods.{method}={secondary}"])
