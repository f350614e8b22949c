"""The release folder: one draft's checkpoint, what was measured of exactly these weights, a card; and its upload, which
the same command completes where it was broken off.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

from eval.measure import report
from eval.release.card import card, facts_of, page
from eval.release.features import features_on_hub
from eval.release.folder import CARD, NEW_CARD, files_in, install
from eval.release.hub import Repository
from pipeline.artifacts import checkpoint
from pipeline.artifacts.provenance import RECIPE
from pipeline.artifacts.reports import (
    RELEASE,
    REPORT,
    Row,
    measured_rows,
    method_of,
    read_release,
    read_report,
    read_rows,
    write_rows,
)
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import sha256, write_text
from pipeline.recipe.recipe import Recipe
from pipeline.serving.bundle import bundle
from pipeline.serving.export import tried


def build_release(recipe: Recipe) -> tuple[Path, list[str]]:
    """Writes the release folder anew, but for what the user did there; returns it, and what the user should know.
    Raises PipelineError unless the report measured this checkpoint and was lossless. The caller holds the run's
    evaluation.
    """
    name = recipe.publish.draft
    source, measured = recipe.paths.draft(name), read_report(recipe.paths.eval / REPORT)
    saved = checkpoint.read_config(source)
    weights = sha256(source / checkpoint.WEIGHTS)
    mine = [facts for facts in measured["drafts"].values() if method_of(facts).draft == name]
    if {facts["weights_sha256"] for facts in mine} != {weights}:
        raise PipelineError(
            f"{recipe.paths.eval / REPORT} did not measure the weights in {source}: run eval/main.py again before "
            "releasing"
        )
    rows = measured_rows(recipe.paths.eval, measured)
    if not report.lossless(rows):
        raise PipelineError("the losslessness gate failed in this run (see the report): there is nothing to release")
    facts = facts_of(recipe, saved, measured, rows)
    method = method_of(measured["drafts"][facts["method"]])
    release, building = recipe.paths.release, recipe.paths.release.with_name(".release.tmp")
    elsewhere = earlier(release, weights, rows)
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    secondary = {source: recipe.draft[source].public() for source in method.secondary}
    checkpoint.export(source, building, method, secondary, recipe.paths.eval / RECIPE)
    shutil.copyfile(recipe.paths.eval / REPORT, building / REPORT)
    bundle(building)
    if recipe.target.chat_template:
        shutil.copyfile(recipe.target.chat_template, building / checkpoint.TEMPLATE)
    checkpoint.seal_files(building)
    # whose prompts they are of is nobody else's business
    write_rows(building, [replace(row, counts={}, answers={}) for row in [*rows, *elsewhere]])
    drawn = _copied_plots(recipe.paths.eval, measured["plots"], building)
    more = {"plots": drawn, "features": features_on_hub(recipe), "engines": tried(building)}
    write_text(building / CARD, card(facts, rows, elsewhere, **more))
    write_text(building / "report.html", page(facts, rows, drawn))
    notes = install(building, release)
    shutil.rmtree(building)
    return release, [*notes, *filter(None, [facts["faster"]])]


def push(release: Path, repository: str, private: bool) -> list[str]:
    """Uploads what the release lists, and its card; returns lines for the user: where it is, who sees it, what stayed
    behind. A repository that exists is left as private or public as it is. Raises PipelineError.
    """
    names = sorted({CARD, *read_release(release)["files"]} - {NEW_CARD})
    message = f"Release {read_report(release / REPORT)['name']}"
    again = f"The release stays in {release}: run the same command again, it measures nothing twice"
    there = Repository(repository, "model", again)
    seen = there.create(private, (release / CARD).read_text(encoding="utf-8"))
    lines = [f"uploaded: {there.commit(message, {name: release / name for name in names}).commit_url}{seen}"]
    staying = sorted(set(files_in(release)) - {*names, RELEASE})
    more = ", ..." if len(staying) > 10 else ""
    return lines + ([f"not uploaded: {', '.join(staying[:10])}{more}"] if staying else [])


def earlier(release: Path, weights: str, now: list[Row]) -> list[Row]:
    """The rows of these weights in an earlier release that `now` does not replace: a release adds figures and loses
    none. Of two measurements of the same benchmark, temperature, method, machine, settings and tree the newer one
    stays. Raises PipelineError for figures that are damaged, or of another version.
    """

    def measurement(row: Row) -> str:
        where = [row.origin.get(key) for key in ("hardware", "settings", "tree")]
        return json.dumps([row.instrument, row.benchmark, row.temperature, row.method, where], sort_keys=True)

    replaced = set(map(measurement, now))
    kept = [row for row in read_rows(release) if row.origin.get("weights_sha256") == weights]
    return [row for row in kept if measurement(row) not in replaced]


def _copied_plots(source: Path, plots: dict[str, str], folder: Path) -> list[Path]:
    """Those that the report names (with their SHA-256), where they are now. Raises PipelineError for another file of
    that name.
    """
    for name, digest in plots.items():
        if not (source / name).is_file() or sha256(source / name) != digest:
            raise PipelineError(
                f"{source / name} is missing, or not the plot that {REPORT} names. Restore it, or remove "
                f"{source / REPORT} and run jakiro eval RECIPE again: prompts that are decoded are kept"
            )
        shutil.copyfile(source / name, folder / name)
    return [folder / name for name in plots]
