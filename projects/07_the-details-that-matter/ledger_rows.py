"""The rows of the ledger: each a claim, its source, the command that tests it, and its numbers.

No number is typed in here. Each is read from a committed result: results.json or a log of a default
run, what a page printed (expected/step_NN.txt), a part of study.py, or a row of ledger_runs.py.
What a number comes to is said by ledger_rule.py, and ledger.py prints it all.
"""

import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, verdict
from shared.verdict import Interval, Verdict

HERE = Path(__file__).parent
RESULTS = HERE / "expected"  # of study.py and of ledger_runs.py
rule = chapters.load_file(HERE / "ledger_rule.py")
trained = chapters.load_file(HERE / "ledger_runs.py")
study = trained.study
study_page = chapters.load_file(HERE / "study.py")  # its parts, and what is said of them
Compared = rule.Compared
Group = rule.Group
Law = rule.Law
Measured = rule.Measured
Work = rule.Work


@dataclass(frozen=True)
class Row:
    """A claim and everything that is said of it, but for its numbers and the verdict."""

    title: str  # the claim in a few words
    claim: str  # the claim in a sentence
    source: str  # who says so, and where
    command: str  # what tests it, from this folder
    evidence: Callable[[], "rule.Evidence"]
    note: str  # how the published result differs in scale, and what to take from the row


# ---------------------------------------------------------------- where numbers come from


def expected(chapter: int, name: str) -> str:
    """The text of a committed file of a chapter."""
    return (chapters.chapter_folder(chapter) / "expected" / name).read_text(encoding="utf-8")


def numbers(text: str, pattern: str) -> list[float]:
    """The numbers that the pattern's groups find; ValueError if it is not found once."""
    found = re.findall(pattern, text, re.MULTILINE)
    if len(found) != 1:
        raise ValueError(f"{pattern!r} is found {len(found)} times")
    groups = found[0] if isinstance(found[0], tuple) else (found[0],)
    return [float(number.replace(",", "")) for number in groups]


def default_run(chapter: int, variant: str) -> tuple[Interval, str]:
    """The difference to the baseline in a chapter's default run, and what that said of it."""
    record = json.loads(expected(chapter, "results.json"))
    (of_variant,) = [one for one in record["variants"] if one["variant"] == variant]
    found = of_variant["difference"]
    return Interval(found["mean"], found["half_width"], found["n"]), found["verdict"]


SAID = {
    "lower": "lower",
    "higher": "higher",
    "equal": "equal",
    "can't tell": "can't tell",
    "no difference seen": "can't tell",  # as the older logs have it
}


def in_log(name: str, norm: str, mlp: str) -> tuple[Interval, str]:
    """The difference to the baseline in a log of this chapter's experiment, and its verdict."""
    text = expected(7, name)
    line = rf"^{norm} +{mlp} .* ([+-]\d\.\d+) ± (\d\.\d+) "
    mean, half = numbers(text, line)
    first, last = numbers(text, r"seeds (\d+) to (\d+)$")
    said = re.search(rf"{line}+({'|'.join(SAID)})", text, re.MULTILINE)[3]
    return Interval(mean, half, int(last - first) + 1), SAID[said]


def printed(page: int, label: str) -> Interval:
    """A difference in the table that a page of this chapter printed."""
    text = expected(7, f"step_{page:02d}.txt")
    mean, half = numbers(text, rf"^{re.escape(label)} +([+-]\d\.\d+) ± (\d\.\d+)")
    (n,) = numbers(text, r"over (\d+) seeds")
    return Interval(mean, half, int(n))


def real_model(damage: str) -> float:
    """The change of chapter 37's loss, in nats: the logarithm of its factor on the perplexity."""
    (factor,) = numbers(expected(37, "break_it.txt"), rf"^{damage} +([\d.,e+]+) ")
    return math.log(factor)


def tried(row: str, label: str) -> dict | None:
    """The models of a condition of ledger_runs.py; None while it is not complete."""
    found = trained.read_rows(trained.file_of(RESULTS / "ledger", row))
    return trained.outcomes(trained.ROWS[row][label], found)


def studied_losses(part: str) -> dict:
    """The committed losses of a part of study.py; none while there is no such file."""
    path = study.file_of(RESULTS / "study", part, 1)
    return study.read_rows(path) if path.exists() else {}


def studied(part: str) -> list[tuple]:
    """The conditions of a part of study.py, each with its models; None where not complete."""
    found = {trial: {"loss": loss} for trial, loss in studied_losses(part).items()}
    return [(one, trained.outcomes(one, found)) for one in study_page.PARTS[part].conditions]


# ---------------------------------------------------------------- differences

BASELINE = "LayerNorm+GELU"
SWIGLU = "LayerNorm+SwiGLU"
TINY = "d_model 64, 2 layers"
MAKE_TINY = f"{TINY}, 200 steps, rate 0.003, 6 seeds"
FALLING = f"{TINY}, 200 steps, rate from 0.002 to 0, 6 seeds"
LONGER = f"{TINY}, 400 steps, rate 0.003, 16 seeds"
BEST = "each at its own best rate"


def scope_of(setting, models: list) -> str:
    """Size, budget, rates and seeds of a comparison."""
    rates = " and ".join(f"{rate:g}" for rate in dict.fromkeys(model.rate for model in models))
    falls = ", falling to 0" if setting.schedule == "cosine" else ""
    n = len(models[0].by_seed)
    text = "" if setting.text == "docs, characters" else f", {setting.text}"
    steps = f"{setting.steps:,} steps"
    return f"d_model {setting.d_model}{text}, {steps}, rate {rates}{falls}, {n} seeds"


def minus(
    condition, models: dict | None, a: str, b: str, label: str, name: str = "loss"
) -> Measured:
    """What was found of model a minus that of b, at equal seeds."""
    if models is None:
        return Measured(label, None)
    found = trained.difference(models[a], models[b], name)
    scope = scope_of(condition.setting, [models[a], models[b]])
    gone = models[a].diverged + models[b].diverged
    return Measured(label, found, scope + f"; {gone} runs diverged" * (gone > 0))


def compared(row: str, label: str, a: str, b: str, says: str = "", name: str = "loss") -> Measured:
    """minus(), of a row of ledger_runs.py."""
    condition = trained.ROWS[row][label]
    return minus(condition, tried(row, label), a, b, says or label, name)


def study_group(part: str, varies: str, variant: str, label: Callable) -> Group:
    """How the variant differs from LayerNorm+GELU under each condition of a part of the study.

    The answers are the study's own, which judges all variants and conditions of a part together.
    """
    measured = [
        minus(condition, models, variant, BASELINE, label(condition.setting))
        for condition, models in studied(part)
        if variant in condition.variants
    ]
    if any(one.found is None for one in measured):
        return Group(varies, measured)
    rows = study_page.find(study_page.PARTS[part], studied_losses(part), 1).rows
    return Group(varies, measured, [row.judged for row in rows if row.variant == variant])


def study_groups(variant: str) -> list[Group]:
    """All parts of the study that compare the variant."""
    schedule = {"constant": "a constant rate", "cosine": "a rate that falls to 0"}
    start = {"0.02": "start with σ = 0.02", "fan_in": "start with σ = 1/√inputs"}
    text = {
        "docs, characters": "documentation, characters",
        "source, byte pairs": "source code, byte pairs",
    }
    return [
        study_group("rates", "the schedule", variant, lambda s: schedule[s.schedule]),
        study_group("budgets", "the budget", variant, lambda s: f"{s.steps:,} steps"),
        study_group("sizes", "the size", variant, lambda s: f"d_model {s.d_model}"),
        study_group("starts", "the start", variant, lambda s: start[s.start]),
        study_group("texts", "the text", variant, lambda s: text[s.text]),
    ]


def shared_rates(norm: str, mlp: str) -> Group:
    """make tiny, and runs like it with another rate, budget or start; each with its own answer."""
    variant = f"{norm}+{mlp}"
    runs = [
        ("one shared rate, constant", MAKE_TINY, default_run(7, variant)),
        ("one shared rate, falling", FALLING, in_log("falling-rate-6-seeds.txt", norm, mlp)),
        ("constant, 400 steps", LONGER, in_log("400-steps-16-seeds.txt", norm, mlp)),
        ("the same from 1/√inputs", LONGER, in_log("400-steps-16-seeds-fan-in.txt", norm, mlp)),
    ]
    measured = [Measured(label, found, scope) for label, scope, (found, _) in runs]
    return Group("the learning rate", measured, [Verdict(said) for _, _, (_, said) in runs])


# ---------------------------------------------------------------- norms


def norm_work() -> Work:
    page = chapters.load_step(7, 11)
    text = expected(7, "step_11.txt")
    by_hand, fused = numbers(text, r"line by line (\S+), PyTorch's own (\S+?)\.$")
    scope = f"{page.TOKENS} vectors of {page.D_MODEL}, forward, one core"
    # One kernel reads and writes each number once, and reads the gain, and LayerNorm's bias.
    moved = (2 * page.TOKENS + 1) / (2 * page.TOKENS + 2)
    return Work(
        at_most=0.6,
        operations=len(page.RMSNORM_OPERATIONS) / len(page.LAYERNORM_OPERATIONS),
        times=[
            Measured("time, written line by line", by_hand, scope, ".2f"),
            Measured("time of PyTorch's own", fused, scope, ".2f"),
        ],
        beside=[Measured("bytes moved by one kernel", moved, "exact, by counting", ".2f")],
    )


def needs_a_norm() -> Compared:
    text = expected(7, "step_05.txt")
    mean, half = numbers(text, r"^none .* ([+-]\d\.\d+) ± (\d\.\d+)$")
    n = len(re.findall(r"seed \d", text.splitlines()[2]))
    found = Interval(mean, half, n)
    scope = f"{TINY}, 60 steps, rate 0.003, {n} seeds"
    return Compared(("higher",), [Group("", [Measured("no norm - LayerNorm", found, scope)])])


def rmsnorm_as_good() -> Compared:
    return Compared(("equal",), [shared_rates("RMSNorm", "GELU"), *study_groups("RMSNorm+GELU")])


def recentring() -> Compared:
    pair = ("recentred", "RMSNorm+GELU")
    tiny = compared("recentring", "1,600 steps", *pair, "trained with it")
    early = compared("recentring", "400 steps", *pair, "the same after 400 steps")
    real = Measured(
        "put into a model trained without it",
        real_model("layernorm-for-rmsnorm"),
        "chapter 37's model, 135 million parameters, one text: no interval",
    )
    groups = [Group("whether the model is trained with it", [tiny, real])]
    return Compared(("equal",), groups, beside=[early])


def statistics() -> Compared:
    name = "bfloat16 statistics"
    tiny = compared("statistics", "400 steps", name, "RMSNorm+GELU", "trained, bfloat16")
    scope = "chapter 37's model, 135 million parameters, one text: no interval"
    real = Measured("real model, bfloat16", real_model("bfloat16-statistics"), scope)
    half = Measured("real model, float16", real_model("float16-statistics"), scope)
    return Compared(("higher",), [Group("the model", [tiny, real])], beside=[half])


# ---------------------------------------------------------------- MLPs


def swiglu_better() -> Compared:
    groups = [shared_rates("LayerNorm", "SwiGLU"), *study_groups("LayerNorm+SwiGLU")]
    return Compared(("lower",), groups)


def not_matched() -> Compared:
    wide = "SwiGLU, 4C inside"
    label = "SwiGLU with 4C - with 8/3 C"
    more = compared("width", "1,600 steps", wide, SWIGLU, label)
    beside = [
        compared("width", "1,600 steps", SWIGLU, BASELINE, "SwiGLU with 8/3 C - GELU"),
        compared("width", "1,600 steps", wide, BASELINE, "SwiGLU with 4C - GELU"),
        compared("width", "800 steps", wide, SWIGLU, f"{label}, after 800 steps"),
    ]
    return Compared(("lower",), [Group("the width", [more])], beside=beside)


# Log-perplexity after 65,536 steps (Shazeer 2020, table 1); the names are those of ledger_runs.py.
SHAZEER = {
    "ReLU": 1.997,
    "LayerNorm+GELU": 1.983,
    "SiLU": 1.994,
    "GLU": 1.982,
    "bilinear": 1.960,
    "GEGLU": 1.942,
    "LayerNorm+SwiGLU": 1.944,
    "ReGLU": 1.953,
}
GATED = ("GLU", "bilinear", "GEGLU", "LayerNorm+SwiGLU", "ReGLU")


def agreement(ours: dict[str, float], theirs: dict[str, float]) -> float:
    """Kendall's tau: 1 if all pairs are in the same order in both, -1 if all are reversed."""
    names = list(theirs)
    pairs = [(a, b) for i, a in enumerate(names) for b in names[:i]]
    same = sum((ours[a] < ours[b]) == (theirs[a] < theirs[b]) for a, b in pairs)
    return 2 * same / len(pairs) - 1


def order_of_activations() -> Compared:
    condition = trained.ROWS["activations"]["800 steps"]
    models = tried("activations", "800 steps")
    label = "agreement with the published order, 1: all pairs, 0: half of them"
    claimed = ("higher", "equal")
    border = {"border": 0.5, "delta": 0.01, "unit": "Kendall's tau"}
    if models is None:
        return Compared(claimed, [Group("", [Measured(label, None)])], **border)
    losses = {name: model.values() for name, model in models.items()}
    seeds = set.intersection(*(set(by_seed) for by_seed in losses.values()))
    taus = []
    gains = []
    for seed in sorted(seeds):
        ours = {name: losses[name][seed] for name in losses}
        taus.append(agreement(ours, SHAZEER))
        plain = [ours[name] for name in SHAZEER if name not in GATED]
        gated = [ours[name] for name in GATED]
        gains.append(sum(gated) / len(gated) - sum(plain) / len(plain))
    scope = f"{TINY}, {condition.setting.steps} steps, {BEST}, {len(seeds)} seeds"
    tau = Measured(label, verdict.interval(taus), scope, "+.2f")
    beside = [Measured("mean of the gated - mean of the plain", verdict.interval(gains), scope)]
    for name in (*SHAZEER, "LayerNorm+ReLU²"):
        if name != "ReLU":
            short = name.removeprefix("LayerNorm+")
            label = f"{short} - ReLU"
            if name in SHAZEER:
                label += f" (published: {SHAZEER[name] - SHAZEER['ReLU']:+.3f})"
            beside.append(minus(condition, models, name, "ReLU", label))
    return Compared(claimed, [Group("", [tau])], **border, beside=beside)


# ---------------------------------------------------------------- the start


def fresh_loss() -> Compared:
    text = expected(5, "step_08.txt")
    (small,) = numbers(text, r"^first loss, σ = 0\.02 +(\S+) ")
    (torchs,) = numbers(text, r"^torch's own start: d/√2 +(\S+) ")
    uniform = json.loads(expected(5, "results.json"))["uniform_loss"]
    scope = f"{TINY}, 95 characters, nothing trained"
    measured = [
        Measured("first loss - ln V, σ = 0.02", small - uniform, scope),
        Measured("first loss - ln V, as PyTorch starts it", torchs - uniform, scope),
    ]
    return Compared(("equal",), [Group("the start", measured)])


def deep_start() -> Compared:
    text = expected(5, "step_09.txt")
    shallow = numbers(text, r"^ +2 +(\S+) +(\S+)$")
    deep = numbers(text, r"^ +100 +(\S+) +(\S+)$")
    scope = "100 layers against 2, d_model 128, nothing trained"
    measured = [
        Measured("writers divided by √(2L)", deep[0] / shallow[0], scope, ".2f"),
        Measured("writers as all others", deep[1] / shallow[1], scope, ".2f"),
    ]
    groups = [Group("how the residual writers start", measured)]
    return Compared(("equal",), groups, border=1.0, delta=0.1, unit="times")


def tied() -> Compared:
    free = ("equal", "higher")  # of untied - tied
    measured = [
        compared("tied", "characters", "untied", BASELINE, "untied - tied, 95 characters"),
        compared("tied", "byte pairs", "untied", BASELINE, "untied - tied, 4,096 byte pairs"),
    ]
    early = "untied - tied, 95 characters, after 400 steps"
    label = "7 layers, tied - 2 layers, untied (about as many parameters)"
    beside = [
        compared("tied", "characters, 400 steps", "untied", BASELINE, early),
        compared("tied", "byte pairs", "tied, 7 layers", "untied", label),
    ]
    return Compared(free, [Group("the vocabulary", measured)], beside=beside)


def pre_norm() -> Compared:
    pre = "pre-norm, 12 layers"
    post = "post-norm, 12 layers"
    depths = [
        compared("pre-norm", "2 layers", "post-norm", BASELINE),
        compared("pre-norm", "12 layers", post, pre),
    ]
    rates = [
        compared("pre-norm", "12 layers", post, pre, f"{BEST}, with a warm-up"),
        compared("pre-norm", "12 layers, no warm-up", post, pre, f"{BEST}, without one"),
        compared("pre-norm", "12 layers, a high rate", post, pre, "both at 0.016"),
    ]
    return Compared(("higher",), [Group("the depth", depths), Group("the rate", rates)])


# ---------------------------------------------------------------- positions


def rope_faster() -> Compared:
    page = printed(12, "RoPE minus learned, at 32")
    measured = [
        Measured("100 steps", page, f"{TINY}, batches of 8, rate 0.003, 3 seeds"),
        compared("rope", "200 steps", "RoPE", BASELINE),
        compared("rope", "800 steps", "RoPE", BASELINE),
    ]
    return Compared(("lower",), [Group("the budget", measured)])


def rope_beyond() -> Compared:
    condition = trained.ROWS["rope"]["800 steps"]
    models = tried("rope", "800 steps")
    measured = []
    for length in trained.LENGTHS:
        label = f"loss at {length} - loss at 32"
        if models is None:
            measured.append(Measured(label, None))
            continue
        rope = models["RoPE"]
        found = verdict.paired_difference(rope.values(f"loss at {length}"), rope.values())
        measured.append(Measured(label, found, scope_of(condition.setting, [rope])))
    scope = f"{TINY}, 100 steps, batches of 8, rate 0.003, 3 seeds"
    beside = [
        Measured("the same after 100 steps, at 64", printed(12, "RoPE at 64 minus at 32"), scope),
        Measured("the same after 100 steps, at 128", printed(12, "RoPE at 128 minus at 32"), scope),
    ]
    return Compared(("equal", "lower"), [Group("the length", measured)], beside=beside)


def by_distance() -> Law:
    score, error, tolerance = numbers(
        expected(7, "step_08.txt"),
        r"^5,000 tokens on: same scores +(\S+) +\S+ +(\S+) +(\S+) +ok$",
    )
    shown = [("a score of", f"{score:.1f}"), ("5,000 tokens later it differs by", f"{error:g}")]
    return Law(error <= tolerance, shown)


# ---------------------------------------------------------------- experts

DENSE = "dense"
SPARSE = "top-2 + loss"
STARVED = "starved experts, "


def of_chapter_18(variant: str, value: Callable[[dict], float]) -> dict[int, float]:
    record = json.loads(expected(18, "results.json"))
    return {run["seed"]: value(run) for run in record["runs"] if run["variant"] == variant}


def same_compute() -> Work:
    def ratios(value: Callable[[dict], float]) -> list[float]:
        sparse = of_chapter_18(SPARSE, value)
        dense = of_chapter_18(DENSE, value)
        return [sparse[seed] / dense[seed] for seed in dense]

    active = ratios(lambda run: run["found"]["active"])
    ms = ratios(lambda run: run["ms_per_step"])
    scope = f"d_model 64, 2 of 8 experts, one core, {len(ms)} seeds"
    time = Measured("time of a training step", verdict.interval(ms), scope, ".2f")
    return Work(at_most=1.05, operations=active[0], times=[time])


def equal_active() -> Compared:
    measured = [
        compared("experts", "balanced", name, DENSE, f"{name} - dense")
        for name in trained.ROUTERS[1:]
    ]
    return Compared(("lower",), [Group("the router", measured)])


def starved(run: dict) -> float:
    """The part of the experts that get less than a tenth of their fair share of the choices."""
    load = run["load"]
    return sum(part * len(load) < 0.1 for part in load) / len(load)


def collapse() -> Compared:
    condition = trained.ROWS["experts"]["unbalanced"]
    models = tried("experts", "unbalanced")
    measured = []
    beside = []
    for name in trained.UNBALANCED:
        if models is None:
            measured.append(Measured(STARVED + name, None))
            continue
        runs = models[name].by_seed.values()
        scope = scope_of(condition.setting, [models[name]])
        part = verdict.interval([starved(run) for run in runs])
        most = verdict.interval([run["max_violation"] for run in runs])
        measured.append(Measured(STARVED + name, part, scope, ".2f"))
        beside.append(Measured(f"MaxVio, {name}", most, scope, ".2f"))
    groups = [Group("the number of experts", measured)]
    unit = "part of the experts"
    return Compared(("higher", "equal"), groups, border=0.5, delta=0.01, unit=unit, beside=beside)


def one_is_balance() -> Law:
    text = expected(18, "step_04.txt")
    loss, violation = numbers(text, r"^all logits zero +(\S+) .* (\S+)$")
    shown = [("balance loss with all logits 0", f"{loss:.2f}"), ("its MaxVio", f"{violation:.2f}")]
    return Law(not (loss == 1 and violation > 0), shown)


def top_1_stable() -> Compared:
    def beside(other: str, says: str, name: str) -> Measured:
        return compared("experts", "balanced", "Switch + loss", other, says, name)

    measured = [
        beside(SPARSE, "largest rise of the training loss, top-1 - top-2", "rise"),
        beside(DENSE, "largest rise of the training loss, top-1 - dense", "rise"),
    ]
    loss = beside(SPARSE, "validation loss, top-1 - top-2", "loss")
    groups = [Group("the model beside it", measured)]
    return Compared(("equal", "lower"), groups, beside=[loss])


def expert_choice() -> Law:
    text = expected(18, "step_06.txt")
    (leaks,) = numbers(text, r"^expert choice +(\d+)$")
    pairs = max(map(int, re.findall(r" 1 to (\d+) ", text)))
    (violation,) = numbers(expected(18, "run_log.txt"), r"^expert choice +(0\.\d+) ")
    shown = [
        ("MaxVio", f"{violation:.2f}"),
        ("pairs of an output and a later token that changes it", f"{leaks:.0f} of {pairs}"),
    ]
    return Law(violation == 0 and leaks == 0, shown)


# ---------------------------------------------------------------- the optimizer


def decay() -> Compared:
    label = "decay of all - of matrices alone"
    one = compared("decay", "400 steps", "decay of all", "decay of matrices", label)
    return Compared(("higher", "lower"), [Group("", [one])])


def clipping() -> Compared:
    measured = [
        compared("clipping", "own best rates", "not clipped", BASELINE, BEST),
        compared("clipping", "a high rate", "not clipped", BASELINE, "both at 0.016"),
    ]
    return Compared(("higher",), [Group("the rate", measured)])


# ---------------------------------------------------------------- the rows

TINY_COMMANDS = """python build.py --tiny
python build.py --set learning_rate=2e-3 --set warmup=10 --set final_rate=0
python build.py --steps 400 --seeds 16
python build.py --steps 400 --seeds 16 --set init_std=fan_in"""
EXPERTS = "python ledger_runs.py --row experts"
CHAPTER_5 = "../05_your-gpt-from-a-blank-file"
CHAPTER_18 = "../18_mixture-of-experts"
CHAPTER_37 = "../37_the-details-in-a-real-model"

ROWS = (
    Row(
        "RMSNorm is half the work",
        "RMSNorm computes about half of what LayerNorm computes, and so is faster.",
        "Zhang & Sennrich 2019, abstract: comparable results in 7 % to 64 % less time",
        "python step_11_what-a-norm-costs.py",
        norm_work,
        "The paper's times are of whole models whose norms were written line by line; so written "
        "RMSNorm wins here too. PyTorch's LayerNorm is one kernel, which reads and writes each "
        "number once, and no norm can move fewer bytes than that. Count what is moved, not what "
        "is computed.",
    ),
    Row(
        "A block needs a norm",
        "Without norms a transformer learns badly.",
        "Ba et al. 2016 introduced LayerNorm; this chapter's step 05",
        "python step_05_train-the-norms-side-by-side.py",
        needs_a_norm,
        "Two layers, which is the easy case: the deeper a model, the more depends on its norms.",
    ),
    Row(
        "RMSNorm is as good as LayerNorm",
        "With RMSNorm a model ends at the same loss as with LayerNorm.",
        "Zhang & Sennrich 2019, abstract",
        f"{TINY_COMMANDS}\npython study.py",
        rmsnorm_as_good,
        "Equal is more than no difference seen: the whole interval lies within 0.02 nats of 0.",
    ),
    Row(
        "Recentring adds little",
        "Taking the mean out, which LayerNorm does and RMSNorm doesn't, changes next to nothing.",
        "Zhang & Sennrich 2019, abstract: re-centering is dispensable",
        f"python ledger_runs.py --row recentring\n"
        f"python {CHAPTER_37}/break_it.py --sabotage layernorm-for-rmsnorm",
        recentring,
        "Dispensable is said of training. A model that was trained without it has learned to use "
        "the mean a little; exchange the norm afterwards, and that is lost. "
        "Judged after 1,600 steps, where the seeds lie nearer to each other than after 400.",
    ),
    Row(
        "SwiGLU beats GELU",
        "At equal parameters SwiGLU ends at a lower loss than GELU.",
        "Shazeer 2020, table 1: 1.944 against 1.983 after 65,536 steps",
        f"{TINY_COMMANDS}\npython study.py",
        swiglu_better,
        "The paper's models have 12 layers of 768 in encoder and decoder, some two thousand times "
        "these parameters, all trained with one optimizer and one schedule. Here SwiGLU bears a "
        "lower rate than GELU, so that at one shared rate the comparison measures the rate. What "
        "holds it down is its start: at σ = 0.02 its output is a product of two small numbers. Let "
        "the gate alone, up alone, or attention alone start at 1/√inputs, or warm up for a quarter "
        "of the steps, and it bears two times the rate and ends much lower "
        "(expected/study/why.txt; three seeds, 400 steps).",
    ),
    Row(
        "A wider SwiGLU is no fair winner",
        "With 4C inside, as in GELU's MLP, SwiGLU has half as many weights again in its MLP, and "
        "part of its gain is theirs.",
        "Shazeer 2020, section 2, narrows it to 2/3 for that reason",
        "python ledger_runs.py --row width",
        not_matched,
        "The lines that are not judged say how far the matched and the unmatched SwiGLU lie from "
        "GELU, and what 800 steps said, where the seeds still lie too far apart.",
    ),
    Row(
        "The order of the activations",
        "GEGLU and SwiGLU are the best, then ReGLU, bilinear and GLU; GELU, SiLU and ReLU follow. "
        "Taken to hold if at least three of four pairs have that order here.",
        "Shazeer 2020, table 1; ReLU² from So et al. 2021",
        "python ledger_runs.py --row activations",
        order_of_activations,
        "The paper's losses differ by 0.055 at most, and its own spread between runs is 0.003 to "
        "0.010. Each activation stands here at its own best rate.",
    ),
    Row(
        "Norm statistics need float32",
        "Under bfloat16 a norm must square and average in float32.",
        "PyTorch's autocast runs layer_norm in float32; most open models' RMSNorm converts first",
        f"python ledger_runs.py --row statistics\n"
        f"python {CHAPTER_37}/break_it.py --sabotage bfloat16-statistics\n"
        f"python {CHAPTER_37}/break_it.py --sabotage float16-statistics",
        statistics,
        "The statistics alone are in bfloat16 here, all else in float32. bfloat16 has float32's "
        "range, and two or three digits do for a mean of squares. float16 is another matter: "
        "there a square beyond 65,504 is infinite.",
    ),
    Row(
        "A fresh model's loss is ln V",
        "Before training a model finds all V tokens equally likely, so its loss is ln V.",
        "Karpathy 2019, A Recipe for Training Neural Networks: verify the loss at the start",
        f"python {CHAPTER_5}/step_08_start-small.py",
        fresh_loss,
        "It is ln V + d·σ²/2 if all matrices start with a small σ. PyTorch's own start has σ = 1 "
        "in the embedding, and a tied head reads that as certainty.",
    ),
    Row(
        "A deep model starts as stable as a shallow one",
        "However many layers a model has, its residual stream has the same size at the start.",
        "Radford et al. 2019, section 2.3, on dividing by the root of the number of writers",
        f"python {CHAPTER_5}/step_09_scale-the-residual-writers.py",
        deep_start,
        "The number is the growth of the stream through 100 layers divided by that through 2.",
    ),
    Row(
        "Tied embeddings cost nothing",
        "One matrix for embedding and head is as good as two.",
        "Press & Wolf 2017; Hugging Face 2025, The Smol Training Playbook: at about 1 billion "
        "parameters, more layers were the better use of what tying saves",
        "python ledger_runs.py --row tied",
        tied,
        "With 95 characters the second matrix is a twentieth of the model, with 4,096 byte pairs "
        "it is larger than all blocks together. The last line spends its numbers on five layers "
        "more instead.",
    ),
    Row(
        "Pre-norm trains deeper, and at a higher rate",
        "With the norm behind the +, deep models and high rates fail or end higher.",
        "Xiong et al. 2020, section 3, on post-norm without a warm-up",
        "python ledger_runs.py --row pre-norm",
        pre_norm,
        "All differences are post-norm minus pre-norm. Where the rate falls, 5 % of the steps are "
        "a warm-up; the paper's point is that post-norm needs one. It trains 6 layers of 512 for "
        "translation, and BERT; 12 layers of 64 after 200 steps are a small part of that. Step 13 "
        "shows the gradients at the start: the first layers of post-norm don't starve, and what "
        "differs is the last layer.",
    ),
    Row(
        "RoPE learns faster than learned positions",
        "At equal steps a model with RoPE ends lower than one with learned positions.",
        "Su et al. 2021, section 4.2",
        "python step_12_beyond-the-trained-length.py\npython ledger_runs.py --row rope",
        rope_faster,
        "The paper compares with BERT's learned positions in windows of 512; here they are 32.",
    ),
    Row(
        "RoPE carries beyond the trained length",
        "Trained on short windows, a model with RoPE reads longer ones as well.",
        "Su et al. 2021, abstract: flexible in sequence length; Press et al. 2022 found that it "
        "does not carry far",
        "python ledger_runs.py --row rope\npython step_12_beyond-the-trained-length.py",
        rope_beyond,
        "Learned positions can't read a longer window at all. RoPE can, and what counts is the "
        "loss there.",
    ),
    Row(
        "Scores depend on distance alone",
        "Under RoPE, moving a query and a key by equally many positions leaves their score.",
        "Su et al. 2021, section 3.2",
        "python step_08_replace-learned-positional-embeddings-with-rope.py",
        by_distance,
        "Exact but for the rounding of float32.",
    ),
    Row(
        "More parameters at the same compute",
        "A layer of experts holds more parameters, and a token costs no more than before.",
        "Shazeer et al. 2017, abstract; Fedus et al. 2022",
        f"python {CHAPTER_18}/build.py --tiny",
        same_compute,
        "One large matrix product becomes several small ones. Large models on many devices lose "
        "less by that, and pay for sending tokens about instead.",
    ),
    Row(
        "Experts end lower at equal active parameters",
        "A sparse model ends at a lower loss than a dense one with as many active parameters.",
        "Shazeer et al. 2017; Fedus et al. 2022, section 3",
        EXPERTS,
        equal_active,
        "Theirs have up to thousands of experts and train on billions of tokens; here it is 8 "
        "experts, or 4 for the Switch, and under half a million.",
    ),
    Row(
        "Without a balance loss the router collapses",
        "Left alone, a router sends nearly all tokens to a few experts. Taken to hold if half of "
        "the experts get less than a tenth of their fair share.",
        "Shazeer et al. 2017, section 4: the imbalance reinforces itself",
        EXPERTS,
        collapse,
        "MaxVio is the busiest expert's load over the mean load, minus 1. The Switch has 4 "
        "experts, the first top-2 has 8; the paper's have up to thousands.",
    ),
    Row(
        "An auxiliary loss of 1 means balance",
        "The balance loss is at its least, 1, where all experts get equally many tokens; so a "
        "loss of 1 shows balance.",
        "Fedus et al. 2022, section 2.2, equation 4: least under a uniform distribution",
        f"python {CHAPTER_18}/step_04_balance-the-load-with-an-auxiliary-loss.py",
        one_is_balance,
        "Balance gives 1, but 1 doesn't give balance. Look at the loads.",
    ),
    Row(
        "Top-1 trains stably",
        "A router that takes one expert a token trains as smoothly as one that takes two.",
        "Fedus et al. 2022, sections 2.1 and 2.4",
        EXPERTS,
        top_1_stable,
        "Stable is measured as the largest amount by which the training loss, in means of ten "
        "steps, ever rises above its lowest so far. What the paper steadies is large models in "
        "bfloat16, which is not tried here. Whether top-1 ends as low is another question: see "
        "the last line.",
    ),
    Row(
        "Expert choice balances for free",
        "If experts choose tokens, all loads are equal, and nothing is lost.",
        "Zhou et al. 2022, who also say that it doesn't suit the writing of text",
        f"python {CHAPTER_18}/step_06_let-experts-choose-tokens.py",
        expert_choice,
        "Balance it has. But an output depends on later tokens, so a language model's loss is no "
        "longer honest, and it can't write.",
    ),
    Row(
        "Weight decay on gains and embeddings matters",
        "Gains, biases and embeddings must be left out of weight decay.",
        "Radford et al. 2018, section 4.1: decay on all non-bias and non-gain weights",
        "python ledger_runs.py --row decay",
        decay,
        "A decay of 0.1, ten times that of the other rows. Which of them it is that should be "
        "spared, the gains, the biases or the embeddings, is not asked here.",
    ),
    Row(
        "Gradient clipping matters",
        "Without clipping the gradient's norm, training ends higher.",
        "Pascanu et al. 2013; Brown et al. 2020, appendix B: clipped at 1.0",
        "python ledger_runs.py --row clipping",
        clipping,
        "Clipping is for the rare step with a huge gradient. Small models on clean text have few.",
    ),
)
