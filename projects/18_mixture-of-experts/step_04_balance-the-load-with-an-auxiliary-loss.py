"""Step 04: balance the load with an auxiliary loss.

Step 03 is fast if the experts' slices are of a size; nothing so far makes them so. This step adds the loss that
does, and shows what it can't see. The layer therefore returns a second thing, the Routing: what the router did, with
its logits. Nothing is kept in a global, and the loss takes logits alone. It leaves out capacity.

    python step_04_balance-the-load-with-an-auxiliary-loss.py

prints the loss beside the load of five routers, one of them trained by it, and the checks; about three seconds.

Shapes: N tokens, C = d_model, E experts, k = top_k; f and P (E,).
"""

import sys
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console
from shared.checks import Checks
from shared.randomness import generator

modern = chapters.load_build(7)
top_k_mask = chapters.load_step(18, 1).top_k_mask
dispatch = chapters.load_step(18, 3).dispatch


class Routing(NamedTuple):
    """What one layer's router did with N tokens."""

    logits: torch.Tensor  # (N, E) float32, with their gradient
    chosen: torch.Tensor  # (N, E) bool: which experts compute which tokens


class GroupedMoE(modern.MoE):
    """Chapter 07's MoE with a dispatch for its loop, and a second output: what the router did.

    Another router overrides decide(). ValueError for k = 1 with gates that sum to 1: the router would never learn."""

    causal = True  # whether a token's output is the same whatever comes after it
    renormalizes = True  # whether a token's gates sum to 1

    def __init__(self, cfg: modern.ModernConfig):
        super().__init__(cfg)
        if self.renormalizes and cfg.top_k == 1 < cfg.n_experts:
            raise ValueError(
                "top_k 1 with renormalised gates makes every gate the constant 1, so the router gets no gradient; "
                "use a top_k of 2 or more, or SwitchMoE"
            )

    def decide(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (N, E) -> weight (N, E) and chosen (N, E) bool: the k likeliest experts, weights summing to 1."""
        probabilities = logits.softmax(-1)
        chosen = top_k_mask(probabilities, self.top_k)
        weight = probabilities * chosen
        return weight / weight.sum(-1, keepdim=True), chosen

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Routing]:
        """x (..., C) -> (..., C), and the Routing of its N tokens."""
        tokens = x.reshape(-1, x.shape[-1])
        with torch.autocast(x.device.type, enabled=False):  # the router stays float32 where other products don't
            logits = F.linear(tokens.float(), self.router.weight.float())
        weight, chosen = self.decide(logits)
        return dispatch(tokens, weight, chosen, self.experts).view_as(x), Routing(logits, chosen)


def switch_balance_loss(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """E · Σ f_e · P_e over the experts (Fedus et al. 2022, eq. 4) of one layer's logits (N, E).

    f_e is the part of the N · k assignments that expert e gets, P_e its mean probability: 1 at balance for any k.
    (Mixtral's convention doesn't divide f by k and has k at balance.) The gradient flows through P alone."""
    probabilities = logits.softmax(-1)
    fraction = top_k_mask(probabilities, top_k).float().mean(0) / top_k
    return logits.shape[-1] * (fraction * probabilities.mean(0)).sum()


def router_z_loss(logits: torch.Tensor) -> torch.Tensor:
    """The mean of logsumexp(logits)² (Zoph et al. 2022, eq. 5): it keeps logits (N, E) small, whoever is chosen."""
    return logits.logsumexp(-1).square().mean()


def max_violation(load: torch.Tensor) -> float:
    """MaxVio (Wang et al. 2024): the largest load (E,) over the mean load, minus 1. 0 is perfect balance."""
    return (load.max() / load.double().mean() - 1).item()


def descend(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """The logits after 300 steps down the gradient of the balance loss alone."""
    for _ in range(300):
        logits = logits.detach().requires_grad_()
        logits = logits - 20 * torch.autograd.grad(switch_balance_loss(logits, top_k), logits)[0]
    return logits.detach()


def main() -> int:
    N, E, k = 480, 6, 2
    skewed = torch.randn(N, E, generator=generator(1, "step_04")) + torch.tensor([3.0, 2.0, 0.0, 0.0, 0.0, -2.0])
    in_turn = torch.eye(E).repeat(N // E, 1)  # token n prefers expert n mod E
    routers = {
        "experts in turn": 9 * (in_turn + in_turn.roll(1, 1)),
        "skewed": skewed,
        "300 steps down the loss": descend(skewed, k),
        "two experts take all": 40.0 * (torch.arange(E) < 2).expand(N, E),
        "all logits zero": torch.zeros(N, E),
    }
    rows, loss = [], {}
    for name, logits in routers.items():
        load, loss[name] = top_k_mask(logits, k).sum(0), switch_balance_loss(logits, k)
        z, vio, idle = router_z_loss(logits), max_violation(load), (load == 0).sum()
        loads = " ".join(map(str, load.tolist()))
        rows.append([name, f"{loss[name]:.3f}", f"{z:.2f}", loads, f"{vio:.2f}", f"{idle}"])
    console.say(console.Table(["router", "loss", "z-loss", "load by expert", "MaxVio", "idle"], rows))
    console.say("\nThe last scores as well as the first and balances nothing: show the load, too.")

    checks = Checks()
    checks.close("balanced, k = 2", loss["experts in turn"], 1, 1e-6)
    checks.close("balanced, k = 1", switch_balance_loss(9 * in_turn, 1), 1, 1e-6)
    checks.close("Mixtral's convention, balanced: k", k * loss["experts in turn"], 2, 1e-6)
    checks.close("one takes all, k = 1: E", switch_balance_loss(40.0 * (torch.arange(E) < 1).expand(N, E), 1), E, 1e-5)
    checks.close("two take all, k = 2: E / 2", loss["two experts take all"], E / 2, 1e-5)
    checks.close("all logits zero: 1", loss["all logits zero"], 1, 1e-6)
    one, other = 40.0 * torch.eye(2)[[0] * 9], 40.0 * torch.eye(2)[[1] * 9]  # two layers, E = 2
    per_layer = (switch_balance_loss(one, 1) + switch_balance_loss(other, 1)) / 2
    checks.close("two layers collapsed in opposite directions: 2", per_layer, 2, 1e-5)
    checks.close(
        "concatenated first they would look balanced: 1", switch_balance_loss(torch.cat((one, other)), 1), 1, 1e-5
    )
    below = torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 60.0]])
    checks.close("1 is no lower bound: 7/8", switch_balance_loss(below, 1), 0.875, 1e-6)
    checks.close("z-loss of zeros, E = 8: ln² 8", router_z_loss(torch.zeros(5, 8)), 4.324077, 1e-6)
    moe = GroupedMoE(modern.ModernConfig(d_model=12, n_heads=1, d_hidden=7, n_experts=5, top_k=2))
    moe.load_state_dict(chapters.load_step(18, 3).random_moe(5, 2, 12, 7).state_dict())
    x = torch.randn(3, 11, 12, generator=generator(1, "step_04", "x"))
    y, routing = moe(x)
    checks.close("the layer's y is chapter 07's", y, modern.MoE.forward(moe, x), 1e-5)
    p, f = routing.logits.softmax(-1), top_k_mask(routing.logits, 2).float().mean(0) / 2
    by_hand = 5 / 33 * (p * (f - (p * f).sum(-1, keepdim=True))).T @ x.flatten(0, 1)  # through P alone
    switch_balance_loss(routing.logits, 2).backward()
    checks.close("the router's gradient, by hand", moe.router.weight.grad, by_hand, 1e-6)
    checks.raises("k = 1, renormalised", ValueError, ["top_k 1"], lambda: GroupedMoE(modern.ModernConfig(top_k=1)))
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
