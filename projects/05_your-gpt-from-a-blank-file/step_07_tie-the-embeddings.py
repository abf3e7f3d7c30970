"""Step 07: tie the embeddings.

The embedding has a row for each token, and so has the head. GPT-2 uses one matrix for both (Press &
Wolf 2017): tokens of similar meaning get similar rows, which helps in reading as well as in
predicting them. It also saves much: in a small model with a large vocabulary the two matrices would
be nearly all of the model, and tying saves almost half of it.

Tied means one tensor with two names, not two tensors with equal numbers. It is stored once, and its
gradient is the sum of what it gets as embedding and as head. Several usual operations make two
tensors of it, and PyTorch raises no error. The logits are the same at first, so nothing shows; then
the two matrices drift apart in training. check_tie() raises an error if the tie is lost, or if a
checkpoint that is about to be loaded holds two different matrices.

    python step_07_tie-the-embeddings.py

loses the tie in four ways and trains each model a little. About 2 seconds.
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
GPT = step_06.GPT
GPTConfig = step_06.GPTConfig

# ---------------------------------------------------------------- the idea


def check_tie(model: nn.Module, state: dict[str, torch.Tensor] | None = None) -> None:
    """Raise ValueError if embedding and head are not one tensor.

    Or if `state`, a checkpoint about to be loaded, has two different values for the one matrix:
    PyTorch would keep the last and say nothing.
    """
    if model.token_embedding.weight is not model.lm_head.weight:
        raise ValueError(
            "the tie is lost: token_embedding.weight and lm_head.weight are two tensors"
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


# ---------------------------------------------------------------- look at it


def small_model() -> GPT:
    model = GPT(GPTConfig(block_size=9, n_layers=2, n_heads=2, d_model=10), vocab_size=13)
    for name, p in model.named_parameters():
        nn.init.normal_(p, std=0.3, generator=generator(1, "step 07", name))
    return model


def checkpoint(model: GPT) -> dict[str, torch.Tensor]:
    """As a plain file stores a model: a copy for each name, so the tied matrix is there twice."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def lose_the_tie() -> dict[str, GPT]:
    """Four models with the numbers of small_model() and, each in its way, two matrices."""
    copied = small_model()
    copied.lm_head.weight = nn.Parameter(copied.lm_head.weight.detach().clone())
    one_part = small_model()
    one_part.lm_head = copy.deepcopy(one_part.lm_head)
    # assign=True makes the checkpoint's tensors the model's: one for each name, so two.
    assigned = small_model()
    assigned.load_state_dict(checkpoint(small_model()), assign=True)
    # "meta": shapes without memory. to_empty() gives each name a memory of its own, so two.
    with torch.device("meta"):
        emptied = GPT(copied.cfg, copied.vocab_size)
    emptied.to_empty(device="cpu")
    emptied.load_state_dict(checkpoint(small_model()))
    return {
        "head copied from the embedding": copied,
        "deepcopy of the head alone": one_part,
        "load_state_dict(assign=True)": assigned,
        "meta device, then to_empty()": emptied,
    }


def is_lost(model: GPT, state: dict[str, torch.Tensor] | None = None) -> bool:
    try:
        check_tie(model, state)
    except ValueError:
        return True
    return False


def train_a_little(model: GPT, idx: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(20):
        optimizer.zero_grad()
        _, loss = model(idx[:, :-1], idx[:, 1:])
        loss.backward()
        optimizer.step()


def main() -> int:
    models = {"tied, as it should be": small_model(), **lose_the_tie()}
    idx = torch.randint(13, (4, 9), generator=generator(1, "step 07", "idx"))
    right = small_model()(idx)[0]
    same = [torch.equal(model(idx)[0], right) for model in models.values()]
    lost = [is_lost(model) for model in models.values()]
    rows = []
    for name, model in models.items():
        train_a_little(model, idx)
        apart = (model.token_embedding.weight - model.lm_head.weight).abs().max().item()
        rows.append([name, f"{apart:.2f}"])
    console.say("How far apart the two matrices are after 20 steps of training:")
    console.say(console.Table(["model", "apart"], rows))
    console.say("\n0.00 is right. The four others began with exactly the same logits.")

    checks = Checks()
    checks.equal("models with the same logits", sum(same), 5)
    checks.equal("check_tie: no error, tied", lost[0], False)
    checks.equal("  an error, of four others", sum(lost[1:]), 4)
    drifted = checkpoint(models["deepcopy of the head alone"])  # after training: two matrices
    checks.equal("  an error, two in a checkpoint", is_lost(small_model(), drifted), True)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
