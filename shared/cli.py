"""The flags that every chapter shares, the plan that they make, and the errors for wrong ones."""

import argparse
import contextlib
import math
import os
import signal
import sys
import time
import typing
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from shared import chapters, console, data, files
from shared.console import UserError
from shared.training import TrainingSettings

MOST_SEEDS = 1000


# ---------------------------------------------------------------- what a chapter offers


@dataclass(frozen=True)
class Preset:
    """One size of a chapter's experiment."""

    model: Any  # the chapter's config dataclass
    training: TrainingSettings
    corpus: str  # "docs" or "source", see shared/data.py
    tokenizer: str
    seeds: int


@dataclass(frozen=True)
class Variant:
    """One of the models that an experiment compares."""

    name: str
    labels: dict[str, str]  # what names it in a table, by column
    changes: dict[str, Any]  # the fields of the preset's config that it changes


# ---------------------------------------------------------------- what a person asked for


@dataclass(frozen=True)
class Options:
    """What the person asked for. None: the preset decides."""

    preset: str
    steps: int | None
    seed: int
    seeds: int | None
    data: str | None
    tokenizer: str | None
    device: str  # already resolved: "cpu", "cuda" or "mps"
    workers: int
    output_dir: Path
    changes: dict[str, str]  # of --set: field -> value, as typed
    fresh: bool  # train again what is stored
    report: bool  # train nothing, say what is stored
    keep: bool  # keep every run's trained model, not only the first seed's


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose error is one line, exit status 2, without the usage before it."""

    def error(self, message: str) -> None:
        raise UserError(f"{message} (see --help)")


def new_parser(description: str) -> OneLineParser:
    """A parser that keeps the description's lines and takes no shortened flags."""
    return OneLineParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def build_parser(description: str) -> argparse.ArgumentParser:
    """The parser of every build.py that trains. A test freezes its flags."""
    parser = new_parser(description)
    preset = parser.add_mutually_exclusive_group()
    add = preset.add_argument
    add("--tiny", action="store_true", help="on a laptop CPU, about a minute (the default)")
    add("--full", action="store_true", help="the same experiment at a size for one GPU")
    add = parser.add_argument
    add("--steps", type=natural, metavar="N", help="training steps of each run")
    add("--seed", type=natural, metavar="N", default=1, help="the first seed (default 1)")
    add("--seeds", type=natural, metavar="N", help="how many seeds, counting up from --seed")
    add("--data", type=not_empty, metavar="PATH", help="a UTF-8 text file or a folder of them")
    add("--tokenizer", choices=data.TOKENIZERS, help="how text becomes tokens")
    add(
        "--set",
        action="append",
        default=[],
        type=assignment,
        metavar="FIELD=VALUE",
        help="change a field of every model's config or of the training; as often as wanted",
    )
    add("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto")
    add("--workers", type=natural, metavar="N", help="processes (default: one a core, or a GPU)")
    add("--output-dir", type=not_empty, metavar="DIR", help="where results go (default: outputs/)")
    add("--keep", action="store_true", help="keep every trained model, not the first seed's alone")
    again = parser.add_mutually_exclusive_group()
    again.add_argument("--fresh", action="store_true", help="train again what is stored")
    again.add_argument("--report", action="store_true", help="train nothing; say what is stored")
    return parser


def parse(description: str, argv: list[str] | None, default_output_dir: Path) -> Options:
    """Read the flags of a build.py. Raises UserError for one that can't be followed."""
    return options_from(build_parser(description).parse_args(argv), default_output_dir)


def options_from(args: argparse.Namespace, default_output_dir: Path) -> Options:
    """The options in what a parser of build_parser() read."""
    preset = "full" if args.full else "tiny"
    if args.seeds is not None and args.seeds > MOST_SEEDS:
        raise UserError(f"--seeds {args.seeds} is too many; give at most {MOST_SEEDS}")
    device = resolve_device(args.device, preset)
    return Options(
        preset=preset,
        steps=args.steps,
        seed=args.seed,
        seeds=args.seeds,
        data=args.data,
        tokenizer=args.tokenizer,
        device=device,
        workers=args.workers or default_workers(device),
        output_dir=Path(args.output_dir or default_output_dir),
        changes=dict(args.set),
        fresh=args.fresh,
        report=args.report,
        keep=args.keep,
    )


def not_empty(text: str) -> str:
    """argparse type: a path, which an unset shell variable is not."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    return text


def natural(text: str) -> int:
    """argparse type: a whole number from 1 up."""
    if not text.isascii() or not text.isdigit() or len(text) > 18 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)


def assignment(text: str) -> tuple[str, str]:
    """argparse type: FIELD=VALUE."""
    name, equals, value = text.partition("=")
    if not name or not equals or not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not FIELD=VALUE, as in n_layers=4")
    return name, value


def resolve_device(device: str, preset: str) -> str:
    """The device meant: "auto" is the CPU for --tiny, its reference, else a GPU if there is one."""
    present = {
        "cpu": True,
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
    }
    if device == "auto":
        best = next(name for name in ("cuda", "mps", "cpu") if present[name])
        return best if preset == "full" else "cpu"
    if not present[device]:
        raise UserError(f"--device {device}: this torch sees no such device; use --device cpu")
    return device


def default_workers(device: str) -> int:
    """One process a GPU; on the CPU one a core, or one for each rank of torchrun."""
    if "WORLD_SIZE" in os.environ:
        return 1
    if device == "cuda":
        return torch.cuda.device_count()
    return usable_cores() if device == "cpu" else 1


def usable_cores() -> int:
    """The cores that this process may run on; a container's share of time counts too."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, math.floor(cpu_quota())))


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float:
    """How many cores' time a container may use, by cgroup version 2 or 1; a million outside one."""
    try:
        if (root / "cpu.max").exists():
            quota, period = (root / "cpu.max").read_text(encoding="ascii").split()
        else:
            quota = (root / "cpu/cpu.cfs_quota_us").read_text(encoding="ascii")
            period = (root / "cpu/cpu.cfs_period_us").read_text(encoding="ascii")
        cores = float(quota) / float(period)  # "max" is no number: no limit
    except (OSError, ValueError, ZeroDivisionError):
        return 1e6
    return cores if cores > 0 else 1e6


# ---------------------------------------------------------------- the plan


@dataclass(frozen=True)
class Plan:
    """Everything that a run's numbers depend on, and where they go."""

    title: str
    options: Options
    variants: list[Variant]  # the first is the baseline
    configs: dict[str, Any]  # a variant's name -> its model's config
    training: TrainingSettings
    corpus: data.Corpus
    seeds: list[int]

    @property
    def baseline(self) -> str:
        return self.variants[0].name

    @property
    def names(self) -> list[str]:
        return [variant.name for variant in self.variants]

    @property
    def n_runs(self) -> int:
        return len(self.variants) * len(self.seeds)

    @property
    def uniform_loss(self) -> float:
        """The loss of a model that finds every token equally likely, in nats: ln V."""
        return math.log(self.corpus.vocab_size)


def make_plan(title: str, preset: Preset, variants: list[Variant], options: Options) -> Plan:
    """Join a preset, what each variant changes in its model, and the flags.

    UserError for what can't be done.
    """
    files.claim_folder(options.output_dir)
    model, training = with_changes(preset, variants, options.changes)
    steps = options.steps or training.steps
    try:
        configs = {variant.name: replace(model, **variant.changes) for variant in variants}
    except ValueError as error:
        raise UserError(f"--set: {error}") from None
    on_cuda = options.device == "cuda"
    return Plan(
        title=title,
        options=options,
        variants=variants,
        configs=configs,
        training=replace(
            training,
            steps=steps,
            observe_every=min(training.observe_every, steps),  # a shorter run is seen at its end
            device=options.device,
            precision=usable_precision(training.precision) if on_cuda else "float32",
            compile=training.compile if on_cuda else "",
        ),
        corpus=data.load_corpus(
            Path(options.data) if options.data else preset.corpus,
            options.tokenizer or preset.tokenizer,
            model.block_size,
        ),
        seeds=list(range(options.seed, options.seed + (options.seeds or preset.seeds))),
    )


def usable_precision(wanted: str) -> str:
    """bfloat16 where the GPU has units for it; older ones get float16, not a slow emulation."""
    if wanted == "bfloat16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return "float16"
    return wanted


SETTABLE = ("batch_size", "learning_rate", "weight_decay", "clip", "warmup", "final_rate")


def with_changes(
    preset: Preset, variants: list[Variant], changes: dict[str, str]
) -> tuple[Any, TrainingSettings]:
    """The preset's model config and training, with the fields of --set changed.

    UserError for a field that neither has, that the variants differ in, or for a wrong value.
    """
    by_variants = {name for variant in variants for name in variant.changes}
    of_model = [f.name for f in fields(preset.model) if f.name not in by_variants]
    model = preset.model
    training = preset.training
    for name, text in changes.items():
        if name in by_variants:
            raise UserError(f"--set {name}={text}: the variants themselves set {name}")
        try:
            if name in of_model:
                model = replace(model, **{name: typed(model, name, text)})
            elif name in SETTABLE:
                training = replace(training, **{name: typed(training, name, text)})
            else:
                there_are = ", ".join([*of_model, *SETTABLE])
                raise UserError(f"--set {name}={text}: no such field; there are: {there_are}")
        except ValueError as error:
            raise UserError(f"--set {name}={text}: {error}") from None
    return model, training


def typed(config: Any, name: str, text: str) -> Any:
    """The text as a value of the field's type. ValueError if it isn't one."""
    hint = typing.get_type_hints(type(config))[name]
    kinds = typing.get_args(hint) or (hint,)
    words = [word for kind in kinds for word in typing.get_args(kind)]  # of Literal["word"]
    if text in words:
        return text
    if type(None) in kinds and text == "none":
        return None
    if bool in kinds:
        if text not in ("true", "false"):
            raise ValueError("give true or false")
        return text == "true"
    for kind in (int, float):
        if kind in kinds:
            with contextlib.suppress(ValueError):
                value = kind(text)
                if math.isfinite(value):
                    return value
    if str in kinds:
        return text
    names = {int: "a whole number", float: "a number", type(None): "none"}
    known = [names[kind] for kind in kinds if kind in names] + words
    raise ValueError(f"give {' or '.join(known)}")


# ---------------------------------------------------------------- running a script


def run_step(main: Callable[[], int], description: str) -> None:
    """Run a page's main() like `run`. A page takes no flags but --help and --tiny."""
    parser = new_parser(description)
    parser.add_argument(
        "--tiny", action="store_true", help="accepted, and without effect: a page is always tiny"
    )

    def parse_and_run() -> int:
        parser.parse_args()
        torch.set_num_threads(1)
        return main()

    run(parse_and_run)


def run_build(script: str) -> None:
    """Run the main() of a build.py and exit with its status.

    The file is imported under the name by which worker processes know it: what `python build.py`
    calls __main__ they could not find, nor could anyone under a profiler.
    """
    run(chapters.load_file(script).main)


class Ended(BaseException):
    """Somebody asked this process to end (SIGTERM)."""


def run(main: Callable[[], int]) -> None:
    """Run a script's main() and exit with its status.

    2 for a person's mistake, 130 for Ctrl-C, 143 for SIGTERM, 141 for a closed pipe, 1 for a
    disk that is full: one line each, never a traceback.
    """
    console.tolerate_narrow_encodings()
    script = Path(sys.argv[0]).name
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    try:
        status = main()
        sys.stdout.flush()
    except UserError as error:
        console.complain(f"{script}: error: {error}")
        status = 2
    except KeyboardInterrupt:
        console.complain("interrupted")
        status = 130
    except Ended:
        console.complain("ended")
        status = 143
    except BrokenPipeError:  # the reader of a pipe has gone, as with `| head`
        status = 141
    except OSError as error:  # a full disk, or a standard output that can't be written to
        console.complain(f"{script}: error: {error}")
        status = 1
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # what comes now ends the process without a word
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    if status in (1, 141):  # what couldn't be written is not tried again when Python ends
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if "WORLD_SIZE" in os.environ:  # threads that torch leaves behind may abort when Python ends
        os._exit(status)
    sys.exit(status)


PATIENCE = 2.0  # seconds in which one more signal changes nothing: GNU timeout sends each twice
last_signal = -math.inf


def end(number: int, frame: object) -> None:
    """What a signal does: an exception on its way up stops the workers."""
    global last_signal
    before = last_signal
    last_signal = time.monotonic()
    if last_signal - before > PATIENCE:
        raise KeyboardInterrupt if number == signal.SIGINT else Ended
