"""Step 03: a norm before each half, after it, or both?

A block has two halves, attention and MLP. Each reads the residual stream, which is a vector for
each token, and adds to it. Where do the norms stand?

    before    x = x + half(norm(x))          Llama, Mistral, Qwen
    after     x = x + norm(half(x))          OLMo 2 (2025), from Swin v2 (Liu et al. 2021)
    both      x = x + norm(half(norm(x)))    Gemma 2 (2024) and 3

With the norm before, a half reads vectors of a known length and adds vectors of any length. If
matrices grow in training, the first layers may add so much that later ones hardly count. With the
norm after, a half adds vectors of a known length: RMSNorm brings them to a root mean square (RMS)
of 1, times a gain. L layers add 2L of them. If these have nothing to do with each other, their
squares add up, and a stream that starts with an RMS of 1 ends with √(1 + 2L): with 7 after 24
layers, whatever the matrices do. But then a half reads the stream as long as it is. So that scores
don't grow with it, OLMo 2 normalizes queries and keys (step 02). Both norms fix both lengths.

In the first transformer a norm came last, too: x = norm(x + half(x)) (chapter 07, step 13). It
stood on the stream, so each layer made smaller what all earlier ones had written. The three above
leave the stream alone: what a layer writes stays as it is up to the last layer.

    python step_03_norm-before-after-or-both.py

draws outputs/step_03.png. Shapes: B batch, T positions, C = d_model, L layers.
"""

import sys
from pathlib import Path

import torch
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console, figures
from shared.checks import Checks
from shared.randomness import generator

modern = chapters.load_build(7)
build = chapters.load_build(38)
DetailedConfig = build.DetailedConfig
ATTENTIONS = build.ATTENTIONS
ROUTERS = build.ROUTERS
PlainMLP = build.PlainMLP
make_gated_mlp = build.make_gated_mlp
make_norm = build.make_norm

# ---------------------------------------------------------------- the idea


class Block(modern.ModernBlock):
    """The norm before each half: only copies of the stream meet a norm."""

    def __init__(self, cfg: DetailedConfig):
        super().__init__(cfg)  # norm1, attn, norm2 and mlp, by the methods below
        self.residual_scale = cfg.residual_scale

    def make_norm(self, cfg: DetailedConfig) -> nn.Module:
        return make_norm(cfg, cfg.d_model)

    def make_attention(self, cfg: DetailedConfig) -> nn.Module:
        return ATTENTIONS[cfg.attention](cfg)

    def make_mlp(self, cfg: DetailedConfig) -> nn.Module:
        if cfg.mlp_type == "moe":
            return ROUTERS[cfg.router](cfg)
        if cfg.mlp_type == "swiglu":
            return make_gated_mlp(cfg)
        return PlainMLP(cfg)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, T, C) -> (B, T, C). The factor is 1 in all models but Granite."""
        x = x + self.residual_scale * self.attn(self.norm1(x))
        x = x + self.residual_scale * self.mlp(self.norm2(x))
        return x


class NormAfterBlock(Block):
    """The norm after each half, before the + (OLMo 2): each half adds a known length."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.residual_scale * self.norm1(self.attn(x))
        x = x + self.residual_scale * self.norm2(self.mlp(x))
        return x


class NormBothBlock(Block):
    """A norm before and a norm after each half (Gemma 2)."""

    def __init__(self, cfg: DetailedConfig):
        super().__init__(cfg)
        self.after1 = self.make_norm(cfg)
        self.after2 = self.make_norm(cfg)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.residual_scale * self.after1(self.attn(self.norm1(x)))
        x = x + self.residual_scale * self.after2(self.mlp(self.norm2(x)))
        return x


# ---------------------------------------------------------------- look at it

PLACES = {"before": Block, "after": NormAfterBlock, "both": NormBothBlock}
CFG = DetailedConfig(block_size=32, n_heads=6, n_kv_heads=3, d_model=48, d_hidden=70)


@torch.no_grad()
def lengths(block_class: type, factor: float, n_layers: int = 24) -> list[float]:
    """The stream's RMS before layer 1 and after each layer; random matrices times `factor`."""
    x = torch.randn(1, 32, 48, generator=generator(1, "x"))
    found = [x.square().mean().sqrt().item()]
    for layer in range(n_layers):
        block = block_class(CFG)
        for name, p in block.named_parameters():
            if p.dim() == 2:
                start = factor * p.shape[1] ** -0.5  # times 1: as long a vector out as in
                nn.init.normal_(p, std=start, generator=generator(1, layer, name))
        x = block(x)
        found.append(x.square().mean().sqrt().item())
    return found


def draw_picture(found: dict[tuple[str, int], list[float]]) -> Path:
    figure = figures.new_figure(8, 3.2)
    left, right = figure.subplots(1, 2, sharey=True)
    for place, colour in zip(PLACES, figures.COLOURS):
        left.semilogy(found[place, 1], color=colour, label=place)
        right.semilogy(found[place, 3], color=colour)
    figures.label(left, "RMS of the stream", "layers")
    figures.label(right, "matrices three times as large", "layers")
    return figures.save(figure, __file__)


def main() -> int:
    found = {(place, f): lengths(PLACES[place], f) for place in PLACES for f in (1, 3)}
    console.say(f"picture: {draw_picture(found)}\n")
    console.say("Look at the right ends: with matrices three times as large the stream gets to")
    console.say(f"{found['before', 3][-1]:.0f} with the norm before, and to 7 with a norm after.")

    checks = Checks()
    nothing = lengths(NormAfterBlock, 0)  # all matrices 0: no half adds anything
    checks.close("after, matrices of 0: the stream stays", nothing[-1], nothing[0], 1e-6)
    checks.close("after, 24 layers: √49", found["after", 1][-1], 7, 0.3)
    checks.close("after, larger matrices: √49", found["after", 3][-1], 7, 0.3)
    checks.close("both, larger matrices: √49", found["both", 3][-1], 7, 0.3)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
