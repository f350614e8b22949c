"""The release folder: one draft's checkpoint, the measurements of exactly these weights, a card; and its upload, which
the same command completes after an interruption.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

from eval.measure import report
from eval.release.card import collect_facts, render_card, render_page
from eval.release.features import find_features_on_hub
from eval.release.folder import CARD, NEW_CARD, files_in, install
from eval.release.hub import Repository
from pipeline.artifacts import checkpoint
from pipeline.artifacts.provenance import RECIPE
from pipeline.artifacts.reports import (
    RELEASE,
    REPORT,
    ResultRow,
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
from pipeline.serving.export import list_tested_engines


def build_release(recipe: Recipe) -> tuple[Path, list[str]]:
    """Write the release folder again, except for the user's own files; return it, and notes for the user. Raise
    PipelineError unless the report measured this checkpoint and was lossless. The caller holds the run's evaluation
    lock.
    """
    name = recipe.publish.draft
    source, measured = recipe.paths.draft(name), read_report(recipe.paths.eval / REPORT)
    saved = checkpoint.read_config(source)
    weights = sha256(source / checkpoint.WEIGHTS)
    draft_facts = [facts for facts in measured["drafts"].values() if method_of(facts).draft == name]
    if {facts["weights_sha256"] for facts in draft_facts} != {weights}:
        raise PipelineError(
            f"{recipe.paths.eval / REPORT} did not measure the weights in {source}: run eval/main.py again before "
            "releasing"
        )
    rows = measured_rows(recipe.paths.eval, measured)
    if not report.is_lossless(rows):
        raise PipelineError("the losslessness gate failed in this run (see the report): there is nothing to release")
    facts = collect_facts(recipe, saved, measured, rows)
    method = method_of(measured["drafts"][facts["method"]])
    release, building = recipe.paths.release, recipe.paths.release.with_name(".release.tmp")
    elsewhere = earlier_rows(release, weights, rows)
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    secondary = {source: recipe.draft[source].public() for source in method.secondary}
    checkpoint.export(source, building, method, secondary, recipe.paths.eval / RECIPE)
    shutil.copyfile(recipe.paths.eval / REPORT, building / REPORT)
    bundle(building)
    if recipe.target.chat_template:
        shutil.copyfile(recipe.target.chat_template, building / checkpoint.TEMPLATE)
    checkpoint.seal_files(building)
    # without the counts by prompt: the prompts are private
    write_rows(building, [replace(row, counts={}, answers={}) for row in [*rows, *elsewhere]])
    plots = _copy_plots(recipe.paths.eval, measured["plots"], building)
    card_facts = {"plots": plots, "features": find_features_on_hub(recipe), "engines": list_tested_engines(building)}
    write_text(building / CARD, render_card(facts, rows, elsewhere, **card_facts))
    write_text(building / "report.html", render_page(facts, rows, plots))
    notes = install(building, release)
    shutil.rmtree(building)
    return release, [*notes, *filter(None, [facts["faster"]])]


def push(release: Path, repository: str, private: bool) -> list[str]:
    """Upload the files that the release lists, and its card. Return lines for the user: where it is, who sees it, what
    was not uploaded. A repository that exists stays private or public. Raise PipelineError.
    """
    names = sorted({CARD, *read_release(release)["files"]} - {NEW_CARD})
    message = f"Release {read_report(release / REPORT)['name']}"
    remedy = f"The release stays in {release}: run the same command again, it measures nothing twice"
    hub = Repository(repository, "model", remedy)
    visibility = hub.create(private, (release / CARD).read_text(encoding="utf-8"))
    lines = [f"uploaded: {hub.commit(message, {name: release / name for name in names}).commit_url}{visibility}"]
    left_here = sorted(set(files_in(release)) - {*names, RELEASE})
    ellipsis = ", ..." if len(left_here) > 10 else ""
    return lines + ([f"not uploaded: {', '.join(left_here[:10])}{ellipsis}"] if left_here else [])


def earlier_rows(release: Path, weights: str, new_rows: list[ResultRow]) -> list[ResultRow]:
    """Return the rows of these weights in an earlier release that `new_rows` do not replace: a release adds figures and
    loses none. Of two measurements of the same benchmark, temperature, method, machine, settings and tree the newer one
    stays. Raise PipelineError for figures that are damaged, or of another version.
    """

    def measurement(row: ResultRow) -> str:
        origin_key = [row.origin.get(key) for key in ("hardware", "settings", "tree")]
        return json.dumps([row.instrument, row.benchmark, row.temperature, row.method, origin_key], sort_keys=True)

    replaced = set(map(measurement, new_rows))
    rows = [row for row in read_rows(release) if row.origin.get("weights_sha256") == weights]
    return [row for row in rows if measurement(row) not in replaced]


def _copy_plots(source: Path, plots: dict[str, str], folder: Path) -> list[Path]:
    """Copy the plots that the report names (with their SHA-256); return their new paths. Raise PipelineError for
    another file of that name.
    """
    for name, digest in plots.items():
        if not (source / name).is_file() or sha256(source / name) != digest:
            raise PipelineError(
                f"{source / name} is missing, or not the plot that {REPORT} names. Restore it, or remove "
                f"{source / REPORT} and run jakiro eval RECIPE again: prompts that are decoded are kept"
            )
        shutil.copyfile(source / name, folder / name)
    return [folder / name for name in plots]
