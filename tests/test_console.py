"""What a person sees, in a pipe, in terminals of every width, on a console that lacks half the letters."""

import io
import sys

import pytest

from shared import console
from shared.console import Table

TABLE = Table(
    ["norm", "params", "difference to LayerNorm+GELU", "verdict", "ms/step"],
    [
        ["LayerNorm", "105,216", "-", "the baseline", "9.9"],
        ["RMSNorm", "104,896", "+0.011 ± 0.021", "no difference seen at 3 seeds", "10.4"],
    ],
)
CELLS = ["LayerNorm", "105,216", "104,896", "+0.011 ± 0.021", "9.9", "10.4"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_numbers_stand_to_the_right_and_words_to_the_left():
    assert console.table_text(Table(["name", "n"], [["a", "1"], ["bcd", "-23"]])) == (
        "name    n\n---------\na       1\nbcd   -23\n"
    )


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
def test_no_number_is_cut_short_at_any_width(width):
    text = console.table_text(TABLE, width)
    assert all(cell in text for cell in CELLS)
    assert "…" not in text
    if "verdict:" not in text:  # a table, not a list
        assert max(map(len, text.splitlines())) <= width


def test_a_phrase_folds_before_a_row_becomes_a_list():
    assert len(console.table_text(TABLE, 200).splitlines()) == 4
    assert "verdict: the baseline" not in console.table_text(TABLE, 80)
    assert "verdict: the baseline" in console.table_text(TABLE, 40)


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_a_pipe_gets_plain_text_and_whole_lines(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("FORCE_COLOR", "1")
    console.say("bold " * 60, style="bold red")
    console.say(TABLE)
    with console.RunProgress(2, 10) as progress:
        progress.update("run 1", 1, "loss 1")
        progress.finish("run 1", "validation loss 2.195")
    out = capsys.readouterr().out
    assert "\x1b" not in out and all(cell in out for cell in CELLS)
    assert out.splitlines()[0].rstrip() == ("bold " * 60).rstrip()
    assert "[1/2] run 1: validation loss 2.195" in out


def test_brackets_are_text(capsys):
    for text in ("[blocks.0] list[int] [/INST] [bold]x[/bold] :smile:", "100 %"):
        console.say(text)
        assert capsys.readouterr().out == text + "\n"
        console.say(Table(["a"], [[text]]))
        assert text in capsys.readouterr().out


def test_a_console_without_the_letters_gets_question_marks(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="cp1252"))
    console.tolerate_narrow_encodings()
    console.say("σ ✓ ± × kᵀ", style="bold")
    console.say(TABLE)
    with console.RunProgress(1, 100) as progress:
        progress.finish("μ", "done")
    sys.stdout.flush()
    assert raw.getvalue().decode("cp1252").startswith("? ? ± × k?")


def test_colour_only_where_it_is_wanted(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    for setting, wanted in (("", True), ("1", False)):
        monkeypatch.delenv("NO_COLOR", raising=False)
        if setting:
            monkeypatch.setenv("NO_COLOR", setting)
        monkeypatch.setattr(sys, "stdout", Terminal())
        console.say("text", style="bold red")
        assert ("\x1b" in sys.stdout.getvalue()) is wanted


def test_the_cursor_comes_back_after_an_exception(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys, "stdout", Terminal())
    with pytest.raises(KeyboardInterrupt), console.RunProgress(2, 10) as progress:
        progress.update("run 1", 5, "loss 2.000")
        raise KeyboardInterrupt
    out = sys.stdout.getvalue()
    assert out.rindex("\x1b[?25h") > out.rindex("\x1b[?25l")  # shown after it was last hidden


def test_without_a_display_progress_is_a_line_now_and_then(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    progress = console.RunProgress(2, 100)
    for now[0], done in ((1.0, 10), (3.0, 20), (4.0, 30), (34.0, 40), (35.0, 50)):
        progress.update("run 1", done, f"loss of step {done}")
    # 10 steps in 2 s, from step 10 on: 180 steps are left. Then 30 steps in 33 s, and 160 left.
    assert capsys.readouterr().out == (
        "about 36 seconds left\nrun 1: step 40 of 100, loss of step 40; about 3 minutes left\n"
    )


@pytest.mark.parametrize(
    ("seconds", "says"),
    [(0.4, "0 seconds"), (1.2, "1 second"), (89, "89 seconds"), (90, "2 minutes"), (7200, "2 hours"), (1e6, "12 days")],
)
def test_a_duration_has_the_unit_that_a_person_would_use(seconds, says):
    assert console.duration(seconds) == says


def test_data_cannot_steer_a_terminal(capsys):
    console.say("a\x1b[31mb\x07\rc\nd\x9b")
    assert (
        capsys.readouterr().out
        == "a\N{REPLACEMENT CHARACTER}[31mb" + "\N{REPLACEMENT CHARACTER}" * 2 + "c\nd\N{REPLACEMENT CHARACTER}\n"
    )


def test_a_complaint_is_one_line(capsys):
    console.complain("two\nlines  of [text]")
    assert capsys.readouterr().err == "two lines of [text]\n"
