"""Step 01: turn text into tokens.

The first step, so there is nothing to add to: a model computes with numbers, and this is how text becomes some.
Two ways. One token per character: every text can be written, but each token says little. Byte-pair encoding: start
from bytes and join the pair that was learned earliest, again and again, until no pair is known. Both undo exactly.

It leaves out how the pairs are learned (shared/train_bpe.py did that) and how text is cut before joining.

    python step_01_turn-text-into-tokens.py

It prints both encodings of a word, and checks the joining against tiktoken on a thousand words. About 2 seconds.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import cli, console, data
from shared.checks import Checks
from shared.console import UserError


def characters_of(text: str) -> list[str]:
    """The vocabulary of a character tokenizer: each character that occurs, in the order of code points."""
    return sorted(set(text))


def join_pairs(piece: bytes, ranks: dict[bytes, int]) -> list[int]:
    """Byte-pair encoding of one piece of text (Sennrich et al. 2016, in bytes as in GPT-2).

    `ranks` maps each known string of bytes to its id, in the order of learning: a low id was learned early, so its
    pair is joined first. Where two places hold the same pair, the left one goes first.
    """
    parts = [bytes([byte]) for byte in piece]
    while len(parts) > 1:
        joined = [left + right for left, right in zip(parts, parts[1:])]
        best = min(range(len(joined)), key=lambda i: ranks.get(joined[i], len(ranks)))
        if joined[best] not in ranks:
            break
        parts[best : best + 2] = [joined[best]]
    return [ranks[part] for part in parts]


def main() -> int:
    checks = Checks()
    text = "".join(data.torch_docs())
    characters = characters_of(text)
    ids = {character: i for i, character in enumerate(characters)}
    tokenizer, bpe = data.CharTokenizer(text), data.bpe4k_encoding()
    ranks = {bpe.decode_single_token_bytes(i): i for i in range(bpe.n_vocab)}

    word = " unsqueeze"
    pieces = [bpe.decode_single_token_bytes(i).decode("utf-8") for i in join_pairs(word.encode("utf-8"), ranks)]
    console.say(f"The corpus: {len(text):,} characters of torch's documentation, {len(characters)} kinds of them.")
    console.say(f"{word!r} by characters: {[ids[c] for c in word]}")
    console.say(f"{word!r} by pairs:      {join_pairs(word.encode('utf-8'), ranks)} = {pieces}")
    console.say(f"One pair-token stands for {len(text) / len(bpe.encode_ordinary(text)):.2f} characters on average.")

    beginning = text[:2000]
    checks.equal("characters -> ids", tokenizer.encode(beginning), [characters.index(c) for c in beginning])
    checks.equal("ids -> characters gives the corpus back", tokenizer.decode(tokenizer.encode(text)), text)
    checks.raises("a character that the corpus lacks", UserError, ["'€'"], lambda: tokenizer.encode("5 €"))

    words = sorted({f" {w}" for w in re.findall("[A-Za-z]+", text)} | {" Ωμέγα", " größer", " 注意力"})
    theirs = [bpe.encode_ordinary(w) for w in words]
    checks.equal(
        f"joined pairs of {len(words):,} words that differ from tiktoken's",
        sum(join_pairs(w.encode("utf-8"), ranks) != t for w, t in zip(words, theirs)),
        0,
    )
    checks.equal("decoding gives each word back", sum(bpe.decode(t) != w for w, t in zip(words, theirs)), 0)
    single = max((len(t), w) for w, t in zip(words, theirs))
    console.say(f"The word that takes most pair-tokens: {single[1]!r}, {single[0]} of them.")
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
