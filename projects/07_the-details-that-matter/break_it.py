"""Break the details of chapter 07, one at a time, and see what each was for.

    python break_it.py                          the chapter's own: LayerNorm below, RMSNorm above
    python break_it.py --list                   all eighteen, with the symptom that each is predicted to have
    python break_it.py --sabotage no-eps        one of them, healthy and broken side by side
    python break_it.py --all                    every one, summed up in a table (about a minute)
    python break_it.py --quiz                   one at random: you see the vital signs, you name the damage

The healthy model has RMSNorm, SwiGLU and RoPE. Every damaged one starts from its seed and sees its batches. Most of
this damage is silent: the loss falls as it should, and only a law that the part must obey tells.
"""

import math
import sys
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, data, sabotage, training
from shared.instruments import Case, Instrument, Reading, Sabotage
from shared.randomness import generator

modern = chapters.load_build(7)
step_13, step_08 = chapters.load_step(7, 13), chapters.load_step(7, 8)
gpt = modern.gpt

CONFIG = modern.ModernConfig(position_type="rope")
SETTINGS = training.TrainingSettings(steps=200, batch_size=16)
HEALTHY_STARTS = 5  # healthy models that say how far apart healthy models end


@lru_cache(maxsize=1)
def corpus() -> data.Corpus:
    whole = data.load_corpus("docs", "char", CONFIG.block_size)
    return replace(whole, validation=whole.validation[:10_000])


# ---------------------------------------------------------------- the patient


@dataclass(frozen=True)
class Patient:
    """A model to be: how it is built, and how its code stands when training is over. A sabotage exchanges one."""

    seed: int  # of the batches
    start: int  # the seed of the initial values
    cfg: modern.ModernConfig = CONFIG
    model_class: type[modern.ModernGPT] = modern.ModernGPT
    later_class: type[modern.ModernGPT] | None = None  # what the trained weights are loaded into; None: the same

    def build(self, **changes) -> modern.ModernGPT:
        """A freshly started model as the code stands now, its config changed as named."""
        model = (self.later_class or self.model_class)(replace(self.cfg, **changes), corpus().vocab_size)
        gpt.init_parameters(model, self.start)
        return model

    @property
    def history(self) -> training.History:
        return train(self.seed, self.start, self.cfg, self.model_class)[1]

    @cached_property
    def trained(self) -> modern.ModernGPT:
        """The trained weights in the code as it stands now."""
        model = self.build()
        model.load_state_dict(train(self.seed, self.start, self.cfg, self.model_class)[0].state_dict())
        return model.eval()


@lru_cache(maxsize=64)
def train(seed: int, start: int, cfg: modern.ModernConfig, model_class: type) -> tuple[nn.Module, training.History]:
    """A model after SETTINGS.steps steps, and how it got there. What is damaged later shares the healthy training."""
    model = model_class(cfg, corpus().vocab_size)
    gpt.init_parameters(model, start)
    return model, training.train(model, corpus(), SETTINGS, seed)


def healthy(seed: int) -> Patient:
    return Patient(seed, start=seed)


# ---------------------------------------------------------------- instruments: the whole model


def training_loss(patient: Patient) -> Reading:
    """Where training ends, against healthy models that saw the same batches from other starts: red if it lies more
    than three times the width of their range from that range's middle."""
    ends = [Patient(patient.seed, patient.seed + i).history.train_loss for i in range(HEALTHY_STARTS)]
    middle, width = (max(ends) + min(ends)) / 2, max(ends) - min(ends)
    loss = patient.history.train_loss
    return Reading(f"{loss:.2f}, healthy {min(ends):.2f} to {max(ends):.2f}", abs(loss - middle) <= 3 * width, loss)


def learning(patient: Patient) -> Reading:
    """How much better than guessing evenly it ends."""
    gained = math.log(corpus().vocab_size) - patient.history.validation_loss
    return Reading(f"{gained:.2f} nats", gained > 0.5, gained)


def evaluation(patient: Patient) -> Reading:
    """The validation loss of the trained weights, when training ended and as the code stands now."""
    before, after = patient.history.validation_loss, training.evaluate(patient.trained, corpus().validation, SETTINGS)
    return Reading(f"{before:.3f} then, {after:.3f} now", abs(after - before) < 0.05, after - before)


def causality(patient: Patient) -> Reading:
    """The gradient of position 5's logits: how much of it goes to what enters at later positions."""
    model, idx = patient.build(), corpus().validation[None, : CONFIG.block_size]
    x = model.embed(idx).detach().requires_grad_()
    model.embed = lambda idx: x
    model(idx)[0][0, 5].square().sum().backward()
    share = (x.grad[0, 6:].norm() / x.grad.norm()).item() if x.grad.any() else 0.0
    return Reading(f"{share:.1%} comes from later", share == 0.0, share)


@torch.no_grad()
def order(patient: Patient) -> Reading:
    """Swap two tokens of the past: in a one-layer model only the positions can tell."""
    model = patient.build(n_layers=1).double()
    idx = torch.arange(CONFIG.block_size)[None]
    swapped = idx.clone()
    swapped[0, [2, 9]] = idx[0, [9, 2]]
    before, after = model(idx)[0][0, -1], model(swapped)[0][0, -1]
    change = ((after - before).norm() / before.norm()).item() if before.any() else 0.0
    return Reading(f"logits change by {change:.0e}", change > 1e-12, change)


def depth(patient: Patient) -> Reading:
    """The power of L by which the last layer's gradient goes with the number of layers L, from a plain start: near
    −1/2 in a pre-norm model (Xiong et al. 2020, theorem 1)."""
    idx, targets = data.sample_batch(corpus().train, CONFIG.block_size, 8, generator(patient.seed, "depth"))
    norms = []
    for n_layers in (4, 16):
        model = patient.build(n_layers=n_layers)
        gpt.init_parameters(model, patient.start, std="fan_in")
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, gpt.ResidualWriter):
                    module.weight *= math.sqrt(2 * n_layers)  # undo the scaling by depth
        model(idx, targets)[1].backward()
        norms.append(model.blocks[-1].mlp.gate_proj.weight.grad.norm().item())
    power = math.log(norms[1] / norms[0]) / math.log(4) if min(norms) > 0 else 0.0
    return Reading(f"as L^{power:+.2f}", -0.9 < power < -0.25, power)


def size(patient: Patient) -> Reading:
    """Weights of the MLP over those of the plain one with 4C inside."""
    mlp = patient.build().blocks[0].mlp
    ratio = gpt.count_parameters(mlp) / (8 * CONFIG.d_model**2)
    return Reading(f"{ratio:.3f} times", abs(ratio - 1) < 0.01, ratio)


# ---------------------------------------------------------------- instruments: norms


@torch.no_grad()
def scale(patient: Patient) -> Reading:
    """Make the stream ten times as large: what a block adds to it must not change."""
    block, x = patient.build().blocks[0], noise(patient, 3, 7, CONFIG.d_model)
    added, added_to_large = block(x) - x, block(10 * x) - 10 * x
    times = (added_to_large.norm() / added.norm()).item() if added.any() else 1.0
    return Reading(f"{times:.2f} times as much", abs(times - 1) < 0.01, times)


@torch.no_grad()
def shift(patient: Patient) -> Reading:
    """Add 3 to every channel: LayerNorm doesn't see it, RMSNorm does. All of a model's norms should agree."""
    model, x = patient.build(), noise(patient, 3, 7, CONFIG.d_model)
    norms = [norm for block in model.blocks for norm in (block.norm1, block.norm2)] + [model.norm_f]
    moved = sum((norm(x + 3) - norm(x)).norm().item() > 0.01 * norm(x).norm().item() for norm in norms)
    return Reading(f"{moved} of {len(norms)} norms see it", moved in (0, len(norms)), moved)


def norms(patient: Patient) -> Reading:
    """How many gain vectors there are: one for each of the 2L + 1 places where the stream is read."""
    gains = sum(name.rpartition(".")[2] == "weight" and p.dim() == 1 for name, p in patient.build().named_parameters())
    return Reading(f"{gains} gains", gains == 2 * CONFIG.n_layers + 1, gains)


@torch.no_grad()
def tiny_vector(patient: Patient) -> Reading:
    """768 entries of 1e-4: eps holds them at 0.0316."""
    y = patient.build(d_model=768, n_layers=1).norm_f(torch.full((1, 1, 768), 1e-4)).mean().item()
    return Reading(f"{y:.4f}", abs(y - 0.0316070) < 1e-6, y)


@torch.no_grad()
def float16(patient: Patient) -> Reading:
    """768 entries of 3e4 in float16, whose squares float16 can't hold: 1.0."""
    y = patient.build(d_model=768, n_layers=1).norm_f(torch.full((1, 1, 768), 3e4, dtype=torch.float16)).float()
    return Reading(f"{y.mean().item():.4f}", torch.equal(y, torch.ones_like(y)), y.mean().item())


@torch.no_grad()
def layernorm(patient: Patient) -> Reading:
    """The model's LayerNorm on a stream of std 0.001, against the formula in float64."""
    x = 1e-3 * noise(patient, 3, 7, CONFIG.d_model)
    exact = F.layer_norm(x.double(), x.shape[-1:], eps=1e-5)
    error = (patient.build(norm_type="layernorm").norm_f(x).double() - exact).abs().max().item()
    return Reading(f"{error:.0e} off", error < 1e-5, error)


# ---------------------------------------------------------------- instruments: activation and positions


@torch.no_grad()
def activation(patient: Patient) -> Reading:
    """An MLP of one channel with gate 2 and up 3: silu(2) · 3 = 5.2848."""
    mlp = patient.build(d_model=1, n_heads=1, d_hidden=1, n_layers=1, position_type="none").blocks[0].mlp
    for linear, weight in ((mlp.gate_proj, 2.0), (mlp.up_proj, 3.0), (mlp.down_proj, 1.0)):
        nn.init.constant_(linear.weight, weight)
    y = mlp(torch.ones(1, 1, 1)).item()
    return Reading(f"{y:.4f}", abs(y - 5.2847825) < 1e-5, y)


@torch.no_grad()
def turned(patient: Patient, x: torch.Tensor, n_heads: int, T: int) -> list[torch.Tensor]:
    """What attention makes of a vector x (D) in every head at every position: q, k and v, each (H, T, D)."""
    D = len(x)
    attn = patient.build(block_size=T, n_heads=n_heads, d_model=n_heads * D, n_layers=1).blocks[0].attn
    attn.qkv.weight.copy_(torch.eye(n_heads * D).repeat(3, 1))
    attn.qkv.bias.zero_()
    return [heads[0] for heads in attn.heads(x.repeat(n_heads).expand(1, T, -1))]


def rotation(patient: Patient) -> Reading:
    """[1, 2, 3, 4] at position 3, a value computed by hand."""
    q = turned(patient, torch.tensor([1.0, 2.0, 3.0, 4.0]), n_heads=1, T=5)[0][0, 3]
    error = (q - torch.tensor([-1.2722325, -1.8388650, 2.8786681, 4.0881866])).abs().max().item()
    return Reading(f"[{', '.join(f'{value:.2f}' for value in q.tolist())}]", error < 1e-3, error)


def origin(patient: Patient) -> Reading:
    """At position 0 queries and keys stay as they are, in every head."""
    x = noise(patient, 6)
    moved = max((heads[:, 0] - x).abs().max().item() for heads in turned(patient, x, n_heads=3, T=5)[:2])
    return Reading(f"moved by {moved:.2f}", moved == 0.0, moved)


def far(patient: Patient) -> Reading:
    """A query at position 1,000 against its rotation in float64, as part of its length."""
    x = noise(patient, 16)
    pairs = torch.view_as_complex(x.double().view(8, 2))
    angles = 1000 * 10_000.0 ** (-torch.arange(8, dtype=torch.float64) / 8)
    exact = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten()
    error = ((turned(patient, x, n_heads=1, T=1001)[0][0, 1000] - exact).norm() / exact.norm()).item()
    return Reading(f"{error:.0e} off", error < 1e-5, error)


def diagonal(patient: Patient) -> Reading:
    """A position's score with itself: both turn by the same angle, so it is the plain q · k."""
    x = noise(patient, 6)
    q, k, _ = turned(patient, x, n_heads=3, T=5)
    error = ((q * k).sum(-1) - x @ x).abs().max().item()
    return Reading(f"{error:.0e} off", error < 1e-5, error)


def values(patient: Patient) -> Reading:
    """A context of one token, repeated: the values, and so what is read from it, are the same everywhere."""
    v = turned(patient, noise(patient, 6), n_heads=3, T=5)[2]
    spread = (v - v[:, :1]).abs().max().item()
    return Reading(f"differ by {spread:.2f}", spread == 0.0, spread)


def noise(patient: Patient, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator(patient.seed, "noise", shape))


INSTRUMENTS = (
    Instrument("training-loss", "does it end where healthy ones end?", training_loss),
    Instrument("learning", "does it learn more than to guess evenly?", learning),
    Instrument("evaluation", "is the trained model still what it was?", evaluation),
    Instrument("causality", "is the future without influence?", causality),
    Instrument("order", "does the order of the past matter?", order),
    Instrument("depth", "does the last layer's gradient fall with depth?", depth),
    Instrument("size", "is the MLP as large as the plain one?", size),
    Instrument("scale", "is a block blind to the stream's size?", scale),
    Instrument("shift", "do all norms answer a shift alike?", shift),
    Instrument("norms", "has every place its own gains?", norms),
    Instrument("tiny-vector", "does eps hold a tiny vector down?", tiny_vector),
    Instrument("float16", "does a norm survive large float16?", float16),
    Instrument("layernorm", "is its LayerNorm LayerNorm?", layernorm),
    Instrument("activation", "is SwiGLU of gate 2, up 3 what it must be?", activation),
    Instrument("rotation", "does position 3 turn by the right angle?", rotation),
    Instrument("origin", "does position 0 stay?", origin),
    Instrument("far", "is position 1,000 where it belongs?", far),
    Instrument("diagonal", "is a position's score with itself plain q · k?", diagonal),
    Instrument("values", "are values left alone?", values),
)

# ---------------------------------------------------------------- the damage


def with_parts(norm=None, mlp=None, attention=None, block=modern.ModernBlock) -> type[modern.ModernGPT]:
    """A GPT made of such parts, each a function of the config; what isn't given stays healthy."""

    class DamagedBlock(block):
        def make_norm(self, cfg: modern.ModernConfig) -> nn.Module:
            return norm(cfg) if norm else super().make_norm(cfg)

        def make_mlp(self, cfg: modern.ModernConfig) -> nn.Module:
            return mlp(cfg) if mlp else super().make_mlp(cfg)

        def make_attention(self, cfg: modern.ModernConfig) -> nn.Module:
            return attention(cfg) if attention else super().make_attention(cfg)

    class DamagedGPT(modern.ModernGPT):
        def make_block(self, cfg: modern.ModernConfig) -> nn.Module:
            return DamagedBlock(cfg)

        def make_norm(self, cfg: modern.ModernConfig) -> nn.Module:
            return norm(cfg) if norm else super().make_norm(cfg)

    return DamagedGPT


def with_rmsnorm(norm_class: type[modern.RMSNorm]) -> type[modern.ModernGPT]:
    """A GPT with such a norm wherever its config says "rmsnorm"."""
    return with_parts(
        lambda cfg: (
            norm_class(cfg.d_model, cfg.norm_eps)
            if cfg.norm_type == "rmsnorm"
            else modern.make_norm(cfg.norm_type, cfg.d_model, cfg.norm_eps)
        )
    )


def with_attention(attention_class: type[modern.RotaryAttention]) -> type[modern.ModernGPT]:
    """A GPT with such an attention wherever its config says "rope"."""
    return with_parts(
        attention=lambda cfg: attention_class(cfg) if cfg.position_type == "rope" else gpt.CausalSelfAttention(cfg)
    )


class MixedGPT(modern.ModernGPT):
    """LayerNorm in the first half of the layers, RMSNorm in the second."""

    def __init__(self, cfg: modern.ModernConfig, vocab_size: int):
        super().__init__(cfg, vocab_size)
        for block in self.blocks[: cfg.n_layers // 2]:
            block.norm1, block.norm2 = (modern.make_norm("layernorm", cfg.d_model) for _ in range(2))


class SharedNormGPT(modern.ModernGPT):
    def __init__(self, cfg: modern.ModernConfig, vocab_size: int):
        super().__init__(cfg, vocab_size)
        for block in self.blocks:
            block.norm1 = block.norm2 = self.norm_f


class PostNormBlock(modern.ModernBlock):
    forward = step_13.PostNormBlock.forward


class ZeroGainNorm(modern.RMSNorm):
    def __init__(self, d_model: int, eps: float):
        super().__init__(d_model, eps)
        del self.weight
        self.register_buffer("weight", torch.zeros(d_model))


# What follows is RMSNorm, SwiGLU and RotaryAttention with the line changed that the sabotage shows.


class NormWithoutEps(modern.RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        scale = torch.rsqrt((wide * wide).mean(-1, keepdim=True))
        return (wide * scale * self.weight).to(x.dtype)


class NarrowNorm(modern.RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps)
        return (x * scale * self.weight).to(x.dtype)


class NormOverPositions(modern.RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        scale = torch.rsqrt((wide * wide).mean(-2, keepdim=True) + self.eps)
        return (wide * scale * self.weight).to(x.dtype)


class UnbiasedLayerNorm(nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + self.eps) * self.weight + self.bias


def unbiased_norm(cfg: modern.ModernConfig) -> nn.Module:
    if cfg.norm_type == "layernorm":
        return UnbiasedLayerNorm(cfg.d_model, cfg.norm_eps)
    return modern.make_norm(cfg.norm_type, cfg.d_model, cfg.norm_eps)


class ExchangedSwiGLU(modern.SwiGLU):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.up_proj(x)) * self.gate_proj(x))


class GEGLU(modern.SwiGLU):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.gelu(self.gate_proj(x)) * self.up_proj(x))


def with_swiglu(mlp_class: type[modern.SwiGLU]) -> type[modern.ModernGPT]:
    return with_parts(mlp=lambda cfg: mlp_class(cfg.d_model, cfg.d_hidden))


class HalfSplitAttention(modern.RotaryAttention):
    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = gpt.CausalSelfAttention.heads(self, x)
        table = self.cos[: x.shape[1]], self.sin[: x.shape[1]]
        return step_08.apply_rope_half_split(q, *table), step_08.apply_rope_half_split(k, *table), v


class AcrossHeadsAttention(modern.RotaryAttention):
    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = gpt.CausalSelfAttention.heads(self, x)
        q, k = (modern.apply_rope(t.transpose(1, 2), self.cos, self.sin).transpose(1, 2) for t in (q, k))
        return q, k, v


class CoarseFrequencyAttention(modern.RotaryAttention):
    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = gpt.CausalSelfAttention.heads(self, x)
        D = self.head_dim
        inverse_frequency = (CONFIG.rope_base ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)).bfloat16()
        angles = torch.outer(torch.arange(x.shape[1], dtype=torch.float64), inverse_frequency.double())
        cos, sin = angles.cos().float(), angles.sin().float()
        return modern.apply_rope(q, cos, sin), modern.apply_rope(k, cos, sin), v


class LateKeysAttention(modern.RotaryAttention):
    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = gpt.CausalSelfAttention.heads(self, x)
        cos, sin = modern.build_rope_cache(x.shape[1] + 1, self.head_dim, base=CONFIG.rope_base)
        return modern.apply_rope(q, cos, sin), modern.apply_rope(k, cos[1:], sin[1:]), v


class TurnedValuesAttention(modern.RotaryAttention):
    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = super().heads(x)
        return q, k, modern.apply_rope(v, self.cos, self.sin)


PRE_NORM = "x = x + self.attn(self.norm1(x))\nx = x + self.mlp(self.norm2(x))"
STATISTIC = "scale = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + self.eps)"
GATED = "return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))"
TURNED = "return apply_rope(q, self.cos, self.sin), apply_rope(k, self.cos, self.sin), v"

SABOTAGES = (
    Sabotage(
        name="mixed-halves",
        before="return make_norm(cfg.norm_type, cfg.d_model, cfg.norm_eps)",
        after='return make_norm("layernorm" if layer < cfg.n_layers // 2 else "rmsnorm", cfg.d_model, cfg.norm_eps)',
        predicts="nothing that the loss would show; but add a constant to the stream, and half of the layers notice",
        explains="Each norm hands its reader vectors of unit size, and the reader's matrix learns whatever is left: "
        "LayerNorm takes the mean out, one direction of 64, and RMSNorm leaves it. So mixing them moves the loss by "
        "less than another start would, and that is the honest result. It is a model whose layers follow two laws all "
        "the same, which whoever exports it, or loads other weights into it, will pay for.",
        loud=False,
        instrument="shift",
        damage=partial(replace, model_class=MixedGPT),
        sizes=lambda healthy, broken: (healthy.number, broken.number) == (5, 3),
    ),
    Sabotage(
        name="no-norm",
        before="return RMSNorm(d_model, eps)",
        after="return nn.Identity()",
        predicts="a stream ten times as large gets an answer many times as large, and learning is slow",
        explains="At the start the stream's entries are about 0.02, so what the branches read is tiny, what they write "
        "is tinier, and their gradients likewise: SwiGLU multiplies two such numbers. A norm makes every reader see "
        "unit size whatever the stream does. Stacked 16 deep from a plain start, the gradient explodes instead.",
        loud=True,
        instrument="scale",
        damage=lambda patient: replace(patient, cfg=replace(patient.cfg, norm_type="none")),
        also_trips=("training-loss", "depth", "norms", "tiny-vector", "float16"),
        sizes=lambda healthy, broken: broken.number > 10,
    ),
    Sabotage(
        name="zero-gain",
        before="self.weight = nn.Parameter(torch.ones(d_model))",
        after='self.register_buffer("weight", torch.zeros(d_model))',
        predicts="the loss stays at ln V to the last digit: no token reaches the head, no gradient comes back",
        explains="A gain of zero closes the only way into each branch, and the last norm's closes the way out. Every "
        "logit is 0, and so is every gradient. GPT-style models start their gains at one; a gain of zero is used on "
        "purpose only where it can grow and a residual passes beside it.",
        loud=True,
        instrument="learning",
        damage=partial(replace, model_class=with_rmsnorm(ZeroGainNorm)),
        also_trips=("training-loss", "order", "depth", "norms", "tiny-vector", "float16"),
        sizes=lambda healthy, broken: abs(broken.number) < 1e-5,
    ),
    Sabotage(
        name="post-norm",
        before=PRE_NORM,
        after="x = self.norm1(x + self.attn(x))\nx = self.norm2(x + self.mlp(x))",
        predicts="from a plain start the last layer's gradient no longer falls with depth, and the loss ends higher",
        explains="In pre-norm the stream grows with depth, so each layer is a smaller part of it and gets a smaller "
        "gradient, about 1/√L. In post-norm the stream is cut to unit size after every layer, the last one keeps its "
        "full gradient at any depth, and a deep model needs a warm-up to survive the first steps (Xiong et al. 2020). "
        "step_03 shows the same for chapter 05's block, at up to 48 layers.",
        loud=True,
        instrument="depth",
        damage=partial(replace, model_class=with_parts(block=PostNormBlock)),
        also_trips=("training-loss", "scale"),
        sizes=lambda healthy, broken: broken.number > -0.1,
    ),
    Sabotage(
        name="no-eps",
        before=STATISTIC,
        after="scale = torch.rsqrt((wide * wide).mean(-1, keepdim=True))",
        predicts="a vector of 1e-4 comes out at 1 instead of 0.03; the loss shows nothing",
        explains="eps is the size below which a norm stops amplifying. Without it any vector comes out at unit size, "
        "rounding noise included, and a zero vector as NaN. Real text in a trained model rarely gets near it, which "
        "is why nobody notices until a padded position does.",
        loud=False,
        instrument="tiny-vector",
        damage=partial(replace, model_class=with_rmsnorm(NormWithoutEps)),
        sizes=lambda healthy, broken: broken.number > 0.99,
    ),
    Sabotage(
        name="narrow-statistics",
        before="wide = x if x.dtype == torch.float64 else x.float()",
        after="wide = x",
        predicts="float16 entries of 30,000 come out as 0, without a NaN; in float32 training nothing happens",
        explains="30,000² is infinite in float16, the mean of infinities is infinite, its inverse root is 0, and "
        "0 times anything is a clean, silent zero. Residual streams of real models do hold entries above 20,000.",
        loud=False,
        instrument="float16",
        damage=partial(replace, model_class=with_rmsnorm(NarrowNorm)),
        sizes=lambda healthy, broken: broken.number == 0.0,
    ),
    Sabotage(
        name="unbiased-variance",
        before="return nn.LayerNorm(d_model, eps=eps)",
        after="return UnbiasedLayerNorm(d_model, eps)  # (x − mean) / (x.std(-1) + eps) · weight + bias",
        predicts="a LayerNorm that is off by more than 1 where the stream is small; this model has none and trains on",
        explains="The channels are the whole population, so their variance divides by C, not C − 1. And eps belongs "
        "under the root: there it is a std of 0.003, outside it one of 0.00001. At std 0.001 the two differ by "
        "a factor of three. At std 1 nobody sees it.",
        loud=False,
        instrument="layernorm",
        damage=partial(replace, model_class=with_parts(unbiased_norm)),
        sizes=lambda healthy, broken: broken.number > 1,
    ),
    Sabotage(
        name="exchanged-gate",
        before=GATED,
        after="return self.down_proj(F.silu(self.up_proj(x)) * self.gate_proj(x))",
        predicts="exchanged after training, the validation loss jumps by more than 0.1 nats",
        explains="The gate goes through the activation, up doesn't, and training made them what they are. Exchanged "
        "before training it would be the same model under other names; after training, as when a loader maps the "
        "names wrongly, it is another function. All shapes fit, so nothing complains.",
        loud=False,
        instrument="evaluation",
        damage=partial(replace, later_class=with_swiglu(ExchangedSwiGLU)),
        also_trips=("activation",),
        sizes=lambda healthy, broken: broken.number > 0.1,
    ),
    Sabotage(
        name="gelu-for-silu",
        before=GATED,
        after="return self.down_proj(F.gelu(self.gate_proj(x)) * self.up_proj(x))",
        predicts="exchanged after training, gate 2 and up 3 give 5.86, not 5.28, and the loss hardly moves",
        explains="The two curves are close where this small model works: compare the two numbers of `evaluation`, and "
        "what a seed is worth in `training-loss`. A larger model, trained for longer, relies on the difference: "
        "chapter 37 measures it in a real one.",
        loud=False,
        instrument="activation",
        damage=partial(replace, later_class=with_swiglu(GEGLU)),
        sizes=lambda healthy, broken: abs(broken.number - 5.8635) < 1e-3,
    ),
    Sabotage(
        name="unfair-width",
        before="return SwiGLU(cfg.d_model, cfg.d_hidden or swiglu_hidden(cfg.d_model, cfg.multiple_of))",
        after="return SwiGLU(cfg.d_model, cfg.d_hidden or 4 * cfg.d_model)",
        predicts="an MLP half as large again as the one that it is compared with, and a loss that raises no alarm",
        explains="Three matrices of C x 4C against two: whatever is gained by that is gained by 50 % more parameters "
        "and FLOPs, and would be written down as SwiGLU's. The 8/3 rule makes the comparison fair.",
        loud=False,
        instrument="size",
        damage=lambda patient: replace(patient, cfg=replace(patient.cfg, d_hidden=4 * patient.cfg.d_model)),
        sizes=lambda healthy, broken: broken.number == 1.5,
    ),
    Sabotage(
        name="mixed-layouts",
        before="return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)\n"
        "cos = cos[:T].repeat_interleave(2, dim=-1)",
        after="return torch.cat((-x[..., D // 2 :], x[..., : D // 2]), dim=-1)  # when training is over\n"
        "cos = cos[:T].repeat(1, 2)",
        predicts="position 3 turns [1, 2, 3, 4] into [-1.41, 1.88, -2.83, 4.06], and the trained model gets worse",
        explains="Both layouts are right, each for weights that were trained with it. They are the same rotation under "
        "a permutation of the head's channels, so a loader that doesn't permute mixes them. Position 0, where "
        "nothing turns, can't show it, and a model trained with either from the start is fine.",
        loud=False,
        instrument="rotation",
        damage=partial(replace, later_class=with_attention(HalfSplitAttention)),
        also_trips=("evaluation", "far"),
        sizes=lambda healthy, broken: broken.number > 1,
    ),
    Sabotage(
        name="wrong-axis-rope",
        before=TURNED,
        after="return apply_rope(q.mT, …), apply_rope(k.mT, …), v  # (B, T, H, D): heads where positions should be",
        predicts="queries at position 0 are turned, by their head's number, and no position tells itself from another",
        explains="apply_rope turns along the axis before the last. Called before the heads are moved forward, that "
        "axis counts heads. The shapes fit as long as there are no more heads than positions. What remains is a "
        "model without positions, and the loss shows that much.",
        loud=True,
        instrument="origin",
        damage=partial(replace, model_class=with_attention(AcrossHeadsAttention)),
        also_trips=("training-loss", "order", "rotation", "far"),
        sizes=lambda healthy, broken: broken.number > 0.5,
    ),
    Sabotage(
        name="bfloat16-frequencies",
        before="inverse_frequency = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)",
        after="inverse_frequency = (base ** (-torch.arange(0, head_dim, 2) / head_dim)).bfloat16()",
        predicts="at position 1,000 a query is off by more than 1 % of its length; at the 32 trained on, nothing shows",
        explains="bfloat16 keeps 8 bits, so a frequency is wrong by up to 0.2 %, and the angle by that much of itself: "
        "nothing at position 3, a visible part of a turn at 1,000. It happens when `model.bfloat16()` finds the "
        "frequencies in a buffer. Queries and keys are off alike, so even scores still depend on the distance alone.",
        loud=False,
        instrument="far",
        damage=partial(replace, model_class=with_attention(CoarseFrequencyAttention)),
        sizes=lambda healthy, broken: broken.number > 0.01,
    ),
    Sabotage(
        name="off-by-one",
        before=TURNED,
        after="return apply_rope(q, self.cos, self.sin), apply_rope(k, self.cos[1:], self.sin[1:]), v",
        predicts="a position's score with itself is no longer the plain q · k; the loss shows nothing",
        explains="Every distance is off by one, all alike, and scores still depend on the distance alone: training "
        "learns around it. It hurts when weights trained with it meet code without it, or a cache that counts its "
        "keys from another zero.",
        loud=False,
        instrument="diagonal",
        damage=partial(replace, model_class=with_attention(LateKeysAttention)),
        also_trips=("origin",),
        sizes=lambda healthy, broken: broken.number > 0.1,
    ),
    Sabotage(
        name="turned-values",
        before=TURNED,
        after="return apply_rope(q, …), apply_rope(k, …), apply_rope(v, self.cos, self.sin)",
        predicts="a context of one repeated token reads differently at every position; the loss shows nothing",
        explains="What is read now depends on where it was read from, so position leaks from the scores, where it "
        "should be relative, into the contents, where it is absolute. A model trained like that at 32 positions gets "
        "along. It is another model, and no longer the same at every distance from the start.",
        loud=False,
        instrument="values",
        damage=partial(replace, model_class=with_attention(TurnedValuesAttention)),
        sizes=lambda healthy, broken: broken.number > 0.5,
    ),
    Sabotage(
        name="shared-norm",
        before="self.norm1 = self.make_norm(cfg)",
        after="self.norm1 = self.norm2 = the_norm  # one for all layers",
        predicts="one gain vector where there should be five, and nothing to be seen in the loss",
        explains="A gain could be folded into the matrix behind it, so a layer that shares its norm's gains can make "
        "up for it there. What is lost is little here; what is wrong is the checkpoint, in which the same vector "
        "stands five times, and which no healthy model's five vectors fit into.",
        loud=False,
        instrument="norms",
        damage=partial(replace, model_class=SharedNormGPT),
        sizes=lambda healthy, broken: (healthy.number, broken.number) == (5, 1),
    ),
    Sabotage(
        name="wrong-axis-norm",
        before=STATISTIC,
        after="scale = torch.rsqrt((wide * wide).mean(-2, keepdim=True) + self.eps)",
        predicts="a statistic over positions sees the future, and neither training nor validation loss shows anything",
        explains="Every position is divided by a number in which all later positions have a part. The mask inside "
        "attention can't stop what happens before it. In training and in validation the future is there to be peeked "
        "at; when the model generates, it isn't. A small model may not have learned to peek yet. It is no causal "
        "model all the same.",
        loud=False,
        instrument="causality",
        damage=partial(replace, model_class=with_rmsnorm(NormOverPositions)),
        sizes=lambda healthy, broken: broken.number > 0.05,
    ),
    Sabotage(
        name="no-positions",
        before="return RotaryAttention(cfg)",
        after="return gpt.CausalSelfAttention(cfg)",
        predicts="with one layer the past is a bag: swapping two of its tokens changes nothing but rounding",
        explains="A weighted sum doesn't know the order of its terms. Two layers can guess at it from how many tokens "
        "the causal mask lets each position see, but that isn't worth what positions are: here the loss shows it.",
        loud=True,
        instrument="order",
        damage=lambda patient: replace(patient, cfg=replace(patient.cfg, position_type="none")),
        also_trips=("training-loss", "rotation", "far"),
        sizes=lambda healthy, broken: broken.number < 1e-12,
    ),
)

# ---------------------------------------------------------------- what the quiz shows


def vitals(patient: Patient) -> dict[str, str]:
    """The loss curve in numbers, the stream by layer, and what some parts make of a known input."""
    history, model = patient.history, patient.trained
    signs = {"loss at step 1": f"{history.losses[0]:.3f}"}
    for step in (20, 50, 100, SETTINGS.steps):
        signs[f"mean loss, steps {step - 9} to {step}"] = f"{sum(history.losses[step - 10 : step]) / 10:.3f}"
    signs["validation loss when training ended"] = f"{history.validation_loss:.3f}"
    signs["validation loss now"] = f"{training.evaluate(model, corpus().validation, SETTINGS):.3f}"
    signs["parameters"] = f"{gpt.count_parameters(model):,}"
    idx, _ = next(data.all_windows(corpus().validation, CONFIG.block_size, 32))
    for point, stats in modern.stream_stats(model, idx).items():
        signs[f"trained: stream after {point}"] = f"std {stats['var'] ** 0.5:.3f}, kurtosis {stats['kurtosis']:.2f}"
    for question, read in (
        ("the last norm, of 768 entries of 1e-4", tiny_vector),
        ("and of 768 entries of 30,000 in float16", float16),
        ("the first query, of [1, 2, 3, 4] at position 3", rotation),
        ("the first MLP, of gate 2 and up 3", activation),
    ):
        signs[question] = read(patient).text
    return signs


def sample(patient: Patient) -> str:
    """What the trained model makes of the validation part's first characters."""
    prompt = corpus().validation[None, : CONFIG.block_size]
    idx = gpt.generate(patient.trained, prompt, 200, temperature=0.8, generator=generator(patient.seed, "sample"))
    return corpus().tokenizer.decode(idx[0, CONFIG.block_size :].tolist())


CASE = Case(healthy, INSTRUMENTS, SABOTAGES, vitals, sample)


def main(argv: list[str] | None = None) -> int:
    return sabotage.main(CASE, __doc__, argv)


if __name__ == "__main__":
    cli.run(main)
