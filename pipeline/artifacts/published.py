"""Published drafts, of this project and of others, which are downloaded by repository and revision, not trained.

A recipe names one as ``published.NAME = "OWNER/NAME@COMMIT"``, and its kind and settings in ``[draft.NAME]``. Only
settings and weights are downloaded, never code.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from pipeline.artifacts import checkpoint
from pipeline.artifacts.foreign import raw_config
from pipeline.artifacts.imported import import_draft
from pipeline.artifacts.unpickle import WEIGHTS, shards
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import lock_folder
from pipeline.drafts import parameter_count
from pipeline.lm.model import load_embed_head
from pipeline.recipe.recipe import Recipe
from pipeline.recipe.untrusted import TrainingFacts, parse_untrusted


def download_published(recipe: Recipe, report_line: Callable[[str], None] = print) -> None:
    """Download the recipe's published drafts that are not in its run yet, with a line on each. Raises PipelineError."""
    for name in sorted(recipe.published):
        draft_folder = recipe.paths.draft(name)
        if not (draft_folder / checkpoint.CONFIG).exists():
            if (draft_folder / checkpoint.METRICS).exists():
                raise PipelineError(
                    f"{draft_folder} holds an interrupted training, but published.{name} is set: move it away"
                )
            repository, _, revision = recipe.published[name].partition("@")
            folder = download(repository, revision)
            facts = {"repository": repository, "revision": revision}
            save_draft = adopt if has_own_format(folder) else import_draft
            save_draft(folder, recipe, name, facts)
            report_line(f"{name}: fetched from {repository}, revision {revision}")


def has_own_format(folder: Path) -> bool:
    """Return whether a checkpoint has this project's own format."""
    return "format_version" in raw_config(folder)


def adopt(source: Path, recipe: Recipe, name: str, published: dict[str, str]) -> None:
    """Save a release of this project as the recipe's draft `name`, with the same weights and facts of the training.
    Raises PipelineError if its target or its settings differ.
    """
    saved, folder, recipe_settings = (
        checkpoint.read_config(source),
        recipe.paths.draft(name),
        recipe.draft[name].to_json(),
    )
    release_settings = saved.config.to_json()
    if different_keys := sorted(
        key for key in {*recipe_settings, *release_settings} if recipe_settings.get(key) != release_settings.get(key)
    ):
        assignments = ", ".join(
            f"draft.{name}.{key}={release_settings.get(key)!r} (here {recipe_settings.get(key)!r})"
            for key in different_keys
        )
        raise PipelineError(f"{published['repository']} has other settings than draft.{name}: set {assignments}")
    embed_head = load_embed_head(recipe.target)
    draft = checkpoint.load(source, embed_head.fingerprint)
    draft.name = name
    draft.bind(embed_head)
    facts = parse_untrusted(TrainingFacts, saved.training, source / checkpoint.CONFIG, "It cannot be used").facts()
    training: dict[str, Any] = facts | {"parameters": parameter_count(draft), "published": published}
    with lock_folder(folder, "import"):
        checkpoint.save(folder, draft, draft.state_dict(), recipe, name, training)


def download(repository: str, revision: str) -> Path:
    """Download a draft's settings and weights into the cache, and return their folder. Raises PipelineError."""
    folder = download_files(repository, revision, ["*.json", *WEIGHTS])
    if any((folder / name).is_file() for name in WEIGHTS) or not (names := shards(folder)):
        return folder
    return download_files(repository, revision, names)


def download_files(repository: str, revision: str, names: list[str]) -> Path:
    """Return a folder of the cache with the repository's files of these names. Raises PipelineError."""
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=names))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise PipelineError(
            f"{repository}, revision {revision}, cannot be fetched: {reason}. Is it public, or are you logged in "
            "(hf auth login)?"
        ) from None
