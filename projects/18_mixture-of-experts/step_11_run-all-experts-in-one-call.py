"""Step 11: run all experts in one call.

Step 03 runs expert after expert. On a CPU that is fine: a slice fits into the cache. A GPU is
different: eight small products leave most of it idle, one after another. F.grouped_mm computes
many products of unequal height in one call. Rows and weights are stacked, and a list says where
each slice ends. Three calls, one for each matrix of SwiGLU, are then the whole layer.

Not everywhere: F.grouped_mm has a fast kernel only for bfloat16, on NVIDIA GPUs of compute
capability 9 and 10 (H100, B200), for sizes that are multiples of 8. Elsewhere it is itself a loop,
and ours is better. So dispatch(), which the model uses, asks first.

One trap: on capability 10, experts without tokens got weight gradients that were not zero (pytorch
issue 172439). So an expert without rows gets eight rows of zeros.

    python step_11_run-all-experts-in-one-call.py

prints where the grouped product runs, and compares it with the loop on this CPU.

Shapes: N tokens, C = d_model, E experts, R rows of all slices.
"""

import sys
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console
from shared.checks import Checks
from shared.randomness import generator

SLICE_ROWS = chapters.load_step(18, 3).SLICE_ROWS
run_experts = chapters.load_step(18, 3).run_experts
dispatch_in_groups = chapters.load_step(18, 3).dispatch_in_groups
random_moe = chapters.load_step(18, 3).random_moe

# ---------------------------------------------------------------- the idea


def grouped_product_fits(
    device_type: str, capability: tuple[int, int], dtype: torch.dtype, weight_shape: torch.Size
) -> bool:
    """Whether F.grouped_mm has a kernel of its own for such a device, dtype and weight.

    It has one for bfloat16 on NVIDIA GPUs of compute capability 9 and 10, if each row of a weight
    is a whole number of 16-byte words, which 8 numbers fill. Elsewhere it is a loop of its own.
    """
    has_kernel = device_type == "cuda" and capability[0] in (9, 10)
    aligned = all(size % 8 == 0 for size in weight_shape)
    return has_kernel and dtype == torch.bfloat16 and aligned


def grouped_experts(experts: nn.ModuleList, rows: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """down(silu(gate(row)) · up(row)) in the dtype of rows (R, C) -> (R, C).

    An expert without rows gets a slice of zeros, because of the trap above.
    """
    zeros = rows.new_zeros(SLICE_ROWS, rows.shape[1])
    slices = [part if len(part) else zeros for part in rows.split(sizes)]
    filled = [len(part) for part in slices]
    x = torch.cat(slices)
    ends = torch.tensor(filled, device=x.device).cumsum(0, dtype=torch.int32)  # where slices end

    def product(x: torch.Tensor, name: str) -> torch.Tensor:
        weights = torch.stack([getattr(expert, name).weight for expert in experts])  # (E, out, in)
        return F.grouped_mm(x, weights.to(x.dtype).transpose(1, 2), offs=ends)

    hidden = F.silu(product(x, "gate_proj")) * product(x, "up_proj")
    y = product(hidden, "down_proj").split(filled)
    return torch.cat([part[:size] for part, size in zip(y, sizes)])  # without the zeros


def run_grouped(
    experts: nn.ModuleList, rows: torch.Tensor, gates: torch.Tensor, sizes: list[int]
) -> torch.Tensor:
    """What run_experts() computes, for all experts in three products, in bfloat16."""
    return gates * grouped_experts(experts, rows.bfloat16(), sizes)


def dispatch(
    tokens: torch.Tensor, weight: torch.Tensor, chosen: torch.Tensor, experts: nn.ModuleList
) -> torch.Tensor:
    """dispatch_in_groups(), with the grouped product on a GPU that has a kernel for it."""
    kind = tokens.device.type
    capability = (0, 0)
    if kind == "cuda":
        capability = torch.cuda.get_device_capability(tokens.device)
    dtype = tokens.dtype
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    fits = grouped_product_fits(kind, capability, dtype, experts[0].gate_proj.weight.shape)
    run = run_grouped if fits else run_experts
    return dispatch_in_groups(tokens, weight, chosen, experts, run)


# ---------------------------------------------------------------- look at it


def main() -> int:
    machines = [
        ("CPU", "cpu", (0, 0), torch.bfloat16, (512, 384)),
        ("A100 (8.0)", "cuda", (8, 0), torch.bfloat16, (512, 384)),
        ("H100 (9.0)", "cuda", (9, 0), torch.bfloat16, (512, 384)),
        ("H100 (9.0), float32", "cuda", (9, 0), torch.float32, (512, 384)),
        ("H100 (9.0), width 85", "cuda", (9, 0), torch.bfloat16, (85, 64)),
        ("B200 (10.0)", "cuda", (10, 0), torch.bfloat16, (512, 384)),
        ("RTX 5090 (12.0)", "cuda", (12, 0), torch.bfloat16, (512, 384)),
    ]
    rows = []
    for name, device_type, capability, dtype, shape in machines:
        fits = grouped_product_fits(device_type, capability, dtype, shape)
        rows.append([name, "one call" if fits else "loop"])
    console.say(console.Table(["machine", "experts run by"], rows))
    console.say("\nOne call only in two rows of seven; the results differ by rounding alone.")

    checks = Checks()
    runs = [name for name, how in rows if how == "one call"]
    checks.equal("one call on", runs, ["H100 (9.0)", "B200 (10.0)"])
    experts = random_moe(5, 2, 24, 16).experts
    x = torch.randn(64, 24, generator=generator(1, "step_11")).requires_grad_()
    sizes = [32, 0, 8, 0, 24]  # experts 1 and 3 have no tokens
    ones = torch.ones(64, 1)
    loop = run_experts(experts, x, ones, sizes)
    grouped = grouped_experts(experts, x, sizes)
    checks.close("one call = expert by expert", grouped, loop, 1e-5)
    names, parameters = zip(*experts.named_parameters())  # "0.gate_proj.weight", ...
    ours = torch.autograd.grad(grouped.sum(), (x, *parameters))
    theirs = torch.autograd.grad(loop.sum(), (x, *parameters))
    gap = max((a - b).abs().max().item() for a, b in zip(ours, theirs))
    checks.close("gradients: the largest difference", gap, 0.0, 1e-3)
    of_weights = dict(zip(names, ours[1:]))  # ours[0] is the gradient of x
    idle = [g for name, g in of_weights.items() if name.startswith(("1.", "3."))]
    largest = max(g.abs().max().item() for g in idle)
    checks.equal("experts without tokens: gradient", largest, 0.0)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
