"""Step 12: put the parts together. (Best read after step 03.)

Step 03's attention goes into chapter 07's block, and the block into chapter 07's model. One method
for each is enough: a block asks make_attention() for its attention, and a model asks make_block()
for its blocks. All else is there already: RMSNorm, SwiGLU, RoPE, the tied head, and the two lines
that are the residual stream.

One more method, states(), stops before the head. The head turns 576 numbers into 49,152 logits, and
to write a text we need those of the last position only.

How large is each part? A config says it: chapter 07's, and in it the number of key and value
heads. The file has these sizes in its metadata, and read_config() makes a config of them.
Where the file asks for something that our blocks don't have, it says so and stops: a model that
is built almost right would run and answer almost right.

    python step_12_put-the-parts-together.py

The model has the right shape now, and random numbers. Step 04 fills in the real ones.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli
from shared.checks import Checks
from shared.console import Table, say

gpt = chapters.load_build(5)
modern = chapters.load_build(7)
real = chapters.load_build(37)  # the finished chapter: what is not on this page
inspection = real.inspection
CachedAttention = real.CachedAttention
GroupedQueryAttention = real.GroupedQueryAttention
WeightsFile = real.WeightsFile

# ---------------------------------------------------------------- the idea


@dataclass(frozen=True)
class GroupedConfig(modern.ModernConfig):
    """Chapter 07's config (RMSNorm and SwiGLU) with RoPE, no biases, and shared key/value heads."""

    bias: bool = False
    position_type: str = "rope"
    n_kv_heads: int = 2

    def __post_init__(self):
        super().__post_init__()
        if self.n_kv_heads < 1 or self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_heads {self.n_heads} is not divisible by n_kv_heads {self.n_kv_heads}"
            )


class RealBlock(modern.ModernBlock):
    """Chapter 07's block with step 03's attention."""

    def make_attention(self, cfg: GroupedConfig) -> nn.Module:
        return GroupedQueryAttention(cfg)


class RealGPT(modern.ModernGPT):
    """Chapter 07's model with that block."""

    def make_block(self, cfg: GroupedConfig) -> nn.Module:
        return RealBlock(cfg)

    def make_cache(self, attn: nn.Module, n_positions: int) -> nn.Module:
        """An attention that remembers (step 06)."""
        return CachedAttention(attn, n_positions)

    def states(self, idx: torch.Tensor) -> torch.Tensor:
        """Token ids (B, T) -> what the head reads (B, T, C)."""
        x = self.embed(idx)
        for block in self.blocks:
            x = block(x)
        return self.norm_f(x)


def read_config(file: WeightsFile) -> GroupedConfig:
    """The shape of the model in a GGUF file. UserError if our blocks can't take it."""
    inspection.check_fields(file)

    def field(name: str, default=None):
        return file.metadata.get(f"llama.{name}", default)

    n_heads = field("attention.head_count")
    try:
        cfg = GroupedConfig(
            block_size=field("context_length"),
            n_layers=field("block_count"),
            n_heads=n_heads,
            n_kv_heads=field("attention.head_count_kv", n_heads),
            d_model=field("embedding_length"),
            d_hidden=field("feed_forward_length"),
            norm_eps=field("attention.layer_norm_rms_epsilon"),
            rope_base=field("rope.freq_base", 10_000.0),
        )
    except ValueError as error:
        raise file.refusal(str(error)) from None
    inspection.check_shape(file, cfg)
    return cfg


# ---------------------------------------------------------------- look at it


def main() -> int:
    cfg = read_config(WeightsFile(real.packaged_weights()))
    model = RealGPT(cfg, vocab_size=49_152)
    block = model.blocks[0]
    parts = {
        "token embedding, also the head": model.token_embedding,
        "one block: attention": block.attn,
        "one block: MLP": block.mlp,
        f"all {cfg.n_layers} blocks": model.blocks,
        "the whole model": model,
    }
    rows = [[what, f"{gpt.count_parameters(part):,}"] for what, part in parts.items()]
    say(Table(["part", "parameters"], rows))
    say("\nThe embedding is a fifth of the model; three quarters of a block are its MLP.")

    checks = Checks()
    checks.equal("parameters", gpt.count_parameters(model), 134_515_008)
    tied = model.lm_head.weight is model.token_embedding.weight
    checks.equal("head tied", tied, True)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
