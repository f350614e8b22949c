"""A run's features: what its shards declare, where tables and shards are brought from, and which ones a training that
is fed while it runs wants next.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from filelock import FileLock

from pipeline.artifacts.provenance import RECIPE, Recorded, recorded, recorded_in, settings_said
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import read_sealed, write_sealed
from pipeline.basics.progress import Progress
from pipeline.features.engines import identity_of
from pipeline.features.schema import FeatureSpec, require_readable
from pipeline.features.shards import HELDOUT_PROMPTS, MANIFEST, Manifest, damage, prompts_damage
from pipeline.features.store import Store
from pipeline.lm.attention import most_positions
from pipeline.lm.model import TargetIdentity, identify, load_config, load_tokenizer
from pipeline.lm.template import template_settings
from pipeline.recipe.identity import calibration_hash, digest, dump_hash, dump_hash_with, dump_keys, wanted_layers
from pipeline.recipe.recipe import Recipe

Find = Callable[[], Recorded | None]  # what gives the recipe that lies beside features


def wanted_file(recipe: Recipe) -> Path:
    """There while a training is fed."""
    return recipe.paths.run / "wanted.json"


@dataclass(frozen=True)
class Wanted:
    """What a training tells its feeder: all that it will read, in the order in which it reads each shard next."""

    shards: list[int]  # none: training is done
    now: int = 0  # so many of the first are made if they are not there
    room: int = 0  # so many may be there, those included that are being made

    @property
    def soon(self) -> list[int]:
        return self.shards[: self.now]

    def next(self, held: set[int], making: set[int]) -> tuple[set[int], int | None]:
        """What goes, and what is made next if there is room. What training reads last, or never again, goes first
        (Belady's rule: no other has to make fewer).
        """
        lacking = next((index for index in self.soon if index not in held | making), None)
        place = {index: at for at, index in enumerate(self.shards)}
        spare = sorted(held.difference(self.soon), key=lambda index: place.get(index, len(place)), reverse=True)
        over = len(held | making) + (lacking is not None) - self.room
        return set(spare[: max(over, 0)]), lacking if over <= len(spare) else None


def write_wanted(recipe: Recipe, wanted: Wanted) -> None:
    write_sealed(wanted_file(recipe), asdict(wanted))


def read_wanted(recipe: Recipe) -> Wanted | None:
    """What `write_wanted` wrote; None before it did."""
    path = wanted_file(recipe)
    return Wanted(**read_sealed(path, "Remove it, and run again")) if path.exists() else None


def feature_spec(recipe: Recipe) -> FeatureSpec:
    """What the shards of this recipe declare: the dump writes it, training expects it."""
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
                f"features.auxiliary_layers={layers} lacks {lacking}, which draft.{name} wants: name them, too, or "
                "leave the key out"
            )
    most = most_positions(config)
    if recipe.data.max_length > most < config.max_position_embeddings:
        raise PipelineError(
            f"data.max_length={recipe.data.max_length}: with more than {most} tokens in a batch "
            f"{recipe.target.model!r} turns all its positions otherwise (longrope), shorter dialogues' as well; set it "
            f"to {most} or less"
        )
    states, target = identity_of(recipe.target, layers), identify(recipe.target)
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
    """Return which settings of a dump are others than the recipe's, with both values. Empty where the dump is the
    recipe's, or holds more auxiliary layers and differs in nothing else: which layers it was asked for says its
    recipe, that `find` gives, and its hash proves that.

    `target_layers`: of the target, where that is here.
    """
    if got.recipe == dump_hash(recipe):
        return ""
    if recipe.features.dump:
        return f"features.dump: {got.recipe} -> {recipe.features.dump}"
    found = find()
    layers = found.layers if found else None
    if layers is None or dump_hash_with(recipe, layers) != got.recipe:
        return settings_said(found, recipe, dump_keys(recipe))
    wanted = recipe.auxiliary_layers(target_layers) if target_layers else wanted_layers(recipe)
    more = set(wanted) <= set(got.auxiliary_numbers)
    return "" if more else f"features.auxiliary_layers: {got.auxiliary_numbers} -> {wanted}"


def require_dump_of(recipe: Recipe, got: FeatureSpec, find: Find, where: object) -> FeatureSpec:
    """Return the spec by which this recipe reads a dump, which may hold more auxiliary layers. Raises PipelineError
    that names what the dump has otherwise.
    """
    expected = replace(feature_spec(recipe), recipe=got.recipe)
    require_readable(got, expected, where)
    if said := dump_differences(recipe, got, find, load_config(recipe.target).num_hidden_layers):
        raise PipelineError(
            f"{where}: features of other data or feature settings: {said}. Use the recipe they were dumped with, or "
            "dump again into another output folder"
        )
    return expected


def readable_spec(recipe: Recipe) -> FeatureSpec:
    """Return the spec by which this recipe reads its dump, in its store or its folder; where none is in its folder, the
    spec of one to come. Raises PipelineError as `require_dump_of` does.
    """
    folder, store = recipe.paths.features, store_of(recipe)
    if store is None and not (folder / MANIFEST).exists():
        return feature_spec(recipe)
    if store is None:
        return require_dump_of(recipe, Manifest.load(folder).spec, partial(recorded, folder), folder)
    return require_dump_of(recipe, store.manifest().spec, partial(recorded_in_store, store), store.name)


def recorded_in_store(store: Store) -> Recorded | None:
    """Return the recipe beside the features of a store; None where there is none that can be read."""
    with suppress(PipelineError):
        return recorded_in(store.read(RECIPE))
    return None


def answers_hash(recipe: Recipe, dump: str, target: TargetIdentity | None = None) -> str:
    """What the target's answers to calibration prompts depend on in the dump of this hash, the tokens that end them
    included. `target`: what it is, where that is known.
    """
    return digest([calibration_hash(recipe, dump), (target or identify(recipe.target)).stop_ids])


def of_another_target(target: TargetIdentity, spec: FeatureSpec) -> list[str]:
    """What the target has otherwise than when the features of this spec were dumped from it."""
    then = {"fingerprint": spec.target, "tokenizer": spec.tokenizer, "template": spec.template}
    stop_ids = {"stop_ids": [int(token) for token in spec.stop_ids.split()]} if spec.stop_ids else {}
    return target.differences(then | stop_ids)


def store_of(recipe: Recipe, reader: Path | None = None) -> Store | None:
    """The recipe's; without one, the run's own folder is a store for a `reader` in another folder."""
    if recipe.features.store:
        return Store(recipe.features.store)
    own = recipe.paths.features.resolve()
    return Store(own.as_uri(), name=str(recipe.paths.features)) if reader and reader.resolve() != own else None


def fetch(
    recipe: Recipe, expected: FeatureSpec | None = None, checksums: bool = True, folder: Path | None = None
) -> None:
    """Brings the recipe's features, but for those that come and go, to `folder`, by default the run's own, from its
    store, or else from the run's own folder to another one. What is there already is kept.

    Any number of a node's processes may call it at once: one fetches, the others wait. `expected` is compared before
    anything is fetched; without `checksums` damaged shards come unnoticed, for `verify` to find. Raises PipelineError,
    also for a dump that is not finished, and for another folder that holds another dump.
    """
    folder = folder or recipe.paths.features
    elsewhere, store = folder.resolve() != recipe.paths.features.resolve(), store_of(recipe, folder)
    if store is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    with fetching(folder):
        for leftover in folder.glob(".*.tmp") if elsewhere else ():  # of ranks that were killed
            leftover.unlink()
        held = _held_copies(folder, expected) if elsewhere else _held(folder)
        manifest = store.manifest()
        if expected is not None:
            require_readable(manifest.spec, expected, store.name)
        manifest.require_complete(store.name)
        wanted = [  # not there, of another size, or dumped anew since
            record
            for record in manifest.lasting(recipe.features.keep)
            if held.get(record.name, record.sha256) != record.sha256 or damage(folder, record, digest=None)
        ]
        with Progress("fetch", len(wanted), "shards", quiet=not wanted) as progress:
            for record in wanted:
                store.get(record.name, folder, record.sha256 if checksums else None)
                progress.advance(1)
        if not elsewhere:  # what evaluation and `verify` read
            store.get(HELDOUT_PROMPTS, folder, manifest.prompts_sha256 if checksums else None)
            store.get(RECIPE, folder)
        if elsewhere or recipe.features.keep == "all" or not (folder / MANIFEST).exists():
            manifest.save(folder)  # else it names what a feeder makes, too


def fetching(folder: Path) -> FileLock:
    """Held by the one process of a node that fetches; the others wait."""
    return FileLock(folder / ".fetch.lock")


def _held(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file of a folder's manifest; of none where that is not there or is about to be written."""
    with suppress(PipelineError):
        return {record.name: record.sha256 for record in Manifest.load(folder).files}
    return {}


def _held_copies(folder: Path, expected: FeatureSpec | None) -> dict[str, str]:
    """The same of copies. Raises PipelineError where they are of another dump, or nobody knows: none is replaced."""
    if not (folder / MANIFEST).exists():
        return {}
    try:
        manifest = Manifest.load(folder)
    except PipelineError:
        raise PipelineError(
            f"train.shards {folder}: its {MANIFEST} is damaged, or of another version of this project. Remove that "
            "folder if it holds copies only, and run again: the features are brought anew; else name another"
        ) from None
    if expected is not None:
        require_readable(manifest.spec, expected, folder)
    return {record.name: record.sha256 for record in manifest.files}


def heldout_prompts(recipe: Recipe) -> Path:
    """The held-out prompts, for evaluation; of a dump in a store only these are fetched. Where there are none the path
    does not exist; where they are not those of the dump, raises PipelineError.
    """
    store, path = store_of(recipe), recipe.paths.features / HELDOUT_PROMPTS
    if store is not None:
        store.get(HELDOUT_PROMPTS, recipe.paths.features, store.manifest().prompts_sha256)
    elif path.exists() and (reason := prompts_damage(recipe.paths.features, Manifest.load(recipe.paths.features))):
        raise PipelineError(f"{path}: {reason}. Run the dump again: it writes this file anew and keeps the shards")
    return path
