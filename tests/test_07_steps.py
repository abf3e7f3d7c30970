"""What a reader of chapter 07's pages needn't see: more shapes and dtypes, hard inputs, wrong forms, closed values."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from shared import chapters, data, training
from shared.randomness import generator

gpt = chapters.load_build(5)
STEPS = {n: chapters.load_step(7, n) for n in range(1, 14)}


def noise(*shape, dtype=torch.float64):
    return torch.randn(shape, generator=generator(7, "steps", shape), dtype=dtype)


# ---------------------------------------------------------------- 01, 02, 11: norms


@pytest.mark.parametrize("shape", [(2, 3, 4), (5, 1, 7), (768,)], ids=str)
def test_layernorm_forward_and_all_gradients_to_the_last_digits(shape):
    theirs = nn.LayerNorm(shape[-1], eps=1e-5, dtype=torch.float64)
    for p in theirs.parameters():
        nn.init.normal_(p, generator=generator(1, "gains", shape))
    x = noise(*shape).requires_grad_()
    dy = noise(*shape).flip(-1)
    reference = theirs(x)
    reference.backward(dy)
    with torch.no_grad():
        y, normalized, inverse_std = STEPS[1].layernorm(x, theirs.weight, theirs.bias)
        dx, d_weight, d_bias = STEPS[1].layernorm_backward(dy, normalized, inverse_std, theirs.weight)
    assert (y - reference).abs().max() < 1e-13
    assert (dx - x.grad).abs().max() < 1e-13
    assert (d_weight - theirs.weight.grad).abs().max() < 1e-13
    assert (d_bias - theirs.bias.grad).abs().max() < 1e-13


def test_the_variance_is_divided_by_c():
    """[0, 2] -> ±1/√(1 + eps). Divided by C − 1 it would be ±0.7071."""
    y, _, _ = STEPS[1].layernorm(torch.tensor([0.0, 2.0]), torch.ones(2), torch.zeros(2))
    assert (y - torch.tensor([-1.0, 1.0]) / (1 + 1e-5) ** 0.5).abs().max() < 2e-7


def one_pass(x, eps=1e-5):
    """Wrong: the variance as mean(x²) − mean(x)², two large numbers whose difference is lost in float32."""
    mean = x.mean(-1, keepdim=True)
    return (x - mean) * torch.rsqrt(x.square().mean(-1, keepdim=True) - mean.square() + eps)


def unbiased_eps_outside(x, eps=1e-5):
    """Wrong: divided by C − 1, and eps added to the standard deviation instead of to the variance."""
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + eps)


def test_hard_inputs_tell_layernorm_from_its_two_famous_wrong_forms():
    x = torch.randn(6, 768, generator=generator(1, "step_01", "hard"))
    cases = {"mean": 1e3 + x, "std": 1e-3 * x, "both": 1e3 + 1e-3 * x}

    def error(norm, case):
        exact = F.layer_norm(case.double(), (768,), eps=1e-5)
        return (norm(case).double() - exact).abs().nan_to_num(nan=math.inf).max().item()

    theirs = nn.LayerNorm(768, eps=1e-5)
    for case in cases.values():
        assert error(STEPS[1].LayerNorm(768), case) <= 4 * error(theirs, case)
    assert error(one_pass, cases["mean"]) > 0.05
    assert error(unbiased_eps_outside, cases["std"]) > 0.5


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((2, 3, 4), torch.float32), ((5, 1, 7), torch.bfloat16), ((3, 2, 768), torch.float16)],
    ids=str,
)
def test_rmsnorm_and_its_gradients_are_within_two_roundings_of_torchs(shape, dtype):
    ours = STEPS[2].RMSNorm(shape[-1]).to(dtype)
    theirs = nn.RMSNorm(shape[-1], eps=1e-5, dtype=dtype)
    nn.init.normal_(ours.weight, generator=generator(1, "gains", shape))
    theirs.load_state_dict(ours.state_dict())
    dy = noise(*shape).flip(-1).to(dtype)
    seen = []
    for norm in (ours, theirs):
        x = noise(*shape).to(dtype).requires_grad_()
        y = norm(x)
        y.backward(dy)
        seen.append((y, x.grad, norm.weight.grad))
    for mine, reference in zip(*seen, strict=True):
        tolerance = 2 * torch.finfo(dtype).eps * reference.abs().max()
        assert (mine - reference).abs().max() <= tolerance


class Work(TorchDispatchMode):
    """Counts within it: kernels started, and operations (the largest tensor of each)."""

    def __init__(self):
        super().__init__()
        self.kernels = self.operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [*args, *out] if isinstance(out, tuple) else [*args, out]
        self.kernels += 1
        self.operations += max(t.numel() for t in tensors if isinstance(t, torch.Tensor))
        return out


def work_of(norm, x):
    with torch.no_grad(), Work() as work:
        norm(x)
    return work


@pytest.mark.parametrize(("step", "name"), [(1, "LayerNorm"), (2, "RMSNorm")])
def test_the_operations_that_page_11_lists_are_those_that_run(step, name):
    listed = len(getattr(STEPS[11], f"{name.upper()}_OPERATIONS"))
    work = work_of(getattr(STEPS[step], name)(768), noise(128, 768, dtype=torch.float32))
    assert work.operations / 128 == listed * 768 + 2  # and two for each token: add eps, take the root


def test_torchs_layernorm_is_one_kernel_and_its_rmsnorm_six():
    x = noise(128, 768, dtype=torch.float32)
    assert work_of(nn.LayerNorm(768, eps=1e-5), x).kernels == 1
    assert work_of(nn.RMSNorm(768, eps=1e-5), x).kernels == 6


# ---------------------------------------------------------------- 03, 13: the block


@pytest.mark.parametrize(("n", "name", "first"), [(3, "NormBlock", True), (13, "PostNormBlock", False)])
def test_both_blocks_are_torchs(n, name, first):
    """With the same random weights: output and the gradient of the input."""
    ours = getattr(STEPS[n], name)(STEPS[3].NormConfig(n_heads=3, d_model=12))
    for p in ours.parameters():
        nn.init.normal_(p, std=0.3, generator=generator(1, "block", tuple(p.shape)))
    theirs = nn.TransformerEncoderLayer(12, 3, 48, 0.0, F.gelu, 1e-5, batch_first=True, norm_first=first)
    parts = (ours.attn, ours.mlp, ours.norm1, ours.norm2)
    order = [p for part in parts for p in part.parameters()]
    theirs.load_state_dict(dict(zip(theirs.state_dict(), order, strict=True)))
    mask = nn.Transformer.generate_square_subsequent_mask(7)
    dy = noise(5, 7, 12, dtype=torch.float32).flip(-1)
    seen = []
    for forward in (ours, partial(theirs, src_mask=mask)):
        x = noise(5, 7, 12, dtype=torch.float32).requires_grad_()
        y = forward(x)
        y.backward(dy)
        seen.append((y, x.grad))
    for mine, reference in zip(*seen, strict=True):
        assert (mine - reference).abs().max() < 1e-5


def test_the_pre_norm_block_written_out_is_chapter_05s():
    cfg = STEPS[3].NormConfig()
    block = STEPS[3].NormBlock(cfg)
    written_out = STEPS[13].PreNormBlock(cfg)
    written_out.load_state_dict(block.state_dict())
    x = noise(2, 5, 64, dtype=torch.float32)
    assert torch.equal(block(x), written_out(x))


def test_at_48_layers_too_the_last_gradient_falls_in_pre_norm_alone_from_a_plain_start():
    powers = {}
    for start in ("plain", "GPT-2's"):
        for order, model in (("pre", STEPS[3].NormGPT), ("post", STEPS[13].PostNormGPT)):
            shallow, deep = (STEPS[13].gradients_by_layer(model, n, start)[-1] for n in (2, 48))
            powers[order, start] = math.log(deep / shallow) / math.log(24)
    assert powers["pre", "plain"] == pytest.approx(-0.5, abs=0.2)
    assert powers["post", "plain"] == pytest.approx(0.0, abs=0.2)
    assert powers["pre", "GPT-2's"] == pytest.approx(-0.5, abs=0.2)
    assert powers["post", "GPT-2's"] == pytest.approx(-0.5, abs=0.2)


# ---------------------------------------------------------------- 04: statistics


def test_all_five_statistics_are_torchs():
    x = noise(3, 5, 7, dtype=torch.float32)
    var = x.var(correction=0)
    theirs = torch.stack((x.mean(), var, x.min(), x.max(), ((x - x.mean()) ** 4).mean() / var**2))
    assert (torch.tensor([*STEPS[4].tensor_stats(x).values()]) - theirs).abs().max() < 1e-5


def test_statistics_of_known_shapes():
    stats = STEPS[4].tensor_stats
    signs = torch.tensor([1.0, -1.0]).repeat(16)
    assert stats(signs)["kurtosis"] == pytest.approx(1, abs=1e-15)
    assert stats(torch.linspace(-1, 1, 100_001))["kurtosis"] == pytest.approx(9 / 5, abs=1e-4)
    assert stats(torch.eye(576)[3])["kurtosis"] == pytest.approx(574 + 1 / 575, abs=1e-9)
    flat = stats(torch.full((4, 6), 0.1, dtype=torch.float16))
    assert [flat["mean"], flat["var"], flat["kurtosis"]] == pytest.approx([0.0999756, 0, 0], abs=1e-7)
    large = stats(6e4 * signs.half())  # whose squares float16 can't hold
    assert [large["var"], large["kurtosis"]] == pytest.approx([3.6e9, 1], abs=1e-6)


@pytest.mark.parametrize("norm_type", ["layernorm", "rmsnorm"])
def test_hooks_change_no_loss_of_a_training_run(norm_type):
    corpus = data.load_corpus("docs", "char", 32)
    corpus = replace(corpus, validation=corpus.validation[:2000])
    losses = []
    for every in (20, 0):
        model = STEPS[3].NormGPT(STEPS[3].NormConfig(norm_type=norm_type), corpus.vocab_size)
        gpt.init_parameters(model, seed=1)
        settings = training.TrainingSettings(steps=60, observe_every=every)
        losses.append(training.train(model, corpus, settings, seed=1, observe=STEPS[4].observe).losses)
    assert losses[0] == losses[1] and len(losses[0]) == 60


# ---------------------------------------------------------------- 06, 07: activations and MLPs


def density(x):
    return torch.exp(-0.5 * x.square()) / math.sqrt(2 * math.pi)


def gelu_tanh_slope(x):
    c = math.sqrt(2 / math.pi)
    t = torch.tanh(c * (x + 0.044715 * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t.square()) * c * (1 + 3 * 0.044715 * x.square())


def silu_slope(x):
    s = torch.sigmoid(x)
    return s * (1 + x * (1 - s))


# The name of a function of page 06, torch's for the same, and its derivative by hand.
ACTIVATIONS = [
    ("gelu", F.gelu, lambda x: 0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * density(x)),
    ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"), gelu_tanh_slope),
    ("relu2", lambda x: F.relu(x).square(), lambda x: 2 * x.clamp(min=0)),
    ("silu", F.silu, silu_slope),
]


@pytest.mark.parametrize(("name", "theirs", "slope_by_hand"), ACTIVATIONS, ids=[a[0] for a in ACTIVATIONS])
def test_activations_their_slopes_and_far_inputs(name, theirs, slope_by_hand):
    ours = getattr(STEPS[6], name)
    x = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    assert (ours(x) - theirs(x)).abs().max() < 1e-14
    assert (STEPS[6].slope(ours, x) - slope_by_hand(x)).abs().max() < 1e-13
    assert (STEPS[6].slope(theirs, x) - slope_by_hand(x)).abs().max() < 1e-13
    far = torch.tensor([-1e4, -100.0, 100.0])  # in float32, where a careless form makes inf · 0
    assert torch.equal(ours(far), theirs(far))


def test_values_of_gelu_at_one():
    one = torch.tensor(1.0, dtype=torch.float64)
    assert STEPS[6].gelu(one).item() == pytest.approx(0.8413447461, abs=1e-10)
    assert STEPS[6].gelu_tanh(one).item() == pytest.approx(0.8411920, abs=5e-8)


def test_swiglu_and_its_slopes_are_torchs_glu():
    """torch's GLU is up · sigmoid(gate). The slopes by hand: silu'(gate) · up, and silu(gate)."""
    gate = noise(5, 7).requires_grad_()
    up = noise(7, 5).T.contiguous().requires_grad_()
    reference = gate * F.glu(torch.cat((up, gate), dim=-1))
    ours = STEPS[6].swiglu(gate, up)
    assert (ours - reference).abs().max() < 1e-15
    for value in (ours, reference):
        in_gate, in_up = torch.autograd.grad(value.sum(), (gate, up))
        assert (in_gate - silu_slope(gate) * up).abs().max() < 1e-14
        assert (in_up - F.silu(gate)).abs().max() < 1e-14


@pytest.mark.parametrize(("shape", "d_hidden"), [((2, 3, 5), 7), ((1, 4), 9)], ids=str)
def test_swiglus_gradients_chained_by_hand(shape, d_hidden):
    mlp = STEPS[7].SwiGLU(shape[-1], d_hidden).double()
    for p in mlp.parameters():
        nn.init.normal_(p, std=0.5, generator=generator(1, "mlp", tuple(p.shape)))
    x = noise(*shape).requires_grad_()
    dy = noise(*shape).flip(-1)
    y = mlp(x)
    y.backward(dy)
    gate, up, down = (m.weight.detach() for m in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    tokens = x.detach().reshape(-1, shape[-1])
    dy = dy.reshape(-1, shape[-1])
    g, u = tokens @ gate.T, tokens @ up.T
    h = F.silu(g) * u
    dgate = (dy @ down) * silu_slope(g) * u
    dup = (dy @ down) * F.silu(g)
    assert (y.reshape(-1, shape[-1]) - h @ down.T).abs().max() < 1e-12
    assert (x.grad.reshape(-1, shape[-1]) - (dgate @ gate + dup @ up)).abs().max() < 1e-12
    expected = {"gate_proj": dgate.T @ tokens, "up_proj": dup.T @ tokens, "down_proj": dy.T @ h}
    for name, reference in expected.items():
        assert (mlp.get_submodule(name).weight.grad - reference).abs().max() < 1e-12


@pytest.mark.parametrize("mlp_type", ["gelu", "relu2"])
def test_a_plain_mlp_is_two_matrices_around_step_06s_curve(mlp_type):
    mlp = STEPS[7].make_mlp(STEPS[7].MLPConfig(d_model=12, n_heads=3, mlp_type=mlp_type, d_hidden=17))
    for p in mlp.parameters():
        nn.init.normal_(p, std=0.5, generator=generator(1, "mlp", tuple(p.shape)))
    x = noise(3, 2, 12, dtype=torch.float32)
    activation = getattr(STEPS[6], mlp_type)
    hidden = activation(F.linear(x, mlp.fc.weight, mlp.fc.bias))
    reference = F.linear(hidden, mlp.proj.weight, mlp.proj.bias)
    assert (mlp(x) - reference).abs().max() < 1e-5


def test_an_unknown_mlp_is_refused_with_the_valid_ones():
    with pytest.raises(ValueError, match="'gleu'; valid: gelu, relu2, swiglu"):
        STEPS[7].make_mlp(STEPS[7].MLPConfig(mlp_type="gleu"))


# ---------------------------------------------------------------- 08, 12: positions


def test_scores_depend_on_distance_alone_at_every_position_to_a_million():
    cos, sin = STEPS[8].build_rope_cache(1_000_006, 8)
    q, k = torch.randn(2, 1, 8, generator=generator(1, "step_08", "million"))
    turned_q = STEPS[8].apply_rope(q.expand(1_000_006, 8), cos, sin)
    turned_k = STEPS[8].apply_rope(k.expand(1_000_006, 8), cos, sin)
    scores = (turned_q[5:] * turned_k[:-5]).sum(-1) / 8
    assert (scores - scores[0]).abs().max() < 1e-5


def test_attention_scores_one_token_alike_at_equal_distances():
    attention = STEPS[8].RotaryAttention(STEPS[10].ModernConfig(bias=False, position_type="rope"))
    nn.init.normal_(attention.qkv.weight, generator=generator(1, "step_08", "attention"))
    q, k, _ = attention.heads(torch.full((1, 3, 64), 0.1))  # one token at three positions
    scores = q[0] @ k[0].transpose(1, 2)  # (H, T, T)
    assert (scores[:, 2, 1] - scores[:, 1, 0]).abs().max() < 1e-5


def test_the_tables_follow_the_input_to_its_device_and_stay_float32():
    attention = STEPS[8].RotaryAttention(STEPS[10].ModernConfig(position_type="rope")).to("meta", torch.bfloat16)
    q, _, _ = attention.heads(torch.zeros(2, 5, 64, dtype=torch.bfloat16, device="meta"))
    assert q.shape == (2, 4, 5, 16) and q.dtype == torch.bfloat16 and q.device.type == "meta"
    for table in (attention.cos, attention.sin):
        assert table.device.type == "meta" and table.dtype == torch.float32


# ---------------------------------------------------------------- 09: experts


def random_moe(n_experts, top_k):
    cfg = STEPS[9].ExpertsConfig(d_model=12, n_heads=3, n_experts=n_experts, top_k=top_k, d_hidden=7)
    moe = STEPS[9].MoE(cfg).double()
    for name, p in moe.named_parameters():
        nn.init.normal_(p, std=0.4, generator=generator(1, "moe", name))
    return moe


def test_a_mixture_and_its_gradients_are_its_definitions():
    moe = random_moe(5, 2)
    dy = noise(3, 4, 12).flip(-1)
    results = []
    for forward in (moe, lambda x: STEPS[9].one_by_one(moe, x.flatten(0, 1)).view_as(x)):
        x = noise(3, 4, 12).requires_grad_()
        y = forward(x)
        gradients = torch.autograd.grad(y, (x, moe.router.weight, moe.experts[0].gate_proj.weight), dy)
        results.append((y, gradients))
    assert (results[0][0] - results[1][0]).abs().max() < 1e-6  # the gates are float32
    for mine, reference in zip(results[0][1], results[1][1], strict=True):
        assert (mine - reference).abs().max() < 1e-5


def test_experts_all_chosen_all_equal_and_all_tied():
    x = noise(3, 4, 12)
    everyone = random_moe(3, 3)
    weights = (x @ everyone.router.weight.T).softmax(-1)
    mixture = sum(weights[..., e, None] * expert(x) for e, expert in enumerate(everyone.experts))
    assert (everyone(x) - mixture).abs().max() < 1e-6
    moe = random_moe(5, 2)
    for expert in moe.experts:
        expert.load_state_dict(moe.experts[0].state_dict())
    assert (moe(x) - moe.experts[0](x)).abs().max() < 1e-6
    moe.router.weight.data.zero_()
    gates, chosen = moe.route(x.flatten(0, 1))
    assert chosen.unique(dim=0).tolist() == [[0, 1]]
    assert torch.equal(gates, torch.full((12, 2), 0.5))


def test_more_experts_chosen_than_there_are_is_refused():
    with pytest.raises(ValueError, match="top_k 6 .* n_experts 5"):
        STEPS[9].MoE(STEPS[9].ExpertsConfig(n_experts=5, top_k=6))


# ---------------------------------------------------------------- 10: the model


def test_the_model_of_page_10_is_the_builds(modern):
    page = STEPS[10]
    idx = torch.arange(12)[None]
    for norm_type in page.NORM_TYPES:
        for mlp_type in page.MLP_TYPES:
            for position_type in page.POSITION_TYPES:
                parts = {"norm_type": norm_type, "mlp_type": mlp_type, "position_type": position_type}
                logits = []
                for module in (page, modern):
                    model = module.ModernGPT(module.ModernConfig(**parts), 48)
                    gpt.init_parameters(model, seed=3)
                    logits.append(model(idx)[0])
                assert torch.equal(*logits), parts
