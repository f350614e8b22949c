"""Raw records -> pooled figures with intervals -> rows, and the tables that show them. Ratios are computed here, once.

Definitions, repeated in every report: tau is `pipeline.decoding.accept.Acceptance.tau`, pooled over all answers.
Speed-up is plain decoding's seconds per token over the draft's, pooled over the same prompts and repeats of the same
process; with a compiled target, those of the faster of compiled and eager plain decoding. Intervals are 95% bootstrap
intervals over prompts. No speed figure is given if the losslessness gate failed.
"""

import math
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from scipy.stats import bootstrap

from eval.measure.gate import MAX_DRIFT_RATIO, MIN_P_VALUE, Gate
from eval.measure.harness import EAGER, PLAIN, Record
from eval.measure.tasks import EvalJob
from pipeline.artifacts.reports import ResultRow
from pipeline.basics.errors import PipelineError
from pipeline.decoding.accept import Acceptance, legacy_tau
from pipeline.decoding.generate import repeats_itself
from pipeline.lm.chat import token_texts
from pipeline.recipe.sections import BenchmarkConfig
from pipeline.running import markdown

MAIN_FIGURES = ("tau", "speedup")
NOISE = " noise"  # after a speed-up that proves nothing
DEPTH = "accepted at depth "  # a figure's name, before the depth
Baselines = dict[str, list[Record]]  # by name: plain decoding's answers, and with a compiled target the eager ones
Figures = dict[str, dict[str, Any]]  # by figure, the fields of its row
Place = tuple[str, float, str]  # benchmark, temperature, method


def bootstrap_interval(statistic, *samples: np.ndarray) -> list[float] | None:
    """Return the 95% bootstrap interval of a statistic of paired per-prompt samples; None for less than two prompts."""
    if len(samples[0]) < 2:
        return None
    bounds = bootstrap(
        samples,
        statistic,
        paired=True,
        vectorized=True,
        n_resamples=2000,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return [round(float(bounds.low), 4), round(float(bounds.high), 4)]


def build_rows(
    records: list[Record], gates: dict[tuple[str, str, float], Gate], origins: dict[str, dict[str, Any]]
) -> list[ResultRow]:
    """Return the figures of each benchmark, temperature and method; `origins` by method. tau has its counts by prompt,
    and with them a digest of plain decoding's answers, which shows whether two runs may be compared.
    """
    grouped: dict[tuple, dict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        grouped[record.benchmark, record.temperature][record.method].append(record)
    out = []
    for (benchmark, temperature), by_method in grouped.items():
        baselines = {name: by_method.pop(name) for name in (PLAIN, EAGER) if name in by_method}
        repeating = {_answer_key(r) for r in baselines[PLAIN] if repeats_itself(r.generation.tokens)}
        answers = {
            question: digest_answers([r.generation.tokens for r in answer_records if r.repeat == 0])
            for question, answer_records in _group_by_prompt(baselines[PLAIN]).items()
        }
        for method, drafted in by_method.items():
            gate = gates[benchmark, method, temperature]
            figures = _compute_figures(drafted, baselines, gate)
            figures |= _figures_without_repetition(repeating, drafted, baselines, gate)
            figures["tau"] |= {"answers": {question: answers[question] for question in figures["tau"]["counts"]}}
            figures["tau"]["details"]["answers_in_circles"] = sum(_answer_key(r) in repeating for r in drafted)
            place = {"benchmark": benchmark, "temperature": temperature, "origin": origins[method]}
            out += [ResultRow("decoded", method, figure, **fields, **place) for figure, fields in figures.items()]
    return out


def digest_answers(answers: list[list[int]]) -> str:
    """Return a digest of the target's own answers to a prompt's turns."""
    return f"{zlib.crc32(repr(answers).encode()):08x}"


def _answer_key(record: Record) -> tuple[str, int, int]:
    return record.question_id, record.turn, record.repeat


def _figures_without_repetition(repeating: set, drafted: list[Record], baselines: Baselines, gate: Gate) -> Figures:
    """Return the figures without the answers that repeat themselves, which are easy to draft; empty if all do, or none
    does.
    """

    def without(records: list[Record]) -> list[Record]:
        return [record for record in records if _answer_key(record) not in repeating]

    kept_records = without(drafted)
    if len(kept_records) == len(drafted) or not any(r.generation.acceptance.passes for r in kept_records):
        return {}
    figures = _compute_figures(kept_records, {name: without(records) for name, records in baselines.items()}, gate)
    return {f"{key} without circles": {k: figures[key].get(k) for k in ("value", "interval")} for key in MAIN_FIGURES}


def _group_by_prompt(records: list[Record]) -> dict[str, list[Record]]:
    grouped: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        grouped[record.question_id].append(record)
    return grouped


def _finite_or_none(value: float) -> float | None:
    """Return the value, None if it is not finite, since JSON cannot hold it."""
    return value if math.isfinite(value) else None


def _count_turns(records: list[Record]) -> list[list[tuple[int, int]]]:
    """Return, for each prompt and repeat, each turn's untrimmed tokens and passes: the released scripts count a repeat
    of a prompt as another prompt.
    """
    grouped: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
    for record in records:
        generation = record.generation
        grouped[record.question_id, record.repeat].append((generation.untrimmed_tokens, generation.acceptance.passes))
    return list(grouped.values())


def _sum_generations(records: list[Record], value_of) -> float:
    return sum(value_of(record.generation) for record in records)


def _compute_figures(drafted: list[Record], baselines: Baselines, gate: Gate) -> Figures:
    pooled = Acceptance()
    for record in drafted:
        pooled.merge(record.generation.acceptance)
    if pooled.passes == 0:
        raise PipelineError(
            f"benchmark {drafted[0].benchmark}: no answer is longer than one token, so there is no pass to measure: "
            "raise eval.max_new_tokens, or look at what the target answers"
        )
    prompts = _group_by_prompt(drafted)
    counts = {
        question: [
            _sum_generations(r, lambda g: g.acceptance.tokens),
            _sum_generations(r, lambda g: g.acceptance.passes),
        ]
        for question, r in prompts.items()
    }
    emitted, passes = np.array([pair for pair in counts.values() if pair[1]], float).T
    forwards = _sum_generations(drafted, lambda g: g.draft_forwards) / pooled.passes
    figures: Figures = {
        "tau": {
            "value": round(pooled.tau, 4),
            "interval": bootstrap_interval(lambda n, d, axis: n.sum(axis) / d.sum(axis), emitted, passes),
            "counts": counts,
            "details": {
                "prompts": len(prompts),
                "answers": len(drafted),
                "passes": pooled.passes,
                "tokens": pooled.tokens,
            },
        },
        "speedup": {"value": None},
        "draft_forwards_per_pass": {"value": round(forwards, 4)},
    }
    if (legacy := _finite_or_none(round(legacy_tau(_count_turns(drafted)), 4))) is not None:
        figures["tau_legacy"] = {"value": legacy}
    for depth, rate in enumerate(pooled.rate_by_depth(), start=1):
        figures[f"{DEPTH}{depth}"] = {"value": round(rate, 4)}
    proof = {key: _finite_or_none(value) for key, value in asdict(gate).items() if key != "places"}
    proof |= {"fit": gate.fit if gate.drawn else None, "drift_ratio": _finite_or_none(gate.drift_ratio)}
    figures["lossless"] = {"value": int(gate.passed), "details": proof}
    return figures | (_compute_speed(prompts, baselines) if gate.passed else {})


def _compute_speed(prompts: dict[str, list[Record]], baselines: Baselines) -> Figures:
    """Return the times, and the speed-up over the fastest of the baselines."""

    def per_prompt(groups: dict[str, list[Record]]) -> tuple[np.ndarray, np.ndarray]:
        seconds, tokens = (
            np.array([_sum_generations(groups[key], value_of) for key in prompts], float)
            for value_of in (_seconds, _tokens)
        )
        return seconds, tokens

    def ms_per_token(seconds: np.ndarray, tokens: np.ndarray) -> float:
        return round(1e3 * seconds.sum() / tokens.sum(), 3)

    def ratio(a, b, c, d, axis=0):
        return (a.sum(axis) / b.sum(axis)) / (c.sum(axis) / d.sum(axis))

    timed = {name: per_prompt(_group_by_prompt(records)) for name, records in baselines.items()}
    times = {name: ms_per_token(*each) for name, each in timed.items()}
    fastest = min(times, key=times.__getitem__)
    (plain_s, plain_n), (spec_s, spec_n) = timed[fastest], per_prompt(prompts)
    has_tokens = (plain_n > 0) & (spec_n > 0)  # a bootstrap sample of one-token answers only would have no ratio
    return {
        "speedup": {
            "value": round(float(ratio(plain_s, plain_n, spec_s, spec_n)), 4),
            "interval": bootstrap_interval(ratio, *(x[has_tokens] for x in (plain_s, plain_n, spec_s, spec_n))),
        },
        "plain_ms_per_token": {"value": times[fastest], "details": _name_baselines(times)},
        "ms_per_token": {"value": ms_per_token(spec_s, spec_n)},
    }


def _name_baselines(times: dict[str, float]) -> dict[str, float]:
    """Return the times of compiled and eager plain decoding; empty if nothing was compiled."""
    return {"compiled": times[PLAIN], "eager": times[EAGER]} if EAGER in times else {}


def _seconds(generation) -> float:
    return generation.seconds


def _tokens(generation) -> int:
    """Return the number of tokens that the seconds were spent on: the first token is that of the prefill."""
    return len(generation.tokens) - 1


def select_samples(job: EvalJob, records: Iterable[Record], tokenizer: Any) -> list[dict[str, Any]]:
    """Return the answers of the released draft's methods to the first prompt of each public benchmark, at the lowest
    temperature. Held-out dialogues and a user's own prompts are never shown.
    """
    recipe, samples = job.recipe, []
    public = [name for name, benchmark in recipe.eval.benchmarks.items() if _is_public(benchmark)]
    first = {name: next(task.prompt for task in job.tasks if task.benchmark == name) for name in public}
    for record in records:
        prompt, answer, method = first.get(record.benchmark), record.generation, job.methods.get(record.method)
        if not prompt or not method or method.draft != recipe.publish.draft or not answer.depths:
            continue
        place = (record.question_id, record.turn, record.repeat, record.temperature)
        if place == (prompt.question_id, 0, 0, min(recipe.eval.temperatures)):
            pieces = zip(token_texts(tokenizer, answer.tokens), answer.depths, strict=True)
            place_facts = {"benchmark": record.benchmark, "temperature": record.temperature, "method": record.method}
            counts = {"passes": answer.acceptance.passes, "tau": answer.acceptance.tau if len(answer.tokens) > 1 else 1}
            samples.append(place_facts | counts | {"question": prompt.turns[0], "pieces": list(map(list, pieces))})
    return samples


def _is_public(benchmark: BenchmarkConfig) -> bool:
    """Return whether the benchmark's prompts are already public."""
    return benchmark.source.startswith(("embedded:", "benchmark:")) and benchmark.path is None


# -- views of rows -----------------------------------------------------------------------------------------------------


def group_by_place(rows: Iterable[ResultRow], first: Sequence[str] = ()) -> dict[Place, dict[str, ResultRow]]:
    """Group rows by benchmark, temperature and method, each with its rows by figure; in each benchmark and temperature
    the methods of `first` come before all others.
    """
    grouped: dict[Place, dict[str, ResultRow]] = {}
    for row in rows:
        grouped.setdefault((row.benchmark, row.temperature or 0.0, row.method), {})[row.figure] = row
    places = list(dict.fromkeys(place[:2] for place in grouped))
    order = {method: number for number, method in enumerate(first)}
    return dict(
        sorted(grouped.items(), key=lambda item: (places.index(item[0][:2]), order.get(item[0][2], len(order))))
    )


def is_lossless(rows: Iterable[ResultRow]) -> bool:
    return all(row.value for row in rows if row.figure == "lossless")


def format_figure(figure: str, value: float | None, interval: list[float] | None = None) -> str:
    """Return one figure as a table shows it."""
    if value is None:
        return "withheld"
    digits, suffix = ".2f" if figure.startswith(MAIN_FIGURES) else ",.6g", "x" if figure.startswith("speedup") else ""
    return f"{value:{digits}}" + (f" [{interval[0]:{digits}}, {interval[1]:{digits}}]" if interval else "") + suffix


def is_noise(speedup: ResultRow, tau: ResultRow | None) -> bool:
    """Return whether a speed-up proves nothing: its interval holds 1 (or one prompt gave none), or it exceeds tau."""
    if speedup.value is None:
        return False
    if speedup.interval is None and speedup.instrument == "decoded":
        return True
    low, high = speedup.interval or (math.inf, math.inf)
    return low <= 1 <= high or (tau is not None and speedup.value > (tau.value or math.inf))


def has_noise(places: Iterable[dict[str, ResultRow]]) -> bool:
    """Return whether any speed-up among these measurements is noise."""
    return any(is_noise(figures["speedup"], figures["tau"]) for figures in places)


def format_tau_and_speedup(figures: dict[str, ResultRow]) -> list[str]:
    """Return tau and speed-up with their intervals; a speed-up that is noise is marked."""
    tau, speedup = (format_figure(figure, figures[figure].value, figures[figure].interval) for figure in MAIN_FIGURES)
    return [tau, speedup + NOISE * is_noise(figures["speedup"], figures["tau"])]


def acceptance_rates(figures: dict[str, ResultRow]) -> list[float]:
    """Return the acceptance rate at each depth, given the depth before."""
    return [row.value or 0.0 for figure, row in figures.items() if figure.startswith(DEPTH)]


def format_cells(place: Place, figures: dict[str, ResultRow]) -> dict[str, Any]:
    """Return the cells of one measurement in tables, by column."""
    lossless, counts, legacy = figures["lossless"], figures["tau"].details, figures.get("tau_legacy")
    gate, (tau, speedup) = lossless.details, format_tau_and_speedup(figures)
    identical = f"{gate['identical']} of {gate['checked']} identical"
    near_ties = f", {gate['near_ties']} near ties" if gate["near_ties"] else ""
    proof = (f"fit p = {gate['fit']:.2g}" if gate["drawn"] else identical) + near_ties
    if gate["rounds"]:
        ratio = "not finite" if gate["drift_ratio"] is None else f"{gate['drift_ratio']:.1f} of plain's"
        proof += f", drift {ratio} in {gate['rounds']} rounds"
    repeating = f"{counts['answers_in_circles']} of {counts['answers']}"
    if rest_tau := figures.get("tau without circles"):
        rest_speedup = figures["speedup without circles"]
        repeating += f"; tau {rest_tau.value:.2f}"
        repeating += (
            f", {rest_speedup.value:.2f}x{NOISE * is_noise(rest_speedup, rest_tau)}" if rest_speedup.value else ""
        )
    times = [f"{figures[key].value:.1f}" for key in ("ms_per_token", "plain_ms_per_token") if key in figures]
    if times and (both := figures["plain_ms_per_token"].details):
        times[1] = ", ".join(f"{value:.1f} {name}" for name, value in both.items())
    return {
        "benchmark": place[0],
        "T": f"{place[1]:g}",
        "method": place[2],
        "prompts": counts["prompts"],
        "tau": tau,
        "speed-up": speedup,
        "accepted at depth 1, 2, ...": ", ".join(f"{rate:.2f}" for rate in acceptance_rates(figures)),
        "ms/token, plain": ", ".join(times) or "withheld",
        "tau, legacy count": f"{legacy.value:.2f}" if legacy else "-",
        "answers in circles; without them": repeating,
        "passed": "yes" if lossless.value else "NO",
        "lossless": ("as the gate allows" if gate["drawn"] else identical) + near_ties if lossless.value else "NO",
        "proof": proof if lossless.value else f"NO: {proof}",
    }


def _format_lines(places: dict[Place, dict[str, ResultRow]], columns: list[str]) -> list[list[Any]]:
    shown = [format_cells(place, figures) for place, figures in places.items()]
    return [[line[column] for column in columns] for line in shown]


def format_headline(places: dict[Place, dict[str, ResultRow]]) -> str:
    """Return a Markdown table of a release's figures, a line per benchmark, temperature and method."""
    heads = ["benchmark", "T", "method", "tau", "speed-up", "accepted at depth 1, 2, ...", "lossless"]
    return markdown.format_table(heads, _format_lines(places, heads))


def format_summary(rows: list[ResultRow]) -> str:
    """Return the table for a terminal: the figures of each method, without the proof of losslessness."""
    columns = ["benchmark", "T", "method", "tau", "speed-up", "passed"]
    heads = [*columns[:3], "tau (95%)", "speed-up (95%)", "lossless"]
    return markdown.format_narrow_table(heads, _format_lines(group_by_place(rows), columns))


def format_table(rows: list[ResultRow]) -> str:
    """Return a Markdown table with one line per benchmark, temperature and method, and the proof of losslessness."""
    has_repeating = any(row.details["answers_in_circles"] for row in rows if row.figure == "tau")
    last = ["tau, legacy count", *["answers in circles; without them"] * has_repeating]
    columns = ["benchmark", "T", "method", "prompts", "tau", "speed-up", "ms/token, plain", "proof", *last]
    heads = [*columns[:4], "tau (95%)", "speed-up (95%)", "ms/token, plain", "lossless", *last]
    return markdown.format_table(heads, _format_lines(group_by_place(rows), columns))


def explain_figures() -> str:
    return (
        "tau = tokens emitted by verification passes / verification passes, pooled over all answers; tokens after the "
        "stop token are not counted and the first token of an answer, which the prompt's forward gives, belongs to no "
        "pass. Speed-up = plain decoding's time per token / the draft's, same process, kernels, cache, prompts and "
        "stop rule, methods taking turns; the prompt's own forward, which both share, is left out. With a compiled "
        "target plain decoding is timed compiled and eager, and the faster counts. (On an accelerator "
        "a tree's attention has a mask and plain decoding's has none: torch may choose another kernel for each, and "
        "neither copies keys and values of grouped heads.) Intervals: "
        "bootstrap over prompts. A speed-up is noise where its interval holds 1, where one prompt gives no interval, "
        "and where it exceeds tau, for a pass with guesses takes no less time than one without. "
        "Lossless: the answers equal plain decoding's token for token, on so many of the "
        "prompts, above T = 0 with the same random numbers. Drift is the largest difference between logits of the "
        "tree's forward, in real rounds, and those of an uncached forward after the same tokens, over the largest one "
        "of plain decoding's own forwards along the same answers (allowed: "
        f"{MAX_DRIFT_RATIO:g}). "
        "Near ties are answers that part although the draft's round chose as plain decoding chooses, "
        "from logits that drift no further than that, where plain decoding's choice between the two tokens was as "
        "close as its own drift of their odds. Trees of drawn candidates have plain decoding's distribution, not its "
        "tokens: fit is the p-value of the emitted tokens' places "
        f"in plain decoding's distribution being uniform (at least {MIN_P_VALUE:g}). "
        "An answer runs in circles when three in four of its last tokens are those one period before: easy to draft. "
        "The legacy count is that of the released scripts of this line of papers, given for comparison with their "
        "tables only: the mean over prompts of (new tokens of all turns) / (sum over turns of passes - 1), where new "
        "tokens hold the prompt's own first one and those after the stop token, and lack the last pass's last one."
    )
