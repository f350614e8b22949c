"""The whole path as a user walks it, on the tiny target: run, run again, status, failures, release, card, upload."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from dataclasses import asdict
from io import StringIO
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from eval.main import main as evaluate
from eval.measure.report import DEPTH, by_place, is_noise, usual_said
from eval.measure.tasks import evaluation_lock, make_harness, methods_of
from eval.release import card as cards
from eval.release.folder import files_in
from eval.release.hub import require_repository_name
from eval.release.publish import build_release
from eval.results import main as show_results
from eval.tune import main as tune
from infra.plan.__main__ import SPEEDS, make, warnings
from pipeline.artifacts import checkpoint
from pipeline.artifacts.features import feature_spec
from pipeline.artifacts.provenance import measured_by
from pipeline.artifacts.reports import Row, read_report, read_rows
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import sha256
from pipeline.decoding.generate import Sampling, plain, speculative
from pipeline.decoding.sources import Sources
from pipeline.lm.embedding_head import EmbeddingAndHead
from pipeline.lm.model import Target, fingerprint, identify
from pipeline.recipe.load import load_recipe
from pipeline.running.stages import eval_state, features_state, run, stages, status
from preprocess.dump.driver import dump
from tests.hub import Hub, reached
from tests.kit import (
    TEMPLATE,
    call,
    change_sealed,
    command_environment,
    dump_here,
    flip,
    recipe_tree,
    replace_once,
    run_command,
    run_warm,
    save_tiny_target,
    wait_until,
    write_recipe,
    write_sharegpt,
)
from tests.pipeline.taught import prompt_of
from tests.warm import Forked
from train.input.features import stores

pytestmark = pytest.mark.real
SECRETS = {"HF_TOKEN": "hf_" + "aB3" * 12, "AWS_ACCESS_KEY_ID": "id-hunter2", "AWS_SECRET_ACCESS_KEY": "hunter2-alice"}
RELEASE = {
    "README.md",
    "chat_template.jinja",
    "config.json",
    "custom_generate",
    "report.html",
    "loss_curves.png",
    "model.safetensors",
    "provenance.json",
    "recipe.json",
    "release.json",
    "report.json",
    "results.jsonl",
    "tau_and_speed.png",
}


def pipeline(command: str, recipe: Path, *more: str) -> subprocess.CompletedProcess:
    return run_warm([sys.executable, "-m", "pipeline", command, str(recipe), *more])


def status_here(recipe: Path, *overrides: str) -> str:
    """What `python -m pipeline status` prints, in this process."""
    with redirect_stdout(StringIO()) as told:
        status(str(recipe), list(overrides))
    return told.getvalue()


@pytest.fixture(scope="module")
def finished(tiny_target, tmp_path_factory) -> tuple[Path, Path, str]:
    """(recipe file, run folder, what the run printed)"""
    folder = tmp_path_factory.mktemp("whole")
    tree = recipe_tree(tiny_target, write_sharegpt(folder / "data.json"), folder / "run")
    tree["eval"]["benchmarks"]["heldout"]["prompts"] = 3
    template = folder / "own.jinja"
    template.write_text("{% if not enable_thinking %}{{ strftime_now('%Y') }} {{ tone }}{% endif %}" + TEMPLATE)
    keywords = {"enable_thinking": False, "tone": "/brief"}
    tree["target"] |= {"chat_template": str(template), "template_keywords": keywords, "template_date": "2025-01-02"}
    recipe = write_recipe(tree, folder / "recipe")
    environment = {"JAKIRO_CACHE": str(folder / "cache"), **SECRETS}
    done = run_warm([sys.executable, "-m", "pipeline", "run", str(recipe)], **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not any(secret in done.stderr for secret in SECRETS.values())
    return recipe, folder / "run", done.stdout


@pytest.mark.parametrize("command", [run, lambda recipe, _: make(load_recipe(recipe), {})])
def test_a_sum_in_half_precision_is_refused_before_the_dump(command, tiny_target, tmp_path):
    tree = recipe_tree(tiny_target, write_sharegpt(tmp_path / "data.json"), tmp_path / "run")
    tree["train"] |= {"dtype": "bfloat16", "ranks": 2, "micro_batch": 1, "global_batch": 4}
    recipe = write_recipe(tree, tmp_path / "tiny.toml")
    with pytest.raises(PipelineError, match=r"zero_stage=0 would add the gradients of 2 micro-batches up in bfloat16"):
        command(str(recipe), [])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("more", [{"warmup_steps": 900, "schedule": "constant"}, {}])
def test_a_plan_warns_of_no_warm_up_that_training_takes(more, tiny_target, tmp_path):
    tree = recipe_tree(tiny_target, write_sharegpt(tmp_path / "data.json"), tmp_path / "run")
    tree["train"] |= more
    recipe = load_recipe(str(write_recipe(tree, tmp_path / "tiny.toml")), [])
    assert not list(warnings(make(recipe, dict.fromkeys(SPEEDS, 1.0))))


def test_a_plan_warns_of_a_warm_up_that_training_may_refuse(tiny_target, tmp_path, monkeypatch):
    monkeypatch.setattr("infra.plan.__main__.require_sizes", lambda recipe: None)  # refuses what is clearly too long
    tree = recipe_tree(tiny_target, write_sharegpt(tmp_path / "data.json"), tmp_path / "run")
    tree["train"]["warmup_steps"] = 900
    recipe = load_recipe(str(write_recipe(tree, tmp_path / "tiny.toml")), [])
    (line,) = warnings(make(recipe, dict.fromkeys(SPEEDS, 1.0)))
    assert "refuses train.warmup_steps=900 of about " in line


def test_a_run_ends_with_its_table_its_release_and_its_plots(finished):
    _, run, printed = finished
    for stage in ("preprocess: ", "train: ", "eval: ", "| heldout   | 0 | eagle  | ", "| heldout   | 1 | jakiro | "):
        assert stage in printed
    assert max(len(line) for line in printed.splitlines() if line.startswith("|")) <= 100
    assert "| heldout | 1 | jakiro | 3 |" in (run / "eval/table.md").read_text()
    assert re.search(r"eagle: [\d,]+ trained tokens, tau \d\.\d\d as training estimates it; jakiro: ", printed)
    unwrapped = printed.replace("\n", "")
    assert f"release: {run}/release/" in unwrapped and f"{run}/release/tau_and_speed.png" in unwrapped
    deep = any(row.figure == f"{DEPTH}2" for row in read_rows(run / "release"))  # the target is random, and so is this
    depths = {"acceptance_by_depth.png"} if deep else set()
    assert {path.name for path in (run / "release").iterdir()} == RELEASE | depths


def test_a_run_leaves_the_environments_secrets_nowhere(finished):
    _, run, printed = finished
    files = [path for path in run.rglob("*") if path.is_file()]
    assert {"preprocess.log", "train.log", "config.json", "recipe.json", "own-recipe.json"} <= {f.name for f in files}
    for secret in SECRETS.values():
        assert not [path for path in files if secret.encode() in path.read_bytes()] and secret not in printed


def test_without_a_terminal_a_run_says_a_line_where_a_stage_starts_and_ends(finished):
    _, _, printed = finished
    for stage in ("preprocess", "train", "eval"):  # on a slow machine there are lines between
        told = [line for line in printed.splitlines() if line.startswith(f"{stage}: ")]
        assert told[0].startswith(f"{stage}: starts at ")
        assert re.search(r", \d+ min \d\d s$", told[-1]) and len(told) >= 2
    assert "\r" not in printed and "\x1b" not in printed


def test_a_second_run_does_nothing_again(finished):
    recipe, run, _ = finished
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    again = pipeline("run", recipe)
    assert again.returncode == 0, again.stdout + again.stderr
    assert again.stdout.count("done already") == 3
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()} == before


def test_status_says_what_is_done_and_what_is_not(finished, tmp_path):
    recipe, _, _ = finished
    lines = pipeline("status", recipe).stdout.splitlines()[1:]
    assert [line.split()[:2] for line in lines] == [["done", "preprocess"], ["done", "train"], ["done", "eval"]]
    for override, done in (("train.epochs=3", [True, False, False]), (f"output={tmp_path / 'new'}", [False] * 3)):
        changed = load_recipe(recipe, [override])
        assert [stage.state(changed)[0] for stage in stages(str(recipe), [override], changed)] == done


def test_a_failing_stage_stops_the_run_with_its_own_message(finished, tmp_path):
    recipe, _, _ = finished
    source = tmp_path / "data.json"
    source.write_text("no JSON")
    failed = pipeline("run", recipe, "--set", f"output={tmp_path / 'run'}", "--set", f'data.source="{source}"')
    assert failed.returncode == 2
    assert "stage preprocess failed" in failed.stderr and "its first record cannot be parsed" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert not (tmp_path / "run/drafts").exists()


def test_ranks_that_cannot_share_a_batch_are_refused_before_the_dump(tiny_target, tmp_path, monkeypatch):
    tree = recipe_tree(tiny_target, write_sharegpt(tmp_path / "data.json"), tmp_path / "run")
    tree["train"].pop("ranks", None)  # every GPU
    tree["target"]["device"] = "auto"
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 3)
    with pytest.raises(PipelineError, match="is no multiple of micro_batch x ranks = 4 x 3"):
        run(str(write_recipe(tree, tmp_path / "recipe")), [])
    assert not (tmp_path / "run").exists()


def test_a_run_that_is_ended_leaves_no_process_behind(finished, tmp_path):
    recipe, run, _ = finished
    (tmp_path / "run").mkdir()
    (tmp_path / "run/features").symlink_to(run / "features")
    mark = str(shutil.copy(recipe, tmp_path / "recipe.json"))  # no other command line names it
    output = f"output={tmp_path / 'run'}"
    command = [sys.executable, "-m", "pipeline", "run", mark, "--set", output, "--set", "train.epochs=5000"]
    process = Forked(command, command_environment())
    started = wait_until((tmp_path / "run/drafts/eagle/metrics.jsonl").exists, process)
    os.kill(process.pid, signal.SIGTERM)
    # Whatever is left, a rank or its launcher, would train for far longer.
    wait_until(lambda: process.poll() is not None and not running(mark), seconds=5 * started)


def running(mark: str) -> list[str]:
    """The command lines with `mark` in them."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            found.append((process / "cmdline").read_bytes().decode(errors="replace"))
    return [line for line in found if mark in line]


def test_the_report_measured_exactly_the_released_weights_and_nothing_was_lost(finished):
    _, run, _ = finished
    report = json.loads((run / "release/report.json").read_text())
    weights = sha256(run / "release/model.safetensors")
    assert report["drafts"]["jakiro"]["weights_sha256"] == weights == sha256(run / "drafts/jakiro/model.safetensors")
    for (_, temperature, _), found in decoded(run).items():
        gate = found["lossless"].details
        assert found["lossless"].value == 1 and gate["checked"] > 0 and found["speedup"].value is not None
        if temperature == 0:
            assert gate["identical"] == gate["checked"]


def decoded(run: Path) -> dict:
    """What a run's release says: by benchmark, temperature and method, rows by figure."""
    return by_place(read_rows(run / "release"))


def test_no_private_path_and_no_foreign_tensor_leaves_with_a_release(finished, tiny_target):
    _, run, _ = finished
    for path in map((run / "release").joinpath, files_in(run / "release")):
        if path.suffix in (".md", ".json", ".py"):
            text = path.read_text()
            assert str(run) not in text and str(tiny_target.parent) not in text, path.name
    tensors = load_file(run / "release/model.safetensors")
    assert not [name for name in tensors if "embed" in name or "head" in name]


def test_the_code_on_the_card_runs(finished, tiny_target, tmp_path):
    """Both blocks: transformers' `generate` with the release's own code, and `pipeline.load`."""
    _, run, _ = finished
    card = (run / "release/README.md").read_text()
    one, other = re.findall(r"```python\n(.*?)```", card, re.DOTALL)[:2]
    code = one + "print(tokens.shape[1] - inputs['input_ids'].shape[1], 'new')\n" + other
    code = code.replace("PATH/TO/THIS/FOLDER", str(run / "release"))
    code = code.replace(f'"PATH/TO/{tiny_target.name}"', f'"{tiny_target}"').replace(
        f'"{tiny_target.name}"', f'"{tiny_target}"'
    )
    done = run_command([sys.executable, "-c", code], HF_MODULES_CACHE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert re.search(r"^[1-9]\d* new\n(.*\n)*tau \d", done.stdout, re.MULTILINE)


def test_the_card_states_figures_first_and_the_hubs_index_holds_the_released_methods(finished):
    _, run, _ = finished
    _, head, body = (run / "release/README.md").read_text().split("---\n", 2)
    head = yaml.safe_load(head)
    assert {"speculative-decoding", "draft-model", "custom_generate", "jakiro"} == set(head["tags"])
    (entry,) = head["model-index"]
    stated = {(r["dataset"]["name"], m["type"], m["name"]): m["value"] for r in entry["results"] for m in r["metrics"]}
    assert stated == {
        (f"heldout, T = {temperature:g}, 3 prompts", key, f"{key} of jakiro (the draft alone)"): found[figure].value
        for (_, temperature, method), found in decoded(run).items()
        for key, figure in (("tau", "tau"), ("speed-up", "speedup"))
        if method == "jakiro" and not (key == "speed-up" and is_noise(found["speedup"], found["tau"]))
    }
    assert "The release decodes with `jakiro`, the draft alone." in body
    assert body.index("| heldout | 0 | jakiro |") < body.index("<details>") < body.index("tau = tokens emitted")
    assert body.index("</details>") < body.index("## Use")
    engines = body.partition("## In engines")[2].partition("## What it is")[0]
    assert re.search(r"^vllm serve TARGET .*exported", engines, re.MULTILINE) and "infra/vllm_jakiro" in engines
    assert "llama.cpp" not in engines and re.search(r"a chain of this draft has a tau of \d\.\d\d", engines)


def test_every_artifact_says_what_the_chat_template_was_told(finished):
    _, run, _ = finished
    said = 'thinking off, date 2025-01-02, enable_thinking = false, tone = "/brief"'
    manifest, report = (json.loads((run / name).read_text()) for name in ("features/manifest.json", "eval/report.json"))
    config = json.loads((run / "release/config.json").read_text())
    assert manifest["spec"]["template_settings"] == report["template"] == config["training"]["template"] == said
    assert said in (run / "release/README.md").read_text() and said in (run / "logs/preprocess.log").read_text()


@pytest.mark.parametrize("change", ["template_keywords.enable_thinking=true", "template_date=2025-01-03"])
def test_other_keywords_are_refused_at_every_stage_by_their_name(finished, change):
    recipe, _, _ = finished
    key, value = change.split("=")
    changed = load_recipe(recipe, [f"target.{change}"])
    with pytest.raises(PipelineError, match=r"features: features of other settings of the chat template") as of_dump:
        dump(changed)
    with pytest.raises(PipelineError, match=r"features: features of other settings of the chat template") as of_train:
        stores(changed, feature_spec(changed))
    for caught in (of_dump, of_train):
        told = f"enable_thinking = {value}" if "thinking" in key else f"date {value}"
        assert told in str(caught.value) and "thinking off, date 2025-01-02, enable_thinking = false" in str(
            caught.value
        )
    with pytest.raises(
        PipelineError, match=rf"trained with other settings: target\.{key}: .* -> \"?{value}\"?\. Take these back"
    ):
        methods_of(changed)


def test_status_tells_a_dump_that_has_begun_from_none(tiny_recipe):
    assert features_state(tiny_recipe) == (False, "not started")
    tiny_recipe.features_dir.mkdir(parents=True)
    assert features_state(tiny_recipe) == (False, "no shard yet")


def test_weights_that_were_not_measured_are_not_released(finished, tmp_path):
    recipe, run, _ = finished
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    for name in ("model.safetensors", "config.json"):
        shutil.copy(copy / "drafts/eagle" / name, copy / "drafts/jakiro" / name)
    told = status_here(recipe, f"output={copy}")
    assert "to do  train" in told and "to do  eval" in told


@pytest.mark.parametrize("damage", ["missing", "foreign", "other settings"])
def test_evaluation_refuses_a_missing_or_foreign_checkpoint(finished, tmp_path, damage):
    recipe, run, _ = finished
    copy = tmp_path / "run"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("eval", "release"))
    config, sets = copy / "drafts/jakiro/config.json", []
    if damage == "missing":
        config.unlink()
        message = "holds no draft checkpoint"
    elif damage == "other settings":
        sets = ["train.epochs=9"]
        message = "trained with other settings"
    else:
        change_sealed(config, lambda raw: raw["target"].update(fingerprint="0123456789abcdef"))
        message = "holds a draft of another target"
    changed_recipe = load_recipe(recipe, [f"output={copy}", *sets])
    with pytest.raises(PipelineError, match=message):
        make_harness(changed_recipe, methods_of(changed_recipe))
    with pytest.raises(PipelineError, match=message):
        call(evaluate, str(recipe), *(word for one in (f"output={copy}", *sets) for word in ("--set", one)))
    assert not (copy / "release").exists()


def test_a_name_that_the_hub_cannot_hold_is_refused_before_anything_is_measured():
    for name in ("no good/name", "noowner"):
        with pytest.raises(PipelineError, match=f"--push '{name}'"):
            require_repository_name(name)


def test_push_uploads_the_release_and_only_on_demand(finished, monkeypatch, capsys):
    """What else a Hub can answer: tests/eval/test_push.py."""
    recipe, run, _ = finished
    with Hub() as hub, reached(monkeypatch, hub):
        call(evaluate, str(recipe))
        assert not hub.requests
        call(evaluate, str(recipe), "--push", "me/draft")
        assert f"uploaded: {hub.url}/me/draft/commit/" in capsys.readouterr().out
        assert hub.created[0]["visibility"] == "private"
        assert {path: len(content) for path, content in hub.files.items()} == {
            name: (run / "release" / name).stat().st_size
            for name in files_in(run / "release")
            if name != "release.json"
        }
        monkeypatch.setenv("HF_TOKEN", "hf_wrong")
        with pytest.raises(PipelineError, match=r"the Hub refused the upload to me/draft \(401\)") as refused:
            call(evaluate, str(recipe), "--push", "me/draft")
        assert "hf_wrong" not in str(refused.value) + capsys.readouterr().out


# -- what can be asked of a finished run ----------------------------------------------------------------------------


@pytest.fixture
def copied(finished, tmp_path) -> tuple[Path, Path]:
    """(recipe, a copy of the run that a test may change)"""
    recipe, run, _ = finished
    shutil.copytree(run, tmp_path / "run")
    return recipe, tmp_path / "run"


def test_whoever_the_umask_lets_reads_every_artifact(finished):
    """But for the recipe with this machine's paths. A cluster's users read each other's runs."""
    run, made = finished[1], finished[1] / "made"
    made.touch()
    expected = made.stat().st_mode
    made.unlink()
    files = {path.relative_to(run).as_posix(): path.stat().st_mode for path in run.rglob("*") if path.is_file()}
    assert {"release/model.safetensors", "features/own-recipe.json"} <= set(files)
    assert [name for name, mode in files.items() if mode != expected] == ["features/own-recipe.json"]


def test_what_changed_since_it_was_written_is_neither_released_nor_done(copied):
    """A figure of the report, a plot, the draft's own words: each is named, and nothing of the release is touched."""
    recipe_file, run = copied
    recipe, release = load_recipe(recipe_file, [f"output={run}"]), run / "release"
    before = {name: sha256(release / name) for name in files_in(release)}
    for path, old, new in (
        (run / "eval/report.json", '"max_new_tokens": ', '"max_new_tokens": 9'),
        (run / "eval/results.jsonl", '"value": ', '"value": 9'),
        (run / "eval/recipe.json", '"seed": 0', '"seed": 1'),
        (run / "drafts/jakiro/config.json", '"rope_theta": ', '"rope_theta": 3'),
        (run / "drafts/jakiro/provenance.json", '"hardware": "', '"hardware": "8 x '),
        (run / "eval/tau_and_speed.png", None, None),
    ):
        whole = path.read_bytes()
        replace_once(path, old, new) if old else flip(path)
        told = "(: line 1)? (was changed or damaged|is missing, or not the plot)"
        with pytest.raises(PipelineError, match=path.name + told):
            build_release(recipe)
        path.write_bytes(whole)
    assert {name: sha256(release / name) for name in files_in(release)} == before
    assert build_release(recipe)[0] == release
    evaluation = next(stage for stage in stages(str(recipe_file), [], recipe) if stage.name == "eval")
    assert evaluation.state(recipe)[0]
    change_sealed(release / "release.json", lambda raw: raw["pending"].update({"README.md": "0" * 64}))
    assert evaluation.state(recipe) == (False, "no release")  # it was broken off
    replace_once(release / "report.json", '"max_new_tokens": ', '"max_new_tokens": 9')
    change_sealed(release / "release.json", lambda raw: raw["pending"].clear())
    with pytest.raises(PipelineError, match=r"release/report.json was changed or damaged"):
        evaluation.state(recipe)


def renamed_tokens(target: Path) -> None:
    """Two tokens of the vocabulary swap their ids."""
    raw = json.loads((target / "tokenizer.json").read_text())
    vocabulary = raw["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (target / "tokenizer.json").write_text(json.dumps(raw))


def with_bos(target: Path) -> None:
    """Each text begins with a token that it did not begin with."""
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
    """(recipe, target) of a finished run whose target brings all that it is in its folder."""
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
    """No figure of what it was before is shown as its own, or released."""
    recipe_file, target = of_a_folder
    whole = tmp_path / "whole"
    shutil.copytree(target, whole)
    recipe = load_recipe(recipe_file)
    made = stages(str(recipe_file), [], recipe)
    assert all(stage.state(recipe)[0] for stage in made)
    before = identify(recipe.target)
    try:
        change(target)
        assert [key for key, value in asdict(identify(recipe.target)).items() if value != asdict(before)[key]] == [part]
        states = {stage.name: stage.state(recipe) for stage in made}
        seen = {"eval"} if part == "stop_ids" else {"preprocess", "train", "eval"}  # states and weights stop at nothing
        for name in seen:
            assert not states[name][0] and f"what the target was before: {part} is " in states[name][1], states
        assert not states["preprocess"][0]  # answers to calibration prompts stop, too
        if part == "stop_ids":
            dump_here(recipe)
            call(evaluate, str(recipe_file))
            assert all(stage.state(recipe)[0] for stage in made)
            assert read_report(recipe.release_dir / "report.json")["target_identity"] == asdict(identify(recipe.target))
        else:
            with pytest.raises(PipelineError, match=r"features of another (target|tokenizer|chat template)"):
                dump_here(recipe)
            with pytest.raises(PipelineError, match=f"holds a draft of another target .*{part} is"):
                call(evaluate, str(recipe_file))
    finally:
        shutil.rmtree(target)
        shutil.copytree(whole, target)


def test_whoever_has_not_the_target_may_look_at_a_run(of_a_folder, tmp_path):
    recipe_file, target = of_a_folder
    target.rename(tmp_path / "away")
    try:
        lines = status_here(recipe_file).splitlines()
    finally:
        (tmp_path / "away").rename(target)
    assert "are not here: whether they changed is not known" in lines[1]
    assert [line.split()[0] for line in lines[2:]] == ["done"] * 3


def test_one_command_at_a_time_measures_a_run(copied):
    """A tuned tree would stand over what was not measured with it, and of two tuners one would lose its result."""
    recipe, run = copied
    with evaluation_lock(load_recipe(recipe, [f"output={run}"])):
        for command in (evaluate, tune):
            with pytest.raises(PipelineError, match="eval: another evaluation or tuning is writing here"):
                call(command, str(recipe), "--set", f"output={run}")


def answers_of(run: Path) -> dict:
    found = {}
    for line in (run / "eval/records.jsonl").read_text().splitlines():
        for record in json.loads(line)["outcome"]["records"]:
            place = tuple(
                record[key] for key in ("benchmark", "question_id", "turn", "temperature", "method", "repeat")
            )
            found[place] = record["generation"]["tokens"]
    return found


def test_ray_workers_measure_what_one_process_does_and_finished_prompts_are_kept(copied, on_cluster):
    recipe, run = copied
    before, records = answers_of(run), run / "eval/records.jsonl"
    kept = records.read_text().splitlines()[:2]
    records.write_text(
        "\n".join([*kept, kept[1][:100]]) + "\n"
    )  # four of six prompts were lost, one in the middle of a line
    (run / "eval/report.json").unlink()
    call(evaluate, str(recipe), "--set", f"output={run}", "--set", "eval.workers=2")
    assert records.read_text().splitlines()[:2] == kept  # timings included: they were not decoded again
    assert answers_of(run) == before


def test_another_version_of_the_measurement_releases_no_old_figures(copied, monkeypatch):
    recipe, run = copied
    sets, records = [f"output={run}"], run / "eval/records.jsonl"
    before = records.read_text().splitlines()
    monkeypatch.setattr("pipeline.artifacts.provenance.MEASURE_VERSION", 0)
    found = load_recipe(recipe, sets)
    assert eval_state(found) == (False, f"release that was not measured by {measured_by()}")
    call(evaluate, str(recipe), "--set", sets[0])
    assert len(records.read_text().splitlines()) == 2 * len(before)
    assert eval_state(found)[0]


def test_a_tuned_tree_is_predicted_measured_and_released(copied, tmp_path, capsys):
    recipe, run = copied
    sets = ["--set", f"output={run}"]
    tuned = run_warm(
        [sys.executable, "eval/tune.py", str(recipe), *sets, "--method", "jakiro", "--max-nodes", "8", "--depth", "3"]
    )
    assert tuned.returncode == 0, tuned.stdout + tuned.stderr
    figures = json.loads((run / "eval/tuned.json").read_text())["jakiro"]
    assert figures["predicted"]["tau"] == figures["measured"]["tau"]  # replayed, not estimated
    assert figures["predicted_over_measured"] > 0 and figures["method"]["tree"]["nodes"] <= 8
    assert "to do  eval        release without the tuned trees" in status_here(recipe, f"output={run}")

    call(evaluate, str(recipe), *sets)
    assert "jakiro-tuned" in capsys.readouterr().out
    assert "| heldout | 0 | jakiro-tuned | 3 |" in (run / "eval/table.md").read_text()
    released = json.loads((run / "release/config.json").read_text())["method"]
    found = decoded(run)
    speeds = {
        name: math.prod(of["speedup"].value for place, of in found.items() if place[2] == name)
        for name in ("jakiro", "jakiro-tuned")
    }
    faster = speeds["jakiro-tuned"] > speeds["jakiro"]
    assert (released == figures["method"]) == faster or speeds["jakiro-tuned"] == speeds["jakiro"]
    card = (run / "release/README.md").read_text()
    assert ("chosen for the hardware above" in card) == faster
    assert f"- {'jakiro' if faster else 'jakiro-tuned'}: these weights; dynamic, depth" in card
    call(show_results, str(run), "--plot", str(tmp_path / "table.png"))
    shown = capsys.readouterr().out
    assert set(found) == {("heldout", t, name) for name in ("eagle", "jakiro", "jakiro-tuned") for t in (0.0, 1.0)}
    for (_, temperature, method), of in found.items():
        assert f"| {temperature:g} | {method} | {' | '.join(usual_said(of))} |" in shown
    assert (tmp_path / "table.png").stat().st_size > 5000
    call(show_results, str(run), "--against", "eagle")
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split(" | ")[:2] for line in lines] == [["| jakiro", "eagle"], ["| jakiro-tuned", "eagle"]]
    call(show_results, str(run), "--learning-rates")
    shown = capsys.readouterr().out
    for name in ("eagle", "jakiro"):
        validation = checkpoint.read_config(run / "drafts" / name).training["validation"]
        assert f"| {name} | 0.001 | {validation['estimated_tau']:.3f} |" in shown

    call(evaluate, str(recipe), *sets, "--tuned")
    said = (run / "eval/table.md").read_text()
    assert "| jakiro-tuned | 3 |" in said and "| eagle | 3 |" in said and "| jakiro | 3 |" not in said
    assert json.loads((run / "release/config.json").read_text())["method"] == figures["method"]
    assert eval_state(load_recipe(recipe, [f"output={run}"]))[0]

    change_sealed(run / "drafts/jakiro/config.json", lambda raw: raw.update(weights_sha256="0" * 64))
    with pytest.raises(PipelineError, match="jakiro was tuned for other weights or settings"):
        methods_of(load_recipe(recipe, [f"output={run}"]))


def test_tau_by_context_length_is_measured_drawn_and_stated(copied):
    recipe, run = copied
    call(evaluate, str(recipe), "--set", f"output={run}", "--set", "eval.contexts=[200, 280]")
    found, card = decoded(run), (run / "release/README.md").read_text()
    assert {place[0] for place in found} == {"heldout", "heldout-200", "heldout-280"}
    stated = (f"{found[f'heldout-{n}', 0.0, 'jakiro']['tau'].value:.2f} at {n}" for n in (200, 280))
    assert f"tau of `jakiro` by context length, at the lowest T: {', '.join(stated)} tokens; longer contexts" in card
    assert (
        "![tau by context](tau_by_context.png)" in card and (run / "release/tau_by_context.png").stat().st_size > 5000
    )


def test_a_draft_with_prompt_lookup_beside_it_is_tuned_measured_and_released(copied, tmp_path, capsys, monkeypatch):
    """What is released decodes as plain decoding does."""
    recipe, run = copied
    both = 'eval.methods.both={draft="jakiro", secondary=["prompt-lookup"]}'
    sets = [f"output={run}", 'draft.prompt-lookup={kind="prompt-lookup"}', both]
    flags = [word for one in sets for word in ("--set", one)]
    shape = ["--method", "both", "--max-nodes", "8", "--depth", "2", "--prompts", "2"]
    with pytest.raises(PipelineError, match="nothing is tuned: run"):
        methods_of(load_recipe(recipe, sets), tuned_alone=True)
    call(tune, str(recipe), *flags, *shape)
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"{run / 'eval/tuned.json'} is written")
    kept = json.loads((run / "eval/tuned.json").read_text())["both"]
    assert kept["predicted"]["tau"] == kept["measured"]["tau"]  # replayed, not estimated

    call(evaluate, str(recipe), *flags)
    table = capsys.readouterr().out
    assert all(f"| heldout   | 0 | {name} " in table for name in ("prompt-lookup", "both", "both-tuned"))
    found = load_recipe(recipe, sets)
    monkeypatch.setattr(cards, "released_method", lambda *_: "both-tuned")
    build_release(found)
    assert_each_figure_names_its_method(run / "release")
    target, mark = Target(found.target, "float32"), fingerprint(found.target)
    draft = checkpoint.load(run / "release", mark)
    draft.bind(EmbeddingAndHead(target.embedding_VD, target.head, mark))
    method = checkpoint.read_config(run / "release").loaded(draft)
    assert method.tree.to_json() == kept["method"]["tree"] and isinstance(method.draft, Sources)
    sampling, prompt = Sampling(20, frozenset()), prompt_of(1) * 2
    assert speculative(target, method, prompt, sampling).tokens == plain(target, prompt, sampling).tokens

    for other in ('eval.methods.both.agreement="max"', "eval.temperatures=[0.0]", "eval.top_p=0.9"):
        with pytest.raises(PipelineError, match="both was tuned for other weights or settings"):
            methods_of(load_recipe(recipe, [*sets, other]))
    change_sealed(run / "eval/tuned.json", lambda raw: raw["both"].pop("for"))  # as an older version wrote it
    with pytest.raises(PipelineError, match="both was tuned for other weights or settings"):
        methods_of(found)
    call(tune, str(recipe), *flags, *shape)  # which the tuner mends
    assert set(methods_of(found)) >= {"both", "both-tuned"}


def assert_each_figure_names_its_method(release: Path) -> None:
    """The draft alone stands beside the draft with prompt lookup, which the release decodes with."""
    _, head, body = (release / "README.md").read_text().split("---\n", 2)
    assert "prompt-lookup beside the draft" in body
    assert "decodes with `both-tuned`: prompt-lookup beside the draft in one tree. `jakiro` is the draft alone." in body
    first, page = body.partition("<details>")[0], (release / "report.html").read_text()
    rows = [line for line in first.splitlines() if line.startswith("| heldout")]
    assert [row.split(" | ")[1:3] for row in rows] == [[t, m] for t in "01" for m in ("jakiro", "both-tuned")]
    shown = re.findall(r"<td>heldout</td><td>(.*?)</td><td>(.*?)</td>", page)
    assert shown[:2] == [("0", "jakiro"), ("0", "both-tuned")] and len(shown) == 2 * len({m for _, m in shown})
    assert "Shaded: both-tuned, how the release decodes; jakiro is the draft alone." in page
    measured = decoded(release.parent)
    for result in yaml.safe_load(head)["model-index"][0]["results"]:
        temperature = float(result["dataset"]["config"].removeprefix("T = "))
        of = {one["name"]: one["value"] for one in result["metrics"] if one["type"] == "tau"}
        assert of == {
            "tau of jakiro (the draft alone)": measured["heldout", temperature, "jakiro"]["tau"].value,
            "tau of both-tuned (as released)": measured["heldout", temperature, "both-tuned"]["tau"].value,
        }


def test_a_corpus_is_measured_with_and_stays_on_this_machine(copied, tmp_path, capsys, monkeypatch):
    recipe, run = copied
    corpus = tmp_path / "my folder" / "my notes"
    corpus.parent.mkdir()
    corpus.write_text("one two three " * 20)
    both = 'eval.methods.both={draft="jakiro", secondary=["prompt-lookup"]}'
    sets = [f"output={run}", f'draft.prompt-lookup={{kind="prompt-lookup", corpus="{corpus}"}}', both]
    flags = [word for one in sets for word in ("--set", one)]
    call(tune, str(recipe), *flags, "--method", "both", "--max-nodes", "6", "--depth", "2", "--prompts", "1")
    call(evaluate, str(recipe), *flags)
    found = load_recipe(recipe, sets)
    measured = json.loads((run / "eval/report.json").read_text())
    assert measured["drafts"]["both-tuned"]["corpora"] == [sha256(corpus)]
    names = [name for name in measured["drafts"] if name.startswith(("both", "jakiro"))]
    rows = [Row("decoded", name, "speedup", 9.0 if name.startswith("both") else 1.0) for name in names]
    assert cards.released_method(found, measured, rows) == "jakiro"  # a release does not hold the text
    assert "prompt lookup also in a text that is not part of this release" in (run / "release/README.md").read_text()
    for folder in (run / "release", run / "eval"):
        for name in files_in(folder):
            for private in (b"my folder", b"my notes"):
                assert private not in (folder / name).read_bytes(), name
    monkeypatch.setattr(cards, "released_method", lambda *_: "both-tuned")
    build_release(found)
    assert checkpoint.read_config(run / "release").secondary["prompt-lookup"].corpus is None
    assert eval_state(found)[0]
    corpus.write_text("another text")
    assert eval_state(found) == (False, "release of another corpus")
    with pytest.raises(PipelineError, match="both was tuned for other weights or settings"):
        methods_of(found)
    capsys.readouterr()


def test_a_draft_of_its_own_name_stands_alone(tiny_recipe, tmp_path):
    """So that what it is trained, saved and shown with is the draft's own."""
    recipe = write_recipe(tiny_recipe.model_dump(mode="json"), tmp_path / "recipe")
    beside = 'eval.methods.jakiro={secondary=["prompt-lookup"]}'
    with pytest.raises(PipelineError, match="jakiro: a draft of that name stands alone"):
        load_recipe(recipe, ['draft.prompt-lookup={kind="prompt-lookup"}', beside])


@pytest.mark.parametrize(
    ("beside", "said"),
    [
        (
            '{draft="jakiro", secondary=["eagle"]}',
            "secondary='eagle': expected drafts of the recipe that take no forwards",
        ),
        ('{draft="jakiro", secondary=["prompt-lookup", "prompt-lookup"]}', "each once"),
        ('{draft="prompt-lookup", secondary=["prompt-lookup"]}', "draft='prompt-lookup' is not trained"),
        (
            '{draft="jakiro", secondary=["prompt-lookup"], tree={depth=1, top_k=3, nodes=35}}',
            "sources propose at most 34",
        ),
        ('{draft="jakiro", secondary=["prompt-lookup"], tree={paths="eagle-1"}}', "have no ranks for a static tree"),
    ],
)
def test_what_cannot_stand_beside_a_draft_is_refused(tiny_recipe, tmp_path, beside, said):
    with pytest.raises(PipelineError, match=said):
        load_recipe(
            write_recipe(tiny_recipe.model_dump(mode="json"), tmp_path / "recipe"),
            ['draft.prompt-lookup={kind="prompt-lookup"}', f"eval.methods.both={beside}"],
        )
