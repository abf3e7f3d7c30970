"""Chapter 38: the details of today's models.

Seventeen open models as lists of details. Each is the block of the last chapters with a few parts
exchanged, and each part here is a small class or one overridden method. RECIPES says which model
has which, as data. Then the experiment: small models by these recipes, of equal size, trained side
by side from the same seeds, and what their difference to Llama 3 is worth.

    python build.py --tiny          on a laptop CPU, about a minute (the default)
    python build.py --full          the same experiment at a size for one GPU
    python build.py --recipes all   with those that have experts, too
    python build.py --show          the recipes and what sets each apart
    python build.py --show qwen3    one recipe: its details, and what the published model takes

Shapes: B batch, T positions, C = d_model, H heads, G = n_kv_heads, D = head_dim, V = vocab_size,
N tokens, E experts, k = top_k.
"""

import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, figures, report, runs
from shared.cli import Plan, Preset, Variant
from shared.console import Table, UserError, say
from shared.training import TrainingSettings

import torch
import torch.nn as nn
import torch.nn.functional as F

gpt = chapters.load_build(5)
modern = chapters.load_build(7)
sparse = chapters.load_build(18)
real = chapters.load_build(37)
PUBLISHED = chapters.load_file(Path(__file__).with_name("published.py")).PUBLISHED

# ---------------------------------------------------------------- config


@dataclass(frozen=True)
class DetailedConfig(real.GroupedConfig):
    """Chapter 37's config, and which detail stands in each place.

    As it stands it is chapter 37's model. A recipe changes some of its fields.
    """

    tied: bool = True  # whether the head's matrix is the embedding

    # Norms.
    norm_place: str = "before"  # of both halves of a block, one of BLOCKS
    norm_gain: str = "w"  # what an RMSNorm multiplies by, one of RMS_NORMS
    norm_bias: bool = True  # of LayerNorm

    # Attention.
    attention: str = "grouped"  # one of ATTENTIONS
    d_head: int | None = None  # width of a head; None: C / H
    qkv_bias: bool = False  # biases on queries, keys and values alone; `bias` means everywhere
    layer_kinds: tuple[str, ...] = ("full",)  # of LAYER_KINDS, from the first layer on, repeated
    window: int | None = None  # how many positions a layer of kind "window" sees, itself included
    score_scale: float | None = None  # what q · k is multiplied by; None: 1/√D
    score_cap: float | None = None  # no score is larger than this

    # Positions.
    rotated: float = 1.0  # the part of a head's channels that RoPE turns
    window_rope_base: float | None = None  # of layers of kind "window"; None: as in all others
    rope_scaling: "RopeScaling | None" = None  # for texts longer than those of the training

    # Latent attention.
    q_rank: int = 12  # width of what queries are made of
    kv_rank: int = 8  # width of what keys and values are made of: the cache keeps it
    d_rope: int = 4  # channels of a head that are turned; the other D - d_rope carry content
    d_value: int = 8  # channels of a head's values

    # MLPs.
    activation: str | None = None  # one of ACTIVATIONS; None: the one that belongs to mlp_type
    gated_mlp: str = "plain"  # the form of a gated MLP, one of GATED_MLPS

    # Experts, for mlp_type "moe".
    router: str = "softmax"  # one of ROUTERS
    d_expert: int | None = None  # width inside one expert; None: d_hidden
    n_dense_layers: int | None = None  # layers at the start that have one MLP of d_hidden instead
    n_shared_experts: int | None = None  # experts that every token uses besides
    renormalise: bool = True  # whether the gates of the chosen experts are divided by their sum
    gate_scale: float = 1.0  # what the gates are multiplied by in the end
    n_groups: int = 1  # experts are chosen within the best groups of them
    top_groups: int = 1  # how many groups that is

    # Multipliers and the two ends.
    embedding_scale: float | Literal["sqrt"] = 1.0  # of the embeddings; "sqrt": √C
    embedding_norm: bool = False  # a norm on the embeddings
    residual_scale: float = 1.0  # of what a half of a block adds to the residual stream
    logit_scale: float = 1.0
    logit_cap: float | None = None  # no logit is larger than this

    def __post_init__(self):
        super().__post_init__()
        choices = {
            "norm_place": BLOCKS,
            "norm_gain": RMS_NORMS,
            "attention": ATTENTIONS,
            "gated_mlp": GATED_MLPS,
            "router": ROUTERS,
        }
        for name, valid in choices.items():
            value = getattr(self, name)
            if value not in valid:
                raise ValueError(f"unknown {name} {value!r}; valid: {', '.join(valid)}")
        for kind in self.layer_kinds:
            if kind not in LAYER_KINDS:
                raise ValueError(f"unknown kind of layer {kind!r}; valid: {', '.join(LAYER_KINDS)}")
        if "window" in self.layer_kinds and self.window is None:
            raise ValueError("layer_kinds names layers with a window, but window is None")
        if self.n_experts % self.n_groups or self.top_groups > self.n_groups:
            raise ValueError(
                f"{self.n_experts} experts don't make {self.n_groups} equal groups "
                f"of which a token chooses {self.top_groups}"
            )
        if self.position_type == "rope" and (self.n_turned % 2 or self.n_turned > self.head_dim):
            channels = f"{self.n_turned} of {self.head_dim} channels"
            raise ValueError(f"RoPE can't turn {channels} in pairs")

    @property
    def head_dim(self) -> int:
        return self.d_head or self.d_model // self.n_heads

    @property
    def n_turned(self) -> int:
        """Channels of a head that RoPE turns."""
        return self.d_rope if self.attention == "latent" else int(self.rotated * self.head_dim)


def layer_config(cfg: DetailedConfig, layer: int) -> DetailedConfig:
    """The config of one layer, counted from 0: what its kind and its place change is filled in."""
    kind = cfg.layer_kinds[layer % len(cfg.layer_kinds)]
    changes = LAYER_KINDS[kind](cfg) | {"layer_kinds": (kind,)}
    if cfg.mlp_type == "moe":
        if cfg.n_dense_layers is not None and layer < cfg.n_dense_layers:
            changes["mlp_type"] = "swiglu"
        elif cfg.d_expert is not None:
            changes["d_hidden"] = cfg.d_expert
    return replace(cfg, **changes)


def full_layer(cfg: DetailedConfig) -> dict:
    """A layer that sees everything before it."""
    return {"window": None}


def window_layer(cfg: DetailedConfig) -> dict:
    """A layer that sees a window; if its RoPE has a base of its own, that is not scaled either."""
    if cfg.window_rope_base is None:
        return {}
    return {"rope_base": cfg.window_rope_base, "rope_scaling": None}


def blind_layer(cfg: DetailedConfig) -> dict:
    """A layer that sees everything and turns nothing: NoPE (Kazemnejad et al. 2023).

    Layers of both sorts in turn are Yang et al.'s (2025).
    """
    return {"window": None, "position_type": "none"}


LAYER_KINDS = {"full": full_layer, "window": window_layer, "no positions": blind_layer}

# ---------------------------------------------------------------- norms


def unit_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x / √(mean(x²) + eps) over the last axis, in float32 or better (chapter 07's RMSNorm)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)


class GainPlusOne(modern.RMSNorm):
    """RMSNorm that multiplies by 1 + weight (Gemma): a weight that decays goes to a gain of 1."""

    def __init__(self, d_model: int, eps: float = 1e-5):
        super().__init__(d_model, eps)
        nn.init.zeros_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., C) -> (..., C), in the dtype of x."""
        unit = unit_rms(x, self.eps)
        gain = 1 + self.weight.to(unit.dtype)  # in bfloat16, 1 + 0.003 would be 1
        return (unit * gain).to(x.dtype)


class NoGain(nn.Module):
    """RMSNorm that multiplies by nothing (nanochat): the next matrix can do it."""

    def __init__(self, d_model: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., C) -> (..., C), in the dtype of x."""
        return unit_rms(x, self.eps).to(x.dtype)


RMS_NORMS = {"w": modern.RMSNorm, "1 + w": GainPlusOne, "none": NoGain}


def make_norm(cfg: DetailedConfig, width: int) -> nn.Module:
    """The config's norm for vectors of `width`."""
    if cfg.norm_type == "layernorm":
        return nn.LayerNorm(width, eps=cfg.norm_eps, bias=cfg.norm_bias)
    if cfg.norm_type == "rmsnorm":
        return RMS_NORMS[cfg.norm_gain](width, cfg.norm_eps)
    return modern.make_norm(cfg.norm_type, width, cfg.norm_eps)  # "none": no norm at all


# ---------------------------------------------------------------- positions


def rope_speeds(base: float, width: int) -> torch.Tensor:
    """Radians a position of each pair of channels, (width/2,) float64 (Su et al. 2021, eq. 15)."""
    pair = torch.arange(width // 2, dtype=torch.float64)
    return base ** (-2 * pair / width)


@dataclass(frozen=True)
class RopeScaling:
    """Slower turning, for a text `factor` times as long as those of the training.

    This one slows all pairs alike, and no angle is new: position t turns as t / factor did (Chen et
    al. 2023, eq. 4).
    """

    factor: float
    length = 1.0  # what turned queries and keys are multiplied by
    score_factor = 1.0  # what scores are multiplied by

    def speeds(self, base: float, width: int) -> torch.Tensor:
        """As rope_speeds(), but slowed."""
        return rope_speeds(base, width) / self.factor


@dataclass(frozen=True)
class NTKScaling(RopeScaling):
    """A larger base (Peng et al. 2023, section 3.1): the slowest pair turns `factor` times slower.

    The fastest one turns as before, so that neighbours are still told apart.
    """

    def speeds(self, base: float, width: int) -> torch.Tensor:
        return rope_speeds(base * self.factor ** (width / (width - 2)), width)


@dataclass(frozen=True)
class Llama3Scaling(RopeScaling):
    """Only pairs that turn seldom are slowed (Llama 3.1's code, apply_scaling).

    What counts is how often a pair turns over in the training's length. More than `high` times: it
    keeps its speed. Less than `low` times: it is slowed by the factor. Between them: a mixture.
    """

    trained: int  # positions that the model was trained on
    low: float = 1.0
    high: float = 4.0

    def speeds(self, base: float, width: int) -> torch.Tensor:
        speed = rope_speeds(base, width)
        turns = self.trained * speed / (2 * math.pi)
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return kept * speed + (1 - kept) * speed / self.factor


@dataclass(frozen=True)
class YaRNScaling(RopeScaling):
    """The same idea, and larger scores (Peng et al. 2023, sections 3.2 and 3.4).

    The paper mixes by the number of turns, as Llama 3 does. Its authors' code, which all models
    follow, mixes by the number of the pair, between the pairs that turn `fast` and `slow` times.
    """

    trained: int  # positions that the model was trained on
    fast: float = 32.0
    slow: float = 1.0
    whole: bool = True  # whether the two ends of the mixture are rounded to whole pairs
    on_scores: bool = False  # enlarge all of a score, also what comes from channels not turned

    @property
    def length(self) -> float:
        return 1.0 if self.on_scores else yarn_length(self.factor)

    @property
    def score_factor(self) -> float:
        return yarn_length(self.factor) ** 2 if self.on_scores else 1.0

    def speeds(self, base: float, width: int) -> torch.Tensor:
        def pair_that_turns(times: float) -> float:
            return width * math.log(self.trained / (2 * math.pi * times)) / (2 * math.log(base))

        first = pair_that_turns(self.fast)
        last = pair_that_turns(self.slow)
        if self.whole:
            first = math.floor(first)
            last = math.ceil(last)
        first = max(first, 0)
        last = min(last, width - 1)
        if first == last:
            last += 0.001  # not to divide by 0
        pair = torch.arange(width // 2, dtype=torch.float64)
        slowed = ((pair - first) / (last - first)).clamp(0, 1)
        speed = rope_speeds(base, width)
        return (1 - slowed) * speed + slowed * speed / self.factor


def yarn_length(factor: float) -> float:
    """0.1 ln factor + 1 (Peng et al. 2023, section 3.4); a score then has the square of it.

    The longer the text, the more keys share the softmax; larger scores make up for that.
    """
    return 0.1 * math.log(factor) + 1


def rope_tables(cfg: DetailedConfig, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine for `width` channels at every position, (block_size, width/2), float64."""
    scaling = cfg.rope_scaling or RopeScaling(factor=1.0)
    position = torch.arange(cfg.block_size, dtype=torch.float64)
    angle = torch.outer(position, scaling.speeds(cfg.rope_base, width))
    return scaling.length * angle.cos(), scaling.length * angle.sin()


# ---------------------------------------------------------------- attention


def visible(n_queries: int, n_keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Which query may see which key, (n_queries, n_keys) bool.

    The queries are the last of the n_keys positions. A window of 3 is a token and the two before.
    """
    key = torch.arange(n_keys, device=device)
    query = key[n_keys - n_queries :, None]
    distance = query - key
    if window is None:
        return distance >= 0
    return (distance >= 0) & (distance < window)


def softcap(x: torch.Tensor, cap: float | None) -> torch.Tensor:
    """cap · tanh(x / cap): small numbers stay as they are, none is larger than cap (Gemma 2)."""
    if cap is None:
        return x
    return cap * torch.tanh(x / cap)


class GroupedAttention(gpt.CausalSelfAttention):
    """Chapter 37's grouped attention with its formula written out.

    The details below override one method: project(), heads() or weigh().
    """

    def __init__(self, cfg: DetailedConfig):
        super().__init__(cfg)
        self.cfg = cfg
        self.n_kv_heads = cfg.n_kv_heads
        self.head_dim = cfg.head_dim
        self.score_scale = cfg.score_scale or cfg.head_dim**-0.5
        if cfg.rope_scaling is not None:
            self.score_scale *= cfg.rope_scaling.score_factor
        n_all = cfg.n_heads + 2 * cfg.n_kv_heads  # query, key and value heads together
        self.qkv = nn.Linear(cfg.d_model, n_all * cfg.head_dim, bias=cfg.bias or cfg.qkv_bias)
        self.proj = gpt.ResidualWriter(cfg.n_heads * cfg.head_dim, cfg.d_model, bias=cfg.bias)
        self.n_turned = cfg.n_turned
        self.cos = None  # plain tensors, as in chapter 07: model.bfloat16() must not round them
        self.sin = None

    @property
    def n_cached(self) -> int:
        """How many numbers a cache keeps of one token: its keys and values."""
        return 2 * self.n_kv_heads * self.head_dim

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x (B, T, C) -> queries (B, H, T, D), keys and values (B, G, T, D), not yet turned."""
        B, T, _ = x.shape
        H = self.n_heads
        G = self.n_kv_heads
        qkv = self.qkv(x).view(B, T, H + 2 * G, self.head_dim).transpose(1, 2)
        return qkv.split([H, G, G], dim=1)

    def tables(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin on the device of x, in float32 or better: made at the first call."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        if self.cos is None or self.cos.device != x.device or self.cos.dtype != dtype:
            cos, sin = rope_tables(self.cfg, self.n_turned)
            self.cos = cos.to(dtype).to(x.device)
            self.sin = sin.to(dtype).to(x.device)
        return self.cos, self.sin

    def turn(self, x: torch.Tensor, start: int) -> torch.Tensor:
        """RoPE on the first channels of x (..., T, D), whose first position is `start`."""
        if self.cfg.position_type != "rope":
            return x
        cos, sin = self.tables(x)
        turned = modern.apply_rope(x[..., : self.n_turned], cos[start:], sin[start:])
        return torch.cat((turned, x[..., self.n_turned :]), dim=-1)

    def heads(
        self, x: torch.Tensor, start: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x (B, T, C), whose first position is `start` -> queries, keys and values to be mixed."""
        q, k, v = self.project(x)
        return self.turn(q, start), self.turn(k, start), v

    def weigh(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores (B, H, T, keys), minus infinity where hidden -> weights of sum 1."""
        return scores.softmax(-1)

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Heads -> (B, T, C). The queries are those of the last positions of the keys."""
        shared_by = q.shape[1] // k.shape[1]  # query heads to a key head: H / G
        k = k.repeat_interleave(shared_by, dim=1)  # (B, H, keys, D)
        v = v.repeat_interleave(shared_by, dim=1)
        scores = softcap(q @ k.mT * self.score_scale, self.cfg.score_cap)  # (B, H, T, keys)
        # The cap comes first: it would make -cap of minus infinity, and hidden keys would count.
        seen = visible(q.shape[2], k.shape[2], self.cfg.window, q.device)
        scores = scores.masked_fill(~seen, -math.inf)
        y = self.weigh(scores) @ v
        return self.proj(y.transpose(1, 2).flatten(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, T, C) -> (B, T, C)."""
        q, k, v = self.heads(x)
        return self.mix(q, k, v)


class HeadNormAttention(GroupedAttention):
    """A norm on each head's query and key before they are turned (Dehghani et al. 2023; Qwen3).

    Scores can't grow with the matrices: no query or key is longer than its gain allows.
    """

    def __init__(self, cfg: DetailedConfig):
        super().__init__(cfg)
        self.q_norm = make_norm(cfg, cfg.head_dim)
        self.k_norm = make_norm(cfg, cfg.head_dim)

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = super().project(x)
        return self.q_norm(q), self.k_norm(k), v


class WidthNormAttention(GroupedAttention):
    """A norm on all queries of a token together, and one on its keys (OLMo 2)."""

    def __init__(self, cfg: DetailedConfig):
        super().__init__(cfg)
        self.q_norm = make_norm(cfg, cfg.n_heads * cfg.head_dim)
        self.k_norm = make_norm(cfg, cfg.n_kv_heads * cfg.head_dim)

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = super().project(x)
        return self.across(self.q_norm, q), self.across(self.k_norm, k), v

    def across(self, norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """A norm on what the heads hold of one token, side by side: (B, heads, T, D) stays that."""
        wide = x.transpose(1, 2).flatten(2)  # (B, T, heads · D)
        return norm(wide).unflatten(2, (-1, self.head_dim)).transpose(1, 2)


class TurnedNormAttention(GroupedAttention):
    """A norm on each head's query and key after they are turned (nanochat).

    A turn changes no length. So without gains the order makes no difference; with gains it does.
    """

    def __init__(self, cfg: DetailedConfig):
        super().__init__(cfg)
        self.q_norm = make_norm(cfg, cfg.head_dim)
        self.k_norm = make_norm(cfg, cfg.head_dim)

    def heads(
        self, x: torch.Tensor, start: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = super().heads(x, start)
        return self.q_norm(q), self.k_norm(k), v


class SinkAttention(GroupedAttention):
    """Each head has one more score, a parameter, whose weight goes to nobody (gpt-oss).

    A head that finds nothing of use may give most of its weight away there. The weights of the keys
    then sum to less than 1.
    """

    def __init__(self, cfg: DetailedConfig):
        super().__init__(cfg)
        self.sinks = nn.Parameter(torch.zeros(cfg.n_heads))

    def weigh(self, scores: torch.Tensor) -> torch.Tensor:
        B, H, T, _ = scores.shape
        sinks = self.sinks.to(scores.dtype).view(1, H, 1, 1).expand(B, H, T, 1)
        weights = torch.cat((scores, sinks), dim=-1).softmax(-1)
        return weights[..., :-1]  # without the sink's


class LatentAttention(GroupedAttention):
    """Keys and values made of one short vector per token (DeepSeek-V2, eqs. 9 to 19).

    The cache keeps that vector, of kv_rank numbers, and one turned key for all heads, of d_rope.
    The short vector can't be turned: so a head's channels are in part content, made of it and never
    turned, and in part position, turned.
    """

    def __init__(self, cfg: DetailedConfig):
        super().__init__(cfg)
        self.d_content = cfg.head_dim - cfg.d_rope
        del self.qkv  # these take its place; queries, too, are made of a short vector
        self.q_down = nn.Linear(cfg.d_model, cfg.q_rank, bias=cfg.bias)
        self.q_norm = make_norm(cfg, cfg.q_rank)
        self.q_up = nn.Linear(cfg.q_rank, cfg.n_heads * cfg.head_dim, bias=False)
        self.kv_down = nn.Linear(cfg.d_model, cfg.kv_rank + cfg.d_rope, bias=cfg.bias)
        self.kv_norm = make_norm(cfg, cfg.kv_rank)
        d_up = self.d_content + cfg.d_value
        self.kv_up = nn.Linear(cfg.kv_rank, cfg.n_heads * d_up, bias=False)
        self.proj = gpt.ResidualWriter(cfg.n_heads * cfg.d_value, cfg.d_model, bias=cfg.bias)

    @property
    def n_cached(self) -> int:
        return self.cfg.kv_rank + self.cfg.d_rope

    def queries(self, x: torch.Tensor, start: int) -> torch.Tensor:
        """x (B, T, C) -> queries (B, H, T, D): content first, then position."""
        q = self.q_up(self.q_norm(self.q_down(x)))
        q = q.unflatten(2, (self.n_heads, self.head_dim)).transpose(1, 2)
        content, place = q.split([self.d_content, self.cfg.d_rope], dim=-1)
        return torch.cat((content, self.turn(place, start)), dim=-1)

    def shorten(self, x: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What a cache keeps of x (B, T, C): (B, T, kv_rank), and a turned key (B, T, d_rope)."""
        latent, place = self.kv_down(x).split([self.cfg.kv_rank, self.cfg.d_rope], dim=-1)
        return self.kv_norm(latent), self.turn(place, start)

    def lengthen(
        self, latent: torch.Tensor, place: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What shorten() made -> keys (B, H, T, D) and values (B, H, T, d_value)."""
        kv = self.kv_up(latent).unflatten(2, (self.n_heads, -1)).transpose(1, 2)
        content, v = kv.split([self.d_content, self.cfg.d_value], dim=-1)
        place = place[:, None].expand(-1, self.n_heads, -1, -1)  # one for all heads
        return torch.cat((content, place), dim=-1), v

    def heads(
        self, x: torch.Tensor, start: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x (B, T, C) -> queries and keys (B, H, T, D), values (B, H, T, d_value)."""
        k, v = self.lengthen(*self.shorten(x, start))
        return self.queries(x, start), k, v


ATTENTIONS = {
    "grouped": GroupedAttention,
    "head norm": HeadNormAttention,
    "width norm": WidthNormAttention,
    "turned norm": TurnedNormAttention,
    "sink": SinkAttention,
    "latent": LatentAttention,
}

# ---------------------------------------------------------------- MLPs


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU by a formula with tanh (Hendrycks & Gimpel 2016, section 2): GPT-2's and Gemma's."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS = {**modern.ACTIVATIONS, "gelu_tanh": gelu_tanh, "silu": F.silu}


class PlainMLP(modern.ModernMLP):
    """Chapter 07's plain MLP with any of ACTIVATIONS."""

    def __init__(self, cfg: DetailedConfig):
        super().__init__(cfg)
        self.activation = ACTIVATIONS[cfg.activation or cfg.mlp_type]


class GatedMLP(nn.Module):
    """down(activation(gate(x)) · up(x)) (Shazeer 2020, eq. 6): SwiGLU or GEGLU."""

    def __init__(self, cfg: DetailedConfig, d_hidden: int):
        super().__init__()
        self.activation = ACTIVATIONS[cfg.activation or "silu"]
        self.gate_proj = nn.Linear(cfg.d_model, d_hidden, bias=cfg.bias)
        self.up_proj = nn.Linear(cfg.d_model, d_hidden, bias=cfg.bias)
        self.down_proj = gpt.ResidualWriter(d_hidden, cfg.d_model, bias=cfg.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., C) -> (..., C)."""
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class ClampedMLP(GatedMLP):
    """SwiGLU whose two factors are clamped, and whose second one has 1 added (gpt-oss).

    gate · σ(1.702 gate) is nearly GELU (Hendrycks & Gimpel 2016, section 2).
    """

    limit = 7.0
    slope = 1.702

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate_proj(x).clamp(max=self.limit)  # far below 0 its factor is 0 in any case
        up = self.up_proj(x).clamp(-self.limit, self.limit)
        return self.down_proj(gate * torch.sigmoid(self.slope * gate) * (up + 1))


GATED_MLPS = {"plain": GatedMLP, "clamped": ClampedMLP}  # plain: with a gate, but not clamped


def make_gated_mlp(cfg: DetailedConfig, times: int = 1) -> nn.Module:
    """The config's gated MLP, `times` as wide inside: some experts are wider (step 13)."""
    d_hidden = cfg.d_hidden or modern.swiglu_hidden(cfg.d_model, cfg.multiple_of)
    return GATED_MLPS[cfg.gated_mlp](cfg, times * d_hidden)


# ---------------------------------------------------------------- experts


def best(scores: torch.Tensor, k: int) -> torch.Tensor:
    """scores (N, E) -> (N, k): the experts with the k largest; of equal ones the lowest numbers."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]


class SoftmaxMoE(modern.MoE):
    """Chapter 07's experts; a gate is the router's probability, renormalised or not.

    Renormalised (Mixtral, Qwen3-MoE), the gates of the chosen sum to 1. It is then the same to take
    the softmax of the k largest logits alone (gpt-oss). As it is (OLMoE), they sum to less.
    """

    fewest = 1  # the smallest k. Chapter 07 refuses 1: a gate divided by itself is always 1

    def __init__(self, cfg: DetailedConfig):
        super().__init__(cfg)
        self.cfg = cfg
        self.router = nn.Linear(cfg.d_model, cfg.n_experts, bias=cfg.bias)
        self.experts = nn.ModuleList(make_gated_mlp(cfg) for _ in range(cfg.n_experts))
        self.shared = None
        if cfg.n_shared_experts is not None:
            self.shared = make_gated_mlp(cfg, cfg.n_shared_experts)  # one MLP, as wide as all

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits (N, E) -> how well each expert suits each token (N, E)."""
        return logits.softmax(-1)

    def choose(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores (N, E) -> the chosen experts (N, k)."""
        return best(scores, self.top_k)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """The router's product, tokens x (N, C) -> (N, E): in float32 even under autocast."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        router = self.router
        bias = None if router.bias is None else router.bias.to(dtype)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.to(dtype), router.weight.to(dtype), bias)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens x (N, C) -> gates (N, k) and the chosen experts (N, k)."""
        scores = self.scores(self.logits(x))
        chosen = self.choose(scores)
        gates = scores.gather(1, chosen)
        if self.cfg.renormalise:
            gates = gates / gates.sum(-1, keepdim=True)
        return self.cfg.gate_scale * gates, chosen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., C) -> (..., C): the chosen experts, and the shared ones, which have no gate."""
        y = super().forward(x)
        if self.shared is None:
            return y
        return y + self.shared(x)


class SigmoidMoE(SoftmaxMoE):
    """Each expert is scored by itself; a bias keeps them equally busy (DeepSeek-V3, eqs. 12 to 16).

    The bias enters the choice and not the gate. Experts stand in groups, each on machines of its
    own, and a token chooses within top_groups of them: those whose two best experts have the
    largest sum.
    """

    def __init__(self, cfg: DetailedConfig):
        super().__init__(cfg)
        self.register_buffer("balance_bias", torch.zeros(cfg.n_experts))  # chapter 18 moves one

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.sigmoid()

    def choose(self, scores: torch.Tensor) -> torch.Tensor:
        wanted = scores + self.balance_bias
        in_groups = wanted.unflatten(1, (self.cfg.n_groups, -1))  # (N, groups, experts of a group)
        n_best = min(2, in_groups.shape[2])
        worth = in_groups.topk(n_best).values.sum(-1)  # (N, groups)
        opened = best(worth, self.cfg.top_groups)  # (N, top_groups)
        closed = torch.ones_like(worth, dtype=torch.bool)  # (N, groups)
        closed = closed.scatter(1, opened, False)  # all but the opened ones
        allowed = in_groups.masked_fill(closed[..., None], -math.inf)
        return best(allowed.flatten(1), self.top_k)  # flat again: (N, E)


ROUTERS = {"softmax": SoftmaxMoE, "sigmoid": SigmoidMoE}

# ---------------------------------------------------------------- blocks


class Block(modern.ModernBlock):
    """The norm before each half: what the stream carries is never normalised itself."""

    def __init__(self, cfg: DetailedConfig):
        super().__init__(cfg)
        self.residual_scale = cfg.residual_scale

    def make_norm(self, cfg: DetailedConfig) -> nn.Module:
        return make_norm(cfg, cfg.d_model)

    def make_attention(self, cfg: DetailedConfig) -> nn.Module:
        return ATTENTIONS[cfg.attention](cfg)

    def make_mlp(self, cfg: DetailedConfig) -> nn.Module:
        if cfg.mlp_type == "moe":
            return ROUTERS[cfg.router](cfg)
        if cfg.mlp_type == "swiglu":
            return make_gated_mlp(cfg)
        return PlainMLP(cfg)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, T, C) -> (B, T, C). The factor is 1 in all models but Granite."""
        x = x + self.residual_scale * self.attn(self.norm1(x))
        x = x + self.residual_scale * self.mlp(self.norm2(x))
        return x


class NormAfterBlock(Block):
    """The norm after each half, inside the residual (OLMo 2): each half adds a known length.

    The first transformer's norm came after the sum (chapter 07, step 13): it normalised the stream.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.residual_scale * self.norm1(self.attn(x))
        x = x + self.residual_scale * self.norm2(self.mlp(x))
        return x


class NormBothBlock(Block):
    """A norm before and a norm after each half (Gemma 2)."""

    def __init__(self, cfg: DetailedConfig):
        super().__init__(cfg)
        self.after1 = self.make_norm(cfg)
        self.after2 = self.make_norm(cfg)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.residual_scale * self.after1(self.attn(self.norm1(x)))
        x = x + self.residual_scale * self.after2(self.mlp(self.norm2(x)))
        return x


class ParallelBlock(Block):
    """Attention and MLP side by side behind one norm (GPT-J; Cohere): the MLP sees no attention."""

    def __init__(self, cfg: DetailedConfig):
        super().__init__(cfg)
        self.norm2 = nn.Identity()  # one norm for both

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm1(x)
        return x + self.residual_scale * (self.attn(normed) + self.mlp(normed))


BLOCKS = {
    "before": Block,
    "after": NormAfterBlock,
    "both": NormBothBlock,
    "parallel": ParallelBlock,
}

# ---------------------------------------------------------------- model


class Head(nn.Linear):
    """The matrix that makes logits, and what is done to them."""

    def __init__(self, cfg: DetailedConfig, vocab_size: int):
        super().__init__(cfg.d_model, vocab_size, bias=False)
        self.logit_scale = cfg.logit_scale
        self.logit_cap = cfg.logit_cap

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., C) -> logits (..., V)."""
        return softcap(self.logit_scale * super().forward(x), self.logit_cap)


class DetailedGPT(real.RealGPT):
    """Chapter 37's model with blocks that may differ from layer to layer; forward() is 05's."""

    def __init__(self, cfg: DetailedConfig, vocab_size: int):
        super().__init__(cfg, vocab_size)
        layers = [layer_config(cfg, i) for i in range(cfg.n_layers)]
        self.blocks = nn.ModuleList(BLOCKS[layer.norm_place](layer) for layer in layers)
        self.embedding_norm = make_norm(cfg, cfg.d_model) if cfg.embedding_norm else nn.Identity()
        self.lm_head = Head(cfg, vocab_size)
        if cfg.tied:
            self.lm_head.weight = self.token_embedding.weight

    def make_block(self, cfg: DetailedConfig) -> nn.Module:
        return nn.Identity()  # chapter 37's __init__ asks for blocks; ours replaces them

    def make_norm(self, cfg: DetailedConfig) -> nn.Module:
        return make_norm(cfg, cfg.d_model)

    def embed(self, idx: torch.Tensor) -> torch.Tensor:
        """Token ids (B, T) -> the start of the residual stream (B, T, C)."""
        scale = self.cfg.embedding_scale
        if scale == "sqrt":
            scale = math.sqrt(self.cfg.d_model)
        return self.embedding_norm(scale * super().embed(idx))


def init_parameters(model: DetailedGPT, seed: int, std: float | str = 0.02) -> None:
    """Chapter 05's start, which sets gains to 1: here the w of a gain 1 + w, and sinks, are 0."""
    gpt.init_parameters(model, seed, std)
    for module in model.modules():
        if isinstance(module, GainPlusOne):
            nn.init.zeros_(module.weight)
        if isinstance(module, SinkAttention):
            nn.init.zeros_(module.sinks)


# ---------------------------------------------------------------- recipes


def recipe(name: str, told: str, **changes) -> Variant:
    """A model as data: its name, what sets it apart in words, and the fields that it changes."""
    return Variant(name, labels={"model": name, "details": told}, changes=changes)


RECIPES = {
    "gpt2": recipe(
        "GPT-2",
        "LayerNorm, biases, learned positions, plain MLP",
        norm_type="layernorm",
        bias=True,
        position_type="learned",
        mlp_type="gelu",
        activation="gelu_tanh",
    ),
    "llama3": recipe(
        "Llama 3",
        "shared key/value heads, RoPE of base 500,000, slowed for long texts from 3.1 on",
        tied=False,
        rope_base=500_000.0,
        rope_scaling=Llama3Scaling(factor=8.0, trained=8_192),
    ),
    "mistral": recipe(
        "Mistral 7B v0.1",
        "every layer sees a window of 4,096 positions",
        tied=False,
        layer_kinds=("window",),
        window=4_096,
    ),
    "qwen2": recipe(
        "Qwen2",
        "biases on queries, keys and values",
        tied=False,
        qkv_bias=True,
        norm_eps=1e-6,
        rope_base=1_000_000.0,
    ),
    "qwen3": recipe(
        "Qwen3",
        "a norm on each head's query and key",
        tied=False,
        attention="head norm",
        norm_eps=1e-6,
        rope_base=1_000_000.0,
    ),
    "olmo2": recipe(
        "OLMo 2",
        "norms after each half, a norm on all queries and on all keys",
        tied=False,
        norm_place="after",
        attention="width norm",
        norm_eps=1e-6,
        rope_base=500_000.0,
    ),
    "gemma2": recipe(
        "Gemma 2",
        "norms before and after, gains 1 + w, GELU gate, embeddings times √C, caps, windows",
        norm_place="both",
        norm_gain="1 + w",
        norm_eps=1e-6,
        activation="gelu_tanh",
        embedding_scale="sqrt",
        layer_kinds=("window", "full"),
        window=4_096,
        score_cap=50.0,
        logit_cap=30.0,
    ),
    "gemma3": recipe(
        "Gemma 3",
        "Gemma 2 with q/k norm and no caps; five of six layers have a window and their own base",
        norm_place="both",
        norm_gain="1 + w",
        norm_eps=1e-6,
        activation="gelu_tanh",
        embedding_scale="sqrt",
        attention="head norm",
        layer_kinds=("window", "window", "window", "window", "window", "full"),
        window=1_024,
        window_rope_base=10_000.0,
        rope_base=1_000_000.0,
        rope_scaling=RopeScaling(factor=8.0),
    ),
    "smollm3": recipe(
        "SmolLM3",
        "no positions in every fourth layer",
        layer_kinds=("full", "full", "full", "no positions"),
        norm_eps=1e-6,
        rope_base=5_000_000.0,
    ),
    "granite": recipe(
        "Granite 3.1",
        "four multipliers: of embeddings, of residuals, of scores, of logits",
        rope_base=5_000_000.0,
        embedding_scale=12.0,
        residual_scale=0.22,
        score_scale=1 / 64,
        logit_scale=1 / 8,
    ),
    "cohere": recipe(
        "Command R",
        "attention and MLP side by side behind one LayerNorm without biases",
        norm_type="layernorm",
        norm_bias=False,
        norm_place="parallel",
        rope_base=8_000_000.0,
        logit_scale=1 / 16,
    ),
    "mixtral": recipe(
        "Mixtral 8x7B",
        "two of eight experts, gates renormalised",
        tied=False,
        mlp_type="moe",
        rope_base=1_000_000.0,
    ),
    "qwen3-moe": recipe(
        "Qwen3-MoE",
        "Qwen3 with eight of 128 small experts, gates renormalised",
        tied=False,
        attention="head norm",
        mlp_type="moe",
        norm_eps=1e-6,
        rope_base=1_000_000.0,
    ),
    "olmoe": recipe(
        "OLMoE",
        "eight of 64 experts, gates as the softmax gives them, a norm on all queries and all keys",
        tied=False,
        attention="width norm",
        mlp_type="moe",
        renormalise=False,
    ),
    "gpt-oss": recipe(
        "gpt-oss",
        "a sink in each head, clamped SwiGLU, biases, a window in every other layer, YaRN",
        tied=False,
        bias=True,
        attention="sink",
        layer_kinds=("window", "full"),
        window=128,
        rope_base=150_000.0,
        rope_scaling=YaRNScaling(factor=32.0, trained=4_096, whole=False),
        mlp_type="moe",
        gated_mlp="clamped",
    ),
    "deepseek-v3": recipe(
        "DeepSeek-V3",
        "latent attention; sigmoid router with groups and a balance bias, a shared expert",
        tied=False,
        attention="latent",
        norm_eps=1e-6,
        rope_scaling=YaRNScaling(factor=40.0, trained=4_096, on_scores=True),
        mlp_type="moe",
        router="sigmoid",
        n_shared_experts=1,
        gate_scale=2.5,
    ),
    "nanochat": recipe(
        "nanochat",
        "norms without gains, ReLU², q/k norm after the turn, a norm on embeddings, capped logits",
        tied=False,
        norm_gain="none",
        norm_eps=1e-6,
        attention="turned norm",
        mlp_type="relu2",
        embedding_norm=True,
        logit_cap=15.0,
    ),
}

# ---------------------------------------------------------------- published shapes


def at_published_shape(name: str, **changes) -> DetailedGPT:
    """A recipe's model as it was published, on the meta device: shapes without numbers."""
    published = PUBLISHED[name]
    cfg = DetailedConfig(**RECIPES[name].changes | published.shape | changes)
    with torch.device("meta"):
        return DetailedGPT(cfg, published.vocab_size)


def cache_bytes(model: DetailedGPT, n_positions: int, bytes_each: int = 2) -> int:
    """What a cache of n_positions takes; with a window, a layer has no use for older ones."""
    n_numbers = 0
    for block in model.blocks:
        kept = min(n_positions, block.attn.cfg.window or n_positions)
        n_numbers += kept * block.attn.n_cached
    return bytes_each * n_numbers


LONG_TEXT = 32_768  # positions


def recipes_table() -> Table:
    """Every recipe and what sets it apart."""
    rows = [[name, r.labels["model"], r.labels["details"]] for name, r in RECIPES.items()]
    return Table(["recipe", "model", "details"], rows)


HOW_TO_READ = """\
empty   as in chapter 37, but for ends
norm    LN is LayerNorm; 1+w and none are the gains of an RMSNorm
place   where the norms stand
window  how many of the layers have one
RoPE    what slows it for long texts; 3 of 4: the fourth layer has no positions
MoE     experts; + 1: one for all tokens; sum<1: gates not divided by their sum
ends    tied: head and embedding are one matrix, empty: two; × multipliers;
        cap: on the logits; norm: on the embeddings"""


def places(cfg: DetailedConfig) -> dict[str, str]:
    """What stands in each place of a model, in short words; empty where it is chapter 37's."""
    kinds = cfg.layer_kinds
    scaling = type(cfg.rope_scaling).__name__.removesuffix("Scaling")
    found = {
        "norm": {
            "LN": cfg.norm_type == "layernorm",
            cfg.norm_gain.replace(" ", ""): cfg.norm_gain != "w",
        },
        "place": {cfg.norm_place: cfg.norm_place != "before"},
        "attention": {
            cfg.attention: cfg.attention != "grouped",
            "biases": cfg.bias or cfg.qkv_bias,
            "cap": cfg.score_cap is not None,
        },
        "window": {f"{kinds.count('window')} of {len(kinds)}": "window" in kinds},
        "RoPE": {
            cfg.position_type: cfg.position_type != "rope",
            f"{len(kinds) - 1} of {len(kinds)}": "no positions" in kinds,
            "2 bases": cfg.window_rope_base is not None,
            scaling: scaling in ("Llama3", "YaRN"),
        },
        "MLP": {
            cfg.mlp_type: cfg.mlp_type in ACTIVATIONS,
            "GELU gate": cfg.mlp_type == "swiglu" and cfg.activation == "gelu_tanh",
            "MoE": cfg.mlp_type == "moe",
            "clamp": cfg.gated_mlp == "clamped",
            "+ 1": cfg.n_shared_experts is not None,
            "sum<1": not cfg.renormalise,
        },
        "ends": {
            "tied": cfg.tied,
            "×": cfg.embedding_scale != 1 or cfg.logit_scale != 1,
            "norm": cfg.embedding_norm,
            "cap": cfg.logit_cap is not None,
        },
    }
    return {
        place: " ".join(word for word, holds in words.items() if holds)
        for place, words in found.items()
    }


def places_table() -> Table:
    """Every recipe, place by place."""
    rows = []
    for name, r in RECIPES.items():
        found = places(DetailedConfig(**r.changes))
        rows.append([name, *found.values()])
    return Table(["recipe", *found], rows)


def in_words(value: object) -> str:
    """A field's value as a person would write it."""
    if value is None:
        return "-"
    if isinstance(value, tuple):
        return ", ".join(value)
    if isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool)):
        return f"{value:,.10g}"
    return str(value)


def details_table(name: str) -> Table:
    """The fields in which a recipe differs from chapter 37's model."""
    here = RECIPES[name].changes | PUBLISHED[name].shape
    rows = []
    for field in RECIPES[name].changes:
        usual = DetailedConfig.__dataclass_fields__[field].default
        if here[field] != usual:
            rows.append([field, in_words(here[field]), in_words(usual)])
    return Table(["field", "here", "chapter 37"], rows)


def sizes_in_words(name: str) -> str:
    """The sizes of the published model, which the recipe leaves open."""
    shape = {"vocab_size": PUBLISHED[name].vocab_size} | PUBLISHED[name].shape
    sizes = [f for f in shape if f not in RECIPES[name].changes]
    return ", ".join(f"{field} {in_words(shape[field])}" for field in sizes)


def counts_table(name: str) -> Table:
    """What the published model stores, what a token uses of it, and what its cache takes."""
    published = PUBLISHED[name]
    model = at_published_shape(name)
    stored = gpt.count_parameters(model)
    ends = {model.token_embedding.weight, model.lm_head.weight}  # one, if they are tied
    inner = stored - sum(weight.numel() for weight in ends)
    active = sparse.active_parameters(model)
    length = min(LONG_TEXT, model.cfg.block_size)
    megabytes = cache_bytes(model, length) / 1e6
    rows = [
        ["parameters", f"{stored:,}", published.parameters],
        ["without embedding and head", f"{inner:,}", published.inner or ""],
        ["cache of one token, bytes", f"{cache_bytes(model, 1):,}", ""],
        [f"cache of {length:,} tokens, MB", f"{megabytes:,.0f}", ""],
    ]
    if active < stored:
        rows.insert(2, ["that a token uses", f"{active:,}", published.active or ""])
    return Table(["counted", "here", "published"], rows)


def show(name: str) -> None:
    """Print one recipe."""
    published = PUBLISHED[name]
    say(report.paragraph(f"{RECIPES[name].labels['model']}: {RECIPES[name].labels['details']}."))
    say()
    say(details_table(name))
    say()
    say(report.paragraph(f"Sizes of {published.name}: {sizes_in_words(name)}."))
    say()
    say(counts_table(name))
    say("\nCounted on the meta device: shapes, no numbers. A cached number takes 2 bytes.")
    say(report.paragraph(f"Published: {published.source}"))


def show_all() -> None:
    """Print all recipes."""
    say(recipes_table())
    say("\nThe same, place by place:")
    say()
    say(places_table())
    say(f"\n{HOW_TO_READ}")


# ---------------------------------------------------------------- experiment

PRESETS = {
    "tiny": Preset(
        DetailedConfig(block_size=64),
        TrainingSettings(steps=120, batch_size=8),
        corpus="docs",
        tokenizer="char",
        seeds=5,
    ),
    "full": Preset(
        DetailedConfig(block_size=256, n_layers=6, n_heads=6, d_model=384),
        TrainingSettings(
            steps=2000,
            batch_size=64,
            learning_rate=1e-3,
            warmup=100,
            final_rate=0.1,
            precision="bfloat16",
        ),
        corpus="source",
        tokenizer="bpe4k",
        seeds=8,
    ),
}
BASELINE = "llama3"
DENSE = [name for name, r in RECIPES.items() if r.changes.get("mlp_type") != "moe"]
LONG_TEXTS = {"rope_base", "rope_scaling"}  # made for texts a thousand times as long as ours
FEW_LARGE = {"n_experts": 8, "top_k": 2}
MANY_SMALL = {"n_experts": 16, "top_k": 4}
BIAS_SPEED = 0.003  # what a step adds to the balance bias of an expert, or takes from it


def fitted(name: str, cfg: DetailedConfig) -> dict:
    """What a recipe changes in a config of our size. What would not act there has another value.

    A window is a quarter of the text. Of an order of layers that is longer than ours the end is
    left. Factors on logits make them as large at the start as they are in the published model.
    """
    head = cfg.head_dim
    fits = {
        "gemma2": {"score_cap": 5.0, "logit_cap": 10.0},
        "gemma3": {"window_rope_base": cfg.rope_base / 100},
        "granite": {"score_scale": 1 / head, "logit_scale": math.sqrt(2_048 / cfg.d_model) / 8},
        "cohere": {"logit_scale": math.sqrt(8_192 / cfg.d_model) / 16},
        "mixtral": FEW_LARGE,
        "qwen3-moe": MANY_SMALL,
        "olmoe": MANY_SMALL,
        "gpt-oss": FEW_LARGE,
        "deepseek-v3": {
            **MANY_SMALL,
            "n_groups": 4,
            "top_groups": 2,
            "q_rank": cfg.d_model // 2,
            "kv_rank": cfg.d_model // 4,
            "d_rope": head // 2,
            "d_head": head + head // 2,
            "d_value": head,
        },
    }
    changes = {
        field: value for field, value in RECIPES[name].changes.items() if field not in LONG_TEXTS
    }
    changes |= fits.get(name, {})
    if "window" in changes:
        changes["window"] = cfg.block_size // 4
    if "layer_kinds" in changes:
        changes["layer_kinds"] = changes["layer_kinds"][-cfg.n_layers :]
    return changes


def variants(cfg: DetailedConfig, names: list[str]) -> list[Variant]:
    """The baseline, and the other recipes by name."""
    found = []
    for name in [BASELINE, *(name for name in RECIPES if name in names and name != BASELINE)]:
        model = RECIPES[name].labels["model"]
        found.append(Variant(model, labels={"model": model}, changes=fitted(name, cfg)))
    return found


def on_meta(cfg: DetailedConfig, vocab_size: int) -> DetailedGPT:
    """A model without numbers, to be counted."""
    with torch.device("meta"):
        return DetailedGPT(cfg, vocab_size)


def at_equal_size(plan: Plan) -> Plan:
    """The plan with every d_hidden such that a token uses as many parameters as in the baseline.

    Each unit of d_hidden adds the same number, so two counts tell how many units are needed.
    UserError for a model that is too large even without an MLP.
    """

    def active(cfg: DetailedConfig) -> int:
        return sparse.active_parameters(on_meta(cfg, plan.corpus.vocab_size))

    wanted = active(plan.configs[plan.baseline])
    configs = {}
    for name, cfg in plan.configs.items():
        narrowest = active(replace(cfg, d_hidden=1))
        one_more = active(replace(cfg, d_hidden=2)) - narrowest
        d_hidden = 1 + round((wanted - narrowest) / one_more)
        if d_hidden < 1:
            raise UserError(
                f"--set: with an MLP of width 1 {name} takes {narrowest:,} parameters, "
                f"{plan.baseline} only {wanted:,}; give a larger d_hidden, or a smaller block_size"
            )
        configs[name] = replace(cfg, d_hidden=d_hidden)
    return replace(plan, configs=configs)


class SideBySide(runs.Experiment):
    """Recipes of equal size against the baseline."""

    def build_model(self, config: DetailedConfig, vocab_size: int, seed: int) -> nn.Module:
        model = DetailedGPT(config, vocab_size)
        init_parameters(model, seed, config.init_std)
        return model

    def training_loss(self, model: nn.Module, idx: torch.Tensor, targets: torch.Tensor) -> tuple:
        """The cross-entropy twice, and what each router with a balance bias read."""
        read = {}

        def keep(router: SigmoidMoE, inputs: tuple) -> None:
            read[router] = inputs[0].detach()

        routers = [module for module in model.modules() if isinstance(module, SigmoidMoE)]
        hooks = [router.register_forward_pre_hook(keep) for router in routers]
        _, loss = model(idx, targets)
        for hook in hooks:
            hook.remove()
        return loss, loss, read

    @torch.no_grad()
    def after_step(self, model: nn.Module, told: dict[SigmoidMoE, torch.Tensor]) -> None:
        """Move the balance biases: up for experts that got less than the mean, down for others."""
        for router, x in told.items():
            _, chosen = router.route(x.flatten(0, 1))
            load = chosen.flatten().bincount(minlength=len(router.experts)).float()
            router.balance_bias += BIAS_SPEED * (load.mean() - load).sign()


SCOPE = (
    "That holds at this size, rate and number of steps, for details as the last table has them. At "
    "one shared rate a comparison also measures which model that rate suits: the README has the "
    "answers at a second one."
)


def sizes_text(plan: Plan) -> str:
    """How equal the models are, and what the last table shows."""
    models = [on_meta(cfg, plan.corpus.vocab_size) for cfg in plan.configs.values()]
    active = [sparse.active_parameters(model) for model in models]
    apart = (max(active) - min(active)) / min(active)
    base = plan.configs[plan.baseline].rope_base
    return (
        f"A token uses {min(active):,} to {max(active):,} parameters, whatever the model "
        f"({apart:.1%} apart): the width of its MLPs, d_hidden, was chosen for that. RoPE has a "
        f"base of {base:,.0f} and no scaling, since the published ones are for longer texts. What "
        "else isn't as published, so that it acts at this size, stands in the last column."
    )


def trained_table(plan: Plan) -> Table:
    """What sets each model apart, and which values are not its recipe's, so that it acts here."""
    by_model = {r.labels["model"]: r for r in RECIPES.values()}
    rows = []
    for variant in plan.variants:
        published = by_model[variant.name]
        here = [
            f"{field} {', '.join(value) if isinstance(value, tuple) else format(value, '.3g')}"
            for field, value in variant.changes.items()
            if value != published.changes.get(field)
        ]
        width = plan.configs[variant.name].d_hidden
        rows.append([variant.name, published.labels["details"], str(width), "; ".join(here)])
    return Table(["model", "what sets it apart", "d_hidden", "here"], rows)


def summarize(plan: Plan, results: list[runs.Result]) -> list[str | Table]:
    """The finding in a sentence, the losses, and what the models are."""
    finding = report.finding(plan, results)
    blocks = [finding, SCOPE] if finding else []
    blocks += [report.comparison_table(plan, results), report.caption(plan)]
    return [*blocks, sizes_text(plan), trained_table(plan)]


def draw(plan: Plan, results: list[runs.Result]) -> dict:
    """The figures of this run by file name."""
    drawn = {"curves.png": figures.curves(plan, results)}
    if len(plan.names) > 1:
        drawn["differences.png"] = figures.differences(plan, results)
    return drawn


def main(argv: list[str] | None = None) -> int:
    here = Path(__file__).parent
    parser = cli.build_parser(__doc__)
    parser.add_argument(
        "--show",
        nargs="?",
        const="all",
        choices=[*RECIPES, "all"],
        metavar="RECIPE",
        help="train nothing; print this recipe, or all of them",
    )
    parser.add_argument(
        "--recipes",
        nargs="+",
        default=DENSE,
        choices=[*RECIPES, "all"],
        metavar="RECIPE",
        help=f"train these beside {BASELINE}, or all (default: those without experts)",
    )
    args = parser.parse_args(argv)
    if args.show is not None:
        show_all() if args.show == "all" else show(args.show)
        return 0
    options = cli.options_from(args, here / "outputs")
    preset = PRESETS[options.preset]
    chosen = list(RECIPES) if "all" in args.recipes else args.recipes
    title = "The details of today's models: recipes of equal size side by side"
    plan = cli.make_plan(title, preset, variants(preset.model, chosen), options)
    plan = at_equal_size(plan)
    return report.carry_out(SideBySide(), plan, summarize, draw, here / "expected")


if __name__ == "__main__":
    cli.run_build(__file__)
