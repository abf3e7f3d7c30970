"""What was asked and what came out, in words and tables; held against expected/.

The course of a build.py that trains: say the setting, train what is missing, write the results,
and only then say and draw them. No sentence says more than its numbers do.
"""

from __future__ import annotations

import contextlib
import json
import math
import platform
import textwrap
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shared import console, figures, files, runs, verdict
from shared.cli import Plan, usable_cores
from shared.console import Table, UserError
from shared.runs import Experiment, Result, Run, mean_of
from shared.verdict import Interval, Verdict, interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# How far another machine's means may lie from the committed ones, in nats. Machines round
# differently and training amplifies it: with other instruction sets forced no mean of chapters 05
# and 07 moved by more than 0.0002, so a gap of 0.005 is something else.
BAND = {"validation_loss": 0.005, "difference": 0.005}
COLUMNS = 80  # of a sentence on the screen

OUTPUTS_NOTE = (
    "All of this may be deleted. runs/ holds what was trained, so that the same command need not "
    "train it again.\n"
)


def carry_out(
    experiment: Experiment,
    plan: Plan,
    summarize: Callable[[Plan, list[Result]], list[str | Table]],
    draw: Callable[[Plan, list[Result]], dict[str, Figure]],
    expected_folder: Path,
) -> int:
    """Train what `plan` still lacks and leave the results in its folder. Returns the exit status.

    `summarize` says what came out, `draw` gives the figures by file name. Status 1 if a run failed.
    Ctrl-C goes on up as KeyboardInterrupt; the finished runs are kept.
    """
    runs.join_ranks()
    if runs.world().rank > 0:
        console.silence()
    with held_by_rank_0(plan):
        results = read_and_train(experiment, plan)
        runs.leave_ranks()
        if runs.world().rank > 0:
            return 0
        return say_and_draw(experiment, plan, results, summarize, draw, expected_folder)


def held_by_rank_0(plan: Plan) -> contextlib.AbstractContextManager:
    """The output folder, for this run alone."""
    if runs.world().rank > 0:
        return contextlib.nullcontext()
    return files.held(plan.options.output_dir)


def read_and_train(experiment: Experiment, plan: Plan) -> list[Result]:
    """The results of all runs: those on disk, and the missing ones, trained now."""
    console.say(setting_text(plan))
    console.say()
    refuse_impossible_models(experiment, plan)
    files.write_text(plan.options.output_dir / "README.txt", OUTPUTS_NOTE)
    if plan.options.fresh:
        runs.Store(plan, experiment).forget()
    results = runs.stored(plan, experiment, any_source=plan.options.report)
    outdated = len(runs.stored(plan, experiment, any_source=True)) - len(results)
    results = runs.known_to_all(plan, experiment, results)
    missing = plan.n_runs - len(results)
    if plan.options.report:
        if not results:
            raise UserError("--report: no run of this plan is stored; run it without --report")
        if missing:
            console.say(f"{missing} of {plan.n_runs} runs are not there.")
        return in_order(plan, results)
    if outdated > 0:
        console.say(f"The code has changed: {outdated} stored runs are trained again.")
    if results:
        console.say(
            f"{len(results)} of {plan.n_runs} runs are stored already; "
            f"{missing or 'none'} to train. --fresh trains them all again."
        )
    if missing:
        train_all(experiment, plan, results)
    return in_order(plan, results)


def in_order(plan: Plan, results: list[Result]) -> list[Result]:
    """By variant as the plan names them, then by seed, whichever came first."""
    return sorted(results, key=lambda r: (plan.names.index(r.run.variant), r.run.seed))


def refuse_impossible_models(experiment: Experiment, plan: Plan) -> None:
    """Build each variant's model once, so that a wrong --set is refused before any training."""
    if not plan.options.changes:
        return
    for config in plan.configs.values():
        try:
            experiment.build_model(config, plan.corpus.vocab_size, plan.seeds[0])
        except ValueError as error:
            raise UserError(f"--set: {error}") from None
        except (MemoryError, RuntimeError) as error:
            if not runs.is_lack_of_memory(error):
                raise
            raise UserError("--set: there is not enough memory for such a model") from None


def train_all(experiment: Experiment, plan: Plan, results: list[Result]) -> None:
    """Append each missing run's result to `results` as it ends, under a live display."""
    missing = plan.n_runs - len(results)
    with console.RunProgress(missing, plan.training.steps) as progress:
        if plan.options.preset == "full" and plan.options.device == "cpu":
            progress.say("This is the preset for a GPU, and no GPU is in use.")

        def on_report(run: Run, done: int, loss: float, ms_per_step: float) -> None:
            progress.update(str(run), done, f"loss {loss:.3f}  {ms_per_step:.0f} ms/step")

        try:
            for result in runs.train_missing(plan, experiment, results, on_report):
                results.append(result)
                progress.finish(str(result.run), ending(result))
                if len(plan.variants) > 1:
                    progress.show(comparison_table(plan, in_order(plan, results)))
        except BaseException:
            finished = sum(r.history is not None for r in results)
            with contextlib.suppress(OSError):  # Ctrl-C may have ended the reader of a pipe too
                progress.say(
                    f"{finished} of {plan.n_runs} runs have finished and are kept; "
                    "the same command goes on from here"
                )
            raise


def ending(result: Result) -> str:
    """How a run ended, in a line."""
    if result.error:
        return f"FAILED: {result.error}"
    history = result.history
    return f"validation loss {history.validation_loss:.3f}, {history.ms_per_step:.1f} ms/step"


def say_and_draw(
    experiment: Experiment,
    plan: Plan,
    results: list[Result],
    summarize: Callable,
    draw: Callable,
    expected_folder: Path,
) -> int:
    """Write the results, then the log and the figures, then say it all."""
    folder = plan.options.output_dir
    results_record = record(plan, results)
    files.write_json(folder / "results.json", results_record)
    blocks = summarize(plan, results)
    blocks += [f"FAILED: {r.run}: {r.error}" for r in results if r.error]
    blocks = [paragraph(block) if isinstance(block, str) else block for block in blocks]
    files.write_text(folder / "run_log.txt", console.log_text([setting_text(plan), *blocks]))
    for block in blocks:
        console.say()
        console.say(block)
    drawn = draw(plan, results) if any(r.history for r in results) else {}
    for name, figure in drawn.items():
        files.write_bytes(folder / name, figures.png(figure))
    console.say()
    console.say(paragraph(compare(results_record, expected_folder, experiment.band)))
    names = ", ".join(["run_log.txt", "results.json", *drawn])
    console.say(f"Written to {folder}:")
    console.say(paragraph(names))
    return 1 if any(r.error for r in results) else 0


def paragraph(text: str) -> str:
    """The text with its long lines folded at spaces."""
    return "\n".join(
        textwrap.fill(
            line,
            COLUMNS,
            subsequent_indent="  " if line.startswith("- ") else "",
            break_long_words=False,
            break_on_hyphens=False,
            drop_whitespace=True,
        )
        if len(line) > COLUMNS
        else line
        for line in text.split("\n")
    )


# ---------------------------------------------------------------- what was asked


def device_name(device: str) -> str:
    return f"cuda ({torch.cuda.get_device_name()})" if device == "cuda" else device


def setting_text(plan: Plan) -> str:
    """The head of every run's output and log."""
    corpus = plan.corpus
    training = plan.training
    first = plan.seeds[0]
    last = plan.seeds[-1]
    seeds = f"seed {first}" if first == last else f"seeds {first} to {last}"
    block_size = plan.configs[plan.baseline].block_size
    workers = max(1, min(plan.options.workers, plan.n_runs))
    ranks = runs.world().size
    processes = f"{ranks} ranks of torchrun" if ranks > 1 else f"{workers} worker process"
    lines = [
        plan.title,
        "",
        f"device    {device_name(plan.options.device)}, {processes}{'es' * (workers > 1)}",
        f"corpus    {corpus.name}: {corpus.n_characters:,} characters",
        f"SHA-256   {corpus.sha256}",
        f"tokens    {corpus.tokenizer.name}, a vocabulary of {corpus.vocab_size:,}; "
        f"{len(corpus.train):,} to train on,",
        f"          {len(corpus.validation):,} to validate on ({corpus.split})",
        f"guessing  evenly has a loss of ln {corpus.vocab_size} = "
        f"{plan.uniform_loss:.3f} nats a token",
        f"training  {training.steps:,} steps of {training.batch_size} x {block_size} tokens, "
        f"AdamW at {training.learning_rate:g}, {seeds}",
    ]
    if plan.options.changes:
        changes = ", ".join(f"{name} = {value}" for name, value in plan.options.changes.items())
        lines.append(f"changed   {changes}")
    if corpus.unseen:
        lines.append(
            f"note      {corpus.unseen} of the tokens never occur in the training part; "
            "they keep their start"
        )
    return "\n".join(lines)


def settings_record(plan: Plan) -> dict:
    """What was asked for, as plain data. Two runs with equal records give equal losses on one CPU.

    On a GPU they needn't: its sums are added up in no fixed order.
    """
    return {
        "preset": plan.options.preset,
        "seeds": plan.seeds,
        "training": asdict(plan.training),
        "variants": {name: as_in_json(config) for name, config in plan.configs.items()},
        "corpus": {
            "name": plan.corpus.name,
            "sha256": plan.corpus.sha256,
            "characters": plan.corpus.n_characters,
            "tokenizer": plan.corpus.tokenizer.name,
            "vocab_size": plan.corpus.vocab_size,
            "train_tokens": len(plan.corpus.train),
            "validation_tokens": len(plan.corpus.validation),
        },
    }


def as_in_json(config: Any) -> dict:
    """A config as it comes back from a JSON file, where tuples have become lists."""
    return json.loads(json.dumps(asdict(config), default=str))


def environment_record(plan: Plan) -> dict:
    """What it ran on. It enters the times, and the numbers in their last digits at most."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
        "machine": platform.machine(),
        "cores": usable_cores(),
        "device": device_name(plan.options.device),
        "workers": plan.options.workers,
        "ranks": runs.world().size,
    }


# ---------------------------------------------------------------- what came out


def comparison_table(plan: Plan, results: list[Result]) -> Table:
    """One row a variant: its size, its losses, how it differs from the baseline, its time."""
    several = len(plan.variants) > 1
    headers = [*plan.variants[0].labels, "params", "train", "valid"]
    headers += ["difference", "verdict"] if several else []
    headers.append("ms/step")
    found = runs.differences(plan, results)
    rows = []
    for variant in plan.variants:
        name = variant.name
        parameters = parameters_of(results, name)
        row = [*variant.labels.values(), f"{parameters:,}" if parameters else "-"]
        row.append(number(mean_of(results, name, lambda r: r.history.train_loss)))
        row.append(number(mean_of(results, name, lambda r: r.history.validation_loss)))
        if several:
            row += difference_cells(name == plan.baseline, found.get(name))
        row.append(number(mean_of(results, name, lambda r: r.history.ms_per_step), ".1f"))
        rows.append(row)
    return Table(headers, rows)


def difference_cells(is_baseline: bool, found: tuple[Interval, Verdict] | None) -> list[str]:
    """The two cells that say how a variant differs from the baseline."""
    if is_baseline:
        return ["-", "baseline"]
    if found is None:
        return ["-", "no pair yet"]
    difference, judged = found
    return [str(difference), judged.said]


def caption(plan: Plan) -> str:
    """What the columns of the comparison's table mean."""
    seeds = len(plan.seeds)
    return (
        f"Losses are means over {seeds} seed{'s' * (seeds > 1)}, in nats a token. The "
        f"difference is to {plan.baseline} in validation loss, taken seed by seed: mean and "
        f"95 % interval. Equal: all of it lies within {verdict.DELTA:g} of 0. Lower or higher: 0 "
        "lies outside it. For several rows the intervals that decide are wider (Holm 1979)."
    )


def number(value: float, form: str = ".3f") -> str:
    return "failed" if math.isnan(value) else format(value, form)


def parameters_of(results: list[Result], variant: str) -> int:
    return next((r.parameters for r in results if r.run.variant == variant and r.parameters), 0)


def finding(plan: Plan, results: list[Result], leave_out: str = "") -> str | None:
    """How the variants' validation loss compares with the baseline's, in a sentence.

    None without a finished pair. `leave_out` is a variant whose loss doesn't compare.
    """
    said = {answer: [] for answer in verdict.ANSWERS}
    for name, (difference, judged) in runs.differences(plan, results).items():
        needed = f", about {judged.needed} seeds needed" if judged.needed else ""
        if name != leave_out:
            said[judged.said].append(f"{name} ({difference}{needed})")
    within = f" within {verdict.DELTA:g}"
    parts = [
        f"{answer}{within * (answer == 'equal')}: {', '.join(names)}"
        for answer, names in said.items()
        if names
    ]
    if not parts:
        return None
    seeds = len(plan.seeds)
    return (
        f"Validation loss against {plan.baseline}, in nats, after {plan.training.steps:,} steps "
        f"at a rate of {plan.training.learning_rate:g} and {seeds} seed{'s' * (seeds > 1)}: "
        + "; ".join(parts)
        + "."
    )


def record(plan: Plan, results: list[Result]) -> dict:
    """Everything as plain data, for results.json."""
    found = runs.differences(plan, results)
    return {
        "title": plan.title,
        "complete": len(results) == plan.n_runs and not any(r.error for r in results),
        "settings": settings_record(plan),
        "environment": environment_record(plan),
        "uniform_loss": plan.uniform_loss,
        "variants": [variant_record(results, name, found.get(name)) for name in plan.names],
        "runs": [run_record(result) for result in results],
    }


def variant_record(
    results: list[Result], variant: str, found: tuple[Interval, Verdict] | None
) -> dict:
    compared = None
    if found is not None:
        difference, judged = found
        compared = {**asdict(difference), "verdict": judged.said, "seeds_needed": judged.needed}
    losses = list(runs.losses_of(results, variant).values())
    return {
        "variant": variant,
        "parameters": parameters_of(results, variant),
        "validation_loss": asdict(interval(losses)) if losses else None,
        "difference": compared,
    }


def run_record(result: Result) -> dict:
    history = result.history
    return {
        "variant": result.run.variant,
        "seed": result.run.seed,
        "parameters": result.parameters,
        "error": result.error,
        "train_loss": history and history.train_loss,
        "validation_loss": history and history.validation_loss,
        "ms_per_step": history and history.ms_per_step,
        "losses": history and history.losses,
        "observations": history and history.observations,
        "found": result.found,
    }


# ---------------------------------------------------------------- what was expected


def compare(mine: dict, folder: Path, band: float | None = None) -> str:
    """In words: are this run's means within `band` of those in folder/results.json?

    `mine` is a record(); a band of None means BAND.
    """
    bands = BAND if band is None else dict.fromkeys(BAND, band)
    path = folder / "results.json"
    if not path.exists():
        return "expected/ holds no results yet, so there is nothing to compare with."
    expected = files.read_json(path, "the results of a default run")
    why_not = difference_in_settings(mine["settings"], expected["settings"])
    if why_not:
        return f"Not compared with expected/: {why_not}."
    if not mine["complete"]:
        return "Not compared with expected/: not every run finished."
    outside = []
    widest = 0.0
    for ours, theirs in zip(mine["variants"], expected["variants"], strict=True):
        for key, width in bands.items():
            if ours[key] is None:  # the baseline has no difference to itself
                continue
            gap = abs(ours[key]["mean"] - theirs[key]["mean"])
            widest = max(widest, gap)
            if gap > width:
                outside.append(
                    f"- {ours['variant']}: {key.replace('_', ' ')} {ours[key]['mean']:+.3f}, "
                    f"expected {theirs[key]['mean']:+.3f} within {width}"
                )
    if outside:
        return "This machine's numbers lie OUTSIDE the expected bands:\n" + "\n".join(outside)
    judged = [key for key in bands if any(variant[key] for variant in mine["variants"])]
    within = ", ".join(f"{key.replace('_', ' ')} within {bands[key]}" for key in judged)
    return f"As expected: {within} of expected/ (furthest off: {widest:.3f})."


def difference_in_settings(mine: dict, theirs: dict) -> str | None:
    """The first setting in which two runs differ, in words; None if they asked for the same."""
    if mine["corpus"]["sha256"] != theirs["corpus"]["sha256"]:
        return "the corpus is another text (its SHA-256 differs)"
    for name in ("preset", "seeds", "training", "variants", "corpus"):
        if mine[name] != theirs[name]:
            if name == "preset":
                return "it holds a --tiny run"
            return f"{name} differ from a default --tiny run"
    return None
