"""The runs of study.py: what each is, where it is kept, which are wanted, and their training.

A condition says where variants are compared: how wide, how long, from which start, on which text.
In it each variant is trained at several rates on some seeds, which choose its best rate; then at
that rate on other seeds, which decide the verdict. Which runs are wanted next follows from those
that are there, so a study goes on from wherever it was interrupted.
"""

import ast
import functools
import hashlib
import inspect
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

import torch
import torch.nn as nn

from shared import chapters, console, data, files, runs, training
from shared.training import TrainingSettings

modern = chapters.load_build(7)

# ---------------------------------------------------------------- what a run is


@dataclass(frozen=True)
class Setting:
    """What a model is and how it is trained, but for the rate and the seed."""

    variant: str = "LayerNorm+GELU"
    d_model: int = 64
    steps: int = 800
    schedule: str = "cosine"  # one of SCHEDULES
    start: str = "0.02"  # one of STARTS
    text: str = "docs, characters"  # one of TEXTS
    clip: float = 1.0  # the gradient's norm is cut to this


@dataclass(frozen=True)
class Trial:
    """One training run."""

    setting: Setting
    rate: float  # the highest learning rate
    seed: int

    def __str__(self) -> str:
        s = self.setting
        return (
            f"{s.variant}, d_model {s.d_model}, {s.steps:,} steps, {s.schedule}, start {s.start}, "
            f"{s.text}, rate {self.rate:g}, seed {self.seed}"
        )


VARIANTS = {
    "LayerNorm+GELU": {"norm_type": "layernorm", "mlp_type": "gelu"},  # the baseline
    "RMSNorm+GELU": {"norm_type": "rmsnorm", "mlp_type": "gelu"},
    "LayerNorm+SwiGLU": {"norm_type": "layernorm", "mlp_type": "swiglu"},
    "RMSNorm+SwiGLU": {"norm_type": "rmsnorm", "mlp_type": "swiglu"},
    "LayerNorm+ReLU²": {"norm_type": "layernorm", "mlp_type": "relu2"},
}

SCHEDULES = {
    "constant": {"warmup": 0.0, "final_rate": 1.0},
    "cosine": {"warmup": 0.05, "final_rate": 0.0},  # warmup: a part of the steps
    "cosine, long warm-up": {"warmup": 0.25, "final_rate": 0.0},
}

# Which matrices start from N(0, 1/inputs); all others start from N(0, 0.02²).
STARTS = {
    "0.02": "(?!)",  # none: this pattern is found in no name
    "fan_in": "",  # all (the embeddings keep 0.02, as everywhere)
    "fan_in in the MLP": r"\.mlp\.",
    "fan_in in attention": r"\.attn\.",
    "fan_in in the gate": r"\.gate_proj\.",
    "fan_in in up": r"\.up_proj\.",
}

TEXTS = {
    "docs, characters": ("docs", "char"),
    "source, byte pairs": ("source", "bpe4k"),
}
VALIDATION = 65_536  # tokens of the validation part that are read, at most
PIECE = 1024  # neighbouring tokens that stay together where only some are read

# Every second one is twice the last; between them stands √2 times it.
RATES = (
    *(2.5e-4, 3.5e-4, 5e-4, 7e-4, 1e-3, 1.4e-3, 2e-3, 2.8e-3, 4e-3),
    *(5.6e-3, 8e-3, 1.1e-2, 1.6e-2, 2.3e-2, 3.2e-2, 4.5e-2, 6.4e-2),
)


def build_model(setting: Setting, vocab_size: int, seed: int) -> nn.Module:
    """The freshly initialised model of a setting."""
    config = modern.ModernConfig(d_model=setting.d_model, **VARIANTS[setting.variant])
    model = modern.ModernGPT(config, vocab_size)
    other = modern.ModernGPT(config, vocab_size)
    modern.gpt.init_parameters(model, seed, 0.02)
    modern.gpt.init_parameters(other, seed, "fan_in")
    with torch.no_grad():
        for (name, p), larger in zip(model.named_parameters(), other.parameters(), strict=True):
            if re.search(STARTS[setting.start], name):
                p.copy_(larger)
    return model


def training_settings(trial: Trial) -> TrainingSettings:
    """How the trial is trained."""
    setting = trial.setting
    schedule = SCHEDULES[setting.schedule]
    return TrainingSettings(
        steps=setting.steps,
        learning_rate=trial.rate,
        warmup=round(schedule["warmup"] * setting.steps),
        final_rate=schedule["final_rate"],
        clip=setting.clip,
    )


@functools.cache
def load_text(name: str) -> data.Corpus:
    """A text of TEXTS. Of a long validation part, pieces at equal distances are read."""
    source, tokenizer = TEXTS[name]
    corpus = data.load_corpus(source, tokenizer, modern.ModernConfig().block_size)
    pieces = corpus.validation.split(PIECE)
    every = math.ceil(len(corpus.validation) / VALIDATION)
    return replace(corpus, validation=torch.cat(pieces[::every]))


def train_trial(
    context: "Context", trial: Trial, report: Callable, worker: int = 0
) -> float | None:
    """Train one model in this process and keep its validation loss; None if it diverged."""
    corpus = context.corpora[trial.setting.text]
    model = build_model(trial.setting, corpus.vocab_size, trial.seed)
    try:
        history = training.train(model, corpus, training_settings(trial), trial.seed)
        loss = history.validation_loss
    except training.NonFiniteLoss:
        loss = None
    context.store.write(trial, loss)
    return loss


# ---------------------------------------------------------------- where runs are kept

Losses = dict[Trial, float | None]


@functools.cache
def code_hash() -> str:
    """A hash of all code that a run's number depends on, and of torch, which brings the texts."""
    mine = [build_model, training_settings, load_text, train_trial]
    trees = [ast.dump(ast.parse(inspect.getsource(function))) for function in mine]
    tables = [VARIANTS, SCHEDULES, STARTS, TEXTS, VALIDATION, PIECE]
    parts = [runs.source_hash(modern.__file__), torch.__version__, *trees, repr(tables)]
    return hashlib.sha256("\n".join(parts).encode("utf-8")).hexdigest()


@dataclass(frozen=True)
class Store:
    """Finished runs, one small file each."""

    folder: Path
    code: str = field(default_factory=code_hash)
    seen: Losses = field(default_factory=dict)  # what was read once isn't read again

    def path(self, trial: Trial) -> Path:
        key = runs.sha256_of({"trial": asdict(trial), "code": self.code})[:16]
        return self.folder / f"{key}.json"

    def write(self, trial: Trial, loss: float | None) -> None:
        """Keep a finished run. UserError if there is no room for it."""
        try:
            files.write_json(self.path(trial), {"trial": asdict(trial), "loss": loss})
        except OSError as error:
            raise console.UserError(f"a finished run can't be kept: {error}") from None

    def read(self, trial: Trial) -> Losses:
        """The run's loss, if it is there. UserError for a file that is damaged."""
        if trial in self.seen:
            return {trial: self.seen[trial]}
        path = self.path(trial)
        if not path.exists():
            return {}
        record = files.read_json(path, "a stored run")
        if not isinstance(record, dict) or record.get("trial") != asdict(trial):
            raise files.damaged(path, "the run that its name says")
        self.seen[trial] = record["loss"]
        return {trial: record["loss"]}


@dataclass(frozen=True)
class Context:
    """What every run needs; it travels to each worker once."""

    store: Store
    corpora: dict[str, data.Corpus]


# ---------------------------------------------------------------- which runs are wanted

CHOOSING = 3  # seeds kept for choosing a rate; the verdict's seeds come after them


@dataclass(frozen=True)
class Condition:
    """One row of comparisons: the variants, where they are compared, and on how many seeds."""

    setting: Setting
    variants: tuple[str, ...]  # the first is the baseline
    rates: tuple[float, ...] = (2e-3, 4e-3, 8e-3)  # those tried first
    choosing: int = 2  # seeds for choosing the rate
    judging: int = 6  # seeds for the verdict
    fine: bool = True  # are rates √2 times apart tried around the best?

    def of(self, variant: str) -> Setting:
        return replace(self.setting, variant=variant)


def choice_seeds(condition: Condition, first_seed: int) -> list[int]:
    return list(range(first_seed, first_seed + condition.choosing))


def verdict_seeds(condition: Condition, first_seed: int) -> list[int]:
    begin = first_seed + CHOOSING
    return list(range(begin, begin + condition.judging))


def mean_losses(losses: Losses, setting: Setting, seeds: list[int]) -> dict[float, float]:
    """The mean loss over the seeds by rate, of the rates that have them all.

    A run that diverged counts as infinitely bad.
    """
    means = {}
    for rate in RATES:
        values = [losses.get(Trial(setting, rate, seed), math.nan) for seed in seeds]
        values = [math.inf if value is None else value for value in values]
        mean = sum(values) / len(values)
        if not math.isnan(mean):
            means[rate] = mean
    return means


def next_rates(condition: Condition, means: dict[float, float]) -> list[float]:
    """The rates that are still to be tried, given the mean loss at those tried.

    First the condition's own. Then downhill by factors of two, until rates on both sides of the
    best have been tried. Then the two beside the best.
    """
    missing = [rate for rate in condition.rates if rate not in means]
    if missing:
        return missing
    best = RATES.index(min(means, key=means.get))
    step = 2  # places in RATES: a factor of two
    if any(rate < RATES[best] for rate in means) and any(rate > RATES[best] for rate in means):
        step = 1
        if not condition.fine:
            return []
    beside = [i for i in (best - step, best + step) if 0 <= i < len(RATES)]
    return [RATES[i] for i in beside if RATES[i] not in means]


def best_rate(condition: Condition, variant: str, losses: Losses, first_seed: int) -> float | None:
    """The rate with the lowest mean loss on the choice seeds; None while rates are to be tried."""
    seeds = choice_seeds(condition, first_seed)
    means = mean_losses(losses, condition.of(variant), seeds)
    if next_rates(condition, means):
        return None
    return min(means, key=means.get)


def wanted(condition: Condition, losses: Losses, first_seed: int) -> list[Trial]:
    """The runs that are known to be needed by now and are not there."""
    trials = []
    for variant in condition.variants:
        setting = condition.of(variant)
        seeds = choice_seeds(condition, first_seed)
        rates = next_rates(condition, mean_losses(losses, setting, seeds))
        if not rates:
            rates = [best_rate(condition, variant, losses, first_seed)]
            seeds = verdict_seeds(condition, first_seed)
        trials += [Trial(setting, rate, seed) for rate in rates for seed in seeds]
    return [trial for trial in trials if trial not in losses]


# ---------------------------------------------------------------- training what is missing

STEP_MS = {32: 8, 64: 14, 128: 36, 256: 98}  # of a step on one core, by d_model
BYTE_PAIRS_MS = 40  # more, for a vocabulary of 4,096
RATES_TRIED = 5.5  # of a variant, as a guess beforehand


def cost(trial: Trial) -> float:
    """Seconds that the run takes on one core of the machine that this was written on, roughly."""
    setting = trial.setting
    ms = STEP_MS.get(setting.d_model, 14) + BYTE_PAIRS_MS * (setting.text != "docs, characters")
    return setting.steps * ms / 1e3


def reached(
    conditions: list[Condition], read: Callable[[Trial], Losses], first_seed: int
) -> Losses:
    """The runs that the conditions lead to, as far as they are there. read(trial) is {} if not.

    What other conditions tried is left out: no choice depends on which parts ran before.
    """
    losses: Losses = {}
    while True:
        found: Losses = {}
        for condition in conditions:
            for trial in wanted(condition, losses, first_seed):
                found |= read(trial)
        if not found:
            return losses
        losses |= found


def settings_left(conditions: list[Condition], losses: Losses, first_seed: int) -> dict:
    """A guess at how many runs of each setting are still to come."""
    left: dict[Setting, float] = {}
    for condition in conditions:
        missing = wanted(condition, losses, first_seed)
        seeds = choice_seeds(condition, first_seed)
        for variant in condition.variants:
            setting = condition.of(variant)
            left[setting] = sum(trial.setting == setting for trial in missing)
            if best_rate(condition, variant, losses, first_seed) is None:
                tried = len(mean_losses(losses, setting, seeds))
                guess = max(RATES_TRIED, len(condition.rates)) - tried
                left[setting] = max(left[setting], guess * len(seeds)) + condition.judging
    return left


def cost_left(parts: dict[str, list[Condition]], store: Store, first_seed: int) -> float:
    """A guess at what is still to be spent, in seconds of one core.

    A setting that several parts share is counted once.
    """
    left: dict[Setting, float] = {}
    for conditions in parts.values():
        losses = reached(conditions, store.read, first_seed)
        for setting, n in settings_left(conditions, losses, first_seed).items():
            left[setting] = max(left.get(setting, 0.0), n)
    return sum(n * cost(Trial(setting, 0.0, 0)) for setting, n in left.items())


def train_missing(
    parts: dict[str, list[Condition]], store: Store, first_seed: int, workers: int
) -> Iterator[tuple[str, Losses]]:
    """Train what is missing, part by part; yield each part's losses when it is complete."""
    known = {t for c in parts.values() for t in reached(c, store.read, first_seed)}
    if known:
        console.say(f"{len(known)} runs are there already.")
    began = time.monotonic()
    spent = 0.0
    for part, conditions in parts.items():
        while True:
            losses = reached(conditions, store.read, first_seed)
            missing = {t for c in conditions for t in wanted(c, losses, first_seed)}
            if not missing:
                break
            jobs = sorted(missing, key=lambda t: (-cost(t), t.seed, str(t)))  # the longest first
            corpora = {text: load_text(text) for text in {t.setting.text for t in jobs}}
            context = Context(store, corpora)
            n_workers = min(workers, len(jobs))
            for trial, loss in runs.run_jobs(train_trial, context, jobs, n_workers, print):
                if isinstance(loss, runs.WorkerDied):
                    raise console.UserError(
                        f"a worker process was killed (exit code {loss.exit_code}), for want of "
                        "memory perhaps; the same command goes on, with --workers 1 in less"
                    )
                spent += cost(trial)
                speed = (time.monotonic() - began) / spent
                left = console.duration(speed * cost_left(parts, store, first_seed))
                ended = "diverged" if loss is None else f"{loss:.3f}"
                console.say(f"{part}: {trial}: {ended}; about {left} left")
        yield part, losses


# ---------------------------------------------------------------- results as files

COLUMNS = [*(f.name for f in fields(Setting)), "rate", "seed", "loss"]


def rows_of(conditions: list[Condition], losses: Losses, first_seed: int) -> list[list]:
    """Every run that the conditions used, in a fixed order."""
    found = reached(conditions, lambda t: {t: losses[t]} if t in losses else {}, first_seed)
    rows = [
        [*asdict(t.setting).values(), t.rate, t.seed, loss and round(loss, 6)]
        for t, loss in found.items()
    ]
    settings = [c.of(variant) for c in conditions for variant in c.variants]
    order = {tuple(asdict(s).values()): i for i, s in reversed(list(enumerate(settings)))}
    return sorted(rows, key=lambda row: (order[tuple(row[:-3])], row[-3], row[-2]))


def write_rows(path: Path, rows: list[list]) -> None:
    """A part's runs, one a line."""
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    columns = json.dumps(COLUMNS)
    files.write_text(path, f'{{"columns": {columns},\n"runs": [\n{lines}\n]}}\n')


def read_rows(path: Path) -> Losses:
    """The losses in a part's file. UserError if it isn't one."""
    content = files.read_json(path, "a part's results")
    try:
        if content["columns"] != COLUMNS:
            raise ValueError
        return {Trial(Setting(*row[:-3]), row[-3], row[-2]): row[-1] for row in content["runs"]}
    except (KeyError, TypeError, ValueError):
        raise files.damaged(path, "a part's results") from None


def file_of(folder: Path, part: str, first_seed: int) -> Path:
    """Where a part's runs stand; those on other seeds than the first study's in a file beside."""
    return folder / (f"{part}.json" if first_seed == 1 else f"{part}_seeds-from-{first_seed}.json")
