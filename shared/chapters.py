"""Load another chapter's build.py, or an earlier step, by number: once, and from any working directory.

The files are called `build.py` and `step_02_build-rmsnorm-from-scratch.py` so that they read well beside the
book; neither name can be written in an `import` statement, so this module does the importing.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

PROJECTS = Path(__file__).resolve().parent.parent / "projects"


def load_build(chapter: int) -> ModuleType:
    """The module `projects/NN_.../build.py` of `chapter`. ValueError if there is no such chapter."""
    return load_file(chapter_folder(chapter) / "build.py")


def load_step(chapter: int, step: int) -> ModuleType:
    """The module `step_NN_....py` of `chapter`. ValueError if there is no such step."""
    folder = chapter_folder(chapter)
    found = sorted(folder.glob(f"step_{step:02d}_*.py"))
    if len(found) != 1:
        raise ValueError(f"chapter {chapter} has {len(found)} files step_{step:02d}_*.py, expected 1")
    return load_file(found[0])


def chapter_folder(chapter: int) -> Path:
    """The folder `projects/NN_...` of `chapter`. ValueError if there is none."""
    found = sorted(PROJECTS.glob(f"{chapter:02d}_*"))
    if len(found) != 1:
        have = ", ".join(folder.name[:2] for folder in sorted(PROJECTS.glob("[0-9][0-9]_*")))
        raise ValueError(f"there is no chapter {chapter}; chapters here: {have}")
    return found[0]


def load_file(path: str | Path) -> ModuleType:
    """The module in the Python file `path`; the same object every time it is asked for in one process."""
    path = Path(path).resolve()
    name = f"chapters:{path}"  # a name that no import statement can collide with
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # before it runs: dataclasses look their own module up
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
