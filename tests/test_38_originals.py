"""Chapter 38: every recipe against its original, a small model of `transformers` with random weights.

The numbers of the original come into ours by name, all of them. Then logits and gradients are the same in float64, at
lengths beyond the window. Sizes are odd and unequal, where RoPE lets them be, so that nothing can hide behind a
transposition; gains, biases, sinks and balance biases are random, too.
"""

import copy
from collections.abc import Callable
from functools import cache, partial
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from torch.overrides import TorchFunctionMode

from shared import chapters


LIMIT = 1e-10  # how far a logit or a gradient may be off, in float64
VOCABULARY = 53
LENGTHS = (1, 6, 11)  # the window below is 4
LONGEST = LENGTHS[-1]
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


@cache
def transformers() -> ModuleType:
    """Imported here and not above: it takes seconds, and to collect the tests none is needed."""
    try:
        import transformers
    except ModuleNotFoundError:
        folder = chapters.chapter_folder(38).relative_to(chapters.PROJECTS.parent).as_posix()
        pytest.fail(f"make test installs it: pip install --no-deps -r {folder}/requirements.txt", pytrace=False)
    return transformers


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
    for kind in ("weight", "bias"):
        if (numbers := theirs.pop(f"model.norm.{kind}", None)) is not None:
            ours[f"norm_f.{kind}"] = numbers
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
    config = getattr(transformers(), kind + "Config")(**settings)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    with Wide():
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            model = transformers().AutoModelForCausalLM.from_config(config).double().eval()
        finally:
            torch.set_default_dtype(before)
    randomise(model, seed=1)
    return model


class Original(NamedTuple):
    """A small original, and how it becomes ours."""

    model: torch.nn.Module
    translated: Callable  # its tensors, by name, and our config -> the same by our names
    sizes: dict  # the fields of our config that are not as in the recipe and OUR_SIZES


def original(kind: str, settings: dict, translated: Callable = translate, **sizes) -> Original:
    """An original of THEIR_SIZES but for `settings`."""
    return Original(make_theirs(kind, THEIR_SIZES | settings), translated, sizes)


def our_model(build, changes: dict, theirs: Original):
    """Our model with the numbers of an original."""
    cfg = build.DetailedConfig(**OUR_SIZES | changes)
    model = build.DetailedGPT(cfg, VOCABULARY).double().eval()
    state = theirs.translated(dict(theirs.model.state_dict()), cfg)
    if cfg.tied:
        state["lm_head.weight"] = state["token_embedding.weight"]
    model.load_state_dict(state)
    return model


def tokens(length: int) -> torch.Tensor:
    """Token ids (2, length)."""
    return torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(length))


def their_logits(theirs: Original, idx: torch.Tensor) -> torch.Tensor:
    """Logits (B, T, V) of an original."""
    with Wide():
        logits = theirs.model(input_ids=idx, use_cache=False).logits
    assert logits.dtype == torch.float64
    assert logits.std() > 0.01  # not a comparison of nothing with nothing
    return logits


def gap_of_gradients(model, theirs: Original, length: int) -> float:
    """The largest distance between our logits and theirs, or between our gradients and theirs: those of one random
    sum of the logits."""
    idx = tokens(length)
    pull = torch.randn(2, length, VOCABULARY, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    model.zero_grad()
    theirs.model.zero_grad()
    logits = model(idx)[0]
    reference = their_logits(theirs, idx)
    (logits * pull).sum().backward()
    with Wide():
        (reference * pull).sum().backward()
    slopes = theirs.translated({name: slope(p) for name, p in theirs.model.named_parameters()}, model.cfg)
    ours = {name: slope(p) for name, p in model.named_parameters()}
    assert {name: p.shape for name, p in ours.items()} == {name: p.shape for name, p in slopes.items()}
    gaps = [(ours[name] - slopes[name]).abs().max().item() for name in ours]
    return max(gaps + [(logits - reference).abs().max().item()])


def slope(p) -> torch.Tensor:
    """The gradient of a parameter; zeros where the text didn't reach it: an expert without tokens."""
    return torch.zeros_like(p) if p.grad is None else p.grad


# ---------------------------------------------------------------- the originals



def gpt2() -> Original:
    settings = {"vocab_size": VOCABULARY, "n_positions": 40, "n_embd": 45, "n_layer": 5, "n_head": 9, "n_inner": 35}
    settings |= {"bos_token_id": None, "eos_token_id": None}
    return Original(make_theirs("GPT2", settings), translate_gpt2, {"n_kv_heads": 9, "d_head": None})


LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8_192,
}


def llama3() -> Original:
    settings = {"rope_parameters": LLAMA3_SCALING, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
    return original("Llama", settings)


def mistral() -> Original:
    """The paper's text lets position i see i - W to i, which are W + 1; in its picture and in the original it sees W,
    itself included."""
    settings = {"sliding_window": 4, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
    return original("Mistral", settings, window=4)


def qwen2() -> Original:
    settings = {"rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}, "tie_word_embeddings": False}
    return original("Qwen2", settings)


def qwen3() -> Original:
    settings = {"rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}, "tie_word_embeddings": False}
    return original("Qwen3", settings)


def olmo2() -> Original:
    settings = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }
    norms = {"post_attention_layernorm": "norm1", "post_feedforward_layernorm": "norm2"}
    return original("Olmo2", settings, partial(translate, norms=norms))


NORMS_BOTH = {
    "input_layernorm": "norm1",
    "post_attention_layernorm": "after1",
    "pre_feedforward_layernorm": "norm2",
    "post_feedforward_layernorm": "after2",
}


def gemma2() -> Original:
    """In bfloat16 the original rounds √C to that, as Google's own code does: 59.87 becomes 59.75."""
    settings = {"sliding_window": 4, "query_pre_attn_scalar": 144}
    return original("Gemma2", settings, partial(translate, norms=NORMS_BOTH), window=4, score_scale=1 / 12)


def gemma3() -> Original:
    bases = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
    }
    settings = {"sliding_window": 4, "rope_parameters": bases, "query_pre_attn_scalar": 10, "num_hidden_layers": 7}
    translated = partial(translate, norms=NORMS_BOTH)
    return original("Gemma3Text", settings, translated, window=4, n_layers=7)


def smollm3() -> Original:
    settings = {"rope_parameters": {"rope_type": "default", "rope_theta": 5_000_000.0}}
    return original("SmolLM3", settings)


def granite() -> Original:
    settings = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 5_000_000.0},
        "rms_norm_eps": 1e-5,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 1 / 64,
        "logits_scaling": 8.0,
        "tie_word_embeddings": True,
    }
    return original("Granite", settings)


def cohere() -> Original:
    settings = {"rope_parameters": {"rope_type": "default", "rope_theta": 8_000_000.0}}
    translated = partial(translate, norms={"input_layernorm": "norm1"}, order=as_stored)
    return original("Cohere", settings, translated)


EXPERTS = {"n_experts": 7, "top_k": 3}  # of two tokens, one or more experts get none


def mixtral() -> Original:
    """The original's router multiplies in the dtype of the model, ours in float32: in bfloat16 they may choose
    differently. So it is with the other originals that have experts, DeepSeek-V3 excepted."""
    settings = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "num_local_experts": 7,
        "num_experts_per_tok": 3,
        "tie_word_embeddings": False,
    }
    return original("Mixtral", settings, **EXPERTS)


def qwen3_moe() -> Original:
    settings = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "moe_intermediate_size": 19,
        "tie_word_embeddings": False,
    }
    return original("Qwen3Moe", settings, d_expert=19, **EXPERTS)


def olmoe() -> Original:
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
    return original("Olmoe", settings, d_model=54, d_head=None, **EXPERTS)


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


def gpt_oss() -> Original:
    """The original takes the softmax of the k largest logits; ours divides by their sum, which is the same.

    The recipe's scaling is the original's default. Six times as large, gate and up go beyond the clamps at 7."""
    settings = {"num_local_experts": 7, "num_experts_per_tok": 3, "sliding_window": 4}
    theirs = make_theirs("GptOss", THEIR_SIZES | settings)
    for layer in theirs.model.layers:
        layer.mlp.experts.gate_up_proj.data *= 6
    return Original(theirs, translate_gpt_oss, {"window": 4, **EXPERTS})


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


def deepseek_v3() -> Original:
    """The original takes the two best of a group whatever k is; the paper says k / groups, which is 2 at its sizes.

    The paper's equations have neither the norms on the two short vectors, which its text names, nor the factor 2.5 of
    the gates. The original adds 1e-20 to the sum that it divides gates by; ours doesn't."""
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
    return Original(theirs, translate_deepseek, sizes)


def to_turned_back(rows: torch.Tensor, head_dim: int, turned: int) -> torch.Tensor:
    """nanochat turns the other way, which is the same with the two channels of each pair exchanged."""
    return to_pairs(rows, head_dim, turned).unflatten(0, (-1, 2)).flip(1).flatten(0, 1)


def translate_nanochat(theirs: dict, cfg) -> dict:
    """Their two matrices of the MLP have the names of ours in chapter 05."""
    usual = translate(theirs, cfg, order=to_turned_back)
    return {key.replace(".fc1.", ".fc.").replace(".fc2.", ".proj."): tensor for key, tensor in usual.items()}


def nanochat() -> Original:
    """The original is transformers' nanochat, of the first release: later ones have more details.

    The eps of its author's norms is torch's own, which depends on the dtype; in transformers it is 1e-6."""
    settings = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
    return original("NanoChat", settings, translate_nanochat)


ORIGINALS = {
    "gpt2": gpt2,
    "llama3": llama3,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "olmo2": olmo2,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "smollm3": smollm3,
    "granite": granite,
    "cohere": cohere,
    "mixtral": mixtral,
    "qwen3-moe": qwen3_moe,
    "olmoe": olmoe,
    "gpt-oss": gpt_oss,
    "deepseek-v3": deepseek_v3,
    "nanochat": nanochat,
}


@cache
def made(name: str) -> Original:
    """An original, made once."""
    return ORIGINALS[name]()


# ---------------------------------------------------------------- the tests


@pytest.mark.parametrize("name", ORIGINALS)
def test_a_recipe_gives_the_logits_and_gradients_of_its_original(build, name):
    theirs = made(name)
    model = our_model(build, build.RECIPES[name].changes | theirs.sizes, theirs)
    gaps = [gap_of_gradients(model, theirs, length) for length in LENGTHS]
    print(f"{name}: {max(gaps):.1e}")
    assert max(gaps) < LIMIT


def test_every_recipe_has_an_original(build):
    assert list(ORIGINALS) == list(build.RECIPES)


@cache
def longest_logits(name: str) -> torch.Tensor:
    """Those of an original for the longest text."""
    with torch.no_grad():
        return their_logits(made(name), tokens(LONGEST))


def changed_fields() -> list[tuple[str, str]]:
    """Each recipe with each field that it changes."""
    recipes = chapters.load_build(38).RECIPES
    return [(name, field) for name, recipe in recipes.items() for field in recipe.changes]


@pytest.mark.parametrize("name, field", changed_fields())
def test_without_any_one_of_its_details_a_recipe_is_another_model(build, name, field):
    """So no detail of a recipe is there in name alone, and the comparison above sees each."""
    theirs = made(name)
    default = build.DetailedConfig.__dataclass_fields__[field].default
    changes = build.RECIPES[name].changes | theirs.sizes | {field: default}
    try:
        model = our_model(build, changes, theirs)
    except (RuntimeError, ValueError, KeyError):
        return  # the numbers don't fit, or there is no such model
    with torch.no_grad():
        gap = (model(tokens(LONGEST))[0] - longest_logits(name)).abs().max().item()
    assert gap > 1000 * LIMIT


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "olmoe", "gpt-oss", "deepseek-v3"])
def test_experts_that_tie_give_the_same_logits(build, name):
    """Ours takes the lowest numbers; torch.topk, theirs, promises no order. So experts that tie are alike here."""
    original = copy.deepcopy(made(name))
    with torch.no_grad():
        for key, p in [*original.model.named_parameters(), *original.model.named_buffers()]:
            if ".experts." in key or ".gate." in key or ".router." in key:
                p[1::2] = p[1]  # all experts of odd numbers
    model = our_model(build, build.RECIPES[name].changes | original.sizes, original)
    with torch.no_grad():
        gap = (model(tokens(LONGEST))[0] - their_logits(original, tokens(LONGEST))).abs().max()
    assert gap < LIMIT


def test_part_of_a_head_can_be_turned(build):
    """No recipe turns a part of each head alone; StableLM 2 does: the first quarter, and here four channels of ten."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.4}
    settings = {"rope_parameters": rope, "partial_rotary_factor": 0.4, "use_qkv_bias": True, "hidden_size": 90}
    theirs = original("StableLm", settings)
    changes = {"norm_type": "layernorm", "qkv_bias": True, "tied": False, "rotated": 0.4, "d_model": 90}
    model = our_model(build, changes, theirs)
    assert gap_of_gradients(model, theirs, LONGEST) < LIMIT


# ---------------------------------------------------------------- RoPE for longer texts

SCALINGS = [
    ("RopeScaling", {"factor": 8.0}, "linear", {}),
    ("NTKScaling", {"factor": 5.0}, "dynamic", {"factor": 2.0}),  # 2 · 120 / 40 - 1 = 5
    ("Llama3Scaling", {"factor": 8.0, "trained": 8_192}, "llama3", {}),
    ("Llama3Scaling", {"factor": 32.0, "trained": 100, "low": 2.0, "high": 7.0}, "llama3", {}),
    ("YaRNScaling", {"factor": 4.0, "trained": 32_768}, "yarn", {}),
    ("YaRNScaling", {"factor": 32.0, "trained": 4_096, "whole": False}, "yarn", {"truncate": False}),
    ("YaRNScaling", {"factor": 3.0, "trained": 200, "fast": 20.0, "slow": 2.0}, "yarn", {}),
    ("YaRNScaling", {"factor": 3.0, "trained": 7}, "yarn", {}),  # both ends before the first pair
]
THEIR_FIELDS = {
    "trained": "original_max_position_embeddings",
    "low": "low_freq_factor",
    "high": "high_freq_factor",
    "fast": "beta_fast",
    "slow": "beta_slow",
}


@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
@pytest.mark.parametrize("width", [6, 10, 64, 128])
@pytest.mark.parametrize("kind, ours, their_kind, theirs", SCALINGS)
def test_scaled_speeds_are_those_of_transformers(build, kind, ours, their_kind, theirs, width, base):
    scaling = getattr(build, kind)(**ours)
    rope = {"rope_type": their_kind, "rope_theta": base, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {THEIR_FIELDS.get(name, name): value for name, value in ours.items() if name != "whole"} | theirs
    config = transformers().LlamaConfig(hidden_size=width * 3, num_attention_heads=3, max_position_embeddings=40)
    config.rope_parameters = rope
    with Wide():
        speeds, length = transformers().modeling_rope_utils.ROPE_INIT_FUNCTIONS[their_kind](config, seq_len=120)
    torch.testing.assert_close(scaling.speeds(base, width), speeds, rtol=1e-13, atol=0)
    assert scaling.length == pytest.approx(length, rel=1e-14)
