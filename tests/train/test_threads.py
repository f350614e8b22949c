"""The user's number of threads is kept; without one a rank takes its share of the cores, and decoding all of them."""

from types import SimpleNamespace

import pytest
import torch

from pipeline.running.cores import count_cores
from train import acceptance
from train.engine import engine


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("user_threads", "ranks", "got"), [("3", 2, 3), (None, 1, None), (None, 2, None)])
def test_a_rank_takes_the_users_threads_else_its_share(monkeypatch, threads, user_threads, ranks, got):
    monkeypatch.setattr(engine.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(engine, "get_accelerator", lambda: SimpleNamespace(device_name=lambda: "cpu"))
    monkeypatch.setenv("LOCAL_SIZE", str(ranks))
    monkeypatch.delenv("OMP_NUM_THREADS")
    if user_threads:
        monkeypatch.setenv("OMP_NUM_THREADS", user_threads)
    engine.start_distributed()
    assert torch.get_num_threads() == (got or max(1, count_cores() // ranks))


@pytest.mark.parametrize(("user_threads", "got"), [("3", 3), (None, None)])
def test_decoding_takes_the_users_threads_else_all_cores(monkeypatch, threads, user_threads, got):
    monkeypatch.delenv("OMP_NUM_THREADS")
    if user_threads:
        monkeypatch.setenv("OMP_NUM_THREADS", user_threads)
    used_threads = []
    monkeypatch.setattr(
        acceptance.Decoder,
        "_decode_prompts",
        lambda *_: used_threads.append(torch.get_num_threads()) or SimpleNamespace(tau=1.0),
    )
    before = torch.get_num_threads()
    decoder = acceptance.Decoder.__new__(acceptance.Decoder)
    decoder._draft = SimpleNamespace(load_state_dict=lambda _: None, bind=lambda _: None)
    decoder._target, decoder._fingerprint = SimpleNamespace(embed_head=lambda _: None), ""
    decoder.tau({}, quiet=True)
    assert used_threads == [got or count_cores()] and torch.get_num_threads() == before
