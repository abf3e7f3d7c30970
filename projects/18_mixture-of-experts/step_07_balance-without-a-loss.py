"""Step 07: balance without a loss.

Step 04's loss balances by pulling at the router's logits, and so at what the model learns. This step leaves the
logits alone: every expert gets a bias that enters the choice and nothing else, and after each batch the bias goes up
where the load was below the mean and down where it was above. It leaves out the model; build.py trains one.

    python step_07_balance-without-a-loss.py

prints load and bias over 300 batches of a skewed router, at three speeds, and the checks; about three seconds.

Shapes: N tokens, C = d_model, E experts, k = top_k.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console
from shared.checks import Checks
from shared.randomness import generator

top_k_mask = chapters.load_step(18, 1).top_k_mask
random_moe = chapters.load_step(18, 3).random_moe
Routing = chapters.load_step(18, 4).Routing
GroupedMoE = chapters.load_step(18, 4).GroupedMoE
max_violation = chapters.load_step(18, 4).max_violation
SparseConfig = chapters.load_step(18, 5).SparseConfig


class BiasMoE(GroupedMoE):
    """Balance without a loss (Wang et al. 2024, DeepSeek-V3): a bias picks experts, and never weighs them.

    The paper adds it to sigmoid scores; here it is added to the softmax, so that nothing else changes.
    """

    def __init__(self, cfg: SparseConfig):
        super().__init__(cfg)
        self.bias_speed = cfg.bias_speed
        self.register_buffer("balance_bias", torch.zeros(cfg.n_experts))

    def decide(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (N, E) -> weight (N, E) and chosen (N, E) bool: the bias is in the choice alone."""
        probabilities = logits.softmax(-1)
        chosen = top_k_mask(probabilities + self.balance_bias, self.top_k)
        weight = probabilities * chosen
        return weight / weight.sum(-1, keepdim=True), chosen

    @torch.no_grad()
    def update_bias(self, routing: Routing) -> None:
        """After a training step: bias_speed up for an expert whose load was below the mean, down for one above."""
        load = routing.chosen.sum(0).float()
        self.balance_bias += self.bias_speed * (load.mean() - load).sign()


def make(speed: float, E: int = 6, C: int = 12) -> BiasMoE:
    moe = BiasMoE(SparseConfig(d_model=C, n_heads=1, d_hidden=7, n_experts=E, top_k=2, bias_speed=speed))
    moe.load_state_dict(random_moe(E, 2, C, 7).state_dict(), strict=False)  # the bias starts at zero
    return moe


def batches(count: int, C: int = 12) -> list[torch.Tensor]:
    """Batches of 128 tokens around one mean, so that a random router prefers some experts to the others."""
    centre = torch.randn(C, generator=generator(1, "step_07", "centre"))
    return [centre + torch.randn(128, C, generator=generator(1, "step_07", n)) for n in range(count)]


@torch.no_grad()
def run(moe: BiasMoE, data: list[torch.Tensor]) -> list[float]:
    """MaxVio on every batch, with an update after each."""
    history = []
    for x in data:
        _, routing = moe(x)
        history.append(max_violation(routing.chosen.sum(0)))
        moe.update_bias(routing)
    return history


def main() -> int:
    data, rows, last = batches(300), [], {}
    for speed in (0.0, 0.001, 0.01, 0.1):
        moe = make(speed)
        history = run(moe, data)
        last[speed] = sum(history[-100:]) / 100
        load = moe(torch.cat(data[-10:]))[1].chosen.double().mean(0) / 2
        parts = " ".join(f"{100 * part:2.0f}" for part in load.tolist())
        bias = " ".join(f"{b:+.1f}" for b in moe.balance_bias.tolist())
        rows.append([f"{speed:g}", f"{history[0]:.2f}", f"{last[speed]:.2f}", parts, bias])
    console.say("A router with favourites. MaxVio of the first batch, mean of the last 100 of 300:")
    console.say()
    headers = ["speed", "first", "last", "load at last, %", "biases at last"]
    console.say(console.Table(headers, rows))

    checks = Checks()
    checks.between("MaxVio at speed 0.01, over that of no bias", last[0.01] / last[0.0], 0, 0.5)
    checks.between("too fast it swings: MaxVio at 0.1 over that at 0.01", last[0.1] / last[0.01], 1.5, 10)
    moe = make(0.25)
    routing = Routing(
        torch.zeros(4, 6), top_k_mask(torch.tensor([[3.0, 2, 0, 0, 0, 0]] * 3 + [[0, 2.0, 0, 0, 0, 3]]), 2)
    )
    moe.update_bias(routing)  # loads 3 4 0 0 0 1, mean 4/3
    checks.equal("one update", moe.balance_bias.tolist(), [-0.25, -0.25, 0.25, 0.25, 0.25, 0.25])
    logits = torch.randn(50, 6, generator=generator(1, "step_07", "logits"))
    moe.balance_bias = torch.tensor([0.4, -0.3, 0.0, 0.2, -0.1, 0.1])
    weight, chosen = moe.decide(logits)
    score = logits.double().softmax(-1)
    checks.equal("chosen: the best two of score + bias", chosen, top_k_mask(score + moe.balance_bias, 2))
    changed = int((chosen != make(0.0).decide(logits)[1]).any(1).sum())
    checks.between("tokens that the bias sends elsewhere, of 50", changed, 5, 45)
    reference = torch.where(chosen, logits.double(), -torch.inf).softmax(-1)
    checks.close("weights: the softmax over the chosen, no bias in it", weight, reference, 1e-6)
    moe.balance_bias += 7.0
    checks.equal("the same bias more for all: the same choice", moe.decide(logits)[1], chosen)
    checks.equal("the optimizer doesn't see it", [n for n, _ in moe.named_parameters() if "bias" in n], [])
    checks.equal("but a checkpoint does", "balance_bias" in moe.state_dict(), True)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
