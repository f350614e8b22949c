"""The drafts, one file a paper."""

from typing import Any

from pipeline.drafts.base import Draft
from pipeline.drafts.eagle import Eagle
from pipeline.drafts.jakiro import Jakiro
from pipeline.recipe.sections import DraftBase

DRAFTS: dict[str, type[Draft]] = {"eagle": Eagle, "jakiro": Jakiro}


def build(config: DraftBase, shapes: dict[str, Any]) -> Draft:
    """An uninitialised draft in the shapes of its target (`layers.shapes_of`)."""
    return DRAFTS[config.kind](config, shapes)


def parameter_count(draft: Draft) -> int:
    return sum(parameter.numel() for parameter in draft.parameters())
