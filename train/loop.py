"""Training drafts, from their shards to their checkpoints: one after the other, or in turns, a step of each."""

import itertools
import logging
import math
import shutil
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from pipeline.artifacts import checkpoint
from pipeline.artifacts.curves import METRICS, draw_training
from pipeline.basics.files import exclusive
from pipeline.basics.progress import Progress
from pipeline.decoding.config import LoadedMethod
from pipeline.drafts import TrainedDraft, build, objective_of, parameter_count
from pipeline.drafts.parts.layers import shapes_of
from pipeline.drafts.parts.losses import Term
from pipeline.features.shards import FeatureStore
from pipeline.features.text import some_texts
from pipeline.lm.embedding_head import EmbeddingAndHead, known_tokens
from pipeline.lm.model import DTYPES, load_config, load_embed_head, load_tokenizer
from pipeline.recipe.identity import train_hash
from pipeline.recipe.recipe import Recipe
from pipeline.running.state import begin_resume_states
from train import acceptance
from train.engine.engine import BEST, Engine, add_sums
from train.engine.ranks import by_rank_0, fail_together
from train.input.data import Batches
from train.input.features import Stores, require_shared
from train.input.order import coverage, frequent_tokens
from train.start import Start, read_start
from train.tracking import Metrics, open_tracker, require_tracker

SAID = {"agree": "agreement", "accept": "acceptance"}
log = logging.getLogger(__name__)


def train(
    recipe: Recipe,
    names: list[str],
    embed_head: EmbeddingAndHead,
    features: Callable[[], Stores],
    rank: int,
    ranks: int,
) -> Iterator[str]:
    """Trains these drafts of the recipe, or continues; gives a line for the user as each ends. `features` gives the
    dialogues and is called only where something is to be trained.

    The next step is always one of a draft that has the fewest behind it: those that stopped at different steps meet,
    and from there on read the same dialogues.
    """
    drafts = [_train(recipe, name, embed_head, features, rank, ranks) for name in names]
    behind: dict[Generator[int, None, str], int] = dict.fromkeys(drafts, -1)
    while behind:
        draft = min(behind, key=behind.__getitem__)
        try:
            behind[draft] = next(draft)
        except StopIteration as ended:
            del behind[draft]
            yield ended.value


def _train(
    recipe: Recipe, name: str, embed_head: EmbeddingAndHead, features: Callable[[], Stores], rank: int, ranks: int
) -> Generator[int, None, str]:
    """Gives the steps behind it, at first and after each; returns the line."""
    with ExitStack() as held:
        by_rank_0(lambda: held.enter_context(exclusive(recipe.paths.draft(name), "training")))
        if by_rank_0(lambda: _is_trained(recipe, name)):
            return f"{name}: trained already, in {recipe.paths.draft(name)}"
        return (yield from _to_checkpoint(recipe, name, embed_head, features, rank, ranks))


def _is_trained(recipe: Recipe, name: str) -> bool:
    """Raises PipelineError where that was under other settings."""
    if not (recipe.paths.draft(name) / checkpoint.CONFIG).exists():
        return False
    checkpoint.require_trained_under(recipe, name)
    folder = recipe.paths.draft(name)
    if checkpoint.lacks_plot(folder):  # it was killed behind its checkpoint
        shutil.rmtree(recipe.paths.resume(name), ignore_errors=True)
        draw_training({name: folder / METRICS}, folder / checkpoint.PLOT)
    return True


def _to_checkpoint(
    recipe: Recipe, name: str, embed_head: EmbeddingAndHead, features: Callable[[], Stores], rank: int, ranks: int
) -> Generator[int, None, str]:
    folder, state = recipe.paths.draft(name), recipe.paths.resume(name)
    require_tracker(recipe)
    require_shared(folder)
    by_rank_0(lambda: begin_resume_states(recipe, name))
    store, heldout, answers = features()
    with fail_together():
        start = read_start(recipe, name, embed_head, store.spec)
        draft = new_draft(recipe, name, embed_head, store, start)
    if rank == 0 and start and start.facts["tokens_kept"] < start.facts["tokens"]:
        log.warning("%s begins with %s: the others' rows begin anew", name, start)
    parameters = parameter_count(draft)  # before ZeRO-3 takes the tensors apart
    objective = objective_of(draft.config)
    batches = Batches(store, recipe.train, objective, draft.needs, recipe.seed, rank, ranks)
    engine = Engine(
        draft,
        objective.loss,
        recipe.training(name),
        batches.accumulation,
        batches.order.steps,
        state,
        train_hash(recipe, name),
    )
    draft.move_embed_head(engine.device, engine.dtype)
    run = _Run(recipe, name, engine, draft, batches, (store, heldout, answers))
    yield from run.to_the_end()
    facts = {"parameters": parameters, "template": store.spec.template_settings, **run.facts()}
    facts |= {"template_mark": store.spec.template} | ({"start": start.facts} if start else {})
    if draft.token_ids_U is not None:
        facts["vocabulary_coverage"] = round(coverage(heldout.texts, draft.token_ids_U.cpu()), 4)
    if rank == 0:
        checkpoint.save(folder, draft, run.kept_weights, recipe, name, facts, store.spec)
        shutil.rmtree(state)
        draw_training({name: folder / METRICS}, folder / checkpoint.PLOT)
    engine.barrier()
    said = f"{name}: {parameters:,} parameters, {facts['trained_tokens']:,} trained tokens, in {folder}"
    said += f"; it began with {start}" if start else ""
    return said if run.cut_short is None else f"{said}; {run.cut_short}"


def new_draft(
    recipe: Recipe, name: str, embed_head: EmbeddingAndHead, store: FeatureStore, start: Start | None = None
) -> TrainedDraft:
    """The draft at step 0: a function of the recipe, its seed, the shards and what it starts from."""
    config = recipe.draft[name]
    shapes = shapes_of(load_config(recipe.target))
    shapes = start.shapes(shapes) if start else shapes
    known = known_tokens(load_tokenizer(recipe.target))
    if known < shapes["vocab_size"]:
        shapes["known_tokens"] = known
    draft = build(config, shapes)
    draft.name, draft.recompute = name, recipe.train.recompute
    draft.initialise(recipe.seed)
    if draft.token_ids_U is not None:
        size = len(draft.token_ids_U)
        ids_U = start.vocabulary(size) if start else None
        draft.set_vocabulary(frequent_tokens(store.texts, shapes["vocab_size"], size) if ids_U is None else ids_U)
    if config.runs_the_target:
        embed_head = load_embed_head(recipe.target, DTYPES[recipe.train.dtype])
    draft.bind(embed_head)
    draft.start_from_target(some_texts(store.texts))
    if start:
        start.give(draft)
    return draft


@dataclass
class Done:
    """What a training has behind it: saved with its resume state."""

    trained_tokens: int = 0
    seconds: float = 0.0  # of the steps, without validations
    validation: dict[str, float] = field(default_factory=dict)  # the last one
    best: dict[str, Any] | None = None  # tau, step, trained tokens, seconds and validation of the best weights
    stale: int = 0  # validations since these


class _Run:
    """The loop and its bookkeeping."""

    def __init__(
        self,
        recipe: Recipe,
        name: str,
        engine: Engine,
        draft: TrainedDraft,
        batches: Batches,
        features: Stores,
    ):
        self._recipe, self._config, self._folder = recipe, recipe.train, recipe.paths.draft(name)
        self._engine, self._draft, self._batches = engine, draft, batches
        self._objective = objective_of(draft.config)
        self._name, self._tree = name, recipe.tree(name)
        self._store, self._heldout, self._answers = features
        self._done = Done(**engine.progress)
        self._decoder: acceptance.Decoder | None = None
        self._validation_copy: TrainedDraft | None = None  # validates; made once
        self._watched: dict[str, LoadedMethod] = {}  # of the validation copy, whose tau is estimated
        self.kept_weights: dict = {}  # at the end, whole on rank 0
        self._progress: Progress  # is there from the first step on
        self._metrics = None
        if engine.rank == 0:
            tracker = open_tracker(recipe, name, self._folder)
            self._metrics = Metrics(self._folder, engine.step, tracker)

    @property
    def _is_done(self) -> bool:
        """At the last step, or where no more is to be had."""
        patience = self._config.patience
        return self._engine.step == self._batches.order.steps or (patience is not None and self._done.stale >= patience)

    def to_the_end(self) -> Iterator[int]:
        """Trains, and decodes with the weights that are kept where the recipe says so."""
        with self._metrics or nullcontext():
            yield from self._steps()
            self.kept_weights = self._weights_to_keep()
            if self._metrics and (warning := self._objective.warning(self._kept["validation"])):
                log.warning("%s: %s", self._name, warning)
            if self._config.decode != "never":
                self._decode(self.kept_weights, self._kept["validation"], quiet=False)

    def _steps(self) -> Iterator[int]:
        quiet, first = self._engine.rank != 0, self._engine.step
        yield first
        with Progress(f"train {self._folder.name}", self._batches.order.steps, "steps", first, quiet) as progress:
            self._progress = progress
            begin, before, idle = time.monotonic(), self._done.trained_tokens, self._store.waited
            for _, micro_batches in self._batches.from_step(first, self._engine.device):
                if self._is_done:  # before it began: resumed after the last validation
                    break
                shown = self._one_step(micro_batches)
                seconds = time.monotonic() - begin
                speed, waited = (self._done.trained_tokens - before) / seconds, (self._store.waited - idle) / seconds
                shown |= {"tokens/s": f"{speed:,.0f}", "waiting": f"{waited:.0%}"}
                progress.reach(self._engine.step, **shown)
                yield self._engine.step

    def _one_step(self, micro_batches) -> dict[str, str]:
        rate, begin = self._engine.learning_rate(), time.monotonic()
        sums = self._engine.advance(micro_batches)
        self._done.seconds += time.monotonic() - begin
        values, step = self._averages(sums), self._engine.step
        main = self._terms[0].name
        self._done.trained_tokens += int(sums[main]["positions"])
        if self._engine.overflowed:
            self._write("left_out", {"what": ["the whole step: a gradient overflowed float16; its scale is lowered"]})
        if sums[main]["positions"]:  # else no row of the step has an answer: there is no loss to speak of
            self._write("train", {**values, "learning_rate": rate, "trained_tokens": self._done.trained_tokens})
        validated = step == self._batches.order.steps or step % self._config.validate_every == 0
        if validated:
            self._validate()
        if self._is_done or step % self._config.checkpoint_every == 0:
            self._engine.save_resume(asdict(self._done))
        if validated and self._config.decode == "always":
            self._decode(self._whole().state_dict(), self._done.validation, quiet=True)
        shown = {"loss": f"{values['loss']:.3f}", "top-1": f"{values['agreement']:.3f}"}
        if "estimated_tau" in self._done.validation:
            shown["tau"] = f"{self._done.validation['estimated_tau']:.2f}"
        return shown

    def _write(self, kind: str, values: dict[str, Any]) -> None:
        if self._metrics:
            self._metrics.write(kind, self._engine.step, values)

    def _averages(self, sums: dict[str, dict[str, float]]) -> dict[str, float]:
        """Global loss, the next token's classification and agreement and, by term, all averages over trained positions;
        "agreement" is top-1 against the target (under hard-ce the text), "acceptance" the mean of sum min(p, q).
        """
        out: dict[str, float] = {}
        totals = {term.group: int(sums[term.name]["positions"]) for term in self._terms}
        for term in self._terms:
            name = term.name
            count, divisor = max(totals[term.group], 1), self._objective.divisor(term, totals)
            found = {SAID.get(part, part): value / count for part, value in sums[name].items() if part != "positions"}
            weighted = sum(weight * (sums[name][part] / divisor) for part, weight in term.weights.items())
            out["loss"] = out.get("loss", 0.0) + weighted
            out |= {key: found[key] for key in ("classification", "agreement") if key not in out}
            out |= {f"{name}_{part}": value for part, value in found.items()}
        return out

    @property
    def _terms(self) -> list[Term]:
        return self._objective.terms(self._engine.step)

    # -- validation ------------------------------------------------------------------------------------------------

    def _validate(self) -> None:
        pooled: dict = {}
        engine, answers = self._engine, self._answers
        parts = math.ceil(len(self._heldout) / (self._config.micro_batch * engine.ranks))
        parts += len(range(engine.rank, len(answers), engine.ranks)) if answers is not None else 0
        numbers = itertools.count()

        def part() -> None:
            self._progress.note(f"validation, {next(numbers)} of {parts}")

        part()
        for batch in self._batches.validation(self._heldout, engine.step, engine.device):
            add_sums(pooled, engine.measure(batch))
            part()
        self._done.validation = self._averages(engine.total(pooled))
        if answers is not None:
            self._done.validation |= self._acceptance(part)
        self._done.validation["trained_tokens"] = self._done.trained_tokens
        if self._done.best is not None and self._done.best["step"] == self._engine.step:
            self._done.best["validation"] = self._done.validation
        self._write("validation", self._done.validation)

    def _whole(self) -> TrainedDraft:
        """The draft beside the one that trains, with its weights of now, whole whatever ZeRO does with them. All ranks
        take part.
        """
        self._validation_copy = self._validation_copy or self._draft.validation_copy()
        self._engine.fill(self._validation_copy)
        return self._validation_copy

    def _acceptance(self, part: Callable[[], None]) -> dict[str, float]:
        """The estimate of tau; remembers the best weights."""
        draft = self._whole()
        with fail_together():
            if not self._watched:
                self._watched = acceptance.both(draft, self._tree) | acceptance.hybrids(self._recipe, self._name, draft)
            rank, ranks = self._engine.rank, self._engine.ranks
            mine = acceptance.estimate(draft, self._watched, self._answers, rank, ranks, part)
        found = self._engine.gathered(mine)
        for other in found[1:]:
            for name, counts in found[0].items():
                counts.merge(other[name])
        values = acceptance.figures(found[0])
        self._remember(values["estimated_tau"], draft.state_dict())
        return values

    def _decode(self, weights: dict, validation: dict[str, float], quiet: bool) -> None:
        """Adds to the validation of these weights what decoding the calibration prompts says."""
        if "decoded_tau" in validation:
            return
        tau = None
        if self._engine.rank == 0:
            self._decoder = self._decoder or acceptance.Decoder(self._recipe, self._answers, self._draft, self._tree)
            tau = self._decoder.tau(weights, quiet)
        validation["decoded_tau"] = self._engine.gathered(tau)[0]
        shown = {key: validation[key] for key in ("decoded_tau", "estimated_tau", "trained_tokens")}
        self._write("decoded", shown)

    def _remember(self, tau: float, weights: dict) -> None:
        done = self._done
        if done.best is not None and not tau > done.best["tau"]:
            done.stale += 1
            return
        done.stale = 0
        tokens, seconds = done.trained_tokens, done.seconds
        done.best = {"tau": tau, "step": self._engine.step, "trained_tokens": tokens, "seconds": seconds}
        if self._config.keep == "best" and self._engine.rank == 0:
            checkpoint.write_weights(self._best_file(), weights)

    def _best_file(self) -> Path:
        return self._recipe.paths.resume(self._folder.name) / BEST.format(step=self._done.best["step"])

    # -- what remains ----------------------------------------------------------------------------------------------

    def _weights_to_keep(self) -> dict:
        """The checkpoint's weights: of the last step, where every rank takes part, or of the best validation, on rank
        0.
        """
        if self._config.keep == "last":
            return self._whole().state_dict()
        return load_file(self._best_file()) if self._engine.rank == 0 else {}

    @property
    def _kept(self) -> dict[str, Any]:
        """Step, trained tokens, seconds and validation of the weights that are kept."""
        done, step = self._done, self._engine.step
        if self._config.keep == "best":
            return done.best
        return {"step": step, **{key: getattr(done, key) for key in ("trained_tokens", "seconds", "validation")}}

    def facts(self) -> dict[str, Any]:
        """What was done, for the checkpoint and its card; of the kept weights where these are not the last."""
        kept = self._kept
        facts = {
            "steps": kept["step"],
            "epochs": math.ceil(kept["step"] / self._batches.order.steps_per_epoch),
            "trained_tokens": kept["trained_tokens"],
            "dialogues": self._batches.order.dialogues,
            "ranks": self._engine.ranks,
            "seconds": round(kept["seconds"], 1),
            "validation": {key: round(value, 5) for key, value in kept["validation"].items()},
        }
        return facts | ({"cut_short": self.cut_short} if self.cut_short else {})

    @property
    def cut_short(self) -> str | None:
        """Where training ended before its schedule did. Fewer dialogues, by data.max_tokens, make a shorter one."""
        step, planned = self._engine.step, self._batches.order.steps
        if step == planned:
            return None
        rate = self._engine.learning_rate()
        return f"train.patience ended it at step {step:,} of {planned:,}, at a learning rate of {rate:.2g}"
