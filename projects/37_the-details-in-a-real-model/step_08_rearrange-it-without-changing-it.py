"""Step 08: rearrange it without changing it.

Some details are only a choice of where a number stands. So we can move numbers about and get
another model that computes the same. Two such moves:

- A norm multiplies each channel by a gain g, and a matrix W reads the result. The gain can move
  into the matrix, each column times its channel's gain: (x · g) Wᵀ = x (W · g)ᵀ. Then the norm's
  own gains are 1.
- RoPE can turn channel i together with i + 32 instead of with its neighbour (step 04). A channel
  of a query is made by one row of the matrix qkv. So if we sort the rows, each pair is the old one
  at its new place. That is how other programs store the same model.

Then we take each move one step too far: the gains are dropped, the rows stay unsorted. The loss
tells the two kinds apart.

    python step_08_rearrange-it-without-changing-it.py

Step 16 turns the MLPs into experts, and the loss stays there too.
"""

import copy
import sys
from pathlib import Path

import torch
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli
from shared.checks import Checks
from shared.console import Table, say

real = chapters.load_build(37)
HalfSplitAttention = chapters.load_step(37, 4).HalfSplitAttention

# ---------------------------------------------------------------- the idea


def twin(model: nn.Module) -> nn.Module:
    """A second model on the same numbers: its parts can be exchanged, the first stays as it is."""
    shared = list(model.parameters())
    for block in model.blocks:
        shared += [block.attn.cos, block.attn.sin]
    already_there = {id(tensor): tensor for tensor in shared}
    return copy.deepcopy(model, already_there)  # deepcopy takes these as they are


def fold_gains(model: nn.Module, keep: bool = True) -> nn.Module:
    """Every norm's gain moves into the matrices that read it. The head is no longer tied."""
    model = twin(model)
    readers = [(model.norm_f, [model.lm_head])]
    for block in model.blocks:
        readers.append((block.norm1, [block.attn.qkv]))
        readers.append((block.norm2, [block.mlp.gate_proj, block.mlp.up_proj]))
    for norm, matrices in readers:
        gain = norm.weight if keep else 1  # 1: one step too far, the gain is lost
        for matrix in matrices:
            matrix.weight = nn.Parameter(matrix.weight * gain)  # (out, C) · (C)
        norm.weight = nn.Parameter(torch.ones_like(norm.weight))
    return model


def other_layout(model: nn.Module, sort_rows: bool = True) -> nn.Module:
    """RoPE on the two halves of a head, and the rows of queries and keys sorted for it."""
    model = twin(model)
    for block in model.blocks:
        attn = block.attn
        attn.__class__ = HalfSplitAttention
        if sort_rows:
            heads = attn.qkv.weight.unflatten(0, (-1, attn.head_dim))  # (H + 2G, D, C)
            qk, v = heads.split([attn.n_heads + attn.n_kv_heads, attn.n_kv_heads])
            first = qk[:, 0::2]
            second = qk[:, 1::2]
            qk = torch.cat((first, second), dim=1)  # the pair (0, 1) is now (0, 32)
            attn.qkv.weight = nn.Parameter(torch.cat((qk, v)).flatten(0, 1))
    return model


# ---------------------------------------------------------------- look at it


@torch.no_grad()
def losses(model: nn.Module, ids: torch.Tensor, moves: list[tuple], checks: Checks) -> Table:
    """The loss after each move, which must be the model's own, and after a step too far.

    A move is (its name, the model after it, the name of the step too far, the model after that).
    """
    loss = real.mean_loss(model, ids)
    rows = [["the model as it is", f"{loss:.5f}", "", ""]]
    for what, same, too_far, other in moves:
        after = real.mean_loss(same, ids)
        checks.close(what, after, loss, 1e-5)
        rows.append([what, f"{after:.5f}", too_far, f"{real.mean_loss(other, ids):.5f}"])
    return Table(["the same", "loss", "one step too far", "loss"], rows)


@torch.no_grad()
def main() -> int:
    file = real.WeightsFile(real.packaged_weights())
    model = real.load_model(file)
    ids = torch.tensor(real.Tokenizer(file).encode(real.evaluation_text())[:65])
    moves = [
        ("gains in the matrices", fold_gains(model), "gains dropped", fold_gains(model, False)),
        ("RoPE on halves", other_layout(model), "rows unsorted", other_layout(model, False)),
    ]
    checks = Checks()
    say(losses(model, ids, moves, checks))
    say("\nThe same: equal but for rounding. Too far: a loss that everybody would notice.")
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
