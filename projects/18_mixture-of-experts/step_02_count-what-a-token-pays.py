"""Step 02: count what a token pays.

Why send a token to 2 experts of 8? Because a sparse layer has two sizes. It stores all E experts,
and what it can know grows with them. But one token is multiplied by the matrices of k experts only:
the active parameters. So the memory grows with E, and the work of a token with k. The router's
matrix is active too, and tiny.

The work follows from the active parameters: each number of a matrix costs a token one
multiplication and one addition, so 2 FLOPs (floating-point operations). Training costs three times
that: one product forward, two backward (Kaplan et al. 2020, section 2.1).

    python step_02_count-what-a-token-pays.py

prints a table of E and k, and counts two published models. It leaves out what it costs to move
tokens to their experts: step 03 makes that cheap.

Shapes: C = d_model, D = head_dim, E experts, k = top_k, V = vocab_size.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import cli, console
from shared.checks import Checks

# ---------------------------------------------------------------- the idea


def sparse_layer(d_model: int, d_hidden: int, n_experts: int, top_k: int) -> tuple[int, int]:
    """Parameters of one sparse layer, (stored, active): SwiGLU experts and a router, no biases."""
    expert = 3 * d_model * d_hidden
    router = n_experts * d_model
    return n_experts * expert + router, top_k * expert + router


def flops(active_parameters: int) -> int:
    """FLOPs of one token, forward: a multiplication and an addition for each number it meets."""
    return 2 * active_parameters


@dataclass(frozen=True)
class Shape:
    """A decoder with a sparse SwiGLU MLP in each layer; no biases, and its head is not tied."""

    d_model: int
    n_layers: int
    n_heads: int
    # Fewer than n_heads where several query heads share one key and value head (chapter 37).
    n_kv_heads: int
    head_dim: int
    d_hidden: int  # of one expert
    n_experts: int
    top_k: int
    vocab_size: int
    norms_of_q_and_k: bool = False  # a norm over all query channels, and one over all key channels


def attention(s: Shape) -> int:
    """Parameters of one attention: queries and output for all heads, keys and values for theirs."""
    queries = s.n_heads * s.head_dim
    keys = s.n_kv_heads * s.head_dim
    norms = queries + keys if s.norms_of_q_and_k else 0
    return s.d_model * (2 * queries + 2 * keys) + norms


def model(s: Shape) -> tuple[int, int]:
    """Parameters of the whole model, (stored, active).

    The embedding counts as fully active, as usual, though a token looks up one row of it.
    """
    stored, active = sparse_layer(s.d_model, s.d_hidden, s.n_experts, s.top_k)
    norms = 2 * s.d_model
    layers = s.n_layers * (attention(s) + norms)
    last_norm = s.d_model
    embedding_and_head = 2 * s.vocab_size * s.d_model
    rest = layers + last_norm + embedding_and_head  # all of it active
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
PUBLISHED = {  # shape, then (stored, active) as counted in the published weights
    "Mixtral 8x7B": (MIXTRAL, 46_702_792_704, 12_879_925_248),
    "OLMoE-1B-7B": (OLMOE, 6_919_161_856, 1_282_017_280),
}

# ---------------------------------------------------------------- look at it


def main() -> int:
    dense = 3 * 768 * 2048
    rows = []
    for E, k, width in ((1, 1, 2048), (8, 1, 2048), (8, 2, 2048), (8, 2, 1024), (64, 8, 256)):
        stored, active = sparse_layer(768, width, E, k)
        counts = [f"{n:,}" for n in (E, k, width, stored, active, flops(active))]
        rows.append([*counts, f"{stored / dense:.2f}", f"{active / dense:.2f}"])
    console.say("One layer at C = 768, compared with a dense SwiGLU of width 2,048:")
    console.say()
    headers = ["E", "k", "width", "stored", "active", "FLOPs", "stored x", "active x"]
    console.say(console.Table(headers, rows))
    console.say("\nLook at the last row: it stores eight times the dense layer, and a token pays")
    console.say("hardly more than there.")
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
    stored, active = model(replace(MIXTRAL, top_k=8))
    checks.equal("Mixtral with k = E: all is active", active, stored)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
