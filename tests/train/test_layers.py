"""Features of more layers than a draft reads: it trains on them as on a dump of its own. Features of other settings are
refused, by the keys.
"""

from functools import partial
from pathlib import Path

import pytest

from infra.plan.__main__ import find_refusal
from jakiro import launch
from pipeline.artifacts.features import dump_differences, readable_spec
from pipeline.artifacts.provenance import Recorded
from pipeline.basics.errors import PipelineError
from pipeline.basics.files import sha256
from pipeline.features.schema import FP8
from pipeline.features.shards import FeatureStore, Manifest
from pipeline.recipe.identity import dump_hash
from pipeline.recipe.load import load_recipe, override_arguments
from pipeline.running.state import features_state, require_same_settings
from preprocess.dump.driver import dump
from tests.kit import call, dump_here, recipe_tree, write_recipe, write_sharegpt
from tests.train.runs import losses, stopped_here, train_here

pytestmark = pytest.mark.real
WEIGHTS = "drafts/second/model.safetensors"
SECOND = {"kind": "eagle3", "ttt_steps": 2, "vocabulary": 128, "auxiliary_layers": [2]}
BOTH = {"first": {**SECOND, "auxiliary_layers": None}, "second": SECOND}  # the first: both layers of the tiny target


def recipe_of(folder: Path, target: Path, drafts: dict, **features) -> Path:
    """A recipe file whose dialogues lie in the folder's parent."""
    data = folder.parent / "data.json"
    tree = recipe_tree(target, data if data.exists() else write_sharegpt(data, 60), folder)
    tree["data"]["max_dialogues"] = 40
    tree["features"] |= features
    tree["train"] |= {"window": 2}
    tree["publish"]["draft"] = "second"
    return write_recipe({**tree, "draft": drafts}, folder.with_suffix(".recipe"))


@pytest.fixture(scope="module", params=["float32"])
def dumped(request, tiny_target, tmp_path_factory) -> tuple[Path, Path]:
    """(recipe file, output) of a run whose dump holds the layers of two drafts."""
    output = tmp_path_factory.mktemp("layers") / "both"
    path = recipe_of(output, tiny_target, BOTH, stored_dtype=request.param)
    assert dump_here(load_recipe(path)).spec.auxiliary_layers == "1 2"
    return path, output


@pytest.fixture
def second(dumped, tiny_target) -> Path:
    """The recipe file of the second draft alone."""
    _, output = dumped
    stored_dtype = Manifest.load(output / "features").spec.stored_dtype
    return recipe_of(output.with_name("second"), tiny_target, {"second": SECOND}, stored_dtype=stored_dtype)


@pytest.mark.parametrize("dumped", ["float32", FP8], indirect=True)
def test_a_draft_trains_on_more_layers_to_the_bit_as_on_its_own(dumped, second, tmp_path):
    _, output = dumped
    recipe = load_recipe(second)
    assert dump_here(recipe).spec.auxiliary_layers == "2"
    own_dump, more, fed = (tmp_path / name for name in ("own", "more", "fed"))
    train_here((second, recipe.paths.features), own_dump, draft="second")
    train_here((second, output / "features"), more, draft="second")
    train_here((second, output / "features"), fed, "features.keep=window", draft="second")
    assert losses(own_dump, "second") == losses(more, "second") == losses(fed, "second") != []
    assert sha256(own_dump / WEIGHTS) == sha256(more / WEIGHTS) == sha256(fed / WEIGHTS)
    spec = readable_spec(load_recipe(second, [f"output={output}"]))
    assert FeatureStore(output / "features", "train", spec).spec.auxiliary_layers == "2"


def test_a_dump_of_more_layers_is_done_and_stays_as_it_is(dumped, second):
    first, output = dumped
    recipe = load_recipe(second, [f"output={output}"])
    features = output / "features"
    dump_files = [*features.glob("*.arrow"), *(features / name for name in ("manifest.json", "recipe.json"))]
    before = {path.name: path.read_bytes() for path in dump_files}
    assert features_state(recipe)[0]
    require_same_settings(recipe, ["second"])
    assert find_refusal(recipe) is None
    printed = dump(recipe)
    assert printed[0] == "auxiliary layers 1 2, of another recipe" and printed[1:] == dump(load_recipe(first))
    assert before == {name: (features / name).read_bytes() for name in before}


def test_layers_that_are_named_otherwise_are_the_same(dumped, tiny_target):
    _, output = dumped
    dtype = Manifest.load(output / "features").spec.stored_dtype
    for drafts in ({"second": BOTH["first"]}, {"second": {**SECOND, "auxiliary_layers": [1, 2]}}):
        recipe = load_recipe(recipe_of(output.with_name("named"), tiny_target, drafts, stored_dtype=dtype))
        assert features_state(load_recipe(output.with_name("named.json"), [f"output={output}"]))[0]
        assert dump_hash(recipe) != Manifest.load(output / "features").spec.recipe


def test_a_dump_of_more_layers_is_finished_by_its_own_recipe_alone(dumped, second, tmp_path):
    _, output = dumped
    (tmp_path / "run").mkdir()
    (tmp_path / "run/features").symlink_to(output / "features")
    overrides = [f"output={tmp_path / 'run'}", "features.answer_tokens=5"]
    with pytest.raises(PipelineError, match=r"layers of another recipe \(1 2\), and is not whole, or"):
        dump(load_recipe(second, overrides))


def test_fewer_layers_than_a_draft_reads_are_refused(dumped, second):
    first, _ = dumped
    recipe = load_recipe(second)
    dump_here(recipe)
    wider = load_recipe(first, [f"output={recipe.output}"])
    with pytest.raises(
        PipelineError, match=r"other auxiliary layers \(auxiliary_layers is '2', this run expects '1 2'"
    ):
        dump(wider)
    assert "features.auxiliary_layers: [2] -> [1, 2]" in features_state(wider)[1]


def test_the_layers_that_a_recipe_beside_features_names_are_proven_by_the_hash(dumped, second):
    first, output = dumped
    recipe, spec = load_recipe(second), Manifest.load(output / "features").spec
    full_recipe = load_recipe(first).model_dump(mode="json")
    differences = partial(dump_differences, recipe, spec, target_layers=2)
    assert differences(find=lambda: Recorded(full_recipe, is_whole=True)) == ""
    lying = {**full_recipe, "features": {**full_recipe["features"], "auxiliary_layers": [1, 2]}}
    assert "features.auxiliary_layers: [1, 2] -> [2]" in differences(find=lambda: Recorded(lying, is_whole=True))
    assert differences(find=lambda: None).startswith("which keys differ is not known")


# -- other settings ---------------------------------------------------------------------------------------------------

OTHER_SETTINGS = ["data.heldout_fraction=0.3", "data.min_length=2"]
KEYS = "data.min_length: 1 -> 2, data.heldout_fraction: 0.2 -> 0.3"


def test_features_of_other_settings_are_refused_by_their_keys_at_every_stage(dumped, tmp_path, monkeypatch):
    first, output = dumped
    other_recipe = load_recipe(first, OTHER_SETTINGS)
    monkeypatch.setattr("os.execvpe", lambda *_: pytest.fail("ranks are started"))
    launched = partial(call, launch.main, str(first), *override_arguments(OTHER_SETTINGS))  # before any rank is
    checks = (
        partial(require_same_settings, other_recipe, []),
        partial(readable_spec, other_recipe),
        partial(dump, other_recipe),
        launched,
    )
    for refuses in checks:
        with pytest.raises(PipelineError, match=KEYS) as caught:
            refuses()
        assert dump_hash(other_recipe) not in str(caught.value)
    with pytest.raises(PipelineError, match=KEYS):
        train_here((first, output / "features"), tmp_path, *OTHER_SETTINGS, draft="second")
    assert features_state(other_recipe)[1].endswith(f"holds features of other settings: {KEYS}")
    with pytest.raises(PipelineError, match=r"of other settings, or .* \(data.calibration_prompts: 4 -> 5\)"):
        train_here((first, output / "features"), tmp_path, "data.calibration_prompts=5", draft="second")


def test_a_resume_state_and_a_checkpoint_of_other_settings_are_refused_by_their_keys(dumped, tmp_path):
    """The refusal comes in the first second of a run: a tree counts if tau decides which weights are kept."""
    first, output = dumped
    best = ["train.keep=best", f"output={tmp_path}"]
    train_here((first, output / "features"), tmp_path, best[0], draft="second")
    require_same_settings(load_recipe(first, best), ["first", "second"])
    with pytest.raises(
        PipelineError, match=r"second holds a draft trained with other settings: eval.tree.depth: 3 -> 2"
    ):
        require_same_settings(load_recipe(first, [*best, "eval.tree.depth=2"]), ["second"])
    assert "eval.tree.depth: 3 -> 2" in find_refusal(load_recipe(first, [*best, "eval.tree.depth=2"]))  # `plan` warns
    folder = tmp_path / "drafts/first/resume"
    stopped_here((first, output / "features"), tmp_path, best[0], draft="first")
    assert (folder / "resume.json").exists()
    with pytest.raises(
        PipelineError, match=r"resume state of a run with other settings: eval.tree.depth: 3 -> 2\. Use"
    ):
        require_same_settings(load_recipe(first, [*best, "eval.tree.depth=2"]), ["first"])
    with pytest.raises(PipelineError, match=r"other settings: train.learning_rate: 0.001 -> 0.01\. Use"):
        train_here((first, output / "features"), tmp_path, best[0], "train.learning_rate=0.01", draft="first")
    (folder / "recipe.json").unlink()
    with pytest.raises(PipelineError, match="other settings: which keys differ is not known"):
        require_same_settings(load_recipe(first, [*best, "eval.tree.depth=2"]), ["first"])
