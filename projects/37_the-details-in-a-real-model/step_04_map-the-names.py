"""Step 04: map the names.

The file and our model hold the same tensors under different names. So loading is a table: their
name on one side, our place on the other. Two things make it less simple than it sounds. Our qkv
is one matrix and theirs are three, so their q goes into its first three fifths, and their k and v
into a fifth each. And a table is easily wrong without anybody noticing. So every tensor must have
its place and every place its tensor, in the same shape, or loading stops.

One thing the shapes can't tell: which channels RoPE turns together. Chapter 07 turns neighbours,
(0, 1), (2, 3) and so on; other programs turn channel i together with channel i + 32. The matrices
look alike. But only one of the two gives a good loss, so we try both.

    python step_04_map-the-names.py

Asking the model something is step 05.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli
from shared.checks import Checks
from shared.console import Table, say

gpt = chapters.load_build(5)
real = chapters.load_build(37)  # the finished chapter: what is not on this page
inspection = real.inspection
stretch = real.stretch
GroupedQueryAttention = real.GroupedQueryAttention
RealGPT = real.RealGPT
WeightsFile = real.WeightsFile
read_config = real.read_config

# ---------------------------------------------------------------- the idea

# In block i, their blk.i.NAME.weight is our blocks.i.NAME.weight. Ours holds q, k and v in one
# matrix, so slots() splits that.
BLOCK_NAMES = {
    "attn_norm": "norm1",
    "attn_output": "attn.proj",
    "ffn_norm": "norm2",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def slots(model: RealGPT) -> dict[str, torch.Tensor]:
    """Their name of each tensor -> the place in our parameters (a view) where it belongs."""
    places = {}
    places["token_embd.weight"] = model.token_embedding.weight
    places["output_norm.weight"] = model.norm_f.weight
    if model.lm_head.weight is not model.token_embedding.weight:
        places["output.weight"] = model.lm_head.weight  # a head that is not tied
    for i, block in enumerate(model.blocks):
        for theirs, ours in BLOCK_NAMES.items():
            places[f"blk.{i}.{theirs}.weight"] = block.get_submodule(ours).weight
        attn = block.attn
        q_rows = attn.n_heads * attn.head_dim
        k_rows = attn.n_kv_heads * attn.head_dim
        q, k, v = attn.qkv.weight.split([q_rows, k_rows, k_rows])
        places[f"blk.{i}.attn_q.weight"] = q
        places[f"blk.{i}.attn_k.weight"] = k
        places[f"blk.{i}.attn_v.weight"] = v
    return places


@torch.no_grad()
def load_model(file: WeightsFile, longest: int = 8_192) -> RealGPT:
    """Our model with the numbers of a GGUF file. UserError unless every tensor has its place.

    It reads up to `longest` positions, or as many as the file's model can.
    """
    cfg = read_config(file)
    cfg = replace(cfg, block_size=min(cfg.block_size, longest))
    model = RealGPT(cfg, vocab_size=file.tensors["token_embd.weight"].shape[0])
    if "output.weight" in file.tensors:  # a head of its own; without it, the embedding is the head
        model.lm_head.weight = nn.Parameter(torch.empty_like(model.token_embedding.weight))
    places = slots(model)
    for name, place in places.items():
        inspection.check_tensor(file, name, place.shape)
    for name in file.tensors:
        if name not in places:
            raise file.refusal(f"our model has no place for its tensor {name}")
    for name, place in places.items():
        place.copy_(file.read(name))  # into the memory that is there: what was tied stays tied
    inspection.check_numbers(file, places)
    factor = inspection.rope_factor(file)
    if factor != 1:  # of files for long texts: position t turns as t / factor did
        stretch(model, factor)
    return model.eval()


class HalfSplitAttention(GroupedQueryAttention):
    """RoPE that turns channel i together with i + D/2: the other layout in use."""

    def turn(self, x: torch.Tensor, start: int) -> torch.Tensor:
        # Sort the channels: 0, D/2, 1, D/2 + 1, ... Then i and i + D/2 are neighbours. A score
        # q · k is a sum over channels, in any order: sorting q and k alike changes no score.
        halves = x.unflatten(-1, (2, -1))  # (..., 2, D/2)
        neighbours = halves.transpose(-1, -2).flatten(-2)
        return super().turn(neighbours, start)


# ---------------------------------------------------------------- look at it


def main() -> int:
    file = WeightsFile(real.packaged_weights())
    model = load_model(file)
    places = slots(model)
    names = dict(BLOCK_NAMES, attn_q="attn.qkv", attn_k="attn.qkv", attn_v="attn.qkv")
    rows = []
    for theirs, ours in names.items():
        name = f"blk.7.{theirs}.weight"
        rows.append([name, f"blocks.7.{ours}.weight", str(tuple(places[name].shape))])
    say(Table(["their tensor", "our parameter", "shape"], rows))
    say("\nThree of their tensors share one of ours: attn.qkv, of 576 + 192 + 192 rows.")
    say("Besides the layers there are the embedding, token_embd, and the last norm,")
    say("output_norm.")

    checks = Checks()
    filled = sum(place.numel() for place in places.values())
    checks.equal("numbers filled in", filled, gpt.count_parameters(model))
    k = model.blocks[7].attn.qkv.weight[576:768]
    checks.equal("their k in our qkv", k, file.read("blk.7.attn_k.weight"))
    ids = torch.tensor(real.Tokenizer(file).encode(real.evaluation_text())[:129])
    right = real.mean_loss(model, ids)
    for block in model.blocks:
        block.attn.__class__ = HalfSplitAttention  # the same numbers, another way to use them
    wrong = real.mean_loss(model, ids)
    checks.between("loss, neighbours turned", right, 0, 4)
    checks.between("loss, i with i + 32", wrong, right + 1, 11)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
