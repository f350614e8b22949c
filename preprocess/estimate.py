"""What a dump will hold, take and cost, before it is started.

    python -m preprocess.estimate RECIPE [--sample 200] [--tokens-per-second R]

Streams the whole source to count its records and once more to encode every k-th of them, and forwards a few batches of
these to measure a worker's speed, unless --tokens-per-second gives that of the machine that will do it. Duplicates are
not looked for.

    tokens    records x accepted share of the sample x tokens of an accepted dialogue, up to max_tokens or max_dialogues
    disk      tokens x (5 + states x (hidden size x bytes of a word, + 4 for float8)) + rows x 640 (Arrow's frame of a
    record batch);
              states: the last one and each auxiliary layer's
    hours     tokens / (tokens per second of a worker x workers), where each has a GPU of its own or, on a CPU, its
    cores; workers
              that share a GPU share its speed. Loading the target, planning and writing are not in it
    memory    of a worker: the target's weights, and of each batch in flight 8 + states numbers of the hidden size and 3
    of the
              MLP's a token
"""

import argparse
import json
import random
import shutil
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from pipeline.artifacts.features import feature_spec
from pipeline.basics.errors import PipelineError
from pipeline.basics.progress import Progress
from pipeline.basics.public import public_name, scrubbed
from pipeline.features.schema import FP8, token_bytes
from pipeline.lm import chat
from pipeline.lm.model import DTYPES, load_config, load_tokenizer, parameter_count_of
from pipeline.recipe.load import add_recipe_arguments, load_recipe
from pipeline.recipe.recipe import Recipe
from pipeline.recipe.sections import FeaturesConfig
from pipeline.running import entry
from preprocess.dump.task import ShardTask, in_flight
from preprocess.dump.worker import Document, FeatureWorker
from preprocess.sources.groups import Groups, held_out
from preprocess.sources.intake import clean_in_language
from preprocess.sources.pieces import encode_pieces
from preprocess.sources.read import Tail, read_records

PART = 32  # documents that are timed together
FRAME_BYTES = 640  # of a record batch and its entry in the footer, measured on the demo


@dataclass(frozen=True)
class Sample:
    """Of every k-th record: how many were tried, and the documents that came of them, by split."""

    records: int  # of the source
    tried: int
    documents: dict[str, list[Document]]


def sample_source(recipe: Recipe, wanted: int) -> Sample:
    """Reads the source twice: once to count, once to encode about `wanted` records, evenly spread."""
    with Progress("count records", 0, "records") as progress:
        records = 0
        for _ in read_records(recipe.data, Tail()):
            records += 1
            progress.advance(1)
    if not records:
        raise PipelineError(f"data.source {scrubbed(recipe.data.source)} holds no record")
    every = max(records // wanted, 1)
    tokenizer, groups, tried = load_tokenizer(recipe.target), Groups(recipe.data), 0
    documents: dict[str, list[Document]] = {"train": [], "validation": []}
    for record in islice(read_records(recipe.data, Tail()), 0, None, every):
        tried += 1
        try:
            dialogue = clean_in_language(record, recipe.data, groups)
            pieces, _ = encode_pieces(tokenizer, dialogue, recipe.data)
        except chat.Unusable:
            continue
        split = "validation" if held_out(dialogue.group, recipe.data.heldout_fraction) else "train"
        documents[split] += [Document(name, piece.input_ids, piece.loss_mask) for name, piece in pieces]
    if not documents["train"]:
        raise PipelineError(f"none of {tried} records tried of data.source {scrubbed(recipe.data.source)} is usable")
    return Sample(records, tried, documents)


def mean_length(documents: list[Document]) -> float:
    return sum(len(document.input_ids) for document in documents) / len(documents)


def expected(recipe: Recipe, sample: Sample) -> dict[str, float]:
    """Rows and tokens of the finished dump."""
    data, length = recipe.data, mean_length(sample.documents["train"])
    share = sample.records / sample.tried
    train = len(sample.documents["train"]) * share
    train = min(train, data.max_dialogues or train, (data.max_tokens or train * length) / length)
    held = data.heldout_fraction * (len(sample.documents["train"]) + len(sample.documents["validation"])) * share
    validation = min(held, data.validation_dialogues)
    return {
        "rows": train + validation,
        "tokens": (train + validation) * length,
        "train_rows": train,
        "train_tokens": train * length,
    }


def disk_bytes(recipe: Recipe, rows: float, tokens: float) -> float:
    config = load_config(recipe.target)
    states = 1 + len(recipe.auxiliary_layers(config.num_hidden_layers))
    return tokens * token_bytes(recipe.stored_dtype, config.hidden_size, states) + rows * FRAME_BYTES


def memory_bytes(recipe: Recipe) -> float:
    """Of one worker, without what Python and its libraries take."""
    config, size = load_config(recipe.target), DTYPES[recipe.target.dtype].itemsize
    states = 1 + len(recipe.auxiliary_layers(config.num_hidden_layers))
    batch = recipe.features.batch_tokens * ((8 + states) * config.hidden_size + 3 * config.intermediate_size)
    return (parameter_count_of(recipe.target) + in_flight(recipe.features) * batch) * size


def workers_worth(features: FeaturesConfig) -> float:
    """Workers with a device of their own that would dump as fast as these do."""
    return features.workers * min(1, features.gpus_per_worker or 1)


def measured_speed(recipe: Recipe, documents: list[Document], seconds: float = 20) -> float:
    """Tokens per second of one worker here, in its own way but for the writing, for at least so many seconds."""
    recipe = recipe.with_features(store=None)
    worker = FeatureWorker(recipe, Path(), feature_spec(recipe))
    worker.ready()
    mixed = random.Random(0).sample(documents, len(documents))  # of all lengths, in any part of it
    for _ in worker.rows(ShardTask("train", 0, mixed[:1]), {}):  # warms up
        pass
    tokens, first, begin = 0, 0, time.perf_counter()
    while time.perf_counter() - begin < seconds and first < len(mixed):
        part = mixed[first : first + PART]
        tokens += sum(len(row.input_ids) for row in worker.rows(ShardTask("train", 0, part), {}))
        first += PART
    return tokens / (time.perf_counter() - begin)


def disk_warning(stored_dtype: str) -> str:
    smaller = "" if stored_dtype == FP8 else f" set features.stored_dtype={FP8!r},"
    return f"WARNING: the dump does not fit the disk: lower data.max_tokens,{smaller} or point output at a larger one"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_recipe_arguments(parser)
    parser.add_argument(
        "--sample", type=int, choices=range(1, 100_001), metavar="N", default=200, help="records to encode"
    )
    parser.add_argument("--tokens-per-second", type=float, help="of one worker, where it is known")
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    sample = sample_source(recipe, arguments.sample)
    counts = expected(recipe, sample)
    size = disk_bytes(recipe, counts["rows"], counts["tokens"])
    speed = arguments.tokens_per_second or measured_speed(recipe, sample.documents["train"])
    hours = counts["tokens"] / (speed * workers_worth(recipe.features)) / 3600
    parent = next(folder for folder in [recipe.run_dir.resolve(), *recipe.run_dir.resolve().parents] if folder.exists())
    free = shutil.disk_usage(parent).free
    accepted = sum(map(len, sample.documents.values()))
    print(
        f"{sample.records:,} records; of {sample.tried} tried {accepted} documents, "
        f"{mean_length(sample.documents['train']):,.0f} tokens each"
    )
    memory = memory_bytes(recipe)
    print(f"dump   {counts['tokens']:,.0f} tokens in {counts['rows']:,.0f} documents")
    states = 1 + len(recipe.auxiliary_layers(load_config(recipe.target).num_hidden_layers))
    stored = recipe.stored_dtype + (f", {states} states a token" if states > 1 else "")
    print(f"       disk {size / 1e9:,.3f} GB ({stored}); free: {free / 1e9:,.0f} GB")
    print(
        f"       {hours:,.2f} h with {recipe.features.workers} workers of {speed:,.0f} tokens/s, {memory / 1e9:,.1f} "
        "GB a worker"
    )
    if recipe.features.store:
        print(f"       shards go to {public_name(recipe.features.store)}: the disk is that of whoever trains on them")
    elif size > free:
        print(disk_warning(recipe.stored_dtype))
    figures = {
        **{key: round(value) for key, value in counts.items()},
        "disk_bytes": round(size),
        "hours": round(hours, 6),
        "memory_bytes": round(memory),
    }
    print(json.dumps({**figures, "tokens_per_second": round(speed, 1), "free_bytes": free}))


if __name__ == "__main__":
    entry.run(main)
