"""The mask token: its embedding stands where a draft guesses without the token before."""

from typing import Any

import torch
from torch import Tensor

from pipeline.basics.errors import PipelineError
from pipeline.drafts.parts.module import DraftModule
from pipeline.drafts.parts.names import UNSAID, Facts

MASK = "mask_token_id"  # the buffer


class Masked(DraftModule):
    """Its settings have `mask_token`: an id, or None. Its checkpoint holds the one that it was trained with."""

    mask_token_id: Tensor

    def _add_mask_token(self) -> None:
        last, given = self.target_vocabulary - 1, self.config.mask_token
        if given is not None and given > last:
            raise PipelineError(f"mask_token={given}: the target's embedding has ids up to {last}")
        self.register_buffer(MASK, torch.tensor(last if given is None else given))

    def start_from_target(self, texts: list[list[int]]) -> None:
        """Chooses the mask token where none is given: the highest that these texts lack, hence one that the tokenizer
        lacks where the target's embedding is padded.
        """
        if self.config.mask_token is not None:
            return
        used = set().union(*texts)
        free = next((token for token in reversed(range(self.target_vocabulary)) if token not in used), None)
        if free is None:
            raise PipelineError(
                f"draft {self.name!r}: the training texts have all {self.target_vocabulary} tokens, so none can stand "
                "for what is yet to be guessed: set its mask_token to the id of a token that answers rarely have"
            )
        self.mask_token_id.fill_(free)


def mask_fact(draft: Any, theirs: dict[str, Any]) -> Facts:
    """Return what their config says of it, beside the draft's settings.

    Raises PipelineError where it says two, and where neither it nor the draft's settings name one.
    """
    stated = {key: theirs[key] for key in ("pard_token", MASK) if key in theirs}
    if len(set(map(str, stated.values()))) > 1:
        both = " and ".join(f"{key}={token!r}" for key, token in stated.items())
        raise PipelineError(f"config.json says {both}: which one is the mask token is not known. Correct a copy of it")
    token, ours = next(iter(stated.values()), UNSAID), draft.config.mask_token
    if token is UNSAID and ours is None:
        raise PipelineError(
            f"neither config.json nor the recipe names the mask token: set draft.{draft.name}.mask_token to the id "
            "that the draft was trained with"
        )
    return {"mask_token": (token, ours)}
