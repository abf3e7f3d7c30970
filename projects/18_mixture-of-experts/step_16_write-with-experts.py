"""Step 16: write with experts.

To generate text is to predict one more token again and again, so a token's output must not depend
on tokens that come later. Two of this chapter's layers are not safe without care.

Expert choice (step 06) looks at later tokens. It can't generate at all, and generate() refuses.

A Switch in training drops tokens when an expert is full (step 05). Which tokens come later doesn't
matter to it, but how many there are does: the capacity grows with their number. In generation a
prompt would be read in one way alone and in another beside other prompts. So generate() puts the
model into evaluation mode, where nothing is dropped, and puts it back afterwards.

    python step_16_write-with-experts.py

prints how far a text's outputs depend on its company, in both modes.

Shapes: B batch, T positions, V = vocab_size.
"""

import sys
from pathlib import Path

import torch
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console
from shared.checks import Checks
from shared.randomness import generator

gpt = chapters.load_build(5)
SparseConfig = chapters.load_step(18, 5).SparseConfig
SparseGPT = chapters.load_step(18, 8).SparseGPT

# ---------------------------------------------------------------- the idea


def generate(
    model: nn.Module, idx: torch.Tensor, max_new_tokens: int, **options
) -> torch.Tensor:
    """Chapter 05's generate() and its options, in evaluation mode, where no token is dropped.

    ValueError for a model with a layer that isn't causal.
    """
    for module in model.modules():
        if not getattr(module, "causal", True):
            name = type(module).__name__
            raise ValueError(f"{name} can't generate: it chooses by later tokens, and has none yet")
    was_training = model.training
    model.eval()
    try:
        return gpt.generate(model, idx, max_new_tokens, **options)
    finally:
        model.train(was_training)


# ---------------------------------------------------------------- look at it


def make(router_type: str, top_k: int) -> SparseGPT:
    """A model with random weights that are large enough to tell experts apart."""
    cfg = SparseConfig(router_type=router_type, top_k=top_k, capacity_factor=1.0)
    model = SparseGPT(cfg, vocab_size=95)
    gpt.init_parameters(model, seed=1, std=0.2)
    return model


@torch.no_grad()
def dependence(model: nn.Module, texts: torch.Tensor) -> list[float]:
    """How far the last text's first 8 outputs move: without other texts, without later tokens."""
    logits, _ = model(texts)
    together = logits[-1, :8]
    logits, _ = model(texts[-1:])
    alone = logits[0, :8]
    logits, _ = model(texts[-1:, :8])
    cut = logits[0]
    by_company = (together - alone).abs().max().item()
    by_later = (alone - cut).abs().max().item()
    return [by_company, by_later]


def main() -> int:
    texts = torch.randint(95, (6, 32), generator=generator(1, "step_16"))
    switch = make("switch", 1)
    found = {
        "Switch in training mode": dependence(switch.train(), texts),
        "Switch in evaluation mode": dependence(switch.eval(), texts),
        "top-2 in either mode": dependence(make("top_k", 2), texts),
        "expert choice": dependence(make("expert_choice", 2).eval(), texts),
    }
    rows = [[name, *(f"{gap:.1e}" for gap in gaps)] for name, gaps in found.items()]
    console.say("How far the outputs of a text's first eight tokens move:")
    console.say()
    console.say(console.Table(["model", "without other texts", "without later tokens"], rows))
    console.say("\nCompare the first two rows: in evaluation only rounding is left, near 1e-6.")

    checks = Checks()
    moved = {name: max(gaps) for name, gaps in found.items()}
    checks.between("Switch, training: outputs move", moved["Switch in training mode"], 0.01, 100)
    checks.close("Switch, evaluation: they don't", moved["Switch in evaluation mode"], 0, 1e-4)
    checks.close("top-2: they don't", moved["top-2 in either mode"], 0, 1e-4)
    written = generate(switch.train(), texts[:, :8], 8, temperature=0)
    one = generate(switch, texts[-1:, :8], 8, temperature=0)
    checks.equal("a prompt alone and in a batch", one[0], written[-1])
    checks.equal("afterwards: training mode, as before", switch.training, True)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
