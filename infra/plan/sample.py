"""The size of a data source: every record is counted, and a sample of them is encoded."""

from dataclasses import dataclass
from itertools import islice

from pipeline.basics.errors import PipelineError
from pipeline.basics.progress import Progress
from pipeline.lm import chat
from pipeline.lm.model import load_tokenizer
from pipeline.recipe.recipe import Recipe
from preprocess.dump.worker import EncodedDocument
from preprocess.sources.forms import describe_record
from preprocess.sources.groups import Groups, held_out
from preprocess.sources.intake import DESCRIBED_REASONS, clean_in_language
from preprocess.sources.read import TornTail, read_records
from preprocess.sources.sequences import encode_sequences

ENCODED = 200  # records, evenly spread over the source


@dataclass(frozen=True)
class Sample:
    """Every k-th record of a source: the number that was tried, and the resulting documents, by split."""

    records: int  # of the source
    tried: int
    documents: dict[str, list[EncodedDocument]]

    @property
    def mean_length(self) -> float:
        """Return the mean tokens of a training document."""
        documents = self.documents["train"]
        return sum(len(document.input_ids) for document in documents) / len(documents)


def sample_source(recipe: Recipe) -> Sample:
    """Read the source twice: once to count, once to encode. Raise PipelineError if no record is usable."""
    with Progress("count records", 0, "records") as progress:
        records = 0
        for _ in read_records(recipe.data, TornTail()):
            records += 1
            progress.advance(1)
    if not records:
        raise PipelineError(f"data.source {recipe.data.source} holds no record")
    every = max(records // ENCODED, 1)
    tokenizer, groups, tried = load_tokenizer(recipe.target), Groups(recipe.data), 0
    documents: dict[str, list[EncodedDocument]] = {"train": [], "validation": []}
    rejected: dict[str, str] = {}
    for record in islice(read_records(recipe.data, TornTail()), 0, None, every):
        tried += 1
        try:
            dialogue = clean_in_language(record, recipe.data, groups)
            sequences, _ = encode_sequences(tokenizer, dialogue, recipe.data)
        except chat.Unusable as reason:
            rejected.setdefault(str(reason), describe_record(record))
            continue
        split = "validation" if held_out(dialogue.group, recipe.data.heldout_fraction) else "train"
        documents[split] += [
            EncodedDocument(name, sequence.input_ids, sequence.loss_mask) for name, sequence in sequences
        ]
    if not documents["train"]:
        reasons = ", ".join(f"{reason}: {text}" for reason, text in rejected.items() if reason in DESCRIBED_REASONS)
        raise PipelineError(
            f"none of {tried} records tried of data.source {recipe.data.source} is usable"
            f"{f' ({reasons})' if reasons else ''}"
        )
    return Sample(records, tried, documents)


def expected_counts(recipe: Recipe, sample: Sample) -> dict[str, float]:
    """Return the expected rows and tokens of the finished dump; `trained_tokens` have a loss."""
    data, length = recipe.data, sample.mean_length
    share = sample.records / sample.tried
    train = len(sample.documents["train"]) * share
    trained = sum(int(document.loss_mask.sum()) for document in sample.documents["train"]) / len(
        sample.documents["train"]
    )
    train = min(train, data.max_dialogues or train, (data.max_tokens or train * length) / length)
    held = data.heldout_fraction * sum(map(len, sample.documents.values())) * share
    validation = min(held, data.validation_dialogues)
    return {
        "rows": train + validation,
        "tokens": (train + validation) * length,
        "train_rows": train,
        "train_tokens": train * length,
        "trained_tokens": train * trained,
    }
