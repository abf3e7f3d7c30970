"""Step 05: train the norms side by side.

Step 03's model with LayerNorm, with RMSNorm and with none, from the same numbers on the same batches, watched with
step 04's hooks. Short runs of a small model: build.py repeats the comparison at the chapter's size.

    python step_05_train-the-norms-side-by-side.py

prints the losses with their paired differences, the stream by layer, and the checks; about eight seconds.
"""

import math
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder that holds shared/

from shared import chapters, cli, comparison, console, data, training
from shared.checks import Checks
from shared.kernels import fastest_float32
from shared.training import TrainingSettings

gpt = chapters.load_build(5)
step_03, step_04 = chapters.load_step(7, 3), chapters.load_step(7, 4)

SEEDS = (1, 2, 3)
SETTINGS = TrainingSettings(steps=60, batch_size=16, observe_every=60)


def train(norm_type: str, seed: int, corpus: data.Corpus) -> comparison.Result:
    """One run: the batches and every parameter that the variants share depend on the seed alone."""
    model = step_03.NormGPT(step_03.NormConfig(norm_type=norm_type), corpus.vocab_size)
    gpt.init_parameters(model, seed)
    history = training.train(model, corpus, SETTINGS, seed, observe=step_04.observe)
    return comparison.Result(comparison.Run(norm_type, seed), gpt.count_parameters(model), history)


def loss_table(results: list[comparison.Result]) -> console.Table:
    """A row per norm: parameters, mean validation loss, the paired difference to LayerNorm and what it is worth."""
    rows = []
    for norm_type in step_03.NORM_TYPES:
        parameters = next(r.parameters for r in results if r.run.variant == norm_type)
        loss = comparison.mean_of(results, norm_type, lambda r: r.history.validation_loss)
        difference = comparison.paired_difference(results, norm_type, "layernorm")
        worth = ["-", "the baseline"] if norm_type == "layernorm" else [str(difference), difference.verdict]
        rows.append([norm_type, f"{parameters:,}", f"{loss:.3f}", *worth])
    return console.Table(["norm", "parameters", "validation loss", "difference to layernorm", "verdict"], rows)


def final_stream(results: list[comparison.Result], statistic: str, power: float = 1.0) -> console.Table:
    """One statistic of the stream after the last step: a row per point, a column per norm, means over the seeds."""

    def mean(norm_type: str, point: str) -> float:
        return comparison.mean_of(
            results, norm_type, lambda r: r.history.observations[-1]["stream"][point][statistic] ** power
        )

    rows = [
        [point, *(f"{mean(norm_type, point):.3f}" for norm_type in step_03.NORM_TYPES)]
        for point in results[0].history.observations[-1]["stream"]
    ]
    return console.Table(["stream after", *step_03.NORM_TYPES], rows)


def main() -> int:
    corpus = data.load_corpus("docs", "char", 32)
    corpus = replace(corpus, validation=corpus.validation[:20_000])
    with fastest_float32():
        results = [train(norm_type, seed, corpus) for seed in SEEDS for norm_type in step_03.NORM_TYPES]
    console.say(
        f"{SETTINGS.steps} steps at {len(SEEDS)} paired seeds; guessing evenly costs {math.log(corpus.vocab_size):.3f}"
    )
    console.say()
    console.say(loss_table(results))
    for what, statistic, power in (("Std", "var", 0.5), ("Kurtosis", "kurtosis", 1.0)):
        console.say(f"\n{what} of the residual stream after training:")
        console.say()
        console.say(final_stream(results, statistic, power))

    checks = Checks()
    by_run = {(r.run.variant, r.run.seed): r for r in results}
    dropped = by_run["layernorm", 1].parameters - by_run["rmsnorm", 1].parameters
    checks.equal("biases that RMSNorm does without: 5 of 64", dropped, 5 * 64)
    for norm_type in step_03.NORM_TYPES:
        first = sum(by_run[norm_type, seed].history.losses[0] for seed in SEEDS) / len(SEEDS)
        checks.close(f"first loss, {norm_type}: near ln V", first, math.log(corpus.vocab_size), 0.25)
    without = comparison.paired_difference(results, "none", "layernorm")
    checks.true("no norm against LayerNorm", f"{without}", "higher", without.verdict == "higher")
    return checks.report()


if __name__ == "__main__":
    cli.run_step(main, __doc__)
