"""The provenance of artifacts: recipe hash, code revision, library versions, hardware. No paths, hosts or tokens."""

import hmac
import importlib.metadata
import json
import os
import platform
import secrets
import stat
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipeline.basics.accelerator import current_accelerator
from pipeline.basics.embedded import cache_dir
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import ROOT, atomic_path, lock_file, parse_sealed, read_json, write_sealed
from pipeline.basics.public import public_name
from pipeline.recipe.identity import describe_differences, draft_settings, read_layers, run_hash
from pipeline.recipe.load import recipe_from
from pipeline.recipe.recipe import Recipe

LIBRARIES = ("torch", "transformers", "deepspeed", "ray", "pyarrow", "safetensors")
# Increase it if a change of code moves a measured figure: earlier reports are then measured again.
# tests/pipeline/test_golden.py fails if a figure moves.
MEASURE_VERSION = 1
PROVENANCE, RECIPE = "provenance.json", "recipe.json"  # next to every artifact
OWN_RECIPE = "own-recipe.json"  # next to features, with local paths


def revision() -> str:
    """Return the checkout's commit, with "+changes" if tracked files differ from it; in a wheel, the commit that it was
    built from; "unknown" outside git.
    """
    built = ROOT / "COMMIT"  # infra/command/build_hook.py
    if built.is_file():
        return built.read_text() or "unknown"

    def git(*arguments: str) -> str:
        try:
            done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = git("rev-parse", "--short=12", "HEAD")
    if not commit:
        return "unknown"
    return commit + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")


def measurement_versions() -> str:
    """Return the versions of the measurement and of the decoding libraries; a report with others is measured again."""
    versions = [f"{library} {importlib.metadata.version(library)}" for library in ("torch", "transformers")]
    return ", ".join([f"measurement {MEASURE_VERSION}", *versions])


def hardware(device: str) -> str:
    """Return a line on the hardware: for device "cpu" the processor and the cores that this process may use, else the
    accelerator that it sees.
    """
    if device != "cpu" and (device_type := current_accelerator()):
        count = torch.accelerator.device_count()
        name = torch.get_device_module(device_type).get_device_name(device_type)
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
    versions: dict[str, str | None] = {}
    for library in LIBRARIES:
        try:
            versions[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            versions[library] = None
    return {
        "recipe": recipe.name,
        "recipe_hash": run_hash(recipe),
        "code_revision": revision(),
        "hardware": hardware(recipe.target.device),
        "python": platform.python_version(),
        "versions": versions,
        **facts,
    }


def write_provenance(folder: Path, recipe: Recipe, **facts: Any) -> None:
    """Write provenance.json and the resolved recipe.json, without local paths, into `folder`."""
    write_sealed(folder / PROVENANCE, provenance(recipe, **facts))
    write_sealed(folder / RECIPE, public_recipe(recipe))


def write_own_recipe(folder: Path, recipe: Recipe) -> None:
    """Write the resolved recipe, with local paths, for commands of this user on this machine. It is never published or
    uploaded to a store, and no other user can read it.
    """
    tree = recipe.model_dump(mode="json")
    if (key := _machine_key()) is None:
        return
    content = {"recipe": tree, "mac": _mac(key, folder, tree)}
    with atomic_path(folder / OWN_RECIPE, private=True) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n")


def own_recipe(folder: Path, overrides: list[str]) -> Recipe | None:
    """Return the recipe that this user wrote into this folder on this machine; None for any other recipe, since a
    recipe may name code that is run.
    """
    tree = _read_own_tree(folder)
    return None if tree is None else recipe_from(tree, folder / OWN_RECIPE, overrides)


def _read_own_tree(folder: Path) -> dict[str, Any] | None:
    if not (folder / OWN_RECIPE).is_file() or (key := _machine_key()) is None:
        return None
    content = read_json(folder / OWN_RECIPE)
    tree, mac = content.get("recipe"), content.get("mac")
    if not isinstance(tree, dict) or not isinstance(mac, str) or not mac.isascii():
        return None
    return tree if hmac.compare_digest(mac, _mac(key, folder, tree)) else None


def _mac(key: bytes, folder: Path, tree: Any) -> str:
    """Return the keyed digest of a recipe for a folder."""
    message = json.dumps([str(folder.resolve()), tree], sort_keys=True)
    return hmac.new(key, message.encode(), "sha256").hexdigest()


def _machine_key() -> bytes | None:
    """Return 32 random bytes in the cache folder, made at the first call, which no other user can read. None if the
    folder cannot keep a secret: it is not writable, or other users can read its files.
    """
    path = cache_dir() / "machine-key"
    try:
        with lock_file(path):
            if not path.exists():
                with atomic_path(path, private=True) as temporary:
                    temporary.write_bytes(secrets.token_bytes(32))
        state = path.lstat()
        is_private = stat.S_ISREG(state.st_mode) and state.st_uid == os.geteuid() and not state.st_mode & 0o077
        return path.read_bytes() if is_private else None
    except OSError:
        return None


def public_recipe(recipe: Recipe) -> dict[str, Any]:
    """Return the resolved recipe without local paths, users and queries of addresses."""
    resolved = _change_texts({**recipe.model_dump(mode="json"), "output": f"runs/{recipe.name}"}, public_name)
    if recipe.features.store:  # keep the scheme, drop the address
        resolved["features"]["store"] = recipe.features.store.partition("://")[0] + "://"
    for name in recipe.draft:
        resolved["draft"][name] |= draft_settings(recipe, name)
    resolved["target"]["template_keywords"] = recipe.target.template_keywords  # never paths, even if they look so
    resolved["train"] |= dict.fromkeys(("shards", "gpus"))  # settings of this machine
    return resolved


@dataclass(frozen=True)
class Recorded:
    """The recipe next to an artifact. It may be a stranger's: it is only shown, and hashes prove it."""

    tree: dict[str, Any]
    is_whole: bool  # has local paths, as this user wrote it

    def differences(self, recipe: Recipe, keys: Iterable[str]) -> str:
        """Return the keys among these that differ in `recipe`, with both values; empty if none differs."""
        current = recipe.model_dump(mode="json") if self.is_whole else public_recipe(recipe)
        return describe_differences(self.tree, current, keys)

    @property
    def layers(self) -> list[int | str] | None:
        """The auxiliary layers of the recipe; None if it is not a recipe of this version."""
        try:
            return read_layers(self.tree)
        except (AttributeError, KeyError, TypeError, ValueError):
            return None


def read_recorded(folder: Path) -> Recorded | None:
    """Return the recipe next to an artifact; None if there is none that can be read."""
    if (tree := _read_own_tree(folder)) is not None:
        return Recorded(tree, is_whole=True)
    path = folder / RECIPE
    return parse_recorded(path.read_bytes()) if path.is_file() else None


def parse_recorded(content: bytes) -> Recorded | None:
    """Return the recipe of a recipe.json; None if it cannot be read."""
    try:
        return Recorded(parse_sealed(content, RECIPE, ""), is_whole=False)
    except PipelineError:
        return None


def describe_settings(recorded_recipe: Recorded | None, recipe: Recipe, keys: Iterable[str]) -> str:
    """Return, for a message, the keys of an artifact's recipe that differ from this recipe's, with both values."""
    if recorded_recipe is None:
        return f"which keys differ is not known: no readable {RECIPE} is next to it"
    if differing := recorded_recipe.differences(recipe, keys):
        return differing
    folder = "" if recorded_recipe.is_whole else f", or lies in another folder, which {RECIPE} does not keep"
    return f"no key differs: a file that one names has other content{folder}"


def _change_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return the value with `change` applied to every string in it."""
    if isinstance(value, dict):
        return {key: _change_texts(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_change_texts(item, change) for item in value]
    return change(value) if isinstance(value, str) else value
