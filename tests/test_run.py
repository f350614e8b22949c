"""The complete path of a user, on the tiny target: run, run again, status, failures, release, card, upload."""

import json
import math
import re
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from eval.main import main as evaluate
from eval.measure.report import DEPTH, format_tau_and_speedup, group_by_place, is_noise
from eval.measure.tasks import evaluation_lock, load_methods
from eval.release import card as cards
from eval.release.folder import files_in
from eval.release.publish import build_release
from eval.results import main as show_results
from eval.tune import main as tune
from pipeline.artifacts import checkpoint
from pipeline.artifacts.features import feature_spec
from pipeline.artifacts.provenance import measurement_versions
from pipeline.artifacts.reports import ResultRow, read_rows
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import sha256
from pipeline.decoding.generate import Sampling, decode_plain, decode_speculative
from pipeline.decoding.sources import Sources
from pipeline.lm.model import Target, fingerprint
from pipeline.lm.states import EmbeddingAndHead
from pipeline.recipe.load import load_recipe, override_arguments
from pipeline.running.stages import eval_state, features_state, list_stages, print_status, run
from preprocess.dump.driver import dump
from tests.hub import Hub, reached
from tests.kit import (
    TEMPLATE,
    call,
    change_sealed,
    flip,
    recipe_tree,
    replace_once,
    run_command,
    run_warm,
    write_recipe,
    write_sharegpt,
)
from tests.pipeline.taught import prompt_of
from train.input.features import open_stores

pytestmark = pytest.mark.real
SECRETS = {"HF_TOKEN": "hf_" + "aB3" * 12, "AWS_ACCESS_KEY_ID": "id-hunter2", "AWS_SECRET_ACCESS_KEY": "hunter2-alice"}
RELEASE = {
    *("README.md", "chat_template.jinja", "config.json", "custom_generate", "loss_curves.png", "model.safetensors"),
    *("provenance.json", "recipe.json", "release.json", "report.html", "report.json", "results.jsonl"),
    "tau_and_speed.png",
}


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
    for stage in ("preprocess", "train", "eval"):  # on a slow machine there are lines between
        stage_lines = [line for line in printed.splitlines() if line.startswith(f"{stage}: ")]
        assert stage_lines[0].startswith(f"{stage}: starts at ") and re.search(r", \d+ min \d\d s$", stage_lines[-1])
    assert "\r" not in printed and "\x1b" not in printed  # this is no terminal


def test_a_run_leaves_the_environments_secrets_nowhere_and_its_artifacts_to_all_readers(finished):
    """The users of a cluster can read each other's runs, except for the recipe with this machine's paths."""
    _, run, printed = finished
    files = {path.relative_to(run).as_posix(): path for path in run.rglob("*") if path.is_file()}
    expected_files = {"logs/preprocess.log", "logs/train.log", "metrics/eval.json", "release/recipe.json"}
    assert expected_files | {"features/own-recipe.json"} <= files.keys()
    for secret in SECRETS.values():
        assert not [name for name, path in files.items() if secret.encode() in path.read_bytes()]
        assert secret not in printed
    (made := run / "made").touch()
    expected = made.stat().st_mode
    made.unlink()
    closed = [name for name, path in files.items() if path.stat().st_mode != expected]
    assert closed == ["features/own-recipe.json"]


def test_a_second_run_does_nothing_again_and_status_says_what_is_done_and_what_is_not(finished, tmp_path, capsys):
    recipe, folder, _ = finished
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    run(str(recipe), [])
    assert capsys.readouterr().out.count("done already") == 3
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()} == before
    print_status(str(recipe), [])
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[:2] for line in lines] == [["done", "preprocess"], ["done", "train"], ["done", "eval"]]
    for override, done in (("train.epochs=3", [True, False, False]), (f"output={tmp_path / 'new'}", [False] * 3)):
        changed = load_recipe(recipe, [override])
        assert [stage.state(changed)[0] for stage in list_stages(str(recipe), [override], changed)] == done
    changed.paths.features.mkdir(parents=True)
    assert features_state(changed) == (False, "no shard yet")


def test_the_report_measured_exactly_the_released_weights_and_nothing_was_lost(finished):
    _, run, _ = finished
    report = json.loads((run / "release/report.json").read_text())
    weights = sha256(run / "release/model.safetensors")
    assert report["drafts"]["jakiro"]["weights_sha256"] == weights == sha256(run / "drafts/jakiro/model.safetensors")
    for (_, temperature, _), figures in decoded(run).items():
        gate = figures["lossless"].details
        assert figures["lossless"].value == 1 and gate["checked"] > 0 and figures["speedup"].value is not None
        if temperature == 0:
            assert gate["identical"] == gate["checked"]


def decoded(run: Path) -> dict:
    """Return a release's rows by benchmark, temperature and method, and by figure."""
    return group_by_place(read_rows(run / "release"))


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
    transformers_code, pipeline_code = re.findall(r"```python\n(.*?)```", card, re.DOTALL)[:2]
    code = transformers_code + "print(tokens.shape[1] - inputs['input_ids'].shape[1], 'new')\n" + pipeline_code
    code = code.replace("PATH/TO/THIS/FOLDER", str(run / "release"))
    for name in (f'"PATH/TO/{tiny_target.name}"', f'"{tiny_target.name}"'):
        code = code.replace(name, f'"{tiny_target}"')
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
        (f"heldout, T = {temperature:g}, 3 prompts", key, f"{key} of jakiro (the draft alone)"): figures[figure].value
        for (_, temperature, method), figures in decoded(run).items()
        for key, figure in (("tau", "tau"), ("speed-up", "speedup"))
        if method == "jakiro" and not (key == "speed-up" and is_noise(figures["speedup"], figures["tau"]))
    }
    assert "The release decodes with `jakiro`, the draft alone." in body
    assert body.index("| heldout | 0 | jakiro |") < body.index("<details>") < body.index("tau = tokens emitted")
    assert body.index("</details>") < body.index("## Use")
    engines = body.partition("## In engines")[2].partition("## What it is")[0]
    assert (
        re.search(r"^VLLM_USE_V2_MODEL_RUNNER=0 vllm serve TARGET .*exported", engines, re.MULTILINE)
        and "infra/vllm_jakiro" in engines
    )
    assert "llama.cpp" not in engines and re.search(r"a chain of this draft has a tau of \d\.\d\d", engines)


def test_every_artifact_says_what_the_chat_template_was_told(finished):
    _, run, _ = finished
    settings_text = 'thinking off, date 2025-01-02, enable_thinking = false, tone = "/brief"'
    manifest, report = (json.loads((run / name).read_text()) for name in ("features/manifest.json", "eval/report.json"))
    config = json.loads((run / "release/config.json").read_text())
    assert (
        manifest["spec"]["template_settings"] == report["template"] == config["training"]["template"] == settings_text
    )
    assert (
        settings_text in (run / "release/README.md").read_text()
        and settings_text in (run / "logs/preprocess.log").read_text()
    )


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("template_keywords.enable_thinking", "true", "enable_thinking = true"),
        ("template_date", "2025-01-03", "date 2025-01-03"),
    ],
)
def test_other_keywords_are_refused_at_every_stage_by_their_name(finished, key, value, message):
    changed = load_recipe(finished[0], [f"target.{key}={value}"])
    for read in (lambda: dump(changed), lambda: open_stores(changed, feature_spec(changed))):
        with pytest.raises(PipelineError, match=r"features: features of other settings of the chat template") as caught:
            read()
        assert message in str(caught.value)
        assert "thinking off, date 2025-01-02, enable_thinking = false" in str(caught.value)
    trained = rf"trained with other settings: target\.{key}: .* -> \"?{value}\"?\. Take these back"
    with pytest.raises(PipelineError, match=trained):
        load_methods(changed)


def test_weights_that_were_not_measured_are_not_released(copied, capsys):
    recipe, run = copied
    for name in ("model.safetensors", "config.json"):
        shutil.copy(run / "drafts/eagle" / name, run / "drafts/jakiro" / name)
    print_status(str(recipe), [f"output={run}"])
    printed = capsys.readouterr().out
    assert "to do  train" in printed and "to do  eval" in printed


@pytest.mark.parametrize(
    ("damage", "sets", "message"),
    [
        (lambda config: config.unlink(), [], "holds no draft checkpoint"),
        (lambda config: None, ["train.epochs=9"], "trained with other settings"),
        (
            lambda config: change_sealed(config, lambda raw: raw["target"].update(fingerprint="0123456789abcdef")),
            [],
            "holds a draft of another target",
        ),
    ],
)
def test_evaluation_refuses_a_missing_or_foreign_checkpoint(copied, damage, sets, message):
    recipe, run = copied
    damage(run / "drafts/jakiro/config.json")
    shutil.rmtree(run / "release")
    with pytest.raises(PipelineError, match=message):
        call(evaluate, str(recipe), *override_arguments([f"output={run}", *sets]))
    assert not (run / "release").exists()


def test_push_uploads_the_release_and_only_on_demand(finished, monkeypatch, capsys):
    """The upload succeeds; other answers of a Hub are in tests/eval/test_push.py."""
    recipe, run, _ = finished
    with Hub() as hub, reached(monkeypatch, hub):
        call(evaluate, str(recipe))
        for name in ("no good/name", "noowner"):
            with pytest.raises(PipelineError, match=f"--push '{name}'"):  # before anything is measured
                call(evaluate, str(recipe), "--push", name)
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


@pytest.fixture
def copied(finished, tmp_path) -> tuple[Path, Path]:
    """(recipe, a copy of the run that a test may change)"""
    recipe, run, _ = finished
    shutil.copytree(run, tmp_path / "run")
    return recipe, tmp_path / "run"


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
        content = path.read_bytes()
        replace_once(path, old, new) if old else flip(path)
        message = " (was changed or damaged|is missing, or not the plot)"
        with pytest.raises(PipelineError, match=path.name + message):
            build_release(recipe)
        path.write_bytes(content)
    assert {name: sha256(release / name) for name in files_in(release)} == before
    assert build_release(recipe)[0] == release
    evaluation = next(stage for stage in list_stages(str(recipe_file), [], recipe) if stage.name == "eval")
    assert evaluation.state(recipe)[0]
    change_sealed(release / "release.json", lambda raw: raw["pending"].update({"README.md": "0" * 64}))
    assert evaluation.state(recipe) == (False, "no release")  # it was broken off
    replace_once(release / "report.json", '"max_new_tokens": ', '"max_new_tokens": 9')
    change_sealed(release / "release.json", lambda raw: raw["pending"].clear())
    with pytest.raises(PipelineError, match=r"release/report.json was changed or damaged"):
        evaluation.state(recipe)


def test_one_command_at_a_time_measures_a_run(copied):
    """Without the lock a tuned tree would head figures not measured with it, and one of two tuners would lose its
    result.
    """
    recipe, run = copied
    with evaluation_lock(load_recipe(recipe, [f"output={run}"])):
        for command in (evaluate, tune):
            with pytest.raises(PipelineError, match="eval: another evaluation or tuning is writing here"):
                call(command, str(recipe), "--set", f"output={run}")


def answers_of(run: Path) -> dict:
    answers = {}
    for line in (run / "eval/records.jsonl").read_text().splitlines():
        for record in json.loads(line)["outcome"]["records"]:
            place = tuple(
                record[key] for key in ("benchmark", "question_id", "turn", "temperature", "method", "repeat")
            )
            answers[place] = record["generation"]["tokens"]
    return answers


@pytest.mark.long
def test_ray_workers_and_another_version_measure_again_and_find_the_same_answers(copied, on_cluster, monkeypatch):
    """No figure of another number of workers, or of another version of the measurement, is released."""
    recipe, run = copied
    output, workers, records = f"output={run}", "eval.workers=2", run / "eval/records.jsonl"
    before, lines = answers_of(run), records.read_text().splitlines()
    call(evaluate, str(recipe), *override_arguments([output, workers]))
    assert records.read_text().splitlines()[: len(lines)] == lines and answers_of(run) == before
    monkeypatch.setattr("pipeline.artifacts.provenance.MEASURE_VERSION", 0)
    loaded = load_recipe(recipe, [output])
    assert eval_state(loaded) == (False, f"release that was not measured by {measurement_versions()}")
    call(evaluate, str(recipe), *override_arguments([output]))
    assert len(records.read_text().splitlines()) == 3 * len(lines) and eval_state(loaded)[0]


def test_a_tuned_tree_is_predicted_measured_and_released(copied, tmp_path, capsys):
    recipe, run = copied
    sets = ["--set", f"output={run}"]
    tuned = run_warm(
        [sys.executable, "eval/tune.py", str(recipe), *sets, "--method", "jakiro", "--max-nodes", "8", "--depth", "3"]
    )
    assert tuned.returncode == 0, tuned.stdout + tuned.stderr
    tuned_facts = json.loads((run / "eval/tuned.json").read_text())["jakiro"]
    assert tuned_facts["predicted"]["tau"] == tuned_facts["measured"]["tau"]  # replayed, not estimated
    assert tuned_facts["predicted_over_measured"] > 0 and tuned_facts["method"]["tree"]["nodes"] <= 8
    assert eval_state(load_recipe(recipe, [f"output={run}"])) == (False, "release without the tuned trees")

    call(evaluate, str(recipe), *sets)
    assert "jakiro-tuned" in capsys.readouterr().out
    assert "| heldout | 0 | jakiro-tuned | 3 |" in (run / "eval/table.md").read_text()
    released = json.loads((run / "release/config.json").read_text())["method"]
    figures = decoded(run)
    speeds = {
        name: math.prod(of["speedup"].value for place, of in figures.items() if place[2] == name)
        for name in ("jakiro", "jakiro-tuned")
    }
    faster = speeds["jakiro-tuned"] > speeds["jakiro"]
    assert (released == tuned_facts["method"]) == faster or speeds["jakiro-tuned"] == speeds["jakiro"]
    card = (run / "release/README.md").read_text()
    assert ("chosen for the hardware above" in card) == faster
    assert f"- {'jakiro' if faster else 'jakiro-tuned'}: these weights; dynamic, depth" in card
    call(show_results, str(run), "--plot", str(tmp_path / "table.png"))
    shown = capsys.readouterr().out
    assert set(figures) == {("heldout", t, name) for name in ("eagle", "jakiro", "jakiro-tuned") for t in (0.0, 1.0)}
    for (_, temperature, method), of in figures.items():
        assert f"| {temperature:g} | {method} | {' | '.join(format_tau_and_speedup(of))} |" in shown
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
    table_text = (run / "eval/table.md").read_text()
    assert "| jakiro-tuned | 3 |" in table_text and "| eagle | 3 |" in table_text and "| jakiro | 3 |" not in table_text
    assert json.loads((run / "release/config.json").read_text())["method"] == tuned_facts["method"]
    assert eval_state(load_recipe(recipe, [f"output={run}"]))[0]

    change_sealed(run / "drafts/jakiro/config.json", lambda raw: raw.update(weights_sha256="0" * 64))
    with pytest.raises(PipelineError, match="jakiro was tuned for other weights or settings"):
        load_methods(load_recipe(recipe, [f"output={run}"]))


def test_tau_by_context_length_is_measured_drawn_and_stated(copied):
    recipe, run = copied
    lengths = [f"eval.benchmarks.heldout-{n}={{source='heldout:{n}', prompts=2}}" for n in (200, 280)]
    call(evaluate, str(recipe), *override_arguments([f"output={run}", *lengths]))
    figures, card = decoded(run), (run / "release/README.md").read_text()
    assert {place[0] for place in figures} == {"heldout", "heldout-200", "heldout-280"}
    stated = (f"{figures[f'heldout-{n}', 0.0, 'jakiro']['tau'].value:.2f} at {n}" for n in (200, 280))
    assert f"tau of `jakiro` by context length, at the lowest T: {', '.join(stated)} tokens; longer contexts" in card
    assert (
        "![tau by context](tau_by_context.png)" in card and (run / "release/tau_by_context.png").stat().st_size > 5000
    )


def test_a_draft_with_prompt_lookup_beside_it_is_tuned_measured_and_released(copied, tmp_path, capsys, monkeypatch):
    """The release decodes losslessly. It also copies from a user's text, which stays on this machine."""
    recipe, run = copied
    corpus = tmp_path / "my folder" / "my notes"
    corpus.parent.mkdir()
    corpus.write_text("one two three " * 20)
    both = 'eval.methods.both={draft="jakiro", secondary=["prompt-lookup"]}'
    sets = [f"output={run}", f'draft.prompt-lookup={{kind="prompt-lookup", corpus="{corpus}"}}', both]
    flags, shape = override_arguments(sets), ["--method", "both", "--max-nodes", "8", "--depth", "2", "--prompts", "2"]
    with pytest.raises(PipelineError, match="nothing is tuned: run"):
        load_methods(load_recipe(recipe, sets), tuned_alone=True)
    call(tune, str(recipe), *flags, *shape)
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"{run / 'eval/tuned.json'} is written")
    tuned = json.loads((run / "eval/tuned.json").read_text())["both"]
    assert tuned["predicted"]["tau"] == tuned["measured"]["tau"]  # replayed, not estimated

    call(evaluate, str(recipe), *flags)
    table, loaded = capsys.readouterr().out, load_recipe(recipe, sets)
    assert all(f"| heldout   | 0 | {name} " in table for name in ("prompt-lookup", "both", "both-tuned"))
    loaded = load_recipe(recipe, sets)
    monkeypatch.setattr(cards, "released_method", lambda *_: "both-tuned")
    build_release(loaded)
    assert eval_state(loaded)[0]
    assert_each_figure_names_its_method(run / "release")
    saved = checkpoint.read_config(run / "release")
    assert saved.secondary["prompt-lookup"].corpus is None
    target, mark = Target(loaded.target, "float32"), fingerprint(loaded.target)
    draft = checkpoint.load(run / "release", mark)
    draft.bind(EmbeddingAndHead(target.embedding_VD, target.head, mark))
    method = saved.load_method(draft)
    assert method.tree.to_json() == tuned["method"]["tree"] and isinstance(method.draft, Sources)
    sampling, prompt = Sampling(20, frozenset()), prompt_of(1) * 2
    assert decode_speculative(target, method, prompt, sampling).tokens == decode_plain(target, prompt, sampling).tokens

    tuned_otherwise = "both was tuned for other weights or settings"
    for change in ("eval.temperatures=[0.0]", "eval.top_p=0.9"):
        with pytest.raises(PipelineError, match=tuned_otherwise):
            load_methods(load_recipe(recipe, [*sets, change]))
    corpus.write_text("another text")
    assert eval_state(loaded) == (False, "release of another corpus")
    with pytest.raises(PipelineError, match=tuned_otherwise):
        load_methods(loaded)
    call(tune, str(recipe), *flags, *shape)  # which the tuner mends
    assert set(load_methods(loaded)) >= {"both", "both-tuned"}


def assert_each_figure_names_its_method(release: Path) -> None:
    """The card shows the draft alone next to the draft with prompt lookup, which the release decodes with."""
    _, head, body = (release / "README.md").read_text().split("---\n", 2)
    assert "prompt-lookup next to the draft" in body
    assert (
        "decodes with `both-tuned`: prompt-lookup next to the draft in one tree. `jakiro` is the draft alone." in body
    )
    first, page = body.partition("<details>")[0], (release / "report.html").read_text()
    rows = [line for line in first.splitlines() if line.startswith("| heldout")]
    assert [row.split(" | ")[1:3] for row in rows] == [[t, m] for t in "01" for m in ("jakiro", "both-tuned")]
    shown = re.findall(r"<td>heldout</td><td>(.*?)</td><td>(.*?)</td>", page)
    assert shown[:2] == [("0", "jakiro"), ("0", "both-tuned")] and len(shown) == 2 * len({m for _, m in shown})
    assert "Shaded: both-tuned, how the release decodes; jakiro is the draft alone." in page
    measured = decoded(release.parent)
    for result in yaml.safe_load(head)["model-index"][0]["results"]:
        temperature = float(result["dataset"]["config"].removeprefix("T = "))
        of = {metric["name"]: metric["value"] for metric in result["metrics"] if metric["type"] == "tau"}
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
    flags = [word for setting in sets for word in ("--set", setting)]
    call(tune, str(recipe), *flags, "--method", "both", "--max-nodes", "6", "--depth", "2", "--prompts", "1")
    call(evaluate, str(recipe), *flags)
    loaded = load_recipe(recipe, sets)
    measured = json.loads((run / "eval/report.json").read_text())
    assert measured["drafts"]["both-tuned"]["corpora"] == [sha256(corpus)]
    names = [name for name in measured["drafts"] if name.startswith(("both", "jakiro"))]
    rows = [ResultRow("decoded", name, "speedup", 9.0 if name.startswith("both") else 1.0) for name in names]
    assert cards.released_method(loaded, measured, rows) == "jakiro"  # a release does not hold the text
    assert "prompt lookup also in a text that is not part of this release" in (run / "release/README.md").read_text()
    for folder in (run / "release", run / "eval"):
        for name in files_in(folder):
            for private in (b"my folder", b"my notes"):
                assert private not in (folder / name).read_bytes(), name
    monkeypatch.setattr(cards, "released_method", lambda *_: "both-tuned")
    build_release(loaded)
    assert checkpoint.read_config(run / "release").secondary["prompt-lookup"].corpus is None
    assert eval_state(loaded)[0]
    corpus.write_text("another text")
    assert eval_state(loaded) == (False, "release of another corpus")
    with pytest.raises(PipelineError, match="both was tuned for other weights or settings"):
        load_methods(loaded)
    capsys.readouterr()


def test_a_draft_of_its_own_name_stands_alone(tiny_recipe, tmp_path):
    """The tree that a draft is trained, saved and shown with is its own."""
    recipe = write_recipe(tiny_recipe.model_dump(mode="json"), tmp_path / "recipe")
    hybrid = 'eval.methods.jakiro={secondary=["prompt-lookup"]}'
    with pytest.raises(PipelineError, match="jakiro: a draft of that name stands alone"):
        load_recipe(recipe, ['draft.prompt-lookup={kind="prompt-lookup"}', hybrid])


@pytest.mark.parametrize(
    ("hybrid", "message"),
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
def test_what_cannot_stand_beside_a_draft_is_refused(tiny_recipe, tmp_path, hybrid, message):
    with pytest.raises(PipelineError, match=message):
        load_recipe(
            write_recipe(tiny_recipe.model_dump(mode="json"), tmp_path / "recipe"),
            ['draft.prompt-lookup={kind="prompt-lookup"}', f"eval.methods.both={hybrid}"],
        )
