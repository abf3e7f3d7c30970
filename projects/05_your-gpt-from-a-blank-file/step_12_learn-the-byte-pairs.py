"""Step 12: learn the byte pairs.

Step 01 joined pairs of neighbours by a table that was already there. Where does the table come
from? It is learned from text, by counting (Sennrich et al. 2016):

1. Cut the text into word-like pieces, and each piece into bytes.
2. Count how often each two neighbours stand side by side in the whole text.
3. Join the most frequent pair wherever it stands; from now on it is one part. Write it down.
4. Go on with 2, until enough pairs are written down.

So pairs of frequent letters come first; longer parts, up to whole words, come later. The order in
which pairs were learned is the rank by which step 01 joins them.

    python step_12_learn-the-byte-pairs.py

draws outputs/step_12.png: the more pairs are learned, the more text a token holds. The 4,096 tokens
of shared/bpe4k.tiktoken were learned so; in the top folder, this writes the file anew, in minutes:

    python -c "from shared import chapters; chapters.load_step(5, 12).write_vocabulary()"
"""

import base64
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import regex  # comes with tiktoken; knows \p{L}, any letter, which re does not
import tiktoken

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import cli, console, data, figures, files
from shared.checks import Checks

# ---------------------------------------------------------------- the idea


def learn_plainly(texts: Iterable[str], n_merges: int) -> list[bytes]:
    """The first n_merges joined pairs, as bytes, in the order in which they are learned."""
    pieces, times = cut(texts)
    merges = []
    while len(merges) < n_merges:
        best = most_frequent(count_pairs(pieces, times))
        merges.append(best[0] + best[1])
        pieces = [join(parts, best) for parts in pieces]
    return merges


def cut(texts: Iterable[str]) -> tuple[list[list[bytes]], list[int]]:
    """The word-like pieces of the texts, each once, as lists of bytes; and how often each comes."""
    counter = Counter()
    for text in texts:
        counter.update(regex.findall(data.BPE4K_PATTERN, text))
    pieces = [[bytes([b]) for b in piece.encode("utf-8")] for piece in counter]
    return pieces, list(counter.values())


def count_pairs(pieces: list[list[bytes]], times: list[int]) -> Counter:
    """How often each two neighbours stand side by side."""
    counts = Counter()
    for parts, n in zip(pieces, times):
        for pair in zip(parts, parts[1:]):
            counts[pair] += n
    return counts


def most_frequent(counts: Counter) -> tuple[bytes, bytes]:
    """Of equally frequent pairs the one with the lower bytes: so everyone learns the same table."""
    most = max(counts.values())
    return min(pair for pair, count in counts.items() if count == most)


def join(parts: list[bytes], pair: tuple[bytes, bytes]) -> list[bytes]:
    """The parts of a piece with the pair joined wherever it stands, from left to right."""
    joined = parts[:1]
    for part in parts[1:]:
        if (joined[-1], part) == pair:
            joined[-1] = joined[-1] + part
        else:
            joined.append(part)
    return joined


def learn_merges(texts: Iterable[str], n_merges: int) -> list[bytes]:
    """The same in less time: after a joining, only the pieces that it changes are counted anew."""
    pieces, times = cut(texts)
    counts = count_pairs(pieces, times)
    merges = []
    while len(merges) < n_merges and any(counts.values()):  # until nothing is left to join
        best = most_frequent(counts)
        merges.append(best[0] + best[1])
        for i, parts in enumerate(pieces):
            if best in zip(parts, parts[1:]):
                counts.subtract(count_pairs([parts], [times[i]]))
                pieces[i] = join(parts, best)
                counts.update(count_pairs([pieces[i]], [times[i]]))
    return merges


def write_vocabulary(vocab_size: int = 4096) -> None:
    """Learn shared/bpe4k.tiktoken from torch's source code: the 256 bytes, then the pairs."""
    merges = learn_merges(data.torch_source().values(), vocab_size - 256)
    tokens = [bytes([b]) for b in range(256)] + merges
    encoded = [base64.b64encode(token).decode("ascii") for token in tokens]
    lines = [f"{token} {rank}\n" for rank, token in enumerate(encoded)]
    files.write_text(data.BPE4K_FILE, "".join(lines))


# ---------------------------------------------------------------- look at it


def characters_per_token(texts: list[str], merges: list[bytes]) -> float:
    tokens = [bytes([b]) for b in range(256)] + merges
    ranks = {token: rank for rank, token in enumerate(tokens)}
    encoding = tiktoken.Encoding(
        "learned", pat_str=data.BPE4K_PATTERN, mergeable_ranks=ranks, special_tokens={}
    )
    n_tokens = sum(len(encoding.encode_ordinary(text)) for text in texts)
    return sum(map(len, texts)) / n_tokens


def main() -> int:
    textbook = "low\n" * 5 + "lower\n" * 2 + "newest\n" * 6 + "widest\n" * 3
    console.say("low 5 times, lower 2, newest 6, widest 3. The first six pairs learned:")
    console.say(", ".join(m.decode("utf-8") for m in learn_plainly([textbook], 6)))
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
    console.say(f"With 500 pairs one token holds {packed[-1]:.2f} characters. Later")
    console.say("pairs add less than early ones. Drawn to outputs/step_12.png.")

    checks = Checks()
    checks.equal("20 pairs, learned plainly", learn_plainly(docs, 20) == merges[:20], True)
    checks.between("characters a token, 500", packed[-1], 2.0, 3.0)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
