"""A checkpoint that others released: a folder with their names and their config.json, random weights."""

import json

import pytest
import torch
from safetensors.torch import save_file

from pipeline.drafts import build
from pipeline.drafts.parts.layers import draft_shapes
from tests.pipeline.layouts import with_settings
from tests.pipeline.taught import VARIANTS, greedy, prompt_of, taught

RELEASED_CONFIG = {  # a released config.json without the target's own fields
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "max_position_embeddings": 2048,
    "vocab_size": 260,
    "num_hidden_layers": 1,
    "architectures": ["Whatever"],
    "model_type": "llama",
}


@pytest.fixture
def released(tiny_recipe, loaded_target, embed_head, tmp_path):
    """released(settings, renamed, more) -> (recipe, folder, our weights): a released checkpoint of random weights."""

    def factory(settings, renamed=lambda n: n, more=None, **config):
        recipe = with_settings(tiny_recipe, settings)
        draft = build(recipe.draft["theirs"], draft_shapes(loaded_target.config))
        draft.initialise(4)
        weights = {name: 5 * x if x.is_floating_point() else x for name, x in draft.state_dict().items()}
        stored = {renamed(name): x for name, x in weights.items() if name != "draft_token_ids"}
        if draft.token_ids_U is not None:
            ids = torch.arange(0, 256, 4)
            weights["draft_token_ids"] = ids
            stored |= {"d2t": ids - torch.arange(64), "t2d": torch.isin(torch.arange(260), ids)}
        embedding, head = embed_head.embedding_VD.bfloat16(), embed_head.head.linear.weight
        targets = dict.fromkeys(("embed_tokens.weight", "input_embed_fn.weight"), embedding)
        targets["lm_head.weight"] = head if draft.token_ids_U is None else head[weights["draft_token_ids"]]
        stored |= {name: targets.get(name, torch.randn(shape)) for name, shape in (more or {}).items()}
        folder = tmp_path / "released"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(RELEASED_CONFIG | config))
        save_file({name: x.contiguous() for name, x in stored.items()}, folder / "model.safetensors")
        return recipe, folder, weights

    return factory


@pytest.fixture(scope="session")
def text(loaded_target):
    """A prompt and the target's own continuation."""
    prompt = prompt_of(3)
    return prompt, greedy(loaded_target, prompt, 48)


@pytest.fixture(scope="session")
def taught_drafts(loaded_target, embed_head, text):
    """Return drafts that know the text, by the name of their variant."""

    class Taught(dict):
        def __missing__(self, name):
            self[name] = taught(loaded_target, embed_head, VARIANTS[name], *text)
            return self[name]

    return Taught()
