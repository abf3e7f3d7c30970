"""Step 06: give attention a sink.

What does a head do that finds nothing of use? Softmax makes weights that sum to 1, so the head has
to read something. If all scores are 4 lower, nothing changes: softmax sees their differences alone.
Trained models find a way out. Many of their heads put nearly all weight on the first token. It is
called an attention sink (Xiao et al. 2023), and chapter 37, step 14, shows such a head.

gpt-oss (2025) builds the way out in. Each head has one more score, its sink, a learned number that
belongs to no token:

    weight of key i = e^score_i / (e^sink + e^score_1 + e^score_2 + ...)

What the sink gets goes to nobody. It is as if there were one more key, whose score is the sink for
every query, and whose value is zero. The weights of the real keys then sum to less than 1. If all
scores are low, the sink gets most, and the head adds next to nothing to the stream.

    python step_06_give-attention-a-sink.py

draws outputs/step_06.png. Shapes: B batch, H heads, T positions, D = head_dim.
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

build = chapters.load_build(38)
DetailedConfig = build.DetailedConfig
GroupedAttention = build.GroupedAttention  # its weigh() is scores.softmax(-1); in step 01

# ---------------------------------------------------------------- the idea


class SinkAttention(GroupedAttention):
    """Each head has one more score, a parameter, whose weight goes to nobody (gpt-oss)."""

    def __init__(self, cfg: DetailedConfig):
        super().__init__(cfg)
        self.sinks = nn.Parameter(torch.zeros(cfg.n_heads))

    def weigh(self, scores: torch.Tensor) -> torch.Tensor:
        B, H, T, _ = scores.shape
        sinks = self.sinks.to(scores.dtype).view(1, H, 1, 1).expand(B, H, T, 1)
        weights = torch.cat((scores, sinks), dim=-1).softmax(-1)
        return weights[..., :-1]  # without the sink's


# ---------------------------------------------------------------- look at it

CFG = DetailedConfig(block_size=9, n_heads=6, n_kv_heads=3, d_model=24)
SCORES = torch.tensor([0.5, -1.0, 3.0, 0.0, 1.0, -0.5, 1.5])  # of one query for seven keys


def weights(attention_class: type, scores: torch.Tensor) -> torch.Tensor:
    """The weights for one query of head 0, whose sink is 0: scores (keys,) -> (keys,)."""
    scores = scores.expand(1, CFG.n_heads, 1, -1)
    return attention_class(CFG).weigh(scores)[0, 0, 0].detach()


def draw_picture() -> Path:
    figure = figures.new_figure(8, 3.2)
    panels = figure.subplots(1, 2, sharey=True)
    blue, red, *_ = figures.COLOURS
    for axes, lower in zip(panels, (0, 4)):
        plain = weights(GroupedAttention, SCORES - lower).tolist()
        sunk = weights(SinkAttention, SCORES - lower).tolist()
        axes.bar(range(7), plain, width=-0.4, align="edge", color=blue, label="softmax")
        axes.bar(range(7), sunk, width=0.4, align="edge", color=red, label="with a sink")
        axes.bar(7, 1 - sum(sunk), width=0.4, align="edge", color="0.6", label="to the sink")
        figures.label(axes, f"weights, best score {3 - lower}", "key")
        axes.set_xticks(range(8), [*range(7), "sink"])
    panels[1].get_legend().remove()
    return figures.save(figure, __file__)


def with_one_more_key(attention: SinkAttention, x: torch.Tensor) -> torch.Tensor:
    """attention(x) by torch: one more key, whose score is the head's sink and whose value is 0."""
    q, k, v = attention.heads(x)
    k = F.pad(k, (0, 0, 0, 1))  # (B, G, T + 1, D): a key of zeros at the end
    v = F.pad(v, (0, 0, 0, 1))
    T = x.shape[1]
    bias = torch.full((CFG.n_heads, T, T + 1), -torch.inf).triu(1)  # torch adds it to the scores
    bias[:, :, T] = attention.sinks[:, None]  # so the last key's score is q · 0 + sink
    y = F.scaled_dot_product_attention(q, k, v, bias, enable_gqa=True)
    return attention.proj(y.transpose(1, 2).flatten(2))


def main() -> int:
    console.say(f"picture: {draw_picture()}\n")
    high, low = [1 - weights(SinkAttention, SCORES - lower).sum().item() for lower in (0, 4)]
    console.say(f"Look at the grey bars: a sink of 0 gets {high:.0%} of the weight if the best")
    console.say(f"score is 3, and {low:.0%} if all scores are 4 lower. Softmax sees no difference.")

    checks = Checks()
    quarters = torch.full((3,), 1 / 4)
    checks.close("three scores of 0", weights(SinkAttention, torch.zeros(3)), quarters, 1e-7)
    attention = SinkAttention(CFG)
    for name, p in attention.named_parameters():
        nn.init.normal_(p, std=0.5, generator=generator(1, name))
    x = torch.randn(2, 7, 24, generator=generator(1, "x"))
    by_torch = with_one_more_key(attention, x)
    checks.close("torch, one more key", attention(x), by_torch, 1e-5)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
