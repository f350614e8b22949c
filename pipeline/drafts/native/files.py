"""Reading an MTP head out of its target's files."""

from collections.abc import Mapping
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from pipeline.basics.errors import PipelineError
from pipeline.decoding.contract import Source
from pipeline.drafts.native.families import HeadForm, from_file_names, to_file_names
from pipeline.drafts.native.mtp import Mtp
from pipeline.lm.config import TargetConfig
from pipeline.lm.model import locate_target, weight_files

QUANTISED = ("_scale", "_scale_inv", "_packed", "_zeros", "_absmax")  # ends of names in quantised files


def read_head(draft: Source, config: TargetConfig) -> None:
    """Read a draft's weights out of the target's files, if it is the target's MTP head. Raise PipelineError where they
    are incomplete, quantised, or those of several layers.
    """
    if not isinstance(draft, Mtp):
        return
    files, form, layers = weight_files(locate_target(config)), draft.form, draft.shapes["target_layers"]
    here, second = form.names_in_files(layers), form.names_in_files(layers, 1)
    expected = to_file_names(draft.decoder, here, draft.state_dict())
    target = f"target {config.model!r}"
    if not expected.keys() & files.keys():
        raise PipelineError(
            f"{target} comes without an MTP head: its files hold no {min(expected)}. Train another kind of draft"
        )
    if scales := [name for name in files if name.startswith(here.layer) and name.endswith(QUANTISED)]:
        raise PipelineError(f"{target}: its MTP head is quantised ({scales[0]}). Name a target in bfloat16")
    if missing := sorted(expected.keys() - files.keys()):
        raise PipelineError(
            f"{target}: its MTP head is incomplete: the files lack {missing[0]} and {len(missing) - 1} others of "
            f"{len(expected)} tensors. Download it again"
        )
    if second.layer != here.layer and any(name.startswith(second.layer) for name in files):
        raise PipelineError(f"{target} has several MTP layers ({second.layer}*); heads of one are known")
    _require_copies(files, here, target)
    tensors: dict[str, Tensor] = {}
    for path in {files[name] for name in expected}:
        with safe_open(path, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in expected if files[name] == path}
    draft.load_state_dict(from_file_names(draft.shapes["layer"], here, tensors), strict=draft.token_ids_U is None)
    draft.has_weights = True


def _require_copies(files: Mapping[str, Any], form: HeadForm, target: str) -> None:
    """Raise PipelineError where the head's copy of the target's embedding or head has other values: the draft uses the
    target's.
    """
    for name, original in form.copies.items():
        if name in files and original in files:
            with safe_open(files[name], "pt") as first, safe_open(files[original], "pt") as second:
                if not torch.equal(first.get_tensor(name), second.get_tensor(original)):
                    raise PipelineError(
                        f"{target}: {name} differs from {original}, but a draft uses the target's: heads with an "
                        "embedding or an output layer of their own are not known"
                    )
