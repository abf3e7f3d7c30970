"""Chapter 05's GPT: its size, its start, its causality, what it writes."""

import json
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from shared import data
from shared.console import UserError
from shared.randomness import generator

SHAPE = {"block_size": 11, "n_layers": 3, "n_heads": 2, "d_model": 20}
VOCAB = 23


@pytest.fixture
def model(gpt):
    model = gpt.GPT(gpt.GPTConfig(**SHAPE), VOCAB)
    gpt.init_parameters(model, seed=1)
    return model


def tokens(batch, length, seed=1):
    return torch.randint(VOCAB, (batch, length), generator=generator(seed, "tokens"))


def test_gpt2s_own_count(gpt):
    with torch.device("meta"):
        model = gpt.GPT(gpt.GPTConfig(block_size=1024, n_layers=12, n_heads=12, d_model=768), 50257)
    assert gpt.count_parameters(model) == 124_439_808


def test_a_tied_matrix_counts_once_and_an_untied_one_twice(gpt, model):
    tied = gpt.count_parameters(model)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    assert gpt.count_parameters(model) == tied + VOCAB * SHAPE["d_model"]


def test_a_tied_matrix_counts_once_on_the_meta_device_too(gpt, model):
    with torch.device("meta"):
        on_meta = gpt.GPT(gpt.GPTConfig(**SHAPE), VOCAB)
        assert gpt.count_parameters(on_meta) == gpt.count_parameters(model)
        on_meta.lm_head.weight = torch.nn.Parameter(torch.empty_like(on_meta.lm_head.weight))
    assert gpt.count_parameters(on_meta) == gpt.count_parameters(model) + VOCAB * SHAPE["d_model"]


def test_attention_is_softmax_of_scaled_scores_over_the_past(gpt):
    """Written out by hand, in float64: softmax(q kᵀ / √D + mask) v, forward and gradient."""
    attention = gpt.CausalSelfAttention(gpt.GPTConfig(**SHAPE)).double()
    x = torch.randn(5, 7, 20, dtype=torch.float64, generator=generator(1, "x"), requires_grad=True)
    weight, bias = attention.qkv.weight, attention.qkv.bias
    q, k, v = ((x @ w.T + b).view(5, 7, 2, 10).transpose(1, 2) for w, b in zip(weight.split(20), bias.split(20)))
    scores = q @ k.transpose(-1, -2) / math.sqrt(10)
    scores = scores.masked_fill(torch.ones(7, 7).triu(1).bool(), -math.inf)
    y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(5, 7, 20)
    reference = y @ attention.proj.weight.T + attention.proj.bias
    ours = attention(x)
    assert torch.allclose(ours, reference, rtol=0, atol=1e-12)
    upstream = torch.randn(5, 7, 20, dtype=torch.float64, generator=generator(1, "upstream"))
    for mine, theirs in zip(
        torch.autograd.grad(ours, [x, weight, bias], upstream),
        torch.autograd.grad(reference, [x, weight, bias], upstream),
    ):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-12)


def test_no_position_sees_its_future(model):
    x = model.token_embedding(tokens(2, 9)).detach().requires_grad_()
    hidden = x
    for block in model.blocks:
        hidden = block(hidden)
    for t in range(9):
        (gradient,) = torch.autograd.grad(hidden[:, t].sum(), x, retain_graph=True)
        reached = gradient.abs().sum((0, 2)) > 0
        assert reached.tolist() == [position <= t for position in range(9)]


def test_logits_are_of_the_tied_matrix_and_the_loss_is_their_cross_entropy(model):
    idx, targets = tokens(4, 9), tokens(4, 9, seed=2)
    logits, loss = model(idx, targets)
    assert logits.shape == (4, 9, VOCAB)
    picked = torch.log_softmax(logits.double(), -1).gather(-1, targets[..., None])
    assert loss.item() == pytest.approx(-picked.mean().item(), abs=1e-6)
    alone, none = model(idx)
    assert none is None and torch.equal(alone, logits)
    assert model.lm_head.weight is model.token_embedding.weight


def test_a_context_that_does_not_fit_names_both_numbers(model):
    with pytest.raises(ValueError, match="12 tokens don't fit a block_size of 11"):
        model(tokens(1, 12))


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"d_model": 21}, "d_model 21 is not divisible by n_heads 2"), ({"n_layers": 0}, "at least 1")],
)
def test_a_shape_that_cannot_be(gpt, changes, says):
    with pytest.raises(ValueError, match=says):
        gpt.GPTConfig(**(SHAPE | changes))


# ---------------------------------------------------------------- the start


def test_the_start_depends_on_seed_name_and_shape_alone(gpt, model):
    deeper = gpt.GPT(gpt.GPTConfig(**(SHAPE | {"n_layers": 5})), VOCAB)
    gpt.init_parameters(deeper, seed=1)
    ours, theirs = dict(model.named_parameters()), dict(deeper.named_parameters())
    for name, p in ours.items():
        scale = math.sqrt(5 / 3) if name.endswith("proj.weight") else 1.0  # writers: 0.02 / √(2L)
        assert torch.allclose(theirs[name] * scale, p, rtol=1e-6, atol=0), name
    torch.manual_seed(99)  # the global stream doesn't matter
    again = gpt.GPT(gpt.GPTConfig(**SHAPE), VOCAB)
    gpt.init_parameters(again, seed=1)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters()))
    wider = gpt.GPT(gpt.GPTConfig(**(SHAPE | {"block_size": 22})), VOCAB)
    gpt.init_parameters(wider, seed=1)
    rows = wider.position_embedding.weight[0], model.position_embedding.weight[0]
    assert not torch.isclose(*rows).any()  # the shape counts, from the first number on
    gpt.init_parameters(again, seed=2)
    assert not torch.equal(again.blocks[0].mlp.fc.weight, model.blocks[0].mlp.fc.weight)
    assert not torch.equal(model.blocks[0].mlp.fc.weight, model.blocks[1].mlp.fc.weight)


@pytest.mark.parametrize(
    ("std", "fc", "proj", "embedding"),
    [
        (0.02, 0.02, 0.02 / math.sqrt(24), 0.02),
        ("fan_in", 768**-0.5, 3072**-0.5 / math.sqrt(24), 0.02),
    ],
)
def test_the_spread_of_the_start_is_as_written(gpt, std, fc, proj, embedding):
    """At GPT-2's width and depth (0.02 / √24 = 0.0040825), one block's worth of it."""
    model = gpt.GPT(gpt.GPTConfig(block_size=8, n_layers=1, n_heads=4, d_model=768), 97)
    object.__setattr__(model.cfg, "n_layers", 12)  # a frozen config: the depth alone sets the scale
    gpt.init_parameters(model, seed=1, std=std)
    block = model.blocks[0]
    for p, expected in (
        (block.mlp.fc.weight, fc),
        (block.mlp.proj.weight, proj),
        (model.token_embedding.weight, embedding),
    ):
        assert p.std().item() == pytest.approx(expected, rel=0.01)
        assert abs(p.mean().item()) < 4 * expected / math.sqrt(p.numel())
    assert block.mlp.fc.bias.abs().max() == 0 and torch.equal(block.norm1.weight, torch.ones(768))


def test_a_parameter_without_a_rule_is_an_error(gpt, model):
    model.blocks[0].extra = torch.nn.Conv1d(2, 3, 4)
    with pytest.raises(TypeError, match=r"no rule starts blocks\.0\.extra\.weight, a \(3, 2, 4\) tensor of Conv1d"):
        gpt.init_parameters(model, seed=1)


# ---------------------------------------------------------------- writing


class Counting(torch.nn.Module):
    """A language that counts: after token n comes n + 1 with logit 3, n + 2 with logit 2, all else 0."""

    cfg = type("Config", (), {"block_size": 4})

    def __init__(self):
        super().__init__()
        self.longest = 0

    def forward(self, idx, targets=None):
        self.longest = max(self.longest, idx.shape[1])
        return 3.0 * F.one_hot((idx + 1) % 10, 10) + 2.0 * F.one_hot((idx + 2) % 10, 10), None


def test_temperature_zero_takes_the_likeliest_and_the_context_is_cut_to_a_block(gpt):
    model = Counting()
    assert gpt.generate(model, torch.tensor([[7], [2]]), 6, temperature=0).tolist() == [
        [7, 8, 9, 0, 1, 2, 3],
        [2, 3, 4, 5, 6, 7, 8],
    ]
    assert model.longest == 4


def test_samples_follow_the_softmax_at_their_temperature(gpt):
    """4,000 draws of one token, temperature 2: frequencies within four standard errors of softmax(logits / 2)."""
    n = 4000
    drawn = gpt.generate(Counting(), torch.full((n, 1), 5), 1, temperature=2.0, generator=generator(1, "draws"))[:, 1]
    logits = torch.zeros(10)
    logits[6], logits[7] = 3.0, 2.0
    for token, p in enumerate((logits / 2).softmax(0).tolist()):
        assert (drawn == token).float().mean().item() == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / n))


def test_top_k_leaves_only_k(gpt):
    drawn = gpt.generate(Counting(), torch.full((300, 1), 5), 1, top_k=2, generator=generator(1, "draws"))[:, 1]
    assert set(drawn.tolist()) == {6, 7}
    assert gpt.generate(Counting(), torch.tensor([[5]]), 1, top_k=99).shape == (1, 2)  # more than there are: all


class Tied(torch.nn.Module):
    """After every context the same logits, of which three are equal at the top and two below them."""

    cfg = type("Config", (), {"block_size": 4})

    def forward(self, idx, targets=None):
        logits = torch.tensor([1.0, 2.0, 0.0, 2.0, 1.0, 2.0])
        return logits.expand(*idx.shape, 6), None


@pytest.mark.parametrize(
    ("top_k", "kept"), [(1, {1}), (2, {1, 3}), (3, {1, 3, 5}), (4, {0, 1, 3, 5}), (6, set(range(6)))]
)
def test_top_k_keeps_exactly_k_when_logits_are_equal(gpt, top_k, kept):
    """Of equals the lower ids, so top_k = 1 writes what temperature 0 writes."""
    contexts = torch.zeros(600, 1, dtype=torch.long)
    draws = generator(1, "draws")
    drawn = gpt.generate(Tied(), contexts, 1, top_k=top_k, generator=draws)[:, 1]
    assert set(drawn.tolist()) == kept
    if top_k == 1:
        assert torch.equal(drawn, gpt.generate(Tied(), contexts, 1, temperature=0)[:, 1])


@pytest.mark.parametrize(
    ("arguments", "length"), [({"temperature": -1}, 1), ({"top_k": 0}, 1), ({"temperature": 1}, 0)]
)
def test_impossible_wishes_are_refused(gpt, arguments, length):
    with pytest.raises(ValueError, match=f"{length} tokens"):
        gpt.generate(Counting(), torch.zeros(1, length, dtype=torch.long), 3, **arguments)


def test_the_sample_continues_text_that_was_left_out(gpt, model):
    letters = "abcdefghijklmnopqrstuvw"
    left_out = torch.arange(VOCAB)
    tokenizer = data.CharTokenizer(letters)
    corpus = data.Corpus("test", "", 63, tokenizer, torch.zeros(40, dtype=torch.long), left_out)
    found = gpt.OneGPT().inspect(model, corpus, seed=1)
    assert found["prompt"] == letters[:11] and found["sample"].startswith(letters[:11])


@pytest.mark.slow
def test_the_run_says_how_much_likelier_the_true_token_became(gpt, forked, tmp_path, monkeypatch, capsys):
    text = tmp_path / "text"
    text.write_text("abcd" * 400, encoding="utf-8")
    preset = gpt.PRESETS["tiny"]
    small = replace(preset, model=gpt.GPTConfig(8, 1, 2, 12), training=replace(preset.training, steps=60, batch_size=8))
    monkeypatch.setitem(gpt.PRESETS, "tiny", small)
    assert gpt.main(["--data", str(text), "--seeds", "1", "--output-dir", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    record = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    loss = record["runs"][0]["validation_loss"]
    assert loss < 1.0 < math.log(4)
    said = " ".join(out.split())  # sentences are folded
    assert f"{4 * math.exp(-loss):.1f} times the probability" in said
    assert f"the loss is {loss:.3f} nats" in said and f"has {math.log(4):.3f}" in said
    assert record["runs"][0]["found"]["sample"].startswith(record["runs"][0]["found"]["prompt"])


@pytest.mark.slow
def test_the_trained_model_continues_a_prompt(gpt, forked, tmp_path, monkeypatch, capsys):
    text = tmp_path / "text"
    text.write_text("abcd" * 400, encoding="utf-8")
    preset = gpt.PRESETS["tiny"]
    small = replace(preset, model=gpt.GPTConfig(8, 1, 2, 12), training=replace(preset.training, steps=60, batch_size=8))
    monkeypatch.setitem(gpt.PRESETS, "tiny", small)
    flags = ["--data", str(text), "--output-dir", str(tmp_path / "out")]
    with pytest.raises(UserError, match="run the command without --sample first"):
        gpt.main([*flags, "--sample", "ab"])
    gpt.main(flags)
    capsys.readouterr()
    assert gpt.main([*flags, "--sample", "ab"]) == 0
    out = capsys.readouterr().out.strip()
    assert out.startswith("ab") and len(out) == 2 + gpt.SAMPLE_TOKENS
    pairs = [out[i : i + 2] for i in range(len(out) - 1)]
    assert sum(pair in ("ab", "bc", "cd", "da") for pair in pairs) > 0.8 * len(pairs)  # it learned
    with pytest.raises(UserError, match="no character 'é'"):
        gpt.main([*flags, "--sample", "é"])
    with pytest.raises(UserError, match="the prompt is empty"):
        gpt.main([*flags, "--sample", ""])
