"""Step 13: what changes when the norm stands behind the + instead of before each part?

    pre-norm    x = x + attn(norm(x))      chapter 05's, GPT-2's and today's order
    post-norm   x = norm(x + attn(x))      the first transformer's (Vaswani et al. 2017)

In pre-norm the stream runs from the first layer to the last through + alone. Each of L layers adds
to it, and L random terms of one size add up to √L times that size. The norm before the head
divides by the size of the sum. So the last layer counts for 1/√L, and its gradient falls as 1/√L:
with four times the layers it is half as large.

In post-norm every sum goes through a norm, so the stream doesn't grow, and the last layer's
gradient doesn't depend on the depth (Xiong et al. 2020, theorem 1). It is large from the first step
on, so post-norm models are trained with a warm-up: small steps first.

All this is so from a plain start: weights of std 1/√(inputs). GPT-2's start makes the weights that
write into the stream √(2L) times smaller. A layer's gradient comes back through these weights, so
it becomes smaller with them: in post-norm it now falls as 1/√L too. In pre-norm it still falls as
1/√L. The stream hardly grows now, so the norm's 1/√L is gone, but the weights' has come instead.

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
STARTS = {"plain": "fan_in", "GPT-2's": 0.02}  # the std of the matrices; fan_in: 1/√(inputs)

# ---------------------------------------------------------------- the idea


class PreNormBlock(step_03.NormBlock):
    """Chapter 05's order, written out here to compare: normalize what each part reads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, T, C) -> (B, T, C)."""
        x = x + self.attn(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x


class PostNormBlock(step_03.NormBlock):
    """The other order: add, then normalize the sum."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, T, C) -> (B, T, C)."""
        x = self.norm1(x + self.attn(x))
        x = self.norm2(x + self.mlp(x))
        return x


class PreNormGPT(step_03.NormGPT):
    def make_block(self, cfg: step_03.NormConfig) -> PreNormBlock:
        return PreNormBlock(cfg)


class PostNormGPT(step_03.NormGPT):
    def make_block(self, cfg: step_03.NormConfig) -> PostNormBlock:
        return PostNormBlock(cfg)


# ---------------------------------------------------------------- look at it


def gradients_by_layer(model_class: type, n_layers: int, start: str) -> list[float]:
    """The length of dL/d(mlp.fc.weight) in each layer, untrained, on one batch of text."""
    corpus = data.load_corpus("docs", "char", 32)
    model = model_class(step_03.NormConfig(n_layers=n_layers), corpus.vocab_size)
    gpt.init_parameters(model, seed=1, std=STARTS[start])
    if start == "plain":
        for block in model.blocks:  # take back chapter 05's division by √(2L)
            block.attn.proj.weight.data *= math.sqrt(2 * n_layers)
            block.mlp.proj.weight.data *= math.sqrt(2 * n_layers)
    idx, targets = data.sample_batch(corpus.train, 32, 8, generator(1, "batches"))
    _, loss = model(idx, targets)
    loss.backward()
    return [block.mlp.fc.weight.grad.norm().item() for block in model.blocks]


def power_of_depth(last: list[float]) -> float:
    """p if the last layer's gradient goes as L^p: the slope of its logarithm over that of L."""
    return math.log(last[-1] / last[0]) / math.log(DEPTHS[-1] / DEPTHS[0])


def draw_picture(each: dict[str, list[float]], last: dict[tuple[str, str], list[float]]) -> Path:
    """Left: each layer's gradient in the deepest model. Others: the last layer's, by depth."""
    figure = figures.new_figure(9, 3.4)
    left, plain, gpt_2 = figure.subplots(1, 3)
    for order, colour in zip(each, figures.COLOURS):
        left.plot(range(1, DEPTHS[-1] + 1), each[order], color=colour, label=order)
        plain.loglog(DEPTHS, last[order, "plain"], "o-", color=colour)
        gpt_2.loglog(DEPTHS, last[order, "GPT-2's"], "o-", color=colour)
    left.set(title="each of 24 layers, plain start", xlabel="layer", ylabel="gradient")
    left.set_ylim(0, 0.18)
    left.legend(frameon=False, loc="upper left")
    for axes, start in ((plain, "plain"), (gpt_2, "GPT-2's")):
        axes.set(title=f"last layer, {start} start", xlabel="layers in the model", ylim=(1e-3, 0.5))
        axes.set_xticks(DEPTHS, DEPTHS)
        axes.minorticks_off()
    return figures.save(figure, __file__)


def main() -> int:
    each = {}
    last = {}
    powers = {}
    for order, model_class in (("pre-norm", PreNormGPT), ("post-norm", PostNormGPT)):
        for start in STARTS:
            runs = [gradients_by_layer(model_class, n_layers, start) for n_layers in DEPTHS]
            last[order, start] = [gradients[-1] for gradients in runs]
            powers[order, start] = power_of_depth(last[order, start])
            if start == "plain":
                each[order] = runs[-1]
    console.say(f"picture: {draw_picture(each, last)}")
    console.say()
    console.say("p, where the last layer's gradient goes as L to the power p (-0.5: it falls as")
    console.say("1/√L; 0: it doesn't depend on L):")
    console.say()
    rows = [[order, start, f"{power:+.2f}"] for (order, start), power in powers.items()]
    console.say(console.Table(["order", "start", "p"], rows))
    console.say()
    console.say("Look at post-norm: p is near 0 from a plain start, and near -0.5 from GPT-2's.")
    console.say("Pre-norm's is near -0.5 from both. Left panel: some say that post-norm starves")
    console.say("the first layers, with gradients near 0. Here the first layers' gradients are")
    console.say("like those of the others, within a factor of about 2. Right panel: pre-norm's")
    console.say("line is far higher, since the norm before the head divides by a small stream.")

    checks = Checks()
    checks.close("plain pre-norm: p = -1/2", powers["pre-norm", "plain"], -0.5, 0.2)
    checks.close("plain post-norm: p = 0", powers["post-norm", "plain"], 0.0, 0.2)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
