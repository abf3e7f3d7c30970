"""Chapter 07: the details that matter.

Chapter 05's GPT with its parts exchanged: RMSNorm for LayerNorm, SwiGLU for the GELU MLP, RoPE for learned
positions, experts for the MLP. Then the chapter's experiment: {LayerNorm, RMSNorm} x {GELU, SwiGLU}, trained side
by side from the same numbers on the same batches, and what their difference is worth.

    python build.py --tiny      on a laptop CPU, within a minute (the default)
    python build.py --full      the same experiment at a size for one GPU

Shapes: B batch, T positions, C = d_model, H heads, D = head_dim = C / H, V = vocab_size, N tokens, E experts.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, figures, report, runs
from shared.cli import Plan, Preset, Variant
from shared.console import Table
from shared.training import TrainingSettings

gpt = chapters.load_build(5)  # the previous chapter's GPT: everything that this one doesn't change

# ---------------------------------------------------------------- config

NORM_TYPES = ("layernorm", "rmsnorm", "none")
DENSE_MLP_TYPES = ("gelu", "relu2", "swiglu")
MLP_TYPES = (*DENSE_MLP_TYPES, "moe")
POSITION_TYPES = ("learned", "rope", "none")


@dataclass(frozen=True)
class ModernConfig(gpt.GPTConfig):
    """Chapter 05's shape, and which part stands in each place."""

    norm_type: str = "rmsnorm"
    mlp_type: str = "swiglu"
    position_type: str = "learned"
    norm_eps: float = 1e-5
    d_hidden: int | None = None  # width inside the MLP; None: 4C for gelu and relu2, 8/3 C for swiglu and experts
    multiple_of: int = 1  # the 8/3 rule's result is rounded up to a multiple of this
    rope_base: float = 10_000.0
    n_experts: int = 4  # mlp_type "moe": so many SwiGLU experts,
    top_k: int = 2  # of which each token uses so many
    init_std: float | str = 0.02  # of every matrix at the start; "fan_in": 1/√fan_in

    def __post_init__(self):
        super().__post_init__()
        for name, valid in (("norm_type", NORM_TYPES), ("mlp_type", MLP_TYPES), ("position_type", POSITION_TYPES)):
            if getattr(self, name) not in valid:
                raise ValueError(f"unknown {name} {getattr(self, name)!r}; valid: {', '.join(valid)}")


# ---------------------------------------------------------------- norms


class RMSNorm(nn.Module):
    """x / √(mean(x²) + eps) · weight (Zhang & Sennrich 2019, eq. 4): LayerNorm without centring and without bias."""

    def __init__(self, d_model: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d_model))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., C) -> (..., C) in x's dtype; the statistics in float32 or better, as x² overflows float16 at 256."""
        wide = x if x.dtype == torch.float64 else x.float()
        scale = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + self.eps)  # (..., 1)
        return (wide * scale * self.weight).to(x.dtype)


def make_norm(norm_type: str, d_model: int, eps: float = 1e-5) -> nn.Module:
    """The norm called norm_type, one of NORM_TYPES, for vectors of d_model. ValueError for any other name."""
    if norm_type == "layernorm":
        return nn.LayerNorm(d_model, eps=eps)  # torch's own: step_01 builds it by hand and shows that they agree
    if norm_type == "rmsnorm":
        return RMSNorm(d_model, eps)
    if norm_type == "none":
        return nn.Identity()
    raise ValueError(f"unknown norm_type {norm_type!r}; valid: {', '.join(NORM_TYPES)}")


# ---------------------------------------------------------------- MLPs


def swiglu_hidden(d_model: int, multiple_of: int = 1) -> int:
    """The 8/3 rule: 3 matrices of C x 8/3 C hold what 2 of C x 4C do. Rounded down, then up to a multiple."""
    hidden = 8 * d_model // 3
    return -(-hidden // multiple_of) * multiple_of


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


class ModernMLP(gpt.MLP):
    """Chapter 05's MLP with its activation by name: "gelu" or "relu2" (So et al. 2021)."""

    def __init__(self, cfg: gpt.GPTConfig):
        super().__init__(cfg)
        self.activation = cfg.mlp_type
        if cfg.d_hidden:
            self.fc = nn.Linear(cfg.d_model, cfg.d_hidden, bias=cfg.bias)
            self.proj = gpt.ResidualWriter(cfg.d_hidden, cfg.d_model, bias=cfg.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., C) -> (..., C)."""
        if self.activation == "gelu":
            return super().forward(x)
        return self.proj(F.relu(self.fc(x)).square())


def make_mlp(cfg: gpt.GPTConfig) -> nn.Module:
    """The MLP called cfg.mlp_type, one of DENSE_MLP_TYPES. ValueError for any other name."""
    if cfg.mlp_type == "swiglu":
        return SwiGLU(cfg.d_model, cfg.d_hidden or swiglu_hidden(cfg.d_model, cfg.multiple_of))
    if cfg.mlp_type in DENSE_MLP_TYPES:
        return ModernMLP(cfg)
    raise ValueError(f"unknown mlp_type {cfg.mlp_type!r}; valid: {', '.join(DENSE_MLP_TYPES)}")


class MoE(nn.Module):
    """n_experts SwiGLU MLPs of which each token uses the top_k that the router prefers (Shazeer et al. 2017)."""

    def __init__(self, cfg: gpt.GPTConfig):
        super().__init__()
        if not 1 <= cfg.top_k <= cfg.n_experts:
            raise ValueError(f"top_k {cfg.top_k} must lie between 1 and n_experts {cfg.n_experts}")
        self.top_k = cfg.top_k
        d_hidden = cfg.d_hidden or swiglu_hidden(cfg.d_model, cfg.multiple_of)
        self.router = nn.Linear(cfg.d_model, cfg.n_experts, bias=False)
        self.experts = nn.ModuleList(SwiGLU(cfg.d_model, d_hidden) for _ in range(cfg.n_experts))

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens x (N, C) -> gates (N, k), which sum to 1, and the experts' numbers (N, k), the best first.

        In float32 whatever x is, under autocast too. Equal logits go to the lowest number: a stable sort promises
        that, topk doesn't.
        """
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.float(), self.router.weight.float())  # (N, E)
        probabilities, order = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
        gates, chosen = probabilities[:, : self.top_k], order[:, : self.top_k]
        return gates / gates.sum(-1, keepdim=True), chosen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., C) -> (..., C): each token's experts, weighted by its gates."""
        tokens = x.reshape(-1, x.shape[-1])
        gates, chosen = self.route(tokens)
        y = torch.zeros_like(tokens)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == e)  # who chose this expert, and as their how-manieth
            weighted = gates[token, slot, None] * expert(tokens[token])
            y = y.index_add(0, token, weighted.to(y.dtype))
        return y.view_as(x)


# ---------------------------------------------------------------- positions


def build_rope_cache(
    seq_len: int, head_dim: int, device: torch.device | str = "cpu", base: float = 10_000.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of position · base^(−2i/D) for pair i, each (seq_len, D/2) in float32 (Su et al. 2021, eq. 34).

    In float64 and cast last: float32 angles are 1e-3 off at position 100,000. ValueError for an odd head_dim.
    """
    if head_dim % 2:
        raise ValueError(f"RoPE turns pairs of channels, so head_dim must be even, got {head_dim}")
    inverse_frequency = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float64), inverse_frequency)
    return angles.cos().float().to(device), angles.sin().float().to(device)


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """A quarter turn of each pair of neighbouring channels: (x0, x1) -> (−x1, x0)."""
    return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn pair i of x (..., T, D) at position t by the angle in cos[t, i], sin[t, i]; ValueError beyond the table."""
    T = x.shape[-2]
    if T > cos.shape[0]:
        raise ValueError(f"{T} positions don't fit a RoPE table of {cos.shape[0]}")
    cos = cos[:T].repeat_interleave(2, dim=-1)  # (T, D): both channels of a pair turn by the same angle
    sin = sin[:T].repeat_interleave(2, dim=-1)
    return (x * cos + rotate_half(x) * sin).to(x.dtype)


class RotaryAttention(gpt.CausalSelfAttention):
    """Chapter 05's attention with queries and keys turned by their position (Su et al. 2021)."""

    def __init__(self, cfg: gpt.GPTConfig):
        super().__init__(cfg)
        self.block_size, self.rope_base = cfg.block_size, cfg.rope_base
        self.cos, self.sin = build_rope_cache(cfg.block_size, cfg.head_dim, base=cfg.rope_base)

    def _apply(self, fn, recurse=True):
        """The tables follow the model to its device but never its dtype: `.bfloat16()` leaves them float32."""
        super()._apply(fn, recurse)
        self.cos, self.sin = build_rope_cache(self.block_size, self.head_dim, self.qkv.weight.device, self.rope_base)
        return self

    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x (B, T, C) -> turned queries, turned keys, values, each (B, H, T, D)."""
        q, k, v = super().heads(x)
        return apply_rope(q, self.cos, self.sin), apply_rope(k, self.cos, self.sin), v


# ---------------------------------------------------------------- block and model


class ModernBlock(gpt.Block):
    """Chapter 05's block, its forward untouched, with the parts that the config names."""

    def make_norm(self, cfg: ModernConfig) -> nn.Module:
        return make_norm(cfg.norm_type, cfg.d_model, cfg.norm_eps)

    def make_attention(self, cfg: ModernConfig) -> nn.Module:
        return RotaryAttention(cfg) if cfg.position_type == "rope" else gpt.CausalSelfAttention(cfg)

    def make_mlp(self, cfg: ModernConfig) -> nn.Module:
        return MoE(cfg) if cfg.mlp_type == "moe" else make_mlp(cfg)


class ModernGPT(gpt.GPT):
    """Chapter 05's GPT, its forward untouched, with the parts that the config names."""

    def make_positions(self, cfg: ModernConfig) -> nn.Module | None:
        return super().make_positions(cfg) if cfg.position_type == "learned" else None

    def make_block(self, cfg: ModernConfig) -> nn.Module:
        return ModernBlock(cfg)

    def make_norm(self, cfg: ModernConfig) -> nn.Module:
        return make_norm(cfg.norm_type, cfg.d_model, cfg.norm_eps)


# ---------------------------------------------------------------- hidden states


def tensor_stats(x: torch.Tensor) -> dict[str, float]:
    """mean, var, min, max and kurtosis over all entries of x: the population's, in float64 where the device has it.

    kurtosis = mean((x − mean)⁴) / var²: 1 for ±1, 3 for a Gaussian, about n for one spike among n entries; not the
    excess over 3. A constant tensor has no shape to speak of and gets 0.
    """
    x = x.detach().to(torch.float32 if x.device.type == "mps" else torch.float64)
    centred = x - x.mean()
    var = centred.square().mean()  # divided by the number of entries, not one less
    kurtosis = torch.where(var > 0, (centred * var.rsqrt()).pow(4).mean(), 0)
    values = torch.stack((x.mean(), var, x.min(), x.max(), kurtosis)).tolist()  # one wait for a GPU, not five
    return dict(zip(("mean", "var", "min", "max", "kurtosis"), values, strict=True))


@torch.no_grad()
def stream_stats(model: gpt.GPT, idx: torch.Tensor) -> dict[str, dict[str, float]]:
    """tensor_stats of the residual stream at its 2L + 1 points, in one forward pass over token ids (B, T).

    A point is called by what was last written to the stream. A norm reads the stream there, so a hook on the norm's
    input catches it; the hooks are gone again when the pass is over.
    """
    points = iter(["embedding", *(f"blocks.{i}.{part}" for i in range(model.cfg.n_layers) for part in ("attn", "mlp"))])
    norms = [norm for block in model.blocks for norm in (block.norm1, block.norm2)] + [model.norm_f]
    stats = {}

    def keep(norm: nn.Module, inputs: tuple) -> None:
        stats[next(points)] = tensor_stats(inputs[0])

    hooks = [norm.register_forward_pre_hook(keep) for norm in dict.fromkeys(norms)]
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
        seeds=3,
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


def summarize(plan: Plan, results: list[runs.Result]) -> list[str | Table]:
    """The finding in a sentence, the table, and the stream that the models end with."""
    blocks: list[str | Table] = []
    finding = report.finding(plan, results)
    if finding:
        blocks.append(finding)
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
