"""What may be said of a paired difference: the statistics against closed forms."""

import math

import pytest
import torch

from shared import verdict
from shared.verdict import Interval, Verdict, interval, paired_difference, verdicts

T_95 = {
    1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228,
    12: 2.179, 15: 2.131, 20: 2.086, 30: 2.042, 60: 2.000, 120: 1.980,
}  # fmt: skip


@pytest.mark.parametrize("degrees", T_95)
def test_students_t_is_the_one_of_the_printed_tables(degrees):
    assert verdict.student_t(0.95, degrees) == pytest.approx(T_95[degrees], abs=5.1e-4)


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 5, 12, 61])
@pytest.mark.parametrize("t", [0.1, 1.3, 7.0])
def test_the_share_within_t_is_the_integral_of_students_density(degrees, t):
    x = torch.linspace(-t, t, 200_001, dtype=torch.float64)
    log_scale = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - 0.5 * math.log(degrees * math.pi)
    density = math.exp(log_scale) * (1 + x**2 / degrees) ** (-(degrees + 1) / 2)
    assert verdict.share_within(t, degrees) == pytest.approx(torch.trapezoid(density, x).item(), abs=1e-9)


def test_an_interval_by_hand():
    """1, 2, 6: mean 3, sample variance 7, so 4.303 · √(7/3)."""
    assert interval([1, 2, 6]) == Interval(3.0, pytest.approx(6.573, abs=1e-3), 3)
    assert interval([5.0]) == Interval(5.0, None, 1)


@pytest.mark.parametrize(
    ("mean", "half_width", "says"),
    [
        (-0.2, 0.19, "lower"),
        (0.2, 0.19, "higher"),
        (0.1, 0.101, "can't tell"),
        (-0.05, 0.1, "can't tell"),
        (0.0, 0.0199, "equal"),
        (0.0, 0.0201, "can't tell"),
        (-0.015, 0.0049, "equal"),  # 0 lies outside, too: equal all the same
        (-0.015, 0.0051, "lower"),  # and a little wider it reaches beyond the bound
        (0.0201, 0.0001, "higher"),
        (0.03, 0.0, "higher"),
        (0.0, 0.0, "equal"),
        (-9.0, None, "can't tell"),
    ],
)
def test_a_single_difference_is_judged_by_its_95_percent_interval(mean, half_width, says):
    n = 1 if half_width is None else 3
    assert Interval(mean, half_width, n).verdict == says


def at_level(level: float, n: int = 4) -> Interval:
    """A difference of 1 whose interval of this level ends just short of 0."""
    error = 0.999 / verdict.student_t(level, n - 1)
    return Interval(1.0, verdict.student_t(0.95, n - 1) * error, n)


@pytest.mark.parametrize(
    ("levels", "answered"),
    [
        ([0.984, 0.976, 0.951], [True, True, True]),  # Holm: 1 - 0.05/3 = 0.983, 0.975, 0.95
        ([0.951, 0.984, 0.976], [True, True, True]),
        ([0.982, 0.982, 0.982], [False, False, False]),  # the surest doesn't reach 0.983
        ([0.999, 0.974, 0.974], [True, False, False]),
        ([0.999, 0.976, 0.949], [True, True, False]),
    ],
)
def test_several_answers_are_given_by_holms_steps(levels, answered):
    said = [judged.said for judged in verdicts([at_level(level) for level in levels])]
    assert said == ["higher" if yes else "can't tell" for yes in answered]


@pytest.mark.parametrize(
    ("mean", "spread", "needed"),
    [
        (0.01, 0.01, 7),  # t(6) / √7 = 0.925, t(5) / √6 = 1.049 of the spread: to exclude 0 and to be equal alike
        (0.0, 0.02, 7),  # to be equal within one spread
        (0.1, 1.0, 387),  # 1.966² · 100: as of a Gaussian
    ],
)
def test_the_seeds_that_would_be_needed(mean, spread, needed):
    n = 3
    found = Interval(mean, verdict.student_t(0.95, n - 1) * spread / math.sqrt(n), n)
    assert found.spread == pytest.approx(spread)
    (judged,) = verdicts([found])
    assert judged == Verdict("can't tell", needed)
    for more, answers in ((needed - 1, False), (needed, True)):
        half_width = verdict.student_t(0.95, more - 1) * spread / math.sqrt(more)
        assert (Interval(mean, half_width, more).verdict != "can't tell") == answers


def test_of_one_seed_nothing_can_be_said_nor_how_many_would_do():
    assert verdicts([interval([3.0])]) == [Verdict("can't tell", None)]
    assert verdicts([]) == []


def test_against_a_baseline_each_variant_has_its_difference_and_its_answer():
    losses = {"a": {1: 1.0, 2: 2.0, 3: 3.0}, "b": {1: 1.5, 2: 2.51, 3: 3.49}, "c": {7: 1.0}}
    found = verdict.against("a", losses)
    assert list(found) == ["b"] and found["b"][0].mean == pytest.approx(0.5) and found["b"][1] == Verdict("higher")


def test_differences_are_taken_seed_by_seed_and_only_where_both_finished():
    baseline = {1: 10.0, 2: 20.0, 3: 30.0}
    losses = {1: 10.5, 2: 20.7, 4: 0.0}
    difference = paired_difference(losses, baseline)
    assert (difference.mean, difference.n) == (pytest.approx(0.6), 2)
    # The losses themselves spread a hundred times wider.
    assert difference.half_width == pytest.approx(12.7062047 * 0.1)
    assert paired_difference({5: 1.0}, baseline) is None
