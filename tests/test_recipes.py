"""The shipped recipes load, and the papers' drafts have the pinned number of parameters on the meta device."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from jakiro.first_recipe import draft_settings
from jakiro.presets import load_presets
from pipeline.drafts import DraftConfig, build, load_settings, parameter_count
from pipeline.drafts.parts.layers import draft_shapes
from pipeline.lm.chat import encode
from pipeline.recipe.load import load_recipe
from pipeline.recipe.read import shipped_recipes
from tests.kit import ROOT, byte_tokenizer


def config_of(kind: str, hidden: int, mlp: int, heads: int, kv_heads: int, vocabulary: int, **more) -> dict:
    sizes = {"hidden_size": hidden, "intermediate_size": mlp, "vocab_size": vocabulary}
    return {"model_type": kind, **sizes, "num_attention_heads": heads, "num_key_value_heads": kv_heads, **more}


SEVEN, THIRTEEN = config_of("llama", 4096, 11008, 32, 32, 32000), config_of("llama", 5120, 13824, 40, 40, 32000)
PAPER = {  # target: its configuration
    "vicuna-7b": SEVEN,
    "vicuna-13b": THIRTEEN,
    "vicuna-33b": config_of("llama", 6656, 17920, 52, 52, 32000),
    "llama2-chat-7b": SEVEN,
    "llama2-chat-13b": THIRTEEN,
    "llama2-chat-70b": config_of("llama", 8192, 28672, 64, 8, 32000),
    "llama3-instruct-8b": config_of("llama", 4096, 14336, 32, 8, 128256),
    "llama3-instruct-70b": config_of("llama", 8192, 28672, 64, 8, 128256),
}
LLAMA_3 = {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}}
LLAMA_3["rope_scaling"] |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
# What drafts' sizes and RoPE follow from in the config.json of meta-llama/Llama-3.1-8B-Instruct,
# meta-llama/Llama-3.3-70B-Instruct, Qwen/Qwen3-8B, Qwen/Qwen3-30B-A3B-Instruct-2507 and openai/gpt-oss-20b on the Hub,
# in its own words.
TODAY = {  # target: (its configuration, base and kind of the drafts' RoPE)
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


def configuration(name: str):
    return AutoConfig.for_model(**(TODAY[name][0] if name in TODAY else PAPER[name]))


def drafts_for(config, *names: str) -> list[DraftConfig]:
    """Return the drafts that `jakiro new --preset paper` writes for a target."""
    return [load_settings(draft_settings(load_presets()[name], config, paper=True)) for name in names]


def counted(drafts: list[DraftConfig], target: dict) -> list[int]:
    with torch.device("meta"):
        return [parameter_count(build(draft, target)) for draft in drafts]


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


ON_BOTH_FRAMES = ("jakiro", "eagle", "jakiro-eagle-3", "eagle3")


@pytest.mark.parametrize("name", sorted({*PAPER, *TODAY}))
def test_drafts_of_the_papers_targets_and_of_those_that_are_served_today(name):
    config = configuration(name)
    target = draft_shapes(config)
    if name in TODAY:
        rope = target["rope_parameters"]
        assert (rope["rope_theta"], rope["rope_type"]) == TODAY[name][1]
    drafts = jakiro, eagle, on_eagle_3, eagle3 = drafts_for(config, *ON_BOTH_FRAMES)
    counts = counted(drafts, target)
    print(f"{name}: jakiro, eagle; jakiro on eagle-3, eagle3: {counts} parameters")
    mlp, mlp_3 = (config.mlp_width or target["intermediate_size"] for config in (eagle, eagle3))
    vocabulary = eagle3.vocabulary or target["vocab_size"]
    assert counts == by_hand(target, mlp, mlp_3, vocabulary, jakiro.fc_bias)
    assert counts == PINNED.get(name, counts)
    assert vocabulary == 32_000
    assert eagle3.ttt_steps == on_eagle_3.ttt_steps == 7
    if name in TODAY:
        assert mlp >= 3 * target["hidden_size"]  # a dense MLP, not one expert of a mixture
        assert jakiro.vocabulary is eagle.vocabulary is None


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
    config = configuration(name)
    target = draft_shapes(config) | {"target_layers": layers}
    drafts = drafts_for(config, "dflash", "p-eagle")
    d, size, mlp = target["hidden_size"], target["head_dim"], drafts[0].mlp_width or target["intermediate_size"]
    heads, groups = target["num_attention_heads"], target["num_key_value_heads"]
    first = 2 * d * size * (heads + 2 * groups) + size * heads * d + 3 * d * mlp + 3 * d * d + 4 * d + 32_000 * d
    expected = 3 * (2 * d * size * (heads + groups) + 3 * d * mlp + 2 * d)
    assert counted(drafts, target) == [dflash_by_hand(target, mlp), first + 3 * d + expected] == pinned
    assert [list(draft.needs(layers).auxiliary) for draft in drafts] == read and mlp >= 3 * d


def test_drafts_of_one_recipe_read_all_their_layers():
    recipe = load_recipe("qwen3-8b-parallel")
    layers, *read, _ = IN_PARALLEL["qwen3-8b"]
    assert recipe.auxiliary_layers(layers) == sorted({*read[0], *read[1]})
    assert recipe.stored_dtype == load_recipe("llama3.3-instruct-70b-eagle-3").stored_dtype == "float8_e4m3fn"
    assert recipe.target == load_recipe("qwen3-8b").target


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


OTHER_TARGETS = ("dflash", "eagle-1", "gumiho", "hydra", "hydra-plain", "medusa", "skipper", "small-llama")


@pytest.mark.parametrize("name", OTHER_TARGETS)
def test_drafts_of_other_papers(name):
    target = draft_shapes(configuration("llama3-instruct-8b"))
    assert counted(drafts_for(configuration("llama3-instruct-8b"), name), target) == [others_by_hand(target)[name]]


def test_plain_hydra_trains_as_medusa_does():
    assert load_presets()["hydra-plain"].training == load_presets()["medusa"].training
    hydra, medusa = drafts_for(configuration("llama3-instruct-8b"), "hydra-plain", "medusa")
    assert (
        (hydra.objective, hydra.decay, hydra.heads)
        == (medusa.objective, medusa.decay, medusa.heads)
        == ("hard-ce", 0.8, 4)
    )


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
    recipe = load_recipe("methods")
    target = draft_shapes(AutoConfig.for_model(**config_of("llama", 576, 1536, 9, 3, 49152)))
    assert counted([recipe.draft[name] for name in METHODS], target) == list(METHODS.values())
    assert set(METHODS) == set(recipe.trained)


def test_recipes_are_few_and_load():
    assert len(shipped_recipes()) <= 18
    for name in shipped_recipes():
        assert load_recipe(name).name == name


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
