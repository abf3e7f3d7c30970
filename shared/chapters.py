"""Load another chapter's build.py, or an earlier step, by number: once, and from any directory.

The files are called `build.py` and `step_02_build-rmsnorm-from-scratch.py` so that they read well
beside the book; neither name can be written in an `import` statement, so this module does the
importing. `edited_build` loads a build with some of its lines exchanged: what break_it.py damages.
"""

import importlib.abc
import importlib.util
import itertools
import linecache
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from shared import console
from shared.console import UserError

PROJECTS = Path(__file__).resolve().parent.parent / "projects"
PREFIX = "chapters:"


def load_build(chapter: int) -> ModuleType:
    """The module `projects/NN_.../build.py` of `chapter`. ValueError if there is no such chapter.

    While an edited build is being loaded, it gets the edited version of what it stands on.
    """
    if _edited is not None and chapter >= min(_edited.sources):
        return _edited.load(chapter)
    return load_file(build_file(chapter))


def load_step(chapter: int, step: int) -> ModuleType:
    """The module `step_NN_....py` of `chapter`. ValueError if there is no such step."""
    folder = chapter_folder(chapter)
    found = sorted(folder.glob(f"step_{step:02d}_*.py"))
    if len(found) != 1:
        files = f"{len(found)} files step_{step:02d}_*.py"
        raise ValueError(f"chapter {chapter} has {files}, expected 1")
    return load_file(found[0])


def chapter_folder(chapter: int) -> Path:
    """The folder `projects/NN_...` of `chapter`. ValueError if there is none.

    Of two, as a copy by a file manager makes them, neither is taken: a line names them, and the
    script ends. That happens while it imports, where nobody could catch an error of ours.
    """
    found = sorted(path.parent for path in PROJECTS.glob(f"{chapter:02d}_*/build.py"))
    if len(found) > 1:
        names = " and ".join(repr(folder.name) for folder in found)
        remedy = f"move one out of {PROJECTS}"
        console.complain(f"error: chapter {chapter} stands twice: {names}; {remedy}")
        raise SystemExit(2)
    if not found:
        have = ", ".join(folder.name[:2] for folder in sorted(PROJECTS.glob("[0-9][0-9]_*")))
        raise ValueError(f"there is no chapter {chapter}; chapters here: {have}")
    return found[0]


def build_file(chapter: int) -> Path:
    """The path of chapter's build.py. ValueError if there is no such chapter."""
    return chapter_folder(chapter) / "build.py"


def load_file(path: str | Path) -> ModuleType:
    """The module in the Python file `path`; in one process the same object every time."""
    global _edited
    outer = _edited
    _edited = None  # a module that is kept must not hold on to edited ones
    try:
        return importlib.import_module(module_name(Path(path).resolve()))
    finally:
        _edited = outer


def module_name(path: Path) -> str:
    """The name under which a file is imported: its path without dots, as dots mean packages."""
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
    """The file itself and each build.py that it stands on, found by their load_build(N)."""
    found = [Path(path).resolve()]
    for file in found:
        for chapter in re.findall(r"load_build\((\d+)\)", file.read_text(encoding="utf-8")):
            build = chapter_folder(int(chapter)) / "build.py"
            if build not in found:
                found.append(build)
    return found


# ---------------------------------------------------------------- a build with edits


@dataclass(frozen=True)
class Edit:
    """Old lines of a chapter's build.py and the new ones that take their place.

    `old` may be a part of a line, or several lines. The second and later lines of both are written
    relative to the line in which `old` begins: an edit needn't say how deep in the file it stands.
    """

    chapter: int
    old: str
    new: str


def edited_build(chapter: int, edits: Sequence[Edit]) -> ModuleType:
    """The build of `chapter` with `edits` made in it and in the earlier builds that it stands on.

    A fresh module, or with no edits the plain one. The plain modules stay as they are. Tracebacks
    and inspect.getsource show the edited lines. UserError if an edit's old lines don't stand there
    exactly once, if the chapter doesn't stand on an edited one, or if the result can't be loaded.
    """
    global _edited
    if not edits:
        return load_build(chapter)
    outer = _edited
    _edited = _EditedBuilds(edited_sources(edits))
    try:
        module = load_build(chapter)
        unused = set(_edited.sources) - set(_edited.modules)
    finally:
        _edited = outer
    if unused:
        raise UserError(f"chapter {chapter}'s build doesn't stand on chapter {min(unused)}'s")
    return module


def edited_sources(edits: Sequence[Edit]) -> dict[int, str]:
    """The text of each build.py that `edits` change, by chapter, with the edits made in turn."""
    sources = {}
    for edit in edits:
        path = build_file(edit.chapter)
        source = sources.get(edit.chapter) or path.read_text(encoding="utf-8")
        found = list(places(source, edit.old))
        if len(found) != 1:
            times = f"{len(found)} times" if found else "nowhere"
            name = path.relative_to(PROJECTS.parent)
            raise UserError(f"{edit.old!r} stands {times} in {name}; an edit needs it exactly once")
        start, indent = found[0]
        end = start + len(indented(edit.old, indent))
        sources[edit.chapter] = source[:start] + indented(edit.new, indent) + source[end:]
    return sources


def places(source: str, old: str) -> Iterator[tuple[int, str]]:
    """Where `old` begins in `source`, and the indentation of that line."""
    first = old.split("\n")[0]
    for match in re.finditer(re.escape(first), source):
        line = source[source.rfind("\n", 0, match.start()) + 1 :]
        indent = line[: len(line) - len(line.lstrip(" "))]
        if source.startswith(indented(old, indent), match.start()):
            yield match.start(), indent


def indented(text: str, indent: str) -> str:
    """`text` with every line but the first moved to the right."""
    return re.sub(r"\n(?=[^\n])", "\n" + indent, text)


@dataclass
class _EditedBuilds:
    """One load of an edited build: the edited texts, and each build from the first of them on."""

    sources: dict[int, str]
    modules: dict[int, ModuleType] = field(default_factory=dict)

    def load(self, chapter: int) -> ModuleType:
        if chapter not in self.modules:
            path = build_file(chapter)
            source = self.sources.get(chapter) or path.read_text(encoding="utf-8")
            self.modules[chapter] = run_text(source, path)
        return self.modules[chapter]


_edited: _EditedBuilds | None = None  # set while an edited build is being loaded
_numbers = itertools.count(1)


def run_text(source: str, path: Path) -> ModuleType:
    """A fresh module of `source`, an edited version of the file `path`. UserError if it fails."""
    mark = f" [edited {next(_numbers)}]"
    file = f"{path}{mark}"  # a name of its own, in the folder of the file
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    module = ModuleType(f"chapters:{file}")
    module.__file__ = file
    sys.modules[module.__name__] = module
    try:
        exec(compile(source, file, "exec", dont_inherit=True), module.__dict__)
    except Exception as error:
        del sys.modules[module.__name__]
        if isinstance(error, UserError):
            raise
        name = path.relative_to(PROJECTS.parent)
        problem = f"{type(error).__name__}: {error}".replace(mark, "")
        raise UserError(f"the edited {name} can't be loaded: {problem}") from error
    return module
