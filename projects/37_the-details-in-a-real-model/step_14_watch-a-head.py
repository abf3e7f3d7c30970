"""Step 14: watch a head.

A head's query decides, for each position, which earlier positions to read and how much: weights
that sum to 1. Drawn as a map, with a row for each token that reads and a column for each token
that is read, they show what a head does. The real model has 30 · 9 = 270 heads. Nobody told any
of them what to do, and yet some have a clear job:

- One reads the token before. With it, a token knows what it follows.
- One repeats: it looks for an earlier place where the same token stood, and reads the token that
  came after it. If "The cat sat on" was in the text, then after "The dog sat" it reads "on". This
  is called an induction head (Olsson et al. 2022).
- Many rest. They read the first token nearly alone, whatever the text. Weights must sum to 1, so a
  head that has nothing to read needs a place to look at. No head of the first 12 layers does so; it
  begins where step 07 saw a huge number appear in the first token.

    python step_14_watch-a-head.py

draws outputs/step_14.png. What the values carry along is left out.
"""

import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, figures
from shared.checks import Checks
from shared.console import Table, say

real = chapters.load_build(37)
TEXT = "The cat sat on the mat because it was tired. The dog sat on the rug because it was"
BEFORE = (16, 0)  # layer and head, both counted from 0 (step 07 counted layers from 1)
REPEATS = (18, 6)
RESTS = (18, 8)

# ---------------------------------------------------------------- the idea


def attention_weights(attn: real.GroupedQueryAttention, x: torch.Tensor) -> torch.Tensor:
    """softmax(q kᵀ / √D) over the past: x (1, T, C) -> (H, T, T)."""
    q, k, _ = attn.heads(x)
    k = k.repeat_interleave(attn.n_heads // attn.n_kv_heads, dim=1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(attn.head_dim)
    T = x.shape[1]
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -math.inf).softmax(-1)[0]


@torch.inference_mode()
def all_maps(model: real.RealGPT, ids: list[int]) -> torch.Tensor:
    """The weights of every head (L, H, T, T)."""
    x = model.embed(torch.tensor([ids]))
    maps = []
    for block in model.blocks:
        maps.append(attention_weights(block.attn, block.norm1(x)))
        x = block(x)
    return torch.stack(maps)


# ---------------------------------------------------------------- look at it


def draw_picture(maps: torch.Tensor, tokens: list[str]) -> Path:
    figure = figures.new_figure(12, 4.6)
    titles = ("reads the token before", "repeats", "rests on the first token")
    places = range(len(tokens))
    for axes, (layer, head), title in zip(figure.subplots(1, 3), (BEFORE, REPEATS, RESTS), titles):
        axes.imshow(maps[layer, head].numpy(), cmap="Blues", vmin=0, vmax=1)
        axes.set_xticks(places, tokens, rotation=90)
        axes.set_yticks(places, tokens)
        axes.set(title=f"layer {layer}, head {head}: {title}")
    return figures.save(figure, __file__)


def main() -> int:
    file = real.WeightsFile(real.packaged_weights())
    tokenizer = real.Tokenizer(file)
    model = real.load_model(file)
    ids = tokenizer.encode(TEXT)
    maps = all_maps(model, ids)
    draw_picture(maps, [tokenizer.encoding.decode([i]).strip() for i in ids])
    below = maps.diagonal(offset=-1, dim1=2, dim2=3)  # weight on the token before
    before = below.mean(-1)  # (L, H)
    on_first = maps[:, :, 3:, 0].mean(-1)  # the first rows have hardly anything else to read
    # "sat" stands at places 2 and 13, eleven apart. What followed it first is at 2 + 1.
    again = [t for t in range(11, len(ids)) if ids[t] == ids[t - 11]]
    repeated = torch.stack([maps[:, :, t, t - 11 + 1] for t in again]).mean(0)
    rows = []
    for what, (layer, head), weight in (
        ("the token before", BEFORE, before),
        ("after an equal token", REPEATS, repeated),
        ("the first token", RESTS, on_first),
    ):
        typical = f"{weight.median():.2f}"
        rows.append([what, f"{layer}.{head}", f"{weight[layer, head]:.2f}", typical])
    say(Table(["what it reads", "head", "its weight there", "median of all heads"], rows))
    resting = (on_first > 0.5).sum(1)  # (L,)
    say(f"\nOf the 108 heads in layers 0 to 11, {int(resting[:12].sum())} put most of their weight")
    say(f"on the first token; of the 162 behind, {int(resting[12:].sum())}.")
    say("The maps of three heads: outputs/step_14.png")

    checks = Checks()
    attn = model.blocks[16].attn
    x = torch.randn(1, 9, 576, generator=torch.Generator().manual_seed(1))
    _, _, v = attn.heads(x)
    v = v[0].repeat_interleave(3, dim=0)  # (H, T, D): a copy for each query head
    mixed = attention_weights(attn, x) @ v
    ours = attn.proj(mixed.transpose(0, 1).flatten(1))
    checks.close("weights times values", ours, attn(x)[0], 1e-4)
    checks.close("each row sums to 1", maps.sum(-1), torch.ones_like(maps[..., 0]), 1e-5)
    checks.between("head 16.0, token before", before[BEFORE].item(), 0.6, 1)
    checks.between("head 18.6, what follows", repeated[REPEATS].item(), 0.6, 1)
    checks.equal("resting before layer 12", int(resting[:12].sum()), 0)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
