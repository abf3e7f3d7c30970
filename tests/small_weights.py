"""A small GGUF file of chapter 37's kind, written by gguf itself: what tests load, change and damage."""

import gguf
import numpy as np
import pytest

from shared import chapters

D_MODEL, N_HEADS, N_KV, HIDDEN, LAYERS, CONTEXT = 96, 6, 2, 160, 2, 40  # head_dim 16; quantized rows need 32s
MERGES = ["a b", "ab c", "d e"]


def vocabulary(letters) -> list[str]:
    return ["<|im_start|>", "<|im_end|>", *letters, *(merge.replace(" ", "") for merge in MERGES)]


def special(token: str) -> bool:
    return token[:1] == "<" and len(token) > 1


def shapes(n_tokens: int) -> dict[str, tuple[int, ...]]:
    """Every tensor of a small llama file, by its name."""
    wanted = {"token_embd.weight": (n_tokens, D_MODEL), "output_norm.weight": (D_MODEL,)}
    for i in range(LAYERS):
        wanted |= {
            f"blk.{i}.{name}.weight": shape
            for name, shape in {
                "attn_norm": (D_MODEL,),
                "attn_q": (D_MODEL, D_MODEL),
                "attn_k": (16 * N_KV, D_MODEL),
                "attn_v": (16 * N_KV, D_MODEL),
                "attn_output": (D_MODEL, D_MODEL),
                "ffn_norm": (D_MODEL,),
                "ffn_gate": (HIDDEN, D_MODEL),
                "ffn_up": (HIDDEN, D_MODEL),
                "ffn_down": (D_MODEL, HIDDEN),
            }.items()
        }
    return wanted


class SmallFile:
    """A small GGUF file of random numbers, written by gguf itself; the parts can be changed before write()."""

    def __init__(self, letters):
        self.architecture, self.packing = "llama", gguf.GGMLQuantizationType.F32
        self.tokens = vocabulary(letters)
        self.fields = {
            "context_length": CONTEXT,
            "block_count": LAYERS,
            "embedding_length": D_MODEL,
            "feed_forward_length": HIDDEN,
            "attention.head_count": N_HEADS,
            "attention.head_count_kv": N_KV,
            "rope.freq_base": 5000.0,
            "attention.layer_norm_rms_epsilon": 3e-4,  # our own default is another
        }
        self.alignment = None  # a number of bytes; without it, GGUF's default of 32
        self.tokenizer = {"model": "gpt2", "pre": "smollm", "merges": MERGES, "eos_token_id": 1}
        self.more = {}  # other fields, by their whole names
        draws = np.random.default_rng(1)
        self.tensors = {
            name: draws.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes(len(self.tokens)).items()
        }

    def write(self, path):
        writer = gguf.GGUFWriter(path, self.architecture)
        if self.alignment:
            writer.add_custom_alignment(self.alignment)
        kinds = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, bool: writer.add_bool}
        kinds[list] = writer.add_array
        for name, value in self.fields.items():
            kinds[type(value)](f"llama.{name}", value)
        for name, value in self.more.items():
            kinds[type(value)](name, value)
        writer.add_array("tokenizer.ggml.tokens", self.tokens)
        writer.add_array("tokenizer.ggml.token_type", [3 if special(token) else 1 for token in self.tokens])
        if self.tokenizer["merges"]:
            writer.add_array("tokenizer.ggml.merges", self.tokenizer["merges"])
        for name in ("model", "pre", "eos_token_id"):
            value = self.tokenizer[name]
            if value is not None:
                kinds[type(value)](f"tokenizer.ggml.{name}", value)
        for name, numbers in self.tensors.items():
            packing = self.packing if numbers.ndim == 2 else gguf.GGMLQuantizationType.F32
            writer.add_tensor(name, gguf.quants.quantize(numbers, packing), raw_dtype=packing)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


@pytest.fixture
def small(real):
    return SmallFile(real.byte_letters())


def load(path):
    """A file, its tokenizer and its model, as chapter 37's build.py takes them."""
    build = chapters.load_build(37)
    file = build.WeightsFile(path)
    return file, build.Tokenizer(file), build.load_model(file)
