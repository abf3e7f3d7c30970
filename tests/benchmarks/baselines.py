"""Two plain baselines to measure against, written from their published designs and sharing no code with the chapters.

Naive: the model as a first draft has it. Attention masks a (T, T) matrix by hand, a batch is stacked row by row,
AdamW loops over the parameters, everything runs in one process with torch's default threads.

NanoGPT: the design of karpathy/nanoGPT (model.py and train.py) at the tiny preset's shape: fused attention, exact
GELU, LayerNorm and bias, batches stacked from a numpy array, weight decay on matrices only.
"""

import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

BLOCK, LAYERS, HEADS, WIDTH, BATCH = 32, 2, 4, 64, 32


# ---------------------------------------------------------------- naive


class NaiveRMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x / torch.sqrt((x**2).mean(-1, keepdim=True) + 1e-5) * self.weight


class NaiveAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.tril(torch.ones(BLOCK, BLOCK)) == 0)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (
            f(x).view(B, T, HEADS, C // HEADS).transpose(1, 2)
            for f in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(C // HEADS)
        scores = scores.masked_fill(self.mask[:T, :T], float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, C))


class NaiveMLP(nn.Module):
    def __init__(self, swiglu):
        super().__init__()
        self.swiglu = swiglu
        if swiglu:
            hidden = 8 * WIDTH // 3
            self.gate, self.up = (
                nn.Linear(WIDTH, hidden, bias=False),
                nn.Linear(WIDTH, hidden, bias=False),
            )
            self.down = nn.Linear(hidden, WIDTH, bias=False)
        else:
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        if self.swiglu:
            return self.down(F.silu(self.gate(x)) * self.up(x))
        return self.down(F.gelu(self.up(x)))


class NaiveModel(nn.Module):
    def __init__(self, vocab_size, rmsnorm, swiglu):
        super().__init__()
        norm = NaiveRMSNorm if rmsnorm else nn.LayerNorm
        self.tokens, self.positions = nn.Embedding(vocab_size, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.layers = nn.ModuleList(
            nn.ModuleList([norm(WIDTH), NaiveAttention(), norm(WIDTH), NaiveMLP(swiglu)])
            for _ in range(LAYERS)
        )
        self.norm = norm(WIDTH)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, idx, targets):
        x = self.tokens(idx) + self.positions(torch.arange(idx.shape[1]))
        for norm1, attention, norm2, mlp in self.layers:
            x = x + attention(norm1(x))
            x = x + mlp(norm2(x))
        logits = self.norm(x) @ self.tokens.weight.T
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


def naive_batch(tokens):
    starts = torch.randint(len(tokens) - BLOCK, (BATCH,))
    return (
        torch.stack([tokens[i : i + BLOCK] for i in starts]),
        torch.stack([tokens[i + 1 : i + BLOCK + 1] for i in starts]),
    )


def naive_run(train, validation, vocab_size, rmsnorm, swiglu, seed, steps):
    """One of the 24 runs: training, then the loss over the whole validation part."""
    torch.manual_seed(seed)
    model = NaiveModel(vocab_size, rmsnorm, swiglu)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        loss = model(*naive_batch(train))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    with torch.no_grad():
        n = (len(validation) - 1) // BLOCK * BLOCK
        windows = zip(
            validation[:n].view(-1, BLOCK).split(256),
            validation[1 : n + 1].view(-1, BLOCK).split(256),
        )
        return sum(model(idx, targets).item() * idx.numel() for idx, targets in windows) / n


# ---------------------------------------------------------------- nanoGPT's design


class NanoAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (
            y.view(B, T, HEADS, C // HEADS).transpose(1, 2) for y in self.c_attn(x).split(C, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.0, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class NanoGPT(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.h = nn.ModuleList(
            nn.ModuleList(
                [
                    nn.LayerNorm(WIDTH),
                    NanoAttention(),
                    nn.LayerNorm(WIDTH),
                    nn.Sequential(
                        nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
                    ),
                ]
            )
            for _ in range(LAYERS)
        )
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for ln_1, attn, ln_2, mlp in self.h:
            x = x + attn(ln_1(x))
            x = x + mlp(ln_2(x))
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))


class NanoTrainer:
    """One training step at a time, as train.py takes it on a CPU."""

    def __init__(self, tokens, vocab_size):
        self.data = tokens.numpy().astype(np.uint16)
        self.model = NanoGPT(vocab_size)
        decayed = [p for p in self.model.parameters() if p.dim() >= 2]
        others = [p for p in self.model.parameters() if p.dim() < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))

    def step(self):
        starts = torch.randint(len(self.data) - BLOCK, (BATCH,))
        idx = torch.stack(
            [torch.from_numpy(self.data[i : i + BLOCK].astype(np.int64)) for i in starts]
        )
        targets = torch.stack(
            [torch.from_numpy(self.data[i + 1 : i + 1 + BLOCK].astype(np.int64)) for i in starts]
        )
        self.model(idx, targets).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
