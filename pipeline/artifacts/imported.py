"""Drafts that others trained become ours: EAGLE-1/2 and Jakiro as their authors released them, EAGLE-3 as its authors,
SpecForge or speculators write it.

Guarantees: every tensor is kept, renamed or dropped by name, and the list says so; what has no place in the recipe's
draft is an error that names it, and nothing is written. Shapes, the norms' eps and RoPE are the checkpoint's own.
Pickled weights are read with `weights_only` in a process of its own.
"""

import subprocess
import sys
import tempfile
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
from pipeline.drafts import build
from pipeline.drafts.layers import shapes_of
from pipeline.recipe.recipe import Recipe
from pipeline.target.model import load_config, load_ends

WEIGHTS = ("model.safetensors", "pytorch_model.bin", "model.ckpt")
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


def import_draft(source: Path, recipe: Recipe, name: str) -> list[str]:
    """Writes the recipe's draft `name` from the checkpoint in `source`; says what became of its tensors.

    Raises PipelineError where it does not fit the recipe's target or draft, or one is there already.
    """
    folder, config = recipe.draft_dir(name), recipe.draft[name]
    if (folder / checkpoint.CONFIG).exists():
        raise PipelineError(f"{folder} holds a draft already. Remove it, or give the recipe another output folder")
    theirs = _their_config(source)
    ends = load_ends(recipe.target)
    draft = build(config, _shapes(theirs, recipe))
    draft.name = name
    wanted = draft.state_dict()
    found = mapped(_read(source), set(wanted))
    if IDS in found.weights and IDS not in wanted:
        size = len(found.weights[IDS])
        raise PipelineError(f"{source} has a draft vocabulary of {size} tokens: set draft.{name}.vocabulary={size}")
    _require_fit(source, name, found.weights, wanted)
    dtype = next(x.dtype for x in found.weights.values() if x.is_floating_point())
    draft.to(dtype).load_state_dict(found.weights)
    draft.bind(ends)
    facts = {"parameters": sum(x.numel() for x in draft.parameters()), "imported": _facts(source, found)}
    with exclusive(folder, "import"):
        checkpoint.save(folder, draft, draft.state_dict(), recipe, name, facts)
    return found.said()


def mapped(theirs: dict[str, Tensor], wanted: set[str]) -> Imported:
    """Their tensors under our names; `wanted` are ours."""
    found, offsets = Imported(), None
    for name, tensor in theirs.items():
        ours = name.removeprefix("model.")
        if "midlayer.hidden_norm.weight" in wanted:
            ours = ours.replace("layers.0.", "midlayer.", 1) if ours.startswith("layers.0.") else ours
        if ours == "d2t":
            offsets = tensor
            found.renamed[name] = f"{IDS}: offsets become ids"
        elif ours == "t2d":
            found.dropped[name] = "follows from d2t"
        elif ours == "embed_tokens.weight":
            found.dropped[name] = "the target's embedding is used"
        elif ours.endswith("rotary_emb.inv_freq"):
            found.dropped[name] = "follows from rope_theta"
        else:
            found.weights[ours] = tensor
            if ours == name:
                found.kept += 1
            else:
                found.renamed[name] = ours
    if offsets is not None:
        found.weights[IDS] = torch.arange(len(offsets)) + offsets.long()
    if "lm_head.weight" in found.weights and "lm_head.weight" not in wanted:
        del found.weights["lm_head.weight"]
        found.dropped["lm_head.weight"] = "the target's head is used"
    return found


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


def _their_config(source: Path) -> dict[str, Any]:
    path = source / "config.json"
    if not path.is_file():
        raise PipelineError(
            f"{source} holds no config.json: expected a folder with config.json and {' or '.join(WEIGHTS)}"
        )
    raw = read_json(path)
    return raw.get("transformer_layer_config", raw) | {k: raw[k] for k in ("target_hidden_size",) if k in raw}


def _shapes(theirs: dict[str, Any], recipe: Recipe) -> dict[str, Any]:
    """The draft's: its own config's widths, heads, eps and RoPE; vocabulary and layers of the target."""
    target = load_config(recipe.target)
    known = {
        k: v for k, v in theirs.items() if k not in ("architectures", "auto_map", "model_type", "torch_dtype", "dtype")
    }
    config = LlamaConfig(**known)
    shapes = shapes_of(config) | {"vocab_size": target.vocab_size, "target_layers": target.num_hidden_layers}
    if shapes["hidden_size"] != target.hidden_size:
        raise PipelineError(
            f"the checkpoint's hidden_size is {shapes['hidden_size']}, that of target {recipe.target.model!r} "
            f"{target.hidden_size}: it was trained for another target"
        )
    return shapes


def _read(source: Path) -> dict[str, Tensor]:
    """Raises PipelineError where there are no weights, or they cannot be read."""
    path = next((source / name for name in WEIGHTS if (source / name).is_file()), None)
    if path is None:
        raise PipelineError(
            f"{source} holds none of {', '.join(WEIGHTS)}: sharded weights are joined with save_pretrained"
        )
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


def _facts(source: Path, found: Imported) -> dict[str, Any]:
    """For the card: where from, and the weights' own SHA-256."""
    path = next(source / name for name in WEIGHTS if (source / name).is_file())
    return {"from": source.name, "sha256": sha256(path), "dropped": sorted(found.dropped)}
