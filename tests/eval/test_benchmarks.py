"""The paper's six benchmarks, from local copies with the Hub's columns and files: exact turns, or one clear refusal."""

import json
from pathlib import Path
from types import SimpleNamespace

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eval.measure import benchmarks
from eval.measure.benchmarks import BENCHMARKS
from eval.measure.prompts import BenchmarkPrompt, load_prompts
from pipeline.basics.errors import PipelineError
from pipeline.recipe.recipe import Recipe
from tests.kit import recipe_tree

GSM8K = [{"question": f"How many are {n} + {n}?", "answer": f"{n} + {n}\n#### {2 * n}"} for n in range(4)]
ALPACA = [
    {"instruction": "Give three tips.", "input": "", "output": "o", "text": "t"},
    {"instruction": "Sort by size.", "input": "India, China", "output": "o", "text": "t"},
    {"instruction": "Name a boat.\n", "input": " ", "output": "o", "text": "t"},
]
# One row a line, as in the Hub's data sets: file of the split -> rows, and the prompts they are to become.
CASES = {
    "mt-bench": (
        "data/train-00000-of-00001-5b0fa1e8b5b2d6a5.parquet",
        [
            {"category": "writing", "prompt": ["Write.", "Begin with A."], "reference": [], "prompt_id": 36549506},
            {"category": "math", "prompt": ["What is x?", "And y?"], "reference": ["1", "2"], "prompt_id": 7},
            {"category": "coding", "prompt": [" One\nturn "], "reference": [], "prompt_id": 8},
        ],
        [
            BenchmarkPrompt("36549506", "writing", ("Write.", "Begin with A.")),
            BenchmarkPrompt("7", "math", ("What is x?", "And y?")),
            BenchmarkPrompt("8", "coding", (" One\nturn ",)),
        ],
    ),
    "humaneval": (
        "openai_humaneval/test-00000-of-00001.parquet",
        [
            {"task_id": f"HumanEval/{n}", "prompt": prompt, "canonical_solution": "c", "test": "t", "entry_point": "f"}
            for n, prompt in enumerate(["from typing import List\n\n\ndef f():\n", "\n\ndef g():\n", "\ndef h(x):\n"])
        ],
        [
            BenchmarkPrompt(
                "HumanEval/0", "code", ("Complete the code I provided.from typing import List\n\n\ndef f():\n",)
            ),
            BenchmarkPrompt("HumanEval/1", "code", ("Complete the code I provided.\n\ndef g():\n",)),
            BenchmarkPrompt("HumanEval/2", "code", ("Complete the code I provided.\ndef h(x):\n",)),
        ],
    ),
    "gsm8k": (
        "main/test-00000-of-00001.parquet",
        GSM8K,
        [BenchmarkPrompt(f"gsm8k/{n}", "math_reasoning", (f"How many are {n} + {n}?",)) for n in range(4)],
    ),
    "alpaca": (
        "data/train-00000-of-00001-a09b74b3ef9c3b56.parquet",
        ALPACA,
        [
            BenchmarkPrompt("alpaca/0", "", ("Give three tips.",)),
            BenchmarkPrompt("alpaca/1", "", ("Sort by size.\n\nIndia, China",)),
            BenchmarkPrompt("alpaca/2", "", ("Name a boat.\n",)),
        ],
    ),
    "cnn-dm": (
        "3.0.0/test-00000-of-00001.parquet",
        [{"article": f"(CNN)Text {n}.", "highlights": f"h {n}", "id": f"{n:040x}"} for n in (10, 11, 12)],
        [BenchmarkPrompt(f"{n:040x}", "summarization", (f"Summarize: (CNN)Text {n}.",)) for n in (10, 11, 12)],
    ),
    "natural-questions": (
        "nq_open/validation-00000-of-00001.parquet",
        [
            {"question": "when was the last time anyone was on the moon", "answer": ["14 December 1972 UTC"]},
            {"question": " who wrote it?", "answer": ["one", "two"]},
            {"question": "9 to 5 is by whom", "answer": ["Dolly Parton"]},
        ],
        [
            BenchmarkPrompt("natural-questions/0", "qa", ("When was the last time anyone was on the moon?",)),
            BenchmarkPrompt("natural-questions/1", "qa", ("Who wrote it?",)),
            BenchmarkPrompt("natural-questions/2", "qa", ("9 to 5 is by whom?",)),
        ],
    ),
}


@pytest.fixture
def recipe(tmp_path) -> Recipe:
    return Recipe.model_validate(recipe_tree(tmp_path / "target", tmp_path / "data.json", tmp_path / "run"))


def configured(**fields) -> SimpleNamespace:
    return SimpleNamespace(**{"prompts": None, "path": None, "context": None} | fields)


def write(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def load(recipe: Recipe, benchmark: str, path: Path | str | None, **fields) -> list[BenchmarkPrompt]:
    config = configured(source=f"benchmark:{benchmark}", path=path if path is None else str(path), **fields)
    return load_prompts("bench", config, recipe)


def refusal(recipe: Recipe, benchmark: str, path: Path | str | None, **fields) -> str:
    with pytest.raises(PipelineError) as caught:
        load(recipe, benchmark, path, **fields)
    return str(caught.value)


@pytest.mark.parametrize("benchmark", CASES)
def test_a_copy_of_the_hubs_folder_gives_exactly_these_turns(tmp_path, recipe, benchmark):
    file, rows, expected = CASES[benchmark]
    write(tmp_path / "copy" / file, rows)
    assert load(recipe, benchmark, tmp_path / "copy") == expected and set(CASES) == set(BENCHMARKS)
    assert load(recipe, benchmark, tmp_path / "copy", prompts=2) == expected[:2]


@pytest.mark.parametrize("ending", [".parquet", ".jsonl", ".json"])
def test_a_single_file_is_the_split(tmp_path, recipe, ending):
    assert load(recipe, "alpaca", write(tmp_path / f"copy{ending}", ALPACA)) == CASES["alpaca"][2]


def test_only_the_subset_and_the_split_are_read_in_the_order_of_their_files(tmp_path, recipe):
    """The folders of a Hub's snapshot lie next to each other, and each also holds the training split."""
    wrong = [{"question": "wrong", "answer": "wrong"}]
    for file in ("main/train", "socratic/train", "socratic/test", "another/test"):
        write(tmp_path / "copy" / f"{file}-00000-of-00001.parquet", wrong)
    for number in (2, 0, 1):
        write(tmp_path / f"copy/main/test-0000{number}-of-00003.parquet", [GSM8K[number]])
    assert load(recipe, "gsm8k", tmp_path / "copy") == CASES["gsm8k"][2][:3]


def test_rows_beyond_those_asked_for_are_not_looked_at(tmp_path, recipe):
    path = write(tmp_path / "copy.jsonl", [*GSM8K, {"question": None, "answer": ""}])
    assert load(recipe, "gsm8k", path, prompts=4) == CASES["gsm8k"][2]
    assert "row 4 (the first is 0): column 'question' holds 'None', expected text" in refusal(recipe, "gsm8k", path)


def test_too_few_rows_are_refused(tmp_path, recipe):
    path = write(tmp_path / "copy.jsonl", GSM8K)
    expected = f"benchmark bench: benchmark:gsm8k, {path} (subset main, split test) holds 4 prompts, eval.benchmarks."
    assert refusal(recipe, "gsm8k", path, prompts=5) == f"{expected}bench.prompts asks for 5"
    assert "holds 0 prompts" in refusal(recipe, "gsm8k", write(tmp_path / "empty.jsonl", []))


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("misspelt", "nearest"), [("GSM8K", "gsm8k"), ("natural_questions", "natural-questions")])
def test_an_unknown_name_is_refused_with_the_nearest(recipe, misspelt, nearest):
    message = refusal(recipe, misspelt, None)
    assert message == (
        f"benchmark bench: source='benchmark:{misspelt}' is not known; did you mean 'benchmark:{nearest}'? "
        "There are mt-bench, humaneval, gsm8k, alpaca, cnn-dm, natural-questions"
    )


@pytest.mark.parametrize("benchmark", CASES)
def test_missing_columns_are_named_beside_those_there_are(tmp_path, recipe, benchmark):
    for column in BENCHMARKS[benchmark].columns:
        rows = [{key: value for key, value in row.items() if key != column} for row in CASES[benchmark][1]]
        message = refusal(recipe, benchmark, write(tmp_path / f"{column}.parquet", rows))
        assert f"row 0 (the first is 0): no column {column}; columns found: {', '.join(sorted(rows[0]))}. " in message


def test_a_refused_row_says_everything(tmp_path, recipe):
    path = write(tmp_path / "copy.jsonl", [{"text": "x", "label": 1}])
    assert refusal(recipe, "alpaca", path) == (
        f"benchmark bench: benchmark:alpaca, {path} (split train), row 0 (the first is 0): no column instruction, "
        "input; columns found: label, text. eval.benchmarks.bench.path takes a local folder or file (.parquet, .jsonl, "
        ".json), or another data set of the Hub, with the columns instruction, input"
    )


@pytest.mark.parametrize("pinned", ["", "@e53f048"])
def test_a_hub_out_of_reach_is_one_clear_error(recipe, pinned):
    message = refusal(recipe, "cnn-dm", BENCHMARKS["cnn-dm"].hub + pinned)
    assert message.startswith(f"benchmark bench: benchmark:cnn-dm, {BENCHMARKS['cnn-dm'].hub}{pinned} (")
    assert " cannot be read: " in message and "reach" in message
    assert ". eval.benchmarks.bench.path takes a local folder or file (.parquet, .jsonl, .json), or" in message


@pytest.mark.parametrize("path", ["/no/such/folder", "no/such", "no-such.parquet"])
def test_a_path_that_is_not_there_is_one_clear_error(recipe, path):
    message = refusal(recipe, "gsm8k", path)
    assert message.startswith(f"benchmark bench: benchmark:gsm8k, {path} (subset main, split test) cannot be read: ")


def second(benchmark: str, **change: object) -> tuple[str, str, list[dict]]:
    """A copy whose second row is another."""
    rows = CASES[benchmark][1]
    return benchmark, "copy.parquet", [rows[0], rows[1] | change, rows[2]]


ROW = "row 1 (the first is 0): column"
PATH = "eval.benchmarks.bench.path"


@pytest.mark.parametrize(
    ("benchmark", "file", "content", "words"),
    [
        (*second("mt-bench", prompt=[]), f"{ROW} 'prompt' holds '[]', expected a list of texts, one a turn"),
        (*second("mt-bench", prompt=["a", " "]), f"{ROW} 'prompt' holds \"['a', ' ']\", expected a list of texts"),
        (*second("humaneval", task_id=None), f"{ROW} 'task_id' holds 'None', expected text"),
        (*second("gsm8k", question="\n"), f"{ROW} 'question' holds '\\n', expected text"),
        (*second("alpaca", input=None), f"{ROW} 'input' holds 'None', expected text"),
        (*second("cnn-dm", id=None), f"{ROW} 'id' holds 'None', expected text"),
        (*second("natural-questions", question=" "), f"{ROW} 'question' holds ' ', expected text"),
        ("cnn-dm", "copy.jsonl", CASES["cnn-dm"][1] * 2, f"question_id '{10:040x}' twice"),
        ("gsm8k", "copy.csv", "question\n", f"cannot be read: its name ends in '.csv'. {PATH} takes"),
        ("gsm8k", "copy.parquet", "nonsense", "cannot be read: Parquet"),
        ("gsm8k", "copy.jsonl", "nonsense", "cannot be read: JSON parse error"),
        ("gsm8k", "copy/train-0.parquet", GSM8K, f"Bad split: test. Available splits: ['train']. {PATH}"),
    ],
)
def test_a_copy_that_is_not_the_benchmark_is_one_clear_error(tmp_path, recipe, benchmark, file, content, words):
    if isinstance(content, str):
        (tmp_path / file).write_text(content)
    else:
        write(tmp_path / file, content)
    assert words in refusal(recipe, benchmark, tmp_path / file.partition("/")[0])


# -- what is asked of the Hub ----------------------------------------------------------------------------------------


@pytest.fixture
def cached(tmp_path, monkeypatch) -> None:
    """GSM8K in the cache of `datasets`, as a machine with a network leaves it."""
    write(tmp_path / "gsm8k/main/test-00000-of-00001.parquet", GSM8K)
    files = "configs:\n- config_name: main\n  data_files:\n  - split: test\n    path: main/test-*\n"
    (tmp_path / "gsm8k/README.md").write_text(f"---\n{files}---\n")
    datasets.load_dataset(str(tmp_path / "gsm8k"), "main", cache_dir=str(tmp_path / "cache"))
    (tmp_path / "cache/gsm8k").rename(tmp_path / "cache/openai___gsm8k")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def test_without_a_network_the_cached_copy_serves(recipe, cached):
    assert load(recipe, "gsm8k", None) == CASES["gsm8k"][2]


def test_the_cached_copy_never_stands_for_a_revision(recipe, cached):
    """Without the check `datasets` would take it, whatever its revision."""
    assert "offline mode is enabled" in refusal(recipe, "gsm8k", "openai/gsm8k@e53f048")


def test_the_hub_is_asked_for_the_subset_and_the_revision(monkeypatch):
    requests = []
    monkeypatch.setattr(benchmarks, "dataset_info", lambda *place, **options: requests.append((*place, options)))
    config = configured(source="benchmark:cnn-dm", path="abisee/cnn_dailymail@96df5e6")
    assert benchmarks.dataset_arguments(BENCHMARKS["cnn-dm"], config) == {
        "path": "abisee/cnn_dailymail",
        "name": "3.0.0",
        "split": "test",
        "revision": "96df5e6",
    }
    assert requests == [("abisee/cnn_dailymail", {"revision": "96df5e6"})]


@pytest.mark.parametrize(("subsets", "subset"), [(["main", "socratic"], "main"), (["default"], None)])
def test_another_data_set_of_the_hub_may_have_no_subset(monkeypatch, subsets, subset):
    monkeypatch.setattr(benchmarks, "get_dataset_config_names", lambda path, revision: subsets)
    place = benchmarks.dataset_arguments(BENCHMARKS["gsm8k"], configured(source="benchmark:gsm8k", path="me/sums"))
    assert place == {"path": "me/sums", "name": subset, "split": "test", "revision": None}
