"""The result files of a finished run: the rows of all its instruments, the report with further facts for a reader, the
tuned trees, and the release's list of files.

Guarantees: a file that was changed or damaged after it was written is refused by name, and names of files never lead
outside their folder.
"""

import json
from collections.abc import Callable, Container
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from pydantic import TypeAdapter, ValidationError

from pipeline.artifacts import checkpoint
from pipeline.artifacts.provenance import describe_settings, measurement_versions, provenance, read_recorded
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import format_sealed_lines, lock_file, read_sealed, read_sealed_lines, write_text
from pipeline.basics.parse import parse_settings
from pipeline.decoding.config import Method
from pipeline.drafts.prompt_lookup import corpus_hashes
from pipeline.lm.model import identify, identify_if_local
from pipeline.recipe.checks import TUNED
from pipeline.recipe.identity import digest, release_keys, run_hash
from pipeline.recipe.recipe import Recipe

REPORT, RELEASE, ROWS, TABLE = "report.json", "release.json", "results.jsonl", "table.md"
_AGAIN = "Restore it, or remove it and run jakiro eval RECIPE again: prompts that are decoded are kept"
_TUNE = "Remove it, and run jakiro tune RECIPE again"
_MOVE = "Move the folder away and run jakiro eval RECIPE again"
_KEYS = (
    "name",
    "provenance",
    "target",
    "drafts",
    "rows",
    "table",
    "plots",
    "samples",
    "settings",
    "target_identity",
)


Number = int | float


@dataclass(frozen=True)
class ResultRow:
    """A figure that an instrument measured. Tables, plots and comparisons are views of such rows."""

    instrument: str  # "decoded", "predicted", "served", "pruned"
    method: str
    figure: str  # "tau", "speedup", ...
    value: Number | None  # None: withheld, because the losslessness check failed
    benchmark: str = ""
    temperature: Number | None = None
    interval: list[Number] | None = None  # 95%, over prompts
    counts: dict[str, list[Number]] = field(default_factory=dict)  # by prompt: numerator and denominator of the value
    answers: dict[str, str] = field(default_factory=dict)  # by prompt: a digest of the target's own answers
    setting: dict[str, Any] = field(default_factory=dict)  # other settings: learning rate, concurrency, ...
    origin: dict[str, Any] = field(default_factory=dict)  # run, seed, hardware, draft, its weights, recipe, code
    details: dict[str, Any] = field(default_factory=dict)  # of "lossless": the gate's counts; of "tau": answers, ...


_ROW = TypeAdapter(ResultRow)


def make_origin(recipe: Recipe, draft: str, **facts: Any) -> dict[str, Any]:
    """Return the origin of a draft's rows of results."""
    run_facts = provenance(recipe)
    origin = {"run": recipe.name, "seed": recipe.seed, "draft": draft}
    origin["hash_but_seed"] = run_hash(recipe.model_copy(update={"seed": 0}))
    origin |= {key: run_facts[key] for key in ("hardware", "recipe_hash", "code_revision")}
    origin["target"] = digest(asdict(identify(recipe.target)))
    if draft in recipe.trained:
        saved = checkpoint.read_config(recipe.paths.draft(draft))
        origin |= {"weights_sha256": saved.weights_sha256, "trained_tokens": saved.training.get("trained_tokens", 0)}
    return origin | facts


def replace_rows(folder: Path, rows: list[ResultRow], all_methods: bool = False) -> None:
    """Add rows to a run's table (results.jsonl in its eval folder). They replace the same instrument's rows of the same
    methods; with `whole`, all rows of the instrument. Concurrent instruments take turns. Raises PipelineError for a
    damaged table.
    """
    instruments, methods = {row.instrument for row in rows}, {row.method for row in rows}
    with lock_file(folder / ROWS):
        before = read_rows(folder)
        kept_rows = [
            row for row in before if row.instrument not in instruments or not (all_methods or row.method in methods)
        ]
        write_rows(folder, [*kept_rows, *rows])


def write_rows(folder: Path, rows: list[ResultRow]) -> None:
    """Write the complete table, replacing the old one."""
    write_text(folder / ROWS, format_sealed_lines(map(asdict, rows)))


def read_rows(folder: Path) -> list[ResultRow]:
    """Return the rows of a table; an empty list if nothing was measured. Raises PipelineError for a damaged table, or a
    table of another version.
    """
    again = (
        f"Remove the file and {folder / REPORT}, and run the commands that measured again: prompts that are decoded "
        "are kept"
    )
    rows = []
    for number, line in enumerate(read_sealed_lines(folder / ROWS, again), start=1):
        try:
            rows.append(_ROW.validate_json(json.dumps(line), strict=True))
        except ValidationError as error:
            wrong = error.errors()[0]
            raise PipelineError(
                f"{folder / ROWS}: line {number}, {'.'.join(map(str, wrong['loc']))}: {wrong['msg']}. It is of another "
                f"version. {again}"
            ) from None
    return rows


def digest_rows(rows: list[ResultRow]) -> str:
    """Return the digest that ties a report to its rows."""
    return digest([asdict(row) for row in rows])


def measured_rows(folder: Path, report: dict[str, Any]) -> list[ResultRow]:
    """Return the figures of a report. Raises PipelineError if the table holds other rows, or not all of them."""
    rows = [row for row in read_rows(folder) if row.instrument == "decoded"]
    if digest_rows(rows) != report["rows"]:
        raise PipelineError(
            f"{folder / ROWS} does not hold the rows that {REPORT} was written with. Restore it, or remove both and "
            "run jakiro eval RECIPE again: prompts that are decoded are kept"
        )
    return rows


def read_report(path: Path) -> dict[str, Any]:
    """Return the report that eval/main.py wrote next to its rows. Raises PipelineError."""
    report = read_sealed(path, _AGAIN)
    if missing := [key for key in _KEYS if key not in report]:
        again = "Remove it and run jakiro eval RECIPE again"
        raise PipelineError(f"{path} has no {missing[0]!r}: it is of another version. {again}")
    _require_methods(path, report["drafts"], _AGAIN)
    for plot in report["plots"]:  # name -> SHA-256
        if not is_plain(plot) or not plot.endswith(".png"):
            raise PipelineError(f"{path}: {plot!r} is not the name of a plot in its folder. {_AGAIN}")
    return report


def read_tuned_trees(path: Path) -> dict[str, dict[str, Any]]:
    """Return the results of eval/tune.py, by method; an empty dict if it never ran. Raises PipelineError."""
    entries = read_sealed(path, _TUNE) if path.exists() else {}
    _require_methods(path, entries, _TUNE)
    return entries


def method_of(facts: dict[str, Any]) -> Method:
    """Return the method of an entry under a report's "drafts", or of a tuned file's entry."""
    return parse_settings(Method, facts["method"])


def _require_methods(path: Path, entries: dict[str, dict[str, Any]], instruction: str) -> None:
    for name, facts in entries.items():
        try:
            method_of(facts)
        except (KeyError, ValueError):
            raise PipelineError(
                f"{path}: {name} is not a method of this version of the project. {instruction}"
            ) from None


def read_release(folder: Path) -> dict[str, dict[str, str]]:
    """Return the release's list of its files: name -> SHA-256 under "files", and under "pending" the files that an
    interrupted release was writing. Both are empty if there is no list. Raises PipelineError.
    """
    path = folder / RELEASE
    release = read_sealed(path, _MOVE) if path.exists() else {"files": {}, "pending": {}}
    for listed in ("files", "pending"):
        if odd := [name for name in release.get(listed, [None]) if not is_inside(name)]:
            raise PipelineError(f"{path}: {odd[0]!r} in {listed!r} is not the name of a file in its folder. {_MOVE}")
    return release


def eval_state(recipe: Recipe) -> tuple[bool, str]:
    """Return whether the release's report was measured with this recipe, this version of the measurement and the
    weights that are in the draft folders now; and a line for the user.
    """
    path = recipe.paths.release / REPORT
    if not path.exists() or read_release(recipe.paths.release)["pending"]:
        return False, "no release"
    report = read_report(path)
    if report["provenance"]["recipe_hash"] != run_hash(recipe):
        keys = describe_settings(read_recorded(recipe.paths.release), recipe, release_keys(recipe))
        return False, f"release of other settings: {keys}"
    target = identify_if_local(recipe.target)
    if target and (changes := target.differences(report["target_identity"])):
        return False, f"release of what the target was before: {'; '.join(changes)}"
    if report.get("code") != measurement_versions():
        return False, f"release that was not measured by {measurement_versions()}"
    if read_tuned_trees(recipe.paths.tuned) != report.get("tuned"):
        return False, "release without the tuned trees"
    for facts in report["drafts"].values():
        method = method_of(facts)
        if not set(method.sources) <= set(recipe.draft):
            return False, "release of other drafts"
        if facts["corpora"] != list(corpus_hashes(recipe.draft[name] for name in method.sources)):
            return False, "release of another corpus"
        folder = recipe.paths.draft(method.draft)
        weights_sha256 = (folder / checkpoint.CONFIG).exists() and checkpoint.read_config(folder).weights_sha256
        if recipe.draft[method.draft].trained and weights_sha256 != facts["weights_sha256"]:
            return False, "release of other weights"
    return True, f"release in {recipe.paths.release}/"


def is_inside(name: Any) -> bool:
    """Return whether `name` is a file in a folder or its subfolders, and nothing outside of it."""
    return isinstance(name, str) and all(map(is_plain, name.split("/")))


def is_plain(name: Any) -> bool:
    """Return whether `name` is the plain name of a file, without a path."""
    return isinstance(name, str) and name not in ("", ".", "..") and "/" not in name and "\0" not in name


# -- which method is fastest -------------------------------------------------------------------------------------------


def mean_speedups(rows: list[ResultRow], contexts: Container[str]) -> dict[str, float]:
    """Return each method's geometric mean of speed-ups. `contexts`: benchmarks that repeat others after longer texts;
    they count only if there are no others.
    """
    counted = [row for row in rows if row.figure == "speedup" and row.value]
    counted = [row for row in counted if row.benchmark not in contexts] or counted
    speeds: dict[str, list[Number]] = {}
    for row in counted:
        speeds.setdefault(row.method, []).append(row.value or 1)
    return {method: geometric_mean(values) for method, values in speeds.items()}


def released_method(recipe: Recipe, measured: dict[str, Any], rows: list[ResultRow]) -> str:
    """Return the default method of the released draft: the fastest measured one, with the recipe's tree or the tuned
    one, with secondary sources or without; other context lengths do not count. A method that copies from a corpus,
    which is not released, is excluded.
    """
    return _fastest(recipe, measured, rows, lambda facts: not facts["corpora"])


def fastest_without_secondary(recipe: Recipe, measured: dict[str, Any], rows: list[ResultRow]) -> str:
    """Return the released draft's fastest method without secondary sources, which gives the draft's own figures."""
    return _fastest(recipe, measured, rows, lambda facts: not method_of(facts).secondary)


def _fastest(
    recipe: Recipe, measured: dict[str, Any], rows: list[ResultRow], may: Callable[[dict[str, Any]], bool]
) -> str:
    names = [name for name in recipe.tunable if recipe.methods[name].draft == recipe.publish.draft]
    both = [name for each in names for name in (each, each + TUNED) if name in measured["drafts"]]
    speeds = mean_speedups(rows, recipe.eval.of_contexts)
    return max((name for name in both if may(measured["drafts"][name])), key=lambda name: speeds.get(name, 1))


def describe_faster_drafts(recipe: Recipe, measured: dict[str, Any], rows: list[ResultRow]) -> str:
    """Return a sentence on the run's other drafts that were faster than the released one; empty where none was."""
    speeds = {name: round(speed, 2) for name, speed in mean_speedups(rows, recipe.eval.of_contexts).items()}
    released = released_method(recipe, measured, rows)
    best: dict[str, str] = {}  # by draft, its fastest method
    for name in sorted(measured["drafts"], key=lambda name: speeds.get(name, 0)):
        best[method_of(measured["drafts"][name]).draft] = name
    other_methods = [name for draft, name in best.items() if draft != recipe.publish.draft]
    faster = [name for name in reversed(other_methods) if speeds.get(name, 0) > speeds.get(released, 1)]
    if not faster:
        return ""
    names = ", ".join(f"`{name}` ({speeds[name]:.2f}x)" for name in faster)
    return (
        f"In this run other drafts were faster than the released `{released}` ({speeds.get(released, 1):.2f}x, the "
        f"mean over benchmarks and temperatures): {names}."
    )
