"""Step 06: remember keys and values.

Step 05 read the whole text again for every new token. But keys and values never change once they are computed, so
this step keeps them, in memory set aside once, and reads only what is new. Left out: several texts at a time.

    python step_06_remember-keys-and-values.py     (about 8 seconds)

It prints the time of a token with and without the cache, and checks that the tokens are the same.
"""

import sys
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli
from shared.checks import Checks
from shared.console import Table, say

gpt, modern = chapters.load_build(5), chapters.load_build(7)
step_01, step_02, step_03, step_04, step_05 = (chapters.load_step(37, step) for step in (1, 2, 3, 4, 5))
GroupedConfig, GroupedQueryAttention, RealGPT = step_03.GroupedConfig, step_03.GroupedQueryAttention, step_04.RealGPT
fast, evaluation_text = step_05.fast, step_05.evaluation_text


class KeyValueCache:
    """One layer's keys and values of every position read so far, for one text."""

    def __init__(self, cfg: GroupedConfig, n_positions: int, like: torch.Tensor):
        self.keys = like.new_empty(1, cfg.n_kv_heads, n_positions, cfg.head_dim)
        self.values = torch.empty_like(self.keys)
        self.length = 0

    def append(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The next T positions' (1, G, T, D) -> all so far (1, G, length, D). ValueError if they don't fit."""
        end = self.length + k.shape[2]
        if end > self.keys.shape[2]:
            raise ValueError(f"{end} positions don't fit a cache of {self.keys.shape[2]}")
        self.keys[:, :, self.length : end] = k
        self.values[:, :, self.length : end] = v
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]


class CachedAttention(GroupedQueryAttention):
    """Step 03's attention; with a cache, x is what follows the positions in it."""

    cache: KeyValueCache | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, T, C) -> (B, T, C); B is 1 with a cache."""
        if self.cache is None:
            return super().forward(x)
        T, past = x.shape[1], self.cache.length
        q, k, v = self.shared_heads(x, start=past)
        k, v = self.cache.append(k, v)
        # Position past + t sees the past + t + 1 first keys. A single new token sees all there are: no mask.
        mask = None if T == 1 or past == 0 else x.new_ones(T, past + T, dtype=torch.bool).tril(past)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=past == 0, enable_gqa=True)
        return self.proj(y.transpose(1, 2).flatten(2))


class CachedBlock(modern.ModernBlock):
    def make_attention(self, cfg: GroupedConfig) -> nn.Module:
        return CachedAttention(cfg)


class CachedGPT(RealGPT):
    """Step 04's model, which can remember."""

    def make_block(self, cfg: GroupedConfig) -> nn.Module:
        return CachedBlock(cfg)

    @contextmanager
    def remembering(self, n_positions: int) -> Iterator[None]:
        """Within it, each call reads on where the one before ended. ValueError for more positions than block_size."""
        if n_positions > self.cfg.block_size:
            raise ValueError(f"{n_positions} positions don't fit a block_size of {self.cfg.block_size}")
        for block in self.blocks:
            block.attn.cache = KeyValueCache(self.cfg, n_positions, self.token_embedding.weight)
        try:
            yield
        finally:
            for block in self.blocks:
                block.attn.cache = None


@torch.inference_mode()
def stream(
    model: CachedGPT, ids: list[int], n_new: int, end: int = -1, temperature: float = 0.0, draws=None
) -> Iterator[int]:
    """Within model.remembering(): read ids, then yield up to n_new tokens, or up to `end`.

    temperature 0 takes the likeliest; else they come from softmax(logits / temperature) and the generator `draws`.
    """
    for _ in range(n_new):
        idx = torch.tensor([ids], device=model.token_embedding.weight.device)
        with fast(model) if len(ids) > 1 else nullcontext():  # a single token waits for memory, not for products
            last = model.states(idx)[0, -1]
        logits = model.lm_head(last)  # (V,): what follows the last position
        if temperature == 0:
            ids = [int(logits.argmax())]
        else:
            ids = [int(torch.multinomial(F.softmax(logits / temperature, dim=-1), 1, generator=draws))]
        yield ids[0]
        if ids[0] == end:
            return


def milliseconds(action: Callable[[], object]) -> float:
    return 1000 * min(timeit.repeat(action, number=1, repeat=2))


def main() -> int:
    file, checks, rows = step_01.WeightsFile(step_01.packaged_weights()), Checks(), []
    model, tokenizer = step_04.load_model(file, CachedGPT), step_02.Tokenizer(file)
    text = tokenizer.encode(evaluation_text())
    with torch.inference_mode():
        for T in (32, 128, 256):
            with fast(model):
                again = milliseconds(lambda T=T: model.states(torch.tensor([text[:T]])))
            with model.remembering(T + 9):
                list(stream(model, text[:T], 2))
                within = milliseconds(lambda T=T: list(stream(model, [text[T]], 1)))
            rows.append([f"{T}", f"{again:.0f}", f"{within:.0f}", f"{again / within:.1f}"])
        say(Table(["text before it", "ms, read again", "ms, remembered", "times as fast"], rows))

        question = tokenizer.chat("Name three fruits.")
        with model.remembering(len(question) + 12):
            remembered = list(stream(model, question, 12))
        again = gpt.generate(model, torch.tensor([question]), 12, temperature=0)[0, len(question) :].tolist()
        checks.equal("tokens with the cache and without", remembered, again)
        whole = model.states(torch.tensor([text[:60]]))
        with model.remembering(60):
            pieces = [model.states(torch.tensor([text[a:b]])) for a, b in ((0, 1), (1, 21), (21, 59), (59, 60))]
            checks.close("in pieces of 1, 20, 38 and 1", torch.cat(pieces, dim=1), whole, 1e-3)
            checks.raises("a position too many", ValueError, ["61", "60"], lambda: list(stream(model, [1], 1)))
    checks.raises("more than block_size", ValueError, ["8193", "8192"], lambda: model.remembering(8193).__enter__())
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
