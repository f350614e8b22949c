"""The protocol of whatever computes the target's hidden states and answers.

The dump, its answers to calibration prompts, `preprocess.verify` and regeneration use a `FeatureSource`; none of them
loads a target.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from pipeline.decoding.generate import Sampling
from pipeline.features.schema import POST_FINAL_NORM, Float8States


@dataclass(frozen=True)
class SourceIdentity:
    """The properties of the states that a source computes. Every shard and manifest records them (`FeatureSpec`), and a
    trainer compares them.
    """

    engine: str
    version: str  # of the engine
    dtype: str  # the dtype in which the target computes
    layers: tuple[int, ...]  # decoder layers, counted from 1, whose outputs follow the last state; not normed
    norm_stage: str = POST_FINAL_NORM  # of the last state


@dataclass(frozen=True)
class GenerationPrompt:
    """A text to continue, and the seed of its answer's random numbers, which depend only on the seed."""

    tokens: list[int]
    seed: int = 0


@dataclass(frozen=True)
class Answer:
    """The target's answer to a prompt: its tokens, the stop token included, and, if requested, the states of prompt and
    answer ([T, S, D], as `FeatureSource.states` or `float8_states` yields them). A source with `one_pass` computes no
    state of the last token: that state, which no code reads, is 0.
    """

    tokens: list[int]
    states_TSD: Tensor | Float8States | None = None


class FeatureSource(Protocol):
    """A loaded target. Its methods may be called by several threads at once."""

    identity: SourceIdentity
    tokenizer: Any
    positions: int  # the maximum length of a text
    one_pass: bool  # answers have their states from the forward pass that generated them
    stop_ids: frozenset[int]

    def states(self, batch: Sequence[Sequence[int]]) -> Iterator[Tensor]:
        """Yield ``states_TSD`` of each text, in the order of the batch: last state first, then `identity.layers`.

        They are on the engine's device and in its dtype; an accelerator may still be computing them. The batch is
        one forward pass, unless the engine batches by itself.
        """
        ...

    def float8_states(self, batch: Sequence[Sequence[int]]) -> Iterator[Float8States]:
        """Yield the states in float8, converted on the device where they are computed."""
        ...

    def answers(
        self,
        prompts: Sequence[GenerationPrompt],
        sampling: Sampling,
        capture: bool = False,
        alive: Callable[[], None] = lambda: None,
        plainly: bool = False,
        float8: bool = False,
    ) -> Iterator[Answer]:
        """Yield the answer to each prompt, in their order. With `capture` an answer has its states, from the same
        forward pass if the engine supports that, and with `float8` in float8. `alive` is called periodically while the
        target decodes. With `plainly` each prompt is decoded alone, by evaluation's loop for plain decoding: bit for
        bit its answer. (An engine that batches by itself has no such loop.)

        Raises NoAnswer if the target's logits are not finite on any token of an answer; with `plainly`, which computes
        only what evaluation computes, on its first token. An engine that does not return logits raises it with
        `capture`, for states that are not finite.
        """
        ...

    def close(self) -> None:
        """Release all resources, such as an engine's process."""
        ...
