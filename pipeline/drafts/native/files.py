"""Reading an MTP head out of its target's files."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from pipeline.basics.errors import PipelineError
from pipeline.decoding.contract import Source
from pipeline.drafts.native.families import EMBEDDING, HEAD, HeadForm, from_file_names, to_file_names
from pipeline.drafts.native.mtp import Mtp
from pipeline.drafts.parts.names import DRAFT_TOKEN_IDS
from pipeline.lm.config import TargetConfig
from pipeline.lm.model import locate_target, weight_files

FLOATS = ("F32", "BF16", "F16")  # of tensors that are not quantised
FREQUENCIES = "inv_freq"  # the end of the names of RoPE's frequencies, which some files hold


def read_head(draft: Source, config: TargetConfig) -> None:
    """Read a draft's weights out of the target's files, if it is the target's MTP head. Raise PipelineError where they
    are incomplete, quantised, of other shapes, or those of several layers.
    """
    if not isinstance(draft, Mtp):
        return
    files, target = weight_files(locate_target(config)), f"target {config.model!r}"
    form, next_form = (draft.form.names_in_files(draft.shapes["target_layers"], number) for number in range(2))
    with torch.device("meta"):
        empty = {name: torch.empty_like(tensor, device="meta") for name, tensor in draft.state_dict().items()}
        expected = to_file_names(draft.decoder, form, empty, files)
    if not expected.keys() & files.keys():
        raise PipelineError(
            f"{target} comes without an MTP head: its files hold no {min(expected)}. Train another kind of draft, or "
            "name a release of this head in draft.NAME.start"
        )
    if next_form.layer != form.layer and any(name.startswith(next_form.layer) for name in files):
        raise PipelineError(f"{target} has several MTP layers ({next_form.layer}*); heads of one are known")
    _require_known(files, form, expected, target)
    _require_copies(files, form, target)
    tensors: dict[str, Tensor] = {}
    for path in {files[name] for name in expected}:
        with safe_open(path, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in expected if files[name] == path}
    weights = from_file_names(draft.shapes["layer"], form, tensors)
    if draft.token_ids_U is not None:
        weights[DRAFT_TOKEN_IDS] = draft.token_ids_U
    draft.load_state_dict(weights)
    draft.has_weights = True


def _require_known(files: Mapping[str, Path], form: HeadForm, expected: Mapping[str, Tensor], target: str) -> None:
    """Raise PipelineError where the head's tensors have other names, shapes or dtypes than its family's."""
    if missing := sorted(expected.keys() - files.keys()):
        unknown = [
            name
            for name in sorted(files.keys() - expected.keys() - form.copies.keys())
            if name.startswith((form.layer, *form.parts.values())) and not name.endswith(FREQUENCIES)
        ]
        surplus = f", and hold {unknown[0]}, which is unknown" if unknown else ""
        raise PipelineError(
            f"{target}: its MTP head is incomplete or quantised: the files lack {missing[0]} ({len(missing)} of "
            f"{len(expected)} tensors){surplus}. Name a complete target in 16 or 32 bits"
        )
    for path in sorted({files[name] for name in expected}):
        with safe_open(path, "pt") as opened:
            for name in sorted(name for name in expected if files[name] == path):
                stored = opened.get_slice(name)
                shape, dtype = stored.get_shape(), stored.get_dtype()
                if dtype not in FLOATS:
                    raise PipelineError(
                        f"{target}: its MTP head is quantised: {name} is {dtype}. Name a target in 16 or 32 bits"
                    )
                if shape != list(expected[name].shape):
                    raise PipelineError(
                        f"{target}: {name} has the shape {shape}, by config.json it has {list(expected[name].shape)}"
                    )


def _require_copies(files: Mapping[str, Path], form: HeadForm, target: str) -> None:
    """Raise PipelineError where the head's copy of the target's embedding or LM head has other values: the draft uses
    the target's.
    """
    for name, shared_name in form.copies.items():
        original = EMBEDDING if shared_name == HEAD and HEAD not in files else shared_name  # tied
        if name in files and original in files:
            with safe_open(files[name], "pt") as first, safe_open(files[original], "pt") as second:
                if not torch.equal(first.get_tensor(name), second.get_tensor(original)):
                    raise PipelineError(
                        f"{target}: {name} differs from {original}, but a draft uses the target's: heads with an "
                        "embedding or an output layer of their own are not known"
                    )
