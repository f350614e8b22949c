"""A credential in an address is refused, and no error shows it, or one of the environment. tests/test_run.py checks
that no credential of the environment reaches an artifact.
"""

import base64
import http.server
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import fsspec
import pytest

from eval.served import ServerClient
from pipeline.basics.errors import PipelineError
from pipeline.basics.public import HIDDEN, public_text
from pipeline.decoding.generate import Sampling
from pipeline.features.engines import open_source
from pipeline.features.engines.openai import OpenAI
from pipeline.features.source import GenerationPrompt
from pipeline.lm.config import TargetConfig
from pipeline.recipe.load import load_recipe
from pipeline.recipe.sections import DataConfig
from pipeline.running import entry
from preprocess.sources.read import TornTail, read_records
from tests.kit import free_port, recipe_tree, run_command, write_recipe, write_sharegpt
from tests.loopback import Handler, Loopback

SECRET = "hunter2-of-alice"
TOKEN = "hf_" + "aB3" * 12
ADDRESSES = [
    f"https://alice:{SECRET}@host/data.json",
    f"https://{SECRET}@host/data.json",
    f"s3://ALICE:{SECRET}/+x@bucket/run?region=y",
    f"s3://ALICE:{SECRET}?x#y@bucket/run",
    f"hf://alice:{SECRET}@datasets/x",
    f"simplecache::http://alice:{SECRET}'>@host/x.json",
    f"https://host/data.json?sv=1&sig={SECRET}",
    f"https://host/data.json?X-Amz-Signature={SECRET}",
    f"https://host/x;token={SECRET}/data.json",
    f"https://host/{TOKEN}/data.json",
    f"s3://b/key=1/{TOKEN}/x.parquet",
    f"s3://KEY:{SECRET} x@bucket/run",
    f"https://host/x?a=1&X-Amz-Security-Token={SECRET}",
    f"https://host/x?AWSAccessKeyId=A&x={SECRET}",
    f"https://host/x?apikey={SECRET}",
    f"https://host/x?SharedAccessSignature={SECRET}",
    f"https://host/x#access_token={SECRET}",
    *(f"https://host/x?{key}={SECRET}" for key in ("delegation", "jwt", "code", "access")),
]
ALLOWED = [
    "/data/alice@work/x.json",
    "owner/name",
    "embedded:sharegpt",
    "s3://bucket/run?region=x&endpoint_override=host:9000&scheme=http",
    "https://host:8080/a@b/data.json",
    "https://host/data.json?mail=a@b",
    "sftp://alice@host/data.json",
    "abfs://container@account.dfs.example/run",
    "hf://datasets/owner/name@revision/file.json",
    "github://owner:name@main/data.json",
    "zip://x.json::/home/alice/x.zip",
    f"https://host/{'0a' * 20}/x.json",
    "s3://b/key=1/part=2/x.parquet",
    "s3://b/token=cl100k/x",
    "hf://datasets/o/n/author=x/f.parquet",
    "https://host/x?author=x&monkey=y&postcode=z",
    "https://host/x.json as of May?key=none, by a@b",
]


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_with_a_credential_is_refused_and_not_shown(tiny_target, tmp_path, address):
    tree = recipe_tree(tiny_target, tmp_path / "data.json", tmp_path / "run")
    tree["data"]["source"] = address
    with pytest.raises(PipelineError, match=r"data\.source holds a credential .*\(HF_TOKEN") as caught:
        load_recipe(write_recipe(tree, tmp_path / "recipe"))
    assert SECRET not in str(caught.value) and TOKEN not in str(caught.value)


@pytest.mark.parametrize("address", ALLOWED)
def test_other_addresses_are_not(tiny_target, tmp_path, address):
    tree = recipe_tree(tiny_target, tmp_path / "data.json", tmp_path / "run")
    tree["data"]["source"] = address
    assert load_recipe(write_recipe(tree, tmp_path / "recipe")).data.source == address


@pytest.mark.parametrize(
    "override",
    [
        "features.store={}",
        "target.model={}",
        "eval.benchmarks.mine.source={}",
        "data.languages=['{}']",
        "train.deepspeed={{nvme_path='{}'}}",
        "nosuch={}",
        "data.source:{}",
        "seed={}",
    ],
)
def test_wherever_an_address_may_stand_it_is_refused(tiny_target, tmp_path, override):
    recipe = write_recipe(recipe_tree(tiny_target, tmp_path / "data.json", tmp_path / "run"), tmp_path / "recipe")
    with pytest.raises(PipelineError, match="holds a credential") as caught:
        load_recipe(recipe, [override.format(f"http://alice:{SECRET}@host/x")])
    assert SECRET not in str(caught.value)


# -- credentials where the libraries look for them -------------------------------------------------------------------


@contextmanager
def served(content: bytes) -> Iterator[str]:
    """The address of a server on this machine that requires credentials."""

    class AuthorizedHandler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.headers.get("Authorization", "") != authorization(SECRET):
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

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), AuthorizedHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/data.json"
    finally:
        server.shutdown()
        server.server_close()


def authorization(password: str) -> str:
    return f"Basic {base64.b64encode(f'alice:{password}'.encode()).decode()}"


def read(source: str) -> list:
    return list(read_records(DataConfig(source=source), TornTail()))


def test_a_source_that_wants_credentials_is_read_with_those_of_fsspecs_configuration(tmp_path, monkeypatch):
    with served(write_sharegpt(tmp_path / "data.json").read_bytes()) as address:
        with pytest.raises(PipelineError, match=r"is refused by the server \(HTTP 401\)"):
            read(address)
        monkeypatch.setitem(fsspec.config.conf, "http", {"headers": {"Authorization": authorization(SECRET)}})
        assert len(read(address)) == 60
    with pytest.raises(PipelineError, match="cannot be reached: "):
        read(f"http://127.0.0.1:{free_port()}/data.json")


def test_an_error_shows_no_query_of_an_address():
    code = (
        "from pipeline.running import entry\n"
        f"def f(): raise RuntimeError('GET https://host/data.json?Signature={SECRET} failed')\nentry.run(f)"
    )
    done = run_command([sys.executable, "-c", code])
    assert done.returncode == 1 and "RuntimeError: GET https://host/data.json failed" in done.stderr
    assert done.stderr.count(SECRET) == 0


# -- credentials of the environment ----------------------------------------------------------------------------------


class Echo(Loopback):
    """A server that answers with what it was sent: `answer` of the key."""

    def __init__(self, status: int, answer: Callable[[str], object]):
        self.status, self.reply = status, answer
        super().__init__()

    def handler(self):
        echo = self

        class Echoing(Handler):
            def do_GET(self) -> None:
                self.answer(echo.reply(self.headers["Authorization"].removeprefix("Bearer ")), echo.status)

            def do_POST(self) -> None:
                self.body()
                self.do_GET()

        return Echoing


@pytest.mark.parametrize("key", ["sk-" + SECRET, 'sk-"excerpt"\\' + SECRET])
@pytest.mark.parametrize(
    ("status", "answer", "complaint"),
    [
        (401, lambda key: {"error": f"Incorrect API key provided: {key}"}, "answers 401: Check OPENAI_API_KEY"),
        (401, lambda key: {"error": f"wrong: {key[:9]}***{key[-9:]}"}, "answers 401: Check OPENAI_API_KEY"),
        (403, lambda key: {"error": f"wrong: {key[:9]}***"}, "answers 403: Check OPENAI_API_KEY"),
        (500, lambda key: {"headers": {"Authorization": f"Bearer {key}"}}, "answers 500"),
        (500, lambda key: "x" * 280 + key, "answers 500"),  # that its begin is not left by a cut
        (400, lambda key: [key], "answers 400"),
        (200, lambda key: {"sent": key}, "lists no models"),
        (200, lambda key: {"data": [{"id": key}, {"id": "b"}]}, "choose one"),
    ],
)
def test_what_a_server_repeats_of_the_key_is_not_shown(monkeypatch, key, status, answer, complaint):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with Echo(status, answer) as server, pytest.raises(PipelineError, match=complaint) as caught:
        OpenAI(server.url, "here").only_model("choose one")
    assert SECRET[:4] not in str(caught.value) and SECRET[-4:] not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "shape"), [("eval", "/v1/chat/completions should"), ("dump", "/v1/completions should")]
)
def test_an_answer_of_another_shape_shows_no_key(tiny_recipe, monkeypatch, name, shape):
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    with Echo(200, lambda key: {"data": [{"id": "m"}], "choices": [], "sent": key}) as server:
        expected = {"engine": "server", "engine_url": server.url}
        target = TargetConfig.model_validate(tiny_recipe.target.model_dump() | expected)
        with pytest.raises(PipelineError, match=shape) as caught:
            if name == "eval":
                ServerClient(server.url, tiny_recipe).ask([], 0.0, "level")
            else:
                list(open_source(target).answers([GenerationPrompt([5])], Sampling(8, frozenset({1}))))
    assert SECRET not in str(caught.value) and HIDDEN in str(caught.value)


@pytest.mark.parametrize("kind", ["RuntimeError", "PipelineError"])
@pytest.mark.parametrize(
    "name",
    [
        *("OPENAI_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
        *("WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "GITHUB_TOKEN", "AZURE_STORAGE_CONNECTION_STRING"),
    ],
)
def test_no_error_shows_a_credential_of_the_environment(monkeypatch, capsys, kind, name):
    monkeypatch.setenv(name, f"{SECRET}/+=")

    def main() -> None:
        errors = {"RuntimeError": RuntimeError, "PipelineError": PipelineError}
        raise errors[kind](f"GET x: {SECRET}/+= or {SECRET}%2F%2B%3D failed")

    with pytest.raises(SystemExit):
        entry.run(main)
    assert f"GET x: {HIDDEN} or {HIDDEN} failed" in (message := capsys.readouterr().err) and SECRET not in message


def test_a_placeholder_for_a_key_leaves_errors_as_they_are(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "EMPTY")
    assert public_text("the answer is EMPTY") == "the answer is EMPTY"


def test_the_current_folder_is_no_password(monkeypatch):
    """A shell exports it as PWD."""
    monkeypatch.setenv("PWD", "/home/alice/work")
    assert public_text("pip install /home/alice/work/infra") == "pip install /home/alice/work/infra"
