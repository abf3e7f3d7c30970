"""A difference between paired runs, its interval, and what may be said of it.

Paired: two variants are trained at the same seed, from the same numbers on the same batches. Seeds
differ more from each other than variants do, so differences are taken seed by seed.

Of a difference one of three things may be said, or nothing:

    equal            its interval lies between -0.02 and +0.02, whether 0 is in it or not
    lower, higher    its interval lies on one side of 0
    can't tell       neither; then about how many seeds would be needed, from the spread seen

The interval is the 95 % one for a single difference. Of several, some would differ by chance alone;
Holm's correction (1979) makes the intervals that decide wider, so that all that is said of them
together is true in 95 of 100 such experiments.
"""

import bisect
import math
from dataclasses import dataclass

DELTA = 0.02  # nats: a difference below it is no news to anyone who builds a model
ANSWERS = ("lower", "higher", "equal", "can't tell")
LEVEL = 0.05  # how often something untrue may be said
MOST_SEEDS = 10_000


@dataclass(frozen=True)
class Verdict:
    """What may be said, and of "can't tell" the number of seeds that would do (None: many)."""

    said: str
    needed: int | None = None


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
        """What may be said of this difference if it is the only one."""
        return verdicts([self])[0].said

    @property
    def spread(self) -> float:
        """The standard deviation of the n values."""
        return self.half_width * math.sqrt(self.n) / student_t(1 - LEVEL, self.n - 1)

    def chances(self, n: int | None = None) -> dict[str, float]:
        """How wrong each answer may be: 1 minus the level of the interval that just allows it.

        `n`: as if the mean and the spread had come from so many seeds.
        """
        n = n or self.n
        if n < 2:
            return {"equal": 1.0, "different": 1.0}
        error = max(self.spread / math.sqrt(n), 1e-300)  # of the mean
        room = max(DELTA - abs(self.mean), 0.0)  # from the mean to the nearer end of ±DELTA
        return {
            "equal": 1 - share_within(room / error, n - 1),
            "different": 1 - share_within(abs(self.mean) / error, n - 1),
        }


def interval(values: list[float]) -> Interval:
    """Mean and 95 % interval of independent values, by Student's t (n - 1 degrees of freedom)."""
    n = len(values)
    mean = sum(values) / n
    if n < 2:
        return Interval(mean, None, n)
    variance = sum((value - mean) ** 2 for value in values) / (n - 1)
    return Interval(mean, student_t(1 - LEVEL, n - 1) * math.sqrt(variance / n), n)


def paired_difference(losses: dict[int, float], baseline: dict[int, float]) -> Interval | None:
    """Mean of losses - baseline, each {seed: loss}, seed by seed; None if they share no seed."""
    pairs = [losses[seed] - baseline[seed] for seed in losses if seed in baseline]
    return interval(pairs) if pairs else None


# ---------------------------------------------------------------- what may be said


def verdicts(found: list[Interval]) -> list[Verdict]:
    """What may be said of each of these differences, together wrong in 5 of 100 experiments.

    Holm: the surest of K answers must hold at a level of 1 - 0.05/K, the next at 1 - 0.05/(K - 1),
    and so on; at the first that doesn't, this one and those after it get no answer.
    """
    chances = [difference.chances() for difference in found]
    order = sorted(range(len(found)), key=lambda i: min(chances[i].values()))
    said: dict[int, Verdict] = {}
    answered = True
    for rank, i in enumerate(order):
        level = LEVEL / (len(found) - rank)
        answered = answered and min(chances[i].values()) <= level
        if not answered:
            said[i] = Verdict("can't tell", seeds_needed(found[i], level))
        elif chances[i]["equal"] <= level:
            said[i] = Verdict("equal")
        else:
            said[i] = Verdict("lower" if found[i].mean < 0 else "higher")
    return [said[i] for i in range(len(found))]


def seeds_needed(found: Interval, level: float) -> int | None:
    """With how many seeds there would be an answer, were mean and spread as they are."""

    def enough(n: int) -> bool:
        return min(found.chances(n).values()) <= level

    if found.n < 2 or not enough(MOST_SEEDS):
        return None
    return bisect.bisect_left(range(MOST_SEEDS), True, lo=found.n + 1, key=enough)


def against(
    baseline: str, losses: dict[str, dict[int, float]]
) -> dict[str, tuple[Interval, Verdict]]:
    """The difference of every other variant to the baseline, and what may be said of it.

    losses[variant][seed]. A variant that shares no seed with the baseline is left out.
    """
    found = {}
    for name, by_seed in losses.items():
        difference = paired_difference(by_seed, losses[baseline])
        if name != baseline and difference is not None:
            found[name] = difference
    said = verdicts(list(found.values()))
    return {name: (found[name], verdict) for name, verdict in zip(found, said)}


# ---------------------------------------------------------------- Student's t


def share_within(t: float, degrees: int) -> float:
    """The share of Student's distribution from -t to t (Abramowitz & Stegun 1964, 26.7.3 and 4)."""
    angle = math.atan(t / math.sqrt(degrees))
    sine = math.sin(angle)
    cosine = math.cos(angle)
    odd = degrees % 2
    term = cosine if odd else 1.0
    total = 0.0
    for k in range(2 + odd, degrees + 1, 2):  # the series' terms: each is the last times a factor
        total += term
        term *= cosine**2 * (k - 1) / k
    if odd:
        return 2 / math.pi * (angle + sine * total)
    return sine * total


def student_t(share: float, degrees: int) -> float:
    """The t with this share of Student's distribution between -t and t, by halving."""
    low = 0.0
    high = 1.0
    while share_within(high, degrees) < share:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        if share_within(middle, degrees) < share:
            low = middle
        else:
            high = middle
    return high
