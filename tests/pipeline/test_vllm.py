"""The target in an engine of another environment: here a stand-in for vLLM behind the real protocol (tests/standin)."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from pipeline.artifacts.features import feature_spec
from pipeline.basics.errors import NoAnswer, PipelineError
from pipeline.basics.files import ROOT
from pipeline.decoding.generate import Sampling, decode_plain
from pipeline.features.engines import child, open_source, source_identity
from pipeline.features.engines.child import SHARED, EngineDied
from pipeline.features.schema import TextRow
from pipeline.features.shards import ANSWERS, FeatureStore
from pipeline.features.source import GenerationPrompt
from pipeline.lm.config import TargetConfig
from pipeline.recipe.recipe import Recipe
from preprocess.dump.compare import compare
from preprocess.dump.worker import FeatureWorker
from preprocess.regenerate import regenerate
from preprocess.verify import damaged_shards
from tests import engines
from tests.kit import PATIENCE, dump_here, recipe_tree, save_tiny_target, wait_until, without_ray, write_sharegpt

TEXTS = [[5, 9, 33, 7, 200], list(range(40, 75)), [11, 12]]


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Callable[..., str]:
    return lambda *arguments, **options: engines.environment(
        tmp_path_factory.mktemp("environment"), *arguments, **options
    )


def configured(target: Path, python: str, **options) -> TargetConfig:
    keys = {"engine": "vllm", "engine_python": python, "engine_options": options}
    return TargetConfig(model=str(target), dtype="float32", device="cpu", **keys)


def nothing_stays(python: str) -> None:
    """Check that neither a process nor a folder of that environment's engines remains."""
    assert all(folder.parent == SHARED for folder in engines.started(python).values())
    wait_until(lambda: not engines.left_of(python))


@pytest.fixture(scope="module")
def engine(tiny_target, environment):
    python = environment()
    source = open_source(configured(tiny_target, python), [1])
    yield source
    source.close()
    nothing_stays(python)


def greedy(source, tokens: int = 12) -> Sampling:
    return Sampling(tokens, source.stop_ids)


def test_it_says_what_its_states_are_and_who_computes_them(engine, tiny_target, environment):
    identity = source_identity(configured(tiny_target, environment()), [1])
    assert engine.identity == identity
    assert (identity.engine, identity.version, identity.dtype, identity.layers) == ("vllm", "0.0.0", "float32", (1,))


def test_states_and_answers_are_those_of_the_targets_own_forward_whoever_asks_at_once(engine, loaded_target):
    texts = [[*text, number] for number in range(5) for text in TEXTS]

    def ask(text):
        (states_TSD,) = engine.states([text])
        (answer,) = engine.answers([GenerationPrompt(text)], greedy(engine), capture=True)
        return states_TSD, answer

    with ThreadPoolExecutor(4) as threads:
        for text, (states_TSD, answer) in zip(texts, threads.map(ask, texts), strict=True):
            torch.testing.assert_close(states_TSD, loaded_target.capture_all(torch.tensor([text]), [1])[0])
            assert answer.tokens == decode_plain(loaded_target, text, greedy(engine)).tokens
            expected = loaded_target.capture_all(torch.tensor([text + answer.tokens]), [1])[0]
            torch.testing.assert_close(answer.states_TSD[:-1], expected[:-1])
            assert not answer.states_TSD[-1].any()  # the state of the last token is not computed


def test_no_file_stays_of_answers_without_states_nor_of_states_that_nobody_takes(engine):
    folder = engine._engine._folder
    for text, answer in zip(TEXTS, engine.answers([GenerationPrompt(t) for t in TEXTS], greedy(engine)), strict=True):
        assert answer.states_TSD is None and answer.tokens, text
    assert not list(folder.iterdir())
    for _ in engine.states(TEXTS):
        break
    list(engine.states(TEXTS))
    assert not list(folder.iterdir())


@pytest.mark.long
def test_where_shared_memory_is_full_states_go_elsewhere_and_it_gives_signs_of_life(
    tiny_target, environment, monkeypatch
):
    monkeypatch.setattr(child, "MIN_FREE_BYTES", 1 << 60)
    python, signs = environment("slow"), []
    source = open_source(configured(tiny_target, python), [1])
    (answer,) = source.answers([GenerationPrompt(TEXTS[0])], Sampling(20, frozenset()), True, lambda: signs.append(1))
    source.close()
    assert signs and len(answer.states_TSD) == len(TEXTS[0]) + 20
    assert [folder.parent for folder in engines.started(python).values()] == [Path(tempfile.gettempdir())]
    wait_until(lambda: not engines.left_of(python))


def test_a_text_that_the_engine_refuses_is_refused_alone(engine):
    prompts = [GenerationPrompt([5] * 1024)]
    with pytest.raises(NoAnswer, match="longer than the maximum model length"):
        list(engine.answers(prompts, greedy(engine)))
    assert len(list(engine.states(TEXTS))) == 3


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("memory", PipelineError, "does not load it.*CUDA out of memory"),
        pytest.param(
            "crowded", EngineDied, "ended with status 1, RuntimeError: CUDA out of memory", marks=pytest.mark.long
        ),
        pytest.param(
            "disk",
            PipelineError,
            "jakiro-states-.*could not be written.*No space left on device",
            marks=pytest.mark.long,
        ),
    ],
)
def test_what_goes_wrong_in_the_engine_is_told_and_nothing_of_it_stays(tiny_target, environment, fault, error, message):
    python, source = environment(fault), None
    try:
        with pytest.raises(error, match=message):
            source = open_source(configured(tiny_target, python), [1])
            for _ in range(5):
                list(source.states(TEXTS))
    finally:
        if source is not None:
            source.close()
    nothing_stays(python)


def test_an_engine_that_dies_in_mid_step_stays_gone(tiny_target, environment):
    python = environment("dies")
    source = open_source(configured(tiny_target, python), [1])
    for _ in range(2):
        with pytest.raises(EngineDied, match="status -9"):
            for _ in range(5):
                list(source.states(TEXTS))
    nothing_stays(python)  # though nobody closed it


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_whoever_owned_it_is_killed_and_nothing_of_it_stays(tiny_target, environment, number):
    """This holds even if the engine hangs in a step."""
    python = environment("hangs")
    script = (
        "import signal; from tests.pipeline.test_vllm import TEXTS, configured\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # SIGINT is ignored if the tests run in background
        "from pipeline.features.engines import open_source\n"
        f"source = open_source(configured({str(tiny_target)!r}, {python!r}), [1])\n"
        "while True: list(source.states(TEXTS))\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    wait_until(lambda: any(Path(python).parent.glob("hangs-*")), owner)
    owner.send_signal(number)
    owner.wait(PATIENCE)
    nothing_stays(python)


def test_a_dump_by_an_engine_has_the_rows_and_the_states_of_one_by_transformers(tiny_target, environment, tmp_path):
    """The target's own answers have their states from the same forward pass; a dump has one engine."""
    source, drafts = write_sharegpt(tmp_path / "data.json", 40), {"eagle3": {"kind": "eagle3", "auxiliary_layers": [1]}}
    manifests, stores = {}, {}
    for engine in ("transformers", "vllm"):
        tree = recipe_tree(tiny_target, source, tmp_path / engine)
        tree["draft"] |= drafts
        tree["data"] |= {"calibration_prompts": 3}
        tree["features"] |= {"stored_dtype": "float32", "answer_tokens": 9}
        if engine == "vllm":
            tree["target"] |= {"engine": "vllm", "engine_python": environment()}
        recipe = Recipe.model_validate(tree)
        manifests[engine] = dump_here(recipe)
        spec = feature_spec(recipe)
        stores[engine] = [
            FeatureStore(recipe.paths.features, split, spec) for split in ("train", "validation", ANSWERS)
        ]
    vllm_spec, transformers_spec = manifests["vllm"].spec, manifests["transformers"].spec
    assert all(shard.off is None for shard in manifests["transformers"].shards)
    assert all(0 < shard.off < 1e-5 for shard in (*manifests["vllm"].shards, *manifests["vllm"].answers))
    assert (vllm_spec.engine, vllm_spec.engine_version) == (
        "vllm",
        "0.0.0",
    ) and vllm_spec.recipe == transformers_spec.recipe
    for transformers_store, vllm_store in zip(stores["transformers"], stores["vllm"], strict=True):
        assert len(transformers_store) == len(vllm_store) > 0
        for number in range(len(transformers_store)):
            want, got = transformers_store.row(number), vllm_store.row(number)
            assert got.doc_id == want.doc_id and got.input_ids.tolist() == want.input_ids.tolist()
            assert got.loss_mask.tolist() == want.loss_mask.tolist()
            last = len(want.input_ids) - (transformers_store is stores["transformers"][2])
            torch.testing.assert_close(got.hidden_TD[:last], want.hidden_TD[:last])
            torch.testing.assert_close(got.auxiliary_TKD[:last], want.auxiliary_TKD[:last])
    lines, wrong = compare(recipe.paths.features, vllm_spec, recipe.target, 4, against="transformers")
    assert wrong is None and lines[1].startswith("vllm 0.0.0 against transformers")
    assert [line.split(":")[0].strip() for line in lines[2:4]] == ["the last state, normed", "layer 1"]
    (_, equal_tokens, tokens) = re.fullmatch(r"(.*) after ([\d,]+) of ([\d,]+) tokens", lines[4]).groups()
    assert equal_tokens == tokens
    other_target = recipe.target.model_copy(update={"model": str(save_tiny_target(tmp_path / "other", seed=1))})
    assert compare(recipe.paths.features, vllm_spec, other_target, 4, against="transformers")[1] is not None
    tree["target"] = {k: v for k, v in tree["target"].items() if not k.startswith("engine")}
    with pytest.raises(PipelineError, match=r"computed by vllm 0.0.0, this run has transformers \d"):
        dump_here(Recipe.model_validate(tree))
    tree["target"] |= {"engine": "vllm", "engine_python": environment(version="0.0.1")}
    with pytest.raises(PipelineError, match=r"computed by vllm 0.0.0, this run has vllm 0.0.1"):
        dump_here(Recipe.model_validate(tree))


def test_answers_and_their_states_come_out_of_one_job_as_they_do_of_two(environment, tmp_path):
    """Jobs: with the engine, in one pass; with transformers, in two; and regenerate.py, then a dump of its result."""
    target = save_tiny_target(tmp_path / "target")
    model = LlamaForCausalLM.from_pretrained(target)
    model.lm_head.weight.data[256] *= 8
    model.lm_head.weight.data[94:256] = 0  # it answers in letters, whose tokens are those of their text
    model.save_pretrained(target)
    rows: dict[str, dict[str, TextRow]] = {}
    manifests = {}
    for way in ("vllm", "transformers", "regenerated"):
        tree = recipe_tree(target, write_sharegpt(tmp_path / "data.json", 40), tmp_path / way)
        tree["regenerate"] = {"max_new_tokens": 14}
        tree["features"] |= {"stored_dtype": "float32"}
        tree["data"] |= {"validation_dialogues": 50}
        if way == "vllm":
            tree["target"] |= {"engine": "vllm", "engine_python": environment()}
        if way == "regenerated":
            with without_ray():
                regenerate(Recipe.model_validate(tree))
            tree["data"] |= {"source": str(tmp_path / way / "regenerated/dialogues.jsonl")}
        else:
            tree["data"] |= {"answers": "target"}
        recipe = Recipe.model_validate(tree)
        manifests[way], spec = dump_here(recipe), feature_spec(recipe)
        manifest = manifests[way]
        assert (manifest.text == {}) == (way != "regenerated")
        rows[way] = {}
        for split in ("train", "validation"):
            store = FeatureStore(recipe.paths.features, split, spec)
            rows[way] |= {row.doc_id: row for row in map(store.row, range(len(store)))}
        counts = manifest.accounting
        fates = sum(counts["rejected"].values()) + sum(counts["skipped"].values())
        assert counts["accepted"] + fates == 40 == counts["records"] and len(rows[way]) == counts["accepted"] > 20
        assert damaged_shards(recipe.paths.features, manifest) == {}
    assert rows["vllm"].keys() == rows["transformers"].keys() == rows["regenerated"].keys()
    longer = 0
    for doc_id, row in rows["transformers"].items():
        vllm_row, regenerated_row = rows["vllm"][doc_id], rows["regenerated"][doc_id]
        length = len(row.input_ids)
        assert vllm_row.input_ids.tolist() == row.input_ids.tolist() == regenerated_row.input_ids[:length].tolist()
        assert vllm_row.loss_mask.tolist() == row.loss_mask.tolist() == regenerated_row.loss_mask[:length].tolist()
        longer += len(regenerated_row.input_ids) > length  # by the template's tokens after the last answer
        torch.testing.assert_close(vllm_row.hidden_TD[:-1], row.hidden_TD[:-1])
        torch.testing.assert_close(row.hidden_TD, regenerated_row.hidden_TD[:length])
        assert (
            not vllm_row.hidden_TD[-1].any() or len(regenerated_row.input_ids) == length
        )  # then all tokens were forwarded
    edits = manifests["vllm"].accounting["edits"]
    assert edits == manifests["transformers"].accounting["edits"] and 0 < edits["cut_answer"] < 40
    assert 10 < longer == 40 - edits["rendered_otherwise"] < 40  # these were forwarded again
    tree |= {"output": str(tmp_path / "transformers")}
    tree["data"] |= {"answers": "target", "source": str(tmp_path / "data.json")}
    again = Recipe.model_validate(tree)
    folder = again.paths.features
    contents = {path.name: path.read_bytes() for path in folder.glob("*.arrow")}
    (folder / "text-train-000001.arrow").unlink()  # its shard is made again with it
    dump_here(again)
    assert {path.name: path.read_bytes() for path in folder.glob("*.arrow")} == contents


@pytest.mark.parametrize(("batch_invariant", "version"), [("0", "0.0.1"), ("1", "0.0.0")])
def test_a_node_with_another_version_of_the_engine_dumps_nothing(
    tiny_target, environment, tmp_path, monkeypatch, batch_invariant, version
):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", batch_invariant)
    tree = recipe_tree(tiny_target, write_sharegpt(tmp_path / "data.json"), tmp_path / "run")
    tree["target"] |= {"engine": "vllm", "engine_python": environment()}
    recipe = Recipe.model_validate(tree)
    worker = FeatureWorker(recipe, tmp_path, replace(feature_spec(recipe), engine_version=version))
    this_version = "0.0.0" if batch_invariant == "0" else "0.0.0, batch-invariant"
    with pytest.raises(PipelineError, match=f"has vllm {this_version}, but the dump is one of {version}: install"):
        worker.ready()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("other", r"vllm 0.0.0 does not compute the states of .*relative error \d.*last \d"),
        # The message names the first token that differs (vllm#56417).
        ("text", r"changes the text while it captures .* generates token \d+ .*, not \d+ "),
    ],
)
def test_an_engine_that_computes_or_says_something_else_dumps_nothing(
    tiny_target, environment, tmp_path, fault, message
):
    tree = recipe_tree(tiny_target, write_sharegpt(tmp_path / "data.json"), tmp_path / "run")
    tree["target"] |= {"engine": "vllm", "engine_python": environment(fault)}
    with pytest.raises(PipelineError, match=message):
        dump_here(Recipe.model_validate(tree))
    assert not list((tmp_path / "run/features").glob("*.arrow"))


@pytest.mark.parametrize("python", ["/no/python", sys.executable, "/bin/false"])
def test_an_environment_without_vllm_is_named_when_it_is_wanted(tiny_target, python):
    """Reading a dump does not require the environment."""
    config = configured(tiny_target, python)
    assert source_identity(config, []).version == ""
    with pytest.raises(PipelineError, match=rf"engine_python='{python}' is not.*pip install infra/vllm_jakiro"):
        open_source(config)
    with pytest.raises(PipelineError, match="engine_python is not given"):
        open_source(config.model_copy(update={"engine_python": None}))


def test_a_text_as_long_as_the_engine_takes_leaves_it_no_room(tiny_target, environment, tmp_path):
    tree = recipe_tree(tiny_target, write_sharegpt(tmp_path / "data.json"), tmp_path / "run")
    keys = {"engine": "vllm", "engine_python": environment(), "engine_options": {"max_model_len": 160}}
    tree["target"] |= keys
    with pytest.raises(PipelineError, match=r"data.max_length=160, but vllm takes texts of at most 159 tokens"):
        dump_here(Recipe.model_validate(tree))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"engine": "vllm"}, "requires engine_python"),
        ({"tensor_parallel": 2}, "tensor_parallel does not apply to engine='transformers'"),
        (
            {"engine": "vllm", "engine_python": "p", "engine_options": {"enable_prefix_caching": True}},
            "Expected some of",
        ),
        ({"engine": "vllm", "engine_python": "p", "engine_options": {"hf_token": "x"}}, "Expected some of"),
    ],
)
def test_keys_that_do_not_fit_are_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        TargetConfig(model="m", **keys)
