"""Chapter 38: a GGUF file of each architecture gives the logits of its original; others are refused by name.

The files are written here, by gguf, from the small originals of test_38_originals.py: with gguf's own table of names,
and with what llama.cpp's converter does to the numbers (it sorts the rows of q and k for Llama and what came from it,
adds 1 to Gemma's gains, cuts DeepSeek's kv_b in two, stacks the experts). Nothing here knows how they are read.
"""

import copy
import io
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
import pytest
import torch

from shared import chapters
from shared.console import UserError

sys.path.insert(0, str(Path(__file__).parent))

from small_weights import SmallFile  # noqa: E402

originals = pytest.importorskip("test_38_originals")

LIMIT = 1e-6  # how far a logit may be off in float64: an eps and a multiplier stand in the file as float32
LENGTH = 17  # the windows are 3
FOLDER = chapters.chapter_folder(38)


@pytest.fixture(scope="module")
def weights():
    """Chapter 38's weights.py."""
    return chapters.load_file(FOLDER / "weights.py")


# ---------------------------------------------------------------- as the converter writes it


def sorted_for_llama(rows: torch.Tensor, config) -> torch.Tensor:
    """Rows of heads in halves -> channel i and i + D/2 side by side."""
    D = config.head_dim
    order = [i for pair in range(D // 2) for i in (pair, pair + D // 2)]
    heads = rows.reshape(-1, D, *rows.shape[1:])
    return heads[:, order].reshape(rows.shape)


def llama_rows(name: str, tensor: torch.Tensor, config) -> list:
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        tensor = sorted_for_llama(tensor, config)
    return stacked(name, tensor, config)


def stacked(name: str, tensor: torch.Tensor, config) -> list:
    """Tensors of all experts: gate and up apart."""
    if name.endswith("mlp.experts.gate_up_proj"):
        gate, up = tensor.chunk(2, dim=1)
        stem = name.removesuffix("gate_up_proj")
        return [(stem + "gate_proj.weight", gate), (stem + "up_proj.weight", up)]
    if name.endswith("mlp.experts.down_proj"):
        return [(name + ".weight", tensor)]
    return [(name, tensor)]


def gemma_gains(name: str, tensor: torch.Tensor, config) -> list:
    return [(name, tensor + 1 if name.endswith("norm.weight") else tensor)]


def gpt_oss_experts(name: str, tensor: torch.Tensor, config) -> list:
    """The rows of gate and up stand in turn, and matrices lie on their side."""
    if name.endswith("sinks"):
        name += ".weight"
    if ".experts." not in name:
        return [(name, tensor)]
    bias = name.endswith("_bias")
    kind = ".bias" if bias else ".weight"
    name = name.removesuffix("_bias")
    if not bias:
        tensor = tensor.transpose(-1, -2)
    if name.endswith("down_proj"):
        return [(name + kind, tensor)]
    stem = name.removesuffix("gate_up_proj")
    return [(stem + "gate_proj" + kind, tensor[:, ::2]), (stem + "up_proj" + kind, tensor[:, 1::2])]


def latent(name: str, tensor: torch.Tensor, config) -> list:
    if name.endswith("kv_b_proj.weight"):
        sizes = [config.qk_nope_head_dim, config.v_head_dim]
        k, v = tensor.view(config.num_attention_heads, sum(sizes), -1).split(sizes, dim=1)
        stem = name.removesuffix("kv_b_proj.weight")
        return [(stem + "k_b_proj.weight", k.transpose(1, 2)), (stem + "v_b_proj.weight", v)]
    return stacked(name.replace("e_score_correction_bias", "e_score_correction.bias"), tensor, config)


def on_its_side(name: str, tensor: torch.Tensor, config) -> list:
    turned = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
    return [(name, tensor.t() if turned else tensor)]


# ---------------------------------------------------------------- fields


def sizes(w: gguf.GGUFWriter, config) -> None:
    """What the converter says of every model."""
    w.add_block_count(config.num_hidden_layers)
    w.add_context_length(config.max_position_embeddings)
    w.add_embedding_length(config.hidden_size)
    w.add_feed_forward_length(config.intermediate_size)
    w.add_head_count(config.num_attention_heads)
    w.add_head_count_kv(config.num_key_value_heads)
    w.add_key_length(config.head_dim)
    w.add_value_length(config.head_dim)
    w.add_vocab_size(config.vocab_size)
    if hasattr(config, "rms_norm_eps"):
        w.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        w.add_layer_norm_eps(config.layer_norm_eps)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    w.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        w.add_rope_scaling_type(gguf.RopeScalingType[rope["rope_type"].upper()])
        w.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        w.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def llama_fields(w, config) -> None:
    w.add_rope_dimension_count(config.head_dim)


def mixtral_fields(w, config) -> None:
    llama_fields(w, config)
    expert_fields(w, config)


def expert_fields(w, config) -> None:
    w.add_expert_count(config.num_local_experts)
    w.add_expert_used_count(config.num_experts_per_tok)


def qwen_moe_fields(w, config) -> None:
    expert_fields(w, config)
    w.add_expert_feed_forward_length(config.moe_intermediate_size)


def gemma2_fields(w, config) -> None:
    w.add_sliding_window(config.sliding_window)
    w.add_attn_logit_softcapping(config.attn_logit_softcapping)
    w.add_final_logit_softcapping(config.final_logit_softcapping)


def gemma3_fields(w, config) -> None:
    w.add_sliding_window(config.sliding_window)
    w.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])


def granite_fields(w, config) -> None:
    llama_fields(w, config)
    w.add_attention_scale(config.attention_multiplier)
    w.add_embedding_scale(config.embedding_multiplier)
    w.add_residual_scale(config.residual_multiplier)
    w.add_logit_scale(config.logits_scaling)


def cohere_fields(w, config) -> None:
    w.add_logit_scale(config.logit_scale)
    w.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def gpt_oss_fields(w, config) -> None:
    expert_fields(w, config)
    w.add_sliding_window(config.sliding_window)
    w.add_expert_feed_forward_length(config.intermediate_size)


def deepseek_sizes(w, config) -> None:
    short = copy.deepcopy(config)
    short.num_key_value_heads = 1
    short.head_dim = config.kv_lora_rank + config.qk_rope_head_dim
    sizes(w, short)
    w.kv_data[0]["deepseek2.attention.value_length"].value = config.kv_lora_rank
    w.add_q_lora_rank(config.q_lora_rank)
    w.add_kv_lora_rank(config.kv_lora_rank)
    w.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    w.add_value_length_mla(config.v_head_dim)
    w.add_leading_dense_block_count(config.first_k_dense_replace)
    w.add_expert_feed_forward_length(config.moe_intermediate_size)
    w.add_expert_count(config.n_routed_experts)
    w.add_expert_used_count(config.num_experts_per_tok)
    w.add_expert_shared_count(config.n_shared_experts)
    w.add_expert_weights_scale(config.routed_scaling_factor)
    w.add_expert_weights_norm(config.norm_topk_prob)
    w.add_expert_group_count(config.n_group)
    w.add_expert_group_used_count(config.topk_group)
    w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    w.add_rope_dimension_count(config.qk_rope_head_dim)
    w.add_rope_scaling_yarn_log_mul(0.1 * config.rope_parameters["mscale_all_dim"])


def gpt2_sizes(w, config) -> None:
    w.add_block_count(config.n_layer)
    w.add_context_length(config.n_positions)
    w.add_embedding_length(config.n_embd)
    w.add_feed_forward_length(config.n_inner)
    w.add_head_count(config.n_head)
    w.add_layer_norm_eps(config.layer_norm_epsilon)


# ---------------------------------------------------------------- files


class Written(NamedTuple):
    """How the original of a recipe becomes a file."""

    architecture: str  # gguf's name for it
    numbers: Callable  # a tensor's name and numbers -> what stands in the file
    more: Callable | None = None  # fields beyond `sizes`
    sizes: Callable = sizes


FILES = {
    "gpt2": Written("GPT2", on_its_side, sizes=gpt2_sizes),
    "llama3": Written("LLAMA", llama_rows, llama_fields),
    "qwen2": Written("QWEN2", stacked),
    "qwen3": Written("QWEN3", stacked),
    "olmo2": Written("OLMO2", stacked),
    "gemma2": Written("GEMMA2", gemma_gains, gemma2_fields),
    "gemma3": Written("GEMMA3", gemma_gains, gemma3_fields),
    "smollm3": Written("SMOLLM3", llama_rows, llama_fields),
    "granite": Written("GRANITE", llama_rows, granite_fields),
    "cohere": Written("COMMAND_R", stacked, cohere_fields),
    "mixtral": Written("LLAMA", llama_rows, mixtral_fields),
    "qwen3-moe": Written("QWEN3MOE", stacked, qwen_moe_fields),
    "olmoe": Written("OLMOE", stacked, expert_fields),
    "gpt-oss": Written("GPT_OSS", gpt_oss_experts, gpt_oss_fields),
    "deepseek-v3": Written("DEEPSEEK2", latent, sizes=deepseek_sizes),
}
MERGED = ["ab", "abc"]
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUĠ"
WORDS = {
    "model": "gpt2",
    "pre": "llama-bpe",
    "tokens": ["<|im_start|>", "<|im_end|>", "<think>", *LETTERS, *MERGED],
    "token_type": [3, 3, 4] + [1] * (len(LETTERS) + len(MERGED)),
    "merges": ["a b", "ab c"],
    "eos_token_id": 1,
}


def yarn(base: float, **more) -> dict:
    """YaRN of few positions, so that of five pairs some keep their speed and some don't."""
    usual = {"rope_type": "yarn", "rope_theta": base, "factor": 8.0, "original_max_position_embeddings": 12}
    return {"rope_parameters": usual | more}


GEMMA3_BASES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 3_000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 400_000.0, "factor": 2.5},
}
LATENT_SIZES = {"num_key_value_heads": 9, "q_lora_rank": 13, "kv_lora_rank": 11, "qk_nope_head_dim": 5}
LATENT_SIZES |= {"qk_rope_head_dim": 4, "v_head_dim": 7, "n_routed_experts": 15, "n_shared_experts": 2, "n_group": 5}
LATENT_SIZES |= {"moe_intermediate_size": 19, "first_k_dense_replace": 2, "num_experts_per_tok": 3, "topk_group": 2}
SEVEN = {"num_local_experts": 7, "num_experts_per_tok": 3}
# Other numbers than the recipe's, wherever a file says them: so it is seen that they are read.
OTHERS = {
    "gemma2": (
        "Gemma2",
        {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0, "query_pre_attn_scalar": 10, "sliding_window": 3},
    ),
    "gemma3": ("Gemma3Text", {"rope_parameters": GEMMA3_BASES, "query_pre_attn_scalar": 10, "sliding_window": 3}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 7.0,
            "residual_multiplier": 0.375,
            "attention_multiplier": 0.125,
            "logits_scaling": 0.75,
            "rms_norm_eps": 2e-3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 700.0},
            "tie_word_embeddings": True,
        },
    ),
    "cohere": ("Cohere", {"logit_scale": 0.75, "layer_norm_eps": 2e-3}),
    "gpt-oss": ("GptOss", SEVEN | {"sliding_window": 3} | yarn(5_000.0, truncate=False)),
    "deepseek-v3": (
        "DeepseekV3",
        LATENT_SIZES
        | {"routed_scaling_factor": 1.75, "norm_topk_prob": False}
        | yarn(5_000.0, mscale=0.75, mscale_all_dim=0.75),
    ),
}


def other(recipe: str) -> originals.Original:
    """An original whose numbers are not the recipe's, if a file says them."""
    if recipe not in OTHERS:
        return originals.made(recipe)
    kind, settings = OTHERS[recipe]
    usual = dict(originals.THEIR_SIZES)
    if recipe == "deepseek-v3":
        del usual["head_dim"]
    if recipe == "gemma3":
        usual["num_hidden_layers"] = 7  # a layer after the first full one
    return originals.Original(originals.make_theirs(kind, usual | settings), None, {})


class FileOf:
    """A recipe's original as a GGUF file; its parts can be changed before write()."""

    def __init__(self, recipe: str, made=None):
        made = made or other(recipe)
        self.model = copy.deepcopy(made.model)
        self.original = made._replace(model=self.model)
        for name, numbers in self.model.state_dict().items():
            gain = int(name.endswith("norm.weight") and recipe in ("gemma2", "gemma3"))
            numbers.copy_((numbers + gain).float() - gain)  # what the file can hold
        self.written = FILES[recipe]
        self.name = gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[self.written.architecture]]
        self.words = dict(WORDS)
        self.fields = {}  # more than the converter writes, by their whole names; None takes one away
        self.tensors = self.converted()

    def converted(self) -> dict[str, np.ndarray]:
        """The original's tensors by gguf's names, as the converter changes them."""
        config = self.model.config
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[self.written.architecture], config.num_hidden_layers)
        tensors = {}
        for name, tensor in self.model.state_dict().items():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            for theirs, numbers in self.written.numbers(name, tensor, config):
                known = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
                tensors[known] = numbers.to(torch.float32).contiguous().numpy()
        rope = getattr(config, "rope_parameters", None) or {}
        if rope.get("rope_type") == "llama3":
            tensors["rope_freqs.weight"] = llama3_factors(rope, config.head_dim)
        return tensors

    def write(self, path: Path) -> Path:
        w = gguf.GGUFWriter(path, self.name)
        self.written.sizes(w, self.model.config)
        if self.written.more:
            self.written.more(w, self.model.config)
        for name, value in self.fields.items():
            w.kv_data[0].pop(name, None)
            kinds = {int: w.add_uint32, float: w.add_float32, str: w.add_string, bool: w.add_bool, list: w.add_array}
            if value is not None:
                kinds[type(value)](name, value)
        for name, value in self.words.items():
            if isinstance(value, list):
                w.add_array(f"tokenizer.ggml.{name}", value)
            else:
                {int: w.add_uint32, str: w.add_string, bool: w.add_bool}[type(value)](f"tokenizer.ggml.{name}", value)
        for name, numbers in self.tensors.items():
            w.add_tensor(name, numbers)
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.write_tensors_to_file()
        w.close()
        return path


@cache
def converted(recipe: str) -> FileOf:
    return FileOf(recipe)


def file_of(recipe: str) -> FileOf:
    """A FileOf that may be changed: the original is converted once, and its arrays are shared."""
    file = copy.copy(converted(recipe))
    file.words = dict(file.words)
    file.fields = {}
    file.tensors = dict(file.tensors)
    return file


def llama3_factors(rope: dict, head_dim: int) -> np.ndarray:
    """How many times slower each pair turns."""
    factors = []
    for i in range(head_dim // 2):
        turns = rope["original_max_position_embeddings"] * rope["rope_theta"] ** (-2 * i / head_dim) / (2 * np.pi)
        low = rope["low_freq_factor"]
        high = rope["high_freq_factor"]
        if turns > high:
            factors.append(1)
        elif turns < low:
            factors.append(rope["factor"])
        else:
            share = (turns - low) / (high - low)
            factors.append(1 / ((1 - share) / rope["factor"] + share))
    return np.array(factors, np.float32)


def opened(path: Path):
    """A file's model, by chapter 37's way in."""
    build = chapters.load_build(37)
    return build.open_model(build.WeightsFile(path), 8_192)[1]


# ---------------------------------------------------------------- logits


def mistral3() -> FileOf:
    """A small model of Llama's kind by another name: files of Mistral have it since its third generation of models."""
    file = file_of("llama3")
    file.written = file.written._replace(architecture="MISTRAL3")
    file.name = "mistral3"
    return file


@pytest.mark.parametrize("recipe", [*FILES, "mistral3"])
@torch.no_grad()
def test_a_file_gives_the_logits_of_its_original_at_once_and_in_pieces(recipe, tmp_path):
    file = mistral3() if recipe == "mistral3" else file_of(recipe)
    model = opened(file.write(tmp_path / "small.gguf")).double()
    idx = originals.tokens(LENGTH)
    theirs = originals.their_logits(file.original, idx)
    gap = (model(idx)[0] - theirs).abs().max().item()
    print(f"{recipe}: {gap:.1e}")
    assert gap < LIMIT
    assert model.cfg.block_size == 40
    with chapters.load_build(37).remembering(model, LENGTH):
        pieces = [model(piece)[0] for piece in idx[:1].split([3, 1, 6, 1, 6], dim=1)]
        kept = [block.attn.kept[0].shape[-2] for block in model.blocks]
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(idx[:1])[0], rtol=0, atol=1e-10)
    windows = [block.attn.cfg.window for block in model.blocks]
    assert kept == [LENGTH - 1 if window is None else window - 1 for window in windows]


YARN = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 12,  # so pairs of all kinds are among five
    "beta_fast": 2.0,
    "beta_slow": 0.25,
    "attention_factor": 1.375,
}


@torch.no_grad()
def test_yarn_takes_its_five_numbers_from_the_file(tmp_path):
    settings = {"rope_parameters": YARN, "tie_word_embeddings": False}
    file = FileOf("qwen2", originals.original("Qwen2", settings))
    for name in ("beta_fast", "beta_slow"):
        file.fields[f"qwen2.rope.scaling.yarn_{name}"] = YARN[name]
    file.fields["qwen2.rope.scaling.yarn_attn_factor"] = YARN["attention_factor"]
    model = opened(file.write(tmp_path / "small.gguf")).double()
    idx = originals.tokens(LENGTH)
    assert (model(idx)[0] - originals.their_logits(file.original, idx)).abs().max() < LIMIT


@pytest.mark.parametrize("recipe", ["gpt2", "gemma2"])
@torch.no_grad()
def test_a_long_text_is_read_in_pieces(recipe, tmp_path, weights, monkeypatch):
    model = opened(file_of(recipe).write(tmp_path / "small.gguf")).double()
    idx = originals.tokens(LENGTH)
    whole = model.states(idx)
    monkeypatch.setattr(weights, "SCORES", 5 * 9 * (LENGTH + 1))
    longest = []
    mix = weights.build.GroupedAttention.mix

    def watched(attn, q, k, v):
        longest.append(q.shape[2])
        return mix(attn, q, k, v)

    monkeypatch.setattr(weights.build.GroupedAttention, "mix", watched)
    torch.testing.assert_close(model.states(idx), whole, rtol=0, atol=1e-10)
    assert max(longest) == 5 and not hasattr(model.blocks[0].attn, "length")
    monkeypatch.setattr(weights, "SCORES", 1)
    torch.testing.assert_close(model.states(idx), whole, rtol=0, atol=1e-10)
    assert model.states(idx[:, :0]).shape == (2, 0, 45)


def test_layers_that_turn_alike_share_their_tables(weights):
    """A small file with wide heads would fill the memory: so many bytes for each of its layers."""
    kinds = ("window", "full", "window", "window")
    cfg = weights.build.DetailedConfig(
        **originals.OUR_SIZES | {"n_layers": 4, "layer_kinds": kinds, "window": 3, "window_rope_base": 50.0}
    )
    model = weights.FileGPT(cfg, originals.VOCABULARY).eval()
    build = chapters.load_build(37)
    model.states(originals.tokens(LENGTH))
    with build.remembering(model, LENGTH):
        model.states(originals.tokens(LENGTH)[:1])
    assert [block.attn.cos is not None for block in model.blocks] == [True, True, False, False]


@pytest.mark.parametrize("recipe", ["gpt2", "qwen3"])
@torch.no_grad()
def test_no_position_beyond_the_last_one_is_read(recipe, tmp_path):
    """GPT-2's table would give none, or one for several tokens, without a word."""
    model = opened(file_of(recipe).write(tmp_path / "small.gguf"))
    text = torch.zeros(1, 41, dtype=torch.long)
    assert model.states(text[:, :40]).shape[1] == 40
    with pytest.raises(ValueError, match="41 positions don't fit"):
        model.states(text)
    for first, then in ((40, 1), (39, 2)):
        with chapters.load_build(37).remembering(model, 40):
            model.states(text[:, :first])
            with pytest.raises(ValueError, match="41 positions don't fit"):
                model.states(text[:, :then])


def test_the_score_scale_of_gemmas_largest_is_known_by_its_layers(weights):
    sizes = {"d_model": 4_608, "n_heads": 32}  # Gemma 2 27B: its config says query_pre_attn_scalar 144
    assert weights.architectures.gemma_scale(sizes | {"n_layers": 46}) == {"score_scale": 1 / 12}
    assert weights.architectures.gemma_scale(sizes | {"n_layers": 42}) == {}


def test_numbers_of_four_bits_with_a_power_of_two_are_unpacked(tmp_path):
    """gpt-oss's experts are packed as MXFP4: here one block, worked by hand."""
    build = chapters.load_build(37)
    file = build.WeightsFile(file_of("qwen3").write(tmp_path / "small.gguf"))
    name = "blk.0.attn_q.weight"
    packing = gguf.GGMLQuantizationType.MXFP4
    low_and_high = [0x10 * ((i + 8) % 16) + i for i in range(16)]  # number i: i; number i + 16: i + 8, modulo 16
    file.raw = np.array([128, *low_and_high], np.uint8)  # 128: times 2
    file.tensors[name] = build.StoredTensor((1, 32), packing, 0, 17)
    positive = [0, 1, 2, 3, 4, 6, 8, 12]
    negative = [-value for value in positive]
    assert file.read(name).tolist() == [positive + negative + negative + positive]


# ---------------------------------------------------------------- what is refused


def field(name, value):
    return lambda file: file.fields.update({f"{file.name}.{name}": value})


def remove(name):
    return lambda file: file.tensors.pop(name)


def tensor(name, *shape):
    return lambda file: file.tensors.update({name: np.ones(shape, np.float32)})


def named(value):
    return lambda file: file.fields.update({"general.architecture": value})


REFUSED = {
    "another architecture": ("qwen3", named("mamba"), "its architecture is mamba, and we know llama, mistral3, qwen2,"),
    "no architecture": ("qwen3", named(None), "its architecture is None, and we know llama"),
    "a number for one": ("qwen3", named(7), "its architecture is 7, and we know llama"),
    "a field that we don't know": (
        "qwen3",
        field("attention.temperature_scale", 0.5),
        "its metadata holds qwen3.attention.temperature_scale, which our qwen3 doesn't know",
    ),
    "a number for a name": ("qwen3", lambda file: file.fields.update({"general.name": 3}), "its general.name is 3, and must"),
    "a text for a number": (
        "gemma2",
        field("attention.sliding_window", "4"),
        "its gemma2.attention.sliding_window is 4, and must be a whole number from 1 to",
    ),
    "a number for each layer": (
        "smollm3",
        field("attention.head_count_kv", [3, 3, 3, 3, 3]),
        "its smollm3.attention.head_count_kv is a list, and must be a whole number",
    ),
    "no number": ("granite", field("residual_scale", float("nan")), "its granite.residual_scale is nan, and must be"),
    "a field too few": ("granite", field("attention.scale", None), "its metadata lacks granite.attention.scale"),
    "no window": ("gpt-oss", field("attention.sliding_window", None), "lacks gpt-oss.attention.sliding_window"),
    "no RoPE": ("granite", field("rope.scaling.finetuned", False), "finetuned is False; our model can only have True"),
    "a part of a head turned": ("qwen3", field("rope.dimension_count", 8), "dimension_count is 8; our model can only"),
    "an odd head": ("qwen3", field("attention.key_length", 9), "RoPE can't turn 9 of 9 channels in pairs"),
    "values of another width": ("olmo2", field("attention.value_length", 8), "value_length is 8; our model can only"),
    "another vocabulary": ("qwen2", field("vocab_size", 54), "its qwen2.vocab_size is 54; our model can only have 53"),
    "layers too many": ("cohere", field("block_count", 6), "block_count is 6, and it has tensors of 5 blocks"),
    "layers without end": ("cohere", field("block_count", 2**32 - 1), "block_count is 4294967295, and must be"),
    "a window in llama": ("llama3", field("attention.sliding_window", 4), "sliding_window is 4; our model can only have 0"),
    "heads that don't divide": ("qwen2", field("attention.head_count_kv", 4), "n_heads 9 is not divisible by n_kv_heads"),
    "a scaling that we don't know": (
        "qwen3",
        field("rope.scaling.type", "longrope"),
        "its qwen3.rope.scaling.type is longrope; we know none, linear and yarn",
    ),
    "a scaling without a factor": ("qwen3", field("rope.scaling.type", "linear"), "lacks qwen3.rope.scaling.factor"),
    "YaRN without a length": (
        "gpt-oss",
        field("rope.scaling.original_context_length", None),
        "lacks gpt-oss.rope.scaling.original_context_length",
    ),
    "YaRN of another kind": ("gpt-oss", field("rope.scaling.yarn_ext_factor", 0.5), "yarn_ext_factor is 0.5; our model"),
    "YaRN without speeds": ("gpt-oss", field("rope.freq_base", 1.0), "gpt-oss.rope.freq_base is 1: all pairs turn alike"),
    "two scalings": ("llama3", field("rope.scaling.factor", 2.0), "its RoPE is scaled twice: linear, and by the tensor"),
    "no such pairs": ("llama3", tensor("rope_freqs.weight", 4), "its tensor rope_freqs.weight has shape (4,)"),
    "more experts used than there are": ("mixtral", field("expert_used_count", 8), "used_count is 8, and it has 7 experts"),
    "an expert too many": ("olmoe", field("expert_count", 8), "ffn_gate_inp.weight has shape (7, 54), and in our model (8"),
    "experts without end": ("mixtral", field("expert_count", 2**31), "expert_count is 2147483648, and must be"),
    "groups that don't divide": ("deepseek-v3", field("expert_group_count", 4), "15 experts don't make 4 equal groups"),
    "a softmax for a sigmoid": ("deepseek-v3", field("expert_gating_func", 1), "gating_func is 1; our model can only"),
    "another short vector": ("deepseek-v3", field("attention.kv_lora_rank", 10), "value_length is 11; our model can only"),
    "no content": ("deepseek-v3", field("attention.key_length_mla", 4), "it turns 4 of the 4 channels of a head"),
    "no sink": ("gpt-oss", remove("blk.3.attn_sinks.weight"), "it lacks the tensor blk.3.attn_sinks.weight"),
    "no norm": ("gemma3", remove("blk.2.post_ffw_norm.weight"), "it lacks the tensor blk.2.post_ffw_norm.weight"),
    "no embedding": ("qwen3", remove("token_embd.weight"), "it lacks the tensor token_embd.weight"),
    "another shape": (
        "qwen3-moe",
        tensor("blk.1.ffn_down_exps.weight", 7, 19, 45),
        "its tensor blk.1.ffn_down_exps.weight has shape (7, 19, 45), and in our model (7, 45, 19)",
    ),
    "a tensor too many": ("qwen3", tensor("blk.0.attn_q.bias", 90), "no place for its tensor blk.0.attn_q.bias"),
    "norms of heads in Command R": ("cohere", tensor("blk.0.attn_q_norm.weight", 9, 10), "no place for its tensor blk.0"),
}


@pytest.mark.parametrize(("recipe", "change", "says"), REFUSED.values(), ids=REFUSED)
def test_what_we_can_not_do_is_refused_by_name_before_a_number_is_read(recipe, change, says, tmp_path, monkeypatch):
    file = file_of(recipe)
    change(file)
    path = file.write(tmp_path / "small.gguf")
    monkeypatch.setattr(chapters.load_build(37).WeightsFile, "read", None)
    with pytest.raises(UserError) as error:
        opened(path)
    said = str(error.value)
    assert said.startswith(f"{path} can't be used: ") and says in said and "\n" not in said


@pytest.mark.parametrize(
    ("recipe", "name", "value", "says"),
    [
        ("llama3", "rope_freqs.weight", 0, "its tensor rope_freqs.weight holds a factor that can't be"),
        ("llama3", "rope_freqs.weight", np.nan, "its tensor rope_freqs.weight holds a factor that can't be"),
        ("gpt-oss", "blk.1.ffn_up_exps.bias", np.inf, "blk.1.ffn_up_exps.bias holds numbers that are not finite"),
    ],
)
def test_numbers_that_are_none_are_refused(recipe, name, value, says, tmp_path):
    file = file_of(recipe)
    file.tensors[name] = np.full_like(file.tensors[name], value)
    with pytest.raises(UserError, match=says):
        opened(file.write(tmp_path / "small.gguf"))


def test_experts_without_end_are_refused(tmp_path, weights, monkeypatch):
    """Each may be of a few numbers, and 100 layers of 1,024 took minutes to build."""
    path = file_of("mixtral").write(tmp_path / "small.gguf")
    monkeypatch.setattr(weights, "MOST_EXPERTS", 35)
    opened(path)
    monkeypatch.setattr(weights, "MOST_EXPERTS", 34)
    with pytest.raises(UserError, match="it speaks of 35 experts, and 34 may be"):
        opened(path)


# ---------------------------------------------------------------- chapter 37's build.py with such a file


GEMMA_CHAT = (
    "{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + m['role'] + '\n' + m['content'] "
    "+ '<end_of_turn>\n' }}{% endfor %}{{ '<start_of_turn>model\n' }}"
)


def gemma_with_pieces() -> FileOf:
    """A small Gemma 2 with a vocabulary of its kind: pieces, all bytes, and a line end of its makers' own."""
    file = file_of("gemma2")
    steering = ["<unk>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"]
    in_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["▁", "a", "b", "▁a", "ab"]
    tokens = [*steering, "\n", *in_bytes, *pieces]
    file.words = {
        "model": "llama",
        "tokens": tokens,
        "token_type": [2, 3, 3, 3, 3, 4, *[6] * 256, *[1] * len(pieces)],
        "scores": [0.0] * 262 + [-float(i) for i in range(len(pieces))],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_space_prefix": False,
    }
    embedding = np.random.default_rng(1).normal(0, 0.2, (len(tokens), 45))
    file.tensors["token_embd.weight"] = embedding.astype(np.float32)
    file.fields["gemma2.vocab_size"] = len(tokens)
    file.fields["tokenizer.chat_template"] = GEMMA_CHAT
    return file


def test_a_person_talks_to_another_architecture(tmp_path, run_here, monkeypatch):
    path = gemma_with_pieces().write(tmp_path / "gemma.gguf")
    monkeypatch.setattr("sys.stdin", io.StringIO("a b\nab\n\n"))
    script = chapters.chapter_folder(37) / "build.py"
    status, out, err = run_here(script, "--chat", "--tokens", "3", "--device", "cpu", "--weights", str(path))
    assert (status, err) == (0, "") and out.startswith("Type a message.") and out.count("\n") >= 3


def test_a_chat_is_written_with_gemmas_tokens(tmp_path, weights):
    build = chapters.load_build(37)
    tokenizer = weights.open_tokenizer(build.WeightsFile(gemma_with_pieces().write(tmp_path / "gemma.gguf")))
    tokens = tokenizer.special
    user = tokenizer.encode("user")
    wanted = [tokens["<bos>"], tokens["<start_of_turn>"], *user, tokens["\n"], *tokenizer.encode("a<eos>")]
    wanted += [tokens["<end_of_turn>"], tokens["\n"], tokens["<start_of_turn>"], *tokenizer.encode("model"), tokens["\n"]]
    assert tokenizer.chat("a<eos>") == wanted and tokenizer.ends == {tokens["<eos>"], tokens["<end_of_turn>"]}


@pytest.mark.parametrize("recipe", ["deepseek-v3", "gpt-oss"])
def test_the_experiment_measures_another_architecture(recipe, tmp_path, capsys):
    path = file_of(recipe).write(tmp_path / "small.gguf")
    (tmp_path / "text.txt").write_text("abc think de " * 50, encoding="utf-8")
    flags = ["--weights", str(path), "--data", str(tmp_path / "text.txt"), "--output-dir", str(tmp_path / "out")]
    assert chapters.load_build(37).main([*flags, "--full", "--tokens", "4", "--device", "cpu", "--context", "24"]) == 0
    out = capsys.readouterr().out
    assert "d_model 45, 9 query heads on" in out and "perplexity on 12 tokens" in out


def test_a_refusal_is_one_line_and_status_2(tmp_path, run_here):
    file = file_of("qwen3")
    file.fields["qwen3.attention.sliding_window"] = 4
    script = chapters.chapter_folder(37) / "build.py"
    status, out, err = run_here(script, "--prompt", "a", "--weights", str(file.write(tmp_path / "small.gguf")))
    assert (status, out) == (2, "") and err.count("\n") == 1
    assert err.startswith("build.py: error: ") and "holds qwen3.attention.sliding_window" in err


def asks_for(small, what: str) -> None:
    """Chapter 37's small file, with one thing that its blocks and words don't have."""
    if what == "other words":
        small.tokenizer["pre"] = "qwen2"
    elif what == "yarn":
        small.fields |= {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
        small.fields["rope.scaling.original_context_length"] = 10
    elif what == "factors of pairs":
        small.tensors["rope_freqs.weight"] = np.full(8, 2, np.float32)
    elif what == "narrow heads":
        small.fields["attention.key_length"] = 8
        for i in range(2):
            for name, rows in {"attn_q": 48, "attn_k": 16, "attn_v": 16}.items():
                small.tensors[f"blk.{i}.{name}.weight"] = np.ones((rows, 96), np.float32)
            small.tensors[f"blk.{i}.attn_output.weight"] = np.ones((96, 48), np.float32)


@pytest.mark.parametrize("what", ["nothing more", "other words", "yarn", "factors of pairs", "narrow heads"])
def test_a_llama_file_stays_in_chapter_37_if_it_asks_for_no_more(what, tmp_path):
    build = chapters.load_build(37)
    small = SmallFile(build.byte_letters())
    asks_for(small, what)
    tokenizer, model = build.open_model(build.WeightsFile(small.write(tmp_path / "small.gguf")), 30)
    kinds = [type(tokenizer).__name__, type(model).__name__]
    assert kinds == (["Tokenizer", "RealGPT"] if what == "nothing more" else ["BytePairTokenizer", "FileGPT"])
    assert model.cfg.block_size == 30
    if what == "nothing more":  # and chapter 38 would make the same of it
        theirs = chapters.load_file(FOLDER / "weights.py").load_model(build.WeightsFile(tmp_path / "small.gguf"), 30)
        idx = torch.arange(17)[None]
        torch.testing.assert_close(model(idx)[0], theirs(idx)[0], rtol=0, atol=1e-4)
