"""Targets that come with an MTP head, tiny and random."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from pipeline.drafts import build
from pipeline.drafts.native.families import HEADS, to_file_names
from pipeline.drafts.native.mtp import Mtp, MtpConfig
from pipeline.drafts.parts.layers import draft_shapes
from pipeline.lm.config import TargetConfig
from pipeline.lm.model import load_config
from tests.pipeline.families import save

WEIGHTS = "model.safetensors"


def save_with_head(folder: Path, family: str, seed: int = 5, **more) -> tuple[TargetConfig, Mtp]:
    """A target whose files also hold a head, and that head."""
    config = save(folder, {"mimo": "qwen2"}.get(family, family), **more)
    if family == "mimo":
        change_json(folder / "config.json", architectures=["MiMoForCausalLM"], num_nextn_predict_layers=1)
    shapes = draft_shapes(load_config(config))
    draft = build(MtpConfig(before_norm=HEADS[shapes["layer"]["family"]].before_norm), shapes)
    assert isinstance(draft, Mtp)
    generator = torch.Generator().manual_seed(seed)
    for parameter in draft.parameters():
        random = torch.randn(parameter.shape, generator=generator)
        parameter.data = 0.3 * random if parameter.ndim > 1 else parameter.data + 0.2 * random
    form = HEADS[shapes["layer"]["family"]].names_in_files(shapes["target_layers"])
    add_tensors(folder, to_file_names(draft.decoder, form, draft.state_dict()))
    return config, draft.eval().requires_grad_(False)


def change_json(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def add_tensors(folder: Path, tensors: dict[str, torch.Tensor], without: tuple[str, ...] = ()) -> None:
    """Write tensors into a target's file, and take those out whose names begin with one of `without`."""
    held = {
        name: tensor
        for name, tensor in load_file(folder / WEIGHTS).items()
        if not without or not name.startswith(without)
    }
    added = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    save_file(held | added, folder / WEIGHTS, metadata={"format": "pt"})
