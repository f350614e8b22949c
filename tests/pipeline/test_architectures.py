"""Targets of other families, tiny and random: each goes through dump, training and decoding, and is lossless."""

import json
import re
from dataclasses import dataclass

import pytest
import torch
from transformers import AutoConfig

from pipeline.artifacts.features import feature_spec
from pipeline.basics.errors import PipelineError
from pipeline.decoding.config import LoadedMethod
from pipeline.decoding.generate import Sampling, decode_plain, decode_speculative
from pipeline.features.shards import FeatureStore
from pipeline.lm import attention
from pipeline.lm.config import TargetConfig
from pipeline.lm.model import Target, fingerprint, load_config, load_embed_head, load_tree_obstacle
from tests.kit import byte_tokenizer, dump_here, write_sharegpt
from tests.pipeline.brief import make_small_recipe, train_briefly
from tests.pipeline.families import FAMILIES, SMALL, WINDOW, save
from tests.pipeline.taught import (
    NEVER,
    VARIANTS,
    forwards_of,
    grown,
    logits_after,
    make_draft,
    planted,
    prompt_of,
    texts_of_paths,
)

BOTH, ALONE = {"full_attention": None, "sliding_attention": WINDOW}, {"sliding_attention": WINDOW}
SLIDING = {
    "qwen2, sliding": BOTH,
    "mistral, sliding": ALONE,
    "gpt-oss": BOTH,
    "gemma-2, soft caps": BOTH,
    "gemma-3": BOTH,
}


@dataclass
class Family:
    config: TargetConfig
    target: Target


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    class Families(dict):
        def __missing__(self, name):
            config = save(tmp_path_factory.mktemp("family"), name)
            self[name] = Family(config, Target(config, "float32"))
            return self[name]

    return Families()


@pytest.fixture(scope="module")
def dialogues(tmp_path_factory):
    return write_sharegpt(tmp_path_factory.mktemp("source") / "data.json", count=16)


# -- from dump to decoding ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_the_whole_path_from_dump_to_lossless_decoding(families, dialogues, tmp_path, family):
    config, target = families[family].config, families[family].target
    recipe, embed_head = make_small_recipe(config, dialogues, tmp_path / "run"), load_embed_head(config)
    hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(embed_head.embedding_VD, target.embedding_VD)  # embedding and head in the files are the model's
    assert torch.equal(embed_head.head(hidden), target.head(hidden))
    dump_here(recipe)
    row = FeatureStore(recipe.paths.features, "train", feature_spec(recipe)).row(0)
    alone = target.capture(torch.from_numpy(row.input_ids).long()[None])[0]
    assert torch.allclose(row.hidden_TD.float(), alone, rtol=2**-7, atol=1e-4)  # bfloat16's last bit
    for name in ("jakiro", "eagle3"):
        method = LoadedMethod(train_briefly(recipe, target, name), recipe.tree(name))
        for sampling in (Sampling(16, NEVER), Sampling(16, NEVER, temperature=1.0, seed=1)):
            prompt = prompt_of(1, 9)
            assert (
                decode_speculative(target, method, prompt, sampling).tokens
                == decode_plain(target, prompt, sampling).tokens
            )


def test_heads_of_every_kind_are_among_the_families(families):
    assert families["phi, head with bias"].target.head.linear.bias.abs().min() > 0
    assert families["gemma-2, soft caps"].target.head.softcap == 3.0
    assert families["gemma-2, soft caps"].target.model.config._attn_implementation == "eager"  # sdpa has no soft cap
    for family, tied in (("llama-3.2, tied head", True), ("llama-3.1", False)):
        target = families[family].target
        assert (target.head.linear.weight.data_ptr() == target.embedding_VD.data_ptr()) == tied


# -- masks ----------------------------------------------------------------------------------------------------------


def alone(target: Target, tokens: list[int]) -> torch.Tensor:
    """Return the last token's state by the model's own uncached forward, with its own masks."""
    return target.capture(torch.tensor([tokens]))[0, -1]


@torch.inference_mode()
def require_plain_states(target: Target, reference: Target, before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare states after a prompt of `before` tokens with uncached forwards: trees with an accepted path, and single
    tokens.
    """
    prompt, rounds, (trees, texts) = prompt_of(before, before), [], forwards_of(target, monkeypatch)
    draft = make_draft(reference, reference.embed_head("one"), VARIANTS["eagle"])
    draft.propose = planted(reference, [1, 3, 6])
    got = decode_speculative(target, grown(draft), prompt, Sampling(10, NEVER), lambda *count: rounds.append(count))
    assert got.acceptance.accepted[3] >= 1 and len(rounds) in (2, 3)  # of at least 4 tokens, except the last
    for (tokens, tree, _), states in zip(rounds, trees, strict=True):
        for node, text in enumerate(texts_of_paths(tokens[:-1], tree)):
            assert torch.allclose(states.final_ND[node], alone(reference, text), atol=3e-5)
    answer = decode_plain(target, prompt, Sampling(10, NEVER)).tokens
    for count, states in enumerate(texts[-9:], start=1):
        assert torch.allclose(states.final_ND[-1], alone(reference, prompt + answer[:count]), atol=3e-5)
    assert answer == got.tokens
    assert answer == logits_after(reference, prompt + answer[:-1])[before - 1 :].argmax(-1).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tree_and_what_follows_it_get_plain_forwards_states(families, family, monkeypatch):
    """Prompts shorter than a window, as long, and longer: the tree lies before its edge, across it and after it."""
    for before in (1, WINDOW - 3, WINDOW, 3 * WINDOW) if family in SLIDING else (1, 3 * WINDOW):
        with monkeypatch.context() as patch:
            require_plain_states(families[family].target, families[family].target, before, patch)


@pytest.mark.parametrize("family", ["mistral, sliding", "gpt-oss"])
def test_a_compiled_target_gets_plain_forwards_states(families, family, monkeypatch):
    """Masks of one shape by layer kind; on a CPU the compiler's front end alone."""
    compiled = Target(families[family].config, "float32")
    compiled.compile(backend="eager")
    require_plain_states(compiled, families[family].target, WINDOW - 3, monkeypatch)


@pytest.mark.parametrize("family", SLIDING)
def test_sliding_layers_do_slide(families, family):
    """Tokens before the windows of all layers have no effect, so these families' tests do not run on full attention."""
    target = families[family].target
    assert attention.attention_windows(target.config) == SLIDING[family]
    layers = target.config.num_hidden_layers if SLIDING[family] == ALONE else 1
    far = prompt_of(1, layers * (WINDOW - 1) + 2)
    near = [(far[0] + 1) % 256, *far[1:]]
    if SLIDING[family] == ALONE:
        assert torch.equal(logits_after(target, far)[-1], logits_after(target, near)[-1])
    else:
        states = [target.capture_all(torch.tensor([tokens]), [1])[0, :, 1] for tokens in (far, near)]
        # By position: the window of the last begins after the first token.
        difference = (states[0] - states[1]).abs().amax(-1)
        assert difference[:-1].min() > 1
        # Experts are computed for groups of tokens, and how a sum is rounded depends on its group's size.
        rounding = 8 * torch.finfo(torch.float32).eps * states[0].abs().max()
        assert target.config.layer_types[0] != "sliding_attention" or difference[-1] <= rounding


def test_a_window_is_counted_along_each_nodes_path():
    """The tree has 4 tokens after 3 cached ones: root, two children, a child of the second."""
    visible = torch.tensor(
        [[1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 1, 0], [1, 1, 1, 1, 0, 1, 1]]
    ).bool()
    kinds = {"full_attention": None, "sliding_attention": 3}
    masks = attention.layer_masks(kinds, visible, torch.tensor([3, 4, 4, 5]), torch.float32)
    assert torch.equal(masks["full_attention"][0, 0] == 0, visible)
    want = [[0, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 0, 0], [0, 0, 1, 1, 0, 1, 0], [0, 0, 0, 1, 0, 1, 1]]
    assert torch.equal(masks["sliding_attention"][0, 0] == 0, torch.tensor(want).bool())
    alone = attention.layer_masks({"sliding_attention": 3}, visible, torch.tensor([3, 4, 4, 5]), torch.float32, (6, 10))
    assert alone.shape == (1, 1, 6, 10)
    assert torch.equal(alone[0, 0, :4, :7] == 0, torch.tensor(want).bool())
    assert (alone[0, 0, :4, 7:] < 0).all() and (alone[0, 0, 4:, 0] == 0).all() and (alone[0, 0, 4:, 1:] < 0).all()


def test_an_attention_that_would_ignore_masks_is_replaced(tmp_path):
    config = save(tmp_path, "llama")
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "attn_implementation": "flex_attention"}))
    assert AutoConfig.from_pretrained(tmp_path)._attn_implementation == "flex_attention"
    assert Target(config, "float32").model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("family", ["llama-3.1", "gpt-oss"])
def test_dialogues_of_8_and_2048_tokens_in_one_bfloat16_batch_get_the_states_of_each_alone(tmp_path, family):
    """Attention is eager, where masks are added to scores; the states of padding are finite as well."""
    target = Target(save(tmp_path, family, max_position_embeddings=4096), "bfloat16")
    target.model.set_attn_implementation("eager")
    texts = [torch.tensor([prompt_of(length, length)]) for length in (2048, 8)]
    tokens_BT = torch.zeros(2, 2048, dtype=torch.long)
    for b, text in enumerate(texts):
        tokens_BT[b, : text.shape[1]] = text
    states_BTSD = target.capture_all(tokens_BT, [1, 2])
    assert states_BTSD.dtype == torch.bfloat16 and states_BTSD.isfinite().all()
    for states_TSD, text in zip(states_BTSD.float(), texts, strict=True):
        alone = target.capture_all(text, [1, 2])[0].float()
        assert (states_TSD[: len(alone)] - alone).norm(dim=-1).le(2**-6 * alone.norm(dim=-1)).all()


def test_longrope_ends_where_it_would_turn_all_positions_otherwise(families, dialogues, tmp_path):
    config, target = families["phi3, longrope"].config, families["phi3, longrope"].target
    assert (target.config.max_position_embeddings, target.positions) == (256, 128)
    with pytest.raises(
        PipelineError, match="a prompt of 120 tokens and up to 9 more exceed the target's 128 positions"
    ):
        decode_plain(target, prompt_of(0, 120), Sampling(9, NEVER))
    recipe = make_small_recipe(config, dialogues, tmp_path)
    longer = recipe.model_copy(update={"data": recipe.data.model_copy(update={"max_length": 129})})
    with pytest.raises(PipelineError, match=r"data.max_length=129: .* \(longrope\).* Set it to 128 or less"):
        feature_spec(longer)


# -- refusals -------------------------------------------------------------------------------------------------------

NO_TREES = {
    "qwen3_next": ({}, "linear_attention layers: .* a rejected one cannot be removed"),
    "mamba": ({}, "linear_attention layers: .* a rejected one cannot be removed"),
    "recurrent_gemma": ({}, "linear_attention layers: .* a rejected one cannot be removed"),
    "falcon_h1": ({}, "hybrid layers: .* a rejected one cannot be removed"),
    "rwkv": ({}, r"recurrent layers \(rwkv\): .* a rejected one cannot be removed"),
    "llama4_text": ({}, "chunked_attention layers: .* where its chunk begins"),
    "deepseek_v32": ({}, "indexed_attention layers: its attention takes no mask over single tokens"),
    "bloom": ({}, "ALiBi: .* along the cache"),
    "gpt_neo": ({"attention_types": [[["global", "local"], 1]]}, "local layers: .* along the cache"),
    "gpt_oss": ({"sliding_window": None}, "sliding_attention layers without sliding_window"),
}


@pytest.mark.parametrize("family", NO_TREES)
def test_layers_that_cannot_verify_a_tree_are_known_before_weights_are_loaded(tmp_path, family):
    settings, reason = NO_TREES[family]
    AutoConfig.for_model(family, **{**SMALL, **settings}).save_pretrained(tmp_path)
    config = TargetConfig(model=str(tmp_path))
    assert load_config(config).vocab_size == SMALL["vocab_size"]  # a dump and a training read it
    assert re.search(reason, load_tree_obstacle(config))


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("gemma3_text", {"use_bidirectional_attention": True, "sliding_window": 8}, "bidirectional attention"),
        ("t5", {}, "an encoder"),
    ],
)
def test_what_is_no_causal_model_is_refused_before_weights_are_loaded(tmp_path, family, settings, reason):
    AutoConfig.for_model(family, **{**SMALL, **settings}).save_pretrained(tmp_path)
    with pytest.raises(
        PipelineError, match=f"target .* has {reason}, so it is no causal language model|knows no causal"
    ):
        load_config(TargetConfig(model=str(tmp_path)))


def test_what_is_no_language_model_is_refused(tmp_path):
    AutoConfig.for_model("siglip_text_model").save_pretrained(tmp_path)
    with pytest.raises(PipelineError, match="is a 'siglip_text_model', of which transformers knows no causal language"):
        load_config(TargetConfig(model=str(tmp_path)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", ["mask", "window", "positions"])
def test_a_target_whose_attention_ignores_the_tree_is_refused(families, monkeypatch, fault, dtype):
    """An unknown architecture is recognised on a few tokens, whatever its configuration says."""
    config = families["mistral, sliding"].config
    Target(config, dtype)
    masks, forward = attention.layer_masks, Target.forward

    def causal(kinds, visible_NC, *rest):
        return masks(kinds, torch.ones_like(visible_NC).tril(visible_NC.shape[1] - len(visible_NC)), *rest)

    def in_a_row(self, tokens_N, cache, positions_N=None, *rest):
        return forward(self, tokens_N, cache, torch.arange(len(tokens_N)) + cache.length, *rest)

    if fault == "mask":
        monkeypatch.setattr("pipeline.lm.verifier.layer_masks", causal)
    elif fault == "window":
        monkeypatch.setattr("pipeline.lm.verifier.attention_windows", lambda text: {"sliding_attention": 2})
    else:
        monkeypatch.setattr(Target, "forward", in_a_row)
    with pytest.raises(PipelineError, match="ignores the tree's mask or its positions"):
        Target(config, dtype)


def test_a_target_that_takes_no_mask_is_refused(families, monkeypatch):
    monkeypatch.setattr("pipeline.lm.verifier.layer_masks", lambda *_: {"other_attention": torch.zeros(1, 1, 4, 6)})
    with pytest.raises(
        PipelineError, match=r"takes no tree's mask \(\w+Error: .*needs support in pipeline/lm/attention.py"
    ):
        Target(families["llama-3.1"].config, "float32")


def test_pickled_weights_are_refused(tmp_path):
    config = save(tmp_path, "llama")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(PipelineError, match="has no safetensors weights"):
        fingerprint(config)


def test_a_tokenizer_without_a_template_is_refused_and_a_template_file_helps(tmp_path):
    config = save(tmp_path, "llama")
    tokenizer = byte_tokenizer()
    template, tokenizer.chat_template = tokenizer.chat_template, None
    for file in tmp_path.glob("chat_template*"):
        file.unlink()
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(PipelineError, match=r"has no chat template.*chat_template\.jinja"):
        Target(config, "float32")
    (tmp_path / "own.jinja").write_text(template)
    helped = TargetConfig(model=str(tmp_path), device="cpu", chat_template=str(tmp_path / "own.jinja"))
    assert Target(helped, "float32").tokenizer.chat_template == template.rstrip("\n")
