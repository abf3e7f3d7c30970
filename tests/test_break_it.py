"""Every chapter's break_it.py: the healthy model leaves all lights green, each sabotage turns on its own and no other.

Chapters are found, not listed: a new break_it.py is tested by being there.
"""

import pytest
import torch

from shared import chapters
from shared.sabotage import Case, Outcome

FILES = sorted(chapters.PROJECTS.glob("*/break_it.py"))


def case_of(path) -> Case:
    return chapters.load_file(path).CASE


SABOTAGES = [
    pytest.param(path, s, id=f"{path.parent.name[:2]}-{s.name}") for path in FILES for s in case_of(path).sabotages
]
EACH_CHAPTER = pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)


@EACH_CHAPTER
def test_the_healthy_model_leaves_every_light_green(path, examined):
    red = {name: reading.text for name, reading in examined(path).items() if not reading.green}
    assert not red


@pytest.mark.parametrize(("path", "sabotage"), SABOTAGES)
def test_each_sabotage_turns_on_its_own_light_and_only_those_foretold(path, sabotage, examined):
    outcome = Outcome(sabotage, examined(path), examined(path, sabotage.name))
    own = sabotage.instrument
    assert outcome.tripped == sabotage.trips, {name: reading.text for name, reading in outcome.broken.items()}
    assert outcome.came_true, (outcome.healthy[own], outcome.broken[own])


@EACH_CHAPTER
def test_a_case_is_well_formed(path):
    case = case_of(path)
    instruments, names = [i.name for i in case.instruments], [s.name for s in case.sabotages]
    assert len(set(instruments)) == len(instruments) and len(set(names)) == len(names)
    for name in instruments + names:
        assert name == name.lower() and " " not in name and "_" not in name
    for sabotage in case.sabotages:
        assert {sabotage.instrument, *sabotage.also_trips} <= set(instruments), sabotage.name
        assert sabotage.instrument not in sabotage.also_trips, sabotage.name
        assert all((sabotage.predicts, sabotage.explains))


@EACH_CHAPTER
def test_a_sabotage_is_an_edit_of_a_build_that_changes_it_or_a_function(path):
    case = case_of(path)
    for sabotage in case.sabotages:
        assert bool(sabotage.edits) != bool(sabotage.function), sabotage.name
        assert sabotage.shown(), sabotage.name
        if sabotage.edits:
            assert "\n+ " in sabotage.shown(), sabotage.name
            chapters.edited_build(case.chapter, sabotage.edits)  # refuses missing or double lines


@EACH_CHAPTER
def test_the_quiz_shows_the_same_signs_of_both(path, patient):
    case = case_of(path)
    healthy = patient(path)
    signs = case.vitals(healthy)
    for sabotage in case.sabotages[:2]:
        assert list(case.vitals(patient(path, sabotage.name))) == list(signs)
    if case.sample:
        before = torch.random.get_rng_state()
        assert case.sample(healthy) == case.sample(healthy) != ""
        assert torch.equal(before, torch.random.get_rng_state())


def lists_its_sabotages(path, run) -> None:
    status, out, errors = run(path, "--list")
    assert status == 0 and errors == ""
    assert all(sabotage.name in out for sabotage in case_of(path).sabotages)


@EACH_CHAPTER
def test_it_lists_what_it_can_take_away(path, run_here):
    lists_its_sabotages(path, run_here)


def test_it_runs_by_its_path_from_any_directory(run_script):
    lists_its_sabotages(FILES[0], run_script)


@EACH_CHAPTER
def test_an_unknown_name_is_one_line_and_status_2(path, run_here):
    status, out, errors = run_here(path, "--sabotage", "no-such-thing")
    assert status == 2 and out == "" and errors.count("\n") == 1 and "no-such-thing" in errors
