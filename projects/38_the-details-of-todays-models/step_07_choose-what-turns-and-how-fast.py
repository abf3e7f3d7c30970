"""Step 07: choose what turns and how fast.

RoPE reads the channels of a query or key two by two, each pair as a clock hand, and turns the hand
by its speed times the position (chapter 07, step 08). In a score, each pair counts by the cosine of
the angle between the query's hand and the key's. Take a query that looks for exactly this key: in
the same place all their hands agree. The further apart the two stand, the more hands differ, and
the less is left of the score. A model can choose how much that is, in three ways:

- By the base. Pair 0 turns by 1 radian a position, pair i by base^(-2i/D). With a larger base pairs
  turn more slowly, and far keys keep more of their score; but slow pairs hardly tell neighbours
  apart. Gemma 3 (2025) has two bases. In its size 1B, it is 10,000 in the layers that see a window
  of 512 positions, and 1,000,000 in those that see all 32,768.
- By the channels. GPT-NeoX-20B turns a quarter of them (Black et al. 2022): in the config, that is
  rotated=0.25. The others compare content, whatever the distance.
- By the layers. SmolLM3 turns nothing in every fourth layer (after Yang et al. 2025). Such a layer
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

build = chapters.load_build(38)  # the finished chapter: what is not on this page
DetailedConfig = build.DetailedConfig
GroupedAttention = build.GroupedAttention  # its turn() is RoPE by the speeds below; in step 01

# ---------------------------------------------------------------- the idea


def rope_speeds(base: float, width: int) -> torch.Tensor:
    """Radians a position of each pair of channels, (width/2,) float64 (Su et al. 2021, eq. 15)."""
    pair = torch.arange(width // 2, dtype=torch.float64)
    return base ** (-2 * pair / width)


def blind_layer(cfg: DetailedConfig) -> dict:
    """A layer that sees everything and turns nothing: NoPE (Kazemnejad et al. 2023)."""
    return {"window": None, "position_type": "none"}


# ---------------------------------------------------------------- look at it

D = 256  # as in Gemma 3
SMALL_BASE = DetailedConfig(block_size=32_768, d_head=D, rope_base=10_000.0)
SETTINGS = {
    "base 10,000": SMALL_BASE,
    "base 1,000,000": replace(SMALL_BASE, rope_base=1_000_000.0),
    "10,000, a quarter turned": replace(SMALL_BASE, rotated=0.25),
    "nothing turned": replace(SMALL_BASE, **blind_layer(SMALL_BASE)),
}
DISTANCES = [2**n for n in range(15)] + [32_767]


def scores_by_distance(cfg: DetailedConfig) -> torch.Tensor:
    """How a query that equals the key scores at each distance, as a part of that at 0: (T,)."""
    key = torch.ones(D, dtype=torch.float64)  # every pair is as long as the others
    queries = GroupedAttention(cfg).turn(key.expand(cfg.block_size, D), start=0)
    return queries @ key / D  # the key is at position 0, where nothing is turned yet


def left_at(scores: torch.Tensor, distance: int) -> float:
    """A mean over the last tenth of the way: scores swing from one distance to the next."""
    return scores[math.ceil(0.9 * distance) : distance + 1].mean().item()


def draw_picture(scores: dict[str, torch.Tensor]) -> Path:
    figure = figures.new_figure(7, 3.6)
    axes = figure.subplots()
    for (setting, each), colour in zip(scores.items(), figures.COLOURS):
        left = [left_at(each, n) for n in DISTANCES]
        axes.semilogx(DISTANCES, left, "o-", color=colour, label=setting)
    axes.axvline(512, color="0.5", linestyle=":")
    axes.text(460, 0.72, "window", ha="right", color="0.4")
    axes.set_ylim(-0.4, 1.05)  # room for the legend
    figures.label(axes, "What is left of a score", "distance in tokens")
    return figures.save(figure, __file__)


def main() -> int:
    scores = {setting: scores_by_distance(cfg) for setting, cfg in SETTINGS.items()}
    shown = (1, 16, 512, 32_767)
    rows = [[setting, *(f"{left_at(s, n):.1%}" for n in shown)] for setting, s in scores.items()]
    console.say("A query that looks for exactly this key: what is left of its score, by distance")
    console.say()
    console.say(console.Table(["RoPE", *(f"{n:,}" for n in shown)], rows))
    console.say(f"\npicture: {draw_picture(scores)}")
    near = left_at(scores["base 10,000"], 512)
    far = left_at(scores["base 1,000,000"], 32_767)
    console.say(f"Look at Gemma 3: at the end of a window of 512 the small base leaves {near:.0%},")
    console.say(f"and at the end of a text of 32,768 the large one leaves {far:.0%}.")

    checks = Checks()
    by_hand = torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64)  # base 1,000, three pairs
    checks.close("speeds by hand", rope_speeds(1000.0, 6), by_hand, 1e-12)
    angle = torch.outer(torch.arange(32_768), rope_speeds(10_000.0, 64))  # (T, 32)
    by_cosines = (192 + 64 * angle.cos().mean(1)) / 256  # 192 channels aren't turned
    checks.close("a quarter turned", scores["10,000, a quarter turned"], by_cosines, 1e-9)
    gemma = DetailedConfig(**build.RECIPES["gemma3"].changes)
    window_layer = build.layer_config(gemma, 0)  # step 04: layers 0 to 4 have windows, 5 is full
    full_layer = build.layer_config(gemma, 5)
    checks.equal("base with a window", window_layer.rope_base, 10_000.0)
    checks.equal("and without", full_layer.rope_base, 1_000_000.0)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
