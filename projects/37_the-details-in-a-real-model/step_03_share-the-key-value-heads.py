"""Step 03: share the key and value heads.

In chapter 05 every query head has a key head and a value head of its own. When a model writes, it
keeps the keys and values of all past tokens (step 06 does). With nine heads of each, a text of
8,192 tokens would need 1.13 GB for them, twice what the model itself takes. So the real model has
nine query heads, but only three key heads and three value heads. Three neighbours share one:

    query head   0  1  2  3  4  5  6  7  8
    reads key    0  0  0  1  1  1  2  2  2

Each query head still looks for something of its own. Only what they look at is shared. In chapter
07's attention little changes: qkv makes fewer heads, and torch is told to share (enable_gqa). Two
parameters, start and mask, are for step 06, which reads a text in pieces.

    python step_03_share-the-key-value-heads.py

draws outputs/step_03.png. Shapes: B batch, T positions, C = d_model, H query heads, G key and
value heads, D = head_dim.
"""

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

modern = chapters.load_build(7)
real = chapters.load_build(37)  # the finished chapter: what is not on this page
GroupedConfig = real.GroupedConfig  # chapter 07's, and n_kv_heads; in step 12

# ---------------------------------------------------------------- the idea


class GroupedQueryAttention(modern.RotaryAttention):
    """Neighbouring query heads share one key and one value head (Ainslie et al. 2023)."""

    def __init__(self, cfg: GroupedConfig):
        super().__init__(cfg)
        self.n_kv_heads = cfg.n_kv_heads
        n_all = cfg.n_heads + 2 * cfg.n_kv_heads  # query, key and value heads together
        self.qkv = nn.Linear(cfg.d_model, n_all * cfg.head_dim, bias=cfg.bias)

    def heads(
        self, x: torch.Tensor, start: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x (B, T, C), first position `start` -> q (B, H, T, D), k and v (B, G, T, D)."""
        B, T, _ = x.shape
        H = self.n_heads
        G = self.n_kv_heads
        qkv = self.qkv(x).view(B, T, H + 2 * G, self.head_dim).transpose(1, 2)
        q, k, v = qkv.split([H, G, G], dim=1)
        return self.turn(q, start), self.turn(k, start), v

    def turn(self, x: torch.Tensor, start: int) -> torch.Tensor:
        """RoPE on heads (B, heads, T, D) whose first position is `start`: chapter 07's tables."""
        cos, sin = self.tables(x.device)
        return modern.apply_rope(x, cos[start:], sin[start:])  # it takes the first T rows of these

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, T, C) -> (B, T, C)."""
        q, k, v = self.heads(x)
        return self.mix(q, k, v, is_causal=True)

    def mix(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None = None,
        is_causal: bool = False,
    ) -> torch.Tensor:
        """Heads -> (B, T, C): what each query takes from the values, and the output matrix."""
        # enable_gqa: query head h reads key head h // (H / G). With H = 6, G = 2: 0 0 0 1 1 1.
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, enable_gqa=True)
        return self.proj(y.transpose(1, 2).flatten(2))


# ---------------------------------------------------------------- look at it


def draw_picture() -> Path:
    """Which query head reads which key head: without sharing, and with it."""
    figure = figures.new_figure(10, 2.4)
    for axes, n_keys in zip(figure.subplots(1, 2), (9, 3)):
        group = 9 // n_keys
        for head in range(9):
            key = head // group
            middle = group * key + (group - 1) / 2  # the key is drawn under its group's middle
            colour = figures.COLOURS[key % 6]
            axes.plot((head, middle), (1, 0), "o-", color=colour, markersize=12)
        axes.set(title=f"9 query heads, {n_keys} key heads", ylim=(-0.3, 1.3), xticks=[])
        axes.set_yticks([0, 1], ["keys", "queries"])
    return figures.save(figure, __file__)


def main() -> int:
    rows = []
    for n_keys in (9, 3):
        kept = 2 * n_keys * 64 * 4 * 30  # keys and values, 64 channels, 4 bytes, 30 layers
        rows.append([str(n_keys), f"{kept:,}", f"{8192 * kept / 1e9:.2f} GB"])
    say(Table(["key heads", "bytes a token", "for 8,192 tokens"], rows))
    draw_picture()
    say("\nThe last row is the real model: a third has to be kept.")
    say("Who reads whom: outputs/step_03.png")

    checks = Checks()
    cfg = GroupedConfig(block_size=11, n_heads=6, n_kv_heads=3, d_model=24)
    attention = GroupedQueryAttention(cfg)
    for matrix in (attention.qkv, attention.proj):
        nn.init.normal_(matrix.weight, std=0.3, generator=generator(1, "weights"))
    x = torch.randn(2, 7, cfg.d_model, generator=generator(1, "x"))
    q, k, v = attention.heads(x)  # six query heads, three key heads
    k_copied = k.repeat_interleave(2, dim=1)  # six key heads: 0 0 1 1 2 2
    v_copied = v.repeat_interleave(2, dim=1)
    copied = attention.mix(q, k_copied, v_copied, is_causal=True)
    checks.close("the same with copied heads", attention(x), copied, 1e-5)
    checks.equal("key heads kept", k.shape[1], 3)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
