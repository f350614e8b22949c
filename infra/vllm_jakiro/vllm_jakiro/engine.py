"""A vLLM engine as a child process: texts go in, tokens and states come out. It opens no port.

    python -m vllm_jakiro.engine

Every message is a line of JSON. The first line on standard input has the engine's options; then each line is a request.
Every line on standard output is a reply; vLLM's own output goes to standard error.

    in    {"options": {of EngineArgs}, "capture": {...}, "folder": where files of states go}
    out   {"ready": {"version": of vLLM, "positions": the most tokens of a text}}
    in    {"id": "a", "tokens": [...], "states": null, "prompt" or "all", "float8": whether they are to be in float8,
           "sampling": {of SamplingParams}}
    out   {"id": "a", "tokens": [of the answer], "file": the states' name in the folder, or null}
          {"id": "a", "refused": why the engine does not take it}
          {"id": "a", "lost": why its states could not be written}
          {"alive": steps so far}       at most once a second, when something has come out
          {"failed": why}               the engine cannot be used any more; the process ends

"capture" has "layers", the decoder layers whose outputs are kept, counted from 1 and ascending, the last one at the
end; "places", the indices of the auxiliary ones among them; and the last one's norm: "model", "revision" and
"trust_remote_code" of its configuration, the "class" of transformers that loads it, the name of its "norm" in there,
and "weights", a file that may be removed when the engine is ready.

A file has the states of a text's T tokens as `Conversion.convert` returns them, plain in the target's dtype or in
float8. For "all" the text is prompt and answer, and the last token's state is 0: nothing was computed after it. The
reader removes the file. The process ends when standard input ends. However it ends, its folder and its tensor-parallel
workers are removed.
"""

import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, TextIO

from vllm_jakiro.files import SUFFIX, error_path

ALIVE = 1.0  # seconds between two heartbeats
METHOD = "extract_hidden_states"
CONNECTOR = {"kv_connector": "StatesConnector", "kv_connector_module_path": "vllm_jakiro.states"}


def engine_arguments(options: dict[str, Any], capture: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return the arguments of EngineArgs: the user's options, and those that capturing states requires."""
    # vLLM counts a layer's input, from 0: of layer i that is the output of our layer i.
    draft = {"hf_config": {"eagle_aux_hidden_state_layer_ids": capture["layers"]}}
    speculation = {"method": METHOD, "num_speculative_tokens": 1, "draft_model_config": draft}
    connector_config = {"shared_storage_path": folder, "use_synchronization_lock": False, "capture": capture}
    connector = {**CONNECTOR, "kv_role": "kv_producer", "kv_connector_extra_config": connector_config}
    return {**options, "speculative_config": speculation, "kv_transfer_config": connector}


def start_guard(folder: Path) -> None:
    """Start a shell that cleans up after this process, whoever kills it (Ray kills the children of its workers; the
    kernel, if memory is short), and also if this process hangs and misses its owner's end. The shell has its own
    session and waits for the end of either. Tensor-parallel workers then end by themselves and free their shared
    memory; remaining processes of the group that this process leads are killed half a minute later.
    """
    wait = (
        'while [ -e "/proc/$0" ] && [ -e "/proc/$1" ]; do sleep 1; done\n'
        'kill -9 "$0"; rm -rf -- "$2"; n=30\n'
        'while kill -0 "-$0" && [ $((n -= 1)) -gt 0 ]; do sleep 1; done; kill -9 "-$0"; rm -rf -- "$2"'
    )
    owner = os.getppid() or os.getpid()  # a container's first process has no parent
    no_streams: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    command = ["sh", "-c", wait, str(os.getpid()), str(owner), str(folder)]
    subprocess.Popen(command, start_new_session=True, **no_streams)


class Requests:
    """The requests: lines of standard input, read by a thread."""

    def __init__(self, lines: TextIO):
        self._queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self._lines = lines
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._lines:
            try:
                self._queue.put(json.loads(line))
            except ValueError:  # the writer was killed in the middle of a line
                break
        os._exit(1)  # no process is left to read an answer

    def take(self, wait: bool) -> list[dict[str, Any]]:
        """Return the requests that have arrived; with `wait` at least one."""
        requests = [self._queue.get()] if wait else []
        while not self._queue.empty():
            requests.append(self._queue.get())
        return requests


class EngineServer:
    """The loop's body: it feeds requests to the engine and sends the results."""

    def __init__(self, engine: Any, folder: Path, send: Any):
        self._engine, self._folder, self._send = engine, folder, send
        self._captures: dict[str, bool] = {}  # requests that the engine works on -> whether states are captured
        self._written: dict[str, list[int]] = {}  # requests that wait for their file -> the answer's tokens
        self._steps, self._last_alive = 0, time.monotonic()

    @property
    def idle(self) -> bool:
        return not self._captures and not self._written

    def add(self, request: dict[str, Any]) -> None:
        from vllm import SamplingParams, TokensPrompt

        name, states = request["id"], request["states"]
        capture = {"states": states, "file": f"{name}{SUFFIX}", "float8": request["float8"]}
        extra_arguments = {"extra_args": {"kv_transfer_params": capture}} if states else {}
        try:
            sampling = SamplingParams(**request["sampling"], **extra_arguments)
            self._engine.add_request(name, TokensPrompt(prompt_token_ids=request["tokens"]), sampling)
        except Exception as error:  # a text that is too long, ...: vLLM's errors are no ValueErrors
            self._send({"id": name, "refused": str(error)})
        else:
            self._captures[name] = states is not None

    def step(self) -> None:
        """Run one step of the engine, even if no request is unfinished: the states of requests that finished in a step
        are copied in the next one.
        """
        outputs = self._engine.step()
        for output in outputs:
            if output.finished:
                answer = list(output.outputs[0].token_ids)
                if self._captures.pop(output.request_id):
                    self._written[output.request_id] = answer
                else:
                    self._send({"id": output.request_id, "tokens": answer, "file": None})
        waiting = list(self._written)
        for name in waiting:
            self._hand_over(name)
        self._steps += 1
        moved = bool(outputs) or len(self._written) < len(waiting)
        if moved and time.monotonic() - self._last_alive > ALIVE:
            self._send({"alive": self._steps})
            self._last_alive = time.monotonic()
        if not self._captures and self._written:
            time.sleep(0.001)  # the writers are not finished

    def _hand_over(self, name: str) -> None:
        path = self._folder / f"{name}{SUFFIX}"
        error = error_path(path)
        if path.exists():
            self._send({"id": name, "tokens": self._written.pop(name), "file": path.name})
        elif error.exists():
            del self._written[name]
            self._send({"id": name, "lost": error.read_text()})
            error.unlink()


def main() -> None:
    sys.stdout.flush()
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM's output is no message

    def send(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    settings = json.loads(sys.stdin.readline())
    folder = Path(settings["folder"])
    start_guard(folder)
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # threads do not outlive a fork, open files do
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine's own process is this one
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    requests = Requests(sys.stdin)
    try:
        import vllm
        from vllm import EngineArgs, LLMEngine

        engine = LLMEngine.from_engine_args(
            EngineArgs(**engine_arguments(settings["options"], settings["capture"], settings["folder"]))
        )
        send({"ready": {"version": vllm.__version__, "positions": engine.model_config.max_model_len}})
        server = EngineServer(engine, folder, send)
        while True:
            for request in requests.take(wait=server.idle):
                server.add(request)
            server.step()
    except Exception as error:  # whatever ends this process, its parent is told
        send({"failed": f"{type(error).__name__}: {error}"})
        os._exit(1)


if __name__ == "__main__":
    main()
