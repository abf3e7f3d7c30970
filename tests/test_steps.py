"""Every step of every chapter runs, and every check that it makes holds. Steps are found, not listed."""

import ast
import re

import pytest

from shared import chapters

STEPS = sorted(chapters.PROJECTS.glob("[0-9][0-9]_*/step_*.py"))
SCRIPTS = [*STEPS, *sorted(chapters.PROJECTS.glob("*/build.py")), *sorted(chapters.PROJECTS.glob("*/break_it.py"))]
FOLDERS = sorted({step.parent for step in STEPS})
IDS = [f"{step.parent.name[:2]}-{step.stem[5:]}" for step in STEPS]
EACH_STEP = pytest.mark.parametrize("step", STEPS, ids=IDS)
EACH_CHAPTER = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


@EACH_STEP
def test_step_holds(step, step_run):
    status, out = step_run(step)
    assert status == 0, out
    held = re.findall(r"^all (\d+) checks hold$", out, re.MULTILINE)
    assert len(held) == 1 and int(held[0]) > 0, "a step ends in `return checks.report()`"
    assert "\x1b" not in out


@EACH_STEP
def test_step_keeps_to_its_form(step):
    text = step.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    assert re.fullmatch(r"step_\d\d_[a-z0-9]+(-[a-z0-9]+)*\.py", step.name)
    doc = ast.get_docstring(ast.parse(text))
    assert f"python {step.name}" in doc, "the docstring says how to run it"
    assert "cli.run_step(main, __doc__)" in text and "return checks.report()" in text


@pytest.mark.parametrize("folder", [chapters.PROJECTS, chapters.PROJECTS.parent / "shared"], ids=lambda f: f.name)
def test_no_line_of_code_is_wider_than_100_columns(folder):
    files = sorted(folder.glob("**/*.py"))
    lines = {f"{file.name}:{line}" for file in files for line in file.read_text(encoding="utf-8").split("\n")}
    assert len(files) > 10 and not {line for line in lines if len(line.partition(":")[2]) > 100}


@EACH_CHAPTER
def test_steps_are_numbered_without_a_gap(folder):
    numbers = [int(step.name[5:7]) for step in STEPS if step.parent == folder]
    assert numbers == list(range(1, len(numbers) + 1))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name[:2]}-{path.stem}")
def test_every_script_finds_shared_from_where_it_stands(script):
    lines = script.read_text(encoding="utf-8").splitlines()
    found = [line for line in lines if "shared" in line and line.startswith(("sys.path", "from"))]
    assert found[0].startswith("sys.path.insert(0, str(Path(__file__).resolve().parents[2]))")


def test_a_step_runs_by_its_path_from_any_directory(run_script, tmp_path):
    """One of chapter 37, which needs packages of its own."""
    step = next(step for step in STEPS if step.parent == chapters.chapter_folder(37))
    status, out, errors = run_script(step, "--tiny")
    assert status == 0, out + errors
    assert errors == "" and "checks hold" in out
    assert not list(tmp_path.iterdir()), "a step leaves nothing where it was called from"


@EACH_CHAPTER
def test_a_step_refuses_a_wrong_flag_in_one_line(folder, run_here):
    step = next(step for step in STEPS if step.parent == folder)
    status, out, errors = run_here(step, "--nonsense")
    assert status == 2 and out == "" and errors.count("\n") == 1 and "--nonsense" in errors
