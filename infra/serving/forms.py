"""A release in the form that an engine loads: target and draft, exported or converted once, in the cache folder.

A file's name in the cache follows from the content that it is made from: a changed release, target or converter makes
another file, and so does changed code of `pipeline/` for a draft. Files are complete or absent.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from pipeline.artifacts import checkpoint
from pipeline.basics.embedded import cache_dir
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import ROOT, lock_file
from pipeline.basics.fingerprint import cached_sha256
from pipeline.basics.public import public_name
from pipeline.lm.config import TargetConfig
from pipeline.lm.model import TargetIdentity, identify_if_local, local_folder, locate_target
from pipeline.recipe.recipe import Recipe
from pipeline.serving.export import GGUF, convert, export, find_converter
from pipeline.serving.load import target_of


def resolve_target(release: Path, target: str | None, recipe: Recipe | None) -> TargetConfig:
    """Return the target: `target`, or the recipe's, or the release's. Raise PipelineError where it is not known, or
    has an adapter that is not merged.
    """
    config = target_of(release, target or (recipe.target.model if recipe else None))
    if config.adapter and target is None:
        raise PipelineError(
            f"the target has the adapter {public_name(config.adapter)}, which engines take only merged: jakiro merge "
            "RECIPE FOLDER writes it; then add --target FOLDER"
        )
    return config.model_copy(update={"adapter": None})


def hash_code() -> str:
    """Return a hash of the code of `pipeline/`, which reads releases and writes drafts."""
    paths = sorted((ROOT / "pipeline").rglob("*.py"))
    return sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


@dataclass(frozen=True)
class Form:
    """A release's form for an engine, "vllm" or GGUF."""

    release: Path
    engine: str
    config: TargetConfig
    llama_cpp: Path | None = None  # the checkout with the converter, for GGUF
    gguf: Path | None = None  # the user's own file of the target
    prompt_lookup: bool = False

    @cached_property
    def folder(self) -> Path | None:
        """The target's folder; None for a target of the Hub."""
        return local_folder(locate_target(self.config).name)

    @cached_property
    def identity(self) -> TargetIdentity | None:
        """The content of the target's folder; None for a target of the Hub."""
        return identify_if_local(self.config) if self.folder else None

    @cached_property
    def draft(self) -> Path:
        """The folder with the exported draft; for an MTP head the target that holds it."""
        files = [self.release / name for name in (checkpoint.CONFIG, checkpoint.WEIGHTS)]
        contents = [cached_sha256(path) for path in files if path.is_file()]
        return self._path([hash_code(), self.engine, self.prompt_lookup, *contents])

    @cached_property
    def target(self) -> str:
        """The target as the engine loads it: a folder, a file or a Hub id."""
        if self.engine == GGUF:
            return str(self.gguf or self._path([]).with_suffix(".gguf"))
        return str(self.folder or self.config.model)

    @property
    def name(self) -> str:
        """The target's name for clients, without the folders of this machine."""
        folder = Path(self.config.model).expanduser()
        return public_name(str(folder.absolute())) if folder.is_dir() else self.config.model

    def _path(self, content: list[Any]) -> Path:
        converter = cached_sha256(find_converter(self.llama_cpp)) if self.llama_cpp else None
        target = [self.config.model, self.config.revision, self.identity and asdict(self.identity)]
        key = json.dumps([converter, target, content])
        return cache_dir().absolute() / "served" / sha256(key.encode()).hexdigest()[:32]

    def write(self) -> Iterator[str]:
        """Write the files that are missing; yield lines for the user. Raise PipelineError."""
        with lock_file(self.draft):
            is_complete = self.draft.is_dir() and all(path.exists() for path in self.draft.iterdir())  # links break
            if not is_complete:
                shutil.rmtree(self.draft, ignore_errors=True)
                export(self.release, self.engine, self.draft, self.config.model, self.llama_cpp, self.prompt_lookup)
        yield f"draft: {self.draft}, exported {'earlier' if is_complete else 'now'}"
        if self.llama_cpp is None or self.gguf is not None:
            return
        file = Path(self.target)
        with lock_file(file):
            is_complete = file.exists()
            if not is_complete:
                assert self.folder is not None, "the draft's export requires it, too"
                convert(self.llama_cpp, self.folder, file)
        yield f"target: {file}, converted {'earlier' if is_complete else 'now'}"
