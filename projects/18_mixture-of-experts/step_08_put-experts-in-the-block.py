"""Step 08: put experts in the block.

Steps 04 to 07 built layers that return two things; this step builds the block and the model that hand the second one
on, while forward() stays what it was: logits, and the cross-entropy with nothing added. Then it makes experts out of
a trained dense model: copies of its MLPs start at exactly its loss. It leaves out the experiment: build.py has it.

    python step_08_put-experts-in-the-block.py

trains a small dense model, upcycles it, prints what that costs and the checks; about five seconds.

Shapes: B batch, T positions, C = d_model, N = B · T tokens, E experts, V = vocab_size.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console, data, kernels, training
from shared.checks import Checks

gpt = chapters.load_build(5)
modern = chapters.load_build(7)
Routing = chapters.load_step(18, 4).Routing
GroupedMoE = chapters.load_step(18, 4).GroupedMoE
SparseConfig = chapters.load_step(18, 5).SparseConfig
SwitchMoE = chapters.load_step(18, 5).SwitchMoE
ExpertChoiceMoE = chapters.load_step(18, 6).ExpertChoiceMoE
generate = chapters.load_step(18, 6).generate
BiasMoE = chapters.load_step(18, 7).BiasMoE

ROUTERS = {"top_k": GroupedMoE, "switch": SwitchMoE, "bias": BiasMoE, "expert_choice": ExpertChoiceMoE}


class SparseBlock(modern.ModernBlock):
    """Chapter 07's block with experts; it hands on what the router did."""

    def make_mlp(self, cfg: SparseConfig) -> nn.Module:
        if cfg.router_type not in ROUTERS:
            raise ValueError(f"unknown router_type {cfg.router_type!r}; valid: {', '.join(ROUTERS)}")
        return ROUTERS[cfg.router_type](cfg)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Routing]:
        """x (B, T, C) -> (B, T, C), and the Routing of its B · T tokens."""
        x = x + self.attn(self.norm1(x))
        y, routing = self.mlp(self.norm2(x))
        return x + y, routing


class SparseGPT(modern.ModernGPT):
    """Chapter 07's GPT of sparse blocks. forward() returns what it always did, forward_with_routing() more."""

    def make_block(self, cfg: SparseConfig) -> nn.Module:
        return SparseBlock(cfg)

    def forward_with_routing(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> tuple:
        """Like forward(), with the list of the layers' Routing as a third. ValueError if T exceeds block_size."""
        if idx.shape[1] > self.cfg.block_size:
            raise ValueError(f"{idx.shape[1]} tokens don't fit a block_size of {self.cfg.block_size}")
        x, routings = self.embed(idx), []
        for block in self.blocks:
            x, routing = block(x)
            routings.append(routing)
        logits = self.lm_head(self.norm_f(x))
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss, routings

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> tuple:
        """Token ids (B, T) -> logits (B, T, V) and the mean cross-entropy in nats, with nothing added to it."""
        return self.forward_with_routing(idx, targets)[:2]


def active_parameters(model: nn.Module) -> int:
    """How many of the model's numbers a token meets: all but those of the experts that it doesn't use."""
    layers = [module for module in model.modules() if isinstance(module, modern.MoE)]
    idle = sum((len(moe.experts) - moe.top_k) * gpt.count_parameters(moe.experts[0]) for moe in layers)
    return gpt.count_parameters(model) - idle


def upcycle(dense: modern.ModernGPT, cfg: SparseConfig, seed: int) -> SparseGPT:
    """A sparse model whose experts are all copies of the dense one's MLPs, of the same width (Komatsuzaki et al. 2023).

    Where gates sum to 1 it is the same function, whatever its new routers say."""
    sparse = SparseGPT(cfg, dense.vocab_size)
    gpt.init_parameters(sparse, seed, cfg.init_std)
    state = sparse.state_dict()
    for name, value in dense.state_dict().items():
        layer, mlp, matrix = name.partition(".mlp.")
        copies = [f"{layer}.mlp.experts.{e}.{matrix}" for e in range(cfg.n_experts)] if mlp else [name]
        state.update(dict.fromkeys(copies, value))
    sparse.load_state_dict(state)
    return sparse


def main() -> int:
    corpus, cfg = data.load_corpus("docs", "char", 32), SparseConfig(mlp_type="swiglu", d_hidden=90)
    dense = modern.ModernGPT(cfg, corpus.vocab_size)
    gpt.init_parameters(dense, seed=1)
    with kernels.fastest_float32():
        training.train(dense, corpus, training.TrainingSettings(steps=100), seed=1)
    idx, targets = (corpus.validation[n : n + 24 * 32].view(24, 32) for n in (0, 1))
    plans = {
        "top-2 of 8, gates that sum to 1": {},
        "top-2 of 8 with a bias": {"router_type": "bias"},
        "top-1 of 8, the probability for a gate": {"router_type": "switch", "top_k": 1, "capacity_factor": 8.0},
        "expert choice": {"router_type": "expert_choice"},
    }
    models = {name: upcycle(dense, replace(cfg, mlp_type="moe", **plan), 2) for name, plan in plans.items()}
    with torch.no_grad():
        loss = {name: model(idx, targets)[1].item() for name, model in {"the dense model": dense, **models}.items()}
    size, before = gpt.count_parameters(dense), loss["the dense model"]
    rows = [["the dense model", f"{size:,}", f"{size:,}", f"{before:.6f}"]]
    for name, model in models.items():
        rows.append([name, f"{gpt.count_parameters(model):,}", f"{active_parameters(model):,}", f"{loss[name]:.6f}"])
    console.say("A dense model after 100 steps; sparse ones whose experts are copies of its MLPs:")
    console.say()
    console.say(console.Table(["model", "parameters", "active", "loss"], rows))

    checks, sparse = Checks(), models["top-2 of 8, gates that sum to 1"]
    for name, model in models.items():
        if model.blocks[0].mlp.renormalizes:
            checks.close(f"{name}: the dense loss", loss[name], before, 1e-5)
        else:
            checks.between(f"{name}: nats above it", loss[name] - before, 0.05, 5)
    logits, routings = sparse.forward_with_routing(idx)[::2]
    alone = F.cross_entropy(logits.transpose(1, 2), targets)
    checks.close("forward()'s loss is the cross-entropy alone", sparse(idx, targets)[1], alone, 1e-6)
    checks.equal("one Routing a layer, of all tokens", [tuple(r.logits.shape) for r in routings], [(24 * 32, 8)] * 2)
    expert, router = 3 * 64 * 90, 8 * 64
    checks.equal("stored: 7 more experts a layer", gpt.count_parameters(sparse), size + 2 * (7 * expert + router))
    checks.equal("active: 1 more", active_parameters(sparse), size + 2 * (expert + router))
    written = gpt.generate(dense, idx[:1, :5], 20, temperature=0)
    checks.equal("it writes what the dense one writes", generate(sparse, idx[:1, :5], 20, temperature=0), written)
    unknown = replace(cfg, router_type="nobody")
    checks.raises("an unknown router", ValueError, ["nobody", "switch"], lambda: SparseGPT(unknown, 5))
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
