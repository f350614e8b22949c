"""What a round of each method of a run reads of its draft's weights, counted in one round with the draft's own weights.

    python -m eval.studies.reads RECIPE

After jakiro eval RECIPE. A layer's weights count once for each forward that it takes part in, in evaluation's
dtype. The rows go to results.jsonl of the run, where ``jakiro compare`` shows them beside what was measured.
"""

import argparse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from eval import results
from pipeline.artifacts import checkpoint
from pipeline.artifacts.reports import REPORT, Row, method_of, origin_of, put_rows, read_report
from pipeline.basics.errors import PipelineError
from pipeline.decoding.config import TreeConfig, chain
from pipeline.decoding.contract import RoundInput
from pipeline.decoding.method import Method
from pipeline.drafts import TrainedDraft
from pipeline.lm.config import TargetConfig
from pipeline.lm.embedding_head import EmbeddingAndHead
from pipeline.lm.model import DTYPES, load_config, load_embed_head, parameter_count_of
from pipeline.recipe.load import add_recipe_arguments, load_recipe
from pipeline.recipe.recipe import Recipe
from pipeline.running import entry

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


def matrices_of(asked: TargetConfig) -> int:
    """A model's parameters but for an embedding that is not its head as well."""
    text = load_config(asked)
    return parameter_count_of(asked) - (0 if text.tie_word_embeddings else text.vocab_size * text.hidden_size)


def read_by(recipe: Recipe, method: Method, embed_head: EmbeddingAndHead) -> tuple[int, int]:
    """Numbers of the draft's weights that one token's chain reads, each once, and those that a round reads, which makes
    all of the tree's forwards.
    """
    tree, config = method.resolved_tree, recipe.draft[method.draft]
    if not config.trained:  # nothing, or somebody's model, which every forward reads
        asked = recipe.small_models.get(method.draft)
        active = matrices_of(asked) if asked else 0
        return active, active * tree.forwards
    draft = checkpoint.load(recipe.draft_dir(method.draft), embed_head.fingerprint).float()
    draft.bind(embed_head)
    alone = min(tree.nodes, draft.config.most(tree))  # secondary sources take some of the nodes
    tree = replace(tree, nodes=max(alone, tree.depth + 1))
    return round_of(draft, chain(tree.depth, tree.parallel)).once, round_of(draft, tree).numbers


def rows(recipe: Recipe, facts: dict[str, dict[str, Any]]) -> list[Row]:
    """What the methods are, a figure a row."""
    out = []
    whole = torch.float32 if any(config.runs_the_target for config in recipe.draft.values()) else None
    embed_head = load_embed_head(recipe.target, whole).to(torch.device("cpu"), torch.float32)
    size = torch.finfo(DTYPES[recipe.eval.dtype]).bits // 8
    for name, fact in facts.items():
        method = method_of(fact)
        active, numbers = read_by(recipe, method, embed_head)
        # how much of the target a token passes by depends on the text
        most = ", at most" if recipe.draft[method.draft].runs_the_target else ""
        figures = {
            "parameters": fact["parameters"],
            f"active{most}": active,
            "nodes": method.resolved_tree.nodes,
            "depth": method.resolved_tree.depth,
            f"MB read{most}": numbers * size / 1e6,
            "trained tokens": fact["training"].get("trained_tokens", 0),
            "seconds of training": fact["training"].get("seconds", 0),
        }
        origin = origin_of(recipe, method.draft)
        out += [Row("read", name, figure, value, origin=origin) for figure, value in figures.items()]
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_recipe_arguments(parser)
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    path = recipe.eval_dir / REPORT
    if not path.exists():
        raise PipelineError(f"{path} is missing: run jakiro eval {arguments.recipe} first")
    found = rows(recipe, read_report(path)["drafts"])
    put_rows(recipe.eval_dir, found, whole=True)
    print(results.table(results.found_by(recipe, found)))


if __name__ == "__main__":
    entry.run(main)
