"""Benchmarks are lists of prompts in the papers' form: one JSON object a line, {question_id, category, turns}."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline import embedded
from pipeline.errors import PipelineError
from pipeline.features.shards import HELDOUT_PROMPTS
from pipeline.features.store import fetch_prompts
from pipeline.recipe import Recipe
from pipeline.sections import BenchmarkConfig

HELDOUT = "heldout"  # the dialogues that the dump kept out of training


@dataclass(frozen=True)
class Prompt:
    question_id: str
    category: str
    turns: tuple[str, ...]


def load_prompts(name: str, config: BenchmarkConfig, recipe: Recipe) -> list[Prompt]:
    """The benchmark's first `prompts` prompts. Raises PipelineError when it is missing, malformed or too small."""
    if config.source == "embedded:humaneval":
        raw, where = list(enumerate(embedded.human_eval_prompts(), start=1)), config.source
    else:
        if config.source == HELDOUT:
            fetch_prompts(recipe)
        path = recipe.features_dir / HELDOUT_PROMPTS if config.source == HELDOUT else Path(config.source)
        raw, where = _read(name, path), str(path)
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


def _read(name: str, path: Path) -> list[tuple[int, Any]]:
    if not path.is_file():
        raise PipelineError(
            f"benchmark {name}: {path} does not exist"
            + (": dump the features first" if path.name == HELDOUT_PROMPTS else "")
        )
    found = []
    for number, line in enumerate(
        path.read_text(encoding="utf-8").split("\n"), start=1
    ):  # not splitlines: U+2028 is text
        if line.strip():
            try:
                found.append((number, json.loads(line)))
            except ValueError as error:
                raise PipelineError(f"benchmark {name}: {path}, line {number} is not JSON: {error}") from None
    return found


def _prompt(name: str, where: str, number: int, item) -> Prompt:
    turns = item.get("turns") if isinstance(item, dict) else None
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise PipelineError(
            f"benchmark {name}: {where}, line {number}: expected {{question_id, category, turns: [text, ...]}}"
        )
    return Prompt(str(item.get("question_id", number)), str(item.get("category", "")), tuple(turns))
