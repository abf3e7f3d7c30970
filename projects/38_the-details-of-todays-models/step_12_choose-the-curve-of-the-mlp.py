"""Step 12: choose the curve of the MLP.

Between the matrices of an MLP stands a curve, its activation function. Which model has which?

- GPT-2: GELU, x · Φ(x), where Φ(x) is the probability that a Gaussian number is below x. But not
  quite: it computes Φ by a formula with tanh, which is off by 0.0005 at most. Rounding a number
  near 1 to bfloat16 costs up to 0.004. So whoever takes the exact GELU for GPT-2's weights won't
  notice, until logits are compared.
- Llama, Mistral, Qwen, OLMo: a gated MLP, down(silu(gate(x)) · up(x)) with silu(x) = x · σ(x),
  where σ(x) = 1 / (1 + e^-x). Each number of up(x) passes as far as its gate is open. It is called
  SwiGLU (chapter 07, step 07).
- Gemma: gated as well, but the gate has GPT-2's curve: GEGLU.
- nanochat: no gate, and max(x, 0)² for the curve.

    python step_12_choose-the-curve-of-the-mlp.py

draws outputs/step_12.png. Shapes: C = d_model.
"""

import math
import sys
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, figures
from shared.checks import Checks
from shared.console import Table, say
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


ACTIVATIONS = {**modern.ACTIVATIONS, "gelu_tanh": gelu_tanh, "silu": F.silu}


class PlainMLP(modern.ModernMLP):
    """Chapter 07's plain MLP with any of ACTIVATIONS."""

    def __init__(self, cfg: DetailedConfig):
        super().__init__(cfg)
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


GATED_MLPS = {"plain": GatedMLP, "clamped": ClampedMLP}


def make_gated_mlp(cfg: DetailedConfig, times: int = 1) -> nn.Module:
    """The config's gated MLP, `times` as wide inside as it says."""
    d_hidden = cfg.d_hidden or modern.swiglu_hidden(cfg.d_model, cfg.multiple_of)
    return GATED_MLPS[cfg.gated_mlp](cfg, times * d_hidden)


# ---------------------------------------------------------------- look at it


def draw_picture(x: torch.Tensor) -> Path:
    """The curves, and how far the two forms of GELU are apart."""
    figure = figures.new_figure(8, 3)
    left, right = figure.subplots(1, 2)
    for name in ("gelu", "silu", "relu2"):
        left.plot(x, ACTIVATIONS[name](x), label=name)
    left.set_ylim(-0.5, 3)
    figures.label(left, "Three curves", "x")
    right.plot(x, gelu_tanh(x) - F.gelu(x))
    figures.label(right, "GELU by tanh, minus GELU", "x")
    return figures.save(figure, __file__)


@torch.no_grad()
def main() -> int:
    x = torch.linspace(-4, 4, 801, dtype=torch.float64)
    curves = {"with tanh": gelu_tanh(x), "x σ(1.702 x), gpt-oss": x * torch.sigmoid(1.702 * x)}
    curves["silu"] = F.silu(x)
    rows = [[name, f"{(y - F.gelu(x)).abs().max():.5f}"] for name, y in curves.items()]
    say(Table(["curve", "furthest from GELU"], rows))
    say("\nLook at the first two: both stand in for GELU in some model, and neither is GELU.")
    say(f"The picture is {draw_picture(x)}.")

    checks = Checks()
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    checks.close("GELU by tanh, by hand", gelu_tanh(x), 0.5 * x * (1 + inner.tanh()), 1e-12)
    cfg = DetailedConfig(d_model=28, n_heads=2, d_hidden=11)
    ours = make_gated_mlp(cfg)
    swiglu = modern.SwiGLU(28, 11)
    swiglu.load_state_dict(ours.state_dict())
    tokens = torch.randn(5, 28, generator=generator(1, "step_12"))
    checks.close("chapter 07's SwiGLU", ours(tokens), swiglu(tokens), 1e-6)
    wide = make_gated_mlp(cfg, times=2)
    checks.equal("twice as wide inside", wide.up_proj.out_features, 22)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
