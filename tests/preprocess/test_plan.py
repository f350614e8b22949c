"""Planning and dumping without Ray: every record accounted for, and features that are the target's own."""

import hashlib
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.artifacts.features import feature_spec
from pipeline.basics.errors import PipelineError
from pipeline.decoding.generate import Sampling, plain
from pipeline.features.shards import ANSWERS, FeatureStore, Manifest, ShardRecord
from pipeline.lm.chat import encode
from pipeline.recipe.recipe import Recipe
from preprocess.dump import worker as dump_worker
from preprocess.dump.plan import Plan
from preprocess.dump.task import ShardTask
from preprocess.dump.worker import Document, FeatureWorker, length_sorted_batches, take_threads
from preprocess.sources.dialogues import clean, record_id
from preprocess.sources.groups import held_out
from tests.kit import PATIENCE, byte_tokenizer, recipe_tree, write_sharegpt
from tests.templates import QWEN_3, settled

TOKENIZER = byte_tokenizer()


def recipe_for(source: Path, target: Path = Path("no-target"), **changes) -> Recipe:
    """The tiny recipe with changed sections, for instance ``data={"max_tokens": 10}``."""
    tree = recipe_tree(target, source, source.parent / "run")
    for section, values in changes.items():
        tree[section] |= values
    return Recipe.model_validate(tree)


def planned(recipe: Recipe) -> tuple[Plan, list[ShardTask]]:
    plan = Plan(recipe, TOKENIZER)
    return plan, list(plan.tasks())


def as_if_written(tasks: list[ShardTask], drop: int = 0) -> list[ShardRecord]:
    """The records that workers would return; `drop` dialogues of each shard turn out not finite."""
    shards = []
    for task in tasks:
        late = {document.doc_id: "features_not_finite" for document in task.documents[:drop]}
        rows = len(task.documents) - len(late)
        shards.append(ShardRecord("", task.split, task.index, rows, 0, 0, 0, "", late))
    return shards


def documents_of(tasks: list[ShardTask], split: str) -> list[Document]:
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
    fraction = recipe.data.heldout_fraction
    assert not any(held_out(document.doc_id, fraction) for document in train)
    assert all(held_out(document.doc_id, fraction) for document in validation)
    assert len(train) <= limit
    assert len(validation) <= recipe.data.validation_dialogues

    accepted = [document.doc_id for document in train + validation]
    assert len(set(accepted)) == len(accepted)
    known = {record_id(record) for record in records}
    assert {*accepted, *(doc_id for doc_id, _ in plan.rejected)} <= known
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
    source, found = write_spoilt(tmp_path), []
    limits = {"max_dialogues": 7, "validation_dialogues": 1}
    for planners in (1, 2):
        recipe = recipe_for(source, tiny_target, data=limits, features={"planners": planners})
        plan, tasks = planned(recipe)
        found.append((fingerprint(tasks), plan.accounting(as_if_written(tasks)), plan.rejected, plan.prompts))
    assert found[0] == found[1] and found[0][1]["rejected"] and found[0][1]["skipped"]


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
        "grouped": {"conversations": 0, "dialogues": 0},
        "torn_tail_after": 21,
    }
    assert dict(plan.rejected) == {
        "m": "malformed",
        "u": "unknown_role",
        "b": "blank_turn",
        "n": "no_exchange",
        "r": "repeated_role",
        "doc3": "duplicate",
        "late": "no_assistant_token",
        "again": "duplicate_text",
    }


def test_windows_of_long_dialogues_are_documents_of_their_own_and_accounted_for(source):
    plan, tasks = planned(recipe_for(source, data={"long": "windows", "max_length": 90}))
    counts = plan.accounting(as_if_written(tasks, drop=1))
    assert counts["further_sequences"] > 0 and counts["edits"]["cut_into_windows"] > 0
    rejected, skipped = sum(counts["rejected"].values()), sum(counts["skipped"].values())
    assert counts["accepted"] + rejected + skipped == counts["records"] + counts["further_sequences"]
    train, validation = ({d.doc_id.split("#")[0] for d in documents_of(tasks, s)} for s in ("train", "validation"))
    assert not train & validation


@pytest.mark.parametrize("rule", ["cut", "turns", "windows"])
def test_answers_apart_are_documents_and_accounted_for(source, rule):
    """Of a template that shows thoughts with the last answer only; training is full in the middle of a record."""
    recipe = recipe_for(source, data={"long": rule, "max_length": 200, "max_dialogues": 21})
    plan = Plan(recipe, settled(QWEN_3, enable_thinking=False))
    tasks = list(plan.tasks())
    counts = plan.accounting(as_if_written(tasks, drop=1))
    rejected, skipped = sum(counts["rejected"].values()), sum(counts["skipped"].values())
    assert counts["accepted"] + rejected + skipped == counts["records"] + counts["further_sequences"]
    assert counts["further_sequences"] > 5 and counts["edits"]["one_sequence_per_answer"] > 5
    assert counts["skipped"]["train is full"] > 0
    train, validation = ({d.doc_id.split("#")[0] for d in documents_of(tasks, s)} for s in ("train", "validation"))
    assert len(documents_of(tasks, "train")) == 21 and not train & validation


def test_features_that_are_not_finite_are_accounted_for_as_rejected(source):
    plan, tasks = planned(recipe_for(source))
    counts = plan.accounting(as_if_written(tasks, drop=1))
    shards = [task for task in tasks if task.split != ANSWERS]  # those are counted apart
    assert len(shards) == len(tasks) - 1
    assert counts["rejected"] == {"features_not_finite": len(shards)}
    assert counts["accepted"] == sum(len(task.documents) for task in shards) - len(shards)


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


def test_training_stops_with_the_dialogue_that_reaches_max_tokens(source):
    limit = 1000
    plan, tasks = planned(recipe_for(source, data={"max_tokens": limit}))
    lengths = [len(document.input_ids) for document in documents_of(tasks, "train")]
    assert sum(lengths[:-1]) < limit <= sum(lengths)
    unlimited = documents_of(planned(recipe_for(source))[1], "train")
    assert plan.skipped["train is full"] == len(unlimited) - len(lengths)


@pytest.mark.parametrize("limit", [1, 8, 9])
def test_training_stops_at_max_dialogues(source, limit):
    plan, tasks = planned(recipe_for(source, data={"max_dialogues": limit}))
    unlimited = documents_of(planned(recipe_for(source))[1], "train")
    train = documents_of(tasks, "train")
    assert [d.doc_id for d in train] == [d.doc_id for d in unlimited[:limit]]
    assert plan.skipped["train is full"] == len(unlimited) - limit


def test_limits_on_training_leave_validation_alone(source):
    validation = [
        [document.doc_id for document in documents_of(planned(recipe)[1], "validation")]
        for recipe in (recipe_for(source), recipe_for(source, data={"max_dialogues": 1}))
    ]
    assert validation[0] == validation[1] != []


def test_held_out_dialogues_are_dumped_up_to_their_limit(source):
    plan, tasks = planned(recipe_for(source, data={"validation_dialogues": 3, "heldout_prompts": 2}))
    held = [f"doc{number}" for number in range(60) if held_out(f"doc{number}", 0.2)]
    assert [document.doc_id for document in documents_of(tasks, "validation")] == held[:3]
    assert plan.skipped["validation is full"] == len(held) - 3


def test_evaluation_prompts_are_the_first_questions_of_held_out_dialogues(source):
    plan, _ = planned(recipe_for(source, data={"heldout_prompts": 5}))
    records = {r["id"]: r for r in json.loads(source.read_text())}
    held = [doc_id for doc_id in records if held_out(doc_id, 0.2)]
    assert [prompt["question_id"] for prompt in plan.prompts] == held[:5]
    for prompt in plan.prompts:
        assert prompt["turns"] == [records[prompt["question_id"]]["conversations"][0]["value"]]


def test_more_prompts_than_validation_dialogues_can_be_had(source):
    plan, tasks = planned(recipe_for(source, data={"validation_dialogues": 2, "heldout_prompts": 6}))
    assert len(plan.prompts) == 6
    assert len(documents_of(tasks, "validation")) == 2


def test_calibration_prompts_are_those_behind_the_evaluation_prompts(source):
    plan, tasks = planned(recipe_for(source, data={"heldout_prompts": 3, "calibration_prompts": 4}))
    held = [f"doc{number}" for number in range(60) if held_out(f"doc{number}", 0.2)]
    (task,) = [task for task in tasks if task.split == ANSWERS]
    assert [prompt["question_id"] for prompt in plan.prompts] == held[:3]
    assert [document.doc_id for document in task.documents] == held[3:7]
    assert not any(document.loss_mask.any() for document in task.documents)
    assert task == tasks[-1]
    none, tasks = planned(recipe_for(source, data={"calibration_prompts": 0}))
    assert not none.calibration and all(task.split != ANSWERS for task in tasks)


def test_a_calibration_prompt_leaves_room_for_its_answer(source):
    whole = [len(document.input_ids) for document in planned(recipe_for(source))[0].calibration]
    most = 160 - max(whole)  # of an answer beside the longest of them
    changed = recipe_for(source, features={"answer_tokens": most + 1})
    left = [len(document.input_ids) for document in planned(changed)[0].calibration]
    assert left and max(left) + most + 1 <= 160 and left != whole


def test_the_answers_are_plain_decodings_and_the_features_theirs(source, tiny_target, loaded_target):
    recipe = recipe_for(source, tiny_target, features={"stored_dtype": "float32"})
    folder = recipe.features_dir
    folder.mkdir(parents=True)
    (task,) = [task for task in planned(recipe)[1] if task.split == ANSWERS]
    worker = FeatureWorker(recipe, folder, feature_spec(recipe))
    record = worker.work(task)
    assert record.documents == task.fingerprint  # of the prompts: what a dump that goes on compares
    Manifest(feature_spec(recipe), [record], complete=True).save(folder)
    store = FeatureStore(folder, ANSWERS, feature_spec(recipe))
    prompts = {document.doc_id: document.input_ids.tolist() for document in task.documents}
    assert len(store) == len(prompts) == 4
    for number in range(len(store)):
        row = store.row(number)
        prompt = prompts[row.doc_id]
        answer = plain(loaded_target, prompt, Sampling(12, frozenset(loaded_target.stop_ids()))).tokens
        assert row.input_ids.tolist() == prompt + answer
        assert row.loss_mask.tolist() == [0] * len(prompt) + [1] * len(answer)
        own = loaded_target.capture(torch.tensor([prompt + answer]))[0]
        assert torch.allclose(row.hidden_TD, own, atol=1e-5)
    (doc_id, *_) = prompts
    head = worker._source._target.head

    def broken(hidden):  # after the first prompt's first token
        answered.append(1)
        return head(hidden) * (float("nan") if len(answered) == 1 else 1)

    answered = []
    worker._source._target.head = broken
    some = worker.work(task)
    worker._source._target.head = head
    assert some.rows == 3 and some.rejected == {doc_id: "not_answered"}
    aside = worker.work(replace(task, set_aside={doc_id: "kills_workers"}))
    assert aside.rows == 3 and aside.rejected == {doc_id: "kills_workers"}


def test_a_prompt_longer_than_a_dialogue_may_be_is_not_offered(tmp_path):
    records = json.loads(write_sharegpt(tmp_path / "data.json", 4).read_text())
    records[0]["conversations"][0]["value"] = "x" * 400
    source = tmp_path / "long.json"
    source.write_text(json.dumps(records))
    plan, _ = planned(recipe_for(source, data={"heldout_fraction": 1.0}))
    assert [prompt["question_id"] for prompt in plan.prompts] == ["doc1", "doc2", "doc3"]


# -- batches ---------------------------------------------------------------------------------------------------------


def document(doc_id: str, length: int) -> Document:
    mask = np.ones(length, np.uint8)
    mask[0] = 0
    return Document(doc_id, (np.arange(length) * 7 + len(doc_id)).astype(np.int32) % 256, mask)


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 200))
def test_batches_keep_the_budget_and_lose_nothing(lengths, budget):
    documents = [document(f"d{number}", length) for number, length in enumerate(lengths)]
    batches = list(length_sorted_batches(documents, budget))
    flat = [d for batch in batches for d in batch]
    assert sorted(d.doc_id for d in flat) == sorted(d.doc_id for d in documents)
    assert [len(d.input_ids) for d in flat] == sorted(lengths, reverse=True)
    for batch in batches:
        assert len(batch) == 1 or len(batch) * len(batch[0].input_ids) <= budget
    for batch, after in pairwise(batches):
        assert (len(batch) + 1) * len(batch[0].input_ids) > budget, f"{after[0].doc_id} had room"


def test_batches_do_not_depend_on_the_order_of_equally_long_dialogues():
    documents = [document(f"d{number}", 5) for number in range(7)]
    ids = [[[d.doc_id for d in b] for b in length_sorted_batches(given, 15)] for given in (documents, documents[::-1])]
    assert ids[0] == ids[1]


# -- the worker ------------------------------------------------------------------------------------------------------


def float_recipe(tiny_target: Path, source: Path, **features) -> Recipe:
    return recipe_for(source, tiny_target, features={"stored_dtype": "float32", **features})


def dumped(recipe: Recipe, folder: Path, tasks: list[ShardTask]) -> FeatureStore:
    spec = feature_spec(recipe)
    worker = FeatureWorker(recipe, folder, spec)
    Manifest(spec, [worker.work(task) for task in tasks], {}, complete=True).save(folder)
    return FeatureStore(folder, tasks[0].split, spec)


def first_task(recipe: Recipe) -> ShardTask:
    return planned(recipe)[1][0]


@pytest.mark.parametrize(("batch_tokens", "tolerance"), [(1, 0.0), (512, 1e-5)], ids=["one by one", "padded"])
def test_features_are_the_targets_own_hidden_states(
    tmp_path, source, tiny_target, loaded_target, batch_tokens, tolerance
):
    """Of the single unpadded dialogue, as transformers gives them; and the head makes the model's logits of them."""
    recipe = float_recipe(tiny_target, source, batch_tokens=batch_tokens)
    task = first_task(recipe)
    assert len({len(d.input_ids) for d in task.documents}) > 1
    store = dumped(recipe, tmp_path / "features", [task])
    documents = {d.doc_id: d for d in task.documents}
    assert {store.row(index).doc_id for index in range(len(store))} == set(documents)
    for index in range(len(store)):
        row = store.row(index)
        document = documents[row.doc_id]
        assert row.input_ids.tolist() == document.input_ids.tolist()
        assert row.loss_mask.tolist() == document.loss_mask.tolist()
        with torch.inference_mode():
            tokens = torch.from_numpy(document.input_ids.astype(np.int64))[None]
            out = loaded_target.model(input_ids=tokens, output_hidden_states=True)
            logits = loaded_target.head(row.hidden_TD)
        torch.testing.assert_close(row.hidden_TD, out.hidden_states[-1][0], rtol=0, atol=tolerance)
        torch.testing.assert_close(logits, out.logits[0], rtol=0, atol=20 * tolerance)


def test_features_are_stored_in_the_recipes_dtype(tmp_path, source, tiny_target):
    single, half = (
        dumped(recipe, tmp_path / recipe.features.stored_dtype, [first_task(recipe)])
        for recipe in (float_recipe(tiny_target, source, stored_dtype=dtype) for dtype in ("float32", "bfloat16"))
    )
    for index in range(len(single)):
        assert torch.equal(half.row(index).hidden_TD, single.row(index).hidden_TD.bfloat16())


def test_a_shard_has_the_same_bytes_whoever_writes_it(tmp_path, source, tiny_target):
    recipe = float_recipe(tiny_target, source)
    task = first_task(recipe)
    spec = feature_spec(recipe)
    one, other = (FeatureWorker(recipe, tmp_path / name, spec) for name in ("one", "other"))
    first = one.work(task)
    written = (tmp_path / "one" / first.name).read_bytes()
    again = one.work(ShardTask(task.split, task.index, task.documents[::-1]))
    other.work(ShardTask(task.split, 5, task.documents[:3]))  # what else a worker has done leaves no trace
    third = other.work(task)
    assert first == again == third
    assert (tmp_path / "one" / first.name).read_bytes() == written
    assert (tmp_path / "other" / first.name).read_bytes() == written


def test_several_batches_in_flight_give_the_same_bytes(tmp_path, source, tiny_target):
    """As with a target over several GPUs; every sign of life names all dialogues that are being forwarded."""
    recipe = float_recipe(tiny_target, source, batch_tokens=1, auxiliary_layers=[1, 2])
    task, told = first_task(recipe), []
    wide = recipe.with_features(gpus_per_worker=3)
    one = FeatureWorker(recipe, tmp_path / "one", feature_spec(recipe))
    three = FeatureWorker(wide, tmp_path / "three", feature_spec(recipe), told.append)
    forward, meeting = three._forward, threading.Barrier(3)

    def together(batch):
        if len(told) <= 3:
            meeting.wait(PATIENCE)
        return forward(batch)

    three._forward = together
    name = one.work(task).name
    assert three.work(task).name == name
    assert (tmp_path / "three" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()
    assert max(map(len, told)) == 3 and {doc_id for ids in told for doc_id in ids} == {d.doc_id for d in task.documents}


# Of the columns of such a shard, as they were written by one thread from rows on the host.
GOLDEN = {
    "bfloat16": "3cec73f0353cd320",
    "float16": "f2e0de852544dcd3",
    "float32": "cbd1310f22ce7db7",
    "float8_e4m3fn": "fd229d52d6177470",
}


def drawn(batch: list[Document], seed: int = 0) -> list[torch.Tensor]:
    """States of a batch: exact numbers, a token of zeros, layers that differ in size."""
    generator = torch.Generator().manual_seed(seed + len(batch[0].input_ids))
    shape = len(batch), len(batch[0].input_ids), 3, 32
    states_BTSD = torch.randint(-9999, 9999, shape, generator=generator) / 1024
    states_BTSD[:, 1] = 0
    states_BTSD *= torch.tensor([1.0, 30.0, 3000.0])[:, None]
    return [states_BTSD[b, : len(document.input_ids)] for b, document in enumerate(batch)]


def late(happen: Callable[[], None] = lambda: None) -> Callable:
    """`to_host` as an accelerator has it: the content is there once somebody has waited for it."""

    def to_host(tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], SimpleNamespace]:
        sent = [torch.full_like(tensor, 1) for tensor in tensors]

        def synchronize() -> None:
            happen()
            for here, there in zip(sent, tensors, strict=True):
                here.copy_(there)

        return sent, SimpleNamespace(synchronize=synchronize)

    return to_host


@pytest.mark.parametrize("stored_dtype", GOLDEN)
def test_every_stored_dtype_has_the_same_bytes_wherever_it_is_made(
    tmp_path, source, tiny_target, monkeypatch, stored_dtype
):
    recipe = float_recipe(tiny_target, source, stored_dtype=stored_dtype, auxiliary_layers=[1, 2], batch_tokens=128)
    task, spec = (
        ShardTask("train", 0, [document(f"d{number}", 9 + number) for number in range(9)]),
        feature_spec(recipe),
    )
    written = []
    for name in ("host", "accelerator"):
        worker = FeatureWorker(recipe, tmp_path / name, spec)
        worker._forward = drawn
        record = worker.work(task)
        written.append((tmp_path / name / record.name).read_bytes())
        assert record.rows == len(task.documents) and not worker._busy
        monkeypatch.setattr(dump_worker, "to_host", late())
    assert written[0] == written[1]
    state, reader = hashlib.sha256(), pa.ipc.open_file(pa.BufferReader(written[0]))
    for number in range(reader.num_record_batches):
        for column in reader.get_batch(number).columns[1:]:
            values = column.flatten()
            values = values.flatten() if pa.types.is_fixed_size_list(values.type) else values
            state.update(values.to_numpy().tobytes())
    assert state.hexdigest()[:16] == GOLDEN[stored_dtype]


@pytest.mark.parametrize("where", ["in a forward", "on the way to the host"])
def test_what_fails_ahead_of_the_writing_fails_the_shard(tmp_path, source, tiny_target, monkeypatch, where):
    """And leaves nothing half-written; until it has arrived, a batch counts as what the worker is busy with."""
    recipe = float_recipe(tiny_target, source, auxiliary_layers=[1, 2], batch_tokens=1)
    task, calls = first_task(recipe), []

    def third() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("the device is gone")

    worker = FeatureWorker(recipe, tmp_path / "features", feature_spec(recipe))
    worker._forward = lambda batch: (where == "in a forward" and third()) or drawn(batch)
    monkeypatch.setattr(dump_worker, "to_host", late(third if where != "in a forward" else lambda: None))
    with pytest.raises(RuntimeError, match="the device is gone"):
        worker.work(task)
    assert list((tmp_path / "features").iterdir()) == []
    ordered = [batch[0].doc_id for batch in length_sorted_batches(task.documents, 1)]
    assert (ordered[2],) in worker._busy and (ordered[1],) not in worker._busy


def test_auxiliary_layers_are_the_models_own(tmp_path, source, tiny_target, loaded_target):
    recipe = float_recipe(tiny_target, source, auxiliary_layers=[1, 2])
    task = first_task(recipe)
    store = dumped(recipe, tmp_path, [task])
    for index in range(len(store)):
        row = store.row(index)
        tokens = torch.from_numpy(row.input_ids.astype("int64"))[None]
        with torch.inference_mode():
            out = loaded_target.decoder(input_ids=tokens, output_hidden_states=True)
        assert torch.allclose(row.hidden_TD, out.last_hidden_state[0], atol=1e-5)
        assert torch.allclose(row.auxiliary_TKD[:, 0], out.hidden_states[1][0], atol=1e-5)
        assert torch.allclose(loaded_target.decoder.norm(row.auxiliary_TKD[:, 1]), row.hidden_TD, atol=1e-5)


def test_a_layer_that_the_target_does_not_have_is_refused(source, tiny_target):
    with pytest.raises(PipelineError, match=r"auxiliary_layers=\[3\], but .* has 2 layers"):
        feature_spec(float_recipe(tiny_target, source, auxiliary_layers=[3]))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_dialogues_whose_features_are_not_finite_are_rejected_by_id(tmp_path, source, tiny_target, value):
    recipe = float_recipe(tiny_target, source)
    task = first_task(recipe)
    bad = task.documents[2]
    worker = FeatureWorker(recipe, tmp_path / "features", feature_spec(recipe))
    capture = worker._source._target.capture

    def spoilt(tokens_BT):
        hidden_BTD = capture(tokens_BT).clone()
        for b, tokens in enumerate(tokens_BT.tolist()):
            if tokens[: len(bad.input_ids)] == bad.input_ids.tolist():
                hidden_BTD[b, len(bad.input_ids) - 1, 5] = value
            else:
                length = next(
                    len(d.input_ids) for d in task.documents if d.input_ids.tolist() == tokens[: len(d.input_ids)]
                )
                hidden_BTD[b, length:] = value  # padding is nobody's feature
        return hidden_BTD

    worker._source._target.capture = spoilt
    record = worker.work(task)
    assert record.rejected == {bad.doc_id: "features_not_finite"}
    assert record.rows == len(task.documents) - 1
    Manifest(feature_spec(recipe), [record], {}, complete=True).save(tmp_path / "features")
    store = FeatureStore(tmp_path / "features", "train", feature_spec(recipe))
    assert {store.row(index).doc_id for index in range(len(store))} == {d.doc_id for d in task.documents} - {bad.doc_id}


def test_features_too_large_for_the_stored_dtype_are_rejected(tmp_path, source, tiny_target):
    """What is finite in the target's arithmetic may be infinite in float16."""
    recipe = float_recipe(tiny_target, source, stored_dtype="float16")
    task = first_task(recipe)
    worker = FeatureWorker(recipe, tmp_path, feature_spec(recipe))
    capture = worker._source._target.capture
    worker._source._target.capture = lambda tokens_BT: capture(tokens_BT) * 1e6
    record = worker.work(task)
    assert record.rows == 0
    assert set(record.rejected) == {d.doc_id for d in task.documents}


@pytest.mark.parametrize(("asked", "got"), [("2", 2), ("8", 3), (None, 3)])
def test_a_worker_takes_the_recipes_threads_or_fewer_where_the_user_says_so(monkeypatch, asked, got):
    monkeypatch.delenv("OMP_NUM_THREADS")
    if asked:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    before = torch.get_num_threads()
    try:
        take_threads(3)
        assert torch.get_num_threads() == got
    finally:
        torch.set_num_threads(before)
