"""Let the target rewrite the assistant turns of the recipe's dialogues: drafts learn best from the target's own text.

python preprocess/regenerate.py RECIPE                                    (starts Ray on this machine)
ray job submit --working-dir . -- python preprocess/regenerate.py RECIPE  (on a cluster)

The questions are asked one after the other, each after the target's own answers to the earlier ones (rules:
preprocess/dump/interview.py). The result is OUTPUT/regenerated/dialogues.jsonl, for another recipe's data.source; ids
are kept, so the same dialogues are held out. Records without turns, and dialogues that call tools, whose results
nothing would give, are left out and counted as skipped. A later run continues the job: finished parts are not answered
again. For the hidden states, too, set data.answers = "target" and dump: one job makes both.
"""

import json
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # the checkout, not this folder
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interrupted import prints nothing

from pipeline.artifacts.provenance import describe_settings, read_recorded, write_provenance
from pipeline.artifacts.regenerated import DIALOGUES, MANIFEST, holds_answers_of
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import Journal, atomic_path, lock_folder, read_sealed, sha256, write_sealed
from pipeline.basics.progress import Progress
from pipeline.lm.model import identify, load_tokenizer
from pipeline.lm.template import template_settings
from pipeline.recipe.identity import describe_differences, digest, regenerate_hash, regenerate_keys
from pipeline.recipe.recipe import Recipe
from pipeline.running import entry
from preprocess.dump.driver import require_permanent_output
from preprocess.dump.interview import AnswerWorker, Part, skip_reason
from preprocess.dump.pool import run_tasks
from preprocess.dump.report import describe_examples, describe_torn_tail, format_counts, write_rejected
from preprocess.dump.task import ShardTask
from preprocess.sources.intake import Intake

PARTS_JOURNAL = "parts.jsonl"  # the finished parts
REMEDY = "Restore it, or remove it and run again: what is answered is kept"


def regenerate(recipe: Recipe) -> list[str]:
    """Run or continue the job; return the lines of its report. Raise PipelineError."""
    folder = recipe.paths.regenerated
    require_permanent_output(folder)
    with lock_folder(folder, "regeneration"):
        target = identify(recipe.target)
        made_by = {
            "target": target.fingerprint,
            "tokenizer": target.tokenizer,
            "template": target.template,
            "stop_ids": target.stop_ids,
            "template_settings": template_settings(load_tokenizer(recipe.target), recipe.target),
            "settings": regenerate_hash(recipe),
        }
        manifest = folder / MANIFEST
        previous = read_sealed(manifest, REMEDY)["made_by"] if manifest.exists() else made_by
        if previous != made_by:
            identity = describe_differences(previous, made_by, made_by.keys() - {"settings"})
            is_other = previous.get("settings") != made_by["settings"]
            keys = describe_settings(read_recorded(folder), recipe, regenerate_keys(recipe)) if is_other else ""
            raise PipelineError(
                f"{folder} holds answers of another target or other settings: "
                f"{', '.join(filter(None, [keys, identity]))}. Use the recipe that they were made with, or another "
                "output"
            )
        if not holds_answers_of(str(folder / DIALOGUES), made_by["target"]):
            _run(recipe, folder, made_by)
        return _report(folder, read_sealed(manifest, REMEDY)["accounting"])


def _tasks(recipe: Recipe, intake: Intake, skipped: Counter) -> Iterator[ShardTask]:
    """Yield the parts, in the order of the source."""
    limit, size = recipe.regenerate.max_dialogues, recipe.regenerate.dialogues_per_part
    part, accepted, index = [], 0, 0
    for dialogue in intake:
        if reason := skip_reason(dialogue):
            skipped[reason] += 1
            continue
        if limit is not None and accepted == limit:
            skipped["enough"] += 1
            continue
        accepted += 1
        part.append(dialogue)
        if len(part) == size:
            yield ShardTask("part", index, part)
            part, index = [], index + 1
    if part:
        yield ShardTask("part", index, part)


def _run(recipe: Recipe, folder: Path, made_by: dict[str, Any]) -> None:
    intake, skipped, journal = Intake(recipe.data), Counter(), Journal(folder / PARTS_JOURNAL, digest(made_by))
    write_provenance(folder, recipe)
    write_sealed(folder / MANIFEST, {"made_by": made_by})

    def find_finished(index: int) -> Part | None:
        return Part(**journal[index]) if index in journal else None

    tasks = (task for task in _tasks(recipe, intake, skipped) if not task.is_done(find_finished(task.index), recipe))
    start = sum(_count_dialogues(Part(**journal[index])) for index in journal)
    with Progress("regenerate", recipe.regenerate.max_dialogues or 0, "dialogues", start=start) as progress:
        for part in run_tasks(
            recipe, partial(AnswerWorker, recipe), tasks, "regenerate.batch", progress, _count_dialogues
        ):
            journal.add(part.index, asdict(part))
    counts, edits, rejected = Counter(), Counter(), list(intake.rejected)
    with atomic_path(folder / DIALOGUES) as temporary:
        with temporary.open("w", encoding="utf-8") as file:
            for index in sorted(journal):
                part = Part(**journal[index])
                file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in part.dialogues)
                counts += Counter(answered=len(part.dialogues), answers=part.answers, tokens=part.tokens)
                edits.update(part.edits)
                rejected += part.rejected.items()
        _require_accounted(recipe, intake.records, counts["answered"], len(rejected), skipped.total())
    write_rejected(folder, rejected)
    accounting = {
        "records": intake.records,
        "answered": counts["answered"],
        "answers": counts["answers"],
        "tokens": counts["tokens"],
        "rejected": dict(sorted(Counter(reason for _, reason in rejected).items())),
        "skipped": dict(skipped),
        "edits": dict(sorted(edits.items())),
        "examples": intake.examples,
        "torn_tail_after": intake.tail.torn_after,
    }
    checksum = sha256(folder / DIALOGUES)
    write_sealed(folder / MANIFEST, {"made_by": made_by, "accounting": accounting, "dialogues_sha256": checksum})


def _count_dialogues(part: Part) -> int:
    return len(part.dialogues) + len(part.rejected)


def _require_accounted(recipe: Recipe, records: int, answered: int, rejected: int, skipped: int) -> None:
    if answered + rejected + skipped != records:
        raise PipelineError(
            f"{answered} answered, {rejected} rejected and {skipped} skipped dialogues are not the {records} records "
            f"of {recipe.data.source}: use another output"
        )
    if not answered:
        raise PipelineError(f"data.source {recipe.data.source} holds no dialogue that the target answers")


def _report(folder: Path, counts: dict[str, Any]) -> list[str]:
    total = sum(counts["rejected"].values())
    return [
        *describe_torn_tail(counts),
        f"{counts['records']} records = {counts['answered']} answered + {total} rejected "
        f"({format_counts(counts['rejected'])}) + skipped ({format_counts(counts['skipped'])})",
        *describe_examples(counts),
        f"{counts['answers']:,} answers, {counts['tokens']:,} tokens generated; dialogues changed: "
        f"{format_counts(counts['edits'])}",
        f"train on them with data.source = {str(folder / DIALOGUES)!r}",
    ]


if __name__ == "__main__":
    entry.run_job("regenerate", __doc__, regenerate)
