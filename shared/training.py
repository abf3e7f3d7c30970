"""Train one model on one corpus: the loop, the evaluation, the history, checkpoint and resume."""

import contextlib
import io
import math
import time
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median_high
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

from shared import console, files
from shared.data import Corpus, all_windows, sample_batch
from shared.randomness import generator

FIRST_REPORT = 2  # steps before the first look at the losses, from which a long run is estimated
REPORT_EVERY = 10  # steps between two looks; each look waits for a GPU
EVAL_BATCH = 64  # windows at a time when the validation part is read; more spill a core's cache
CHECKPOINT_SECONDS = 60.0  # the most work that a killed run loses


@dataclass(frozen=True)
class TrainingSettings:
    """How a model is trained. The same for every variant of a comparison."""

    steps: int = 200
    batch_size: int = 32
    learning_rate: float = 3e-3
    weight_decay: float = 0.01
    clip: float = 1.0  # the gradient's norm is cut to this
    warmup: int = 0  # steps in which the learning rate climbs to its value
    final_rate: float = (
        1.0  # the last learning rate as a part of the highest; 1.0 keeps it constant
    )
    observe_every: int = 0  # steps between two looks inside the model; 0 never looks
    device: str = "cpu"
    precision: str = "float32"  # of matrix products: "float32", "bfloat16" or "float16"
    compile: str = ""  # torch.compile's backend; empty compiles nothing

    def __post_init__(self):
        if self.batch_size < 1 or self.warmup < 0:
            raise ValueError("batch_size must be at least 1 and warmup at least 0")
        if min(self.learning_rate, self.clip) <= 0 or min(self.weight_decay, self.final_rate) < 0:
            raise ValueError("rates must be above 0, weight_decay and final_rate at least 0")


@dataclass
class History:
    """What happened in one training run."""

    losses: list[float] = field(default_factory=list)  # of each step's batch, in nats a token
    validation_loss: float = math.nan  # over the whole validation part, after the last step
    ms_per_step: float = math.nan  # median over windows of REPORT_EVERY steps, wall-clock time
    observations: list[dict] = field(default_factory=list)

    @property
    def train_loss(self) -> float:
        """The mean over the last tenth of the steps: one batch alone is mostly noise."""
        last = self.losses[-max(1, len(self.losses) // 10) :]
        return sum(last) / len(last)


@dataclass(frozen=True)
class Share:
    """Which rows of every batch are this process's, where several train one model."""

    rank: int = 0
    world: int = 1


class NonFiniteLoss(Exception):
    """The loss became infinite or NaN. `step` counts from 1."""

    def __init__(self, step: int, loss: float):
        super().__init__(f"the loss became {loss} at step {step}")
        self.step = step


def learning_rate(step: int, settings: TrainingSettings) -> float:
    """The rate of step 0, 1, …: a linear climb, then half a cosine down to final_rate.

    Loshchilov & Hutter 2017.
    """
    if step < settings.warmup:
        return settings.learning_rate * (step + 1) / settings.warmup
    progress = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return settings.learning_rate * (settings.final_rate + (1 - settings.final_rate) * cosine)


def plain_loss(model: nn.Module, idx: torch.Tensor, targets: torch.Tensor) -> tuple:
    """(what is minimised, the cross-entropy that is reported, what after_step is told).

    The first two are one thing and the third is nothing, unless an experiment says otherwise.
    """
    _, loss = model(idx, targets)
    return loss, loss, None


def train(
    model: nn.Module,
    corpus: Corpus,
    settings: TrainingSettings,
    seed: int,
    report: Callable[[int, float, float], None] = lambda step, loss, ms_per_step: None,
    training_loss: Callable = plain_loss,
    after_step: Callable[[nn.Module, Any], None] = lambda model, told: None,
    observe: Callable[[nn.Module, torch.Tensor], dict] | None = None,
    checkpoint: Path | None = None,
    share: Share = Share(),
) -> History:
    """Train `model` in place with AdamW (Loshchilov & Hutter 2019), then evaluate it.

    The batches depend on `seed` alone. Every few steps `report(steps done, mean recent loss, ms
    per step)` is called; after each step `after_step(model, told)`, with the third thing that
    training_loss returned; every settings.observe_every steps `observe(model, idx)`, without a
    gradient. With a `checkpoint` path, the state is kept there at intervals, and a run that finds
    one goes on from it, bit for bit on a CPU. Raises NonFiniteLoss.
    """
    device = torch.device(settings.device)
    model.to(device).train()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,  # of every parameter: biases and gains, too
        fused=True,
    )
    # float16 has a small range: the scaler multiplies the loss, so that no gradient vanishes.
    scaler = torch.amp.GradScaler(device.type, enabled=settings.precision == "float16")
    batches = generator(seed, "batches")
    state = State(model, optimizer, scaler, batches, History())
    if checkpoint is not None:
        state.resume(checkpoint, share)
    history = state.history
    step_model = prepared(model, settings, share)
    tokens = corpus.train.to(device)
    recent: list[torch.Tensor] = []  # the losses since the last report, still on the device
    window_began = saved = time.perf_counter()
    for step in range(len(history.losses), settings.steps):
        idx, targets = sample_batch(tokens, model.cfg.block_size, settings.batch_size, batches)
        idx = idx[share.rank :: share.world]
        targets = targets[share.rank :: share.world]
        with autocast(settings):
            objective, cross_entropy, told = training_loss(step_model, idx, targets)
        optimizer.zero_grad()
        scaler.scale(objective).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, settings)
        scaler.step(optimizer)
        scaler.update()
        after_step(model, told)
        recent.append(cross_entropy.detach())
        done = step + 1
        if observe and settings.observe_every and done % settings.observe_every == 0:
            with torch.no_grad():
                history.observations.append({"step": done, **observe(model, idx)})
        if done % REPORT_EVERY == 0 or done in (FIRST_REPORT, settings.steps):
            losses = mean_over_ranks(torch.stack(recent), share).tolist()  # waits for a GPU
            now = time.perf_counter()
            state.milliseconds.append(1e3 * (now - window_began) / len(losses))
            check_finite(losses, first_step=done - len(losses) + 1)
            history.losses += losses
            report(done, sum(losses) / len(losses), state.ms_per_step)
            if (
                checkpoint is not None
                and now - saved > CHECKPOINT_SECONDS
                and done < settings.steps
            ):
                state.keep(checkpoint, share)
                saved = time.perf_counter()
            recent = []
            window_began = time.perf_counter()
    history.ms_per_step = state.ms_per_step
    history.validation_loss = evaluate(model, corpus.validation, settings)
    check_finite([history.validation_loss], first_step=settings.steps)
    return history


def prepared(model: nn.Module, settings: TrainingSettings, share: Share) -> nn.Module:
    """The model as the loop calls it: compiled, and with its gradients averaged over the ranks."""
    if settings.compile:
        model = torch.compile(model, backend=settings.compile)
    if share.world > 1:
        model = DistributedDataParallel(model)
    return model


def autocast(settings: TrainingSettings) -> contextlib.AbstractContextManager:
    """Within it, matrix products run in settings.precision."""
    if settings.precision == "float32":
        return contextlib.nullcontext()
    dtype = getattr(torch, settings.precision)
    return torch.autocast(torch.device(settings.device).type, dtype)


def mean_over_ranks(losses: torch.Tensor, share: Share) -> torch.Tensor:
    """The losses of whole batches, from the losses of each rank's rows."""
    if share.world > 1:
        dist.all_reduce(losses)
        losses /= share.world
    return losses


def check_finite(losses: list[float], first_step: int) -> None:
    for offset, loss in enumerate(losses):
        if not math.isfinite(loss):
            raise NonFiniteLoss(first_step + offset, loss)


@torch.no_grad()
def evaluate(model: nn.Module, tokens: torch.Tensor, settings: TrainingSettings) -> float:
    """Mean cross-entropy in nats over every token of tokens (N,) but the first."""
    was_training = model.training
    model.eval()
    tokens = tokens.to(settings.device)
    total = torch.zeros((), dtype=torch.float64)
    for idx, targets in all_windows(tokens, model.cfg.block_size, EVAL_BATCH):
        with autocast(settings):
            _, loss = model(idx, targets)
        total += loss.cpu().double() * targets.numel()  # on the CPU: Apple's GPUs have no float64
    model.train(was_training)
    return total.item() / (len(tokens) - 1)


# ---------------------------------------------------------------- checkpoints


@dataclass
class State:
    """Everything that a run needs to go on where it stopped."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    batches: torch.Generator
    history: History
    milliseconds: list[float] = field(default_factory=list)  # a step's time, window by window

    @property
    def ms_per_step(self) -> float:
        """The median; the first window is left out once there are others, as it warms up."""
        return median_high(self.milliseconds[1:] or self.milliseconds)

    def save(self, path: Path, share: Share) -> None:
        """Write everything to `path`, whole or not at all; of several ranks, the first writes."""
        if share.rank > 0:
            return
        content = {
            "of": path.name,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "batches": self.batches.get_state(),
            "history": asdict(self.history),
            "milliseconds": self.milliseconds,
        }
        files.write_bytes(path, as_bytes(content))

    def keep(self, path: Path, share: Share) -> None:
        """Save; a full disk is said and ends nothing, since the run may still finish."""
        try:
            self.save(path, share)
        except OSError as error:
            console.complain(f"can't keep a checkpoint, and train on without: {error}")

    def resume(self, path: Path, share: Share) -> None:
        """Take everything from `path`, if it is there. UserError if it is not such a file.

        Of several ranks the first reads and sends it to the others, which may see other disks.
        """
        contents = [load_checkpoint(path) if share.rank == 0 and path.exists() else None]
        if share.world > 1:
            dist.broadcast_object_list(contents)
        content = contents[0]
        if content is None:
            return
        try:
            self.model.load_state_dict(content["model"])
            self.optimizer.load_state_dict(content["optimizer"])
            self.scaler.load_state_dict(content["scaler"])
            self.batches.set_state(content["batches"])
            self.history = History(**content["history"])
            self.milliseconds = content["milliseconds"]
            if not math.isfinite(sum(self.history.losses) + sum(self.milliseconds)):
                raise ValueError
        except Exception:  # whatever load_state_dict makes of another thing than it wrote
            raise files.damaged(path, "a checkpoint of this run") from None


def as_bytes(content: dict) -> bytes:
    """What torch.save writes."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def load_checkpoint(path: Path) -> dict:
    """What State.save or runs.Store.write_model wrote. UserError if it is not such a file.

    The file must be whole, and hold what its name says: torch looks at neither.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            torn = archive.testzip()  # the name of a part whose checksum is wrong
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # torch has no single error for a file that it can't read
        raise files.damaged(path, "a checkpoint") from None
    if torn or not isinstance(content, dict) or "model" not in content:
        raise files.damaged(path, "a checkpoint")
    if content.get("of") != path.name:
        raise files.damaged(path, "the checkpoint that its name says")
    return content
