"""What a break_it.py is made of: instruments that read a model, sabotages that damage one, and what came of it.

A chapter defines a Patient (a frozen dataclass that can build, train and sample its model; what is expensive goes
into a cached_property), instruments that read it, and sabotages that return a damaged copy of it. A copy made by
dataclasses.replace starts without the original's cached values, so nothing measured on one is told of the other.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Patient = Any  # the chapter's own class


@dataclass(frozen=True)
class Reading:
    """What an instrument saw."""

    text: str  # for a person, with its unit
    green: bool  # as in a healthy model?
    number: float | None = None  # the same for a prediction that is about the size of something


@dataclass(frozen=True)
class Instrument:
    """One way to look at a model."""

    name: str  # kebab-case
    asks: str  # its question; "yes" is green
    read: Callable[[Patient], Reading]


@dataclass(frozen=True)
class Sabotage:
    """One mechanism damaged, and the symptom that this is predicted to have."""

    name: str  # kebab-case
    before: str  # the line of code that is damaged, as it stands in build.py,
    after: str  # and what it becomes
    predicts: str  # the symptom, stated before the run
    explains: str  # why it comes, shown after the run
    loud: bool  # would someone who watches nothing but Case.watched be alarmed?
    instrument: str  # the name of the instrument that shows the symptom
    damage: Callable[[Patient], Patient]
    also_trips: tuple[str, ...] = ()  # every further instrument that turns red
    harmless: bool = False  # the prediction is that nothing happens: its instrument stays green
    sizes: Callable[[Reading, Reading], bool] | None = None  # what `predicts` says about (healthy, broken).number

    @property
    def trips(self) -> set[str]:
        """The names of all instruments that are predicted to turn red."""
        return {*self.also_trips, *(() if self.harmless else (self.instrument,))}


@dataclass(frozen=True)
class Case:
    """What a chapter's break_it.py puts on the table."""

    healthy: Callable[[int], Patient]  # seed -> the healthy patient
    instruments: tuple[Instrument, ...]
    sabotages: tuple[Sabotage, ...]  # the chapter's own first
    vitals: Callable[[Patient], dict[str, str]]  # for the quiz: {what: value}, such as the loss at some steps
    sample: Callable[[Patient], str] | None = None  # text that the trained model wrote, or what else it does:
    does: str = "writes"  # the verb that leads to it, after "the healthy one"
    watched: str = "the training loss"  # what is all that anybody looks at, when damage counts as loud or silent
    premise: str = "from seed {seed}, on the same batches"  # what healthy and broken have in common


@dataclass(frozen=True)
class Outcome:
    """A sabotage carried out: every instrument's reading of the healthy and of the damaged model."""

    sabotage: Sabotage
    healthy: dict[str, Reading]
    broken: dict[str, Reading]

    @property
    def tripped(self) -> set[str]:
        return {name for name, reading in self.broken.items() if not reading.green}

    @property
    def came_true(self) -> bool:
        """Did its own instrument go from green to red (or stay green, if harmless), by the size predicted?"""
        before, after = self.healthy[self.sabotage.instrument], self.broken[self.sabotage.instrument]
        sized = self.sabotage.sizes is None or self.sabotage.sizes(before, after)
        return before.green and after.green == self.sabotage.harmless and sized


def examine(case: Case, patient: Patient) -> dict[str, Reading]:
    """Every instrument's reading, by the instrument's name."""
    return {instrument.name: instrument.read(patient) for instrument in case.instruments}


def verdict(outcome: Outcome) -> str:
    """In words: did the prediction come true, and if not, why not."""
    own = outcome.sabotage.instrument
    before, after = outcome.healthy[own], outcome.broken[own]
    if outcome.came_true:
        return f"As predicted: {own} went from {before.text} to {after.text}."
    if not before.green:
        return f"The prediction can't be judged: {own} is red on the healthy model already ({before.text})."
    reason = "which is not the size predicted" if after.green == outcome.sabotage.harmless else light(after)
    return f"The prediction did NOT come true: {own} went from {before.text} to {after.text}, {reason}."


def light(reading: Reading) -> str:
    return "green" if reading.green else "RED"
