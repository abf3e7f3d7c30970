"""Step 06: assemble the GPT.

Step 05 built a block. The whole model is a stack of blocks with something before and after it.

Before: an embedding, which is a table with one vector for each token of the vocabulary, and a
second table with one vector for each position. To attention alone the past is a bag of tokens in no
order; from the second table the model knows where a token stands. The sum of both vectors is the
start of the residual stream.

After: a last norm, and the head. The head has one row for each token of the vocabulary, and row
times stream is that token's score, called its logit. Softmax makes probabilities of the logits: the
model's answer to "which token comes next?", given at every position at once.

The loss is -log p of the token that really came next, averaged over all positions (cross-entropy).
log is the natural logarithm, and so the unit is called nat: a loss of 4.55 nats is as bad as
guessing among e^4.55 = 95 equally likely tokens.

The head's matrix is the embedding's; step 07 tells what that means.

    python step_06_assemble-the-gpt.py

prints the parts of GPT-2, 124,439,808 numbers in all, as published.
"""

import sys
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console
from shared.checks import Checks
from shared.randomness import generator

step_05 = chapters.load_step(5, 5)
GPTConfig = step_05.GPTConfig
Block = step_05.Block

# ---------------------------------------------------------------- the idea


class GPT(nn.Module):
    """A decoder-only transformer with a tied head (Radford et al. 2019)."""

    def __init__(self, cfg: GPTConfig, vocab_size: int):
        super().__init__()
        self.cfg = cfg
        self.vocab_size = vocab_size
        self.token_embedding = nn.Embedding(vocab_size, cfg.d_model)
        self.position_embedding = self.make_positions(cfg)
        self.blocks = nn.ModuleList(self.make_block(cfg) for _ in range(cfg.n_layers))
        self.norm_f = self.make_norm(cfg)
        self.lm_head = nn.Linear(cfg.d_model, vocab_size, bias=False)
        self.lm_head.weight = self.token_embedding.weight  # tied: one matrix with two uses

    def make_positions(self, cfg: GPTConfig) -> nn.Module | None:
        return nn.Embedding(cfg.block_size, cfg.d_model)

    def make_block(self, cfg: GPTConfig) -> nn.Module:
        return Block(cfg)

    def make_norm(self, cfg: GPTConfig) -> nn.Module:
        return nn.LayerNorm(cfg.d_model, eps=1e-5)

    def embed(self, idx: torch.Tensor) -> torch.Tensor:
        """Token ids (B, T) -> the start of the residual stream (B, T, C)."""
        x = self.token_embedding(idx)
        if self.position_embedding is not None:  # chapter 07 has models without this table
            x = x + self.position_embedding.weight[: idx.shape[1]]
        return x

    def forward(
        self, idx: torch.Tensor, targets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Token ids (B, T) -> logits (B, T, V), and the loss if targets (B, T) are given.

        The loss is the mean cross-entropy in nats. Raises ValueError if T exceeds block_size.
        """
        T = idx.shape[1]
        if T > self.cfg.block_size:
            raise ValueError(f"{T} tokens don't fit a block_size of {self.cfg.block_size}")
        x = self.embed(idx)
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.norm_f(x))
        if targets is None:
            return logits, None
        # F.cross_entropy takes one list of B·T positions: logits (B·T, V), targets (B·T,)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def count_parameters(model: nn.Module) -> int:
    """How many numbers the model stores; parameters() yields a tied matrix once."""
    return sum(p.numel() for p in model.parameters())


# ---------------------------------------------------------------- look at it


def main() -> int:
    with torch.device("meta"):  # shapes without memory, enough to count
        gpt2 = GPT(GPTConfig(block_size=1024, n_layers=12, n_heads=12, d_model=768), 50_257)
    rows = [[name, f"{count_parameters(part):,}"] for name, part in gpt2.named_children()]
    console.say(console.Table(["part of GPT-2", "numbers"], rows))
    console.say(f"\nAll together {count_parameters(gpt2):,}: less than the sum of these lines, as")
    console.say("lm_head is the matrix of token_embedding and counts once. Two thirds of the")
    console.say("model are blocks, a third is the vocabulary.")

    V = 13
    T = 7
    noise = generator(1, "step 06")
    model = GPT(GPTConfig(block_size=9, n_layers=3, n_heads=2, d_model=10), V).double()
    for p in model.parameters():
        nn.init.normal_(p, std=0.4, generator=noise)
    idx = torch.randint(V, (2, T), generator=noise)
    targets = torch.randint(V, (2, T), generator=noise)
    logits, loss = model(idx, targets)

    checks = Checks()
    checks.equal("GPT-2 small", count_parameters(gpt2), 124_439_808)
    p = logits.softmax(-1)
    p_target = p.gather(-1, targets[:, :, None])  # of each position's V numbers, its target's
    checks.close("loss: mean of -log p", loss, -p_target.log().mean(), 1e-12)
    changed = idx.clone()
    changed[:, 4:] = (changed[:, 4:] + 1) % V  # other tokens from position 4 on
    earlier = model(changed)[0][:, :4]
    checks.close("earlier logits: unchanged", earlier, logits[:, :4], 1e-12)
    # Does the last position notice that two tokens changed places? One block only: from the second
    # on, the causal mask by itself tells something about the order.
    model.blocks = model.blocks[:1]
    swapped = idx[:, [1, 0, *range(2, T)]]
    moved = (model(swapped)[0][:, -1] - model(idx)[0][:, -1]).abs().max().item()
    checks.between("swapped: last logits move", moved, 1e-3, 10.0)
    model.position_embedding = None
    last = model(idx)[0][:, -1]
    checks.close("  no positions: the same", model(swapped)[0][:, -1], last, 1e-12)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
