"""Chapter 38's README: its tables are the logs', the recipes', the publishers' and break_it's own."""

import re

import pytest

from shared import chapters

FOLDER = chapters.chapter_folder(38)
README = (FOLDER / "README.md").read_text(encoding="utf-8")
EXPERIMENT = README.partition("## The experiment")[2].partition("\n## ")[0]
LOG = re.compile(r"^(?P<name>\S.*?)  +[\d,]+  [\d.]+  [\d.]+  +(?P<difference>\S+ ± \S+)  (?P<verdict>.+?)  ", re.M)


@pytest.fixture(scope="module")
def build():
    """Chapter 38's build.py."""
    return chapters.load_build(38)


def log(name: str) -> str:
    return (FOLDER / "expected" / name).read_text(encoding="utf-8")


def answers(name: str) -> dict[str, str]:
    """By model, what a log says of its difference."""
    return {row["name"]: f"{row['difference']}, {row['verdict']}" for row in LOG.finditer(log(name))}


def test_the_recipes_are_those_of_the_build(build):
    rows = re.findall(r"^\| `(\S+)` \| (.+?) \| (.+?) \| ([\d, ]*) \|$", README, re.M)
    told = [(name, r.labels["model"], r.labels["details"]) for name, r in build.RECIPES.items()]
    assert [row[:3] for row in rows] == told
    pages = {number for row in rows for number in re.findall(r"\d\d", row[3])}
    assert pages <= {path.name[5:7] for path in FOLDER.glob("step_*.py")} and len(pages) > 10


def test_the_published_counts_are_those_that_the_build_shows(build):
    table = README.partition("## What the published models take")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")]
    told = [[p.name, p.parameters, p.inner or "", p.active or "", p.source] for p in build.PUBLISHED.values()]
    assert rows[2:] == told


@pytest.mark.parametrize(("name", "models"), [("run_log.txt", 12), ("experts-5-seeds.txt", 6)])
def test_the_tables_are_the_logs_own(name, models):
    shown = [line for line in re.findall(r"^    (\S.+)$", EXPERIMENT, re.M) if f"\n{line}\n" in log(name)]
    assert len(shown) == 2 + models  # and the two lines of the head
    assert "120 steps of 8 x 64 tokens, AdamW at 0.003, seeds 1 to 5" in log(name)


def test_the_two_rates_are_what_the_logs_say():
    rows = re.findall(r"^\| ([^|]+) \| ([+-].+) \| ([+-].+) \|$", EXPERIMENT, re.M)
    constant, falling = answers("run_log.txt"), answers("falling-rate-5-seeds.txt")
    assert rows == [(name, constant[name], falling[name]) for name in constant] and len(rows) == 11
    flags = "--set learning_rate=2e-3 --set warmup=10 --set final_rate=0"
    assert f"\n    python build.py {flags}\n" in EXPERIMENT
    assert "changed   learning_rate = 2e-3, warmup = 10, final_rate = 0" in log("falling-rate-5-seeds.txt")
    turned = {constant[name].split(", ")[1] + falling[name].split(", ")[1] for name in constant}
    assert not turned & {"lowerhigher", "higherlower"}  # "Nothing turned round"


def test_every_page_is_named_with_its_command_and_its_picture():
    steps = sorted(FOLDER.glob("step_*.py"))
    tour = README.partition("## The tour")[2].partition("## The experiment")[0]
    assert re.findall(r"^\*\*(\d\d) · ", tour, re.M) == [path.name[5:7] for path in steps]
    assert re.findall(r"^    python (\S+)$", tour, re.M) == [path.name for path in steps]
    pictures = sorted(path.name for path in (FOLDER / "expected").glob("step_*.png"))
    assert re.findall(r"!\[.+\]\(expected/(step_\d\d\.png)\)", tour) == pictures
    drawn = {f"{p.name[:7]}.png" for p in steps if "figures.save(" in p.read_text(encoding="utf-8")}
    assert drawn <= set(pictures)


def test_every_sabotage_has_its_row():
    sabotages = chapters.load_file(FOLDER / "break_it.py").CASE.sabotages
    table = README.partition("## Break it")[2]
    assert re.findall(r"^\| `([a-z0-9-]+)` \|", table, re.M) == [s.name for s in sabotages]
    assert len(sabotages) == sum(not s.loud for s in sabotages) == 18
    assert "eighteen mistakes of ports, all of them silent" in README


@pytest.mark.parametrize(
    ("claim", "name", "row"),
    [
        (r"is -0\.075 ± 0\.053", "400-steps-5-seeds.txt", "Mistral 7B v0.1"),
        (r"is -0\.063 ± 0\.067", "400-steps-5-seeds.txt", "Qwen3"),
        (r"is \+0\.001 ± 0\.027", "experts-falling-rate-5-seeds.txt", "DeepSeek-V3"),
    ],
)
def test_what_else_is_claimed_stands_in_its_log(claim, name, row):
    assert re.search(claim, " ".join(EXPERIMENT.split())) and f"(expected/{name})" in EXPERIMENT
    assert re.search(r"\d\.\d{3} ± \d\.\d{3}", claim.replace("\\", ""))[0] in answers(name)[row]
