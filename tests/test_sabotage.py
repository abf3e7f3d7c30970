"""The frame of break_it.py, held to a toy case whose outcome is known beforehand."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from shared import chapters, sabotage
from shared.chapters import Edit
from shared.console import UserError
from shared.sabotage import Case, Instrument, Outcome, Reading, Sabotage, examine


@dataclass(frozen=True)
class Lamp:
    """Its volts and its colour, which a function may exchange, and the layers of a build."""

    seed: int
    supply: float = 230.0
    edits: tuple[Edit, ...] = ()
    function: Callable = lambda volts, colour: (volts, colour)

    @property
    def volts(self) -> float:
        return self.function(self.supply, "white")[0]

    @property
    def colour(self) -> str:
        return self.function(self.supply, "white")[1]

    @property
    def layers(self) -> int:
        gpt = chapters.edited_build(5, self.edits)
        return len(gpt.GPT(gpt.GPTConfig(), vocab_size=5).blocks)


INSTRUMENTS = (
    Instrument("voltmeter", "is it 230 V?", lambda p: Reading(f"{p.volts:.0f} V", p.volts == 230, p.volts)),
    Instrument("eye", "is it white?", lambda p: Reading(p.colour, p.colour == "white")),
    Instrument("counter", "two layers?", lambda p: Reading(f"{p.layers} layers", p.layers == 2)),
)


def sabotage_of(name: str, instrument: str, also_trips: tuple = (), harmless: bool = False, sizes=None, **damage):
    """A sabotage that gives the lamp other volts or another colour."""

    def burn(volts: float, colour: str) -> tuple[float, str]:
        return damage.get("volts", volts), damage.get("colour", colour)

    return Sabotage(
        name=name,
        function=burn,
        predicts=f"{name} shows",
        explains=f"because {name}",
        loud=name == "halved",
        instrument=instrument,
        also_trips=also_trips,
        harmless=harmless,
        sizes=sizes,
    )


THINNED = Sabotage(
    name="thinned",
    edits=(Edit(5, "n_layers: int = 2", "n_layers: int = 1"),),
    predicts="one layer is left",
    explains="because thinned",
    loud=False,
    instrument="counter",
)


TRUE = (
    sabotage_of("halved", "voltmeter", volts=115.0, sizes=lambda healthy, broken: broken.number < 0.6 * healthy.number),
    sabotage_of("reddened", "eye", ("voltmeter",), colour="red", volts=229.0),
    sabotage_of("dusted", "eye", harmless=True),
)
FALSE = {
    "nothing happens": sabotage_of("nothing", "voltmeter"),
    "another instrument's symptom": sabotage_of("mislabelled", "voltmeter", colour="red"),
    "not the size predicted": sabotage_of(
        "weak", "voltmeter", volts=200.0, sizes=lambda healthy, broken: broken.number < 0.6 * healthy.number
    ),
    "harmful after all": sabotage_of("harmful", "eye", harmless=True, colour="red"),
}


def case_of(*sabotages: Sabotage, volts: float = 230.0) -> Case:
    return Case(
        healthy=lambda seed: Lamp(seed, volts),
        instruments=INSTRUMENTS,
        sabotages=sabotages,
        vitals=lambda patient: {"volts": f"{patient.volts:.0f}", "seed": str(patient.seed)},
        sample=lambda patient: f"light of\ncolour {patient.colour}",
        chapter=5,
    )


GOOD = case_of(*TRUE)


def run(capsys, case: Case, *argv: str) -> tuple[int, str]:
    status = sabotage.main(case, "A lamp.", list(argv))
    return status, capsys.readouterr().out


def test_the_default_is_the_first_sabotage_and_a_true_prediction_exits_0(capsys):
    status, out = run(capsys, GOOD)
    assert status == 0
    for part in ("def burn(volts", "halved shows", "(loud)", "230 V", "115 V", "As predicted"):
        assert part in out
    assert out.index("halved shows") < out.index("As predicted")  # stated first


def test_each_true_prediction_exits_0_and_is_explained(capsys):
    for one in TRUE:
        status, out = run(capsys, GOOD, "--sabotage", one.name, "--tiny")
        assert status == 0 and one.explains in out and "not foreseen" not in out


@pytest.mark.parametrize("why", FALSE)
def test_a_false_prediction_is_said_to_be_false_and_exits_1(capsys, why):
    status, out = run(capsys, case_of(FALSE[why]))
    assert status == 1 and "did NOT come true" in out and "As predicted" not in out


def test_a_prediction_about_a_sick_healthy_model_cannot_come_true(capsys):
    status, out = run(capsys, case_of(TRUE[0], volts=231.0))
    assert status == 1 and "can't be judged" in out


def test_a_red_light_that_nobody_foresaw_is_marked(capsys):
    status, out = run(capsys, case_of(sabotage_of("both", "voltmeter", volts=1.0, colour="red")))
    assert status == 0 and "not foreseen" in out


def test_outcome_names_what_tripped():
    lamp = GOOD.healthy(7)
    outcome = Outcome(TRUE[1], examine(GOOD, lamp), examine(GOOD, TRUE[1].damage(lamp)))
    assert outcome.tripped == TRUE[1].trips == {"eye", "voltmeter"}
    assert TRUE[2].trips == set()


def test_all_sums_up_and_counts_failures(capsys):
    status, out = run(capsys, GOOD, "--all")
    assert status == 0 and "all 3 predictions came true" in out and all(s.name in out for s in TRUE)
    status, out = run(capsys, case_of(TRUE[0], FALSE["nothing happens"]), "--all")
    assert status == 1 and "1 of 2 predictions did NOT come true: " in out


def test_all_has_a_column_for_each_instrument_that_the_case_names(capsys):
    status, out = run(capsys, replace(GOOD, columns=("voltmeter",)), "--all")
    rows = dict(re.findall(r"^(\w+) +(?:loud|silent) +(.+)$", out, re.MULTILINE))
    assert {name: row.split() for name, row in rows.items()} == {
        "halved": ["voltmeter", "-", "115", "V"],
        "reddened": ["eye", "-", "229", "V"],  # in its column it needn't be named once more
        "dusted": ["eye", "-", "230", "V"],
    }
    assert "\nvoltmeter: is it 230 V?\n" in out


def test_an_edit_is_shown_as_a_diff_with_its_place_and_run(capsys):
    status, out = run(capsys, case_of(THINNED))
    assert status == 0 and "2 layers" in out and "1 layers" in out
    assert re.search(r"in chapter 05's build.py, GPTConfig, line \d+:\n", out)
    assert "\n  - n_layers: int = 2\n  + n_layers: int = 1\n" in out


def test_a_readers_edit_shows_every_light(capsys):
    status, out = run(capsys, GOOD, "--edit", "n_layers: int = 2", "n_layers: int = 3")
    assert status == 0 and "3 layers" in out and "1 of 3 lights are red: counter" in out
    assert out.index("+ n_layers: int = 3") < out.index("3 layers")
    status, out = run(capsys, GOOD, "--edit", "in tokens", "in letters")
    assert status == 0 and "No light is red." in out and "longest context, in letters" in out


def test_an_edit_that_fails_when_it_runs_says_where(capsys):
    line = "self.norm_f = self.make_norm(cfg)"
    status, out = run(capsys, GOOD, "--edit", line, f"{line}\nself.nonsense")
    assert status == 0 and "fails: AttributeError" in out
    assert "1 of 3 lights are red: counter" in out
    assert re.search(r"doesn't run: AttributeError.*\n  build.py, line \d+: self.nonsense\n", out)


def test_an_edit_that_fails_only_in_the_sample_says_so_too(capsys):
    def write(lamp: Lamp) -> str:
        return 1 // (2 - lamp.layers) if lamp.edits else "light"

    case = replace(GOOD, sample=write, instruments=INSTRUMENTS[:2])
    status, out = run(capsys, case, "--edit", "longest context", "longest text")
    assert status == 0 and "doesn't run: ZeroDivisionError" in out and "No light is red." in out


def test_a_diff_shows_each_place_and_the_line_behind_an_insertion():
    edits = (
        Edit(5, "kind = type(module).__name__\nraise", "kind = '?'\nraise"),
        Edit(5, "self.norm_f = self.make", "self.extra = 1\nself.norm_f = self.make"),
        Edit(7, "self.eps = eps", "self.eps = 0.0"),
    )
    lines = sabotage.diff(edits).split("\n")
    assert [line.split(", line")[0] for line in lines if line.startswith("in ")] == [
        "in chapter 05's build.py, GPT.__init__",
        "in chapter 05's build.py, init_parameters",
        "in chapter 07's build.py, RMSNorm.__init__",
    ]
    assert lines[1:3] == ["+ self.extra = 1", "  self.norm_f = self.make_norm(cfg)"]
    assert lines[4:6] == ["- kind = type(module).__name__", "+ kind = '?'"]
    assert lines[7:] == ["- self.eps = eps", "+ self.eps = 0.0"]


def test_list_says_what_silent_means(capsys):
    _, out = run(capsys, GOOD, "--list")
    assert "silent: not visible in the training loss" in out


def test_list_names_every_sabotage_and_runs_none(capsys):
    def never(seed: int) -> Lamp:
        raise AssertionError("--list must not build anything")

    status, out = run(capsys, replace(GOOD, healthy=never), "--list")
    assert status == 0 and all(s.name in out and s.predicts in out for s in TRUE)


def test_the_quiz_keeps_its_secret_and_prints_the_way_to_answer(capsys):
    status, out = run(capsys, GOOD, "--quiz", "--seed", "3")
    assert status == 0 and "--quiz --seed 3 --answer NAME" in out
    assert "def burn" not in out and "because" not in out and "Right" not in out
    assert all(s.name in out for s in TRUE)  # the suspects
    assert "  | colour white" in out  # every line of the sample is set off


def test_every_sabotage_comes_up_in_some_quiz_and_only_its_name_is_right(capsys):
    asked = set()
    for seed in map(str, range(1, 30)):
        right = []
        for guess in TRUE:
            status, out = run(capsys, GOOD, "--quiz", "--seed", seed, "--answer", guess.name)
            assert status == 0
            if "Right: it was" in out:
                right.append(guess.name)
                assert f"it was {guess.name}." in out and guess.explains in out
            else:
                assert "No. it was" in out and guess.predicts in out
        assert len(right) == 1
        asked.update(right)
    assert asked == {s.name for s in TRUE}


@pytest.mark.parametrize(
    ("argv", "mentions"),
    [
        (["--sabotage", "halvd"], "did you mean halved?"),
        (["--sabotage", "xyz"], "there are: halved, reddened, dusted"),
        (["--quiz", "--seed", "1", "--answer", "xyz"], "xyz"),
        (["--answer", "halved"], "needs the --seed"),
        (["--all", "--answer", "halved"], "belongs to --quiz"),
        (["--all", "--list"], "not allowed with"),
        (["--edit", "a"], "expected 2 arguments"),
        (["--edit", "a", "b", "--all"], "not allowed with"),
        (["--edit", "a", "b", "--answer", "halved"], "belongs to --quiz"),
        (["--edit", "not in it", "b"], "stands nowhere in projects/05_"),
        (["--edit", "n_layers", "b"], r"stands \d+ times in projects/05_"),
        (["--edit", "n_layers: int = 2", "n_layers: int = "], "can't be loaded: SyntaxError"),
        (["--edit", "n_layers: int = 2", "n_layers: int"], "can't be loaded: TypeError"),
        (["--edit", "n_layers: int = 2", "n_layers: int = 2"], "the same"),
        (["--seed", "0"], "whole number"),
        (["--bogus"], "--bogus"),
    ],
)
def test_a_wrong_flag_is_a_user_error(argv, mentions):
    with pytest.raises(UserError, match=mentions):
        sabotage.main(GOOD, "A lamp.", argv)


def test_at_a_terminal_the_quiz_asks_until_it_has_a_name(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    typed = iter(["?", "nonsense", "halved"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    status, out = run(capsys, GOOD, "--quiz", "--seed", "3")
    assert status == 0 and "there is no sabotage 'nonsense'" in out and "is it white?" in out and "it was" in out


def test_a_wrong_name_is_one_line_and_status_2(tmp_path, run_script):
    script = tmp_path / "break_it.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(chapters.PROJECTS.parent)!r})\n"
        "from shared import cli, sabotage\n"
        "from shared.sabotage import Case\n"
        "cli.run(lambda: sabotage.main(Case(None, (), (), None), 'x', None))\n",
        encoding="utf-8",
    )
    status, out, errors = run_script(script, "--sabotage", "no-such")
    assert status == 2 and out == ""
    assert errors.count("\n") == 1 and "no-such" in errors


def test_a_damage_that_draws_gets_the_same_numbers_whenever_it_is_read():
    def draw(patient):
        return Reading("", True, torch.rand(()).item())

    case = replace(GOOD, instruments=(Instrument("one", "?", draw), Instrument("two", "?", draw)))
    torch.manual_seed(7)
    before = torch.get_rng_state()
    first = examine(case, None)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(8)
    assert examine(case, None) == first and first["one"] == first["two"]
