"""Step 04: map the names.

The file and our model hold the same tensors under different names: their `blk.7.attn_q.weight` is a third of our
`blocks.7.attn.qkv.weight`. This step reads the model's shape from the metadata, builds chapter 07's model in that shape
with step 03's attention, and fills every parameter; nothing is left over on either side. Running it is step 05.

    python step_04_map-the-names.py     (about 8 seconds)

It prints the map, checks the shapes, the count and the tie, and finds out by trying which channels RoPE pairs up.
"""

import sys
from pathlib import Path

import torch
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, data
from shared.checks import Checks
from shared.console import Table, say

gpt, modern = chapters.load_build(5), chapters.load_build(7)
step_01, step_02, step_03 = (chapters.load_step(37, step) for step in (1, 2, 3))
GroupedConfig, GroupedQueryAttention = step_03.GroupedConfig, step_03.GroupedQueryAttention

# In block i: their blk.i.NAME.weight -> our blocks.i.NAME.weight. Ours holds q, k and v in one, so slots() splits it.
BLOCK_NAMES = {"attn_norm": "norm1", "attn_output": "attn.proj", "ffn_norm": "norm2"}
BLOCK_NAMES |= {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}


class RealBlock(modern.ModernBlock):
    def make_attention(self, cfg: GroupedConfig) -> nn.Module:
        return GroupedQueryAttention(cfg)


class RealGPT(modern.ModernGPT):
    """Chapter 07's model with step 03's attention."""

    def make_block(self, cfg: GroupedConfig) -> nn.Module:
        return RealBlock(cfg)

    def states(self, idx: torch.Tensor) -> torch.Tensor:
        """Token ids (B, T) -> what the head reads (B, T, C): logits for 49,152 tokens are too many to want them all."""
        x = self.embed(idx)
        for block in self.blocks:
            x = block(x)
        return self.norm_f(x)


def read_config(file) -> GroupedConfig:
    """The shape of the model in a GGUF file. UserError if it isn't one that our blocks can be."""

    def field(name: str, default=None):
        value = file.metadata.get(f"llama.{name}", default)
        if value is None or isinstance(value, list):
            raise file.refusal(f"its metadata gives no single llama.{name}")
        return value

    architecture = file.metadata.get("general.architecture")
    if architecture != "llama":
        raise file.refusal(f"its architecture is {architecture}, and our blocks are llama's")
    heads = {"n_heads": field("attention.head_count"), "d_model": field("embedding_length")}
    heads["n_kv_heads"] = field("attention.head_count_kv", heads["n_heads"])
    size = {"block_size": field("context_length"), "n_layers": field("block_count")}
    details = {"norm_eps": field("attention.layer_norm_rms_epsilon"), "rope_base": field("rope.freq_base", 1e4)}
    try:
        cfg = GroupedConfig(**heads, **size, **details, d_hidden=field("feed_forward_length"))
    except ValueError as error:
        raise file.refusal(str(error)) from None
    known = {"rope.dimension_count": cfg.head_dim, "attention.key_length": cfg.head_dim}
    for name, ours in (known | {"rope.scaling.type": "none", "expert_count": 0}).items():
        if field(name, ours) != ours:
            raise file.refusal(f"its llama.{name} is {field(name)}, and our blocks can only have {ours}")
    return cfg


def slots(model: nn.Module) -> dict[str, torch.Tensor]:
    """Their name of every tensor -> the place in our parameters (a view) that it belongs in."""
    places = {"token_embd.weight": model.token_embedding.weight, "output_norm.weight": model.norm_f.weight}
    if model.lm_head.weight is not model.token_embedding.weight:
        places["output.weight"] = model.lm_head.weight
    for i, block in enumerate(model.blocks):
        for theirs, ours in BLOCK_NAMES.items():
            places[f"blk.{i}.{theirs}.weight"] = block.get_submodule(ours).weight
        H, G, D = block.attn.n_heads, block.attn.n_kv_heads, block.attn.head_dim
        for letter, rows in zip("qkv", block.attn.qkv.weight.split([H * D, G * D, G * D])):
            places[f"blk.{i}.attn_{letter}.weight"] = rows
    return places


@torch.no_grad()
def load_model(file, model_class: type[nn.Module] = RealGPT) -> nn.Module:
    """Our model with the numbers of a GGUF file. UserError for a tensor that is missing, left over or misshapen."""

    def shape(name: str) -> tuple[int, ...]:
        if name not in file.tensors:
            raise file.refusal(f"it lacks the tensor {name}")
        return file.tensors[name].shape

    model = model_class(read_config(file), vocab_size=shape("token_embd.weight")[0])
    if "output.weight" in file.tensors:  # a head of its own; without it, the embedding is the head
        model.lm_head.weight = nn.Parameter(torch.empty_like(model.token_embedding.weight))
    places = slots(model)
    for name, place in places.items():
        if shape(name) != place.shape:
            raise file.refusal(f"its tensor {name} has shape {shape(name)}, and in our model {tuple(place.shape)}")
    for name in file.tensors.keys() - places.keys():
        raise file.refusal(f"our model has no place for its tensor {name}")
    for name, place in places.items():
        place.copy_(file.read(name))  # into the memory that is there, so what was tied stays tied
    return model.eval()


class HalfSplitAttention(GroupedQueryAttention):
    """RoPE on the channels (i, i + D/2) instead of (2i, 2i + 1): the other layout in use."""

    def turn(self, x: torch.Tensor, start: int) -> torch.Tensor:
        partners = x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)  # channels 0, D/2, 1, D/2 + 1, ...
        return super().turn(partners, start)  # scores don't mind the order, as queries and keys share it


def main() -> int:
    file, checks = step_01.WeightsFile(step_01.packaged_weights()), Checks()
    places = slots(model := load_model(file))
    ours = {p.untyped_storage().data_ptr(): name for name, p in model.named_parameters()}
    shown = [(name, place) for name, place in places.items() if "blk.7." in name or "blk" not in name]
    rows = [[name, ours[place.untyped_storage().data_ptr()], str(tuple(place.shape))] for name, place in shown]
    say(Table(["their tensor", "our parameter", "shape"], rows))

    filled = sum(place.numel() for place in places.values())
    checks.equal("parameters, and those that were filled", [gpt.count_parameters(model), filled], [134_515_008] * 2)
    checks.equal("head and embedding are one matrix", model.lm_head.weight is model.token_embedding.weight, True)
    checks.equal("their k in our qkv", model.blocks[7].attn.qkv.weight[576:768], file.read("blk.7.attn_k.weight"))

    # Which channels does RoPE pair up in this file? The metadata doesn't say; the loss does.
    ids = torch.tensor([step_02.Tokenizer(file).encode("".join(data.torch_docs())[-2000:])[:257]])
    with torch.inference_mode():
        right = model(ids[:, :-1], ids[:, 1:])[1].item()
        for block in model.blocks:
            block.attn.__class__ = HalfSplitAttention
        wrong = model(ids[:, :-1], ids[:, 1:])[1].item()
    checks.between("loss on 256 tokens, neighbours paired", right, 0, 3)
    checks.between("loss, the two halves paired", wrong, right + 1, 11)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
