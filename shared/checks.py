"""The table that a page ends in: what was checked, ours, the reference, the error, the verdict."""

import math

import torch

from shared import console

Value = torch.Tensor | float | int
SHOWN = 48  # characters of a long value


class Checks:
    """Collects comparisons; report() prints them and says whether all of them held."""

    def __init__(self) -> None:
        self.rows: list[list[str]] = []
        self.failed = 0
        self.tensors = False  # does a row stand for a whole tensor?

    def close(self, what: str, ours: Value, reference: Value, tolerance: float) -> None:
        """|ours − reference| <= tolerance everywhere. Of a tensor, the entry furthest off shows."""
        ours = as_float64(ours)
        reference = as_float64(reference)
        if ours.shape != reference.shape:
            self.add(
                what,
                f"shape {tuple(ours.shape)}",
                f"shape {tuple(reference.shape)}",
                "-",
                "-",
                False,
            )
            return
        self.tensors = self.tensors or ours.numel() > 1
        gap = (ours - reference).abs()
        gap = torch.where(
            ours == reference, torch.zeros_like(gap), gap
        )  # equal infinities are no error
        worst = int(gap.nan_to_num(nan=math.inf).argmax())
        error = gap.flatten()[worst].item()
        self.add(
            what,
            f"{ours.flatten()[worst].item():.7g}",
            f"{reference.flatten()[worst].item():.7g}",
            f"{error:.1e}",
            f"{tolerance:.1e}",
            error <= tolerance,  # False for NaN
        )

    def equal(self, what: str, ours: object, reference: object) -> None:
        """ours == reference, exactly: counts, strings, lists, or tensors bit for bit."""
        if (
            isinstance(ours, torch.Tensor)
            and isinstance(reference, torch.Tensor)
            and ours.shape == reference.shape
        ):
            self.close(what, ours, reference, tolerance=0.0)
        else:
            self.add(
                what,
                *around_difference(show(ours), show(reference)),
                "-",
                "exact",
                ours == reference,
            )

    def between(self, what: str, ours: float, low: float, high: float) -> None:
        """low <= ours <= high, for what is measured and not computed."""
        self.add(what, f"{ours:.4g}", f"{low:.4g} to {high:.4g}", "-", "-", low <= ours <= high)

    def true(self, what: str, ours: str, expected: str, holds: bool) -> None:
        """What no number sums up: what was seen, what was expected, whether it is so."""
        self.add(what, ours, expected, "-", "-", holds)

    def raises(self, what: str, error: type[Exception], mentions: list[str], action) -> None:
        """action() raises `error`, whose text mentions every one of the given words."""
        try:
            action()
            seen = "no error"
            holds = False
        except error as caught:
            seen = f"{type(caught).__name__}: {caught}"
            holds = all(word in str(caught) for word in mentions)
        self.add(what, seen, f"{error.__name__} naming {', '.join(mentions)}", "-", "-", holds)

    def add(
        self, what: str, ours: str, reference: str, error: str, tolerance: str, holds: bool
    ) -> None:
        self.failed += not holds
        self.rows.append([what, ours, reference, error, tolerance, "ok" if holds else "FAILED"])

    def report(self) -> int:
        """Print the table and its sum. Returns the exit status: 0 if every check held, else 1."""
        console.say()
        console.say(
            console.Table(
                ["check", "ours", "reference", "error", "tolerance", "verdict"], self.rows
            )
        )
        if self.tensors:
            console.say("A row that compares whole tensors shows the entry that is furthest off.")
        console.say()
        if self.failed:
            console.say(f"{self.failed} of {len(self.rows)} checks FAILED", style="bold red")
        else:
            console.say(f"all {len(self.rows)} checks hold", style="bold green")
        return 1 if self.failed else 0


def as_float64(value: Value) -> torch.Tensor:
    """As a float64 tensor on the CPU. A Python number keeps its digits."""
    return torch.as_tensor(value, dtype=torch.float64, device="cpu").detach()


def show(value: object) -> str:
    if isinstance(value, str):
        return value if value.isprintable() else repr(value)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def around_difference(ours: str, reference: str) -> tuple[str, str]:
    """Both texts, cut to SHOWN characters around the first one in which they differ."""
    same = 0
    while same < min(len(ours), len(reference)) and ours[same] == reference[same]:
        same += 1
    start = 0 if ours == reference else max(0, same - SHOWN // 2)
    return cut(ours, start), cut(reference, start)


def cut(text: str, start: int) -> str:
    """SHOWN characters of text from `start`, with "..." where something is missing."""
    tail = "..." if len(text) > start + SHOWN else ""
    return f"{'...' if start else ''}{text[start : start + SHOWN]}{tail}"
