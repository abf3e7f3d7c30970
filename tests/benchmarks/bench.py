"""Every ratio of speed in one table: ours over theirs, measured side by side in one run.

    python tests/benchmarks/bench.py        (`make bench`), under five minutes on two idle cores

Exit status 1 if a bound is broken. Machines differ, so a ratio is worth more than a time; busy
machines differ from minute to minute, so ours and theirs take turns.
"""

import platform
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).parent)]

import bench_18_dispatch
import bench_37_real_model
import bench_training
import torch

from shared import cli, console


def machine() -> str:
    """What it was measured on."""
    capability = torch.backends.cpu.get_cpu_capability()
    return (
        f"{cli.usable_cores()} cores, {platform.machine()} {capability}, torch {torch.__version__}"
    )


def main() -> int:
    torch.set_num_threads(1)
    ratios = []
    for module in (bench_training, bench_18_dispatch, bench_37_real_model):
        console.say(f"{module.__name__} ...")
        ratios += module.ratios()
    console.say()
    headers = ["ours over theirs", "median", "rounds", "at most", "verdict"]
    console.say(console.Table(headers, [ratio.row() for ratio in ratios]))
    console.say(f"\n{machine()}")
    return 1 if any(ratio.too_slow for ratio in ratios) else 0


if __name__ == "__main__":
    cli.run(main)
