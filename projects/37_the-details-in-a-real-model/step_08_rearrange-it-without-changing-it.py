"""Step 08: rearrange it without changing it.

Some details are only a choice of where a number stands. We take the model apart and put it
together in another way, so that it computes the same:
- The gain g of a norm can move into the matrix W behind it: (x · g) Wᵀ = x (W · g)ᵀ.
- RoPE can turn channel i together with i + 32 instead of its neighbour, if the rows that make
  queries and keys are sorted for that. That is how other programs store the same model.
- An MLP can become eight experts that are its copies. Two of them answer, their gates sum to 1,
  and a weighted mean of equal answers is that answer, whatever the (untrained) router says.
- An MLP can be cut into eight experts of 192 neurons each. All of them together are the MLP.

Then we take each one step too far: gains dropped, rows unsorted, gates that don't sum to 1, only 6
of the eight experts. The loss tells the two kinds apart.

    python step_08_rearrange-it-without-changing-it.py

Training the experts further, so that they become different, is left out.
"""

import copy
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli
from shared.checks import Checks
from shared.console import Table, say
from shared.randomness import generator

modern = chapters.load_build(7)
real = chapters.load_build(37)
HalfSplitAttention = chapters.load_step(37, 4).HalfSplitAttention

# ---------------------------------------------------------------- the idea


def twin(model: nn.Module) -> nn.Module:
    """A second model on the same numbers: its parts can be exchanged, the first stays as it is."""
    shared = list(model.parameters())
    for block in model.blocks:
        shared += [block.attn.cos, block.attn.sin]
    # deepcopy copies all but what its second argument lists, by address.
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


def fold_gains(model: nn.Module, keep: bool = True) -> nn.Module:
    """Every norm's gain moves into the matrices that read it. The head is no longer tied."""
    model = twin(model)
    readers = [(model.norm_f, model.lm_head)]
    for block in model.blocks:
        readers.append((block.norm1, block.attn.qkv))
        readers.append((block.norm2, block.mlp.gate_proj))
        readers.append((block.norm2, block.mlp.up_proj))
    for norm, matrix in readers:
        gain = norm.weight if keep else 1
        matrix.weight = nn.Parameter(matrix.weight * gain)  # (out, C) · (C)
    for norm, _ in readers:  # only now, since each norm2 has two readers
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
            qk = torch.cat((qk[:, 0::2], qk[:, 1::2]), dim=1)  # pair (0, 1) is now (0, 32)
            attn.qkv.weight = nn.Parameter(torch.cat((qk, v)).flatten(0, 1))
    return model


class RawGates(modern.MoE):
    """Gates as the router's softmax gives them: two of eight don't sum to 1."""

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.linear(x, self.router.weight).softmax(-1).topk(self.top_k)


def copies(model: nn.Module, moe: type[nn.Module] = modern.MoE) -> nn.Module:
    """Each MLP becomes eight copies of itself under an untrained router, two for each token."""
    model = twin(model)
    cfg = replace(model.cfg, n_experts=8, top_k=2, d_hidden=1)  # tiny: its experts are replaced
    for i, block in enumerate(model.blocks):
        experts = moe(cfg)
        experts.experts = nn.ModuleList([block.mlp] * 8)
        nn.init.normal_(experts.router.weight, std=0.02, generator=generator(1, "router", i))
        block.mlp = experts
    return model


class CarvedMLP(modern.SwiGLU):
    """An MLP in eight parts; a token keeps the n_kept whose hidden vectors are longest."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.silu(self.gate_proj(x)) * self.up_proj(x)
        experts = hidden.unflatten(-1, (8, -1))  # (B, T, 8, 192)
        kept = experts.norm(dim=-1).topk(self.n_kept).indices
        mask = torch.zeros(experts.shape[:-1]).scatter(-1, kept, 1)
        return self.down_proj((experts * mask[..., None]).flatten(-2))


def carve(model: nn.Module, n_kept: int) -> nn.Module:
    """Each MLP is cut into eight experts, of which a token keeps n_kept."""
    model = twin(model)
    for block in model.blocks:
        block.mlp.__class__ = CarvedMLP
        block.mlp.n_kept = n_kept
    return model


# ---------------------------------------------------------------- look at it


@torch.no_grad()
def main() -> int:
    file = real.WeightsFile(real.packaged_weights())
    model = real.load_model(file)
    ids = torch.tensor(real.Tokenizer(file).encode(real.evaluation_text())[:65])
    loss = real.mean_loss(model, ids)
    pairs = {
        "gains in the matrices (dropped)": (fold_gains(model), fold_gains(model, keep=False)),
        "RoPE on halves (rows unsorted)": (other_layout(model), other_layout(model, False)),
        "copies of each MLP (raw gates)": (copies(model), copies(model, RawGates)),
        "each MLP cut in eight (6 kept)": (carve(model, 8), carve(model, 6)),
    }
    checks = Checks()
    rows = []
    for what, (same, too_far) in pairs.items():
        after = real.mean_loss(same, ids)
        checks.close(what.partition(" (")[0], after, loss, 1e-5)
        rows.append([what, f"{after:.5f}", f"{real.mean_loss(too_far, ids):.5f}"])
    say(f"Loss of the model on 64 tokens: {loss:.5f}. Rearranged:\n")
    say(Table(["the same (one step too far)", "the same", "too far"], rows))
    say("\nThe same: equal but for rounding. Too far: a loss that everybody would notice.")
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
