"""Step 03: wire normalization into the transformer block.

Steps 01 and 02 built two norms; this one chooses between them by name and puts the choice into chapter 05's block,
which normalises what each half *reads* (pre-norm). Beside it stands the older order, which normalises what each half
leaves on the residual stream (post-norm). Nothing is trained here.

    python step_03_wire-normalization-into-the-transformer-block.py

prints the gradient that reaches the first and the last layer, by depth, for both orders and two starts, and the
checks; about six seconds.

Shapes: B batch, T positions, C = d_model, L layers.
"""

import math
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console, data
from shared.checks import Checks
from shared.randomness import generator

gpt = chapters.load_build(5)
RMSNorm = chapters.load_step(7, 2).RMSNorm

NORM_TYPES = ("layernorm", "rmsnorm", "none")


def make_norm(norm_type: str, d_model: int, eps: float = 1e-5) -> nn.Module:
    """The norm called norm_type for vectors of d_model. ValueError for a name not in NORM_TYPES."""
    if norm_type == "layernorm":
        return nn.LayerNorm(d_model, eps=eps)  # PyTorch's: step 01 builds the same by hand
    if norm_type == "rmsnorm":
        return RMSNorm(d_model, eps)
    if norm_type == "none":
        return nn.Identity()
    raise ValueError(f"unknown norm_type {norm_type!r}; valid: {', '.join(NORM_TYPES)}")


@dataclass(frozen=True)
class NormConfig(gpt.GPTConfig):
    """Chapter 05's shape, and which norm stands in it."""

    norm_type: str = "layernorm"
    norm_eps: float = 1e-5


class NormBlock(gpt.Block):
    """Chapter 05's pre-norm block, its forward untouched, with the norm that the config names."""

    def make_norm(self, cfg: NormConfig) -> nn.Module:
        return make_norm(cfg.norm_type, cfg.d_model, cfg.norm_eps)


class PostNormBlock(NormBlock):
    """The order of the first transformer (Vaswani et al. 2017): add, then normalise the sum."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, T, C) -> (B, T, C): every layer's sum goes through a norm, so nothing passes untouched."""
        x = self.norm1(x + self.attn(x))
        x = self.norm2(x + self.mlp(x))
        return x


class NormGPT(gpt.GPT):
    """Chapter 05's GPT with the norm that the config names, in its blocks and before its head."""

    def make_block(self, cfg: NormConfig) -> nn.Module:
        return NormBlock(cfg)

    def make_norm(self, cfg: NormConfig) -> nn.Module:
        return make_norm(cfg.norm_type, cfg.d_model, cfg.norm_eps)


class PostNormGPT(NormGPT):
    def make_block(self, cfg: NormConfig) -> nn.Module:
        return PostNormBlock(cfg)


def check_block(checks: Checks, block_class: type, name: str) -> None:
    """A block against torch's own, with the same random weights: output and the gradient of its input."""
    cfg = NormConfig(n_heads=3, d_model=12)
    ours, draw = block_class(cfg), generator(1, "step_03", "block")
    for p in ours.parameters():
        nn.init.normal_(p, std=0.3, generator=draw)
    norm_first = block_class is NormBlock
    theirs = nn.TransformerEncoderLayer(12, 3, 48, 0.0, F.gelu, 1e-5, batch_first=True, norm_first=norm_first)
    order = [*ours.attn.parameters(), *ours.mlp.parameters(), *ours.norm1.parameters(), *ours.norm2.parameters()]
    theirs.load_state_dict(dict(zip(theirs.state_dict(), order, strict=True)))
    x, dy = torch.randn(2, 5, 7, 12, generator=draw)
    seen = []
    for forward in (ours, partial(theirs, src_mask=nn.Transformer.generate_square_subsequent_mask(7))):
        leaf = x.clone().requires_grad_()
        y = forward(leaf)
        y.backward(dy)
        seen.append((y, leaf.grad))
    checks.close(f"{name} block against torch's: y", seen[0][0], seen[1][0], 1e-5)
    checks.close(f"{name} block against torch's: dL/dx", seen[0][1], seen[1][1], 1e-5)


def gradients(model_class: type, n_layers: int, start: str) -> tuple[float, float]:
    """The norm of dL/d(mlp.fc.weight) in the first and in the last of n_layers, untrained, on one batch of text."""
    corpus = data.load_corpus("docs", "char", 32)
    model = model_class(NormConfig(n_layers=n_layers), corpus.vocab_size)
    gpt.init_parameters(model, seed=1, std="fan_in" if start == "plain 1/√fan_in" else 0.02)
    if start == "plain 1/√fan_in":  # undo the division by √(2L)
        for module in model.modules():
            if isinstance(module, gpt.ResidualWriter):
                module.weight.data *= math.sqrt(2 * n_layers)
    model(*data.sample_batch(corpus.train, 32, 8, generator(1, "batches")))[1].backward()
    return tuple(model.blocks[i].mlp.fc.weight.grad.norm().item() for i in (0, -1))


def main() -> int:
    checks = Checks()
    checks.raises("an unknown name", ValueError, ["batchnorm", *NORM_TYPES], lambda: make_norm("batchnorm", 8))
    check_block(checks, NormBlock, "pre-norm")
    check_block(checks, PostNormBlock, "post-norm")
    console.say("The gradient of mlp.fc.weight in the first and the last layer, untrained, on one batch of text")
    headers, depths = ["pre-norm first", "pre-norm last", "post-norm first", "post-norm last"], (2, 6, 12, 24, 48)
    for start in ("GPT-2's", "plain 1/√fan_in"):
        seen = [(*gradients(NormGPT, L, start), *gradients(PostNormGPT, L, start)) for L in depths]
        console.say(f"\nStart: {start}")
        console.say()
        console.say(
            console.Table(["layers", *headers], [[str(L), *(f"{g:.4f}" for g in row)] for L, row in zip(depths, seen)])
        )
        console.say()
        slopes = [
            math.log(deep / shallow) / math.log(depths[-1] / depths[0]) for shallow, deep in zip(seen[0], seen[-1])
        ]
        console.say("It goes with the depth L as " + ", ".join(f"{n}: L^{s:+.2f}" for n, s in zip(headers, slopes)))
    # Xiong et al. 2020, theorem 1: with a plain start the last layer's gradient falls as 1/√L in pre-norm only.
    checks.close("plain start, pre-norm last: power of L", slopes[1], -0.5, 0.2)
    checks.close("plain start, post-norm last: power of L", slopes[3], 0.0, 0.2)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
