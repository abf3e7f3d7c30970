"""Step 16: turn it into experts. (Best read after step 08.)

Experts are MLPs side by side, of which a router picks a few for each token (chapter 07). A trained
model has one MLP in each layer. Its MLPs can become experts in two ways, and the model computes
what it did before:

- Copy the MLP eight times. Two experts answer for a token, and their gates sum to 1. A weighted
  mean of two equal answers is that answer, whatever an untrained router says.
- Cut the MLP into eight experts of 192 neurons each. Its last matrix adds up what 1,536 neurons
  say. So all eight experts together add up to the MLP.

Then we take each one step too far: gates that don't sum to 1, and only six of the eight experts,
those with the most to say. The loss tells the two kinds apart.

    python step_16_turn-it-into-experts.py

Training the experts further, so that they become different, is left out.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli
from shared.checks import Checks
from shared.console import say
from shared.randomness import generator

modern = chapters.load_build(7)
real = chapters.load_build(37)
step_08 = chapters.load_step(37, 8)  # twin(): a second model on the same numbers

# ---------------------------------------------------------------- the idea


def copies(model: nn.Module, moe: type[nn.Module] = modern.MoE) -> nn.Module:
    """Each MLP becomes eight copies of itself under an untrained router, two for each token."""
    model = step_08.twin(model)
    cfg = replace(model.cfg, n_experts=8, top_k=2, d_hidden=1)  # tiny: its experts are replaced
    for i, block in enumerate(model.blocks):
        experts = moe(cfg)
        experts.experts = nn.ModuleList([block.mlp] * 8)
        nn.init.normal_(experts.router.weight, std=0.02, generator=generator(1, "router", i))
        block.mlp = experts
    return model


class RawGates(modern.MoE):
    """Gates as the router's softmax gives them: two of eight don't sum to 1."""

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        probabilities = F.linear(x, self.router.weight).softmax(-1)  # (N, 8)
        gates, chosen = probabilities.topk(self.top_k)
        return gates, chosen


class CarvedMLP(modern.SwiGLU):
    """An MLP in eight parts; a token keeps the n_kept whose hidden vectors are longest."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.silu(self.gate_proj(x)) * self.up_proj(x)
        experts = hidden.unflatten(-1, (8, -1))  # (B, T, 8, 192)
        lengths = experts.norm(dim=-1)
        kept = lengths.topk(self.n_kept).indices  # (B, T, n_kept)
        mask = torch.zeros_like(lengths).scatter(-1, kept, 1)  # 1 for an expert that is kept
        answers = experts * mask[..., None]
        return self.down_proj(answers.flatten(-2))


def carve(model: nn.Module, n_kept: int) -> nn.Module:
    """Each MLP is cut into eight experts, of which a token keeps n_kept."""
    model = step_08.twin(model)
    for block in model.blocks:
        block.mlp.__class__ = CarvedMLP  # the same numbers, another forward
        block.mlp.n_kept = n_kept
    return model


# ---------------------------------------------------------------- look at it


@torch.no_grad()
def main() -> int:
    file = real.WeightsFile(real.packaged_weights())
    model = real.load_model(file)
    ids = torch.tensor(real.Tokenizer(file).encode(real.evaluation_text())[:65])
    moves = [
        ("copies of each MLP", copies(model), "raw gates", copies(model, RawGates)),
        ("each MLP cut in eight", carve(model, 8), "six kept", carve(model, 6)),
    ]
    checks = Checks()
    say(step_08.losses(model, ids, moves, checks))
    say("\nThe same: equal but for rounding. Gates that sum to less than 1 make each answer")
    say("too small. And nobody trained this model to do without some of its neurons.")
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
