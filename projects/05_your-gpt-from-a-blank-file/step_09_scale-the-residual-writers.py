"""Step 09: scale the residual writers.

Step 08 started every matrix with the same σ. But not all matrices are alike: two in each layer
write into the residual stream, attention's last one and the MLP's. L layers add 2L terms to the
stream. A sum of 2L independent terms of one size is √(2L) times as large as one of them. So a deep
stream grows, and what a late block adds counts for little beside it.

The remedy: the matrices that write start √(2L) times smaller, σ/√(2L) (Radford et al. 2019). Then
the sum is equally large at any depth. Measured at width 128, from start to end: the stream grows
1.8-fold with 2 layers and with 100; unscaled it grows 3-fold and 22-fold.

init_parameters finds the writers by their class, ResidualWriter, as names differ: both are "proj"
here, but chapter 07 has a "down_proj". Its std="fan_in" is for chapter 07 alone.

    python step_09_scale-the-residual-writers.py

draws outputs/step_09.png: the size of the stream, block by block, at four depths.
"""

import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console, figures
from shared.checks import Checks
from shared.randomness import generator

step_06 = chapters.load_step(5, 6)
GPT = step_06.GPT
GPTConfig = step_06.GPTConfig
ResidualWriter = chapters.load_step(5, 3).ResidualWriter
start_small = chapters.load_step(5, 8).start_small

DEPTHS = (2, 12, 48, 100)
V = 95

# ---------------------------------------------------------------- the idea


def init_parameters(model: nn.Module, seed: int, std: float | str = 0.02) -> None:
    """Give every parameter its start: N(0, std²) for matrices, 0 for biases, 1 for norm weights.

    A matrix that writes into the residual stream starts √(2L) times smaller: L layers add 2L terms
    to the stream, and so their sum keeps its size (Radford et al. 2019, section 2.3).

    std="fan_in" (chapter 07): 1/√(inputs of the matrix) instead of a number; embeddings keep 0.02.

    The random numbers depend on the seed, the parameter's name and its shape alone, so models of
    equal depth start equal in what they have in common. TypeError if no rule covers a parameter.
    """
    for name, p in model.named_parameters():  # a tied matrix comes once, as token_embedding.weight
        owner = name.rpartition(".")[0]  # "blocks.0.mlp.fc.weight" -> "blocks.0.mlp.fc"
        module = model.get_submodule(owner)
        if p.dim() == 1 and name.endswith("bias"):
            nn.init.zeros_(p)
        elif p.dim() == 1:
            nn.init.ones_(p)
        elif isinstance(module, nn.Linear | nn.Embedding):
            if std != "fan_in":
                start = std
            elif isinstance(module, nn.Embedding):
                start = 0.02
            else:
                start = module.in_features**-0.5
            if isinstance(module, ResidualWriter):
                start /= math.sqrt(2 * model.cfg.n_layers)
            nn.init.normal_(p, std=start, generator=generator(seed, name, tuple(p.shape)))
        else:
            kind = type(module).__name__
            raise TypeError(f"no rule starts {name}, a {tuple(p.shape)} tensor of {kind}")


# ---------------------------------------------------------------- look at it


@torch.no_grad()
def sizes_of_stream(n_layers: int, initialize: Callable, seed: int = 1) -> list[float]:
    """The size of an untrained model's stream at the start and after each block."""
    model = GPT(GPTConfig(n_layers=n_layers, d_model=128), V)
    initialize(model, seed)
    idx = torch.randint(V, (4, 32), generator=generator(seed, "tokens"))
    x = model.embed(idx)
    sizes = [x.std().item()]
    for block in model.blocks:
        x = block(x)
        sizes.append(x.std().item())
    return sizes


def draw_picture(scaled: dict[int, list[float]], unscaled: list[float]) -> Path:
    figure = figures.new_figure(7, 3.8)
    axes = figure.subplots()
    axes.plot(unscaled, color="0.4", linestyle="--", label="unscaled, 100 layers")
    for (n_layers, sizes), colour in zip(scaled.items(), figures.COLOURS):
        axes.plot(sizes, color=colour, label=f"scaled, {n_layers} layers")
        axes.plot(n_layers, sizes[-1], "o", color=colour)
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xticks([0, *DEPTHS], ["start", *map(str, DEPTHS)])
    axes.minorticks_off()
    figures.label(axes, "The size of the stream", "after block (logarithmic)", "standard deviation")
    return figures.save(figure, __file__)


def main() -> int:
    scaled = {n_layers: sizes_of_stream(n_layers, init_parameters) for n_layers in DEPTHS}
    unscaled = {n_layers: sizes_of_stream(n_layers, start_small) for n_layers in DEPTHS}
    draw_picture(scaled, unscaled[100])
    rows = []
    for n_layers in DEPTHS:
        grown = scaled[n_layers][-1] / scaled[n_layers][0]
        grown_unscaled = unscaled[n_layers][-1] / unscaled[n_layers][0]
        rows.append([str(n_layers), f"{grown:.2f}", f"{grown_unscaled:.2f}"])
    console.say("How many times as large the stream is at its end as at its start:")
    console.say(console.Table(["layers", "scaled", "unscaled"], rows))
    console.say("\nLook at 2 and 100 layers: scaled, the growth is the same.")
    console.say("Drawn to outputs/step_09.png.")

    checks = Checks()
    checks.close("scaled: 100 layers : 2", scaled[100][-1] / scaled[2][-1], 1.0, 0.1)
    ratio = unscaled[100][-1] / unscaled[2][-1]
    checks.close("  unscaled: √(100/2)", ratio, math.sqrt(100 / 2), 1.0)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
