"""Draws one decoded answer: which of its tokens the draft guessed, and how many passes of the target it took.

    python -m eval.release.show RECIPE [--draft NAME] [--question TEXT] [--tokens 80] [--out FILE.svg]

The answer is decoded at temperature 0 with the draft's own tree, and again by plain decoding. Where the two are not the
same tokens there is an error and no picture.
"""

import argparse
from dataclasses import dataclass
from html import escape
from pathlib import Path

from eval.measure.tasks import Measured, make_harness
from pipeline.artifacts import checkpoint
from pipeline.artifacts.provenance import revision
from pipeline.artifacts.published import fetch
from pipeline.basics import embedded
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import write_text
from pipeline.basics.public import public_name
from pipeline.decoding.generate import Sampling, plain, speculative
from pipeline.lm.chat import pieces_of, prompt_ids
from pipeline.recipe.load import add_recipe_arguments, load_recipe
from pipeline.recipe.recipe import Recipe
from pipeline.running import entry

QUESTION = "What is a prime number? Give three examples."
COLUMNS, CELL, LINE, MARGIN = 92, 8.4, 24, 20  # characters of a line; pixels
GUESSED, OWN, INK, GREY = "#b7e4c7", "#ffffff", "#1b1b1b", "#6c6c6c"


@dataclass(frozen=True)
class Shown:
    """An answer to draw."""

    question: str
    pieces: list[tuple[str, bool]]  # text of each token, and whether the draft guessed it
    passes: int  # of the target, the prompt's own left out
    tau: float
    source: str  # target, draft, code


def answer(recipe: Recipe, name: str, question: str, tokens: int) -> Shown:
    """Decodes it twice. Raises PipelineError where the draft is not trained, or its answer is not plain decoding's."""
    saved = checkpoint.require_trained_under(recipe, name)
    harness = make_harness(recipe, {name: Measured(name, saved.weights_sha256, recipe.tree(name))})
    target, method = harness.target, harness.methods[name]
    prompt = prompt_ids(target.tokenizer, [{"role": "user", "content": question}])
    sampling = Sampling(tokens, frozenset(target.stop_ids()))
    found = speculative(target, method, prompt, sampling)
    expected = plain(target, prompt, sampling).tokens
    if found.tokens != expected:
        raise PipelineError(
            f"the answer with {name} is not plain decoding's (in {recipe.eval.dtype}): there is nothing to show. In "
            "float32 (--set eval.dtype=float32) the two are the same"
        )
    parameters = saved.training["parameters"]
    where = embedded.HUB_NAME if recipe.target.model.startswith(embedded.PREFIX) else public_name(recipe.target.model)
    source = (
        f"target {where.rpartition('/')[2]}, {recipe.eval.dtype}; draft {name}, {parameters:,} parameters; {revision()}"
    )
    texts = pieces_of(target.tokenizer, found.tokens)
    pieces = [(text, depth > 0) for text, depth in zip(texts, found.depths, strict=True)]
    return Shown(question, pieces, found.acceptance.passes, found.acceptance.tau, source)


def lines_of(pieces: list[tuple[str, bool]]) -> list[list[tuple[str, bool]]]:
    """The pieces in lines of at most `COLUMNS` characters where a space allows; a line break in the text is one
    here.
    """
    lines, line, width = [], [], 0
    for text, flag in pieces:
        for number, part in enumerate(text.split("\n")):
            breaks = width + len(part) > COLUMNS and part.startswith(" ")
            if number or breaks:
                lines.append(line)
                line, width = [], 0
                part = part.lstrip(" ") if breaks else part
            if part:
                line.append((part, flag))
                width += len(part)
    return [*lines, line]


def svg(shown: Shown) -> str:
    """The picture; every character has a cell of its own width, whatever the font."""
    lines, count = lines_of(shown.pieces), len(shown.pieces)
    share = sum(flag for _, flag in shown.pieces)
    width, height = 2 * MARGIN + COLUMNS * CELL, MARGIN + LINE * (len(lines) + 5)
    head = (
        f"{count} tokens in {shown.passes} passes of the target (tau {shown.tau:.2f}); plain decoding takes "
        f"{count - 1} for the same tokens"
    )
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" font-family="monospace" '
        'font-size="14">',
        f"<title>{escape(head)}</title>",
        f'<rect width="100%" height="100%" rx="8" fill="{OWN}" stroke="#d0d0d0"/>',
        _text(MARGIN, MARGIN + LINE * 0.7, f"> {shown.question}", GREY),
    ]
    for number, line in enumerate(lines):
        x, y = float(MARGIN), MARGIN + LINE * (number + 2)
        for text, flag in line:
            if flag:
                out.append(_mark(x, y, text))
            out.append(_text(x, y, text, INK))
            x += len(text) * CELL
    y = MARGIN + LINE * (len(lines) + 2.4)
    out.append(f'<rect x="{MARGIN}" y="{y - 14:.0f}" width="16" height="16" rx="3" fill="{GUESSED}"/>')
    out.append(
        _text(MARGIN + 3 * CELL, y, f"guessed by the draft, accepted by the target: {share} of {count} tokens", INK)
    )
    out.append(_text(MARGIN, y + LINE, head, INK))
    out.append(_text(MARGIN, y + 2 * LINE, shown.source, GREY))
    return "\n".join([*out, "</svg>"]) + "\n"


def _mark(x: float, y: float, text: str) -> str:
    """Behind a guessed token, its leading space left out."""
    before = len(text) - len(text.lstrip(" ")) if text.strip() else 0
    left, wide = x + before * CELL + 0.5, (len(text) - before) * CELL - 1
    return f'<rect x="{left:.1f}" y="{y - 16:.0f}" width="{wide:.1f}" height="21" rx="3" fill="{GUESSED}"/>'


def _text(x: float, y: float, text: str, colour: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.0f}" fill="{colour}" xml:space="preserve" '
        f'textLength="{len(text) * CELL:.1f}">{escape(text)}</text>'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_recipe_arguments(parser)
    parser.add_argument("--draft", help="default: the recipe's publish.draft")
    parser.add_argument("--question", default=QUESTION, help=f"default: {QUESTION}")
    parser.add_argument("--tokens", type=int, default=80, help="at most")
    parser.add_argument("--out", type=Path, help="default: eval/answer.svg in the run's folder")
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    fetch(recipe)
    name = arguments.draft or recipe.publish.draft
    if name not in recipe.draft:
        raise PipelineError(f"--draft {name!r} is not one of the recipe's: {', '.join(sorted(recipe.draft))}")
    shown, out = (
        answer(recipe, name, arguments.question, arguments.tokens),
        arguments.out or recipe.eval_dir / "answer.svg",
    )
    write_text(out, svg(shown))
    print("".join(text for text, _ in shown.pieces))
    print(f"{len(shown.pieces)} tokens, {shown.passes} passes, tau {shown.tau:.2f}; picture: {out}")


if __name__ == "__main__":
    entry.run(main)
