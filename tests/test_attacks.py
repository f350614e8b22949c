"""Attacks by files from somebody else: each test is an attack against a promise of docs/trust.md."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

import pipeline
from eval import main as evaluation
from eval.published import DEFAULT_BENCHMARKS, write_release_recipe
from pipeline.artifacts import checkpoint
from pipeline.artifacts.imported import ImportResult, import_draft
from pipeline.artifacts.provenance import own_recipe, write_own_recipe
from pipeline.artifacts.published import download_published
from pipeline.artifacts.reports import ROWS
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import sha256, write_sealed
from pipeline.decoding.config import Method, TreeConfig
from pipeline.lm.config import TargetConfig
from pipeline.lm.model import identify, identify_if_local
from pipeline.recipe.load import load_recipe, override_arguments
from pipeline.recipe.recipe import Recipe
from pipeline.running import entry, markdown
from pipeline.serving.export import export
from pipeline.serving.load import target_of
from preprocess.verify import main as verify
from tests.hub import HEAD, Hub, reached
from tests.kit import call, change_sealed, dump_here, recipe_tree, replace_once, write_sharegpt
from tests.pipeline.taught import make_draft, write_release
from train.start import read_start

ADDRESS = "stranger/draft"


@pytest.fixture
def trap(tiny_target, tmp_path, monkeypatch) -> Iterator[Path]:
    """A model whose code writes `trap/ran` if it is run."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = tmp_path / "trap"
    shutil.copytree(tiny_target, folder)
    (folder / "code.py").write_text(
        "import os, pathlib\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        f"pathlib.Path({str(folder / 'ran')!r}).write_text(os.environ.get('HF_TOKEN', ''))\n"
        "class Config(LlamaConfig):\n    model_type = 'trap'\n"
        "class Model(LlamaForCausalLM):\n    config_class = Config\n"
    )
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "trap", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    yield folder
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]  # of a cache that no other test of this process has


def ran(trap: Path) -> bool:
    return (trap / "ran").exists()


def test_the_trap_works(trap):
    """The trap works: with trust_remote_code its code runs, so the other tests can notice that it does not."""
    with pytest.raises(PipelineError):
        identify(TargetConfig(model=str(trap)))
    assert not ran(trap)
    identify(TargetConfig(model=str(trap), trust_remote_code=True))
    assert ran(trap)


@pytest.fixture
def release(tiny_target, loaded_target, embed_head, tmp_path) -> Path:
    """A draft with random weights, as a stranger released it."""
    tree = recipe_tree(tiny_target, tmp_path / "data.json", tmp_path / "theirs")
    tree["draft"] = {"jakiro": tree["draft"]["jakiro"]}
    recipe = Recipe.model_validate(tree)
    draft = make_draft(loaded_target, embed_head, recipe.draft["jakiro"])
    facts = {"parameters": 5, "trained_tokens": 7, "validation": {"estimated_tau": 1.5}}
    method = Method(draft="jakiro", tree=TreeConfig(depth=2, top_k=2, nodes=5))
    folder = write_release(tmp_path / "release", draft, recipe, "jakiro", method, facts)
    checkpoint.seal_files(folder)
    return folder


@pytest.fixture
def publish(release, tmp_path, monkeypatch) -> Iterator[Callable[[], Hub]]:
    """Publish the release in its current state on a Hub."""
    monkeypatch.chdir(tmp_path)
    with Hub(exists=True) as hub, reached(monkeypatch, hub, HF_HUB_CACHE=str(tmp_path / "hub")):

        def put() -> Hub:
            paths = [path for path in release.rglob("*") if path.is_file()]
            hub.files = {path.relative_to(release).as_posix(): path.read_bytes() for path in paths}
            return hub

        yield put


def evaluate(tiny_target: Path, *arguments: str) -> None:
    settings = [f"target.model={tiny_target}", "eval.benchmarks.humaneval.prompts=1", "eval.max_new_tokens=4"]
    call(evaluation.main, ADDRESS, *arguments, *override_arguments(settings))


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/x.safetensors", "a/b.safetensors", "model.bin"])
def test_a_targets_index_names_no_file_elsewhere(tiny_target, tmp_path, name):
    shutil.copytree(tiny_target, tmp_path / "target")
    (tmp_path / "target/model.safetensors").rename(tmp_path / "secret.safetensors")
    index = {"weight_map": {"lm_head.weight": name}}
    (tmp_path / "target/model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(PipelineError, match=f"index.json names '{name}', expected names of files in its folder"):
        identify(TargetConfig(model=str(tmp_path / "target")))


def test_whoever_looks_at_a_run_fetches_nothing_of_its_target(tiny_target, publish, tmp_path):
    hub, config = publish(), TargetConfig(model="me/target")
    hub.files = {path.name: path.read_bytes() for path in tiny_target.iterdir()}
    assert identify_if_local(config) is None and not hub.requests
    held = identify(config)
    hub.requests.clear()
    assert identify_if_local(config) == held and not hub.requests
    next((tmp_path / "hub").rglob("model.safetensors")).unlink()
    assert identify_if_local(config) is None and not hub.requests


# -- jakiro eval OWNER/NAME --------------------------------------------------------------------------------------------


@pytest.mark.real
def test_a_release_runs_no_code_by_one_more_secondary_draft(release, publish, trap, tiny_target, capsys):
    """The victim runs only the command."""
    evil = {"kind": "small-model", "model": str(trap), "trust_remote_code": True}
    change_sealed(release / "config.json", lambda raw: raw.update(secondary={"x": evil}))
    publish()
    evaluate(tiny_target)
    table = Path("runs") / ADDRESS / HEAD[:12] / "eval/table.md"
    assert "| humaneval | 0 | jakiro | 1 |" in table.read_text() and not ran(trap)


POISON: dict[str, dict[str, Any]] = {  # by section: what a stranger may like to set on this machine
    "target": {
        **{"trust_remote_code": True, "engine": "vllm", "engine_python": "/tmp/evil", "engine_url": "http://evil"},
        **{"device": "cuda", "chat_template": "/etc/passwd", "tensor_parallel": 64},
    },
    "eval": {
        **{"workers": 4096, "gpus_per_worker": 8, "hang_seconds": 10**9},
        **{"methods": {"x": {"draft": "jakiro", "secondary": ["y"]}}, "tree": {"depth": 10**9}},
    },
    "data": {"source": "/etc/passwd", "group": "(a+)+$"},
    "features": {"store": "s3://evil", "workers": 4096, "keep": "window"},
    "regenerate": {"max_new_tokens": 10**9},
    "train": {"deepspeed": {"x": 1}, "shards": "/", "ranks": 4096, "tracker": "wandb", "learning_rates": {"x": 1}},
    "draft": {
        "x": {"kind": "small-model", "model": "evil/lm", "trust_remote_code": True},
        "y": {"kind": "prompt-lookup", "corpus": "/etc/passwd"},
    },
    "published": {"jakiro": f"evil/draft@{'b' * 40}"},
}


def poison(section: str, values: dict[str, Any]) -> Callable[[dict], None]:
    return lambda raw: raw.setdefault(section, {}).update(values)


def test_nothing_of_a_releases_recipe_becomes_a_setting_but_what_is_asked_for(release, publish):
    publish()
    path, _ = write_release_recipe(ADDRESS, ["target.model=me/target"])
    expected = json.loads(path.read_text())
    shutil.rmtree(path.parents[3])
    shutil.rmtree(constants.HF_HUB_CACHE)
    for section, values in POISON.items():
        change_sealed(release / "recipe.json", poison(section, values))
    change_sealed(release / "recipe.json", lambda raw: raw.update(output="/", name="../../x"))
    publish()
    path, _ = write_release_recipe(ADDRESS, ["target.model=me/target"])
    assert json.loads(path.read_text()) == expected
    recipe = load_recipe(path, [])
    assert not recipe.target.trust_remote_code and recipe.output == f"runs/{ADDRESS}/{HEAD[:12]}"


def test_a_releases_benchmark_names_no_file_and_no_address(release, publish):
    sources = ["/etc/passwd", "embedded:../../x", "benchmark:x", "https://evil/x", "heldout"]
    evil = {"prompts": 3, "path": "/etc/passwd", "revision": "evil"}
    foreign = {f"theirs-{n}": evil | {"source": source} for n, source in enumerate(sources)}
    math = {"math": evil | {"source": "benchmark:gsm8k"}}  # which every machine fetches
    left_out = f"not measured, for their prompts are its makers': {', '.join(foreign)}"
    gsm8k = {"math": {"source": "benchmark:gsm8k", "prompts": 3}}
    for benchmarks, expected, notes in (
        (foreign | math, gsm8k, [left_out]),
        (foreign, DEFAULT_BENCHMARKS, [left_out, "measured instead: humaneval"]),
    ):
        change_sealed(
            release / "recipe.json", lambda raw, arguments=benchmarks: raw["eval"].update(benchmarks=arguments)
        )
        publish()
        shutil.rmtree(constants.HF_HUB_CACHE, ignore_errors=True)
        path, message = write_release_recipe(ADDRESS, ["target.model=me/target"])
        assert json.loads(path.read_text())["eval"]["benchmarks"] == expected and message[1:] == notes


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("eval", {"temperatures": [0.0] * 999}, "eval.temperatures"),
        ("eval", {"temperatures": ["0"]}, "eval.temperatures.0"),
        ("eval", {"max_new_tokens": 10**9}, "eval.max_new_tokens"),
        ("eval", {"repeats": True}, "eval.repeats"),
        ("eval", {"dtype": "complex64"}, "eval.dtype"),
        ("target", {"template_keywords": {"x": {"nested": 1}}}, "target.template_keywords"),
        ("target", {"revision": "a/../../b"}, "target.revision"),
        ("publish", {"license": "# Owned\n<script>"}, "publish.license"),
    ],
)
def test_what_is_asked_for_has_its_type_and_bounds(release, publish, section, values, message):
    change_sealed(release / "recipe.json", poison(section, values))
    publish()
    with pytest.raises(
        PipelineError, match=f"{ADDRESS}: recipe.json: {message}.* is not a value that a release may have"
    ):
        write_release_recipe(ADDRESS, ["target.model=me/target"])


@pytest.mark.parametrize("model", ["../target", "/models/target", "./runs/x", "a/b/c", "embedded:../x", "file:x"])
def test_a_releases_target_is_no_path(release, publish, model):
    change_sealed(release / "recipe.json", poison("target", {"model": model}))
    with pytest.raises(PipelineError, match="is no OWNER/NAME of the Hub"):
        target_of(release)
    publish()
    with pytest.raises(PipelineError, match="is no OWNER/NAME of the Hub"):
        write_release_recipe(ADDRESS, [])


# -- config.json, beside the table of tests/pipeline/test_checkpoint.py ------------------------------------------------


@pytest.mark.parametrize(
    "draft",
    [
        {"kind": "medusa", "heads": 1000, "blocks": 1000},
        {"kind": "jakiro", "experts": 1000, "experts_per_token": 2},
        {"kind": "dflash", "layers": 1000},
        {"kind": "p-eagle", "layers": 1000},
    ],
)
def test_settings_of_more_modules_than_the_file_has_tensors_take_no_time(release, tiny_target, draft, monkeypatch):
    """No module is built, not even without its tensors."""
    change_sealed(release / "config.json", lambda raw: raw.update(draft=draft))
    change_sealed(release / "config.json", lambda raw: raw["method"].update(tree={"depth": 1, "top_k": 1, "nodes": 2}))
    monkeypatch.setattr(checkpoint, "build", None)
    with pytest.raises(PipelineError, match=r"the settings make \d+ modules, the file holds \d+ tensors"):
        checkpoint.load_for_any_target(release, checkpoint.read_config(release))


@pytest.mark.real
def test_an_import_of_large_shapes_takes_no_memory(release, tiny_target, tmp_path):
    export(release, "vllm", tmp_path / "exported")
    config = json.loads((tmp_path / "exported/config.json").read_text())
    (tmp_path / "exported/config.json").write_text(json.dumps(config | {"head_dim": 1 << 40}))
    recipe = Recipe.model_validate(recipe_tree(tiny_target, tmp_path / "data.json", tmp_path / "mine"))
    with pytest.raises(PipelineError, match=r"makes no draft\.jakiro: settings and shapes make \d+ numbers, far more"):
        import_draft(tmp_path / "exported", recipe, "jakiro")


CURSOR = "\x1b[2J\x1b]0;evil\x07"


def test_names_in_foreign_files_move_no_cursor(release, tmp_path, capsys):
    change_sealed(release / "config.json", lambda raw: raw["draft"].update({CURSOR: 1}))
    for command in (lambda: checkpoint.read_config(release), lambda: print_import(tmp_path)):
        with pytest.raises(SystemExit):
            entry.run(command)
    message = capsys.readouterr()
    assert "\x1b" not in message.out + message.err and "\\x1b[2J" in message.err


def print_import(folder: Path) -> None:
    save_file({CURSOR: torch.zeros(1)}, folder / "model.safetensors")
    imported = ImportResult()
    imported.note(f"dropped {CURSOR}: nothing here reads it")
    print("\n".join(imported.lines))
    raise PipelineError(f"no place for {CURSOR}")


def test_load_takes_no_setting_of_a_releases_recipe_but_the_targets_name_and_how_it_is_asked(
    release, tiny_target, trap
):
    evil = {"engine": "vllm", "engine_python": "/tmp/x", "trust_remote_code": True, "model": str(trap)}
    change_sealed(release / "recipe.json", lambda raw: raw["target"].update(evil))
    config = target_of(release, str(tiny_target))
    assert config == TargetConfig(model=str(tiny_target))
    with pytest.raises(PipelineError, match="is no OWNER/NAME of the Hub"):
        pipeline.load(release)
    assert not ran(trap)
    change_sealed(release / "recipe.json", lambda raw: raw["eval"].update(dtype="evil"))
    with pytest.raises(PipelineError, match=r"eval\.dtype is not a value that a release may have"):
        pipeline.load(release, target=str(tiny_target))


def test_a_start_of_somebody_else_gives_weights_and_nothing_else(release, tiny_target, embed_head, tmp_path, trap):
    """Its recipe is not read; other keys of its config.json have no effect."""
    (release / "recipe.json").write_text("{")
    evil = {"kind": "small-model", "model": str(trap), "trust_remote_code": True}
    change_sealed(release / "config.json", lambda raw: raw.update(secondary={"x": evil}, evil=evil))
    tree = recipe_tree(tiny_target, write_sharegpt(tmp_path / "data.json"), tmp_path / "run")
    tree["draft"]["jakiro"]["start"] = str(release)
    recipe = Recipe.model_validate(tree)
    manifest = dump_here(recipe)
    start = read_start(recipe, "jakiro", embed_head, manifest.spec)
    assert start is not None and start.facts["sha256"] == sha256(release / checkpoint.WEIGHTS) and not ran(trap)
    change_sealed(release / "config.json", lambda raw: raw.update(draft=evil))
    with pytest.raises(PipelineError, match="damaged or of another version"):
        read_start(recipe, "jakiro", embed_head, manifest.spec)


# -- [published.NAME] --------------------------------------------------------------------------------------------------


def test_text_of_others_is_no_markup():
    hostile = "# Owned\n| <script>alert(1)</script> [x](http://evil) ![x](y) `x` *x* \\"
    markup = markdown.escape_markdown(hostile)
    assert markup.startswith(r"\# Owned \| &lt;script&gt;alert(1)&lt;/script&gt; \[x\](http\://evil) \!\[x\](y)")
    assert markup.endswith(r" \`x\` \*x\* \\")


def test_how_a_stranger_says_to_have_trained_is_typed_and_no_figure_is_carried_on(
    release, publish, tiny_target, tmp_path
):
    tree = recipe_tree(tiny_target, tmp_path / "data.json", tmp_path / "mine")
    tree["draft"] = {"jakiro": tree["draft"]["jakiro"]}
    tree["published"] = {"jakiro": f"{ADDRESS}@{HEAD}"}
    recipe = Recipe.model_validate(tree)
    evil = {"template": "x" * 10**6}
    change_sealed(release / "config.json", lambda raw: raw.update(training=raw["training"] | evil))
    publish()
    with pytest.raises(PipelineError, match="template is not a value that a release may have"):
        download_published(recipe)
    more = {"template": "t", "start": {"from": "# Owned"}, "imported": {"from": "<script>"}, "parameters": "many"}
    change_sealed(release / "config.json", lambda raw: raw.update(training=raw["training"] | more))
    (release / ROWS).write_text("<script>")
    publish()
    shutil.rmtree(constants.HF_HUB_CACHE)
    download_published(recipe)
    folder = recipe.paths.draft("jakiro")
    training = checkpoint.read_config(folder).training
    assert not {"start", "imported"} & training.keys() and isinstance(training["parameters"], int)
    assert training["trained_tokens"] == 7 and training["validation"] == {"estimated_tau": 1.5}
    assert not (folder / ROWS).exists()


# -- files that a release's config.json seals --------------------------------------------------------------------------


def test_one_letter_of_a_releases_template_is_seen(release, tiny_target):
    (release / checkpoint.TEMPLATE).write_text("{{ messages[0].content }}")
    with pytest.raises(PipelineError, match=r"chat_template\.jinja is not the file that config\.json names"):
        pipeline.load(release, target=str(tiny_target))  # one that came later
    checkpoint.seal_files(release)
    assert target_of(release, str(tiny_target)).chat_template == str(release / checkpoint.TEMPLATE)
    replace_once(release / checkpoint.TEMPLATE, "messages[0]", "messages[1]")
    with pytest.raises(PipelineError, match=r"chat_template\.jinja is not the file that config\.json names"):
        pipeline.load(release, target=str(tiny_target))
    (release / checkpoint.TEMPLATE).unlink()
    with pytest.raises(PipelineError, match=r"chat_template\.jinja is missing"):
        pipeline.load(release, target=str(tiny_target))


# -- jakiro verify DIR -------------------------------------------------------------------------------------------------


@pytest.mark.real
@pytest.mark.parametrize("name", ["recipe.json", "own-recipe.json"])
def test_a_folder_of_features_supplies_no_recipe(trap, tmp_path, monkeypatch, name, capsys):
    """The stranger's folder is complete, and its recipe names a target with code."""
    monkeypatch.chdir(tmp_path)
    tree = recipe_tree(Path("trap"), write_sharegpt(Path("data.json")), Path("theirs"))
    tree["target"]["trust_remote_code"] = True
    recipe = Recipe.model_validate(tree)
    dump_here(recipe)
    (trap / "ran").unlink()
    folder = tmp_path / "mine/features"
    shutil.copytree(recipe.paths.features, folder, ignore=shutil.ignore_patterns("own-recipe.json"))
    forms: list[Any] = [lambda: None]
    if name == "own-recipe.json":  # as its form was; as it is, with any key; and the stranger's own
        resolved = recipe.model_dump(mode="json")
        forms = [lambda: write_sealed(folder / name, resolved)]
        forms += [lambda: (folder / name).write_text(json.dumps({"recipe": resolved, "mac": "0" * 64}))]
        forms += [lambda: shutil.copy(recipe.paths.features / name, folder)]
    for form in forms:
        form()
        with pytest.raises(PipelineError, match=r"holds no own-recipe\.json that this user wrote .*--recipe RECIPE"):
            call(verify, str(folder))
    call(verify, str(folder), "--rows", "0")
    assert "complete: True" in capsys.readouterr().out and not ran(trap)


def test_a_recipe_of_this_user_is_of_its_own_folder_and_key(tiny_recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("JAKIRO_CACHE", str(tmp_path / "another-users"))
    own_folder, second_folder, key = tmp_path / "mine", tmp_path / "other", tmp_path / "cache/machine-key"
    for folder in (own_folder, second_folder):
        folder.mkdir()
    write_own_recipe(second_folder, tiny_recipe)
    monkeypatch.setenv("JAKIRO_CACHE", str(key.parent))
    write_own_recipe(own_folder, tiny_recipe)
    assert key.stat().st_mode & 0o777 == 0o600 and len(key.read_bytes()) == 32
    assert own_recipe(own_folder, []) == tiny_recipe and own_recipe(second_folder, []) is None
    shutil.copy(own_folder / "own-recipe.json", second_folder)
    assert own_recipe(second_folder, []) is None  # a copied folder
    path = own_folder / "own-recipe.json"
    text = path.read_text()
    content = json.loads(text)
    trusting = {"target": content["recipe"]["target"] | {"trust_remote_code": True}}
    for forged in (
        json.dumps(content | {"recipe": content["recipe"] | {"seed": 7}}),
        json.dumps(content | {"recipe": content["recipe"] | trusting}),
        text.replace('"mac": "', '"mac": "\\ud800'),
        '{"recipe": [], "mac": 7}',
        "{}",
    ):
        path.write_text(forged)
        assert own_recipe(own_folder, []) is None
    path.write_text(text)
    key.chmod(0o640)  # others can read it
    assert own_recipe(own_folder, []) is None
    path.unlink()
    write_own_recipe(own_folder, tiny_recipe)  # a dump goes on without one
    assert not path.exists()
    monkeypatch.setenv("JAKIRO_CACHE", "/proc/nowhere")
    write_own_recipe(own_folder, tiny_recipe)
    assert own_recipe(own_folder, []) is None
