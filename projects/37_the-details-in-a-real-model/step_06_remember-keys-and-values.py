"""Step 06: remember keys and values.

Step 05 read the whole text again for every new token. Nearly all of that is work done twice. A
position sees itself and the past, never the future, so whatever comes later can't change what a
position computes. In particular its keys and values stay what they are, in every layer. So we
keep them. A new token then brings one query, one key and one value, and its query reads all the
keys that are kept. Queries of the past are not kept: nobody asks them again.

The memory for it (the cache) is set aside once. When several new tokens come at once, each must
see the past and the new ones up to itself. With a and b in the past and c and d new, the mask is

          a  b  c  d
      c   1  1  1  0
      d   1  1  1  1

    python step_06_remember-keys-and-values.py

draws outputs/step_06.png. Several texts at a time are left out.
"""

import sys
import timeit
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, figures
from shared.checks import Checks
from shared.console import Table, say

real = chapters.load_build(37)  # the finished chapter: what is not on this page
GroupedQueryAttention = real.GroupedQueryAttention
RealGPT = real.RealGPT

# ---------------------------------------------------------------- the idea


class CachedAttention(nn.Module):
    """An attention `attn` that reads one text in pieces and keeps its keys and values."""

    def __init__(self, attn: GroupedQueryAttention, n_positions: int):
        super().__init__()
        self.attn = attn
        memory = (1, attn.n_kv_heads, n_positions, attn.head_dim)
        self.keys = attn.qkv.weight.new_empty(memory)
        self.values = attn.qkv.weight.new_empty(memory)
        self.length = 0  # positions read so far

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The next T positions (1, T, C) -> (1, T, C). ValueError if they don't fit."""
        T = x.shape[1]
        past = self.length
        end = past + T
        if end > self.keys.shape[2]:
            raise ValueError(f"{end} positions don't fit a cache of {self.keys.shape[2]}")
        q, k, v = self.attn.heads(x, start=past)
        self.keys[:, :, past:end] = k
        self.values[:, :, past:end] = v
        self.length = end
        k = self.keys[:, :, :end]
        v = self.values[:, :, :end]
        if past == 0:
            return self.attn.mix(q, k, v, is_causal=True)
        if T == 1:  # the newest token may see every key: no mask
            return self.attn.mix(q, k, v)
        mask = x.new_ones(T, end, dtype=torch.bool).tril(past)  # row t: all past keys, new 0 to t
        return self.attn.mix(q, k, v, mask)


@contextmanager
def remembering(model: RealGPT, n_positions: int) -> Iterator[None]:
    """Inside `with remembering(...)`, each call of the model reads on where the last one ended.

    ValueError for more positions than the model can read.
    """
    longest = model.cfg.block_size
    if n_positions > longest:
        raise ValueError(f"{n_positions} positions don't fit a block_size of {longest}")
    for block in model.blocks:
        block.attn = model.make_cache(block.attn, n_positions)  # a CachedAttention of it
    try:
        yield
    finally:
        for block in model.blocks:
            block.attn = block.attn.attn  # the attention without its memory


# ---------------------------------------------------------------- look at it


LENGTHS = (16, 64, 128, 256)


def draw_picture(times: list[tuple[float, float]]) -> Path:
    figure = figures.new_figure(7, 3.4)
    axes = figure.subplots()
    axes.plot(LENGTHS, times, "o-", label=["read everything again", "keys and values kept"])
    axes.set(xlabel="tokens before it", ylabel="ms for one more token", ylim=0)
    axes.legend(frameon=False)
    return figures.save(figure, __file__)


@torch.inference_mode()
def main() -> int:
    file = real.WeightsFile(real.packaged_weights())
    text = real.Tokenizer(file).encode(real.evaluation_text())
    model = real.load_model(file)
    times = []
    rows = []
    for T in LENGTHS:
        idx = torch.tensor([text[:T]])
        one = idx[:, :1]  # any token will do: reading it takes the same time
        again = 1000 * min(timeit.repeat(lambda: model.states(idx), number=1, repeat=3))
        with remembering(model, T + 3):  # room for the text and three tokens more
            model.states(idx)
            remembered = 1000 * min(timeit.repeat(lambda: model.states(one), number=1, repeat=3))
        times.append((again, remembered))
        rows.append([str(T), f"{again:.0f}", f"{remembered:.0f}"])
    draw_picture(times)
    say(Table(["tokens before it", "ms, read again", "ms, remembered"], rows))
    say("\nRead again, a token takes longer the longer the text is. With a memory it hardly")
    say("does: most of its time goes into loading the weights. See outputs/step_06.png")

    checks = Checks()
    idx = torch.tensor([text[:60]])
    whole = model.states(idx)
    with remembering(model, 60):
        pieces = [model.states(piece) for piece in idx.split([1, 20, 38, 1], dim=1)]
    together = torch.cat(pieces, dim=1)
    checks.close("read in four pieces", together, whole, 1e-3)
    checks.close("without memory again", model.states(idx), whole, 1e-3)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
