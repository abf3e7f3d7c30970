"""Break the GPT of chapter 05, one detail at a time, and see what each was for.

    python break_it.py                          the chapter's own: attention without its causal mask
    python break_it.py --list                   all ten, with the symptom that each is predicted to have
    python break_it.py --sabotage no-residual   one of them, healthy and broken side by side
    python break_it.py --all                    every one, summed up in a table (about half a minute)
    python break_it.py --quiz                   one at random: you see the vital signs, you name the damage

Every damaged model starts from the healthy one's seed and sees its batches.
"""

import math
import sys
from collections.abc import Callable
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

gpt = chapters.load_build(5)

CONFIG = gpt.GPTConfig(block_size=16)  # a short context: a model that may peek learns to within 160 steps
WIDE = gpt.GPTConfig(block_size=16, d_model=128)  # for the stream by depth, never trained
SETTINGS = training.TrainingSettings(steps=160)
HEALTHY_STARTS = 5  # healthy models that say how far apart healthy models end


@lru_cache(maxsize=1)
def corpus() -> data.Corpus:
    return data.load_corpus("docs", "char", CONFIG.block_size)


# ---------------------------------------------------------------- the patient


@dataclass(frozen=True)
class Patient:
    """A model to be: its class, its start, what it is trained on. A sabotage exchanges one of these three."""

    seed: int  # of the batches
    start: int  # the seed of the initial values
    model_class: type[gpt.GPT] = gpt.GPT
    init: Callable[[gpt.GPT, int], None] = gpt.init_parameters
    objective: Callable = training.plain_loss

    def build(self, cfg: gpt.GPTConfig = CONFIG) -> gpt.GPT:
        """A freshly started model."""
        model = self.model_class(cfg, corpus().vocab_size)
        self.init(model, self.start)
        return model

    @cached_property
    def trained(self) -> tuple[gpt.GPT, training.History]:
        """The model after SETTINGS.steps steps, and how it got there. Trained once per patient."""
        model = self.build()
        history = training.train(model, corpus(), SETTINGS, self.seed, training_loss=self.objective)
        return model.eval(), history


@lru_cache(maxsize=8)
def healthy(seed: int, start: int | None = None) -> Patient:
    return Patient(seed, start or seed)


# ---------------------------------------------------------------- instruments


def first_loss(patient: Patient) -> Reading:
    """Uniform prediction costs ln V; a tied head of std σ behind a unit-RMS norm adds d·σ²/2."""
    law = math.log(corpus().vocab_size) + CONFIG.d_model * 0.02**2 / 2
    loss = patient.trained[1].losses[0]
    return Reading(f"{loss:.2f}, law {law:.2f}", abs(loss - law) < 0.2, loss)


def training_loss(patient: Patient) -> Reading:
    """Where training ends, against healthy models that saw the same batches from other starts: red if it lies more
    than three times the width of their range from that range's middle."""
    ends = [history.train_loss for history in healthy_histories(patient.seed)]
    middle, width = (max(ends) + min(ends)) / 2, max(ends) - min(ends)
    loss = patient.trained[1].train_loss
    return Reading(f"{loss:.2f}, healthy {min(ends):.2f} to {max(ends):.2f}", abs(loss - middle) <= 3 * width, loss)


def pace(patient: Patient) -> Reading:
    """Steps until the model knows more than how frequent each letter is: until the mean loss of ten steps lies a
    quarter of a nat below the letters' entropy."""
    mine = steps_to_learn(patient.trained[1])
    slowest = max(map(steps_to_learn, healthy_histories(patient.seed)))
    text = f"{mine:.0f} steps" if mine < math.inf else f"not within {SETTINGS.steps} steps"
    return Reading(text, mine <= 2 * slowest, mine)


@torch.no_grad()
def generation(patient: Patient) -> Reading:
    """The loss at the last position of a window, as generate() uses it: nothing stands to its right."""
    model, history = patient.trained
    idx, targets = next(data.all_windows(corpus().validation, CONFIG.block_size, 1000))
    loss = F.cross_entropy(model(idx)[0][:, -1], targets[:, -1]).item()
    return Reading(f"{loss:.2f}, in training {history.train_loss:.2f}", loss - history.train_loss < 0.5, loss)


@torch.no_grad()
def echo(patient: Patient) -> Reading:
    """How often the trained model's favourite is the very token that it just read."""
    idx, _ = next(data.all_windows(corpus().validation, CONFIG.block_size, 1000))
    share = (patient.trained[0](idx)[0].argmax(-1) == idx).double().mean().item()
    return Reading(f"{share:.0%} of the time", share < 0.5, share)


def causality(patient: Patient) -> Reading:
    """The gradient of position 5's logits: how much of it goes to what enters at later positions."""
    model, idx = patient.build(), corpus().validation[None, : CONFIG.block_size]
    x = model.embed(idx).detach().requires_grad_()
    model.embed = lambda idx: x
    model(idx)[0][0, 5].square().sum().backward()
    share = (x.grad[0, 6:].norm() / x.grad.norm()).item()
    return Reading(f"{share:.1%} comes from later", share == 0.0, share)


@torch.no_grad()
def order(patient: Patient) -> Reading:
    """Swap two tokens of the past: in a one-layer model only the positions can tell."""
    model = patient.build(replace(CONFIG, n_layers=1)).double()
    idx = torch.arange(CONFIG.block_size)[None]
    swapped = idx.clone()
    swapped[0, [2, 9]] = idx[0, [9, 2]]
    before, after = model(idx)[0][0, -1], model(swapped)[0][0, -1]
    change = ((after - before).norm() / before.norm()).item()
    return Reading(f"logits change by {change:.0e}", change > 1e-9, change)


@torch.no_grad()
def highway(patient: Patient) -> Reading:
    """With its two branches silenced, a block must hand its input on unchanged."""
    block = patient.build().blocks[0]
    for module in block.modules():
        if isinstance(module, gpt.ResidualWriter):
            nn.init.zeros_(module.weight)
    x = torch.randn(3, 7, CONFIG.d_model, generator=generator(patient.seed, "highway"))
    share = (block(x).norm() / x.norm()).item()
    return Reading(f"{share:.0%} arrives", torch.equal(block(x), x), share)


@torch.no_grad()
def focus(patient: Patient) -> Reading:
    """How many positions the last of 64 looks at, exp(entropy of its weights), for unit normal queries and keys."""
    D = 64
    attn = patient.build(gpt.GPTConfig(block_size=D, n_layers=1, n_heads=1, d_model=D)).blocks[0].attn
    noise = generator(patient.seed, "focus")
    q, k = (torch.randn(1, 1, D, D, generator=noise) for _ in "qk")
    attn.heads = lambda x: (q, k, torch.eye(D)[None, None])  # values that spell out the weights
    attn.proj = nn.Identity()
    ours = attn(torch.zeros(1, D, D))[0, -1]
    law = (q[0, 0, -1] @ k[0, 0].T / math.sqrt(D)).softmax(-1)
    number, expected = (torch.special.entr(weights).sum().exp().item() for weights in (ours, law))
    return Reading(f"{number:.1f} of {D} positions", abs(number - expected) < 0.01, number)


def stream(patient: Patient) -> Reading:
    """How much larger the residual stream leaves the last block than it entered the first, at the start."""
    times = growth(patient, CONFIG)
    return Reading(f"{times:.1f} times", times < 2.5, times)


def depth(patient: Patient) -> Reading:
    """How much more 48 layers make the stream grow than 2 layers do."""
    times = growth(patient, replace(WIDE, n_layers=48)) / growth(patient, WIDE)
    return Reading(f"{times:.2f} times as much", 0.8 < times < 1.25, times)


def depth_swiglu(patient: Patient) -> Reading:
    """The same with chapter 07's MLP, whose matrices have names of their own."""

    class WithSwiGLU(patient.model_class):
        def make_block(self, cfg: gpt.GPTConfig) -> nn.Module:
            block = super().make_block(cfg)
            block.mlp = chapters.load_build(7).SwiGLU(cfg.d_model)
            return block

    return depth(replace(patient, model_class=WithSwiGLU))


def tie(patient: Patient) -> Reading:
    """Reading in and reading out use one matrix, and training leaves it one."""
    model = patient.trained[0]
    gap = (model.lm_head.weight - model.token_embedding.weight).abs().max().item()
    if model.lm_head.weight is model.token_embedding.weight:
        return Reading(f"one, {gpt.count_parameters(model):,} parameters", True, gap)
    return Reading(f"two, {gap:.2f} apart, {gpt.count_parameters(model):,} parameters", False, gap)


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
    """Healthy models that saw the batches of `seed`, each from a start of its own, the first from `seed` itself."""
    return [healthy(seed, seed + i).trained[1] for i in range(HEALTHY_STARTS)]


@lru_cache(maxsize=1)
def letter_entropy() -> float:
    """What a model pays that knows how frequent each character is, and nothing else, in nats."""
    frequencies = torch.bincount(corpus().train).double() / len(corpus().train)
    return torch.special.entr(frequencies).sum().item()


def steps_to_learn(history: training.History) -> float:
    """The first step whose last ten losses have a mean below letter_entropy() − 0.25; infinite if there is none."""
    means = ((i + 10, sum(history.losses[i : i + 10]) / 10) for i in range(len(history.losses) - 9))
    return next((step for step, loss in means if loss < letter_entropy() - 0.25), math.inf)


@torch.no_grad()
def stream_rms(model: gpt.GPT) -> list[float]:
    """RMS of the residual stream where it starts and after each block, on the corpus's first windows."""
    idx, _ = next(data.all_windows(corpus().train, model.cfg.block_size, 16))
    x = model.embed(idx)
    rms = [x.square().mean().sqrt().item()]
    for block in model.blocks:
        x = block(x)
        rms.append(x.square().mean().sqrt().item())
    return rms


def growth(patient: Patient, cfg: gpt.GPTConfig) -> float:
    """The fresh model's stream behind its last block over that before its first, in RMS."""
    rms = stream_rms(patient.build(cfg))
    return rms[-1] / rms[0]


# ---------------------------------------------------------------- the damage


class UnmaskedAttention(gpt.CausalSelfAttention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads(x)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).flatten(2))


class UnscaledAttention(gpt.CausalSelfAttention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads(x)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
        return self.proj(y.transpose(1, 2).flatten(2))


class BlockWithoutResidual(gpt.Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attn(self.norm1(x))
        x = self.mlp(self.norm2(x))
        return x


def with_block(block_class: type[gpt.Block]) -> type[gpt.GPT]:
    """A GPT made of such blocks."""

    class WithBlock(gpt.GPT):
        def make_block(self, cfg: gpt.GPTConfig) -> nn.Module:
            return block_class(cfg)

    return WithBlock


def with_attention(attention_class: type[gpt.CausalSelfAttention]) -> type[gpt.GPT]:
    """A GPT whose blocks attend like this."""

    class WithAttention(gpt.Block):
        def make_attention(self, cfg: gpt.GPTConfig) -> nn.Module:
            return attention_class(cfg)

    return with_block(WithAttention)


class GPTWithoutPositions(gpt.GPT):
    def make_positions(self, cfg: gpt.GPTConfig) -> None:
        return None


def start_embeddings_at_one(model: gpt.GPT, seed: int) -> None:
    gpt.init_parameters(model, seed)
    for name in ("token_embedding", "position_embedding"):
        nn.init.normal_(model.get_submodule(name).weight, generator=generator(seed, name, "std 1"))


def copy_the_head(model: gpt.GPT, seed: int) -> None:
    gpt.init_parameters(model, seed)
    model.lm_head.weight = nn.Parameter(model.token_embedding.weight.detach().clone())


@torch.no_grad()
def unscale(model: gpt.GPT, seed: int, still_scaled: str = "nothing") -> None:
    """Start as usual, then take the 1/√(2L) back from every writer whose name doesn't end in `still_scaled`."""
    gpt.init_parameters(model, seed)
    for name, module in model.named_modules():
        if isinstance(module, gpt.ResidualWriter) and not f"{name}.weight".endswith(still_scaled):
            module.weight *= math.sqrt(2 * model.cfg.n_layers)


def unshifted(model: gpt.GPT, idx: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return training.plain_loss(model, idx, idx)


SABOTAGES = (
    Sabotage(
        name="no-causal-mask",
        before="y = F.scaled_dot_product_attention(q, k, v, is_causal=True)",
        after="y = F.scaled_dot_product_attention(q, k, v)",
        predicts="the training loss falls below half of the healthy one's, while generation gets worse by 0.25 nats",
        explains="In training every target stands in the input, one place to the right, and attention without a mask "
        "learns to fetch it from there. The loss praises the thief. When the model generates, nothing stands to the "
        "right, and it has learned nothing else. Only an instrument that hides the future can tell.",
        loud=False,
        instrument="generation",
        damage=partial(replace, model_class=with_attention(UnmaskedAttention)),
        also_trips=("training-loss", "causality"),
        sizes=lambda healthy, broken: broken.number > healthy.number + 0.25,
    ),
    Sabotage(
        name="no-residual",
        before="x = x + self.attn(self.norm1(x))\nx = x + self.mlp(self.norm2(x))",
        after="x = self.attn(self.norm1(x))\nx = self.mlp(self.norm2(x))",
        predicts="nothing of x passes a silent block, and two layers learn little beyond the letters' frequencies",
        explains="Without the sum a position keeps of its own token only what attention leaves of it, at first an even "
        "share among all the tokens before it, and each block must rebuild whatever the next one needs. With the sum, "
        "x is there to begin with, and the blocks only add what they know. In 48 layers the stream shrinks as well.",
        loud=True,
        instrument="highway",
        damage=partial(replace, model_class=with_block(BlockWithoutResidual)),
        also_trips=("training-loss", "pace", "depth", "depth-swiglu"),
        sizes=lambda healthy, broken: broken.number == 0.0,
    ),
    Sabotage(
        name="no-root-d",
        before="y = F.scaled_dot_product_attention(q, k, v, is_causal=True)",
        after="y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)",
        predicts="unit normal queries and keys of 64 channels look at fewer than 4 positions instead of dozens",
        explains="q·k of D unit normal channels has variance D; divided by √D it has variance 1 whatever D is. Without "
        "that, softmax sees scores of std 8 and all but picks the largest, where its gradient is nearly zero. "
        "The tiny model starts with small queries and keys and has 16 channels a head, so its loss doesn't show it: "
        "this is damage that waits for a larger model.",
        loud=False,
        instrument="focus",
        damage=partial(replace, model_class=with_attention(UnscaledAttention)),
        sizes=lambda healthy, broken: broken.number < 4 and healthy.number > 24,
    ),
    Sabotage(
        name="no-positions",
        before="x = x + self.position_embedding.weight[: idx.shape[1]]",
        after="pass",
        predicts="with one layer the past is a bag: swapping two of its tokens changes nothing but rounding",
        explains="A weighted sum doesn't know the order of its terms. Two layers can still guess at it, for the causal "
        "mask lets position 3 see three tokens and position 9 nine (Haviv et al. 2022), and so the training loss of "
        "a small model hardly moves.",
        loud=False,
        instrument="order",
        damage=partial(replace, model_class=GPTWithoutPositions),
        sizes=lambda healthy, broken: broken.number < 1e-12,
    ),
    Sabotage(
        name="unit-embeddings",
        before="start = std",
        after="start = 1.0 if isinstance(module, nn.Embedding) else std  # torch's default for embeddings",
        predicts="the first loss is about ten times ln V, and training has to win that back first",
        explains="The head is the embedding. Behind the final norm stands token plus position, at unit RMS; its "
        "product with the token's own row is about d/√2, with any other row about ±√d. So the untrained model is "
        "certain that the next token repeats the current one, and pays d/√2 nats whenever it doesn't. With std "
        "0.02 the same rows give logits fifty times smaller.",
        loud=True,
        instrument="first-loss",
        damage=partial(replace, init=start_embeddings_at_one),
        also_trips=("training-loss", "pace"),
        sizes=lambda healthy, broken: 8 < broken.number / math.log(corpus().vocab_size) < 12,
    ),
    Sabotage(
        name="no-depth-scaling",
        before="start /= math.sqrt(2 * model.cfg.n_layers)",
        after="pass",
        predicts="48 layers make the residual stream grow more than 3 times as much as 2 layers do",
        explains="Every layer adds two terms to the stream. 2L independent terms of equal size add up to √(2L) times "
        "one of them; divided by √(2L) each, their sum is the same at any depth. At two layers, where you tried it, "
        "nothing is wrong.",
        loud=False,
        instrument="depth",
        damage=partial(replace, init=unscale),
        also_trips=("depth-swiglu",),
        sizes=lambda healthy, broken: broken.number > 3,
    ),
    Sabotage(
        name="scaled-by-name",
        before="if isinstance(module, ResidualWriter):",
        after='if name.endswith(".proj.weight"):',
        predicts="nothing, until the MLP becomes a SwiGLU: then 48 layers grow at least 1.4 times as much as 2",
        explains="GPT-2's code scales what is called c_proj; here it would be proj. The rule holds as long as everyone "
        "uses the name. SwiGLU's last matrix is called down_proj, the rule passes it over, and half of the "
        "2L terms come unscaled. A type (ResidualWriter) says what the matrix does, whatever it is called.",
        loud=False,
        instrument="depth-swiglu",
        damage=partial(replace, init=partial(unscale, still_scaled=".proj.weight")),
        sizes=lambda healthy, broken: broken.number > 1.4,
    ),
    Sabotage(
        name="copied-head",
        before="self.lm_head.weight = self.token_embedding.weight",
        after="self.lm_head.weight = nn.Parameter(self.token_embedding.weight.detach().clone())",
        predicts="the same first loss, then two matrices that drift apart, and V·d parameters more",
        explains="A copy is equal until the first step. The loss can't tell: an untied head is a fine model, only "
        "another and a larger one. Ask for identity (`is`), not for equality.",
        loud=False,
        instrument="tie",
        damage=partial(replace, init=copy_the_head),
        sizes=lambda healthy, broken: broken.number > 0.01,
    ),
    Sabotage(
        name="unshifted-targets",
        before="return windows[:, :-1], windows[:, 1:]",
        after="return windows[:, :-1], windows[:, :-1]",
        predicts="too good from the start: the first loss is below ln V, and after training the model repeats itself",
        explains="The target is the token at the model's feet. A tied head names it before any training, hence a first "
        "loss below that of guessing evenly, which no honest model reaches. Too good is a symptom too.",
        loud=False,
        instrument="echo",
        damage=partial(replace, objective=unshifted),
        also_trips=("first-loss", "training-loss", "generation"),
        sizes=lambda healthy, broken: broken.number > 0.99,
    ),
    Sabotage(
        name="sigma-half",
        before="def init_parameters(model: nn.Module, seed: int, std: float | str = 0.02) -> None:",
        after="def init_parameters(model: nn.Module, seed: int, std: float | str = 0.5) -> None:",
        predicts="two layers make the stream more than 10 times as large, the first loss doubles, learning is slow",
        explains="A matrix of std σ multiplies a vector's size by about σ√d: by 0.16 at σ = 0.02 and d = 64, but by 4 "
        "at σ = 0.5. So each branch writes far more than the stream held. Depth scaling still keeps the growth the "
        "same at any depth, but it can't mend the size of one layer. The line `pace` says how many steps the repair "
        "takes, and `training-loss` that it isn't finished when the run ends.",
        loud=True,
        instrument="stream",
        damage=partial(replace, init=partial(gpt.init_parameters, std=0.5)),
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
        signs[f"mean loss, steps {step - 4} to {step}"] = f"{sum(history.losses[step - 5 : step]) / 5:.3f}"
    signs["parameters"] = f"{gpt.count_parameters(model):,}"
    fresh = patient.build()
    idx, targets = next(data.all_windows(corpus().train, CONFIG.block_size, 32))
    patient.objective(fresh, idx, targets)[0].backward()
    for layer, block in enumerate(fresh.blocks, start=1):
        norm = sum(p.grad.square().sum() for p in block.parameters()).sqrt()
        signs[f"fresh: gradient in block {layer}"] = f"{norm:.3f}"
    for state, one in (
        ("fresh", fresh),
        ("trained", model),
        ("fresh, 48 layers", patient.build(replace(WIDE, n_layers=48))),
    ):
        for layer, rms in enumerate(stream_rms(one)):
            if layer in (0, 1, 2, 12, 48):
                signs[f"{state}: stream {f'after block {layer}' if layer else 'at its start'}"] = f"{rms:.3f}"
    return signs


def sample(patient: Patient) -> str:
    """What the trained model makes of the validation part's first characters."""
    model, _ = patient.trained
    prompt = corpus().validation[None, : CONFIG.block_size]
    idx = gpt.generate(model, prompt, 200, temperature=0.8, generator=generator(patient.seed, "sample"))
    return corpus().tokenizer.decode(idx[0, CONFIG.block_size :].tolist())


CASE = Case(healthy, INSTRUMENTS, SABOTAGES, vitals, sample)


def main(argv: list[str] | None = None) -> int:
    return sabotage.main(CASE, __doc__, argv)


if __name__ == "__main__":
    cli.run(main)
