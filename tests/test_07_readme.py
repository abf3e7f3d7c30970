"""Chapter 07's README: its second table is in the logs beside it, and its command runs from the chapter's folder."""

import json
import re
import subprocess
import sys

from shared import chapters

FOLDER = chapters.chapter_folder(7)


def test_the_second_table_is_what_the_logs_say():
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    logs = [
        (FOLDER / "expected" / f"400-steps-16-seeds{start}.txt").read_text(encoding="utf-8")
        for start in ("", "-fan-in")
    ]
    for variant in ("RMSNorm+GELU", "LayerNorm+SwiGLU", "RMSNorm+SwiGLU"):
        (row,) = re.findall(rf"^\| {re.escape(variant)} \| (.+) \| (.+) \|$", readme, re.MULTILINE)
        for cell, log in zip(row, logs):
            difference, verdict = cell.split(", ")
            (line,) = [line for line in log.splitlines() if line.split()[:2] == variant.split("+")]
            assert difference in line and verdict in line
    for loss, log in zip(re.findall(r"\(loss (\d\.\d{3})\)", readme), logs, strict=True):
        assert re.search(rf"^LayerNorm +GELU +\S+ +\S+ +{loss} ", log, re.MULTILINE)
        assert "400 steps of 32 x 32 tokens" in log and "seeds 1 to 16" in log


def test_the_command_that_changes_every_variant_runs_from_the_chapters_folder(tmp_path):
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r'python -c "(import build; .+)"', readme)
    code = code.replace("'400'", "'2'").replace("'16'", f"'1', '--output-dir', {str(tmp_path)!r}")
    ran = subprocess.run([sys.executable, "-c", code], cwd=FOLDER, capture_output=True, text=True, encoding="utf-8")
    assert ran.returncode == 0, ran.stderr
    record = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert {config["init_std"] for config in record["settings"]["variants"].values()} == {"fan_in"}


def test_every_step_and_the_number_of_sabotages_are_named():
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    steps = sorted(path.name[5:7] for path in FOLDER.glob("step_*.py"))
    assert re.findall(r"^\| (\d\d) \|", readme, re.MULTILINE) == steps
    sabotages = chapters.load_file(FOLDER / "break_it.py").CASE.sabotages
    words = {13: "thirteen", 18: "eighteen"}
    assert f"{words[len(sabotages)]} sabotages, {words[sum(not s.loud for s in sabotages)]} of them silent" in readme
