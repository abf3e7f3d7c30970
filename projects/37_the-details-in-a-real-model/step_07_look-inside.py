"""Step 07: look inside.

Chapter 07 watched the residual stream of a small model. This step points the same instrument at a real one and finds
what that had not: one number of 22,000 among thousands near 1, always in the same channel of the first token. What
it is there for is left out; what it does to norms and to half precision is the chapter's break_it.py.

    python step_07_look-inside.py

prints the stream by layer and draws outputs/hidden_states.png; about eight seconds.
"""

import math
import sys
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import files, chapters, cli, figures
from shared.checks import Checks
from shared.console import Table, say

step_01, step_02, step_04, step_05 = (chapters.load_step(37, step) for step in (1, 2, 4, 5))
tensor_stats, stream_stats = chapters.load_step(7, 4).tensor_stats, chapters.load_step(7, 4).stream_stats


@torch.inference_mode()
def residual_stream(model: nn.Module, idx: torch.Tensor) -> torch.Tensor:
    """Token ids (1, T) -> the stream as its norms read it (2L + 1, T, C): at first, then after every half block."""
    norms = [norm for block in model.blocks for norm in (block.norm1, block.norm2)] + [model.norm_f]
    stream = []
    hooks = [norm.register_forward_pre_hook(lambda _, inputs: stream.append(inputs[0][0])) for norm in norms]
    try:
        model.states(idx)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(stream)


def spike_share(x: torch.Tensor) -> float:
    """Kurtosis of one token's channels (C,) over the largest that C numbers can have: 1 for a single spike."""
    C = x.numel()
    return tensor_stats(x)["kurtosis"] / (C - 2 + 1 / (C - 1))


def mean_share(x: torch.Tensor) -> torch.Tensor:
    """|cos(x, 1)| of each vector in x (..., C): how much of it is its mean, the part that LayerNorm takes out."""
    return x.mean(-1).abs() / x.square().mean(-1).sqrt()


def draw(stream: torch.Tensor):
    """How far the largest number stands out of the others, and the share of the mean, by depth."""
    figure = figures.new_figure(8, 6)
    top, bottom = figure.subplots(2, sharex=True)
    depth, C = [i / 2 for i in range(len(stream))], stream.shape[-1]
    curves = {
        "largest |x|": stream.abs().amax((1, 2)),
        "largest |x| but for the first token": stream[:, 1:].abs().amax((1, 2)),
        "median |x|": stream.abs().flatten(1).median(1).values,
    }
    for (what, values), colour, dash in zip(curves.items(), figures.COLOURS, figures.DASHES):
        top.semilogy(depth, values, color=colour, linestyle=dash, label=what)
    top.set_ylabel("size of the numbers")
    bottom.plot(depth, mean_share(stream).mean(1), color=figures.COLOURS[3], label="|cos(x, 1)|, mean over tokens")
    bottom.axhline(
        (2 / math.pi / C) ** 0.5, color="0.5", linestyle=":", label=f"of random directions in {C} dimensions"
    )
    bottom.set(ylabel="share of the mean", ylim=(0, 0.1), xlabel="layers read (a half: after attention)")
    for axes in (top, bottom):
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def main() -> int:
    file, checks = step_01.WeightsFile(step_01.packaged_weights()), Checks()
    model, tokenizer = step_04.load_model(file), step_02.Tokenizer(file)
    idx = torch.tensor([tokenizer.encode(step_05.evaluation_text())[:256]])
    stream, rows = residual_stream(model, idx), []
    T, C = stream.shape[1:]
    for layer in (0, 1, 2, 3, 6, 9, 11, 12, 15, 20, 25, 28, 29, 30):
        x = stream[2 * layer]
        token, channel = divmod(int(x.abs().argmax()), C)
        others = torch.tensor([tensor_stats(x[t])["kurtosis"] for t in range(1, T, 15)]).median()
        row = [f"{layer}", f"{x.std():.2f}", f"{x.abs().max():,.0f}", f"{token}", f"{channel}"]
        rows.append([*row, f"{spike_share(x[token]):.2f}", f"{others:.0f}", f"{mean_share(x).mean():.3f}"])
    heads = ["layers", "std", "largest |x|", "token", "channel", "kurtosis / most", "others' kurtosis", "|cos(x, 1)|"]
    most = f"{C - 2 + 1 / (C - 1):.0f}"
    say(f"{T} tokens of documentation; most: {most}, the kurtosis of a single spike among {C} numbers")
    say(Table(heads, rows))
    folder = Path(__file__).parent / "outputs"
    files.claim_folder(folder)
    files.write_bytes(folder / "hidden_states.png", figures.png(draw(stream)))
    say(f"\ndrawn in {folder / 'hidden_states.png'}")

    theirs = list(stream_stats(model, idx).values())  # chapter 07's instrument, by hooks of its own
    checks.close(
        "variance at all 61 points as chapter 07 sees it",
        stream.var((1, 2), correction=0),
        torch.tensor([s["var"] for s in theirs]),
        1e-2,
    )
    checks.close("kurtosis share of one spike", spike_share(torch.eye(C)[5]), 1, 1e-9)
    ones = torch.ones(C).expand_as(stream[40])
    checks.close(
        "|cos(x, 1)| as torch has it", mean_share(stream[40]), F.cosine_similarity(stream[40], ones, dim=-1).abs(), 1e-6
    )
    gains = torch.stack([block.norm2.weight for block in model.blocks[12:27]]).abs()  # before the MLPs of 13 to 27
    checks.between("largest gain of that channel there, MLPs 13 to 27", gains[:, 507].max().item(), 0, 0.002)
    checks.between("and the smallest median gain", gains.median(1).values.min().item(), 0.2, 0.4)
    chat = residual_stream(model, torch.tensor([tokenizer.chat("How do I boil an egg?")]))
    for what, seen in (("documentation", stream), ("a chat", chat)):
        inside = seen[24:58].abs().flatten(1)  # from layer 12 to 28
        checks.equal(f"{what}: the largest is the first token's channel 507", inside.argmax(1).unique().tolist(), [507])
        checks.between(f"{what}: and its size at least", inside.amax(1).min().item(), 10_000, 30_000)
    checks.between(
        "share of the mean: no more than a random vector's",
        mean_share(stream).mean().item(),
        0,
        (2 / math.pi / C) ** 0.5,
    )
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
