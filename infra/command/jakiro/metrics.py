"""Serves what a run's stages tell of themselves to Prometheus, from the folder that they write to.

    jakiro metrics RECIPE [--address 127.0.0.1] [--port 9400]

It only reads, on any machine that sees the run's folder.
"""

import argparse
import signal
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pipeline.basics.errors import PipelineError
from pipeline.basics.progress import told_by
from pipeline.recipe.load import add_recipe_arguments, load_recipe
from pipeline.running import entry


class Run(Collector):
    def __init__(self, folder: Path):
        self._folder = folder

    def collect(self) -> Iterator[Metric]:
        return told_by(self._folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_recipe_arguments(parser)
    parser.add_argument("--address", default="127.0.0.1", help="0.0.0.0: for whoever reaches this machine")
    parser.add_argument("--port", type=int, default=9400)
    given = parser.parse_args()
    registry = CollectorRegistry()
    registry.register(Run(load_recipe(given.recipe, given.overrides).paths.run))
    try:
        start_http_server(given.port, given.address, registry)
    except OSError as error:
        raise PipelineError(f"port {given.port} of {given.address}: {error.strerror}; give another --port") from None
    print(f"http://{given.address}:{given.port}/metrics", flush=True)
    signal.pause()


if __name__ == "__main__":
    entry.run(main)
