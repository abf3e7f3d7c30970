"""Step 10: what is gained and what is lost when attention and MLP stand side by side?

    one after the other   x = x + attn(norm1(x))
                          x = x + mlp(norm2(x))
    side by side          x = x + attn(norm(x)) + mlp(norm(x))

GPT-J (2021) put them side by side; PaLM (Chowdhery et al. 2022, section 2), Falcon and Command R
followed.

What is lost is depth. The MLP reads the residual stream (x, to which every part adds) as it was
before its layer's attention. What attention brings from other tokens is read by the next layer's
MLP, and in the last layer by none. A chain of parts, each reading the one before, has one link in a
layer instead of two.

What is gained is time. Both halves read the same vector, so the matrices that read it can be one
matrix. Both results are added to the same stream, so the matrices that write can be one, too. Then
a block is two large matrix products instead of five. The makers of PaLM found that large models
train 15 % faster. With 8 billion parameters the model was slightly worse for it, with 62 billion it
was not.

    python step_10_put-attention-and-mlp-side-by-side.py

draws outputs/step_10.png. Shapes: B batch, T positions, C = d_model, D = head_dim.
"""

import sys
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console, figures
from shared.checks import Checks
from shared.randomness import generator

build = chapters.load_build(38)  # the finished chapter: what is not on this page
Block = build.Block
DetailedConfig = build.DetailedConfig

# ---------------------------------------------------------------- the idea


class ParallelBlock(Block):
    """Attention and MLP side by side behind one norm (GPT-J; Cohere): the MLP sees no attention."""

    def __init__(self, cfg: DetailedConfig):
        super().__init__(cfg)
        self.norm2 = nn.Identity()  # one norm for both

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm1(x)
        # residual_scale is 1 in all models but Granite (step 16).
        return x + self.residual_scale * (self.attn(normed) + self.mlp(normed))


def in_two_products(block: ParallelBlock, x: torch.Tensor) -> torch.Tensor:
    """What a ParallelBlock without biases makes of x (B, T, C), as two matrix products."""
    attn = block.attn
    mlp = block.mlp
    readers = (attn.qkv, mlp.gate_proj, mlp.up_proj)
    read = torch.cat([matrix.weight for matrix in readers])
    write = torch.cat((attn.proj.weight, mlp.down_proj.weight), dim=1)

    product = block.norm1(x) @ read.T
    qkv, gate, up = product.split([matrix.out_features for matrix in readers], dim=-1)
    every_head = qkv.unflatten(2, (-1, attn.head_dim)).transpose(1, 2)  # (B, heads, T, D)
    q, k, v = every_head.split([attn.n_heads, attn.n_kv_heads, attn.n_kv_heads], dim=1)
    q = attn.turn(q, start=0)
    k = attn.turn(k, start=0)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    mixed = mixed.transpose(1, 2).flatten(2)  # the heads side by side again
    return x + torch.cat((mixed, F.silu(gate) * up), dim=-1) @ write.T


# ---------------------------------------------------------------- look at it

PARTS = ("embedding", "attn 1", "MLP 1", "attn 2", "MLP 2", "attn 3", "MLP 3", "head")
SIZES = {"n_layers": 3, "n_heads": 6, "n_kv_heads": 3, "d_model": 24, "d_hidden": 35}


def make_model(norm_place: str) -> build.DetailedGPT:
    """Random numbers in float64, the norms' gains included."""
    cfg = DetailedConfig(**SIZES, norm_place=norm_place)
    model = build.DetailedGPT(cfg, vocab_size=29).double()
    for name, p in model.named_parameters():
        nn.init.normal_(p, std=0.5, generator=generator(1, "step_10", name))
    return model


def who_reads_whom(model: build.DetailedGPT) -> torch.Tensor:
    """(readers, writers) bool: does what a part reads depend on what another one wrote?

    It does if one number of what is read has a gradient by what was written. Hooks, functions that
    PyTorch calls when a part runs, keep both.
    """
    halves = [part for block in model.blocks for part in (block.attn, block.mlp)]
    written = []
    read = []
    for part in (model.token_embedding, *halves):
        part.register_forward_hook(lambda module, inputs, output: written.append(output))
    for part in (*halves, model.lm_head):
        part.register_forward_pre_hook(lambda module, inputs: read.append(inputs[0]))
    model(torch.arange(5)[None])  # a text of five tokens
    rows = []
    for x in read:
        number = x[0, 4, 0]  # of the last token, which sees all others
        gradients = torch.autograd.grad(number, written, retain_graph=True, allow_unused=True)
        rows.append([g is not None for g in gradients])  # None: it doesn't depend on that
    return torch.tensor(rows)


def draw_picture(reads: dict[str, torch.Tensor]) -> Path:
    figure = figures.new_figure(8, 3.6)
    for axes, (title, matrix) in zip(figure.subplots(1, 2), reads.items()):
        axes.imshow(matrix.tolist(), cmap="Blues", vmax=1.6)
        axes.set_xticks(range(7), PARTS[:-1], rotation=90)
        axes.set_yticks(range(7), PARTS[1:])
        axes.set(title=title, ylabel="reads", xlabel="what was written by")
    return figures.save(figure, __file__)


def main() -> int:
    models = {"one after the other": make_model("before"), "side by side": make_model("parallel")}
    reads = {title: who_reads_whom(model) for title, model in models.items()}
    console.say(f"picture: {draw_picture(reads)}")
    console.say("Look at the rows of the MLPs: side by side, none reads its layer's attention.")

    x = torch.randn(2, 9, 24, dtype=torch.float64, generator=generator(1, "step_10", "x"))
    checks = Checks()
    row = PARTS.index("MLP 2") - 1  # row 0 is attn 1's: the embedding reads nothing
    column = PARTS.index("attn 2")
    found = [matrix[row, column].item() for matrix in reads.values()]
    checks.equal("MLP 2 reads attn 2", found, [True, False])
    serial = models["one after the other"].blocks[0]
    block = ParallelBlock(serial.attn.cfg).double()
    block.load_state_dict(serial.state_dict(), strict=False)  # it has no norm2
    serial.norm2.load_state_dict(serial.norm1.state_dict())
    checks.close("in two matrix products", in_two_products(block, x), block(x), 1e-12)
    halves = serial.attn(serial.norm1(x)) + serial.mlp(serial.norm2(x))
    checks.close("adds what each half would add", block(x), x + halves, 1e-12)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
