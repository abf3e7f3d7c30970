"""Step 08: start small.

Step 06's model has whatever values torch gave it. Here every matrix starts as N(0, σ²), biases at 0, gains at 1. A
good start knows nothing: it finds every token equally likely and pays ln V. Behind a unit-RMS norm each logit is a
sum of d products, of variance d·σ², and that costs d·σ²/2 more (the mean of e^z is e^(variance/2)). So σ must be
small: GPT-2 takes 0.02.

It leaves out that depth adds up (step 09).

    python step_08_start-small.py

It holds the first loss to ln V + d·σ²/2 over widths and σ, tied and untied, beside torch's defaults, and draws it to
outputs/first-loss.png. About 5 seconds.
"""

import math
import sys
from pathlib import Path

import torch
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import files, chapters, cli, console, figures
from shared.checks import Checks
from shared.randomness import generator

step_06 = chapters.load_step(5, 6)
GPT, GPTConfig = step_06.GPT, step_06.GPTConfig

V, B, T = 4096, 64, 32
WIDTHS, SIGMAS = (64, 128, 256), (0.01, 0.02, 0.05, 0.1)


def start_small(model: nn.Module, seed: int, std: float = 0.02) -> None:
    """N(0, std²) for every matrix, biases 0, gains 1. Each parameter has random numbers of its own, by its name."""
    for name, p in model.named_parameters():
        if p.dim() == 1:
            nn.init.zeros_(p) if name.endswith("bias") else nn.init.ones_(p)
        else:
            nn.init.normal_(p, std=std, generator=generator(seed, name, tuple(p.shape)))


def law(vocab_size: int, d_model: int, std: float) -> float:
    """The first loss in nats of a head of std `std` behind a unit-RMS norm."""
    return math.log(vocab_size) + d_model * std**2 / 2


@torch.no_grad()
def first_loss(model: nn.Module, vocab_size: int) -> tuple[float, float]:
    """The loss on random tokens, its mean over all V targets, and how often the likeliest token is the current one."""
    idx = torch.randint(vocab_size, (B, T), generator=generator(1, "first loss"))
    logits, _ = model(idx)
    loss = (logits.logsumexp(-1) - logits.mean(-1)).mean()  # -log p(target) = log Σ exp(logits) - the target's logit
    return loss.item(), (logits.argmax(-1) == idx).double().mean().item()


def untie(model: nn.Module) -> None:
    model.lm_head = nn.Linear(model.cfg.d_model, model.vocab_size, bias=False)


def torch_defaults(seed: int, tied: bool) -> nn.Module:
    """The tiny model as torch starts it: N(0, 1) for embeddings, uniform in ±1/√fan_in for Linear layers."""
    with torch.random.fork_rng(devices=[]):  # torch's own start takes no generator
        torch.manual_seed(seed)
        model = GPT(GPTConfig(), 48)
        if not tied:
            untie(model)
    return model


def draw_losses(measured: dict[tuple[bool, int, float], float]) -> object:
    figure = figures.new_figure(8, 4.8)
    axes = figure.subplots()
    line = [0.01 * 1.06**i for i in range(41)]
    for d, colour in zip(WIDTHS, figures.COLOURS):
        axes.plot(line, [law(V, d, s) for s in line], color=colour, label=f"ln V + d·σ²/2, d = {d}")
        for tied, marker in ((True, "o"), (False, "x")):
            losses = [measured[tied, d, s] for s in SIGMAS]
            axes.plot(SIGMAS, losses, marker, color=colour, label=f"measured, {'tied' if tied else 'untied'}, d = {d}")
    axes.axhline(math.log(V), color="0.5", linewidth=1)
    axes.set_xscale("log")
    axes.set_xticks(SIGMAS, [str(s) for s in SIGMAS])
    axes.minorticks_off()
    axes.set_xlabel("σ of every matrix")
    axes.set_ylabel("first loss, nats per token")
    axes.set_title(f"The first loss of a fresh model (grey: ln {V} = {math.log(V):.2f})", loc="left", fontsize=11)
    axes.legend(frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def main() -> int:
    checks, measured, rows = Checks(), {}, []
    for d in WIDTHS:
        for std in SIGMAS:
            for tied in (True, False):
                model = GPT(GPTConfig(d_model=d), V)
                if not tied:
                    untie(model)
                start_small(model, seed=1, std=std)
                measured[tied, d, std], copies = first_loss(model, V)
                if tied:
                    rows.append(
                        [str(d), str(std), f"{law(V, d, std):.3f}", f"{measured[True, d, std]:.3f}", f"{copies:.0%}"]
                    )
            rows[-1].insert(4, f"{measured[False, d, std]:.3f}")
    console.say(
        f"First loss at V = {V}, two layers; the last column is how often a tied model's favourite is its input:"
    )
    console.say(console.Table(["d", "σ", "law", "tied", "untied", "tied copies"], rows))
    for tied in (True, False):
        gap = max(SIGMAS, key=lambda s: max(abs(measured[tied, d, s] - law(V, d, s)) for d in WIDTHS))
        d = max(WIDTHS, key=lambda d: abs(measured[tied, d, gap] - law(V, d, gap)))
        name = "tied" if tied else "untied"
        checks.close(f"first loss, {name}, furthest off (d {d}, σ {gap})", measured[tied, d, gap], law(V, d, gap), 0.03)

    defaults = {tied: first_loss(torch_defaults(1, tied), 48) for tied in (True, False)}
    console.say(
        f"\ntorch's defaults at d = 64, V = 48 start at {defaults[True][0]:.2f} tied, {defaults[False][0]:.2f} untied, "
        f"where ln V is {math.log(48):.2f}. Tied, the favourite is the input at {defaults[True][1]:.0%} of positions."
    )
    own_logit = 64 / math.sqrt(2)  # of token plus position at unit RMS, with the token's own row
    checks.close("defaults, tied: the own logit, d/√2, lost to others", defaults[True][0], own_logit * 47 / 48, 1.0)
    checks.close("defaults, untied: a head of variance 1/(3d) adds 1/6", defaults[False][0], math.log(48) + 1 / 6, 0.1)

    folder = Path(__file__).parent / "outputs"
    files.claim_folder(folder)
    files.write_bytes(folder / "first-loss.png", figures.png(draw_losses(measured)))
    console.say(f"drawn to {folder / 'first-loss.png'}")
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
