"""Chapter 18's README: its numbers are in the logs beside it, its steps and sabotages are those that there are."""

import re

from shared import chapters

FOLDER = chapters.chapter_folder(18)
README = (FOLDER / "README.md").read_text(encoding="utf-8")


def log(name: str) -> str:
    return (FOLDER / "expected" / name).read_text(encoding="utf-8")


def test_both_tables_are_the_expected_runs_own():
    shown = re.findall(r"^    ((?:model|dense|top-2|Switch|expert choice) .+)$", README, re.MULTILINE)
    assert len(shown) == 7 + 6
    for line in shown:
        assert f"\n{line}\n" in log("run_log.txt"), line


def test_every_difference_that_is_claimed_is_in_the_log_of_the_longer_run():
    longer = log("400-steps-8-seeds.txt")
    assert "400 steps of 32 x 32 tokens" in longer and "seeds 1 to 8" in longer
    claims = README.partition("## What held up")[2]
    differences = re.findall(r"[+-]0\.\d{3} ± 0\.\d{3}", claims)
    assert len(differences) >= 5
    for difference in differences:
        assert difference in longer or f"lower than top-2 + loss, by {difference[1:]}" in longer, difference


def test_every_step_and_the_number_of_sabotages_are_named():
    steps = sorted(path.name[5:7] for path in FOLDER.glob("step_*.py"))
    assert re.findall(r"^\| (\d\d) \|", README, re.MULTILINE) == steps
    sabotages = chapters.load_file(FOLDER / "break_it.py").CASE.sabotages
    assert len(sabotages) == sum(not s.loud for s in sabotages) == 14
    assert "fourteen sabotages, all of them silent" in README
