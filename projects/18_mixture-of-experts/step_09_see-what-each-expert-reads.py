"""Step 09: see what each expert reads.

Do experts specialise? Take a trained model, route a text, and count which characters go to which
expert. Two numbers sum the counts up.

The first: of all '(' in the text, which part goes to expert 3? An expert's favourites are the
characters of which it gets the largest parts.

The second, called "told": if you know the character, how much better can you guess its expert?
0 is no better, 1 is with certainty. It compares two entropies: the uncertainty about the expert,
and what is left of it when the character is known (the difference is the mutual information). For
example, with two characters and two experts:

    always the same expert for a character    3 0    told 1
                                              0 3
    three times in four                       3 1    told 0.19
                                              1 3
    no matter which character                 2 2    told 0
                                              2 2

The model below gives each character two experts, and told asks about one of them. So it can't
reach 1: always the same two of eight equally busy experts give 1 - ln 2 / ln 8 = 0.67.

An untrained router isn't at 0: it is random, but sends equal characters to equal experts. So
measure before and after.

    python step_09_see-what-each-expert-reads.py

trains a small model for 60 steps, prints its experts' favourites and draws outputs/step_09.png.

Shapes: V characters, E experts, L layers.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console, data, figures, training
from shared.checks import Checks

build = chapters.load_build(18)

SHOWN = 6  # how many tokens are named for an expert
COMMON = 200  # only tokens that are at least one in this many: rare ones go anywhere by chance

# ---------------------------------------------------------------- the idea


def information(counts: torch.Tensor) -> float:
    """How much the row tells about the column: counts (V, E) -> 0, nothing, to 1, everything.

    The columns' entropy is the uncertainty about the column; the answer is the part of it that goes
    away once the row is known.
    """
    p = counts / counts.sum()
    entropy_part = torch.special.entr  # -p log p, and 0 where p is 0
    of_pairs = entropy_part(p).sum()
    of_rows = entropy_part(p.sum(1)).sum()
    of_columns = entropy_part(p.sum(0)).sum()
    if of_columns == 0:
        return 0.0  # one column takes all: there is nothing to tell
    # The uncertainty about a pair is that about its row, and what is then left about its column.
    left = of_pairs - of_rows
    return ((of_columns - left) / of_columns).item()


def favourites(counts: torch.Tensor, totals: torch.Tensor) -> list[list[tuple[int, float]]]:
    """For each expert the tokens of which it gets the largest parts, as (token id, part).

    counts (V, E); totals (V,) how often each token occurs at all.
    """
    common = totals * COMMON >= totals.sum()
    parts = torch.where(common, counts.t() / totals, 0.0)  # (E, V)
    best = parts.topk(min(SHOWN, len(totals)))
    found = []
    for tokens, values in zip(best.indices.tolist(), best.values.tolist()):
        found.append(list(zip(tokens, values)))
    return found


# ---------------------------------------------------------------- look at it


def make(corpus: data.Corpus) -> build.SparseGPT:
    model = build.SparseGPT(build.SparseConfig(), corpus.vocab_size)
    build.gpt.init_parameters(model, seed=1)
    return model


def draw_picture(parts: torch.Tensor, names: list[str]) -> Path:
    """The part of each character that goes to each expert: parts (E, characters)."""
    figure = figures.new_figure(9, 3.4)
    axes = figure.subplots()
    image = axes.imshow(parts.numpy(), cmap="Blues", vmin=0, vmax=1, aspect="auto")
    axes.set(xlabel="character", ylabel="expert", yticks=range(len(parts)))
    axes.set_xticks(range(len(names)), names)
    figure.colorbar(image, label="part of it that the expert gets")
    return figures.save(figure, __file__)


def main() -> int:
    corpus = data.load_corpus("docs", "char", build.SparseConfig().block_size)
    model = make(corpus)
    training.train(model, corpus, training.TrainingSettings(steps=60), seed=1)
    # How often each character met each expert; build.count_meetings() routes the text and counts.
    counts, _, _ = build.count_meetings(model, corpus)  # (L, V, E)
    before, _, _ = build.count_meetings(make(corpus), corpus)
    totals = torch.bincount(corpus.validation[:-1], minlength=corpus.vocab_size)
    rows = []
    for e, best in enumerate(favourites(counts[-1], totals)):
        names = []
        for i, part in best:
            if part > 0.005:
                character = corpus.tokenizer.decode([i])
                names.append(f"{character!r} {part:.0%}")
        rows.append([str(e), ", ".join(names)])
    console.say("Top-2 of 8 experts after 60 steps, last layer:")
    console.say()
    console.say(console.Table(["expert", "characters of which it gets the largest parts"], rows))
    console.say("\nA character goes to two experts, so its parts sum to 200 %. An expert with an")
    console.say("empty row gets almost nothing: nothing here balances the load.")
    told = information(counts[-1])
    at_start = information(before[-1])
    console.say(f"Told: {told:.2f}, and {at_start:.2f} before training. Some of this is chance,")
    console.say("some was learned. It says who reads what, not what an expert computes.")
    common = totals.topk(24).indices
    parts = counts[-1, common].T / totals[common]
    # repr() makes a line break visible, and [1:-1] takes the quotes away.
    names = [repr(corpus.tokenizer.decode([i]))[1:-1] for i in common.tolist()]
    console.say(f"The picture, with all experts, is {draw_picture(parts, names)}.")

    checks = Checks()
    certain = torch.tensor([[3.0, 0.0], [0.0, 3.0]])
    checks.close("one expert for each character: told 1", information(certain), 1, 1e-6)
    mostly = torch.tensor([[3.0, 1.0], [1.0, 3.0]])
    checks.close("the same three times in four", information(mostly), 0.1887219, 1e-6)
    checks.close("any expert: told 0", information(torch.full((5, 3), 2.0)), 0, 1e-6)
    checks.equal("choices: 2 layers, 2 experts a token", int(counts.sum()), 4 * int(totals.sum()))
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
