"""Step 09: scale the residual writers.

Step 08 started every matrix with the same σ. But L layers write 2L terms into one stream, and a sum of 2L
independent terms has √(2L) times the size of one. So the matrices that write get σ/√(2L) (Radford et al. 2019), and
the stream ends equally large at any depth. They are found by their type, ResidualWriter: a name is only a name.

It leaves out what training makes of it (step 10).

    python step_09_scale-the-residual-writers.py

It measures the stream's size by depth in models of 2, 12, 48 and 100 layers, and how evenly the gradient reaches
them, with the scaling and without, and draws the stream to outputs/step_09.png. About 7 seconds.
"""

import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, comparison, console, figures
from shared.checks import Checks
from shared.randomness import generator

step_06, step_08 = chapters.load_step(5, 6), chapters.load_step(5, 8)
GPT, GPTConfig = step_06.GPT, step_06.GPTConfig
ResidualWriter = chapters.load_step(5, 3).ResidualWriter

DEPTHS, WIDTH, V, SEEDS = (2, 12, 48, 100), 128, 95, (1, 2, 3)


def init_parameters(model: nn.Module, seed: int, std: float | str = 0.02) -> None:
    """Give every parameter its start: N(0, std²) for matrices, 0 for biases, 1 for norm weights.

    A matrix that writes into the residual stream starts √(2L) times smaller: L layers add 2L terms
    to the stream, and so their sum keeps its size (Radford et al. 2019, section 2.3).

    std="fan_in", which only chapter 07 uses, means 1/√(inputs of the matrix) instead of a number;
    embeddings then keep 0.02.

    A start depends on the seed, the parameter's name and its shape, and on nothing else: two
    models start with equal numbers in every parameter that they have in common (writers: at equal
    depth). Raises TypeError for a parameter that no rule covers.
    """
    for name, p in model.named_parameters():  # a tied matrix comes once, as token_embedding.weight
        owner = name.rpartition(".")[0]  # "blocks.0.mlp.fc.weight" -> "blocks.0.mlp.fc"
        module = model.get_submodule(owner)
        if p.dim() == 1 and name.endswith("bias"):
            nn.init.zeros_(p)
        elif p.dim() == 1:
            nn.init.ones_(p)
        elif isinstance(module, nn.Linear | nn.Embedding):
            start = std
            if std == "fan_in":
                start = 0.02 if isinstance(module, nn.Embedding) else module.in_features**-0.5
            if isinstance(module, ResidualWriter):
                start /= math.sqrt(2 * model.cfg.n_layers)
            nn.init.normal_(p, std=start, generator=generator(seed, name, tuple(p.shape)))
        else:
            kind = type(module).__name__
            raise TypeError(f"no rule starts {name}, a {tuple(p.shape)} tensor of {kind}")


def measure(n_layers: int, start: Callable, seed: int) -> tuple[list[float], float]:
    """The std of a fresh model's stream where it starts and after each block, on random tokens; and the norm of the
    gradient in its first block over that in its last."""
    model = GPT(GPTConfig(n_layers=n_layers, d_model=WIDTH), V)
    start(model, seed)
    idx, targets = (torch.randint(V, (4, 32), generator=generator(seed, name)) for name in ("tokens", "targets"))
    x, stds = idx, []
    for part in (model.embed, *model.blocks):
        x = part(x)
        stds.append(x.std().item())
    F.cross_entropy(model.lm_head(model.norm_f(x)).flatten(0, 1), targets.flatten()).backward()
    first, last = (nn.utils.get_total_norm([p.grad for p in model.blocks[i].parameters()]).item() for i in (0, -1))
    return stds, first / last


def draw_streams(streams: dict[tuple[bool, int], list[float]]) -> object:
    axes = figures.new_figure(8, 4.8).subplots()
    axes.plot(streams[False, 100], color="0.4", linestyle="--", label="writers start with σ: one curve, cut anywhere")
    for n_layers, colour in zip(DEPTHS, figures.COLOURS):
        stream = streams[True, n_layers]
        axes.plot(stream, color=colour, label=f"writers start with σ/√(2L), L = {n_layers}")
        for scaled in (True, False):
            axes.plot(n_layers, streams[scaled, n_layers][-1], "o", color=colour)
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xticks([0, 1, *DEPTHS], ["start", "1", *map(str, DEPTHS)])
    axes.set_yscale("log")
    axes.set_yticks((0.03, 0.05, 0.1, 0.2, 0.5), ("0.03", "0.05", "0.1", "0.2", "0.5"))
    axes.minorticks_off()
    axes.set_xlabel("after block")
    axes.set_ylabel("std of the residual stream")
    axes.set_title(
        f"The stream of a fresh model, width {WIDTH}, σ = 0.02; dots: where it ends", loc="left", fontsize=11
    )
    axes.legend(frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    return axes.figure


def main() -> int:
    checks, streams, growth, gradient, rows = Checks(), {}, {}, {}, []
    for n_layers in DEPTHS:
        for scaled, start in ((True, init_parameters), (False, step_08.start_small)):
            runs = [measure(n_layers, start, seed) for seed in SEEDS]
            streams[scaled, n_layers] = runs[0][0]
            growth[scaled, n_layers] = [stds[-1] / stds[0] for stds, _ in runs]
            gradient[scaled, n_layers] = [ratio for _, ratio in runs]
        columns = (found[scaled, n_layers] for found in (growth, gradient) for scaled in (True, False))
        rows.append([str(n_layers), *(f"{sum(column) / len(SEEDS):.2f}" for column in columns)])
    console.say(
        f"The stream's end over its start, the first block's gradient over the last's; mean of {len(SEEDS)} seeds:"
    )
    console.say(console.Table(["layers", "stream, scaled", "unscaled", "gradient, scaled", "unscaled"], rows))

    for scaled, low, high in ((True, 0.9, 1.1), (False, 4.0, 12.0)):
        ratio = comparison.interval([deep / flat for deep, flat in zip(growth[scaled, 100], growth[scaled, 2])])
        what = f"{'' if scaled else 'not '}scaled: growth in 100 layers over growth in 2"
        console.say(f"{what}: {ratio.mean:.2f} ± {ratio.half_width:.2f} (95 % interval)")
        checks.between(what, ratio.mean, low, high)
        worst = max(gradient[scaled, 100])
        checks.between(
            "  first block's gradient over the last's", worst, 0.5 if scaled else 5.0, 3.0 if scaled else 50.0
        )

    for n_layers in (4, 12):
        model = GPT(GPTConfig(n_layers=n_layers, d_model=WIDTH), V)
        init_parameters(model, seed=1)
        writers = [m for m in model.modules() if isinstance(m, ResidualWriter)]
        pooled = torch.cat([m.weight.flatten() for m in writers]).std().item()
        checks.close(f"std of all writers, {n_layers} layers", pooled, 0.02 / math.sqrt(2 * n_layers), 2e-5)
        checks.equal("  how many there are: two in each layer", len(writers), 2 * n_layers)
    other = GPT(GPTConfig(n_layers=5, d_model=WIDTH), V)
    init_parameters(other, seed=1)
    same = "blocks.3.attn.qkv.weight"
    checks.equal("adding layers moves no other's start", other.get_parameter(same), model.get_parameter(same))

    console.say(f"drawn to {figures.save(draw_streams(streams), __file__)}")
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
