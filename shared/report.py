"""What a comparison found, as tables, sentences and plain data. No sentence says more than its numbers do."""

import math
from collections.abc import Callable
from dataclasses import asdict

from shared.comparison import Interval, Result, interval, mean_of, paired_difference
from shared.console import Table
from shared.plan import Plan, environment_record, settings_record


def comparison_table(
    plan: Plan,
    results: list[Result],
    labels: dict[str, Callable[[str], str]],
    extra: dict[str, Callable[[str], str]] | None = None,
) -> Table:
    """One row per variant. `labels` are the columns that name it, `extra` ones of the chapter's own, each as
    {header: variant -> cell}."""
    several = len(plan.variants) > 1
    headers = [*labels, "params", "train", "valid"]
    headers += [f"difference to {plan.baseline}", "verdict"] if several else []
    headers += [*(extra or {}), "ms/step"]
    rows = []
    for variant in plan.variants:
        row = [label(variant) for label in labels.values()]
        row.append(f"{parameters_of(results, variant):,}" if parameters_of(results, variant) else "-")
        row.append(number(mean_of(results, variant, lambda r: r.history.train_loss)))
        row.append(number(mean_of(results, variant, lambda r: r.history.validation_loss)))
        if several:
            difference = paired_difference(results, variant, plan.baseline)
            if variant == plan.baseline:
                row += ["-", "the baseline"]
            else:
                row += [str(difference), difference.verdict] if difference else ["-", "no finished pair"]
        row += [column(variant) for column in (extra or {}).values()]
        row.append(number(mean_of(results, variant, lambda r: r.history.ms_per_step), ".1f"))
        rows.append(row)
    return Table(headers, rows)


def number(value: float, form: str = ".3f") -> str:
    return "failed" if math.isnan(value) else format(value, form)


def parameters_of(results: list[Result], variant: str) -> int:
    return next((r.parameters for r in results if r.run.variant == variant), 0)


def difference_sentence(plan: Plan, results: list[Result], variant: str, baseline: str) -> str | None:
    """One variant's validation loss against another's, in words; None if they share no finished seed."""
    difference = paired_difference(results, variant, baseline)
    if difference is None:
        return None
    amount = Interval(abs(difference.mean), difference.half_width, difference.n)
    if difference.half_width is None:
        return (
            f"{variant} ended {difference.mean:+.3f} nats from {baseline} at one seed, which can't tell it from noise."
        )
    if difference.verdict in ("lower", "higher"):
        return (
            f"{variant} ended {difference.verdict} than {baseline}, by {str(amount)[1:]} nats "
            f"(95 % interval, {difference.n} seeds)."
        )
    return (
        f"Between {variant} and {baseline} {difference.verdict}: {difference} nats. "
        f"A true difference within that interval would not show here."
    )


def size_and_time_sentence(results: list[Result], variant: str, baseline: str) -> str | None:
    """Parameters and wall-clock time of one variant against another; None if they share no finished seed."""
    times = {(r.run.variant, r.run.seed): r.history.ms_per_step for r in results if r.history}
    ratios = sorted(
        times[variant, seed] / times[baseline, seed]
        for name, seed in times
        if name == variant and (baseline, seed) in times
    )
    if not ratios:
        return None
    sizes = [parameters_of(results, name) for name in (variant, baseline)]
    low, high = f"{ratios[0]:.2f}", f"{ratios[-1]:.2f}"
    times = low if low == high else f"{low} to {high}"
    return (
        f"{variant} holds {sizes[0]:,} parameters to {baseline}'s {sizes[1]:,} ({sizes[0] / sizes[1] - 1:+.1%}); "
        f"a step of it took {times} times as long on this machine, by the clock."
    )


def record(plan: Plan, results: list[Result]) -> dict:
    """Everything as plain data, for results.json."""
    return {
        "title": plan.title,
        "complete": len(results) == plan.n_runs and not any(r.error for r in results),
        "settings": settings_record(plan),
        "environment": environment_record(plan),
        "uniform_loss": plan.uniform_loss,
        "variants": [variant_record(plan, results, variant) for variant in plan.variants],
        "runs": [run_record(result) for result in results],
    }


def variant_record(plan: Plan, results: list[Result], variant: str) -> dict:
    difference = paired_difference(results, variant, plan.baseline) if variant != plan.baseline else None
    losses = [r.history.validation_loss for r in results if r.run.variant == variant and r.history]
    return {
        "variant": variant,
        "parameters": parameters_of(results, variant),
        "validation_loss": asdict(interval(losses)) if losses else None,
        "difference": {**asdict(difference), "verdict": difference.verdict} if difference else None,
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
