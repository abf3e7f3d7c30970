"""Paired seeds in worker processes: the statistics against closed forms, the processes against whatever kills them."""

import math
import os

import pytest
import torch
import torch.nn as nn

from shared import comparison, data, workers
from shared.comparison import Experiment, Interval, Result, Run, interval, paired_difference
from shared.training import History, TrainingSettings

# ---------------------------------------------------------------- statistics


@pytest.mark.parametrize("degrees", sorted(comparison.T_95))
def test_the_t_table_holds_95_percent(degrees):
    """Student's density, integrated numerically from −t to t, is 0.95 to the table's three decimals."""
    t = comparison.T_95[degrees]
    x = torch.linspace(-t, t, 200_001, dtype=torch.float64)
    log_scale = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - 0.5 * math.log(degrees * math.pi)
    density = math.exp(log_scale) * (1 + x**2 / degrees) ** (-(degrees + 1) / 2)
    assert torch.trapezoid(density, x).item() == pytest.approx(0.95, abs=5e-5)


def test_an_interval_by_hand():
    """1, 2, 6: mean 3, sample variance 7, so 4.303 · √(7/3)."""
    assert interval([1, 2, 6]) == Interval(3.0, pytest.approx(6.573, abs=1e-3), 3)
    assert interval([5.0]) == Interval(5.0, None, 1)


def test_between_two_entries_of_the_table_the_interval_is_the_wider_one():
    values = [(-1.0) ** i for i in range(19)]  # 18 degrees of freedom: the table has 15 and 20
    variance = sum((v - 1 / 19 * sum(values)) ** 2 for v in values) / 18
    assert interval(values).half_width == pytest.approx(comparison.T_95[15] * math.sqrt(variance / 19))


@pytest.mark.parametrize(
    ("mean", "half_width", "verdict"),
    [
        (-0.2, 0.1, "lower"),
        (0.2, 0.1, "higher"),
        (0.1, 0.1, "no difference seen at 3 seeds"),
        (-0.05, 0.1, "no difference seen at 3 seeds"),
        (-9.0, None, "one seed can't tell"),
    ],
)
def test_a_verdict_says_no_more_than_the_interval(mean, half_width, verdict):
    assert Interval(mean, half_width, 3).verdict == verdict


def result(variant, seed, loss):
    history = None if loss is None else History(losses=[loss], validation_loss=loss, ms_per_step=1.0)
    return Result(Run(variant, seed), 10, history, error=None if history else "the loss became nan at step 4")


def test_differences_are_taken_seed_by_seed_and_only_where_both_finished():
    results = [
        *(result("a", seed, loss) for seed, loss in ((1, 10.0), (2, 20.0), (3, 30.0))),
        *(result("b", seed, loss) for seed, loss in ((1, 10.5), (2, 20.7), (3, None), (4, 0.0))),
    ]
    difference = paired_difference(results, "b", "a")
    assert (difference.mean, difference.n) == (pytest.approx(0.6), 2)
    assert difference.half_width == pytest.approx(12.706 * 0.1)  # the losses themselves spread a hundred times wider
    assert paired_difference(results, "c", "a") is None
    assert comparison.mean_of(results, "a", lambda r: r.history.validation_loss) == 20.0
    assert math.isnan(comparison.mean_of(results, "c", lambda r: 1.0))


def test_the_sentence_of_size_and_time_says_which_way_round():
    from shared import report

    results = [result("a", 1, 2.0), result("a", 2, 2.0), result("b", 1, 2.0), result("b", 2, 2.0)]
    for r, parameters, ms in zip(results, (1000, 1000, 900, 900), (10.0, 10.0, 15.0, 20.0), strict=True):
        r.parameters, r.history.ms_per_step = parameters, ms
    sentence = report.size_and_time_sentence(results, "b", "a")
    assert "b holds 900 parameters to a's 1,000 (-10.0%)" in sentence and "1.50 to 2.00 times as long" in sentence
    assert report.size_and_time_sentence(results, "c", "a") is None


# ---------------------------------------------------------------- workers


class Tiny(nn.Module):
    def __init__(self, vocab_size, seed):
        super().__init__()
        self.cfg = type("Config", (), {"block_size": 4})
        self.table = nn.Parameter(torch.randn(vocab_size, vocab_size, generator=torch.Generator().manual_seed(seed)))

    def forward(self, idx, targets=None):
        logits = self.table[idx]
        return logits, None if targets is None else nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Bigrams(Experiment):
    """A model of a few dozen numbers, and a variant for every way in which a run can go wrong."""

    def build_model(self, variant, config, vocab_size, seed):
        if variant == "killed":
            os._exit(9)
        if variant == "bug":
            raise KeyError("a mistake in the code")
        model = Tiny(vocab_size, seed)
        if variant == "nan" and seed == 2:
            model.table.data[0] = math.nan
        return model

    def inspect(self, model, corpus, seed):
        return {"threads": torch.get_num_threads(), "text": corpus.tokenizer.decode([0, 1])}


@pytest.fixture(scope="module")
def corpus():
    tokenizer = data.CharTokenizer("abc")
    tokens = torch.tensor(tokenizer.encode("abcacb" * 40))
    return data.Corpus("test", "", 240, tokenizer, tokens[:200], tokens[200:])


def run(corpus, variants, seeds=(1, 2), n_workers=2):
    settings = TrainingSettings(steps=5, batch_size=3)
    return list(comparison.run_all(Bigrams, {v: {} for v in variants}, corpus, settings, list(seeds), n_workers))


def losses(results):
    return {str(r.run): (r.history.losses, r.history.validation_loss) for r in results}


def test_one_worker_or_two_give_the_same_numbers_to_the_last_digit(corpus):
    one, two = run(corpus, ["a", "b"], n_workers=1), run(corpus, ["a", "b"], n_workers=2)
    assert losses(one) == losses(two) and len(one) == 4
    assert losses(one)["a, seed 1"] == losses(one)["b, seed 1"] != losses(one)["a, seed 2"]  # same batches, same start
    assert all(r.found == {"threads": 1, "text": "ab"} for r in one)


def test_a_loss_that_is_not_finite_ends_its_run_alone(corpus):
    results = {str(r.run): r for r in run(corpus, ["a", "nan"])}
    assert results["nan, seed 2"].error == "the loss became nan at step 1" and results["nan, seed 2"].history is None
    assert all(results[name].history for name in ("a, seed 1", "a, seed 2", "nan, seed 1"))


def test_a_killed_process_ends_its_run_alone(corpus):
    results = {str(r.run): r for r in run(corpus, ["killed", "a"])}
    assert results["killed, seed 1"].error == "its process was killed (exit code 9)"
    assert results["a, seed 1"].history and results["a, seed 2"].history and len(results) == 4


def test_a_process_killed_before_it_has_its_job_ends_its_run_alone(corpus, monkeypatch):
    real, killed = workers.start_worker, []

    def start(function):
        process, connection = real(function)
        if not killed:
            process.kill()
            process.join()
            killed.append(process)
        return process, connection

    monkeypatch.setattr(workers, "start_worker", start)
    results = {str(r.run): r for r in run(corpus, ["a", "b"])}
    assert results["a, seed 1"].error == "its process was killed (exit code -9)"
    assert len(results) == 4 and sum(r.history is not None for r in results.values()) == 3


def test_a_mistake_in_the_code_ends_everything_and_shows_where(corpus):
    with pytest.raises(RuntimeError, match="a mistake in the code"):
        run(corpus, ["bug"], seeds=[1], n_workers=1)


def test_leaving_the_loop_stops_the_workers(corpus):
    started = []
    real, workers_start = workers.start_worker, lambda function: started.append(real(function)) or started[-1]
    workers.start_worker = workers_start
    try:
        for _ in comparison.run_all(Bigrams, {"a": {}, "b": {}}, corpus, TrainingSettings(steps=3), [1, 2, 3], 2):
            break
    finally:
        workers.start_worker = real
    assert len(started) == 2 and not any(process.is_alive() for process, _ in started)
