"""Drafts that others trained become ours: EAGLE-1/2, Jakiro, Gumiho, Medusa and Hydra as their authors released them,
EAGLE-3 and DFlash as their authors, SpecForge or speculators write them, P-EAGLE and DSpark as the last two do.

Guarantees: every tensor is kept, renamed or dropped by name, and the list says so; what has no place in the recipe's
draft is an error that names it, and nothing is written. Shapes, the norms' eps and RoPE are the checkpoint's own.
What its config says of the computation is what the draft computes, or an error that names the key; what it does not
say, and the recipe does, is in the list.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.artifacts import checkpoint
from pipeline.artifacts.foreign import require_known, their_config, their_shapes
from pipeline.artifacts.unpickle import read_weights, weights_files
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import exclusive, sha256
from pipeline.basics.public import public_text
from pipeline.drafts import DRAFTS, TrainedDraft, build, kind_of, parameter_count
from pipeline.drafts.parallel.mask import MASK
from pipeline.drafts.parts.names import IDS, UNSAID
from pipeline.lm.embedding_head import EmbeddingAndHead
from pipeline.lm.model import load_config, load_embed_head
from pipeline.recipe.recipe import Recipe

HEAD = "lm_head.weight"
EMBEDDINGS = ("embed_tokens.weight", "input_embed_fn.weight")
ROTARY = "follows from rope_theta"


@dataclass
class Imported:
    """What became of a checkpoint."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)  # names of theirs
    lines: list[str] = field(default_factory=list)  # for the user

    def note(self, line: str) -> None:
        self.lines.append(public_text(line))


def import_draft(source: Path, recipe: Recipe, name: str, published: dict[str, str] | None = None) -> list[str]:
    """Writes the recipe's draft `name` from the checkpoint in `source`; says what became of its tensors. `published`:
    the repository and revision that it is from.

    Raises PipelineError where it does not fit the recipe's target or draft, or one is there already.
    """
    if name not in recipe.trained:
        raise PipelineError(f"--draft {name}: the recipe has {', '.join(recipe.trained)} that have weights")
    folder = recipe.paths.draft(name)
    if (folder / checkpoint.CONFIG).exists():
        raise PipelineError(f"{folder} holds a draft already. Remove it, or give the recipe another output folder")
    embed_head = load_embed_head(recipe.target)
    draft, found, imported = converted(source, recipe, name, embed_head)
    draft.bind(embed_head)
    facts: dict[str, Any] = {"parameters": parameter_count(draft), "imported": imported}
    if published is not None:
        facts |= {"published": published, "imported": imported | {"from": published["repository"]}}
    with exclusive(folder, "import"):
        checkpoint.save(folder, draft, draft.state_dict(), recipe, name, facts)
    return found.lines


def converted(
    source: Path, recipe: Recipe, name: str, embed_head: EmbeddingAndHead, any_vocabulary: bool = False
) -> tuple[TrainedDraft, Imported, dict[str, Any]]:
    """The recipe's draft `name` with the weights of `source`, what became of its tensors, and where it is from: for the
    card. With `any_vocabulary` the draft's is the source's, whatever the recipe says. Raises PipelineError where it
    does not fit.
    """
    config, target = recipe.draft[name], load_config(recipe.target)
    theirs, files = their_config(source, target), weights_files(source)
    shapes = their_shapes(source, theirs, target, recipe.target.model)
    names = DRAFTS[kind_of(config)].names
    found, unread = Imported(), require_known(source, theirs, names.known(config))
    given = read_weights(files)
    bare = {name.removeprefix("model."): tensor for name, tensor in given.items()}
    ids = ids_of(bare, len(embed_head.embedding_VD))
    if any_vocabulary and "vocabulary" in config.to_json():
        own: dict[str, Any] = {"vocabulary": None if ids is None else len(ids)}
        config = replace(config, **own)
    try:
        checkpoint.require_sizes(config, shapes, {name: list(tensor.shape) for name, tensor in given.items()})
        draft = build(config, shapes)
    except checkpoint.UNBUILDABLE as error:
        raise PipelineError(f"{source / 'config.json'} makes no draft.{name}: {' '.join(str(error).split())}") from None
    draft.name = name
    said = []
    for key, (value, ours) in names.read_settings(draft, theirs, bare).items():
        if value is UNSAID:
            is_default = getattr(config, key) == getattr(type(config), key)
            why = "this kind's default" if is_default else "as the recipe says"
            found.note(f"assumed {key}={ours}, {why}: the file does not say it")
        elif value != ours:
            said.append(f"{key}={value!r}: set draft.{name}.{key} (it is {ours!r})")
    if said:
        raise PipelineError(f"{source} was trained with {'; '.join(said)}")
    if unread:
        found.note(f"not read, as false or empty: {', '.join(unread)}")
    if ids is not None and draft.token_ids_U is None:
        raise PipelineError(
            f"{source} has a draft vocabulary of {len(ids)} tokens: set draft.{name}.vocabulary={len(ids)}"
        )
    _map(found, given, names.table(draft, bare), names.unread, ids, embed_head)
    _complete(found, draft.state_dict())
    dtypes = {x.dtype for x in found.weights.values() if x.is_floating_point()}
    if len(dtypes) > 1:
        raise PipelineError(f"{source} mixes {', '.join(sorted(map(str, dtypes)))}: save it in one dtype")
    try:
        draft.to(*dtypes).load_state_dict(found.weights)  # type: ignore[call-overload]
    except RuntimeError as error:
        raise PipelineError(
            f"{source} does not fit draft.{name}: {' '.join(str(error).split())} Set the draft's keys as it was "
            "trained (fc_bias, vocabulary, mlp_width, expert_width, experts, contrast, frame); biases of q, k, v on "
            "EAGLE's frame and experts that are no SwiGLU have no place in any"
        ) from None
    sums = ", ".join(map(sha256, files))
    return draft, found, {"from": source.name, "sha256": sums, "dropped": sorted(found.dropped)}


def _map(
    found: Imported,
    theirs: Mapping[str, Tensor],
    table: Mapping[str, str],
    unread: str,
    ids_U: Tensor | None,
    embed_head: EmbeddingAndHead,
) -> None:
    """Takes in their tensors under our names. A target's embedding and head are so up to rounding to half precision.

    Raises PipelineError for another embedding or head than the target's, and for two tensors of one name that differ.
    """
    sources: dict[str, str] = {}  # our name -> theirs
    head = embed_head.head.linear.weight
    targets = dict.fromkeys(EMBEDDINGS, ("embedding", embed_head.embedding_VD))
    targets |= {} if HEAD in table.values() else {HEAD: ("head", head if ids_U is None else head[ids_U])}
    reasons = {unread: "nothing here reads it", "t2d$": "follows from d2t", r".*rotary_emb\.inv_freq$": ROTARY}
    reasons |= {"d2t$": "every token of the target is one of the draft's"} if ids_U is None else {}
    for name, tensor in theirs.items():
        bare = name.removeprefix("model.")
        ours = table.get(bare, bare)
        why = next((reason for pattern, reason in reasons.items() if re.match(pattern, bare)), None)
        if (other := sources.setdefault(ours, name)) != name:
            if theirs[other].dtype != tensor.dtype or not torch.equal(theirs[other], tensor):
                raise PipelineError(f"{other} and {name} are both {ours}, and differ: which one is meant is not known")
            why = f"the same as {other}"
        elif ours in targets:
            what, own = targets[ours]
            if tensor.shape != own.shape or not torch.allclose(tensor.float(), own.float(), rtol=2**-7, atol=1e-3):
                raise PipelineError(f"{name} is not the target's {what}: a draft with one of its own has no place here")
            why = f"it is the target's {what}"
        if why:
            found.dropped.append(name)
            found.note(f"dropped {name}: {why}")
        elif ours == "d2t" and ids_U is not None:
            found.weights[IDS] = ids_U
            found.note(f"renamed {name} -> {IDS}: offsets become ids")
        else:
            found.weights[ours] = tensor
            if ours != name:
                found.note(f"renamed {name} -> {ours}")
    kept = [name for name in found.weights if sources.get(name) == name]
    found.note(f"kept {len(kept)} tensors by their names")


def ids_of(theirs: Mapping[str, Tensor], vocabulary: int) -> Tensor | None:
    """Return the target's ids that a reduced vocabulary stands for; None where it is the whole one.

    Raises PipelineError for ids that the target has not, that do not ascend, as a search of them does not find them,
    and where `t2d` says otherwise.
    """
    ids, every = theirs.get(IDS), torch.arange(vocabulary)
    stated = {} if ids is None else {IDS: ids.reshape(-1)}
    if (offsets := theirs.get("d2t")) is not None:
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
    if (marks := theirs.get("t2d")) is not None:
        marked = marks.reshape(-1).bool().nonzero()[:, 0]
        if not torch.equal(marked, every if ids is None else ids):
            other = f"d2t {len(ids)} others" if ids is not None else "there is no d2t"
            raise PipelineError(f"t2d names {len(marked)} tokens, but {other}: which tokens the draft has is not known")
    return None if ids is None or ("d2t" in stated and torch.equal(ids, every)) else ids


def _complete(found: Imported, wanted: dict[str, Tensor]) -> None:
    """A layer's biases are of q, k, v and o: where others have those of three, the fourth adds nothing. A mask token is
    in their config, which the draft's settings say, too.
    """
    for name in set(wanted) - set(found.weights):
        if name == MASK:
            found.weights[name] = wanted[name]
            found.note(f"made {name}: {int(wanted[name])}, as the recipe says")
        if name.endswith("o_proj.bias") and (other := name.replace("o_proj", "q_proj")) in found.weights:
            found.weights[name] = torch.zeros_like(wanted[name], dtype=found.weights[other].dtype)
            found.note(f"made {name}: zeros, as the file has none")
