"""Lets the target rewrite the assistant turns of the recipe's dialogues: drafts learn best from the target's own words.

python preprocess/regenerate.py RECIPE                                    (starts Ray on this machine)
ray job submit --working-dir . -- python preprocess/regenerate.py RECIPE  (on a cluster)

The questions are asked one after the other, each after the target's own answers to those before. The result is
OUTPUT/regenerated/dialogues.jsonl, for another recipe's data.source; ids are kept, so the same dialogues are held out.
Left out, and counted as skipped, are records without turns and dialogues with tools, whose results nobody would give.
A dialogue ends before an answer that is empty, runs in circles or ends in its thoughts, and after one that reaches
regenerate.max_new_tokens. Run again, the job continues: finished parts that are whole are not answered again.
"""

import json
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # the checkout, not this folder
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an import that is interrupted says nothing

from pipeline.artifacts.provenance import write_provenance
from pipeline.artifacts.regenerated import DIALOGUES, MANIFEST
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import atomic_path, exclusive, read_sealed, sha256, write_sealed, write_text
from pipeline.basics.progress import Progress
from pipeline.basics.public import scrubbed
from pipeline.lm.chat import template_fingerprint, tokenizer_fingerprint
from pipeline.lm.model import fingerprint, load_tokenizer
from pipeline.lm.template import template_settings
from pipeline.recipe.recipe import Recipe
from pipeline.running import entry
from preprocess.dump.answers import AnswerWorker, Part
from preprocess.dump.driver import REJECTED, require_lasting
from preprocess.dump.pool import Pool
from preprocess.dump.task import ShardTask
from preprocess.sources.intake import Intake


@dataclass(frozen=True)
class PartRecord:
    """One file of the result; the counts are `Part`'s."""

    name: str
    index: int
    dialogues: int
    answers: int
    tokens: int
    documents: str
    rejected: dict[str, str]
    edits: dict[str, int]
    sha256: str


def part_name(index: int) -> str:
    return f"part-{index:06d}.jsonl"


def write_part(folder: Path, part: Part) -> PartRecord:
    path = folder / part_name(part.index)
    write_text(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in part.dialogues))
    counts = {**asdict(part), "dialogues": len(part.dialogues)}
    return PartRecord(name=path.name, sha256=sha256(path), **counts)


@dataclass
class Parts:
    """The manifest: what is finished."""

    made_by: dict[str, str]  # fingerprints
    parts: list[PartRecord] = field(default_factory=list)
    accounting: dict[str, Any] = field(default_factory=dict)
    complete: bool = False
    dialogues_sha256: str = ""  # of dialogues.jsonl, once that is written

    def save(self, folder: Path) -> None:
        self.parts.sort(key=lambda part: part.index)
        write_sealed(folder / MANIFEST, asdict(self))

    @classmethod
    def load(cls, folder: Path) -> "Parts":
        """Parts that are missing or damaged are left out: they are answered again."""
        path = folder / MANIFEST
        remedy = "Restore it, or remove it and run again: every dialogue is then answered anew"
        raw = read_sealed(path, remedy)
        try:
            parts = [PartRecord(**record) for record in raw["parts"]]
            found = cls(raw["made_by"], parts, raw["accounting"], raw["complete"], raw["dialogues_sha256"])
        except (KeyError, TypeError) as error:
            raise PipelineError(f"{path} is no manifest of this version ({error}); use another output") from None
        names = set()
        for part in parts:
            named = type(part.index) is int and part.index >= 0 and part.name == part_name(part.index)
            if not named or part.name in names:
                raise PipelineError(
                    f"{path}: {part.name!r} (index {part.index!r}) is no part that this job writes, or is there "
                    f"twice. {remedy}"
                )
            names.add(part.name)
        found.parts = [part for part in parts if _is_there(folder / part.name, part.sha256)]
        whole = len(found.parts) == len(parts) and _is_there(folder / DIALOGUES, found.dialogues_sha256)
        found.complete = found.complete and whole
        return found


def _is_there(path: Path, checksum: str) -> bool:
    return path.exists() and sha256(path) == checksum


def regenerate(recipe: Recipe) -> list[str]:
    """Runs or continues the job; returns the lines of its report. Raises PipelineError."""
    folder = recipe.regenerated_dir
    require_lasting(folder)
    with exclusive(folder, "regeneration"):
        tokenizer = load_tokenizer(recipe.target)
        made_by = {
            "target": fingerprint(recipe.target),
            "tokenizer": tokenizer_fingerprint(tokenizer),
            "template": template_fingerprint(tokenizer),
            "template_settings": template_settings(tokenizer, recipe.target),
            "settings": recipe.regenerate_hash,
        }
        parts = Parts.load(folder) if (folder / MANIFEST).exists() else Parts(made_by)
        if parts.made_by != made_by:
            raise PipelineError(
                f"{folder} holds answers of another target or other settings ({parts.made_by}, this recipe has "
                f"{made_by}): use the recipe that they were made with, or another output"
            )
        if not parts.complete:
            _run(recipe, folder, parts)
        return _report(folder, parts)


def _tasks(recipe: Recipe, intake: Intake, skipped: Counter) -> Iterator[ShardTask]:
    """Part after part, in the order of the source."""
    limit, size = recipe.regenerate.max_dialogues, recipe.regenerate.dialogues_per_part
    group, accepted, index = [], 0, 0
    for dialogue in intake:
        tools = dialogue.tools or any("tool_calls" in turn or turn["role"] == "tool" for turn in dialogue.messages)
        if dialogue.raw is not None or tools:
            skipped["tools" if tools else "no_turns"] += 1
            continue
        if limit is not None and accepted == limit:
            skipped["enough"] += 1
            continue
        accepted += 1
        group.append(dialogue)
        if len(group) == size:
            yield ShardTask("part", index, group)
            group, index = [], index + 1
    if group:
        yield ShardTask("part", index, group)


def _run(recipe: Recipe, folder: Path, parts: Parts) -> None:
    intake, skipped = Intake(recipe.data), Counter()
    finished = {part.index: part for part in parts.parts}
    tasks = (task for task in _tasks(recipe, intake, skipped) if not task.is_done(finished.get(task.index), recipe))
    write_provenance(folder, recipe)
    start = sum(part.dialogues + len(part.rejected) for part in parts.parts)
    with Progress("regenerate", recipe.regenerate.max_dialogues or 0, "dialogues", start=start) as progress:
        for part in Pool(recipe, partial(AnswerWorker, recipe), "regenerate.batch").records(tasks):
            record = write_part(folder, part)
            parts.parts.append(record)
            parts.save(folder)
            progress.advance(record.dialogues + len(record.rejected), parts=len(parts.parts))
    late = [pair for part in parts.parts for pair in part.rejected.items()]
    rejected, answered = [*intake.rejected, *late], sum(part.dialogues for part in parts.parts)
    if answered + len(rejected) + sum(skipped.values()) != intake.records:
        raise PipelineError(
            f"{answered} answered, {len(rejected)} rejected and {sum(skipped.values())} skipped dialogues are not the "
            f"{intake.records} records of {scrubbed(recipe.data.source, recipe.data.source)}: use another output"
        )
    if not answered:
        raise PipelineError(
            f"data.source {scrubbed(recipe.data.source, recipe.data.source)} holds no dialogue that the target answers"
        )
    parts.accounting = {
        "records": intake.records,
        "answered": answered,
        "rejected": dict(sorted(Counter(reason for _, reason in rejected).items())),
        "skipped": dict(skipped),
        "edits": dict(sorted(sum((Counter(part.edits) for part in parts.parts), Counter()).items())),
        "torn_tail_after": intake.tail.torn_after,
    }
    lines = [json.dumps({"doc_id": doc_id, "reason": reason}) for doc_id, reason in rejected]
    write_text(folder / REJECTED, "".join(f"{line}\n" for line in lines))
    with atomic_path(folder / DIALOGUES) as temporary, temporary.open("wb") as whole:
        for part in parts.parts:
            whole.write((folder / part.name).read_bytes())
    parts.complete, parts.dialogues_sha256 = True, sha256(folder / DIALOGUES)
    parts.save(folder)


def _report(folder: Path, parts: Parts) -> list[str]:
    counts = parts.accounting

    def listed(fates: dict[str, int]) -> str:
        return ", ".join(f"{reason} {count}" for reason, count in fates.items()) or "none"

    lines = []
    if counts["torn_tail_after"] is not None:
        lines.append(
            f"the source ends in the middle of a record: its {counts['torn_tail_after']} whole records are used"
        )
    total = sum(counts["rejected"].values())
    lines.append(
        f"{counts['records']} records = {counts['answered']} answered + {total} rejected "
        f"({listed(counts['rejected'])}) + skipped ({listed(counts['skipped'])})"
    )
    answers, tokens = (sum(getattr(part, count) for part in parts.parts) for count in ("answers", "tokens"))
    lines.append(f"{answers:,} answers, {tokens:,} tokens generated; dialogues changed: {listed(counts['edits'])}")
    lines.append(f"train on them with data.source = {str(folder / DIALOGUES)!r}")
    return lines


if __name__ == "__main__":
    entry.run_job(__doc__, regenerate)
