"""How far do the chapter's verdicts reach? Each variant at its own best rate.

build.py compares its variants at one shared learning rate. But a rate that suits one model may not
suit another, and then the comparison measures the rate. Here each variant is trained at several
rates and its best one is chosen; the verdict is taken at each variant's own best rate, on seeds
that had no part in the choice. Six parts ask how far it reaches: rates, budgets, sizes, starts,
texts, and why one variant bears a lower rate than another.

    python study.py                    every part: two to four hours on two cores
    python study.py --part rates       one part
    python study.py --seeds-from 101   the whole study again, on other seeds
    python study.py --report           train nothing: say and draw what is committed in expected/

Each run is kept as it ends. Ctrl-C loses the runs under way, and the same command goes on from
there.
"""

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console, figures, files, report, verdict
from shared.console import Table, UserError
from shared.verdict import Interval, Verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

study = chapters.load_file(Path(__file__).with_name("study_runs.py"))
Condition = study.Condition
Setting = study.Setting
Losses = study.Losses  # by trial: its validation loss, None if it diverged

# ---------------------------------------------------------------- the parts

GELU = "LayerNorm+GELU"
MLPS = (GELU, "LayerNorm+SwiGLU")
THREE = (GELU, "RMSNorm+GELU", "LayerNorm+SwiGLU")
FOUR = (*THREE, "RMSNorm+SwiGLU")
RELU2 = "LayerNorm+ReLU²"
GRID = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)


@dataclass(frozen=True)
class Part:
    """One question to the study."""

    question: str
    axis: str  # the field of Setting that the conditions differ in
    conditions: list[Condition]
    picture: str  # "valleys": loss against rate; "differences": difference against the axis
    trend: bool = False  # does the difference change with each doubling of the axis?


def valley(start: str = "0.02", variants: tuple[str, ...] = MLPS, **others) -> Condition:
    """A condition that only asks where the valley of loss against rate lies: no verdict."""
    setting = Setting(steps=400, start=start, **others)
    return Condition(setting, variants, GRID[:5], choosing=3, judging=0, fine=False)


PARTS = {
    "rates": Part(
        "Each variant at its own best rate",
        "schedule",
        [Condition(Setting(schedule=name), FOUR, GRID) for name in ("constant", "cosine")],
        "valleys",
    ),
    "budgets": Part(
        "The difference by the number of training steps",
        "steps",
        [Condition(Setting(steps=steps), THREE) for steps in (100, 200, 400, 800, 1600)],
        "differences",
    ),
    "sizes": Part(
        "The difference by the size of the model",
        "d_model",
        [
            *(Condition(Setting(d_model=d_model), THREE) for d_model in (32, 64, 128)),
            Condition(Setting(d_model=256), MLPS, (1e-3, 2e-3, 4e-3), choosing=1, judging=4),
        ],
        "differences",
        trend=True,
    ),
    "starts": Part(
        "The difference from two starts",
        "start",
        [Condition(Setting(start=start), THREE) for start in ("0.02", "fan_in")],
        "valleys",
    ),
    "texts": Part(
        "The difference on two texts",
        "text",
        [Condition(Setting(steps=400, text=text), THREE) for text in study.TEXTS],
        "valleys",
    ),
    "why": Part(
        "Where the valley of loss against rate lies, and what moves it",
        "start",
        [
            valley(variants=(*MLPS, RELU2)),
            valley(variants=("RMSNorm+GELU", "RMSNorm+SwiGLU")),
            valley(clip=1e9),
            valley(schedule="cosine, long warm-up"),
            valley("fan_in", (*MLPS, RELU2)),
            valley("fan_in in the MLP"),
            valley("fan_in in attention"),
            valley("fan_in in the gate", ("LayerNorm+SwiGLU",)),
            valley("fan_in in up", ("LayerNorm+SwiGLU",)),
        ],
        "valleys",
    ),
}

# ---------------------------------------------------------------- what came out


@dataclass
class Row:
    """One variant under one condition: its rate, its loss, how it differs from the baseline."""

    condition: Condition
    variant: str
    rate: float | None  # None while it isn't chosen
    at_edge: bool = False  # was no lower or no higher rate tried?
    losses: dict[int, float] = field(default_factory=dict)  # by the verdict's seeds
    diverged: list[int] = field(default_factory=list)  # of those seeds
    difference: Interval | None = None
    judged: Verdict | None = None

    @property
    def is_baseline(self) -> bool:
        return self.variant == self.condition.variants[0]


@dataclass
class Found:
    """What a part's runs say."""

    rows: list[Row]
    trends: dict[str, tuple[Interval, Verdict]]  # by variant, a doubling of the axis


def row_of(condition: Condition, variant: str, losses: Losses, first_seed: int) -> Row:
    """The variant's choice, and its losses on the verdict's seeds."""
    rate = study.best_rate(condition, variant, losses, first_seed)
    row = Row(condition, variant, rate)
    if rate is not None:
        setting = condition.of(variant)
        tried = study.mean_losses(losses, setting, study.choice_seeds(condition, first_seed))
        row.at_edge = rate in (min(tried), max(tried))
        for seed in study.verdict_seeds(condition, first_seed):
            loss = losses.get(study.Trial(setting, rate, seed), math.nan)
            if loss is None:
                row.diverged.append(seed)
            elif not math.isnan(loss):
                row.losses[seed] = loss
    return row


def trend(rows: list[tuple[Row, Row]], axis: str) -> Interval | None:
    """By how much the difference grows with each doubling of the axis: a line for each seed.

    Each row comes with its baseline. The seeds are those that every row has; None if there are
    none, or fewer than two rows.
    """
    by_place = [
        (math.log2(getattr(row.condition.setting, axis)), row.losses, baseline.losses)
        for row, baseline in rows
        if row.difference
    ]
    if len(by_place) < 2:
        return None
    shared = set.intersection(*(set(ours) & set(theirs) for _, ours, theirs in by_place))
    mean = sum(x for x, _, _ in by_place) / len(by_place)
    square = sum((x - mean) ** 2 for x, _, _ in by_place)
    slopes = [
        sum((x - mean) * (ours[seed] - theirs[seed]) for x, ours, theirs in by_place) / square
        for seed in sorted(shared)
    ]
    return verdict.interval(slopes) if slopes else None


def bottom(by_rate: dict[float, float]) -> float:
    """log2 of the rate at the bottom of a valley.

    It is the lowest point of a parabola through the best rate and its two neighbours; or the best
    rate itself, where it has one neighbour only.
    """
    points = [(math.log2(rate), loss) for rate, loss in sorted(by_rate.items())]
    lowest = min(range(len(points)), key=lambda i: points[i][1])
    x, y = points[lowest]
    if lowest in (0, len(points) - 1):
        return x
    left = points[lowest - 1]
    right = points[lowest + 1]
    to_left = (left[1] - y) / (left[0] - x)  # the slopes to both sides
    to_right = (right[1] - y) / (right[0] - x)
    if to_right == to_left:  # all three are equally low
        return x
    bend = (to_right - to_left) / (right[0] - left[0])
    return (left[0] + x) / 2 - to_left / (2 * bend)


def bottoms(setting: Setting, losses: Losses, seeds: list[int]) -> dict[int, float]:
    """The bottom of the valley by seed, of the seeds whose losses are there and finite."""
    found = {}
    for seed in seeds:
        means = study.mean_losses(losses, setting, [seed])
        finite = {rate: loss for rate, loss in means.items() if math.isfinite(loss)}
        if finite:
            found[seed] = bottom(finite)
    return found


def find(part: Part, losses: Losses, first_seed: int) -> Found:
    """Rows and trends, judged together: Holm's correction is over all that the part says."""
    rows = []
    pairs: dict[str, list[tuple[Row, Row]]] = {}
    for condition in part.conditions:
        these = [row_of(condition, name, losses, first_seed) for name in condition.variants]
        rows += these
        for row in these[1:]:
            row.difference = verdict.paired_difference(row.losses, these[0].losses)
            pairs.setdefault(row.variant, []).append((row, these[0]))
    trends = {}
    if part.trend:
        slopes = {name: trend(of_variant, part.axis) for name, of_variant in pairs.items()}
        trends = {name: slope for name, slope in slopes.items() if slope}
    judged = [row for row in rows if row.difference]
    said = verdict.verdicts([*(row.difference for row in judged), *trends.values()])
    for row, what in zip(judged, said):
        row.judged = what
    return Found(rows, dict(zip(trends, zip(trends.values(), said[len(judged) :]))))


# ---------------------------------------------------------------- in words and tables


def place(condition: Condition, axis: str) -> str:
    """Where a condition stands, for the first column of a table."""
    value = getattr(condition.setting, axis)
    text = f"{value:,}" if isinstance(value, int) else str(value)
    if condition.setting.clip != 1:
        text += ", no clipping"
    if condition.setting.schedule == "cosine, long warm-up":
        text += ", long warm-up"
    return text


def rate_cell(row: Row) -> str:
    if row.rate is None:
        return "-"
    return f"{row.rate:g}" + " (edge)" * row.at_edge


def verdict_table(part: Part, found: Found) -> Table:
    """A row for each variant under each condition: its own best rate, and the verdict there."""
    rows = []
    for row in found.rows:
        loss = sum(row.losses.values()) / len(row.losses) if row.losses else math.nan
        pair = (row.difference, row.judged) if row.difference else None
        cells = [place(row.condition, part.axis), row.variant, rate_cell(row)]
        cells += [f"{loss:.3f}" if row.losses else "-"]
        rows.append([*cells, *report.difference_cells(row.is_baseline, pair)])
    for name, (slope, judged) in found.trends.items():
        rows.append(["each doubling", name, "-", "-", str(slope), judged.said])
    return Table([part.axis, "variant", "best rate", "valid", "difference", "verdict"], rows)


def valley_table(part: Part, losses: Losses, first_seed: int) -> Table:
    """The mean loss over the choice seeds at each rate of the factor-of-two grid."""
    columns: dict[float, None] = {}
    means = {}
    for condition in part.conditions:
        seeds = study.choice_seeds(condition, first_seed)
        for name in condition.variants:
            means[condition, name] = study.mean_losses(losses, condition.of(name), seeds)
            columns |= dict.fromkeys(means[condition, name])
    rates = [rate for rate in study.RATES[::2] if rate in columns]
    rows = []
    for (condition, name), by_rate in means.items():
        cells = [f"{by_rate[rate]:.3f}" if rate in by_rate else "-" for rate in rates]
        rows.append([place(condition, part.axis), name, *cells])
    return Table([part.axis, "variant", *(f"{rate:g}" for rate in rates)], rows)


def bottom_table(part: Part, losses: Losses, first_seed: int) -> Table:
    """Where each valley has its bottom, and how far that is from the first row's, in octaves."""
    reference: dict[int, float] = {}
    rows = []
    for condition in part.conditions:
        seeds = study.choice_seeds(condition, first_seed)
        for name in condition.variants:
            found = bottoms(condition.of(name), losses, seeds)
            reference = reference or found
            shift = verdict.paired_difference(found, reference)
            rate = 2 ** (sum(found.values()) / len(found)) if found else math.nan
            cells = [place(condition, part.axis), name, f"{rate:.4f}" if found else "-"]
            rows.append([*cells, str(shift) if rows and shift else "-"])
    return Table([part.axis, "variant", "lowest at", "octaves from the first row"], rows)


def finding(part: Part, found: Found) -> str:
    """The verdicts in a sentence for each variant."""
    sentences = []
    for name in dict.fromkeys(row.variant for row in found.rows if row.judged):
        parts = []
        for row in found.rows:
            if row.variant == name and row.judged:
                where = place(row.condition, part.axis)
                parts.append(f"{where}: {in_words(row.difference, row.judged)}")
        if name in found.trends:
            parts.append(f"each doubling: {in_words(*found.trends[name])}")
        sentences.append(f"- {name} against {GELU}, by {part.axis}. " + "; ".join(parts) + ".")
    return "\n".join(sentences)


def in_words(difference: Interval, judged: Verdict) -> str:
    needed = f", about {judged.needed} seeds needed" if judged.needed else ""
    within = f" within {verdict.DELTA:g}" * (judged.said == "equal")
    return f"{judged.said}{within} ({difference}{needed})"


def span(seeds: list[int]) -> str:
    if len(seeds) == 1:
        return f"seed {seeds[0]}"
    return f"seeds {seeds[0]} {'and' if len(seeds) == 2 else 'to'} {seeds[-1]}"


def caption(part: Part, first_seed: int) -> str:
    """What the columns mean, and which seeds did what."""
    chose = [study.choice_seeds(c, first_seed) for c in part.conditions]
    judged = [study.verdict_seeds(c, first_seed) for c in part.conditions if c.judging]
    if not judged:
        return f"Losses by rate are means over the {span(chose[0])}."
    fewer = ""
    if judged[-1] != judged[0]:
        fewer = f" (of the last: {span(chose[-1])}, {span(judged[-1])})"
    return (
        f"Rates are chosen by the mean loss over the {span(chose[0])}; losses and verdicts are of "
        f"the {span(judged[0])}{fewer}. Differences are taken seed by seed: mean and 95 % "
        f"interval, in nats a token. Equal: all of it lies within {verdict.DELTA:g} of 0. Lower or "
        "higher: 0 lies outside it. Several are judged together, so the intervals that decide are "
        "wider (Holm 1979)."
    )


def notes(found: Found, part: Part) -> list[str]:
    """What a reader must know besides: rates at an edge, and runs that have no loss."""
    said = []
    edges = [f"{r.variant} at {place(r.condition, part.axis)}" for r in found.rows if r.at_edge]
    if edges:
        said.append("A best rate at the edge of the rates tried: " + "; ".join(edges) + ".")
    for row in found.rows:
        if row.diverged:
            where = place(row.condition, part.axis)
            seeds = ", ".join(map(str, row.diverged))
            said.append(f"Left out, since it diverged: {row.variant} at {where}, seed {seeds}.")
    return said


BOTTOM = (
    "Lowest at: the lowest point of a parabola through the best rate and its two neighbours, seed "
    "by seed; the mean. An octave is a factor of two in the rate: mean and 95 % interval over the "
    "seeds, each row for itself."
)


def say_part(name: str, part: Part, losses: Losses, first_seed: int) -> list[str | Table]:
    """A part in words and tables."""
    found = find(part, losses, first_seed)
    blocks: list[str | Table] = [f"{name}: {part.question}"]
    if any(condition.judging for condition in part.conditions):
        blocks += [finding(part, found), verdict_table(part, found)]
    else:
        blocks += [bottom_table(part, losses, first_seed), BOTTOM]
    if part.picture == "valleys":
        head = "Validation loss by rate, mean over the seeds that choose (a factor of two apart):"
        blocks += [head, valley_table(part, losses, first_seed)]
    blocks += [caption(part, first_seed), *notes(found, part)]
    return [report.paragraph(b) if isinstance(b, str) else b for b in blocks if b]


# ---------------------------------------------------------------- two studies side by side


@dataclass
class Study:
    """The runs of one part, on the seeds from first_seed on."""

    name: str  # for a person
    first_seed: int
    losses: Losses


def inside(mean: float, other: Interval) -> bool:
    return other.half_width is not None and abs(mean - other.mean) <= other.half_width


def say_beside(part: Part, ours: Study, theirs: Study) -> list[str | Table]:
    """Do two studies say the same? Their differences and verdicts, row by row."""
    first = find(part, ours.losses, ours.first_seed)
    second = find(part, theirs.losses, theirs.first_seed)
    pairs = []
    for a, b in zip(first.rows, second.rows, strict=True):
        if a.difference and b.difference:
            where = place(a.condition, part.axis)
            pairs.append((where, a.variant, a.difference, a.judged, b.difference, b.judged))
    for name in first.trends.keys() & second.trends.keys():
        pairs.append(("each doubling", name, *first.trends[name], *second.trends[name]))
    rows = []
    agreed = 0
    for where, name, mine, said, other, again in pairs:
        same = said.said == again.said
        within = inside(mine.mean, other) and inside(other.mean, mine)
        agreed += same and within
        words = "yes" if within else "not in value"
        if not same:
            words = f"no: {said.said} / {again.said}"
        rows.append([where, name, str(mine), str(other), words])
    if not rows:
        return []
    n = len(rows)
    head = (
        f"{ours.name} / {theirs.name}: {agreed} of {n} rows agree: the same verdict, and each "
        "difference within the other's interval."
    )
    headers = [part.axis, "variant", "first", "second", "agree"]
    return [report.paragraph(head), Table(headers, rows)]


# ---------------------------------------------------------------- figures


def style_of(variant: str) -> dict:
    """The same colour and dash for a variant in every figure."""
    i = list(study.VARIANTS).index(variant)
    return {"color": figures.COLOURS[i], "linestyle": figures.DASHES[i]}


ROOM = 0.6  # nats above the lowest point that a picture of valleys shows


def draw_valleys(part: Part, losses: Losses, first_seed: int) -> "Figure":
    """Loss against rate, a panel a condition, a curve a variant; a ring marks the best."""
    columns = len(part.conditions) if len(part.conditions) < 4 else 3
    rows = math.ceil(len(part.conditions) / columns)
    figure = figures.new_figure(max(6.4, 3 * columns), 2.9 * rows + 0.9)
    panels = figure.subplots(rows, columns, sharex=True, sharey=part.axis != "text", squeeze=False)
    lines = {}
    for axes, condition in zip(panels.flat, part.conditions):
        lines |= draw_curves(axes, condition, losses, first_seed)
        figures.label(axes, place(condition, part.axis), "highest rate")
        lowest = [min(line.get_ydata()) for line in axes.lines]
        axes.set_ylim(top=min([axes.get_ylim()[1], *(y + ROOM for y in lowest)]))
    rates = [rate for line in lines.values() for rate in line.get_xdata()]
    ticks = [r for r in study.RATES[::2] if rates and min(rates) <= r <= max(rates)]
    panels[0][0].set_xticks(ticks, [f"{rate:g}" for rate in ticks])
    for axes in panels.flat:
        axes.minorticks_off()
        axes.tick_params(axis="x", labelsize=8, rotation=45)
    for axes in panels.flat[len(part.conditions) :]:
        axes.set_visible(False)
    panels[0][0].set_ylabel("validation loss, nats per token")
    figure.legend(
        lines.values(), lines.keys(), loc="outside lower center", ncols=3, frameon=False, fontsize=9
    )
    return figure


def draw_curves(axes, condition: Condition, losses: Losses, first_seed: int) -> dict:
    """Each variant's mean loss by rate, and a ring around its best; the lines by variant."""
    lines = {}
    axes.set_xscale("log", base=2)
    for name in condition.variants:
        seeds = study.choice_seeds(condition, first_seed)
        means = study.mean_losses(losses, condition.of(name), seeds)
        means = {rate: loss for rate, loss in means.items() if math.isfinite(loss)}
        if means:
            style = style_of(name)
            (lines[name],) = axes.plot(list(means), list(means.values()), marker=".", **style)
            best = min(means, key=means.get)
            axes.plot(best, means[best], "o", mfc="none", ms=9, color=style["color"])
    return lines


def draw_differences(part: Part, found: Found) -> "Figure":
    """The difference with its interval against the axis, a line a variant; the trend, if asked."""
    figure = figures.new_figure(6.4, 4.2)
    axes = figure.subplots()
    axes.axhspan(-verdict.DELTA, verdict.DELTA, color="0.93", linewidth=0)
    axes.axhline(0, color="0.5", linewidth=1)
    for i, name in enumerate(dict.fromkeys(row.variant for row in found.rows if row.difference)):
        rows = [row for row in found.rows if row.variant == name and row.difference]
        xs = [getattr(row.condition.setting, part.axis) for row in rows]
        means = [row.difference.mean for row in rows]
        bars = [row.difference.half_width or 0 for row in rows]
        style = {"color": style_of(name)["color"]}
        shifted = [x * 2 ** (0.06 * i) for x in xs]  # so that two intervals don't hide each other
        joined = "o" if part.trend else "o-"
        axes.errorbar(shifted, means, bars, fmt=joined, capsize=4, label=name, **style)
        if name in found.trends:
            slope = found.trends[name][0]
            middle = sum(map(math.log2, xs)) / len(xs)
            height = sum(means) / len(means)
            line = [height + slope.mean * (math.log2(x) - middle) for x in xs]
            axes.plot(xs, line, "--", label=f"{slope} each doubling", **style)
    places = [getattr(condition.setting, part.axis) for condition in part.conditions]
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [f"{x:,}" for x in places])
    axes.minorticks_off()
    title = f"Validation loss minus {GELU}'s, each at its own best rate"
    figures.label(axes, title, part.axis, "nats per token (below 0: better)")
    return figure


# ---------------------------------------------------------------- the command


def read_studies(folder: Path, name: str) -> list[Study]:
    """Every study of a part whose results stand in a folder, by its first seed."""
    found = []
    for path in folder.glob(f"{name}*.json"):
        _, _, number = path.stem.partition("_seeds-from-")
        first = int(number or 1)
        found.append(Study(f"Seeds from {first}", first, study.read_rows(path)))
    return sorted(found, key=lambda one: one.first_seed)


def publish(name: str, part: Part, studies: list[Study], folder: Path) -> None:
    """Say, write and draw what the first study of a part found, and set the others beside it."""
    first = studies[0]
    blocks = say_part(name, part, first.losses, first.first_seed)
    for other in studies[1:]:
        blocks += say_beside(part, first, other)
    if part.picture == "valleys":
        picture = draw_valleys(part, first.losses, first.first_seed)
    else:
        picture = draw_differences(part, find(part, first.losses, first.first_seed))
    files.write_text(folder / f"{name}.txt", console.log_text(blocks))
    files.write_bytes(folder / f"{name}.png", figures.png(picture))
    for block in blocks:
        console.say()
        console.say(block)


def parse(argv: list[str] | None, default_output_dir: Path) -> argparse.Namespace:
    parser = cli.new_parser(__doc__)
    add = parser.add_argument
    add("--part", choices=PARTS, help="one part alone")
    add("--seeds-from", type=cli.natural, metavar="S", default=1, help="the first seed (default 1)")
    add("--workers", type=cli.natural, metavar="N", help="processes (default: one a core)")
    add("--report", action="store_true", help="train nothing; say and draw what is committed")
    add("--output-dir", type=cli.not_empty, metavar="DIR", help="default: outputs/study")
    options = parser.parse_args(argv)
    options.output_dir = Path(options.output_dir or default_output_dir)
    options.workers = options.workers or cli.usable_cores()
    return options


def train(parts: dict[str, Part], options: argparse.Namespace) -> Iterator[tuple[str, Study]]:
    """Train what is missing; yield each part's study when its results are written."""
    folder = options.output_dir
    first = options.seeds_from
    conditions = {name: part.conditions for name, part in parts.items()}
    store = study.Store(folder / "runs")
    for name, losses in study.train_missing(conditions, store, first, options.workers):
        path = study.file_of(folder, name, first)
        study.write_rows(path, study.rows_of(conditions[name], losses, first))
        yield name, Study(f"This run, seeds from {first}", first, losses)


def main(argv: list[str] | None = None) -> int:
    here = Path(__file__).parent
    options = parse(argv, here / "outputs" / "study")
    parts = {options.part: PARTS[options.part]} if options.part else PARTS
    folder = options.output_dir
    committed = here / "expected" / "study"
    files.claim_folder(folder)
    if options.report:
        for name, part in parts.items():
            studies = read_studies(committed, name)
            if not studies:
                raise UserError(f"--report: {committed} holds no results of the part {name}")
            publish(name, part, studies, folder)
        return 0
    with files.held(folder):
        for name, mine in train(parts, options):
            publish(name, parts[name], [mine, *read_studies(committed, name)], folder)
    return 0


if __name__ == "__main__":
    cli.run_build(__file__)
