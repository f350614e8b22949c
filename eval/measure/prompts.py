"""Benchmarks are lists of prompts in the papers' form, {question_id, category, turns}. Where they come from:

    PATH                  one JSON object a line
    heldout               the dialogues that the dump kept out of training
    embedded:humaneval    the embedded default
    benchmark:NAME        one of the paper's six, from the Hub or from a copy of its data set (benchmarks.py)

What does not fit is refused, never left out.
"""

import json
from dataclasses import dataclass
from itertools import islice
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
from pipeline.recipe.recipe import Recipe
from pipeline.recipe.sections import BenchmarkConfig

HELDOUT = "heldout"
_UNREADABLE = (OSError, ValueError, RuntimeError, DatasetsError, httpx2.HTTPError)  # what `datasets` raises


@dataclass(frozen=True)
class Prompt:
    question_id: str
    category: str
    turns: tuple[str, ...]


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
    return prompts[:wanted]


def _items(name: str, config: BenchmarkConfig, recipe: Recipe) -> tuple[list[tuple[int, Any]], str]:
    """Each with its number, by which an error names it; and where they are."""
    if config.source.startswith(benchmarks.PREFIX):
        return _rows(name, config)
    if config.source == "embedded:humaneval":
        return list(enumerate(embedded.human_eval_prompts(), start=1)), config.source
    if "://" in config.source:
        raise PipelineError(f"benchmark {name}: {config.source} is an address: expected a file on this machine")
    path = heldout_prompts(recipe) if config.source == HELDOUT else Path(config.source).expanduser()
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
