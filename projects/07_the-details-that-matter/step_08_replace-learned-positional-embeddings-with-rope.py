"""Step 08: how can attention know how far apart two tokens are?

A score is the dot product of a query and a key, which does not know where the two tokens stand.
Chapter 05 added a learned vector for the position to each token's embedding. Rotary position
embedding (RoPE; Su et al. 2021) adds nothing; it turns. It takes the channels of a query two by two
and reads each pair (x0, x1) as the tip of a clock hand. The hand turns by its speed times the
position. Keys turn in the same way. Each pair has a speed of its own: the fastest comes round again
after about six tokens, so it hardly tells position 7 from 1. A slow hand tells them apart.

A score is a sum over the pairs. Each pair adds the length of the query's hand times the length of
the key's hand times the cosine of the angle between them. Move both tokens five positions on: both
hands turn by the same extra angle, so the angle between them stays. So only the distance counts.

    python step_08_replace-learned-positional-embeddings-with-rope.py

draws outputs/step_08.png. Step 12 trains with it.
Shapes: B batch, H heads, T positions, D = head_dim, so D/2 pairs.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console, figures
from shared.checks import Checks
from shared.randomness import generator

gpt = chapters.load_build(5)

# ---------------------------------------------------------------- the idea


def build_rope_cache(
    seq_len: int, head_dim: int, device: torch.device | str = "cpu", base: float = 10_000.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The table: cosine and sine of the angle of pair i at position t, each (T, D/2), float32.

    Pair i turns by base^(-2i/D) radians a position (Su et al. 2021, eq. 15); D must be even.
    """
    if head_dim % 2:
        raise ValueError(f"head_dim must be even for RoPE, got {head_dim}")
    pair = torch.arange(head_dim // 2, dtype=torch.float64)
    speed = base ** (-2 * pair / head_dim)  # radians a position: 1 for pair 0, then slower
    position = torch.arange(seq_len, dtype=torch.float64)
    angle = torch.outer(position, speed)
    # float64 until here: at position 100,000 an angle in float32 is off by some thousandths.
    return angle.cos().float().to(device), angle.sin().float().to(device)


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """A quarter turn of every pair: (x0, x1) becomes (-x1, x0). Its name is the usual one."""
    x0 = x[..., 0::2]
    x1 = x[..., 1::2]
    return torch.stack((-x1, x0), dim=-1).flatten(-2)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn row t of x (..., T, D) by row t of the table (eq. 34); ValueError if the table ends."""
    T = x.shape[-2]
    if T > cos.shape[0]:
        raise ValueError(f"{T} positions don't fit a RoPE table of {cos.shape[0]}")
    cos = cos[:T].repeat_interleave(2, dim=-1)  # (T, D): one angle for both channels of a pair
    sin = sin[:T].repeat_interleave(2, dim=-1)
    # Turning a pair: cos times the pair plus sin times its quarter turn.
    return (x * cos + rotate_half(x) * sin).to(x.dtype)


class RotaryAttention(gpt.CausalSelfAttention):
    """Chapter 05's attention with queries and keys turned. Values carry content, not position."""

    def __init__(self, cfg: gpt.GPTConfig):
        super().__init__(cfg)
        # Plain tensors: model.bfloat16() passes them by, and a rounded table would turn by wrong
        # angles. But model.to(device) passes them by too, so tables() moves them.
        # rope_base is a field of step 10's config.
        self.cos, self.sin = build_rope_cache(cfg.block_size, cfg.head_dim, base=cfg.rope_base)

    def tables(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin on the device of the input: moved there at the first call."""
        if self.cos.device != device:
            self.cos = self.cos.to(device)
            self.sin = self.sin.to(device)
        return self.cos, self.sin

    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x (B, T, C) -> queries, keys, values, each (B, H, T, D)."""
        cos, sin = self.tables(x.device)
        q, k, v = super().heads(x)
        return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v


# ---------------------------------------------------------------- look at it


def scores_by_distance(key_position: int, n: int = 64, head_dim: int = 32) -> torch.Tensor:
    """Scores (n,) of one key at key_position and one query 0, 1, ... n - 1 positions later."""
    draw = generator(1, "step_08", "score")
    key = torch.randn(head_dim, generator=draw)
    query = key + 0.5 * torch.randn(head_dim, generator=draw)  # a query that looks for this key
    cos, sin = build_rope_cache(key_position + n, head_dim)
    cos = cos[key_position:]  # now row 0 belongs to key_position
    sin = sin[key_position:]
    turned_key = apply_rope(key[None], cos, sin)[0]
    return apply_rope(query.expand(n, head_dim), cos, sin) @ turned_key


def draw_picture() -> Path:
    """Left: three pairs at positions 0 to 15. Right: the score by distance, early and late."""
    figure = figures.new_figure(9, 2.8)
    panels = figure.subplots(1, 4, width_ratios=(1, 1, 1, 2.4))
    cos, sin = build_rope_cache(16, 32)
    for axes, pair in zip(panels, (0, 4, 8)):
        for t in range(16):
            axes.plot((0, cos[t, pair]), (0, sin[t, pair]), color="C0", alpha=0.2 + 0.05 * t)
        axes.set(title=f"pair {pair}", xlim=(-1.1, 1.1), ylim=(-1.1, 1.1), aspect="equal")
        axes.set_axis_off()
    panels[3].plot(scores_by_distance(0), linewidth=5, alpha=0.4, label="early")
    panels[3].plot(scores_by_distance(5_000), label="5,000 tokens on")
    panels[3].set(title="score of a query and a key", xlabel="distance in tokens", ylim=(-8, 28))
    panels[3].legend(loc="lower right")
    return figures.save(figure, __file__)


def main() -> int:
    console.say(f"picture: {draw_picture()}")
    console.say("Left: a hand at positions 0 to 15; it turns fast in pair 0, hardly in pair 8.")
    console.say("Right: the curves lie on each other: 5,000 tokens on, the score is the same. Its")
    console.say("waves are pair 2, which has the longest hands here; it comes round in 20 tokens.")

    checks = Checks()
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    turned = apply_rope(x.expand(4, 4), *build_rope_cache(seq_len=4, head_dim=4))
    by_formula = torch.tensor([-1.2722325, -1.8388650, 2.8786681, 4.0881866])
    checks.close("[1, 2, 3, 4] at position 3", turned[3], by_formula, 1e-6)
    checks.close("turning keeps the length", turned.norm(dim=-1), x.norm().expand(4), 1e-6)
    late = scores_by_distance(5_000)
    checks.close("5,000 tokens on: same scores", late, scores_by_distance(0), 2e-5)
    checks.close("position 0 turns nothing", turned[0], x, 0)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
