"""Tests of `jakiro`: a wheel in a clean environment, recipes by name, `new`, `doctor`."""

import json
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from argparse import Namespace
from pathlib import Path

import pytest

import jakiro
from jakiro import doctor, first_recipe, new, push, recipes
from jakiro.presets import load_presets
from pipeline.artifacts.provenance import revision
from pipeline.basics.errors import PipelineError
from pipeline.recipe.dtypes import native_dtype
from pipeline.recipe.identity import run_hash
from pipeline.recipe.load import load_recipe, override_arguments
from pipeline.recipe.read import shipped_recipes
from pipeline.recipe.recipe import Recipe
from preprocess.sources.sizes import require_sizes, summarize_source
from tests.kit import BIN, ROOT, call, command_environment, write_sharegpt

GB = 10**9


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run([sys.executable, "-m", "pip", *build], check=True)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """Return `bin` of an environment with the wheel and its required packages, and nothing of the checkout."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder)
    site = next((folder / "lib").glob("*/site-packages"))
    (site / "needed.pth").write_text(sysconfig.get_path("purelib"))  # its own .pth files, the checkout's, are not read
    python = str(folder / "bin/python")
    install = ["--python", python, "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True)
    launcher = folder / "bin/deepspeed"
    shutil.copy(BIN / "deepspeed", launcher)
    launcher.write_text("\n".join([f"#!{python}", *launcher.read_text().splitlines()[1:]]) + "\n")
    return folder / "bin"


def run_installed(installed: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    environment = {**command_environment(), "PATH": f"{installed}:/usr/bin:/bin"}
    command = [str(installed / "jakiro"), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, timeout=500)


LIGHT = """
import json, sys
import jakiro
arguments, heavy = json.loads(sys.argv[1]), {"torch", "transformers", "ray", "deepspeed", "datasets", "numpy"}
for words in arguments:
    sys.argv = ["jakiro", *words]
    try:
        jakiro.main()
    except SystemExit as ended:
        print(ended.code, *sorted(heavy & set(sys.modules)))
"""
NEW = ("--target", "A/B", "--data", "data.json")
WRONG = [
    (["run", "nowhere.toml"], "recipe nowhere.toml does not exist"),
    (["status", "torn.toml"], "recipe torn.toml cannot be parsed"),
    (["plan", "smoke", "--set", "train.epoch=3"], "train.epoch: unknown key 'epoch'; did you mean 'epochs'?"),
    (["plan", "smoke", "--set=eval.tree.depht=3"], "eval.tree.depht: unknown key 'depht'; did you mean 'depth'?"),
    (["dump", "smoke", "--set", "target.modle=x"], "target.modle: unknown key 'modle'; did you mean 'model'?"),
    (["push", "smoke", "A/B", "--set", "trian.epochs=1"], "trian: unknown key 'trian'; did you mean 'train'?"),
    (["tune", "smoke", "--set", "train.epochs=many"], "train.epochs: Input should be a valid integer"),
    (["metrics", "smoke", "--set", "epochs"], "--set 'epochs': expected section.key=value"),
    (["new", "torn.toml", *NEW, "--license", "mit"], "torn.toml is there already"),
    (["new", "my.toml", *NEW, "--license", "Apache 2.0"], "did you mean 'apache-2.0'?"),
    (["new", "my.toml", *NEW, "--licence", "mit"], "the following arguments are required: --license"),
    (["new", "my.toml", *NEW, "--license", "mit", "--draft", "eagel"], "argument --draft: invalid choice: 'eagel'"),
]


def test_a_recipe_is_refused_before_anything_heavy_is_imported(tmp_path):
    (tmp_path / "torn.toml").write_text("name = ")
    environment = command_environment(PYTHONPATH=f"{ROOT / 'infra/command'}:{ROOT}")
    command = [sys.executable, "-c", LIGHT, json.dumps([words for words, _ in WRONG])]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout == "2\n" * len(WRONG)
    messages = done.stderr.split("error: ")[1:]
    assert len(messages) == len(WRONG) and all(
        message in text for (_, message), text in zip(WRONG, messages, strict=True)
    )


def test_a_wheel_drops_one_package_into_site_packages(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"jakiro"}
    folders = ("pipeline", "preprocess", "train", "eval", "infra")
    tracked = subprocess.run(["git", "-C", str(ROOT), "ls-files", *folders], capture_output=True, text=True, check=True)
    expected = {f"jakiro/{name}" for name in tracked.stdout.split()}
    command = "jakiro/infra/command/"
    expected = {name for name in expected if not name.startswith(command)} | {
        name.replace(f"{command}jakiro/", "jakiro/") for name in expected if name.startswith(f"{command}jakiro/")
    }
    assert {name for name in names if ".dist-info/" not in name} == expected | {"jakiro/COMMIT"}


@pytest.mark.real
@pytest.mark.long
def test_an_installed_wheel_does_a_whole_run_outside_the_checkout(installed, tiny_target, tmp_path):
    """The run takes the recipe that `new` writes, with smaller sizes."""
    recipe, data, run = tmp_path / "tiny.toml", write_sharegpt(tmp_path / "data.json", 600), tmp_path / "runs/tiny"
    written = run_installed(installed, tmp_path, "new", *new_arguments(recipe, tiny_target, data, draft="eagle"))
    assert written.returncode == 0, written.stdout + written.stderr
    sets = ["data.heldout_fraction=0.2", "eval.max_new_tokens=8", "eval.benchmarks.heldout.prompts=2"]
    small = override_arguments(sets)
    done = run_installed(installed, tmp_path, "run", str(recipe), *small)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "release:" in done.stdout
    logs = "".join(path.read_text() for path in (run / "logs").iterdir())
    assert str(ROOT) not in logs.replace(f"{ROOT}/.venv/", "")  # packages come from there, code does not
    for made in ("features", "drafts/eagle", "release"):
        assert json.loads((run / made / "provenance.json").read_text())["code_revision"] == revision()
    trained = run_installed(installed, tmp_path, "train", str(recipe), "--draft", "eagle", *small)
    assert trained.returncode == 0 and "eagle" in trained.stdout
    assert "done   eval" in run_installed(installed, tmp_path, "status", str(recipe), *small).stdout
    load = "import jakiro, sys; print(jakiro.load(*sys.argv[1:]).generate('hello', max_new_tokens=4))"
    python = [str(installed / "python"), "-c", load, str(run / "release"), str(tiny_target)]
    spoken = subprocess.run(python, cwd=tmp_path, capture_output=True, text=True, env=command_environment())
    assert spoken.returncode == 0, spoken.stderr


def test_usage_is_printed_and_an_unknown_command_is_refused(monkeypatch, capsys):
    call(jakiro.main)
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown and command.summary in shown for name, command in jakiro.COMMANDS.items())
    with pytest.raises(SystemExit, match="no command 'evla': did you mean eval"):
        call(jakiro.main, "evla")


def test_a_recipe_of_the_project_is_found_by_its_name_and_a_file_goes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_hash(load_recipe("demo")) == run_hash(load_recipe(ROOT / "infra/recipes/demo.toml"))
    assert "qwen3-8b" in shipped_recipes() and load_recipe("qwen3-8b").name == "qwen3-8b"
    with pytest.raises(PipelineError, match=r"recipe dmeo does not exist; did you mean demo\?"):
        load_recipe("dmeo")
    Path("demo").write_text("nonsense")
    with pytest.raises(PipelineError, match="cannot be parsed"):
        load_recipe("demo")


def test_recipes_says_target_and_drafts_of_each(capsys):
    call(recipes.main)
    shown = capsys.readouterr().out
    assert all(f"\n{name}: " in f"\n{shown}" for name in shipped_recipes())
    call(recipes.main, "gpt-oss")
    assert "gpt-oss-20b: openai/gpt-oss-20b; jakiro, eagle\n" in (shown := capsys.readouterr().out)
    assert "qwen" not in shown


SOURCE = first_recipe.DataSource(records=100_000, complete=False, usable=1.0, length=300.0, report="")


def new_arguments(out: Path, target: Path, data: Path, **more: str) -> list[str]:
    options = {"target": str(target), "data": str(data), "license": "apache-2.0", **more}
    return [str(out), *(word for key, value in options.items() for word in (f"--{key}", value))]


def test_new_writes_a_recipe_that_loads_and_says_what_it_looked_at(tiny_target, tmp_path, capsys):
    out, data = tmp_path / "my.toml", write_sharegpt(tmp_path / "data.json", 30)
    call(new.main, *new_arguments(out, tiny_target, data, draft="p-eagle"))
    shown, recipe = capsys.readouterr().out, load_recipe(out)
    assert "30 records; of the first 30 30 are usable: " in shown and "2 layers" in shown
    assert (
        recipe.draft["p-eagle"].kind == "p-eagle"
        and recipe.target.device == "cpu"
        and recipe.publish.draft == "p-eagle"
    )
    with pytest.raises(PipelineError, match="is there already"):
        call(new.main, *new_arguments(out, tiny_target, data))


@pytest.mark.parametrize("count", [24, 60, 150, 1000])
def test_a_new_recipe_holds_out_and_warms_up_as_its_data_allow(tiny_target, tmp_path, count):
    out = tmp_path / "my.toml"
    call(new.main, *new_arguments(out, tiny_target, write_sharegpt(tmp_path / "data.json", count)))
    recipe = load_recipe(out)
    require_sizes(recipe)
    look = summarize_source(recipe, 10**6)
    required = max(recipe.data.validation_dialogues, recipe.data.heldout_prompts + recipe.data.calibration_prompts)
    assert recipe.eval.benchmarks["heldout"].prompts <= recipe.data.heldout_prompts < look.held_out
    assert required <= 1.5 * look.held_out and look.held_out <= 0.35 * count
    assert recipe.data.max_tokens is None and recipe.train.dtype == recipe.target.dtype == native_dtype("cpu")
    steps = recipe.train.steps(look.train, 0, 1)
    assert 10 * recipe.train.warmup_steps <= steps + 10 and steps >= 60


def test_sizes_for_a_large_source_with_gpus_and_on_a_laptop():
    large = first_recipe.Sizes.of(SOURCE, 8, load_presets()["eagle"].training)
    assert (large.heldout_fraction, large.validation, large.heldout_prompts, large.calibration) == (0.02, 256, 100, 16)
    assert (large.max_tokens, large.global_batch, large.epochs, large.warmup) == (None, 16, 20, 2000)
    small = first_recipe.Sizes.of(SOURCE, 2, None)
    assert (small.heldout_fraction, small.validation, small.heldout_prompts, small.calibration) == (0.02, 24, 22, 16)
    assert small.heldout_prompts - small.prompts >= 10 <= large.heldout_prompts - large.prompts  # the tuner's
    assert (small.max_tokens, small.global_batch, small.epochs, small.warmup) == (270_000, 16, 3, 16)


def test_new_leaves_no_recipe_for_data_that_it_cannot_use(tiny_target, tmp_path):
    data = tmp_path / "data.json"
    data.write_text(json.dumps([{"id": "a", "conversations": []}] * 3))
    with pytest.raises(PipelineError, match=r"none of the first 3 records of .* is usable"):
        call(new.main, *new_arguments(tmp_path / "my.toml", tiny_target, data))
    data.write_text(json.dumps([{"id": "a", "convs": []}] * 3))
    with pytest.raises(PipelineError, match=r"3 malformed .*; the first malformed record: its keys are 'id', 'convs'"):
        call(new.main, *new_arguments(tmp_path / "my.toml", tiny_target, data))
    assert not (tmp_path / "my.toml").exists()


def test_new_refuses_a_draft_that_the_target_cannot_have(tiny_target, tmp_path):
    """A Llama comes without an MTP head: no record of the data is read for this."""
    arguments = [str(tmp_path / "my.toml"), "--target", str(tiny_target), "--data", str(tmp_path / "none.json")]
    with pytest.raises(PipelineError, match="no names of one are known for this target's family"):
        call(new.main, *arguments, "--draft", "mtp", "--license", "apache-2.0")
    assert not (tmp_path / "my.toml").exists()


def test_new_takes_a_subset_and_a_split(tiny_target, tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    write_sharegpt(folder / "part.json", 30)
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: b\n  data_files: [{split: dev, path: part.json}]\n---\n"
    )
    out = tmp_path / "my.toml"
    with pytest.raises(PipelineError, match=r"\['dev'\]\. Set data\.split"):
        call(new.main, *new_arguments(out, tiny_target, f"datasets:{folder}", subset="b"))
    call(new.main, *new_arguments(out, tiny_target, f"datasets:{folder}", subset="b", split="dev"))
    assert (load_recipe(out).data.subset, load_recipe(out).data.split) == ("b", "dev")


def written_for(
    machine: first_recipe.Machine,
    folder: Path,
    weights: float = 16 * GB,
    obstacle: str | None = None,
    **more: str | None,
) -> Recipe:
    """Return the recipe that `new` writes on a machine for a target of 1,024 positions."""
    shapes = {"num_hidden_layers": 32, "hidden_size": 4096, "vocab_size": 128256, "model_type": "llama"}
    config = Namespace(**shapes, max_position_embeddings=1024)
    arguments = {"target": "OWNER/NAME", "data": "data.json", "draft": "eagle3", "license": "mit", "preset": None}
    args = Namespace(**arguments | more, out=folder / "my.toml")
    args.out.write_text(first_recipe.recipe_text(args, config, machine, weights, SOURCE, obstacle))
    return load_recipe(args.out)


@pytest.mark.parametrize(
    ("gpus", "of", "weights", "share"),
    [
        (1, 80 * GB, 16 * GB, ("auto", 1, 1, 1)),
        (8, 80 * GB, 16 * GB, ("auto", 8, 1, 8)),
        (8, 80 * GB, 141 * GB, ("spread", 2, 3, 8)),  # 184 GB with room: three GPUs
        (3, 24 * GB, 16 * GB, ("auto", 3, 1, 3)),
    ],
)
def test_new_shares_the_gpus_between_workers_of_a_size_that_holds_the_target(gpus, of, weights, share, tmp_path):
    machine = first_recipe.Machine(gpus, of)
    assert tuple(first_recipe.Share.of(machine, weights)) == share
    recipe = written_for(machine, tmp_path, weights=weights)
    recipe.train.require_exact_sum(recipe.train.accumulation(gpus))
    assert recipe.data.max_length == 1024
    assert (recipe.features.gpus_per_worker or 1) * recipe.features.workers <= gpus


@pytest.mark.parametrize("draft", load_presets())
def test_new_gives_every_kind_a_small_tree_on_a_cpu(draft, tmp_path):
    recipe = written_for(first_recipe.Machine(0, 0), tmp_path, draft=draft)
    tree, in_one = recipe.tree(draft), recipe.draft[draft].kind in ("jakiro", "p-eagle")  # both levels from one forward
    assert (tree.nodes, tree.depth, tree.parallel) == ((6, 2, 2) if in_one else (6, 1, 1))


@pytest.mark.parametrize("gpus", [0, 8])
@pytest.mark.parametrize("draft", load_presets())
def test_new_writes_a_chain_for_a_target_that_verifies_no_trees(draft, gpus, tmp_path):
    machine, obstacle = first_recipe.Machine(gpus, gpus and 80 * GB), "linear_attention layers: its state merges them"
    method = written_for(machine, tmp_path, draft=draft, obstacle=obstacle).resolve_method(draft)
    assert method.is_chain and method.resolved_tree.siblings == "none"
    assert "# the target verifies chains: linear_attention layers" in (tmp_path / "my.toml").read_text()


def test_a_preset_is_the_machines_unless_it_is_named(tmp_path):
    """A short training takes no key of the draft that depends on the steps of a long one."""
    gpus, cpu = first_recipe.Machine(8, 80 * GB), first_recipe.Machine(0, 0)
    for machine, preset, rate in ((gpus, None, 2e-4), (gpus, "laptop", 2e-3), (cpu, None, 2e-3), (cpu, "paper", 2e-4)):
        recipe = written_for(machine, tmp_path, draft="gumiho", preset=preset)
        assert recipe.train.learning_rate == rate and recipe.target.device == ("auto" if machine.gpus else "cpu")
        assert recipe.draft["gumiho"].regression_steps == (8_500 if rate == 2e-4 else 0)
        assert recipe.data.max_tokens == (None if rate == 2e-4 else 270_000)


def test_new_refuses_a_target_that_the_machine_cannot_hold():
    with pytest.raises(PipelineError, match="weights are 141 GB in bfloat16, but the 1 GPUs here have 80 GB"):
        first_recipe.Share.of(first_recipe.Machine(1, 80 * GB), 141 * GB)


def verdicts(part) -> dict[str, str]:
    return {finding.subject: f"{finding.verdict} {finding.remedy}" for finding in part()}


def test_doctor_reports_a_missing_ray_head_and_a_long_socket_path(monkeypatch, tmp_path):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{silent.getsockname()[1]}")
        (finding,) = doctor.check_ray()
    assert (finding.verdict, "no Ray answers at" in finding.subject, "unset RAY_ADDRESS" in finding.remedy) == (
        "fix",
        True,
        True,
    )
    monkeypatch.delenv("RAY_ADDRESS")
    assert [finding.verdict for finding in doctor.check_ray()] == ["ok"]
    long = tmp_path / ("x" * 60)
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.setattr("pipeline.running.cluster.SHORT_FOLDER", str(long))
    (finding,) = doctor.check_ray()
    assert finding.verdict == "fix" and "a path of at most" in finding.subject and "RAY_TMPDIR" in finding.remedy


def test_doctor_reports_problems_and_remedies(monkeypatch, tmp_path):
    real_version = doctor.importlib.metadata.version

    def version(name: str) -> str:
        if name == "pyarrow":
            raise doctor.importlib.metadata.PackageNotFoundError(name)
        return "9.9" if name == "scipy" else real_version(name)

    monkeypatch.setattr(doctor.importlib.metadata, "version", version)
    findings = verdicts(doctor.check_packages)
    assert findings["pyarrow is not installed"].startswith("fix pip install pyarrow==")
    assert any("scipy 9.9 (tested: " in subject and verdict.startswith("note") for subject, verdict in findings.items())
    monkeypatch.setattr(doctor, "SHARED", float("inf"))
    assert any(
        "/dev/shm" in subject and "--shm-size" in verdict for subject, verdict in verdicts(doctor.check_limits).items()
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(doctor, "PORTS", {port: "Ray's head"})
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        findings = verdicts(doctor.check_network)
    assert findings[f"port {port} (Ray's head) is taken"].startswith("note") and "secret" not in str(findings)
    monkeypatch.setattr(doctor, "DISK", float("inf"))
    assert all(verdict.startswith("fix") for verdict in verdicts(doctor.check_disk).values())


def test_doctor_exits_with_1_if_something_is_to_fix(monkeypatch, capsys):
    for part in ("packages", "gpus", "limits", "disk", "network", "engines"):
        monkeypatch.setattr(doctor, f"check_{part}", lambda: iter([doctor.Finding("ok", "fine")]))
    with pytest.raises(SystemExit) as ended:
        call(doctor.main)
    assert not ended.value.code
    monkeypatch.setattr(doctor, "check_gpus", lambda: iter([doctor.Finding("fix", "no driver", "install it")]))
    with pytest.raises(SystemExit) as ended:
        call(doctor.main)
    assert ended.value.code == 1
    shown = capsys.readouterr().out
    assert "fix   no driver\n      -> install it\n" in shown and shown.endswith("1 to fix, 0 to note\n")


def test_push_hands_the_repository_to_the_evaluation(monkeypatch):
    begun = []
    monkeypatch.setattr(push.jakiro, "start_command", lambda name, arguments: begun.append((name, arguments)))
    call(push.main, "demo", "me/draft", "--set", "output=runs/x")
    assert begun == [("eval", ["demo", "--set", "output=runs/x", "--push", "me/draft"])]
