"""Step 05: does the norm matter, and does it matter which one?

We train step 03's model with LayerNorm, with RMSNorm and with no norm. But a loss also depends on
chance: on the initial weights, and on which text comes in which batch. The seed decides both. A
change of seed can move the loss by more than a change of norm, so a run with LayerNorm at one seed
and a run with RMSNorm at another can't be compared.

The way out is to pair them. With one seed, both models get the same batches, and every weight that
both have gets the same initial value. What chance does to one it also does to the other, and in the
difference of the two losses it cancels. We take that difference at each seed, then the mean of the
differences. The ± is a 95 % interval: if it doesn't reach 0, the norm made a difference.

    python step_05_train-the-norms-side-by-side.py

draws outputs/step_05.png. These are short runs of a small model; build.py does it at more length.
A loss is in nats: a model that gives the right next token the probability p pays -ln p.
"""

import math
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console, data, figures, training, verdict
from shared.checks import Checks

gpt = chapters.load_build(5)
step_03 = chapters.load_step(7, 3)

SEEDS = (1, 2, 3, 4)
SETTINGS = training.TrainingSettings(steps=60, batch_size=8)

# ---------------------------------------------------------------- the idea


def train(norm_type: str, seed: int, corpus: data.Corpus) -> training.History:
    """One run. The seed alone decides the initial weights and the batches."""
    model = step_03.NormGPT(step_03.NormConfig(norm_type=norm_type), corpus.vocab_size)
    gpt.init_parameters(model, seed)
    return training.train(model, corpus, SETTINGS, seed)


def differences(losses: list[float], others: list[float]) -> list[float]:
    """Loss minus other loss, seed by seed."""
    return [loss - other for loss, other in zip(losses, others)]


# ---------------------------------------------------------------- look at it


def draw_picture(losses: dict[str, list[float]]) -> Path:
    """Left: the losses at each seed. Right, on a scale as wide: their difference at each seed."""
    figure = figures.new_figure(8, 3.2)
    left, right = figure.subplots(1, 2)
    seeds = [f"seed {seed}" for seed in SEEDS]
    layernorm = losses["layernorm"]
    rmsnorm = losses["rmsnorm"]
    left.plot(seeds, layernorm, "o", markersize=8, color=figures.COLOURS[0], label="LayerNorm")
    left.plot(seeds, rmsnorm, "s", color=figures.COLOURS[1], label="RMSNorm")
    right.plot(seeds, differences(rmsnorm, layernorm), "s", color=figures.COLOURS[1])
    right.axhline(0, color="black", linewidth=0.8)
    middle = sum(layernorm) / len(layernorm)
    left.set(title="validation loss", ylim=(middle - 0.15, middle + 0.15))
    right.set(title="RMSNorm minus LayerNorm", ylim=(-0.15, 0.15))
    left.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    return figures.save(figure, __file__)


def main() -> int:
    corpus = data.load_corpus("docs", "char", 32)
    corpus = replace(corpus, validation=corpus.validation[:10_000])
    histories = {
        norm_type: [train(norm_type, seed, corpus) for seed in SEEDS]
        for norm_type in step_03.NORM_TYPES
    }
    losses = {name: [run.validation_loss for run in runs] for name, runs in histories.items()}
    # The mean of the differences, and its 95 % interval.
    rms = verdict.interval(differences(losses["rmsnorm"], losses["layernorm"]))
    none = verdict.interval(differences(losses["none"], losses["layernorm"]))
    last_column = {"layernorm": "-", "rmsnorm": str(rms), "none": str(none)}
    rows = []
    for norm_type in step_03.NORM_TYPES:
        by_seed = [f"{loss:.3f}" for loss in losses[norm_type]]
        rows.append([norm_type, *by_seed, last_column[norm_type]])
    console.say("Validation loss after 60 steps:")
    console.say()
    console.say(console.Table(["norm", *(f"seed {s}" for s in SEEDS), "minus layernorm"], rows))
    console.say()

    console.say(f"picture: {draw_picture(losses)}")
    console.say()
    console.say("Look at the last column: without a norm the loss is higher by far. For RMSNorm")
    console.say(f"against LayerNorm: {rms.verdict}.")
    console.say()
    console.say("The picture says why we pair: a seed that is bad for one norm is bad for the")
    console.say("other, so the differences (right) vary far less than the losses (left).")

    checks = Checks()
    checks.equal("no norm against LayerNorm", none.verdict, "higher")
    for norm_type, runs in histories.items():  # untrained, all three guess evenly
        first = sum(run.losses[0] for run in runs) / len(runs)
        uniform = math.log(corpus.vocab_size)
        checks.close(f"{norm_type}: first loss, ln V", first, uniform, 0.25)
    again = train("rmsnorm", 1, corpus)
    checks.close("seed 1 again: the same loss", again.validation_loss, losses["rmsnorm"][0], 0)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
