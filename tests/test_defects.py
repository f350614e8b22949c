"""The checks find known defects of the released code of this line of papers. The tests add one defect at a time: a
wrong rule, a wrong mask, tied weights, a wrong loss mask. Each property holds without its defect and fails with it.

The defects of drawn siblings are in tests/pipeline/test_accept.py, the one of the last level in test_tree.py.
"""

import pytest
import torch

from pipeline.decoding import generate
from pipeline.decoding.contract import DraftRequest, Frontier, RoundInput
from pipeline.decoding.generate import Sampling, decode_plain, decode_speculative
from pipeline.drafts import make_objective, parameter_count
from pipeline.features.batch import collate
from pipeline.features.schema import TextRow
from tests.pipeline.taught import NEVER, VARIANTS, greedy, grown, make_draft, prompt_of, states_for, taught

SAMPLED = {"temperature": 0.8, "top_p": 0.95}


@pytest.fixture(scope="module")
def trained_draft(loaded_target, embed_head):
    """(a draft that was taught one text, the text's prompt)"""
    prompt = prompt_of(3)
    return taught(
        loaded_target, embed_head, VARIANTS["eagle"], prompt, greedy(loaded_target, prompt, 24), steps=100
    ), prompt


def typical(tree, logits_NV):
    """Accept as Medusa and Hydra do: the first candidate that is likely enough, whatever the target would draw."""
    path, node = [], 0
    while True:
        p_V = logits_NV[node].softmax(-1)
        least = min(0.09, 0.3 * float((p_V * p_V.clamp_min(1e-30).log()).sum().exp()))
        likely = [child for child in tree.children()[node] if p_V[tree.tokens[child]] > least]
        if not likely:
            return path, int(p_V.argmax())
        node = likely[0]
        path.append(node)


def unprocessed_bonus(tree, logits_NV, following):
    """Draw the token after the accepted path without temperature, top-k and top-p."""
    path, _ = ACCEPT_BEST(tree, following)
    return path, int(logits_NV[path[-1] if path else 0].softmax(-1).multinomial(1))


ACCEPT_BEST = generate.accept_best
RULES = {
    "typical acceptance": (lambda tree, logits, _: typical(tree, logits), SAMPLED),
    "a bonus token of the unprocessed distribution": (unprocessed_bonus, {"temperature": 1.0, "top_k": 1}),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_wrong_rule_gives_other_answers_than_plain_decoding(loaded_target, trained_draft, monkeypatch, rule):
    (draft, prompt), (flawed, settings), rounds = trained_draft, RULES[rule], []

    def is_equal(seed: int) -> bool:
        sampling, method = Sampling(20, NEVER, **settings, seed=seed), grown(draft, depth=4, top_k=4, nodes=20)
        got = decode_speculative(loaded_target, method, prompt, sampling, lambda *arguments: rounds.append(arguments))
        return got.tokens == decode_plain(loaded_target, prompt, sampling).tokens

    assert all(map(is_equal, range(3)))
    monkeypatch.setattr(generate, "accept_best", lambda tree, following: flawed(tree, rounds[-1][2], following))
    assert not all(map(is_equal, range(3)))


def test_a_target_that_sees_other_paths_gives_other_answers(loaded_target, trained_draft, monkeypatch):
    """The defect is Gumiho's "full tree attention": a node sees all nodes of smaller depth."""
    draft, prompt = trained_draft
    propose = draft.propose

    def of_all_paths(*arguments):
        tree = propose(*arguments)
        depths = torch.tensor(tree.depths)
        tree.ancestors_NN = (depths < depths[:, None]) | torch.eye(len(depths), dtype=torch.bool)
        return tree

    def is_equal() -> bool:
        got = decode_speculative(loaded_target, grown(draft, depth=4, top_k=4, nodes=20), prompt, Sampling(20, NEVER))
        return got.tokens == greedy(loaded_target, prompt, 20)

    assert is_equal()
    monkeypatch.setattr(draft, "propose", of_all_paths)
    assert not is_equal()


@torch.inference_mode()
def test_a_draft_without_its_trees_mask_answers_otherwise_beside_a_sibling(loaded_target, embed_head, monkeypatch):
    """Gumiho's second forward pass. With its mask, a node's output does not depend on its neighbours."""
    draft, attend = (
        make_draft(loaded_target, embed_head, VARIANTS["gumiho"]),
        torch.nn.functional.scaled_dot_product_attention,
    )
    tokens, states = prompt_of(1, 10), states_for(draft, 9)

    def answer(siblings: list[int]) -> torch.Tensor:
        state = draft.open()
        first = draft.start(state, RoundInput(tokens, states), DraftRequest())
        count = len(siblings)
        visible_WC = torch.eye(count, dtype=torch.bool)
        frontier = Frontier(torch.tensor(siblings), first.carry_WD.expand(count, -1), visible_WC, 1)
        return draft.step(state, frontier, DraftRequest()).logits_LWU[0][0]

    assert torch.allclose(answer([40]), answer([40, 90]), atol=1e-4)
    monkeypatch.setattr(
        "torch.nn.functional.scaled_dot_product_attention",
        lambda *qkv, attn_mask=None, is_causal=False, **more: attend(*qkv, is_causal=is_causal, **more),
    )
    assert not torch.allclose(answer([40]), answer([40, 90]), atol=1e-4)


def test_blocks_that_share_their_weights_are_counted_once(loaded_target, embed_head):
    """The released Hydra multiplies a list: its blocks are the same object. tests/test_recipes.py counts by hand."""
    draft = make_draft(loaded_target, embed_head, VARIANTS["hydra++"])
    before, (head, *_) = parameter_count(draft), draft.heads
    block_size = sum(weight.numel() for weight in head[-1].parameters())
    head[-2].load_state_dict(head[-1].state_dict())
    assert parameter_count(draft) == before
    head[-2] = head[-1]
    assert parameter_count(draft) == before - block_size


@pytest.mark.parametrize("all_trained", [False, True])
def test_a_head_that_learns_the_prompt_depends_on_it(loaded_target, embed_head, all_trained):
    """The defect of Medusa's and Hydra's released training; Medusa's heads see tokens only as labels."""
    draft = make_draft(loaded_target, embed_head, VARIANTS["medusa"])
    tokens, mask = torch.tensor(prompt_of(4, 16)).int().numpy(), (torch.arange(16) >= 8).byte().numpy()
    states = states_for(draft, 16)
    losses = []
    for token in (1, 2):
        tokens[5] = token  # of the prompt
        row = TextRow("one", tokens.copy(), mask | all_trained, states[:, 0])
        batch = collate([row], make_objective(draft.config), dict.fromkeys(make_objective(draft.config).groups, 8))
        losses.append(float(make_objective(draft.config).loss(draft, batch)[0]))
    assert (losses[0] != losses[1]) == all_trained
