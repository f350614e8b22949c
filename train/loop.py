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
from pipeline.basics.files import lock_folder
from pipeline.basics.progress import Progress
from pipeline.decoding.config import LoadedMethod
from pipeline.drafts import TrainedDraft, make_objective, parameter_count
from pipeline.drafts.parts.losses import Term
from pipeline.lm.states import EmbeddingAndHead
from pipeline.recipe.identity import train_hash
from pipeline.recipe.recipe import Recipe
from pipeline.running.state import begin_resume_states
from train import acceptance
from train.engine.engine import TrainingEngine, add_sums
from train.engine.ranks import decide_on_rank_0, fail_together, run_on_rank_0
from train.engine.resume import BEST
from train.input.data import Batches
from train.input.features import Stores, require_shared
from train.input.order import vocabulary_coverage
from train.start import new_draft, read_start
from train.tracking import Metrics, open_tracker, require_tracker

STATE_SECONDS = 600.0  # from one resume state to the next, if the recipe names no steps
METRIC_NAMES = {"agree": "agreement", "accept": "acceptance"}
log = logging.getLogger(__name__)


def train(
    recipe: Recipe,
    names: list[str],
    embed_head: EmbeddingAndHead,
    features: Callable[[], Stores],
    rank: int,
    ranks: int,
) -> Iterator[str]:
    """Train these drafts of the recipe, or continue; yield a line for the user as each ends. `features` returns the
    dialogues and is called only if something is to be trained.

    The next step is always one of the draft with the fewest steps done: drafts that stopped at different steps meet,
    and from there on read the same dialogues.
    """
    drafts = [_train_draft(recipe, name, embed_head, features, rank, ranks) for name in names]
    steps_done: dict[Generator[int, None, str], int] = dict.fromkeys(drafts, -1)
    while steps_done:
        draft = min(steps_done, key=steps_done.__getitem__)
        try:
            steps_done[draft] = next(draft)
        except StopIteration as stop:
            del steps_done[draft]
            yield stop.value


def _train_draft(
    recipe: Recipe, name: str, embed_head: EmbeddingAndHead, features: Callable[[], Stores], rank: int, ranks: int
) -> Generator[int, None, str]:
    """Yield the number of steps done, at first and after each; return the line for the user."""
    with ExitStack() as locks:
        run_on_rank_0(lambda: locks.enter_context(lock_folder(recipe.paths.draft(name), "training")))
        if run_on_rank_0(lambda: _is_trained(recipe, name)):
            return f"{name}: trained already, in {recipe.paths.draft(name)}"
        return (yield from _train_to_checkpoint(recipe, name, embed_head, features, rank, ranks))


def _is_trained(recipe: Recipe, name: str) -> bool:
    """Return whether the draft is trained. Raise PipelineError if it was trained under other settings."""
    if not (recipe.paths.draft(name) / checkpoint.CONFIG).exists():
        return False
    checkpoint.require_trained_under(recipe, name)
    folder = recipe.paths.draft(name)
    if checkpoint.is_plot_missing(folder):  # it was killed after it wrote its checkpoint
        shutil.rmtree(recipe.paths.resume(name), ignore_errors=True)
        draw_training({name: folder / METRICS}, folder / checkpoint.PLOT)
    return True


def _train_to_checkpoint(
    recipe: Recipe, name: str, embed_head: EmbeddingAndHead, features: Callable[[], Stores], rank: int, ranks: int
) -> Generator[int, None, str]:
    folder, state = recipe.paths.draft(name), recipe.paths.resume(name)
    require_tracker(recipe)
    require_shared(folder)
    run_on_rank_0(lambda: begin_resume_states(recipe, name))
    store, heldout, answers = features()
    with fail_together():
        start = read_start(recipe, name, embed_head, store.spec)
        draft = new_draft(recipe, name, embed_head, store, start)
    if rank == 0 and start and start.facts["tokens_kept"] < start.facts["tokens"]:
        log.warning("%s starts from %s: the rows of the other tokens start at random", name, start)
    parameters = parameter_count(draft)  # before ZeRO-3 takes the tensors apart
    objective = make_objective(draft.config)
    batches = Batches(store, recipe.train, objective, draft.needs, recipe.seed, rank, ranks)
    engine = TrainingEngine(
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
    yield from run.run_to_end()
    facts = {"parameters": parameters, "template": store.spec.template_settings, **run.collect_facts()}
    facts |= {"template_mark": store.spec.template} | ({"start": start.facts} if start else {})
    if draft.token_ids_U is not None:
        facts["vocabulary_coverage"] = round(vocabulary_coverage(heldout.texts, draft.token_ids_U.cpu()), 4)
    if rank == 0:
        checkpoint.save(folder, draft, run.kept_weights, recipe, name, facts, store.spec)
        shutil.rmtree(state)
        draw_training({name: folder / METRICS}, folder / checkpoint.PLOT)
    engine.barrier()
    summary = f"{name}: {parameters:,} parameters, {facts['trained_tokens']:,} trained tokens, in {folder}"
    summary += f"; it began with {start}" if start else ""
    return summary if run.cut_short is None else f"{summary}; {run.cut_short}"


@dataclass
class TrainingState:
    """The totals of a training so far, saved with its resume state."""

    trained_tokens: int = 0
    seconds: float = 0.0  # of the steps, without validations
    validation: dict[str, float] = field(default_factory=dict)  # the last one
    best: dict[str, Any] | None = None  # tau, step, trained tokens, seconds and validation of the best weights
    stale: int = 0  # validations since the best weights
    initial: dict[str, float] = field(default_factory=dict)  # the validation before step 1, if weights were given


class _Run:
    """The loop and its bookkeeping."""

    def __init__(
        self,
        recipe: Recipe,
        name: str,
        engine: TrainingEngine,
        draft: TrainedDraft,
        batches: Batches,
        features: Stores,
    ):
        self._recipe, self._config, self._folder = recipe, recipe.train, recipe.paths.draft(name)
        self._engine, self._draft, self._batches = engine, draft, batches
        self._objective = make_objective(draft.config)
        self._name, self._tree = name, recipe.tree(name)
        self._store, self._heldout, self._answers = features
        self._state = TrainingState(**engine.progress)
        self._decoder: acceptance.Decoder | None = None
        self._validation_copy: TrainedDraft | None = None  # validates; made once
        self._estimated_methods: dict[str, LoadedMethod] = {}  # of the validation copy, whose tau is estimated
        self.kept_weights: dict = {}  # at the end, complete on rank 0
        self._progress: Progress  # set from the first step on
        self._saved = time.monotonic()  # when the last resume state was saved
        self._metrics = None
        if engine.rank == 0:
            tracker = open_tracker(recipe, name, self._folder)
            self._metrics = Metrics(self._folder, engine.step, tracker)

    @property
    def _is_finished(self) -> bool:
        """Return whether training has reached its last step, or `train.patience` ends it."""
        patience = self._config.patience
        return self._engine.step == self._batches.order.steps or (
            patience is not None and self._state.stale >= patience
        )

    def run_to_end(self) -> Iterator[int]:
        """Train, and decode with the weights that are kept if the recipe says so."""
        with self._metrics or nullcontext():
            yield from self._train_steps()
            self.kept_weights = self._weights_to_keep()
            if self._metrics and (warning := self._objective.warning(self._kept_figures["validation"])):
                log.warning("%s: %s", self._name, warning)
            if self._config.decode != "never":
                self._measure_decoded_tau(self.kept_weights, self._kept_figures["validation"], quiet=False)

    def _train_steps(self) -> Iterator[int]:
        quiet, first = self._engine.rank != 0, self._engine.step
        yield first
        with Progress(f"train {self._folder.name}", self._batches.order.steps, "steps", first, quiet) as progress:
            self._progress = progress
            if first == 0 and self._draft.has_weights:
                self._validate()
                self._state.initial = self._state.validation
            begin, before, idle = time.monotonic(), self._state.trained_tokens, self._store.seconds_waited
            for _, micro_batches in self._batches.from_step(first, self._engine.device):
                if self._is_finished:  # resumed after the last validation: nothing is left to train
                    break
                shown = self._train_step(micro_batches)
                seconds = time.monotonic() - begin
                tokens, waited = self._state.trained_tokens - before, self._store.seconds_waited - idle
                shown |= {"tokens/s": f"{tokens / seconds:,.0f}", "waiting": f"{waited / seconds:.0%}"}
                progress.reach(self._engine.step, **shown)
                yield self._engine.step
            self._engine.finish_resume()

    def _train_step(self, micro_batches) -> dict[str, str]:
        rate, begin = self._engine.learning_rate(), time.monotonic()
        sums = self._engine.advance(micro_batches)
        self._state.seconds += time.monotonic() - begin
        values, step = self._average_losses(sums), self._engine.step
        main = self._terms[0].name
        self._state.trained_tokens += int(sums[main]["positions"])
        if self._engine.overflowed:
            self._write("left_out", {"what": ["the whole step: a gradient overflowed float16; its scale is lowered"]})
        if sums[main]["positions"]:  # else no row of the step has an answer: there is no loss to speak of
            self._write("train", {**values, "learning_rate": rate, "trained_tokens": self._state.trained_tokens})
        validated = step == self._batches.order.steps or step % self._config.validate_every == 0
        if validated:
            self._validate()
        if self._is_finished or self._is_state_due(step):
            self._engine.save_resume(asdict(self._state))
            self._saved = time.monotonic()
        else:
            self._engine.finish_resume(wait=False)
        if validated and self._config.decode == "always":
            self._measure_decoded_tau(self._updated_copy().state_dict(), self._state.validation, quiet=True)
        shown = {"loss": f"{values['loss']:.3f}", "top-1": f"{values['agreement']:.3f}"}
        if "estimated_tau" in self._state.validation:
            shown["tau"] = f"{self._state.validation['estimated_tau']:.2f}"
        return shown

    def _is_state_due(self, step: int) -> bool:
        """Return whether a resume state is due after this step; by the clock of rank 0 if the recipe names no steps."""
        if every := self._config.checkpoint_every:
            return step % every == 0
        return decide_on_rank_0(time.monotonic() - self._saved >= STATE_SECONDS, self._engine.device)

    def _write(self, kind: str, values: dict[str, Any]) -> None:
        if self._metrics:
            self._metrics.write(kind, self._engine.step, values)

    def _average_losses(self, sums: dict[str, dict[str, float]]) -> dict[str, float]:
        """Return the global loss, the next token's classification and agreement and, by term, all averages over trained
        positions, whatever `train.weighting`; "agreement" is top-1 against the target (under hard-ce the text),
        "acceptance" the mean of sum min(p, q).
        """
        averages: dict[str, float] = {}
        totals = {term.group: int(sums[term.name]["positions"]) for term in self._terms}
        for term in self._terms:
            name = term.name
            count, divisor = max(totals[term.group], 1), self._objective.divisor(term, totals)
            term_averages = {
                METRIC_NAMES.get(part, part): value / count for part, value in sums[name].items() if part != "positions"
            }
            weighted = sum(weight * (sums[name][part] / divisor) for part, weight in term.weights.items())
            averages["loss"] = averages.get("loss", 0.0) + weighted
            averages |= {key: term_averages[key] for key in ("classification", "agreement") if key not in averages}
            averages |= {f"{name}_{part}": value for part, value in term_averages.items()}
        return averages

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

        def report_part() -> None:
            self._progress.note(f"validation, {next(numbers)} of {parts}")

        report_part()
        for batch in self._batches.validation(self._heldout, engine.step, engine.device):
            add_sums(pooled, engine.measure(batch))
            report_part()
        self._state.validation = self._average_losses(engine.sum_over_ranks(pooled))
        if answers is not None:
            self._state.validation |= self._estimate_acceptance(report_part)
        self._state.validation["trained_tokens"] = self._state.trained_tokens
        if self._state.best is not None and self._state.best["step"] == self._engine.step:
            self._state.best["validation"] = self._state.validation
        self._write("validation", self._state.validation)

    def _updated_copy(self) -> TrainedDraft:
        """Return the validation copy of the draft with its current weights, complete under any ZeRO stage. All ranks
        take part.
        """
        self._validation_copy = self._validation_copy or self._draft.validation_copy()
        self._engine.copy_weights_to(self._validation_copy)
        return self._validation_copy

    def _estimate_acceptance(self, report_part: Callable[[], None]) -> dict[str, float]:
        """Estimate tau, and keep the weights if they are the best so far."""
        draft = self._updated_copy()
        with fail_together():
            if not self._estimated_methods:
                hybrids = acceptance.load_hybrids(self._recipe, self._name, draft)
                self._estimated_methods = acceptance.tree_and_chain(draft, self._tree) | hybrids
            rank, ranks = self._engine.rank, self._engine.ranks
            rank_counts = acceptance.estimate_acceptance(
                draft, self._estimated_methods, self._answers, rank, ranks, report_part
            )
        all_counts = self._engine.gather_objects(rank_counts)
        for other_counts in all_counts[1:]:
            for name, counts in all_counts[0].items():
                counts.merge(other_counts[name])
        values = acceptance.to_metrics(all_counts[0])
        self._update_best(values["estimated_tau"], draft.state_dict())
        return values

    def _measure_decoded_tau(self, weights: dict, validation: dict[str, float], quiet: bool) -> None:
        """Add the tau of decoding the calibration prompts to the validation of these weights."""
        if "decoded_tau" in validation:
            return
        tau = None
        if self._engine.rank == 0:
            self._decoder = self._decoder or acceptance.Decoder(self._recipe, self._answers, self._draft, self._tree)
            tau = self._decoder.tau(weights, quiet)
        validation["decoded_tau"] = self._engine.gather_objects(tau)[0]
        shown = {key: validation[key] for key in ("decoded_tau", "estimated_tau", "trained_tokens")}
        self._write("decoded", shown)

    def _update_best(self, tau: float, weights: dict) -> None:
        state = self._state
        if state.best is not None and not tau > state.best["tau"]:
            state.stale += 1
            return
        state.stale = 0
        tokens, seconds = state.trained_tokens, state.seconds
        state.best = {"tau": tau, "step": self._engine.step, "trained_tokens": tokens, "seconds": seconds}
        if self._config.keep == "best" and self._engine.rank == 0:
            checkpoint.write_weights(self._best_file(), weights)

    def _best_file(self) -> Path:
        return self._recipe.paths.resume(self._folder.name) / BEST.format(step=self._state.best["step"])

    # -- what remains ----------------------------------------------------------------------------------------------

    def _weights_to_keep(self) -> dict:
        """Return the checkpoint's weights: of the last step, where every rank takes part, or of the best validation, on
        rank 0.
        """
        if self._config.keep == "last":
            return self._updated_copy().state_dict()
        return load_file(self._best_file()) if self._engine.rank == 0 else {}

    @property
    def _kept_figures(self) -> dict[str, Any]:
        """Return step, trained tokens, seconds and validation of the weights that are kept."""
        state, step = self._state, self._engine.step
        if self._config.keep == "best":
            return state.best
        return {"step": step, **{key: getattr(state, key) for key in ("trained_tokens", "seconds", "validation")}}

    def collect_facts(self) -> dict[str, Any]:
        """Return the facts of the training for the checkpoint and its card: those of the kept weights."""
        figures = self._kept_figures
        facts = {
            "steps": figures["step"],
            "epochs": math.ceil(figures["step"] / self._batches.order.steps_per_epoch),
            "trained_tokens": figures["trained_tokens"],
            "dialogues": self._batches.order.dialogues,
            "ranks": self._engine.ranks,
            "seconds": round(figures["seconds"], 1),
            "validation": _round(figures["validation"]),
        }
        facts |= {"initial": _round(self._state.initial)} if self._state.initial else {}
        return facts | ({"cut_short": self.cut_short} if self.cut_short else {})

    @property
    def cut_short(self) -> str | None:
        """Return where training ended if before its schedule's end. Fewer dialogues make a shorter schedule."""
        step, planned = self._engine.step, self._batches.order.steps
        if step == planned:
            return None
        rate = self._engine.learning_rate()
        return f"train.patience ended it at step {step:,} of {planned:,}, at a learning rate of {rate:.2g}"


def _round(figures: dict[str, float]) -> dict[str, float]:
    return {key: round(value, 5) for key, value in figures.items()}
