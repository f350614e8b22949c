"""Drafts that are published, ours and others', fetched by repository and revision instead of trained.

A recipe names one as ``published.NAME = "OWNER/NAME@COMMIT"``, and its kind and settings in ``[draft.NAME]``. Settings
and weights only are fetched, never code.
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
from pipeline.basics.files import exclusive
from pipeline.drafts import parameter_count
from pipeline.lm.model import load_embed_head
from pipeline.recipe.recipe import Recipe
from pipeline.recipe.untrusted import Trained, parse_untrusted


def fetch(recipe: Recipe, say: Callable[[str], None] = print) -> None:
    """Fetches the recipe's published drafts that are not in its run yet, and says so of each. Raises PipelineError."""
    for name in sorted(recipe.published):
        mine = recipe.paths.draft(name)
        if not (mine / checkpoint.CONFIG).exists():
            if (mine / checkpoint.METRICS).exists():
                raise PipelineError(f"{mine} holds a training that was broken off: move it away, {name} is published")
            repository, _, revision = recipe.published[name].partition("@")
            folder = download(repository, revision)
            facts = {"repository": repository, "revision": revision}
            take = adopt if is_ours(folder) else import_draft
            take(folder, recipe, name, facts)
            say(f"{name}: fetched from {repository}, revision {revision}")


def is_ours(folder: Path) -> bool:
    """Whether a checkpoint has this project's own form."""
    return "format_version" in raw_config(folder)


def adopt(source: Path, recipe: Recipe, name: str, published: dict[str, str]) -> None:
    """Makes a release of ours the recipe's draft `name`: the same weights, and what its training was. Raises
    PipelineError where it is of another target or has other settings.
    """
    saved, folder, mine = checkpoint.read_config(source), recipe.paths.draft(name), recipe.draft[name].to_json()
    theirs = saved.config.to_json()
    if differ := sorted(key for key in {*mine, *theirs} if mine.get(key) != theirs.get(key)):
        said = ", ".join(f"draft.{name}.{key}={theirs.get(key)!r} (here {mine.get(key)!r})" for key in differ)
        raise PipelineError(f"{published['repository']} has other settings than draft.{name}: set {said}")
    embed_head = load_embed_head(recipe.target)
    draft = checkpoint.load(source, embed_head.fingerprint)
    draft.name = name
    draft.bind(embed_head)
    facts = parse_untrusted(Trained, saved.training, source / checkpoint.CONFIG, "It cannot be used").facts()
    training: dict[str, Any] = facts | {"parameters": parameter_count(draft), "published": published}
    with exclusive(folder, "import"):
        checkpoint.save(folder, draft, draft.state_dict(), recipe, name, training)


def download(repository: str, revision: str) -> Path:
    """A folder of the cache. Raises PipelineError where the Hub does not give it."""
    found = fetched(repository, revision, ["*.json", *WEIGHTS])
    if any((found / name).is_file() for name in WEIGHTS) or not (names := shards(found)):
        return found
    return fetched(repository, revision, names)


def fetched(repository: str, revision: str, names: list[str]) -> Path:
    """A folder of the cache with the files of these names that are there. Raises PipelineError."""
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=names))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise PipelineError(
            f"{repository}, revision {revision}, cannot be fetched: {reason}. Is it public, or are you logged in "
            "(hf auth login)?"
        ) from None
