"""How fast the main job trains, as ratios measured side by side in one run.

    python tests/benchmarks/bench_training.py       about three minutes on two idle cores

1. The training phase of a default --tiny (twelve runs, the workers' start included) against the same twelve runs
   in the naive form: at most 0.55 times as long.
2. One LayerNorm+GELU training step against nanoGPT's design at the same shape, in CPU time on one thread: at most 1.

Exit status 1 if a bound is broken.
"""

import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import baselines

from shared import chapters, cli, comparison, console, data, training
from shared.kernels import fastest_float32

SEEDS, STEPS, ROUNDS = [1, 2, 3], 200, 2


def main() -> int:
    if sys.argv[1:] == ["naive"]:
        print(naive_phase(data.load_corpus("docs", "char", 32)))
        return 0
    corpus = data.load_corpus("docs", "char", 32)
    ours, naive = [], []
    for _ in range(ROUNDS):  # taken in turns, so that a slow minute of the machine hits both
        ours.append(our_phase(corpus))
        child = subprocess.run([sys.executable, __file__, "naive"], capture_output=True, text=True, check=True)
        naive.append(float(child.stdout))
    our_step, nano_step = step_times(corpus)
    rows, broken = [], 0
    for what, mine, theirs, bound in (
        ("training phase of --tiny, against the naive form", min(ours), min(naive), 0.55),
        ("one training step, against nanoGPT's design", our_step, nano_step, 1.0),
    ):
        ratio = mine / theirs
        broken += ratio > bound
        cells = [f"{ratio:.2f}", f"{bound:.2f}", "ok" if ratio <= bound else "TOO SLOW"]
        rows.append([what, f"{mine:.4g} s", f"{theirs:.4g} s", *cells])
    console.say(console.Table(["what", "ours", "theirs", "ratio", "at most", "verdict"], rows))
    console.say(f"\nrounds of the training phase, seconds: ours {ours}, naive {naive}")
    return 1 if broken else 0


def our_phase(corpus: data.Corpus) -> float:
    """Seconds for the twelve runs as build.py --tiny makes them."""
    build = chapters.load_build(7)
    preset = build.PRESETS["tiny"]
    variants = {name: asdict(replace(preset.model, **changes)) for name, changes in build.VARIANTS.items()}
    started = time.perf_counter()
    results = list(comparison.run_all(build.FourWay, variants, corpus, preset.training, SEEDS, cli.usable_cores()))
    seconds = time.perf_counter() - started
    assert len(results) == 12 and all(r.history for r in results)
    return seconds


def naive_phase(corpus: data.Corpus) -> float:
    """Seconds for the twelve runs in the naive form; in a process of its own, with torch's default threads."""
    started = time.perf_counter()
    for seed in SEEDS:
        for rmsnorm in (False, True):
            for swiglu in (False, True):
                baselines.naive_run(corpus.train, corpus.validation, corpus.vocab_size, rmsnorm, swiglu, seed, STEPS)
    return time.perf_counter() - started


def step_times(corpus: data.Corpus, chunks: int = 12, steps: int = 40) -> tuple[float, float]:
    """CPU seconds of a training step on one thread, ours and nanoGPT's: the best of `chunks` turns each."""
    torch.set_num_threads(1)
    build = chapters.load_build(7)
    settings = training.TrainingSettings(steps=steps)
    nano = baselines.NanoTrainer(corpus.train, corpus.vocab_size)
    for _ in range(10):
        nano.step()
    config = build.ModernConfig(norm_type="layernorm", mlp_type="gelu")
    nothing_to_validate = data.Corpus("", "", 0, corpus.tokenizer, corpus.train, corpus.validation[:33])
    ours, theirs = [], []
    for seed in range(chunks):
        model = build.ModernGPT(config, corpus.vocab_size)
        with fastest_float32():
            started = time.process_time()
            training.train(model, nothing_to_validate, settings, seed)
            ours.append((time.process_time() - started) / steps)
        started = time.process_time()
        for _ in range(steps):
            nano.step()
        theirs.append((time.process_time() - started) / steps)
    return min(ours), min(theirs)


if __name__ == "__main__":
    sys.exit(main())
