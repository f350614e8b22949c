"""The shipped recipes: they load, and their drafts have the pinned number of parameters on the meta device."""

from pathlib import Path

import pytest
import torch

from pipeline.chat import encode
from pipeline.drafts import build, parameter_count
from pipeline.recipe import load_recipe
from tests.kit import ROOT, byte_tokenizer

RECIPES = ROOT / "infra/recipes"


def shapes(hidden: int, mlp: int, heads: int, kv_heads: int, vocabulary: int) -> dict:
    return {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 4096,
        "vocab_size": vocabulary,
    }


SEVEN, THIRTEEN = shapes(4096, 11008, 32, 32, 32000), shapes(5120, 13824, 40, 40, 32000)
PAPER = {  # recipe: (shapes of its target, parameters of jakiro, of eagle)
    "vicuna-7b": (SEVEN, 201_351_168, 235_933_696),
    "vicuna-13b": (THIRTEEN, 314_603_520, 369_628_160),
    "vicuna-33b": (shapes(6656, 17920, 52, 52, 32000), 531_667_968, 623_647_232),
    "llama2-chat-7b": (SEVEN, 201_351_168, 235_933_696),
    "llama2-chat-13b": (THIRTEEN, 314_603_520, 369_628_160),
    "llama2-chat-70b": (shapes(8192, 28672, 64, 8, 32000), 687_915_008, 989_863_936),
    "llama3-instruct-8b": (shapes(4096, 14336, 32, 8, 128256), 176_181_248, 251_662_336),
    "llama3-instruct-70b": (shapes(8192, 28672, 64, 8, 128256), 687_906_816, 989_863_936),
}


@pytest.mark.parametrize("name", sorted(PAPER))
def test_drafts_of_the_papers_targets(name):
    target, *pinned = PAPER[name]
    recipe = load_recipe(RECIPES / f"{name}.toml")
    with torch.device("meta"):
        counts = [parameter_count(build(recipe.draft[draft], target)) for draft in ("jakiro", "eagle")]
    print(f"{name}: jakiro {counts[0] / 1e6:.1f}M, eagle {counts[1] / 1e6:.1f}M parameters")
    assert counts == pinned


def test_every_recipe_is_covered_and_loads():
    found = {path.stem for path in RECIPES.glob("*.toml")}
    assert found == set(PAPER) | {"demo", "smoke", "ablations"}
    for path in RECIPES.glob("*.toml"):
        assert load_recipe(path).name == path.stem


def test_the_vicuna_template_masks_the_answers():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = Path(ROOT / "infra/templates/vicuna.jinja").read_text()
    tokenizer.bos_token = "<|system|>"
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Bye"},
        {"role": "assistant", "content": "See you."},
    ]
    (encoded,) = encode(tokenizer, messages, 1000)
    assert tokenizer.decode(encoded.input_ids).endswith(
        "to the user's questions. USER: Hi ASSISTANT: Hello.</s> USER: Bye ASSISTANT: See you.</s>"
    )
    assert encoded.input_ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(encoded.input_ids[encoded.loss_mask.astype(bool)]) == " Hello.</s> See you.</s>"
