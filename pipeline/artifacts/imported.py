"""Import of drafts that other projects trained: EAGLE-1/2, Jakiro, Gumiho, Medusa and Hydra as their authors released
them, EAGLE-3 and DFlash as their authors, SpecForge or speculators write them, P-EAGLE and DSpark as the last two do.

Guarantees: every tensor is kept, renamed or dropped by name, and listed; a tensor that the recipe's draft cannot hold
is an error that names it, and nothing is written. Shapes, the norms' eps and RoPE are the checkpoint's own. The draft
computes what the checkpoint's config describes, or an error names the key; settings that only the recipe has are
listed.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.artifacts import checkpoint
from pipeline.artifacts.foreign import foreign_shapes, read_foreign_config, require_known
from pipeline.artifacts.unpickle import read_weights, weights_files
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import lock_folder, sha256
from pipeline.basics.public import public_text
from pipeline.drafts import DRAFTS, TrainedDraft, build, kind_key, parameter_count
from pipeline.drafts.native.mtp import MtpConfig
from pipeline.drafts.parallel.mask import MASK_TOKEN_ID
from pipeline.drafts.parts.names import DRAFT_TOKEN_IDS, UNSET
from pipeline.lm.model import load_config, load_embed_head
from pipeline.lm.states import EmbeddingAndHead
from pipeline.recipe.recipe import Recipe

HEAD = "lm_head.weight"
EMBEDDINGS = ("embed_tokens.weight", "input_embed_fn.weight")
ROTARY = "follows from rope_theta"


@dataclass
class ImportResult:
    """The result of reading a checkpoint."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)  # names of tensors in the checkpoint
    lines: list[str] = field(default_factory=list)  # messages for the user

    def note(self, line: str) -> None:
        self.lines.append(public_text(line))


def import_draft(source: Path, recipe: Recipe, name: str, published: dict[str, str] | None = None) -> list[str]:
    """Write the recipe's draft `name` from the checkpoint in `source`, and return lines on each tensor. `published`:
    its repository and revision.

    Raises PipelineError if it does not fit the recipe's target or draft, or if the draft exists already.
    """
    if name not in recipe.trained:
        raise PipelineError(f"--draft {name}: the recipe has {', '.join(recipe.trained)} that have weights")
    folder = recipe.paths.draft(name)
    if (folder / checkpoint.CONFIG).exists():
        raise PipelineError(f"{folder} holds a draft already. Remove it, or give the recipe another output folder")
    embed_head = load_embed_head(recipe.target)
    draft, result, imported = convert_draft(source, recipe, name, embed_head)
    draft.bind(embed_head)
    facts: dict[str, Any] = {"parameters": parameter_count(draft), "imported": imported}
    if published is not None:
        facts |= {"published": published, "imported": imported | {"from": published["repository"]}}
    with lock_folder(folder, "import"):
        checkpoint.save(folder, draft, draft.state_dict(), recipe, name, facts)
    return result.lines


def convert_draft(
    source: Path, recipe: Recipe, name: str, embed_head: EmbeddingAndHead, any_vocabulary: bool = False
) -> tuple[TrainedDraft, ImportResult, dict[str, Any]]:
    """Return the recipe's draft `name` with the weights of `source`, the result of reading them, and facts about the
    source for the card. With `any_vocabulary` the draft's vocabulary is the source's, not the recipe's. Raises
    PipelineError if the weights do not fit.
    """
    config, target = recipe.draft[name], load_config(recipe.target)
    if isinstance(config, MtpConfig):
        raise PipelineError(
            f"draft.{name}: an MTP head lies in its target's files: name the exported folder in target.model, or a "
            f"release of the head in draft.{name}.start"
        )
    settings, files = read_foreign_config(source, target), weights_files(source)
    shapes = foreign_shapes(source, settings, target, recipe.target.model)
    names = DRAFTS[kind_key(config)].names
    result, unread = ImportResult(), require_known(source, settings, names.known_keys(config))
    tensors = read_weights(files)
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    ids = read_vocabulary_ids(bare, len(embed_head.embedding_VD))
    if any_vocabulary and "vocabulary" in config.to_json():
        vocabulary: dict[str, Any] = {"vocabulary": None if ids is None else len(ids)}
        config = replace(config, **vocabulary)
    try:
        checkpoint.require_sizes(config, shapes, {name: list(tensor.shape) for name, tensor in tensors.items()})
        draft = build(config, shapes)
    except checkpoint.UNBUILDABLE as error:
        raise PipelineError(f"{source / 'config.json'} makes no draft.{name}: {' '.join(str(error).split())}") from None
    draft.name = name
    differences = []
    for key, (value, draft_value) in names.read_settings(draft, settings, bare).items():
        if value is UNSET:
            is_default = getattr(config, key) == getattr(type(config), key)
            reason = "this kind's default" if is_default else "as the recipe says"
            result.note(f"assumed {key}={draft_value}, {reason}: the file does not say it")
        elif value != draft_value:
            differences.append(f"{key}={value!r}: set draft.{name}.{key} (it is {draft_value!r})")
    if differences:
        raise PipelineError(f"{source} was trained with {'; '.join(differences)}")
    if unread:
        result.note(f"not read, as false or empty: {', '.join(unread)}")
    if ids is not None and draft.token_ids_U is None:
        raise PipelineError(
            f"{source} has a draft vocabulary of {len(ids)} tokens: set draft.{name}.vocabulary={len(ids)}"
        )
    _assign_tensors(result, tensors, names.table(draft, bare), names.ignored_tensors, ids, embed_head)
    _add_missing(result, draft.state_dict())
    dtypes = {x.dtype for x in result.weights.values() if x.is_floating_point()}
    if len(dtypes) > 1:
        raise PipelineError(f"{source} mixes {', '.join(sorted(map(str, dtypes)))}: save it in one dtype")
    try:
        draft.to(*dtypes).load_state_dict(result.weights)  # type: ignore[call-overload]
    except RuntimeError as error:
        raise PipelineError(
            f"{source} does not fit draft.{name}: {' '.join(str(error).split())} Set the draft's keys as it was "
            "trained (fc_bias, vocabulary, mlp_width, expert_width, experts, contrast, frame); biases of q, k, v on "
            "EAGLE's frame and experts other than SwiGLU cannot be imported"
        ) from None
    sums = ", ".join(map(sha256, files))
    return draft, result, {"from": source.name, "sha256": sums, "dropped": sorted(result.dropped)}


def _assign_tensors(
    result: ImportResult,
    tensors: Mapping[str, Tensor],
    table: Mapping[str, str],
    unread: str,
    ids_U: Tensor | None,
    embed_head: EmbeddingAndHead,
) -> None:
    """Store the checkpoint's tensors under this project's names. The target's embedding and head are recognised up to
    rounding to half precision.

    Raises PipelineError if embedding or head are not the target's, and for two tensors of one name that differ.
    """
    sources: dict[str, str] = {}  # this project's name -> the checkpoint's
    head = embed_head.head.linear.weight
    targets = dict.fromkeys(EMBEDDINGS, ("embedding", embed_head.embedding_VD))
    targets |= {} if HEAD in table.values() else {HEAD: ("head", head if ids_U is None else head[ids_U])}
    reasons = {unread: "nothing here reads it", "t2d$": "follows from d2t", r".*rotary_emb\.inv_freq$": ROTARY}
    reasons |= {"d2t$": "every token of the target is one of the draft's"} if ids_U is None else {}
    for name, tensor in tensors.items():
        bare = name.removeprefix("model.")
        new_name = table.get(bare, bare)
        reason = next((reason for pattern, reason in reasons.items() if re.match(pattern, bare)), None)
        if (first_name := sources.setdefault(new_name, name)) != name:
            if tensors[first_name].dtype != tensor.dtype or not torch.equal(tensors[first_name], tensor):
                raise PipelineError(
                    f"{first_name} and {name} are both {new_name}, and differ: which one is meant is not known"
                )
            reason = f"the same as {first_name}"
        elif new_name in targets:
            part, target_tensor = targets[new_name]
            if tensor.shape != target_tensor.shape or not torch.allclose(
                tensor.float(), target_tensor.float(), rtol=2**-7, atol=1e-3
            ):
                raise PipelineError(f"{name} differs from the target's {part}: a draft with its own cannot be imported")
            reason = f"it is the target's {part}"
        if reason:
            result.dropped.append(name)
            result.note(f"dropped {name}: {reason}")
        elif new_name == "d2t" and ids_U is not None:
            result.weights[DRAFT_TOKEN_IDS] = ids_U
            result.note(f"renamed {name} -> {DRAFT_TOKEN_IDS}: offsets become ids")
        else:
            result.weights[new_name] = tensor
            if new_name != name:
                result.note(f"renamed {name} -> {new_name}")
    kept_names = [name for name in result.weights if sources.get(name) == name]
    result.note(f"kept {len(kept_names)} tensors by their names")


def read_vocabulary_ids(tensors: Mapping[str, Tensor], vocabulary: int) -> Tensor | None:
    """Return the target's ids of a reduced vocabulary; None if the vocabulary is complete.

    Raises PipelineError for ids that the target does not have, for ids that do not ascend, which a binary search would
    miss, and for ids that `t2d` contradicts.
    """
    ids, every = tensors.get(DRAFT_TOKEN_IDS), torch.arange(vocabulary)
    stated = {} if ids is None else {DRAFT_TOKEN_IDS: ids.reshape(-1)}
    if (offsets := tensors.get("d2t")) is not None:
        stated["d2t"] = ids = offsets.reshape(-1).long() + torch.arange(offsets.numel())
    for name, ids_U in stated.items():
        if len(odd := ids_U[(ids_U < 0) | (ids_U >= vocabulary)]):
            raise PipelineError(f"{name} leads to token {int(odd[0])}, but the target has {vocabulary}")
        if len(places := (ids_U.diff() <= 0).nonzero()):
            before, after = ids_U[places[0, 0] :][:2].tolist()
            raise PipelineError(
                f"{name} leads to token {before} and then to {after}, expected ascending ones: sort them in a copy of "
                "the file, and the head's rows with them"
            )
    if (t2d := tensors.get("t2d")) is not None:
        marked = t2d.reshape(-1).bool().nonzero()[:, 0]
        if not torch.equal(marked, every if ids is None else ids):
            d2t_count = f"d2t {len(ids)} others" if ids is not None else "there is no d2t"
            raise PipelineError(
                f"t2d names {len(marked)} tokens, but {d2t_count}: which tokens the draft has is not known"
            )
    return None if ids is None or ("d2t" in stated and torch.equal(ids, every)) else ids


def _add_missing(result: ImportResult, required: dict[str, Tensor]) -> None:
    """Add the weights that only this project stores: a zero bias of o for checkpoints with biases of q, k and v only,
    and the mask token, which the checkpoint has in its config.
    """
    for name in set(required) - set(result.weights):
        if name == MASK_TOKEN_ID:
            result.weights[name] = required[name]
            result.note(f"made {name}: {int(required[name])}, as the recipe says")
        if name.endswith("o_proj.bias") and (q_bias := name.replace("o_proj", "q_proj")) in result.weights:
            result.weights[name] = torch.zeros_like(required[name], dtype=result.weights[q_bias].dtype)
            result.note(f"made {name}: zeros, as the file has none")
