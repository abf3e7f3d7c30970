"""Step 11: RMSNorm does less than LayerNorm. Is it faster?

Count the operations for one entry of a vector. Adding it to a sum counts as one.

    LayerNorm  sum, subtract, square, sum, multiply by 1/std, gain, bias     7
    RMSNorm         square, sum, multiply by 1/size, gain                    4

So RMSNorm is about half the work, as is often said. But what takes the time is bringing the vector
from memory and back. PyTorch's work is done by kernels: small programs, each of which reads its
input and writes its output. Written line by line, as in steps 01 and 02, every operation is a
kernel of its own, and RMSNorm wins since it has fewer. PyTorch's nn.LayerNorm is one kernel that
does all seven while the vector is at hand. Its nn.RMSNorm runs six kernels on a CPU: the four of
the table, and + eps and the root, each on one number a vector. So there the norm with less work
takes more time.

And how much does it matter? All norms of GPT-2 together are 0.054 % of its operations.

    python step_11_what-a-norm-costs.py

measures four norms on this machine and draws outputs/step_11.png.
"""

import math
import sys
from pathlib import Path

import torch
import torch.nn as nn
from torch.utils.benchmark import Timer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console, figures
from shared.checks import Checks
from shared.randomness import generator

LayerNorm = chapters.load_step(7, 1).LayerNorm
RMSNorm = chapters.load_step(7, 2).RMSNorm

D_MODEL = 768
TOKENS = 128
LAYERNORM_OPERATIONS = ("sum", "subtract", "square", "sum", "times 1/std", "gain", "bias")
RMSNORM_OPERATIONS = ("square", "sum", "times 1/size", "gain")

# ---------------------------------------------------------------- the idea


@torch.no_grad()
def microseconds(norm: nn.Module, x: torch.Tensor) -> float:
    """The time of one forward pass: the median of many."""
    timer = Timer("norm(x)", globals={"norm": norm, "x": x})
    return 1e6 * timer.blocked_autorange(min_run_time=0.06).median


def share_in_gpt2() -> float:
    """The operations of GPT-2's norms as a part of all its operations, for one token."""
    norms = 2 * 12 + 1  # two in each of 12 layers, one before the head
    in_norms = norms * len(LAYERNORM_OPERATIONS) * 768
    in_all = 2 * 124_439_808  # for each of its parameters a multiplication and an addition
    return in_norms / in_all


# ---------------------------------------------------------------- look at it


def draw_picture(times: dict[str, float]) -> Path:
    figure = figures.new_figure(7, 2.6)
    axes = figure.subplots()
    colours = [figures.COLOURS[0], figures.COLOURS[1]] * 2
    bars = axes.barh(list(times), list(times.values()), color=colours)
    axes.bar_label(bars, fmt="%.0f", padding=4)
    axes.invert_yaxis()
    axes.set_xlabel(f"microseconds for {TOKENS} tokens of {D_MODEL} channels")
    axes.spines[["top", "right"]].set_visible(False)
    return figures.save(figure, __file__)


def main() -> int:
    x = torch.randn(TOKENS, D_MODEL, generator=generator(1, "step_11"))
    norms = {
        "LayerNorm of step 01": LayerNorm(D_MODEL),
        "RMSNorm of step 02": RMSNorm(D_MODEL),
        "nn.LayerNorm": nn.LayerNorm(D_MODEL, eps=1e-5),
        "nn.RMSNorm": nn.RMSNorm(D_MODEL, eps=1e-5),
    }
    times = dict.fromkeys(norms, math.inf)
    for _ in range(5):  # in turns; the shortest counts, as other programs can only slow a norm down
        for name, norm in norms.items():
            times[name] = min(times[name], microseconds(norm, x))
    console.say(f"picture: {draw_picture(times)}")
    console.say()
    by_hand = times["RMSNorm of step 02"] / times["LayerNorm of step 01"]
    by_torch = times["nn.RMSNorm"] / times["nn.LayerNorm"]
    console.say("RMSNorm's time divided by LayerNorm's, here and now:")
    console.say(f"written line by line {by_hand:.2f}, PyTorch's own {by_torch:.2f}.")
    console.say("Above 1, RMSNorm is the slower one, though it does less.")

    checks = Checks()
    checks.close("norms' part of GPT-2, %", 100 * share_in_gpt2(), 0.054, 5e-4)
    ours = norms["LayerNorm of step 01"](x)
    checks.close("the LayerNorms agree", ours, norms["nn.LayerNorm"](x), 1e-5)
    ours = norms["RMSNorm of step 02"](x)
    checks.close("the RMSNorms agree", ours, norms["nn.RMSNorm"](x), 1e-5)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
