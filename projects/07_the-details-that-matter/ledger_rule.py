"""From numbers to a verdict on a claim: the rule of the ledger.

A claim says of one or more measurements which of four answers they give. Each answer comes from
shared/verdict.py: "lower" or "higher" (than a border, 0 for most), "equal" (within δ of it), or
"can't tell". Measurements that differ in one thing, such as the learning rate, form a group and are
judged together (Holm 1979). Then of all groups of a row:

    holds                      every answer is one that the claim says
    equal within 0.02          every answer is "equal", whether the claim says so or not
    depends on the rate        some answers are as claimed and some are not; what sets them apart
    not at this scale          no answer is as claimed
    can't tell                 half of the measurements, or more, give no answer
    not yet run                no group has all its measurements
    ..., so far                a group lacks some, and is left out

A measurement that gives no answer is left out as well. A law has no numbers with an error,
and one counterexample is enough:

    holds, false

And a claim on work may hold for one way of counting it alone:

    of operations, not of time
"""

import math
from dataclasses import dataclass, field

from shared import verdict
from shared.verdict import Interval, Verdict

HOLDS = "holds"
EQUAL = "equal within "
DEPENDS = "depends on "
NOT_HERE = "not at this scale"
FALSE = "false"
WORK = "of operations, not of time"
CANT_TELL = "can't tell"
NOT_YET = "not yet run"
SO_FAR = ", so far"
KINDS = (HOLDS, EQUAL, DEPENDS, WORK, NOT_HERE, FALSE, CANT_TELL, NOT_YET)


@dataclass(frozen=True)
class Measured:
    """What was found, and under which condition."""

    condition: str
    found: Interval | float | None  # a float has no error: one text read twice; None: not yet run
    scope: str = ""  # how it was measured
    form: str = "+.3f"

    def __str__(self) -> str:
        if self.found is None:
            return NOT_YET
        if isinstance(self.found, float):
            return format(self.found, self.form)
        mean = format(self.found.mean, self.form)
        if self.found.half_width is None:
            return mean
        return f"{mean} ± {format(self.found.half_width, self.form.lstrip('+'))}"


@dataclass(frozen=True)
class Group:
    """Measurements that differ in one thing."""

    varies: str  # what sets them apart, as in "depends on the rate"
    measured: list[Measured]
    said: list[Verdict] | None = None  # the answers, where they were given together with others

    @property
    def complete(self) -> bool:
        return all(one.found is not None for one in self.measured)


@dataclass(frozen=True)
class Compared:
    """Evidence: differences, or other numbers beside a border, and the answers claimed of them."""

    claimed: tuple[str, ...]  # of verdict.ANSWERS
    groups: list[Group]
    border: float = 0.0
    delta: float = verdict.DELTA  # so near to the border is equal to it
    unit: str = "nats"
    beside: list[Measured] = field(default_factory=list)  # shown, not judged


@dataclass(frozen=True)
class Work:
    """Evidence: ratios of operations and of times, claimed to be at most so much."""

    at_most: float
    operations: float
    times: list[Measured]  # ratios, too
    beside: list[Measured] = field(default_factory=list)  # shown, not judged


@dataclass(frozen=True)
class Law:
    """Evidence for or against something that is always so, or isn't."""

    holds: bool
    shown: list[tuple[str, str]]  # what, and its value


Evidence = Compared | Work | Law

# ---------------------------------------------------------------- the rule


def judge(evidence: Evidence) -> str:
    """The verdict on a claim; begins with one of KINDS."""
    if isinstance(evidence, Law):
        return HOLDS if evidence.holds else FALSE
    if isinstance(evidence, Work):
        return judge_work(evidence)
    return judge_compared(evidence)


def judge_work(evidence: Work) -> str:
    if evidence.operations > evidence.at_most:
        return FALSE
    if any(time.found is None for time in evidence.times):
        return NOT_YET
    slow = [time for time in evidence.times if mean_of(time.found) > evidence.at_most]
    return WORK if slow else HOLDS


def mean_of(found: Interval | float) -> float:
    return found.mean if isinstance(found, Interval) else found


def judge_compared(evidence: Compared) -> str:
    complete = [group for group in evidence.groups if group.complete]
    if not complete:
        return NOT_YET
    by_group = {
        group.varies: [answer.said for answer in answers(group, evidence)] for group in complete
    }
    said = judge_answers(by_group, evidence)
    return said if len(complete) == len(evidence.groups) else said + SO_FAR


def judge_answers(by_group: dict[str, list[str]], evidence: Compared) -> str:
    """The verdict on the answers of complete groups."""
    every = [answer for found in by_group.values() for answer in found]
    given = [answer for answer in every if answer != CANT_TELL]
    as_claimed = [answer in evidence.claimed for answer in given]
    if 2 * len(given) <= len(every):
        return CANT_TELL
    if set(given) == {"equal"}:
        return f"{EQUAL}{evidence.delta:g}"
    if all(as_claimed):
        return HOLDS
    if not any(as_claimed):
        return NOT_HERE
    return DEPENDS + " and ".join(what_it_depends_on(by_group, evidence.claimed))


def what_it_depends_on(by_group: dict[str, list[str]], claimed: tuple[str, ...]) -> list[str]:
    """The groups within which some answers are as claimed and some are not.

    If there is none, the groups differ from each other: then all of them.
    """
    mixed = []
    for varies, found in by_group.items():
        sides = {answer in claimed for answer in found if answer != CANT_TELL}
        if len(sides) == 2:
            mixed.append(varies)
    return mixed or list(by_group)


def answers(group: Group, evidence: Compared) -> list[Verdict]:
    """What may be said of each number of a complete group."""
    if group.said is not None:
        return group.said
    distances = [from_border(one.found, evidence) for one in group.measured]
    intervals = [one for one in distances if isinstance(one, Interval)]
    said = iter(verdict.verdicts(intervals))
    return [
        next(said) if isinstance(one, Interval) else Verdict(without_error(one))
        for one in distances
    ]


def from_border(found: Interval | float, evidence: Compared) -> Interval | float:
    """The number's distance from the border, in units of which verdict.DELTA are its δ."""
    scale = verdict.DELTA / evidence.delta
    if isinstance(found, float):
        return (found - evidence.border) * scale
    half_width = None if found.half_width is None else found.half_width * scale
    return Interval((found.mean - evidence.border) * scale, half_width, found.n)


def without_error(distance: float) -> str:
    if math.isnan(distance):
        return CANT_TELL
    if abs(distance) <= verdict.DELTA:
        return "equal"
    return "lower" if distance < 0 else "higher"
