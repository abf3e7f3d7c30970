"""Corpora, tokenizers, the split, batches: the only door through which text comes in.

The default corpus is text that every reader already has, byte for byte, since requirements.txt
pins it: PyTorch's own documentation ("docs") and Python source ("source").
"""

import ast
import base64
import hashlib
import importlib.util
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tiktoken
import torch

from shared import console, files
from shared.console import UserError

TOKENIZERS = ("char", "bpe4k", "r50k_base")
BPE4K_FILE = Path(__file__).with_name("bpe4k.tiktoken")
BPE4K_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+"  # words, with the space or mark before them
    r"|\p{N}{1,3}"  # numbers, in threes
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"  # runs of punctuation
    r"|\s*[\r\n]+"  # line ends
    r"|\s+(?!\S)|\s+"  # spaces, less the one before a word
)


# ---------------------------------------------------------------- text


def read_text(path: Path) -> str:
    """A UTF-8 file as text with plain newlines, whatever its line ends and byte-order mark."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"can't read {path}: {error.strerror or error}") from None
    if b"\0" in raw:
        raise UserError(
            f"{path} is not text: it holds a NUL byte at {raw.index(0)}; give a UTF-8 text file"
        )
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text: byte 0x{raw[error.start]:02x} at {error.start}; "
            "save it as UTF-8 first"
        ) from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def torch_folder() -> Path:
    """Where the installed torch package lies; found, not imported."""
    return Path(importlib.util.find_spec("torch").submodule_search_locations[0])


def torch_docs() -> list[str]:
    """The documentation of torch's functions and of its Tensor methods, a text for each file."""
    documents = []
    for name in ("_torch_docs.py", "_tensor_docs.py"):
        strings = [
            node
            for node in ast.walk(ast.parse(read_text(torch_folder() / name)))
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" in node.value
        ]
        strings.sort(key=lambda node: (node.lineno, node.col_offset))
        documents.append("".join(node.value for node in strings))
    return documents


def torch_source() -> dict[str, str]:
    """Every Python file of the installed torch package by its name, in sorted order.

    What differs from machine to machine is left out.
    """
    root = torch_folder()
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    same_everywhere = [n for n in names if n != "version.py" and "/generated/" not in n]
    return {name: read_text(root / name) for name in same_everywhere}


def texts_at(path: Path) -> list[str]:
    """The text of a file, or of every file in a folder, sorted by name, without hidden ones."""

    def refuse(error: OSError) -> None:
        raise UserError(f"can't read --data {error.filename}: {error.strerror}") from None

    try:
        kind = path.stat().st_mode
    except FileNotFoundError:
        raise UserError(f"--data {path}: there is no such file or folder") from None
    except OSError as error:
        refuse(error)
    except ValueError:  # a NUL in the name
        raise UserError(f"--data {path!r} can't be the name of a file") from None
    if stat.S_ISREG(kind):
        return [read_text(path)]
    if not stat.S_ISDIR(kind):
        raise UserError(
            f"--data {path} is neither a file nor a folder; save the text to a file first"
        )
    files = [
        Path(folder, name) for folder, _, names in os.walk(path, onerror=refuse) for name in names
    ]
    inside = sorted(file.relative_to(path) for file in files if file.is_file())
    return [
        read_text(path / p) for p in inside if not any(part.startswith(".") for part in p.parts)
    ]


# ---------------------------------------------------------------- tokenizers


class CharTokenizer:
    """One token for each character of the corpus, numbered in the order of their code points."""

    name = "char"

    def __init__(self, text: str):
        self.characters = sorted(set(text))
        self.ids = {character: i for i, character in enumerate(self.characters)}
        self.vocab_size = len(self.characters)

    def encode(self, text: str) -> list[int]:
        """Text -> ids. UserError for a character that the corpus doesn't hold."""
        try:
            return [self.ids[character] for character in text]
        except KeyError as error:
            raise UserError(
                f"the corpus holds no character {error.args[0]!r}, so it has no token"
            ) from None

    def decode(self, ids: list[int]) -> str:
        return "".join(self.characters[i] for i in ids)


class BytePairTokenizer:
    """A tiktoken encoding. Its vocabulary is padded to a multiple of 64, as GPUs like it."""

    def __init__(self, encoding: tiktoken.Encoding):
        self.encoding = encoding
        self.name = encoding.name
        self.vocab_size = -(-encoding.n_vocab // 64) * 64

    def encode(self, text: str) -> list[int]:
        return next(self.encode_all([text]))

    def encode_all(self, texts: list[str]) -> Iterator[list[int]]:
        pieces = [pieces_of(text) for text in texts]
        encoded = iter(self.encoding.encode_ordinary_batch([p for text in pieces for p in text]))
        for text in pieces:
            yield [i for _ in text for i in next(encoded)]

    def decode(self, ids: list[int]) -> str:
        known = [i for i in ids if i < self.encoding.n_vocab]  # padding says nothing
        return self.encoding.decode(known)


LONGEST_BLANK = 10_000


def pieces_of(text: str) -> list[str]:
    """The text, cut only where white space goes on for very long.

    tiktoken's regular expression overflows its stack at some hundred thousand blanks in a row.
    """
    blanks = re.finditer(rf"(?<!\s)\s{{{LONGEST_BLANK},}}", text)
    cuts = [at for run in blanks for at in range(run.start(), run.end(), LONGEST_BLANK)]
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def bpe4k_encoding() -> tiktoken.Encoding:
    """The 4,096 tokens of shared/bpe4k.tiktoken, which chapter 05's step 12 learned."""
    lines = BPE4K_FILE.read_text(encoding="ascii").splitlines()
    # Not by tiktoken.load, which would keep a copy in the temporary folder and prefer it.
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}
    return tiktoken.Encoding(
        "bpe4k", pat_str=BPE4K_PATTERN, mergeable_ranks=ranks, special_tokens={}
    )


def make_tokenizer(name: str, texts: list[str]) -> CharTokenizer | BytePairTokenizer:
    """The tokenizer called `name`, one of TOKENIZERS. UserError if its vocabulary can't be had."""
    if name == "char":
        return CharTokenizer("".join(texts))
    if name == "bpe4k":
        return BytePairTokenizer(bpe4k_encoding())
    if name != "r50k_base":
        raise ValueError(f"unknown tokenizer {name!r}; valid: {', '.join(TOKENIZERS)}")
    try:
        return BytePairTokenizer(tiktoken.get_encoding(name))
    except OSError:  # what tiktoken's download raises: ConnectionError and its kin
        raise UserError(
            "--tokenizer r50k_base must be downloaded once and this machine can't: connect and "
            "run again, point TIKTOKEN_CACHE_DIR at a folder that has it, or use --tokenizer "
            "bpe4k, which is on disk"
        ) from None


# ---------------------------------------------------------------- corpus


MANY_CHARACTERS = 20_000_000  # from here on it takes seconds, and a person is told; ids are small
PART = 1_000_000  # characters that are encoded at a time
LAST_TENTH = "the last tenth"
FILES_BY_HASH = "a tenth of the files, by a hash of their names"


@dataclass
class Corpus:
    """A text as token ids, split into a training part and a validation part."""

    name: str
    sha256: str  # of the normalised text in UTF-8
    n_characters: int
    tokenizer: CharTokenizer | BytePairTokenizer
    train: torch.Tensor  # (N,) int64
    validation: torch.Tensor  # (M,) int64
    split: str = LAST_TENTH  # what the validation part is, in words

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def unseen(self) -> int:
        """How many kinds of token stand in the validation part but never in the training part.

        They have a token and keep their start; the model is asked for them all the same.
        """
        in_training = self.train.bincount(minlength=self.vocab_size) > 0
        in_validation = self.validation.bincount(minlength=self.vocab_size) > 0
        return int((in_validation & ~in_training).sum())

    # Between processes a corpus travels as plain bytes: tensors would go through shared memory,
    # which is small in containers.
    def __getstate__(self) -> dict:
        return self.__dict__ | {"train": self.train.numpy(), "validation": self.validation.numpy()}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self.train = torch.from_numpy(self.train)
        self.validation = torch.from_numpy(self.validation)


def load_corpus(source: str | Path, tokenizer: str, block_size: int) -> Corpus:
    """The corpus "docs" or "source", or the file or folder at a Path, as tokens.

    The last tenth is the validation part. Only of "source" it is every tenth file or so: its files
    are sorted by folder, and the last tenth would be one folder's and another kind of text.

    UserError if it is missing, empty, not text, or too short to cut one window of block_size + 1
    tokens from each part.
    """
    names = []
    if isinstance(source, Path):
        name = files.as_unicode(source)
        texts = texts_at(source)
    elif source == "docs":
        name = "the documentation strings of torch"
        texts = torch_docs()
    elif source == "source":
        name = "the Python source of torch"
        names, texts = zip(*torch_source().items())
    else:
        raise ValueError(f"no corpus is called {source!r}; a file or a folder is given as a Path")
    sha = hashlib.sha256()
    for text in texts:
        sha.update(text.encode("utf-8"))
    n_characters = sum(map(len, texts))
    if n_characters == 0:
        raise UserError(f"--data {source} is empty; give a UTF-8 text of some thousand characters")
    tokenizer = make_tokenizer(tokenizer, texts)
    if n_characters > MANY_CHARACTERS:
        console.say(f"Turning {n_characters:,} characters into tokens ...")
    parts = as_tensors(tokenizer, texts, id_type(n_characters, tokenizer.vocab_size))
    if names:
        held_out = [is_held_out(file) for file in names]
        split = FILES_BY_HASH
        train = torch.cat([part for part, out in zip(parts, held_out) if not out])
        validation = torch.cat([part for part, out in zip(parts, held_out) if out])
    else:
        ids = parts[0] if len(parts) == 1 else torch.cat(parts)
        split = LAST_TENTH
        train, validation = ids.tensor_split([len(ids) - len(ids) // 10])
    if len(validation) < block_size + 1:
        raise UserError(
            f"--data {source} holds {len(train) + len(validation):,} tokens; its last tenth must "
            f"hold a block of {block_size} and the token after it, so give at least "
            f"{10 * (block_size + 1):,}"
        )
    return Corpus(name, sha.hexdigest(), n_characters, tokenizer, train, validation, split)


def id_type(n_characters: int, vocab_size: int) -> torch.dtype:
    """int64, which every layer takes, or for a large corpus the smallest type that holds its ids.

    Every worker has a copy of the corpus. sample_batch() and all_windows() give int64 again.
    """
    if n_characters <= MANY_CHARACTERS:
        return torch.int64
    if vocab_size <= 2**8:
        return torch.uint8
    return torch.int16 if vocab_size <= 2**15 else torch.int32


def as_tensors(
    tokenizer: CharTokenizer | BytePairTokenizer, texts: list[str], dtype: torch.dtype
) -> list[torch.Tensor]:
    """The token ids of each text, (N,).

    Characters are encoded a part at a time: a Python list of all their ids would take 36 bytes
    for each. Byte pairs can't be, since a cut changes the tokens around it.
    """
    if isinstance(tokenizer, BytePairTokenizer):
        return [torch.tensor(ids, dtype=dtype) for ids in tokenizer.encode_all(texts)]
    return [characters_as_tensor(tokenizer, text, dtype) for text in texts]


def characters_as_tensor(tokenizer: CharTokenizer, text: str, dtype: torch.dtype) -> torch.Tensor:
    ids = torch.empty(len(text), dtype=dtype)
    for start in range(0, len(text), PART):
        part = tokenizer.encode(text[start : start + PART])
        ids[start : start + PART] = torch.tensor(part)
    return ids


def is_held_out(name: str) -> bool:
    """Is the file of this name for validation? True for one in ten, the same ones everywhere."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8")).digest()[:4], "big") % 10 == 0


# ---------------------------------------------------------------- batches


def sample_batch(
    tokens: torch.Tensor, block_size: int, batch_size: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random windows of tokens (N,): inputs and targets, each (batch_size, block_size).

    Targets stand one token later. On a GPU only the windows' starts travel to it.
    """
    starts = torch.randint(len(tokens) - block_size, (batch_size, 1), generator=generator)
    offsets = torch.arange(block_size + 1, device=tokens.device)
    windows = tokens[starts.to(tokens.device) + offsets].long()  # one gather, no loop over rows
    return windows[:, :-1], windows[:, 1:]


def all_windows(
    tokens: torch.Tensor, block_size: int, batch_size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Every token of tokens (N,) but the first as a target, once: full windows, then the rest."""
    n_full = (len(tokens) - 1) // block_size
    end = n_full * block_size
    inputs = tokens[:end].view(n_full, block_size)
    targets = tokens[1 : end + 1].view(n_full, block_size)
    for some, following in zip(inputs.split(batch_size), targets.split(batch_size)):
        yield some.long(), following.long()
    if end < len(tokens) - 1:
        yield tokens[None, end:-1].long(), tokens[None, end + 1 :].long()
