"""Records as data sets hold them, and what becomes of them."""

import json
from pathlib import Path
from types import SimpleNamespace

from pipeline.features.source import Answer
from pipeline.lm.chat import Encoded
from pipeline.recipe.recipe import Recipe
from pipeline.recipe.sections import DataConfig
from preprocess.dump.interview import AnswerWorker, Part
from preprocess.dump.task import ShardTask
from preprocess.sources.dialogues import Dialogue, clean
from preprocess.sources.intake import Intake
from preprocess.sources.sequences import encode_sequences
from tests.kit import byte_tokenizer
from tests.pipeline.test_chat import masked_runs

TOKENIZER = byte_tokenizer()
Q, A = ("human", "why?"), ("gpt", "because.")


def turns(*pairs: tuple[str, str]) -> list[dict]:
    return [{"from": role, "value": text} for role, text in pairs]


def record(*pairs: tuple[str, str], doc_id: object = "doc") -> dict:
    return {"id": doc_id, "conversations": turns(*pairs)}


def messages(*texts: str) -> list[dict]:
    """Questions and answers in turn."""
    return [{"role": "assistant" if at % 2 else "user", "content": text} for at, text in enumerate(texts)]


def encoded(item: dict, tokenizer=TOKENIZER, **settings) -> tuple[list[Encoded], list[str]]:
    """Sequences, and the edits of both steps."""
    dialogue = clean(item)
    sequences, edits = encode_sequences(tokenizer, dialogue, DataConfig(source="", **settings))
    return [sequence for _, sequence in sequences], [*dialogue.edits, *edits]


def dumped(item: dict, tokenizer=TOKENIZER, **settings) -> tuple[list[tuple[list[int], list[int]]], list[str]]:
    """``([(ids, mask), ...], edits)``"""
    sequences, edits = encoded(item, tokenizer, **settings)
    return [(sequence.input_ids.tolist(), sequence.loss_mask.tolist()) for sequence in sequences], edits


def runs(item: dict, tokenizer=TOKENIZER, **settings) -> list[str]:
    """The trained texts."""
    return [run for sequence in encoded(item, tokenizer, **settings)[0] for run in masked_runs(tokenizer, sequence)]


def intake_of(folder: Path, records: list[dict], **settings) -> Intake:
    source = folder / "data.json"
    source.write_text(json.dumps(records))
    return Intake(DataConfig(source=str(source), **settings))


def ask(patch, recipe: Recipe, tokenizer, reply: list[int], *dialogues: Dialogue) -> tuple[Part, list[str]]:
    """Ask a target of this tokenizer, which gives this reply to every question. Return what comes of it, and the
    prompts.
    """
    prompts = []

    def answers(batch: list, *_, **__) -> list[Answer]:
        prompts.extend(tokenizer.decode(prompt.tokens) for prompt in batch)
        return [Answer(reply)] * len(batch)

    stop = frozenset([tokenizer.eos_token_id])
    source = SimpleNamespace(tokenizer=tokenizer, stop_ids=stop, positions=1024, one_pass=False, answers=answers)
    patch.setattr("preprocess.dump.interview.open_source", lambda target: source)
    return AnswerWorker(recipe).work(ShardTask("part", 0, list(dialogues))), prompts
