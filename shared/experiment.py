"""The course of a build.py: say the setting, train, say what came out, keep it, compare it with expected/."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from shared import files, comparison, console, expected, figures, report
from shared.comparison import Experiment, Result, Run
from shared.console import Table
from shared.plan import Plan, setting_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def carry_out(
    experiment: type[Experiment],
    plan: Plan,
    summarize: Callable[[Plan, list[Result]], list[str | Table]],
    draw: Callable[[Plan, list[Result]], dict[str, Figure]],
    expected_folder: Path,
) -> int:
    """Train everything in `plan` and leave the results in its output folder. Returns the exit status.

    `summarize` says what came out, `draw` gives the figures by file name. Status 1 if a run failed. Ctrl-C keeps
    the finished runs in interrupted.json and goes on up as KeyboardInterrupt.
    """
    folder = plan.options.output_dir
    console.say(setting_text(plan))
    console.say()
    results: list[Result] = []
    try:
        train_all(experiment, plan, results)
    except KeyboardInterrupt:
        if results:
            files.write_json(folder / "interrupted.json", report.record(plan, results))
            console.say(f"{len(results)} of {plan.n_runs} runs had finished; {folder / 'interrupted.json'} keeps them")
        raise
    order = list(plan.variants)
    results.sort(key=lambda r: (order.index(r.run.variant), r.run.seed))
    record = report.record(plan, results)
    blocks = summarize(plan, results)
    blocks += [f"FAILED: {r.run}: {r.error}" for r in results if r.error]
    for block in blocks:
        console.say()
        console.say(block)
    files.write_text(folder / "run_log.txt", log_text([setting_text(plan), *blocks]))
    files.write_json(folder / "results.json", record)
    drawn = draw(plan, results) if any(r.history for r in results) else {}
    for name, figure in drawn.items():
        files.write_bytes(folder / name, figures.png(figure))
    (folder / "interrupted.json").unlink(missing_ok=True)
    console.say()
    console.say(expected.compare(record, expected_folder, experiment.band))
    console.say(f"Written to {folder}: run_log.txt, results.json{''.join(f', {name}' for name in drawn)}")
    return 1 if any(r.error for r in results) else 0


def train_all(experiment: type[Experiment], plan: Plan, results: list[Result]) -> None:
    """Append each run's result to `results` as it finishes, under a live display."""
    timing = plan.options.preset == "full" and plan.options.device == "cpu"
    with console.RunProgress(plan.n_runs) as progress:
        if timing:
            progress.say("This is the preset for a GPU, and no GPU is in use. Timing the first steps ...")

        def on_report(run: Run, done: int, loss: float, ms_per_step: float) -> None:
            nonlocal timing
            progress.update(str(run), done, plan.training.steps, f"loss {loss:.3f}  {ms_per_step:.0f} ms/step")
            if timing:
                timing = False
                hours = plan.n_runs * plan.training.steps * ms_per_step / plan.n_workers / 3.6e6
                progress.say(
                    f"At {ms_per_step / 1e3:.2g} s a step, {plan.n_runs} runs of {plan.training.steps:,} steps will "
                    f"take about {duration(hours)}. Ctrl-C stops; finished runs are kept."
                )

        for result in comparison.run_all(
            experiment, plan.variants, plan.corpus, plan.training, plan.seeds, plan.n_workers, on_report
        ):
            results.append(result)
            if result.error:
                progress.finish(str(result.run), f"FAILED: {result.error}")
            else:
                history = result.history
                progress.finish(
                    str(result.run),
                    f"validation loss {history.validation_loss:.3f}, {history.ms_per_step:.1f} ms/step",
                )


def duration(hours: float) -> str:
    """A length of time in the unit that a person would use."""
    if hours < 1 / 60:
        return f"{hours * 3600:.0f} seconds"
    if hours < 2:
        return f"{hours * 60:.0f} minutes"
    return f"{hours:.0f} hours" if hours < 72 else f"{hours / 24:.0f} days"


def log_text(blocks: list[str | Table]) -> str:
    """What the terminal showed, as plain text at its natural width."""
    parts = [console.table_text(block) if isinstance(block, Table) else block for block in blocks]
    return "\n\n".join(console.printable(part).rstrip("\n") for part in parts) + "\n"
