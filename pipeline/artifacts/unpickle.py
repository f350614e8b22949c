"""Pickled weights -> safetensors, in a process of its own: python -m pipeline.artifacts.unpickle IN OUT.

torch reads nothing but tensors (`weights_only`); the process ends with the file, whatever it held. The one place of the
project where a pickle is read.
"""

import sys

import torch
from safetensors.torch import save_file

if __name__ == "__main__":
    found = torch.load(sys.argv[1], map_location="cpu", weights_only=True)
    if isinstance(found, dict) and isinstance(found.get("state_dict"), dict):  # a trainer's checkpoint
        found = found["state_dict"]
    if not isinstance(found, dict):
        sys.exit(f"it holds a value of type {type(found).__name__}, expected tensors by name")
    if odd := [name for name, value in found.items() if not isinstance(value, torch.Tensor)]:
        sys.exit(f"{odd[0]!r} holds a value of type {type(found[odd[0]]).__name__}, expected tensors by name")
    save_file({name: tensor.contiguous().clone() for name, tensor in found.items()}, sys.argv[2])
