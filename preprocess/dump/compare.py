"""Comparison of stored or an engine's states with those that the target computes now."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from pipeline.basics.errors import PipelineError
from pipeline.decoding.generate import Sampling
from pipeline.features.engines import open_source
from pipeline.features.schema import FeatureSpec
from pipeline.features.shards import ANSWERS, SPLITS, FeatureStore, Manifest
from pipeline.features.source import Answer, FeatureSource, GenerationPrompt
from pipeline.lm.config import TargetConfig
from pipeline.lm.model import load_embed_head
from pipeline.lm.states import LMHead

# Relative errors that rounding in a batch of another shape may cause: of a whole row, and of its worst token. A token
# of another text or target has an error of about 1.
ALLOWED_ROW, ALLOWED_TOKEN = 0.05, 0.5

# Texts on which an engine is tested before it dumps anything: prose, code, digits, repeated tokens.
SAMPLE = (
    "Speculative decoding lets a small model guess several tokens, which the large model checks in one forward pass. "
    "The answer stays the large model's own, token for token, and it comes sooner wherever the guesses are right.",
    """def primes(limit):
    found = []
    for number in range(2, limit):
        if all(number % p for p in found):
            found.append(number)
    return found

print(primes(50))  # 2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31""",
    "a a b b c c d d e e f f g g h h i i j j k k l l",
)
ANSWER_TOKENS = 24  # tokens that an engine answers to each
Sample = list[tuple[list[int], torch.Tensor]]  # texts, and the target's states [T, S, D] of each


@dataclass(frozen=True)
class StateDifference:
    """The difference of one row's states."""

    row_error: float  # relative error of its worst state, auxiliary layers included
    token_error: float  # relative error of its worst token
    state_errors_S: torch.Tensor  # by state: largest difference / largest value
    equal_argmax: int  # tokens after which the likeliest next token is the same
    tokens: int


def compare_states(got_TSD: torch.Tensor, expected_TSD: torch.Tensor, head: LMHead) -> StateDifference:
    """Return the difference of a row's states from the expected ones."""
    got_TSD, expected_TSD = got_TSD.float().cpu(), expected_TSD.float().cpu()
    error_TSD, dtype = got_TSD - expected_TSD, head.linear.weight.dtype
    expected_T, got_T = (head(states_TSD[:, 0].to(dtype)).argmax(-1) for states_TSD in (expected_TSD, got_TSD))
    return StateDifference(
        row_error=(error_TSD.norm(dim=(0, 2)) / expected_TSD.norm(dim=(0, 2))).max().item(),
        token_error=(error_TSD.norm(dim=-1) / expected_TSD.norm(dim=-1)).max().item(),
        state_errors_S=error_TSD.abs().amax((0, 2)) / expected_TSD.abs().amax((0, 2)),
        equal_argmax=int((expected_T == got_T).sum()),
        tokens=len(expected_T),
    )


def compare_rows(
    store: FeatureStore, source: FeatureSource, head: LMHead, rows: int, one_pass: bool
) -> dict[str, StateDifference]:
    """Return the differences of a fixed random sample of rows, by document id. With `one_pass`, answers came with their
    states: then the last state is left out, for it is 0.
    """
    differences = {}
    for number in sorted(random.Random(0).sample(range(len(store)), min(rows, len(store)))):
        row = store.row(number)
        valid = slice(-1 if one_pass else None)
        stored = [row.hidden_TD[:, None]] + ([] if row.auxiliary_TKD is None else [row.auxiliary_TKD])
        fresh_TSD = next(source.states([row.input_ids]))
        differences[row.doc_id] = compare_states(torch.cat(stored, 1)[valid], fresh_TSD[valid], head)
    return differences


def compute_sample(target: TargetConfig, layers: Sequence[int]) -> Sample:
    """Return the target's states of `SAMPLE`, computed by transformers on this machine's CPU."""
    cpu_config = target.model_copy(update={"engine": "transformers", "device": "cpu"})
    source = open_source(cpu_config, layers)
    texts = [source.tokenizer(text, add_special_tokens=False)["input_ids"] for text in SAMPLE]
    return list(zip(texts, source.states(texts), strict=True))


def require_matching_states(source: FeatureSource, sample: Sample, target: TargetConfig) -> float:
    """Return the largest relative error of an engine's states against the sample's.

    Raise PipelineError where they are not the target's (other weights, another quantisation, another RoPE), or where
    the engine generates another text while it captures states.
    """
    head = load_embed_head(target).head
    texts = [text for text, _ in sample]
    states = zip(source.states(texts), (expected_TSD for _, expected_TSD in sample), strict=True)
    differences = [compare_states(got_TSD, expected_TSD, head) for got_TSD, expected_TSD in states]
    worst = _require_near(source, differences, target.model, "transformers")
    if source.one_pass:
        answers = source.answers(
            [GenerationPrompt(text) for text in texts], Sampling(ANSWER_TOKENS, source.stop_ids), capture=True
        )
        differences = [_compare_answer(source, text, answer, head) for text, answer in zip(texts, answers, strict=True)]
        _require_near(source, differences, f"{target.model} while it answers", "its own forward of the full text")
    return worst


def _require_near(source: FeatureSource, differences: Sequence[StateDifference], states_of: str, against: str) -> float:
    worst = max(
        differences, key=lambda difference: math.inf if math.isnan(difference.row_error) else difference.row_error
    )
    if not worst.row_error <= ALLOWED_ROW:
        equal, tokens = (
            sum(difference.equal_argmax for difference in differences),
            sum(difference.tokens for difference in differences),
        )
        names = ["last", *map(str, source.identity.layers)]
        states = ", ".join(f"{name} {x:.1e}" for name, x in zip(names, worst.state_errors_S.tolist(), strict=True))
        raise PipelineError(
            f"{source.identity.engine} {source.identity.version} does not compute the states of {states_of}: "
            f"relative error {worst.row_error:.3f} (allowed {ALLOWED_ROW}) against {against}, largest difference over "
            f"largest value by layer: {states}; the likeliest next token is the same after {equal} of {tokens}. Check "
            "target.engine_options and the engine's version"
        )
    return worst.row_error


def _compare_answer(source: FeatureSource, text: list[int], answer: Answer, head: LMHead) -> StateDifference:
    """Return the difference of a greedy answer's states from those of one forward of the same text, without decoding.

    Raise PipelineError where that forward's likeliest next tokens differ from the answer's, by more than rounding. An
    engine that captures states does so in every request (vLLM then decodes by speculation, and took a wrong token for
    the last one where one repeats: vllm#56417), so its answers without capture prove nothing.
    """
    assert isinstance(answer.states_TSD, torch.Tensor)
    forward_TSD = next(source.states([[*text, *answer.tokens]]))
    logits_TV = head(forward_TSD[len(text) - 1 : -1, 0].to(head.linear.weight.dtype)).float()
    likeliest = logits_TV.max(-1)
    answer_T = logits_TV.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
    wrong = (likeliest.values - answer_T > ALLOWED_ROW * logits_TV.abs().amax(-1)).nonzero()[:, 0].tolist()
    if wrong:
        place, decode = wrong[0], source.tokenizer.decode
        got, expected = answer.tokens[place], int(likeliest.indices[place])
        raise PipelineError(
            f"{source.identity.engine} {source.identity.version} changes the text while it captures states: after "
            f"{decode([*text, *answer.tokens[:place]])[-40:]!r} it generates token {got} ({decode([got])!r}), not "
            f"{expected} ({decode([expected])!r}), the likeliest in its own forward of the full text. Use another "
            "version of the engine"
        )
    return compare_states(answer.states_TSD[:-1], forward_TSD[:-1], head)


def compare(
    folder: Path, spec: FeatureSpec, target: TargetConfig, rows: int, against: str | None = None
) -> tuple[list[str], str | None]:
    """Compare a sample of each set. Return lines for the user, and a document whose difference is larger than rounding.
    With `against`, an engine, the lines list each state's difference from that engine's.
    """
    config = target.model_copy(update={"engine": against}) if against else target
    source, head = open_source(config, spec.auxiliary_numbers), load_embed_head(target).head
    manifest, differences = Manifest.load(folder), {}
    for name in (*SPLITS, ANSWERS):
        if manifest.total(name, "rows") and not (name == "train" and manifest.fed):
            one_pass = name not in manifest.text and spec.engine != "transformers"
            differences |= compare_rows(FeatureStore(folder, name, spec), source, head, rows, one_pass)
    source.close()
    row_error = max(difference.row_error for difference in differences.values())
    token_error = max(difference.token_error for difference in differences.values())
    lines = [
        f"{len(differences)} rows forwarded again: largest relative error of a row {row_error:.4f} (allowed "
        f"{ALLOWED_ROW}), of a token {token_error:.4f} (allowed {ALLOWED_TOKEN})"
    ]
    if against:
        names = ["the last state, normed", *(f"layer {number}" for number in spec.auxiliary_numbers)]
        worst_S = torch.stack([difference.state_errors_S for difference in differences.values()]).amax(0).tolist()
        lines.append(f"{spec.engine} {spec.engine_version} against {against}, largest difference over largest value:")
        lines += [f"  {name}: {worst:.1e}" for name, worst in zip(names, worst_S, strict=True)]
        equal, tokens = (
            sum(difference.equal_argmax for difference in differences.values()),
            sum(difference.tokens for difference in differences.values()),
        )
        lines.append(f"  the likeliest next token is the same after {equal:,} of {tokens:,} tokens")
    wrong = (
        name
        for name, difference in differences.items()
        if not (difference.row_error <= ALLOWED_ROW and difference.token_error <= ALLOWED_TOKEN)
    )
    return lines, next(wrong, None)
