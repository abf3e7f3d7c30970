"""A difference between paired runs, its interval, and what may be said of it.

Paired: two variants are trained at the same seed, from the same numbers on the same batches. Seeds
differ more from each other than variants do, so differences are taken seed by seed.
"""

import math
from dataclasses import dataclass

# Student's t: half of a 95 % interval holds this many standard errors, by degrees of freedom
# (seeds − 1). Between two entries the one for fewer degrees is used: slightly too wide.
T_95 = {
    1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447,
    7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228, 12: 2.179, 15: 2.131,
    20: 2.086, 30: 2.042, 60: 2.000, 120: 1.980,
}  # fmt: skip


@dataclass(frozen=True)
class Interval:
    """A mean over n seeds, and half the width of its 95 % interval (None for a single seed)."""

    mean: float
    half_width: float | None
    n: int

    def __str__(self) -> str:
        number = f"{self.mean:+.3f}"
        return number if self.half_width is None else f"{number} ± {self.half_width:.3f}"

    @property
    def verdict(self) -> str:
        """One of "lower", "higher" or "can't tell": never more than the interval supports."""
        if self.half_width is None or abs(self.mean) <= self.half_width:
            return "can't tell"
        return "lower" if self.mean < 0 else "higher"


def interval(values: list[float]) -> Interval:
    """Mean and 95 % interval of independent values, by Student's t (n − 1 degrees of freedom)."""
    n = len(values)
    mean = sum(values) / n
    if n < 2:
        return Interval(mean, None, n)
    variance = sum((value - mean) ** 2 for value in values) / (n - 1)
    t = T_95[max(degrees for degrees in T_95 if degrees <= n - 1)]
    return Interval(mean, t * math.sqrt(variance / n), n)


def paired_difference(losses: dict[int, float], baseline: dict[int, float]) -> Interval | None:
    """Mean of losses − baseline, each {seed: loss}, seed by seed; None if they share no seed."""
    pairs = [losses[seed] - baseline[seed] for seed in losses if seed in baseline]
    return interval(pairs) if pairs else None
