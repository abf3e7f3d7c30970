"""What every test shares: the repository on the path, one thread, chapters by number, scripts as a person runs them."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
torch.set_num_threads(1)  # two OpenMP threads on two busy cores are far slower than one

from shared import chapters
from shared.sabotage import Reading, examine


@pytest.fixture(scope="session")
def gpt() -> ModuleType:
    """Chapter 05's build.py."""
    return chapters.load_build(5)


@pytest.fixture(scope="session")
def modern() -> ModuleType:
    """Chapter 07's build.py."""
    return chapters.load_build(7)


@pytest.fixture(scope="session")
def examined():
    """What all instruments of a break_it.py read: examined(path) of the healthy patient of seed 1, examined(path, name)
    after the sabotage of that name. Each is examined once in a session."""
    known = {}

    def readings(path: Path, name: str | None = None) -> dict[str, Reading]:
        if (path, name) not in known:
            case = chapters.load_file(path).CASE
            patient = case.healthy(1)
            if name is not None:
                patient = next(s for s in case.sabotages if s.name == name).damage(patient)
            known[path, name] = examine(case, patient)
        return known[path, name]

    return readings


@pytest.fixture
def run_script(tmp_path):
    """Run a script by its path, from a directory that isn't its own, as a person would: (status, stdout, stderr)."""

    def run(path: Path, *flags: str, **environment: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, "-X", "warn_default_encoding", "-W", "error::EncodingWarning", str(path), *flags],
            cwd=tmp_path,
            env={**os.environ, "PYTHONIOENCODING": "utf-8", **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=300,
        )
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.fixture(scope="session")
def sparse():
    """Chapter 18's build.py."""
    from shared import chapters

    return chapters.load_build(18)
