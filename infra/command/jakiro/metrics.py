"""Serve the progress that a run's stages record to Prometheus, from the folder that they write to.

    jakiro metrics RECIPE [--address 127.0.0.1] [--port 9400]

It only reads, and runs on any machine that sees the run's folder.
"""

import argparse
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.registry import Collector

from pipeline.basics.errors import PipelineError
from pipeline.basics.progress import read_events
from pipeline.recipe.load import add_recipe_arguments, load_recipe
from pipeline.running import entry


class RunCollector(Collector):
    def __init__(self, folder: Path):
        self._folder = folder

    def collect(self) -> Iterator[GaugeMetricFamily]:
        labels = ["run", "stage", "what"]
        moved = GaugeMetricFamily("jakiro_moved_seconds", "when the stage last moved, since 1970", labels=labels)
        done = GaugeMetricFamily("jakiro_done", "work done by the stage", labels=[*labels, "unit"])
        total = GaugeMetricFamily("jakiro_total", "all work of the stage; 0 if unknown", labels=[*labels, "unit"])
        shown = GaugeMetricFamily("jakiro_shown", "loss, tau, tokens/s, waiting, ...", labels=[*labels, "name"])
        for stage, event in read_events(self._folder).items():
            values = [self._folder.name, stage, event.what]
            moved.add_metric(values, event.time)
            done.add_metric([*values, event.unit], event.done)
            total.add_metric([*values, event.unit], event.total)
            for name, value in event.figures.items():
                with suppress(ValueError):
                    shown.add_metric([*values, name], parse_number(str(value)))
        return iter([moved, done, total, shown])


def parse_number(text: str) -> float:
    """Parse a number formatted for people: 0.346, "1,234", "12%". Raise ValueError for anything else."""
    return float(text.removesuffix("%").replace(",", "")) / (100 if text.endswith("%") else 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_recipe_arguments(parser)
    parser.add_argument("--address", default="127.0.0.1", help="0.0.0.0: for every machine that reaches this one")
    parser.add_argument("--port", type=int, default=9400)
    args = parser.parse_args()
    registry = CollectorRegistry()
    registry.register(RunCollector(load_recipe(args.recipe, args.overrides).paths.run))
    try:
        start_http_server(args.port, args.address, registry)
    except OSError as error:
        raise PipelineError(f"port {args.port} of {args.address}: {error.strerror}; give another --port") from None
    print(f"http://{args.address}:{args.port}/metrics", flush=True)
    signal.pause()


if __name__ == "__main__":
    entry.run(main)
