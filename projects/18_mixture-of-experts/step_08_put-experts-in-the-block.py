"""Step 08: put experts in the block.

Now the layers become a model: chapter 07's GPT, with a sparse layer where each block had its MLP.

A sparse layer returns two things, its output and its Routing (step 04). The output is added to the
residual stream, as ever. The Routing has to get out of the model: training needs it for the balance
loss or the bias. So the block hands it on, and the model collects one from each block:

    block(x)                         x, routing
    model(idx, targets)              logits, loss
    model.forward_with_routing(...)  logits, loss, [routing of block 0, routing of block 1]

Evaluation and generation call model(...), as in chapter 07. In both calls the loss is the
cross-entropy alone: the balance loss is added in training, so no reported loss contains it.

    python step_08_put-experts-in-the-block.py

builds a sparse and a dense model, and prints what each stores and what a token uses.

Shapes: B batch, T positions, C = d_model, N = B · T tokens, E experts, V = vocab_size.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console
from shared.checks import Checks
from shared.randomness import generator

gpt = chapters.load_build(5)
modern = chapters.load_build(7)
Routing = chapters.load_step(18, 4).Routing
GroupedMoE = chapters.load_step(18, 4).GroupedMoE
SparseConfig = chapters.load_step(18, 5).SparseConfig
SwitchMoE = chapters.load_step(18, 5).SwitchMoE
ExpertChoiceMoE = chapters.load_step(18, 6).ExpertChoiceMoE
BiasMoE = chapters.load_step(18, 7).BiasMoE

# ---------------------------------------------------------------- the idea

ROUTERS = {
    "top_k": GroupedMoE,
    "switch": SwitchMoE,
    "bias": BiasMoE,
    "expert_choice": ExpertChoiceMoE,
}


class SparseBlock(modern.ModernBlock):
    """Chapter 07's block with experts; it also returns what the router did."""

    def make_mlp(self, cfg: SparseConfig) -> nn.Module:
        if cfg.router_type not in ROUTERS:
            valid = ", ".join(ROUTERS)
            raise ValueError(f"unknown router_type {cfg.router_type!r}; valid: {valid}")
        return ROUTERS[cfg.router_type](cfg)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Routing]:
        """x (B, T, C) -> (B, T, C), and the Routing of its B · T tokens."""
        x = x + self.attn(self.norm1(x))
        y, routing = self.mlp(self.norm2(x))
        x = x + y
        return x, routing


class SparseGPT(modern.ModernGPT):
    """Chapter 07's GPT of sparse blocks, which can also return what its routers did."""

    def make_block(self, cfg: SparseConfig) -> nn.Module:
        return SparseBlock(cfg)

    def forward_with_routing(
        self, idx: torch.Tensor, targets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None, list[Routing]]:
        """Like forward(), and each layer's Routing. ValueError if T exceeds block_size."""
        T = idx.shape[1]
        if T > self.cfg.block_size:
            raise ValueError(f"{T} tokens don't fit a block_size of {self.cfg.block_size}")
        x = self.embed(idx)
        routings = []
        for block in self.blocks:
            x, routing = block(x)
            routings.append(routing)
        logits = self.lm_head(self.norm_f(x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss, routings

    def forward(
        self, idx: torch.Tensor, targets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Token ids (B, T) -> logits (B, T, V) and the mean cross-entropy in nats, or None."""
        logits, loss, _ = self.forward_with_routing(idx, targets)
        return logits, loss


def active_parameters(model: nn.Module) -> int:
    """The model's parameters without those of the experts that a token doesn't use."""
    idle = 0
    for module in model.modules():
        if isinstance(module, modern.MoE):
            unused = len(module.experts) - module.top_k
            idle += unused * gpt.count_parameters(module.experts[0])
    return gpt.count_parameters(model) - idle


# ---------------------------------------------------------------- look at it


def main() -> int:
    cfg = SparseConfig()
    sparse = SparseGPT(cfg, vocab_size=95)
    # A token uses two experts of width 85. One MLP of width 170 costs as much.
    dense = modern.ModernGPT(replace(cfg, mlp_type="swiglu", d_hidden=170), vocab_size=95)
    rows = []
    for name, model in (("dense", dense), ("top-2 of 8", sparse)):
        stored = gpt.count_parameters(model)
        rows.append([name, f"{stored:,}", f"{active_parameters(model):,}"])
    console.say(console.Table(["model", "stored", "active"], rows))
    console.say("\nCompare stored and active: the sparse model stores 2.8 times the dense one, and")
    console.say("a token uses 1,024 numbers more: two routers of 8 experts x 64 channels.")

    checks = Checks()
    gpt.init_parameters(sparse, seed=1)
    idx, targets = torch.randint(95, (2, 4, 32), generator=generator(1, "step_08"))
    logits, loss, routings = sparse.forward_with_routing(idx, targets)
    cross_entropy = F.cross_entropy(logits.transpose(1, 2), targets)
    checks.close("the loss is the cross-entropy alone", loss, cross_entropy, 1e-6)
    shapes = [tuple(routing.logits.shape) for routing in routings]
    checks.equal("a Routing for each layer: its logits", shapes, [(128, 8), (128, 8)])
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
