"""Chapter 07's README: its second table is in the logs beside it, and its command runs from the chapter's folder."""

import json
import re

from shared import chapters

FOLDER = chapters.chapter_folder(7)


def test_the_table_of_two_starts_is_what_the_logs_say():
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    logs = [
        (FOLDER / "expected" / f"400-steps-16-seeds{start}.txt").read_text(encoding="utf-8")
        for start in ("", "-fan-in")
    ]
    for variant in ("RMSNorm+GELU", "LayerNorm+SwiGLU", "RMSNorm+SwiGLU"):
        _, row = re.findall(rf"^\| {re.escape(variant)} \| (.+) \| (.+) \|$", readme, re.MULTILINE)
        for cell, log in zip(row, logs):
            difference, verdict = cell.split(", ")
            (line,) = [line for line in log.splitlines() if line.split()[:2] == variant.split("+")]
            assert difference in line and verdict in line
    for loss, log in zip(re.findall(r"\(loss (\d\.\d{3})\)", readme), logs, strict=True):
        assert re.search(rf"^LayerNorm +GELU +\S+ +\S+ +{loss} ", log, re.MULTILINE)
        assert "400 steps of 32 x 32 tokens" in log and "seeds 1 to 16" in log


def test_the_table_of_two_rates_is_what_the_logs_say():
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    (flags,) = re.findall(r"^    python build.py (--set learning_rate=.+)$", readme, re.MULTILINE)
    assert flags == "--set learning_rate=2e-3 --set warmup=10 --set final_rate=0"
    folder = FOLDER / "expected"
    logs = [(folder / name).read_text(encoding="utf-8") for name in ("run_log.txt", "falling-rate-6-seeds.txt")]
    for log, rate in zip(logs, ("AdamW at 0.003,", "AdamW at 0.002")):
        assert "200 steps of 32 x 32 tokens" in log and rate in log and "seeds 1 to 6" in log
    rows = re.findall(r"^\| (\w+\+\w+) \| ([+-].+), (\w+) \| ([+-].+), (\w+) \|$", readme, re.MULTILINE)
    assert [row[0] for row in rows[:3]] == ["RMSNorm+GELU", "LayerNorm+SwiGLU", "RMSNorm+SwiGLU"]
    for name, *cells in rows[:3]:
        for log, difference, said in zip(logs, cells[::2], cells[1::2]):
            (line,) = [line for line in log.splitlines() if line.split()[:2] == name.split("+")]
            assert f" {difference}  {said} " in line


def test_the_command_that_changes_every_variant_runs_from_the_chapters_folder(modern, here, tmp_path, monkeypatch):
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    (flags,) = re.findall(r"python build.py (--steps 400 .*init_std=fan_in)", readme)
    flags = flags.replace("400", "2").replace("16", "1").split()
    monkeypatch.chdir(FOLDER)
    assert modern.main([*flags, "--output-dir", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert {config["init_std"] for config in record["settings"]["variants"].values()} == {"fan_in"}


def test_every_page_has_its_heading_its_picture_and_its_command():
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    steps = sorted(FOLDER.glob("step_*.py"))
    sections = dict(re.findall(r"^### (\d\d) · (.+?)(?=^##)", readme, re.MULTILINE | re.DOTALL))
    assert list(sections) == [step.name[5:7] for step in steps]
    for step in steps:
        section = sections[step.name[5:7]]
        assert f"    python {step.name}\n" in section
        if "draws outputs/" in step.read_text(encoding="utf-8"):
            assert f"](expected/{step.name[:7]}.png)" in section


def test_the_sabotages_are_counted_and_listed():
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    sabotages = chapters.load_file(FOLDER / "break_it.py").CASE.sabotages
    words = {13: "thirteen", 18: "eighteen"}
    assert f"{words[len(sabotages)]} sabotages, {words[sum(not s.loud for s in sabotages)]} of them silent" in readme
    table = readme[readme.index("| name | symptom | cause |") :]
    assert re.findall(r"^\| ([a-z0-9-]+) \|", table, re.MULTILINE)[1:] == [s.name for s in sabotages]
