"""What chapter 07's break_it.py does beyond the matrix: damage after training, a reader's edits."""

import re

import pytest

from shared import chapters

break_it = chapters.load_file(chapters.chapter_folder(7) / "break_it.py")
SABOTAGES = {sabotage.name: sabotage for sabotage in break_it.CASE.sabotages}


def test_damage_after_training_shares_the_healthy_training_and_weights():
    healthy = break_it.healthy(1)
    damaged = SABOTAGES["exchanged-gate"].damage(healthy)
    assert damaged.history is healthy.history
    mine, theirs = healthy.trained.state_dict(), damaged.trained.state_dict()
    assert list(mine) == list(theirs) and all(mine[name].equal(theirs[name]) for name in mine)
    assert type(damaged.trained) is not type(healthy.trained)


def test_those_after_training_are_the_three_that_a_loader_can_do():
    later = {name for name, sabotage in SABOTAGES.items() if sabotage.later}
    assert later == {"exchanged-gate", "gelu-for-silu", "mixed-layouts"}


@pytest.mark.parametrize("name", SABOTAGES)
def test_a_sabotage_reaches_the_model_and_leaves_the_plain_builds_alone(name, modern, gpt):
    before = vars(modern).copy(), vars(gpt).copy()
    damaged = SABOTAGES[name].damage(break_it.healthy(1))
    assert damaged.modern is not modern
    assert type(damaged.build()).__module__ == damaged.modern.__name__ != modern.__name__
    assert (vars(modern), vars(gpt)) == before


@pytest.mark.parametrize(
    ("old", "new", "red"),
    [
        ("F.silu", "F.relu", {"activation"}),
        ("torch.stack((-x1, x0)", "torch.stack((x1, -x0)", {"rotation", "far"}),
    ],
)
def test_edits_of_a_reader_turn_on_the_lights_that_they_should(old, new, red, capsys):
    assert break_it.main(["--edit", old, new]) == 0
    out = capsys.readouterr().out
    lights = dict(re.findall(r"^([a-z0-9-]+) .* (green|RED)$", out, re.MULTILINE))
    assert set(lights) == {instrument.name for instrument in break_it.INSTRUMENTS}
    assert {name for name, light in lights.items() if light == "RED"} == red
