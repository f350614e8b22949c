"""Stored states against the target's now, whoever computed them."""

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
from pipeline.features.source import Answer, FeatureSource, Prompt
from pipeline.lm.config import TargetConfig
from pipeline.lm.embedding_head import LMHead
from pipeline.lm.model import load_embed_head

# Relative errors that rounding in a batch of another shape may cause: of a whole row, and of its worst token. A token
# of another text or target has an error of about 1.
ALLOWED_ROW, ALLOWED_TOKEN = 0.05, 0.5

# What an engine is tried on before it dumps anything: prose, code, digits, a text that goes on with repeated tokens.
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
ANSWERED = 24  # tokens that it says to each
Sample = list[tuple[list[int], torch.Tensor]]  # texts, and the target's states [T, S, D] of each


@dataclass(frozen=True)
class Compared:
    """One row."""

    of_row: float  # relative error of its worst state, with auxiliary layers
    of_token: float  # of its worst token
    of_state_S: torch.Tensor  # by state: the largest difference, over the largest value
    same: int  # tokens after which the likeliest next one is the same
    tokens: int


def off(got_TSD: torch.Tensor, want_TSD: torch.Tensor, head: LMHead) -> Compared:
    """How far some states are off."""
    got_TSD, want_TSD = got_TSD.float().cpu(), want_TSD.float().cpu()
    wrong_TSD, dtype = got_TSD - want_TSD, head.linear.weight.dtype
    was_T, is_T = (head(states_TSD[:, 0].to(dtype)).argmax(-1) for states_TSD in (want_TSD, got_TSD))
    return Compared(
        of_row=(wrong_TSD.norm(dim=(0, 2)) / want_TSD.norm(dim=(0, 2))).max().item(),
        of_token=(wrong_TSD.norm(dim=-1) / want_TSD.norm(dim=-1)).max().item(),
        of_state_S=wrong_TSD.abs().amax((0, 2)) / want_TSD.abs().amax((0, 2)),
        same=int((was_T == is_T).sum()),
        tokens=len(was_T),
    )


def recomputed(
    store: FeatureStore, source: FeatureSource, head: LMHead, rows: int, one_pass: bool
) -> dict[str, Compared]:
    """By document id, of a fixed random sample. Where answers came with their states of `one_pass`, the last one is
    left out: it is 0.
    """
    found = {}
    for number in sorted(random.Random(0).sample(range(len(store)), min(rows, len(store)))):
        row = store.row(number)
        known = slice(-1 if one_pass else None)
        stored = [row.hidden_TD[:, None]] + ([] if row.auxiliary_TKD is None else [row.auxiliary_TKD])
        fresh_TSD = next(source.states([row.input_ids]))
        found[row.doc_id] = off(torch.cat(stored, 1)[known], fresh_TSD[known], head)
    return found


def sampled(target: TargetConfig, layers: Sequence[int]) -> Sample:
    """The target's states of `SAMPLE` by transformers on this machine's CPU."""
    own = target.model_copy(update={"engine": "transformers", "device": "cpu"})
    source = open_source(own, layers)
    texts = [source.tokenizer(text, add_special_tokens=False)["input_ids"] for text in SAMPLE]
    return list(zip(texts, source.states(texts), strict=True))


def require_alike(source: FeatureSource, sample: Sample, target: TargetConfig) -> float:
    """The largest relative error of an engine's states against the sample's.

    Raises PipelineError where they are not the target's (of other weights, another quantisation, another RoPE), or
    where it says something else while it captures them.
    """
    head = load_embed_head(target).head
    texts = [text for text, _ in sample]
    states = zip(source.states(texts), (want_TSD for _, want_TSD in sample), strict=True)
    found = [off(got_TSD, want_TSD, head) for got_TSD, want_TSD in states]
    worst = _require_near(source, found, target.model, "transformers")
    if source.one_pass:
        answers = source.answers([Prompt(text) for text in texts], Sampling(ANSWERED, source.stop_ids), capture=True)
        found = [_answered(source, text, answer, head) for text, answer in zip(texts, answers, strict=True)]
        _require_near(source, found, f"{target.model} while it answers", "its own forward of the whole")
    return worst


def _require_near(source: FeatureSource, found: Sequence[Compared], states_of: str, against: str) -> float:
    worst = max(found, key=lambda one: math.inf if math.isnan(one.of_row) else one.of_row)
    if not worst.of_row <= ALLOWED_ROW:
        same, tokens = sum(one.same for one in found), sum(one.tokens for one in found)
        names = ["last", *map(str, source.identity.layers)]
        states = ", ".join(f"{name} {x:.1e}" for name, x in zip(names, worst.of_state_S.tolist(), strict=True))
        raise PipelineError(
            f"{source.identity.engine} {source.identity.version} does not compute the states of {states_of}: "
            f"relative error {worst.of_row:.3f} (allowed {ALLOWED_ROW}) against {against}, largest difference over "
            f"largest value by layer: {states}; the likeliest next token is the same after {same} of {tokens}. Look at "
            "target.engine_options and at the engine's version"
        )
    return worst.of_row


def _answered(source: FeatureSource, text: list[int], answer: Answer, head: LMHead) -> Compared:
    """How far the states of a greedy answer are off those of one forward of the same text, in which nothing is decoded.

    Raises PipelineError where that forward's likeliest next tokens are others than the answer's, by more than rounding.
    An engine that captures has to do so in every request (vLLM decodes by speculation then, and took a wrong token for
    the last one where one repeats: vllm#56417), so its other answers prove nothing.
    """
    assert answer.states_TSD is not None
    forward_TSD = next(source.states([[*text, *answer.tokens]]))
    logits_TV = head(forward_TSD[len(text) - 1 : -1, 0].to(head.linear.weight.dtype)).float()
    likeliest = logits_TV.max(-1)
    said_T = logits_TV.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
    wrong = (likeliest.values - said_T > ALLOWED_ROW * logits_TV.abs().amax(-1)).nonzero()[:, 0].tolist()
    if wrong:
        place, decode = wrong[0], source.tokenizer.decode
        got, want = answer.tokens[place], int(likeliest.indices[place])
        raise PipelineError(
            f"{source.identity.engine} {source.identity.version} changes the text while it captures states: behind "
            f"{decode([*text, *answer.tokens[:place]])[-40:]!r} it says token {got} ({decode([got])!r}), not {want} "
            f"({decode([want])!r}), the likeliest in its own forward of the whole. Use another version of the engine"
        )
    return off(answer.states_TSD[:-1], forward_TSD[:-1], head)


def compare(
    folder: Path, spec: FeatureSpec, target: TargetConfig, rows: int, against: str | None = None
) -> tuple[list[str], str | None]:
    """How far a sample of each set is off, in words; and a document that is off by more than rounding. With `against`,
    an engine, its states are compared one by one.
    """
    config = target.model_copy(update={"engine": against}) if against else target
    source, head = open_source(config, spec.auxiliary_numbers), load_embed_head(target).head
    manifest, found = Manifest.load(folder), {}
    for name in (*SPLITS, ANSWERS):
        if manifest.total(name, "rows") and not (name == "train" and manifest.fed):
            one_pass = name not in manifest.text and spec.engine != "transformers"
            found |= recomputed(FeatureStore(folder, name, spec), source, head, rows, one_pass)
    source.close()
    of_row, of_token = max(one.of_row for one in found.values()), max(one.of_token for one in found.values())
    said = [
        f"{len(found)} rows forwarded again: largest relative error of a row {of_row:.4f} (allowed {ALLOWED_ROW}), "
        f"of a token {of_token:.4f} (allowed {ALLOWED_TOKEN})"
    ]
    if against:
        names = ["the last state, normed", *(f"layer {number}" for number in spec.auxiliary_numbers)]
        worst_S = torch.stack([one.of_state_S for one in found.values()]).amax(0).tolist()
        said.append(f"{spec.engine} {spec.engine_version} against {against}, largest difference over largest value:")
        said += [f"  {name}: {worst:.1e}" for name, worst in zip(names, worst_S, strict=True)]
        same, tokens = sum(one.same for one in found.values()), sum(one.tokens for one in found.values())
        said.append(f"  the likeliest next token is the same after {same:,} of {tokens:,} tokens")
    wrong = (name for name, one in found.items() if not (one.of_row <= ALLOWED_ROW and one.of_token <= ALLOWED_TOKEN))
    return said, next(wrong, None)
