"""Step 11: sample text.

Step 10 trained a model that says how likely each next token is. Writing is drawing from that, adding the token drawn
to the context, and asking again. The temperature divides the logits: below 1 the likely becomes likelier, at 0 only
the likeliest is left. top_k forgets all but the k likeliest.

With it the GPT from a blank file is complete: build.py holds the same code in one file.

    python step_11_sample-text.py

It prints samples of a briefly trained model at three temperatures, and checks how often each token is drawn against
softmax. About 9 seconds.
"""

import math
import sys
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console, data
from shared import randomness as random_numbers
from shared.checks import Checks
from shared.kernels import fastest_float32

step_10 = chapters.load_step(5, 10)


@torch.no_grad()
def generate(
    model: nn.Module,
    idx: torch.Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Continue token ids (B, T) by max_new_tokens, each drawn from softmax(logits / temperature).

    temperature 0 takes the likeliest token. top_k keeps the k likeliest; of equals, the lower ids.
    The context is the last block_size tokens. Returns (B, T + max_new_tokens).

    Raises ValueError for a temperature below 0, a top_k below 1 or an empty context.
    """
    if temperature < 0 or (top_k is not None and top_k < 1) or idx.shape[1] == 0:
        raise ValueError(
            f"generate needs temperature >= 0, top_k >= 1 and a context of at least one token, "
            f"got temperature {temperature}, top_k {top_k}, {idx.shape[1]} tokens"
        )
    for _ in range(max_new_tokens):
        logits, _ = model(idx[:, -model.cfg.block_size :])
        logits = logits[:, -1]  # (B, V): what follows the last position
        if temperature == 0:
            next_idx = logits.argmax(-1, keepdim=True)
        else:
            if top_k is not None:
                order = logits.sort(dim=-1, descending=True, stable=True).indices
                logits = logits.scatter(-1, order[:, top_k:], -math.inf)  # all but the first k
            probabilities = F.softmax(logits / temperature, dim=-1)
            next_idx = torch.multinomial(probabilities, 1, generator=generator)
        idx = torch.cat((idx, next_idx), dim=1)
    return idx


class FixedLogits(nn.Module):
    """A model that expects the same after every context: logits of (V,)."""

    def __init__(self, logits: torch.Tensor):
        super().__init__()
        self.logits, self.cfg = logits, step_10.GPTConfig(block_size=5)

    def forward(self, idx: torch.Tensor) -> tuple[torch.Tensor, None]:
        assert idx.shape[1] <= self.cfg.block_size
        return self.logits.expand(*idx.shape, -1), None


def frequencies(logits: torch.Tensor, **how) -> torch.Tensor:
    """How often each of the V tokens comes in 40,000 draws."""
    contexts = torch.zeros(40_000, 3, dtype=torch.int64)
    drawn = generate(FixedLogits(logits), contexts, 1, generator=random_numbers.generator(1, "draws"), **how)
    return torch.bincount(drawn[:, -1], minlength=len(logits)).double() / 40_000


def main() -> int:
    checks = Checks()
    corpus = data.load_corpus("docs", "char", 32)
    with fastest_float32():
        model = step_10.fresh_model(corpus, seed=1)
        step_10.train_by_hand(model, corpus, steps=200, seed=1)
        prompt = corpus.validation[None, :32]
        console.say(f"After 200 steps, context {corpus.tokenizer.decode(prompt[0].tolist())!r}:")
        for temperature in (0.0, 0.7, 1.5):
            draws = random_numbers.generator(1, "sample")
            text = corpus.tokenizer.decode(generate(model, prompt, 60, temperature, generator=draws)[0, 32:].tolist())
            console.say(f"  temperature {temperature}: {text!r}")
        greedy, seen = prompt, []
        for _ in range(20):
            seen.append(model(greedy[:, -32:])[0][0, -1].argmax().item())
            greedy = torch.cat((greedy, torch.tensor([[seen[-1]]])), dim=1)
        checks.equal(
            "temperature 0: the likeliest token, 20 times", generate(model, prompt, 20, 0.0)[0, 32:].tolist(), seen
        )
        again = [generate(model, prompt, 20, generator=random_numbers.generator(s, "sample")) for s in (1, 1, 2)]
    checks.equal("the same generator writes the same", again[0], again[1])
    checks.equal("another writes something else", torch.equal(again[0], again[2]), False)
    checks.equal("the context comes back in front", again[0][:, :32], prompt)

    logits = torch.tensor([0.3, 2.0, -1.0, 1.0, 0.0])
    for temperature in (0.5, 1.0, 2.0):
        p = logits.double().div(temperature).exp()  # the law p^(1/temperature), normalised
        p /= p.sum()
        error = (p * (1 - p) / 40_000).sqrt().max().item()
        what = f"drawn at temperature {temperature}, within 5 standard errors"
        checks.close(what, frequencies(logits, temperature=temperature), p, 5 * error)
    top2 = frequencies(logits, top_k=2)
    checks.equal("top_k = 2 draws the two likeliest only", top2.nonzero().flatten().tolist(), [1, 3])
    checks.close("  in the proportion of e", top2[1] / top2[3], math.e, 0.1)
    checks.equal("top_k = 1 is temperature 0", frequencies(logits, top_k=1)[1], 1.0)
    checks.equal("top_k beyond V keeps all", frequencies(logits, top_k=99), frequencies(logits))
    longer = generate(FixedLogits(logits), torch.zeros(1, 1, dtype=torch.int64), 12, 0.0)
    checks.equal("it writes on beyond block_size (5)", longer[0].tolist(), [0] + [1] * 12)
    for name, how, mentions in (("temperature", {"temperature": -1.0}, "-1.0"), ("top_k", {"top_k": 0}, "top_k 0")):
        checks.raises(f"a wrong {name}", ValueError, [mentions], lambda how=how: generate(model, prompt, 1, **how))
    checks.raises("no context", ValueError, ["0 tokens"], lambda: generate(model, prompt[:, :0], 1))
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
