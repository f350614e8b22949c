"""A run's features: the spec of its shards, the download of tables and shards, and the list of shards that a running
training will read next.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from filelock import FileLock

from pipeline.artifacts.provenance import RECIPE, Recorded, describe_settings, parse_recorded, read_recorded
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import read_sealed, write_sealed
from pipeline.basics.progress import Progress
from pipeline.features.engines import source_identity
from pipeline.features.schema import FeatureSpec, require_readable
from pipeline.features.shards import HELDOUT_PROMPTS, MANIFEST, Manifest, find_damage, find_prompts_damage
from pipeline.features.store import Store
from pipeline.lm.attention import declared_positions, max_positions
from pipeline.lm.model import TargetIdentity, identify, load_config, load_tokenizer
from pipeline.lm.template import template_settings
from pipeline.recipe.identity import calibration_hash, digest, dump_hash, dump_hash_with, dump_keys, required_layers
from pipeline.recipe.recipe import Recipe

SHARDS_MADE = "train shards made"  # in the feeder's last line, which a run shows
Find = Callable[[], Recorded | None]  # returns the recipe next to features


def shard_request_file(recipe: Recipe) -> Path:
    """Return the path of the request of a running training to its feeder."""
    return recipe.paths.run / "wanted.json"


@dataclass(frozen=True)
class ShardRequest:
    """A training's request to its feeder: the shards that it will read, in the order of their next use."""

    shards: list[int]  # empty: training is finished
    now: int = 0  # the number of first shards that have to be made if they are missing
    room: int = 0  # the maximum number of shards on disk, including those that are being made

    @property
    def soon(self) -> list[int]:
        return self.shards[: self.now]

    def next(self, held: set[int], making: set[int]) -> tuple[set[int], int | None]:
        """Return the shards to delete, and the shard to make next if there is room. The shards that training reads
        last, or never again, are deleted first (Belady's rule, with which the fewest shards have to be made).
        """
        lacking = next((index for index in self.soon if index not in held | making), None)
        next_use = {index: at for at, index in enumerate(self.shards)}
        spare = sorted(held.difference(self.soon), key=lambda index: next_use.get(index, len(next_use)), reverse=True)
        over = len(held | making) + (lacking is not None) - self.room
        return set(spare[: max(over, 0)]), lacking if over <= len(spare) else None


def write_shard_request(recipe: Recipe, request: ShardRequest) -> None:
    write_sealed(shard_request_file(recipe), asdict(request))


def read_shard_request(recipe: Recipe) -> ShardRequest | None:
    """Return the request that `write_shard_request` wrote; None if there is none."""
    path = shard_request_file(recipe)
    return ShardRequest(**read_sealed(path, "Remove it, and run again")) if path.exists() else None


def feature_spec(recipe: Recipe) -> FeatureSpec:
    """Return the spec of this recipe's shards, which the dump writes and training expects."""
    tokenizer, config = load_tokenizer(recipe.target), load_config(recipe.target)
    layers = recipe.auxiliary_layers(config.num_hidden_layers)
    if layers and layers[-1] > config.num_hidden_layers:
        raise PipelineError(
            f"features.auxiliary_layers={layers}, but {recipe.target.model!r} has {config.num_hidden_layers} layers, "
            "counted from 1"
        )
    for name in recipe.to_train:
        if lacking := sorted(set(recipe.draft[name].needs(config.num_hidden_layers).auxiliary) - set(layers)):
            raise PipelineError(
                f"features.auxiliary_layers={layers} lacks {lacking}, which draft.{name} needs: add them, or leave the "
                "key out"
            )
    most = max_positions(config)
    if recipe.data.max_length > most < declared_positions(config):
        raise PipelineError(
            f"data.max_length={recipe.data.max_length}: above {most} tokens in a batch {recipe.target.model!r} rotates "
            "every position by other factors (longrope), also in the batch's shorter dialogues. Set it to "
            f"{most} or less"
        )
    states, target = source_identity(recipe.target, layers), identify(recipe.target)
    return FeatureSpec(
        hidden_size=config.hidden_size,
        stored_dtype=recipe.stored_dtype,
        target=target.fingerprint,
        tokenizer=target.tokenizer,
        template=target.template,
        template_settings=template_settings(tokenizer, recipe.target),
        recipe=dump_hash(recipe),
        norm_stage=states.norm_stage,
        auxiliary_layers=" ".join(map(str, states.layers)),
        dtype=states.dtype,
        engine=states.engine,
        engine_version=states.version,
        stop_ids=" ".join(map(str, target.stop_ids)) if recipe.data.answers == "target" else "",
    )


def dump_differences(recipe: Recipe, got: FeatureSpec, find: Find, target_layers: int | None) -> str:
    """Return the settings in which a dump differs from the recipe, with both values. Empty if the dump is the recipe's,
    or only has more auxiliary layers: the recipe that `find` returns has the layers of the dump, and its hash proves
    that.

    `target_layers`: the target's number of layers, if the target is on this machine.
    """
    if got.recipe == dump_hash(recipe):
        return ""
    if recipe.features.dump:
        return f"features.dump: {got.recipe} -> {recipe.features.dump}"
    recorded_recipe = find()
    layers = recorded_recipe.layers if recorded_recipe else None
    if layers is None or dump_hash_with(recipe, layers) != got.recipe:
        return describe_settings(recorded_recipe, recipe, dump_keys(recipe))
    required = recipe.auxiliary_layers(target_layers) if target_layers else required_layers(recipe)
    holds_all = set(required) <= set(got.auxiliary_numbers)
    return "" if holds_all else f"features.auxiliary_layers: {got.auxiliary_numbers} -> {required}"


def require_dump_of(recipe: Recipe, got: FeatureSpec, find: Find, where: object) -> FeatureSpec:
    """Return the spec with which this recipe reads a dump, which may hold more auxiliary layers. Raises PipelineError
    that names the differences.
    """
    expected = replace(feature_spec(recipe), recipe=got.recipe)
    require_readable(got, expected, where)
    if different_keys := dump_differences(recipe, got, find, load_config(recipe.target).num_hidden_layers):
        raise PipelineError(
            f"{where}: features of other data or feature settings: {different_keys}. Use the recipe they were dumped "
            "with, or dump again into another output folder"
        )
    return expected


def readable_spec(recipe: Recipe) -> FeatureSpec:
    """Return the spec with which this recipe reads its dump, in its store or its folder; without a dump, the spec of a
    future one. Raises PipelineError as `require_dump_of` does.
    """
    folder, store = recipe.paths.features, open_store(recipe)
    if store is None and not (folder / MANIFEST).exists():
        return feature_spec(recipe)
    if store is None:
        return require_dump_of(recipe, Manifest.load(folder).spec, partial(read_recorded, folder), folder)
    return require_dump_of(recipe, store.manifest().spec, partial(recorded_in_store, store), store.name)


def recorded_in_store(store: Store) -> Recorded | None:
    """Return the recipe next to the features of a store; None if there is none that can be read."""
    with suppress(PipelineError):
        return parse_recorded(store.read(RECIPE))
    return None


def answers_hash(recipe: Recipe, dump: str, target: TargetIdentity | None = None) -> str:
    """Return the hash of everything that the target's answers to calibration prompts depend on, for a dump with the
    hash `dump`, including the stop tokens. `target`: its identity, if it is known already.
    """
    return digest([calibration_hash(recipe, dump), (target or identify(recipe.target)).stop_ids])


def target_differences(target: TargetIdentity, spec: FeatureSpec) -> list[str]:
    """Return how the target differs from the one that the features of this spec were dumped from."""
    then = {"fingerprint": spec.target, "tokenizer": spec.tokenizer, "template": spec.template}
    stop_ids = {"stop_ids": [int(token) for token in spec.stop_ids.split()]} if spec.stop_ids else {}
    return target.differences(then | stop_ids)


def open_store(recipe: Recipe, reader: Path | None = None) -> Store | None:
    """Return the recipe's store; without one, the run's own folder is the store for a `reader` in another folder."""
    if recipe.features.store:
        return Store(recipe.features.store)
    run_folder = recipe.paths.features.resolve()
    return (
        Store(run_folder.as_uri(), name=str(recipe.paths.features))
        if reader and reader.resolve() != run_folder
        else None
    )


def fetch(
    recipe: Recipe, expected: FeatureSpec | None = None, checksums: bool = True, folder: Path | None = None
) -> None:
    """Download the recipe's features, except temporary shards, to `folder`, by default the run's own, from its store;
    or copy them from the run's own folder to another one. Files that are there already are kept.

    Any number of a node's processes may call it at once: one downloads, the others wait. `expected` is compared before
    the download; without `checksums` damaged shards are not noticed, and `verify` finds them. Raises PipelineError,
    also for a dump that is not finished, and for a folder with copies of another dump.
    """
    folder = folder or recipe.paths.features
    elsewhere, store = folder.resolve() != recipe.paths.features.resolve(), open_store(recipe, folder)
    if store is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    with download_lock(folder):
        for leftover in folder.glob(".*.tmp") if elsewhere else ():  # files of ranks that were killed
            leftover.unlink()
        held = _copy_checksums(folder, expected) if elsewhere else _checksums(folder)
        manifest = store.manifest()
        if expected is not None:
            require_readable(manifest.spec, expected, store.name)
        manifest.require_complete(store.name)
        missing = [  # missing, of another size, or dumped again since
            record
            for record in manifest.permanent_files(recipe.features.keep)
            if held.get(record.name, record.sha256) != record.sha256 or find_damage(folder, record, digest=None)
        ]
        with Progress("fetch", len(missing), "shards", quiet=not missing) as progress:
            for record in missing:
                store.get(record.name, folder, record.sha256 if checksums else None)
                progress.advance(1)
        if not elsewhere:  # files that evaluation and `verify` read
            store.get(HELDOUT_PROMPTS, folder, manifest.prompts_sha256 if checksums else None)
            store.get(RECIPE, folder)
        if elsewhere or recipe.features.keep == "all" or not (folder / MANIFEST).exists():
            manifest.save(folder)  # otherwise the manifest there lists a feeder's shards as well


def download_lock(folder: Path) -> FileLock:
    """Return the lock that the downloading process of a node holds while the others wait."""
    return FileLock(folder / ".fetch.lock")


def _checksums(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file in a folder's manifest; an empty dict if there is no manifest yet."""
    with suppress(PipelineError):
        return {record.name: record.sha256 for record in Manifest.load(folder).files}
    return {}


def _copy_checksums(folder: Path, expected: FeatureSpec | None) -> dict[str, str]:
    """Return the SHA-256 of each copy, as `_held` does. Raises PipelineError if they are of another or an unknown dump,
    since copies are never replaced.
    """
    if not (folder / MANIFEST).exists():
        return {}
    try:
        manifest = Manifest.load(folder)
    except PipelineError:
        raise PipelineError(
            f"train.shards {folder}: its {MANIFEST} is damaged, or of another version of this project. Remove that "
            "folder if it holds copies only, and run again: the features are copied again; else name another"
        ) from None
    if expected is not None:
        require_readable(manifest.spec, expected, folder)
    return {record.name: record.sha256 for record in manifest.files}


def heldout_prompts(recipe: Recipe) -> Path:
    """Return the path of the held-out prompts for evaluation; from a store only this file is downloaded. If there are
    none, the path does not exist. Raises PipelineError if they are not those of the dump.
    """
    store, path = open_store(recipe), recipe.paths.features / HELDOUT_PROMPTS
    if store is not None:
        store.get(HELDOUT_PROMPTS, recipe.paths.features, store.manifest().prompts_sha256)
    elif path.exists() and (reason := find_prompts_damage(recipe.paths.features, Manifest.load(recipe.paths.features))):
        raise PipelineError(f"{path}: {reason}. Run the dump again: it writes this file again and keeps the shards")
    return path
