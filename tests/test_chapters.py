"""The loader: a chapter or a step by its number, once, from any working directory."""

import inspect
import traceback

import pytest

from shared import chapters
from shared.chapters import Edit
from shared.console import UserError


def test_the_same_module_object_every_time(gpt, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert chapters.load_build(5) is gpt
    assert chapters.load_file(chapters.chapter_folder(5) / ".." / chapters.chapter_folder(5).name / "build.py") is gpt


def test_chapter_07_stands_on_chapter_05s_own_classes(gpt, modern):
    assert modern.gpt is gpt
    assert issubclass(modern.ModernGPT, gpt.GPT)
    assert modern.ModernGPT.forward is gpt.GPT.forward
    assert modern.ModernBlock.forward is gpt.Block.forward


def test_a_missing_chapter_names_those_that_exist():
    with pytest.raises(ValueError, match=r"no chapter 99; chapters here: 05, 07"):
        chapters.load_build(99)


def test_a_missing_step_is_named():
    with pytest.raises(ValueError, match=r"chapter 5 has 0 files step_99_"):
        chapters.load_step(5, 99)


def test_a_file_that_fails_is_not_kept(tmp_path):
    file = tmp_path / "build.py"
    file.write_text("raise RuntimeError('first')", encoding="utf-8")
    with pytest.raises(RuntimeError, match="first"):
        chapters.load_file(file)
    file.write_text("value = 7", encoding="utf-8")
    assert chapters.load_file(file).value == 7


# ---------------------------------------------------------------- a build with edits

EPS = Edit(7, "self.eps = eps", "self.eps = 2 * eps")
ONE_LAYER = Edit(5, "n_layers: int = 2", "n_layers: int = 1")


def test_an_edit_is_made_in_a_fresh_module_and_the_plain_ones_stay(gpt, modern):
    before = vars(modern).copy(), vars(gpt).copy()
    edited = chapters.edited_build(7, (EPS,))
    assert edited.RMSNorm(4, 0.5).eps == 1.0 and modern.RMSNorm(4, 0.5).eps == 0.5
    assert edited is not modern and edited.gpt is gpt
    assert chapters.load_build(7) is modern and chapters.load_build(5) is gpt and modern.gpt is gpt
    assert (vars(modern), vars(gpt)) == before
    assert chapters.edited_build(7, (EPS,)) is not edited
    assert chapters.edited_build(7, ()) is modern


def test_a_later_build_stands_on_the_edited_earlier_one(gpt, modern):
    edited = chapters.edited_build(7, (ONE_LAYER, EPS))
    assert edited.ModernConfig().n_layers == 1 and edited.RMSNorm(4, 0.5).eps == 1.0
    assert edited.gpt.GPTConfig().n_layers == 1 and issubclass(edited.ModernGPT, edited.gpt.GPT)
    assert modern.ModernConfig().n_layers == 2 and gpt.GPTConfig().n_layers == 2
    assert modern.gpt is chapters.load_build(5) is gpt


def test_a_step_loaded_by_an_edited_build_is_the_plain_one(gpt):
    line = "gpt = chapters.load_build(5)"
    edits = (ONE_LAYER, Edit(7, line, f"{line}\nstep = chapters.load_step(7, 3)"))
    edited = chapters.edited_build(7, edits)
    assert edited.step is chapters.load_step(7, 3) and edited.step.gpt is gpt


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (Edit(7, "no such line", ""), r"'no such line' stands nowhere in projects/07_"),
        (Edit(7, "def forward(self, x: ", ""), r"stands \d times in projects/07_.*exactly once"),
        (Edit(7, "self.eps = eps\nnot after it", ""), r"nowhere in projects/07_"),
        (Edit(7, "self.eps = eps", "self.eps = ("), r"edited projects/07_.*SyntaxError.*line \d+"),
        (Edit(7, "self.eps = eps", "pass\n  2"), r"can't be loaded: IndentationError"),
        (Edit(5, "class GPT(nn.Module)", "class GPT(no)"), r"the edited projects/05_.*NameError"),
        (Edit(18, "tokens.float()", "tokens"), r"chapter 7's build doesn't stand on chapter 18's"),
    ],
)
def test_an_edit_that_cannot_be_made_is_refused_and_leaves_nothing_behind(edit, says, gpt, modern):
    with pytest.raises(UserError, match=says):
        chapters.edited_build(7, (edit,))
    assert chapters.load_build(7) is modern and chapters.load_build(5) is gpt


def test_lines_are_written_relative_to_the_one_in_which_they_begin():
    edit = Edit(5, "x = x + self.attn(self.norm1(x))\nx = x + ", "if True:\n    pass\n\nx = ")
    source = chapters.edited_sources((edit,))[5]
    new = "if True:\n            pass\n\n        x = self.mlp(self.norm2(x))\n"
    assert f"\n        {new}        return x\n" in source


def test_edits_are_made_in_turn():
    edits = (ONE_LAYER, Edit(5, "n_layers: int = 1", "n_layers: int = 4"))
    assert chapters.edited_build(5, edits).GPTConfig().n_layers == 4


def test_source_and_traceback_show_the_edited_lines():
    edit = Edit(7, "self.eps = eps", "self.eps = eps\n\nself.eps = 1 / 0  # edited")
    edited = chapters.edited_build(7, (edit,))
    assert "self.eps = 1 / 0  # edited" in inspect.getsource(edited.RMSNorm)
    assert "self.eps = 1 / 0  # edited" in inspect.getsource(edited.RMSNorm.__init__)
    with pytest.raises(ZeroDivisionError) as caught:
        edited.RMSNorm(4)
    assert "self.eps = 1 / 0  # edited" in "".join(traceback.format_tb(caught.value.__traceback__))
