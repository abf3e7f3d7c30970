"""Step 04: build the MLP.

Attention (step 03) moves vectors between positions; the MLP works on each position by itself: out to four times the
width, through GELU, and back. This is where most of a block's numbers are.

It leaves out SwiGLU and other activations: chapter 07 exchanges this part.

    python step_04_build-the-mlp.py

It checks the MLP against one put together from torch's layers, forward and backward, both forms of GELU against their
formulas, and counts parameters. About 2 seconds.
"""

import math
import sys
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console
from shared.checks import Checks
from shared.randomness import generator

step_03 = chapters.load_step(5, 3)
GPTConfig = step_03.GPTConfig
ResidualWriter = step_03.ResidualWriter


class MLP(nn.Module):
    """Two matrices with a GELU between them, four times as wide inside (Radford et al. 2019)."""

    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.fc = nn.Linear(cfg.d_model, 4 * cfg.d_model, bias=cfg.bias)
        self.proj = ResidualWriter(4 * cfg.d_model, cfg.d_model, bias=cfg.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., C) -> (..., C)."""
        return self.proj(F.gelu(self.fc(x)))


def gelu_by_hand(x: torch.Tensor) -> torch.Tensor:
    """x · Φ(x) with Φ, the normal distribution function, through the error function (Hendrycks & Gimpel 2016)."""
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def gelu_tanh_by_hand(x: torch.Tensor) -> torch.Tensor:
    """The tanh form of the same paper, which GPT-2 was trained with."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def main() -> int:
    checks = Checks()
    noise = generator(1, "step 04")
    x = torch.linspace(-6, 6, 24_001, dtype=torch.float64)
    gap = (gelu_tanh_by_hand(x) - gelu_by_hand(x)).abs()
    console.say(f"GELU's two forms differ most at |x| = {x[gap.argmax()].abs():.2f}, by {gap.max():.1e}.")
    checks.close("GELU by its formula, against F.gelu", gelu_by_hand(x), F.gelu(x), 1e-12)
    checks.close("the largest gap between its two forms", gap.max(), 4.7e-4, 1e-5)
    checks.close("its tanh form, against F.gelu", gelu_tanh_by_hand(x), F.gelu(x, approximate="tanh"), 1e-12)
    checks.close(
        "GELU(1) is the normal distribution function at 1",
        gelu_by_hand(torch.ones(())),
        torch.special.ndtr(torch.ones(())),
        1e-7,
    )

    for B, T, C in ((2, 5, 12), (3, 1, 8)):
        mlp = MLP(GPTConfig(n_heads=4, d_model=C)).double()
        for p in mlp.parameters():
            nn.init.normal_(p, std=0.7, generator=noise)
        plain = nn.Sequential(nn.Linear(C, 4 * C), nn.GELU(), nn.Linear(4 * C, C)).double()
        plain.load_state_dict(dict(zip(plain.state_dict(), mlp.state_dict().values())))
        x, upstream = (torch.randn(B, T, C, dtype=torch.float64, generator=noise) for _ in range(2))
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        y, reference = mlp(ours), plain(theirs)
        y.backward(upstream)
        reference.backward(upstream)
        checks.close(f"MLP on {(B, T, C)}, against torch's layers in a row", y, reference, 1e-12)
        checks.close("  gradient of x", ours.grad, theirs.grad, 1e-12)
        for (name, p), other in zip(mlp.named_parameters(), plain.parameters()):
            checks.close(f"  gradient of {name}", p.grad, other.grad, 1e-12)
        apart = torch.cat([mlp(x[:, t : t + 1]) for t in range(T)], dim=1)
        checks.close("  each position by itself", apart, y, 1e-12)

    C = 768
    counts = []
    for part in (step_03.CausalSelfAttention, MLP):
        with torch.device("meta"):  # shapes without memory
            counts.append(sum(p.numel() for p in part(GPTConfig(n_heads=12, d_model=C)).parameters()))
    attention, mlp = counts
    console.say(
        f"At width {C} attention holds {attention:,} numbers, the MLP {mlp:,}: {mlp / sum(counts):.1%} of both."
    )
    checks.equal("parameters of the MLP: 8C² + 5C", mlp, 8 * C * C + 5 * C)
    checks.close("the MLP's share is about two thirds", mlp / sum(counts), 2 / 3, 1e-3)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
