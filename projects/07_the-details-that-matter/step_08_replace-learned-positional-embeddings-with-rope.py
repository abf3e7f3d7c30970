"""Step 08: replace the learned position embeddings with RoPE.

Chapter 05 added a trained vector to each position. RoPE adds nothing: it turns queries and keys by an angle that grows
with their position, so that a score depends on their distance alone. Two layouts of pairs are in use: both are here.

    python step_08_replace-learned-positional-embeddings-with-rope.py

prints what RoPE and learned positions do beyond the length they were trained on, and the checks; about eight seconds.
"""

import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console, data, training
from shared.checks import Checks
from shared.comparison import interval
from shared.kernels import fastest_float32
from shared.randomness import generator

gpt = chapters.load_build(5)


def build_rope_cache(
    seq_len: int, head_dim: int, device: torch.device | str = "cpu", base: float = 10_000.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The table: cosine and sine of the angle of pair i at position t, each (T, D/2), float32.

    Pair i turns by base^(-2i/D) radians a position (Su et al. 2021, eq. 15). ValueError if
    head_dim is odd.
    """
    if head_dim % 2:
        raise ValueError(f"head_dim must be even for RoPE, got {head_dim}")
    pair = torch.arange(head_dim // 2, dtype=torch.float64)
    speed = base ** (-2 * pair / head_dim)  # radians a position: 1 for pair 0, then slower
    position = torch.arange(seq_len, dtype=torch.float64)
    angle = torch.outer(position, speed)
    # float64 until here: at position 100,000 an angle in float32 is off by some thousandths.
    return angle.cos().float().to(device), angle.sin().float().to(device)


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """A quarter turn of every pair: (x0, x1) becomes (-x1, x0). The name is the customary one."""
    x0 = x[..., 0::2]
    x1 = x[..., 1::2]
    return torch.stack((-x1, x0), dim=-1).flatten(-2)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn row t of x (..., T, D) by row t of the table; ValueError if it has fewer (eq. 34)."""
    T = x.shape[-2]
    if T > cos.shape[0]:
        raise ValueError(f"{T} positions don't fit a RoPE table of {cos.shape[0]}")
    cos = cos[:T].repeat_interleave(2, dim=-1)  # (T, D): one angle for both channels of a pair
    sin = sin[:T].repeat_interleave(2, dim=-1)
    # Turning a pair: cos times the pair plus sin times its quarter turn.
    return (x * cos + rotate_half(x) * sin).to(x.dtype)


class RotaryAttention(gpt.CausalSelfAttention):
    """Chapter 05's attention with queries and keys turned. Values carry content, not position."""

    def __init__(self, cfg: gpt.GPTConfig):
        super().__init__(cfg)
        # Plain attributes, not buffers: model.bfloat16() would round a buffer.
        self.cos, self.sin = build_rope_cache(cfg.block_size, cfg.head_dim, base=cfg.rope_base)

    def tables(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin on the device of the input: moved there at the first call."""
        if self.cos.device != device:
            self.cos = self.cos.to(device)
            self.sin = self.sin.to(device)
        return self.cos, self.sin

    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x (B, T, C) -> queries, keys, values, each (B, H, T, D)."""
        cos, sin = self.tables(x.device)
        q, k, v = super().heads(x)
        return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v


def apply_rope_half_split(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The other layout: channel i pairs with channel i + D/2 (GPT-NeoX, Hugging Face's Llama)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@dataclass(frozen=True)
class RotaryConfig(gpt.GPTConfig):
    rope_base: float = 10_000.0


class RotaryGPT(gpt.GPT):
    def make_positions(self, cfg: RotaryConfig) -> None:
        return None

    def make_block(self, cfg: RotaryConfig) -> gpt.Block:
        block = super().make_block(cfg)
        block.attn = RotaryAttention(cfg)
        return block


def check_rotation(checks: Checks) -> None:
    x, table = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), [half[3:] for half in build_rope_cache(4, 4)]
    by_hand, draw = torch.tensor([[-1.2722325, -1.8388650, 2.8786681, 4.0881866]]), generator(1, "step_08")
    checks.close("[1, 2, 3, 4] at position 3", apply_rope(x, *table), by_hand, 3e-7)
    x, table = torch.randn(2, 3, 5, 8, dtype=torch.float64, generator=draw), build_rope_cache(5, 8)
    turned, order = apply_rope(x, *table), torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])  # from one layout to the other
    checks.close("half-split, permuted", apply_rope_half_split(x[..., order], *table), turned[..., order], 0)
    q, k = torch.randn(2, 1, 8, generator=draw).expand(2, 1_000_006, 8)
    q, k = (apply_rope(x, *build_rope_cache(1_000_006, 8)) for x in (q, k))
    scores = (q[5:] * k[:-5]).sum(-1) / 8
    checks.close("score of m + 5 and m, every m to a million", scores, scores[:1].expand(1_000_001), 1e-5)


def losses_by_length(model_class: type, config: gpt.GPTConfig, corpus: data.Corpus, seed: int) -> list[float]:
    """Train at block_size; validation loss there, and with the same weights at 2 and 4 times that, if they load."""
    settings = training.TrainingSettings(steps=100, batch_size=16)
    model = model_class(config, corpus.vocab_size)
    gpt.init_parameters(model, seed)
    losses = [training.train(model, corpus, settings, seed).validation_loss]
    for times in (2, 4):
        longer = model_class(replace(config, block_size=times * config.block_size), corpus.vocab_size)
        with suppress(RuntimeError):  # what load_state_dict raises for a position embedding of another size
            longer.load_state_dict(model.state_dict())
            losses.append(training.evaluate(longer, corpus.validation, settings))
    return losses


def show(what: str, losses: tuple[float, ...], baseline: tuple[float, ...]) -> None:
    difference = interval([a - b for a, b in zip(losses, baseline)])
    console.say(f"{what}: {difference}, {difference.verdict}")


def main() -> int:
    checks, corpus = Checks(), data.load_corpus("docs", "char", 32)
    check_rotation(checks)
    corpus = replace(corpus, validation=corpus.validation[:15_000])
    with fastest_float32():
        runs = [losses_by_length(gpt.GPT, gpt.GPTConfig(), corpus, seed) for seed in (1, 2, 3)]
        rotary_runs = [losses_by_length(RotaryGPT, RotaryConfig(), corpus, seed) for seed in (1, 2, 3)]
    (learned,), (rope, rope_64, rope_128) = zip(*runs), zip(*rotary_runs)
    rows = [[f"{sum(losses) / 3:.3f}" for losses in (learned, rope, rope_64, rope_128)]]
    console.say("Validation loss after 100 steps at length 32, means over 3 seeds; learned positions load no longer:")
    console.say()
    console.say(console.Table(["learned at 32", "RoPE at 32", "RoPE at 64", "RoPE at 128"], rows))
    show("\nRoPE minus learned, at 32", rope, learned)
    show("RoPE at 64 minus at 32", rope_64, rope)
    show("RoPE at 128 minus at 32", rope_128, rope)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
