"""What the README shows is what a run printed, and what it names exists."""

import json
import re

import pytest

from shared import chapters, cli

ROOT = chapters.PROJECTS.parent
READMES = [ROOT / "README.md", *sorted(chapters.PROJECTS.glob("*/README.md"))]
BUILDS = sorted(chapters.PROJECTS.glob("*/build.py"))


def test_the_table_is_the_expected_runs_own():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    log = (chapters.chapter_folder(7) / "expected" / "run_log.txt").read_text(encoding="utf-8")
    lines = log.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("norm  "))
    table = lines[start : start + 6]  # headers, rule, four variants
    assert table[2].startswith("LayerNorm") and table[5].startswith("RMSNorm")
    for line in table:
        assert f"    {line}\n" in readme, line


def test_expected_results_are_of_a_default_tiny_run_with_this_corpus():
    from shared import data

    sha = data.load_corpus("docs", "char", 32).sha256
    for build in BUILDS:
        record = json.loads((build.parent / "expected" / "results.json").read_text(encoding="utf-8"))
        if "runs" in record:  # a chapter that trains
            assert record["complete"] and record["settings"]["preset"] == "tiny", build
            assert record["settings"]["corpus"]["sha256"] == sha, build


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_every_picture_link_and_script_exists(readme):
    text = readme.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if "://" not in target:
            assert (readme.parent / target).exists(), target
    for script in re.findall(r"projects/\S+?\.py", text):
        assert (ROOT / script).exists(), script
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"\bmake ([a-z]+)\b", text):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_every_flag_that_the_readme_names_is_one():
    flags = {flag for action in cli.build_parser("")._actions for flag in action.option_strings}
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    many = re.search(r"\n## Many cores.*?(?=\n## )", readme, re.DOTALL)  # test_ranks.py reads it
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", readme.replace(many[0], "")))
    others = [ROOT / "shared" / "sabotage.py", *chapters.PROJECTS.glob("*/build.py")]
    others += chapters.PROJECTS.glob("*/conversation.py")
    for file in others:
        flags |= set(re.findall(r'"(--[a-z-]+)"', file.read_text(encoding="utf-8")))
    # pip's and torchrun's
    assert named - {"--index-url", "--no-deps", "--max-restarts"} <= flags


def test_the_top_level_holds_what_it_should():
    import subprocess

    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, encoding="utf-8", check=False
    )
    if tracked.returncode:
        pytest.skip("not a git checkout")
    top = {line.split("/")[0] for line in tracked.stdout.splitlines()}
    assert {name for name in top if not name.startswith(".")} <= {
        "projects", "shared", "tests", "Makefile", "requirements.txt", "README.md"
    }  # fmt: skip
