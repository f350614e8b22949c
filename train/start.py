"""The draft at step 0: with random weights, those of another draft (`draft.NAME.start`), or the target's MTP head.

Guarantees: a recorded setting of that draft or its target that differs from the recipe's is refused, unless the recipe
allows it by name. Each row of the draft's own head stays with its token, whatever the draft's vocabulary is.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.artifacts import checkpoint
from pipeline.artifacts.imported import convert_draft
from pipeline.artifacts.published import download, has_own_format
from pipeline.basics.errors import PipelineError
from pipeline.basics.public import ON_HUB
from pipeline.drafts import TrainedDraft, build
from pipeline.drafts.native.files import read_head
from pipeline.drafts.parts.base import STARTS
from pipeline.drafts.parts.layers import draft_shapes, mask_padding
from pipeline.drafts.parts.names import DRAFT_TOKEN_IDS
from pipeline.features.schema import FeatureSpec
from pipeline.features.shards import FeatureStore
from pipeline.features.text import first_texts
from pipeline.lm.model import DTYPES, load_config, load_embed_head, load_tokenizer
from pipeline.lm.states import EmbeddingAndHead, Needs
from pipeline.recipe.identity import start_folder
from pipeline.recipe.recipe import Recipe
from pipeline.recipe.untrusted import TrainingFacts, parse_untrusted
from train.input.order import most_frequent_tokens

TARGET_KEYS = ("vocab_size", "target_layers")  # shapes taken from the current target
NOT_COMPARED = {*STARTS, "vocabulary"}  # the rows of the vocabulary are moved


@dataclass
class StartingDraft:
    draft: TrainedDraft
    facts: dict[str, Any]  # for checkpoint, provenance and card

    def __str__(self) -> str:
        kept_tokens, tokens = self.facts["tokens_kept"], self.facts["tokens"]
        return f"the weights of {self.facts['from']}, which has {kept_tokens:,} of its vocabulary's {tokens:,} tokens"

    def shapes(self, target: dict[str, Any]) -> dict[str, Any]:
        """Return the shapes of a draft that starts from this one."""
        start_shapes = {key: value for key, value in self.draft.shapes.items() if key != "known_tokens"}
        return start_shapes | {key: target[key] for key in TARGET_KEYS}

    def vocabulary(self, size: int) -> Tensor | None:
        """Return the start's vocabulary if it has `size` tokens, else None."""
        ids_U = self.draft.token_ids_U
        return ids_U if ids_U is not None and len(ids_U) == size else None

    def copy_weights_to(self, draft: TrainedDraft) -> None:
        """Copy its weights to `draft`, which is ready for step 0. A head's row whose token the start lacks is
        unchanged.

        Raise PipelineError if they do not fit.
        """
        weights, draft_weights = self.draft.state_dict(), draft.state_dict()
        draft_ids_U, start_ids_U = _target_ids(draft), _target_ids(self.draft)
        start_row_V = torch.full((max(draft.target_vocabulary, self.draft.target_vocabulary),), -1)
        start_row_V[start_ids_U] = torch.arange(len(start_ids_U))
        start_row_U = start_row_V[draft_ids_U]
        is_kept_U = start_row_U >= 0
        self.facts["tokens_kept"], self.facts["tokens"] = int(is_kept_U.sum()), len(draft_ids_U)
        try:
            if not torch.equal(draft_ids_U, start_ids_U):
                heads = {id(tensor) for head in draft.own_heads for tensor in head.parameters()}
                for name in [name for name, tensor in draft.named_parameters() if id(tensor) in heads]:
                    rows = draft_weights[name].clone()
                    rows[is_kept_U] = weights[name][start_row_U[is_kept_U]].to(rows.dtype)
                    weights[name] = rows
                weights.pop(DRAFT_TOKEN_IDS, None)
                weights |= {DRAFT_TOKEN_IDS: draft_ids_U} if DRAFT_TOKEN_IDS in draft_weights else {}
            draft.load_state_dict(weights)
        except (KeyError, RuntimeError) as error:
            raise PipelineError(f"draft.{draft.name}.start does not fit: {' '.join(str(error).split())}") from None


def _target_ids(draft: TrainedDraft) -> Tensor:
    """Return the target's id of each token of a draft's vocabulary."""
    return torch.arange(draft.target_vocabulary) if draft.token_ids_U is None else draft.token_ids_U


def read_start(recipe: Recipe, name: str, embed_head: EmbeddingAndHead, spec: FeatureSpec) -> StartingDraft | None:
    """Return what the recipe's draft `name` starts from; `spec` is that of the features it trains on.

    Raise PipelineError if there is no such draft, or if a setting of it differs that may not.
    """
    config, target = recipe.draft[name], draft_shapes(load_config(recipe.target))
    if config.start is None:
        return None
    on_hub = ON_HUB.fullmatch(config.start)
    folder = download(*on_hub.groups()) if on_hub else start_folder(config.start)
    facts = {"from": on_hub[1], "revision": on_hub[2]} if on_hub else {"from": folder.resolve().name}
    recorded: dict[str, str] = {}
    if has_own_format(folder):
        start_config = checkpoint.read_config(folder)
        draft = checkpoint.load_for_any_target(folder, start_config)
        facts |= {"sha256": start_config.weights_sha256, "target": start_config.target["model"]}
        recorded = {"target": start_config.target["fingerprint"]}
        trained = parse_untrusted(
            TrainingFacts, start_config.training, folder / checkpoint.CONFIG, "Begin with another"
        ).facts()
        recorded |= {key: trained[key] for key in ("template", "template_mark") if key in trained}
    else:
        draft, _, imported = convert_draft(folder, recipe, name, embed_head, any_vocabulary=True)
        facts["sha256"] = imported["sha256"]
    current_settings = {"target": spec.target, "template": spec.template_settings, "template_mark": spec.template}
    start_settings = asdict(draft.config) | _shapes(draft.shapes, draft.needs, draft) | recorded
    draft_settings = (
        asdict(config)
        | _shapes(target, config.needs(target["target_layers"]), draft)
        | {key: current_settings[key] for key in recorded}
    )
    return StartingDraft(
        draft, facts | {"differs": _require_allowed(name, facts, start_settings, draft_settings, config.start_differs)}
    )


def _shapes(all_shapes: dict[str, Any], needs: Needs, draft: TrainedDraft) -> dict[str, Any]:
    """Return the shapes of what a draft reads of its target, with layers by their numbers."""
    widths = {key: all_shapes[key] for key in ("hidden_size", "vocab_size")}
    layer = {"layer": all_shapes.get("layer")} if draft.has_target_layer else {}
    return widths | layer | {"auxiliary_layers": list(needs.auxiliary)}


def _require_allowed(
    name: str, facts: dict[str, Any], start_settings: dict[str, Any], draft_settings: dict[str, Any], allowed: list[str]
) -> list[str]:
    """Return the names of the settings that differ. Raise PipelineError for one that is not allowed, and for an allowed
    name that no setting has.
    """
    pairs = {
        key: (start_settings.get(key), draft_settings.get(key))
        for key in sorted({*start_settings, *draft_settings} - NOT_COMPARED)
    }
    differing = {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
    names = sorted({key.removesuffix("_mark") for key in differing})
    comparable = sorted({key.removesuffix("_mark") for key in pairs} | {"target", "template"})
    if unknown := sorted(set(allowed) - set(comparable)):
        raise PipelineError(f"draft.{name}.start_differs names {unknown[0]!r}: expected any of {', '.join(comparable)}")
    refused = [key for key in differing if key.removesuffix("_mark") not in allowed]
    if differences := [f"{key} is {differing[key][0]!r} there and {differing[key][1]!r} here" for key in refused]:
        target_text = f", a draft of {facts['target']}" if "target" in facts else ""
        raise PipelineError(
            f"draft.{name}.start, {facts['from']}{target_text}: {'; '.join(differences)}. Set the draft's keys as it "
            f"was trained; what is meant to differ, allow by name: draft.{name}.start_differs = {json.dumps(names)}"
        )
    return names


def new_draft(
    recipe: Recipe, name: str, embed_head: EmbeddingAndHead, store: FeatureStore, start: StartingDraft | None = None
) -> TrainedDraft:
    """Return the draft at step 0: a function of the recipe, its seed, the shards and what it starts from."""
    config = recipe.draft[name]
    shapes = draft_shapes(load_config(recipe.target))
    shapes = mask_padding(start.shapes(shapes) if start else shapes, load_tokenizer(recipe.target))
    draft = build(config, shapes)
    draft.name, draft.recompute, draft.compiled = name, recipe.train.recompute, recipe.train.compile
    draft.initialise(recipe.seed)
    if draft.token_ids_U is not None:
        size = len(draft.token_ids_U)
        ids_U = start.vocabulary(size) if start else None
        draft.set_vocabulary(most_frequent_tokens(store.texts, shapes["vocab_size"], size) if ids_U is None else ids_U)
    if config.runs_the_target:
        embed_head = load_embed_head(recipe.target, DTYPES[recipe.train.dtype])
    draft.bind(embed_head)
    if start is None:
        read_head(draft, recipe.target)
    draft.start_from_target(first_texts(store.texts))
    if start:
        start.copy_weights_to(draft)
        draft.has_weights = True
    return draft
