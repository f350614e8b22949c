"""Drafts that others trained become ours: EAGLE-1/2, Jakiro, Gumiho, Medusa and Hydra as their authors released them,
EAGLE-3 as its authors, SpecForge or speculators write it.

Guarantees: every tensor is kept, renamed or dropped by name, and the list says so; what has no place in the recipe's
draft is an error that names it, and nothing is written. Shapes, the norms' eps and RoPE are the checkpoint's own.
Pickled weights are read with `weights_only` in a process of its own.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig

from pipeline.artifacts import checkpoint
from pipeline.artifacts.provenance import ROOT
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import exclusive, read_json, sha256
from pipeline.drafts import build, parameter_count
from pipeline.drafts.parts.layers import shapes_of
from pipeline.recipe.recipe import Recipe
from pipeline.target.model import load_config, load_ends

WEIGHTS = (
    *("model.safetensors", "pytorch_model.bin", "model.ckpt"),
    *("medusa_lm_head.safetensors", "medusa_lm_head.pt", "hydra_lm_head.pt"),
)
IDS = "draft_token_ids"


@dataclass
class Imported:
    """What became of a checkpoint."""

    kept: int = 0
    renamed: dict[str, str] = field(default_factory=dict)  # their name -> ours
    dropped: dict[str, str] = field(default_factory=dict)  # their name -> why
    weights: dict[str, Tensor] = field(default_factory=dict)

    def said(self) -> list[str]:
        lines = [f"kept {self.kept} tensors by their names"]
        lines += [f"renamed {theirs} -> {ours}" for theirs, ours in self.renamed.items()]
        return lines + [f"dropped {name}: {why}" for name, why in self.dropped.items()]


def import_draft(source: Path, recipe: Recipe, name: str, published: dict[str, str] | None = None) -> list[str]:
    """Writes the recipe's draft `name` from the checkpoint in `source`; says what became of its tensors. `published`:
    the repository and revision that it is from.

    Raises PipelineError where it does not fit the recipe's target or draft, or one is there already.
    """
    if name not in recipe.trained:
        raise PipelineError(f"--draft {name}: the recipe has {', '.join(recipe.trained)} that have weights")
    folder = recipe.draft_dir(name)
    if (folder / checkpoint.CONFIG).exists():
        raise PipelineError(f"{folder} holds a draft already. Remove it, or give the recipe another output folder")
    theirs, ends = their_config(source), load_ends(recipe.target)
    draft = build(recipe.draft[name], _shapes(theirs, recipe))
    draft.name = name
    wanted = draft.state_dict()
    path = _weights_file(source)
    found = mapped(_read(path), draft.released_names, ends.embedding_VD)
    stated = draft.released_facts(theirs, found.weights)
    odd = {key: pair for key, pair in stated.items() if pair[0] != pair[1]}
    if said := [f"{key}={value!r}: set draft.{name}.{key} (it is {ours!r})" for key, (value, ours) in odd.items()]:
        raise PipelineError(f"{source} was trained with {'; '.join(said)}")
    if IDS in found.weights and IDS not in wanted:
        size = len(found.weights[IDS])
        raise PipelineError(f"{source} has a draft vocabulary of {size} tokens: set draft.{name}.vocabulary={size}")
    _require_fit(source, name, found.weights, wanted)
    dtypes = {x.dtype for x in found.weights.values() if x.is_floating_point()}
    if len(dtypes) > 1:
        raise PipelineError(f"{source} mixes {', '.join(sorted(map(str, dtypes)))}: save it in one dtype")
    draft.to(*dtypes).load_state_dict(found.weights)  # type: ignore[call-overload]
    draft.bind(ends)
    imported = _facts(path, found)
    facts: dict[str, Any] = {"parameters": parameter_count(draft), "imported": imported}
    if published is not None:
        facts |= {"published": published, "imported": imported | {"from": published["repository"]}}
    with exclusive(folder, "import"):
        checkpoint.save(folder, draft, draft.state_dict(), recipe, name, facts)
    return found.said()


def mapped(
    theirs: dict[str, Tensor], renamed: Callable[[Collection[str]], dict[str, str | None]], embedding_VD: Tensor
) -> Imported:
    """Their tensors under our names. Raises PipelineError for another embedding than the target's."""
    found, offsets = Imported(), None
    bare = {name: name.removeprefix("model.") for name in theirs}
    names = renamed(bare.values())
    for name, tensor in theirs.items():
        ours = names[bare[name]]
        if ours is None:
            found.dropped[name] = "its authors' code never reads it"
        elif ours == "d2t":
            offsets = tensor.long()
            found.renamed[name] = f"{IDS}: offsets become ids"
        elif ours == "t2d":
            found.dropped[name] = "follows from d2t"
        elif ours == "embed_tokens.weight":
            _require_embedding(name, tensor, embedding_VD)
            found.dropped[name] = "it is the target's embedding"
        elif ours.endswith("rotary_emb.inv_freq"):
            found.dropped[name] = "follows from rope_theta"
        else:
            found.weights[ours] = tensor
            if ours == name:
                found.kept += 1
            else:
                found.renamed[name] = ours
    if offsets is not None:
        ids = torch.arange(len(offsets)) + offsets
        if len(odd := ids[(ids < 0) | (ids >= len(embedding_VD))]):
            raise PipelineError(f"d2t leads to token {int(odd[0])}, but the target has {len(embedding_VD)}")
        found.weights[IDS] = ids
    return found


def _require_embedding(name: str, tensor: Tensor, embedding_VD: Tensor) -> None:
    """Up to rounding to half precision."""
    same = tensor.shape == embedding_VD.shape
    if not same or not torch.allclose(tensor.float(), embedding_VD.float(), rtol=2**-7, atol=1e-3):
        raise PipelineError(f"{name} is not the target's embedding: a draft with one of its own has no place here")


def _require_fit(source: Path, name: str, got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Raises PipelineError that names tensors without a place, missing ones and ones of other shapes."""
    unknown, missing = sorted(set(got) - set(wanted)), sorted(set(wanted) - set(got))
    both = [(key, list(got[key].shape), list(wanted[key].shape)) for key in wanted if key in got]
    said = [f"no place for {', '.join(unknown)}"] if unknown else []
    said += [f"{', '.join(missing)} missing"] if missing else []
    said += [f"{key} is {mine}, expected {ours}" for key, mine, ours in both if mine != ours]
    if said:
        raise PipelineError(
            f"{source} does not fit draft.{name}: {'; '.join(said)}. Set the draft's keys as it was trained (fc_bias, "
            "vocabulary, mlp_width, expert_width, experts, contrast, frame, fc_norm); biases of q, k, v and experts "
            "that are no SwiGLU have no place in any"
        )


def their_config(source: Path) -> dict[str, Any]:
    """Without the nesting that some have. Raises PipelineError where there is none."""
    path = source / "config.json"
    if not path.is_file():
        raise PipelineError(
            f"{source} holds no config.json: expected a folder with config.json and {' or '.join(WEIGHTS)}"
        )
    raw = read_json(path)
    inner = {**raw, **raw.get("eagle_config", {}), **raw.get("transformer_layer_config", {})}
    return {key: value for key, value in inner.items() if key not in ("eagle_config", "transformer_layer_config")}


def _shapes(theirs: dict[str, Any], recipe: Recipe) -> dict[str, Any]:
    """The draft's: its own config's widths, heads, eps and RoPE; vocabulary and layers of the target. All are the
    target's where the config has none of them, as Medusa's and Hydra's.
    """
    target = load_config(recipe.target)
    if "hidden_size" not in theirs:
        return shapes_of(target)
    known = {
        k: v for k, v in theirs.items() if k not in ("architectures", "auto_map", "model_type", "torch_dtype", "dtype")
    }
    config = LlamaConfig(**known)
    shapes = shapes_of(config) | {"vocab_size": target.vocab_size, "target_layers": target.num_hidden_layers}
    if theirs.get("target_hidden_size", shapes["hidden_size"]) == target.hidden_size != shapes["hidden_size"]:
        raise PipelineError(
            f"the checkpoint's hidden_size is {shapes['hidden_size']}, its target's {target.hidden_size}: a draft that "
            "is narrower than its target has no place here"
        )
    if shapes["hidden_size"] != target.hidden_size:
        raise PipelineError(
            f"the checkpoint's hidden_size is {shapes['hidden_size']}, that of target {recipe.target.model!r} "
            f"{target.hidden_size}: it was trained for another target"
        )
    return shapes


def _weights_file(source: Path) -> Path:
    found = [source / name for name in WEIGHTS if (source / name).is_file()]
    if not found:
        raise PipelineError(
            f"{source} holds none of {', '.join(WEIGHTS)}: sharded weights are joined with save_pretrained"
        )
    return found[0]


def _read(path: Path) -> dict[str, Tensor]:
    """Raises PipelineError where the weights cannot be read."""
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with tempfile.TemporaryDirectory() as folder:
            converted = Path(folder) / "model.safetensors"
            command = [sys.executable, "-m", "pipeline.artifacts.unpickle", str(path), str(converted)]
            done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
            if done.returncode:
                reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
                raise PipelineError(f"{path} cannot be read as weights alone: {reason}")
            return load_file(converted)
    except SafetensorError as error:
        raise PipelineError(f"{path} cannot be read: {error}") from None


def _facts(path: Path, found: Imported) -> dict[str, Any]:
    """For the card: where from, and the weights' own SHA-256."""
    return {"from": path.parent.name, "sha256": sha256(path), "dropped": sorted(found.dropped)}
