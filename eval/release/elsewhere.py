"""What the same weights measured on other machines before: a new release adds figures and loses none."""

from pathlib import Path
from typing import Any

from pipeline.artifacts.published import ELSEWHERE
from pipeline.artifacts.reports import REPORT, read_report
from pipeline.basics.files import read_sealed

_SHOWN = ("benchmark", "temperature", "draft", "prompts", "tau", "tau_interval", "speedup", "speedup_interval")
_AGAIN = "Restore it, or remove it: its figures are then lost"


def earlier(folders: list[Path], weights: str, now: dict[str, Any]) -> list[dict[str, Any]]:
    """The figures of these weights in earlier releases, one entry a machine: hardware, dtype, code, results. `folders`:
    where such releases are, the newest first; `now`: the report that is being released, whose machine is left out.

    Raises PipelineError for a file that was changed after it was written.
    """
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for folder in folders:
        entries = [_entry(read_report(folder / REPORT), weights)] if (folder / REPORT).exists() else []
        if (folder / ELSEWHERE).exists():
            entries += read_sealed(folder / ELSEWHERE, _AGAIN)["machines"]
        for entry in entries:
            if entry["results"] and entry["weights_sha256"] == weights:
                found.setdefault((entry["hardware"], entry["dtype"]), entry)
    found.pop((now["provenance"]["hardware"], now["dtype"]), None)
    return list(found.values())


def _entry(report: dict[str, Any], weights: str) -> dict[str, Any]:
    """Of a report, what it says of these weights."""
    mine = {name for name, facts in report["drafts"].items() if facts["weights_sha256"] == weights}
    results = [{key: row.get(key) for key in _SHOWN} for row in report["results"] if row["draft"] in mine]
    facts = {"hardware": report["provenance"]["hardware"], "dtype": report.get("dtype", "")}
    return facts | {"weights_sha256": weights, "code": report["provenance"]["code_revision"], "results": results}
