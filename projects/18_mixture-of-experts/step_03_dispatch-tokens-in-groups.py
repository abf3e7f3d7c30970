"""Step 03: dispatch tokens in groups.

Chapter 07's loop lets every expert look through all tokens for its own. This step sorts the tokens by expert once,
runs each expert on one slice, and sums each token's rows; the gradient goes the same way back. It leaves out the
router: chapter 07's decides, here and there.

    python step_03_dispatch-tokens-in-groups.py

prints the time beside the loop's and the checks; about six seconds.

Shapes: N tokens, C = d_model, E experts, M pairs of a token and an expert that computes it, R rows of all slices.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console, kernels
from shared.checks import Checks
from shared.randomness import generator

modern = chapters.load_build(7)

SLICE_ROWS = 8  # libraries prepare a product anew for each new shape, which can take longer than the product


class Spread(torch.autograd.Function):
    """tokens (N, C) -> rows (R, C), row r a copy of tokens[token[r]]. Its gradient is Collect.

    Autograd's own gradient of tokens[token] adds row after row into zeros, on a GPU in any order."""

    @staticmethod
    def forward(ctx, tokens, token, place, first):
        ctx.save_for_backward(token, place, first)
        return tokens.index_select(0, token)

    @staticmethod
    def backward(ctx, grad):
        return Collect.apply(grad.contiguous(), *ctx.saved_tensors), None, None, None


class Collect(torch.autograd.Function):
    """rows (R, C) -> (N, C): each token's rows summed. Its gradient is Spread (an idle row's is undone by weight 0)."""

    @staticmethod
    def forward(ctx, rows, token, place, first):
        ctx.save_for_backward(token, place, first)
        return F.embedding_bag(place, rows, first, mode="sum")  # token n's: rows[place[first[n] : first[n + 1]]]

    @staticmethod
    def backward(ctx, grad):
        return Spread.apply(grad, *ctx.saved_tensors), None, None, None


def dispatch(tokens: torch.Tensor, weight: torch.Tensor, chosen: torch.Tensor, experts: nn.ModuleList) -> torch.Tensor:
    """Σ over the chosen e of weight[n, e] · experts[e](tokens[n]): tokens (N, C) -> (N, C).

    weight (N, E), chosen (N, E) bool. An expert's slice: a row for every token that chose it, then idle rows of
    weight 0 up to a multiple of SLICE_ROWS."""
    load, count = chosen.sum(0), chosen.sum(1)  # tokens of each expert (E,), experts of each token (N,)
    slices = -(-load // SLICE_ROWS) * SLICE_ROWS
    start = slices.cumsum(0) - slices
    place = (chosen.cumsum(0) - 1 + start)[chosen]  # (M,): the row of each pair, pairs sorted by token
    sizes = slices.tolist()
    token = place.new_zeros(sum(sizes)).scatter(0, place, chosen.nonzero()[:, 0])  # (R,): the token of each row
    gates = weight.new_zeros(sum(sizes)).scatter(0, place, weight.masked_select(chosen))[:, None]  # (R, 1)
    plan = (token, place, count.cumsum(0) - count)  # (N,): where in place each token's pairs begin
    y = run_experts(experts, Spread.apply(tokens, *plan), gates, sizes)
    return Collect.apply(y.to(tokens.dtype), *plan)


def run_experts(experts: nn.ModuleList, rows: torch.Tensor, gates: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Rows (R, C) and gates (R, 1), cut into a slice of the given size for each expert -> gate · expert(row)."""
    if kernels.grouped_product_fits(rows, experts[0].gate_proj.weight.shape):
        return gates * grouped_experts(experts, rows.bfloat16(), sizes)
    slices = zip(experts, rows.split(sizes), gates.split(sizes))
    return torch.cat([gate * expert(row) for expert, row, gate in slices])  # one by one: a slice fits the cache


def grouped_experts(experts: nn.ModuleList, rows: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """All experts in three products, in the dtype of rows (R, C): down(silu(gate(row)) · up(row)), (R, C)."""
    gate, up, down = (
        torch.stack([getattr(expert, name).weight for expert in experts]).to(rows.dtype).transpose(1, 2)
        for name in ("gate_proj", "up_proj", "down_proj")
    )
    ends = torch.tensor(sizes, device=rows.device).cumsum(0, dtype=torch.int32)  # where each slice ends
    hidden = F.silu(F.grouped_mm(rows, gate, offs=ends)) * F.grouped_mm(rows, up, offs=ends)
    return F.grouped_mm(hidden, down, offs=ends)


def by_dispatch(moe: modern.MoE, x: torch.Tensor) -> torch.Tensor:
    """What chapter 07's forward() computes for tokens x (N, C), with the dispatch for its loop."""
    gates, chosen = moe.route(x)
    weight = gates.new_zeros(len(x), len(moe.experts)).scatter(1, chosen, gates)
    return dispatch(x, weight, torch.zeros_like(weight, dtype=torch.bool).scatter(1, chosen, True), moe.experts)


def random_moe(E: int, k: int, C: int, d_hidden: int) -> modern.MoE:
    moe = modern.MoE(modern.ModernConfig(d_model=C, n_heads=1, d_hidden=d_hidden, n_experts=E, top_k=k))
    for name, p in moe.named_parameters():
        nn.init.normal_(p, std=0.3, generator=generator(1, "step_03", name))
    return moe


def run(forward: Callable, moe: modern.MoE, x: torch.Tensor) -> torch.Tensor:
    """y, dL/dx and dL/d of every parameter in one vector, for L = Σ y²."""
    x = x.clone().requires_grad_()
    y = forward(moe, x)
    return torch.cat([t.flatten() for t in (y, *torch.autograd.grad(y.square().sum(), (x, *moe.parameters())))])


def main() -> int:
    moe, times = random_moe(8, 2, 128, 172), {modern.MoE.forward: [], by_dispatch: []}
    with kernels.fastest_float32():
        for x in torch.randn(12, 1024, 128, generator=generator(1, "step_03", "batches")):
            for forward, spent in times.items():
                started = time.process_time()
                run(forward, moe, x)
                spent.append(1e3 * (time.process_time() - started))
    loop, fast = (sorted(spent)[6] for spent in times.values())
    console.say("1,024 tokens of 128 channels, 8 experts of width 172, k = 2, there and back:")
    console.say(f"loop {loop:.1f} ms, dispatch {fast:.1f} ms, ratio {fast / loop:.2f}")

    checks = Checks()
    for N, E, k in ((37, 5, 2), (1, 6, 3), (3, 7, 2), (10, 4, 4)):
        x, moe = torch.randn(N, 24, generator=generator(1, "step_03", N)).double(), random_moe(E, k, 24, 10).double()
        ours, reference = run(by_dispatch, moe, x), run(modern.MoE.forward, moe, x)
        checks.close(f"{N} tokens, k = {k} of {E}: the loop's y and gradients", ours, reference, 1e-12)
    rows, moe = torch.randn(64, 24, generator=generator(1, "step_03")), random_moe(5, 2, 24, 16)
    checks.equal("twice: the same bits", run(by_dispatch, moe, rows), run(by_dispatch, moe, rows))
    chosen = torch.rand(6, 5, generator=generator(1, "step_03", "chosen")) < 0.4  # any number of experts for a token
    leaves = [rows[:6, :n].double().requires_grad_() for n in (4, 5)]
    experts = random_moe(5, 1, 4, 3).double().experts
    agree = torch.autograd.gradcheck(lambda x, w: dispatch(x, w, chosen, experts), leaves)
    checks.true("gradients against finite differences", str(agree), "True", agree)
    sizes = [32, 0, 8, 0, 24]
    one_by_one = run_experts(moe.experts, rows, torch.ones(64, 1), sizes)
    checks.close("grouped product = expert by expert", grouped_experts(moe.experts, rows, sizes), one_by_one, 1e-5)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
