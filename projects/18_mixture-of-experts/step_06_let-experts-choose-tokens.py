"""Step 06: let experts choose tokens.

So far tokens choose experts, and some experts get too many. Turn it around: each expert takes the
k · N / E tokens that want it most. Every expert gets the same load, always: no balance loss, no
capacity to tune. A token may get no expert, or all.

But such a router is not for writing text. Whether an expert takes a token depends on later tokens,
too: if one wants the expert more, the earlier token loses its place and its output changes. The
layer isn't causal. In training it sees what it should predict; in generation that isn't there yet.

A gradient can't find this leak: choosing has no gradient. So exchange one token and look which
outputs change. A causal layer only changes the exchanged token's output and later ones. The page
does this with expert choice, and with a Switch that leaks as well: its full experts keep the tokens
that want them most, wherever they stand.

    python step_06_let-experts-choose-tokens.py

draws outputs/step_06.png: who depends on whom, for four routers.

Shapes: N = T tokens of one sequence, C = d_model, E experts, k = experts of a token on average.
"""

import sys
from pathlib import Path

import torch
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console, figures
from shared.checks import Checks
from shared.randomness import generator

top_k_mask = chapters.load_step(18, 1).top_k_mask
random_moe = chapters.load_step(18, 3).random_moe
GroupedMoE = chapters.load_step(18, 4).GroupedMoE
SparseConfig = chapters.load_step(18, 5).SparseConfig
SwitchMoE = chapters.load_step(18, 5).SwitchMoE
expert_capacity = chapters.load_step(18, 5).expert_capacity

# ---------------------------------------------------------------- the idea


class ExpertChoiceMoE(GroupedMoE):
    """Each expert takes the k · N / E tokens that want it most (Zhou et al. 2022).

    Always balanced, and not causal: a later token can take an earlier one's place.
    """

    causal = False
    fewest = 1  # its gate is no constant, so one expert a token will do

    def decide(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (N, E) -> weight (N, E), the probabilities, and chosen (N, E), equal loads."""
        n_tokens, n_experts = logits.shape
        probabilities = logits.softmax(-1)
        share = expert_capacity(n_tokens, n_experts, self.top_k, capacity_factor=1.0)
        by_expert = top_k_mask(probabilities.t(), share)  # (E, N): each row an expert's choice
        chosen = by_expert.t()
        return probabilities * chosen, chosen


class DropByScore(SwitchMoE):
    """A Switch whose full experts keep the tokens that want them most (Riquelme et al. 2021)."""

    causal = False

    def decide(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        n_tokens, n_experts = logits.shape
        probabilities = logits.softmax(-1)
        wanted = probabilities * top_k_mask(probabilities, 1)
        capacity = expert_capacity(n_tokens, n_experts, 1, self.capacity_factor)
        by_expert = top_k_mask(wanted.t(), capacity)  # (E, N)
        chosen = by_expert.t() & (wanted > 0)  # an expert with room to spare takes no others
        return probabilities * chosen, chosen


# ---------------------------------------------------------------- look at it


def make(cls: type, n_experts: int, top_k: int) -> GroupedMoE:
    sizes = {"d_model": 12, "n_heads": 1, "d_hidden": 7, "n_experts": n_experts, "top_k": top_k}
    moe = cls(SparseConfig(**sizes, capacity_factor=1.0))
    moe.load_state_dict(random_moe(n_experts, 2, 12, 7).state_dict(), strict=False)
    return moe


@torch.no_grad()
def influence(moe: nn.Module, x: torch.Tensor, trials: int = 8) -> torch.Tensor:
    """x (T, C) -> (T, T) bool: [i, j] is whether output i ever changes if token j is exchanged."""
    T, C = x.shape
    y, _ = moe(x)
    changed = torch.zeros(T, T, dtype=torch.bool)
    for trial in range(trials):
        for j in range(T):
            other = x.clone()
            other[j] = torch.randn(C, generator=generator(1, "step_06", trial, j))
            moved = (moe(other)[0] - y).abs() > 1e-4  # more than rounding
            changed[:, j] |= moved.any(1)
    return changed


def draw_picture(maps: dict[str, torch.Tensor]) -> Path:
    """A map for each router: grey where a token changes itself or later ones, red earlier ones."""
    figure = figures.new_figure(10, 3)
    panels = figure.subplots(1, len(maps), sharey=True)
    for axes, (name, changed) in zip(panels, maps.items()):
        leaks = changed.triu(1)
        image = torch.ones(*changed.shape, 3)
        image[changed] = torch.tensor([0.35, 0.35, 0.35])
        image[leaks] = torch.tensor([0.84, 0.15, 0.0])
        axes.imshow(image.numpy())
        axes.set(title=name, xlabel="token exchanged")
    figure.axes[0].set_ylabel("output that changes")
    return figures.save(figure, __file__)


def main() -> int:
    x = torch.randn(24, 12, generator=generator(1, "step_06"))
    choice = make(ExpertChoiceMoE, 4, 2)
    maps = {
        "top-2": influence(make(GroupedMoE, 4, 2), x),
        "Switch, training": influence(make(SwitchMoE, 4, 1), x),
        "Switch by score": influence(make(DropByScore, 4, 1), x),
        "expert choice": influence(choice, x),
    }
    leaks = {name: int(changed.triu(1).sum()) for name, changed in maps.items()}
    console.say(f"The picture is {draw_picture(maps)}.")
    console.say("Red is a leak: an output that changes with a later token. Grey is no leak: an")
    console.say("output that changes with its own token or an earlier one. Red squares by panel:")
    console.say()
    console.say(console.Table(["router", "leaks"], [[name, str(n)] for name, n in leaks.items()]))

    checks = Checks()
    load = choice(x)[1].chosen.sum(0).tolist()
    checks.equal("expert choice: every expert's load", load, [2 * 24 // 4] * 4)
    causal = [leaks["top-2"], leaks["Switch, training"]]
    checks.equal("leaks of top-2 and of Switch", causal, [0, 0])
    pairs = 24 * 23 // 2  # of an output and a later token
    checks.between("leaks of Switch by score", leaks["Switch by score"], 1, pairs)
    checks.between("leaks of expert choice", leaks["expert choice"], 1, pairs)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
