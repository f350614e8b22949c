"""Experts routed by domain: what a dialogue is called, and what its gate learns of it."""

import pytest
import torch

from pipeline.drafts import build
from pipeline.drafts.parts.domains import DOMAINS, domains, marks, surprise
from pipeline.drafts.parts.layers import shapes_of
from pipeline.features.batch import collate
from tests.pipeline.taught import VARIANTS
from tests.pipeline.test_losses_batch import row_of, wide_rows

CODE, MATHS, CHAT = range(3)


class Words:
    """A tokenizer of whole words."""

    def __init__(self, *words):
        self.words = words

    def __len__(self):
        return len(self.words)

    def batch_decode(self, rows):
        return [" ".join(self.words[token] for token in row) for row in rows]


def test_a_token_bears_the_marks_that_its_text_has():
    words = {"```": CODE, " {": CODE, "();": CODE, " == ": CODE, " = ": MATHS, "2+": MATHS, "\\frac": MATHS, "×": MATHS}
    words |= dict.fromkeys(["hello", "a-b", " - ", "12", "===", "(", ";", "\n"], CHAT)
    got = marks(Words(*words), len(words) + 2)
    assert got.shape == (len(words) + 2, len(DOMAINS) - 1) and not got[len(words) :].any()  # more rows than tokens
    for (word, domain), row in zip(words.items(), got.tolist(), strict=False):
        assert row == [domain == CODE, domain == MATHS], word


def batch_with(*shares, length=201):
    """A dialogue for each pair: so many of its trained tokens bear the mark of code, so many the one of maths."""
    rows = []
    for code, maths in shares:
        row = row_of(length, 1, [0] + [1] * (length - 1))
        row.input_ids[:] = 2
        row.input_ids[0] = 0  # not trained
        row.input_ids[10 : 10 + code], row.input_ids[50 : 50 + maths] = 0, 1
        rows.append(row)
    return collate(rows, [1], "predicted", {1: 1})


MARKED = torch.tensor([[True, False], [False, True], [False, False]])


def test_a_dialogue_is_of_the_first_domain_whose_marks_a_hundredth_of_its_tokens_bear():
    batch = batch_with((0, 0), (1, 1), (2, 0), (0, 2), (2, 30))
    assert (batch.trained[1].sum(1) == 199).all()
    inputs = batch.tokens_BT.shape[1]
    numbers = domains(MARKED, batch)[torch.arange(5) * inputs].tolist()
    assert numbers == [CHAT, CHAT, CODE, MATHS, CODE]


def test_the_surprise_is_the_cross_entropy_with_the_dialogues_domain():
    batch = batch_with((0, 0), (5, 0), length=30)
    scores = torch.randn(*batch.tokens_BT.shape, 3, generator=torch.Generator().manual_seed(0))
    want = 0.0
    for row, domain in enumerate([CHAT, CODE]):
        mine = scores[row][batch.trained[1][row]]
        want += torch.nn.functional.cross_entropy(mine, torch.full((len(mine),), domain), reduction="sum").item()
    assert surprise(scores, MARKED, batch).item() == pytest.approx(want, rel=1e-5)


def test_the_domain_moves_the_gate_alone_and_the_text_moves_all_but_the_gate(loaded_target, embed_head):
    draft = build(VARIANTS["by-domain"], shapes_of(loaded_target.config))
    draft.initialise(0)
    draft.bind(embed_head)
    found = draft.predictions(collate(wide_rows(), [1], "predicted", {1: 30}))

    def moved(value):
        draft.zero_grad()
        value.backward(retain_graph=True)
        return {name for name, p in draft.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}

    gates = {name for name, _ in draft.named_parameters() if ".gate.weight" in name}
    assert len(gates) == 1 and moved(found["domain"].penalty) == gates
    assert not moved(found["next"].features[0].square().sum()) & gates
