"""Step 15: a norm multiplies each channel by a gain. Which number stands for it in the file?

Chapter 07's RMSNorm stores the gain itself, which starts at 1. Gemma and Qwen3-Next store w, which
starts at 0, and multiply by 1 + w. That has two advantages:

- Weight decay pulls all that is stored to 0. A gain that is stored itself goes to 0 with it, and
  its channel vanishes. A gain of 1 + w goes to 1.
- Numbers near 0 are stored finer. bfloat16 keeps 8 bits of a number, and its next number above 1
  is 1.0078. A step of 0.001 away from 1 is rounded back to 1, however often it is made; away from
  0 it isn't.

A third form has no gain (nanochat). Where a matrix reads what the norm gives, nothing is lost: the
matrix can do the same, its columns times the gains.

In a file, names and shapes don't show the form. If Gemma's w are read as gains, no error comes, but
each gain is too small by 1. And a file may have the 1 added already: llama.cpp adds it when it
makes a GGUF file of Gemma.

    python step_15_store-gains-as-one-plus-w.py

draws outputs/step_15.png. Shapes: C = d_model, the last axis of x (..., C).
"""

import sys
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console, figures
from shared.checks import Checks
from shared.randomness import generator

modern = chapters.load_build(7)
DetailedConfig = chapters.load_build(38).DetailedConfig

# ---------------------------------------------------------------- the idea


def unit_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x / √(mean(x²) + eps) over the last axis, in float32 or better (chapter 07's RMSNorm)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)


class GainPlusOne(modern.RMSNorm):
    """RMSNorm that multiplies by 1 + weight (Gemma): a weight that decays goes to a gain of 1."""

    def __init__(self, d_model: int, eps: float = 1e-5):
        super().__init__(d_model, eps)
        nn.init.zeros_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., C) -> (..., C), in the dtype of x."""
        unit = unit_rms(x, self.eps)
        gain = 1 + self.weight.to(unit.dtype)  # in bfloat16, 1 + 0.003 would be 1
        return (unit * gain).to(x.dtype)


class NoGain(nn.Module):
    """RMSNorm that multiplies by nothing (nanochat): the next matrix can do it."""

    def __init__(self, d_model: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., C) -> (..., C), in the dtype of x."""
        return unit_rms(x, self.eps).to(x.dtype)


RMS_NORMS = {"w": modern.RMSNorm, "1 + w": GainPlusOne, "none": NoGain}


def make_norm(cfg: DetailedConfig, width: int) -> nn.Module:
    """The config's norm for vectors of `width`."""
    if cfg.norm_type == "layernorm":
        return nn.LayerNorm(width, eps=cfg.norm_eps, bias=cfg.norm_bias)
    if cfg.norm_type == "rmsnorm":
        return RMS_NORMS[cfg.norm_gain](width, cfg.norm_eps)
    return modern.make_norm(cfg.norm_type, width, cfg.norm_eps)  # "none": no norm at all


# ---------------------------------------------------------------- look at it

ADDED = {"w": 0.0, "1 + w": 1.0}  # to what is stored


def gain_by_step(form: str, dtype: torch.dtype, slope: float, **settings) -> list[float]:
    """One gain after each of 200 steps of AdamW, where the loss has this slope.

    However steep the slope, AdamW moves a number by about the learning rate.
    """
    norm = RMS_NORMS[form](1).to(dtype)
    optimizer = torch.optim.AdamW(norm.parameters(), **settings)
    gains = []
    for _ in range(200):
        norm.weight.grad = torch.full_like(norm.weight, slope)
        optimizer.step()
        gains.append(ADDED[form] + norm.weight.item())
    return gains


def draw_picture(decayed: dict[str, list[float]], moved: dict[str, list[float]]) -> Path:
    figure = figures.new_figure(8, 3.2)
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, by_form in ((left, decayed), (right, moved)):
        for (form, gains), colour in zip(by_form.items(), figures.COLOURS):
            axes.plot(gains, color=colour, label=f"gain = {form}")
    figures.label(left, "Weight decay alone", "step", "gain")
    figures.label(right, "Steps of 0.001 in bfloat16", "step")
    left.set_ylim(0, 1.3)
    return figures.save(figure, __file__)


def main() -> int:
    decayed = {}
    moved = {}
    for form in ADDED:
        decayed[form] = gain_by_step(form, torch.float32, slope=0.0, lr=0.01, weight_decay=0.5)
        moved[form] = gain_by_step(form, torch.bfloat16, slope=-1.0, lr=0.001, weight_decay=0.0)
    console.say(f"picture: {draw_picture(decayed, moved)}")
    console.say(f"Look at the right ends: stored itself, a gain decays to {decayed['w'][-1]:.2f},")
    console.say("and in bfloat16 steps of 0.001 don't move it away from 1.")

    checks = Checks()
    draw = generator(1, "gains")
    x = torch.randn(3, 1_001, dtype=torch.float64, generator=draw)
    plus_one = GainPlusOne(1_001).double()
    nn.init.normal_(plus_one.weight, std=0.1, generator=draw)
    right = plus_one(x)
    by_torch = F.rms_norm(x, (1_001,), 1 + plus_one.weight, eps=1e-5)
    checks.close("1 + w: torch's with that gain", right, by_torch, 1e-13)
    matrix = torch.randn(7, 1_001, dtype=torch.float64, generator=draw)
    folded = NoGain(1_001)(x) @ (matrix * (1 + plus_one.weight)).T
    checks.close("no gain, but a matrix with it", folded, right @ matrix.T, 1e-11)
    plus_one.bfloat16()
    nn.init.constant_(plus_one.weight, 0.003)
    gain = plus_one(x) / unit_rms(x, 1e-5)
    checks.close("w = 0.003 counts in bfloat16", gain, torch.full_like(x, 1.003), 1e-5)
    checks.close("decay: 0.995 to the 200th", decayed["w"][-1], 0.366958, 1e-5)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
