"""Recipes: every misspelling is named, every contradiction refused, and each hash depends on exactly what it should."""

import copy
import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from pipeline.artifacts.provenance import write_provenance
from pipeline.basics.errors import PipelineError
from pipeline.basics.parse import parse_settings
from pipeline.basics.section import Section
from pipeline.basics.settings import Settings
from pipeline.decoding.config import Method, TreeConfig
from pipeline.lm.config import ENGINE_KEYS
from pipeline.recipe.identity import calibration_hash, dump_hash, regenerate_hash, run_hash, train_hash
from pipeline.recipe.load import load_recipe
from pipeline.recipe.recipe import Recipe
from tests.kit import recipe_tree

MINIMAL = """
name = "small"
output = "runs/small"

[target]
model = "some/model"

[data]
source = "data.json"

[draft.main]
kind = "jakiro"

[draft.other]
kind = "eagle"

[eval.methods.main.tree]
depth = 3
top_k = 4
nodes = 12

[eval.benchmarks.code]
source = "code.jsonl"

[publish]
draft = "main"
license = "mit"
"""


@pytest.fixture
def recipe_file(tmp_path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(MINIMAL)
    return path


@pytest.fixture
def tree(tmp_path) -> dict:
    return recipe_tree(tmp_path / "target", tmp_path / "data.json", tmp_path / "run")


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(PipelineError) as caught:
        load_recipe(path, list(overrides))
    return str(caught.value)


def test_a_minimal_recipe_takes_every_default(recipe_file):
    recipe = load_recipe(recipe_file)
    assert recipe.train.epochs == 20
    assert recipe.tree("main").nodes == 12
    assert recipe.tree("other").nodes == 60
    assert recipe.paths.run == Path("runs/small")
    assert recipe.paths.draft("main") == Path("runs/small/drafts/main")


# -- what is refused, and the words that a user needs ------------------------------------------------------------------


def misspelt(key: str, nearest: str) -> str:
    return f"{key}: unknown key {key.split('.')[-1]!r}; did you mean {nearest!r}?"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["sede=1"], misspelt("sede", "seed")),
        (["train.epoch=1"], misspelt("train.epoch", "epochs")),
        (["features.row_per_shard=1"], misspelt("features.row_per_shard", "rows_per_shard")),
        (["draft.main.expert=2"], misspelt("draft.main.expert", "experts")),
        (["eval.methods.main.tree.topk=2"], misspelt("eval.methods.main.tree.topk", "top_k")),
        (["eval.benchmarks.code.prompt=1"], misspelt("eval.benchmarks.code.prompt", "prompts")),
        (["publish.licence=mit"], misspelt("publish.licence", "license")),
        (["eval.sampled_repeats=1"], misspelt("eval.sampled_repeats", "repeats")),  # a key of earlier versions
        (["draft.other.experts=2"], "draft.other.experts: unknown key 'experts'"),  # of the other kind of draft
        (["publish.zzzz=1"], "publish.zzzz: unknown key 'zzzz'; valid keys: draft, license"),
        (["draft.jakiro.kind=jakiro", "draft.jakiro.expert=2"], "draft.jakiro.expert: "),  # named like its kind
        (["draft.eagle.kind=jakiro", "draft.eagle.expert=2"], "did you mean 'experts'?"),  # named like another kind
        (["eval.benchmarks.source={source='x', prompt=1}"], misspelt("eval.benchmarks.source.prompt", "prompts")),
        (["train.epochs"], "--set 'train.epochs': expected section.key=value"),
        (["name.first=x"], "name is a value, not a section"),
        (
            ["publish.license='Apache 2.0'"],
            "'Apache 2.0' is no license identifier of the Hub; did you mean 'apache-2.0'?",
        ),
        (["publish.license='Llama_3.1'"], "did you mean 'llama3.1'? Expected one of https://huggingface.co/docs"),
        (["publish.license=''"], "'' is no license identifier of the Hub. Expected"),
        (["publish.license=mine"], "or 'other' for a license that is not listed"),
        (["eval.methods.main.tree.nodes=38"], "nodes=38, but depth 3 with top_k 4 scores at most 37"),
        (["eval.methods.main.tree.nodes=3"], "nodes=3 cannot hold a path of depth 3: use at least 4"),
        (
            ["eval.methods.main.tree={depth=1, top_k=4, nodes=4, parallel=2}"],
            "parallel=2 levels from one forward, but the tree has depth 1",
        ),
        (
            ["eval.methods.other.tree.parallel=2"],
            "tree.parallel=2 takes that many levels from one forward: of a tree of depth",
        ),
        (["eval.methods.main.tree={paths=[[0], [0], [1]]}"], "paths names a node twice"),
        (["eval.methods.main.tree={paths=[[0], [2]]}"], "paths holds [2] without [1]"),
        (["eval.methods.main.tree={paths='eagle-1', depth=3}"], "depth=3, but paths make it 5: leave it out"),
        (["eval.methods.main.tree={siblings='drawn'}"], "siblings='drawn' needs a static tree"),
        (
            ["eval.methods.other.tree={depth=2, top_k=2, nodes=4, candidates='decoupled'}"],
            "needs several experts that predict each next token",
        ),
        (["draft.main.contrast=none", "eval.methods.main.tree.parallel=2"], "this draft can take 1"),
        (["draft.main.experts_per_token=1"], "experts_per_token=1: expected at least 2"),
        (["eval.temperatures=[1.0, 1.0]"], "names one twice"),
        (["eval.compile=true", "eval.pack_linears=true"], "choose one"),
        (["eval.methods.x={draft='nobody', tree={}}"], "eval.methods.x.draft='nobody' is not one of the drafts"),
        (["eval.methods.main={draft='other', tree={}}"], "eval.methods.main: that name is taken"),
        (["eval.methods.x-tuned={draft='other', tree={}}"], "names that end in -tuned"),
        (
            ["draft.flash={kind='dflash', block=4}"],
            "draft.flash: tree.depth=6: this draft guesses at most 3 tokens ahead. Its tree is eval.tree: change that, "
            "or give it another in [eval.methods.flash.tree]",
        ),
        (["eval.benchmarks.b={source='x.jsonl', path='y'}"], "path applies to source='benchmark:NAME' only"),
        (["draft.main.experts_per_token=3"], "experts_per_token=3 is more than experts=2"),
        (["eval.tree={siblings='none', top_k=2}"], "siblings='none' is a chain, but top_k=2 gives it siblings"),
        (["eval.tree={siblings='none', paths='eagle-1'}"], "siblings='none' is a chain, but paths gives it siblings"),
        (["publish.draft=mian"], "publish.draft='mian' is not one of the drafts ['main', 'other']"),
        (["draft={}"], "no draft: add a section [draft.NAME]"),
        (["train.global_batch=10"], "train.global_batch=10 is no multiple of micro_batch x ranks = 4 x 1"),
        (
            ["draft.main.kind=mamba"],
            "draft.main: kind='mamba': expected 'dflash', 'dspark', 'eagle', 'eagle3', 'gumiho', 'hydra'",
        ),
        (
            ["train.learning_rates.mian=1e-3"],
            "no draft of that name is trained; expected one",
        ),
        (["train.epochs=0"], "train.epochs: Input should be greater than 0 (got 0)"),
        (["train.learning_rate=fast"], "(got 'fast')"),
        (["data.heldout_fraction=1.5"], "data.heldout_fraction"),
        (["features.stored_dtype=int8"], "features.stored_dtype"),
        (["train.betas=[0.9]"], "train.betas"),
        (["data.calibration_prompts=0", "train.keep=best"], "train.keep='best' requires the answers"),
        (["data.calibration_prompts=0", "train.decode=last"], "train.decode='last' requires the answers"),
        (["target.device=spread", "features.gpus_per_worker=2", "train.decode=last"], "uses all GPUs"),
        (["train.pack_tokens=100", "data.max_length=160"], "train.pack_tokens=100 has no room for a dialogue of data."),
        (["features.gpus_per_worker=2"], "set target.device='spread'"),
        (["target.device=spread"], "features.gpus_per_worker gives a worker no GPUs of its own: set it"),
        (
            ["target.device=spread", "features.gpus_per_worker=2", "eval.workers=2"],
            "eval.gpus_per_worker gives a worker no GPUs of its own: set it",
        ),
        (["features.gpus_per_worker=1.5", "target.device=spread"], "use a fraction of one GPU, or a whole number"),
        (["features.auxiliary_layers=[3, 1]"], "must be distinct layers in ascending order"),
        (["features.auxiliary_layers=[0]"], "greater than 0"),
        (["train.shards=local/shards"], "train.shards: a relative folder: give one that is the same from wherever"),
        (
            ["features.keep=window", "features.store=s3://a/b"],
            "set train.shards to a folder other than OUTPUT/features",
        ),
        (["regenerate.top_p=0.9"], "choose nothing at temperature 0"),
        (
            ["data.answers=target", "features.keep=window"],
            "features.keep='window' computes states of existing texts, but data.answers='target': run",
        ),
    ],
)
def test_what_is_refused(recipe_file, overrides, words):
    assert words in refusal(recipe_file, *overrides)


def test_all_misspelt_keys_are_named_at_once(recipe_file):
    message = refusal(recipe_file, "sede=1", "train.epoch=1")
    assert misspelt("sede", "seed") in message and misspelt("train.epoch", "epochs") in message


@pytest.mark.parametrize(
    ("overrides"),
    [
        ["eval.methods.main.tree.nodes=37"],
        ["eval.methods.main.tree.nodes=4"],
        ["eval.methods.main.tree={depth=2, top_k=4, nodes=4, parallel=2}"],
        ["draft.main.experts=3", "draft.main.experts_per_token=3"],
        ["eval.methods.main.tree={depth=1, top_k=4, nodes=5}"],
        ["eval.methods.main.tree={paths=[[0], [1]]}"],
        ["train.global_batch=12"],
        *([f"publish.license={license}"] for license in ("apache-2.0", "llama3.1", "openrail++", "other")),
    ],
)
def test_the_last_consistent_values_are_accepted(recipe_file, overrides):
    load_recipe(recipe_file, overrides)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('model = "some/model"', "target.model: Field required"),
        ('kind = "eagle"', "draft.other: no key kind: expected 'dflash', 'dspark', 'eagle', 'eagle3'"),
    ],
)
def test_what_is_missing_is_named(recipe_file, line, complaint):
    recipe_file.write_text(MINIMAL.replace(line, ""))
    assert complaint in refusal(recipe_file)


def test_a_method_is_complete_and_stays_the_same_through_json(recipe_file):
    more = ["draft.lookup={kind='prompt-lookup'}", "eval.methods.both={draft='main', secondary=['lookup']}"]
    recipe = load_recipe(recipe_file, more)
    assert list(recipe.methods) == ["lookup", "main", "other", "both"] and recipe.tunable == sorted(recipe.methods)
    assert recipe.methods["main"] == Method(draft="main", tree=TreeConfig(depth=3, top_k=4, nodes=12, parallel=2))
    assert recipe.methods["both"].sources == ["main", "lookup"]
    for method in recipe.methods.values():
        assert parse_settings(Method, json.loads(json.dumps(method.to_json()))) == method


# -- overrides -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("train.epochs=3", lambda r: r.train.epochs, 3),
        ("train.learning_rate=1e-3", lambda r: r.train.learning_rate, 1e-3),
        ("target.model=/a/b-c", lambda r: r.target.model, "/a/b-c"),
        ('target.model="excerpt"', lambda r: r.target.model, "excerpt"),
        ("data.source=a=b", lambda r: r.data.source, "a=b"),
        ("train.together=true", lambda r: r.train.together, True),
        ("eval.temperatures=[0.5]", lambda r: r.eval.temperatures, [0.5]),
        ("eval.methods.main.tree.depth=2", lambda r: r.tree("main").depth, 2),
        ("eval.benchmarks.new.source=x.jsonl", lambda r: r.eval.benchmarks["new"].source, "x.jsonl"),
        ("train.deepspeed.zero_optimization.stage=2", lambda r: r.train.deepspeed["zero_optimization"], {"stage": 2}),
        ("draft.third={kind='eagle'}", lambda r: r.draft["third"].kind, "eagle"),
    ],
)
def test_overrides_set_one_key(recipe_file, override, read, value):
    assert read(load_recipe(recipe_file, [override])) == value


def test_the_last_of_two_overrides_counts(recipe_file):
    assert load_recipe(recipe_file, ["seed=1", "seed=2"]).seed == 2


# -- files -----------------------------------------------------------------------------------------------------------


def test_a_missing_recipe_lists_the_shipped_ones(tmp_path):
    message = refusal(tmp_path / "absent.toml")
    assert f"recipe {tmp_path / 'absent.toml'} does not exist" in message
    assert "demo, " in message


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("broken.toml", b"name = "),
        ("broken.json", b'{"name": '),
        ("latin.toml", 'name = "café"'.encode("latin-1")),
        ("list.json", b"[]"),
    ],
)
@pytest.mark.parametrize("overrides", [[], ["seed=1"]])
def test_a_file_that_is_no_recipe_is_named(tmp_path, name, content, overrides):
    (tmp_path / name).write_bytes(content)
    assert re.search(
        rf"recipe {tmp_path / name} (cannot be parsed|is a JSON list)", refusal(tmp_path / name, *overrides)
    )


def test_the_resolved_recipe_loads_again_with_the_same_hash(recipe_file, tmp_path):
    recipe = load_recipe(recipe_file, ["train.deepspeed.a.b=1", "train.betas=[0.8, 0.9]"])
    resolved = tmp_path / "recipe.json"
    resolved.write_text(json.dumps(recipe.model_dump(mode="json")))
    again = load_recipe(resolved)
    assert again == recipe
    assert run_hash(again) == run_hash(recipe)


def test_the_recipe_beside_an_artifact_loads_again_with_the_same_hash(recipe_file, tmp_path):
    """Check hashes of a recipe without local paths, which are private and would differ."""
    recipe = load_recipe(recipe_file)
    write_provenance(tmp_path, recipe)
    again = load_recipe(tmp_path / "recipe.json")
    assert run_hash(again) == run_hash(recipe)
    assert train_hash(again, "main") == train_hash(recipe, "main")


# -- hashes ----------------------------------------------------------------------------------------------------------


def fields_of(section) -> list[str]:
    return list(
        type(section).model_fields if isinstance(section, Section) else [field.name for field in fields(section)]
    )


def with_key(section, key: str, value):
    """Return a copy with another value, which is not validated."""
    changed = copy.copy(section)
    changed.__dict__[key] = value
    return changed


CHANGED_VALUES = {"start": f"they/draft@{'a' * 40}"}


def variants(section, prefix: str = ""):
    """(key, the section with that key changed to a value that no recipe has), for every leaf below a section."""
    for key in fields_of(section):
        value = getattr(section, key)
        if isinstance(value, Section | Settings):
            for name, changed in variants(value, f"{prefix}{key}."):
                yield name, with_key(section, key, changed)
        elif isinstance(value, dict) and value:
            for entry, inner in value.items():
                for name, changed in variants(inner, f"{prefix}{key}.{entry}."):
                    yield name, with_key(section, key, {**value, entry: changed})
        else:
            yield (
                f"{prefix}{key}",
                with_key(
                    section, key, {"changed": 1} if isinstance(value, dict) else CHANGED_VALUES.get(key, "changed")
                ),
            )


def changing(recipe: Recipe, read) -> set[str]:
    return {key for key, variant in variants(recipe) if read(variant) != read(recipe)}


def leaves(recipe: Recipe, *prefixes: str) -> set[str]:
    return {key for key, _ in variants(recipe) if key.startswith(prefixes)}


ANSWERED = {"data.calibration_prompts", "features.answer_tokens"}
ENGINE = {f"target.{key}" for key in ENGINE_KEYS - {"engine"}}
FEATURES = "workers planners cpus_per_worker gpus_per_worker batch_tokens gpus store hang_seconds keep disk_bytes"
TRAIN = "ranks together checkpoint_every recompute decode tracker micro_batch shards gpus"
RUNTIME = {  # keys that change no result
    *ENGINE,
    *(f"features.{key}" for key in FEATURES.split()),
    *(f"train.{key}" for key in TRAIN.split()),
    *("name", "output", "regenerate.batch"),
    *(f"eval.{key}" for key in ("workers", "gpus_per_worker")),
}
JOBS = {"regenerate.dialogues_per_part", "regenerate.max_dialogues"}
MEASURED = {"target.device", "target.engine"}
LATER = "max_tokens max_dialogues min_length long train_turns heldout_fraction validation_dialogues heldout_prompts"
of_any_value = pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")


@of_any_value
def test_the_hash_depends_on_every_key_that_changes_a_figure(tree):
    recipe = Recipe.model_validate(tree)
    assert changing(recipe, run_hash) == leaves(recipe, "") - RUNTIME - JOBS


@of_any_value
def test_the_dump_hash_depends_on_what_shards_hold(tree):
    recipe = Recipe.model_validate(tree)
    expected = leaves(recipe, "target.", "data.", "features.") - RUNTIME - MEASURED - ANSWERED
    assert changing(recipe, dump_hash) == expected
    assert changing(recipe, lambda r: calibration_hash(r, dump_hash(r))) == expected | ANSWERED
    tree["data"]["answers"] = "target"
    regenerated = leaves(recipe, "seed", "regenerate.") - RUNTIME - JOBS
    assert changing(Recipe.model_validate(tree), dump_hash) == expected | regenerated | {"target.engine"}


@of_any_value
def test_the_train_hash_depends_on_what_weights_depend_on(tree):
    tree["eval"]["methods"] = {"jakiro": {"tree": {"depth": 2, "top_k": 3, "nodes": 6}}}
    recipe = Recipe.model_validate(tree)
    expected = leaves(recipe, "seed", "target.", "data.", "features.", "train.", "draft.jakiro.")
    expected -= RUNTIME | MEASURED | ANSWERED | {"train.learning_rates", "train.validate_every"}  # rates of others
    assert {"train.learning_rate", "draft.jakiro.contrast"} <= expected
    assert changing(recipe, lambda r: train_hash(r, "jakiro")) == expected
    watched = Recipe.model_validate({**tree, "train": {**tree["train"], "keep": "best"}})  # the estimated tau decides
    expected |= {"train.validate_every"} | ANSWERED | leaves(recipe, "eval.methods.jakiro.tree.")
    assert changing(watched, lambda r: train_hash(r, "jakiro")) == expected


@of_any_value
def test_the_regenerate_hash_depends_on_what_answers_depend_on(tree):
    recipe = Recipe.model_validate(tree)
    later = {"data.answers", "data.calibration_prompts", *(f"data.{key}" for key in LATER.split())}
    expected = leaves(recipe, "seed", "target.", "data.", "regenerate.") - RUNTIME - {"target.device"} - later
    assert changing(recipe, regenerate_hash) == expected


def test_hashes_are_stable_under_the_order_of_keys(tree):
    def reversed_keys(value):
        return {key: reversed_keys(value[key]) for key in reversed(value)} if isinstance(value, dict) else value

    recipe, backwards = Recipe.model_validate(tree), Recipe.model_validate(reversed_keys(tree))
    assert list(recipe.draft) != list(backwards.draft)
    assert run_hash(recipe) == run_hash(backwards)
    assert dump_hash(recipe) == dump_hash(backwards)
    assert train_hash(recipe, "eagle") == train_hash(backwards, "eagle")


def test_a_default_that_is_spelt_out_changes_no_hash(recipe_file):
    assert run_hash(load_recipe(recipe_file, ["train.epochs=20", "data.max_length=2048"])) == run_hash(
        load_recipe(recipe_file)
    )


def test_a_draft_may_have_a_learning_rate_of_its_own(recipe_file):
    plain, with_rates = load_recipe(recipe_file), load_recipe(recipe_file, ["train.learning_rates.main=0.5"])
    assert (
        with_rates.training("main").learning_rate == 0.5
        and with_rates.training("other") == plain.training("other") == plain.train
    )
    assert train_hash(with_rates, "other") == train_hash(plain, "other")
    assert train_hash(with_rates, "main") == train_hash(load_recipe(recipe_file, ["train.learning_rate=0.5"]), "main")


def test_two_drafts_that_differ_only_in_their_tree_share_a_train_hash(recipe_file):
    recipe = load_recipe(
        recipe_file, ["draft.flat.kind=jakiro", "eval.methods.flat.tree={depth=1, top_k=4, nodes=5, parallel=1}"]
    )
    assert train_hash(recipe, "flat") == train_hash(recipe, "main")
    assert train_hash(recipe, "other") != train_hash(recipe, "main")
