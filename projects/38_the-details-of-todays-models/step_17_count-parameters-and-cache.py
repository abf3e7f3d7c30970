"""Step 17: count parameters and cache.

How much memory does a model need? Its parameters stand there once. The cache (the keys and values
of all past tokens) grows with the text, and there is one for each text that is being written. Of
one token a layer keeps 2 · key/value heads · head_dim numbers, of two bytes each in bfloat16. In
the first models there were as many key/value heads as query heads. Three details made it less:

- Grouped heads: several query heads share one key/value head. Llama 3 has 8 for 32.
- Windows: a layer that sees 4,096 positions has no use for older ones.
- Latent attention: the keys and values of all heads are made of one short vector (step 11).

To count, nothing has to be stored. PyTorch's meta device makes tensors that have a shape and no
content, so a model of 671 billion parameters fits on a laptop.

    python step_17_count-parameters-and-cache.py

draws outputs/step_17.png: what each model keeps of a text of 32,768 tokens. (Some were not made to
read so far; it is what they would need.) The shapes are those that the makers published.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, figures
from shared.checks import Checks
from shared.console import Table, say

gpt = chapters.load_build(5)
build = chapters.load_build(38)  # the finished chapter: what is not on this page
DetailedConfig = build.DetailedConfig
DetailedGPT = build.DetailedGPT
PUBLISHED = build.PUBLISHED
RECIPES = build.RECIPES

# ---------------------------------------------------------------- the idea


def at_published_shape(name: str, **changes) -> DetailedGPT:
    """A recipe's model as it was published, on the meta device: shapes without numbers."""
    published = PUBLISHED[name]
    cfg = DetailedConfig(**RECIPES[name].changes | published.shape | changes)
    with torch.device("meta"):
        return DetailedGPT(cfg, published.vocab_size)


def cache_bytes(model: DetailedGPT, n_positions: int, bytes_each: int = 2) -> int:
    """What a cache of n_positions takes; with a window, a layer has no use for older ones."""
    n_numbers = 0
    for block in model.blocks:
        kept = min(n_positions, block.attn.cfg.window or n_positions)
        n_numbers += kept * block.attn.n_cached
    return bytes_each * n_numbers


LONG_TEXT = 32_768  # positions


def counts(name: str, **changes) -> dict[str, int]:
    """Parameters, and the bytes of a cache for one token and for a long text."""
    model = at_published_shape(name, **changes)
    return {
        "stored": gpt.count_parameters(model),
        "token": cache_bytes(model, 1),
        "text": cache_bytes(model, LONG_TEXT),
    }


def counts_with_experts(name: str) -> dict[str, int]:
    """The same of a model with experts, sooner: DeepSeek-V3's are 45,000 matrices, slow to make.

    All are equally large. So two models, with one and with two in each layer, tell the rest.
    """
    few = {"top_k": 1, "n_groups": 1, "top_groups": 1}
    one = counts(name, n_experts=1, **few)
    two = counts(name, n_experts=2, **few)
    each = two["stored"] - one["stored"]  # one expert more in each layer
    n_more = PUBLISHED[name].shape["n_experts"] - 1
    return one | {"stored": one["stored"] + n_more * each}


# ---------------------------------------------------------------- look at it


def kind(name: str) -> str:
    """The detail that makes a model's cache small, for its colour in the picture."""
    shape = PUBLISHED[name].shape
    if RECIPES[name].changes.get("attention") == "latent":
        return "latent attention"
    if "window" in RECIPES[name].changes:
        return "windows"
    return "grouped heads" if shape["n_kv_heads"] < shape["n_heads"] else "all heads"


def draw_picture(found: dict[str, dict[str, int]]) -> Path:
    """A dot for each model: the cache of a long text, the largest on top."""
    figure = figures.new_figure(8, 5)
    axes = figure.subplots()
    kinds = ("all heads", "grouped heads", "windows", "latent attention")
    for row, (name, count) in enumerate(found.items()):
        colour = figures.COLOURS[kinds.index(kind(name))]
        gigabytes = count["text"] / 1e9
        axes.plot((0.1, gigabytes), (row, row), color="0.9", zorder=0)
        axes.plot(gigabytes, row, "o", color=colour)
        axes.annotate(f"{gigabytes:.2g}", (gigabytes, row), (8, -4), textcoords="offset points")
    for name, colour in zip(kinds, figures.COLOURS):
        axes.plot([], [], "o", color=colour, label=name)
    axes.set_yticks(range(len(found)), [PUBLISHED[name].name for name in found])
    axes.set(xscale="log", xlim=(0.1, 100))
    axes.set_xticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
    axes.invert_yaxis()
    figures.label(axes, "Cache of 32,768 tokens", "gigabytes")
    return figures.save(figure, __file__)


def main() -> int:
    found = {}
    for name in RECIPES:
        has_experts = "n_experts" in PUBLISHED[name].shape
        found[name] = counts_with_experts(name) if has_experts else counts(name)
    found = dict(sorted(found.items(), key=lambda item: -item[1]["text"]))
    rows = []
    for name, count in found.items():
        stored = f"{count['stored'] / 1e9:.2f}"
        gigabytes = f"{count['text'] / 1e9:.2f}"
        rows.append([PUBLISHED[name].name, stored, f"{count['token']:,}", gigabytes])
    headers = ["model", "parameters,\nbillions", "cache, bytes\na token"]
    say(Table([*headers, f"GB for\n{LONG_TEXT:,}"], rows))
    say("\nDeepSeek-V3 is by far the largest, and keeps half of what Llama-3.1-8B does.")
    say(f"The picture is {draw_picture(found)}.")

    checks = Checks()
    checks.equal("GPT-2's parameters", found["gpt2"]["stored"], 124_439_808)
    checks.equal("Llama-3.1-8B's", found["llama3"]["stored"], 8_030_261_248)
    checks.equal("DeepSeek-V3's cache", found["deepseek-v3"]["token"], 2 * 61 * 576)
    kept = 21 * 4_096 + 21 * LONG_TEXT  # of Gemma 2's 42 layers half have a window
    checks.equal("Gemma-2-9B's, long", found["gemma2"]["text"], 2 * kept * 2 * 8 * 256)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
