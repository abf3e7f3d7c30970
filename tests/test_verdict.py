"""What may be said of a paired difference: the statistics against closed forms."""

import math

import pytest
import torch

from shared import verdict
from shared.verdict import Interval, interval, paired_difference

@pytest.mark.parametrize("degrees", sorted(verdict.T_95))
def test_the_t_table_holds_95_percent(degrees):
    """Student's density, integrated numerically from −t to t, is 0.95 to the table's three decimals."""
    t = verdict.T_95[degrees]
    x = torch.linspace(-t, t, 200_001, dtype=torch.float64)
    log_scale = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - 0.5 * math.log(degrees * math.pi)
    density = math.exp(log_scale) * (1 + x**2 / degrees) ** (-(degrees + 1) / 2)
    assert torch.trapezoid(density, x).item() == pytest.approx(0.95, abs=5e-5)


def test_an_interval_by_hand():
    """1, 2, 6: mean 3, sample variance 7, so 4.303 · √(7/3)."""
    assert interval([1, 2, 6]) == Interval(3.0, pytest.approx(6.573, abs=1e-3), 3)
    assert interval([5.0]) == Interval(5.0, None, 1)


def test_between_two_entries_of_the_table_the_interval_is_the_wider_one():
    values = [(-1.0) ** i for i in range(19)]  # 18 degrees of freedom: the table has 15 and 20
    variance = sum((v - 1 / 19 * sum(values)) ** 2 for v in values) / 18
    assert interval(values).half_width == pytest.approx(verdict.T_95[15] * math.sqrt(variance / 19))


@pytest.mark.parametrize(
    ("mean", "half_width", "says"),
    [
        (-0.2, 0.1, "lower"),
        (0.2, 0.1, "higher"),
        (0.1, 0.1, "can't tell"),
        (-0.05, 0.1, "can't tell"),
        (-9.0, None, "can't tell"),
    ],
)
def test_a_verdict_says_no_more_than_the_interval(mean, half_width, says):
    assert Interval(mean, half_width, 3).verdict == says


def test_differences_are_taken_seed_by_seed_and_only_where_both_finished():
    baseline = {1: 10.0, 2: 20.0, 3: 30.0}
    losses = {1: 10.5, 2: 20.7, 4: 0.0}
    difference = paired_difference(losses, baseline)
    assert (difference.mean, difference.n) == (pytest.approx(0.6), 2)
    # The losses themselves spread a hundred times wider.
    assert difference.half_width == pytest.approx(12.706 * 0.1)
    assert paired_difference({5: 1.0}, baseline) is None
