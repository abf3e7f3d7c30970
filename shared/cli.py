"""The flags that every chapter's build.py shares, and the errors a person gets for wrong ones."""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from shared import console, data
from shared.console import UserError

MOST_SEEDS = 1000


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


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose error is one line, exit status 2, without the usage in front of it."""

    def error(self, message: str) -> None:
        raise UserError(f"{message} (see --help)")


def build_parser(description: str) -> argparse.ArgumentParser:
    """The parser of every build.py. A test freezes its flags."""
    parser = OneLineParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    preset = parser.add_mutually_exclusive_group()
    preset.add_argument("--tiny", action="store_true", help="finishes on a laptop CPU within a minute (the default)")
    preset.add_argument("--full", action="store_true", help="the same experiment at a size for one GPU")
    parser.add_argument("--steps", type=natural, metavar="N", help="training steps of each run")
    parser.add_argument("--seed", type=natural, metavar="N", default=1, help="the first seed (default 1)")
    parser.add_argument("--seeds", type=natural, metavar="N", help="how many seeds, counting up from --seed")
    parser.add_argument(
        "--data", type=not_empty, metavar="PATH", help="a UTF-8 text file, or a folder of them, to train on instead"
    )
    parser.add_argument("--tokenizer", choices=data.TOKENIZERS, help="how text becomes tokens")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto")
    parser.add_argument("--workers", type=natural, metavar="N", help="processes (default: one per core; GPU: 1)")
    parser.add_argument("--output-dir", type=not_empty, metavar="DIR", help="where results go (default: outputs/ here)")
    return parser


def parse(description: str, argv: list[str] | None, default_output_dir: Path) -> Options:
    """Read the flags. Raises UserError for one that can't be followed."""
    args = build_parser(description).parse_args(argv)
    preset = "full" if args.full else "tiny"
    if args.seeds is not None and args.seeds > MOST_SEEDS:
        raise UserError(f"--seeds {args.seeds} is more than {MOST_SEEDS}; the interval won't need that many")
    device = resolve_device(args.device, preset)
    return Options(
        preset=preset,
        steps=args.steps,
        seed=args.seed,
        seeds=args.seeds,
        data=args.data,
        tokenizer=args.tokenizer,
        device=device,
        workers=args.workers or (usable_cores() if device == "cpu" else 1),
        output_dir=Path(args.output_dir or default_output_dir),
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


def resolve_device(device: str, preset: str) -> str:
    """The device meant: "auto" is the CPU for --tiny, which is its reference, and for --full a GPU if there is one."""
    present = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if device == "auto":
        return next((name for name in ("cuda", "mps") if present[name]), "cpu") if preset == "full" else "cpu"
    if not present[device]:
        raise UserError(f"--device {device}: this torch sees no such device; use --device cpu")
    return device


def usable_cores() -> int:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_step(main: Callable[[], int], description: str) -> None:
    """Run a step's main() like `run`. A step takes no flags but --help, and --tiny, which it always is."""
    parser = OneLineParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--tiny", action="store_true", help="accepted, and without effect: a step is always tiny")

    def parse_and_run() -> int:
        parser.parse_args()
        torch.set_num_threads(1)
        return main()

    run(parse_and_run)


def run(main: Callable[[], int]) -> None:
    """Run a script's main() and exit with its status: 2 for a person's mistake, 130 for Ctrl-C, never a traceback
    for either."""
    console.tolerate_narrow_encodings()
    try:
        status = main()
        sys.stdout.flush()
    except UserError as error:
        console.complain(f"{Path(sys.argv[0]).name}: error: {error}")
        status = 2
    except KeyboardInterrupt:
        console.complain("interrupted")
        status = 130
    except BrokenPipeError:  # the reader of a pipe has gone, as with `| head`
        status = 141
    except OSError as error:  # a full disk, or a standard output that can't be written to
        console.complain(f"{Path(sys.argv[0]).name}: error: {error}")
        status = 1
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    if status in (1, 141):  # what couldn't be written is not tried again when Python closes its files
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)
