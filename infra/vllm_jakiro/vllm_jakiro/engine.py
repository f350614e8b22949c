"""A vLLM engine as a child process: texts go in, tokens and states come out. It listens nowhere.

    python -m vllm_jakiro.engine

Every message is a line of JSON. The first line on standard input holds what the engine is made of; then each line is a
request. Every line on standard output answers; what vLLM prints goes to standard error.

    in    {"options": {of EngineArgs}, "layers": [decoder layers, counted from 1], "folder": where files of states go}
    out   {"ready": {"version": of vLLM, "positions": that a text may have}}
    in    {"id": "a", "tokens": [...], "states": null, "prompt" or "all", "sampling": {of SamplingParams}}
    out   {"id": "a", "tokens": [of the answer], "file": the states' name in the folder, or null}
          {"id": "a", "refused": why the engine does not take it}
          {"id": "a", "lost": why its states could not be written}
          {"alive": steps so far}       at most once a second, when something has come out
          {"failed": why}               the engine is of no use any more; the process ends

A file has "states" [T, S, D], in the rising order of the layers and in the target's dtype, none of them normed, and
"tokens" [T]: of "all" those of prompt and answer but the last, behind which nothing was computed. Whoever asked removes
it. When standard input ends, so does the process. However it ends, its folder and its tensor-parallel workers go, too.
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

from vllm_jakiro.files import SUFFIX, failed

ALIVE = 1.0  # seconds between two signs of life
METHOD = "extract_hidden_states"
CONNECTOR = {"kv_connector": "StatesConnector", "kv_connector_module_path": "vllm_jakiro.states"}


def arguments(options: dict[str, Any], layers: list[int], folder: str) -> dict[str, Any]:
    """Of EngineArgs: the user's options, with what capturing needs."""
    if not layers:
        return options
    # vLLM counts a layer's input, from 0: of layer i that is the output of our layer i.
    draft = {"hf_config": {"eagle_aux_hidden_state_layer_ids": sorted(set(layers))}}
    capture = {"method": METHOD, "num_speculative_tokens": 1, "draft_model_config": draft}
    where = {"shared_storage_path": folder, "use_synchronization_lock": False}
    connector = {**CONNECTOR, "kv_role": "kv_producer", "kv_connector_extra_config": where}
    return {**options, "speculative_config": capture, "kv_transfer_config": connector}


def guard(folder: Path) -> None:
    """Cleans up behind this process, whoever kills it (Ray kills the children of its workers; the kernel, where memory
    is short), and where it hangs so that it does not hear of its owner's end: a shell of a session of its own waits for
    the end of either. Tensor-parallel workers end by themselves then, and give back their shared memory; what is left
    of the group that this process leads is killed half a minute later.
    """
    wait = (
        'while [ -e "/proc/$0" ] && [ -e "/proc/$1" ]; do sleep 1; done\n'
        'kill -9 "$0"; rm -rf -- "$2"; n=30\n'
        'while kill -0 "-$0" && [ $((n -= 1)) -gt 0 ]; do sleep 1; done; kill -9 "-$0"; rm -rf -- "$2"'
    )
    owner = os.getppid() or os.getpid()  # a container's first process has none
    silent: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    words = ["sh", "-c", wait, str(os.getpid()), str(owner), str(folder)]
    subprocess.Popen(words, start_new_session=True, **silent)


class Requests:
    """What is asked for: lines of standard input, read by a thread."""

    def __init__(self, lines: TextIO):
        self._queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self._lines = lines
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._lines:
            try:
                self._queue.put(json.loads(line))
            except ValueError:  # whoever wrote it was killed meanwhile
                break
        os._exit(1)  # nobody is there any more to read an answer

    def take(self, wait: bool) -> list[dict[str, Any]]:
        """What has come; with `wait` at least one."""
        found = [self._queue.get()] if wait else []
        while not self._queue.empty():
            found.append(self._queue.get())
        return found


class Server:
    """Feeds the engine and says what comes out."""

    def __init__(self, engine: Any, folder: Path, say: Any):
        self._engine, self._folder, self._say = engine, folder, say
        self._wants: dict[str, bool] = {}  # a request that the engine works on -> whether it has a file
        self._written: dict[str, list[int]] = {}  # requests that wait for their file: the answers' tokens
        self._steps, self._told = 0, time.monotonic()

    @property
    def idle(self) -> bool:
        return not self._wants and not self._written

    def add(self, request: dict[str, Any]) -> None:
        from vllm import SamplingParams, TokensPrompt

        name, states = request["id"], request["states"]
        capture = {"states": states, "file": f"{name}{SUFFIX}"}
        more = {"extra_args": {"kv_transfer_params": capture}} if states else {}
        try:
            sampling = SamplingParams(**request["sampling"], **more)
            self._engine.add_request(name, TokensPrompt(prompt_token_ids=request["tokens"]), sampling)
        except Exception as error:  # a text that is too long, ...: vLLM's own errors are no ValueErrors
            self._say({"id": name, "refused": str(error)})
        else:
            self._wants[name] = states is not None

    def step(self) -> None:
        """One step of the engine. Also without anything unfinished: the states of what finished in the last step are
        copied in the next one.
        """
        outputs = self._engine.step()
        for output in outputs:
            if output.finished:
                answer = list(output.outputs[0].token_ids)
                if self._wants.pop(output.request_id):
                    self._written[output.request_id] = answer
                else:
                    self._say({"id": output.request_id, "tokens": answer, "file": None})
        waiting = list(self._written)
        for name in waiting:
            self._hand_over(name)
        self._steps += 1
        moved = bool(outputs) or len(self._written) < len(waiting)
        if moved and time.monotonic() - self._told > ALIVE:
            self._say({"alive": self._steps})
            self._told = time.monotonic()
        if not self._wants and self._written:
            time.sleep(0.001)  # the writers are at it

    def _hand_over(self, name: str) -> None:
        path = self._folder / f"{name}{SUFFIX}"
        error = failed(path)
        if path.exists():
            self._say({"id": name, "tokens": self._written.pop(name), "file": path.name})
        elif error.exists():
            del self._written[name]
            self._say({"id": name, "lost": error.read_text()})
            error.unlink()


def main() -> None:
    sys.stdout.flush()
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints is no message

    def say(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    made = json.loads(sys.stdin.readline())
    folder = Path(made["folder"])
    guard(folder)
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # threads do not outlive a fork, open files do
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine's own process is this one
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    requests = Requests(sys.stdin)
    try:
        import vllm
        from vllm import EngineArgs, LLMEngine

        engine = LLMEngine.from_engine_args(EngineArgs(**arguments(made["options"], made["layers"], made["folder"])))
        say({"ready": {"version": vllm.__version__, "positions": engine.model_config.max_model_len}})
        server = Server(engine, folder, say)
        while True:
            for request in requests.take(wait=server.idle):
                server.add(request)
            server.step()
    except Exception as error:
        say({"failed": f"{type(error).__name__}: {error}"})
        os._exit(1)


if __name__ == "__main__":
    main()
