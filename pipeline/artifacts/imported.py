"""Drafts that others trained become ours: EAGLE-1/2, Jakiro, Gumiho, Medusa and Hydra as their authors released them,
EAGLE-3 and DFlash as their authors, SpecForge or speculators write them, P-EAGLE and DSpark as the last two do.

Guarantees: every tensor is kept, renamed or dropped by name, and the list says so; what has no place in the recipe's
draft is an error that names it, and nothing is written. Shapes, the norms' eps and RoPE are the checkpoint's own.
What its config says of the computation is what the draft computes, or an error that names the key; what it does not
say, and the recipe does, is in the list.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.artifacts import checkpoint
from pipeline.artifacts.foreign import read_weights, require_known, their_config, their_shapes, weights_files
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import exclusive, sha256
from pipeline.basics.public import public_text
from pipeline.drafts import DRAFTS, DraftConfig, TrainedDraft, build, kind_of, parameter_count
from pipeline.drafts.parallel.mask import MASK
from pipeline.drafts.parts.released import UNSAID, Facts
from pipeline.lm.embedding_head import EmbeddingAndHead
from pipeline.lm.model import load_config, load_embed_head
from pipeline.recipe.recipe import Recipe

IDS, HEAD = "draft_token_ids", "lm_head.weight"


@dataclass
class Imported:
    """What became of a checkpoint."""

    kept: int = 0
    renamed: dict[str, str] = field(default_factory=dict)  # their name -> ours
    dropped: dict[str, str] = field(default_factory=dict)  # their name -> why
    made: dict[str, str] = field(default_factory=dict)  # our name -> of what
    assumed: dict[str, str] = field(default_factory=dict)  # a setting that the file does not give -> what is taken
    unread: list[str] = field(default_factory=list)  # keys of config.json, false or empty, that nothing here knows
    weights: dict[str, Tensor] = field(default_factory=dict)

    def said(self) -> list[str]:
        lines = [f"kept {self.kept} tensors by their names"]
        lines += [f"renamed {theirs} -> {ours}" for theirs, ours in self.renamed.items()]
        lines += [f"made {name}: {what}" for name, what in self.made.items()]
        lines += [f"dropped {name}: {why}" for name, why in self.dropped.items()]
        lines += [f"assumed {key}={what}: the file does not say it" for key, what in self.assumed.items()]
        lines += [f"not read, as false or empty: {', '.join(self.unread)}"] if self.unread else []
        return list(map(public_text, lines))


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
    return found.said()


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
    layout = DRAFTS[kind_of(config)].released
    unread = require_known(source, theirs, layout.keys)
    found = mapped(read_weights(files), layout.names, embed_head.embedding_VD)
    if any_vocabulary and "vocabulary" in config.to_json():
        own: dict[str, Any] = {"vocabulary": len(found.weights[IDS]) if IDS in found.weights else None}
        config = replace(config, **own)
    try:
        checkpoint.require_sizes(config, shapes, {name: list(tensor.shape) for name, tensor in found.weights.items()})
        draft = build(config, shapes)
    except checkpoint.UNBUILDABLE as error:
        raise PipelineError(f"{source / 'config.json'} makes no draft.{name}: {' '.join(str(error).split())}") from None
    draft.name = name
    wanted = draft.state_dict()
    _complete(found, wanted)
    if HEAD in found.weights and HEAD not in wanted:
        _drop_head(found, embed_head.head.linear.weight)
    stated = layout.facts(draft, theirs, found.weights)
    found.unread, found.assumed = unread, _assumed(config, stated)
    odd = {key: pair for key, pair in stated.items() if pair[0] is not UNSAID and pair[0] != pair[1]}
    if said := [f"{key}={value!r}: set draft.{name}.{key} (it is {ours!r})" for key, (value, ours) in odd.items()]:
        raise PipelineError(f"{source} was trained with {'; '.join(said)}")
    if IDS in found.weights and IDS not in wanted:
        size = len(found.weights[IDS])
        raise PipelineError(f"{source} has a draft vocabulary of {size} tokens: set draft.{name}.vocabulary={size}")
    _require_fit(source, name, found.weights, wanted)
    dtypes = {x.dtype for x in found.weights.values() if x.is_floating_point()}
    if len(dtypes) > 1:
        raise PipelineError(f"{source} mixes {', '.join(sorted(map(str, dtypes)))}: save it in one dtype")
    draft.to(*dtypes).load_state_dict(found.weights)  # type: ignore[call-overload]
    sums = ", ".join(map(sha256, files))
    return draft, found, {"from": source.name, "sha256": sums, "dropped": sorted(found.dropped)}


def mapped(
    theirs: dict[str, Tensor], renamed: Callable[[Collection[str]], dict[str, str | None]], embedding_VD: Tensor
) -> Imported:
    """Their tensors under our names. Raises PipelineError for another embedding than the target's."""
    found, ids, marked, vocabulary = Imported(), None, None, len(embedding_VD)
    sources: dict[str, str] = {}  # our name -> theirs
    bare = {name: name.removeprefix("model.") for name in theirs}
    names = renamed(bare.values())
    for name, tensor in theirs.items():
        ours = names[bare[name]]
        if ours is not None and (other := sources.setdefault(ours, name)) != name:
            if theirs[other].dtype != tensor.dtype or not torch.equal(theirs[other], tensor):
                raise PipelineError(f"{other} and {name} are both {ours}, and differ: which one is meant is not known")
            found.dropped[name] = f"the same as {other}"
        elif ours is None:
            found.dropped[name] = "nothing here reads it"
        elif ours == "d2t":
            ids = tensor.reshape(-1).long() + torch.arange(tensor.numel())
            _require_ids(name, ids, vocabulary)
            if torch.equal(ids, torch.arange(vocabulary)):
                found.dropped[name] = "every token of the target is one of the draft's"
            else:
                found.renamed[name], found.weights[IDS] = f"{IDS}: offsets become ids", ids
        elif ours == "t2d":
            marked = tensor.reshape(-1).bool().nonzero()[:, 0]
            found.dropped[name] = "follows from d2t"
        elif ours == "embed_tokens.weight":
            _require_same(name, tensor, embedding_VD, "embedding")
            found.dropped[name] = "it is the target's embedding"
        elif ours.endswith("rotary_emb.inv_freq"):
            found.dropped[name] = "follows from rope_theta"
        else:
            if ours == IDS:
                _require_ids(name, tensor.reshape(-1), vocabulary)
            found.weights[ours] = tensor
            if ours == name:
                found.kept += 1
            else:
                found.renamed[name] = ours
    if marked is not None:
        own = torch.arange(vocabulary) if ids is None else ids.sort().values
        if not torch.equal(marked, own):
            other = f"d2t {len(own)} others" if ids is not None else "there is no d2t"
            raise PipelineError(f"t2d names {len(marked)} tokens, but {other}: which tokens the draft has is not known")
    return found


def _require_ids(name: str, ids_U: Tensor, vocabulary: int) -> None:
    """Raises PipelineError for ids that the target has not, for two draft tokens of one id, and for ids that do not
    ascend, as a search of them does not find them.
    """
    if len(odd := ids_U[(ids_U < 0) | (ids_U >= vocabulary)]):
        raise PipelineError(f"{name} leads to token {int(odd[0])}, but the target has {vocabulary}")
    several, counts = ids_U.unique(return_counts=True)
    if len(twice := several[counts > 1]):
        raise PipelineError(f"{name} leads to token {int(twice[0])} more than once")
    if len(place := (ids_U.diff() < 0).nonzero()):
        before, after = ids_U[place[0, 0] :][:2].tolist()
        raise PipelineError(
            f"{name} leads to token {before} and then to {after}, expected ascending ones: sort them in a copy of the "
            "file, and the head's rows with them"
        )


def _assumed(config: DraftConfig, stated: Facts) -> dict[str, str]:
    """Return what is taken for settings that the file does not give, and why."""
    unsaid = {key: ours for key, (value, ours) in stated.items() if value is UNSAID}
    defaults = {key for key in unsaid if getattr(config, key) == getattr(type(config), key)}
    why = {key: "this kind's default" if key in defaults else "as the recipe says" for key in unsaid}
    return {key: f"{ours}, {why[key]}" for key, ours in unsaid.items()}


def _complete(found: Imported, wanted: dict[str, Tensor]) -> None:
    """A layer's biases are of q, k, v and o: where others have those of three, the fourth adds nothing. A mask token is
    in their config, which the draft's settings say, too.
    """
    for name in set(wanted) - set(found.weights):
        if name == MASK:
            found.weights[name], found.made[name] = wanted[name], f"{int(wanted[name])}, as the recipe says"
        if name.endswith("o_proj.bias") and (other := name.replace("o_proj", "q_proj")) in found.weights:
            found.weights[name] = torch.zeros_like(wanted[name], dtype=found.weights[other].dtype)
            found.made[name] = "zeros, as the file has none"


def _drop_head(found: Imported, head_VD: Tensor) -> None:
    """Of a draft that guesses with the target's."""
    tensor, ids = found.weights.pop(HEAD), found.weights.get(IDS)
    _require_same(HEAD, tensor, head_VD if ids is None else head_VD[ids], "head")
    found.dropped[HEAD], found.kept = "it is the target's head", found.kept - 1


def _require_same(name: str, tensor: Tensor, ours: Tensor, what: str) -> None:
    """Raises PipelineError where it is not the target's, up to rounding to half precision."""
    if tensor.shape != ours.shape or not torch.allclose(tensor.float(), ours.float(), rtol=2**-7, atol=1e-3):
        raise PipelineError(f"{name} is not the target's {what}: a draft with one of its own has no place here")


def _require_fit(source: Path, name: str, got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Raises PipelineError that names tensors without a place, missing ones and ones of other shapes."""
    unknown, missing = sorted(set(got) - set(wanted)), sorted(set(wanted) - set(got))
    both = [(key, list(got[key].shape), list(wanted[key].shape)) for key in wanted if key in got]
    said = [f"no place for {', '.join(unknown)}"] if unknown else []
    said += [f"{', '.join(missing)} missing"] if missing else []
    said += [f"{key} is {mine}, expected {ours}" for key, mine, ours in both if mine != ours]
    if said:
        raise PipelineError(
            f"{source} does not fit draft.{name}: {'; '.join(said)}. Set the draft's keys as it was trained (fc_bias, "
            "vocabulary, mlp_width, expert_width, experts, contrast, frame); biases of q, k, v on EAGLE's frame and "
            "experts that are no SwiGLU have no place in any"
        )
