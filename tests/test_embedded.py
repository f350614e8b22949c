"""The embedded default, for real: the 135M target, its template, and the smoke recipe from dump to release."""

import json
import sys

import pytest
import torch

from pipeline import embedded
from pipeline.chat import Unusable, encode
from pipeline.recipe import load_recipe
from pipeline.sections import DataConfig, TargetConfig
from pipeline.target import load_ends, load_tokenizer
from preprocess.dialogues import clean
from preprocess.sources import Tail, read_records
from tests.kit import ROOT, run_command

pytestmark = pytest.mark.real
TARGET = TargetConfig(model="embedded:smollm2-135m-instruct", device="cpu")


def test_the_converted_target_has_no_quantisation_left():
    folder = embedded.model_folder("smollm2-135m-instruct")
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == "float32"
    assert not [key for key in config if "quant" in key or "gguf" in key or "name_or_path" in key]
    assert not list(folder.glob("*.bin")) and not list(folder.glob("*.gguf"))
    assert "Paris" in json.loads((folder / "converted.json").read_text())["checked"]


def test_the_ends_are_read_without_the_rest_of_the_target():
    ends = load_ends(TARGET)
    assert ends.embedding_VD.shape == (49152, 576)
    assert torch.equal(ends.head.linear.weight, ends.embedding_VD)  # tied


def test_the_template_masks_the_answers_only():
    tokenizer = load_tokenizer(TARGET)
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!\n    indented"},
        {"role": "user", "content": "Bye"},
        {"role": "assistant", "content": "See you."},
    ]
    encoded = encode(tokenizer, messages, 1000)
    whole = tokenizer.decode(encoded.input_ids)
    assert whole.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    answers = tokenizer.decode(encoded.input_ids[encoded.loss_mask.astype(bool)])
    assert answers == "Hello!\n    indented<|im_end|>See you.<|im_end|>"


def test_the_embedded_dialogues_are_read_to_their_torn_end():
    tail, usable, reasons = Tail(), 0, {}
    for record in read_records(DataConfig(source="embedded:sharegpt"), tail):
        try:
            clean(record)
            usable += 1
        except Unusable as reason:
            reasons[str(reason)] = reasons.get(str(reason), 0) + 1
    assert tail.torn_after == 17_671
    assert usable + sum(reasons.values()) == 17_671
    assert reasons == {"blank_turn": 70, "no_exchange": 277, "repeated_role": 31}


def test_there_are_164_coding_prompts():
    prompts = embedded.human_eval_prompts()
    assert len(prompts) == len({prompt["question_id"] for prompt in prompts}) == 164


def test_the_smoke_recipe_from_dump_to_release(tmp_path):
    """Two real DeepSpeed ranks; fp32 greedy answers of both drafts equal plain decoding's on the real target."""
    recipe = "infra/recipes/smoke.toml"
    sets = ["--set", f"output={tmp_path}", "--set", "train.ranks=2", "--set", "eval.temperatures=[0.0]"]
    done = run_command([sys.executable, "-m", "pipeline", "run", recipe, *sets], timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "release/report.json").read_text())
    greedy = [entry for entry in report["results"] if entry["temperature"] == 0]
    assert len(greedy) == 4 and all(entry["gate"]["identical"] == entry["gate"]["checked"] == 1 for entry in greedy)
    assert load_recipe(ROOT / recipe).publish.draft == "jakiro"
    assert (tmp_path / "release/README.md").read_text().startswith("---\n")
