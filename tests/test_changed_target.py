"""A target that changed after a run: every stage notices it, and names the changed part."""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from eval.main import main as evaluate
from pipeline.artifacts.reports import read_report
from pipeline.basics.errors import PipelineError
from pipeline.lm.model import identify
from pipeline.recipe.load import load_recipe
from pipeline.running.stages import list_stages, print_status
from tests.kit import (
    call,
    dump_here,
    flip,
    recipe_tree,
    replace_once,
    run_warm,
    save_tiny_target,
    write_recipe,
    write_sharegpt,
)

pytestmark = pytest.mark.real


def renamed_tokens(target: Path) -> None:
    """Swap the ids of two tokens of the vocabulary."""
    raw = json.loads((target / "tokenizer.json").read_text())
    vocabulary = raw["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (target / "tokenizer.json").write_text(json.dumps(raw))


def with_bos(target: Path) -> None:
    """Change the first token of every text."""
    raw = json.loads((target / "tokenizer.json").read_text())
    token = {"SpecialToken": {"id": "<|system|>", "type_id": 0}}
    raw["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [token, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [token, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|system|>": {"id": "<|system|>", "ids": [257], "tokens": ["<|system|>"]}},
    }
    (target / "tokenizer.json").write_text(json.dumps(raw))


def changed_json(name: str, **values) -> Callable[[Path], None]:
    def change(target: Path) -> None:
        raw = json.loads((target / name).read_text())
        (target / name).write_text(json.dumps(raw | values))

    return change


TARGETS = {
    "weights": (lambda target: flip(target / "model.safetensors"), "fingerprint"),
    "tokens": (renamed_tokens, "tokenizer"),
    "bos": (with_bos, "tokenizer"),
    "split": (changed_json("tokenizer_config.json", split_special_tokens=True), "tokenizer"),
    "template": (lambda target: replace_once(target / "chat_template.jinja", "<|end|>", "<|end|> "), "template"),
    "stop": (changed_json("generation_config.json", eos_token_id=[256, 10]), "stop_ids"),
}


@pytest.fixture(scope="module")
def of_a_folder(tmp_path_factory) -> tuple[Path, Path]:
    """(recipe, target) of a finished run whose target's folder is complete."""
    folder = tmp_path_factory.mktemp("target-changes")
    tree = recipe_tree(save_tiny_target(folder / "target"), write_sharegpt(folder / "data.json"), folder / "run")
    tree["draft"] = {"eagle": tree["draft"]["eagle"]}
    tree["publish"]["draft"] = "eagle"
    recipe = write_recipe(tree, folder / "recipe")
    dump_here(load_recipe(recipe))
    done = run_warm([sys.executable, "train/main.py", str(recipe)])
    assert done.returncode == 0, done.stdout + done.stderr
    call(evaluate, str(recipe))
    return recipe, folder / "target"


@pytest.mark.parametrize("change, part", TARGETS.values(), ids=TARGETS)
def test_a_target_that_changed_is_seen_by_every_stage(of_a_folder, tmp_path, change, part):
    """No figure of the earlier target is shown as the changed target's, or released."""
    recipe_file, target = of_a_folder
    backup = tmp_path / "whole"
    shutil.copytree(target, backup)
    recipe = load_recipe(recipe_file)
    made = list_stages(str(recipe_file), [], recipe)
    assert all(stage.state(recipe)[0] for stage in made)
    before = identify(recipe.target)
    try:
        change(target)
        assert [key for key, value in asdict(identify(recipe.target)).items() if value != asdict(before)[key]] == [part]
        states = {stage.name: stage.state(recipe) for stage in made}
        message = (
            {"eval"} if part == "stop_ids" else {"preprocess", "train", "eval"}
        )  # states and weights stop at nothing
        for name in message:
            assert not states[name][0] and f"what the target was before: {part} is " in states[name][1], states
        assert not states["preprocess"][0]  # answers to calibration prompts stop, too
        if part == "stop_ids":
            dump_here(recipe)
            call(evaluate, str(recipe_file))
            assert all(stage.state(recipe)[0] for stage in made)
            assert read_report(recipe.paths.release / "report.json")["target_identity"] == asdict(
                identify(recipe.target)
            )
        else:
            with pytest.raises(PipelineError, match=r"features of another (target|tokenizer|chat template)"):
                dump_here(recipe)
            with pytest.raises(PipelineError, match=f"holds a draft of another target .*{part} is"):
                call(evaluate, str(recipe_file))
    finally:
        shutil.rmtree(target)
        shutil.copytree(backup, target)


def test_whoever_has_not_the_target_may_look_at_a_run(of_a_folder, tmp_path, capsys):
    recipe_file, target = of_a_folder
    target.rename(tmp_path / "away")
    try:
        print_status(str(recipe_file), [])
    finally:
        (tmp_path / "away").rename(target)
    lines = capsys.readouterr().out.splitlines()
    assert "are not here: whether they changed is not known" in lines[1]
    assert [line.split()[0] for line in lines[2:]] == ["done"] * 3
