"""Chapter 07's study: which runs it wants, how it goes on after an interruption, what it says of its numbers."""

import math
import pickle
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shared import chapters, console, runs, training
from shared.console import UserError
from shared.verdict import Interval

FOLDER = chapters.chapter_folder(7)
report = chapters.load_file(FOLDER / "study.py")
study = report.study
Condition, Setting, Trial = study.Condition, study.Setting, study.Trial
COMMITTED = FOLDER / "expected" / "study"
GELU, SWIGLU = report.MLPS
CONDITIONS = [condition for part in report.PARTS.values() for condition in part.conditions]
TINY = Condition(Setting(steps=3, d_model=8), (GELU, SWIGLU), (1.6e-2, 3.2e-2), choosing=1, judging=1, fine=False)


def made_up(conditions, loss_of, first_seed=1):
    """The study of a world in which a run ends with loss_of(trial)."""
    return study.reached(conditions, lambda trial: {trial: loss_of(trial)}, first_seed)


def valley_at(rate):
    """A loss that rises to both sides of a rate; it differs by seed, and by where the model is compared."""

    def loss(trial):
        where = trial.setting.steps + trial.setting.d_model
        return 2 + abs(math.log2(trial.rate / rate)) + trial.seed / 100 + where / 1000

    return loss


# ---------------------------------------------------------------- choice and verdict


def test_no_seed_both_chooses_a_rate_and_judges_at_it():
    for first in (1, 101):
        for condition in CONDITIONS:
            assert condition.choosing <= study.CHOOSING or not condition.judging
            chose = study.choice_seeds(condition, first)
            judged = study.verdict_seeds(condition, first)
            assert len(chose) == condition.choosing and len(judged) == condition.judging
            assert not set(chose) & set(judged)
    ours, theirs = (
        {s for c in CONDITIONS for s in study.choice_seeds(c, first) + study.verdict_seeds(c, first)}
        for first in (1, 101)
    )
    assert not ours & theirs


def test_a_rate_is_chosen_by_the_choice_seeds_alone():
    condition = Condition(Setting(), (GELU, SWIGLU))
    losses = made_up([condition], valley_at(4e-3))
    judges = study.verdict_seeds(condition, 1)
    changed = {t: 99.0 * t.rate if t.seed in judges else loss for t, loss in losses.items()}
    # Verdict seeds may stand at every rate, as they do in another part: they have no vote.
    changed |= {Trial(Setting(), rate, seed): 1 / rate for rate in study.RATES for seed in judges}
    assert study.best_rate(condition, GELU, changed, 1) == study.best_rate(condition, GELU, losses, 1) == 4e-3
    for seed in study.choice_seeds(condition, 1):
        changed[Trial(Setting(), 5.6e-3, seed)] = 0.0
    assert study.best_rate(condition, GELU, changed, 1) == 5.6e-3


def test_the_best_rate_is_of_the_mean_over_the_choice_seeds_and_a_diverged_run_is_the_worst():
    condition = Condition(Setting(), (GELU,), (2e-3, 4e-3, 8e-3, 1.6e-2), fine=False)
    table = {2e-3: (2.2, 2.3), 4e-3: (2.4, 1.9), 8e-3: (1.0, None), 1.6e-2: (3.0, 3.0)}
    losses = {Trial(Setting(), rate, 1 + i): loss for rate, pair in table.items() for i, loss in enumerate(pair)}
    assert study.mean_losses(losses, Setting(), [1, 2]) == {
        2e-3: 2.25,
        4e-3: pytest.approx(2.15),
        8e-3: math.inf,
        1.6e-2: 3.0,
    }
    assert study.best_rate(condition, GELU, losses, 1) == 4e-3
    losses[Trial(Setting(), 8e-3, 2)] = 3.2
    assert study.best_rate(condition, GELU, losses, 1) == 8e-3
    del losses[Trial(Setting(), 2e-3, 2)]
    assert study.best_rate(condition, GELU, losses, 1) is None  # one is still to come


@pytest.mark.parametrize("rate", study.RATES)
def test_the_rates_walk_downhill_until_the_best_has_neighbours(rate):
    condition = Condition(Setting(), (GELU,))
    losses = made_up([condition], valley_at(rate))
    assert not study.wanted(condition, losses, 1)
    tried = sorted(study.mean_losses(losses, Setting(), [1, 2]))
    best = study.best_rate(condition, GELU, losses, 1)
    i = study.RATES.index(best)
    row = report.row_of(condition, GELU, losses, 1)
    if 1 < study.RATES.index(rate) < len(study.RATES) - 2:
        assert best == rate
        assert {study.RATES[i - 1], study.RATES[i + 1]} < set(tried) and not row.at_edge
    if rate in (study.RATES[0], study.RATES[-1]):
        assert best == rate and row.at_edge
    assert len(tried) <= 10
    coarse = replace(condition, fine=False)
    tried = study.mean_losses(made_up([coarse], valley_at(rate)), Setting(), [1, 2])
    assert set(tried) <= set(study.RATES[::2])


def test_the_grid_is_one_of_half_octaves():
    assert len(study.RATES) % 2 == 1 and 1e-3 in study.RATES[::2]
    for coarse, following in zip(study.RATES[::2], study.RATES[2::2]):
        assert following == pytest.approx(2 * coarse)
    for rate, following in zip(study.RATES, study.RATES[1:]):
        assert following / rate == pytest.approx(math.sqrt(2), rel=0.03)


# ---------------------------------------------------------------- a run


def test_a_setting_is_the_builds_own_model_and_start(modern):
    for start, std in (("0.02", 0.02), ("fan_in", "fan_in")):
        config = modern.ModernConfig(d_model=16, norm_type="rmsnorm", mlp_type="swiglu", init_std=std)
        theirs = modern.FourWay().build_model(config, 11, 5).state_dict()
        ours = study.build_model(Setting("RMSNorm+SwiGLU", d_model=16, start=start), 11, 5).state_dict()
        assert list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("start", "changes"),
    [
        ("fan_in in the MLP", {"gate_proj", "up_proj", "down_proj"}),
        ("fan_in in attention", {"qkv", "proj"}),
        ("fan_in in the gate", {"gate_proj"}),
        ("fan_in in up", {"up_proj"}),
    ],
)
def test_a_start_changes_the_matrices_that_it_names_and_no_other(start, changes):
    def state(start):
        return study.build_model(Setting(SWIGLU, d_model=16, start=start), 11, 5).state_dict()

    plain, changed, larger = state("0.02"), state(start), state("fan_in")
    differ = {name for name in plain if not torch.equal(plain[name], changed[name])}
    assert {name.split(".")[-2] for name in differ} == changes
    assert len(differ) == 2 * len(changes)  # in both blocks
    assert all(torch.equal(changed[name], larger[name]) for name in differ)


def test_both_schedules():
    trial = Trial(Setting(steps=400, schedule="cosine", clip=3.0), 8e-3, 1)
    settings = study.training_settings(trial)
    assert (settings.warmup, settings.clip, settings.steps) == (20, 3.0, 400)
    rates = [training.learning_rate(step, settings) for step in range(400)]
    assert max(rates) == 8e-3 and rates[0] == pytest.approx(4e-4) and rates[-1] < 1e-5
    constant = study.training_settings(Trial(Setting(schedule="constant"), 8e-3, 1))
    assert {training.learning_rate(step, constant) for step in (0, 9, 799)} == {8e-3}


# ---------------------------------------------------------------- training what is missing


@pytest.fixture
def here(monkeypatch):
    """Runs are trained in this process, one after the other; the list of those trained."""
    trained = []

    def one_by_one(function, context, jobs, n_workers, on_report):
        for job in jobs:
            context, job = pickle.loads(pickle.dumps((context, job)))  # as to a worker
            trained.append(job)
            yield job, function(context, job, on_report, 0)

    study.code_hash()  # it reads the source of load_text, which is exchanged here
    monkeypatch.setattr(runs, "run_jobs", one_by_one)
    corpus = study.load_text("docs, characters")
    short = replace(corpus, validation=corpus.validation[:200])
    monkeypatch.setattr(study, "load_text", {"docs, characters": short}.get)
    return trained


def test_an_interrupted_study_loses_the_run_under_way_and_no_other(here, monkeypatch, tmp_path, capsys):
    parts = {"one": [TINY], "two": [replace(TINY, judging=0)]}
    whole = dict(study.train_missing(parts, study.Store(tmp_path / "whole"), 1, 2))
    assert [len(losses) for losses in whole.values()] == [len(set(here)), len(set(here)) - 2]
    assert len(here) == len(set(here))  # the second part's runs are the first's
    assert f"one: {here[-1]}: {whole['one'][here[-1]]:.3f}; about 0 seconds left" in capsys.readouterr().out
    everything = list(here)

    plain = training.train
    left = iter([False] * 3 + [True])

    def train(*args):
        if next(left, False):
            raise KeyboardInterrupt
        return plain(*args)

    monkeypatch.setattr(training, "train", train)
    with pytest.raises(KeyboardInterrupt):
        dict(study.train_missing(parts, study.Store(tmp_path / "broken"), 1, 2))
    assert len(list((tmp_path / "broken").iterdir())) == 3
    assert "already" not in capsys.readouterr().out
    here.clear()
    again = dict(study.train_missing(parts, study.Store(tmp_path / "broken"), 1, 2))
    assert len(here) == len(everything) - 3 and set(here) == set(everything[3:])
    assert again == whole
    assert "3 runs are there already." in capsys.readouterr().out

    path = study.Store(tmp_path / "broken").path(here[0])
    path.write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match=rf"{path.name} is not a stored run; delete it"):
        dict(study.train_missing(parts, study.Store(tmp_path / "broken"), 1, 2))


def test_a_kept_loss_is_that_of_the_same_training_elsewhere(here, modern, tmp_path):
    """As FourWay would train it: the build's own model, the loop's own settings."""
    context = study.Context(study.Store(tmp_path), {"docs, characters": study.load_text("docs, characters")})
    trial = Trial(Setting(SWIGLU, d_model=8, steps=3), 1.6e-2, 7)
    loss = study.train_trial(context, trial, print)
    config = modern.ModernConfig(d_model=8, norm_type="layernorm", mlp_type="swiglu")
    model = modern.FourWay().build_model(config, 95, 7)
    settings = training.TrainingSettings(steps=3, learning_rate=1.6e-2, final_rate=0.0)
    history = training.train(model, context.corpora["docs, characters"], settings, 7)
    assert study.Store(tmp_path).read(trial) == {trial: loss} == {trial: history.validation_loss}
    assert study.Store(tmp_path).read(replace(trial, seed=8)) == {}
    assert study.Store(tmp_path, code="another").read(trial) == {}


def test_a_run_that_diverges_is_kept_as_one(here, monkeypatch, tmp_path):
    def diverge(*_):
        raise training.NonFiniteLoss(3, math.nan)

    monkeypatch.setattr(training, "train", diverge)
    ((_, losses),) = study.train_missing({"one": [TINY]}, study.Store(tmp_path), 1, 1)
    assert set(losses.values()) == {None}
    study.write_rows(tmp_path / "one.json", study.rows_of([TINY], losses, 1))
    assert study.read_rows(tmp_path / "one.json") == losses


def test_a_parts_file_holds_what_the_part_used_and_nothing_else(tmp_path):
    condition = replace(TINY, judging=3)
    losses = made_up([condition], valley_at(1.6e-2))
    others = {Trial(condition.setting, 1e-3, 1): 0.0, Trial(Setting(), 1.6e-2, 1): 0.0}
    study.write_rows(tmp_path / "rates.json", study.rows_of([condition], losses | others, 1))
    assert study.read_rows(tmp_path / "rates.json") == {t: round(loss, 6) for t, loss in losses.items()}
    (tmp_path / "rates.json").write_text('{"columns": [], "runs": []}', encoding="utf-8")
    with pytest.raises(UserError, match="is not a part's results"):
        study.read_rows(tmp_path / "rates.json")


# ---------------------------------------------------------------- what is said


def part_of(conditions, axis="steps", **fields):
    return report.Part("A question", axis, conditions, "differences", **fields)


def with_difference(mean, spread, of=SWIGLU):
    """A world in which `of` differs from the others by mean ± spread, by turns."""

    def loss(trial):
        own = mean(trial.setting) if callable(mean) else mean
        sign = 1 if trial.seed % 2 else -1
        return valley_at(4e-3)(trial) + (trial.setting.variant == of) * (own + sign * spread)

    return loss


# With six seeds of ± spread the 95 % interval is mean ± 2.571 · spread · √(6/5) / √6 = 1.150 · spread.
@pytest.mark.parametrize(
    ("mean", "spread", "says"),
    [
        (-0.1, 0.086, "lower"),
        (-0.1, 0.088, "can't tell"),
        (0.1, 0.086, "higher"),
        (0.1, 0.088, "can't tell"),
        (0.0, 0.0173, "equal"),
        (0.0, 0.0175, "can't tell"),
        (0.01, 0.0086, "equal"),
        (0.0201, 0.0001, "higher"),
    ],
)
def test_a_verdict_follows_from_its_numbers(mean, spread, says):
    part = part_of([Condition(Setting(), (GELU, SWIGLU))])
    found = report.find(part, made_up(part.conditions, with_difference(mean, spread)), 1)
    baseline, row = found.rows
    assert baseline.is_baseline and baseline.difference is None
    assert row.difference.mean == pytest.approx(mean) and row.difference.half_width == pytest.approx(
        1.150 * spread, rel=1e-3
    )
    assert row.judged.said == says and row.rate == 4e-3 and len(row.losses) == 6
    assert f"{says}" in report.say_part("one", part, made_up(part.conditions, with_difference(mean, spread)), 1)[1]


def test_all_that_a_part_says_is_judged_together():
    """Alone this difference is lower; among four of its kind Holm's correction holds it back."""
    loss = with_difference(-0.1, 0.08)
    for n, says in ((1, "lower"), (4, "can't tell")):
        part = part_of([Condition(Setting(steps=100 * 2**i), (GELU, SWIGLU)) for i in range(n)])
        rows = report.find(part, made_up(part.conditions, loss), 1).rows
        assert {row.judged.said for row in rows if row.judged} == {says}


def test_each_variant_is_judged_at_its_own_best_rate():
    def loss(trial):
        best = 2e-3 if trial.setting.variant == SWIGLU else 8e-3
        return valley_at(best)(trial) + 0.001 * (trial.seed % 2)

    part = part_of([Condition(Setting(), (GELU, SWIGLU))])
    baseline, row = report.find(part, made_up(part.conditions, loss), 1).rows
    assert (baseline.rate, row.rate) == (8e-3, 2e-3)
    assert row.difference.mean == pytest.approx(0.0) and row.judged.said == "equal"


def test_a_run_that_diverged_is_left_out_and_said():
    part = part_of([Condition(Setting(), (GELU, SWIGLU))])
    plain = with_difference(-0.1, 0.01)
    losses = made_up(part.conditions, lambda t: None if (t.setting.variant, t.seed) == (SWIGLU, 6) else plain(t))
    row = report.find(part, losses, 1).rows[1]
    assert (row.diverged, row.difference.n, row.judged.said) == ([6], 5, "lower")
    assert f"Left out, since it diverged: {SWIGLU} at 800, seed 6." in report.say_part("one", part, losses, 1)


def test_a_killed_worker_and_a_full_disk_are_one_line(here, monkeypatch, tmp_path):
    full = study.Store(tmp_path / "file")
    full.folder.write_text("no folder", encoding="utf-8")
    with pytest.raises(UserError, match="a finished run can't be kept: .*file"):
        full.write(Trial(Setting(), 1e-3, 1), 2.0)
    monkeypatch.setattr(runs, "run_jobs", lambda function, context, jobs, *_: [(jobs[0], runs.WorkerDied(-9))])
    with pytest.raises(UserError, match=r"a worker process was killed \(exit code -9\)"):
        list(study.train_missing({"one": [TINY]}, study.Store(tmp_path / "runs"), 1, 2))


def test_a_trend_is_a_line_through_each_seed():
    part = part_of(
        [Condition(Setting(d_model=d), (GELU, SWIGLU), judging=n) for d, n in ((32, 6), (64, 6), (256, 4))],
        axis="d_model",
        trend=True,
    )
    # 0.015 more at each doubling; seeds 4 to 7 are in all of them.
    losses = made_up(part.conditions, with_difference(lambda s: -0.13 + 0.015 * math.log2(s.d_model), 0.001))
    found = report.find(part, losses, 1)
    slope, judged = found.trends[SWIGLU]
    assert slope == Interval(pytest.approx(0.015), pytest.approx(0.0, abs=1e-9), 4) and judged.said == "equal"
    assert "each doubling: equal within 0.02 (+0.015 ± 0.000)" in " ".join(report.finding(part, found).split())
    assert report.verdict_table(part, found).rows[-1][:2] == ["each doubling", SWIGLU]


def test_a_best_rate_at_the_edge_is_said():
    part = part_of([Condition(Setting(steps=100), (GELU, SWIGLU)), Condition(Setting(), (GELU,))])
    for rate, edge in ((study.RATES[-1], True), (4e-3, False)):
        loss = {True: valley_at(rate), False: valley_at(4e-3)}
        losses = made_up(part.conditions, lambda t, loss=loss: loss[t.setting.steps == 100](t))
        text = console.log_text(report.say_part("one", part, losses, 1))
        note = "A best rate at the edge of the rates tried: LayerNorm+GELU at 100; LayerNorm+SwiGLU at 100."
        assert (note in " ".join(text.split())) == ("(edge)" in text) == edge


@pytest.mark.parametrize(
    ("mean", "spread", "agrees"),
    [
        (-0.100, 0.005, "yes"),
        (-0.1050, 0.005, "yes"),
        (-0.1059, 0.005, "not in value"),
        (-0.1059, 0.006, "not in value"),  # ours lies within theirs, theirs not within ours
        (-0.1050, 0.004, "not in value"),  # and the other way round
        (0.0, 0.005, "no: lower / equal"),
    ],
)
def test_two_studies_side_by_side(mean, spread, agrees):
    """The first: −0.100 ± 0.00575; the second: mean ± 1.15 · spread."""
    part = part_of([Condition(Setting(), (GELU, SWIGLU))])
    ours = report.Study("Ours", 1, made_up(part.conditions, with_difference(-0.1, 0.005)))
    theirs = report.Study("Theirs", 101, made_up(part.conditions, with_difference(mean, spread), 101))
    head, table = report.say_beside(part, ours, theirs)
    assert [row[-1] for row in table.rows] == [agrees]
    assert head.startswith(f"Ours / Theirs: {int(agrees == 'yes')} of 1 rows agree")


def test_the_bottom_of_a_valley_is_that_of_a_parabola():
    points = {rate: 3 + (math.log2(rate) + 7.3) ** 2 for rate in study.RATES[3:13]}
    assert report.bottom(points) == pytest.approx(-7.3)
    assert report.bottom({1e-3: 2.0, 2e-3: 1.0}) == math.log2(2e-3)  # at the edge
    assert report.bottom({1e-3: 1.0, 2e-3: 1.0, 4e-3: 1.0}) == math.log2(1e-3)


# ---------------------------------------------------------------- the report


def test_every_part_can_be_said_and_drawn(tmp_path, capsys, monkeypatch):
    """Of made-up results, half of them missing for some parts: as after an interruption."""
    noise = random.Random(0)
    png = report.figures.png
    for name, part in report.PARTS.items():
        # What a figure holds is settled when it is made; to render all six takes seconds.
        monkeypatch.setattr(report.figures, "png", png if name == "budgets" else lambda figure: b"\x89PNG")
        losses = made_up(part.conditions, lambda t: valley_at(4e-3)(t) + noise.gauss(0, 0.01))
        study.write_rows(tmp_path / f"{name}.json", study.rows_of(part.conditions, losses, 1))
        kept = dict(list(losses.items())[::2]) if name in ("sizes", "why") else losses
        report.publish(name, part, [report.Study("Made up", 1, kept)], tmp_path)
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert part.question in (tmp_path / f"{name}.txt").read_text(encoding="utf-8")
    assert "LayerNorm+ReLU²" in capsys.readouterr().out


@pytest.mark.parametrize("path", sorted(COMMITTED.glob("*.txt")), ids=lambda path: path.stem)
def test_the_committed_results_give_the_committed_tables(path, tmp_path, monkeypatch):
    monkeypatch.setattr(report.figures, "png", lambda figure: b"")
    monkeypatch.setattr(report, "draw_valleys", lambda *_: None)
    monkeypatch.setattr(report, "draw_differences", lambda *_: None)
    assert report.main(["--report", "--part", path.stem, "--output-dir", str(tmp_path)]) == 0
    assert (tmp_path / path.name).read_text(encoding="utf-8") == path.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(COMMITTED.glob("budgets.json")), ids=lambda path: path.stem)
def test_the_code_of_today_gives_a_committed_number(path, tmp_path):
    """The first of the runs of 100 steps, within what machines differ by."""
    trial, loss = next(item for item in study.read_rows(path).items() if item[0].setting.steps == 100)
    context = study.Context(study.Store(tmp_path), {trial.setting.text: study.load_text(trial.setting.text)})
    assert study.train_trial(context, trial, print) == pytest.approx(loss, abs=0.002)


def test_a_report_of_nothing_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "__file__", str(tmp_path / "study.py"))
    with pytest.raises(UserError, match=r"--report: .* holds no results of the part rates"):
        report.main(["--report", "--output-dir", str(tmp_path / "out")])


def test_the_makefile_names_every_part():
    makefile = (Path(chapters.PROJECTS).parent / "Makefile").read_text(encoding="utf-8")
    others = ", ".join(list(report.PARTS)[1:])
    assert f"make study PART=rates ({others})" in makefile and "study.py $(if $(PART),--part $(PART))" in makefile
