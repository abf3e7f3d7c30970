"""Step 04: see only a window.

Must every layer see the whole text? When a model writes, a layer that sees everything needs the
keys and values of all past tokens, so its cache grows with the text. A layer with a window of W
sees the token itself and the W - 1 before it. Its cache never holds more than W tokens.

News from further back still arrives. In the first layer a token reads its window. In the second it
reads tokens that have read theirs, and so on. After L layers it may have news of what stands
L · (W - 1) tokens back: 131,040 in Mistral 7B v0.1, which has 32 layers with windows of 4,096
(Jiang et al. 2023, section 2). But what passes through many layers may get lost. So most models
with windows keep some full layers, which see everything. Gemma 3 1B repeats a pattern of six: five
layers with a window of 512, then a full one.

The config has the pattern, as a tuple of kinds of layers. layer_config() makes each layer's own
config of it, and attention sees only that one.

    python step_04_see-only-a-window.py

draws outputs/step_04.png. In step 01 attention uses visible().
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console, figures
from shared.checks import Checks

build = chapters.load_build(38)
DetailedConfig = build.DetailedConfig
blind_layer = build.blind_layer  # a layer that sees everything and has no positions; in step 07

# ---------------------------------------------------------------- the idea


def visible(n_queries: int, n_keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Which query may see which key, (n_queries, n_keys) bool.

    The queries are the last of the n_keys positions. A window of 3 is a token and the two before.
    """
    key = torch.arange(n_keys, device=device)
    query = key[n_keys - n_queries :, None]
    distance = query - key
    if window is None:
        return distance >= 0
    return (distance >= 0) & (distance < window)


def full_layer(cfg: DetailedConfig) -> dict:
    """A layer that sees everything before it."""
    return {"window": None}


def window_layer(cfg: DetailedConfig) -> dict:
    """A layer that keeps the config's window."""
    if cfg.window_rope_base is None:
        return {}
    return {"rope_base": cfg.window_rope_base, "rope_scaling": None}  # steps 07, 08


LAYER_KINDS = {"full": full_layer, "window": window_layer, "no positions": blind_layer}


def layer_config(cfg: DetailedConfig, layer: int) -> DetailedConfig:
    """The config of one layer, counted from 0: what its kind and its place change is filled in."""
    kind = cfg.layer_kinds[layer % len(cfg.layer_kinds)]
    changes = LAYER_KINDS[kind](cfg) | {"layer_kinds": (kind,)}
    if cfg.mlp_type == "moe":  # some models begin with layers that have no experts
        if cfg.n_dense_layers is not None and layer < cfg.n_dense_layers:
            changes["mlp_type"] = "swiglu"
        elif cfg.d_expert is not None:
            changes["d_hidden"] = cfg.d_expert
    return replace(cfg, **changes)


# ---------------------------------------------------------------- look at it

CPU = torch.device("cpu")
LENGTHS = (1, 512, 16_384, 32_768)  # tokens
FIELDS = build.RECIPES["gemma3"].changes | build.PUBLISHED["gemma3"].shape
GEMMA_3 = DetailedConfig(**FIELDS)  # of size 1B: 26 layers
PATTERNS = {
    "all layers full": ("full",),
    "one in six full": GEMMA_3.layer_kinds,
    "no layer full": ("window",),
}


def bytes_kept(layer_kinds: tuple[str, ...], n_tokens: int) -> int:
    """What the cache of Gemma 3 1B would take with these layers, two bytes a number."""
    cfg = replace(GEMMA_3, layer_kinds=layer_kinds)
    windows = [layer_config(cfg, layer).window for layer in range(cfg.n_layers)]
    tokens_kept = sum(min(n_tokens, window or n_tokens) for window in windows)  # over the layers
    numbers = 2 * cfg.n_kv_heads * cfg.head_dim  # of one token: a key and a value of each head
    return 2 * tokens_kept * numbers


def draw_picture(caches: dict[str, list[int]]) -> Path:
    figure = figures.new_figure(6, 3.4)
    axes = figure.subplots()
    for (name, each), colour in zip(caches.items(), figures.COLOURS):
        axes.plot(LENGTHS, [n / 1e6 for n in each], color=colour, label=name)
    figures.label(axes, "cache of Gemma 3 1B, MB", "tokens")
    axes.set_xticks(LENGTHS[1:], [f"{n:,}" for n in LENGTHS[1:]])
    return figures.save(figure, __file__)


def main() -> int:
    caches = {}
    for name, kinds in PATTERNS.items():
        caches[name] = [bytes_kept(kinds, n) for n in LENGTHS]
    full, mixed, _ = [each[-1] for each in caches.values()]
    console.say(f"picture: {draw_picture(caches)}\n")
    console.say(f"Look at 32,768 tokens: Gemma 3 1B keeps {mixed / 1e6:.0f} MB of keys and values.")
    console.say(f"With full layers alone it would keep {full / 1e6:.0f} MB.")

    checks = Checks()
    seen = visible(24, 24, 5, CPU)
    band = torch.ones(24, 24, dtype=torch.bool).tril().triu(-4)
    checks.equal("window 5, by torch", seen, band)
    # A product of matrices goes from a token to those it sees, and on to those that they see.
    paths = torch.linalg.matrix_power(seen.double(), 5)[23]
    checks.equal("5 layers: 20 back", 23 - paths.nonzero().min().item(), 20)
    checks.equal("22 windows, 4 full", mixed, 1024 * (22 * 512 + 4 * 32_768))
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
