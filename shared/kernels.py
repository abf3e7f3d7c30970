"""Which matrix product a machine runs: the faster float32 one on a CPU, the grouped one on a GPU.

torch multiplies through MKL, which gives AMD processors half the speed that they have; oneDNN, in the same
package, gives it all. torch's switch for it is called "medium precision" since it *permits* bfloat16. Few CPUs
take that permission, and this module finds out: it keeps oneDNN only where its products are still float32.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextmanager
def fastest_float32() -> Iterator[str]:
    """Within it, CPU products use the faster library that is still float32; yields its name.

    The choice depends on the machine alone, never on a clock, so two runs on one machine agree bit for bit.
    torch's fused attention multiplies many tiny blocks, which oneDNN is slow at, so attention takes torch's
    plain form where oneDNN was chosen.
    """
    if not onednn_is_float32():
        yield "torch's default"
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield "oneDNN"
    finally:
        torch.set_float32_matmul_precision(before)


def onednn_is_float32() -> bool:
    """Whether "medium" changes anything here, and keeps float32's 24 bits when it does.

    Two libraries add long sums in different orders, so their last bits tell them apart. The exact product is
    1024 · (1 + 2⁻¹²): bfloat16, which keeps 8 bits, would lose the 2⁻¹².
    """
    noise = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    ones, nearly_ones = torch.ones(64, 1024), torch.full((1024, 64), 1 + 2**-12)
    before = torch.get_float32_matmul_precision()
    plain = noise @ noise.T
    torch.set_float32_matmul_precision("medium")
    try:
        changed = not torch.equal(noise @ noise.T, plain)
        exact = bool((ones @ nearly_ones == 1024 + 2**-2).all())
    finally:
        torch.set_float32_matmul_precision(before)
    return changed and exact


def grouped_product_fits(rows: torch.Tensor, weight_shape: tuple[int, ...]) -> bool:
    """Whether F.grouped_mm, many products of unequal heights in one call, is for these rows and weights.

    It is where it has a kernel of its own: for bfloat16 on an NVIDIA GPU from Ampere on, if the weights' sizes are
    multiples of 8, so that each row is whole 16-byte words.
    """
    if rows.device.type != "cuda" or not hasattr(F, "grouped_mm"):
        return False
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else rows.dtype
    aligned = all(size % 8 == 0 for size in weight_shape)
    return dtype == torch.bfloat16 and aligned and torch.cuda.get_device_capability(rows.device) >= (8, 0)
