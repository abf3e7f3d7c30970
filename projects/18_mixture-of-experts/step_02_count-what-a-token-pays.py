"""Step 02: count what a token pays.

Why send a token to 8 experts of 64? Because a sparse layer has two sizes. It stores 64 experts, and
what it can know grows with them. But a token meets the matrices of 8 only, and of the router: the
active parameters. For example, with 768 channels, and experts of width 256:

    one expert      3 matrices of 768 x 256            589,824
    router          1 matrix of 64 x 768                49,152
    stored          64 experts and the router       37,797,888
    active          8 experts and the router         4,767,744
    a dense MLP     3 matrices of 768 x 2,048        4,718,592

So the sparse layer stores eight times what the dense one does, and a token pays hardly more.

It pays 2 FLOPs (floating-point operations) for each number: a multiplication and an addition.

    python step_02_count-what-a-token-pays.py

prints more layers of E experts, k for each token, and counts two published models.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import cli, console
from shared.checks import Checks

# ---------------------------------------------------------------- the idea


def sparse_layer(d_model: int, d_hidden: int, n_experts: int, top_k: int) -> tuple[int, int]:
    """Parameters of one sparse layer, (stored, active): SwiGLU experts and a router, no biases."""
    expert = 3 * d_model * d_hidden
    router = n_experts * d_model
    stored = n_experts * expert + router
    active = top_k * expert + router
    return stored, active


def flops(active_parameters: int) -> int:
    """FLOPs of one token, forward: a multiplication and an addition for each number it meets."""
    return 2 * active_parameters


# ---------------------------------------------------------------- whole models


@dataclass(frozen=True)
class Shape:
    """The sizes of a model with a sparse layer in each block, without biases, its head untied."""

    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int  # heads of keys and values; several query heads may share one (chapter 37)
    head_dim: int
    d_hidden: int  # of one expert
    n_experts: int
    top_k: int
    vocab_size: int
    norms_of_q_and_k: bool = False  # whether a norm follows the queries, and one the keys


def attention(s: Shape) -> int:
    """Parameters of one attention: matrices for queries, keys, values and the output."""
    queries = s.n_heads * s.head_dim  # channels of all queries; the output's matrix is as large
    keys = s.n_kv_heads * s.head_dim  # channels of all keys; as many of values
    matrices = 2 * s.d_model * queries + 2 * s.d_model * keys
    norms = queries + keys if s.norms_of_q_and_k else 0
    return matrices + norms


def model(s: Shape) -> tuple[int, int]:
    """Parameters of the whole model, (stored, active). All but the experts is active."""
    stored, active = sparse_layer(s.d_model, s.d_hidden, s.n_experts, s.top_k)
    attentions = s.n_layers * attention(s)
    norms = (2 * s.n_layers + 1) * s.d_model
    embedding_and_head = 2 * s.vocab_size * s.d_model
    rest = attentions + norms + embedding_and_head
    return s.n_layers * stored + rest, s.n_layers * active + rest


MIXTRAL = Shape(  # Jiang et al. 2024
    d_model=4096,
    n_layers=32,
    n_heads=32,
    n_kv_heads=8,
    head_dim=128,
    d_hidden=14336,
    n_experts=8,
    top_k=2,
    vocab_size=32000,
)
OLMOE = Shape(  # Muennighoff et al. 2024
    d_model=2048,
    n_layers=16,
    n_heads=16,
    n_kv_heads=16,
    head_dim=128,
    d_hidden=1024,
    n_experts=64,
    top_k=8,
    vocab_size=50304,
    norms_of_q_and_k=True,
)
PUBLISHED = {  # the shape, then stored and active as counted in the published weights
    "Mixtral 8x7B": (MIXTRAL, 46_702_792_704, 12_879_925_248),
    "OLMoE-1B-7B": (OLMOE, 6_919_161_856, 1_282_017_280),
}

# ---------------------------------------------------------------- look at it

LAYERS = ((8, 1, 2048), (8, 2, 2048), (8, 2, 1024), (64, 8, 256))  # E, k and an expert's width


def main() -> int:
    dense = 3 * 768 * 2048
    rows = []
    for E, k, width in LAYERS:
        stored, active = sparse_layer(768, width, E, k)
        counts = [f"{n:,}" for n in (E, k, width, stored, flops(active))]
        rows.append([*counts, f"{stored / dense:.2f}", f"{active / dense:.2f}"])
    console.say("One layer, and how many times a dense SwiGLU of width 2,048 it stores and uses:")
    console.say()
    headers = ["E", "k", "width", "stored", "FLOPs", "stored x", "used x"]
    console.say(console.Table(headers, rows))
    console.say("\nLook at the last row: it stores eight times the dense layer, and a token uses")
    console.say("hardly more than in the dense one.")
    console.say()
    rows = []
    for name, (shape, _, _) in PUBLISHED.items():
        stored, active = model(shape)
        rows.append([name, f"{stored:,}", f"{active:,}", f"{active / stored:.0%}"])
    console.say(console.Table(["model", "stored", "active", "active part"], rows))
    console.say("\nMixtral is called 8x7B. It stores 47 billion numbers, not 56, since attention,")
    console.say("embedding and head are there once; and it works like a model of 13 billion.")

    checks = Checks()
    for name, (shape, stored, active) in PUBLISHED.items():
        ours = model(shape)
        checks.equal(f"{name}, stored", ours[0], stored)
        checks.equal(f"{name}, active", ours[1], active)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
