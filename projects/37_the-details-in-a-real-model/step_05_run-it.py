"""Step 05: run it.

The model has its numbers, so we can ask it something: it answers by its likeliest next token,
again and again. And we can measure it. For each token of a text it has given a probability p to
what really came next; -log p is that token's loss, in nats: 0 nats if the model was certain, 0.7
if it gave the token one chance in two, 11 if it guessed evenly among all 49,152.

The mean of the losses says how well the model knows the text. Its exponential is called the
perplexity: with 4, the model is as unsure as if each time it chose among 4 equally likely tokens.

The text is the last tenth of torch's documentation, which every reader has on disk. A long text is
read in windows of 1,024 tokens: each starts afresh, and knows nothing of the one before.

    python step_05_run-it.py

draws outputs/step_05.png. Here each new token reads the whole text again; step 06 avoids that.
"""

import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, data, figures
from shared.checks import Checks
from shared.console import say

gpt = chapters.load_build(5)
real = chapters.load_build(37)  # the finished chapter: what is not on this page
RealGPT = real.RealGPT

# ---------------------------------------------------------------- the idea

HEAD_ROWS = 1024  # so many positions have their logits in memory at a time: 201 MB


def evaluation_text() -> str:
    """The last tenth of torch's documentation, from the start of a paragraph on."""
    text = "".join(data.torch_docs())
    tail = text[-(len(text) // 10) :]
    return tail.partition("\n\n")[2]


@torch.inference_mode()
def token_losses(model: RealGPT, ids: torch.Tensor, context: int = 1024) -> torch.Tensor:
    """Token ids (N,) -> -log p of each but the first, in nats (N - 1,).

    The text is read in windows of `context` tokens, which know nothing of each other.
    """
    ids = ids.to(model.token_embedding.weight.device)
    losses = []
    for start in range(0, len(ids) - 1, context):
        targets = ids[start + 1 : start + context + 1]
        inputs = ids[start : start + len(targets)]
        states = model.states(inputs[None])[0]
        # One turn of this loop, unless the context is longer than HEAD_ROWS.
        for rows, following in zip(states.split(HEAD_ROWS), targets.split(HEAD_ROWS)):
            losses.append(F.cross_entropy(model.lm_head(rows), following, reduction="none"))
    return torch.cat(losses)


def mean_loss(model: RealGPT, ids: torch.Tensor, context: int = 1024) -> float:
    """The mean of token_losses(); its exponential is the perplexity."""
    return token_losses(model, ids, context).mean().item()


# ---------------------------------------------------------------- look at it


def draw_picture(tokens: list[str], losses: torch.Tensor) -> Path:
    """A bar for each token: what the model paid for it."""
    figure = figures.new_figure(10, 3.2)
    axes = figure.subplots()
    axes.bar(range(len(tokens)), losses, color=figures.COLOURS[0])
    axes.set_xticks(range(len(tokens)), tokens, rotation=90, family="monospace")
    axes.set(ylabel="nats", xlim=(-0.6, len(tokens) - 0.4))
    axes.spines[["top", "right"]].set_visible(False)
    return figures.save(figure, __file__)


def main() -> int:
    file = real.WeightsFile(real.packaged_weights())
    tokenizer = real.Tokenizer(file)
    model = real.load_model(file)
    decode = tokenizer.encoding.decode
    question = tokenizer.chat("What is the capital of France?")
    with torch.inference_mode():
        idx = gpt.generate(model, torch.tensor([question]), max_new_tokens=8, temperature=0)
    answer = decode(idx[0, len(question) :].tolist())
    say(f"What is the capital of France? {answer}")
    say("<|im_end|> is its sign that the answer ends here.")

    ids = torch.tensor(tokenizer.encode(evaluation_text())[:301])
    losses = token_losses(model, ids)
    shown = [decode([i]).replace("\n", "⏎") for i in ids[1:41].tolist()]
    draw_picture(shown, losses[:40])
    loss = losses.mean().item()
    say(f"\nOn 300 tokens of documentation: {loss:.3f} nats a token,")
    say(f"perplexity {math.exp(loss):.2f}. Both belong to this piece of text: build.py reads 1,024")
    say("tokens of it, and finds a lower one.")
    say("The first 40 are in outputs/step_05.png: a token that nothing announces costs")
    say("many nats, one that follows from the words before it costs nearly none.")

    checks = Checks()
    checks.equal("it knows the capital", "Paris" in answer, True)
    with torch.inference_mode():
        theirs = model(ids[None, :-1], ids[None, 1:])[1]
    checks.close("loss by chapter 05's forward", loss, theirs, 1e-4)
    windows = token_losses(model, ids[:201], context=100)
    apart = torch.cat((token_losses(model, ids[:101]), token_losses(model, ids[100:201])))
    checks.close("two windows are two texts", windows, apart, 1e-3)
    other_end = torch.cat((ids[:201], ids[201:].flip(0)))
    early = token_losses(model, other_end)[:200]
    checks.close("losses before a changed end", early, losses[:200], 1e-3)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
