"""Step 05: keep numbers in bounds.

Numbers that get too large can spoil a training. How can they be kept in bounds? Two ways:

    clamp      cut: up to the cap a number stays as it is, and beyond it the cap takes its place
    softcap    bend: cap · tanh(x / cap). Small numbers hardly change, and none passes the cap

They differ in what is left beyond the cap. There a clamp makes 60 and 61 the same, and its gradient
is 0: nothing tells such a number to come back. tanh keeps 61 above 60, and some of the gradient: at
twice the cap 7 % are left.

    Gemma 2     softcap of 50 on scores, of 30 on logits (2024, section 2)
    gpt-oss     clamp at 7 on two numbers that its MLPs multiply

On scores the cap comes before the mask. The mask gives minus infinity to each key that a query may
not see, and softmax makes a weight of 0 of it. A cap after the mask would make -cap of it, so that
the future would get some weight. With a cap of 5 it is 15 % in the example below.

    python step_05_keep-numbers-in-bounds.py

draws outputs/step_05.png. In step 01 attention uses softcap(). Shapes: C = d_model, V = vocab_size.
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

build = chapters.load_build(38)
DetailedConfig = build.DetailedConfig
GatedMLP = build.GatedMLP  # down_proj(silu(gate_proj(x)) * up_proj(x)): SwiGLU; in step 12

# ---------------------------------------------------------------- the idea


def softcap(x: torch.Tensor, cap: float | None) -> torch.Tensor:
    """cap · tanh(x / cap): small numbers stay as they are, none is larger than cap (Gemma 2)."""
    if cap is None:
        return x
    return cap * torch.tanh(x / cap)


class Head(nn.Linear):
    """The matrix that makes logits, and what is done to them."""

    def __init__(self, cfg: DetailedConfig, vocab_size: int):
        super().__init__(cfg.d_model, vocab_size, bias=False)
        self.logit_scale = cfg.logit_scale  # 1 in most models; step 16
        self.logit_cap = cfg.logit_cap

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., C) -> logits (..., V)."""
        return softcap(self.logit_scale * super().forward(x), self.logit_cap)


class ClampedMLP(GatedMLP):
    """SwiGLU whose two factors are clamped (gpt-oss).

    Two more things are gpt-oss's own: a slope in the sigmoid, and 1 added to the second factor.
    """

    limit = 7.0
    slope = 1.702  # gate · σ(1.702 gate) is nearly GELU (Hendrycks & Gimpel 2016, section 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate_proj(x).clamp(max=self.limit)  # far below 0 its factor is 0 in any case
        up = self.up_proj(x).clamp(-self.limit, self.limit)
        return self.down_proj(gate * torch.sigmoid(self.slope * gate) * (up + 1))


# ---------------------------------------------------------------- look at it


def clamp(x: torch.Tensor, cap: float) -> torch.Tensor:
    return x.clamp(-cap, cap)


def value_and_slope(function, x: torch.Tensor, cap: float) -> tuple[torch.Tensor, torch.Tensor]:
    """function(x, cap), and its gradient at each number of x."""
    x = x.clone().requires_grad_()
    y = function(x, cap)
    y.sum().backward()
    return y.detach(), x.grad


def draw_picture() -> Path:
    figure = figures.new_figure(8, 3.2)
    left, right = figure.subplots(1, 2)
    x = torch.linspace(-100, 100, 401)
    for function, colour in ((clamp, figures.COLOURS[0]), (softcap, figures.COLOURS[1])):
        y, slope = value_and_slope(function, x, 30)
        left.plot(x, y, color=colour, label=function.__name__)
        right.plot(x, slope, color=colour)
    figures.label(left, "what becomes of a number, cap 30", "number")
    figures.label(right, "gradient", "number")
    return figures.save(figure, __file__)


def main() -> int:
    console.say(f"picture: {draw_picture()}\n")
    bent, slope = value_and_slope(softcap, torch.tensor(60.0), 30)
    console.say(f"Look at 60, twice the cap: softcap makes {bent:.1f} of it and leaves {slope:.0%}")
    console.say("of the gradient; clamp makes 30 of it and leaves nothing of the gradient.")

    checks = Checks()
    checks.close("of 60: 30 tanh 2", bent, 30 * math.tanh(2), 1e-4)
    checks.close("its gradient", slope, 1 - math.tanh(2) ** 2, 1e-6)
    scores = torch.randn(64, generator=generator(1, "scores"))
    hidden = torch.arange(64) > 0  # the first of 64 positions may see itself alone
    right = softcap(scores, 5).masked_fill(hidden, -torch.inf).softmax(-1)
    wrong = softcap(scores.masked_fill(hidden, -torch.inf), 5).softmax(-1)
    checks.equal("future: cap, then mask", right[hidden].sum().item(), 0.0)
    checks.between("future: mask, then cap", wrong[hidden].sum().item(), 0.15, 0.16)
    mlp = ClampedMLP(DetailedConfig(d_model=24), d_hidden=35)
    mlp.down_proj = nn.Identity()  # to see the product itself
    x = 1e4 * torch.randn(9, 24, generator=generator(1, "x"))
    checks.close("huge inputs: 7 · (7 + 1)", mlp(x).max(), 56, 1e-3)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
