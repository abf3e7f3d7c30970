"""Chapter 37: what its pages show in one case, held in more of them, and what only a developer asks.

The pages' code is that of build.py (test_pairs), so most of it is tested there.
"""

import lzma
import math
import re
import unicodedata

import gguf
import pytest
import torch
import torch.nn.functional as F

from shared import chapters, data
from shared.console import UserError
from shared.randomness import generator


@pytest.fixture(scope="module")
def loaded(real, load_real_model):
    """The real file, its tokenizer and its model: opened once for all tests here."""
    file = real.WeightsFile(real.packaged_weights())
    return file, real.Tokenizer(file), load_real_model(file)


@pytest.fixture(scope="module")
def ids(real, loaded):
    """The first 301 tokens of the text."""
    return torch.tensor(loaded[1].encode(real.evaluation_text())[:301])


# ---------------------------------------------------------------- 01: the file


def test_each_tensor_lies_and_is_shaped_and_packed_as_gguf_reads_it(loaded):
    file = loaded[0]
    theirs = {
        t.name: (tuple(t.shape[::-1].tolist()), t.tensor_type, t.data_offset, t.n_bytes)
        for t in gguf.GGUFReader(file.path).tensors
    }
    assert file.tensors == theirs and len(theirs) == 272


def test_the_metadata_is_as_gguf_reads_it(loaded):
    file = loaded[0]
    fields = gguf.GGUFReader(file.path).fields.values()
    known = {f.name: f.contents() for f in fields if not f.name.startswith("GGUF.")}
    assert file.metadata == known and len(known) == 33


def test_the_numbers_are_as_many_as_the_shape_asks_for(loaded):
    n_numbers = sum(math.prod(tensor.shape) for tensor in loaded[0].tensors.values())
    gains = 2 * 576
    qkv = 576 * (576 + 2 * 192)
    proj = 576 * 576
    mlp = 3 * 576 * 1536
    assert n_numbers == 49_152 * 576 + 30 * (gains + qkv + proj + mlp) + 576 == 134_515_008


def test_tensors_lie_in_the_order_of_the_list(real, loaded):
    _, listed, _ = real.read_header(loaded[0].raw)
    offsets = [offset for _, _, _, offset in listed]
    assert offsets == sorted(offsets)


# ---------------------------------------------------------------- 02: the tokenizer


def merge_by_list(text, merges, letters):
    """The reference: digits apart, then GPT-2's words, then the earliest merge until none fits."""
    order = {tuple(merge.split(" ")): i for i, merge in enumerate(merges)}
    letters = {byte: letter for letter, byte in letters.items()}
    apart = "".join(f"\0{c}\0" if unicodedata.category(c)[0] == "N" else c for c in text)
    words = r"'(?:[sdmt]|ll|ve|re)| ?[^\W_]+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+"
    tokens = []
    for piece in filter(None, apart.split("\0")):
        for word in re.findall(words, piece):
            parts = [letters[byte] for byte in word.encode("utf-8")]
            while True:
                pairs = enumerate(zip(parts, parts[1:]))
                known = [(order[pair], i) for i, pair in pairs if pair in order]
                if not known:
                    break
                _, i = min(known)
                parts[i : i + 2] = [parts[i] + parts[i + 1]]
            tokens += parts
    return tokens


def test_tokens_are_those_that_the_list_of_merges_makes(real, loaded):
    file, tokenizer, _ = loaded
    samples = ["The details that matter", "  In 2026, it's 3.14", "naïve 東京 🙂", "<|im_end|>"]
    hard = "".join(data.torch_docs())[:20_000] + " ".join(samples)
    hard += " \t\n  7  x\r\n\r\n   12 34½ Ⅷ don't DON'T  "
    tokens = [file.metadata["tokenizer.ggml.tokens"][i] for i in tokenizer.encode(hard)]
    merges = file.metadata["tokenizer.ggml.merges"]
    assert tokens == merge_by_list(hard, merges, real.byte_letters())


def test_the_pages_merges_end_in_the_same_tokens(real, loaded):
    file, tokenizer, _ = loaded
    merge_word = chapters.load_step(37, 11).merge_word
    order = {tuple(m.split(" ")): i for i, m in enumerate(file.metadata["tokenizer.ggml.merges"])}
    for word in (" matter", "naïve", " 東京", "\n\n", " unbelievableness"):
        stages = merge_word(word, order)
        tokens = [file.metadata["tokenizer.ggml.tokens"][i] for i in tokenizer.encode(word)]
        assert stages[-1] == tokens
        assert [len(stage) for stage in stages] == list(range(len(stages[0]), len(tokens) - 1, -1))


def test_ordinary_special_and_missing_tokens(loaded):
    _, tokenizer, _ = loaded
    ordinary = tokenizer.n_tokens - len(tokenizer.special)
    assert (ordinary, len(tokenizer.special), len(tokenizer.unsayable)) == (49_135, 17, 21)
    with pytest.raises(UserError, match="0xf1"):
        tokenizer.encode("\U00040000")


def test_in_a_chat_only_our_special_tokens_count(loaded):
    _, tokenizer, _ = loaded
    chat = tokenizer.chat("Say <|im_end|> twice.")
    assert [chat.count(i) for i in (1, 2)] == [3, 2]


# ---------------------------------------------------------------- 03: shared heads


def filled(module, seed):
    for name, p in module.named_parameters():
        torch.nn.init.normal_(p, std=0.3, generator=generator(seed, name, tuple(p.shape)))
    return module


def attend(q, k, v):
    """Attention with as many key heads as query heads, before the output matrix."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


@pytest.fixture
def grouped(real):
    cfg = real.GroupedConfig(block_size=11, n_heads=6, n_kv_heads=3, d_model=24)
    x = torch.randn(2, 7, cfg.d_model, generator=generator(1, "x"))
    return cfg, x, filled(real.GroupedQueryAttention(cfg), 1)


def test_grouped_heads_are_repeated_heads_and_not_tiled_ones(grouped):
    _, x, ours = grouped
    q, k, v = ours.heads(x)
    repeated = attend(q, k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1))
    torch.testing.assert_close(ours(x), ours.proj(repeated), rtol=0, atol=1e-5)
    tiled = attend(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))
    assert 0.1 < (tiled - repeated).abs().max() < 10


def test_grouped_attention_is_full_attention_whose_heads_are_equal_two_by_two(modern, grouped):
    cfg, x, ours = grouped
    full = filled(modern.RotaryAttention(cfg), 3)  # six key and value heads
    q, k, v = ours.qkv.weight.data.unflatten(0, (12, cfg.head_dim)).split([6, 3, 3])
    twice = torch.cat((q, k.repeat_interleave(2, dim=0), v.repeat_interleave(2, dim=0)))
    full.qkv.weight.data = twice.flatten(0, 1)
    full.proj.weight.data = ours.proj.weight.data
    torch.testing.assert_close(ours(x), full(x), rtol=0, atol=1e-5)
    full.qkv.weight.data = torch.cat((q, k, k, v, v)).flatten(0, 1)  # heads 0 1 2 0 1 2
    assert 0.1 < (ours(x) - full(x)).abs().max() < 10


def test_groups_of_one_are_chapter_07s_attention_with_its_gradient(real, modern, grouped):
    cfg, x, _ = grouped
    full = filled(modern.RotaryAttention(cfg), 3)
    alone = real.GroupedConfig(block_size=11, n_heads=6, n_kv_heads=6, d_model=24)
    ours = real.GroupedQueryAttention(alone)
    ours.load_state_dict(full.state_dict())
    torch.testing.assert_close(ours(x), full(x), rtol=0, atol=1e-5)
    ours(x).square().sum().backward()
    full(x).square().sum().backward()
    torch.testing.assert_close(ours.qkv.weight.grad, full.qkv.weight.grad, rtol=0, atol=1e-4)


def test_grouped_attention_is_causal_by_gradient(grouped):
    _, x, ours = grouped
    x.requires_grad_()
    (reaches,) = torch.autograd.grad(ours(x)[:, 3].sum(), x)
    assert reaches.abs().sum((0, 2)).gt(0).tolist() == [True] * 4 + [False] * 3


def test_heads_that_do_not_divide_are_refused(real):
    with pytest.raises(ValueError, match=r"n_heads 6 .* n_kv_heads 4"):
        real.GroupedConfig(n_heads=6, d_model=24, n_kv_heads=4)


# ---------------------------------------------------------------- 04: the names


def test_every_parameter_is_filled_and_the_layout_of_rope_is_the_neighbours(gpt, real, loaded):
    file, tokenizer, model = loaded
    filled = sum(place.numel() for place in real.slots(model).values())
    assert [gpt.count_parameters(model), filled] == [134_515_008] * 2
    tail = torch.tensor([tokenizer.encode("".join(data.torch_docs())[-2000:])[:257]])
    twin = chapters.load_step(37, 8).twin(model)
    for block in twin.blocks:
        block.attn.__class__ = chapters.load_step(37, 4).HalfSplitAttention
    with torch.inference_mode():
        right = model(tail[:, :-1], tail[:, 1:])[1].item()
        wrong = twin(tail[:, :-1], tail[:, 1:])[1].item()
    assert 0 < right < 3 and right + 1 < wrong < 11


# ---------------------------------------------------------------- 05: the loss


def test_a_byte_costs_fewer_bits_than_lzma_needs(real, loaded, ids):
    _, tokenizer, model = loaded
    text = tokenizer.encoding.decode(ids.tolist()).encode("utf-8")
    n_bytes = len(tokenizer.encoding.decode(ids[1:].tolist()).encode("utf-8"))
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9}]
    squeezed = len(lzma.compress(text, format=lzma.FORMAT_RAW, filters=filters))
    bits = real.mean_loss(model, ids) * 300 / math.log(2) / n_bytes
    assert 0 < bits < 8 * squeezed / n_bytes


def test_the_head_in_pieces_gives_the_same_losses(real, loaded, ids, monkeypatch):
    model = loaded[2]
    whole = real.token_losses(model, ids[:100])
    monkeypatch.setattr(real, "HEAD_ROWS", 7)
    torch.testing.assert_close(real.token_losses(model, ids[:100]), whole, rtol=0, atol=1e-4)


# ---------------------------------------------------------------- 06: the cache


def test_twelve_tokens_with_the_cache_are_those_without(gpt, real, loaded):
    _, tokenizer, model = loaded
    question = tokenizer.chat("Name three fruits.")
    with real.remembering(model, len(question) + 12):
        remembered = list(real.stream(model, question, 12))
    again = gpt.generate(model, torch.tensor([question]), 12, temperature=0)
    assert remembered == again[0, len(question) :].tolist()


def test_afterwards_the_model_remembers_nothing(real, loaded, ids):
    model = loaded[2]
    with torch.inference_mode():
        whole = model.states(ids[None, :60])
        with real.remembering(model, 60):
            model.states(ids[None, :60])
        torch.testing.assert_close(model.states(ids[None, :60]), whole, rtol=0, atol=1e-3)


def test_too_much_to_remember_is_refused(real, loaded, ids):
    model = loaded[2]
    with torch.inference_mode(), real.remembering(model, 60):
        model.states(ids[None, :60])
        with pytest.raises(ValueError, match="61 positions don't fit a cache of 60"):
            list(real.stream(model, [1], 1))
    refused = pytest.raises(ValueError, match="8193 positions don't fit a block_size of 8192")
    with refused, real.remembering(model, 8193):
        pass


# ---------------------------------------------------------------- 07: the stream


@torch.inference_mode()
def half_steps(model, ids):
    """The stream (2L + 1, T, C) at first, and after each attention and each MLP."""
    x = model.embed(ids[None])
    points = [x[0]]
    for block in model.blocks:
        x = x + block.attn(block.norm1(x))
        points.append(x[0])
        x = x + block.mlp(block.norm2(x))
        points.append(x[0])
    return torch.stack(points)


def test_the_stream_at_all_61_points_is_what_chapter_07_sees(modern, loaded, ids):
    model = loaded[2]
    stream = half_steps(model, ids[:256])
    theirs = [s["var"] for s in modern.stream_stats(model, ids[None, :256]).values()]
    ours = stream.var((1, 2), correction=0)
    torch.testing.assert_close(ours, torch.tensor(theirs), rtol=0, atol=1e-2)
    page = chapters.load_step(37, 7).residual_stream(model, ids[:256].tolist())
    torch.testing.assert_close(page, stream[::2], rtol=1e-5, atol=1e-2)


def test_a_single_spike_has_the_largest_kurtosis(modern):
    C = 576
    assert modern.tensor_stats(torch.eye(C)[5])["kurtosis"] == pytest.approx(C - 2 + 1 / (C - 1))


def test_the_share_of_the_mean_is_the_cosine_with_ones(loaded, ids):
    step_07 = chapters.load_step(37, 7)
    stream = half_steps(loaded[2], ids[:256])
    ones = torch.ones_like(stream[40])
    cosine = F.cosine_similarity(stream[40], ones, dim=-1).abs()
    torch.testing.assert_close(step_07.mean_share(stream[40]), cosine, rtol=0, atol=1e-6)
    assert 0 <= step_07.mean_share(stream).mean() <= (2 / math.pi / 576) ** 0.5


def test_the_huge_number_is_in_one_place_and_hidden_from_the_mlps(loaded, ids):
    _, tokenizer, model = loaded
    for text in (ids[:256], torch.tensor(tokenizer.chat("How do I boil an egg?"))):
        inside = half_steps(model, text)[24:58].abs().flatten(1)  # after layers 12 to 28
        assert inside.argmax(1).unique().tolist() == [507]  # token 0, channel 507
        assert 10_000 < inside.amax(1).min() < 30_000
    gains = torch.stack([block.norm2.weight for block in model.blocks[12:27]]).abs()
    assert gains[:, 507].max() < 0.002 and 0.2 < gains.median(1).values.min() < 0.4


# ---------------------------------------------------------------- 08 and 16: rearranged


def test_each_arrangement_on_more_text(real, loaded, ids, large_drawn_once):
    model = loaded[2]
    step_08 = chapters.load_step(37, 8)
    step_16 = chapters.load_step(37, 16)
    ids = ids[:65]
    with torch.no_grad():
        loss = real.mean_loss(model, ids)
        for same in (step_08.fold_gains, step_08.other_layout, step_16.copies):
            assert real.mean_loss(same(model), ids) == pytest.approx(loss, abs=1e-5)
        assert real.mean_loss(step_16.carve(model, 8), ids) == pytest.approx(loss, abs=1e-5)
        different = [step_08.fold_gains(model, keep=False), step_08.other_layout(model, False)]
        different += [step_16.copies(model, step_16.RawGates)]
        different += [step_16.carve(model, n_kept) for n_kept in (6, 4)]
        for other in different:
            assert loss + 0.1 < real.mean_loss(other, ids) < 30
        assert real.mean_loss(model, ids) == loss, "the first model is as it was"


# ---------------------------------------------------------------- 10: four bits


@pytest.mark.parametrize("seed", range(3))
def test_packing_rounds_to_the_nearest_level_as_gguf_does(seed):
    step_10 = chapters.load_step(37, 10)
    exact = torch.randn(32, generator=torch.Generator().manual_seed(seed))
    packed = step_10.pack_q4_1(exact)
    theirs = gguf.quants.quantize(exact.numpy(), gguf.GGMLQuantizationType.Q4_1)
    ours = step_10.unpack_q4_1(packed)[0]
    torch.testing.assert_close(ours, step_10.unpack_q4_1(theirs)[0], rtol=0, atol=2e-3)
