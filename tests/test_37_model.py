"""Chapter 37: the real model against a second implementation, its memory, its conversation, its command."""

import json
import math
import re
import resource
import socket

import gguf
import jinja2
import pytest
import torch

from shared import chapters
from shared.console import UserError

FOLDER = chapters.chapter_folder(37)


@pytest.fixture(scope="module")
def loaded(real, load_real_model):
    """The real file, its tokenizer and its model: opened once for all tests here."""
    file = real.WeightsFile(real.packaged_weights())
    return file, real.Tokenizer(file), load_real_model(file)


@pytest.fixture(scope="module")
def text(real, loaded):
    """Token ids of documentation (N,)."""
    return torch.tensor(loaded[1].encode(real.evaluation_text()))


# ---------------------------------------------------------------- a second implementation


def second_implementation(path, idx: torch.Tensor) -> torch.Tensor:
    """Logits (T, V) of a Llama model in float64, written from its description (Touvron et al. 2023) and not from
    this project: gguf's own reader, one matrix at a time, RoPE on the two halves of a head with complex numbers, heads
    and keys in a loop, scores masked by hand."""
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    layers, heads, keys, size, base, eps = 30, 9, 3, 64, 100_000.0, 1e-5

    def weight(name):
        return torch.tensor(gguf.quants.dequantize(tensors[name].data, tensors[name].tensor_type), dtype=torch.float64)

    def normed(x, name):
        return x / (x.pow(2).mean(1, keepdim=True) + eps).sqrt() * weight(name)

    T = len(idx)
    angles = torch.arange(T)[:, None] / base ** (torch.arange(size // 2, dtype=torch.float64) / (size // 2))
    turn = torch.polar(torch.ones_like(angles), angles)

    def rotated(vectors):  # (T, size): the file's rows are sorted in pairs; sort them into halves first
        halves = torch.cat((vectors[:, 0::2], vectors[:, 1::2]), dim=1)
        turned = torch.complex(halves[:, : size // 2], halves[:, size // 2 :]) * turn
        return torch.cat((turned.real, turned.imag), dim=1)

    future = torch.ones(T, T).triu(1).bool()
    embedding = weight("token_embd.weight")  # and the head
    x = embedding[idx]
    for i in range(layers):
        h = normed(x, f"blk.{i}.attn_norm.weight")
        q, k, v = (h @ weight(f"blk.{i}.attn_{name}.weight").T for name in "qkv")
        outputs = []
        for head in range(heads):
            shared = head * keys // heads
            mine, theirs = rotated(q[:, head * size :][:, :size]), rotated(k[:, shared * size :][:, :size])
            scores = (mine @ theirs.T / math.sqrt(size)).masked_fill(future, -math.inf)
            outputs.append(scores.exp() / scores.exp().sum(1, keepdim=True) @ v[:, shared * size :][:, :size])
        x = x + torch.cat(outputs, dim=1) @ weight(f"blk.{i}.attn_output.weight").T
        h = normed(x, f"blk.{i}.ffn_norm.weight")
        gate = h @ weight(f"blk.{i}.ffn_gate.weight").T
        x = (
            x
            + (gate / (1 + (-gate).exp()) * (h @ weight(f"blk.{i}.ffn_up.weight").T))
            @ weight(f"blk.{i}.ffn_down.weight").T
        )
    return normed(x, "output_norm.weight") @ embedding.T


def test_the_logits_are_those_of_a_second_implementation(real, loaded, text):
    file, _, model = loaded
    idx = text[:128]
    theirs = second_implementation(file.path, idx)
    with torch.inference_mode():
        ours = model(idx[None])[0][0].double()
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


def test_size_shape_and_tie(gpt, loaded):
    _, _, model = loaded
    cfg = model.cfg
    assert (cfg.n_layers, cfg.d_model, cfg.n_heads, cfg.n_kv_heads, cfg.head_dim) == (30, 576, 9, 3, 64)
    assert (cfg.d_hidden, cfg.rope_base, cfg.block_size, model.vocab_size) == (1536, 100_000, 8192, 49_152)
    assert cfg.norm_eps == pytest.approx(1e-5) and not cfg.bias
    assert gpt.count_parameters(model) == 134_515_008
    assert model.lm_head.weight is model.token_embedding.weight


# ---------------------------------------------------------------- remembering


def test_with_the_cache_48_tokens_are_those_of_the_full_forward(real, loaded):
    """Greedy ids equal those without a cache if, read at once, each is the likeliest after all before it."""
    _, tokenizer, model = loaded
    question = tokenizer.chat("Tell me a long story about a ship.")
    with real.remembering(model, len(question) + 48):
        written = list(real.stream(model, question, 48))
    with torch.inference_mode():
        logits = model(torch.tensor([question + written[:-1]]))[0][0, len(question) - 1 :]
    assert len(written) == 48 and logits.argmax(-1).tolist() == written


@pytest.fixture
def small_model(real):
    """A random model of unequal sizes in float64."""
    cfg = real.GroupedConfig(block_size=12, n_layers=2, n_heads=6, n_kv_heads=2, d_model=24, d_hidden=20)
    model = real.RealGPT(cfg, vocab_size=31).double()
    chapters.load_build(5).init_parameters(model, seed=1, std=0.2)
    return model.eval()


def test_the_logits_are_the_head_of_the_states(small_model):
    idx = torch.randint(31, (2, 7), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        assert torch.equal(small_model.lm_head(small_model.states(idx)), small_model(idx)[0])


def test_an_untrained_model_guesses_evenly(real, gpt):
    cfg = real.GroupedConfig(block_size=8, n_layers=2, n_heads=6, n_kv_heads=2, d_model=24)
    model = real.RealGPT(cfg, vocab_size=31)
    gpt.init_parameters(model, seed=1)
    loss = model(torch.tensor([[3, 1, 4, 1, 5]]), torch.tensor([[1, 4, 1, 5, 9]]))[1]
    assert 3.3 < loss.item() < 3.6  # ln 31 = 3.43


@pytest.mark.parametrize("pieces", [(11,), (1,) * 11, (4, 7), (1, 5, 5), (10, 1)])
def test_pieces_of_any_length_read_like_the_whole(real, small_model, pieces):
    idx = torch.randint(31, (1, 11), generator=torch.Generator().manual_seed(2))
    whole = small_model.states(idx)
    with real.remembering(small_model, 11):
        parts = [small_model.states(part) for part in idx.split(pieces, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(small_model.states(idx), whole)  # and nothing is remembered afterwards


def test_without_a_cache_the_model_takes_batches_and_is_causal_by_gradient(small_model):
    idx = torch.randint(31, (3, 7), generator=torch.Generator().manual_seed(3))
    x = small_model.embed(idx).detach().requires_grad_()
    h = x
    for block in small_model.blocks:
        h = block(h)
    (reaches,) = torch.autograd.grad(h[1, 4].sum(), x)
    seen = reaches.abs().sum(-1) > 0
    assert seen.tolist() == [[False] * 7, [True] * 5 + [False] * 2, [False] * 7]


def test_too_much_to_remember_is_an_error_that_names_both_numbers(real, small_model):
    with pytest.raises(ValueError, match="13 positions don't fit a block_size of 12"), real.remembering(small_model, 13):
        pass
    with real.remembering(small_model, 5):
        list(real.stream(small_model, [1, 2, 3], 3))
        with pytest.raises(ValueError, match="6 positions don't fit a cache of 5"):
            list(real.stream(small_model, [4], 1))
    assert all(type(block.attn) is real.GroupedQueryAttention for block in small_model.blocks)


def test_an_error_inside_leaves_nothing_remembered(real, small_model):
    with pytest.raises(KeyError), real.remembering(small_model, 5):
        raise KeyError
    assert all(type(block.attn) is real.GroupedQueryAttention for block in small_model.blocks)


def test_draws_follow_their_generator_and_the_end_ends(real, small_model):
    def drawn(seed, ends=()):
        with real.remembering(small_model, 12):
            draws = torch.Generator().manual_seed(seed)
            return list(real.stream(small_model, [1, 2], 10, ends, temperature=2.0, draws=draws))

    assert drawn(1) == drawn(1) != drawn(2)
    first = drawn(1)
    cut = drawn(1, ends={first[4]})
    assert cut == first[: first.index(first[4]) + 1]


def test_a_draw_is_from_the_softmax_of_logits_over_temperature(real, small_model):
    with torch.no_grad():
        logits = small_model(torch.tensor([[1, 2]]))[0][0, -1]
    temperature = logits.std().item() / 3  # far from 1: divided by it, few tokens are likely

    def drawn(seed):
        with real.remembering(small_model, 12):
            draws = torch.Generator().manual_seed(seed)
            return next(real.stream(small_model, [1, 2], 1, temperature=temperature, draws=draws))

    def expected(seed):
        draws = torch.Generator().manual_seed(seed)
        return torch.multinomial((logits / temperature).softmax(-1), 1, generator=draws).item()

    assert [drawn(seed) for seed in range(30)] == [expected(seed) for seed in range(30)]


# ---------------------------------------------------------------- the measure


def test_windows_are_read_one_by_one_and_every_token_counts_once(real, small_model):
    ids = torch.randint(31, (30,), generator=torch.Generator().manual_seed(4))
    losses = real.token_losses(small_model, ids, context=8)
    assert losses.shape == (29,)
    window = small_model(ids[None, 16:24])[0][0].log_softmax(-1)
    torch.testing.assert_close(losses[16:24], -window[torch.arange(8), ids[17:25]])


# ---------------------------------------------------------------- conversation


@pytest.fixture
def use_loaded(real, loaded, monkeypatch):
    """Let main() use the model that is loaded already."""
    file, tokenizer, model = loaded
    monkeypatch.setattr(real, "WeightsFile", lambda path: file)
    monkeypatch.setattr(real, "Tokenizer", lambda file: tokenizer)
    monkeypatch.setattr(real, "load_model", lambda file, longest: model)

    def no_network(*_):
        raise AssertionError("it opened a connection")

    monkeypatch.setattr(socket.socket, "connect", no_network)


def test_it_knows_the_capital_of_france(real, use_loaded, capsys):
    assert real.main(["--prompt", "What is the capital of France?"]) == 0
    assert capsys.readouterr().out == "The capital of France is Paris.\n"


def test_a_conversation_reads_what_the_template_would_write(real, loaded, use_loaded, monkeypatch, capsys):
    """Two turns, the first answer cut short: the model must have read the whole conversation in the file's own form."""
    file, tokenizer, model = loaded
    messages, read = ["What is the capital of France?", "And of Italy?", "\x04", "  "], []
    monkeypatch.setattr("builtins.input", lambda prompt: messages.pop(0))
    states = model.states
    monkeypatch.setattr(model, "states", lambda idx: (read.extend(idx[0].tolist()), states(idx))[1], raising=False)
    assert real.main(["--chat", "--tokens", "6"]) == 0
    out = capsys.readouterr().out
    first, second, refused = out.splitlines()[1:]
    assert first == "The capital of France is Paris" and "0x04" in refused and not messages
    said = [("user", "What is the capital of France?"), ("assistant", first), ("user", "And of Italy?")]
    template = jinja2.Template(file.metadata["tokenizer.chat_template"])
    whole = template.render(messages=[{"role": r, "content": c} for r, c in said], add_generation_prompt=True)
    assert tokenizer.encoding.decode(read).startswith(whole)
    assert tokenizer.encoding.decode(read)[len(whole) :] in second


def test_end_of_input_ends_a_conversation(real, use_loaded, monkeypatch, capsys):
    def end(prompt):
        raise EOFError

    monkeypatch.setattr("builtins.input", end)
    assert real.main(["--chat"]) == 0
    assert "Ctrl-D" in capsys.readouterr().out


def test_a_full_memory_ends_a_conversation(real, loaded, use_loaded, monkeypatch, capsys):
    monkeypatch.setattr("builtins.input", lambda prompt: "word " * 4000)
    assert real.main(["--chat", "--tokens", "8000"]) == 0
    assert "filled the 8,192 positions" in capsys.readouterr().out


def test_no_escape_byte_reaches_the_terminal(real, loaded, capsys):
    _, tokenizer, _ = loaded
    text = "a\x1b[31mb\x07c 東京🙂\n"
    ids = tokenizer.encode(text)
    assert real.conversation.write_answer(iter(ids), tokenizer) == ids
    assert capsys.readouterr().out == "a[31mbc 東京🙂\n\n"


def test_half_a_letter_at_the_end_of_an_answer_is_shown(real, loaded, capsys):
    """An answer that is cut within a letter ends in "�" and not in nothing."""
    _, tokenizer, _ = loaded
    ids = tokenizer.encode("a 東")
    assert len(tokenizer.encoding.decode_bytes(ids[:-1])) > 2  # the last token is a part of 東
    real.conversation.write_answer(iter(ids[:-1]), tokenizer)
    assert capsys.readouterr().out == "a �\n"


@pytest.mark.parametrize("temperature", ["1e-40", "1e-45", "1e-7"])
def test_a_temperature_below_the_smallest_step_is_0(real, use_loaded, capsys, temperature):
    flags = ["--prompt", "What is the capital of France?", "--temperature", temperature]
    assert real.main(flags) == 0
    assert capsys.readouterr().out == "The capital of France is Paris.\n"


# ---------------------------------------------------------------- the command


def test_the_flags_are_frozen(real):
    assert set(vars(real.conversation.parse("", []))) == {
        "tiny", "full", "prompt", "chat", "weights", "tokens", "temperature", "seed", "data", "device", "output_dir",
        "context", "draws",
    }  # fmt: skip


def test_the_whole_command(real, use_loaded, monkeypatch, tmp_path, capsys):
    """Its path with less text, and what it leaves behind."""
    monkeypatch.setattr(real, "N_EVALUATED", 64)
    monkeypatch.setattr(real, "CONTEXTS", (16, 128, 9000))
    speed = real.speed
    monkeypatch.setattr(real, "speed", lambda model, ids, n_new: speed(model, ids, 4))
    (tmp_path / "text.txt").write_text("Details matter. " * 45, encoding="utf-8")
    flags = ["--full", "--device", "cpu", "--tokens", "12", "--data", str(tmp_path / "text.txt")]
    assert real.main([*flags, "--output-dir", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "The capital of France is Paris." in out and "134,515,008 parameters" in out and "\x1b" not in out
    found = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    assert list(found["by_context"]) == ["16", "128"] and found["by_context"]["128"] < found["by_context"]["16"]
    assert len(found["answers"]) == 3 and found["loss"] > 0
    log = (tmp_path / "out" / "run_log.txt").read_text(encoding="utf-8")
    assert "Not compared with expected/" in log and found["text_sha256"] in log


def test_expected_belongs_to_this_text_and_these_weights(real, loaded):
    expected = json.loads((FOLDER / "expected" / "results.json").read_text(encoding="utf-8"))
    hashes = real.hashes(loaded[0], real.evaluation_text())
    assert {name: expected[name] for name in hashes} == hashes
    band = re.escape(str(real.BAND))
    assert re.match(
        f"As expected: .* {band} ", real.compare({**expected, "loss": expected["loss"] + 0.001}, FOLDER / "expected")
    )
    for gap in (0.003, -0.003):
        off = {**expected, "loss": expected["loss"] + gap}
        assert "OUTSIDE" in real.compare(off, FOLDER / "expected")
    for key in ("weights_sha256", "text_sha256"):
        said = real.compare({**expected, key: "another"}, FOLDER / "expected")
        assert said == "Not compared with expected/: other weights or another text."


def test_an_unwritable_output_folder_is_refused_before_anything_is_said(real, use_loaded, tmp_path, capsys):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(UserError, match="can't write to --output-dir"):
        real.main(["--output-dir", str(tmp_path / "file" / "out")])
    assert capsys.readouterr().out == ""


def test_by_its_path_it_answers_within_its_memory(run_script):
    status, out, err = run_script(
        FOLDER / "build.py", "--prompt", "What is the capital of France?", OMP_NUM_THREADS="1"
    )
    assert (status, out, err) == (0, "The capital of France is Paris.\n", "")
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 < 2.5e9  # Linux counts in kilobytes


# ---------------------------------------------------------------- break_it


def test_loud_means_another_answer():
    case = chapters.load_file(FOLDER / "break_it.py").CASE
    for sabotage in case.sabotages:
        assert sabotage.loud == ("answer" in sabotage.trips)


def test_the_table_of_everything(monkeypatch, tmp_path, capsys, large_drawn_once):
    """Its path, with two damages on a short text."""
    break_it = chapters.load_file(FOLDER / "break_it.py")
    names = ("no-norm", "eps-1e-6")
    few = tuple(sabotage for sabotage in break_it.SABOTAGES if sabotage.name in names)
    monkeypatch.setattr(break_it, "SABOTAGES", few)
    monkeypatch.setattr(break_it, "TEXT", {"--all": 128, "one": 128})
    monkeypatch.setattr(break_it, "__file__", str(tmp_path / "break_it.py"))
    assert break_it.main([]) == 0
    out = capsys.readouterr().out
    assert "all 2 predictions came true" in out and "not a number" in out and "\x1b" not in out
    assert (tmp_path / "outputs" / "perplexity.png").read_bytes().startswith(b"\x89PNG")
    assert "no-norm" in (tmp_path / "outputs" / "break_it.txt").read_text(encoding="utf-8")
