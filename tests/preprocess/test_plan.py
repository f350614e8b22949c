"""Planning the dump: every record is accounted for, and the plan is the same on every run."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.basics.errors import PipelineError
from pipeline.features.shards import ANSWERS, ShardRecord
from pipeline.lm.chat import encode
from pipeline.recipe.recipe import Recipe
from preprocess.dump.plan import DumpPlan
from preprocess.dump.task import ShardTask
from preprocess.dump.worker import EncodedDocument
from preprocess.sources.dialogues import clean, record_id
from preprocess.sources.groups import held_out
from preprocess.sources.intake import Intake
from tests.kit import byte_tokenizer, recipe_tree, write_sharegpt
from tests.templates import QWEN_3, tokenizer_with_settings

TOKENIZER = byte_tokenizer()


def recipe_for(source: Path, target: Path = Path("no-target"), **changes) -> Recipe:
    """The tiny recipe with changed sections, for instance ``data={"max_tokens": 10}``."""
    tree = recipe_tree(target, source, source.parent / "run")
    for section, values in changes.items():
        tree[section] |= values
    return Recipe.model_validate(tree)


def planned(recipe: Recipe) -> tuple[DumpPlan, list[ShardTask]]:
    plan = DumpPlan(recipe, TOKENIZER)
    return plan, list(plan.tasks())


def as_if_written(tasks: list[ShardTask], drop: int = 0) -> list[ShardRecord]:
    """The records that workers would return of the source's dialogues; `drop` of each shard turn out not finite."""
    shards = []
    for task in (task for task in tasks if task.split != ANSWERS):
        late = {document.doc_id: "features_not_finite" for document in task.documents[:drop]}
        rows = len(task.documents) - len(late)
        shards.append(ShardRecord("", task.split, task.index, rows, 0, 0, 0, "", late))
    return shards


def documents_of(tasks: list[ShardTask], split: str) -> list[EncodedDocument]:
    return [document for task in tasks if task.split == split for document in task.documents]


def fingerprint(tasks: list[ShardTask]) -> list:
    return [
        (task.split, task.index, [(d.doc_id, d.input_ids.tolist(), d.loss_mask.tolist()) for d in task.documents])
        for task in tasks
    ]


@pytest.fixture
def source(tmp_path) -> Path:
    return write_sharegpt(tmp_path / "data.json")


# -- the plan --------------------------------------------------------------------------------------------------------

TEXTS = ["hi", "x" * 400, " ", "é😀", "why?", "because"]
ROLES = ["human", "gpt", "human", "gpt", "human", "gpt", "system", "user", "bing", "tool", "critic"]
JUNK = [None, 3, "text", [], {"id": "x"}, {"conversations": [3]}]
JUNK += [{"text": "once upon"}, {"text": "x"}, {"prompt": "why?", "completion": "because"}]
JUNK += [
    {"input_ids": ids, "loss_mask": mask} for ids in ([1, 2, 3], [9, 999, 9]) for mask in ([0, 1, 0], [1, 1, 1], [1])
]
JUNK += [{"instruction": "why?", "output": "so", "tools": tools} for tools in ("[" * 99_999, [3], [{"name": "f"}])]


@st.composite
def messy_records(draw) -> list:
    """Two of three records are clean two-turn dialogues; ids repeat, are missing, and share conversations."""
    records = []
    for number in range(draw(st.integers(1, 40))):
        kind = draw(st.integers(0, 5))
        doc_id = draw(st.sampled_from([f"conv{number}_{number % 3}", f"conv{number % 7}", number % 5, None]))
        roles = ["human", "gpt"] if kind < 4 else draw(st.lists(st.sampled_from(ROLES), max_size=5))
        texts = ["why?", f"because {number % 20}"] if kind < 4 else [draw(st.sampled_from(TEXTS)) for _ in roles]
        turns = [{"from": role, "value": text} for role, text in zip(roles, texts, strict=True)]
        records.append(draw(st.sampled_from(JUNK)) if kind == 5 else {"id": doc_id, "conversations": turns})
    return records


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messy_records(), st.integers(0, 2), st.integers(1, 20))
def test_every_record_is_accepted_rejected_or_skipped(tmp_path, records, drop, limit):
    source = tmp_path / "messy.json"
    source.write_text(json.dumps(records))
    recipe = recipe_for(source, data={"max_dialogues": limit}, features={"rows_per_shard": 3})
    plan, tasks = planned(recipe)
    counts = plan.accounting(as_if_written(tasks, drop))
    assert counts["records"] == len(records)
    rejected, skipped = sum(counts["rejected"].values()), sum(counts["skipped"].values())
    assert counts["accepted"] + rejected + skipped == len(records)

    train, validation = documents_of(tasks, "train"), documents_of(tasks, "validation")
    by_id = {dialogue.doc_id: dialogue for dialogue in Intake(recipe.data)}
    fraction = recipe.data.heldout_fraction
    questions = [{by_id[document.doc_id].question for document in split} for split in (train, validation)]
    assert not (questions[0] & questions[1]) - {None}
    assert not any(held_out(by_id[document.doc_id].group, fraction) for document in train)
    assert all(held_out(by_id[document.doc_id].group, fraction) for document in validation)
    assert len(train) <= limit
    assert len(validation) <= recipe.data.validation_dialogues

    accepted = [document.doc_id for document in train + validation]
    assert len(set(accepted)) == len(accepted)
    record_ids = {record_id(record) for record in records}
    assert {doc_id.partition("@")[0] for doc_id in (*accepted, *(doc_id for doc_id, _ in plan.rejected))} <= record_ids
    for document in train + validation:
        assert 0 < document.loss_mask.sum() < len(document.input_ids) <= recipe.data.max_length
    for split in ("train", "validation"):
        shards = [task for task in tasks if task.split == split]
        assert [task.index for task in shards] == list(range(len(shards)))
        assert all(len(task.documents) == 3 for task in shards[:-1])
    assert fingerprint(tasks) == fingerprint(planned(recipe)[1])


def write_spoilt(tmp_path: Path) -> Path:
    """Twelve good records, nine that are rejected or edited, a torn end."""
    good = json.loads(write_sharegpt(tmp_path / "data.json", 12).read_text())
    turns = good[0]["conversations"]
    spoilt = [
        {"id": "m", "conversations": 3},
        {"id": "u", "conversations": [{"from": "critic", "value": "x"}]},
        {"id": "b", "conversations": [{"from": "human", "value": " "}]},
        {"id": "n", "conversations": turns[:1]},
        {"id": "r", "conversations": turns[:1] * 2},
        good[3],
        {"id": "late", "conversations": [{"from": "human", "value": "x" * 500}, turns[1]]},
        {"id": "edit", "conversations": [turns[1], *turns, {"from": "human", "value": "?"}, turns[1], turns[0]]},
        {"id": "again", "conversations": turns},
    ]
    source = tmp_path / "spoilt.json"
    source.write_text(json.dumps(good + spoilt)[:-1])
    return source


def test_planning_processes_change_nothing(tmp_path, tiny_target):
    source, results = write_spoilt(tmp_path), []
    limits = {"max_dialogues": 7, "validation_dialogues": 1}
    for planners in (1, 2):
        recipe = recipe_for(source, tiny_target, data=limits, features={"planners": planners})
        plan, tasks = planned(recipe)
        results.append((fingerprint(tasks), plan.accounting(as_if_written(tasks)), plan.rejected, plan.prompts))
    assert results[0] == results[1] and results[0][1]["rejected"] and results[0][1]["skipped"]


def test_each_fate_is_counted_under_its_name(tmp_path):
    plan, tasks = planned(recipe_for(write_spoilt(tmp_path), data={"heldout_fraction": 0.0, "repeated": "reject"}))
    assert plan.accounting(as_if_written(tasks)) == {
        "records": 21,
        "further_sequences": 0,
        "accepted": 13,
        "rejected": {
            "blank_turn": 1,
            "duplicate": 1,
            "duplicate_text": 1,
            "malformed": 1,
            "no_assistant_token": 1,
            "no_exchange": 1,
            "repeated_role": 1,
            "unknown_role": 1,
        },
        "skipped": {},
        "edits": {"leading_assistant_dropped": 1, "trailing_user_dropped": 1},
        "grouped": {"conversations": 0, "dialogues": 0, "shared_questions": 1, "sharing_dialogues": 2},
        "examples": {
            "malformed": "its keys are 'id', 'conversations'",
            "unknown_role": "its keys are 'id', 'conversations', its roles 'critic'",
        },
        "torn_tail_after": 21,
    }
    assert [doc_id for doc_id, _ in plan.rejected] == ["m", "u", "b", "n", "r", "doc3", "again", "late"]


@pytest.mark.parametrize("rule", ["cut", "turns", "windows"])
def test_answers_apart_are_documents_and_accounted_for(source, rule):
    """The template shows thoughts with the last answer only; training is full in the middle of a record."""
    recipe = recipe_for(source, data={"long": rule, "max_length": 200, "max_dialogues": 21})
    plan = DumpPlan(recipe, tokenizer_with_settings(QWEN_3, enable_thinking=False))
    tasks = list(plan.tasks())
    counts = plan.accounting(as_if_written(tasks, drop=1))
    rejected, skipped = sum(counts["rejected"].values()), sum(counts["skipped"].values())
    assert counts["accepted"] + rejected + skipped == counts["records"] + counts["further_sequences"]
    assert counts["further_sequences"] > 5 and counts["edits"]["one_sequence_per_answer"] > 5
    assert counts["skipped"]["train is full"] > 0
    train, validation = ({d.doc_id.split("#")[0] for d in documents_of(tasks, s)} for s in ("train", "validation"))
    assert len(documents_of(tasks, "train")) == 21 and not train & validation


def test_a_lost_dialogue_is_noticed(source):
    plan, tasks = planned(recipe_for(source))
    shards = as_if_written(tasks)
    with pytest.raises(PipelineError, match="60 records"):
        plan.accounting([replace(shards[0], rows=shards[0].rows - 1), *shards[1:]])


def test_documents_are_the_encoded_dialogues_in_the_order_of_the_source(source):
    recipe = recipe_for(source, features={"rows_per_shard": 7})
    records = json.loads(source.read_text())
    _, tasks = planned(recipe)
    for split in ("train", "validation"):
        indices = [task.index for task in tasks if task.split == split]
        assert indices == list(range(len(indices)))
    train = documents_of(tasks, "train")
    sizes = [len(task.documents) for task in tasks if task.split == "train"]
    assert sizes[:-1] == [7] * (len(train) // 7)
    assert [d.doc_id for d in train] == [r["id"] for r in records if not held_out(r["id"], 0.2)]
    by_id = {r["id"]: r for r in records}
    for document in train:
        (expected,) = encode(TOKENIZER, clean(by_id[document.doc_id]).messages, 160)
        assert document.input_ids.tolist() == expected.input_ids.tolist()
        assert document.loss_mask.tolist() == expected.loss_mask.tolist()


@pytest.mark.parametrize("limit", [{"max_tokens": 1000}, {"max_dialogues": 1}, {"max_dialogues": 9}], ids=str)
def test_training_stops_with_the_dialogue_that_reaches_a_limit_and_validation_does_not(source, limit):
    every = planned(recipe_for(source))[1]
    plan, tasks = planned(recipe_for(source, data=limit))
    train, unlimited = documents_of(tasks, "train"), documents_of(every, "train")
    assert [d.doc_id for d in train] == [d.doc_id for d in unlimited[: len(train)]]
    lengths = [len(document.input_ids) for document in train]
    if "max_tokens" in limit:
        assert sum(lengths[:-1]) < 1000 <= sum(lengths) == plan.tokens["train"]
    else:
        assert len(train) == limit["max_dialogues"]
    assert plan.skipped["train is full"] == len(unlimited) - len(train)
    held = [[d.doc_id for d in documents_of(task_list, "validation")] for task_list in (tasks, every)]
    assert held[0] == held[1] != []


@pytest.mark.parametrize("dialogues", [2, 5])
def test_held_out_dialogues_their_first_questions_and_calibration_prompts_behind_these(source, dialogues):
    """More prompts than dialogues can be had; no figure of training looks at what evaluation measures."""
    numbers = {"validation_dialogues": dialogues, "heldout_prompts": 3, "calibration_prompts": 4}
    plan, tasks = planned(recipe_for(source, data=numbers))
    records = {record["id"]: record for record in json.loads(source.read_text())}
    held = [doc_id for doc_id in records if held_out(doc_id, 0.2)]
    assert [document.doc_id for document in documents_of(tasks, "validation")] == held[:dialogues]
    assert plan.skipped["validation is full"] == len(held) - dialogues
    assert [prompt["question_id"] for prompt in plan.prompts] == held[:3]
    for prompt in plan.prompts:
        question, *rest = (turn["value"] for turn in records[prompt["question_id"]]["conversations"])
        assert prompt["turns"] == [question] and prompt["exchanges"] == [(question, rest[0]), (rest[1], rest[2])]
    (task,) = [task for task in tasks if task.split == ANSWERS]
    assert [document.doc_id for document in task.documents] == held[3:7] and task == tasks[-1]
    assert not any(document.loss_mask.any() for document in task.documents)
    none, tasks = planned(recipe_for(source, data={"calibration_prompts": 0}))
    assert not none.calibration and all(task.split != ANSWERS for task in tasks)


def test_a_calibration_prompt_leaves_room_for_its_answer(source):
    lengths = [len(document.input_ids) for document in planned(recipe_for(source))[0].calibration]
    most = 160 - max(lengths)  # tokens of an answer to the longest of them
    changed = recipe_for(source, features={"answer_tokens": most + 1})
    left = [len(document.input_ids) for document in planned(changed)[0].calibration]
    assert left and max(left) + most + 1 <= 160 and left != lengths


def test_a_prompt_longer_than_a_dialogue_may_be_is_not_offered(tmp_path):
    records = json.loads(write_sharegpt(tmp_path / "data.json", 4).read_text())
    records[0]["conversations"][0]["value"] = "x" * 400
    source = tmp_path / "long.json"
    source.write_text(json.dumps(records))
    plan, _ = planned(recipe_for(source, data={"heldout_fraction": 1.0}))
    assert [prompt["question_id"] for prompt in plan.prompts] == ["doc1", "doc2", "doc3"]
