"""A training that is far slower than its arithmetic says so, once; and the user's number of threads is kept."""

from types import SimpleNamespace

import pytest
import torch

from pipeline.drafts import build, parameter_count
from pipeline.drafts.eagle import EagleConfig
from pipeline.drafts.jakiro import JakiroConfig
from pipeline.drafts.parts.layers import shapes_of
from pipeline.lm.model import load_config
from pipeline.running.cores import cores
from train import acceptance, pace
from train.engine import engine
from train.loop import _Run
from train.pace import FACTOR, LOOKED_AT, OVERHEAD, Pace, matrix_speed, operations

SPEED = 1e9


@pytest.fixture
def draft(tiny_recipe):
    return build(
        EagleConfig(),
        shapes_of(load_config(tiny_recipe.target)),
    )


@pytest.fixture
def batches(draft) -> list:
    """One batch whose bare arithmetic takes half a second at SPEED."""
    tokens = round(0.5 * SPEED / operations(draft))
    return [SimpleNamespace(tokens_BT=torch.zeros(1, tokens, dtype=torch.long))]


@pytest.fixture
def watched(draft, monkeypatch) -> Pace:
    monkeypatch.setattr(pace, "matrix_speed", lambda *_: SPEED)
    return Pace(draft, torch.device("cpu"), torch.float32)


def said(watched: Pace, batches: list, *seconds: float) -> list[str]:
    return [line for line in (watched.looked_at(batches, one) for one in seconds) if line]


def test_steps_that_take_far_longer_than_their_arithmetic_are_told_once(watched, batches):
    slow = 0.5 * FACTOR + OVERHEAD + 1
    (line,) = said(watched, batches, *[slow] * 3 * LOOKED_AT)
    assert f"a step takes {slow:.2f} s, its bare arithmetic 0.50 s" in line and "OMP_NUM_THREADS" in line


def test_a_slow_first_step_and_single_slow_ones_are_nothing(watched, batches):
    assert not said(watched, batches, 100.0, *[0.6, 0.6, 100.0, 0.6, 100.0] * 4)


def test_what_becomes_slow_later_is_told(watched, batches):
    assert not said(watched, batches, *[1.0] * 20)
    assert len(said(watched, batches, *[100.0] * 20)) == 1


def test_small_drafts_may_take_what_no_arithmetic_explains(watched, draft):
    tiny = [SimpleNamespace(tokens_BT=torch.zeros(1, 10, dtype=torch.long))]
    assert not said(watched, tiny, *[0.9 * OVERHEAD] * 20)


def test_operations_are_those_of_every_branch_and_the_head(draft, tiny_recipe):
    shapes = shapes_of(load_config(tiny_recipe.target))
    head = shapes["vocab_size"] * shapes["hidden_size"]
    assert operations(draft) == 6 * parameter_count(draft) + 6 * head
    both = build(JakiroConfig(kind="jakiro"), shapes)
    assert operations(both) == 6 * parameter_count(both) + 10 * head


def test_the_machine_is_measured_with_one_thread_and_left_as_it_was():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert 1e8 < matrix_speed(torch.device("cpu"), torch.float32) < 1e14
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_it_is_told_in_the_log_and_in_the_metrics(caplog):
    written = []
    run = SimpleNamespace(
        _pace=SimpleNamespace(looked_at=lambda batches, seconds: f"{len(batches)} {seconds}"),
        _write=lambda kind, values: written.append((kind, values)),
    )
    _Run._look_at_pace(run, [1, 2], 3.0)
    assert written == [("slow", {"what": "2 3.0"})] and "2 3.0" in caplog.text


# -- threads ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("asked", "ranks", "got"), [("3", 2, 3), (None, 1, None), (None, 2, None)])
def test_a_rank_takes_the_users_threads_else_its_share(monkeypatch, threads, asked, ranks, got):
    monkeypatch.setattr(engine.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(engine, "get_accelerator", lambda: SimpleNamespace(device_name=lambda: "cpu"))
    monkeypatch.setenv("LOCAL_SIZE", str(ranks))
    monkeypatch.delenv("OMP_NUM_THREADS")
    if asked:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    engine.start_distributed()
    assert torch.get_num_threads() == (got or max(1, cores() // ranks))


@pytest.mark.parametrize(("asked", "got"), [("3", 3), (None, None)])
def test_decoding_takes_the_users_threads_else_all_cores(monkeypatch, threads, asked, got):
    monkeypatch.delenv("OMP_NUM_THREADS")
    if asked:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    seen = []
    monkeypatch.setattr(
        acceptance.Decoder, "_decoded", lambda *_: seen.append(torch.get_num_threads()) or SimpleNamespace(tau=1.0)
    )
    before = torch.get_num_threads()
    decoder = acceptance.Decoder.__new__(acceptance.Decoder)
    decoder._draft = SimpleNamespace(load_state_dict=lambda _: None, bind=lambda _: None)
    decoder._target, decoder._fingerprint = SimpleNamespace(embed_head=lambda _: None), ""
    decoder.tau({}, quiet=True)
    assert seen == [got or cores()] and torch.get_num_threads() == before
