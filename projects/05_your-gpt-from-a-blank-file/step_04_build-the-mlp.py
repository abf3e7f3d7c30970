"""Step 04: build the MLP.

Attention (step 03) brought information from other positions. The MLP (multi-layer perceptron) now
works on it, at each position by itself: a matrix takes the vector to four times its width C, GELU
is applied to each of these numbers, and a second matrix leads back to the old width.

GELU is a smooth ReLU: large positive numbers pass, large negative ones become almost 0, and between
there is a soft bend. GELU(x) is x times the share of a normal distribution that lies below x.

The bend must be there. Without it the two matrices would be one matrix, their product, and the MLP
could only ever answer in straight lines. With it, each of the 4C numbers inside is a switch: the
input turns it on or off. Each switch has a column of its own in the second matrix; while it is on,
that column, times the number, is added to the result.

The MLP holds two thirds of a block's numbers: 8C², where attention has 4C². Chapter 07 replaces it.

    python step_04_build-the-mlp.py

draws outputs/step_04.png: GELU beside ReLU, and an MLP with GELU beside the same one without.
"""

import math
import sys
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console, figures
from shared.checks import Checks
from shared.randomness import generator

step_03 = chapters.load_step(5, 3)
GPTConfig = step_03.GPTConfig
ResidualWriter = step_03.ResidualWriter
CausalSelfAttention = step_03.CausalSelfAttention

# ---------------------------------------------------------------- the idea


def gelu_by_hand(x: torch.Tensor) -> torch.Tensor:
    """x times the share of a normal distribution below x (Hendrycks & Gimpel 2016).

    The share is computed from torch's error function, erf.
    """
    share_below = 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    return x * share_below


class MLP(nn.Module):
    """Two matrices with a GELU between them, four times as wide inside (Radford et al. 2019)."""

    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.fc = nn.Linear(cfg.d_model, 4 * cfg.d_model, bias=cfg.bias)
        self.proj = ResidualWriter(4 * cfg.d_model, cfg.d_model, bias=cfg.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., C) -> (..., C)."""
        return self.proj(F.gelu(self.fc(x)))


def without_gelu(mlp: MLP, x: torch.Tensor) -> torch.Tensor:
    """The two matrices alone."""
    return mlp.proj(mlp.fc(x))


def as_one_matrix(mlp: MLP, x: torch.Tensor) -> torch.Tensor:
    """What the two matrices alone come to: one matrix, their product."""
    weight = mlp.proj.weight @ mlp.fc.weight
    bias = mlp.proj.weight @ mlp.fc.bias + mlp.proj.bias
    return F.linear(x, weight, bias)


# ---------------------------------------------------------------- look at it


def random_mlp(d_model: int) -> MLP:
    mlp = MLP(GPTConfig(n_heads=4, d_model=d_model)).double()
    for name, p in mlp.named_parameters():
        nn.init.normal_(p, std=0.7, generator=generator(1, "step 04", name))
    return mlp


@torch.no_grad()
def draw_picture() -> Path:
    """Left: the two bends. Right: one output of an MLP while its input moves on a straight line."""
    figure = figures.new_figure(8, 3.2)
    left, right = figure.subplots(1, 2)
    x = torch.linspace(-4, 4, 200, dtype=torch.float64)
    left.plot(x, x.relu(), color="0.6", label="ReLU")
    left.plot(x, gelu_by_hand(x), color=figures.COLOURS[0], label="GELU")
    figures.label(left, "a switch with a soft bend", x="number in", y="number out")
    mlp = random_mlp(4)
    line = x[:, None] * torch.tensor([1.0, -0.5, 0.5, 1.0], dtype=torch.float64)
    right.plot(x, without_gelu(mlp, line)[:, 0], color="0.6", label="without GELU")
    right.plot(x, mlp(line)[:, 0], color=figures.COLOURS[0], label="MLP")
    figures.label(right, "one output along a line of inputs", x="place on the line")
    return figures.save(figure, __file__)


def main() -> int:
    draw_picture()
    with torch.device("meta"):  # shapes without memory, enough to count
        cfg = GPTConfig(n_heads=12, d_model=768)
        attention = sum(p.numel() for p in CausalSelfAttention(cfg).parameters())
        mlp = sum(p.numel() for p in MLP(cfg).parameters())
    console.say(f"At GPT-2's width of 768 attention holds {attention:,} numbers,")
    console.say(f"and the MLP twice as many: {mlp:,}. Drawn to outputs/step_04.png:")
    console.say("without GELU, an output can only be a straight line.")

    checks = Checks()
    x = torch.linspace(-6, 6, 24_001, dtype=torch.float64)
    checks.close("GELU's formula, and F.gelu", gelu_by_hand(x), F.gelu(x), 1e-12)
    ours = random_mlp(12)
    torchs = nn.Sequential(ours.fc, nn.GELU(), ours.proj)  # torch's layers with our parameters
    x = torch.randn(2, 5, 12, dtype=torch.float64, generator=generator(1, "step 04", "x"))
    checks.close("the MLP, and torch's layers", ours(x), torchs(x), 1e-12)
    alone = torch.cat([ours(x[:, t : t + 1]) for t in range(5)], dim=1)
    checks.close("each position by itself", alone, ours(x), 1e-12)
    checks.close("no GELU: one matrix", without_gelu(ours, x), as_one_matrix(ours, x), 1e-12)
    checks.close("the MLP's share of a block", mlp / (attention + mlp), 2 / 3, 1e-3)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
