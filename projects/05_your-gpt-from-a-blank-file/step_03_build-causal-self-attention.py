"""Step 03: build causal self-attention.

In the model every token is a vector of C numbers; step 06 makes it one. To guess what follows "the
cat sat on the", the vector of the last word must learn something from the words before it.
Attention does this; nothing else in the model moves information from one position to another.

Each position makes three vectors from its own: a query (what it looks for), a key (how it can be
found) and a value (what it has to give). Query times key is a score for each pair of positions.
Softmax turns the scores of one query into shares that sum to 1, and the result at its position is
the mean of all values by these shares.

Three details:

- Causal: a position must not see its future, which it is to guess. Scores of later positions become
  -∞, so their shares are 0.
- Heads: one set of shares is one look at the past. H small attentions, called heads, are H looks at
  once. A last matrix, proj, mixes what they found.
- √D: a score is a sum of D products, and for random numbers of size 1 such a sum has size √D. Such
  scores would make softmax give nearly everything to one position, so they are divided by √D.

    python step_03_build-causal-self-attention.py

draws outputs/step_03.png: who may look at whom, and two heads that look for different things.
tests/test_05_steps.py holds the class to torch's own, nn.MultiheadAttention.
Shapes: B batch, T positions, C = d_model, H heads, D = head_dim = C / H.
"""

import math
import sys
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console, figures
from shared.checks import Checks
from shared.randomness import generator

GPTConfig = chapters.load_build(5).GPTConfig  # the model's sizes by name; step 13 shows the class

# ---------------------------------------------------------------- the idea


def attend_by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple:
    """q, k, v (..., T, D) -> the results (..., T, D) and the shares (..., T, T).

    torch has this in one call, F.scaled_dot_product_attention, which the class below uses.
    """
    T, D = q.shape[-2:]
    scores = q @ k.transpose(-2, -1) / math.sqrt(D)  # row t: what position t asks of everyone
    may_look = torch.ones(T, T, dtype=torch.bool).tril()  # itself and its past
    scores = scores.masked_fill(~may_look, -math.inf)
    shares = scores.softmax(-1)
    return shares @ v, shares


class ResidualWriter(nn.Linear):
    """A Linear whose output is added to step 05's stream. Until step 09, read it as nn.Linear."""


class CausalSelfAttention(nn.Module):
    """H small attentions side by side, in which a position sees itself and its past.

    Vaswani et al. 2017, equation 1.
    """

    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.n_heads = cfg.n_heads
        self.head_dim = cfg.head_dim
        self.qkv = nn.Linear(cfg.d_model, 3 * cfg.d_model, bias=cfg.bias)
        self.proj = ResidualWriter(cfg.d_model, cfg.d_model, bias=cfg.bias)

    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x (B, T, C) -> queries, keys, values, each (B, H, T, D). Later chapters override this."""
        B, T, _ = x.shape
        qkv = self.qkv(x).view(B, T, 3, self.n_heads, self.head_dim)
        return qkv.permute(2, 0, 3, 1, 4).unbind(0)  # (B, T, 3, H, D) -> (3, B, H, T, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, T, C) -> (B, T, C)."""
        q, k, v = self.heads(x)
        # softmax(q kᵀ / √D) v, with the future masked: (B, H, T, D)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).flatten(2)  # the heads side by side: (B, T, C)
        return self.proj(y)


# ---------------------------------------------------------------- look at it


def draw_picture() -> Path:
    """The mask, and two heads set by hand to show what a head can do."""
    text = "the cat sat on the mat"
    T = len(text)
    letters = F.one_hot(torch.tensor([ord(letter) - ord(" ") for letter in text])).float()
    places = torch.eye(T)  # row t is the vector of position t
    places_before = places.roll(1, dims=0)  # row t is the vector of position t - 1
    # A query scores highest with a key equal to it. The 9 makes scores large, and shares clear.
    _, own_letter = attend_by_hand(9 * letters, 9 * letters, letters)
    _, one_back = attend_by_hand(9 * places_before, 9 * places, letters)
    titles = ("who may look at whom", "a head: the same letter", "another: the letter before")
    pictures = (torch.ones(T, T).tril(), own_letter, one_back)
    figure = figures.new_figure(9, 3.4)
    for axes, title, shares in zip(figure.subplots(1, 3), titles, pictures):
        axes.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=1)
        axes.set_xticks(range(T), text)
        axes.set_yticks(range(T), text)
        figures.label(axes, title, x="looked at")
    return figures.save(figure, __file__)


def main() -> int:
    draw_picture()
    console.say("Drawn to outputs/step_03.png. A row is a position; its dark cells are where it")
    console.say("looks. Nothing is above the diagonal: no position looks at its future.")

    noise = generator(1, "step 03")
    attn = CausalSelfAttention(GPTConfig(n_heads=3, d_model=15)).double()
    for p in attn.parameters():
        nn.init.normal_(p, std=0.5, generator=noise)
    x = torch.randn(2, 7, 15, dtype=torch.float64, generator=noise)
    q, k, v = attn.heads(x)
    by_hand, shares = attend_by_hand(q, k, v)
    one_call = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    changed = x.clone()
    changed[:, 4:] += 1.0  # another future, from position 4 on

    checks = Checks()
    checks.close("by hand, and torch's call", by_hand, one_call, 1e-12)
    checks.close("the shares of a row, summed", shares.sum(-1), torch.ones(2, 3, 7), 1e-12)
    checks.close("another future: same past", attn(changed)[:, :4], attn(x)[:, :4], 1e-12)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
