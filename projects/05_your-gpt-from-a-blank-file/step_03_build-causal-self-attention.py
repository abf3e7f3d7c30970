"""Step 03: build causal self-attention.

Steps 01 and 02 gave windows of tokens. In the model each token becomes a vector, and attention is the only place
where the vectors of different positions meet: each position asks (query), is asked (key), and answers (value).
Position t sees itself and its past; the future is masked.

It leaves out everything around attention. ResidualWriter is a plain Linear with a name of its own; why the matrix
that writes into the residual stream needs one shows in step 09.

    python step_03_build-causal-self-attention.py

It checks the class against scores computed by hand and against torch's nn.MultiheadAttention, forward and backward,
and proves by gradient that the future has no influence. About 2 seconds.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import cli, console
from shared.checks import Checks
from shared.randomness import generator


@dataclass(frozen=True)
class GPTConfig:
    """The shape of the model. The size of the vocabulary is not here: it comes with the text."""

    block_size: int = 32  # longest context, in tokens
    n_layers: int = 2
    n_heads: int = 4
    d_model: int = 64  # numbers in the vector of each position
    bias: bool = True  # biases in attention and MLP, as in GPT-2

    def __post_init__(self):
        if min(self.block_size, self.n_layers, self.n_heads, self.d_model) < 1:
            raise ValueError(
                f"block_size, n_layers, n_heads and d_model must be at least 1, got {self}"
            )
        if self.d_model % self.n_heads:
            raise ValueError(f"d_model {self.d_model} is not divisible by n_heads {self.n_heads}")

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads


class ResidualWriter(nn.Linear):
    """A Linear whose output is added to the residual stream; init_parameters finds it by class."""


class CausalSelfAttention(nn.Module):
    """H small attentions side by side, in which a position sees itself and its past.

    Vaswani et al. 2017, equation 1.
    """

    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.n_heads = cfg.n_heads
        self.head_dim = cfg.head_dim
        self.qkv = nn.Linear(cfg.d_model, 3 * cfg.d_model, bias=cfg.bias)
        self.proj = ResidualWriter(cfg.d_model, cfg.d_model, bias=cfg.bias)

    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x (B, T, C) -> queries, keys, values, each (B, H, T, D). Later chapters override this."""
        B, T, _ = x.shape
        qkv = self.qkv(x).view(B, T, 3, self.n_heads, self.head_dim)
        return qkv.permute(2, 0, 3, 1, 4).unbind(0)  # (B, T, 3, H, D) -> (3, B, H, T, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, T, C) -> (B, T, C)."""
        q, k, v = self.heads(x)
        # softmax(q kᵀ / √D) v, with the future masked: (B, H, T, D)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).flatten(2)  # the heads side by side: (B, T, C)
        return self.proj(y)


def attend_by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """What F.scaled_dot_product_attention computes, in the five lines that it fuses."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # (B, H, T, T): row t is what t asks of everyone
    past = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    scores = scores.masked_fill(~past, -math.inf)
    weights = scores.softmax(-1)  # each row sums to 1, and is 0 where the score was -inf
    return weights @ v


def main() -> int:
    checks = Checks()
    B, T, cfg = 2, 7, GPTConfig(block_size=9, n_heads=3, d_model=15)
    noise = generator(1, "step 03")
    attn = CausalSelfAttention(cfg).double()
    for p in attn.parameters():
        nn.init.normal_(p, std=0.5, generator=noise)
    x, upstream = (torch.randn(B, T, 15, dtype=torch.float64, generator=noise) for _ in range(2))

    q, k, v = (h.detach().requires_grad_() for h in attn.heads(x))
    console.say(f"x {tuple(x.shape)} -> q, k, v, each {tuple(q.shape)}: batch, heads, positions, head_dim")
    shown = attend_by_hand(q, k, torch.eye(T, dtype=torch.float64).expand(B, 3, T, T))[0, 0]
    console.say("What each position of the first head looks at (rows sum to 1):")
    for row in shown.tolist():
        console.say("  " + "  ".join(f"{weight:.2f}" if weight else "  . " for weight in row))

    fused, by_hand = F.scaled_dot_product_attention(q, k, v, is_causal=True), attend_by_hand(q, k, v)
    cotangent = torch.randn(fused.shape, dtype=torch.float64, generator=noise)
    ours, theirs = (torch.autograd.grad(y, (q, k, v), cotangent) for y in (by_hand, fused))
    checks.close("five lines by hand against torch's SDPA", by_hand, fused, 1e-12)
    for name, mine, reference in zip("qkv", ours, theirs):
        checks.close(f"  gradient of {name}", mine, reference, 1e-12)
    checks.close("rows of weights sum to", shown.sum(-1), torch.ones(T), 1e-12)

    torch_attn = nn.MultiheadAttention(15, 3, batch_first=True, dtype=torch.float64)
    torch_attn.in_proj_weight, torch_attn.in_proj_bias = attn.qkv.weight, attn.qkv.bias
    torch_attn.out_proj.weight, torch_attn.out_proj.bias = attn.proj.weight, attn.proj.bias
    x.requires_grad_()
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    y, reference = attn(x), torch_attn(x, x, x, attn_mask=future, need_weights=False)[0]
    checks.close("the class against nn.MultiheadAttention", y, reference, 1e-12)
    parameters = (x, *attn.parameters())
    ours, theirs = (torch.autograd.grad(out, parameters, upstream) for out in (y, reference))
    for name, mine, reference in zip(["x", *(name for name, _ in attn.named_parameters())], ours, theirs):
        checks.close(f"  gradient of {name}", mine, reference, 1e-12)

    reach = torch.autograd.functional.jacobian(lambda x: attn(x)[0].sum(-1), x)[:, 0].norm(dim=-1)  # (T, T)
    checks.equal("gradient of position t by what stands later", reach.triu(1), torch.zeros(T, T))
    checks.equal("positions that every t does depend on", (reach > 0).sum(-1), torch.arange(1, T + 1))
    alone, value = attn(x[:, :1]), attn.heads(x[:, :1])[2].transpose(1, 2).flatten(2)
    checks.close("one token alone gets its own value", alone, attn.proj(value), 1e-12)
    checks.raises(
        "heads that don't divide the width", ValueError, ["15", "4"], lambda: GPTConfig(d_model=15, n_heads=4)
    )
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
