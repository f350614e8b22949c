"""Writes a commented recipe for your target, after a look at its config, your data's first records and the GPUs here.

    jakiro new my.toml --target meta-llama/Llama-3.1-8B-Instruct --data /data/sharegpt.json --license llama3.1
    jakiro new my.toml --target ./model --data hf://datasets/OWNER/NAME/file.json --draft eagle3 --license apache-2.0

Nothing of the weights is read. What the recipe takes: `jakiro plan my.toml`.
"""

import argparse
import math
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jinja2 import Environment, StrictUndefined

import jakiro
from pipeline.basics.accelerator import kind
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import atomic_path
from pipeline.drafts import DRAFTS
from pipeline.lm.chat import Unusable
from pipeline.lm.config import TargetConfig
from pipeline.lm.model import load_config, load_tokenizer, parameter_count_of
from pipeline.recipe.load import load_recipe
from pipeline.recipe.recipe import Recipe
from pipeline.running import entry
from pipeline.running.cores import cores
from preprocess.sources.groups import Groups
from preprocess.sources.intake import clean_in_language
from preprocess.sources.read import Tail, read_records
from preprocess.sources.sequences import encode_sequences

LOOKED_AT = 200  # records
GB = 1e9
ROOM = 1.3  # a worker's memory over its weights, roughly: the batch in flight, the allocator
TEMPLATE = jakiro.HOME / "infra/templates/recipe.toml.jinja"


class Machine(NamedTuple):
    gpus: int
    bytes: float  # of one

    @classmethod
    def here(cls) -> "Machine":
        device = kind()
        if device is None:
            return cls(0, 0)
        module = torch.get_device_module(device.type)
        return cls(torch.accelerator.device_count(), module.mem_get_info(0)[1])


class Share(NamedTuple):
    """How a machine's GPUs serve a target."""

    device: str
    workers: int
    gpus_per_worker: int
    ranks: int

    @classmethod
    def of(cls, machine: Machine, weights: float) -> "Share":
        if not machine.gpus:
            few = min(cores(), 2)
            return cls("cpu", few, 0, few)
        each = math.ceil(weights * ROOM / machine.bytes)
        if each > machine.gpus:
            raise PipelineError(
                f"the target's weights are {weights / GB:.0f} GB in bfloat16, and the {machine.gpus} GPUs here have "
                f"{machine.gpus * machine.bytes / GB:.0f} GB: write the recipe on a machine that holds it"
            )
        return cls("auto" if each == 1 else "spread", machine.gpus // each, each, machine.gpus)


def _batch(ranks: int) -> tuple[int, int]:
    """(global batch, micro-batch): the papers' 16, or the next multiple that so many ranks share."""
    micro = 2 if 16 % (2 * ranks) == 0 else 1
    return math.ceil(16 / (micro * ranks)) * micro * ranks, micro


def recipe_text(given: argparse.Namespace, config: Any, machine: Machine, weights: float) -> str:
    share = Share.of(machine, weights)
    global_batch, micro_batch = _batch(share.ranks)
    gpus = f"a machine with {machine.gpus} GPUs of {machine.bytes / GB:.0f} GB"
    template = Environment(undefined=StrictUndefined, keep_trailing_newline=True).from_string(TEMPLATE.read_text())
    return template.render(
        **{key: getattr(given, key) for key in ("target", "data", "draft", "license")},
        architecture=type(config).__name__.removesuffix("Config"),
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        billions=f"{weights / 2e9:.2f}",
        found=gpus if machine.gpus else f"{cores()} cores without a GPU",
        laptop=not machine.gpus,
        name=given.out.stem,
        share=share,
        max_length=min(2048 if machine.gpus else 512, config.max_position_embeddings),
        global_batch=global_batch,
        micro_batch=micro_batch,
    )


def look(recipe: Recipe) -> str:
    """What becomes of the source's first records. Raises PipelineError where none is usable."""
    tokenizer, groups, refused = load_tokenizer(recipe.target), Groups(recipe.data), Counter[str]()
    lengths: list[int] = []
    learnt = tried = 0
    for record in islice(read_records(recipe.data, Tail()), LOOKED_AT):
        tried += 1
        try:
            sequences, _ = encode_sequences(tokenizer, clean_in_language(record, recipe.data, groups), recipe.data)
        except Unusable as error:
            refused[str(error).partition(":")[0]] += 1
            continue
        lengths += [len(one.input_ids) for _, one in sequences]
        learnt += sum(int(one.loss_mask.sum()) for _, one in sequences)
    why = ", ".join(f"{count} {reason}" for reason, count in refused.most_common())
    if not lengths:
        raise PipelineError(
            f"none of the first {tried} records of {recipe.data.source} is usable ({why or 'it is empty'})"
        )
    share = 100 * learnt / sum(lengths)
    return (
        f"of its first {tried} records {tried - sum(refused.values())} are usable{f' ({why})' if why else ''}: "
        f"{sum(lengths) / len(lengths):.0f} tokens each, {share:.0f}% of them the assistant's"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the recipe to write; it is not to be there yet")
    parser.add_argument("--target", required=True, help="OWNER/NAME on the Hub, or a folder")
    parser.add_argument("--data", required=True, help="conversations or messages: a path, hf://, s3://, datasets:NAME")
    trained = [name for name, known in DRAFTS.items() if known.config.trained and " " not in name]
    parser.add_argument("--draft", default="eagle3", choices=trained, help="its kind; default: %(default)s")
    parser.add_argument("--license", required=True, help="of the draft, as the Hub spells it: apache-2.0, ...")
    given = parser.parse_args()
    if given.out.exists():
        raise PipelineError(f"{given.out} is there already: give another name, or remove it")
    target = TargetConfig(model=given.target)
    config = load_config(target)
    weights = 2 * parameter_count_of(target)
    text = recipe_text(given, config, Machine.here(), weights)
    with atomic_path(given.out) as unfinished:  # it stays away where its data are of no use
        unfinished.write_text(text)
        said = look(load_recipe(unfinished))
    print(f"target: {type(config).__name__}, {config.num_hidden_layers} layers, {weights / 2e9:.2f}B parameters")
    print(f"data: {said}")
    print(f"{given.out} is written: read it, then jakiro plan {given.out} and jakiro run {given.out}")


if __name__ == "__main__":
    entry.run(main)
