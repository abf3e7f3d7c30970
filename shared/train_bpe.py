"""Learn the 4,096-entry byte-pair vocabulary of shared/bpe4k.tiktoken from the pinned torch's source.

    python shared/train_bpe.py          writes shared/bpe4k.tiktoken (two or three minutes)

Byte-pair encoding (Sennrich et al. 2016): start from the 256 bytes, and again and again join the neighbouring
pair that occurs most often in the text. Ties go to the pair whose bytes come first, so everyone learns the same.
"""

import base64
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import regex  # comes with tiktoken, which splits text with the same engine

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from shared import files, data

VOCAB_SIZE = 4096


def learn_merges(texts: Iterable[str], n_merges: int) -> list[bytes]:
    """The first n_merges joined pairs, as bytes, in the order in which they are learned."""
    pieces = Counter()
    for text in texts:
        pieces.update(regex.findall(data.BPE4K_PATTERN, text))
    words = [[bytes([b]) for b in piece.encode("utf-8")] for piece in pieces]
    counts = list(pieces.values())
    pair_counts, where = Counter(), defaultdict(set)  # where[pair]: the words that hold it (or once did)
    for w, word in enumerate(words):
        for pair in zip(word, word[1:]):
            pair_counts[pair] += counts[w]
            where[pair].add(w)
    merges = []
    while len(merges) < n_merges and pair_counts:
        best = min(pair_counts, key=lambda pair: (-pair_counts[pair], pair))
        merges.append(best[0] + best[1])
        for w in where.pop(best):
            word = words[w]
            for pair in zip(word, word[1:]):
                pair_counts[pair] -= counts[w]
            words[w] = word = join(word, best)
            for pair in zip(word, word[1:]):
                pair_counts[pair] += counts[w]
                where[pair].add(w)
        del pair_counts[best]
    return merges


def join(word: list[bytes], pair: tuple[bytes, bytes]) -> list[bytes]:
    """The word with each occurrence of the pair joined, from the left."""
    joined, i = [], 0
    while i < len(word):
        if i + 1 < len(word) and (word[i], word[i + 1]) == pair:
            joined.append(word[i] + word[i + 1])
            i += 2
        else:
            joined.append(word[i])
            i += 1
    return joined


def main() -> None:
    tokens = [bytes([b]) for b in range(256)] + learn_merges(data.torch_source(), VOCAB_SIZE - 256)
    lines = [f"{base64.b64encode(token).decode('ascii')} {rank}\n" for rank, token in enumerate(tokens)]
    files.write_text(data.BPE4K_FILE, "".join(lines))
    print(f"wrote {len(tokens)} entries to {data.BPE4K_FILE.name}")


if __name__ == "__main__":
    main()
