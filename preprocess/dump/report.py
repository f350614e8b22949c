"""The dump's report, and the list of its rejected dialogues."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipeline.basics.files import write_text
from pipeline.basics.public import public_name, public_text
from pipeline.features.shards import ANSWERS, SPLITS, Manifest
from pipeline.recipe.identity import dump_hash
from pipeline.recipe.recipe import Recipe

REJECTED = "rejected.jsonl"


def write_rejected(folder: Path, rejected: Iterable[tuple[str, str]]) -> None:
    """Write (document id, reason) of each dialogue that is not used."""
    lines = (json.dumps({"doc_id": doc_id, "reason": reason}) + "\n" for doc_id, reason in rejected)
    write_text(folder / REJECTED, "".join(lines))


def format_counts(fates: dict[str, int], between: str = " ") -> str:
    return ", ".join(f"{fate}{between}{count}" for fate, count in fates.items()) or "none"


def describe_torn_tail(counts: dict[str, Any]) -> list[str]:
    """Return a report's line on a torn source; an empty list for any other."""
    records = counts["torn_tail_after"]
    return [] if records is None else [f"the source ends inside a record: its {records} complete records are used"]


def describe_examples(counts: dict[str, Any]) -> list[str]:
    """Return a report's lines with the first record of each reason that a description explains."""
    return [public_text(f"the first {reason} record: {text}") for reason, text in counts.get("examples", {}).items()]


def join_suffix(words: list[str]) -> str:
    """Join further parts of a message, each after a semicolon."""
    return "".join(f"; {word}" for word in words if word)


def _count_shards(manifest: Manifest) -> int:
    return len(manifest.shards) + len(manifest.answers)


def describe_groups(manifest: Manifest) -> str:
    """Describe the grouped dialogues; return an empty text where there are none."""
    counts = manifest.accounting["grouped"]
    parts = f"{counts['dialogues']} dialogues are parts of {counts['conversations']} conversations"
    sharing = counts.get("sharing_dialogues")  # not counted in earlier dumps
    questions = f"{sharing} dialogues begin with one of {counts.get('shared_questions')} questions that are repeated"
    return ", ".join([parts] * bool(counts["dialogues"]) + [questions] * bool(sharing))


def report_lines(recipe: Recipe, manifest: Manifest) -> list[str]:
    """Return the lines of a dump's report: every record by its outcome, tokens, answers, files."""
    counts, layers = manifest.accounting, manifest.spec.auxiliary_layers
    lines = [f"auxiliary layers {layers}, of another recipe"] if manifest.spec.recipe != dump_hash(recipe) else []
    if not counts:
        return [*lines, f"{_count_shards(manifest)} shards, without an account of the source's records"]
    lines, total = [*lines, *describe_torn_tail(counts)], sum(counts["rejected"].values())
    further = f" + {counts['further_sequences']} further sequences" if counts["further_sequences"] else ""
    lines.append(
        f"{counts['records']} records{further} = {counts['accepted']} accepted + {total} rejected "
        f"({format_counts(counts['rejected'])}) + skipped ({format_counts(counts['skipped'], ': ')})"
    )
    lines += describe_examples(counts)
    lines.append(
        f"edits: {format_counts(counts['edits'])}; chat template: {manifest.spec.template_settings or 'no settings'}"
    )
    if grouped := describe_groups(manifest):
        lines.append(f"split: {grouped}, each on one side")
    if ungrouped := counts["grouped"].get("without_group"):
        lines.append(
            f"split: {ungrouped} records have no group by data.group={recipe.data.group!r}: each is split by its id"
        )
    if fed_rows := manifest.missing_rows("train"):
        lines.append(f"train: states of {fed_rows} dialogues are made while training reads them")
    for split in SPLITS[bool(fed_rows) :]:
        rows, tokens, trained = (manifest.total(split, count) for count in ("rows", "tokens", "trained_tokens"))
        lines.append(f"{split}: {rows} dialogues, {tokens:,} tokens, {trained:,} with a loss")
    answers, tokens = manifest.total(ANSWERS, "rows"), manifest.total(ANSWERS, "trained_tokens")
    rejected_answers = sum(len(shard.rejected) for shard in manifest.answers)
    lines.append(
        f"answers: the target's own to {answers} calibration prompts, {tokens:,} tokens"
        + (f"; {rejected_answers} rejected" if rejected_answers else "")
    )
    if errors := [shard.off for shard in (*manifest.shards, *manifest.answers) if shard.off is not None]:
        engine = f"{manifest.spec.engine} {manifest.spec.engine_version}"
        lines.append(f"engine: {engine}, whose states of a sample were at most {max(errors):.1e} off transformers'")
    size = sum(record.bytes for record in manifest.files) / 1e6
    store = recipe.features.store
    where = public_name(store) if store else recipe.paths.features
    lines.append(f"{_count_shards(manifest)} shards, {size:,.0f} MB in {where}")
    return lines
