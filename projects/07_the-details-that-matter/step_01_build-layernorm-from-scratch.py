"""Step 01: how do we keep every vector at one size, whatever the layers before made of it?

A layer learns best if its input always has about the same size. But each layer before it changes
that size, and goes on changing it while it trains. LayerNorm (Ba et al. 2016) brings each token's
vector back: it subtracts the mean of the entries and divides by their standard deviation. Now the
mean is 0 and the standard deviation is 1. Then each channel gets a gain and a bias that the model
learns, so it may choose another size where it needs one.

The backward pass follows from two things that don't change the output. Add 1 to every entry of x:
the mean moves along, and y stays. So the gradient has no part in the direction (1, 1, ..., 1). That
part of a vector is its mean, so we subtract the mean. Now stretch x: make each entry's distance
from the mean twice as large. The standard deviation doubles, and y stays. The stretch moves x along
the normalized x. So the gradient has no part in that direction either, and we subtract that part
too. These are the two means in the backward pass.

    python step_01_build-layernorm-from-scratch.py

draws outputs/step_01.png. Step 02 builds a norm that leaves the mean alone.

Shapes: C = d_model. A norm works on the last axis, so x may be any (..., C).
"""

import sys
from pathlib import Path

import torch
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import cli, console, figures
from shared.checks import Checks
from shared.randomness import generator

# ---------------------------------------------------------------- the idea


def layernorm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-5
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x (..., C) -> y (..., C); for the backward pass normalized (..., C), inverse_std (..., 1).

    y = (x - mean) / √(variance + eps) · weight + bias (eq. 4).
    """
    centred = x - x.mean(-1, keepdim=True)
    # Divided by C, not by C - 1 as x.std() does. We square `centred`, since the shortcut
    # mean(x²) - mean(x)² loses its digits when the mean is large.
    variance = centred.square().mean(-1, keepdim=True)
    # 1 / √(variance + eps). Where all entries are equal, eps keeps us from dividing by 0.
    inverse_std = torch.rsqrt(variance + eps)
    normalized = centred * inverse_std
    return normalized * weight + bias, normalized, inverse_std


def layernorm_backward(
    dy: torch.Tensor, normalized: torch.Tensor, inverse_std: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dy = dL/dy (..., C) -> dL/dx (..., C), dL/dweight (C), dL/dbias (C)."""
    d_normalized = dy * weight
    shift_part = d_normalized.mean(-1, keepdim=True)
    # The part of a vector g along a vector n is n · (g·n) / (n·n). For n = normalized, n·n is C,
    # and (g·n) / C is the mean of g times n.
    scale_part = normalized * (d_normalized * normalized).mean(-1, keepdim=True)
    dx = (d_normalized - shift_part - scale_part) * inverse_std
    C = dy.shape[-1]
    d_weight = (dy * normalized).reshape(-1, C).sum(0)  # all tokens share one gain and one bias
    d_bias = dy.reshape(-1, C).sum(0)
    return dx, d_weight, d_bias


class LayerNorm(nn.Module):
    """The forward pass as a module, with its gain and its bias."""

    def __init__(self, d_model: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d_model))
        self.bias = nn.Parameter(torch.zeros(d_model))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _, _ = layernorm(x, self.weight, self.bias, self.eps)
        return y


# ---------------------------------------------------------------- look at it


def draw_picture() -> Path:
    """One vector of 16 entries before LayerNorm, between its two moves, and after them."""
    x = 3 + 2 * torch.randn(16, generator=generator(1, "step_01", "picture"))
    centred = x - x.mean()
    normalized = LayerNorm(16)(x).detach()
    figure = figures.new_figure(8, 3)
    panels = figure.subplots(1, 3, sharey=True)
    figures.vector_bars(panels[0], x.tolist(), "x")
    figures.vector_bars(panels[1], centred.tolist(), "minus its mean")
    figures.vector_bars(panels[2], normalized.tolist(), "divided by its std")
    return figures.save(figure, __file__)


def main() -> int:
    console.say(f"picture: {draw_picture()}")
    console.say()
    console.say("Look at the line, the mean: it goes to 0. Then look at the band, one standard")
    console.say("deviation to both sides: it ends at -1 and 1. The bars keep their order.")

    checks = Checks()
    norm = LayerNorm(4)
    by_hand = torch.tensor([-1.3416354, -0.4472118, 0.4472118, 1.3416354])
    checks.close("LayerNorm of [1, 2, 3, 4]", norm(torch.tensor([1.0, 2, 3, 4])), by_hand, 2e-7)

    draw = generator(1, "step_01", "checks")
    theirs = nn.LayerNorm(5, eps=1e-5, dtype=torch.float64)
    nn.init.normal_(theirs.weight, generator=draw)  # gains of 1 and biases of 0 would hide mistakes
    nn.init.normal_(theirs.bias, generator=draw)
    x = torch.randn(2, 3, 5, dtype=torch.float64, generator=draw, requires_grad=True)
    dy = torch.randn(2, 3, 5, dtype=torch.float64, generator=draw)
    reference = theirs(x)
    reference.backward(dy)
    with torch.no_grad():
        y, normalized, inverse_std = layernorm(x, theirs.weight, theirs.bias)
        dx, _, _ = layernorm_backward(dy, normalized, inverse_std, theirs.weight)
    checks.close("output: as nn.LayerNorm", y, reference, 1e-13)
    checks.close("dL/dx by hand: as autograd", dx, x.grad, 1e-13)
    checks.close("dL/dx: no shift, mean 0", dx.mean(-1), torch.zeros(2, 3), 1e-13)
    along_x = (dx * normalized).mean(-1)  # eps leaves a little of it
    checks.close("dL/dx: no part along x", along_x, torch.zeros(2, 3), 1e-4)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
