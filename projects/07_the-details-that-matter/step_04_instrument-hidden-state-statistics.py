"""Step 04: what does the residual stream look like from the inside, layer by layer?

Two numbers tell most. The standard deviation says how large the entries are. It doesn't say whether
they are all alike or whether a few are huge. Kurtosis says that: it is 3 for Gaussian noise, and
large when a few entries are much larger than the rest. One spike in a vector of 576 entries, all
others 0, has a kurtosis of 574.

Why care about a few large entries? A norm divides the whole vector by its size. Where one entry is
huge, it decides that size, and all the others come out near 0. Number formats with few bits suffer
too: they must span the largest entry, and have few steps left for the rest. In chapter 37 you will
see a real model, 576 channels wide, that has such an entry.

To look inside we use hooks. A hook is a function that PyTorch calls when a module runs. Each norm
reads the stream, so we hang a hook on each norm and look at its input. Looking must change nothing:
the losses of a training run with hooks and without are the same.

    python step_04_instrument-hidden-state-statistics.py

draws outputs/step_04.png. Step 05 trains models with different norms.

Shapes: B batch, T positions, C = d_model, L layers.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console, data, figures, training
from shared.checks import Checks
from shared.randomness import generator

gpt = chapters.load_build(5)
step_03 = chapters.load_step(7, 3)

# ---------------------------------------------------------------- the idea


def tensor_stats(x: torch.Tensor) -> dict[str, float]:
    """mean, var, min, max and kurtosis of all entries of x.

    kurtosis = mean((x - mean)⁴) / var². It is 3 for Gaussian noise, and large when a few entries
    are much larger than the rest. For a tensor whose entries are all equal it is given as 0.
    """
    x = x.detach()
    x = x.float() if x.device.type == "mps" else x.double()  # Apple's GPUs have no float64
    centred = x - x.mean()
    var = centred.square().mean()
    normalized = centred * var.rsqrt()
    kurtosis = torch.where(var > 0, normalized.pow(4).mean(), 0)
    # One tolist(), not five: each waits for the GPU to finish.
    values = torch.stack((x.mean(), var, x.min(), x.max(), kurtosis)).tolist()
    return dict(zip(("mean", "var", "min", "max", "kurtosis"), values))


@torch.no_grad()
def stream_stats(model: gpt.GPT, idx: torch.Tensor) -> dict[str, dict[str, float]]:
    """tensor_stats of the residual stream at its 2L + 1 points, for one batch of token ids (B, T).

    A point is named after the part that wrote last. A norm reads the stream there: we hook it.
    """
    points = ["embedding"]
    norms = []
    for i, block in enumerate(model.blocks):
        points += [f"blocks.{i}.attn", f"blocks.{i}.mlp"]
        norms += [block.norm1, block.norm2]
    norms.append(model.norm_f)
    stats = {}

    def keep(norm: nn.Module, inputs: tuple) -> None:
        point = points[len(stats)]  # the norms run in the order of the points
        stats[point] = tensor_stats(inputs[0])

    # set(): a norm that serves several places must get one hook, not several.
    hooks = [norm.register_forward_pre_hook(keep) for norm in set(norms)]
    try:
        model(idx)
    finally:
        for hook in hooks:
            hook.remove()
    return stats


# ---------------------------------------------------------------- look at it


def observe(model: gpt.GPT, idx: torch.Tensor) -> dict:
    """What the training loop calls from time to time, and keeps in its history."""
    return {"stream": stream_stats(model, idx)}


def train(corpus: data.Corpus, observe_every: int) -> training.History:
    """Four layers with RMSNorm, 60 steps. observe_every = 0: nobody looks."""
    model = step_03.NormGPT(step_03.NormConfig(n_layers=4, norm_type="rmsnorm"), corpus.vocab_size)
    gpt.init_parameters(model, seed=1)
    settings = training.TrainingSettings(steps=60, batch_size=16, observe_every=observe_every)
    return training.train(model, corpus, settings, seed=1, observe=observe)


def draw_picture(history: training.History) -> Path:
    """Std and kurtosis of the stream by layer, a line for each moment of training."""
    figure = figures.new_figure(8, 3.6)
    left, right = figure.subplots(1, 2)
    for colour, moment in zip(figures.COLOURS, history.observations):
        points = [point.removeprefix("blocks.") for point in moment["stream"]]
        statistics = moment["stream"].values()
        step = f"step {moment['step']}"
        left.plot(points, [s["var"] ** 0.5 for s in statistics], "o-", color=colour, label=step)
        right.plot(points, [s["kurtosis"] for s in statistics], "o-", color=colour)
    left.set_title("standard deviation of the stream")
    right.set_title("kurtosis (dotted: Gaussian noise)")
    right.axhline(3, color="black", linestyle=":")
    left.legend(frameon=False)
    for axes in (left, right):
        axes.tick_params(axis="x", rotation=60)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("which part wrote last")
    return figures.save(figure, __file__)


def main() -> int:
    corpus = data.load_corpus("docs", "char", 32)
    corpus = replace(corpus, validation=corpus.validation[:2000])  # we don't look at that loss
    watched = train(corpus, observe_every=20)
    console.say(f"picture: {draw_picture(watched)}")
    console.say()
    console.say("Left, look at 0.mlp: the first MLP makes the stream many times as large as the")
    console.say("embedding, and more so as training goes on. Right: kurtosis stays below 3, so in")
    console.say("this small model no entry stands out.")

    checks = Checks()
    x = torch.randn(3, 5, 7, generator=generator(1, "step_04"))
    checks.close("variance: as torch's", tensor_stats(x)["var"], x.var(correction=0), 1e-6)
    noise = torch.randn(1_000_000, generator=generator(1, "step_04", "noise"))
    checks.close("kurtosis, a million Gaussians", tensor_stats(noise)["kurtosis"], 3, 0.0196)
    spike = torch.zeros(576)
    spike[3] = 1
    checks.close("kurtosis of one spike in 576", tensor_stats(spike)["kurtosis"], 574.00174, 1e-5)
    alone = train(corpus, observe_every=0)
    losses = torch.tensor(watched.losses)
    checks.close("60 losses, hooks or not", losses, torch.tensor(alone.losses), 0)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
