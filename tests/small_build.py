"""A build.py as small as can be: the patient of the tests that kill, damage and resume runs.

The model is a table of scores for the next character, with a buffer that the loop's hook moves, as
chapter 18's bias is.
"""

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from shared import cli, report, runs, training
from shared.cli import Preset, Variant
from shared.randomness import generator
from shared.training import TrainingSettings


@dataclass(frozen=True)
class Config:
    block_size: int = 4
    scale: float = 1.0


class Bigrams(nn.Module):
    def __init__(self, cfg, vocab_size, seed):
        super().__init__()
        self.cfg = cfg
        self.seed = seed
        start = torch.randn(vocab_size, vocab_size, generator=generator(seed, "table"))
        self.table = nn.Parameter(start)
        self.register_buffer("steps_seen", torch.zeros(()))

    def forward(self, idx, targets=None):
        logits = self.cfg.scale * self.table[idx] + self.steps_seen.sin()
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Small(runs.Experiment):
    data_parallel = True

    def __init__(self, pause=0.0, every=60.0, die=""):
        self.pause = pause  # seconds that each step waits, so that a test can strike in time
        self.every = every  # seconds between two checkpoints
        self.die = die  # a file; the process that finds it not there makes it, and is killed

    def build_model(self, config, vocab_size, seed):
        training.CHECKPOINT_SECONDS = self.every
        return Bigrams(config, vocab_size, seed)

    def after_step(self, model, told):
        model.steps_seen += 1
        time.sleep(self.pause)
        if self.die and model.seed == 2 and model.steps_seen == 12 and os.environ["RANK"] == "1":
            try:
                os.close(os.open(self.die, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
            os.kill(os.getpid(), signal.SIGKILL)

    def observe(self, model, idx):
        return {"size": model.table.norm().item()}

    def inspect(self, model, corpus, seed):
        return {"sum": model.table.sum().item()}


PRESET = Preset(
    Config(), TrainingSettings(steps=30, batch_size=4, observe_every=10), "docs", "char", seeds=2
)
VARIANTS = [Variant("one", {"model": "one"}, {}), Variant("half", {"model": "½"}, {"scale": 0.5})]


def plan_of(argv, folder="outputs", flags=None):
    """The plan that a command line of flags asks for."""
    return cli.make_plan("A test", PRESET, VARIANTS, flags or cli.parse("", argv, Path(folder)))


def main(argv=None):
    parser = cli.build_parser("")
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--every", type=float, default=60.0)
    parser.add_argument("--die", default="")
    parser.add_argument("--apart", action="store_true")
    args = parser.parse_args(argv)
    if args.apart:  # as if every rank had a disk of its own
        args.output_dir += f"/{runs.world().rank}"
    plan = plan_of([], flags=cli.options_from(args, Path("outputs")))
    experiment = Small(args.pause, args.every, args.die)

    def summarize(plan, results):
        return [report.comparison_table(plan, results)]

    return report.carry_out(experiment, plan, summarize, lambda plan, results: {}, Path("none"))


if __name__ == "__main__":
    cli.run_build(__file__)
