"""Decoding predicts the same as training, and a tree leaves no trace; drafts that are not a single layer."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from eval.measure.tasks import load_drafts
from pipeline.artifacts.provenance import public_recipe
from pipeline.basics.errors import PipelineError
from pipeline.decoding import replay
from pipeline.decoding.config import LoadedMethod, TreeConfig
from pipeline.decoding.contract import DraftRequest, Frontier, RoundInput
from pipeline.decoding.generate import Sampling, decode_plain, decode_speculative
from pipeline.drafts import DRAFTS, build, make_objective
from pipeline.drafts.eagle import EagleConfig
from pipeline.drafts.eagle3 import Eagle3Config, TrainingTimeTestConfig
from pipeline.drafts.gumiho import MLPS, GumihoConfig
from pipeline.drafts.hydra import HydraConfig
from pipeline.drafts.jakiro import JakiroConfig
from pipeline.drafts.parallel.medusa import MedusaConfig
from pipeline.drafts.parts.layers import draft_shapes
from pipeline.drafts.small_model import SmallModel, SmallModelConfig
from pipeline.features.batch import collate
from pipeline.features.schema import TextRow
from pipeline.lm.attention import additive_mask, causal_mask
from pipeline.lm.model import Target, fingerprint
from pipeline.lm.states import EmbeddingAndHead, LMHead, States
from pipeline.recipe.recipe import Recipe
from tests.kit import save_tiny_target
from tests.pipeline.families import save
from tests.pipeline.taught import NEVER, ONE_LAYER, VARIANTS, make_draft, prompt_of, taught

OTHER_DRAFTS = [name for name in VARIANTS if name not in ONE_LAYER and "p-eagle" not in name]
ALONG = [*ONE_LAYER, *(name for name in OTHER_DRAFTS if "gumiho" not in name)]
LENGTH = 20


@pytest.fixture(scope="module")
def text(loaded_target):
    """Return random tokens and the target's states of them."""
    tokens = prompt_of(5, LENGTH)
    states = loaded_target.states(tokens, [1, 2])
    return tokens, states.final_ND.clone(), states.auxiliary_NSD.clone()


def rolled_out(config):
    """Return the settings with four forwards of the training-time test, if the draft has one."""
    return replace(config, ttt_steps=4) if isinstance(config, TrainingTimeTestConfig) else config


@pytest.fixture(scope="module")
def drafts(loaded_target, embed_head):
    """Return drafts by name, trained a little, so that no block is zero. A single layer has random weights in double
    precision, and its training is rolled out four times.
    """
    double = embed_head.to(torch.device("cpu"), torch.float64)

    class Made(dict):
        def __missing__(self, name):
            if name in ONE_LAYER:
                self[name] = make_draft(loaded_target, double, rolled_out(VARIANTS[name])).double()
                return self[name]
            with torch.inference_mode(False):
                self[name] = taught(loaded_target, embed_head, VARIANTS[name], prompt_of(1), prompt_of(2, 30), steps=20)
            return self[name]

    return Made()


def states_of(draft, text, begin, end):
    """Return the target's states that the draft needs."""
    return States(text[1][begin:end], text[2][begin:end], (1, 2)).select(draft.needs).to(next(draft.parameters()).dtype)


def start_on(draft, state, text, begin, end, levels=1):
    """Run `start` on the inputs from `begin` to `end`: states, and the tokens after them."""
    inputs = RoundInput(text[0][: end + 1], states_of(draft, text, begin, end))
    return draft.start(state, inputs, DraftRequest(levels))


def step_chain(draft, state, answer, token, depth, levels=1):
    """Run `step` on the next node of a chain, which is always the second of two siblings."""
    visible = torch.zeros(2, 2 * (depth - 1), dtype=torch.bool)
    visible[:, 1::2] = True
    visible = torch.cat([visible, torch.eye(2, dtype=torch.bool)], dim=1)
    return draft.step(
        state, Frontier(torch.tensor([7, token]), answer.carry_WD[[-1, -1]], visible, depth), DraftRequest(levels)
    )


def training_logits(draft, text):
    """Return logits (T, U) of the training forward for each term; (M, U) for a draft that predicts only at its
    positions, which are the first M.
    """
    tokens, *both = text
    states, auxiliary = (part.to(next(draft.parameters()).dtype) for part in both)
    row = TextRow("text", torch.tensor(tokens).int().numpy(), np.ones(LENGTH, np.uint8), states, auxiliary)
    groups = make_objective(draft.config).groups
    layers = [layer - 1 for layer in draft.needs.auxiliary]
    batch = collate([row], make_objective(draft.config), dict.fromkeys(groups, 1), layers)
    label_terms = [term for term in draft.config.terms(0) if not term.is_penalty]
    return [draft.logits(x.flatten(0, -2), term.head) for term, x in zip(label_terms, draft(batch)[0], strict=True)]


@pytest.mark.parametrize("name", ALONG)
@torch.inference_mode()
def test_along_the_text_decoding_answers_what_training_predicts(drafts, text, name):
    """The text is read in pieces, and steps follow its tokens next to a sibling that no node attends to. A single
    layer's step s at position i is its s-th forward along a chain whose verified prefix ends s - 1 positions before i:
    in training that is rolled out, or else in training whose states after that prefix are the draft's own features.
    """
    draft, (tokens, states, auxiliary) = drafts[name], text
    rolled = isinstance(draft.config, TrainingTimeTestConfig)
    exact = {"rtol": 1e-9, "atol": 1e-9} if name in ONE_LAYER else {"atol": 1e-4}
    levels, predicted, state, begin = draft.config.levels_of(0), training_logits(draft, text), draft.open(), 0
    for end in (7, 8, 11, 12, *((15, 16) if name in ONE_LAYER else ())):
        answer = start_on(draft, state, text, begin, end, levels)
        begin, place = end, end - 1  # the last input
        assert len(answer.logits_LWU) == levels
        for level, logits in enumerate(answer.logits_LWU):
            assert torch.allclose(logits[-1], predicted[level][place], **exact)
        mixed = states.to(next(draft.parameters()).dtype)
        for depth in range(1, 4):
            if draft.config.levels_of(depth):
                if name in ONE_LAYER and not rolled:
                    mixed = mixed.index_copy(0, torch.tensor([place + depth]), answer.carry_WD[-1:])
                answer = step_chain(draft, state, answer, tokens[end + depth], depth)
                if name in ONE_LAYER and not rolled:
                    want = training_logits(draft, (tokens, mixed, auxiliary))[0][place + depth]
                elif name in ONE_LAYER:
                    want = predicted[levels - 1 + depth][place + depth]
                else:
                    want = predicted[0][place + depth] if len(predicted) == 1 else predicted[depth][place]
                assert torch.allclose(answer.logits_LWU[0][-1], want, **exact)
    # Inputs that no later one attends to are dropped: five of 15 stay.
    if name in ONE_LAYER and draft.config.window == 6:
        assert (state.dropped, state.cache.layers[0].length) == (10, 16 - 10 + 6)


@pytest.mark.parametrize("name", [name for name in (*ONE_LAYER, *OTHER_DRAFTS) if VARIANTS[name].levels_of(2)])
@torch.inference_mode()
def test_nodes_of_different_parents_answer_as_on_a_chain_of_their_own(drafts, text, name):
    """The tree has three nodes, then three below the first, the last and the first."""
    draft, parents, eye = drafts[name], [0, 2, 0], torch.eye(3, dtype=torch.bool)
    upper, lower = torch.tensor([40, 90, 7]), torch.tensor([11, 12, 13])
    state, request = draft.open(), DraftRequest(1)
    root = start_on(draft, state, text, 0, 9)
    first = draft.step(state, Frontier(upper, root.carry_WD[[-1, -1, -1]], eye, 1), request)
    visible = torch.cat([eye[parents], eye], dim=1)
    second = draft.step(state, Frontier(lower, first.carry_WD[parents], visible, 2), request)
    for row, parent in enumerate(parents):
        alone = draft.open()
        answer = step_chain(draft, alone, start_on(draft, alone, text, 0, 9), int(upper[parent]), 1)
        assert torch.allclose(first.logits_LWU[0][parent], answer.logits_LWU[0][-1], atol=1e-5)
        answer = step_chain(draft, alone, answer, int(lower[row]), 2)
        assert torch.allclose(second.logits_LWU[0][row], answer.logits_LWU[0][-1], atol=1e-5)


@pytest.mark.parametrize(
    "config",
    [EagleConfig(window=4), JakiroConfig(window=4), Eagle3Config(ttt_steps=2, window=4)],
)
def test_a_window_hides_all_inputs_but_the_last_four(loaded_target, embed_head, config):
    """Checked in training; the test above shows that decoding agrees."""
    draft, tokens = make_draft(loaded_target, embed_head, config), torch.tensor(prompt_of(3, 24))
    layers = range(len(draft.needs.auxiliary))
    states = loaded_target.capture_all(tokens[None], list(draft.needs.auxiliary))[0].clone()
    row = TextRow("", tokens.int().numpy(), torch.ones(24, dtype=torch.uint8).numpy(), states[:, 0], states[:, 1:])
    objective = make_objective(config)
    batch = collate([row], objective, dict.fromkeys(objective.groups, 1), auxiliary=layers)
    states_given = (batch.auxiliary_BTSD if layers else batch.final_BLD).requires_grad_()
    first = draft(batch)[0][0]
    for place in range(23):
        (gradient,) = torch.autograd.grad(first[0, place].sum(), states_given, retain_graph=True)
        visible = gradient[0].flatten(1).abs().sum(1).nonzero()[:, 0].tolist()
        assert visible == list(range(max(0, place - 3), place + 1))


@pytest.mark.parametrize("name", OTHER_DRAFTS)
@torch.inference_mode()
def test_a_rejected_tree_leaves_no_trace(drafts, text, name):
    draft = drafts[name]
    tree = draft.config.resolve(TreeConfig(depth=3 if "medusa" not in name else 2, top_k=3, nodes=8))
    used, clean = draft.open(), draft.open()
    for begin, end in ((0, 8), (8, 9), (9, 12), (12, 15)):
        inputs = RoundInput(text[0][: end + 1], states_of(draft, text, begin, end))
        proposed = draft.propose(used, inputs, tree, None)
        assert len(proposed.tokens) == 8
        without = draft.start(clean, inputs, DraftRequest())
    again, fresh = (
        draft.propose(s, RoundInput(text[0][:17], states_of(draft, text, 15, 16)), tree, None) for s in (used, clean)
    )
    assert again.tokens == fresh.tokens and again.parents == fresh.parents
    assert without.logits_LWU[0].isfinite().all()


@pytest.mark.parametrize("name", ["gumiho", "gumiho, reduced"])
@torch.inference_mode()
def test_gumihos_three_forwards_by_hand(drafts, text, name):
    """The serial part runs on the target's features, then on its own; then all MLPs run on fc of both tokens."""
    draft, tokens, width = drafts[name], text[0], 32
    state, a, b = draft.open(), 40, 90
    first = start_on(draft, state, text, 0, 9)
    true, following = text[1][:9], torch.tensor(tokens[1:10])

    def serial(features, after):
        positions, visible = (
            torch.arange(len(after))[None],
            causal_mask(0, len(after), after.device, draft.config.window),
        )
        mask = additive_mask(visible, torch.float32)[None, None]
        return draft.heads(draft.trunk(features[None], after[None], positions, mask, None)).ahead[0][0]

    f_1 = serial(true, following)[-1]
    assert torch.allclose(first.carry_WD[-1, :width], f_1, atol=1e-5)
    assert torch.allclose(first.logits_LWU[0][-1], draft.logits(f_1), atol=1e-4)
    second = step_chain(draft, state, first, a, 1)
    f_2 = serial(torch.cat([true, f_1[None]]), torch.cat([following, torch.tensor([a])]))[-1]
    assert torch.allclose(second.logits_LWU[0][-1], draft.logits(f_2), atol=1e-4)
    third = step_chain(draft, state, second, b, 2, levels=MLPS)
    embedding = draft.embed_head.embedding_VD
    pair = torch.cat([draft.fc(torch.cat([embedding[token], f])) for token, f in ((a, f_1), (b, f_2))])
    assert len(third.logits_LWU) == MLPS
    for j, logits in enumerate(third.logits_LWU):
        assert torch.allclose(logits[-1], draft.logits(draft.mlp.mlp[j](pair)), atol=1e-4)


LAYER = [f"self_attn.{x}_proj.weight" for x in "qkvo"] + [f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")]
LAYER += ["post_attention_layernorm.weight"]
BOTH = ("weight", "bias")
RELEASED = {  # a draft; the tensors of the authors' checkpoint; our names of some, also as others load them
    "medusa": (
        MedusaConfig(heads=5),
        [name for k in range(5) for name in (f"{k}.0.linear.weight", f"{k}.0.linear.bias", f"{k}.1.weight")],
        {"medusa_head.3.0.linear.bias": "heads.3.0.linear.bias", "2.1.weight": "lm_heads.2.weight"},
    ),
    "gumiho": (
        GumihoConfig(fc_bias=True),
        [
            *("embed_tokens.weight", "fc.weight", "fc.bias", "layers.1.input_layernorm.weight"),
            *(f"layers.{number}.{part}" for number in range(2) for part in LAYER),
            *(f"mlp.{j}.{part}.linear.{x}" for j in range(5) for part in range(6) for x in BOTH),
        ],
        {
            **dict.fromkeys(("mlp.4.0.linear.weight", "mlp.mlp.4.0.linear.weight"), "mlp.mlp.4.0.0.weight"),
            "mlp.4.5.linear.bias": "mlp.mlp.4.5.linear.bias",
        },
    ),
    "hydra": (
        HydraConfig(prefix=False, head_bias=True),
        [
            *(f"hydra_mlp.{k}.{block}.linear.{x}" for k in range(4) for block in range(4) for x in BOTH),
            *(f"hydra_mlp.{k}.0.res_connection.{x}" for k in range(4) for x in BOTH),
            *(f"hydra_lm_head.{k}.{x}" for k in range(4) for x in BOTH),
        ],
        {"hydra_mlp.2.3.linear.bias": "heads.2.3.linear.bias", "hydra_lm_head.1.bias": "lm_heads.1.bias"},
    ),
    "hydra++": (
        HydraConfig(head_bias=True),
        [
            *(f"hydra_mlp.{k}.{2 * block + 1}.linear.{x}" for k in range(4) for block in range(4) for x in BOTH),
            *(f"hydra_mlp.{k}.1.res_connection.{x}" for k in range(4) for x in BOTH),
            *(f"hydra_lm_head.{k}.1.{x}" for k in range(4) for x in BOTH),
            *(f"prefix_embeding_layer.{part}.weight" for part in ("embed_tokens", "layers.0.input_layernorm", "norm")),
            *(f"prefix_embeding_layer.layers.0.{part}" for part in LAYER),
        ],
        {
            "hydra_mlp.2.5.linear.bias": "heads.2.2.linear.bias",
            "prefix_embeding_layer.layers.0.self_attn.q_proj.weight": "prefix.layer.self_attn.q_proj.weight",
        },
    ),
}


@pytest.mark.parametrize("layout", RELEASED)
def test_each_released_tensor_has_a_place_of_its_own_and_none_is_left(loaded_target, embed_head, layout):
    """The names are those that the authors' code loads."""
    config, released, our_names = RELEASED[layout]
    draft, names = make_draft(loaded_target, embed_head, config), DRAFTS[config.kind].names
    table = names.table(draft, dict.fromkeys(released))
    dropped = [name for name in released if name == "embed_tokens.weight" or re.match(names.ignored_tensors, name)]
    assert sorted(table[name] for name in released if name not in dropped) == sorted(draft.state_dict())
    assert len(dropped) == (layout in ("gumiho", "hydra++")) and table.items() >= our_names.items()


# -- an existing small model -------------------------------------------------------------------------------------------


@pytest.fixture
def small(tiny_recipe, loaded_target):
    """Return a function that loads the model in a folder as a draft of the tiny target."""

    def load(folder):
        tree = tiny_recipe.model_dump(mode="json")
        tree["draft"]["small"] = {"kind": "small-model", "model": str(folder)}
        return load_drafts(Recipe.model_validate(tree), loaded_target, ["small"])["small"]

    return load


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_target_as_its_own_draft_is_accepted_whole(small, loaded_target, tiny_target, temperature):
    method, prompt = LoadedMethod(small(tiny_target), TreeConfig(depth=3, top_k=1, nodes=4)), prompt_of(3)
    sampling = Sampling(41, NEVER, temperature=temperature, seed=1)
    got = decode_speculative(loaded_target, method, prompt, sampling)
    assert got.tokens == decode_plain(loaded_target, prompt, sampling).tokens
    if temperature == 0:
        assert got.acceptance.tau == 4.0 and got.draft_forwards == 3 * got.acceptance.passes
        states = loaded_target.states(prompt + got.tokens)
        assert replay.replay_decoding(method, states, prompt + got.tokens, len(prompt)) == got.acceptance


@pytest.mark.parametrize("tree", [{"depth": 4, "top_k": 4, "nodes": 20}, {"paths": "eagle-1"}])
def test_another_model_of_the_tokenizer_changes_nothing(small, loaded_target, tmp_path, tree):
    method = LoadedMethod(small(save_tiny_target(tmp_path, seed=7, layers=1)), TreeConfig(**tree))
    for seed in range(3):
        for sampling in (Sampling(20, NEVER), Sampling(20, NEVER, temperature=0.8, seed=seed)):
            got = decode_speculative(loaded_target, method, prompt_of(seed), sampling)
            assert got.tokens == decode_plain(loaded_target, prompt_of(seed), sampling).tokens


def test_a_small_model_never_guesses_what_the_tokenizer_lacks(tmp_path):
    """Both embeddings have more rows than the tokenizer has tokens."""
    target = Target(save(tmp_path / "target", "llama-3.1", vocab_size=320), "float32")
    reader = Target(save(tmp_path / "small", "qwen3", vocab_size=300), "float32")
    draft = SmallModel(SmallModelConfig(model="me/small"), draft_shapes(target.config))
    draft.attach_model(reader, target.tokenizer, target.tokenizer)
    assert draft.token_ids_U.tolist() == list(range(260))
    answer = draft._output(torch.randn(3, 32))
    assert answer.logits_LWU[0].shape == (3, 260)


def test_another_tokenizer_is_refused_by_a_token(small, tmp_path):
    folder = save_tiny_target(tmp_path, seed=7)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(folder)
    with pytest.raises(PipelineError, match=r"another tokenizer than the target: they differ in 1 tokens.*'<new>'"):
        small(folder)


def test_a_small_model_is_known_by_its_weights_and_named_without_its_path(tiny_recipe, tmp_path):
    tree = tiny_recipe.model_dump(mode="json")
    tree["draft"] = {"small": {"kind": "small-model", "model": str(save_tiny_target(tmp_path / "one"))}} | tree["draft"]
    tree["eval"]["methods"] = {"both": {"draft": "small", "secondary": ["small"]}}
    with pytest.raises(ValueError, match="secondary='small': expected drafts of the recipe that take no forwards"):
        Recipe.model_validate(tree)
    del tree["eval"]["methods"]
    recipe = Recipe.model_validate(tree)
    assert str(tmp_path) not in json.dumps(public_recipe(recipe)["draft"])
    first = fingerprint(recipe.small_models["small"])
    save_tiny_target(tmp_path / "one", seed=1)
    assert fingerprint(recipe.small_models["small"]) != first


@pytest.mark.parametrize(
    ("name", "borrowed"),
    [
        ("gumiho", ["embedding", "head"]),
        ("medusa", []),
        ("dflash", ["embedding", "head"]),
        ("dspark, reduced", ["embedding", "head"]),
        ("medusa, the target's head", ["head"]),
        ("hydra++", ["embedding"]),
        ("small-llama", []),
        ("eagle3", ["embedding"]),
    ],
)
def test_what_is_borrowed_of_the_target_is_what_decoding_reads(drafts, text, name, borrowed):
    """Another embedding or head changes the answer only if it is borrowed."""
    draft = drafts[name]
    assert draft.borrowed == borrowed
    embed_head = draft.embed_head
    embedding = torch.zeros_like(embed_head.embedding_VD)
    replacements = {
        "embedding": EmbeddingAndHead(embedding, embed_head.head, ""),
        "head": EmbeddingAndHead(embed_head.embedding_VD, zero_head(embed_head.head), ""),
    }
    inputs = RoundInput(text[0][:9], states_of(draft, text, 0, 8))
    before = draft.start(draft.open(), inputs, DraftRequest()).logits_LWU[0]
    try:
        for part, replacement in replacements.items():
            draft._embed_head = [replacement]
            after = draft.start(draft.open(), inputs, DraftRequest()).logits_LWU[0]
            assert torch.equal(before, after) == (part not in borrowed), part
    finally:
        draft._embed_head = [embed_head]


def zero_head(head):
    return LMHead(torch.zeros_like(head.linear.weight))


@pytest.mark.parametrize("name", OTHER_DRAFTS)
def test_dialogues_too_short_for_a_horizon_have_no_loss_there(loaded_target, embed_head, name):
    """The dialogues have four tokens and two."""
    draft = make_draft(loaded_target, embed_head, VARIANTS[name])
    for length in (4, 2):
        states, layers = torch.randn(length, 1 + len(draft.needs.auxiliary), 32), range(len(draft.needs.auxiliary))
        row = TextRow("short", np.zeros(length, np.int32), np.ones(length, np.uint8), states[:, 0], states[:, 1:])
        objective = make_objective(draft.config)
        loss, sums = objective.loss(draft, collate([row], objective, dict.fromkeys(objective.groups, 1), layers))
        assert loss.isfinite()
        for term in objective.terms(0):
            assert sums[term.name]["positions"] == max(0, length - 1 - term.group)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("skipper", {"sparsity": 1.5}, "sparsity=1.5"),
        ("skipper", {"sparsity": [0.0, 1.0]}, "some of them between"),
        ("skipper", {"sparsity": [0.3, 0.5]}, "the first block has to compute every token"),
        ("medusa", {"head_bias": True, "own_head": False}, "head_bias=true requires own heads"),
        ("small-llama", {"width": 30}, "width=30 is no even multiple"),
        ("hydra", {"embedding_scale": 0.0}, "expected more than 0"),
        ("p-eagle", {"depths": 1}, "depths=1"),
        ("dflash", {"block": 1}, "block=1"),
        ("dflash", {"block": 8, "window": 7}, "window=7: expected at least 8"),
        ("dflash", {"gamma": 0.0}, "gamma=0.0: expected more than 0"),
        ("dflash", {"dpace": 0.5, "objective": "soft-ce"}, "dpace=0.5: expected 0 to 1, with objective='hard-ce'"),
    ],
)
def test_settings_that_do_nothing_are_refused(kind, settings, message):
    with pytest.raises(ValueError, match=message):
        DRAFTS[kind][0](**settings)


def test_a_tree_that_the_draft_cannot_grow_is_refused_with_what_it_can():
    medusa = VARIANTS["medusa"]
    with pytest.raises(ValueError, match=r"tree.depth=5: this draft guesses at most 4 tokens ahead"):
        medusa.resolve(TreeConfig(depth=5))
    with pytest.raises(ValueError, match=r"parallel=1 .* of a tree of depth 3 this draft can take 3$"):
        medusa.resolve(TreeConfig(depth=3, parallel=1))


def test_a_head_begins_with_its_targets_scale_and_bias(loaded_target, embed_head):
    draft = build(HydraConfig(heads=2, head_bias=True), draft_shapes(loaded_target.config))
    weight, bias = torch.randn(260, 32), torch.randn(260)
    draft.bind(EmbeddingAndHead(embed_head.embedding_VD, LMHead(weight, bias, scale=0.25), ""))
    draft.start_from_target([])
    x = torch.randn(3, 32)
    for head in draft.own_heads:
        assert torch.allclose(head(x), draft.embed_head.head(x), atol=1e-5)
