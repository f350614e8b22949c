"""Train the recipe's drafts on its shards, one after the other; with `train.together` in turns, a step of each.

deepspeed train/main.py RECIPE                                            (every accelerator of this machine)
DS_ACCELERATOR=cpu deepspeed --num_accelerators 2 train/main.py RECIPE    (two CPU ranks)
"""

import argparse
import os
import signal
import sys
from functools import cache
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # the checkout, not this folder
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interrupted import prints nothing

import torch.distributed as dist

from pipeline.artifacts.features import ShardRequest, fetch, readable_spec, write_shard_request
from pipeline.basics.progress import set_record_path
from pipeline.lm.model import load_embed_head
from pipeline.recipe.load import add_recipe_arguments, load_recipe
from pipeline.running import entry
from train.engine.engine import start_distributed
from train.engine.ranks import leave_distributed
from train.input.features import open_checked, remove_copies
from train.loop import train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_recipe_arguments(parser)
    parser.add_argument("--draft", help="train only this one of the recipe's drafts")
    parser.add_argument("--local_rank", type=int, default=0, help="set by the deepspeed launcher")
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe, arguments.overrides, begin=True)
    if arguments.draft and arguments.draft not in recipe.to_train:
        parser.error(f"--draft {arguments.draft}: the recipe has {', '.join(recipe.to_train)} to train")
    if not recipe.to_train:
        print("nothing to train: all drafts of this recipe are published, and eval/main.py fetches them")
        return
    if os.environ.get("RANK", "0") == "0":
        set_record_path(recipe.paths.run, "train")
    embed_head = load_embed_head(recipe.target)
    expected = readable_spec(recipe)
    # before the process group exists: ranks of a node wait for each other
    fetch(recipe, expected, folder=recipe.paths.shards)
    start_distributed()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    features = cache(lambda: open_checked(recipe, expected))  # once, before the first draft that is to be trained
    names = [arguments.draft] if arguments.draft else recipe.to_train
    for draft_names in [names] if recipe.train.together else [[name] for name in names]:
        for line in train(recipe, draft_names, embed_head, features, rank, ranks):
            if rank == 0:
                print(line)
    if recipe.features.keep == "window":
        remove_copies(recipe, set())
        if rank == 0:
            write_shard_request(recipe, ShardRequest([]))
    leave_distributed()


if __name__ == "__main__":
    entry.run_rank(main)
