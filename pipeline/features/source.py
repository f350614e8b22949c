"""Where the target's hidden states and answers come from: one protocol, whatever computes them.

The dump, its answers to calibration prompts, `preprocess.verify` and regeneration ask a `FeatureSource`; none of them
loads a target.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from pipeline.decoding.generate import Sampling
from pipeline.features.schema import POST_FINAL_NORM


@dataclass(frozen=True)
class SourceIdentity:
    """What the states are; every shard and manifest records it (`FeatureSpec`), and a trainer compares it."""

    engine: str
    version: str  # of the engine
    dtype: str  # in which the target computes
    layers: tuple[int, ...]  # decoder layers, counted from 1, whose outputs follow the last state; not normed
    norm_stage: str = POST_FINAL_NORM  # of the last state


@dataclass(frozen=True)
class Prompt:
    """A text to be continued, and the seed of its answer's random numbers, which depend on nothing else."""

    tokens: list[int]
    seed: int = 0


@dataclass(frozen=True)
class Answer:
    """What the target says to a prompt: its tokens, the stop token included, and, where they were asked for, the states
    of prompt and answer ([T, S, D], as `FeatureSource.states` gives them). In one pass nothing is computed behind the
    last token: its state, which nothing reads, is 0.
    """

    tokens: list[int]
    states_TSD: Tensor | None = None


class FeatureSource(Protocol):
    """A loaded target. Its methods may be called by several threads at once."""

    identity: SourceIdentity
    tokenizer: Any
    positions: int  # that a text may have
    one_pass: bool  # answers bring their states from the pass that gave them
    stop_ids: frozenset[int]

    def states(self, batch: Sequence[Sequence[int]]) -> Iterator[Tensor]:
        """``states_TSD`` of each text, in the order of the batch: the last state, then those of `identity.layers`.

        On the engine's device and in its dtype; an accelerator may still be computing them. The batch is forwarded
        together where the engine forwards what it is given.
        """
        ...

    def answers(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        capture: bool = False,
        alive: Callable[[], None] = lambda: None,
        plainly: bool = False,
    ) -> Iterator[Answer]:
        """The answer to each prompt, in their order. With `capture` it brings its states, of the same pass where the
        engine can do that. `alive` is called now and then while the target decodes. With `plainly` each prompt is
        decoded alone, by the loop that evaluation decodes plainly with: bit for bit its answer. (An engine that batches
        by itself has no such loop.)

        Raises NoAnswer where the target's logits are not finite, on any token of an answer; with `plainly`, which
        computes nothing that evaluation does not, on its first; where an engine does not show its logits, for states
        that are not finite, if it captures.
        """
        ...

    def close(self) -> None:
        """Gives back what it holds: of an engine its process."""
        ...
