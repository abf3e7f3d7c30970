"""Step 09: how can RoPE be stretched so that no angle is new and neighbours stay apart?

Step 08 left two remedies for texts longer than those of the training. Linear scaling slows all
pairs of channels: no angle is new, but the fast pairs, which tell neighbours apart, are slowed too.
NTK scaling slows fast pairs less, but then the slow ones still meet new angles.

But only pairs that never came round in training can meet a new angle. So slow these by the whole
factor, leave alone the pairs that came round often, and mix both for the pairs between them. The
fast pairs then tell neighbours apart as they always did. Two forms of this are in use:

- Llama 3.1's: pairs that came round 4 times or more are left alone. Below that, the mixture goes by
  how often they did.
- YaRN (Peng et al. 2023): pairs that came round 32 times or more are left alone. Below that, the
  mixture goes by the number of the pair. It also makes scores larger, since in a longer text more
  keys share the softmax. For that, the tables that turn queries and keys are multiplied by
  `length`, so scores by its square: 1.46 for a text 8 times as long. gpt-oss does so. DeepSeek-V3,
  where only a part of a head's channels is turned, multiplies whole scores instead: `on_scores`.

    python step_09_slow-only-the-slow-pairs.py

draws outputs/step_09.png.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console
from shared.checks import Checks

step_08 = chapters.load_step(38, 8)
RopeScaling = step_08.RopeScaling
rope_speeds = step_08.rope_speeds

# ---------------------------------------------------------------- the idea


@dataclass(frozen=True)
class Llama3Scaling(RopeScaling):
    """Only pairs that turn seldom are slowed (Llama 3.1's code, apply_scaling).

    What counts is how often a pair turns over in the training's length. More than `high` times: it
    keeps its speed. Less than `low` times: it is slowed by the factor. Between them: a mixture.
    """

    trained: int  # positions that the model was trained on
    low: float = 1.0
    high: float = 4.0

    def speeds(self, base: float, width: int) -> torch.Tensor:
        speed = rope_speeds(base, width)
        turns = self.trained * speed / (2 * math.pi)
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return kept * speed + (1 - kept) * speed / self.factor


@dataclass(frozen=True)
class YaRNScaling(RopeScaling):
    """The same idea, and larger scores (Peng et al. 2023, sections 3.2 and 3.4).

    The paper mixes by the number of turns, as Llama 3 does. Its authors' code, which all models
    follow, mixes by the number of the pair, between the pairs that turn `fast` and `slow` times.
    """

    trained: int  # positions that the model was trained on
    fast: float = 32.0
    slow: float = 1.0
    whole: bool = True  # whether the two ends of the mixture are rounded to whole pairs
    on_scores: bool = False  # enlarge all of a score, also what comes from channels not turned

    @property
    def length(self) -> float:
        return 1.0 if self.on_scores else yarn_length(self.factor)

    @property
    def score_factor(self) -> float:
        return yarn_length(self.factor) ** 2 if self.on_scores else 1.0

    def speeds(self, base: float, width: int) -> torch.Tensor:
        def pair_that_turns(times: float) -> float:
            return width * math.log(self.trained / (2 * math.pi * times)) / (2 * math.log(base))

        first = pair_that_turns(self.fast)
        last = pair_that_turns(self.slow)
        if self.whole:
            first = math.floor(first)
            last = math.ceil(last)
        first = max(first, 0)
        last = min(last, width - 1)
        if first == last:
            last += 0.001  # not to divide by 0
        pair = torch.arange(width // 2, dtype=torch.float64)
        slowed = ((pair - first) / (last - first)).clamp(0, 1)
        speed = rope_speeds(base, width)
        return (1 - slowed) * speed + slowed * speed / self.factor


def yarn_length(factor: float) -> float:
    """0.1 ln factor + 1 (Peng et al. 2023, section 3.4); a score then has the square of it.

    The longer the text, the more keys share the softmax; larger scores make up for that.
    """
    return 0.1 * math.log(factor) + 1


# ---------------------------------------------------------------- look at it


def main() -> int:
    factor = step_08.FACTOR
    trained = step_08.TRAINED
    scalings = {
        "linear": RopeScaling(factor),
        "NTK": step_08.NTKScaling(factor),
        "Llama 3.1's": Llama3Scaling(factor, trained),
        "YaRN": YaRNScaling(factor, trained),
    }
    speeds = {name: s.speeds(step_08.BASE, step_08.D) for name, s in scalings.items()}
    console.say(f"LLaMA's 64 pairs, trained on {trained:,} positions, in a text 8 times as long:")
    console.say()
    console.say(step_08.scalings_table(speeds))
    console.say(f"\npicture: {step_08.draw_picture(speeds, __file__)}")
    console.say("Look at the last two rows: no new angle, and neighbours as far apart as ever.")

    checks = Checks()
    # Eight circles in training at speed 1; base 16 and 8 channels: speeds 1, 1/2, 1/4 and 1/8.
    circles = 2 * math.pi * 8
    llama = Llama3Scaling(factor=4.0, trained=circles).speeds(16.0, 8)
    by_hand = torch.tensor([1, 1 / 2, 1 / 4 * (1 / 3 + 2 / 3 / 4), 1 / 32], dtype=torch.float64)
    checks.close("Llama 3.1's: 8, 4, 2 and 1 times round", llama, by_hand, 1e-12)
    yarn = YaRNScaling(factor=4.0, trained=circles, fast=8.0, whole=False).speeds(16.0, 8)
    by_hand = torch.tensor([1, 3 / 8, 1 / 8, 1 / 32], dtype=torch.float64)
    checks.close("YaRN: the mixture is 0, 1/3, 2/3 and 1", yarn, by_hand, 1e-12)
    scores = YaRNScaling(factor=40.0, trained=4_096, on_scores=True).score_factor
    checks.close("DeepSeek-V3's scores: (0.1 ln 40 + 1)²", scores, 1.873854, 1e-6)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
