"""Break the details of chapter 07, one at a time, and see what each was for.

    python break_it.py                        the chapter's own: LayerNorm below, RMSNorm above
    python break_it.py --list                 all eighteen, with the symptom that each should have
    python break_it.py --sabotage no-eps      one of them, healthy and broken side by side
    python break_it.py --all                  every one, summed up in a table (about a minute)
    python break_it.py --quiz                 one at random: you see the signs and name the damage
    python break_it.py --edit "F.silu" "F.relu"
                                              your own damage to build.py: which lights turn red?

The healthy model has RMSNorm, SwiGLU and RoPE. A damage is an edit of build.py, or of chapter 05's,
and the edited build is what runs. Every damaged model starts from the healthy one's seed and sees
its batches. Most of this damage is silent: the loss falls as it should, and only a law that the
part must obey shows it.
"""

import math
import sys
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, data, sabotage, training
from shared.chapters import Edit
from shared.randomness import generator
from shared.sabotage import Case, Instrument, Reading, Sabotage

import torch
import torch.nn as nn
import torch.nn.functional as F

CONTEXT = 32  # tokens
SETTINGS = training.TrainingSettings(steps=120, batch_size=16)
HEALTHY_STARTS = 5  # healthy models that say how far apart healthy models end


@lru_cache(maxsize=1)
def corpus() -> data.Corpus:
    whole = data.load_corpus("docs", "char", CONTEXT)
    return replace(whole, validation=whole.validation[:10_000])


# ---------------------------------------------------------------- the patient


@dataclass(frozen=True)
class Patient:
    """The recipe of a model: trained with some edits of the build, looked at with some more."""

    seed: int  # of the batches
    start: int  # the seed of the initial values
    edits: tuple[Edit, ...] = ()  # in the code from the start
    later: tuple[Edit, ...] = ()  # made when training is over: the trained weights meet other code

    @cached_property
    def modern(self) -> ModuleType:
        """The build that its model is made from."""
        return chapters.edited_build(7, self.edits + self.later)

    def build(self, **config) -> nn.Module:
        """A freshly started model, with all edits."""
        return start_model(self.modern, self.start, **config)

    @property
    def history(self) -> training.History:
        return train(self.seed, self.start, self.edits)[1]

    @cached_property
    def trained(self) -> nn.Module:
        """The trained weights, in a model with all edits."""
        weights, _ = train(self.seed, self.start, self.edits)
        model = self.build()
        model.load_state_dict(weights)
        return model.eval()


def start_model(modern: ModuleType, start: int, **config) -> nn.Module:
    cfg = modern.ModernConfig(**{"block_size": CONTEXT, "position_type": "rope", **config})
    model = modern.ModernGPT(cfg, corpus().vocab_size)
    modern.gpt.init_parameters(model, start)
    return model


@lru_cache(maxsize=64)
def train(seed: int, start: int, edits: tuple[Edit, ...]) -> tuple[dict, training.History]:
    """The weights after SETTINGS.steps steps, and how they got there."""
    model = start_model(chapters.edited_build(7, edits), start)
    history = training.train(model, corpus(), SETTINGS, seed)
    return model.state_dict(), history


def healthy(seed: int) -> Patient:
    return Patient(seed, start=seed)


# ---------------------------------------------------------------- instruments: the whole model


def training_loss(patient: Patient) -> Reading:
    """Where training ends, against healthy models that saw the same batches from other starts.

    Red if it lies more than three times the width of their range from that range's middle.
    """
    starts = range(patient.seed, patient.seed + HEALTHY_STARTS)
    ends = [Patient(patient.seed, start).history.train_loss for start in starts]
    lowest = min(ends)
    highest = max(ends)
    loss = patient.history.train_loss
    green = abs(loss - (lowest + highest) / 2) <= 3 * (highest - lowest)
    return Reading(f"{loss:.2f}, healthy {lowest:.2f} to {highest:.2f}", green, loss)


def learning(patient: Patient) -> Reading:
    """How much better than guessing evenly it ends."""
    gained = math.log(corpus().vocab_size) - patient.history.validation_loss
    return Reading(f"{gained:.2f} nats", gained > 0.5, gained)


def evaluation(patient: Patient) -> Reading:
    """The validation loss of the trained weights, when training ended and with the later edits."""
    before = patient.history.validation_loss
    after = training.evaluate(patient.trained, corpus().validation, SETTINGS)
    change = after - before
    return Reading(f"{before:.3f} then, {after:.3f} now", abs(change) < 0.05, change)


def causality(patient: Patient) -> Reading:
    """The gradient of position 5's logits: the share of it that goes to later positions."""
    model = patient.build()
    idx = corpus().validation[None, :CONTEXT]
    x = model.embed(idx).detach().requires_grad_()
    model.embed = lambda idx: x  # the same numbers, with a gradient
    logits, _ = model(idx)
    logits[0, 5].square().sum().backward()
    share = (x.grad[0, 6:].norm() / x.grad.norm()).item() if x.grad.any() else 0.0
    return Reading(f"{share:.1%} comes from later", share == 0.0, share)


@torch.no_grad()
def order(patient: Patient) -> Reading:
    """Swap two tokens of the past: only positions can make a one-layer model answer otherwise."""
    model = patient.build(n_layers=1).double()
    idx = torch.arange(CONTEXT)[None]
    swapped = idx.clone()
    swapped[0, [2, 9]] = idx[0, [9, 2]]
    before = model(idx)[0][0, -1]
    after = model(swapped)[0][0, -1]
    change = ((after - before).norm() / before.norm()).item() if before.any() else 0.0
    return Reading(f"logits change by {change:.0e}", change > 1e-12, change)


def depth(patient: Patient) -> Reading:
    """How the last layer's gradient falls with the number of layers L, without scaling by depth.

    About as 1/√L, or L^-0.5, in a pre-norm model (Xiong et al. 2020, theorem 1); not at all in a
    post-norm one. Measured between 4 and 16 layers, where the power comes out between -0.9 and
    -0.25.
    """
    noise = generator(patient.seed, "depth")
    idx, targets = data.sample_batch(corpus().train, CONTEXT, 8, noise)
    norms = []
    for n_layers in (4, 16):
        model = patient.build(n_layers=n_layers)
        patient.modern.gpt.init_parameters(model, patient.start, std="fan_in")
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, patient.modern.gpt.ResidualWriter):
                    module.weight *= math.sqrt(2 * n_layers)  # undo the scaling by depth
        _, loss = model(idx, targets)
        loss.backward()
        norms.append(model.blocks[-1].mlp.gate_proj.weight.grad.norm().item())
    power = math.log(norms[1] / norms[0]) / math.log(4) if min(norms) > 0 else 0.0
    return Reading(f"as L^{power:+.2f}", -0.9 < power < -0.25, power)


def size(patient: Patient) -> Reading:
    """Weights of the MLP over those of the plain one with 4C inside."""
    model = patient.build()
    weights = sum(p.numel() for p in model.blocks[0].mlp.parameters())
    ratio = weights / (8 * model.cfg.d_model**2)
    return Reading(f"{ratio:.3f} times", abs(ratio - 1) < 0.01, ratio)


# ---------------------------------------------------------------- instruments: norms


@torch.no_grad()
def scale(patient: Patient) -> Reading:
    """Make the stream ten times as large: what a block adds to it must not change."""
    model = patient.build()
    block = model.blocks[0]
    x = noise(patient, 3, 7, model.cfg.d_model)
    added = block(x) - x
    added_to_large = block(10 * x) - 10 * x
    times = (added_to_large.norm() / added.norm()).item() if added.any() else 1.0
    return Reading(f"{times:.2f} times as much", abs(times - 1) < 0.01, times)


@torch.no_grad()
def shift(patient: Patient) -> Reading:
    """Add 3 to every channel: LayerNorm doesn't see it, RMSNorm does. All norms should agree."""
    model = patient.build()
    x = noise(patient, 3, 7, model.cfg.d_model)
    norms = [model.norm_f]
    for block in model.blocks:
        norms += [block.norm1, block.norm2]
    moved = 0
    for norm in norms:
        change = norm(x + 3) - norm(x)
        moved += change.norm().item() > 0.01 * norm(x).norm().item()
    return Reading(f"{moved} of {len(norms)} norms see it", moved in (0, len(norms)), moved)


def norms(patient: Patient) -> Reading:
    """How many gain vectors there are: one for each of the 2L + 1 places that read the stream."""
    model = patient.build()
    names = [name for name, p in model.named_parameters() if p.dim() == 1]
    gains = sum(name.endswith(".weight") for name in names)
    return Reading(f"gain vectors: {gains}", gains == 2 * model.cfg.n_layers + 1, gains)


@torch.no_grad()
def tiny_vector(patient: Patient) -> Reading:
    """768 entries of 1e-4: eps holds them at 0.0316."""
    norm = patient.build(d_model=768, n_layers=1).norm_f
    y = norm(torch.full((1, 1, 768), 1e-4)).mean().item()
    return Reading(f"{y:.4f}", abs(y - 0.0316070) < 1e-6, y)


@torch.no_grad()
def float16(patient: Patient) -> Reading:
    """768 entries of 3e4 in float16, whose squares float16 can't hold: 1.0."""
    norm = patient.build(d_model=768, n_layers=1).norm_f
    y = norm(torch.full((1, 1, 768), 3e4, dtype=torch.float16)).float()
    return Reading(f"{y.mean().item():.4f}", torch.equal(y, torch.ones_like(y)), y.mean().item())


@torch.no_grad()
def layernorm(patient: Patient) -> Reading:
    """The model's LayerNorm on a stream of std 0.001, against the formula in float64."""
    model = patient.build(norm_type="layernorm")
    x = 1e-3 * noise(patient, 3, 7, model.cfg.d_model)
    exact = F.layer_norm(x.double(), x.shape[-1:], eps=1e-5)
    error = (model.norm_f(x).double() - exact).abs().max().item()
    return Reading(f"{error:.0e} off", error < 1e-5, error)


# ---------------------------------------------------------------- instruments: MLP and positions


@torch.no_grad()
def activation(patient: Patient) -> Reading:
    """An MLP of one channel with gate 2 and up 3: silu(2) · 3 = 5.2848."""
    model = patient.build(d_model=1, n_heads=1, d_hidden=1, n_layers=1, position_type="none")
    mlp = model.blocks[0].mlp
    nn.init.constant_(mlp.gate_proj.weight, 2.0)
    nn.init.constant_(mlp.up_proj.weight, 3.0)
    nn.init.constant_(mlp.down_proj.weight, 1.0)
    y = mlp(torch.ones(1, 1, 1)).item()
    return Reading(f"{y:.4f}", abs(y - 5.2847825) < 1e-5, y)


@torch.no_grad()
def turned(patient: Patient, x: torch.Tensor, n_heads: int, T: int) -> list[torch.Tensor]:
    """q, k and v, each (H, T, D), of a context of T tokens that are one vector x (D) in each head.

    The matrices that make them are the identity, so what differs from x was done by RoPE.
    """
    D = len(x)
    model = patient.build(block_size=T, n_heads=n_heads, d_model=n_heads * D, n_layers=1)
    attn = model.blocks[0].attn
    attn.qkv.weight.copy_(torch.eye(n_heads * D).repeat(3, 1))
    attn.qkv.bias.zero_()
    return [heads[0] for heads in attn.heads(x.repeat(n_heads).expand(1, T, -1))]


def rotation(patient: Patient) -> Reading:
    """[1, 2, 3, 4] at position 3, a value computed by hand."""
    q, _, _ = turned(patient, torch.tensor([1.0, 2.0, 3.0, 4.0]), n_heads=1, T=5)
    by_hand = torch.tensor([-1.2722325, -1.8388650, 2.8786681, 4.0881866])
    error = (q[0, 3] - by_hand).abs().max().item()
    shown = ", ".join(f"{value:.2f}" for value in q[0, 3].tolist())
    return Reading(f"[{shown}]", error < 1e-3, error)


def origin(patient: Patient) -> Reading:
    """At position 0 queries and keys stay as they are, in every head."""
    x = noise(patient, 6)
    q, k, _ = turned(patient, x, n_heads=3, T=5)
    moved = max((q[:, 0] - x).abs().max().item(), (k[:, 0] - x).abs().max().item())
    return Reading(f"moved by {moved:.2f}", moved == 0.0, moved)


def far(patient: Patient) -> Reading:
    """A query at position 1,000 against its rotation in float64, as part of its length."""
    x = noise(patient, 16)
    pairs = torch.view_as_complex(x.double().view(8, 2))
    angles = 1000 * 10_000.0 ** (-torch.arange(8, dtype=torch.float64) / 8)
    turns = torch.polar(torch.ones_like(angles), angles)
    exact = torch.view_as_real(pairs * turns).flatten()
    q, _, _ = turned(patient, x, n_heads=1, T=1001)
    error = ((q[0, 1000] - exact).norm() / exact.norm()).item()
    return Reading(f"{error:.0e} off", error < 1e-5, error)


def diagonal(patient: Patient) -> Reading:
    """A position's score with itself: both turn by the same angle, so it is the plain q · k."""
    x = noise(patient, 6)
    q, k, _ = turned(patient, x, n_heads=3, T=5)
    error = ((q * k).sum(-1) - x @ x).abs().max().item()
    return Reading(f"{error:.0e} off", error < 1e-5, error)


def values(patient: Patient) -> Reading:
    """A context of one token, repeated: its values are the same at every position."""
    _, _, v = turned(patient, noise(patient, 6), n_heads=3, T=5)
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


def edit(old: str, new: str, chapter: int = 7) -> tuple[Edit, ...]:
    """One edit of a build.py: of this chapter's, or of the one that it stands on."""
    return (Edit(chapter, old, new),)


NORM_F = "self.norm_f = self.make_norm(cfg)"
PRE_NORM = "x = x + self.attn(self.norm1(x))\nx = x + self.mlp(self.norm2(x))"
STATISTIC = "scale = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + self.eps)"
GATED = "F.silu(self.gate_proj(x)) * self.up_proj(x)"
TURNED = "return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v"

SABOTAGES = (
    Sabotage(
        name="mixed-halves",
        edits=edit(
            NORM_F,
            "for block in self.blocks[: cfg.n_layers // 2]:\n"
            "    block.norm1 = nn.LayerNorm(cfg.d_model)\n"
            "    block.norm2 = nn.LayerNorm(cfg.d_model)\n" + NORM_F,
            chapter=5,
        ),
        predicts=(
            "nothing that the loss would show; but add a constant to the stream, and three of the "
            "five norms see it"
        ),
        explains=(
            "Each norm hands its reader vectors of unit size, and the reader's matrix learns the "
            "rest: LayerNorm takes the mean out, one direction of 64, and RMSNorm leaves it. So "
            "mixing them moves the loss by less than another start would, and that is the honest "
            "result. But the layers now follow two rules. A program that loads or exports this "
            "model and knows only one rule gets half of the layers wrong."
        ),
        loud=False,
        instrument="shift",
        sizes=lambda healthy, broken: (healthy.number, broken.number) == (5, 3),
    ),
    Sabotage(
        name="no-norm",
        edits=edit("return RMSNorm(d_model, eps)", "return nn.Identity()"),
        predicts=(
            "a stream ten times as large gets an answer many times as large, and learning is slow"
        ),
        explains=(
            "At the start the stream's entries are about 0.02, so what the branches read is tiny, "
            "what they write is tinier, and so are their gradients: SwiGLU multiplies two such "
            "numbers. A norm makes every reader see unit size, whatever the stream does. Stacked "
            "16 deep from a plain start, the gradient explodes instead."
        ),
        loud=True,
        instrument="scale",
        also_trips=("training-loss", "depth", "norms", "tiny-vector", "float16"),
        sizes=lambda healthy, broken: broken.number > 10,
    ),
    Sabotage(
        name="zero-gain",
        edits=edit(
            "self.weight = nn.Parameter(torch.ones(d_model))",
            'self.register_buffer("weight", torch.zeros(d_model))',
        ),
        predicts=(
            "the loss stays at ln V to the last digit: no token reaches the head, no gradient "
            "comes back"
        ),
        explains=(
            "A gain of zero closes the only way into each branch, and the last norm's closes the "
            "way out. Every logit is 0, and so is every gradient. GPT-style models start their "
            "gains at one. A gain of zero is used on purpose only where it can grow and a "
            "residual passes beside it."
        ),
        loud=True,
        instrument="learning",
        also_trips=("training-loss", "order", "depth", "norms", "tiny-vector", "float16"),
        sizes=lambda healthy, broken: abs(broken.number) < 1e-5,
    ),
    Sabotage(
        name="post-norm",
        edits=edit(
            PRE_NORM,
            "x = self.norm1(x + self.attn(x))\nx = self.norm2(x + self.mlp(x))",
            chapter=5,
        ),
        predicts=(
            "from a plain start the last layer's gradient no longer falls with depth, and the "
            "loss ends higher"
        ),
        explains=(
            "In pre-norm the stream grows with depth, so each layer is a smaller part of it and "
            "gets a smaller gradient, about 1/√L. In post-norm the stream is cut to unit size "
            "after every layer. The last layer then keeps its full gradient at any depth, and a "
            "deep model needs a warm-up to survive the first steps (Xiong et al. 2020). step_03 "
            "shows the same for chapter 05's block, at up to 48 layers."
        ),
        loud=True,
        instrument="depth",
        also_trips=("training-loss", "scale"),
        sizes=lambda healthy, broken: broken.number > -0.1,
    ),
    Sabotage(
        name="no-eps",
        edits=edit(STATISTIC, "scale = torch.rsqrt((wide * wide).mean(-1, keepdim=True))"),
        predicts="a vector of 1e-4 comes out at 1 instead of 0.03; the loss shows nothing",
        explains=(
            "eps is the size below which a norm stops amplifying. Without it any vector comes out "
            "at unit size, even if it is only rounding noise, and a zero vector comes out as NaN. "
            "Real text in a trained model rarely gets near it. So nobody notices until a padded "
            "position does."
        ),
        loud=False,
        instrument="tiny-vector",
        sizes=lambda healthy, broken: broken.number > 0.99,
    ),
    Sabotage(
        name="narrow-statistics",
        edits=edit("wide = x if x.dtype == torch.float64 else x.float()", "wide = x"),
        predicts=(
            "float16 entries of 30,000 come out as 0, without a NaN; in float32 training nothing "
            "happens"
        ),
        explains=(
            "30,000² is infinite in float16, the mean of infinities is infinite, its inverse root "
            "is 0, and 0 times a number is 0. No NaN warns you. Residual streams of real models "
            "do hold entries above 20,000."
        ),
        loud=False,
        instrument="float16",
        sizes=lambda healthy, broken: broken.number == 0.0,
    ),
    Sabotage(
        name="unbiased-variance",
        edits=edit(
            "return nn.LayerNorm(d_model, eps=eps)",
            "class UnbiasedLayerNorm(nn.LayerNorm):\n"
            "    def forward(self, x):\n"
            "        x = x - x.mean(-1, keepdim=True)\n"
            "        return x / (x.std(-1, keepdim=True) + self.eps) * self.weight + self.bias\n"
            "\n"
            "return UnbiasedLayerNorm(d_model, eps)",
        ),
        predicts=(
            "a LayerNorm that is off by more than 1 where the stream is small; this model has "
            "none and trains on"
        ),
        explains=(
            "The channels are the whole population, so their variance divides by C, not C − 1. "
            "And eps belongs under the root: there it is a std of 0.003, outside it one of "
            "0.00001. At std 0.001 the two differ by a factor of three. At std 1 nobody sees it."
        ),
        loud=False,
        instrument="layernorm",
        sizes=lambda healthy, broken: broken.number > 1,
    ),
    Sabotage(
        name="exchanged-gate",
        edits=edit(GATED, "F.silu(self.up_proj(x)) * self.gate_proj(x)"),
        later=True,
        predicts="exchanged after training, the validation loss jumps by more than 0.05 nats",
        explains=(
            "The gate goes through the activation and up doesn't, and in training each matrix "
            "learned its own part. Exchanged before training it would be the same model under "
            "other names. After training, as when a loader maps the names wrongly, it is another "
            "function. All shapes fit, so nothing complains."
        ),
        loud=False,
        instrument="evaluation",
        also_trips=("activation",),
        sizes=lambda healthy, broken: broken.number > 0.05,
    ),
    Sabotage(
        name="gelu-for-silu",
        edits=edit(GATED, "F.gelu(self.gate_proj(x)) * self.up_proj(x)"),
        later=True,
        predicts=(
            "exchanged after training, gate 2 and up 3 give 5.86, not 5.28, and the loss hardly"
            "moves"
        ),
        explains=(
            "The two curves are close where this small model works: compare the two numbers of "
            "`evaluation` with how far apart healthy models end in `training-loss`. A larger "
            "model, trained for longer, relies on the difference: chapter 37 measures it in a"
            "real one."
        ),
        loud=False,
        instrument="activation",
        sizes=lambda healthy, broken: abs(broken.number - 5.8635) < 1e-3,
    ),
    Sabotage(
        name="unfair-width",
        edits=edit(
            "swiglu_hidden(cfg.d_model, cfg.multiple_of)\nreturn SwiGLU(",
            "4 * cfg.d_model\nreturn SwiGLU(",
        ),
        predicts=(
            "an MLP half as large again as the one that it is compared with, and a loss that "
            "raises no alarm"
        ),
        explains=(
            "Three matrices of C x 4C against two: whatever that gains comes from 50 % more "
            "parameters and FLOPs, but would be credited to SwiGLU. The 8/3 rule makes the "
            "comparison fair."
        ),
        loud=False,
        instrument="size",
        sizes=lambda healthy, broken: broken.number == 1.5,
    ),
    Sabotage(
        name="mixed-layouts",
        edits=(
            edit("x0 = x[..., 0::2]\nx1 = x[..., 1::2]", "x0, x1 = x.chunk(2, dim=-1)")
            + edit("torch.stack((-x1, x0), dim=-1).flatten(-2)", "torch.cat((-x1, x0), dim=-1)")
            + edit("cos = cos[:T].repeat_interleave(2, dim=-1)", "cos = cos[:T].repeat(1, 2)")
            + edit("sin = sin[:T].repeat_interleave(2, dim=-1)", "sin = sin[:T].repeat(1, 2)")
        ),
        later=True,
        predicts=(
            "position 3 turns [1, 2, 3, 4] into [-1.41, 1.88, -2.83, 4.06], and the trained model "
            "gets worse"
        ),
        explains=(
            "Both layouts are right, each for weights that were trained with it. They are the "
            "same rotation, with the head's channels in another order, so a loader must reorder "
            "the weights. Position 0, where nothing turns, can't show the mistake, and a model "
            "trained with either layout from the start is fine."
        ),
        loud=False,
        instrument="rotation",
        also_trips=("evaluation", "far"),
        sizes=lambda healthy, broken: broken.number > 1,
    ),
    Sabotage(
        name="wrong-axis-rope",
        edits=edit(
            TURNED,
            "q = apply_rope(q.transpose(1, 2), cos, sin).transpose(1, 2)\n"
            "k = apply_rope(k.transpose(1, 2), cos, sin).transpose(1, 2)\n"
            "return q, k, v",
        ),
        predicts=(
            "queries at position 0 are turned, by their head's number, and no position tells "
            "itself from another"
        ),
        explains=(
            "apply_rope turns along the axis before the last. Here that axis counts heads, not "
            "positions. The shapes fit as long as there are no more heads than positions. What "
            "remains is a model without positions, and the loss shows that much."
        ),
        loud=True,
        instrument="origin",
        also_trips=("training-loss", "order", "rotation", "far"),
        sizes=lambda healthy, broken: broken.number > 0.5,
    ),
    Sabotage(
        name="bfloat16-frequencies",
        edits=edit(
            "speed = base ** (-2 * pair / head_dim)",
            "speed = (base ** (-2 * pair / head_dim)).bfloat16().double()",
        ),
        predicts=(
            "at position 1,000 a query is off by more than 1 % of its length; at the 32 trained "
            "on, nothing shows"
        ),
        explains=(
            "bfloat16 keeps 8 bits, so a frequency is wrong by up to 0.2 %, and every angle by "
            "the same 0.2 %: nothing at position 3, a visible part of a turn at 1,000. It happens "
            "when `model.bfloat16()` finds the frequencies in a buffer. Queries and keys are off "
            "alike, so even scores still depend on the distance alone."
        ),
        loud=False,
        instrument="far",
        sizes=lambda healthy, broken: broken.number > 0.01,
    ),
    Sabotage(
        name="off-by-one",
        edits=(
            edit("build_rope_cache(cfg.block_size,", "build_rope_cache(cfg.block_size + 1,")
            + edit(TURNED, "return apply_rope(q, cos, sin), apply_rope(k, cos[1:], sin[1:]), v")
        ),
        predicts=(
            "a position's score with itself is no longer the plain q · k; the loss shows nothing"
        ),
        explains=(
            "Every distance is off by one, all alike, and scores still depend on the distance "
            "alone: the model learns with that. It hurts when weights trained with it meet code "
            "without it, or a cache whose keys are counted from another zero."
        ),
        loud=False,
        instrument="diagonal",
        also_trips=("origin",),
        sizes=lambda healthy, broken: broken.number > 0.05,
    ),
    Sabotage(
        name="turned-values",
        edits=edit(TURNED, TURNED.replace(", v", ", apply_rope(v, cos, sin)")),
        predicts=(
            "a context of one repeated token reads differently at every position; the loss shows "
            "nothing"
        ),
        explains=(
            "What is read now depends on the position that it is read from. Scores should know "
            "the distance between two positions, and contents should know no position at all. A "
            "model trained like that at 32 positions still works, but it is another model."
        ),
        loud=False,
        instrument="values",
        sizes=lambda healthy, broken: broken.number > 0.5,
    ),
    Sabotage(
        name="shared-norm",
        edits=edit(
            NORM_F,
            NORM_F + "\nfor block in self.blocks:\n    block.norm1 = block.norm2 = self.norm_f",
            chapter=5,
        ),
        predicts="one gain vector where there should be five, and nothing to be seen in the loss",
        explains=(
            "A gain could be folded into the matrix behind it, so a layer that shares its norm's "
            "gains can learn the same there. Little is lost here. But the checkpoint is wrong: "
            "the same vector stands in it five times, and a healthy model's five vectors don't"
            "fit in."
        ),
        loud=False,
        instrument="norms",
        sizes=lambda healthy, broken: (healthy.number, broken.number) == (5, 1),
    ),
    Sabotage(
        name="wrong-axis-norm",
        edits=edit(STATISTIC, STATISTIC.replace("mean(-1", "mean(-2")),
        predicts=(
            "a statistic over positions sees the future, and neither training nor validation loss "
            "shows anything"
        ),
        explains=(
            "Every position is divided by a number that all later positions take part in. The "
            "mask inside attention can't stop what happens before it. In training and in "
            "validation the future is there to be seen; when the model generates, it isn't. A "
            "small model may not have learned to use it yet, but it is no causal model."
        ),
        loud=False,
        instrument="causality",
        sizes=lambda healthy, broken: broken.number > 0.05,
    ),
    Sabotage(
        name="no-positions",
        edits=edit("return RotaryAttention(cfg)", "return gpt.CausalSelfAttention(cfg)"),
        predicts=(
            "with one layer the past is a bag: swapping two of its tokens changes nothing but "
            "rounding"
        ),
        explains=(
            "A weighted sum doesn't know the order of its terms. Two layers can guess at it from "
            "how many tokens the causal mask lets each position see, but that is worth less than "
            "real positions: here the loss shows it."
        ),
        loud=True,
        instrument="order",
        also_trips=("training-loss", "rotation", "far"),
        sizes=lambda healthy, broken: broken.number < 1e-12,
    ),
)

# ---------------------------------------------------------------- what the quiz shows


def vitals(patient: Patient) -> dict[str, str]:
    """The loss curve in numbers, the stream by layer, and what some parts make of a known input."""
    history = patient.history
    model = patient.trained
    signs = {"loss at step 1": f"{history.losses[0]:.3f}"}
    for step in (20, 50, 100, SETTINGS.steps):
        mean = sum(history.losses[step - 10 : step]) / 10
        signs[f"mean loss, steps {step - 9} to {step}"] = f"{mean:.3f}"
    signs["validation loss when training ended"] = f"{history.validation_loss:.3f}"
    now = training.evaluate(model, corpus().validation, SETTINGS)
    signs["validation loss now"] = f"{now:.3f}"
    signs["parameters"] = f"{sum(p.numel() for p in model.parameters()):,}"
    idx, _ = next(data.all_windows(corpus().validation, CONTEXT, 32))
    for point, stats in patient.modern.stream_stats(model, idx).items():
        std = stats["var"] ** 0.5
        text = f"std {std:.3f}, kurtosis {stats['kurtosis']:.2f}"
        signs[f"trained: stream after {point}"] = text
    signs["the last norm, of 768 entries of 1e-4"] = tiny_vector(patient).text
    signs["and of 768 entries of 30,000 in float16"] = float16(patient).text
    signs["the first query, of [1, 2, 3, 4] at position 3"] = rotation(patient).text
    signs["the first MLP, of gate 2 and up 3"] = activation(patient).text
    return signs


def sample(patient: Patient) -> str:
    """What the trained model makes of the validation part's first characters."""
    prompt = corpus().validation[None, :CONTEXT]
    noise = generator(patient.seed, "sample")
    generate = patient.modern.gpt.generate
    idx = generate(patient.trained, prompt, 200, temperature=0.8, generator=noise)
    return corpus().tokenizer.decode(idx[0, CONTEXT:].tolist())


CASE = Case(healthy, INSTRUMENTS, SABOTAGES, vitals, sample, chapter=7)


def main(argv: list[str] | None = None) -> int:
    return sabotage.main(CASE, __doc__, argv)


if __name__ == "__main__":
    cli.run(main)
