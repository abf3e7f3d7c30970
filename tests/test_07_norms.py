"""Chapter 07's norms and hidden-state statistics: known values, torch's own layers, float64 where float32 is short."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from shared import chapters, data, training
from shared.randomness import generator

step_01 = chapters.load_step(7, 1)

SHAPES = ((2, 3, 5), (4, 1, 7), (1, 6, 33), (11,))


def noise(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=generator(7, "norms", shape), dtype=dtype)


def with_random_gains(ours, theirs):
    draw = generator(7, "gains")
    for p in ours.parameters():
        nn.init.normal_(p, generator=draw)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def pairs(modern, d_model, dtype):
    """Each hand-written norm beside torch's, with the same random gains and biases."""
    yield with_random_gains(modern.RMSNorm(d_model).to(dtype), nn.RMSNorm(d_model, eps=1e-5, dtype=dtype))
    yield with_random_gains(step_01.LayerNorm(d_model).to(dtype), nn.LayerNorm(d_model, eps=1e-5, dtype=dtype))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_and_gradients_are_torchs(modern, shape):
    for ours, theirs in pairs(modern, shape[-1], torch.float64):
        upstream = noise(*shape, dtype=torch.float64).flip(-1)
        seen = []
        for norm in (ours, theirs):
            x = noise(*shape, dtype=torch.float64).requires_grad_()
            y = norm(x)
            seen.append((y, *torch.autograd.grad(y, [x, *norm.parameters()], upstream)))
        for mine, reference in zip(*seen, strict=True):
            assert mine.shape == reference.shape and (mine - reference).abs().max() < 1e-12


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layernorms_gradient_by_hand_is_autograds(shape):
    _, theirs = with_random_gains(step_01.LayerNorm(shape[-1]).double(), nn.LayerNorm(shape[-1], dtype=torch.float64))
    x, dy = noise(*shape, dtype=torch.float64).requires_grad_(), noise(*shape, dtype=torch.float64).flip(-1)
    reference = torch.autograd.grad(theirs(x), [x, theirs.weight, theirs.bias], dy)
    with torch.no_grad():
        _, normalized, inverse_std = step_01.layernorm(x, theirs.weight, theirs.bias)
        ours = step_01.layernorm_backward(dy, normalized, inverse_std, theirs.weight)
    for mine, theirs_ in zip(ours, reference, strict=True):
        assert mine.shape == theirs_.shape and (mine - theirs_).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rmsnorm_is_within_a_rounding_of_float64_in_every_dtype(modern, dtype):
    ours, theirs = next(pairs(modern, 40, dtype))
    x = noise(3, 9, 40).to(dtype)
    exact = F.rms_norm(x.double(), (40,), ours.weight.double(), 1e-5)
    error = [((norm(x).double() - exact) / exact).abs().max().item() for norm in (ours, theirs)]
    assert ours(x).dtype == dtype
    assert error[0] <= max(1.01 * torch.finfo(dtype).eps / 2, 2 * error[1] if dtype == torch.float32 else 0)


def test_a_float32_gain_keeps_the_inputs_dtype(modern):
    assert modern.RMSNorm(6)(noise(2, 6).bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(("mean", "std"), [(1e3, 1.0), (0.0, 1e-3), (1e3, 1e-3), (0.0, 1e4)])
def test_hard_inputs_are_as_near_to_float64_as_torchs(modern, mean, std):
    x = mean + std * noise(8, 768)
    for ours, theirs in pairs(modern, 768, torch.float32):
        exact = theirs.double()(x.double())
        error, torchs = ((norm(x).double() - exact).abs().max() for norm in (ours, theirs.float()))
        assert error <= 4 * torchs + 1e-6


def test_known_values(modern):
    rmsnorm, layernorm = modern.RMSNorm(4), step_01.LayerNorm(4)
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert rmsnorm(x).tolist() == pytest.approx([0.3651481, 0.7302963, 1.0954444, 1.4605925], abs=1e-7)
    for norm in (layernorm, modern.make_norm("layernorm", 4)):
        assert norm(x).tolist() == pytest.approx([-1.3416354, -0.4472118, 0.4472118, 1.3416354], abs=2e-7)
    assert step_01.LayerNorm(2)(torch.tensor([0.0, 2.0])).tolist() == pytest.approx([-0.999995, 0.999995], abs=1e-7)


def test_eps_holds_a_tiny_vector_and_leaving_it_to_torch_does_not(modern):
    x = torch.full((768,), 1e-4)
    assert modern.RMSNorm(768)(x)[5].item() == pytest.approx(0.0316070, abs=1e-7)
    assert nn.RMSNorm(768)(x)[5].item() == pytest.approx(0.278, abs=1e-3)  # torch's eps=None: so always pass it


def test_large_float16_survives_where_the_naive_form_is_silently_zero(modern):
    x = torch.full((2, 768), 3e4, dtype=torch.float16)
    assert torch.equal(modern.RMSNorm(768)(x), torch.ones_like(x))
    assert torch.equal(modern.RMSNorm(768).half()(x), torch.ones_like(x))
    naive = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    assert torch.equal(naive, torch.zeros_like(x))


def test_rmsnorm_of_a_centred_vector_is_layernorm(modern):
    x = noise(3, 5, 17, dtype=torch.float64)
    rmsnorm, layernorm = modern.RMSNorm(17).double(), nn.LayerNorm(17, eps=1e-5, dtype=torch.float64)
    assert (rmsnorm(x - x.mean(-1, keepdim=True)) - layernorm(x)).abs().max() < 1e-12
    assert (layernorm(x + 5) - layernorm(x)).abs().max() < 1e-12
    assert (rmsnorm(x + 5) - rmsnorm(x)).abs().max() > 0.1


def test_zero_stays_zero_with_a_finite_gradient(modern):
    for norm in (modern.RMSNorm(6), step_01.LayerNorm(6)):
        x = torch.zeros(2, 6, requires_grad=True)
        y = norm(x)
        y.sum().backward()
        assert torch.equal(y, torch.zeros(2, 6)) and x.grad.isfinite().all() and norm.weight.grad.isfinite().all()


def test_all_norms_of_gpt2_are_a_twentieth_of_a_percent_of_its_work():
    layernorms, parameters = 2 * 12 + 1, 124_439_808
    assert layernorms * 7 * 768 / (2 * parameters) == pytest.approx(0.00054, abs=5e-6)


# ---------------------------------------------------------------- hidden states


def kurtosis(modern, x):
    return modern.tensor_stats(x)["kurtosis"]


def test_statistics_of_known_distributions(modern):
    assert kurtosis(modern, torch.tensor([1.0, -1.0] * 9)) == 1
    assert kurtosis(modern, torch.eye(576)[7]) == pytest.approx(576 - 2 + 1 / 575, abs=1e-9)
    assert kurtosis(modern, torch.eye(576)[7]) == pytest.approx(574.002, abs=5e-4)
    n = 1_000_000
    assert kurtosis(modern, torch.randn(n, generator=generator(1))) == pytest.approx(3, abs=4 * math.sqrt(24 / n))
    stats = modern.tensor_stats(torch.tensor([[1.0, 2.0], [3.0, 6.0]]))
    assert stats == pytest.approx({"mean": 3, "var": 3.5, "min": 1, "max": 6, "kurtosis": 24.5 / 3.5**2})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("value", [0.0, 0.1, -3e4])
def test_a_constant_tensor_has_finite_statistics(modern, value, dtype):
    x = torch.full((7, 11, 13), value, dtype=dtype)
    stats = modern.tensor_stats(x)
    assert all(map(math.isfinite, stats.values())) and stats["min"] == stats["max"] == x[0, 0, 0]
    if dtype != torch.float64:  # there the sum itself may round
        assert (stats["var"], stats["kurtosis"]) == (0, 0) and stats["mean"] == stats["min"]


def test_half_precision_is_summed_up_in_a_wider_type(modern):
    x = torch.tensor([6e4, -6e4] * 8, dtype=torch.float16)
    assert modern.tensor_stats(x) == pytest.approx({"mean": 0, "var": 3.6e9, "min": -6e4, "max": 6e4, "kurtosis": 1})
    x = (1e4 + noise(5000)).to(torch.float32)  # a mean of squares minus a squared mean would be noise in float32
    assert modern.tensor_stats(x)["var"] == pytest.approx(x.double().var(unbiased=False).item(), rel=1e-9)


def small_model(modern, **config):
    model = modern.ModernGPT(modern.ModernConfig(block_size=9, n_layers=3, n_heads=2, d_model=12, **config), 95)
    modern.gpt.init_parameters(model, seed=3)
    return model


@pytest.mark.parametrize("norm_type", ["layernorm", "rmsnorm", "none"])
def test_hooks_see_the_stream_at_all_its_points(modern, norm_type):
    model = small_model(modern, norm_type=norm_type, position_type="rope")
    idx = torch.randint(95, (4, 7), generator=generator(1, "idx"))
    x = model.embed(idx)
    expected = {"embedding": x}
    for i, block in enumerate(model.blocks):
        expected[f"blocks.{i}.attn"] = x = x + block.attn(block.norm1(x))
        expected[f"blocks.{i}.mlp"] = x = x + block.mlp(block.norm2(x))
    seen = modern.stream_stats(model, idx)
    assert list(seen) == list(expected)
    for point, stats in seen.items():
        values = expected[point].detach().double()
        assert stats["var"] == pytest.approx(values.var(unbiased=False).item(), rel=1e-6)
        assert stats["max"] == pytest.approx(values.max().item(), rel=1e-6)


def test_the_hooks_are_gone_afterwards_and_also_when_the_pass_fails(modern):
    model = small_model(modern)
    modern.stream_stats(model, torch.zeros(1, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="10 tokens don't fit a block_size of 9"):
        modern.stream_stats(model, torch.zeros(1, 10, dtype=torch.int64))
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_watching_changes_no_loss_and_no_weight(modern):
    corpus = data.load_corpus("docs", "char", 9)
    corpus = replace(corpus, validation=corpus.validation[:200])
    experiment, ends = modern.FourWay(), {}
    for every in (0, 3):
        model = small_model(modern)
        settings = training.TrainingSettings(steps=14, batch_size=5, observe_every=every)
        history = training.train(model, corpus, settings, seed=2, observe=experiment.observe)
        ends[every] = (history, [p.detach().clone() for p in model.parameters()])
    watched, alone = ends[3][0], ends[0][0]
    assert watched.losses == alone.losses and watched.validation_loss == alone.validation_loss
    assert all(map(torch.equal, ends[3][1], ends[0][1]))
    assert [sample["step"] for sample in watched.observations] == [3, 6, 9, 12] and alone.observations == []
    assert all(len(sample["stream"]) == 7 for sample in watched.observations)
