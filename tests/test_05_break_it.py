"""What chapter 05's sabotages say beyond their own instrument: loud or silent, and what the numbers do."""

import math

import pytest
import torch

from shared import chapters
from shared.instruments import examine
from shared.kernels import fastest_float32

break_it = chapters.load_file(chapters.chapter_folder(5) / "break_it.py")
SABOTAGES = {sabotage.name: sabotage for sabotage in break_it.CASE.sabotages}


@pytest.fixture(scope="module")
def healthy():
    with fastest_float32():
        return examine(break_it.CASE, break_it.healthy(1))


@pytest.fixture(scope="module")
def broken():
    """name -> readings; each sabotage is carried out once."""
    known = {}

    def readings(name):
        if name not in known:
            with fastest_float32():
                known[name] = examine(break_it.CASE, SABOTAGES[name].damage(break_it.healthy(1)))
        return known[name]

    return readings


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
    assert torch.equal(model.lm_head.weight, model.token_embedding.weight)
    more = break_it.gpt.count_parameters(model) - break_it.gpt.count_parameters(break_it.healthy(1).build())
    assert more == model.lm_head.weight.numel()


def test_damage_leaves_the_patient_as_it_was():
    patient = break_it.healthy(1)
    for sabotage in SABOTAGES.values():
        damaged = sabotage.damage(patient)
        assert damaged is not patient and damaged.seed == patient.seed and damaged.start == patient.start
        assert "trained" not in vars(damaged)  # nothing that was measured on the healthy one
