"""Step 04: instrument hidden-state statistics.

Step 03 put norms into the model. This step looks at what they have to deal with: the residual stream, caught by
hooks at every point where a norm reads it, summed up in five numbers, and sampled while the model trains. Looking must
not touch: the losses with and without it are the same to the last bit.

    python step_04_instrument-hidden-state-statistics.py

prints the stream of a LayerNorm and of an RMSNorm model over 60 training steps, and the checks; about six seconds.

Shapes: B batch, T positions, C = d_model, L layers.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console, data, training
from shared.checks import Checks
from shared.kernels import fastest_float32
from shared.randomness import generator
from shared.training import TrainingSettings

gpt = chapters.load_build(5)
step_03 = chapters.load_step(7, 3)


def tensor_stats(x: torch.Tensor) -> dict[str, float]:
    """mean, var, min, max and kurtosis of all entries of x.

    kurtosis = mean((x - mean)⁴) / var². It is 3 for Gaussian noise, and large when a few entries
    are much larger than the rest. For a tensor whose entries are all equal it is given as 0.
    """
    x = x.detach()
    x = x.float() if x.device.type == "mps" else x.double()  # Apple's GPUs have no float64
    centred = x - x.mean()
    var = centred.square().mean()
    kurtosis = torch.where(var > 0, (centred * var.rsqrt()).pow(4).mean(), 0)
    # One tolist(), not five: each waits for the GPU to finish.
    values = torch.stack((x.mean(), var, x.min(), x.max(), kurtosis)).tolist()
    return dict(zip(("mean", "var", "min", "max", "kurtosis"), values))


@torch.no_grad()
def stream_stats(model: gpt.GPT, idx: torch.Tensor) -> dict[str, dict[str, float]]:
    """tensor_stats of the residual stream at its 2L + 1 points, for one batch of token ids (B, T).

    A point is named after the layer that wrote to the stream last. At each point a norm reads the
    stream, so a hook on that norm sees it. (A hook is a function that PyTorch calls when a module
    runs.)
    """
    points = ["embedding"]
    norms = []
    for i, block in enumerate(model.blocks):
        points += [f"blocks.{i}.attn", f"blocks.{i}.mlp"]
        norms += [block.norm1, block.norm2]
    norms.append(model.norm_f)
    stats = {}

    def keep(norm: nn.Module, inputs: tuple) -> None:
        point = points[len(stats)]  # the norms run in the order of the points
        stats[point] = tensor_stats(inputs[0])

    hooks = [norm.register_forward_pre_hook(keep) for norm in set(norms)]  # one hook on each norm
    try:
        model(idx)
    finally:
        for hook in hooks:
            hook.remove()
    return stats


def check_values(checks: Checks) -> None:
    """Distributions whose moments are known, and torch's own statistics."""
    draw = generator(1, "step_04")
    x = torch.randn(3, 5, 7, generator=draw)
    theirs = (
        x.mean(),
        x.var(unbiased=False),
        x.min(),
        x.max(),
        ((x - x.mean()) ** 4).mean() / x.var(unbiased=False) ** 2,
    )
    checks.close("all five against torch's", torch.tensor([*tensor_stats(x).values()]), torch.stack(theirs), 1e-5)
    signs = torch.tensor([1.0, -1.0]).repeat(16)
    checks.close("kurtosis of ±1", tensor_stats(signs)["kurtosis"], 1, 1e-15)
    gaussian = torch.randn(1_000_000, generator=draw)
    checks.close("of a million Gaussians: 3 ± 4√(24/n)", tensor_stats(gaussian)["kurtosis"], 3, 4 * (24 / 1e6) ** 0.5)
    even = torch.linspace(-1, 1, 100_001)
    checks.close("of evenly spread entries: 9/5", tensor_stats(even)["kurtosis"], 9 / 5, 1e-4)
    spike = torch.eye(576)[3]
    checks.close("of one spike among n = 576: n − 2 + 1/(n − 1)", tensor_stats(spike)["kurtosis"], 574 + 1 / 575, 1e-9)
    flat = tensor_stats(torch.full((4, 6), 0.1, dtype=torch.float16))
    checks.close(
        "a constant: mean, var, kurtosis", [flat[k] for k in ("mean", "var", "kurtosis")], [0.0999756, 0, 0], 1e-7
    )
    large = tensor_stats(6e4 * signs.half())  # whose squares float16 can't hold
    checks.close("float16 entries of ±6e4: var, kurtosis", [large["var"], large["kurtosis"]], [3.6e9, 1], 1e-6)


def observe(model: gpt.GPT, idx: torch.Tensor) -> dict:
    """What the training loop asks for from time to time."""
    return {"stream": stream_stats(model, idx)}


def train(norm_type: str, corpus: data.Corpus, stats_every: int, steps: int = 60) -> training.History:
    """A small model with that norm, trained; its stream is sampled every stats_every steps (0: never)."""
    model = step_03.NormGPT(step_03.NormConfig(norm_type=norm_type), corpus.vocab_size)
    gpt.init_parameters(model, seed=1)
    settings = TrainingSettings(steps=steps, observe_every=stats_every)
    return training.train(model, corpus, settings, seed=1, observe=observe)


def show_stream(history: training.History) -> None:
    """std and kurtosis by point (down) and step (across)."""
    samples = {sample["step"]: sample["stream"] for sample in history.observations}
    rows = [
        [point, *(f"{s[point]['var'] ** 0.5:.3f}" for s in samples.values())]
        + [f"{s[point]['kurtosis']:.2f}" for s in samples.values()]
        for point in history.observations[0]["stream"]
    ]
    headers = [f"{what} at {step}" for what in ("std", "kurtosis") for step in samples]
    console.say(console.Table(["stream after", *headers], rows))


def main() -> int:
    checks = Checks()
    check_values(checks)
    corpus = data.load_corpus("docs", "char", 32)
    corpus = replace(corpus, validation=corpus.validation[:5000])  # only the training is of interest here
    console.say("The residual stream of a two-layer model, by what was last added to it and by training step")
    with fastest_float32():
        for norm_type in ("layernorm", "rmsnorm"):
            watched, alone = train(norm_type, corpus, stats_every=20), train(norm_type, corpus, stats_every=0)
            console.say(f"\nWith {norm_type}:")
            console.say()
            show_stream(watched)
            same = torch.equal(torch.tensor(watched.losses), torch.tensor(alone.losses))
            seen = f"{sum(a == b for a, b in zip(watched.losses, alone.losses))} of {len(alone.losses)} losses equal"
            checks.true(f"{norm_type}, watched or not", seen, "all, bit for bit", same)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
