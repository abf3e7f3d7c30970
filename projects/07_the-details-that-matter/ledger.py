"""The ledger: which of the chapters' claims survive a test, and where.

    python ledger.py            all rows: the claim, what was measured, the verdict
    python ledger.py 5          one row: its source, every measurement, and its command
    python ledger.py --write    renew LEDGER.md, the tables in the READMEs and the figures

Nothing is trained or measured here: every number is read from a committed result, by
ledger_rows.py, and every verdict follows from its numbers, by ledger_rule.py.
"""

import argparse
import re
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console, figures, files, report, verdict
from shared.console import Table, UserError
from shared.verdict import DELTA

HERE = Path(__file__).parent
TOP = HERE.parents[1]
rows = chapters.load_file(HERE / "ledger_rows.py")
rule = rows.rule
ROWS = rows.ROWS

# ---------------------------------------------------------------- a row in words


def measured_of(evidence) -> list:
    """Every number of a row, judged or beside."""
    if isinstance(evidence, rule.Compared):
        return [one for group in evidence.groups for one in group.measured] + evidence.beside
    return evidence.times if isinstance(evidence, rule.Work) else []


def summary(evidence) -> str:
    """What was measured, in a line."""
    if isinstance(evidence, rule.Law):
        return "; ".join(f"{what}: {value}" for what, value in evidence.shown)
    if isinstance(evidence, rule.Work):
        times = "; ".join(f"{one.condition} {one}" for one in evidence.times)
        return f"operations {evidence.operations:.2f}; {times}"
    judged = [one for group in evidence.groups for one in group.measured if one.found is not None]
    if not judged:
        return "-"
    if len(judged) <= 3:
        return "; ".join(f"{one.condition}: {one}" for one in judged)
    ordered = sorted(judged, key=lambda one: rule.mean_of(one.found))
    return f"{ordered[0]} to {ordered[-1]} in {len(judged)} comparisons"


def details(evidence) -> Table:
    """A line for each measurement: what it says alone, and how it was made."""
    if isinstance(evidence, rule.Law):
        return Table(["what", "value"], [list(pair) for pair in evidence.shown])
    if isinstance(evidence, rule.Work):
        at_most = f"at most {evidence.at_most:g}"
        lines = [["operations", f"{evidence.operations:.2f}", at_most, "exact, by counting"]]
        lines += [[one.condition, str(one), at_most, one.scope] for one in evidence.times]
        lines += [[one.condition, str(one), "(beside)", one.scope] for one in evidence.beside]
        return Table(["ratio", "measured", "claimed", "how"], lines)
    lines = []
    for group in evidence.groups:
        said = ["-"] * len(group.measured)
        if group.complete:
            said = [in_words(answer) for answer in rule.answers(group, evidence)]
        for one, answer in zip(group.measured, said, strict=True):
            lines.append([one.condition, str(one), answer, one.scope])
    lines += [[one.condition, str(one), "(beside)", one.scope] for one in evidence.beside]
    unit = f", {evidence.unit}" if evidence.unit else ""
    return Table(["condition", f"measured{unit}", "answer", "how"], lines)


def in_words(answer: verdict.Verdict) -> str:
    """An answer, or the refusal with the number of seeds that would do."""
    if not answer.needed:
        return answer.said
    return f"{answer.said}; about {answer.needed} seeds needed"


def claimed(evidence) -> str:
    """What the claim says of the numbers, in a sentence; empty where the table says it."""
    if not isinstance(evidence, rule.Compared):
        return ""
    which = " or ".join(evidence.claimed)
    border = f"{evidence.border:g}"
    return f"The claim says {which}; within {evidence.delta:g} of {border} counts as equal."


# ---------------------------------------------------------------- pages


def heading(number: int) -> str:
    return f"{number}. {ROWS[number - 1].title}"


def anchor(text: str) -> str:
    """The name by which a link finds a heading, as GitHub makes it."""
    kept = re.sub(r"[^\w\- ]", "", text.lower())
    return kept.replace(" ", "-")


def markdown(table: Table) -> str:
    def line(cells: list[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    rule_line = "|" + "---|" * len(table.headers)
    return "\n".join([line(table.headers), rule_line, *map(line, table.rows)])


def wrapped(text: str) -> str:
    """Lines of at most 100 columns, as in the other pages; a command keeps its own."""
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def indented(command: str) -> str:
    return "\n".join(f"    {line}" for line in command.split("\n"))


def section(number: int) -> str:
    """A row's part of LEDGER.md."""
    row = ROWS[number - 1]
    evidence = row.evidence()
    parts = [
        f"## {heading(number)}",
        wrapped(f"{row.claim} ({row.source}.)"),
        f"**{rule.judge(evidence)}**",
        markdown(details(evidence)),
        wrapped(" ".join(filter(None, [claimed(evidence), row.note]))),
        indented(row.command),
    ]
    return "\n\n".join(parts)


def linked(number: int) -> str:
    """The claim as a link to its section; references() says where that is."""
    return f"[{ROWS[number - 1].title}][row {number}]"


def references(page: str) -> str:
    """Where the links of a table lead; `page` is LEDGER.md, as seen from the table's page."""
    numbers = range(1, len(ROWS) + 1)
    return "\n".join(f"[row {number}]: {page}#{anchor(heading(number))}" for number in numbers)


def full_table(page: str = "") -> str:
    """Every row with its verdict."""
    lines = []
    for number, row in enumerate(ROWS, start=1):
        evidence = row.evidence()
        lines.append([str(number), linked(number), summary(evidence), rule.judge(evidence)])
    table = markdown(Table(["", "claim", "measured", "verdict"], lines))
    return f"{table}\n\n{references(page)}"


def short_table(page: str) -> str:
    """The claims by verdict."""
    by_kind: dict[str, list[str]] = {}
    for number, row in enumerate(ROWS, start=1):
        said = rule.judge(row.evidence())
        kind = next(kind for kind in rule.KINDS if said.startswith(kind))
        what = said.removeprefix(kind).lstrip(", ")
        if kind == rule.EQUAL:
            what = "so far" if said.endswith(rule.SO_FAR) else ""
        more = f" ({what})" if what else ""
        by_kind.setdefault(kind, []).append(linked(number) + more)
    shown = {rule.EQUAL: f"equal within {DELTA:g}", rule.DEPENDS: "depends on ..."}
    lines = [
        [shown.get(kind, kind), " · ".join(by_kind[kind])] for kind in rule.KINDS if kind in by_kind
    ]
    return f"{markdown(Table(['verdict', 'claims'], lines))}\n\n{references(page)}"


def page() -> str:
    """LEDGER.md."""
    intro = (HERE / "ledger_rule.py").read_text(encoding="utf-8")
    the_rule = re.search(r'"""(.*?)"""', intro, re.DOTALL)[1].split("\n\n", 1)[1].rstrip()
    pictures = "\n\n".join(f"![{what}](expected/{name})" for name, (what, _) in FIGURES.items())
    parts = [
        "# The ledger",
        wrapped(
            "Books and blog posts repeat sentences about the parts of a transformer. Here each of "
            "them meets a test. A row gives the claim, what was measured, and a verdict that "
            "follows from the numbers by a rule. Click on a claim for its source, for every "
            "measurement with its size, steps, rate and seeds, and for the command that makes the "
            "numbers. Commands are run from this folder. `python ledger.py` prints the table in a "
            "terminal, `python ledger.py 5` a row."
        ),
        wrapped(
            "A difference is taken at equal seeds: its mean and 95 % interval, in nats of "
            "validation loss, below 0 if the first is better. Within a row the measurements that "
            "differ in one thing are corrected together; the rows are not corrected for each "
            "other, so of twenty verdicts one may be chance. A line marked (beside) is shown and "
            "not judged."
        ),
        full_table(),
        "## What people look for first",
        pictures,
        *[section(number) for number in range(1, len(ROWS) + 1)],
        "## The rule",
        the_rule,
    ]
    return "\n\n".join(parts) + "\n"


# ---------------------------------------------------------------- figures


def intervals(axes, measured: list, unit: str = "") -> None:
    """Each number with its interval, from above to below; grey: equal."""
    axes.axvline(0, color="0.5", linewidth=1)
    for place, one in enumerate(measured):
        if one.found is None:
            axes.text(0, place, " not yet run", va="center", fontsize=8, color="0.4")
            continue
        half = getattr(one.found, "half_width", None) or 0
        axes.errorbar(
            rule.mean_of(one.found), place, xerr=half, fmt="s", color=figures.COLOURS[0], capsize=3
        )
    axes.set_yticks(range(len(measured)), [one.condition for one in measured])
    axes.set_ylim(len(measured) - 0.5, -0.5)
    axes.set_xlabel(unit)
    axes.spines[["top", "right"]].set_visible(False)


def norms_figure():
    """Left: RMSNorm's share of LayerNorm's work. Right: how far their losses lie apart."""
    work = rows.norm_work()
    good = rows.rmsnorm_as_good()
    figure = figures.new_figure(7.5, 3.8)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.2))
    names = ["operations", "time,\nby hand", "time,\nPyTorch's"]
    values = [work.operations, *(rule.mean_of(one.found) for one in work.times)]
    left.bar(names, values, color=[figures.COLOURS[0]] + [figures.COLOURS[1]] * 2)
    left.bar_label(left.containers[0], fmt="%.2f")
    left.axhline(1, color="0.5", linewidth=1)
    left.set_title("RMSNorm / LayerNorm", fontsize=11, loc="left")
    left.spines[["top", "right"]].set_visible(False)
    right.axvspan(-DELTA, DELTA, color="0.9", linewidth=0)
    intervals(right, [one for group in good.groups for one in group.measured], "nats")
    right.set_title("loss: RMSNorm - LayerNorm (grey: equal)", fontsize=11, loc="right")
    return figure


def swiglu_figure():
    """Left: loss by rate. Right: the difference at the best rates, by budget."""
    evidence = rows.swiglu_better()
    figure = figures.new_figure(7.5, 3.8)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.2))
    for (condition, models), dash in zip(rows.studied("rates"), ("--", "-"), strict=True):
        if models is None:
            continue
        losses = rows.studied_losses("rates")
        seeds = rows.study.choice_seeds(condition, 1)
        for name, colour in zip((rows.BASELINE, rows.SWIGLU), figures.COLOURS):
            means = rows.study.mean_losses(losses, condition.of(name), seeds)
            what = f"{name.partition('+')[2]}, {condition.setting.schedule}"
            left.plot(list(means), list(means.values()), dash, marker="o", color=colour, label=what)
    left.set_xscale("log")
    left.set_xlabel("rate")
    left.set_title("validation loss by rate", fontsize=11, loc="left")
    left.spines[["top", "right"]].set_visible(False)
    if left.get_legend_handles_labels()[0]:
        left.legend(frameon=False, fontsize=9)
    else:
        left.text(0.5, 0.5, "not yet run", transform=left.transAxes, ha="center", color="0.4")
    right.axvspan(-DELTA, DELTA, color="0.9", linewidth=0)
    intervals(right, [one for group in evidence.groups for one in group.measured], "nats")
    right.set_title("loss: SwiGLU - GELU", fontsize=11, loc="right")
    return figure


def rope_figure():
    """Left: RoPE against learned positions, by budget. Right: RoPE beyond the trained length."""
    faster = rows.rope_faster()
    beyond = rows.rope_beyond()
    figure = figures.new_figure(7.5, 2.6)
    left, right = figure.subplots(1, 2)
    intervals(left, faster.groups[0].measured, "nats")
    left.set_title("loss: RoPE - learned", fontsize=11, loc="left")
    right.axvspan(-DELTA, DELTA, color="0.9", linewidth=0)
    intervals(right, [*beyond.groups[0].measured, *beyond.beside], "nats")
    right.set_title("RoPE, trained on 32", fontsize=11, loc="left")
    return figure


def experts_figure():
    """Left: each router against the dense model. Right: how many experts get next to nothing."""
    loss = rows.equal_active()
    load = rows.collapse()
    figure = figures.new_figure(7.5, 2.8)
    left, right = figure.subplots(1, 2)
    left.axvspan(-DELTA, DELTA, color="0.9", linewidth=0)
    intervals(left, loss.groups[0].measured, "nats")
    left.set_title("loss: experts - dense", fontsize=11, loc="left")
    starved = [
        replace(one, condition=one.condition.removeprefix(rows.STARVED))
        for one in load.groups[0].measured
    ]
    right.axvline(load.border, color="0.5", linestyle=":")
    intervals(right, starved, "part of all (dotted: half)")
    right.set_title("starved experts", fontsize=11, loc="left")
    return figure


FIGURES = {
    "ledger_norms.png": ("RMSNorm's work and loss beside LayerNorm's", norms_figure),
    "ledger_swiglu.png": ("SwiGLU's loss beside GELU's, by rate and condition", swiglu_figure),
    "ledger_rope.png": ("RoPE beside learned positions, and on longer windows", rope_figure),
    "ledger_experts.png": ("Routers beside a dense model, and their loads", experts_figure),
}

# ---------------------------------------------------------------- beyond the default run

BEYOND = "At one shared rate"  # how the paragraph begins
SCHEDULES = {"constant": "With a constant rate", "cosine": "With a rate that falls to 0"}


def beyond() -> str:
    """What is known beyond `make tiny`, which build.py says under its finding: one paragraph."""
    found = rows.studied("rates")
    schedules = [at_best_rates(condition, models) for condition, models in found]
    return (
        f"{BEYOND} a comparison also measures which model that rate suits. Each at its own best "
        f"rate, after {found[0][0].setting.steps} steps, against {rows.BASELINE}. "
        f"{' '.join(schedules)} LEDGER.md says more."
    )


def at_best_rates(condition, models: dict) -> str:
    """The differences to the baseline, by what may be said of them."""
    losses = {name: model.values() for name, model in models.items()}
    found = verdict.against(rows.BASELINE, losses)
    parts = []
    for answer in verdict.ANSWERS:
        so = {name: gap for name, (gap, judged) in found.items() if judged.said == answer}
        names = [f"{name} ({gap})" for name, gap in so.items()]
        within = f" within {DELTA:g}" * (answer == "equal")
        if names:
            parts.append(f"{answer}{within}: {', '.join(names)}")
    return f"{SCHEDULES[condition.setting.schedule]}: {'; '.join(parts)}."


def with_paragraph(log: str, text: str) -> str:
    """The log of a default run with this paragraph in the place of the one that begins like it."""
    old = re.compile(rf"^{BEYOND}.*?(?=\n\n)", re.MULTILINE | re.DOTALL)
    return old.sub(lambda _: report.paragraph(text), log)


# ---------------------------------------------------------------- files


def with_section(text: str, title: str, content: str) -> str:
    """The page with everything under this heading replaced, up to the next of its rank."""
    under = rf"(?<=^## {re.escape(title)}\n\n).*?(?=^## |\Z)"
    pattern = re.compile(under, re.MULTILINE | re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise UserError(f"the heading {title!r} doesn't stand there once")
    return pattern.sub(lambda _: content + "\n\n", text)


SECTION = "What survives a test"


def chapter_section() -> str:
    """What the chapter's README holds under SECTION."""
    text = (
        "Sentences about these parts that books and blog posts repeat, each with a test. A "
        "difference is in nats, with its 95 % interval over paired seeds; [LEDGER.md](LEDGER.md) "
        "has for each row its source, every measurement with its scope, the rule and the command. "
        "`python ledger.py` prints the table."
    )
    return f"{wrapped(text)}\n\n{full_table('LEDGER.md')}"


def top_section() -> str:
    """What the repository's README holds under SECTION."""
    folder = HERE.relative_to(TOP).as_posix()
    text = (
        "Sentences about these details that books and blog posts repeat, by what is left of them "
        f"in [the ledger]({folder}/LEDGER.md): {len(ROWS)} claims, each with its source, its "
        "numbers and a command that makes them."
    )
    table = short_table(f"{folder}/LEDGER.md")
    return "\n\n".join([wrapped(beyond()), wrapped(text), table])


def pages() -> dict[Path, str]:
    """Every text that `--write` renews."""
    texts = {HERE / "LEDGER.md": page()}
    for folder, content in ((HERE, chapter_section()), (TOP, top_section())):
        path = folder / "README.md"
        texts[path] = with_section(path.read_text(encoding="utf-8"), SECTION, content)
    texts[HERE / "expected" / "beyond.txt"] = beyond() + "\n"
    log = HERE / "expected" / "run_log.txt"
    texts[log] = with_paragraph(log.read_text(encoding="utf-8"), beyond())
    return texts


def write() -> None:
    for path, text in pages().items():
        files.write_text(path, text)
        console.say(f"written: {path.relative_to(TOP)}")
    for name, (_, draw) in FIGURES.items():
        files.write_bytes(HERE / "expected" / name, figures.png(draw()))
        console.say(f"drawn: {name}")


# ---------------------------------------------------------------- the command


def say_all() -> None:
    lines = []
    for number, row in enumerate(ROWS, start=1):
        evidence = row.evidence()
        lines.append([str(number), row.title, summary(evidence), rule.judge(evidence)])
    console.say(Table(["", "claim", "measured", "verdict"], lines))
    console.say("\nA row by its number, as in `python ledger.py 5`: its source, and its command.")


def say_row(number: int) -> None:
    row = ROWS[number - 1]
    evidence = row.evidence()
    console.say(textwrap.fill(f"{row.claim} ({row.source}.)", console.COLUMNS))
    console.say(f"\n{rule.judge(evidence)}")
    console.say()
    console.say(details(evidence))
    note = " ".join(filter(None, [claimed(evidence), row.note]))
    console.say(f"\n{textwrap.fill(note, console.COLUMNS)}\n\n{indented(row.command)}")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = cli.new_parser(__doc__)
    parser.add_argument("row", nargs="?", type=cli.natural, help="the number of one row")
    parser.add_argument("--write", action="store_true", help="renew the pages and the figures")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    if options.row and options.row > len(ROWS):
        raise UserError(f"there is no row {options.row}; rows are 1 to {len(ROWS)}")
    if options.write:
        write()
    elif options.row:
        say_row(options.row)
    else:
        say_all()
    return 0


if __name__ == "__main__":
    cli.run_build(__file__)
