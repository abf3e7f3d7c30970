"""Step 12: choose the curve of the MLP.

Between the matrices of an MLP stands a curve, its activation function (chapter 07, step 07).
Weights need the curve with which they were trained, and two curves may go by one name. GELU is
x · Φ(x), where Φ(x) is the probability that a Gaussian number is below x. GPT-2 and Gemma compute
it by a formula with tanh, which is off by 0.0005 at most. Rounding a number near 1 to bfloat16
costs up to 0.004. So whoever takes the exact GELU for GPT-2's weights won't notice, until logits
are compared.

So here the curve is a word in the config, and a table turns it into a function. In a plain MLP it
stands between the two matrices. In a gated one, down(curve(gate(x)) · up(x)), it makes the gate:
how much of each number of up(x) passes. With silu(x) = x / (1 + e^-x) that is SwiGLU (Llama and
many others), with GELU it is GEGLU (Gemma).

    python step_12_choose-the-curve-of-the-mlp.py

draws outputs/step_12.png.
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

gpt = chapters.load_build(5)
modern = chapters.load_build(7)
build = chapters.load_build(38)  # the finished chapter: what is not on this page
ClampedMLP = build.ClampedMLP  # gpt-oss's
DetailedConfig = build.DetailedConfig

# ---------------------------------------------------------------- the idea


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU by a formula with tanh (Hendrycks & Gimpel 2016, section 2): GPT-2's and Gemma's."""
    return F.gelu(x, approximate="tanh")


# Chapter 07's are GELU and ReLU², max(x, 0)² (nanochat's).
ACTIVATIONS = {**modern.ACTIVATIONS, "gelu_tanh": gelu_tanh, "silu": F.silu}


class PlainMLP(modern.ModernMLP):
    """Chapter 07's plain MLP with any of ACTIVATIONS."""

    def __init__(self, cfg: DetailedConfig):
        super().__init__(cfg)
        # In chapter 07's configs mlp_type, "gelu" or "relu2", names the curve of a plain MLP.
        self.activation = ACTIVATIONS[cfg.activation or cfg.mlp_type]


class GatedMLP(nn.Module):
    """down(activation(gate(x)) · up(x)) (Shazeer 2020, eq. 6): SwiGLU or GEGLU."""

    def __init__(self, cfg: DetailedConfig, d_hidden: int):
        super().__init__()
        self.activation = ACTIVATIONS[cfg.activation or "silu"]
        self.gate_proj = nn.Linear(cfg.d_model, d_hidden, bias=cfg.bias)
        self.up_proj = nn.Linear(cfg.d_model, d_hidden, bias=cfg.bias)
        self.down_proj = gpt.ResidualWriter(d_hidden, cfg.d_model, bias=cfg.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., C) -> (..., C)."""
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


GATED_MLPS = {"plain": GatedMLP, "clamped": ClampedMLP}  # plain: with a gate, but not clamped


def make_gated_mlp(cfg: DetailedConfig, times: int = 1) -> nn.Module:
    """The config's gated MLP, `times` as wide inside: some experts are wider (step 13)."""
    d_hidden = cfg.d_hidden or modern.swiglu_hidden(cfg.d_model, cfg.multiple_of)
    return GATED_MLPS[cfg.gated_mlp](cfg, times * d_hidden)


# ---------------------------------------------------------------- look at it


def draw_picture(x: torch.Tensor, apart: torch.Tensor) -> Path:
    figure = figures.new_figure(6, 3)
    axes = figure.subplots()
    axes.plot(x, apart)
    figures.label(axes, "GELU by tanh, minus GELU", "x")
    return figures.save(figure, __file__)


@torch.no_grad()
def main() -> int:
    x = torch.linspace(-4, 4, 801, dtype=torch.float64)
    apart = gelu_tanh(x) - F.gelu(x)
    console.say(f"picture: {draw_picture(x, apart)}")
    console.say(f"Look at the two peaks: there the two forms are {apart.max():.5f} apart.")

    checks = Checks()
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    checks.close("GELU by tanh, by hand", gelu_tanh(x), 0.5 * x * (1 + inner.tanh()), 1e-12)
    cfg = DetailedConfig(d_model=28, n_heads=2, d_hidden=11)
    ours = make_gated_mlp(cfg)
    for name, p in ours.named_parameters():
        nn.init.normal_(p, std=0.2, generator=generator(1, "step_12", name))
    swiglu = modern.SwiGLU(28, 11)
    swiglu.load_state_dict(ours.state_dict())
    tokens = torch.randn(5, 28, generator=generator(1, "step_12"))
    checks.close("chapter 07's SwiGLU", ours(tokens), swiglu(tokens), 1e-6)
    wide = make_gated_mlp(cfg, times=2)
    checks.equal("twice as wide inside", wide.up_proj.out_features, 22)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
