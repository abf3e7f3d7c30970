"""How fast chapter 18's dispatch is: 4,096 tokens of 256 channels, 8 experts of width 344, k = 2.

Forward and backward on one thread, against the dense SwiGLU of equal active FLOPs (width 688) and
against chapter 07's loop over the experts. New tokens each time, so that the experts' loads, and
with them the shapes of the products, differ from step to step.
"""

import time
from collections.abc import Callable

import torch
import torch.nn as nn

from ratios import Ratio

from shared import chapters
from shared.randomness import generator

N = 4096
C = 256
HIDDEN = 344
EXPERTS = 8
TOP_K = 2
ROUNDS = 30
WARM_UP = 4
BOUNDS = {"dense": None, "loop": 1.0}  # to dense: 0.9 to 1.2, by the processor's library


def contenders() -> dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], list[nn.Parameter]]]:
    """name -> (forward, parameters); loop and dispatch have the same weights."""
    modern = chapters.load_build(7)
    sparse = chapters.load_build(18)
    cfg = sparse.SparseConfig(d_model=C, d_hidden=HIDDEN, n_experts=EXPERTS, top_k=TOP_K)
    layers = {
        "dense": modern.SwiGLU(C, TOP_K * HIDDEN),
        "loop": modern.MoE(cfg),
        "dispatch": sparse.GroupedMoE(cfg),
    }
    for layer in layers.values():
        for name, p in layer.named_parameters():
            nn.init.normal_(p, std=C**-0.5, generator=generator(1, "bench_18", name))
    found = {name: (layer, list(layer.parameters())) for name, layer in layers.items()}
    return found | {"dispatch": (lambda x: layers["dispatch"](x)[0], found["dispatch"][1])}


def processor_time(
    forward: Callable, parameters: list[nn.Parameter], x: torch.Tensor, dy: torch.Tensor
) -> float:
    """Seconds of one forward and backward pass."""
    for p in parameters:
        p.grad = None
    x = x.clone().requires_grad_()
    started = time.process_time()
    forward(x).backward(dy)
    return time.process_time() - started


def measure() -> dict[str, list[float]]:
    """Seconds of each contender in each round, with new tokens each time, as in training."""
    draw = generator(1, "bench_18", "tokens")
    runners = contenders()
    dy = torch.randn(N, C, generator=draw)
    times = {name: [] for name in runners}
    for _ in range(WARM_UP + ROUNDS):
        for name, runner in runners.items():
            x = torch.randn(N, C, generator=draw)
            times[name].append(processor_time(*runner, x, dy))
    return {name: spent[WARM_UP:] for name, spent in times.items()}


def ratios() -> list[Ratio]:
    times = measure()
    found = []
    for rival, bound in BOUNDS.items():
        rounds = [a / b for a, b in zip(times["dispatch"], times[rival])]
        found.append(Ratio(f"dispatch of 8 experts / {rival}", rounds, at_most=bound))
    return found
