"""The dump job: has the planned shards written and keeps the manifest, the only truth about what is finished.

A shard of the manifest that is whole on disk is not written again.
"""

import json
import shutil
from pathlib import Path

from filelock import FileLock, Timeout

from pipeline.errors import PipelineError
from pipeline.features.schema import FeatureSpec, require_same
from pipeline.features.shards import HELDOUT_PROMPTS, MANIFEST, Manifest, ShardRecord, damage
from pipeline.files import write_text
from pipeline.progress import Progress
from pipeline.provenance import write_provenance
from pipeline.recipe import Recipe
from pipeline.target import feature_spec, load_tokenizer
from preprocess.plan import Plan
from preprocess.pool import Pool
from preprocess.worker import BEATS, ShardTask

REJECTED = "rejected.jsonl"


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
        shutil.rmtree(folder / BEATS, ignore_errors=True)
        tokenizer = load_tokenizer(recipe.target)
        spec = feature_spec(recipe)
        manifest = _resume(folder, spec)
        if not manifest.complete:
            _run(recipe, folder, manifest, tokenizer)
            shutil.rmtree(folder / BEATS, ignore_errors=True)
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
        manifest.shards, manifest.complete = whole, False  # saved with the first shard that is written again
    return manifest


def _run(recipe: Recipe, folder: Path, manifest: Manifest, tokenizer) -> None:
    plan = Plan(recipe, tokenizer)
    finished = {(shard.split, shard.index): shard for shard in manifest.shards}
    tasks = (task for task in plan.tasks() if not _is_done(task, finished, recipe))
    write_provenance(folder, recipe)
    done = sum(shard.tokens for shard in manifest.shards)
    with Progress("dump", recipe.data.max_tokens or 0, "tokens", start=done) as progress:
        for record in Pool(recipe, folder, manifest.spec).records(tasks):
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
    known = {shard.name for shard in manifest.shards}
    for path in folder.glob("features-*.arrow"):
        if path.name not in known:  # of an earlier plan whose manifest is gone
            path.unlink()
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
    windows = f" + {counts['windows']} further windows" if counts["windows"] else ""
    lines.append(
        f"{counts['records']} records{windows} = {counts['accepted']} accepted + {total} rejected ({rejected}) + skipped ({skipped})"
    )
    for split in ("train", "validation"):
        rows, tokens, trained = (manifest.total(split, count) for count in ("rows", "tokens", "trained_tokens"))
        lines.append(f"{split}: {rows} dialogues, {tokens:,} tokens, {trained:,} with a loss")
    size = sum(shard.bytes for shard in manifest.shards) / 1e6
    lines.append(f"{len(manifest.shards)} shards, {size:,.0f} MB in {folder}")
    return lines
