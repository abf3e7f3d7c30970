"""Step 06: what stands between the two matrices of an MLP?

Without something in between, the two matrices would be one: x A B is x times the matrix A B. An
activation is a curve that each number goes through, and it must not be a straight line. The plain
ReLU cuts off everything below 0. GELU and SiLU are smooth versions of it: x times a factor that
climbs from 0 to 1. So a number a little below 0 still counts a little, and still has a gradient.
ReLU² is ReLU squared: it grows faster the larger the number is.

SwiGLU (Shazeer 2020) takes two numbers instead of one: silu(gate) · up. The gate says how much of
up passes: a gate far below 0 shuts it out, a gate of 5 lets it through nearly five times. Why is a
gate good? In a plain MLP each neuron decides alone, by its own number. With a product, one number
switches another on or off: "add this, but only if that is so".

    python step_06_build-the-activation-functions.py

draws outputs/step_06.png. Step 07 puts the matrices around them.
"""

import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import cli, console, figures
from shared.checks import Checks

# ---------------------------------------------------------------- the idea


def gelu(x: torch.Tensor) -> torch.Tensor:
    """x times the part of a Gaussian that lies below x (Hendrycks & Gimpel 2016)."""
    part_below = 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    return x * part_below


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """Nearly the same with tanh, which used to be faster. GPT-2 was trained with it."""
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return 0.5 * x * (1 + torch.tanh(inner))


def relu2(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0)² (So et al. 2021)."""
    return F.relu(x).square()


def silu(x: torch.Tensor) -> torch.Tensor:
    """x times the sigmoid of x; also called swish (Ramachandran et al. 2017)."""
    return x * torch.sigmoid(x)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Only the gate goes through silu; up is multiplied in as it is (Shazeer 2020, eq. 6)."""
    return silu(gate) * up


# ---------------------------------------------------------------- look at it


def slope(activation, x: torch.Tensor) -> torch.Tensor:
    """The derivative at each entry of x, by autograd."""
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(activation(x).sum(), x)
    return gradient


def draw_picture() -> Path:
    """The curves, their slopes, and how much of three ups a gate lets through."""
    x = torch.linspace(-3, 3, 301)
    curves = {"ReLU": F.relu, "GELU": gelu, "SiLU": silu, "ReLU²": relu2}
    figure = figures.new_figure(9, 3.2)
    values, slopes, gate = figure.subplots(1, 3)
    for (name, activation), colour, dash in zip(curves.items(), figures.COLOURS, figures.DASHES):
        values.plot(x, activation(x), linestyle=dash, color=colour, label=name)
        slopes.plot(x, slope(activation, x), linestyle=dash, color=colour)
    values.set(title="activation", ylim=(-0.5, 3))
    slopes.set(title="its slope", ylim=(-0.5, 3))
    values.legend(frameon=False)
    for up, colour in zip((2.0, 1.0, -1.0), figures.COLOURS[4:]):
        gate.plot(x, swiglu(x, torch.tensor(up)), color=colour, label=f"up = {up:g}")
    gate.set(title="SwiGLU, by its gate", xlabel="gate")
    gate.legend(frameon=False)
    for axes in (values, slopes, gate):
        axes.spines[["top", "right"]].set_visible(False)
    return figures.save(figure, __file__)


def main() -> int:
    console.say(f"picture: {draw_picture()}")
    console.say()
    console.say("Look at the slopes left of 0: ReLU and ReLU² have none, so a neuron there gets")
    console.say("no gradient; GELU and SiLU keep a little. Right panel: left of 0 little of up")
    console.say("passes, whatever up is; right of 0 it passes nearly in proportion to the gate.")

    checks = Checks()
    x = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    checks.close("gelu: as torch's F.gelu", gelu(x), F.gelu(x), 1e-14)
    checks.close("silu: as torch's F.silu", silu(x), F.silu(x), 1e-14)
    gap = (gelu(x) - gelu_tanh(x)).abs().max()
    checks.close("largest gap of the GELUs", gap, 4.7e-4, 5e-6)
    two = torch.tensor(2.0, dtype=torch.float64)
    three = torch.tensor(3.0, dtype=torch.float64)
    checks.close("swiglu of gate 2, up 3", swiglu(two, three), 5.2847825, 5e-8)
    # It matters which number is the gate.
    checks.close("exchanged: gate 3, up 2", swiglu(three, two), 5.7154448, 5e-8)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
