"""Step 01: look inside the router.

A sparse layer holds several MLPs, the experts, and sends each token to a few of them. Who decides?
A router: one matrix that gives each token a score for each expert. The k best experts compute the
token, and their outputs are added, each times its share: its gate.

Three questions about these few lines decide whether a router works:
- Is the softmax taken over all experts or over the chosen ones? It makes no difference if the gates
  are divided by their sum: both ways, a gate is e^score over the sum of e^score of the chosen.
- Who wins a tie? Here the lowest number. torch.topk promises nothing, so another device may choose
  other experts, and a router that starts at zero has nothing but ties.
- May a token have a single expert, k = 1? Not with these gates: one probability divided by itself
  is 1, whatever the router says. A constant has no gradient, so the router never learns. Either
  k is at least 2, or the gate is the probability itself, as in step 05.

    python step_01_look-inside-the-router.py

draws outputs/step_01.png. Step 12 disturbs the scores; the experts come in step 03.

Shapes: N tokens, C = d_model, E experts, k = top_k.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console, figures
from shared.checks import Checks
from shared.randomness import generator

modern = chapters.load_build(7)

# ---------------------------------------------------------------- the idea


def top_k_mask(scores: torch.Tensor, k: int) -> torch.Tensor:
    """scores (N, E) -> (N, E) bool, true at each row's k largest.

    Of equal scores the lowest expert numbers win: a stable sort promises that, torch.topk doesn't.
    """
    best = scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]  # (N, k): experts
    mask = torch.zeros_like(scores, dtype=torch.bool)
    return mask.scatter(1, best, True)  # true in the columns that best names


def route(x: torch.Tensor, router: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens x (N, C), router (E, C) -> probabilities (N, E) and gates (N, E), 0 if not chosen."""
    logits = x @ router.T
    probabilities = logits.softmax(-1)
    kept = probabilities * top_k_mask(probabilities, k)
    return probabilities, kept / kept.sum(-1, keepdim=True)


def router_gradient(k: int, divide: bool) -> float:
    """The size of the router's gradient, with gates divided by their sum or as they are."""
    draw = generator(1, "step_01", "gradient")
    router = torch.randn(5, 12, generator=draw).requires_grad_()
    x = torch.randn(64, 12, generator=draw)
    losses = torch.randn(64, 5, generator=draw)  # made up: what each expert alone would cost
    probabilities, gates = route(x, router, k)
    if not divide:
        gates = probabilities * (gates > 0)
    loss = (gates * losses).sum(-1).mean()
    loss.backward()
    return router.grad.norm().item()


# ---------------------------------------------------------------- look at it


def draw_picture(probabilities: torch.Tensor, gates: torch.Tensor) -> Path:
    """Each token's probabilities as shades, with a gate written where an expert is chosen."""
    figure = figures.new_figure(8, 4)
    axes = figure.subplots()
    axes.imshow(probabilities.T.numpy(), cmap="Blues", vmin=0, vmax=1.3, aspect="auto")
    for n, e in (gates > 0).nonzero().tolist():
        axes.text(n, e, f"{gates[n, e]:.2f}", ha="center", va="center", fontsize=12)
    axes.set(xlabel="token", ylabel="expert", xticks=range(len(gates)), yticks=range(5))
    axes.set_title("Shade: probability. Number: gate of the chosen")
    return figures.save(figure, __file__)


def main() -> int:
    draw = generator(1, "step_01")
    x = torch.randn(10, 12, generator=draw)
    router = 0.4 * torch.randn(5, 12, generator=draw)
    probabilities, gates = route(x, router, k=2)
    console.say(f"The picture is {draw_picture(probabilities, gates)}.")
    console.say("Each token has two numbers, where its column is darkest. They sum to 1.")
    console.say()

    rows = []
    for k, divide in ((2, True), (1, True), (1, False)):
        name = "divided by their sum" if divide else "the probability itself"
        rows.append([str(k), name, f"{router_gradient(k, divide):.0e}"])
    console.say(console.Table(["k", "gates", "size of the router's gradient"], rows))
    console.say("\nThe second row is rounding, not a gradient: such a router never learns.")

    checks = Checks()
    logits = x @ router.T
    best = logits.topk(2)
    of_chosen = torch.zeros(10, 5).scatter(1, best.indices, best.values.softmax(-1))
    checks.close("softmax over all = over the chosen", gates, of_chosen, 1e-6)
    layer = modern.MoE(modern.ModernConfig(d_model=12, n_heads=1, n_experts=5, top_k=2))
    layer.router.weight.data = router
    their_gates, chosen = layer.route(x)
    by_layer = torch.zeros(10, 5).scatter(1, chosen, their_gates)
    checks.close("chapter 07's layer: the same gates", gates, by_layer, 1e-6)
    tied = top_k_mask(torch.zeros(1, 8), 3)[0].nonzero().flatten().tolist()
    checks.equal("eight tie for three places: the lowest", tied, [0, 1, 2])
    checks.between("k = 1, divided: only rounding", router_gradient(1, True), 0, 1e-6)
    checks.between("k = 1, the probability: a gradient", router_gradient(1, False), 0.01, 10)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
