"""Step 02: rebuild the tokenizer.

The model reads numbers, so its text must be cut into exactly the tokens that it was trained on.
The file holds its vocabulary: 49,152 tokens, and the merges by which they came about. A byte-pair
tokenizer starts with single bytes, joins the two neighbours whose pair stands earliest in the
list of merges, and repeats that until no pair is in the list. Each piece that is left is a token.

The library tiktoken does just that if it gets the tokens in the order of their merges. So all we
do is read the tokens and hand them over. Three things need care:
- The file writes bytes as visible letters: a space is Ġ. byte_letters() turns them back.
- Merging never crosses the border of a word; a pattern says what a word is, digits one by one.
- Special tokens, like <|im_end|>, structure a chat. Only we may write them: if a person types
  that name, it must stay plain text, or a message could end itself and speak for the model.

A chat is a text in a fixed form (ChatML). The model was trained to go on after the last line. (An
instruction to the model, in the same form, stands before the first message.)

    <|im_start|>user
    What is the capital of France?<|im_end|>
    <|im_start|>assistant

    python step_02_rebuild-the-tokenizer.py

Step 11 merges by hand and compares that with tiktoken.
"""

import re
import sys
from pathlib import Path

import tiktoken

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, data
from shared.checks import Checks
from shared.console import Table, UserError, say

real = chapters.load_build(37)  # the finished chapter: what is not on this page
conversation = real.conversation
inspection = real.inspection
WeightsFile = real.WeightsFile
byte_letters = real.byte_letters

# ---------------------------------------------------------------- the idea

CONTRACTION = r"'(?:[sdmt]|ll|ve|re)"
# How a text is cut into words before any merging, by the name that the file gives for it. \p{L}
# is any letter, \p{N} any digit. The last two parts leave the last space to the word behind it.
PATTERNS = {
    # "It's 42 cats" -> It|'s| 42| cats
    "gpt-2": CONTRACTION + r"| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    # "It's 42 cats" -> It|'s| |4|2| cats: each digit is a word and takes no space. So the last
    # space is left only to a letter or a sign: (?![^\s\p{N}]), not (?!\S).
    "smollm": CONTRACTION + r"|\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+",
}
NORMAL = 1  # the file's mark of an ordinary token; the others, like <|im_end|>, are special


class Tokenizer:
    """The byte-pair tokenizer in a GGUF file. `encoding` is tiktoken's."""

    def __init__(self, file: WeightsFile, patterns: dict = PATTERNS, types: set = inspection.TYPES):
        letters = byte_letters()
        inspection.check_vocabulary(file, patterns, letters, NORMAL, types)
        tokens = file.metadata["tokenizer.ggml.tokens"]
        marks = file.metadata["tokenizer.ggml.token_type"]
        self.n_tokens = len(tokens)
        self.special = {}
        ids = {}  # the bytes of each ordinary token -> its id
        for i, token in enumerate(tokens):
            if marks[i] == NORMAL:
                ids[bytes(letters[letter] for letter in token)] = i
            else:
                self.special[token] = i
        # Some rare bytes have no token, but tiktoken wants an id for each byte. So they get ids
        # after the last token, and encode() refuses a text in which one comes out.
        self.unsayable = [byte for byte in range(256) if bytes([byte]) not in ids]
        for i, byte in enumerate(self.unsayable):
            ids[bytes([byte])] = self.n_tokens + i
        self.encoding = tiktoken.Encoding(
            "gguf",
            pat_str=patterns[file.metadata["tokenizer.ggml.pre"]],
            mergeable_ranks=ids,
            special_tokens=self.special,
        )
        self.form = conversation.find_form(file, self.special)  # None: the model knows no chat
        self.start = conversation.find_start(file)  # ids before a text, mostly none
        self.ends = conversation.find_ends(file, self.special, self.form)  # each ends an answer

    def encode(self, text: str) -> list[int]:
        """Text -> ids. A special token's name stays text. UserError for a byte without token."""
        ids = []
        for piece in data.pieces_of(text):  # tiktoken fails at very many blanks in a row
            ids += self.encoding.encode_ordinary(piece)
        for i in ids:
            if i >= self.n_tokens:
                byte = self.unsayable[i - self.n_tokens]
                raise UserError(
                    f"the model's vocabulary has no token for the byte 0x{byte:02x} of this text"
                )
        return ids

    def chat(self, message: str, first: bool = True) -> list[int]:
        """A person's message in the form that the model was trained on.

        It ends where the answer begins. The first message comes after the model's instruction.
        """
        form = self.form.turn  # <|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n
        ids = []
        if first:
            form = self.form.opening + form
            ids += self.start
        longest_first = sorted(self.special, key=len, reverse=True)  # one may begin another
        names = "|".join(map(re.escape, longest_first))
        for piece in re.split(f"({names})", form):
            if piece in self.special:
                ids.append(self.special[piece])
            else:  # the message comes in after the cut: a special name in it stays text
                ids += self.encode(piece.replace("{}", message))
        return ids


# ---------------------------------------------------------------- look at it


def main() -> int:
    file = WeightsFile(real.packaged_weights())
    tokenizer = Tokenizer(file)
    rows = []
    for text in ("The details that matter", "  In 2026, it's 3.14", "naïve 東京 🙂", "<|im_end|>"):
        tokens = [tokenizer.encoding.decode([i]) for i in tokenizer.encode(text)]
        rows.append([text, "/".join(tokens)])
    say(Table(["text", "its tokens, between /"], rows))
    say("\nA common word is one token with the space before it. A rare letter is several")
    say("tokens, shown as �. The last row: a special name that a person types is text.")

    checks = Checks()
    docs = "".join(data.torch_docs())
    same = docs == tokenizer.encoding.decode(tokenizer.encode(docs))
    checks.true("there and back again", "all letters", "same", same)
    chat = tokenizer.chat("Say <|im_end|> twice.")
    n_ends = chat.count(tokenizer.special["<|im_end|>"])
    # The instruction ends, and the message; the name in the message is text.
    checks.equal("ends of turns in a chat", n_ends, 2)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
