"""Step 13: choose the sizes.

GPTConfig, below, holds the sizes of this chapter's model. Which of them makes a model large? Count
the numbers in each part, for width C, L layers, a vocabulary of V tokens and a longest context of T
tokens:

- attention: 4C², for queries, keys, values and proj, and 4C biases;
- MLP: 8C², for two matrices of C·4C, and 5C biases;
- two norms in a layer, one at the end: 2C each;
- tables of tokens and of positions: V·C and T·C.

A layer is 12C² + 13C in all. With twice the layers the blocks are twice as large; with twice the
width, four times. A large vocabulary weighs most in a small model: GPT-2 has V = 50,257, this
chapter's characters only V = 95. The number of heads changes nothing: it only says into how many
parts attention's C numbers are cut, and must divide C.

    python step_13_choose-the-sizes.py

counts the four GPT-2 models and draws outputs/step_13.png: how much of each is blocks.
"""

import sys
from dataclasses import dataclass, fields
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console, figures
from shared.checks import Checks

GPT = chapters.load_step(5, 6).GPT
count_parameters = chapters.load_step(5, 6).count_parameters

# ---------------------------------------------------------------- the idea


@dataclass(frozen=True)
class GPTConfig:
    """The shape of the model. The size of the vocabulary is not here: it comes with the text."""

    block_size: int = 32  # longest context, in tokens
    n_layers: int = 2
    n_heads: int = 4
    d_model: int = 64  # numbers in the vector of each position
    bias: bool = True  # biases in attention and MLP, as in GPT-2

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is int and value < 1:
                raise ValueError(f"{field.name} must be at least 1, got {value}")
        if self.d_model % self.n_heads:
            raise ValueError(f"d_model {self.d_model} is not divisible by n_heads {self.n_heads}")

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads


def count_by_formula(cfg: GPTConfig, vocab_size: int) -> dict[str, int]:
    C = cfg.d_model
    layer = 12 * C * C + 13 * C
    return {
        "tokens": vocab_size * C,
        "positions": cfg.block_size * C,
        "blocks": cfg.n_layers * layer,
        "last norm": 2 * C,
    }


# ---------------------------------------------------------------- look at it

GPT2 = {  # Radford et al. 2019, table 2; all with 1,024 positions and 50,257 tokens
    "small": GPTConfig(block_size=1024, n_layers=12, n_heads=12, d_model=768),
    "medium": GPTConfig(block_size=1024, n_layers=24, n_heads=16, d_model=1024),
    "large": GPTConfig(block_size=1024, n_layers=36, n_heads=20, d_model=1280),
    "XL": GPTConfig(block_size=1024, n_layers=48, n_heads=25, d_model=1600),
}


def draw_picture(models: dict[str, GPTConfig], vocab_sizes: list[int]) -> Path:
    figure = figures.new_figure(7, 3.2)
    axes = figure.subplots()
    for row, (cfg, vocab_size) in enumerate(zip(models.values(), vocab_sizes)):
        parts = count_by_formula(cfg, vocab_size)
        blocks = parts["blocks"] / sum(parts.values())
        tables = (parts["tokens"] + parts["positions"]) / sum(parts.values())
        axes.barh(row, blocks, color=figures.COLOURS[0])
        axes.barh(row, tables, left=blocks, color=figures.COLOURS[4])
        axes.text(0.02, row, f"blocks {blocks:.0%}", color="white", va="center")
    names = [f"{name}, V = {vocab_size:,}" for name, vocab_size in zip(models, vocab_sizes)]
    axes.set_yticks(range(len(models)), names)
    axes.invert_yaxis()
    figures.label(axes, "What a model's numbers are: blocks, or tables (yellow)", "share")
    return figures.save(figure, __file__)


def main() -> int:
    models = {"this chapter's": GPTConfig(), **GPT2}
    vocab_sizes = [95, 50_257, 50_257, 50_257, 50_257]
    rows = []
    counted = {}
    for (name, cfg), vocab_size in zip(models.items(), vocab_sizes):
        with torch.device("meta"):  # shapes without memory, enough to count
            counted[name] = count_parameters(GPT(cfg, vocab_size))
        rows.append([name, str(cfg.n_layers), str(cfg.d_model), f"{counted[name]:,}"])
    console.say(console.Table(["model", "layers", "width", "numbers"], rows))
    draw_picture(models, vocab_sizes)
    console.say("\nFrom small to XL the width is 2.1 times as large, which makes a layer 4.3 times")
    console.say("as large. There are 4 times as many layers, so the blocks are 17 times as large.")
    console.say("Drawn to outputs/step_13.png.")

    checks = Checks()
    unlike = 0
    for (name, cfg), vocab_size in zip(models.items(), vocab_sizes):
        by_formula = sum(count_by_formula(cfg, vocab_size).values())
        if by_formula != counted[name]:
            unlike += 1
    checks.equal("unlike the formula", unlike, 0)
    checks.equal("GPT-2 small, published", counted["small"], 124_439_808)
    checks.equal("GPT-2 XL, published", counted["XL"], 1_557_611_200)
    with torch.device("meta"):
        one_head = count_parameters(GPT(GPTConfig(n_heads=1), 95))
    checks.equal("one head, not four", one_head, counted["this chapter's"])
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
