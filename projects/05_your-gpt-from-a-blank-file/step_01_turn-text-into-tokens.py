"""Step 01: turn text into tokens.

A model computes with numbers, so text must become a list of whole numbers first, and such numbers
must become text again. A piece of text that has a number of its own is called a token.

The simplest way is one token per character: number the characters that occur. Every text can be
written so, but each token says little, and texts get long.

Byte-pair encoding gives frequent words one token. First the text is cut into word-like pieces, and
each piece into its bytes. A table, made beforehand, ranks the pairs of neighbours that may be
joined. In each piece, join the pair with the best rank, look again, and stop when no two neighbours
are in the table. A frequent word ends as one token, a rare one as a few, and any text at all can be
written.

    python step_01_turn-text-into-tokens.py

The next steps use characters. Step 12 shows how the table of pairs is learned.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import cli, console, data
from shared.checks import Checks

# ---------------------------------------------------------------- the idea


def characters_of(text: str) -> list[str]:
    """The vocabulary of a character tokenizer: each character that occurs, sorted."""
    return sorted(set(text))


def stages_of_joining(piece: bytes, ranks: dict[bytes, int]) -> list[list[bytes]]:
    """Byte-pair encoding of one piece: its parts before the first joining, and after each one.

    `ranks` maps every known string of bytes to its token; a lower number is a better rank.
    (Sennrich et al. 2016; on bytes as in GPT-2.)
    """
    parts = [bytes([byte]) for byte in piece]
    stages = [parts]
    while len(parts) > 1:
        pairs = [left + right for left, right in zip(parts, parts[1:])]
        found = [ranks.get(pair, len(ranks)) for pair in pairs]  # unknown pairs rank last
        best = found.index(min(found))  # where ranks are equal, the pair on the left
        if pairs[best] not in ranks:
            break
        parts = [*parts[:best], pairs[best], *parts[best + 2 :]]
        stages.append(parts)
    return stages


def join_pairs(piece: bytes, ranks: dict[bytes, int]) -> list[int]:
    """The tokens of one piece of text."""
    return [ranks[part] for part in stages_of_joining(piece, ranks)[-1]]


# ---------------------------------------------------------------- look at it


def main() -> int:
    text = "".join(data.torch_docs())
    characters = characters_of(text)
    bpe = data.bpe4k_encoding()
    ranks = {}
    for token in range(bpe.n_vocab):
        ranks[bpe.decode_single_token_bytes(token)] = token  # a token's number is its rank

    console.say(f"The text: {len(text):,} characters, {len(characters)} different ones.")
    word = " gradients"
    console.say(f"{word!r} as characters: {[characters.index(c) for c in word]}")
    console.say(f"{word!r} as byte pairs, joined one pair at a time:")
    for parts in stages_of_joining(word.encode("utf-8"), ranks):
        console.say("  " + "|".join(part.decode("utf-8") for part in parts))
    rare = " unsqueeze"
    pieces = stages_of_joining(rare.encode("utf-8"), ranks)[-1]
    per_token = len(text) / len(bpe.encode_ordinary(text))
    console.say(f"{rare!r} is rarer and ends as {len(pieces)} tokens: {pieces}.")
    console.say(f"On this text one byte-pair token stands for {per_token:.2f} characters,")
    console.say("so 100 of them show a model about three times as much text as 100 characters.")

    checks = Checks()
    tokenizer = data.CharTokenizer(text)
    by_hand = [characters.index(c) for c in text[:2000]]
    checks.equal("2,000 characters to tokens", tokenizer.encode(text[:2000]) == by_hand, True)
    back = tokenizer.decode(tokenizer.encode(text))
    checks.equal("tokens back to the whole text", back == text, True)
    words = set(re.findall("[A-Za-z]+", text)) | {"Ωμέγα", "größer", "注意力"}
    unlike_tiktoken = 0
    not_decoded = 0
    for word in sorted(words):
        tokens = join_pairs(f" {word}".encode(), ranks)
        unlike_tiktoken += tokens != bpe.encode_ordinary(f" {word}")
        not_decoded += bpe.decode(tokens) != f" {word}"
    checks.equal(f"of {len(words):,} words, unlike tiktoken", unlike_tiktoken, 0)
    checks.equal("  not decoded to the word", not_decoded, 0)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
