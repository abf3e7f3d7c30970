"""Chapter 07: the details that matter.

Chapter 05's GPT with its parts exchanged: RMSNorm for LayerNorm, SwiGLU for the GELU MLP, RoPE for
learned positions, experts for the MLP. The parts are those of steps 02 to 09; step 10 puts them
together. Then the chapter's experiment: {LayerNorm, RMSNorm} x {GELU, SwiGLU}, trained side by side
from the same initial weights on the same batches, and what the difference between them is worth.

    python build.py --tiny      on a laptop CPU, within a minute (the default)
    python build.py --full      the same experiment at a size for one GPU

Shapes: B batch, T positions, C = d_model, H heads, D = head_dim = C / H, V = vocab_size, N tokens,
E experts, k = top_k.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, figures, report, runs
from shared.cli import Plan, Preset, Variant
from shared.console import Table
from shared.training import TrainingSettings

import torch
import torch.nn as nn
import torch.nn.functional as F

gpt = chapters.load_build(5)  # the previous chapter's GPT: everything that this one doesn't change

# ---------------------------------------------------------------- config


def relu2(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0)² (So et al. 2021)."""
    return F.relu(x).square()


ACTIVATIONS = {"gelu": F.gelu, "relu2": relu2}  # of the plain MLP; a new one is one more entry

NORM_TYPES = ("layernorm", "rmsnorm", "none")
DENSE_MLP_TYPES = (*ACTIVATIONS, "swiglu")
MLP_TYPES = (*DENSE_MLP_TYPES, "moe")
POSITION_TYPES = ("learned", "rope", "none")


@dataclass(frozen=True)
class ModernConfig(gpt.GPTConfig):
    """Chapter 05's shape, and which part stands in each place."""

    norm_type: str = "rmsnorm"
    mlp_type: str = "swiglu"
    position_type: str = "learned"
    norm_eps: float = 1e-5
    d_hidden: int | None = None  # width inside the MLP; None: 4C if plain, 8/3 C for SwiGLU
    multiple_of: int = 1  # the 8/3 rule's width is rounded up to a multiple of this
    rope_base: float = 10_000.0
    n_experts: int = 4  # SwiGLU experts in the layer, for mlp_type "moe"
    top_k: int = 2  # experts that each token uses
    init_std: float | Literal["fan_in"] = 0.02  # of matrices at the start; "fan_in": 1/√(inputs)

    def __post_init__(self):
        super().__post_init__()
        choices = {
            "norm_type": NORM_TYPES,
            "mlp_type": MLP_TYPES,
            "position_type": POSITION_TYPES,
        }
        for name, valid in choices.items():
            value = getattr(self, name)
            if value not in valid:
                raise ValueError(f"unknown {name} {value!r}; valid: {', '.join(valid)}")


# ---------------------------------------------------------------- norms


class RMSNorm(nn.Module):
    """x / √(mean(x²) + eps) · weight (Zhang & Sennrich 2019, eq. 4).

    It is LayerNorm without the mean and without the bias.
    """

    def __init__(self, d_model: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d_model))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., C) -> (..., C), in the dtype of x."""
        # float16 ends at 65,504 = 256² - 32, so squares are taken in float32 (or float64, if x is).
        wide = x if x.dtype == torch.float64 else x.float()
        scale = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + self.eps)  # (..., 1)
        return (wide * scale * self.weight).to(x.dtype)


def make_norm(norm_type: str, d_model: int, eps: float = 1e-5) -> nn.Module:
    """The norm called norm_type for vectors of d_model. ValueError for a name not in NORM_TYPES."""
    if norm_type == "layernorm":
        return nn.LayerNorm(d_model, eps=eps)  # PyTorch's: step 01 builds the same by hand
    if norm_type == "rmsnorm":
        return RMSNorm(d_model, eps)
    if norm_type == "none":
        return nn.Identity()
    raise ValueError(f"unknown norm_type {norm_type!r}; valid: {', '.join(NORM_TYPES)}")


# ---------------------------------------------------------------- MLPs


def swiglu_hidden(d_model: int, multiple_of: int = 1) -> int:
    """The 8/3 rule: the width at which SwiGLU has as many weights as a plain MLP with 4C inside.

    3 · C · (8/3)C = 8C² = 2 · C · 4C. Rounded down, then up to a multiple of multiple_of.
    """
    hidden = 8 * d_model // 3
    return math.ceil(hidden / multiple_of) * multiple_of


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)), without biases (Shazeer 2020, eq. 6)."""

    def __init__(self, d_model: int, d_hidden: int | None = None):
        super().__init__()
        d_hidden = d_hidden or swiglu_hidden(d_model)
        self.gate_proj = nn.Linear(d_model, d_hidden, bias=False)
        self.up_proj = nn.Linear(d_model, d_hidden, bias=False)
        self.down_proj = gpt.ResidualWriter(d_hidden, d_model, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., C) -> (..., C)."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class ModernMLP(nn.Module):
    """Chapter 05's MLP with its activation by name, one of ACTIVATIONS."""

    def __init__(self, cfg: gpt.GPTConfig):
        super().__init__()
        d_hidden = cfg.d_hidden or 4 * cfg.d_model
        self.activation = ACTIVATIONS[cfg.mlp_type]
        self.fc = nn.Linear(cfg.d_model, d_hidden, bias=cfg.bias)
        self.proj = gpt.ResidualWriter(d_hidden, cfg.d_model, bias=cfg.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., C) -> (..., C)."""
        return self.proj(self.activation(self.fc(x)))


def make_mlp(cfg: gpt.GPTConfig) -> nn.Module:
    """The MLP called cfg.mlp_type. ValueError for a name not in DENSE_MLP_TYPES."""
    if cfg.mlp_type == "swiglu":
        d_hidden = cfg.d_hidden or swiglu_hidden(cfg.d_model, cfg.multiple_of)
        return SwiGLU(cfg.d_model, d_hidden)
    if cfg.mlp_type in ACTIVATIONS:
        return ModernMLP(cfg)
    raise ValueError(f"unknown mlp_type {cfg.mlp_type!r}; valid: {', '.join(DENSE_MLP_TYPES)}")


class MoE(nn.Module):
    """n_experts SwiGLU MLPs; each token uses the top_k that the router prefers (Shazeer 2017)."""

    fewest = 2  # the gate of one is always 1, and its router learns nothing; chapter 18 has others

    def __init__(self, cfg: gpt.GPTConfig):
        super().__init__()
        least = min(self.fewest, cfg.n_experts)  # where there is one expert, k is 1
        if not least <= cfg.top_k <= cfg.n_experts:
            raise ValueError(f"top_k {cfg.top_k} is not from {least} to n_experts {cfg.n_experts}")
        self.top_k = cfg.top_k
        d_hidden = cfg.d_hidden or swiglu_hidden(cfg.d_model, cfg.multiple_of)
        self.router = nn.Linear(cfg.d_model, cfg.n_experts, bias=False)
        self.experts = nn.ModuleList(SwiGLU(cfg.d_model, d_hidden) for _ in range(cfg.n_experts))

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens x (N, C) -> gates (N, k) of sum 1, and the chosen experts (N, k), best first."""
        with torch.autocast(x.device.type, enabled=False):  # choose in float32, whatever x is
            logits = F.linear(x.float(), self.router.weight.float())  # (N, E)
        probabilities = logits.softmax(-1)
        # A stable sort keeps equal probabilities in the order of the experts; topk may not.
        probabilities, order = probabilities.sort(dim=-1, descending=True, stable=True)
        chosen = order[:, : self.top_k]
        gates = probabilities[:, : self.top_k]
        return gates / gates.sum(-1, keepdim=True), chosen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., C) -> (..., C): each token's experts, weighted by its gates."""
        tokens = x.reshape(-1, x.shape[-1])  # (N, C)
        gates, chosen = self.route(tokens)
        y = torch.zeros_like(tokens)
        for e, expert in enumerate(self.experts):
            # Which tokens chose expert e, and whether as their first choice (0), second (1), …
            token, choice = torch.where(chosen == e)
            weighted = gates[token, choice, None] * expert(tokens[token])
            y = y.index_add(0, token, weighted.to(y.dtype))  # add each row to its token's row of y
        return y.view_as(x)


# ---------------------------------------------------------------- positions


def build_rope_cache(
    seq_len: int, head_dim: int, device: torch.device | str = "cpu", base: float = 10_000.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The table: cosine and sine of the angle of pair i at position t, each (T, D/2), float32.

    Pair i turns by base^(-2i/D) radians a position (Su et al. 2021, eq. 15). ValueError if
    head_dim is odd.
    """
    if head_dim % 2:
        raise ValueError(f"head_dim must be even for RoPE, got {head_dim}")
    pair = torch.arange(head_dim // 2, dtype=torch.float64)
    speed = base ** (-2 * pair / head_dim)  # radians a position: 1 for pair 0, then slower
    position = torch.arange(seq_len, dtype=torch.float64)
    angle = torch.outer(position, speed)
    # float64 until here: at position 100,000 an angle in float32 is off by some thousandths.
    return angle.cos().float().to(device), angle.sin().float().to(device)


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """A quarter turn of every pair: (x0, x1) becomes (-x1, x0). The name is the customary one."""
    x0 = x[..., 0::2]
    x1 = x[..., 1::2]
    return torch.stack((-x1, x0), dim=-1).flatten(-2)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn row t of x (..., T, D) by row t of the table; ValueError if it has fewer (eq. 34)."""
    T = x.shape[-2]
    if T > cos.shape[0]:
        raise ValueError(f"{T} positions don't fit a RoPE table of {cos.shape[0]}")
    cos = cos[:T].repeat_interleave(2, dim=-1)  # (T, D): one angle for both channels of a pair
    sin = sin[:T].repeat_interleave(2, dim=-1)
    # Turning a pair: cos times the pair plus sin times its quarter turn.
    return (x * cos + rotate_half(x) * sin).to(x.dtype)


class RotaryAttention(gpt.CausalSelfAttention):
    """Chapter 05's attention with queries and keys turned. Values carry content, not position."""

    def __init__(self, cfg: gpt.GPTConfig):
        super().__init__(cfg)
        # Plain tensors: model.bfloat16() passes them by, and a rounded table would turn by wrong
        # angles. But model.to(device) passes them by too, so tables() moves them.
        self.cos, self.sin = build_rope_cache(cfg.block_size, cfg.head_dim, base=cfg.rope_base)

    def tables(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin on the device of the input: moved there at the first call."""
        if self.cos.device != device:
            self.cos = self.cos.to(device)
            self.sin = self.sin.to(device)
        return self.cos, self.sin

    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x (B, T, C) -> queries, keys, values, each (B, H, T, D)."""
        cos, sin = self.tables(x.device)
        q, k, v = super().heads(x)
        return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v


# ---------------------------------------------------------------- block and model


class ModernBlock(gpt.Block):
    """Chapter 05's block with the parts that the config names; forward() is chapter 05's."""

    def make_norm(self, cfg: ModernConfig) -> nn.Module:
        return make_norm(cfg.norm_type, cfg.d_model, cfg.norm_eps)

    def make_attention(self, cfg: ModernConfig) -> nn.Module:
        if cfg.position_type == "rope":
            return RotaryAttention(cfg)
        return gpt.CausalSelfAttention(cfg)

    def make_mlp(self, cfg: ModernConfig) -> nn.Module:
        if cfg.mlp_type == "moe":
            return MoE(cfg)
        return make_mlp(cfg)


class ModernGPT(gpt.GPT):
    """Chapter 05's GPT with the parts that the config names; forward() is chapter 05's."""

    def make_positions(self, cfg: ModernConfig) -> nn.Module | None:
        if cfg.position_type == "learned":
            return super().make_positions(cfg)
        return None

    def make_block(self, cfg: ModernConfig) -> nn.Module:
        return ModernBlock(cfg)

    def make_norm(self, cfg: ModernConfig) -> nn.Module:
        return make_norm(cfg.norm_type, cfg.d_model, cfg.norm_eps)


# ---------------------------------------------------------------- hidden states


def tensor_stats(x: torch.Tensor) -> dict[str, float]:
    """mean, var, min, max and kurtosis of all entries of x.

    kurtosis = mean((x - mean)⁴) / var². It is 3 for Gaussian noise, and large when a few entries
    are much larger than the rest. For a tensor whose entries are all equal it is given as 0.
    """
    x = x.detach()
    x = x.float() if x.device.type == "mps" else x.double()  # Apple's GPUs have no float64
    centred = x - x.mean()
    var = centred.square().mean()
    normalized = centred * var.rsqrt()
    kurtosis = torch.where(var > 0, normalized.pow(4).mean(), 0)
    # One tolist(), not five: each waits for the GPU to finish.
    values = torch.stack((x.mean(), var, x.min(), x.max(), kurtosis)).tolist()
    return dict(zip(("mean", "var", "min", "max", "kurtosis"), values))


@torch.no_grad()
def stream_stats(model: gpt.GPT, idx: torch.Tensor) -> dict[str, dict[str, float]]:
    """tensor_stats of the residual stream at its 2L + 1 points, for one batch of token ids (B, T).

    A point is named after the part that wrote to the stream last. At each point a norm reads the
    stream, so a hook on that norm sees it. (A hook is a function that PyTorch calls when a module
    runs.)
    """
    points = ["embedding"]
    norms = []
    for i, block in enumerate(model.blocks):
        points += [f"blocks.{i}.attn", f"blocks.{i}.mlp"]
        norms += [block.norm1, block.norm2]
    norms.append(model.norm_f)
    stats = {}

    def keep(norm: nn.Module, inputs: tuple) -> None:
        point = points[len(stats)]  # the norms run in the order of the points
        stats[point] = tensor_stats(inputs[0])

    hooks = [norm.register_forward_pre_hook(keep) for norm in set(norms)]  # one hook on each norm
    try:
        model(idx)
    finally:
        for hook in hooks:
            hook.remove()
    return stats


# ---------------------------------------------------------------- experiment

PRESETS = {
    "tiny": Preset(
        ModernConfig(),
        TrainingSettings(observe_every=50),
        corpus="docs",
        tokenizer="char",
        seeds=6,
    ),
    "full": Preset(
        ModernConfig(block_size=256, n_layers=6, n_heads=6, d_model=384),
        TrainingSettings(
            steps=2000,
            batch_size=64,
            learning_rate=1e-3,
            warmup=100,
            final_rate=0.1,
            observe_every=250,
            precision="bfloat16",
            compile="inductor",
        ),
        corpus="source",
        tokenizer="bpe4k",
        seeds=8,
    ),
}


def variant(norm: str, mlp: str) -> Variant:
    """One corner of {LayerNorm, RMSNorm} x {GELU, SwiGLU}."""
    return Variant(
        f"{norm}+{mlp}",
        labels={"norm": norm, "MLP": mlp},
        changes={"norm_type": norm.lower(), "mlp_type": mlp.lower()},
    )


NORMS = ("LayerNorm", "RMSNorm")
MLPS = ("GELU", "SwiGLU")
VARIANTS = [variant(norm, mlp) for mlp in MLPS for norm in NORMS]  # the first is the baseline


class FourWay(runs.Experiment):
    """{LayerNorm, RMSNorm} x {GELU, SwiGLU}."""

    def build_model(self, config: ModernConfig, vocab_size: int, seed: int) -> nn.Module:
        model = ModernGPT(config, vocab_size)
        gpt.init_parameters(model, seed, config.init_std)
        return model

    def observe(self, model: nn.Module, idx: torch.Tensor) -> dict:
        return {"stream": stream_stats(model, idx)}


def last_stream(result: runs.Result) -> dict[str, dict[str, float]]:
    """The statistics of the residual stream at the last look, by what was last added to it."""
    return result.history.observations[-1]["stream"]


def stream_table(results: list[runs.Result]) -> Table:
    """Std and kurtosis of the residual stream at the last look: means over the seeds."""

    def std(name: str, point: str) -> str:
        mean = runs.mean_of(results, name, lambda r: last_stream(r)[point]["var"] ** 0.5)
        return report.number(mean, ".2f")

    def kurtosis(name: str, point: str) -> str:
        mean = runs.mean_of(results, name, lambda r: last_stream(r)[point]["kurtosis"])
        return report.number(mean, ".2f")

    points = next(list(last_stream(r)) for r in results if r.history)
    rows = []
    for mlp in MLPS:
        for point in points:
            names = [f"{norm}+{mlp}" for norm in NORMS]
            stds = [std(name, point) for name in names]
            kurtoses = [kurtosis(name, point) for name in names]
            rows.append([mlp, point, *stds, *kurtoses])
    headers = [f"{norm}\n{what}" for what in ("std", "kurtosis") for norm in NORMS]
    return Table(["MLP", "stream after", *headers], rows)


def scope() -> str:
    """What is known beyond one rate and budget; ledger.py writes it, from study.py's results."""
    return (Path(__file__).parent / "expected" / "beyond.txt").read_text(encoding="utf-8").strip()


def summarize(plan: Plan, results: list[runs.Result]) -> list[str | Table]:
    """The finding in a sentence, the table, and the stream that the models end with."""
    blocks: list[str | Table] = []
    finding = report.finding(plan, results)
    if finding:
        blocks += [finding, scope()]
    blocks += [report.comparison_table(plan, results), report.caption(plan)]
    seen = [r.history.observations[-1]["step"] for r in results if r.history]
    if seen:
        head = f"The residual stream at step {seen[0]:,}, means over the seeds:"
        blocks += [head, stream_table(results)]
    return blocks


def draw(plan: Plan, results: list[runs.Result]) -> dict:
    """The figures of this run by file name."""
    return {
        "curves.png": figures.curves(plan, results),
        "differences.png": figures.differences(plan, results),
        "hidden_states.png": figures.hidden_states(plan, results),
    }


def main(argv: list[str] | None = None) -> int:
    here = Path(__file__).parent
    options = cli.parse(__doc__, argv, here / "outputs")
    preset = PRESETS[options.preset]
    title = "The details that matter: norms and MLPs side by side"
    plan = cli.make_plan(title, preset, VARIANTS, options)
    return report.carry_out(FourWay(), plan, summarize, draw, here / "expected")


if __name__ == "__main__":
    cli.run_build(__file__)
