"""Runs in worker processes, and as files: against whatever kills or damages them."""

import copy
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.nn as nn

from shared import chapters, cli, data, randomness, runs, training
from shared.training import History, TrainingSettings

pytestmark = pytest.mark.slow


class Tiny(nn.Module):
    def __init__(self, vocab_size, seed):
        super().__init__()
        self.cfg = type("Config", (), {"block_size": 4})
        self.table = nn.Parameter(torch.randn(vocab_size, vocab_size, generator=torch.Generator().manual_seed(seed)))

    def forward(self, idx, targets=None):
        logits = self.table[idx]
        return logits, None if targets is None else nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Bigrams(runs.Experiment):
    """A model of a few dozen numbers, and a variant for every way in which a run can go wrong."""

    def __init__(self, said="said"):
        self.said = said  # an argument that travels to the workers

    def build_model(self, config, vocab_size, seed):
        if config.trouble == "killed":
            os._exit(9)
        if config.trouble == "bug":
            raise KeyError("a mistake in the code")
        model = Tiny(vocab_size, seed)
        if config.trouble == "nan" and seed == 2:
            model.table.data[0] = math.nan
        return model

    def inspect(self, model, corpus, seed):
        text = corpus.tokenizer.decode([0, 1])
        return {"threads": torch.get_num_threads(), "text": text, "said": self.said}


@pytest.fixture(scope="module")
def corpus():
    tokenizer = data.CharTokenizer("abc")
    tokens = torch.tensor(tokenizer.encode("abcacb" * 40))
    return data.Corpus("test", "", 240, tokenizer, tokens[:200], tokens[200:])


@dataclass(frozen=True)
class Config:
    trouble: str = ""
    block_size: int = 4


@pytest.fixture
def plan_of(corpus, tmp_path):
    """plan_of(names): a plan whose variants are called so; trouble comes to those called by it."""

    def make(names, seeds=(1, 2), n_workers=2, steps=5, folder="out"):
        trouble = ("killed", "bug", "nan")
        options = cli.Options(
            preset="tiny", steps=None, seed=1, seeds=None, data=None, tokenizer=None, device="cpu",
            workers=n_workers, output_dir=tmp_path / folder, changes={}, fresh=False, report=False,
            keep=False,
        )
        return cli.Plan(
            title="test",
            options=options,
            variants=[cli.Variant(name, {"model": name}, {}) for name in names],
            configs={name: Config(name if name in trouble else "") for name in names},
            training=TrainingSettings(steps=steps, batch_size=3),
            corpus=corpus,
            seeds=list(seeds),
        )

    return make


def run(plan, experiment=None):
    return list(runs.train_missing(plan, experiment or bigrams(), have=[]))


def bigrams(*arguments):
    """Bigrams of this file under the name by which workers can import it."""
    return chapters.load_file(__file__).Bigrams(*arguments)


def losses(results):
    return {str(r.run): (r.history.losses, r.history.validation_loss) for r in results}


def test_one_worker_or_two_give_the_same_numbers_to_the_last_digit(plan_of):
    """With workers as in a run; in the tests below they are forked."""
    one = run(plan_of(["a", "b"], n_workers=1, folder="one"))
    two = run(plan_of(["a", "b"], n_workers=2, folder="two"))
    assert losses(one) == losses(two) and len(one) == 4
    assert losses(one)["a, seed 1"] == losses(one)["b, seed 1"] != losses(one)["a, seed 2"]  # same batches, same start
    assert all(r.found == {"threads": 1, "text": "ab", "said": "said"} for r in one)


def test_a_loss_that_is_not_finite_ends_its_run_alone(plan_of, forked):
    results = {str(r.run): r for r in run(plan_of(["a", "nan"]))}
    assert results["nan, seed 2"].error == "the loss became nan at step 1" and results["nan, seed 2"].history is None
    assert all(results[name].history for name in ("a, seed 1", "a, seed 2", "nan, seed 1"))


def test_a_killed_process_ends_its_run_alone(plan_of, forked):
    results = {str(r.run): r for r in run(plan_of(["killed", "a"]))}
    assert results["killed, seed 1"].error == "its process was killed (exit code 9)"
    assert results["a, seed 1"].history and results["a, seed 2"].history and len(results) == 4


def test_a_process_killed_before_it_has_its_job_ends_its_run_alone(plan_of, forked, monkeypatch):
    real = runs.start_worker
    killed = []

    def start(function, number):
        process, connection = real(function, number)
        if not killed:
            process.kill()
            process.join()
            killed.append(process)
        return process, connection

    monkeypatch.setattr(runs, "start_worker", start)
    results = {str(r.run): r for r in run(plan_of(["a", "b"]))}
    assert results["a, seed 1"].error == "its process was killed (exit code -9)"
    assert len(results) == 4 and sum(r.history is not None for r in results.values()) == 3


def test_a_mistake_in_the_code_ends_everything_and_shows_where(plan_of, forked):
    with pytest.raises(RuntimeError, match="a mistake in the code"):
        run(plan_of(["bug"], seeds=[1], n_workers=1))


def test_leaving_the_loop_stops_the_workers(plan_of, forked, monkeypatch):
    started = []
    real = runs.start_worker

    def start(function, number):
        started.append(real(function, number))
        return started[-1]

    monkeypatch.setattr(runs, "start_worker", start)
    for _ in runs.train_missing(plan_of(["a", "b"], seeds=(1, 2, 3), steps=3), bigrams(), have=[]):
        break
    assert len(started) == 2 and not any(process.is_alive() for process, _ in started)


def test_an_experiment_carries_arguments_to_its_workers(plan_of, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # a worker takes one thread all the same
    (result,) = run(plan_of(["a"], seeds=[1]), bigrams("something else"))
    assert result.found["said"] == "something else" and result.found["threads"] == 1


def test_a_stored_run_is_read_back_to_the_last_digit(plan_of, forked):
    plan = plan_of(["a", "b"], seeds=[1])
    trained = run(plan)
    read = runs.stored(plan, bigrams())
    assert losses(read) == losses(trained) and all(result.stored for result in read)
    assert list(runs.train_missing(plan, bigrams(), have=read)) == []
    assert runs.stored(plan, bigrams("another")) == []  # its arguments are settings too


def test_runs_are_wanted_seed_by_seed_so_that_pairs_are_whole(plan_of):
    wanted = runs.Store(plan_of(["a", "b"]), bigrams()).wanted()
    assert [str(run) for run in wanted] == ["a, seed 1", "b, seed 1", "a, seed 2", "b, seed 2"]


def test_whatever_enters_the_numbers_enters_the_name_of_the_file(plan_of, monkeypatch):
    plan = plan_of(["a"])
    corpus = plan.corpus
    tokenizer = copy.copy(corpus.tokenizer)
    tokenizer.name = "another"
    faster = replace(plan.training, learning_rate=1.0)
    others = [
        replace(plan, configs={"a": Config(block_size=5)}),
        replace(plan, training=faster),
        replace(plan, corpus=replace(corpus, sha256="another")),
        replace(plan, corpus=replace(corpus, tokenizer=tokenizer)),
        replace(plan, corpus=replace(corpus, validation=corpus.validation[:-1])),
    ]

    def name(plan, experiment=bigrams(), seed=1):
        return runs.Store(plan, experiment).path(runs.Run("a", seed)).name

    names = [name(plan), name(plan, bigrams("another")), name(plan, seed=2), *map(name, others)]
    monkeypatch.setattr(torch, "__version__", "0.1")
    names.append(name(plan))
    assert len(set(names)) == len(names) == 9
    monkeypatch.undo()
    assert name(replace(plan, title="another")) == names[0]  # what enters no number


def test_the_source_of_a_run_is_its_builds_the_loop_and_the_batches(tmp_path, monkeypatch):
    """Code counts in each of these files, a comment in none."""
    builds = [tmp_path / "05_first" / "build.py", tmp_path / "07_second" / "build.py"]
    for build, text in zip(builds, ["value = 1\n", "first = load_build(5)\n"]):
        build.parent.mkdir()
        build.write_text(text, encoding="utf-8")
    monkeypatch.setattr(chapters, "PROJECTS", tmp_path)
    paths = [*builds]
    for module in (training, data, randomness):
        path = tmp_path / Path(module.__file__).name
        path.write_text(Path(module.__file__).read_text(encoding="utf-8"), encoding="utf-8")
        monkeypatch.setattr(module, "__file__", str(path))
        paths.append(path)

    def source():
        return runs.source_hash.__wrapped__(str(builds[1]))  # not the answer of before

    known = {source()}
    for path in paths:
        before = path.read_text(encoding="utf-8")
        path.write_text(before + "# a remark\n", encoding="utf-8")
        assert source() in known, path
        path.write_text(before + "more = 1\n", encoding="utf-8")
        assert source() not in known, path
        known.add(source())


def test_means_are_over_finished_runs():
    finished = runs.Result(runs.Run("a", 1), 10, History(losses=[2.0], validation_loss=4.0))
    failed = runs.Result(runs.Run("a", 2), 10, error="the loss became nan at step 4")
    assert runs.mean_of([finished, failed], "a", lambda r: r.history.validation_loss) == 4.0
    assert math.isnan(runs.mean_of([finished], "b", lambda r: 1.0))
    assert runs.losses_of([finished, failed], "a") == {1: 4.0}
