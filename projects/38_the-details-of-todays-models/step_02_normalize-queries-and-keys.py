"""Step 02: normalize queries and keys.

What keeps scores from growing? A score is q · k / √D: a query times a key, of D numbers each. In
training the matrices that make q and k may grow: with both four times as large, scores are 16 times
as large. Softmax turns large scores into weights of 1 and 0. Then each query reads one token alone,
and hardly any gradient comes back to change that (Dehghani et al. 2023 saw training fail on it).

So put a norm on each query and each key (Henry et al. 2020). RMSNorm brings a vector to the length
√D, however long it was, and multiplies each channel by a gain, a learned number. The product of two
vectors of length √D is D at most. So with gains of 1 no score is above D / √D = √D, whatever the
matrices do: 11.3 for a head of 128 channels. Only the gains can raise that.

    Qwen3       a norm on each head, before RoPE turns it
    OLMo 2      a norm on all heads of a token together. That bounds what they have in all, and one
                head may have most of it
    nanochat    a norm on each head, without gains. It comes after the turn, which makes no
                difference, as a turn changes no length

    python step_02_normalize-queries-and-keys.py

draws outputs/step_02.png. The attention that is changed here stands in step 01.
Shapes: B batch, T positions, H query heads, G key and value heads, D = head_dim.
"""

import sys
from pathlib import Path

import torch
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console, figures
from shared.checks import Checks
from shared.randomness import generator

build = chapters.load_build(38)
DetailedConfig = build.DetailedConfig
GroupedAttention = build.GroupedAttention  # project() makes q, k and v, then heads() turns q and k
make_norm = build.make_norm  # here chapter 07's RMSNorm

# ---------------------------------------------------------------- the idea


class HeadNormAttention(GroupedAttention):
    """A norm on each head's query and key before they are turned (Qwen3)."""

    def __init__(self, cfg: DetailedConfig):
        super().__init__(cfg)
        self.q_norm = make_norm(cfg, cfg.head_dim)
        self.k_norm = make_norm(cfg, cfg.head_dim)

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = super().project(x)  # q (B, H, T, D), k and v (B, G, T, D)
        return self.q_norm(q), self.k_norm(k), v


class WidthNormAttention(GroupedAttention):
    """A norm on all query heads of a token together, and one on all its key heads (OLMo 2)."""

    def __init__(self, cfg: DetailedConfig):
        super().__init__(cfg)
        self.q_norm = make_norm(cfg, cfg.n_heads * cfg.head_dim)
        self.k_norm = make_norm(cfg, cfg.n_kv_heads * cfg.head_dim)

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = super().project(x)
        return self.across(self.q_norm, q), self.across(self.k_norm, k), v

    def across(self, norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """x (B, heads, T, D), all heads of a token normalized together -> (B, heads, T, D)."""
        wide = x.transpose(1, 2).flatten(2)  # (B, T, heads · D)
        return norm(wide).unflatten(2, (-1, self.head_dim)).transpose(1, 2)


class TurnedNormAttention(GroupedAttention):
    """A norm on each head's query and key after they are turned (nanochat)."""

    def __init__(self, cfg: DetailedConfig):
        super().__init__(cfg)
        self.q_norm = make_norm(cfg, cfg.head_dim)
        self.k_norm = make_norm(cfg, cfg.head_dim)

    def heads(
        self, x: torch.Tensor, start: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = super().heads(x, start)
        return self.q_norm(q), self.k_norm(k), v


# ---------------------------------------------------------------- look at it

CFG = DetailedConfig(block_size=48, n_heads=6, n_kv_heads=3, d_model=60, d_head=10)
KINDS = (GroupedAttention, WidthNormAttention, HeadNormAttention)
FACTORS = (1, 2, 4, 8, 16, 32)


def make(attention_class: type, factor: float = 1.0) -> GroupedAttention:
    """Random weights; those of query head 0 and key head 0 are `factor` times as large."""
    attention = attention_class(CFG)
    rows = attention.qkv.weight.data  # of 6 query, 3 key and 3 value heads, 10 rows each
    nn.init.normal_(rows, std=60**-0.5, generator=generator(1, "weights"))
    rows[0:10] *= factor
    rows[60:70] *= factor
    return attention


@torch.no_grad()
def scores(attention: GroupedAttention, x: torch.Tensor) -> torch.Tensor:
    """Head 0's score of every query and key, (T, T)."""
    q, k, _ = attention.heads(x)
    return q[0, 0] @ k[0, 0].T * attention.score_scale


def draw_picture(found: list[torch.Tensor]) -> Path:
    figure = figures.new_figure(8, 3.2)
    left, right = figure.subplots(1, 2)
    times = [str(factor) for factor in FACTORS]
    names = ("no norm", "on all heads", "on each head")
    for name, colour, each in zip(names, figures.COLOURS, found):  # each (factors, T, T)
        left.semilogy(times, each.amax((1, 2)), "o-", color=colour, label=name)
        right.plot(times, each.softmax(-1).amax(-1).mean(1), "o-", color=colour)
    figures.label(left, "largest score", "the head's matrices times")
    figures.label(right, "largest weight of a query, mean", "the head's matrices times")
    return figures.save(figure, __file__)


def main() -> int:
    x = torch.randn(1, 48, 60, generator=generator(1, "x"))
    found = [torch.stack([scores(make(kind, f), x) for f in FACTORS]) for kind in KINDS]
    plain, wide, each = [s.max().item() for s in found]  # at 32 times
    console.say(f"picture: {draw_picture(found)}\n")
    console.say("Look at the head with matrices times 32. Its largest score is without norm")
    console.say(f"{plain:,.0f}, with a norm on all heads {wide:.1f}, with one on each {each:.1f}.")

    checks = Checks()
    checks.between("on each head: ≤ √10", each, 2, 10**0.5)
    before = scores(make(HeadNormAttention), x)  # all gains are 1
    after = scores(make(TurnedNormAttention), x)
    checks.close("after the turn: same", after, before, 1e-5)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
