"""The loader: a chapter or a step by its number, once, from any working directory."""

import pytest

from shared import chapters


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
