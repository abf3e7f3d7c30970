"""Step 06: assemble the GPT.

Step 05 built a block. Around a stack of them go: an embedding that turns each token id into the start of its stream,
a second one for each position, a last norm, and the head, which scores every entry of the vocabulary by how well its
row fits the stream. The head's matrix is the embedding's; what that means is step 07.

It leaves out the initial values (steps 08 and 09), training and sampling.

    python step_06_assemble-the-gpt.py

It counts the parameters of GPT-2 small, checks the whole model against one made of torch's layers, and proves by
gradient that it is causal. About 3 seconds.
"""

import sys
from dataclasses import replace
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
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def count_parameters(model: nn.Module) -> int:
    """How many numbers the model stores; parameters() yields a tied matrix once."""
    return sum(p.numel() for p in model.parameters())


def torch_logits(model: GPT, idx: torch.Tensor) -> torch.Tensor:
    """The same model out of torch's own encoder, with our Parameters in it: idx (B, T) -> logits (B, T, V)."""
    layers = [step_05.torch_block(block, model.cfg) for block in model.blocks]
    encoder = nn.TransformerEncoder(layers[0], len(layers), model.norm_f, enable_nested_tensor=False)
    encoder.layers = nn.ModuleList(layers)
    x = F.embedding(idx, model.token_embedding.weight) + model.position_embedding.weight[: idx.shape[1]]
    future = torch.ones(2 * idx.shape[1:], dtype=torch.bool).triu(1)
    return encoder(x, mask=future, is_causal=True) @ model.token_embedding.weight.T


def main() -> int:
    checks = Checks()
    with torch.device("meta"):  # shapes without memory
        gpt2 = GPT(GPTConfig(block_size=1024, n_layers=12, n_heads=12, d_model=768), vocab_size=50_257)
    console.say("GPT-2 small, as its parts:")
    for name, part in gpt2.named_children():
        console.say(f"  {name:19} {count_parameters(part):>11,}{'  (the same matrix)' if name == 'lm_head' else ''}")
    checks.equal("parameters of GPT-2 small, as published", count_parameters(gpt2), 124_439_808)
    checks.equal("  with a head of its own", count_parameters(gpt2) + gpt2.lm_head.weight.numel(), 163_037_184)

    B, T, V, noise = 2, 7, 13, generator(1, "step 06")
    cfg = GPTConfig(block_size=9, n_layers=3, n_heads=2, d_model=10)
    model = GPT(cfg, V).double()
    for p in model.parameters():
        nn.init.normal_(p, std=0.4, generator=noise)
    idx, targets = (torch.randint(V, (B, T), generator=noise) for _ in range(2))
    logits, loss = model(idx, targets)
    reference = torch_logits(model, idx)
    checks.equal("logits are (B, T, V)", tuple(logits.shape), (B, T, V))
    checks.close("logits against torch's encoder", logits, reference, 1e-12)
    by_hand = -reference.log_softmax(-1).gather(-1, targets[..., None]).mean()
    checks.close("loss: the mean of -log p(target)", loss, by_hand, 1e-12)
    parameters = tuple(model.parameters())
    ours, theirs = torch.autograd.grad(loss, parameters), torch.autograd.grad(by_hand, parameters)
    worst = max(range(len(ours)), key=lambda i: (ours[i] - theirs[i]).abs().max())
    checks.close(f"  all {len(ours)} gradients, the furthest off", ours[worst], theirs[worst], 1e-12)

    start = model.embed(idx).detach()
    model.embed = lambda idx: start  # a constant in the place of the embedding, to take gradients by
    start.requires_grad_()
    reach = torch.stack([torch.autograd.grad(model(idx)[0][0, t].sum(), start)[0][0].norm(dim=-1) for t in range(T)])
    checks.equal("gradient of position t's logits by later input", reach.triu(1), torch.zeros(T, T))
    checks.equal("positions that they do depend on", (reach > 0).sum(-1), torch.arange(1, T + 1))
    checks.raises("a context that is too long", ValueError, ["10", "9"], lambda: model(torch.zeros(1, 10, dtype=int)))
    one_layer_less = count_parameters(GPT(replace(cfg, n_layers=2), V))
    checks.equal("a layer holds 12C² + 13C", count_parameters(model) - one_layer_less, 12 * 10 * 10 + 13 * 10)
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
