"""The dump job: has the planned shards written and keeps the manifest, the only truth about what is finished.

The plan's texts go into tables, one a split, as the plan is made. They replace those of an earlier run only after the
plan and the shards account for every record. A shard of the manifest that is whole on disk is not written again; it is
read back to see that, once as long as it does not change. Where the recipe names a store, "on disk" means there, and
whole means its size: reading it all back is `verify`'s business.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext, suppress
from fnmatch import fnmatch
from functools import partial
from operator import attrgetter
from pathlib import Path

import pyarrow as pa

from pipeline.artifacts.features import (
    Find,
    answers_hash,
    feature_spec,
    recorded_in_store,
    require_dump_of,
    store_of,
)
from pipeline.artifacts.provenance import PROVENANCE, RECIPE, recorded, write_own_recipe, write_provenance
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import exclusive, sha256, write_text
from pipeline.basics.progress import Progress
from pipeline.features.engines.vllm import python_of, version_of
from pipeline.features.schema import FeatureSpec, text_schema
from pipeline.features.shards import (
    ANSWERS,
    FILES,
    HELDOUT_PROMPTS,
    MANIFEST,
    SPLITS,
    Manifest,
    Record,
    ShardRecord,
    damage,
    damages,
    prompts_damage,
    shard_name,
    text_name,
)
from pipeline.features.store import Store
from pipeline.features.text import arrow_file, record_of, text_batch
from pipeline.lm.model import load_tokenizer
from pipeline.recipe.identity import dump_hash
from pipeline.recipe.recipe import Recipe
from pipeline.running.crew import Heartbeat
from preprocess.dump.compare import sampled
from preprocess.dump.plan import Plan
from preprocess.dump.pool import records
from preprocess.dump.report import REJECTED, describe_groups, examples, report_lines, suffix, write_rejected
from preprocess.dump.task import ShardTask
from preprocess.dump.worker import FeatureWorker
from preprocess.sources.sizes import require_sizes

SAVING_SHARE = 20  # the manifest is saved again after so many times what saving it took


def dump(recipe: Recipe) -> list[str]:
    """Runs or continues the dump; returns the lines of its report. Raises PipelineError."""
    folder = recipe.paths.features
    require_lasting(folder)
    with exclusive(folder, "dump"):
        store = store_of(recipe)
        manifest = _resume(recipe, folder, store)
        if recipe.features.keep == "all" and manifest.fed:
            manifest.complete = False
        if recipe.features.dump and not manifest.complete:
            raise PipelineError(
                f"{recipe.features.store} is somebody's dump (features.dump={recipe.features.dump!r}): nothing can be "
                "added to it, and it is not whole, or holds answers of other lengths, to other calibration prompts, or "
                "of a target that ended them at other tokens: set data.calibration_prompts and features.answer_tokens "
                "as its card says, and take the target's generation_config.json as it was"
            )
        if not manifest.complete and manifest.spec.recipe != dump_hash(recipe):
            raise PipelineError(
                f"{folder} holds the auxiliary layers of another recipe ({manifest.spec.auxiliary_layers}), and is not "
                "whole, or its answers to calibration prompts are others: go on with that recipe, or dump into another "
                "output folder"
            )
        if not manifest.complete:
            require_sizes(recipe)
            _run(recipe, folder, manifest, store)
        return report_lines(recipe, manifest)


def require_lasting(folder: Path) -> None:
    """A Ray job runs in a copy of the working directory that goes with the job: relative outputs would be lost."""
    if "runtime_resources" in str(Path.cwd()) and not folder.is_absolute():
        raise PipelineError(
            f"output {str(folder.parent)!r} is relative, but a Ray job runs in a temporary copy of the checkout. "
            "Give a folder that all nodes see and that lasts: --set output=/shared/runs/NAME"
        )


def _resume(recipe: Recipe, folder: Path, store: Store | None) -> Manifest:
    """What an earlier run left; answers to other calibration prompts, or of other lengths, are not taken over."""
    sizes = {} if store is None else store.sizes()
    manifest = Manifest.load(folder) if (folder / MANIFEST).exists() else Manifest(feature_spec(recipe))
    require_its_own(recipe, manifest.spec, partial(recorded, folder), folder)
    if store is not None and MANIFEST in sizes:
        manifest = store.manifest()
        require_its_own(recipe, manifest.spec, partial(recorded_in_store, store), store.name)
        if manifest.complete and HELDOUT_PROMPTS in sizes:
            store.get(HELDOUT_PROMPTS, folder)
        manifest.save(folder)
    answers = answers_hash(recipe, manifest.spec.recipe)
    if manifest.answers_hash != answers:
        manifest.answers, manifest.answers_hash, manifest.complete = [], answers, False
    lost = _lost(folder, manifest, store, sizes)
    published = store is None or MANIFEST in sizes
    if lost or prompts_damage(folder, manifest) or not published:
        manifest.complete = False  # saved with the first shard that is written again
    if not manifest.complete:
        manifest.text = {}  # written with the plan, which is made again
    for shards in (manifest.shards, manifest.answers):
        shards[:] = [shard for shard in shards if not {file.name for file in shard.files} & lost]
    return manifest


def require_its_own(recipe: Recipe, got: FeatureSpec, find: Find, where: object) -> None:
    """Raise PipelineError where features are not the recipe's, or of another engine. `find` gives their recipe."""
    spec = require_dump_of(recipe, got, find, where)
    made, here = ((one.engine, one.engine != "transformers" and one.engine_version) for one in (got, spec))
    if made != here:
        raise PipelineError(
            f"{where}: its states were computed by {got.engine} {got.engine_version}, this run has {spec.engine} "
            f"{spec.engine_version}: one dump has one engine. Go on with that one, or dump into another output folder"
        )


def _lost(folder: Path, manifest: Manifest, store: Store | None, sizes: dict[str, int]) -> set[str]:
    """The tables and shards of the manifest that are not whole, there or here."""
    files, lost = manifest.files, set()
    with Progress("verify shards", len(files), "files", quiet=not files) as progress:
        if store is None:
            whole = (reason is None for reason in damages(folder, files))
        else:
            whole = (_is_stored(folder, record, store, sizes) for record in files)
        for record, is_whole in zip(files, whole, strict=True):
            if not is_whole:
                lost.add(record.name)
            progress.advance(1)
    return lost


def _is_stored(folder: Path, record: Record, store: Store, sizes: dict[str, int]) -> bool:
    """Of a dump that is to go to a store, what lies whole on disk from before is sent off."""
    if sizes.get(record.name) == record.bytes:
        return True
    if damage(folder, record) is not None:
        return False
    _move(folder / record.name, store)
    return True


def _move(path: Path, store: Store) -> None:
    store.put(path)
    path.unlink()


class _Ledger:
    """Keeps the manifest on disk, and in the store. The more it costs, the rarer: it grows with every shard.

    What is finished when an error leaves its block is kept, too.
    """

    def __init__(self, manifest: Manifest, folder: Path, store: Store | None):
        self._manifest, self._folder, self._store = manifest, folder, store
        self._due, self._behind = 0.0, False

    def __enter__(self) -> "_Ledger":
        return self

    def __exit__(self, _kind, error: BaseException | None, _trace) -> None:
        if self._behind:
            with suppress(PipelineError) if error else nullcontext():  # the first error is the one to tell
                self.save()

    def add(self, record: ShardRecord) -> None:
        (self._manifest.answers if record.split == ANSWERS else self._manifest.shards).append(record)
        self._behind = True
        if time.monotonic() >= self._due:
            self.save()

    def save(self) -> None:
        begin = time.monotonic()
        self._manifest.save(self._folder)
        self.publish(MANIFEST)
        self._behind, self._due = False, time.monotonic() + SAVING_SHARE * (time.monotonic() - begin)

    def publish(self, name: str) -> None:
        if self._store is not None:
            self._store.put(self._folder / name)


def _run(recipe: Recipe, folder: Path, manifest: Manifest, store: Store | None) -> None:
    plan, ledger = Plan(recipe, load_tokenizer(recipe.target)), _Ledger(manifest, folder, store)
    write_provenance(folder, recipe)
    write_own_recipe(folder, recipe)
    make, sets = worker_of(recipe, folder, manifest.spec), _sets(recipe)
    if manifest.fed and "train" not in sets:  # those that an earlier dump kept stay
        manifest.shards = manifest.of("validation")
    done = sum(manifest.total(name, "tokens") for name in sets)
    with Progress("dump", 0, "tokens", start=done) as progress, ledger, ExitStack() as stack:
        tables = {
            split: stack.enter_context(arrow_file(folder / text_name(split), text_schema(manifest.spec)))
            for split in (SPLITS if recipe.data.answers == "source" else ())  # else the shards bring the texts
        }
        tasks = _tasks(recipe, plan, manifest, tables, progress)
        for record in records(recipe, make, tasks, "features.batch_tokens", progress, attrgetter("tokens")):
            ledger.add(record)
        _require_accounted(recipe, plan, manifest)  # an error leaves the tables of before
    manifest.text = {split: record_of(folder / text_name(split)) for split in tables}
    rejected = [*plan.rejected, *(pair for shard in manifest.shards for pair in shard.rejected.items())]
    write_rejected(folder, rejected)
    if store is not None:
        for record in manifest.text.values():
            _move(folder / record.name, store)
    prompts = [json.dumps(prompt, ensure_ascii=False) for prompt in plan.prompts]
    write_text(folder / HELDOUT_PROMPTS, "".join(f"{line}\n" for line in prompts))
    sweep(folder, manifest, store)
    for name in (REJECTED, HELDOUT_PROMPTS, RECIPE, PROVENANCE):
        ledger.publish(name)
    manifest.complete, manifest.prompts_sha256 = True, sha256(folder / HELDOUT_PROMPTS)
    manifest.fed = "train" not in sets and manifest.lacks("train") > 0  # else an earlier dump kept all
    ledger.save()


def _sets(recipe: Recipe) -> tuple[str, ...]:
    """Those whose shards the dump writes; training's states are made while it reads them where none are kept."""
    return (*SPLITS, ANSWERS) if recipe.features.keep == "all" else ("validation", ANSWERS)


def worker_of(recipe: Recipe, folder: Path, spec: FeatureSpec) -> Callable[[Heartbeat], FeatureWorker]:
    """What makes a worker, wherever it is to work. Raises PipelineError where no engine gives states."""
    sample = None
    if recipe.target.engine == "server":
        raise PipelineError(
            "target.engine='server' gives answers, no hidden states: dump with target.engine='vllm' or 'transformers'"
        )
    if recipe.target.engine != "transformers":
        version_of(python_of(recipe.target))
        sample = sampled(recipe.target, spec.auxiliary_numbers)
    return partial(FeatureWorker, recipe, folder.resolve(), spec, sample=sample)


def sweep(folder: Path, manifest: Manifest, store: Store | None) -> None:
    """Removes tables and shards that the manifest does not name: of an earlier plan, or of a feeder that was killed."""
    known = {record.name for record in manifest.files}
    for name in store.sizes().keys() - known if store is not None else ():
        if any(fnmatch(name, pattern) for pattern in FILES):
            store.delete(name)
    for path in (path for pattern in FILES for path in folder.glob(pattern)):
        if path.name not in known:
            path.unlink()


def _require_accounted(recipe: Recipe, plan: Plan, manifest: Manifest) -> None:
    """Sets the manifest's accounting. Raises PipelineError where records are unaccounted for or a split has no rows."""
    shards = manifest.shards
    if "train" not in _sets(recipe):  # a feeder refuses texts that would be rejected
        rest = plan.accepted["train"] - sum(shard.rows + len(shard.rejected) for shard in manifest.of("train"))
        shards = [*shards, ShardRecord("", "train", 0, rest, plan.tokens["train"], 0, 0, "")]
    manifest.accounting = plan.accounting(shards)
    if not any(shard.rows for shard in shards if shard.split == "train"):
        raise PipelineError(
            f"data.source {recipe.data.source} holds no usable dialogue: {plan.records} "
            f"records, rejected {manifest.accounting['rejected']}, skipped {manifest.accounting['skipped']}"
            f"{suffix(examples(manifest.accounting))}{suffix([describe_groups(manifest)])}"
        )
    if manifest.total("validation", "rows") == 0:
        raise PipelineError(
            f"data.heldout_fraction={recipe.data.heldout_fraction} holds out none of {plan.records} records"
            f"{f' ({grouped}, which stay together)' if (grouped := describe_groups(manifest)) else ''}: "
            "raise it, or say with data.group what belongs together ('id': nothing does)"
        )


def _tasks(
    recipe: Recipe, plan: Plan, manifest: Manifest, tables: dict[str, pa.ipc.RecordBatchFileWriter], progress: Progress
) -> Iterator[ShardTask]:
    """Those whose shards are not finished. Every dialogue of the plan goes into its table, which is so written anew
    by every run: the same bytes as long as the source and the settings are the same. The target's own answers are no
    texts yet.
    """
    finished = {record.name: record for record in (*manifest.shards, *manifest.answers)}
    for task in plan.tasks():
        progress.expect(plan.expected_tokens)
        if task.split in tables:
            tables[task.split].write_batch(text_batch(task.in_order, manifest.spec))
        name = shard_name(task.split, task.index)
        if task.split in _sets(recipe) and not task.is_done(finished.get(name), recipe):
            yield task
