"""The dump job: plans shards from the stream of dialogues, has Ray actors write them, keeps the manifest.

The only file of this stage that imports Ray. Shard k holds the k-th group of accepted dialogues, in the order of the
source, so a plan is the same on every run; a shard of the manifest that is whole on disk is not planned again.
"""

import json
import logging
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import ray
from filelock import FileLock, Timeout

from pipeline import chat
from pipeline.errors import PipelineError
from pipeline.features.schema import FeatureSpec, require_same
from pipeline.features.shards import MANIFEST, Manifest, ShardRecord, damage
from pipeline.files import write_text
from pipeline.progress import Progress
from pipeline.provenance import ROOT, write_provenance
from pipeline.recipe import FeaturesConfig, Recipe
from pipeline.target import feature_spec, load_tokenizer
from preprocess.sharegpt import Tail, clean, held_out, read_records, record_id
from preprocess.worker import Document, FeatureWorker, ShardTask

HELDOUT_PROMPTS, REJECTED = "heldout_prompts.jsonl", "rejected.jsonl"


@dataclass
class Plan:
    """Reads the source once, yields shard tasks, and accounts for every record."""

    recipe: Recipe
    tokenizer: object
    records: int = 0
    edits: Counter = field(default_factory=Counter)
    skipped: Counter = field(default_factory=Counter)
    rejected: list[tuple[str, str]] = field(default_factory=list)  # (document id, reason)
    accepted: Counter = field(default_factory=Counter)  # by split
    prompts: list[dict] = field(default_factory=list)
    tail: Tail = field(default_factory=Tail)
    _open: dict[str, list[Document]] = field(default_factory=lambda: {"train": [], "validation": []})
    _indices: Counter = field(default_factory=Counter)
    _train_tokens: int = 0
    _seen: set[str] = field(default_factory=set)

    def tasks(self) -> Iterator[ShardTask]:
        for record in read_records(self.recipe.data.source, self.tail):
            self.records += 1
            try:
                placed = self._place(record)
            except chat.Unusable as reason:
                self.rejected.append((record_id(record), str(reason)))
                continue
            if placed and len(self._open[placed]) == self.recipe.features.rows_per_shard:
                yield self._close(placed)
        for split, documents in self._open.items():
            if documents:
                yield self._close(split)

    def _place(self, record) -> str | None:
        """Adds the record to its split's open shard, or counts it as skipped. Raises chat.Unusable."""
        data = self.recipe.data
        dialogue = clean(record)
        if dialogue.doc_id in self._seen:
            raise chat.Unusable("duplicate")
        self._seen.add(dialogue.doc_id)
        split = "validation" if held_out(dialogue.doc_id, data.heldout_fraction) else "train"
        if split == "validation":
            self._offer_prompt(dialogue)
        if self._full(split):
            self.skipped[f"{split} is full"] += 1
            return None
        encoded = chat.encode(self.tokenizer, dialogue.messages, data.max_length)
        self._open[split].append(Document(dialogue.doc_id, encoded.input_ids, encoded.loss_mask))
        self.accepted[split] += 1
        self.edits.update(dialogue.edits)
        if split == "train":
            self._train_tokens += len(encoded.input_ids)
        return split

    def _full(self, split: str) -> bool:
        data = self.recipe.data
        if split == "validation":
            return self.accepted[split] >= data.validation_dialogues
        tokens = data.max_tokens is not None and self._train_tokens >= data.max_tokens
        return tokens or (data.max_dialogues is not None and self.accepted[split] >= data.max_dialogues)

    def _offer_prompt(self, dialogue) -> None:
        """The first question of a held-out dialogue becomes an evaluation prompt, as long as some are wanted."""
        if len(self.prompts) == self.recipe.data.heldout_prompts:
            return
        question = next(message["content"] for message in dialogue.messages if message["role"] == "user")
        length = len(chat.prompt_ids(self.tokenizer, [{"role": "user", "content": question}]))
        if length <= self.recipe.data.max_length:
            self.prompts.append({"question_id": dialogue.doc_id, "category": "sharegpt", "turns": [question]})

    def _close(self, split: str) -> ShardTask:
        task = ShardTask(split, self._indices[split], self._open[split])
        self._indices[split] += 1
        self._open[split] = []
        return task

    def accounting(self, shards: list[ShardRecord]) -> dict:
        """Counts by fate: records = accepted + rejected + skipped, exactly."""
        late = [(doc_id, reason) for shard in shards for doc_id, reason in shard.rejected.items()]
        rejected = [*self.rejected, *late]
        accepted = sum(shard.rows for shard in shards)
        if accepted + len(rejected) + sum(self.skipped.values()) != self.records:
            raise PipelineError(
                f"{accepted} accepted, {len(rejected)} rejected and {sum(self.skipped.values())} skipped dialogues are not the "
                f"{self.records} records of {self.recipe.data.source}: dump again into another folder"
            )
        return {
            "records": self.records,
            "accepted": accepted,
            "rejected": dict(sorted(Counter(reason for _, reason in rejected).items())),
            "skipped": dict(self.skipped),
            "edits": dict(sorted(self.edits.items())),
            "torn_tail_after": self.tail.torn_after,
        }


def dump(recipe: Recipe) -> list[str]:
    """Runs or continues the dump; returns the lines of its report. Raises PipelineError."""
    folder = recipe.features_dir
    _require_lasting(folder)
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise PipelineError(
            f"{folder}: another dump is writing here. Wait for it, or give this run its own output"
        ) from None
    with lock:
        for leftover in folder.glob(".*.tmp"):
            leftover.unlink()
        tokenizer = load_tokenizer(recipe.target)
        spec = feature_spec(recipe)
        manifest = _resume(folder, spec)
        if not manifest.complete:
            _run(recipe, folder, manifest, tokenizer)
        return _report(folder, manifest)


def _require_lasting(folder: Path) -> None:
    """A Ray job runs in a copy of the working directory that goes with the job: relative outputs would be lost."""
    if "runtime_resources" in str(Path.cwd()) and not folder.is_absolute():
        raise PipelineError(
            f"output {str(folder.parent)!r} is relative, but a Ray job runs in a temporary copy of the checkout. "
            "Give a folder that all nodes see and that lasts: --set output=/shared/runs/NAME"
        )


def _resume(folder: Path, spec: FeatureSpec) -> Manifest:
    if not (folder / MANIFEST).exists():
        return Manifest(spec)
    manifest = Manifest.load(folder)
    require_same(manifest.spec, spec, folder)
    whole = []
    with Progress("verify shards", len(manifest.shards), "shards") as progress:
        for shard in manifest.shards:
            if damage(folder, shard) is None:
                whole.append(shard)
            progress.advance(1)
    if len(whole) < len(manifest.shards) or not (folder / HELDOUT_PROMPTS).exists():
        manifest.shards, manifest.complete = whole, False
        manifest.save(folder)
    return manifest


def _run(recipe: Recipe, folder: Path, manifest: Manifest, tokenizer) -> None:
    plan = Plan(recipe, tokenizer)
    finished = {(shard.split, shard.index): shard for shard in manifest.shards}
    tasks = (task for task in plan.tasks() if not _is_done(task, finished, recipe))
    write_provenance(folder, recipe)
    done = sum(shard.tokens for shard in manifest.shards)
    with Progress("dump", recipe.data.max_tokens or 0, "tokens", start=done) as progress:
        for record in _on_ray(recipe, folder, manifest.spec, tasks):
            manifest.shards.append(record)
            manifest.save(folder)
            progress.advance(record.tokens, shards=len(manifest.shards))
    manifest.accounting = plan.accounting(manifest.shards)
    if manifest.total("train", "rows") == 0:
        raise PipelineError(
            f"data.source {recipe.data.source} holds no usable dialogue: {plan.records} records, "
            f"rejected {manifest.accounting['rejected']}, skipped {manifest.accounting['skipped']}"
        )
    if manifest.total("validation", "rows") == 0:
        raise PipelineError(
            f"data.heldout_fraction={recipe.data.heldout_fraction} holds out none of {plan.records} records (parts ID_0, ID_1 of "
            "one conversation stay together): raise it, or give the records ids that differ before the last underscore"
        )
    rejected = [*plan.rejected, *(pair for shard in manifest.shards for pair in shard.rejected.items())]
    lines = [json.dumps({"doc_id": doc_id, "reason": reason}) for doc_id, reason in rejected]
    write_text(folder / REJECTED, "".join(f"{line}\n" for line in lines))
    prompts = [json.dumps(prompt, ensure_ascii=False) for prompt in plan.prompts]
    write_text(folder / HELDOUT_PROMPTS, "".join(f"{line}\n" for line in prompts))
    manifest.complete = True
    manifest.save(folder)


def _is_done(task: ShardTask, finished: dict[tuple[str, int], ShardRecord], recipe: Recipe) -> bool:
    """Raises PipelineError when the shard was written from other dialogues: the source changed between two runs."""
    shard = finished.get((task.split, task.index))
    if shard is None:
        return False
    if shard.documents != task.fingerprint:
        raise PipelineError(
            f"shard {shard.name} was dumped from other dialogues than {recipe.data.source} has now: the source changed since "
            "this dump was started. Restore it, or dump into another output folder"
        )
    return True


def _on_ray(recipe: Recipe, folder: Path, spec: FeatureSpec, tasks: Iterator[ShardTask]) -> Iterator[ShardRecord]:
    """Yields shard records as actors finish them. At most two tasks an actor are in flight, so plans stay in the source.

    Tasks go to actors that are ready; those that the cluster has no room for wait without holding any.
    """
    first = next(tasks, None)
    if first is None:
        return
    _start_ray(recipe)
    settings = recipe.features
    worker = ray.remote(num_cpus=settings.cpus_per_worker, num_gpus=settings.gpus_per_worker)(FeatureWorker)
    actors = [worker.remote(recipe, folder.resolve(), spec) for _ in range(settings.workers)]
    loading: dict = {actor.ready.remote(): actor for actor in actors}
    waiting: dict = {}
    idle: list = []
    for task in chain([first], tasks):
        while not idle:
            yield from _collect(loading, waiting, idle)
        actor = idle.pop(0)
        waiting[actor.dump.remote(task)] = actor
    while waiting:
        yield from _collect(loading, waiting, idle)
    if loading:
        logging.warning("%d of %d dump workers found no room on the cluster in time", len(loading), len(actors))
    ray.shutdown()


def _collect(loading: dict, waiting: dict, idle: list) -> Iterator[ShardRecord]:
    done, _ = ray.wait([*loading, *waiting], num_returns=1)
    for reference in done:
        try:
            result = ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, PipelineError):
                raise error.cause from None
            raise
        except ray.exceptions.RayActorError as error:
            raise PipelineError(
                f"a dump worker died: {str(error).splitlines()[0]} Finished shards are kept: run the dump again to continue"
            ) from None
        if reference in loading:
            idle += [loading.pop(reference)] * 2
        else:
            idle.append(waiting.pop(reference))
            yield result


def _start_ray(recipe: Recipe) -> None:
    """Joins the cluster that started this job, else starts Ray on this machine, reachable from it alone.

    Raises PipelineError where no node has room for one worker.
    """
    settings = recipe.features
    if "RAY_ADDRESS" in os.environ:
        ray.init(logging_level="warning")
        _require_room(settings)
        return
    ray.init(
        address="local",
        _node_ip_address="127.0.0.1",  # servers of a laptop run are not for the network
        num_cpus=max(settings.workers * settings.cpus_per_worker, 1),
        include_dashboard=False,
        logging_level="warning",
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
    )
    _require_room(settings)


def _require_room(settings: FeaturesConfig) -> None:
    wanted = {"CPU": settings.cpus_per_worker, "GPU": settings.gpus_per_worker}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(all(node.get(kind, 0) >= amount for kind, amount in wanted.items()) for node in nodes):
        largest = {kind: max((node.get(kind, 0) for node in nodes), default=0) for kind in wanted}
        raise PipelineError(
            f"no node has room for one dump worker: features wants {wanted['CPU']} CPUs and {wanted['GPU']} GPUs each, the "
            f"nodes have at most {largest['CPU']:g} CPUs and {largest['GPU']:g} GPUs. Set features.cpus_per_worker and "
            "features.gpus_per_worker, or start larger nodes"
        )


def _report(folder: Path, manifest: Manifest) -> list[str]:
    counts = manifest.accounting
    lines = []
    if counts["torn_tail_after"] is not None:
        lines.append(
            f"the source ends in the middle of a record: its {counts['torn_tail_after']} whole records are used"
        )
    rejected = ", ".join(f"{reason} {count}" for reason, count in counts["rejected"].items()) or "none"
    skipped = ", ".join(f"{reason}: {count}" for reason, count in counts["skipped"].items()) or "none"
    total = sum(counts["rejected"].values())
    lines.append(
        f"{counts['records']} records = {counts['accepted']} accepted + {total} rejected ({rejected}) + skipped ({skipped})"
    )
    for split in ("train", "validation"):
        rows, tokens, trained = (manifest.total(split, count) for count in ("rows", "tokens", "trained_tokens"))
        lines.append(f"{split}: {rows} dialogues, {tokens:,} tokens, {trained:,} with a loss")
    size = sum(shard.bytes for shard in manifest.shards) / 1e6
    lines.append(f"{len(manifest.shards)} shards, {size:,.0f} MB in {folder}")
    return lines
