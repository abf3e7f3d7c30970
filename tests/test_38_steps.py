"""What chapter 38's pages leave to a developer."""

import pytest

from shared import chapters

# ---------------------------------------------------------------- 17: counting


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_two_experts_tell_what_all_of_them_count(name):
    step_17 = chapters.load_step(38, 17)
    assert step_17.counts_with_experts(name) == step_17.counts(name)


# ---------------------------------------------------------------- what the page with the parts prints


def test_places_name_what_differs_from_chapter_37_and_only_that():
    build = chapters.load_build(38)
    of_37 = build.places(build.DetailedConfig(tied=False))
    gemma2 = build.places(build.DetailedConfig(**build.RECIPES["gemma2"].changes))
    assert set(of_37.values()) == {""}
    assert list(gemma2.values()) == ["1+w", "both", "cap", "1 of 2", "", "GELU gate", "tied × cap"]
