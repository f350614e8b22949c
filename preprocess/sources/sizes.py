"""A look at a source before any state is made: whether it holds as much as its recipe asks of it."""

import math
from dataclasses import dataclass, field

from pipeline.basics.errors import PipelineError
from pipeline.lm.chat import Unusable
from pipeline.lm.model import load_tokenizer
from pipeline.recipe.recipe import Recipe
from preprocess.sources.dialogues import Dialogue
from preprocess.sources.groups import held_out
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
    whole: bool = False
    sample: list[Dialogue] = field(default_factory=list)  # to train on

    @property
    def dialogues(self) -> int:
        return self.train + self.held_out


def require_sizes(recipe: Recipe) -> None:
    """Raises PipelineError where the source holds out too few dialogues, or training ends within its warm-up."""
    prompts = max((one.prompts or 1 for one in recipe.eval.benchmarks.values() if one.held_out), default=1)
    enough = max(prompts, recipe.data.heldout_prompts + 1 if _needs_answers(recipe) else 1)
    look = look_at(recipe, enough)
    if look.whole and not look.dialogues:
        return  # the dump says what became of each record
    if look.whole and look.held_out < enough:
        raise PipelineError(_too_few(recipe, look, enough, prompts))
    if recipe.to_train and recipe.train.tokens is None and recipe.data.long == "cut":
        _require_steps(recipe, look)


def _needs_answers(recipe: Recipe) -> bool:
    """Whether training goes by the target's answers to calibration prompts."""
    train = recipe.train
    return bool(recipe.to_train) and (train.keep == "best" or train.patience is not None or train.decode != "never")


def look_at(recipe: Recipe, enough: int) -> Look:
    """Read dialogues until so many are held out and a sample is there, or to the end of the source."""
    look = Look()
    for dialogue in Intake(recipe.data):
        if held_out(dialogue.group, recipe.data.heldout_fraction):
            look.held_out += 1
        else:
            look.train += 1
            look.sample += [dialogue] if len(look.sample) < ENCODED else []
        if look.dialogues == LOOKED_AT or (look.held_out >= enough and len(look.sample) == ENCODED):
            return look
    look.whole = True
    return look


def _too_few(recipe: Recipe, look: Look, enough: int, prompts: int) -> str:
    data, count = recipe.data, look.dialogues
    fraction = math.ceil(120 * enough / count) / 100  # a fifth more: the hash of an id decides
    advice = f"Set data.heldout_fraction={fraction:g}"
    if fraction > FRACTION:
        fewer = int(FRACTION * count / 1.2) - 1
        advice = "Give more data"
    if fraction > FRACTION and fewer > 1:
        advice = (
            f"Set data.heldout_fraction={FRACTION}, and data.heldout_prompts (with the prompts of eval.benchmarks of "
            f"held-out dialogues) to at most {fewer}; or give more data"
        )
    answers = f" + {data.calibration_prompts}" if data.calibration_prompts else ""
    named = ", data.calibration_prompts" if answers else ""
    return (
        f"data.source {data.source}: its {count} dialogues hold out {look.held_out} "
        f"(data.heldout_fraction={data.heldout_fraction:g}), but the recipe wants at least {enough}: validation takes "
        f"up to {data.validation_dialogues} (data.validation_dialogues), and their questions are "
        f"{data.heldout_prompts}{answers} prompts (data.heldout_prompts{named}), of which eval asks {prompts}. {advice}"
    )


def _require_steps(recipe: Recipe, look: Look) -> None:
    """By an upper bound of the rows where the source was read whole; by an estimate where data.max_tokens ends it."""
    data, train = recipe.data, recipe.train
    most = min(look.train if look.whole else math.inf, data.max_dialogues or math.inf)
    cases = [] if math.isinf(most) else [(most, most * data.max_length, 1.0, "at most")]
    if data.max_tokens and data.answers == "source":
        cases.append((data.max_tokens / _mean_length(recipe, look.sample), data.max_tokens, CLEARLY, "about"))
    for rows, tokens, margin, about in cases:
        if rows * margin < train.global_batch:
            raise PipelineError(
                f"{about} {rows:,.0f} training dialogues do not fill one global batch of {train.global_batch}: give "
                "more data, or lower train.global_batch"
            )
        steps = train.steps(rows, tokens, rows)
        if train.schedule != "constant" and train.warmup_steps >= margin * steps:
            raise PipelineError(
                f"train.warmup_steps={train.warmup_steps}, but the run has {about} {steps:,} steps: {rows:,.0f} "
                f"dialogues, {train.epochs} epochs, global_batch={train.global_batch}. Set train.warmup_steps="
                f"{steps // 10}, or train longer"
            )


def _mean_length(recipe: Recipe, dialogues: list[Dialogue]) -> float:
    """Tokens of a dialogue that is trained on; data.max_length where none is usable."""
    tokenizer, lengths = load_tokenizer(recipe.target), []
    for dialogue in dialogues:
        try:
            sequences, _ = encode_sequences(tokenizer, dialogue, recipe.data)
        except Unusable:
            continue
        lengths += [len(encoded.input_ids) for _, encoded in sequences]
    return sum(lengths) / len(lengths) if lengths else recipe.data.max_length
