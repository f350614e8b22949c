"""The dump job: it lets workers write the planned shards and keeps the manifest, the only record of finished ones.

The plan's texts go into tables, one a split, as the plan is made. They replace those of an earlier run only after the
plan and the shards account for every record. A shard of the manifest that is intact on disk is not written again; it is
read in full for that check, once as long as it does not change. Where the recipe names a store, "on disk" means in the
store, and only the size is checked: `verify` reads it in full.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext, suppress
from fnmatch import fnmatch
from functools import partial
from operator import attrgetter
from pathlib import Path

from pipeline.artifacts.features import (
    Find,
    answers_hash,
    feature_spec,
    open_store,
    recorded_in_store,
    require_dump_of,
)
from pipeline.artifacts.provenance import PROVENANCE, RECIPE, read_recorded, write_own_recipe, write_provenance
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import lock_folder, sha256, write_text
from pipeline.basics.progress import Progress
from pipeline.features.engines.vllm import python_of, require_version
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
    find_all_damage,
    find_damage,
    find_prompts_damage,
    shard_name,
    text_name,
)
from pipeline.features.store import Store
from pipeline.features.text import ArrowFile, arrow_file, make_record, text_batch
from pipeline.lm.model import load_tokenizer
from pipeline.recipe.identity import dump_hash
from pipeline.recipe.recipe import Recipe
from pipeline.running.crew import Heartbeat
from preprocess.dump.compare import compute_sample
from preprocess.dump.plan import DumpPlan
from preprocess.dump.pool import run_tasks
from preprocess.dump.report import (
    REJECTED,
    describe_examples,
    describe_groups,
    join_suffix,
    report_lines,
    write_rejected,
)
from preprocess.dump.task import ShardTask
from preprocess.dump.worker import FeatureWorker
from preprocess.sources.sizes import require_sizes

SAVING_SHARE = 20  # the manifest is saved again after this multiple of the time that saving took


def dump(recipe: Recipe) -> list[str]:
    """Run or continue the dump; return the lines of its report. Raise PipelineError."""
    folder = recipe.paths.features
    require_permanent_output(folder)
    with lock_folder(folder, "dump"):
        store = open_store(recipe)
        manifest = _resume(recipe, folder, store)
        if recipe.features.keep == "all" and manifest.fed:
            manifest.complete = False
        if recipe.features.dump and not manifest.complete:
            raise PipelineError(
                f"{recipe.features.store} is only read (features.dump={recipe.features.dump!r}), and it is incomplete, "
                "or its answers have other lengths, other calibration prompts or other stop tokens. Set "
                "data.calibration_prompts and features.answer_tokens as on its card, and restore the target's "
                "generation_config.json"
            )
        if not manifest.complete and manifest.spec.recipe != dump_hash(recipe):
            raise PipelineError(
                f"{folder} holds the auxiliary layers of another recipe ({manifest.spec.auxiliary_layers}), and is not "
                "whole, or its answers belong to other calibration prompts. Continue with that recipe, or dump into "
                "another output folder"
            )
        if not manifest.complete:
            require_sizes(recipe)
            _run(recipe, folder, manifest, store)
        return report_lines(recipe, manifest)


def require_permanent_output(folder: Path) -> None:
    """Raise PipelineError for a relative output in a Ray job: it would be lost with the job's copy of the checkout."""
    if "runtime_resources" in str(Path.cwd()) and not folder.is_absolute():
        raise PipelineError(
            f"output {str(folder.parent)!r} is relative, but a Ray job runs in a temporary copy of the checkout. "
            "Give a folder that all nodes see and that lasts: --set output=/shared/runs/NAME"
        )


def _resume(recipe: Recipe, folder: Path, store: Store | None) -> Manifest:
    """Return the manifest of an earlier run, or a new one, without damaged files. Answers to other calibration prompts,
    or of other lengths, are not reused.
    """
    sizes = {} if store is None else store.sizes()
    manifest = Manifest.load(folder) if (folder / MANIFEST).exists() else Manifest(feature_spec(recipe))
    require_same_dump(recipe, manifest.spec, partial(read_recorded, folder), folder)
    if store is not None and MANIFEST in sizes:
        manifest = store.manifest()
        require_same_dump(recipe, manifest.spec, partial(recorded_in_store, store), store.name)
        if manifest.complete and HELDOUT_PROMPTS in sizes:
            store.get(HELDOUT_PROMPTS, folder)
        manifest.save(folder)
    answers = answers_hash(recipe, manifest.spec.recipe)
    if manifest.answers_hash != answers:
        manifest.answers, manifest.answers_hash, manifest.complete = [], answers, False
    damaged = _find_damaged(folder, manifest, store, sizes)
    published = store is None or MANIFEST in sizes
    if damaged or find_prompts_damage(folder, manifest) or not published:
        manifest.complete = False  # saved with the first shard that is written again
    if not manifest.complete:
        manifest.text = {}  # written with the plan, which is made again
    for shards in (manifest.shards, manifest.answers):
        shards[:] = [shard for shard in shards if not {file.name for file in shard.files} & damaged]
    return manifest


def require_same_dump(recipe: Recipe, stored_spec: FeatureSpec, find: Find, where: object) -> None:
    """Raise PipelineError for features of another recipe or engine. `find` returns their recipe."""
    spec = require_dump_of(recipe, stored_spec, find, where)
    dumped, current = (
        (features.engine, features.engine != "transformers" and features.engine_version)
        for features in (stored_spec, spec)
    )
    if dumped != current:
        raise PipelineError(
            f"{where}: its states were computed by {stored_spec.engine} {stored_spec.engine_version}, this run has "
            f"{spec.engine} {spec.engine_version}, and a dump has one engine. Continue with that one, or dump into "
            "another folder"
        )


def _find_damaged(folder: Path, manifest: Manifest, store: Store | None, sizes: dict[str, int]) -> set[str]:
    """Return the names of the manifest's tables and shards that are damaged or missing, in the store or on disk."""
    files, damaged = manifest.files, set()
    with Progress("verify shards", len(files), "files", quiet=not files) as progress:
        if store is None:
            intact = (reason is None for reason in find_all_damage(folder, files))
        else:
            intact = (_is_stored(folder, record, store, sizes) for record in files)
        for record, is_intact in zip(files, intact, strict=True):
            if not is_intact:
                damaged.add(record.name)
            progress.advance(1)
    return damaged


def _is_stored(folder: Path, record: Record, store: Store, sizes: dict[str, int]) -> bool:
    """Return whether the store has the file. A file that an earlier run left intact on disk is moved there."""
    if sizes.get(record.name) == record.bytes:
        return True
    if find_damage(folder, record) is not None:
        return False
    _move_to_store(folder / record.name, store)
    return True


def _move_to_store(path: Path, store: Store) -> None:
    store.put(path)
    path.unlink()


class _ManifestWriter:
    """A context manager that keeps the manifest on disk, and in the store. The longer saving takes, the rarer it is:
    the manifest grows with every shard.

    Shards that are finished when an error leaves the block are saved, too.
    """

    def __init__(self, manifest: Manifest, folder: Path, store: Store | None):
        self._manifest, self._folder, self._store = manifest, folder, store
        self._next_save, self._is_unsaved = 0.0, False

    def __enter__(self) -> "_ManifestWriter":
        return self

    def __exit__(self, _kind, error: BaseException | None, _trace) -> None:
        if self._is_unsaved:
            with suppress(PipelineError) if error else nullcontext():  # the first error is reported
                self.save()

    def add(self, record: ShardRecord) -> None:
        (self._manifest.answers if record.split == ANSWERS else self._manifest.shards).append(record)
        self._is_unsaved = True
        if time.monotonic() >= self._next_save:
            self.save()

    def save(self) -> None:
        begin = time.monotonic()
        self._manifest.save(self._folder)
        self.publish(MANIFEST)
        self._is_unsaved, self._next_save = False, time.monotonic() + SAVING_SHARE * (time.monotonic() - begin)

    def publish(self, name: str) -> None:
        if self._store is not None:
            self._store.put(self._folder / name)


def _run(recipe: Recipe, folder: Path, manifest: Manifest, store: Store | None) -> None:
    plan, writer = DumpPlan(recipe, load_tokenizer(recipe.target)), _ManifestWriter(manifest, folder, store)
    write_provenance(folder, recipe)
    write_own_recipe(folder, recipe)
    factory, sets = worker_factory(recipe, folder, manifest.spec), _sets_to_store(recipe)
    if manifest.fed and "train" not in sets:  # a feeder made the train shards; those of a dump that kept all stay
        manifest.shards = manifest.shards_of("validation")
    done = sum(manifest.total(name, "tokens") for name in sets)
    with Progress("dump", 0, "tokens", start=done) as progress, writer, ExitStack() as stack:
        tables = {
            split: stack.enter_context(arrow_file(folder / text_name(split), text_schema(manifest.spec)))
            for split in (SPLITS if recipe.data.answers == "source" else ())  # else the shards come with their texts
        }
        tasks = _tasks(recipe, plan, manifest, tables, progress)
        for record in run_tasks(recipe, factory, tasks, "features.batch_tokens", progress, attrgetter("tokens")):
            writer.add(record)
        _require_accounted(recipe, plan, manifest)  # an error leaves the earlier tables in place
    manifest.text = {split: make_record(folder / text_name(split), file) for split, file in tables.items()}
    rejected = [*plan.rejected, *(pair for shard in manifest.shards for pair in shard.rejected.items())]
    write_rejected(folder, rejected)
    if store is not None:
        for record in manifest.text.values():
            _move_to_store(folder / record.name, store)
    prompts = [json.dumps(prompt, ensure_ascii=False) for prompt in plan.prompts]
    write_text(folder / HELDOUT_PROMPTS, "".join(f"{line}\n" for line in prompts))
    remove_unlisted(folder, manifest, store)
    for name in (REJECTED, HELDOUT_PROMPTS, RECIPE, PROVENANCE):
        writer.publish(name)
    manifest.complete, manifest.prompts_sha256 = True, sha256(folder / HELDOUT_PROMPTS)
    manifest.fed = "train" not in sets and manifest.missing_rows("train") > 0  # False where an earlier dump kept all
    writer.save()


def _sets_to_store(recipe: Recipe) -> tuple[str, ...]:
    """Return the sets whose shards the dump writes. Where states are not kept, those for training are made while it
    reads them.
    """
    return (*SPLITS, ANSWERS) if recipe.features.keep == "all" else ("validation", ANSWERS)


def worker_factory(recipe: Recipe, folder: Path, spec: FeatureSpec) -> Callable[[Heartbeat], FeatureWorker]:
    """Return a function that makes a worker on any node. Raise PipelineError where no engine gives states."""
    sample = None
    if recipe.target.engine == "server":
        raise PipelineError(
            "target.engine='server' gives answers, no hidden states: dump with target.engine='vllm' or 'transformers'"
        )
    if recipe.target.engine != "transformers":
        require_version(python_of(recipe.target))
        sample = compute_sample(recipe.target, spec.auxiliary_numbers)
    return partial(FeatureWorker, recipe, folder.resolve(), spec, sample=sample)


def remove_unlisted(folder: Path, manifest: Manifest, store: Store | None) -> None:
    """Remove tables and shards that the manifest does not list: of an earlier plan, or of a feeder that was killed."""
    listed = {record.name for record in manifest.files}
    for name in store.sizes().keys() - listed if store is not None else ():
        if any(fnmatch(name, pattern) for pattern in FILES):
            store.delete(name)
    for path in (path for pattern in FILES for path in folder.glob(pattern)):
        if path.name not in listed:
            path.unlink()


def _require_accounted(recipe: Recipe, plan: DumpPlan, manifest: Manifest) -> None:
    """Set the manifest's accounting. Raise PipelineError where records are unaccounted for or a split has no rows."""
    shards = manifest.shards
    if "train" not in _sets_to_store(recipe):  # the feeder raises an error for rejected texts
        remaining_rows = plan.accepted["train"] - sum(
            shard.rows + len(shard.rejected) for shard in manifest.shards_of("train")
        )
        shards = [*shards, ShardRecord("", "train", 0, remaining_rows, plan.tokens["train"], 0, 0, "")]
    manifest.accounting = plan.accounting(shards)
    if not any(shard.rows for shard in shards if shard.split == "train"):
        raise PipelineError(
            f"data.source {recipe.data.source} holds no usable dialogue: {plan.records} "
            f"records, rejected {manifest.accounting['rejected']}, skipped {manifest.accounting['skipped']}"
            f"{join_suffix(describe_examples(manifest.accounting))}{join_suffix([describe_groups(manifest)])}"
        )
    if manifest.total("validation", "rows") == 0:
        raise PipelineError(
            f"data.heldout_fraction={recipe.data.heldout_fraction} holds out none of {plan.records} records"
            f"{f' ({grouped}, which stay together)' if (grouped := describe_groups(manifest)) else ''}: "
            "raise it, or name in data.group the records that belong together ('id': each is alone)"
        )


def _tasks(
    recipe: Recipe,
    plan: DumpPlan,
    manifest: Manifest,
    tables: dict[str, ArrowFile],
    progress: Progress,
) -> Iterator[ShardTask]:
    """Yield the tasks whose shards are not finished. Every dialogue of the plan goes into its table, so every run
    writes the table again: the same bytes as long as the source and the settings are the same. Dialogues that the
    target is to answer are in no table yet.
    """
    finished = {record.name: record for record in (*manifest.shards, *manifest.answers)}
    for task in plan.tasks():
        progress.expect(plan.expected_tokens)
        if task.split in tables:
            tables[task.split].batches.write_batch(text_batch(task.in_order, manifest.spec))
        name = shard_name(task.split, task.index)
        if task.split in _sets_to_store(recipe) and not task.is_done(finished.get(name), recipe):
            yield task
