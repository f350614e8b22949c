"""The draft checkpoint: weights are read bit for bit as they were written, and anything else is refused."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipeline.artifacts.checkpoint import (
    CONFIG,
    METRICS,
    WEIGHTS,
    checked_metrics,
    export,
    load,
    read_config,
    require_trained_under,
    save,
)
from pipeline.artifacts.features import feature_spec
from pipeline.basics.errors import PipelineError
from pipeline.decoding.config import Method, TreeConfig
from pipeline.drafts import build
from pipeline.drafts.parts.layers import draft_shapes
from pipeline.drafts.prompt_lookup import PromptLookupConfig
from pipeline.recipe.recipe import Recipe
from tests.kit import change_sealed, flip, replace_once

KEYS = ("draft", "method", "shapes", "target", "train_hash", "weights_sha256", "metrics_sha256", "training")


@pytest.fixture
def make(tiny_recipe, loaded_target, embed_head, tmp_path):
    """make(name, changes, dtype) -> (folder, draft): an initialised draft, saved."""

    def factory(name="jakiro", changes=None, dtype=torch.float32):
        tree = tiny_recipe.model_dump(mode="json")
        tree["draft"][name] = {"kind": tree["draft"][name]["kind"], "vocabulary": 128} | (changes or {})
        recipe = Recipe.model_validate(tree)
        draft = build(recipe.draft[name], draft_shapes(loaded_target.config))
        draft.initialise(3)
        if draft.token_ids_U is not None:
            draft.set_vocabulary(torch.arange(len(draft.token_ids_U)) * 2 + 1)
        draft.to(dtype)
        draft.bind(embed_head)
        folder = tmp_path / "drafts" / name
        save(folder, draft, draft.state_dict(), recipe, name, {"steps": 12, "loss": 0.25})
        return folder, draft

    return factory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("eagle", {"vocabulary": 50, "fc_bias": True, "mlp_width": 24}),
        ("jakiro", {"vocabulary": None, "contrast": "scalar", "experts": 3}),
        ("eagle", {"kind": "eagle3", "vocabulary": 50, "fc_norm": True}),
        ("jakiro", {"frame": "eagle-3", "experts": 4, "expert_width": 16, "balance_loss": 0.1}),
    ],
)
def test_what_was_saved_is_loaded_bit_for_bit(make, embed_head, name, changes, dtype):
    folder, draft = make(name, changes, dtype)
    loaded = load(folder, embed_head.fingerprint)
    want, got = draft.state_dict(), loaded.state_dict()
    assert list(want) == list(got)
    for key in want:
        assert want[key].dtype == got[key].dtype and torch.equal(want[key], got[key]), key
    assert loaded.config == draft.config and loaded.shapes == draft.shapes
    assert not loaded.training and not any(parameter.requires_grad for parameter in loaded.parameters())
    loaded.bind(embed_head)
    states, tokens = torch.ones(1, 5, 3, 32, dtype=dtype), torch.tensor([[1, 2, 3, 4, 5]])
    bf16_embed_head = embed_head.to(torch.device("cpu"), dtype)
    for first in (draft, loaded):
        first.bind(bf16_embed_head)
    positions = torch.arange(5)[None]
    needed = states[:, :, : draft.needs.final + len(draft.needs.auxiliary)]
    both = [first.trunk(first.features(needed), tokens, positions, None, None) for first in (draft, loaded)]
    assert torch.equal(*both)
    assert torch.equal(*(first.logits(both[0]) for first in (draft, loaded)))


def test_what_stands_in_the_folder(make, embed_head, tiny_recipe):
    folder, draft = make()
    assert sorted(path.name for path in folder.iterdir()) == [CONFIG, WEIGHTS, "provenance.json", "recipe.json"]
    saved = read_config(folder)
    assert saved.config == draft.config and saved.method == tiny_recipe.methods["jakiro"]
    assert saved.target["fingerprint"] == embed_head.fingerprint
    assert saved.training == {"steps": 12, "loss": 0.25}
    assert len(saved.weights_sha256) == 64 and len(saved.train_hash) == 16
    with torch.no_grad():
        draft.fc.weight.add_(1)
    save(folder, draft, draft.state_dict(), tiny_recipe, "jakiro", {})  # replaces it
    assert torch.equal(load(folder, embed_head.fingerprint).fc.weight, draft.fc.weight)


def test_an_interrupted_save_leaves_no_checkpoint(make, embed_head, tiny_recipe, monkeypatch):
    """The old config.json is removed first: it must never be next to new weights."""
    folder, draft = make()

    def crash(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("pipeline.artifacts.checkpoint.write_sealed", crash)
    with pytest.raises(KeyboardInterrupt):
        save(folder, draft, draft.state_dict(), tiny_recipe, "jakiro", {})
    with pytest.raises(PipelineError, match=r"holds no draft checkpoint \(config.json is missing\)"):
        load(folder, embed_head.fingerprint)


def test_a_release_has_a_method_of_its_own(make, tmp_path):
    folder, draft = make("jakiro")
    (tmp_path / "release").mkdir()
    tree = TreeConfig(depth=4, top_k=2, nodes=9)
    method = Method(draft="jakiro", secondary=["lookup"], tree=tree)
    export(folder, tmp_path / "release", method, {"lookup": PromptLookupConfig()}, folder / "recipe.json")
    saved = read_config(tmp_path / "release")
    assert saved.method == replace(method, tree=replace(method.tree, parallel=2))  # what the draft makes of it
    loaded = saved.load_method(draft)
    assert loaded.draft.draft is draft and loaded.tree == saved.tree
    assert {name: config.config for name, config in loaded.draft.secondary.items()} == {"lookup": PromptLookupConfig()}


# -- what is refused ---------------------------------------------------------------------------------------------------


def put(*section: str, **values: object) -> Callable[[dict], None]:
    """Add keys to a section of config.json, or at its top level."""

    def change(raw: dict) -> None:
        for key in section:
            raw = raw[key]
        raw.update(values)

    return change


CORPUS = {"kind": "prompt-lookup", "corpus": "/etc/passwd"}
EVIL = {"kind": "small-model", "model": "evil/lm", "trust_remote_code": True}
DAMAGED = "config.json is damaged or of another version: "
MISFIT = "does not fit its config.json"
HUGE = "does not fit its config.json: .* far more than the file holds"


def with_secondary(settings: dict) -> Callable[[dict], None]:
    return lambda raw: raw["method"].update(secondary=["x"]) or raw.update(secondary={"x": settings})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put(format_version=3), "format_version is 3, expected 7: .*release it, again"),
        (put(format_version=None), "format_version is None, expected 7"),
        *((lambda raw, key=key: raw.pop(key), f"{DAMAGED}.*{key}") for key in KEYS),
        (put(weights_sha256='"; import os; "'), f"{DAMAGED}.*weights_sha256"),
        (put(files={"../../x.py": "0" * 64}), f"{DAMAGED}.*files"),
        (put(target={"model": "x"}), f"{DAMAGED}.*target"),
        (put(training=[]), f"{DAMAGED}training is no object"),
        # the draft's settings
        (put("draft", kind="mamba"), f"{DAMAGED}.*mamba"),
        (put("draft", experts="many"), f"{DAMAGED}.*experts"),
        (put("draft", surprise=1), f"{DAMAGED}.*surprise"),
        (put("draft", start="/etc"), f"{DAMAGED}.*start"),
        (put("draft", experts=10**6), f"{DAMAGED}.*experts"),
        (put(draft=EVIL), DAMAGED),
        (put(draft=CORPUS), DAMAGED),
        # how it decodes
        (put("method", beside=[]), f"{DAMAGED}.*beside"),
        (put("method", secondary=["lookup"]), f"{DAMAGED}.*lookup"),
        (with_secondary(CORPUS), DAMAGED),
        (with_secondary(EVIL), DAMAGED),
        (put("method", tree={"depth": 3, "top_k": 10**9, "nodes": 10}), f"{DAMAGED}.*top_k"),
        (put("method", tree={"depth": 10**6, "top_k": 2, "nodes": 10**7}), f"{DAMAGED}.*depth"),
        (put("method", draft="\x1b[2J"), DAMAGED),
        (put("method", draft="../x"), DAMAGED),
        # shapes that are none
        (put("shapes", hidden_size=10**9), f"{DAMAGED}.*hidden_size"),
        (put("shapes", hidden_size="32"), f"{DAMAGED}.*hidden_size"),
        (put("shapes", target_layers=10**6), f"{DAMAGED}.*target_layers"),
        (put("shapes", rms_norm_eps=None), f"{DAMAGED}.*rms_norm_eps"),
        (put("shapes", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4}), f"{DAMAGED}.*rope"),
        (put("shapes", rope_parameters={"rope_type": "default", "rope_theta": -1.0}), f"{DAMAGED}.*rope"),
        (put("shapes", rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": -1.0}), f"{DAMAGED}.*rope"),
        # settings and shapes that are not the weights', or make no layer
        (put("draft", experts=3), MISFIT),
        (put("draft", vocabulary=64), MISFIT),
        (put("shapes", hidden_size=64), MISFIT),
        (put("shapes", hidden_size=33), MISFIT),
        (put("shapes", num_attention_heads=3), MISFIT),
        (put("shapes", intermediate_size=None, head_dim=7), MISFIT),
        (put("shapes", rope_parameters={"rope_type": "yarn", "factor": 1.5, "rope_theta": 1.0}), MISFIT),
        (put("shapes", head_dim=1 << 23), HUGE),
        (put("shapes", hidden_size=1 << 20, head_dim=1 << 20), HUGE),
    ],
)
def test_a_config_that_is_forged_or_not_the_weights_is_refused(make, embed_head, change, message):
    folder, _ = make()
    change_sealed(folder / CONFIG, change)
    with pytest.raises(PipelineError, match=f"(?s){message}"):
        load(folder, embed_head.fingerprint)


def replaced(old: str, new: str) -> Callable[[Path], None]:
    """A changed digit: the weights would load, and be used wrongly."""
    return lambda folder: replace_once(folder / CONFIG, old, new)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "jakiro holds no draft checkpoint .*jakiro train"),
        (lambda folder: (folder / WEIGHTS).unlink(), r"model.safetensors is missing\. Restore it"),
        (lambda folder: flip(folder / WEIGHTS, 8), r"model.safetensors is not the file that .*\. Restore it"),
        (lambda folder: flip(folder / WEIGHTS, -1), r"model.safetensors is not the file that .*\. Restore it"),
        (replaced('"rope_theta": 1', '"rope_theta": 2'), r"jakiro/config.json was changed or damaged .*train again"),
        (replaced('"train_hash": "', '"train_hash": "0'), r"jakiro/config.json was changed or damaged .*train again"),
    ],
)
def test_files_that_are_missing_or_changed_are_refused(make, embed_head, damage, message):
    folder, _ = make()
    damage(folder)
    with pytest.raises(PipelineError, match=message):
        load(folder, embed_head.fingerprint)


def test_another_target_and_ids_that_do_not_ascend_are_refused(make, embed_head, tiny_recipe):
    folder, draft = make()
    message = rf"fingerprint {embed_head.fingerprint}.*at hand has fingerprint 0123456789abcdef"
    with pytest.raises(PipelineError, match=message):
        load(folder, "0123456789abcdef")
    draft.set_vocabulary(draft.token_ids_U.flip(0))
    save(folder, draft, draft.state_dict(), tiny_recipe, "jakiro", {})
    with pytest.raises(PipelineError, match="draft_token_ids do not ascend"):
        load(folder, embed_head.fingerprint)


def test_what_goes_into_a_release_beside_the_weights_is_checked(make, tiny_recipe, tmp_path):
    folder, draft = make()
    assert checked_metrics(folder) == folder / METRICS  # there is none: nothing to draw, nothing to refuse
    (folder / METRICS).write_text('{"kind": "train", "step": 1, "loss": 2.5}\n')
    save(folder, draft, draft.state_dict(), tiny_recipe, "jakiro", {})
    assert checked_metrics(folder).exists()
    flip(folder / METRICS)
    with pytest.raises(PipelineError, match=r"metrics.jsonl was changed or damaged after the training"):
        checked_metrics(folder)
    for name in ("provenance.json", "recipe.json"):
        content = (folder / name).read_text()
        replace_once(folder / name, '"tiny"', '"tina"')
        (tmp_path / name).mkdir()
        with pytest.raises(PipelineError, match=rf"{name} was changed or damaged"):
            export(folder, tmp_path / name, read_config(folder).method, {}, folder / "recipe.json")
        (folder / name).write_text(content)


def test_a_draft_is_of_what_its_features_were_dumped_from(tiny_recipe, loaded_target, embed_head):
    """A target whose tokenizer changes during the training counts as another one."""
    draft = build(tiny_recipe.draft["eagle"], draft_shapes(loaded_target.config))
    draft.bind(embed_head)
    folder, spec = tiny_recipe.paths.draft("eagle"), feature_spec(tiny_recipe)
    save(folder, draft, draft.state_dict(), tiny_recipe, "eagle", {}, spec)
    assert require_trained_under(tiny_recipe, "eagle").target["tokenizer"] == spec.tokenizer
    save(folder, draft, draft.state_dict(), tiny_recipe, "eagle", {}, replace(spec, tokenizer="f" * 16))
    with pytest.raises(PipelineError, match=r"holds a draft of another target .*tokenizer is .*, was 'f{16}'"):
        require_trained_under(tiny_recipe, "eagle")
