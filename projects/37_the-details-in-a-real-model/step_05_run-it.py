"""Step 05: run it.

The model is filled, so it can speak and be measured: its likeliest answer to a question, and its perplexity on a text
that every reader has, torch's documentation. Left out: not reading the whole text again for each new token (step 06).

    python step_05_run-it.py     (about 8 seconds)

It prints the answer, the loss token by token where it is highest, and what the perplexity means.
"""

import lzma
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, data, kernels
from shared.checks import Checks
from shared.console import Table, say

gpt = chapters.load_build(5)
step_01, step_02, step_04 = (chapters.load_step(37, step) for step in (1, 2, 4))

HEAD_ROWS = 1024  # positions whose logits are in memory at the same time: 49,152 float32 each


def evaluation_text() -> str:
    """The last tenth of torch's documentation, which the other chapters keep for validation, from a paragraph on."""
    text = "".join(data.torch_docs())
    return text[-(len(text) // 10) :].partition("\n\n")[2]


@contextmanager
def fast(model: nn.Module) -> Iterator[None]:
    """On a CPU, its fastest float32 products; elsewhere nothing: there they would be less than float32."""
    if model.token_embedding.weight.device.type == "cpu":
        with kernels.fastest_float32():
            yield
    else:
        yield


@torch.inference_mode()
def token_losses(model: nn.Module, ids: torch.Tensor, context: int = 1024) -> torch.Tensor:
    """Token ids (N,) -> -log p of each but the first, in nats (N - 1,), read in windows of `context` tokens."""
    ids, losses = ids.to(model.token_embedding.weight.device), []
    for start in range(0, len(ids) - 1, context):
        states = model.states(ids[None, start : start + context])[0]
        for rows, targets in zip(states.split(HEAD_ROWS), ids[start + 1 : start + context + 1].split(HEAD_ROWS)):
            losses.append(F.cross_entropy(model.lm_head(rows[: len(targets)]), targets, reduction="none"))
    return torch.cat(losses)


def mean_loss(model: nn.Module, ids: torch.Tensor, context: int = 1024) -> float:
    """The mean of token_losses(); its exponential is the perplexity."""
    with fast(model):
        return token_losses(model, ids, context).mean().item()


def main() -> int:
    file, checks = step_01.WeightsFile(step_01.packaged_weights()), Checks()
    model, tokenizer = step_04.load_model(file), step_02.Tokenizer(file)
    decode = tokenizer.encoding.decode
    question = tokenizer.chat("What is the capital of France?")
    with torch.inference_mode(), fast(model):
        idx = gpt.generate(model, torch.tensor([question]), max_new_tokens=8, temperature=0)[0].tolist()
    answer = decode(idx[len(question) :])
    say(f"What is the capital of France? {answer}")

    text = evaluation_text()
    ids = torch.tensor(tokenizer.encode(text)[:301])
    losses = token_losses(model, ids)
    text = decode(ids.tolist())
    say(f"\nThe first 300 tokens of {len(text):,} letters of torch's documentation, and what the model pays for them:")
    rows = []
    for at in (*losses.topk(4).indices.tolist(), *losses.topk(4, largest=False).indices.tolist()):
        before = decode(ids[max(at - 5, 0) : at + 1].tolist())
        rows.append(
            [repr(before), repr(decode([int(ids[at + 1])])), f"{losses[at]:.4f}", f"{losses[at].neg().exp():.1%}"]
        )
    say(Table(["after", "comes", "nats", "probability"], rows))
    loss, n_bytes = losses.mean().item(), len(decode(ids[1:].tolist()).encode("utf-8"))
    say(f"\nMean {loss:.3f} nats a token, perplexity {math.exp(loss):.2f}: as unsure as between so many equal choices.")

    checks.equal("the answer", answer, "The capital of France is Paris.<|im_end|>")
    with torch.inference_mode():
        theirs = model(ids[None, :-1], ids[None, 1:])[1]  # chapter 05's forward, on the whole at once
    halves = torch.cat((token_losses(model, ids[:101]), token_losses(model, ids[100:201])))
    checks.close("windows of 100 are read one by one", token_losses(model, ids[:201], 100), halves, 1e-3)
    checks.close("loss as chapter 05 computes it", loss, theirs, 1e-4)
    backwards = torch.cat([ids[:201], ids[201:].flip(0)])
    checks.close("the past doesn't know the future", token_losses(model, backwards)[:200], losses[:200], 1e-3)
    squeezed = len(
        lzma.compress(text.encode("utf-8"), format=lzma.FORMAT_RAW, filters=[{"id": lzma.FILTER_LZMA2, "preset": 9}])
    )
    checks.between(
        "bits a byte, against what lzma needs", loss * 300 / math.log(2) / n_bytes, 0, 8 * squeezed / n_bytes
    )
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
