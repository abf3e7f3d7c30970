"""What test_resume.py and test_faults.py share: the small build, as a command and as a function."""

import contextlib
import json
import time
from pathlib import Path

import pytest

from shared import chapters

SCRIPT = Path(__file__).with_name("small_build.py")
TEXT = "the cat sat on the mat and the dog sat on the cat. " * 20


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "a text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def small():
    return chapters.load_file(SCRIPT)


@pytest.fixture
def build(here, small, text, tmp_path, capsys):
    """build(*flags): the small build's main, as (status, what it printed)."""

    def run(*flags, folder="out", module=small):
        argv = ["--data", str(text), "--output-dir", str(tmp_path / folder), *flags]
        capsys.readouterr()
        status = module.main(argv)
        return status, capsys.readouterr().out

    return run


def trained(out):
    """How many runs a printed log says were trained."""
    return out.count("ms/step\n") - 1 if "[1/" in out else 0


def run_files(folder, ending="json"):
    return sorted((folder / "runs").glob(f"*.{ending}"))


def histories(folder):
    """By file name, the numbers of every stored run but its times."""
    found = {}
    for path in run_files(folder):
        record = json.loads(path.read_text(encoding="utf-8"))
        record["history"].pop("ms_per_step")
        found[path.name] = record["history"], record["found"]
    return found


def alive(pid):
    """Is the process there, and not only its last words?"""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].split()[0] != b"Z"
    return False


def children(pid):
    """The worker processes of a process; torch's and Python's own helpers are none."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            parent = int(path.read_bytes().rsplit(b")", 1)[1].split()[1])
            line = path.with_name("cmdline").read_bytes()
            if parent == pid and b"spawn_main" in line:
                found.append(int(path.parent.name))
    return found


def until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.02)
