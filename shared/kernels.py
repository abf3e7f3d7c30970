"""Which matrix product a machine runs: on a CPU, the faster float32 one.

torch multiplies through MKL, which gives AMD processors half the speed that they have; oneDNN, in the same
package, gives it all. torch's switch for it is called "medium precision" since it *permits* bfloat16. Few CPUs
take that permission, and this module finds out: it keeps oneDNN only where its products are still float32.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F


@contextmanager
def fastest_float32() -> Iterator[str]:
    """Within it, CPU products use the faster library that is still float32; yields its name.

    The choice depends on the machine alone, never on a clock, so two runs on one machine agree bit for bit.
    """
    if not onednn_is_float32():
        yield "torch's default"
        return
    before, attention = torch.get_float32_matmul_precision(), F.scaled_dot_product_attention
    torch.set_float32_matmul_precision("medium")
    F.scaled_dot_product_attention = without_onednn(attention)
    try:
        yield "oneDNN"
    finally:
        F.scaled_dot_product_attention = attention
        torch.set_float32_matmul_precision(before)


def onednn_is_float32() -> bool:
    """Whether "medium" changes anything here, and keeps float32's 24 bits when it does.

    Two libraries add long sums in different orders, so their last bits tell them apart. The exact product is
    1024 · (1 + 2⁻¹²): bfloat16, which keeps 8 bits, would lose the 2⁻¹².
    """
    noise = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    ones, nearly_ones = torch.ones(64, 1024), torch.full((1024, 64), 1 + 2**-12)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    plain = noise @ noise.T
    torch.set_float32_matmul_precision("medium")
    try:
        changed = not torch.equal(noise @ noise.T, plain)
        exact = bool((ones @ nearly_ones == 1024 + 2**-2).all())
    finally:
        torch.set_float32_matmul_precision(before)
    return changed and exact


def without_onednn(attention: Callable) -> Callable:
    """torch's attention, run by MKL forward and backward: it multiplies many tiny blocks, at which oneDNN is slow.

    Where a long text is only read, the blocks are no longer tiny, and oneDNN keeps it.
    """

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        if q.shape[-2] > 512 and not torch.is_grad_enabled():
            return attention(q, k, v, *args, **kwargs)
        torch.set_float32_matmul_precision("highest")
        y = attention(q, k, v, *args, **kwargs)
        torch.set_float32_matmul_precision("medium")
        if y.requires_grad:  # hooks fire on the way back: y's before the attention's backward, the others after it
            y.register_hook(lambda _: torch.set_float32_matmul_precision("highest"))
            for x in (q, k, v):
                if x.requires_grad:
                    x.register_hook(lambda _: torch.set_float32_matmul_precision("medium"))
        return y

    return run
