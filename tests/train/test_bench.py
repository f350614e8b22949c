"""The training bench and the learning-rate sweep: what they compare is the same, and they say what they say they
say.
"""

import json
import sys

import pytest
import torch

from pipeline.basics.errors import PipelineError
from pipeline.drafts import build
from pipeline.drafts.eagle import EagleConfig
from pipeline.drafts.eagle3 import Eagle3Config
from pipeline.drafts.jakiro import JakiroConfig
from pipeline.drafts.parts.layers import shapes_of
from pipeline.features.batch import collate
from tests.kit import override_arguments, run_warm, write_recipe
from tests.pipeline.test_losses_batch import wide_rows
from train.studies.bench import direct_loss, require_direct

KINDS = {
    "eagle": EagleConfig(kind="eagle", horizons=3),
    "jakiro": JakiroConfig(kind="jakiro"),
    "reduced": JakiroConfig(kind="jakiro", vocabulary=100),
}


@pytest.mark.parametrize("config", KINDS.values(), ids=KINDS.keys())
def test_the_direct_loss_is_the_same_loss(loaded_target, embed_head, config):
    draft = build(config, shapes_of(loaded_target.config))
    draft.initialise(0)
    if config.vocabulary:
        draft.set_vocabulary(torch.arange(0, 200, 2))
    draft.bind(embed_head)
    require_direct(draft)
    found = []
    for loss_of in (draft.loss, lambda batch: direct_loss(draft, batch)):
        draft.zero_grad()
        loss, sums = loss_of(collate(wide_rows(), draft.horizons, "predicted", {1: 30, 2: 25, 3: 20}))
        loss.backward()
        found.append((loss.item(), sums, torch.cat([p.grad.flatten() for p in draft.parameters()])))
    (ours, our_sums, gradient), (direct, direct_sums, direct_gradient) = found
    assert ours == pytest.approx(direct, rel=1e-5)
    assert torch.allclose(gradient, direct_gradient, rtol=1e-4, atol=1e-6)
    for branch, sums in our_sums.items():
        for name, value in sums.items():
            assert value.item() == pytest.approx(direct_sums[branch][name].item(), rel=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        Eagle3Config(kind="eagle3"),
        JakiroConfig(kind="jakiro", mixture_loss=0.1),
        JakiroConfig(kind="jakiro", experts=3, balance_loss=0.1),
        EagleConfig(kind="eagle", objective="acceptance"),
    ],
)
def test_a_loss_without_a_direct_form_is_refused(loaded_target, config):
    with pytest.raises(PipelineError, match="no direct form of the loss"):
        require_direct(build(config, shapes_of(loaded_target.config)))


@pytest.mark.real
def test_the_bench_ends_with_its_figures(dumped, tmp_path):
    recipe, features = dumped
    (tmp_path / "features").symlink_to(features)
    sets = override_arguments([f"output={tmp_path}"])
    command = [sys.executable, "-m", "train.studies.bench", str(recipe), *sets, "--steps", "2", "--repeats", "2"]
    done = run_warm(command)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.strip().splitlines()[-1])
    assert all(f"step over {other}:" in done.stdout for other in ("bare", "direct"))
    assert 0 < figures["step_over_bare"] < 10 and 0 < figures["step_over_direct"] < 100
    assert 0 <= figures["data_wait_share"] < 1 and figures["peak_mb"] > 0 and figures["formula_mb"] > 0
    assert not list(tmp_path.glob("drafts"))  # a bench leaves nothing behind


@pytest.mark.real
def test_the_sweep_trains_at_each_rate_and_names_the_best(dumped, tmp_path):
    recipe, features = dumped
    (tmp_path / "features").symlink_to(features)
    tree = json.loads(recipe.read_text())
    del tree["draft"]["jakiro"]
    tree["draft"]["prompt-lookup"] = {"kind": "prompt-lookup"}  # nothing of it is trained
    tree["publish"]["draft"] = "eagle"
    recipe = write_recipe(tree, tmp_path / "recipe")
    sets = override_arguments([f"output={tmp_path}", "train.epochs=1", "train.warmup_steps=0"])
    done = run_warm([sys.executable, "-m", "train.studies.sweep", str(recipe), *sets, "--rates", "1e-9", "3e-3"])
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.strip().splitlines()[-1])
    crosses = {(one["draft"], one["rate"]): one["next_classification"] for one in figures["results"]}
    assert set(crosses) == {("eagle", rate) for rate in (1e-9, 3e-3)}
    assert crosses["eagle", 3e-3] < crosses["eagle", 1e-9]
    for draft, rate in figures["best"].items():
        mine = [one for one in figures["results"] if one["draft"] == draft]
        assert max(one["estimated_tau"] for one in mine) == next(
            one["estimated_tau"] for one in mine if one["rate"] == rate
        )
        assert f"| {draft} | {rate:g} **best** |" in done.stdout
