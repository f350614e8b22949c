"""README.md of a release: a YAML head for the Hub, and a body that states only what was measured."""

import json
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import EvalResult, ModelCardData

from eval.measure import report
from eval.release.features import features_on_hub
from pipeline.artifacts import checkpoint
from pipeline.artifacts.regenerated import are_of
from pipeline.artifacts.reports import Row, method_of
from pipeline.basics import embedded
from pipeline.basics.public import public_name
from pipeline.drafts import kind_of
from pipeline.recipe.identity import run_hash
from pipeline.recipe.recipe import Recipe
from pipeline.running import markdown

TEMPLATE = Path(__file__).with_name("card.md.jinja")
Facts = dict[str, Any]  # what a template shows, by name


def identity(recipe: Recipe, saved: checkpoint.Saved, measured: Facts, method: str, alone: str) -> Facts:
    """What the head of a card and of a page say. `method`: how the release decodes; `alone`: how the draft does
    without secondary sources, which may be the same.
    """
    provenance, kind = measured["provenance"], kind_of(saved.config)
    return {
        "method": method,
        "alone": alone,
        "name": f"{recipe.name}-{recipe.publish.draft}",
        "kind": kind,
        "article": "an" if kind[0] in "aeiou" else "a",
        "target_name": hub_name(recipe.target.model) or public_name(recipe.target.model),
        "parameters": saved.training["parameters"],
        "tree": tree_said(measured["drafts"][method]),
        "hardware": provenance["hardware"],
        "dtype": recipe.eval.dtype,
        "recipe_hash": run_hash(recipe),
        "code_revision": provenance["code_revision"],
    }


def card(
    recipe: Recipe,
    saved: checkpoint.Saved,
    measured: Facts,
    who: Facts,
    rows: list[Row],
    elsewhere: list[Row],
    plots: list[Path],
    engines: dict[str, list[str]],
) -> str:
    """The file's text. `who`: its `identity`; `rows`: the report's; `elsewhere`: what the same weights measured before;
    `engines`: how to serve them, by engine.
    """
    shown = (who["alone"], who["method"])  # the draft alone, and the method that the release decodes with
    own = report.by_place([row for row in rows if row.method in shown], first=shown)
    facts = who | _of_target(recipe, saved, measured) | _of_draft(recipe, saved) | _of_run(recipe, measured, who)
    facts |= {
        "table": report.table(rows),
        "headline": report.headline(own),
        "noise": report.has_noise(own.values()),
        "contexts": _by_context(recipe, own, who["method"]),
        "plots": plots,
        "engines": engines,
        "elsewhere": by_origin(elsewhere),
    }
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, autoescape=False)
    body = environment.from_string(TEMPLATE.read_text()).render(facts)
    return f"---\n{_head(recipe, who, own).to_yaml()}\n---\n\n{body}"


def _head(recipe: Recipe, who: Facts, own: dict[report.Place, dict[str, Row]]) -> ModelCardData:
    return ModelCardData(
        language=recipe.data.languages or ["en"],
        license=recipe.publish.license,
        library_name="jakiro",
        base_model=hub_name(recipe.target.model),
        base_model_revision=recipe.target.revision,
        model_name=who["name"],
        eval_results=[result for place, found in own.items() for result in index_of(place, found, who)],
        tags=["speculative-decoding", "draft-model", "custom_generate", who["kind"]],
    )


def _of_target(recipe: Recipe, saved: checkpoint.Saved, measured: Facts) -> Facts:
    target, hub = recipe.target, hub_name(recipe.target.model)
    return {
        "hub": hub,
        "target_address": public_name(target.model),
        "revision": target.revision,
        "fingerprint": saved.target["fingerprint"],
        "positions": saved.shapes["max_position_embeddings"],
        "template_settings": measured["template"],
        "template_mark": measured["target_identity"]["template"],
        "template_keywords": target.template_keywords,
        "chat_template": checkpoint.TEMPLATE if target.chat_template else None,
        "trust_remote_code": target.trust_remote_code,
        "note": embedded.NOTE if target.model.startswith(embedded.PREFIX) else "",
    }


def _of_draft(recipe: Recipe, saved: checkpoint.Saved) -> Facts:
    training = saved.training
    return {
        "description": saved.config.description,
        "vocabulary": saved.config.vocabulary,
        "window": getattr(saved.config, "window", None),
        "coverage": training.get("vocabulary_coverage"),
        "borrowed": saved.borrowed,
        "data": public_name(recipe.data.source),
        "own_answers": recipe.data.answers == "target" or are_of(recipe.data.source, saved.target["fingerprint"]),
        "dialogues": training.get("dialogues"),
        "training": training,
        "train_dtype": recipe.train.dtype,
        "target_dtype": recipe.target.dtype,
        "max_length": recipe.data.max_length,
        "chain": training.get("validation", {}).get("estimated_chain_tau"),
        "features": features_on_hub(recipe),
    }


def _of_run(recipe: Recipe, measured: Facts, who: Facts) -> Facts:
    config, methods, method = recipe.eval, measured["drafts"], who["method"]
    return {
        "secondary": method_of(methods[method]).secondary,
        "explanation": report.explain(),
        "plain": markdown.plain,
        "times": lambda count: "once" if count == 1 else f"{count} times",
        "tuned": measured["tuned"][method.removesuffix("-tuned")] if method.endswith("-tuned") else None,
        "packed": config.pack_linears,
        "max_new_tokens": config.max_new_tokens,
        "repeats": config.repeats,
        "settings": settings_said(recipe),
        "left_out": measured["prompts_left_out"],
        "samples": any(sample["method"] == method for sample in measured["samples"]),
        "others": [
            facts | {"name": name, "same": method_of(facts).draft == recipe.publish.draft, "tree": tree_said(facts)}
            for name, facts in methods.items()
            if name != method
        ],
    }


def _by_context(recipe: Recipe, own: dict[report.Place, dict[str, Row]], method: str) -> list[str]:
    """tau at each context length, at the lowest temperature."""
    config = recipe.eval
    return [
        f"{report.said('tau', own[name, min(config.temperatures), method]['tau'].value)} at {tokens:,}"
        for name, tokens in sorted(config.of_contexts.items(), key=lambda one: one[1])
    ]


def settings_said(recipe: Recipe) -> str:
    """What else the answers and their speed depended on; empty where nothing was set."""
    config = recipe.eval
    words = {"top-k": config.top_k, "top-p": config.top_p if config.top_p < 1 else None}
    words["workers, each with a target of its own:"] = config.workers if config.workers > 1 else None
    said = [f"{name} {value:g}" for name, value in words.items() if value is not None]
    return ", ".join([*said, *(["compiled, fixed shapes"] if config.compile else [])])


def tree_said(facts: dict[str, Any]) -> str:
    """A method's tree in words."""
    method = method_of(facts)
    tree = method.resolved_tree
    shape = "dynamic" if tree.paths is None else "static"
    words = [f"{shape}, depth {tree.depth}, top-k {tree.top_k}, {tree.nodes} nodes"]
    if tree.forwards < tree.depth:
        words.append(f"the last {tree.parallel} levels from one draft forward")
    by_expert = tree.candidates == "decoupled"
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


def by_origin(rows: list[Row]) -> list[str]:
    """What was measured on each machine, with each settings and code, as a section of a card: a line a benchmark,
    temperature, method and tree. Of somebody else's figures the heading names the repository that they are from.
    """
    sections: dict[str, dict[str, dict[str, Row]]] = {}
    for row in rows:
        place = [row.origin[key] for key in ("hardware", "settings", "code_revision")]
        section = json.dumps([*place, row.origin.get("by")], sort_keys=True)
        line = json.dumps([row.benchmark, row.temperature, row.method, row.origin["tree"]], sort_keys=True)
        sections.setdefault(section, {}).setdefault(line, {})[row.figure] = row
    return [_section(list(lines.values())) for lines in sections.values()]


def _section(measurements: list[dict[str, Row]]) -> str:
    origin = measurements[0]["tau"].origin
    who = f"Measured by {markdown.plain(origin['by'])}, as that repository says," if "by" in origin else "Also measured"
    return "\n".join(
        [
            f"### {who} on {markdown.plain(origin['hardware'])}, {origin['settings']['dtype']}",
            "",
            "| benchmark | T | method | tree | prompts | tau | speed-up |",
            "|---|---|---|---|---|---|---|",
            *map(_shown, measurements),
            "",
            f"The same weights, with code `{origin['code_revision']}` and answers of up to "
            f"{origin['settings']['max_new_tokens']} tokens.",
            "",
        ]
    )


def _shown(found: dict[str, Row]) -> str:
    tau = found["tau"]
    tree = f"depth {tau.origin['tree']['depth']}, {tau.origin['tree']['nodes']} nodes"
    cells = [markdown.plain(tau.benchmark), f"{tau.temperature:g}", markdown.plain(tau.method), tree]
    return f"| {' | '.join([*cells, str(tau.details['prompts']), *report.usual_said(found)])} |"


def index_of(place: report.Place, found: dict[str, Row], who: Facts) -> list[EvalResult]:
    """The Hub's model-index of one row: what was measured, by which method, and nothing else; no speed-up that is
    noise.
    """
    benchmark, temperature, method = place
    facts = {"task_type": "text-generation", "dataset_type": benchmark, "dataset_config": f"T = {temperature:g}"}
    facts["dataset_name"] = f"{benchmark}, T = {temperature:g}, {found['tau'].details['prompts']} prompts"
    by = f"{method} ({'the draft alone' if method == who['alone'] else 'as released'})"
    metrics = {"tau": found["tau"].value}
    if not report.is_noise(found["speedup"], found["tau"]):
        metrics["speed-up"] = found["speedup"].value
    return [
        EvalResult(**facts, metric_type=key, metric_name=f"{key} of {by}", metric_value=value)
        for key, value in metrics.items()
        if value
    ]
