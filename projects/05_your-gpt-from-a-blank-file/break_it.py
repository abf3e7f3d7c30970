"""Break the GPT of chapter 05, one detail at a time, and see what each was for.

    python break_it.py                          the chapter's own: attention without its causal mask
    python break_it.py --list                   all ten, with the symptom that each should have
    python break_it.py --sabotage no-residual   one of them, healthy and broken side by side
    python break_it.py --all                    every one, summed up in a table (half a minute)
    python break_it.py --quiz                   one at random: you see the signs and name the damage
    python break_it.py --edit "F.gelu" "F.relu"
                                                your own damage to build.py: which lights turn red?

A damage is an edit of build.py, and the edited build is what runs. Every damaged model starts from
the healthy one's seed and sees its batches.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
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

CONTEXT = 16  # tokens: so short that a model that may look ahead learns to within 160 steps
SETTINGS = training.TrainingSettings(steps=160)
HEALTHY_STARTS = 5  # healthy models that say how far apart healthy models end


@lru_cache(maxsize=1)
def corpus() -> data.Corpus:
    return data.load_corpus("docs", "char", CONTEXT)


def windows(tokens: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first n windows of a text, and their targets, each (n, CONTEXT)."""
    return next(data.all_windows(tokens, CONTEXT, n))


# ---------------------------------------------------------------- the patient


@dataclass(frozen=True)
class Patient:
    """A model to be, made from build.py with some edits."""

    seed: int  # of the batches
    start: int  # the seed of the initial values
    edits: tuple[Edit, ...] = ()

    @cached_property
    def gpt(self) -> ModuleType:
        """The build that its model is made from."""
        return chapters.edited_build(5, self.edits)

    def build(self, **config) -> nn.Module:
        """A freshly started model."""
        cfg = self.gpt.GPTConfig(**{"block_size": CONTEXT, **config})
        model = self.gpt.GPT(cfg, corpus().vocab_size)
        self.gpt.init_parameters(model, self.start)
        return model

    def build_with_swiglu(self, **config) -> nn.Module:
        """The same with chapter 07's MLP, which stands on this very build."""
        modern = chapters.edited_build(7, self.edits)
        cfg = modern.ModernConfig(block_size=CONTEXT, norm_type="layernorm", **config)
        model = modern.ModernGPT(cfg, corpus().vocab_size)
        modern.gpt.init_parameters(model, self.start)
        return model

    @cached_property
    def trained(self) -> tuple[nn.Module, training.History]:
        """The model after SETTINGS.steps steps, and how it got there. Trained once per patient."""
        model = self.build()
        history = training.train(model, corpus(), SETTINGS, self.seed)
        return model.eval(), history


@lru_cache(maxsize=8)
def healthy(seed: int, start: int | None = None) -> Patient:
    return Patient(seed, start or seed)


# ---------------------------------------------------------------- instruments


def first_loss(patient: Patient) -> Reading:
    """Guessing evenly costs ln V; a tied head of std σ behind a norm of unit RMS adds d·σ²/2."""
    model, history = patient.trained
    law = math.log(corpus().vocab_size) + model.cfg.d_model * 0.02**2 / 2
    loss = history.losses[0]
    return Reading(f"{loss:.2f}, law {law:.2f}", abs(loss - law) < 0.2, loss)


def training_loss(patient: Patient) -> Reading:
    """Where training ends, against healthy models that saw the same batches from other starts.

    Red if it lies more than three times the width of their range from that range's middle.
    """
    ends = [history.train_loss for history in healthy_histories(patient.seed)]
    lowest = min(ends)
    highest = max(ends)
    loss = patient.trained[1].train_loss
    green = abs(loss - (lowest + highest) / 2) <= 3 * (highest - lowest)
    return Reading(f"{loss:.2f}, healthy {lowest:.2f} to {highest:.2f}", green, loss)


def pace(patient: Patient) -> Reading:
    """Steps until the model knows more than how frequent each letter is.

    That is when the mean loss of ten steps lies a quarter of a nat below the letters' entropy.
    """
    mine = steps_to_learn(patient.trained[1])
    slowest = max(map(steps_to_learn, healthy_histories(patient.seed)))
    text = f"{mine:.0f} steps" if mine < math.inf else f"not within {SETTINGS.steps} steps"
    return Reading(text, mine <= 2 * slowest, mine)


@torch.no_grad()
def generation(patient: Patient) -> Reading:
    """The loss at the last position of a window, as in generate(): nothing stands to its right."""
    model, history = patient.trained
    idx, targets = windows(corpus().validation, 1000)
    logits, _ = model(idx)
    loss = F.cross_entropy(logits[:, -1], targets[:, -1]).item()
    text = f"{loss:.2f}, in training {history.train_loss:.2f}"
    return Reading(text, loss - history.train_loss < 0.5, loss)


@torch.no_grad()
def echo(patient: Patient) -> Reading:
    """How often the trained model's favourite is the very token that it just read."""
    model, _ = patient.trained
    idx, _ = windows(corpus().validation, 1000)
    logits, _ = model(idx)
    share = (logits.argmax(-1) == idx).double().mean().item()
    return Reading(f"{share:.0%} of the time", share < 0.5, share)


def causality(patient: Patient) -> Reading:
    """The gradient of position 5's logits: the share of it that goes to later positions."""
    model = patient.build()
    idx = corpus().validation[None, :CONTEXT]
    x = model.embed(idx).detach().requires_grad_()
    model.embed = lambda idx: x
    logits, _ = model(idx)
    logits[0, 5].square().sum().backward()
    share = (x.grad[0, 6:].norm() / x.grad.norm()).item()
    return Reading(f"{share:.1%} comes from later", share == 0.0, share)


@torch.no_grad()
def order(patient: Patient) -> Reading:
    """Swap two tokens of the past: in a one-layer model only the positions can tell."""
    model = patient.build(n_layers=1).double()
    idx = torch.arange(CONTEXT)[None]
    swapped = idx.clone()
    swapped[0, [2, 9]] = idx[0, [9, 2]]
    before = model(idx)[0][0, -1]
    after = model(swapped)[0][0, -1]
    change = ((after - before).norm() / before.norm()).item()
    return Reading(f"logits change by {change:.0e}", change > 1e-9, change)


@torch.no_grad()
def highway(patient: Patient) -> Reading:
    """With its two branches silenced, a block must hand its input on unchanged."""
    model = patient.build()
    block = model.blocks[0]
    for module in block.modules():
        if isinstance(module, patient.gpt.ResidualWriter):
            nn.init.zeros_(module.weight)
    x = torch.randn(3, 7, model.cfg.d_model, generator=generator(patient.seed, "highway"))
    share = (block(x).norm() / x.norm()).item()
    return Reading(f"{share:.0%} arrives", torch.equal(block(x), x), share)


@torch.no_grad()
def focus(patient: Patient) -> Reading:
    """How many positions the last of 64 looks at, for unit normal queries and keys.

    The number is exp(entropy of its weights): n for n equal weights.
    """
    D = 64
    attn = patient.build(block_size=D, n_layers=1, n_heads=1, d_model=D).blocks[0].attn
    noise = generator(patient.seed, "focus")
    q = torch.randn(1, 1, D, D, generator=noise)
    k = torch.randn(1, 1, D, D, generator=noise)
    attn.heads = lambda x: (q, k, torch.eye(D)[None, None])  # values that spell out the weights
    attn.proj = nn.Identity()
    ours = attn(torch.zeros(1, D, D))[0, -1]
    law = (q[0, 0, -1] @ k[0, 0].T / math.sqrt(D)).softmax(-1)
    number = torch.special.entr(ours).sum().exp().item()
    expected = torch.special.entr(law).sum().exp().item()
    return Reading(f"{number:.1f} of {D} positions", abs(number - expected) < 0.01, number)


def stream(patient: Patient) -> Reading:
    """How much larger the residual stream leaves the last block than it entered the first."""
    times = growth(patient.build())
    return Reading(f"{times:.1f} times", times < 2.5, times)


def depth(patient: Patient) -> Reading:
    """How much more 48 layers make the stream grow than 2 layers do."""
    return growth_by_depth(patient.build)


def depth_swiglu(patient: Patient) -> Reading:
    """The same with chapter 07's MLP, whose matrices have names of their own."""
    return growth_by_depth(patient.build_with_swiglu)


def tie(patient: Patient) -> Reading:
    """Reading in and reading out use one matrix, and training leaves it one."""
    model, _ = patient.trained
    embedding = model.token_embedding.weight
    head = model.lm_head.weight
    gap = (head - embedding).abs().max().item()
    size = f"{patient.gpt.count_parameters(model):,} parameters"
    text = f"one, {size}" if head is embedding else f"two, {gap:.2f} apart, {size}"
    return Reading(text, head is embedding, gap)


INSTRUMENTS = (
    Instrument("first-loss", "is it ln V + d·σ²/2?", first_loss),
    Instrument("training-loss", "does it end where healthy ones end?", training_loss),
    Instrument("pace", "does it beat the letters' frequencies soon?", pace),
    Instrument("generation", "is it as good when nothing stands to the right?", generation),
    Instrument("echo", "does it say more than what it just read?", echo),
    Instrument("causality", "is the future without influence?", causality),
    Instrument("order", "does the order of the past matter?", order),
    Instrument("highway", "does x pass a block whose branches are silent?", highway),
    Instrument("focus", "does attention look as widely as 1/√D has it?", focus),
    Instrument("stream", "does the stream keep its size in two layers?", stream),
    Instrument("depth", "does it grow no more in 48 layers than in 2?", depth),
    Instrument("depth-swiglu", "and with a SwiGLU for the MLP?", depth_swiglu),
    Instrument("tie", "are embedding and head one matrix?", tie),
)

# ---------------------------------------------------------------- what the instruments use


def healthy_histories(seed: int) -> list[training.History]:
    """Healthy models that saw the batches of `seed`, each from a start of its own."""
    return [healthy(seed, seed + i).trained[1] for i in range(HEALTHY_STARTS)]


@lru_cache(maxsize=1)
def letter_entropy() -> float:
    """What a model pays that knows only how frequent each character is, in nats."""
    frequencies = torch.bincount(corpus().train).double() / len(corpus().train)
    return torch.special.entr(frequencies).sum().item()


def steps_to_learn(history: training.History) -> float:
    """The first step whose last ten losses have a mean below letter_entropy() − 0.25, or inf."""
    for step in range(10, len(history.losses) + 1):
        if sum(history.losses[step - 10 : step]) / 10 < letter_entropy() - 0.25:
            return step
    return math.inf


@torch.no_grad()
def stream_rms(model: nn.Module) -> list[float]:
    """RMS of the residual stream where it starts and after each block."""
    idx, _ = windows(corpus().train, 16)
    x = model.embed(idx)
    rms = [x.square().mean().sqrt().item()]
    for block in model.blocks:
        x = block(x)
        rms.append(x.square().mean().sqrt().item())
    return rms


def growth(model: nn.Module) -> float:
    """The fresh model's stream behind its last block over that before its first, in RMS."""
    rms = stream_rms(model)
    return rms[-1] / rms[0]


def growth_by_depth(build: Callable[..., nn.Module]) -> Reading:
    times = growth(build(d_model=128, n_layers=48)) / growth(build(d_model=128, n_layers=2))
    return Reading(f"{times:.2f} times as much", 0.8 < times < 1.25, times)


# ---------------------------------------------------------------- the damage


def edit(old: str, new: str) -> tuple[Edit, ...]:
    """One edit of this chapter's build.py."""
    return (Edit(5, old, new),)


SABOTAGES = (
    Sabotage(
        name="no-causal-mask",
        edits=edit(
            "y = F.scaled_dot_product_attention(q, k, v, is_causal=True)",
            "y = F.scaled_dot_product_attention(q, k, v)",
        ),
        predicts=(
            "the training loss falls below half of the healthy one's, while generation gets worse "
            "by 0.25 nats"
        ),
        explains=(
            "In training every target stands in the input, one place to the right, and attention "
            "without a mask learns to copy it from there. The loss gets very good. When the model "
            "generates, nothing stands to the right, and it has learned nothing else. Only an "
            "instrument that hides the future can tell."
        ),
        loud=False,
        instrument="generation",
        also_trips=("training-loss", "causality"),
        sizes=lambda healthy, broken: broken.number > healthy.number + 0.25,
    ),
    Sabotage(
        name="no-residual",
        edits=edit(
            "x = x + self.attn(self.norm1(x))\nx = x + self.mlp(self.norm2(x))",
            "x = self.attn(self.norm1(x))\nx = self.mlp(self.norm2(x))",
        ),
        predicts=(
            "nothing of x passes a silent block, and two layers learn little beyond the letters' "
            "frequencies"
        ),
        explains=(
            "Without the sum a position keeps of its own token only what attention leaves of it, "
            "at first an even share among all the tokens before it. Each block must rebuild "
            "whatever the next one needs. With the sum x is already there, and a block only adds "
            "to it. In 48 layers the stream shrinks as well."
        ),
        loud=True,
        instrument="highway",
        also_trips=("training-loss", "pace", "depth", "depth-swiglu"),
        sizes=lambda healthy, broken: broken.number == 0.0,
    ),
    Sabotage(
        name="no-root-d",
        edits=edit(
            "y = F.scaled_dot_product_attention(q, k, v, is_causal=True)",
            "y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)",
        ),
        predicts=(
            "unit normal queries and keys of 64 channels look at fewer than 4 positions instead "
            "of dozens"
        ),
        explains=(
            "q·k of D unit normal channels has variance D; divided by √D it has variance 1, "
            "whatever D is. Without that, softmax sees scores of std 8 and gives almost all "
            "weight to the largest, where its gradient is nearly zero. The tiny model starts with "
            "small queries and keys and has 16 channels a head, so its loss doesn't show it. A "
            "larger model would suffer."
        ),
        loud=False,
        instrument="focus",
        sizes=lambda healthy, broken: broken.number < 4 and healthy.number > 24,
    ),
    Sabotage(
        name="no-positions",
        edits=edit("x = x + self.position_embedding.weight[: idx.shape[1]]", "pass"),
        predicts=(
            "with one layer the past is a bag: swapping two of its tokens changes nothing but "
            "rounding"
        ),
        explains=(
            "A weighted sum doesn't know the order of its terms. Two layers can still guess at "
            "it, for the causal mask lets position 3 see three tokens and position 9 nine (Haviv "
            "et al. 2022), and so the training loss of a small model hardly moves."
        ),
        loud=False,
        instrument="order",
        sizes=lambda healthy, broken: broken.number < 1e-12,
    ),
    Sabotage(
        name="unit-embeddings",
        edits=edit(
            "start = std",
            "# torch's default for embeddings\n"
            "start = 1.0 if isinstance(module, nn.Embedding) else std",
        ),
        predicts="the first loss is about ten times ln V, and training has to win that back first",
        explains=(
            "The head is the embedding. Behind the final norm stands token plus position, at unit "
            "RMS; its product with the token's own row is about d/√2, with any other row about "
            "±√d. So the untrained model is certain that the next token repeats the current one, "
            "and pays d/√2 nats whenever it doesn't. With std 0.02 the same rows give logits "
            "fifty times smaller."
        ),
        loud=True,
        instrument="first-loss",
        also_trips=("training-loss", "pace"),
        sizes=lambda healthy, broken: 8 < broken.number / math.log(corpus().vocab_size) < 12,
    ),
    Sabotage(
        name="no-depth-scaling",
        edits=edit("start /= math.sqrt(2 * model.cfg.n_layers)", "pass"),
        predicts="48 layers make the residual stream grow more than 3 times as much as 2 layers do",
        explains=(
            "Every layer adds two terms to the stream. 2L independent terms of equal size add up "
            "to √(2L) times one of them; divided by √(2L) each, their sum is the same at any "
            "depth. At two layers, the depth that was tried, nothing is wrong."
        ),
        loud=False,
        instrument="depth",
        also_trips=("depth-swiglu",),
        sizes=lambda healthy, broken: broken.number > 3,
    ),
    Sabotage(
        name="scaled-by-name",
        edits=edit("if isinstance(module, ResidualWriter):", 'if name.endswith(".proj.weight"):'),
        predicts=(
            "nothing, until the MLP becomes a SwiGLU: then 48 layers grow at least 1.4 times as "
            "much as 2"
        ),
        explains=(
            "GPT-2's code scales what is called c_proj; here it would be proj. The rule holds as "
            "long as everyone uses the name. SwiGLU's last matrix is called down_proj, the rule "
            "doesn't see it, and half of the 2L terms are not scaled. The class ResidualWriter "
            "says what the matrix does, whatever it is called."
        ),
        loud=False,
        instrument="depth-swiglu",
        sizes=lambda healthy, broken: broken.number > 1.4,
    ),
    Sabotage(
        name="copied-head",
        edits=(
            edit(
                "self.lm_head.weight = self.token_embedding.weight",
                "self.lm_head.weight = nn.Parameter(self.token_embedding.weight.detach().clone())",
            )
            + edit(
                "generator(seed, name, tuple(p.shape))",
                'generator(seed, name.replace("lm_head", "token_embedding"), tuple(p.shape))',
            )
        ),
        predicts="the same first loss, then two matrices that drift apart, and V·d parameters more",
        explains=(
            "A copy that starts with the same numbers is equal until the first step. The loss "
            "can't tell: a model with two matrices is a fine model, only another and a larger "
            "one. Ask for identity (`is`), not for equality."
        ),
        loud=False,
        instrument="tie",
        sizes=lambda healthy, broken: broken.number > 0.01,
    ),
    Sabotage(
        name="unshifted-targets",
        edits=edit("targets.flatten()", "idx.flatten()"),
        predicts=(
            "too good from the start: the first loss is below ln V, and after training the model "
            "repeats itself"
        ),
        explains=(
            "The target is the very token that the position reads. A tied head names it before "
            "any training, so the first loss is below that of guessing evenly, which no honest "
            "model reaches. A loss that is too good is a symptom too."
        ),
        loud=False,
        instrument="echo",
        also_trips=("first-loss", "training-loss", "generation"),
        sizes=lambda healthy, broken: broken.number > 0.99,
    ),
    Sabotage(
        name="sigma-half",
        edits=edit("std: float | str = 0.02", "std: float | str = 0.5"),
        predicts=(
            "two layers make the stream more than 10 times as large, the first loss doubles, "
            "learning is slow"
        ),
        explains=(
            "A matrix of std σ multiplies a vector's size by about σ√d: by 0.16 at σ = 0.02 and d "
            "= 64, but by 4 at σ = 0.5. So each branch writes far more than the stream held. "
            "Depth scaling still keeps the growth the same at any depth, but it can't mend the "
            "size of one layer. The line `pace` says how many steps the repair takes, and "
            "`training-loss` that it isn't finished when the run ends."
        ),
        loud=True,
        instrument="stream",
        also_trips=("first-loss", "training-loss", "pace"),
        sizes=lambda healthy, broken: broken.number > 10,
    ),
)

# ---------------------------------------------------------------- what the quiz shows


def vitals(patient: Patient) -> dict[str, str]:
    """The loss curve in numbers, and statistics by layer."""
    model, history = patient.trained
    signs = {"loss at step 1": f"{history.losses[0]:.3f}"}
    for step in (10, 20, 40, 80, 160):
        mean = sum(history.losses[step - 5 : step]) / 5
        signs[f"mean loss, steps {step - 4} to {step}"] = f"{mean:.3f}"
    signs["parameters"] = f"{patient.gpt.count_parameters(model):,}"
    fresh = patient.build()
    _, loss = fresh(*windows(corpus().train, 32))
    loss.backward()
    for layer, block in enumerate(fresh.blocks, start=1):
        norm = sum(p.grad.square().sum() for p in block.parameters()).sqrt()
        signs[f"fresh: gradient in block {layer}"] = f"{norm:.3f}"
    deep = patient.build(d_model=128, n_layers=48)
    for state, one in (("fresh", fresh), ("trained", model), ("fresh, 48 layers", deep)):
        for layer, rms in enumerate(stream_rms(one)):
            if layer in (0, 1, 2, 12, 48):
                where = f"after block {layer}" if layer else "at its start"
                signs[f"{state}: stream {where}"] = f"{rms:.3f}"
    return signs


def sample(patient: Patient) -> str:
    """What the trained model makes of the validation part's first characters."""
    model, _ = patient.trained
    prompt = corpus().validation[None, :CONTEXT]
    noise = generator(patient.seed, "sample")
    idx = patient.gpt.generate(model, prompt, 200, temperature=0.8, generator=noise)
    return corpus().tokenizer.decode(idx[0, CONTEXT:].tolist())


CASE = Case(healthy, INSTRUMENTS, SABOTAGES, vitals, sample, chapter=5)


def main(argv: list[str] | None = None) -> int:
    return sabotage.main(CASE, __doc__, argv)


if __name__ == "__main__":
    cli.run(main)
