"""What the same weights measured before, elsewhere or under other settings: a release adds figures and loses none."""

import json
from pathlib import Path
from typing import Any

from pipeline.artifacts.published import ELSEWHERE
from pipeline.artifacts.reports import REPORT
from pipeline.basics.files import read_sealed

_SHOWN = ("benchmark", "temperature", "draft", "prompts", "tau", "tau_interval", "speedup", "speedup_interval")
_AGAIN = "Restore it, or move it away: its figures are then lost"


def earlier(folders: list[Path], weights: str, now: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of these weights in earlier releases that `now`, the report that is being released, does not replace, and
    what the user should know. `folders`: where such releases are, the newest first. Of two rows of the same benchmark,
    temperature, method, machine and settings the newer one stays.

    Raises PipelineError for a file that was changed after it was written.
    """
    rows, notes = [], []
    for folder in folders:
        if (folder / REPORT).exists():
            try:
                rows += _rows(read_sealed(folder / REPORT, _AGAIN), weights)
            except KeyError as missing:
                notes.append(
                    f"{folder / REPORT} has no {missing}: it is of another version, its figures are not carried"
                )
        if (folder / ELSEWHERE).exists():
            known = read_sealed(folder / ELSEWHERE, _AGAIN)["rows"]
            rows += [row for row in known if row["weights_sha256"] == weights]
    replaced = {_key(row) for row in _rows(now, weights)}
    kept = {_key(row): row for row in reversed(rows) if _key(row) not in replaced}
    return list(reversed(kept.values())), notes


def by_origin(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of each machine, settings and code together."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        origin = row["origin"]
        found.setdefault(json.dumps(origin, sort_keys=True), origin | {"rows": []})["rows"].append(row)
    return list(found.values())


def _key(row: dict[str, Any]) -> str:
    where = {key: value for key, value in row["origin"].items() if key != "code"}
    return json.dumps([row["benchmark"], row["temperature"], row["draft"], where, row["tree"]], sort_keys=True)


def _rows(report: dict[str, Any], weights: str) -> list[dict[str, Any]]:
    """Of a report, what it says of these weights."""
    mine = {name: facts for name, facts in report["drafts"].items() if facts["weights_sha256"] == weights}
    origin = {"hardware": report["provenance"]["hardware"], "settings": report["settings"]}
    origin |= {"code": report["provenance"]["code_revision"]}
    return [
        {key: row[key] for key in _SHOWN if key in row}
        | {"origin": origin, "weights_sha256": weights, "tree": mine[row["draft"]]["method"]["tree"]}
        for row in report["results"]
        if row["draft"] in mine
    ]
