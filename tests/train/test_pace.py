"""How long a training still takes, on a clock that the test holds."""

from train.pace import Pace


def test_what_is_left_counts_steps_and_validations_also_while_one_runs():
    """100 steps of a second, of which 20 are behind an earlier start; every 30, and after the last, 60 s of validation
    in four parts.
    """
    now, shown = [0.0], []
    pace = Pace(100, 30, 20, lambda: now[0])
    assert pace.left(20) is None
    now[0] += 10
    assert pace.left(30) == 70  # nobody knows yet what a validation takes
    with pace.validation(4, shown.append) as part:
        now[0] += 15
        part()
        assert pace.left(30) == 70 + 3 * 60 + 45
        now[0] += 45
    assert shown == ["validation, 0 of 4", "validation, 1 of 4"]
    assert pace.left(30) == 70 + 3 * 60
    now[0] += 30
    assert pace.left(60) == 40 + 2 * 60
    with pace.validation(4, shown.append):
        now[0] += 20  # no part of it is done; the last one took a minute
        assert pace.left(60) == 40 + 2 * 60 + 40
        now[0] += 40
    now[0] += 40
    assert pace.left(100) == 0
    with pace.validation(4, shown.append):
        now[0] += 30
        assert pace.left(100) == 30
