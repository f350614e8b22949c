"""Where an artifact comes from: recipe hash, code revision, library versions, hardware. No paths, hosts or tokens."""

import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

from pipeline.files import write_json
from pipeline.recipe import WHERE, Recipe

LIBRARIES = ("torch", "transformers", "deepspeed", "ray", "pyarrow", "safetensors")
ROOT = Path(__file__).resolve().parent.parent
PROVENANCE, RECIPE = "provenance.json", "recipe.json"  # beside every artifact


def revision() -> str:
    """The checkout's commit, with "+changes" when tracked files differ from it; "unknown" outside git."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = git("rev-parse", "--short=12", "HEAD")
    if not commit:
        return "unknown"
    return commit + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")


def hardware(device: str) -> str:
    """One line: for device "cpu" the processor and the cores this process may use, else the accelerator it sees."""
    if device != "cpu" and torch.cuda.is_available():
        count = torch.cuda.device_count()
        name = torch.cuda.get_device_name()
        return f"{count} x {name}" if device == "spread" else name + (f" (one of {count})" if count > 1 else "")
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
        "hardware": hardware(recipe.target.device),
        "python": platform.python_version(),
        "versions": versions,
        **facts,
    }


def write_provenance(folder: Path, recipe: Recipe, **facts: Any) -> None:
    """Writes provenance.json and the resolved recipe.json, local paths and credentials cut off, into `folder`."""
    write_json(folder / PROVENANCE, provenance(recipe, **facts))
    write_json(folder / RECIPE, public_recipe(recipe))


def public_recipe(recipe: Recipe) -> dict[str, Any]:
    """The resolved recipe without local paths and credentials."""
    resolved = _public({**recipe.model_dump(mode="json"), "output": f"runs/{recipe.name}"})
    if recipe.features.store:  # that there is one, not where
        resolved["features"]["store"] = recipe.features.store.partition("://")[0] + "://"
    resolved["train"] |= dict.fromkeys(WHERE)
    return resolved


def _public(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _public(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_public(item) for item in value]
    return public_name(value) if isinstance(value, str) else value


def public_name(source: str) -> str:
    """A model or data address without the private part of a local path, and without a URL's credentials and query."""
    if "://" in source:
        scheme, _, rest = source.partition("://")
        rest = re.split(r"[?#]", rest, maxsplit=1)[0]
        before, _, after = rest.rpartition("@")
        rest = after if ":" in before else rest  # user:secret, whatever is in the secret; a container@account is none
        return Path(rest).name if scheme == "file" else f"{scheme}://{rest}"
    path = Path(source).expanduser()
    return path.name if path.is_absolute() or ".." in path.parts else source
