"""Variants × paired seeds: train them all, then say what their difference is worth.

Every variant meets the same seeds, and at one seed all variants see the same batches and share the initial values
of every parameter that they have in common. So the comparison is between runs of one seed, and the spread of
those differences over seeds, not of the losses, says what is noise.
"""

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn

from shared import chapters, training, workers
from shared.verdict import Interval, interval
from shared.data import Corpus
from shared.training import History, TrainingSettings

class Experiment:
    """What a chapter tells the comparison. Worker processes make their own: it must need no arguments."""

    band: float | None = None  # nats by which another machine's means may differ; None: what shared/expected.py says

    def build_model(self, variant: str, config: dict, vocab_size: int, seed: int) -> nn.Module:
        """The freshly initialised model of a variant; `config` is a variant's entry of `run_all`."""
        raise NotImplementedError

    def training_loss(self, model: nn.Module, idx: torch.Tensor, targets: torch.Tensor) -> tuple:
        """(what is minimised, the cross-entropy that is reported)."""
        return training.plain_loss(model, idx, targets)

    def observe(self, model: nn.Module, idx: torch.Tensor) -> dict:
        """Numbers from inside the model in mid-training, every settings.observe_every steps; must not change it."""
        return {}

    def inspect(self, model: nn.Module, corpus: Corpus, seed: int) -> dict:
        """What there is to learn from the trained model; goes into results.json."""
        return {}


@dataclass(frozen=True)
class Run:
    """One variant at one seed."""

    variant: str
    seed: int

    def __str__(self) -> str:
        return f"{self.variant}, seed {self.seed}"


@dataclass
class Result:
    """How a run ended: with a history, or with the reason why it has none."""

    run: Run
    parameters: int = 0
    history: History | None = None
    found: dict = field(default_factory=dict)  # from Experiment.inspect
    error: str | None = None


@dataclass(frozen=True)
class Context:
    """What every run of a comparison has in common; travels to each worker once."""

    source: str  # the file and
    name: str  # the class in it, by which a worker finds the experiment
    variants: dict[str, dict]
    corpus: Corpus
    settings: TrainingSettings


def run_all(
    experiment: type[Experiment],
    variants: dict[str, dict],
    corpus: Corpus,
    settings: TrainingSettings,
    seeds: list[int],
    n_workers: int,
    on_report: Callable[[Run, int, float, float], None] = lambda *report: None,
) -> Iterator[Result]:
    """Train every variant at every seed, in parallel, and yield each result as soon as it is there.

    `variants` maps a variant's name to what Experiment.build_model needs to know of it (plain data). Seeds go
    outermost, so that an interrupted comparison has whole pairs. `on_report(run, steps done, loss, ms per step)`.
    """
    context = Context(inspect.getfile(experiment), experiment.__name__, variants, corpus, settings)
    runs = [Run(variant, seed) for seed in seeds for variant in variants]
    for run, result in workers.run_jobs(train_one, context, runs, n_workers, on_report):
        if isinstance(result, workers.WorkerDied):
            result = Result(run, error=f"its process was killed (exit code {result.exit_code})")
        yield result


def train_one(context: Context, run: Run, report: Callable) -> Result:
    """One run, inside a worker process."""
    experiment: Experiment = getattr(chapters.load_file(context.source), context.name)()
    model = experiment.build_model(run.variant, context.variants[run.variant], context.corpus.vocab_size, run.seed)
    result = Result(run, parameters=sum(p.numel() for p in model.parameters()))  # a tied matrix comes once
    try:
        result.history = training.train(
            model, context.corpus, context.settings, run.seed, report, experiment.training_loss, experiment.observe
        )
        result.found = experiment.inspect(model, context.corpus, run.seed)
    except training.NonFiniteLoss as error:
        result.error = str(error)
    return result


# ---------------------------------------------------------------- what a difference is worth

def paired_difference(results: list[Result], variant: str, baseline: str) -> Interval | None:
    """Validation loss of variant minus baseline, seed by seed; None if no seed finished both."""
    finished = {(r.run.variant, r.run.seed): r.history.validation_loss for r in results if r.history}
    pairs = [
        loss - finished[baseline, seed]
        for (name, seed), loss in finished.items()
        if name == variant and (baseline, seed) in finished
    ]
    return interval(pairs) if pairs else None


def mean_of(results: list[Result], variant: str, value: Callable[[Result], Any]) -> float:
    """The mean of value(result) over the variant's finished runs; NaN if there are none."""
    values = [value(r) for r in results if r.run.variant == variant and r.history]
    return sum(values) / len(values) if values else math.nan
