"""Step 10: train it.

Steps 01 to 09 gave batches, a model and a start. Training repeats four things: the loss of a batch, its gradient, a
limit on the gradient's length, and a step of AdamW. That is all; the rest is knowing what the loss should be at
each moment. At first ln V. Soon below what the letters' frequencies give, and then below what pairs of letters give,
which takes more than looking at the last token.

It leaves out seeds, workers and results on disk: build.py has those from shared/.

    python step_10_train-it.py

It trains the tiny model for 200 steps, checks AdamW against its formula and the loop against the one in shared/, and
compares the model with a table of pairs. About 8 seconds.
"""

import math
import sys
from pathlib import Path

import torch
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console, data, training
from shared.checks import Checks
from shared.kernels import fastest_float32
from shared.randomness import generator

step_06, step_09 = chapters.load_step(5, 6), chapters.load_step(5, 9)
GPT, GPTConfig = step_06.GPT, step_06.GPTConfig


def train_by_hand(model: nn.Module, corpus: data.Corpus, steps: int, seed: int) -> list[float]:
    """Train in place; the loss of each step's batch, in nats. 32 windows a batch, learning rate 3e-3."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01, fused=True)
    batches, losses = generator(seed, "batches"), []
    for _ in range(steps):
        idx, targets = data.sample_batch(corpus.train, model.cfg.block_size, 32, batches)
        _, loss = model(idx, targets)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def fresh_model(corpus: data.Corpus, seed: int) -> nn.Module:
    model = GPT(GPTConfig(), corpus.vocab_size)
    step_09.init_parameters(model, seed)
    return model


def adamw_by_hand(p: torch.Tensor, gradients: list[torch.Tensor], lr: float, decay: float) -> torch.Tensor:
    """p after one step per gradient (Loshchilov & Hutter 2019, algorithm 2): β 0.9 and 0.999, ε 1e-8."""
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    for t, g in enumerate(gradients, start=1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        unbiased_m, unbiased_v = m / (1 - 0.9**t), v / (1 - 0.999**t)
        p = p - lr * decay * p - lr * unbiased_m / (unbiased_v.sqrt() + 1e-8)
    return p


def table_losses(corpus: data.Corpus) -> tuple[float, float]:
    """Validation loss of two tables counted from the training part: single characters, and pairs (one added to each
    count)."""
    V, train, held_out = corpus.vocab_size, corpus.train, corpus.validation
    single = torch.bincount(train, minlength=V).double() + 1
    pairs = torch.bincount(train[:-1] * V + train[1:], minlength=V * V).view(V, V).double() + 1
    single, pairs = single / single.sum(), pairs / pairs.sum(-1, keepdim=True)
    return -single[held_out[1:]].log().mean().item(), -pairs[held_out[:-1], held_out[1:]].log().mean().item()


def main() -> int:
    checks = Checks()
    corpus = data.load_corpus("docs", "char", GPTConfig().block_size)
    p = nn.Parameter(torch.randn(5, 3, dtype=torch.float64, generator=generator(1, "p")))
    gradients = [torch.randn(5, 3, dtype=torch.float64, generator=generator(1, "gradient", t)) for t in range(4)]
    by_hand = adamw_by_hand(p.detach().clone(), gradients, lr=0.1, decay=0.3)
    optimizer = torch.optim.AdamW([p], lr=0.1, weight_decay=0.3)
    for p.grad in gradients:
        optimizer.step()
    checks.close("four steps of AdamW, formula against torch", by_hand, p, 1e-12)

    with fastest_float32():
        model = fresh_model(corpus, seed=1)
        losses = train_by_hand(model, corpus, steps=200, seed=1)
        validation = training.evaluate(model, corpus.validation, training.TrainingSettings())
        shared = training.train(fresh_model(corpus, 1), corpus, training.TrainingSettings(steps=20), seed=1)
        one_batch = corpus.train[: 4 * 33].view(4, 33)
        pupil = fresh_model(corpus, seed=1)
        optimizer = torch.optim.AdamW(pupil.parameters(), lr=3e-3)
        for _ in range(100):
            _, loss = pupil(one_batch[:, :-1], one_batch[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    console.say("Mean training loss over ten steps:")
    for start in (0, 10, 20, 40, 80, 120, 190):
        console.say(f"  steps {start + 1:3} to {start + 10:3}: {sum(losses[start : start + 10]) / 10:.3f}")
    single, pairs = table_losses(corpus)
    console.say(
        f"On text never trained on: letters' frequencies {single:.3f}, pairs {pairs:.3f}, this model {validation:.3f}."
    )

    checks.close("first loss: ln V + d·σ²/2", losses[0], math.log(corpus.vocab_size) + 64 * 0.02**2 / 2, 0.2)
    mine, theirs = torch.tensor(losses[:20]), torch.tensor(shared.losses)
    checks.close("first 20 losses against those of shared/training", mine, theirs, 1e-4)
    checks.between("validation loss beats letters' frequencies", validation, 0, single)
    checks.between("  and beats pairs: it looks further back", validation, 0, pairs)
    checks.between("100 steps on one batch learn it by heart", loss.item(), 0, 0.1)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
