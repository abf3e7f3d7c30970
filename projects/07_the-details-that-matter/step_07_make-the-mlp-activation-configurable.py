"""Step 07: make the MLP's activation configurable.

Step 06's functions get their matrices: one MLP for "gelu" and "relu2", and SwiGLU, which has three matrices where
they have two. A comparison is fair at equal size only, so SwiGLU is narrower inside: the 8/3 rule.

    python step_07_make-the-mlp-activation-configurable.py

prints what the rule gives at several widths, with the mismatch wherever there is one, and the checks; about three
seconds. It trains nothing: build.py does, under two initializations, since the verdict on SwiGLU may depend on that.

Shapes: C = d_model; an MLP works on the last axis, so any (..., C) will do.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console
from shared.checks import Checks
from shared.randomness import generator

gpt = chapters.load_build(5)
step_06 = chapters.load_step(7, 6)

def relu2(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0)² (So et al. 2021)."""
    return F.relu(x).square()


ACTIVATIONS = {"gelu": F.gelu, "relu2": relu2}  # of the plain MLP; a new one is one more entry
DENSE_MLP_TYPES = (*ACTIVATIONS, "swiglu")


@dataclass(frozen=True)
class MLPConfig(gpt.GPTConfig):
    """Chapter 05's shape, and which MLP stands in it."""

    mlp_type: str = "swiglu"
    d_hidden: int | None = None  # width inside the MLP; None: 4C for gelu and relu2, 8/3 C for swiglu
    multiple_of: int = 1  # the 8/3 rule's result is rounded up to a multiple of this


def swiglu_hidden(d_model: int, multiple_of: int = 1) -> int:
    """The 8/3 rule: the width at which SwiGLU has as many weights as a plain MLP with 4C inside.

    3 · C · (8/3)C = 8C² = 2 · C · 4C. Rounded down, then up to a multiple of multiple_of.
    """
    hidden = 8 * d_model // 3
    return math.ceil(hidden / multiple_of) * multiple_of


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)), without biases (Shazeer 2020, eq. 6)."""

    def __init__(self, d_model: int, d_hidden: int | None = None):
        super().__init__()
        d_hidden = d_hidden or swiglu_hidden(d_model)
        self.gate_proj = nn.Linear(d_model, d_hidden, bias=False)
        self.up_proj = nn.Linear(d_model, d_hidden, bias=False)
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


def size_note(d_model: int, multiple_of: int) -> tuple[list[str], str | None]:
    """A row of the table, and a sentence wherever SwiGLU's weights and those of the plain MLP differ in number."""
    hidden = swiglu_hidden(d_model, multiple_of)
    swiglu, plain = 3 * d_model * hidden, 2 * d_model * 4 * d_model
    row = [str(d_model), str(multiple_of), str(hidden), f"{swiglu:,}", f"{plain:,}", f"{swiglu / plain:.5f}"]
    if swiglu == plain:
        return row, None
    return row, f"C = {d_model}, multiple of {multiple_of}: {swiglu - plain:+,} weights, {swiglu / plain - 1:+.2%}"


def check_swiglu(checks: Checks, shape: tuple[int, ...], d_hidden: int) -> None:
    """Output and all gradients against step 06's formulas, chained by hand in float64."""
    draw = generator(1, "step_07", shape)
    mlp = SwiGLU(shape[-1], d_hidden).double()
    for p in mlp.parameters():
        nn.init.normal_(p, std=0.5, generator=draw)
    x, dy = torch.randn(2, *shape, dtype=torch.float64, generator=draw)
    leaf = x.clone().requires_grad_()
    y = mlp(leaf)
    y.backward(dy)
    gate, up, down = (p.detach() for p in (mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight))
    h, in_gate, in_up = step_06.swiglu(x @ gate.T, x @ up.T)
    dgate, dup = (dy @ down) * in_gate, (dy @ down) * in_up
    x, dy, h, dgate, dup = (t.reshape(-1, t.shape[-1]) for t in (x, dy, h, dgate, dup))  # tokens in a row
    checks.close(f"SwiGLU {shape}: y", y.reshape(-1, shape[-1]), h @ down.T, 1e-12)
    checks.close(f"SwiGLU {shape}: dL/dx", leaf.grad.reshape(-1, shape[-1]), dgate @ gate + dup @ up, 1e-12)
    expected = {"gate_proj": dgate.T @ x, "up_proj": dup.T @ x, "down_proj": dy.T @ h}
    for name, reference in expected.items():
        checks.close(f"SwiGLU {shape}: dL/d{name}", mlp.get_submodule(name).weight.grad, reference, 1e-12)


def main() -> int:
    notes = [size_note(*pair) for pair in ((64, 1), (96, 1), (256, 1), (256, 64), (768, 1), (768, 256), (4096, 256))]
    headers = ["C", "multiple of", "hidden", "SwiGLU: 3 C hidden", "plain: 8 C²", "ratio"]
    console.say("Weights of an MLP, biases aside:")
    console.say()
    console.say(console.Table(headers, [row for row, _ in notes]))
    console.say("\nNot the same size:\n" + "\n".join(f"  {note}" for _, note in notes if note))
    checks = Checks()
    checks.equal("C = 768: 3 C hidden = 8 C²", gpt.count_parameters(SwiGLU(768)), 8 * 768**2)
    checks.equal("C = 256 in 64s: hidden", swiglu_hidden(256, 64), 704)
    check_swiglu(checks, (2, 3, 5), 7)
    check_swiglu(checks, (1, 4), 9)
    draw = generator(1, "step_07", "plain")
    x = torch.randn(3, 2, 12, generator=draw)
    for mlp_type in ("gelu", "relu2"):
        mlp = make_mlp(MLPConfig(d_model=12, n_heads=3, mlp_type=mlp_type, d_hidden=17))
        for p in mlp.parameters():
            nn.init.normal_(p, std=0.5, generator=draw)
        activation = {"gelu": step_06.gelu, "relu2": step_06.relu2_pair}[mlp_type]
        reference = F.linear(activation(F.linear(x, mlp.fc.weight, mlp.fc.bias))[0], mlp.proj.weight, mlp.proj.bias)
        checks.close(f"{mlp_type}, 12 -> 17 -> 12", mlp(x), reference, 1e-5)
    unknown = MLPConfig(mlp_type="gleu")
    checks.raises("an unknown name", ValueError, ["gleu", *DENSE_MLP_TYPES], lambda: make_mlp(unknown))
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
