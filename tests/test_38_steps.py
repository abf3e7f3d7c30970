"""What chapter 38's pages leave to a developer."""

import pytest

from shared import chapters

# ---------------------------------------------------------------- 12: counting


@pytest.mark.parametrize(("name", "period"), [("gemma2", 2), ("mixtral", 1)])
def test_one_period_tells_what_all_layers_count(name, period):
    step_12 = chapters.load_step(38, 12)
    assert step_12.counts_by_period(name, period).tolist() == step_12.counts(name).tolist()
