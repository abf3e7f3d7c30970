"""Chapter 05: your GPT from a blank file.

A classic GPT-2-style language model: attention, MLP, residual block, tied embeddings, and an initialization
that survives depth. Trained on text you already have, then sampled.

    python build.py --tiny      one model on a laptop CPU, in well under a minute (the default)
    python build.py --full      about 12 million parameters on one GPU

Shapes: B batch, T positions, C = d_model, H heads, D = head_dim = C / H, V = vocab_size.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import cli, data, figures, report, runs, training
from shared.cli import Plan, Preset, Variant
from shared.console import Table, UserError, printable, say
from shared.randomness import generator
from shared.training import TrainingSettings
from shared.verdict import interval

# ---------------------------------------------------------------- config


@dataclass(frozen=True)
class GPTConfig:
    """The shape of the model. The vocabulary is the corpus's business, so it comes separately."""

    block_size: int = 32  # longest context, in tokens
    n_layers: int = 2
    n_heads: int = 4
    d_model: int = 64  # width of the residual stream
    bias: bool = True  # biases in attention and MLP, as in GPT-2

    def __post_init__(self):
        if min(self.block_size, self.n_layers, self.n_heads, self.d_model) < 1:
            raise ValueError(f"block_size, n_layers, n_heads and d_model must be at least 1, got {self}")
        if self.d_model % self.n_heads:
            raise ValueError(f"d_model {self.d_model} is not divisible by n_heads {self.n_heads}")

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads


# ---------------------------------------------------------------- layers


class ResidualWriter(nn.Linear):
    """A Linear whose output is added to the residual stream; its type is how initialization knows it."""


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which a position sees itself and its past (Vaswani et al. 2017, eq. 1)."""

    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.n_heads, self.head_dim = cfg.n_heads, cfg.head_dim
        self.qkv = nn.Linear(cfg.d_model, 3 * cfg.d_model, bias=cfg.bias)
        self.proj = ResidualWriter(cfg.d_model, cfg.d_model, bias=cfg.bias)

    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x (B, T, C) -> queries, keys, values, each (B, H, T, D). Later chapters override this."""
        B, T, _ = x.shape
        qkv = self.qkv(x).view(B, T, 3, self.n_heads, self.head_dim)
        return qkv.permute(2, 0, 3, 1, 4).unbind(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, T, C) -> (B, T, C)."""
        q, k, v = self.heads(x)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # softmax(q kᵀ / √D) v     (B, H, T, D)
        return self.proj(y.transpose(1, 2).flatten(2))  # heads side by side                    (B, T, C)


class MLP(nn.Module):
    """Two matrices with a GELU between, four times as wide inside (Radford et al. 2019)."""

    def __init__(self, cfg: GPTConfig):
        super().__init__()
        self.fc = nn.Linear(cfg.d_model, 4 * cfg.d_model, bias=cfg.bias)
        self.proj = ResidualWriter(4 * cfg.d_model, cfg.d_model, bias=cfg.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., C) -> (..., C)."""
        return self.proj(F.gelu(self.fc(x)))  # exact; GPT-2's tanh form is within 5e-4, and slower on a CPU


class Block(nn.Module):
    """Pre-norm residual block. The three make_ methods are what a later chapter exchanges."""

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
        self.cfg, self.vocab_size = cfg, vocab_size
        self.token_embedding = nn.Embedding(vocab_size, cfg.d_model)
        self.position_embedding = self.make_positions(cfg)
        self.blocks = nn.ModuleList(self.make_block(cfg) for _ in range(cfg.n_layers))
        self.norm_f = self.make_norm(cfg)
        self.lm_head = nn.Linear(cfg.d_model, vocab_size, bias=False)
        self.lm_head.weight = self.token_embedding.weight  # tied: one matrix, read from both ends

    def make_positions(self, cfg: GPTConfig) -> nn.Module | None:
        return nn.Embedding(cfg.block_size, cfg.d_model)

    def make_block(self, cfg: GPTConfig) -> nn.Module:
        return Block(cfg)

    def make_norm(self, cfg: GPTConfig) -> nn.Module:
        return nn.LayerNorm(cfg.d_model, eps=1e-5)

    def embed(self, idx: torch.Tensor) -> torch.Tensor:
        """Token ids (B, T) -> the start of the residual stream (B, T, C)."""
        x = self.token_embedding(idx)
        if self.position_embedding is not None:
            x = x + self.position_embedding.weight[: idx.shape[1]]
        return x

    def forward(
        self, idx: torch.Tensor, targets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Token ids (B, T) -> logits (B, T, V), and the mean cross-entropy in nats if targets (B, T) are given.

        Raises ValueError if T exceeds block_size.
        """
        if idx.shape[1] > self.cfg.block_size:
            raise ValueError(f"{idx.shape[1]} tokens don't fit a block_size of {self.cfg.block_size}")
        x = self.embed(idx)
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.norm_f(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def init_parameters(model: nn.Module, seed: int, std: float | str = 0.02) -> None:
    """Give every parameter of `model` its start: N(0, std²) for matrices, biases 0, gains 1.

    A matrix that writes into the residual stream gets std / √(2L): L layers add 2L terms, and the sum keeps
    its size (Radford et al. 2019, section 2.3). `std="fan_in"` takes 1/√fan_in for every matrix instead and
    leaves embeddings at 0.02, since a tied head would otherwise start far above ln V.

    A parameter's start depends on (seed, its name, its shape) alone, so two variants agree wherever they share
    a parameter. Raises TypeError for a parameter that no rule covers.
    """
    for name, p in model.named_parameters():  # a tied matrix comes once, as token_embedding.weight
        module = model.get_submodule(name.rpartition(".")[0])
        if p.dim() == 1:
            nn.init.zeros_(p) if name.endswith("bias") else nn.init.ones_(p)
        elif isinstance(module, nn.Linear | nn.Embedding):
            start = std
            if std == "fan_in":
                start = 0.02 if isinstance(module, nn.Embedding) else module.in_features**-0.5
            if isinstance(module, ResidualWriter):
                start /= math.sqrt(2 * model.cfg.n_layers)
            nn.init.normal_(p, std=start, generator=generator(seed, name, tuple(p.shape)))
        else:
            raise TypeError(f"no rule starts {name}, a {tuple(p.shape)} tensor of {type(module).__name__}")


def count_parameters(model: nn.Module) -> int:
    """How many numbers the model stores; a tied matrix counts once, on the meta device (no storage) too."""
    return sum({p.data_ptr() or id(p): p.numel() for p in model.parameters()}.values())


def check_tie(model: nn.Module, state: dict[str, torch.Tensor] | None = None) -> None:
    """ValueError if embedding and head are two tensors, or if `state`, about to be loaded, holds two values for them.

    Neither torch nor the loss complains: the head then trains on by itself, or the embedding, loaded first, is lost.
    """
    embedding, head = model.token_embedding.weight, model.lm_head.weight
    if embedding is not head:
        gap = "" if embedding.is_meta or head.is_meta else f", up to {(embedding - head).abs().max():.3g} apart"
        raise ValueError(f"the tie is lost: token_embedding.weight and lm_head.weight are two tensors{gap}")
    both = [state[name] for name in ("token_embedding.weight", "lm_head.weight") if name in (state or {})]
    if len(both) == 2 and not torch.equal(*both):
        gap = (both[0] - both[1]).abs().max()
        raise ValueError(f"one matrix, two values: token_embedding.weight and lm_head.weight are {gap:.3g} apart")


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

    temperature 0 takes the likeliest token; top_k keeps only the k likeliest; the context is the last
    block_size tokens. Returns (B, T + max_new_tokens). Raises ValueError for a temperature below 0, a top_k
    below 1 or an empty context.
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
                kept = logits.topk(min(top_k, logits.shape[-1])).values
                logits = logits.masked_fill(logits < kept[:, -1:], -math.inf)
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
    text = found["prompt"] + "|" + found["sample"][len(found["prompt"]) :]
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
