"""Step 08: start small.

What should a model say that has learned nothing? That every token is equally likely. Its loss is
then ln V, for a vocabulary of V tokens; a higher first loss means that it is sure of something for
no reason, and training must first undo that. So weights start small. How small?

1. The last norm gives d numbers of size 1 (d is d_model).
2. A logit z is their sum, each times a weight of the head. Random weights of standard deviation σ
   make it a random number of variance d·σ².
3. The loss is log Σ e^z minus the target's logit, which is 0 on average.
4. For normally distributed z the mean of e^z is e^(variance/2). So the sum over V tokens is about
   V · e^(d·σ²/2), and the first loss is ln V + d·σ²/2.

GPT-2 takes σ = 0.02 for every matrix; biases start at 0, the weights of norms at 1. For this
chapter's model, d = 64 and V = 95, that is 4.554 + 0.013 = 4.57.

PyTorch starts embeddings at σ = 1 and other matrices small, and its first loss is 44. Why so much?

1. The stream is the token's vector plus the position's, of variance 2. The last norm divides it by
   its size, √2.
2. The tied head's row for this token is the same vector. Vector times itself is a sum of d squares
   of average 1, so d. Divided by √2, this token's logit is about d/√2 = 45.
3. Other tokens have a logit of 0 on average. So the model is sure that the token just read comes
   again, and nearly always it is wrong.

With σ = 1 in every matrix, what the blocks add drowns the token's vector, and the loss is 19.6. The
formula would give 36.6; it holds only while logits are small.

    python step_08_start-small.py

draws outputs/step_08.png: the first loss by σ, measured and by the formula.
"""

import math
import sys
from pathlib import Path

import torch
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console, figures
from shared.checks import Checks
from shared.randomness import generator

step_06 = chapters.load_step(5, 6)
GPT = step_06.GPT
GPTConfig = step_06.GPTConfig

V = 95  # characters in the corpus
D_MODEL = 64
STDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)

# ---------------------------------------------------------------- the idea


def start_small(model: nn.Module, seed: int, std: float = 0.02) -> None:
    """N(0, std²) for every matrix, 0 for biases, 1 for the weights of norms."""
    for name, p in model.named_parameters():
        if p.dim() == 2:
            nn.init.normal_(p, std=std, generator=generator(seed, name, tuple(p.shape)))
        elif name.endswith("bias"):
            nn.init.zeros_(p)
        else:
            nn.init.ones_(p)


def first_loss_by_formula(vocab_size: int, d_model: int, std: float) -> float:
    return math.log(vocab_size) + d_model * std**2 / 2


@torch.no_grad()
def first_loss(model: nn.Module) -> float:
    """log Σ e^z minus the target's logit, the mean over random contexts and all targets."""
    idx = torch.randint(model.vocab_size, (64, 32), generator=generator(1, "first loss"))
    logits, _ = model(idx)
    return (logits.logsumexp(-1) - logits.mean(-1)).mean().item()


# ---------------------------------------------------------------- look at it


def measured(std: float) -> float:
    model = GPT(GPTConfig(d_model=D_MODEL), V)
    start_small(model, seed=1, std=std)
    return first_loss(model)


def with_torchs_own_start() -> float:
    with torch.random.fork_rng(devices=[]):  # torch's own start takes no generator
        torch.manual_seed(1)
        return first_loss(GPT(GPTConfig(d_model=D_MODEL), V))


def draw_picture(losses: list[float], torchs: float) -> Path:
    figure = figures.new_figure(7, 3.8)
    axes = figure.subplots()
    small = STDS[:5]
    formula = [first_loss_by_formula(V, D_MODEL, std) for std in small]
    axes.plot(small, formula, color=figures.COLOURS[0], label="ln V + d·σ²/2")
    axes.plot(STDS, losses, "o", color=figures.COLOURS[0], label="measured")
    own = f"torch's own start, σ = 1 in the embeddings alone: {torchs:.0f}"
    axes.plot(1.0, torchs, "s", color=figures.COLOURS[1], label=own)
    axes.axhline(math.log(V), color="0.5", linestyle=":", label="ln V: every token equally likely")
    axes.set_xscale("log")
    axes.set_xticks(STDS, [str(std) for std in STDS])
    axes.minorticks_off()
    figures.label(axes, "The first loss by the size of the start", x="σ of every matrix", y="nats")
    return figures.save(figure, __file__)


def main() -> int:
    losses = [measured(std) for std in STDS]
    torchs = with_torchs_own_start()
    draw_picture(losses, torchs)
    console.say(f"ln V = {math.log(V):.2f}. First loss with σ = 0.02: {losses[1]:.2f}; with σ = 1")
    console.say(f"in every matrix: {losses[-1]:.1f}; as torch starts the model: {torchs:.1f}.")
    console.say("Drawn to outputs/step_08.png.")

    checks = Checks()
    for std, loss in zip(STDS[:4], losses):
        formula = first_loss_by_formula(V, D_MODEL, std)
        checks.close(f"first loss, σ = {std}", loss, formula, 0.03)
    checks.close("torch's own start: d/√2", torchs, D_MODEL / math.sqrt(2), 3)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
