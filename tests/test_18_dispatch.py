"""Chapter 18's dispatch: the loop over experts, by another route."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from shared.randomness import generator

# N tokens, E experts, k of them, C channels, hidden width: in no case are two of them equal
SIZES = [(37, 5, 2, 12, 7), (1, 6, 3, 10, 4), (3, 7, 2, 8, 5), (10, 4, 3, 9, 6), (130, 8, 2, 16, 11)]


def layer(sparse, cls, E: int, k: int, C: int, H: int, dtype=torch.float32, **changes) -> nn.Module:
    """A layer of class cls with random weights that depend on their names and shapes alone."""
    cfg = sparse.SparseConfig(d_model=C, n_heads=1, d_hidden=H, n_experts=E, top_k=k, **changes)
    moe = cls(cfg)
    for name, p in moe.named_parameters():
        nn.init.normal_(p, std=0.4, generator=generator(18, name, tuple(p.shape)))
    return moe.to(dtype)


def tokens(*shape: int, dtype=torch.float32, key: str = "x") -> torch.Tensor:
    return torch.randn(shape, generator=generator(18, key, shape)).to(dtype)


def outputs(forward, moe: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    """y, and the gradient of Σ y · dy by x and by every parameter."""
    x = x.clone().requires_grad_()
    y = forward(x)
    names = [name for name, _ in moe.named_parameters()]
    return {"y": y, **dict(zip(["x", *names], torch.autograd.grad(y, (x, *moe.parameters()), dy)))}


def assert_close(ours: dict, theirs: dict, tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        gap = (ours[name] - theirs[name]).abs().max().item()
        assert gap <= tolerance * max(1.0, theirs[name].abs().max().item()), f"{name} is {gap:.1e} off"


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 2e-7)])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_dispatch_is_the_loop_forward_and_backward(sparse, modern, sizes, dtype, tolerance):
    N, E, k, C, H = sizes
    moe = layer(sparse, sparse.GroupedMoE, E, k, C, H, dtype)
    x, dy = tokens(N, C, dtype=dtype), tokens(N, C, dtype=dtype, key="dy")
    loop = outputs(lambda x: modern.MoE.forward(moe, x), moe, x, dy)
    assert_close(outputs(lambda x: moe(x)[0], moe, x, dy), loop, tolerance)


@pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 1.0])
def test_a_token_may_have_any_number_of_experts(sparse, part):
    """Against the definition over a dense mask, from nobody chosen to everybody."""
    N, E, C = 23, 6, 10
    moe = layer(sparse, sparse.GroupedMoE, E, 2, C, 7, torch.float64)
    draw = generator(18, "mask", part)
    chosen = torch.rand(N, E, generator=draw) < part
    weight, x, dy = (torch.randn(N, n, generator=draw).double() for n in (E, C, C))

    def run(forward) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_(), *moe.experts.parameters()]
        y = forward(*leaves[:2])
        return [y, *torch.autograd.grad(y, leaves, dy, allow_unused=True, materialize_grads=True)]

    ours = run(lambda x, w: sparse.dispatch(x, w, chosen, moe.experts))
    masked = run(lambda x, w: sum((w * chosen)[:, e, None] * expert(x) for e, expert in enumerate(moe.experts)))
    for mine, theirs in zip(ours, masked, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    assert (ours[0][~chosen.any(1)] == 0).all()


def test_spread_and_collect_are_each_others_gradient(sparse):
    """To the second order, against finite differences; token 1 has no row."""
    token, place, first = torch.tensor([0, 2, 3, 2]), torch.tensor([0, 1, 3, 2]), torch.tensor([0, 1, 1, 3])
    x = tokens(4, 3, dtype=torch.float64).requires_grad_()
    rows = tokens(4, 3, dtype=torch.float64, key="rows").requires_grad_()
    assert torch.equal(sparse.Spread.apply(x, token, place, first), x[token])
    collected = torch.stack((rows[0], 0 * rows[0], rows[1] + rows[3], rows[2]))
    assert torch.equal(sparse.Collect.apply(rows, token, place, first), collected)
    for function, leaf in ((sparse.Spread, x), (sparse.Collect, rows)):

        def squared(leaf, function=function):
            return function.apply(leaf, token, place, first).square()

        assert torch.autograd.gradcheck(squared, leaf) and torch.autograd.gradgradcheck(squared, leaf)


def test_gradients_of_the_dispatch_against_finite_differences(sparse):
    """Most of its rows are idle here."""
    moe = layer(sparse, sparse.GroupedMoE, 5, 2, 4, 3, torch.float64)
    chosen = torch.rand(6, 5, generator=generator(18, "chosen")) < 0.4
    x, weight = (tokens(6, n, dtype=torch.float64).requires_grad_() for n in (4, 5))
    assert 0 < chosen.sum() < 5 * sparse.SLICE_ROWS

    def run(x, weight):
        return sparse.dispatch(x, weight, chosen, moe.experts)

    assert torch.autograd.gradcheck(run, (x, weight)) and torch.autograd.gradgradcheck(run, (x, weight))


class Recorder(TorchDispatchMode):
    """The names of the operations that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.overloadpacket.__name__)
        if function.overloadpacket.__name__.startswith("index_put"):
            assert not (kwargs or {}).get("accumulate", len(args) > 3 and args[3]), "rows are added one by one"
        return function(*args, **(kwargs or {}))


def test_nothing_is_added_in_an_order_that_a_gpu_may_change(sparse, modern):
    moe = layer(sparse, sparse.GroupedMoE, 5, 2, 12, 7)
    x, dy = tokens(37, 12).requires_grad_(), tokens(37, 12, key="dy")
    with Recorder() as ours:
        moe(x)[0].backward(dy)
    assert "mm" in ours.names and "_embedding_bag_forward_only" in ours.names | {"_embedding_bag_forward_only"}
    assert not {name for name in ours.names if name.startswith(("index_add", "scatter_add", "scatter_reduce"))}
    with pytest.raises(AssertionError, match="one by one"), Recorder():  # the instrument can see it: the loop does it
        modern.MoE.forward(moe, x).backward(dy)


def test_twice_the_same_bits(sparse):
    moe = layer(sparse, sparse.GroupedMoE, 8, 3, 16, 11)
    x, dy = tokens(130, 16), tokens(130, 16, key="dy")
    first, second = (outputs(lambda x: moe(x)[0], moe, x, dy) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_identical_experts_are_one_mlp(sparse):
    moe = layer(sparse, sparse.GroupedMoE, 5, 3, 12, 7, torch.float64)
    for expert in moe.experts:
        expert.load_state_dict(moe.experts[0].state_dict())
    x = tokens(2, 11, 12, dtype=torch.float64)
    torch.testing.assert_close(moe(x)[0], moe.experts[0](x), rtol=0, atol=1e-6)  # gates are float32


def test_all_experts_chosen_are_a_softmax_over_all(sparse):
    moe = layer(sparse, sparse.GroupedMoE, 4, 4, 12, 7)
    x = tokens(9, 12)
    weights = (x @ moe.router.weight.T).softmax(-1)
    mixture = sum(weights[:, e, None] * expert(x) for e, expert in enumerate(moe.experts))
    torch.testing.assert_close(moe(x)[0], mixture, rtol=1e-5, atol=1e-5)


def test_leading_axes_are_tokens(sparse):
    moe = layer(sparse, sparse.GroupedMoE, 5, 2, 12, 7)
    x = tokens(3, 4, 6, 12)
    y, routing = moe(x)
    assert y.shape == x.shape and routing.logits.shape == routing.chosen.shape == (72, 5)
    torch.testing.assert_close(y.flatten(0, 2), moe(x.flatten(0, 2))[0])


@pytest.mark.parametrize("sizes", [[16, 0, 8, 0, 24], [0, 0, 0, 0, 48], [8, 8, 16, 8, 8]], ids=str)
def test_the_grouped_product_is_expert_by_expert(sparse, sizes):
    """F.grouped_mm on the CPU, where torch runs it as a loop of its own."""
    moe = layer(sparse, sparse.GroupedMoE, 5, 2, 16, 24)
    rows, dy = tokens(48, 16), tokens(48, 16, key="dy")
    ones = torch.ones(48, 1)
    ours = outputs(lambda x: sparse.grouped_experts(moe.experts, x, sizes), moe.experts, rows, dy)
    theirs = outputs(lambda x: sparse.run_experts(moe.experts, x, ones, sizes), moe.experts, rows, dy)
    assert_close(ours, theirs, 1e-5)


@pytest.mark.parametrize(
    ("device_type", "capability", "dtype", "shape", "fits"),
    [
        ("cuda", (9, 0), torch.bfloat16, (24, 16), True),
        ("cuda", (10, 0), torch.bfloat16, (24, 16), True),
        ("cuda", (10, 3), torch.bfloat16, (24, 16), True),
        ("cuda", (7, 5), torch.bfloat16, (24, 16), False),
        ("cuda", (8, 0), torch.bfloat16, (24, 16), False),
        ("cuda", (8, 9), torch.bfloat16, (24, 16), False),
        ("cuda", (12, 0), torch.bfloat16, (24, 16), False),
        ("cuda", (9, 0), torch.float32, (24, 16), False),
        ("cuda", (9, 0), torch.float16, (24, 16), False),
        ("cuda", (9, 0), torch.bfloat16, (85, 64), False),  # 85 · 2 bytes are not whole 16-byte words
        ("cuda", (9, 0), torch.bfloat16, (24, 12), False),
        ("cpu", (9, 0), torch.bfloat16, (24, 16), False),
        ("mps", (0, 0), torch.bfloat16, (24, 16), False),
    ],
)
def test_the_grouped_product_is_for_gpus_with_a_kernel_for_it(
    sparse, device_type, capability, dtype, shape, fits
):
    assert sparse.grouped_product_fits(device_type, capability, dtype, shape) is fits


def test_the_grouped_product_meets_no_empty_slice(sparse, monkeypatch):
    """Experts without rows get idle ones; their weights' gradients are zero, and exactly so."""
    moe, seen = layer(sparse, sparse.GroupedMoE, 5, 2, 16, 24), []
    real = F.grouped_mm

    def recorded(x, weights, offs):
        seen.append([end - start for start, end in zip([0, *offs.tolist()], offs.tolist())])
        return real(x, weights, offs=offs)

    monkeypatch.setattr(F, "grouped_mm", recorded)
    y = sparse.grouped_experts(moe.experts, tokens(48, 16), [0, 24, 0, 24, 0])
    assert seen == [[8, 24, 8, 24, 8]] * 3 and y.shape == (48, 16)
    y.square().sum().backward()
    for e, expert in enumerate(moe.experts):
        for p in expert.parameters():
            assert (p.grad == 0).all() if e in (0, 2, 4) else (p.grad != 0).any()


def test_the_dispatch_by_grouped_products_is_the_loop(sparse, modern):
    """In bfloat16, run by torch's own loop here; some experts get no token."""
    moe, x = layer(sparse, sparse.GroupedMoE, 8, 2, 16, 24), tokens(5, 16)
    with torch.no_grad():
        weight, chosen = moe.decide(x @ moe.router.weight.T)
        assert (chosen.sum(0) == 0).any()
        ours = sparse.dispatch_in_groups(x, weight, chosen, moe.experts, sparse.run_grouped)
        gap = (ours - modern.MoE.forward(moe, x)).abs().max()
    assert 0 < gap < 0.03 * ours.abs().max()


def test_the_layer_keeps_its_dtype_and_its_router_float32(sparse):
    moe = layer(sparse, sparse.GroupedMoE, 5, 2, 12, 7, torch.bfloat16)
    y, routing = moe(tokens(37, 12, dtype=torch.bfloat16))
    assert y.dtype == torch.bfloat16 and routing.logits.dtype == torch.float32
    moe, x = layer(sparse, sparse.GroupedMoE, 16, 2, 24, 7), tokens(4096, 24)
    exact = sparse.top_k_mask(x.double() @ moe.router.weight.double().T, 2)
    with torch.autocast("cpu", torch.bfloat16):
        y, routing = moe(x)
    assert y.dtype == torch.float32 and routing.logits.dtype == torch.float32
    assert torch.equal(routing.chosen, exact)
    coarse = sparse.top_k_mask((x.bfloat16() @ moe.router.weight.bfloat16().T).float(), 2)
    assert not torch.equal(coarse, exact)  # so the test can tell
