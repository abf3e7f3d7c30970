"""Chapter 37's README: its numbers stand in expected/, its pages and damages are all there are."""

import re

from shared import chapters

FOLDER = chapters.chapter_folder(37)
README = (FOLDER / "README.md").read_text(encoding="utf-8")


def log(name: str) -> str:
    return (FOLDER / "expected" / name).read_text(encoding="utf-8")


def test_the_answer_and_the_perplexity_are_the_expected_runs():
    assert "> What is the capital of France?\nThe capital of France is Paris." in log("run_log.txt")
    assert "\n    The capital of France is Paris.\n" in README
    (perplexity,) = re.findall(r"a perplexity of (\S+) on the first 1,024 tokens", README)
    assert re.search(rf"^perplexity on 1,024 tokens +{perplexity}$", log("run_log.txt"), re.MULTILINE)


def test_every_damage_is_in_the_table_with_what_came_of_it():
    shown = re.findall(r"^\| ([a-z0-9-]+) \| .+ \| (.+) \| (.+) \| .+ \|$", README, re.MULTILINE)
    shown = [row for row in shown if row[0] != "name"]
    table = log("break_it.txt").split("\n\n")[0]
    damages = table.splitlines()[3:]  # below the headers, their line, and the healthy model
    assert len(shown) == len(damages) == 23
    for (name, times, answer), line in zip(shown, damages, strict=True):
        cells = re.split(r"  +", line)
        assert cells == [name, times, answer.replace("nothing", "''")]


def test_every_page_has_its_command_and_its_picture():
    for page in FOLDER.glob("step_*.py"):
        assert f"\n    python {page.name}\n" in README, page.name
        assert f"\n### {page.name[5:7]} {page.stem[8:].replace('-', ' ')}" in README, page.name
    for picture in (FOLDER / "expected").glob("step_*.png"):
        assert f"](expected/{picture.name})" in README, picture.name
