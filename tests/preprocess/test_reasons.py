"""Descriptions of the reasons of rejections: each reason of the code has some, and a run's line tells them."""

import ast
import json

from pipeline.features.reasons import DESCRIPTIONS, UNKNOWN_KEY, describe_reasons
from pipeline.running.state import features_state
from tests.kit import ROOT, dump_here

RAISING = {"Unusable", "_refuse"}
# Names of constants, and of what else a reason is assigned to.
NAMED = {"BAD_TOOLS", "NOT_ANSWERED", "RENDERED_OTHERWISE", "KILLS_WORKERS", "conversation.end", "rejected"}


def reasons_in(tree: ast.AST) -> set[str]:
    """Return the texts that a file counts rejected dialogues under."""
    expressions: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in RAISING:
            expressions += node.args
        elif isinstance(node, ast.FunctionDef) and node.name == "_fault":
            expressions += [inner.value for inner in ast.walk(node) if isinstance(inner, ast.Return) and inner.value]
        elif isinstance(node, ast.Assign) and {ast.unparse(part) for part in ast.walk(node.targets[0])} & NAMED:
            expressions.append(node.value)
    parts = [part for inner in expressions for part in ast.walk(inner)]
    texts = {part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)}
    return {text for text in texts - {"tool", "assistant"} if text.isidentifier()}  # `_fault` asks for these two roles


def test_each_reason_of_the_code_has_words():
    paths = [*(ROOT / "preprocess").rglob("*.py"), ROOT / "pipeline/lm/chat.py"]
    reasons = set().union(*(reasons_in(ast.parse(path.read_text())) for path in paths))
    assert len(reasons) > 25 and reasons - {UNKNOWN_KEY} == set(DESCRIPTIONS)


def test_reasons_are_told_with_their_counts_the_most_frequent_first():
    assert describe_reasons({"too_long": 1, "no_exchange": 3, "\x1b[2J": 2, "new": 1}) == (
        "3 no_exchange (no question with an answer), 1 too_long (more tokens than data.max_length), 3 for other reasons"
    )


def test_a_turns_unknown_key_is_told_by_its_name():
    assert describe_reasons({"unknown_loss_scale": 2}).startswith("2 unknown_loss_scale (a turn's key of this name ")


def test_a_runs_line_says_why_dialogues_were_rejected(tiny_recipe, tmp_path):
    records = json.loads((tmp_path / "data.json").read_text())
    records += [{"id": "a", "conversations": []}, {"id": "doc0", "conversations": records[0]["conversations"]}, 5]
    (tmp_path / "data.json").write_text(json.dumps(records))
    dump_here(tiny_recipe)
    done, line = features_state(tiny_recipe)
    assert done and line.endswith(
        "; 3 rejected: 1 duplicate (an id and a text that were there before), "
        "1 malformed (a record or a turn in no known form), 1 no_exchange (no question with an answer)"
    )
