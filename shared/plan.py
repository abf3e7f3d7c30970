"""What one invocation of a build.py will do, settled before it does it: preset and flags joined, the corpus read."""

import math
import platform
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from shared import files, data
from shared.cli import Options, usable_cores
from shared.kernels import onednn_is_float32
from shared.training import TrainingSettings


@dataclass(frozen=True)
class Preset:
    """One size of a chapter's experiment."""

    model: Any  # the chapter's config dataclass
    training: TrainingSettings
    corpus: str  # "docs" or "source", see shared/data.py
    tokenizer: str
    seeds: int


@dataclass(frozen=True)
class Plan:
    """Everything that a run's numbers depend on."""

    title: str
    options: Options
    variants: dict[str, dict]  # name -> model config as plain data; the first is the baseline
    training: TrainingSettings
    corpus: data.Corpus
    seeds: list[int]

    @property
    def baseline(self) -> str:
        return next(iter(self.variants))

    @property
    def n_runs(self) -> int:
        return len(self.variants) * len(self.seeds)

    @property
    def n_workers(self) -> int:
        """Worker processes that have something to do."""
        return min(self.options.workers, self.n_runs)

    @property
    def uniform_loss(self) -> float:
        """What a model that finds every token equally likely pays, in nats: ln V."""
        return math.log(self.corpus.vocab_size)


def make_plan(title: str, preset: Preset, variants: dict[str, dict], options: Options) -> Plan:
    """Join a preset, what each variant changes in its model, and the flags. UserError for what can't be done."""
    files.claim_folder(options.output_dir)
    on_cuda = options.device == "cuda"
    seeds, steps = options.seeds or preset.seeds, options.steps or preset.training.steps
    return Plan(
        title=title,
        options=options,
        variants={name: asdict(replace(preset.model, **changes)) for name, changes in variants.items()},
        training=replace(
            preset.training,
            steps=steps,
            observe_every=min(preset.training.observe_every, steps),  # a shorter run is seen at its end
            device=options.device,
            autocast=preset.training.autocast and on_cuda,  # a CPU without bfloat16 is 100 times slower with it
            compile=preset.training.compile if on_cuda else "",
        ),
        corpus=data.load_corpus(
            options.data or preset.corpus, options.tokenizer or preset.tokenizer, preset.model.block_size
        ),
        seeds=list(range(options.seed, options.seed + seeds)),
    )


def settings_record(plan: Plan) -> dict:
    """What was asked for, as plain data. Two runs with equal records on one machine give equal losses."""
    return {
        "preset": plan.options.preset,
        "seeds": plan.seeds,
        "training": asdict(plan.training),
        "variants": plan.variants,
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


def environment_record(plan: Plan) -> dict:
    """What it ran on. It doesn't enter the numbers beyond their last digits, but it enters the times."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
        "machine": platform.machine(),
        "cores": usable_cores(),
        "device": device_name(plan.options.device),
        "workers": plan.options.workers,
        "float32_products": "oneDNN" if onednn_is_float32() else "torch's default",
    }


def device_name(device: str) -> str:
    return f"cuda ({torch.cuda.get_device_name()})" if device == "cuda" else device


def setting_text(plan: Plan) -> str:
    """The head of every run's output and log."""
    corpus, training, workers = plan.corpus, plan.training, plan.n_workers
    seeds = f"seed {plan.seeds[0]}" if len(plan.seeds) == 1 else f"seeds {plan.seeds[0]} to {plan.seeds[-1]}"
    lines = [
        plan.title,
        "",
        f"device    {device_name(plan.options.device)}, {workers} worker process{'es' if workers > 1 else ''}",
        f"corpus    {corpus.name}: {corpus.n_characters:,} characters",
        f"SHA-256   {corpus.sha256}",
        f"tokens    {corpus.tokenizer.name}, {corpus.vocab_size:,} kinds; {len(corpus.train):,} to train on, "
        f"the last {len(corpus.validation):,} to validate on",
        f"baseline  guessing evenly costs ln {corpus.vocab_size} = {plan.uniform_loss:.3f} nats a token",
        f"training  {training.steps:,} steps of {training.batch_size} x "
        f"{next(iter(plan.variants.values()))['block_size']} tokens, "
        f"AdamW, learning rate {training.learning_rate:g}, {seeds}",
    ]
    if corpus.unseen:
        lines.append(
            f"note      {corpus.unseen} kinds of token stand only in the validation part; "
            "the model is asked for them without having seen them"
        )
    return "\n".join(lines)
