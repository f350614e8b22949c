"""Long trainings on many ranks: the estimate of tau, other numbers of ranks, ranks that die, values that are not
finite.
"""

import json
import math
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.artifacts import checkpoint
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import write_sealed
from pipeline.features.schema import TextRow
from pipeline.features.shards import ANSWERS, SPLITS, FeatureStore, Manifest, write_features
from pipeline.lm.model import fingerprint, load_embed_head
from pipeline.recipe.load import load_recipe
from pipeline.recipe.read import read_tree
from tests.kit import (
    ROOT,
    command_environment,
    dump_here,
    recipe_tree,
    run_warm,
    train_command,
    wait_until,
    write_recipe,
    write_sharegpt,
)
from tests.train.runs import (
    dump_for,
    kill_training,
    largest_difference,
    lines_of,
    losses,
    run_training,
    steps_so_far,
    train_here,
)
from train import acceptance, loop
from train.engine.engine import TrainingEngine
from train.engine.resume import hash_files, read_state
from train.engine.universal import convert

pytestmark = pytest.mark.real
WEIGHTS = "drafts/jakiro/model.safetensors"
# ZeRO-3 keeps tensors as small as these whole, and those that it will soon need again; here it is to take all apart.
ZERO_3 = (
    "train.zero_stage=3",
    "train.deepspeed={zero_optimization={stage3_param_persistence_threshold=0,stage3_max_reuse_distance=0}}",
)


def finished(done: subprocess.CompletedProcess) -> None:
    assert done.returncode == 0, done.stdout + done.stderr


# -- the estimate of tau --------------------------------------------------------------------------------------------


def test_the_estimate_equals_decoding_and_the_best_weights_are_kept(tiny_target, tmp_path_factory, tmp_path):
    """The run uses ZeRO-3, where no rank holds complete weights, and float32 features, since decoding rounds none."""
    dumped = dump_for(tiny_target, tmp_path_factory.mktemp("exact"), stored_dtype="float32")
    sets = ["keep='best'", "decode='always'", "learning_rate=0.02"]
    both = ('draft.lookup={kind="prompt-lookup"}', 'eval.methods.both={draft="jakiro", secondary=["lookup"]}')
    finished(run_training(dumped, tmp_path, *both, *ZERO_3, *(f"train.{setting}" for setting in sets), ranks=2))
    held, decoded = lines_of(tmp_path, "validation"), lines_of(tmp_path, "decoded")
    taus = [line["estimated_tau"] for line in held]
    print(f"estimated tau {taus}")
    assert len(held) == 5 and max(taus) > 1.02
    assert [line["step"] for line in decoded] == [line["step"] for line in held]
    assert taus == [line["decoded_tau"] for line in decoded]
    best = taus.index(max(taus))
    facts = json.loads((tmp_path / "drafts/jakiro/config.json").read_text())["training"]
    assert facts["steps"] == held[best]["step"] and facts["trained_tokens"] == held[best]["trained_tokens"]
    assert facts["validation"]["estimated_tau"] == pytest.approx(max(taus), abs=1e-5)
    recipe = load_recipe(dumped[0], [f"output={tmp_path}", *both])
    answers = FeatureStore(recipe.paths.features, ANSWERS, Manifest.load(recipe.paths.features).spec)
    draft = checkpoint.load(recipe.paths.draft("jakiro"), fingerprint(recipe.target))
    draft.bind(load_embed_head(recipe.target))
    watched = acceptance.tree_and_chain(draft, recipe.tree("jakiro")) | acceptance.load_hybrids(recipe, "jakiro", draft)
    again = acceptance.to_metrics(acceptance.estimate_acceptance(draft, watched, answers, 0, 1))
    assert again["estimated_tau"] == pytest.approx(max(taus), rel=1e-6)
    assert again["estimated_tau_of_both"] == pytest.approx(held[best]["estimated_tau_of_both"], rel=1e-6)


def test_from_bfloat16_features_the_estimate_is_within_2_percent_of_decoding(dumped, tmp_path):
    train_here(dumped, tmp_path, "train.decode=always", "train.learning_rate=0.02", "train.validate_every=2")
    held, decoded = lines_of(tmp_path, "validation"), lines_of(tmp_path, "decoded")
    assert len(held) == 10 and max(line["estimated_tau"] for line in held) > 1.02
    assert [x["estimated_tau"] for x in held] == pytest.approx([x["decoded_tau"] for x in decoded], rel=0.02)


def test_training_ends_when_tau_stays_where_it_is(dumped, tmp_path):
    """A learning rate that moves nothing: the first validation stays the best one."""
    train_here(dumped, tmp_path, "train.patience=2", "train.learning_rate=1e-12", "train.validate_every=3")
    assert [line["step"] for line in lines_of(tmp_path, "validation")] == [3, 6, 9]
    facts = json.loads((tmp_path / "drafts/jakiro/config.json").read_text())["training"]
    assert facts["steps"] == 9 and facts["cut_short"].startswith(
        "train.patience ended it at step 9 of 20, at a learning"
    )
    assert rates(tmp_path) == pytest.approx([1e-12 * part for part in cosine(20)[:9]])  # as if it had gone on


def rates(output: Path) -> list[float]:
    return [line["learning_rate"] for line in lines_of(output, "train")]


def cosine(steps: int, warmup: int = 1) -> list[float]:
    """Return the factor of the learning rate at each step."""
    falling = [0.5 * (1 + math.cos(math.pi * step / (steps - warmup))) for step in range(steps - warmup)]
    return [step / warmup for step in range(warmup)] + falling


def test_a_budget_of_tokens_ends_training_and_its_schedule_in_the_middle_of_an_epoch(dumped, undisturbed, tmp_path):
    train_here(dumped, tmp_path, "train.tokens=4200")
    assert rates(tmp_path) == pytest.approx([1e-3 * part for part in cosine(7)])
    after = [line["trained_tokens"] for line in lines_of(undisturbed, "train")]
    assert after[5] < 4200 < after[6] and [line["trained_tokens"] for line in lines_of(tmp_path, "train")] == after[:7]
    facts = json.loads((tmp_path / "drafts/jakiro/config.json").read_text())["training"]
    assert (facts["steps"], facts["epochs"]) == (7, 2) and "cut_short" not in facts


def test_the_schedule_is_as_long_as_what_max_tokens_leaves_to_train_on(tiny_target, undisturbed, tmp_path):
    tree = recipe_tree(tiny_target, write_sharegpt(tmp_path / "data.json"), tmp_path / "run")
    tree["data"]["max_tokens"] = 1500
    path = write_recipe(tree, tmp_path / "recipe")
    recipe = load_recipe(path)
    rows = dump_here(recipe).total("train", "rows")
    train_here((path, recipe.paths.features), tmp_path / "run", "train.epochs=3")
    assert 8 <= rows < 40 and rates(tmp_path / "run") == pytest.approx([1e-3 * part for part in cosine(rows // 8 * 3)])
    assert rates(undisturbed) == pytest.approx([1e-3 * part for part in cosine(20)])
    assert "cut_short" not in json.loads((undisturbed / "drafts/jakiro/config.json").read_text())["training"]


@pytest.mark.long
def test_after_ten_epochs_the_best_weights_decode_no_worse_than_the_last(dumped, tmp_path):
    """Each draft is compared with decoding itself, with its own checkpoint."""
    sets = ["train.epochs=10", "train.learning_rate=0.05", "train.validate_every=5"]
    taus, steps = {}, {}
    for keep in ("best", "last"):
        train_here(dumped, tmp_path / keep, *sets, f"train.keep={keep}", "train.decode=last")
        (line,) = lines_of(tmp_path / keep, "decoded")
        taus[keep], steps[keep] = line["decoded_tau"], line["step"]
        held = [line["estimated_tau"] for line in lines_of(tmp_path / keep, "validation")]
    print(f"decoded tau {taus}, estimated {held}")
    assert len(held) == 10 and steps["last"] == 50
    facts = json.loads((tmp_path / "best/drafts/jakiro/config.json").read_text())["training"]
    assert facts["steps"] == 5 * (1 + held.index(max(held)))
    assert taus["best"] >= taus["last"]


# -- packed rows -------------------------------------------------------------------------------------------


def test_packed_rows_train_alike_on_one_and_two_ranks(dumped, tmp_path):
    sets = ["train.pack_tokens=200", "train.global_batch=2", "train.epochs=2"]
    train_here(dumped, tmp_path / "one", *sets, "train.micro_batch=2")
    finished(run_training(dumped, tmp_path / "two", *sets, "train.micro_batch=1", ranks=2))
    assert len(losses(tmp_path / "one")) > 10
    assert largest_difference(tmp_path / "one", tmp_path / "two") < 1e-5


@pytest.mark.parametrize(("seconds", "steps"), [(0.0, [*range(1, 6)]), (1e9, [5])])
def test_resume_states_come_by_the_clock(dumped, tmp_path, monkeypatch, seconds, steps):
    """Every ten minutes, and at the end, unless the recipe names steps."""
    tree, saved = read_tree(dumped[0]), []
    del tree["train"]["checkpoint_every"]
    monkeypatch.setattr(loop, "STATE_SECONDS", seconds)
    monkeypatch.setattr(TrainingEngine, "save_resume", lambda engine, _: saved.append(engine.step))
    train_here((write_recipe(tree, tmp_path / "recipe"), dumped[1]), tmp_path / "run", "train.epochs=1")
    assert saved == steps


# -- ranks ----------------------------------------------------------------------------------------------------------


def stopped(dumped, output: Path, *overrides: str, ranks: int) -> int:
    """Start a training and kill it at its first saved state; return that state's step. The folder of that state already
    holds a torn file of another number of ranks.
    """
    state = output / "drafts/jakiro/resume/resume.json"
    first = f"step-{load_recipe(dumped[0]).train.checkpoint_every:07d}"
    torn = state.parent / first / "zero_pp_rank_7_mp_rank_00_optim_states.pt"
    torn.parent.mkdir(parents=True)
    torn.write_bytes(b"half")
    kill_training(dumped, output, state.exists, *overrides, ranks=ranks)
    resume_state = json.loads(state.read_text())
    assert set(resume_state["files"]) == {
        f"{resume_state['tag']}/{path.name}" for path in (state.parent / resume_state["tag"]).iterdir()
    }
    return resume_state["step"]


@pytest.mark.parametrize(("stage", "before", "after"), [(2, 1, 2), pytest.param(3, 2, 1, marks=pytest.mark.long)])
def test_another_number_of_ranks_goes_on(dumped, undisturbed, tmp_path, stage, before, after):
    output, sets = tmp_path / "run", ZERO_3 if stage == 3 else [f"train.zero_stage={stage}"]
    step = stopped(dumped, output, *sets, ranks=before)
    assert 0 < step < 20
    sets = [*sets, f"train.micro_batch={8 // after // 2}"]
    if after == 1:
        train_here(dumped, output, *sets)
    else:
        finished(run_training(dumped, output, *sets, ranks=after))
    worst = largest_difference(undisturbed, output)
    print(f"ZeRO-{stage}, {before} ranks, from step {step} on {after}: largest relative difference {worst:.1e}")
    assert worst < 1e-5
    assert json.loads((output / "drafts/jakiro/config.json").read_text())["training"]["ranks"] == after


class Harmful:
    """A pickle that runs code, which no state of a training does."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize(("stage", "before"), [(0, 1), (2, 2)])
def test_a_strangers_resume_state_runs_no_code(dumped, tmp_path, stage, before):
    """Both the file and its digest are forged. It is read on one rank, by DeepSpeed itself (0) and by its converter
    (2).
    """
    output, touched, sets = tmp_path / "run", tmp_path / "touched", [f"train.zero_stage={stage}"]
    kill_training(dumped, output, (resume := output / "drafts/jakiro/resume/resume.json").exists, *sets, ranks=before)
    state = read_state(resume.parent)
    victims = sorted((resume.parent / state["tag"]).glob("*.pt"))
    torch.save({"module": Harmful(touched), "optimizer_state_dict": Harmful(touched)}, victims[-1])
    state["files"] |= hash_files(resume.parent, [victims[-1]])
    write_sealed(resume, {key: value for key, value in state.items() if key != "sha256"})
    with pytest.raises(PipelineError, match=rf"{victims[-1].name} holds (posix|os)\.system, expected tensors alone"):
        train_here(dumped, output, *sets, *(["train.micro_batch=4"] if stage else []))
    assert not touched.exists()
    if stage:  # the second line of defence
        with pytest.raises(PipelineError, match="was saved by another number of ranks and cannot be converted for 1"):
            convert(victims[-1].parent, tmp_path / "made", 1)
        assert not touched.exists()


def ranks_of(mark: str) -> list[int]:
    ranks = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if any(word.startswith("--local_rank") for word in words) and any(mark in word for word in words):
            ranks.append(int(entry.name))
    return ranks


@pytest.mark.long
def test_a_rank_that_dies_ends_the_others(dumped, tmp_path):
    recipe, features = dumped
    (tmp_path / "features").symlink_to(features)
    sets = [f"output={tmp_path}", "train.epochs=5000", "train.validate_every=100000"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            train_command(recipe, *sets, ranks=2, draft="jakiro"),
            cwd=ROOT, env=command_environment(), stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        started = wait_until(lambda: steps_so_far(tmp_path) >= 3, process)
        victim = max(ranks_of(str(tmp_path)))
        os.kill(victim, signal.SIGKILL)
        took = wait_until(lambda: process.poll() is not None, seconds=5 * started)  # far sooner than the run would end
        assert process.returncode != 0
    print(f"started within {started:.0f} s, ended {took:.0f} s after a rank died")
    assert not ranks_of(str(tmp_path))
    assert f"Killing subprocess {victim}" in (tmp_path / "log").read_text()  # the launcher says which


# -- what is not finite ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def poisoned(dumped, tmp_path_factory) -> tuple[tuple[Path, Path], str]:
    """The dump with one value of one dialogue that is not finite, and that dialogue's id."""
    recipe, features = dumped
    folder, manifest = tmp_path_factory.mktemp("poisoned"), Manifest.load(features)
    sets = {name: [rows_of(FeatureStore(features, name, manifest.spec))] for name in (*SPLITS, ANSWERS)}
    bad = sets["train"][0][5]
    bad.hidden_TD[7, 3] = float("nan")
    write_features(folder, manifest.spec, sets, manifest.answers_hash)
    return (recipe, folder), bad.doc_id


def rows_of(store: FeatureStore) -> list[TextRow]:
    rows = (store.row(number) for number in range(len(store)))
    return [replace(row, hidden_TD=row.hidden_TD.clone()) for row in rows]


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_dialogue(poisoned, tmp_path):
    dump, doc_id = poisoned
    done = run_training(dump, tmp_path, ranks=2)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    message = r"step \d+: not finite: the stored features of dialogue " + re.escape(doc_id) + "[^0-9]"
    assert re.search(message, done.stdout + done.stderr)
    assert not (tmp_path / WEIGHTS).exists()


def test_a_gradient_that_is_not_finite_changes_no_weight():
    """Every optimizer that DeepSpeed makes of AdamW refuses it; the loss is finite, so no dialogue is named."""
    done = run_warm([sys.executable, "-m", "tests.train.gradients"])
    finished(done)
    print(done.stdout)
    lines = [line for line in done.stdout.splitlines() if " ZeRO-" in line]
    assert len(lines) == 7
    for line in lines:
        assert line.endswith(": step 2: not finite: a gradient; weights as before")


def test_weights_that_are_not_finite_are_never_saved(dumped, tmp_path):
    """A learning rate and a decay at which the first step overflows."""
    sets = ["train.learning_rate=3e37", "train.weight_decay=11", "train.warmup_steps=0"]
    sets.append("train.checkpoint_every=1")
    with pytest.raises(PipelineError, match="the draft's weights are not finite any more"):
        train_here(dumped, tmp_path, *sets)
    assert not (tmp_path / WEIGHTS).exists()


# -- bad input ------------------------------------------------------------------------------------------------------


def test_features_of_another_template_are_refused(dumped, tmp_path):
    """Each field that may differ: tests/pipeline/test_shards.py."""
    recipe, features = dumped
    manifest = Manifest.load(features)
    spec = replace(manifest.spec, template="0" * 16)
    folder = tmp_path / "features"
    write_features(folder, spec, {"train": [rows_of(FeatureStore(features, "train", manifest.spec))]})
    with pytest.raises(PipelineError, match="features of another chat template"):
        train_here((recipe, folder), tmp_path, draft="eagle")


def test_a_dump_without_a_trained_position_is_refused(dumped, tmp_path):
    recipe, features = dumped
    manifest, folder = Manifest.load(features), tmp_path / "features"
    sets = {split: rows_of(FeatureStore(features, split, manifest.spec)) for split in SPLITS}
    sets["train"] = [replace(row, loss_mask=np.zeros_like(row.loss_mask)) for row in sets["train"]]
    write_features(folder, manifest.spec, {split: [rows] for split, rows in sets.items()})
    with pytest.raises(PipelineError, match="no trained position"):
        train_here((recipe, folder), tmp_path)
