"""A target whose embedding is padded beyond its tokenizer, as Qwen's are: the tokens that drafts guess, and the
vocabulary of exports.
"""

import json

import pytest
import torch
from safetensors.torch import load_file

from pipeline.artifacts import checkpoint
from pipeline.artifacts.provenance import RECIPE
from pipeline.decoding.config import LoadedMethod
from pipeline.decoding.generate import Sampling, decode_plain, decode_speculative
from pipeline.features.shards import FeatureStore, Manifest
from pipeline.lm.model import Target, fingerprint, load_embed_head
from pipeline.recipe.load import load_recipe
from pipeline.recipe.recipe import Recipe
from pipeline.serving.export import export
from pipeline.serving.load import load
from tests.kit import dump_here, recipe_tree, write_recipe, write_sharegpt
from tests.pipeline.families import save
from tests.pipeline.taught import prompt_of
from train.start import new_draft

TOKENIZER_SIZE, ROWS = 260, 320
DRAFTS = {
    "eagle": {"kind": "eagle"},
    "jakiro": {"kind": "jakiro", "vocabulary": 300},  # more than the tokenizer has
    "eagle3": {"kind": "eagle3", "ttt_steps": 2, "auxiliary_layers": [1, 2, 3]},
    "reduced": {"kind": "eagle3", "ttt_steps": 2, "auxiliary_layers": [1, 2, 3], "vocabulary": 100},
    "medusa": {"kind": "medusa", "heads": 3},
    "small": {"kind": "small-llama", "width": 32, "mlp_width": 48},
}


@pytest.fixture(scope="module")
def padded(tmp_path_factory) -> tuple[Recipe, Target]:
    folder = tmp_path_factory.mktemp("padded")
    config = save(folder / "me" / "target", "llama-3.1", vocab_size=ROWS, num_hidden_layers=4)
    tree = recipe_tree(config.model, write_sharegpt(folder / "data.json"), folder / "run")
    tree["draft"] = DRAFTS
    recipe = load_recipe(write_recipe(tree, folder / "recipe"))
    dump_here(recipe)
    return recipe, Target(recipe.target, "float32")


def made(recipe: Recipe, name: str):
    """Return a draft, saved and loaded again, with random weights, so that it may guess any token."""
    store = FeatureStore(recipe.paths.features, "train", Manifest.load(recipe.paths.features).spec)
    draft = new_draft(recipe, name, load_embed_head(recipe.target), store)
    checkpoint.save(recipe.paths.draft(name), draft, draft.state_dict(), recipe, name, {})
    return checkpoint.load(recipe.paths.draft(name), fingerprint(recipe.target))


@pytest.mark.parametrize("name", DRAFTS)
def test_no_draft_guesses_what_the_tokenizer_lacks_and_answers_are_the_targets(padded, monkeypatch, name):
    recipe, target = padded
    draft = made(recipe, name)
    draft.bind(target.embed_head(draft_mark(recipe)))
    guessed, propose = [], draft.propose

    def watched(*arguments):
        tree = propose(*arguments)
        guessed.extend(tree.tokens[1:])
        return tree

    monkeypatch.setattr(draft, "propose", watched)
    method, answered = LoadedMethod(draft, recipe.tree(name)), []
    for seed in range(2):
        for temperature in (0.0, 1.0):
            sampling = Sampling(24, frozenset(), temperature, seed=seed)
            answered += (plain_answer := decode_plain(target, prompt_of(seed), sampling).tokens)
            assert decode_speculative(target, method, prompt_of(seed), sampling).tokens == plain_answer
    assert len(guessed) > 200 and max(guessed) < TOKENIZER_SIZE
    assert max(answered) >= TOKENIZER_SIZE  # a random target's own choice, which is the truth


def draft_mark(recipe: Recipe) -> str:
    return fingerprint(recipe.target)


def test_a_validation_copy_and_a_release_know_it_too(padded, tmp_path):
    recipe, _ = padded
    draft = made(recipe, "eagle3")
    assert checkpoint.read_config(recipe.paths.draft("eagle3")).shapes["known_tokens"] == TOKENIZER_SIZE
    draft.bind(load_embed_head(recipe.target))
    hidden = torch.randn(3, 32)
    for each in (draft, draft.validation_copy()):
        assert each._guessable == TOKENIZER_SIZE
    assert draft.logits(hidden).softmax(-1)[:, TOKENIZER_SIZE:].count_nonzero() == 0
    (tmp_path / "release").mkdir()
    draft_folder = recipe.paths.draft("eagle3")
    checkpoint.export(draft_folder, tmp_path / "release", recipe.resolve_method("eagle3"), {}, draft_folder / RECIPE)
    loaded = load(tmp_path / "release", target=recipe.target.model, dtype="float32", device="cpu")
    assert loaded.generate("why?", max_new_tokens=16).tokens == loaded.generate("why?", 16, plainly=True).tokens


@pytest.mark.parametrize("name", ["eagle3", "reduced"])
@pytest.mark.parametrize("engine", ["vllm", "sglang", "speculators"])
def test_exports_have_the_targets_rows(padded, tmp_path, name, engine):
    recipe, _ = padded
    made(recipe, name)
    (tmp_path / "release").mkdir()
    draft_folder = recipe.paths.draft(name)
    checkpoint.export(draft_folder, tmp_path / "release", recipe.resolve_method(name), {}, draft_folder / RECIPE)
    export(tmp_path / "release", engine, tmp_path / "out", "me/target")
    config, weights = (
        json.loads((tmp_path / "out/config.json").read_text()),
        load_file(tmp_path / "out/model.safetensors"),
    )
    assert config.get("transformer_layer_config", config)["vocab_size"] == ROWS
    size = recipe.draft[name].vocabulary or ROWS
    assert config["draft_vocab_size"] == len(weights["lm_head.weight"]) == size
    if name == "reduced":
        assert len(weights["t2d"]) == ROWS and weights["t2d"].sum() == size
        assert not weights["t2d"][
            TOKENIZER_SIZE:
        ].any()  # the tokens that it has were seen, or have the smallest numbers
