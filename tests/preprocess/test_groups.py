"""Parts of one conversation fall on one side of the split; ids that only count are no parts."""

import json
import re
from datetime import date
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import regex

from pipeline.basics.errors import PipelineError
from pipeline.features.schema import FeatureSpec
from pipeline.features.shards import Manifest, ShardRecord
from pipeline.recipe.load import load_recipe
from pipeline.recipe.sections import DataConfig
from preprocess.dump.driver import _report
from preprocess.dump.plan import Plan
from preprocess.sources.groups import LONGEST, held_out
from preprocess.sources.intake import Intake
from tests.kit import ROOT, byte_tokenizer, write_sharegpt
from tests.preprocess.test_dialogues import turns

SHAREGPT = [f"{stem:07d}_{part}" for stem in range(300) for part in (0, 11, 7)[: 1 + stem % 3]]


NOTHING = (None, float("nan"), "", [], {})  # values of a key that name no group


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


@pytest.mark.parametrize("group", ["^(a|aa)+$", "(a|a)*$", "(a+)+$"])
def test_an_expression_that_takes_forever_is_refused(tmp_path, monkeypatch, group):
    """It ran for as long as the id is long: exponentially, or to the square."""
    monkeypatch.setattr("preprocess.sources.groups.SEARCH_SECONDS", 0.2)
    hostile = "a" * 30_000 + "b"
    with pytest.raises(PipelineError, match=rf"^data\.group='{re.escape(group)}' takes more than 0\.2 s") as error:
        groups_of(tmp_path, ["ab", hostile], group)
    assert f"on the id '{'a' * 80}': expected" in str(error.value) and "or name a key" in str(error.value)


def test_an_expression_is_compiled_once_for_all_records_and_by_the_library_that_checks_it(tmp_path, monkeypatch):
    data = DataConfig(source="", group=r"^\p{Lu}+(?=_)")  # which Python's own library does not know
    compiled, compile_it = [], regex.compile
    monkeypatch.setattr(regex, "compile", lambda pattern: compiled.append(pattern) or compile_it(pattern))
    source = tmp_path / "data.json"
    said = [turns(("human", f"q{n}"), ("gpt", f"a{n}")) for n in range(50)]
    source.write_text(json.dumps([{"id": f"ÄB_{n}", "conversations": said[n]} for n in range(50)]))
    intake = Intake(data.model_copy(update={"source": str(source)}))
    assert {dialogue.group for dialogue in intake} == {"ÄB"} and compiled == [data.group]


def test_a_broken_expression_is_refused(tmp_path):
    with pytest.raises(PipelineError, match=r"group=.*no regular expression"):
        load_recipe(ROOT / "infra/recipes/demo.toml", ["data.group='(a'"])


def groups_by(tmp_path, values: list) -> tuple[list[str], dict]:
    """Of records with these values of "user", by "user"; what was counted."""
    source = tmp_path / "data.json"
    said = [turns(("human", f"q{n}"), ("gpt", f"a{n}")) for n in range(len(values))]
    records = [{"id": f"d{n}", "conversations": said[n], "user": value} for n, value in enumerate(values)]
    source.write_text(json.dumps(records))
    intake = Intake(DataConfig(source=str(source), group="user"))
    return [dialogue.group for dialogue in intake], intake.grouped


@pytest.mark.parametrize(
    ("alike", "other"),
    [
        ([12, 12.0, "12", 1.2e1], [12.5, "12.0", 13.0]),
        ([1, 1.0], [True]),
        ([0, 0.0, -0.0], [False]),
        ([12.5, 12.50], [12.25]),
        ([["a", 1], ["a", 1.0]], [[1, "a"], ["a"], "a"]),
        ([{"a": 1, "b": [2]}, {"b": [2.0], "a": 1}], [{"a": 2, "b": [2]}]),
        ([2**60, 2.0**60], [2**60 + 1]),
    ],
)
def test_a_group_is_what_its_value_is_worth(tmp_path, alike, other):
    """pandas writes 12.0 for 12 where another row has none: the parts of a conversation stood on both sides."""
    groups, counts = groups_by(tmp_path, alike + other)
    assert len(set(groups[: len(alike)])) == 1 and not set(groups[: len(alike)]) & set(groups[len(alike) :])
    assert not any(group.startswith("d") for group in groups) and counts["without_group"] == 0


def test_conversations_of_numbers_fall_on_one_side(tmp_path):
    groups, counts = groups_by(tmp_path, [float(number) for number in range(100) for _ in range(3)])
    assert len({(group, held_out(group, 0.5)) for group in groups}) == 100
    assert counts == {"conversations": 100, "dialogues": 300, "without_group": 0}


def test_records_without_a_group_are_counted(tmp_path):
    groups, counts = groups_by(tmp_path, ["u1", "u1", *NOTHING])
    assert groups == ["u1", "u1", "d2", "d3", "d4", "d5", "d6"]
    assert counts == {"conversations": 1, "dialogues": 2, "without_group": 5}
    groups, counts = groups_of(tmp_path, ["u1/chat_1", "u1/chat_2", "chat_3"], "^(.+)/")
    assert groups["chat_3"] == "chat_3" and counts == {"conversations": 1, "dialogues": 2, "without_group": 1}


def test_values_of_parquets_own_types_are_no_group_and_decimals_are_numbers(tmp_path):
    source = tmp_path / "data.parquet"
    kinds = {"user": [Decimal("12.00"), Decimal("12.50"), None], "day": [date(2024, 7, 26)] * 3}
    said = [turns(("human", f"q{n}"), ("gpt", f"a{n}")) for n in range(3)]
    pq.write_table(pa.table({"id": ["a", "b", "c"], "conversations": said, **kinds}), source)
    intake = Intake(DataConfig(source=str(source), group="user"))
    assert [dialogue.group for dialogue in intake] == ["12", "12.5", "c"] and intake.grouped["without_group"] == 1
    with pytest.raises(PipelineError, match=r"'day' is in none of 3 records: expected a key of theirs .* a number"):
        list(Intake(DataConfig(source=str(source), group="day")))


def test_the_report_says_how_many_have_no_group(tiny_recipe, tmp_path):
    records = json.loads(write_sharegpt(tmp_path / "data.json").read_text())
    for number, record in enumerate(records):
        record |= {"user": number // 2} if number < 50 else {}
    (tmp_path / "data.json").write_text(json.dumps(records))
    data = tiny_recipe.data.model_copy(update={"source": str(tmp_path / "data.json"), "group": "user"})
    plan = Plan(tiny_recipe.model_copy(update={"data": data}), byte_tokenizer())
    rows = [task.documents for task in plan.tasks() if task.split != "answers"]
    shards = [ShardRecord("", "train", n, len(one), 0, 0, 0, "") for n, one in enumerate(rows)]
    report = _report(plan.recipe, Manifest(FeatureSpec(32, "float32", "", "", "", ""), shards, plan.accounting(shards)))
    assert "split: 50 dialogues are parts of 25 conversations, each on one side" in report
    assert "split: 10 records have no group by data.group='user': each is split by its id" in report
