"""Parts of one conversation fall on one side of the split; ids that only count are no parts."""

import json
import re
from datetime import date
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import regex

from pipeline.basics.errors import PipelineError
from pipeline.features.schema import FeatureSpec
from pipeline.features.shards import SPLITS, Manifest, ShardRecord
from pipeline.recipe.load import load_recipe
from pipeline.recipe.sections import DataConfig
from preprocess.dump.plan import DumpPlan
from preprocess.dump.report import report_lines
from preprocess.sources.groups import LONGEST, held_out
from preprocess.sources.intake import Intake
from tests.kit import ROOT, byte_tokenizer, write_sharegpt
from tests.preprocess.records import A, Q, intake_of, record, turns

SHAREGPT = [f"{stem:07d}_{part}" for stem in range(300) for part in (0, 11, 7)[: 1 + stem % 3]]


NO_QUESTION_SHARED = {"shared_questions": 0, "sharing_dialogues": 0}
NOTHING = (None, float("nan"), "", [], {})  # values of a key that name no group


def groups_of(tmp_path, ids: list[str], group: str | None = None, **columns) -> tuple[dict[str, str], dict]:
    """Return the group of each record, by id, and the counts."""
    records = [record(("human", f"q{n}"), ("gpt", f"a{n}"), doc_id=doc_id) | columns for n, doc_id in enumerate(ids)]
    intake = intake_of(tmp_path, records, group=group)
    return {dialogue.doc_id: dialogue.group for dialogue in intake}, intake.grouped


@pytest.mark.parametrize("form", ["example_{}", "{}", "a/b_{}"])
def test_ids_that_only_count_are_no_parts(tmp_path, form):
    """The whole source was one conversation: all held out, or nothing."""
    groups, counts = groups_of(tmp_path, [form.format(number) for number in range(1000)])
    assert all(group == doc_id for doc_id, group in groups.items())
    assert 25 < sum(held_out(group, 0.05) for group in groups.values()) < 85
    assert counts == {"conversations": 0, "dialogues": 0, **NO_QUESTION_SHARED}


def test_sharegpts_parts_stay_together(tmp_path):
    groups, counts = groups_of(tmp_path, SHAREGPT)
    assert groups == {doc_id: doc_id[:7] for doc_id in SHAREGPT}
    assert counts == {"conversations": 200, "dialogues": 500, **NO_QUESTION_SHARED}
    sides = {(group, held_out(group, 0.5)) for group in groups.values()}
    assert len(sides) == 300 and {side for _, side in sides} == {True, False}


@pytest.mark.parametrize(
    ("before", "most"),
    [([f"doc-{n}" for n in range(1000)], 0), (SHAREGPT * 2, LONGEST), ([*SHAREGPT, "example_0", "x"] * 2, LONGEST)],
)
@pytest.mark.parametrize("step", [1, 7])
def test_ids_that_count_behind_the_first_records_are_no_parts(tmp_path, before, most, step):
    ids = list(dict.fromkeys([*before, *(f"example_{n}" for n in range(0, 1000 * step, step))]))
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
    message = rf"data\.group='{re.escape(group)}' is in none of 1 records: expected a key"
    with pytest.raises(PipelineError, match=message):
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
    pattern = r"^\p{Lu}+(?=_)"  # which Python's own library does not know
    compiled, compile_it = [], regex.compile
    monkeypatch.setattr(regex, "compile", lambda pattern: compiled.append(pattern) or compile_it(pattern))
    groups, _ = groups_of(tmp_path, [f"ÄB_{n}" for n in range(50)], pattern)
    assert set(groups.values()) == {"ÄB"} and compiled == [pattern] * 2  # the recipe's check, then all records


def test_a_broken_expression_is_refused(tmp_path):
    with pytest.raises(PipelineError, match=r"group=.*no regular expression"):
        load_recipe(ROOT / "infra/recipes/demo.toml", ["data.group='(a'"])


# -- one question ----------------------------------------------------------------------------------------------------


def samples(form: str, system: bool = False) -> list[dict]:
    """100 questions with 8 answers each, in turn, after different system turns or none."""
    before = [[("system", f"s{number % 3}")] if system else [] for number in range(800)]
    pairs = [(("human", form.format(n % 100, " " * (n // 100))), ("gpt", f"answer {n}")) for n in range(800)]
    return [record(*before[n], *pairs[n], doc_id=f"s{n}") for n in range(800)]


@pytest.mark.parametrize("form", ["question {}?", "question {}?{}", " question{1} {0}?"])
def test_answers_to_one_question_fall_on_one_side(tmp_path, form):
    """All held-out questions were trained on, too, and the held-out tau told of it."""
    intake = intake_of(tmp_path, samples(form, system="{1}" in form))
    dialogues = list(intake)
    assert [dialogue.group for dialogue in dialogues] == [f"s{number % 100}" for number in range(800)]
    shared = {"shared_questions": 100, "sharing_dialogues": 800}
    assert intake.grouped == {"conversations": 0, "dialogues": 0, **shared} and not intake.rejected


def test_no_prompt_is_trained_on_and_each_is_another_question(tiny_recipe, tmp_path):
    intake = intake_of(tmp_path, samples("question {}?"))
    numbers = {"heldout_fraction": 0.2, "heldout_prompts": 8, "calibration_prompts": 4, "validation_dialogues": 50}
    data = tiny_recipe.data.model_copy(update={"source": intake.data.source, **numbers})
    plan = DumpPlan(tiny_recipe.model_copy(update={"data": data}), byte_tokenizer())
    questions = {f"s{number}": f"question {number % 100}?" for number in range(800)}
    rows = [task for task in plan.tasks() if task.split != "answers"]
    split = {side: {questions[d.doc_id] for t in rows if t.split == side for d in t.documents} for side in SPLITS}
    assert split["train"] and split["validation"] and not split["train"] & split["validation"]
    prompts = [prompt["turns"][0] for prompt in plan.prompts] + [questions[d.doc_id] for d in plan.calibration]
    assert len(set(prompts)) == len(prompts) == 12 and not split["train"] & set(prompts)


def test_a_question_that_is_asked_once_keeps_the_side_of_its_record(tmp_path):
    pairs = [("human", "again" if n % 5 == 0 else f"q{n}") for n in range(20)]
    records = [record(pairs[n], ("gpt", f"a{n}"), doc_id=f"d{n}") for n in range(20)]
    intake = intake_of(tmp_path, records)
    assert [dialogue.group for dialogue in intake] == [f"d{n if n % 5 else 0}" for n in range(20)]
    assert intake.grouped["sharing_dialogues"] == 4
    groups = [dialogue.group for dialogue in intake_of(tmp_path, records, group="id")]
    assert groups == [f"d{n}" for n in range(20)]


def test_a_duplicate_shares_no_question(tmp_path):
    pairs = [("human", "q"), ("gpt", "a")]
    longer = [*pairs, ("human", "?"), ("gpt", "b")]
    dialogues = [("d0", pairs), ("d1", pairs), ("d2", longer)]
    intake = intake_of(tmp_path, [record(*turns, doc_id=doc_id) for doc_id, turns in dialogues])
    assert [dialogue.group for dialogue in intake] == ["d0", "d0"] and intake.rejected == [("d1", "duplicate_text")]
    assert intake.grouped == {"conversations": 0, "dialogues": 0, "shared_questions": 1, "sharing_dialogues": 2}


OUT, IN = [name for name in SHAREGPT if held_out(name[:7], 0.5)], [n for n in SHAREGPT if not held_out(n[:7], 0.5)]


@pytest.mark.parametrize(("first", "others_group"), [(OUT, IN), (IN, OUT)])
def test_a_conversation_follows_the_question_of_its_first_part_and_a_later_part_stays(tmp_path, first, others_group):
    """A later part whose question is on the other side is on none: it is rejected, and counted."""
    a, b = first[0][:7], others_group[0][:7]
    questions = [(f"{a}_0", "one"), (f"{a}_5", "more"), (f"{b}_0", "one"), (f"{b}_5", "go"), ("ccccccc_0", "two")]
    questions += [("ccccccc_3", "more"), (f"{others_group[-1][:7]}_0", "three"), (f"{others_group[-1][:7]}_2", "more")]
    records = [record(("human", text), ("gpt", doc_id), doc_id=doc_id) for doc_id, text in questions]
    intake = intake_of(tmp_path, records, heldout_fraction=0.5)
    groups = {dialogue.doc_id: dialogue.group for dialogue in intake}
    assert [groups[name] for name in (f"{a}_0", f"{a}_5", f"{b}_0", f"{b}_5")] == [a] * 4
    is_same_side = held_out("ccccccc", 0.5) == held_out(a, 0.5)
    expected = [] if is_same_side else [("ccccccc_3", "on_both_sides")]
    assert intake.rejected == [*expected, (f"{others_group[-1][:7]}_2", "on_both_sides")]
    assert intake.grouped["shared_questions"] == 1 + is_same_side


# -- ids of several records ------------------------------------------------------------------------------------------


def test_other_texts_of_one_id_are_kept_on_its_side_under_ids_of_their_own(tmp_path):
    """`cat a.jsonl b.jsonl`: the second half was gone as "duplicate"."""
    questions = [("0", "q0"), ("1", "q1"), ("0", "q2"), ("1", "q3"), ("0", "q2")]
    intake = intake_of(tmp_path, [record(("human", text), A, doc_id=doc_id) for doc_id, text in questions])
    first, second, third, fourth = intake
    assert [first.doc_id, second.doc_id, third.group, fourth.group] == ["0", "1", "0", "1"]
    assert third.doc_id.startswith("0@") and fourth.doc_id.startswith("1@")
    assert [dialogue.edits for dialogue in (first, third)] == [(), ("id_repeated",)]
    assert intake.rejected == [("0", "duplicate")] and intake.records == 5


@pytest.mark.parametrize("group", [None, r"^([A-Za-z]{7})_\d+$"])
def test_a_repeated_id_stays_in_its_conversation_in_a_regenerated_file(tmp_path, group):
    """Its id ends in the hash that intake gave it, and no longer matched."""
    questions = [("abcdefg_0", "q0"), ("abcdefg_3", "q1"), ("abcdefg_3", "q2"), ("hijklmn_0", "q3")]
    records = [{"id": doc_id, "conversations": turns(("human", text), A)} for doc_id, text in questions]
    for name in ("source.json", "regenerated.json"):
        (tmp_path / name).write_text(json.dumps(records))
        dialogues = list(Intake(DataConfig(source=str(tmp_path / name), group=group, heldout_fraction=0.0)))
        assert [dialogue.group[:7] for dialogue in dialogues] == ["abcdefg"] * 3 + ["hijklmn"]
        assert len({dialogue.group for dialogue in dialogues}) == 2
        records = [{"id": item.doc_id, "messages": item.messages} for item in dialogues]
    assert "@" in dialogues[2].doc_id and not dialogues[2].edits


@pytest.mark.parametrize(
    "more",
    [
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"tools": [{"name": "f"}]},
        {"conversations": [*turns(Q), {"from": "gpt", "value": A[1], "loss": False}]},
        {"conversations": [*turns(Q), {"from": "gpt", "value": A[1], "reasoning": "hm"}]},
    ],
    ids=["keywords", "tools", "loss", "thoughts"],
)
def test_records_of_one_text_that_say_more_of_it_are_no_duplicates(tmp_path, more):
    """The second was lost, with its loss and its thoughts."""
    plain = {"id": "a", "conversations": turns(Q, A)}
    intake = intake_of(tmp_path, [plain, plain | more, plain | more, plain | {"id": "b"}])
    first, second = intake
    assert (first.doc_id, second.group, second.edits[-1]) == ("a", "a", "id_repeated") and first.text == second.text
    assert intake.rejected == [("a", "duplicate"), ("b", "duplicate_text")]


# -- by a key of the records -----------------------------------------------------------------------------------------


def groups_by(tmp_path, values: list) -> tuple[list[str], dict]:
    """Return the groups of records with these values of "user", by "user", and the counts."""
    records = [record(("human", f"q{n}"), A, doc_id=f"d{n}") | {"user": value} for n, value in enumerate(values)]
    intake = intake_of(tmp_path, records, group="user")
    return [dialogue.group for dialogue in intake], intake.grouped


@pytest.mark.parametrize(
    ("alike", "others_group"),
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
def test_a_group_is_what_its_value_is_worth(tmp_path, alike, others_group):
    """pandas writes 12.0 for 12 where another row has none: the parts of a conversation stood on both sides."""
    groups, counts = groups_by(tmp_path, alike + others_group)
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
    conversations = [turns(("human", f"q{n}"), ("gpt", f"a{n}")) for n in range(3)]
    pq.write_table(pa.table({"id": ["a", "b", "c"], "conversations": conversations, **kinds}), source)
    intake = Intake(DataConfig(source=str(source), group="user"))
    assert [dialogue.group for dialogue in intake] == ["12", "12.5", "c"] and intake.grouped["without_group"] == 1
    with pytest.raises(PipelineError, match=r"'day' is in none of 3 records: expected a key of theirs .* a number"):
        list(Intake(DataConfig(source=str(source), group="day")))


def report_of(tiny_recipe, records: list[dict], folder: Path, **settings) -> list[str]:
    data = tiny_recipe.data.model_copy(update={"source": intake_of(folder, records).data.source, **settings})
    plan = DumpPlan(tiny_recipe.model_copy(update={"data": data}), byte_tokenizer())
    rows = [task.documents for task in plan.tasks() if task.split != "answers"]
    shards = [ShardRecord("", "train", n, len(documents), 0, 0, 0, "") for n, documents in enumerate(rows)]
    spec = FeatureSpec(32, "float32", "", "", "", "")
    return report_lines(plan.recipe, Manifest(spec, shards, plan.accounting(shards)))


def test_the_report_says_how_many_have_no_group_and_how_many_share_a_question(tiny_recipe, tmp_path):
    records = json.loads(write_sharegpt(tmp_path / "data.json").read_text())
    records = [item | ({"user": number // 2} if number < 50 else {}) for number, item in enumerate(records)]
    report = report_of(tiny_recipe, records, tmp_path, group="user")
    assert "split: 50 dialogues are parts of 25 conversations, each on one side" in report
    assert "split: 10 records have no group by data.group='user': each is split by its id" in report
    questions = [("human", f"q{n // 2}" if n < 8 else f"q{n}") for n in range(40)]
    records = [record(questions[n], ("gpt", f"a{n}"), doc_id=f"d{n}") for n in range(40)]
    assert "split: 8 dialogues begin with one of 4 questions that are repeated, each on one side" in report_of(
        tiny_recipe, records, tmp_path
    )
