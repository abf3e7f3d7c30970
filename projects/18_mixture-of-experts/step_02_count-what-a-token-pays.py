"""Step 02: count what a token pays.

A sparse layer has two sizes: what it stores and what one token meets. This step counts both, and the FLOPs that
follow from the second, by formula; then it holds the formula to layers that torch built and to two published models.
It leaves out what the formula doesn't see: moving tokens to their experts, which step 03 makes cheap.

    python step_02_count-what-a-token-pays.py

prints the table of E and k, two published models taken apart and the checks; about two seconds.

Shapes: C = d_model, D = head_dim, E experts, k = top_k, L layers, V = vocab_size.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn as nn
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console
from shared.checks import Checks
from shared.randomness import generator

modern = chapters.load_build(7)


@dataclass(frozen=True)
class Shape:
    """What a decoder with a sparse SwiGLU MLP in each layer is made of; no biases, untied head, gains in its norms."""

    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: (
        int  # heads of keys and values; fewer than n_heads where several queries share one (Ainslie et al. 2023)
    )
    head_dim: int
    d_hidden: int  # of one expert
    n_experts: int
    top_k: int
    vocab_size: int
    norms_of_q_and_k: bool = False  # a norm over all query channels, and one over all key channels


PUBLISHED = {  # shape, parameters in all, active: Jiang et al. 2024, Muennighoff et al. 2024 and their weights
    "Mixtral 8x7B": (Shape(4096, 32, 32, 8, 128, 14336, 8, 2, 32000), 46_702_792_704, 12_879_925_248),
    "OLMoE-1B-7B": (Shape(2048, 16, 16, 16, 128, 1024, 64, 8, 50304, True), 6_919_161_856, 1_282_017_280),
}


def sparse_layer(d_model: int, d_hidden: int, n_experts: int, top_k: int) -> tuple[int, int]:
    """Parameters of one sparse layer, in all and active: experts of three matrices, and a router without bias."""
    expert, router = 3 * d_model * d_hidden, n_experts * d_model
    return n_experts * expert + router, top_k * expert + router


def attention(s: Shape) -> int:
    """Parameters of one attention: queries and output over all heads, keys and values over theirs."""
    queries, keys = s.n_heads * s.head_dim, s.n_kv_heads * s.head_dim
    return s.d_model * (2 * queries + 2 * keys) + s.norms_of_q_and_k * (queries + keys)


def model(s: Shape) -> tuple[int, int]:
    """Parameters of the whole model, in all and active; embedding and head are two matrices, and all of both active."""
    total, active = sparse_layer(s.d_model, s.d_hidden, s.n_experts, s.top_k)
    rest = s.n_layers * (attention(s) + 2 * s.d_model) + s.d_model + 2 * s.vocab_size * s.d_model
    return s.n_layers * total + rest, s.n_layers * active + rest


def flops(active_parameters: int) -> int:
    """Forward FLOPs per token in the matrices: a multiplication and an addition for each number that it meets.

    Training costs three times that: one product forward, two backward (Kaplan et al. 2020, section 2.1).
    """
    return 2 * active_parameters


def built(d_model: int, d_hidden: int, n_experts: int, top_k: int) -> tuple[int, int]:
    """The same of chapter 07's layer, as torch built it, and with all but k of its experts taken out."""
    cfg = modern.ModernConfig(d_model=d_model, n_heads=1, d_hidden=d_hidden, n_experts=n_experts, top_k=top_k)
    with torch.device("meta"):
        moe = modern.MoE(cfg)
    total = sum(p.numel() for p in moe.parameters())
    moe.experts = moe.experts[:top_k]
    return total, sum(p.numel() for p in moe.parameters())


def built_attention(s: Shape) -> int:
    """One layer's attention in torch's own modules."""
    queries, keys = s.n_heads * s.head_dim, s.n_kv_heads * s.head_dim
    with torch.device("meta"):
        parts = [nn.Linear(s.d_model, width, bias=False) for width in (queries, keys, keys)]
        parts.append(nn.Linear(queries, s.d_model, bias=False))
        if s.norms_of_q_and_k:
            parts += [nn.RMSNorm(queries), nn.RMSNorm(keys)]
    return sum(p.numel() for part in parts for p in part.parameters())


def main() -> int:
    dense = 3 * 768 * 2048
    rows = []
    for n_experts, top_k, d_hidden in (
        (1, 1, 2048),
        (8, 1, 2048),
        (8, 2, 2048),
        (8, 2, 1024),
        (64, 8, 256),
        (8, 8, 256),
    ):
        total, active = sparse_layer(768, d_hidden, n_experts, top_k)
        counts = [f"{n:,}" for n in (n_experts, top_k, d_hidden, total, active, flops(active))]
        rows.append([*counts, f"{total / dense:.2f}", f"{active / dense:.3f}"])
    console.say("One layer at C = 768, beside a dense SwiGLU of hidden width 2,048:")
    console.say()
    headers = ["E", "k", "width", "parameters", "active", "FLOPs a token", "all / dense", "active / dense"]
    console.say(console.Table(headers, rows))
    checks, rows = Checks(), []
    for name, (s, total, active) in PUBLISHED.items():
        checks.equal(f"{name}: in all, active", model(s), (total, active))
        checks.equal(f"{name}: one attention, as torch builds it", attention(s), built_attention(s))
        experts = s.n_layers * s.n_experts * 3 * s.d_model * s.d_hidden
        rows.append([name, f"{total:,}", f"{active:,}", f"{active / total:.1%}", f"{experts / total:.1%}"])
    console.say("\nTwo published models:")
    console.say()
    console.say(console.Table(["model", "parameters", "active", "active part", "of all in experts"], rows))

    checks.equal("C = 768, width 2,048, 8 experts, k = 2", sparse_layer(768, 2048, 8, 2), (37_754_880, 9_443_328))
    checks.equal("C = 12, width 7, E = 5, k = 2, as torch builds it", sparse_layer(12, 7, 5, 2), built(12, 7, 5, 2))
    moe = modern.MoE(modern.ModernConfig(d_model=12, n_heads=1, d_hidden=7, n_experts=5, top_k=2))
    with FlopCounterMode(display=False) as counted:
        moe(torch.randn(30, 12, generator=generator(1, "step_02")))
    checks.equal(
        "FLOPs of 30 tokens, as torch counts them", 30 * flops(sparse_layer(12, 7, 5, 2)[1]), counted.get_total_flops()
    )
    everyone = replace(PUBLISHED["Mixtral 8x7B"][0], top_k=8)
    checks.equal("k = E: everything is active", *model(everyone))
    fine, coarse = sparse_layer(768, 256, 64, 8), sparse_layer(768, 1024, 16, 2)
    router = 64 * 768 - 16 * 768
    checks.equal(
        "experts cut in four, four times as many: only the router grows", fine, tuple(n + router for n in coarse)
    )
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
