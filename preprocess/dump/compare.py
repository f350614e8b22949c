"""Stored states against the target's now, whoever computed them."""

import random
from dataclasses import dataclass
from pathlib import Path

import torch

from pipeline.features.engines import open_source
from pipeline.features.schema import FeatureSpec
from pipeline.features.shards import ANSWERS, SPLITS, FeatureStore, Manifest
from pipeline.features.source import FeatureSource
from pipeline.lm.config import TargetConfig
from pipeline.lm.embedding_head import LMHead
from pipeline.lm.model import load_embed_head

# Relative errors that rounding in a batch of another shape may cause: of a whole row, and of its worst token. A token
# of another text or target has an error of about 1.
ALLOWED_ROW, ALLOWED_TOKEN = 0.05, 0.5


@dataclass(frozen=True)
class Compared:
    """One row."""

    of_row: float  # relative error of its worst state, with auxiliary layers
    of_token: float  # of its worst token
    of_state_S: torch.Tensor  # by state: the largest difference, over the largest value
    same: int  # tokens after which the likeliest next one is the same
    tokens: int


def recomputed(store: FeatureStore, source: FeatureSource, head: LMHead, rows: int) -> dict[str, Compared]:
    """By document id, of a fixed random sample. The last state of an answer that came of one pass is left out: it is
    0.
    """
    found = {}
    for number in sorted(random.Random(0).sample(range(len(store)), min(rows, len(store)))):
        row = store.row(number)
        known = slice(None if row.hidden_TD[-1].any() else -1)
        stored = [row.hidden_TD[:, None]] + ([] if row.auxiliary_TKD is None else [row.auxiliary_TKD])
        fresh_TSD, stored_TSD = next(source.states([row.input_ids])).float().cpu()[known], torch.cat(stored, 1)[known]
        wrong_TSD = stored_TSD.float() - fresh_TSD
        dtype = head.linear.weight.dtype
        was_T, is_T = (head(states_TSD[:, 0].to(dtype)).argmax(-1) for states_TSD in (stored_TSD, fresh_TSD))
        found[row.doc_id] = Compared(
            of_row=(wrong_TSD.norm(dim=(0, 2)) / fresh_TSD.norm(dim=(0, 2))).max().item(),
            of_token=(wrong_TSD.norm(dim=-1) / fresh_TSD.norm(dim=-1)).max().item(),
            of_state_S=wrong_TSD.abs().amax((0, 2)) / fresh_TSD.abs().amax((0, 2)),
            same=int((was_T == is_T).sum()),
            tokens=len(was_T),
        )
    return found


def compare(
    folder: Path, spec: FeatureSpec, target: TargetConfig, rows: int, against: str | None = None
) -> tuple[list[str], str | None]:
    """How far a sample of each set is off, in words; and a document that is off by more than rounding. With `against`,
    an engine, its states are compared one by one.
    """
    config = target.model_copy(update={"engine": against}) if against else target
    source, head = open_source(config, spec.auxiliary_numbers), load_embed_head(target).head
    manifest, found = Manifest.load(folder), {}
    for name in (*SPLITS, ANSWERS):
        if manifest.total(name, "rows"):
            found |= recomputed(FeatureStore(folder, name, spec), source, head, rows)
    of_row, of_token = max(one.of_row for one in found.values()), max(one.of_token for one in found.values())
    said = [
        f"{len(found)} rows forwarded again: largest relative error of a row {of_row:.4f} (allowed {ALLOWED_ROW}), "
        f"of a token {of_token:.4f} (allowed {ALLOWED_TOKEN})"
    ]
    if against:
        names = ["the last state, normed", *(f"layer {number}" for number in spec.auxiliary_numbers)]
        worst_S = torch.stack([one.of_state_S for one in found.values()]).amax(0).tolist()
        said.append(f"{spec.engine} {spec.engine_version} against {against}, largest difference over largest value:")
        said += [f"  {name}: {worst:.1e}" for name, worst in zip(names, worst_S, strict=True)]
        same, tokens = sum(one.same for one in found.values()), sum(one.tokens for one in found.values())
        said.append(f"  the likeliest next token is the same after {same:,} of {tokens:,} tokens")
    wrong = (name for name, one in found.items() if not (one.of_row <= ALLOWED_ROW and one.of_token <= ALLOWED_TOKEN))
    return said, next(wrong, None)
