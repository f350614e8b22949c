"""The release folder: one draft's checkpoint, what was measured of exactly these weights, a card."""

import math
import shutil
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import EvalResult, ModelCardData

from eval.measure import report
from eval.release.elsewhere import by_origin, earlier
from eval.release.folder import CARD, install
from eval.release.page import PAGE, page
from pipeline.artifacts import checkpoint
from pipeline.artifacts.provenance import RECIPE
from pipeline.artifacts.published import ELSEWHERE
from pipeline.artifacts.regenerated import are_of
from pipeline.artifacts.reports import REPORT, read_report
from pipeline.basics import embedded
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import exclusive, sha256, write_sealed, write_text
from pipeline.basics.parse import from_json
from pipeline.basics.public import public_name
from pipeline.decoding.config import TreeConfig
from pipeline.drafts import kind_of
from pipeline.recipe.recipe import Recipe
from pipeline.serving.bundle import bundle
from pipeline.serving.export import tried
from pipeline.serving.load import TEMPLATE as TEMPLATE_FILE

TEMPLATE = Path(__file__).with_name("card.md.jinja")


def build_release(recipe: Recipe) -> tuple[Path, list[str]]:
    """Writes the release folder anew, but for what the user did there; returns it, and what the user should know.
    Raises PipelineError unless the report measured this checkpoint and was lossless.
    """
    name = recipe.publish.draft
    source, measured = recipe.draft_dir(name), read_report(recipe.eval_dir / REPORT)
    saved = checkpoint.read_config(source)
    weights = sha256(source / checkpoint.WEIGHTS)
    if measured["drafts"].get(name, {}).get("weights_sha256") != weights:
        raise PipelineError(
            f"{recipe.eval_dir / REPORT} did not measure the weights in {source}: run eval/main.py again before "
            "releasing"
        )
    if not report.lossless(measured["results"]):
        raise PipelineError("the losslessness gate failed in this run (see the report): there is nothing to release")
    facts = measured["drafts"][released_method(recipe, measured)]
    release, building = recipe.release_dir, recipe.release_dir.with_name(".release.tmp")
    with exclusive(recipe.eval_dir, "evaluation"):
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        checkpoint.export(source, building, tree_of(facts), together_of(recipe, facts), recipe.eval_dir / RECIPE)
        shutil.copy(recipe.eval_dir / REPORT, building / REPORT)
        bundle(building)
        if recipe.target.chat_template:
            shutil.copy(recipe.target.chat_template, building / TEMPLATE_FILE)
        others, old = earlier([release, source], weights, measured)
        if others:
            write_sealed(building / ELSEWHERE, {"rows": others})
        drawn = _copied_plots(recipe.eval_dir, measured["plots"], building)
        write_text(building / CARD, card(recipe, saved, measured, drawn, others, tried(building)))
        write_text(building / PAGE, _page(recipe, saved, measured, drawn))
        notes = install(building, release)
        shutil.rmtree(building)
    return release, notes + old


def _copied_plots(source: Path, plots: dict[str, str], folder: Path) -> list[Path]:
    """Those that the report names (with their SHA-256), where they are now. Raises PipelineError for another file of
    that name.
    """
    for name, mark in plots.items():
        if not (source / name).is_file() or sha256(source / name) != mark:
            raise PipelineError(
                f"{source / name} is missing, or not the plot that {REPORT} names. Restore it, or remove "
                f"{source / REPORT} and run python eval/main.py RECIPE again: prompts that are decoded are kept"
            )
        shutil.copy(source / name, folder / name)
    return [folder / name for name in plots]


def released_method(recipe: Recipe, measured: dict[str, Any]) -> str:
    """How the released draft decodes by default: of the recipe's tree and the tuned one, alone and with others beside
    it, what was measured to be fastest. What copies from a text that is not released cannot be.
    """
    name = recipe.publish.draft
    own = [method for method in recipe.tunable if recipe.methods[method] == name]
    both = [method for each in own for method in (each, f"{each}-tuned") if method in measured["drafts"]]
    both = [method for method in both if not measured["drafts"][method]["corpora"]]
    speeds = {m: [math.log(e["speedup"]) for e in measured["results"] if e["draft"] == m] for m in both}
    return max(speeds, key=lambda method: sum(speeds[method]))


def tree_of(facts: dict[str, Any]) -> TreeConfig:
    return from_json(TreeConfig, facts["tree"])


def together_of(recipe: Recipe, facts: dict[str, Any]) -> checkpoint.Together | None:
    """How a method of the report chooses its nodes."""
    if not (facts["beside"] or facts["sized"]):
        return None
    beside = {name: recipe.draft[name].public().to_json() for name in facts["beside"]}
    return checkpoint.Together.from_json(facts | {"beside": beside})


def settings_said(recipe: Recipe) -> str:
    """What else the answers and their speed depended on; empty where nothing was set."""
    config = recipe.eval
    words = {"top-k": config.top_k, "top-p": config.top_p if config.top_p < 1 else None}
    words["repetition penalty"] = config.repetition_penalty if config.repetition_penalty != 1 else None
    words["workers, each with a target of its own:"] = config.workers if config.workers > 1 else None
    said = [f"{name} {value:g}" for name, value in words.items() if value is not None]
    return ", ".join([*said, *(["compiled, fixed shapes"] if config.compile else [])])


def said(facts: dict[str, Any]) -> str:
    """A method's tree in words."""
    tree = tree_of(facts)
    shape = "dynamic" if tree.paths is None else "static"
    words = [f"{shape}, depth {tree.depth}, top-k {tree.top_k}, {tree.nodes} nodes"]
    if tree.forwards < tree.depth:
        words.append(f"the last {tree.parallel} levels from one draft forward")
    if tree.candidates != "plain":
        words.append(
            {"decoupled": "the experts' candidates merged", "mixture": "candidates of the experts' mixture"}[
                tree.candidates
            ]
        )
    if tree.siblings != "best":
        words.append("siblings drawn" + (" from each expert in turn" if tree.siblings == "drawn-by-expert" else ""))
    if facts["beside"]:
        words.append(f"{' and '.join(facts['beside'])} beside the draft")
    if facts["corpora"]:
        words.append("prompt lookup also in a text that is not part of this release")
    if facts["beside"] or facts["sized"]:
        words.append("chances counted on calibration prompts" if facts["calibration"] else "default chances")
    if facts["worth"]:
        words.append("each round with the nodes and draft forwards that pay")
    return ", ".join(words)


def hub_name(model: str) -> str | None:
    """The Hub id to link to, if the target has one."""
    if model.startswith(embedded.PREFIX):
        return embedded.HUB_NAME
    return model if model.count("/") == 1 and public_name(model) == model else None


def card(
    recipe: Recipe,
    saved: checkpoint.Saved,
    measured: dict[str, Any],
    plots: list[Path],
    elsewhere: list[dict[str, Any]],
    engines: dict[str, list[str]],
) -> str:
    """README.md: a YAML head for the Hub and a body that states only what `measured` holds, and what the same weights
    measured elsewhere.
    """
    hub = hub_name(recipe.target.model)
    provenance, method = measured["provenance"], released_method(recipe, measured)
    entries = [entry for entry in measured["results"] if entry["draft"] == method]
    name = f"{recipe.name}-{recipe.publish.draft}"
    head = ModelCardData(
        language=list(recipe.publish.language),
        license=recipe.publish.license,
        library_name="jakiro",
        base_model=hub,
        base_model_revision=recipe.target.revision,
        model_name=name,
        eval_results=[found for entry in entries for found in _index(entry)],
        tags=["speculative-decoding", "draft-model", "custom_generate", kind_of(saved.config)],
    )
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, autoescape=False)
    body = environment.from_string(TEMPLATE.read_text()).render(
        name=name,
        headline=report.headline(entries),
        times=lambda count: "once" if count == 1 else f"{count} times",
        kind=kind_of(saved.config),
        hub=hub,
        target_name=hub or public_name(recipe.target.model),
        target_link=f"https://huggingface.co/{hub}" if hub else "#limits",
        target_address=public_name(recipe.target.model),
        revision=recipe.target.revision,
        fingerprint=saved.target["fingerprint"],
        description=saved.config.description,
        parameters=saved.training["parameters"],
        vocabulary=saved.config.vocabulary,
        coverage=saved.training.get("vocabulary_coverage"),
        own_head=saved.own_head,
        tree=said(measured["drafts"][method]),
        tuned=measured["tuned"][method.removesuffix("-tuned")] if method.endswith("-tuned") else None,
        data=public_name(recipe.data.source),
        own_answers=are_of(recipe.data.source, saved.target["fingerprint"]),
        dialogues=saved.training.get("dialogues"),
        training=saved.training,
        recipe_hash=recipe.hash,
        code_revision=provenance["code_revision"],
        hardware=provenance["hardware"],
        dtype=recipe.eval.dtype,
        packed=recipe.eval.pack_linears,
        max_new_tokens=recipe.eval.max_new_tokens,
        repeats=recipe.eval.repeats,
        greedy=0.0 in recipe.eval.temperatures,
        settings=settings_said(recipe),
        sampled=any(temperature > 0 for temperature in recipe.eval.temperatures),
        sampled_repeats=recipe.eval.sampled_repeats,
        template_settings=measured["template"],
        template_mark=measured["template_fingerprint"],
        positions=saved.shapes["max_position_embeddings"],
        template_keywords=recipe.target.template_keywords,
        chat_template=TEMPLATE_FILE if recipe.target.chat_template else None,
        trust_remote_code=recipe.target.trust_remote_code,
        left_out=measured["prompts_left_out"],
        note=embedded.NOTE if recipe.target.model.startswith(embedded.PREFIX) else "",
        table=measured["table"],
        explanation=report.explain(),
        others=[
            facts
            | {
                "name": name,
                "same": facts["draft"] == recipe.publish.draft,
                "tree": said(facts),
            }
            for name, facts in measured["drafts"].items()
            if name != method
        ],
        plots=plots,
        engines=engines,
        chain=saved.training.get("validation", {}).get("estimated_chain_tau"),
        elsewhere=[one | {"rows": [_shown(row) for row in one["rows"]]} for one in by_origin(elsewhere)],
        samples=any(sample["method"] == method for sample in measured["samples"]),
        max_length=recipe.data.max_length,
    )
    return f"---\n{head.to_yaml()}\n---\n\n{body}"


def _page(recipe: Recipe, saved: checkpoint.Saved, measured: dict[str, Any], plots: list[Path]) -> str:
    method = released_method(recipe, measured)
    facts = {
        "name": f"{recipe.name}-{recipe.publish.draft}",
        "kind": kind_of(saved.config),
        "target": hub_name(recipe.target.model) or public_name(recipe.target.model),
        "parameters": saved.training["parameters"],
        "tree": said(measured["drafts"][method]),
    }
    return page(recipe, measured, method, plots, facts)


def _shown(row: dict[str, Any]) -> str:
    """A row of figures as Markdown."""
    speed = report.with_interval(row["speedup"], row.get("speedup_interval")) + ("x" if row["speedup"] else "")
    tau = report.with_interval(row["tau"], row["tau_interval"])
    tree = f"depth {row['tree']['depth']}, {row['tree']['nodes']} nodes"
    cells = [row["benchmark"], f"{row['temperature']:g}", row["draft"], tree, str(row["prompts"]), tau, speed]
    return f"| {' | '.join(cells)} |"


def _index(entry: dict[str, Any]) -> list[EvalResult]:
    """The Hub's model-index of one row: what was measured, and nothing else."""
    benchmark, temperature = entry["benchmark"], entry["temperature"]
    place = {"task_type": "text-generation", "dataset_type": benchmark, "dataset_config": f"T = {temperature:g}"}
    place["dataset_name"] = f"{benchmark}, T = {temperature:g}, {entry['prompts']} prompts"
    figures = {"tau": entry["tau"], "speed-up": entry["speedup"]}
    return [EvalResult(**place, metric_type=key, metric_value=value) for key, value in figures.items() if value]
