"""Break a real model, one detail at a time, and see what each was worth there.

    python break_it.py                        every damage in one table, the healthy model first (a minute or two)
    python break_it.py --list                 what is damaged, with the symptom that each is predicted to have
    python break_it.py --sabotage no-rope     one of them, healthy and broken side by side
    python break_it.py --quiz                 one at random: you see the vital signs, you name the damage

Nothing is trained. The loaded model reads and writes with one line of its code exchanged, its numbers as they are (one
damage alone draws new ones, for the head). Perplexity is on torch's documentation; the answer is to one question.
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

from shared import files, chapters, cli, console, figures, sabotage
from shared.console import Table, say
from shared.experiment import log_text
from shared.instruments import Case, Instrument, Outcome, Reading, Sabotage, examine
from shared.randomness import generator

modern, real = chapters.load_build(7), chapters.load_build(37)
twin = chapters.load_step(37, 8).twin
apply_rope_half_split = chapters.load_step(7, 8).apply_rope_half_split

QUESTION, RIGHT = "What is the capital of France?", "The capital of France is Paris"
TEXT = {"--all": 1024, "one": 256}  # tokens read: for the table of everything, and for a single look
UNCHANGED = 1.01  # up to so many times the healthy perplexity may as well be rounding


# ---------------------------------------------------------------- the patient


@dataclass(frozen=True)
class Patient:
    """A model that reads a text and answers a question. A sabotage exchanges the model."""

    seed: int  # of the one damage that draws numbers
    n_tokens: int
    model: nn.Module
    tokenizer: object

    @cached_property
    def losses(self) -> torch.Tensor:
        """Nats for each of n_tokens tokens."""
        ids = torch.tensor(self.tokenizer.encode(real.evaluation_text())[: self.n_tokens + 1])
        return real.token_losses(self.model, ids)

    @property
    def perplexity(self) -> float:
        """Infinite where a loss is not a number."""
        return self.losses.double().mean().exp().nan_to_num(nan=math.inf).item()

    @cached_property
    def answer(self) -> str:
        """The likeliest ten tokens after the question, with keys and values remembered."""
        ids, end = self.tokenizer.chat(QUESTION), self.tokenizer.end
        with real.remembering(self.model, len(ids) + 10):
            tokens = [token for token in real.stream(self.model, ids, 10, end) if token != end]
        return real.conversation.CONTROLS.sub("", " ".join(self.tokenizer.encoding.decode(tokens).split()))


@lru_cache(maxsize=1)
def healthy(seed: int, n_tokens: int = TEXT["one"]) -> Patient:
    file = real.WeightsFile(real.packaged_weights())
    return Patient(seed, n_tokens, real.load_model(file), real.Tokenizer(file))


# ---------------------------------------------------------------- instruments


def read_perplexity(patient: Patient) -> Reading:
    well = healthy(patient.seed, patient.n_tokens).perplexity
    large = "not a number" if math.isinf(patient.perplexity) else f"{patient.perplexity:.1e}"
    text = f"{patient.perplexity:,.2f}" if patient.perplexity < 1e5 else large
    return Reading(text, patient.perplexity <= UNCHANGED * well, patient.perplexity / well)


def read_answer(patient: Patient) -> Reading:
    return Reading(shown(patient.answer), patient.answer.startswith(RIGHT))


def shown(text: str, width: int = 40) -> str:
    """A text of the model's, short enough for a table."""
    return repr(text if len(text) <= width else text[: width - 3] + "...")


INSTRUMENTS = (
    Instrument("perplexity", "does it find the text as likely as the healthy model does?", read_perplexity),
    Instrument("answer", f"does it still say: {RIGHT}?", read_answer),
)


# ---------------------------------------------------------------- damages


def exchange(part: str, damaged: type[nn.Module], patient: Patient) -> Patient:
    """Every norm, attn or mlp of the model becomes a `damaged`, its numbers as they are."""
    model = twin(patient.model)
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in {"norm": ("norm1", "norm2", "norm_f")}.get(part, (part,)):
            module.__class__ = damaged
    return replace(patient, model=model)


def attention(damaged: type[nn.Module]) -> Callable[[Patient], Patient]:
    return partial(exchange, "attn", damaged)


def norm(forward: Callable) -> Callable[[Patient], Patient]:
    return partial(exchange, "norm", type("DamagedNorm", (modern.RMSNorm,), {"forward": forward}))


def mlp(hidden: Callable) -> Callable[[Patient], Patient]:
    """hidden(gate, up) takes the place of silu(gate) · up."""

    class DamagedMLP(modern.SwiGLU):
        def forward(self, x):
            return self.down_proj(hidden(self.gate_proj(x), self.up_proj(x)))

    return partial(exchange, "mlp", DamagedMLP)


class MixedLayouts(real.GroupedQueryAttention):
    def turn(self, x, start):
        end = start + x.shape[2]
        return apply_rope_half_split(x, self.cos[start:end], self.sin[start:end])


class Unturned(real.GroupedQueryAttention):
    def turn(self, x, start):
        return x


class OtherBase(real.GroupedQueryAttention):
    def turn(self, x, start):
        cos, sin = modern.build_rope_cache(start + x.shape[2], self.head_dim, base=10_000.0)
        return modern.apply_rope(x, cos[start:], sin[start:])


class Restarting(real.GroupedQueryAttention):
    def turn(self, x, start):
        return super().turn(x, 0)


class Unscaled(real.GroupedQueryAttention):
    def mix(self, q, k, v, mask=None, is_causal=False):
        return super().mix(q * self.head_dim**0.5, k, v, mask, is_causal)  # cancels the 1/√D to come


class Tiled(real.GroupedQueryAttention):
    def mix(self, q, k, v, mask=None, is_causal=False):
        group = self.n_heads // self.n_kv_heads
        return super().mix(q, k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1), mask, is_causal)


def centred(self, x):
    return modern.RMSNorm.forward(self, x - x.mean(-1, keepdim=True))


def half_statistics(dtype: torch.dtype) -> Callable:
    def forward(self, x):
        narrow = x.to(dtype)
        scale = torch.rsqrt((narrow * narrow).mean(-1, keepdim=True) + self.eps)
        return (x * scale * self.weight).to(x.dtype)

    return forward


def skip(layer: int, patient: Patient) -> Patient:
    model = twin(patient.model)
    del model.blocks[layer]
    return replace(patient, model=model)


def new_head(patient: Patient) -> Patient:
    model = twin(patient.model)
    start = torch.empty_like(model.lm_head.weight)
    model.lm_head.weight = nn.Parameter(start.normal_(std=0.02, generator=generator(patient.seed, "head")))
    return replace(patient, model=model)


# ---------------------------------------------------------------- the list

TURN = "return modern.apply_rope(x, self.cos[start:], self.sin[start:])"
MIX = "y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, enable_gqa=True)"
SCALE = "scale = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + self.eps)"
GAIN = "return (wide * scale * self.weight).to(x.dtype)"
SWIGLU = "return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))"
BLOCKS = "for block in self.blocks:"


def sabotaged(
    name: str, before: str, after: str, low: float, high: float, loud: bool, damage, explains: str
) -> Sabotage:
    """A damage that multiplies the perplexity by `low` to `high`; a loud one spoils the answer, too."""
    size = f"more than {low:,g}" if math.isinf(high) else f"{low:,g} to {high:,g}"
    harmless = high <= UNCHANGED
    predicts = "perplexity as before" if harmless else f"perplexity {size} times the healthy one"
    return Sabotage(
        name=name,
        before=before,
        after=after,
        predicts=predicts + (", another answer" if loud else ", the same answer"),
        explains=explains,
        loud=loud,
        instrument="perplexity",
        damage=damage,
        also_trips=("answer",) if loud else (),
        harmless=harmless,
        sizes=lambda _, broken: low <= broken.number <= high,
    )


SABOTAGES = (
    sabotaged(
        "rope-layouts-mixed", TURN, "return apply_rope_half_split(x, self.cos[start:], self.sin[start:])",
        5, 200, True, attention(MixedLayouts),
        "The file's rows are sorted for neighbouring pairs, other programs' for halves. Each channel is turned, but by "
        "another's angle. The shapes fit, the first token is right, and nothing complains.",
    ),
    sabotaged(
        "no-rope", TURN, "return x", 5, 200, True, attention(Unturned),
        "Without angles a key looks the same from every distance: no head finds the token before, or any other by its "
        "place.",
    ),
    sabotaged(
        "rope-base-10000", "self.cos, self.sin = build_rope_cache(cfg.block_size, cfg.head_dim, base=cfg.rope_base)",
        "self.cos, self.sin = build_rope_cache(cfg.block_size, cfg.head_dim)", 1.02, 2, True, attention(OtherBase),
        "The common default. The fast pairs turn almost as before, the slow ones up to nine times too fast. The loss "
        "moves by about a tenth, and the answer slips into another language.",
    ),
    sabotaged(
        "positions-restart", "q, k, v = self.attn.heads(x, start=past)", "q, k, v = self.attn.heads(x)",
        0.99, UNCHANGED, True, attention(Restarting),
        "With a cache each new token comes as a text of length one, but its position is not 0. Perplexity is measured "
        "without a cache and can't see it: whoever only measures, ships this.",
    ),
    sabotaged(
        "heads-tiled", MIX, MIX.replace("q, k, v,", "q, k.repeat(1, 3, 1, 1), v.repeat(1, 3, 1, 1),"), 1e4, math.inf, True, attention(Tiled),
        "k0 k1 k2 k0 k1 k2 ... has the right shape too, but six of nine queries now read a key that they were not "
        "trained with.",
    ),
    sabotaged(
        "no-root-d", MIX, MIX.replace("enable_gqa=True", "scale=1.0, enable_gqa=True"), 10, 1000, True, attention(Unscaled),
        "Scores eight times too large: each head stares at one token.",
    ),
    sabotaged(
        "layernorm-for-rmsnorm", "wide = x if x.dtype == torch.float64 else x.float()",
        "wide = x.float() - x.float().mean(-1, keepdim=True)", 1.005, 1.3, False, norm(centred),
        "LayerNorm takes the mean out. Step 07 measured how much of the stream that is: two or three percent of its "
        "length, no more than of a random vector. There is hardly anything to lose.",
    ),
    sabotaged(
        "eps-1e-2", SCALE, SCALE.replace("self.eps", "1e-2"), 1.05, 2, False,
        norm(lambda self, x: F.rms_norm(x, x.shape[-1:], self.weight, 1e-2)),
        "The embeddings have a mean square of about 0.015, so at the first norm an eps of 0.01 is no small number; "
        "from the second layer on the stream is too large to notice.",
    ),
    sabotaged(
        "eps-1e-6", SCALE, SCALE.replace("self.eps", "1e-6"), 0.99, UNCHANGED, False,
        norm(lambda self, x: F.rms_norm(x, x.shape[-1:], self.weight, 1e-6)),
        "Beside a mean square of 0.015 and more, one eps is as small as the other.",
    ),
    sabotaged(
        "gains-one", GAIN, "return (wide * scale).to(x.dtype)", 1e3, math.inf, True,
        norm(lambda self, x: F.rms_norm(x, x.shape[-1:], None, self.eps)),
        "The gains shut out the channel that holds 22,000: before the MLPs of layers 13 to 27 they are below 0.002 "
        "there, where their median is 0.25. Step 08 folds them into the matrices, which keeps them; this drops them.",
    ),
    sabotaged(
        "no-norm", GAIN, "return x", 1e4, math.inf, True, norm(lambda self, x: x),
        "Each layer multiplies what the one before has grown, and a SwiGLU multiplies it by itself, until float32 "
        "ends.",
    ),
    sabotaged(
        "float16-statistics", SCALE, "scale = torch.rsqrt((x.half() * x.half()).mean(-1, keepdim=True) + self.eps)",
        100, math.inf, True, norm(half_statistics(torch.float16)),
        "float16 ends at 65,504, so that from 256 on a square is infinite, and step 07 saw 22,000: the mean is "
        "infinite, its inverse root 0, and the token goes silent, without one NaN.",
    ),
    sabotaged(
        "bfloat16-statistics", SCALE,
        "scale = torch.rsqrt((x.bfloat16() * x.bfloat16()).mean(-1, keepdim=True) + self.eps)",
        0.99, UNCHANGED, False, norm(half_statistics(torch.bfloat16)),
        "bfloat16 reaches as far as float32 and keeps two or three digits, and a scale needs no more.",
    ),
    sabotaged(
        "gate-and-up-exchanged", SWIGLU, "return self.down_proj(F.silu(self.up_proj(x)) * self.gate_proj(x))",
        1e5, math.inf, True, mlp(lambda gate, up: F.silu(up) * gate),
        "Two matrices of one shape. Which of them goes through SiLU makes no difference before training (they start "
        "alike), and all the difference after it.",
    ),
    sabotaged(
        "gelu-for-silu", SWIGLU, SWIGLU.replace("silu", "gelu"), 1.5, 6, True, mlp(lambda gate, up: F.gelu(gate) * up),
        "The two curves are never more than 0.2 apart. Thirty layers of that add up.",
    ),
    sabotaged(
        "relu-for-silu", SWIGLU, SWIGLU.replace("silu", "relu"), 50, 1e5, True, mlp(lambda gate, up: F.relu(gate) * up),
        "SiLU's dip below zero looks like an accident of its formula. The model uses it.",
    ),
    sabotaged(
        "relu2-for-silu", SWIGLU, SWIGLU.replace("F.silu(self.gate_proj(x))", "F.relu(self.gate_proj(x)).square()"),
        1e4, math.inf, True, mlp(lambda gate, up: F.relu(gate).square() * up),
        "A square makes what is large larger, in every layer.",
    ),
    sabotaged(
        "sigmoid-for-silu", SWIGLU, SWIGLU.replace("F.silu", "F.sigmoid"), 1e4, math.inf, True,
        mlp(lambda gate, up: F.sigmoid(gate) * up),
        "The original gated unit (Dauphin et al. 2017): its gate only opens and shuts, SiLU's multiplies as well.",
    ),
    sabotaged(
        "no-gate", SWIGLU, "return self.down_proj(self.up_proj(x))", 1e4, math.inf, True, mlp(lambda gate, up: up),
        "What the gate held back comes through, in every neuron, in every layer; and the MLP is linear.",
    ),
    sabotaged(
        "new-head", "self.lm_head.weight = self.token_embedding.weight", "pass", 1e3, math.inf, True, new_head,
        "What a loader leaves behind that breaks the tie and doesn't look: a head at its start. The perplexity is "
        "above that of guessing evenly, 49,152.",
    ),
    sabotaged(
        "first-layer-skipped", BLOCKS, "for block in self.blocks[1:]:", 100, math.inf, True, partial(skip, 0),
        "The embeddings have a size of 0.1 and the stream behind the first layer one of 2: all others were trained on "
        "what it makes of them.",
    ),
    sabotaged(
        "middle-layer-skipped", BLOCKS, "for block in [*self.blocks[:15], *self.blocks[16:]]:", 1.05, 2, False,
        partial(skip, 15),
        "The stream goes by it. A layer in the middle adds a little to what is there, and what follows reads the rest.",
    ),
    sabotaged(
        "last-layer-skipped", BLOCKS, "for block in self.blocks[:-1]:", 3, 100, True, partial(skip, -1),
        "No layer comes after it to make up for it. Step 07 saw it take the largest number from 7,900 to 2,500 before "
        "the last norm reads the stream.",
    ),
)  # fmt: skip


def vitals(patient: Patient) -> dict[str, str]:
    """For the quiz: what the losses look like from afar."""
    losses = patient.losses
    return {
        "perplexity": read_perplexity(patient).text,
        "mean loss of the first 32 tokens": f"{losses[:32].mean():.3f}",
        "mean loss of the last 32 tokens": f"{losses[-32:].mean():.3f}",
        "smallest loss of a token": f"{losses.min():.4f}",
        "largest loss of a token": f"{losses.max():.1f}",
    }


CASE = Case(
    healthy, INSTRUMENTS, SABOTAGES, vitals,
    sample=lambda patient: shown(patient.answer),
    watched="the answer",
    premise="read the same 256 tokens and answer the same question",
)  # fmt: skip


# ---------------------------------------------------------------- the table of everything


def run_all(seed: int) -> list[Outcome]:
    """Every sabotage on the longer text, with a line for each as it is done."""
    patient, outcomes = healthy(seed, TEXT["--all"]), []
    with console.RunProgress(len(SABOTAGES)) as progress:
        well = examine(CASE, patient)
        for one in SABOTAGES:
            outcomes.append(Outcome(one, well, examine(CASE, one.damage(patient))))
            progress.finish(one.name, f"perplexity {outcomes[-1].broken['perplexity'].text}")
    return outcomes


def summary(outcomes: list[Outcome]) -> Table:
    well = outcomes[0].healthy
    rows = [["healthy", "-", well["perplexity"].text, "1", well["answer"].text, "-"]]
    for outcome in outcomes:
        one, seen = outcome.sabotage, outcome.broken
        came = "came true" if outcome.came_true and outcome.tripped == one.trips else "DID NOT COME TRUE"
        factor = times(seen["perplexity"].number)
        rows.append([one.name, sabotage.noise(one), seen["perplexity"].text, factor, seen["answer"].text, came])
    return Table(["damage", "kind", "perplexity", "times healthy", QUESTION, "prediction"], rows)


def times(factor: float) -> str:
    if math.isinf(factor):
        return "not a number"
    return f"{factor:,.3f}" if factor < 10 else f"{factor:,.0f}" if factor < 1e5 else f"{factor:.0e}"


def draw(outcomes: list[Outcome]):
    """A bar for each damage: how many times the healthy perplexity it costs."""
    figure = figures.new_figure(9, 1.4 + 0.28 * len(outcomes))
    axes = figure.subplots()
    ordered = sorted(outcomes, key=lambda outcome: -outcome.broken["perplexity"].number)
    factors = [outcome.broken["perplexity"].number for outcome in ordered]
    end = 10 * max(factor for factor in factors if math.isfinite(factor))
    for row, (outcome, factor) in enumerate(zip(ordered, factors)):
        loud = outcome.sabotage.loud
        length = max(min(factor, end), 1.004)  # a sliver for what does nothing
        bar = axes.barh(row, length - 1, left=1, color=figures.COLOURS[1 if loud else 0], height=0.7)
        if math.isinf(factor):
            bar[0].set(hatch="//", edgecolor="w")
        axes.annotate(times(factor), (length, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(range(len(ordered)), [outcome.sabotage.name for outcome in ordered], fontsize=9)
    axes.set(xscale="log", xlim=(1, 300 * end), xlabel="times the healthy perplexity", ylim=(len(ordered) - 0.4, -0.6))
    for loud, label in ((True, "loud: the answer is another"), (False, "silent: the same answer")):
        axes.barh(-9, 0, color=figures.COLOURS[1 if loud else 0], label=label)
    axes.legend(frameon=False, loc="lower right", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def main(argv: list[str] | None = None) -> int:
    args = sabotage.parse(__doc__, argv)
    if args.list or args.sabotage or args.quiz or args.answer is not None:
        return sabotage.main(CASE, __doc__, argv)
    folder = Path(__file__).parent / "outputs"
    files.claim_folder(folder)
    torch.set_num_threads(1)  # the numbers don't depend on the cores then, and a busy machine doesn't stall it
    sabotage.list_all(CASE)
    say(f"\nNow on {TEXT['--all']:,} tokens of documentation, with the question: {QUESTION}")
    outcomes = run_all(args.seed or 1)
    table = summary(outcomes)
    wrong = sum("NOT" in row[-1] for row in table.rows)
    ending = (
        f"{wrong} of {len(SABOTAGES)} predictions did NOT come true"
        if wrong
        else f"all {len(SABOTAGES)} predictions came true"
    )
    say()
    say(table)
    say(f"\n{ending}", style="bold red" if wrong else "bold green")
    files.write_text(folder / "break_it.txt", log_text([table, ending]))
    files.write_bytes(folder / "perplexity.png", figures.png(draw(outcomes)))
    say(f"\nwritten to {folder}: break_it.txt, perplexity.png")
    return 1 if wrong else 0


if __name__ == "__main__":
    cli.run(main)
