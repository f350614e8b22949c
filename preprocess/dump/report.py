"""The dump's report, and the list of its rejected dialogues."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipeline.basics.files import write_text
from pipeline.basics.public import public_name, public_text
from pipeline.features.shards import ANSWERS, SPLITS, Manifest
from pipeline.recipe.recipe import Recipe

REJECTED = "rejected.jsonl"


def write_rejected(folder: Path, rejected: Iterable[tuple[str, str]]) -> None:
    """(document id, reason) of each dialogue that is not used."""
    lines = (json.dumps({"doc_id": doc_id, "reason": reason}) + "\n" for doc_id, reason in rejected)
    write_text(folder / REJECTED, "".join(lines))


def listed(fates: dict[str, int], between: str = " ") -> str:
    return ", ".join(f"{fate}{between}{count}" for fate, count in fates.items()) or "none"


def torn_tail(counts: dict[str, Any]) -> list[str]:
    """A report's line on a source that was cut; none where it was not."""
    whole = counts["torn_tail_after"]
    return [] if whole is None else [f"the source ends in the middle of a record: its {whole} whole records are used"]


def examples(counts: dict[str, Any]) -> list[str]:
    """A report's lines on the first record of each reason that a look at it explains."""
    return [public_text(f"the first {reason} record: {text}") for reason, text in counts.get("examples", {}).items()]


def suffix(words: list[str]) -> str:
    """Return the end of a message that says these, too."""
    return "".join(f"; {word}" for word in words if word)


def _count(manifest: Manifest) -> int:
    return len(manifest.shards) + len(manifest.answers)


def describe_groups(manifest: Manifest) -> str:
    """Empty where no dialogues are."""
    counts = manifest.accounting["grouped"]
    parts = f"{counts['dialogues']} dialogues are parts of {counts['conversations']} conversations"
    sharing = counts.get("sharing_dialogues")  # not counted in earlier dumps
    questions = f"{sharing} dialogues begin with one of {counts.get('shared_questions')} questions that are repeated"
    return ", ".join([parts] * bool(counts["dialogues"]) + [questions] * bool(sharing))


def report_lines(recipe: Recipe, manifest: Manifest) -> list[str]:
    """Return what a dump ends with: every record by its fate, tokens, answers, files."""
    counts, layers = manifest.accounting, manifest.spec.auxiliary_layers
    lines = [f"auxiliary layers {layers}, of another recipe"] if manifest.spec.recipe != recipe.dump_hash else []
    if not counts:
        return [*lines, f"{_count(manifest)} shards, without an account of the source's records"]
    lines, total = [*lines, *torn_tail(counts)], sum(counts["rejected"].values())
    further = f" + {counts['further_sequences']} further sequences" if counts["further_sequences"] else ""
    lines.append(
        f"{counts['records']} records{further} = {counts['accepted']} accepted + {total} rejected "
        f"({listed(counts['rejected'])}) + skipped ({listed(counts['skipped'], ': ')})"
    )
    lines += examples(counts)
    lines.append(f"edits: {listed(counts['edits'])}; chat template: {manifest.spec.template_settings or 'no settings'}")
    if grouped := describe_groups(manifest):
        lines.append(f"split: {grouped}, each on one side")
    if alone := counts["grouped"].get("without_group"):
        lines.append(
            f"split: {alone} records have no group by data.group={recipe.data.group!r}: each is split by its id"
        )
    if fed := manifest.lacks("train"):
        lines.append(f"train: states of {fed} dialogues are made while training reads them")
    for split in SPLITS[bool(fed) :]:
        rows, tokens, trained = (manifest.total(split, count) for count in ("rows", "tokens", "trained_tokens"))
        lines.append(f"{split}: {rows} dialogues, {tokens:,} tokens, {trained:,} with a loss")
    answers, tokens = manifest.total(ANSWERS, "rows"), manifest.total(ANSWERS, "trained_tokens")
    lost = sum(len(shard.rejected) for shard in manifest.answers)
    lines.append(
        f"answers: the target's own to {answers} calibration prompts, {tokens:,} tokens"
        + (f"; {lost} rejected" if lost else "")
    )
    if errors := [shard.off for shard in (*manifest.shards, *manifest.answers) if shard.off is not None]:
        engine = f"{manifest.spec.engine} {manifest.spec.engine_version}"
        lines.append(f"engine: {engine}, whose states of a sample were at most {max(errors):.1e} off transformers'")
    size = sum(record.bytes for record in manifest.files) / 1e6
    store = recipe.features.store
    where = public_name(store) if store else recipe.features_dir
    lines.append(f"{_count(manifest)} shards, {size:,.0f} MB in {where}")
    return lines
