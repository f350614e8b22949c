"""What a round of a draft reads: counted by its forwards, and equal to what its shapes say."""

import pytest
import torch

from eval.studies.reads import round_of
from pipeline.decoding.config import TreeConfig
from pipeline.drafts.eagle import EagleConfig
from pipeline.drafts.gumiho import GumihoConfig
from pipeline.drafts.jakiro import JakiroConfig
from pipeline.drafts.parallel.dflash import DFlashConfig
from pipeline.drafts.parallel.medusa import MedusaConfig
from pipeline.drafts.parallel.p_eagle import PEagleConfig
from tests.pipeline.taught import make_draft

D, MLP, V = 32, 64, 260
ATTENTION = 2 * D * D + 2 * D * (D // 2)  # two of four heads have keys and values
LAYER, HEAD = ATTENTION + 3 * D * MLP, D * V
CHAIN = TreeConfig(depth=3, top_k=1, nodes=4)


@pytest.mark.parametrize(
    ("config", "round_", "once"),
    [
        (EagleConfig(), 3 * (2 * D * D + LAYER + HEAD), 2 * D * D + LAYER + HEAD),
        # two forwards; the last one looks two levels ahead with one call of the head
        (JakiroConfig(), 2 * (2 * D * D + ATTENTION + 4 * D + 6 * D * D + HEAD), None),
        # of eight experts a token's two
        (
            JakiroConfig(experts=8, contrast="none"),
            3 * (2 * D * D + ATTENTION + 8 * D + 6 * D * D + HEAD),
            None,
        ),
        # all places, whose keys and values are made apart from the context's
        (
            DFlashConfig(layers=1, block=6),
            D * D + ATTENTION + D * D + 3 * D * MLP + HEAD,
            D * D + ATTENTION + 3 * D * MLP + HEAD,
        ),
        # its attention takes two halves
        (
            PEagleConfig(layers=1, depths=4),
            2 * D * D + 2 * ATTENTION - D * D + 3 * D * MLP + HEAD,
            None,
        ),
        (MedusaConfig(heads=3), 3 * (D * D + D + HEAD), 3 * (D * D + D + HEAD)),
        # fc once more for each of the two later nodes; one MLP of a linear layer and two blocks
        (
            GumihoConfig(mlps=2, blocks=2),
            2 * (2 * D * D + 2 * LAYER + HEAD) + 2 * 2 * D * D + (2 * D * D + D + 2 * (D * D + D)) + HEAD,
            None,
        ),
    ],
)
def test_a_round_reads_each_forwards_weights(loaded_target, embed_head, config, round_, once):
    draft = make_draft(loaded_target, embed_head, config)
    found = round_of(draft, CHAIN)
    assert found.numbers == round_
    assert once is None or found.once == once


def test_experts_that_no_node_keeps_are_not_read(loaded_target, embed_head):
    draft = make_draft(loaded_target, embed_head, JakiroConfig(experts=8, contrast="none"))
    wide = round_of(draft, TreeConfig(depth=3, top_k=6, nodes=12))
    assert round_of(draft, CHAIN).numbers < wide.numbers
    assert wide.once <= sum(x.numel() for x in draft.parameters() if x.ndim == 2) + HEAD
    assert torch.is_inference_mode_enabled() is False
