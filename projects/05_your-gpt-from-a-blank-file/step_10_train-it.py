"""Step 10: train it.

Training repeats four things. Compute the loss of a batch. Compute its gradient: for each parameter,
how the loss changes if the parameter grows. Limit the gradient's length to 1, so that one odd batch
can't throw the model off. Then let the optimizer, AdamW, move every parameter a little against its
gradient; step 14 shows how it does that.

That is all. The art is to know whether a loss is good. Three marks help:

- guessing: every character equally likely, ln 95 = 4.55 nats;
- a table of letters, how often each character occurs in the training text: 3.41 nats;
- a table of pairs, which character follows which: 2.56 nats. A model that looks at one character
  only can hardly do better, so a model that gets below it looks further back.

    python step_10_train-it.py

draws outputs/step_10.png: the loss of 200 steps, with the three marks. build.py trains with the
loop of shared/training.py, which is this one with checkpoints, GPUs and a progress line.
"""

import math
import sys
from pathlib import Path

import torch
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console, data, figures, training
from shared.checks import Checks
from shared.randomness import generator

GPT = chapters.load_step(5, 6).GPT
GPTConfig = chapters.load_step(5, 6).GPTConfig
init_parameters = chapters.load_step(5, 9).init_parameters

# ---------------------------------------------------------------- the idea


def train_by_hand(model: nn.Module, corpus: data.Corpus, steps: int, seed: int) -> list[float]:
    """Train in place; returns the loss of each step's batch of 32 windows, in nats."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    batches = generator(seed, "batches")
    losses = []
    for _ in range(steps):
        idx, targets = data.sample_batch(corpus.train, model.cfg.block_size, 32, batches)
        _, loss = model(idx, targets)
        optimizer.zero_grad()  # without this, gradients of all steps would add up
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def fresh_model(corpus: data.Corpus, seed: int) -> nn.Module:
    model = GPT(GPTConfig(), corpus.vocab_size)
    init_parameters(model, seed)
    return model


def loss_of_letter_table(corpus: data.Corpus) -> float:
    """Validation loss of a table of how often each character occurs in the training part.

    Each count is 1 higher, so that no character has probability 0.
    """
    counts = torch.bincount(corpus.train, minlength=corpus.vocab_size) + 1.0
    p = counts / counts.sum()
    return -p[corpus.validation[1:]].log().mean().item()  # p of each character that comes


def loss_of_pair_table(corpus: data.Corpus) -> float:
    """The same for a table of which character follows which."""
    V = corpus.vocab_size
    pairs = corpus.train[:-1] * V + corpus.train[1:]  # pair (a, b) is counted as number a·V + b
    counts = torch.bincount(pairs, minlength=V * V).view(V, V) + 1.0
    p = counts / counts.sum(-1, keepdim=True)  # row a: how likely each character is after a
    before = corpus.validation[:-1]
    after = corpus.validation[1:]
    return -p[before, after].log().mean().item()


# ---------------------------------------------------------------- look at it


def draw_picture(losses: list[float], marks: dict[str, float]) -> Path:
    figure = figures.new_figure(7, 3.8)
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses, color=figures.COLOURS[0])
    for name, loss in marks.items():
        axes.axhline(loss, color="0.5", linestyle=":")
        axes.text(len(losses), loss + 0.05, f"{name}: {loss:.2f}", ha="right")
    figures.label(axes, "The loss of each batch", x="step", y="nats a character")
    return figures.save(figure, __file__)


def main() -> int:
    corpus = data.load_corpus("docs", "char", GPTConfig().block_size)
    model = fresh_model(corpus, seed=1)
    losses = train_by_hand(model, corpus, steps=200, seed=1)
    # the mean loss of the whole validation part; the settings say where to compute, here on the CPU
    validation = training.evaluate(model, corpus.validation, training.TrainingSettings())
    guessing = math.log(corpus.vocab_size)
    letters = loss_of_letter_table(corpus)
    pairs = loss_of_pair_table(corpus)
    draw_picture(losses, {"guessing": guessing, "letters": letters, "pairs": pairs})
    console.say("On text that was not trained on, in nats a character:")
    rows = [
        ["guessing", f"{guessing:.2f}"],
        ["table of letters", f"{letters:.2f}"],
        ["table of pairs", f"{pairs:.2f}"],
        ["this model after 200 steps", f"{validation:.2f}"],
    ]
    console.say(console.Table(["what", "loss"], rows))
    console.say("\nThe model is below the table of pairs, so it looks back further than one")
    console.say("character. Drawn to outputs/step_10.png.")

    checks = Checks()
    checks.close("first loss: ln V", losses[0], guessing, 0.2)
    # the same model and seed, trained by the loop that build.py uses
    twenty_steps = training.TrainingSettings(steps=20)
    shared = training.train(fresh_model(corpus, seed=1), corpus, twenty_steps, seed=1)
    ours = torch.tensor(losses[:20])
    checks.close("20 losses, shared/training", ours, torch.tensor(shared.losses), 1e-4)
    checks.between("validation: below letters", validation, 0, letters)
    checks.between("  and below pairs", validation, 0, pairs)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
