"""The abilities of a target: every causal language model reads a text; some verify a chain of draft tokens or a tree.

Read: states of every layer's output, from one forward. Chain: verify several tokens that follow each other, and go back
to any of them. Tree: verify siblings in one forward, under a mask. A configuration shows which of the last two a target
can do at most; a few tokens prove it when the target is loaded to verify.
"""

from inspect import signature
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from pipeline.basics.errors import PipelineError
from pipeline.lm.attention import FULL, SLIDING, attention_windows

if TYPE_CHECKING:
    from pipeline.lm.verifier import Verifier

Shape = Literal["tree", "chain"]

_STATE = "its state merges all tokens so far, and a rejected one cannot be removed from it"
_REASONS = {
    "linear_attention": _STATE,
    "conv": _STATE,
    "hybrid": _STATE,
    "hybrid_sliding": _STATE,
    "chunked_attention": "what a token sees depends on where its chunk begins, which a tree's mask cannot express",
}
# Mamba-1 continues a state for one token alone: transformers 5.23 computes a chain as if no text came before.
READ_ALONE = ("mamba", "falcon_mamba", "jamba")
_UNREADABLE = "its states are not those of a text that grows at its end"
# Errors of a model that does not take a mask, positions or a cache as its family's others do.
FORWARD_ERRORS = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)


def auto_class(full: Any, name: str) -> Any:
    """Return the class of transformers that loads a model of this configuration with its head: that of causal language
    models, or of models that read images and text, whose decoder is used on text alone. Raise PipelineError.
    """
    if type(full) in MODEL_FOR_CAUSAL_LM_MAPPING or AutoModelForCausalLM.__name__ in (
        getattr(full, "auto_map", None) or {}
    ):
        return AutoModelForCausalLM
    if type(full) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    raise PipelineError(
        f"target {name!r} is a {full.model_type!r}, of which transformers knows no causal language model: expected one "
        f"that {AutoModelForCausalLM.__name__} or {AutoModelForImageTextToText.__name__} loads"
    )


def find_decoder(model: Any) -> Any:
    """Return the layers between a model's embedding and its head, without the parts that read images."""
    if model.config.get_text_config() is model.config and model.base_model is not model:
        return model.base_model
    decoder = model.get_decoder()
    return model.model if decoder is model else decoder


def cache_argument(decoder: Any) -> str:
    """Return the name under which a decoder takes and returns its cache."""
    return "cache_params" if "cache_params" in signature(decoder.forward).parameters else "past_key_values"


def find_layers(decoder: Any, name: str) -> Any:
    """Return a decoder's layers, in their order. Raise PipelineError where they have none of the usual names."""
    for attribute in ("layers", "h", "blocks"):
        if hasattr(decoder, attribute):
            return getattr(decoder, attribute)
    raise PipelineError(
        f"target {name!r}: its decoder has no `layers`, so their outputs cannot be stored: leave "
        "features.auxiliary_layers out, and choose drafts that read the final state"
    )


def require_readable(full: Any, name: str) -> None:
    """Raise PipelineError for a model that is no causal language model, by its configuration."""
    auto_class(full, name)
    text = full.get_text_config()
    for obstacle, holds in (
        ("an encoder", full.is_encoder_decoder),
        (
            "bidirectional attention",
            getattr(text, "use_bidirectional_attention", None) is True or getattr(text, "is_causal", True) is False,
        ),
    ):
        if holds:
            raise PipelineError(f"target {name!r} has {obstacle}, so it is no causal language model: {_UNREADABLE}")


def find_tree_obstacle(full: Any) -> str | None:
    """Return why a readable model cannot verify a tree, by its configuration; None if it can. Needs no weights."""
    text = full.get_text_config()
    kinds = attention_windows(text)
    for kind in kinds:
        if kind not in (FULL, SLIDING):
            return f"{kind} layers: {_REASONS.get(kind, 'its attention takes no mask over single tokens')}"
    classes = [MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None) for config in (full, text)]
    if not getattr(text, "layer_types", None) and any(getattr(model, "_is_stateful", False) for model in classes):
        return f"recurrent layers ({full.model_type}): {_STATE}"
    if text.model_type in ("bloom", "mpt") or getattr(text, "alibi", False):
        return "ALiBi: it counts distances along the cache, where siblings are adjacent"
    if "local" in (getattr(text, "attention_layers", None) or ()):
        return "local layers: their window is counted along the cache, where siblings are adjacent"
    if SLIDING in kinds and not kinds[SLIDING]:
        return f"{SLIDING} layers without sliding_window: the size of their window is not known"
    return None


@torch.inference_mode()
def require_tree(target: "Verifier", name: str) -> None:
    """Raise PipelineError when a tree after a cached prefix gets other states than plain forwards of its paths. Takes
    16 tokens.

    If the mask were ignored, the second of two siblings and its child would see the first. In half precision the bound
    is half of that distance, as one token that other experts take may move a state by much.
    """
    a, b, root, left, right, below = _probe_tokens(target)
    expected_BTD = target.capture(torch.tensor([[a, b, root, left, right], [a, b, root, right, below]]))
    expected_ND = torch.cat([expected_BTD[0, 2:4], expected_BTD[1, 3:5]]).float()
    visible = torch.ones(4, 6, dtype=torch.bool).tril(2)
    visible[2:, 3] = False  # neither the second sibling nor its child sees the first
    placement: Any = {"device": target.device}
    try:
        cache = target.new_cache(6)
        target.forward(torch.tensor([a, b], **placement), cache)
        tree = torch.tensor([root, left, right, below], **placement)
        tree_ND = target.forward(
            tree, cache, torch.tensor([2, 3, 3, 4], **placement), visible.to(target.device)
        ).final_ND.float()
    except FORWARD_ERRORS as error:
        raise PipelineError(
            f"target {name!r} takes no tree's mask ({type(error).__name__}: {error}); this architecture needs support "
            "in pipeline/lm/attention.py"
        ) from None
    other_sibling_D = expected_BTD[0, 4].float() - expected_ND[2]
    _require_near(target, tree_ND, expected_ND, other_sibling_D, name, "a small tree", "the tree's mask")


@torch.inference_mode()
def require_chain(target: "Verifier", name: str) -> None:
    """Raise PipelineError when a chain after a cached prefix, and what follows after its last tokens are rejected, get
    other states than one plain forward. Takes 18 tokens.
    """
    a, b, root, draft, wrong, after = _probe_tokens(target)
    expected_TD = target.capture(torch.tensor([[a, b, root, draft, after, a]]))[0].float()
    wrong_TD = target.capture(torch.tensor([[a, b, root, draft, wrong]]))[0].float()
    placement: Any = {"device": target.device}
    try:
        cache = target.new_cache(8)
        target.forward(torch.tensor([a, b], **placement), cache)
        chain_ND = target.forward(torch.tensor([root, draft, wrong], **placement), cache).final_ND.float()
        cache.keep(2, [2, 3])
        after_ND = target.forward(torch.tensor([after, a], **placement), cache).final_ND.float()
        cache.keep(4, [4, 5])
    except FORWARD_ERRORS as error:
        raise PipelineError(
            f"target {name!r}: no chain can be verified with it ({type(error).__name__}: {error}); this architecture "
            "needs support in pipeline/lm/cache.py. Its states can be dumped, and a draft be trained"
        ) from None
    states_ND = torch.cat([chain_ND, after_ND])
    expected_ND = torch.cat([wrong_TD[2:5], expected_TD[4:]])
    _require_near(
        target, states_ND, expected_ND, expected_TD[4] - wrong_TD[4], name, "a chain", "a rejected token's removal"
    )


def _probe_tokens(target: "Verifier") -> list[int]:
    return (target.config.vocab_size // 8 * torch.arange(1, 7)).tolist()


def _require_near(
    target: "Verifier", states_ND: Tensor, expected_ND: Tensor, wrong_D: Tensor, name: str, tokens: str, mechanism: str
) -> None:
    """Raise PipelineError where states are too far from plain decoding's. ``wrong_D``: the distance of a state that saw
    another token.
    """
    difference, bound = (states_ND - expected_ND).norm(), torch.finfo(target.dtype).eps ** 0.5 * expected_ND.norm()
    if target.dtype != torch.float32:
        bound = bound.maximum(wrong_D.norm() / 2)
    if not difference <= bound:
        raise PipelineError(
            f"target {name!r}: this architecture ignores {mechanism} or its positions (states of {tokens} are "
            f"{difference.item():.3g} from plain decoding's, expected at most {bound.item():.3g}); it needs support in "
            "pipeline/lm"
        )


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # names of families
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_k", "top_k_experts")


def count_experts(config: Any) -> tuple[int, int]:
    """Return the number of experts of a layer, and how many a token uses; (0, 0) if each token uses all weights."""
    experts, used = (
        next((n for key in names if (n := getattr(config, key, None))), 0) for names in (EXPERTS, EXPERTS_PER_TOKEN)
    )
    return (experts, used) if 0 < used < experts else (0, 0)
