"""Hosts that share what the recipe names, and nothing else: a dump across two through an object store, as a job of a
Ray cluster with a third for its head; training across two by hostfile and ssh. One dies in the middle of each, and what
comes out is what one machine makes.
"""

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyarrow.fs import FileSystem

from pipeline.basics.files import sha256
from pipeline.features.shards import Manifest
from tests import hosts
from tests.hosts import Host, code
from tests.kit import (
    BIN,
    ROOT,
    command_environment,
    recipe_tree,
    wait_until,
    write_recipe,
    write_sharegpt,
)
from tests.loopback import KEYS

pytestmark = [pytest.mark.real, pytest.mark.long, pytest.mark.skipif(bool(hosts.MISSING), reason=hosts.MISSING)]
JAKIRO = [str(BIN / "python"), "-c", "import jakiro; jakiro.main()"]
TOKEN = "5" * 64
WEIGHTS = "drafts/jakiro/model.safetensors"


@pytest.fixture(scope="module")
def store() -> Iterator[str]:
    """The address of an empty bucket, as the hosts reach it through their bridge. Its name is its own: what other tests
    left in theirs moto keeps as long as this process lives.
    """
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="0.0.0.0", port=0, verbose=False)
    server.start()
    where = f"endpoint_override={hosts.GATE}:{server.get_host_and_port()[1]}&scheme=http&region=us-east-1"
    yield f"s3://hosts/run?{where}&allow_bucket_creation=true"
    server.stop()


@pytest.fixture(scope="module")
def three(store) -> Iterator[list[Host]]:
    with hosts.started("host-a", "host-b", "host-c") as all_hosts, pytest.MonkeyPatch.context() as patch:
        for name, value in KEYS.items():
            patch.setenv(name, value)
        FileSystem.from_uri(store)[0].create_dir("hosts")
        for host in all_hosts:
            (host.folder / "root/.ray/auth_token").write_text(TOKEN)
            (host.folder / "local/jakiro").write_text(f'#!/bin/sh\nexec {shlex.join(JAKIRO)} "$@"\n')
            (host.folder / "local/jakiro").chmod(0o755)
        yield all_hosts


def settings(**extra: str) -> dict[str, str]:
    ray = {"RAY_AUTH_MODE": "token", "RAY_worker_niceness": "0", "RAY_DEDUP_LOGS": "0"}
    return {"PYTHONPATH": code(), "PATH": f"/local:{BIN}:{os.environ['PATH']}", **ray, **KEYS, **extra}


def join(host: Host, head: Host) -> None:
    """Starts Ray on a host: one worker's room on each, none on the head, which takes jobs."""
    if host is head:
        where = ["--head", "--port=6379", f"--dashboard-host={head.address}", "--num-cpus=0"]
    else:
        where = [f"--address={head.address}:6379", "--num-cpus=2"]
    where += [f"--node-ip-address={host.address}", "--disable-usage-stats"]
    done = host.run(str(BIN / "ray"), "start", *where, **settings())
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def recipe(three, tiny_target, store) -> Path:
    """A recipe in the shared folder, with the target and the data next to it."""
    shared = three[0].shared
    shutil.copytree(tiny_target, shared / "target")
    write_sharegpt(shared / "data.json", 1200)
    shared_folder = Path(hosts.SHARED)
    tree = recipe_tree(shared_folder / "target", shared_folder / "data.json", shared_folder / "run")
    del tree["draft"]["eagle"]
    tree["features"] |= {"workers": 2, "cpus_per_worker": 2, "hang_seconds": 60}
    tree["features"]["store"] = store
    tree["train"] |= {"epochs": 1, "ranks": 2, "micro_batch": 2, "checkpoint_every": 50}
    tree["train"] |= {"shards": "/local/shards"}
    return write_recipe(tree, shared / "tiny.toml")


def path_on_hosts(recipe: Path) -> str:
    return f"{hosts.SHARED}/{recipe.name}"


def test_a_dump_across_two_hosts_outlives_one_of_them(three, recipe, tmp_path):
    """Started from a fourth, which sees nothing of theirs but the cluster's port."""
    a, b, c = three
    for host in three:
        join(host, a)
    log, manifest = tmp_path / "dump.log", a.shared / "run/features"
    command = [*JAKIRO, "run", str(recipe), "--on", f"ray://{a.address}", "--until", "preprocess"]
    environment = command_environment(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=TOKEN, PYTHONPATH=code())
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment, cwd=tmp_path)
    wait_until(lambda: process.poll() is not None or shards_of(manifest))
    early = [host for host in (b, c) if f"ip={host.address}" in log.read_text()]
    for host in early:  # else it may be done before the other has come up
        host.run("pkill", "-STOP", "-f", "^ray::WorkerActor")
    wait_until(lambda: process.poll() is not None or all(f"ip={host.address}" in log.read_text() for host in (b, c)))
    for host in early:
        host.run("pkill", "-CONT", "-f", "^ray::WorkerActor")
    finished = shards_of(manifest)
    wait_until(lambda: process.poll() is not None or shards_of(manifest) >= finished + 6)
    assert process.poll() is None, log.read_text()
    b.die()
    assert process.wait(300) == 0, log.read_text()
    assert Manifest.load(manifest).complete and "a worker failed" in log.read_text(), log.read_text()


def shards_of(features: Path) -> int:
    return len(Manifest.load(features).shards) if (features / "manifest.json").exists() else 0


@pytest.fixture(scope="module")
def alone(three, recipe) -> Path:
    """The folder of a run by one of the hosts, without a store: a dump, and a training of two ranks."""
    tree = json.loads(recipe.read_text())
    tree["output"], tree["features"]["store"] = f"{hosts.SHARED}/alone", None
    tree["train"] |= {"shards": None}
    recipe_path = path_on_hosts(write_recipe(tree, recipe.with_name("alone.toml")))
    for command in ([*JAKIRO, "dump", recipe_path], [*JAKIRO, "train", recipe_path]):
        done = three[0].run(*command, **settings())
        assert done.returncode == 0, done.stdout + done.stderr
    return three[0].shared / "alone"


def test_its_shards_are_those_of_one_host(three, recipe, alone):
    checksums = [
        {shard.name: shard.sha256 for shard in Manifest.load(output / "features").shards}
        for output in (three[0].shared / "run", alone)
    ]
    assert checksums[0] == checksums[1] and len(checksums[0]) > 4


def test_training_across_two_hosts_goes_on_after_one_has_died(three, recipe, alone):
    a, b, _ = three
    b.start()
    environment_variables = settings(DS_ACCELERATOR="cpu", PATH=os.environ["PATH"])
    for host in three[:2]:
        lines = "".join(f"{name}={value}\n" for name, value in environment_variables.items())
        (host.folder / "root/.ssh/deepspeed_env").write_text(lines)
    (a.shared / "hostfile").write_text("host-a slots=1\nhost-b slots=1\n")
    launch = [str(BIN / "deepspeed"), "--hostfile", f"{hosts.SHARED}/hostfile", "--master_addr", a.address]
    launch += [str(ROOT / "train/main.py"), path_on_hosts(recipe)]
    environment = settings(DS_ENV_FILE="/root/.ssh/deepspeed_env")
    log, resume = a.folder / "train.log", a.shared / "run/drafts"
    process = a.start_command(log, *launch, **environment)
    wait_until(lambda: process.poll() is not None or any(resume.rglob("resume.json")))
    assert process.poll() is None, log.read_text()
    b.die()
    assert process.wait(300) != 0 and "rank 1 on host-b gave host-a no sign of life" in log.read_text(), log.read_text()
    b.start()
    again = a.run(*launch, **environment)
    assert again.returncode == 0, again.stdout + again.stderr
    assert sha256(a.shared / "run" / WEIGHTS) == sha256(alone / WEIGHTS)
