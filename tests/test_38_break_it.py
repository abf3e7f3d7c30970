"""What chapter 38's break_it.py does beyond the matrix: which models a mistake reaches, with which numbers."""

import pytest

from shared import chapters

PATH = chapters.chapter_folder(38) / "break_it.py"
break_it = chapters.load_file(PATH)
SABOTAGES = {sabotage.name: sabotage for sabotage in break_it.CASE.sabotages}

# The trained models that a mistake changes: those whose recipe has the detail, and no other.
REACHED = {
    "gains-read-as-w": {"gemma2", "gemma3"},
    "norm-after-turn": {"gemma3"},
    "window-too-wide": {"gemma2", "gemma3", "gpt-oss"},
    "one-base-for-all": {"gemma3"},
    "norm-after-sum": {"olmo2"},
    "cap-after-mask": {"gemma2"},
    "sink-lost": {"gpt-oss"},
    "gates-as-they-are": {"gpt-oss", "deepseek-v3"},
    "gates-renormalised": {"olmoe"},
    "no-shared-expert": {"deepseek-v3"},
    "unscaled-embedding": {"gemma2", "gemma3"},
    "no-yarn-length": {"gpt-oss"},
    "linear-scaling": {"llama3"},
    "bias-in-the-gate": {"deepseek-v3"},
    "halves-in-turn": {"cohere"},
    "all-layers-turned": {"smollm3"},
    "up-without-one": {"gpt-oss"},
    "cache-starts-at-0": set(),
}


@pytest.mark.parametrize("name", SABOTAGES)
def test_a_mistake_reaches_the_models_that_have_the_detail(name, patient):
    assert set(patient(PATH, name).reached) == REACHED[name]


def test_each_is_silent_and_more_than_half_lose_something():
    assert len(SABOTAGES) == 18
    assert not any(sabotage.loud or "trained" in sabotage.trips for sabotage in SABOTAGES.values())
    assert sum("loaded" in sabotage.trips for sabotage in SABOTAGES.values()) == 10


@pytest.mark.parametrize("name", ["gains-read-as-w", "norm-after-turn", "bias-in-the-gate"])
def test_healthy_and_damaged_models_hold_the_same_numbers(name, patient):
    """Those of another model than the one that training begins with: no gain is 1, no bias is 0."""
    for recipe in ("gemma2", "qwen3", "deepseek-v3", "gpt-oss"):
        mine = patient(PATH).model(recipe).state_dict()
        theirs = patient(PATH, name).model(recipe).state_dict()
        assert list(mine) == list(theirs) and all(mine[key].equal(theirs[key]) for key in mine)
        vectors = [numbers for numbers in mine.values() if numbers.dim() == 1]
        assert vectors and all(numbers.std() > 0.1 for numbers in vectors)
