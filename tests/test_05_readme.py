"""Chapter 05's README: every page with its command and its picture, and numbers that a page prints."""

import json
import re

import pytest

from shared import chapters

FOLDER = chapters.chapter_folder(5)
README = (FOLDER / "README.md").read_text(encoding="utf-8")
STEPS = sorted(FOLDER.glob("step_*.py"))


def section(number: str) -> str:
    """The README's text on page `number`, its line breaks as spaces."""
    (text,) = re.findall(rf"^\*\*{number} (?:.|\n)+?(?=^\*\*\d\d |^## )", README, re.MULTILINE)
    return " ".join(text.split())


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name[5:7])
def test_every_page_has_its_link_its_command_and_its_picture(step):
    text = section(step.name[5:7])
    assert f"]({step.name})" in text
    assert f"python {step.name}" in text
    picture = f"expected/{step.stem[:7]}.png"
    assert (f"]({picture})" in text) == (FOLDER / picture).exists()


def test_every_page_that_draws_has_its_picture_in_expected():
    drawing = {s.stem[:7] for s in STEPS if "figures.save(" in s.read_text(encoding="utf-8")}
    kept = {picture.stem for picture in (FOLDER / "expected").glob("step_*.png")}
    assert drawing == kept and len(kept) == 10


@pytest.mark.parametrize(
    ("number", "quoted", "printed"),
    [
        ("05", "is 0.99, and 0.00 if", r"is 0.99 with the sums and 0.00 without"),
        ("06", "124,439,808 parameters", r"All together 124,439,808:"),
        ("08", "ln V is 4.55, and 4.57 with", r"ln V = 4.55. First loss with σ = 0.02: 4.57;"),
        ("08", "own start gives 44.", r"as torch starts the model: 44\.\d"),
        ("09", "3.13-fold with 2 layers and 22.48-fold with 100", r"\n +2 +1.78 +3.13\n"),
        ("09", "it grows 1.78-fold and 1.77-fold", r"\n +100 +1.77 +22.48\n"),
        ("10", "guessing 4.55,", r"guessing +4.55\n"),
        ("10", "letters 3.41,", r"table of letters +3.41\n"),
        ("10", "pairs 2.56.", r"table of pairs +2.56\n"),
    ],
)
def test_a_number_in_the_readme_is_what_the_page_prints(number, quoted, printed, step_run):
    (step,) = FOLDER.glob(f"step_{number}_*.py")
    assert quoted in section(number)
    assert re.search(printed, step_run(step).out)


def test_the_losses_are_the_expected_runs():
    results = json.loads((FOLDER / "expected" / "results.json").read_text(encoding="utf-8"))
    assert f"ln 95 = {results['uniform_loss']:.3f} nats" in README
    assert f"ends at {results['variants'][0]['validation_loss']['mean']:.3f} on text" in README


def test_the_silent_sabotages_are_counted():
    sabotages = chapters.load_file(FOLDER / "break_it.py").CASE.sabotages
    words = {7: "Seven", 10: "ten"}
    silent = sum(not sabotage.loud for sabotage in sabotages)
    assert f"{words[silent]} of {words[len(sabotages)]} are silent" in README
