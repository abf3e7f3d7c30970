"""Step 06: let experts choose tokens.

Step 05 limits how many tokens an expert serves; this step turns the choice around. Each expert takes the tokens that
want it most, always equally many: no loss, no capacity to tune, no imbalance. And it is no language model's router,
since which tokens an expert takes depends on those that come later. The step finds that leak, in this router and in
a Switch that drops by score; and generate() refuses.

    python step_06_let-experts-choose-tokens.py

prints how many experts the tokens got, which layers leak, and the checks; about three seconds.

Shapes: B batch, T positions, N = B · T tokens, C = d_model, E experts, k = experts of a token on average.
"""

import sys
from pathlib import Path

import torch
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console
from shared.checks import Checks
from shared.randomness import generator

gpt = chapters.load_build(5)
modern = chapters.load_build(7)
top_k_mask = chapters.load_step(18, 1).top_k_mask
random_moe = chapters.load_step(18, 3).random_moe
GroupedMoE = chapters.load_step(18, 4).GroupedMoE
SparseConfig = chapters.load_step(18, 5).SparseConfig
SwitchMoE = chapters.load_step(18, 5).SwitchMoE
expert_capacity = chapters.load_step(18, 5).expert_capacity


class ExpertChoiceMoE(GroupedMoE):
    """Each expert takes the k · N / E tokens that want it most (Zhou et al. 2022): balanced, and not causal."""

    causal = False
    renormalizes = False

    def decide(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (N, E) -> weight (N, E), the probabilities, and chosen (N, E) bool, equally many for each expert."""
        probabilities = logits.softmax(-1)
        chosen = top_k_mask(probabilities.t(), expert_capacity(*logits.shape, self.top_k, capacity_factor=1.0)).t()
        return probabilities * chosen, chosen


def generate(model: nn.Module, idx: torch.Tensor, max_new_tokens: int, **options) -> torch.Tensor:
    """Chapter 05's generate() and its options. ValueError for a model with a layer that isn't causal."""
    for module in model.modules():
        if not getattr(module, "causal", True):
            raise ValueError(f"{type(module).__name__} can't generate: it chooses by later tokens, and has none yet")
    return gpt.generate(model, idx, max_new_tokens, **options)


class DropByScore(SwitchMoE):
    """A Switch whose full experts keep the tokens that want them most, wherever they stand: Vision MoE's "batch
    prioritized routing" (Riquelme et al. 2021), which is fine for images."""

    causal = False

    def decide(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        probabilities = logits.softmax(-1)
        wanted = probabilities * top_k_mask(probabilities, 1)
        best = top_k_mask(wanted.t(), expert_capacity(*logits.shape, 1, self.capacity_factor)).t()
        chosen = best & (wanted > 0)
        return probabilities * chosen, chosen


def make(cls: type, n_experts: int, top_k: int, C: int = 12) -> GroupedMoE:
    moe = cls(SparseConfig(d_model=C, n_heads=1, d_hidden=7, n_experts=n_experts, top_k=top_k, capacity_factor=1.0))
    moe.load_state_dict(random_moe(n_experts, top_k, C, 7).state_dict(), strict=False)
    return moe


def leak(moe: nn.Module, x: torch.Tensor, cut: int, trials: int = 20) -> int:
    """How many of `cut` positions ever change their output when the tokens from `cut` on are exchanged; x (T, C).

    No gradient can tell: it follows the tokens that were chosen, and a choice has none.
    """
    changed = torch.zeros(cut, dtype=torch.bool)
    for trial in range(trials):
        other = torch.cat((x[:cut], torch.randn(len(x) - cut, x.shape[1], generator=generator(1, "step_06", trial))))
        changed |= ((moe(other)[0] - moe(x)[0]).abs() > 1e-4)[:cut].any(1)  # other shapes may round otherwise
    return int(changed.sum())


def main() -> int:
    T, C, E, k, cut = 40, 12, 5, 2, 23
    x = torch.randn(T, C, generator=generator(1, "step_06"))
    choice = make(ExpertChoiceMoE, E, k)
    routing = choice(x)[1]
    got = torch.bincount(routing.chosen.sum(1), minlength=E + 1)
    console.say(f"{T} tokens, and {E} experts that take {k * T // E} of them each. Experts of a token:")
    console.say(", ".join(f"{n} ({count} times)" for n, count in enumerate(got.tolist())))
    layers = [make(GroupedMoE, E, k), make(SwitchMoE, E, 1), make(DropByScore, E, 1), choice]
    leaks = {type(moe).__name__: leak(moe, x, cut) for moe in layers}
    console.say(f"\nOf the first {cut} tokens, so many change their output with the tokens after them:")
    console.say("; ".join(f"{name}: {count}" for name, count in leaks.items()))

    checks = Checks()
    checks.equal("every expert's load", routing.chosen.sum(0).tolist(), [k * T // E] * E)
    checks.equal("experts got by all tokens together", int((got * torch.arange(E + 1)).sum()), k * T)
    p = (x @ choice.router.weight.T).softmax(-1)
    by_hand = torch.zeros(T, C)
    for e, expert in enumerate(choice.experts):
        for n in p[:, e].topk(k * T // E).indices.tolist():
            by_hand[n] += p[n, e] * expert(x[n])
    checks.close("against the definition", choice(x)[0], by_hand, 1e-5)
    for name, expected in (("GroupedMoE", 0), ("SwitchMoE", 0)):
        checks.equal(f"{name} leaks at so many positions", leaks[name], expected)
    for name in ("DropByScore", "ExpertChoiceMoE"):
        checks.between(f"{name} leaks at so many positions", leaks[name], 1, cut)
    few = make(ExpertChoiceMoE, 7, 2)
    for n in (1, 3):
        y, routing = few(x[:n])
        checks.equal(f"{n} tokens, 7 experts: each expert takes", routing.chosen.sum(0).tolist(), [1] * 7)
        checks.true("    and y is finite", str(bool(y.isfinite().all())), "True", bool(y.isfinite().all()))
    idx = torch.zeros(1, 1, dtype=torch.int64)
    checks.raises("generate() with it", ValueError, ["ExpertChoiceMoE", "later"], lambda: generate(choice, idx, 1))
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
