"""One worker of the dump, without Ray: features that are the target's own, the same bytes whoever writes them."""

import hashlib
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
from hypothesis import given
from hypothesis import strategies as st

from pipeline.artifacts.features import feature_spec
from pipeline.basics.errors import NoAnswer, PipelineError
from pipeline.decoding.generate import Sampling, decode_plain
from pipeline.features.schema import FP8, quantise_states
from pipeline.features.shards import ANSWERS, FeatureStore, Manifest, ShardRecord, text_name
from pipeline.features.text import write_text_table
from pipeline.lm.chat import Encoded
from pipeline.recipe.recipe import Recipe
from preprocess.dump import worker as dump_worker
from preprocess.dump.interview import AnsweredPrompt
from preprocess.dump.task import ShardTask, set_threads
from preprocess.dump.worker import EncodedDocument, FeatureWorker, align_to_target_tokens, length_sorted_batches
from tests.kit import PATIENCE, write_sharegpt
from tests.preprocess.test_plan import planned, recipe_for


@pytest.fixture
def source(tmp_path) -> Path:
    return write_sharegpt(tmp_path / "data.json")


# -- batches ---------------------------------------------------------------------------------------------------------


def document(doc_id: str, length: int) -> EncodedDocument:
    mask = np.ones(length, np.uint8)
    mask[0] = 0
    return EncodedDocument(doc_id, (np.arange(length) * 7 + len(doc_id)).astype(np.int32) % 256, mask)


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 200), st.randoms())
def test_batches_keep_the_budget_lose_nothing_and_do_not_depend_on_the_order(lengths, budget, random):
    documents = [document(f"d{number}", length) for number, length in enumerate(lengths)]
    batches = list(length_sorted_batches(documents, budget))
    flat = [d for batch in batches for d in batch]
    assert sorted(d.doc_id for d in flat) == sorted(d.doc_id for d in documents)
    assert [len(d.input_ids) for d in flat] == sorted(lengths, reverse=True)
    for batch in batches:
        assert len(batch) == 1 or len(batch) * len(batch[0].input_ids) <= budget
    for batch, after in pairwise(batches):
        assert (len(batch) + 1) * len(batch[0].input_ids) > budget, f"{after[0].doc_id} had room"
    random.shuffle(documents)
    assert [d.doc_id for batch in length_sorted_batches(documents, budget) for d in batch] == [d.doc_id for d in flat]


# -- the worker ------------------------------------------------------------------------------------------------------


def float_recipe(tiny_target: Path, source: Path, **features) -> Recipe:
    return recipe_for(source, tiny_target, features={"stored_dtype": "float32", **features})


def listed(recipe: Recipe, folder: Path, task: ShardTask, record: ShardRecord) -> FeatureStore:
    """The manifest of one shard, with its table, as a dump has them."""
    spec = feature_spec(recipe)
    manifest = Manifest(spec, complete=True)
    if record.text is None:
        manifest.text[task.split] = write_text_table(folder / text_name(task.split), task.in_order, spec)
    (manifest.shards if record.text is None else manifest.answers).append(record)
    manifest.save(folder)
    return FeatureStore(folder, task.split, spec)


def dumped(recipe: Recipe, folder: Path, task: ShardTask) -> FeatureStore:
    return listed(recipe, folder, task, FeatureWorker(recipe, folder, feature_spec(recipe)).work(task))


def first_task(recipe: Recipe) -> ShardTask:
    return planned(recipe)[1][0]


@pytest.mark.parametrize(("batch_tokens", "tolerance"), [(1, 0.0), (512, 1e-5)], ids=["one by one", "padded"])
def test_features_are_the_targets_own_hidden_states(
    tmp_path, source, tiny_target, loaded_target, batch_tokens, tolerance
):
    """The states are those of the single unpadded dialogue, as transformers gives them, and the head
    computes the model's logits from them.
    """
    recipe = float_recipe(tiny_target, source, batch_tokens=batch_tokens)
    task = first_task(recipe)
    assert len({len(d.input_ids) for d in task.documents}) > 1
    store = dumped(recipe, tmp_path / "features", task)
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


def test_a_shard_has_the_same_bytes_whoever_writes_it(tmp_path, source, tiny_target):
    recipe = float_recipe(tiny_target, source)
    task = first_task(recipe)
    spec = feature_spec(recipe)
    worker, second = (FeatureWorker(recipe, tmp_path / name, spec) for name in ("one", "other"))
    first = worker.work(task)
    written = (tmp_path / "one" / first.name).read_bytes()
    again = worker.work(ShardTask(task.split, task.index, task.documents[::-1]))
    second.work(ShardTask(task.split, 5, task.documents[:3]))  # what else a worker has done leaves no trace
    third = second.work(task)
    assert first == again == third
    assert (tmp_path / "one" / first.name).read_bytes() == written
    assert (tmp_path / "other" / first.name).read_bytes() == written


def test_several_batches_in_flight_give_the_same_bytes(tmp_path, source, tiny_target):
    """The case of a target over several GPUs; every heartbeat names all dialogues that are being forwarded."""
    recipe = float_recipe(tiny_target, source, batch_tokens=1, auxiliary_layers=[1, 2])
    task, heartbeats = first_task(recipe), []
    wide = recipe.with_features(gpus_per_worker=3)
    worker_one = FeatureWorker(recipe, tmp_path / "one", feature_spec(recipe))
    three = FeatureWorker(wide, tmp_path / "three", feature_spec(recipe), lambda items, _: heartbeats.append(items))
    forward, meeting = three._forward, threading.Barrier(3)

    def together(batch):
        if len(heartbeats) <= 3:
            meeting.wait(PATIENCE)
        return forward(batch)

    three._forward = together
    name = worker_one.work(task).name
    assert three.work(task).name == name
    assert (tmp_path / "three" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()
    named = {doc_id for ids in heartbeats for doc_id in ids}
    assert max(map(len, heartbeats)) == 3 and named == {document.doc_id for document in task.documents}


# Of the columns of such a shard, as they were written by one thread from rows on the host.
GOLDEN = {
    "bfloat16": "3cec73f0353cd320",
    "float16": "f2e0de852544dcd3",
    "float32": "cbd1310f22ce7db7",
    "float8_e4m3fn": "fd229d52d6177470",
}


def drawn(batch: list[EncodedDocument], seed: int = 0) -> list[torch.Tensor]:
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
            for copy, original in zip(sent, tensors, strict=True):
                copy.copy_(original)

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
        worker._forward = drawn if stored_dtype != FP8 else lambda batch: map(quantise_states, drawn(batch))
        record = worker.work(task)
        written.append((tmp_path / name / record.name).read_bytes())
        assert record.rows == len(task.documents) and not worker._active_work.now
        monkeypatch.setattr(dump_worker, "to_host", late())
    assert written[0] == written[1]
    state, reader = hashlib.sha256(), pa.ipc.open_file(pa.BufferReader(written[0]))
    for number in range(reader.num_record_batches):
        row, *columns = reader.get_batch(number).columns
        text = task.in_order[row[0].as_py()]
        state.update(text.input_ids.tobytes() + text.loss_mask.tobytes())
        for column in columns:
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
    assert (ordered[2],) in worker._active_work.now and (ordered[1],) not in worker._active_work.now


def test_a_layer_that_the_target_does_not_have_is_refused(source, tiny_target):
    with pytest.raises(PipelineError, match=r"auxiliary_layers=\[3\], but .* has 2 layers"):
        feature_spec(float_recipe(tiny_target, source, auxiliary_layers=[3]))


@pytest.mark.parametrize(
    ("stored_dtype", "value"),
    [
        ("float32", float("nan")),
        ("float32", float("inf")),
        ("float32", float("-inf")),
        ("float16", 1e6),  # which is finite in the target's arithmetic
    ],
)
def test_dialogues_whose_features_are_not_finite_are_rejected_by_id(tmp_path, source, tiny_target, stored_dtype, value):
    recipe = float_recipe(tiny_target, source, stored_dtype=stored_dtype)
    task = first_task(recipe)
    bad = task.documents[2]
    worker = FeatureWorker(recipe, tmp_path / "features", feature_spec(recipe))
    forward = worker._forward

    def spoilt(batch):
        for document, states_TSD in zip(batch, forward(batch), strict=True):
            states_TSD = states_TSD.clone()
            if document is bad:
                states_TSD[-1, 0, 5] = value
            yield states_TSD

    worker._forward = spoilt
    record = worker.work(task)
    assert record.rejected == {bad.doc_id: "features_not_finite"}
    assert record.rows == len(task.documents) - 1
    store = listed(recipe, tmp_path / "features", task, record)
    assert {store.row(index).doc_id for index in range(len(store))} == {d.doc_id for d in task.documents} - {bad.doc_id}


def test_the_answers_are_plain_decodings_and_the_features_theirs(source, tiny_target, loaded_target):
    recipe = recipe_for(source, tiny_target, features={"stored_dtype": "float32"})
    folder = recipe.paths.features
    (task,) = [task for task in planned(recipe)[1] if task.split == ANSWERS]
    beats = []
    worker = FeatureWorker(recipe, folder, feature_spec(recipe), lambda items, done: beats.append((items, done)))
    record = worker.work(task)
    assert record.documents == task.fingerprint  # of the prompts: what a dump that goes on compares
    store = listed(recipe, folder, task, record)
    prompts = {document.doc_id: document.input_ids.tolist() for document in task.documents}
    assert len(store) == len(prompts) == 4
    named = [items for items, _ in beats]
    assert all(named.count((doc_id,)) > 1 for doc_id in prompts)  # while it is answered, too
    counted = [done for _, done in beats]
    assert counted == sorted(counted) and len(set(counted)) >= 4  # it moves answer by answer
    assert counted[-1] < worker._active_work.done == record.tokens  # what was said and what was read, each once
    for number in range(len(store)):
        row = store.row(number)
        prompt = prompts[row.doc_id]
        answer = decode_plain(loaded_target, prompt, Sampling(12, frozenset(loaded_target.stop_ids()))).tokens
        assert row.input_ids.tolist() == prompt + answer
        assert row.loss_mask.tolist() == [0] * len(prompt) + [1] * len(answer)
        expected = loaded_target.capture(torch.tensor([prompt + answer]))[0]
        assert torch.allclose(row.hidden_TD, expected, atol=1e-5)
    (doc_id, *_) = prompts
    answers = worker._source.answers

    def broken(prompts_asked, *options, **more):  # of the first prompt, logits that are not finite
        if prompts_asked[0].tokens == prompts[doc_id]:
            raise NoAnswer("not finite")
        return answers(prompts_asked, *options, **more)

    worker._source.answers = broken
    for set_aside, reason in (({}, "not_answered"), ({doc_id: "kills_workers"}, "kills_workers")):
        result = worker.work(replace(task, set_aside=set_aside))
        assert result.rows == 3 and result.rejected == {doc_id: reason} and result.text.rows == 4
        store = listed(recipe, folder, task, result)
        assert doc_id not in [store.texts.doc_id(number) for number in range(len(store))]


# -- the target's own answers to the source's questions ---------------------------------------------------------------

ANSWERED_PROMPTS = [
    AnsweredPrompt([1, 2, 3, 7], torch.arange(4.0)[:, None, None]),
    AnsweredPrompt([1, 2, 3, 8, 4, 5, 9], None),
]


@pytest.mark.parametrize(
    ("ids", "mask", "expected_length"),
    [
        ([1, 2, 3, 8, 4, 5, 9, 6], [0, 0, 1, 1, 0, 1, 1, 0], 7),  # the template's end of the turn goes
        ([1, 2, 3, 8, 4, 5, 9, 7, 6], [0, 0, 1, 1, 0, 1, 1, 1, 0], 7),  # so does an end that the target did not give
        ([1, 2, 3, 8, 4, 5, 7, 6], [0, 0, 1, 1, 0, 1, 1, 1], 6),  # or one in place of its last token
        ([1, 2, 3, 8, 4], [0, 0, 1, 1, 0], 5),  # what is cut at data.max_length was computed
        ([1, 2, 3, 7, 4, 5, 9], [0, 0, 1, 1, 0, 1, 1], None),  # of what follows the first answer nothing was
        ([1, 2, 5, 8, 4, 5, 9], [0, 0, 1, 1, 0, 1, 1], None),  # other tokens of the same text
        ([1, 2, 3, 7, 6], [0, 0, 1, 1, 0], 4),  # the first answer by itself
    ],
)
def test_a_sequence_is_what_the_target_read_and_said(ids, mask, expected_length):
    aligned = align_to_target_tokens("d", Encoded(np.array(ids, np.int32), np.array(mask, np.uint8)), ANSWERED_PROMPTS)
    if expected_length is None:
        assert aligned is None
        return
    assert aligned.input_ids.tolist() == ids[:expected_length] and aligned.loss_mask.tolist() == mask[:expected_length]
    first = ids[:4] == ANSWERED_PROMPTS[0].tokens
    assert aligned.states_TSD is None if not first else aligned.states_TSD[:, 0, 0].tolist() == [0, 1, 2, 3]


def test_what_the_target_said_is_named_by_the_dialogue_that_was_asked(tmp_path, source, tiny_target):
    """One may give several sequences; who loses a worker is set aside by the dialogue."""
    recipe, beats = float_recipe(tiny_target, source, auxiliary_layers=[1, 2]), []
    worker = FeatureWorker(recipe, tmp_path, feature_spec(recipe), lambda items, _: beats.append(items))
    worker._forward = drawn
    batch = [replace(document(f"a#{place}", 9), answered_dialogue="a") for place in range(2)]
    worker._wait_for(worker._compute([*batch, document("b", 8)]))
    assert beats == [("a", "b")] and not worker._active_work.now


@pytest.mark.parametrize(("variable", "got"), [("2", 2), ("8", 3), (None, 3)])
def test_a_worker_takes_the_recipes_threads_or_fewer_where_the_user_says_so(monkeypatch, variable, got):
    monkeypatch.delenv("OMP_NUM_THREADS")
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    before = torch.get_num_threads()
    try:
        set_threads(3)
        assert torch.get_num_threads() == got
    finally:
        torch.set_num_threads(before)
