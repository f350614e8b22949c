"""Targets of other families, tiny and random: each is verified through its own forward, and nothing is lost."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.decoding.generate import Sampling, plain, speculative
from pipeline.drafts import build
from pipeline.drafts.layers import shapes_of
from pipeline.ends import Ends
from pipeline.errors import PipelineError
from pipeline.sections import JakiroConfig, TargetConfig, TreeConfig
from pipeline.target import Target, fingerprint, load_ends
from tests.kit import byte_tokenizer

SMALL = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": None,
}
FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "gemma": {"tie_word_embeddings": True},
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 3.0},
    "cohere": {"logit_scale": 0.25},
    "olmo2": {},
    "phi3": {},
}


def save(folder, family: str, **more):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SMALL, **FAMILIES.get(family, {}), **more})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return TargetConfig(model=str(folder), device="cpu")


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_greedy_answers_of_other_families_are_plain_decodings(tmp_path, family):
    config = save(tmp_path, family)
    target = Target(config, "float32")
    settings = JakiroConfig(kind="jakiro", tree=TreeConfig(depth=3, top_k=3, nodes=8, parallel=2))
    draft = build(settings, shapes_of(target.config))
    draft.initialise(0)
    draft.eval().requires_grad_(False)
    draft.bind(Ends(target.embedding_VD, target.head, fingerprint(config)))
    for seed in range(3):
        prompt = torch.randint(0, 256, (9,), generator=torch.Generator().manual_seed(seed)).tolist()
        sampling = Sampling(24, frozenset(target.stop_ids()))
        assert speculative(target, draft, prompt, sampling).tokens == plain(target, prompt, sampling).tokens


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_ends_read_from_the_files_are_the_models(tmp_path, family):
    config = save(tmp_path, family)
    target, ends = Target(config, "float32"), load_ends(config)
    hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(ends.embedding_VD, target.embedding_VD)
    assert torch.equal(ends.head(hidden), target.head(hidden))


def test_a_sliding_window_is_refused(tmp_path):
    with pytest.raises(PipelineError, match="only full attention is supported"):
        Target(save(tmp_path, "mistral", sliding_window=16), "float32")


def test_pickled_weights_are_refused(tmp_path):
    config = save(tmp_path, "llama")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(PipelineError, match="has no safetensors weights"):
        fingerprint(config)


def test_a_target_that_does_not_exist_is_one_clear_error(tmp_path):
    with pytest.raises(PipelineError, match="cannot be loaded"):
        Target(TargetConfig(model=str(tmp_path / "nowhere")), "float32")


def test_a_tokenizer_without_a_template_is_refused_and_a_template_file_helps(tmp_path):
    config = save(tmp_path, "llama")
    tokenizer = byte_tokenizer()
    template, tokenizer.chat_template = tokenizer.chat_template, None
    for file in tmp_path.glob("chat_template*"):
        file.unlink()
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(PipelineError, match="has no chat template"):
        Target(config, "float32")
    (tmp_path / "own.jinja").write_text(template)
    helped = TargetConfig(model=str(tmp_path), device="cpu", chat_template=str(tmp_path / "own.jinja"))
    assert Target(helped, "float32").tokenizer.chat_template == template.rstrip("\n")


def test_moving_the_ends_leaves_the_target_as_it_was(loaded_target):
    ends = Ends(loaded_target.embedding_VD, loaded_target.head, "mark")
    moved = ends.to(torch.device("cpu"), torch.bfloat16)
    assert moved.head.linear.weight.dtype == moved.embedding_VD.dtype == torch.bfloat16
    assert loaded_target.head.linear.weight.dtype == ends.embedding_VD.dtype == torch.float32
