"""The states that the engine keeps, in the form that a shard stores, made on the device where they are.

Float8 bytes and their scales cross to the host, not states in the target's dtype. The arithmetic is that of a dump by
transformers, whose states have the same bits where the engine's do.
"""

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

FLOAT8 = torch.float8_e4m3fn
ROUNDED = torch.bfloat16  # the dtype that states are rounded to before float8
TINY = torch.finfo(torch.float32).tiny  # the smallest scale
CPU_BLOCK = 1 << 19  # numbers that are converted at a time, so that they stay in the processor's cache
DEVICE_BLOCK = 1 << 24  # the same on an accelerator, so that they take little of its memory


@dataclass(frozen=True)
class Conversion:
    """The conversion of one target's states, by its own final norm."""

    norm: nn.Module
    places: list[int]  # the indices of the auxiliary layers among the states that the engine keeps

    @classmethod
    def load(cls, settings: dict[str, Any], device: torch.device) -> "Conversion":
        """Build the norm from the target's configuration and the file of its weights; `settings` are the first
        message's "capture" (engine.py).
        """
        code = {"trust_remote_code": settings["trust_remote_code"]}
        config = transformers.AutoConfig.from_pretrained(settings["model"], revision=settings["revision"], **code)
        with torch.device("meta"):
            model = getattr(transformers, settings["class"]).from_config(config, **code)
        norm = model.get_submodule(settings["norm"])
        norm.load_state_dict(load_file(settings["weights"]), assign=True)
        return cls(norm.requires_grad_(False).to(device), settings["places"])

    @torch.inference_mode()
    def convert(self, raw_TSD: Tensor, rows: int, float8: bool) -> dict[str, Tensor]:
        """Return the tensors of a request's file on the states' device, for `rows` tokens: those after T are 0.

        `raw_TSD` has the layers in ascending order, the last one at the end. Plain: "states" [rows, S, D], the last
        state, normed, then the auxiliary layers. Float8: the columns of a shard, "hidden" [rows, D] and "scale" [rows],
        with auxiliary layers "auxiliary" [rows, K, D] and "auxiliary_scale" [rows, K], too.
        """
        count, layers, width = raw_TSD.shape
        shapes = {"hidden": (rows, width), "auxiliary": (rows, len(self.places), width)}
        states = {"states": raw_TSD.new_zeros(rows, 1 + len(self.places), width)} if not float8 else {}
        if float8:
            for name in ("hidden", "auxiliary") if self.places else ("hidden",):
                # Zeros have the same bits in float8, and many devices cannot fill it.
                states[name] = raw_TSD.new_zeros(shapes[name], dtype=torch.uint8).view(FLOAT8)
                states[_scale_of(name)] = raw_TSD.new_full(shapes[name][:-1], TINY, dtype=torch.float32)
        numbers = CPU_BLOCK if raw_TSD.device.type == "cpu" else DEVICE_BLOCK
        size = max(numbers // (layers * width), 1)
        for first in range(0, count, size):
            block_TSD, end = raw_TSD[first : first + size], min(first + size, count)
            parts = {"hidden": self.norm(block_TSD[:, -1])}
            if self.places:
                parts["auxiliary"] = torch.stack([block_TSD[:, place] for place in self.places], dim=1)
            for name, part in parts.items():
                if float8:
                    states[name][first:end], states[_scale_of(name)][first:end] = quantise(part.to(ROUNDED))
                elif name == "hidden":
                    states["states"][first:end, 0] = part
                else:
                    states["states"][first:end, 1:] = part
        return states


def _scale_of(name: str) -> str:
    return "scale" if name == "hidden" else f"{name}_scale"


def quantise(states: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``(float8 [T, ..., D], scale float32 [T, ...])``, with the bits of a shard (pipeline/features/schema.py,
    which this environment does not have).
    """
    exact = states.float()
    scale = (exact.abs().amax(-1) / torch.finfo(FLOAT8).max).clamp(min=TINY)
    return (exact / scale[..., None]).to(FLOAT8), scale


def to_host(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], torch.Event | None]:
    """Copy tensors of one device to the host. They are complete after the event; None: they are complete now."""
    device = next(iter(tensors.values())).device
    if device.type == "cpu":
        return tensors, None
    on_host = {name: tensor.to("cpu", non_blocking=True) for name, tensor in tensors.items()}  # to pinned memory
    event = torch.Event(device, blocking=True)  # a waiting thread sleeps
    event.record(torch.accelerator.current_stream(device))
    return on_host, event
