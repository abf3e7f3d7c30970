"""Step 07: how wide must SwiGLU be, to be compared with a plain MLP?

A plain MLP has two matrices: from C channels up to 4C, through an activation, and back to C. SwiGLU
has three, since it needs a gate and an up. With 4C inside it would have 12 C² weights and not 8 C²,
and if the larger model wins, that shows nothing. So SwiGLU is made narrower, until both are equal:

    plain   2 matrices of C x 4C       2 · C · 4C    = 8 C²
    SwiGLU  3 matrices of C x 8C/3     3 · C · 8C/3  = 8 C²

This is the 8/3 rule. Where 8C/3 is no whole number, it is rounded down. Large models then round it
up to a multiple of 64 or 256, since GPUs multiply such shapes faster. So SwiGLU gets a bit more.

    python step_07_make-the-mlp-activation-configurable.py

draws outputs/step_07.png.

Shapes: C = d_model. An MLP works on the last axis, so x may be any (..., C).
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console, figures
from shared.checks import Checks

gpt = chapters.load_build(5)
step_06 = chapters.load_step(7, 6)
relu2 = step_06.relu2

# ---------------------------------------------------------------- the idea

# Activations of the plain MLP; a new one is one more entry. F.gelu is gelu of step 06.
ACTIVATIONS = {"gelu": F.gelu, "relu2": relu2}
DENSE_MLP_TYPES = (*ACTIVATIONS, "swiglu")


@dataclass(frozen=True)
class MLPConfig(gpt.GPTConfig):
    """Chapter 05's shape, and which MLP stands in it."""

    mlp_type: str = "swiglu"
    d_hidden: int | None = None  # width inside the MLP; None: 4C if plain, 8/3 C for SwiGLU
    multiple_of: int = 1  # the 8/3 rule's width is rounded up to a multiple of this


def swiglu_hidden(d_model: int, multiple_of: int = 1) -> int:
    """The 8/3 rule: 8C/3, rounded down, then up to a multiple of multiple_of."""
    hidden = 8 * d_model // 3
    return math.ceil(hidden / multiple_of) * multiple_of


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)), without biases (Shazeer 2020, eq. 6)."""

    def __init__(self, d_model: int, d_hidden: int | None = None):
        super().__init__()
        d_hidden = d_hidden or swiglu_hidden(d_model)
        self.gate_proj = nn.Linear(d_model, d_hidden, bias=False)
        self.up_proj = nn.Linear(d_model, d_hidden, bias=False)
        # A Linear of chapter 05's whose type tells init_parameters() to start it smaller, as it
        # writes into the residual stream.
        self.down_proj = gpt.ResidualWriter(d_hidden, d_model, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., C) -> (..., C)."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class ModernMLP(nn.Module):
    """Chapter 05's MLP with its activation by name, one of ACTIVATIONS."""

    def __init__(self, cfg: gpt.GPTConfig):
        super().__init__()
        d_hidden = cfg.d_hidden or 4 * cfg.d_model
        self.activation = ACTIVATIONS[cfg.mlp_type]
        self.fc = nn.Linear(cfg.d_model, d_hidden, bias=cfg.bias)
        self.proj = gpt.ResidualWriter(d_hidden, cfg.d_model, bias=cfg.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., C) -> (..., C)."""
        return self.proj(self.activation(self.fc(x)))


def make_mlp(cfg: gpt.GPTConfig) -> nn.Module:
    """The MLP called cfg.mlp_type. ValueError for a name not in DENSE_MLP_TYPES."""
    if cfg.mlp_type == "swiglu":
        d_hidden = cfg.d_hidden or swiglu_hidden(cfg.d_model, cfg.multiple_of)
        return SwiGLU(cfg.d_model, d_hidden)
    if cfg.mlp_type in ACTIVATIONS:
        return ModernMLP(cfg)
    raise ValueError(f"unknown mlp_type {cfg.mlp_type!r}; valid: {', '.join(DENSE_MLP_TYPES)}")


# ---------------------------------------------------------------- look at it


def draw_picture(d_model: int = 768) -> Path:
    """Each matrix as a box as wide as the MLP is inside; all are C high."""
    hidden = swiglu_hidden(d_model)
    figure = figures.new_figure(8, 2.6)
    axes = figure.subplots()
    plain = {"fc": 4 * d_model, "proj": 4 * d_model}
    swiglu = {"gate": hidden, "up": hidden, "down": hidden}
    figures.boxes_in_a_row(axes, plain, 1.0, figures.COLOURS[0])
    figures.boxes_in_a_row(axes, swiglu, 0.0, figures.COLOURS[1])
    axes.set_yticks((0, 1), ("SwiGLU", "plain MLP"))
    axes.set_xticks((0, 8 * d_model), ("0", f"8C = {8 * d_model:,}"))
    axes.spines[["top", "right", "left"]].set_visible(False)
    return figures.save(figure, __file__)


def main() -> int:
    rows = []
    for d_model, multiple_of in ((64, 1), (256, 1), (256, 64), (768, 1), (4096, 256)):
        hidden = swiglu_hidden(d_model, multiple_of)
        weights = 3 * d_model * hidden
        plain = 8 * d_model**2
        more = f"{weights / plain - 1:+.2%}"
        rows.append([str(d_model), str(multiple_of), str(hidden), f"{weights:,}", more])
    headers = ["C", "multiple of", "width inside", "SwiGLU's weights", "more than the plain MLP"]
    console.say(console.Table(headers, rows))
    console.say("\nLook at the last column: by the 8/3 rule alone both are of one size within")
    console.say("0.4 %. Rounding up to a multiple adds more, 3 % for C = 256 in 64s.")
    console.say(f"\npicture: {draw_picture()}")
    console.say("Two wide matrices and three narrow ones end at the same place.")

    checks = Checks()
    checks.equal("C = 768: 8 C² weights", gpt.count_parameters(SwiGLU(768)), 8 * 768**2)
    checks.equal("C = 256 in 64s: width", swiglu_hidden(256, 64), 704)
    torch.manual_seed(1)  # x and the weights below
    x = torch.randn(3, 2, 12)
    mlp = make_mlp(MLPConfig(d_model=12, n_heads=3, mlp_type="gelu"))
    reference = mlp.proj(step_06.gelu(mlp.fc(x)))
    checks.close("gelu: as step 06's gelu", mlp(x), reference, 1e-6)
    mlp = make_mlp(MLPConfig(d_model=12, n_heads=3, mlp_type="swiglu"))
    reference = mlp.down_proj(step_06.swiglu(mlp.gate_proj(x), mlp.up_proj(x)))
    checks.close("swiglu: as step 06's", mlp(x), reference, 1e-6)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
