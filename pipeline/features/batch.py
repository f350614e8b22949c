"""From dialogues to a training batch. The one shift by one of the whole project is in `collate` and `trained`.

Input i is the pair (f_i, t_{i+1}); a term of horizon h answers at i with f_{i+h} and t_{i+1+h}.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.basics.accelerator import sent
from pipeline.features.schema import Row, decoded


@dataclass(frozen=True)
class Noise:
    """What an accelerator adds to one dialogue's input features: uniform, drawn there from a seed. Devices of another
    kind may draw other numbers from it.
    """

    row: int
    first: int  # input
    inputs: int
    half_width: float
    seed: tuple[int, ...]

    def add_to(self, hidden_BTD: Tensor) -> None:
        """In float32; then rounded as the features are."""
        mixed = np.random.SeedSequence(self.seed).generate_state(1, np.uint64)[0]
        generator = torch.Generator(hidden_BTD.device).manual_seed(int(mixed >> np.uint64(1)))
        part_TD = hidden_BTD[self.row, self.first : self.first + self.inputs]
        drawn_TD = torch.rand(part_TD.shape, generator=generator, device=part_TD.device)
        part_TD.copy_(part_TD.float() + (2 * drawn_TD - 1) * self.half_width)


@dataclass(frozen=True)
class Rows:
    """Trained places of a batch, as numbers below B T, and numbers of labels; all but `ends` where the batch is."""

    labels: Tensor  # those that any horizon answers [M], ascending
    inputs: dict[int, Tensor]  # by horizon: the inputs that are trained
    among: dict[int, Tensor]  # by horizon: their labels' numbers among the M
    ends: dict[int, list[int]]  # by horizon: how many of these lie before each chunk, and before the end


@dataclass
class Batch:
    """B rows padded on the right, each of one dialogue or of several, packed one behind the other. T counts inputs: one
    less than a dialogue's tokens.
    """

    hidden_BTD: Tensor  # f_i, with noise
    tokens_BT: Tensor  # t_{i+1}
    labels_BTD: Tensor  # f_{i+1}: the label of horizon 1 at i; of horizon h at i + 1 - h
    # horizon -> bool (B, T): input i has a trained label at this horizon. These stay on the host, wherever the rest is:
    # nobody has to ask a device which positions are trained, or how many.
    trained: dict[int, Tensor]
    totals: dict[int, int]  # horizon -> trained positions of the WHOLE global batch
    begins_BT: Tensor | None = None  # place of the first input of i's dialogue; None where each row is one dialogue
    auxiliary_BTSD: Tensor | None = None  # what the target's auxiliary layers put out at t_i, where a draft wants them
    before_BT: Tensor | None = None  # t_i
    step: int = 0  # of the optimiser
    documents: list[list[str]] = field(default_factory=list)  # each row's document ids
    # What is left to the device that the batch goes to: float8 to be multiplied, by name of its states; noise.
    scales: dict[str, Tensor] = field(default_factory=dict)
    noise: list[Noise] = field(default_factory=list)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        names = ("hidden_BTD", "tokens_BT", "labels_BTD", "begins_BT", "auxiliary_BTSD", "before_BT")
        tensors: Any = {name: x if (x := getattr(self, name)) is None else change(x) for name in names}
        return replace(self, **tensors, scales={name: change(scale) for name, scale in self.scales.items()})

    def to(self, device: torch.device, dtype: torch.dtype) -> "Batch":
        """There, whole: decoded, with its noise, floating numbers in `dtype`."""
        there = self._each(lambda x: x.to(device, non_blocking=True))
        states: Any = {name: decoded(getattr(there, name), scale) for name, scale in there.scales.items()}
        there = replace(there, **states, scales={}, noise=[])
        there = there._each(lambda x: x.to(dtype) if x.is_floating_point() else x)
        for one in self.noise:
            one.add_to(there.hidden_BTD)
        return there

    def pinned(self) -> "Batch":
        """In memory that a GPU reads by itself, so that `to` does not wait."""
        return self._each(Tensor.pin_memory)

    @property
    def states(self) -> list[Tensor]:
        """All that came from shards, a row first."""
        found = [x for x in (self.hidden_BTD, self.labels_BTD, self.auxiliary_BTSD) if x is not None]
        return [x.float() if x.dtype == torch.float8_e4m3fn else x for x in found]

    @property
    def following_BT(self) -> Tensor:
        """The token that each label's distribution is of, in the text itself: that after f_{i+1} is t_{i+2}."""
        return self.tokens_BT.roll(-1, 1)  # no position is trained whose next token does not exist

    def rows(self, horizons: set[int], chunk: int) -> Rows:
        """What terms of these horizons answer, in chunks of so many labels. The label of input i stands at i + h - 1.
        Worked out on the host, which knows the masks, and sent at once: the device is not asked.
        """
        inputs = {h: self.trained[h].flatten().nonzero()[:, 0] for h in sorted(horizons)}
        answered = torch.zeros(self.tokens_BT.numel(), dtype=torch.bool)
        for h, at in inputs.items():
            answered[at + h - 1] = True
        labels, number = answered.nonzero()[:, 0], answered.cumsum(0) - 1
        among = {h: number[at + h - 1] for h, at in inputs.items()}
        firsts = torch.arange(0, len(labels) + chunk, chunk)
        ends = {h: torch.searchsorted(numbers, firsts).tolist() for h, numbers in among.items()}
        all_of = [labels, *inputs.values(), *among.values()]
        there, *more = sent(torch.cat(all_of), self.labels_BTD.device).split([len(part) for part in all_of])
        of_inputs, of_among = more[: len(inputs)], more[len(inputs) :]
        return Rows(there, dict(zip(inputs, of_inputs, strict=True)), dict(zip(among, of_among, strict=True)), ends)

    def sums_by_dialogue(self, values_BTE: Tensor) -> tuple[Tensor, Tensor]:
        """Sums over a dialogue's trained positions (N, E), and how many these are (N); a dialogue is a number below
        B T.
        """
        trained_BT = sent(self.trained[1], values_BTE.device)
        rows, inputs = trained_BT.shape
        dialogues_BT = torch.arange(rows, device=trained_BT.device)[:, None] * inputs
        dialogues_BT = dialogues_BT + (0 if self.begins_BT is None else self.begins_BT)
        of_M = dialogues_BT.expand(rows, inputs).flatten().clamp_max(rows * inputs - 1)  # what pads has no weight below
        weights_BT1 = trained_BT[..., None].to(values_BTE.dtype)
        sums_NE = values_BTE.new_zeros(rows * inputs, values_BTE.shape[-1])
        sums_NE = sums_NE.index_add(0, of_M, (values_BTE * weights_BT1).flatten(0, 1))
        return sums_NE, values_BTE.new_zeros(rows * inputs).index_add(0, of_M, weights_BT1.flatten())

    def emptied(self) -> "Batch":
        """The same shape without content: its losses and gradients are 0."""
        empty = self._each(lambda x: torch.zeros_like(x) if x.is_floating_point() else x)
        return replace(empty, trained={h: torch.zeros_like(mask) for h, mask in self.trained.items()})


def trained(loss_mask: np.ndarray, horizon: int, rule: str) -> np.ndarray:
    """Which inputs i = 0 .. T-2 have a loss at `horizon`, as bool [T-1].

    "predicted": t_{i+1+h} exists and is the assistant's. "legacy": t_{i+h-1} is, as the released code has it: t_i for
    horizon 1 (EAGLE), t_{i+1} for Jakiro's branch ahead (the label must exist).
    """
    inputs = len(loss_mask) - 1
    out = np.zeros(inputs, dtype=bool)
    if rule == "predicted":
        exist = max(inputs - horizon, 0)  # inputs whose predicted token t_{i+1+h} exists
        out[:exist] = loss_mask[1 + horizon :]
    else:
        exist = max(inputs + 1 - horizon, 0)  # inputs whose label f_{i+h} exists
        out[:exist] = loss_mask[horizon - 1 : horizon - 1 + exist]
    return out


def collate(
    rows: Sequence[Row],
    horizons: list[int],
    rule: str,
    totals: dict[int, int],
    noises: Sequence[Tensor] | None = None,
    auxiliary: Sequence[int] = (),
    dtype: torch.dtype = torch.float32,
) -> Batch:
    """A batch of one dialogue a row. `noises`: a T-1 x D tensor for each dialogue."""
    given = None if noises is None else iter(noises)
    batch = collate_packed([[row] for row in rows], horizons, rule, totals, given, dtype=dtype, auxiliary=auxiliary)
    return replace(batch, begins_BT=None)


def collate_packed(
    packed: list[list[Row]],
    horizons: list[int],
    rule: str,
    totals: dict[int, int],
    noises: Iterator[Tensor] | None = None,
    width: int = 0,
    dtype: torch.dtype = torch.float32,
    auxiliary: Sequence[int] = (),
) -> Batch:
    """Pads, to at least `width` inputs, and shifts. `noises` yields what is added, in float32, to each dialogue's input
    features, never to its labels; then all is rounded to `dtype`. `auxiliary`: which of the rows' auxiliary states.
    """
    inputs = max(width, max(sum(len(row.input_ids) - 1 for row in rows) for rows in packed))
    shape = len(packed), inputs
    stored = packed[0][0].scales_TS is not None  # float8, which the device decodes
    dtype = packed[0][0].hidden_TD.dtype if stored else dtype
    hidden = torch.zeros(*shape, packed[0][0].hidden_TD.shape[1], dtype=dtype)
    labels = torch.zeros_like(hidden)
    states = torch.zeros(*shape, len(auxiliary), hidden.shape[-1], dtype=dtype) if auxiliary else None
    scales = {"hidden_BTD": torch.zeros(shape), "labels_BTD": torch.zeros(shape)} if stored else {}
    scales |= {"auxiliary_BTSD": torch.zeros(*shape, len(auxiliary))} if stored and auxiliary else {}
    before, tokens, begins = (torch.zeros(shape, dtype=torch.long) for _ in range(3))
    masks = {h: torch.zeros(shape, dtype=torch.bool) for h in horizons}
    for b, rows in enumerate(packed):
        begin = 0
        for row in rows:
            here = slice(begin, begin + len(row.input_ids) - 1)
            hidden[b, here] = row.hidden_TD[:-1] if noises is None else row.hidden_TD[:-1] + next(noises)
            labels[b, here] = row.hidden_TD[1:]
            if row.scales_TS is not None:
                scales["hidden_BTD"][b, here] = row.scales_TS[:-1, 0]
                scales["labels_BTD"][b, here] = row.scales_TS[1:, 0]
                if auxiliary:
                    scales["auxiliary_BTSD"][b, here] = row.scales_TS[:-1, [1 + place for place in auxiliary]]
            if states is not None:
                assert row.auxiliary_TKD is not None
                states[b, here] = row.auxiliary_TKD[:-1, list(auxiliary)].to(dtype)
            before[b, here], tokens[b, here] = (
                torch.from_numpy(ids.astype(np.int64)) for ids in (row.input_ids[:-1], row.input_ids[1:])
            )
            for h in horizons:
                masks[h][b, here] = torch.from_numpy(trained(row.loss_mask, h, rule))
            begins[b, here] = begin
            begin = here.stop
        begins[b, begin:] = begin
    documents = [[row.doc_id for row in rows] for rows in packed]
    return Batch(hidden, tokens, labels, masks, totals, begins, states, before, documents=documents, scales=scales)


def uniform_noise(row: Row, half_width: float, scaling: str, seed: tuple[int, ...]) -> Tensor:
    """U(-half_width, half_width) for the T-1 inputs of one dialogue; "legacy" scales it by 512 / T (EAGLE's code).

    It depends on the seed alone, not on the rank that draws it or on the dialogue's neighbours in a batch.
    """
    length, width = row.hidden_TD.shape
    values = np.random.default_rng(seed).random((length - 1, width), dtype=np.float32)
    return torch.from_numpy(values).mul_(2).sub_(1).mul_(float(np.float32(scaled(half_width, length, scaling))))


def scaled(half_width: float, length: int, scaling: str) -> float:
    """Of the noise of a dialogue of so many tokens."""
    return half_width * (512 / length if scaling == "legacy" else 1.0)
