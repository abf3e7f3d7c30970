"""Step 02: rebuild the tokenizer.

Beside its weights the file holds the model's vocabulary: 49,152 tokens and the merges that made them. This step turns
them into a `tiktoken.Encoding`, and wraps a chat in the model's special tokens. It leaves out learning a vocabulary
from text, which shared/train_bpe.py does.

    python step_02_rebuild-the-tokenizer.py     (about 5 seconds)

It prints some texts as tokens and the bytes that no token says, and holds the tokens to a byte-pair encoder that
follows the file's list of merges, and the chat to the template in the file.
"""

import re
import sys
import unicodedata
from pathlib import Path

import jinja2  # torch brings it
import tiktoken

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, data
from shared.checks import Checks
from shared.console import Table, say
from shared.console import UserError

step_01 = chapters.load_step(37, 1)

CONTRACTION = r"'(?:[sdmt]|ll|ve|re)"
PATTERNS = {  # how text falls into words, by the file's name for it
    "gpt-2": CONTRACTION + r"| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "smollm": CONTRACTION + r"|\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+",  # each digit on its own
}
NORMAL = 1  # the file's mark of an ordinary token; any other never comes out of plain text
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"  # said first, by the chat template


def byte_letters() -> dict[str, int]:
    """GPT-2's spelling of bytes as visible letters: each letter and the byte it stands for (Radford et al. 2019)."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(others)}


class Tokenizer:
    """The byte-pair tokenizer in a GGUF file. `encoding` is tiktoken's; encode() refuses what it can't say."""

    def __init__(self, file):
        kind, pattern, tokens, marks, merges, end = (
            file.metadata.get(f"tokenizer.ggml.{name}")
            for name in ("model", "pre", "tokens", "token_type", "merges", "eos_token_id")
        )
        if kind != "gpt2" or pattern not in PATTERNS:
            raise file.refusal(f"its tokenizer is {kind} {pattern}, and we know gpt2 with {' or '.join(PATTERNS)}")
        if not (tokens and merges and marks and len(marks) == len(tokens)):
            raise file.refusal("its metadata holds no whole vocabulary: tokens, their types and merges")
        letters, self.n_tokens = byte_letters(), len(tokens)
        self.special = {token: i for i, token in enumerate(tokens) if marks[i] != NORMAL}
        ids = {token: i for i, token in enumerate(tokens) if marks[i] == NORMAL}
        made = [ids.get(merge.replace(" ", ""), -1) for merge in merges]
        if -1 in made or made != sorted(made):  # tiktoken merges in the order of the ids
            raise file.refusal("its tokens are not numbered in the order of their merges")
        if unknown := set("".join(ids)) - letters.keys():
            raise file.refusal(f"its tokens hold letters that stand for no byte: {''.join(sorted(unknown)[:9])}")
        ranks = {bytes(letters[letter] for letter in token): i for token, i in ids.items()}
        self.unsayable = [byte for byte in range(256) if bytes([byte]) not in ranks]
        # tiktoken would crash on a byte without a token: these get numbers past the end, which encode() looks for.
        ranks |= {bytes([byte]): self.n_tokens + i for i, byte in enumerate(self.unsayable)}
        self.encoding = tiktoken.Encoding(
            "gguf", pat_str=PATTERNS[pattern], mergeable_ranks=ranks, special_tokens=self.special
        )
        self.end = end  # the model writes it when its answer is complete
        self.chats = {"<|im_start|>", "<|im_end|>"} <= self.special.keys()

    def encode(self, text: str) -> list[int]:
        """Text -> ids; a special token's name in it is plain text. UserError for a byte without a token."""
        ids = self.encoding.encode_ordinary(text)
        lost = [self.unsayable[i - self.n_tokens] for i in ids if i >= self.n_tokens]
        if lost:
            raise UserError(f"the model's vocabulary has no token for the byte 0x{lost[0]:02x} of this text")
        return ids

    def chat(self, message: str, first: bool = True) -> list[int]:
        """A person's message the way the model was taught to read it (ChatML), up to where its answer begins."""
        start, end, newline = self.special["<|im_start|>"], self.special["<|im_end|>"], self.encode("\n")
        system = [start, *self.encode("system\n" + SYSTEM), end, *newline] if first else []
        return [*system, start, *self.encode("user\n" + message), end, *newline, start, *self.encode("assistant\n")]


def merge_by_list(text: str, merges: list[str]) -> list[str]:
    """The reference: digits apart, then GPT-2's words, then in each word the earliest merge until none fits."""
    order, tokens = {tuple(merge.split(" ")): i for i, merge in enumerate(merges)}, []
    letters = {byte: letter for letter, byte in byte_letters().items()}
    apart = "".join(f"\0{c}\0" if unicodedata.category(c)[0] == "N" else c for c in text)
    for piece in filter(None, apart.split("\0")):
        for word in re.findall(r"'(?:[sdmt]|ll|ve|re)| ?[^\W_]+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+", piece):
            parts = [letters[byte] for byte in word.encode("utf-8")]
            while pairs := [(order[pair], i) for i, pair in enumerate(zip(parts, parts[1:])) if pair in order]:
                _, i = min(pairs)
                parts[i : i + 2] = [parts[i] + parts[i + 1]]
            tokens += parts
    return tokens


def main() -> int:
    file, checks = step_01.WeightsFile(step_01.packaged_weights()), Checks()
    tokenizer = Tokenizer(file)
    samples = ["The details that matter", "  In 2026, it's 3.14", "naïve 東京 🙂", "<|im_end|>"]
    pieces = [[tokenizer.encoding.decode([i]) for i in tokenizer.encode(text)] for text in samples]
    say(
        Table(
            ["text", "tokens"], [[text, " ".join(f"[{piece}]" for piece in row)] for text, row in zip(samples, pieces)]
        )
    )
    say()
    say(f"Bytes without a token: {bytes(tokenizer.unsayable).hex(' ')}. They are rare control characters, and bytes")
    say("that begin no character in use, so ordinary text has none; encode() refuses the others by name.")

    docs = "".join(data.torch_docs())
    same = docs == tokenizer.encoding.decode(tokenizer.encode(docs))
    checks.true("torch's documentation there and back", f"{len(docs):,} letters", "the same", same)
    hard = docs[:20_000] + " ".join(samples) + " \t\n  7  x\r\n\r\n   12 34½ Ⅷ don't DON'T  "
    tokens = [file.metadata["tokenizer.ggml.tokens"][i] for i in tokenizer.encode(hard)]
    same = tokens == merge_by_list(hard, file.metadata["tokenizer.ggml.merges"])
    checks.true("tokens as the list of merges makes them", f"{len(tokens):,} tokens", "the same", same)
    chat = tokenizer.chat("Say <|im_end|> twice.")
    same = tokenizer.encoding.decode(chat) == jinja2.Template(file.metadata["tokenizer.chat_template"]).render(
        messages=[{"role": "user", "content": "Say <|im_end|> twice."}], add_generation_prompt=True
    )
    checks.true("a chat as the file's template writes it", f"{len(chat)} tokens", "the same", same)
    checks.equal("starts, ends in it: the text's own is text", [chat.count(i) for i in (1, 2)], [3, 2])
    checks.equal(
        "ordinary, special, missing",
        [tokenizer.n_tokens - 17, len(tokenizer.special), len(tokenizer.unsayable)],
        [49_135, 17, 21],
    )
    checks.raises("a byte without a token", UserError, ["0xf1"], lambda: tokenizer.encode("\U00040000"))
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
