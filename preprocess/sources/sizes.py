"""A look at a source before any state is made: whether it holds as much as its recipe asks of it."""

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

LOOKED_AT = 200_000  # dialogues, at most
ENCODED = 64  # dialogues, whose mean length estimates the rows of data.max_tokens
CLEARLY = 1.5  # times an estimate of steps, from which on a warm-up is refused
FRACTION = 0.3  # the largest that is advised


@dataclass
class Look:
    """What the first dialogues of a source are: all of them where `whole`."""

    train: int = 0
    held_out: int = 0
    prompts: int = 0  # that the held-out dialogues give: each question is one
    whole: bool = False
    sample: list[Dialogue] = field(default_factory=list)  # to train on
    groups: set[str] = field(default_factory=set)
    questions: set[bytes] = field(default_factory=set)  # of `prompts`

    @property
    def dialogues(self) -> int:
        return self.train + self.held_out


def require_sizes(recipe: Recipe) -> None:
    """Raises PipelineError where the source holds out too few dialogues, or training ends within its warm-up."""
    asked = max((one.prompts or 1 for one in recipe.eval.benchmarks.values() if one.held_out), default=0)
    prompts = max(asked, recipe.data.heldout_prompts + 1 if _needs_answers(recipe) else 0)
    look = look_at(recipe, prompts)
    if look.whole and not look.dialogues:
        return  # the dump says what became of each record
    if look.whole and (look.prompts < prompts or not look.held_out):
        raise PipelineError(_too_few(recipe, look, prompts, asked))
    if recipe.to_train and recipe.train.tokens is None and recipe.data.answers == "source":
        _require_steps(recipe, look)


def _needs_answers(recipe: Recipe) -> bool:
    """Whether training goes by the target's answers to calibration prompts."""
    train = recipe.train
    return bool(recipe.to_train) and (train.keep == "best" or train.patience is not None or train.decode != "never")


def look_at(recipe: Recipe, prompts: int) -> Look:
    """Read dialogues until the held-out ones give so many prompts and a sample is there, or to the source's end."""
    look = Look()
    for dialogue in Intake(recipe.data):
        look.groups.add(dialogue.group)
        if held_out(dialogue.group, recipe.data.heldout_fraction):
            look.held_out += 1
            _offer(look, dialogue, distinct=recipe.data.group is None)
        else:
            look.train += 1
            look.sample += [dialogue] if len(look.sample) < ENCODED else []
        enough = look.held_out and look.prompts >= prompts and len(look.sample) == ENCODED
        if enough or look.dialogues == LOOKED_AT:
            return look
    look.whole = True
    return look


def _offer(look: Look, dialogue: Dialogue, distinct: bool) -> None:
    """Count the prompt that a held-out dialogue gives, as the dump's plan does."""
    if dialogue.question is None or (distinct and question_key(dialogue.question) in look.questions):
        return
    look.questions.add(question_key(dialogue.question))
    look.prompts += 1


def _too_few(recipe: Recipe, look: Look, prompts: int, asked: int) -> str:
    data = recipe.data
    answers = f" + {data.calibration_prompts}" if data.calibration_prompts else ""
    named = ", data.calibration_prompts" if answers else ""
    shared = f" with {len(look.groups)} first questions" if len(look.groups) < look.dialogues else ""
    return (
        f"data.source {data.source}: its {look.dialogues} dialogues{shared} hold out {look.held_out}, which give "
        f"{look.prompts} prompts (data.heldout_fraction={data.heldout_fraction:g}), but the recipe wants at least "
        f"{max(prompts, 1)}: validation takes up to {data.validation_dialogues} (data.validation_dialogues), and their "
        f"questions are {data.heldout_prompts}{answers} prompts (data.heldout_prompts{named}), of which eval asks "
        f"{asked}. {_advice(data, look, max(prompts, 1))}"
    )


def _advice(data: DataConfig, look: Look, prompts: int) -> str:
    """What gives so many prompts: a fifth more groups than these are held out, since the hash of a name decides."""
    if look.held_out and not look.prompts:
        return (
            "Texts and tokens ask no question: measure other eval.benchmarks than held-out dialogues, and set "
            "train.keep='last', train.decode='never' and no train.patience"
        )
    fraction = math.ceil(max(120 * prompts / len(look.groups), 120 * data.heldout_fraction)) / 100
    if fraction <= FRACTION:
        return f"Set data.heldout_fraction={fraction:g}"
    if len(look.groups) < look.dialogues and data.group is None:
        return (
            "Give data with more questions; or set data.group='id', which splits each dialogue by its own id: then a "
            "held-out question may be trained on, too, and tau is too good"
        )
    fewer = int(FRACTION * len(look.groups) / 1.2) - 1
    if fewer < 2 or data.heldout_fraction >= FRACTION:
        return "Give more data"
    return (
        f"Set data.heldout_fraction={FRACTION}, and data.heldout_prompts (with the prompts of eval.benchmarks of "
        f"held-out dialogues) to at most {fewer}; or give more data"
    )


def _require_steps(recipe: Recipe, look: Look) -> None:
    """By the rows of the whole source, or an estimate from a sample of them: then only what is clearly too long."""
    data, train = recipe.data, recipe.train
    sequences, tokens = _encoded(recipe, look.sample)
    if not sequences:
        return  # the dump says what became of each record
    rows = look.train * sequences / len(look.sample) if look.whole else math.inf
    rows = min(rows, data.max_dialogues or math.inf, (data.max_tokens or math.inf) * sequences / tokens)
    if math.isinf(rows):
        return
    exact = look.whole and len(look.sample) == look.train and data.max_tokens is None
    about, margin = ("", 1.0) if exact else ("about ", CLEARLY)
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
    """``(sequences, their tokens)`` that dialogues give to train on."""
    tokenizer, lengths = load_tokenizer(recipe.target), []
    for dialogue in dialogues:
        try:
            sequences, _ = encode_sequences(tokenizer, dialogue, recipe.data)
        except Unusable:
            continue
        lengths += [len(encoded.input_ids) for _, encoded in sequences]
    return len(lengths), sum(lengths)
