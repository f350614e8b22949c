"""A release from a checkout: `pipeline.load`, and the chat."""

import pytest

import pipeline
from pipeline.__main__ import main
from pipeline.basics.errors import PipelineError
from pipeline.decoding.generate import Sampling, decode_plain
from pipeline.lm.chat import prompt_ids
from tests.kit import call, write_recipe
from tests.pipeline.taught import VARIANTS, greedy, taught
from tests.pipeline.test_drop_in import ALONE, released

QUESTION = "why?"


@pytest.fixture
def release(loaded_target, tiny_recipe, embed_head, tmp_path):
    ids = prompt_ids(loaded_target.tokenizer, [{"role": "user", "content": QUESTION}])
    draft = taught(loaded_target, embed_head, VARIANTS["jakiro"], ids, greedy(loaded_target, ids, 24))
    return released(tmp_path, tiny_recipe, draft, ALONE)


def test_a_loaded_release_answers_as_the_target_does(release, loaded_target, tiny_target):
    loaded = pipeline.load(release, target=str(tiny_target), device="cpu")
    streamed: list[int] = []
    answer = loaded.generate(QUESTION, max_new_tokens=24, on_tokens=lambda new: streamed.extend(new) or 1)
    ids = prompt_ids(loaded_target.tokenizer, [{"role": "user", "content": QUESTION}])
    expected = decode_plain(loaded_target, ids, Sampling(24, frozenset(loaded_target.stop_ids())))
    assert answer.tokens == streamed == expected.tokens and len(answer.depths) == len(answer.tokens)
    assert answer.tau > 1.2 and sum(map(bool, answer.depths)) > 3 and answer.tokens_per_second > 0
    plain_answer = loaded.generate([{"role": "user", "content": QUESTION}], max_new_tokens=24, plainly=True)
    assert plain_answer.tokens == answer.tokens and plain_answer.tau == 1.0 and not any(plain_answer.depths)
    assert plain_answer.text == answer.text


def test_a_release_that_does_not_know_its_target_asks_for_it(release):
    with pytest.raises(PipelineError, match="pass target=FOLDER"):
        pipeline.load(release)
    with pytest.raises(PipelineError, match=r"custom_generate holds no release .*runs/NAME/release.*jakiro run RECIPE"):
        pipeline.load(release / "custom_generate")


def test_before_a_release_chat_and_export_name_the_command_that_makes_one(tiny_recipe, tmp_path):
    file = write_recipe(tiny_recipe.model_dump(mode="json"), tmp_path / "r.toml")
    advice = rf"{file} has no release yet .*: jakiro run {file} trains.*jakiro status {file}"
    with pytest.raises(PipelineError, match=advice):
        call(main, "chat", str(file))
    tiny_recipe.paths.run.mkdir()
    for command in (["chat"], ["export", "--to", "vllm", "--out", str(tmp_path / "out")]):
        with pytest.raises(PipelineError, match=r"run holds no release .*expected the release of a run"):
            call(main, *command, str(tiny_recipe.paths.run))
        tiny_recipe.paths.release.mkdir()
        (tiny_recipe.paths.release / "config.json").touch()
        with pytest.raises(PipelineError, match=rf"did you mean {tiny_recipe.paths.release}\?"):
            call(main, *command, str(tiny_recipe.paths.run))
        (tiny_recipe.paths.release / "config.json").unlink()
        tiny_recipe.paths.release.rmdir()


@pytest.mark.parametrize("tokens", [24, 1])
def test_a_chat_answers_until_a_line_is_empty(release, tiny_target, monkeypatch, capsys, tokens):
    lines = iter([QUESTION, "and why?", ""])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    call(main, "chat", str(release), "--target", str(tiny_target), "--plain", "--tokens", str(tokens))
    output = capsys.readouterr().out
    assert output.count("; plain decoding ") == 2 and output.count("the same tokens") == 2 and "OTHER" not in output
    assert output.count(" tokens, tau ") == 2 and next(lines, None) is None
