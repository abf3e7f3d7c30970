"""Step 11: merge pairs by hand. (Best read after step 02.)

How does a byte-pair tokenizer cut a word? It starts with one token for each byte. Then it looks
at all neighbours and joins the pair that stands earliest in the list of merges. It looks again,
and goes on until no two neighbours are in the list (Sennrich et al. 2016). The list came about
the same way: in the training text, the most frequent pair was joined first. So an early merge is
a frequent one, and a frequent word ends up as one token.

Each merge made one token, and tokens got their numbers in the order of the list. So "the earliest
merge" and "the merge that makes the lowest number" are the same, and tiktoken needs no list: it
looks at the numbers. (check_vocabulary() in inspection.py refuses a file in which they don't rise
along the list.)

The file writes each byte as a visible letter (Radford et al. 2019). Those that print stand for
themselves, a space is Ġ and a newline Ċ.

    python step_11_merge-pairs-by-hand.py

How the list is learned from a text is left out.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, data
from shared.checks import Checks
from shared.console import Table, say

real = chapters.load_build(37)  # the finished chapter: what is not on this page

# ---------------------------------------------------------------- the idea


def byte_letters() -> dict[str, int]:
    """The letters that the file writes bytes with: letter -> byte.

    A byte that prints stands for itself. The others take the letters from number 256 on, in turn.
    """
    # "!" to "~", then the printing letters of Latin-1.
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printing]
    letters = {chr(byte): byte for byte in printing}
    for i, byte in enumerate(others):
        letters[chr(256 + i)] = byte
    return letters


def merge_word(word: str, order: dict[tuple[str, str], int]) -> list[list[str]]:
    """The stages of a word: its bytes as letters, then what each merge leaves.

    `order` maps a pair to its place in the list of merges.
    """
    letters = {byte: letter for letter, byte in byte_letters().items()}
    parts = [letters[byte] for byte in word.encode("utf-8")]
    stages = [parts]
    while True:
        pairs = list(zip(parts, parts[1:]))
        known = [pair for pair in pairs if pair in order]
        if not known:
            return stages
        earliest = min(known, key=order.get)
        i = pairs.index(earliest)
        parts = [*parts[:i], parts[i] + parts[i + 1], *parts[i + 2 :]]
        stages.append(parts)


# ---------------------------------------------------------------- look at it


def main() -> int:
    file = real.WeightsFile(real.packaged_weights())
    tokenizer = real.Tokenizer(file)
    merges = file.metadata["tokenizer.ggml.merges"]
    order = {tuple(merge.split(" ")): i for i, merge in enumerate(merges)}
    rows = []
    for word in (" matter", " kurtosis"):
        for i, parts in enumerate(merge_word(word, order)):
            rows.append([word.strip() if i == 0 else "", str(i), " ".join(parts)])
    say(Table(["word", "merges", "its parts"], rows))
    say("\nEach row has one part less than the row above it. A frequent word ends as one")
    say("token, a rare one as a few pieces.")

    checks = Checks()
    words = re.findall(r" ?[A-Za-z]+|\n", data.torch_docs()[0][:20_000])
    tokens = file.metadata["tokenizer.ggml.tokens"]
    ours = [part for word in words for part in merge_word(word, order)[-1]]
    theirs = [tokens[i] for word in words for i in tokenizer.encode(word)]
    checks.true(f"{len(words):,} words by tiktoken", "tokens", "same", ours == theirs)
    checks.equal("letters, one for each byte", len(set(byte_letters().values())), 256)
    checks.equal("a space is Ġ, a newline Ċ", [byte_letters()[c] for c in "ĠĊ"], [32, 10])
    made = [tokens.index(merge.replace(" ", "")) for merge in merges[:500]]
    checks.equal("numbers rise with merges", made == sorted(made), True)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
