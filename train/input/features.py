"""The features where this node's ranks read them, checked once.

Guarantees: before a run each host knows the checksum of everything that its ranks may read, whatever other hosts have
(it reads what changed since it last read it); one that is damaged anywhere ends all ranks by name, before the first
step.
"""

import logging
import socket
import uuid
from pathlib import Path

from pipeline.artifacts.features import answers_hash
from pipeline.artifacts.provenance import recorded
from pipeline.basics.errors import PipelineError
from pipeline.features.schema import FeatureSpec, another_engine
from pipeline.features.shards import ANSWERS, FeatureStore, Manifest, damages, kind_of
from pipeline.recipe.differences import ANSWERS_KEYS
from pipeline.recipe.recipe import Recipe
from train.engine.ranks import by_rank_0, fail_together, place_on_host
from train.input.stream import FedStore

Stores = tuple[FeatureStore, FeatureStore, FeatureStore | None]
log = logging.getLogger(__name__)


def open_checked(recipe: Recipe, expected: FeatureSpec) -> Stores:
    """The dump's training and held-out dialogues, and the target's answers to calibration prompts where it has any. All
    ranks take part.

    Raises PipelineError, on all of them, where a rank's host has a damaged shard, where there is nothing to train on,
    or where the recipe's keys need answers that are not there.
    """
    with fail_together():
        _require_whole(recipe)
        return stores(recipe, expected)


def _require_whole(recipe: Recipe) -> None:
    """The ranks of a host share its shards among them."""
    number, count = place_on_host()
    folder, brought = recipe.paths.shards, recipe.features.store or recipe.train.shards
    files = Manifest.load(folder).lasting(recipe.features.keep)  # what training is fed with it checks as it comes
    files = files[number::count]
    for record, reason in zip(files, damages(folder, files), strict=True):
        if reason:
            again = f"jakiro verify {folder} --recipe RECIPE --repair"
            raise PipelineError(
                f"{kind_of(record)} {folder / record.name} on {socket.gethostname()}: {reason}. "
                + ("Remove it and run again: it is brought anew" if brought else f"It can be dumped again: {again}")
            )


def stores(recipe: Recipe, expected: FeatureSpec) -> Stores:
    folder = recipe.paths.shards
    manifest = Manifest.load(folder)
    if note := another_engine(manifest.spec, expected):
        log.warning("%s: %s", folder, note)
    fed, heldout = recipe.features.keep == "window", FeatureStore(folder, "validation", expected)
    if not fed and manifest.lacks("train"):
        raise PipelineError(f"{folder} was dumped for features.keep='window': run the dump again, or set that")
    store = FedStore(recipe, expected) if fed else FeatureStore(folder, "train", expected)
    if not fed and manifest.total("train", "trained_tokens") == 0:
        raise PipelineError(
            f"{folder}: its {len(store)} training dialogues have no trained position: no token of theirs is the "
            "assistant's. Look at the chat template, and dump again into another folder"
        )
    if manifest.total(ANSWERS, "rows"):
        if manifest.answers_hash != answers_hash(recipe, manifest.spec.recipe):
            found = recorded(recipe.paths.features)
            keys = found.differences(recipe, ANSWERS_KEYS) if found else f"one of {', '.join(ANSWERS_KEYS)}"
            raise PipelineError(
                f"{folder}: its answers to calibration prompts are of other settings, or of a target that ended them "
                f"at other tokens ({keys or 'the settings are the same'}). Run the dump again: it keeps the rest"
            )
        if manifest.total(ANSWERS, "trained_tokens") == manifest.total(ANSWERS, "rows"):
            raise PipelineError(
                f"{folder}: the target answers every calibration prompt with one token, its stop token: the chat "
                "template is not the one it was trained with. Set target.chat_template, and dump again into another "
                "folder"
            )
        return store, heldout, FeatureStore(folder, ANSWERS, expected)
    config = recipe.train
    if config.keep == "best" or config.patience or config.decode != "never":
        raise PipelineError(
            f"{folder} holds no answers to calibration prompts, by which train.keep, train.patience and train.decode "
            "go: the source had no held-out dialogues left for them, or data.calibration_prompts was 0. Set that and "
            "run the dump again, which keeps the rest; or raise data.heldout_fraction and dump into another folder"
        )
    return store, heldout, None


def require_shared(folder: Path) -> None:
    """All ranks take part. Raises PipelineError where one of them does not see what rank 0 writes into `folder`."""

    def leave_mark() -> Path:
        mark = folder / f".seen-{uuid.uuid4().hex}.tmp"
        mark.touch()
        return mark

    mark = by_rank_0(leave_mark)
    with fail_together():
        if not mark.exists():
            raise PipelineError(
                f"{folder} on {socket.gethostname()} is not the one of rank 0, but resume states need an output that "
                "all nodes see"
            )
    mark.unlink(missing_ok=True)  # all have looked
