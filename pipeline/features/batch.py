"""From dialogues to a training batch. The one shift by one of the whole project is in this file.

Input i is the pair (f_i, t_{i+1}). A position is an input, from which something is predicted, and the place p of its
label: f_p, and hence the distribution of t_{p+1}. Positions follow from the text alone, before any state exists. They
come in groups, which the losses of a group share. The groups of EAGLE and Medusa are horizons: the label of input i is
f_{i+h}.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from pipeline.basics.accelerator import sent
from pipeline.features.schema import Row, decoded

Group = int | str  # a horizon, or a name
Seed = tuple[int, ...]


@dataclass(frozen=True)
class Positions:
    """M positions of one group; inputs and labels ascend. In a `Batch` both index its flattened (B, T) inputs: label
    f_p has the number of input p - 1, since labels_BTD[i] = f_{i+1}.
    """

    inputs: Tensor  # [M], int64
    labels: Tensor  # [M]

    def __len__(self) -> int:
        return len(self.inputs)


class ChoosesPositions(Protocol):
    """What a batch is made for; a draft's objective is one."""

    def positions(self, ids: np.ndarray, loss_mask: np.ndarray, seed: Seed = ()) -> dict[Group, Positions]:
        """By group, of a dialogue of T tokens: inputs below T - 1, labels below T. A function of the text and the seed,
        which differs by step and dialogue: what is drawn, is drawn from it, so that a resumed run and any number of
        ranks draw the same.
        """


@dataclass(frozen=True)
class Horizons:
    """Every trained input, for each horizon; nothing is drawn."""

    horizons: Sequence[int]

    def positions(self, ids: np.ndarray, loss_mask: np.ndarray, seed: Seed = ()) -> dict[Group, Positions]:
        found: dict[Group, Positions] = {}
        for horizon in self.horizons:
            inputs = torch.from_numpy(trained(loss_mask, horizon).nonzero()[0])
            found[horizon] = Positions(inputs, inputs + horizon)
        return found


def trained(loss_mask: np.ndarray, horizon: int) -> np.ndarray:
    """Which inputs i = 0 .. T-2 have a loss at `horizon`, as bool [T-1]: those whose t_{i+1+h} exists and is the
    assistant's.
    """
    inputs = len(loss_mask) - 1
    out = np.zeros(inputs, dtype=bool)
    out[: max(inputs - horizon, 0)] = loss_mask[1 + horizon :]
    return out


def counts(found: Sequence[dict[Group, Positions]]) -> dict[Group, int]:
    """How many positions each group has in some dialogues: a global batch's totals."""
    out: dict[Group, int] = {}
    for one in found:
        for group, positions in one.items():
            out[group] = out.get(group, 0) + len(positions)
    return out


@dataclass(frozen=True)
class Noise:
    """What is added to one dialogue's input features, never to its labels: uniform within +-half_width.

    It depends on the seed alone, not on the rank that draws it or on the dialogue's neighbours in a batch. Devices of
    another kind may draw other numbers from the seed.
    """

    row: int
    first: int  # input
    inputs: int
    half_width: float
    seed: tuple[int, ...]

    def drawn(self, width: int, device: torch.device) -> Tensor:
        """float32 [inputs, width]"""
        shape = self.inputs, width
        if device.type == "cpu":
            values = torch.from_numpy(np.random.default_rng(self.seed).random(shape, dtype=np.float32))
        else:
            mixed = np.random.SeedSequence(self.seed).generate_state(1, np.uint64)[0]
            generator = torch.Generator(device).manual_seed(int(mixed >> np.uint64(1)))
            values = torch.rand(shape, generator=generator, device=device)
        return values.mul_(2).sub_(1).mul_(float(np.float32(self.half_width)))

    def add_to(self, hidden_BTD: Tensor) -> None:
        """To float32."""
        part_TD = hidden_BTD[self.row, self.first : self.first + self.inputs]
        part_TD += self.drawn(part_TD.shape[1], part_TD.device)


@dataclass(frozen=True)
class Rows:
    """What is trained of a batch, as numbers below B T, and numbers of labels; all but `ends` where the batch is."""

    labels: Tensor  # those that any group has [M], ascending
    inputs: dict[Group, Tensor]  # by group: its inputs
    among: dict[Group, Tensor]  # by group: its labels' numbers among the M
    ends: dict[Group, list[int]]  # by group: how many of these lie before each chunk, and before the end


@dataclass
class Batch:
    """B rows padded on the right, each of one dialogue or of several, packed one behind the other. T counts inputs: one
    less than a dialogue's tokens.
    """

    hidden_BTD: Tensor  # f_i
    tokens_BT: Tensor  # t_{i+1}
    labels_BTD: Tensor  # f_{i+1}
    # These stay on the host, wherever the rest is: nobody has to ask a device which positions are trained, or how many.
    positions: dict[Group, Positions]
    totals: dict[Group, int]  # positions of the WHOLE global batch, by group
    begins_BT: Tensor | None = None  # place of the first input of i's dialogue; None where each row is one dialogue
    auxiliary_BTSD: Tensor | None = None  # what the target's auxiliary layers put out at t_i, where a draft wants them
    before_BT: Tensor | None = None  # t_i
    step: int = 0  # of the optimiser
    documents: list[list[str]] = field(default_factory=list)  # each row's document ids
    # What `to` does: float8 is multiplied, by name of its states; noise is added.
    scales: dict[str, Tensor] = field(default_factory=dict)
    noise: list[Noise] = field(default_factory=list)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        names = ("hidden_BTD", "tokens_BT", "labels_BTD", "begins_BT", "auxiliary_BTSD", "before_BT")
        tensors: Any = {name: x if (x := getattr(self, name)) is None else change(x) for name in names}
        return replace(self, **tensors, scales={name: change(scale) for name, scale in self.scales.items()})

    def to(self, device: torch.device, dtype: torch.dtype) -> "Batch":
        """There, whole: decoded, with its noise, then floating numbers rounded to `dtype`."""
        there = self._each(lambda x: x.to(device, non_blocking=True))
        states: Any = {name: decoded(getattr(there, name), scale) for name, scale in there.scales.items()}
        there = replace(there, **states, scales={}, noise=[])
        if self.noise:
            there.hidden_BTD = there.hidden_BTD.to(torch.float32, copy=True)
        for one in self.noise:
            one.add_to(there.hidden_BTD)
        return there._each(lambda x: x.to(dtype) if x.is_floating_point() else x)

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
        return self.tokens_BT.roll(-1, 1)  # where it does not exist nothing is trained, or recipes refuse losses of it

    def rows(self, groups: Sequence[Group], chunk: int) -> Rows:
        """What losses of these groups answer, in chunks of so many labels. Worked out on the host, and sent at once:
        the device is not asked.
        """
        chosen = {group: self.positions[group] for group in groups}
        answered = torch.zeros(self.tokens_BT.numel(), dtype=torch.bool)
        for one in chosen.values():
            answered[one.labels] = True
        labels, number = answered.nonzero()[:, 0], answered.cumsum(0) - 1
        inputs = {group: one.inputs for group, one in chosen.items()}
        among = {group: number[one.labels] for group, one in chosen.items()}
        firsts = torch.arange(0, len(labels) + chunk, chunk)
        ends = {group: torch.searchsorted(numbers, firsts).tolist() for group, numbers in among.items()}
        all_of = [labels, *inputs.values(), *among.values()]
        there, *more = sent(torch.cat(all_of), self.labels_BTD.device).split([len(part) for part in all_of])
        of_inputs, of_among = more[: len(inputs)], more[len(inputs) :]
        return Rows(there, dict(zip(inputs, of_inputs, strict=True)), dict(zip(among, of_among, strict=True)), ends)

    def sums_by_dialogue(self, values_BTE: Tensor) -> tuple[Tensor, Tensor]:
        """Return sums over a dialogue's inputs that predict the next token (N, E), and how many these are (N); a
        dialogue is a number below B T.
        """
        inputs_M = sent(self.positions[1].inputs, values_BTE.device)
        size, width = self.tokens_BT.numel(), self.tokens_BT.shape[1]
        of_M = inputs_M - inputs_M % width
        if self.begins_BT is not None:
            of_M = of_M + self.begins_BT.flatten()[inputs_M]
        sums_NE = values_BTE.new_zeros(size, values_BTE.shape[-1])
        sums_NE = sums_NE.index_add(0, of_M, values_BTE.flatten(0, 1).index_select(0, inputs_M))
        return sums_NE, values_BTE.new_zeros(size).index_add(0, of_M, values_BTE.new_ones(len(of_M)))

    def emptied(self) -> "Batch":
        """The same shape without content: its losses and gradients are 0."""
        empty = self._each(lambda x: torch.zeros_like(x) if x.is_floating_point() else x)
        none = torch.zeros(0, dtype=torch.long)
        return replace(empty, positions={group: Positions(none, none) for group in self.positions})


def collate(
    rows: Sequence[Row], objective: ChoosesPositions, totals: dict[Group, int], auxiliary: Sequence[int] = ()
) -> Batch:
    """A batch of one dialogue a row."""
    positions = (objective.positions(row.input_ids, row.loss_mask) for row in rows)
    return replace(collate_packed([[row] for row in rows], positions, totals, auxiliary), begins_BT=None)


def collate_packed(
    packed: list[list[Row]],
    positions: Iterator[dict[Group, Positions]],
    totals: dict[Group, int],
    auxiliary: Sequence[int] = (),
    width: int = 0,
) -> Batch:
    """Pads, to at least `width` inputs, and shifts. States stay as they are stored. `positions` yields each dialogue's.
    `auxiliary`: which of the rows' auxiliary states.
    """
    inputs = max(width, max(sum(len(row.input_ids) - 1 for row in rows) for rows in packed))
    shape, one = (len(packed), inputs), packed[0][0]
    hidden = torch.zeros(*shape, one.hidden_TD.shape[1], dtype=one.hidden_TD.dtype)
    labels = torch.zeros_like(hidden)
    states = torch.zeros(*shape, len(auxiliary), hidden.shape[-1], dtype=hidden.dtype) if auxiliary else None
    scales = {}
    if one.scales_TS is not None:  # float8, which `Batch.to` decodes
        scales = {"hidden_BTD": torch.zeros(shape), "labels_BTD": torch.zeros(shape)}
        scales |= {"auxiliary_BTSD": torch.zeros(*shape, len(auxiliary))} if auxiliary else {}
    before, tokens, begins = (torch.zeros(shape, dtype=torch.long) for _ in range(3))
    chosen: dict[Group, list[tuple[Tensor, Tensor]]] = {}
    for b, rows in enumerate(packed):
        begin = 0
        for row in rows:
            here = slice(begin, begin + len(row.input_ids) - 1)
            hidden[b, here], labels[b, here] = row.hidden_TD[:-1], row.hidden_TD[1:]
            if row.scales_TS is not None:
                scales["hidden_BTD"][b, here] = row.scales_TS[:-1, 0]
                scales["labels_BTD"][b, here] = row.scales_TS[1:, 0]
                if auxiliary:
                    scales["auxiliary_BTSD"][b, here] = row.scales_TS[:-1, [1 + place for place in auxiliary]]
            if states is not None:
                assert row.auxiliary_TKD is not None
                states[b, here] = row.auxiliary_TKD[:-1, list(auxiliary)]
            ids = torch.from_numpy(row.input_ids.astype(np.int64))
            before[b, here], tokens[b, here] = ids[:-1], ids[1:]
            for group, found in next(positions).items():
                at = b * inputs + begin
                chosen.setdefault(group, []).append((found.inputs + at, found.labels + (at - 1)))
            begins[b, here] = begin
            begin = here.stop
        begins[b, begin:] = begin
    documents = [[row.doc_id for row in rows] for rows in packed]
    flat = {group: Positions(*map(torch.cat, zip(*parts, strict=True))) for group, parts in chosen.items()}
    return Batch(hidden, tokens, labels, flat, totals, begins, states, before, documents=documents, scales=scales)
