"""What a training that is fed while it runs (features.keep = "window") takes of the disk, and how much of the dump it
has made anew: its order of shards, simulated window by window.
"""

import math

import numpy as np

from infra.plan.memory import disk_bytes
from pipeline.basics.errors import PipelineError
from pipeline.recipe.recipe import Recipe
from train.input.order import WINDOW_BYTES
from train.input.reads import Reads

SIMULATED = 200  # shards; where there are more, several are taken as one


def stream(recipe: Recipe, rows: float, tokens: float, trained: float) -> tuple[float, float]:
    """(bytes of training's states that are on the disk at most, how often each of them is made) for so many dialogues,
    tokens, and tokens with a loss. Raises PipelineError where training could not have what it needs at once.
    """
    every, features = disk_bytes(recipe, rows, tokens), recipe.features
    shards = math.ceil(rows / features.rows_per_shard)
    size = every / shards
    together = math.ceil(shards / SIMULATED)
    count = math.ceil(shards / together)
    own = recipe.train.window or WINDOW_BYTES // size
    window = min(max(int(own / together), 1), count)
    windows = min(2 * (recipe.train.window * size if recipe.train.window else WINDOW_BYTES), every)
    now = min(2 * window, count)
    room = min(max(int((features.disk_bytes or 0) / (size * together)), now), count)
    needed = min(2 * max(int(own), 1), shards)
    if features.disk_bytes and needed * size > features.disk_bytes:
        raise PipelineError(
            f"features.disk_bytes={features.disk_bytes:,}, but the {needed} shards that training may need at once take "
            f"up to about {needed * size:,.0f}: raise it, or lower train.window or features.rows_per_shard"
        )
    reads = []
    steps = math.ceil(recipe.train.passes(trained) * math.ceil(count / window))
    for epoch in range(math.ceil(recipe.train.passes(trained))):
        order = np.random.default_rng((recipe.seed, epoch)).permutation(count).tolist()  # as train/input/order.py
        reads += [set(order[first : first + window]) for first in range(0, count, window)]
    trainings = 1 if recipe.train.together else len(recipe.to_train)
    made = Reads(reads[:steps], count).made(now, room, trainings)
    return min(features.disk_bytes or windows, every), made / count
