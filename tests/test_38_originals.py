"""Chapter 38: every recipe against its original, a small model of `transformers` with random weights.

The numbers of the original come into ours by name, all of them. Then logits and gradients are the same in float64, at
lengths beyond the window. Sizes are odd and unequal, where RoPE lets them be, so that nothing can hide behind a
transposition; gains, biases, sinks and balance biases are random, too.
"""

from functools import partial

import pytest
import torch
from torch.overrides import TorchFunctionMode

from shared import chapters

transformers = pytest.importorskip("transformers")

LIMIT = 1e-10  # how far a logit or a gradient may be off, in float64
VOCABULARY = 53
LENGTHS = (1, 3, 17)  # the window below is 4
OUR_SIZES = {
    "block_size": 40,
    "n_layers": 5,
    "n_heads": 9,
    "n_kv_heads": 3,
    "d_model": 45,
    "d_head": 10,
    "d_hidden": 35,
}
THEIR_SIZES = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 40,
    "num_hidden_layers": 5,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 45,
    "head_dim": 10,
    "intermediate_size": 35,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


class Wide(TorchFunctionMode):
    """Inside, whatever asks for float32 gets float64: the originals take norms, RoPE and softmax in float32, whatever
    the model is, and that would be all that a comparison sees."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        args = [torch.float64 if a is torch.float32 else a for a in args]
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return function(*args, **kwargs)


@pytest.fixture(scope="module")
def build():
    """Chapter 38's build.py."""
    return chapters.load_build(38)


# ---------------------------------------------------------------- their numbers in our places


def to_pairs(rows: torch.Tensor, head_dim: int, turned: int) -> torch.Tensor:
    """Rows of heads (heads · D, ...), whose first `turned` channels RoPE takes as two halves, in our order: pairs."""
    order = torch.arange(head_dim)
    order[:turned] = order[:turned].view(2, -1).t().flatten()
    return rows.unflatten(0, (-1, head_dim))[:, order].flatten(0, 1)


def as_stored(rows, head_dim, turned):
    """For originals that take RoPE's pairs as we do, or have no RoPE."""
    return rows


NORMS_BEFORE = {"input_layernorm": "norm1", "post_attention_layernorm": "norm2"}


def translate(theirs: dict, cfg, norms=NORMS_BEFORE, order=to_pairs) -> dict:
    """Tensors by their names -> the same by ours: a state dict or its gradients."""
    theirs = dict(theirs)
    ours = {"token_embedding.weight": theirs.pop("model.embed_tokens.weight")}
    if "model.norm.weight" in theirs:
        ours["norm_f.weight"] = theirs.pop("model.norm.weight")
    head = theirs.pop("lm_head.weight", None)
    if not cfg.tied:
        ours["lm_head.weight"] = head
    turned = int(cfg.rotated * cfg.head_dim)
    for i in range(cfg.n_layers):
        layer = f"model.layers.{i}."
        block = f"blocks.{i}."
        for name in [name for name in theirs if name.startswith(layer)]:
            tensor = theirs.pop(name)
            name = name.removeprefix(layer)
            part, _, kind = name.rpartition(".")
            if part in norms:
                ours[f"{block}{norms[part]}.{kind}"] = tensor
            elif name.startswith("self_attn."):
                if part.endswith(("q_proj", "k_proj", "q_norm", "k_norm")):
                    tensor = order(tensor, cfg.head_dim, turned)
                ours[f"{block}attn.{name.removeprefix('self_attn.')}"] = tensor
            elif name.startswith("mlp.experts."):
                ours |= experts(block, name.removeprefix("mlp.experts."), tensor)
            else:
                name = name.replace("mlp.gate.", "mlp.router.").replace("router.e_score_correction", "balance")
                ours[block + name.replace("shared_experts", "shared")] = tensor
        for kind in ("weight", "bias"):
            rows = [ours.pop(f"{block}attn.{part}_proj.{kind}", None) for part in "qkv"]
            if rows[0] is not None:
                ours[f"{block}attn.qkv.{kind}"] = torch.cat(rows)
            if (out := ours.pop(f"{block}attn.o_proj.{kind}", None)) is not None:
                ours[f"{block}attn.proj.{kind}"] = out
    assert not theirs, f"no place for {list(theirs)}"
    return ours


def experts(block: str, name: str, tensor: torch.Tensor) -> dict:
    """One tensor of all experts, or of all biases -> ours, one of each: gate and up lie one above the other."""
    kind = "bias" if name.endswith("_bias") else "weight"
    part = name.removesuffix("_bias")
    ours = {}
    for e, of_one in enumerate(tensor):
        pieces = {part: of_one}
        if part == "gate_up_proj":
            pieces = dict(zip(("gate_proj", "up_proj"), of_one.chunk(2)))
        for piece, rows in pieces.items():
            ours[f"{block}mlp.experts.{e}.{piece}.{kind}"] = rows
    return ours


def translate_gpt2(theirs: dict, cfg) -> dict:
    """GPT-2 stores its matrices the other way round, and q, k, v as we do; it has no RoPE."""
    ours = {}
    parts = {"ln_1": "norm1", "ln_2": "norm2", "c_attn": "qkv", "c_proj": "proj", "c_fc": "fc", "ln_f": "norm_f"}
    for name, tensor in theirs.items():
        words = name.removeprefix("transformer.").split(".")
        if words[-1] == "weight" and words[-2] in ("c_attn", "c_proj", "c_fc"):
            tensor = tensor.t()
        name = ".".join(parts.get(word, word) for word in words)
        name = name.replace("wte", "token_embedding").replace("wpe", "position_embedding")
        if name != "lm_head.weight":
            ours[name.replace("h.", "blocks.", 1) if name.startswith("h.") else name] = tensor
    return ours


# ---------------------------------------------------------------- two models with the same numbers


@torch.no_grad()
def randomise(model, seed: int) -> None:
    """Random numbers everywhere: gains around 1, what else is a vector around 0, matrices that keep their input's
    size."""
    draws = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=draws, dtype=torch.float64)
        if p.dim() == 1 and name.endswith("weight"):
            p.copy_(1 + 0.3 * noise)
        elif p.dim() == 1:
            p.copy_(0.5 * noise)
        else:
            p.copy_(noise * 1.5 / p.shape[-1] ** 0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=draws, dtype=torch.float64))


def make_theirs(kind: str, settings: dict):
    """A small original with random numbers, in float64."""
    config = getattr(transformers, kind + "Config")(**settings)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    with Wide():
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
        finally:
            torch.set_default_dtype(before)
    randomise(model, seed=1)
    return model


def compare(build, name: str, theirs, translated, sizes: dict) -> float:
    """The largest distance between ours and theirs, in logits and gradients, at every length."""
    cfg = build.DetailedConfig(**{**OUR_SIZES, **build.RECIPES[name].changes, **sizes})
    ours = build.DetailedGPT(cfg, VOCABULARY).double().eval()
    state = translated(dict(theirs.state_dict()), cfg)
    if cfg.tied:
        state["lm_head.weight"] = state["token_embedding.weight"]
    ours.load_state_dict(state)
    worst = 0.0
    for length in LENGTHS:
        draws = torch.Generator().manual_seed(length)
        idx = torch.randint(VOCABULARY, (2, length), generator=draws)
        pull = torch.randn(2, length, VOCABULARY, generator=draws, dtype=torch.float64)
        ours.zero_grad()
        theirs.zero_grad()
        our_logits, _ = ours(idx)
        with Wide():
            their_logits = theirs(input_ids=idx, use_cache=False).logits
            (their_logits * pull).sum().backward()
        (our_logits * pull).sum().backward()
        assert their_logits.dtype == torch.float64
        worst = max(worst, (our_logits - their_logits).abs().max().item())
        slopes = {key: zeros_for_none(p) for key, p in theirs.named_parameters()}
        slopes = translated(slopes, cfg)
        for key, p in ours.named_parameters():
            assert p.shape == slopes[key].shape, key
            worst = max(worst, (zeros_for_none(p) - slopes[key]).abs().max().item())
        assert their_logits.std() > 0.01  # not a comparison of nothing with nothing
    return worst


def zeros_for_none(p) -> torch.Tensor:
    """The gradient of a parameter that the text may not have reached: an expert without tokens."""
    return torch.zeros_like(p) if p.grad is None else p.grad


def check(build, name: str, kind: str, settings: dict | None = None, translated=translate, **sizes) -> None:
    theirs = make_theirs(kind, {**THEIR_SIZES, **(settings or {})})
    agree(name, compare(build, name, theirs, translated, sizes))


def agree(name: str, worst: float) -> None:
    """Print how far ours is off, and fail where that is too far."""
    print(f"{name}: {worst:.1e}")
    assert worst < LIMIT


# ---------------------------------------------------------------- a test per recipe


def test_gpt2(build):
    theirs = make_theirs(
        "GPT2", {"vocab_size": VOCABULARY, "n_positions": 40, "n_embd": 45, "n_layer": 5, "n_head": 9, "n_inner": 35}
    )
    agree("gpt2", compare(build, "gpt2", theirs, translate_gpt2, {"n_kv_heads": 9, "d_head": None}))


LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8_192,
}


def test_llama3(build):
    settings = {"rope_parameters": LLAMA3_SCALING, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
    check(build, "llama3", "Llama", settings)


def test_mistral(build):
    settings = {"sliding_window": 4, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
    check(build, "mistral", "Mistral", settings, window=4)


def test_qwen2(build):
    settings = {"rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}, "tie_word_embeddings": False}
    check(build, "qwen2", "Qwen2", settings)


def test_qwen3(build):
    settings = {"rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}, "tie_word_embeddings": False}
    check(build, "qwen3", "Qwen3", settings)


def test_olmo2(build):
    settings = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }
    norms = {"post_attention_layernorm": "norm1", "post_feedforward_layernorm": "norm2"}
    check(build, "olmo2", "Olmo2", settings, partial(translate, norms=norms))


NORMS_BOTH = {
    "input_layernorm": "norm1",
    "post_attention_layernorm": "after1",
    "pre_feedforward_layernorm": "norm2",
    "post_feedforward_layernorm": "after2",
}


def test_gemma2(build):
    """In bfloat16 the original rounds √C to that, as Google's own code does: 59.87 becomes 59.75."""
    settings = {"sliding_window": 4, "query_pre_attn_scalar": 144}
    check(build, "gemma2", "Gemma2", settings, partial(translate, norms=NORMS_BOTH), window=4, score_scale=1 / 12)


def test_gemma3(build):
    bases = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
    }
    settings = {"sliding_window": 4, "rope_parameters": bases, "query_pre_attn_scalar": 10, "num_hidden_layers": 7}
    translated = partial(translate, norms=NORMS_BOTH)
    check(build, "gemma3", "Gemma3Text", settings, translated, window=4, n_layers=7)


def test_smollm3(build):
    settings = {"rope_parameters": {"rope_type": "default", "rope_theta": 5_000_000.0}}
    check(build, "smollm3", "SmolLM3", settings)


def test_granite(build):
    settings = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 5_000_000.0},
        "rms_norm_eps": 1e-5,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 1 / 64,
        "logits_scaling": 8.0,
        "tie_word_embeddings": True,
    }
    check(build, "granite", "Granite", settings)


def test_cohere(build):
    settings = {"rope_parameters": {"rope_type": "default", "rope_theta": 8_000_000.0}}
    translated = partial(translate, norms={"input_layernorm": "norm1"}, order=as_stored)
    check(build, "cohere", "Cohere", settings, translated)


EXPERTS = {"n_experts": 7, "top_k": 3}  # of two tokens, one or more experts get none


def test_mixtral(build):
    settings = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "num_local_experts": 7,
        "num_experts_per_tok": 3,
        "tie_word_embeddings": False,
    }
    check(build, "mixtral", "Mixtral", settings, **EXPERTS)


def test_qwen3_moe(build):
    settings = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "moe_intermediate_size": 19,
        "tie_word_embeddings": False,
    }
    check(build, "qwen3-moe", "Qwen3Moe", settings, d_expert=19, **EXPERTS)


def test_olmoe(build):
    """The original's norms on queries and keys take head_dim to be hidden_size / heads."""
    settings = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "hidden_size": 54,
        "head_dim": 6,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    check(build, "olmoe", "Olmoe", settings, d_model=54, d_head=None, **EXPERTS)


def translate_gpt_oss(theirs: dict, cfg) -> dict:
    """Their experts are transposed, with the rows of gate and up in turn, and their router has the name of ours."""
    usual = {}
    for name, tensor in theirs.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            tensor = tensor.mT
        if ".gate_up_proj" in name:
            tensor = torch.cat((tensor[:, 0::2], tensor[:, 1::2]), dim=1)
        usual[name] = tensor
    return translate(usual, cfg)


def test_gpt_oss(build):
    """The recipe's scaling is the original's default. Six times as large, gate and up go beyond the clamps at 7."""
    settings = {"num_local_experts": 7, "num_experts_per_tok": 3, "sliding_window": 4}
    theirs = make_theirs("GptOss", THEIR_SIZES | settings)
    for layer in theirs.model.layers:
        layer.mlp.experts.gate_up_proj.data *= 6
    agree("gpt-oss", compare(build, "gpt-oss", theirs, translate_gpt_oss, {"window": 4, **EXPERTS}))


LATENT_NAMES = {
    "q_a_proj": "q_down",
    "q_a_layernorm": "q_norm",
    "q_b_proj": "q_up",
    "kv_a_proj_with_mqa": "kv_down",
    "kv_a_layernorm": "kv_norm",
    "kv_b_proj": "kv_up",
}


def translate_deepseek(theirs: dict, cfg) -> dict:
    """Their "a" leads down to the short vector, "b" up from it."""
    usual = translate(theirs, cfg, order=as_stored)
    for name, ours in LATENT_NAMES.items():
        usual = {key.replace(f".{name}.", f".{ours}."): tensor for key, tensor in usual.items()}
    return usual


def test_deepseek_v3(build):
    """The original takes the two best of a group whatever k is; the paper says k / groups, which is 2 at its sizes."""
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 4_096,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    settings = {
        "num_key_value_heads": 9,
        "q_lora_rank": 13,
        "kv_lora_rank": 11,
        "qk_nope_head_dim": 5,
        "qk_rope_head_dim": 4,
        "v_head_dim": 7,
        "n_routed_experts": 15,
        "n_shared_experts": 2,
        "moe_intermediate_size": 19,
        "first_k_dense_replace": 2,
        "num_experts_per_tok": 3,
        "n_group": 5,
        "topk_group": 2,
        "rope_parameters": yarn,
    }
    del (usual := dict(THEIR_SIZES))["head_dim"]
    theirs = make_theirs("DeepseekV3", usual | settings)
    sizes = {"n_kv_heads": 9, "q_rank": 13, "kv_rank": 11, "d_head": 9, "d_rope": 4, "d_value": 7}
    sizes |= {"n_experts": 15, "n_shared_experts": 2, "d_expert": 19, "n_dense_layers": 2, "top_k": 3}
    sizes |= {"n_groups": 5, "top_groups": 2}
    agree("deepseek-v3", compare(build, "deepseek-v3", theirs, translate_deepseek, sizes))


def to_turned_back(rows: torch.Tensor, head_dim: int, turned: int) -> torch.Tensor:
    """nanochat turns the other way, which is the same with the two channels of each pair exchanged."""
    return to_pairs(rows, head_dim, turned).unflatten(0, (-1, 2)).flip(1).flatten(0, 1)


def translate_nanochat(theirs: dict, cfg) -> dict:
    """Their two matrices of the MLP have the names of ours in chapter 05."""
    usual = translate(theirs, cfg, order=to_turned_back)
    return {key.replace(".fc1.", ".fc.").replace(".fc2.", ".proj."): tensor for key, tensor in usual.items()}


def test_nanochat(build):
    """The original is transformers' nanochat, of the first release: later ones have more details."""
    settings = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
    check(build, "nanochat", "NanoChat", settings, translate_nanochat)
