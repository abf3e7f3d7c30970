"""Step 14: take a step of AdamW.

Step 10 left the moving of parameters to AdamW (Loshchilov & Hutter 2019). The simplest optimizer
moves each parameter by its gradient times a learning rate. But gradients differ in size by factors
of a thousand, between layers and over time: a rate that suits one doesn't suit another.

AdamW keeps two running means for each parameter: m of its gradient, v of the gradient's square. In
each step m keeps 0.9 of its old value and v 0.999; the rest is new. The parameter moves by the
learning rate times m/√v. While the gradient keeps its sign and size, m/√v is about 1, for large
gradients and for small ones; if the gradient swings to and fro, m cancels out and the move is
small. So a parameter seldom moves by more than the learning rate, and one rate suits all.

Both means start at 0, so at first they are too small. In step t they are therefore divided by
1 - 0.9^t and 1 - 0.999^t. The W stands for weight decay: each step also pulls every parameter a
little towards 0. Here that includes biases and the norms' gains, which many codes leave out.

    python step_14_take-a-step-of-adamw.py

draws outputs/step_14.png: both optimizers in a valley that is steep across and flat along.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import cli, console, figures
from shared.checks import Checks
from shared.randomness import generator

# ---------------------------------------------------------------- the idea


class AdamWByHand:
    """AdamW for one tensor (Loshchilov & Hutter 2019, algorithm 2)."""

    def __init__(self, p: torch.Tensor, lr: float, weight_decay: float = 0.0):
        self.p = p
        self.lr = lr
        self.weight_decay = weight_decay
        self.m = torch.zeros_like(p)  # running mean of the gradient
        self.v = torch.zeros_like(p)  # running mean of its square
        self.t = 0  # steps taken

    def step(self, gradient: torch.Tensor) -> None:
        self.t += 1
        self.m = 0.9 * self.m + 0.1 * gradient
        self.v = 0.999 * self.v + 0.001 * gradient**2
        m = self.m / (1 - 0.9**self.t)  # both began at 0
        v = self.v / (1 - 0.999**self.t)
        self.p = self.p - self.lr * self.weight_decay * self.p
        self.p = self.p - self.lr * m / (v.sqrt() + 1e-8)


# ---------------------------------------------------------------- look at it

STEEPNESS = torch.tensor([1.0, 100.0])  # along the valley, and across it
START = torch.tensor([-1.0, 0.5])


def height(p: torch.Tensor) -> torch.Tensor:
    """The loss of this example; its lowest point is (0, 0), and its gradient STEEPNESS · p."""
    return 0.5 * (STEEPNESS * p**2).sum(-1)


def path_of_plain_steps(n: int, lr: float) -> torch.Tensor:
    path = [START]
    for _ in range(n):
        path.append(path[-1] - lr * STEEPNESS * path[-1])
    return torch.stack(path)


def path_of_adamw(n: int, lr: float) -> torch.Tensor:
    adamw = AdamWByHand(START, lr)
    path = [START]
    for _ in range(n):
        adamw.step(STEEPNESS * adamw.p)
        path.append(adamw.p)
    return torch.stack(path)


def draw_picture(paths: dict[str, torch.Tensor]) -> Path:
    figure = figures.new_figure(7, 3.6)
    axes = figure.subplots()
    along, across = torch.meshgrid(  # a grid of points, for the lines of equal height
        torch.linspace(-1.2, 0.4, 80), torch.linspace(-0.6, 0.6, 80), indexing="xy"
    )
    axes.contour(along, across, height(torch.stack((along, across), -1)), 12, colors="0.85")
    for (name, path), colour in zip(paths.items(), (figures.COLOURS[1], figures.COLOURS[0])):
        axes.plot(path[:, 0], path[:, 1], ".-", color=colour, label=name)
    axes.plot(0, 0, "k*", markersize=12)
    figures.label(axes, "30 steps through a valley to the star", "along (flat)", "across (steep)")
    return figures.save(figure, __file__)


def main() -> int:
    plain = path_of_plain_steps(30, lr=0.019)  # above 0.02 it would jump ever further
    adamw = path_of_adamw(30, lr=0.05)
    draw_picture({"plain gradient steps": plain, "AdamW": adamw})
    console.say("How far from the lowest point along the valley, of 1.00 at the start:")
    left = [path[-1, 0].abs().item() for path in (plain, adamw)]
    console.say(f"after 30 plain steps {left[0]:.2f}; after 30 of AdamW {left[1]:.2f}, beyond it.")
    console.say("The steep side allows plain steps no larger rate, and so the flat side waits.")
    console.say("Drawn to outputs/step_14.png.")

    checks = Checks()
    p = torch.randn(5, 3, dtype=torch.float64, generator=generator(1, "p"))
    by_hand = AdamWByHand(p.clone(), lr=0.1, weight_decay=0.3)
    torchs = torch.nn.Parameter(p.clone())
    optimizer = torch.optim.AdamW([torchs], lr=0.1, weight_decay=0.3)
    for t in range(4):
        gradient = torch.randn(5, 3, dtype=torch.float64, generator=generator(1, "gradient", t))
        by_hand.step(gradient)
        torchs.grad = gradient
        optimizer.step()
    checks.close("four steps: torch's AdamW", by_hand.p, torchs, 1e-12)
    for size in (1e-3, 1e3):
        one = AdamWByHand(torch.zeros(1), lr=0.1)
        one.step(torch.tensor([size]))
        checks.close(f"first move, gradient {size:g}", -one.p, torch.tensor([0.1]), 1e-5)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
