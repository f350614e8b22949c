"""The release folder: one draft's checkpoint, what was measured of exactly these weights, a card. And its upload."""

import math
import shutil
from pathlib import Path
from typing import Any

import httpx2
import jinja2
from huggingface_hub import HfApi, ModelCardData
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id

from eval import report
from pipeline import checkpoint, embedded
from pipeline.errors import PipelineError
from pipeline.files import read_json, sha256, write_text
from pipeline.provenance import RECIPE, public_name
from pipeline.recipe import Recipe
from pipeline.sections import Section, TreeConfig

TEMPLATE = Path(__file__).with_name("card.md.jinja")
REPORT, CARD, TEMPLATE_FILE = "report.json", "README.md", "chat_template.jinja"
_DESCRIPTIONS = {
    "eagle": "EAGLE ([2401.15077](https://arxiv.org/abs/2401.15077)), one dense layer,",
    "jakiro": "Jakiro ([2502.06282](https://arxiv.org/abs/2502.06282)), a mixture of experts in one layer,",
}


def build_release(recipe: Recipe) -> Path:
    """Writes the release folder anew. Raises PipelineError unless the report measured this checkpoint and was lossless."""
    name = recipe.publish.draft
    source, measured = recipe.draft_dir(name), read_json(recipe.eval_dir / REPORT)
    saved = checkpoint.read_config(source)
    weights = sha256(source / checkpoint.WEIGHTS)
    if measured["drafts"].get(name, {}).get("weights_sha256") != weights:
        raise PipelineError(
            f"{recipe.eval_dir / REPORT} did not measure the weights in {source}: run eval/main.py again before releasing"
        )
    if not report.lossless(measured["results"]):
        raise PipelineError("the losslessness gate failed in this run (see the report): there is nothing to release")
    release, building = recipe.release_dir, recipe.release_dir.with_name(".release.tmp")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    checkpoint.export(source, building, tree_of(recipe, measured), recipe.eval_dir / RECIPE)
    shutil.copy(recipe.eval_dir / REPORT, building / REPORT)
    if recipe.target.chat_template:
        shutil.copy(recipe.target.chat_template, building / TEMPLATE_FILE)
    drawn = [recipe.eval_dir / plot for plot in measured["plots"]]
    for plot in drawn:
        shutil.copy(plot, building / plot.name)
    write_text(building / CARD, card(recipe, saved, measured, drawn))
    shutil.rmtree(release, ignore_errors=True)
    building.replace(release)
    return release


def released_method(recipe: Recipe, measured: dict[str, Any]) -> str:
    """The released draft with its tuned tree or with the recipe's: the one that was measured to be faster."""
    name = recipe.publish.draft
    tuned = f"{name}-tuned"
    if tuned not in measured["drafts"]:
        return name
    speeds = {m: [math.log(e["speedup"]) for e in measured["results"] if e["draft"] == m] for m in (name, tuned)}
    return max(speeds, key=lambda method: sum(speeds[method]))


def tree_of(recipe: Recipe, measured: dict[str, Any]) -> TreeConfig:
    """What the released draft grows by default."""
    return TreeConfig(**measured["drafts"][released_method(recipe, measured)]["tree"])


def settings_said(recipe: Recipe) -> str:
    """What else the answers and their speed depended on; empty where nothing was set."""
    config = recipe.eval
    words = {"top-k": config.top_k, "top-p": config.top_p if config.top_p < 1 else None}
    words["repetition penalty"] = config.repetition_penalty if config.repetition_penalty != 1 else None
    words["workers, each with a target of its own:"] = config.workers if config.workers > 1 else None
    said = [f"{name} {value:g}" for name, value in words.items() if value is not None]
    return ", ".join([*said, *(["compiled, fixed shapes"] if config.compile else [])])


def said(tree: TreeConfig) -> str:
    """A tree in words."""
    shape = "dynamic" if tree.paths is None else "static"
    words = [f"{shape}, depth {tree.depth}, top-k {tree.top_k}, {tree.nodes} nodes"]
    if tree.parallel > 1:
        words.append(f"the last {tree.parallel} levels from one draft forward")
    if tree.candidates != "plain":
        words.append(
            {"decoupled": "the experts' candidates merged", "mixture": "candidates of the experts' mixture"}[
                tree.candidates
            ]
        )
    if tree.siblings != "best":
        words.append("siblings drawn" + (" from each expert in turn" if tree.siblings == "drawn-by-expert" else ""))
    return ", ".join(words)


def hub_name(model: str) -> str | None:
    """The Hub id to link to, if the target has one."""
    if model.startswith(embedded.PREFIX):
        return embedded.HUB_NAME
    return model if model.count("/") == 1 and public_name(model) == model else None


def card(recipe: Recipe, saved: checkpoint.Saved, measured: dict[str, Any], plots: list[Path]) -> str:
    """README.md: a YAML head for the Hub and a body that states only what `measured` holds."""
    hub = hub_name(recipe.target.model)
    head = ModelCardData(
        language=list(recipe.publish.language),
        license=recipe.publish.license,
        library_name="jakiro",
        base_model=hub,
        tags=["speculative-decoding", "draft-model", saved.config.kind],
    )
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, autoescape=False)
    provenance = measured["provenance"]
    body = environment.from_string(TEMPLATE.read_text()).render(
        name=f"{recipe.name}-{recipe.publish.draft}",
        kind=saved.config.kind,
        target_name=hub or public_name(recipe.target.model),
        target_link=f"https://huggingface.co/{hub}" if hub else "#limits",
        target_address=public_name(recipe.target.model),
        revision=recipe.target.revision,
        fingerprint=saved.target["fingerprint"],
        description=_DESCRIPTIONS[saved.config.kind],
        parameters=saved.training["parameters"],
        vocabulary=saved.config.vocabulary,
        coverage=saved.training.get("vocabulary_coverage", 1.0),
        tree=said(tree_of(recipe, measured)),
        tuned=measured["tuned"][recipe.publish.draft] if released_method(recipe, measured).endswith("-tuned") else None,
        data=public_name(recipe.data.source),
        dialogues=saved.training["dialogues"],
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
        template_keywords=recipe.target.template_keywords,
        template_date=_unless_default(recipe.target, "template_date"),
        chat_template=TEMPLATE_FILE if recipe.target.chat_template else None,
        trust_remote_code=recipe.target.trust_remote_code,
        left_out=measured["prompts_left_out"],
        note=embedded.NOTE if recipe.target.model.startswith(embedded.PREFIX) else "",
        table=measured["table"],
        explanation=report.explain(),
        others=[
            facts
            | {"name": name, "same": facts["draft"] == recipe.publish.draft, "tree": said(TreeConfig(**facts["tree"]))}
            for name, facts in measured["drafts"].items()
            if name != released_method(recipe, measured)
        ],
        plots=plots,
        max_length=recipe.data.max_length,
    )
    return f"---\n{head.to_yaml()}\n---\n\n{body}"


def _unless_default(section: Section, key: str) -> Any:
    value = getattr(section, key)
    return None if value == type(section).model_fields[key].default else value


def require_repository_name(repository: str) -> None:
    """Raises PipelineError when `repository` is no OWNER/NAME that the Hub can hold; asks nobody."""
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise PipelineError(f"--push {repository!r}: {error}") from None
    if repository.count("/") != 1:
        raise PipelineError(f"--push {repository!r}: expected OWNER/NAME")


def push(release: Path, repository: str, private: bool) -> str:
    """Uploads the release folder; returns its address. The token is huggingface_hub's own (HF_TOKEN or its login)."""
    api = HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        found = api.upload_folder(
            repo_id=repository, folder_path=release, commit_message=f"Release {read_json(release / REPORT)['name']}"
        )
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "no answer"
        raise PipelineError(
            f"the Hub refused the upload to {repository} ({status}): check the name and that HF_TOKEN may write there"
        ) from None
    except (OSError, httpx2.HTTPError) as error:  # no network, HF_HUB_OFFLINE
        raise PipelineError(
            f"the Hub cannot be reached to upload to {repository} ({type(error).__name__}). The release stays in {release}: "
            "run the same command again, it measures nothing twice"
        ) from None
    return str(found.commit_url)
