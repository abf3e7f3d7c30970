"""Step 02: sample training batches.

Step 01 gave one long row of token ids. Training reads it in windows: block_size tokens, and as targets the same
window one token later. So every position is an exercise, "these tokens, which comes next?", and a window of T tokens
holds T of them, from the context of one token to that of T.

It leaves out the model.

    python step_02_sample-training-batches.py

It prints the exercises of one short window, and checks windows, targets and coverage against torch's own sliding
window. About 2 seconds.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import cli, console, data
from shared.checks import Checks
from shared.randomness import generator


def batch_by_loop(tokens: torch.Tensor, block_size: int, batch_size: int, generator: torch.Generator):
    """Random windows of tokens (N,), spelled out: inputs and targets, each (batch_size, block_size).

    The last start is N − block_size − 1: its last target is the last token.
    """
    starts = torch.randint(len(tokens) - block_size, (batch_size,), generator=generator).tolist()
    inputs = torch.stack([tokens[s : s + block_size] for s in starts])
    targets = torch.stack([tokens[s + 1 : s + 1 + block_size] for s in starts])
    return inputs, targets


def main() -> int:
    checks = Checks()
    corpus = data.load_corpus("docs", "char", block_size=8)
    idx, targets = batch_by_loop(corpus.train, 8, 4, generator(1, "batches"))
    decode = corpus.tokenizer.decode
    row = max(range(4), key=lambda i: len(idx[i].unique()))  # the window with the most to see
    console.say("One window is eight exercises:")
    for t in range(8):
        console.say(f"  {decode(idx[row, : t + 1].tolist())!r:>12} -> {decode(targets[row, t : t + 1].tolist())!r}")

    console.say(f"\n{len(corpus.train):,} tokens to train on; the last tenth, {len(corpus.validation):,}, stays apart.")
    whole = torch.cat((corpus.train, corpus.validation))
    checks.equal(
        "training and validation part, joined, are the corpus", decode(whole.tolist()), "".join(data.torch_docs())
    )
    checks.between("validation's share of it", len(corpus.validation) / len(whole), 0.0999, 0.1)

    windows = corpus.train.unfold(0, 8 + 1, 1)  # torch's own sliding window: (N − 8, 9), window i starts at i
    starts = torch.randint(len(windows), (4,), generator=generator(1, "batches"))
    checks.equal("inputs, against torch's unfold", idx, windows[starts, :-1])
    checks.equal("targets, against torch's unfold", targets, windows[starts, 1:])
    fast_idx, fast_targets = data.sample_batch(corpus.train, 8, 4, generator(1, "batches"))
    checks.equal("one gather instead of a loop: inputs", fast_idx, idx)
    checks.equal("one gather instead of a loop: targets", fast_targets, targets)

    few = torch.arange(12)  # so few that every start comes up
    seen_inputs, seen_targets = data.sample_batch(few, 5, 2000, generator(1, "few"))
    checks.equal("every start comes up, and no other", seen_inputs[:, 0].unique(), torch.arange(12 - 5))
    checks.equal("the last token is a target", seen_targets.max(), few[-1])
    share = (seen_inputs[:, 0] == 3).double().mean().item()
    checks.close("each start is equally likely (4 standard errors)", share, 1 / 7, 4 * (6 / 49 / 2000) ** 0.5)

    asked = [t for _, target in data.all_windows(few, 5, 2) for t in target.flatten().tolist()]
    checks.equal("evaluation asks for every token but the first, once", asked, list(range(1, 12)))
    again = data.sample_batch(corpus.train, 8, 4, generator(1, "batches"))[0]
    other = data.sample_batch(corpus.train, 8, 4, generator(2, "batches"))[0]
    checks.equal("the same seed gives the same batch", again, fast_idx)
    checks.equal("another seed gives another", torch.equal(other, fast_idx), False)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
