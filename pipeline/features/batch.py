"""Training batches, made of dialogues. This file and positions.py have the project's only shift by one."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.basics.accelerator import pad_width, to_device
from pipeline.features.positions import Group, PositionChooser, Positions
from pipeline.features.schema import TextRow, dequantise
from pipeline.lm.states import Needs, States

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Noise:
    """Uniform noise within +-half_width, added to one dialogue's input features and never to its labels.

    It depends on the seed alone, not on the rank that draws it or on the dialogue's neighbours in a batch. A different
    kind of device may draw different numbers from the same seed.
    """

    row: int
    first: int  # number of the dialogue's first input in the row
    inputs: int  # number of inputs
    half_width: float
    seed: tuple[int, ...]

    def draw(self, width: int, device: torch.device) -> Tensor:
        """Return the noise, float32 [inputs, width]."""
        shape = self.inputs, width
        if device.type == "cpu":
            values = torch.from_numpy(np.random.default_rng(self.seed).random(shape, dtype=np.float32))
        else:
            mixed = np.random.SeedSequence(self.seed).generate_state(1, np.uint64)[0]
            generator = torch.Generator(device).manual_seed(int(mixed >> np.uint64(1)))
            values = torch.rand(shape, generator=generator, device=device)
        return values.mul_(2).sub_(1).mul_(float(np.float32(self.half_width)))

    def add_to(self, hidden_BTD: Tensor) -> None:
        """Add the noise in place to float32 states."""
        part_TD = hidden_BTD[self.row, self.first : self.first + self.inputs]
        part_TD += self.draw(part_TD.shape[1], part_TD.device)


@dataclass(frozen=True)
class LossRows:
    """The trained inputs and labels of a batch, as numbers below B T. All but `ends` are on the batch's device."""

    labels: Tensor  # the labels of all groups [M], ascending
    inputs: dict[Group, Tensor]  # by group: its inputs
    label_indices: dict[Group, Tensor]  # by group: the indices of its labels in `labels`
    chunk_ends: dict[Group, list[int]]  # by group: the number of its labels before each chunk, and before the end
    weights: dict[Group, Tensor]  # by group: the weights of its positions, if they are not 1


@dataclass
class Batch:
    """B rows padded on the right; each holds one dialogue, or several, packed one after the other. T counts inputs: one
    less than a dialogue's tokens.

    A dialogue's states f_0 .. f_{L-1} are there once: the features of its inputs are all but the last, their labels all
    but the first. So a row has as many states as inputs and dialogues.
    """

    final_BLD: Tensor  # the states of the dialogues of each row, one dialogue after the other
    tokens_BT: Tensor  # t_{i+1}
    # These stay on the host, so that the host knows without a copy which positions are trained, and how many.
    positions: dict[Group, Positions]
    totals: dict[Group, int]  # positions of the WHOLE global batch, by group
    begins_BT: Tensor | None = None  # index of the first input of i's dialogue; None if each row is one dialogue
    auxiliary_BTSD: Tensor | None = None  # outputs of the target's auxiliary layers at t_i, if the draft uses them
    before_BT: Tensor | None = None  # t_i
    noisy_BTD: Tensor | None = None  # f_i with its noise, made by `to`; None: there is none
    step: int = 0  # of the optimiser
    documents: list[list[str]] = field(default_factory=list)  # each row's document ids
    lengths: list[list[int]] = field(default_factory=list)  # the inputs of each row's dialogues
    # Applied by `to`: the scales of float8 states, by the field that they belong to, and the noise.
    scales: dict[str, Tensor] = field(default_factory=dict)
    noise: list[Noise] = field(default_factory=list)

    def _map(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        names = ("final_BLD", "tokens_BT", "begins_BT", "auxiliary_BTSD", "before_BT", "noisy_BTD")
        tensors: Any = {name: x if (x := getattr(self, name)) is None else change(x) for name in names}
        return replace(self, **tensors, scales={name: change(scale) for name, scale in self.scales.items()})

    def to(self, device: torch.device, dtype: torch.dtype) -> "Batch":
        """Return the batch on a device: float8 decoded, noise added, then floating-point values rounded to `dtype`."""
        batch = self._map(lambda x: x.to(device, non_blocking=True))
        states: Any = {name: dequantise(getattr(batch, name), scale) for name, scale in batch.scales.items()}
        batch = replace(batch, **states, scales={}, noise=[])
        if self.noise:
            batch.noisy_BTD = batch.hidden_BTD.float()
            for noise in self.noise:
                noise.add_to(batch.noisy_BTD)
        return batch._map(lambda x: x.to(dtype) if x.is_floating_point() else x)

    def pin_memory(self) -> "Batch":
        """Return the batch in page-locked memory, from which `to` copies to a GPU without blocking."""
        return self._map(Tensor.pin_memory)

    @property
    def hidden_BTD(self) -> Tensor:
        """The features f_i of the inputs, with their noise."""
        if self.noisy_BTD is not None:
            return self.noisy_BTD
        places_BT = self._places_BT(0)
        return self.final_BLD.flatten(0, 1).index_select(0, places_BT.flatten()).unflatten(0, places_BT.shape)

    def labels_at(self, numbers_M: Tensor) -> Tensor:
        """Return the labels f_{i+1} (M, D) of the inputs with these numbers, below B T."""
        return self.final_BLD.flatten(0, 1).index_select(0, self._places_BT(1).flatten()[numbers_M])

    def _places_BT(self, shift: int) -> Tensor:
        """Return the place of f_{i+shift} in the flattened `final_BLD` for each input; `shift` is 0 or 1."""
        (count, width), length, device = self.tokens_BT.shape, self.final_BLD.shape[1], self.tokens_BT.device
        inputs_T = torch.arange(width, device=device)
        places_BT = inputs_T.expand(count, width)
        if self.begins_BT is not None:  # one state more for each dialogue before this one; padding counts as one
            places_BT = places_BT + (self.begins_BT == inputs_T).cumsum(1) - 1
        return (places_BT + shift).clamp_max(length - 1) + length * torch.arange(count, device=device)[:, None]

    def select(self, needs: Needs) -> Tensor:
        """Return the states (B, T, S, D) that the draft reads at each input."""
        if not needs.final:
            assert self.auxiliary_BTSD is not None
            return self.auxiliary_BTSD
        return States(self.hidden_BTD, self.auxiliary_BTSD, needs.auxiliary).select(needs)

    @property
    def states(self) -> list[Tensor]:
        """The states that came from shards; dimension 0 is the row."""
        tensors = [x for x in (self.final_BLD, self.auxiliary_BTSD) if x is not None]
        return [x.float() if x.dtype == torch.float8_e4m3fn else x for x in tensors]

    @property
    def spans(self) -> list[tuple[slice, int, int]]:
        """The texts in the rows: (rows, first place, the place after the last). What follows a packed row's dialogues
        is a text of its own; a row of one dialogue is one text with its padding.
        """
        width = self.tokens_BT.shape[1]
        if self.begins_BT is None:
            return [(slice(None), 0, width)]
        assert len(self.lengths) == len(self.tokens_BT), "a packed batch has the lengths of its dialogues"
        spans = []
        for row, lengths in enumerate(self.lengths):
            ends = [0, *accumulate(lengths), width]
            spans += [(slice(row, row + 1), begin, end) for begin, end in pairwise(ends) if begin < end]
        return spans

    @property
    def following_BT(self) -> Tensor:
        """The token that each label's distribution predicts, taken from the text: after f_{i+1} comes t_{i+2}."""
        # Inputs without such a token are not trained, or recipes refuse losses that use it.
        return self.tokens_BT.roll(-1, 1)

    def rows(self, groups: Sequence[Group], chunk: int) -> LossRows:
        """Return the rows that the losses of these groups are computed on, in chunks of `chunk` labels. They are
        computed on the host and copied once, so the host never waits for the device.
        """
        chosen = {group: self.positions[group] for group in groups}
        is_label = torch.zeros(self.tokens_BT.numel(), dtype=torch.bool)
        for positions in chosen.values():
            is_label[positions.labels] = True
        labels, number = is_label.nonzero()[:, 0], is_label.cumsum(0) - 1
        inputs = {group: positions.inputs for group, positions in chosen.items()}
        label_indices = {group: number[positions.labels] for group, positions in chosen.items()}
        firsts = torch.arange(0, len(labels) + chunk, chunk)
        chunk_ends = {group: torch.searchsorted(numbers, firsts).tolist() for group, numbers in label_indices.items()}
        tensors = [labels, *inputs.values(), *label_indices.values()]
        labels_M, *parts = to_device(torch.cat(tensors), self.tokens_BT.device).split([len(part) for part in tensors])
        input_parts, label_parts = parts[: len(inputs)], parts[len(inputs) :]
        return LossRows(
            labels_M,
            dict(zip(inputs, input_parts, strict=True)),
            dict(zip(label_indices, label_parts, strict=True)),
            chunk_ends,
            {g: to_device(x.weights, self.tokens_BT.device) for g, x in chosen.items() if x.weights is not None},
        )

    def sums_by_dialogue(self, values_BTE: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums over each dialogue's inputs that predict the next token (N, E), and the number of these
        inputs (N). A dialogue is numbered by its first input, below B T.
        """
        inputs_M = to_device(self.positions[1].inputs, values_BTE.device)
        size, width = self.tokens_BT.numel(), self.tokens_BT.shape[1]
        of_M = inputs_M - inputs_M % width
        if self.begins_BT is not None:
            of_M = of_M + self.begins_BT.flatten()[inputs_M]
        sums_NE = values_BTE.new_zeros(size, values_BTE.shape[-1])
        sums_NE = sums_NE.index_add(0, of_M, values_BTE.flatten(0, 1).index_select(0, inputs_M))
        return sums_NE, values_BTE.new_zeros(size).index_add(0, of_M, values_BTE.new_ones(len(of_M)))

    def empty_copy(self) -> "Batch":
        """Return a batch of the same shape without content: its losses and gradients are 0."""
        empty = self._map(lambda x: torch.zeros_like(x) if x.is_floating_point() else x)
        none = torch.zeros(0, dtype=torch.long)
        return replace(empty, positions={group: Positions(none, none) for group in self.positions})


def collate(
    rows: Sequence[TextRow],
    objective: PositionChooser,
    totals: dict[Group, int],
    auxiliary: Sequence[int] = (),
    device: torch.device = CPU,
) -> Batch:
    """Return a batch of one dialogue a row, on the host, with the width that `device` is to get."""
    positions = (objective.positions(row.input_ids, row.loss_mask) for row in rows)
    width = pad_width(max(len(row.input_ids) - 1 for row in rows), device)
    return replace(collate_packed([[row] for row in rows], positions, totals, auxiliary, width), begins_BT=None)


def collate_packed(
    packed: list[list[TextRow]],
    positions: Iterator[dict[Group, Positions]],
    totals: dict[Group, int],
    auxiliary: Sequence[int] = (),
    width: int = 0,
) -> Batch:
    """Return a batch of rows of packed dialogues, padded to at least `width` inputs and shifted. States stay as they
    are stored. `positions` yields the positions of each dialogue. `auxiliary`: indices of the auxiliary states to use.
    """
    inputs = max(width, max(sum(len(row.input_ids) - 1 for row in rows) for rows in packed))
    shape, first_row = (len(packed), inputs), packed[0][0]
    long_shape = len(packed), inputs + max(map(len, packed))
    final = torch.zeros(*long_shape, first_row.hidden_TD.shape[1], dtype=first_row.hidden_TD.dtype)
    states = torch.zeros(*shape, len(auxiliary), final.shape[-1], dtype=final.dtype) if auxiliary else None
    scales = {}
    if first_row.scales_TS is not None:  # float8, which `Batch.to` decodes
        scales = {"final_BLD": torch.zeros(long_shape)}
        scales |= {"auxiliary_BTSD": torch.zeros(*shape, len(auxiliary))} if auxiliary else {}
    before, tokens, begins = (torch.zeros(shape, dtype=torch.long) for _ in range(3))
    chosen: dict[Group, list[tuple[Tensor, Tensor, Tensor | None]]] = {}
    for b, rows in enumerate(packed):
        begin = place = 0
        for row in rows:
            span, states_span = slice(begin, begin + len(row.input_ids) - 1), slice(place, place + len(row.input_ids))
            final[b, states_span] = row.hidden_TD
            if row.scales_TS is not None:
                scales["final_BLD"][b, states_span] = row.scales_TS[:, 0]
                if auxiliary:
                    scales["auxiliary_BTSD"][b, span] = row.scales_TS[:-1, [1 + place for place in auxiliary]]
            if states is not None:
                assert row.auxiliary_TKD is not None
                states[b, span] = row.auxiliary_TKD[:-1, list(auxiliary)]
            ids = torch.from_numpy(row.input_ids.astype(np.int64))
            before[b, span], tokens[b, span] = ids[:-1], ids[1:]
            for group, chosen_here in next(positions).items():
                at = b * inputs + begin
                parts = chosen_here.inputs + at, chosen_here.labels + (at - 1), chosen_here.weights
                chosen.setdefault(group, []).append(parts)
            begins[b, span] = begin
            if span.stop > begin:  # one token alone is no input
                begin, place = span.stop, states_span.stop
        begins[b, begin:] = begin
    documents = [[row.doc_id for row in rows] for rows in packed]
    flat = {group: Positions(*map(_join, zip(*parts, strict=True))) for group, parts in chosen.items()}
    lengths = [[len(row.input_ids) - 1 for row in rows] for rows in packed]
    return Batch(
        final, tokens, flat, totals, begins, states, before,
        documents=documents, lengths=lengths, scales=scales,
    )  # fmt: skip


def _join(parts: tuple[Any, ...]) -> Any:
    """Return the parts as one tensor; None if they are None."""
    return None if parts[0] is None else torch.cat(parts)
