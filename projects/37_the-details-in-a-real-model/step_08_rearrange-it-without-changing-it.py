"""Step 08: rearrange it without changing it.

Some details are only a choice of where a number stands. We take the model apart and put it
together in another way, so that it computes the same:
- The gain g of a norm can move into the matrix W behind it: (x · g) Wᵀ = x (W · g)ᵀ.
- RoPE can turn channel i together with i + 32 instead of its neighbour, if the rows that make
  queries and keys are sorted for that. That is how other programs store the same model.
- An MLP can become eight experts that are its copies. Two of them answer, their gates sum to 1,
  and a weighted mean of equal answers is that answer, whatever the (untrained) router says.
- An MLP can be cut into eight experts of 192 neurons each. All of them together are the MLP.

Then we go one step too far with each: the rows unsorted, gates that don't sum to 1, only the 6
strongest experts. The loss tells the two kinds apart.

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
    # deepcopy's second argument lists what counts as copied already, by address.
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


def fold_gains(model: nn.Module) -> nn.Module:
    """Every norm's gain moves into the matrices that read it. The head is no longer tied."""
    model = twin(model)
    readers = [(model.norm_f, model.lm_head)]
    for block in model.blocks:
        readers.append((block.norm1, block.attn.qkv))
        readers.append((block.norm2, block.mlp.gate_proj))
        readers.append((block.norm2, block.mlp.up_proj))
    for norm, matrix in readers:
        matrix.weight = nn.Parameter(matrix.weight * norm.weight)  # (out, C) · (C)
    for norm, _ in readers:
        norm.weight = nn.Parameter(torch.ones_like(norm.weight))
    return model


def other_layout(model: nn.Module, sort_rows: bool = True) -> nn.Module:
    """RoPE on the two halves of a head, and the rows of queries and keys sorted for it."""
    model = twin(model)
    for block in model.blocks:
        attn = block.attn
        attn.__class__ = HalfSplitAttention
        if sort_rows:
            heads = attn.qkv.weight.unflatten(0, (-1, attn.head_dim)).clone()  # (H + 2G, D, C)
            turned = heads[: attn.n_heads + attn.n_kv_heads]  # a view: queries and keys
            turned[:] = torch.cat((turned[:, 0::2], turned[:, 1::2]), dim=1)
            attn.qkv.weight = nn.Parameter(heads.flatten(0, 1))
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


def carve(model: nn.Module, n_kept: int) -> nn.Module:
    """Each MLP cut into eight experts; a token keeps the n_kept with the largest norm."""
    model = twin(model)
    for block in model.blocks:
        block.mlp.__class__ = CarvedMLP
        block.mlp.n_kept = n_kept
    return model


class CarvedMLP(modern.SwiGLU):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.silu(self.gate_proj(x)) * self.up_proj(x)
        experts = hidden.unflatten(-1, (8, -1))  # (B, T, 8, 192)
        kept = experts.norm(dim=-1).topk(self.n_kept).indices
        mask = torch.zeros(experts.shape[:-1]).scatter(-1, kept, 1)
        return self.down_proj((experts * mask[..., None]).flatten(-2))


# ---------------------------------------------------------------- look at it


@torch.no_grad()
def main() -> int:
    file = real.WeightsFile(real.packaged_weights())
    model = real.load_model(file)
    ids = torch.tensor(real.Tokenizer(file).encode(real.evaluation_text())[:65])
    loss = real.mean_loss(model, ids)
    pairs = {
        "gains in the matrices": (fold_gains(model), None),
        "RoPE on halves / rows unsorted": (other_layout(model), other_layout(model, False)),
        "copies of each MLP / raw gates": (copies(model), copies(model, RawGates)),
        "each MLP cut in eight / 6 kept": (carve(model, 8), carve(model, 6)),
    }
    checks = Checks()
    rows = []
    for what, (same, too_far) in pairs.items():
        after = real.mean_loss(same, ids)
        checks.close(what.partition(" / ")[0], after, loss, 1e-5)
        wrong = "" if too_far is None else f"{real.mean_loss(too_far, ids) - loss:+.3f}"
        rows.append([what, f"{after - loss:+.6f}", wrong])
    say(f"Loss of the model on 64 tokens: {loss:.6f}. Differences to it:\n")
    say(Table(["the same / one step too far", "the same", "too far"], rows))
    say("\nThe same: 0 but for rounding. Too far: a loss that everybody would notice.")
    largest = min(float(row[2]) for row in rows if row[2])
    checks.between("smallest step too far", largest, 0.1, 30)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
