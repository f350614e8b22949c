"""The picture of an answer: which tokens are marked, and that there is none of an answer that is not plain
decoding's.
"""

import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from eval.release import show
from eval.release.show import Shown, lines_of, svg
from pipeline.artifacts import checkpoint
from pipeline.basics.errors import PipelineError
from pipeline.decoding.generate import plain
from pipeline.drafts import build
from pipeline.drafts.parts.layers import shapes_of
from pipeline.lm.chat import pieces_of
from pipeline.lm.model import load_config
from tests.kit import byte_tokenizer

SVG = "{http://www.w3.org/2000/svg}"


def test_pieces_make_the_text_and_letters_of_several_tokens_wait_for_their_last():
    tokenizer = byte_tokenizer()
    tokens = tokenizer.encode("an é, <b>")
    pieces = pieces_of(tokenizer, tokens)
    assert len(pieces) == len(tokens) and "".join(pieces) == "an é, <b>"
    assert pieces[3:5] == ["", "é"]


def test_lines_break_at_spaces_and_where_the_text_does():
    word = ("x" * 60, False)
    lines = lines_of([word, (" " + "y" * 40, True), (".\n", False), ("z", True)])
    assert lines == [[word], [("y" * 40, True), (".", False)], [("z", True)]]


def test_the_picture_marks_exactly_the_guesses_and_says_what_they_saved():
    shown = Shown("a < b?", [("Yes", False), (" & no", True), ("</svg>", False)], 1, 2.0, "target T")
    root = ElementTree.fromstring(svg(shown))
    marks = [rect for rect in root.iter(f"{SVG}rect") if rect.get("fill") == show.GUESSED]
    assert len(marks) == 1 + 1  # the legend's own
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts[:4] == ["> a < b?", "Yes", " & no", "</svg>"]
    assert "guessed by the draft, accepted by the target: 1 of 3 tokens" in texts
    assert texts[-2] == "3 tokens in 1 passes of the target (tau 2.00); plain decoding takes 2 for the same tokens"
    assert len(svg(shown)) < 10_000


@pytest.fixture
def trained(tiny_recipe, ends):
    """The tiny recipe, as if its draft "eagle" had been trained."""
    draft = build(tiny_recipe.draft["eagle"], shapes_of(load_config(tiny_recipe.target)))
    draft.initialise(0)
    draft.bind(ends)
    checkpoint.save(tiny_recipe.draft_dir("eagle"), draft, draft.state_dict(), tiny_recipe, "eagle", {"parameters": 7})
    return tiny_recipe


def test_what_is_shown_is_the_targets_own_answer(trained, loaded_target):
    shown = show.answer(trained, "eagle", "hello?", 12)
    assert 1 <= len(shown.pieces) <= 12 and shown.tau >= 1 and shown.question == "hello?"
    assert shown.passes + sum(flag for _, flag in shown.pieces) >= len(shown.pieces) - 1
    assert "float32; draft eagle, 7 parameters" in shown.source


def test_an_answer_that_is_not_plain_decodings_is_not_shown(trained, monkeypatch):
    def other(*arguments):
        found = plain(*arguments)
        return replace(found, tokens=[*found.tokens[:-1], found.tokens[-1] ^ 1])

    monkeypatch.setattr(show, "plain", other)
    with pytest.raises(PipelineError, match="is not plain decoding's"):
        show.answer(trained, "eagle", "hello?", 12)
