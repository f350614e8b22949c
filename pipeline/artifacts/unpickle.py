"""Pickled weights -> safetensors, in a process of its own: python -m pipeline.artifacts.unpickle IN OUT.

torch reads nothing but tensors (`weights_only`); the process ends with the file, whatever it held. The one place of the
project where a pickle is read.
"""

import sys

import torch
from safetensors.torch import save_file

if __name__ == "__main__":
    found = torch.load(sys.argv[1], map_location="cpu", weights_only=True)
    save_file({name: tensor.contiguous().clone() for name, tensor in found.items()}, sys.argv[2])
