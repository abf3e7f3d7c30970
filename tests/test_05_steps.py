"""What the pages of chapter 05 leave out: gradients, refusals, more shapes and more seeds."""

import copy
import math

import pytest
import tiktoken
import torch
import torch.nn as nn
import torch.nn.functional as F

from shared import chapters, data, verdict
from shared.console import UserError
from shared.randomness import generator


def step(number):
    return chapters.load_step(5, number)


def randomize(module, noise, std):
    for p in module.parameters():
        nn.init.normal_(p, std=std, generator=noise)
    return module


def normal(noise, *shape):
    return torch.randn(shape, dtype=torch.float64, generator=noise)


def assert_close(ours, reference, tolerance):
    assert ours.shape == reference.shape
    assert (ours - reference).abs().max().item() <= tolerance


# ---------------------------------------------------------------- 01 and 02: tokens and batches


def test_a_character_that_the_corpus_lacks_has_no_token():
    tokenizer = data.CharTokenizer("".join(data.torch_docs()))
    with pytest.raises(UserError, match="'€'"):
        tokenizer.encode("5 €")


def test_joining_goes_from_bytes_to_tokens_one_pair_at_a_time():
    ranks = {b"a": 0, b"b": 1, b"c": 2, b"bc": 3, b"ab": 4, b"abc": 5}
    stages = step(1).stages_of_joining(b"abcab", ranks)
    assert stages == [
        [b"a", b"b", b"c", b"a", b"b"],
        [b"a", b"bc", b"a", b"b"],  # bc was learned before ab
        [b"a", b"bc", b"ab"],
        [b"abc", b"ab"],
    ]
    assert step(1).join_pairs(b"abcab", ranks) == [5, 4]


def test_both_parts_joined_are_the_corpus_and_validation_is_a_tenth():
    corpus = data.load_corpus("docs", "char", block_size=8)
    whole = torch.cat((corpus.train, corpus.validation))
    assert corpus.tokenizer.decode(whole.tolist()) == "".join(data.torch_docs())
    assert 0.0999 <= len(corpus.validation) / len(whole) <= 0.1


@pytest.mark.parametrize(
    "sample", [step(2).batch_by_loop, step(2).batch_at_once, data.sample_batch]
)
def test_every_start_comes_up_equally_often_and_the_last_token_is_a_target(sample):
    few = torch.arange(12)
    inputs, targets = sample(few, 5, 2000, generator(1, "few"))
    assert inputs[:, 0].unique().tolist() == list(range(12 - 5))
    assert targets.max() == few[-1]
    p = 1 / 7
    standard_error = (p * (1 - p) / 2000) ** 0.5
    share = (inputs[:, 0] == 3).double().mean().item()
    assert share == pytest.approx(p, abs=4 * standard_error)


def test_evaluation_asks_for_every_token_but_the_first_once():
    windows = data.all_windows(torch.arange(12), 5, 2)
    assert [t for _, targets in windows for t in targets.flatten().tolist()] == list(range(1, 12))


def test_a_seed_gives_its_batch_again_and_another_seed_another():
    tokens = data.load_corpus("docs", "char", block_size=8).train
    first = data.sample_batch(tokens, 8, 4, generator(1, "batches"))[0]
    assert torch.equal(data.sample_batch(tokens, 8, 4, generator(1, "batches"))[0], first)
    assert not torch.equal(data.sample_batch(tokens, 8, 4, generator(2, "batches"))[0], first)


# ---------------------------------------------------------------- 03: attention


@pytest.fixture
def attention():
    noise = generator(1, "step 03")
    cfg = step(3).GPTConfig(block_size=9, n_heads=3, d_model=15)
    return randomize(step(3).CausalSelfAttention(cfg).double(), noise, 0.5)


def test_attention_by_hand_is_torchs_forward_and_gradients(attention):
    noise = generator(1, "by hand")
    heads = attention.heads(normal(noise, 2, 7, 15))
    q, k, v = (h.detach().requires_grad_() for h in heads)
    by_hand, shares = step(3).attend_by_hand(q, k, v)
    fused = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert_close(by_hand, fused, 1e-12)
    assert_close(shares.sum(-1), torch.ones(2, 3, 7, dtype=torch.float64), 1e-12)
    from_above = normal(noise, *fused.shape)
    ours = torch.autograd.grad(by_hand, (q, k, v), from_above)
    theirs = torch.autograd.grad(fused, (q, k, v), from_above)
    for mine, reference in zip(ours, theirs):
        assert_close(mine, reference, 1e-12)


def test_the_class_is_torchs_multihead_attention_forward_and_all_gradients(attention):
    noise = generator(1, "class")
    x = normal(noise, 2, 7, 15).requires_grad_()
    torchs = nn.MultiheadAttention(15, 3, batch_first=True, dtype=torch.float64)
    torchs.in_proj_weight = attention.qkv.weight
    torchs.in_proj_bias = attention.qkv.bias
    torchs.out_proj = attention.proj
    future = torch.ones(7, 7, dtype=torch.bool).triu(1)
    y = attention(x)
    reference, _ = torchs(x, x, x, attn_mask=future, need_weights=False)
    assert_close(y, reference, 1e-12)
    from_above = normal(noise, 2, 7, 15)
    parameters = (x, *attention.parameters())
    ours = torch.autograd.grad(y, parameters, from_above)
    theirs = torch.autograd.grad(reference, parameters, from_above)
    for mine, its in zip(ours, theirs):
        assert_close(mine, its, 1e-12)


def test_each_position_depends_on_itself_and_its_past_alone(attention):
    x = normal(generator(1, "reach"), 1, 7, 15).requires_grad_()
    for t in range(7):
        (gradient,) = torch.autograd.grad(attention(x)[0, t].sum(), x)
        reached = gradient[0].norm(dim=-1)
        assert torch.equal(reached[t + 1 :], torch.zeros(6 - t, dtype=torch.float64))
        assert (reached[: t + 1] > 0).all()


def test_one_token_alone_gets_its_own_value(attention):
    x = normal(generator(1, "alone"), 2, 1, 15)
    value = attention.heads(x)[2].transpose(1, 2).flatten(2)
    assert_close(attention(x), attention.proj(value), 1e-12)


def test_heads_that_do_not_divide_the_width_are_refused(gpt):
    with pytest.raises(ValueError, match="15 is not divisible by n_heads 4"):
        gpt.GPTConfig(d_model=15, n_heads=4)


# ---------------------------------------------------------------- 04: the MLP


def gelu_tanh_by_hand(x):
    """The tanh form of GELU, which GPT-2 was trained with."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def test_gelus_two_forms_are_torchs_and_5e_4_apart():
    x = torch.linspace(-6, 6, 24_001, dtype=torch.float64)
    exact = step(4).gelu_by_hand(x)
    assert_close(exact, F.gelu(x), 1e-12)
    assert_close(gelu_tanh_by_hand(x), F.gelu(x, approximate="tanh"), 1e-12)
    gap = (gelu_tanh_by_hand(x) - exact).abs()
    assert gap.max().item() == pytest.approx(4.7e-4, abs=1e-5)
    assert x[gap.argmax()].abs().item() == pytest.approx(2.70, abs=0.01)
    one = torch.ones(())
    assert_close(step(4).gelu_by_hand(one), torch.special.ndtr(one), 1e-7)


@pytest.mark.parametrize(("B", "T", "C"), [(2, 5, 12), (3, 1, 8)])
def test_the_mlp_is_torchs_layers_in_a_row_forward_and_gradients(B, T, C):
    noise = generator(1, "step 04", C)
    mlp = randomize(step(4).MLP(step(4).GPTConfig(n_heads=4, d_model=C)).double(), noise, 0.7)
    torchs = nn.Sequential(nn.Linear(C, 4 * C), nn.GELU(), nn.Linear(4 * C, C)).double()
    torchs[0].load_state_dict(mlp.fc.state_dict())
    torchs[2].load_state_dict(mlp.proj.state_dict())
    x = normal(noise, B, T, C).requires_grad_()
    from_above = normal(noise, B, T, C)
    assert_close(mlp(x), torchs(x), 1e-12)
    ours = torch.autograd.grad(mlp(x), (x, *mlp.parameters()), from_above)
    theirs = torch.autograd.grad(torchs(x), (x, *torchs.parameters()), from_above)
    for mine, its in zip(ours, theirs):
        assert_close(mine, its, 1e-12)
    alone = torch.cat([mlp(x[:, t : t + 1]) for t in range(T)], dim=1)
    assert_close(alone, mlp(x), 1e-12)


def test_the_mlp_holds_eight_c_squared_and_five_c(gpt):
    with torch.device("meta"):
        mlp = gpt.MLP(gpt.GPTConfig(n_heads=12, d_model=768))
    assert gpt.count_parameters(mlp) == 8 * 768 * 768 + 5 * 768


# ---------------------------------------------------------------- 05 and 06: block and model


def torch_block(block, cfg):
    """torch's layer with our block's Parameters in it, norms first as in ours."""
    layer = nn.TransformerEncoderLayer(
        cfg.d_model,
        cfg.n_heads,
        dim_feedforward=4 * cfg.d_model,
        dropout=0.0,
        activation="gelu",
        batch_first=True,
        norm_first=True,
    )
    layer.self_attn.in_proj_weight = block.attn.qkv.weight
    layer.self_attn.in_proj_bias = block.attn.qkv.bias
    layer.self_attn.out_proj = block.attn.proj
    layer.linear1 = block.mlp.fc
    layer.linear2 = block.mlp.proj
    layer.norm1 = block.norm1
    layer.norm2 = block.norm2
    return layer


def torch_logits(model, idx):
    """The whole model out of torch's encoder: idx (B, T) -> logits (B, T, V)."""
    T = idx.shape[1]
    layers = [torch_block(block, model.cfg) for block in model.blocks]
    encoder = nn.TransformerEncoder(
        layers[0], len(layers), model.norm_f, enable_nested_tensor=False
    )
    encoder.layers = nn.ModuleList(layers)
    x = F.embedding(idx, model.token_embedding.weight) + model.position_embedding.weight[:T]
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    return encoder(x, mask=future, is_causal=True) @ model.token_embedding.weight.T


def test_the_block_is_torchs_encoder_layer_forward_and_all_gradients(gpt):
    noise = generator(1, "step 05")
    cfg = gpt.GPTConfig(block_size=9, n_heads=3, d_model=12)
    block = randomize(gpt.Block(cfg).double(), noise, 0.5)
    x = normal(noise, 2, 7, 12).requires_grad_()
    from_above = normal(noise, 2, 7, 12)
    future = torch.ones(7, 7, dtype=torch.bool).triu(1)
    reference = torch_block(block, cfg)(x, src_mask=future)
    assert_close(block(x), reference, 1e-12)
    parameters = (x, *block.parameters())
    ours = torch.autograd.grad(block(x), parameters, from_above)
    theirs = torch.autograd.grad(reference, parameters, from_above)
    assert len(ours) == 13
    for mine, its in zip(ours, theirs):
        assert_close(mine, its, 1e-11)


def test_without_sums_input_and_gradient_are_lost():
    page = step(5)
    noise = generator(1, "step 05", "gradient")
    start = torch.randn(3, 11, 64, generator=noise, requires_grad=True)
    from_above = torch.randn(3, 11, 64, generator=noise)  # a gradient of size 1
    sizes = []
    for block_class in (page.BlockWithoutSums, page.Block):
        blocks = page.untrained_blocks(block_class, generator(1, "step 05"))
        (gradient,) = torch.autograd.grad(nn.Sequential(*blocks)(start), start, from_above)
        sizes.append(gradient.square().mean().sqrt().item())
    assert sizes[0] < 0.2
    assert 0.8 < sizes[1] < 1.25
    assert -0.2 < page.likeness_to_input(page.BlockWithoutSums)[-1] < 0.2
    assert 0.8 < page.likeness_to_input(page.Block)[-1] <= 1.0


def test_a_block_whose_parts_output_0_leaves_input_and_gradient_as_they_are():
    page = step(5)
    noise = generator(1, "step 05", "silent")
    cfg = page.GPTConfig(block_size=9, n_heads=3, d_model=12)
    block = randomize(page.Block(cfg).double(), noise, 0.5)
    for part in (block.attn.proj, block.mlp.proj):
        nn.init.zeros_(part.weight)
        nn.init.zeros_(part.bias)
    x = normal(noise, 2, 7, 12).requires_grad_()
    from_above = normal(noise, 2, 7, 12)
    assert torch.equal(block(x), x)
    assert torch.equal(torch.autograd.grad(block(x), x, from_above)[0], from_above)


@pytest.fixture
def random_gpt(gpt):
    cfg = gpt.GPTConfig(block_size=9, n_layers=3, n_heads=2, d_model=10)
    return randomize(gpt.GPT(cfg, 13).double(), generator(1, "step 06"), 0.4)


def test_the_model_is_torchs_encoder_logits_loss_and_all_gradients(random_gpt):
    noise = generator(1, "step 06", "tokens")
    idx, targets = torch.randint(13, (2, 2, 7), generator=noise)
    logits, loss = random_gpt(idx, targets)
    reference = torch_logits(random_gpt, idx)
    assert tuple(logits.shape) == (2, 7, 13)
    assert_close(logits, reference, 1e-12)
    by_hand = -reference.log_softmax(-1).gather(-1, targets[..., None]).mean()
    assert_close(loss, by_hand, 1e-12)
    parameters = tuple(random_gpt.parameters())
    ours = torch.autograd.grad(loss, parameters)
    theirs = torch.autograd.grad(by_hand, parameters)
    for mine, its in zip(ours, theirs):
        assert_close(mine, its, 1e-12)


def test_the_models_logits_depend_on_no_later_token(random_gpt):
    idx = torch.randint(13, (1, 7), generator=generator(1, "causal"))
    start = random_gpt.embed(idx).detach().requires_grad_()
    random_gpt.embed = lambda idx: start  # ids have no gradient: differentiate by the vectors
    for t in range(7):
        (gradient,) = torch.autograd.grad(random_gpt(idx)[0][0, t].sum(), start)
        reached = gradient[0].norm(dim=-1)
        assert torch.equal(reached[t + 1 :], torch.zeros(6 - t, dtype=torch.float64))
        assert (reached[: t + 1] > 0).all()


def test_a_context_that_is_too_long_is_refused(random_gpt):
    with pytest.raises(ValueError, match="10 tokens don't fit a block_size of 9"):
        random_gpt(torch.zeros(1, 10, dtype=torch.long))


def test_a_layer_holds_twelve_c_squared_and_thirteen_c(gpt):
    sizes = {"block_size": 9, "n_heads": 2, "d_model": 10}
    two, three = (gpt.GPT(gpt.GPTConfig(n_layers=n, **sizes), 13) for n in (2, 3))
    assert gpt.count_parameters(three) - gpt.count_parameters(two) == 12 * 10 * 10 + 13 * 10


# ---------------------------------------------------------------- 07: the tie


def test_the_matrix_is_about_half_of_the_untied_model(gpt):
    with torch.device("meta"):
        model = gpt.GPT(gpt.GPTConfig(block_size=256, n_layers=4, n_heads=4, d_model=128), 50_304)
    matrix = model.token_embedding.weight.numel()
    assert matrix == 50_304 * 128
    assert 0.45 < matrix / (gpt.count_parameters(model) + matrix) < 0.5


def tied_in_float64(std=0.3):
    page = step(7)
    cfg = page.GPTConfig(block_size=9, n_layers=2, n_heads=2, d_model=10)
    model = page.GPT(cfg, vocab_size=13).double()
    for name, p in model.named_parameters():
        nn.init.normal_(p, std=std, generator=generator(1, "step 07", name))
    return model


def test_the_tied_gradient_is_the_sum_of_two_uses_neither_zero(gpt):
    tied = tied_in_float64()
    two = copy.deepcopy(tied)
    two.lm_head.weight = nn.Parameter(two.lm_head.weight.detach().clone())
    idx, targets = torch.randint(13, (2, 2, 7), generator=generator(1, "tie"))
    for model in (tied, two):
        model(idx, targets)[1].backward()
    as_embedding = two.token_embedding.weight.grad
    as_head = two.lm_head.weight.grad
    assert_close(tied.token_embedding.weight.grad, as_embedding + as_head, 1e-12)
    assert as_embedding.any() and as_head.any()
    assert gpt.count_parameters(two) - gpt.count_parameters(tied) == 13 * 10


def test_each_way_to_lose_the_tie_keeps_the_logits_and_is_caught():
    page = step(7)
    idx = torch.randint(13, (2, 7), generator=generator(1, "idx"))
    whole = page.small_model()
    models = page.lose_the_tie()
    assert len(models) == 4
    for model in models.values():
        assert torch.equal(model(idx)[0], whole(idx)[0])
        with pytest.raises(ValueError, match="the tie is lost"):
            page.check_tie(model)


def test_of_two_values_in_a_checkpoint_torch_keeps_the_last():
    page = step(7)
    state = page.checkpoint(page.small_model())
    state["token_embedding.weight"] += 1.0
    other = tied_in_float64(std=0.1).float()
    with pytest.raises(ValueError, match="two values"):
        page.check_tie(other, state)
    other.load_state_dict(state)
    assert torch.equal(other.token_embedding.weight, state["lm_head.weight"])


def test_deepcopy_of_the_whole_load_and_moves_keep_the_tie():
    page = step(7)
    loaded = copy.deepcopy(page.small_model())
    loaded.load_state_dict(page.checkpoint(page.small_model()))
    for model in (loaded, tied_in_float64().float(), tied_in_float64().to("cpu", torch.bfloat16)):
        page.check_tie(model)


# ---------------------------------------------------------------- 08 and 09: the start


def untie(model):
    model.lm_head = nn.Linear(model.cfg.d_model, model.vocab_size, bias=False)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("d_model", [64, 128, 256])
@pytest.mark.parametrize("std", [0.01, 0.02, 0.05, 0.1])
def test_the_first_loss_is_ln_v_and_half_d_sigma_squared_more(d_model, std, tied):
    page = step(8)
    model = page.GPT(page.GPTConfig(d_model=d_model), 4096)
    if not tied:
        untie(model)
    page.start_small(model, seed=1, std=std)
    formula = math.log(4096) + d_model * std**2 / 2
    assert page.first_loss_by_formula(4096, d_model, std) == pytest.approx(formula, abs=1e-12)
    assert page.first_loss(model) == pytest.approx(formula, abs=0.03)


def test_torchs_own_start_is_far_off_if_tied_and_near_if_not():
    """Tied: the own token's logit, d/√2, is lost to the 47 others. Untied: uniform weights in
    ±1/√d have variance 1/(3d), and d·σ²/2 is 1/6."""
    page = step(8)
    torch.manual_seed(1)
    tied = page.GPT(page.GPTConfig(), 48)
    torch.manual_seed(1)
    untied = page.GPT(page.GPTConfig(), 48)
    untie(untied)
    assert page.first_loss(tied) == pytest.approx(64 / math.sqrt(2) * 47 / 48, abs=1.0)
    assert page.first_loss(untied) == pytest.approx(math.log(48) + 1 / 6, abs=0.1)


def first_gradient_over_last(model, seed):
    """How many times as large the first block's gradient is as the last block's."""
    idx = torch.randint(95, (4, 32), generator=generator(seed, "tokens"))
    targets = torch.randint(95, (4, 32), generator=generator(seed, "targets"))
    model(idx, targets)[1].backward()
    first = nn.utils.get_total_norm([p.grad for p in model.blocks[0].parameters()])
    last = nn.utils.get_total_norm([p.grad for p in model.blocks[-1].parameters()])
    return (first / last).item()


@pytest.mark.parametrize(
    ("scaled", "growth_from", "growth_to", "gradient_from", "gradient_to"),
    [(True, 0.9, 1.1, 0.5, 3.0), (False, 4.0, 12.0, 5.0, 50.0)],
)
def test_growth_and_gradient_of_100_layers(
    scaled, growth_from, growth_to, gradient_from, gradient_to
):
    """Three seeds: growth in 100 layers over growth in 2, and the first block's gradient."""
    page = step(9)
    start = page.init_parameters if scaled else page.start_small
    ratios = []
    gradients = []
    for seed in (1, 2, 3):
        flat = page.sizes_of_stream(2, start, seed)
        deep = page.sizes_of_stream(100, start, seed)
        ratios.append(deep[-1] / deep[0] / (flat[-1] / flat[0]))
        model = page.GPT(page.GPTConfig(n_layers=100, d_model=128), 95)
        start(model, seed)
        gradients.append(first_gradient_over_last(model, seed))
    assert growth_from < verdict.interval(ratios).mean < growth_to
    assert gradient_from < max(gradients) < gradient_to


@pytest.mark.parametrize("n_layers", [4, 12])
def test_two_writers_in_each_layer_start_smaller(n_layers):
    page = step(9)
    model = page.GPT(page.GPTConfig(n_layers=n_layers, d_model=128), 95)
    page.init_parameters(model, seed=1)
    writers = [m.weight for m in model.modules() if isinstance(m, page.ResidualWriter)]
    assert len(writers) == 2 * n_layers
    pooled = torch.cat([w.flatten() for w in writers]).std().item()
    assert pooled == pytest.approx(0.02 / math.sqrt(2 * n_layers), abs=2e-5)


def test_adding_layers_moves_no_other_layers_start():
    page = step(9)
    five, twelve = (page.GPT(page.GPTConfig(n_layers=n, d_model=128), 95) for n in (5, 12))
    for model in (five, twelve):
        page.init_parameters(model, seed=1)
    name = "blocks.3.attn.qkv.weight"
    assert torch.equal(five.get_parameter(name), twelve.get_parameter(name))


# ---------------------------------------------------------------- 10 and 11: training and writing


def test_the_first_loss_in_training_is_the_formulas():
    corpus = data.load_corpus("docs", "char", 32)
    losses = step(10).train_by_hand(step(10).fresh_model(corpus, 1), corpus, steps=1, seed=1)
    formula = math.log(corpus.vocab_size) + 64 * 0.02**2 / 2
    assert losses[0] == pytest.approx(formula, abs=0.2)


def test_a_hundred_steps_on_one_batch_learn_it_by_heart():
    corpus = data.load_corpus("docs", "char", 32)
    windows = corpus.train[: 4 * 33].view(4, 33)
    model = step(10).fresh_model(corpus, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(100):
        _, loss = model(windows[:, :-1], windows[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1


def test_the_two_tables_are_counted_right():
    """Four tokens: a b a b in training, so after a comes b; one is added to each count."""
    corpus = data.Corpus("t", "", 8, data.CharTokenizer("ab"), torch.tensor([0, 1, 0, 1]), None)
    corpus.validation = torch.tensor([0, 1])
    assert step(10).loss_of_letter_table(corpus) == pytest.approx(-math.log(3 / 6))
    assert step(10).loss_of_pair_table(corpus) == pytest.approx(-math.log(3 / 4))


def test_temperature_zero_takes_the_models_likeliest_token_twenty_times():
    page = step(11)
    corpus = data.load_corpus("docs", "char", 32)
    model = page.step_10.fresh_model(corpus, seed=1)
    page.step_10.train_by_hand(model, corpus, steps=30, seed=1)
    prompt = corpus.validation[None, :32]
    idx = prompt
    for _ in range(20):
        logits, _ = model(idx[:, -32:])
        likeliest = logits[0, -1].argmax()
        idx = torch.cat((idx, likeliest[None, None]), dim=1)
    assert torch.equal(page.generate(model, prompt, 20, 0.0), idx)
    first, again, other = (
        page.generate(model, prompt, 20, generator=generator(seed, "sample")) for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(first[:, :32], prompt)


LOGITS = torch.tensor([0.3, 2.0, -1.0, 1.0, 0.0])


class SameLogits(nn.Module):
    """Stands in for a model: after every context the same logits, so that draws can be counted."""

    def __init__(self, logits):
        super().__init__()
        self.logits = logits
        self.cfg = step(10).GPTConfig(block_size=5)

    def forward(self, idx):
        return self.logits.expand(*idx.shape, -1), None


def shares_drawn(**dials):
    """How often each token comes in 40,000 draws."""
    contexts = torch.zeros(40_000, 3, dtype=torch.int64)
    draws = generator(1, "draws")
    drawn = step(11).generate(SameLogits(LOGITS), contexts, 1, generator=draws, **dials)
    return torch.bincount(drawn[:, -1], minlength=len(LOGITS)) / 40_000


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_as_often_as_softmax_says(temperature):
    p = LOGITS.double().div(temperature).exp()
    p /= p.sum()
    standard_error = (p * (1 - p) / 40_000).sqrt().max().item()
    drawn = shares_drawn(temperature=temperature)
    assert_close(drawn.double(), p, 5 * standard_error)


def test_top_k_from_one_to_more_than_there_are():
    two = shares_drawn(top_k=2)
    assert two.nonzero().flatten().tolist() == [1, 3]
    assert (two[1] / two[3]).item() == pytest.approx(math.e, abs=0.1)
    assert shares_drawn(top_k=1)[1] == 1.0
    assert shares_drawn(temperature=0.0)[1] == 1.0
    assert torch.equal(shares_drawn(top_k=99), shares_drawn())


def test_it_writes_on_beyond_block_size():
    page = step(11)
    start = torch.zeros(1, 1, dtype=torch.int64)
    assert page.generate(SameLogits(LOGITS), start, 12, 0.0)[0].tolist() == [0] + [1] * 12


@pytest.mark.parametrize(
    ("dials", "length", "says"),
    [({"temperature": -1.0}, 3, "-1.0"), ({"top_k": 0}, 3, "top_k 0"), ({}, 0, "0 tokens")],
)
def test_wrong_dials_and_an_empty_context_are_refused(dials, length, says):
    page = step(11)
    context = torch.zeros(1, length, dtype=torch.int64)
    with pytest.raises(ValueError, match=says):
        page.generate(SameLogits(LOGITS), context, 1, **dials)


# ---------------------------------------------------------------- 12: byte pairs


def test_learned_merges_are_the_textbooks():
    """The example of Sennrich et al. 2016, without their end-of-word mark.

    "low" five times, "lower" twice, "newest" six, "widest" three: es and st tie at nine, and so do
    two more later. The bytes that come first win.
    """
    text = (
        "low low low low low lower lower newest newest newest newest newest newest "
        "widest widest widest"
    )
    merges = step(12).learn_merges([text.replace(" ", "\n")], 4)
    assert merges == [b"es", b"est", b"lo", b"low"]
    assert step(12).learn_plainly([text.replace(" ", "\n")], 4) == merges
    assert step(12).learn_merges(["abc"], 9) == [b"ab", b"abc"]  # then nothing is left to join


def test_the_stored_table_begins_with_the_bytes_and_holds_no_token_twice():
    table = data.bpe4k_encoding()
    known = [table.decode_single_token_bytes(i) for i in range(table.n_vocab)]
    assert known[:256] == [bytes([b]) for b in range(256)]
    assert len(set(known)) == len(known) == 4096


def test_learned_merges_encode_as_tiktoken_does():
    """Pairs joined by hand in the order of learning are what tiktoken's own merging gives."""
    page = step(12)
    merges = page.learn_merges(data.torch_docs()[1:], 60)
    ranks = {bytes([b]): b for b in range(256)}
    ranks |= {merge: 256 + i for i, merge in enumerate(merges)}
    encoding = tiktoken.Encoding(
        "test", pat_str=data.BPE4K_PATTERN, mergeable_ranks=ranks, special_tokens={}
    )
    for piece in (" returned", " tensor", "dimension", "::\n\n", "123"):
        word = [bytes([b]) for b in piece.encode("utf-8")]
        while True:
            pairs = [(ranks[a + b], (a, b)) for a, b in zip(word, word[1:]) if a + b in ranks]
            if not pairs:
                break
            word = page.join(word, min(pairs)[1])
        assert [ranks[part] for part in word] == encoding.encode_ordinary(piece)


def test_write_vocabulary_writes_the_bytes_and_then_the_pairs(tmp_path, monkeypatch):
    """On a small text; the whole source code takes minutes. It comes in a dict, as that does."""
    assert all(name.endswith(".py") for name in data.torch_source())
    monkeypatch.setattr(data, "BPE4K_FILE", tmp_path / "small.tiktoken")
    monkeypatch.setattr(data, "torch_source", lambda: {"a.py": "low\n" * 5 + "newest\n" * 6})
    step(12).write_vocabulary(258)
    encoding = data.bpe4k_encoding()
    assert encoding.n_vocab == 258
    learned = [encoding.decode_single_token_bytes(i) for i in (0, 255, 256, 257)]
    assert learned == [b"\x00", b"\xff", b"es", b"ew"]  # "ew" and "est" tie at six


# ---------------------------------------------------------------- 13 and 14: sizes, AdamW


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("small", 124_439_808),
        ("medium", 354_823_168),
        ("large", 774_030_080),
        ("XL", 1_557_611_200),
    ],
)
def test_the_four_gpt2_models_have_their_published_sizes(name, published):
    parts = step(13).count_by_formula(step(13).GPT2[name], 50_257)
    assert sum(parts.values()) == published


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_adamw_by_hand_is_torchs(weight_decay):
    start = normal(generator(1, "p"), 5, 3)
    by_hand = step(14).AdamWByHand(start.clone(), lr=0.1, weight_decay=weight_decay)
    p = nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([p], lr=0.1, weight_decay=weight_decay)
    for t in range(4):
        p.grad = normal(generator(1, "gradient", t), 5, 3)
        by_hand.step(p.grad)
        optimizer.step()
        assert_close(by_hand.p, p.detach(), 1e-12)
