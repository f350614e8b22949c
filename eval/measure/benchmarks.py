"""The paper's six benchmarks, each from a data set of the Hugging Face Hub: source = "benchmark:NAME".

Guarantees: the split's first rows in the split's order, the same every time; a row that does not fit is refused, never
left out. The papers' files hold a selection of 80 that is not the first 80: for exactly their prompts give their file
as `source`. The turns have the same words, except for Alpaca: the papers' file leaves each instruction's `input` out.
"""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import get_dataset_config_names
from huggingface_hub import dataset_info

from pipeline.basics.errors import PipelineError
from pipeline.recipe.sections import BenchmarkConfig

PREFIX = "benchmark:"
FORMATS = {".parquet": "parquet", ".jsonl": "json", ".json": "json"}


@dataclass(frozen=True)
class Benchmark:
    hub: str
    subset: str | None
    split: str
    columns: tuple[str, ...]  # the columns that to_prompt reads
    to_prompt: Callable[[dict[str, Any], int], dict]  # row, its index -> {question_id, category, turns}, or ValueError


def _text(row: dict[str, Any], column: str) -> str:
    value = row[column]
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"column {column!r} holds {str(value)[:80]!r}, expected text")
    return value


def _mt_bench(row: dict[str, Any], index: int) -> dict:
    turns = row["prompt"]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError(f"column 'prompt' holds {str(turns)[:80]!r}, expected a list of texts, one a turn")
    return {"question_id": row["prompt_id"], "category": _text(row, "category"), "turns": turns}


def _humaneval(row: dict[str, Any], index: int) -> dict:
    # No line break between the two, as in all 80 prompts of the papers' file.
    turn = f"Complete the code I provided.{_text(row, 'prompt')}"
    return {"question_id": _text(row, "task_id"), "category": "code", "turns": [turn]}


def _gsm8k(row: dict[str, Any], index: int) -> dict:
    return {"question_id": f"gsm8k/{index}", "category": "math_reasoning", "turns": [_text(row, "question")]}


def _alpaca(row: dict[str, Any], index: int) -> dict:
    turn = _text(row, "instruction")
    if str(row["input"]).strip():  # most rows have none; "Arrange the following countries" is no question without it
        turn = f"{turn}\n\n{_text(row, 'input')}"
    return {"question_id": f"alpaca/{index}", "category": "", "turns": [turn]}


def _cnn_dm(row: dict[str, Any], index: int) -> dict:
    turn = f"Summarize: {_text(row, 'article')}"
    return {"question_id": _text(row, "id"), "category": "summarization", "turns": [turn]}


def _natural_questions(row: dict[str, Any], index: int) -> dict:
    # As people type into a search box, all in lower case; the papers' file begins and ends each as a sentence.
    question = _text(row, "question").strip()
    turn = f"{question[0].upper()}{question[1:]}{'' if question.endswith('?') else '?'}"
    return {"question_id": f"natural-questions/{index}", "category": "qa", "turns": [turn]}


BENCHMARKS = {
    "mt-bench": Benchmark(
        "HuggingFaceH4/mt_bench_prompts", None, "train", ("prompt", "prompt_id", "category"), _mt_bench
    ),
    "humaneval": Benchmark("openai/openai_humaneval", None, "test", ("task_id", "prompt"), _humaneval),
    "gsm8k": Benchmark("openai/gsm8k", "main", "test", ("question",), _gsm8k),
    "alpaca": Benchmark("tatsu-lab/alpaca", None, "train", ("instruction", "input"), _alpaca),
    "cnn-dm": Benchmark("abisee/cnn_dailymail", "3.0.0", "test", ("article", "id"), _cnn_dm),
    "natural-questions": Benchmark(
        "google-research-datasets/nq_open", None, "validation", ("question",), _natural_questions
    ),
}


def find_benchmark(name: str, source: str) -> Benchmark:
    """Return the benchmark of a source "benchmark:NAME". Raise PipelineError with the nearest known name."""
    benchmark_name = source.removeprefix(PREFIX)
    if benchmark_name not in BENCHMARKS:
        nearest = difflib.get_close_matches(benchmark_name.lower(), BENCHMARKS, n=1, cutoff=0)[0]
        raise PipelineError(
            f"benchmark {name}: source={source!r} is not known; did you mean {PREFIX + nearest!r}? "
            f"There are {', '.join(BENCHMARKS)}"
        )
    return BENCHMARKS[benchmark_name]


def dataset_arguments(benchmark: Benchmark, config: BenchmarkConfig) -> dict[str, Any]:
    """Return the arguments of load_dataset: for the Hub's data set, or for `path`. A local copy may lie in a subset's
    folder.

    Raise ValueError for a file of unknown form, and the Hub's error for a revision that it does not have.
    """
    split, path = benchmark.split, config.path or benchmark.hub
    local = Path(path)
    if config.path and local.exists():
        if local.is_dir():
            subfolder = local / (benchmark.subset or "")
            return {"path": str(subfolder if subfolder.is_dir() else local), "split": split}
        if local.suffix not in FORMATS:
            raise ValueError(f"its name ends in {local.suffix!r}")
        return {"path": FORMATS[local.suffix], "data_files": {split: path}, "split": split}
    path, _, pinned = path.partition("@")
    revision, subset = pinned or None, benchmark.subset
    if revision:  # if the Hub cannot be reached, load_dataset would take a copy of any revision from its cache
        dataset_info(path, revision=revision)
    if path != benchmark.hub and subset and subset not in get_dataset_config_names(path, revision=revision):
        subset = None  # another data set may have no subsets
    return {"path": path, "name": subset, "split": split, "revision": revision}


def convert_row(benchmark: Benchmark, row: dict[str, Any], index: int) -> dict:
    """Return the row in the papers' form. Raise ValueError if it does not fit."""
    missing = [column for column in benchmark.columns if column not in row]
    if missing:
        raise ValueError(f"no column {', '.join(missing)}")
    return benchmark.to_prompt(row, index)
