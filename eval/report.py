"""Raw records -> pooled figures with intervals -> report.json, a table, plots. Ratios are formed here, once.

Definitions, repeated in every report: tau is `pipeline.decoding.accept.Acceptance.tau`, pooled over all answers. Speed-up
is plain decoding's seconds per token over the draft's, pooled over the same prompts and repeats of the same process.
Intervals are 95% bootstrap intervals over prompts. No speed figure is given where the losslessness gate failed.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from scipy.stats import bootstrap

from eval.bench import EXACT, PLAIN, Bench, Gate, Record
from pipeline.decoding.accept import Acceptance, legacy_tau
from pipeline.errors import PipelineError

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = ["#4C72B0", "#DD8452", "#55A868", "#C44E52", "#8172B3", "#937860"]


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


def results(bench: Bench) -> list[dict[str, Any]]:
    """One entry per benchmark, temperature and draft."""
    grouped: dict[tuple, dict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in bench.records:
        grouped[record.benchmark, record.temperature][record.method].append(record)
    out = []
    for (benchmark, temperature), by_method in grouped.items():
        for method, records in by_method.items():
            if method != PLAIN:
                gate = bench.gates[benchmark, method, temperature]
                figures = _figures(records, by_method[PLAIN], gate)
                out.append({"benchmark": benchmark, "temperature": temperature, "draft": method, **figures})
    return out


def _per_prompt(records: list[Record]) -> dict[str, list[Record]]:
    grouped: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        grouped[record.question_id].append(record)
    return grouped


def _sum(records: list[Record], what) -> float:
    return sum(what(record.generation) for record in records)


def _figures(drafted: list[Record], baseline: list[Record], gate: Gate) -> dict[str, Any]:
    pooled = Acceptance()
    for record in drafted:
        pooled.merge(record.generation.acceptance)
    if pooled.passes == 0:
        raise PipelineError(
            f"benchmark {drafted[0].benchmark}: no answer is longer than one token, so there is no pass to measure: raise "
            "eval.max_new_tokens, or look at what the target answers"
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
        "tau_legacy": round(
            legacy_tau([r.generation.acceptance for r in drafted], [r.generation.untrimmed_tokens for r in drafted]), 4
        ),
        "acceptance_by_depth": [round(rate, 4) for rate in pooled.rate_by_depth()],
        "gate": {
            "passed": gate.passed,
            "checked": gate.checked,
            "identical": gate.identical,
            "near_ties": gate.near_ties,
            "largest_error": gate.largest_error,
        },
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

    def ratio(a, b, c, d, axis=0):
        return (a.sum(axis) / b.sum(axis)) / (c.sum(axis) / d.sum(axis))

    seconds = spec_s.sum()
    draft = sum(_sum(r, lambda g: g.draft_seconds) for r in prompts.values()) / seconds
    verify = sum(_sum(r, lambda g: g.verify_seconds) for r in prompts.values()) / seconds
    repeats = sorted({record.repeat for records in prompts.values() for record in records})
    by_repeat = []
    for repeat in repeats:
        chosen = [
            {key: [r for r in records if r.repeat == repeat] for key, records in groups.items()}
            for groups in (plain_prompts, prompts)
        ]
        sums = [sum(_sum(r, what) for r in groups.values()) for groups in chosen for what in (_seconds, _tokens)]
        by_repeat.append(round((sums[0] / sums[1]) / (sums[2] / sums[3]), 4))
    return {
        "speedup": round(float(ratio(plain_s, plain_n, spec_s, spec_n)), 4),
        "speedup_interval": interval(ratio, plain_s, plain_n, spec_s, spec_n),
        "speedup_by_repeat": by_repeat,
        "plain_ms_per_token": round(1e3 * plain_s.sum() / plain_n.sum(), 3),
        "ms_per_token": round(1e3 * seconds / spec_n.sum(), 3),
        "time_shares": {
            "draft": round(draft, 4),
            "verify": round(verify, 4),
            "bookkeeping": round(1 - draft - verify, 4),
        },
    }


def _seconds(generation) -> float:
    return generation.seconds


def _tokens(generation) -> int:
    """Tokens that the seconds paid for: the first one is the prompt's own forward's."""
    return len(generation.tokens) - 1


def lossless(entries: list[dict]) -> bool:
    return all(entry["gate"]["passed"] for entry in entries)


def _with_interval(value: float | None, bounds: list[float] | None) -> str:
    if value is None:
        return "withheld"
    return f"{value:.2f}" + (f" [{bounds[0]:.2f}, {bounds[1]:.2f}]" if bounds else "")


def table(entries: list[dict]) -> str:
    """Markdown; one line per benchmark, temperature and draft."""
    lines = [
        "| benchmark | T | draft | prompts | tau (95%) | speed-up (95%) | lossless | tau, legacy count |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for entry in entries:
        gate = entry["gate"]
        if entry["temperature"] == 0:
            proof = f"{gate['identical']} of {gate['checked']} identical"
            proof += f", {gate['near_ties']} near ties" if gate["near_ties"] else ""
        else:
            proof = f"error {gate['largest_error']:.0e} in {gate['checked']} rounds"
        speed = f"{_with_interval(entry['speedup'], entry.get('speedup_interval'))}" + ("x" if entry["speedup"] else "")
        tau = _with_interval(entry["tau"], entry["tau_interval"])
        verdict = "" if gate["passed"] else "NO: "
        lines.append(
            f"| {entry['benchmark']} | {entry['temperature']:g} | {entry['draft']} | {entry['prompts']} | {tau} | {speed} | "
            f"{verdict}{proof} | {entry['tau_legacy']:.2f} |"
        )
    return "\n".join(lines)


def explain() -> str:
    return (
        "tau = tokens emitted by verification passes / verification passes, pooled over all answers; tokens after the stop "
        "token are not counted and the first token of an answer, which the prompt's forward gives, belongs to no pass. "
        "Speed-up = plain decoding's time per token / the draft's, same process, kernels, cache, prompts and stop rule, "
        "methods taking turns; the prompt's own forward, which both share, is left out. Intervals: bootstrap over prompts. "
        "Lossless: at T = 0 the answers equal plain decoding's token for token; at T > 0 the exact output distribution of "
        f"real rounds, summed over all outcomes of the acceptance rule, differs from the target's by at most {EXACT:g}. "
        "The legacy count (one pass fewer, tokens after the stop token kept) is that of the released scripts of this line "
        "of papers, given for comparison with their tables only."
    )


# -- plots -----------------------------------------------------------------------------------------------------------


def plots(entries: list[dict], metrics: dict[str, Path], folder: Path) -> list[Path]:
    """acceptance_by_depth.png, tau_and_speed.png, loss_curves.png."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = [_plot_depth(entries, folder), _plot_bars(entries, folder), _plot_losses(metrics, folder)]
    plt.close("all")
    return drawn


def _save(figure, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    return path


def _plot_depth(entries: list[dict], folder: Path) -> Path:
    shown = [entry for entry in entries if entry["temperature"] == min(e["temperature"] for e in entries)]
    benchmarks = sorted({entry["benchmark"] for entry in shown})
    drafts = sorted({entry["draft"] for entry in shown})
    figure, axes = plt.subplots(1, len(benchmarks), figsize=(4.5 * len(benchmarks), 3.6), sharey=True, squeeze=False)
    for axis, benchmark in zip(axes[0], benchmarks, strict=True):
        for entry in (e for e in shown if e["benchmark"] == benchmark):
            rates = entry["acceptance_by_depth"]
            axis.plot(
                range(1, len(rates) + 1),
                rates,
                "o-",
                label=entry["draft"],
                color=COLOURS[drafts.index(entry["draft"]) % 6],
            )
        axis.set(title=f"{benchmark}, T = {shown[0]['temperature']:g}", xlabel="depth in the tree", ylim=(0, 1))
        axis.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("accepted, given the depth before")
    axes[0][0].legend()
    return _save(figure, folder / "acceptance_by_depth.png")


def _plot_bars(entries: list[dict], folder: Path) -> Path:
    drafts = sorted({entry["draft"] for entry in entries})
    groups = list(dict.fromkeys((entry["benchmark"], entry["temperature"]) for entry in entries))
    figure, axes = plt.subplots(1, 2, figsize=(5 + 2 * len(groups), 3.8))
    width = 0.8 / len(drafts)
    for axis, (value, bounds, label) in zip(
        axes,
        [
            ("tau", "tau_interval", "tau (tokens per target pass)"),
            ("speedup", "speedup_interval", "speed-up over plain"),
        ],
        strict=True,
    ):
        for number, draft in enumerate(drafts):
            chosen = {(e["benchmark"], e["temperature"]): e for e in entries if e["draft"] == draft}
            heights = [chosen[g][value] or 0 for g in groups]
            ends = [chosen[g].get(bounds) or [h, h] for g, h in zip(groups, heights, strict=True)]
            errors = [
                [h - low for h, (low, _) in zip(heights, ends, strict=True)],
                [high - h for h, (_, high) in zip(heights, ends, strict=True)],
            ]
            places = np.arange(len(groups)) + number * width
            axis.bar(places, heights, width * 0.92, label=draft, color=COLOURS[number % 6])
            axis.errorbar(places, heights, np.maximum(errors, 0), fmt="none", ecolor="black", capsize=3, lw=1)
        axis.axhline(1, color="grey", lw=1, ls="--")
        axis.set(ylabel=label, xticks=np.arange(len(groups)) + width * (len(drafts) - 1) / 2)
        axis.set_xticklabels([f"{name}\nT = {temperature:g}" for name, temperature in groups])
    axes[0].legend()
    return _save(figure, folder / "tau_and_speed.png")


def _plot_losses(metrics: dict[str, Path], folder: Path) -> Path:
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6))
    for number, (name, path) in enumerate(sorted(metrics.items())):
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        colour = COLOURS[number % 6]
        train = [line for line in lines if line["kind"] == "train"]
        held = [line for line in lines if line["kind"] == "validation"]
        tokens = {line["step"]: line["trained_tokens"] for line in train}
        for axis, key in zip(axes, ("next_classification", "next_agreement"), strict=True):
            if train:
                smooth = _smoothed([line[key] for line in train])
                axis.plot(
                    [line["trained_tokens"] for line in train],
                    smooth,
                    color=colour,
                    lw=1,
                    alpha=0.6,
                    label=f"{name}, training",
                )
            axis.plot(
                [tokens[line["step"]] for line in held],
                [line[key] for line in held],
                "o-",
                ms=4,
                color=colour,
                label=f"{name}, held out",
            )
    axes[0].set(xlabel="trained tokens", ylabel="cross-entropy, next token")
    axes[1].set(xlabel="trained tokens", ylabel="top-1 agreement with the target")
    for axis in axes:
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    return _save(figure, folder / "loss_curves.png")


def _smoothed(values: list[float], window: int = 20) -> np.ndarray:
    """Trailing mean over at most `window` steps."""
    sums = np.cumsum([0.0, *values])
    ends = np.arange(1, len(values) + 1)
    begins = np.maximum(ends - window, 0)
    return (sums[ends] - sums[begins]) / (ends - begins)
