"""Step 09: how can RoPE be stretched so that no angle is new and neighbours stay apart?

Step 08 left two remedies for texts longer than those of the training. Linear scaling slows all
pairs of channels: no angle is new, but the fast pairs, which tell neighbours apart, are slowed too.
NTK scaling slows fast pairs less, but then the slow ones still meet new angles.

Only pairs that never came round in training can meet a new angle. So slow these by the whole
factor, and leave alone the pairs that came round often: they tell neighbours apart as they always
did. A pair between them gets a mixture of its own speed and the slowed one. Two forms are in use:

- Llama 3.1's: pairs that came round 4 times or more are left alone. Between 1 and 4 times, the
  mixture goes by how often a pair came round.
- YaRN (Peng et al. 2023): pairs that came round 32 times or more are left alone. Between 1 and 32
  times, the mixture goes by the number of the pair, in equal steps.

YaRN also makes scores larger, 1.46 times in a text 8 times as long, since there more keys share the
softmax. gpt-oss multiplies turned queries and turned keys by the root of that. DeepSeek-V3, which
turns only a part of a head's channels, multiplies whole scores instead.

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
    """Only pairs that turn seldom are slowed (Llama 3.1's code, apply_scaling)."""

    trained: int  # positions that the model was trained on
    low: float = 1.0  # a pair that came round less often is slowed by the factor
    high: float = 4.0  # one that came round more often keeps its speed

    def speeds(self, base: float, width: int) -> torch.Tensor:
        speed = rope_speeds(base, width)
        turns = self.trained * speed / (2 * math.pi)
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return kept * speed + (1 - kept) * speed / self.factor


def yarn_length(factor: float) -> float:
    """What queries and keys are multiplied by, so scores by its square (section 3.4)."""
    return 0.1 * math.log(factor) + 1


@dataclass(frozen=True)
class YaRNScaling(RopeScaling):
    """The same idea, and larger scores (Peng et al. 2023, sections 3.2 and 3.4).

    The mixture by the pair's number is the authors' code; their paper has Llama 3.1's form.
    """

    trained: int  # positions that the model was trained on
    fast: float = 32.0  # a pair that came round so often keeps its speed
    slow: float = 1.0  # one that came round so seldom is slowed by the factor
    whole: bool = True  # whether the numbers of these two pairs are rounded, down and up
    on_scores: bool = False  # whether whole scores are multiplied, as in DeepSeek-V3

    @property
    def length(self) -> float:
        return 1.0 if self.on_scores else yarn_length(self.factor)

    @property
    def score_factor(self) -> float:
        return yarn_length(self.factor) ** 2 if self.on_scores else 1.0

    def speeds(self, base: float, width: int) -> torch.Tensor:
        def pair_that_turns(times: float) -> float:
            # Its speed base^(-2i / width) is 2π · times / trained. Solved for i:
            return width * math.log(self.trained / (2 * math.pi * times)) / (2 * math.log(base))

        first = pair_that_turns(self.fast)
        last = pair_that_turns(self.slow)
        if self.whole:
            first = math.floor(first)
            last = math.ceil(last)
        first = max(first, 0)
        last = min(last, width - 1)  # the authors' bound, though there are width / 2 pairs
        if first == last:
            last += 0.001  # not to divide by 0
        pair = torch.arange(width // 2, dtype=torch.float64)
        slowed = ((pair - first) / (last - first)).clamp(0, 1)
        speed = rope_speeds(base, width)
        return (1 - slowed) * speed + slowed * speed / self.factor


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
    console.say(f"YaRN also makes scores {scalings['YaRN'].length ** 2:.2f} times as large.")

    checks = Checks()
    # Base 16 and 8 channels: speeds 1, 1/2, 1/4 and 1/8. In training they come round 8, 4, 2 and 1
    # times. Llama 3.1's keeps the first two and a third of the next; YaRN keeps 1, 2/3, 1/3 and 0.
    circles = 2 * math.pi * 8
    llama = Llama3Scaling(factor=4.0, trained=circles).speeds(16.0, 8)
    by_hand = torch.tensor([1, 1 / 2, 1 / 4 * (1 / 3 + 2 / 3 / 4), 1 / 32], dtype=torch.float64)
    checks.close("Llama 3.1's by hand", llama, by_hand, 1e-12)
    yarn = YaRNScaling(factor=4.0, trained=circles, fast=8.0, whole=False).speeds(16.0, 8)
    by_hand = torch.tensor([1, 3 / 8, 1 / 8, 1 / 32], dtype=torch.float64)
    checks.close("YaRN by hand", yarn, by_hand, 1e-12)
    scores = YaRNScaling(factor=40.0, trained=4_096, on_scores=True).score_factor
    checks.close("DeepSeek-V3's scores", scores, 1.873854, 1e-6)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
