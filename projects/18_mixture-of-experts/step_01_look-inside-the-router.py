"""Step 01: look inside the router.

Chapter 07's sparse layer hides its one new idea in route(): a matrix, a softmax, the k best. This step takes that
router as it is and asks the five questions on which implementations differ: where the softmax goes, what happens to
ties, in which precision, where noise goes, and what becomes of the gradient at k = 1. It leaves the experts alone.

    python step_01_look-inside-the-router.py

prints five tokens' routes, the ties of torch.topk and the checks; about three seconds.

Shapes: N tokens, C = d_model, E experts, k = top_k.
"""

import sys
from pathlib import Path

import torch
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console
from shared.checks import Checks
from shared.randomness import generator

modern = chapters.load_build(7)


def top_k_mask(scores: torch.Tensor, k: int) -> torch.Tensor:
    """scores (N, E) -> (N, E) bool, true at each row's k largest; of equal ones the lowest numbers win."""
    best = scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]  # topk doesn't promise an order of ties
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, best, True)


class JitteredMoE(modern.MoE):
    """Switch's exploration noise (Fedus et al. 2022, section 2.4): the router's input times 1 ± jitter.

    In training only, and on a copy: the experts compute on the tokens as they are.
    """

    jitter = 0.3

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.training:
            noise = torch.rand(x.shape, generator=self.draw)
            x = x * (1 + self.jitter * (2 * noise - 1))  # not x *= ..., which would change what the experts see
        return super().route(x)


class SwitchGate(modern.MoE):
    """Chapter 07's router with the probability itself for a gate: nothing is divided out."""

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        probabilities = self.router(x).softmax(-1)
        best = probabilities.max(-1, keepdim=True)
        return best.values, best.indices


def make(cls: type, n_experts: int, top_k: int, d_model: int = 12) -> modern.MoE:
    """A layer of class cls with random weights, the same for every class."""
    cfg = modern.ModernConfig(d_model=d_model, n_heads=1, d_hidden=7, n_experts=n_experts, top_k=top_k)
    layer, draw = cls(cfg), generator(1, "step_01", n_experts, d_model)
    for p in layer.parameters():
        nn.init.normal_(p, std=0.4, generator=draw)
    layer.draw = generator(1, "step_01", "jitter")
    return layer


def router_gradient(cls: type) -> float:
    """The norm of the router's gradient in a layer of 5 experts and k = 1, for a random upstream gradient."""
    moe, draw = make(cls, n_experts=5, top_k=1), generator(1, "step_01", "gradient")
    x, dy = torch.randn(2, 64, 12, generator=draw)
    (moe(x) * dy).sum().div(len(x)).backward()
    return moe.router.weight.grad.norm().item()


def check_precision(checks: Checks) -> None:
    """Which share of 4,096 tokens goes elsewhere if the router computes in bfloat16, and if only its input is."""
    moe = make(modern.MoE, n_experts=16, top_k=3, d_model=24)
    x = torch.randn(4096, 24, generator=generator(1, "step_01", "precision"))
    exact = top_k_mask(x.double() @ moe.router.weight.double().T, 3)

    def moved(chosen: torch.Tensor) -> float:
        ours = torch.zeros_like(exact).scatter(1, chosen, True)
        return (ours != exact).any(1).double().mean().item()

    coarse = moved((x.bfloat16() @ moe.router.weight.bfloat16().T).topk(3).indices)
    with torch.autocast("cpu", torch.bfloat16):  # turns every product to bfloat16, unless told not to
        gates, chosen = moe.route(x)
    console.say(f"\nIn bfloat16 {coarse:.1%} of 4,096 tokens go to other experts than in float64.")
    checks.between("tokens that bfloat16 logits send elsewhere", coarse, 0.001, 0.05)
    checks.equal("tokens that chapter 07's router does, under autocast", moved(chosen), 0.0)
    checks.equal("its gates are", str(gates.dtype), "torch.float32")


def check_noise(checks: Checks) -> None:
    moe = make(JitteredMoE, n_experts=5, top_k=2)
    x = torch.randn(64, 12, generator=generator(1, "step_01", "noise"))
    before, plain = x.clone(), make(modern.MoE, n_experts=5, top_k=2).route(x)[1]
    moved = (moe.train().route(x)[1] != plain).any(1).double().mean().item()
    checks.between("in training, tokens that jitter sends elsewhere", moved, 0.05, 0.95)
    checks.equal("in evaluation: none", int((moe.eval().route(x)[1] != plain).any(1).sum()), 0)
    for expert in moe.experts:
        expert.load_state_dict(moe.experts[0].state_dict())
    checks.close(
        "identical experts, noisy router: the dense MLP of the clean x", moe.train()(x), moe.experts[0](x), 1e-4
    )
    checks.equal("and x is unharmed", x, before)


def main() -> int:
    moe = make(modern.MoE, n_experts=5, top_k=2)
    x = torch.randn(64, 12, generator=generator(1, "step_01", "x"))
    logits = x @ moe.router.weight.T
    gates, chosen = moe.route(x)
    rows = [
        [str(n), "  ".join(f"{v:+.2f}" for v in logits[n]), f"{c[0]}, {c[1]}", f"{g[0]:.3f}, {g[1]:.3f}"]
        for n, (c, g) in enumerate(zip(chosen[:5].tolist(), gates[:5].tolist()))
    ]
    console.say(console.Table(["token", "logits of experts 0 to 4", "chosen", "gates"], rows))

    checks = Checks()
    best = logits.topk(2)
    checks.equal("no ties here, so topk chooses the same", chosen, best.indices)
    checks.close("softmax, top-k, renormalise = top-k, softmax", gates, best.values.softmax(-1), 1e-6)
    tied = torch.zeros(3, 8)
    console.say(f"\nOf eight equal logits torch.topk takes {tied[0].topk(3).indices.tolist()} here, and it may.")
    checks.equal(
        "of eight equal logits ours are always", top_k_mask(tied, 3)[0].nonzero().flatten().tolist(), [0, 1, 2]
    )
    halves = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, 1.0]])
    checks.equal("of a tie at the border", top_k_mask(halves, 4)[0].nonzero().flatten().tolist(), [1, 2, 3, 4])
    nn.init.zeros_(moe.router.weight)
    checks.equal("chapter 07's too", moe.route(x)[1].unique(dim=0).tolist(), [[0, 1]])
    check_precision(checks)
    check_noise(checks)
    frozen, alive = router_gradient(modern.MoE), router_gradient(SwitchGate)
    console.say(f"At k = 1 the router's gradient is {frozen:.1e} renormalised, {alive:.1e} otherwise.")
    checks.between("k = 1 renormalised: every gate is 1, no gradient but rounding", frozen, 0, 1e-6)
    checks.between("k = 1 with the probability: a gradient", alive, 1e-2, 10)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
