"""Step 12: does RoPE learn better than learned positions, and what happens on a longer text?

We train three models on windows of 32 tokens: with chapter 05's learned positions, with RoPE, and
with no positions at all. Then we give them windows of 64 and 128.

Learned positions are a table with one row for each position. A window of 64 needs rows 32 to 63,
which the model doesn't have. RoPE learns no table: it turns by an angle, and angles go on. But the
model has never seen distances above 31, so nothing has taught it what to do with them. Without
positions attention still works: it sees which tokens came before, but hardly in which order.

    python step_12_beyond-the-trained-length.py

draws outputs/step_12.png. Differences are paired, as in step 05: seed by seed, then their mean with
a 95 % interval. Losses are in nats for each token, here a character.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console, data, figures, training, verdict
from shared.checks import Checks

gpt = chapters.load_build(5)
step_10 = chapters.load_step(7, 10)

SEEDS = (1, 2, 3)
LENGTHS = (32, 64, 128)
SETTINGS = training.TrainingSettings(steps=100, batch_size=8)

# ---------------------------------------------------------------- the idea


def build(position_type: str, length: int, corpus: data.Corpus) -> step_10.ModernGPT:
    """Chapter 05's norm and MLP, with such positions, for windows of `length` tokens."""
    cfg = step_10.ModernConfig(
        norm_type="layernorm", mlp_type="gelu", position_type=position_type, block_size=length
    )
    return step_10.ModernGPT(cfg, corpus.vocab_size)


def losses_by_length(position_type: str, corpus: data.Corpus, seed: int) -> list[float]:
    """Train on windows of 32; then the validation loss of the same weights at each length."""
    model = build(position_type, LENGTHS[0], corpus)
    gpt.init_parameters(model, seed)
    history = training.train(model, corpus, SETTINGS, seed)
    losses = [history.validation_loss]
    if position_type == "learned":
        return losses  # its table ends here
    for length in LENGTHS[1:]:  # here no weight depends on the length
        longer = build(position_type, length, corpus)
        longer.load_state_dict(model.state_dict())
        losses.append(training.evaluate(longer, corpus.validation, SETTINGS))
    return losses


# ---------------------------------------------------------------- look at it


def draw_picture(means: dict[str, list[float]]) -> Path:
    """The mean loss by length; learned positions are a single point."""
    figure = figures.new_figure(7, 3.2)
    axes = figure.subplots()
    for (position_type, losses), colour in zip(means.items(), figures.COLOURS):
        lengths = LENGTHS[: len(losses)]
        axes.plot(lengths, losses, "o-", color=colour, label=position_type)
    axes.axvline(LENGTHS[0], color="black", linestyle=":")
    axes.set(xlabel="tokens in a window (dotted: trained on)", ylabel="validation loss")
    axes.set_xticks(LENGTHS)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figures.save(figure, __file__)


def main() -> int:
    corpus = data.load_corpus("docs", "char", 32)
    corpus = replace(corpus, validation=corpus.validation[:10_000])
    runs = {}
    means = {}
    rows = []
    for position_type in step_10.POSITION_TYPES:
        runs[position_type] = [losses_by_length(position_type, corpus, seed) for seed in SEEDS]
        by_length = torch.tensor(runs[position_type])  # (seeds, lengths)
        means[position_type] = by_length.mean(0).tolist()
        cells = [f"{loss:.3f}" for loss in means[position_type]]
        while len(cells) < len(LENGTHS):
            cells.append("can't")
        rows.append([position_type, *cells])
    console.say("Mean validation loss over 3 seeds, by the length of the window:")
    console.say()
    console.say(console.Table(["positions", *map(str, LENGTHS)], rows))
    console.say(f"\npicture: {draw_picture(means)}")
    console.say("Look at the line of RoPE: it starts lowest, and by 128 it has risen.")
    console.say()

    rope = runs["rope"]
    learned = runs["learned"]
    none = runs["none"]
    gain = verdict.interval([rope[i][0] - learned[i][0] for i in range(len(SEEDS))])
    nothing = verdict.interval([none[i][0] - learned[i][0] for i in range(len(SEEDS))])
    at_64 = verdict.interval([losses[1] - losses[0] for losses in rope])
    at_128 = verdict.interval([losses[2] - losses[0] for losses in rope])
    said = [judged.said for judged in verdict.verdicts([gain, nothing, at_64, at_128])]
    rows = [
        ["RoPE minus learned, at 32", str(gain), said[0]],
        ["none minus learned, at 32", str(nothing), said[1]],
        ["RoPE at 64 minus at 32", str(at_64), said[2]],
        ["RoPE at 128 minus at 32", str(at_128), said[3]],
    ]
    console.say(console.Table(["difference", "nats", "verdict"], rows))
    console.say("\nLook at the second row: so early in training, learned positions are not yet")
    console.say("seen to be better than none.")

    checks = Checks()
    checks.equal("RoPE against learned", said[0], "lower")
    short = build("rope", 32, corpus)
    long = build("rope", 128, corpus)
    gpt.init_parameters(short, seed=1)
    long.load_state_dict(short.state_dict())
    idx = corpus.train[None, :32]
    checks.close("RoPE, 32 or 128: same", long(idx)[0], short(idx)[0], 1e-6)
    table = build("learned", 32, corpus).position_embedding.weight
    checks.equal("learned: rows in the table", len(table), 32)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
