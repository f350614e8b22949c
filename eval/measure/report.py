"""Raw records -> pooled figures with intervals -> the report's entries and its table. Ratios are formed here, once.

Definitions, repeated in every report: tau is `pipeline.decoding.accept.Acceptance.tau`, pooled over all answers.
Speed-up is plain decoding's seconds per token over the draft's, pooled over the same prompts and repeats of the same
process. Intervals are 95% bootstrap intervals over prompts. No speed figure is given where the losslessness gate
failed.
"""

import math
import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
from scipy.stats import bootstrap

from eval.measure.gate import DRIFT, UNLIKELY, Gate
from eval.measure.harness import PLAIN, Record
from pipeline.artifacts.reports import Row
from pipeline.basics.errors import PipelineError
from pipeline.decoding.accept import Acceptance, legacy_tau
from pipeline.decoding.generate import repeats_itself
from pipeline.running import markdown


def interval(statistic, *samples: np.ndarray) -> list[float] | None:
    """95% bootstrap interval of a statistic of paired per-prompt samples; None for fewer than two prompts."""
    if len(samples[0]) < 2:
        return None
    found = bootstrap(
        samples,
        statistic,
        paired=True,
        vectorized=True,
        n_resamples=2000,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return [round(float(found.low), 4), round(float(found.high), 4)]


def results(records: list[Record], gates: dict[tuple[str, str, float], Gate]) -> list[dict[str, Any]]:
    """One entry per benchmark, temperature and method (its key is "draft")."""
    grouped: dict[tuple, dict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        grouped[record.benchmark, record.temperature][record.method].append(record)
    out = []
    for (benchmark, temperature), by_method in grouped.items():
        circling = {_place(r) for r in by_method[PLAIN] if repeats_itself(r.generation.tokens)}
        for method, drafted in by_method.items():
            if method != PLAIN:
                gate = gates[benchmark, method, temperature]
                figures = _figures(drafted, by_method[PLAIN], gate)
                figures |= _without(circling, drafted, by_method[PLAIN], gate)
                out.append({"benchmark": benchmark, "temperature": temperature, "draft": method, **figures})
    return out


FIGURES = ("tau", "speedup", "tau_legacy", "draft_forwards_per_pass", "ms_per_token", "plain_ms_per_token")


def rows(entries: list[dict], records: list[Record], origins: dict[str, dict[str, Any]]) -> list[Row]:
    """The figures of `results`, one a row; `origins` by method. tau has its counts by prompt, and with them a digest of
    plain decoding's answers, by which others know that they may be compared.
    """
    answers: dict[tuple, list] = defaultdict(list)
    counts: dict[tuple, dict[str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
    for record in records:
        place = record.benchmark, record.temperature, record.method
        if record.method != PLAIN:
            found = counts[place][record.question_id]
            found[0] += record.generation.acceptance.tokens
            found[1] += record.generation.acceptance.passes
        elif record.repeat == 0:
            answers[*place[:2], record.question_id].append(record.generation.tokens)
    out = []
    for entry in entries:
        where = entry["benchmark"], entry["temperature"]
        what: dict[str, Any] = {"benchmark": where[0], "temperature": where[1], "origin": origins[entry["draft"]]}
        for figure in FIGURES:
            value = entry.get(figure)
            if value is None and figure != "speedup":
                continue
            more: dict[str, Any] = {"interval": entry.get(f"{figure}_interval")}
            if figure == "tau":
                mine = dict(counts[*where, entry["draft"]])
                more |= {"counts": mine, "answers": {q: digest(answers[*where, q]) for q in mine}}
            out.append(Row("decoded", entry["draft"], figure, value, **what, **more))
        rates = enumerate(entry["acceptance_by_depth"], start=1)
        out += [Row("decoded", entry["draft"], f"accepted at depth {depth}", rate, **what) for depth, rate in rates]
    return out


def digest(answers: list[list[int]]) -> str:
    """Of the target's own answers to a prompt's turns."""
    return f"{zlib.crc32(repr(answers).encode()):08x}"


def _place(record: Record) -> tuple[str, int, int]:
    return record.question_id, record.turn, record.repeat


def _without(circling: set, drafted: list[Record], baseline: list[Record], gate: Gate) -> dict[str, Any]:
    """How many answers run in circles, where copying is easy, and the figures of the others: None where there are
    none.
    """
    kept, plain_kept = ([r for r in records if _place(r) not in circling] for records in (drafted, baseline))
    out: dict[str, Any] = {"answers_in_circles": len(drafted) - len(kept), "without_circles": None}
    if out["answers_in_circles"] and any(r.generation.acceptance.passes for r in kept):
        found = _figures(kept, plain_kept, gate)
        out["without_circles"] = {key: found.get(key) for key in ("tau", "tau_interval", "speedup", "speedup_interval")}
    return out


def _per_prompt(records: list[Record]) -> dict[str, list[Record]]:
    grouped: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        grouped[record.question_id].append(record)
    return grouped


def _number(value: float) -> float | None:
    """None for what JSON has no number for."""
    return value if math.isfinite(value) else None


def _turns(records: list[Record]) -> list[list[tuple[int, int]]]:
    """By prompt and repeat, each turn's uncut tokens and passes: a repeat of a prompt is to the released scripts
    another prompt.
    """
    grouped: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
    for record in records:
        found = record.generation
        grouped[record.question_id, record.repeat].append((found.untrimmed_tokens, found.acceptance.passes))
    return list(grouped.values())


def _sum(records: list[Record], what) -> float:
    return sum(what(record.generation) for record in records)


def _figures(drafted: list[Record], baseline: list[Record], gate: Gate) -> dict[str, Any]:
    pooled = Acceptance()
    for record in drafted:
        pooled.merge(record.generation.acceptance)
    if pooled.passes == 0:
        raise PipelineError(
            f"benchmark {drafted[0].benchmark}: no answer is longer than one token, so there is no pass to measure: "
            "raise eval.max_new_tokens, or look at what the target answers"
        )
    prompts, plain_prompts = _per_prompt(drafted), _per_prompt(baseline)
    passes = np.array([_sum(r, lambda g: g.acceptance.passes) for r in prompts.values()], float)
    emitted = np.array([_sum(r, lambda g: g.acceptance.tokens) for r in prompts.values()], float)
    decoded = passes > 0
    figures: dict[str, Any] = {
        "prompts": len(prompts),
        "answers": len(drafted),
        "passes": pooled.passes,
        "tokens": pooled.tokens,
        "tau": round(pooled.tau, 4),
        "tau_interval": interval(lambda n, d, axis: n.sum(axis) / d.sum(axis), emitted[decoded], passes[decoded]),
        "tau_mean_over_prompts": round(float((emitted[decoded] / passes[decoded]).mean()), 4),
        "tau_legacy": _number(round(legacy_tau(_turns(drafted)), 4)),
        "acceptance_by_depth": [round(rate, 4) for rate in pooled.rate_by_depth()],
        "draft_forwards_per_pass": round(_sum(drafted, lambda g: g.draft_forwards) / pooled.passes, 4),
        "gate": {
            "passed": gate.passed,
            "fit": gate.fit if gate.drawn else None,
            "drift_ratio": _number(gate.drift_ratio),
        }
        | {key: _number(value) for key, value in asdict(gate).items() if key != "places"},
        "speedup": None,
    }
    if gate.passed:
        figures |= _speed(prompts, plain_prompts)
    return figures


def _speed(prompts: dict[str, list[Record]], plain_prompts: dict[str, list[Record]]) -> dict[str, Any]:
    def per_prompt(groups: dict[str, list[Record]], what) -> np.ndarray:
        return np.array([_sum(groups[key], what) for key in prompts], float)

    plain_s, plain_n = (
        per_prompt(plain_prompts, _seconds),
        per_prompt(plain_prompts, _tokens),
    )
    spec_s, spec_n = per_prompt(prompts, _seconds), per_prompt(prompts, _tokens)

    longer = (plain_n > 0) & (spec_n > 0)  # a resample of answers of one token only would have no ratio

    def ratio(a, b, c, d, axis=0):
        return (a.sum(axis) / b.sum(axis)) / (c.sum(axis) / d.sum(axis))

    seconds = spec_s.sum()
    laps = {name: sum(_sum(r, partial(_lap, name)) for r in prompts.values()) for name in ("draft", "verify")}
    draft, verify = (laps[name] / seconds for name in ("draft", "verify"))
    repeats = sorted({record.repeat for records in prompts.values() for record in records})
    by_repeat = []
    for repeat in repeats:
        chosen = [
            {key: [r for r in records if r.repeat == repeat] for key, records in groups.items()}
            for groups in (plain_prompts, prompts)
        ]
        sums = [sum(_sum(r, what) for r in groups.values()) for groups in chosen for what in (_seconds, _tokens)]
        if all(sums):  # a repeat of answers of one token only has no ratio
            by_repeat.append(round((sums[0] / sums[1]) / (sums[2] / sums[3]), 4))
    return {
        "speedup": round(float(ratio(plain_s, plain_n, spec_s, spec_n)), 4),
        "speedup_interval": interval(ratio, *(x[longer] for x in (plain_s, plain_n, spec_s, spec_n))),
        "speedup_by_repeat": by_repeat,
        "plain_ms_per_token": round(1e3 * plain_s.sum() / plain_n.sum(), 3),
        "ms_per_token": round(1e3 * seconds / spec_n.sum(), 3),
        "time_shares": {  # not known where nobody waited for the GPU between the parts of a round
            "draft": round(draft, 4),
            "verify": round(verify, 4),
            "bookkeeping": round(1 - draft - verify, 4),
        }
        if laps["verify"]
        else None,
    }


def _lap(name: str, generation) -> float:
    return generation.split.get(name, 0.0)


def _seconds(generation) -> float:
    return generation.seconds


def _tokens(generation) -> int:
    """Tokens that the seconds paid for: the first one is the prompt's own forward's."""
    return len(generation.tokens) - 1


def lossless(entries: list[dict]) -> bool:
    return all(entry["gate"]["passed"] for entry in entries)


def tau_said(entry: dict) -> str:
    return _with_interval(entry["tau"], entry["tau_interval"])


def speed_said(entry: dict) -> str:
    if entry["speedup"] is None:
        return "withheld"
    return _with_interval(entry["speedup"], entry.get("speedup_interval")) + "x"


def rates_said(entry: dict) -> str:
    return ", ".join(f"{rate:.2f}" for rate in entry["acceptance_by_depth"])


def verdict(entry: dict) -> str:
    """The gate's, in a few words."""
    gate = entry["gate"]
    if not gate["passed"]:
        return "NO"
    same = "as the gate allows" if gate["drawn"] else f"{gate['identical']} of {gate['checked']} identical"
    return same + (f", {gate['near_ties']} near ties" if gate["near_ties"] else "")


def _with_interval(value: float, bounds: list[float] | None) -> str:
    return f"{value:.2f}" + (f" [{bounds[0]:.2f}, {bounds[1]:.2f}]" if bounds else "")


def table(entries: list[dict]) -> str:
    """Markdown; one line per benchmark, temperature and method."""
    heads = ["benchmark", "T", "method", "prompts", "tau (95%)", "speed-up (95%)", "ms/token, plain", "lossless"]
    heads.append("tau, legacy count")
    circles = any(entry.get("answers_in_circles") for entry in entries)
    return markdown.table(
        [*heads, *["answers in circles; without them"] * circles], (_row(e, circles) for e in entries)
    )


def _row(entry: dict, circles: bool) -> list[Any]:
    gate, legacy = entry["gate"], entry["tau_legacy"]
    proof = f"{gate['identical']} of {gate['checked']} identical"
    if gate["drawn"]:
        proof = f"fit p = {gate['fit']:.2g}"
    proof += f", {gate['near_ties']} near ties" if gate["near_ties"] else ""
    if gate["rounds"]:
        ratio = "not finite" if gate["drift_ratio"] is None else f"{gate['drift_ratio']:.1f} of plain's"
        proof += f", drift {ratio} in {gate['rounds']} rounds"
    is_paid = entry["speedup"] is not None
    paid = f"{entry['ms_per_token']:.1f}, {entry['plain_ms_per_token']:.1f}" if is_paid else "withheld"
    cells = [entry["benchmark"], f"{entry['temperature']:g}", entry["draft"], entry["prompts"]]
    cells += [tau_said(entry), speed_said(entry), paid, f"{'' if gate['passed'] else 'NO: '}{proof}"]
    cells.append("-" if legacy is None else f"{legacy:.2f}")
    return [*cells, *([_circles_said(entry)] if circles else [])]


def together(entries: list[dict], shown: Sequence[str]) -> list[dict]:
    """The entries with these methods first at each benchmark and temperature, in this order."""
    places = list(dict.fromkeys((e["benchmark"], e["temperature"]) for e in entries))
    order = {method: number for number, method in enumerate(shown)}
    return sorted(
        entries, key=lambda e: (places.index((e["benchmark"], e["temperature"])), order.get(e["draft"], len(order)))
    )


def headline(entries: list[dict]) -> str:
    """Markdown: a release's figures, a line per benchmark, temperature and method."""
    heads = ["benchmark", "T", "method", "tau", "speed-up", "accepted at depth 1, 2, ...", "lossless"]
    rows = (
        [e["benchmark"], f"{e['temperature']:g}", e["draft"], tau_said(e), speed_said(e), rates_said(e), verdict(e)]
        for e in entries
    )
    return markdown.table(heads, rows)


def _circles_said(entry: dict) -> str:
    said, rest = f"{entry['answers_in_circles']} of {entry['answers']}", entry["without_circles"]
    if rest is None:
        return said
    return f"{said}; tau {rest['tau']:.2f}" + (f", {rest['speedup']:.2f}x" if rest["speedup"] else "")


def explain() -> str:
    return (
        "tau = tokens emitted by verification passes / verification passes, pooled over all answers; tokens after the "
        "stop token are not counted and the first token of an answer, which the prompt's forward gives, belongs to no "
        "pass. Speed-up = plain decoding's time per token / the draft's, same process, kernels, cache, prompts and "
        "stop rule, methods taking turns; the prompt's own forward, which both share, is left out. (On an accelerator "
        "a tree's attention has a mask and plain decoding's has none: torch may choose another kernel for each, and "
        "neither copies keys and values of grouped heads.) Intervals: "
        "bootstrap over prompts. Lossless: the answers equal plain decoding's token for token, on so many of the "
        "prompts, above T = 0 with the same random numbers. Drift is the largest difference between logits of the "
        "tree's forward, in real rounds, and those of an uncached forward after the same tokens, over the largest one "
        "of plain decoding's own forwards along the same answers (allowed: "
        f"{DRIFT:g}). Near ties are answers that part although the draft's round chose as plain decoding chooses, "
        "from logits that drift no further than that, where plain decoding's choice between the two tokens was as "
        "close as its own drift of their odds. Trees of drawn candidates have plain decoding's distribution, not its "
        "tokens: fit is the p-value of the emitted tokens' places "
        f"in plain decoding's distribution being uniform (at least {UNLIKELY:g}). "
        "An answer runs in circles when three in four of its last tokens are those one period before: easy to draft. "
        "The legacy count is that of the released scripts of this line of papers, given for comparison with their "
        "tables only: the mean over prompts of (new tokens of all turns) / (sum over turns of passes - 1), where new "
        "tokens hold the prompt's own first one and those after the stop token, and lack the last pass's last one."
    )
