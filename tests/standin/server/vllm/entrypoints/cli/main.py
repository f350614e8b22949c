"""A stand-in for the program `vllm serve`: it answers /health (first: not yet) and /v1/chat/completions. Its child
ignores SIGTERM. In the folder `STANDIN` it leaves its arguments and its environment.

`FAULT` in the environment: "dies" before it is healthy; "ends N" with status N afterwards; "kills" itself.
"""

import json
import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

CHILD = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
)
ERRORS = """\
(EngineCore pid=7) ERROR 11-29 12:06:55 [core.py:953]     raise ValueError(
\x1b[31m(EngineCore pid=7) ERROR 11-29 12:06:55 [core.py:953] ValueError: no room for the cache
RuntimeError: Engine core initialization failed. See root cause above.
"""
fault, _, status = os.environ["FAULT"].partition(" ")
asked = []


class VllmHandler(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, code: int, value: object) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def do_GET(self) -> None:
        asked.append(self.path)
        self._answer(503 if len(asked) == 1 else 200, {})
        if len(asked) > 1 and fault == "ends":
            print("ValueError: a fault while it served", flush=True)
            os._exit(int(status))
        if len(asked) > 1 and fault == "kills":
            os.kill(os.getpid(), signal.SIGKILL)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._answer(200, {"model": body["model"], "key": self.headers.get("Authorization")})


def main() -> None:
    started = {"arguments": sys.argv[1:], "environment": dict(os.environ)}
    (Path(os.environ["STANDIN"]) / "started.json").write_text(json.dumps(started))
    if fault == "dies":
        sys.exit(ERRORS)
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    options = dict(zip(sys.argv, sys.argv[1:], strict=False))
    print("INFO: listening", flush=True)
    HTTPServer((options["--host"], int(options["--port"])), VllmHandler).serve_forever()


if __name__ == "__main__":
    main()
