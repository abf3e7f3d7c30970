"""Step 01: build LayerNorm from scratch, forward and backward.

Chapter 05 took `nn.LayerNorm` from the shelf. This step builds it: the forward pass in four lines, then its
gradients by hand, each held to autograd. It leaves out half precision, which is the next step's, and the model.

    python step_01_build-layernorm-from-scratch.py

prints one vector taken apart, two famous ways to get LayerNorm wrong, and the checks; about three seconds.

Shapes: C = d_model, N tokens; a norm works on the last axis, so any (..., C) will do.
"""

import sys
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import cli, console
from shared.checks import Checks
from shared.randomness import generator


def layernorm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-5
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x (..., C) -> y (..., C), and what the backward pass needs: x̂ (..., C) and 1/σ (..., 1).

    y = (x − mean) / √(var + eps) · weight + bias (Ba et al. 2016, eq. 4). The variance is the population's: the C
    channels are all there are, so it divides by C and not by C − 1.
    """
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)  # of what is already centred: E[x²] − E[x]² would cancel
    inverse_std = torch.rsqrt(variance + eps)  # eps inside the root
    normalized = centred * inverse_std
    return normalized * weight + bias, normalized, inverse_std


def layernorm_backward(
    dy: torch.Tensor, normalized: torch.Tensor, inverse_std: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dL/dy (..., C) -> dL/dx (..., C), dL/dweight (C), dL/dbias (C).

    With g = dy · weight:  dx = (g − mean(g) − x̂ · mean(g · x̂)) / σ. The two means are what LayerNorm takes out of
    every gradient: its part along the ones (a shift changes nothing) and along x̂ (neither does a scale).
    """
    g = dy * weight
    along_ones = g.mean(-1, keepdim=True)
    along_x = (g * normalized).mean(-1, keepdim=True)
    dx = (g - along_ones - normalized * along_x) * inverse_std
    C = dy.shape[-1]
    return dx, (dy * normalized).reshape(-1, C).sum(0), dy.reshape(-1, C).sum(0)


class LayerNorm(nn.Module):
    """The same as a module, with its gain and its bias."""

    def __init__(self, d_model: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d_model))
        self.bias = nn.Parameter(torch.zeros(d_model))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return layernorm(x, self.weight, self.bias, self.eps)[0]


def one_pass(x: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """Wrong: the variance as E[x²] − E[x]², two large numbers whose difference float32 doesn't hold."""
    mean = x.mean(-1, keepdim=True)
    return (x - mean) * torch.rsqrt(x.square().mean(-1, keepdim=True) - mean.square() + eps)


def unbiased_eps_outside(x: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """Wrong: the sample's standard deviation, and eps added to it instead of to the variance."""
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + eps)


def error_against_float64(norm, x: torch.Tensor) -> float:
    """The largest distance of norm(x) from the same LayerNorm in float64."""
    exact = F.layer_norm(x.double(), x.shape[-1:], eps=1e-5)
    return (norm(x).double() - exact).abs().max().item()


def check_gradients(checks: Checks, shape: tuple[int, ...]) -> None:
    """Forward and all three gradients against nn.LayerNorm and autograd, with random gains and biases."""
    draw = generator(1, "step_01", shape)
    theirs = nn.LayerNorm(shape[-1], eps=1e-5, dtype=torch.float64)
    nn.init.normal_(theirs.weight, generator=draw)  # gains of one and biases of zero would hide a mistake
    nn.init.normal_(theirs.bias, generator=draw)
    x = torch.randn(shape, dtype=torch.float64, generator=draw, requires_grad=True)
    dy = torch.randn(shape, dtype=torch.float64, generator=draw)
    reference = theirs(x)
    reference.backward(dy)
    with torch.no_grad():
        y, normalized, inverse_std = layernorm(x, theirs.weight, theirs.bias)
        dx, dweight, dbias = layernorm_backward(dy, normalized, inverse_std, theirs.weight)
    checks.close(f"y {shape}", y, reference, 1e-13)
    checks.close(f"dL/dx {shape}", dx, x.grad, 1e-13)
    checks.close(f"dL/dweight {shape}", dweight, theirs.weight.grad, 1e-13)
    checks.close(f"dL/dbias {shape}", dbias, theirs.bias.grad, 1e-13)


def show_hard_inputs(checks: Checks) -> None:
    """The module beside torch's and beside two wrong forms, where float32 is short of digits."""
    noise = torch.randn(6, 768, generator=generator(1, "step_01", "hard"))
    hard = {"mean 1000, std 1": 1e3 + noise, "mean 0, std 0.001": 1e-3 * noise, "both": 1e3 + 1e-3 * noise}
    norms = {
        "this step's": LayerNorm(768),
        "nn.LayerNorm": nn.LayerNorm(768, eps=1e-5),
        "wrong: E[x²] − E[x]²": one_pass,
        "wrong: C − 1, eps outside": unbiased_eps_outside,
    }
    errors = {name: [error_against_float64(norm, x) for x in hard.values()] for name, norm in norms.items()}
    console.say("\nHow far four LayerNorms in float32 are from float64's, 6 vectors of 768:")
    console.say()
    console.say(console.Table(["form", *hard], [[name, *(f"{e:.1e}" for e in row)] for name, row in errors.items()]))
    for case, ours, torchs in zip(hard, errors["this step's"], errors["nn.LayerNorm"]):
        checks.between(f"error at {case}: at most 4 times torch's", ours, 0, 4 * torchs)


def main() -> int:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    y, _, inverse_std = layernorm(x, torch.ones(4), torch.zeros(4))
    console.say(f"x = {x.tolist()}: mean {x.mean():g}, 1/σ {inverse_std.item():.6f}")
    console.say(f"LayerNorm(x) = {[round(v, 6) for v in y.tolist()]}")

    checks = Checks()
    checks.close("[1, 2, 3, 4]", y, torch.tensor([-1.3416354, -0.4472118, 0.4472118, 1.3416354]), 2e-7)
    pair = layernorm(torch.tensor([0.0, 2.0]), torch.ones(2), torch.zeros(2))[0]
    checks.close("[0, 2]: 1/√(1 + eps), not 0.7071", pair, torch.tensor([-1.0, 1.0]) / (1 + 1e-5) ** 0.5, 2e-7)
    for shape in ((2, 3, 4), (5, 1, 7), (768,)):  # B, T, C; one token a sequence; one vector as wide as GPT-2's
        check_gradients(checks, shape)
    show_hard_inputs(checks)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
