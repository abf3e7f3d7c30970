"""How fast chapter 18's dispatch is, as ratios measured side by side in one run.

    python tests/benchmarks/bench_18_dispatch.py       about half a minute

4,096 tokens of 256 channels, 8 experts of width 344, k = 2, forward and backward on one thread: against the dense
SwiGLU of equal active FLOPs (width 688) at most 1.15, against chapter 07's loop over the experts at most 0.95. Once
with new tokens each time, as in training, where the experts' loads and so the shapes of the products differ from step
to step; once with the same tokens every time, when the library has prepared all shapes, which the loop needs most.

All three use the library that shared/kernels.py chooses. Processor time, the three in turns, medians of the rounds'
ratios. Exit status 1 if a bound is broken.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from shared import chapters, console
from shared.kernels import fastest_float32
from shared.randomness import generator

N, C, HIDDEN, EXPERTS, TOP_K = 4096, 256, 344, 8, 2
ROUNDS, WARM_UP = 40, 4
BOUNDS = {"dense": 1.15, "loop": 0.95}


def contenders() -> dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], list[nn.Parameter]]]:
    """name -> (forward, parameters); loop and dispatch have the same weights."""
    modern, sparse = chapters.load_build(7), chapters.load_build(18)
    cfg = sparse.SparseConfig(d_model=C, d_hidden=HIDDEN, n_experts=EXPERTS, top_k=TOP_K)
    layers = {"dense": modern.SwiGLU(C, TOP_K * HIDDEN), "loop": modern.MoE(cfg), "dispatch": sparse.GroupedMoE(cfg)}
    for layer in layers.values():
        for name, p in layer.named_parameters():
            nn.init.normal_(p, std=C**-0.5, generator=generator(1, "bench_18", name))
    found = {name: (layer, list(layer.parameters())) for name, layer in layers.items()}
    return found | {"dispatch": (lambda x: layers["dispatch"](x)[0], found["dispatch"][1])}


def processor_time(forward: Callable, parameters: list[nn.Parameter], x: torch.Tensor, dy: torch.Tensor) -> float:
    """Seconds of one forward and backward pass."""
    for p in parameters:
        p.grad = None
    x = x.clone().requires_grad_()
    started = time.process_time()
    forward(x).backward(dy)
    return time.process_time() - started


def measure(fresh: bool) -> dict[str, list[float]]:
    """Seconds of each contender in each round. With fresh, nobody ever sees a batch that anyone saw before."""
    draw, runners = generator(1, "bench_18", "tokens"), contenders()
    dy = torch.randn(N, C, generator=draw)
    x, times = torch.randn(N, C, generator=draw), {name: [] for name in runners}
    for _ in range(WARM_UP + ROUNDS):
        for name, runner in runners.items():
            if fresh:
                x = torch.randn(N, C, generator=draw)
            times[name].append(processor_time(*runner, x, dy))
    return {name: spent[WARM_UP:] for name, spent in times.items()}


def main() -> int:
    torch.set_num_threads(1)
    rows, broken = [], 0
    with fastest_float32() as library:
        for what, fresh in (("new tokens each time", True), ("the same tokens", False)):
            times = measure(fresh)
            for rival, bound in BOUNDS.items():
                ratio = median(a / b for a, b in zip(times["dispatch"], times[rival]))
                broken += ratio > bound
                cells = [f"{1e3 * median(times[name]):.1f} ms" for name in ("dispatch", rival)]
                verdict = "ok" if ratio <= bound else "TOO SLOW"
                rows.append([what, rival, *cells, f"{ratio:.3f}", f"{bound:.2f}", verdict])
    console.say(
        f"{N:,} tokens of {C}, {EXPERTS} experts of width {HIDDEN}, k = {TOP_K}, float32 products by {library}:"
    )
    console.say()
    console.say(console.Table(["tokens", "rival", "dispatch", "rival's", "ratio", "at most", "verdict"], rows))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
