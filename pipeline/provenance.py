"""Where an artifact comes from: recipe hash, code revision, library versions, hardware. No paths, hosts or tokens."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from pipeline.files import write_json
from pipeline.recipe import Recipe

LIBRARIES = ("torch", "transformers", "deepspeed", "ray", "pyarrow", "safetensors")
ROOT = Path(__file__).resolve().parent.parent


def revision() -> str:
    """The checkout's commit, with "+changes" when tracked files differ from it; "unknown" outside git."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = git("rev-parse", "--short=12", "HEAD")
    if not commit:
        return "unknown"
    return commit + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")


def hardware() -> str:
    """One line: accelerators if any, else the processor and the cores this process may use."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        name = models[0] if models else name
    return f"{len(os.sched_getaffinity(0))} cores, {name}"


def provenance(recipe: Recipe, **facts: Any) -> dict[str, Any]:
    versions = {}
    for library in LIBRARIES:
        try:
            versions[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            versions[library] = None
    return {
        "recipe": recipe.name,
        "recipe_hash": recipe.hash,
        "code_revision": revision(),
        "hardware": hardware(),
        "python": platform.python_version(),
        "versions": versions,
        **facts,
    }


def write_provenance(folder: Path, recipe: Recipe, **facts: Any) -> None:
    """Writes provenance.json and the resolved recipe.json (without the run's folder) into `folder`."""
    resolved = recipe.model_dump(mode="json")
    resolved["output"] = f"runs/{recipe.name}"  # where the run lay is private
    for section, key in (("target", "model"), ("data", "source")):
        resolved[section][key] = public_name(resolved[section][key])
    write_json(folder / "provenance.json", provenance(recipe, **facts))
    write_json(folder / "recipe.json", resolved)


def public_name(source: str) -> str:
    """A model or data address without the private part of a local path."""
    path = Path(source).expanduser()
    return path.name if path.is_absolute() or path.exists() else source
