"""The target's own answers: what they are, that batches and kills leave no trace, that every dialogue is accounted
for.
"""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from pipeline.artifacts.regenerated import holds_answers_of
from pipeline.basics.errors import NoAnswer, PipelineError
from pipeline.basics.files import sha256, write_sealed
from pipeline.decoding.generate import repeats_itself
from pipeline.lm.model import fingerprint, load_tokenizer
from pipeline.recipe.load import load_recipe, override_arguments
from pipeline.recipe.recipe import Recipe
from pipeline.recipe.sections import DataConfig
from preprocess.dump.interview import AnsweredDialogue, AnswerWorker, Part
from preprocess.dump.plan import DumpPlan
from preprocess.dump.task import ShardTask
from preprocess.regenerate import _tasks, regenerate
from preprocess.sources.dialogues import Dialogue
from preprocess.sources.intake import Intake
from tests import tool_templates
from tests.kit import (
    Shown,
    flip,
    kill_when,
    recipe_tree,
    replace_once,
    without_ray,
    write_recipe,
    write_sharegpt,
)
from tests.preprocess.records import TOKENIZER, ask, messages
from tests.templates import GPT_OSS, QWEN_3, QWEN_3_THINKING, tokenizer_with_settings


def with_answers(recipe: Recipe, **settings) -> Recipe:
    changed = recipe.regenerate.model_copy(update=settings)
    return recipe.model_copy(update={"regenerate": changed})


def dialogues_of(recipe: Recipe, count: int) -> list[Dialogue]:
    return list(Intake(recipe.data))[:count]


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def sampled(recipe: Recipe, **settings) -> list[dict]:
    changed = with_answers(recipe, **{"temperature": 1.0, "max_new_tokens": 16, **settings})
    part = AnswerWorker(changed).work(ShardTask("part", 0, dialogues_of(recipe, 12)))
    assert len(part.dialogues) + len(part.rejected) == 12
    return part.dialogues


def test_a_sampled_answer_depends_on_seed_dialogue_and_question_only(tiny_recipe):
    alone = sampled(tiny_recipe, batch=1)
    assert len(alone) >= 10
    assert sampled(tiny_recipe, batch=5) == alone
    other_seed = sampled(tiny_recipe.model_copy(update={"seed": 1}), batch=5)
    assert [line["id"] for line in other_seed] == [line["id"] for line in alone] and other_seed != alone


def test_questions_are_the_sources_and_answers_are_not(tiny_recipe):
    source = {dialogue.doc_id: dialogue.messages for dialogue in dialogues_of(tiny_recipe, 12)}
    for line in sampled(tiny_recipe):
        had, has = source[line["id"]], line["messages"]
        assert [message["role"] for message in has] == ["user", "assistant"] * (len(has) // 2)
        assert [m["content"] for m in has[::2]] == [m["content"] for m in had[::2]][: len(has) // 2]
        assert all(m["content"] != original["content"] for m, original in zip(has[1::2], had[1::2], strict=False))


def test_a_dialogue_whose_logits_are_not_finite_is_rejected_and_its_batch_is_not(tiny_recipe):
    worker = AnswerWorker(with_answers(tiny_recipe, temperature=1.0, max_new_tokens=16, batch=5))
    task = ShardTask("part", 0, dialogues_of(tiny_recipe, 6))
    sound, answers = worker.work(task), worker._interview._source.answers
    doc_id = sound.dialogues[2]["id"]

    def broken(prompts_asked, *more, **options):
        if worker._interview._seed(AnsweredDialogue(doc_id, [], [])) in [prompt.seed for prompt in prompts_asked]:
            raise NoAnswer("not finite")
        return answers(prompts_asked, *more, **options)

    worker._interview._source.answers = broken
    part = worker.work(task)
    assert part.rejected == {**sound.rejected, doc_id: "not_answered"}
    assert part.dialogues == [line for line in sound.dialogues if line["id"] != doc_id]


def test_its_progress_moves_within_a_part(tiny_recipe, monkeypatch):
    """Progress moves by dialogues that are answered to their end."""
    monkeypatch.setattr("preprocess.regenerate.Progress", Shown)
    with without_ray():
        regenerate(with_answers(tiny_recipe, batch=4, dialogues_per_part=60, max_new_tokens=8))
    done = [done for done, _ in Shown.last.shown]
    assert done == sorted(done) and Shown.last.shown[-1] == (60, 60) and len(set(done)) > 6


def test_top_k_of_one_is_greedy(tiny_recipe):
    assert sampled(tiny_recipe, top_k=1) == sampled(tiny_recipe, temperature=0.0)


def test_no_answer_runs_past_the_targets_positions(tiny_recipe, monkeypatch):
    """1,024 of them; the longest questions that leave room for an answer are asked, the others are not."""
    positions = 1024
    longer = tiny_recipe.model_copy(update={"data": tiny_recipe.data.model_copy(update={"max_length": 5000})})
    with pytest.raises(PipelineError, match="leaves no room for a question"):
        AnswerWorker(with_answers(longer, max_new_tokens=positions)).ready()
    short, long = (Dialogue(str(length), messages("x" * length, "a"), ()) for length in (20, 100))
    recipe = with_answers(longer, max_new_tokens=positions - 60)
    AnswerWorker(recipe).ready()
    part, (prompt,) = ask(monkeypatch, recipe, TOKENIZER, ids_of("so<|end|>"), short, long)
    assert part.rejected == {"100": "too_long"} and len(ids_of(prompt)) <= 60


@pytest.mark.parametrize(
    ("ids", "loop"),
    [
        ([7] * 32, True),
        ([7] * 31, False),
        ([1, 2, 3] * 11, True),
        (list(range(500)), False),
        ([*range(100), *list(range(64)) * 4], True),
        ([*range(100), *list(range(64)) * 3], False),
        ([*[7] * 32, 8], True),
        ([*[7] * 24, *range(8, 17)], False),
        ([token for line in range(9) for token in (5, 6, 100 + line, 7, 8, 9)], True),  # counts
        ([token for line in range(9) for token in (5, 100 + line, 200 + line, 7)], False),
    ],
)
def test_what_counts_as_a_loop(ids, loop):
    assert repeats_itself(ids) is loop


TWO = Dialogue("two", messages("one", "x", "two", "y"), ())


def ids_of(text: str, tokenizer=TOKENIZER) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    ("reply", "answers", "rejected", "edits"),
    [
        ("hello there<|end|>", 2, {}, {}),
        ("<|end|>", 0, {"two": "empty_answer"}, {}),
        ("h" * 40, 0, {"two": "repetitive_answer"}, {}),
        ("hello there", 1, {}, {"cut_answer": 1}),
    ],
)
def test_a_loop_an_empty_and_a_cut_answer_end_a_dialogue(tiny_recipe, monkeypatch, reply, answers, rejected, edits):
    part, _ = ask(monkeypatch, tiny_recipe, TOKENIZER, ids_of(reply), TWO)
    assert (part.answers, part.rejected, part.edits) == (answers, rejected, edits)
    assert part.tokens == max(answers, 1) * len(ids_of(reply))
    texts = [turn["content"] for dialogue in part.dialogues for turn in dialogue["messages"][1::2]]
    assert texts == ["hello there"] * answers


@pytest.mark.parametrize(
    ("template", "thought", "answer", "expected"),
    [
        (QWEN_3, "<think>\nhm\n", "</think>\n\nwell", {"content": "<think>\nhm\n</think>\n\nwell"}),
        (QWEN_3_THINKING, "hm\n", "</think>\n\nwell", {"content": "hm\n</think>\n\nwell"}),
        (
            GPT_OSS,
            "<|channel|>analysis<|message|>hm",
            "<|end|><|start|>assistant<|channel|>final<|message|>well",
            {"content": "well", "reasoning_content": "hm"},
        ),
    ],
    ids=["qwen-3", "qwen-3, thinking", "gpt-oss"],
)
def test_thoughts_stay_with_their_answer_and_are_no_answer_by_themselves(
    tiny_recipe, monkeypatch, template, thought, answer, expected
):
    tokenizer = tokenizer_with_settings(template)
    data = tiny_recipe.data.model_copy(update={"max_length": 1000})
    recipe = with_answers(tiny_recipe.model_copy(update={"data": data}), max_new_tokens=100)

    def answer_with(text: str, *stop: int) -> tuple[Part, list[str]]:
        return ask(monkeypatch, recipe, tokenizer, [*ids_of(text, tokenizer), *stop], TWO)

    full_part, prompts = answer_with(thought + answer, tokenizer.eos_token_id)
    assert full_part.dialogues[0]["messages"][1] == {"role": "assistant", **expected} and not full_part.edits
    assert len(prompts) == full_part.answers == 2 and "hm" not in prompts[1]
    assert answer_with(thought)[0].rejected == {"two": "cut_in_thoughts"}
    cut, _ = answer_with(thought + answer)
    assert cut.edits == {"cut_answer": 1} and cut.answers == 1


def test_greedy_with_a_choice_is_refused(tiny_recipe):
    tree = tiny_recipe.model_dump(mode="json") | {"regenerate": {"top_k": 5}}
    with pytest.raises(ValueError, match="choose nothing at temperature 0"):
        Recipe.model_validate(tree)


# -- the job -------------------------------------------------------------------------------------------------------


def command(recipe: Path, *overrides: str) -> list[str]:
    return [sys.executable, "preprocess/regenerate.py", str(recipe), *override_arguments(overrides)]


@pytest.fixture(scope="module")
def job(tiny_target, tmp_path_factory) -> tuple[Path, Path]:
    """(recipe file, result folder) of a whole job with many small parts."""
    folder = tmp_path_factory.mktemp("regenerate")
    source = write_sharegpt(folder / "data.json", 40)
    records = json.loads(source.read_text())
    source.write_text(json.dumps([*records, {"id": "broken"}, records[0]]))
    tree = recipe_tree(tiny_target, source, folder / "run")
    tree["regenerate"] = {"temperature": 1.0, "max_new_tokens": 16, "dialogues_per_part": 4}
    recipe = write_recipe(tree, folder / "recipe")
    with without_ray():
        report = "\n".join(regenerate(load_recipe(recipe)))
    assert "42 records = " in report and "malformed 1" in report and "duplicate 1" in report
    return recipe, folder / "run" / "regenerated"


@pytest.mark.long
@pytest.mark.real
def test_killed_in_the_middle_and_run_again_gives_the_same_dialogues(job, tmp_path, warm):
    recipe, expected = job
    again = command(recipe, f"output={tmp_path}", "features.workers=2")
    parts = tmp_path / "regenerated/parts.jsonl"
    kill_when(again, lambda: parts.exists() and parts.stat().st_size > 0, **warm)
    assert 0 < len(parts.read_text().splitlines()) < 10
    with without_ray():
        regenerate(load_recipe(recipe, [f"output={tmp_path}"]))
    assert (tmp_path / "regenerated/dialogues.jsonl").read_bytes() == (expected / "dialogues.jsonl").read_bytes()


@pytest.mark.real
def test_what_is_damaged_is_made_again_and_other_settings_are_refused(job):
    recipe, folder = job
    intact = (folder / "dialogues.jsonl").read_bytes()
    answers, target = str(folder / "dialogues.jsonl"), fingerprint(load_recipe(recipe).target)
    assert holds_answers_of(answers, target) and not holds_answers_of(answers, "0" * 16)
    assert not holds_answers_of(str(folder.parent / "d.json"), target)
    flip(folder / "parts.jsonl", 3)  # one part is answered again
    flip(folder / "dialogues.jsonl")
    assert not holds_answers_of(answers, target)
    with without_ray():
        regenerate(load_recipe(recipe))
    assert (folder / "dialogues.jsonl").read_bytes() == intact and holds_answers_of(answers, target)
    message = r"answers of another target or other settings: seed: 0 -> 3, regenerate.temperature: 1.0 -> 0.5\. Use"
    with pytest.raises(PipelineError, match=message):
        regenerate(load_recipe(recipe, ["regenerate.temperature=0.5", "regenerate.batch=7", "seed=3"]))


@pytest.mark.real
def test_every_dialogue_is_accounted_for_and_the_dump_takes_the_result(job):
    recipe_file, folder = job
    rejected = Counter(line["doc_id"] for line in lines(folder / "rejected.jsonl"))
    answered = Counter(line["id"] for line in lines(folder / "dialogues.jsonl"))
    assert answered + rejected == Counter([*(f"doc{n}" for n in range(40)), "broken", "doc0"])
    recipe = load_recipe(recipe_file, [f'data.source="{folder / "dialogues.jsonl"}"'])
    plan = DumpPlan(recipe, load_tokenizer(recipe.target))
    splits = {document.doc_id: task.split for task in plan.tasks() for document in task.documents}
    assert len(splits) > 20 and set(splits) <= set(answered)
    source = DumpPlan(load_recipe(recipe_file), load_tokenizer(recipe.target))
    split_of = {document.doc_id: task.split for task in source.tasks() for document in task.documents}
    assert all(split == split_of[doc_id] for doc_id, split in splits.items() if doc_id in split_of)
    assert set(splits.values()) == {"train", "validation", "answers"}


def write_result(folder: Path, **manifest) -> Path:
    """A regeneration's result, and a manifest beside it that says this besides."""
    source = write_sharegpt(folder / "data.json", 3)
    path = folder / "dialogues.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in json.loads(source.read_text())))
    write_sealed(
        folder / "manifest.json", {"made_by": {"target": "0" * 16}, "dialogues_sha256": sha256(path)} | manifest
    )
    return path


def read_all(path: object) -> list[str]:
    return [dialogue.doc_id for dialogue in Intake(DataConfig(source=str(path)))]


def flip_an_answer(path: Path) -> None:
    """No JSON breaks by it: it was trained on."""
    flip(path, path.read_bytes().index(b"because") + 2)


@pytest.mark.parametrize("form", ["{}", "file://{}"])
@pytest.mark.parametrize(
    ("manifest", "damage", "message"),
    [
        ({}, flip_an_answer, r"dialogues\.jsonl was changed or damaged"),
        ({"dialogues_sha256": None}, lambda path: None, "its regeneration is not finished"),
        (
            {},
            lambda path: replace_once(path.with_name("manifest.json"), "0000", "0001"),
            r"manifest\.json was changed or damaged",
        ),
    ],
    ids=["an answer", "not finished", "the manifest"],
)
def test_what_was_regenerated_and_is_not_whole_is_no_source(tmp_path, form, manifest, damage, message):
    path = write_result(tmp_path, **manifest)
    damage(path)
    for _ in range(2):
        with pytest.raises(PipelineError, match=rf"{message} .*Run jakiro regenerate again"):
            read_all(form.format(path))


@pytest.mark.parametrize("form", ["{}", "file://{}"])
def test_what_was_regenerated_is_a_source(tmp_path, form):
    path = write_result(tmp_path)
    assert read_all(form.format(path)) == ["doc0", "doc1", "doc2"]
    flip_an_answer(path)
    write_sealed(tmp_path / "manifest.json", {"made_by": {}, "dialogues_sha256": sha256(path)})
    assert len(read_all(form.format(path))) == 3


@pytest.mark.parametrize("content", ["", "[3]", '{"files": ["dialogues.jsonl"]}', '{"made_by": "me"}', '{"seal": "x"}'])
def test_somebody_elses_manifest_does_not_matter(tmp_path, content):
    path = write_result(tmp_path)
    (tmp_path / "manifest.json").write_text(content)
    flip_an_answer(path)
    assert len(read_all(path)) == 3
    assert len(read_all(path.rename(tmp_path / "answers.jsonl"))) == 3


def test_what_nobody_asks_or_nobody_gives_results_for_is_left_out_and_counted(tiny_recipe, tmp_path, monkeypatch):
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    prompts_asked = {"role": "user", "content": "why?"}
    answer, later = {"role": "assistant", "content": "so"}, {"role": "system", "content": "s"}
    records = [
        {"id": "text", "text": "once upon a time"},
        {"id": "tokens", "input_ids": [1, 2], "loss_mask": [0, 1]},
        {"id": "call", "messages": [prompts_asked, call]},
        {"id": "result", "messages": [prompts_asked, answer, {"role": "tool", "content": "x"}, answer]},
        {"id": "tools", "messages": [prompts_asked, answer], "tools": [tool]},
        {"id": "kept", "messages": [prompts_asked, answer, later, prompts_asked, answer], "user": "u1"},
    ]
    source = tmp_path / "data.json"
    source.write_text(json.dumps(records))
    data = tiny_recipe.data.model_copy(update={"source": str(source), "group": "user"})
    recipe, skipped = tiny_recipe.model_copy(update={"data": data}), Counter()
    (task,) = _tasks(recipe, Intake(data), skipped)
    assert [dialogue.doc_id for dialogue in task.documents] == ["tools", "kept"]
    assert skipped == {"no_turns": 2, "tool_calls": 2}
    tokenizer = tokenizer_with_settings(QWEN_3)
    tokenizer.chat_template = tool_templates.QWEN_3
    reply = [*ids_of("so", tokenizer), tokenizer.eos_token_id]
    part, prompts = ask(monkeypatch, recipe, tokenizer, reply, *task.documents)
    with_tools, without_tools = part.dialogues
    assert with_tools["tools"] == [tool] and ["<tools>" in text for text in prompts] == [True, False, False]
    assert without_tools["user"] == "u1"  # the same dialogues are held out
    assert [turn["role"] for turn in without_tools["messages"]][:2] == ["user", "assistant"]
    assert part.edits["later_system_dropped"] == 1


def test_a_source_that_changed_is_refused(tiny_recipe):
    task = next(_tasks(tiny_recipe, Intake(tiny_recipe.data), Counter()))
    record = AnswerWorker(with_answers(tiny_recipe, temperature=1.0, max_new_tokens=4)).work(task)
    assert task.is_done(record, tiny_recipe)
    changed = ShardTask("part", 0, task.documents[1:])
    with pytest.raises(PipelineError, match="made from other dialogues"):
        changed.is_done(record, tiny_recipe)
