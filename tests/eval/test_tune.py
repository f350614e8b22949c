"""The tuner: its costs add up. (Its replay: tests/pipeline/test_replay.py.)"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from eval.measure.tasks import methods_of, tuned_as_written, tuned_for
from eval.tuning import costs
from eval.tuning.choose import predict
from eval.tuning.costs import Costs
from pipeline.basics import accelerator
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import write_sealed
from pipeline.decoding import generate
from pipeline.decoding.config import TreeConfig
from pipeline.decoding.method import LoadedMethod
from pipeline.decoding.replay import ABSENT, walk
from pipeline.drafts.jakiro import JakiroConfig


def test_the_least_predicted_time_wins():
    """With a verification that costs nothing more the largest tree does, with one that costs a lot the smallest."""

    def known(tree):
        return walk(np.array([[0 if level < 2 else ABSENT for level in range(tree.depth)]] * 30), tree.nodes)

    def best(per_node, step):
        sizes = {n: 1.0 + per_node * n * n for n in (1, 2, 3, 4, 8)}
        table = Costs(1.0, sizes, [dict.fromkeys((1, 2, 3, 4, 6, 8, 10), step)], 0.1, 0.0)
        return predict([known], table, JakiroConfig(), 3, table.sizes, "plain")

    ranked = best(0.001, 0.01)
    tree = ranked[0].tree
    assert (tree.depth, tree.nodes, tree.parallel) == (2, 3, 2)  # two levels, both from the first forward
    assert ranked == sorted(ranked, key=lambda one: -one.speedup)
    assert ranked[0].tau == 3 and ranked[0].speedup == pytest.approx(3 / (1.009 + 0.1))
    assert best(10.0, 0.01)[0].tree.nodes == 2


@pytest.fixture
def tuned(tiny_recipe):
    """Writes which trees were chosen; gives the methods that are measured, by `methods_of`."""
    digests = dict.fromkeys(tiny_recipe.draft, "0" * 64)

    def measured(recipe=tiny_recipe, alone=False, **trees: TreeConfig):
        methods, chosen = tiny_recipe.methods, {}
        for name, tree in trees.items():
            made_for = tuned_for(tiny_recipe, methods[name], digests)
            chosen[name] = {"method": replace(methods[name], tree=tree).to_json(), "for": made_for}
        tiny_recipe.eval_dir.mkdir(parents=True, exist_ok=True)
        write_sealed(tiny_recipe.tuned_file, chosen)
        return methods_of(recipe, alone, digests)

    return measured


def test_a_tuned_tree_that_the_recipe_has_is_measured_once(tiny_recipe, tuned):
    written = tiny_recipe.tree("jakiro")
    other = replace(written, depth=2, nodes=5)
    assert set(tuned(jakiro=written, eagle=other)) == {"jakiro", "eagle", "eagle-tuned"}
    assert tuned_as_written(tiny_recipe) == ["jakiro"]
    assert set(tuned(jakiro=written, eagle=other, alone=True)) == {"jakiro", "eagle-tuned"}
    assert set(tuned(jakiro=written, alone=True)) == {"jakiro", "eagle"}
    with pytest.raises(PipelineError, match="nothing is tuned"):
        tuned(alone=True)


def test_a_tree_that_was_tuned_for_other_settings_is_refused_by_their_keys(tiny_recipe, tuned):
    changes = {"temperatures": [0.0], "dtype": "bfloat16"}
    other = tiny_recipe.model_copy(update={"eval": tiny_recipe.eval.model_copy(update=changes)})
    with pytest.raises(PipelineError, match="jakiro was tuned for other weights or settings: ") as caught:
        tuned(other, jakiro=tiny_recipe.tree("jakiro"))
    assert "eval.temperatures: [0.0, 1.0] -> [0.0], " in str(caught.value)
    assert 'pack_linears, compile): ["float32", false, false] -> ["bfloat16", false, false]. Run' in str(caught.value)


def test_bookkeeping_is_a_round_its_nodes_and_its_forwards(monkeypatch):
    """So that a large tree and a deep one are charged for what they are; whatever the recipe's own tree."""
    asked = []

    def rest(target, method, sampling, prompt):
        asked.append((method.tree.nodes, method.tree.forwards))
        return 0.5 + 0.01 * method.tree.nodes + 0.125 * (method.tree.forwards - 1)

    monkeypatch.setattr(costs, "_rest", rest)
    given = LoadedMethod(SimpleNamespace(config=JakiroConfig(), stepwise=True), TreeConfig())
    assert costs._bookkeeping(None, given, [None, None], [], 60) == pytest.approx((0.5, 0.01, 0.125))
    assert asked == [(costs.FEW, 2)] * 2 + [(costs.MANY, 2)] * 2 + [(costs.FEW, 4)] * 2
    assert costs._bookkeeping(None, given, [None], [], 4) == pytest.approx((0.665, 0.0, 0.0))  # one tree tells no slope
    table = Costs(1.0, {6: 2.0}, [{10: 0.25}], 0.125, 0.5, 0.01)
    tree = TreeConfig(depth=3, top_k=10, nodes=6, parallel=1)
    assert table.round(tree) == pytest.approx(2.0 + 6 * 0.01 + 0.125 + 2 * 0.25 + 0.5)


def test_a_task_is_timed_when_the_copies_made_for_it_have_ended(monkeypatch):
    """They go to the device without waiting: the clock (`now`) waits before it is read, at both ends."""
    order: list[str] = []

    class Parts:
        def __init__(self, *_):
            pass

        def before(self, name, number):
            order.append("copies")

        def tasks(self, sizes):
            return {key: lambda *_: order.append("task") for key in [("plain",), ("start", "eagle", 0, 1)]}

    def now(device: torch.device) -> float:
        order.append(f"{device} has ended")
        return float(len(order))

    monkeypatch.setattr(costs, "_Parts", Parts)
    monkeypatch.setattr(costs, "now", now)
    assert costs.measure_costs(SimpleNamespace(device=torch.device("cuda")), {}, 8, 8, [], []) == {}
    timed = ["cuda has ended", "task", "cuda has ended"]
    assert order == [*timed, "copies", *timed] * (costs.REPEATS + 1)


def test_the_clock_waits_for_an_accelerator(monkeypatch):
    order: list[object] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", order.append)
    monkeypatch.setattr(accelerator, "time", SimpleNamespace(perf_counter=lambda: order.append("read") or 1.0))
    accelerator.now(torch.device("cpu"))
    watch = generate.Stopwatch(torch.device("xpu:1"), exact=False)
    watch.total()
    assert order == ["read", *[torch.device("xpu:1"), "read"] * 2]
