"""Step 06: build the activation functions.

The norms are settled; now the function between the MLP's matrices. GELU in its two forms, ReLU², SiLU and the gated
SwiGLU, each with its derivative by hand. The matrices around them come in step 07.

    python step_06_build-the-activation-functions.py

prints values, slopes and what each does to the size of its input, and the checks; about three seconds.
"""

import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import cli, console
from shared.checks import Checks
from shared.randomness import generator


def gelu(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x Φ(x) and its slope Φ(x) + x φ(x), with Φ the Gaussian's distribution function (Hendrycks & Gimpel 2016)."""
    below = 0.5 * (1 + torch.erf(x / math.sqrt(2)))  # Φ(x): the part of a Gaussian that lies below x
    density = torch.exp(-0.5 * x.square()) / math.sqrt(2 * math.pi)
    return x * below, below + x * density


def gelu_tanh(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The tanh form, from when erf was slow (the same paper, section 2). GPT-2's; chapter 05 uses the exact one."""
    c = math.sqrt(2 / math.pi)
    t = torch.tanh(c * (x + 0.044715 * x**3))
    inner_slope = c * (1 + 3 * 0.044715 * x.square())
    return 0.5 * x * (1 + t), 0.5 * (1 + t) + 0.5 * x * (1 - t.square()) * inner_slope


def relu2_pair(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """max(x, 0)² and its slope 2 max(x, 0) (So et al. 2021): a kink in the slope, none in the function."""
    positive = x.clamp(min=0)
    return positive.square(), 2 * positive


def silu(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x σ(x) and its slope σ(x) (1 + x (1 − σ(x))), also called swish (Ramachandran et al. 2017)."""
    s = torch.sigmoid(x)
    return x * s, s * (1 + x * (1 - s))


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """silu(gate) · up (Shazeer 2020, eq. 6) and its slopes in gate and in up: the gate alone is bent."""
    value, slope = silu(gate)
    return value * up, slope * up, value


# Ours, and torch's for the same function.
PAIRS = {
    "gelu": (gelu, F.gelu),
    "gelu_tanh": (gelu_tanh, lambda x: F.gelu(x, approximate="tanh")),
    "relu2": (relu2_pair, lambda x: F.relu(x).square()),
    "silu": (silu, F.silu),
}


def mean_square(activation) -> float:
    """E[activation(z)²] for z ~ N(0, 1), by the trapezoid rule in float64."""
    z = torch.linspace(-12, 12, 200_001, dtype=torch.float64)
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    return torch.trapezoid(activation(z)[0].square() * density, z).item()


def show_values(points: tuple[float, ...] = (-3.0, -1.0, 0.0, 1.0, 3.0)) -> None:
    x = torch.tensor(points, dtype=torch.float64)
    rows = []
    for name, (ours, _) in PAIRS.items():
        value, slope = ours(x)
        rows.append([f"{name}(x)", *(f"{v:.4f}" for v in value.tolist()), f"{mean_square(ours):.4f}"])
        rows.append(["  slope", *(f"{s:.4f}" for s in slope.tolist()), "-"])
    console.say(console.Table(["x", *(f"{p:g}" for p in points), "E[y²] for x ~ N(0, 1)"], rows))


def main() -> int:
    show_values()
    checks = Checks()
    x = torch.linspace(-8, 8, 4001, dtype=torch.float64, requires_grad=True)
    for name, (ours, theirs) in PAIRS.items():
        reference = theirs(x)
        (slope,) = torch.autograd.grad(reference.sum(), x)
        checks.close(f"{name}, from −8 to 8", ours(x)[0], reference, 1e-14)
        checks.close(f"{name}: slope", ours(x)[1], slope, 1e-13)
        far = torch.tensor([-1e4, -100.0, 100.0])  # in float32, where a careless form makes inf · 0
        checks.close(f"{name} far out", ours(far)[0], theirs(far), 0)
    one = torch.tensor(1.0, dtype=torch.float64)
    checks.close("GELU(1), exact", gelu(one)[0], 0.8413447461, 1e-10)
    checks.close("GELU(1), tanh form", gelu_tanh(one)[0], 0.8411920, 5e-8)
    gap = (gelu(x)[0] - gelu_tanh(x)[0]).detach().abs()
    checks.close("largest gap between the two", gap.max(), 4.7e-4, 5e-6)
    checks.close("at |x|", x[gap.argmax()].abs(), 2.70, 0.01)
    checks.close("E[y²], relu2: E[z⁴]/2", mean_square(relu2_pair), 3 / 2, 1e-9)
    by_parts = 1 / 3 + 1 / (2 * math.pi * math.sqrt(3))  # E[z² Φ²] = E[Φ²] + 2 E[z Φ φ]
    checks.close("E[y²], gelu: 1/3 + 1/(2π√3)", mean_square(gelu), by_parts, 1e-9)
    two, three = torch.tensor(2.0, dtype=torch.float64), torch.tensor(3.0, dtype=torch.float64)
    checks.close("SwiGLU of gate 2, up 3", swiglu(two, three)[0], 5.2847825, 5e-8)
    checks.close("gate and up exchanged is another function", swiglu(three, two)[0], 5.7154448, 5e-8)
    pair = torch.randn(2, 5, 7, dtype=torch.float64, generator=generator(1, "step_06"), requires_grad=True)
    value, *slopes = swiglu(*pair)
    reference = pair[0] * F.glu(torch.cat((pair[1], pair[0]), dim=-1))  # torch's GLU is up · σ(gate)
    checks.close("SwiGLU against F.glu", value, reference, 1e-15)
    (gradient,) = torch.autograd.grad(reference.sum(), pair)
    checks.close("SwiGLU: slopes in gate and up", torch.stack(slopes), gradient, 1e-14)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
