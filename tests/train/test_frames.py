"""Further drafts, in addition to EAGLE and Jakiro, trained as users train them: several states a token, heads of their
own, experts, layers and MLPs.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipeline.drafts.jakiro import ExpertsObjective
from pipeline.features.schema import FP8
from pipeline.features.shards import Manifest
from pipeline.recipe.load import load_recipe
from tests.kit import dump_here, recipe_tree, write_recipe, write_sharegpt
from tests.train.runs import largest_difference, lines_of, run_training, train_here
from train.loop import _Run

pytestmark = pytest.mark.real
PARTITIONED = ["train.deepspeed={zero_optimization={stage3_param_persistence_threshold=0,stage3_max_reuse_distance=0}}"]
DRAFTS = {
    "eagle3": {"kind": "eagle3", "ttt_steps": 3, "vocabulary": 128},
    "jakiro": {
        "kind": "jakiro",
        "frame": "eagle-3",
        "experts": 8,
        "expert_width": 16,
        "ttt_steps": 2,
        "vocabulary": 128,
        "teacher": "whole",
        "objective": "acceptance",
        "balance_loss": 0.01,
    },
    "gumiho": {"kind": "gumiho", "regression_steps": 4},
    "p-eagle": {"kind": "p-eagle", "layers": 2, "depths": 3, "vocabulary": 128},
    "medusa": {"kind": "medusa", "heads": 3},
    "dflash": {"kind": "dflash", "layers": 2, "block": 6, "anchors": 24, "dpace": 0.5},
    "dspark": {"kind": "dspark", "layers": 2, "block": 5, "anchors": 24, "rank": 16, "vocabulary": 128},
    "skipper": {"kind": "skipper", "sparsity": [0.0, 0.5]},
    "small-llama": {"kind": "small-llama", "width": 32, "mlp_width": 48},
    "hydra": {"kind": "hydra", "heads": 3, "blocks": 2, "vocabulary": 128},
}


def dumped_with(target: Path, folder: Path, dtype: str | None) -> tuple[Path, Path]:
    """Return (recipe file, features folder) of a recipe with these drafts; 10 steps of 8 dialogues in 2 epochs."""
    tree = recipe_tree(target, write_sharegpt(folder / "data.json", 60), folder / "run")
    tree["data"] |= {"max_dialogues": 40, "validation_dialogues": 1}  # of two ranks one validates nothing
    tree["draft"] = DRAFTS
    tree["train"]["learning_rates"] = {"jakiro": 1e-2}  # its gated loss is slow to guess right
    tree["target"]["dtype"] = "float32"
    if dtype:
        tree["features"]["stored_dtype"] = dtype
    path = write_recipe(tree, folder / "recipe")
    recipe = load_recipe(path)
    assert dump_here(recipe).total("train", "rows") == 40
    return path, recipe.paths.features


@pytest.fixture(scope="module")
def dumped(tiny_target, tmp_path_factory):
    return dumped_with(tiny_target, tmp_path_factory.mktemp("frames"), "float32")


@pytest.fixture(scope="module")
def undisturbed(dumped, tmp_path_factory):
    output = tmp_path_factory.mktemp("undisturbed")
    for draft in DRAFTS:
        train_here(dumped, output, "train.decode=always", draft=draft)
    return output


def test_the_drafts_layers_are_stored_in_float8_unless_the_recipe_says_otherwise(tiny_target, tmp_path):
    _, features = dumped_with(tiny_target, tmp_path, None)
    spec = Manifest.load(features).spec
    assert (spec.stored_dtype, spec.auxiliary_layers) == (FP8, "1 2")  # of the tiny target's two layers


@pytest.mark.parametrize("draft", DRAFTS)
def test_the_estimate_of_tau_is_what_decoding_counts(undisturbed, draft):
    decoded = lines_of(undisturbed, "decoded", draft)
    assert len(decoded) > 1 and max(line["decoded_tau"] for line in decoded) > 1
    assert [line["estimated_tau"] for line in decoded] == [line["decoded_tau"] for line in decoded]


@pytest.mark.parametrize("draft", DRAFTS)
def test_the_loss_falls_and_its_terms_are_told(undisturbed, draft):
    lines = lines_of(undisturbed, "train", draft)
    falls = "next_classification" if draft == "gumiho" else "loss"  # gumiho's gains terms on the way
    assert lines[-1][falls] < lines[0][falls] and {"classification", "agreement", "next_agreement"} <= lines[0].keys()
    assert ("next_acceptance" in lines[0]) == (draft in ("jakiro", "dspark"))
    assert ("balance_penalty" in lines[0]) == (draft == "jakiro")


@pytest.fixture(scope="module")
def in_parts(dumped, tmp_path_factory):
    """All of them one after the other, each weight in two ranks' parts."""
    output = tmp_path_factory.mktemp("parts") / "run"
    sets = ["train.zero_stage=3", "train.checkpoint_every=100", "train.validate_every=100", *PARTITIONED]
    done = run_training(dumped, output, *sets, ranks=2, draft=None)
    assert done.returncode == 0, done.stdout + done.stderr
    return output


@pytest.mark.long
@pytest.mark.parametrize("draft", DRAFTS)
def test_zero_3_on_two_ranks_trains_alike(undisturbed, in_parts, draft):
    """An own head's weight is gathered for its loss, and experts without a token take part on every rank."""
    worst = largest_difference(undisturbed, in_parts, draft)
    print(f"{draft}: largest relative difference {worst:.1e}")
    assert worst < 1e-5


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_resumed_training_gives_the_same_weights_to_the_bit(dumped, undisturbed, tmp_path, monkeypatch, draft):
    one_step = _Run._train_step

    def broken_off(run, micro_batches):
        if run._engine.step == 7:
            raise KeyboardInterrupt
        return one_step(run, micro_batches)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(_Run, "_train_step", broken_off)
        train_here(dumped, tmp_path, draft=draft)
    state = json.loads((tmp_path / "drafts" / draft / "resume/resume.json").read_text())
    assert state["step"] == 6
    train_here(dumped, tmp_path, draft=draft)
    want, got = (load_file(folder / "drafts" / draft / "model.safetensors") for folder in (undisturbed, tmp_path))
    assert want.keys() == got.keys() and all(torch.equal(x, got[name]) for name, x in want.items())


def test_a_gate_that_keeps_to_few_experts_is_told(dumped, tmp_path, monkeypatch, caplog):
    penalties = []
    warning = ExpertsObjective.warning

    def of_few(draft, validation):
        penalties.append(validation["balance_penalty"])
        return warning(draft, validation | {"balance_penalty": 3.9})

    monkeypatch.setattr(ExpertsObjective, "warning", of_few)
    train_here(dumped, tmp_path, draft="jakiro")
    assert "jakiro: in each dialogue the gate keeps to few of its 8 experts (balance_penalty 3.9: " in caplog.text
    assert "1 is even, 4 the most): raise its balance_loss, which is 0.01" in caplog.text
    assert len(penalties) == 1 and 0 < penalties[0] < 4.01
