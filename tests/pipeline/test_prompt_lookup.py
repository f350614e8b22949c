"""Prompt lookup: it proposes only earlier continuations of the text's end, and is lossless like every draft."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.basics.errors import PipelineError
from pipeline.decoding import replay
from pipeline.decoding.config import LoadedMethod, TreeConfig
from pipeline.decoding.contract import RoundInput
from pipeline.decoding.generate import Sampling, decode_plain, decode_speculative
from pipeline.drafts import make, make_untrained
from pipeline.drafts.parts.layers import draft_shapes
from pipeline.drafts.prompt_lookup import LONGEST, Corpus, PromptLookupConfig
from tests.pipeline.scripted import paths_of
from tests.pipeline.taught import NEVER, greedy, prompt_of

SHAPES = {"vocab_size": 260, "target_layers": 2}


def propose_tree(text, state=None, **settings):
    tree = {key: settings.pop(key) for key in ("depth", "top_k", "nodes") if key in settings}
    lookup = make(PromptLookupConfig(**settings), SHAPES)
    spec = lookup.config.resolve(TreeConfig(**{"depth": 3, "top_k": 2, "nodes": 7, **tree}))
    return lookup.propose(state or lookup.open(), RoundInput(list(text), torch.zeros(0, 0, 1)), spec, None)


def test_what_followed_the_longest_suffix_comes_first():
    """The text has 'ab' twice before its end: 'abx' follows a longer match than the later 'b'."""
    tree = propose_tree(b"zabxy..b!..zab", depth=2, nodes=5)
    assert paths_of(tree)[1:] == [(ord("x"),), (ord("x"), ord("y")), (ord("!"),), (ord("!"), ord("."))]


def test_of_equal_matches_the_latest_comes_first():
    assert paths_of(propose_tree(b"a1!a2 a", depth=1, nodes=3))[1:] == [(ord("2"),), (ord("1"),)]


def test_continuations_that_begin_alike_share_their_nodes():
    tree = propose_tree(b"qab1 qab2 q", depth=3, nodes=7)
    assert paths_of(tree)[1:] == [tuple(b"a"), tuple(b"ab"), tuple(b"ab2"), tuple(b"ab1")]


def test_a_text_that_repeats_nothing_has_a_tree_of_its_root():
    assert propose_tree(b"abc").tokens == [ord("c")]
    assert propose_tree(b"a").tokens == [ord("a")]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 4), st.integers(1, 3), st.integers(2, 9))
def test_trees_keep_their_bounds_and_copy_what_stands_in_the_text(text, depth, top_k, nodes):
    nodes = min(max(nodes, depth + 1), 1 + top_k + top_k * top_k * (depth - 1))
    tree = propose_tree(text, depth=depth, top_k=top_k, nodes=nodes)
    assert len(tree.tokens) <= nodes and max(tree.depths) <= depth
    assert max(map(len, tree.children())) <= top_k
    assert len(set(paths_of(tree))) == len(tree.tokens)
    for path in paths_of(tree)[1:]:
        copied = [text[-1], *path]
        assert any(text[i : i + len(copied)] == copied for i in range(len(text)))


@given(st.lists(st.integers(0, 2), min_size=4, max_size=40), st.integers(1, 3))
def test_reading_on_is_reading_all(text, pieces):
    lookup = make(PromptLookupConfig(), SHAPES)
    state, spec = lookup.open(), lookup.config.resolve(TreeConfig(depth=3, top_k=2, nodes=7))
    for end in range(pieces, len(text) + 1, pieces):
        tree = lookup.propose(state, RoundInput(text[:end], torch.zeros(0, 0, 1)), spec, None)
        assert (tree.tokens, tree.parents) == (
            (fresh := propose_tree(text[:end])).tokens,
            fresh.parents,
        )


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7, "top_k": 9}, {"repetition_penalty": 1.3}])
def test_its_answers_are_plain_decodings(loaded_target, settings):
    method = LoadedMethod(
        make(PromptLookupConfig(), draft_shapes(loaded_target.config)), TreeConfig(depth=5, top_k=3, nodes=12)
    )
    accepted = 0
    for seed in range(5):
        prompt, sampling = prompt_of(seed, 20) * 3, Sampling(30, NEVER, **settings, seed=seed)
        got = decode_speculative(loaded_target, method, prompt, sampling)
        assert got.tokens == decode_plain(loaded_target, prompt, sampling).tokens
        assert got.draft_forwards == 0
        accepted += got.acceptance.tokens - got.acceptance.passes
    assert accepted > 0 or settings


def test_the_replay_counts_what_decoding_does(loaded_target):
    lookup, prompt = make(PromptLookupConfig(), draft_shapes(loaded_target.config)), prompt_of(3, 20) * 2
    tokens = prompt + greedy(loaded_target, prompt, 40)
    largest = TreeConfig(depth=5, top_k=10, nodes=6, parallel=1)
    counted = replay.make_counter(lookup, loaded_target.states(tokens), tokens, len(prompt), largest)
    for depth, top_k, nodes in ((5, 1, 6), (3, 2, 7), (1, 3, 3)):
        tree = TreeConfig(depth=depth, top_k=top_k, nodes=nodes, parallel=1)
        assert (
            counted(tree)
            == decode_speculative(loaded_target, LoadedMethod(lookup, tree), prompt, Sampling(40, NEVER)).acceptance
        )


# -- a corpus --------------------------------------------------------------------------------------------------------


class ByteTokenizer:
    """A tokenizer with one token per byte."""

    def __call__(self, text, **_):
        return {"input_ids": list(text.encode())}


def by_hand(corpus, text):
    """Return positions of the corpus that end with the text's last tokens -> the number of matching tokens."""
    matches = {}
    for place in range(len(corpus) - 1):
        length = 0
        while length < min(LONGEST, place + 1, len(text)) and corpus[place - length] == text[-1 - length]:
            length += 1
        if length:
            matches[place] = length
    return matches


@given(
    st.lists(st.integers(0, 3), min_size=2, max_size=30),
    st.lists(st.integers(0, 4), min_size=1, max_size=20),
)
def test_a_corpus_finds_every_place_the_longest_agreement_first(corpus, text):
    matches = Corpus(corpus).matches(text)
    assert dict(matches) == by_hand(corpus, text) and len(matches) == len(dict(matches))
    assert [n for _, n in matches] == sorted((n for _, n in matches), reverse=True)


def test_of_too_many_places_of_a_corpus_some_are_looked_at():
    matches = Corpus([7] * 200).matches([7] * 9)
    assert (
        len(matches) == 32
        and {length for _, length in matches} == {8}
        and all(7 <= place < 199 for place, _ in matches)
    )


def test_the_text_itself_comes_before_a_corpus_that_agrees_as_long(tmp_path):
    (tmp_path / "text").write_text("xab1 yab2 zcab3 ", encoding="utf-8")
    lookup = make_untrained(PromptLookupConfig(corpus=str(tmp_path / "text")), SHAPES, ByteTokenizer)
    spec = lookup.config.resolve(TreeConfig(depth=1, top_k=6, nodes=7))

    def firsts(text):
        inputs = RoundInput(list(text), torch.zeros(0, 0, 1))
        return "".join(map(chr, lookup.propose(lookup.open(), inputs, spec, None).tokens[1:]))

    # Two tokens agree everywhere.
    assert (candidates := firsts(b"qab4 ab"))[0] == "4" and sorted(candidates) == list("1234")
    # Three do in the corpus.
    assert (candidates := firsts(b"qab4 cab"))[:2] == "34" and sorted(candidates) == list("1234")


def test_a_corpus_changes_no_answer(loaded_target, tmp_path):
    """The corpus holds the target's own answer, so that much is accepted."""
    prompt, shapes, taus = prompt_of(5, 20), draft_shapes(loaded_target.config), {}
    (tmp_path / "text").write_text("any")
    answer = greedy(loaded_target, prompt, 40)
    for corpus in (None, str(tmp_path / "text")):
        lookup = make_untrained(
            PromptLookupConfig(corpus=corpus), shapes, lambda: lambda *_, **__: {"input_ids": answer}
        )
        method = LoadedMethod(lookup, TreeConfig(depth=5, top_k=1, nodes=6))
        got = decode_speculative(loaded_target, method, prompt, Sampling(40, NEVER))
        assert got.tokens == answer
        taus[corpus is None] = got.acceptance.tau
    assert taus[False] > 3 and taus[False] > taus[True]


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "No such file"), (b"", "has 0 tokens"), (b"\xff\xfe", "not UTF-8")],
)
def test_a_corpus_that_is_no_text_is_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "text").write_bytes(content)
    with pytest.raises(PipelineError, match=message) as raised:
        make_untrained(PromptLookupConfig(corpus=str(tmp_path / "text")), SHAPES, ByteTokenizer)
    assert str(tmp_path) not in str(raised.value)  # the message does not name its folder


def test_a_corpus_stays_on_this_machine():
    config = PromptLookupConfig(corpus="notes.txt")
    assert config.corpus == str(Path.cwd() / "notes.txt")
    assert config.public() == PromptLookupConfig() and "notes" not in str(config.public().to_json())


def test_a_tree_that_it_has_no_ranks_or_experts_for_is_refused():
    with pytest.raises(ValueError, match="no ranks for a static tree"):
        PromptLookupConfig().resolve(TreeConfig(paths="eagle-1"))
    with pytest.raises(ValueError, match="needs several experts"):
        PromptLookupConfig().resolve(TreeConfig(candidates="decoupled"))
