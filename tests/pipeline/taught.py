"""Real drafts for the tiny target: with random weights, or taught one text; and the trees that they grow."""

from functools import cache

import torch

from pipeline.artifacts import checkpoint
from pipeline.artifacts.provenance import RECIPE
from pipeline.decoding.config import LoadedMethod, TreeConfig
from pipeline.decoding.generate import Sampling, decode_plain
from pipeline.decoding.tree import build_tree
from pipeline.drafts import build, make_objective
from pipeline.drafts.eagle import EagleConfig
from pipeline.drafts.eagle3 import Eagle3Config
from pipeline.drafts.gumiho import GumihoConfig
from pipeline.drafts.hydra import HydraConfig
from pipeline.drafts.jakiro import JakiroConfig, JakiroOnEagle3Config
from pipeline.drafts.native.skipper import SkipperConfig
from pipeline.drafts.parallel.dflash import DFlashConfig
from pipeline.drafts.parallel.dspark import DSparkConfig
from pipeline.drafts.parallel.medusa import MedusaConfig
from pipeline.drafts.parallel.p_eagle import PEagleConfig
from pipeline.drafts.parts.layers import draft_shapes
from pipeline.drafts.parts.one_layer import OneLayerConfig
from pipeline.drafts.prompt_lookup import PromptLookupConfig
from pipeline.drafts.small_model import SmallLlamaConfig
from pipeline.features.batch import collate
from pipeline.features.schema import TextRow

NEVER = frozenset()  # no stop id
CPU = torch.device("cpu")
VARIANTS = {
    "eagle": EagleConfig(kind="eagle"),
    "jakiro": JakiroConfig(kind="jakiro"),
    "four-experts": JakiroConfig(kind="jakiro", experts=4, experts_per_token=2, expert_width=24),
    "scalar": JakiroConfig(kind="jakiro", contrast="scalar", fc_bias=True, window=6),
    "reduced": JakiroConfig(kind="jakiro", vocabulary=100),
    "eagle3": Eagle3Config(ttt_steps=3),
    "eagle3, 3.1's norms": Eagle3Config(ttt_steps=2, fc_norm=True, norm_output=True, norm_before_residual=True),
    "eagle3, others' options": Eagle3Config(
        ttt_steps=2, norm_before_fc=True, qk_norm=True, attention_bias=True, window=6
    ),
    "eagle3, reduced": Eagle3Config(ttt_steps=2, vocabulary=100, auxiliary_layers=[1, 2]),
    "jakiro on eagle-3": JakiroOnEagle3Config(frame="eagle-3", ttt_steps=3),
    "sparse on eagle-3": JakiroOnEagle3Config(
        frame="eagle-3", experts=8, expert_width=16, ttt_steps=4, vocabulary=100, balance_loss=0.01
    ),
    "p-eagle": PEagleConfig(layers=2, depths=4),
    "p-eagle, reduced": PEagleConfig(layers=1, depths=5, vocabulary=100, window=7, qk_norm=True, mask_token=3),
    "gumiho": GumihoConfig(),
    "gumiho, reduced": GumihoConfig(vocabulary=100, window=8),
    "medusa": MedusaConfig(),
    "medusa, the target's head": MedusaConfig(blocks=2, own_head=False, objective="soft-ce"),
    "medusa, reduced": MedusaConfig(heads=5, vocabulary=100),
    "hydra": HydraConfig(prefix=False, blocks=1, objective="hard-ce"),
    "hydra++": HydraConfig(blocks=3),
    "hydra++, the target's head": HydraConfig(heads=5, blocks=1, own_head=False, vocabulary=100),
    "dflash": DFlashConfig(layers=2, block=8, dpace=0.5),
    "dflash, reduced": DFlashConfig(
        layers=1, block=6, vocabulary=100, auxiliary_layers=[1, 2], objective="soft-ce", window=7
    ),
    "dspark, reduced": DSparkConfig(layers=2, block=6, rank=16, vocabulary=100),
    "skipper": SkipperConfig(sparsity=[0.0, 0.5]),
    "small-llama": SmallLlamaConfig(width=32, mlp_width=48),
    "small-llama, reduced": SmallLlamaConfig(width=32, mlp_width=48, vocabulary=100),
}
# Kinds of trees in addition to the dynamic ones above: (draft, its tree)
KINDS = {
    "eagle-1": ("eagle", {"paths": "eagle-1"}),
    "eagle-1, drawn": ("eagle", {"paths": "eagle-1", "siblings": "drawn"}),
    "jakiro, static": ("jakiro", {"paths": "eagle-1", "parallel": 2}),
    "jakiro, static, drawn": ("jakiro", {"paths": "eagle-1", "parallel": 2, "siblings": "drawn"}),
    "jakiro, decoupled": ("jakiro", {"depth": 4, "top_k": 4, "nodes": 20, "candidates": "decoupled", "parallel": 2}),
    "jakiro, static, by expert": (
        "four-experts",
        {"paths": "eagle-1", "candidates": "decoupled", "siblings": "drawn", "parallel": 2},
    ),
    "jakiro, reduced vocabulary, drawn": ("reduced", {"paths": "eagle-1", "siblings": "drawn", "parallel": 1}),
    "eagle-3": ("eagle3", {"depth": 4, "top_k": 4, "nodes": 20}),
    "eagle-3, drawn": ("eagle3, reduced", {"paths": "eagle-1", "siblings": "drawn"}),
    "sparse on eagle-3, by expert": (
        "sparse on eagle-3",
        {"paths": "eagle-1", "candidates": "decoupled", "siblings": "drawn", "parallel": 2},
    ),
    "p-eagle, drawn": ("p-eagle", {"paths": [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]], "siblings": "drawn"}),
    "gumiho, seven levels": ("gumiho", {"depth": 7, "top_k": 4, "nodes": 24}),
    "gumiho, static, drawn": ("gumiho", {"paths": "eagle-1", "siblings": "drawn"}),
    "skipper, drawn": ("skipper", {"paths": "eagle-1", "siblings": "drawn"}),
    "medusa, static": ("medusa", {"paths": [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 0, 0]]}),
    "medusa, drawn": ("medusa, reduced", {"paths": "eagle-1", "siblings": "drawn"}),
    "dflash, seven levels": ("dflash", {"depth": 7, "top_k": 4, "nodes": 24}),
    "dflash, drawn": ("dflash, reduced", {"paths": "eagle-1", "siblings": "drawn"}),
    "dspark, drawn": ("dspark, reduced", {"paths": "eagle-1", "siblings": "drawn"}),
    "hydra++, drawn": ("hydra++, the target's head", {"paths": "eagle-1", "siblings": "drawn"}),
}
ONE_LAYER = [
    name
    for name, config in VARIANTS.items()
    if isinstance(config, OneLayerConfig) and not name.startswith(("gumiho", "p-eagle"))
]
TREES = {
    "deep": {"depth": 5, "top_k": 3, "nodes": 16},
    "wide": {"depth": 2, "top_k": 40, "nodes": 120},
    "usual": {"depth": 4, "top_k": 10, "nodes": 60},
}


def prompt_of(seed: int, length: int = 12) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def grown(draft, **tree) -> LoadedMethod:
    """The draft with this tree, or one as deep as it guesses."""
    while "depth" in tree and not draft.config.parallel_choices(tree["depth"]):
        tree |= {"depth": tree["depth"] - 1}
    return LoadedMethod(draft, TreeConfig(**tree))


def states_for(draft, count, seed=0):
    """Random states of a target, as many as the draft requires."""
    required = draft.needs.final + len(draft.needs.auxiliary)
    return torch.randn(count, required, 32, generator=torch.Generator().manual_seed(seed))


def make_draft(target, embed_head, config, seed=0):
    """Random weights, large enough for attention to tell positions apart (at the usual 0.02 it is all but uniform)."""
    draft = build(config, draft_shapes(target.config))
    draft.initialise(seed)
    for weight in draft.parameters():
        if weight.ndim == 2:
            weight.data.mul_(10)
    if config.vocabulary:
        ids = torch.randperm(260, generator=torch.Generator().manual_seed(seed))[: config.vocabulary]
        draft.set_vocabulary(ids.sort().values)
    draft.bind(embed_head)
    return draft.eval().requires_grad_(False)


def greedy(target, prompt, count):
    return list(_greedy(target, tuple(prompt), count))


@cache
def _greedy(target, prompt, count):
    return tuple(decode_plain(target, list(prompt), Sampling(count, NEVER)).tokens)


@torch.inference_mode()
def logits_after(target, tokens):
    """Plain logits after every token, from one causal forward without a cache."""
    return target.head(target.capture(torch.tensor([tokens])))[0]


@torch.inference_mode()
def forwards_of(target, monkeypatch) -> tuple[list, list]:
    """The states of the target's forwards over trees from now on, and those over texts."""
    trees, texts, forward = [], [], target.forward

    def spied(tokens_N, cache, *tree, **more):
        states = forward(tokens_N, cache, *tree, **more)
        (trees if tree else texts).append(states)
        return states

    monkeypatch.setattr(target, "forward", spied)
    return trees, texts


def texts_of_paths(before: list[int], tree) -> list[list[int]]:
    """Return the text that each node's forward sees: `before`, the root, and the node's own path."""
    return [before + [tree.tokens[n] for n in (0, *tree.path_to(node))] for node in range(len(tree.tokens))]


PLANTED = ([5, 6, 7, 8, 7, 9, 1, 1], [0, 0, 1, 1, 2, 3, 6, 4])  # depths 1 1 2 2 2 3 4 3


def planted(target, right: list[int]):
    """A `propose` of fixed trees, of which the nodes `right` are the target's own next tokens."""

    def propose(state, inputs, *_):
        tokens, parents = list(PLANTED[0]), PLANTED[1]
        for node, token in zip(right, greedy(target, inputs.tokens, len(right)), strict=True):
            tokens[node - 1] = token
        return build_tree(inputs.tokens[-1], tokens, parents, CPU)

    return propose


def taught(target, embed_head, config, prompt, answer, steps=150):
    """A draft trained on one text until it knows it: what it proposes there is mostly accepted."""
    draft = build(config, draft_shapes(target.config))
    draft.initialise(0)
    if config.vocabulary:
        unused = [token for token in range(260) if token not in answer]
        draft.set_vocabulary(torch.tensor(sorted([*set(answer), *unused[: config.vocabulary - len(set(answer))]])))
    draft.bind(embed_head)
    return teach(draft, target, prompt, answer, steps)


def teach(draft, target, prompt, answer, steps=150):
    tokens = torch.tensor([*prompt, *answer])
    mask = torch.ones(len(tokens), dtype=torch.uint8).numpy()
    states_TSD = target.capture_all(tokens[None], list(draft.needs.auxiliary))[0].clone()
    row = TextRow("text", tokens.int().numpy(), mask, states_TSD[:, 0], states_TSD[:, 1:])
    objective, auxiliary = make_objective(draft.config), range(len(draft.needs.auxiliary))
    batch = collate([row], objective, dict.fromkeys(objective.groups, len(tokens) - 2), auxiliary=auxiliary)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=5e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        loss, sums = objective.loss(draft, batch)
        agreed = [part["agree"] == part["positions"] for part in sums.values() if "agree" in part]
        if agreed and all(agreed):  # it knows it
            break
        loss.backward()
        optimizer.step()
    return draft.eval().requires_grad_(False)


def write_release(folder, draft, recipe, name, method, facts=None):
    """A release's folder as far as decoding goes, of the recipe's draft `name` and its method, whose secondary sources
    are prompt lookup.
    """
    draft_folder = recipe.paths.draft(name)
    checkpoint.save(draft_folder, draft, draft.state_dict(), recipe, name, facts or {})
    folder.mkdir()
    secondary = {source: PromptLookupConfig() for source in method.secondary}
    checkpoint.export(draft_folder, folder, method, secondary, draft_folder / RECIPE)
    return folder
