"""What every test shares: the repository on the path, one thread, no network, chapters by number."""

import sys
import warnings
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
with warnings.catch_warnings():
    warnings.simplefilter("ignore", EncodingWarning)  # matplotlib's own, when it first writes its list of fonts
    import matplotlib.font_manager  # noqa: F401
torch.set_num_threads(1)  # two OpenMP threads on two busy cores are far slower than one


@pytest.fixture(scope="session")
def gpt():
    """Chapter 05's build.py."""
    from shared import chapters

    return chapters.load_build(5)


@pytest.fixture(scope="session")
def modern():
    """Chapter 07's build.py."""
    from shared import chapters

    return chapters.load_build(7)
