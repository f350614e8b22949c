"""A server on the loopback interface, as long as a block runs; a test says what it answers. And one of S3."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Self

import pytest
from pyarrow import fs

KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret-of-the-user", "AWS_EC2_METADATA_DISABLED": "true"}


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def answer(self, value: object, status: int = 200, kind: str = "application/json") -> None:
        content = json.dumps(value).encode() if kind == "application/json" else str(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


class Loopback:
    """A local HTTP server: ``with Loopback() as server: ... server.url``."""

    def __init__(self) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self.handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def handler(self) -> type[Handler]:
        raise NotImplementedError

    def __enter__(self) -> Self:
        Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def object_store() -> Iterator[str]:
    """The address of an empty bucket on a local S3 server."""
    from moto.server import ThreadedMotoServer  # takes a second

    with pytest.MonkeyPatch.context() as patch:
        for name, value in KEYS.items():
            patch.setenv(name, value)
        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        _, port = server.get_host_and_port()
        where = f"endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1"
        url = f"s3://shards/run?{where}&allow_bucket_creation=true"
        system, _ = fs.FileSystem.from_uri(url)
        system.create_dir("shards")
        yield url
        server.stop()
