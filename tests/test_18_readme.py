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
    differences = re.findall(r"[+-]?0\.\d{3} ± 0\.\d{3}", claims)
    assert len(differences) >= 5
    for difference in differences:
        assert difference in longer, difference
    names = {"top-2 alone": "top-2 alone", "top-2 + balance loss": "top-2 + loss"}
    names |= {"top-2 + bias": "top-2 + bias", "Switch + balance loss": "Switch + loss"}
    names |= {"expert choice": "expert choice"}
    rows = re.findall(r"^\| ([^|]+) \| ([+-]\S+ ± \S+) \| (\d\.\d\d) \|", claims, re.MULTILINE)
    assert [router for router, _, _ in rows] == list(names)
    for router, difference, max_violation in rows:
        name = re.escape(names[router])
        assert re.search(rf"^{name}\b.* {re.escape(difference)} ", longer, re.MULTILINE), router
        assert re.search(rf"^{name} +{max_violation} +\d\.\d ", longer, re.MULTILINE), router
    assert "MaxVio is 1.96 against 0.47" in claims
    (told,) = re.findall(r"^top-2 \+ loss +0\..*%.* (0\.\d\d) +(0\.\d\d)$", longer, re.MULTILINE)
    assert f'"Told" is {told[0]} for "top-2 + loss", and was {told[1]} ' in claims.replace("\n  ", " ")


def test_every_page_is_named_with_its_command_and_its_picture():
    steps = sorted(FOLDER.glob("step_*.py"))
    tour = README.partition("## The tour")[2].partition("## The experiment")[0]
    assert re.findall(r"^\*\*(\d\d) · ", tour, re.MULTILINE) == [path.name[5:7] for path in steps]
    assert re.findall(r"^    python (\S+)$", tour, re.MULTILINE) == [path.name for path in steps]
    pictures = sorted(path.name for path in (FOLDER / "expected").glob("step_*.png"))
    assert re.findall(r"\]\(expected/(step_\d\d\.png)\)", tour) == pictures
    drawn = [f"{p.name[:7]}.png" for p in steps if "figures.save(" in p.read_text(encoding="utf-8")]
    assert drawn == pictures


def test_every_sabotage_has_its_row():
    sabotages = chapters.load_file(FOLDER / "break_it.py").CASE.sabotages
    assert len(sabotages) == sum(not s.loud for s in sabotages) == 14
    assert re.findall(r"^\| `([a-z0-9-]+)` \|", README, re.MULTILINE) == [s.name for s in sabotages]
    assert "fourteen sabotages, all of them silent" in README
