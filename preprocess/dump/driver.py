"""The dump job: has the planned shards written and keeps the manifest, the only truth about what is finished.

A shard of the manifest that is whole on disk is not written again; it is read back to see that, once as long as it does
not change. Where the recipe names a store, "on disk" means there, and whole means its size: reading it all back is
`verify`'s business.
"""

import json
import time
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path

from pipeline.artifacts.features import feature_spec, store_of
from pipeline.artifacts.provenance import PROVENANCE, RECIPE, write_own_recipe, write_provenance
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import exclusive, sha256, write_text
from pipeline.basics.progress import Progress
from pipeline.basics.public import public_name, scrubbed
from pipeline.features.checked import checked
from pipeline.features.schema import FeatureSpec, require_same
from pipeline.features.shards import (
    ANSWERS,
    HELDOUT_PROMPTS,
    MANIFEST,
    SPLITS,
    Manifest,
    ShardRecord,
    damage,
    prompts_damage,
)
from pipeline.features.store import Store
from pipeline.lm.model import load_tokenizer
from pipeline.recipe.recipe import Recipe
from preprocess.dump.plan import Plan
from preprocess.dump.pool import Pool
from preprocess.dump.worker import FeatureWorker

REJECTED = "rejected.jsonl"
SAVING_SHARE = 20  # the manifest is saved again after so many times what saving it took


def dump(recipe: Recipe) -> list[str]:
    """Runs or continues the dump; returns the lines of its report. Raises PipelineError."""
    folder = recipe.features_dir
    require_lasting(folder)
    with exclusive(folder, "dump"):
        store = store_of(recipe)
        spec = feature_spec(recipe)
        manifest = _resume(folder, spec, store, recipe.answers_hash)
        if not manifest.complete:
            _run(recipe, folder, manifest, store)
        return _report(recipe, manifest)


def require_lasting(folder: Path) -> None:
    """A Ray job runs in a copy of the working directory that goes with the job: relative outputs would be lost."""
    if "runtime_resources" in str(Path.cwd()) and not folder.is_absolute():
        raise PipelineError(
            f"output {str(folder.parent)!r} is relative, but a Ray job runs in a temporary copy of the checkout. "
            "Give a folder that all nodes see and that lasts: --set output=/shared/runs/NAME"
        )


def _resume(folder: Path, spec: FeatureSpec, store: Store | None, answers: str) -> Manifest:
    """What an earlier run left; answers to other calibration prompts, or of other lengths, are not taken over."""
    sizes = {} if store is None else store.sizes()
    manifest = Manifest.load(folder) if (folder / MANIFEST).exists() else Manifest(spec)
    require_same(manifest.spec, spec, folder)
    if store is not None and MANIFEST in sizes:
        manifest = store.manifest()
        require_same(manifest.spec, spec, store.name)
        if manifest.complete and HELDOUT_PROMPTS in sizes:
            store.get(HELDOUT_PROMPTS, folder)
        manifest.save(folder)
    whole = []
    wanted = [shard for shard in manifest.shards if shard.split != ANSWERS or manifest.answers == answers]
    with Progress("verify shards", len(wanted), "shards", quiet=not wanted) as progress:
        if store is None:
            found = ((shard, reason is None) for shard, reason in checked(folder, wanted))
        else:
            found = ((shard, _is_stored(folder, shard, store, sizes)) for shard in wanted)
        for shard, is_whole in found:
            if is_whole:
                whole.append(shard)
            progress.advance(1)
    published = store is None or MANIFEST in sizes
    same = len(whole) == len(manifest.shards) and manifest.answers == answers
    if not same or prompts_damage(folder, manifest) or not published:
        manifest.shards, manifest.complete = whole, False  # saved with the first shard that is written again
        manifest.answers = answers
    return manifest


def _is_stored(folder: Path, shard: ShardRecord, store: Store, sizes: dict[str, int]) -> bool:
    """Of a dump that is to go to a store, what lies whole on disk from before is sent off."""
    if sizes.get(shard.name) == shard.bytes:
        return True
    if damage(folder, shard) is not None:
        return False
    store.put(folder / shard.name)
    (folder / shard.name).unlink()
    return True


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
        self._manifest.shards.append(record)
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
    finished = {(shard.split, shard.index): shard for shard in manifest.shards}
    tasks = (task for task in plan.tasks() if not task.is_done(finished.get((task.split, task.index)), recipe))
    write_provenance(folder, recipe)
    write_own_recipe(folder, recipe)
    done = manifest.total("train", "tokens")
    most = recipe.data.max_tokens or 0  # of training tokens: what is held out comes beside them
    make = partial(FeatureWorker, recipe, folder.resolve(), manifest.spec)
    with Progress("dump", most and max(most, done), "tokens", start=done) as progress, ledger:
        for record in Pool(recipe, make, "features.batch_tokens").records(tasks):
            ledger.add(record)
            if 0 < most < plan.train_tokens:
                progress.expect(plan.train_tokens)
            progress.advance(record.tokens if record.split == "train" else 0, shards=len(manifest.shards))
        progress.expect(manifest.total("train", "tokens"))  # the source may hold fewer
    manifest.accounting = plan.accounting(manifest.shards)
    if manifest.total("train", "rows") == 0:
        raise PipelineError(
            f"data.source {scrubbed(recipe.data.source, recipe.data.source)} holds no usable dialogue: {plan.records} "
            f"records, rejected {manifest.accounting['rejected']}, skipped {manifest.accounting['skipped']}"
        )
    if manifest.total("validation", "rows") == 0:
        raise PipelineError(
            f"data.heldout_fraction={recipe.data.heldout_fraction} holds out none of {plan.records} records"
            f"{f' ({together}, which stay together)' if (together := _together(manifest)) else ''}: "
            "raise it, or say with data.group what belongs together ('id': nothing does)"
        )
    dialogues = [shard for shard in manifest.shards if shard.split != ANSWERS]
    rejected = [*plan.rejected, *(pair for shard in dialogues for pair in shard.rejected.items())]
    lines = [json.dumps({"doc_id": doc_id, "reason": reason}) for doc_id, reason in rejected]
    write_text(folder / REJECTED, "".join(f"{line}\n" for line in lines))
    prompts = [json.dumps(prompt, ensure_ascii=False) for prompt in plan.prompts]
    write_text(folder / HELDOUT_PROMPTS, "".join(f"{line}\n" for line in prompts))
    known = {shard.name for shard in manifest.shards}
    for path in folder.glob("features-*.arrow"):
        if path.name not in known:  # of an earlier plan whose manifest is gone
            path.unlink()
    for name in (REJECTED, HELDOUT_PROMPTS, RECIPE, PROVENANCE):
        ledger.publish(name)
    manifest.complete, manifest.prompts_sha256 = True, sha256(folder / HELDOUT_PROMPTS)
    ledger.save()


def _together(manifest: Manifest) -> str:
    """Empty where no dialogues are."""
    parts, conversations = (manifest.accounting["grouped"][name] for name in ("dialogues", "conversations"))
    return f"{parts} dialogues are parts of {conversations} conversations" if parts else ""


def _report(recipe: Recipe, manifest: Manifest) -> list[str]:
    counts = manifest.accounting
    lines = []
    if counts["torn_tail_after"] is not None:
        lines.append(
            f"the source ends in the middle of a record: its {counts['torn_tail_after']} whole records are used"
        )
    rejected = ", ".join(f"{reason} {count}" for reason, count in counts["rejected"].items()) or "none"
    skipped = ", ".join(f"{reason}: {count}" for reason, count in counts["skipped"].items()) or "none"
    total = sum(counts["rejected"].values())
    further = f" + {counts['further_sequences']} further sequences" if counts["further_sequences"] else ""
    lines.append(
        f"{counts['records']} records{further} = {counts['accepted']} accepted + {total} rejected ({rejected}) + "
        f"skipped ({skipped})"
    )
    edits = ", ".join(f"{edit} {count}" for edit, count in counts["edits"].items()) or "none"
    lines.append(f"edits: {edits}; chat template: {manifest.spec.template_settings or 'no settings'}")
    if together := _together(manifest):
        lines.append(f"split: {together}, each on one side")
    for split in SPLITS:
        rows, tokens, trained = (manifest.total(split, count) for count in ("rows", "tokens", "trained_tokens"))
        lines.append(f"{split}: {rows} dialogues, {tokens:,} tokens, {trained:,} with a loss")
    answers, tokens = manifest.total(ANSWERS, "rows"), manifest.total(ANSWERS, "trained_tokens")
    lost = sum(len(shard.rejected) for shard in manifest.shards if shard.split == ANSWERS)
    lines.append(
        f"answers: the target's own to {answers} calibration prompts, {tokens:,} tokens"
        + (f"; {lost} rejected" if lost else "")
    )
    size = sum(shard.bytes for shard in manifest.shards) / 1e6
    where = public_name(recipe.features.store) if recipe.features.store else recipe.features_dir
    lines.append(f"{len(manifest.shards)} shards, {size:,.0f} MB in {where}")
    return lines
