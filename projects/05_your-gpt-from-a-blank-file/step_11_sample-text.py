"""Step 11: sample text.

A trained model says how likely each next token is. To write, draw one token by these
probabilities, append it to the text, and ask again.

Two dials change the drawing. The temperature divides the logits before softmax. Below 1 it makes
the likely tokens likelier, and the text safe and repetitive; at 0 only the likeliest is taken.
Above 1 it makes all tokens more alike, and the text wild. top_k keeps the k likeliest tokens and
never draws another, so that no single bad draw spoils the text.

What does a model learn first? The picture shows it: before training it writes any character; after
30 steps spaces and frequent letters, after 300 steps short words and pieces of longer ones.

    python step_11_sample-text.py

draws outputs/step_11.png: the loss, and what the model writes at three moments.

With this the GPT is complete: build.py holds the model, its start and sampling in one file.
"""

import math
import sys
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console, data, figures
from shared.checks import Checks
from shared.randomness import generator

step_10 = chapters.load_step(5, 10)
MOMENTS = (0, 30, 300)  # training steps

# ---------------------------------------------------------------- the idea


@torch.no_grad()
def generate(
    model: nn.Module,
    idx: torch.Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Continue token ids (B, T) by max_new_tokens, each drawn from softmax(logits / temperature).

    The model sees the last block_size tokens. top_k keeps, of equally likely tokens, the lower ids.
    Returns (B, T + max_new_tokens). ValueError for wrong dials or an empty context.
    """
    if temperature < 0 or (top_k is not None and top_k < 1) or idx.shape[1] == 0:
        raise ValueError(
            f"generate needs temperature >= 0, top_k >= 1 and a context of at least one token, "
            f"got temperature {temperature}, top_k {top_k}, {idx.shape[1]} tokens"
        )
    for _ in range(max_new_tokens):
        logits, _ = model(idx[:, -model.cfg.block_size :])
        logits = logits[:, -1]  # (B, V): what follows the last position
        if temperature == 0:
            next_idx = logits.argmax(-1, keepdim=True)
        else:
            if top_k is not None:
                order = logits.sort(dim=-1, descending=True, stable=True).indices
                dropped = order[:, top_k:]  # all but the first k
                logits = logits.scatter(-1, dropped, -math.inf)  # so that they are never drawn
            probabilities = F.softmax(logits / temperature, dim=-1)
            next_idx = torch.multinomial(probabilities, 1, generator=generator)
        idx = torch.cat((idx, next_idx), dim=1)
    return idx


# ---------------------------------------------------------------- look at it


def write(model: nn.Module, corpus: data.Corpus, n: int, temperature: float) -> str:
    context = corpus.validation[None, :32]  # the text to go on from; it is not shown
    draws = generator(1, "sample")
    idx = generate(model, context, n, temperature, generator=draws)
    return corpus.tokenizer.decode(idx[0, 32:].tolist()).replace("\n", "↵")


def draw_picture(losses: list[float], samples: list[str]) -> Path:
    figure = figures.new_figure(7, 4.2)
    axes = figure.subplots()
    axes.plot(losses, color=figures.COLOURS[0])
    axes.set_ylim(1.5, 6.6)
    for step, sample, height in zip(MOMENTS, samples, (6.2, 5.6, 5.0)):
        loss = losses[min(step, len(losses) - 1)]  # there are losses 0 to 299
        axes.plot(step, loss, "o", color=figures.COLOURS[1])
        axes.text(0, height, f"step {step}: {sample}", family="monospace", parse_math=False)
    figures.label(axes, "The loss, and what the model writes", x="step", y="nats a character")
    return figures.save(figure, __file__)


def main() -> int:
    corpus = data.load_corpus("docs", "char", 32)
    samples = []
    for steps in MOMENTS:
        model = step_10.fresh_model(corpus, seed=1)
        losses = step_10.train_by_hand(model, corpus, steps, seed=1)
        samples.append(write(model, corpus, 44, temperature=0.5))
    draw_picture(losses, samples)
    for steps, sample in zip(MOMENTS, samples):
        console.say(f"after {steps:3} steps:     {sample}")
    console.say("\nThe last model again, at three temperatures:")
    for temperature in (0.0, 0.7, 1.5):
        console.say(f"temperature {temperature}:    {write(model, corpus, 44, temperature)}")
    console.say("Drawn to outputs/step_11.png.")

    context = corpus.validation[None, :32]
    logits, _ = model(context)
    p = F.softmax(logits[0, -1] / 0.7, dim=-1)
    many = context.expand(4000, -1)  # the same context 4,000 times, and one token after each
    drawn = generate(model, many, 1, temperature=0.7, generator=generator(1, "draws"))[:, -1]
    of_three = generate(model, many, 1, top_k=3, generator=generator(1, "draws"))[:, -1]
    likeliest = generate(model, context, 1, temperature=0.0)[:, -1]
    checks = Checks()
    checks.close("shares at temperature 0.7", torch.bincount(drawn, minlength=95) / 4000, p, 0.03)
    checks.equal("temperature 0: likeliest", likeliest[0], p.argmax())
    checks.equal("top_k = 3: tokens drawn", of_three.unique(), p.topk(3).indices.sort().values)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
