"""Step 08: how can a model read texts that are longer than those of its training?

RoPE turns a pair of channels by its speed times the position (chapter 07, step 08). Fast pairs came
round many times in training: they have met every angle, and a longer text brings no new one. The
slowest pairs never came round. LLaMA was trained on 2,048 positions, and 23 of the 64 pairs of a
head turn by less than a circle in them. In a longer text these go on to angles that the model has
never met, and nothing has taught it what they mean. Two remedies:

- Linear scaling: turn all pairs `factor` times slower, so that position t turns as t / factor did
  (Chen et al. 2023). No angle is new. But neighbours now differ by less: from one token to the
  next, the fastest pair turned by 1 radian, and now turns by 1/8 of that, if the factor is 8. So
  the model needs more training, 1,000 steps in the paper. Gemma 3's larger sizes do this in their
  full layers.
- NTK scaling (named after a theory of training, the neural tangent kernel): enlarge the base
  instead (Peng et al. 2023, section 3.1). The fastest pair keeps its speed, the slowest turns
  `factor` times slower, and each pair between them is slowed by something between. It was meant to
  work without more training. But of the pairs that never came round, all except the slowest still
  go on to some new angles.

Step 09 has the remedy that most models of today chose.

    python step_08_stretch-rope-to-longer-texts.py

draws outputs/step_08.png.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console, figures
from shared.checks import Checks

build = chapters.load_build(38)  # the finished chapter: what is not on this page
DetailedConfig = build.DetailedConfig
rope_speeds = build.rope_speeds  # step 07

# ---------------------------------------------------------------- the idea


@dataclass(frozen=True)
class RopeScaling:
    """Slower turning, for a text `factor` times as long as those of the training.

    This one slows all pairs alike, and no angle is new: position t turns as t / factor did (Chen et
    al. 2023, eq. 4).
    """

    factor: float
    length = 1.0  # what turned queries and keys are multiplied by; YaRN (step 09) has more
    score_factor = 1.0  # what scores are multiplied by; YaRN may have more

    def speeds(self, base: float, width: int) -> torch.Tensor:
        """As rope_speeds(), but slowed."""
        return rope_speeds(base, width) / self.factor


@dataclass(frozen=True)
class NTKScaling(RopeScaling):
    """A larger base (Peng et al. 2023, section 3.1): the slowest pair turns `factor` times slower.

    The fastest one turns as before, so that neighbours are still told apart.
    """

    def speeds(self, base: float, width: int) -> torch.Tensor:
        # The slowest speed is base^(-(width - 2) / width). So this power divides it by `factor`.
        return rope_speeds(base * self.factor ** (width / (width - 2)), width)


def rope_tables(cfg: DetailedConfig, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What step 01's attention turns by: cosines and sines, each (block_size, width/2), float64."""
    scaling = cfg.rope_scaling or RopeScaling(factor=1.0)  # which changes nothing
    position = torch.arange(cfg.block_size, dtype=torch.float64)
    angle = torch.outer(position, scaling.speeds(cfg.rope_base, width))
    return scaling.length * angle.cos(), scaling.length * angle.sin()


# ---------------------------------------------------------------- look at it

TRAINED = 2_048  # LLaMA's: positions of its training,
D = 128  # channels of a head,
BASE = 10_000.0  # and base
FACTOR = 8
PLAIN = rope_speeds(BASE, D)
TURNS = TRAINED * PLAIN / (2 * math.pi)  # how often each pair came round in training


def pairs_with_new_angles(speeds: torch.Tensor) -> int:
    """How many pairs meet an angle that is new, at these speeds, in a text FACTOR times as long."""
    in_training = TRAINED * PLAIN  # each pair's largest angle
    in_long_text = FACTOR * TRAINED * speeds
    new = (TURNS < 1) & (in_long_text > in_training + 1e-6)  # a millionth may be rounding
    return int(new.sum())


def scalings_table(scalings: dict[str, torch.Tensor]) -> console.Table:
    """A row for each entry: a name, and the speeds that it stands for."""
    rows = []
    for name, speeds in scalings.items():
        rows.append([name, str(pairs_with_new_angles(speeds)), f"{speeds[0].item():.3f}"])
    columns = ["scaling", "pairs that meet new angles", "fastest pair, radians a token"]
    return console.Table(columns, rows)


def draw_picture(scalings: dict[str, torch.Tensor], script: str) -> Path:
    """The speed of each pair after scaling as a part of that before; `script` is its __file__."""
    figure = figures.new_figure(7, 3.4)
    axes = figure.subplots()
    for (name, speeds), colour in zip(scalings.items(), figures.COLOURS):
        axes.semilogx(TURNS, speeds / PLAIN, ".-", color=colour, label=name)
    axes.axvspan(TURNS[-1], 1, color="0.9", linewidth=0)
    axes.text(TURNS[-1] * 1.1, 0.6, "never came round", color="0.4")
    axes.set_ylim(0, 1.05)
    figures.label(axes, "Speed after / before", "how often a pair came round in training")
    return figures.save(figure, script)


def main() -> int:
    scalings = {
        "linear": RopeScaling(FACTOR).speeds(BASE, D),
        "NTK": NTKScaling(FACTOR).speeds(BASE, D),
        "not scaled": PLAIN,
    }
    console.say(f"LLaMA's 64 pairs, trained on {TRAINED:,} positions, in a text 8 times as long:")
    console.say()
    console.say(scalings_table(scalings))
    console.say(f"\npicture: {draw_picture(scalings, __file__)}")
    console.say("Look at the column of new angles: linear scaling leaves none, and NTK 22 of 23.")
    console.say("The last column is the price of linear scaling.")

    checks = Checks()
    long = DetailedConfig(block_size=72, rope_base=500.0, rope_scaling=RopeScaling(8.0))
    short = DetailedConfig(block_size=9, rope_base=500.0)
    tables = torch.stack(rope_tables(long, 6))  # (2, T, 3): cosines, sines
    expected = torch.stack(rope_tables(short, 6))
    checks.close("linear: 8t turns as t", tables[:, ::8], expected, 1e-12)
    by_hand = torch.tensor([1.0, 0.01 / 9], dtype=torch.float64)  # √10,000 is 100, √9² is 9
    checks.close("NTK by hand", NTKScaling(9.0).speeds(10_000.0, 4), by_hand, 1e-12)
    # 10,000^(i/64) > 2,048 / 2π from i = 64 ln 325.9 / ln 10,000 = 40.2 on: pairs 41 to 63.
    checks.equal("never came round", pairs_with_new_angles(PLAIN), 23)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
