"""The weights of another draft that a training begins with (`draft.NAME.start`).

Guarantees: what of that draft and its target is recorded and differs here is refused unless the recipe allows it by
name. Each row of a head of the draft's own stays with its token, whatever the draft's vocabulary is here.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.artifacts import checkpoint
from pipeline.artifacts.imported import converted
from pipeline.artifacts.published import download, is_ours
from pipeline.basics.errors import PipelineError
from pipeline.drafts import TrainedDraft
from pipeline.drafts.parts.base import STARTS
from pipeline.drafts.parts.layers import shapes_of
from pipeline.drafts.parts.names import IDS
from pipeline.features.schema import FeatureSpec
from pipeline.lm.embedding_head import EmbeddingAndHead
from pipeline.lm.model import load_config
from pipeline.lm.states import Needs
from pipeline.recipe.identity import start_folder
from pipeline.recipe.recipe import Recipe
from pipeline.recipe.sections import ON_HUB
from pipeline.recipe.untrusted import Trained, parse_untrusted

OWN = ("vocab_size", "target_layers")  # of a draft's shapes: the target's of now
APART = {*STARTS, "vocabulary"}  # its rows are moved


@dataclass
class Start:
    draft: TrainedDraft
    facts: dict[str, Any]  # for checkpoint, provenance and card

    def __str__(self) -> str:
        kept, tokens = self.facts["tokens_kept"], self.facts["tokens"]
        return f"the weights of {self.facts['from']}, which has {kept:,} of its vocabulary's {tokens:,} tokens"

    def shapes(self, target: dict[str, Any]) -> dict[str, Any]:
        """Those of a draft that goes on from it."""
        own = {key: value for key, value in self.draft.shapes.items() if key != "known_tokens"}
        return own | {key: target[key] for key in OWN}

    def vocabulary(self, size: int) -> Tensor | None:
        """The start's, where that has so many tokens."""
        ids_U = self.draft.token_ids_U
        return ids_U if ids_U is not None and len(ids_U) == size else None

    def give(self, draft: TrainedDraft) -> None:
        """Gives its weights to `draft`, which is ready for step 0. A head's row whose token the start lacks stays.

        Raises PipelineError where they do not fit.
        """
        weights, mine = self.draft.state_dict(), draft.state_dict()
        here_U, there_U = _tokens(draft), _tokens(self.draft)
        place_V = torch.full((max(draft.target_vocabulary, self.draft.target_vocabulary),), -1)
        place_V[there_U] = torch.arange(len(there_U))
        place_U = place_V[here_U]
        kept_U = place_U >= 0
        self.facts["tokens_kept"], self.facts["tokens"] = int(kept_U.sum()), len(here_U)
        try:
            if not torch.equal(here_U, there_U):
                heads = {id(tensor) for head in draft.own_heads for tensor in head.parameters()}
                for name in [name for name, tensor in draft.named_parameters() if id(tensor) in heads]:
                    rows = mine[name].clone()
                    rows[kept_U] = weights[name][place_U[kept_U]].to(rows.dtype)
                    weights[name] = rows
                weights.pop(IDS, None)
                weights |= {IDS: here_U} if IDS in mine else {}
            draft.load_state_dict(weights)
        except (KeyError, RuntimeError) as error:
            raise PipelineError(f"draft.{draft.name}.start does not fit: {' '.join(str(error).split())}") from None


def _tokens(draft: TrainedDraft) -> Tensor:
    """The target's id of each token of a draft's vocabulary."""
    return torch.arange(draft.target_vocabulary) if draft.token_ids_U is None else draft.token_ids_U


def read_start(recipe: Recipe, name: str, embed_head: EmbeddingAndHead, spec: FeatureSpec) -> Start | None:
    """What the recipe's draft `name` begins with; `spec`: of the features that it trains on.

    Raises PipelineError where there is no such draft, or where something of it differs that may not.
    """
    config, target = recipe.draft[name], shapes_of(load_config(recipe.target))
    if config.start is None:
        return None
    on_hub = ON_HUB.fullmatch(config.start)
    folder = download(*on_hub.groups()) if on_hub else start_folder(config.start)
    facts = {"from": on_hub[1], "revision": on_hub[2]} if on_hub else {"from": folder.resolve().name}
    recorded: dict[str, str] = {}
    if is_ours(folder):
        saved = checkpoint.read_config(folder)
        draft = checkpoint.of_any_target(folder, saved)
        facts |= {"sha256": saved.weights_sha256, "target": saved.target["model"]}
        recorded = {"target": saved.target["fingerprint"]}
        trained = parse_untrusted(Trained, saved.training, folder / checkpoint.CONFIG, "Begin with another").facts()
        recorded |= {key: trained[key] for key in ("template", "template_mark") if key in trained}
    else:
        draft, _, imported = converted(folder, recipe, name, embed_head, any_vocabulary=True)
        facts["sha256"] = imported["sha256"]
    now = {"target": spec.target, "template": spec.template_settings, "template_mark": spec.template}
    there = asdict(draft.config) | _shapes(draft.shapes, draft.needs) | recorded
    here = asdict(config) | _shapes(target, config.needs(target["target_layers"])) | {key: now[key] for key in recorded}
    return Start(draft, facts | {"differs": _require_allowed(name, facts, there, here, config.start_differs)})


def _shapes(shapes: dict[str, Any], needs: Needs) -> dict[str, Any]:
    """Of what a draft reads of its target; layers by their numbers."""
    widths = {key: shapes[key] for key in ("hidden_size", "vocab_size")}
    return widths | {"auxiliary_layers": list(needs.auxiliary)}


def _require_allowed(
    name: str, facts: dict[str, Any], there: dict[str, Any], here: dict[str, Any], allowed: list[str]
) -> list[str]:
    """The names of what differs. Raises PipelineError for those that are not allowed, and for an allowed name that
    nothing has.
    """
    both = {key: (there.get(key), here.get(key)) for key in sorted({*there, *here} - APART)}
    differ = {key: pair for key, pair in both.items() if pair[0] != pair[1]}
    names = sorted({key.removesuffix("_mark") for key in differ})
    known = sorted({key.removesuffix("_mark") for key in both} | {"target", "template"})
    if odd := sorted(set(allowed) - set(known)):
        raise PipelineError(f"draft.{name}.start_differs names {odd[0]!r}: expected any of {', '.join(known)}")
    told = [key for key in differ if key.removesuffix("_mark") not in allowed]
    if said := [f"{key} is {differ[key][0]!r} there and {differ[key][1]!r} here" for key in told]:
        of = f", a draft of {facts['target']}" if "target" in facts else ""
        raise PipelineError(
            f"draft.{name}.start, {facts['from']}{of}: {'; '.join(said)}. Set the draft's keys as it was trained; what "
            f"is meant to differ, allow by name: draft.{name}.start_differs = {json.dumps(names)}"
        )
    return names
