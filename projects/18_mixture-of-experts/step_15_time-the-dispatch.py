"""Step 15: time the dispatch.

Step 03 sorts tokens into slices and computes what chapter 07's loop computes. Is it faster? Both
multiply the same matrices. What differs is the rest: the loop searches all tokens for each expert
and adds each expert's outputs into a large tensor; the groups sort once and sum once. And a dense
SwiGLU with as many active parameters does neither: how far is it from that?

    python step_15_time-the-dispatch.py

draws outputs/step_15.png: milliseconds by the number of tokens. Times are this machine's, on one
thread, and differ from run to run; tests/benchmarks/bench_18_dispatch.py measures them at length.

Shapes: N tokens, C = 64 channels, 8 experts of width 86, k = 2; the dense layer's width is 172.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console, figures
from shared.checks import Checks
from shared.randomness import generator

modern = chapters.load_build(7)
step_03 = chapters.load_step(18, 3)

SIZES = (64, 256, 1024, 4096)  # tokens
ROUNDS = 7

# ---------------------------------------------------------------- the idea


def forward_and_backward(forward: Callable, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The output and the gradients of Σ y², by x and all parameters, in one vector."""
    x = x.clone().requires_grad_()
    y = forward(layer, x)
    gradients = torch.autograd.grad(y.square().sum(), (x, *layer.parameters()))
    return torch.cat([part.flatten() for part in (y, *gradients)])


def time_of(forward: Callable, layer: nn.Module, x: torch.Tensor) -> float:
    """Milliseconds of one forward and backward pass, as this process spent them on the CPU."""
    started = time.process_time()
    forward_and_backward(forward, layer, x)
    return 1e3 * (time.process_time() - started)


def race(n_tokens: int) -> dict[str, float]:
    """The median time of each contender. They take turns, so that a busy moment hits all alike."""
    moe = step_03.random_moe(8, 2, 64, 86)
    contenders = {
        "dense layer": (lambda layer, x: layer(x), modern.SwiGLU(64, 172)),
        "loop over experts": (lambda layer, x: layer(x), moe),
        "groups": (step_03.by_groups, moe),
    }
    times = {name: [] for name in contenders}
    draw = generator(1, "step_15", n_tokens)
    for _ in range(ROUNDS + 1):
        x = torch.randn(n_tokens, 64, generator=draw)
        for name, (forward, layer) in contenders.items():
            times[name].append(time_of(forward, layer, x))
    return {name: median(spent[1:]) for name, spent in times.items()}  # the first round warms up


# ---------------------------------------------------------------- look at it


def draw_picture(races: dict[int, dict[str, float]]) -> Path:
    figure = figures.new_figure(7, 3.6)
    axes = figure.subplots()
    for name, marker in (("loop over experts", "o"), ("groups", "s"), ("dense layer", "^")):
        spent = [one[name] for one in races.values()]
        axes.plot(SIZES, spent, marker + "-", label=name)
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms")
    axes.set_xticks(SIZES, [f"{n:,}" for n in SIZES])
    axes.set_title("Time of a layer, forward and backward")
    axes.legend()
    return figures.save(figure, __file__)


def main() -> int:
    races = {n: race(n) for n in SIZES}
    rows = []
    for n, times in races.items():
        rows.append([f"{n:,}", *(f"{ms:.1f}" for ms in times.values())])
    console.say("Milliseconds, forward and backward:")
    console.say()
    console.say(console.Table(["tokens", *races[SIZES[0]]], rows))
    console.say("\nCompare groups with dense. With few tokens the calls cost most, and eight")
    console.say("experts make eight times as many. With many tokens the products cost most,")
    console.say("and all three multiply about as much.")
    console.say(f"The picture is {draw_picture(races)}.")

    checks = Checks()
    largest = races[SIZES[-1]]
    ratio = largest["groups"] / largest["loop over experts"]
    checks.between("4,096 tokens: groups over loop", ratio, 0.2, 2.0)
    ratio = races[64]["groups"] / races[64]["dense layer"]
    checks.between("64 tokens: groups over dense", ratio, 1.0, 100.0)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
