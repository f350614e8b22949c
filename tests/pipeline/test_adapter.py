"""Targets with an adapter: a LoRA of peft is in the states, the head, the answers and the fingerprint."""

import json
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from pipeline.basics.errors import PipelineError
from pipeline.lm.config import TargetConfig
from pipeline.lm.model import Target, fingerprint, identify, load_embed_head
from preprocess.merge import merge_target
from tests.pipeline.families import save

TEXT = torch.arange(3, 20)[None]


def save_adapter(target, folder, config=None):
    """Save an adapter whose B is random: peft's own is zero. Return the logits that peft computes with it."""
    torch.manual_seed(1)
    default = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], use_rslora=True)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(target), config or default)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "lora_embedding_B" in name or "ia3" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return model.eval()(TEXT).logits.detach()


@pytest.fixture(scope="module")
def adapted(tiny_target, tmp_path_factory):
    """(target's configuration, logits that peft computes)."""
    folder = tmp_path_factory.mktemp("adapter")
    logits = save_adapter(tiny_target, folder)
    return TargetConfig(model=str(tiny_target), device="cpu", adapter=str(folder)), logits


def test_a_merged_target_computes_what_peft_does(adapted, tiny_target):
    config, logits = adapted
    target = Target(config, "float32")
    assert torch.allclose(target.model(TEXT).logits, logits, atol=1e-4)
    plain = config.model_copy(update={"adapter": None})
    assert not torch.allclose(Target(plain, "float32").model(TEXT).logits, logits, atol=1e-1)
    assert len({fingerprint(config), fingerprint(plain), identify(config).fingerprint}) == 2
    assert "adapter" not in plain.identity() and config.identity()["adapter"] == config.adapter


def test_training_gets_the_embedding_and_the_head_of_the_merged_target(tiny_target, tmp_path):
    for name, modules in (("layers", ["q_proj"]), ("head", ["lm_head", "embed_tokens"])):
        save_adapter(tiny_target, tmp_path / name, LoraConfig(r=4, target_modules=modules))
        config = TargetConfig(model=str(tiny_target), device="cpu", adapter=str(tmp_path / name))
        target, embed_head = Target(config, "float32"), load_embed_head(config)
        assert torch.equal(embed_head.embedding_VD, target.embedding_VD)
        assert torch.equal(embed_head.head.linear.weight, target.head.linear.weight)
        assert embed_head.fingerprint == fingerprint(config)


def test_merge_writes_a_target_that_computes_the_same(adapted, tmp_path):
    config, _ = adapted
    merge_target(config, tmp_path / "merged", "float32")
    merged = TargetConfig(model=str(tmp_path / "merged"), device="cpu")
    assert torch.equal(Target(merged, "float32").model(TEXT).logits, Target(config, "float32").model(TEXT).logits)
    assert identify(merged).template == identify(config).template
    assert {path.name for path in tmp_path.iterdir()} == {"merged"}
    with pytest.raises(PipelineError, match="merged exists already: remove it"):
        merge_target(config, tmp_path / "merged", "float32")
    with pytest.raises(PipelineError, match="there is nothing to merge"):
        merge_target(merged, tmp_path / "other", "float32")


def change_settings(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "holds no adapter_model.safetensors"),
        (lambda folder: (folder / "adapter_config.json").unlink(), "holds no adapter_config.json"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x" * 99), "is damaged: .*Fetch it again"),
        (lambda folder: shutil.rmtree(folder), "is no folder: expected one with adapter_config.json"),
        (lambda folder: change_settings(folder, r=8), "does not fit target .*size mismatch"),
        (lambda folder: change_settings(folder, target_modules=["other"]), "does not fit target .*other"),
        (lambda folder: change_settings(folder, target_modules=["q_proj"]), "does not fit .*is in only one of the two"),
        (lambda folder: change_settings(folder, megatron_config={"a": 1}), "megatron_config={'a': 1} is not supported"),
        (lambda folder: change_settings(folder, peft_type="IA3"), "peft_type='IA3', expected 'LORA'"),
    ],
)
def test_what_cannot_be_merged_is_refused(adapted, tmp_path, damage, message):
    shutil.copytree(adapted[0].adapter, tmp_path / "adapter")
    damage(tmp_path / "adapter")
    config = adapted[0].model_copy(update={"adapter": str(tmp_path / "adapter")})
    with pytest.raises(PipelineError, match=message):
        Target(config, "float32")


def test_an_adapter_of_another_base_is_refused(adapted, tmp_path):
    config = adapted[0].model_copy(update={"model": save(tmp_path, "llama", hidden_size=64).model})
    with pytest.raises(PipelineError, match=r"does not fit target .*Name the base model that it was trained on"):
        Target(config, "float32")


def test_an_engine_takes_no_adapter():
    with pytest.raises(ValueError, match="engine='vllm' takes no adapter: run jakiro merge"):
        TargetConfig(model="a/b", adapter="a/c@" + "0" * 40, engine="vllm", engine_python="python")


def test_an_adapter_that_changes_its_base_is_refused(adapted, tmp_path):
    shutil.copytree(adapted[0].adapter, tmp_path / "adapter")
    for changes, message in (
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' changes the base model's weights"),
        ({"r": 10**9}, "r=1000000000, expected a rank of 1 to 4096"),
        ({"target_modules": "*["}, "does not fit target"),
    ):
        shutil.copy(f"{adapted[0].adapter}/adapter_config.json", tmp_path / "adapter")
        change_settings(tmp_path / "adapter", **changes)
        with pytest.raises(PipelineError, match=message):
            Target(adapted[0].model_copy(update={"adapter": str(tmp_path / "adapter")}), "float32")
