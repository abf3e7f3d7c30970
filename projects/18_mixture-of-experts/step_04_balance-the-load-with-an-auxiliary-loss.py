"""Step 04: balance the load with an auxiliary loss.

An expert that gets tokens learns, and is chosen more for it. One that gets none stays as it was.
So a few experts may end up with most tokens. To prevent it, a little of this is added to the loss:

    balance loss = E · Σ f_e · P_e

f_e is the load of expert e: the part of all choices in a batch that fall on it. P_e is the
probability that the router gives to e, averaged over the batch. For example, E = 2 and k = 1:

    tokens shared evenly             f = 1/2, 1/2    P = 0.5, 0.5    2 · (0.25 + 0.25) = 1.0
    expert 0 gets three of four      f = 3/4, 1/4    P = 0.6, 0.4    2 · (0.45 + 0.10) = 1.1

The loss learns through P alone, as f is a count and has no gradient. It falls if the busy expert's
P falls: with P = 0.5, 0.5 in the second row it would be 1.0.

What it can't see: with all logits 0 every P is 1/E, so the loss is 1, too. But ties go to the
lowest numbers, and k experts get everything. So print the loads as well.

The loss is computed from the router's logits, so the layer below returns them with its output.

    python step_04_balance-the-load-with-an-auxiliary-loss.py

prints the loss and the loads of three routers. Step 14 shows the loads of a model in training.

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

modern = chapters.load_build(7)
top_k_mask = chapters.load_step(18, 1).top_k_mask
dispatch = chapters.load_step(18, 11).dispatch  # step 03's; on some GPUs in one call

# ---------------------------------------------------------------- the idea


def switch_balance_loss(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """E · Σ f_e · P_e over the experts (Fedus et al. 2022, eq. 4) of one layer's logits (N, E)."""
    n_experts = logits.shape[-1]
    probabilities = logits.softmax(-1)
    chosen = top_k_mask(probabilities, top_k).float()  # (N, E)
    f = chosen.mean(0) / top_k  # (E,): sums to 1, as each token makes k choices
    P = probabilities.mean(0)  # (E,)
    return n_experts * (f * P).sum()


def max_violation(load: torch.Tensor) -> float:
    """MaxVio (Wang et al. 2024): the largest load (E,) over the mean load, minus 1. 0: balance."""
    return (load.max() / load.double().mean() - 1).item()


class Routing(NamedTuple):
    """What one layer's router did with N tokens."""

    logits: torch.Tensor  # (N, E) float32, with their gradient
    chosen: torch.Tensor  # (N, E) bool: which experts compute which tokens


class GroupedMoE(modern.MoE):
    """Chapter 07's MoE, dispatched in groups, that also returns what the router did.

    Another router overrides decide().
    """

    causal = True  # whether a token's output stays as it is if later tokens change (step 06)

    def decide(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (N, E) -> weight (N, E), each row's sum 1, and chosen (N, E) bool: the best k."""
        probabilities = logits.softmax(-1)
        chosen = top_k_mask(probabilities, self.top_k)
        weight = probabilities * chosen
        return weight / weight.sum(-1, keepdim=True), chosen

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Routing]:
        """x (..., C) -> (..., C), and the Routing of its N tokens."""
        tokens = x.reshape(-1, x.shape[-1])
        # Autocast would turn the router's product to bfloat16, too coarse to choose by (step 12).
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(tokens.float(), self.router.weight.float())
        weight, chosen = self.decide(logits)
        y = dispatch(tokens, weight, chosen, self.experts)
        return y.view_as(x), Routing(logits, chosen)


# ---------------------------------------------------------------- look at it


def row_of(name: str, logits: torch.Tensor, k: int) -> list[str]:
    load = top_k_mask(logits, k).sum(0)
    loads = " ".join(str(n) for n in load.tolist())
    loss = switch_balance_loss(logits, k)
    return [name, f"{loss:.2f}", loads, f"{max_violation(load):.2f}"]


def main() -> int:
    # Logits of three tokens for six experts. A token chooses the two experts with more than 0.
    a = [20, 20, 0, 0, 0, 0]
    b = [0, 0, 20, 20, 0, 0]
    c = [0, 0, 0, 0, 20, 20]
    in_turn = torch.tensor([a, b, c]).float()
    two_take_all = torch.tensor([a, a, a]).float()
    zero = torch.zeros(3, 6)
    rows = [
        row_of("two experts in turn", in_turn, 2),
        row_of("two take all", two_take_all, 2),
        row_of("all logits zero", zero, 2),
    ]
    headers = ["router, k = 2 of 6", "balance loss", "load by expert", "MaxVio"]
    console.say(console.Table(headers, rows))
    console.say("\nLook at the last row: its balance loss is as good as the first one's, and two")
    console.say("experts have all tokens. (MaxVio: the largest load over the mean load, minus 1.)")

    checks = Checks()
    checks.close("balanced: 1", switch_balance_loss(in_turn, 2), 1, 1e-6)
    checks.close("two of six take all: 6 / 2", switch_balance_loss(two_take_all, 2), 3, 1e-5)
    three_of_four = torch.tensor([[0.7, 0.3], [0.7, 0.3], [0.7, 0.3], [0.3, 0.7]])
    checks.close("the example above: 1.1", switch_balance_loss(three_of_four.log(), 1), 1.1, 1e-6)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
