"""How fast the main job trains: against a first draft, a known design, and the bare products."""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import baselines
import torch
import torch.nn.functional as F
from ratios import Ratio, in_turns

from shared import chapters, data, training

BUILD = chapters.chapter_folder(7) / "build.py"
SEEDS = range(1, 7)  # those of a default run
STEPS = 200
JOB_ROUNDS = 2
ROUNDS = 12
STEPS_A_ROUND = 20


def ratios() -> list[Ratio]:
    corpus = data.load_corpus("docs", "char", baselines.BLOCK)
    naive, start_up = job_ratios()
    nano = against_nanogpt(corpus)
    plain = against_products(corpus, "layernorm", "gelu")
    modern = against_products(corpus, "rmsnorm", "swiglu")
    return [naive, start_up, nano, plain, modern]


# ---------------------------------------------------------------- the whole job


def job_ratios() -> tuple[Ratio, Ratio]:
    """The command of `make tiny` against its 24 runs in the naive form, and its start-up."""
    against_naive = []
    start_up = []
    for _ in range(JOB_ROUNDS):
        ours = job_seconds("--steps", str(STEPS))
        theirs = naive_seconds()
        against_naive.append(ours / theirs)
        start_up.append(job_seconds("--steps", "1") / ours)
    return (
        Ratio("make tiny / its 24 runs in the naive form", against_naive, at_most=0.6),
        Ratio("make tiny with one step / with 200", start_up),
    )


def job_seconds(*flags: str) -> float:
    """Wall-clock seconds of build.py, from the command to its last line."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        command = [sys.executable, str(BUILD), "--output-dir", folder]
        subprocess.run([*command, *flags], check=True, capture_output=True)
        return time.perf_counter() - started


def naive_seconds() -> float:
    """Seconds for the same runs, one after the other, with torch's default threads."""
    started = time.perf_counter()
    subprocess.run([sys.executable, __file__], check=True, capture_output=True)
    return time.perf_counter() - started


def naive_job() -> None:
    corpus = data.load_corpus("docs", "char", baselines.BLOCK)
    for seed in SEEDS:
        for rmsnorm in (False, True):
            for swiglu in (False, True):
                parts = (corpus.train, corpus.validation, corpus.vocab_size)
                baselines.naive_run(*parts, rmsnorm, swiglu, seed, STEPS)


# ---------------------------------------------------------------- one step


def our_steps(corpus: data.Corpus, norm_type: str, mlp_type: str):
    """A function that trains a fresh model for STEPS_A_ROUND steps, as the job does."""
    build = chapters.load_build(7)
    config = build.ModernConfig(norm_type=norm_type, mlp_type=mlp_type)
    settings = training.TrainingSettings(steps=STEPS_A_ROUND)
    short = data.Corpus("", "", 0, corpus.tokenizer, corpus.train, corpus.validation[:33])
    model = build.ModernGPT(config, corpus.vocab_size)
    return lambda: training.train(model, short, settings, seed=1)


def against_nanogpt(corpus: data.Corpus) -> Ratio:
    nano = baselines.NanoTrainer(corpus.train, corpus.vocab_size)

    def theirs() -> None:
        for _ in range(STEPS_A_ROUND):
            nano.step()

    rounds = in_turns(our_steps(corpus, "layernorm", "gelu"), theirs, ROUNDS)
    return Ratio("a step of LayerNorm+GELU / nanoGPT's design", rounds, at_most=1.0)


def against_products(corpus: data.Corpus, norm_type: str, mlp_type: str) -> Ratio:
    """A step over its matrix products alone, which no code can do without."""
    C = baselines.WIDTH
    N = baselines.BATCH * baselines.BLOCK
    widths = [(C, 3 * C), (C, C)]  # attention's two matrices, then the MLP's
    hidden = 8 * C // 3
    widths += [(C, 4 * C), (4 * C, C)] if mlp_type == "gelu" else [(C, hidden)] * 2 + [(hidden, C)]
    layers = [torch.randn(n_out, n_in, requires_grad=True) for n_in, n_out in widths] * 2
    layers.append(torch.randn(corpus.vocab_size, C, requires_grad=True))
    inputs = [torch.randn(N, layer.shape[1], requires_grad=True) for layer in layers]
    upstream = [torch.randn(N, layer.shape[0]) for layer in layers]

    def products() -> None:
        for _ in range(STEPS_A_ROUND):
            for x, layer, dy in zip(inputs, layers, upstream):
                torch.autograd.grad(F.linear(x, layer), (x, layer), dy)

    names = "LayerNorm+GELU" if mlp_type == "gelu" else "RMSNorm+SwiGLU"
    rounds = in_turns(our_steps(corpus, norm_type, mlp_type), products, ROUNDS)
    return Ratio(f"a step of {names} / its products", rounds)


if __name__ == "__main__":
    naive_job()
