"""docs/adding-a-draft.md: its code is a draft like the others."""

import importlib
import re
import sys

import pytest
import torch

from pipeline.artifacts import checkpoint
from pipeline.decoding import replay
from pipeline.decoding.config import LoadedMethod, TreeConfig
from pipeline.decoding.generate import Sampling, decode_plain, decode_speculative
from pipeline.drafts import DRAFTS, Kind, build
from pipeline.drafts.parts.layers import draft_shapes
from tests.kit import ROOT
from tests.pipeline.taught import NEVER, greedy, prompt_of, taught


@pytest.fixture
def linear(monkeypatch, tmp_path):
    """The page's settings, their draft entered into the table as the page says."""
    file, entry = re.findall(r"```python\n(.*?)```", (ROOT / "docs/adding-a-draft.md").read_text(), re.DOTALL)
    (tmp_path / "linear_draft.py").write_text(file)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("linear_draft")
    monkeypatch.setitem(DRAFTS, "linear", None)  # taken out again after the test
    exec(entry, {**vars(module), "DRAFTS": DRAFTS, "Kind": Kind})
    yield module.LinearConfig
    del sys.modules["linear_draft"]


def test_the_pages_draft_is_trained_decoded_replayed_saved_and_loaded(
    linear, loaded_target, embed_head, tiny_recipe, tmp_path
):
    prompt = prompt_of(3)
    answer = greedy(loaded_target, prompt, 48)
    draft = taught(loaded_target, embed_head, linear(), prompt, answer)
    method = LoadedMethod(draft, TreeConfig(depth=3, top_k=3, nodes=9))
    for sampling in (Sampling(40, NEVER), Sampling(40, NEVER, temperature=0.8, seed=2)):
        got = decode_speculative(loaded_target, method, prompt, sampling)
        assert got.tokens == decode_plain(loaded_target, prompt, sampling).tokens
    got = decode_speculative(loaded_target, method, prompt, Sampling(40, NEVER))
    assert got.acceptance.tau > 2
    states = loaded_target.states(prompt + got.tokens)
    assert replay.replay_decoding(method, states, prompt + got.tokens, len(prompt)) == got.acceptance

    recipe = tiny_recipe.model_copy(update={"draft": tiny_recipe.draft | {"mine": linear()}})
    checkpoint.save(tmp_path / "mine", draft, draft.state_dict(), recipe, "mine", {})
    loaded = checkpoint.load(tmp_path / "mine", embed_head.fingerprint)
    assert all(torch.equal(x, loaded.state_dict()[name]) for name, x in draft.state_dict().items())
    assert build(linear(), draft_shapes(loaded_target.config)).config == loaded.config


def test_the_page_says_which_three_files_it_touches():
    page = (ROOT / "docs/adding-a-draft.md").read_text()
    for name in ("pipeline/drafts/", "pipeline/drafts/__init__.py", "tests/pipeline/taught.py"):
        assert f"`{name}`" in page and (ROOT / name).exists()
