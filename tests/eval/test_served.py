"""A running server's figures: its own counts of draft tokens, tokens over time, one clear error for other servers."""

import json
import math
import re
from collections.abc import Callable
from functools import reduce
from operator import getitem
from pathlib import Path
from threading import Event, Lock

import pytest

from eval import served
from eval.served import Counts, read_counts
from pipeline.artifacts.reports import read_rows
from pipeline.basics.errors import PipelineError
from tests.kit import call, recipe_tree, write_recipe
from tests.loopback import Handler, Loopback

TOKENS = 7  # of every answer


class Engine(Loopback):
    """An OpenAI server on the loopback interface that reports its draft tokens as `kind` does."""

    def __init__(self, kind: str, models: tuple[str, ...] = ("target",), key: str | None = None):
        self.kind, self.models, self.key = kind, models, key
        self.bodies: list[dict] = []
        self.answered, self.busy, self.most_at_once, self._lock = 5, 0, 0, Lock()  # five answers before ours
        self.prompt_tokens, self.longest = 3, None
        super().__init__()

    def answer(self, body: dict) -> dict:
        """Three passes after the prefill, which accept 2, 1 and 0 of 3 draft tokens each."""
        message = {"role": "assistant", "content": f"answer {len(body['messages'])}"}
        response = {
            "choices": [{"message": message}],
            "system_fingerprint": self.kind,
            "usage": {"prompt_tokens": self.prompt_tokens, "completion_tokens": TOKENS},
        }
        if self.kind == "llama.cpp":
            response["timings"] = {"predicted_n": TOKENS, "draft_n": 9, "draft_n_accepted": 3}
        if self.kind == "sglang" and body.get("return_spec_tokens_details"):
            details = {"spec_verify_ct": 3, "spec_num_proposed_drafts": 9, "spec_num_correct_drafts": 3}
            response["sglext"] = {"spec_tokens_details": details}
        return response

    def metrics(self) -> str:
        if self.kind != "vllm":
            return ""
        total = {"drafts": 3, "draft_tokens": 9, "accepted_tokens": 3}
        lines = [f"vllm:spec_decode_num_{name}_total {n * self.answered}.0" for name, n in total.items()]
        for place, n in enumerate((2, 1, 0)):
            place = f'{{engine="0",position="{place}"}}'
            lines.append(f"vllm:spec_decode_num_accepted_tokens_per_pos_total{place} {n * self.answered}.0")
        return "\n".join(["# TYPE other gauge", "other 1.0", *lines, ""])

    def handler(engine):
        class EngineHandler(Handler):
            def do_GET(self) -> None:
                if self.path == "/metrics":
                    self.answer(engine.metrics(), 200 if engine.metrics() else 404, "text/plain")
                elif engine.key and self.headers.get("Authorization") != f"Bearer {engine.key}":
                    self.answer({"error": "who are you?"}, 401)
                else:
                    listed = engine.models and [{"id": name} for name in engine.models]
                    self.answer({"data": listed})

            def do_POST(self) -> None:
                body = json.loads(self.body())
                with engine._lock:
                    engine.bodies.append(body)
                    engine.answered += 1
                    engine.busy += 1
                    engine.most_at_once = max(engine.most_at_once, engine.busy)
                too_long = engine.longest is not None and len(body["messages"]) > engine.longest
                response = None if too_long else engine.answer(body)
                with engine._lock:
                    engine.busy -= 1  # before it is told: then the next question may come
                if response is None:
                    self.answer({"error": "too long"}, 400)
                else:
                    self.answer(response)

        return EngineHandler


@pytest.fixture
def recipe(tiny_target, tmp_path) -> Path:
    """Two prompts, one of two turns."""
    prompts = [{"question_id": f"q{n}", "category": "", "turns": ["one", "two"][: n + 1]} for n in range(2)]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    tree = recipe_tree(tiny_target, tmp_path / "data.json", tmp_path / "run")
    tree["eval"] |= {"benchmarks": {"b": {"source": str(tmp_path / "b.jsonl")}}, "temperatures": [0.0, 1.0]}
    return write_recipe(tree, tmp_path / "recipe.toml")


def rows_of(recipe: Path) -> dict[tuple[float, int, str], dict[str, float]]:
    """Return figures by temperature, concurrency and method, in the order in which they were measured."""
    figures: dict[tuple[float, int, str], dict[str, float]] = {}
    for row in read_rows(recipe.parent / "run/eval"):
        figures.setdefault((row.temperature, row.setting["at once"], row.method), {})[row.figure] = row.value
    return figures


def measured(recipe: Path, *arguments: str) -> dict[tuple[float, int, str], dict[str, float]]:
    call(served.main, str(recipe), *arguments)
    return rows_of(recipe)


def refusal(recipe: Path, *arguments: str) -> str:
    with pytest.raises(PipelineError) as caught:
        call(served.main, str(recipe), *arguments)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["vllm", "sglang", "llama.cpp"])
def test_tau_is_of_the_servers_own_counts(recipe, kind):
    with Engine(kind) as engine:
        levels = measured(recipe, "--url", f"{engine.url}/v1/", "--concurrency", "1", "2")
    assert list(levels) == [(t, size, "server") for t in (0.0, 1.0) for size in (1, 2)]
    for figures in levels.values():  # the warm-up's answers and those before it are not among them
        assert (figures["answers"], figures["tau"]) == (3, 2.0)
        places = [figures.get(f"accepted at depth {place}") for place in (1, 2, 3)]
        assert places == ([2 / 3, 1 / 3, 0] if kind == "vllm" else [None] * 3)


def test_a_server_that_does_not_tell_gets_no_tau_and_another_template_is_told(recipe, capsys):
    with Engine("silent") as engine:
        levels = measured(recipe, "--url", engine.url, "--concurrency", "1")
    assert not [figures for figures in levels.values() if "tau" in figures]
    printed = capsys.readouterr().out
    assert (
        "tau" not in printed.splitlines()[0]
        and "2 prompts have other lengths" in printed
        and "chat template is another one" in printed
    )


def test_the_recipes_sampling_and_the_answers_before_are_sent(recipe):
    more = ["--set", "eval.top_k=5", "--set", "eval.top_p=0.9", "--set", "eval.max_new_tokens=11"]
    with Engine("silent") as engine:
        measured(recipe, "--url", engine.url, "--concurrency", "1", *more)
    last = engine.bodies[-1]
    plain = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    assert plain.items() <= last.items() and {body["top_k"] for body in engine.bodies} == {5}
    assert {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "max_tokens": 11, "model": "target"}.items() <= last.items()
    assert [message["content"] for message in last["messages"]] == ["one", "answer 1", "two"]


def test_two_servers_take_turns_and_the_table_has_their_ratio(recipe, capsys):
    with Engine("vllm") as engine, Engine("silent", ("without",)) as plain:
        levels = measured(recipe, "--url", engine.url, "--plain-url", plain.url, "--concurrency", "2")
    assert list(levels) == [(t, 2, name) for t in (0.0, 1.0) for name in ("server", "plain")]
    (speed, base), printed = (figures["tokens/s"] for figures in list(levels.values())[:2]), capsys.readouterr().out
    assert levels[0.0, 2, "server"]["over plain"] == speed / base
    assert f"| 0 | server | 2.00 | {speed:,.6g} | {speed / base:,.6g} |" in printed
    assert f"| 0 | plain | - | {base:,.6g} | - |" in printed
    of = {(row.method, row.origin["server"], row.origin["model"]) for row in read_rows(recipe.parent / "run/eval")}
    assert of == {("server", "vllm", "target"), ("plain", "silent", "without")}


def test_so_many_answers_are_asked_for_at_once(recipe, monkeypatch):
    with Engine("silent") as engine:
        measured(recipe, "--url", engine.url, "--concurrency", "1")
        assert engine.most_at_once == 1
        answer, both, begun = engine.answer, Event(), len(engine.bodies)

        def wait_for_the_other(body: dict) -> dict:
            if len(engine.bodies) > begun + 1 and engine.busy == 2:  # one warms up
                both.set()
            return answer(body) if len(engine.bodies) <= begun + 1 or both.wait(30) else {}

        monkeypatch.setattr(engine, "answer", wait_for_the_other)
        measured(recipe, "--url", engine.url, "--concurrency", "2")
        assert both.is_set() and engine.most_at_once == 2


def test_refusals(recipe, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with Engine("silent", models=()) as engine:
        engine.models = None
        assert "lists no models" in refusal(recipe, "--url", engine.url)
    with Engine("silent", models=("a", "b")) as engine:
        assert "choose one with --model" in refusal(recipe, "--url", engine.url)
        assert "--concurrency [0]" in refusal(recipe, "--url", engine.url, "--concurrency", "0")
    with Engine("silent", key="sk-secret") as engine:
        assert "401" in (message := refusal(recipe, "--url", engine.url)) and "Set OPENAI_API_KEY" in message
        monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
        assert measured(recipe, "--url", engine.url, "--concurrency", "1")
    credential_error = refusal(recipe, "--url", engine.url.replace("//", "//user:hunter2@"))
    assert "holds a credential" in credential_error and "hunter2" not in credential_error


def test_an_answer_of_another_shape_is_refused(recipe, monkeypatch):
    with Engine("silent") as engine:
        monkeypatch.setattr(engine, "answer", lambda body: {"choices": []})
        assert "does not answer as /v1/chat/completions should" in refusal(recipe, "--url", engine.url)


def test_a_prompt_that_the_server_does_not_take_is_left_out_and_told(recipe, capsys):
    with Engine("llama.cpp") as engine:
        engine.longest = 1  # the second turn has three messages
        levels = measured(recipe, "--url", engine.url, "--concurrency", "1")
        assert [(figures["refused"], figures["answers"]) for figures in levels.values()] == [(1, 1), (1, 1)]
        assert "2 prompts were refused" in capsys.readouterr().out
        engine.longest = 0
        assert "too long" in refusal(recipe, "--url", engine.url)


def spoilt(engine: Engine, monkeypatch, number: int, spoil: Callable[[dict], object]) -> None:
    """Let `spoil` change the engine's answer of this number; the first is the warm-up's, and a level has three."""
    answer = engine.answer

    def changed(body: dict) -> dict:
        response = answer(body)
        if len(engine.bodies) == number:
            spoil(response)
        return response

    monkeypatch.setattr(engine, "answer", changed)


def test_a_server_that_was_started_anew_within_a_level_gets_no_tau_for_it(recipe, monkeypatch, capsys):
    with Engine("vllm") as engine:
        spoilt(engine, monkeypatch, 3, lambda response: setattr(engine, "answered", 2))
        levels = measured(recipe, "--url", engine.url, "--concurrency", "1")
    first, second = levels.values()
    assert "tau" not in first and (first["counters refused"], first["answers"]) == (1, 3) and first["tokens/s"] > 0
    assert second["tau"] == 2.0 and "counters refused" not in second
    assert "1 measurements have no tau" in (printed := capsys.readouterr().out) and "was restarted" in printed


def wrong_count(value: str) -> Callable[[str, bool], str]:
    return lambda metrics_text, late: (
        re.sub(r"(num_accepted_tokens_total) \S+", rf"\1 {value}", metrics_text) if late else metrics_text
    )


def begun(name: str) -> Callable[[str, bool], str]:
    return lambda metrics_text, late: f"{metrics_text}{name} {17 + late}.5\n"


# What /metrics says instead, also from the first level's middle on: and whether the second level has a tau.
COUNTERS = {
    "another start": (begun("process_start_time_seconds"), True, "was restarted"),
    "counters of another start": (begun("vllm:spec_decode_num_drafts_created"), True, "was restarted"),
    "counters that come": (
        lambda metrics_text, late: metrics_text if late else "other 1.0\n",
        True,
        "only before it, or only after it",
    ),
    **{
        value: (wrong_count(value), False, "vllm:spec_decode_num_accepted_tokens_total is ")
        for value in ("NaN", "+Inf", "-3.0", "1e400", "36.5")
    },
}


@pytest.mark.parametrize(("wrong", "recovers", "words"), COUNTERS.values(), ids=COUNTERS)
def test_counters_of_two_starts_or_that_are_no_counts_give_no_tau(recipe, monkeypatch, capsys, wrong, recovers, words):
    with Engine("vllm") as engine:
        metrics = engine.metrics
        monkeypatch.setattr(engine, "metrics", lambda: wrong(metrics(), engine.answered > 7))
        levels = measured(recipe, "--url", engine.url, "--concurrency", "1")
    second = (2.0, None) if recovers else (None, 1)
    assert [(figures.get("tau"), figures.get("counters refused")) for figures in levels.values()] == [(None, 1), second]
    assert words in capsys.readouterr().out


NO_COUNTS = [math.nan, math.inf, -1, 1.5, "3", True, None, 10**400]
NUMBERS = [
    ("silent", ("usage", "completion_tokens")),
    ("silent", ("usage", "prompt_tokens")),
    ("llama.cpp", ("timings", "predicted_n")),
    ("llama.cpp", ("timings", "draft_n")),
    ("llama.cpp", ("timings", "draft_n_accepted")),
    ("sglang", ("sglext", "spec_tokens_details", "spec_num_correct_drafts")),
    ("sglang", ("sglext", "spec_tokens_details", "spec_num_proposed_drafts")),
]


@pytest.mark.parametrize(
    ("kind", "path", "value"), [(*NUMBERS[0], value) for value in NO_COUNTS] + [(*number, -1) for number in NUMBERS[1:]]
)
def test_an_answers_number_that_is_no_count_is_refused(recipe, monkeypatch, kind, path, value):
    with Engine(kind) as engine:
        *parents, last = path
        spoilt(engine, monkeypatch, 3, lambda response: reduce(getitem, parents, response).update({last: value}))
        message = refusal(recipe, "--url", engine.url, "--concurrency", "1")
    assert "does not answer as /v1/chat/completions should" in message and f"{last} is " in message


@pytest.mark.parametrize(("kind", "path"), [("llama.cpp", "timings"), ("sglang", "sglext")])
def test_more_accepted_than_guessed_is_refused(recipe, monkeypatch, kind, path):
    with Engine(kind) as engine:
        timings = {"predicted_n": TOKENS, "draft_n": 3, "draft_n_accepted": 4}
        details = {"spec_verify_ct": 3, "spec_num_proposed_drafts": 3, "spec_num_correct_drafts": 4}
        wrong = timings if path == "timings" else {"spec_tokens_details": details}
        spoilt(engine, monkeypatch, 3, lambda response: response.update({path: wrong}))
        assert "of 3 guesses it accepted 4" in refusal(recipe, "--url", engine.url, "--concurrency", "1")


def test_an_answer_of_another_model_is_refused(recipe, monkeypatch):
    with Engine("silent") as engine:
        spoilt(engine, monkeypatch, 3, lambda response: response.update(model="other"))
        assert "it is of model 'other', the first was of 'target'" in refusal(recipe, "--url", engine.url)


def test_a_gateway_may_name_the_model_behind_an_alias_or_none(recipe, monkeypatch):
    for name in ("target-0613", None):
        with Engine("silent") as engine:
            answer = engine.answer
            monkeypatch.setattr(engine, "answer", lambda body, answer=answer, name=name: answer(body) | {"model": name})
            call(served.main, str(recipe), "--url", engine.url, "--concurrency", "1")


@pytest.mark.parametrize("finish_reason", ["error", "abort", "content_filter"])
@pytest.mark.parametrize(("kind", "tau"), [("vllm", None), ("llama.cpp", 2.0), ("sglang", 2.0)])
def test_an_answer_that_failed_is_left_out_of_all_figures(recipe, monkeypatch, capsys, kind, tau, finish_reason):
    """The first prompt's answer, of three, fails: its counts and tokens do not count."""

    def fail(response: dict) -> None:
        response["choices"][0]["finish_reason"] = finish_reason
        response["usage"]["completion_tokens"] = 10**9
        if kind == "llama.cpp":
            response["timings"] = {"predicted_n": 99, "draft_n": 99, "draft_n_accepted": 90}
        if kind == "sglang":
            response["sglext"]["spec_tokens_details"]["spec_num_correct_drafts"] = 9

    with Engine(kind) as engine:
        spoilt(engine, monkeypatch, 2, fail)
        levels = measured(recipe, "--url", engine.url, "--concurrency", "1")
    first, second = levels.values()
    assert (first["failed"], first["answers"], first.get("tau")) == (1, 2, tau) and first["tokens/s"] < 10**6
    assert (second["failed"], second["answers"], second["tau"]) == (0, 3, 2.0)
    assert "1 answers failed" in (printed := capsys.readouterr().out)
    assert ("answers are left out, and /metrics counts their passes" in printed) == (tau is None)


def test_nothing_but_answers_that_failed_is_an_error(recipe, monkeypatch):
    with Engine("silent") as engine:
        answer = engine.answer
        failed = {"choices": [{"message": {"content": ""}, "finish_reason": "abort"}]}
        monkeypatch.setattr(engine, "answer", lambda body: answer(body) | failed)
        assert "all answers failed, got finish_reason ['abort']" in refusal(recipe, "--url", engine.url)


def test_an_answer_before_a_refused_turn_takes_tau_from_the_counters_with_it(recipe):
    with Engine("vllm") as engine:
        engine.longest = 1
        levels = measured(recipe, "--url", engine.url, "--concurrency", "1")
    assert [(figures["answers"], figures.get("tau"), figures["counters refused"]) for figures in levels.values()] == [
        (1, None, 1)
    ] * 2


def test_levels_share_no_cache_and_are_written_one_by_one(recipe, monkeypatch):
    with Engine("vllm") as engine:
        answer = engine.answer
        monkeypatch.setattr(engine, "answer", lambda body: answer(body) if body["temperature"] == 0 else {})
        assert "does not answer as" in refusal(recipe, "--url", engine.url, "--concurrency", "1", "2")
        salts = [body["cache_salt"] for body in engine.bodies]
    assert [size for _, size, _ in rows_of(recipe)] == [1, 2]
    assert len(set(salts)) == 4 and salts[0] == "warm-up" and {body["top_k"] for body in engine.bodies} == {-1}


def test_counts_add_and_subtract_by_place():
    first, second = Counts(3, 9, 3, {1: 2, 2: 1}), Counts(1, 3, 1, {1: 1, 2: 0})
    assert first + second == Counts(4, 12, 4, {1: 3, 2: 1}) and first - second == Counts(2, 6, 2, {1: 1, 2: 1})
    assert Counts().tau is None
    # llama.cpp: an answer without a guess has passes, too
    assert read_counts({"timings": {"predicted_n": 5}, "choices": [{}]}) == Counts(4, 0, 0)
    assert read_counts({"timings": None, "choices": [{}]}) is None
