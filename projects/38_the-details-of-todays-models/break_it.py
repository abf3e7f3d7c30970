"""Break the details of chapter 38, one at a time, and see what each was for.

    python break_it.py                          the first: Gemma's gains, read as another model's
    python break_it.py --list                   all of them, each with its predicted symptom
    python break_it.py --sabotage sink-lost     one of them, healthy and broken side by side
    python break_it.py --all                    every one, in a table (about 15 seconds)
    python break_it.py --quiz                   one at random: you name the damage
    python break_it.py --edit "OLD" "NEW"       an edit of your own

A port is a program of your own that loads the numbers of somebody else's model. Each sabotage here
is a mistake that a port can make: it exchanges a line or two of build.py, and the build is loaded
with the new lines. All shapes fit, so nothing complains. A model that is trained with the mistake
learns as well as one without. But a model that was trained without it and is loaded with it is
another model, and mostly a worse one. `trained` and `loaded` show the two, in nats (the unit of the
loss). Where even `loaded` says nothing, only a law that the detail must obey shows the mistake.
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

SIZES = {
    "block_size": 16,
    "n_layers": 1,
    "n_heads": 4,
    "n_kv_heads": 2,
    "d_model": 32,
    "d_hidden": 48,
    "n_experts": 3,
    "top_k": 2,
}
# What else of a recipe is too large for such a model.
SMALLER = {
    "mistral": {"window": 4},
    "gemma2": {"window": 4, "score_cap": 4.0},
    "gemma3": {"window": 4, "layer_kinds": ("window", "full"), "n_layers": 2},
    "smollm3": {"layer_kinds": ("full", "no positions"), "n_layers": 2},
    "cohere": {"logit_scale": 1.0},  # its 1/16 is for rows of 8,192 numbers
    "gpt-oss": {"window": 4},
    "deepseek-v3": {"n_kv_heads": 4},
}
# The recipes whose models are trained; a detail of the others stands in one of these, too.
TRAINED = (
    "gemma2",
    "gemma3",
    "olmo2",
    "llama3",
    "smollm3",
    "cohere",
    "olmoe",
    "gpt-oss",
    "deepseek-v3",
)
N_WINDOWS = 512  # of the text on which a trained model's loss is measured
SETTINGS = training.TrainingSettings(steps=100, batch_size=16, learning_rate=1e-2)

# ---------------------------------------------------------------- the patient


@lru_cache(maxsize=1)
def corpus() -> data.Corpus:
    return data.load_corpus("docs", "char", SIZES["block_size"])


def text(n_windows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows that nobody trained on: token ids and targets, each (n_windows, T)."""
    return next(data.all_windows(corpus().validation, SIZES["block_size"], n_windows))


def new_model(build: ModuleType, recipe: str) -> nn.Module:
    """A small model of a recipe, as the build makes it."""
    fields = SIZES | build.RECIPES[recipe].changes | SMALLER.get(recipe, {})
    return build.DetailedGPT(build.DetailedConfig(**fields), corpus().vocab_size)


@dataclass(frozen=True)
class Patient:
    """An edited build, whose models get the numbers of the unedited build's models."""

    seed: int
    edits: tuple[Edit, ...] = ()

    @cached_property
    def build(self) -> ModuleType:
        return chapters.edited_build(38, self.edits)

    def model(self, recipe: str, dtype: torch.dtype = torch.float64) -> nn.Module:
        """A model with random numbers, untrained."""
        model = new_model(self.build, recipe).to(dtype)
        model.load_state_dict(random_numbers(self.seed, recipe))
        return model.eval()

    def loaded(self, recipe: str) -> nn.Module:
        """A model with the numbers of one that was trained with the unedited build."""
        model = new_model(self.build, recipe)
        model.load_state_dict(trained(self.seed, recipe)[0])
        return model

    @cached_property
    def answers(self) -> dict[str, tuple[float, float]]:
        """What trained models make of a little text: the loss, and its gradient's size."""
        return {recipe: answer(self.loaded(recipe)) for recipe in TRAINED}

    @cached_property
    def reached(self) -> list[str]:
        """The recipes that the edits change. The others would give the same numbers again."""
        plain = healthy(self.seed).answers
        return [recipe for recipe in TRAINED if self.answers[recipe] != plain[recipe]]

    @cached_property
    def losses(self) -> dict[str, float]:
        """The losses of loaded models on a longer text, where the edits change them."""
        recipes = self.reached if self.edits else TRAINED
        with torch.no_grad():
            return {r: self.loaded(r)(*text(N_WINDOWS))[1].item() for r in recipes}

    def rise(self, recipe: str) -> float:
        """Nats by which a trained model's loss rises when it is loaded into this build."""
        return self.losses[recipe] - healthy(self.seed).losses[recipe]

    @cached_property
    def most_changed(self) -> str | None:
        """The recipe whose loss rises or falls most; None if the edits reach no recipe."""
        return max(self.reached, key=lambda recipe: abs(self.rise(recipe)), default=None)

    @cached_property
    def end(self) -> float:
        """The loss at the end of a training of that recipe with this build's code."""
        return train(self.model(self.most_changed, torch.float32), self.seed)


@lru_cache(maxsize=4)
def healthy(seed: int) -> Patient:
    return Patient(seed)


@lru_cache(maxsize=64)
def random_numbers(seed: int, recipe: str) -> dict[str, torch.Tensor]:
    """Numbers as a file may hold them: no gain is 1, and no bias or sink is 0, which would hide it.

    Training begins with them, too.
    """
    build = chapters.load_build(38)
    model = new_model(build, recipe).double()
    build.init_parameters(model, seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.empty_like(p).normal_(generator=generator(seed, name, tuple(p.shape)))
            if p.dim() == 1:
                p += 0.3 * noise
            else:
                p.copy_(noise * p.shape[1] ** -0.5)
        for balance_bias in model.buffers():
            balance_bias.copy_(torch.linspace(-0.2, 0.2, len(balance_bias)))
    return model.state_dict()


@lru_cache(maxsize=64)
def trained(seed: int, recipe: str) -> tuple[dict[str, torch.Tensor], float]:
    """A model that was trained with the unedited build: its numbers and its loss at the end."""
    model = healthy(seed).model(recipe, torch.float32)
    loss = train(model, seed)
    return model.state_dict(), loss


@torch.enable_grad()
def train(model: nn.Module, seed: int) -> float:
    """Train a model. Returns the mean loss of the last ten steps."""
    # What train() evaluates in the end isn't needed here.
    short = replace(corpus(), validation=corpus().validation[:100])
    return training.train(model, short, SETTINGS, seed).train_loss


@torch.enable_grad()
def answer(model: nn.Module) -> tuple[float, float]:
    """The loss on 8 windows of text, and the length of its gradient."""
    loss = model(*text(8))[1]
    loss.backward()
    norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    return loss.item(), torch.stack(norms).norm().item()


def noise(patient: Patient, *shape: int) -> torch.Tensor:
    draw = generator(patient.seed, "noise", shape)
    return torch.randn(shape, generator=draw, dtype=torch.float64)


# ---------------------------------------------------------------- instruments: the loss

ALIKE = 0.25  # nats; healthy models of other seeds end up to 0.2 apart
UNSEEN = 0.03  # nats; hardly anybody would notice less


def when_trained(patient: Patient) -> Reading:
    """Where training with this code ends, above where it ends with the healthy code.

    Of one recipe, that of when_loaded(). What the edits don't reach would train as before.
    """
    recipe = patient.most_changed
    gap = 0.0 if recipe is None else patient.end - trained(patient.seed, recipe)[1]
    return Reading(nats(gap), abs(gap) < ALIKE, gap)


def when_loaded(patient: Patient) -> Reading:
    """What a trained model loses when its numbers are loaded into this code.

    Of all recipes, the one that loses most, or gains.
    """
    recipe = patient.most_changed
    if recipe is None:
        return Reading("unchanged", True, 0.0)
    rise = patient.rise(recipe)
    return Reading(f"{recipe} {nats(rise)}", abs(rise) < UNSEEN, rise)


def nats(gap: float) -> str:
    return f"{round(gap, 2) + 0:+.2f}"  # the 0 turns -0.0 into 0.0


# ---------------------------------------------------------------- instruments: norms and blocks


@torch.no_grad()
def gains(patient: Patient) -> Reading:
    """The size of what Gemma 2's last norm lets through where the file holds zeros: 1."""
    norm = patient.model("gemma2").norm_f
    norm.weight.zero_()
    size = rms(norm(noise(patient, 5, 32)))
    return Reading(f"{size:.2f}", abs(size - 1) < 1e-3, size)


@torch.no_grad()
def distance(patient: Patient) -> Reading:
    """One token at nine positions: by how much the scores of Qwen3 at one distance differ."""
    attn = patient.model("qwen3").blocks[0].attn
    q, k, _ = attn.heads(noise(patient, 32).expand(1, 9, 32))
    scores = q[0, 0] @ k[0, 0].T
    change = (scores[1:, 1:] - scores[:-1, :-1]).abs().max() / scores.abs().max()
    return Reading(f"differ by {change:.1%}", change.item() < 1e-6, change.item())


@torch.no_grad()
def added(patient: Patient) -> Reading:
    """What a block of OLMo 2 with gains of 1 adds to a stream of size 100: two halves of size 1."""
    block = patient.model("olmo2").blocks[0]
    block.norm1.weight.fill_(1.0)
    block.norm2.weight.fill_(1.0)
    x = 100 * noise(patient, 1, 9, 32)
    size = rms(block(x) - x)
    return Reading(f"adds {size:.1f} to {rms(x):.0f}", size <= 2, size)


@torch.no_grad()
def halves(patient: Patient) -> Reading:
    """A Cohere block without its attention and one without its MLP: do they sum to the whole?"""
    x = noise(patient, 1, 9, 32)
    whole = patient.model("cohere").blocks[0]
    no_attention = patient.model("cohere").blocks[0]
    no_attention.attn.proj.weight.zero_()
    no_mlp = patient.model("cohere").blocks[0]
    no_mlp.mlp.down_proj.weight.zero_()
    parts = no_attention(x) - x + no_mlp(x) - x
    gap = changed(parts, whole(x) - x)
    return Reading(f"{gap:.0%} off", gap < 1e-6, gap)


@torch.no_grad()
def embedding(patient: Patient) -> Reading:
    """The size of the stream's start over that of the stored embeddings: √32 in Gemma 2."""
    model = patient.model("gemma2")
    idx = torch.arange(9)[None]
    times = rms(model.embed(idx)) / rms(model.token_embedding(idx))
    return Reading(f"{times:.2f} times", abs(times - math.sqrt(32)) < 1e-6, times)


def rms(x: torch.Tensor) -> float:
    return x.square().mean().sqrt().item()


def changed(x: torch.Tensor, y: torch.Tensor) -> float:
    """By how much x differs from y, as a part of y's length."""
    return ((x - y).norm() / y.norm()).item()


# ---------------------------------------------------------------- instruments: who sees what


@torch.enable_grad()
def reach(patient: Patient) -> Reading:
    """How many positions move the ninth output of a layer of Mistral's, whose window is 4."""
    attn = patient.model("mistral").blocks[0].attn
    x = noise(patient, 1, 9, 32).requires_grad_()
    attn(x)[0, 8].square().sum().backward()
    seen = int(x.grad[0].any(-1).sum())
    return Reading(f"{seen} positions", seen == 4, seen)


@torch.enable_grad()
def causality(patient: Patient) -> Reading:
    """The share of the gradient of Gemma 2's fifth logits that goes to later positions."""
    model = patient.model("gemma2")
    x = model.embed(torch.arange(9)[None]).detach().requires_grad_()
    model.embed = lambda idx: x  # the same numbers, with a gradient
    model(torch.arange(9)[None])[0][0, 4].square().sum().backward()
    share = (x.grad[0, 5:].norm() / x.grad.norm()).item()
    return Reading(f"{share:.1%} from later", share == 0, share)


@torch.no_grad()
def sink(patient: Patient) -> Reading:
    """One key with score 0 beside a sink of ln 3, in gpt-oss: its weight is 1/(1 + 3)."""
    attn = patient.model("gpt-oss").blocks[0].attn
    attn.proj.bias.zero_()
    q, k, v = attn.heads(noise(patient, 1, 1, 32))
    attn.sinks.fill_(-1e9)
    alone = attn.mix(0 * q, k, v)
    attn.sinks.fill_(math.log(3))
    weight = (attn.mix(0 * q, k, v).norm() / alone.norm()).item()
    return Reading(f"{weight:.2f} of 1", abs(weight - 0.25) < 1e-6, weight)


# ---------------------------------------------------------------- instruments: positions


def turned_by(attn: nn.Module, pair: int, x: torch.Tensor) -> float:
    """Radians by which the query of one token x (C) turns from a position to the next."""
    q = attn.heads(x.expand(1, 2, -1))[0]
    hands = torch.view_as_complex(q[0, 0].unflatten(-1, (-1, 2)).contiguous())  # (2, D/2)
    return (hands[1, pair] / hands[0, pair]).angle().item()


@torch.no_grad()
def bases(patient: Patient) -> Reading:
    """The second pair of four in Gemma 3: 10,000^(-1/4) = 0.1 in a layer with a window.

    In a full layer 1,000,000^(-1/4) / 8 = 0.00395.
    """
    blocks = patient.model("gemma3").blocks
    local, whole = (turned_by(block.attn, 1, noise(patient, 32)) for block in blocks)
    green = abs(local - 0.1) < 1e-6 and abs(whole - 0.0039528) < 1e-6
    return Reading(f"{local:.4f} and {whole:.4f} radians", green, local)


@torch.no_grad()
def neighbours(patient: Patient) -> Reading:
    """The fastest pair of Llama 3.1 turns by 1 radian a position, at any scaling."""
    turn = turned_by(patient.model("llama3").blocks[0].attn, 0, noise(patient, 32))
    return Reading(f"{turn:.3f} radians", abs(turn - 1) < 1e-6, turn)


@torch.no_grad()
def yarn_length(patient: Patient) -> Reading:
    """How much longer turning makes the queries of gpt-oss: 0.1 ln 32 + 1 = 1.3466 times."""
    attn = patient.model("gpt-oss").blocks[0].attn
    x = noise(patient, 1, 9, 32)
    times = rms(attn.heads(x)[0]) / rms(attn.project(x)[0])
    return Reading(f"{times:.3f} times", abs(times - 1.3465736) < 1e-6, times)


@torch.no_grad()
def order(patient: Patient) -> Reading:
    """Exchange two tokens of the past in SmolLM3's layer without positions: nothing changes."""
    attn = patient.model("smollm3").blocks[1].attn
    x = noise(patient, 1, 9, 32)
    swapped = x[:, [0, 6, 2, 3, 4, 5, 1, 7, 8]]
    gap = changed(attn(swapped)[0, 8], attn(x)[0, 8])
    return Reading(f"changes by {gap:.0%}", gap < 1e-9, gap)


@torch.no_grad()
def pieces(patient: Patient) -> Reading:
    """A text read in two pieces with a cache, as one does when writing: is it the same as whole?"""
    attn = patient.model("qwen3").blocks[0].attn
    x = noise(patient, 1, 9, 32)
    _, k, v = attn.heads(x[:, :6])
    q, new_k, new_v = attn.heads(x[:, 6:], start=6)
    y = attn.mix(q, torch.cat((k, new_k), dim=2), torch.cat((v, new_v), dim=2))
    gap = changed(y, attn(x)[:, 6:])
    return Reading(f"{gap:.0%} off", gap < 1e-9, gap)


# ---------------------------------------------------------------- instruments: MLPs and experts


@torch.no_grad()
def clamped(patient: Patient) -> Reading:
    """gpt-oss' MLP where one channel has gate 2 and up 3: 2 · σ(1.702 · 2) · (3 + 1) = 7.743."""
    mlp = patient.model("gpt-oss").blocks[0].mlp.experts[0]
    for p in mlp.parameters():
        p.zero_()
    mlp.gate_proj.bias[0] = 2.0
    mlp.up_proj.bias[0] = 3.0
    mlp.down_proj.weight[0, 0] = 1.0
    y = mlp(noise(patient, 32))[0].item()
    return Reading(f"{y:.3f}", abs(y - 7.7425) < 1e-3, y)


@torch.no_grad()
def gate_sum(patient: Patient) -> Reading:
    """Mixtral with equal experts: as its gates sum to 1, it is one of them."""
    moe = patient.model("mixtral").blocks[0].mlp
    times = share_of_one_expert(moe, noise(patient, 9, 32))
    return Reading(f"{times:.2f}", abs(times - 1) < 1e-6, times)


@torch.no_grad()
def olmoe_gates(patient: Patient) -> Reading:
    """OLMoE with equal experts and a router that has no opinion: 2 gates of 1/3 each."""
    moe = patient.model("olmoe").blocks[0].mlp
    moe.router.weight.zero_()
    times = share_of_one_expert(moe, noise(patient, 9, 32))
    return Reading(f"{times:.2f}", abs(times - 2 / 3) < 1e-6, times)


def share_of_one_expert(moe: nn.Module, x: torch.Tensor) -> float:
    """All experts made equal: the layer's output over that of one of them, at the least."""
    first = moe.experts[0]
    for expert in moe.experts:
        expert.load_state_dict(first.state_dict())
    return (moe(x).norm(dim=-1) / first(x).norm(dim=-1)).min().item()


@torch.no_grad()
def shared_expert(patient: Patient) -> Reading:
    """DeepSeek's chosen experts silenced: what is left over what its shared expert writes."""
    moe = patient.model("deepseek-v3").blocks[0].mlp
    for expert in moe.experts:
        expert.down_proj.weight.zero_()
    x = noise(patient, 9, 32)
    times = rms(moe(x)) / rms(moe.shared(x))
    return Reading(f"{times:.2f}", abs(times - 1) < 1e-6, times)


@torch.no_grad()
def balance(patient: Patient) -> Reading:
    """Raise the balance biases of all DeepSeek's experts by 1: no choice and no gate changes."""
    moe = patient.model("deepseek-v3").blocks[0].mlp
    x = noise(patient, 9, 32)
    before = moe(x)
    moe.balance_bias += 1
    gap = changed(moe(x), before)
    return Reading(f"changes by {gap:.0%}", gap < 1e-6, gap)


INSTRUMENTS = (
    Instrument("trained", "does training end where it ended (nats)?", when_trained),
    Instrument("loaded", "does a trained model lose nothing (nats)?", when_loaded),
    Instrument("gains", "does a gain of 0 in Gemma's file mean 1?", gains),
    Instrument("distance", "do equal distances score alike?", distance),
    Instrument("reach", "does a window of 4 see four positions?", reach),
    Instrument("bases", "has each kind of layer its own base?", bases),
    Instrument("added", "does a block add what its gains allow?", added),
    Instrument("causality", "is the future without influence?", causality),
    Instrument("sink", "does the sink take its share?", sink),
    Instrument("gate-sum", "do Mixtral's gates sum to 1?", gate_sum),
    Instrument("olmoe-gates", "do OLMoE's gates sum to 2/3?", olmoe_gates),
    Instrument("shared", "is the shared expert added, once?", shared_expert),
    Instrument("embedding", "does the stream start √32 times as large?", embedding),
    Instrument("yarn-length", "does turning lengthen as YaRN says?", yarn_length),
    Instrument("neighbours", "do neighbours keep their angle?", neighbours),
    Instrument("balance", "are equal biases without effect?", balance),
    Instrument("halves", "do attention and MLP add up?", halves),
    Instrument("order", "is NoPE's past without order?", order),
    Instrument("clamped", "is gate 2, up 3 what it must be?", clamped),
    Instrument("pieces", "do two pieces read as one text?", pieces),
)

# ---------------------------------------------------------------- the damage


def silent(
    name: str, *edits: tuple[str, str], also_trips: tuple[str, ...] = ("loaded",), **about
) -> Sabotage:
    """Edits of this chapter's build, each (old, new), that nobody sees in the training loss."""
    made = tuple(Edit(38, old, new) for old, new in edits)
    return Sabotage(name=name, edits=made, loud=False, also_trips=also_trips, **about)


SABOTAGES = (
    silent(
        "gains-read-as-w",
        ("gain = 1 + self.weight.to(unit.dtype)", "gain = self.weight.to(unit.dtype)"),
        predicts="where Gemma's file holds zeros a norm lets nothing through, and a trained model "
        "loses more than a nat",
        explains="Gemma stores w and multiplies by 1 + w: a gain that did not change in training "
        "is 0 in its file, and 1 in another model's. Read as w, the gains are small and of both "
        "signs. Trained with the mistake they grow to what is needed. The opposite happens, too: "
        "a file of llama.cpp's holds 1 + w already, and published ports added the 1 once more.",
        instrument="gains",
        sizes=lambda healthy, broken: broken.number == 0,
    ),
    silent(
        "norm-after-turn",
        ('"head norm": HeadNormAttention', '"head norm": TurnedNormAttention'),
        predicts="scores of Qwen3 at equal distances differ by more than 0.5 % of the largest; no "
        "loss shows it",
        explains="A turn mixes the two channels of a pair, and the gains stretch each channel by "
        "another number. Before the turn that only makes another query. After it, how long a "
        "turned pair comes out depends on where it points, and so on the position. Without gains, "
        "as in nanochat, the order makes no difference, and with gains near 1 only a small one.",
        instrument="distance",
        also_trips=("bases",),
        sizes=lambda healthy, broken: broken.number > 0.005,
    ),
    silent(
        "window-too-wide",
        ("(distance < window)", "(distance <= window)"),
        predicts="a window of 4 sees 5 positions",
        explains="A window of 4 is a token and the three before it. Some attention kernels want "
        "to be told how far to look back instead, which is 3. Published ports gave them the "
        "window. One position more is much beside four, and next to nothing beside 4,096.",
        instrument="reach",
        sizes=lambda healthy, broken: broken.number == 5,
    ),
    silent(
        "one-base-for-all",
        ('return {"rope_base": cfg.window_rope_base, "rope_scaling": None}', "return {}"),
        predicts="a layer of Gemma 3 with a window turns its second pair by 0.0040 radians, not "
        "by 0.1000",
        explains="Only Gemma 3's full layers have the large base, and only they are slowed by 8 "
        "for longer texts. A config has two bases, but one scaling: published ports had it in the "
        "wrong layers. In a window of a few positions pairs so slow can't tell one from another.",
        instrument="bases",
        sizes=lambda healthy, broken: abs(broken.number - 0.00395) < 1e-5,
    ),
    silent(
        "norm-after-sum",
        (
            "x = x + self.residual_scale * self.norm1(self.attn(x))\n"
            "x = x + self.residual_scale * self.norm2(self.mlp(x))",
            "x = self.norm1(x + self.residual_scale * self.attn(x))\n"
            "x = self.norm2(x + self.residual_scale * self.mlp(x))",
        ),
        predicts="a block of OLMo 2 replaces a stream of size 100: what it adds is as large, and "
        "not two halves of size 1",
        explains="The norm belongs to what a half writes, and the stream passes by. After the sum "
        "it cuts the stream itself to size 1. That is the first transformer's block. It has the "
        "same parameters, and a model of one layer trains as well with it. A deep one needs care "
        "(chapter 07, step 13).",
        instrument="added",
        sizes=lambda healthy, broken: broken.number > 50,
    ),
    silent(
        "cap-after-mask",
        (
            "scores = softcap(q @ k.mT * self.score_scale, self.cfg.score_cap)",
            "scores = q @ k.mT * self.score_scale",
        ),
        (
            "scores = scores.masked_fill(~seen, -math.inf)",
            "scores = softcap(scores.masked_fill(~seen, -math.inf), self.cfg.score_cap)",
        ),
        predicts="more than 0.1 % of the gradient of Gemma 2's logits goes to later tokens; no "
        "loss shows it",
        explains="A hidden key has a score of minus infinity, and 4 · tanh(-∞ / 4) is -4. So it "
        "keeps a weight: e^-4, or 2 %, of that of a key with score 0. A text's loss is then "
        "measured with some help from what comes later, and no longer says how well the model "
        "would write it. Gemma 2's own cap is 50, and e^-50 is lost in rounding: there the "
        "mistake can stay.",
        instrument="causality",
        also_trips=(),
        sizes=lambda healthy, broken: broken.number > 0.001,
    ),
    silent(
        "sink-lost",
        (
            "return weights[..., :-1]",
            "return weights[..., :-1] / weights[..., :-1].sum(-1, keepdim=True)",
        ),
        predicts="one key beside a sink of ln 3 gets all of the weight, not a quarter of it",
        explains="To divide what is left by its sum looks like good order: weights should sum to "
        "1. But then the sink cancels out, and is as good as not there. A head that gave its "
        "weight to the sink, in order to add nothing, now adds something.",
        instrument="sink",
        sizes=lambda healthy, broken: abs(broken.number - 1) < 1e-6,
    ),
    silent(
        "gates-as-they-are",
        ("if self.cfg.renormalise:", "if False:"),
        predicts="Mixtral with equal experts writes less than 95 % of what one expert does; no "
        "loss shows it",
        explains="The gates of the chosen are probabilities, and others have the rest. Undivided "
        "they sum to less than 1, to another number for each token. A published port of "
        "DeepSeek-V3 lacked the division. A model as small as these loses next to nothing by it.",
        instrument="gate-sum",
        also_trips=(),
        sizes=lambda healthy, broken: broken.number < 0.95,
    ),
    silent(
        "gates-renormalised",
        ("if self.cfg.renormalise:", "if True:"),
        predicts="OLMoE with equal experts writes what one expert does, not 2/3 of it; no loss "
        "shows it",
        explains="The softmax of the chosen logits alone sums to 1. A port that takes it has "
        "renormalised, and no line of it says so. A published port of OLMoE did. Its answers began "
        "well and then lost the thread.",
        instrument="olmoe-gates",
        also_trips=(),
        sizes=lambda healthy, broken: abs(broken.number - 1) < 1e-6,
    ),
    silent(
        "no-shared-expert",
        ("return y + self.shared(x)", "return y"),
        predicts="DeepSeek's layer with silenced experts writes nothing",
        explains="The shared expert has no gate, so it stands in no sum over experts and is easily "
        "left out. It is the one expert that every token was trained with.",
        instrument="shared",
        sizes=lambda healthy, broken: broken.number == 0,
    ),
    silent(
        "unscaled-embedding",
        ("scale = math.sqrt(self.cfg.d_model)", "scale = 1.0"),
        predicts="Gemma's stream starts with the embeddings as they are stored, not √32 = 5.66 "
        "times as large",
        explains="Gemma's embedding is its head, too, and a head wants small rows. The stream "
        "wants large ones, or the first block drowns them. So they are multiplied, by a factor "
        "that stands in the code and not in the file.",
        instrument="embedding",
        sizes=lambda healthy, broken: abs(broken.number - 1) < 1e-6,
    ),
    silent(
        "no-yarn-length",
        (
            "return scaling.length * angle.cos(), scaling.length * angle.sin()",
            "return angle.cos(), angle.sin()",
        ),
        predicts="turned queries of gpt-oss are as long as before the turn, not 1.347 times as "
        "long; no loss shows it",
        explains="YaRN changes the speeds, and makes scores larger by 1.347², or 1.81. The second "
        "half has nothing to do with positions, so no test of positions misses it. It is for "
        "softmaxes that a hundred thousand keys share. Here sixteen do.",
        instrument="yarn-length",
        also_trips=(),
        sizes=lambda healthy, broken: abs(broken.number - 1) < 1e-6,
    ),
    silent(
        "linear-scaling",
        ("return kept * speed + (1 - kept) * speed / self.factor", "return speed / self.factor"),
        predicts="Llama 3.1's fastest pair turns by 0.125 radians from a token to the next, not "
        "by 1",
        explains="A port that reads the factor and nothing else slows all pairs by 8. Llama 3.1 "
        "slows those that turn seldom. The fast ones tell neighbours apart, and keep their speed.",
        instrument="neighbours",
        sizes=lambda healthy, broken: abs(broken.number - 0.125) < 1e-6,
    ),
    silent(
        "bias-in-the-gate",
        ("return logits.sigmoid()", "return logits.sigmoid() + self.balance_bias"),
        ("wanted = scores + self.balance_bias", "wanted = scores"),
        predicts="raise the balance biases of all DeepSeek's experts alike: the output changes by "
        "more than 5 %; no loss shows it",
        explains="The bias says how busy an expert is, not how well it suits the token. It may "
        "choose and must not weigh. Chapter 18 has the same mistake in training.",
        instrument="balance",
        also_trips=(),
        sizes=lambda healthy, broken: broken.number > 0.05,
    ),
    silent(
        "halves-in-turn",
        (
            "return x + self.residual_scale * (self.attn(normed) + self.mlp(normed))",
            "x = x + self.residual_scale * self.attn(normed)\n"
            "return x + self.residual_scale * self.mlp(self.norm1(x))",
        ),
        predicts="what a Cohere block adds isn't the sum of its halves: it is off by more than 5 %",
        explains="The MLP now reads a stream to which attention has written already. It never saw "
        "one in training. The parameters are the same, since the block has one norm for both.",
        instrument="halves",
        sizes=lambda healthy, broken: broken.number > 0.05,
    ),
    silent(
        "all-layers-turned",
        ('return {"window": None, "position_type": "none"}', 'return {"window": None}'),
        predicts="exchange two tokens of the past: SmolLM3's layer without positions sees it, by "
        "more than 1 %; no loss shows it",
        explains="Which layers have no positions is a line of the config. No number in the file "
        "belongs to it, so nothing is missing where it is ignored. Such layers are there for long "
        "texts: at sixteen positions the loss says nothing.",
        instrument="order",
        also_trips=(),
        sizes=lambda healthy, broken: broken.number > 0.01,
    ),
    silent(
        "up-without-one",
        ("(up + 1)", "up"),
        predicts="in gpt-oss a gate of 2 and an up of 3 give 5.807, not 7.743",
        explains="With the 1 an up of 0 lets the gate pass, without it up closes it. Trained with "
        "the mistake, the bias of up learns the 1. A bias from a file can't.",
        instrument="clamped",
        sizes=lambda healthy, broken: abs(broken.number - 5.8069) < 1e-3,
    ),
    silent(
        "cache-starts-at-0",
        (
            "return self.turn(q, start), self.turn(k, start), v",
            "return self.turn(q, 0), self.turn(k, 0), v",
        ),
        predicts="a text read in two pieces comes out otherwise, by more than 1 %; "
        "no loss shows it",
        explains="A loss is measured on whole texts, and those begin at position 0. A model that "
        "writes reads token after token with a cache. Here each is turned as if it stood at the "
        "start of the text. Chapter 37 has the same mistake in a real model.",
        instrument="pieces",
        also_trips=(),
        sizes=lambda healthy, broken: broken.number > 0.01,
    ),
)

# ---------------------------------------------------------------- what the quiz shows


def vitals(patient: Patient) -> dict[str, str]:
    """Each trained model's loss when it is loaded, and instruments without their verdicts."""
    losses = healthy(patient.seed).losses | patient.losses
    signs = {f"{recipe}, loaded: loss": f"{losses[recipe]:.3f}" for recipe in TRAINED}
    signs["the end of a training, above the healthy one"] = when_trained(patient).text
    signs["causality"] = causality(patient).text
    signs["pieces"] = pieces(patient).text
    return signs


CASE = Case(
    healthy=healthy,
    instruments=INSTRUMENTS,
    sabotages=SABOTAGES,
    vitals=vitals,
    premise="load the same numbers, and train on the same batches (seed {seed})",
    chapter=38,
    columns=("trained", "loaded"),
)


def main(argv: list[str] | None = None) -> int:
    return sabotage.main(CASE, __doc__, argv)


if __name__ == "__main__":
    cli.run(main)
