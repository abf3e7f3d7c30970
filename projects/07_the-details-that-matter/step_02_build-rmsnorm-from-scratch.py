"""Step 02: build RMSNorm from scratch, and ask what it saves.

Unlike step 01's LayerNorm, it subtracts no mean and adds no bias: one statistic instead of two. The statistic is
taken in float32 whatever the input is, which step 01 left out and which half precision can't do without.

    python step_02_build-rmsnorm-from-scratch.py

prints what four norms cost, counted and timed on this machine, and the checks; about five seconds. "About half the
work" is a statement about operations. Whether the clock agrees depends on whose kernels run, so the step measures.

Shapes: C = d_model, N tokens; a norm works on the last axis, so any (..., C) will do.
"""

import sys
import time
from pathlib import Path

import torch
import torch.nn as nn
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console
from shared.checks import Checks
from shared.randomness import generator

LayerNorm = chapters.load_step(7, 1).LayerNorm


class RMSNorm(nn.Module):
    """x / √(mean(x²) + eps) · weight (Zhang & Sennrich 2019, eq. 4).

    It is LayerNorm without the mean and without the bias.
    """

    def __init__(self, d_model: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d_model))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., C) -> (..., C), in the dtype of x."""
        # float16 ends at 65,504 = 256² - 32, so squares are taken in float32 (or float64, if x is).
        wide = x if x.dtype == torch.float64 else x.float()
        scale = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + self.eps)  # (..., 1)
        return (wide * scale * self.weight).to(x.dtype)


class Work(TorchDispatchMode):
    """Counts within it: kernels started, operations (the largest tensor of each), numbers read and written."""

    def __init__(self):
        super().__init__()
        self.kernels = self.operations = self.moved = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [*args, *out] if isinstance(out, tuple) else [*args, out]
        sizes = {id(t): t.numel() for t in tensors if isinstance(t, torch.Tensor)}.values()  # x * x reads x once
        self.kernels += 1
        self.operations += max(sizes)
        self.moved += sum(sizes)
        return out


def time_in_turn(norms: dict[str, nn.Module], x: torch.Tensor, rounds: int = 61, calls: int = 5) -> dict[str, list]:
    """Microseconds per forward pass, a number per round; in turn, so that whatever else runs disturbs all alike."""
    times = {name: [] for name in norms}
    torch.empty(1 << 22)  # freed at once: teaches glibc to keep memory, or the clock sees page faults
    for _ in range(rounds):
        for name, norm in norms.items():
            start = time.perf_counter()
            for _ in range(calls):
                norm(x)
            times[name].append((time.perf_counter() - start) / calls * 1e6)
    return times


def compare_times(name: str, other: str, times: dict[str, list]) -> str:
    """Two norms' times as a sentence, which says "faster" or "slower" only where eight rounds in ten agree."""
    ratios = sorted(a / b for a, b in zip(times[name], times[other]))
    low, middle, high = (ratios[round(part * (len(ratios) - 1))] for part in (0.1, 0.5, 0.9))
    verdict = "faster" if high < 1 else "slower" if low > 1 else "no difference to be sure of"
    return f"{name} took {middle:.2f} times as long as {other} ({low:.2f} to {high:.2f}): {verdict}"


@torch.no_grad()
def show_costs(checks: Checks, d_model: int = 768, tokens: int = 128) -> None:
    """The cost table. torch calls its RMSNorm fused; the column of kernels says whether it is one here."""
    norms = {
        "hand-written RMSNorm": RMSNorm(d_model),
        "nn.RMSNorm": nn.RMSNorm(d_model, eps=1e-5),
        "hand-written LayerNorm": LayerNorm(d_model),
        "nn.LayerNorm": nn.LayerNorm(d_model, eps=1e-5),
    }
    x, rows = torch.randn(tokens, d_model, generator=generator(1, "step_02", "cost")), []
    times = time_in_turn(norms, x)
    for name, norm in norms.items():
        with Work() as work:
            norm(x)
        middle = sorted(times[name])[len(times[name]) // 2]
        rows.append([name, str(work.kernels), f"{work.moved / x.numel():.1f}", f"{middle:.0f}"])
        if name.startswith("hand"):
            per_channel = 7 if "Layer" in name else 4  # and 2 a token: add eps, take the root
            checks.close(f"operations a token, {name}", work.operations / tokens, per_channel * d_model + 2, 0)
    console.say(f"One forward pass over {tokens} tokens of {d_model} channels, median of 61 rounds on this machine:")
    console.say()
    console.say(console.Table(["form", "kernels", "numbers moved per channel", "microseconds"], rows))
    console.say()
    console.say(compare_times("hand-written RMSNorm", "hand-written LayerNorm", times))
    console.say(compare_times("nn.RMSNorm", "nn.LayerNorm", times))


def check_against_torch(checks: Checks, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Forward and gradients against nn.RMSNorm, within two roundings of the largest entry."""
    draw = generator(1, "step_02", shape)
    ours, theirs = RMSNorm(shape[-1]).to(dtype), nn.RMSNorm(shape[-1], eps=1e-5, dtype=dtype)
    nn.init.normal_(ours.weight, generator=draw)  # gains of one would hide a mistake
    theirs.load_state_dict(ours.state_dict())
    x, dy = torch.randn(2, *shape, generator=draw).to(dtype)
    seen = []
    for norm in (ours, theirs):
        leaf = x.clone().requires_grad_()
        y = norm(leaf)
        y.backward(dy)
        seen.append({"y": y, "dL/dx": leaf.grad, "dL/dweight": norm.weight.grad})
    for name, reference in seen[1].items():
        tolerance = 2 * torch.finfo(dtype).eps * reference.abs().max().item()
        checks.close(f"{name} {shape} {str(dtype)[6:]}", seen[0][name], reference, tolerance)


def main() -> int:
    checks = Checks()
    show_costs(checks)
    y = RMSNorm(4)(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    checks.close("[1, 2, 3, 4]", y, torch.tensor([0.3651481, 0.7302963, 1.0954444, 1.4605925]), 2e-7)
    for shape, dtype in (((2, 3, 4), torch.float32), ((5, 1, 7), torch.bfloat16), ((3, 2, 768), torch.float16)):
        check_against_torch(checks, shape, dtype)
    x = torch.randn(3, 5, 11, dtype=torch.float64, generator=generator(1, "step_02", "centred"))
    layernorm, rmsnorm = LayerNorm(11).double(), RMSNorm(11).double()
    checks.close("RMSNorm(x − mean x) is LayerNorm(x)", rmsnorm(x - x.mean(-1, keepdim=True)), layernorm(x), 1e-12)
    tiny, large = torch.full((768,), 1e-4), torch.full((768,), 3e4, dtype=torch.float16)
    checks.close("entries of 1e-4: eps holds them down", RMSNorm(768)(tiny), torch.full((768,), 0.0316070), 1e-7)
    checks.close("float16 entries of 3e4", RMSNorm(768)(large), torch.ones(768), 0)
    naive = large * torch.rsqrt(large.square().mean() + 1e-5)  # the mean is inf, its inverse root 0: no NaN warns
    checks.close("the same without float32", naive, torch.zeros(768), 0)
    gpt2_flops = 2 * 124_439_808  # a multiplication and an addition per parameter, for each token
    checks.close("GPT-2's 25 LayerNorms, % of its FLOPs", 25 * 7 * 768 / gpt2_flops * 100, 0.054, 5e-4)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
