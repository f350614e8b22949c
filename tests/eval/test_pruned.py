"""A pruned target against the full one: identity if no token skips a block, and the command itself."""

import pytest
import torch

from eval.pruned import main, measure_losses
from pipeline.artifacts.reports import read_rows
from pipeline.drafts import build
from pipeline.drafts.native.skipper import SkipperConfig
from pipeline.drafts.parts.layers import draft_shapes
from pipeline.recipe.load import load_recipe
from tests.kit import call, dump_here, recipe_tree, save_tiny_target, write_recipe, write_sharegpt
from tests.pipeline.taught import prompt_of
from tests.train.runs import train_here


def test_a_target_that_nothing_passes_by_is_the_whole_one(loaded_target, embed_head):
    draft = build(SkipperConfig(sparsity=[0.0, 0.4]), draft_shapes(loaded_target.config))
    draft.bind(embed_head)
    draft.shares = [0.0, 0.0]
    tokens = torch.tensor([prompt_of(0, 60)])
    figures = measure_losses(loaded_target, draft, [(tokens, torch.arange(60) > 10)])
    assert (figures["passed by"], figures["agreement"]) == (0, 1)
    assert figures["acceptance"] == pytest.approx(1, abs=1e-5)
    logits = loaded_target.head(loaded_target.capture(tokens)[0, 10:-1]).log_softmax(-1)
    nats = -logits.gather(1, tokens[0, 11:, None]).mean()
    assert figures["perplexity"] == pytest.approx(nats.exp().item(), rel=1e-5)


def test_the_command_writes_rows_and_shows_them(tmp_path, capsys):
    target = save_tiny_target(tmp_path / "target", layers=5)
    tree = recipe_tree(target, write_sharegpt(tmp_path / "data.json"), tmp_path / "dump")
    tree["draft"] = {"eagle": {"kind": "eagle"}, "some": {"kind": "skipper", "sparsity": 0.4}}
    tree["publish"]["draft"] = "some"
    path, run = write_recipe(tree, tmp_path / "recipe"), tmp_path / "run"
    recipe = load_recipe(path)
    dump_here(recipe)
    train_here((path, recipe.paths.features), run, draft="some")
    call(main, str(path), "--set", f"output={run}")
    values = {(row.setting["way"], row.figure): row.value for row in read_rows(run / "eval")}
    assert list(dict.fromkeys(way for way, _ in values)) == ["whole", "trained routers", "static routers"]
    assert values["whole", "agreement"] == 1
    assert all(0 < values[way, "agreement"] < 1 for way in ("trained routers", "static routers"))
    assert values["static routers", "passed by"] == pytest.approx(0.4, abs=0.1)
    assert "|  | some, way whole | 0 |" in capsys.readouterr().out
