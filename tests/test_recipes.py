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
PAPER = {
    "vicuna-7b": SEVEN,
    "vicuna-13b": THIRTEEN,
    "vicuna-33b": shapes(6656, 17920, 52, 52, 32000),
    "llama2-chat-7b": SEVEN,
    "llama2-chat-13b": THIRTEEN,
    "llama2-chat-70b": shapes(8192, 28672, 64, 8, 32000),
    "llama3-instruct-8b": shapes(4096, 14336, 32, 8, 128256),
    "llama3-instruct-70b": shapes(8192, 28672, 64, 8, 128256),
}


def config_of(kind: str, hidden: int, mlp: int, heads: int, kv_heads: int, vocabulary: int, **more) -> dict:
    sizes = {"hidden_size": hidden, "intermediate_size": mlp, "vocab_size": vocabulary}
    return {"model_type": kind, **sizes, "num_attention_heads": heads, "num_key_value_heads": kv_heads, **more}


LLAMA_3 = {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}}
LLAMA_3["rope_scaling"] |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
# What drafts' sizes and RoPE follow from in the config.json of meta-llama/Llama-3.1-8B-Instruct,
# meta-llama/Llama-3.3-70B-Instruct, Qwen/Qwen3-8B, Qwen/Qwen3-30B-A3B-Instruct-2507 and openai/gpt-oss-20b on the Hub,
# in its own words.
TODAY = {  # recipe: (its target's configuration, base and kind of the drafts' RoPE)
    "llama3.1-instruct-8b": (config_of("llama", 4096, 14336, 32, 8, 128256, **LLAMA_3), (500000.0, "llama3")),
    "llama3.3-instruct-70b": (config_of("llama", 8192, 28672, 64, 8, 128256, **LLAMA_3), (500000.0, "llama3")),
    "qwen3-8b": (
        config_of("qwen3", 4096, 12288, 32, 8, 151936, head_dim=128, rope_theta=1000000),
        (1e6, "default"),
    ),
    "qwen3-30b-a3b": (
        config_of("qwen3_moe", 2048, 6144, 32, 4, 151936, head_dim=128, rope_theta=10000000),
        (1e7, "default"),
    ),
    "gpt-oss-20b": (
        config_of("gpt_oss", 2880, 2880, 64, 8, 201088, head_dim=64, rope_theta=150000, rope_scaling=YARN),
        (150000.0, "yarn"),
    ),
}
PINNED = {  # parameters of jakiro and eagle; on EAGLE-3's frame of jakiro and eagle3
    "vicuna-7b": [201_351_168, 235_933_696, 399_540_224, 434_126_848],
    "llama3-instruct-8b": [176_181_248, 251_662_336, 349_208_576, 424_689_664],
    "qwen3-30b-a3b": [52_439_040, 65_013_760, 132_661_248, 145_235_968],
    "gpt-oss-20b": [92_911_680, 117_783_360, 208_120_320, 232_992_000],
}


def counted(recipe, names: tuple[str, ...], target: dict) -> list[int]:
    with torch.device("meta"):
        return [parameter_count(build(recipe.draft[name], target)) for name in names]


def by_hand(target: dict, eagle: int, on_eagle_3: int, vocabulary: int, bias: bool) -> list[int]:
    """fc (of jakiro with a bias in the papers' recipes), attention, one norm, and what follows it: two experts of the
    hidden size and four rows of the gate, or one MLP. On EAGLE-3's frame: fc of three states, attention over
    [embedding; feature], four norms, an own head, and the same.
    """
    width, size = target["hidden_size"], target["head_dim"]
    heads, groups = target["num_attention_heads"], target["num_key_value_heads"]
    shared = 2 * width**2 + 2 * width * size * (heads + groups) + width
    attention = 2 * width * size * (heads + 2 * groups) + size * heads * width
    third = 3 * width**2 + attention + 4 * width + width * vocabulary
    experts = 4 * width + 2 * 3 * width**2
    return [
        shared + bias * width + experts,
        shared + 3 * width * eagle,
        third + experts,
        third + 3 * width * on_eagle_3,
    ]


@pytest.mark.parametrize("name", sorted({*PAPER, *TODAY}))
def test_drafts_of_the_papers_targets_and_of_those_that_are_served_today(name):
    if name in TODAY:
        config, rope = TODAY[name]
        target = shapes_of(AutoConfig.for_model(**config))
        assert (target["rope_parameters"]["rope_theta"], target["rope_parameters"]["rope_type"]) == rope
    else:
        target = PAPER[name]
    recipe, other = load_recipe(RECIPES / f"{name}.toml"), load_recipe(RECIPES / "eagle-3" / f"{name}.toml")
    counts = counted(recipe, ("jakiro", "eagle"), target) + counted(other, ("jakiro", "eagle3"), target)
    print(f"{name}: jakiro, eagle; jakiro on eagle-3, eagle3: {counts} parameters")
    mlp, mlp_3 = (
        one.mlp_width or target["intermediate_size"] for one in (recipe.draft["eagle"], other.draft["eagle3"])
    )
    vocabulary = other.draft["eagle3"].vocabulary or target["vocab_size"]
    assert counts == by_hand(target, mlp, mlp_3, vocabulary, recipe.draft["jakiro"].fc_bias)
    assert counts == PINNED.get(name, counts)
    assert vocabulary == 32_000 and other.stored_dtype == "float8_e4m3fn"
    assert other.draft["eagle3"].ttt_steps == other.draft["jakiro"].ttt_steps == 7
    if name in TODAY:
        assert mlp >= 3 * target["hidden_size"]  # a dense MLP, not one expert of a mixture
        assert recipe.draft["jakiro"].vocabulary is recipe.draft["eagle"].vocabulary is None


def dflash_by_hand(target: dict, mlp: int) -> int:
    """Five states to one, two norms, five layers of two norms and one for each head's queries and keys."""
    d, size = target["hidden_size"], target["head_dim"]
    attention = 2 * d * size * (target["num_attention_heads"] + target["num_key_value_heads"])
    return 5 * d * d + 2 * d + 5 * (attention + 3 * d * mlp + 2 * d + 2 * size)


IN_PARALLEL = {  # layers of the target; those that dflash and p-eagle read; their parameters
    "llama3.1-instruct-8b": (32, [2, 9, 16, 23, 30], [2, 16, 29], [1_174_455_552, 1_079_037_952]),
    "qwen3-8b": (36, [2, 10, 18, 26, 34], [2, 18, 33], [1_048_626_432, 978_374_656]),
    "qwen3-30b-a3b": (48, [2, 13, 24, 35, 46], [2, 24, 45], [304_112_896, 315_123_712]),
    "gpt-oss-20b": (24, [2, 7, 12, 17, 22], [2, 12, 21], [547_465_600, 536_592_960]),
}


@pytest.mark.parametrize("name", IN_PARALLEL)
def test_drafts_of_one_forward_for_targets_that_are_served_today(name):
    """P-EAGLE: EAGLE-3's fc, layer on twice the size, four norms, head; what stands for unknown states; three layers
    of two norms.
    """
    layers, *read, pinned = IN_PARALLEL[name]
    recipe = load_recipe(RECIPES / "parallel" / f"{name}.toml")
    target = shapes_of(AutoConfig.for_model(**TODAY[name][0])) | {"target_layers": layers}
    d, size, mlp_width = target["hidden_size"], target["head_dim"], recipe.draft["dflash"].mlp_width
    mlp = mlp_width or target["intermediate_size"]
    heads, groups = target["num_attention_heads"], target["num_key_value_heads"]
    first = 2 * d * size * (heads + 2 * groups) + size * heads * d + 3 * d * mlp + 3 * d * d + 4 * d + 32_000 * d
    others = 3 * (2 * d * size * (heads + groups) + 3 * d * mlp + 2 * d)
    counts = counted(recipe, ("dflash", "p-eagle"), target)
    assert counts == [dflash_by_hand(target, mlp), first + 3 * d + others] == pinned
    assert [list(recipe.draft[one].needs(layers).auxiliary) for one in ("dflash", "p-eagle")] == read
    assert recipe.auxiliary_layers(layers) == sorted({*read[0], *read[1]}) and mlp >= 3 * d
    assert recipe.name == f"{name}-parallel" and recipe.stored_dtype == "float8_e4m3fn"
    assert recipe.target == load_recipe(RECIPES / f"{name}.toml").target


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
        "dflash": dflash_by_hand(target, target["intermediate_size"]),
        "skipper": (target["target_layers"] - 2) * (4 * 8 + 8 + 8 + 1),
        "small-llama": 1024 * (target["vocab_size"] + 4 * (4 * 1024 + 3 * 2816 + 2) + 1 + 32_000),
        "eagle-1": 2 * d * d + d + layer,
        "hydra-plain": sum(2 * ((k + 1) * d * d + d) for k in (1, 2, 3, 4)) + heads,
        "hydra": layer + 2 * d + sum(2 * ((k + 1) * d * d + d) + 3 * block for k in (1, 2, 3, 4)) + heads,
    }


OTHERS = ("dflash", "eagle-1", "gumiho", "hydra", "hydra-plain", "medusa", "skipper", "small-llama")


@pytest.mark.parametrize("name", OTHERS)
def test_drafts_of_other_papers(name):
    recipe, target = load_recipe(RECIPES / "papers" / f"{name}.toml"), PAPER["llama3-instruct-8b"]
    assert counted(recipe, (name,), target) == [others_by_hand(target)[name]]
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
    "dflash": 8_076_928,
    "dspark": 11_746_944,
    "p-eagle": 13_349_952,
}


def test_drafts_side_by_side_for_the_embedded_target():
    recipe = load_recipe(RECIPES / "methods.toml")
    assert counted(recipe, tuple(METHODS), shapes(576, 1536, 9, 3, 49152)) == list(METHODS.values())
    assert set(METHODS) == set(recipe.trained)


def test_every_recipe_is_covered_and_loads():
    assert {path.stem for path in RECIPES.glob("papers/*.toml")} == set(OTHERS)
    assert {path.stem for path in RECIPES.glob("parallel/*.toml")} == set(IN_PARALLEL)
    on_eagle_3 = {path.stem for path in RECIPES.glob("eagle-3/*.toml")}
    assert on_eagle_3 == set(PAPER) | set(TODAY)
    for path in RECIPES.glob("eagle-3/*.toml"):
        assert load_recipe(path).name == f"{path.stem}-eagle-3"
    own = {
        "demo",
        "smoke",
        "serve",
        "ablations",
        "frames",
        "losses",
        "methods",
        "experts",
        "experts-3",
        "contexts",
        "pruned",
        "fresh",
    }
    assert {path.stem for path in RECIPES.glob("*.toml")} == set(PAPER) | set(TODAY) | own
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
        counts |= dict(zip(recipe.trained, counted(recipe, tuple(recipe.trained), target), strict=True))
    passed_over = {"sparse": 6 * 3 * 576 * 768, "two": 0}
    for one, unread in passed_over.items():
        for frame in ("", "3"):
            assert 0 <= counts[one + frame] - unread - counts["dense" + frame] <= 9 * 576, one + frame


def test_the_experts_recipes_differ_in_drafts_and_rates_alone():
    one, other = (load_recipe(RECIPES / f"{name}.toml").model_dump() for name in ("experts", "experts-3"))
    differ = {key for key in one if one[key] != other[key]}
    assert differ == {"name", "output", "draft", "train", "publish"}
    assert {key for key in one["train"] if one["train"][key] != other["train"][key]} == {"learning_rate"}
