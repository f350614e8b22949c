"""GPUs of a Ray worker: what is decided where nodes have them and where not, without one."""

import logging
import os
from types import SimpleNamespace

import pytest

from eval.measure import fleet
from pipeline.basics.errors import PipelineError
from pipeline.recipe.recipe import Recipe
from pipeline.running.gpus import gpus_each, hide_gpus
from preprocess.dump import pool
from preprocess.estimate import workers_worth


@pytest.mark.parametrize(
    ("asked", "device", "there", "each"),
    [
        (None, "auto", True, 1),
        (None, "auto", False, 0),
        (None, "cuda", True, 1),
        (None, "cuda", False, 1),  # for which there is no room: told so
        (None, "cpu", True, 0),
        (0.5, "auto", True, 0.5),
        (4, "spread", True, 4),
        (0, "cpu", True, 0),
        (0, "auto", False, 0),
    ],
)
def test_a_worker_takes_one_gpu_unless_it_is_told_otherwise(asked, device, there, each):
    assert gpus_each("features", asked, device, there) == each


@pytest.mark.parametrize("section", ["features", "eval"])
def test_workers_that_would_all_be_on_the_first_gpu_are_refused(section):
    with pytest.raises(PipelineError, match=f"{section}.gpus_per_worker=0, but target.device='auto' would have every"):
        gpus_each(section, 0, "auto", there=True)


def test_a_worker_without_a_gpu_sees_none(monkeypatch):
    """Ray itself hides them only from workers that take some."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    hide_gpus(0.5)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
    hide_gpus(0)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def with_settings(recipe: Recipe, section: str, device: str, **settings) -> Recipe:
    target = recipe.target.model_copy(update={"device": device})
    changed = getattr(recipe, section).model_copy(update=settings)
    return recipe.model_copy(update={"target": target, section: changed})


def nodes(monkeypatch, *resources: dict[str, float]) -> None:
    alive = [{"Alive": True, "Resources": one} for one in resources]
    total = {kind: sum(one.get(kind, 0) for one in resources) for one in resources for kind in one}
    here = SimpleNamespace(nodes=lambda: alive, cluster_resources=lambda: total)
    monkeypatch.setattr(pool, "ray", here)
    monkeypatch.setattr(fleet, "ray", here)


def test_the_dumps_workers_are_one_a_gpu_of_the_nodes(tiny_recipe, monkeypatch, caplog):
    nodes(monkeypatch, {"CPU": 64}, {"CPU": 64, "GPU": 8}, {"CPU": 64, "GPU": 8})
    assert pool.room_for(with_settings(tiny_recipe, "features", "auto", workers=16)) == 1
    assert pool.room_for(with_settings(tiny_recipe, "features", "cpu", workers=16)) == 0
    assert pool.room_for(with_settings(tiny_recipe, "features", "auto", workers=32, gpus_per_worker=0.5)) == 0.5
    assert pool.room_for(with_settings(tiny_recipe, "features", "spread", workers=4, gpus_per_worker=4)) == 4
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        pool.room_for(with_settings(tiny_recipe, "features", "auto", workers=17))
    assert "room for 16 now: the others wait. Two share a GPU with features.gpus_per_worker=0.5" in caplog.text
    with pytest.raises(
        PipelineError, match="features wants 1 CPUs and 16 GPUs each, the nodes have at most 64 CPUs and 8"
    ):
        pool.room_for(with_settings(tiny_recipe, "features", "spread", gpus_per_worker=16))
    nodes(monkeypatch, {"CPU": 2})
    assert pool.room_for(with_settings(tiny_recipe, "features", "auto")) == 0
    with pytest.raises(PipelineError, match="1 CPUs and 1 GPUs each, the nodes have at most 2 CPUs and 0 GPUs"):
        pool.room_for(with_settings(tiny_recipe, "features", "cuda"))


def test_evaluations_workers_are_one_a_gpu_of_the_cluster(tiny_recipe, monkeypatch):
    nodes(monkeypatch, {"CPU": 64, "GPU": 4})
    assert fleet._room_for(with_settings(tiny_recipe, "eval", "auto", workers=4)) == 1
    assert fleet._room_for(with_settings(tiny_recipe, "eval", "cpu", workers=8)) == 0
    with pytest.raises(PipelineError, match=r"eval\.workers=8 want 8 GPUs, but the Ray cluster has 4"):
        fleet._room_for(with_settings(tiny_recipe, "eval", "auto", workers=8))


def test_ray_gives_each_of_the_dumps_workers_what_was_decided(tiny_recipe, monkeypatch):
    asked = []
    here = SimpleNamespace(remote=lambda **options: asked.append(options) or (lambda _: SimpleNamespace(remote=hired)))

    def hired(make, number, beats, gpus):
        return SimpleNamespace(ready=SimpleNamespace(remote=lambda: gpus))

    monkeypatch.setattr(pool, "ray", here)
    hiring = pool.Pool(tiny_recipe, None, "features.batch_tokens")
    hiring._gpus = 0.5
    assert hiring._hire().loading == 0.5 and asked == [{"num_cpus": 1, "num_gpus": 0.5}]


def test_workers_that_share_a_gpu_share_its_speed(tiny_recipe):
    config = tiny_recipe.features.model_copy(update={"workers": 8})
    assert workers_worth(config) == 8
    assert workers_worth(config.model_copy(update={"gpus_per_worker": 0.5})) == 4
    assert workers_worth(config.model_copy(update={"gpus_per_worker": 4.0})) == 8
