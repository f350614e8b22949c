"""A line of a journal is whole or does not count."""

import logging

from pipeline.basics.files import Journal
from tests.kit import flip, replace_once

TASKS = [("set", f"q{number}", 0.0) for number in range(4)]


def filled(path, key="key") -> Journal:
    journal = Journal(path, key)
    for number, task in enumerate(TASKS):
        journal.add(task, {"checked": 7 + number, "text": "é\n\u2028"})
    return journal


def test_outcomes_come_back_and_the_newest_counts(tmp_path):
    journal = filled(tmp_path / "j")
    journal.add(TASKS[0], {"checked": 1})
    for opened in (journal, Journal(tmp_path / "j", "key")):
        assert list(opened) == TASKS and TASKS[1] in opened and ("set", "q9", 0.0) not in opened
        assert opened[TASKS[0]] == {"checked": 1} and opened[TASKS[3]] == {"checked": 10, "text": "é\n\u2028"}
    assert list(Journal(tmp_path / "empty", "key")) == []


def test_a_changed_line_does_not_count_and_is_told(tmp_path, caplog):
    filled(tmp_path / "j")
    before = (tmp_path / "j").read_text().splitlines()
    replace_once(tmp_path / "j", '"checked": 8', '"checked": 9')
    with caplog.at_level(logging.WARNING):
        again = Journal(tmp_path / "j", "key")
    assert list(again) == [TASKS[number] for number in (0, 2, 3)]
    (warning,) = caplog.messages  # said once
    assert warning == f"{tmp_path / 'j'}: line 2 is damaged and removed: its task is repeated"
    assert (tmp_path / "j").read_text().splitlines() == [before[number] for number in (0, 2, 3)]
    assert [again[task]["checked"] for task in again] == [7, 9, 10]  # each at its new place


def test_a_torn_last_line_is_dropped_without_a_word(tmp_path, caplog):
    filled(tmp_path / "j")
    content = (tmp_path / "j").read_bytes()
    (tmp_path / "j").write_bytes(content[:-30])
    again = Journal(tmp_path / "j", "key")
    assert list(again) == TASKS[:3] and not caplog.text
    again.add(TASKS[3], {"checked": 10, "text": "é\n\u2028"})
    assert (tmp_path / "j").read_bytes() == content


def test_lines_of_another_key_stay_and_do_not_count(tmp_path, caplog):
    filled(tmp_path / "j")
    content = (tmp_path / "j").read_bytes()
    assert list(Journal(tmp_path / "j", "other")) == [] and (tmp_path / "j").read_bytes() == content
    flip(tmp_path / "j", 3)
    assert list(Journal(tmp_path / "j", "other")) == [] and "line 1 is damaged" in caplog.text
