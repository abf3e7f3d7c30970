"""Step 03: dispatch tokens in groups.

In chapter 07's layer each expert looks through all tokens for its own. This step sorts them first,
like letters into pigeonholes: each expert gets a slice of rows, one for each token that chose it.
It runs once, on its slice. Then each token's rows are added.

For example: token 0 chose the experts A and B, token 1 A, token 2 B, token 3 both.

    row       0   1   2   3 to 7     8   9  10   11 to 15
    expert    A   A   A   A, idle    B   B   B   B, idle
    token     0   1   3   -          0   2   3   -

In which row of B's slice does token 3 stand? Four steps lead there, and the code takes them, too:
1. Three tokens chose A, and three chose B.
2. Matrix libraries prepare each new shape, which takes time. So that few shapes occur, a slice has
   a multiple of 8 rows. Here both have 8.
3. So A's slice begins at row 0, and B's at row 8.
4. Two tokens stand before token 3 in B's slice. So its row is 8 + 2 = 10.
An idle row gets some token, here token 0, and the gate 0: nothing comes of it.

Spread copies tokens into rows, Collect adds each token's rows. Step 10 builds both, and says why
tokens[token] and index_add won't do.

    python step_03_dispatch-tokens-in-groups.py

prints this example as the code sees it.

Shapes: N tokens, C = d_model, E experts, M pairs of a token and its expert, R rows of all slices.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console
from shared.checks import Checks
from shared.randomness import generator

modern = chapters.load_build(7)
Spread = chapters.load_step(18, 10).Spread  # tokens (N, C) -> rows (R, C): tokens[token]
Collect = chapters.load_step(18, 10).Collect  # rows (R, C) -> (N, C): the sum of each token's rows

# ---------------------------------------------------------------- the idea

SLICE_ROWS = 8  # a slice has a multiple of this


class Slices(NamedTuple):
    """Which row belongs to which token and expert: all slices, one after another."""

    sizes: list[int]  # E numbers: the rows of each expert's slice
    token: torch.Tensor  # (R,): the token of each row; an idle row names token 0
    place: torch.Tensor  # (M,): the row of each pair, in the tokens' order: 0A 0B 1A 2B 3A 3B
    first: torch.Tensor  # (N,): where in place each token's pairs begin, for Collect to add them


def make_slices(chosen: torch.Tensor) -> Slices:
    """chosen (N, E) bool -> the Slices in which each expert finds the tokens that chose it."""
    load = chosen.sum(0)  # (E,): step 1, the tokens of each expert
    eights = (load + SLICE_ROWS - 1) // SLICE_ROWS  # (E,): step 2, load / 8, rounded up
    rows = eights * SLICE_ROWS  # (E,): rows of each slice
    start = rows.cumsum(0) - rows  # (E,): step 3, all rows of the slices before this one
    rank = chosen.cumsum(0) - 1  # (N, E): step 4, how many tokens stand before this one
    row = start + rank  # (N, E): the row of each token in each slice, if it chose that expert
    place = row[chosen]  # (M,): the rows of the pairs, token by token

    sizes = rows.tolist()
    owner = chosen.nonzero()[:, 0]  # (M,): the token of each pair
    token = place.new_zeros(sum(sizes))  # (R,): idle rows keep the 0
    token[place] = owner

    count = chosen.sum(1)  # (N,): pairs of each token
    first = count.cumsum(0) - count  # (N,): how many pairs the tokens before this one have
    return Slices(sizes, token, place, first)


def run_experts(
    experts: nn.ModuleList, rows: torch.Tensor, gates: torch.Tensor, sizes: list[int]
) -> torch.Tensor:
    """Each expert once, on its slice of rows (R, C): gate · expert(row), (R, C). gates (R, 1)."""
    slices = zip(experts, rows.split(sizes), gates.split(sizes))
    return torch.cat([gate * expert(row) for expert, row, gate in slices])


def dispatch_in_groups(
    tokens: torch.Tensor,  # (N, C)
    weight: torch.Tensor,  # (N, E): the gates
    chosen: torch.Tensor,  # (N, E) bool
    experts: nn.ModuleList,
    run: Callable = run_experts,  # step 11 gives another
) -> torch.Tensor:
    """Token n's output, (N, C): Σ over its chosen e of weight[n, e] · experts[e](tokens[n])."""
    sizes, token, place, first = make_slices(chosen)
    gate = weight.masked_select(chosen)  # (M,): the gate of each pair
    gates = weight.new_zeros(len(token))  # (R,): idle rows keep the 0
    gates[place] = gate
    rows = Spread.apply(tokens, token, place, first)  # (R, C): copies
    y = run(experts, rows, gates[:, None], sizes)  # (R, C), in bfloat16 under autocast
    return Collect.apply(y.to(tokens.dtype), token, place, first)


# ---------------------------------------------------------------- look at it


def by_groups(moe: modern.MoE, x: torch.Tensor) -> torch.Tensor:
    """Chapter 07's layer, with groups instead of its loop: x (N, C) -> (N, C)."""
    gates, numbers = moe.route(x)  # (N, k) each
    weight = gates.new_zeros(len(x), len(moe.experts)).scatter(1, numbers, gates)  # (N, E)
    return dispatch_in_groups(x, weight, chosen=weight > 0, experts=moe.experts)


def random_moe(E: int, k: int, C: int, d_hidden: int) -> modern.MoE:
    cfg = modern.ModernConfig(d_model=C, n_heads=1, d_hidden=d_hidden, n_experts=E, top_k=k)
    moe = modern.MoE(cfg)
    for name, p in moe.named_parameters():
        nn.init.normal_(p, std=0.3, generator=generator(1, "step_03", name))
    return moe


def main() -> int:
    chosen = torch.tensor([[1, 1], [1, 0], [0, 1], [1, 1]]).bool()
    plan = make_slices(chosen)
    table = [
        ["place", str(plan.place.tolist()), "rows of 0A 0B 1A 2B 3A 3B"],
        ["first", str(plan.first.tolist()), "in place, token 3 begins at 4"],
        ["token", str(plan.token.tolist()[:11]), "in rows 0 to 10; 3 to 7 are idle"],
    ]
    console.say(console.Table(["name", "value", "meaning"], table))
    console.say("\nLook at place: its last two numbers, 2 and 10, are the rows of token 3.")

    checks = Checks()
    checks.equal("the rows, by hand", plan.place.tolist(), [0, 8, 1, 9, 2, 10])
    moe = random_moe(5, 2, 24, 10)
    x = torch.randn(37, 24, generator=generator(1, "step_03"))
    checks.close("37 tokens: as the loop", by_groups(moe, x), moe(x), 1e-5)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
