"""Plots: acceptance by depth, tau and speed by benchmark, loss curves; tables of result rows."""

from itertools import product
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import NamedTuple

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from eval.measure.report import Place, acceptance_rates, group_by_place
from pipeline.artifacts.curves import COLOURS, draw_training
from pipeline.artifacts.reports import ResultRow


def draw(
    rows: list[ResultRow], parallel: dict[str, int], contexts: dict[str, int], metrics: dict[str, Path], folder: Path
) -> list[Path]:
    """Draw tau_and_speed.png, loss_curves.png, acceptance_by_depth.png if a method drafts several depths and, if there
    are benchmarks of several `contexts` (their tokens), tau_by_context.png; `parallel` as in `_plot_depth`. A method
    has the same colour in all plots.
    """
    figures_by_place = group_by_place(row for row in rows if row.benchmark not in contexts)
    styles = _assign_styles(sorted({row.method for row in rows} | set(metrics)))
    paths = (
        [_plot_depth(figures_by_place, parallel, styles, folder)]
        if any(len(acceptance_rates(figures)) > 1 for figures in figures_by_place.values())
        else []
    )
    paths += [_plot_bars(figures_by_place, styles, folder)] if figures_by_place else []
    paths += [draw_contexts(rows, contexts, folder / "tau_by_context.png", styles)] if contexts else []
    colours = {name: style.colour for name, style in styles.items()}
    return [*paths, draw_training(metrics, folder / "loss_curves.png", colours)]


class _Style(NamedTuple):
    colour: str
    line: str  # style and marker
    hatch: str


def _assign_styles(methods: list[str]) -> dict[str, _Style]:
    """Return each method's style: six colours, with other lines and hatches for each six more."""
    lines = ("o-", "s--", "^:", "D-.")
    return {
        name: _Style(COLOURS[number % 6], lines[number // 6 % 4], "/" * (number // 6))
        for number, name in enumerate(methods)
    }


def _save(figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if figure.get_layout_engine() is None:
        figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _plot_depth(
    figures_by_place: dict[Place, dict[str, ResultRow]],
    parallel: dict[str, int],
    styles: dict[str, _Style],
    folder: Path,
) -> Path:
    """Plot the acceptance by depth at the lowest temperature. `parallel`: method -> the depth below which levels have
    no draft forward of their own.
    """
    lowest = min(temperature for _, temperature, _ in figures_by_place)
    benchmarks = sorted({benchmark for benchmark, _, _ in figures_by_place})
    figure, axes = plt.subplots(1, len(benchmarks), figsize=(4.5 * len(benchmarks), 3.9), sharey=True, squeeze=False)
    figure.set_layout_engine("constrained")
    for axis, benchmark in zip(axes[0], benchmarks, strict=True):
        for method in [name for place, t, name in figures_by_place if (place, t) == (benchmark, lowest)]:
            shown, (colour, line, _) = acceptance_rates(figures_by_place[benchmark, lowest, method]), styles[method]
            axis.plot(range(1, len(shown) + 1), shown, line, label=method, color=colour)
            without_forward = range(parallel.get(method, len(shown)) + 1, len(shown) + 1)
            axis.plot(
                without_forward, [shown[depth - 1] for depth in without_forward], "o", ms=11, mfc="none", color=colour
            )
        axis.set(title=f"{benchmark}, T = {lowest:g}", xlabel="depth in the tree", ylim=(0, 1.05))
        axis.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("accepted, given the depth before")
    if parallel:
        figure.supxlabel("circled: levels that come without a draft forward of their own", fontsize=9)
    _legend_above(figure, axes[0][0])
    return _save(figure, folder / "acceptance_by_depth.png")


def _plot_bars(figures_by_place: dict[Place, dict[str, ResultRow]], styles: dict[str, _Style], folder: Path) -> Path:
    methods = sorted({method for _, _, method in figures_by_place})
    groups = list(dict.fromkeys((benchmark, temperature) for benchmark, temperature, _ in figures_by_place))
    figure, axes = plt.subplots(1, 2, figsize=(5 + 2 * len(groups), 4.1), layout="constrained")
    width = 0.8 / len(methods)
    labels = {"tau": "tau (tokens per target pass)", "speedup": "speed-up over plain"}
    for axis, (figure_name, label) in zip(axes, labels.items(), strict=True):
        for number, method in enumerate(methods):
            chosen = [figures_by_place[*group, method][figure_name] for group in groups]
            heights = [row.value or 0 for row in chosen]
            bounds = [row.interval or [height, height] for row, height in zip(chosen, heights, strict=True)]
            errors = np.maximum((np.array(bounds) - np.array(heights)[:, None]).T * [[-1], [1]], 0)
            places = np.arange(len(groups)) + number * width
            axis.bar(
                places, heights, width * 0.92, label=method, color=styles[method].colour, hatch=styles[method].hatch
            )
            axis.errorbar(places, heights, errors, fmt="none", ecolor="black", capsize=3, lw=1)
        axis.axhline(1, color="grey", lw=1, ls="--", label="plain decoding")
        axis.set(ylabel=label, xticks=np.arange(len(groups)) + width * (len(methods) - 1) / 2)
        axis.set_xticklabels([f"{name}\nT = {temperature:g}" for name, temperature in groups])
    _legend_above(figure, axes[0])
    return _save(figure, folder / "tau_and_speed.png")


def draw_contexts(rows: list[ResultRow], contexts: dict[str, int], path: Path, styles: dict[str, _Style]) -> Path:
    """Plot tau by context length, with its interval: a line a method, a panel a temperature."""
    figures_by_place = group_by_place(row for row in rows if row.benchmark in contexts)
    methods, temperatures = (sorted({place[at] for place in figures_by_place}) for at in (2, 1))
    figure, axes = plt.subplots(1, len(temperatures), figsize=(7 * len(temperatures), 4), sharey=True, squeeze=False)
    figure.set_layout_engine("constrained")
    for axis, temperature in zip(axes[0], temperatures, strict=True):
        for method in methods:
            taus = {
                contexts[place[0]]: figures["tau"]
                for place, figures in figures_by_place.items()
                if place[1:] == (temperature, method)
            }
            lengths, (colour, line, _) = sorted(taus), styles[method]
            axis.plot(lengths, [taus[tokens].value for tokens in lengths], line, label=method, color=colour)
            bounds = [taus[tokens].interval or [taus[tokens].value] * 2 for tokens in lengths]
            axis.vlines(lengths, *zip(*bounds, strict=True), color=colour, lw=1)
        axis.set_xscale("log", base=2)
        axis.set(title=f"T = {temperature:g}", xlabel="context (tokens)", xticks=sorted(set(contexts.values())))
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("tau (tokens per target pass)")
    _legend_above(figure, axes[0][0])
    return _save(figure, path)


def _legend_above(figure, axis) -> None:
    """Put the legend above the axes, where it covers nothing; the figure grows by the legend's lines."""
    handles, labels = axis.get_legend_handles_labels()
    columns = max(int(figure.get_figwidth() / (0.7 + 0.085 * max(map(len, labels)))), 1)
    figure.set_figheight(figure.get_figheight() + 0.22 * (-(-len(labels) // columns) - 1))
    figure.legend(handles, labels, loc="outside upper center", ncols=columns, frameon=False)


def draw_rows(named: list[tuple[str, ResultRow]], figures: list[str], path: Path) -> Path:
    """Draw a panel a figure: a line a name and a dot a temperature, means over benchmarks (the speed-up's geometric,
    without those that are withheld); the best at the first temperature is on top.
    """
    figures = [figure for figure in figures if any(row.figure == figure for _, row in named)]
    temperatures = list(dict.fromkeys(row.temperature for _, row in named if row.figure in figures))
    means: dict[tuple, float] = {}
    for figure, temperature, name in product(figures, temperatures, dict.fromkeys(name for name, _ in named)):
        key = figure, temperature, name
        values = [row.value for row_name, row in named if (row.figure, row.temperature, row_name) == key and row.value]
        mean = geometric_mean if figure == "speedup" else fmean
        means[key] = mean(values) if values else float("nan")
    names = list(dict.fromkeys(name for name, row in named if row.figure in figures))
    names.sort(key=lambda name: means[figures[-1], temperatures[0], name])
    figure_, axes = plt.subplots(1, len(figures), figsize=(10, 1.4 + 0.3 * len(names)), sharey=True, squeeze=False)
    for axis, figure in zip(axes[0], figures, strict=True):
        for number, temperature in enumerate(temperatures):
            values = [means[figure, temperature, name] for name in names]
            label = "" if temperature is None else f"T = {temperature:g}"
            axis.plot(values, range(len(names)), "o", color=COLOURS[number % 6], label=label)
        axis.set(xlabel=f"mean {figure}", yticks=range(len(names)))
        axis.set_yticklabels(names, fontsize=8)
        axis.grid(alpha=0.3)
    if temperatures != [None]:
        axes[0][0].legend(fontsize=8)
    return _save(figure_, path)
