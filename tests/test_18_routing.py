"""Chapter 18's routers: every value of the table, causality, the edges, and what they refuse."""

import math
from fractions import Fraction

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from shared import chapters
from shared.randomness import generator

step_02, step_04, step_06, step_12 = (chapters.load_step(18, n) for n in (2, 4, 6, 12))
ROUTERS = ("top_k", "switch", "bias", "expert_choice")


def config(sparse, router_type: str = "top_k", **changes):
    base = {"d_model": 12, "n_heads": 1, "d_hidden": 7, "n_experts": 5, "top_k": 2, "capacity_factor": 1.0}
    if router_type == "switch":
        base["top_k"] = 1
    return sparse.SparseConfig(**base | changes, router_type=router_type)


def layer(sparse, router_type: str = "top_k", cls=None, **changes) -> nn.Module:
    moe = (cls or sparse.ROUTERS[router_type])(config(sparse, router_type, **changes))
    for name, p in moe.named_parameters():
        nn.init.normal_(p, std=0.4, generator=generator(18, name, tuple(p.shape)))
    return moe


def tokens(*shape: int, key: str = "x") -> torch.Tensor:
    return torch.randn(shape, generator=generator(18, key, shape))


def certain(experts: list[int], n_experts: int, logit: float = 60.0) -> torch.Tensor:
    """Logits (N, E): token n wants experts[n] and no other."""
    return logit * F.one_hot(torch.tensor(experts), n_experts).double()


# ---------------------------------------------------------------- balance


@pytest.mark.parametrize(("E", "k"), [(6, 1), (6, 2), (7, 3), (5, 5)])
def test_at_balance_the_loss_is_1_for_any_k(sparse, E, k):
    in_turn = sum(certain([(n + j) % E for n in range(3 * E)], E, 30) for j in range(k))
    assert sparse.switch_balance_loss(in_turn, k).item() == pytest.approx(1, abs=1e-6)


def test_at_collapse_it_is_E_over_k(sparse):
    assert sparse.switch_balance_loss(certain([3] * 11, 6), 1).item() == pytest.approx(6, abs=1e-6)
    both = certain([1] * 11, 6) + certain([4] * 11, 6)
    assert sparse.switch_balance_loss(both, 2).item() == pytest.approx(6 / 2, abs=1e-6)


def test_layers_are_judged_one_by_one(sparse):
    """Two layers of two experts, collapsed in opposite directions: 2. Concatenated first: 1."""
    one, other = certain([0] * 9, 2), certain([1] * 9, 2)
    assert torch.stack([sparse.switch_balance_loss(x, 1) for x in (one, other)]).mean().item() == pytest.approx(2)
    assert sparse.switch_balance_loss(torch.cat((one, other)), 1).item() == pytest.approx(1)


def test_zero_logits_score_1_and_balance_nothing(sparse):
    moe = layer(sparse, n_experts=8, top_k=2)
    nn.init.zeros_(moe.router.weight)
    routing = moe(tokens(37, 12))[1]
    assert sparse.switch_balance_loss(routing.logits, 2).item() == pytest.approx(1, abs=1e-6)
    assert routing.chosen.sum(0).tolist() == [37, 37, 0, 0, 0, 0, 0, 0]
    assert step_04.max_violation(routing.chosen.sum(0)) == pytest.approx(8 / 2 - 1)


def test_1_is_no_lower_bound(sparse):
    three_undecided = torch.cat((torch.zeros(3, 2), certain([1], 2)))
    assert sparse.switch_balance_loss(three_undecided, 1).item() == pytest.approx(7 / 8, abs=1e-6)


def test_the_gradient_flows_through_the_probabilities_alone(sparse):
    N, E, k = 23, 6, 2
    logits = tokens(N, E).double().requires_grad_()
    (ours,) = torch.autograd.grad(sparse.switch_balance_loss(logits, k), logits)
    p = logits.detach().softmax(-1)
    f = torch.zeros(E).double()
    for row in logits.tolist():
        for e in sorted(range(E), key=lambda e: -row[e])[:k]:
            f[e] += 1 / (N * k)
    by_hand = E / N * p * (f - (p * f).sum(-1, keepdim=True))
    torch.testing.assert_close(ours, by_hand, rtol=1e-6, atol=1e-9)


def test_z_loss():
    assert step_12.router_z_loss(torch.zeros(5, 8)).item() == pytest.approx(4.324077, abs=1e-6)
    x = tokens(9, 6).double()
    assert step_12.router_z_loss(x).item() == pytest.approx((x.exp().sum(-1).log() ** 2).mean().item())


def test_max_violation_by_hand():
    assert step_04.max_violation(torch.tensor([6, 1, 2])) == pytest.approx(1.0)
    assert step_04.max_violation(torch.tensor([4, 4, 4])) == 0.0


# ---------------------------------------------------------------- sizes


def test_sizes_of_the_table(sparse, gpt):
    with torch.device("meta"):
        moe = sparse.GroupedMoE(sparse.SparseConfig(d_model=768, d_hidden=2048, n_experts=8, top_k=2))
    assert gpt.count_parameters(moe) == 37_754_880
    assert sparse.active_parameters(moe) == 9_443_328


def test_sizes_of_published_models():
    assert step_02.model(step_02.MIXTRAL) == (46_702_792_704, 12_879_925_248)
    olmoe = step_02.Shape(  # Muennighoff et al. 2024
        d_model=2048,
        n_layers=16,
        n_heads=16,
        n_kv_heads=16,
        head_dim=128,
        d_hidden=1024,
        n_experts=64,
        top_k=8,
        vocab_size=50304,
    )
    norms = 16 * 2 * 2048  # of queries and keys, in each layer
    assert tuple(n + norms for n in step_02.model(olmoe)) == (6_919_161_856, 1_282_017_280)


# ---------------------------------------------------------------- the choice


@pytest.mark.parametrize("router_type", ["top_k", "bias"])
def test_top_k_then_softmax(sparse, router_type):
    logits = tokens(40, 6)
    weight, chosen = layer(sparse, router_type, n_experts=6, top_k=3).decide(logits)
    best = logits.topk(3)
    expected = torch.zeros(40, 6).scatter(1, best.indices, best.values.softmax(-1))
    torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(chosen, expected > 0)


@pytest.mark.parametrize("E", [2, 5, 8, 16, 40, 200])
def test_equal_logits_go_to_the_lowest_numbers(sparse, E):
    for k in {1, 2, E // 2, E}:
        mask = sparse.top_k_mask(torch.zeros(7, E), k)
        assert mask.tolist() == [[e < k for e in range(E)]] * 7
    steps = torch.tensor([[1.0, 0.0] * (E // 2)])
    assert sparse.top_k_mask(steps, E // 2 + 1).nonzero()[:, 1].tolist() == sorted({*range(0, 2 * (E // 2), 2), 1})


def test_a_renormalised_top_1_router_gets_no_gradient(sparse, modern):
    """Chapter 07's layer with k = 1, which it refuses, against Switch's: rounding against a gradient."""
    with pytest.raises(ValueError, match="top_k 1 is not from 2 to n_experts"):
        layer(sparse, "switch", cls=modern.MoE)
    allowed = type("Allowed", (modern.MoE,), {"fewest": 1})
    norms = {}
    for name, moe in (
        ("renormalised", layer(sparse, "switch", cls=allowed)),
        ("probability", layer(sparse, "switch", capacity_factor=5.0)),
    ):
        y = moe(tokens(64, 12))
        y = y if name == "renormalised" else y[0]
        (y * tokens(64, 12, key="dy")).mean().backward()
        norms[name] = moe.router.weight.grad.norm().item()
    assert norms["renormalised"] < 1e-7 and norms["probability"] > 1e-3


def test_the_bias_picks_and_never_weighs(sparse):
    moe, logits = layer(sparse, "bias", n_experts=6), tokens(40, 6)
    plain = moe.decide(logits)[1]
    moe.balance_bias.copy_(torch.tensor([0.5, -0.3, 0.1, 0.0, -0.2, 0.3]))
    weight, chosen = moe.decide(logits)
    assert (chosen != plain).any() and (chosen.sum(1) == 2).all()
    torch.testing.assert_close(weight, logits.masked_fill(~chosen, -math.inf).softmax(-1), rtol=1e-5, atol=1e-6)
    moe.balance_bias += 3
    assert torch.equal(moe.decide(logits)[1], chosen)


def test_the_bias_follows_the_load(sparse):
    moe = layer(sparse, "bias", n_experts=4, bias_speed=0.125)
    chosen = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 0], [1, 1, 0, 0]]).bool()  # loads 4 2 2 0, mean 2
    moe.update_bias(sparse.Routing(torch.zeros(4, 4), chosen))
    assert moe.balance_bias.tolist() == [-0.125, 0.0, 0.0, 0.125]
    assert "balance_bias" in moe.state_dict() and all("bias" not in name for name, _ in moe.named_parameters())


def test_jitter_is_for_training_and_works_on_a_copy(modern):
    moe, plain = step_12.jittered(0.3), step_12.random_moe(16, 3, 24, 7)
    for layer in (moe, plain):
        for expert in layer.experts:
            expert.load_state_dict(layer.experts[0].state_dict())
    x = tokens(64, 24)
    before = x.clone()
    assert torch.equal(moe.eval()(x), plain(x))
    assert (moe.train().route(x)[1] != plain.route(x)[1]).any()
    torch.testing.assert_close(moe(x), plain.experts[0](x), rtol=1e-5, atol=1e-5)
    assert torch.equal(x, before)


# ---------------------------------------------------------------- capacity and expert choice


def test_capacity(sparse):
    assert sparse.expert_capacity(24, 5, 1, 1.25) == 6
    assert sparse.expert_capacity(7, 4, 2, 1.0) == 4  # 3.5 rounded up
    assert sparse.expert_capacity(1, 64, 1, 1.25) == 1
    assert sparse.expert_capacity(50, 5, 1, 1.1) == 11  # floats make it 11.000000000000002
    assert sparse.expert_capacity(3, 7, 2, 0.01) == 1


@pytest.mark.parametrize("factor", ["1.1", "1.15", "1.25", "1.3", "2.2", "0.7"])
def test_capacity_is_exact(sparse, factor):
    """Against whole fractions, for every number of tokens up to 600 and a few of experts."""
    for n_experts in (3, 5, 8, 64):
        for n_tokens in range(1, 601):
            exact = max(1, math.ceil(Fraction(factor) * n_tokens / n_experts))
            assert sparse.expert_capacity(n_tokens, n_experts, 1, float(factor)) == exact


def test_six_tokens_for_an_expert_of_capacity_two(sparse):
    moe = layer(sparse, "switch", n_experts=3, capacity_factor=1.0)
    y, routing = moe(tokens(12).expand(6, 12))
    assert routing.chosen.any(1).tolist() == [True, True, False, False, False, False]
    assert (y[2:] == 0).all() and (y[:2] != 0).all()


def test_switch_with_room_for_all(sparse):
    moe, x = layer(sparse, "switch", capacity_factor=5.0), tokens(3, 11, 12)
    p, best = (x @ moe.router.weight.T).softmax(-1).max(-1)
    by_hand = torch.stack([moe.experts[e](token) for e, token in zip(best.flatten(), x.flatten(0, 1))])
    torch.testing.assert_close(moe(x)[0], p[..., None] * by_hand.view_as(x), rtol=1e-5, atol=1e-5)


def test_expert_choice_is_balanced_by_construction(sparse):
    moe, x = layer(sparse, "expert_choice", n_experts=4), tokens(3, 10, 12)
    y, routing = moe(x)
    assert routing.chosen.sum(0).tolist() == [2 * 30 // 4] * 4
    assert len(set(routing.chosen.sum(1).tolist())) > 1, "tokens differ in how many experts they get"
    p, rows = (x.flatten(0, 1) @ moe.router.weight.T).softmax(-1), x.flatten(0, 1)
    expected = torch.zeros(30, 12)
    for e in range(4):
        for n in sorted(range(30), key=lambda n: -p[n, e].item())[:15]:
            expected[n] += p[n, e] * moe.experts[e](rows[n])
    torch.testing.assert_close(y.flatten(0, 1), expected, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- causality


def model_with(sparse, router_type: str, cls=None) -> nn.Module:
    cfg = config(sparse, router_type, block_size=16, n_layers=2, n_heads=3)
    model = sparse.SparseGPT(cfg, 11)
    sparse.gpt.init_parameters(model, seed=1, std=0.3)
    for block in model.blocks:
        if cls:
            block.mlp.__class__ = cls
    return model.eval()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("router_type", "leaks"),
    [("top_k", False), ("switch", False), ("bias", False), ("expert_choice", True), ("drop_by_score", True)],
)
def test_who_sees_the_future(sparse, router_type, leaks, training):
    """Other tokens from a position on, in one sequence of three: do that sequence's earlier outputs change?

    Not by gradient: the choice of tokens has none. The last lines show that the gradient acquits the guilty too.
    """
    by_score = router_type == "drop_by_score"
    cls = step_06.DropByScore if by_score else None
    model = model_with(sparse, "switch" if by_score else router_type, cls).train(training)
    draw, seen = generator(18, "causality"), 0
    for trial in range(30):
        b, t = trial % 3, 1 + trial % 15
        idx = torch.randint(11, (3, 16), generator=draw)
        later = idx.clone()
        later[b, t:] = torch.randint(11, (16 - t,), generator=draw)
        with torch.no_grad():
            seen += ((model(later)[0] - model(idx)[0])[b, :t].abs() > 1e-4).any().item()
    assert seen > 0 if leaks else seen == 0
    assert all(block.mlp.causal is not leaks for block in model.blocks)

    x = model.embed(idx).detach().requires_grad_()
    model.embed = lambda idx: x
    model(idx)[0][:, 7].sum().backward()
    assert (x.grad[:, 8:] == 0).all() and (x.grad[:, :8] != 0).any()


@torch.no_grad()
def test_a_switch_depends_on_how_many_tokens_there_are_in_training_alone(sparse):
    """More tokens after the first eight mean more room, so an earlier token may no longer be dropped."""
    model, idx = model_with(sparse, "switch"), torch.randint(11, (3, 16), generator=generator(18, "company"))
    gaps = {}
    for training in (True, False):
        model.train(training)
        whole = model(idx)[0][-1, :8]
        without_later = model(idx[:, :8])[0][-1]
        without_others = model(idx[-1:])[0][0, :8]
        gaps[training] = [(whole - one).abs().max().item() for one in (without_later, without_others)]
    assert min(gaps[True]) > 1e-2 and max(gaps[False]) < 1e-5


def test_a_switch_drops_nothing_where_it_is_evaluated(sparse):
    x = tokens(6, 40, 12)
    moe = layer(sparse, "switch", capacity_factor=0.5)
    assert 0 < moe(x)[1].chosen.any(1).double().mean() < 1
    assert moe.eval()(x)[1].chosen.any(1).all()


def test_generate_evaluates_and_puts_the_mode_back(sparse):
    model, idx = model_with(sparse, "switch"), torch.randint(11, (3, 5), generator=generator(18, "prompt"))
    for block in model.blocks:
        block.mlp.capacity_factor = 0.1
    expected = sparse.gpt.generate(model.eval(), idx, 9, temperature=0)
    assert torch.equal(sparse.generate(model.train(), idx, 9, temperature=0), expected)
    assert model.training
    assert not torch.equal(sparse.gpt.generate(model, idx, 9, temperature=0), expected)  # it can tell
    sparse.generate(model.eval(), idx, 1)
    assert not model.training


def test_generate_refuses_who_sees_the_future(sparse):
    idx = torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="ExpertChoiceMoE can't generate: it chooses by later tokens"):
        sparse.generate(model_with(sparse, "expert_choice"), idx, 4)
    for router_type in ("top_k", "switch", "bias"):
        assert sparse.generate(model_with(sparse, router_type), idx, 4, temperature=0).shape == (1, 7)


# ---------------------------------------------------------------- the edges


@pytest.mark.parametrize("router_type", ROUTERS)
@pytest.mark.parametrize(
    ("N", "E", "k"), [(1, 6, 2), (3, 7, 2), (10, 4, 4), (9, 1, 1), (1, 1, 1)], ids=lambda n: str(n)
)
def test_edges_are_defined(sparse, router_type, N, E, k):
    """One token, fewer tokens than experts, all experts, a single expert: finite forward and backward, loads that
    add up."""
    k = 1 if router_type == "switch" else k
    moe = layer(sparse, router_type, n_experts=E, top_k=k)
    x = tokens(N, 12).requires_grad_()
    y, routing = moe(x)
    y.square().sum().backward()
    assert y.isfinite().all() and x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in moe.parameters())
    load = routing.chosen.sum(0)
    if router_type in ("top_k", "bias"):
        assert load.sum() == N * k
    elif router_type == "expert_choice":
        assert load.tolist() == [max(1, math.ceil(k * N / E))] * E
    else:
        assert 1 <= load.sum() <= N
    if E == 1:
        torch.testing.assert_close(y, moe.experts[0](x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("router_type", ROUTERS)
def test_an_empty_expert_gets_a_zero_gradient(sparse, router_type):
    """All tokens want experts 0 and 1, at 9 tokens and capacity for all."""
    moe = layer(sparse, router_type, n_experts=4, capacity_factor=4.0)
    with torch.no_grad():
        moe.router.weight.zero_()
        moe.router.weight[:2] = 5.0
    y, routing = moe(tokens(9, 12).abs())
    y.sum().backward()
    idle = [e for e in range(4) if routing.chosen[:, e].sum() == 0]
    assert (len(idle) >= 2) == (router_type != "expert_choice")
    for e, expert in enumerate(moe.experts):
        for p in expert.parameters():
            assert (p.grad == 0).all() if e in idle else (p.grad != 0).any()


@pytest.mark.parametrize(
    ("router_type", "changes", "says"),
    [
        ("top_k", {"top_k": 6}, "top_k 6 is not from [12] to n_experts 5"),
        ("top_k", {"top_k": 0}, "top_k must be at least 1, got 0"),
        ("top_k", {"top_k": 1}, "top_k 1 is not from 2 to n_experts 5"),
        ("bias", {"top_k": 1}, "top_k 1 is not from 2 to n_experts 5"),
        ("switch", {"capacity_factor": 0.0}, "capacity_factor above 0 .* got 1 and 0.0"),
        ("switch", {"capacity_factor": -1.0}, "capacity_factor above 0 .* got 1 and -1.0"),
        ("switch", {"top_k": 2}, "needs top_k 1 .* got 2"),
        ("nobody", {}, "unknown router_type 'nobody'; valid: top_k, switch, bias, expert_choice"),
    ],
)
def test_impossible_settings_say_why(sparse, router_type, changes, says):
    with pytest.raises(ValueError, match=says):
        sparse.SparseBlock(config(sparse, router_type, **changes))
