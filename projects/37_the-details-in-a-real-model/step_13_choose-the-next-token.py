"""Step 13: choose the next token. (Best read after step 06.)

The model gives each of its 49,152 tokens a score, a logit. Which one is written? We can take the
token with the highest logit; then the same question always gets the same answer. Or we draw:
softmax turns logits into probabilities, and chance decides.

Between the two lies the temperature: logits are divided by it before the softmax. A temperature
of 1 changes nothing. A low one spreads the logits apart, so the likeliest token gets nearly all of
the probability, and towards 0 the draw becomes the choice of the highest. A high one moves them
together, and unlikely tokens get their chance. So 0 stands for "the highest" itself, and nothing
is divided.

After the first token, only the new one is read: step 06 remembers the others.

    python step_13_choose-the-next-token.py

draws outputs/step_13.png.
"""

import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, figures
from shared.checks import Checks
from shared.console import say

real = chapters.load_build(37)  # the finished chapter: what is not on this page
RealGPT = real.RealGPT

# ---------------------------------------------------------------- the idea

COLDEST = 1e-6  # a lower temperature counts as 0: logits divided by it could be infinite


@torch.inference_mode()
def stream(
    model: RealGPT,
    ids: list[int],
    n_new: int,
    ends: Collection[int] = (),
    temperature: float = 0.0,
    draws: torch.Generator | None = None,
) -> Iterator[int]:
    """Inside remembering(): read ids, then yield up to n_new tokens, or up to one of `ends`.

    Each is the likeliest one at temperature 0, else drawn from softmax(logits / temperature).
    """
    for _ in range(n_new):
        idx = torch.tensor([ids], device=model.token_embedding.weight.device)
        last = model.states(idx)[0, -1]
        logits = model.lm_head(last)  # (V,): for the token that follows the last position
        if temperature < COLDEST:
            token = int(logits.argmax())
        else:
            p = F.softmax(logits / temperature, dim=-1)
            token = int(torch.multinomial(p, 1, generator=draws))
        yield token
        if token in ends:
            return
        ids = [token]  # all before it is remembered


# ---------------------------------------------------------------- look at it

TEXT = "Every morning I drink a cup of"
TEMPERATURES = (0.5, 1.0, 1.5)


def draw_picture(logits: torch.Tensor, names: list[str]) -> Path:
    """The probabilities of the likeliest tokens at three temperatures."""
    figure = figures.new_figure(10, 3.2)
    for axes, temperature in zip(figure.subplots(1, 3, sharey=True), TEMPERATURES):
        p = F.softmax(logits / temperature, dim=-1)
        axes.barh(range(len(names)), p.topk(len(names)).values, color=figures.COLOURS[0])
        axes.set_yticks(range(len(names)), names)
        axes.set(title=f"temperature {temperature}", xlabel="probability", xlim=(0, 1))
        axes.spines[["top", "right"]].set_visible(False)
    axes.invert_yaxis()
    return figures.save(figure, __file__)


@torch.inference_mode()
def main() -> int:
    file = real.WeightsFile(real.packaged_weights())
    tokenizer = real.Tokenizer(file)
    model = real.load_model(file)
    decode = tokenizer.encoding.decode
    ids = tokenizer.encode(TEXT)
    logits = model.lm_head(model.states(torch.tensor([ids]))[0, -1])
    names = [repr(decode([i])) for i in logits.topk(8).indices.tolist()]
    draw_picture(logits, names)
    say(f'What may follow "{TEXT}": outputs/step_13.png\n')

    def written(temperature: float, seed: int = 1) -> list[int]:
        draws = torch.Generator().manual_seed(seed)
        with real.remembering(model, len(ids) + 8):
            return list(stream(model, ids, 8, tokenizer.ends, temperature, draws))

    texts = {temperature: written(temperature) for temperature in (0.0, *TEMPERATURES)}
    for temperature, tokens in texts.items():
        say(f"temperature {temperature}: {decode(tokens)!r}")
    say("\nThe higher the temperature, the more surprising the text, until it is nonsense.")

    checks = Checks()
    checks.equal("at 0: the highest logit", texts[0][0], int(logits.argmax()))
    checks.equal("same seed, same draws", written(1.5) == texts[1.5], True)
    checks.equal("another seed, other draws", written(1.5, seed=2) != texts[1.5], True)
    p = [F.softmax(logits / temperature, dim=-1).max().item() for temperature in TEMPERATURES]
    checks.equal("hotter: less for the likeliest", p == sorted(p, reverse=True), True)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
