"""Step 16: what are multipliers for, if the weights beside them could hold them?

Granite 3 has four. These are of its size 2B, which has C = 2,048, D = 64 and 40 layers:

- embedding_scale, 12: each token's vector is multiplied as it enters the residual stream, to which
  all parts add. Its numbers start small, since the head has the same matrix (they are tied), and
  large ones would make large logits. Gemma takes √C (Vaswani et al. 2017, section 3.4).
- residual_scale, 0.22: what each half of a block adds becomes smaller, and the token's vector
  remains visible beside it.
- score_scale, 1/64: a query times a key is multiplied by 1/D and not by 1/√D. Here that makes
  scores 8 times smaller, so that attention starts more even.
- logit_scale, 1/8: logits become smaller, so that the model starts closer to guessing evenly.

All four can be folded into weights. What a half adds comes out of a matrix, and so do queries.
Embeddings are harder: if a tied matrix is scaled for the stream, logits become larger, too. But a
norm stands before the head, and its gain can take that back. It can hold logit_scale as well. Only
if that norm has no gain (step 15), a tied matrix can't take the multiplier in.

So multipliers add nothing to what a model can compute. They change how it learns. AdamW moves every
stored number by about the learning rate, however large its gradient. If a number is multiplied by
12 before it is used, it moves 12 times as far for those who use it. So a multiplier gives its part
a learning rate of its own. With the right ones, one rate serves models of any width (µP, Yang et
al. 2022; Granite's follow Shen et al. 2024).

    python step_16_scale-the-stream.py

draws outputs/step_16.png. Shapes: C = d_model, D channels of a head.
"""

import math
import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console, figures
from shared.checks import Checks
from shared.randomness import generator

modern = chapters.load_build(7)
build = chapters.load_build(38)  # the finished chapter: what is not on this page

NONE = {"embedding_scale": 1.0, "residual_scale": 1.0, "score_scale": None, "logit_scale": 1.0}

# ---------------------------------------------------------------- the idea


@torch.no_grad()
def fold(model: build.DetailedGPT) -> build.DetailedGPT:
    """A model that computes the same as this one, which is tied, and has no multipliers."""
    cfg = model.cfg
    folded = build.DetailedGPT(replace(cfg, **NONE), model.vocab_size)
    folded.to(model.token_embedding.weight.dtype).load_state_dict(model.state_dict())
    folded.token_embedding.weight.mul_(cfg.embedding_scale)  # it is the head's matrix, too
    folded.norm_f.weight.mul_(cfg.logit_scale / cfg.embedding_scale)  # so the head gets that less
    for block in folded.blocks:
        block.attn.proj.weight.mul_(cfg.residual_scale)
        block.mlp.down_proj.weight.mul_(cfg.residual_scale)
        queries = block.attn.qkv.weight[: cfg.n_heads * cfg.head_dim]
        if cfg.score_scale is not None:
            queries.mul_(cfg.score_scale * math.sqrt(cfg.head_dim))  # scores get 1/√D without it
    return folded


# ---------------------------------------------------------------- look at it


def granite(**changes) -> build.DetailedGPT:
    """A small model of Granite's recipe with random numbers in float64, gains included."""
    sizes = {"n_heads": 3, "n_kv_heads": 1, "d_model": 30, "d_head": 64, "d_hidden": 77}
    cfg = build.DetailedConfig(**build.RECIPES["granite"].changes | sizes | changes)
    model = build.DetailedGPT(cfg, vocab_size=53).double()
    for name, p in model.named_parameters():
        draw = generator(1, "multipliers", name)
        std = 0.02 if name.startswith("token") else p.shape[-1] ** -0.5
        torch.nn.init.normal_(p, mean=float(p.dim() == 1), std=std, generator=draw)
    return model


def moved_by_a_step(model: build.DetailedGPT, idx: torch.Tensor) -> torch.Tensor:
    """How far a step of AdamW moves four sorts of weights, seen with all folded: means."""
    before = fold(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    _, loss = model(idx[:, :-1], idx[:, 1:])
    loss.backward()
    optimizer.step()
    after = fold(model)
    moved = []
    for name in ("token_embedding", "blocks.0.mlp.down_proj", "blocks.0.attn.qkv", "norm_f"):
        change = after.get_submodule(name).weight - before.get_submodule(name).weight
        moved.append(change[:192].abs().mean().item())  # of qkv, 192 rows make queries
    return torch.tensor(moved)


def sizes_by_depth(idx: torch.Tensor, **changes) -> list[float]:
    """The stream's root of the mean square, at the start and after each half of 40 new blocks."""
    stats = modern.stream_stats(granite(n_layers=40, **changes), idx)
    return [math.sqrt(at["var"] + at["mean"] ** 2) for at in stats.values()]


def draw_picture(sizes: dict[str, list[float]]) -> Path:
    figure = figures.new_figure(7, 3.2)
    axes = figure.subplots()
    for (name, by_depth), colour in zip(sizes.items(), figures.COLOURS):
        axes.semilogy(by_depth, color=colour, label=name)
    figures.label(axes, "Size of the residual stream", "halves of blocks that it has passed")
    return figures.save(figure, __file__)


def main() -> int:
    idx = torch.randint(53, (4, 32), generator=generator(1, "multipliers", "text"))
    model = granite()
    folded = fold(model)
    logits, _ = model(idx)
    logits_folded, _ = folded(idx)
    factors = torch.tensor([12, 0.22, 1 / 64 * math.sqrt(64), 1 / 8 / 12])
    times = moved_by_a_step(model, idx) / moved_by_a_step(folded, idx)
    parts = ("embedding", "what a half adds", "queries", "gain of the last norm")
    rows = []
    for part, factor, seen in zip(parts, factors.tolist(), times.tolist()):
        rows.append([part, f"{factor:.3g}", f"{seen:.3g} times as far"])
    console.say("A step of AdamW, with multipliers against all folded in:")
    console.say()
    console.say(console.Table(["part", "multiplied by", "moves"], rows))
    console.say("\nLook at the last column: with multipliers, each part has a rate of its own.")

    plain = sizes_by_depth(idx, **NONE)
    scaled = sizes_by_depth(idx)
    growth = plain[1] / plain[0]
    calm = scaled[1] / scaled[0]
    console.say(f"\npicture: {draw_picture({'no multipliers': plain, 'four multipliers': scaled})}")
    console.say("Look at the left end: without multipliers the first half of a block makes the")
    console.say(f"stream {growth:.0f} times as large, so that little of the token is left in it;")
    console.say(f"with them, {calm:.2f} times.")

    checks = Checks()
    checks.close("folded: the same logits", logits_folded, logits, 1e-13)
    checks.close("times as far / multiplied by", times / factors, torch.ones(4), 0.02)
    checks.between("what the first half makes of the stream", growth, 10, 100)
    checks.between("and with multipliers", calm, 1, 1.2)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
