"""The token tree, on drafts whose answers are scripted."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.decoding.tree import build_tree, grow
from pipeline.drafts.base import Answer, DraftState
from pipeline.sections import TreeConfig


class ScriptedDraft:
    """Answers after a path of tokens with ``next_logits(path)`` and ``ahead_logits(path)``.

    A hidden state carries the number of the forwarded path, so that a feature of another node gives another answer;
    every frontier's mask is compared with the ancestry of the paths forwarded so far.
    """

    def __init__(self, next_logits, ahead_logits=None, ids=None):
        self.next_logits, self.ahead_logits, self.draft_token_ids = next_logits, ahead_logits, ids
        self.paths, self.steps, self.depths = [()], 0, []

    def _answer(self, numbers):
        paths = [self.paths[number] for number in numbers]
        ahead = torch.stack([self.ahead_logits(path) for path in paths]) if self.ahead_logits else None
        hidden = torch.tensor(numbers, dtype=torch.float32)[:, None]
        return Answer(hidden, torch.stack([self.next_logits(path) for path in paths]), ahead)

    def start(self):
        return self._answer([0])

    def step(self, state, frontier):
        self.steps += 1
        self.depths.append(frontier.depth)
        numbers = []
        for token, hidden in zip(frontier.tokens_W.tolist(), frontier.hidden_WD[:, 0].tolist(), strict=True):
            numbers.append(len(self.paths))
            self.paths.append((*self.paths[int(hidden)], token))
        forwarded = self.paths[1:]
        expected = [[path[: len(other)] == other for other in forwarded] for path in self.paths[numbers[0] :]]
        assert frontier.seen_WC.tolist() == expected
        assert {len(self.paths[number]) for number in numbers} == {frontier.depth}
        return self._answer(numbers)

    def grow(self, root=0, **spec):
        return grow(self, DraftState(), root, self.start(), TreeConfig(**spec))


def paths_of(tree):
    paths = [()]
    for node in range(1, len(tree.tokens)):
        paths.append((*paths[tree.parents[node]], tree.tokens[node]))
    return paths


def table(probabilities, vocabulary):
    """Logits by path from a table of probabilities; what is not listed shares the rest."""

    def logits(path):
        listed = probabilities[path]
        rest = (1 - sum(listed.values())) / (vocabulary - len(listed))
        return torch.tensor([listed.get(token, rest) for token in range(vocabulary)]).log()

    return logits


def noise_by_path(seed, vocabulary, decimals=None):
    """Random logits, a function of the path; `decimals` rounds them, so that ties abound."""

    def logits(path):
        number = seed
        for token in path:
            number = (number * 1000 + token + 1) % (2**31 - 1)
        values = 2 * torch.randn(vocabulary, generator=torch.Generator().manual_seed(number))
        return values if decimals is None else values.round(decimals=decimals)

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
        # cumulative: A .6, B .3, AA .3 (after B: the same), BD .276, AC .27, BDC .2484, AAB .21, AAE .06, BA .015, BDB .0138
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


def test_an_unlikely_branch_of_a_level_is_not_forwarded():
    """Only what stays among the top_k of its level by CUMULATIVE probability is forwarded, not each row's best."""
    script = {**EAGLE_2, (A,): {A: 0.50, C: 0.48}}  # AC .288 beats BD .276
    draft = ScriptedDraft(table({**script, (A, C): {B: 0.9, D: 0.05}}, 5))
    draft.grow(depth=3, top_k=2, nodes=6)
    assert draft.paths == [(), (A,), (B,), (A, A), (A, C)]


def brute_force(next_logits, ahead_logits, spec: TreeConfig):
    """The rule again, on paths and Python numbers: (path -> cumulative log-probability) of the whole pool, then pruned."""
    pool, level = {}, {(): 0.0}
    for depth in range(1, spec.depth + 1):
        scored = {}
        for path, score in level.items():
            hybrid = spec.hybrid and depth == spec.depth
            logits = ahead_logits(path[:-1]) if hybrid else next_logits(path)
            best = logits.double().log_softmax(-1).topk(min(spec.top_k, len(logits)))
            for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                scored[(*path, token)] = score + value
        pool.update(scored)
        level = dict(sorted(scored.items(), key=lambda item: -item[1])[: spec.top_k])
    return set(sorted(pool, key=lambda path: -pool[path])[: spec.nodes - 1])


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize(("depth", "top_k", "nodes"), [(2, 3, 8), (3, 2, 7), (4, 4, 20), (5, 10, 60), (6, 3, 30)])
def test_the_tree_is_the_brute_force_one(depth, top_k, nodes, hybrid):
    spec = TreeConfig(depth=depth, top_k=top_k, nodes=nodes, hybrid=hybrid)
    for seed in range(5):
        scripts = noise_by_path(seed, 17), noise_by_path(100 + seed, 17)
        tree = ScriptedDraft(*scripts).grow(**spec.model_dump())
        assert set(paths_of(tree)[1:]) == brute_force(*scripts, spec)


def specs():
    def whole(depth, top_k, share, hybrid):
        most = 1 + top_k + top_k * top_k * (depth - 1)
        nodes = depth + 1 + round(share * max(most - depth - 1, 0))
        return TreeConfig(depth=depth, top_k=top_k, nodes=min(nodes, most), hybrid=hybrid and depth > 1)

    return st.builds(whole, st.integers(1, 5), st.integers(1, 6), st.floats(0, 1), st.booleans())


@settings(max_examples=150, deadline=None, derandomize=True)
@given(spec=specs(), seed=st.integers(0, 10**6), decimals=st.sampled_from([None, 0, "equal"]))
def test_every_tree_is_well_formed(spec, seed, decimals):
    """Also where logits tie, up to all of them being equal."""
    vocabulary = 7
    if decimals == "equal":
        scripts = (lambda path: torch.zeros(vocabulary),) * 2
    else:
        scripts = noise_by_path(seed, vocabulary, decimals), noise_by_path(seed + 1, vocabulary, decimals)
    draft = ScriptedDraft(*scripts)
    tree = draft.grow(**spec.model_dump())

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
    assert draft.steps == spec.depth - (2 if spec.hybrid else 1)
    assert draft.depths == list(range(1, draft.steps + 1))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(spec=specs(), seed=st.integers(0, 10**6))
def test_siblings_stand_best_first(spec, seed):
    script, ahead = noise_by_path(seed, 9), noise_by_path(seed + 1, 9)
    tree = ScriptedDraft(script, ahead).grow(**spec.model_dump())
    paths = paths_of(tree)
    for node, children in enumerate(tree.children()):
        from_ahead = spec.hybrid and tree.depths[node] == spec.depth - 1
        logits = ahead(paths[node][:-1]) if from_ahead else script(paths[node])
        tokens = [tree.tokens[child] for child in children]
        assert tokens == logits.argsort(descending=True)[: len(tokens)].tolist()


def test_a_vocabulary_smaller_than_top_k_gives_all_its_tokens_once():
    tree = ScriptedDraft(lambda path: torch.zeros(3)).grow(depth=2, top_k=5, nodes=30)
    assert len(tree.tokens) == 1 + 3 + 3 * 3  # fewer than asked for: there are no more
    assert len(set(paths_of(tree))) == 13


@pytest.mark.parametrize("depth", [2, 3, 4, 5])
def test_draft_forwards_per_round(depth):
    script = noise_by_path(3, 12)
    plain, hybrid = ScriptedDraft(script), ScriptedDraft(script, noise_by_path(4, 12))
    assert max(plain.grow(depth=depth, top_k=4, nodes=1 + 4 + 16 * (depth - 1)).depths) == depth
    assert max(hybrid.grow(depth=depth, top_k=4, nodes=1 + 4 + 16 * (depth - 1), hybrid=True).depths) == depth
    assert (plain.steps, hybrid.steps) == (depth - 1, depth - 2)


def test_the_last_hybrid_level_is_gathered_by_parent_and_not_by_rank():
    """Both kept nodes of level 2 descend from B, which is row 1 of its forward: rank 0 would read A's ahead list."""
    following = table({(): {A: 0.5, B: 0.49}, (A,): {A: 0.26, B: 0.25, C: 0.24}, (B,): {D: 0.5, E: 0.45}}, 5)
    ahead = table({(): {E: 0.9, D: 0.05}, (A,): {A: 0.9, B: 0.06}, (B,): {C: 0.8, D: 0.1}}, 5)
    draft = ScriptedDraft(following, ahead)
    tree = draft.grow(depth=3, top_k=2, nodes=11, hybrid=True)
    assert draft.paths == [(), (A,), (B,)]
    last = {path for path in paths_of(tree) if len(path) == 3}
    assert last == {(B, D, C), (B, D, D), (B, E, C), (B, E, D)}

    kept = [(B, D), (B, E)]  # best first: their ranks are 0 and 1, like the rows of A and B
    by_rank = {
        (*kept[rank], token) for rank, row in enumerate([(A,), (B,)]) for token in ahead(row).topk(2).indices.tolist()
    }
    assert by_rank == {(B, D, A), (B, D, B), (B, E, C), (B, E, D)} != last


def test_a_hybrid_tree_of_depth_two_needs_no_step():
    ahead = table({(): {E: 0.6, D: 0.3}}, 5)
    draft = ScriptedDraft(table({(): {A: 0.7, B: 0.2}}, 5), ahead)
    tree = draft.grow(depth=2, top_k=2, nodes=7, hybrid=True)
    assert sorted(paths_of(tree)) == sorted([(), (A,), (B,), (A, E), (A, D), (B, E), (B, D)])
    assert draft.steps == 0


@pytest.mark.parametrize("hybrid", [False, True])
def test_a_reduced_vocabulary_answers_in_target_ids(hybrid):
    """The same logits over five ids and over a target vocabulary that has nothing else: the same tree."""
    ids = torch.tensor([3, 11, 20, 21, 40])

    def whole(script):
        return lambda path: torch.full((50,), -1e9).scatter(0, ids, script(path))

    scripts = noise_by_path(1, 5), noise_by_path(2, 5)
    spec = {"depth": 3, "top_k": 3, "nodes": 15, "hybrid": hybrid}
    reduced = ScriptedDraft(*scripts, ids=ids).grow(root=7, **spec)
    unreduced = ScriptedDraft(*map(whole, scripts)).grow(root=7, **spec)
    assert paths_of(reduced) == paths_of(unreduced)
    assert set(reduced.tokens[1:]) <= set(ids.tolist())


def test_build_tree_counts_depths_and_ancestors():
    tree = build_tree(9, [1, 2, 3, 4], [0, 0, 2, 3], torch.device("cpu"))
    assert (tree.tokens, tree.parents, tree.depths) == ([9, 1, 2, 3, 4], [-1, 0, 0, 2, 3], [0, 1, 1, 2, 3])
    assert tree.children() == [[1, 2], [], [3], [4], []]
    assert tree.ancestors_NN.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 0, 1, 1, 0],
        [1, 0, 1, 1, 1],
    ]
