"""`python -m infra.check`: every part on a tiny shape; parts that fail, hang or find no time; what it says."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

import infra.check.__main__ as check
from infra.check.parts import PARTS, shape_that_fits
from infra.check.shapes import SHAPES, Given
from pipeline.basics.errors import PipelineError
from pipeline.lm.model import Target, load_embed_head
from tests.kit import run_warm


@pytest.mark.real
@pytest.mark.long
def test_every_part_runs_on_a_cpu_with_a_tiny_shape():
    done = run_warm([sys.executable, "-m", "infra.check"], CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.strip().splitlines()[-1])
    parts = figures["parts"]
    assert "sees no GPU here: a tiny shape" in done.stdout and check.said(figures) in done.stdout
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
        assert parts[part]["tokens_per_s"] > 0 and parts[part]["planned_tokens_per_s"] > 0
    for part in ("costs", "compiled"):
        assert {"1", "10", "12"} <= set(parts[part]["verify_ms"]) and parts[part]["plain_ms"] > 0
    assert {"eagle_round_ms", "jakiro_round_ms"} <= set(parts["costs"]) and parts["compiled"]["compile_s"] > 0


def test_the_command_knows_the_parts_and_the_shapes():
    assert list(check.LIMITS) == list(PARTS) and ["auto", *SHAPES] == list(check.SHAPES)


def test_the_largest_shape_that_fits_is_taken():
    assert [shape_that_fits(free) for free in (139.0, 30.0, 23.5)] == ["8b", "8b", "1b"]
    with pytest.raises(PipelineError, match=r"4\.0 GiB of the GPU's memory are free.*--shape tiny"):
        shape_that_fits(4.0)


def test_a_random_target_has_its_files_ends_and_layers_of_the_usual_scale(tmp_path):
    recipe = Given(tmp_path, "tiny", 60.0).recipe()
    target, embed_head = Target(recipe.target, "float32"), load_embed_head(recipe.target)
    assert torch.equal(target.embedding_VD, embed_head.embedding_VD.float())
    assert torch.equal(target.head.linear.weight, embed_head.head.linear.weight.float())
    matrices = [p for name, p in target.model.named_parameters() if "layers" in name and p.ndim == 2]
    assert len(matrices) == 14 and all(0.015 < p.std().item() < 0.025 for p in matrices)


# -- parts apart -------------------------------------------------------------------------------------------------


@pytest.fixture
def scripted(monkeypatch, tmp_path):
    """Measures with processes that finish the parts of `outcomes` and end at the first other one."""

    def measure(outcomes: dict, gpu: bool, shape: str, parts: list[str], minutes: float = 10):
        given = []

        def run(parts: list[str], shape: str, limit: float, folder: Path) -> str:
            given.append((parts, shape))
            for part in parts:
                if part not in outcomes:
                    return "it broke"
                (folder / f"{part}.json").write_text(json.dumps(outcomes[part]))
            return ""

        monkeypatch.setattr(check, "run", run)
        return check.measure(gpu, shape, parts, minutes, tmp_path), given

    return measure


def test_a_part_that_fails_leaves_the_others_alone(scripted):
    outcomes = {"machine": {"shape": "8b", "seconds": 1.0}, "costs": {"seconds": 1.0}}
    found, given = scripted(outcomes, True, "auto", ["dump", "costs"])
    assert found == {**outcomes, "dump": {"error": "it broke"}} and check.verdict(found)["failed"] == ["dump"]
    assert given == [(["machine"], "auto"), (["dump"], "8b"), (["costs"], "8b")]


def test_on_a_cpu_one_process_does_all_that_it_survives(scripted):
    outcomes = {"machine": {"shape": "tiny", "seconds": 1.0}, "costs": {"seconds": 1.0}}
    found, given = scripted(outcomes, False, "auto", ["dump", "costs"])
    assert found == {**outcomes, "dump": {"error": "it broke"}}
    assert given == [(["machine", "dump", "costs"], "auto"), (["costs"], "tiny")]


def test_without_a_machine_or_time_for_it_nothing_is_begun(scripted):
    found, given = scripted({}, True, "auto", ["dump"])
    assert found == {"machine": {"error": "it broke"}} and given == [(["machine"], "auto")]
    with pytest.raises(PipelineError, match="give it more --minutes"):
        scripted({}, True, "auto", ["dump"], minutes=0.1)


def test_a_process_is_ended_and_its_last_words_are_told(tmp_path):
    def of(code, limit=60.0):
        return check.ended([sys.executable, "-c", code], limit, tmp_path / "log", dict(os.environ))

    assert of("print('well')") == ""
    assert of("print('error: no room\\nnoise'); raise SystemExit(2)") == "status 2: no room"
    assert of("raise ValueError('bad')") == "status 1: ValueError: bad"
    assert of("import os; os.abort()").startswith("status -6: without a message")
    assert of("import time; time.sleep(600)", 0.5) == "not finished within 0 s"


def test_a_gate_that_fails_is_the_first_word():
    proofs = {"float32, compiled, T = 0, eagle": "NOT LOSSLESS: 3 of 4 identical, 0 near ties; tau 2.00"}
    parts = {"lossless": {"passed": False, "proofs": proofs, "results": []}, "dump": {"error": "out of | memory"}}
    figures = {**check.verdict(parts), "parts": parts}
    assert figures["not_lossless"] == ["lossless"]
    text = check.said(figures)
    assert text.startswith("failed: dump.\nNOT LOSSLESS: lossless.\n")
    assert "| lossless | float32, compiled, T = 0, eagle | NOT LOSSLESS: 3 of 4 identical" in text
    assert "| dump | error | out of \\| memory |" in text
