"""Step 10: how do the parts of steps 02 to 09 become one model?

Chapter 05's block and model build each of their parts in a small method of its own: make_norm(),
make_attention(), make_mlp() in the block, make_positions(), make_block(), make_norm() in the model.
We override these methods and leave forward() alone. So the model runs as chapter 05's does, and the
config says which part stands in each place. This is the model of build.py, line for line.

What should hold for any choice of parts? The model starts by guessing evenly, so its first loss is
near ln V for V tokens. And it is causal: what it says at a position doesn't depend on later tokens.

    python step_10_put-the-parts-together.py

prints eight models, untrained, with a vocabulary of 48. build.py trains four, with one of 95.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console
from shared.checks import Checks
from shared.randomness import generator

gpt = chapters.load_build(5)
NORM_TYPES = chapters.load_step(7, 3).NORM_TYPES
make_norm = chapters.load_step(7, 3).make_norm
DENSE_MLP_TYPES = chapters.load_step(7, 7).DENSE_MLP_TYPES
make_mlp = chapters.load_step(7, 7).make_mlp
RotaryAttention = chapters.load_step(7, 8).RotaryAttention
MoE = chapters.load_step(7, 9).MoE

# ---------------------------------------------------------------- the idea

MLP_TYPES = (*DENSE_MLP_TYPES, "moe")
POSITION_TYPES = ("learned", "rope", "none")


@dataclass(frozen=True)
class ModernConfig(gpt.GPTConfig):
    """Chapter 05's shape, and which part stands in each place."""

    norm_type: str = "rmsnorm"
    mlp_type: str = "swiglu"
    position_type: str = "learned"
    norm_eps: float = 1e-5
    d_hidden: int | None = None  # width inside the MLP; None: 4C if plain, 8/3 C for SwiGLU
    multiple_of: int = 1  # the 8/3 rule's width is rounded up to a multiple of this
    rope_base: float = 10_000.0
    n_experts: int = 4  # SwiGLU experts in the layer, for mlp_type "moe"
    top_k: int = 2  # experts that each token uses
    init_std: float | Literal["fan_in"] = 0.02  # of matrices at the start; "fan_in": 1/√(inputs)

    def __post_init__(self):
        super().__post_init__()
        choices = {
            "norm_type": NORM_TYPES,
            "mlp_type": MLP_TYPES,
            "position_type": POSITION_TYPES,
        }
        for name, valid in choices.items():
            value = getattr(self, name)
            if value not in valid:
                raise ValueError(f"unknown {name} {value!r}; valid: {', '.join(valid)}")


class ModernBlock(gpt.Block):
    """Chapter 05's block with the parts that the config names; forward() is chapter 05's."""

    def make_norm(self, cfg: ModernConfig) -> nn.Module:
        return make_norm(cfg.norm_type, cfg.d_model, cfg.norm_eps)

    def make_attention(self, cfg: ModernConfig) -> nn.Module:
        if cfg.position_type == "rope":
            return RotaryAttention(cfg)
        return gpt.CausalSelfAttention(cfg)

    def make_mlp(self, cfg: ModernConfig) -> nn.Module:
        if cfg.mlp_type == "moe":
            return MoE(cfg)
        return make_mlp(cfg)


class ModernGPT(gpt.GPT):
    """Chapter 05's GPT with the parts that the config names; forward() is chapter 05's."""

    def make_positions(self, cfg: ModernConfig) -> nn.Module | None:
        if cfg.position_type == "learned":
            return super().make_positions(cfg)
        return None

    def make_block(self, cfg: ModernConfig) -> nn.Module:
        return ModernBlock(cfg)

    def make_norm(self, cfg: ModernConfig) -> nn.Module:
        return make_norm(cfg.norm_type, cfg.d_model, cfg.norm_eps)


# ---------------------------------------------------------------- look at it


def first_loss(model: ModernGPT) -> float:
    """The loss of the untrained model. Random tokens will do, as it guesses evenly."""
    idx = torch.randint(model.vocab_size, (8, 32), generator=generator(1, "step_10", "idx"))
    targets = torch.randint(model.vocab_size, (8, 32), generator=generator(1, "step_10", "targets"))
    return model(idx, targets)[1].item()


def influence(model: ModernGPT, position: int) -> torch.Tensor:
    """How strongly each position of the input acts on the last block's output at one position."""
    x = torch.randn(1, 8, model.cfg.d_model, generator=generator(1, "step_10", "x"))
    x.requires_grad_()
    hidden = x
    for block in model.blocks:
        hidden = block(hidden)
    hidden[0, position].sum().backward()
    return x.grad[0].abs().sum(-1)


def main() -> int:
    checks = Checks()
    rows = {}
    for norm_type in ("layernorm", "rmsnorm"):
        for mlp_type in MLP_TYPES:
            model = ModernGPT(ModernConfig(norm_type=norm_type, mlp_type=mlp_type), vocab_size=48)
            gpt.init_parameters(model, seed=1)
            size = f"{gpt.count_parameters(model):,}"
            loss = f"{first_loss(model):.3f}"
            rows[norm_type, mlp_type] = [norm_type, mlp_type, size, loss]
    console.say(console.Table(["norm", "MLP", "parameters", "first loss"], list(rows.values())))
    console.say("\nLook at the parameters: at each norm the dense MLPs agree within 1 %, so they")
    console.say("compare fairly; four experts make the model nearly three times as large.")
    model = ModernGPT(ModernConfig(position_type="rope", mlp_type="moe"), vocab_size=48)
    gpt.init_parameters(model, seed=1)
    checks.equal("LayerNorm, GELU: size", rows["layernorm", "gelu"][2], "105,216")
    checks.equal("RMSNorm, SwiGLU: size", rows["rmsnorm", "swiglu"][2], "104,000")
    checks.close("RoPE, moe: first loss, ln V", first_loss(model), math.log(48), 0.25)
    later = influence(model, position=3)[4:]
    checks.close("RoPE, moe: later tokens", later, torch.zeros(4), 0)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
