"""The target behind a server that speaks OpenAI's API: it answers, and gives no states."""

import json
from collections import Counter

import pytest

from pipeline.basics.errors import NoAnswer, PipelineError
from pipeline.decoding.generate import Sampling, decode_plain
from pipeline.features.engines import open_source, openai
from pipeline.features.source import GenerationPrompt
from pipeline.lm.config import TargetConfig
from pipeline.recipe.recipe import Recipe
from preprocess.dump.interview import AnswerWorker
from preprocess.dump.task import ShardTask
from tests.kit import dump_here
from tests.loopback import Handler, Loopback
from tests.preprocess.test_regenerate import dialogues_of, with_answers


class Completions(Loopback):
    """A server that answers by plain decoding, after the faults that a test lists: statuses, or "cut" for a connection
    that ends.
    """

    def __init__(self, target):
        self.target, self.faults, self.requests, self.keys = target, [], [], Counter()
        super().__init__()

    def handler(self):
        hub = self

        class Answers(Handler):
            def do_GET(self):
                hub.keys[self.headers.get("Authorization")] += 1
                self.answer({"data": [{"id": "tiny"}]})

            def do_POST(self):
                body = json.loads(self.body())
                hub.requests.append(body)
                fault = hub.faults.pop(0) if hub.faults else None
                if fault == "cut":
                    return self.connection.close()
                if fault is not None:
                    return self.answer({"error": "as the test wants it"}, fault)
                stops = frozenset(body["stop_token_ids"])
                tokens = decode_plain(hub.target, body["prompt"], Sampling(body["max_tokens"], stops)).tokens
                stopped = tokens[-1] in stops
                text = hub.target.tokenizer.decode(tokens[:-1] if stopped else tokens)
                self.answer({"choices": [{"text": text, "finish_reason": "stop" if stopped else "length"}]})

        return Answers


@pytest.fixture
def served(loaded_target, monkeypatch):
    monkeypatch.setattr(openai, "WAIT", 0.001)
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    with Completions(loaded_target) as running:
        yield running


def with_server(recipe: Recipe, url: str) -> Recipe:
    target = TargetConfig.model_validate(recipe.target.model_dump() | {"engine": "server", "engine_url": url})
    return recipe.model_copy(update={"target": target})


def test_a_regeneration_has_the_dialogues_that_the_target_here_gives(tiny_recipe, served):
    recipe = with_answers(tiny_recipe, max_new_tokens=16, batch=5)
    task = ShardTask("part", 0, dialogues_of(recipe, 6))
    want, got = AnswerWorker(recipe).work(task), AnswerWorker(with_server(recipe, served.url)).work(task)
    assert got.dialogues == want.dialogues and got.rejected == want.rejected and len(got.dialogues) > 1
    assert got.documents == want.documents and got.edits == want.edits
    assert set(served.keys) == {"Bearer sesame"} and all(request["temperature"] == 0 for request in served.requests)


def test_a_server_that_is_busy_or_away_is_asked_again(tiny_recipe, served):
    source = open_source(with_server(tiny_recipe, served.url).target)
    served.faults = [429, 503, "cut", 502]
    (answer,) = source.answers([GenerationPrompt([5, 9, 33])], Sampling(8, source.stop_ids))
    assert answer.tokens and len(served.requests) == 5
    served.faults = [503] * 99
    with pytest.raises(PipelineError, match=r"answers 503: .*8 tries; what is finished is kept"):
        list(source.answers([GenerationPrompt([5, 9, 33])], Sampling(8, source.stop_ids)))


@pytest.mark.parametrize(
    ("fault", "error", "message"), [(400, NoAnswer, "as the test wants it"), (401, PipelineError, "OPENAI_API_KEY")]
)
def test_what_the_server_refuses_is_told_at_once(tiny_recipe, served, fault, error, message):
    source = open_source(with_server(tiny_recipe, served.url).target)
    served.faults = [fault]
    with pytest.raises(error, match=message):
        list(source.answers([GenerationPrompt([5])], Sampling(8, source.stop_ids)))
    assert len(served.requests) == 1


def test_it_gives_no_states_and_what_is_no_server_is_named(tiny_recipe, served):
    recipe = with_server(tiny_recipe, served.url)
    with pytest.raises(PipelineError, match="gives answers, no hidden states"):
        list(open_source(recipe.target).states([[1, 2]]))
    with pytest.raises(PipelineError, match="gives answers, no hidden states"):
        dump_here(recipe)
    with pytest.raises(PipelineError, match="holds a credential"):
        open_source(with_server(tiny_recipe, "http://me:secret@127.0.0.1:1").target)
    with pytest.raises(PipelineError, match=r"cannot be read: ConnectError.*8 tries"):
        open_source(with_server(tiny_recipe, "http://127.0.0.1:1").target)
    with pytest.raises(ValueError, match="requires engine_url"):
        TargetConfig(model="m", engine="server")
    with pytest.raises(ValueError, match="engine_url does not apply to engine='vllm'"):
        TargetConfig(model="m", engine="vllm", engine_python="p", engine_url="u")
