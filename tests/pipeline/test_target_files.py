"""Weights as the Hub has them: older names, a text model inside a larger one, quantised experts."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3Config

from pipeline.basics.errors import PipelineError
from pipeline.lm.config import TargetConfig
from pipeline.lm.model import Target, count_parameters, fingerprint, load_config, load_embed_head, load_reader
from tests.kit import byte_tokenizer
from tests.pipeline.families import FAMILIES, SMALL, save

CPU, FLOAT = torch.device("cpu"), torch.float32
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])  # by its four bits
SCALE = 124  # of the exponent's 8 bits: 2 to the power of -3


def require_embed_head(config: TargetConfig) -> Target:
    target, embed_head = Target(config, "float32"), load_embed_head(config)
    hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(embed_head.embedding_VD.float(), target.embedding_VD)
    assert torch.equal(embed_head.to(torch.device("cpu"), torch.float32).head(hidden), target.head(hidden))
    return target


def save_with_images(folder: Path) -> TargetConfig:
    text = AutoConfig.for_model("gemma3_text", **{**SMALL, **FAMILIES["gemma-3"][1]})
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=text.to_dict(),
        vision_config={**vision, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=259,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return TargetConfig(model=str(folder), device="cpu")


def test_the_text_part_of_a_model_that_sees_images_is_a_target(tmp_path):
    """Gemma 3 from 4B on. Its files name tensors otherwise than the model does."""
    config = save_with_images(tmp_path)
    assert "language_model.model.embed_tokens.weight" in load_file(tmp_path / "model.safetensors")
    target = require_embed_head(config)
    tokens = torch.arange(9)[None]
    states_BTSD = target.capture_all(tokens, [1, 6])
    assert states_BTSD.shape == (1, 9, 3, 32)
    assert torch.equal(target.head(states_BTSD[:, :, 0]), target.model(input_ids=tokens).logits)


def test_a_head_that_the_files_name_otherwise_is_found(tmp_path):
    require_embed_head(save(tmp_path, "gpt_neox", tie_word_embeddings=False))
    assert "embed_out.weight" in load_file(tmp_path / "model.safetensors")


def set_head(folder: Path, head: Callable[[torch.Tensor], torch.Tensor] | None, **config: bool) -> None:
    """Give the files this head, made of the embedding, or none, and the configuration these settings."""
    weights = load_file(folder / "model.safetensors")
    place = next(name for name in weights if name.endswith("embed_tokens.weight"))
    name = "language_model.lm_head.weight" if place.startswith("language_model.") else "lm_head.weight"
    weights.pop(name, None)
    if head is not None:
        weights[name] = head(weights[place])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    for level in filter(None, (raw, raw.get("text_config"))):
        level |= config
    (folder / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize("family", ["llama-3.1", "gemma", "gemma-3 with images"])
@pytest.mark.parametrize("tied", [True, False], ids=["says tied", "says untied"])
@pytest.mark.parametrize("separate_head", [True, False], ids=["another head", "the embedding as head"])
def test_the_head_of_the_files_is_the_head_whatever_the_configuration_says(tmp_path, family, tied, separate_head):
    config = save_with_images(tmp_path) if "images" in family else save(tmp_path, family)
    set_head(
        tmp_path, lambda embedding: embedding.flip(0) if separate_head else embedding.clone(), tie_word_embeddings=tied
    )
    target = require_embed_head(config)
    assert torch.equal(target.head.linear.weight, target.embedding_VD.flip(0) if separate_head else target.embedding_VD)


@pytest.mark.parametrize("family", ["llama-3.1", "gemma"])
def test_a_head_that_is_in_no_file_is_never_a_random_one(tmp_path, family):
    config = save(tmp_path, family)
    set_head(tmp_path, None, tie_word_embeddings=True)
    target = require_embed_head(config)
    assert torch.equal(target.head.linear.weight, target.embedding_VD)
    set_head(tmp_path, None, tie_word_embeddings=False)
    for load in (
        load_embed_head,
        lambda config: Target(config, "float32"),
        lambda config: load_reader(config, CPU, FLOAT),
    ):
        with pytest.raises(PipelineError, match=r"hold no lm_head\.weight.*tie_word_embeddings tells"):
            load(config)


@pytest.fixture
def quantised(tmp_path):
    """gpt-oss as on the Hub: experts in MXFP4, all else in bfloat16. With what the experts' matrices stand for."""
    config = save(tmp_path, "gpt-oss", intermediate_size=32)
    weights, meant = load_file(tmp_path / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in weights if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, wide, out = weights.pop(name).shape
        blocks = torch.randint(0, 256, (count, out, wide // 32, 16), dtype=torch.uint8, generator=generator)
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": torch.full(blocks.shape[:-1], SCALE).to(torch.uint8)}
        pairs = torch.stack([FP4[(blocks & 15).long()], FP4[(blocks >> 4).long()]], dim=-1)
        meant[name] = (pairs * 2.0 ** (SCALE - 127)).reshape(count, out, wide).transpose(1, 2)
    stored = {name: value.bfloat16() if value.is_floating_point() else value for name, value in weights.items()}
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    unquantised = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": unquantised}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return config, meant


def test_quantised_experts_are_read_as_what_they_stand_for(quantised):
    config, meant = quantised
    target = require_embed_head(config)
    assert len(meant) == 4 and load_embed_head(config).embedding_VD.dtype == torch.bfloat16
    for name, value in meant.items():
        assert torch.equal(target.model.get_parameter(name), value)
    assert Target(config, "bfloat16").capture(torch.arange(5)[None]).dtype == torch.bfloat16
    assert count_parameters(config) == sum(p.numel() for p in target.model.parameters())
    assert load_config(config).quantization_config["quant_method"] == "mxfp4" and fingerprint(config)
