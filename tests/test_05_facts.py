"""Sizes and starts that are known from elsewhere: published counts, closed forms, laws.

What is trained is in the chapters' expected/; here every value is one of a fresh model.
"""

import copy
import math
from dataclasses import replace

import pytest
import torch
import torch.nn as nn

from shared.randomness import generator

# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("norm", "mlp", "count"),
    [
        ("layernorm", "gelu", 105_216),
        ("rmsnorm", "gelu", 104_896),
        ("layernorm", "swiglu", 104_320),
        ("rmsnorm", "swiglu", 104_000),
    ],
)
def test_the_four_tiny_models(gpt, modern, norm, mlp, count):
    cfg = modern.ModernConfig(block_size=32, n_layers=2, n_heads=4, d_model=64, norm_type=norm, mlp_type=mlp)
    model = modern.ModernGPT(cfg, 48)
    assert gpt.count_parameters(model) == count
    if (norm, mlp) == ("layernorm", "gelu"):  # chapter 05's own class is the same model
        assert gpt.count_parameters(gpt.GPT(gpt.GPTConfig(), 48)) == count
    if mlp == "swiglu":
        assert model.blocks[0].mlp.down_proj.in_features == 170


def test_gpt2_small_tied_and_untied(gpt):
    with torch.device("meta"):
        model = gpt.GPT(gpt.GPTConfig(block_size=1024, n_layers=12, n_heads=12, d_model=768), 50_257)
        tied = gpt.count_parameters(model)
        model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))
    assert (tied, gpt.count_parameters(model)) == (124_439_808, 163_037_184)


def test_the_eight_thirds_rule(modern):
    assert modern.swiglu_hidden(768) == 2048
    with torch.device("meta"):
        numbers = sum(p.numel() for p in modern.SwiGLU(768).parameters())
    assert numbers == 3 * 768 * 2048 == 8 * 768**2 == 4_718_592
    assert modern.swiglu_hidden(256, multiple_of=64) == 704  # rounded up, and no longer "the same size"
    assert 3 * 256 * 704 / (8 * 256**2) == 1.03125


def test_half_of_a_classic_13_million_model_is_embedding(gpt):
    with torch.device("meta"):
        model = gpt.GPT(gpt.GPTConfig(block_size=128, n_layers=1, n_heads=4, d_model=128), 50_304)
        matrix = model.token_embedding.weight.numel()
        model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))
    assert matrix == 6_438_912
    assert 13e6 < gpt.count_parameters(model) < 13.5e6 and 0.45 < matrix / gpt.count_parameters(model) < 0.5


def test_a_sparse_layer_holds_four_times_what_it_uses(modern):
    cfg = modern.ModernConfig(n_heads=12, d_model=768, mlp_type="moe", n_experts=8, top_k=2)
    with torch.device("meta"):
        moe = modern.MoE(cfg)
    total = sum(p.numel() for p in moe.parameters())
    one_expert = sum(p.numel() for p in moe.experts[0].parameters())
    assert total == 37_754_880
    assert moe.router.weight.numel() + cfg.top_k * one_expert == 9_443_328


@pytest.mark.parametrize("d_model", [64, 128, 768])
def test_the_mlp_holds_two_thirds_of_a_block(gpt, d_model):
    with torch.device("meta"):
        block = gpt.Block(gpt.GPTConfig(d_model=d_model))
    share = gpt.count_parameters(block.mlp) / gpt.count_parameters(block)
    assert share == pytest.approx(2 / 3, abs=0.01)


# ---------------------------------------------------------------- the tie


def small(gpt, **shape):
    model = gpt.GPT(replace(gpt.GPTConfig(block_size=9, n_layers=2, n_heads=2, d_model=10), **shape), 13)
    gpt.init_parameters(model, seed=1)
    return model


def file_of(model):
    """A checkpoint whose tensors share nothing."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_the_tie_outlives_build_load_move_and_deepcopy(gpt):
    model = small(gpt)
    loaded = small(gpt)
    loaded.load_state_dict(file_of(model))
    kept = [
        model,
        loaded,
        copy.deepcopy(model),
        copy.deepcopy(model).to(torch.float64),
        copy.deepcopy(model).bfloat16(),
    ]
    for one in kept:
        assert one.lm_head.weight is one.token_embedding.weight
        gpt.check_tie(one)
    gpt.check_tie(model, file_of(model))


def test_each_silent_loss_of_the_tie_is_caught(gpt):
    model = small(gpt)
    assigned = small(gpt)
    assigned.load_state_dict(file_of(model), assign=True)
    with torch.device("meta"):
        emptied = gpt.GPT(model.cfg, 13)
    emptied.to_empty(device="cpu").load_state_dict(file_of(model))
    one_sided = copy.deepcopy(model)
    one_sided.lm_head = copy.deepcopy(one_sided.lm_head)
    idx = torch.arange(7)[None]
    for broken in (assigned, emptied, one_sided):
        assert torch.equal(broken(idx)[0], model(idx)[0])  # nothing to be seen yet
        with pytest.raises(ValueError, match="the tie is lost"):
            gpt.check_tie(broken)
    two_values = file_of(model)
    two_values["lm_head.weight"][3, 5] += 0.25
    with pytest.raises(ValueError, match=r"two values.* 0\.25 apart"):
        gpt.check_tie(model, two_values)
    with torch.device("meta"), pytest.raises(ValueError, match="the tie is lost"):
        on_meta = gpt.GPT(model.cfg, 13)
        on_meta.lm_head.weight = nn.Parameter(torch.empty_like(on_meta.lm_head.weight))
        gpt.check_tie(on_meta)


# ---------------------------------------------------------------- the first loss


@torch.no_grad()
def first_loss(model, vocab_size, batch=16):
    """On random tokens, the mean over every possible target: the loss that even targets would give."""
    idx = torch.randint(vocab_size, (batch, model.cfg.block_size), generator=generator(1, "tokens"))
    logits, _ = model(idx)
    return (logits.logsumexp(-1) - logits.mean(-1)).mean().item(), (logits.argmax(-1) == idx).double().mean().item()


@pytest.mark.parametrize(
    ("vocab_size", "cost"), [(48, 3.871201), (65, 4.174387), (4096, 8.317766), (50_257, 10.824905)]
)
def test_guessing_evenly_costs_ln_v_and_every_variant_starts_there(gpt, modern, vocab_size, cost):
    assert math.log(vocab_size) == pytest.approx(cost, abs=5e-7)
    variants = [
        {"norm_type": norm, "mlp_type": mlp, "position_type": position}
        for norm, mlp, position in (
            ("layernorm", "gelu", "learned"),
            ("rmsnorm", "gelu", "rope"),
            ("layernorm", "swiglu", "rope"),
            ("rmsnorm", "swiglu", "learned"),
            ("rmsnorm", "relu2", "none"),
            ("rmsnorm", "moe", "rope"),
        )
    ]
    for changes in variants if vocab_size < 5000 else variants[:1]:
        for std in (0.02, "fan_in"):
            model = modern.ModernGPT(modern.ModernConfig(**changes), vocab_size)
            gpt.init_parameters(model, 1, std)
            idx, targets = torch.randint(vocab_size, (2, 8, 32), generator=generator(1, vocab_size))
            with torch.no_grad():
                assert model(idx, targets)[1].item() == pytest.approx(cost, abs=0.25), (changes, std)


@pytest.mark.parametrize(("d_model", "std"), [(64, 0.02), (128, 0.05), (256, 0.02), (256, 0.1)])
@pytest.mark.parametrize("tied", [True, False])
def test_the_first_loss_is_ln_v_plus_half_d_sigma_squared(gpt, d_model, std, tied):
    model = gpt.GPT(gpt.GPTConfig(d_model=d_model), 4096)
    if not tied:
        model.lm_head.weight = nn.Parameter(torch.empty(4096, d_model))
    gpt.init_parameters(model, 1, std)
    assert first_loss(model, 4096)[0] == pytest.approx(math.log(4096) + d_model * std**2 / 2, abs=0.03)


def test_gpt2s_width_and_vocabulary_start_at_10_98(gpt):
    """ln 50,257 + 768 · 0.02² / 2 = 10.979; a draw of random targets measured 10.96."""
    model = gpt.GPT(gpt.GPTConfig(block_size=16, n_layers=2, n_heads=12, d_model=768), 50_257)
    gpt.init_parameters(model, 1)
    assert math.log(50_257) + 768 * 0.02**2 / 2 == pytest.approx(10.979, abs=5e-4)
    assert first_loss(model, 50_257, batch=2)[0] == pytest.approx(10.979, abs=0.03)


def test_torchs_default_embeddings_start_near_42_under_a_tied_head(gpt):
    """N(0, 1) for both embeddings: the own token's logit is about d/√2 = 45, and nearly every target is another one.
    48 rows of 64 numbers leave ± 2 to chance."""
    model = gpt.GPT(gpt.GPTConfig(), 48)
    for name in ("token_embedding", "position_embedding"):
        nn.init.normal_(model.get_submodule(name).weight, generator=generator(1, name, "N(0, 1)"))
    loss, copies = first_loss(model, 48)
    assert loss == pytest.approx(42, abs=3)
    assert copies > 0.99  # it predicts the current token again


def test_small_tied_embeddings_copy_their_input_although_the_loss_is_right(gpt):
    """ "Nearly uniform" holds for the loss, not for the argmax: at most positions, up to d = 256."""
    for d_model in (64, 128, 256):
        model = gpt.GPT(gpt.GPTConfig(d_model=d_model), 48)
        gpt.init_parameters(model, 1)
        loss, copies = first_loss(model, 48)
        assert loss == pytest.approx(math.log(48), abs=0.25)
        assert copies > 0.5, d_model
    untied = gpt.GPT(gpt.GPTConfig(), 48)
    untied.lm_head.weight = nn.Parameter(torch.empty(48, 64))
    gpt.init_parameters(untied, 1)
    assert first_loss(untied, 48)[1] < 0.1


def test_unshifted_targets_start_below_ln_v(gpt):
    """Too good is a symptom too."""
    model = gpt.GPT(gpt.GPTConfig(), 95)
    gpt.init_parameters(model, 1)
    idx = torch.randint(95, (32, 33), generator=generator(1, "idx"))
    with torch.no_grad():
        unshifted, shifted = model(idx[:, :-1], idx[:, :-1])[1].item(), model(idx[:, :-1], idx[:, 1:])[1].item()
    assert unshifted < math.log(95) - 0.5 < math.log(95) - 0.1 < shifted


# ---------------------------------------------------------------- depth


@pytest.mark.parametrize(("n_layers", "std"), [(4, 0.0070711), (12, 0.0040825)])
@pytest.mark.parametrize("mlp_type", ["gelu", "swiglu", "moe"])
def test_every_matrix_that_writes_into_the_stream_is_scaled(gpt, modern, n_layers, std, mlp_type):
    """By type: attention's output, the MLP's second matrix, each expert's down_proj; and nothing else."""
    cfg = modern.ModernConfig(n_layers=n_layers, d_model=96, mlp_type=mlp_type, n_experts=3)
    model = modern.ModernGPT(cfg, 31)
    gpt.init_parameters(model, 1)
    writers = {name for name, module in model.named_modules() if isinstance(module, gpt.ResidualWriter)}
    ends = {"gelu": "mlp.proj", "swiglu": "mlp.down_proj"}.get(mlp_type)
    expected = {f"blocks.{i}.attn.proj" for i in range(n_layers)}
    for i in range(n_layers):
        expected |= {f"blocks.{i}.{ends}"} if ends else {f"blocks.{i}.mlp.experts.{e}.down_proj" for e in range(3)}
    assert writers == expected
    for name, p in model.named_parameters():
        if p.dim() == 2 and p.numel() > 5000:
            wanted = std if name.removesuffix(".weight") in writers else 0.02
            assert p.std().item() == pytest.approx(wanted, rel=0.05), name


@pytest.mark.parametrize("scaled", [True, False])
def test_the_first_loss_cannot_tell_whether_the_writers_are_scaled(gpt, scaled):
    """The last norm hides the stream's size, so the law holds at 48 layers either way."""
    model = gpt.GPT(gpt.GPTConfig(n_layers=48, d_model=128), 512)
    gpt.init_parameters(model, 1)
    with torch.no_grad():
        for module in model.modules():
            if not scaled and isinstance(module, gpt.ResidualWriter):
                module.weight *= math.sqrt(2 * 48)
    assert first_loss(model, 512)[0] == pytest.approx(math.log(512) + 128 * 0.02**2 / 2, abs=0.03)


@torch.no_grad()
def growth(gpt, modern, n_layers, scaled, seed):
    """RMS of the stream behind the last layer over that before the first: RMSNorm, SwiGLU, RoPE, d 128, 256 tokens."""
    model = modern.ModernGPT(
        modern.ModernConfig(block_size=256, n_layers=n_layers, d_model=128, position_type="rope"), 95
    )
    gpt.init_parameters(model, seed)
    for module in model.modules():
        if not scaled and isinstance(module, gpt.ResidualWriter):
            module.weight *= math.sqrt(2 * n_layers)
    start = x = model.embed(torch.randint(95, (2, 256), generator=generator(seed, "tokens")))
    for block in model.blocks:
        x = block(x)
    return (x.square().mean() / start.square().mean()).sqrt().item()


@pytest.mark.parametrize(
    ("n_layers", "scaled", "times"),
    [
        (2, True, 1.13),
        (8, True, 1.16),
        (32, True, 1.25),
        (128, True, 1.23),
        (2, False, 1.6),
        (8, False, 5.7),
        (32, False, 13.9),
        (128, False, 27.4),
    ],
)
def test_the_stream_keeps_its_size_at_any_depth_only_if_its_writers_are_scaled(gpt, modern, n_layers, scaled, times):
    """Against values measured by another implementation; two seeds here, one there, hence 10 %."""
    seeds = (1, 2) if n_layers < 128 else (1,)
    measured = sum(growth(gpt, modern, n_layers, scaled, seed) for seed in seeds) / len(seeds)
    assert measured == pytest.approx(times, rel=0.10)
