"""Step 13: share an expert, and weigh the rest.

In a layer with experts (chapter 18) each token uses k of E small MLPs. A router gives each expert a
number, its logit, and the softmax turns the logits into probabilities. The outputs of the k best
are added, each times its gate. What is a gate? Today's models disagree:

- Mixtral, Qwen3-MoE: the probabilities of the k best, divided by their sum. gpt-oss takes the
  softmax of the k largest logits alone, which is the same.
- OLMoE: the probabilities as they are. A router that can't decide between 64 experts gives the best
  eight 8/64 together, so the layer adds little; a router that is certain gives them nearly 1.

DeepSeek has one more expert, which all tokens use, without a gate (Dai et al. 2024). It is meant
for what every token needs: without it, each expert would have to learn that for itself. But what it
adds is long beside what the others add. Eight vectors of length 1 at right angles, each times 1/8,
add up to length 1/√8 = 0.35, while the shared expert keeps its 1. DeepSeek-V3 multiplies the gates
by 2.5.

    python step_13_share-an-expert-and-weigh-the-rest.py

Shapes: N tokens, C = d_model, E experts, k = top_k.
"""

import sys
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
build = chapters.load_build(38)  # the finished chapter: what is not on this page
DetailedConfig = build.DetailedConfig
make_gated_mlp = build.make_gated_mlp  # chapter 07's SwiGLU, or another with a gate

FORMS = {
    "as they are (OLMoE)": {"renormalise": False},
    "divided by their sum (Mixtral)": {},
    "and times 2.5 (DeepSeek-V3)": {"gate_scale": 2.5},
}

# ---------------------------------------------------------------- the idea


def best(scores: torch.Tensor, k: int) -> torch.Tensor:
    """scores (N, E) -> (N, k): the experts with the k largest; of equal ones the lowest numbers."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]


class SoftmaxMoE(modern.MoE):
    """Chapter 07's experts; a gate is the router's probability, renormalised or not."""

    fewest = 1  # the smallest k. Chapter 07 refuses 1: a gate divided by itself is always 1

    def __init__(self, cfg: DetailedConfig):
        super().__init__(cfg)
        self.cfg = cfg
        self.router = nn.Linear(cfg.d_model, cfg.n_experts, bias=cfg.bias)
        self.experts = nn.ModuleList(make_gated_mlp(cfg) for _ in range(cfg.n_experts))
        self.shared = None
        if cfg.n_shared_experts is not None:
            self.shared = make_gated_mlp(cfg, cfg.n_shared_experts)  # one, as wide as all together

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits (N, E) -> how well each expert suits each token (N, E)."""
        return logits.softmax(-1)

    def choose(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores (N, E) -> the chosen experts (N, k)."""
        return best(scores, self.top_k)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """The router's product, tokens x (N, C) -> (N, E): in float32 even under autocast."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        router = self.router
        bias = None if router.bias is None else router.bias.to(dtype)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.to(dtype), router.weight.to(dtype), bias)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens x (N, C) -> gates (N, k) and the chosen experts (N, k)."""
        scores = self.scores(self.logits(x))
        chosen = self.choose(scores)
        gates = scores.gather(1, chosen)
        if self.cfg.renormalise:
            gates = gates / gates.sum(-1, keepdim=True)
        return self.cfg.gate_scale * gates, chosen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., C) -> (..., C): the chosen experts, and the shared ones, which have no gate."""
        y = super().forward(x)  # chapter 07's: it calls route()
        if self.shared is None:
            return y
        return y + self.shared(x)


# ---------------------------------------------------------------- look at it


def make(**changes) -> SoftmaxMoE:
    """A layer of 64 random experts and a shared one."""
    sizes = {"d_model": 28, "n_heads": 2, "d_hidden": 37, "n_experts": 64, "top_k": 8}
    moe = SoftmaxMoE(DetailedConfig(**sizes, mlp_type="moe", n_shared_experts=1, **changes))
    for name, p in moe.named_parameters():
        nn.init.normal_(p, std=p.shape[1] ** -0.5, generator=generator(1, "step_13", name))
    return moe


@torch.no_grad()
def main() -> int:
    x = torch.randn(500, 28, generator=generator(1, "step_13"))
    x = F.rms_norm(x, (28,))  # as in a model, where a norm stands before the layer
    rows = []
    for form, changes in FORMS.items():
        moe = make(**changes)
        gates, chosen = moe.route(x)
        shared = moe.shared(x)
        length = (moe(x) - shared).norm() / shared.norm()
        rows.append([form, f"{gates.sum(-1).mean():.2f}", f"{length:.2f}"])
    say(Table(["gates of eight experts", "their sum", "length of their output"], rows))
    say("\nLook at the last column: only with 2.5 do the eight come near the shared one, 1.")

    checks = Checks()
    moe = make()  # gates that sum to 1
    gates, chosen = moe.route(x)
    largest = moe.router(x).topk(8).values
    checks.close("gates: softmax of 8 logits", gates, largest.softmax(-1), 1e-5)
    by_hand = moe.shared(x[7])
    for gate, e in zip(gates[7], chosen[7]):
        by_hand += gate * moe.experts[e](x[7])
    checks.close("one token by hand", moe(x)[7], by_hand, 1e-5)
    undecided = make(renormalise=False)
    nn.init.zeros_(undecided.router.weight)
    gates, _ = undecided.route(x)
    checks.close("undecided: 8/64 in all", gates.sum(-1), torch.full((500,), 0.125), 1e-6)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
