"""Step 09: make the MLP sparse with experts.

Step 07's SwiGLU becomes one of several, and a router sends each token to the few that suit it: more parameters, no
more work per token. This is the smallest mixture of experts that is right, a loop that reads like its definition;
chapter 18 has everything that goes wrong with it, and how to make it fast.

    python step_09_make-the-mlp-sparse-with-experts.py

prints what a token pays for at several sizes, which experts five tokens go to, and the checks; about four seconds.

Shapes: N tokens, C = d_model, E = n_experts, k = top_k.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console
from shared.checks import Checks
from shared.randomness import generator

gpt = chapters.load_build(5)
MLPConfig = chapters.load_step(7, 7).MLPConfig
SwiGLU = chapters.load_step(7, 7).SwiGLU
swiglu_hidden = chapters.load_step(7, 7).swiglu_hidden


@dataclass(frozen=True)
class ExpertsConfig(MLPConfig):
    n_experts: int = 4  # so many SwiGLU experts,
    top_k: int = 2  # of which each token uses so many


class MoE(nn.Module):
    """n_experts SwiGLU MLPs; each token uses the top_k that the router prefers (Shazeer 2017)."""

    def __init__(self, cfg: gpt.GPTConfig):
        super().__init__()
        if not 1 <= cfg.top_k <= cfg.n_experts:
            raise ValueError(f"top_k {cfg.top_k} must lie between 1 and n_experts {cfg.n_experts}")
        self.top_k = cfg.top_k
        d_hidden = cfg.d_hidden or swiglu_hidden(cfg.d_model, cfg.multiple_of)
        self.router = nn.Linear(cfg.d_model, cfg.n_experts, bias=False)
        self.experts = nn.ModuleList(SwiGLU(cfg.d_model, d_hidden) for _ in range(cfg.n_experts))

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens x (N, C) -> gates (N, k) of sum 1, and the chosen experts (N, k), best first."""
        with torch.autocast(x.device.type, enabled=False):  # choose in float32, whatever x is
            logits = F.linear(x.float(), self.router.weight.float())  # (N, E)
        probabilities = logits.softmax(-1)
        # A stable sort keeps equal probabilities in the order of the experts; topk may not.
        probabilities, order = probabilities.sort(dim=-1, descending=True, stable=True)
        chosen = order[:, : self.top_k]
        gates = probabilities[:, : self.top_k]
        return gates / gates.sum(-1, keepdim=True), chosen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., C) -> (..., C): each token's experts, weighted by its gates."""
        tokens = x.reshape(-1, x.shape[-1])  # (N, C)
        gates, chosen = self.route(tokens)
        y = torch.zeros_like(tokens)
        for e, expert in enumerate(self.experts):
            # Which tokens chose expert e, and whether as their first choice (0), second (1), …
            token, choice = torch.where(chosen == e)
            weighted = gates[token, choice, None] * expert(tokens[token])
            y = y.index_add(0, token, weighted.to(y.dtype))  # add each row to its token's row of y
        return y.view_as(x)


def sizes(cfg: ExpertsConfig) -> tuple[int, int]:
    """Parameters in all, and those that one token meets: the router and k experts."""
    with torch.device("meta"):  # shapes without memory
        moe = MoE(cfg)
    total, expert = (sum(p.numel() for p in module.parameters()) for module in (moe, moe.experts[0]))
    return total, total - (cfg.n_experts - cfg.top_k) * expert


def random_moe(cfg: ExpertsConfig) -> MoE:
    moe, draw = MoE(cfg).double(), generator(1, "step_09", cfg.n_experts)
    for p in moe.parameters():
        nn.init.normal_(p, std=0.4, generator=draw)
    return moe


def one_by_one(moe: MoE, tokens: torch.Tensor) -> torch.Tensor:
    """The definition, token by token: take the k largest logits, and weigh their experts by a softmax over those k."""
    out = []
    for token in tokens:
        logits = moe.router.weight.float() @ token.float()
        best = sorted(range(len(logits)), key=lambda e: (-logits[e].item(), e))[: moe.top_k]
        weights = logits[best].softmax(0)
        out.append(sum(w * moe.experts[e](token) for w, e in zip(weights, best)))
    return torch.stack(out)


def main() -> int:
    rows = []
    for d_model, n_experts, top_k in ((64, 4, 2), (768, 4, 2), (768, 8, 2), (768, 64, 2)):
        total, active = sizes(ExpertsConfig(d_model=d_model, n_experts=n_experts, top_k=top_k))
        rows.append([str(d_model), str(n_experts), str(top_k), f"{total:,}", f"{active:,}", f"{2 * active:,}"])
    console.say(console.Table(["C", "experts", "k", "parameters", "active per token", "FLOPs per token"], rows))

    cfg = ExpertsConfig(d_model=12, n_heads=3, n_experts=5, top_k=2, d_hidden=7)
    moe, draw = random_moe(cfg), generator(1, "step_09", "tokens")
    x, dy = torch.randn(2, 3, 4, 12, dtype=torch.float64, generator=draw)
    gates, chosen = moe.route(x.flatten(0, 1)[:5])
    console.say(
        "\nFive tokens: "
        + "; ".join(f"{g[0]:.2f} of expert {c[0]}, {g[1]:.2f} of {c[1]}" for g, c in zip(gates, chosen))
    )

    checks = Checks()
    total, active = sizes(ExpertsConfig(d_model=768, n_experts=8))
    checks.equal("C = 768, 8 experts, k = 2: in all", total, 8 * 3 * 768 * 2048 + 8 * 768)
    checks.equal("of which a token meets", active, 2 * 3 * 768 * 2048 + 8 * 768)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, reference = moe(ours), one_by_one(moe, theirs.flatten(0, 1)).view_as(x)
    checks.close("against the definition: y", y, reference, 1e-6)  # the gates are float32
    gradients = [
        torch.autograd.grad(out, (leaf, *moe.parameters()), dy) for out, leaf in ((y, ours), (reference, theirs))
    ]
    for name, mine, hers in zip(("x", "router", "gate_proj of expert 0"), *gradients):
        checks.close(f"against the definition: dL/d{name}", mine, hers, 1e-5)
    everyone = random_moe(ExpertsConfig(d_model=12, n_heads=3, n_experts=3, top_k=3, d_hidden=7))
    weights = (x @ everyone.router.weight.T).softmax(-1)
    mixture = sum(weights[..., e, None] * expert(x) for e, expert in enumerate(everyone.experts))
    checks.close("k = E: all experts, weighted by a softmax", everyone(x), mixture, 1e-6)
    for expert in moe.experts:
        expert.load_state_dict(moe.experts[0].state_dict())
    checks.close("identical experts: the one dense MLP", moe(x), moe.experts[0](x), 1e-6)
    moe.router.weight.data.zero_()
    gates, chosen = moe.route(x.flatten(0, 1))
    checks.equal("equal logits: the lowest numbers", chosen.unique(dim=0).tolist(), [[0, 1]])
    checks.close("with equal gates", gates, torch.full((12, 2), 0.5), 0)
    impossible = ExpertsConfig(n_experts=5, top_k=6)
    checks.raises("more chosen than there are", ValueError, ["6", "5"], lambda: MoE(impossible))
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
