"""Measure what a forward less brings in vLLM: a Jakiro draft's chain whose last two tokens come from one forward, the
same chain with a forward for each token, and plain decoding.

    python -m infra.serving.rounds ENGINES RECIPE DRAFT [--guesses 2 3] [--at-once 1 8] [--groups 20] [--tokens 48]

ENGINES is the folder that `make serve-test` fills. The three servers (float32, eager) run at the same time, and each
answers every group of requests, in an order that changes from group to group. The time of a round is vLLM's own: from a
request's first token to its last, over its passes; the table has the median over groups. Ratios are geometric means
over groups, with a 95% interval by bootstrap. The prompts are HumanEval's.
"""

import argparse
import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
from scipy.stats import gmean

from eval.measure.report import bootstrap_interval
from eval.served import parse_counters
from infra.serving.engines import ExportedDraft, Vllm
from infra.serving.parity import load_questions
from pipeline.artifacts import checkpoint
from pipeline.artifacts.provenance import RECIPE as RECIPE_FILE
from pipeline.basics.errors import PipelineError
from pipeline.decoding.config import Method, chain
from pipeline.lm.model import locate_target
from pipeline.recipe.load import add_recipe_arguments, load_recipe
from pipeline.recipe.recipe import Recipe
from pipeline.running import entry, markdown
from pipeline.serving.export import export, vllm_method

COLUMNS = ["draft tokens", "at once", "server", "draft forwards", "tau", "ms a round", "a round over the chain's"]
COLUMNS += ["speed over plain"]
PLAIN, CHAIN, HYBRID = "plain", "chain", "hybrid"


class Sums(NamedTuple):
    """A server's sums since its start. A pass verifies draft tokens; the first token of an answer takes none."""

    passes: float
    tokens: float
    answers: float
    seconds: float  # from an answer's first token to its last

    def __sub__(self, earlier: "Sums") -> "Sums":
        return Sums(*(a - b for a, b in zip(self, earlier, strict=True)))

    @property
    def round_ms(self) -> float:
        return 1000 * self.seconds / self.passes

    @property
    def speed(self) -> float:
        return (self.tokens - self.answers) / self.seconds


def format_ratio(values: list[float], references: list[float]) -> str:
    """Format the geometric mean of the ratios with its 95% interval."""
    ratios = np.array(values) / np.array(references)
    low, high = bootstrap_interval(gmean, ratios) or (math.nan, math.nan)
    return f"{gmean(ratios):.2f} [{low:.2f}, {high:.2f}]"


class RoundServer(Vllm):
    options = ("--max-num-seqs", "8", "--no-enable-prefix-caching")

    def __init__(self, folder: Path, work: Path, name: str):
        super().__init__(folder, work)
        self.name = name

    def read(self, address: str) -> Sums:
        counters = parse_counters(self.metrics(address))
        names = ["generation_tokens_total", "request_decode_time_seconds_count", "request_decode_time_seconds_sum"]
        values = [self._read_metric(address, f"vllm:{name}") for name in names]
        return Sums(counters.counts.passes if counters else values[0] - values[1], *values)


def export_chain(recipe: Recipe, name: str, guesses: int, parallel: int, work: Path) -> ExportedDraft:
    """Export a trained draft as a chain whose last `parallel` tokens come from one forward."""
    release, out = (work / f"{kind}-{guesses}-{parallel}" for kind in ("release", "draft"))
    release.mkdir()
    trained = recipe.paths.draft(name)
    method = Method().resolve(recipe.draft[name], name, chain(guesses, parallel))
    checkpoint.export(trained, release, method, {}, trained / RECIPE_FILE)
    export(release, "vllm", out)
    return ExportedDraft(out, vllm_method(checkpoint.read_config(release).config), guesses)


def measure(recipe: Recipe, name: str, guesses: int, arguments: argparse.Namespace, work: Path) -> list[list[str]]:
    """Return the table's rows for a number of draft tokens. Raise PipelineError if answers differ."""
    model, prompts = locate_target(recipe.target).name, load_questions(recipe)
    drafts = {
        PLAIN: None,
        CHAIN: export_chain(recipe, name, guesses, 1, work),
        HYBRID: export_chain(recipe, name, guesses, 2, work),
    }
    rows = []
    with ExitStack() as stack:
        servers = {key: RoundServer(arguments.engines, work, f"{key}-{guesses}") for key in drafts}
        addresses = {key: stack.enter_context(servers[key].serve(model, draft)) for key, draft in drafts.items()}

        def ask(key: str, group: list[list[int]], tokens: int) -> list[list[int]]:
            with ThreadPoolExecutor(len(group)) as pool:
                return list(pool.map(lambda ids: servers[key]._answer(addresses[key], model, ids, tokens), group))

        for at_once in arguments.at_once:
            sums: dict[str, list[Sums]] = {key: [] for key in drafts}
            for key in drafts:  # the first requests allocate
                ask(key, prompts[:at_once], 4)
            for number in range(arguments.groups):
                group = [prompts[(number * at_once + place) % len(prompts)] for place in range(at_once)]
                answers, turn = {}, number % len(drafts)
                for key in [*list(drafts)[turn:], *list(drafts)[:turn]]:
                    before = servers[key].read(addresses[key])
                    answers[key] = ask(key, group, arguments.tokens)
                    sums[key].append(servers[key].read(addresses[key]) - before)
                if not answers[PLAIN] == answers[CHAIN] == answers[HYBRID]:
                    raise PipelineError(f"the answers of {list(servers)} differ: {answers}")
            for key in drafts:
                forwards = {PLAIN: 0.0, CHAIN: guesses, HYBRID: servers[key].draft_forwards(addresses[key])}[key]
                tau = sum(x.tokens - x.answers for x in sums[key]) / sum(x.passes for x in sums[key])
                times, speeds = (
                    {k: [getattr(x, name) for x in sums[k]] for k in drafts} for name in ("round_ms", "speed")
                )
                cells = [f"{tau:.3f}", f"{np.median(times[key]):.1f}", format_ratio(times[key], times[CHAIN])]
                rows.append(
                    [str(guesses), str(at_once), key, f"{forwards:g}", *cells, format_ratio(speeds[key], speeds[PLAIN])]
                )
                print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", type=Path)
    add_recipe_arguments(parser)
    parser.add_argument("draft")
    parser.add_argument("--guesses", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--groups", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=48)
    arguments = parser.parse_args()
    arguments.engines = arguments.engines.resolve()
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    rows = []
    with TemporaryDirectory(prefix="jakiro-rounds-") as folder:
        for guesses in arguments.guesses:
            rows += measure(recipe, arguments.draft, guesses, arguments, Path(folder))
    print(markdown.format_table(COLUMNS, rows))


if __name__ == "__main__":
    entry.run(main)
