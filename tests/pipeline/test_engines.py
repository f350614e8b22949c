"""Every engine gives a target's states and answers as the target's own forward does."""

import pytest
import torch

from pipeline.basics.errors import PipelineError
from pipeline.decoding.generate import Sampling, decode_plain
from pipeline.features.engines import open_source, source_identity
from pipeline.features.engines.in_process import ALIVE_EVERY, GumbelNoise
from pipeline.features.source import Answer, FeatureSource, GenerationPrompt
from pipeline.lm.config import TargetConfig

TEXTS = [[5, 9, 33, 7, 200], list(range(40, 75)), [11, 12]]


@pytest.fixture(scope="module")
def source(tiny_target) -> FeatureSource:
    return open_source(TargetConfig(model=str(tiny_target), dtype="float32", device="cpu"), [1, 2])


def greedy(source: FeatureSource, tokens: int = 12) -> Sampling:
    return Sampling(tokens, source.stop_ids)


def test_it_says_what_its_states_are_without_being_loaded(tiny_target, source):
    config = TargetConfig(model=str(tiny_target), dtype="float32", device="cpu")
    assert source.identity == source_identity(config, [1, 2])
    assert (source.identity.engine, source.identity.dtype, source.identity.layers) == (
        "transformers",
        "float32",
        (1, 2),
    )


def test_states_of_a_batch_are_those_of_each_text_alone(source, loaded_target):
    states = list(source.states(TEXTS))
    assert [tuple(states_TSD.shape) for states_TSD in states] == [(len(text), 3, 32) for text in TEXTS]
    for text, states_TSD in zip(TEXTS, states, strict=True):
        with torch.inference_mode():
            out = loaded_target.model(input_ids=torch.tensor([text]), output_hidden_states=True)
        want = torch.stack([out.hidden_states[-1][0], out.hidden_states[1][0]], 1)
        torch.testing.assert_close(states_TSD[:, :2], want, rtol=0, atol=1e-5)
        torch.testing.assert_close(loaded_target.decoder.norm(states_TSD[:, 2]), want[:, 0], rtol=0, atol=1e-5)
        torch.testing.assert_close(loaded_target.head(states_TSD[:, 0]), out.logits[0], rtol=0, atol=2e-4)


def test_answers_are_plain_decodings_whatever_else_is_in_the_batch_and_bring_their_states(source, loaded_target):
    prompts, signs = [GenerationPrompt(text) for text in TEXTS], []
    together = list(source.answers(prompts, greedy(source, 40), alive=lambda: signs.append(1)))
    assert signs
    for prompt, answer in zip(prompts, together, strict=True):
        assert answer.tokens == decode_plain(loaded_target, prompt.tokens, greedy(source, 40)).tokens
        assert answer.states_TSD is None
        for plainly in (False, True):  # `alive` is called for a single prompt, too
            signs.clear()
            options = {"alive": lambda: signs.append(1), "plainly": plainly}
            assert list(source.answers([prompt], greedy(source, 40), **options)) == [answer]
            assert signs or len(answer.tokens) < ALIVE_EVERY
        (alone,) = source.answers([prompt], greedy(source, 40), capture=True)
        assert alone.tokens == answer.tokens
        torch.testing.assert_close(alone.states_TSD, next(source.states([prompt.tokens + answer.tokens])))


@pytest.mark.parametrize(("plainly", "sound"), [(True, 0), (False, 0), (False, 2)])
def test_logits_that_are_not_finite_are_refused(source, plainly, sound):
    """The first `sound` forward passes are finite, later ones are not."""
    forwards = []

    def spoil(_module, _inputs, out):
        forwards.append(1)
        return out if len(forwards) <= sound else out * float("nan")

    def answers(prompts: list[list[int]], tokens: int) -> list[Answer]:
        forwards.clear()
        return list(
            source.answers([GenerationPrompt(text) for text in prompts], Sampling(tokens, frozenset()), plainly=plainly)
        )

    hook = source._target.decoder.norm.register_forward_hook(spoil)
    try:
        with pytest.raises(PipelineError, match="not finite"):
            answers(TEXTS[:2], 3)
        if sound:
            assert all(len(answer.tokens) == 2 for answer in answers(TEXTS[:2], 2))
    finally:
        hook.remove()


def test_a_sampled_answer_depends_on_its_prompts_seed_and_not_on_its_neighbours(source):
    sampling = Sampling(16, source.stop_ids, temperature=1.0)
    prompts = [GenerationPrompt(text, seed) for seed, text in enumerate(TEXTS)]
    together = [answer.tokens for answer in source.answers(prompts, sampling)]
    assert together == [answer.tokens for prompt in prompts for answer in source.answers([prompt], sampling)]
    assert together != [
        answer.tokens for answer in source.answers([GenerationPrompt(text, 9) for text in TEXTS], sampling)
    ]
    narrow = Sampling(16, source.stop_ids, temperature=1.0, top_k=1)
    assert [a.tokens for a in source.answers(prompts, narrow)] == [
        a.tokens for a in source.answers(prompts, greedy(source, 16))
    ]


def test_gumbel_noise_samples_the_softmax():
    rows, scores = 20_000, torch.tensor([2.0, 1.0, 0.0, -float("inf")])
    generators = [torch.Generator().manual_seed(row) for row in range(rows)]
    drawn = GumbelNoise(generators)(None, scores.expand(rows, 4)).argmax(-1)
    got, expected = torch.bincount(drawn, minlength=4) / rows, scores.softmax(-1)
    assert got[3] == 0 and (got - expected).abs().max() < 4 * (0.25 / rows) ** 0.5
