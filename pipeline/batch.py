"""From dialogues to a training batch. The one shift by one of the whole project is in `collate` and `trained`.

Input i is the pair (f_i, t_{i+1}); a branch of horizon h answers at i with f_{i+h} and t_{i+1+h}.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pipeline.features.schema import Row


@dataclass
class Batch:
    """B dialogues padded on the right. T counts inputs: one less than the longest dialogue's tokens."""

    hidden_BTD: Tensor  # f_i, with noise
    tokens_BT: Tensor  # t_{i+1}
    labels_BTD: Tensor  # f_{i+1}: the label of horizon 1 at i; of horizon h at i + 1 - h
    trained: dict[int, Tensor]  # horizon -> bool (B, T): input i has a trained label at this horizon
    totals: dict[int, int]  # horizon -> trained positions of the WHOLE global batch

    def to(self, device: torch.device, dtype: torch.dtype) -> "Batch":
        def moved(x: Tensor) -> Tensor:
            return x.to(device, dtype if x.is_floating_point() else None, non_blocking=True)

        trained = {h: moved(mask) for h, mask in self.trained.items()}
        return Batch(moved(self.hidden_BTD), moved(self.tokens_BT), moved(self.labels_BTD), trained, self.totals)


def trained(loss_mask: np.ndarray, horizon: int, rule: str) -> np.ndarray:
    """Which inputs i = 0 .. T-2 have a loss at `horizon`, as bool [T-1].

    "predicted": t_{i+1+h} exists and is the assistant's. "legacy": t_i is, as EAGLE's code has it (the label must exist).
    """
    inputs = len(loss_mask) - 1
    out = np.zeros(inputs, dtype=bool)
    if rule == "predicted":
        exist = max(inputs - horizon, 0)  # inputs whose predicted token t_{i+1+h} exists
        out[:exist] = loss_mask[1 + horizon :]
    else:
        exist = max(inputs + 1 - horizon, 0)  # inputs whose label f_{i+h} exists
        out[:exist] = loss_mask[:exist]
    return out


def collate(
    rows: list[Row], horizons: list[int], rule: str, totals: dict[int, int], noises: list[Tensor] | None = None
) -> Batch:
    """Pads and shifts. `noises` (one T-1 x D tensor a row) are added to the input features, never to the labels."""
    inputs = max(len(row.input_ids) for row in rows) - 1
    width = rows[0].hidden_TD.shape[1]
    hidden = torch.zeros(len(rows), inputs, width)
    labels = torch.zeros(len(rows), inputs, width)
    tokens = torch.zeros(len(rows), inputs, dtype=torch.long)
    masks = {h: torch.zeros(len(rows), inputs, dtype=torch.bool) for h in horizons}
    for b, row in enumerate(rows):
        n = len(row.input_ids) - 1
        hidden[b, :n] = row.hidden_TD[:-1]
        labels[b, :n] = row.hidden_TD[1:]
        tokens[b, :n] = torch.from_numpy(row.input_ids[1:].astype(np.int64))
        if noises is not None:
            hidden[b, :n] += noises[b]
        for h in horizons:
            masks[h][b, :n] = torch.from_numpy(trained(row.loss_mask, h, rule))
    return Batch(hidden, tokens, labels, masks, totals)


def uniform_noise(row: Row, half_width: float, scaling: str, seed: tuple[int, ...]) -> Tensor:
    """U(-half_width, half_width) for the T-1 inputs of one dialogue; "legacy" scales it by 512 / T (EAGLE's code).

    It depends on the seed alone, not on the rank that draws it or on the dialogue's neighbours in a batch.
    """
    length, width = row.hidden_TD.shape
    scale = half_width * (512 / length if scaling == "legacy" else 1.0)
    values = np.random.default_rng(seed).random((length - 1, width), dtype=np.float32)
    return torch.from_numpy((2 * values - 1) * np.float32(scale))
