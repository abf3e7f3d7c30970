"""Step 12: learn the byte pairs.

Step 01 joined pairs of neighbours by a table that was already there. Where does the table come
from? It is learned from text, by counting (Sennrich et al. 2016):

1. Cut the text into word-like pieces, and each piece into bytes.
2. Count how often each two neighbours stand side by side in the whole text.
3. Join the most frequent pair wherever it stands; from now on it is one part. Write it down.
4. Go on with 2, until enough pairs are written down.

So frequent letters join first, then frequent syllables, then frequent words. The order in which
pairs were learned is the rank by which step 01 joins them. Of pairs that are equally frequent, the
one with the lower byte values is taken, so that everyone learns the same table.

    python step_12_learn-the-byte-pairs.py

draws outputs/step_12.png: the more pairs are learned, the more text a token holds. The 4,096 tokens
of shared/bpe4k.tiktoken were learned so, in some minutes. To write that file anew, from the top
folder:

    python -c "from shared import chapters; chapters.load_step(5, 12).write_vocabulary()"
"""

import base64
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import regex  # comes with tiktoken, which cuts text into pieces with the same engine
import tiktoken

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import cli, console, data, figures, files
from shared.checks import Checks

# ---------------------------------------------------------------- the idea


def learn_merges(texts: Iterable[str], n_merges: int) -> list[bytes]:
    """The first n_merges joined pairs, as bytes, in the order in which they are learned.

    The idea is the while loop: find the most frequent pair, write it down, join it. The rest saves
    time, as counting everything after each joining would take days: each different piece is kept
    once, with its count, and after a joining only the pieces that hold the pair are counted anew.
    """
    counter = Counter()
    for text in texts:
        counter.update(regex.findall(data.BPE4K_PATTERN, text))
    pieces = [[bytes([b]) for b in piece.encode("utf-8")] for piece in counter]
    times = list(counter.values())  # how often each piece occurs
    pair_counts = Counter()
    holders = defaultdict(set)  # for each pair, the pieces that hold it or did so before
    for i, piece in enumerate(pieces):
        for pair in zip(piece, piece[1:]):
            pair_counts[pair] += times[i]
            holders[pair].add(i)
    merges = []
    while len(merges) < n_merges and pair_counts:
        # the most frequent pair, so the least -count; of equals the one with the lower bytes
        best = min(pair_counts, key=lambda pair: (-pair_counts[pair], pair))
        if pair_counts[best] == 0:
            break  # nothing is left to join
        merges.append(best[0] + best[1])
        for i in holders.pop(best):  # (one that no longer holds it stays as it is)
            for pair in zip(pieces[i], pieces[i][1:]):  # take the piece out of the counts,
                pair_counts[pair] -= times[i]
            pieces[i] = join(pieces[i], best)
            for pair in zip(pieces[i], pieces[i][1:]):  # and count it as it is now
                pair_counts[pair] += times[i]
                holders[pair].add(i)
        del pair_counts[best]
    return merges


def join(parts: list[bytes], pair: tuple[bytes, bytes]) -> list[bytes]:
    """The parts of a piece with the pair joined wherever it stands, from left to right."""
    joined = []
    i = 0
    while i < len(parts):
        if tuple(parts[i : i + 2]) == pair:
            joined.append(parts[i] + parts[i + 1])
            i += 2
        else:
            joined.append(parts[i])
            i += 1
    return joined


def write_vocabulary(vocab_size: int = 4096) -> None:
    """Learn shared/bpe4k.tiktoken from the source code of torch: the 256 bytes, then the pairs."""
    merges = learn_merges(data.torch_source(), vocab_size - 256)
    tokens = [bytes([b]) for b in range(256)] + merges
    lines = []
    for rank, token in enumerate(tokens):
        lines.append(f"{base64.b64encode(token).decode('ascii')} {rank}\n")
    files.write_text(data.BPE4K_FILE, "".join(lines))


# ---------------------------------------------------------------- look at it


def characters_per_token(texts: list[str], merges: list[bytes]) -> float:
    ranks = {}
    for rank, token in enumerate([bytes([b]) for b in range(256)] + merges):
        ranks[token] = rank
    encoding = tiktoken.Encoding(
        "learned", pat_str=data.BPE4K_PATTERN, mergeable_ranks=ranks, special_tokens={}
    )
    n_tokens = sum(len(encoding.encode_ordinary(text)) for text in texts)
    return sum(map(len, texts)) / n_tokens


def main() -> int:
    textbook = "low\n" * 5 + "lower\n" * 2 + "newest\n" * 6 + "widest\n" * 3
    console.say("low 5 times, lower 2, newest 6, widest 3. The first six pairs learned:")
    console.say(", ".join(m.decode("utf-8") for m in learn_merges([textbook], 6)))
    docs = data.torch_docs()
    merges = learn_merges(docs, 500)
    console.say("\nOf torch's documentation, pairs 1 to 10 and 491 to 500:")
    for ten in (merges[:10], merges[-10:]):
        console.say("  " + " ".join(repr(m.decode("utf-8")) for m in ten))
    sizes = (0, 20, 50, 100, 200, 300, 500)
    packed = [characters_per_token(docs, merges[:size]) for size in sizes]
    figure = figures.new_figure(7, 3.2)
    axes = figure.subplots()
    axes.plot(sizes, packed, "o-", color=figures.COLOURS[0])
    figures.label(axes, "How much text one token holds", "pairs learned", "characters a token")
    figures.save(figure, __file__)
    console.say(f"With 500 pairs one token holds {packed[-1]:.2f} characters. outputs/step_12.png")
    console.say("shows how each further pair adds less than the one before.")

    checks = Checks()
    four = learn_merges([textbook], 4)
    checks.equal("textbook's first four", b" ".join(four).decode("utf-8"), "es est lo low")
    checks.equal("pairs learned twice", len(merges) - len(set(merges)), 0)
    table = data.bpe4k_encoding()
    known = [table.decode_single_token_bytes(i) for i in range(table.n_vocab)]
    checks.equal("256 bytes come first", known[:256] == [bytes([b]) for b in range(256)], True)
    checks.between("characters a token, 500", packed[-1], 2.0, 3.0)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
