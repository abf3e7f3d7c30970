"""Step 16: what are multipliers for, if the weights beside them could hold them?

Granite 3 has four. These are of its size 2B, with heads of D = 64 channels:

- embedding_scale, 12: each token's vector is multiplied as it enters the residual stream.
- residual_scale, 0.22: what attention or an MLP adds to the stream becomes smaller.
- score_scale, 1/64: a query times a key is multiplied by 1/D and not by 1/√D.
- logit_scale, 1/8: logits become smaller.

All four can be folded into weights. What attention and MLP add comes out of a matrix, and so do
queries: these matrices can hold the factors. The embedding can be made 12 times as large. It is the
head's matrix, too, so logits become 12 times as large; but a norm stands before the head, and if
its gain is divided by 12, they don't. The same gain can hold logit_scale.

So multipliers add nothing to what a model can compute. They change how it learns. AdamW moves every
stored number by about the learning rate, however large its gradient. If a number is multiplied by
12 before it is used, then what is used moves 12 times as far. So a multiplier gives its part a
learning rate of its own. With the right multipliers, a learning rate that was found with a small
model suits a large one, too (µP, Yang et al. 2022; Granite's follow Shen et al. 2024).

    python step_16_scale-the-stream.py

prints how far one step of AdamW moves each of the four.
"""

import math
import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console
from shared.checks import Checks
from shared.randomness import generator

build = chapters.load_build(38)  # the finished chapter: what is not on this page

NONE = {"embedding_scale": 1.0, "residual_scale": 1.0, "score_scale": None, "logit_scale": 1.0}

# ---------------------------------------------------------------- the idea


@torch.no_grad()
def fold(model: build.DetailedGPT) -> build.DetailedGPT:
    """A model without multipliers that computes the same as this tied one."""
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


def granite() -> build.DetailedGPT:
    """A small model of Granite's recipe with random numbers in float64, gains included."""
    sizes = {"n_heads": 3, "n_kv_heads": 1, "d_model": 30, "d_head": 64, "d_hidden": 77}
    cfg = build.DetailedConfig(**build.RECIPES["granite"].changes | sizes)
    model = build.DetailedGPT(cfg, vocab_size=53).double()
    for name, p in model.named_parameters():
        draw = generator(1, "multipliers", name)
        std = 0.02 if name.startswith("token") else p.shape[-1] ** -0.5
        mean = 1.0 if "norm" in name else 0.0  # gains are near 1
        torch.nn.init.normal_(p, mean=mean, std=std, generator=draw)
    return model


def used_numbers(model: build.DetailedGPT) -> list[torch.Tensor]:
    """What a multiplier acts on, one tensor for each of the four, as it is used: all folded in."""
    folded = fold(model)
    attention = folded.blocks[0].attn
    n_queries = model.cfg.n_heads * model.cfg.head_dim
    return [
        folded.token_embedding.weight,
        attention.proj.weight,
        attention.qkv.weight[:n_queries],
        folded.norm_f.weight,
    ]


def moved_by_a_step(model: build.DetailedGPT, idx: torch.Tensor) -> torch.Tensor:
    """How far, on average, one step of AdamW moves the used_numbers(), (4,)."""
    before = used_numbers(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    _, loss = model(idx[:, :-1], idx[:, 1:])
    loss.backward()
    optimizer.step()
    after = used_numbers(model)
    return torch.stack([(new - old).abs().mean() for new, old in zip(after, before)])


def main() -> int:
    idx = torch.randint(53, (4, 32), generator=generator(1, "multipliers", "text"))
    model = granite()
    folded = fold(model)
    logits, _ = model(idx)
    logits_folded, _ = folded(idx)
    factors = torch.tensor([12, 0.22, 1 / 64 * math.sqrt(64), 1 / 8 / 12])
    times = moved_by_a_step(model, idx) / moved_by_a_step(folded, idx)
    parts = ("embedding", "what attention adds", "queries", "gain of the last norm")
    rows = []
    for part, factor, seen in zip(parts, factors.tolist(), times.tolist()):
        rows.append([part, f"{factor:.3g}", f"{seen:.3g} times as far"])
    console.say("A step of AdamW, with multipliers against all folded in:")
    console.say()
    console.say(console.Table(["part", "multiplied by", "moves"], rows))
    console.say("\nLook at the last column: with multipliers, each part has a rate of its own.")

    checks = Checks()
    checks.close("folded: the same logits", logits_folded, logits, 1e-13)
    checks.close("times as far / multiplied", times / factors, torch.ones(4), 0.02)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
