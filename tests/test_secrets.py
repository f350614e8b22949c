"""No credential of a source reaches a log, an error, the process list or an artifact."""

import argparse
import base64
import http.server
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.basics.errors import PipelineError
from pipeline.features.store import Store
from pipeline.lm.model import source
from pipeline.recipe.load import add_recipe_arguments, hand_over, load_recipe
from pipeline.recipe.sections import DataConfig
from pipeline.running import entry
from preprocess.sources.read import Tail, read_records
from tests.kit import free_port, recipe_tree, run_command, run_warm, write_recipe, write_sharegpt
from tests.train.runs import train_here

SECRET = "hunter2-of-alice"


@contextmanager
def served(content: bytes) -> Iterator[str]:
    """An address, with credentials, of a server on this machine that wants them."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            given = self.headers.get("Authorization", "")
            if given != f"Basic {base64.b64encode(f'alice:{SECRET}'.encode()).decode()}":
                self.send_error(401)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://alice:{SECRET}@127.0.0.1:{server.server_address[1]}/data.json"
    finally:
        server.shutdown()
        server.server_close()


def read(source: str) -> list:
    return list(read_records(DataConfig(source=source), Tail()))


def test_a_source_that_wants_credentials_is_read_with_them(tmp_path):
    with served(write_sharegpt(tmp_path / "data.json").read_bytes()) as address:
        assert len(read(address)) == 60


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda address: address.replace("hunter2", "hunter3"), r"is refused by the server \(HTTP 401\)"),
        (lambda _: f"http://alice:hunter3@127.0.0.1:{free_port()}/data.json", "cannot be reached: "),
    ],
    ids=["wrong", "nobody listens"],
)
def test_what_a_server_says_is_told_without_the_credentials(change, message):
    with served(b"[]") as address, pytest.raises(PipelineError, match=message) as caught:
        read(change(address))
    assert "hunter" not in str(caught.value) and "does not exist" not in str(caught.value)


def test_a_file_that_is_damaged_is_named_without_the_credentials():
    with (
        served(b"no JSON") as address,
        pytest.raises(PipelineError, match=r"data\.source http://127\.0\.0\.1:\d+/") as caught,
    ):
        read(address)
    assert "hunter" not in str(caught.value)


def test_a_store_that_cannot_be_opened_is_named_without_the_credentials(monkeypatch):
    address = f"s3://ALICE:{SECRET}@bucket/run?region=x"

    def refuse(url: str):
        raise OSError(f"no {url}: key {SECRET} is wrong")

    monkeypatch.setattr("pipeline.features.store.fs", SimpleNamespace(FileSystem=SimpleNamespace(from_uri=refuse)))
    with pytest.raises(
        PipelineError, match=r"features\.store s3://bucket/run: opening failed: no s3://bucket/run: key"
    ) as caught:
        Store(address)
    assert SECRET not in str(caught.value)


def shown_to_others(found: set[str], stop: threading.Event) -> None:
    """Collects the command lines of all processes that show the secret."""
    while not stop.is_set():
        for process in Path("/proc").glob("[0-9]*"):
            try:
                words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if SECRET in words:
                found.add(words)
        time.sleep(0.05)


@pytest.mark.real
def test_a_run_leaves_the_secret_nowhere(tiny_target, tmp_path):
    """Given by --set; the pipeline's own process hides it as soon as it has started."""
    tree = recipe_tree(tiny_target, tmp_path / "data.json", tmp_path / "run")
    del tree["draft"]["jakiro"]
    tree["publish"]["draft"] = "eagle"
    tree["train"]["epochs"] = 1
    recipe = write_recipe(tree, tmp_path / "recipe")
    found, stop = set(), threading.Event()
    watcher = threading.Thread(target=shown_to_others, args=(found, stop))
    with served(write_sharegpt(tmp_path / "data.json").read_bytes()) as address:
        (tmp_path / "data.json").unlink()
        watcher.start()
        try:
            command = [sys.executable, "-m", "pipeline", "run", str(recipe), "--until", "preprocess", "--set"]
            done = run_warm([*command, f"data.source={address}"])
            run = tmp_path / "run"
            train_here((recipe, run / "features"), run, f"data.source={address}", draft="eagle")
        finally:
            stop.set()
            watcher.join()
    assert done.returncode == 0, done.stdout + done.stderr
    assert not [words for words in found if "-m pipeline run" not in words], found
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"preprocess.log", "config.json", "recipe.json", "own-recipe.json"} <= {path.name for path in files}
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
    assert SECRET not in done.stdout + done.stderr


def test_the_pipelines_own_command_line_hides_the_secret_while_it_runs(tmp_path):
    code = (
        "from pipeline.running import entry; entry.run(lambda: (print(open('/proc/self/cmdline').read(), flush=True)))"
    )
    done = run_command(
        [sys.executable, "-c", code, "--set", f"data.source=http://alice:{SECRET}@host/x.json", "--rows", "3"]
    )
    assert done.returncode == 0, done.stderr
    words = done.stdout.strip().split("\0")
    assert SECRET not in done.stdout and words[-4].strip() == "data.source=http://host/x.json"
    assert words[-3:-1] == ["--rows", "3"]


@pytest.mark.parametrize("kind", ["PipelineError", "RuntimeError"])
def test_no_error_shows_the_secret(kind):
    address = f"https://alice:{SECRET}@host/data.json?sig={SECRET}"
    code = (
        "from pipeline.running import entry\nfrom pipeline.basics.errors import PipelineError\n"
        f"def f(): raise {kind}('GET {address} failed')\nentry.run(f)"
    )
    done = run_command([sys.executable, "-c", code])
    assert done.returncode == (2 if kind == "PipelineError" else 1)
    assert "GET https://host/data.json" in done.stderr and SECRET not in done.stderr


@pytest.mark.parametrize(
    "override",
    ["data.source.x=1", "data.subset=['{}']", "target.model={}", "nosuch={}", "data.source:{}"],
)
def test_a_recipe_that_is_refused_does_not_show_the_secret(tiny_target, tmp_path, override):
    address = f"http://alice:{SECRET}@host/x"
    tree = recipe_tree(tiny_target, tmp_path / "data.json", tmp_path / "run")
    tree["data"]["source"] = address
    with pytest.raises(PipelineError) as caught:
        source(load_recipe(write_recipe(tree, tmp_path / "recipe"), [override.format(address)]).target)
    assert SECRET not in str(caught.value)


def test_a_password_with_quotes_is_hidden_in_arguments_and_refusals(tiny_target, tmp_path):
    address = "http://alice:hun'ter>2@host/x"
    for argument in (address, f"data.source={address}", f"--set=data.source={address}"):
        assert b"ter>2" not in entry._padded(argument.encode())
    tree = recipe_tree(tiny_target, tmp_path / "data.json", tmp_path / "run")
    with pytest.raises(PipelineError) as caught:
        load_recipe(write_recipe(tree, tmp_path / "recipe"), [f"seed={address}"])
    assert "ter>2" not in str(caught.value) and "http://host/x" in str(caught.value)


def test_overrides_are_handed_to_another_command_once(monkeypatch):
    arguments, environment = hand_over("recipe.toml", ["name=other", f"data.source=http://alice:{SECRET}@host/x"])
    assert SECRET not in " ".join(arguments)
    parser = argparse.ArgumentParser()
    add_recipe_arguments(parser)
    with pytest.raises(PipelineError, match="for commands that another one starts"):  # lost on the way
        parser.parse_args(arguments)
    monkeypatch.setattr(os, "environ", environment)
    taken = parser.parse_args([*arguments, "--set", "seed=1"])
    assert taken.overrides == ["name=other", f"data.source=http://alice:{SECRET}@host/x", "seed=1"]
    assert SECRET not in str(environment)
