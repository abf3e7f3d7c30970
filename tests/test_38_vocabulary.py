"""Chapter 38's tokenizers: what a word is, by model; pieces by score; tokens that stand for their name."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import regex  # what tiktoken requires
import tiktoken

from shared import chapters
from shared.console import UserError

sys.path.insert(0, str(Path(__file__).parent))

tokenizers = pytest.importorskip("tokenizers")
from tokenizers import Regex, decoders, models, normalizers  # noqa: E402
from tokenizers import pre_tokenizers as pre  # noqa: E402

vocabulary = chapters.load_file(chapters.chapter_folder(38) / "vocabulary.py")
LETTERS = chapters.load_build(37).byte_letters()

# ---------------------------------------------------------------- words


def split(pattern: str) -> pre.Split:
    return pre.Split(Regex(pattern), "isolated")


def in_bytes(*before) -> pre.Sequence:
    """GPT-2's words, after other cuts; they come out as the letters that stand for bytes."""
    return pre.Sequence([*before, pre.ByteLevel(add_prefix_space=False, use_regex=True)])


ENGLISH = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
CAPITAL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
SMALL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# As the models' tokenizer.json files have them.
PUBLISHED = {
    "olmo": in_bytes(),
    "refact": in_bytes(pre.Digits(individual_digits=True)),
    "command-r": in_bytes(pre.Digits(individual_digits=True)),
    "llama-bpe": split(
        ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "qwen2": split(ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"),
    "gpt-4o": split(
        rf"[^\r\n\p{{L}}\p{{N}}]?{CAPITAL}*{SMALL}+{ENGLISH}?|[^\r\n\p{{L}}\p{{N}}]?{CAPITAL}+{SMALL}*{ENGLISH}?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "tekken": split(
        rf"[^\r\n\p{{L}}\p{{N}}]?{CAPITAL}*{SMALL}+|[^\r\n\p{{L}}\p{{N}}]?{CAPITAL}+{SMALL}*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "deepseek-v3": pre.Sequence(
        [
            split(r"\p{N}{1,3}"),
            split("[一-龥぀-ゟ゠-ヿ]+"),
            split(
                r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
                r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
        ]
    ),
}
TEXTS = [
    "It's 2026,  and I'LL pay $12345.67!\r\n\n  def f(x):\n\treturn x/2  # HTTPServer's\n",
    "naïve CAFÉ don't  1 2  33 中文abc中 カタカナ・ abc、def。123中文 \x00\x01a e\u0301a \u0301",
    "  \n \n\n x\t\t1  \u3000y 🙂🙂!?\n/path/to\n/x A1B2 'Tis we'd ''s É ǅ ʰ Ⅷ ½ ٣",
    "",
    "   ",
    "\n",
    "=>\n\n  'a' \"b\"[c]_d",
]


def words_of(pattern: str, text: str) -> list[str]:
    """As tiktoken cuts: it would drop what the pattern leaves over."""
    return regex.findall(pattern, text, flags=regex.V1)


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("text", TEXTS)
def test_words_are_those_of_the_published_tokenizer(name, text):
    pieces = [piece for piece, _ in PUBLISHED[name].pre_tokenize_str(text)]
    if name in ("olmo", "refact", "command-r"):
        pieces = [bytes(LETTERS[letter] for letter in piece).decode("utf-8") for piece in pieces]
    assert "".join(pieces) == text
    assert words_of(vocabulary.PATTERNS[name], text) == pieces
    # tiktoken has an engine of its own. It takes a word as it stands, if that is a token.
    whole = {piece.encode("utf-8") for piece in pieces if len(piece.encode("utf-8")) > 1}
    ranks = {bytes([byte]): byte for byte in range(256)} | {word: 256 + i for i, word in enumerate(sorted(whole))}
    encoding = tiktoken.Encoding("words", pat_str=vocabulary.PATTERNS[name], mergeable_ranks=ranks, special_tokens={})
    tokens = [encoding.decode_single_token_bytes(token) for token in encoding.encode_ordinary(text)]
    assert tokens == [piece.encode("utf-8") for piece in pieces]


BY_HAND = {
    "llama-bpe": ("I'LL go (now)1234\n\n x", ["I", "'LL", " go", " (", "now", ")", "123", "4", "\n\n", " x"]),
    "qwen2": ("a_b 12", ["a", "_b", " ", "1", "2"]),
    "gpt-4o": ("HTTPServer's 1234", ["HTTPServer's", " ", "123", "4"]),
    "tekken": ("McDonald's 12", ["Mc", "Donald", "'s", " ", "1", "2"]),
    "deepseek-v3": ("ok中・文a  1234.5", ["ok", "中", "・", "文", "a", "  ", "123", "4", ".", "5"]),
    "refact": ("x = 10  y", ["x", " =", " ", "1", "0", " ", " y"]),
}


@pytest.mark.parametrize(("name", "text", "words"), [(name, *case) for name, case in BY_HAND.items()], ids=BY_HAND)
def test_words_cut_by_hand(name, text, words):
    assert words_of(vocabulary.PATTERNS[name], text) == words


# ---------------------------------------------------------------- pieces


def file_with(words: dict) -> SimpleNamespace:
    """As much of a weights file as a tokenizer reads."""
    metadata = {f"tokenizer.ggml.{name}": value for name, value in words.items()}
    return SimpleNamespace(metadata=metadata, refusal=lambda why: UserError(f"file can't be used: {why}"))


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def pieces_file(pieces: list[str], own: list[str] = (), **changes) -> SimpleNamespace:
    """A vocabulary of pieces, the best first, behind <unk>, <s>, </s> and the bytes."""
    words = {
        "model": "llama",
        "tokens": ["<unk>", "<s>", "</s>", *BYTES, *pieces, *own],
        "token_type": [2, 3, 3, *[6] * 256, *[1] * len(pieces), *[4] * len(own)],
        "scores": [0.0] * 259 + [-float(i) for i in range(len(pieces))] + [-1000.0] * len(own),
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return file_with(words | changes)


def said(tokenizer, text: str) -> list[str]:
    tokens = [*tokenizer.ids, *tokenizer.special]
    ids = [*tokenizer.ids.values(), *tokenizer.special.values()]
    return [tokens[ids.index(i)] for i in tokenizer.encode(text)]


def test_the_best_piece_is_joined_first_and_of_equal_ones_the_leftmost():
    tokenizer = vocabulary.open_tokenizer(pieces_file(["bc", "ab", "abc", "▁", "a", "b", "c", "aa"]))
    assert said(tokenizer, "abc") == ["▁", "abc"]  # b + c before a + b
    assert said(tokenizer, "ab") == ["▁", "ab"]
    assert said(tokenizer, "aaa") == ["▁", "aa", "a"]
    assert said(tokenizer, "a€\n") == ["▁", "a", "<0xE2>", "<0x82>", "<0xAC>", "<0x0A>"]
    assert tokenizer.start == [1] and tokenizer.ends == {2}
    assert tokenizer.encoding.decode(tokenizer.encode("ab €")) == " ab €"
    assert tokenizer.encode("") == []
    assert said(tokenizer, "a\udc80") == ["▁", "a", "<0x3F>"]  # a byte of a command line that is no letter: ?


def test_a_file_may_want_no_space_before_a_text():
    tokenizer = vocabulary.open_tokenizer(pieces_file(["a", "▁", "▁a"], add_space_prefix=False, add_bos_token=False))
    assert said(tokenizer, "a a") == ["a", "▁a"] and tokenizer.start == []


def test_tokens_of_the_makers_own_stand_for_their_name_the_longest_first():
    tokenizer = vocabulary.open_tokenizer(pieces_file(["a", "▁", "▁a"], own=["\n", "\n\n", "<b>"], add_space_prefix=False))
    assert said(tokenizer, "a\n\n\n<b>a</s>")[:5] == ["a", "\n\n", "\n", "<b>", "a"]
    assert tokenizer.special["</s>"] not in tokenizer.encode("</s>")  # one that steers stays text


def trained(text: str, n_pieces: int) -> list[str]:
    """Letters, and the pairs that are joined most often: a vocabulary, the best piece first."""
    words = [list("▁" + word) for word in text.split()]
    joined = []
    while len(joined) < n_pieces:
        counts = {}
        for word in words:
            for pair in zip(word, word[1:]):
                counts[pair] = counts.get(pair, 0) + 1
        left, right = max(counts, key=counts.get)
        joined.append(left + right)
        for word in words:
            for i in range(len(word) - 2, -1, -1):
                if word[i : i + 2] == [left, right]:
                    word[i : i + 2] = [left + right]
    return [*dict.fromkeys(joined), *sorted(set(text.replace(" ", "▁")))]


def test_pieces_are_those_of_the_tokenizers_package():
    text = Path(vocabulary.__file__).read_text(encoding="utf-8").replace("\n", " ")[:4_000]
    pieces = trained(text, 300)
    ours = vocabulary.open_tokenizer(pieces_file(pieces))
    ids = dict(zip(["<unk>", "<s>", "</s>", *BYTES, *pieces], range(10_000)))
    merges = [(p[:i], p[i:]) for p in pieces for i in range(1, len(p)) if p[:i] in ids and p[i:] in ids]
    theirs = tokenizers.Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    theirs.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    theirs.decoder = decoders.ByteFallback()
    for part in (text, "Unseen wörds 東京 🙂,  with   blanks\n and ▁.", text[::-1], "a" * 50):
        assert ours.encode(part) == theirs.encode(part).ids
        assert ours.encoding.decode(ours.encode(part)) == " " + part.replace("▁", " ")


# ---------------------------------------------------------------- refusals and byte pairs


def byte_pairs(**changes) -> SimpleNamespace:
    letters = [*LETTERS]
    words = {
        "model": "gpt2",
        "pre": "qwen2",
        "tokens": ["<|im_end|>", "<think>", *letters, "ab", "abc"],
        "token_type": [3, 4, *[1] * 258],
        "merges": ["a b", "ab c"],
        "bos_token_id": 0,
    }
    return file_with(words | changes)


def test_a_token_of_the_makers_own_is_one_in_byte_pairs_too():
    tokenizer = vocabulary.open_tokenizer(byte_pairs())
    assert tokenizer.encode("abc<think>ab<|im_end|>")[:3] == [259, 1, 258]
    assert 0 not in tokenizer.encode("<|im_end|>")
    assert tokenizer.encode("e\u0301") == tokenizer.encode("é")
    assert tokenizer.start == [] and vocabulary.open_tokenizer(byte_pairs(pre="llama-bpe")).start == [0]


REFUSED = {
    "another kind": (byte_pairs(model="t5"), "its tokenizer is t5 qwen2, and we know gpt2 with gpt-2 or smollm or olmo"),
    "other words": (byte_pairs(pre="poro-chat"), "its tokenizer is gpt2 poro-chat"),
    "a list for words": (byte_pairs(pre=["qwen2"]), "its tokenizer is gpt2 a list"),
    "no scores": (pieces_file(["a"], scores=[0.0]), "it has 260 tokens, and scores for 1"),
    "scores as text": (pieces_file(["a"], scores="high"), "no whole vocabulary: tokens, their types and scores"),
    "a byte too few": (pieces_file(["a"], token_type=[2, 3, 3, *[6] * 255, 1, 1]), "255 tokens for the 256 bytes"),
    "a byte too many": (pieces_file(["a"], token_type=[2, 3, 3, *[6] * 257]), "257 tokens for the 256 bytes"),
    "a type that nobody knows": (pieces_file(["a"], token_type=[9, *[1] * 259]), "type 9, and we know 1, 2, 3, 4, 5 and 6"),
    "a piece twice": (pieces_file(["a", "a"]), "it lists the token a twice"),
    "an end out of range": (pieces_file(["a"], eos_token_id=999), "its eos token is number 999 of 260"),
    "a prefix as text": (pieces_file(["a"], add_space_prefix="yes"), "add_space_prefix is yes, and must be true or false"),
}


@pytest.mark.parametrize(("file", "says"), REFUSED.values(), ids=REFUSED)
def test_a_vocabulary_that_we_can_not_follow_is_refused(file, says):
    with pytest.raises(UserError) as error:
        vocabulary.open_tokenizer(file)
    assert says in str(error.value) and "\n" not in str(error.value)
