"""All methods of a run side by side: what each accepts, how fast it is, and what a round of it reads.

    python -m eval.methods RECIPE

After python eval/main.py RECIPE, whose report has the measured figures. What a round reads is counted in one round of
each draft, with its own weights: a layer's weights once for each forward that it takes part in, in evaluation's dtype.
Writes methods.md and methods.png into the run's eval folder.
"""

import argparse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import fmean, geometric_mean
from typing import Any

import torch
from torch import nn

from eval.measure import plots
from eval.measure.report import rates_said, speed_said, tau_said
from pipeline.artifacts import checkpoint
from pipeline.artifacts.reports import REPORT, read_report
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import write_text
from pipeline.basics.parse import from_json
from pipeline.decoding.config import TreeConfig
from pipeline.decoding.contract import RoundInput
from pipeline.drafts import TrainedDraft
from pipeline.lm.config import TargetConfig
from pipeline.lm.model import DTYPES, load_config, load_embed_head, parameter_count_of
from pipeline.lm.states import Needs
from pipeline.recipe.load import add_recipe_arguments, load_recipe
from pipeline.recipe.recipe import DEEPEST, Recipe
from pipeline.running import entry, markdown

TABLE, PLOT = "methods.md", "methods.png"
HEADS = ["method", "kind", "parameters", "active", "nodes", "depth", "draft forwards", "MB read", "trained tokens"]
HEADS.append("seconds")
PROMPT = 16  # tokens before the round whose reading is counted


@dataclass
class Read:
    """What forwards read of weights, in numbers; rows of an embedding are not counted."""

    numbers: int = 0
    modules: dict[int, int] = field(default_factory=dict)  # by module

    @property
    def once(self) -> int:
        """Each module's counted once."""
        return sum(self.modules.values())


@contextmanager
def reading(modules: list[nn.Module]) -> Iterator[Read]:
    """Counts what is called below these."""
    found = Read()

    def called(module: nn.Module, *_: Any) -> None:
        size = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        found.numbers += size
        found.modules[id(module)] = size

    with ExitStack() as hooks:
        for leaf in {id(one): one for module in modules for one in module.modules()}.values():
            if isinstance(leaf, nn.Linear):
                hooks.callback(leaf.register_forward_hook(called).remove)
        yield found


@torch.inference_mode()
def round_of(draft: TrainedDraft, tree: TreeConfig) -> Read:
    """Of one round behind a short text of no meaning."""
    generator = torch.Generator().manual_seed(0)
    states = draft.needs.final + len(draft.needs.auxiliary)
    states_TSD = torch.randn(PROMPT, states, draft.shapes["hidden_size"], generator=generator)
    tokens = torch.randint(0, draft.target_vocabulary, (PROMPT + 1,), generator=generator).tolist()
    with reading(draft.packable()) as found:
        draft.propose(draft.open(), RoundInput(tokens, states_TSD), draft.config.resolve(tree), None)
    return found


def costs_of(recipe: Recipe, facts: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By method: numbers that one token's chain reads of the draft's weights, each once, and megabytes a round that
    makes all of the tree's forwards.
    """
    cpu, out = torch.device("cpu"), {}
    whole = Needs(decoder=any(config.needs(DEEPEST).decoder for config in recipe.draft.values()))
    embed_head = load_embed_head(recipe.target, whole).to(cpu, torch.float32)
    size = torch.finfo(DTYPES[recipe.eval.dtype]).bits // 8
    for method, fact in facts.items():
        tree, config = from_json(TreeConfig, fact["tree"]), recipe.draft[fact["draft"]]
        if not config.trained:  # nothing, or somebody's model, which every forward reads
            asked = recipe.small_models.get(fact["draft"])
            active = matrices_of(asked) if asked else 0
            out[method] = {"active": active, "megabytes": active * tree.forwards * size / 1e6}
            continue
        draft = checkpoint.load(recipe.draft_dir(fact["draft"]), embed_head.fingerprint).float()
        draft.bind(embed_head)
        alone = min(tree.nodes, draft.config.most(tree))  # what stands beside the draft takes some of the nodes
        tree = from_json(TreeConfig, fact["tree"] | {"nodes": max(alone, tree.depth + 1)})
        chain = TreeConfig(depth=tree.depth, top_k=1, nodes=tree.depth + 1, parallel=tree.parallel)
        out[method] = {"active": round_of(draft, chain).once, "megabytes": round_of(draft, tree).numbers * size / 1e6}
        out[method]["at most"] = draft.needs.decoder  # how much of it a token passes by depends on the text
    return out


def matrices_of(asked: TargetConfig) -> int:
    """A model's parameters but for an embedding that is not its head as well."""
    text = load_config(asked)
    return parameter_count_of(asked) - (0 if text.tie_word_embeddings else text.vocab_size * text.hidden_size)


def table(report: dict[str, Any], costs: dict[str, dict[str, Any]]) -> str:
    """Markdown: for each temperature what was measured and what was accepted by depth; then what the methods are."""
    parts, entries, facts = [], report["results"], report["drafts"]
    benchmarks = list(dict.fromkeys(one["benchmark"] for one in entries))
    for temperature in dict.fromkeys(one["temperature"] for one in entries):
        measured, by_depth = [], []
        for method in facts:
            mine = [one for one in entries if (one["draft"], one["temperature"]) == (method, temperature)]
            figures = [f"{tau_said(one)}, {speed_said(one)}" for one in mine]
            measured.append([method, *figures, mean_said(mine)])
            by_depth.append([method, *map(rates_said, mine)])
        parts += [markdown.table([f"T = {temperature:g}: tau, speed-up", *benchmarks, "mean"], measured), ""]
        parts += [markdown.table([f"T = {temperature:g}: accepted at depth 1, 2, ...", *benchmarks], by_depth), ""]
    rows = []
    for method, fact in facts.items():
        tree, training, cost = fact["tree"], fact["training"], costs[method]
        forwards = [one["draft_forwards_per_pass"] for one in entries if one["draft"] == method]
        most = bool(cost.get("at most"))
        megabytes = f"{'at most ' * most}{cost['megabytes']:.1f}"
        cells = [method, " + ".join([fact["kind"], *fact["beside"]]), f"{fact['parameters']:,}"]
        cells.append(f"{'at most ' * most}{cost['active']:,}")
        cells += [tree["nodes"], tree["depth"], f"{sum(forwards) / len(forwards):.1f}", megabytes]
        rows.append([*cells, f"{training.get('trained_tokens', 0):,}", f"{training.get('seconds', 0):.0f}"])
    return "\n".join([*parts, markdown.table(HEADS, rows)])


def mean_said(entries: list[dict[str, Any]]) -> str:
    """Mean tau and the speed-ups' geometric mean, without those that are withheld."""
    speeds = [one["speedup"] for one in entries if one["speedup"]]
    speed = f"{geometric_mean(speeds):.2f}x" if speeds else "withheld"
    some = f" (of {len(speeds)})" if 0 < len(speeds) < len(entries) else ""
    return f"{fmean(one['tau'] for one in entries):.2f}, {speed}{some}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_recipe_arguments(parser)
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    path = recipe.eval_dir / REPORT
    if not path.exists():
        raise PipelineError(f"{path} is missing: run python eval/main.py {arguments.recipe} first")
    report = read_report(path)
    said = table(report, costs_of(recipe, report["drafts"]))
    write_text(recipe.eval_dir / TABLE, said + "\n")
    print(said)
    print(f"plot: {plots.draw_methods(report['results'], recipe.eval_dir / PLOT)}")


if __name__ == "__main__":
    entry.run(main)
