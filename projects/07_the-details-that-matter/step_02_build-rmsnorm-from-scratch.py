"""Step 02: does a norm have to subtract the mean?

Step 01's LayerNorm makes two moves: it subtracts the mean, then it divides by the standard
deviation. The second move is what keeps a vector's size steady. RMSNorm (Zhang & Sennrich 2019)
makes that move alone: it divides by the root of the mean square, and it adds no bias. That is less
work, and it trains as well: step 05 compares them, and step 11 asks what RMSNorm saves.

Where the mean is 0 anyway, both norms give the same vector. Where it isn't, LayerNorm removes it;
RMSNorm keeps it and divides it like everything else.

One trap: the norm squares its input. float16 ends at 65,504, and 256² is 65,536. So the square of
an entry of 256 is already infinite. Everything is then divided by infinity, and the output is 0,
with no NaN to warn us. So the squares are taken in float32, and the result goes back to float16.

    python step_02_build-rmsnorm-from-scratch.py

draws outputs/step_02.png. Step 03 puts both norms into the block.

Shapes: C = d_model. A norm works on the last axis, so x may be any (..., C).
"""

import sys
from pathlib import Path

import torch
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console, figures
from shared.checks import Checks
from shared.randomness import generator

LayerNorm = chapters.load_step(7, 1).LayerNorm

# ---------------------------------------------------------------- the idea


class RMSNorm(nn.Module):
    """x / √(mean(x²) + eps) · weight (Zhang & Sennrich 2019, eq. 4).

    It is LayerNorm without the mean and without the bias.
    """

    def __init__(self, d_model: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d_model))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., C) -> (..., C), in the dtype of x."""
        # float16 ends at 65,504 = 256² - 32, so squares are taken in float32 (or float64, if x is).
        wide = x if x.dtype == torch.float64 else x.float()
        scale = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + self.eps)  # (..., 1)
        return (wide * scale * self.weight).to(x.dtype)


# ---------------------------------------------------------------- look at it


def draw_picture() -> Path:
    """The vector of step 01's picture, and what the two norms make of it."""
    x = 3 + 2 * torch.randn(16, generator=generator(1, "step_01", "picture"))
    figure = figures.new_figure(8, 3)
    panels = figure.subplots(1, 3, sharey=True)
    figures.vector_bars(panels[0], x.tolist(), "x")
    figures.vector_bars(panels[1], LayerNorm(16)(x).tolist(), "LayerNorm(x)")
    figures.vector_bars(panels[2], RMSNorm(16)(x).tolist(), "RMSNorm(x)")
    return figures.save(figure, __file__)


def main() -> int:
    console.say(f"picture: {draw_picture()}")
    console.say()
    console.say("Look at the lines, the means: LayerNorm moves its mean to 0; RMSNorm only makes")
    console.say("the vector smaller, so bars that pointed up still do.")
    console.say()

    norm = RMSNorm(768)
    large = torch.full((768,), 3e4, dtype=torch.float16)
    in_float16 = large * torch.rsqrt(large.square().mean() + 1e-5)
    console.say("RMSNorm of entries of 30,000 in float16 should give 1.")
    console.say(f"With squares in float16 it gives {in_float16[0].item():.1f}.")
    console.say(f"With squares in float32 it gives {norm(large)[0].item():.1f}.")

    checks = Checks()
    by_hand = torch.tensor([0.3651481, 0.7302963, 1.0954444, 1.4605925])
    checks.close("RMSNorm of [1, 2, 3, 4]", RMSNorm(4)(torch.tensor([1.0, 2, 3, 4])), by_hand, 2e-7)

    draw = generator(1, "step_02", "checks")
    ours = RMSNorm(5).double()
    nn.init.normal_(ours.weight, generator=draw)  # gains of 1 would hide a mistake
    theirs = nn.RMSNorm(5, eps=1e-5, dtype=torch.float64)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 3, 5, dtype=torch.float64, generator=draw, requires_grad=True)
    dy = torch.randn(2, 3, 5, dtype=torch.float64, generator=draw)
    checks.close("output: as nn.RMSNorm", ours(x), theirs(x), 1e-13)
    (dx,) = torch.autograd.grad(ours(x), x, dy)
    (reference,) = torch.autograd.grad(theirs(x), x, dy)
    checks.close("dL/dx: as nn.RMSNorm", dx, reference, 1e-13)

    centred = x - x.mean(-1, keepdim=True)
    by_layernorm = LayerNorm(5).double()(x)
    checks.close("x of mean 0: norms agree", RMSNorm(5).double()(centred), by_layernorm, 1e-12)
    checks.close("30,000 in float16 gives 1", norm(large), torch.ones(768), 0)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
