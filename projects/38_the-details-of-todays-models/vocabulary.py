"""Chapter 38's tokenizers: text becomes numbers in the way that a weights file says.

Two kinds are in use. Byte pairs (chapter 37, steps 02 and 11) start from bytes and merge within
words; models differ in what a word is. Pieces start from letters and merge across the whole text,
the best score first: Llama 2, Mistral, Gemma (Kudo & Richardson 2018, "bpe").
"""

import heapq
import re
import sys
import unicodedata
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters

real = chapters.load_build(37)
conversation = real.conversation
inspection = real.inspection

# ---------------------------------------------------------------- words

# \p{L} is any letter, \p{Lu} a capital one, \p{M} an accent by itself, \p{N} a digit, \p{P} and
# \p{S} signs. (?i: ...) takes capital letters too.
ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"  # line ends; spaces, but for one that the next word takes


def like_gpt4(digits: str) -> str:
    """GPT-4's words: `digits` in a row, line ends with the signs before them."""
    return rf"{ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|{SIGNS}|{BLANKS}"


def like_gpt4o(digits: str, ending: str) -> str:
    """GPT-4o's words: a small letter ends a run of capitals, and `ending` belongs to its word."""
    capital = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
    small = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    first = r"[^\r\n\p{L}\p{N}]?"
    signs = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
    words = f"{first}{capital}*{small}+{ending}|{first}{capital}+{small}*{ending}"
    return f"{words}|{digits}|{signs}|{BLANKS}"


EAST = "一-龥぀-ゟ゠-ヿ"  # Chinese and Japanese
DEEPSEEK = "|".join(  # its three cuts, one after the other, as one: digits, EAST, all else
    (
        r"\p{N}{1,3}",
        rf"[[{EAST}]&&[\p{{L}}\p{{M}}]]+|[[{EAST}]&&[\p{{P}}\p{{S}}]]+",
        r"[!-/:-@\[-`{-~][A-Za-z]+",
        rf"[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}--[{EAST}]]+",
        rf" ?[\p{{P}}\p{{S}}--[{EAST}]]+[\r\n]*",
        rf"\s*[\r\n]+|\s+(?![^\s\p{{N}}{EAST}])|\s+",
        r"[^\s\p{L}\p{M}\p{N}\p{P}\p{S}]",  # what is left
    )
)
# By the name that a file gives it; where a name is a model's, others have it too.
PATTERNS = real.PATTERNS | {
    "olmo": real.PATTERNS["gpt-2"],
    "refact": real.PATTERNS["smollm"],  # Granite 3
    "command-r": real.PATTERNS["smollm"],
    "llama-bpe": like_gpt4(r"\p{N}{1,3}"),  # Llama 3, SmolLM3
    "dbrx": like_gpt4(r"\p{N}{1,3}"),  # OLMo 2
    "qwen2": like_gpt4(r"\p{N}"),  # Qwen2 and Qwen3
    "deepseek-r1-qwen": like_gpt4(r"\p{N}"),  # Qwen2 that DeepSeek trained further
    "gpt-4o": like_gpt4o(r"\p{N}{1,3}", ENGLISH + "?"),  # gpt-oss
    "tekken": like_gpt4o(r"\p{N}", ""),  # Mistral, from Nemo on
    "deepseek-v3": DEEPSEEK,
}
# Their texts begin with the first token, even if the file doesn't say so.
BEGIN = {"llama-bpe", "tekken"}
# Their texts have é for e and a separate accent, wherever there is such a letter (NFC).
COMPOSED = {"olmo", "command-r", "qwen2", "deepseek-r1-qwen"}

# ---------------------------------------------------------------- byte pairs

OWN = inspection.OWN


class FileTokenizer(real.Tokenizer):
    """What both kinds have besides chapter 37's: tokens that stand for their name in any text.

    Their makers added them, like <think>. A token that steers, like <|im_end|>, is none of them.
    """

    def find_own(self, file) -> None:
        """Keep the tokens of the makers' own."""
        tokens = file.metadata["tokenizer.ggml.tokens"]
        marks = file.metadata["tokenizer.ggml.token_type"]
        self.own = {token: i for i, token in enumerate(tokens) if marks[i] == OWN}
        longest_first = sorted(self.own, key=len, reverse=True)
        self.own_names = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def encode(self, text: str) -> list[int]:
        """Text -> ids. UserError for what the vocabulary can't say."""
        ids = []
        end = 0
        for found in self.own_names.finditer(text):
            ids += self.encode_rest(text[end : found.start()])
            ids.append(self.own[found[0]])
            end = found.end()
        return ids + self.encode_rest(text[end:])


class BytePairTokenizer(FileTokenizer):
    """Chapter 37's, with the words of more models."""

    def __init__(self, file):
        super().__init__(file, PATTERNS, inspection.TYPES | {OWN})
        pre = file.metadata["tokenizer.ggml.pre"]
        self.start = conversation.find_start(file, usual=pre in BEGIN)
        self.composed = pre in COMPOSED
        self.find_own(file)

    def encode_rest(self, text: str) -> list[int]:
        """Text without tokens of the makers' own -> ids."""
        if self.composed:
            text = unicodedata.normalize("NFC", text)
        return real.Tokenizer.encode(self, text)


# ---------------------------------------------------------------- pieces

SPACE = "▁"  # how the vocabulary writes a space
BYTE = 6  # the file's mark of a token for one byte, written <0x0A>


class PieceTokenizer(FileTokenizer):
    """Merges letters to the pieces of a vocabulary, the best score first.

    A letter that is no piece comes out as its bytes.
    """

    def __init__(self, file):
        check_pieces(file)
        tokens = file.metadata["tokenizer.ggml.tokens"]
        marks = file.metadata["tokenizer.ggml.token_type"]
        scores = file.metadata["tokenizer.ggml.scores"]
        self.special = {}
        self.ids = {}
        self.scores = {}
        said = []  # the bytes that each token stands for
        for i, token in enumerate(tokens):
            if marks[i] == real.NORMAL:
                self.ids[token] = i
                self.scores[token] = scores[i]
                said.append(token.replace(SPACE, " ").encode("utf-8"))
            elif marks[i] == BYTE:
                self.ids[token] = i
                said.append(bytes([int(token[3:5], 16)]))
            else:
                self.special[token] = i
                said.append(token.encode("utf-8"))
        self.encoding = Said(said)
        self.n_tokens = len(tokens)
        self.prefix = " " if file.metadata.get("tokenizer.ggml.add_space_prefix", True) else ""
        self.form = conversation.find_form(file, self.special)
        self.start = conversation.find_start(file, usual=True)
        self.ends = conversation.find_ends(file, self.special, self.form)
        self.find_own(file)

    def encode_rest(self, text: str) -> list[int]:
        """Text without tokens of the makers' own -> ids."""
        if not text:
            return []
        ids = []
        for piece in self.merge((self.prefix + text).replace(" ", SPACE)):
            if piece in self.scores:
                ids.append(self.ids[piece])
            else:
                in_bytes = piece.encode("utf-8", errors="replace")  # ? for half a letter
                ids += [self.ids[f"<0x{byte:02X}>"] for byte in in_bytes]
        return ids

    def merge(self, text: str) -> list[str]:
        """Text -> its pieces: the two neighbours that make the best piece are joined, and again."""
        pieces = list(text)  # "" once it has gone into its left neighbour
        left = list(range(-1, len(text) - 1))  # of each piece, the neighbours that are left
        right = list(range(1, len(text) + 1))
        waiting = []  # pairs that can be joined, the best first, of equal ones the leftmost

        def offer(i: int, j: int) -> None:
            if i >= 0 and j < len(text):
                pair = pieces[i] + pieces[j]
                if pair in self.scores:
                    heapq.heappush(waiting, (-self.scores[pair], i, j, pair))

        for i in range(len(text) - 1):
            offer(i, i + 1)
        while waiting:
            _, i, j, pair = heapq.heappop(waiting)
            if not pieces[i] or not pieces[j] or pieces[i] + pieces[j] != pair:
                continue  # one of the two has been joined with another meanwhile
            pieces[i] = pair
            pieces[j] = ""
            right[i] = right[j]
            if right[j] < len(text):
                left[right[j]] = i
            offer(left[i], i)
            offer(i, right[i])
        return [piece for piece in pieces if piece]


class Said:
    """What tokens stand for, by the names that tiktoken gives to it."""

    def __init__(self, said: list[bytes]):
        self.said = said

    def decode_single_token_bytes(self, token: int) -> bytes:
        return self.said[token]

    def decode(self, tokens: Iterable[int]) -> str:
        return b"".join(self.said[token] for token in tokens).decode("utf-8", errors="replace")


def check_pieces(file) -> None:
    """UserError unless the file holds a whole vocabulary of pieces, and all bytes among them."""
    inspection.check_tokens(file, {"scores": float}, inspection.TYPES | {OWN, BYTE})
    tokens = file.metadata["tokenizer.ggml.tokens"]
    marks = file.metadata["tokenizer.ggml.token_type"]
    in_bytes = {tokens[i] for i, mark in enumerate(marks) if mark == BYTE}
    missing = [byte for byte in range(256) if f"<0x{byte:02X}>" not in in_bytes]
    if missing or len(in_bytes) > 256:
        raise file.refusal(f"its vocabulary has {len(in_bytes)} tokens for the 256 bytes")


def open_tokenizer(file) -> FileTokenizer:
    """The tokenizer in a GGUF file. UserError if it is of no kind that we know."""
    if file.metadata.get("tokenizer.ggml.model") == "llama":
        return PieceTokenizer(file)
    return BytePairTokenizer(file)
