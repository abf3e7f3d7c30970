"""Step 03: share the key and value heads.

Our attention gives every query head its own key and value head. The real model has nine query heads and three key and
value heads: three queries read each pair, and what must be kept for a long text is a third. Chapter 07's attention
becomes that by overriding `heads`. Left out: keeping it, which is step 06.

    python step_03_share-the-key-value-heads.py     (about 3 seconds)

It prints what sharing saves, and holds the attention to torch's own and to chapter 07's.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli
from shared.checks import Checks
from shared.console import Table, say
from shared.randomness import generator

gpt, modern = chapters.load_build(5), chapters.load_build(7)


@dataclass(frozen=True)
class GroupedConfig(modern.ModernConfig):
    """Chapter 07's config with the parts that Llama models have, and how many heads the keys and values share."""

    bias: bool = False
    position_type: str = "rope"
    n_kv_heads: int = 2

    def __post_init__(self):
        super().__post_init__()
        if self.n_kv_heads < 1 or self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads {self.n_heads} is not divisible by n_kv_heads {self.n_kv_heads}")


class GroupedQueryAttention(modern.RotaryAttention):
    """Neighbouring query heads share one key and one value head (Ainslie et al. 2023). Shapes: G = n_kv_heads."""

    def __init__(self, cfg: GroupedConfig):
        super().__init__(cfg)
        self.n_kv_heads = cfg.n_kv_heads
        self.qkv = nn.Linear(cfg.d_model, (cfg.n_heads + 2 * cfg.n_kv_heads) * cfg.head_dim, bias=cfg.bias)

    def shared_heads(self, x: torch.Tensor, start: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x (B, T, C), whose first position is `start` -> queries (B, H, T, D), keys and values (B, G, T, D)."""
        B, T, _ = x.shape
        H, G = self.n_heads, self.n_kv_heads
        qkv = self.qkv(x).view(B, T, H + 2 * G, self.head_dim).transpose(1, 2)
        turned = self.turn(qkv[:, : H + G], start)  # queries and keys together
        return turned[:, :H], turned[:, H:], qkv[:, H + G :]

    def turn(self, x: torch.Tensor, start: int) -> torch.Tensor:
        """RoPE on heads (B, heads, T, D) whose first position is `start`."""
        return modern.apply_rope(x, self.cos[start:], self.sin[start:])

    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x (B, T, C) -> queries, keys, values, each (B, H, T, D)."""
        q, k, v = self.shared_heads(x)
        group = self.n_heads // self.n_kv_heads
        # Each head `group` times in a row: k0 k0 k0 k1 k1 k1. Tiling them, k0 k1 k0 k1, would mix up who reads whom.
        return q, k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)


def attend(q, k, v) -> torch.Tensor:
    """The rest of attention, before the output matrix: (B, H, T, D) three times -> (B, T, H · D)."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def filled(module: nn.Module, seed: int) -> nn.Module:
    for name, p in module.named_parameters():
        nn.init.normal_(p, std=0.3, generator=generator(seed, name, tuple(p.shape)))
    return module


def main() -> int:
    checks, B, T = Checks(), 2, 7
    cfg = GroupedConfig(block_size=11, n_heads=6, n_kv_heads=3, d_model=24)
    x = torch.randn(B, T, cfg.d_model, generator=generator(1, "x"))
    ours = filled(GroupedQueryAttention(cfg), 1)

    q, k, v = ours.shared_heads(x)
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)  # torch's own sharing
    checks.close("output against torch's enable_gqa", ours(x), ours.proj(theirs.transpose(1, 2).flatten(2)), 1e-5)
    tiled = attend(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))
    gap = (tiled - attend(*ours.heads(x))).abs().max().item()
    checks.between("tiling the heads is something else, off by", gap, 0.1, 10)

    # An attention with all its heads, where the heads of a group happen to have the same key and value matrices.
    full = filled(modern.RotaryAttention(cfg), 2)
    matrices = ours.qkv.weight.view(12, cfg.head_dim, cfg.d_model).split([6, 3, 3])
    repeated = [matrices[0], *(m.repeat_interleave(2, dim=0) for m in matrices[1:])]
    full.load_state_dict({"qkv.weight": torch.cat(repeated).flatten(0, 1), "proj.weight": ours.proj.weight})
    checks.close("output against full attention, heads repeated", ours(x), full(x), 1e-5)

    alone = GroupedQueryAttention(GroupedConfig(block_size=11, n_heads=6, n_kv_heads=6, d_model=24))
    alone.load_state_dict(filled(full, 3).state_dict())
    checks.equal("groups of one: chapter 07's attention", alone(x), full(x))
    alone(x).square().sum().backward()
    full(x).square().sum().backward()
    checks.close("and its gradient", alone.qkv.weight.grad, full.qkv.weight.grad, 1e-4)

    x.requires_grad_()
    (reaches,) = torch.autograd.grad(ours(x)[:, 3].sum(), x)
    checks.equal(
        "position 3 reads its past and itself", reaches.abs().sum((0, 2)).gt(0).tolist(), [True] * 4 + [False] * 3
    )
    checks.raises(
        "heads that don't divide", ValueError, ["6", "4"], lambda: GroupedConfig(n_heads=6, d_model=24, n_kv_heads=4)
    )

    kept = [["all nine heads", 9], ["three heads", 3]]
    rows = [[what, f"{2 * G * 64 * 4 * 30:,}", f"{(9 + 2 * G) * 64 * 576:,}"] for what, G in kept]
    say("The real model (d_model 576, 9 query heads of 64, 30 layers, float32):")
    say(Table(["keys and values", "bytes kept a token", "numbers in one layer's qkv"], rows))
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
