"""Do the tests bite? Each known defect of the released code of this line of papers, put back in, one at a time.

A copy of the sources gets the defect by a replacement in its text; then the test that is named here runs there and has
to fail.
"""

import shutil
import sys
from pathlib import Path

import pytest

from tests.kit import ROOT, run_command

TREE, GENERATE = "pipeline/decoding/grow.py", "pipeline/decoding/generate.py"
DEFECTS = {
    "the last level gathered by the child's rank, not its parent": (
        TREE,
        "scores = grower.scores(beyond)[0][rows]",
        "ranked = grower.scores(beyond)[0]\n    scores = ranked[torch.arange(len(order)) % len(ranked)]",
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
    "Gumiho's second forward has no tree mask": (
        "pipeline/drafts/gumiho.py",
        "block.input_layernorm(x) if number else x, rope, mask, cache)",
        "block.input_layernorm(x) if number else x, rope, None, cache)",
        "tests/pipeline/test_other_drafts.py::test_gumihos_three_forwards_by_hand",
    ),
    "Hydra's blocks are one block by multiplying a list": (
        "pipeline/drafts/hydra.py",
        "*(ResBlock(width, width) for _ in range(1, config.blocks))",
        "*([ResBlock(width, width)] * (config.blocks - 1))",
        "tests/pipeline/test_other_drafts.py::test_every_block_of_a_head_has_weights_of_its_own",
    ),
    "Medusa's and Hydra's heads learn the prompt, too": (
        "pipeline/features/batch.py",
        "out[:exist] = loss_mask[1 + horizon :]",
        "out[:exist] = True",
        "tests/pipeline/test_losses_batch.py::test_heads_of_their_own_learn_the_texts_tokens",
    ),
    "Medusa's and Hydra's typical acceptance takes what is likely enough": (
        GENERATE,
        "        return int(sampling.choose(logits_NV[node : node + 1], own, sampler, [places[node]])[0])",
        "        p_V = logits_NV[node].softmax(-1)\n"
        "        least = min(0.09, 0.3 * float((p_V * p_V.clamp_min(1e-30).log()).sum().exp()))\n"
        "        likely = [tree.tokens[child] for child in tree.children()[node] if p_V[tree.tokens[child]] > least]\n"
        "        drawn = int(sampling.choose(logits_NV[node : node + 1], own, sampler, [places[node]])[0])\n"
        "        return likely[0] if likely else drawn",
        "tests/pipeline/test_generate.py"
        "::test_sampled_answers_of_best_candidates_are_plain_decodings_with_the_same_seed",
    ),
    "Gumiho's full tree attention sees nodes of other paths": (
        "pipeline/decoding/tree.py",
        "row = rows[parents[node]].copy()",
        "row = [at < node and depths[at] < depths[node] for at in range(len(tokens))]",
        "tests/pipeline/test_generate.py::test_greedy_answers_of_every_kind_of_tree_are_plain_decodings",
    ),
    "the bonus token ignores temperature, top-k and top-p": (
        GENERATE,
        "return accept_best(tree, chosen)",
        "path, _ = accept_best(tree, chosen)\n    p_V = logits_NV[path[-1] if path else 0].softmax(-1)\n"
        "    return path, int(sampler.draw_rows(p_V[None])[0])",
        "tests/pipeline/test_generate.py::test_top_k_one_is_greedy_decoding",
    ),
}


# What all of them import is imported once; each test then runs in a fork, where its copy of the sources is.
RUNNER = """
import os, sys
import hypothesis, pytest, ray, torch, transformers.models.llama.modeling_llama

for folder, test in zip(sys.argv[1::2], sys.argv[2::2]):
    child = os.fork()
    if not child:
        os.chdir(folder)
        output = os.open("output", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1), os.dup2(output, 2)
        status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", test])
        sys.stdout.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def copy_with(defect: str, folder: Path) -> Path:
    """The sources with the defect in `folder`."""
    file, old, new, _, *more = DEFECTS[defect]
    for name in ("pipeline", "preprocess", "train", "eval", "tests", "infra", "pyproject.toml"):
        source = ROOT / name
        skip = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, folder / name, ignore=skip) if source.is_dir() else shutil.copy(source, folder / name)
    changed = (folder / file).read_text()
    for before, after in [(old, new), *more]:
        assert changed.count(before) == 1, before
        changed = changed.replace(before, after)
    (folder / file).write_text(changed)
    return folder


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory) -> dict[str, tuple[int, str]]:
    """By defect: pytest's status and what it printed."""
    folders = {defect: copy_with(defect, tmp_path_factory.mktemp("checkout")) for defect in DEFECTS}
    told = run_command(
        [sys.executable, "-c", RUNNER, *(str(one) for d, folder in folders.items() for one in (folder, DEFECTS[d][3]))],
        PYTHONDONTWRITEBYTECODE="1",
    )
    assert told.returncode == 0, told.stderr
    statuses = map(int, told.stdout.split())
    return {
        defect: (status, (folder / "output").read_text())
        for (defect, folder), status in zip(folders.items(), statuses, strict=True)
    }


@pytest.mark.parametrize("defect", DEFECTS)
def test_the_named_test_fails_with_the_defect_put_back_in(verdicts, defect):
    status, printed = verdicts[defect]
    assert status == 1 and " failed" in printed, printed
    assert "AssertionError" in printed or "\nE       assert " in printed, printed  # a verdict, not a crash
