"""A check of a source's size before any state is computed: it must hold as many dialogues as its recipe requires."""

import math
from dataclasses import dataclass, field

from pipeline.basics.errors import PipelineError
from pipeline.lm.chat import Unusable
from pipeline.lm.model import load_tokenizer
from pipeline.recipe.recipe import Recipe
from pipeline.recipe.sections import DataConfig
from preprocess.sources.dialogues import Dialogue
from preprocess.sources.groups import held_out, question_key
from preprocess.sources.intake import Intake
from preprocess.sources.sequences import encode_sequences

MAX_DIALOGUES = 200_000  # dialogues that are read at most
ENCODED = 64  # dialogues whose mean length estimates the rows of data.max_tokens
ESTIMATE_MARGIN = 1.5  # a warm-up is refused from this multiple of the estimated steps on
MAX_FRACTION = 0.3  # the largest data.heldout_fraction that a message advises


@dataclass
class SourceSummary:
    """Counts of a source's first dialogues; of all of them where `is_complete`."""

    train: int = 0
    held_out: int = 0
    prompts: int = 0  # prompts of the held-out dialogues: each question is one
    is_complete: bool = False
    sample: list[Dialogue] = field(default_factory=list)  # dialogues to train on
    groups: set[str] = field(default_factory=set)
    questions: set[bytes] = field(default_factory=set)  # of `prompts`

    @property
    def dialogues(self) -> int:
        return self.train + self.held_out


def require_sizes(recipe: Recipe) -> None:
    """Raise PipelineError where the source holds out too few dialogues, or training ends within its warm-up."""
    eval_prompts = max(
        (benchmark.prompts or 1 for benchmark in recipe.eval.benchmarks.values() if benchmark.held_out), default=0
    )
    prompts = max(eval_prompts, recipe.data.heldout_prompts + 1 if _needs_answers(recipe) else 0)
    look = summarize_source(recipe, prompts)
    if look.is_complete and not look.dialogues:
        return  # the dump reports the reason for each record
    if look.is_complete and (look.prompts < prompts or not look.held_out):
        raise PipelineError(_describe_shortage(recipe, look, prompts, eval_prompts))
    if recipe.to_train and recipe.train.tokens is None and recipe.data.answers == "source":
        _require_steps(recipe, look)


def _needs_answers(recipe: Recipe) -> bool:
    """Return whether training uses the target's answers to calibration prompts."""
    train = recipe.train
    return bool(recipe.to_train) and (train.keep == "best" or train.patience is not None or train.decode != "never")


def summarize_source(recipe: Recipe, prompts: int) -> SourceSummary:
    """Read dialogues until the held-out ones give `prompts` prompts and the sample is full, or to the source's end."""
    look = SourceSummary()
    for dialogue in Intake(recipe.data):
        look.groups.add(dialogue.group)
        if held_out(dialogue.group, recipe.data.heldout_fraction):
            look.held_out += 1
            _count_prompt(look, dialogue, distinct=recipe.data.group is None)
        else:
            look.train += 1
            look.sample += [dialogue] if len(look.sample) < ENCODED else []
        is_enough = look.held_out and look.prompts >= prompts and len(look.sample) == ENCODED
        if is_enough or look.dialogues == MAX_DIALOGUES:
            return look
    look.is_complete = True
    return look


def _count_prompt(look: SourceSummary, dialogue: Dialogue, distinct: bool) -> None:
    """Count the prompt of a held-out dialogue, as the dump's plan does."""
    if dialogue.question is None or (distinct and question_key(dialogue.question) in look.questions):
        return
    look.questions.add(question_key(dialogue.question))
    look.prompts += 1


def _describe_shortage(recipe: Recipe, look: SourceSummary, prompts: int, eval_prompts: int) -> str:
    data = recipe.data
    answers = f" + {data.calibration_prompts}" if data.calibration_prompts else ""
    named = ", data.calibration_prompts" if answers else ""
    shared = f" with {len(look.groups)} first questions" if len(look.groups) < look.dialogues else ""
    return (
        f"data.source {data.source}: its {look.dialogues} dialogues{shared} hold out {look.held_out}, which give "
        f"{look.prompts} prompts (data.heldout_fraction={data.heldout_fraction:g}), but the recipe requires at least "
        f"{max(prompts, 1)}: validation takes up to {data.validation_dialogues} (data.validation_dialogues), and their "
        f"questions are {data.heldout_prompts}{answers} prompts (data.heldout_prompts{named}), of which eval asks "
        f"{eval_prompts}. {_advise(data, look, max(prompts, 1))}"
    )


def _advise(data: DataConfig, look: SourceSummary, prompts: int) -> str:
    """Advise settings that give so many prompts: a fifth more groups are held out, since the hash of a name decides."""
    if look.held_out and not look.prompts:
        return (
            "Texts and tokens hold no question: measure other eval.benchmarks than held-out dialogues, and set "
            "train.keep='last', train.decode='never' and no train.patience"
        )
    fraction = math.ceil(max(120 * prompts / len(look.groups), 120 * data.heldout_fraction)) / 100
    if fraction <= MAX_FRACTION:
        return f"Set data.heldout_fraction={fraction:g}"
    if len(look.groups) < look.dialogues and data.group is None:
        return (
            "Give data with more questions; or set data.group='id', which splits each dialogue by its own id: then a "
            "held-out question may be trained on, too, and tau is too good"
        )
    fewer = int(MAX_FRACTION * len(look.groups) / 1.2) - 1
    if fewer < 2 or data.heldout_fraction >= MAX_FRACTION:
        return "Give more data"
    return (
        f"Set data.heldout_fraction={MAX_FRACTION}, and data.heldout_prompts (with the prompts of eval.benchmarks of "
        f"held-out dialogues) to at most {fewer}; or give more data"
    )


def _require_steps(recipe: Recipe, look: SourceSummary) -> None:
    """Raise PipelineError where the training rows fill no global batch, or no more steps than the warm-up. The rows are
    those of the whole source, or estimated from a sample: then only a clear excess is refused.
    """
    data, train = recipe.data, recipe.train
    sequences, tokens = _encoded(recipe, look.sample)
    if not sequences:
        return  # the dump reports the reason for each record
    rows = look.train * sequences / len(look.sample) if look.is_complete else math.inf
    rows = min(rows, data.max_dialogues or math.inf, (data.max_tokens or math.inf) * sequences / tokens)
    if math.isinf(rows):
        return
    exact = look.is_complete and len(look.sample) == look.train and data.max_tokens is None
    about, margin = ("", 1.0) if exact else ("about ", ESTIMATE_MARGIN)
    if rows * margin < train.global_batch:
        raise PipelineError(
            f"{about}{rows:,.0f} training dialogues do not fill one global batch of {train.global_batch}: give more "
            "data, or lower train.global_batch"
        )
    steps = train.steps(rows, rows * tokens / sequences, rows)
    if train.schedule != "constant" and train.warmup_steps >= margin * steps:
        raise PipelineError(
            f"train.warmup_steps={train.warmup_steps}, but the run has {about}{steps:,} steps: {rows:,.0f} dialogues, "
            f"{train.epochs} epochs, global_batch={train.global_batch}. Set train.warmup_steps={steps // 10}, or train "
            "longer"
        )


def _encoded(recipe: Recipe, dialogues: list[Dialogue]) -> tuple[int, int]:
    """Return ``(number of sequences, number of their tokens)`` that the dialogues give for training."""
    tokenizer, lengths = load_tokenizer(recipe.target), []
    for dialogue in dialogues:
        try:
            sequences, _ = encode_sequences(tokenizer, dialogue, recipe.data)
        except Unusable:
            continue
        lengths += [len(encoded.input_ids) for _, encoded in sequences]
    return len(lengths), sum(lengths)
