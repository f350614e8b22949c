"""Parts of one conversation fall on one side of the split; ids that only count are no parts."""

import json
import re

import pytest

from pipeline.basics.errors import PipelineError
from pipeline.recipe.load import load_recipe
from pipeline.recipe.sections import DataConfig
from preprocess.sources.groups import LONGEST, held_out
from preprocess.sources.intake import Intake
from tests.kit import ROOT
from tests.preprocess.test_dialogues import turns

SHAREGPT = [f"{stem:07d}_{part}" for stem in range(300) for part in (0, 11, 7)[: 1 + stem % 3]]


def groups_of(tmp_path, ids: list[str], group: str | None = None, **columns) -> tuple[dict[str, str], dict]:
    """Of each record, by id; what was counted."""
    source = tmp_path / "data.json"
    records = [
        {"id": doc_id, "conversations": turns(("human", f"q{n}"), ("gpt", f"a{n}"))} for n, doc_id in enumerate(ids)
    ]
    source.write_text(json.dumps([record | columns for record in records]))
    intake = Intake(DataConfig(source=str(source), group=group))
    return {dialogue.doc_id: dialogue.group for dialogue in intake}, intake.grouped


@pytest.mark.parametrize("form", ["example_{}", "{}", "a/b_{}"])
def test_ids_that_only_count_are_no_parts(tmp_path, form):
    """The whole source was one conversation: all held out, or nothing."""
    groups, counts = groups_of(tmp_path, [form.format(number) for number in range(1000)])
    assert all(group == doc_id for doc_id, group in groups.items())
    assert 25 < sum(held_out(group, 0.05) for group in groups.values()) < 85
    assert counts == {"conversations": 0, "dialogues": 0}


def test_sharegpts_parts_stay_together(tmp_path):
    groups, counts = groups_of(tmp_path, SHAREGPT)
    assert groups == {doc_id: doc_id[:7] for doc_id in SHAREGPT}
    assert counts == {"conversations": 200, "dialogues": 500}
    sides = {(group, held_out(group, 0.5)) for group in groups.values()}
    assert len(sides) == 300 and {side for _, side in sides} == {True, False}


@pytest.mark.parametrize(
    ("before", "most"),
    [([f"doc-{n}" for n in range(1000)], 0), (SHAREGPT * 2, LONGEST), ([*SHAREGPT, "example_0", "x"] * 2, LONGEST)],
)
@pytest.mark.parametrize("step", [1, 7])
def test_ids_that_count_behind_the_first_records_are_no_parts(tmp_path, before, most, step):
    ids = list(dict.fromkeys([*before, *(f"example_{n}" for n in range(0, 3000 * step, step))]))
    groups, _ = groups_of(tmp_path, ids)
    assert sum(group == "example" for group in groups.values()) <= most


def test_parts_follow_each_other(tmp_path):
    groups, _ = groups_of(tmp_path, ["aaaaaaa_0", "aaaaaaa_2", "bbbbbbb_0", "aaaaaaa_5", "aaaaaaa_7"])
    assert list(groups.values()) == ["aaaaaaa", "aaaaaaa", "bbbbbbb", "aaaaaaa_5", "aaaaaaa_7"]


@pytest.mark.parametrize(
    ("group", "names"),
    [
        ("source", ["web", "web"]),
        ("id", ["u1/chat_1", "u1/chat_2"]),
        ("^(.+)/", ["u1", "u1"]),
        ("u[0-9]", ["u1", "u1"]),
        ("chat_(1)?", ["1", "u1/chat_2"]),
    ],
)
def test_the_recipe_may_say_what_belongs_together(tmp_path, group, names):
    groups, _ = groups_of(tmp_path, ["u1/chat_1", "u1/chat_2"], group, source="web")
    assert list(groups.values()) == names


@pytest.mark.parametrize("group", ["absent", "user-id", "^nothing"])
def test_a_group_that_no_record_has_is_refused(tmp_path, group):
    with pytest.raises(
        PipelineError, match=rf"data\.group='{re.escape(group)}' is in none of 1 records: expected a key"
    ):
        groups_of(tmp_path, ["u1/chat_1"], group, **{"user-id": "u1"})


def test_a_broken_expression_is_refused(tmp_path):
    with pytest.raises(PipelineError, match=r"group=.*no regular expression"):
        load_recipe(ROOT / "infra/recipes/demo.toml", ["data.group='(a'"])
