"""`python -m infra.gpu_check`: every part on a tiny shape; what it says without a GPU; parts that fail, hang or find no
time.
"""

import json
import os
import sys

import pytest
import torch

from infra import gpu_check
from infra.gpu.parts import DEMO, PARTS, demo_sets, in_turns, shape_that_fits
from infra.gpu.shapes import SHAPES, Given
from pipeline.basics.errors import PipelineError
from pipeline.lm.model import Target, load_embed_head
from pipeline.recipe.load import load_recipe
from tests.kit import run_command

COMMAND = [sys.executable, "-m", "infra.gpu_check"]


def facts(**more):
    """Of a machine, as its part writes them."""
    known = {"name": "H1", "count": 1, "shape": "8b", "dtype": "bfloat16", "supported": {"bfloat16": True}}
    known |= {"c_compiler": None, "code": "abc", "libraries": {"torch": "3"}, "seconds": 1.0}
    return known | {"matmul_tflops": 1.0, "copy_gb_per_s": 2.0, "to_host_gb_per_s": 3.0} | more


@pytest.mark.real
def test_every_part_runs_on_a_cpu_with_a_tiny_shape(tmp_path):
    page = tmp_path / "gpu.md"
    page.write_text(f"# GPUs\n\n{gpu_check.NOTHING_YET}\n")
    done = run_command([*COMMAND, "--device", "cpu", "--shape", "tiny", "--write", str(page)])
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.strip().splitlines()[-1])
    parts = figures["parts"]
    assert list(parts) == list(PARTS) and figures["failed"] == figures["not_lossless"] == []
    assert parts["machine"]["libraries"]["torch"] == torch.__version__ and parts["machine"]["shape"] == "tiny"
    results = parts["lossless"]["results"]
    decoded = {(one["dtype"], one["compiled"], one["temperature"], one["draft"]) for one in results}
    for dtype in ("float32", "bfloat16"):
        for temperature in (0.0, 1.0):
            assert {(dtype, c, temperature, d) for c in (False, True) for d in ("eagle", "jakiro")} <= decoded
            assert (dtype, False, temperature, "eagle-drawn") in decoded
    assert parts["lossless"]["passed"] and all(one["gate"]["passed"] for one in results)
    greedy = [one for one in results if one["temperature"] == 0 and one["dtype"] == "float32"]
    assert all(one["tau"] > 1.5 and one["gate"]["identical"] == one["gate"]["checked"] > 0 for one in greedy)
    for part in ("dump", "train-eagle", "train-jakiro"):
        assert parts[part]["tokens_per_s"] > 0 and parts[part]["ratio"] > 0 and parts[part]["turns"] >= 3
    assert {"1", "10", "12"} <= set(parts["costs"]["verify_ms"]) and {"1", "10", "12"} <= set(
        parts["compiled"]["verify_ms"]
    )
    assert set(parts["costs"]["draft_step_ms"]) == {"eagle", "jakiro"} and parts["compiled"]["compile_s"] > 0
    assert "skipped" in parts["demo"]
    written = page.read_text()
    assert gpu_check.NOTHING_YET not in written and f"## {figures['device']}\n" in written
    assert gpu_check.said(figures) in written and gpu_check.said(figures) in done.stdout


def test_without_a_gpu_it_says_so_in_one_line():
    done = run_command(COMMAND, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("error: no GPU: ") and done.stderr.count("\n") == 1
    assert f"{SHAPES['8b'].memory} GiB" in done.stderr and f"({SHAPES['1b'].memory} for" in done.stderr
    assert "--device cpu" in done.stderr


def test_the_entry_knows_the_parts_and_the_demo_is_a_recipe(tmp_path):
    assert list(gpu_check.LIMITS) == list(PARTS) and ["auto", *SHAPES] == list(gpu_check.CHOICES)
    recipe = load_recipe(DEMO, demo_sets(tmp_path))
    assert recipe.target.device == "cuda" and recipe.train.accumulation(1) == 1


def test_the_largest_shape_that_fits_is_taken():
    assert [shape_that_fits(free) for free in (139.0, 30.0, 23.5)] == ["8b", "8b", "1b"]
    with pytest.raises(PipelineError, match=r"4\.0 GiB of the GPU's memory are free.*--shape tiny"):
        shape_that_fits(4.0)


def test_turns_are_taken_one_after_the_other_and_begin_with_another_way():
    order = []
    ways = {name: lambda name=name: float(len(order.append(name) or order)) for name in ("a", "b")}
    found = in_turns(ways, 0.0)
    assert order == ["a", "b", "a", "b", "b", "a", "a", "b"] and [len(values) for values in found.values()] == [3, 3]


def test_a_random_target_has_its_files_ends_and_layers_of_the_usual_scale(tmp_path):
    recipe = Given(tmp_path, "cpu", "tiny", 60.0).recipe()
    target, embed_head = Target(recipe.target, "float32"), load_embed_head(recipe.target)
    assert torch.equal(target.embedding_VD, embed_head.embedding_VD.float())
    assert torch.equal(target.head.linear.weight, embed_head.head.linear.weight.float())
    matrices = [p for name, p in target.model.named_parameters() if "layers" in name and p.ndim == 2]
    assert len(matrices) == 14 and all(0.015 < p.std().item() < 0.025 for p in matrices)


# -- parts apart -------------------------------------------------------------------------------------------------


def scripted(monkeypatch, folder, outcomes):
    """Processes that finish the parts of `outcomes` and end at the first other one; returns what each was given."""
    given = []

    def run(parts, device, shape, limit, folder):
        given.append((parts, shape))
        for part in parts:
            if part not in outcomes:
                return "it broke"
            (folder / f"{part}.json").write_text(json.dumps(outcomes[part]))
        return ""

    monkeypatch.setattr(gpu_check, "run", run)
    return given


def test_a_part_that_fails_leaves_the_others_alone(monkeypatch, tmp_path):
    outcomes = {"machine": facts(), "costs": {"seconds": 1.0}, "demo": {"skipped": "no", "seconds": 0.0}}
    given = scripted(monkeypatch, tmp_path, outcomes)
    found = gpu_check.measure("cuda", "auto", ["dump", "costs", "demo"], 10, tmp_path)
    assert found == {**outcomes, "dump": {"error": "it broke"}}
    assert given == [(["machine"], "auto"), *(([part], "8b") for part in ("dump", "costs", "demo"))]
    assert gpu_check.verdict(found)["failed"] == ["dump"]


def test_on_a_cpu_one_process_does_all_that_it_survives(monkeypatch, tmp_path):
    outcomes = {"machine": facts(shape="tiny"), "costs": {"seconds": 1.0}}
    given = scripted(monkeypatch, tmp_path, outcomes)
    found = gpu_check.measure("cpu", "auto", ["dump", "costs"], 10, tmp_path)
    assert found["dump"] == {"error": "it broke"} and found["costs"] == outcomes["costs"]
    assert given == [(["machine", "dump", "costs"], "auto"), (["costs"], "tiny")]


def test_without_time_parts_are_skipped_and_without_a_machine_nothing_is_begun(monkeypatch, tmp_path):
    given = scripted(monkeypatch, tmp_path, {"machine": facts()})
    found = gpu_check.measure("cuda", "8b", ["demo"], 1, tmp_path)
    assert "left: give it more --minutes" in found["demo"]["skipped"] and given == [(["machine"], "8b")]
    (tmp_path / "machine.json").unlink()
    given = scripted(monkeypatch, tmp_path, {})
    assert gpu_check.measure("cuda", "auto", ["dump"], 10, tmp_path) == {"machine": {"error": "it broke"}}
    assert given == [(["machine"], "auto")]


def test_without_time_for_the_first_part_it_says_so(monkeypatch, tmp_path):
    scripted(monkeypatch, tmp_path, {"machine": facts()})
    with pytest.raises(PipelineError, match="give it more --minutes"):
        gpu_check.measure("cuda", "auto", ["dump"], 0.1, tmp_path)


def test_a_process_is_ended_and_its_last_words_are_told(tmp_path):
    def of(code, limit=60.0):
        return gpu_check.ended([sys.executable, "-c", code], limit, tmp_path / "log", dict(os.environ))

    assert of("print('well')") == ""
    assert of("print('error: no room\\nnoise'); raise SystemExit(2)") == "status 2: no room"
    assert of("raise ValueError('bad')") == "status 1: ValueError: bad"
    assert of("import os; os.abort()").startswith("status -6: without a message")
    assert of("import time; time.sleep(600)", 0.5) == "not finished within 0 s"


# -- what is shown -----------------------------------------------------------------------------------------------


def figures_of(device, **parts):
    return {"device": device, "day": "2026-01-01", **gpu_check.verdict(parts), "parts": parts}


def test_a_gate_that_fails_is_the_first_word():
    gate = {"passed": False, "drawn": False, "checked": 4, "identical": 3, "near_ties": 0, "rounds": 0}
    one = {"dtype": "float32", "compiled": True, "draft": "eagle", "temperature": 0.0, "tau": 2.0, "gate": gate}
    figures = figures_of("H1", lossless={"passed": False, "results": [one]}, dump={"error": "out of | memory"})
    assert figures["not_lossless"] == ["lossless"]
    text = gpu_check.said(figures)
    assert text.startswith("failed: dump.\nNOT LOSSLESS: lossless.\n")
    assert (
        "| lossless | float32, compiled, T = 0, eagle | NOT LOSSLESS: 3 of 4 identical, 0 near ties; tau 2.00 |" in text
    )
    assert "| dump | error | out of \\| memory |" in text


def test_each_device_has_one_section():
    text = f"# GPUs\n\n## Devices\n\n{gpu_check.NOTHING_YET}\n"
    for device, speed in (("H1", 1.0), ("H100", 2.0), ("H1", 4.0), ("H100", 5.0)):
        text = gpu_check.with_section(text, figures_of(device, machine=facts(name=device, matmul_tflops=speed)))
    headings = [line for line in text.splitlines() if line.startswith("#")]
    assert headings == ["# GPUs", "## Devices", "## H1", "## H100"]
    assert gpu_check.NOTHING_YET not in text
    assert "| matrix product | 4 TFLOP/s |" in text and "| matrix product | 5 TFLOP/s |" in text
    assert "| matrix product | 1 TFLOP/s |" not in text and "| matrix product | 2 TFLOP/s |" not in text
