"""The figures that comparisons share, and helpers for a page's picture."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shared import files, runs
from shared.cli import Plan
from shared.runs import Result, losses_of
from shared.verdict import DELTA

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe & Ito (2008): told apart by colour-blind readers too, and dark enough for print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))
SMOOTH = 10  # steps that one point of a loss curve averages


def new_figure(width: float, height: float) -> Figure:
    """An empty figure in inches.

    matplotlib is imported here, not above: worker processes never draw, and start sooner without.
    """
    with warnings.catch_warnings():
        # Its first import ever writes a list of fonts, in the locale's encoding.
        warnings.simplefilter("ignore", EncodingWarning)
        from matplotlib.figure import Figure  # not pyplot: files only, no window, no display needed

    return Figure(figsize=(width, height), layout="constrained")


def png(figure: Figure) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=120, metadata={"Software": None})
    return out.getvalue()


def save(figure: Figure, script: str) -> Path:
    """Write the picture of a page beside it, as outputs/step_NN.png; `script` is its __file__."""
    page = Path(script)
    path = page.parent / "outputs" / f"{page.stem[:7]}.png"
    files.write_bytes(path, png(figure))
    return path


def curves(plan: Plan, results: list[Result]) -> Figure:
    """Training loss by step: each variant's mean over seeds, and the band of all its seeds."""
    figure = new_figure(8, 4.8)
    axes = figure.subplots()
    for row, variant in enumerate(plan.names):
        histories = [r.history for r in results if r.run.variant == variant and r.history]
        if not histories:
            continue
        colour = COLOURS[row % len(COLOURS)]
        dash = DASHES[(row + row // len(COLOURS)) % len(DASHES)]  # no pair of the two comes twice
        smooth = [averages(history.losses, SMOOTH) for history in histories]
        steps = [step for step, _ in smooth[0]]
        columns = list(zip(*([loss for _, loss in run] for run in smooth), strict=True))
        axes.plot(
            steps, [sum(c) / len(c) for c in columns], color=colour, linestyle=dash, label=variant
        )
        axes.fill_between(
            steps,
            [min(c) for c in columns],
            [max(c) for c in columns],
            color=colour,
            alpha=0.15,
            lw=0,
        )
    axes.axhline(plan.uniform_loss, color="0.5", linewidth=1)
    axes.annotate(
        f"guessing evenly: ln {plan.corpus.vocab_size} = {plan.uniform_loss:.2f}",
        (1, plan.uniform_loss),
        xycoords=("axes fraction", "data"),
        ha="right",
        va="bottom",
        fontsize=9,
        color="0.35",
    )
    axes.set_xlabel(f"step (means over {SMOOTH})")
    axes.set_ylabel("training loss, nats per token")
    seeds = len(plan.seeds)
    axes.set_title(
        f"Training loss, {seeds} seed{'s' if seeds > 1 else ''}: mean and range",
        loc="left",
        fontsize=11,
    )
    if len(plan.names) > len(COLOURS):  # below the words on guessing, which "best" doesn't see
        axes.legend(frameon=False, ncols=2, loc="upper right", bbox_to_anchor=(1, 0.95))
    else:
        axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def averages(losses: list[float], size: int) -> list[tuple[float, float]]:
    """(middle step, mean loss) of each run of `size` losses; the last may be shorter."""
    chunks = [(i, losses[i : i + size]) for i in range(0, len(losses), size)]
    return [(i + (len(chunk) + 1) / 2, sum(chunk) / len(chunk)) for i, chunk in chunks]


def differences(plan: Plan, results: list[Result]) -> Figure:
    """Paired differences to the baseline: every seed a dot, the mean with its 95 % interval."""
    others = plan.names[1:]
    figure = new_figure(9, 1.2 + 0.6 * len(others))
    axes = figure.subplots()
    axes.axvspan(-DELTA, DELTA, color="0.93", linewidth=0)  # here a difference is no news
    axes.axvline(0, color="0.5", linewidth=1)
    baseline = losses_of(results, plan.baseline)
    found = runs.differences(plan, results)
    for row, variant in enumerate(others):
        if variant not in found:
            continue
        losses = losses_of(results, variant)
        difference, judged = found[variant]
        colour = COLOURS[(1 + row) % len(COLOURS)]
        for seed in losses.keys() & baseline.keys():
            gap = losses[seed] - baseline[seed]
            axes.plot(gap, row - 0.25, "o", color=colour, alpha=0.5, markersize=4, mew=0)
        axes.errorbar(
            difference.mean,
            row,
            xerr=difference.half_width or 0,
            fmt="s",
            color=colour,
            capsize=4,
            markersize=6,
        )
        axes.annotate(
            f"{difference}\n{judged.said}",
            (1.02, row),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=9,
        )
    axes.set_yticks(range(len(others)), others)
    axes.set_ylim(len(others) - 0.35, -0.6)
    axes.set_xlabel("validation loss minus the baseline's, nats per token (left of 0: better)")
    axes.set_title(
        f"Paired differences to {plan.baseline}: seeds, mean, 95 % interval (grey: equal)",
        loc="left",
        fontsize=11,
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    limit = max([abs(x) for x in axes.get_xlim() if math.isfinite(x)])
    axes.set_xlim(-limit, limit)
    return figure


def hidden_states(plan: Plan, results: list[Result]) -> Figure:
    """Std and kurtosis of the residual stream by depth, a line for each look: means over seeds.

    Reads observations of the form {"step": 50, "stream": {point: {"var": ..., "kurtosis": ...}}}.
    """
    figure = new_figure(2.6 * len(plan.names) + 0.6, 5.4)
    rows = figure.subplots(2, len(plan.names), sharex=True, sharey="row", squeeze=False)
    for column, variant in enumerate(plan.names):
        seen = [r.history.observations for r in results if r.run.variant == variant and r.history]
        rows[0][column].set_title(variant, loc="left", fontsize=11)
        for i, samples in enumerate(zip(*seen)):  # one step, all seeds
            points = list(samples[0]["stream"])
            streams = [[sample["stream"][point] for sample in samples] for point in points]
            shade = {
                "color": COLOURS[0],
                "alpha": (i + 1) / len(seen[0]),
                "label": f"step {samples[0]['step']:,}",
            }
            std = [sum(s["var"] ** 0.5 for s in stream) / len(stream) for stream in streams]
            kurtosis = [sum(s["kurtosis"] for s in stream) / len(stream) for stream in streams]
            for axes, values in zip(rows[:, column], (std, kurtosis)):
                axes.plot(points, values, "o-", markersize=3, **shade)
        rows[1][column].axhline(3, color="0.5", linewidth=1, linestyle=":")
        rows[1][column].tick_params(axis="x", rotation=90, labelsize=8)
    rows[0][0].set_ylabel("std of the residual stream")
    rows[1][0].set_ylabel("kurtosis (Gaussian: 3)")
    rows[0][0].legend(frameon=False, fontsize=8)
    for axes in rows.flat:
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("what was last added to the stream", fontsize=10)
    return figure


def shares(
    panels: dict[str, list[tuple[str, list[int], list[list[float]]]]], x: str, y: str, title: str
) -> Figure:
    """A grid of stacked parts of 1. Parts of equal size show as bands of equal height.

    A column for each entry of panels, with its (name, xs, parts at each x) below each other.
    """
    rows = max(len(column) for column in panels.values())
    figure = new_figure(2.2 * len(panels) + 0.6, 1.9 * rows + 0.8)
    grid = figure.subplots(rows, len(panels), squeeze=False, sharex=True, sharey=True)
    for axes_column, (name, column) in zip(grid.T, panels.items()):
        axes_column[0].set_title(name, fontsize=10)
        for axes, (label, xs, parts) in zip(axes_column, column):
            bands(axes, xs, parts)
            if axes in grid[:, 0]:
                axes.set_ylabel(f"{label}: {y}", fontsize=9)
    figure.supxlabel(x, fontsize=10)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


def label(axes, title: str, x: str = "", y: str = "") -> None:
    """A title and names for both axes, no box, and a legend if a line has one."""
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)


# Eight colours, so that each of eight experts has its own.
EIGHT = (*COLOURS[:6], "#F0E442", "#999999")


def bands(axes, xs: Sequence[float], parts: list[list[float]]) -> None:
    """Draw the parts of 1 at each x, one above the other: a band for each, in its own colour."""
    axes.stackplot(xs, list(zip(*parts)), colors=EIGHT, linewidth=0)
    axes.margins(0)
    axes.spines[["top", "right"]].set_visible(False)


def vector_bars(axes, vector: list[float], title: str) -> None:
    """A vector as bars, its mean as a line and one standard deviation to both sides as a band."""
    n = len(vector)
    mean = sum(vector) / n
    std = math.sqrt(sum((value - mean) ** 2 for value in vector) / n)
    axes.bar(range(n), vector, color=COLOURS[0])
    axes.axhspan(mean - std, mean + std, color=COLOURS[4], alpha=0.25, linewidth=0)
    axes.axhline(mean, color=COLOURS[1])
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_title(f"{title}\nmean {round(mean, 2) + 0.0:.2f}, std {std:.2f}", fontsize=11)
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)


def boxes_in_a_row(axes, widths: dict[str, float], row: float, colour: str) -> None:
    """Named boxes side by side at the height `row`, each as wide as its number."""
    left = 0.0
    for name, width in widths.items():
        axes.barh(row, width, height=0.7, left=left, color=colour, edgecolor="white", linewidth=3)
        axes.text(
            left + width / 2, row, f"{name}\n{width:,}", ha="center", va="center", color="white"
        )
        left += width
