"""Step 18: put the parts together.

The steps before this one exchanged parts of chapter 37's model. A whole model is a list of such
parts, and here the list is data: a recipe names the fields of the config that it changes, and a
field names a class in a table. norm_place="after" is BLOCKS["after"]. What a recipe doesn't name is
as in chapter 37: RMSNorm, SwiGLU, RoPE, shared key/value heads. Widths and numbers of heads belong
to a model's sizes, not to its recipe. So a new model is some ten lines of data, and the model's
code never asks for a model's name.

Layers may differ: of Gemma 3's, five in six see a window. So each layer gets a config of its own,
which layer_config() makes of the model's. What is left for the class below are the two ends,
embeddings and logits.

    python step_18_put-the-parts-together.py

prints which model has which part in which place.
"""

import math
import sys
from pathlib import Path

import torch
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli
from shared.checks import Checks
from shared.cli import Variant
from shared.console import say
from shared.randomness import generator

gpt = chapters.load_build(5)
real = chapters.load_build(37)
build = chapters.load_build(38)  # the finished chapter: what is not on this page
BLOCKS = build.BLOCKS
DetailedConfig = build.DetailedConfig
GainPlusOne = build.GainPlusOne
Head = build.Head  # the matrix that makes logits; it may scale or cap them
Llama3Scaling = build.Llama3Scaling
SinkAttention = build.SinkAttention
layer_config = build.layer_config  # in step 04
make_norm = build.make_norm
SIZES = {"block_size": 13, "n_layers": 3, "n_heads": 3, "d_model": 24}

# ---------------------------------------------------------------- the idea


class DetailedGPT(real.RealGPT):
    """Chapter 37's model with blocks that may differ from layer to layer; forward() is 05's."""

    def __init__(self, cfg: DetailedConfig, vocab_size: int):
        super().__init__(cfg, vocab_size)
        layers = [layer_config(cfg, i) for i in range(cfg.n_layers)]
        self.blocks = nn.ModuleList(BLOCKS[layer.norm_place](layer) for layer in layers)
        self.embedding_norm = make_norm(cfg, cfg.d_model) if cfg.embedding_norm else nn.Identity()
        self.lm_head = Head(cfg, vocab_size)
        if cfg.tied:
            self.lm_head.weight = self.token_embedding.weight

    def make_block(self, cfg: DetailedConfig) -> nn.Module:
        return nn.Identity()  # chapter 37's __init__ asks for blocks; ours replaces them

    def make_norm(self, cfg: DetailedConfig) -> nn.Module:
        return make_norm(cfg, cfg.d_model)

    def embed(self, idx: torch.Tensor) -> torch.Tensor:
        """Token ids (B, T) -> the start of the residual stream (B, T, C)."""
        scale = self.cfg.embedding_scale
        if scale == "sqrt":
            scale = math.sqrt(self.cfg.d_model)
        return self.embedding_norm(scale * super().embed(idx))


def init_parameters(model: DetailedGPT, seed: int, std: float | str = 0.02) -> None:
    """Chapter 05's start, which sets gains to 1: here the w of a gain 1 + w, and sinks, are 0."""
    gpt.init_parameters(model, seed, std)
    for module in model.modules():
        if isinstance(module, GainPlusOne):
            nn.init.zeros_(module.weight)
        if isinstance(module, SinkAttention):
            nn.init.zeros_(module.sinks)


def recipe(name: str, told: str, **changes) -> Variant:
    """A model as data: its name, what sets it apart in words, and the fields that it changes."""
    return Variant(name, labels={"model": name, "details": told}, changes=changes)


GPT2 = recipe(
    "GPT-2",
    "LayerNorm, biases, learned positions, plain MLP",
    norm_type="layernorm",
    bias=True,
    position_type="learned",
    mlp_type="gelu",
    activation="gelu_tanh",
)
LLAMA3 = recipe(
    "Llama 3",
    "shared key/value heads, RoPE of base 500,000, slowed for long texts from 3.1 on",
    tied=False,
    rope_base=500_000.0,
    rope_scaling=Llama3Scaling(factor=8.0, trained=8_192),
)

# ---------------------------------------------------------------- look at it


def logits(theirs: nn.Module, model: Variant, **changes) -> tuple[torch.Tensor, torch.Tensor]:
    """What the recipe's model makes of two texts, and `theirs`, whose numbers it gets."""
    for name, p in theirs.named_parameters():
        nn.init.normal_(p, std=0.3, generator=generator(1, "step_18", name))
    ours = DetailedGPT(DetailedConfig(**model.changes | SIZES | changes), vocab_size=31)
    ours.load_state_dict(theirs.state_dict())
    idx = torch.arange(22).view(2, 11)
    return ours(idx)[0], theirs(idx)[0]


@torch.no_grad()
def main() -> int:
    say(build.places_table())
    say(f"\n{build.HOW_TO_READ}")
    say("\nLook at the rows of Llama 3 and Gemma 2: one place is filled, and six are.")

    checks = Checks()
    classic = gpt.GPT(gpt.GPTConfig(**SIZES), vocab_size=31)
    ours, theirs = logits(classic, GPT2, n_kv_heads=3, activation="gelu")  # 05's GELU is exact
    checks.close("GPT-2: chapter 05's", ours, theirs, 1e-5)
    grouped = real.RealGPT(real.GroupedConfig(**SIZES, n_kv_heads=1, rope_base=5e5), vocab_size=31)
    ours, theirs = logits(grouped, LLAMA3, n_kv_heads=1, rope_scaling=None)  # as 3.0 was
    checks.close("Llama 3: chapter 37's", ours, theirs, 1e-5)
    in_build = [build.RECIPES["gpt2"], build.RECIPES["llama3"]]
    checks.equal("build.py has the same two", in_build == [GPT2, LLAMA3], True)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
