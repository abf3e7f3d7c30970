"""What chapter 05's sabotages say beyond their own instrument: loud or silent, and what the numbers do."""

import json
import math
import re

import pytest
import torch

from shared import chapters

FOLDER = chapters.chapter_folder(5)
break_it = chapters.load_file(FOLDER / "break_it.py")
SABOTAGES = {sabotage.name: sabotage for sabotage in break_it.CASE.sabotages}


@pytest.fixture
def healthy(examined):
    return examined(FOLDER / "break_it.py")


@pytest.fixture
def broken(examined):
    """A sabotage's name -> what the instruments read after it."""
    return lambda name: examined(FOLDER / "break_it.py", name)


def test_the_ten_of_the_chapter():
    assert list(SABOTAGES) == [
        "no-causal-mask", "no-residual", "no-root-d", "no-positions", "unit-embeddings", "no-depth-scaling",
        "scaled-by-name", "copied-head", "unshifted-targets", "sigma-half",
    ]  # fmt: skip


@pytest.mark.parametrize("name", SABOTAGES)
def test_loud_means_that_the_training_loss_is_alarming(name, healthy, broken):
    """Alarming is a loss above the healthy ones, at the start or at the end. A lower one alarms nobody."""
    readings = broken(name)
    worse = [
        not readings[light].green and readings[light].number > healthy[light].number
        for light in ("first-loss", "training-loss")
    ]
    assert SABOTAGES[name].loud == any(worse)


def test_without_a_mask_training_is_better_and_generation_worse(healthy, broken):
    readings = broken("no-causal-mask")
    assert readings["training-loss"].number < healthy["training-loss"].number / 2
    assert readings["generation"].number > healthy["generation"].number + 0.25


def test_sigma_half_doubles_the_first_loss_and_more_than_doubles_the_way(healthy, broken):
    readings = broken("sigma-half")
    assert readings["first-loss"].number > 1.9 * healthy["first-loss"].number
    assert 2 * healthy["pace"].number < readings["pace"].number < math.inf
    assert readings["depth"].green  # depth scaling holds, whatever σ is


def test_scaling_by_name_changes_nothing_until_the_name_changes(healthy, broken):
    readings = broken("scaled-by-name")
    same = [name for name in healthy if readings[name] == healthy[name]]
    assert set(healthy) - set(same) == {"depth-swiglu"}


def test_a_copied_head_costs_the_embedding_once_more():
    model = SABOTAGES["copied-head"].damage(break_it.healthy(1)).build()
    plain = break_it.healthy(1).build()
    assert torch.equal(model.lm_head.weight, model.token_embedding.weight)
    assert torch.equal(model.token_embedding.weight, plain.token_embedding.weight)
    assert size(model) - size(plain) == model.lm_head.weight.numel()


def size(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("old", "new", "red"),
    [
        ("is_causal=True", "is_causal=False", {"training-loss", "generation", "causality"}),
        ("F.gelu(self.fc(x))", 'F.gelu(self.fc(x), approximate="tanh")', set()),
        ("math.sqrt(2 * model.cfg.n_layers)", "math.sqrt(2)", {"depth", "depth-swiglu"}),
    ],
)
def test_edits_of_a_reader_turn_on_the_lights_that_they_should(old, new, red, capsys):
    assert break_it.main(["--edit", old, new]) == 0
    out = capsys.readouterr().out
    assert out.startswith("  in chapter 05's build.py, ")
    lights = dict(re.findall(r"^([a-z-]+) .* (green|RED)$", out, re.MULTILINE))
    assert set(lights) == {instrument.name for instrument in break_it.INSTRUMENTS}
    assert {name for name, light in lights.items() if light == "RED"} == red


def test_damage_leaves_the_patient_as_it_was():
    patient = break_it.healthy(1)
    for sabotage in SABOTAGES.values():
        damaged = sabotage.damage(patient)
        assert damaged is not patient and damaged.seed == patient.seed and damaged.start == patient.start
        assert "trained" not in vars(damaged)  # nothing that was measured on the healthy one


# ---------------------------------------------------------------- what the README shows

README = (FOLDER / "README.md").read_text(encoding="utf-8")


def numbers_in(cell: str) -> list[float]:
    """ "2.34 (2.37)" -> [2.34, 2.37]; "10 %" -> [0.1]; "107,200" -> [107200.0]."""
    found = re.findall(r"[\d.]+(?:,\d{3})*(?:e-\d+)?", cell)
    return [float(text.replace(",", "")) / (100 if "%" in cell else 1) for text in found]


def test_the_table_of_the_readme_is_what_the_instruments_read(healthy, broken):
    rows = [
        [cell.strip() for cell in line.strip("| ").split(" | ")]
        for line in README.splitlines()
        if line.startswith("| ") and re.search(r"\| (silent|loud) \|", line)
    ]
    assert len(rows) == len(SABOTAGES)
    for row, (name, sabotage) in zip(rows, SABOTAGES.items()):
        assert (row[1] == "loud") == sabotage.loud, name
        for cell, readings in zip(row[3:], (healthy, broken(name))):
            number = readings[sabotage.instrument].number
            if name == "no-positions":  # rounding noise: its power of ten is all there is to it
                assert abs(math.log10(numbers_in(cell)[0] / number)) < 0.7, (name, cell, number)
            elif name == "copied-head":
                assert f"{numbers_in(cell)[0]:,.0f} parameters" in readings["tie"].text
            else:
                assert numbers_in(cell)[0] == pytest.approx(number, rel=0.05, abs=0.02), (name, cell, number)


def test_the_readme_gives_the_expected_runs_loss():
    results = json.loads((FOLDER / "expected" / "results.json").read_text(encoding="utf-8"))
    assert f"ends at {results['variants'][0]['validation_loss']['mean']:.3f} on text" in README
