"""The draft-checkpoint contract: model.safetensors, config.json, provenance.json, recipe.json. No pickle.

The embedding is the target's, and so is the head unless the draft has its own; the fingerprint identifies the target.
Guarantees: weights are complete (written under a temporary name); config.json is written last and has their SHA-256; a
checkpoint for another target is refused.
"""

import json
import math
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from pipeline.artifacts.provenance import PROVENANCE, describe_settings, read_recorded, write_provenance
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import atomic_path, read_sealed, sha256, write_sealed
from pipeline.basics.parse import parse_settings
from pipeline.basics.public import public_name
from pipeline.decoding.config import LoadedMethod, Method, TreeConfig
from pipeline.drafts import DraftConfig, TrainedDraft, build, load_settings, make
from pipeline.features.schema import FeatureSpec
from pipeline.lm.model import identify
from pipeline.recipe.identity import train_hash, training_keys
from pipeline.recipe.recipe import Recipe
from pipeline.recipe.untrusted import DraftConfigFile, require_draft_in_bounds, require_method_in_bounds

VERSION = 7
WEIGHTS, CONFIG, METRICS, PLOT = "model.safetensors", "config.json", "metrics.jsonl", "training.png"
TEMPLATE, CODE = "chat_template.jinja", "custom_generate"  # files of a release whose hashes are in its config.json
# Pairs of settings whose product is a number of modules.
MODULES = (("layers", "experts"), ("heads", "blocks"), ("mlps", "blocks"))
SLACK = 1 << 24  # numbers that a draft may have in addition to its file's
# Errors raised for settings and shapes that fit no module.
UNBUILDABLE = (RuntimeError, KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError, StrictDataclassError)
UNREADABLE = "Restore the draft's folder, or remove this file and train again: jakiro train RECIPE"
FACTS = ("shapes", "target", "train_hash", "weights_sha256", "metrics_sha256", "training", "files")


@dataclass(frozen=True)
class CheckpointConfig:
    """The content of a checkpoint's config.json."""

    config: DraftConfig
    method: Method  # the default method for decoding
    secondary: dict[str, DraftConfig]  # settings of the method's secondary sources
    shapes: dict[str, Any]
    target: dict[str, Any]  # model, revision; fingerprints of its weights, tokenizer and template
    train_hash: str
    weights_sha256: str
    metrics_sha256: str | None
    training: dict[str, Any]  # facts of the training: steps, tokens, ...; or the source of an imported draft
    files: dict[str, str] = field(default_factory=dict)  # SHA-256 of the other files read from a release, by name

    def to_json(self) -> dict[str, Any]:
        return {
            "format_version": VERSION,
            "draft": self.config.to_json(),
            "method": self.method.to_json(),
            "secondary": {name: config.to_json() for name, config in self.secondary.items()},
            **{key: getattr(self, key) for key in FACTS},
        }

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> "CheckpointConfig":
        """Return the known fields of `raw`, each checked for its type and bounds. Raises KeyError, TypeError or
        ValueError for content that `to_json` does not write.
        """
        config, method = load_settings(raw["draft"]), parse_settings(Method, raw["method"])
        secondary = {name: load_settings(raw["secondary"][name]) for name in method.secondary}
        require_draft_in_bounds(config, "trained")
        for source in secondary.values():
            require_draft_in_bounds(source, "secondary")
        require_method_in_bounds(method)
        method = method.resolve(config, method.draft, TreeConfig())
        facts = DraftConfigFile.model_validate_json(json.dumps(raw)).model_dump(exclude_unset=True)
        if not isinstance(raw["training"], dict):
            raise TypeError("training is no object")
        return cls(config, method, secondary, training=raw["training"], **facts)

    def load_method(self, draft: TrainedDraft) -> LoadedMethod:
        """Return the default method with its sources: the draft, and the method's secondary sources."""
        sources = {name: make(config, self.shapes) for name, config in self.secondary.items()}
        return self.method.load({self.method.draft: draft, **sources})

    @property
    def tree(self) -> TreeConfig:
        return self.method.resolved_tree

    @property
    def borrowed(self) -> list[str]:
        """The target's modules that the draft uses."""
        with torch.device("meta"):
            return build(self.config, self.shapes).borrowed

    @property
    def training_summary(self) -> str:
        """A phrase that describes the draft's training."""
        if "imported" in self.training:
            return f"imported from {self.training['imported']['from']}"
        begun = f", begun with {self.training['start']['from']}" if "start" in self.training else ""
        tau = self.training.get("validation", {}).get("estimated_tau")
        estimated = f", tau {tau:.2f} as training estimates it" if tau else ""
        return f"{self.training['trained_tokens']:,} trained tokens{estimated}{begun}"


def save(
    folder: Path,
    draft: TrainedDraft,
    weights: dict[str, torch.Tensor],
    recipe: Recipe,
    name: str,
    training: dict,
    spec: FeatureSpec | None = None,
) -> None:
    """Write a draft. `weights` is its full (gathered) state dict; `training` has measured facts for the card. `spec`:
    of the features that it was trained on; the draft belongs to their target, even if the target has changed since.
    """
    target = spec or identify(recipe.target)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).unlink(missing_ok=True)  # without this file the checkpoint counts as missing
    write_weights(folder / WEIGHTS, weights)
    saved = CheckpointConfig(
        config=draft.config,
        method=recipe.resolve_method(name),
        secondary={},
        shapes=draft.shapes,
        target={
            "model": public_name(recipe.target.model),
            "revision": recipe.target.revision,
            "fingerprint": draft.embed_head.fingerprint,
            "tokenizer": target.tokenizer,
            "template": target.template,
        },
        train_hash=train_hash(recipe, name),
        weights_sha256=sha256(folder / WEIGHTS),
        metrics_sha256=sha256(folder / METRICS) if (folder / METRICS).exists() else None,
        training=training,
    )
    begun = {"start": training["start"]} if "start" in training else {}
    write_provenance(folder, recipe, draft=name, **begun)
    write_sealed(folder / CONFIG, saved.to_json())


def write_weights(path: Path, weights: dict[str, torch.Tensor]) -> None:
    """Write the complete file atomically. Raises PipelineError if that fails."""
    contiguous = {key: value.detach().cpu().contiguous() for key, value in weights.items()}
    with atomic_path(path) as temporary:
        try:
            save_file(contiguous, temporary, metadata={"format": "pt"})
        except SafetensorError as error:  # also raised for errors of the operating system
            raise PipelineError(f"{path} cannot be written: {error}. Make room and run again") from None


def export(source: Path, folder: Path, method: Method, secondary: dict[str, DraftConfig], recipe_file: Path) -> None:
    """Copy a saved draft into `folder`, with its default method, the settings of the method's secondary sources, and
    the recipe that it was measured with.
    """
    shutil.copyfile(source / WEIGHTS, folder / WEIGHTS)
    for file in (source / PROVENANCE, recipe_file):
        write_sealed(
            folder / file.name, read_sealed(file, "Restore it, or remove the artifact next to it and make that again")
        )
    raw = read_sealed(source / CONFIG, UNREADABLE)
    raw["method"], raw["secondary"] = method.to_json(), {name: config.to_json() for name, config in secondary.items()}
    write_sealed(folder / CONFIG, raw)


def seal_files(folder: Path) -> None:
    """Write into a release's config.json the SHA-256 of the other files that are read from the release."""
    raw = read_sealed(folder / CONFIG, UNREADABLE)
    paths = [folder / TEMPLATE, *sorted((folder / CODE).glob("*"))]
    raw["files"] = {path.relative_to(folder).as_posix(): sha256(path) for path in paths if path.is_file()}
    write_sealed(folder / CONFIG, raw)


def sealed_file(folder: Path, name: str) -> Path | None:
    """Return the path of a file of a release; None if its config.json does not list the file. Raises PipelineError if
    the file is missing, or its SHA-256 differs.
    """
    path, digest = folder / name, read_config(folder).files.get(name)
    if digest is None and not path.exists():
        return None
    if digest is None or not path.is_file() or sha256(path) != digest:
        state = "missing" if not path.exists() else f"not the file that {CONFIG} names: its SHA-256 is another"
        raise PipelineError(f"{path} is {state}. Download the release again")
    return path


def read_config(folder: Path) -> CheckpointConfig:
    """Return the content of config.json. Raises PipelineError if `folder` has no checkpoint of this project."""
    path = folder / CONFIG
    if not path.exists():
        raise PipelineError(f"{folder} holds no draft checkpoint ({CONFIG} is missing). Train it: jakiro train RECIPE")
    raw = read_sealed(path, UNREADABLE)
    if (version := raw.get("format_version")) != VERSION:
        raise PipelineError(
            f"{path}: format_version is {version!r}, expected {VERSION}: it is no draft checkpoint of this project, or "
            "of another version of it. Train it, or release it, again"
        )
    try:
        return CheckpointConfig.from_json(raw)
    except (KeyError, TypeError, ValueError) as error:
        raise PipelineError(f"{path} is damaged or of another version: {error}") from None


def require_trained_under(recipe: Recipe, name: str) -> CheckpointConfig:
    """Return the config of the recipe's draft `name`. Raises PipelineError if it is missing, was trained with other
    settings, or for the target before it changed.
    """
    folder, saved = recipe.paths.draft(name), require_settings(recipe, name)
    if differences := identify(recipe.target).differences(saved.target):
        raise PipelineError(
            f"{folder} holds a draft of another target than {public_name(recipe.target.model)} is now: "
            f"{'; '.join(differences)}. Restore the target's files, or train in another output folder"
        )
    return saved


def require_settings(recipe: Recipe, name: str) -> CheckpointConfig:
    """Return the config of a draft's checkpoint. Raises PipelineError if it is missing, or has other settings."""
    folder = recipe.paths.draft(name)
    saved = read_config(folder)
    if saved.train_hash != train_hash(recipe, name):
        raise PipelineError(
            f"{folder} holds a draft trained with other settings: "
            f"{describe_settings(read_recorded(folder), recipe, training_keys(recipe, name))}. Take these back, give "
            "this run another output folder, or remove that one"
        )
    return saved


def is_plot_missing(folder: Path) -> bool:
    """Return whether a training was killed after its checkpoint and before its plot."""
    return (folder / METRICS).exists() and not (folder / PLOT).exists()


def checked_metrics(folder: Path) -> Path:
    """Return the path of the metrics of a draft's training. Raises PipelineError if the file was changed since."""
    path = folder / METRICS
    if path.exists() and sha256(path) != read_config(folder).metrics_sha256:
        raise PipelineError(
            f"{path} was changed or damaged after the training: its SHA-256 is not the one in {CONFIG}. Restore it, "
            "or remove it: the curves are then drawn without this draft"
        )
    return path


def load(folder: Path, target_fingerprint: str) -> TrainedDraft:
    """Load a draft with its weights, on the CPU in their stored dtype; `bind` it before use.

    Raises PipelineError for a missing or damaged checkpoint, and for one of another target.
    """
    saved = read_config(folder)
    if saved.target["fingerprint"] != target_fingerprint:
        raise PipelineError(
            f"{folder}: trained for target {saved.target['model']!r} (fingerprint {saved.target['fingerprint']}), but "
            f"the target at hand has fingerprint {target_fingerprint}. A draft works with its own target only: use "
            "that one, or train again"
        )
    return load_for_any_target(folder, saved)


def require_sizes(config: DraftConfig, shapes: dict[str, Any], sizes: dict[str, list[int]]) -> None:
    """Raise ValueError if settings and shapes describe a module far larger than a file with tensors of these `sizes`,
    by name: building it would take time and memory first.
    """

    def setting(name: str) -> int:
        return getattr(config, name, None) or 1

    modules = max(setting(first) * setting(second) for first, second in MODULES)
    if modules > len(sizes):
        raise ValueError(f"the settings make {modules} modules, the file holds {len(sizes)} tensors")
    with torch.device("meta"):
        numbers = sum(tensor.numel() for tensor in build(config, shapes).state_dict().values())
    if numbers > 2 * sum(map(math.prod, sizes.values())) + SLACK:
        raise ValueError(f"settings and shapes make {numbers} numbers, far more than the file holds")


def load_for_any_target(folder: Path, saved: CheckpointConfig) -> TrainedDraft:
    """Load a draft as `load` does, without comparing the target. `saved`: the content of its config.json."""
    path = folder / WEIGHTS
    if not path.exists() or sha256(path) != saved.weights_sha256:
        state = "missing" if not path.exists() else "not the file that config.json describes (SHA-256 differs)"
        raise PipelineError(f"{path} is {state}. Restore it or train again")
    try:
        with safe_open(path, "pt") as tensors:
            sizes = {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
        require_sizes(saved.config, saved.shapes, sizes)
        draft = build(saved.config, saved.shapes)
        weights = load_file(path)
        draft.load_state_dict(weights)
        if draft.token_ids_U is not None and (draft.token_ids_U.diff() <= 0).any():
            raise ValueError("its draft_token_ids do not ascend")
    except (SafetensorError, *UNBUILDABLE) as error:
        raise PipelineError(f"{path} does not fit its {CONFIG}: {error}") from None
    draft.name = folder.name
    stored = next(tensor.dtype for tensor in weights.values() if tensor.is_floating_point())
    return draft.to(stored).eval().requires_grad_(False)
