"""Step 07: not every channel and not every layer has to turn at the same speeds.

RoPE reads the channels of a query or key two by two, each pair as a clock hand, and turns it by
its speed times the position (chapter 07, step 08). In a score, each pair counts by the angle
between the query's hand and the key's. So even a query that looks for exactly this key loses score
with the distance, as more and more pairs point apart. How much it loses is a matter of choice:

- The base. Pair 0 turns by 1 radian a position, pair i by base^(-2i/D). A larger base makes the
  pairs slower, and far keys keep more of their score; but slow pairs hardly tell neighbours apart.
  Gemma 3 (2025) has two bases. In its size 1B, it is 10,000 in the layers that see a window of 512
  positions, and 1,000,000 in those that see all 32,768.
- The channels. GPT-NeoX-20B turns a quarter of them (Black et al. 2022). The others compare
  content, and the distance is nothing to them. The config's field for this part is `rotated`.
- The layers. SmolLM3 turns nothing in every fourth layer (after Yang et al. 2025). Such a layer
  compares content alone, and the three layers between two of them deal with positions.

    python step_07_choose-what-turns-and-how-fast.py

draws outputs/step_07.png. Shapes: T positions, D channels of a head.
"""

import math
import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console, figures
from shared.checks import Checks
from shared.randomness import generator

modern = chapters.load_build(7)
build = chapters.load_build(38)  # the finished chapter: what is not on this page
DetailedConfig = build.DetailedConfig

# ---------------------------------------------------------------- the idea


def rope_speeds(base: float, width: int) -> torch.Tensor:
    """Radians a position of each pair of channels, (width/2,) float64 (Su et al. 2021, eq. 15)."""
    pair = torch.arange(width // 2, dtype=torch.float64)
    return base ** (-2 * pair / width)


def rope_tables(cfg: DetailedConfig, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine for `width` channels at every position, (block_size, width/2), float64."""
    position = torch.arange(cfg.block_size, dtype=torch.float64)
    if cfg.rope_scaling is None:
        angle = torch.outer(position, rope_speeds(cfg.rope_base, width))
        return angle.cos(), angle.sin()
    angle = torch.outer(position, cfg.rope_scaling.speeds(cfg.rope_base, width))  # step 08
    length = cfg.rope_scaling.length
    return length * angle.cos(), length * angle.sin()


def turn(x: torch.Tensor, cfg: DetailedConfig) -> torch.Tensor:
    """x (..., T, D) with the first n_turned of D channels turned. In build.py it is a method."""
    if cfg.position_type != "rope":
        return x
    cos, sin = rope_tables(cfg, cfg.n_turned)  # rotated · D channels
    turned = modern.apply_rope(x[..., : cfg.n_turned], cos, sin)
    return torch.cat((turned, x[..., cfg.n_turned :]), dim=-1)


def window_layer(cfg: DetailedConfig) -> dict:
    """A layer that sees a window; if its RoPE has a base of its own, that is not scaled either."""
    if cfg.window_rope_base is None:
        return {}
    return {"rope_base": cfg.window_rope_base, "rope_scaling": None}


def blind_layer(cfg: DetailedConfig) -> dict:
    """A layer that sees everything and turns nothing: NoPE (Kazemnejad et al. 2023).

    Layers of both sorts in turn are Yang et al.'s (2025).
    """
    return {"window": None, "position_type": "none"}


# ---------------------------------------------------------------- look at it

D = 256
SMALL_BASE = DetailedConfig(block_size=32_768, d_head=D, rope_base=10_000.0)
SETTINGS = {
    "base 10,000": SMALL_BASE,
    "base 1,000,000": replace(SMALL_BASE, rope_base=1_000_000.0),
    "10,000, a quarter turned": replace(SMALL_BASE, rotated=0.25),
    "nothing turned": replace(SMALL_BASE, **blind_layer(SMALL_BASE)),
}
DISTANCES = [2**n for n in range(15)] + [32_767]


def score_left(cfg: DetailedConfig) -> dict[int, float]:
    """How a query that equals the key scores, by distance: as a part of its score at distance 0.

    The key is all ones, so that every pair counts alike. Scores swing a little from one distance to
    the next, so each number is a mean over the last tenth of the distances up to it.
    """
    key = torch.ones(D, dtype=torch.float64)  # at position 0, where nothing is turned yet
    scores = turn(key.expand(cfg.block_size, D), cfg) @ key / D  # (T,)
    return {n: scores[math.ceil(0.9 * n) : n + 1].mean().item() for n in DISTANCES}


def draw_picture(left: dict[str, dict[int, float]]) -> Path:
    figure = figures.new_figure(7, 3.6)
    axes = figure.subplots()
    for (setting, scores), colour in zip(left.items(), figures.COLOURS):
        axes.semilogx(scores.keys(), scores.values(), "o-", color=colour, label=setting)
    axes.axvline(512, color="0.5", linestyle=":")
    axes.text(460, 0.72, "window", ha="right", color="0.4")
    axes.set_ylim(-0.4, 1.05)  # room for the legend
    figures.label(axes, "What is left of a score", "distance in tokens")
    return figures.save(figure, __file__)


def main() -> int:
    left = {setting: score_left(cfg) for setting, cfg in SETTINGS.items()}
    shown = (1, 16, 512, 32_767)
    rows = [[setting, *(f"{scores[n]:.1%}" for n in shown)] for setting, scores in left.items()]
    console.say("A query that looks for exactly this key: what is left of its score, by distance")
    console.say()
    console.say(console.Table(["RoPE", *(f"{n:,}" for n in shown)], rows))
    console.say(f"\npicture: {draw_picture(left)}")
    console.say("Look at 512 in the first row and 32,767 in the second: at the far end of what it")
    console.say("sees, each of Gemma 3's two sorts of layer still has 21 to 26 % of the score.")

    checks = Checks()
    by_hand = torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64)
    checks.close("speeds, base 1,000, 6 channels", rope_speeds(1000.0, 6), by_hand, 1e-12)
    gemma = DetailedConfig(**build.RECIPES["gemma3"].changes)
    windowed = replace(gemma, **window_layer(gemma))
    checks.equal("Gemma 3's window layers: base", windowed.rope_base, 10_000.0)
    checks.equal("and its full ones", gemma.rope_base, 1_000_000.0)
    cfg = DetailedConfig(block_size=7, n_heads=3, n_kv_heads=3, d_model=30, rotated=0.4)
    x = torch.randn(7, 10, generator=generator(1, "step_07"), dtype=torch.float64)
    angle = torch.outer(torch.arange(7), rope_speeds(cfg.rope_base, 4))
    hands = torch.view_as_complex(x[:, :4].unflatten(1, (2, 2)))  # pairs as complex numbers
    hands = hands * torch.polar(torch.ones_like(angle), angle)
    expected = torch.cat((torch.view_as_real(hands).flatten(1), x[:, 4:]), dim=1)
    checks.close("4 of 10 channels, by complex numbers", turn(x, cfg), expected, 1e-12)
    in_build = build.GroupedAttention(cfg).turn(x, start=0)
    checks.equal("build.py's attention: the same", in_build, turn(x, cfg))
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
