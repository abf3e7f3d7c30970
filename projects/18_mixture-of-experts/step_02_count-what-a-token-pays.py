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

    python step_02_count-what-a-token-pays.py

prints that layer, and counts a published model in the same way.
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


# ---------------------------------------------------------------- a whole model


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


def attention(s: Shape) -> int:
    """Parameters of one attention: a matrix each for queries, keys, values and the output."""
    queries = s.d_model * s.n_heads * s.head_dim
    keys = s.d_model * s.n_kv_heads * s.head_dim
    values = keys
    output = queries
    return queries + keys + values + output


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
PUBLISHED = (46_702_792_704, 12_879_925_248)  # stored and active, counted in its weights

# ---------------------------------------------------------------- look at it


def main() -> int:
    layer = sparse_layer(768, 256, n_experts=64, top_k=8)
    mixtral = model(MIXTRAL)
    rows = []
    for name, (stored, active) in (("the layer above", layer), ("Mixtral 8x7B", mixtral)):
        rows.append([name, f"{stored:,}", f"{active:,}", f"{active / stored:.0%}"])
    console.say(console.Table(["", "stored", "active", "active part"], rows))
    console.say("\nMixtral is called 8x7B. It stores 47 billion numbers, not 56, since attention,")
    console.say("embedding and head are there once; and it works like a model of 13 billion.")

    checks = Checks()
    checks.equal("the layer, as counted above", layer, (37_797_888, 4_767_744))
    checks.equal("Mixtral, stored", mixtral[0], PUBLISHED[0])
    checks.equal("Mixtral, active", mixtral[1], PUBLISHED[1])
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
