"""Tests of `make pack`: a fresh folder installs the project from it, without a network."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit import ROOT


def run_offline(*command: str, folder: Path) -> str:
    """Run a command with no package index and no settings of pip but the command's own; return its output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    environment |= {"PIP_CONFIG_FILE": os.devnull, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"PYTHON": sys.executable}
    if shutil.which("unshare") and not subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode:
        command = ("unshare", "--net", *command)  # only the loopback, which is down
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.real
@pytest.mark.long
def test_a_pack_installs_and_measures_without_a_network(tmp_path):
    """The pack has this machine's build of torch, and travels in parts."""
    pack = ["make", "pack", f"PYTHON={sys.executable}", "PART_MB=60", f"PACK={tmp_path / 'packed/pack'}"]
    subprocess.run(pack, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    parts = sorted(tmp_path.glob("packed/pack.tar.*"))
    assert len(parts) > 1 and max(part.stat().st_size for part in parts) <= 60 << 20
    shutil.rmtree(tmp_path / "packed/pack")
    run_offline("sh", "-c", f"cat {' '.join(map(str, parts))} | tar x", folder=tmp_path)
    assert "jakiro check" in run_offline("sh", "pack/install.sh", folder=tmp_path)
    project = tmp_path / "pack/jakiro"
    python = str(project / ".venv/bin/python")
    assert "--parts" in run_offline(python, "-m", "infra.check", "--help", folder=project)
    figures = json.loads(
        run_offline(python, "-m", "infra.check", "--parts", "machine", folder=project).strip().splitlines()[-1]
    )
    head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    assert not figures["failed"] and figures["parts"]["machine"]["code"] == head.stdout.strip()
