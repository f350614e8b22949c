"""Plots of a run: a method has one colour in all of them, and a plot that would show nothing is not drawn."""

import json
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_hex

from eval.measure import plots
from pipeline.artifacts import curves
from pipeline.artifacts.reports import ResultRow

METHODS = ("eagle", "jakiro", "long", "medusa", "prompt-lookup")


def rows_of(benchmark: str, methods: tuple[str, ...], depths: int) -> list[ResultRow]:
    where = {"benchmark": benchmark, "temperature": 0.0}
    rows = []
    for method in methods:
        rows += [ResultRow("decoded", method, "tau", 2.0, interval=[1.9, 2.1], **where)]
        rows += [ResultRow("decoded", method, "speedup", 1.5, interval=[1.4, 1.6], **where)]
        rows += [ResultRow("decoded", method, f"accepted at depth {n + 1}", 0.5, **where) for n in range(depths)]
    return rows


@pytest.fixture
def figures(monkeypatch) -> dict[str, plt.Figure]:
    """The figures that are drawn, by file name."""
    drawn = {}
    monkeypatch.setattr(plt.Figure, "savefig", lambda self, path, **_: drawn.setdefault(Path(path).name, self))
    monkeypatch.setattr(plots.plt, "close", lambda _: None)
    monkeypatch.setattr(curves.plt, "close", lambda _: None)
    return drawn


def colours(figure: plt.Figure) -> dict[str, set[str]]:
    """Return the colours by the name in the legend, without the text after the name."""
    shades: dict[str, set[str]] = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            artist = (
                handle.patches[0]
                if hasattr(handle, "patches")
                else handle.lines[0]
                if hasattr(handle, "lines")
                else handle
            )
            colour = artist.get_facecolor() if hasattr(artist, "get_facecolor") else artist.get_color()
            shades.setdefault(label.partition(",")[0], set()).add(to_hex(colour))
    return shades


def test_a_method_has_one_colour_in_all_plots(figures, tmp_path):
    rows = [
        *rows_of("b", METHODS, 3),
        *rows_of("b-64", ("jakiro", "long"), 3),
        *rows_of("b-128", ("jakiro", "long"), 3),
    ]
    metrics = tmp_path / "metrics.jsonl"
    line = {"kind": "validation", "trained_tokens": 5, "classification": 1.0, "agreement": 0.5, "estimated_tau": 1.5}
    metrics.write_text(json.dumps(line) + "\n")
    drafts = dict.fromkeys(("jakiro", "medusa"), metrics)
    plots.draw(rows, {}, {"b-64": 64, "b-128": 128}, drafts, tmp_path)
    assert set(figures) == {"acceptance_by_depth.png", "tau_and_speed.png", "tau_by_context.png", "loss_curves.png"}
    together: dict[str, set[str]] = {}
    for figure in figures.values():
        for name, shades in colours(figure).items():
            together.setdefault(name, set()).update(shades)
    assert all(len(together[method]) == 1 for method in METHODS), together
    assert len(set.union(*(together[method] for method in METHODS))) == len(METHODS)


@pytest.mark.parametrize("depths", [1, 2])
def test_a_plot_of_one_depth_is_left_out(figures, tmp_path, depths):
    names = [path.name for path in plots.draw(rows_of("b", ("jakiro",), depths), {}, {}, {}, tmp_path)]
    assert ("acceptance_by_depth.png" in names) == ("acceptance_by_depth.png" in figures) == (depths > 1)
