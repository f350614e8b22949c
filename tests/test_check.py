"""Tests of `python -m infra.check`: every part on a tiny shape; parts that fail, hang or have no time left."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

import infra.check.__main__ as check
from infra.check.parts import PARTS, shape_that_fits
from infra.check.shapes import SHAPES, CheckSettings
from infra.check.timing import judge
from pipeline.basics.errors import PipelineError
from pipeline.lm.model import Target, load_embed_head
from tests.kit import run_warm


@pytest.mark.real
@pytest.mark.long
def test_every_part_runs_on_a_cpu_with_a_tiny_shape(tmp_path):
    done = run_warm([sys.executable, "-m", "infra.check", "--out", str(tmp_path / "kept")], CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.strip().splitlines()[-1])
    parts = figures["parts"]
    assert "sees no GPU here: a tiny shape" in done.stdout and check.format_figures(figures) in done.stdout
    assert list(parts) == list(PARTS) and figures["failed"] == figures["not_lossless"] == []
    assert parts["machine"]["libraries"]["torch"] == torch.__version__ and parts["machine"]["shape"] == "tiny"
    results = parts["lossless"]["results"]
    decoded = {(result["dtype"], result["compiled"], result["temperature"], result["draft"]) for result in results}
    for dtype in ("float32", "bfloat16"):
        for temperature in (0.0, 1.0):
            assert {(dtype, c, temperature, d) for c in (False, True) for d in ("eagle", "jakiro")} <= decoded
            assert (dtype, False, temperature, "eagle-drawn") in decoded
    assert parts["lossless"]["passed"] and all(result["gate"]["passed"] for result in results)
    greedy = [result for result in results if result["temperature"] == 0 and result["dtype"] == "float32"]
    assert all(
        result["tau"] > 1.5 and result["gate"]["identical"] == result["gate"]["checked"] > 0 for result in greedy
    )
    for part in ("dump", "dump-float8"):
        assert (
            parts[part]["tokens_per_s"] > 0 and parts[part]["bare_tokens_per_s"] > 0 and len(parts[part]["goals"]) == 1
        )
    for part in (*(name for name in PARTS if name.startswith("train-")), "p-eagle"):
        assert min(parts[part]["tokens_per_s"]) > 0 and parts[part]["bare_tokens_per_s"] > 0
        assert len(parts[part]["goals"]) == 2
    assert min(
        parts["widths"][f"{name}_{turn}_ms"] for name in ("default", "without_cudnn") for turn in ("new", "again")
    )
    assert parts["steps"]["kernel"] == "CpuKernel" and parts["steps"]["merged_ms"] > 0
    assert 0 < parts["loss"]["a_copy_ms"] < parts["loss"]["eager_ms"]
    for draft in ("eagle", "jakiro"):
        rounds = {key: parts["rounds"][f"{kind}_{draft}_round_ms"] for key, kind in (("a", "eager"), ("b", "compiled"))}
        assert min(rounds.values()) > 0 and parts["rounds"][f"eager_{draft}_operators"]["round"] > 100
    assert {path.stem for path in (tmp_path / "kept").glob("*.json")} == set(PARTS)
    assert "Goals missed" not in done.stdout, "a tiny shape says nothing about speed"
    for part in ("costs", "compiled"):
        assert {"1", "10", "12"} <= set(parts[part]["verify_ms"]) and parts[part]["plain_ms"] > 0
    assert {"eagle_round_ms", "jakiro_round_ms"} <= set(parts["costs"]) and parts["compiled"]["compile_s"] > 0


def test_the_command_knows_the_parts_and_the_shapes():
    assert list(check.LIMITS) == list(PARTS) and ["auto", *SHAPES] == list(check.SHAPES)


def test_the_largest_shape_that_fits_is_taken():
    assert [shape_that_fits(free) for free in (139.0, 30.0, 23.5)] == ["8b", "8b", "1b"]
    with pytest.raises(PipelineError, match=r"4\.0 GiB of the GPU's memory are free.*--shape tiny"):
        shape_that_fits(4.0)


def test_a_random_target_has_the_files_embedding_and_head(tmp_path):
    recipe = CheckSettings(tmp_path, "tiny", 60.0).recipe()
    target, embed_head = Target(recipe.target, "float32"), load_embed_head(recipe.target)
    assert torch.equal(target.embedding_VD, embed_head.embedding_VD.float())
    assert torch.equal(target.head.linear.weight, embed_head.head.linear.weight.float())
    matrices = [p for name, p in target.model.named_parameters() if "layers" in name and p.ndim == 2]
    assert len(matrices) == 14 and all(0.015 < p.std().item() < 0.025 for p in matrices)


# -- parts apart -------------------------------------------------------------------------------------------------


@pytest.fixture
def scripted(monkeypatch, tmp_path):
    """Return a function that measures with processes which finish the parts of `outcomes` and fail at any other."""

    def measure(outcomes: dict, gpu: bool, shape: str, parts: list[str], minutes: float = 10):
        calls = []

        def run(parts: list[str], shape: str, limit: float, folder: Path) -> str:
            calls.append((parts, shape))
            for part in parts:
                if part not in outcomes:
                    return "it broke"
                (folder / f"{part}.json").write_text(json.dumps(outcomes[part]))
            return ""

        monkeypatch.setattr(check, "run_parts", run)
        return check.measure(gpu, shape, parts, minutes, tmp_path), calls

    return measure


def test_a_failed_part_does_not_affect_the_others(scripted):
    outcomes = {"machine": {"shape": "8b", "seconds": 1.0}, "costs": {"seconds": 1.0}}
    results, calls = scripted(outcomes, True, "auto", ["dump", "costs"])
    assert results == {**outcomes, "dump": {"error": "it broke"}} and check.list_failures(results)["failed"] == ["dump"]
    assert calls == [(["machine"], "auto"), (["dump"], "8b"), (["costs"], "8b")]


def test_on_a_cpu_one_process_runs_parts_until_one_fails(scripted):
    outcomes = {"machine": {"shape": "tiny", "seconds": 1.0}, "costs": {"seconds": 1.0}}
    results, calls = scripted(outcomes, False, "auto", ["dump", "costs"])
    assert results == {**outcomes, "dump": {"error": "it broke"}}
    assert calls == [(["machine", "dump", "costs"], "auto"), (["costs"], "tiny")]


def test_without_the_machine_part_no_other_part_is_started(scripted):
    results, calls = scripted({}, True, "auto", ["dump"])
    assert results == {"machine": {"error": "it broke"}} and calls == [(["machine"], "auto")]
    with pytest.raises(PipelineError, match="raise --minutes"):
        scripted({}, True, "auto", ["dump"], minutes=0.1)


def test_a_process_is_stopped_and_its_last_error_is_returned(tmp_path):
    def run(code, limit=60.0):
        return check.run_command([sys.executable, "-c", code], limit, tmp_path / "log", dict(os.environ))

    assert run("print('well')") == ""
    assert run("print('error: no room\\nnoise'); raise SystemExit(2)") == "status 2: no room"
    assert run("raise ValueError('bad')") == "status 1: ValueError: bad"
    assert run("import os; os.abort()").startswith("status -6: without a message")
    assert run("import time; time.sleep(600)", 0.5) == "not finished within 0 s"


def test_a_failed_gate_is_printed_first():
    proofs = {"float32, compiled, T = 0, eagle": "NOT LOSSLESS: 3 of 4 identical, 0 near ties; tau 2.00"}
    parts = {"lossless": {"passed": False, "proofs": proofs, "results": []}, "dump": {"error": "out of | memory"}}
    figures = {**check.list_failures(parts), "parts": parts}
    assert figures["not_lossless"] == ["lossless"]
    text = check.format_figures(figures)
    assert text.startswith("failed: dump.\nNOT LOSSLESS: lossless.\n")
    assert "| lossless | float32, compiled, T = 0, eagle | NOT LOSSLESS: 3 of 4 identical" in text
    assert "| dump | error | out of \\| memory |" in text


def test_goals_that_a_gpu_misses_are_said_and_fail_nothing():
    goals = judge({"speed over bare": (0.58, ">=", 0.85), "round": (1.3, "<=", 1.35)})
    assert goals == {"goals": {"speed over bare >= 0.85": "MISSED: 0.58", "round <= 1.35": "met: 1.3"}}
    parts = {"machine": {"count": 1}, "train-eagle": {"tokens_per_s": 1.0, **goals}}
    figures = {**check.list_failures(parts), "parts": parts}
    assert figures["failed"] == []
    text = check.format_figures(figures)
    assert text.startswith(
        "Every part ran, and nothing was lost.\nGoals missed: train-eagle, speed over bare >= 0.85: 0.58.\n"
    )
    assert "| train-eagle | round <= 1.35 | met: 1.3 |" in text
