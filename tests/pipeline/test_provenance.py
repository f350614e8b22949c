"""The provenance that an artifact records, and the private facts that it leaves out."""

import json
import re

import pytest
import torch

from pipeline.artifacts.provenance import (
    describe_settings,
    hardware,
    own_recipe,
    read_recorded,
    write_own_recipe,
    write_provenance,
)
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import write_sealed
from pipeline.basics.public import public_name, public_text
from pipeline.recipe.identity import dump_keys, release_keys, training_keys
from pipeline.recipe.load import load_recipe
from pipeline.recipe.recipe import Recipe
from tests.kit import replace_once


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
        ("https://SECRET@host.example/data.json", "https://host.example/data.json"),
        ("s3://KEY:SE?CR#ET@bucket/run", "s3://bucket/run"),
        ("https://host.example/a@b/data.json", "https://host.example/a@b/data.json"),
        ("https://host.example/data.json?mail=a@b", "https://host.example/data.json"),
        ("simplecache::http://alice:secret@host/x.json", "simplecache::http://host/x.json"),
        ("zip://x.json::/home/alice/x.zip", "zip://x.json::x.zip"),
        ("simplecache::file:///home/alice/x.json", "simplecache::x.json"),
        ("hf://alice:secret@datasets/x", "hf://datasets/x"),
        ("abfs://container@account.dfs.example/run", "abfs://container@account.dfs.example/run"),
        ("hf://datasets/owner/name@revision/file.json", "hf://datasets/owner/name@revision/file.json"),
        ("https://host.example/hf_abcDEF123456/data.json", "https://host.example/***/data.json"),
        ("https://host.example/d/AbCdEfGh1234567890XyZ/f.jsonl", "https://host.example/d/***/f.jsonl"),
        (f"https://host.example/T0/{'9f8a' * 9}/d.json", "https://host.example/T0/***/d.json"),
        (f"hf://datasets/owner/name@{'9f8a' * 10}/d.json", f"hf://datasets/owner/name@{'9f8a' * 10}/d.json"),
        ("https://host.example/sk-proj-abc123def/x", "https://host.example/***/x"),
        ("https://host.example/xoxb-12-abcdef/x", "https://host.example/***/x"),
        ("https://host.example/x;token=abc/data.json", "https://host.example/x;token=***/data.json"),
        ("hf://hf-internal-testing/tiny-random", "hf://hf-internal-testing/tiny-random"),
    ],
)
def test_no_private_part_of_an_address_is_public(source, public):
    assert public_name(source) == public


def test_a_librarys_text_keeps_no_query_and_no_user():
    text = "GET https://cdn.host/x?Signature=ab12 failed (sftp://alice@host/y); /home/alice stays"
    assert public_text(text) == "GET https://cdn.host/x failed (sftp://host/y); /home/alice stays"


def test_the_dumps_own_recipe_is_the_recipe_for_this_user_alone(tiny_recipe, tmp_path):
    write_own_recipe(tmp_path, tiny_recipe)
    assert (tmp_path / "own-recipe.json").stat().st_mode & 0o777 == 0o600
    assert own_recipe(tmp_path, []) == tiny_recipe
    assert own_recipe(tmp_path, ["seed=7"]).seed == 7


def test_the_resolved_recipe_keeps_paths_to_itself(tiny_recipe, tmp_path):
    tree = tiny_recipe.model_dump(mode="json")
    tree["target"]["chat_template"] = "/home/alice/template.jinja"
    tree["eval"]["benchmarks"]["mine"] = {"source": "/home/alice/mine.jsonl"}
    tree["train"]["deepspeed"] = {"zero_optimization": {"offload_optimizer": {"nvme_path": "/mnt/alice"}}}
    tree["features"]["store"] = "s3://alices-bucket/run"
    tree["train"] |= {"shards": "/mnt/alice-1/shards"}
    write_provenance(tmp_path / "out", Recipe.model_validate(tree))
    written = "".join(path.read_text() for path in (tmp_path / "out").iterdir())
    assert "/home" not in written and "/mnt" not in written
    assert str(tmp_path) not in written and "alices-bucket" not in written
    resolved = json.loads((tmp_path / "out/recipe.json").read_text())
    assert resolved["target"]["chat_template"] == "template.jinja"
    assert resolved["draft"] == tree["draft"]
    assert resolved["train"]["shards"] is None


def differing(recipe: Recipe, **sections) -> tuple[Recipe, list[str]]:
    """Return a recipe with changed keys, and the keys that the weights of "eagle" depend on."""
    tree = recipe.model_dump(mode="json")
    for section, keys in sections.items():
        tree[section] = {**tree[section], **keys}
    changed = Recipe.model_validate(tree)
    return changed, training_keys(changed, "eagle")


def test_the_keys_that_a_draft_was_trained_with_otherwise_are_named_with_both_values(tiny_recipe, tmp_path):
    write_provenance(tmp_path, tiny_recipe)
    stored_recipe = read_recorded(tmp_path)
    assert stored_recipe.differences(*differing(tiny_recipe)) == ""
    drafts = {name: {**config.to_json(), "fc_bias": True} for name, config in tiny_recipe.draft.items()}
    changed = differing(tiny_recipe, target={"template_keywords": {"enable_thinking": False}}, draft=drafts)
    assert stored_recipe.differences(*changed) == (
        "target.template_keywords.enable_thinking: absent -> false, draft.eagle.fc_bias: false -> true"
    )
    unasked = {"eval": {"tree": {"depth": 2}}, "features": {"batch_tokens": 7}, "train": {"checkpoint_every": 9}}
    assert stored_recipe.differences(*differing(tiny_recipe, **unasked)) == ""
    shallow = {"tree": {**tiny_recipe.eval.tree.to_json(), "depth": 2}}
    watched, keys = differing(tiny_recipe, train={"keep": "best"}, eval=shallow)
    assert stored_recipe.differences(watched, keys) == 'train.keep: "last" -> "best", eval.tree.depth: 3 -> 2'


def test_layers_and_dtype_that_follow_from_the_drafts_are_named(tiny_recipe, tmp_path):
    write_provenance(tmp_path, tiny_recipe)
    drafts = {**tiny_recipe.model_dump(mode="json")["draft"], "third": {"kind": "eagle3"}}
    changed, _ = differing(tiny_recipe, draft=drafts)
    assert read_recorded(tmp_path).differences(changed, dump_keys(changed)) == (
        'features.stored_dtype: "bfloat16" -> "float8_e4m3fn", features.auxiliary_layers: [] -> ["default"]'
    )


def test_this_users_own_recipe_also_tells_the_folder_of_a_path(tiny_recipe, tmp_path):
    write_provenance(tmp_path, tiny_recipe)
    moved, keys = differing(tiny_recipe, data={"source": "/elsewhere/data.json"})
    assert describe_settings(read_recorded(tmp_path), moved, keys).endswith(
        "lies in another folder, which recipe.json does not keep"
    )
    write_own_recipe(tmp_path, tiny_recipe)
    message = read_recorded(tmp_path).differences(moved, keys)
    assert message == f'data.source: "{tiny_recipe.data.source}" -> "/elsewhere/data.json"'


HOSTILE = {
    "no object": b"[1]",
    "no JSON": b"{",
    "deep": b'{"data": ' + b"[" * 100_000,
    "no seal": b'{"data": {"max_length": 1}}',
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_a_recipe_that_cannot_be_read_names_nothing_and_stops_nothing(tiny_recipe, tmp_path, content):
    (tmp_path / "recipe.json").write_bytes(content)
    assert describe_settings(read_recorded(tmp_path), *differing(tiny_recipe)).startswith(
        "which keys differ is not known: no"
    )


def test_a_strangers_recipe_is_shown_cut_and_moves_no_cursor(tiny_recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret-of-mine")
    tree = {"data": {"source": "\x1b[2J" + "x" * 9000, "split": "secret-of-mine"}, "features": {"stored_dtype": [{}]}}
    tree |= {"target": {f"key\x1b{number}": 1 for number in range(99)}, "draft": {"eagle": {"kind": "\x1b"}}}
    write_sealed(tmp_path / "recipe.json", tree)
    stored_recipe = read_recorded(tmp_path)
    message = [
        describe_settings(stored_recipe, tiny_recipe, [section]) for section in ("data", "target", "draft", "features")
    ]
    assert stored_recipe.layers is None and not any("\x1b" in line or "secret-of-mine" in line for line in message)
    assert max(map(len, message)) < 2500 and re.search(r", and \d+ more keys$", message[1])
    assert describe_settings(stored_recipe, tiny_recipe, ["target.key\x1b1"]) == r"'target.key\x1b1': 1 -> absent"


def test_the_hardware_of_a_run_on_the_cpu_is_the_cpu(monkeypatch):
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr("torch.accelerator.current_device_index", lambda: 0)
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 8)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "an accelerator")
    assert " cores, " in hardware("cpu")
    assert hardware("auto") == hardware("cuda") == "an accelerator (one of 8)"
    assert hardware("spread") == "8 x an accelerator"


def test_the_recipe_beside_an_artifact_can_be_used_and_not_have_changed(tiny_recipe, tmp_path):
    """A recipe without a seal is a user's own."""
    write_provenance(tmp_path, tiny_recipe)
    path = tmp_path / "recipe.json"
    assert load_recipe(path).draft == tiny_recipe.draft
    replace_once(path, '"max_length": 160', '"max_length": 161')
    with pytest.raises(PipelineError, match=r"recipe\.json was changed or damaged .*on purpose, remove its 'seal'"):
        load_recipe(path)
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != "seal"}))
    assert load_recipe(path).data.max_length == 161


@pytest.mark.parametrize("content", [b"[" * 2000, b'{"name": "\xff"}', b"[1]"])
def test_a_recipe_that_is_no_json_object_is_one_clear_error(tmp_path, content):
    (tmp_path / "recipe.json").write_bytes(content)
    with pytest.raises(PipelineError, match=r"recipe\.json (cannot be parsed|is a JSON list)"):
        load_recipe(tmp_path / "recipe.json")


def test_what_differs_of_a_release_is_named_with_both_values(tiny_recipe, tmp_path):
    write_provenance(tmp_path, tiny_recipe)
    release = read_recorded(tmp_path)
    assert release.differences(tiny_recipe, release_keys(tiny_recipe)) == ""
    tree = tiny_recipe.model_dump(mode="json")
    tree["eval"] |= {"max_new_tokens": 9, "workers": 2}
    tree["name"] = "other"  # neither this nor workers count
    tree["eval"]["benchmarks"]["more"] = {"source": "embedded:humaneval"}
    del tree["draft"]["eagle"]
    changed = Recipe.model_validate(tree)
    keys = release.differences(changed, release_keys(changed))
    assert "eval.max_new_tokens: 8 -> 9" in keys and "workers" not in keys and "name:" not in keys
    removed = Recipe.model_validate(tiny_recipe.model_dump(mode="json") | {"draft": tree["draft"]})
    assert "draft.eagle.vocabulary: null -> absent" in release.differences(removed, release_keys(removed))
    more = Recipe.model_validate(tree | {"draft": tiny_recipe.model_dump(mode="json")["draft"]})
    added = release.differences(more, release_keys(more))
    assert 'eval.benchmarks.more.source: absent -> "embedded:humaneval"' in added
