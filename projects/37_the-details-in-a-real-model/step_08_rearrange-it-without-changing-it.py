"""Step 08: rearrange it without changing it.

Some of the details are only a choice of where numbers stand. This step takes the real model apart and puts it together
differently, so that it computes the same: without norm gains, with the other layout of RoPE, with experts in place of
its MLPs. And it shows where the same moves stop being harmless. Left out: training any of these further.

    python step_08_rearrange-it-without-changing-it.py

prints the loss of each arrangement on 256 tokens of documentation; about ten seconds.
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
step_01, step_02, step_04, step_05 = (chapters.load_step(37, step) for step in (1, 2, 4, 5))


def twin(model: nn.Module) -> nn.Module:
    """A second model on the same numbers, not copied: its parts can be exchanged without touching the first."""
    tables = [table for block in model.blocks for table in (block.attn.cos, block.attn.sin)]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *tables)})


def fold_gains(model: nn.Module) -> nn.Module:
    """(x · g) Wᵀ = x (W · g)ᵀ: every norm's gain moves into the matrices that read it. The head is tied no more."""
    model = twin(model)
    readers = [(model.norm_f, [model.lm_head])]
    for block in model.blocks:
        readers += [(block.norm1, [block.attn.qkv]), (block.norm2, [block.mlp.gate_proj, block.mlp.up_proj])]
    for norm, matrices in readers:
        for matrix in matrices:
            matrix.weight = nn.Parameter(matrix.weight * norm.weight)  # (out, C) · (C)
        norm.weight = nn.Parameter(torch.ones_like(norm.weight))
    return model


def other_layout(model: nn.Module, permute: bool = True) -> nn.Module:
    """RoPE on the two halves of a head, and the channels of queries and keys sorted for that."""
    model = twin(model)
    for block in model.blocks:
        attn, D = block.attn, block.attn.head_dim
        attn.__class__ = step_04.HalfSplitAttention
        rows = attn.qkv.weight.unflatten(0, (-1, D))  # (H + 2G, D, C)
        n_turned = attn.n_heads + attn.n_kv_heads
        evens_first = torch.arange(D).view(-1, 2).T.flatten()  # 0, 2, 4, ..., 1, 3, 5, ...
        sorted_rows = torch.cat((rows[:n_turned, evens_first], rows[n_turned:]))
        if permute:
            attn.qkv.weight = nn.Parameter(sorted_rows.flatten(0, 1))
    return model


class RawGates(modern.MoE):
    """Gates as the router's probabilities, which don't sum to 1 over the chosen experts."""

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        probabilities = F.linear(x, self.router.weight).softmax(-1)
        return probabilities.topk(self.top_k)


def upcycle(model: nn.Module, moe: type[nn.Module] = modern.MoE) -> nn.Module:
    """Eight copies of each MLP as experts, two of them for each token, under a router at its start."""
    model = twin(model)
    cfg = replace(model.cfg, n_experts=8, top_k=2, d_hidden=1)  # 1: these experts are thrown away at once
    for i, block in enumerate(model.blocks):
        mlp, block.mlp = block.mlp, moe(cfg)
        block.mlp.experts = nn.ModuleList([mlp] * cfg.n_experts)  # eight times the same module: equal copies
        nn.init.normal_(block.mlp.router.weight, std=0.02, generator=generator(1, "router", i))
    return model


class CarvedMLP(modern.SwiGLU):
    """SwiGLU whose hidden neurons fall into groups; for each token the n_kept largest groups count, by their norm."""

    n_groups, n_kept = 8, 8

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.silu(self.gate_proj(x)) * self.up_proj(x)
        groups = hidden.unflatten(-1, (self.n_groups, -1))  # (B, T, 8, d_hidden / 8)
        kept = groups.norm(dim=-1).topk(self.n_kept).indices
        mask = torch.zeros_like(groups[..., 0]).scatter(-1, kept, 1)
        return self.down_proj((groups * mask[..., None]).flatten(-2))


def carve(model: nn.Module, n_kept: int) -> nn.Module:
    """Each MLP cut into eight experts of 192 neurons, of which each token keeps n_kept."""
    model = twin(model)
    for block in model.blocks:
        block.mlp.__class__, block.mlp.n_kept = CarvedMLP, n_kept
    return model


@torch.no_grad()
def main() -> int:
    file, checks = step_01.WeightsFile(step_01.packaged_weights()), Checks()
    model = step_04.load_model(file)
    ids = torch.tensor(step_02.Tokenizer(file).encode(step_05.evaluation_text())[:257])
    loss = step_05.mean_loss(model, ids)
    same = {
        "norm gains folded into the matrices behind them": fold_gains,
        "RoPE on halves, channels sorted for it": other_layout,
        "eight copies of each MLP, two chosen, gates sum to 1": upcycle,
        "each MLP carved into eight, all kept": lambda model: carve(model, 8),
    }
    different = {
        "RoPE on halves, channels as they were": lambda model: other_layout(model, permute=False),
        "eight copies, two chosen, gates as the router gives them": lambda model: upcycle(model, RawGates),
        "each MLP carved into eight, the best 6 kept": lambda model: carve(model, 6),
        "each MLP carved into eight, the best 4 kept": lambda model: carve(model, 4),
    }
    rows = [["as it was", f"{loss:.6f}", ""]]
    for what, arrange in (same | different).items():
        after = step_05.mean_loss(arrange(model), ids)
        rows.append([what, f"{after:.6f}", f"{after - loss:+.6f}"])
        if what in same:
            checks.close(what, after, loss, 1e-5)
        else:
            checks.between(what, after, loss + 0.1, 30)
    say(Table(["arrangement", "loss", "difference"], rows))
    checks.equal("and the first model is as it was", step_05.mean_loss(model, ids), loss)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
