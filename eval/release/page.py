"""report.html: a whole report on one page. It needs no file beside it, no network and no script."""

import base64
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jinja2

from eval.measure import report
from eval.measure.harness import Record
from eval.measure.tasks import Job
from pipeline.artifacts.reports import Row
from pipeline.lm.chat import pieces_of
from pipeline.recipe.sections import BenchmarkConfig

PAGE = "report.html"
TEMPLATE = Path(__file__).with_name("report.html.jinja")
COLOURS = ["#cdeccf", "#9fd8b4", "#7cc4c4", "#8fb4e3", "#b9a6e6"]  # by depth, the last one for all further ones


def samples(job: Job, records: Iterable[Record], tokenizer: Any) -> list[dict[str, Any]]:
    """Answers of the released draft's methods to the first prompt of each public benchmark, at the lowest temperature.
    Held-out dialogues and a user's own prompts are nobody else's business.
    """
    recipe, found = job.recipe, []
    public = [name for name, benchmark in recipe.eval.benchmarks.items() if _is_public(benchmark)]
    lowest = min(recipe.eval.temperatures)
    of_draft = {name for name, method in job.methods.items() if method.draft == recipe.publish.draft}
    first = {name: next(task.prompt for task in job.tasks if task.benchmark == name) for name in public}
    for record in records:
        prompt = first.get(record.benchmark)
        if prompt is None or record.method not in of_draft or record.temperature != lowest:
            continue
        answer = record.generation
        if (record.question_id, record.turn, record.repeat) == (prompt.question_id, 0, 0) and answer.depths:
            pieces = zip(pieces_of(tokenizer, answer.tokens), answer.depths, strict=True)
            one = {"benchmark": record.benchmark, "temperature": record.temperature, "method": record.method}
            counts = {"passes": answer.acceptance.passes, "tau": answer.acceptance.tau if len(answer.tokens) > 1 else 1}
            found.append(one | counts | {"question": prompt.turns[0], "pieces": [list(pair) for pair in pieces]})
    return found


def _is_public(benchmark: BenchmarkConfig) -> bool:
    """Whether its prompts are published already."""
    named = benchmark.source.startswith(("embedded:", "benchmark:"))
    return named and benchmark.path is None


def page(measured: dict[str, Any], rows: list[Row], identity: dict[str, Any], plots: list[Path]) -> str:
    """HTML. `rows`: the report's; `identity`: what the head says (card.py)."""
    method = identity["method"]
    found = report.by_place(rows, first=(identity["alone"], method))
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, autoescape=True)
    return environment.from_string(TEMPLATE.read_text()).render(
        **identity,
        noise=report.has_noise(found.values()),
        rows=[{"released": place[2] == method, "cells": _cells(place, of)} for place, of in found.items()],
        plots=[{"alt": plot.stem.replace("_", " "), "data": _encoded(plot)} for plot in plots],
        samples=[sample for sample in measured["samples"] if sample["method"] == method],
        colours=COLOURS,
        definitions=report.explain(),
    )


def _cells(place: report.Place, of: dict[str, Row]) -> list[Any]:
    benchmark, temperature, method = place
    figures = [*report.usual_said(of), of["tau"].details["prompts"], report.rates_said(of)]
    return [benchmark, f"{temperature:g}", method, *figures, report.verdict(of)]


def _encoded(plot: Path) -> str:
    return base64.b64encode(plot.read_bytes()).decode()
