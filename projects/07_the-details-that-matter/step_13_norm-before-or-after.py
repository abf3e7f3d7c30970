"""Step 13: what changes when the norm stands behind the + instead of before the layer?

    pre-norm    x = x + attn(norm(x))      chapter 05's, GPT-2's and today's order
    post-norm   x = norm(x + attn(x))      the first transformer's (Vaswani et al. 2017)

In pre-norm the stream runs from the first layer to the last through + alone. So it grows with
depth, and the norm before the head divides it by its size. A late layer adds to a stream that is
already large, so it counts for less. The more layers there are, the smaller is the last one's
gradient: it falls as 1/√L. In post-norm every sum goes through a norm, so the stream doesn't grow,
and the last layer's gradient doesn't depend on the depth (Xiong et al. 2020, theorem 1). It is
large from the first step on, so post-norm models are trained with a warm-up: small steps first.

This is so from plain initial weights, of std 1/√(inputs). GPT-2's start also divides the weights
that write into the stream by √(2L). A gradient that flows back through such weights shrinks with
them, in both orders. So from GPT-2's start the last gradient falls as 1/√L in post-norm too. There
pre-norm's is some 30 times larger: its stream is small, of size 0.03, and a norm that divides by a
small number multiplies the gradient.

    python step_13_norm-before-or-after.py

draws outputs/step_13.png. Nothing is trained here.

Shapes: B batch, T positions, C = d_model, L layers.
"""

import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console, data, figures
from shared.checks import Checks
from shared.randomness import generator

gpt = chapters.load_build(5)
step_03 = chapters.load_step(7, 3)

DEPTHS = (2, 6, 12, 24)

# ---------------------------------------------------------------- the idea


class PreNormBlock(step_03.NormBlock):
    """Chapter 05's order, written out here to compare: normalise what a layer reads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, T, C) -> (B, T, C)."""
        x = x + self.attn(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x


class PostNormBlock(step_03.NormBlock):
    """The other order: add, then normalise the sum."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, T, C) -> (B, T, C)."""
        x = self.norm1(x + self.attn(x))
        x = self.norm2(x + self.mlp(x))
        return x


class PostNormGPT(step_03.NormGPT):
    def make_block(self, cfg: step_03.NormConfig) -> PostNormBlock:
        return PostNormBlock(cfg)


# ---------------------------------------------------------------- look at it


def gradients_by_layer(model_class: type, n_layers: int, start: str) -> list[float]:
    """The length of dL/d(mlp.fc.weight) in each layer, untrained, on one batch of text."""
    corpus = data.load_corpus("docs", "char", 32)
    model = model_class(step_03.NormConfig(n_layers=n_layers), corpus.vocab_size)
    gpt.init_parameters(model, seed=1, std="fan_in" if start == "plain" else 0.02)
    if start == "plain":  # take back chapter 05's division by √(2L)
        for block in model.blocks:
            block.attn.proj.weight.data *= math.sqrt(2 * n_layers)
            block.mlp.proj.weight.data *= math.sqrt(2 * n_layers)
    idx, targets = data.sample_batch(corpus.train, 32, 8, generator(1, "batches"))
    _, loss = model(idx, targets)
    loss.backward()
    return [block.mlp.fc.weight.grad.norm().item() for block in model.blocks]


def power_of_depth(last: list[float]) -> float:
    """p if the last layer's gradient goes as L^p: the slope of its logarithm over that of L."""
    return math.log(last[-1] / last[0]) / math.log(DEPTHS[-1] / DEPTHS[0])


def main() -> int:
    figure = figures.new_figure(9, 3.4)
    panels = figure.subplots(1, 3)
    orders = {"pre-norm": step_03.NormGPT, "post-norm": PostNormGPT}
    powers = {}
    for (order, model_class), colour in zip(orders.items(), figures.COLOURS):
        for axes, start in zip(panels[1:], ("plain", "GPT-2's")):
            runs = [gradients_by_layer(model_class, n_layers, start) for n_layers in DEPTHS]
            last = [gradients[-1] for gradients in runs]
            powers[order, start] = power_of_depth(last)
            axes.loglog(DEPTHS, last, "o-", color=colour, label=order)
            axes.set(title=f"last layer, {start} start", xlabel="layers in the model")
            axes.set_xticks(DEPTHS, DEPTHS)
            axes.minorticks_off()
            axes.set_ylim(1e-3, 0.5)
            if start == "plain":
                panels[0].plot(range(1, DEPTHS[-1] + 1), runs[-1], color=colour)
    panels[0].set(title="each of 24 layers, plain start", xlabel="layer", ylabel="gradient")
    panels[1].legend(frameon=False)
    console.say(f"picture: {figures.save(figure, __file__)}")
    console.say()
    console.say("p, where the last layer's gradient goes as L to the power p:")
    console.say()
    rows = [[order, start, f"{power:+.2f}"] for (order, start), power in powers.items()]
    console.say(console.Table(["order", "start", "p"], rows))
    console.say()
    console.say("Look at post-norm: p is near 0 from a plain start, and near -1/2 from GPT-2's.")

    checks = Checks()
    checks.close("plain pre-norm: p = -1/2", powers["pre-norm", "plain"], -0.5, 0.2)
    checks.close("plain post-norm: p = 0", powers["post-norm", "plain"], 0.0, 0.2)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
