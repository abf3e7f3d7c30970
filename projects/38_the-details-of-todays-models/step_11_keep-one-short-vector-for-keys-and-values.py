"""Step 11: keep one short vector for keys and values.

A model that writes keeps the keys and values of all past tokens: its cache. Grouped heads (chapter
37, step 03) make it smaller by having fewer heads of keys and values. Latent attention (DeepSeek-V2
and V3) keeps one short vector for each token instead, the latent. In DeepSeek-V3 it has 512
numbers. A matrix U makes of them the keys and values of all 128 heads, each of 128 channels.

Must all past keys be made again for each new token? No. A score is query · (U latent), and that is
the same number as (Uᵀ query) · latent. So the new query goes through Uᵀ, once, and then reads the
latents as they lie in the cache. No key is ever made.

But RoPE turns a key by an angle that depends on its position, and a score would be
query · turn(U latent). Then the query would have to go through another matrix for each past
position. So a head has channels of two sorts. Content is made of the latent and never turned.
Position is turned, and made of the token directly: one key of 64 channels for all heads, which the
cache keeps beside the latent. Together these are 576 numbers. Two ordinary heads have two keys and
two values of 128 channels: 512 numbers, hardly less.

    python step_11_keep-one-short-vector-for-keys-and-values.py

Shapes: B batch, T positions, C = d_model, H heads, D = head_dim.
"""

import sys
from pathlib import Path

import torch
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli
from shared.checks import Checks
from shared.console import Table, say
from shared.randomness import generator

gpt = chapters.load_build(5)  # its ResidualWriter is a Linear
build = chapters.load_build(38)  # the finished chapter: what is not on this page
DetailedConfig = build.DetailedConfig
GroupedAttention = build.GroupedAttention
make_norm = build.make_norm
V3 = build.PUBLISHED["deepseek-v3"].shape
LATENT = {"attention": "latent", "q_rank": 11, "kv_rank": 8, "d_rope": 6, "d_value": 5}
# ---------------------------------------------------------------- the idea


class LatentAttention(GroupedAttention):
    """Keys and values made of one short vector per token (DeepSeek-V2, eqs. 9 to 19)."""

    def __init__(self, cfg: DetailedConfig):
        super().__init__(cfg)
        self.d_content = cfg.head_dim - cfg.d_rope
        del self.qkv  # these take its place; queries, too, are made of a short vector
        self.q_down = nn.Linear(cfg.d_model, cfg.q_rank, bias=cfg.bias)
        self.q_norm = make_norm(cfg, cfg.q_rank)
        self.q_up = nn.Linear(cfg.q_rank, cfg.n_heads * cfg.head_dim, bias=False)
        self.kv_down = nn.Linear(cfg.d_model, cfg.kv_rank + cfg.d_rope, bias=cfg.bias)
        self.kv_norm = make_norm(cfg, cfg.kv_rank)
        d_up = self.d_content + cfg.d_value
        self.kv_up = nn.Linear(cfg.kv_rank, cfg.n_heads * d_up, bias=False)
        self.proj = gpt.ResidualWriter(cfg.n_heads * cfg.d_value, cfg.d_model, bias=cfg.bias)

    @property
    def n_cached(self) -> int:
        return self.cfg.kv_rank + self.cfg.d_rope

    def queries(self, x: torch.Tensor, start: int) -> torch.Tensor:
        """x (B, T, C) -> queries (B, H, T, D): content first, then position."""
        q = self.q_up(self.q_norm(self.q_down(x)))
        q = q.unflatten(2, (self.n_heads, self.head_dim)).transpose(1, 2)
        content, place = q.split([self.d_content, self.cfg.d_rope], dim=-1)
        return torch.cat((content, self.turn(place, start)), dim=-1)  # turns all of place

    def shorten(self, x: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What a cache keeps of x (B, T, C): (B, T, kv_rank), and a turned key (B, T, d_rope)."""
        latent, place = self.kv_down(x).split([self.cfg.kv_rank, self.cfg.d_rope], dim=-1)
        return self.kv_norm(latent), self.turn(place, start)

    def lengthen(
        self, latent: torch.Tensor, place: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What shorten() made -> keys (B, H, T, D) and values (B, H, T, d_value)."""
        kv = self.kv_up(latent).unflatten(2, (self.n_heads, -1)).transpose(1, 2)
        content, v = kv.split([self.d_content, self.cfg.d_value], dim=-1)
        place = place[:, None].expand(-1, self.n_heads, -1, -1)  # one for all heads
        return torch.cat((content, place), dim=-1), v

    def heads(
        self, x: torch.Tensor, start: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x (B, T, C) -> queries and keys (B, H, T, D), values (B, H, T, d_value)."""
        k, v = self.lengthen(*self.shorten(x, start))
        return self.queries(x, start), k, v


# ---------------------------------------------------------------- look at it


def newest_output(attention: LatentAttention, x: torch.Tensor) -> torch.Tensor:
    """Attention of the last token of x, straight from what the cache keeps."""
    latent, place = attention.shorten(x, start=0)  # (B, T, kv_rank), (B, T, d_rope)
    latent = latent[:, None]  # (B, 1, T, kv_rank): the same for all heads
    place = place[:, None]
    q = attention.queries(x, start=0)[:, :, -1:]  # (B, H, 1, D)
    content, turned = q.split([attention.d_content, attention.cfg.d_rope], dim=-1)
    up = attention.kv_up.weight.unflatten(0, (attention.n_heads, -1))  # U, head by head
    up_k, up_v = up.split([attention.d_content, attention.cfg.d_value], dim=1)
    short_query = content @ up_k  # (B, H, 1, kv_rank): Uᵀ query
    scores = short_query @ latent.mT + turned @ place.mT  # (B, H, 1, T)
    weights = attention.weigh(scores * attention.score_scale)
    y = weights @ latent @ up_v.mT  # first the latents are mixed, then comes U
    return attention.proj(y.transpose(1, 2).flatten(2))


@torch.no_grad()
def main() -> int:
    with torch.device("meta"):  # shapes without numbers
        in_v3 = LatentAttention(DetailedConfig(**V3, attention="latent"))
    each_head = 2 * 128  # a key and a value
    rows = [
        ["128 heads", f"{128 * each_head:,}"],
        ["2 heads", f"{2 * each_head:,}"],
        ["latent, 128 heads", f"{in_v3.n_cached:,}"],
    ]
    say("What the cache of a layer keeps of one token:")
    say()
    say(Table(["keys and values of", "numbers"], rows))
    say("\nLook at the last two rows: latent attention keeps hardly more than two heads do.")

    cfg = DetailedConfig(d_model=21, n_heads=3, n_kv_heads=3, d_head=16, block_size=128, **LATENT)
    attention = LatentAttention(cfg).double()
    for name, p in attention.named_parameters():
        nn.init.normal_(p, std=0.5, generator=generator(1, "step_11", name))
    x = torch.randn(2, 7, 21, generator=generator(1, "step_11"), dtype=torch.float64)

    checks = Checks()
    checks.equal("DeepSeek-V3's cache keeps", in_v3.n_cached, 576)
    checks.equal("U makes out of a latent", in_v3.kv_up.out_features, 2 * 128 * 128)
    q, k, _ = attention.heads(x)
    moved_q, moved_k, _ = attention.heads(x, start=100)
    checks.close("moved on by 100: same", moved_q @ moved_k.mT, q @ k.mT, 1e-9)
    ours = newest_output(attention, x)
    checks.close("no key made: same output", ours, attention(x)[:, -1:], 1e-9)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
