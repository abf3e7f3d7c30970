"""Step 01: write attention out.

Up to chapter 37 the middle of attention was one call of torch's, scaled_dot_product_attention(). It
is fast and closed: there is no place in it for a softcap or a sink. So here the formula is written
out in four methods. Each of today's attentions overrides one of them, and leaves the others:

    project()    makes queries, keys and values of x
    heads()      calls project(), and turns queries and keys (RoPE)
    weigh()      makes weights that sum to 1 of scores
    mix()        makes scores, cap (step 05), mask (step 04), weights by weigh(), and the output

The price: all scores are held at once. For 32,768 tokens that is 4.3 GB in each head.

    python step_01_write-attention-out.py

prints which of today's attentions overrides what. Shapes: B batch, T positions, C = d_model,
H query heads, G key and value heads, D = head_dim.
"""

import math
import sys
from pathlib import Path

import torch
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console
from shared.checks import Checks
from shared.randomness import generator

gpt = chapters.load_build(5)
modern = chapters.load_build(7)
build = chapters.load_build(38)
DetailedConfig = build.DetailedConfig  # chapter 37's config, and a field for each detail
rope_tables = build.rope_tables  # step 08
softcap = build.softcap  # step 05
visible = build.visible  # step 04

# ---------------------------------------------------------------- the idea


class GroupedAttention(gpt.CausalSelfAttention):
    """Chapter 37's grouped attention with its formula written out."""

    def __init__(self, cfg: DetailedConfig):
        super().__init__(cfg)
        self.cfg = cfg
        self.n_kv_heads = cfg.n_kv_heads
        self.head_dim = cfg.head_dim
        self.score_scale = cfg.score_scale or cfg.head_dim**-0.5
        if cfg.rope_scaling is not None:
            self.score_scale *= cfg.rope_scaling.score_factor  # for long texts: step 09
        n_all = cfg.n_heads + 2 * cfg.n_kv_heads  # heads: of queries, then keys, then values
        self.qkv = nn.Linear(cfg.d_model, n_all * cfg.head_dim, bias=cfg.bias or cfg.qkv_bias)
        self.proj = gpt.ResidualWriter(cfg.n_heads * cfg.head_dim, cfg.d_model, bias=cfg.bias)
        self.n_turned = cfg.n_turned
        self.cos = None  # plain tensors, as in chapter 07: model.bfloat16() must not round them
        self.sin = None

    @property
    def n_cached(self) -> int:
        """How many numbers a cache keeps of one token: its keys and values. Step 11 has fewer."""
        return 2 * self.n_kv_heads * self.head_dim

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x (B, T, C) -> queries (B, H, T, D), keys and values (B, G, T, D), not yet turned."""
        B, T, _ = x.shape
        H = self.n_heads
        G = self.n_kv_heads
        qkv = self.qkv(x).view(B, T, H + 2 * G, self.head_dim).transpose(1, 2)
        return qkv.split([H, G, G], dim=1)

    def tables(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """RoPE's cos and sin, made at the first call, on the device of x, in float32 or better."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        if self.cos is None or self.cos.device != x.device or self.cos.dtype != dtype:
            cos, sin = rope_tables(self.cfg, self.n_turned)
            self.cos = cos.to(dtype).to(x.device)
            self.sin = sin.to(dtype).to(x.device)
        return self.cos, self.sin

    def turn(self, x: torch.Tensor, start: int) -> torch.Tensor:
        """RoPE on the first n_turned channels of x (..., T, D); x[..., 0, :] stands at `start`."""
        if self.cfg.position_type != "rope":
            return x
        cos, sin = self.tables(x)
        turned = modern.apply_rope(x[..., : self.n_turned], cos[start:], sin[start:])
        return torch.cat((turned, x[..., self.n_turned :]), dim=-1)

    def heads(
        self, x: torch.Tensor, start: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x (B, T, C), whose first position is `start` -> queries, keys and values to be mixed."""
        q, k, v = self.project(x)
        return self.turn(q, start), self.turn(k, start), v

    def weigh(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores (B, H, T, keys), minus infinity where hidden -> weights of sum 1."""
        return scores.softmax(-1)

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Heads -> (B, T, C). With a cache, there are older keys before those of the T queries."""
        shared_by = q.shape[1] // k.shape[1]  # query heads to a key head: H / G
        k = k.repeat_interleave(shared_by, dim=1)  # (B, H, keys, D)
        v = v.repeat_interleave(shared_by, dim=1)
        scores = softcap(q @ k.mT * self.score_scale, self.cfg.score_cap)  # (B, H, T, keys)
        # The cap comes first. After the mask it would make -cap of minus infinity.
        seen = visible(q.shape[2], k.shape[2], self.cfg.window, q.device)
        scores = scores.masked_fill(~seen, -math.inf)
        y = self.weigh(scores) @ v
        return self.proj(y.transpose(1, 2).flatten(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, T, C) -> (B, T, C)."""
        q, k, v = self.heads(x)
        return self.mix(q, k, v)


# ---------------------------------------------------------------- look at it


def main() -> int:
    rows = []
    for name, kind in build.ATTENTIONS.items():
        own = [method for method in ("project", "heads", "weigh", "mix") if method in vars(kind)]
        rows.append([name, ", ".join(own)])
    console.say(console.Table(["attention", "methods of its own"], rows))
    console.say("\nLook at the rows below the first: each overrides one method, and none mix().")

    cfg = DetailedConfig(block_size=11, n_heads=6, n_kv_heads=3, d_model=30, d_head=8, window=4)
    attention = GroupedAttention(cfg)
    for name, p in attention.named_parameters():
        nn.init.normal_(p, std=0.3, generator=generator(1, name))
    x = torch.randn(2, 9, 30, generator=generator(1, "x"))
    q, k, v = attention.heads(x)
    checks = Checks()
    window = torch.ones(9, 9, dtype=torch.bool).tril().triu(-3)  # each sees itself and 3 before it
    y = nn.functional.scaled_dot_product_attention(q, k, v, window, enable_gqa=True)
    y = attention.proj(y.transpose(1, 2).flatten(2))
    checks.close("torch's call, window 4", attention(x), y, 1e-5)
    last = attention.mix(q[:, :, 8:], k, v)
    checks.close("the last query alone", last, attention(x)[:, 8:], 1e-5)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
