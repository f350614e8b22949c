"""Do the tests bite? Each known defect of the released code of this line of papers, put back in, one at a time.

A copy of the sources gets the defect by a replacement in its text; then the test that is named here runs there and has to fail.
"""

import os
import shutil
import subprocess
import sys

import pytest

from tests.kit import PATIENCE, ROOT

TREE, GENERATE = "pipeline/decoding/tree.py", "pipeline/decoding/generate.py"
DEFECTS = {
    "the last level gathered by the child's rank, not its parent": (
        TREE,
        "ranked = scored = ahead_scores(answer, depth - last)[rows]",
        "ranked = scored = ahead_scores(answer, depth - last)[torch.arange(len(order)) % len(answer.next_WU)]",
        "tests/pipeline/test_tree.py::test_the_last_hybrid_level_is_gathered_by_parent_and_not_by_rank",
    ),
    "q is always the right expert's": (
        TREE,
        "q_WV = q_WKV[:, rank % q_WKV.shape[1]] * free",
        "q_WV = q_WKV[:, rank % q_WKV.shape[1]] * free\n            wrong_WV = q_WKV[:, -1]",
        "tests/pipeline/test_accept.py::test_a_round_of_any_tree_emits_exactly_the_targets_joint_distribution",
        ("proposals.append(q_WV)", "proposals.append(wrong_WV)"),
    ),
    "a token can be drawn twice": (
        TREE,
        "free = free.scatter(1, drawn[:, None], 0.0)",
        "pass",
        "tests/pipeline/test_tree.py::test_siblings_are_drawn_in_turn_from_each_expert",
    ),
    "the bonus token ignores temperature, top-k and top-p": (
        GENERATE,
        "return accept_best(tree, chosen)",
        "path, _ = accept_best(tree, chosen)\n    p_V = logits_NV[path[-1] if path else 0].softmax(-1)\n"
        "    return path, int(sampler.draw_rows(p_V[None])[0])",
        "tests/pipeline/test_generate.py::test_top_k_one_is_greedy_decoding",
    ),
}


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("pipeline", "preprocess", "train", "eval", "tests", "infra", "pyproject.toml"):
        source = ROOT / name
        skip = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, folder / name, ignore=skip) if source.is_dir() else shutil.copy(source, folder / name)
    return folder


@pytest.mark.parametrize("defect", DEFECTS)
def test_the_named_test_fails_with_the_defect_put_back_in(copied, defect):
    file, old, new, test, *more = DEFECTS[defect]
    path = copied / file
    sound = path.read_text()
    changed = sound
    for before, after in [(old, new), *more]:
        assert changed.count(before) == 1, before
        changed = changed.replace(before, after)
    path.write_text(changed)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", test],
            cwd=copied,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(copied)},
        )
    finally:
        path.write_text(sound)
    assert done.returncode == 1 and " failed" in done.stdout, done.stdout + done.stderr
    assert "AssertionError" in done.stdout or "\nE       assert " in done.stdout, done.stdout  # a verdict, not a crash
