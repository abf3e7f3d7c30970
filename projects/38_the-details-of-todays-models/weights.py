"""Chapter 38: a weights file becomes the model of its recipe.

Chapter 37's build.py --weights FILE comes here with each file that is not for its own blocks.
architectures.py says what the files of each architecture hold. What a file asks for and we can't do
is refused by name, before a number is read.
"""

import math
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters

import torch
import torch.nn as nn
from torch.overrides import TorchFunctionMode

HERE = Path(__file__).parent
build = chapters.load_file(HERE / "build.py")
architectures = chapters.load_file(HERE / "architectures.py")
open_tokenizer = chapters.load_file(HERE / "vocabulary.py").open_tokenizer
inspection = build.real.inspection
Architecture = architectures.Architecture
ARCHITECTURES = architectures.ARCHITECTURES
ROPE_FACTORS = architectures.ROPE_FACTORS

MOST_EXPERTS = 2**14  # in all layers together (DeepSeek-V3: 15,616); each takes time to build

# ---------------------------------------------------------------- config


def architecture_of(file) -> tuple[str, Architecture]:
    """What a file calls its architecture, and ours of that name. UserError if there is none."""
    name = file.metadata.get("general.architecture")
    if name == "llama" and file.metadata.get("llama.expert_count", 0) != 0:
        return name, ARCHITECTURES["llama with experts"]
    if not isinstance(name, str) or name not in ARCHITECTURES:
        known = ", ".join(name for name in ARCHITECTURES if " " not in name)
        raise file.refusal(f"its architecture is {inspection.short(name)}, and we know {known}")
    return name, ARCHITECTURES[name]


def check_fields(file, name: str, known: Architecture) -> dict[str, str | None]:
    """The fields of an architecture -> ours. UserError unless a file's are among them, and may be.

    A field that we don't know may change what the model does: none is passed over.
    """
    fields = architectures.COMMON | known.fields | {known.eps: "norm_eps"}
    rules = {f"{name}.{short_name}": architectures.RULES[short_name] for short_name in fields}
    inspection.check_rules(file, rules | {"general.name": architectures.RULES["general.name"]})
    fixed = known.fixed | architectures.ALWAYS
    for field_name in file.metadata:
        prefix, _, short_name = field_name.partition(".")
        if prefix == name and short_name not in fields and short_name not in fixed:
            raise file.refusal(f"its metadata holds {field_name}, which our {name} doesn't know")
    for short_name, value in fixed.items():
        must_be(file, f"{name}.{short_name}", value)
    return fields


def must_be(file, name: str, ours: object) -> None:
    """UserError if a field is there and is not what our model has."""
    theirs = file.metadata.get(name, ours)
    if theirs != ours:
        why = f"{inspection.short(theirs)}; our model can only have {ours}"
        raise file.refusal(f"its {name} is {why}")


def read_config(file) -> tuple[Architecture, "build.DetailedConfig"]:
    """The architecture of a file, and the config of its model. UserError if we can't have it."""
    name, known = architecture_of(file)
    fields = check_fields(file, name, known)
    recipe = build.RECIPES[known.recipe].changes
    # What a recipe knows of one published model, and a file says of its own.
    changes = recipe | {"rope_base": 10_000.0, "tied": "output.weight" not in file.tensors}
    whole = getattr(recipe.get("rope_scaling"), "whole", True)
    changes["rope_scaling"] = rope_scaling(file, name, whole)
    for theirs, ours in fields.items():
        value = file.metadata.get(f"{name}.{theirs}")
        if ours is not None and value is not None:
            changes[ours] = value
    changes.setdefault("n_kv_heads", changes["n_heads"])
    changes |= known.more(changes)
    try:
        cfg = build.DetailedConfig(**changes)
    except ValueError as error:
        raise file.refusal(str(error)) from None
    check_config(file, name, cfg)
    return known, cfg


def check_config(file, name: str, cfg) -> None:
    """UserError if a file contradicts itself, found out before anything of its sizes is built."""
    agreed = {"attention.value_length": cfg.head_dim, "rope.dimension_count": cfg.n_turned}
    if cfg.attention == "latent":  # of the short vector
        agreed |= {
            "attention.key_length": cfg.kv_rank + cfg.d_rope,
            "attention.value_length": cfg.kv_rank,
        }
        if cfg.d_rope >= cfg.head_dim:
            raise file.refusal(f"it turns {cfg.d_rope} of the {cfg.head_dim} channels of a head")
    rows = inspection.shape_of(file, "token_embd.weight")[0]
    for theirs, ours in (agreed | {"vocab_size": rows}).items():
        must_be(file, f"{name}.{theirs}", ours)
    inspection.check_tensor(file, "token_embd.weight", (rows, cfg.d_model))
    numbers = [re.match(r"blk\.(\d+)\.", tensor) for tensor in file.tensors]
    n_blocks = len({found[1] for found in numbers if found})
    if n_blocks != cfg.n_layers:
        why = f"{cfg.n_layers}, and it has tensors of {n_blocks} blocks"
        raise file.refusal(f"its {name}.block_count is {why}")
    if cfg.mlp_type == "moe":
        if cfg.top_k > cfg.n_experts:
            why = f"{cfg.top_k}, and it has {cfg.n_experts} experts"
            raise file.refusal(f"its {name}.expert_used_count is {why}")
        n_experts = cfg.n_layers * cfg.n_experts
        if n_experts > MOST_EXPERTS:
            raise file.refusal(f"it speaks of {n_experts:,} experts, and {MOST_EXPERTS:,} may be")
        router = f"blk.{cfg.n_layers - 1}.ffn_gate_inp.weight"
        inspection.check_tensor(file, router, (cfg.n_experts, cfg.d_model))


# ---------------------------------------------------------------- RoPE's scaling


@dataclass(frozen=True)
class PairScaling(build.RopeScaling):
    """Each pair is slowed by a factor of its own: what Llama3Scaling comes to, as a file has it."""

    factors: tuple[float, ...] = ()

    def speeds(self, base: float, width: int) -> torch.Tensor:
        factors = torch.tensor(self.factors, dtype=torch.float64)
        return build.rope_speeds(base, width) / factors


@dataclass(frozen=True)
class StatedYaRN(build.YaRNScaling):
    """YaRN of a file, which may say itself by how much queries and keys are enlarged."""

    enlarged: float = 1.0

    @property
    def length(self) -> float:
        return 1.0 if self.on_scores else self.enlarged

    @property
    def score_factor(self) -> float:
        return self.enlarged**2 if self.on_scores else 1.0


def rope_scaling(file, name: str, whole: bool) -> "build.RopeScaling | None":
    """The scaling that a file's fields ask for. UserError if we have no such thing.

    Whether YaRN rounds to `whole` pairs is not in a file.
    """

    def said(short_name: str, default=None):
        return file.metadata.get(f"{name}.rope.{short_name}", default)

    factor = said("scaling.factor", said("scale_linear"))
    kind = said("scaling.type", "none" if factor is None else "linear")
    if kind not in ("none", "linear", "yarn"):
        why = f"{inspection.short(kind)}; we know none, linear and yarn"
        raise file.refusal(f"its {name}.rope.scaling.type is {why}")
    if kind != "none" and ROPE_FACTORS in file.tensors:
        raise file.refusal(f"its RoPE is scaled twice: {kind}, and by the tensor {ROPE_FACTORS}")
    if kind != "none" and factor is None:
        raise file.refusal(f"its metadata lacks {name}.rope.scaling.factor")
    if kind != "yarn":
        must_be(file, f"{name}.rope.scaling.attn_factor", 1.0)
    if kind == "linear":
        return build.RopeScaling(factor)
    if kind == "none":
        return None
    trained = said("scaling.original_context_length")
    if trained is None:
        raise file.refusal(f"its metadata lacks {name}.rope.scaling.original_context_length")
    if said("freq_base") == 1:
        raise file.refusal(f"its {name}.rope.freq_base is 1: all pairs turn alike, and YaRN can't")
    enlarged = said("scaling.yarn_attn_factor", build.yarn_length(factor))
    multiplier = said("scaling.yarn_log_multiplier")  # DeepSeek's; it enlarges the whole score
    if multiplier is not None:
        enlarged = 1 + multiplier * math.log(factor)
    return StatedYaRN(
        factor,
        trained,
        fast=said("scaling.yarn_beta_fast", 32.0),
        slow=said("scaling.yarn_beta_slow", 1.0),
        whole=whole,
        on_scores=multiplier is not None,
        enlarged=enlarged * said("scaling.attn_factor", 1.0),
    )


# ---------------------------------------------------------------- model


SCORES = 2**26  # of one layer, so many are in memory at a time: 268 MB


class FileGPT(build.DetailedGPT):
    """Chapter 38's model with a memory for one text (chapter 37, step 06)."""

    def __init__(self, cfg: "build.DetailedConfig", vocab_size: int):
        super().__init__(cfg, vocab_size)
        alike = {}
        for block in self.blocks:  # layers of one kind turn alike: one table of angles is enough
            block.attn.tables = alike.setdefault(block.attn.cfg, block.attn).tables

    def states(self, idx: torch.Tensor) -> torch.Tensor:
        """Token ids (B, T) -> what the head reads (B, T, C).

        A long text is read in pieces: all its scores at once would fill the memory.
        """
        read = getattr(self.blocks[0].attn, "length", 0)  # positions in memory
        scores = self.cfg.n_heads * (read + idx.shape[1] + 1)  # of one position, at most
        pieces = idx.split(max(1, SCORES // scores), dim=1)
        if len(pieces) == 1:
            return super().states(idx)
        if not isinstance(self.blocks[0].attn, Cached):
            with build.real.remembering(self, idx.shape[1]):
                return self.states(idx)
        states = []
        for piece in pieces:
            states.append(super().states(piece))
        return torch.cat(states, dim=1)

    def make_cache(self, attn: nn.Module, n_positions: int) -> nn.Module:
        if self.cfg.attention == "latent":
            return CachedLatent(attn, n_positions)
        return Cached(attn, n_positions)

    def embed(self, idx: torch.Tensor) -> torch.Tensor:
        past = getattr(self.blocks[0].attn, "length", 0)
        end = past + idx.shape[1]
        if end > self.cfg.block_size:
            raise ValueError(f"{end} positions don't fit a block_size of {self.cfg.block_size}")
        if self.position_embedding is None or past == 0:
            return super().embed(idx)
        positions = self.position_embedding.weight[past:end]
        return self.token_embedding(idx) + positions  # GPT-2 does no more to them


class Cached(nn.Module):
    """An attention `attn` that reads one text in pieces and keeps its keys and values.

    A layer with a window keeps only those that the next position still sees.
    """

    def __init__(self, attn: nn.Module, n_positions: int):
        super().__init__()
        self.attn = attn
        self.n_positions = n_positions
        self.kept = None  # of past positions: whatever attn makes of them to be kept
        self.length = 0  # positions read so far

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The next T positions (1, T, C) -> (1, T, C). ValueError if they don't fit."""
        end = self.length + x.shape[1]
        if end > self.n_positions:
            raise ValueError(f"{end} positions don't fit a cache of {self.n_positions}")
        q, new = self.read(x)
        if self.kept is not None:
            new = [torch.cat(pair, dim=-2) for pair in zip(self.kept, new)]
        y = self.attn.mix(q, *self.keys_and_values(*new))
        window = self.attn.cfg.window or self.n_positions
        self.kept = [part[..., max(0, part.shape[-2] - window + 1) :, :] for part in new]
        self.length = end
        return y

    def read(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """x -> its queries, and what is kept of it: tensors (..., T, channels)."""
        q, k, v = self.attn.heads(x, start=self.length)
        return q, [k, v]

    def keys_and_values(
        self, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What is kept -> keys and values."""
        return k, v


class CachedLatent(Cached):
    """Of latent attention only the short vector and the turned key are kept."""

    def read(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        return self.attn.queries(x, self.length), [*self.attn.shorten(x, self.length)]

    def keys_and_values(
        self, latent: torch.Tensor, place: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.attn.lengthen(latent, place)


# ---------------------------------------------------------------- numbers


class Place(NamedTuple):
    """Where the numbers of one of their tensors belong."""

    pieces: list[torch.Tensor]  # our parameters, or parts of them: one, or one of each expert
    stacked: bool  # whether their tensor holds all experts

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of their tensor."""
        one = tuple(self.pieces[0].shape)
        return (len(self.pieces), *one) if self.stacked else one


def our_parts(model: FileGPT, fused: bool) -> dict[str, list[torch.Tensor]]:
    """Our parameters by name, cut as files have them; those of all experts under one name.

    `fused`: whether files have q, k and v in one matrix, as ours.
    """
    parts = {}
    for name, numbers in [*model.named_parameters(), *model.named_buffers()]:
        name = re.sub(r"\.experts\.\d+\.", ".experts.", name)
        name = name.replace("attn.sinks", "attn.sinks.weight")
        name = name.replace("mlp.balance_bias", "mlp.balance.bias")
        parts.setdefault(name, []).append(numbers)
    for i, block in enumerate(model.blocks):
        attn = block.attn
        where = f"blocks.{i}.attn"
        for kind in ("weight", "bias"):
            if not fused and f"{where}.qkv.{kind}" in parts:
                [whole] = parts.pop(f"{where}.qkv.{kind}")
                kv_rows = attn.n_kv_heads * attn.head_dim
                q, k, v = whole.split([attn.n_heads * attn.head_dim, kv_rows, kv_rows])
                for letter, rows in {"q": q, "k": k, "v": v}.items():
                    parts[f"{where}.{letter}.{kind}"] = [rows]
        if f"{where}.kv_up.weight" in parts:
            [whole] = parts.pop(f"{where}.kv_up.weight")
            heads = whole.unflatten(0, (attn.n_heads, -1))  # (H, content and value, kv_rank)
            parts[f"{where}.k_up.weight"] = [heads[:, : attn.d_content].mT]  # theirs is transposed
            parts[f"{where}.v_up.weight"] = [heads[:, attn.d_content :]]
    return parts


def places(model: FileGPT, known: Architecture) -> dict[str, Place]:
    """Their name of each tensor -> the place of its numbers in our model."""
    theirs = {ours: name for name, ours in (known.names | architectures.ENDS).items()}
    found = {}
    for name, pieces in our_parts(model, fused="attn.qkv" in theirs).items():
        block = re.match(r"blocks\.(\d+)\.", name)
        part, _, kind = name.rpartition(".")
        if block:
            part = f"blk.{block[1]}." + theirs[part.removeprefix(block[0])]
        else:
            part = theirs[part]
        found[f"{part}.{kind}"] = Place(pieces, stacked=".experts." in name)
    return found


def to_neighbours(numbers: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows of heads (heads · D, ...) in two halves -> the same, i and i + D/2 now neighbours."""
    halves = numbers.unflatten(0, (-1, 2, head_dim // 2))  # (heads, 2, D/2, ...)
    return halves.transpose(1, 2).flatten(0, 2)


TURNED = re.compile(r"blk\.\d+\.attn_[qk](_norm)?\.")  # what RoPE turns


def as_ours(name: str, numbers: torch.Tensor, known: Architecture, head_dim: int) -> torch.Tensor:
    """Their numbers in the order and in the form of ours."""
    if known.halves and TURNED.match(name):
        numbers = to_neighbours(numbers, head_dim)
    if known.plus_one and "norm" in name:
        numbers = numbers - 1
    return numbers


class NoStart(TorchFunctionMode):
    """Inside, matrices get no random start, which would take half of the time, and has no use."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is not nn.init.kaiming_uniform_:
            return function(*args, **(kwargs or {}))


def empty_model(cfg, n_tokens: int) -> FileGPT:
    """A model of shapes without numbers: it takes no memory."""
    with torch.device("meta"), NoStart():
        return FileGPT(cfg, n_tokens)


@torch.no_grad()
def load_model(file, longest: int = 8_192) -> FileGPT:
    """Our model with the numbers of a GGUF file. UserError unless every tensor has its place.

    It reads up to `longest` positions, or as many as the file's model can.
    """
    known, cfg = read_config(file)
    if cfg.position_type == "rope":  # GPT-2's table is in the file, and comes whole
        cfg = replace(cfg, block_size=min(cfg.block_size, longest))
    n_tokens = file.tensors["token_embd.weight"].shape[0]
    model = empty_model(cfg, n_tokens)
    wanted = places(model, known)
    for name, place in wanted.items():
        inspection.check_tensor(file, name, place.shape)
    if ROPE_FACTORS in file.tensors:
        inspection.check_tensor(file, ROPE_FACTORS, (cfg.n_turned // 2,))
    for name in file.tensors:
        if name not in wanted and name != ROPE_FACTORS:
            raise file.refusal(f"our model has no place for its tensor {name}")
    if ROPE_FACTORS in file.tensors:
        model = empty_model(with_pair_factors(file, cfg), n_tokens)
    model.to_empty(device="cpu")
    if cfg.tied:
        model.lm_head.weight = model.token_embedding.weight  # to_empty() gave it one of its own
    for name, place in places(model, known).items():
        numbers = as_ours(name, file.read(name), known, cfg.head_dim)
        inspection.check_numbers(file, {name: numbers})
        for piece, part in zip(place.pieces, numbers if place.stacked else [numbers]):
            piece.copy_(part)
    return model.eval()


def with_pair_factors(file, cfg):
    """The config with the scaling of RoPE that stands in a file as a tensor."""
    factors = file.read(ROPE_FACTORS)
    if not (factors >= 1e-6).all() or not factors.isfinite().all():  # so NaN is refused, too
        raise file.refusal(f"its tensor {ROPE_FACTORS} holds a factor that can't be")
    return replace(cfg, rope_scaling=PairScaling(1.0, tuple(factors.tolist())))
