"""What an artifact says of where it comes from, and what it keeps to itself."""

import json

import pytest

from pipeline.provenance import hardware, public_name, write_provenance
from pipeline.recipe import Recipe


@pytest.mark.parametrize(
    ("source", "public"),
    [
        ("meta-llama/Meta-Llama-3-8B-Instruct", "meta-llama/Meta-Llama-3-8B-Instruct"),
        ("embedded:sharegpt", "embedded:sharegpt"),
        ("infra/templates/vicuna.jinja", "infra/templates/vicuna.jinja"),
        ("hf://datasets/owner/name/file.json", "hf://datasets/owner/name/file.json"),
        ("/home/alice/models/target", "target"),
        ("~/models/target", "target"),
        ("../alice/data.json", "data.json"),
        ("file:///home/alice/data.json", "data.json"),
        ("https://alice:secret@host.example/x/data.json?sig=abc#z", "https://host.example/x/data.json"),
        ("s3://bucket/data.json?token=abc", "s3://bucket/data.json"),
        ("s3://KEY:SE/CR+ET@bucket/run?region=x", "s3://bucket/run"),
        ("abfs://container@account.dfs.example/run", "abfs://container@account.dfs.example/run"),
        ("hf://datasets/owner/name@revision/file.json", "hf://datasets/owner/name@revision/file.json"),
    ],
)
def test_no_private_part_of_an_address_is_public(source, public):
    assert public_name(source) == public


def test_the_resolved_recipe_keeps_paths_and_credentials_to_itself(tiny_recipe, tmp_path):
    tree = tiny_recipe.model_dump(mode="json")
    tree["target"]["chat_template"] = "/home/alice/template.jinja"
    tree["eval"]["benchmarks"]["mine"] = {"source": "https://alice:secret@host.example/mine.jsonl"}
    tree["train"]["deepspeed"] = {"zero_optimization": {"offload_optimizer": {"nvme_path": "/mnt/alice"}}}
    tree["features"]["store"] = "s3://alice:secret@alices-bucket/run"
    tree["train"] |= {"shards": "/mnt/alice-1/shards", "resume": "/mnt/alice-2/states"}
    write_provenance(tmp_path / "out", Recipe.model_validate(tree))
    written = "".join(path.read_text() for path in (tmp_path / "out").iterdir())
    assert "secret" not in written and "/home" not in written and "/mnt" not in written
    assert str(tmp_path) not in written and "alices-bucket" not in written
    resolved = json.loads((tmp_path / "out/recipe.json").read_text())
    assert resolved["target"]["chat_template"] == "template.jinja"
    assert resolved["draft"] == tree["draft"]
    assert resolved["train"]["shards"] is resolved["train"]["resume"] is None


def test_the_hardware_of_a_run_on_the_cpu_is_the_cpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "an accelerator")
    assert " cores, " in hardware("cpu")
    assert hardware("auto") == hardware("cuda") == "an accelerator (one of 8)"
    assert hardware("spread") == "8 x an accelerator"
