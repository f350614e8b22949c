"""Plots of a training, drawn from its metrics.jsonl: loss, agreement, and tau as estimated and as decoded."""

from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import EngFormatter

from pipeline.artifacts.checkpoint import METRICS as METRICS
from pipeline.basics.files import parse_object

COLOURS = ["#4C72B0", "#DD8452", "#55A868", "#C44E52", "#8172B3", "#937860"]
SMOOTHED = 20  # steps of the moving average


def read_metrics(path: Path) -> list[dict]:
    """Return the lines of a metrics file. Raises PipelineError for a line that is not a JSON object."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [parse_object(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1)]


def draw_training(metrics: dict[str, Path], file: Path, colours: dict[str, str] | None = None) -> Path:
    """Draw all drafts' metrics files (by the draft's name) over trained tokens, and return `file`. `colours`: the
    colour of each draft in other figures.
    """
    colours = colours or {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(sorted(metrics))}
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.4), layout="constrained")
    for name, path in sorted(metrics.items()):
        _draw_draft(axes, name, read_metrics(path), colours[name])
    for axis, label in zip(axes, ("cross-entropy, next token", "top-1 agreement with the target", "tau"), strict=True):
        axis.set(xlabel="trained tokens", ylabel=label)
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))  # 200k
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, frameon=False)
    figure.suptitle(
        f"training: mean of the last {SMOOTHED} steps; steps in the curve: the dialogues are seen again", fontsize=9
    )
    figure.savefig(file, dpi=110)
    plt.close(figure)
    return file


def _draw_draft(axes, name: str, lines: list[dict], colour: str) -> None:
    train = [line for line in lines if line["kind"] == "train"]
    held = [line for line in lines if line["kind"] == "validation"]
    decoded = [line for line in lines if line["kind"] == "decoded"]
    tokens = [line["trained_tokens"] for line in train]
    for axis, key in zip(axes, ("classification", "agreement"), strict=False):
        if train:
            axis.plot(
                tokens,
                _moving_average([line[key] for line in train]),
                color=colour,
                lw=1,
                alpha=0.6,
                label=f"{name}, training",
            )
        places = [line["trained_tokens"] for line in held]
        axis.plot(places, [line[key] for line in held], "o-", ms=4, color=colour, label=f"{name}, held out")
    for series, key, style, words in (
        (held, "estimated_tau", {"fmt": "o-", "ms": 4}, "estimated"),
        (held, "estimated_chain_tau", {"fmt": "o:", "ms": 3, "alpha": 0.6}, "estimated, chain"),
        (decoded, "decoded_tau", {"fmt": "D", "ms": 8, "mfc": "none"}, "decoded"),
    ):
        points = [(line["trained_tokens"], line[key]) for line in series if key in line]
        if points:
            fmt = style.pop("fmt")
            axes[2].plot(*zip(*points, strict=True), fmt, color=colour, label=f"{name}, {words}", **style)


def _moving_average(values: list[float]) -> np.ndarray:
    """Return, at each step, the mean of the last SMOOTHED values; of fewer at the beginning."""
    sums = np.cumsum([0.0, *values])
    stops = np.arange(1, len(values) + 1)
    starts = np.maximum(stops - SMOOTHED, 0)
    return (sums[stops] - sums[starts]) / (stops - starts)
