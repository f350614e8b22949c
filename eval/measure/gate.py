"""The losslessness gate: checks that a draft's answers equal plain decoding's, and that only rounding made them differ
where they do.

Rounding is measured on plain decoding itself: a row's logits from its cached forwards of one token each differ from
those of one uncached forward. A tree's forward may differ by up to `MAX_DRIFT_RATIO` times as much; and two answers may
diverge only where the choice between their two tokens was as close as that. At temperature 0 in float32 on a CPU no
difference is allowed. (A GPU may take TF32, and splits sums by how many tokens are verified; layers that keep a state
round a chain's sums and a step's differently: there plain decoding's drift decides in float32 as well.)
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from scipy.stats import kstest
from torch import Tensor

from pipeline.decoding.accept import Sampler, log_odds
from pipeline.decoding.config import LoadedMethod
from pipeline.decoding.generate import Prefilled, Sampling, decode_plain, decode_speculative
from pipeline.decoding.tree import Tree, build_tree
from pipeline.lm.model import Target

MIN_P_VALUE = 1e-4  # p-value below which drawn answers are not plain decoding's
# a tree's logits may differ from the uncached forward's by this many times plain decoding's own largest difference
MAX_DRIFT_RATIO = 2.0
EXAMINED_ROUNDS = 2  # rounds of each prompt and method: at T > 0, in half precision always
DRIFT_ROWS = 32  # of plain decoding's answer, on which its own drift is measured: more than the examined rounds have


@dataclass
class Gate:
    """The losslessness gate of one method on one benchmark at one temperature. Drifts are in logits."""

    temperature: float
    drawn: bool = (
        False  # candidates are drawn at this temperature: answers have plain decoding's distribution, not its tokens
    )
    checked: int = 0  # prompts (each turn is one), however often decoded
    identical: int = 0  # prompts whose answers equal plain decoding's, token for token
    near_ties: int = 0  # prompts whose answers diverge where rounding decides
    rounds: int = 0  # examined rounds
    largest_drift: float = 0.0  # of a tree's forward from the uncached one, over the examined rounds
    plain_drift: float = 0.0  # of plain decoding's own cached forwards from the uncached one, over the same answers
    places: list[float] = field(
        default_factory=list
    )  # drawn: where each emitted token lies in plain decoding's distribution

    @classmethod
    def for_method(cls, method: LoadedMethod, temperature: float) -> "Gate":
        return cls(temperature, drawn=temperature > 0 and method.tree.siblings == "drawn")

    @property
    def fit(self) -> float:
        """The p-value of the emitted tokens' places being uniform, as they are when plain decoding emits them
        (Kolmogorov-Smirnov).
        """
        return float(kstest(self.places, "uniform").pvalue) if self.places else 0.0

    @property
    def drift_ratio(self) -> float:
        """The trees' drift over plain decoding's own."""
        return self.largest_drift / self.plain_drift if self.plain_drift else math.inf if self.largest_drift else 0.0

    @property
    def passed(self) -> bool:
        if not self.checked or not self.drift_ratio <= MAX_DRIFT_RATIO:
            return False
        if self.drawn:
            return self.rounds > 0 and self.fit >= MIN_P_VALUE
        return self.identical + self.near_ties == self.checked and (self.rounds > 0 or self.temperature == 0)

    def merge(self, second: "Gate") -> None:
        for name in ("checked", "identical", "near_ties", "rounds", "places"):
            setattr(self, name, getattr(self, name) + getattr(second, name))
        for name in ("largest_drift", "plain_drift"):
            setattr(self, name, max(getattr(self, name), getattr(second, name)))


class Gatekeeper:
    """The judge of answers: compares them, and examines rounds and places of divergence; nothing of it is timed."""

    def __init__(self, target: Target, methods: dict[str, LoadedMethod]):
        self._target, self._methods = target, methods
        self._rows = lru_cache(maxsize=4)(self._measure_rows)  # of one answer for all methods
        self._cached_continuation = lru_cache(maxsize=1)(self._continue)

    def compare(
        self,
        gate: Gate,
        method: str,
        ids: list[int],
        answers: list[tuple[Sampling, list[int], list[int]]],
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """Compare one prompt's answers of plain decoding and of the draft, one pair a repeat; `on_progress` is called
        after each pair that differs.
        """
        gate.checked += 1
        different = [(sampling, expected, got) for sampling, expected, got in answers if expected != got]
        if gate.drawn:
            for sampling, _, got in answers:
                gate.places += self._token_places(ids, sampling, got)
        if not different:
            gate.identical += 1
        elif not gate.drawn and all(on_progress() or self._rounding_decides(method, ids, *pair) for pair in different):
            gate.near_ties += 1

    def _token_places(self, ids: list[int], sampling: Sampling, answer: list[int]) -> list[float]:
        """Return each token's place in plain decoding's distribution at its position, likeliest tokens first: the mass
        before it and a random part of its own. Uniform and independent when the answer is drawn from that distribution.
        """
        chain = build_tree(ids[-1], answer[:-1], list(range(len(answer) - 1)), self._target.device)
        logits_TV = self._uncached_logits([*ids, *answer[:-1]], len(answer))
        p_TV = (
            sampling.probabilities(logits_TV, sampling.collect_before(ids, [], chain, logits_TV.device)).double().cpu()
        )
        token_T = p_TV.gather(1, torch.tensor(answer)[:, None])
        before_T = (p_TV * (p_TV > token_T)).sum(-1)
        part_T = torch.rand(len(answer), generator=torch.Generator().manual_seed(sampling.seed), dtype=torch.float64)
        return (before_T + part_T * token_T[:, 0]).clamp(0, 1).tolist()

    # -- where answers diverge -----------------------------------------------------------------------------------

    def _rounding_decides(
        self, method: str, ids: list[int], sampling: Sampling, expected: list[int], got: list[int]
    ) -> bool:
        """Return whether rounding alone makes the answers diverge: the draft's round chose as plain decoding chooses,
        from logits that drift no further than plain decoding's, and plain decoding's own choice between the two tokens
        was as close as its drift. At temperature 0 an exact target (`Verifier.is_exact`) allows no difference.
        """
        if sampling.temperature == 0 and self._target.is_exact:
            return False
        if len(expected) != len(got) and expected[: len(got)] == got[: len(expected)]:
            return False  # one answer is a prefix of the other: no rounding can cause that
        place = next(n for n, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b)
        logits_V = self._logits_by_decoding_again(method, ids, sampling, got, place)
        if logits_V is None:
            return False
        end = max(place + 1, min(DRIFT_ROWS, len(expected)))
        rows = self._rows(tuple(ids), tuple(expected[:end]), max(end - DRIFT_ROWS, 0))
        before = sampling.collect_before([*ids, *expected[:place]], [], None, logits_V.device)
        chosen = int(sampling.choose(logits_V[None], before, Sampler(sampling.seed), [place])[0])
        drift = (logits_V.float() - rows.uncached_TV[place - rows.first]).abs().max().item()
        if chosen != got[place] or not drift <= MAX_DRIFT_RATIO * rows.drift:
            return False
        return self._is_near_tie(rows, before, logits_V, sampling, (place, expected[place], got[place]))

    def _is_near_tie(
        self, rows: "_Rows", before: Tensor | None, logits_V: Tensor, sampling: Sampling, parting: tuple[int, int, int]
    ) -> bool:
        """Return whether plain decoding's choice between the two tokens, in log-odds, was closer than its own drift of
        these log-odds. If rounding changes which tokens top-k or top-p leave, the two choices were not between the same
        tokens, and the answer is True.
        """
        place, *tokens = parting
        cached_TV, uncached_TV = (sampling.scale(x) for x in (rows.cached_TV, rows.uncached_TV))
        plain_1V = sampling.process(rows.cached_TV[place - rows.first][None], before)
        if not torch.equal(plain_1V.isfinite(), sampling.process(logits_V[None], before).isfinite()):
            return True
        if sampling.temperature == 0:
            cached_odds_T, uncached_odds_T = (x[:, tokens[0]] - x[:, tokens[1]] for x in (cached_TV, uncached_TV))
            margin = (plain_1V[0, tokens[0]] - plain_1V[0, tokens[1]]).abs().item()
        else:
            cached_odds_T, uncached_odds_T = (log_odds(x, *tokens)[0] for x in (cached_TV, uncached_TV))
            plain_odds, halving = log_odds(plain_1V, *tokens)
            number = Sampler(sampling.seed).numbers(place)[halving]
            margin = (plain_odds[0].cpu() - torch.logit(number)).abs().item()
        return margin <= MAX_DRIFT_RATIO * max(
            (cached_odds_T - uncached_odds_T).abs().max().item(), rows.floor / (sampling.temperature or 1)
        )

    def _logits_by_decoding_again(
        self, method: str, ids: list[int], sampling: Sampling, answer: list[int], place: int
    ) -> Tensor | None:
        """Return the logits that the answer's token at `place` was chosen from, by decoding it again; None if decoding
        gives another answer.
        """
        found_logits: list[Tensor] = []

        def observe(tokens: list[int], tree: Tree, logits_NV: Tensor) -> None:
            begin = len(tokens) - len(ids)
            if begin > place or tokens[len(ids) :] != answer[:begin]:
                return
            children, node = tree.children(), 0
            for token in answer[begin:place]:
                node = next((child for child in children[node] if tree.tokens[child] == token), None)
                if node is None:
                    return
            found_logits.append(logits_NV[node].clone())

        decode_speculative(self._target, self._methods[method], ids, sampling, observe)
        return found_logits[-1] if found_logits else None

    # -- rounds --------------------------------------------------------------------------------------------------

    def examine_rounds(
        self,
        gate: Gate,
        method: str,
        ids: list[int],
        sampling: Sampling,
        plain_answer: list[int],
        prefilled: Prefilled | None,
    ) -> None:
        """Measure drift in the answer's first rounds: of the tree forward's logits from an uncached forward's after the
        same tokens, and of plain decoding's along its own answer (continued after its end up to `DRIFT_ROWS` rows).
        `plain_answer` is plain decoding's answer; `prefilled` the prompt's prefill, if there is one.
        """
        last_round = gate.rounds + EXAMINED_ROUNDS
        answer = plain_answer if len(plain_answer) >= DRIFT_ROWS else self._cached_continuation(tuple(ids), sampling)
        rows = self._rows(tuple(ids), tuple(answer[:DRIFT_ROWS]), 0)
        gate.plain_drift = max(gate.plain_drift, rows.drift)

        def observe(tokens: list[int], tree: Tree, logits_NV: Tensor) -> None:
            if gate.rounds < last_round:
                self._examine_round(gate, tokens, tree, logits_NV)

        def stop_when_examined(new: list[int]) -> int | None:
            return len(new) if gate.rounds >= last_round else None

        short_sampling = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, 8 * EXAMINED_ROUNDS))
        decode_speculative(
            self._target,
            self._methods[method],
            ids,
            short_sampling,
            observe,
            prefilled=prefilled,
            on_tokens=stop_when_examined,
        )

    def _examine_round(self, gate: Gate, tokens: list[int], tree: Tree, logits_NV: Tensor) -> None:
        """Measure the drift of one round. A figure that is not a number fails the gate."""
        gate.rounds += 1
        path = tree.longest_path()
        uncached_TV = self._uncached_logits([*tokens, *(tree.tokens[node] for node in path[1:])], len(path))
        gate.largest_drift = max(
            gate.largest_drift, _finite((logits_NV[path].float() - uncached_TV).abs().max().item())
        )

    # -- plain decoding's own forwards -----------------------------------------------------------------------------

    def _continue(self, ids: tuple[int, ...], sampling: Sampling) -> list[int]:
        """Return plain decoding's first `DRIFT_ROWS` tokens, without stop tokens."""
        count = min(DRIFT_ROWS, self._target.positions - len(ids))
        return decode_plain(
            self._target, list(ids), replace(sampling, max_new_tokens=count, stop_ids=frozenset())
        ).tokens

    def _measure_rows(self, ids: tuple[int, ...], answer: tuple[int, ...], first: int) -> "_Rows":
        """Compute the rows that the answer's tokens from `first` on were chosen from."""
        tokens = [*ids, *answer[:-1]]
        cached_TV = self._cached_logits(list(ids), list(answer[:-1]), first)
        return _Rows(
            cached_TV, self._uncached_logits(tokens, len(cached_TV)), first, torch.finfo(self._target.dtype).eps
        )

    @torch.inference_mode()
    def _uncached_logits(self, tokens: list[int], last: int) -> Tensor:
        """Return the target's logits (fp32) after each of the `last` tokens, by one causal forward without a cache."""
        hidden_TD = self._target.capture(torch.tensor([tokens]))[0]
        return self._target.head(hidden_TD[-last:]).float()

    @torch.inference_mode()
    def _cached_logits(self, ids: list[int], answer: list[int], first: int) -> Tensor:
        """Return the logits (fp32) after the prompt and after each token of the answer, from the `first` one on, by
        plain decoding's forwards.
        """
        target, rows = self._target, []
        cache = target.new_cache(len(ids) + len(answer) + 1)
        for number, tokens in enumerate([ids, *([token] for token in answer)]):
            hidden_TD = target.forward(torch.tensor(tokens, device=target.device), cache).final_ND
            if number >= first:
                rows.append(target.head(hidden_TD[-1]).float())
        return torch.stack(rows)


@dataclass(frozen=True)
class _Rows:
    """The same rows of plain decoding computed twice: by its own forwards, and by an uncached one."""

    cached_TV: Tensor
    uncached_TV: Tensor
    first: int  # place of the first row in the answer
    eps: float  # of the dtype that they were computed in

    @property
    def floor(self) -> float:
        """One rounding of the largest logit: the difference that two forwards that agree by chance may still have."""
        return self.eps * self.cached_TV.abs().max().item()

    @property
    def drift(self) -> float:
        return max((self.cached_TV - self.uncached_TV).abs().max().item(), self.floor)


def _finite(figure: float) -> float:
    return figure if figure == figure else math.inf
