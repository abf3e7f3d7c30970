"""Step 15: take one detail away.

What is a detail worth? In a model that is still learning, the other parts make up for what is
missing. A trained model can't: its numbers are fitted to every detail. So we keep all numbers,
change one line of code, and read the same text. The loss says how much the model relied on it.

    python step_15_take-one-detail-away.py

draws outputs/step_15.png. The measure is the perplexity, as a multiple of what it was: 1 means
that nothing changed, 2 that the model is unsure between twice as many tokens.

Guess first. What costs more: RMSNorm that takes out the mean as LayerNorm does, or GELU in SiLU's
place, a curve that is never more than 0.2 away from it? No RoPE at all, or RoPE with the usual
base of 10,000 instead of this model's 100,000? A layer in the middle left out, or the first one?

break_it.py takes 23 details away, reads a longer text, and asks the model a question as well.
"""

import sys
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, figures
from shared.checks import Checks
from shared.console import Table, say

modern = chapters.load_build(7)
real = chapters.load_build(37)
twin = chapters.load_step(37, 8).twin

# ---------------------------------------------------------------- the idea


class MeanTakenOut(modern.RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(-1, keepdim=True))


class GeluForSilu(modern.SwiGLU):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.gelu(self.gate_proj(x)) * self.up_proj(x))


class NoGate(modern.SwiGLU):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.up_proj(x))


class NoRope(real.GroupedQueryAttention):
    def turn(self, x: torch.Tensor, start: int) -> torch.Tensor:
        return x


class UsualBase(real.GroupedQueryAttention):
    def turn(self, x: torch.Tensor, start: int) -> torch.Tensor:
        cos, sin = modern.build_rope_cache(x.shape[2], self.head_dim, base=10_000.0)
        return modern.apply_rope(x, cos, sin)


def exchange(model: real.RealGPT, whole: type[nn.Module], damaged: type[nn.Module]) -> nn.Module:
    """A twin of the model in which each part of type `whole` runs the code of `damaged`."""
    model = twin(model)
    for part in model.modules():
        if type(part) is whole:
            part.__class__ = damaged  # the same numbers, another forward
    return model


def skip(model: real.RealGPT, layer: int) -> nn.Module:
    """A twin of the model without one of its layers."""
    model = twin(model)
    del model.blocks[layer]
    return model


# ---------------------------------------------------------------- look at it


def shown(factor: float) -> str:
    return f"{factor:.2f}" if factor < 100 else f"{factor:,.0f}"


def draw_picture(times: dict[str, float]) -> Path:
    figure = figures.new_figure(8, 3.4)
    axes = figure.subplots()
    bars = axes.barh(list(times), list(times.values()), color=figures.COLOURS[0])
    axes.bar_label(bars, [shown(factor) for factor in times.values()], padding=4)
    axes.set(xscale="log", xlim=(0.9, 1e10), xlabel="times the perplexity of the whole model")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    return figures.save(figure, __file__)


def main() -> int:
    file = real.WeightsFile(real.packaged_weights())
    model = real.load_model(file)
    ids = torch.tensor(real.Tokenizer(file).encode(real.evaluation_text())[:129])
    attention = real.GroupedQueryAttention
    damaged = {
        "RMSNorm takes out the mean": exchange(model, modern.RMSNorm, MeanTakenOut),
        "RoPE's base is 10,000": exchange(model, attention, UsualBase),
        "layer 15 left out": skip(model, 15),
        "GELU for SiLU": exchange(model, modern.SwiGLU, GeluForSilu),
        "no RoPE": exchange(model, attention, NoRope),
        "layer 0 left out": skip(model, 0),
        "no gate": exchange(model, modern.SwiGLU, NoGate),
    }
    whole = real.token_losses(model, ids).mean()
    times = {}
    for what, broken in damaged.items():
        more = real.token_losses(broken, ids).mean() - whole
        times[what] = more.exp().item()  # exp of a difference of losses: a ratio of perplexities
    draw_picture(times)
    rows = [[what, shown(factor)] for what, factor in times.items()]
    say(f"Perplexity of the whole model on 128 tokens: {whole.exp():.2f}\n")
    say(Table(["what is changed", "times the perplexity"], rows))
    say("\nTaking out the mean costs a tenth: step 07 saw that there is little of it. Without")
    say("the gate or the first layer nothing works: the rest was fitted to what they make.")
    say("Drawn: outputs/step_15.png")

    checks = Checks()
    checks.between("RMSNorm takes out the mean", times["RMSNorm takes out the mean"], 1.0, 1.3)
    checks.between("RoPE's base is 10,000", times["RoPE's base is 10,000"], 1.005, 2)
    checks.between("GELU for SiLU", times["GELU for SiLU"], 1.5, 6)
    checks.between("no RoPE", times["no RoPE"], 5, 200)
    after = real.token_losses(model, ids).mean()
    checks.close("the model is as it was", after, whole, 0)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
