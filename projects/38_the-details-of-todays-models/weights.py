"""Chapter 38's weights files: which of them hold which recipe, and how.

A GGUF file names the architecture of its model, says its sizes in fields, and lists its tensors
(chapter 37, steps 01 and 09). Here each architecture is data: the recipe that it is, what its fields
are in our config, and what its tensors are in our model. Chapter 37's build.py --weights FILE comes
here with each file that is not for its own blocks. What a file asks for and we can't do is refused
by name, before a number is read.

The names are those of llama.cpp, which made the format. What a file doesn't say, because all
models of an architecture have it, is in the recipe.
"""

import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters

import torch
import torch.nn as nn

build = chapters.load_file(Path(__file__).with_name("build.py"))
vocabulary = chapters.load_file(Path(__file__).with_name("vocabulary.py"))
inspection = build.real.inspection
Rule = inspection.Rule

open_tokenizer = vocabulary.open_tokenizer  # build.py of chapter 37 takes it and load_model()

# ---------------------------------------------------------------- tensors of a block

# Their blk.i.NAME.weight, or .bias -> the same part of our blocks.i. Ours holds q, k and v in one
# matrix, theirs holds all experts in one tensor; places() makes up for that.
GROUPED = {
    "attn_q": "attn.q",
    "attn_k": "attn.k",
    "attn_v": "attn.v",
    "attn_output": "attn.proj",
}
QK_NORMS = {"attn_q_norm": "attn.q_norm", "attn_k_norm": "attn.k_norm"}
LATENT = {
    "attn_q_a": "attn.q_down",
    "attn_q_a_norm": "attn.q_norm",
    "attn_q_b": "attn.q_up",
    "attn_kv_a_mqa": "attn.kv_down",
    "attn_kv_a_norm": "attn.kv_norm",
    "attn_k_b": "attn.k_up",
    "attn_v_b": "attn.v_up",
    "attn_output": "attn.proj",
}
GATED = {
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
EXPERTS = {
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
SHARED_EXPERT = {
    "ffn_gate_shexp": "mlp.shared.gate_proj",
    "ffn_up_shexp": "mlp.shared.up_proj",
    "ffn_down_shexp": "mlp.shared.down_proj",
}
NORMS_BEFORE = {"attn_norm": "norm1", "ffn_norm": "norm2"}
NORMS_AFTER = {"post_attention_norm": "norm1", "post_ffw_norm": "norm2"}
NORMS_BOTH = {
    "attn_norm": "norm1",
    "post_attention_norm": "after1",
    "ffn_norm": "norm2",
    "post_ffw_norm": "after2",
}
ENDS = {  # outside the blocks
    "token_embd": "token_embedding",
    "position_embd": "position_embedding",
    "output_norm": "norm_f",
    "output": "lm_head",
}
ROPE_FACTORS = "rope_freqs.weight"  # of Llama 3.1 and later: how many times slower each pair turns

# ---------------------------------------------------------------- fields

# Their field, without the architecture in front -> ours. None: a function below reads it.
COMMON = {
    "block_count": "n_layers",
    "context_length": "block_size",
    "embedding_length": "d_model",
    "feed_forward_length": "d_hidden",
    "attention.head_count": "n_heads",
    "attention.head_count_kv": "n_kv_heads",
    "attention.key_length": "d_head",
    "attention.value_length": None,
    "vocab_size": None,
    "rope.dimension_count": None,
    "rope.freq_base": "rope_base",
    "rope.scale_linear": None,
    "rope.scaling.type": None,
    "rope.scaling.factor": None,
    "rope.scaling.original_context_length": None,
    "rope.scaling.finetuned": None,
    "rope.scaling.attn_factor": None,
    "rope.scaling.yarn_attn_factor": None,
    "rope.scaling.yarn_beta_fast": None,
    "rope.scaling.yarn_beta_slow": None,
}
ALWAYS = {"attention.causal": True, "rope.scaling.yarn_ext_factor": 1.0}
RMS_EPS = "attention.layer_norm_rms_epsilon"
LAYERNORM_EPS = "attention.layer_norm_epsilon"
WINDOW = {"attention.sliding_window": "window"}
EXPERT_COUNTS = {
    "expert_count": "n_experts",
    "expert_used_count": "top_k",
    "expert_feed_forward_length": "d_expert",
}
# What a field may hold: chapter 37's rules, and those of fields that it doesn't know.
RULES = {name.removeprefix("llama."): rule for name, rule in inspection.FIELDS.items()} | {
    LAYERNORM_EPS: Rule(float, 0, 0.1, needed=True),
    "attention.sliding_window": Rule(int, 1, 2**27, needed=True),
    "attention.scale": Rule(float, 1e-6, 1e6, needed=True),
    "embedding_scale": Rule(float, 1e-6, 1e6, needed=True),
    "residual_scale": Rule(float, 1e-6, 1e6, needed=True),
    "logit_scale": Rule(float, 1e-6, 1e6, needed=True),
    "attn_logit_softcapping": Rule(float, 1e-6, 1e6, needed=True),
    "final_logit_softcapping": Rule(float, 1e-6, 1e6, needed=True),
    "rope.freq_base_swa": Rule(float, 1, 1e12),
    "rope.scaling.attn_factor": Rule(float, 1e-6, 1e6),
    "rope.scaling.yarn_attn_factor": Rule(float, 1e-6, 1e6),
    "rope.scaling.yarn_beta_fast": Rule(float, 1e-6, 1e6),
    "rope.scaling.yarn_beta_slow": Rule(float, 1e-6, 1e6),
    "rope.scaling.yarn_log_multiplier": Rule(float, 0, 10),
    "expert_count": Rule(int, 1, 1024, needed=True),
    "expert_used_count": Rule(int, 1, 1024, needed=True),
    "expert_feed_forward_length": Rule(int, 1, 2**20),
    "expert_shared_count": Rule(int, 1, 1024, needed=True),
    "expert_group_count": Rule(int, 1, 1024, needed=True),
    "expert_group_used_count": Rule(int, 1, 1024, needed=True),
    "expert_weights_scale": Rule(float, 1e-6, 1e6, needed=True),
    "expert_weights_norm": Rule(bool, needed=True),
    "expert_gating_func": Rule(int, 0, 100, needed=True),
    "leading_dense_block_count": Rule(int, 0, 1_000, needed=True),
    "attention.q_lora_rank": Rule(int, 1, 2**17, needed=True),
    "attention.kv_lora_rank": Rule(int, 1, 2**17, needed=True),
    "attention.key_length_mla": Rule(int, 2, 2**12, needed=True),
    "attention.value_length_mla": Rule(int, 1, 2**12, needed=True),
}

# ---------------------------------------------------------------- architectures


def nothing(changes: dict) -> dict:
    return {}


def gemma_scale(changes: dict) -> dict:
    """The 27B models of Gemma 2 and 3 scale scores by √(C / H); the others by √D, as all do.

    A file doesn't say it: they are known by their number of layers.
    """
    if changes["n_layers"] not in (46, 62):
        return {}
    return {"score_scale": (changes["d_model"] / changes["n_heads"]) ** -0.5}


def granite_scale(changes: dict) -> dict:
    """Granite divides its logits by what the file calls logit_scale."""
    return {"logit_scale": 1 / changes["logit_scale"]}


def latent_heads(changes: dict) -> dict:
    """A file counts one key head, the short vector; in ours each head has a key made of it."""
    return {"n_kv_heads": changes["n_heads"]}


@dataclass(frozen=True)
class Architecture:
    """What the files of one architecture hold, and what that is in ours."""

    recipe: str  # one of build.py's RECIPES
    names: dict[str, str]  # the tensors of its blocks
    # Chapter 07's RoPE turns neighbouring channels together. Most originals turn channel i with
    # i + D/2: the two halves of a head. For architectures that came first (Llama, and what its
    # converter serves) the makers of the format sorted the rows of q and k into neighbours, and we
    # read them as they are. For all later ones the rows stay in halves, and we sort them.
    halves: bool = False
    plus_one: bool = False  # gains are stored as 1 + w, and our norm adds the 1 itself
    eps: str = RMS_EPS
    fields: dict[str, str | None] = field(default_factory=dict)  # beyond COMMON
    fixed: dict[str, object] = field(default_factory=dict)  # what our model can only have
    more: Callable[[dict], dict] = nothing  # fields of our config, from those read so far


DENSE = {"expert_count": 0, "expert_used_count": 0}  # some files say that they have no experts
LLAMA = Architecture(
    "llama3", GROUPED | GATED | NORMS_BEFORE, fixed={**DENSE, "attention.sliding_window": 0}
)
ARCHITECTURES = {
    # Mistral's files are of this architecture too, and don't name the window of its first version.
    "llama": LLAMA,
    "llama with experts": Architecture(
        "mixtral",
        GROUPED | EXPERTS | NORMS_BEFORE,
        fields=EXPERT_COUNTS,
        fixed={"attention.sliding_window": 0},
    ),
    "mistral3": LLAMA,
    "qwen2": Architecture("qwen2", GROUPED | GATED | NORMS_BEFORE, halves=True),
    "qwen3": Architecture(
        "qwen3", GROUPED | QK_NORMS | GATED | NORMS_BEFORE, halves=True
    ),
    "qwen3moe": Architecture(
        "qwen3-moe",
        GROUPED | QK_NORMS | EXPERTS | NORMS_BEFORE,
        halves=True,
        fields=EXPERT_COUNTS,
    ),
    "gemma2": Architecture(
        "gemma2",
        GROUPED | GATED | NORMS_BOTH,
        halves=True,
        plus_one=True,
        fields=WINDOW
        | {"attn_logit_softcapping": "score_cap", "final_logit_softcapping": "logit_cap"},
        more=gemma_scale,
    ),
    "gemma3": Architecture(
        "gemma3",
        GROUPED | QK_NORMS | GATED | NORMS_BOTH,
        halves=True,
        plus_one=True,
        fields=WINDOW | {"rope.freq_base_swa": "window_rope_base"},
        more=gemma_scale,
    ),
    "olmo2": Architecture(
        "olmo2", GROUPED | QK_NORMS | GATED | NORMS_AFTER, halves=True
    ),
    "olmoe": Architecture(
        "olmoe", GROUPED | QK_NORMS | EXPERTS | NORMS_BEFORE, halves=True, fields=EXPERT_COUNTS
    ),
    "smollm3": Architecture("smollm3", GROUPED | GATED | NORMS_BEFORE),
    "granite": Architecture(
        "granite",
        GROUPED | GATED | NORMS_BEFORE,
        fields={
            "attention.scale": "score_scale",
            "embedding_scale": "embedding_scale",
            "residual_scale": "residual_scale",
            "logit_scale": "logit_scale",
        },
        fixed={**DENSE, "rope.scaling.finetuned": True},  # false would mean: no RoPE at all
        more=granite_scale,
    ),
    "command-r": Architecture(
        "cohere",
        GROUPED | GATED | {"attn_norm": "norm1"},
        eps=LAYERNORM_EPS,
        fields={"logit_scale": "logit_scale"},
    ),
    "gpt-oss": Architecture(
        "gpt-oss",
        GROUPED
        | EXPERTS
        | {
            "attn_sinks": "attn.sinks",
            "attn_norm": "norm1",
            "post_attention_norm": "norm2",  # in spite of its name it comes before the MLP
        },
        halves=True,
        fields=WINDOW | EXPERT_COUNTS,
    ),
    "deepseek2": Architecture(
        "deepseek-v3",
        LATENT | GATED | EXPERTS | SHARED_EXPERT | NORMS_BEFORE | {"exp_probs_b": "mlp.balance"},
        fields=EXPERT_COUNTS
        | {
            "attention.q_lora_rank": "q_rank",
            "attention.kv_lora_rank": "kv_rank",
            "attention.key_length": None,
            "attention.key_length_mla": "d_head",
            "attention.value_length_mla": "d_value",
            "rope.dimension_count": "d_rope",
            "rope.scaling.yarn_log_multiplier": None,
            "leading_dense_block_count": "n_dense_layers",
            "expert_shared_count": "n_shared_experts",
            "expert_group_count": "n_groups",
            "expert_group_used_count": "top_groups",
            "expert_weights_scale": "gate_scale",
            "expert_weights_norm": "renormalise",
            "expert_gating_func": None,
        },
        fixed={"expert_gating_func": 2, "attention.head_count_kv": 1},  # 2: the sigmoid
        more=latent_heads,
    ),
    "gpt2": Architecture(
        "gpt2",
        {
            "attn_norm": "norm1",
            "attn_qkv": "attn.qkv",
            "attn_output": "attn.proj",
            "ffn_norm": "norm2",
            "ffn_up": "mlp.fc",
            "ffn_down": "mlp.proj",
        },
        eps=LAYERNORM_EPS,
    ),
}


def architecture_of(file) -> tuple[str, Architecture]:
    """What a file calls its architecture, and ours of that name. UserError if there is none."""
    name = file.metadata.get("general.architecture")
    if name == "llama" and file.metadata.get("llama.expert_count", 0) != 0:
        return name, ARCHITECTURES["llama with experts"]
    if not isinstance(name, str) or name not in ARCHITECTURES:
        known = ", ".join(name for name in ARCHITECTURES if " " not in name)
        raise file.refusal(f"its architecture is {inspection.short(name)}, and we know {known}")
    return name, ARCHITECTURES[name]


# ---------------------------------------------------------------- config


def check_fields(file, name: str, known: Architecture) -> dict[str, str | None]:
    """UserError unless each field of the architecture is known and may be. Returns COMMON and more.

    A field that we don't know may change what the model does: none is passed over.
    """
    fields = COMMON | known.fields | {known.eps: "norm_eps"}
    inspection.check_rules(file, {f"{name}.{field}": RULES[field] for field in fields})
    fixed = known.fixed | ALWAYS
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


class FileGPT(build.DetailedGPT):
    """Chapter 38's model with a memory for one text (chapter 37, step 06)."""

    def make_cache(self, attn: nn.Module, n_positions: int) -> nn.Module:
        if self.cfg.attention == "latent":
            return CachedLatent(attn, n_positions)
        return Cached(attn, n_positions)

    def embed(self, idx: torch.Tensor) -> torch.Tensor:
        past = getattr(self.blocks[0].attn, "length", 0)  # positions in memory
        if self.position_embedding is None or past == 0:
            return super().embed(idx)
        positions = self.position_embedding.weight[past : past + idx.shape[1]]
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


def our_parts(model: FileGPT) -> dict[str, list[torch.Tensor]]:
    """Our parameters by name, cut as files have them; those of all experts under one name."""
    parts = {}
    for name, numbers in [*model.named_parameters(), *model.named_buffers()]:
        name = re.sub(r"\.experts\.\d+\.", ".experts.", name)
        name = name.replace("attn.sinks", "attn.sinks.weight")
        name = name.replace("mlp.balance_bias", "mlp.balance.bias")
        parts.setdefault(name, []).append(numbers)
    for i, block in enumerate(model.blocks):
        attn = block.attn
        where = f"blocks.{i}.attn"
        D = attn.head_dim
        for kind in ("weight", "bias"):
            if model.cfg.position_type == "rope" and f"{where}.qkv.{kind}" in parts:
                [whole] = parts.pop(f"{where}.qkv.{kind}")
                rows = [D * attn.n_heads, D * attn.n_kv_heads, D * attn.n_kv_heads]
                for letter, piece in zip("qkv", whole.split(rows)):
                    parts[f"{where}.{letter}.{kind}"] = [piece]
        if f"{where}.kv_up.weight" in parts:
            [whole] = parts.pop(f"{where}.kv_up.weight")
            heads = whole.unflatten(0, (attn.n_heads, -1))  # (H, content and value, kv_rank)
            parts[f"{where}.k_up.weight"] = [heads[:, : attn.d_content].mT]  # theirs is transposed
            parts[f"{where}.v_up.weight"] = [heads[:, attn.d_content :]]
    return parts


def places(model: FileGPT, known: Architecture) -> dict[str, Place]:
    """Their name of each tensor -> the place of its numbers in our model."""
    theirs = {ours: name for name, ours in (known.names | ENDS).items()}
    found = {}
    for name, pieces in our_parts(model).items():
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


def empty_model(cfg, n_tokens: int) -> FileGPT:
    """A model of shapes without numbers: it takes no memory."""
    with torch.device("meta"):
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
    wanted = places(empty_model(cfg, n_tokens), known)
    for name, place in wanted.items():
        inspection.check_tensor(file, name, place.shape)
    if ROPE_FACTORS in file.tensors:
        inspection.check_tensor(file, ROPE_FACTORS, (cfg.n_turned // 2,))
    for name in file.tensors:
        if name not in wanted and name != ROPE_FACTORS:
            raise file.refusal(f"our model has no place for its tensor {name}")
    model = empty_model(with_pair_factors(file, cfg), n_tokens).to_empty(device="cpu")
    if cfg.tied:
        model.lm_head.weight = model.token_embedding.weight  # to_empty() gave it one of its own
    for name, place in places(model, known).items():
        numbers = as_ours(name, file.read(name), known, cfg.head_dim)
        inspection.check_numbers(file, {name: numbers})
        for piece, part in zip(place.pieces, numbers if place.stacked else [numbers]):
            piece.copy_(part)
    return model.eval()


def with_pair_factors(file, cfg):
    """The config with the scaling of RoPE that stands in a file as a tensor, if one does."""
    if ROPE_FACTORS not in file.tensors:
        return cfg
    factors = file.read(ROPE_FACTORS)
    if not (factors >= 1e-6).all() or not factors.isfinite().all():  # so NaN is refused, too
        raise file.refusal(f"its tensor {ROPE_FACTORS} holds a factor that can't be")
    return replace(cfg, rope_scaling=PairScaling(1.0, tuple(factors.tolist())))
