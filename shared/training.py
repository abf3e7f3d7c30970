"""Train one model on one corpus: the loop, the evaluation, the history."""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import median_high

import torch
import torch.nn as nn
from torch.optim.adamw import adamw

from shared.data import Corpus, all_windows, sample_batch
from shared.randomness import generator

FIRST_REPORT = 2  # steps before the first look at the losses, from which a long run is estimated
REPORT_EVERY = 10  # steps between two looks; each look waits for a GPU
EVAL_BATCH = 64  # windows at a time when the validation part is read; more spill a core's cache


@dataclass(frozen=True)
class TrainingSettings:
    """How a model is trained. The same for every variant of a comparison."""

    steps: int = 200
    batch_size: int = 32
    learning_rate: float = 3e-3
    weight_decay: float = 0.01
    clip: float = 1.0  # the gradient's norm is cut to this
    warmup: int = 0  # steps in which the learning rate climbs to its value
    final_rate: float = 1.0  # the learning rate's last value, as a part of its highest; 1.0 keeps it constant
    observe_every: int = 0  # steps between two looks inside the model; 0 never looks
    device: str = "cpu"
    autocast: bool = False  # bfloat16 matrix products
    compile: str = ""  # torch.compile's backend; empty compiles nothing


@dataclass
class History:
    """What happened in one training run."""

    losses: list[float] = field(default_factory=list)  # cross-entropy of each step's batch, in nats
    validation_loss: float = math.nan  # over the whole validation part, after the last step
    ms_per_step: float = math.nan  # median wall-clock time
    observations: list[dict] = field(default_factory=list)

    @property
    def train_loss(self) -> float:
        """The mean over the last tenth of the steps: one batch alone is mostly noise."""
        last = self.losses[-max(1, len(self.losses) // 10) :]
        return sum(last) / len(last)


class NonFiniteLoss(Exception):
    """The loss became infinite or NaN. `step` counts from 1."""

    def __init__(self, step: int, loss: float):
        super().__init__(f"the loss became {loss} at step {step}")
        self.step = step


def learning_rate(step: int, settings: TrainingSettings) -> float:
    """The rate of step 0, 1, …: a linear climb, then a half cosine down to final_rate (Loshchilov & Hutter 2017)."""
    if step < settings.warmup:
        return settings.learning_rate * (step + 1) / settings.warmup
    progress = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return settings.learning_rate * (settings.final_rate + (1 - settings.final_rate) * cosine)


class AdamW:
    """torch's AdamW (Loshchilov & Hutter 2019) through its functional form.

    The class torch.optim.AdamW loads torch's compiler at its first step, 0.8 s in every process that trains.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], weight_decay: float):
        self.weight_decay = weight_decay
        self.slots = [
            (p, torch.zeros_like(p), torch.zeros_like(p), torch.zeros((), device=p.device))  # moments, step count
            for p in parameters
        ]

    def zero_grad(self) -> None:
        for p, *_ in self.slots:
            p.grad = None

    @torch.no_grad()
    def step(self, learning_rate: float, clip: float) -> None:
        """Move every parameter that has a gradient; together the gradients count for a norm of `clip` at most."""
        moved = [(p, p.grad, *state) for p, *state in self.slots if p.grad is not None]
        parameters, gradients, first_moments, second_moments, steps = map(list, zip(*moved, strict=True))
        norm = nn.utils.get_total_norm(gradients)
        adamw(
            parameters,
            gradients,
            first_moments,
            second_moments,
            [],
            steps,
            lr=learning_rate,
            weight_decay=self.weight_decay,
            beta1=0.9,
            beta2=0.999,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
            fused=True,
            grad_scale=(norm / clip).clamp(min=1.0),  # the gradients are divided by this
        )


def plain_loss(model: nn.Module, idx: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(what is minimised, the cross-entropy that is reported): the same thing, unless an experiment says otherwise."""
    _, loss = model(idx, targets)
    return loss, loss


def train(
    model: nn.Module,
    corpus: Corpus,
    settings: TrainingSettings,
    seed: int,
    report: Callable[[int, float, float], None] = lambda step, loss, ms_per_step: None,
    training_loss: Callable = plain_loss,
    observe: Callable[[nn.Module, torch.Tensor], dict] | None = None,
) -> History:
    """Train `model` in place with AdamW (Loshchilov & Hutter 2019) and evaluate it on the whole validation part.

    The batches depend on `seed` alone. `report(steps done, mean recent loss, ms per step)` is called every few
    steps; `observe(model, idx)` every settings.observe_every steps, without a gradient. Raises NonFiniteLoss.
    """
    device = torch.device(settings.device)
    model.to(device).train()
    step_model = torch.compile(model, backend=settings.compile) if settings.compile else model
    optimizer = AdamW(model.parameters(), settings.weight_decay)
    batches = generator(seed, "batches")
    losses = torch.full((settings.steps,), math.nan, device=device)
    history, seconds, seen = History(), [], 0
    for step in range(settings.steps):
        started = time.perf_counter()
        idx, targets = sample_batch(corpus.train, model.cfg.block_size, settings.batch_size, batches)
        idx, targets = idx.to(device), targets.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=settings.autocast):
            objective, cross_entropy = training_loss(step_model, idx, targets)
        optimizer.zero_grad()
        objective.backward()
        optimizer.step(learning_rate(step, settings), settings.clip)
        losses[step] = cross_entropy.detach()
        seconds.append(time.perf_counter() - started)
        if observe and settings.observe_every and (step + 1) % settings.observe_every == 0:
            with torch.no_grad():
                history.observations.append({"step": step + 1, **observe(model, idx)})
        if (step + 1) % REPORT_EVERY == 0 or step + 1 in (FIRST_REPORT, settings.steps):
            recent = losses[seen : step + 1].tolist()
            check_finite(recent, first_step=seen + 1)
            seen = step + 1
            history.losses += recent
            report(step + 1, sum(recent) / len(recent), 1e3 * median_high(seconds))
    history.ms_per_step = 1e3 * median_high(seconds)
    history.validation_loss = evaluate(model, corpus.validation, settings)
    check_finite([history.validation_loss], first_step=settings.steps)
    return history


def check_finite(losses: list[float], first_step: int) -> None:
    for offset, loss in enumerate(losses):
        if not math.isfinite(loss):
            raise NonFiniteLoss(first_step + offset, loss)


@torch.no_grad()
def evaluate(model: nn.Module, tokens: torch.Tensor, settings: TrainingSettings) -> float:
    """Mean cross-entropy in nats over every token of tokens (N,) but the first, in windows of block_size."""
    was_training = model.training
    model.eval()
    device = torch.device(settings.device)
    total = torch.zeros((), dtype=torch.float64)
    for idx, targets in all_windows(tokens, model.cfg.block_size, EVAL_BATCH):
        with torch.autocast(device.type, torch.bfloat16, enabled=settings.autocast):
            _, loss = model(idx.to(device), targets.to(device))
        total += loss.double().cpu() * targets.numel()
    model.train(was_training)
    return total.item() / (len(tokens) - 1)
