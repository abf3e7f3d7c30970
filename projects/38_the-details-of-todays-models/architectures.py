"""Chapter 38: what the weights files of each architecture hold, as data.

A GGUF file names the architecture of its model, gives its sizes as fields, and lists its tensors
(chapter 37, steps 01 and 09). Here stands, for each architecture, which recipe it is, what its
fields are in our config, and what its tensors are in our model. weights.py reads files by it.

The names are those of llama.cpp, whose format this is. Most mistakes that can be made here are
silent: rows in another order, gains that have a 1 too many, a scale that divides.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters

inspection = chapters.load_build(37).inspection
Rule = inspection.Rule

# ---------------------------------------------------------------- tensors of a block

# Their blk.i.NAME.weight, or .bias -> the same part of our blocks.i. Ours holds q, k and v in one
# matrix, theirs holds all experts in one tensor; places() in weights.py makes up for that.
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
FACTOR = Rule(float, 1e-6, 1e6)
NEEDED_FACTOR = Rule(float, 1e-6, 1e6, needed=True)
NEEDED_EXPERTS = Rule(int, 1, 1_024, needed=True)
NEEDED_WIDTH = Rule(int, 1, 2**17, needed=True)
RULES = {name.removeprefix("llama."): rule for name, rule in inspection.FIELDS.items()} | {
    LAYERNORM_EPS: Rule(float, 0, 0.1, needed=True),
    "attention.sliding_window": Rule(int, 1, 2**27, needed=True),
    "attention.scale": NEEDED_FACTOR,
    "embedding_scale": NEEDED_FACTOR,
    "residual_scale": NEEDED_FACTOR,
    "logit_scale": NEEDED_FACTOR,
    "attn_logit_softcapping": NEEDED_FACTOR,
    "final_logit_softcapping": NEEDED_FACTOR,
    "rope.freq_base_swa": Rule(float, 1, 1e12),
    "rope.scaling.attn_factor": FACTOR,
    "rope.scaling.yarn_attn_factor": FACTOR,
    "rope.scaling.yarn_beta_fast": FACTOR,
    "rope.scaling.yarn_beta_slow": FACTOR,
    "rope.scaling.yarn_log_multiplier": Rule(float, 0, 10),
    "expert_count": NEEDED_EXPERTS,
    "expert_used_count": NEEDED_EXPERTS,
    "expert_feed_forward_length": Rule(int, 1, 2**20),
    "expert_shared_count": NEEDED_EXPERTS,
    "expert_group_count": NEEDED_EXPERTS,
    "expert_group_used_count": NEEDED_EXPERTS,
    "expert_weights_scale": NEEDED_FACTOR,
    "expert_weights_norm": Rule(bool, needed=True),
    "expert_gating_func": Rule(int, 0, 100, needed=True),
    "leading_dense_block_count": Rule(int, 0, 1_000, needed=True),
    "attention.q_lora_rank": NEEDED_WIDTH,
    "attention.kv_lora_rank": NEEDED_WIDTH,
    "attention.key_length_mla": NEEDED_WIDTH,
    "attention.value_length_mla": NEEDED_WIDTH,
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
    "qwen3": Architecture("qwen3", GROUPED | QK_NORMS | GATED | NORMS_BEFORE, halves=True),
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
    "olmo2": Architecture("olmo2", GROUPED | QK_NORMS | GATED | NORMS_AFTER, halves=True),
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
