"""Step 07: tie the embeddings.

Step 06 gave the head the embedding's matrix. They are one Parameter, not two equal ones: it is stored once, updated
once, and its gradient is the sum of what it gets as embedding and as head. A tie is easily lost without any error,
and the model then trains on as a larger one, or half of it is never trained. check_tie() asks.

It leaves out whether tying is good for the loss; it is what GPT-2 does (Press & Wolf 2017).

    python step_07_tie-the-embeddings.py

It counts what tying saves, checks the gradient, and loses the tie in five ways, each of them caught. About 2 seconds.
"""

import copy
import sys
from pathlib import Path

import torch
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console
from shared.checks import Checks
from shared.randomness import generator

step_06 = chapters.load_step(5, 6)
GPT, GPTConfig, count_parameters = step_06.GPT, step_06.GPTConfig, step_06.count_parameters


def check_tie(model: nn.Module, state: dict[str, torch.Tensor] | None = None) -> None:
    """Raise ValueError if embedding and head are not one tensor, or will not be given one value.

    The second is asked if `state`, a checkpoint about to be loaded, is given. Nobody else would
    complain. Two tensors drift apart in training. Of two values, the one loaded last wins.
    """
    embedding = model.token_embedding.weight
    head = model.lm_head.weight
    if embedding is not head:
        gap = ""
        if not embedding.is_meta and not head.is_meta:
            gap = f", up to {(embedding - head).abs().max():.3g} apart"
        raise ValueError(
            f"the tie is lost: token_embedding.weight and lm_head.weight are two tensors{gap}"
        )
    if state is None or "token_embedding.weight" not in state or "lm_head.weight" not in state:
        return
    first = state["token_embedding.weight"]
    last = state["lm_head.weight"]
    if not torch.equal(first, last):
        gap = (first - last).abs().max()
        raise ValueError(
            f"one matrix, two values: token_embedding.weight and lm_head.weight are {gap:.3g} apart"
        )


def small_model(std: float = 0.3) -> GPT:
    """A tied model in float64 whose parameters are all random."""
    model = GPT(GPTConfig(block_size=9, n_layers=2, n_heads=2, d_model=10), vocab_size=13).double()
    for name, p in model.named_parameters():
        nn.init.normal_(p, std=std, generator=generator(1, "step 07", name))
    return model


def untied(model: GPT) -> GPT:
    """The same numbers in two matrices."""
    model = copy.deepcopy(model)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return model


def half_deepcopied(model: GPT) -> GPT:
    """A model put together from another's parts, each deep-copied by itself."""
    other = small_model()
    other.token_embedding, other.lm_head = copy.deepcopy(model.token_embedding), copy.deepcopy(model.lm_head)
    return other


def checkpoint(model: GPT) -> dict[str, torch.Tensor]:
    """What a file holds that knows names and values, but no sharing: the tied matrix twice."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def loaded_by_assignment(model: GPT) -> GPT:
    """assign=True puts the checkpoint's tensors in the place of the Parameters, one name after the other."""
    other = small_model()
    other.load_state_dict(checkpoint(model), assign=True)
    return other


def brought_from_meta(model: GPT) -> GPT:
    """to_empty() makes a new tensor for each module that holds the shared one; then the checkpoint fills both."""
    with torch.device("meta"):
        other = GPT(model.cfg, model.vocab_size).double()
    other.to_empty(device="cpu").load_state_dict(checkpoint(model))
    return other


def main() -> int:
    checks = Checks()
    with torch.device("meta"):
        classic = GPT(GPTConfig(block_size=256, n_layers=4, n_heads=4, d_model=128), vocab_size=50_304)
    matrix, tied = classic.token_embedding.weight.numel(), count_parameters(classic)
    console.say(f"GPT-2's vocabulary, padded to 50,304, at width 128: {matrix:,} numbers. With four layers that makes")
    console.say(f"{tied:,} parameters tied and {tied + matrix:,} untied, of which one such matrix is about half.")
    checks.equal("50,304 x 128", matrix, 50_304 * 128)
    checks.between("its share of the untied model", matrix / (tied + matrix), 0.45, 0.5)

    model = small_model()
    two = untied(model)
    idx, targets = (torch.randint(13, (2, 7), generator=generator(1, name)) for name in ("idx", "targets"))
    for one in (model, two):
        one(idx, targets)[1].backward()
    read, written = two.token_embedding.weight.grad, two.lm_head.weight.grad
    checks.close("its gradient: the sum of its two uses", model.token_embedding.weight.grad, read + written, 1e-12)
    checks.true(
        "  neither of which is zero",
        f"{read.norm():.3f}, {written.norm():.3f}",
        "> 0",
        bool(read.any() and written.any()),
    )
    checks.equal("parameters an untied copy has more", count_parameters(two) - count_parameters(model), 13 * 10)

    lost = "the tie is lost"
    for other, means in (
        (untied(model), "copied instead of tied"),
        (half_deepcopied(model), "deepcopy of the two parts"),
        (loaded_by_assignment(model), "load_state_dict(assign=True)"),
        (brought_from_meta(model), "meta device, then to_empty()"),
    ):
        checks.close(f"{means}: same logits", other(idx)[0], model(idx)[0], 1e-12)
        checks.raises("  but no tie, and check_tie says so", ValueError, [lost], lambda other=other: check_tie(other))

    state = checkpoint(model)
    state["token_embedding.weight"] += 1.0
    other = small_model(std=0.1)
    checks.raises("a checkpoint with two values", ValueError, ["two values"], lambda: check_tie(other, state))
    other.load_state_dict(state)
    checks.equal("  torch loads it, and the last one wins", other.token_embedding.weight, state["lm_head.weight"])

    kept = [copy.deepcopy(model), small_model().float(), small_model().to("cpu", torch.bfloat16)]
    kept[0].load_state_dict(checkpoint(model))
    checks.equal("kept by deepcopy of the whole, load, .float(), .to()", [check_tie(one) for one in kept], [None] * 3)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
