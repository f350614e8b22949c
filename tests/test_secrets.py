"""A credential in an address is refused, and shown in no error. That those of the environment reach no artifact:
tests/test_run.py.
"""

import base64
import http.server
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import fsspec
import pytest

from pipeline.basics.errors import PipelineError
from pipeline.recipe.load import load_recipe
from pipeline.recipe.sections import DataConfig
from preprocess.sources.read import Tail, read_records
from tests.kit import free_port, recipe_tree, run_command, write_recipe, write_sharegpt

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
    """The address of a server on this machine that wants credentials."""

    class Handler(http.server.BaseHTTPRequestHandler):
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

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/data.json"
    finally:
        server.shutdown()
        server.server_close()


def authorization(password: str) -> str:
    return f"Basic {base64.b64encode(f'alice:{password}'.encode()).decode()}"


def read(source: str) -> list:
    return list(read_records(DataConfig(source=source), Tail()))


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
