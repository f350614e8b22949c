"""Published drafts are fetched by repository and commit and measured next to the recipe's own; figures of other
machines stay.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import pytest
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from eval import main as evaluation
from eval.published import write_release_recipe
from eval.release.card import model_index, released_method
from eval.release.publish import earlier_rows
from pipeline.artifacts import checkpoint, provenance
from pipeline.artifacts.published import download_published
from pipeline.artifacts.reports import ResultRow, read_rows, write_rows
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import sha256
from pipeline.decoding.config import Method, TreeConfig
from pipeline.recipe.identity import dump_hash, train_hash
from pipeline.recipe.load import load_recipe, override_arguments
from pipeline.recipe.recipe import Recipe
from pipeline.running import stages
from pipeline.serving.export import export
from tests.hub import HEAD, Hub, reached
from tests.kit import call, change_sealed, recipe_tree, write_recipe
from tests.pipeline.taught import make_draft, write_release


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A function hub(folder, "me/draft") that puts the folder's content into the Hub's cache, under `HEAD`."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def put(folder: Path, repository: str) -> None:
        shutil.copytree(folder, tmp_path / "hub" / f"models--{repository.replace('/', '--')}" / "snapshots" / HEAD)

    return put


@pytest.fixture
def tree(tiny_target, tmp_path) -> dict:
    """The tree of a recipe that measures two prompts of a file, and dumps and trains nothing."""
    lines = [json.dumps({"question_id": f"q{n}", "category": "", "turns": [f"turn {n}"]}) for n in range(2)]
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    recipe = recipe_tree(tiny_target, tmp_path / "data.json", tmp_path / "run")
    recipe["eval"] |= {"benchmarks": {"b": {"source": str(tmp_path / "b.jsonl")}}, "temperatures": [0.0]}
    recipe["draft"] = {"jakiro": recipe["draft"]["jakiro"] | {"window": 5}}
    return recipe


@pytest.fixture
def release(tree, loaded_target, embed_head, tmp_path) -> Path:
    """A draft with random weights as somebody released it, without figures."""
    owner_recipe = Recipe.model_validate(tree | {"output": str(tmp_path / "theirs")})
    draft = make_draft(loaded_target, embed_head, owner_recipe.draft["jakiro"])
    method = Method(draft="jakiro", tree=TreeConfig(depth=2, top_k=2, nodes=5))
    facts = {"parameters": 5, "trained_tokens": 7}
    return write_release(tmp_path / "r", draft, owner_recipe, "jakiro", method, facts)


def test_the_hubs_index_holds_no_speed_up_that_is_noise():
    where = {"benchmark": "b", "temperature": 0.0}
    tau = ResultRow("decoded", "jakiro", "tau", 1.12, interval=[1.0, 1.3], details={"prompts": 9}, **where)
    for value, bounds, listed in ((1.36, [0.69, 2.38], {"tau"}), (1.1, [1.05, 1.2], {"tau", "speed-up"})):
        figures = {"tau": tau, "speedup": ResultRow("decoded", "jakiro", "speedup", value, interval=bounds, **where)}
        results = model_index(("b", 0.0, "jakiro"), figures, "jakiro")
        assert {result.metric_type for result in results} == listed
        assert {result.metric_value for result in results} <= {1.12, 1.1}


def test_drafts_that_beat_the_published_one_are_named_at_the_runs_end(tiny_recipe, monkeypatch, capsys):
    tree = tiny_recipe.model_dump(mode="json")
    tree["draft"]["lookup"] = {"kind": "prompt-lookup"}
    recipe = Recipe.model_validate(tree)
    recipe.paths.eval.mkdir(parents=True)
    drafts = {name: {"method": method.to_json(), "corpora": []} for name, method in recipe.methods.items()}
    monkeypatch.setattr(stages, "read_report", lambda _: {"drafts": drafts, "table": "the table", "plots": {}})

    def printed(**means: float) -> str:
        """Return the lines printed for two benchmarks with these geometric means."""
        write_rows(
            recipe.paths.eval,
            [
                ResultRow("decoded", name, "speedup", mean * factor, benchmark=benchmark, temperature=0.0)
                for name, mean in means.items()
                for benchmark, factor in (("a", 0.8), ("b", 1.25))
            ],
        )
        stages._print_release(recipe)
        return capsys.readouterr().out

    message = printed(jakiro=1.4, eagle=1.5, lookup=1.6)
    assert message.startswith("the table\n") and "faster than the released `jakiro` (1.40x" in message
    assert ": `lookup` (1.60x), `eagle` (1.50x)." in message
    assert "faster than" not in printed(jakiro=1.4, eagle=1.4, lookup=0.9)


def published(tree: dict, repository: str = "me/draft", revision: str = HEAD) -> Recipe:
    return Recipe.model_validate(tree | {"published": {"jakiro": f"{repository}@{revision}"}})


def test_a_release_of_ours_is_fetched_once_with_its_weights_and_its_facts(tree, release, hub):
    hub(release, "me/draft")
    recipe = published(tree)
    assert recipe.to_train == [] and recipe.trained == ["jakiro"]
    messages: list[str] = []
    download_published(recipe, messages.append)
    download_published(recipe, messages.append)
    assert messages == [f"jakiro: fetched from me/draft, revision {HEAD}"]
    saved = checkpoint.require_trained_under(recipe, "jakiro")
    assert saved.weights_sha256 == sha256(release / checkpoint.WEIGHTS)
    assert saved.training["published"] == {"repository": "me/draft", "revision": HEAD}
    assert saved.training["trained_tokens"] == 7 and "imported" not in saved.training
    with pytest.raises(PipelineError, match="trained with other settings"):  # of another commit
        checkpoint.require_trained_under(published(tree, revision="b" * 40), "jakiro")


def test_a_draft_of_others_is_imported(tree, release, hub, tmp_path):
    """The draft lies as vLLM loads it: without this project's config."""
    export(release, "vllm", tmp_path / "exported")
    hub(tmp_path / "exported", "they/draft")
    recipe = published(tree, "they/draft")
    download_published(recipe)
    saved = checkpoint.require_trained_under(recipe, "jakiro")
    assert saved.weights_sha256 == sha256(release / checkpoint.WEIGHTS)
    assert saved.training["imported"]["from"] == "they/draft"


def test_a_draft_in_several_files_is_fetched_by_its_index(tree, release, tmp_path, monkeypatch):
    """Only requested files are fetched."""
    export(release, "vllm", tmp_path / "exported")
    weights, patterns = load_file(tmp_path / "exported/model.safetensors"), []
    parts = {f"part-{n}.safetensors": dict(list(weights.items())[n::2]) for n in range(2)}
    for file, tensors in parts.items():
        save_file(tensors, tmp_path / "exported" / file)
    index = {"weight_map": {name: file for file, tensors in parts.items() for name in tensors}}
    (tmp_path / "exported/model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "exported/model.safetensors").unlink()

    def download(repository, *, revision, allow_patterns):
        patterns.append(allow_patterns)
        (tmp_path / "cache").mkdir(exist_ok=True)
        for path in (tmp_path / "exported").iterdir():
            if any(fnmatch(path.name, pattern) for pattern in allow_patterns):
                shutil.copy(path, tmp_path / "cache")
        return str(tmp_path / "cache")

    monkeypatch.setattr("pipeline.artifacts.published.snapshot_download", download)
    download_published(published(tree, "they/draft"))
    saved = checkpoint.require_trained_under(published(tree, "they/draft"), "jakiro")
    assert saved.weights_sha256 == sha256(release / checkpoint.WEIGHTS) and patterns[1] == sorted(parts)


def test_what_is_not_there_or_does_not_fit_is_refused(tree, release, hub, tmp_path):
    with pytest.raises(PipelineError, match=r"me/draft, revision a+, cannot be fetched"):
        download_published(published(tree))
    hub(release, "me/draft")
    recipe = published(tree)
    recipe.paths.draft("jakiro").mkdir(parents=True)
    (recipe.paths.draft("jakiro") / checkpoint.METRICS).write_text("")
    with pytest.raises(PipelineError, match="holds an interrupted training"):
        download_published(recipe)
    change_sealed(release / "config.json", lambda raw: raw["target"].update(fingerprint="0" * 16))
    hub(release, "me/other-target")
    with pytest.raises(PipelineError, match="target"):
        download_published(published(tree | {"output": str(tmp_path / "other")}, "me/other-target"))
    tree["draft"]["jakiro"]["contrast"] = "scalar"
    message = r"other settings than draft\.jakiro: set draft\.jakiro\.contrast='router' \(here 'scalar'\)"
    with pytest.raises(PipelineError, match=message):
        download_published(published(tree | {"output": str(tmp_path / "third")}))
    assert not (tmp_path / "third/drafts/jakiro/config.json").exists()


@pytest.mark.parametrize(
    ("name", "address", "message"),
    [
        ("jakiro", "a/b@main", "'a/b@main': expected OWNER/NAME@COMMIT of the Hub, the commit in 40 hex digits"),
        ("jakiro", f"/a/folder@{HEAD}", "expected OWNER/NAME@COMMIT"),
        ("eagle", f"a/b@{HEAD}", r"published\.eagle is not a draft with weights"),
    ],
)
def test_what_names_no_commit_of_a_draft_is_refused(tree, name, address, message):
    with pytest.raises(ValueError, match=message):
        Recipe.model_validate(tree | {"published": {name: address}})


def test_it_is_measured_and_what_another_machine_measured_of_the_same_weights_stays(tree, release, hub, tmp_path):
    """Each release adds figures; building one again adds nothing."""
    hub(release, "me/draft")
    tree["published"] = {"jakiro": f"me/draft@{HEAD}"}
    path, folder = write_recipe(tree, tmp_path / "recipe.toml"), tmp_path / "run/release"
    call(evaluation.main, str(path))
    card = (folder / "README.md").read_text()
    assert f"**Weights of:** `me/draft`, revision `{HEAD}`" in card and "Also measured on" not in card
    assert "Each input sees the last 5 inputs of its text" in card and "tau by context length was not measured" in card
    write_rows(folder, [replace(row, origin=row.origin | {"hardware": "a large GPU"}) for row in read_rows(folder)])
    for _ in range(2):
        call(evaluation.main, str(path))
        card = (folder / "README.md").read_text()
        assert card.count("### Also measured on a large GPU, float32\n") == 1
    rows = read_rows(folder)
    assert len([row for row in rows if row.origin["hardware"] == "a large GPU"]) == len(rows) / 2
    assert {row.origin["weights_sha256"] for row in rows} == {sha256(folder / checkpoint.WEIGHTS)}
    assert not any(row.counts or row.answers for row in rows)
    (line,) = [line for line in card.split("### Also measured")[1].splitlines() if line.startswith("| b | 0 |")]
    assert line.startswith("| b | 0 | jakiro | depth 3, 7 nodes | 2 | 1.")


def row_of(weights: str = "w", **changes) -> ResultRow:
    """Return a row with these fields of it or of its origin changed."""
    origin = {"hardware": "A", "settings": {"dtype": "float32"}, "tree": {"nodes": 7}, "code_revision": "new"}
    origin = {key: changes.pop(key, value) for key, value in origin.items()} | {"weights_sha256": weights}
    return replace(ResultRow("decoded", "jakiro", "tau", 2.0, "b", 0.0, origin=origin), **changes)


def test_only_the_same_measurement_is_replaced(tmp_path):
    """The code revision does not matter; the weights do."""
    changes = [{"benchmark": "c"}, {"temperature": 1.0}, {"method": "other"}, {"instrument": "served"}]
    changes += [{"hardware": "B"}, {"settings": {"dtype": "bfloat16"}}, {"tree": {"nodes": 5}}]
    kept_rows = [row_of(**change, value=1.4) for change in changes]
    write_rows(tmp_path, [row_of(code_revision="old", value=1.0), *kept_rows, row_of("x", hardware="C")])
    assert earlier_rows(tmp_path, "w", [row_of()]) == kept_rows
    assert earlier_rows(tmp_path / "nothing", "w", [row_of()]) == []


def test_the_released_method_is_the_fastest_at_the_benchmarks_own_lengths(tiny_recipe):
    """Benchmarks "heldout:TOKENS" ask the same questions again; they decide only if nothing else was measured."""
    tree = tiny_recipe.model_dump(mode="json")
    tree["eval"]["benchmarks"] |= {f"heldout-{count}": {"source": f"heldout:{count}"} for count in (60, 90)}
    facts = {"method": Method(draft="jakiro").to_json(), "corpora": []}
    speeds = {"heldout": (1.5, 1.4), "heldout-60": (1.0, 1.2), "heldout-90": (1.0, 1.2)}
    rows = [
        ResultRow("decoded", method, "speedup", value, benchmark, 0.0)
        for benchmark, values in speeds.items()
        for method, value in zip(("jakiro", "jakiro-tuned"), values, strict=True)
    ]
    measured = {"drafts": dict.fromkeys(("jakiro", "jakiro-tuned"), facts)}
    for measured_rows, expected in ((rows, "jakiro"), (rows[2:], "jakiro-tuned")):
        assert released_method(Recipe.model_validate(tree), measured, measured_rows) == expected


def test_a_published_draft_changes_nothing_of_what_is_dumped_and_trained(tiny_recipe):
    """An EAGLE-3 draft requires three more states of every token, but only to train it."""
    tree = tiny_recipe.model_dump(mode="json")
    tree["draft"]["theirs"] = {"kind": "eagle3"}
    dumped = Recipe.model_validate(tree)
    assert dump_hash(dumped) != dump_hash(tiny_recipe)
    tree["published"] = {"theirs": f"me/draft@{HEAD}"}
    fetched = Recipe.model_validate(tree)
    assert dump_hash(fetched) == dump_hash(tiny_recipe)
    assert all(train_hash(fetched, name) == train_hash(tiny_recipe, name) for name in tiny_recipe.trained)


@pytest.fixture
def local_hub(tmp_path, monkeypatch) -> Iterator[Hub]:
    """A local Hub that answers requests, and its cache."""
    monkeypatch.chdir(tmp_path)
    with Hub(exists=True) as hub, reached(monkeypatch, hub, HF_HUB_CACHE=str(tmp_path / "hub")):
        yield hub


def measure(tiny_target, *arguments: str) -> None:
    """The default is measured at least: two prompts that come with the project."""
    settings = [f"target.model={tiny_target}", "eval.benchmarks.humaneval.prompts=2", "eval.max_new_tokens=4"]
    call(evaluation.main, *arguments, *override_arguments(settings))


@pytest.mark.real
def test_a_release_is_measured_by_its_address(tiny_target, release, local_hub, capsys):
    local_hub.files = {path.name: path.read_bytes() for path in release.iterdir()}
    measure(tiny_target, "me/draft")
    shown, run = capsys.readouterr().out, Path(f"runs/me/draft/{HEAD[:12]}")
    assert f"me/draft, revision {HEAD}: measured as described in {run}/recipe.json" in shown
    assert "not measured, for their prompts are its makers': b\nmeasured instead: humaneval" in shown
    rows = [row for row in read_rows(run / "release") if row.figure == "tau"]
    assert {(row.origin["hardware"], row.benchmark, row.method) for row in rows} == {
        (provenance.hardware("cpu"), "humaneval", "jakiro")
    }


def test_what_is_no_release_of_ours_and_no_recipe_is_told(tiny_target, local_hub):
    local_hub.files = {"config.json": b'{"architectures": ["TheirDraft"]}'}
    with pytest.raises(PipelineError, match="me/draft is no release of this project: name its kind and settings in"):
        measure(tiny_target, "me/draft")
    local_hub.exists = False
    with pytest.raises(PipelineError, match=r"refused the reading of me/draft \(404\).* It is no recipe here, either"):
        measure(tiny_target, "me/draft")
    with pytest.raises(PipelineError, match=r"recipe me/draft\.toml does not exist"):
        measure(tiny_target, "me/draft.toml")


def test_a_release_brings_its_sealed_template(release, local_hub):
    (release / "chat_template.jinja").write_text("{{ messages }}")
    checkpoint.seal_files(release)
    local_hub.files = {path.name: path.read_bytes() for path in release.iterdir()}
    path, _ = write_release_recipe("me/draft", ["target.model=me/target"])
    assert Path(load_recipe(path, []).target.chat_template).read_text() == "{{ messages }}"
