"""Chapter 37: what a weights file says of itself is believed only after a look."""

import math
import os
import re
import struct
import sys
import time
import tracemalloc
from pathlib import Path

import gguf
import jinja2
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared import chapters
from shared.console import UserError

sys.path.insert(0, str(Path(__file__).parent))

from small_weights import CONTEXT, D_MODEL, N_HEADS, SmallFile, load, small  # noqa: E402, F401: a fixture among them


def refusal(path) -> str:
    """The one line by which a file is refused, at once and before it takes any memory."""
    started = time.perf_counter()
    tracemalloc.start()
    try:
        with pytest.raises(UserError) as error:
            load(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.perf_counter() - started < 5 and peak < 100e6
    said = str(error.value)
    assert said.startswith(f"{path} can't be used: ") and "\n" not in said and len(said) < len(str(path)) + 250
    return said


# ---------------------------------------------------------------- fields


def llama(name, value):
    return lambda small: small.fields.update({name: value})


def other(name, value):
    return lambda small: small.more.update({name: value})


def words(name, value):
    return lambda small: small.tokenizer.update({name: value})


WIDE = 2**32 - 1
FIELDS = {
    "layers as text": (llama("block_count", "thirty"), "llama.block_count is thirty, and must be a whole number"),
    "layers with a point": (llama("block_count", 2.0), "llama.block_count is 2.0, and must be a whole number"),
    "layers as yes": (llama("block_count", True), "llama.block_count is True"),
    "a list of layers": (llama("block_count", [2, 2]), "llama.block_count is a list"),
    "too many layers": (llama("block_count", WIDE), "llama.block_count is 4294967295, and must be a whole number"),
    "one layer too many": (llama("block_count", 3), "llama.block_count is 3, and it has tensors of 2 blocks"),
    "one layer too few": (llama("block_count", 1), "llama.block_count is 1, and it has tensors of 2 blocks"),
    "no layer": (llama("block_count", 0), "llama.block_count is 0"),
    "no context": (llama("context_length", 0), "llama.context_length is 0"),
    "too long a context": (llama("context_length", WIDE), "llama.context_length is 4294967295"),
    "context as text": (llama("context_length", "long"), "llama.context_length is long"),
    "width as text": (llama("embedding_length", "96"), "llama.embedding_length is 96, and must be a whole number"),
    "too wide": (llama("embedding_length", WIDE), "llama.embedding_length is 4294967295"),
    "another width": (llama("embedding_length", 192), "blk.0.attn_q.weight has shape (96, 96), and in our model (192"),
    "no hidden width": (llama("feed_forward_length", 0), "llama.feed_forward_length is 0"),
    "too many hidden": (llama("feed_forward_length", WIDE), "llama.feed_forward_length is 4294967295"),
    "another hidden width": (llama("feed_forward_length", 2**19), "blk.0.ffn_up.weight has shape (160, 96)"),
    "odd heads": (llama("attention.head_count", 32), "heads have 3 channels, and RoPE turns pairs"),
    "heads as text": (llama("attention.head_count", "6"), "llama.attention.head_count is 6, and must be a whole"),
    "too many heads": (llama("attention.head_count", WIDE), "llama.attention.head_count is 4294967295"),
    "heads that don't divide": (llama("attention.head_count", 7), "n_heads"),
    "no key heads": (llama("attention.head_count_kv", 0), "llama.attention.head_count_kv is 0"),
    "another key length": (llama("attention.key_length", 32), "llama.attention.key_length is 32"),
    "another value length": (llama("attention.value_length", 32), "llama.attention.value_length is 32"),
    "eps NaN": (llama("attention.layer_norm_rms_epsilon", math.nan), "epsilon is nan, and must be a number from 0 to"),
    "eps below 0": (llama("attention.layer_norm_rms_epsilon", -1e-5), "llama.attention.layer_norm_rms_epsilon is -"),
    "eps as text": (llama("attention.layer_norm_rms_epsilon", "small"), "epsilon is small"),
    "base 0": (llama("rope.freq_base", 0.0), "llama.rope.freq_base is 0.0, and must be a number from 1 to 1e+12"),
    "base -1": (llama("rope.freq_base", -1.0), "llama.rope.freq_base is -1.0"),
    "base infinite": (llama("rope.freq_base", math.inf), "llama.rope.freq_base is inf"),
    "base as text": (llama("rope.freq_base", "10000"), "llama.rope.freq_base is 10000, and must be a number"),
    "stretch 0": (llama("rope.scaling.factor", 0.0), "llama.rope.scaling.factor is 0.0"),
    "stretch as yarn": (llama("rope.scaling.type", "yarn"), "llama.rope.scaling.type is yarn; we know none and linear"),
    "stretch as number": (llama("rope.scaling.type", 1), "llama.rope.scaling.type is 1, and must be a text"),
    "a window": (llama("attention.sliding_window", 4096), "llama.attention.sliding_window is 4096"),
    "a field of its own": (llama("logit_scale", 0.5), "holds llama.logit_scale, which our blocks don't know"),
    "a name that steers": (words("model", "\x1b[31m\nred" * 99), "its tokenizer is"),
    "a name of megabytes": (words("pre", "x" * 3_000_000), "its tokenizer is gpt2 xxx"),
    "tokenizer as number": (words("pre", 7), "its tokenizer is gpt2 7"),
    "end as text": (words("eos_token_id", "1"), "tokenizer.ggml.eos_token_id is 1, and must be a whole number"),
    "end out of range": (words("eos_token_id", 5000), "its eos token is number 5,000 of 261"),
    "end below 0": (other("tokenizer.ggml.eot_token_id", "-1"), "tokenizer.ggml.eot_token_id is -1"),
    "merges as numbers": (words("merges", [1, 2]), "no whole vocabulary"),
    "a token without letters": (lambda small: small.tokens.__setitem__(9, ""), "it has a token without a letter"),
    "a template as number": (other("tokenizer.chat_template", 3), "tokenizer.chat_template is 3, and must be a text"),
    "a token twice": (lambda small: small.tokens.__setitem__(5, small.tokens[6]), "it lists the token % twice"),
    "a special token twice": (lambda small: small.tokens.__setitem__(1, "<|im_start|>"), "token <|im_start|> twice"),
    "a merge without a space": (words("merges", ["ab", "ab c", "d e"]), "its merge ab is not of two of its tokens"),
    "a merge of three": (words("merges", ["a b", "a b c", "d e"]), "its merge a b c is not of two of its tokens"),
    "a merge of what is no token": (words("merges", ["a b", "a bc", "d e"]), "merge a bc is not of two of its tokens"),
    "a token that no merge makes": (words("merges", ["a b", "d e"]), "no merge makes its token abc"),
    "a first token without a number": (other("tokenizer.ggml.add_bos_token", True), "a first token, and doesn't say which"),
    "aligned as text": (other("general.alignment", "wide"), "general.alignment is wide, no multiple of 8"),
    "aligned to 0": (other("general.alignment", 0), "general.alignment is 0, no multiple of 8"),
    "aligned to 7": (other("general.alignment", 7), "general.alignment is 7, no multiple of 8"),
}


@pytest.mark.parametrize(("change", "says"), FIELDS.values(), ids=FIELDS)
def test_a_field_that_can_not_be_is_refused(small, tmp_path, change, says):
    change(small)
    assert says in refusal(small.write(tmp_path / "small.gguf"))


@pytest.mark.parametrize("value", [-1, -32])
def test_an_alignment_below_0_is_refused(small, tmp_path, value):
    name = "general.alignment"
    small.more[name] = 32
    path = small.write(tmp_path / "small.gguf")
    raw = path.read_bytes()
    field = struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", 4)
    assert raw.count(field) == 1
    signed = field[:-4] + struct.pack("<I", 5)  # the same field, of a kind with a sign
    path.write_bytes(raw.replace(field + struct.pack("<I", 32), signed + struct.pack("<i", value)))
    assert f"general.alignment is {value}, no multiple of 8" in refusal(path)


@pytest.mark.parametrize("kind", [-1, 0, 4, 6, 7])
def test_a_token_of_a_type_that_we_treat_like_no_other_is_refused(small, tmp_path, kind):
    """Type 4 is a user's own token, which stands for its name in every text; 6 is a byte of another kind of tokenizer."""
    path = small.write(tmp_path / "small.gguf")
    name = b"tokenizer.ggml.token_type"
    raw = bytearray(path.read_bytes())
    first = raw.index(name) + len(name) + 4 + 4 + 8  # the kind of the field, of its entries, and their number
    assert struct.unpack_from("<i", raw, first) == (3,)
    struct.pack_into("<i", raw, first, kind)
    path.write_bytes(raw)
    assert f"tokens of type {kind}, and we know 1, 2, 3 and 5" in refusal(path)


def test_a_field_that_is_there_twice_is_refused(small, tmp_path):
    small.more["llama.block_kount"] = 1
    path = small.write(tmp_path / "small.gguf")
    path.write_bytes(path.read_bytes().replace(b"llama.block_kount", b"llama.block_count"))
    assert "it holds llama.block_count twice" in refusal(path)


def test_weights_that_are_no_numbers_are_refused(small, tmp_path):
    small.tensors["blk.1.ffn_up.weight"][3, 5] = np.nan
    assert "blk.1.ffn_up.weight holds numbers that are not finite" in refusal(small.write(tmp_path / "nan.gguf"))


def test_a_tensor_without_a_number_is_refused(small, tmp_path):
    small.tensors["token_embd.weight"] = np.zeros((0, D_MODEL), np.float32)
    assert "tensor token_embd.weight of shape (0, 96) holds no number" in refusal(small.write(tmp_path / "empty.gguf"))


ODD_BLOCKS = {  # infinity times 0, and a power of 2 that float32 doesn't hold
    gguf.GGMLQuantizationType.Q5_0: b"\0\x7c" + 4 * b"\xff" + bytes(16),
    gguf.GGMLQuantizationType.MXFP4: 17 * b"\xff",
}


@pytest.mark.parametrize("packing", ODD_BLOCKS)
def test_packed_numbers_that_are_none_are_refused_without_a_warning(small, tmp_path, packing, recwarn):
    numbers = np.frombuffer(ODD_BLOCKS[packing] * (D_MODEL * D_MODEL // 32), np.uint8)
    name = "blk.0.attn_q.weight"
    file = chapters.load_build(37).WeightsFile(small.write(tmp_path / "small.gguf"))
    file.raw = numbers
    file.tensors[name] = file.tensors[name]._replace(packing=packing, start=0, n_bytes=len(numbers))
    assert not file.read(name).isfinite().any()
    assert not recwarn.list


def overflowing(small):
    small.tensors["output_norm.weight"] *= 1e36


def not_a_number(small):
    small.fields["attention.layer_norm_rms_epsilon"] = 0.0
    small.tensors["token_embd.weight"][:] = 0  # so RMSNorm divides 0 by 0


@pytest.mark.parametrize("damage", [overflowing, not_a_number])
@pytest.mark.parametrize("flags", [["--prompt", "abc"], ["--prompt", "abc", "--temperature", "1"], []])
def test_a_model_whose_numbers_overflow_is_refused(small, tmp_path, damage, flags):
    damage(small)
    path = small.write(tmp_path / "small.gguf")
    (tmp_path / "text.txt").write_text("abc de " * 100, encoding="utf-8")
    common = ["--weights", str(path), "--tokens", "4", "--output-dir", str(tmp_path / "out")]
    with pytest.raises(UserError, match="can't be used: what it makes of a text are no numbers"):
        chapters.load_build(37).main([*common, "--data", str(tmp_path / "text.txt"), *flags])


def test_a_perplexity_may_be_too_large_to_write(small, tmp_path, capsys):
    small.tensors["token_embd.weight"] *= 1e5
    path = small.write(tmp_path / "small.gguf")
    (tmp_path / "text.txt").write_text("abc de " * 100, encoding="utf-8")
    flags = ["--weights", str(path), "--tokens", "4", "--full", "--device", "cpu", "--output-dir", str(tmp_path / "out")]
    assert chapters.load_build(37).main([*flags, "--data", str(tmp_path / "text.txt")]) == 0
    out = capsys.readouterr().out
    assert re.search(r"perplexity on \d+ tokens +inf\n", out) and re.search(r"\n *32 +\d+\.\d+ +inf", out)


# ---------------------------------------------------------------- odd texts


@pytest.mark.parametrize("blank", [" ", "\n"])
def test_a_text_of_blanks_is_read(small, tmp_path, blank):
    _, tokenizer, _ = load(small.write(tmp_path / "small.gguf"))
    text = "a" + 1_000_000 * blank + "b"
    assert tokenizer.encoding.decode(tokenizer.encode(text)) == text


def test_a_file_may_have_any_name(small, tmp_path, capsys):
    path = small.write(tmp_path / os.fsdecode(b"\xff.gguf"))
    text = tmp_path / os.fsdecode(b"\xfe.txt")
    text.write_text("abc de " * 100, encoding="utf-8")
    flags = ["--weights", str(path), "--data", str(text), "--tokens", "4", "--output-dir", str(tmp_path / "out")]
    assert chapters.load_build(37).main(flags) == 0
    log = (tmp_path / "out" / "run_log.txt").read_text(encoding="utf-8")
    assert "file    \\xff.gguf, " in log and f"text    {tmp_path}/\\xfe.txt\n" in log


def test_one_position_holds_no_question_and_its_answer(small, tmp_path):
    path = small.write(tmp_path / "small.gguf")
    with pytest.raises(UserError, match="--context 1 holds no question and an answer; give 2 or more"):
        chapters.load_build(37).main(["--weights", str(path), "--context", "1", "--prompt", "a"])


# ---------------------------------------------------------------- where tensors lie


def offset_of(raw: bytes, name: str) -> int:
    """The byte at which a matrix's offset stands: behind its name, its two sizes and its packing."""
    start = raw.index(struct.pack("<Q", len(name)) + name.encode())
    return start + 8 + len(name) + 4 + 2 * 8 + 4


@pytest.mark.parametrize(
    ("offset", "says"),
    [
        (lambda own, other: own + 1, "which is no multiple of 32"),
        (lambda own, other: other, "within another tensor"),
        (lambda own, other: 2**63, "it is truncated"),
    ],
)
def test_a_tensor_lies_where_it_can(small, tmp_path, offset, says):
    path = small.write(tmp_path / "small.gguf")
    raw = bytearray(path.read_bytes())
    at = offset_of(raw, "blk.0.attn_k.weight")
    own, other = (struct.unpack_from("<Q", raw, place)[0] for place in (at, offset_of(raw, "blk.0.attn_v.weight")))
    struct.pack_into("<Q", raw, at, offset(own, other))
    path.write_bytes(raw)
    said = refusal(path)
    assert says in said and re.search(r"tensor blk\.0\.attn_[kv]\.weight", said)


def test_a_tensor_listed_twice_is_refused(small, tmp_path):
    path = small.write(tmp_path / "small.gguf")
    path.write_bytes(path.read_bytes().replace(b"blk.0.attn_k.weight", b"blk.0.attn_v.weight"))
    assert "lists the tensor blk.0.attn_v.weight twice" in refusal(path)


# ---------------------------------------------------------------- headers


def header(n_tensors: int, n_fields: int, body: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, n_tensors, n_fields) + body


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


DEEP = text(b"a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5_000 + struct.pack("<IQ", 0, 0)
HEADERS = {
    "lists 5,000 deep": header(0, 1, DEEP),
    "2^60 tensors": header(2**60, 0, b""),
    "2^60 fields": header(0, 2**60, bytes(1000)),
    "a list of 2^40": header(0, 1, text(b"a") + struct.pack("<IIQ", 9, 0, 2**40)),
    "a string of 2^63": header(0, 1, struct.pack("<Q", 2**63)),
    "a string of 2^64 - 1": header(0, 1, struct.pack("<Q", 2**64 - 1)),
    "2^32 - 1 axes": header(1, 0, text(b"a") + struct.pack("<I", WIDE)),
    "an unknown kind": header(0, 1, text(b"a") + struct.pack("<I", 77)),
}


@pytest.mark.parametrize("content", HEADERS.values(), ids=HEADERS)
def test_a_damaged_header_is_refused(tmp_path, content):
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    refusal(path)
    with path.open("ab") as file:
        file.truncate(80_000_000)  # and as many zeros behind it as a model would have
    refusal(path)


KINDS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
NAMES = st.sampled_from([*chapters.load_build(37).inspection.FIELDS, "general.architecture", "general.alignment", ""])
COUNTS = st.one_of(st.integers(0, 4), st.sampled_from([2**16, 2**31, 2**32 - 1, 2**63, 2**64 - 1]))


@st.composite
def values(draw, depth=0):
    """A field's kind and bytes: mostly well formed."""
    kind = draw(st.sampled_from([*KINDS, 8, 8, 9, 13, 255]))
    if kind in KINDS:
        return struct.pack("<I", kind) + draw(st.binary(min_size=8, max_size=8))[: struct.calcsize(KINDS[kind])]
    if kind == 8:
        return struct.pack("<I", 8) + text(draw(st.sampled_from([b"llama", b"gpt2", b"smollm", b"linear", b"\xff"])))
    if kind == 9 and depth < 3:
        inside = [draw(values(depth + 1)) for _ in range(draw(st.integers(0, 3)))]
        length = draw(st.one_of(st.just(len(inside)), COUNTS))
        return struct.pack("<I", 9) + (inside[0][:4] if inside else b"\0\0\0\0") + struct.pack("<Q", length) + b"".join(
            entry[4:] for entry in inside
        )
    return struct.pack("<I", kind)


@st.composite
def headers(draw):
    """A GGUF header: fields and tensors of any kind, with lengths that may be wrong."""
    fields = [text(draw(NAMES).encode()) + draw(values()) for _ in range(draw(st.integers(0, 6)))]
    tensors = []
    for _ in range(draw(st.integers(0, 4))):
        sizes = draw(st.lists(st.one_of(st.integers(0, 64), COUNTS), max_size=4))
        name = draw(st.sampled_from([b"token_embd.weight", b"blk.0.attn_q.weight", b"blk.0.ffn_up.weight", b"x"]))
        n_axes = draw(st.one_of(st.just(len(sizes)), COUNTS.filter(lambda n: n < 2**32)))
        where = struct.pack("<IQ", draw(st.sampled_from([0, 1, 3, 8, 26, 99])), draw(st.one_of(st.just(0), COUNTS)))
        tensors.append(text(name) + struct.pack("<I", n_axes) + struct.pack(f"<{len(sizes)}Q", *sizes) + where)
    n_fields = draw(st.one_of(st.just(len(fields)), COUNTS))
    n_tensors = draw(st.one_of(st.just(len(tensors)), COUNTS))
    return header(n_tensors, n_fields, b"".join(fields + tensors)) + draw(st.binary(max_size=64))


@settings(
    max_examples=200,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(content=headers())
def test_no_header_gives_a_traceback(tmp_path, content):
    path = tmp_path / "made.gguf"
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    refusal(path)


BYTES = st.tuples(st.floats(0, 1), st.sampled_from([b"\0", b"\xff", b"\x7f", b"\x01", b"\xff\xff\xff\xff", b"\0\0\0\0"]))


@settings(
    max_examples=120,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(changes=st.lists(BYTES, min_size=1, max_size=3))
def test_a_file_with_a_few_wrong_bytes_in_its_header_loads_or_is_refused(tmp_path_factory, changes):
    build = chapters.load_build(37)
    path = tmp_path_factory.getbasetemp() / "whole.gguf"
    if not path.exists():
        SmallFile(build.byte_letters()).write(path)
    raw = bytearray(path.read_bytes())
    first = min(tensor.start for tensor in build.WeightsFile(path).tensors.values())
    for where, new in changes:
        at = int(where * (first - 8))
        raw[at : at + len(new)] = new
    damaged = path.with_name("damaged.gguf")
    damaged.unlink(missing_ok=True)  # the old one may still be mapped
    damaged.write_bytes(raw)
    try:
        load(damaged)
    except UserError as error:
        assert str(error).startswith(f"{damaged} can't be used: ")


# ---------------------------------------------------------------- RoPE's scaling


STRETCHED = {
    "none": ({}, 1),
    "named none": ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, 1),
    "linear": ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, 4),
    "without a type": ({"rope.scaling.factor": 2.5}, 2.5),
    "the older name": ({"rope.scale_linear": 8.0}, 8),
}


@pytest.mark.parametrize(("fields", "factor"), STRETCHED.values(), ids=STRETCHED)
def test_linear_scaling_turns_position_t_as_t_over_the_factor(small, tmp_path, fields, factor):
    small.fields |= fields
    _, _, model = load(small.write(tmp_path / "small.gguf"))
    head_dim = D_MODEL // N_HEADS
    frequency = 5000.0 ** -(torch.arange(0, head_dim, 2) / head_dim).double()
    angles = (torch.arange(CONTEXT).double() / factor)[:, None] * frequency
    for block in model.blocks:
        torch.testing.assert_close(block.attn.cos, angles.cos().float(), rtol=0, atol=1e-6)
        torch.testing.assert_close(block.attn.sin, angles.sin().float(), rtol=0, atol=1e-6)


# ---------------------------------------------------------------- length


def test_tables_are_made_for_the_positions_that_are_read(small, tmp_path):
    small.fields["context_length"] = 1_048_576
    file, _, model = load(small.write(tmp_path / "long.gguf"))
    assert model.cfg.block_size == 8_192 and len(model.blocks[0].attn.cos) == 8_192
    assert chapters.load_build(37).load_model(file, 100).cfg.block_size == 100


@pytest.mark.parametrize("context", [40, 512, 1_024])
def test_a_model_of_few_positions_is_measured_within_them(small, tmp_path, context, capsys):
    small.fields["context_length"] = context
    path = small.write(tmp_path / "short.gguf")
    (tmp_path / "text.txt").write_text("abc de " * 2_000, encoding="utf-8")
    build = chapters.load_build(37)
    flags = ["--weights", str(path), "--data", str(tmp_path / "text.txt"), "--output-dir", str(tmp_path / "out")]
    assert build.main([*flags, "--full", "--tokens", "4"]) == 0
    n_read = min(1024, context - min(64, context // 2))
    assert f"perplexity on {n_read:,} tokens" in capsys.readouterr().out


# ---------------------------------------------------------------- forms of a chat

# Templates as model files have them, in short: each is run by jinja2 below, and our ids must be its text.
TEMPLATES = {
    "ChatML with an instruction": (
        "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}"
        "{% endif %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{{ '<|im_start|>assistant\n' }}",
        ["<|im_start|>", "<|im_end|>"],
    ),
    "ChatML, lines written \\n": (
        "{% for m in messages %}{% if loop.first %}{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}{% endif %}"
        "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
        "{{ '<|im_start|>assistant\\n' }}",
        ["<|im_start|>", "<|im_end|>"],
    ),
    "ChatML, an instruction with quotes": (
        "{% for m in messages %}{% if loop.first %}{{ '<|im_start|>system\nIt\\'s \"kind\".\\tYes.<|im_end|>\n' }}{% endif %}"
        "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{{ '<|im_start|>assistant\n' }}",
        ["<|im_start|>", "<|im_end|>"],
    ),
    "ChatML, a system message of one's own": (
        "{% if messages[0]['role'] == 'system' %}"
        "{{ '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}{% endif %}"
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{{ '<|im_start|>assistant\n' }}",
        ["<|im_start|>", "<|im_end|>"],
    ),
    "ChatML, one's own or an instruction": (
        "{%- if messages[0]['role'] == 'system' %}"
        '{{- "<|im_start|>system\\n" + messages[0]["content"] + "<|im_end|>\\n" }}'
        '{%- else %}{{- "<|im_start|>system\\nIt\'s you.<|im_end|>\\n" }}{%- endif %}'
        "{%- for m in messages %}{{- '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{%- endfor %}"
        "{{- '<|im_start|>assistant\n' }}",
        ["<|im_start|>", "<|im_end|>"],
    ),
    "ChatML, tokens within others": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{{ '<|im_start|>assistant\n' }}",
        ["<|im", "<|im_start|>", "<|im_end|>"],
    ),
    "ChatML alone": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{{ '<|im_start|>assistant\n' }}",
        ["<|im_start|>", "<|im_end|>"],
    ),
    "Llama 3": (
        "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' "
        "+ m['content'] + '<|eot_id|>' }}{% endfor %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}",
        ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|begin|>"],
    ),
    "Gemma": (
        "{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else 'user') "
        "+ '\n' + m['content'] + '<end_of_turn>\n' }}{% endfor %}{{ '<start_of_turn>model\n' }}",
        ["<start_of_turn>", "<end_of_turn>", "<|begin|>"],
    ),
    "Mistral": (
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
        "{% else %}{{ m['content'] + '</s>' }}{% endif %}{% endfor %}",
        ["</s>", "<|begin|>"],
    ),
    "Command R": (
        "{{ bos_token }}{% for m in messages %}{{ '<|START_OF_TURN_TOKEN|>' }}"
        "{{ '<|USER_TOKEN|>' if m['role'] == 'user' else '<|CHATBOT_TOKEN|>' }}"
        "{{ m['content'] + '<|END_OF_TURN_TOKEN|>' }}{% endfor %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}",
        ["<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|begin|>"],
    ),
    "Granite": (
        "{% for m in messages %}{{ '<|start_of_role|>' + m['role'] + '<|end_of_role|>' + m['content'] "
        "+ '<|end_of_text|>\n' }}{% endfor %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}",
        ["<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"],
    ),
    "DeepSeek": (
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] }}"
        "{% else %}{{ '<｜Assistant｜>' + m['content'] + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"
        "{{ '<｜Assistant｜>' }}",
        ["<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<|begin|>"],
    ),
}


def chat_file(small, template, special, end=None):
    """The small file with these special tokens in the place of its own, and this template."""
    small.tokens = [*special, *small.tokens[2:]]
    if template is not None:
        small.more["tokenizer.chat_template"] = template
    small.tokenizer["eos_token_id"] = len(small.tokens) - 1 if end is None else special.index(end)
    if "<|begin|>" in special:
        small.more["tokenizer.ggml.bos_token_id"] = special.index("<|begin|>")
    small.tensors["token_embd.weight"] = np.zeros((len(small.tokens), D_MODEL), np.float32)
    return small


@pytest.mark.parametrize(("template", "special"), TEMPLATES.values(), ids=TEMPLATES)
def test_a_conversation_is_written_as_the_template_writes_it(small, tmp_path, template, special):
    _, tokenizer, _ = load(chat_file(small, template, special).write(tmp_path / "chat.gguf"))
    end = tokenizer.special[tokenizer.form.end]
    close = [end, *tokenizer.encode(tokenizer.form.gap)]
    ids = [*tokenizer.chat("Hi <|im_end|>?"), *tokenizer.encode("Yes."), *close, *tokenizer.chat("{}", first=False)]
    messages = [
        {"role": "user", "content": "Hi <|im_end|>?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "{}"},
    ]
    asked = jinja2.Template(template, keep_trailing_newline=True).render(messages=messages, bos_token="<|begin|>")
    assert tokenizer.encoding.decode(ids) == asked
    # A special name that a person types is text: its token stands once, after the answer, and in each turn.
    assert ids.count(end) == asked.count(tokenizer.form.end) - ("im_end" in tokenizer.form.end)


def test_a_form_that_is_not_known_is_refused_by_name(small, tmp_path):
    template = "{% for m in messages %}{{ '<|user|>' + m['content'] + '<|end|>' }}{% endfor %}"
    path = chat_file(small, template, ["<|user|>", "<|end|>"]).write(tmp_path / "odd.gguf")
    with pytest.raises(UserError, match=r"odd\.gguf knows no form of chat that we know \(ChatML, Llama 3, Gemma, Mis"):
        chapters.load_build(37).main(["--weights", str(path), "--chat", "--tokens", "5"])


def test_every_end_that_the_file_names_ends_an_answer(small, tmp_path):
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot|>", "<|eom|>"]
    chat_file(small, None, special, end="<|endoftext|>")
    small.more["tokenizer.ggml.eot_token_id"] = 3
    small.more["tokenizer.ggml.eom_token_id"] = 4
    _, tokenizer, _ = load(small.write(tmp_path / "ends.gguf"))
    assert tokenizer.ends == {0, 2, 3, 4}


@pytest.mark.parametrize("stop", [0, 2])
def test_an_answer_stops_at_any_end_and_the_turn_is_closed_in_its_form(small, tmp_path, stop, monkeypatch, capsys):
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    path = chat_file(small, None, special, end="<|endoftext|>").write(tmp_path / "ends.gguf")
    build = chapters.load_build(37)
    _, tokenizer, _ = load(path)
    said = iter(["abc", "de", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(said))
    read = []

    def reply(ids):
        read.append(list(ids))
        yield from [*tokenizer.encode("abc"), stop]

    assert build.conversation.chat(reply, tokenizer, 1_000, 5) == 0
    assert capsys.readouterr().out.count("abc") == 2
    assert read[0] == tokenizer.chat("abc")
    assert read[1] == [2, *tokenizer.encode("\n"), *tokenizer.chat("de", first=False)]


def test_without_an_end_id_the_form_s_own_ends_an_answer(small, tmp_path):
    small.tokenizer["eos_token_id"] = None
    _, tokenizer, _ = load(small.write(tmp_path / "small.gguf"))
    assert tokenizer.ends == {1} and tokenizer.form.end == "<|im_end|>"


def test_a_first_token_that_the_file_wants_stands_before_a_text(small, tmp_path, monkeypatch):
    small.tokens[:2] = ["<|begin|>", "<|end|>"]
    small.more |= {"tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.add_bos_token": True}
    path = small.write(tmp_path / "small.gguf")
    build = chapters.load_build(37)
    read = []
    monkeypatch.setattr(build, "reply", lambda model, tokenizer, options, ids: read.append(ids) or iter([]))
    build.main(["--weights", str(path), "--prompt", "abc", "--tokens", "5"])
    assert read == [[0, *load(path)[1].encode("abc")]]
