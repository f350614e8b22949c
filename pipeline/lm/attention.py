"""Attention over a token tree: the tree's mask for each kind of layer that supports it.

In a full layer a token sees its whole path. In a sliding layer it sees the last `window` tokens of the path, itself
included; they are counted along the path and not along the cache, where siblings and their descendants lie in between.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

POSITION_KEYS, UNLIMITED = ("max_position_embeddings", "seq_length", "max_seq_len"), 1 << 20
FULL, SLIDING = "full_attention", "sliding_attention"
GROUPED = f"{__name__}.grouped"  # the name of `grouped_attention` in transformers; a loaded release has its own


def attention_windows(text: Any) -> dict[str, int | None]:
    """Return layer kind -> number of tokens of its path that a token sees there, itself included (None: all), for every
    kind that a text configuration names.
    """
    window = getattr(text, "sliding_window", None)
    kinds = set(getattr(text, "layer_types", None) or ())
    if not kinds:
        kinds = {SLIDING if window and getattr(text, "use_sliding_window", True) else FULL}
    return {kind: window if kind == SLIDING else None for kind in sorted(kinds)}


def max_positions(text: Any) -> int:
    """Return the maximum number of tokens of a sequence. "longrope" rotates all positions differently once the longest
    exceeds the original ones: a tree across that border would not get plain decoding's states, so the border is the
    maximum.
    """
    rope = getattr(text, "rope_parameters", None) or {}
    border = rope.get("original_max_position_embeddings") if rope.get("rope_type") == "longrope" else None
    positions = declared_positions(text)
    return min(border or positions, positions)


def declared_positions(text: Any) -> int:
    """Return the length of a text that a configuration names, or UNLIMITED: models of states alone name none."""
    return next((n for key in POSITION_KEYS if (n := getattr(text, key, None))), UNLIMITED)


def use_masked_attention(model: PreTrainedModel) -> None:
    """Switch to attention that applies the given masks, where the configuration asks for one that ignores them (flash
    attention): SDPA, on an accelerator `grouped_attention`.
    """
    current, required = model.config._attn_implementation, "sdpa" if model.device.type == "cpu" else GROUPED
    if current not in (required, "eager"):
        model.set_attn_implementation(required if model._supports_sdpa else "eager")


PER_HEAD = ("cpu",)  # devices whose fused kernel supports a mask and grouped heads together
# OVERRIDEABLE: kernels of other devices' vendors.
WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.OVERRIDEABLE, SDPBackend.MATH]


def _avoid_cudnn_backward(key: Tensor, mask: Tensor | None) -> AbstractContextManager:
    """Avoid cuDNN where its gradient of masked attention can be NaN: on an H100 or H200, with torch 2.11 to 2.13, where
    the number of keys is 64 more than a multiple of 128, and the logarithm of a row's summed exponentials is below
    -88.7 (pytorch's issue 196678). Training forwards of such lengths use another kernel; the backward follows.
    """
    unsound = mask is not None and torch.is_grad_enabled() and key.shape[2] % 128 == 64
    return sdpa_kernel(WITHOUT_CUDNN) if unsound else nullcontext()


def grouped_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Compute attention as transformers' SDPA does, except that a masked forward on an accelerator reads the keys and
    values of grouped heads in place. No fused kernel there supports both a mask and grouped heads, and transformers
    copies keys and values for every head, a cost that plain decoding, one token without a mask, does not have. Here the
    heads of a group become rows of one head.
    """
    groups, dropout, scale = query.shape[1] // key.shape[1], options.get("dropout", 0.0), options.get("scaling")
    unsupported = {name for name in ("position_bias", "softcap", "cache") if options.get(name) is not None}
    ungrouped = groups == 1 or query.device.type in PER_HEAD or unsupported
    with _avoid_cudnn_backward(key, attention_mask):
        if ungrouped or attention_mask is None or attention_mask.shape[1] > 1:
            return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        rows = query.unflatten(1, (-1, groups)).flatten(2, 3)
        mask = attention_mask.repeat(1, 1, groups, 1)
        output_rows = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, dropout_p=dropout, scale=scale)
    return output_rows.unflatten(2, (groups, -1)).flatten(1, 2).transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)


def causal_mask(past: int, count: int, device: torch.device, window: int | None = None) -> Tensor:
    """Return the causal mask of `count` new tokens after `past` cached ones: bool (count, past + count); with a
    `window` each token sees the last `window` ones, itself included.
    """
    visible = torch.ones(count, past + count, dtype=torch.bool, device=device).tril(past)
    return visible if window is None else visible.triu(past - window + 1)


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask of 0 where visible, and of the most negative number elsewhere: every attention implementation
    accepts it.
    """
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, torch.finfo(dtype).min)


def layer_masks(
    kinds: dict[str, int | None],
    visible_NC: Tensor,
    positions_N: Tensor,
    dtype: torch.dtype,
    shape: tuple[int, int] | None = None,
) -> Tensor | dict[str, Tensor]:
    """Build the additive masks (1, 1, N, C) by layer kind, as a decoder takes them; for a decoder of one kind, its mask
    alone.

    Parameters: `kinds`, from `attention_windows`; ``visible_NC`` (bool): which of the C - N cached tokens, at positions
    0, 1, ..., and of the N new ones, at ``positions_N``, are on each new token's path; `shape`: the mask's padded
    shape.
    """
    cached = torch.arange(visible_NC.shape[1] - len(positions_N), device=visible_NC.device)
    distance_NC = positions_N[:, None] - torch.cat([cached, positions_N])
    by_kind = {}
    for kind, window in kinds.items():
        visible = visible_NC if window is None else visible_NC & (distance_NC < window)
        by_kind[kind] = additive_mask(visible if shape is None else _pad_mask(visible, *shape), dtype)[None, None]
    return by_kind if len(by_kind) > 1 else by_kind.popitem()[1]


def _pad_mask(visible_NC: Tensor, width: int, capacity: int) -> Tensor:
    """Pad the mask to the whole capacity, for `width` tokens. Padding tokens see the first token; no token sees
    them.
    """
    count, columns = visible_NC.shape
    padded = F.pad(visible_NC, (0, capacity - columns, 0, width - count))
    padded[count:, 0] = True
    return padded


def packed_masks(
    tokens_BT: Tensor, begins_BT: Tensor | None, kinds: dict[str, int | None], dtype: torch.dtype
) -> tuple[Any, Tensor]:
    """Build the additive masks (B, 1, T, T), by kind of `attention.windows` where there are several, and the positions
    of rows that each hold one text or several in sequence.
    """
    places = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
    begins = torch.zeros_like(tokens_BT) if begins_BT is None else begins_BT
    same_BTT = begins[:, :, None] == begins[:, None, :]
    distance_TT = places[:, None] - places[None, :]
    by_kind = {}
    for kind, window in kinds.items():
        near_TT = (distance_TT >= 0) & (distance_TT < (window or len(places) + 1))
        by_kind[kind] = additive_mask(same_BTT & near_TT, dtype)[:, None]
    return (by_kind if len(by_kind) > 1 else by_kind.popitem()[1]), places - begins
