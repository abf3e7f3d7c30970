"""Load another chapter's build.py, or an earlier step, by number: once, and from any working directory.

The files are called `build.py` and `step_02_build-rmsnorm-from-scratch.py` so that they read well beside the
book; neither name can be written in an `import` statement, so this module does the importing.
"""

import importlib.abc
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

from shared import console

PROJECTS = Path(__file__).resolve().parent.parent / "projects"
PREFIX = "chapters:"


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
    """The folder `projects/NN_...` of `chapter`. ValueError if there is none.

    Of two, as a copy by a file manager makes them, neither is taken: a line names them, and the
    script ends. That happens while it imports, where nobody could catch an error of ours.
    """
    found = sorted(path.parent for path in PROJECTS.glob(f"{chapter:02d}_*/build.py"))
    if len(found) > 1:
        names = " and ".join(repr(folder.name) for folder in found)
        console.complain(f"error: chapter {chapter} stands twice: {names}; move one out of {PROJECTS}")
        raise SystemExit(2)
    if not found:
        have = ", ".join(folder.name[:2] for folder in sorted(PROJECTS.glob("[0-9][0-9]_*")))
        raise ValueError(f"there is no chapter {chapter}; chapters here: {have}")
    return found[0]


def load_file(path: str | Path) -> ModuleType:
    """The module in the Python file `path`; the same object every time it is asked for in one process."""
    return importlib.import_module(module_name(Path(path).resolve()))


def module_name(path: Path) -> str:
    """The name under which a file is imported: its path, with no dot in it, as dots mean packages."""
    return PREFIX + str(path).replace("%", "%25").replace(".", "%2E")


class ByPath(importlib.abc.MetaPathFinder):
    """Teaches `import` the names that module_name() gives.

    So a worker process can be sent a config or an experiment: Python's pickle stores the name of
    an object's class and module, and the worker imports that module.
    """

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None):
        if not name.startswith(PREFIX):
            return None
        file = name.removeprefix(PREFIX).replace("%2E", ".").replace("%25", "%")
        return importlib.util.spec_from_file_location(name, file)


sys.meta_path.append(ByPath)


def sources(path: str | Path) -> list[Path]:
    """The file itself and every chapter's build.py that it builds on, found by their load_build(N)."""
    found = [Path(path).resolve()]
    for file in found:
        for chapter in re.findall(r"load_build\((\d+)\)", file.read_text(encoding="utf-8")):
            build = chapter_folder(int(chapter)) / "build.py"
            if build not in found:
                found.append(build)
    return found
