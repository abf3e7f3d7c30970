"""Step 10: unpack numbers of four bits. (Best read after step 01.)

Four bits can tell 16 values apart. How can a weight, which may be 0.0213 or -0.31, be one of 16?
Weights that lie side by side are of about one size. So the packing Q4_1 takes 32 of them, lays 16
equal levels from the smallest to the largest, and stores for each weight the number of the
nearest level, 0 to 15. Beside those it stores two numbers in float16: the distance between two
levels (the scale) and the lowest level (the offset):

    weight = scale · level + offset

A block of 32 weights takes 32 · 4 + 2 · 16 = 160 bits, 20 bytes: 5 bits a weight. In the file they
are the scale, the offset, then 16 bytes with two levels each, the first 16 weights in the low
halves and the others in the high halves.

    python step_10_unpack-numbers-of-four-bits.py

draws outputs/step_10.png. What the rounding costs the model can't be seen here: the exact weights
are not in the file.
"""

import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, figures
from shared.checks import Checks
from shared.console import say
from shared.randomness import generator

real = chapters.load_build(37)  # the finished chapter: what is not on this page

# ---------------------------------------------------------------- the idea


def pack_q4_1(numbers: torch.Tensor) -> np.ndarray:
    """32 numbers -> 20 bytes."""
    offset = numbers.min()
    scale = (numbers.max() - offset) / 15
    level = ((numbers - offset) / scale).round().byte().numpy()  # 0 to 15
    low = level[:16]
    high = level[16:]
    front = np.array([scale, offset], np.float16)
    return np.concatenate((front.view(np.uint8), low + 16 * high))  # front as four bytes


def unpack_q4_1(packed: np.ndarray) -> torch.Tensor:
    """Blocks of 20 bytes -> (blocks, 32) numbers."""
    blocks = packed.reshape(-1, 20)
    front = blocks[:, :4].copy().view(np.float16).astype(np.float32)  # four bytes: two float16
    scale = front[:, :1]
    offset = front[:, 1:]
    low = blocks[:, 4:] % 16  # the low four bits of each byte
    high = blocks[:, 4:] // 16
    level = np.concatenate((low, high), axis=1)
    return torch.from_numpy(scale * level + offset)


# ---------------------------------------------------------------- look at it


def draw_picture(exact: torch.Tensor, packed: torch.Tensor, block: torch.Tensor) -> Path:
    """Left: 32 numbers and their levels. Right: a block of the model's, which is on levels."""
    figure = figures.new_figure(10, 3.6)
    left, right = figure.subplots(1, 2)
    for axes, numbers in ((left, packed), (right, block)):
        low = numbers.min().item()
        step = (numbers.max().item() - low) / 15
        axes.hlines([low + level * step for level in range(16)], 0, 31, color="0.85")
        axes.plot(numbers, "o", color=figures.COLOURS[0])
        axes.set(xlabel="place in the block")
    left.plot(exact, "x", color=figures.COLOURS[1])
    left.set(title="32 random numbers (x), and unpacked (dots)")
    right.set(title="32 weights of the model")
    return figures.save(figure, __file__)


def main() -> int:
    exact = 0.1 * torch.randn(32, generator=generator(1, "step_10"))
    ours = unpack_q4_1(pack_q4_1(exact))[0]
    file = real.WeightsFile(real.packaged_weights())
    name = "blk.7.ffn_up.weight"
    stored = file.tensors[name]
    packed = file.raw[stored.start : stored.start + stored.n_bytes]
    block = unpack_q4_1(packed[:20])[0]
    say("The first block of " + name + " has these 20 bytes:")
    say(bytes(packed[:20]).hex(" "))
    some = ", ".join(f"{weight:.4f}" for weight in block[:4])
    say(f"They are 32 weights, the first four of them {some}.")
    draw_picture(exact, ours, block)
    say("\nIn outputs/step_10.png every dot lies on one of 16 lines.")

    checks = Checks()
    unpacked = unpack_q4_1(packed).view(1536, 576)
    checks.equal("a matrix, by gguf", unpacked, file.read(name))
    checks.equal("bytes: 5 bits a weight", len(packed), 1536 * 576 * 5 // 8)
    levels = len(block.unique())
    checks.between("different weights", levels, 2, 16)
    step = (exact.max() - exact.min()).item() / 15
    worst = (ours - exact).abs().max().item() / step
    checks.between("worst error, in levels", worst, 0, 0.51)  # 0.5, and float16's own rounding
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
