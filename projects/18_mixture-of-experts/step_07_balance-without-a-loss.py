"""Step 07: balance without a loss.

The balance loss of step 04 pulls at the router's logits, and so at what the model learns. Here is a
way that leaves the logits alone. Each expert gets a bias, a number of its own. It is added to the
probabilities when experts are chosen, and to nothing else: the gates don't see it.
After each batch the bias of an expert with more tokens than the mean goes down by a fixed step, and
that of an expert with fewer goes up. The loads even out by themselves.

How large is the step, the speed? Too small, and balance comes late. Too large, and the bias
overshoots: experts swing between too many tokens and too few.

    python step_07_balance-without-a-loss.py

draws outputs/step_07.png: the load of six experts over 300 batches, at three speeds. The router is
random and has favourites; nothing else is trained.

Shapes: N tokens, C = d_model, E experts, k = top_k.
"""

import sys
from pathlib import Path
from statistics import mean

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console, figures
from shared.checks import Checks
from shared.randomness import generator

top_k_mask = chapters.load_step(18, 1).top_k_mask
random_moe = chapters.load_step(18, 3).random_moe
max_violation = chapters.load_step(18, 4).max_violation
Routing = chapters.load_step(18, 4).Routing
GroupedMoE = chapters.load_step(18, 4).GroupedMoE
SparseConfig = chapters.load_step(18, 5).SparseConfig

# ---------------------------------------------------------------- the idea


class BiasMoE(GroupedMoE):
    """Balance without a loss (Wang et al. 2024, DeepSeek-V3): each expert has a bias.

    The bias enters the choice, not the gate. The paper adds it to sigmoids; here it is added to the
    softmax, so that nothing else changes.
    """

    def __init__(self, cfg: SparseConfig):
        super().__init__(cfg)
        self.bias_speed = cfg.bias_speed
        self.register_buffer("balance_bias", torch.zeros(cfg.n_experts))

    def decide(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (N, E) -> weight (N, E) without the bias, and chosen (N, E) bool with it."""
        probabilities = logits.softmax(-1)
        chosen = top_k_mask(probabilities + self.balance_bias, self.top_k)
        weight = probabilities * chosen
        return weight / weight.sum(-1, keepdim=True), chosen

    @torch.no_grad()
    def update_bias(self, routing: Routing) -> None:
        """After a training step: up by bias_speed if the load was below the mean, down if above."""
        load = routing.chosen.sum(0).float()
        self.balance_bias += self.bias_speed * (load.mean() - load).sign()


# ---------------------------------------------------------------- look at it


def make(speed: float) -> BiasMoE:
    sizes = {"d_model": 12, "n_heads": 1, "d_hidden": 7, "n_experts": 6, "top_k": 2}
    moe = BiasMoE(SparseConfig(**sizes, bias_speed=speed))
    moe.load_state_dict(random_moe(6, 2, 12, 7).state_dict(), strict=False)  # the bias stays 0
    return moe


@torch.no_grad()
def run(moe: BiasMoE, n_batches: int = 300) -> list[list[float]]:
    """The load of each expert on each batch, as parts of 1; the bias is updated after each.

    The tokens lie around one mean, so that a random router prefers some experts.
    """
    centre = torch.randn(12, generator=generator(1, "step_07", "centre"))
    loads = []
    for n in range(n_batches):
        x = centre + torch.randn(128, 12, generator=generator(1, "step_07", n))
        _, routing = moe(x)
        load = routing.chosen.sum(0).cpu().double()
        loads.append((load / load.sum()).tolist())
        moe.update_bias(routing)
    return loads


def unevenness(loads: list[list[float]]) -> float:
    """Step 04's MaxVio, as a mean over the last 100 batches."""
    return mean(max_violation(torch.tensor(load)) for load in loads[-100:])


def draw_picture(loads: dict[float, list[list[float]]]) -> Path:
    figure = figures.new_figure(9, 3)
    panels = figure.subplots(1, len(loads), sharey=True)
    for axes, (speed, parts) in zip(panels, loads.items()):
        figures.bands(axes, range(len(parts)), parts)
        axes.set(title=f"speed {speed:g}", xlabel="batch")
    figure.axes[0].set_ylabel("part of the load")
    return figures.save(figure, __file__)


def main() -> int:
    loads = {speed: run(make(speed)) for speed in (0.0, 0.003, 0.1)}
    rows = [[f"{speed:g}", f"{unevenness(parts):.2f}"] for speed, parts in loads.items()]
    console.say(console.Table(["speed", "MaxVio, last 100 batches"], rows))
    console.say(f"\nThe picture is {draw_picture(loads)}.")
    console.say("A band is an expert, and equal bands are balance. The last panel swings.")

    checks = Checks()
    gain = unevenness(loads[0.003]) / unevenness(loads[0.0])
    checks.between("MaxVio at speed 0.003, over no bias", gain, 0, 0.5)
    moe = make(0.25)
    choices = torch.tensor([[1, 1, 0, 0, 0, 0]] * 3 + [[0, 1, 0, 0, 0, 1]]).bool()
    moe.update_bias(Routing(torch.zeros(4, 6), choices))  # loads 3 4 0 0 0 1, mean 4/3
    expected = [-0.25, -0.25, 0.25, 0.25, 0.25, 0.25]
    checks.equal("one update by hand", moe.balance_bias, torch.tensor(expected))
    logits = torch.randn(50, 6, generator=generator(1, "step_07", "logits"))
    moe.balance_bias = torch.tensor([0.4, -0.3, 0.0, 0.2, -0.1, 0.1])
    weight, chosen = moe.decide(logits)
    moved = int((chosen != make(0.0).decide(logits)[1]).any(1).sum())
    checks.between("of 50 tokens, sent elsewhere by a bias", moved, 5, 45)
    gates = logits.masked_fill(~chosen, -torch.inf).softmax(-1)
    checks.close("gates: softmax over the chosen, no bias", weight, gates, 1e-6)
    trained = [name for name, _ in moe.named_parameters() if "bias" in name]
    checks.equal("biases that the optimizer sees", trained, [])
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
