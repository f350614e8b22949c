"""The tuner: the tree that is chosen from counts and times. (Its replay: tests/pipeline/test_replay.py.)"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from eval import tune
from eval.measure.harness import PLAIN
from eval.measure.tasks import load_methods, methods_tuned_as_written, tuning_conditions
from eval.tune import fit_round_time, list_trees, predict, select_trees_to_time
from pipeline.basics import accelerator
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import write_sealed
from pipeline.decoding import generate
from pipeline.decoding.accept import Acceptance
from pipeline.decoding.config import TreeConfig
from pipeline.decoding.generate import Generation
from pipeline.decoding.replay import ABSENT, count_rounds
from pipeline.decoding.sources import SharedTrees
from pipeline.drafts.eagle import EagleConfig
from pipeline.drafts.gumiho import GumihoConfig
from pipeline.drafts.jakiro import JakiroConfig
from pipeline.drafts.parallel.medusa import MedusaConfig
from pipeline.drafts.prompt_lookup import PromptLookupConfig


def trees_of(config, depth, nodes):
    return list_trees(SimpleNamespace(draft=SimpleNamespace(config=config), tree=TreeConfig()), depth, nodes)


def test_the_least_predicted_time_wins():
    """The largest tree wins if verification costs nothing more, the smallest if it costs a lot."""

    def known_time(tree):
        return count_rounds(np.array([[0 if level < 2 else ABSENT for level in range(tree.depth)]] * 30), tree.nodes)

    def best(per_node):
        trees = trees_of(JakiroConfig(), 3, 8)
        rounds = {
            tree: 1.1 + per_node * tree.nodes**2 + 0.01 * (tree.forwards - 1) for tree in select_trees_to_time(trees)
        }
        return predict(trees, [known_time], rounds)

    ranked = best(0.001)
    tree = ranked[0].tree
    assert (tree.depth, tree.nodes, tree.parallel) == (2, 3, 2)  # two levels, both from the first forward
    assert ranked == sorted(ranked, key=lambda prediction: -prediction.speedup)
    assert ranked[0].tau == 3 and ranked[0].speedup == pytest.approx(3 / 1.11)  # between those of 2 and 4 nodes
    assert best(10.0)[0].tree.nodes == 2


@pytest.mark.parametrize("depth", [1, 3, 6])
@pytest.mark.parametrize("nodes", [2, 8, 48, 64])
@pytest.mark.parametrize(
    "config",
    [JakiroConfig(), EagleConfig(), SharedTrees(EagleConfig()), GumihoConfig(), MedusaConfig(), PromptLookupConfig()],
)
def test_a_dozen_trees_say_what_a_round_of_any_takes(config, depth, nodes):
    """The time rises with the nodes, with the draft's forwards and their nodes, and with further levels."""
    trees = trees_of(config, depth, nodes)

    def seconds(tree):
        further = tree.forwards - 1
        return 1 + 0.01 * tree.nodes + further * (0.05 + 0.002 * tree.top_k) + 0.03 * (tree.depth - tree.forwards)

    rounds = {tree: seconds(tree) for tree in select_trees_to_time(trees)}
    assert len(rounds) <= 13 and set(rounds) <= set(trees)
    cost = fit_round_time(rounds)
    assert [cost(tree) for tree in trees] == pytest.approx([seconds(tree) for tree in trees], rel=0.05)


def test_a_round_is_timed_in_steps_of_plain_decoding_beside_it(tiny_recipe, monkeypatch):
    """The machine is three times as slow during the second answer, and something else disturbs the third."""
    trees, requests = trees_of(EagleConfig(), 2, 4)[:2], []

    def decode_in_turns(recipe, harness, methods, tasks, title):
        requests.append((recipe.eval.max_new_tokens, tasks))
        counts = Acceptance()
        counts.add_pass(1, 2)
        counts.add_pass(0, 1)
        answers = {PLAIN: [Generation([1] * 4, seconds) for seconds in (3.0, 9.0, 3.0)]}
        for name, took in zip(methods, (1.5, 2.0), strict=True):
            answers[name] = [Generation([1] * 4, took * s, acceptance=counts) for s in (2.0, 6.0, 20.0)]
        return answers, True

    tasks = [SimpleNamespace(prompt=number) for number in (1, 2, 3, 4, 5, 1)]
    monkeypatch.setattr(tune, "decode_in_turns", decode_in_turns)
    monkeypatch.setattr(tune, "LoadedMethod", lambda draft, tree: tree)
    rounds = tune.time_rounds(tiny_recipe, None, SimpleNamespace(draft=None), trees, tasks)
    assert rounds == {trees[0]: 1.5, trees[1]: 2.0}
    assert requests == [(tiny_recipe.eval.max_new_tokens, [task for task in tasks if task.prompt < 5])]


@pytest.fixture
def tuned(tiny_recipe):
    """Write which trees were chosen; return the methods that are measured, by `load_methods`."""
    digests = dict.fromkeys(tiny_recipe.draft, "0" * 64)

    def measured(recipe=tiny_recipe, alone=False, **trees: TreeConfig):
        methods, chosen = tiny_recipe.methods, {}
        for name, tree in trees.items():
            made_for = tuning_conditions(tiny_recipe, methods[name], digests)
            chosen[name] = {"method": replace(methods[name], tree=tree).to_json(), "for": made_for}
        tiny_recipe.paths.eval.mkdir(parents=True, exist_ok=True)
        write_sealed(tiny_recipe.paths.tuned, chosen)
        return load_methods(recipe, alone, digests)

    return measured


def test_a_tuned_tree_that_the_recipe_has_is_measured_once(tiny_recipe, tuned):
    written = tiny_recipe.tree("jakiro")
    smaller = replace(written, depth=2, nodes=5)
    assert set(tuned(jakiro=written, eagle=smaller)) == {"jakiro", "eagle", "eagle-tuned"}
    assert methods_tuned_as_written(tiny_recipe) == ["jakiro"]
    assert set(tuned(jakiro=written, eagle=smaller, alone=True)) == {"jakiro", "eagle-tuned"}
    assert set(tuned(jakiro=written, alone=True)) == {"jakiro", "eagle"}
    with pytest.raises(PipelineError, match="nothing is tuned"):
        tuned(alone=True)


def test_a_tree_that_was_tuned_for_other_settings_is_refused_by_their_keys(tiny_recipe, tuned):
    changes = {"temperatures": [0.0], "dtype": "bfloat16"}
    changed_recipe = tiny_recipe.model_copy(update={"eval": tiny_recipe.eval.model_copy(update=changes)})
    with pytest.raises(PipelineError, match="jakiro was tuned for other weights or settings: ") as caught:
        tuned(changed_recipe, jakiro=tiny_recipe.tree("jakiro"))
    assert "eval.temperatures: [0.0, 1.0] -> [0.0], " in str(caught.value)
    assert 'pack_linears, compile): ["float32", false, false] -> ["bfloat16", false, false]. Run' in str(caught.value)


def test_the_clock_waits_for_an_accelerator(monkeypatch):
    order: list[object] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", order.append)
    monkeypatch.setattr(accelerator, "time", SimpleNamespace(perf_counter=lambda: order.append("read") or 1.0))
    accelerator.synchronized_time(torch.device("cpu"))
    watch = generate.Stopwatch(torch.device("xpu:1"), exact=False)
    watch.total()
    assert order == ["read", *[torch.device("xpu:1"), "read"] * 2]
