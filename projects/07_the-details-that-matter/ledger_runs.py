"""What is trained for the ledger: a small experiment for each claim that nothing else answers.

As in study.py, every model is trained at several rates, and compared at its own best rate on seeds
that had no part in choosing it. A model here is a chapter's build with fields of its config changed
or lines of its code exchanged.

    python ledger_runs.py                     all of them: some forty minutes on two idle cores
    python ledger_runs.py --row recentring    one of them
    python ledger_runs.py --list              their names, and what each changes
    python ledger_runs.py --report            train nothing; say what is committed

Each run is kept as it ends. Ctrl-C loses the runs under way, and the same command goes on from
there.
"""

import argparse
import ast
import functools
import hashlib
import inspect
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, console, files, runs, training, verdict
from shared.chapters import Edit
from shared.console import Table

import torch
import torch.nn as nn

study = chapters.load_file(Path(__file__).with_name("study_runs.py"))
Condition = study.Condition
Setting = study.Setting
Trial = study.Trial

FIRST_SEED = 1  # seeds 1 to 3 choose rates, those from 4 on judge

# ---------------------------------------------------------------- models


@dataclass(frozen=True)
class Model:
    """A chapter's build, what is changed in it, and in how it is trained."""

    changes: dict[str, Any] = field(default_factory=dict)  # fields of the build's config
    edits: tuple[Edit, ...] = ()  # lines of the build, old and new
    chapter: int = 7
    training: dict[str, Any] = field(default_factory=dict)  # fields of TrainingSettings
    decayed: str | None = None  # which parameters shrink, by DECAY; None: all, by AdamW's 0.01

    @functools.cached_property
    def build(self) -> ModuleType:
        return edited_build(self.chapter, self.edits)

    @property
    def experiment(self) -> runs.Experiment:
        return getattr(self.build, {7: "FourWay", 18: "SparseOrDense"}[self.chapter])()

    def config(self, setting: Setting) -> Any:
        """The build's own config, at this setting's size."""
        default = self.build.PRESETS["tiny"].model
        return replace(default, d_model=setting.d_model, **self.changes)


edited_build = functools.lru_cache(chapters.edited_build)

DECAY = 0.1  # as in GPT-3 and Llama; AdamW here has 0.01
GELU = {"norm_type": "layernorm", "mlp_type": "gelu"}
SWIGLU = {"norm_type": "layernorm", "mlp_type": "swiglu"}
RMSNORM = {"norm_type": "rmsnorm", "mlp_type": "gelu"}
STATISTIC = "scale = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + self.eps)"
IN_BFLOAT16 = "scale = torch.rsqrt((narrow * narrow).mean(-1, keepdim=True) + self.eps).float()"
GATE = "F.silu(self.gate_proj(x)) * self.up_proj(x)"
PRE_NORM = "x = x + self.attn(self.norm1(x))\nx = x + self.mlp(self.norm2(x))"
POST_NORM = "x = self.norm1(x + self.attn(x))\nx = self.norm2(x + self.mlp(x))"
TIE = "self.lm_head.weight = self.token_embedding.weight"


def plain(activation: str) -> Model:
    """LayerNorm and a plain MLP with this activation in GELU's place."""
    return Model(GELU, (Edit(7, '"gelu": F.gelu', f'"gelu": {activation}'),))


def gated(gate: str) -> Model:
    """LayerNorm and SwiGLU with another gate in SiLU's place."""
    return Model(SWIGLU, (Edit(7, GATE, f"{gate} * self.up_proj(x)"),))


def layers(n_layers: int, *edits: Edit) -> Model:
    return Model(GELU | {"n_layers": n_layers}, edits)


def router(**changes) -> Model:
    return Model(changes, chapter=18)


MODELS = {
    **{name: Model(changes) for name, changes in study.VARIANTS.items()},
    "recentred": Model(
        RMSNORM, (Edit(7, STATISTIC, f"wide = wide - wide.mean(-1, keepdim=True)\n{STATISTIC}"),)
    ),
    "bfloat16 statistics": Model(
        RMSNORM, (Edit(7, STATISTIC, f"narrow = wide.bfloat16()\n{IN_BFLOAT16}"),)
    ),
    "ReLU": plain("F.relu"),
    "SiLU": plain("F.silu"),
    "GLU": gated("F.sigmoid(self.gate_proj(x))"),
    "bilinear": gated("self.gate_proj(x)"),
    "ReGLU": gated("F.relu(self.gate_proj(x))"),
    "GEGLU": gated("F.gelu(self.gate_proj(x))"),
    "SwiGLU, 4C inside": Model(SWIGLU | {"d_hidden": 256}),
    "untied": Model(GELU, (Edit(5, TIE, "pass"),)),
    "tied, 7 layers": layers(7),
    "post-norm": layers(2, Edit(5, PRE_NORM, POST_NORM)),
    "pre-norm, 12 layers": layers(12),
    "post-norm, 12 layers": layers(12, Edit(5, PRE_NORM, POST_NORM)),
    "RoPE": Model(GELU | {"position_type": "rope"}),
    "dense": router(mlp_type="swiglu", d_hidden=170),
    "top-2 + loss": router(),
    "top-2 alone": router(balance_weight=0.0),
    "top-2 + bias": router(router_type="bias", balance_weight=0.0),
    "top-2 of 16 alone": router(n_experts=16, balance_weight=0.0),
    "top-2 of 32 alone": router(n_experts=32, balance_weight=0.0),
    "Switch + loss": router(router_type="switch", top_k=1, n_experts=4, d_hidden=170),
    "Switch alone": router(
        router_type="switch", top_k=1, n_experts=4, d_hidden=170, balance_weight=0.0
    ),
    "decay of all": Model(GELU, decayed=""),
    "decay of matrices": Model(GELU, decayed=r"\.(qkv|proj|fc)\.weight$"),
    "not clipped": Model(GELU, training={"clip": 1e9}),
}


def decay_by_hand(decayed: str, settings: training.TrainingSettings) -> Callable:
    """What is called after each step: shrink the parameters whose name holds `decayed`.

    AdamW does the same, to all of them, just before its step.
    """
    steps = itertools.count()

    @torch.no_grad()
    def after_step(model: nn.Module, told: Any) -> None:
        rate = training.learning_rate(next(steps), settings)
        for name, p in model.named_parameters():
            if re.search(decayed, name):
                p.mul_(1 - rate * DECAY)

    return after_step


# ---------------------------------------------------------------- which models are compared

GELU_NAME = "LayerNorm+GELU"
SWIGLU_NAME = "LayerNorm+SwiGLU"
RMSNORM_NAME = "RMSNorm+GELU"
ACTIVATIONS = ("ReLU", "SiLU", "LayerNorm+ReLU²", "GLU", "bilinear", "ReGLU", "GEGLU", SWIGLU_NAME)
ROUTERS = ("dense", "top-2 + loss", "top-2 alone", "top-2 + bias", "Switch + loss")
UNBALANCED = ("Switch alone", "top-2 alone", "top-2 of 16 alone", "top-2 of 32 alone")
BYTE_PAIRS = "source, byte pairs"
HIGH_RATE = (1.6e-2,)


def pair(steps: int, *variants: str, judging: int = 6, **setting) -> Condition:
    return Condition(Setting(steps=steps, **setting), variants, judging=judging, fine=False)


def at_high_rate(steps: int, *variants: str) -> Condition:
    """A comparison at one shared rate, some four times that which suits these models."""
    return Condition(Setting(steps=steps), variants, HIGH_RATE, choosing=0, fine=False)


# By row of the ledger, and in it by what sets the conditions apart. The first model of each is the
# baseline.
ROWS = {
    "experts": {
        "balanced": pair(400, *ROUTERS, judging=10),
        "unbalanced": pair(400, *UNBALANCED),
    },
    "decay": {"400 steps": pair(400, "decay of all", "decay of matrices")},
    "recentring": {
        "400 steps": pair(400, RMSNORM_NAME, "recentred"),
        "1,600 steps": pair(1600, RMSNORM_NAME, "recentred"),
    },
    "statistics": {"400 steps": pair(400, RMSNORM_NAME, "bfloat16 statistics")},
    "pre-norm": {
        "2 layers": pair(200, GELU_NAME, "post-norm"),
        "12 layers": pair(200, "pre-norm, 12 layers", "post-norm, 12 layers"),
        "12 layers, no warm-up": pair(
            200, "pre-norm, 12 layers", "post-norm, 12 layers", schedule="constant"
        ),
        "12 layers, a high rate": at_high_rate(200, "pre-norm, 12 layers", "post-norm, 12 layers"),
    },
    "rope": {
        "200 steps": pair(200, GELU_NAME, "RoPE"),
        "800 steps": pair(800, GELU_NAME, "RoPE"),
    },
    "width": {
        "800 steps": pair(800, GELU_NAME, SWIGLU_NAME, "SwiGLU, 4C inside"),
        "1,600 steps": pair(1600, GELU_NAME, SWIGLU_NAME, "SwiGLU, 4C inside"),
    },
    "activations": {"800 steps": pair(800, GELU_NAME, *ACTIVATIONS)},
    "clipping": {
        "own best rates": pair(400, GELU_NAME, "not clipped"),
        "a high rate": at_high_rate(400, GELU_NAME, "not clipped"),
    },
    "tied": {
        "characters, 400 steps": pair(400, GELU_NAME, "untied"),
        "characters": pair(1600, GELU_NAME, "untied"),
        "byte pairs": pair(400, GELU_NAME, "untied", "tied, 7 layers", judging=4, text=BYTE_PAIRS),
    },
}

# ---------------------------------------------------------------- one run

LENGTHS = (64, 128, 256)  # of windows that a model trained on 32 is given
WINDOW = 10  # steps of which the training loss is averaged


def train_trial(context: "Context", trial: Trial, report: Callable, worker: int = 0) -> dict:
    """Train one model in this process, look inside, and keep what was found."""
    corpus = context.corpora[trial.setting.text]
    model_of = MODELS[trial.setting.variant]
    experiment = model_of.experiment
    model = experiment.build_model(model_of.config(trial.setting), corpus.vocab_size, trial.seed)
    settings = replace(study.training_settings(trial), **model_of.training)
    after_step = experiment.after_step
    if model_of.decayed is not None:
        settings = replace(settings, weight_decay=0.0)
        after_step = decay_by_hand(model_of.decayed, settings)
    try:
        history = training.train(
            model,
            corpus,
            settings,
            trial.seed,
            training_loss=experiment.training_loss,
            after_step=after_step,
        )
        found = {
            "loss": history.validation_loss,
            "rise": largest_rise(history.losses),
            **look_inside(model_of, model, corpus, trial.seed, settings),
        }
    except training.NonFiniteLoss:
        found = {"loss": None}
    context.store.write(trial, found)
    return found


def largest_rise(losses: list[float]) -> float:
    """How far the training loss, in means of WINDOW steps, ever rose above its lowest so far."""
    means = [sum(losses[i : i + WINDOW]) / WINDOW for i in range(0, len(losses), WINDOW)]
    lowest = list(itertools.accumulate(means, min))
    return max(mean - low for mean, low in zip(means, lowest, strict=True))


def look_inside(
    model_of: Model, model: nn.Module, corpus: Any, seed: int, settings: training.TrainingSettings
) -> dict:
    """Of experts, how their loads differ; of RoPE, the loss in longer windows."""
    found = {}
    if model_of.chapter == 18:
        inside = model_of.experiment.inspect(model, corpus, seed)
        for name in ("max_violation", "dead", "dropped", "load"):  # the load of the last layer
            if name in inside:
                found[name] = inside[name]
    if getattr(model.cfg, "position_type", "") == "rope":
        for length in LENGTHS:
            config = replace(model.cfg, block_size=length)
            longer = type(model)(config, corpus.vocab_size)
            longer.load_state_dict(model.state_dict())
            found[f"loss at {length}"] = training.evaluate(longer, corpus.validation, settings)
    return found


# ---------------------------------------------------------------- where runs are kept

Found = dict[Trial, dict]


@functools.cache
def code_hash() -> str:
    """A hash of the code that all runs depend on; what a model changes is hashed with its runs."""
    mine = [Model, decay_by_hand, train_trial, largest_rise, look_inside, study.training_settings]
    trees = [ast.dump(ast.parse(inspect.getsource(one))) for one in (*mine, study.load_text)]
    builds = [runs.source_hash(str(chapters.build_file(chapter))) for chapter in (7, 18)]
    tables = [study.SCHEDULES, study.TEXTS, study.VALIDATION, study.PIECE, DECAY, LENGTHS, WINDOW]
    parts = [torch.__version__, *trees, *builds, repr(tables)]
    return hashlib.sha256("\n".join(parts).encode("utf-8")).hexdigest()


@dataclass(frozen=True)
class Store:
    """Finished runs, one small file each."""

    folder: Path
    code: str = field(default_factory=code_hash)

    def path(self, trial: Trial) -> Path:
        model = asdict(MODELS[trial.setting.variant])
        key = runs.sha256_of({"trial": asdict(trial), "model": model, "code": self.code})[:16]
        return self.folder / f"{key}.json"

    def write(self, trial: Trial, found: dict) -> None:
        files.write_json(self.path(trial), {"trial": asdict(trial), "found": found})

    def read(self, trial: Trial) -> Found:
        """What the run found, if it is there. UserError for a file that is damaged."""
        path = self.path(trial)
        if not path.exists():
            return self.of_study(trial)
        record = files.read_json(path, "a stored run")
        if not isinstance(record, dict) or record.get("trial") != asdict(trial):
            raise files.damaged(path, "the run that its name says")
        return {trial: record["found"]}

    def of_study(self, trial: Trial) -> Found:
        """The loss of a run that study.py trains too, if it has."""
        if trial.setting.variant not in study.VARIANTS:
            return {}
        store = study.Store(self.folder.parents[1] / "study" / "runs")
        return {trial: {"loss": loss} for trial, loss in store.read(trial).items()}


@dataclass(frozen=True)
class Context:
    """What every run needs; it travels to each worker once."""

    store: Store
    corpora: dict[str, Any]


# ---------------------------------------------------------------- training what is missing


def losses_of(found: Found) -> study.Losses:
    return {trial: one["loss"] for trial, one in found.items()}


def wanted(condition: Condition, found: Found) -> list[Trial]:
    """The runs that are known to be needed by now and are not there."""
    if condition.choosing:
        return study.wanted(condition, losses_of(found), FIRST_SEED)
    (rate,) = condition.rates
    seeds = study.verdict_seeds(condition, FIRST_SEED)
    trials = [Trial(condition.of(v), rate, seed) for v in condition.variants for seed in seeds]
    return [trial for trial in trials if trial not in found]


def known(conditions: list[Condition], read: Callable[[Trial], Found]) -> Found:
    """Every run that the conditions lead to and that `read` has."""
    found: Found = {}
    while True:
        before = len(found)
        for condition in conditions:
            for trial in wanted(condition, found):
                found |= read(trial)
        if len(found) == before:
            return found


def train_missing(conditions: list[Condition], store: Store, workers: int) -> Iterator[tuple]:
    """Train what is missing; yield each run and what was found as it ends."""
    found = known(conditions, store.read)
    while True:
        missing = {trial: None for c in conditions for trial in wanted(c, found)}
        missing = sorted(missing, key=cost, reverse=True)  # the longest first
        if not missing:
            return
        corpora = {text: study.load_text(text) for text in {t.setting.text for t in missing}}
        context = Context(store, corpora)
        jobs = runs.run_jobs(train_trial, context, missing, min(workers, len(missing)), print)
        for trial, one in jobs:
            if isinstance(one, runs.WorkerDied):
                raise RuntimeError(f"a worker was killed (exit code {one.exit_code})")
            found[trial] = one
            yield trial, one


def cost(trial: Trial) -> float:
    """How long a run takes, roughly: in layers times steps."""
    model = MODELS[trial.setting.variant]
    per_step = model.changes.get("n_layers", 2) + model.changes.get("n_experts", 2) / 4
    return trial.setting.steps * (per_step + 5 * (trial.setting.text == BYTE_PAIRS))


# ---------------------------------------------------------------- results as files

COLUMNS = [*study.COLUMNS[:-1], "found"]


def file_of(folder: Path, row: str) -> Path:
    return folder / f"{row}.json"


def write_rows(path: Path, found: Found) -> None:
    """The runs of a row of the ledger, one a line."""
    rows = [[*asdict(t.setting).values(), t.rate, t.seed, short(one)] for t, one in found.items()]
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in sorted(rows, key=str))
    columns = json.dumps(COLUMNS)
    files.write_text(path, f'{{"columns": {columns},\n"runs": [\n{lines}\n]}}\n')


def short(found: dict) -> dict:
    """The same with six digits behind the point."""
    return json.loads(json.dumps(found), parse_float=lambda text: round(float(text), 6))


def read_rows(path: Path) -> Found:
    """What write_rows() wrote; nothing if there is no such file. UserError if it is damaged."""
    if not path.exists():
        return {}
    content = files.read_json(path, "the runs of a row")
    try:
        if content["columns"] != COLUMNS:
            raise ValueError
        return {Trial(Setting(*row[:-3]), row[-3], row[-2]): row[-1] for row in content["runs"]}
    except (KeyError, TypeError, ValueError):
        raise files.damaged(path, "the runs of a row") from None


# ---------------------------------------------------------------- what came out


@dataclass(frozen=True)
class Outcome:
    """A model of a condition: the rate that was chosen for it, and what its runs found by seed."""

    rate: float
    by_seed: dict[int, dict]

    def values(self, name: str = "loss") -> dict[int, float]:
        """One of the things found, by seed; without the runs that diverged."""
        return {seed: one[name] for seed, one in self.by_seed.items() if one.get(name) is not None}

    @property
    def diverged(self) -> int:
        return sum(one["loss"] is None for one in self.by_seed.values())


def outcomes(condition: Condition, found: Found) -> dict[str, Outcome] | None:
    """By model, what the condition's runs found; None while a run is missing."""
    if wanted(condition, found):
        return None
    seeds = study.verdict_seeds(condition, FIRST_SEED)
    result = {}
    for variant in condition.variants:
        rate = condition.rates[0]
        if condition.choosing:
            rate = study.best_rate(condition, variant, losses_of(found), FIRST_SEED)
        trials = [Trial(condition.of(variant), rate, seed) for seed in seeds]
        result[variant] = Outcome(rate, {trial.seed: found[trial] for trial in trials})
    return result


def difference(a: Outcome, b: Outcome, name: str = "loss") -> verdict.Interval | None:
    """What was found of a minus that of b, seed by seed."""
    return verdict.paired_difference(a.values(name), b.values(name))


def table_of(condition: Condition, found: Found) -> Table:
    """The models of a condition: rate, loss, and the difference to the first."""
    result = outcomes(condition, found)
    first = condition.variants[0]
    losses = {name: outcome.values() for name, outcome in result.items()}
    said = verdict.against(first, losses)
    rows = []
    for name, outcome in result.items():
        mean = verdict.interval(list(outcome.values().values())).mean
        cells = ["-", "baseline"] if name == first else ["-", "no pair"]
        if name in said:
            cells = [str(said[name][0]), said[name][1].said]
        rows.append([name, f"{outcome.rate:g}", f"{mean:.3f}", *cells])
    return Table(["model", "rate", "valid", "difference", "verdict"], rows)


def listing(rows: dict[str, dict[str, Condition]]) -> str:
    """Each row's models, and the lines that each exchanges."""
    lines = []
    for row, conditions in rows.items():
        lines.append(row)
        names = dict.fromkeys(name for c in conditions.values() for name in c.variants)
        for name in names:
            model = MODELS[name]
            what = {**model.changes, **model.training}
            if model.decayed is not None:
                what["decayed"] = model.decayed or "all"
            fields = ", ".join(f"{key}={value}" for key, value in what.items())
            lines.append(f"    {name}: chapter {model.chapter}; {fields or 'as it is'}")
            for edit in model.edits:
                lines += [f"        - {line}" for line in edit.old.split("\n")]
                lines += [f"        + {line}" for line in edit.new.split("\n")]
    return "\n".join(lines)


# ---------------------------------------------------------------- the command


def parse(argv: list[str] | None, default_output_dir: Path) -> argparse.Namespace:
    parser = cli.new_parser(__doc__)
    add = parser.add_argument
    add("--row", choices=ROWS, help="one row of the ledger alone")
    add("--workers", type=cli.natural, metavar="N", help="processes (default: one a core)")
    add("--list", action="store_true", help="name the models, and what each changes")
    add("--report", action="store_true", help="train nothing; say what is committed")
    add("--output-dir", type=cli.not_empty, metavar="DIR", default=default_output_dir)
    return parser.parse_args(argv)


def report(rows: dict[str, dict[str, Condition]], folder: Path) -> int:
    """Say what the files in the folder hold."""
    for row, conditions in rows.items():
        found = read_rows(file_of(folder, row))
        for label, condition in conditions.items():
            console.say(f"{row}, {label}: {condition.setting.steps} steps")
            if wanted(condition, found):
                console.say("not yet run\n")
                continue
            console.say(table_of(condition, found))
            console.say()
    return 0


def main(argv: list[str] | None = None) -> int:
    here = Path(__file__).parent
    options = parse(argv, here / "outputs" / "ledger")
    rows = {options.row: ROWS[options.row]} if options.row else ROWS
    if options.list:
        console.say(listing(rows))
        return 0
    if options.report:
        return report(rows, here / "expected" / "ledger")
    folder = Path(options.output_dir)
    files.claim_folder(folder)
    workers = options.workers or cli.usable_cores()
    with files.held(folder):
        store = Store(folder / "runs")
        for row, conditions in rows.items():
            every = list(conditions.values())
            for trial, one in train_missing(every, store, workers):
                ended = "diverged" if one["loss"] is None else f"{one['loss']:.3f}"
                console.say(f"{row}: {trial}: {ended}")
            write_rows(file_of(folder, row), known(every, store.read))
            report({row: conditions}, folder)
    return 0


if __name__ == "__main__":
    cli.run_build(__file__)
