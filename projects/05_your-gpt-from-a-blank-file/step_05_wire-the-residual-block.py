"""Step 05: wire the residual block.

A block is attention (step 03) and then an MLP (step 04). It does not hand on what they compute: it
adds it to what came in.

    x = x + attention(norm(x))
    x = x + MLP(norm(x))

So a vector runs through the whole model, and each part reads it and adds something. This running
sum is called the residual stream. Why add? If both parts output 0, x comes out unchanged, and so
does the gradient on its way back. New parts have small weights and output little (step 08), so a
deep stack starts close to doing nothing and can be trained. Without the sums each block replaces
what came in: after the first, the stream no longer points the way of the input.

The norm is a LayerNorm: it brings the numbers of each position's vector to mean 0 and standard
deviation 1, so that a part reads numbers of the same size wherever in the stack it stands. Only
what a part reads is normalized ("pre-norm"), not the stream itself.

    python step_05_wire-the-residual-block.py

draws outputs/step_05.png: what is left of the input, block by block. tests/test_05_steps.py holds
the block to torch's own, nn.TransformerEncoderLayer, and measures the gradient.
"""

import sys
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console, figures
from shared.checks import Checks
from shared.randomness import generator

step_03 = chapters.load_step(5, 3)
GPTConfig = step_03.GPTConfig
ResidualWriter = step_03.ResidualWriter
CausalSelfAttention = step_03.CausalSelfAttention
MLP = chapters.load_step(5, 4).MLP

# ---------------------------------------------------------------- the idea


class Block(nn.Module):
    """A residual block with the norm before each part (pre-norm).

    Chapter 07 overrides the make_ methods to put other parts in.
    """

    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.norm1 = self.make_norm(cfg)
        self.attn = self.make_attention(cfg)
        self.norm2 = self.make_norm(cfg)
        self.mlp = self.make_mlp(cfg)

    def make_norm(self, cfg: GPTConfig) -> nn.Module:
        return nn.LayerNorm(cfg.d_model, eps=1e-5)

    def make_attention(self, cfg: GPTConfig) -> nn.Module:
        return CausalSelfAttention(cfg)

    def make_mlp(self, cfg: GPTConfig) -> nn.Module:
        return MLP(cfg)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, T, C) -> (B, T, C): the residual stream is these two lines."""
        x = x + self.attn(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x


# ---------------------------------------------------------------- look at it


class BlockWithoutSums(Block):
    """The same parts one after the other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attn(self.norm1(x))
        return self.mlp(self.norm2(x))


def untrained_blocks(block_class: type[Block], noise: torch.Generator) -> nn.ModuleList:
    """24 blocks with small weights, as in step 08."""
    blocks = nn.ModuleList(block_class(GPTConfig()) for _ in range(24))
    for name, p in blocks.named_parameters():
        if p.dim() == 2:
            nn.init.normal_(p, std=0.02, generator=noise)
        elif name.endswith("bias"):
            nn.init.zeros_(p)
    return blocks


@torch.no_grad()
def likeness_to_input(block_class: type[Block]) -> list[float]:
    """The cosine of the angle between stream and input, at the start and after each block."""
    noise = generator(1, "step 05")
    blocks = untrained_blocks(block_class, noise)
    start = torch.randn(3, 11, 64, generator=noise)
    x = start
    alike = [1.0]
    for block in blocks:
        x = block(x)
        alike.append(F.cosine_similarity(x, start, dim=-1).mean().item())
    return alike


def main() -> int:
    alike = likeness_to_input(Block)
    alike_without = likeness_to_input(BlockWithoutSums)
    figure = figures.new_figure(7, 3.2)
    axes = figure.subplots()
    axes.plot(alike, color=figures.COLOURS[0], label="with the sums")
    axes.plot(alike_without, color=figures.COLOURS[1], linestyle="--", label="without")
    figures.label(axes, "How like the input the stream still is", "after block", "likeness")
    figures.save(figure, __file__)
    console.say("The stream's likeness to the input (1: same direction, 0: right angle) after 24")
    without = abs(alike_without[-1])  # no minus sign in front of a 0.00
    console.say(f"untrained blocks is {alike[-1]:.2f} with the sums and {without:.2f} without.")
    console.say("Drawn to outputs/step_05.png: without sums, one block is enough to turn it away.")

    silent = Block(GPTConfig())
    for p in silent.parameters():
        nn.init.zeros_(p)
    x = torch.randn(2, 7, 64, generator=generator(1, "step 05", "checks"))
    checks = Checks()
    checks.equal("all weights 0: x comes out", silent(x), x)
    checks.between("24 blocks: likeness", alike[-1], 0.8, 1.0)
    checks.between("  without sums", alike_without[-1], -0.2, 0.2)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
