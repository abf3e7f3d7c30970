"""What a person sees: messages, tables, live progress. The only module that imports rich.

In a terminal there is colour and a live line per run. Anywhere else (a pipe, a file, a dumb
terminal) there is plain text only, not one escape byte. Text is never read as markup: `[blocks.0]`
and `[/INST]` print as they are.
"""

import io
import os
import sys
import time
from dataclasses import dataclass

import rich.box
import rich.table
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

COLUMNS = 80  # a terminal as wide as this gets bars
PIPE_WIDTH = 10_000  # a pipe has no width to fit, so no line of words is cut or wrapped
TABLE_WIDTH = 80  # of a table in a pipe or in a file, where nothing says how wide it may be
CONTROLS = {
    code: "\N{REPLACEMENT CHARACTER}"
    for code in (*range(32), *range(127, 160))
    if chr(code) not in "\t\n"
}
PLAIN_BOX = rich.box.Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)
PLAIN_EVERY = 30.0  # seconds between two progress lines where no live display is possible


class UserError(Exception):
    """A mistake of the user's: one sentence that names the value and the remedy. Exit status 2."""


class PipeConsole(Console):
    """rich's console, which lets the caller decide what a closed pipe means."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def printable(text: str) -> str:
    """The text with control characters shown as "�": data must not steer a terminal.

    Tab and newline stay.
    """
    return text.translate(CONTROLS)


silent = False  # set by silence()


def silence() -> None:
    """Say nothing from now on: of several ranks, one speaks."""
    global silent
    silent = True


def _console() -> Console:
    """A console for today's sys.stdout: looked up anew, since tests and tools exchange it."""
    if silent:
        return Console(file=io.StringIO())
    out = sys.stdout
    terminal = out.isatty()
    coloured = terminal and "NO_COLOR" not in os.environ
    return PipeConsole(
        file=out,
        force_terminal=terminal,
        force_interactive=terminal and os.environ.get("TERM") != "dumb",
        color_system="auto" if coloured else None,
        markup=False,
        emoji=False,
        highlight=False,
        width=None if terminal else PIPE_WIDTH,
    )


@dataclass(frozen=True)
class Table:
    """Rows under headers, not yet laid out: a terminal and a log file give it different widths."""

    headers: list[str]
    rows: list[list[str]]


def say(block: "str | Table" = "", style: str = "") -> None:
    """Print a message or a table. `style` (rich's, such as "bold") shows only where colour does."""
    console = _console()
    if isinstance(block, Table):
        block = table_text(block, console.width if console.is_terminal else TABLE_WIDTH)
    style = style if console.color_system else None
    console.print(printable(block).rstrip("\n"), style=style, soft_wrap=not console.is_terminal)


def complain(text: str) -> None:
    """Print one line on standard error."""
    print(printable(" ".join(text.split())), file=sys.stderr)


def tolerate_narrow_encodings() -> None:
    """A cp1252 console gets "?" for a letter that it lacks, not a crash."""
    if sys.stdout is None:  # closed by `>&-`
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def table_text(table: Table, width: int = TABLE_WIDTH) -> str:
    """A table as plain text. Phrases fold at their spaces to fit `width`.

    Where numbers would still be cut, each row becomes a short list of its own.
    """
    grid = rich.table.Table(box=PLAIN_BOX, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    unbroken = []  # what must come out in one piece: numbers, and every word
    for i, header in enumerate(table.headers):
        cells = [row[i] for row in table.rows]
        numeric = all(cell[:1] in "+-−0123456789" for cell in cells)
        pieces = header.split() + (cells if numeric else " ".join(cells).split())
        grid.add_column(
            header, justify="right" if numeric else "left", min_width=max(map(len, pieces))
        )
        unbroken += pieces
    for row in table.rows:
        grid.add_row(*row)
    out = io.StringIO()
    console = Console(
        file=out, width=width, color_system=None, markup=False, emoji=False, highlight=False
    )
    console.print(grid)
    text = "".join(line.rstrip() + "\n" for line in out.getvalue().splitlines())
    return text if all(piece in text for piece in unbroken) else records_text(table)


def log_text(blocks: list[str | Table]) -> str:
    """What the terminal showed, as plain text for a file."""
    parts = [table_text(b) if isinstance(b, Table) else b for b in blocks]
    return "\n\n".join(printable(part).rstrip("\n") for part in parts) + "\n"


def records_text(table: Table) -> str:
    """A table as plain text, one "header: value" per line."""
    blocks = []
    for row in table.rows:
        first, *others = (
            f"{header}: {cell}".replace("\n", " ")
            for header, cell in zip(table.headers, row, strict=True)
        )
        blocks.append("\n  ".join([first, *others]) + "\n")
    return "\n".join(blocks)


class RunProgress:
    """Progress of several runs: a live line for each in flight, and a line when one has ended.

    Above the live lines stands the table so far; below them, the time left for all. Where no live
    display is possible, plain lines. Use as a context manager: the cursor comes back.
    """

    def __init__(self, n_runs: int, n_steps: int = 1):
        self.n_runs = n_runs
        self.n_steps = n_steps  # of each run
        self.n_finished = 0
        self.steps: dict[str, int] = {}  # of each run in flight
        self.first_seen: dict[str, int] = {}  # where it was when first heard of, as one resumes
        self.started = None  # when the first step was reported
        self.estimated = False
        self.console = _console()
        self.live = self.console.is_interactive
        self.table = ""
        foldable = rich.table.Column(no_wrap=False, overflow="fold")  # a narrow terminal folds
        line = TextColumn(
            "{task.description}  {task.completed:.0f}/{task.total:.0f}  {task.fields[note]}",
            table_column=foldable,
        )
        bar = [BarColumn(bar_width=12)] if self.console.width >= COLUMNS else []
        self.bars = Progress(*bar, line, console=self.console)
        self.display = Live(
            get_renderable=self.renderable,
            console=self.console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self.tasks = {}
        self.last_line = time.monotonic()

    def renderable(self) -> Group:
        return Group(Text(self.table), self.bars, Text(self.time_left()))

    def __enter__(self) -> "RunProgress":
        if self.live:
            self.display.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.display.stop()

    def update(self, run: str, done: int, note: str) -> None:
        """`run` has done so many of its steps."""
        self.first_seen.setdefault(run, done)
        self.started = self.started or time.monotonic()
        self.steps[run] = done
        if self.live:
            if run not in self.tasks:
                self.tasks[run] = self.bars.add_task(run, total=self.n_steps, note="")
            self.bars.update(self.tasks[run], completed=done, note=note)
        elif not self.estimated and self.time_left():
            self.estimated = True
            self.say(self.time_left())
        elif time.monotonic() - self.last_line > PLAIN_EVERY:
            self.say(f"{run}: step {done:,} of {self.n_steps:,}, {note}; {self.time_left()}")

    def time_left(self) -> str:
        """How long the rest will take at the speed so far; empty before that is known."""
        done_here = sum(done - self.first_seen[run] for run, done in self.steps.items())
        if not done_here:
            return ""
        left = self.n_runs * self.n_steps - sum(self.steps.values())
        seconds = (time.monotonic() - self.started) * left / done_here
        return f"about {duration(seconds)} left"

    def finish(self, run: str, note: str) -> None:
        """`run` is over."""
        self.n_finished += 1
        self.steps[run] = self.n_steps
        self.first_seen.setdefault(run, self.n_steps)
        if run in self.tasks:
            self.bars.remove_task(self.tasks.pop(run))
        self.say(f"[{self.n_finished}/{self.n_runs}] {run}: {note}")

    def show(self, table: Table) -> None:
        """The table as it stands now."""
        self.table = "\n" + printable(table_text(table, self.console.width)) + "\n"

    def say(self, text: str) -> None:
        """Print a line above the live ones."""
        self.last_line = time.monotonic()
        self.console.print(printable(text), soft_wrap=not self.live)


def duration(seconds: float) -> str:
    """A length of time in the unit that a person would use."""
    for unit, name, most in ((1, "second", 90), (60, "minute", 90), (3600, "hour", 48)):
        if seconds / unit < most:
            count = round(seconds / unit)
            return f"{count} {name}{'s' * (count != 1)}"
    return f"{seconds / 86400:,.0f} days"
