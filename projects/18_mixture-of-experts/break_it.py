"""Break the details of chapter 18, one at a time, and see what each was for.

    python break_it.py                            the chapter's own: no balance loss, and the load of every expert
    python break_it.py --list                     all fourteen, with the symptom that each is predicted to have
    python break_it.py --sabotage unstable-ties   one of them, healthy and broken side by side
    python break_it.py --all                      every one, summed up in a table (about half a minute)
    python break_it.py --quiz                     one at random: you see the vital signs, you name the damage

Every damaged model starts from the healthy one's seed and sees its batches. None of this damage is loud: a router
that does its work badly costs a small model next to nothing, and the training loss tells it from noise no more than
you can.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, data, sabotage, training
from shared.instruments import Case, Instrument, Reading, Sabotage
from shared.randomness import generator

build = chapters.load_build(18)
gpt, modern = build.gpt, build.modern
step_06, step_13 = chapters.load_step(18, 6), chapters.load_step(18, 13)

CONFIG = build.SparseConfig(block_size=16, d_model=32, n_heads=2, d_hidden=24, balance_weight=0.03)
SETTINGS = training.TrainingSettings(steps=120)
HEALTHY_STARTS = 5  # healthy models that say how far apart healthy models end


@lru_cache(maxsize=1)
def corpus() -> data.Corpus:
    whole = data.load_corpus("docs", "char", CONFIG.block_size)
    return replace(whole, validation=whole.validation[:10_000])


# ---------------------------------------------------------------- the patient


@dataclass(frozen=True)
class Patient:
    """The three layers that choose without looking ahead, and what trains a model of the first. A sabotage exchanges
    one of these."""

    seed: int  # of the batches
    start: int  # the seed of the initial values
    top_2: type[build.GroupedMoE] = build.GroupedMoE
    switch: type[build.SwitchMoE] = build.SwitchMoE
    bias: type[build.BiasMoE] = build.BiasMoE
    experiment: type[build.SparseOrDense] = build.SparseOrDense
    init: Callable[[nn.Module, int], None] = gpt.init_parameters

    def layer(self, cls: type[build.GroupedMoE], **changes) -> build.GroupedMoE:
        """A layer by itself, 12 channels wide, with weights large enough to tell experts apart."""
        cfg = build.SparseConfig(**{"d_model": 12, "n_heads": 1, "d_hidden": 7, "n_experts": 5} | changes)
        layer = cls(cfg)
        for name, p in layer.named_parameters():
            nn.init.normal_(p, std=0.4, generator=generator(self.start, name, tuple(p.shape)))
        return layer.train()  # a Switch drops tokens in training only

    def model(self, **changes) -> build.SparseGPT:
        """A freshly started model of top-2 layers."""
        model = with_layer(self.top_2)(replace(CONFIG, **changes), corpus().vocab_size)
        self.init(model, self.start)
        return model

    @property
    def trained(self) -> tuple[build.SparseGPT, training.History]:
        """The model after SETTINGS.steps steps, and how it got there."""
        return train(self.seed, self.start, self.top_2, self.experiment, self.init)


@lru_cache(maxsize=64)
def with_layer(layer: type[build.GroupedMoE]) -> type[build.SparseGPT]:
    """A sparse GPT made of such layers."""

    class Block(build.SparseBlock):
        def make_mlp(self, cfg: build.SparseConfig) -> nn.Module:
            return layer(cfg)

    class Model(build.SparseGPT):
        def make_block(self, cfg: build.SparseConfig) -> nn.Module:
            return Block(cfg)

    return Model


@lru_cache(maxsize=64)
@torch.enable_grad()
def train(seed: int, start: int, top_2: type, experiment: type, init: Callable) -> tuple:
    """Damage that training never meets shares the healthy training."""
    model = Patient(seed, start, top_2=top_2, init=init).model()
    history = training.train(model, corpus(), SETTINGS, seed, training_loss=experiment().training_loss)
    return model.eval(), history


@lru_cache(maxsize=2)
@torch.enable_grad()
def dense(seed: int) -> modern.ModernGPT:
    """A dense model after half as many steps, to be upcycled."""
    model = modern.ModernGPT(replace(CONFIG, mlp_type="swiglu"), corpus().vocab_size)
    gpt.init_parameters(model, seed)
    training.train(model, corpus(), replace(SETTINGS, steps=SETTINGS.steps // 2), seed)
    return model.eval()


def healthy(seed: int) -> Patient:
    return Patient(seed, start=seed)


def nats(gap: float) -> str:
    return f"{round(gap, 4) + 0:+.4f} nats"  # the 0 turns -0.0 into 0.0


def noise(patient: Patient, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator(patient.seed, "noise", shape))


# ---------------------------------------------------------------- instruments


def training_loss(patient: Patient) -> Reading:
    """Where training ends, against healthy models that saw the same batches from other starts: red if it lies more
    than three times the width of their range from that range's middle."""
    ends = [Patient(patient.seed, patient.seed + i).trained[1].train_loss for i in range(HEALTHY_STARTS)]
    middle, width = (max(ends) + min(ends)) / 2, max(ends) - min(ends)
    loss = patient.trained[1].train_loss
    return Reading(f"{loss:.2f}, healthy {min(ends):.2f} to {max(ends):.2f}", abs(loss - middle) <= 3 * width, loss)


@torch.no_grad()
def loads(model: build.SparseGPT) -> list[torch.Tensor]:
    """The load by expert of every layer, on windows that nobody trained on."""
    idx, _ = next(data.all_windows(corpus().validation, CONFIG.block_size, 1000))
    return [routing.chosen.sum(0).double() for routing in model.forward_with_routing(idx)[2]]


def load(patient: Patient) -> Reading:
    """How many equally used experts would be as even as those of the trained model: exp(entropy of the load)."""
    parts = [load / load.sum() for load in loads(patient.trained[0])]
    used = sum(torch.special.entr(part).sum().exp().item() for part in parts) / len(parts)
    busiest = max(part.max().item() for part in parts) * CONFIG.n_experts
    return Reading(f"{used:.1f} of 8, busiest {busiest:.1f} times the mean", used > 6.4, used)


def coverage(patient: Patient) -> Reading:
    """The experts of the fresh model that get no token, and what the balance loss says of it."""
    idx, targets = next(data.all_windows(corpus().validation, CONFIG.block_size, 1000))
    model = patient.model()
    idle = sum(int((load == 0).sum()) for load in loads(model))
    with torch.no_grad():
        score = balance_of(patient, model, idx, targets)
    return Reading(f"{idle} of 16 idle, balance loss {score:.3f}", idle == 0, score)


def balance_of(patient: Patient, model: build.SparseGPT, *batch: torch.Tensor) -> float:
    """What training adds to the cross-entropy, divided by its weight; 0 where it adds nothing."""
    logits = model.forward_with_routing(*batch)[0]
    objective = patient.experiment().training_loss(model, *batch)[0]
    return ((objective - F.cross_entropy(logits.transpose(1, 2), batch[1])) / CONFIG.balance_weight).item()


@torch.no_grad()
def collapse(patient: Patient) -> Reading:
    """What the balance loss says of a model in which two experts take all tokens: E / 2 = 4."""
    return score_of_collapse(patient, [(0, 1), (0, 1)], expected=4.0)


@torch.no_grad()
def opposites(patient: Patient) -> Reading:
    """The same where each layer's four experts are the other layer's idle ones: 2 each, if layers are judged alone."""
    return score_of_collapse(patient, [(0, 1, 2, 3), (4, 5, 6, 7)], expected=2.0)


def score_of_collapse(patient: Patient, layers: list[tuple[int, ...]], expected: float) -> Reading:
    """The balance loss of a model whose layers send tokens to the named experts alone, evenly among them."""
    model, (idx, targets) = patient.model(), (torch.arange(32).view(2, 16), torch.arange(32).view(2, 16))
    for block, taken in zip(model.blocks, layers):
        block.norm2 = Directions(taken)
        nn.init.zeros_(block.mlp.router.weight)
        block.mlp.router.weight[:, : len(block.mlp.experts)] = 30 * torch.eye(len(block.mlp.experts))
    score = balance_of(patient, model, idx, targets)
    return Reading(f"{score:.2f}, by hand {expected:.2f}", abs(score - expected) < 0.02, score)


class Directions(nn.Module):
    """Tokens that point to the named experts, two at a time, in turn."""

    def __init__(self, taken: tuple[int, ...]):
        super().__init__()
        self.taken = taken

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x).flatten(0, 1)
        for n in range(len(y)):
            for step in (0, 1):
                y[n, self.taken[(n + step) % len(self.taken)]] = 1.0
        return y.view_as(x)


@torch.no_grad()
def upcycling(patient: Patient) -> Reading:
    """The loss of a sparse model whose experts are copies of a trained dense one's MLPs, above the dense loss."""
    idx, targets = next(data.all_windows(corpus().validation, CONFIG.block_size, 64))
    before = dense(patient.seed)(idx, targets)[1].item()
    model = patient.model()
    model.load_state_dict(step_13.upcycle(dense(patient.seed), CONFIG, patient.seed).state_dict())
    gap = model.eval()(idx, targets)[1].item() - before
    return Reading(nats(gap), abs(gap) < 1e-3, gap)


def router_gradient(patient: Patient) -> Reading:
    """The gradient of a Switch's router, from what the experts wrote; and its load, which looks well either way."""
    switch = patient.layer(patient.switch, top_k=1, capacity_factor=5.0)
    y, routing = switch(noise(patient, 64, 12))
    (y * noise(patient, 12, 64).T).sum().backward()
    norm = switch.router.weight.grad.norm().item()
    load = " ".join(map(str, routing.chosen.sum(0).tolist()))
    return Reading(f"norm {norm:.2g}, load {load}", norm > 1e-2, norm)


@torch.no_grad()
def gates(patient: Patient) -> Reading:
    """How far the weights of a biased layer are from the softmax over the chosen experts' logits."""
    moe = patient.layer(patient.bias, top_k=2)
    moe.balance_bias.copy_(torch.tensor([0.3, -0.2, 0.1, 0.0, -0.1]))
    logits = noise(patient, 40, 5)
    weight, chosen = moe.decide(logits)
    gap = (weight - logits.masked_fill(~chosen, -math.inf).softmax(-1)).abs().max().item()
    return Reading(f"{gap:.0e} off", gap < 1e-5, gap)


@torch.no_grad()
def repeat(patient: Patient) -> Reading:
    """The trained model's loss on the same text, twice."""
    idx, targets = next(data.all_windows(corpus().validation, CONFIG.block_size, 64))
    once, again = (patient.trained[0](idx, targets)[1].item() for _ in range(2))
    return Reading(f"{once:.4f}, {again:.4f}", once == again, abs(once - again))


@torch.no_grad()
def precision(patient: Patient) -> Reading:
    """The part of 4,096 tokens that go to other experts than a router in float64 would send them to."""
    moe, x = patient.layer(patient.top_2, n_experts=16, top_k=2), noise(patient, 4096, 12)
    exact = build.top_k_mask(x.double() @ moe.router.weight.double().T, 2)
    moved = (moe(x)[1].chosen != exact).any(1).double().mean().item()
    return Reading(f"{moved:.2%} of tokens elsewhere", moved < 5e-4, moved)


@torch.no_grad()
def short_batch(patient: Patient) -> Reading:
    """How many of the tokens a Switch of 8 experts serves in training mode, when they come one by one."""
    switch = patient.layer(patient.switch, n_experts=8, top_k=1)
    served = sum(int(switch(x[None])[1].chosen.any()) for x in noise(patient, 9, 12))
    return Reading(f"{served} of 9 served", served == 9, served)


@torch.no_grad()
def dropped(patient: Patient) -> Reading:
    """What a Switch adds to the residual stream for tokens that it drops: six equal ones, room for two."""
    y, _ = patient.layer(patient.switch, n_experts=3, top_k=1, capacity_factor=1.0)(noise(patient, 12).expand(6, 12))
    size = y[2:].abs().max().item()
    return Reading(f"up to {size:.2g}", size == 0 and bool(y[:2].any()), size)


@torch.no_grad()
def causality(patient: Patient) -> Reading:
    """The pairs of a position and a later token that changes its output, in a top-2 layer and in a Switch."""
    layers = [patient.layer(patient.top_2), patient.layer(patient.switch, top_k=1, capacity_factor=1.0)]
    maps = [step_06.influence(layer, noise(patient, 24, 12), trials=2) for layer in layers]
    leaks = [int(changed.triu(1).sum()) for changed in maps]
    return Reading(f"top-2 {leaks[0]}, Switch {leaks[1]}", not any(leaks), sum(leaks))


@torch.no_grad()
def ties(patient: Patient) -> Reading:
    """Which experts get a token that all of them want equally, among 8."""
    moe = patient.layer(patient.top_2, n_experts=8, top_k=2)
    nn.init.zeros_(moe.router.weight)
    chosen = moe(noise(patient, 3, 12))[1].chosen
    taken = [chosen[n].nonzero().flatten().tolist() for n in range(3)]
    return Reading(f"experts {taken[0]}", taken == [[0, 1]] * 3, float(sum(taken[0])))


@torch.no_grad()
def honesty(patient: Patient) -> Reading:
    """The loss that training reports, above the cross-entropy of the same batch."""
    batch = next(data.all_windows(corpus().validation, CONFIG.block_size, 64))
    model = patient.trained[0]
    reported = patient.experiment().training_loss(model, *batch)[1].item()
    gap = reported - F.cross_entropy(model(batch[0])[0].transpose(1, 2), batch[1]).item()
    return Reading(nats(gap), abs(gap) < 1e-5, gap)


INSTRUMENTS = (
    Instrument("training-loss", "does it end where healthy ones end?", training_loss),
    Instrument("load", "are the trained experts used alike?", load),
    Instrument("coverage", "does each expert get tokens at the start?", coverage),
    Instrument("collapse", "is 'two experts take all' scored E / 2?", collapse),
    Instrument("opposites", "is each layer judged by itself?", opposites),
    Instrument("upcycling", "do copied experts start at the dense loss?", upcycling),
    Instrument("router-gradient", "does a Switch's router learn from its experts?", router_gradient),
    Instrument("gates", "are the weights free of the bias?", gates),
    Instrument("repeat", "does the same text give the same loss?", repeat),
    Instrument("precision", "do tokens go where float64 sends them?", precision),
    Instrument("short-batch", "is a token served that comes alone?", short_batch),
    Instrument("dropped", "is nothing added for a dropped token?", dropped),
    Instrument("causality", "is the future without influence?", causality),
    Instrument("ties", "do ties go to the lowest numbers?", ties),
    Instrument("honesty", "is the reported loss the cross-entropy?", honesty),
)

# ---------------------------------------------------------------- the damage


class WithoutBalance(build.SparseOrDense):
    def training_loss(self, model: nn.Module, idx: torch.Tensor, targets: torch.Tensor) -> tuple:
        _, cross_entropy = super().training_loss(model, idx, targets)
        return cross_entropy, cross_entropy


class LayersConcatenated(build.SparseOrDense):
    def training_loss(self, model: nn.Module, idx: torch.Tensor, targets: torch.Tensor) -> tuple:
        _, cross_entropy, routings = model.forward_with_routing(idx, targets)
        balance = build.switch_balance_loss(torch.cat([r.logits for r in routings]), model.cfg.top_k)
        return cross_entropy + model.cfg.balance_weight * balance, cross_entropy


class ReportsObjective(build.SparseOrDense):
    def training_loss(self, model: nn.Module, idx: torch.Tensor, targets: torch.Tensor) -> tuple:
        objective, _ = super().training_loss(model, idx, targets)
        return objective, objective


def zero_routers(model: nn.Module, seed: int) -> None:
    gpt.init_parameters(model, seed)
    for block in model.blocks:
        nn.init.zeros_(block.mlp.router.weight)


class NotRenormalized(build.GroupedMoE):
    def decide(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _, chosen = super().decide(logits)
        return logits.softmax(-1) * chosen, chosen


class HandsOnProbabilities(build.GroupedMoE):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, build.Routing]:
        y, routing = super().forward(x)
        return y, routing._replace(logits=routing.logits.softmax(-1))


class AlwaysNoisy(build.GroupedMoE):
    def decide(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        draw = self.__dict__.setdefault("draw", generator("break_it", "noise"))  # goes on from call to call
        return super().decide(logits + torch.randn(logits.shape, generator=draw))


class CoarseRouter(build.GroupedMoE):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, build.Routing]:
        tokens = x.reshape(-1, x.shape[-1])
        logits = F.linear(tokens.bfloat16(), self.router.weight.bfloat16())
        weight, chosen = self.decide(logits)
        return build.dispatch(tokens, weight, chosen, self.experts).view_as(x), build.Routing(logits, chosen)


class UnstableTies(build.GroupedMoE):
    def decide(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        probabilities = logits.softmax(-1)
        best = probabilities.topk(self.top_k)
        weight = torch.zeros_like(logits).scatter(1, best.indices, best.values / best.values.sum(-1, keepdim=True))
        return weight, weight > 0


class RenormalizedSwitch(build.SwitchMoE):
    def decide(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weight, chosen = super().decide(logits)
        return weight / weight.sum(-1, keepdim=True).clamp(min=1e-9), chosen


class FlooredCapacity(build.SwitchMoE):
    def decide(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        N, E = logits.shape
        probabilities = logits.softmax(-1)
        wanted = build.top_k_mask(probabilities, 1)
        chosen = wanted & (wanted.cumsum(0) <= int(self.capacity_factor * N / E))
        return probabilities * chosen, chosen


class PassesDropped(build.SwitchMoE):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, build.Routing]:
        y, routing = super().forward(x)
        gate = routing.logits.softmax(-1).amax(-1) * ~routing.chosen.any(1)
        return y + gate.view(*x.shape[:-1], 1) * x, routing


class WeighsWithBias(build.BiasMoE):
    def decide(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _, chosen = super().decide(logits)
        weight = (logits.softmax(-1) + self.balance_bias) * chosen
        return weight / weight.sum(-1, keepdim=True), chosen


SABOTAGES = (
    Sabotage(
        name="no-balance-loss",
        before="return cross_entropy + model.cfg.balance_weight * balance, cross_entropy",
        after="return cross_entropy, cross_entropy",
        predicts="the load falls to that of fewer than 6 experts of 8, and the training loss doesn't show it",
        explains="An expert that is chosen learns, and is chosen more for it; one that isn't stays as it started. The "
        "rich get richer. A model of this size hardly misses its poor experts, so the loss says nothing; but you "
        "store all eight, and on a machine where each expert has a device of its own, all wait for the busiest.",
        loud=False,
        instrument="load",
        damage=partial(replace, experiment=WithoutBalance),
        also_trips=("collapse", "opposites"),
        sizes=lambda healthy, broken: broken.number < 6,
    ),
    Sabotage(
        name="zero-router",
        before="nn.init.normal_(p, std=start, generator=generator(seed, name, tuple(p.shape)))",
        after='nn.init.zeros_(p) if "router" in name else nn.init.normal_(p, std=start, ...)',
        predicts="the balance loss starts at a perfect 1.000, while twelve of sixteen experts get nothing at all",
        explains="Equal logits are equal probabilities, P = 1/E, and E · Σ f/E = Σ f = 1 whatever f is. But of equal "
        "logits the lowest numbers win, so all tokens go to the same two experts of each layer. The loss is no "
        "proof of balance: count the tokens. (Training gets out of this corner, since the loss pushes P down where "
        "f is large.)",
        loud=False,
        instrument="coverage",
        damage=partial(replace, init=zero_routers),
        sizes=lambda healthy, broken: abs(broken.number - 1) < 1e-3,
    ),
    Sabotage(
        name="upcycled-without-renormalising",
        before="return weight / weight.sum(-1, keepdim=True), chosen",
        after="return weight, chosen",
        predicts="a model whose experts are copies of a dense one's MLPs starts above the dense loss, not at it",
        explains="k equal experts with weights that sum to 1 are one expert, whatever the router thinks. With the "
        "probabilities themselves the weights sum to about k/E at the start, a quarter here, and each MLP writes a "
        "quarter of what the dense model had learned to expect of it.",
        loud=False,
        instrument="upcycling",
        damage=partial(replace, top_2=NotRenormalized),
        sizes=lambda healthy, broken: broken.number > 0.005,
    ),
    Sabotage(
        name="renormalised-top-1",
        before="return probabilities * chosen, chosen",
        after="return probabilities * chosen / (probabilities * chosen).sum(-1, keepdim=True), chosen",
        predicts="the router's gradient is rounding, a ten-thousandth of what it was or less, and its load is the same",
        explains="One probability divided by itself is 1, whatever the logits are: a constant, and a constant has no "
        "gradient. The router keeps its random start (or follows the balance loss alone), the experts adapt to it, "
        "and load and loss look fine. GroupedMoE refuses this combination for that reason.",
        loud=False,
        instrument="router-gradient",
        damage=partial(replace, switch=RenormalizedSwitch),
        sizes=lambda healthy, broken: broken.number < 1e-4 * healthy.number,
    ),
    Sabotage(
        name="layers-concatenated",
        before="balance = torch.stack([switch_balance_loss(r.logits, model.cfg.top_k) for r in routings]).mean()",
        after="balance = switch_balance_loss(torch.cat([r.logits for r in routings]), model.cfg.top_k)",
        predicts="two layers that collapsed onto opposite halves of their experts score 1, as if balanced, not 2",
        explains="Expert 3 of layer 1 and expert 3 of layer 2 share a number and nothing else. Summed over layers, "
        "what one neglects the other makes up for, and the pressure is gone where it was needed: trained under this "
        "loss the layers are used far less evenly.",
        loud=False,
        instrument="opposites",
        damage=partial(replace, experiment=LayersConcatenated),
        also_trips=("load",),
        sizes=lambda healthy, broken: abs(broken.number - 1) < 0.02,
    ),
    Sabotage(
        name="softmax-twice",
        before="Routing(logits, chosen)",
        after="Routing(logits.softmax(-1), chosen)",
        predicts="the loss that takes logits gets probabilities, and scores total collapse 1.4 instead of E / 2 = 4",
        explains="A softmax of numbers between 0 and 1 is nearly flat: no probability exceeds e times another. So P "
        "can't follow f, the loss stays near 1 whatever happens, and its gradient is a fraction of what it should "
        "be. Nothing crashes, since probabilities have the shape of logits; hence the name of the field.",
        loud=False,
        instrument="collapse",
        damage=partial(replace, top_2=HandsOnProbabilities),
        also_trips=("opposites", "load"),
        sizes=lambda healthy, broken: 1.3 < broken.number < 1.5,
    ),
    Sabotage(
        name="bias-as-weight",
        before="weight = probabilities * chosen",
        after="weight = (probabilities + self.balance_bias) * chosen",
        predicts="the biased layer's weights are more than 0.1 away from the softmax over the chosen experts",
        explains="The bias says how busy an expert is, not how good. In the choice it costs a token its first wish now "
        "and then; in the weight it bends every output, by a number that moves with the load of the last batches.",
        loud=False,
        instrument="gates",
        damage=partial(replace, bias=WeighsWithBias),
        sizes=lambda healthy, broken: broken.number > 0.1,
    ),
    Sabotage(
        name="noise-left-on",
        before="weight, chosen = self.decide(logits)",
        after="weight, chosen = self.decide(logits + torch.randn_like(logits))  # also where nobody trains",
        predicts="the same text gets another loss each time it is evaluated",
        explains="Noise on the logits is for training, where it lets experts be tried that wouldn't be chosen. Left on "
        "in evaluation it makes every measurement a draw: two checkpoints can't be compared, a test can't be "
        "repeated, and each instrument below that compares two passes turns red with it. Look how even the load is "
        "meanwhile: noise balances beautifully.",
        loud=False,
        instrument="repeat",
        damage=partial(replace, top_2=AlwaysNoisy),
        also_trips=("precision", "causality", "ties", "honesty"),
    ),
    Sabotage(
        name="bfloat16-router",
        before="logits = F.linear(tokens.float(), self.router.weight.float())",
        after="logits = F.linear(tokens.bfloat16(), self.router.weight.bfloat16())",
        predicts="between 0.1 % and 5 % of the tokens go to other experts than in float64",
        explains="bfloat16 keeps 8 bits, so logits that differ by less than one part in 256 are equal or trade places. "
        "Which expert is second best is decided by such differences all the time. It is one small product: float32 "
        "costs nothing here, and autocast must be told to keep its hands off.",
        loud=False,
        instrument="precision",
        damage=partial(replace, top_2=CoarseRouter),
        sizes=lambda healthy, broken: 0.001 < broken.number < 0.05,
    ),
    Sabotage(
        name="capacity-floored",
        before="return max(1, math.ceil(round(share, 9)))",
        after="return int(share)",
        predicts="in training mode, tokens that come one by one are all dropped: the layer does nothing for them",
        explains="1.25 · 1 / 8 rounds down to 0. A batch of hundreds of tokens never notices; a batch of one trains "
        "a model without experts. Round up, and serve at least one. (In evaluation nothing is dropped.)",
        loud=False,
        instrument="short-batch",
        damage=partial(replace, switch=FlooredCapacity),
        sizes=lambda healthy, broken: broken.number == 0,
    ),
    Sabotage(
        name="dropped-but-written",
        before="return dispatch(tokens, weight, chosen, self.experts).view_as(x), Routing(logits, chosen)",
        after="... + (probability · x where no expert was free), ...",
        predicts="a dropped token gets p · x added to its residual stream, which carries x already",
        explains="The residual stream is the way past a full expert, and it needs no help: x + 0 is x. With p · x the "
        "token arrives as (1 + p) x, or rather as x plus p times its normalised self, and the more experts overflow, "
        "the more of the stream is an echo.",
        loud=False,
        instrument="dropped",
        damage=partial(replace, switch=PassesDropped),
        sizes=lambda healthy, broken: broken.number > 0.1,
    ),
    Sabotage(
        name="score-priority",
        before="chosen = chosen & (queue_position <= capacity)",
        after="chosen = chosen & (the capacity's highest probabilities of each expert)",
        predicts="outputs of a Switch change when later tokens do: it looks into the future",
        explains="Keeping those who want an expert most sounds fair, and for images it is (Riquelme et al. 2021). "
        "In a text a later token then throws an earlier one out, so the earlier one's output tells of it. No "
        "gradient shows this leak, since a choice has none. Position, first come first served, is the causal rule.",
        loud=False,
        instrument="causality",
        damage=partial(replace, switch=step_06.DropByScore),
    ),
    Sabotage(
        name="unstable-ties",
        before="best = scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]",
        after="best = scores.topk(k).indices",
        predicts="of eight equal logits, others than experts 0 and 1 win",
        explains="torch.topk may return equal values in any order, and uses that: it depends on how many there are, on "
        "the device, on the version. Ties are rare among float32 logits, and the rule in a router that begins at "
        "zero. With a stable sort equal logits mean equal routes everywhere.",
        loud=False,
        instrument="ties",
        damage=partial(replace, top_2=UnstableTies),
    ),
    Sabotage(
        name="auxiliary-in-the-report",
        before="return cross_entropy + model.cfg.balance_weight * balance, cross_entropy",
        after="return (cross_entropy + model.cfg.balance_weight * balance,) * 2",
        predicts="the reported loss is too high by about the loss's weight, 0.03 nats",
        explains="The balance loss is about 1 where the load is even, so 0.03 is added to every reported number. The "
        "sparse model then looks worse than the dense one beside it, which reports its cross-entropy alone, and a "
        "larger weight looks like a worse model.",
        loud=False,
        instrument="honesty",
        damage=partial(replace, experiment=ReportsObjective),
        sizes=lambda healthy, broken: 0.9 < broken.number / CONFIG.balance_weight < 2,
    ),
)

# ---------------------------------------------------------------- what the quiz shows


def percent(parts: torch.Tensor) -> str:
    return " ".join(f"{100 * part:.0f}" for part in (parts / parts.sum()).tolist())


def vitals(patient: Patient) -> dict[str, str]:
    """The loss curve in numbers, the loads, and what the instruments read, without their verdicts."""
    model, history = patient.trained
    signs = {"loss at step 1": f"{history.losses[0]:.3f}"}
    for step in (20, 60, 120):
        signs[f"mean loss, steps {step - 4} to {step}"] = f"{sum(history.losses[step - 5 : step]) / 5:.3f}"
    for state, one in (("fresh", patient.model()), ("trained", model)):
        for layer, tokens in enumerate(loads(one), start=1):
            signs[f"{state}: load of layer {layer}'s experts, %"] = percent(tokens)
    shown = ("coverage", "collapse", "upcycling", "router-gradient", "gates", "repeat", "precision")
    shown += ("short-batch", "dropped", "causality", "ties", "honesty")
    readers = {instrument.name: instrument.read for instrument in INSTRUMENTS}
    return signs | {name: readers[name](patient).text for name in shown}


def sample(patient: Patient) -> str:
    """The load of every expert of the trained model as bars, layer beside layer."""
    columns = [100 * load / load.sum() for load in loads(patient.trained[0])]
    lines = [f"expert  {'layer 1':32}layer 2"]
    for e, parts in enumerate(zip(*(column.tolist() for column in columns))):
        lines.append(
            f"{e:>6}  " + "".join(f"{'#' * round(part / 2)} {part:.0f} %".ljust(32) for part in parts).rstrip()
        )
    return "\n".join(lines)


CASE = Case(healthy, INSTRUMENTS, SABOTAGES, vitals, sample, does="spreads its tokens like this")


def main(argv: list[str] | None = None) -> int:
    return sabotage.main(CASE, __doc__, argv)


if __name__ == "__main__":
    cli.run(main)
