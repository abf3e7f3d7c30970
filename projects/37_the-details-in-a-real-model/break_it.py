"""Break a real model, one detail at a time, and see what each was worth there.

    python break_it.py                      every damage in one table (a minute or two)
    python break_it.py --list               what is damaged, each with its predicted symptom
    python break_it.py --sabotage no-rope   one of them, healthy and broken side by side
    python break_it.py --quiz               one at random: you name the damage
    python break_it.py --edit "OLD" "NEW"   an edit of your own

Nothing is trained. A sabotage exchanges a line or two of a build.py; the build is loaded with the
new lines and filled with the numbers in the file. Perplexity is on torch's documentation, the
answer is to one question. (The file is read once, by the unedited build, so that an edit of
WeightsFile changes nothing here.)
"""

import math
import sys
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console, figures, files, sabotage
from shared.chapters import Edit
from shared.console import Table, say
from shared.sabotage import Case, Instrument, Outcome, Reading, Sabotage, examine

import torch
import torch.nn as nn

real = chapters.load_build(37)

QUESTION = "What is the capital of France?"
RIGHT = "The capital of France is Paris"
TEXT = {"--all": 1024, "one": 128}  # tokens read: for the table of everything, for a single look
UNCHANGED = 1.01  # up to 1.01 times the healthy perplexity counts as no change


# ---------------------------------------------------------------- the patient


class UnpackedFile(real.WeightsFile):
    """A file that unpacks each tensor once."""

    @lru_cache(maxsize=None)
    def read(self, name: str) -> torch.Tensor:
        return super().read(name)


@lru_cache(maxsize=1)
def weights() -> UnpackedFile:
    return UnpackedFile(real.packaged_weights())


@dataclass(frozen=True)
class Patient:
    """An edited build's model, which reads a text and answers a question."""

    seed: int  # for numbers that the file doesn't fill, as in new-head
    n_tokens: int
    edits: tuple[Edit, ...] = ()

    @cached_property
    def build(self) -> ModuleType:
        return chapters.edited_build(37, self.edits)

    @cached_property
    def tokenizer(self):
        return self.build.Tokenizer(weights())

    @cached_property
    def measured(self) -> tuple[torch.Tensor, str]:
        """The losses and the answer. The model, half a gigabyte, isn't kept."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = self.build.load_model(weights())
        return self.read(model), self.write(model)

    @property
    def losses(self) -> torch.Tensor:
        return self.measured[0]

    @property
    def answer(self) -> str:
        return self.measured[1]

    @property
    def perplexity(self) -> float:
        """Infinite where a loss is not a number."""
        return self.losses.double().mean().exp().nan_to_num(nan=math.inf).item()

    def read(self, model: nn.Module) -> torch.Tensor:
        """Nats for each of n_tokens tokens."""
        ids = self.tokenizer.encode(self.build.evaluation_text())
        return self.build.token_losses(model, torch.tensor(ids[: self.n_tokens + 1]))

    def write(self, model: nn.Module) -> str:
        """The likeliest ten tokens after the question, with keys and values remembered."""
        ids = self.tokenizer.chat(QUESTION)
        ends = self.tokenizer.ends
        with self.build.remembering(model, len(ids) + 10):
            tokens = list(self.build.stream(model, ids, 10, ends))
        text = self.tokenizer.encoding.decode([token for token in tokens if token not in ends])
        return real.conversation.CONTROLS.sub("", " ".join(text.split()))


@lru_cache(maxsize=1)
def healthy(seed: int, n_tokens: int = TEXT["one"]) -> Patient:
    return Patient(seed, n_tokens)


# ---------------------------------------------------------------- instruments


def read_perplexity(patient: Patient) -> Reading:
    factor = patient.perplexity / healthy(patient.seed, patient.n_tokens).perplexity
    if math.isinf(patient.perplexity):
        text = "not a number"
    elif patient.perplexity < 1e5:
        text = f"{patient.perplexity:,.2f}"
    else:
        text = f"{patient.perplexity:.1e}"
    return Reading(text, factor <= UNCHANGED, factor)


def read_answer(patient: Patient) -> Reading:
    return Reading(shown(patient.answer), patient.answer.startswith(RIGHT))


def shown(text: str, width: int = 40) -> str:
    """A text of the model's, short enough for a table."""
    return repr(text if len(text) <= width else text[: width - 3] + "...")


INSTRUMENTS = (
    Instrument("perplexity", "is the text as likely as to the healthy model?", read_perplexity),
    Instrument("answer", f"does it still say: {RIGHT}?", read_answer),
)


# ---------------------------------------------------------------- the damage


def sabotaged(
    name: str, *edits: Edit, low: float, high: float, loud: bool, explains: str
) -> Sabotage:
    """A damage that multiplies the perplexity by `low` to `high`.

    A loud one spoils the answer, too.
    """
    size = f"more than {low:,g}" if math.isinf(high) else f"{low:,g} to {high:,g}"
    harmless = high <= UNCHANGED
    predicts = "perplexity as before" if harmless else f"perplexity {size} times the healthy one"
    return Sabotage(
        name=name,
        edits=edits,
        predicts=predicts + (", another answer" if loud else ", the right answer"),
        explains=explains,
        loud=loud,
        instrument="perplexity",
        also_trips=("answer",) if loud else (),
        harmless=harmless,
        sizes=lambda _, broken: low <= broken.number <= high,
    )


def norm(old: str, new: str) -> Edit:
    """An edit of chapter 07's RMSNorm."""
    return Edit(7, old, new)


def gate(new: str) -> Edit:
    """An edit of chapter 07's SwiGLU: what stands for silu(gate) · up."""
    return Edit(7, "F.silu(self.gate_proj(x)) * self.up_proj(x)", new)


def layers(new: str) -> Edit:
    """An edit of the loop over the layers."""
    loop = "for block in {}:\n    x = block(x)"
    return Edit(37, loop.format("self.blocks"), loop.format(new))


MIX = "F.scaled_dot_product_attention(q, k, v, mask, "
STATISTICS = "(wide * wide)"
EPS = "keepdim=True) + self.eps)"
GAIN = "(wide * scale * self.weight).to(x.dtype)"

SABOTAGES = (
    sabotaged(
        "rope-layouts-mixed",
        Edit(
            37,
            "return modern.apply_rope(x, ",
            "x = x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)\n"
            "return modern.apply_rope(x, ",
        ),
        low=5,
        high=200,
        loud=True,
        explains="The file's rows are sorted for pairs of neighbours, other programs' for channel "
        "i with i + 32. Each channel is turned by another's angle. The shapes fit, the first token "
        "is right (its angle is 0), and nothing complains.",
    ),
    sabotaged(
        "no-rope",
        Edit(37, "return self.turn(q, start), self.turn(k, start), v", "return q, k, v"),
        low=5,
        high=200,
        loud=True,
        explains="Without angles a key looks the same from every distance: no head finds the token "
        "before, or any other by its place.",
    ),
    sabotaged(
        "rope-base-10000",
        Edit(7, "base=cfg.rope_base)", "base=10_000.0)"),
        low=1.02,
        high=2,
        loud=True,
        explains="10,000 is the common default. The fast pairs turn almost as before, the slow "
        "ones up to nine times too fast. The perplexity rises by a tenth or so, and the answer "
        "slips into another language.",
    ),
    sabotaged(
        "positions-restart",
        Edit(37, "self.attn.heads(x, start=past)", "self.attn.heads(x)"),
        low=0.99,
        high=UNCHANGED,
        loud=True,
        explains="With a cache each new token comes as a text of length one, but its position is "
        "not 0. Perplexity is measured without a cache, so it can't see the mistake.",
    ),
    sabotaged(
        "heads-tiled",
        Edit(
            37,
            "y = " + MIX,
            "group = self.n_heads // self.n_kv_heads\n"
            "k = k.repeat(1, group, 1, 1)\n"
            "v = v.repeat(1, group, 1, 1)\n"
            "y = " + MIX,
        ),
        low=1e4,
        high=math.inf,
        loud=True,
        explains="k0 k1 k2 k0 k1 k2 ... has the right shape too, but six of nine queries now read "
        "a key that they were not trained with.",
    ),
    sabotaged(
        "no-root-d",
        Edit(37, MIX, MIX + "scale=1.0, "),
        low=10,
        high=1000,
        loud=True,
        explains="Scores eight times too large: each head stares at one token.",
    ),
    sabotaged(
        "layernorm-for-rmsnorm",
        norm(
            "wide = x if x.dtype == torch.float64 else x.float()",
            "wide = x.float() - x.float().mean(-1, keepdim=True)",
        ),
        low=1.005,
        high=1.3,
        loud=False,
        explains="LayerNorm takes the mean out. Step 07 measured its share of the stream's size: "
        "0.024 on the average, less than that of random numbers. There is hardly anything to lose.",
    ),
    sabotaged(
        "eps-1e-2",
        norm(EPS, EPS.replace("self.eps", "1e-2")),
        low=1.05,
        high=2,
        loud=False,
        explains="The embeddings have a mean square of about 0.014, so at the first norm an eps "
        "of 0.01 is no small number. After the first layer the mean square is above 1, and the eps "
        "hardly counts.",
    ),
    sabotaged(
        "eps-1e-6",
        norm(EPS, EPS.replace("self.eps", "1e-6")),
        low=0.99,
        high=UNCHANGED,
        loud=False,
        explains="The eps was 0.00001. Beside a mean square of 0.014 and more, both are next to "
        "nothing.",
    ),
    sabotaged(
        "gains-one",
        norm(GAIN, "(wide * scale).to(x.dtype)"),
        low=1e3,
        high=math.inf,
        loud=True,
        explains="The gains shut out the channel that holds 22,000: before the MLPs of layers 13 "
        "to 27 they are below 0.002 there, where their median is 0.25. Step 08 folds them into the "
        "matrices, which keeps them; this drops them.",
    ),
    sabotaged(
        "no-norm",
        norm(GAIN, "x"),
        low=1e4,
        high=math.inf,
        loud=True,
        explains="Each layer enlarges what the one before made, and a SwiGLU multiplies its input "
        "by itself, until the numbers are too large for float32.",
    ),
    sabotaged(
        "float16-statistics",
        norm(STATISTICS, "(x.half() * x.half())"),
        low=100,
        high=math.inf,
        loud=True,
        explains="float16 ends at 65,504, so the square of 256 is infinite, and step 07 saw "
        "22,000. The mean of squares is infinite, dividing by its root leaves 0 for the whole "
        "token, and no NaN warns.",
    ),
    sabotaged(
        "bfloat16-statistics",
        norm(STATISTICS, "(x.bfloat16() * x.bfloat16())"),
        low=0.99,
        high=UNCHANGED,
        loud=False,
        explains="bfloat16 reaches as far as float32. It keeps two or three digits, and the mean "
        "of squares needs no more.",
    ),
    sabotaged(
        "gate-and-up-exchanged",
        gate("F.silu(self.up_proj(x)) * self.gate_proj(x)"),
        low=1e5,
        high=math.inf,
        loud=True,
        explains="Two matrices of one shape. Which of them goes through SiLU makes no difference "
        "before training (they start alike), and all the difference after it.",
    ),
    sabotaged(
        "gelu-for-silu",
        gate("F.gelu(self.gate_proj(x)) * self.up_proj(x)"),
        low=1.5,
        high=6,
        loud=True,
        explains="The two curves are never more than 0.2 apart. Thirty layers of that add up.",
    ),
    sabotaged(
        "relu-for-silu",
        gate("F.relu(self.gate_proj(x)) * self.up_proj(x)"),
        low=50,
        high=1e5,
        loud=True,
        explains="The two differ most where SiLU dips below zero. The dip looks unimportant, but "
        "the model uses it.",
    ),
    sabotaged(
        "relu2-for-silu",
        gate("F.relu(self.gate_proj(x)).square() * self.up_proj(x)"),
        low=1e4,
        high=math.inf,
        loud=True,
        explains="A square makes what is large larger, in every layer.",
    ),
    sabotaged(
        "sigmoid-for-silu",
        gate("F.sigmoid(self.gate_proj(x)) * self.up_proj(x)"),
        low=1e4,
        high=math.inf,
        loud=True,
        explains="The original gated unit (Dauphin et al. 2017). A sigmoid is never more than 1; "
        "SiLU grows with its input, and the model counts on that.",
    ),
    sabotaged(
        "no-gate",
        gate("self.up_proj(x)"),
        low=1e4,
        high=math.inf,
        loud=True,
        explains="What the gate held back comes through, in every neuron of every layer. And the "
        "MLP is now linear.",
    ),
    sabotaged(
        "new-head",
        Edit(5, "self.lm_head.weight = self.token_embedding.weight", "pass"),
        Edit(37, "if model.lm_head.weight is not model.token_embedding.weight:", "if False:"),
        low=1e3,
        high=math.inf,
        loud=True,
        explains="The head is not tied, and the loader doesn't ask whether it got its numbers: it "
        "keeps the random ones that it started with. The perplexity is above that of guessing "
        "evenly, 49,152.",
    ),
    sabotaged(
        "first-layer-skipped",
        layers("self.blocks[1:]"),
        low=100,
        high=math.inf,
        loud=True,
        explains="The first layer makes of embeddings of size 0.1 a stream of size 2. All others "
        "were trained on that.",
    ),
    sabotaged(
        "middle-layer-skipped",
        layers("[*self.blocks[:15], *self.blocks[16:]]"),
        low=1.05,
        high=2,
        loud=False,
        explains="The residual stream goes on without it. A layer in the middle adds only a little "
        "to what is there.",
    ),
    sabotaged(
        "last-layer-skipped",
        layers("self.blocks[:-1]"),
        low=3,
        high=100,
        loud=True,
        explains="No layer comes after it to make up for it. Step 07 saw it take the largest "
        "number from 7,900 to 2,500 before the last norm reads the stream.",
    ),
)


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
    healthy=healthy,
    instruments=INSTRUMENTS,
    sabotages=SABOTAGES,
    vitals=vitals,
    sample=lambda patient: shown(patient.answer),
    watched="the answer",
    premise=f"read the same {TEXT['one']} tokens and answer the same question",
    chapter=37,
)


# ---------------------------------------------------------------- the table of everything


def run_all(seed: int) -> list[Outcome]:
    """Every sabotage on the longer text, with a line for each as it is done."""
    patient = healthy(seed, TEXT["--all"])
    outcomes = []
    with console.RunProgress(len(SABOTAGES)) as progress:
        well = examine(CASE, patient)
        for one in SABOTAGES:
            broken = examine(CASE, one.damage(patient))
            outcomes.append(Outcome(one, well, broken))
            progress.finish(one.name, f"perplexity {broken['perplexity'].text}")
    return outcomes


def summary(outcomes: list[Outcome]) -> Table:
    """For each damage: how many times the healthy perplexity, and the answer."""
    rows = [["healthy", "1", outcomes[0].healthy["answer"].text]]
    for outcome in outcomes:
        factor = times(outcome.broken["perplexity"].number)
        rows.append([outcome.sabotage.name, factor, outcome.broken["answer"].text])
    return Table(["damage", "times healthy", QUESTION], rows)


def times(factor: float) -> str:
    if math.isinf(factor):
        return "not a number"
    if factor < 10:
        return f"{factor:,.3f}"
    return f"{factor:,.0f}" if factor < 1e5 else f"{factor:.0e}"


def draw(outcomes: list[Outcome]):
    """A bar for each damage: how many times the healthy perplexity it costs."""
    figure = figures.new_figure(9, 1.4 + 0.28 * len(outcomes))
    axes = figure.subplots()
    ordered = sorted(outcomes, key=lambda outcome: -outcome.broken["perplexity"].number)
    factors = [outcome.broken["perplexity"].number for outcome in ordered]
    end = 10 * max(factor for factor in factors if math.isfinite(factor))
    colours = {False: figures.COLOURS[0], True: figures.COLOURS[1]}  # by loud
    for row, (outcome, factor) in enumerate(zip(ordered, factors)):
        length = max(min(factor, end), 1.004)  # a sliver for what does nothing
        colour = colours[outcome.sabotage.loud]
        bar = axes.barh(row, length - 1, left=1, color=colour, height=0.7)
        if math.isinf(factor):
            bar[0].set(hatch="//", edgecolor="w")
        axes.annotate(
            times(factor),
            (length, row),
            (4, 0),
            textcoords="offset points",
            va="center",
            size=8,
            color=colour,
        )
    axes.set_yticks(range(len(ordered)), [o.sabotage.name for o in ordered], fontsize=9)
    axes.set(xscale="log", xlim=(1, 300 * end), xlabel="times the healthy perplexity")
    axes.set_ylim(len(ordered) - 0.4, -0.6)
    axes.barh(-9, 0, color=colours[True], label=f"loud: it no longer says: {RIGHT}")
    axes.barh(-9, 0, color=colours[False], label="silent: it still does")
    axes.legend(frameon=False, loc="lower right", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def main(argv: list[str] | None = None) -> int:
    args = sabotage.parse(__doc__, argv)
    if args.list or args.sabotage or args.quiz or args.edit or args.answer is not None:
        return sabotage.main(CASE, __doc__, argv)
    folder = Path(__file__).parent / "outputs"
    files.claim_folder(folder)
    torch.set_num_threads(1)  # so the numbers don't depend on how many cores there are
    sabotage.list_all(CASE)
    say(f"\nNow on {TEXT['--all']:,} tokens of documentation, with the question: {QUESTION}")
    outcomes = run_all(args.seed or 1)
    table = summary(outcomes)
    wrong = [o.sabotage.name for o in outcomes if not o.came_true or o.tripped != o.sabotage.trips]
    ending = f"all {len(outcomes)} predictions came true"
    if wrong:
        ending = f"{len(wrong)} of {len(outcomes)} did NOT come true: {', '.join(wrong)}"
    say()
    say(table)
    say(f"\n{ending}", style="bold red" if wrong else "bold green")
    files.write_text(folder / "break_it.txt", console.log_text([table, ending]))
    files.write_bytes(folder / "perplexity.png", figures.png(draw(outcomes)))
    say(f"\nwritten to {folder}: break_it.txt, perplexity.png")
    return 1 if wrong else 0


if __name__ == "__main__":
    cli.run(main)
