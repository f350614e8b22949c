"""README.md and report.html of a release: both state only what was measured. The first has a YAML head for the Hub; the
second needs no file beside it, no network and no script.
"""

import base64
import json
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import EvalResult, ModelCardData

from eval.measure import report
from pipeline.artifacts.checkpoint import Saved
from pipeline.artifacts.regenerated import are_of
from pipeline.artifacts.reports import Row, alone, faster_drafts, method_of, released_method
from pipeline.basics import embedded
from pipeline.basics.public import public_name
from pipeline.drafts import kind_of
from pipeline.recipe.identity import run_hash
from pipeline.recipe.recipe import Recipe
from pipeline.running import markdown

Facts = dict[str, Any]  # what a template shows, by name
COLOURS = ["#cdeccf", "#9fd8b4", "#7cc4c4", "#8fb4e3", "#b9a6e6"]  # by depth, the last one for all further ones
TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    autoescape=jinja2.select_autoescape(["html.jinja"], default=False),
)
TEMPLATES.globals |= {"public_name": public_name, "plain": markdown.plain}


def render(template: str, **facts: Any) -> str:
    return TEMPLATES.get_template(template).render(facts)


def facts_of(recipe: Recipe, saved: Saved, measured: Facts, rows: list[Row]) -> Facts:
    """What card and page show, by name. `rows`: the report's."""
    kind, hub = kind_of(saved.config), hub_name(recipe.target.model)
    return {
        "recipe": recipe,
        "recipe_hash": run_hash(recipe),
        "saved": saved,
        "training": saved.training,
        "measured": measured,
        "method": released_method(recipe, measured, rows),
        "alone": alone(recipe, measured, rows),  # how the draft decodes without secondary sources; may be the same
        "faster": faster_drafts(recipe, measured, rows),
        "name": f"{recipe.name}-{recipe.publish.draft}",
        "kind": kind,
        "article": "an" if kind[0] in "aeiou" else "a",
        "hub": hub,
        "target_name": hub or public_name(recipe.target.model),
        "trees": {name: tree_words(method) for name, method in measured["drafts"].items()},
        "explanation": report.explain(),
    }


def card(facts: Facts, rows: list[Row], elsewhere: list[Row], **more: Any) -> str:
    """README.md. `elsewhere`: what the same weights measured before; `more`: `plots`, by path; `features` on the Hub;
    `engines`: how each serves them.
    """
    recipe, measured, method = facts["recipe"], facts["measured"], facts["method"]
    shown = (facts["alone"], method)
    places = report.by_place([row for row in rows if row.method in shown], first=shown)
    lengths, lowest = recipe.eval.of_contexts, min(recipe.eval.temperatures)
    head = ModelCardData(
        language=recipe.data.languages or ["en"],
        license=recipe.publish.license,
        library_name="jakiro",
        base_model=facts["hub"],
        base_model_revision=recipe.target.revision,
        model_name=facts["name"],
        eval_results=[result for place, figures in places.items() for result in index_of(place, figures, shown[0])],
        tags=["speculative-decoding", "draft-model", "custom_generate", facts["kind"]],
    )
    body = render(
        "card.md.jinja",
        **facts,
        **more,
        table=report.table(rows),
        headline=report.headline(places),
        noise=report.has_noise(places.values()),
        contexts={tokens: places[name, lowest, method]["tau"].value for name, tokens in lengths.items()},
        settings=settings_words(recipe),
        elsewhere=by_origin(elsewhere),
        usual=report.usual_said,
        own_answers=recipe.data.answers == "target" or are_of(recipe.data.source, facts["saved"].target["fingerprint"]),
        note=embedded.NOTE if recipe.target.model.startswith(embedded.PREFIX) else "",
        methods={name: method_of(entry) for name, entry in measured["drafts"].items()},
    )
    return f"---\n{head.to_yaml()}\n---\n\n{body}"


def page(facts: Facts, rows: list[Row], plots: list[Path]) -> str:
    """report.html."""
    method = facts["method"]
    places = report.by_place(rows, first=(facts["alone"], method))
    return render(
        "report.html.jinja",
        **facts,
        noise=report.has_noise(places.values()),
        rows=[report.cells(place, figures) for place, figures in places.items()],
        plots={plot.stem.replace("_", " "): base64.b64encode(plot.read_bytes()).decode() for plot in plots},
        samples=[sample for sample in facts["measured"]["samples"] if sample["method"] == method],
        colours=COLOURS,
    )


def settings_words(recipe: Recipe) -> str:
    """What else the answers and their speed depended on; empty where nothing was set."""
    config = recipe.eval
    words = {"top-k": config.top_k, "top-p": config.top_p if config.top_p < 1 else None}
    words["workers, each with a target of its own:"] = config.workers if config.workers > 1 else None
    set_here = [f"{name} {value:g}" for name, value in words.items() if value is not None]
    return ", ".join([*set_here, *["compiled, fixed shapes"] * config.compile])


def tree_words(facts: Facts) -> str:
    """A method's tree."""
    method = method_of(facts)
    tree = method.resolved_tree
    shape, by_expert = "dynamic" if tree.paths is None else "static", tree.candidates == "decoupled"
    words = [f"{shape}, depth {tree.depth}, top-k {tree.top_k}, {tree.nodes} nodes"]
    if tree.forwards < tree.depth:
        words.append(f"the last {tree.parallel} levels from one draft forward")
    if by_expert:
        words.append("the experts' candidates merged")
    if tree.siblings != "best":
        words.append("siblings drawn" + (" from each expert in turn" if by_expert else ""))
    if method.secondary:
        words.append(f"{' and '.join(method.secondary)} beside the draft")
    if facts["corpora"]:
        words.append("prompt lookup also in a text that is not part of this release")
    return ", ".join(words)


def hub_name(model: str) -> str | None:
    """The Hub id to link to, if the target has one."""
    if model.startswith(embedded.PREFIX):
        return embedded.HUB_NAME
    return model if model.count("/") == 1 and public_name(model) == model else None


def by_origin(rows: list[Row]) -> list[list[dict[str, Row]]]:
    """What was measured on each machine, with each settings and code: a measurement a benchmark, temperature, method
    and tree, its rows by figure.
    """
    sections: dict[str, dict[str, dict[str, Row]]] = {}
    for row in rows:
        where = [row.origin.get(key) for key in ("hardware", "settings", "code_revision")]
        what = [row.benchmark, row.temperature, row.method, row.origin["tree"]]
        section = sections.setdefault(json.dumps(where, sort_keys=True), {})
        section.setdefault(json.dumps(what, sort_keys=True), {})[row.figure] = row
    return [list(section.values()) for section in sections.values()]


def index_of(place: report.Place, figures: dict[str, Row], draft_alone: str) -> list[EvalResult]:
    """The Hub's model-index of one row: what was measured, by which method, and nothing else; no speed-up that is
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
