"""Training one draft, from its shards to its checkpoint."""

import json
import math
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from pipeline import checkpoint
from pipeline.drafts import Draft, build, parameter_count
from pipeline.drafts.layers import shapes_of
from pipeline.ends import Ends
from pipeline.errors import PipelineError
from pipeline.features.schema import FeatureSpec
from pipeline.features.shards import FeatureStore, Manifest, require_whole
from pipeline.files import exclusive, write_text
from pipeline.progress import Progress
from pipeline.recipe import Recipe
from pipeline.target import load_config
from train.data import Batches, coverage, frequent_tokens, validation_batches
from train.engine import Engine, add_sums

METRICS, RESUME_STATE = "metrics.jsonl", "resume"


class Metrics:
    """metrics.jsonl is the truth, TensorBoard a view of it. Lines beyond the resumed step are dropped. Rank 0 only."""

    def __init__(self, folder: Path, resumed: int):
        self._path = folder / METRICS
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        kept = [line for line in lines if _step_of(line) <= resumed] if resumed else []
        write_text(self._path, "".join(f"{line}\n" for line in kept))
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=resumed + 1)

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        for name, value in values.items():
            self._board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        self._board.close()


def _step_of(line: str) -> float:
    """Infinite for a line that was torn when the disk filled or the power went."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf


def train(recipe: Recipe, name: str, ends: Ends, expected: FeatureSpec, rank: int, ranks: int) -> str | None:
    """Trains the recipe's draft `name`, or continues; returns a line for the user on rank 0."""
    folder = recipe.draft_dir(name)
    with exclusive(folder, "training") if rank == 0 else nullcontext():
        return _train(recipe, name, folder, ends, expected, rank, ranks)


def _train(
    recipe: Recipe, name: str, folder: Path, ends: Ends, expected: FeatureSpec, rank: int, ranks: int
) -> str | None:
    if (folder / checkpoint.CONFIG).exists():
        checkpoint.require_trained_under(recipe, name)
        return f"{name}: trained already, in {folder}"
    _require_whole_shards(recipe, rank, ranks)
    store = FeatureStore(recipe.features_dir, "train", expected)
    heldout = FeatureStore(recipe.features_dir, "validation", expected)
    draft = new_draft(recipe, name, ends, store)
    parameters = parameter_count(draft)  # before ZeRO-3 takes the tensors apart
    batches = Batches(store, recipe.train, draft.horizons, recipe.seed, rank, ranks)
    engine = Engine(draft, recipe.train, batches.accumulation, batches.steps, recipe.train_hash(name))
    draft.bind(ends.to(engine.device, engine.dtype))
    run = _Run(recipe, folder, engine, draft, parameters, batches, heldout)
    run.to_the_end()
    facts = run.facts()
    if draft.config.vocabulary:
        facts["vocabulary_coverage"] = round(coverage(heldout, draft.draft_token_ids.cpu()), 4)
    weights = engine.weights()
    if rank == 0:
        checkpoint.save(folder, draft, weights, recipe, name, facts)
        shutil.rmtree(folder / RESUME_STATE)
    engine.barrier()
    return f"{name}: {facts['parameters']:,} parameters, {facts['trained_tokens']:,} trained tokens, in {folder}"


def new_draft(recipe: Recipe, name: str, ends: Ends, store: FeatureStore) -> Draft:
    """The draft at step 0: a function of the recipe, its seed and the shards."""
    config = recipe.draft[name]
    shapes = shapes_of(load_config(recipe.target))
    draft = build(config, shapes)
    draft.initialise(recipe.seed)
    if config.vocabulary:
        draft.set_vocabulary(frequent_tokens(store, shapes["vocab_size"], config.vocabulary))
    draft.bind(ends)
    return draft


def _require_whole_shards(recipe: Recipe, rank: int, ranks: int) -> None:
    """Every rank checks its share of the checksums before the first step."""
    if recipe.train.verify_checksums:
        for record in Manifest.load(recipe.features_dir).shards[rank::ranks]:
            require_whole(recipe.features_dir, record)


class _Run:
    """The loop and its bookkeeping."""

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        engine: Engine,
        draft: Draft,
        parameters: int,
        batches: Batches,
        heldout: FeatureStore,
    ):
        self._recipe, self._config, self._folder = recipe, recipe.train, folder
        self._engine, self._draft, self._batches, self._heldout = engine, draft, batches, heldout
        self._parameters = parameters
        self._step, progress = engine.resume(folder / RESUME_STATE)
        self._trained_tokens = progress.get("trained_tokens", 0)
        self._validation: dict[str, float] = progress.get("validation", {})
        self._metrics = Metrics(folder, self._step) if engine.rank == 0 else None

    def to_the_end(self) -> None:
        quiet = self._engine.rank != 0
        with Progress(f"train {self._folder.name}", self._batches.steps, "steps", self._step, quiet) as progress:
            for step, micro_batches in self._batches.from_step(self._step):
                progress.advance(1, **self._one_step(step, micro_batches))
        if self._metrics:
            self._metrics.close()

    def _one_step(self, step: int, micro_batches) -> dict[str, str]:
        rate = self._engine.learning_rate()
        sums = self._engine.total(self._engine.step(micro_batches))
        values = self._averages(sums)
        if not math.isfinite(values["loss"]):
            raise PipelineError(
                f"step {step + 1}: the loss is {values['loss']} on dialogues {self._batches.documents(step)[:8]}: lower "
                "train.learning_rate, or train in bfloat16 or float32 if this was float16. Run again to resume"
            )
        self._step = step + 1
        self._trained_tokens += int(sums["next"]["positions"])
        if self._metrics:
            self._metrics.write(
                "train", self._step, {**values, "learning_rate": rate, "trained_tokens": self._trained_tokens}
            )
        last = self._step == self._batches.steps
        if last or self._step % self._config.validate_every == 0:
            self._validate()
        if last or self._step % self._config.checkpoint_every == 0:
            progress = {"trained_tokens": self._trained_tokens, "validation": self._validation}
            self._engine.save_resume(self._folder / RESUME_STATE, self._step, progress)
        return {"loss": f"{values['loss']:.3f}", "top-1": f"{values['next_agreement']:.3f}"}

    def _averages(self, sums: dict[str, dict[str, float]]) -> dict[str, float]:
        """Global loss and, per branch, its averages over trained positions; "agreement" is top-1 against the target."""
        out, loss = {}, 0.0
        for branch, weights in self._draft.branch_losses().items():
            part = sums[branch]
            count = max(part["positions"], 1)
            regression, classification = part["regression"] / count, part["classification"] / count
            loss += weights.regression * regression + weights.classification * classification
            out[f"{branch}_regression"] = regression
            out[f"{branch}_classification"] = classification
            out[f"{branch}_agreement"] = part["agree"] / count
        return {"loss": loss, **out}

    def _validate(self) -> None:
        pooled: dict = {}
        share = validation_batches(
            self._heldout, self._config, self._draft.horizons, self._engine.rank, self._engine.ranks
        )
        for batch in share:
            add_sums(pooled, self._engine.measure(batch))
        self._validation = self._averages(self._engine.total(pooled))
        if self._metrics:
            self._metrics.write("validation", self._step, self._validation)

    def facts(self) -> dict[str, Any]:
        """What was done, for the checkpoint and its card."""
        return {
            "parameters": self._parameters,
            "steps": self._step,
            "epochs": self._config.epochs,
            "trained_tokens": self._trained_tokens,
            "dialogues": self._batches.steps_per_epoch * self._config.global_batch,
            "ranks": self._engine.ranks,
            "validation": {key: round(value, 5) for key, value in self._validation.items()},
        }
