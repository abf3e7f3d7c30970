"""Step 02: sample training batches.

A language model learns one thing: given the tokens so far, which token comes next? The text itself
holds the answers. Cut a window of T tokens out of it (T is called block_size), and take as targets
the same window moved on by one token. Then every position of the window is an exercise: one token
seen, which is the second? Two seen, which is the third? Up to T tokens seen. So a window of 8
tokens gives 8 exercises in one go, with short contexts and long ones.

A batch is some windows from random places. Its inputs and its targets have the shape (B, T): B
windows of T tokens.

The last tenth of the text stands in no batch. It is the validation part: only text that was not
trained on can tell whether a model learned the language or learned the text by heart.

    python step_02_sample-training-batches.py
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import cli, console, data
from shared.checks import Checks
from shared.randomness import generator

# ---------------------------------------------------------------- the idea


def batch_by_loop(
    tokens: torch.Tensor, block_size: int, batch_size: int, rng: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random windows of tokens (N,): inputs and targets, each (batch_size, block_size).

    A window that starts at s needs the tokens s to s + block_size. The largest start that randint
    draws is N - block_size - 1; the targets of that window end with the last token of all.
    """
    starts = torch.randint(len(tokens) - block_size, (batch_size,), generator=rng).tolist()
    inputs = torch.stack([tokens[s : s + block_size] for s in starts])
    targets = torch.stack([tokens[s + 1 : s + 1 + block_size] for s in starts])
    return inputs, targets


def batch_at_once(
    tokens: torch.Tensor, block_size: int, batch_size: int, rng: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same without a loop, by indexing with a table of positions. shared/data.py does this."""
    starts = torch.randint(len(tokens) - block_size, (batch_size, 1), generator=rng)
    positions = starts + torch.arange(block_size + 1)  # (B, 1) + (T + 1,) = (B, T + 1)
    windows = tokens[positions]
    return windows[:, :-1], windows[:, 1:]


# ---------------------------------------------------------------- look at it


def main() -> int:
    T = 8
    corpus = data.load_corpus("docs", "char", block_size=T)
    # generator(seed, purpose) is a torch.Generator of its own for each seed and purpose.
    idx, targets = batch_by_loop(corpus.train, T, 4, generator(1, "batches"))

    different = [len(window.unique()) for window in idx]
    row = different.index(max(different))  # show the window with the fewest repeated characters
    console.say("One window is eight exercises:\n")
    for t in range(T):
        seen = corpus.tokenizer.decode(idx[row, : t + 1].tolist())
        asked = corpus.tokenizer.decode(targets[row, t : t + 1].tolist())
        console.say(f"  {seen!r:>12} -> {asked!r}")
    console.say(f"\nTo train on: {len(corpus.train):,} tokens.")
    console.say(f"Kept apart for validation: the last {len(corpus.validation):,}.")

    checks = Checks()
    windows = corpus.train.unfold(0, T + 1, 1)  # torch's sliding window: row s starts at token s
    starts = torch.randint(len(windows), (4,), generator=generator(1, "batches"))
    checks.equal("inputs: torch's unfold", idx, windows[starts, :-1])
    checks.equal("targets: torch's unfold", targets, windows[starts, 1:])
    at_once = batch_at_once(corpus.train, T, 4, generator(1, "batches"))
    checks.equal("without a loop: the same", torch.stack(at_once), torch.stack((idx, targets)))
    shared = data.sample_batch(corpus.train, T, 4, generator(1, "batches"))
    checks.equal("shared/data.py: the same", torch.stack(shared), torch.stack((idx, targets)))
    few = torch.arange(12)  # so few that 2,000 windows of 5 reach every start
    inputs, _ = batch_by_loop(few, 5, 2000, generator(1, "few"))
    checks.equal("5 of 12 tokens: starts 0 to 6", inputs[:, 0].unique(), torch.arange(7))
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
