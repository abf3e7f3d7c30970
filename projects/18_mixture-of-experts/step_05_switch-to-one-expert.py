"""Step 05: switch to one expert.

The Switch Transformer sends each token to one expert, k = 1: half of k = 2's work. The gate is
the probability itself, so that the router learns (step 01).

It also gives each expert a limit. Experts often stand on devices of their own, and the memory for a
slice must be fixed ahead. The fair share of an expert is N / E tokens; its capacity is that times
the capacity factor. The expert serves tokens in their order until it is full. The others are
dropped: the layer's output for them is zero, and only the residual stream goes on.

For example, 6 tokens, 3 experts and the factor 1: the capacity is 6 / 3 = 2. If all six want expert
1, tokens 0 and 1 are served, and 2 to 5 are dropped.

Only training drops. In evaluation and in generation, after model.eval(), every token is served.
Otherwise the same token would get another answer in another batch: with other tokens before it,
or with another number of tokens, since the capacity grows with it.

    python step_05_switch-to-one-expert.py

draws outputs/step_05.png: who is dropped.

Shapes: B batch, T positions, N = B · T tokens, C = d_model, E experts.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console, figures
from shared.checks import Checks
from shared.randomness import generator

modern = chapters.load_build(7)
top_k_mask = chapters.load_step(18, 1).top_k_mask
random_moe = chapters.load_step(18, 3).random_moe
GroupedMoE = chapters.load_step(18, 4).GroupedMoE

# ---------------------------------------------------------------- the idea


@dataclass(frozen=True)
class SparseConfig(modern.ModernConfig):
    """Chapter 07's shape with experts for the MLP; d_hidden is the width of one expert."""

    mlp_type: str = "moe"
    d_hidden: int | None = 85  # two of them cost what one dense MLP of width 170 does
    n_experts: int = 8
    top_k: int = 2
    router_type: str = "top_k"  # who chooses; step 08 lists the four
    capacity_factor: float = 1.25  # "switch": capacity = this times the fair share
    balance_weight: float = 0.01  # the weight of step 04's loss in what is minimised
    bias_speed: float = 0.003  # "bias", step 07: how far a bias moves after each batch


def expert_capacity(n_tokens: int, n_experts: int, top_k: int, capacity_factor: float) -> int:
    """How many tokens an expert takes: capacity_factor · k · N / E, rounded up, at least one."""
    share = capacity_factor * top_k * n_tokens / n_experts
    # round() first: in floats 1.1 · 50 / 5 is 11.000000000000002, which would become 12.
    return max(1, math.ceil(round(share, 9)))


class SwitchMoE(GroupedMoE):
    """One expert a token, and in training a limit for each expert (Fedus et al. 2022, section 2.2).

    Tokens are served in their order, so no later token pushes an earlier one out.
    """

    fewest = 1  # its gate is no constant, so one expert a token will do

    def __init__(self, cfg: SparseConfig):
        super().__init__(cfg)
        self.capacity_factor = cfg.capacity_factor
        if cfg.top_k != 1 or cfg.capacity_factor <= 0:
            raise ValueError(
                "SwitchMoE needs top_k 1 and a capacity_factor above 0 (none would get in), "
                f"got {cfg.top_k} and {cfg.capacity_factor}"
            )

    def decide(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (N, E) -> weight (N, E), the probability itself; chosen (N, E), at most one."""
        probabilities = logits.softmax(-1)
        chosen = top_k_mask(probabilities, self.top_k)
        if self.training:
            n_tokens, n_experts = logits.shape
            capacity = expert_capacity(n_tokens, n_experts, self.top_k, self.capacity_factor)
            queue_position = chosen.cumsum(0)  # (N, E): 1 for the first token of an expert
            chosen = chosen & (queue_position <= capacity)
        return probabilities * chosen, chosen


# ---------------------------------------------------------------- look at it


def make(capacity_factor: float, n_experts: int = 5) -> SwitchMoE:
    """A Switch of 12 channels with random weights."""
    sizes = {"d_model": 12, "n_heads": 1, "d_hidden": 7, "n_experts": n_experts, "top_k": 1}
    moe = SwitchMoE(SparseConfig(**sizes, capacity_factor=capacity_factor))
    moe.load_state_dict(random_moe(n_experts, 2, 12, 7).state_dict())
    return moe


def draw_picture(x: torch.Tensor) -> Path:
    """The tokens that are served (light) and dropped (dark), at three capacity factors."""
    figure = figures.new_figure(8, 3)
    panels = figure.subplots(1, 3, sharey=True)
    for axes, factor in zip(panels, (0.5, 1.0, 1.5)):
        _, routing = make(factor)(x)
        dropped = (~routing.chosen.any(1)).view(x.shape[:2])
        axes.imshow(dropped.numpy(), cmap="Greys", vmin=-0.15, vmax=1.2, aspect="auto")
        title = f"factor {factor}: {dropped.double().mean():.0%} dropped"
        axes.set(title=title, xlabel="position", yticks=range(len(x)))
    panels[0].set_ylabel("sequence in the batch")
    return figures.save(figure, __file__)


def main() -> int:
    x = torch.randn(6, 40, 12, generator=generator(1, "step_05"))
    console.say(f"The picture is {draw_picture(x)}.")
    console.say("The dark tokens are dropped. They come late in the batch; sequence 0 loses none.")

    checks = Checks()
    checks.equal("capacity: 1.1 · 50 / 5 is 11, not 12", expert_capacity(50, 5, 1, 1.1), 11)
    six = torch.tensor([[1.0, 2.0, 0.0]]).repeat(6, 1)  # all want expert 1
    weight, chosen = make(1.0, n_experts=3).decide(six)
    served = chosen.any(1).nonzero().flatten().tolist()
    checks.equal("six tokens for two places: the first", served, [0, 1])
    probability = math.exp(2) / (math.exp(1) + math.exp(2) + 1)
    checks.close("the gate is the probability", weight[0, 1], probability, 1e-6)
    dropped = make(1.0, n_experts=3)(torch.ones(6, 12))[0][2:]
    checks.equal("what is dropped gets zero", dropped, torch.zeros(4, 12))
    switch = make(1.0).eval()
    tokens = x.flatten(0, 1)
    together, _ = switch(tokens)
    alone = torch.cat([switch(token[None])[0] for token in tokens])
    checks.close("in evaluation: alone as in company", together, alone, 1e-5)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
