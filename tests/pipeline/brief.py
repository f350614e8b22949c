"""A dump and a training of a few steps, for targets of many families."""

import torch

from pipeline.artifacts import checkpoint
from pipeline.artifacts.features import feature_spec
from pipeline.drafts import build, make_objective
from pipeline.drafts.parts.layers import draft_shapes
from pipeline.features.batch import collate
from pipeline.features.shards import FeatureStore
from pipeline.lm.config import TargetConfig
from pipeline.lm.model import Target, fingerprint, load_config, load_embed_head
from pipeline.lm.states import EmbeddingAndHead
from pipeline.recipe.recipe import Recipe
from tests.kit import recipe_tree


def make_small_recipe(config: TargetConfig, source, output) -> Recipe:
    tree = recipe_tree(config.model, source, output)
    tree["data"] |= {"max_length": 96, "validation_dialogues": 1, "heldout_prompts": 2, "calibration_prompts": 1}
    tree["features"] |= {"answer_tokens": 2, "stored_dtype": "bfloat16"}
    tree["draft"]["eagle3"] = {"kind": "eagle3", "ttt_steps": 2, "vocabulary": 64}
    return Recipe.model_validate(tree)


def train_briefly(recipe: Recipe, target: Target, name: str):
    """A draft after a few steps on the stored rows, saved and loaded again."""
    store, embed_head = (
        FeatureStore(recipe.paths.features, "train", feature_spec(recipe)),
        load_embed_head(recipe.target),
    )
    rows = [store.row(place) for place in range(6)]
    draft = build(recipe.draft[name], draft_shapes(load_config(recipe.target)))
    draft.initialise(0)
    if recipe.draft[name].vocabulary:
        draft.set_vocabulary(torch.arange(recipe.draft[name].vocabulary) * 2)
    draft.bind(embed_head)
    count = sum(int(row.loss_mask.sum()) for row in rows)
    totals, auxiliary = dict.fromkeys(make_objective(draft.config).groups, count), range(len(draft.needs.auxiliary))
    batch = collate(rows, make_objective(draft.config), totals, auxiliary).to(torch.device("cpu"), torch.float32)
    optimizer, losses = torch.optim.AdamW(draft.parameters(), lr=3e-3), []
    for _ in range(5):
        optimizer.zero_grad()
        loss = make_objective(draft.config).loss(draft, batch)[0]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    checkpoint.save(recipe.paths.draft(name), draft, draft.state_dict(), recipe, name, {})
    loaded = checkpoint.load(recipe.paths.draft(name), fingerprint(recipe.target))
    loaded.bind(EmbeddingAndHead(target.embedding_VD, target.head, embed_head.fingerprint))
    return loaded
