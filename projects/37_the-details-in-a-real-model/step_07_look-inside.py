"""Step 07: look inside.

Chapter 07 watched the residual stream of a small model: a vector for each token, to which every
layer adds. What is in the stream of a real one, with 576 channels? Two things stand out.

One huge number. After layers 12 to 28, channel 507 of the first token holds a single number of
size 22,000, beside a median of 2 to 10. It is there for every text, so it says nothing about the
text (such a number is called a massive activation; Sun et al. 2024). Before the MLPs of layers 13
to 27 the norm's gain for this channel is nearly 0: the model carries the number along and hides it
from these MLPs. Step 14 shows who looks at the first token.

A small mean. LayerNorm subtracts from each token's vector the mean over its channels; RMSNorm
leaves that out. How much is there to subtract? Take the mean's share of the vector's size,
|mean(x)| / √mean(x²). It is 1 if all channels are equal, and 0.033 for 576 random numbers around 0,
as they don't cancel exactly. The model's vectors have 0.024 on the average: there is next to
nothing to subtract, and that is why RMSNorm can do LayerNorm's work.

    python step_07_look-inside.py

draws outputs/step_07.png. What the huge number does to half precision is in break_it.py.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, figures
from shared.checks import Checks
from shared.console import Table, say
from shared.randomness import generator

real = chapters.load_build(37)

# ---------------------------------------------------------------- the idea


@torch.inference_mode()
def residual_stream(model: real.RealGPT, ids: list[int]) -> torch.Tensor:
    """Token ids (T,) -> the stream (L + 1, T, C): the embeddings, then after each layer."""
    x = model.embed(torch.tensor([ids]))
    points = [x[0]]
    for block in model.blocks:
        x = block(x)
        points.append(x[0])
    return torch.stack(points)


def mean_share(x: torch.Tensor) -> torch.Tensor:
    """The share of the mean, |mean| / √(mean of squares), of each vector in x (..., C)."""
    return x.mean(-1).abs() / x.square().mean(-1).sqrt()


# ---------------------------------------------------------------- look at it


def draw_picture(stream: torch.Tensor, by_chance: float) -> Path:
    """By depth: the size of the numbers, and the share of the mean."""
    figure = figures.new_figure(10, 3.6)
    left, right = figure.subplots(1, 2)
    sizes = stream.abs()
    left.semilogy(sizes.amax((1, 2)), label="largest")
    left.semilogy(sizes[:, 1:].amax((1, 2)), "--", label="largest without the first token")
    left.semilogy(sizes.flatten(1).median(1).values, "-.", label="median")
    left.set(title="size of the numbers", xlabel="after layer")
    right.plot(mean_share(stream).mean(1), label="the model")
    right.axhline(by_chance, color="0.5", linestyle=":", label="random numbers")
    right.set(title="share of the mean", xlabel="after layer", ylim=(0, 0.1))
    for axes in (left, right):
        axes.legend(frameon=False)
    return figures.save(figure, __file__)


def main() -> int:
    file = real.WeightsFile(real.packaged_weights())
    tokenizer = real.Tokenizer(file)
    model = real.load_model(file)
    ids = tokenizer.encode(real.evaluation_text())[:128]
    stream = residual_stream(model, ids)
    C = stream.shape[-1]
    random = torch.randn(50_000, C, generator=generator(1, "step_07"))
    by_chance = mean_share(random).mean().item()
    rows = []
    for layer in (0, 1, 3, 9, 11, 12, 20, 28, 29, 30):
        sizes = stream[layer].abs()  # (T, C)
        token, channel = divmod(int(sizes.argmax()), C)
        median = f"{sizes.median():.2f}"
        share = f"{mean_share(stream[layer]).mean():.3f}"
        place = [str(layer), f"{sizes.max():,.1f}", str(token), str(channel)]
        rows.append([*place, median, share])
    headers = ["after layer", "largest", "token", "channel", "median", "share of the mean"]
    say(Table(headers, rows))
    say("(Layers are counted from 1 here; row 0 is the embeddings.)")
    draw_picture(stream, by_chance)
    say("\nLook at the largest: it jumps after layer 12, and stays in one place, token 0,")
    say("channel 507. After layers 3 to 9 other tokens, too, hold about 700 there.")
    say("Drawn: outputs/step_07.png")

    checks = Checks()
    checks.between("share of the mean", mean_share(stream).mean().item(), 0, by_chance)
    chat = residual_stream(model, tokenizer.chat("How do I boil an egg?"))
    for what, text in (("documentation", stream), ("a chat", chat)):
        first = text[12:29, 0].abs()  # after layers 12 to 28: the first token's channels
        checks.equal(f"{what}: the channel", first.argmax(1).unique().tolist(), [507])
    hiding = model.blocks[12:27]  # layers 13 to 27: Python counts from 0
    gains = torch.stack([block.norm2.weight[507].abs() for block in hiding])
    checks.between("largest gain for it", gains.max().item(), 0, 0.002)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
