"""Break the details of chapter 18, one at a time, and see what each was for.

    python break_it.py                            the first: no balance loss, every expert's load
    python break_it.py --list                     all fourteen, each with its predicted symptom
    python break_it.py --sabotage unstable-ties   one of them, healthy and broken side by side
    python break_it.py --all                      every one, in a table (about half a minute)
    python break_it.py --quiz                     one at random: you name the damage
    python break_it.py --edit "OLD" "NEW"         an edit of your own

A sabotage exchanges a few lines of a build.py, and the build is loaded with the new lines. The
damaged model starts from the healthy one's numbers and sees the same batches. None of this damage
is loud. A router that does its work badly costs a small model next to nothing, and the training
loss moves no more than by chance.
"""

import math
import sys
from dataclasses import dataclass, replace
from functools import lru_cache
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

SHAPE = {"block_size": 16, "d_model": 32, "n_heads": 2, "d_hidden": 24, "balance_weight": 0.03}
WEIGHT = SHAPE["balance_weight"]
SETTINGS = training.TrainingSettings(steps=120)
HEALTHY_STARTS = 5  # healthy models that say how far apart healthy models end

# ---------------------------------------------------------------- the patient


@lru_cache(maxsize=1)
def corpus() -> data.Corpus:
    whole = data.load_corpus("docs", "char", SHAPE["block_size"])
    return replace(whole, validation=whole.validation[:10_000])


@lru_cache(maxsize=64)
def edited(edits: tuple[Edit, ...]) -> ModuleType:
    """Chapter 18's build with these edits. The same module for the same edits."""
    return chapters.edited_build(18, edits)


@dataclass(frozen=True)
class Patient:
    """What an edited build makes: single layers, and a model of top-2 layers that it trains."""

    seed: int  # of the batches
    start: int  # the seed of the initial values
    edits: tuple[Edit, ...] = ()

    @property
    def build(self) -> ModuleType:
        return edited(self.edits)

    def layer(self, router_type: str, **changes) -> nn.Module:
        """A layer by itself, 12 channels wide, with weights large enough to tell experts apart."""
        shape = {"d_model": 12, "n_heads": 1, "d_hidden": 7, "n_experts": 5} | changes
        layer = self.build.ROUTERS[router_type](self.build.SparseConfig(**shape))
        for name, p in layer.named_parameters():
            nn.init.normal_(p, std=0.4, generator=generator(self.start, name, tuple(p.shape)))
        return layer

    def model(self) -> nn.Module:
        """A model at its start."""
        model = self.build.SparseGPT(self.build.SparseConfig(**SHAPE), corpus().vocab_size)
        self.build.gpt.init_parameters(model, self.start)
        return model

    @property
    def trained(self) -> tuple[nn.Module, training.History]:
        """The model after SETTINGS.steps steps, and how it got there."""
        return train(self)

    def objective(self, model: nn.Module, idx: torch.Tensor, targets: torch.Tensor) -> tuple:
        """What the build minimises, the loss that it reports, and what the routers did."""
        return self.build.SparseOrDense().training_loss(model, idx, targets)


@lru_cache(maxsize=64)
@torch.enable_grad()
def train(patient: Patient) -> tuple[nn.Module, training.History]:
    model = patient.model()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(patient.seed)  # for damage that draws from torch's own generator
        history = training.train(
            model, corpus(), SETTINGS, patient.seed, training_loss=patient.objective
        )
    return model.eval(), history


@lru_cache(maxsize=2)
@torch.enable_grad()
def dense(seed: int) -> nn.Module:
    """A healthy dense model after half as many steps, to be upcycled."""
    build = edited(())
    cfg = build.SparseConfig(**SHAPE, mlp_type="swiglu")
    model = build.modern.ModernGPT(cfg, corpus().vocab_size)
    build.gpt.init_parameters(model, seed)
    training.train(model, corpus(), replace(SETTINGS, steps=SETTINGS.steps // 2), seed)
    return model.eval()


def healthy(seed: int) -> Patient:
    return Patient(seed, start=seed)


def text(n_windows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows that nobody trained on: token ids and targets, each (n_windows, T)."""
    return next(data.all_windows(corpus().validation, SHAPE["block_size"], n_windows))


def noise(patient: Patient, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator(patient.seed, "noise", shape))


def nats(gap: float) -> str:
    return f"{round(gap, 4) + 0:+.4f} nats"  # the 0 turns -0.0 into 0.0


# ---------------------------------------------------------------- instruments


def training_loss(patient: Patient) -> Reading:
    """Where training ends, against healthy models that saw the same batches from other starts.

    Red if it lies more than three times the width of their range from that range's middle.
    """
    starts = range(patient.seed, patient.seed + HEALTHY_STARTS)
    ends = [Patient(patient.seed, start).trained[1].train_loss for start in starts]
    middle = (max(ends) + min(ends)) / 2
    width = max(ends) - min(ends)
    loss = patient.trained[1].train_loss
    shown = f"{loss:.2f}, healthy {min(ends):.2f} to {max(ends):.2f}"
    return Reading(shown, abs(loss - middle) <= 3 * width, loss)


@torch.no_grad()
def loads(model: nn.Module) -> list[torch.Tensor]:
    """The tokens of every expert, layer by layer."""
    routings = model.forward_with_routing(text(1000)[0])[2]
    return [routing.chosen.sum(0).cpu().double() for routing in routings]


def load(patient: Patient) -> Reading:
    """How many equally used experts would be as even as those of the trained model.

    That is exp(entropy of the load).
    """
    parts = [load / load.sum() for load in loads(patient.trained[0])]
    used = sum(torch.special.entr(part).sum().exp().item() for part in parts) / len(parts)
    busiest = max(part.max().item() * len(part) for part in parts)
    return Reading(f"{used:.1f} of 8, busiest {busiest:.1f} times the mean", used > 6.4, used)


@torch.no_grad()
def coverage(patient: Patient) -> Reading:
    """The experts of the fresh model that get no token, and what the balance loss says of it."""
    model = patient.model()
    idle = sum(int((load == 0).sum()) for load in loads(model))
    score = balance_of(patient, model, *text(1000))
    return Reading(f"{idle} of 16 idle, balance loss {score:.3f}", idle == 0, score)


def balance_of(patient: Patient, model: nn.Module, *batch: torch.Tensor) -> float:
    """What training adds to the cross-entropy, divided by its weight; 0 where it adds nothing."""
    logits = model.forward_with_routing(*batch)[0]
    cross_entropy = F.cross_entropy(logits.transpose(1, 2), batch[1])
    return ((patient.objective(model, *batch)[0] - cross_entropy) / WEIGHT).item()


def collapse(patient: Patient) -> Reading:
    """What the balance loss says of a model in which two experts take all tokens: E / 2 = 4."""
    return score_of_collapse(patient, [(0, 1), (0, 1)], expected=4.0)


def opposites(patient: Patient) -> Reading:
    """The same where each layer's four experts are the other layer's idle ones: 2 for each."""
    return score_of_collapse(patient, [(0, 1, 2, 3), (4, 5, 6, 7)], expected=2.0)


@torch.no_grad()
def score_of_collapse(
    patient: Patient, layers: list[tuple[int, ...]], expected: float
) -> Reading:
    """The balance loss where each layer sends its tokens evenly to the named experts alone."""
    model = patient.model()
    idx = torch.arange(32).view(2, 16)
    for block, taken in zip(model.blocks, layers):
        block.norm2 = Directions(taken)
        nn.init.zeros_(block.mlp.router.weight)
        n_experts = len(block.mlp.experts)
        block.mlp.router.weight[:, :n_experts] = 30 * torch.eye(n_experts)
    score = balance_of(patient, model, idx, idx)
    return Reading(f"{score:.2f}, by hand {expected:.2f}", abs(score - expected) < 0.02, score)


class Directions(nn.Module):
    """Tokens that point to the named experts, two at a time, in turn."""

    def __init__(self, taken: tuple[int, ...]):
        super().__init__()
        self.taken = taken

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x).flatten(0, 1)
        for n in range(len(y)):
            y[n, self.taken[n % len(self.taken)]] = 1.0
            y[n, self.taken[(n + 1) % len(self.taken)]] = 1.0
        return y.view_as(x)


@torch.no_grad()
def upcycling(patient: Patient) -> Reading:
    """The loss where all experts are copies of a trained dense model's MLP, above its own loss."""
    before = dense(patient.seed)
    model = patient.model()
    model.load_state_dict(before.state_dict(), strict=False)  # everything but the MLPs
    for block, there in zip(model.blocks, before.blocks):
        for expert in block.mlp.experts:
            expert.load_state_dict(there.mlp.state_dict())
    gap = (model(*text(64))[1] - before(*text(64))[1]).item()
    return Reading(nats(gap), abs(gap) < 1e-3, gap)


def router_gradient(patient: Patient) -> Reading:
    """The gradient of a Switch's router, from what the experts wrote; and the load beside it."""
    switch = patient.layer("switch", top_k=1, capacity_factor=5.0)
    y, routing = switch(noise(patient, 64, 12))
    (y * noise(patient, 12, 64).T).sum().backward()
    norm = switch.router.weight.grad.norm().item()
    shown = " ".join(map(str, routing.chosen.sum(0).tolist()))
    return Reading(f"norm {norm:.2g}, load {shown}", norm > 1e-2, norm)


@torch.no_grad()
def gates(patient: Patient) -> Reading:
    """How far a biased layer's weights are from the softmax over the chosen experts' logits."""
    moe = patient.layer("bias", top_k=2)
    moe.balance_bias.copy_(torch.tensor([0.3, -0.2, 0.1, 0.0, -0.1]))
    logits = noise(patient, 40, 5)
    weight, chosen = moe.decide(logits)
    expected = logits.masked_fill(~chosen, -math.inf).softmax(-1)
    gap = (weight - expected).abs().max().item()
    return Reading(f"{gap:.0e} off", gap < 1e-5, gap)


@torch.no_grad()
def repeat(patient: Patient) -> Reading:
    """The trained model's loss on the same text, twice."""
    once, again = (patient.trained[0](*text(64))[1].item() for _ in range(2))
    return Reading(f"{once:.4f}, {again:.4f}", once == again, abs(once - again))


@torch.no_grad()
def precision(patient: Patient) -> Reading:
    """The part of 4,096 tokens that go to other experts than a router in float64 sends them to."""
    moe = patient.layer("top_k", n_experts=16, top_k=2)
    x = noise(patient, 4096, 12)
    exact = edited(()).top_k_mask(x.double() @ moe.router.weight.double().T, 2)
    moved = (moe(x)[1].chosen != exact).any(1).double().mean().item()
    return Reading(f"{moved:.2%} of tokens elsewhere", moved < 5e-4, moved)


@torch.no_grad()
def short_batch(patient: Patient) -> Reading:
    """How many tokens a Switch of 8 experts serves in training when they come one by one."""
    switch = patient.layer("switch", n_experts=8, top_k=1)
    served = sum(int(switch(x[None])[1].chosen.any()) for x in noise(patient, 9, 12))
    return Reading(f"{served} of 9 served", served == 9, served)


@torch.no_grad()
def dropped(patient: Patient) -> Reading:
    """What a Switch in training writes for tokens that it drops: six equal ones, room for two."""
    switch = patient.layer("switch", n_experts=3, top_k=1, capacity_factor=1.0)
    y = switch(noise(patient, 12).expand(6, 12))[0]
    size = y[2:].abs().max().item()
    return Reading(f"up to {size:.2g}", size == 0 and bool(y[:2].any()), size)


@torch.no_grad()
def causality(patient: Patient) -> Reading:
    """How many of the first 23 positions change their output when later tokens are exchanged.

    In training, where a Switch drops tokens.
    """
    x = noise(patient, 40, 12)
    layers = {
        "top-2": patient.layer("top_k"),
        "Switch": patient.layer("switch", top_k=1, capacity_factor=1.0),
    }
    leaks = {}
    for name, layer in layers.items():
        changed = torch.zeros(23, dtype=torch.bool)
        for trial in range(5):
            later = torch.randn(17, 12, generator=generator(patient.seed, "later", trial))
            other = torch.cat((x[:23], later))
            difference = (layer(other)[0] - layer(x)[0])[:23].abs()
            changed |= (difference > 1e-4).any(1)  # other shapes may round otherwise
        leaks[name] = int(changed.sum())
    shown = ", ".join(f"{name} {leak}" for name, leak in leaks.items())
    return Reading(shown, not any(leaks.values()), sum(leaks.values()))


@torch.no_grad()
def ties(patient: Patient) -> Reading:
    """Which experts get a token that all of them want equally, among 8."""
    moe = patient.layer("top_k", n_experts=8, top_k=2)
    nn.init.zeros_(moe.router.weight)
    chosen = moe(noise(patient, 3, 12))[1].chosen
    taken = [chosen[n].nonzero().flatten().tolist() for n in range(3)]
    return Reading(f"experts {taken[0]}", taken == [[0, 1]] * 3, float(sum(taken[0])))


@torch.no_grad()
def honesty(patient: Patient) -> Reading:
    """The loss that training reports, above the cross-entropy of the same batch."""
    model = patient.trained[0]
    idx, targets = text(64)
    reported = patient.objective(model, idx, targets)[1]
    gap = (reported - F.cross_entropy(model(idx)[0].transpose(1, 2), targets)).item()
    return Reading(nats(gap), abs(gap) < 1e-5, gap)


INSTRUMENTS = (
    Instrument("training-loss", "does it end where healthy ones end?", training_loss),
    Instrument("load", "are the trained experts used alike?", load),
    Instrument("coverage", "does each expert get tokens at the start?", coverage),
    Instrument("collapse", "is 'two experts take all' scored E / 2?", collapse),
    Instrument("opposites", "is each layer judged by itself?", opposites),
    Instrument("upcycling", "do copied experts start at the dense loss?", upcycling),
    Instrument("router-gradient", "does a Switch router learn from its experts?", router_gradient),
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


def silent(name: str, old: str, new: str, chapter: int = 18, **about) -> Sabotage:
    """An edit of one chapter's build that nobody sees in the training loss."""
    return Sabotage(name=name, edits=(Edit(chapter, old, new),), loud=False, **about)


BIAS_CHOOSES = "chosen = top_k_mask(probabilities + self.balance_bias, self.top_k)"

SABOTAGES = (
    silent(
        "no-balance-loss",
        old="return cross_entropy + model.cfg.balance_weight * balance, cross_entropy",
        new="return cross_entropy, cross_entropy",
        predicts="the load falls to that of fewer than 6 experts of 8, and the training loss "
        "doesn't show it",
        explains="An expert that is chosen learns, and is chosen more for it. One that isn't "
        "chosen stays as it started: the rich get richer. A model of this size hardly misses its "
        "poor experts, so the loss says nothing. But you store all eight, and on a machine where "
        "each expert has a device of its own, all wait for the busiest.",
        instrument="load",
        also_trips=("collapse", "opposites"),
        sizes=lambda healthy, broken: broken.number < 6,
    ),
    silent(
        "zero-router",
        chapter=5,
        old="nn.init.normal_(p, std=start, ",
        new='nn.init.normal_(p, std=0.0 if "router" in name else start, ',
        predicts="the balance loss starts at a perfect 1.000, while twelve of sixteen experts get "
        "nothing at all",
        explains="Equal logits are equal probabilities: P = 1/E for every expert, and then "
        "E · Σ f · P = Σ f = 1, whatever the loads f are. But of equal logits the lowest numbers "
        "win, so all tokens go to the same two experts of each layer. The loss is no proof of "
        "balance: count the tokens. (Training gets out of this corner, since the loss pushes P "
        "down where f is large.)",
        instrument="coverage",
        sizes=lambda healthy, broken: abs(broken.number - 1) < 1e-3,
    ),
    silent(
        "upcycled-without-renormalising",
        old="chosen = top_k_mask(probabilities, self.top_k)\n"
        "weight = probabilities * chosen\n"
        "return weight / weight.sum(-1, keepdim=True), chosen",
        new="chosen = top_k_mask(probabilities, self.top_k)\n"
        "weight = probabilities * chosen\n"
        "return weight, chosen",
        predicts="a model whose experts are copies of a dense one's MLPs starts above the dense "
        "loss, not at it",
        explains="k equal experts with weights that sum to 1 are one expert, whatever the router "
        "thinks. With the probabilities themselves the weights sum to about k/E at the start, a "
        "quarter here, and each MLP writes a quarter of what the dense model had learned to "
        "expect of it.",
        instrument="upcycling",
        sizes=lambda healthy, broken: broken.number > 0.005,
    ),
    silent(
        "renormalised-top-1",
        old="if self.training:",
        new="probabilities = probabilities / (probabilities * chosen).sum(-1, keepdim=True)\n"
        "if self.training:",
        predicts="the router's gradient is rounding, a ten-thousandth of what it was or less, and "
        "its load is the same",
        explains="One probability divided by itself is 1, whatever the logits are. That is a "
        "constant, and a constant has no gradient. The router keeps its random start (or follows "
        "the balance loss alone), the experts adapt to it, and load and loss look fine. "
        "GroupedMoE refuses this combination for that reason.",
        instrument="router-gradient",
        sizes=lambda healthy, broken: broken.number < 1e-4 * healthy.number,
    ),
    silent(
        "layers-concatenated",
        old="balance = torch.stack(losses).mean()",
        new="logits = torch.cat([routing.logits for routing in routings])\n"
        "balance = switch_balance_loss(logits, model.cfg.top_k)",
        predicts="two layers that collapsed onto opposite halves of their experts score 1, as if "
        "balanced, not 2",
        explains="Expert 3 of layer 1 and expert 3 of layer 2 share a number and nothing else. "
        "Summed over layers, what one neglects the other makes up for, and the pressure is gone "
        "where it was needed: trained under this loss the layers are used far less evenly.",
        instrument="opposites",
        also_trips=("load",),
        sizes=lambda healthy, broken: abs(broken.number - 1) < 0.02,
    ),
    silent(
        "softmax-twice",
        old="Routing(logits, chosen)",
        new="Routing(logits.softmax(-1), chosen)",
        predicts="the loss that takes logits gets probabilities, and scores total collapse 1.4 "
        "instead of E / 2 = 4",
        explains="A softmax of numbers between 0 and 1 is nearly flat: no probability exceeds e "
        "times another. So P can't follow f, the loss stays near 1 whatever happens, and its "
        "gradient is a fraction of what it should be. Nothing crashes, since probabilities have "
        "the shape of logits; hence the name of the field.",
        instrument="collapse",
        also_trips=("opposites", "load"),
        sizes=lambda healthy, broken: 1.3 < broken.number < 1.5,
    ),
    silent(
        "bias-as-weight",
        old=BIAS_CHOOSES,
        new="probabilities = probabilities + self.balance_bias\n"
        "chosen = top_k_mask(probabilities, self.top_k)",
        predicts="the biased layer's weights are more than 0.1 away from the softmax over the "
        "chosen experts",
        explains="The bias says how busy an expert is, not how good. In the choice it costs a "
        "token its first wish now and then. In the weight it bends every output, by a number that "
        "moves with the load of the last batches.",
        instrument="gates",
        sizes=lambda healthy, broken: broken.number > 0.1,
    ),
    silent(
        "noise-left-on",
        old="weight, chosen = self.decide(logits)",
        new="weight, chosen = self.decide(logits + torch.randn_like(logits))",
        predicts="the same text gets another loss each time it is evaluated",
        explains="Noise on the logits is for training, where it lets experts be tried that "
        "wouldn't be chosen. Left on in evaluation it makes every measurement a draw: two "
        "checkpoints can't be compared, a test can't be repeated, and each instrument that "
        "compares two passes turns red with it. Look how even the load is meanwhile: noise "
        "balances beautifully.",
        instrument="repeat",
        also_trips=("precision", "causality", "ties", "honesty", "dropped"),
    ),
    silent(
        "bfloat16-router",
        old="F.linear(tokens.float(), self.router.weight.float())",
        new="F.linear(tokens.bfloat16(), self.router.weight.bfloat16())",
        predicts="between 0.1 % and 5 % of the tokens go to other experts than in float64",
        explains="bfloat16 keeps 8 bits, so logits that differ by less than one part in 256 are "
        "equal or trade places. Which expert is second best is decided by such differences all "
        "the time. It is one small product: float32 costs nothing here, and autocast must be told "
        "to keep its hands off.",
        instrument="precision",
        sizes=lambda healthy, broken: 0.001 < broken.number < 0.05,
    ),
    silent(
        "capacity-floored",
        old="return max(1, math.ceil(round(share, 9)))",
        new="return int(share)",
        predicts="tokens that are trained on one by one are all dropped, and no expert learns "
        "from them",
        explains="1.25 · 1 / 8 rounds down to 0. A batch of hundreds of tokens never notices. "
        "With many experts and few tokens, as where a batch is cut up among many devices, every "
        "expert's share falls below 1, and the layer is silent. Round up, and serve at least one.",
        instrument="short-batch",
        sizes=lambda healthy, broken: broken.number == 0,
    ),
    silent(
        "dropped-but-written",
        old="y = dispatch(tokens, weight, chosen, self.experts)",
        new="p = logits.softmax(-1).amax(-1, keepdim=True) * ~chosen.any(-1, keepdim=True)\n"
        "y = dispatch(tokens, weight, chosen, self.experts) + p * tokens",
        predicts="a dropped token gets p · x added to its residual stream, which carries x already",
        explains="The residual stream is the way past a full expert, and it needs no help: x + 0 "
        "is x. With p · x the token arrives as (1 + p) x, or rather as x plus p times its "
        "normalised self, and the more experts overflow, the more of the stream is an echo.",
        instrument="dropped",
        sizes=lambda healthy, broken: broken.number > 0.1,
    ),
    silent(
        "score-priority",
        old="queue_position = chosen.cumsum(0)",
        new="best_first = (probabilities * chosen).argsort(dim=0, descending=True, stable=True)\n"
        "queue_position = 1 + best_first.argsort(dim=0)",
        predicts="outputs of a Switch change when later tokens do: it looks into the future",
        explains="Keeping those who want an expert most sounds fair, and for images it is "
        "(Riquelme et al. 2021). In a text a later token then throws an earlier one out, so the "
        "earlier one's output tells of it. No gradient shows this leak, since a choice has none. "
        "Position, first come first served, is the causal rule.",
        instrument="causality",
    ),
    silent(
        "unstable-ties",
        old="scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]",
        new="scores.topk(k).indices",
        predicts="of eight equal logits, others than experts 0 and 1 win",
        explains="torch.topk may return equal values in any order, and uses that: it depends on "
        "how many there are, on the device, on the version. Ties are rare among float32 logits, "
        "and the rule in a router that begins at zero. With a stable sort equal logits mean equal "
        "routes everywhere.",
        instrument="ties",
    ),
    silent(
        "auxiliary-in-the-report",
        old="return cross_entropy + model.cfg.balance_weight * balance, cross_entropy",
        new="cross_entropy = cross_entropy + model.cfg.balance_weight * balance\n"
        "return cross_entropy, cross_entropy",
        predicts="the reported loss is too high by about the loss's weight, 0.03 nats",
        explains="The balance loss is about 1 where the load is even, so 0.03 is added to every "
        "reported number. The sparse model then looks worse than the dense one beside it, which "
        "reports its cross-entropy alone, and a larger weight looks like a worse model.",
        instrument="honesty",
        sizes=lambda healthy, broken: 0.9 < broken.number / WEIGHT < 2,
    ),
)

# ---------------------------------------------------------------- what the quiz shows


def percent(tokens: torch.Tensor) -> str:
    return " ".join(f"{100 * part:.0f}" for part in (tokens / tokens.sum()).tolist())


def vitals(patient: Patient) -> dict[str, str]:
    """The loss curve in numbers, the loads, and instruments without their verdicts."""
    model, history = patient.trained
    signs = {"loss at step 1": f"{history.losses[0]:.3f}"}
    for step in (20, 60, 120):
        mean = sum(history.losses[step - 5 : step]) / 5
        signs[f"mean loss, steps {step - 4} to {step}"] = f"{mean:.3f}"
    for state, one in (("fresh", patient.model()), ("trained", model)):
        for layer, tokens in enumerate(loads(one), start=1):
            signs[f"{state}: load of layer {layer}'s experts, %"] = percent(tokens)
    shown_already = ("training-loss", "load", "opposites")
    for instrument in INSTRUMENTS:
        if instrument.name not in shown_already:
            signs[instrument.name] = instrument.read(patient).text
    return signs


def sample(patient: Patient) -> str:
    """The load of every expert of the trained model as bars, layer beside layer."""
    columns = [(100 * load / load.sum()).tolist() for load in loads(patient.trained[0])]
    lines = [f"expert  {'layer 1':32}layer 2"]
    for expert, parts in enumerate(zip(*columns)):
        bars = [f"{'#' * round(part / 2)} {part:.0f} %".ljust(32) for part in parts]
        lines.append(f"{expert:>6}  {''.join(bars).rstrip()}")
    return "\n".join(lines)


CASE = Case(
    healthy=healthy,
    instruments=INSTRUMENTS,
    sabotages=SABOTAGES,
    vitals=vitals,
    sample=sample,
    does="spreads its tokens like this",
    chapter=18,
)


def main(argv: list[str] | None = None) -> int:
    return sabotage.main(CASE, __doc__, argv)


if __name__ == "__main__":
    cli.run(main)
