"""Step 05: switch to one expert.

Step 04's layer gives every token k experts and every expert any number of tokens. This step takes k = 1 and a limit:
an expert serves its capacity, in the order of the tokens, and drops the rest. What is dropped passes the layer by on
the residual stream. It leaves out training: chapter 18's build.py trains it beside the others.

    python step_05_switch-to-one-expert.py

prints who is served at several capacities and where the dropped tokens stand, and the checks; about three seconds.

Shapes: B batch, T positions, N = B · T tokens, C = d_model, E experts.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console
from shared.checks import Checks
from shared.randomness import generator

modern = chapters.load_build(7)
top_k_mask = chapters.load_step(18, 1).top_k_mask
random_moe = chapters.load_step(18, 3).random_moe
GroupedMoE = chapters.load_step(18, 4).GroupedMoE


@dataclass(frozen=True)
class SparseConfig(modern.ModernConfig):
    """Chapter 07's shape with experts for the MLP; d_hidden is the width of one expert."""

    mlp_type: str = "moe"
    d_hidden: int | None = 85
    n_experts: int = 8
    top_k: int = 2
    router_type: str = "top_k"  # who chooses, one of ROUTERS
    capacity_factor: float = 1.25  # "switch": an expert takes at most so many times its fair share of tokens
    balance_weight: float = 0.01  # the auxiliary loss counts so much in what is minimised
    bias_speed: float = 0.003  # "bias": so far an expert's bias moves in one step


def expert_capacity(n_tokens: int, n_experts: int, top_k: int, capacity_factor: float) -> int:
    """How many tokens one expert takes: the fair share k · N / E times the factor, rounded up, and at least one."""
    return max(1, math.ceil(capacity_factor * top_k * n_tokens / n_experts))


class SwitchMoE(GroupedMoE):
    """One expert a token, and no expert more tokens than its capacity (Fedus et al. 2022, section 2.2).

    An expert takes tokens in their order, so none is pushed out by a later one. A token that finds its expert full
    is dropped: its output is zero, and the residual stream carries it past the layer.
    """

    renormalizes = False

    def __init__(self, cfg: SparseConfig):
        super().__init__(cfg)
        self.capacity_factor = cfg.capacity_factor
        if cfg.top_k != 1 or cfg.capacity_factor <= 0:
            given = f"got {cfg.top_k} and {cfg.capacity_factor}"
            raise ValueError(f"SwitchMoE needs top_k 1 and a capacity_factor above 0 (none would get in), {given}")

    def decide(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (N, E) -> weight (N, E), the probability itself, and chosen (N, E) bool, at most one a token."""
        probabilities = logits.softmax(-1)
        wanted = top_k_mask(probabilities, self.top_k)
        chosen = wanted & (wanted.cumsum(0) <= expert_capacity(*logits.shape, self.top_k, self.capacity_factor))
        return probabilities * chosen, chosen


def make(n_experts: int, capacity_factor: float, C: int = 12) -> SwitchMoE:
    cfg = SparseConfig(d_model=C, n_heads=1, d_hidden=7, n_experts=n_experts, top_k=1, capacity_factor=capacity_factor)
    moe = SwitchMoE(cfg)
    moe.load_state_dict(random_moe(n_experts, 1, C, 7).state_dict())
    return moe


def main() -> int:
    B, T, C, E = 6, 40, 12, 5
    x = torch.randn(B, T, C, generator=generator(1, "step_05"))
    rows = []
    for factor in (0.5, 1.0, 1.25, 2.0, 5.0):
        moe = make(E, factor)
        routing = moe(x)[1]
        dropped = (~routing.chosen.any(1)).view(B, T).double()
        by_sequence = " ".join(f"{part:3.0%}" for part in dropped.mean(1).tolist())
        served, capacity = " ".join(map(str, routing.chosen.sum(0).tolist())), expert_capacity(B * T, E, 1, factor)
        rows.append([f"{factor:g}", str(capacity), served, f"{dropped.mean():.0%}", by_sequence])
    console.say(f"{B} sequences of {T} random tokens, {E} experts:")
    console.say()
    headers = ["factor", "capacity", "served by expert", "lost", "lost in sequences 1 to 6"]
    console.say(console.Table(headers, rows))
    alone = (~make(E, 1.0)(x[-1:])[1].chosen.any(1)).double().mean()
    console.say("\nFirst come, first served: who is dropped stands late in the batch, and the first")
    console.say(f"sequence loses nothing. Alone in a batch, the last would lose {alone:.0%} at factor 1:")
    console.say("what a token gets depends on its company.")

    checks = Checks()
    checks.equal(
        "capacity: 1.25 · 1 · 24 / 5 = 6, and 1 · 2 · 7 / 4 rounded up",
        [expert_capacity(24, 5, 1, 1.25), expert_capacity(7, 4, 2, 1.0)],
        [6, 4],
    )
    checks.equal("of a batch of one token", expert_capacity(1, 64, 1, 1.25), 1)

    queue = make(3, 1.0)
    weight, chosen = queue.decide(torch.tensor([[1.0, 2.0, 0.0]]).repeat(6, 1))  # all six want expert 1, capacity 2
    checks.equal("six tokens for one expert of capacity two", chosen.nonzero().tolist(), [[0, 1], [1, 1]])
    checks.close("the gate is the probability", weight[0, 1], math.exp(2) / (math.exp(1) + math.exp(2) + 1), 1e-6)
    alike = torch.ones(6, C)
    y = queue(alike)[0]
    checks.equal("dropped: exactly zero", y[2:], torch.zeros(4, C))
    checks.true("served: not zero", f"{y[:2].abs().min():.2g}", "> 0", bool((y[:2] != 0).all()))
    roomy = make(E, float(E))
    p, winner = (x.flatten(0, 1) @ roomy.router.weight.T).softmax(-1).max(-1)
    by_hand = torch.stack([p[n] * roomy.experts[winner[n]](token) for n, token in enumerate(x.flatten(0, 1))])
    checks.close("with room for all: probability times the likeliest expert", roomy(x)[0].flatten(0, 1), by_hand, 1e-5)
    tight, cut = make(E, 1.0), 17
    later = torch.cat((x[:1, :cut], torch.randn(1, T - cut, C, generator=generator(1, "step_05", "later"))), 1)
    ours, reference = tight(later)[0][:, :cut], tight(x[:1])[0][:, :cut]
    checks.close("other tokens after the first 17: those don't notice", ours, reference, 1e-5)
    for factor, k in ((0.0, 1), (-1.0, 1), (1.25, 2)):
        cfg = SparseConfig(top_k=k, capacity_factor=factor)
        checks.raises(
            f"capacity factor {factor:g}, k = {k}", ValueError, [str(k), str(factor)], lambda cfg=cfg: SwitchMoE(cfg)
        )
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
