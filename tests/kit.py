"""The helpers that tests share: a tiny random target saved like a real one, recipes and dialogues for it, the commands
of the stages.
"""

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pipeline.basics.files import sha256, write_sealed
from pipeline.basics.progress import Progress
from pipeline.features.shards import Manifest
from pipeline.recipe.load import override_arguments
from pipeline.recipe.recipe import Recipe
from pipeline.running.crew import NO_TASK_YET, Task, Watch
from pipeline.running.workers import WorkerPool
from preprocess.dump.driver import dump
from tests.warm import PATIENCE, ROOT, Forked, run_forked

BIN = Path(sys.executable).parent
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, the template's markers as special tokens; `<|end|>` ends a turn."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    markers = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    core.add_special_tokens(markers)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", pad_token="<|end|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def save_tiny_target(folder: Path, seed: int = 0, layers: int = 2) -> Path:
    """A GQA Llama (d = 32, 260 tokens) with random weights of `seed`."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=256,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = 256
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def write_sharegpt(path: Path, count: int = 60) -> Path:
    """`count` clean two-exchange dialogues of different lengths."""
    records = []
    for number in range(count):
        turns = []
        for exchange in range(2):
            turns.append({"from": "human", "value": f"question {number}.{exchange} " + "why? " * (number % 5)})
            turns.append({"from": "gpt", "value": f"answer {number}.{exchange} " + "because. " * (1 + number % 7)})
        records.append({"id": f"doc{number}", "conversations": turns})
    path.write_text(json.dumps(records))
    return path


def recipe_tree(target: Path, source: Path, output: Path) -> dict:
    """A whole recipe on the tiny target, as a plain dict to change and validate."""
    return {
        "name": "tiny",
        "output": str(output),
        "target": {"model": str(target), "dtype": "float32", "device": "cpu"},
        "data": {
            "source": str(source),
            "max_length": 160,
            "heldout_fraction": 0.2,
            "validation_dialogues": 8,
            "heldout_prompts": 4,
            "calibration_prompts": 4,
        },
        "features": {"rows_per_shard": 8, "batch_tokens": 512, "answer_tokens": 12},
        "draft": {
            "jakiro": {
                "kind": "jakiro",
                "vocabulary": 128,
            },
            "eagle": {"kind": "eagle"},
        },
        "train": {
            "epochs": 2,
            "global_batch": 8,
            "micro_batch": 4,
            "ranks": 1,
            "learning_rate": 1e-3,
            "warmup_steps": 1,
            "dtype": "float32",
            "checkpoint_every": 2,
            "validate_every": 4,
        },
        "eval": {
            "tree": {"depth": 3, "top_k": 3, "nodes": 7},
            "benchmarks": {"heldout": {"source": "heldout", "prompts": 2}},
            "max_new_tokens": 8,
            "repeats": 1,
            "dtype": "float32",
        },
        "publish": {"draft": "jakiro", "license": "apache-2.0"},
    }


def write_recipe(tree: dict, path: Path) -> Path:
    """A recipe file that commands can be given."""
    path.write_text(json.dumps(tree))
    return path.rename(path.with_suffix(".json"))


def change_sealed(path: Path, change: Callable[[dict], object]) -> None:
    """Write a changed file with a correct seal, so that a refusal is one of its content."""
    raw = json.loads(path.read_text())
    change(raw)
    write_sealed(path, raw)


def replace_once(path: Path, old: str, new: str) -> None:
    """Change one place of a file, as an editor's slip or a disk error does."""
    text = path.read_text()
    assert old in text, f"{path} holds no {old!r}"
    path.write_text(text.replace(old, new, 1))


def checksums(features: Path) -> dict[str, str]:
    """Return the checksums of a feature folder, by table and shard."""
    return {path.name: sha256(path) for path in features.glob("*.arrow")}


def flip(path: Path, place: int | None = None) -> None:
    """Turns one bit of the byte at `place`, of the middle one without it."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if place is None else place] ^= 1
    path.write_bytes(content)


@contextlib.contextmanager
def without_ray() -> Iterator[None]:
    """A pool's work is done in this process, by one worker. Starting Ray and loading a target elsewhere takes far
    longer than the work on a tiny one; what Ray does is shown by the tests of the pool and by one job of each kind.
    """

    def results(self: WorkerPool, tasks: Iterator[Task], watch: Watch) -> Iterator[tuple[Task, Any]]:
        worker = None
        for task in (task for task in tasks if task is not NO_TASK_YET):
            if worker is None:
                worker = self._make(lambda items, done=0: watch(done, "a shard"))
                worker.ready()
            yield task, worker.work(task)

    with mock.patch.object(WorkerPool, "results", results):
        yield


class Shown(Progress):
    """A progress that keeps all that is shown, however short after the last."""

    def __init__(self, subject, total, unit, start=0, quiet=False):
        super().__init__(subject, total, unit, start, quiet=True)
        self.shown = [(start, total)]
        Shown.last = self

    def reach(self, done, in_work=0, **figures):
        super().reach(done, in_work, **figures)
        self.shown.append((self.event.done, self.event.total))

    def expect(self, total):
        super().expect(total)
        self.shown.append((self.event.done, self.event.total))


def dump_here(recipe: Recipe) -> Manifest:
    """Dumps the recipe's features, or what is missing of them, in this process."""
    with without_ray():
        dump(recipe)
    return Manifest.load(recipe.paths.features)


def run_command(arguments: list[str], **environment: str) -> subprocess.CompletedProcess:
    """Run one of the project's commands from the checkout, as a user would."""
    return subprocess.run(
        arguments, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, env=command_environment(**environment)
    )


def run_warm(arguments: list[str], **environment: str) -> subprocess.CompletedProcess:
    """The same of a Python command, in a process that has imported already what it needs: not for variables that an
    import reads.
    """
    assert arguments[0] == sys.executable
    return run_forked([(arguments[1:], {})], command_environment(**environment), PATIENCE)


def call(main: Callable[[], None], *arguments: str) -> None:
    """Run a command's `main` in this process, for tests that need no separate process. Raise PipelineError."""
    with mock.patch.object(sys, "argv", [main.__module__, *arguments]):
        main()


def command_environment(**environment: str) -> dict[str, str]:
    inherited = {key: value for key, value in os.environ.items() if key not in ("RAY_ADDRESS", "PYTHONPATH")}
    return {**inherited, "DS_ACCELERATOR": "cpu", "PATH": f"{BIN}:{inherited['PATH']}", **environment}


def dump_command(recipe: Path, *overrides: str) -> list[str]:
    return [sys.executable, "preprocess/dump_features.py", str(recipe), *override_arguments(overrides)]


def train_command(recipe: Path, *overrides: str, ranks: int = 1, draft: str | None = None) -> list[str]:
    port = str(free_port())
    launcher = [str(BIN / "deepspeed"), "--num_accelerators", str(ranks), "--master_port", port, "train/main.py"]
    return [*launcher, str(recipe), *(["--draft", draft] if draft else []), *override_arguments(overrides)]


def kill_when(command: list[str], happened: Callable[[], bool], **environment: str) -> None:
    """A Python command starts warm."""
    variables = command_environment(**environment)
    if command[0] == sys.executable:
        process: Forked | subprocess.Popen = Forked(command, variables)
    else:
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(command, cwd=ROOT, env=variables, start_new_session=True, **silent)
    try:
        wait_until(happened, process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    wait_until(lambda: not holding_files(os.getpgid, process.pid))


def holding_files(kind: Callable[[int], int], leader: int) -> list[int]:
    """The processes of a group (`os.getpgid`) or a session (`os.getsid`) that may still have files open or locked."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError):
            if kind(int(entry.name)) == leader and holds_files(int(entry.name)):
                pids.append(int(entry.name))
    return pids


def holds_files(pid: int) -> bool:
    """A killed process loses its memory, and with it its command line, before its files: until its last thread has
    ended, a lock of its may still be there.
    """
    process = Path("/proc") / str(pid)
    try:
        state = (process / "stat").read_text().rpartition(")")[2].split()[0]
        return state not in "ZX" or len(list((process / "task").iterdir())) > 1
    except OSError:  # it is gone
        return False


def wait_until(
    happened: Callable[[], bool], process: subprocess.Popen | Forked | None = None, seconds: float = PATIENCE
) -> float:
    """Wait until something happened, and return the seconds that it took: a measure of this machine at this time. A
    test that has to give up sooner than after `PATIENCE` derives its `seconds` from such a measure. A `process` that
    ends before is not waited for.
    """
    begin, pause = time.monotonic(), 0.002
    while True:
        ended = process is not None and process.poll() is not None
        if happened():
            return time.monotonic() - begin
        assert not ended, f"it ended with status {process.returncode} before that happened"
        assert time.monotonic() - begin < seconds, f"it did not happen within {seconds:.0f} s"
        time.sleep(pause)
        pause = min(1.1 * pause, 0.03)  # a condition that reads /proc takes a core otherwise


def free_port() -> int:
    """Return a free port between those of Ray's workers and those that the kernel gives to connections, so that it is
    still free when a program opens it seconds later. Tests that run at a time take theirs from parts of the range.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    while True:
        port = 21_000 + 1_000 * worker + next(_PORTS) % 1_000
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


_PORTS = itertools.count(os.getpid())


def positions_in(objective, packed):
    """Each dialogue's, in the order of packed rows."""
    return (objective.positions(row.input_ids, row.loss_mask) for rows in packed for row in rows)


def labels_of(batch) -> torch.Tensor:
    """The label of every input (B, T, D)."""
    shape = batch.tokens_BT.shape
    return batch.labels_at(torch.arange(shape.numel(), device=batch.tokens_BT.device)).unflatten(0, shape)


def mask_of(batch, group=1) -> torch.Tensor:
    """Bool (B, T): which inputs are trained."""
    mask = torch.zeros(batch.tokens_BT.shape, dtype=torch.bool)
    mask.view(-1)[batch.positions[group].inputs] = True
    return mask
