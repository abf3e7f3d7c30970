"""Is a weights file what chapter 37 takes it for? Each reason to refuse one, in a line.

A field of a wrong type or out of range, a tensor that lies where it can't, a vocabulary of another
kind, a number that is none: build.py asks here before it believes the file. Nothing here is needed
to understand the chapter. `file` is build.py's WeightsFile.
"""

import math
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared.console import printable

import torch

LLAMA = "llama."
VOCABULARY = "tokenizer.ggml."
MOST_TOKENS = 2**20
TYPES = {1, 2, 3, 5}  # of tokens: ordinary, unknown, steering, unused
OWN = 4  # a token of the makers' own, which stands for its name in every text
LARGEST_LOGIT = 1e30


def plausible(count: int) -> int:
    """The number of things that follow in a file. ValueError if only damage explains it."""
    if count > MOST_TOKENS:
        raise ValueError(f"it speaks of {count:,} of a kind: its header is damaged")
    return count


def alignment(metadata: dict) -> int:
    """Each tensor begins at a multiple of so many bytes. ValueError if that can't be."""
    value = metadata.get("general.alignment", 32)
    if type(value) is not int or value < 8 or value % 8:
        raise ValueError(f"its general.alignment is {short(value)}, no multiple of 8")
    return value


@dataclass(frozen=True)
class Rule:
    """What a field may hold: a kind of value and, for a number, the least and the most."""

    kind: type
    least: float = -math.inf
    most: float = math.inf
    needed: bool = False

    def allows(self, value: object) -> bool:
        if self.kind is float:
            right = type(value) in (int, float)
        else:
            right = type(value) is self.kind  # a bool is an int to isinstance()
        if not right or self.kind not in (int, float):
            return right
        return self.least <= value <= self.most  # so NaN is refused, too

    def __str__(self) -> str:
        if self.kind is bool:
            return "true or false"
        if self.kind is str:
            return "a text"
        what = "a whole number" if self.kind is int else "a number"
        return f"{what} from {self.least:g} to {self.most:g}"


ID = Rule(int, 0, MOST_TOKENS - 1)
HEAD = Rule(int, 2, 2**12)
# The fields that we read. The bounds are far from any real model, and keep damage from filling the
# memory.
FIELDS = {
    "general.name": Rule(str),
    "llama.block_count": Rule(int, 1, 1_000, needed=True),
    "llama.context_length": Rule(int, 2, 2**27, needed=True),
    "llama.embedding_length": Rule(int, 2, 2**17, needed=True),
    "llama.feed_forward_length": Rule(int, 1, 2**20, needed=True),
    "llama.attention.head_count": Rule(int, 1, 2**12, needed=True),
    "llama.attention.head_count_kv": Rule(int, 1, 2**12),
    "llama.attention.layer_norm_rms_epsilon": Rule(float, 0, 0.1, needed=True),
    "llama.rope.freq_base": Rule(float, 1, 1e12),
    "llama.rope.dimension_count": HEAD,
    "llama.attention.key_length": HEAD,
    "llama.attention.value_length": HEAD,
    "llama.rope.scaling.type": Rule(str),
    "llama.rope.scaling.factor": Rule(float, 1, 1e6),
    "llama.rope.scaling.original_context_length": Rule(int, 1, 2**27),
    "llama.rope.scaling.finetuned": Rule(bool),
    "llama.rope.scale_linear": Rule(float, 1, 1e6),
    "llama.vocab_size": Rule(int, 1, MOST_TOKENS),
    "tokenizer.chat_template": Rule(str),
    "tokenizer.ggml.bos_token_id": ID,
    "tokenizer.ggml.eos_token_id": ID,
    "tokenizer.ggml.eot_token_id": ID,
    "tokenizer.ggml.eom_token_id": ID,
    "tokenizer.ggml.add_bos_token": Rule(bool),
    "tokenizer.ggml.add_space_prefix": Rule(bool),
}
# What our blocks can't vary: another value is refused.
FIXED = {
    "llama.expert_count": 0,
    "llama.expert_used_count": 0,
    "llama.attention.causal": True,
    "llama.attention.sliding_window": 0,
}


def for_our_blocks(file, patterns: dict[str, str]) -> bool:
    """Whether a file asks for no more than chapter 37 has; chapter 38 reads the others.

    If it is damaged, the answer may be either: both refuse it.
    """
    if file.metadata.get("general.architecture") != "llama":
        return False

    def field(name: str, default=None):
        return file.metadata.get(LLAMA + name, default)

    tokenizer = [file.metadata.get(VOCABULARY + name) for name in ("model", "pre")]
    types = file.metadata.get(VOCABULARY + "token_type")
    sizes = [field(name) for name in ("embedding_length", "attention.head_count")]
    head_dim = sizes[0] / sizes[1] if all(type(n) is int and n > 0 for n in sizes) else None
    others = (
        tokenizer not in [["gpt2", pre] for pre in patterns],
        isinstance(types, list) and OWN in types,
        field("expert_count", 0) != 0,
        field("rope.scaling.type", "none") not in ("none", "linear"),
        field("attention.key_length", head_dim) != head_dim,
        "rope_freqs.weight" in file.tensors,
    )
    return not any(others)


def check_rules(file, rules: dict[str, Rule]) -> None:
    """UserError unless each field follows its rule, and each that we need is there."""
    for name, rule in rules.items():
        if name not in file.metadata:
            if rule.needed:
                raise file.refusal(f"its metadata lacks {name}")
        elif not rule.allows(file.metadata[name]):
            raise file.refusal(f"its {name} is {short(file.metadata[name])}, and must be {rule}")


def check_fields(file) -> None:
    """UserError unless the file is of a llama model, and our blocks can do all that it asks for."""
    architecture = file.metadata.get("general.architecture")
    if architecture != "llama":
        raise file.refusal(f"its architecture is {architecture}, and our blocks are llama's")
    check_rules(file, FIELDS)
    for name, ours in FIXED.items():
        theirs = file.metadata.get(name, ours)
        if theirs != ours:
            raise file.refusal(f"its {name} is {short(theirs)}; our blocks can only have {ours}")
    for name in file.metadata:
        if name.startswith(LLAMA) and name not in FIELDS and name not in FIXED:
            raise file.refusal(f"its metadata holds {name}, which our blocks don't know")


def check_shape(file, cfg) -> None:
    """UserError unless a model of this config has the sizes that the file's tensors have.

    Found out before the model is built: a damaged number may ask for more than the memory holds.
    """
    head_dim = cfg.head_dim
    if head_dim % 2:
        raise file.refusal(f"its heads have {head_dim} channels, and RoPE turns pairs of them")
    for name in ("rope.dimension_count", "attention.key_length", "attention.value_length"):
        theirs = file.metadata.get(LLAMA + name, head_dim)
        if theirs != head_dim:
            why = f"{theirs}; our blocks can only have {head_dim}"
            raise file.refusal(f"its {LLAMA}{name} is {why}")
    numbers = [re.match(r"blk\.(\d+)\.", name) for name in file.tensors]
    n_blocks = len({found[1] for found in numbers if found})
    if n_blocks != cfg.n_layers:
        why = f"{cfg.n_layers}, and it has tensors of {n_blocks} blocks"
        raise file.refusal(f"its {LLAMA}block_count is {why}")
    kv = cfg.n_kv_heads * head_dim
    for name, shape in {
        "attn_q": (cfg.d_model, cfg.d_model),
        "attn_k": (kv, cfg.d_model),
        "ffn_up": (cfg.d_hidden, cfg.d_model),
    }.items():
        check_tensor(file, f"blk.0.{name}.weight", shape)
    embedding = shape_of(file, "token_embd.weight")
    check_tensor(file, "token_embd.weight", (embedding[0], cfg.d_model))


def shape_of(file, name: str) -> tuple[int, ...]:
    """The shape of a tensor. UserError if there is none of that name."""
    if name not in file.tensors:
        raise file.refusal(f"it lacks the tensor {name}")
    return file.tensors[name].shape


def check_tensor(file, name: str, shape: tuple[int, ...]) -> None:
    """UserError unless there is a tensor of that name and shape."""
    theirs = shape_of(file, name)
    if theirs != tuple(shape):
        raise file.refusal(f"its tensor {name} has shape {theirs}, and in our model {tuple(shape)}")


def check_places(file) -> None:
    """UserError if a tensor lies off the file's alignment, or begins within another one."""
    multiple = alignment(file.metadata)
    for name, stored in file.tensors.items():
        if not stored.n_bytes:
            raise file.refusal(f"tensor {name} of shape {stored.shape} holds no number")
    behind = 0  # where the last tensor ends
    for name, stored in sorted(file.tensors.items(), key=lambda item: item[1].start):
        where = f"tensor {name} begins at byte {stored.start:,}"
        if stored.start % multiple:
            raise file.refusal(f"{where}, which is no multiple of {multiple}")
        if stored.start < behind:
            raise file.refusal(f"{where}, within another tensor")
        behind = stored.start + stored.n_bytes


def check_numbers(file, places: dict[str, torch.Tensor]) -> None:
    """UserError if a tensor holds NaN or infinity."""
    for name, place in places.items():
        # One NaN or infinity makes the sum one, and a sum takes a tenth of the time.
        if not place.sum().isfinite() and not place.isfinite().all():
            raise file.refusal(f"its tensor {name} holds numbers that are not finite")


def check_logits(file, logits: torch.Tensor) -> None:
    """UserError if a model's logits are NaN, infinite, or too large to reckon with."""
    if logits.numel():
        low, high = logits.aminmax()
        if not (-LARGEST_LOGIT < low and high < LARGEST_LOGIT):  # so NaN is refused, too
            raise file.refusal("what it makes of a text are no numbers, or far too large ones")


def check_vocabulary(
    file, patterns: dict[str, str], letters: dict[str, int], normal: int, types: set[int]
) -> None:
    """UserError if the file holds another kind of tokenizer than ours, or half of one."""
    model = file.metadata.get(VOCABULARY + "model")
    pre = file.metadata.get(VOCABULARY + "pre")
    if model != "gpt2" or not isinstance(pre, str) or pre not in patterns:
        kind = f"{short(model)} {short(pre)}"
        known = " or ".join(patterns)
        raise file.refusal(f"its tokenizer is {kind}, and we know gpt2 with {known}")
    check_tokens(file, {"merges": str}, types)
    check_merges(file, letters, normal)


def check_tokens(file, besides: dict[str, type], types: set[int]) -> None:
    """UserError unless the file holds tokens of these `types`, and the lists named in `besides`."""

    def field(name: str):
        return file.metadata.get(VOCABULARY + name)

    def whole(name: str, kind: type) -> bool:
        values = field(name)
        return isinstance(values, list) and bool(values) and {type(v) for v in values} == {kind}

    check_rules(file, {name: rule for name, rule in FIELDS.items() if "tokenizer." in name})
    lists = {"tokens": str, "token_type": int} | besides
    if not all(whole(name, kind) for name, kind in lists.items()):
        names = " and ".join(["tokens, their types", *besides])
        raise file.refusal(f"its metadata holds no whole vocabulary: {names}")
    tokens = field("tokens")
    for name, what in {"token_type": "types", "scores": "scores"}.items():
        if name in lists and len(field(name)) != len(tokens):
            n_values = len(field(name))
            raise file.refusal(f"it has {len(tokens):,} tokens, and {what} for {n_values:,}")
    for name in ("bos", "eos", "eot", "eom"):
        token = field(f"{name}_token_id")
        if token is not None and token >= len(tokens):
            raise file.refusal(f"its {name} token is number {token:,} of {len(tokens):,}")
    if field("add_bos_token") and field("bos_token_id") is None:
        raise file.refusal("it wants a first token, and doesn't say which")
    strange = set(field("token_type")) - types
    if strange:
        *others, last = sorted(types)
        known = f"{', '.join(map(str, others))} and {last}"
        raise file.refusal(f"it has tokens of type {min(strange)}, and we know {known}")
    if len(set(tokens)) < len(tokens):
        twice, _ = Counter(tokens).most_common(1)[0]
        raise file.refusal(f"it lists the token {short(twice)} twice")
    if "" in tokens:
        raise file.refusal("it has a token without a letter")


def check_merges(file, letters: dict[str, int], normal: int) -> None:
    """UserError unless tiktoken would merge as the file's list of merges says."""
    tokens = file.metadata[VOCABULARY + "tokens"]
    marks = file.metadata[VOCABULARY + "token_type"]
    merges = file.metadata[VOCABULARY + "merges"]
    ids = {token: i for i, token in enumerate(tokens) if marks[i] == normal}
    for merge in merges:
        left, _, right = merge.partition(" ")
        if left not in ids or right not in ids:
            raise file.refusal(f"its merge {short(merge)} is not of two of its tokens")
    # tiktoken merges the pair with the lowest id first: the ids must rise along the list of merges.
    made = [ids.get(merge.replace(" ", ""), -1) for merge in merges]
    if -1 in made or made != sorted(made):
        raise file.refusal("its tokens are not numbered in the order of their merges")
    for token in set(ids.values()).difference(made):
        if len(tokens[token]) > 1:  # tiktoken would make it all the same
            raise file.refusal(f"no merge makes its token {short(tokens[token])}")
    unknown = set("".join(ids)) - letters.keys()
    if unknown:
        some = "".join(sorted(unknown)[:9])
        raise file.refusal(f"its tokens hold letters that stand for no byte: {some}")


def rope_factor(file) -> float:
    """How much slower than by its position a token turns: 1, or the factor of linear scaling.

    Chen et al. 2023, eq. 4. A factor without a type means linear, as does the older
    scale_linear. UserError for another type.
    """
    kind = file.metadata.get("llama.rope.scaling.type", "linear")
    if kind == "none":
        return 1.0
    if kind != "linear":
        raise file.refusal(f"its llama.rope.scaling.type is {short(kind)}; we know none and linear")
    older = file.metadata.get("llama.rope.scale_linear", 1.0)
    return file.metadata.get("llama.rope.scaling.factor", older)


def short(value: object) -> str:
    """A value as it stands in a refusal."""
    if isinstance(value, list):
        return "a list"
    return one_line(str(value), 60)


def one_line(text: str, most: int = 200) -> str:
    """A file's words may hold anything; what we say of them is one line that a terminal takes."""
    text = printable(" ".join(text.split()))
    return text if len(text) <= most else text[:most] + "…"
