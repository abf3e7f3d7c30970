"""The frame of break_it.py: damage one mechanism of a healthy model, say first what will happen, then look.

What a chapter brings, a Case, is described in shared/instruments.py. This module reads the flags, runs healthy and
broken on the same seed and batches, and prints them side by side; or makes a quiz of it.
"""

import argparse
import difflib
import random
import sys
from pathlib import Path

import torch

from shared import cli, console
from shared.console import Table
from shared.console import UserError
from shared.instruments import Case, Outcome, Patient, Sabotage, examine, light, verdict
from shared.kernels import fastest_float32
from shared.randomness import generator


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
    with fastest_float32():
        if args.all:
            return run_all(case, args.seed or 1)
        if args.quiz or args.answer is not None:
            return quiz(case, args.seed, args.answer)
        return run_one(
            case, find(case, args.sabotage) if args.sabotage is not None else case.sabotages[0], args.seed or 1
        )


def parse(description: str, argv: list[str] | None) -> argparse.Namespace:
    """Read the flags of a break_it.py. UserError for one that can't be followed."""
    parser = cli.OneLineParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--list", action="store_true", help="name the sabotages and stop")
    what.add_argument("--sabotage", metavar="NAME", help="run this one (default: the first of the list)")
    what.add_argument("--all", action="store_true", help="run every one and sum up in a table")
    what.add_argument("--quiz", action="store_true", help="damage something at random: find out what")
    parser.add_argument("--answer", metavar="NAME", help="your answer to the quiz of --seed")
    parser.add_argument("--seed", type=cli.natural, metavar="N", help="of weights, batches and the quiz's choice")
    parser.add_argument("--tiny", action="store_true", help="accepted, and without effect: this is always tiny")
    args = parser.parse_args(argv)
    if args.answer is not None and (args.list or args.sabotage or args.all):
        raise UserError("--answer belongs to --quiz (see --help)")
    if args.answer is not None and args.seed is None:
        raise UserError("--answer needs the --seed that the quiz printed, or it can't know which quiz you mean")
    return args


# ---------------------------------------------------------------- what a person sees


def list_all(case: Case) -> int:
    rows = [[s.name, noise(s), s.predicts] for s in case.sabotages]
    console.say(Table(["sabotage", "kind", "predicted symptom"], rows))
    console.say(f"\nloud: whoever watches only {case.watched} is alarmed. silent: they aren't.")
    return 0


def run_one(case: Case, sabotage: Sabotage, seed: int) -> int:
    """One sabotage: the damage, the prediction, healthy beside broken, the verdict, the reason."""
    console.say(f"sabotage   {sabotage.name}")
    console.say(lines("  healthy  ", sabotage.before))
    console.say(lines("  broken   ", sabotage.after))
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


def run_all(case: Case, seed: int) -> int:
    """Every sabotage, its own instrument healthy and broken, and what else it trips."""
    patient, outcomes = case.healthy(seed), []
    with console.RunProgress(len(case.sabotages)) as progress:
        healthy = examine(case, patient)
        for sabotage in case.sabotages:
            outcomes.append(Outcome(sabotage, healthy, examine(case, sabotage.damage(patient))))
            progress.finish(sabotage.name, verdict(outcomes[-1]))
    rows = []
    for outcome in outcomes:
        own = outcome.sabotage.instrument
        rows.append(
            [
                outcome.sabotage.name,
                noise(outcome.sabotage),
                own,
                outcome.healthy[own].text,
                outcome.broken[own].text,
                ", ".join(sorted(outcome.tripped - {own})) or "-",
                "came true" if outcome.came_true else "DID NOT COME TRUE",
            ]
        )
    console.say()
    console.say(Table(["sabotage", "kind", "instrument", "healthy", "broken", "trips too", "prediction"], rows))
    console.say()
    failed = [outcome.sabotage.name for outcome in outcomes if not outcome.came_true]
    if failed:
        console.say(
            f"{len(failed)} of {len(rows)} predictions did NOT come true: {', '.join(failed)}", style="bold red"
        )
    else:
        console.say(f"all {len(rows)} predictions came true (seed {seed})", style="bold green")
    return 1 if failed else 0


def quiz(case: Case, seed: int | None, answer: str | None) -> int:
    """Show a healthy and a secretly damaged model's vital signs, take a guess, then tell."""
    guess = None if answer is None else find(case, answer)
    seed = seed or random.SystemRandom().randint(1, 9999)
    pick = int(torch.randint(len(case.sabotages), (1,), generator=generator(seed, "quiz")))
    secret, healthy = case.sabotages[pick], case.healthy(seed)
    broken = secret.damage(healthy)
    if guess is None:
        premise = case.premise.format(seed=seed)
        console.say(f"Two models {premise}; one was damaged first. What was done to it?")
        console.say()
        mine, theirs = case.vitals(healthy), case.vitals(broken)
        console.say(Table(["vital sign", "healthy", "damaged"], [[name, mine[name], theirs[name]] for name in mine]))
        show_samples(case, healthy, broken)
        console.say(
            "\nSuspects (--list says what each would do): " + ", ".join(sabotage.name for sabotage in case.sabotages)
        )
        guess = ask(case, broken)
    if guess is None:
        console.say(f"\nTo answer: python {Path(sys.argv[0]).name} --quiz --seed {seed} --answer NAME")
        return 0
    right = guess.name == secret.name
    console.say(f"\n{'Right: ' if right else 'No. '}it was {secret.name}.", style="bold green" if right else "bold red")
    if not right:
        console.say(f"{guess.name} would have shown this: {guess.predicts}")
    console.say()
    return run_one(case, secret, seed)


def show_samples(case: Case, healthy: Patient, broken: Patient) -> None:
    if case.sample:
        console.say(f"\nthe healthy one {case.does}:\n{lines('  | ', case.sample(healthy))}")
        console.say(f"\nthe damaged one {case.does}:\n{lines('  | ', case.sample(broken))}")


def ask(case: Case, broken: Patient) -> Sabotage | None:
    """A name typed at a terminal; None without a terminal, or at the end of input. "?" shows the instruments."""
    while sys.stdin.isatty() and sys.stdout.isatty():
        try:
            typed = input("\nWhich one? (a name, or ? to see every instrument's light) ").strip()
        except EOFError:
            return None
        if typed == "?":
            rows = [[i.name, i.asks, light(i.read(broken))] for i in case.instruments]
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
    for instrument in sorted(case.instruments, key=lambda i: i.name != own):  # a stable sort: the rest stay in order
        name = instrument.name
        state = light(outcome.broken[name])
        if (name in outcome.tripped) != (name in outcome.sabotage.trips):
            state += ", not foreseen"
        rows.append([name, instrument.asks, outcome.healthy[name].text, outcome.broken[name].text, state])
    return Table(["instrument", "asks", "healthy", "broken", "light"], rows)


def noise(sabotage: Sabotage) -> str:
    return "loud" if sabotage.loud else "silent"


def lines(prefix: str, text: str) -> str:
    return "\n".join(prefix + line for line in text.split("\n"))
