"""The table that a step ends in: what it calls equal, close or raised, and that one failure fails the step."""

import math

import pytest
import torch

from shared.checks import SHOWN, Checks


def verdicts(checks: Checks) -> list[str]:
    return [row[-1] for row in checks.rows]


def test_close_holds_up_to_its_tolerance_and_shows_the_worst_entry():
    checks = Checks()
    ours = torch.tensor([[1.0, 2.0], [3.0, 4.5]])
    checks.close("a", ours, torch.tensor([[1.0, 2.0], [3.0, 4.0]]), tolerance=0.5)
    checks.close("b", ours, torch.tensor([[1.0, 2.0], [3.0, 4.0]]), tolerance=0.49)
    assert verdicts(checks) == ["ok", "FAILED"]
    assert checks.rows[0][1:4] == ["4.5", "4", "5.0e-01"]


@pytest.mark.parametrize(
    ("ours", "reference", "holds"),
    [
        (math.nan, 1.0, False),
        (1.0, math.nan, False),
        (math.inf, math.inf, True),
        (math.inf, -math.inf, False),
        (math.inf, 1.0, False),
    ],
)
def test_close_with_numbers_that_are_none(ours, reference, holds):
    checks = Checks()
    checks.close("x", torch.tensor([0.0, ours]), torch.tensor([0.0, reference]), tolerance=1e30)
    assert verdicts(checks) == ["ok" if holds else "FAILED"]


def test_close_refuses_unequal_shapes_that_would_broadcast():
    checks = Checks()
    checks.close("x", torch.zeros(3, 1), torch.zeros(3), tolerance=1.0)
    assert verdicts(checks) == ["FAILED"]


def test_equal_is_exact():
    checks = Checks()
    checks.equal("same", torch.tensor([0.1]), torch.tensor([0.1]))
    checks.equal("one bit off", torch.tensor([0.1]), torch.tensor([0.1]) * (1 + 2**-23))
    checks.equal("lists", [1, 2], [1, 2])
    checks.equal("lists", [1, 2], [2, 1])
    checks.equal("counts", 124_439_808, 124_439_808)
    assert verdicts(checks) == ["ok", "FAILED", "ok", "FAILED", "ok"]
    assert checks.rows[-1][1] == "124,439,808"


def test_equal_shows_long_values_where_they_differ():
    checks = Checks()
    checks.equal("texts", "x" * 500 + "abc" + "y" * 500, "x" * 500 + "abd" + "y" * 500)
    _, ours, reference, *_ = checks.rows[0]
    assert "abc" in ours and "abd" in reference and len(ours) <= SHOWN + 6
    checks.equal("a line end", "a\nb", "a\nb")
    assert "\n" not in checks.rows[1][1]


def test_between_takes_its_ends_and_no_nan():
    checks = Checks()
    for value in (1.0, 2.0, 0.999, 2.001, math.nan):
        checks.between("x", value, 1.0, 2.0)
    assert verdicts(checks) == ["ok", "ok", "FAILED", "FAILED", "FAILED"]


def test_raises_wants_the_error_and_every_word_of_it():
    def fail():
        raise ValueError("7 does not divide 12")

    checks = Checks()
    checks.raises("both numbers", ValueError, ["7", "12"], fail)
    checks.raises("a number too many", ValueError, ["7", "13"], fail)
    checks.raises("no error", ValueError, ["7"], lambda: None)
    assert verdicts(checks) == ["ok", "FAILED", "FAILED"]
    with pytest.raises(ValueError):
        checks.raises("another error", TypeError, [], fail)


def test_report_is_1_as_soon_as_one_fails(capsys):
    checks = Checks()
    checks.equal("a", 1, 1)
    assert checks.report() == 0 and "all 1 checks hold" in capsys.readouterr().out
    checks.true("b", "seen", "wanted", False)
    assert checks.report() == 1 and "1 of 2 checks FAILED" in capsys.readouterr().out
