"""The token tree, on drafts whose answers are scripted."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.basics.errors import PipelineError
from pipeline.decoding.accept import Sampler
from pipeline.decoding.config import TreeConfig
from pipeline.decoding.generate import Sampling
from pipeline.drafts.jakiro import JakiroConfig
from tests.pipeline.scripted import ScriptedDraft, noise_by_path, paths_of, two_experts


def table(probabilities, vocabulary):
    """Logits by path from a table of probabilities; what is not listed shares the rest."""

    def logits(path):
        listed = probabilities[path]
        rest = (1 - sum(listed.values())) / (vocabulary - len(listed))
        return torch.tensor([listed.get(token, rest) for token in range(vocabulary)]).log()

    return logits


A, B, C, D, E = range(5)
EAGLE_2 = {
    (): {A: 0.60, B: 0.30, C: 0.06},
    (A,): {A: 0.50, C: 0.45, D: 0.02},
    (B,): {D: 0.92, A: 0.05, E: 0.01},
    (A, A): {B: 0.70, E: 0.20, A: 0.05},  # 0.30 -> 0.21, 0.06
    (B, D): {C: 0.90, B: 0.05, A: 0.03},  # 0.276 -> 0.2484, 0.0138
    (A, C): {A: 0.99},  # 0.27: third of its level, so never forwarded
}


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        # cumulative: A .6, B .3, AA .3 (after B: the same), BD .276, AC .27, BDC .2484, AAB .21, AAE .06, BA .015, BDB
        # .0138
        (4, [(), (A,), (B,), (A, A)]),
        (5, [(), (A,), (B,), (A, A), (B, D)]),
        (6, [(), (A,), (B,), (A, A), (A, C), (B, D)]),
        (7, [(), (A,), (B,), (A, A), (A, C), (B, D), (B, D, C)]),
        (8, [(), (A,), (B,), (A, A), (A, C), (B, D), (A, A, B), (B, D, C)]),
        (9, [(), (A,), (B,), (A, A), (A, C), (B, D), (A, A, B), (A, A, E), (B, D, C)]),
        (10, [(), (A,), (B,), (A, A), (A, C), (B, D), (B, A), (A, A, B), (A, A, E), (B, D, C)]),
    ],
)
def test_eagle_2_selection_by_hand(nodes, expected):
    draft = ScriptedDraft(table(EAGLE_2, 5))
    tree = draft.grow(root=2, depth=3, top_k=2, nodes=nodes)
    assert sorted(paths_of(tree)) == sorted(expected)
    assert tree.tokens[0] == 2
    assert draft.paths == [(), (A,), (B,), (A, A), (B, D)]  # the two best of each level, AC among the rejected


def proposing(next_logits, ahead_logits, spec: TreeConfig, path):
    """The logits that the children of `path` come from: its own forward's, or those of the last forwarded
    ancestor's.
    """
    last = spec.depth - spec.parallel
    return next_logits(path) if len(path) <= last else ahead_logits[len(path) - last - 1](path[:last])


def brute_force(next_logits, ahead_logits, spec: TreeConfig):
    """The rule again, on paths and Python numbers: (path -> cumulative log-probability) of the whole pool, then
    pruned.
    """
    pool, level = {}, {(): 0.0}
    for _ in range(1, spec.depth + 1):
        scored = {}
        for path, score in level.items():
            logits = proposing(next_logits, ahead_logits, spec, path)
            best = logits.double().log_softmax(-1).topk(min(spec.top_k, len(logits)))
            for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                scored[(*path, token)] = score + value
        pool.update(scored)
        level = dict(sorted(scored.items(), key=lambda item: -item[1])[: spec.top_k])
    return set(sorted(pool, key=lambda path: -pool[path])[: spec.nodes - 1])


@pytest.mark.parametrize("parallel", [1, 2, 3])
@pytest.mark.parametrize(("depth", "top_k", "nodes"), [(3, 2, 7), (3, 3, 12), (4, 4, 20), (5, 10, 60), (6, 3, 30)])
def test_the_tree_is_the_brute_force_one(depth, top_k, nodes, parallel):
    spec = TreeConfig(depth=depth, top_k=top_k, nodes=nodes, parallel=parallel)
    for seed in range(5):
        script, *ahead = (noise_by_path(100 * number + seed, 17) for number in range(3))
        tree = ScriptedDraft(script, *ahead).grow(**spec.to_json())
        assert set(paths_of(tree)[1:]) == brute_force(script, ahead, spec)


def released_eagle_2(next_logits, depth=5, top_k=10, total_tokens=60):
    """The trees of EAGLE-2's released drafting, written again on paths: one forward of the root before a loop of
    `depth` further ones; every level's nodes propose `top_k` each, the `top_k` best by cumulative score go on, and of
    all candidates ``total_tokens - 1`` stay.
    """

    def proposals(path, score):
        best = next_logits(path).log_softmax(-1).topk(top_k)
        pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
        return [((*path, token), score + value) for value, token in pairs]

    selected = proposals((), 0.0)
    scores = dict(selected)
    for _ in range(depth):
        level = [child for path, score in selected for child in proposals(path, score)]
        scores.update(level)
        selected = sorted(level, key=lambda pair: -pair[1])[:top_k]
    return set(sorted(scores, key=lambda path: -scores[path])[: total_tokens - 1])


def test_the_default_tree_is_the_papers_node_for_node():
    """The released ``depth=5`` counts the levels after the first: six draft forwards, 59 candidates, rounds of up to
    seven tokens.
    """
    deepest = 0
    for seed in range(8):
        script = noise_by_path(seed, 40)
        sharp = lambda path, script=script: 2 * script(path)  # noqa: E731 (some paths reach the last level)
        draft = ScriptedDraft(sharp)
        tree = draft.grow()
        assert set(paths_of(tree)[1:]) == released_eagle_2(sharp)
        deepest = max(deepest, *tree.depths)
        assert (
            len(tree.tokens) == 60 and 1 + draft.steps == JakiroConfig().resolve(TreeConfig(parallel=1)).forwards == 6
        )
        assert set(paths_of(ScriptedDraft(sharp).grow(depth=5))[1:]) != released_eagle_2(sharp)
    assert deepest == 6
    jakiro = JakiroConfig().resolve(TreeConfig())
    assert (jakiro.depth, jakiro.nodes, jakiro.parallel, jakiro.forwards) == (6, 60, 2, 5)


def test_a_mixtures_child_never_outranks_its_parent():
    """The mixture of two certain experts can have a log-probability above 0 in floating point; the tree would lose its
    parents.
    """
    sure = torch.full((7,), -1e4).index_fill_(0, torch.tensor([3]), 0.0)
    weights = torch.tensor([0.3, 0.7]).log() + 2e-7  # a softmax rounded up
    draft = ScriptedDraft(lambda path: sure, experts=lambda path: (torch.stack([sure, sure]), weights))
    tree = draft.grow(depth=4, top_k=2, nodes=5, candidates="decoupled")
    assert tree.depths == [0, 1, 2, 3, 4] and tree.tokens[1:] == [3, 3, 3, 3]


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("spec", [{"depth": 3, "top_k": 2, "nodes": 6}, {"paths": "eagle-1"}])
@pytest.mark.parametrize("level", [0, 1, 2])
def test_logits_that_are_not_finite_are_an_error_with_the_drafts_name(broken, spec, level):
    def logits(path):
        values = noise_by_path(1, 9)(path)
        return values.index_fill(0, torch.tensor([4]), broken) if len(path) == level else values

    with pytest.raises(PipelineError, match="draft 'scripted': its logits are not finite"):
        ScriptedDraft(logits).grow(**spec)


def specs():
    def make_full(depth, top_k, share, parallel, candidates):
        most = 1 + top_k + top_k * top_k * (depth - 1)
        nodes = depth + 1 + round(share * max(most - depth - 1, 0))
        shape = {"depth": depth, "top_k": top_k, "nodes": min(nodes, most)}
        return TreeConfig(**shape, parallel=min(parallel, depth), candidates=candidates)

    kinds = st.sampled_from(["plain", "decoupled"])
    return st.builds(make_full, st.integers(1, 5), st.integers(1, 6), st.floats(0, 1), st.integers(1, 3), kinds)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(spec=specs(), seed=st.integers(0, 10**6), decimals=st.sampled_from([None, 0, "equal"]))
def test_every_tree_is_well_formed(spec, seed, decimals):
    """Also where logits tie, up to all of them being equal."""
    vocabulary = 7
    if decimals == "equal":
        scripts = (lambda path: torch.zeros(vocabulary),) * 5
    else:
        scripts = [noise_by_path(seed + number, vocabulary, decimals) for number in range(5)]
    draft = ScriptedDraft(*scripts[:3], experts=two_experts(*scripts[3:]))
    tree = draft.grow(**spec.to_json())

    assert len(tree.tokens) == len(tree.parents) == len(tree.depths) == spec.nodes
    assert tree.tokens_N.tolist() == tree.tokens
    assert (tree.parents[0], tree.depths[0]) == (-1, 0)
    for node in range(1, spec.nodes):
        assert 0 <= tree.parents[node] < node
        assert tree.depths[node] == tree.depths[tree.parents[node]] + 1 <= spec.depth
    assert len(set(paths_of(tree))) == spec.nodes, "a sibling repeats a token"

    ancestors = torch.zeros(spec.nodes, spec.nodes, dtype=torch.bool)
    for node in range(spec.nodes):
        above = node
        while above >= 0:
            ancestors[node, above] = True
            above = tree.parents[above]
    assert torch.equal(tree.ancestors_NN, ancestors)
    assert draft.steps == spec.depth - spec.parallel
    assert draft.depths == list(range(1, draft.steps + 1))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(spec=specs(), seed=st.integers(0, 10**6))
def test_siblings_stand_best_first(spec, seed):
    script, *ahead = (noise_by_path(seed + number, 9) for number in range(3))
    spec = replace(spec, candidates="plain")
    tree = ScriptedDraft(script, *ahead).grow(**spec.to_json())
    paths = paths_of(tree)
    for node, children in enumerate(tree.children()):
        if not children:
            continue
        logits = proposing(script, ahead, spec, paths[node])
        tokens = [tree.tokens[child] for child in children]
        assert tokens == logits.argsort(descending=True)[: len(tokens)].tolist()


def test_a_vocabulary_smaller_than_top_k_gives_all_its_tokens_once():
    tree = ScriptedDraft(lambda path: torch.zeros(3)).grow(depth=2, top_k=5, nodes=30)
    assert len(tree.tokens) == 1 + 3 + 3 * 3  # fewer than asked for: there are no more
    assert len(set(paths_of(tree))) == 13


def test_the_last_hybrid_level_is_gathered_by_parent_and_not_by_rank():
    """Both kept nodes of level 2 descend from B, which is row 1 of its forward: rank 0 would read A's ahead list."""
    following = table({(): {A: 0.5, B: 0.49}, (A,): {A: 0.26, B: 0.25, C: 0.24}, (B,): {D: 0.5, E: 0.45}}, 5)
    ahead = table({(): {E: 0.9, D: 0.05}, (A,): {A: 0.9, B: 0.06}, (B,): {C: 0.8, D: 0.1}}, 5)
    draft = ScriptedDraft(following, ahead)
    tree = draft.grow(depth=3, top_k=2, nodes=11, parallel=2)
    assert draft.paths == [(), (A,), (B,)]
    last = {path for path in paths_of(tree) if len(path) == 3}
    assert last == {(B, D, C), (B, D, D), (B, E, C), (B, E, D)}

    selected = [(B, D), (B, E)]  # best first: their ranks are 0 and 1, like the rows of A and B
    by_rank = {
        (*selected[rank], token)
        for rank, row in enumerate([(A,), (B,)])
        for token in ahead(row).topk(2).indices.tolist()
    }
    assert by_rank == {(B, D, A), (B, D, B), (B, E, C), (B, E, D)} != last


@pytest.mark.parametrize("hybrid", [False, True])
def test_a_reduced_vocabulary_answers_in_target_ids(hybrid):
    """The same logits over five ids and over a target vocabulary that has nothing else: the same tree."""
    ids = torch.tensor([3, 11, 20, 21, 40])

    def make_full(script):
        return lambda path: torch.full((50,), -1e9).scatter(0, ids, script(path))

    scripts = noise_by_path(1, 5), noise_by_path(2, 5)
    spec = {"depth": 3, "top_k": 3, "nodes": 15, "parallel": 2 if hybrid else 1}
    reduced = ScriptedDraft(*scripts, ids=ids).grow(root=7, **spec)
    unreduced = ScriptedDraft(*map(make_full, scripts)).grow(root=7, **spec)
    assert paths_of(reduced) == paths_of(unreduced)
    assert set(reduced.tokens[1:]) <= set(ids.tolist())


# -- candidates of several experts ----------------------------------------------------------------------------------

LEFT, RIGHT = {A: 0.5, B: 0.3, C: 0.1, D: 0.06}, {D: 0.55, A: 0.25, E: 0.15, B: 0.03}


def of_two(balance):
    scripts = (table({(): listed}, 5) for listed in (LEFT, RIGHT))
    return ScriptedDraft(table({(): {E: 0.9}}, 5), experts=two_experts(*scripts, balance))


@pytest.mark.parametrize(
    ("balance", "expected"),
    [
        # .6 left: A .30  B .18  C .06;  .4 right: D .22  A .10  E .06 -> A, D, B by the better of the two
        (0.6, [A, D, B]),
        (0.4, [D, A, B]),  # A .20 (left), D .33, B .12, E .09
        (0.44, [D, A, B]),  # D .308, A .22: their mixture would have A first (.36 against .3344)
    ],
)
def test_two_experts_lists_are_merged_by_hand(balance, expected):
    tree = of_two(balance).grow(depth=1, top_k=3, nodes=4, candidates="decoupled")
    assert tree.tokens[1:] == sorted(expected, key=expected.index)


def test_nodes_of_merged_lists_are_scored_by_the_mixture():
    """So that cumulative scores stay comparable: the best grandchild is found by the product of mixtures."""
    scripts = [noise_by_path(seed, 6) for seed in (1, 2, 3)]
    spec = {"depth": 2, "top_k": 6, "nodes": 9, "candidates": "decoupled"}
    tree = ScriptedDraft(scripts[0], experts=two_experts(*scripts[1:])).grow(**spec)

    def mixed(path):
        logits, weights = two_experts(*scripts[1:])(path)
        return (logits.softmax(-1) * weights.exp()[:, None]).sum(0).double()

    scores = {(a,): mixed(())[a].item() for a in range(6)}
    scores |= {(a, b): scores[a,] * mixed((a,))[b].item() for a in range(6) for b in range(6)}
    assert set(paths_of(tree)[1:]) == set(sorted(scores, key=lambda path: -scores[path])[:8])


# -- static ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parallel", [1, 2, 3])
def test_eagle_1s_tree_by_hand(parallel):
    """Every node is the rank-th best token of what its parent's children come from; only parents are forwarded."""
    script, *ahead = (noise_by_path(40 + number, 11) for number in range(3))
    draft = ScriptedDraft(script, *ahead)
    spec = TreeConfig(paths="eagle-1", parallel=parallel)
    tree = draft.grow(paths="eagle-1", parallel=parallel)
    nodes = "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"
    words = nodes.split()
    tokens_of = {"": ()}
    for word in words:
        order = proposing(script, ahead, spec, tokens_of[word[:-1]]).argsort(descending=True).tolist()
        tokens_of[word] = (*tokens_of[word[:-1]], order[int(word[-1])])
    assert paths_of(tree) == [tokens_of[word] for word in ["", *words]]
    parents = {word[:-1] for word in words}
    forwarded = [word for word in words if word in parents and len(word) <= 5 - parallel]
    assert draft.paths == [(), *(tokens_of[word] for word in forwarded)]
    assert (len(tree.tokens), draft.steps) == (26, 5 - parallel)


def static_specs():
    """Random prefix-closed sets of ranks."""

    def grown(choices):
        paths, leaves = [], [[]]
        for parent, count in choices:
            below = leaves[parent % len(leaves)]
            if len(below) < 4 and below not in [path[:-1] for path in paths]:
                paths += [[*below, rank] for rank in range(count)]
                leaves += [[*below, rank] for rank in range(count)]
        return paths or [[0]]

    return st.builds(grown, st.lists(st.tuples(st.integers(0, 30), st.integers(1, 4)), min_size=1, max_size=6))


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    paths=static_specs(),
    parallel=st.integers(1, 3),
    kind=st.tuples(st.sampled_from(["plain", "decoupled"]), st.sampled_from(["best", "drawn"])),
    seed=st.integers(0, 10**6),
    top_k=st.sampled_from([None, 2]),
)
def test_every_static_tree_is_well_formed(paths, parallel, kind, seed, top_k):
    scripts = [noise_by_path(seed + number, 7) for number in range(5)]
    parallel = min(parallel, max(map(len, paths)))
    draft = ScriptedDraft(*scripts[:3], experts=two_experts(*scripts[3:]), vocabulary=7)
    processing = Sampling(8, frozenset(), temperature=1.0, top_k=top_k)
    spec = {"paths": paths, "parallel": parallel, "candidates": kind[0], "siblings": kind[1]}
    tree = draft.grow(processing=processing, chance=Sampler(seed), **spec)
    assert len(set(paths_of(tree))) == len(tree.tokens), "a sibling repeats a token"
    assert len(tree.tokens) <= 1 + len(paths) and (top_k or kind[1] == "best" or len(tree.tokens) == 1 + len(paths))
    assert draft.steps == TreeConfig(**{"parallel": 1, **spec}).forwards - 1
    assert (tree.proposals is None) == (kind[1] == "best")
    for node in range(1, len(tree.tokens)):
        assert 0 <= tree.tokens[node] < 7 and tree.depths[node] == tree.depths[tree.parents[node]] + 1
        if tree.proposals:
            q_V, earlier = tree.proposals[node], [n for n in tree.children()[tree.parents[node]] if n < node]
            assert q_V[tree.tokens[node]] > 0 and q_V.sum().item() == pytest.approx(1)
            assert all(q_V[tree.tokens[n]] == 0 for n in earlier)
            assert top_k is None or (q_V > 0).sum() <= top_k


def test_siblings_are_drawn_in_turn_from_each_expert():
    scripts = [noise_by_path(seed, 7) for seed in (1, 2, 3)]
    draft = ScriptedDraft(scripts[0], experts=two_experts(*scripts[1:]), vocabulary=7)
    spec = {"paths": [[0], [1], [2]], "candidates": "decoupled", "siblings": "drawn"}
    tree = draft.grow(processing=Sampling(8, frozenset(), temperature=0.5), chance=Sampler(3), **spec)
    free = torch.ones(7).double()
    for rank, node in enumerate((1, 2, 3)):
        q_V = (scripts[1 + rank % 2](()) / 0.5).softmax(-1).double() * free
        assert torch.allclose(tree.proposals[node], q_V / q_V.sum(), atol=1e-6)
        free[tree.tokens[node]] = 0


def test_at_temperature_0_a_drawn_tree_takes_the_best():
    script = noise_by_path(6, 9)
    drawn = ScriptedDraft(script).grow(
        processing=Sampling(8, frozenset()), chance=Sampler(0), paths="eagle-1", siblings="drawn"
    )
    assert drawn.proposals is None and paths_of(drawn) == paths_of(ScriptedDraft(script).grow(paths="eagle-1"))
