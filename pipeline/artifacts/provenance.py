"""Where an artifact comes from: recipe hash, code revision, library versions, hardware. No paths, hosts or tokens."""

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

from pipeline.basics.accelerator import accelerator
from pipeline.basics.embedded import cache_dir
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import ROOT, atomic_path, in_turn, read_json, unsealed, write_sealed
from pipeline.basics.public import public_name
from pipeline.recipe.identity import differences, draft_settings, layers_of, run_hash
from pipeline.recipe.load import recipe_from
from pipeline.recipe.recipe import Recipe

LIBRARIES = ("torch", "transformers", "deepspeed", "ray", "pyarrow", "safetensors")
# Raise it where a change of code moves a measured figure: reports made before are then measured again.
# tests/pipeline/test_golden.py fails where one moves.
MEASURE_VERSION = 1
PROVENANCE, RECIPE = "provenance.json", "recipe.json"  # beside every artifact
OWN_RECIPE = "own-recipe.json"  # beside features: with local paths


def revision() -> str:
    """The checkout's commit, with "+changes" when tracked files differ from it; in a wheel, the one it was built of;
    "unknown" outside git.
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


def measured_by() -> str:
    """Return the versions of the measurement and of the libraries that decode: a report of others is measured again."""
    versions = [f"{library} {importlib.metadata.version(library)}" for library in ("torch", "transformers")]
    return ", ".join([f"measurement {MEASURE_VERSION}", *versions])


def hardware(device: str) -> str:
    """One line: for device "cpu" the processor and the cores this process may use, else the accelerator it sees."""
    if device != "cpu" and (here := accelerator()):
        count = torch.accelerator.device_count()
        name = torch.get_device_module(here).get_device_name(here)
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
    """Writes provenance.json and the resolved recipe.json, local paths cut off, into `folder`."""
    write_sealed(folder / PROVENANCE, provenance(recipe, **facts))
    write_sealed(folder / RECIPE, public_recipe(recipe))


def write_own_recipe(folder: Path, recipe: Recipe) -> None:
    """Writes the resolved recipe for commands of this user on this machine, with local paths. It is never published,
    nor sent to a store, and no other user reads it.
    """
    tree = recipe.model_dump(mode="json")
    if (key := _machine_key()) is None:
        return
    content = {"recipe": tree, "mac": _mac(key, folder, tree)}
    with atomic_path(folder / OWN_RECIPE, private=True) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n")


def own_recipe(folder: Path, overrides: list[str]) -> Recipe | None:
    """The recipe that this user wrote into this folder on this machine. None for any other: a recipe may name code, so
    nobody else's data supplies one.
    """
    tree = _own_tree(folder)
    return None if tree is None else recipe_from(tree, folder / OWN_RECIPE, overrides)


def _own_tree(folder: Path) -> dict[str, Any] | None:
    if not (folder / OWN_RECIPE).is_file() or (key := _machine_key()) is None:
        return None
    content = read_json(folder / OWN_RECIPE)
    tree, mac = content.get("recipe"), content.get("mac")
    if not isinstance(tree, dict) or not isinstance(mac, str) or not mac.isascii():
        return None
    return tree if hmac.compare_digest(mac, _mac(key, folder, tree)) else None


def _mac(key: bytes, folder: Path, tree: Any) -> str:
    """The keyed digest of a recipe for a folder."""
    message = json.dumps([str(folder.resolve()), tree], sort_keys=True)
    return hmac.new(key, message.encode(), "sha256").hexdigest()


def _machine_key() -> bytes | None:
    """32 random bytes in the cache folder, which no other user reads; made when they are first asked for. None where
    the folder cannot keep such a secret: it may not be written to, or others can read what is in it.
    """
    path = cache_dir() / "machine-key"
    try:
        with in_turn(path):
            if not path.exists():
                with atomic_path(path, private=True) as temporary:
                    temporary.write_bytes(secrets.token_bytes(32))
        state = path.lstat()
        is_private = stat.S_ISREG(state.st_mode) and state.st_uid == os.geteuid() and not state.st_mode & 0o077
        return path.read_bytes() if is_private else None
    except OSError:
        return None


def public_recipe(recipe: Recipe) -> dict[str, Any]:
    """The resolved recipe without local paths, users and queries of addresses."""
    resolved = _changed({**recipe.model_dump(mode="json"), "output": f"runs/{recipe.name}"}, public_name)
    if recipe.features.store:  # that there is one, not where
        resolved["features"]["store"] = recipe.features.store.partition("://")[0] + "://"
    for name in recipe.draft:
        resolved["draft"][name] |= draft_settings(recipe, name)
    resolved["target"]["template_keywords"] = recipe.target.template_keywords  # no paths, whatever they look like
    resolved["train"] |= dict.fromkeys(("shards", "gpus"))  # places
    return resolved


@dataclass(frozen=True)
class Recorded:
    """The recipe that lies beside an artifact. It may be a stranger's: it is shown, and proven by hashes."""

    tree: dict[str, Any]
    is_whole: bool  # with local paths, as this user wrote it

    def differences(self, recipe: Recipe, keys: Iterable[str]) -> str:
        """Return which of these keys differ here, with both values; empty where none does."""
        here = recipe.model_dump(mode="json") if self.is_whole else public_recipe(recipe)
        return differences(self.tree, here, keys)

    @property
    def layers(self) -> list[int | str] | None:
        """The auxiliary layers that it names; None where it is no recipe of this version."""
        try:
            return layers_of(self.tree)
        except (AttributeError, KeyError, TypeError, ValueError):
            return None


def recorded(folder: Path) -> Recorded | None:
    """Return the recipe beside an artifact; None where there is none that can be read."""
    if (tree := _own_tree(folder)) is not None:
        return Recorded(tree, is_whole=True)
    path = folder / RECIPE
    return recorded_in(path.read_bytes()) if path.is_file() else None


def recorded_in(content: bytes) -> Recorded | None:
    """Return the recipe of a recipe.json; None where that cannot be read."""
    try:
        return Recorded(unsealed(content, RECIPE, ""), is_whole=False)
    except PipelineError:
        return None


def settings_said(found: Recorded | None, recipe: Recipe, keys: Iterable[str]) -> str:
    """Return, for a message, which keys of an artifact's recipe differ from this one's, with both values."""
    if found is None:
        return f"which keys differ is not known: no {RECIPE} that can be read lies beside it"
    if differing := found.differences(recipe, keys):
        return differing
    folder = "" if found.is_whole else f", or lies in another folder, which {RECIPE} does not keep"
    return f"no key differs: a file that one names has other content{folder}"


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """The value with every text in it changed."""
    if isinstance(value, dict):
        return {key: _changed(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_changed(item, change) for item in value]
    return change(value) if isinstance(value, str) else value
