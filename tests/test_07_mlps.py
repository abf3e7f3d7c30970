"""Chapter 07's activations, MLPs and experts: known values, torch's own functions, laws; and that config is read."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from shared import chapters
from shared.randomness import generator

step_06, step_07, step_09 = (chapters.load_step(7, n) for n in (6, 7, 9))


def noise(*shape, dtype=torch.float64):
    return torch.randn(shape, generator=generator(7, "mlps", shape), dtype=dtype)


def randomize(module, std=0.5):
    draw = generator(7, "weights")
    for p in module.parameters():
        torch.nn.init.normal_(p, std=std, generator=draw)
    return module


def config(modern, **changes):
    return modern.ModernConfig(**{"block_size": 11, "n_layers": 2, "n_heads": 3, "d_model": 12, **changes})


# ---------------------------------------------------------------- activations


TORCHS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
}


@pytest.mark.parametrize("name", TORCHS)
def test_activations_and_their_slopes_are_torchs(name):
    ours, theirs = getattr(step_06, name), TORCHS[name]
    x = torch.cat((torch.linspace(-30, 30, 2001, dtype=torch.float64), torch.tensor([-1e4, 1e4])))
    assert (ours(x) - theirs(x)).abs().max() < 1e-12
    assert (step_06.slope(ours, x) - step_06.slope(theirs, x)).abs().max() < 1e-12


def test_known_values_of_activations():
    one = torch.ones(1, dtype=torch.float64)
    assert step_06.gelu(one).item() == pytest.approx(0.8413447, abs=5e-8)
    assert step_06.gelu_tanh(one).item() == pytest.approx(0.8411920, abs=5e-8)
    x = torch.linspace(-6, 6, 12_001, dtype=torch.float64)
    gap = (step_06.gelu(x) - step_06.gelu_tanh(x)).abs()
    assert gap.max().item() == pytest.approx(4.7e-4, abs=5e-6)
    assert abs(x[gap.argmax()].item()) == pytest.approx(2.70, abs=0.01)
    assert torch.equal(F.gelu(x), F.gelu(x, approximate="none")) and not torch.equal(F.gelu(x), step_06.gelu_tanh(x))


def mean_square(activation):
    """E[activation(z)²] for z ~ N(0, 1), by the trapezoid rule in float64."""
    z = torch.linspace(-12, 12, 200_001, dtype=torch.float64)
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    return torch.trapezoid(activation(z).square() * density, z).item()


def test_mean_squares_under_a_gaussian():
    """Exact values: 1/2, 3/2, 1/3 + 1/(2π√3). SiLU has no closed form; 200 Gauss-Hermite nodes give it."""
    import numpy as np

    z, weights = np.polynomial.hermite_e.hermegauss(100)
    silu = float((weights * (z / (1 + np.exp(-z))) ** 2).sum() / weights.sum())
    relu = mean_square(lambda x: x.clamp(min=0))
    assert relu == pytest.approx(0.5, abs=1e-9)
    assert mean_square(step_06.relu2) == pytest.approx(1.5, abs=1e-9)
    assert mean_square(step_06.gelu) == pytest.approx(1 / 3 + 1 / (2 * math.pi * math.sqrt(3)), abs=1e-9)
    assert mean_square(step_06.silu) == pytest.approx(silu, abs=1e-8)
    assert silu == pytest.approx(0.355776, abs=1e-6)


def test_known_values_of_the_swiglu_core(modern):
    for gate, up, value in ((2.0, 3.0, 5.2847825), (3.0, 2.0, 5.7154448)):
        mlp = modern.SwiGLU(1, 1).double()
        for linear, weight in ((mlp.gate_proj, gate), (mlp.up_proj, up), (mlp.down_proj, 1.0)):
            linear.weight.data.fill_(weight)
        assert mlp(torch.ones(1, dtype=torch.float64)).item() == pytest.approx(value, abs=5e-8)
    assert F.silu(torch.tensor(6.0, dtype=torch.float64)).item() == pytest.approx(5.9851643, abs=5e-8)  # of the product


# ---------------------------------------------------------------- MLPs


@pytest.mark.parametrize("shape", [(2, 3, 5), (4, 1, 6), (7,)], ids=str)
def test_swiglu_forward_and_gradients(modern, shape):
    """torch's twin of the core is its GLU: silu(g) · u = g · (u · σ(g)) = g · glu(u, g)."""
    mlp = randomize(modern.SwiGLU(shape[-1], 9).double())
    x, upstream = noise(*shape).requires_grad_(), noise(*shape).flip(-1)
    gate, up, down = (m.weight for m in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    g, u = F.linear(x, gate), F.linear(x, up)
    reference = F.linear(g * F.glu(torch.cat((u, g), dim=-1)), down)
    ours, inputs = mlp(x), [x, gate, up, down]
    assert (ours - reference).abs().max() < 1e-12
    for mine, theirs in zip(
        torch.autograd.grad(ours, inputs, upstream), torch.autograd.grad(reference, inputs, upstream)
    ):
        assert (mine - theirs).abs().max() < 1e-12


@pytest.mark.parametrize("shape", [(2, 3, 12), (5, 1, 12)], ids=str)
@pytest.mark.parametrize(("mlp_type", "d_hidden"), [("gelu", None), ("gelu", 17), ("relu2", None), ("relu2", 17)])
def test_plain_mlps_forward_and_gradients(modern, mlp_type, d_hidden, shape):
    mlp = randomize(modern.make_mlp(config(modern, mlp_type=mlp_type, d_hidden=d_hidden)).double())
    assert mlp.fc.out_features == (d_hidden or 48)
    x, upstream = noise(*shape).requires_grad_(), noise(*shape).flip(-1)
    h = x @ mlp.fc.weight.T + mlp.fc.bias
    h = F.gelu(h) if mlp_type == "gelu" else h.clamp(min=0) ** 2
    reference = h @ mlp.proj.weight.T + mlp.proj.bias
    ours, inputs = mlp(x), [x, *mlp.parameters()]
    assert (ours - reference).abs().max() < 1e-12
    for mine, theirs in zip(
        torch.autograd.grad(ours, inputs, upstream), torch.autograd.grad(reference, inputs, upstream)
    ):
        assert (mine - theirs).abs().max() < 1e-12


@pytest.mark.parametrize("d_hidden", [None, 17])
def test_an_mlp_without_biases_has_none(modern, d_hidden):
    mlp = modern.make_mlp(config(modern, mlp_type="relu2", d_hidden=d_hidden, bias=False))
    assert [name for name, _ in mlp.named_parameters()] == ["fc.weight", "proj.weight"]


def test_the_8_3_rule(modern):
    count = modern.gpt.count_parameters
    assert modern.swiglu_hidden(768) == 2048 and count(modern.SwiGLU(768)) == 3 * 768 * 2048 == 8 * 768**2 == 4_718_592
    assert modern.swiglu_hidden(64) == 170  # rounded down
    assert modern.swiglu_hidden(256, 64) == 704 and 3 * 256 * 704 / (8 * 256**2) == pytest.approx(1.0313, abs=6e-5)
    assert modern.swiglu_hidden(4096, 256) == 11_008  # Llama's (Touvron et al. 2023)
    assert modern.make_mlp(config(modern, d_model=96, multiple_of=32)).down_proj.in_features == 256
    assert 3 * 256 * 704 - 8 * 256**2 == 16_384


def test_the_page_says_where_the_sizes_differ(capsys):
    assert step_07.main() == 0
    rows = {tuple(line.split()[:2]): line.split() for line in capsys.readouterr().out.splitlines() if line}
    assert rows["768", "1"][2:] == ["2048", "4,718,592", "+0.00%"]
    assert rows["256", "64"][2:] == ["704", "540,672", "+3.12%"]


def test_the_feed_forward_half_is_two_thirds_of_a_block(modern):
    block = modern.ModernBlock(modern.ModernConfig(d_model=768, n_heads=12, norm_type="layernorm", mlp_type="gelu"))
    share = modern.gpt.count_parameters(block.mlp) / modern.gpt.count_parameters(block)
    assert share == pytest.approx(2 / 3, abs=0.001)


# ---------------------------------------------------------------- experts


def experts(modern, **changes):
    return randomize(
        modern.MoE(config(modern, **{"mlp_type": "moe", "d_hidden": 7, "n_experts": 5, **changes})).double()
    )


def sizes(modern, cfg):
    """Parameters of a mixture in all, and those that one token meets: the router and k experts."""
    with torch.device("meta"):
        moe = modern.MoE(cfg)
    total, expert = (sum(p.numel() for p in module.parameters()) for module in (moe, moe.experts[0]))
    return total, total - (cfg.n_experts - cfg.top_k) * expert


def test_a_mixture_counts_what_is_published(modern):
    cfg = modern.ModernConfig(d_model=768, n_heads=12, mlp_type="moe", n_experts=8, top_k=2)
    total, active = sizes(modern, cfg)
    assert (total, active) == (37_754_880, 9_443_328)
    with torch.device("meta"):
        assert sum(p.numel() for p in modern.MoE(cfg).parameters()) == total


@pytest.mark.parametrize("shape", [(3, 4, 12), (2, 1, 12), (1, 12)], ids=str)
@pytest.mark.parametrize(("n_experts", "top_k"), [(5, 2), (5, 3), (1, 1)])
def test_the_loop_over_experts_is_the_definition_token_by_token(modern, n_experts, top_k, shape):
    """Also with fewer tokens than experts, so that some experts are empty."""
    moe = experts(modern, n_experts=n_experts, top_k=top_k)
    x, upstream = noise(*shape).requires_grad_(), noise(*shape).flip(-1)
    ours = moe(x)
    reference = step_09.one_by_one(moe, x.reshape(-1, 12)).view_as(x)
    assert (ours - reference).abs().max() < 1e-5 and ours.isfinite().all()
    for name, mine, theirs in zip(
        ["x", *dict(moe.named_parameters())],
        torch.autograd.grad(ours, [x, *moe.parameters()], upstream, allow_unused=True),
        torch.autograd.grad(reference, [x, *moe.parameters()], upstream, allow_unused=True),
    ):
        if theirs is None:  # nobody chose this expert
            assert mine is None or not mine.any(), name
        else:
            assert (mine - theirs).abs().max() < 1e-4, name


def test_softmax_then_top_k_then_renormalise_is_top_k_then_softmax(modern):
    moe, tokens = experts(modern, top_k=3), noise(31, 12)
    gates, chosen = moe.route(tokens)
    values, order = F.linear(tokens.float(), moe.router.weight.float()).topk(3)
    assert torch.equal(chosen, order) and torch.allclose(gates, values.softmax(-1), atol=1e-6)
    assert torch.allclose(gates.sum(-1), torch.ones(31), atol=1e-6)


def test_identical_experts_are_the_dense_mlp_and_k_e_is_the_softmax_weighted_sum(modern):
    moe, x = experts(modern, top_k=5), noise(3, 4, 12)
    weights = (x @ moe.router.weight.T).softmax(-1)
    mixture = sum(weights[..., e, None] * expert(x) for e, expert in enumerate(moe.experts))
    assert (moe(x) - mixture).abs().max() < 1e-5
    same = experts(modern, top_k=2)
    for expert in same.experts:
        expert.load_state_dict(same.experts[3].state_dict())
    assert (same(x) - same.experts[3](x)).abs().max() < 1e-5


def test_ties_go_to_the_lowest_numbers(modern):
    moe = experts(modern, n_experts=40, top_k=3)  # enough that an unstable sort would show
    moe.router.weight.data.zero_()
    gates, chosen = moe.route(noise(29, 12))
    assert chosen.tolist() == [[0, 1, 2]] * 29 and torch.allclose(gates, torch.full((29, 3), 1 / 3))


def test_the_router_is_float32_in_a_bfloat16_model_and_under_autocast(modern):
    moe = experts(modern).float()
    tokens = noise(17, 12, dtype=torch.float32)
    expected = moe.route(tokens)[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(moe.route(tokens)[0], expected)
        assert moe(tokens).isfinite().all()
    narrow, tokens = moe.bfloat16(), tokens.bfloat16()
    logits = tokens.float() @ narrow.router.weight.float().T
    gates, _ = narrow.route(tokens)
    assert gates.dtype == torch.float32 and narrow(tokens).dtype == torch.bfloat16
    assert torch.allclose(gates, logits.topk(2).values.softmax(-1), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("n_experts", "top_k"), [(4, 5), (4, 1), (2, 3)])
def test_impossible_mixtures_are_refused_with_both_numbers(modern, n_experts, top_k):
    with pytest.raises(ValueError, match=f"top_k {top_k} .* n_experts {n_experts}"):
        modern.MoE(config(modern, n_experts=n_experts, top_k=top_k))


# ---------------------------------------------------------------- config

# For each field a change, and what the others must be for it to matter.
CHANGES = {
    "block_size": (14, {}),
    "n_layers": (3, {}),
    "n_heads": (2, {}),
    "d_model": (24, {}),
    "bias": (False, {}),
    "norm_type": ("layernorm", {}),
    "mlp_type": ("relu2", {}),
    "position_type": ("rope", {}),
    "norm_eps": (0.5, {}),
    "d_hidden": (9, {}),
    "multiple_of": (25, {}),
    "rope_base": (3.0, {"position_type": "rope"}),
    "n_experts": (3, {"mlp_type": "moe"}),
    "top_k": (3, {"mlp_type": "moe"}),
    "init_std": ("fan_in", {}),
}


def fingerprint(modern, **changes):
    """The shapes of a model and what it says about a text, started as the experiment starts it."""
    model = modern.FourWay().build_model(config(modern, **changes), 23, 1)
    with torch.no_grad():
        logits = model(torch.arange(11)[None])[0]
    return {name: tuple(p.shape) for name, p in model.named_parameters()}, logits


@pytest.mark.parametrize("field", CHANGES)
def test_every_field_of_the_config_is_read(modern, field):
    value, others = CHANGES[field]
    shapes, logits = fingerprint(modern, **others)
    changed_shapes, changed_logits = fingerprint(modern, **{**others, field: value})
    assert shapes != changed_shapes or not torch.equal(logits, changed_logits)


def test_no_field_is_left_out():
    modern = chapters.load_build(7)
    assert {field.name for field in dataclasses.fields(modern.ModernConfig)} == set(CHANGES)


@pytest.mark.slow
def test_the_start_can_be_changed_for_a_whole_run(modern, here, tmp_path, monkeypatch):
    """--set changes a field of every variant."""
    import json

    preset = modern.PRESETS["tiny"]
    model = dataclasses.replace(preset.model, block_size=8, n_layers=1, n_heads=2, d_model=12)
    settings = dataclasses.replace(preset.training, batch_size=2, steps=3)
    monkeypatch.setitem(modern.PRESETS, "tiny", dataclasses.replace(preset, model=model, training=settings))
    text = tmp_path / "text.txt"
    text.write_text("a few words, again and again.\n" * 40, encoding="utf-8")
    flags = ["--data", str(text), "--seeds", "1", "--workers", "1", "--set", "init_std=fan_in"]
    assert modern.main([*flags, "--output-dir", str(tmp_path / "out")]) == 0
    record = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    assert {variant["init_std"] for variant in record["settings"]["variants"].values()} == {"fan_in"}
    seen = record["runs"][0]["observations"]
    assert [sample["step"] for sample in seen] == [3]  # a run shorter than observe_every is seen at its end
    assert list(seen[0]["stream"]) == ["embedding", "blocks.0.attn", "blocks.0.mlp"]
    log = (tmp_path / "out" / "run_log.txt").read_text(encoding="utf-8")
    assert "The residual stream at step 3" in log and "blocks.0.mlp" in log
    stream = [r["observations"][0]["stream"] for r in record["runs"] if r["variant"] == "RMSNorm+SwiGLU"]
    assert f"{stream[0]['blocks.0.mlp']['var'] ** 0.5:.2f}" in log
    assert (tmp_path / "out" / "hidden_states.png").read_bytes().startswith(b"\x89PNG")


def test_fan_in_is_another_start(modern):
    configs = [modern.ModernConfig(init_std=std) for std in (0.02, "fan_in")]
    small, large = (modern.FourWay().build_model(cfg, 23, 1) for cfg in configs)
    assert small.blocks[0].mlp.gate_proj.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert large.blocks[0].mlp.gate_proj.weight.std().item() == pytest.approx(1 / 8, rel=0.05)
