"""The frame of break_it.py: damage one part of a healthy model, say first what will happen, look.

A chapter defines a Patient, instruments that read it, and sabotages. A Patient is a frozen
dataclass that can build, train and sample its model. Its field `edits` holds the edits of the
build.py that its model is made from; a damaged patient is a copy with other edits. What is
expensive goes into a cached_property: a copy made by dataclasses.replace starts without the
original's cached values, so nothing measured on one is told of the other.

A sabotage is an edit of the chapter's build.py. The edited build is what is loaded, and the edit is
what is printed, so what is shown is what runs. This module reads the flags, runs healthy and broken
on the same seed and batches, and prints them side by side; or makes a quiz of it.
"""

import argparse
import ast
import difflib
import inspect
import random
import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from shared import chapters, cli, console
from shared.chapters import Edit
from shared.console import Table, UserError
from shared.randomness import generator

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


@dataclass(frozen=True, kw_only=True)
class Sabotage:
    """One mechanism damaged, and the symptom that this is predicted to have."""

    name: str  # kebab-case
    edits: tuple[Edit, ...] = ()  # of the build.py of this chapter, or of one that it stands on
    later: bool = False  # are the edits made when training is over?
    function: Callable | None = None  # instead of edits, what is no line of a build
    predicts: str  # the symptom, stated before the run
    explains: str  # why it comes, shown after the run
    loud: bool  # would someone who watches nothing but Case.watched be alarmed?
    instrument: str  # the name of the instrument that shows the symptom
    also_trips: tuple[str, ...] = ()  # every further instrument that turns red
    harmless: bool = False  # the prediction is that nothing happens: its instrument stays green
    # What `predicts` says about the numbers of the two readings, (healthy, broken).
    sizes: Callable[[Reading, Reading], bool] | None = None

    @property
    def trips(self) -> set[str]:
        """The names of all instruments that are predicted to turn red."""
        return {*self.also_trips, *(() if self.harmless else (self.instrument,))}

    def damage(self, patient: Patient) -> Patient:
        """A damaged copy: the patient with this in its field `edits`, `later` or `function`."""
        if self.function is not None:
            return replace(patient, function=self.function)
        return replace(patient, **{"later" if self.later else "edits": self.edits})

    def shown(self) -> str:
        """What is done to the code, for a person: the edit as a diff, or the function's source."""
        if self.function is not None:
            return textwrap.dedent(inspect.getsource(self.function)).rstrip()
        return diff(self.edits)


@dataclass(frozen=True)
class Case:
    """What a chapter's break_it.py puts on the table."""

    healthy: Callable[[int], Patient]  # seed -> the healthy patient
    instruments: tuple[Instrument, ...]
    sabotages: tuple[Sabotage, ...]  # the chapter's own first
    vitals: Callable[[Patient], dict[str, str]]  # for the quiz: {what: value}, such as the loss
    sample: Callable[[Patient], str] | None = None  # what the trained model writes, or else does
    does: str = "writes"  # the verb that leads to the sample, after "the healthy one"
    watched: str = "the training loss"  # damage that shows there is loud, other damage silent
    premise: str = "from seed {seed}, on the same batches"  # what healthy and broken have in common
    chapter: int | None = None  # whose build.py --edit edits
    columns: tuple[str, ...] = ()  # instruments whose readings are columns in the table of --all


@dataclass(frozen=True)
class Outcome:
    """A sabotage carried out: what every instrument reads of the healthy and the damaged model."""

    sabotage: Sabotage
    healthy: dict[str, Reading]
    broken: dict[str, Reading]

    @property
    def tripped(self) -> set[str]:
        return {name for name, reading in self.broken.items() if not reading.green}

    @property
    def came_true(self) -> bool:
        """Did its own instrument turn red (or stay green, if harmless), by the size predicted?"""
        before = self.healthy[self.sabotage.instrument]
        after = self.broken[self.sabotage.instrument]
        sized = self.sabotage.sizes is None or self.sabotage.sizes(before, after)
        return before.green and after.green == self.sabotage.harmless and sized


def examine(case: Case, patient: Patient) -> dict[str, Reading]:
    """Every instrument's reading, by the instrument's name."""
    return {instrument.name: read(instrument, patient) for instrument in case.instruments}


def read(instrument: Instrument, patient: Patient) -> Reading:
    """What an instrument reads: a damage that draws numbers gets the same ones each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return instrument.read(patient)


def verdict(outcome: Outcome) -> str:
    """In words: did the prediction come true, and if not, why not."""
    own = outcome.sabotage.instrument
    before = outcome.healthy[own]
    after = outcome.broken[own]
    change = f"{own} went from {before.text} to {after.text}"
    if outcome.came_true:
        return f"As predicted: {change}."
    if not before.green:
        return (
            f"The prediction can't be judged: {own} is red on the healthy model already "
            f"({before.text})."
        )
    as_light = after.green == outcome.sabotage.harmless
    reason = "which is not the size predicted" if as_light else light(after)
    return f"The prediction did NOT come true: {change}, {reason}."


def light(reading: Reading) -> str:
    return "green" if reading.green else "RED"


# ---------------------------------------------------------------- an edit as a person sees it


def diff(edits: Sequence[Edit]) -> str:
    """The lines that `edits` change, "-" before and "+" after, and where they stand."""
    blocks = []
    for chapter, source in chapters.edited_sources(edits).items():
        path = chapters.build_file(chapter)
        original = path.read_text(encoding="utf-8")
        before = original.splitlines()
        after = source.splitlines()
        matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
        for kind, i, i_end, j, j_end in matcher.get_opcodes():
            if kind != "equal":
                old = without_comments(before[i:i_end])
                new = without_comments(after[j:j_end])
                if old == new:  # it is the comment that was edited
                    old = before[i:i_end]
                    new = after[j:j_end]
                next_line = without_comments(before[i : i + 1]) if kind == "insert" else []
                block = textwrap.dedent("\n".join([*old, *new, *next_line])).split("\n")
                signs = "-" * len(old) + "+" * len(new) + " " * len(next_line)
                place = f"{enclosing(original, i + 1)}line {i + 1}"
                blocks.append(f"in chapter {chapter:02d}'s build.py, {place}:")
                blocks += [f"{sign} {line}".rstrip() for sign, line in zip(signs, block)]
    return "\n".join(blocks)


def without_comments(code: list[str]) -> list[str]:
    """Lines of code without the remarks behind them, which the diff has no room for."""
    return [re.sub(r"(?<=\S)  +# .*$", "", line) for line in code]


def enclosing(source: str, line: int) -> str:
    """The function or class that a line stands in, such as "GPT.embed, "; empty in none."""
    names = []
    body = ast.parse(source).body
    while body:
        inside = [node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
        inside = [node for node in inside if node.lineno <= line <= node.end_lineno]
        names += [node.name for node in inside]
        body = inside[0].body if inside else []
    return f"{'.'.join(names)}, " if names else ""


# ---------------------------------------------------------------- the flags


def find(case: Case, name: str) -> Sabotage:
    """The sabotage called `name`. UserError if there is none."""
    by_name = {sabotage.name: sabotage for sabotage in case.sabotages}
    if name not in by_name:
        near = difflib.get_close_matches(name, by_name, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(by_name)}"
        raise UserError(f"there is no sabotage {name!r}; {hint}")
    return by_name[name]


def main(case: Case, description: str, argv: list[str] | None = None) -> int:
    """Do what the flags say. Returns the exit status: 0 if every prediction came true, else 1."""
    args = parse(description, argv)
    torch.set_num_threads(1)
    if args.list:
        return list_all(case)
    if args.edit is not None:
        return run_edit(case, *args.edit, args.seed or 1)
    if args.all:
        return run_all(case, args.seed or 1)
    if args.quiz or args.answer is not None:
        return quiz(case, args.seed, args.answer)
    sabotage = case.sabotages[0] if args.sabotage is None else find(case, args.sabotage)
    return run_one(case, sabotage, args.seed or 1)


def parse(description: str, argv: list[str] | None) -> argparse.Namespace:
    """Read the flags of a break_it.py. UserError for one that can't be followed."""
    parser = cli.OneLineParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--list", action="store_true", help="name the sabotages and stop")
    what.add_argument("--sabotage", metavar="NAME", help="run this one (default: the first)")
    what.add_argument("--all", action="store_true", help="run every one and sum up in a table")
    what.add_argument("--quiz", action="store_true", help="one at random: find out which")
    what.add_argument(
        "--edit",
        nargs=2,
        metavar=("OLD", "NEW"),
        help="put NEW in the place of OLD, a piece of build.py that stands there once, and look",
    )
    parser.add_argument("--answer", metavar="NAME", help="your answer to the quiz of --seed")
    seed_help = "of weights, batches and the quiz's choice"
    parser.add_argument("--seed", type=cli.natural, metavar="N", help=seed_help)
    tiny_help = "accepted, and without effect: this is always tiny"
    parser.add_argument("--tiny", action="store_true", help=tiny_help)
    args = parser.parse_args(argv)
    if args.answer is not None and (args.list or args.sabotage or args.all or args.edit):
        raise UserError("--answer belongs to --quiz (see --help)")
    if args.answer is not None and args.seed is None:
        raise UserError("--answer needs the --seed that the quiz printed: which quiz do you mean?")
    return args


# ---------------------------------------------------------------- what a person sees


def list_all(case: Case) -> int:
    rows = [[s.name, noise(s), s.predicts] for s in case.sabotages]
    console.say(Table(["sabotage", "kind", "predicted symptom"], rows))
    console.say(f"\nloud: {case.watched} gets visibly worse.")
    console.say(f"silent: not visible in {case.watched}, or only as something that got better.")
    return 0


def run_one(case: Case, sabotage: Sabotage, seed: int) -> int:
    """One sabotage: the damage, the prediction, healthy beside broken, the verdict, the reason."""
    console.say(f"sabotage   {sabotage.name}{', when training is over' if sabotage.later else ''}")
    console.say(lines("  ", sabotage.shown()))
    console.say(f"predicted  {sabotage.predicts} ({noise(sabotage)})")
    console.say(f"\nBoth {case.premise.format(seed=seed)}:")
    console.say()
    healthy = case.healthy(seed)
    broken = sabotage.damage(healthy)
    outcome = Outcome(sabotage, examine(case, healthy), examine(case, broken))
    console.say(outcome_table(case, outcome))
    show_samples(case, healthy, broken)
    console.say(f"\n{verdict(outcome)}", style="bold green" if outcome.came_true else "bold red")
    console.say()
    console.say(sabotage.explains)
    return 0 if outcome.came_true else 1


def run_edit(case: Case, old: str, new: str, seed: int) -> int:
    """A reader's own edit: every instrument's light on the healthy model and on the edited one."""
    if case.chapter is None:
        raise UserError("--edit is not for this chapter")
    if old == new:
        raise UserError("--edit: OLD and NEW are the same, so nothing would change")
    edits = (Edit(case.chapter, old, new),)
    chapters.edited_build(case.chapter, edits)  # refuses what can't be edited or loaded
    console.say(lines("  ", diff(edits)))
    console.say(f"\nBoth {case.premise.format(seed=seed)}:")
    console.say()
    healthy = case.healthy(seed)
    edited = replace(healthy, edits=edits)
    rows = []
    red = []
    errors = []
    for instrument in case.instruments:
        well = read(instrument, healthy).text
        try:
            reading = read(instrument, edited)
        except Exception as error:  # whatever the reader's code may do
            errors.append(error)
            reading = Reading(f"fails: {type(error).__name__}", False)
        if not reading.green:
            red.append(instrument.name)
        rows.append([instrument.name, instrument.asks, well, reading.text, light(reading)])
    console.say(Table(["instrument", "asks", "healthy", "edited", "light"], rows))
    if not errors:
        try:
            show_samples(case, healthy, edited)
        except Exception as error:
            errors.append(error)
    if errors:
        console.say(f"\nThe edited model doesn't run: {where(errors[0])}")
    if red:
        console.say(f"\n{len(red)} of {len(rows)} lights are red: {', '.join(red)}")
    else:
        console.say("\nNo light is red.")
    return 0


def where(error: Exception) -> str:
    """An error, and the last line of a build.py that it passed."""
    text = f"{type(error).__name__}: {error}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "build.py" in f.filename]
    return f"{text}\n  build.py, line {frames[-1].lineno}: {frames[-1].line}" if frames else text


def run_all(case: Case, seed: int) -> int:
    """Every sabotage, its own instrument healthy and broken, and what else it trips."""
    patient = case.healthy(seed)
    outcomes = []
    with console.RunProgress(len(case.sabotages)) as progress:
        healthy = examine(case, patient)
        for sabotage in case.sabotages:
            outcomes.append(Outcome(sabotage, healthy, examine(case, sabotage.damage(patient))))
            progress.finish(sabotage.name, verdict(outcomes[-1]))
    rows = []
    for outcome in outcomes:
        one = outcome.sabotage
        also = ", ".join(sorted(outcome.tripped - {one.instrument, *case.columns})) or "-"
        columns = [outcome.broken[name].text for name in case.columns]
        rows.append([one.name, noise(one), one.instrument, also, *columns])
    console.say()
    console.say(Table(["sabotage", "kind", "its light", "also red", *case.columns], rows))
    console.say()
    for name in case.columns:
        asks = next(i.asks for i in case.instruments if i.name == name)
        console.say(f"{name}: {asks}")
    if case.columns:
        console.say()
    failed = [outcome.sabotage.name for outcome in outcomes if not outcome.came_true]
    if failed:
        names = ", ".join(failed)
        text = f"{len(failed)} of {len(rows)} predictions did NOT come true: {names}"
        console.say(text, style="bold red")
    else:
        console.say(f"all {len(rows)} predictions came true (seed {seed})", style="bold green")
    return 1 if failed else 0


def quiz(case: Case, seed: int | None, answer: str | None) -> int:
    """Show a healthy and a secretly damaged model's vital signs, take a guess, then tell."""
    guess = None if answer is None else find(case, answer)
    seed = seed or random.SystemRandom().randint(1, 9999)
    pick = int(torch.randint(len(case.sabotages), (1,), generator=generator(seed, "quiz")))
    secret = case.sabotages[pick]
    healthy = case.healthy(seed)
    broken = secret.damage(healthy)
    if guess is None:
        premise = case.premise.format(seed=seed)
        console.say(f"Two models {premise}; one was damaged first. What was done to it?")
        console.say()
        mine = case.vitals(healthy)
        theirs = case.vitals(broken)
        rows = [[name, mine[name], theirs[name]] for name in mine]
        console.say(Table(["vital sign", "healthy", "damaged"], rows))
        show_samples(case, healthy, broken)
        suspects = ", ".join(sabotage.name for sabotage in case.sabotages)
        console.say(f"\nSuspects (--list says what each would do): {suspects}")
        guess = ask(case, broken)
    if guess is None:
        script = Path(sys.argv[0]).name
        console.say(f"\nTo answer: python {script} --quiz --seed {seed} --answer NAME")
        return 0
    right = guess.name == secret.name
    said = "Right: it was" if right else "No. it was"
    console.say(f"\n{said} {secret.name}.", style="bold green" if right else "bold red")
    if not right:
        console.say(f"{guess.name} would have shown this: {guess.predicts}")
    console.say()
    return run_one(case, secret, seed)


def show_samples(case: Case, healthy: Patient, broken: Patient) -> None:
    if case.sample:
        console.say(f"\nthe healthy one {case.does}:\n{lines('  | ', case.sample(healthy))}")
        console.say(f"\nthe damaged one {case.does}:\n{lines('  | ', case.sample(broken))}")


def ask(case: Case, broken: Patient) -> Sabotage | None:
    """A name typed at a terminal; None without one, or at the end of input; "?" shows lights."""
    while sys.stdin.isatty() and sys.stdout.isatty():
        try:
            typed = input("\nWhich one? (a name, or ? to see every instrument's light) ").strip()
        except EOFError:
            return None
        if typed == "?":
            rows = [[i.name, i.asks, light(read(i, broken))] for i in case.instruments]
            console.say(Table(["instrument", "asks", "damaged"], rows))
            continue
        try:
            return find(case, typed)
        except UserError as error:
            console.say(str(error))
    return None


def outcome_table(case: Case, outcome: Outcome) -> Table:
    """One row per instrument, the sabotage's own first."""
    own = outcome.sabotage.instrument
    rows = []
    ordered = sorted(case.instruments, key=lambda i: i.name != own)  # the others keep their order
    for instrument in ordered:
        name = instrument.name
        state = light(outcome.broken[name])
        if (name in outcome.tripped) != (name in outcome.sabotage.trips):
            state += ", not foreseen"
        healthy = outcome.healthy[name].text
        broken = outcome.broken[name].text
        rows.append([name, instrument.asks, healthy, broken, state])
    return Table(["instrument", "asks", "healthy", "broken", "light"], rows)


def noise(sabotage: Sabotage) -> str:
    return "loud" if sabotage.loud else "silent"


def lines(prefix: str, text: str) -> str:
    return "\n".join(prefix + line for line in text.split("\n"))
