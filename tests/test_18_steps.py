"""What chapter 18's pages leave to a developer: more values, and PyTorch's own counts."""

from dataclasses import replace

import pytest
import torch
import torch.nn as nn
from torch.utils.flop_counter import FlopCounterMode

from shared import chapters
from shared.randomness import generator

step_01, step_02, step_03, step_04, step_05, step_06, step_07, step_09, step_12, step_13 = (
    chapters.load_step(18, n) for n in (1, 2, 3, 4, 5, 6, 7, 9, 12, 13)
)
forward_and_backward = chapters.load_step(18, 15).forward_and_backward


# ---------------------------------------------------------------- 01, 12: the router


def test_ties_at_the_border_go_to_the_lowest_numbers(modern):
    scores = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, 1.0]])  # three tie for the last two places
    assert step_01.top_k_mask(scores, 4)[0].nonzero().flatten().tolist() == [1, 2, 3, 4]
    moe = modern.MoE(modern.ModernConfig(d_model=12, n_heads=1, n_experts=5, top_k=2))
    nn.init.zeros_(moe.router.weight)
    x = torch.randn(64, 12, generator=generator(1, "step_01", "x"))
    assert moe.route(x)[1].unique(dim=0).tolist() == [[0, 1]]


def test_without_ties_topk_chooses_the_same(modern):
    moe = step_03.random_moe(5, 2, 12, 7)
    x = torch.randn(64, 12, generator=generator(1, "step_01", "x"))
    best = (x @ moe.router.weight.T).topk(2)
    gates, chosen = moe.route(x)
    assert torch.equal(chosen, best.indices)
    torch.testing.assert_close(gates, best.values.softmax(-1), rtol=0, atol=1e-6)


def test_gates_stay_float32_under_autocast(modern):
    moe = step_03.random_moe(5, 2, 12, 7)
    with torch.autocast("cpu", torch.bfloat16):
        gates, _ = moe.route(torch.ones(3, 12))
    assert gates.dtype == torch.float32


def test_jitter_moves_tokens_in_training_alone_and_spares_the_input():
    moe, plain = step_12.jittered(0.3), step_12.random_moe(16, 3, 24, 7)
    x = torch.randn(64, 24, generator=generator(1, "noise"))
    before = x.clone()
    moved = (moe.train().route(x)[1] != plain.route(x)[1]).any(1).double().mean().item()
    assert 0.05 < moved < 0.95
    assert torch.equal(moe.eval().route(x)[1], plain.route(x)[1])
    assert torch.equal(x, before)


# ---------------------------------------------------------------- 02: sizes


@pytest.mark.parametrize(("C", "H", "E", "k"), [(12, 7, 5, 2), (20, 9, 6, 3), (8, 5, 4, 4)])
def test_a_layer_is_as_large_as_torch_builds_it(modern, C, H, E, k):
    cfg = modern.ModernConfig(d_model=C, n_heads=1, d_hidden=H, n_experts=E, top_k=k)
    with torch.device("meta"):
        moe = modern.MoE(cfg)
    stored = sum(p.numel() for p in moe.parameters())
    moe.experts = moe.experts[:k]
    active = sum(p.numel() for p in moe.parameters())
    assert step_02.sparse_layer(C, H, E, k) == (stored, active)


@pytest.mark.parametrize("n_kv_heads", [8, 32])
def test_an_attention_is_as_large_as_torch_builds_it(n_kv_heads):
    s = replace(step_02.MIXTRAL, n_kv_heads=n_kv_heads)
    queries, keys = s.n_heads * s.head_dim, s.n_kv_heads * s.head_dim
    with torch.device("meta"):
        parts = [nn.Linear(s.d_model, width, bias=False) for width in (queries, keys, keys)]
        parts.append(nn.Linear(queries, s.d_model, bias=False))
    assert step_02.attention(s) == sum(p.numel() for part in parts for p in part.parameters())


def test_torch_counts_two_flops_for_each_active_parameter():
    moe = step_03.random_moe(5, 2, 12, 7)
    with FlopCounterMode(display=False) as counted:
        moe(torch.randn(30, 12, generator=generator(1, "step_02")))
    _, active = step_02.sparse_layer(12, 7, 5, 2)
    assert 30 * 2 * active == counted.get_total_flops()


def test_finer_experts_cost_a_larger_router_and_nothing_else():
    fine, coarse = step_02.sparse_layer(768, 256, 64, 8), step_02.sparse_layer(768, 1024, 16, 2)
    router = 64 * 768 - 16 * 768
    assert fine == tuple(n + router for n in coarse)
    assert step_02.sparse_layer(768, 2048, 8, 2) == (37_754_880, 9_443_328)


# ---------------------------------------------------------------- 03: the dispatch


@pytest.mark.parametrize(("N", "E", "k"), [(37, 5, 2), (1, 6, 3), (3, 7, 2), (10, 4, 4)])
def test_the_groups_compute_the_loop(modern, N, E, k):
    x = torch.randn(N, 24, generator=generator(1, "step_03", N)).double()
    moe = step_03.random_moe(E, k, 24, 10).double()
    ours = forward_and_backward(step_03.by_groups, moe, x)
    loop = forward_and_backward(modern.MoE.forward, moe, x)
    torch.testing.assert_close(ours, loop, rtol=0, atol=1e-12)
    assert torch.equal(ours, forward_and_backward(step_03.by_groups, moe, x))


def test_the_example_of_four_tokens(sparse):
    plan = sparse.make_slices(torch.tensor([[1, 1], [1, 0], [0, 1], [1, 1]]).bool())
    assert plan.sizes == [8, 8]
    assert plan.place.tolist() == [0, 8, 1, 9, 2, 10] and plan.first.tolist() == [0, 2, 3, 4]
    assert plan.token.tolist() == [0, 1, 3, 0, 0, 0, 0, 0, 0, 2, 3, 0, 0, 0, 0, 0]


# ---------------------------------------------------------------- 04 to 07: the routers


def test_the_balance_loss_at_the_corners(sparse):
    in_turn = 9 * torch.eye(6).repeat(80, 1)
    assert sparse.switch_balance_loss(in_turn, 1).item() == pytest.approx(1, abs=1e-6)
    one_takes_all = 40.0 * (torch.arange(6) < 1).expand(480, 6)
    assert sparse.switch_balance_loss(one_takes_all, 1).item() == pytest.approx(6, abs=1e-5)


def test_the_gradient_of_the_routers_weights_by_hand(sparse, modern):
    cfg = modern.ModernConfig(d_model=12, n_heads=1, d_hidden=7, n_experts=5, top_k=2)
    moe = sparse.GroupedMoE(cfg)
    moe.load_state_dict(step_03.random_moe(5, 2, 12, 7).state_dict())
    x = torch.randn(3, 11, 12, generator=generator(1, "step_04", "x"))
    y, routing = moe(x)
    torch.testing.assert_close(y, modern.MoE.forward(moe, x), rtol=0, atol=1e-5)
    p = routing.logits.softmax(-1)
    f = sparse.top_k_mask(routing.logits, 2).float().mean(0) / 2
    by_logits = 5 / 33 * p * (f - (p * f).sum(-1, keepdim=True))  # the softmax's derivative
    sparse.switch_balance_loss(routing.logits, 2).backward()
    by_hand = by_logits.T @ x.flatten(0, 1)
    torch.testing.assert_close(moe.router.weight.grad, by_hand, rtol=0, atol=1e-6)


def test_going_down_the_balance_loss_balances(sparse):
    favour = torch.tensor([3.0, 2.0, 0.0, 0.0, 0.0, -2.0])
    logits = torch.randn(480, 6, generator=generator(1, "step_04")) + favour
    before = step_04.max_violation(sparse.top_k_mask(logits, 2).sum(0))
    for _ in range(300):
        logits = logits.detach().requires_grad_()
        loss = sparse.switch_balance_loss(logits, 2)
        logits = logits - 20 * torch.autograd.grad(loss, logits)[0]
    after = step_04.max_violation(sparse.top_k_mask(logits, 2).sum(0))
    assert before > 1.5 and after < before / 2


def test_what_a_switch_serves_is_not_zero():
    y, _ = step_05.make(1.0, n_experts=3)(torch.ones(6, 12))
    assert (y[:2] != 0).all() and (y[2:] == 0).all()


def test_expert_choice_gives_out_k_experts_a_token_on_average():
    x = torch.randn(40, 12, generator=generator(1, "step_06"))
    _, routing = step_06.make(step_06.ExpertChoiceMoE, 5, 2)(x)
    assert routing.chosen.sum(0).tolist() == [16] * 5 and routing.chosen.sum() == 80


def test_too_fast_a_bias_swings():
    slow = step_07.unevenness(step_07.run(step_07.make(0.01)))
    none = step_07.unevenness(step_07.run(step_07.make(0.0)))
    fast = step_07.unevenness(step_07.run(step_07.make(0.1)))
    assert slow / none < 0.5 and 1.5 < fast / slow < 10


# ---------------------------------------------------------------- 09, 13: models


def test_favourites_of_a_table_by_hand(sparse):
    counts = torch.tensor([[30.0, 10.0], [5.0, 15.0], [0.1, 0.0]])
    totals = torch.tensor([40.0, 20.0, 0.1])
    expected = [[(0, 0.75), (1, 0.25), (2, 0.0)], [(1, 0.75), (0, 0.25), (2, 0.0)]]
    assert sparse.favourites(counts, totals) == step_09.favourites(counts, totals) == expected


def test_upcycling_adds_experts_and_routers(sparse, gpt, modern):
    cfg = sparse.SparseConfig(mlp_type="swiglu", d_hidden=90)
    dense = modern.ModernGPT(cfg, 95)
    gpt.init_parameters(dense, seed=1)
    model = step_13.upcycle(dense, replace(cfg, mlp_type="moe"), seed=2)
    size, expert, router = gpt.count_parameters(dense), 3 * 64 * 90, 8 * 64
    assert gpt.count_parameters(model) == size + 2 * (7 * expert + router)
    assert sparse.active_parameters(model) == size + 2 * (expert + router)
    idx = torch.randint(95, (1, 5), generator=generator(18, "idx"))
    ours = sparse.generate(model, idx, 20, temperature=0)
    assert torch.equal(ours, gpt.generate(dense, idx, 20, temperature=0))


def test_a_look_inside_leaves_the_mode_as_it_was_and_sees_what_training_drops(sparse):
    corpus = type("Corpus", (), {})()
    corpus.validation = torch.randint(23, (700,), generator=generator(18, "text"))
    corpus.vocab_size = 23
    cfg = sparse.SparseConfig(router_type="switch", top_k=1, capacity_factor=0.5)
    model = sparse.SparseGPT(cfg, 23)
    sparse.gpt.init_parameters(model, seed=1)
    for training in (True, False):
        _, dropped, _ = sparse.count_meetings(model.train(training), corpus)
        assert model.training is training and dropped >= 0.4
