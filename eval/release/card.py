"""README.md and report.html of a release: both state only what was measured. The first has a YAML head for the Hub; the
second requires no other file, no network and no script.
"""

import base64
import json
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import EvalResult, ModelCardData

from eval.measure import report
from pipeline.artifacts.checkpoint import CheckpointConfig
from pipeline.artifacts.regenerated import holds_answers_of
from pipeline.artifacts.reports import (
    ResultRow,
    describe_faster_drafts,
    fastest_without_secondary,
    method_of,
    released_method,
)
from pipeline.basics import embedded
from pipeline.basics.public import public_name
from pipeline.drafts import kind_key
from pipeline.recipe.identity import run_hash
from pipeline.recipe.recipe import Recipe
from pipeline.running import markdown

Facts = dict[str, Any]  # the values that a template shows, by name
COLOURS = ["#cdeccf", "#9fd8b4", "#7cc4c4", "#8fb4e3", "#b9a6e6"]  # by depth, the last one for all further ones
TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    autoescape=jinja2.select_autoescape(["html.jinja"], default=False),
)
TEMPLATES.globals |= {"public_name": public_name, "plain": markdown.escape_markdown}


def render(template: str, **facts: Any) -> str:
    return TEMPLATES.get_template(template).render(facts)


def collect_facts(recipe: Recipe, saved: CheckpointConfig, measured: Facts, rows: list[ResultRow]) -> Facts:
    """Return the values that card and page show, by name. `rows` are the report's."""
    kind, hub = kind_key(saved.config), find_hub_name(recipe.target.model)
    return {
        "recipe": recipe,
        "recipe_hash": run_hash(recipe),
        "saved": saved,
        "training": saved.training,
        "measured": measured,
        "method": released_method(recipe, measured, rows),
        "alone": fastest_without_secondary(
            recipe, measured, rows
        ),  # how the draft decodes without secondary sources; may be the same
        "faster": describe_faster_drafts(recipe, measured, rows),
        "name": f"{recipe.name}-{recipe.publish.draft}",
        "kind": kind,
        "article": "an" if kind[0] in "aeiou" or kind == "mtp" else "a",
        "hub": hub,
        "target_name": hub or public_name(recipe.target.model),
        "trees": {name: describe_tree(method) for name, method in measured["drafts"].items()},
        "explanation": report.explain_figures(),
    }


def render_card(facts: Facts, rows: list[ResultRow], elsewhere: list[ResultRow], **more: Any) -> str:
    """Return the text of README.md. `elsewhere` are earlier rows of the same weights; `more` has `plots`, by path;
    `features` on the Hub; and `engines`: how each serves the weights.
    """
    recipe, measured, method = facts["recipe"], facts["measured"], facts["method"]
    shown_methods = (facts["alone"], method)
    places = report.group_by_place([row for row in rows if row.method in shown_methods], first=shown_methods)
    lengths, lowest = recipe.eval.of_contexts, min(recipe.eval.temperatures)
    head = ModelCardData(
        language=recipe.data.languages or ["en"],
        license=recipe.publish.license,
        library_name="jakiro",
        base_model=facts["hub"],
        base_model_revision=recipe.target.revision,
        model_name=facts["name"],
        eval_results=[
            result for place, figures in places.items() for result in model_index(place, figures, shown_methods[0])
        ],
        tags=["speculative-decoding", "draft-model", "custom_generate", facts["kind"]],
    )
    body = render(
        "card.md.jinja",
        **facts,
        **more,
        table=report.format_table(rows),
        headline=report.format_headline(places),
        noise=report.has_noise(places.values()),
        contexts={tokens: places[name, lowest, method]["tau"].value for name, tokens in lengths.items()},
        settings=describe_settings(recipe),
        elsewhere=group_by_origin(elsewhere),
        tau_and_speedup=report.format_tau_and_speedup,
        own_answers=recipe.data.answers == "target"
        or holds_answers_of(recipe.data.source, facts["saved"].target["fingerprint"]),
        note=embedded.NOTE if recipe.target.model.startswith(embedded.PREFIX) else "",
        methods={name: method_of(entry) for name, entry in measured["drafts"].items()},
    )
    return f"---\n{head.to_yaml()}\n---\n\n{body}"


def render_page(facts: Facts, rows: list[ResultRow], plots: list[Path]) -> str:
    """Return the text of report.html."""
    method = facts["method"]
    places = report.group_by_place(rows, first=(facts["alone"], method))
    return render(
        "report.html.jinja",
        **facts,
        noise=report.has_noise(places.values()),
        rows=[report.format_cells(place, figures) for place, figures in places.items()],
        plots={plot.stem.replace("_", " "): base64.b64encode(plot.read_bytes()).decode() for plot in plots},
        samples=[sample for sample in facts["measured"]["samples"] if sample["method"] == method],
        colours=COLOURS,
    )


def describe_settings(recipe: Recipe) -> str:
    """Return further settings that the answers and their speed depended on; empty if none was set."""
    config = recipe.eval
    words = {"top-k": config.top_k, "top-p": config.top_p if config.top_p < 1 else None}
    words["workers, each with a target of its own:"] = config.workers if config.workers > 1 else None
    settings = [f"{name} {value:g}" for name, value in words.items() if value is not None]
    return ", ".join([*settings, *["target compiled, and rounds if kind and tree allow it"] * config.compile])


def describe_tree(facts: Facts) -> str:
    """Describe a method's tree."""
    method = method_of(facts)
    tree = method.resolved_tree
    shape, is_decoupled = "dynamic" if tree.paths is None else "static", tree.candidates == "decoupled"
    is_chain = tree.siblings == "none"
    words = [
        f"a chain of depth {tree.depth}"
        if is_chain
        else f"{shape}, depth {tree.depth}, top-k {tree.top_k}, {tree.nodes} nodes"
    ]
    if tree.forwards < tree.depth:
        words.append(f"the last {tree.parallel} levels from one draft forward")
    if is_decoupled:
        words.append("the experts' candidates merged")
    if tree.siblings == "drawn":
        words.append("siblings drawn" + (" from each expert in turn" if is_decoupled else ""))
    if method.secondary:
        words.append(f"{' and '.join(method.secondary)} next to the draft")
    if facts["corpora"]:
        words.append("prompt lookup also in a text that is not part of this release")
    return ", ".join(words)


def find_hub_name(model: str) -> str | None:
    """Return the Hub id to link to, if the target has one."""
    if model.startswith(embedded.PREFIX):
        return embedded.HUB_NAME
    return model if model.count("/") == 1 and public_name(model) == model else None


def group_by_origin(rows: list[ResultRow]) -> list[list[dict[str, ResultRow]]]:
    """Group rows by machine, settings and code. In a group, each measurement (benchmark, temperature, method and tree)
    has its rows by figure.
    """
    sections: dict[str, dict[str, dict[str, ResultRow]]] = {}
    for row in rows:
        origin_key = [row.origin.get(key) for key in ("hardware", "settings", "code_revision")]
        measurement = [row.benchmark, row.temperature, row.method, row.origin["tree"]]
        section = sections.setdefault(json.dumps(origin_key, sort_keys=True), {})
        section.setdefault(json.dumps(measurement, sort_keys=True), {})[row.figure] = row
    return [list(section.values()) for section in sections.values()]


def model_index(place: report.Place, figures: dict[str, ResultRow], draft_alone: str) -> list[EvalResult]:
    """Return the Hub's model-index entries of one measurement: figure and method, nothing else; no speed-up that is
    noise.
    """
    benchmark, temperature, method = place
    tau, speedup = figures["tau"], figures["speedup"]
    values = {"tau": tau.value, "speed-up": None if report.is_noise(speedup, tau) else speedup.value}
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=benchmark,
            dataset_config=f"T = {temperature:g}",
            dataset_name=f"{benchmark}, T = {temperature:g}, {tau.details['prompts']} prompts",
            metric_type=key,
            metric_name=f"{key} of {method} ({'the draft alone' if method == draft_alone else 'as released'})",
            metric_value=value,
        )
        for key, value in values.items()
        if value
    ]
