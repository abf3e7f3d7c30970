"""Step 03: where does the norm stand in the model, and how do we choose which norm it is?

The residual stream is the vector that runs through the model, one for each token. Chapter 05's
block, one layer of the model, has two parts, attention and the MLP. Each part reads the stream
through a norm and adds its own output to it:

    x = x + self.attn(self.norm1(x))
    x = x + self.mlp(self.norm2(x))

The stream itself, the x before the +, is never normalized. It may grow, as every part adds
something. The norm hides this growth from the part that reads. One more norm stands before the
head. This order is called pre-norm; step 13 moves the norm behind the + and compares.

Chapter 05's block and model each have a small method make_norm() that says which norm to build. To
build a model with another norm, we override those methods and nothing else.

    python step_03_wire-normalization-into-the-transformer-block.py

draws outputs/step_03.png. Step 04 measures the stream in more detail.

Shapes: B batch, T positions, C = d_model, L layers.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console, data, figures
from shared.checks import Checks
from shared.randomness import generator

gpt = chapters.load_build(5)
RMSNorm = chapters.load_step(7, 2).RMSNorm

# ---------------------------------------------------------------- the idea

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
    """Chapter 05's block with the norm that the config names; forward() is chapter 05's."""

    def make_norm(self, cfg: NormConfig) -> nn.Module:
        return make_norm(cfg.norm_type, cfg.d_model, cfg.norm_eps)  # the function above


class NormGPT(gpt.GPT):
    """Chapter 05's GPT with the norm that the config names, in its blocks and before its head."""

    def make_block(self, cfg: NormConfig) -> nn.Module:
        return NormBlock(cfg)

    def make_norm(self, cfg: NormConfig) -> nn.Module:
        return make_norm(cfg.norm_type, cfg.d_model, cfg.norm_eps)


# ---------------------------------------------------------------- look at it


@torch.no_grad()
def sizes_by_layer(model: NormGPT, idx: torch.Tensor) -> tuple[list[float], list[float]]:
    """The root mean square of the stream before each MLP, and of what that MLP reads."""
    stream = []
    read = []
    x = model.embed(idx)
    for block in model.blocks:
        x = x + block.attn(block.norm1(x))
        stream.append(x.square().mean().sqrt().item())
        read.append(block.norm2(x).square().mean().sqrt().item())
        x = x + block.mlp(block.norm2(x))
    return stream, read


def draw_picture(corpus: data.Corpus) -> Path:
    """The stream grows with depth; what an MLP reads keeps its size, if there is a norm."""
    idx = corpus.train[None, :32]  # a batch of one window
    figure = figures.new_figure(8, 3)
    panels = figure.subplots(1, 3, sharey=True)
    for axes, norm_type in zip(panels, NORM_TYPES):
        model = NormGPT(NormConfig(n_layers=24, norm_type=norm_type), corpus.vocab_size)
        # The start 1/√(inputs): from chapter 05's 0.02 the stream would hardly grow.
        gpt.init_parameters(model, seed=1, std="fan_in")
        stream, read = sizes_by_layer(model, idx)
        axes.plot(range(1, 25), stream, color=figures.COLOURS[0], label="the stream")
        axes.plot(range(1, 25), read, "--", color=figures.COLOURS[1], label="what the MLP reads")
        axes.set(title=norm_type, xlabel="layer", ylim=(0, None))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("root mean square")
    panels[0].legend(frameon=False)
    return figures.save(figure, __file__)


def main() -> int:
    corpus = data.load_corpus("docs", "char", 32)
    console.say(f"picture: {draw_picture(corpus)}")
    console.say()
    console.say("Compare the two lines. In 24 untrained layers the stream grows about tenfold,")
    console.say("and yet with a norm every MLP reads a vector of size 1. With none there is only")
    console.say("one line: the MLP reads the stream as it is. That is small, so what the MLP adds")
    console.say("is small too, and the stream hardly grows.")

    checks = Checks()
    plain = gpt.GPT(gpt.GPTConfig(), corpus.vocab_size)
    ours = NormGPT(NormConfig(norm_type="layernorm"), corpus.vocab_size)
    gpt.init_parameters(plain, seed=1)
    gpt.init_parameters(ours, seed=1)
    idx, targets = data.sample_batch(corpus.train, 32, 8, generator(1, "step_03", "batch"))
    logits, _ = ours(idx)
    checks.close("layernorm: as chapter 05", logits, plain(idx)[0], 0)

    rms = NormGPT(NormConfig(norm_type="rmsnorm"), corpus.vocab_size)
    gpt.init_parameters(rms, seed=1)
    # Five norms of 64 channels: two in each of two blocks, one before the head.
    saved = gpt.count_parameters(ours) - gpt.count_parameters(rms)
    checks.equal("rmsnorm: 320 biases less", saved, 5 * 64)
    _, loss = rms(idx, targets)
    checks.close("rmsnorm: first loss, ln V", loss, math.log(corpus.vocab_size), 0.25)
    _, read = sizes_by_layer(rms, idx)
    checks.close("rmsnorm: MLPs read size 1", torch.tensor(read), torch.ones(2), 1e-2)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
