"""Chapter 05: your GPT from a blank file.

A classic GPT-2-style language model: attention, MLP, residual block, tied embeddings, and initial
values that work at any depth. Trained on text you already have, then sampled.

    python build.py --tiny      one model on a laptop CPU, in well under a minute (the default)
    python build.py --full      about 12 million parameters on one GPU

Shapes: B batch, T positions, C = d_model, H heads, D = head_dim = C / H, V = vocab_size.
"""

import math
import os
import sys
from dataclasses import dataclass, fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import cli, data, figures, report, runs, training
from shared.cli import Plan, Preset, Variant
from shared.console import Table, UserError, printable, say
from shared.randomness import generator
from shared.training import TrainingSettings
from shared.verdict import interval

import torch
import torch.nn as nn
import torch.nn.functional as F

# ---------------------------------------------------------------- config


@dataclass(frozen=True)
class GPTConfig:
    """The shape of the model. The size of the vocabulary is not here: it comes with the text."""

    block_size: int = 32  # longest context, in tokens
    n_layers: int = 2
    n_heads: int = 4
    d_model: int = 64  # numbers in the vector of each position
    bias: bool = True  # biases in attention and MLP, as in GPT-2

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is int and value < 1:
                raise ValueError(f"{field.name} must be at least 1, got {value}")
        if self.d_model % self.n_heads:
            raise ValueError(f"d_model {self.d_model} is not divisible by n_heads {self.n_heads}")

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads


# ---------------------------------------------------------------- layers


class ResidualWriter(nn.Linear):
    """A Linear whose output is added to the residual stream; init_parameters finds it by class."""


class CausalSelfAttention(nn.Module):
    """H small attentions side by side, in which a position sees itself and its past.

    Vaswani et al. 2017, equation 1.
    """

    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.n_heads = cfg.n_heads
        self.head_dim = cfg.head_dim
        self.qkv = nn.Linear(cfg.d_model, 3 * cfg.d_model, bias=cfg.bias)
        self.proj = ResidualWriter(cfg.d_model, cfg.d_model, bias=cfg.bias)

    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x (B, T, C) -> queries, keys, values, each (B, H, T, D). Later chapters override this."""
        B, T, _ = x.shape
        qkv = self.qkv(x).view(B, T, 3, self.n_heads, self.head_dim)
        return qkv.permute(2, 0, 3, 1, 4).unbind(0)  # (B, T, 3, H, D) -> (3, B, H, T, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, T, C) -> (B, T, C)."""
        q, k, v = self.heads(x)
        # softmax(q kᵀ / √D) v, with the future masked: (B, H, T, D)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).flatten(2)  # the heads side by side: (B, T, C)
        return self.proj(y)


class MLP(nn.Module):
    """Two matrices with a GELU between them, four times as wide inside (Radford et al. 2019)."""

    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.fc = nn.Linear(cfg.d_model, 4 * cfg.d_model, bias=cfg.bias)
        self.proj = ResidualWriter(4 * cfg.d_model, cfg.d_model, bias=cfg.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., C) -> (..., C)."""
        return self.proj(F.gelu(self.fc(x)))


class Block(nn.Module):
    """A residual block with the norm before each part (pre-norm).

    Chapter 07 overrides the make_ methods to put other parts in.
    """

    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.norm1 = self.make_norm(cfg)
        self.attn = self.make_attention(cfg)
        self.norm2 = self.make_norm(cfg)
        self.mlp = self.make_mlp(cfg)

    def make_norm(self, cfg: GPTConfig) -> nn.Module:
        return nn.LayerNorm(cfg.d_model, eps=1e-5)

    def make_attention(self, cfg: GPTConfig) -> nn.Module:
        return CausalSelfAttention(cfg)

    def make_mlp(self, cfg: GPTConfig) -> nn.Module:
        return MLP(cfg)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, T, C) -> (B, T, C): the residual stream is these two lines."""
        x = x + self.attn(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x


# ---------------------------------------------------------------- model


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


def init_parameters(model: nn.Module, seed: int, std: float | str = 0.02) -> None:
    """Give every parameter its start: N(0, std²) for matrices, 0 for biases, 1 for norm weights.

    A matrix that writes into the residual stream starts √(2L) times smaller: L layers add 2L terms
    to the stream, and so their sum keeps its size (Radford et al. 2019, section 2.3).

    std="fan_in", which only chapter 07 uses, means 1/√(inputs of the matrix) instead of a number;
    embeddings then keep 0.02.

    A start depends on the seed, the parameter's name and its shape, and on nothing else: two
    models start with equal numbers in every parameter that they have in common (writers: at equal
    depth). Raises TypeError for a parameter that no rule covers.
    """
    for name, p in model.named_parameters():  # a tied matrix comes once, as token_embedding.weight
        owner = name.rpartition(".")[0]  # "blocks.0.mlp.fc.weight" -> "blocks.0.mlp.fc"
        module = model.get_submodule(owner)
        if p.dim() == 1 and name.endswith("bias"):
            nn.init.zeros_(p)
        elif p.dim() == 1:
            nn.init.ones_(p)
        elif isinstance(module, nn.Linear | nn.Embedding):
            if std != "fan_in":
                start = std
            elif isinstance(module, nn.Embedding):
                start = 0.02
            else:
                start = module.in_features**-0.5
            if isinstance(module, ResidualWriter):
                start /= math.sqrt(2 * model.cfg.n_layers)
            nn.init.normal_(p, std=start, generator=generator(seed, name, tuple(p.shape)))
        else:
            kind = type(module).__name__
            raise TypeError(f"no rule starts {name}, a {tuple(p.shape)} tensor of {kind}")


def count_parameters(model: nn.Module) -> int:
    """How many numbers the model stores; parameters() yields a tied matrix once."""
    return sum(p.numel() for p in model.parameters())


def check_tie(model: nn.Module, state: dict[str, torch.Tensor] | None = None) -> None:
    """Raise ValueError if embedding and head are not one tensor.

    Or if `state`, a checkpoint about to be loaded, holds two different values for them. PyTorch
    complains of neither. Two tensors drift apart in training; of two values, the last loaded wins.
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
                dropped = order[:, top_k:]  # all but the first k
                logits = logits.scatter(-1, dropped, -math.inf)
            probabilities = F.softmax(logits / temperature, dim=-1)
            next_idx = torch.multinomial(probabilities, 1, generator=generator)
        idx = torch.cat((idx, next_idx), dim=1)
    return idx


# ---------------------------------------------------------------- experiment

PRESETS = {
    "tiny": Preset(
        GPTConfig(), TrainingSettings(steps=600), corpus="docs", tokenizer="char", seeds=1
    ),
    "full": Preset(
        GPTConfig(block_size=256, n_layers=6, n_heads=6, d_model=384),
        TrainingSettings(
            steps=2000,  # three times over the training part; more would learn it by heart
            batch_size=64,
            learning_rate=1e-3,
            warmup=100,
            final_rate=0.1,
            precision="bfloat16",
            compile="inductor",
        ),
        corpus="source",
        tokenizer="bpe4k",
        seeds=1,
    ),
}

VARIANTS = [Variant("GPT", labels={"model": "GPT"}, changes={})]
SAMPLE_TOKENS = 300
TEMPERATURE = 0.8


class OneGPT(runs.Experiment):
    """The classic model, trained once per seed, and what it then writes."""

    data_parallel = True

    def build_model(self, config: GPTConfig, vocab_size: int, seed: int) -> nn.Module:
        model = GPT(config, vocab_size)
        init_parameters(model, seed)
        return model

    def inspect(self, model: nn.Module, corpus: data.Corpus, seed: int) -> dict:
        check_tie(model)  # after the move to its device and the training
        prompt = corpus.validation[: model.cfg.block_size].tolist()
        sample = continue_text(model, prompt, seed)
        decode = corpus.tokenizer.decode
        return {"prompt": decode(prompt), "sample": decode(prompt + sample)}


def continue_text(model: nn.Module, prompt: list[int], seed: int) -> list[int]:
    """The SAMPLE_TOKENS token ids that the model writes after those of the prompt."""
    device = model.token_embedding.weight.device
    idx = torch.tensor([prompt], device=device)
    draws = torch.Generator(device).manual_seed(seed)
    idx = generate(model, idx, SAMPLE_TOKENS, temperature=TEMPERATURE, generator=draws)
    return idx[0, len(prompt) :].tolist()


def summarize(plan: Plan, results: list[runs.Result]) -> list[str | Table]:
    """The loss against guessing evenly, the table, and the first finished seed's sample."""
    table = report.comparison_table(plan, results)
    finished = [r for r in results if r.history]
    if not finished:
        return [table]
    losses = interval([r.history.validation_loss for r in finished])
    spread = "" if losses.half_width is None else f" ± {losses.half_width:.3f}"
    gained = plan.uniform_loss - losses.mean
    finding = (
        f"On text that it never saw, the loss is {losses.mean:.3f}{spread} nats a token. Guessing "
        f"evenly has {plan.uniform_loss:.3f}: the model gives the right next token "
        f"{math.exp(gained):.1f} times the probability (geometric mean)."
    )
    found = finished[0].found
    head = f"A sample (seed {finished[0].run.seed}, temperature {TEMPERATURE}), after the bar:"
    # Of a letter that is half in the prompt, both halves come after the bar.
    before = os.path.commonprefix([found["prompt"], found["sample"]])
    text = before + "|" + found["sample"][len(before) :]
    return [finding, table, head, text]


def draw(plan: Plan, results: list[runs.Result]) -> dict:
    """The figures of this run by file name."""
    return {"curves.png": figures.curves(plan, results)}


def say_sample(plan: Plan, prompt: str) -> int:
    """Continue a prompt by the model that the same command trained before."""
    store = runs.Store(plan, OneGPT())
    path = store.path(store.wanted()[0], "pt")
    if not path.exists():
        raise UserError(f"--sample: {path} is not there; run the command without --sample first")
    ids = plan.corpus.tokenizer.encode(prompt)
    if not ids:
        raise UserError("--sample: the prompt is empty; give it a character or more")
    model = GPT(plan.configs[plan.baseline], plan.corpus.vocab_size)
    model.load_state_dict(training.load_checkpoint(path)["model"])
    written = continue_text(model.eval(), ids, plan.seeds[0])
    say(printable(plan.corpus.tokenizer.decode(ids + written)))
    return 0


def main(argv: list[str] | None = None) -> int:
    here = Path(__file__).parent
    parser = cli.build_parser(__doc__)
    parser.add_argument("--sample", metavar="TEXT", help="let the trained model continue this")
    args = parser.parse_args(argv)
    options = cli.options_from(args, here / "outputs")
    preset = PRESETS[options.preset]
    plan = cli.make_plan("Your GPT from a blank file", preset, VARIANTS, options)
    if args.sample is not None:
        return say_sample(plan, args.sample)
    return report.carry_out(OneGPT(), plan, summarize, draw, here / "expected")


if __name__ == "__main__":
    cli.run_build(__file__)
