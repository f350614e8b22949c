"""The mask token: its embedding is the input where a draft guesses without knowing the previous token."""

from typing import Any

import torch
from torch import Tensor

from pipeline.basics.errors import PipelineError
from pipeline.drafts.parts.module import DraftModule
from pipeline.drafts.parts.names import UNSET, Facts

MASK_TOKEN_ID = "mask_token_id"  # the buffer


class MaskTokenDraft(DraftModule):
    """A draft with a mask token. Its settings have `mask_token`: an id, or None. The checkpoint holds the id."""

    mask_token_id: Tensor

    def _add_mask_token(self) -> None:
        last, mask_token = self.target_vocabulary - 1, self.config.mask_token
        if mask_token is not None and mask_token > last:
            raise PipelineError(f"mask_token={mask_token}: the target's embedding has ids up to {last}")
        self.register_buffer(MASK_TOKEN_ID, torch.tensor(last if mask_token is None else mask_token))

    def start_from_target(self, texts: list[list[int]]) -> None:
        """Choose the mask token if none is set: the highest id that these texts lack.

        If the target's embedding is padded, the tokenizer does not have this id either.
        """
        if self.config.mask_token is not None:
            return
        used = set().union(*texts)
        free = next((token for token in reversed(range(self.target_vocabulary)) if token not in used), None)
        if free is None:
            raise PipelineError(
                f"draft {self.name!r}: the training texts have all {self.target_vocabulary} tokens, so none is free "
                "for the mask: set its mask_token to the id of a token that answers rarely have"
            )
        self.mask_token_id.fill_(free)


def mask_token_fact(draft: Any, config_json: dict[str, Any]) -> Facts:
    """Return the mask token of the file's config and of the draft's settings.

    Raises PipelineError if the file names two, and if neither the file nor the settings name one.
    """
    stated = {key: config_json[key] for key in ("pard_token", MASK_TOKEN_ID) if key in config_json}
    if len(set(map(str, stated.values()))) > 1:
        statements = " and ".join(f"{key}={token!r}" for key, token in stated.items())
        raise PipelineError(
            f"config.json says {statements}: which one is the mask token is not known. Correct a copy of it"
        )
    token, configured = next(iter(stated.values()), UNSET), draft.config.mask_token
    if token is UNSET and configured is None:
        raise PipelineError(
            f"neither config.json nor the recipe names the mask token: set draft.{draft.name}.mask_token to the id "
            "that the draft was trained with"
        )
    return {"mask_token": (token, configured)}
