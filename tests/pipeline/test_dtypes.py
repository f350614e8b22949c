"""The dtype "auto": bfloat16 where the device computes it natively, else float32; a run keeps what it began with."""

import json
import platform
import sys

import pytest

from pipeline.basics import accelerator
from pipeline.basics.errors import PipelineError
from pipeline.recipe import dtypes
from pipeline.recipe.dtypes import FILE_NAME
from pipeline.recipe.identity import dump_hash, run_hash
from pipeline.recipe.load import load_recipe
from tests.kit import dump_here, recipe_tree, run_command, run_warm, write_recipe, write_sharegpt


@pytest.fixture
def recipe_file(tiny_target, tmp_path):
    tree = recipe_tree(tiny_target, write_sharegpt(tmp_path / "data.json"), tmp_path / "run")
    for section in dtypes.SECTIONS:
        tree[section]["dtype"] = "auto"
    return write_recipe(tree, tmp_path / "recipe.toml")


@pytest.fixture
def machine(monkeypatch):
    """Make this machine's bfloat16 as slow as its argument says, in times of float32."""

    def make(cost: float) -> None:
        monkeypatch.setattr(accelerator, "bfloat16_cost", lambda device: cost)

    return make


def by_section(recipe) -> set[str]:
    return {getattr(recipe, section).dtype for section in dtypes.SECTIONS}


@pytest.mark.parametrize("cost, dtype", [(0.12, "bfloat16"), (1.0, "bfloat16"), (1.1, "float32"), (8.2, "float32")])
def test_auto_is_the_faster_dtype_and_hashes_as_if_the_recipe_named_it(recipe_file, machine, cost, dtype):
    machine(cost)
    recipe = load_recipe(recipe_file)
    assert by_section(recipe) == {dtype}
    named = load_recipe(recipe_file, [f"{section}.dtype={dtype}" for section in dtypes.SECTIONS])
    assert recipe == named and run_hash(recipe) == run_hash(named) and dump_hash(recipe) == dump_hash(named)


def test_a_run_goes_on_in_the_dtypes_that_it_began_with(recipe_file, machine):
    machine(8.0)
    begun = load_recipe(recipe_file, begin=True)
    assert dump_here(begun).spec.dtype == "float32"
    machine(0.1)
    assert load_recipe(recipe_file) == load_recipe(recipe_file, begin=True) == begun
    elsewhere = load_recipe(recipe_file, [f"output={begun.paths.run}-2"])
    assert by_section(elsewhere) == {"bfloat16"}


def test_an_explicit_dtype_is_not_what_auto_became(recipe_file, machine):
    machine(8.0)
    load_recipe(recipe_file, ["train.dtype=bfloat16"], begin=True)
    assert load_recipe(recipe_file, begin=True).train.dtype == "float32"


@pytest.mark.parametrize("stage", ["preprocess/dump_features.py", "eval/main.py"])
def test_every_stage_keeps_the_dtypes(recipe_file, stage):
    run_warm([sys.executable, stage, str(recipe_file), "--set", "data.source=nowhere.json"])
    recipe = load_recipe(recipe_file)
    assert json.loads((recipe.paths.run / FILE_NAME).read_text()) == dict.fromkeys(dtypes.SECTIONS, recipe.target.dtype)


STRANGE = [{"target": "auto"}, {"target": ["float32"]}, {"code": "float32"}, {"eval": "float16"}]


@pytest.mark.parametrize("content", STRANGE)
def test_a_record_that_holds_something_else_is_refused(recipe_file, content):
    run = load_recipe(recipe_file).paths.run
    run.mkdir()
    (run / FILE_NAME).write_text(json.dumps(content))
    with pytest.raises(PipelineError, match=r"expected one of .* for each of"):
        load_recipe(recipe_file)


def test_a_plan_says_which_dtypes_and_why(recipe_file, machine):
    machine(8.24)
    recipe = load_recipe(recipe_file)
    assert dtypes.describe_dtypes(recipe) == (
        "dtypes: target float32, train float32, eval float32; bfloat16 is emulated here (8.2 times float32's time)"
    )
    assert dtypes.warn_of_emulation(recipe) is None
    slow = load_recipe(recipe_file, ["train.dtype=bfloat16"])
    assert dtypes.warn_of_emulation(slow) == (
        "WARNING: bfloat16 takes 8.2 times as long as float32 here: set train.dtype to 'auto' or 'float32'"
    )
    machine(0.1)
    assert "bfloat16 is native here" in dtypes.describe_dtypes(slow) and dtypes.warn_of_emulation(slow) is None


def test_a_device_that_is_elsewhere_computes_bfloat16(recipe_file):
    recipe = load_recipe(recipe_file, ["target.device=cuda"])
    assert by_section(recipe) == {"bfloat16"}
    assert dtypes.describe_bfloat16("cuda") == "this machine has no target.device='cuda'"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="limits the instruction set of x86")
def test_a_processor_without_bfloat16_computes_in_float32():
    """Time the products for real, with oneDNN limited to AVX2, whatever this processor has."""
    code = "from pipeline.recipe.dtypes import native_dtype; print(native_dtype('cpu'))"
    limits = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    assert run_command([sys.executable, "-c", code], **limits).stdout == "float32\n"
