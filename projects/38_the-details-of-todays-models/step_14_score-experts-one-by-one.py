"""Step 14: score experts one by one.

A softmax makes an expert's score out of all logits: one score can rise only if others fall. So
DeepSeek-V3 takes the sigmoid of each logit, 1 / (1 + e^-logit). That is a number between 0 and 1,
and the other experts have no part in it. The gates are the scores of the k best, divided by their
sum. Two more things have a say in which experts are chosen, but not in their gates:

A bias for each expert. It goes up while the expert has too little to do, and down while it has too
much (chapter 18, step 07). It says how busy an expert is, not how good its answer is, so it is
added to the score before experts are chosen, and left out of the gate.

Groups. In the training of DeepSeek-V3 the 256 experts of a layer stood on eight machines, 32 on
each. A token has to be sent to every machine that has one of its eight experts, and sending takes
time. So a token first chooses four machines, and then its experts there. It takes the machines
whose two best experts have the largest sum of scores: eight experts on four machines are two on
each, on average.

    python step_14_score-experts-one-by-one.py

draws outputs/step_14.png. Shapes: N tokens, E experts, k = top_k.
"""

import math
import sys
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, figures
from shared.checks import Checks
from shared.console import Table, say
from shared.randomness import generator

build = chapters.load_build(38)  # the finished chapter: what is not on this page
DetailedConfig = build.DetailedConfig
SoftmaxMoE = build.SoftmaxMoE  # in step 13
best = build.best  # the numbers of the k largest scores

# ---------------------------------------------------------------- the idea


class SigmoidMoE(SoftmaxMoE):
    """Each expert is scored by itself; a bias keeps them equally busy (DeepSeek-V3, eqs. 12 to 16).

    A group's worth is the sum of its two best experts; a token chooses within top_groups of them.
    """

    def __init__(self, cfg: DetailedConfig):
        super().__init__(cfg)
        self.register_buffer("balance_bias", torch.zeros(cfg.n_experts))  # chapter 18 moves one

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.sigmoid()

    def choose(self, scores: torch.Tensor) -> torch.Tensor:
        wanted = scores + self.balance_bias
        in_groups = wanted.unflatten(1, (self.cfg.n_groups, -1))  # (N, groups, experts of a group)
        n_best = min(2, in_groups.shape[2])
        worth = in_groups.topk(n_best).values.sum(-1)  # (N, groups)
        opened = best(worth, self.cfg.top_groups)  # (N, top_groups)
        closed = torch.ones_like(worth, dtype=torch.bool)  # (N, groups)
        closed = closed.scatter(1, opened, False)  # all but the opened ones
        allowed = in_groups.masked_fill(closed[..., None], -math.inf)
        return best(allowed.flatten(1), self.top_k)  # flat again: (N, E)


# ---------------------------------------------------------------- look at it


def make(n_machines: int) -> SigmoidMoE:
    """256 experts on eight machines; a token chooses eight experts on n_machines of them."""
    groups = {"n_groups": 8, "top_groups": n_machines}
    experts = {"n_experts": 256, "top_k": 8, "d_hidden": 1}  # as small as can be: none is used here
    moe = SigmoidMoE(DetailedConfig(mlp_type="moe", **experts, **groups))
    nn.init.normal_(moe.router.weight, std=0.125, generator=generator(1, "step_14", "router"))
    return moe


def machines(chosen: torch.Tensor) -> torch.Tensor:
    """On how many machines the chosen experts (N, 8) of each token stand, (N,)."""
    each = F.one_hot(chosen // 32, 8)  # (N, 8 experts, 8 machines): 1 where an expert stands
    used = each.amax(1)  # (N, 8 machines): 1 where one of the experts stands
    return used.sum(1)


def draw_picture(scores: torch.Tensor, chosen: dict[str, torch.Tensor]) -> Path:
    """The scores of one token's experts, a row for each machine, and dots on the chosen."""
    figure = figures.new_figure(9, 2.6)
    for axes, (title, experts) in zip(figure.subplots(1, 2, sharey=True), chosen.items()):
        axes.imshow(scores.view(8, 32).numpy(), cmap="Blues", aspect="auto")
        axes.plot((experts % 32).numpy(), (experts // 32).numpy(), "o", color=figures.COLOURS[1])
        axes.set(title=title, xlabel="expert", xticks=[], yticks=range(8))
    figure.axes[0].set_ylabel("machine")
    return figures.save(figure, __file__)


@torch.no_grad()
def main() -> int:
    x = torch.randn(2_000, 64, generator=generator(1, "step_14"))
    chosen = {}
    for n in (8, 4, 2, 1):
        _, chosen[n] = make(n).route(x)  # (N, 8)
    best_eight = F.one_hot(chosen[8], 256).sum(1)  # (N, E): 1 at a token's eight best experts
    rows = []
    for n, experts in chosen.items():
        used = machines(experts).double().mean()
        kept = best_eight.gather(1, experts).sum(1).double().mean()
        rows.append([f"{n} of 8", f"{used:.2f}", f"{kept:.2f}"])
    say(Table(["machines allowed", "machines used", "of its eight best experts"], rows))
    say("\nThe second row is DeepSeek-V3's: a token uses at most four machines instead of")
    say("5.31 on average, and gets 6.55 of its eight best experts.")
    layer = make(8)
    scores = layer.scores(layer.router(x))
    far = machines(chosen[8]).argmax()  # the token whose best experts stand on the most machines
    panels = {"its eight best experts": chosen[8][far], "on four machines": chosen[4][far]}
    say(f"One token's choice is drawn in {draw_picture(scores[far], panels)}.")

    checks = Checks()
    sizes = {"n_experts": 6, "n_groups": 3, "top_groups": 1, "top_k": 2}
    by_hand = SigmoidMoE(DetailedConfig(mlp_type="moe", **sizes))
    wanted = torch.tensor([[0.9, 0.1, 0.6, 0.5, 0.2, 0.3]])  # two experts a group: sums 1 1.1 0.5
    checks.equal("two good ones beat the best", by_hand.choose(wanted).tolist(), [[2, 3]])
    largest = layer.router(x).topk(8).indices
    checks.equal("all groups: the best eight", chosen[8], largest)
    layer.balance_bias[5] = 1.0
    gates, experts = layer.route(x)
    checks.equal("bias 1: all choose expert 5", (experts == 5).sum().item(), 2_000)
    without = scores.gather(1, experts)
    checks.close("gates know of no bias", gates, without / without.sum(-1, keepdim=True), 1e-6)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
