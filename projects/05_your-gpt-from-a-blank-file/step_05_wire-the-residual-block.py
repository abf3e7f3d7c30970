"""Step 05: wire the residual block.

Steps 03 and 04 built the two parts. A block adds each one's output to its own input instead of passing it on:
x + attention(norm(x)), then x + MLP(norm(x)). The sum is a stream that runs through the whole model; the parts read
it through a norm and write small changes to it. With silent parts the block is the identity, and so is its gradient.

It leaves out the embedding before the first block and the head behind the last.

    python step_05_wire-the-residual-block.py

It checks the block against torch's nn.TransformerEncoderLayer, forward and backward, and shows what is left of a
signal after 24 blocks with the sums and without. About 2 seconds.
"""

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
CausalSelfAttention = step_03.CausalSelfAttention
MLP = chapters.load_step(5, 4).MLP


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


class BlockWithoutSums(Block):
    """The same parts one behind the other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.norm2(self.attn(self.norm1(x))))


def torch_block(block: Block, cfg: GPTConfig) -> nn.TransformerEncoderLayer:
    """torch's layer of the same shape that holds the same Parameters, in the pre-norm order of the same formula."""
    layer = nn.TransformerEncoderLayer(
        cfg.d_model, cfg.n_heads, 4 * cfg.d_model, 0.0, "gelu", 1e-5, batch_first=True, norm_first=True
    )
    layer.self_attn.in_proj_weight, layer.self_attn.in_proj_bias = block.attn.qkv.weight, block.attn.qkv.bias
    layer.self_attn.out_proj = block.attn.proj
    layer.linear1, layer.linear2 = block.mlp.fc, block.mlp.proj
    layer.norm1, layer.norm2 = block.norm1, block.norm2
    return layer


def main() -> int:
    checks = Checks()
    B, T, cfg = 2, 7, GPTConfig(block_size=9, n_heads=3, d_model=12)
    noise = generator(1, "step 05")
    block = Block(cfg).double()
    for p in block.parameters():
        nn.init.normal_(p, std=0.5, generator=noise)
    x, upstream = (torch.randn(B, T, 12, dtype=torch.float64, generator=noise) for _ in range(2))
    x.requires_grad_()

    reference = torch_block(block, cfg)(x, src_mask=torch.ones(T, T, dtype=torch.bool).triu(1))
    checks.close("the block against nn.TransformerEncoderLayer", block(x), reference, 1e-12)
    parameters = (x, *block.parameters())
    ours, theirs = (torch.autograd.grad(y, parameters, upstream) for y in (block(x), reference))
    worst = max(range(len(ours)), key=lambda i: (ours[i] - theirs[i]).abs().max())
    checks.close(f"  all {len(ours)} gradients, the furthest off", ours[worst], theirs[worst], 1e-11)

    for part in block.modules():
        if isinstance(part, ResidualWriter):
            nn.init.zeros_(part.weight)
            nn.init.zeros_(part.bias)
    checks.equal("with silent writers the block hands x on", block(x), x)
    checks.equal("  and its gradient with it", torch.autograd.grad(block(x), x, upstream)[0], upstream)

    console.say("A signal through 24 fresh blocks, every matrix N(0, 0.02²), width 64, and a unit gradient back:")
    kept = {}
    for kind in (Block, BlockWithoutSums):
        stack = nn.Sequential(*(kind(GPTConfig()) for _ in range(24))).double()
        for name, p in stack.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02, generator=noise)
            elif name.endswith("bias"):
                nn.init.zeros_(p)
        signal = torch.randn(3, 11, 64, dtype=torch.float64, generator=noise).requires_grad_()
        out = stack(signal)
        back = torch.autograd.grad(out, signal, torch.randn(out.shape, dtype=torch.float64, generator=noise))[0]
        likeness = F.cosine_similarity(out, signal, dim=-1).mean().item()
        kept[kind] = likeness, back.square().mean().sqrt().item()
        console.say(
            f"  {kind.__name__:17} likeness of output to input {likeness:+.2f}, gradient RMS {kept[kind][1]:.2f}"
        )
    checks.between("with sums: likeness (cosine) after 24 blocks", kept[Block][0], 0.8, 1.0)
    checks.between("  RMS of the gradient that arrives (1 was sent)", kept[Block][1], 0.8, 1.25)
    checks.between("without sums: likeness", kept[BlockWithoutSums][0], -0.2, 0.2)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
