"""A ratio measured side by side in one run: several rounds, taken in turns."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Ratio:
    """How many times as long ours takes as theirs, round by round."""

    what: str
    rounds: list[float]
    at_most: float | None = None  # None: shown, not judged

    @property
    def too_slow(self) -> bool:
        return self.at_most is not None and median(self.rounds) > self.at_most

    def row(self) -> list[str]:
        spread = f"{min(self.rounds):.2f} to {max(self.rounds):.2f}"
        bound = "-" if self.at_most is None else f"{self.at_most:.2f}"
        verdict = "-" if self.at_most is None else "TOO SLOW" if self.too_slow else "ok"
        return [self.what, f"{median(self.rounds):.2f}", spread, bound, verdict]


def processor_seconds(work: Callable[[], object]) -> float:
    """Processor time of work() in this process: other programs on the machine hardly enter it."""
    started = time.process_time()
    work()
    return time.process_time() - started


def in_turns(ours: Callable[[], object], theirs: Callable[[], object], rounds: int) -> list[float]:
    """Ours over theirs in each round, in processor time; a round before the first warms up."""
    found = [processor_seconds(ours) / processor_seconds(theirs) for _ in range(1 + rounds)]
    return found[1:]
