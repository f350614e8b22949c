"""The shipped recipes: they load, and their drafts have the pinned number of parameters on the meta device."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from pipeline.drafts import build, parameter_count
from pipeline.drafts.parts.layers import shapes_of
from pipeline.lm.chat import encode
from pipeline.recipe.load import load_recipe
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
        "target_layers": 32,
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
LLAMA_3 = {
    "model_type": "llama",
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
}
QWEN_3 = {"num_attention_heads": 32, "head_dim": 128, "rms_norm_eps": 1e-6, "vocab_size": 151936}
# What drafts' sizes and RoPE follow from in the config.json of meta-llama/Llama-3.1-8B-Instruct,
# meta-llama/Llama-3.3-70B-Instruct, Qwen/Qwen3-8B, Qwen/Qwen3-30B-A3B-Instruct-2507 and openai/gpt-oss-20b on the Hub,
# in its own words.
TODAY = {  # recipe: (its target's configuration, base and kind of the drafts' RoPE, parameters of jakiro, of eagle)
    "llama3.1-instruct-8b": (
        {**LLAMA_3, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32},
        (500000.0, "llama3"),
        176_181_248,
        251_662_336,
    ),
    "llama3.3-instruct-70b": (
        {**LLAMA_3, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64},
        (500000.0, "llama3"),
        687_906_816,
        989_863_936,
    ),
    "qwen3-8b": (
        {
            **QWEN_3,
            "model_type": "qwen3",
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_key_value_heads": 8,
            "max_position_embeddings": 40960,
            "rope_theta": 1000000,
        },
        (1e6, "default"),
        176_181_248,
        226_496_512,
    ),
    "qwen3-30b-a3b": (
        {
            **QWEN_3,
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_key_value_heads": 4,
            "max_position_embeddings": 262144,
            "rope_theta": 10000000,
        },
        (1e7, "default"),
        52_439_040,
        65_013_760,
    ),
    "gpt-oss-20b": (
        {
            "model_type": "gpt_oss",
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 24,
            "num_local_experts": 32,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "sliding_window": 128,
            "rope_theta": 150000,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "max_position_embeddings": 131072,
            "vocab_size": 201088,
        },
        (150000.0, "yarn"),
        92_911_680,
        117_783_360,
    ),
}


def by_hand(config: dict, jakiro: int, eagle: int) -> list[int]:
    """fc, attention, one norm, and what follows it: two experts and four rows of the gate, or one MLP."""
    width, heads = config["hidden_size"], config["num_attention_heads"]
    size = config.get("head_dim", width // heads)
    shared = 2 * width**2 + 2 * width * size * (heads + config["num_key_value_heads"]) + width
    return [shared + 4 * width + 2 * 3 * width * jakiro, shared + 3 * width * eagle]


@pytest.mark.parametrize("name", sorted(TODAY))
def test_drafts_of_the_targets_that_are_served_today(name):
    config, rope, *pinned = TODAY[name]
    recipe, target = load_recipe(RECIPES / f"{name}.toml"), shapes_of(AutoConfig.for_model(**config))
    assert (target["rope_parameters"]["rope_theta"], target["rope_parameters"]["rope_type"]) == rope
    with torch.device("meta"):
        counts = [parameter_count(build(recipe.draft[draft], target)) for draft in ("jakiro", "eagle")]
    print(f"{name}: jakiro {counts[0] / 1e6:.1f}M, eagle {counts[1] / 1e6:.1f}M parameters")
    eagle = recipe.draft["eagle"].mlp_width or config["intermediate_size"]
    assert counts == pinned == by_hand(config, config["hidden_size"], eagle)
    assert eagle >= 3 * config["hidden_size"]  # a dense MLP, not one expert of a mixture
    assert recipe.draft["jakiro"].vocabulary is recipe.draft["eagle"].vocabulary is None


@pytest.mark.parametrize("name", sorted(PAPER))
def test_drafts_of_the_papers_targets(name):
    target, *pinned = PAPER[name]
    recipe = load_recipe(RECIPES / f"{name}.toml")
    with torch.device("meta"):
        counts = [parameter_count(build(recipe.draft[draft], target)) for draft in ("jakiro", "eagle")]
    print(f"{name}: jakiro {counts[0] / 1e6:.1f}M, eagle {counts[1] / 1e6:.1f}M parameters")
    assert counts == pinned


ON_EAGLE_3 = {  # recipe: parameters of jakiro on EAGLE-3's frame, of eagle3
    "gpt-oss-20b": [208_120_320, 232_992_000],
    "llama2-chat-13b": [583_311_360, 638_341_120],
    "llama2-chat-70b": [1_101_070_336, 1_403_027_456],
    "llama2-chat-7b": [399_540_224, 434_126_848],
    "llama3-instruct-70b": [1_101_070_336, 1_403_027_456],
    "llama3-instruct-8b": [349_208_576, 424_689_664],
    "llama3.1-instruct-8b": [349_208_576, 424_689_664],
    "llama3.3-instruct-70b": [1_101_070_336, 1_403_027_456],
    "qwen3-30b-a3b": [132_661_248, 145_235_968],
    "qwen3-8b": [349_208_576, 399_523_840],
    "vicuna-13b": [583_311_360, 638_341_120],
    "vicuna-33b": [921_882_624, 1_013_868_544],
    "vicuna-7b": [399_540_224, 434_126_848],
}


def on_eagle_3_by_hand(target: dict, vocabulary: int, mlp: int) -> list[int]:
    """fc of three states, attention over [embedding; feature], four norms, an own head, and what follows: two experts
    of the hidden size and four rows of the gate, or one MLP.
    """
    width, size = target["hidden_size"], target["head_dim"]
    heads, groups = target["num_attention_heads"], target["num_key_value_heads"]
    attention = 2 * width * size * (heads + 2 * groups) + size * heads * width
    shared = 3 * width**2 + attention + 4 * width + width * vocabulary
    return [shared + 4 * width + 2 * 3 * width**2, shared + 3 * width * mlp]


@pytest.mark.parametrize("name", sorted({*PAPER, *TODAY}))
def test_drafts_on_eagle_3s_frame(name):
    shapes_here = PAPER[name][0] if name in PAPER else shapes_of(AutoConfig.for_model(**TODAY[name][0]))
    recipe = load_recipe(RECIPES / "eagle-3" / f"{name}.toml")
    with torch.device("meta"):
        counts = [parameter_count(build(recipe.draft[draft], shapes_here)) for draft in ("jakiro", "eagle3")]
    print(f"{name}: jakiro on eagle-3 {counts[0] / 1e6:.1f}M, eagle3 {counts[1] / 1e6:.1f}M parameters")
    vocabulary = recipe.draft["eagle3"].vocabulary or shapes_here["vocab_size"]
    mlp = recipe.draft["eagle3"].mlp_width or shapes_here["intermediate_size"]
    assert counts == ON_EAGLE_3[name] == on_eagle_3_by_hand(shapes_here, vocabulary, mlp)
    assert vocabulary == 32_000 and recipe.stored_dtype == "float8_e4m3fn"
    assert recipe.draft["eagle3"].ttt_steps == recipe.draft["jakiro"].ttt_steps == 7


def others_by_hand(target: dict) -> dict[str, int]:
    """Gumiho: EAGLE with a second layer, and five MLPs that take two steps of it. Medusa: four maps with LM heads.
    Hydra++: a layer with three norms, and four heads on it and 1 to 4 tokens, with LM heads; plain: the heads' first
    blocks alone, with LM heads. EAGLE-1: two halves to one, with a bias, and a layer. FTP: a router of four
    numbers at each block between the first and the last. A Llama of 1024: an embedding of all tokens, four layers, a
    head of 32,000.
    """
    d, size = target["hidden_size"], target["head_dim"]
    attention = 2 * d * size * (target["num_attention_heads"] + target["num_key_value_heads"])
    layer, heads = attention + 3 * d * target["intermediate_size"] + d, 4 * target["vocab_size"] * d
    block = d * d + d
    return {
        "gumiho": 2 * d * d + 2 * layer + d + 5 * (2 * d * d + d + 5 * block),
        "medusa": 4 * block + heads,
        "skipper": (target["target_layers"] - 2) * (4 * 8 + 8 + 8 + 1),
        "small-llama": 1024 * (target["vocab_size"] + 4 * (4 * 1024 + 3 * 2816 + 2) + 1 + 32_000),
        "eagle-1": 2 * d * d + d + layer,
        "hydra-plain": sum(2 * ((k + 1) * d * d + d) for k in (1, 2, 3, 4)) + heads,
        "hydra": layer + 2 * d + sum(2 * ((k + 1) * d * d + d) + 3 * block for k in (1, 2, 3, 4)) + heads,
    }


OTHERS = {
    "eagle-1": 251_666_432,
    "hydra-plain": 2_571_141_120,
    "gumiho": 1_057_099_776,
    "medusa": 2_168_471_552,
    "hydra": 2_990_632_960,
    "skipper": 1470,
    "small-llama": 215_491_584,
}


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_drafts_of_other_papers(name):
    recipe, target = load_recipe(RECIPES / "papers" / f"{name}.toml"), PAPER["llama3-instruct-8b"][0]
    with torch.device("meta"):
        count = parameter_count(build(recipe.draft[name], target))
    assert count == OTHERS[name] == others_by_hand(target)[name]
    assert recipe.name == f"{name}-llama3{'.1' if name == 'small-llama' else ''}-instruct-8b"


def test_plain_hydra_trains_as_medusa_does():
    hydra, medusa = (load_recipe(RECIPES / "papers" / f"{name}.toml") for name in ("hydra-plain", "medusa"))
    assert hydra.train == medusa.train
    one, other = hydra.draft["hydra-plain"], medusa.draft["medusa"]
    assert (one.objective, one.decay, one.heads) == (other.objective, other.decay, other.heads) == ("hard-ce", 0.8, 4)


METHODS = {  # docs/results/comparison.md has them
    "eagle": 4_203_072,
    "jakiro": 4_205_376,
    "eagle3": 9_808_128,
    "gumiho": 19_372_608,
    "medusa": 1_329_408,
    "hydra": 16_823_232,
    "small-llama": 16_385_280,
}


def test_drafts_side_by_side_for_the_embedded_target():
    recipe, target = load_recipe(RECIPES / "methods.toml"), shapes(576, 1536, 9, 3, 49152)
    with torch.device("meta"):
        assert {name: parameter_count(build(recipe.draft[name], target)) for name in recipe.trained} == METHODS


def test_every_recipe_is_covered_and_loads():
    assert {path.stem for path in RECIPES.glob("papers/*.toml")} == set(OTHERS)
    on_eagle_3 = {path.stem for path in RECIPES.glob("eagle-3/*.toml")}
    assert on_eagle_3 == set(PAPER) | set(TODAY)
    for path in RECIPES.glob("eagle-3/*.toml"):
        assert load_recipe(path).name == f"{path.stem}-eagle-3"
    found = {path.stem for path in RECIPES.glob("*.toml")}
    assert found == set(PAPER) | set(TODAY) | {
        "demo",
        "smoke",
        "serve",
        "ablations",
        "frames",
        "losses",
        "methods",
        "experts",
        "experts-3",
        "pruned",
    }
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


def test_pairs_of_the_experts_question_read_as_many_weights():
    """A token's own: the gate apart, which is 9 * d at most."""
    target = shapes(576, 1536, 9, 3, 49152)
    counts = {}
    for recipe in (load_recipe(RECIPES / "experts.toml"), load_recipe(RECIPES / "experts-3.toml")):
        with torch.device("meta"):
            counts |= {name: parameter_count(build(recipe.draft[name], target)) for name in recipe.trained}
    passed_over = {"sparse": 6 * 3 * 576 * 768, "two": 0}
    for one, unread in passed_over.items():
        for frame in ("", "3"):
            assert 0 <= counts[one + frame] - unread - counts["dense" + frame] <= 9 * 576, one + frame


def test_the_experts_recipes_differ_in_drafts_and_rates_alone():
    one, other = (load_recipe(RECIPES / f"{name}.toml").model_dump() for name in ("experts", "experts-3"))
    differ = {key for key in one if one[key] != other[key]}
    assert differ == {"name", "output", "draft", "train", "publish"}
    assert {key for key in one["train"] if one["train"][key] != other["train"][key]} == {"learning_rate"}
