"""`jakiro new --preset paper` writes what the recipes of the papers held, key by key, until commit c55c0aa."""

from argparse import Namespace

import pytest

from jakiro import first_recipe
from jakiro.first_recipe import draft_settings
from jakiro.presets import format_toml, load_presets
from pipeline.decoding.config import Method, TreeConfig
from pipeline.drafts import DRAFTS, kind_key, load_settings
from pipeline.recipe.load import load_recipe
from pipeline.recipe.read import read_tree
from pipeline.recipe.recipe import Recipe
from pipeline.recipe.sections import TrainConfig
from tests.test_recipes import configuration

KEYS = (
    *("epochs", "global_batch", "micro_batch", "zero_stage", "learning_rate", "betas"),
    *("weight_decay", "warmup_steps", "schedule", "clip_norm", "noise"),
)
TRAIN = {
    "jakiro": (20, 16, 2, 1, 9e-5, (0.9, 0.95), 0.001, 2000, "cosine", 0.5, 0.1),
    "eagle": (20, 16, 2, 1, 9e-5, (0.9, 0.95), 0.001, 2000, "cosine", 0.5, 0.1),
    "eagle-1": (20, 16, 2, 1, 3e-5, (0.9, 0.95), 0.01, 2000, "linear", 0.5, 0.1),
    "jakiro-eagle-3": (10, 16, 1, 1, 0.0001, (0.9, 0.95), 0.001, 2000, "cosine", 0.5, 0),
    "eagle3": (10, 16, 1, 1, 0.0001, (0.9, 0.95), 0.001, 2000, "cosine", 0.5, 0),
    "gumiho": (20, 16, 2, 1, 0.0002, (0.9, 0.95), 0.001, 2000, "cosine", 0.5, 0.1),
    "medusa": (2, 128, 2, 1, 0.001, (0.9, 0.95), 0.001, 40, "cosine", 0.5, 0),
    "hydra": (10, 32, 2, 1, 0.0005, (0.9, 0.999), 0.1, 100, "cosine", 1.0, 0),
    "hydra-plain": (2, 128, 2, 1, 0.001, (0.9, 0.95), 0.001, 40, "cosine", 0.5, 0),
    "dflash": (6, 128, 2, 1, 0.0006, (0.9, 0.95), 0.001, 128, "cosine", 1.0, 0),
    "p-eagle": (6, 128, 1, 1, 0.0006, (0.9, 0.95), 0.001, 128, "cosine", 1.0, 0),
    "mtp": (3, 64, 2, 1, 5e-5, (0.9, 0.95), 0.001, 100, "cosine", 1.0, 0),
    "skipper": (1, 16, 2, 1, 0.001, (0.9, 0.95), 0.001, 10, "cosine", 0.5, 0),
    "small-llama": (10, 16, 2, 1, 0.0005, (0.9, 0.95), 0.001, 2000, "cosine", 0.5, 0),
}
FOUR_DEEP = {"depth": 4, "top_k": 10, "nodes": 64}
TREES = {
    "eagle-1": {"paths": "eagle-1"},
    "gumiho": {"depth": 7, "top_k": 14, "nodes": 64},
    **dict.fromkeys(("medusa", "hydra", "hydra-plain", "small-llama"), FOUR_DEEP),
    "dflash": {"depth": 15, "top_k": 10, "nodes": 64},
    "p-eagle": {"depth": 8, "top_k": 10, "nodes": 64},
    "mtp": {"depth": 3, "top_k": 4, "nodes": 16},
    "skipper": {"depth": 4, "top_k": 2, "nodes": 8},
}
DRAFT = {  # for a Llama 3 of 8B
    "jakiro": {"kind": "jakiro"},
    "eagle": {"kind": "eagle"},
    "eagle-1": {"kind": "eagle", "fc_bias": True},
    "jakiro-eagle-3": {"kind": "jakiro", "frame": "eagle-3", "vocabulary": 32000},
    "eagle3": {"kind": "eagle3", "vocabulary": 32000},
    "gumiho": {"kind": "gumiho", "regression_steps": 8500},
    "medusa": {"kind": "medusa"},
    "hydra": {"kind": "hydra"},
    "hydra-plain": {"kind": "hydra", "prefix": False, "blocks": 1, "objective": "hard-ce"},
    "dflash": {"kind": "dflash"},
    "p-eagle": {"kind": "p-eagle", "vocabulary": 32000},
    "mtp": {"kind": "mtp"},
    "skipper": {"kind": "skipper", "sparsity": 0.2},
    "small-llama": {
        **{"kind": "small-llama", "vocabulary": 32000, "layers": 4, "width": 1024, "mlp_width": 2816},
    },
}
DIALOGUES = {"skipper": 2_000}  # of other drafts 68,000
LLAMA_2 = {"jakiro": {"fc_bias": True}, "eagle": {}, "jakiro-eagle-3": {}, "eagle3": {}}
LLAMA_3 = {"jakiro": {}, "eagle": {}, "jakiro-eagle-3": {"vocabulary": 32000}, "eagle3": {"vocabulary": 32000}}
TODAY = LLAMA_3 | {"dflash": {}, "p-eagle": {"vocabulary": 32000}}


def with_experts(width: int) -> dict[str, dict]:
    dense = ("eagle", "eagle3", "dflash", "p-eagle")
    return {name: more | ({"mlp_width": width} if name in dense else {}) for name, more in TODAY.items()}


OF_TARGETS = {
    **dict.fromkeys(("vicuna-7b", "vicuna-13b", "vicuna-33b"), LLAMA_2),
    **dict.fromkeys(("llama2-chat-7b", "llama2-chat-13b", "llama2-chat-70b"), LLAMA_2),
    **dict.fromkeys(("llama3-instruct-8b", "llama3-instruct-70b", "llama3.3-instruct-70b"), LLAMA_3),
    **dict.fromkeys(("llama3.1-instruct-8b", "qwen3-8b"), TODAY),
    "qwen3-30b-a3b": with_experts(6144),
    "gpt-oss-20b": with_experts(8640),
}


def trained(name: str) -> dict:
    return dict(zip(KEYS, TRAIN[name], strict=True))


def written(name: str, folder, **more) -> Recipe:
    """Return the recipe that `new` writes on a machine with four GPUs, for a target with `more` settings."""
    config, machine = configuration("llama3-instruct-8b"), first_recipe.Machine(4, 80e9)
    arguments = {"target": "OWNER/NAME", "data": None, "draft": name, "license": "llama3", "preset": "paper"}
    source = first_recipe.DataSource(records=100_000, complete=False, usable=1.0, length=1379.0, report="")
    config.update({"max_position_embeddings": 8192, **more})
    out = folder / "my.toml"
    out.write_text(first_recipe.recipe_text(Namespace(**arguments, out=out), config, machine, 16e9, source))
    return load_recipe(out)


@pytest.mark.parametrize("name", TRAIN)
def test_a_preset_writes_what_the_papers_recipe_held(name, tmp_path):
    """Return all settings but those that depend on the machine, and the choice of weights to keep."""
    recipe = written(name, tmp_path)
    packed = 2048 if TRAIN[name][1] <= 16 else None
    assert recipe.train == TrainConfig(**trained(name), ranks=4, keep="best", pack_tokens=packed)
    assert recipe.draft == {name: load_settings(DRAFT[name])}
    method = Method(tree=TreeConfig(**TREES.get(name, {})))
    assert recipe.tree(name) == method.resolve(recipe.draft[name], name, TreeConfig()).resolved_tree
    data = recipe.data
    assert (data.max_length, data.max_dialogues) == (2048, DIALOGUES.get(name, 68_000))
    assert data.source.endswith("ShareGPT_Vicuna_unfiltered/ShareGPT_V3_unfiltered_cleaned_split.json")
    assert (data.heldout_fraction, data.validation_dialogues, data.heldout_prompts) == (0.02, 256, 100)
    assert recipe.eval.temperatures == [0.0, 1.0]
    assert recipe.stored_dtype == ("float8_e4m3fn" if recipe.draft[name].auxiliary else "bfloat16")


def test_a_target_of_experts_begins_with_a_short_chain_and_the_tuner_goes_on(tmp_path):
    assert not written("eagle", tmp_path).eval.methods
    recipe = written("eagle", tmp_path, num_experts=128, num_experts_per_tok=8)
    assert recipe.tree("eagle").nodes == 3 and "jakiro tune finds" in (tmp_path / "my.toml").read_text()


@pytest.mark.parametrize("target", OF_TARGETS)
def test_settings_follow_the_target_as_in_its_recipe(target):
    for name, more in OF_TARGETS[target].items():
        identity = {key: value for key, value in DRAFT[name].items() if key in ("kind", "frame")}
        assert draft_settings(load_presets()[name], configuration(target), paper=True) == identity | more


def test_every_draft_that_is_trained_has_a_preset():
    assert {kind_key(preset.settings) for preset in load_presets().values()} == {
        kind for kind, entry in DRAFTS.items() if entry.config.trained
    }
    assert set(load_presets()) == {*TRAIN, "dspark"}  # of which there was no recipe


@pytest.mark.parametrize(
    ("recipe", "names"),
    [
        *((name, {"jakiro": "jakiro", "eagle": "eagle"}) for name in ("vicuna-7b", "llama3.1-instruct-8b")),
        *((name, {"jakiro": "jakiro", "eagle": "eagle"}) for name in ("qwen3-8b", "gpt-oss-20b")),
        ("llama3.3-instruct-70b-eagle-3", {"jakiro": "jakiro-eagle-3", "eagle3": "eagle3"}),
        ("qwen3-8b-parallel", {"dflash": "dflash", "p-eagle": "p-eagle"}),
    ],
)
def test_an_example_is_what_the_presets_say(recipe, names):
    loaded, target = load_recipe(recipe), recipe.removesuffix("-eagle-3").removesuffix("-parallel")
    for name, preset in names.items():
        chosen, where = load_presets()[preset], {"ranks", "micro_batch", "together", "pack_tokens"}
        assert loaded.draft[name] == load_settings(draft_settings(chosen, configuration(target), paper=True))
        assert loaded.train.model_dump(exclude=where) == chosen.training.model_dump(exclude=where)
        assert loaded.train.pack_tokens == (loaded.data.max_length if chosen.packs else None)


def test_values_are_spelled_as_a_recipe_spells_them(tmp_path):
    values = {"a": [0.9, 0.999], "b": 9e-5, "c": 68_000, "d": {"paths": "eagle-1", "deep": True}, "e": 'a"b'}
    path = tmp_path / "values.toml"
    path.write_text("\n".join(f"{key} = {format_toml(value)}" for key, value in values.items()))
    assert read_tree(path) == values and "9e-5" in path.read_text() and "68_000" in path.read_text()
