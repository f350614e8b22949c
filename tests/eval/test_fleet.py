"""Workers that hang, die or cannot load: what becomes of their units. With a Ray of this process, but for one test."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from eval.measure import fleet
from eval.measure.harness import EvalTask, Outcome
from eval.measure.prompts import Prompt
from pipeline.basics.errors import PipelineError


class HangsError(Exception):
    """Stands for a call that never returns."""


class DiesError(Exception):
    """Stands for the end of the process."""


@dataclass(eq=False)
class Reference:
    value: object = None
    error: Exception | None = None
    ready: bool = True


class Method:
    def __init__(self, call):
        self._call = call

    def remote(self, *arguments) -> Reference:
        try:
            return Reference(self._call(*arguments))
        except HangsError:
            return Reference(ready=False)
        except DiesError:
            return Reference(error=ray.exceptions.RayActorError())
        except Exception as error:
            return Reference(error=ray.exceptions.RayTaskError("decode", "traceback", error))


class Actor:
    def __init__(self, made):
        self._made = made

    def __getattr__(self, name: str) -> Method:
        return Method(getattr(self._made, name))


class RayHere:
    """Calls are done before `remote` returns; a clock that only `wait` moves."""

    exceptions = ray.exceptions

    def __init__(self):
        self.now, self.killed, self.asked = 0.0, 0, []
        self.meanwhile = lambda: None

    def remote(self, **options):
        self.asked.append(options)
        return lambda kind: SimpleNamespace(remote=lambda *arguments: Actor(kind(*arguments)))

    def get_runtime_context(self):
        return SimpleNamespace(get_node_id=lambda: "0" * 56)

    def wait(self, references, num_returns, timeout):
        done = [reference for reference in references if reference.ready]
        if not done[:num_returns]:
            self.now += timeout
            self.meanwhile()
        return done[:num_returns], []

    def get(self, reference):
        if reference.error:
            raise reference.error
        return reference.value

    def kill(self, _):
        self.killed += 1


class Scripted:
    """A harness that does with each unit what the script says, attempt after attempt; then it decodes."""

    def __init__(self, script: dict[str, list[str]]):
        self._script = script

    def decode(self, unit: EvalTask, told) -> Outcome:
        told()
        left = self._script.get(unit.prompt.question_id, [])
        act(left.pop(0) if left else "decode")
        return Outcome([], {}, hardware=unit.prompt.question_id)


def act(what: str) -> None:
    if what != "decode":
        raise {"hang": HangsError(), "die": DiesError(), "refuse": PipelineError("too long"), "bug": ValueError("oh")}[
            what
        ]


def unit(name: str) -> EvalTask:
    return EvalTask("bench", Prompt(name, "", (name,)), 0.0)


@pytest.fixture
def here(monkeypatch) -> RayHere:
    found = RayHere()
    monkeypatch.setattr(fleet, "ray", found)
    monkeypatch.setattr(fleet, "time", SimpleNamespace(monotonic=lambda: found.now))
    return found


def decoded(recipe, names: str, script: dict[str, list[str]], loading: list[str] | None = None, workers: int = 2):
    """Names of the decoded units, in the order in which they came."""
    recipe = recipe.model_copy(update={"eval": recipe.eval.model_copy(update={"workers": workers, "hang_seconds": 60})})
    loads = loading or []

    def make():
        act(loads.pop(0) if loads else "decode")
        return Scripted(script)

    found = list(fleet._Fleet(recipe, make, [unit(name) for name in names], 1).outcomes())
    assert all(one.prompt.question_id == outcome.hardware for one, outcome in found)
    return "".join(one.prompt.question_id for one, _ in found)


def test_every_unit_is_decoded_once_whoever_hangs_or_dies(tiny_recipe, here):
    assert decoded(tiny_recipe, "abcd", {}) == "abcd" and here.killed == 0 and here.now == 0
    found = decoded(tiny_recipe, "abcd", {"a": ["hang", "die"], "c": ["die"]})
    assert sorted(found) == list("abcd") and here.killed == 3
    assert 60 < here.now < 64  # after eval.hang_seconds without a sign of life, and no later
    assert [options["num_gpus"] for options in here.asked if "num_gpus" in options] == [1] * (2 + 2 + 3)


def test_a_unit_that_is_lost_thrice_ends_the_run_by_name(tiny_recipe, here):
    with pytest.raises(
        PipelineError, match=r"bench, prompt b: 3 workers were lost, .* no sign of life for .*=60\. Finished"
    ):
        decoded(tiny_recipe, "abcd", {"b": ["die", "hang", "hang"]})


def test_what_goes_wrong_in_decoding_is_told_and_not_tried_again(tiny_recipe, here):
    with pytest.raises(PipelineError, match="bench, prompt b: too long"):
        decoded(tiny_recipe, "ab", {"b": ["refuse"]})
    with pytest.raises(PipelineError, match="bench, prompt b: ValueError: oh"):
        decoded(tiny_recipe, "ab", {"b": ["bug"]})
    assert here.killed == 0


def test_workers_that_do_not_load_are_replaced_and_then_given_up(tiny_recipe, here):
    assert decoded(tiny_recipe, "ab", {}, loading=["hang", "die"]) == "ab"
    with pytest.raises(PipelineError, match="loading the target: 3 workers were lost"):
        decoded(tiny_recipe, "ab", {}, loading=["hang"] * 4)
    with pytest.raises(PipelineError, match="loading the target: too long"):
        decoded(tiny_recipe, "ab", {}, loading=["refuse"])


def test_a_worker_that_gives_signs_of_life_may_take_its_time(tiny_recipe, here):
    recipe = tiny_recipe.model_copy(update={"eval": tiny_recipe.eval.model_copy(update={"hang_seconds": 60})})
    harness = Scripted({"a": ["hang"]})
    one = fleet._Fleet(recipe, lambda: harness, [unit("a")], 0)
    here.meanwhile = lambda: here.now < 200 and one._beats._made.tell(1)
    assert len(list(one.outcomes())) == 1 and 260 <= here.now < 264


# -- with Ray --------------------------------------------------------------------------------------------------------


class Faulty:
    """Hangs on unit a, and dies on unit b, the first time."""

    def __init__(self, folder: Path):
        self._folder = folder

    def decode(self, unit: EvalTask, told) -> Outcome:
        mark = self._folder / unit.prompt.question_id
        if not mark.exists():
            mark.touch()
            if unit.prompt.question_id == "a":
                time.sleep(1000)
            if unit.prompt.question_id == "b":
                os.kill(os.getpid(), signal.SIGKILL)
        told()
        return Outcome([], {}, hardware=unit.prompt.question_id)


def make_faulty(recipe, _methods) -> Faulty:
    return Faulty(recipe.run_dir)


@pytest.mark.real
def test_real_actors_that_hang_or_die_are_replaced(tiny_recipe, monkeypatch):
    """The clock jumps as soon as one hangs, before it gave a sign of life, so that nobody waits."""
    tiny_recipe.run_dir.mkdir()
    recipe = tiny_recipe.model_copy(update={"eval": tiny_recipe.eval.model_copy(update={"workers": 2})})
    hung = tiny_recipe.run_dir / "a"
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + (100_000 if hung.exists() else 0))
    monkeypatch.setattr(fleet, "time", clock)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    found = fleet.decode(recipe, {}, [unit(name) for name in "ab"], make_faulty)
    assert sorted(one.prompt.question_id for one, _ in found) == list("ab")
