"""The target in this process, through transformers' own forward: a `FeatureSource`."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pipeline.basics.errors import NoAnswer
from pipeline.decoding.generate import Sampling, decode_plain
from pipeline.features.schema import Float8States, quantise_states
from pipeline.features.source import Answer, GenerationPrompt, SourceIdentity
from pipeline.lm.config import TargetConfig
from pipeline.lm.model import Target

ALIVE_EVERY = 16  # decoding steps of a batch between two calls of `alive`


class TransformersSource:
    """A target in this process. The states of a padded batch come from one forward pass. Any number of prompts, even a
    single one, is padded on the left and answered by transformers' `generate`.
    """

    one_pass = False

    def __init__(self, config: TargetConfig, identity: SourceIdentity):
        self._target, self.identity = Target(config, identity.dtype, verify=False), identity
        self.tokenizer, self.positions = self._target.tokenizer, self._target.positions
        self.stop_ids = frozenset(self._target.stop_ids())
        self._target.model.generation_config = GenerationConfig()  # not the family's own temperature or penalties

    def states(self, batch: Sequence[Sequence[int]]) -> Iterator[Tensor]:
        tokens_BT = torch.zeros(len(batch), max(map(len, batch)), dtype=torch.long)
        for b, tokens in enumerate(batch):
            tokens_BT[b, : len(tokens)] = torch.as_tensor(tokens)
        states_BTSD = self._target.capture_all(tokens_BT, list(self.identity.layers))
        for b, tokens in enumerate(batch):
            yield states_BTSD[b, : len(tokens)]

    def float8_states(self, batch: Sequence[Sequence[int]]) -> Iterator[Float8States]:
        return map(quantise_states, self.states(batch))

    def answers(
        self,
        prompts: Sequence[GenerationPrompt],
        sampling: Sampling,
        capture: bool = False,
        alive: Callable[[], None] = lambda: None,
        plainly: bool = False,
        float8: bool = False,
    ) -> Iterator[Answer]:
        if plainly:
            texts = [prompt.tokens for prompt in prompts]
            answers = [decode_plain(self._target, text, sampling, on_tokens=lambda _: alive()).tokens for text in texts]
        else:
            answers = self._generate(prompts, sampling, alive)
        results = [Answer(answer) for answer in answers]
        if capture:
            texts = [prompt.tokens + answer for prompt, answer in zip(prompts, answers, strict=True)]
            states: Iterator[Any] = self.float8_states(texts) if float8 else self.states(texts)
            results = [replace(result, states_TSD=s) for result, s in zip(results, states, strict=True)]
        yield from results

    def close(self) -> None:
        """Release nothing: the target lives in this process."""

    @torch.inference_mode()
    def _generate(
        self, prompts: Sequence[GenerationPrompt], sampling: Sampling, alive: Callable[[], None]
    ) -> list[list[int]]:
        stops, device = sorted(sampling.stop_ids), self._target.device
        fill = stops[0] if stops else 0
        width = max(len(prompt.tokens) for prompt in prompts)
        tokens_BT = torch.full((len(prompts), width), fill)
        mask_BT = torch.zeros_like(tokens_BT)
        for b, prompt in enumerate(prompts):
            tokens_BT[b, width - len(prompt.tokens) :] = torch.tensor(prompt.tokens)
            mask_BT[b, width - len(prompt.tokens) :] = 1
        config = GenerationConfig(
            max_new_tokens=sampling.max_new_tokens, do_sample=False, eos_token_id=stops or None, pad_token_id=fill
        )
        finite = _Finite()
        out_BT = self._target.model.generate(
            input_ids=tokens_BT.to(device),
            attention_mask=mask_BT.to(device),
            generation_config=config,
            logits_processor=LogitsProcessorList([finite, *self._processors(prompts, sampling)]),
            stopping_criteria=StoppingCriteriaList([_Heartbeat(alive)]),
        )
        answers = [_cut_at_stop(row, sampling.stop_ids) for row in out_BT[:, width:].tolist()]
        if not finite.all_finite(answers):
            raise NoAnswer(f"the target's logits are not finite in {self.identity.dtype}: use another dtype")
        return answers

    def _processors(self, prompts: Sequence[GenerationPrompt], sampling: Sampling) -> list[LogitsProcessor]:
        if sampling.temperature == 0:
            return []
        steps: list[LogitsProcessor] = [TemperatureLogitsWarper(sampling.temperature)]
        steps += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
        steps += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
        seeded = [torch.Generator(self._target.device).manual_seed(prompt.seed) for prompt in prompts]
        return [*steps, GumbelNoise(seeded)]


class GumbelNoise(LogitsProcessor):
    """Add Gumbel noise to each row from the row's own generator, so that the largest score is a sample that does not
    depend on the neighbouring rows.
    """

    def __init__(self, generators: list[torch.Generator]):
        self._generators = generators

    def __call__(self, input_ids, scores):
        noise_BV = torch.empty(scores.shape, dtype=torch.float32, device=scores.device)
        for row, generator in zip(noise_BV, self._generators, strict=True):
            row.exponential_(generator=generator)
        return torch.log_softmax(scores.float(), -1) - noise_BV.log_()


class _Finite(LogitsProcessor):
    """Record whether each row's logits are finite, without changing them. The host waits for the device only at the
    end.
    """

    def __init__(self):
        self._steps: list[Tensor] = []  # [B] each

    def __call__(self, input_ids, scores):
        self._steps.append(scores.isfinite().all(-1))
        return scores

    def all_finite(self, answers: list[list[int]]) -> bool:
        """Return whether the logits of all tokens of the answers were finite; padding after a row's end is ignored."""
        rows = torch.stack(self._steps, 1).tolist()
        return all(all(row[: len(answer)]) for row, answer in zip(rows, answers, strict=True))


class _Heartbeat(StoppingCriteria):
    """A criterion that never stops and calls `alive` every ALIVE_EVERY steps."""

    def __init__(self, alive: Callable[[], None]):
        self._alive, self._steps = alive, 0

    def __call__(self, input_ids, scores, **_):
        self._steps += 1
        if self._steps % ALIVE_EVERY == 0:
            self._alive()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _cut_at_stop(ids: list[int], stop_ids: frozenset[int]) -> list[int]:
    end = next((place for place, token in enumerate(ids) if token in stop_ids), len(ids) - 1)
    return ids[: end + 1]
