"""Files are written whole or not at all."""

import itertools
import json
import math
import sys

import pytest

from shared import files
from shared.console import UserError


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    files.write_text(path, "old")

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        files.write_text(path, "new")
    assert path.read_text(encoding="utf-8") == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]


def test_an_interrupt_at_any_line_leaves_the_old_file_and_no_other(tmp_path):
    """As Ctrl-C may come: also within the library's functions, where a file is made and not yet named."""
    path = tmp_path / "results.json"
    passed = 0

    def interrupt(frame, event, argument):
        nonlocal passed
        if event == "line" and frame.f_code.co_filename != __file__:
            passed += 1
            if passed == at:
                raise KeyboardInterrupt
        return interrupt

    outer = sys.gettrace()
    seen = set()
    for at in itertools.count(1):
        files.write_text(path, "old")
        passed = 0
        try:
            sys.settrace(interrupt)
            files.write_text(path, "new")
            sys.settrace(outer)
            break
        except KeyboardInterrupt:
            sys.settrace(outer)
        seen.add(path.read_text(encoding="utf-8"))
        assert [p.name for p in tmp_path.iterdir()] == ["results.json"]
    assert at > 20 and seen == {"old"} and path.read_text(encoding="utf-8") == "new"


def test_everybody_may_read_what_was_written(tmp_path):
    files.write_text(tmp_path / "results.json", "{}")
    assert (tmp_path / "results.json").stat().st_mode & 0o444 == 0o444


def test_json_is_strict_and_keeps_every_digit(tmp_path):
    path = tmp_path / "r.json"
    files.write_json(path, {"loss": 0.1 + 0.2, "name": "é"})
    assert json.loads(path.read_text(encoding="utf-8")) == {"loss": 0.1 + 0.2, "name": "é"}
    with pytest.raises(ValueError):
        files.write_json(path, {"loss": math.nan})
    assert json.loads(path.read_text(encoding="utf-8"))["name"] == "é"


def test_a_folder_that_was_deleted_meanwhile_is_made_again(tmp_path):
    files.write_text(tmp_path / "gone" / "file", "kept")
    assert (tmp_path / "gone" / "file").read_text(encoding="utf-8") == "kept"


def test_a_folder_is_made_with_its_parents_and_left_empty(tmp_path):
    files.claim_folder(tmp_path / "a" / "b é")
    assert list((tmp_path / "a" / "b é").iterdir()) == []


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match="name a folder you may write to") as error:
            files.claim_folder(folder)
        assert str(folder) in str(error.value)


def test_what_a_killed_process_had_in_hand_goes_and_nothing_else(tmp_path):
    runs = tmp_path / "runs"
    names = [".a_seed-1.json.bb3b475c", "a_seed-1.json", ".a.json", ".notes.bb3b475c", ".a.json.bb3b475"]
    for early, late in ((True, False), (False, True)):  # of a process before, of a worker meanwhile
        files.write_text(runs / names[0], "") if early else None
        with files.held(tmp_path):
            assert not (runs / names[0]).exists()
            for name in names[0 if late else 1 :]:
                files.write_text(runs / name, "")
        assert sorted(path.name for path in runs.iterdir()) == sorted(names[1:])
