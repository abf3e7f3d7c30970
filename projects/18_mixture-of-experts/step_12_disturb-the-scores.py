"""Step 12: disturb the scores.

A router's scores decide which experts compute a token. The second and the third best are often
close, so a small disturbance sends the token elsewhere. There are two kinds.

Rounding: bfloat16 keeps 8 bits of a number. Mixed-precision training (autocast) rounds to it the
factors and the result of every matrix product. In the router these are tokens, weights and scores,
each off by up to 1 part in 256, so that close scores become equal or change places. The router must
be exempt: it computes in float32, which costs little, as its matrix is small.

Noise: some noise in training lets experts be tried that wouldn't be chosen. The Switch Transformer
multiplies the router's input by 1 ± jitter. It belongs in training only, and on a copy of the
input: the experts compute with the tokens as they are.

Rounding also disturbs the gates, and the more, the larger the scores: a score of 100.2 becomes 100,
and its e^score falls by 18 %. The z-loss, added like the balance loss, keeps scores small.

    python step_12_disturb-the-scores.py

draws outputs/step_12.png: how many tokens go elsewhere, by the size of the disturbance.

Shapes: N tokens, C = d_model, E experts, k = top_k.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console, figures
from shared.checks import Checks
from shared.randomness import generator

modern = chapters.load_build(7)
top_k_mask = chapters.load_step(18, 1).top_k_mask
random_moe = chapters.load_step(18, 3).random_moe

JITTERS = (0.003, 0.01, 0.03, 0.1, 0.3)

# ---------------------------------------------------------------- the idea


class JitteredMoE(modern.MoE):
    """Chapter 07's layer with Switch's noise (Fedus et al. 2022, section 2.4), in training only."""

    jitter = 0.3
    draw: torch.Generator | None = None  # where the noise comes from; None: PyTorch's own

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens x (N, C) -> gates (N, k) and the experts' numbers (N, k)."""
        if self.training:
            noise = 2 * torch.rand(x.shape, generator=self.draw) - 1
            x = x * (1 + self.jitter * noise)  # a new x: x *= ... would change the experts' input
        return super().route(x)


def router_z_loss(logits: torch.Tensor) -> torch.Tensor:
    """The mean of logsumexp(logits)² over the tokens of logits (N, E) (Zoph et al. 2022, eq. 5)."""
    return logits.logsumexp(-1).square().mean()


def moved(chosen: torch.Tensor, exact: torch.Tensor) -> float:
    """The part of the tokens that go to other experts: chosen (N, k) numbers, exact (N, E) bool."""
    ours = torch.zeros_like(exact).scatter(1, chosen, True)  # the numbers as (N, E) bool
    return (ours != exact).any(1).double().mean().item()


# ---------------------------------------------------------------- look at it


def jittered(jitter: float) -> JitteredMoE:
    cfg = modern.ModernConfig(d_model=24, n_heads=1, d_hidden=7, n_experts=16, top_k=3)
    moe = JitteredMoE(cfg)
    moe.load_state_dict(random_moe(16, 3, 24, 7).state_dict())
    moe.jitter = jitter
    moe.draw = generator(1, "step_12", "jitter")
    return moe.train()


def moved_by_noise(jitter: float, x: torch.Tensor, exact: torch.Tensor) -> float:
    _, chosen = jittered(jitter).route(x)
    return moved(chosen, exact)


def draw_picture(noisy: list[float], rounded: float) -> Path:
    figure = figures.new_figure(7, 3.6)
    axes = figure.subplots()
    axes.plot(JITTERS, [100 * part for part in noisy], "o-", label="noise on the input")
    axes.axhline(100 * rounded, linestyle="--", color="C1", label="scores in bfloat16")
    axes.set(xscale="log", yscale="log", xlabel="jitter", ylabel="% of tokens")
    axes.set_title("Tokens that go to other experts")
    axes.legend()
    return figures.save(figure, __file__)


def main() -> int:
    moe = random_moe(16, 3, 24, 7)
    x = torch.randn(4096, 24, generator=generator(1, "step_12"))
    router = moe.router.weight
    exact = top_k_mask(x.double() @ router.double().T, 3)
    coarse = (x.bfloat16() @ router.bfloat16().T).topk(3).indices
    rounded = moved(coarse, exact)
    noisy = [moved_by_noise(jitter, x, exact) for jitter in JITTERS]
    rows = [["bfloat16", f"{rounded:.1%}"]]
    rows += [[f"jitter {jitter:g}", f"{part:.1%}"] for jitter, part in zip(JITTERS, noisy)]
    console.say(console.Table(["scores disturbed by", "tokens sent elsewhere"], rows))
    console.say("\nLook at the first row: rounding alone misplaces about one token in a hundred.")
    console.say(f"The picture is {draw_picture(noisy, rounded)}.")

    checks = Checks()
    checks.between("tokens that bfloat16 sends elsewhere", rounded, 0.001, 0.05)
    with torch.autocast("cpu", torch.bfloat16):
        _, chosen = moe.route(x)
    checks.equal("chapter 07's router under autocast", moved(chosen, exact), 0.0)
    _, chosen = jittered(0.3).eval().route(x)
    checks.equal("noise in evaluation: none", moved(chosen, exact), 0.0)
    one_mlp = jittered(0.3)
    for expert in one_mlp.experts:
        expert.load_state_dict(moe.experts[0].state_dict())
    checks.close("equal experts: noise changes nothing", one_mlp(x), moe.experts[0](x), 1e-4)
    checks.close("z-loss of 8 zeros: (ln 8)²", router_z_loss(torch.zeros(5, 8)), 4.324077, 1e-6)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
