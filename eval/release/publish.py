"""The release folder: one draft's checkpoint, what was measured of exactly these weights, a card."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eval.measure import report
from eval.release.card import card, identity
from eval.release.elsewhere import earlier
from eval.release.folder import CARD, install
from eval.release.page import PAGE, page
from pipeline.artifacts import checkpoint
from pipeline.artifacts.provenance import RECIPE
from pipeline.artifacts.published import ELSEWHERE
from pipeline.artifacts.reports import REPORT, method_of, read_report
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import exclusive, sha256, write_sealed, write_text
from pipeline.recipe.checks import TUNED
from pipeline.recipe.recipe import Recipe
from pipeline.serving.bundle import bundle
from pipeline.serving.export import tried
from pipeline.serving.load import TEMPLATE as TEMPLATE_FILE


def build_release(recipe: Recipe) -> tuple[Path, list[str]]:
    """Writes the release folder anew, but for what the user did there; returns it, and what the user should know.
    Raises PipelineError unless the report measured this checkpoint and was lossless.
    """
    name = recipe.publish.draft
    source, measured = recipe.draft_dir(name), read_report(recipe.eval_dir / REPORT)
    saved = checkpoint.read_config(source)
    weights = sha256(source / checkpoint.WEIGHTS)
    mine = [facts for facts in measured["drafts"].values() if method_of(facts).draft == name]
    if {facts["weights_sha256"] for facts in mine} != {weights}:
        raise PipelineError(
            f"{recipe.eval_dir / REPORT} did not measure the weights in {source}: run eval/main.py again before "
            "releasing"
        )
    if not report.lossless(measured["results"]):
        raise PipelineError("the losslessness gate failed in this run (see the report): there is nothing to release")
    chosen = released_method(recipe, measured)
    method = method_of(measured["drafts"][chosen])
    who = identity(recipe, saved, measured, chosen, alone(recipe, measured))
    release, building = recipe.release_dir, recipe.release_dir.with_name(".release.tmp")
    with exclusive(recipe.eval_dir, "evaluation"):
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        secondary = {source: recipe.draft[source].public() for source in method.secondary}
        checkpoint.export(source, building, method, secondary, recipe.eval_dir / RECIPE)
        shutil.copyfile(recipe.eval_dir / REPORT, building / REPORT)
        bundle(building)
        if recipe.target.chat_template:
            shutil.copyfile(recipe.target.chat_template, building / TEMPLATE_FILE)
        others, old = earlier([release, source], weights, measured)
        if others:
            write_sealed(building / ELSEWHERE, {"rows": others})
        drawn = _copied_plots(recipe.eval_dir, measured["plots"], building)
        write_text(building / CARD, card(recipe, saved, measured, who, drawn, others, tried(building)))
        write_text(building / PAGE, page(measured, who, drawn))
        notes = install(building, release)
        shutil.rmtree(building)
    return release, notes + old


def _copied_plots(source: Path, plots: dict[str, str], folder: Path) -> list[Path]:
    """Those that the report names (with their SHA-256), where they are now. Raises PipelineError for another file of
    that name.
    """
    for name, digest in plots.items():
        if not (source / name).is_file() or sha256(source / name) != digest:
            raise PipelineError(
                f"{source / name} is missing, or not the plot that {REPORT} names. Restore it, or remove "
                f"{source / REPORT} and run python eval/main.py RECIPE again: prompts that are decoded are kept"
            )
        shutil.copyfile(source / name, folder / name)
    return [folder / name for name in plots]


def released_method(recipe: Recipe, measured: dict[str, Any]) -> str:
    """How the released draft decodes by default: of the recipe's tree and the tuned one, with secondary sources and
    without, what was measured to be fastest. What copies from a text that is not released cannot be.
    """
    return _fastest(recipe, measured, lambda facts: not facts["corpora"])


def alone(recipe: Recipe, measured: dict[str, Any]) -> str:
    """The released draft's fastest method without secondary sources: what its own figures are."""
    return _fastest(recipe, measured, lambda facts: not method_of(facts).secondary)


def _fastest(recipe: Recipe, measured: dict[str, Any], may: Callable[[dict[str, Any]], bool]) -> str:
    own = [name for name in recipe.tunable if recipe.methods[name].draft == recipe.publish.draft]
    both = [name for each in own for name in (each, each + TUNED) if name in measured["drafts"]]
    both = [name for name in both if may(measured["drafts"][name])]
    speeds = {m: [math.log(e["speedup"]) for e in measured["results"] if e["draft"] == m] for m in both}
    return max(speeds, key=lambda method: sum(speeds[method]))
