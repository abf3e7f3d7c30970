"""What every test shares: the repository on the path, one thread, chapters by number, scripts as a
person runs them.

The suite runs in two worker processes (pytest-xdist). What takes long and is asserted on in several
tests is made once for both: `once`, and what stands on it. A single file that is named on the
command line runs in one process.
"""

import contextlib
import hashlib
import io
import multiprocessing
import os
import pickle
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from xdist.scheduler import LoadScopeScheduling

# Before torch is imported: two OpenMP threads on a busy core are far slower than one.
# Child processes inherit it.
os.environ["OMP_NUM_THREADS"] = "1"
# A shell that starts us with `&` has us ignore Ctrl-C, and so would what the tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from shared import chapters, runs
from shared.sabotage import Reading, examine

LOCK_TIMEOUT = 600.0  # seconds after which a worker no longer waits for what another one makes
ENCODING_ERRORS = ("-X", "warn_default_encoding", "-W", "error::EncodingWarning")
# A test that asks for one of these is slow: it starts processes or trains.
SLOW_FIXTURES = {"run_script", "step_run", "examined", "text_file"}
REAL_MODEL = re.compile(r"test_37_(model|steps)|(test_step_holds|test_break_it).*\[37[-_]")
BREAK_IT = re.compile(r"test_(\d\d)_break_it|test_break_it.*\[(\d\d)[-_]")
READ = {37: 64}  # tokens that a patient of chapter 37 reads here; 256 where a person looks at one
LARGE = 2**18  # numbers, above which those that a file replaces are not drawn again


# ---------------------------------------------------------------- workers


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two workers; none for a single file, which is done before they would have started."""
    files = {argument.split("::")[0] for argument in config.args}
    alone = len(files) == 1 and Path(*files).is_file()
    return 0 if alone else 2


def group_of(nodeid: str) -> str | None:
    """The name of what stays in one worker, since its tests have models in common: the real one of
    chapter 37, half a gigabyte, the originals of chapter 38, and the healthy ones that each break_it.py
    trains."""
    if REAL_MODEL.search(nodeid):
        return "the real model"
    if "test_38_originals" in nodeid:
        return "the originals"
    if found := BREAK_IT.search(nodeid):
        return f"break_it {found[1] or found[2]}"
    return None


class ByGroup(LoadScopeScheduling):
    """Hands out groups, the largest first, and then test after test.

    pytest-xdist has the like (`--dist loadgroup`), but its 3.8.0 writes the group into a name that
    pytest 9.2 no longer reads, and then there are no groups, without a word.
    """

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid) or nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log) -> ByGroup:
    return ByGroup(config, log)


def pytest_itemcollected(item: pytest.Item) -> None:
    if group_of(item.nodeid) or SLOW_FIXTURES & set(item.fixturenames):
        item.add_marker("slow")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Between two workers, what is slow comes first, so that both end at the same time."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    import torch  # here and not above: the process that only hands out the tests needs no torch

    torch.set_num_threads(1)


# ---------------------------------------------------------------- made once for all workers


class Once:
    """Values that several tests need: once("name", make) is what make() returned in one worker.

    The value travels as a pickle, so it can't hold instances of a class that stands in a chapter's
    file, which no import statement finds; a class of shared/ is fine. If make() fails, it fails for
    all.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.known: dict[str, Any] = {}

    def __call__(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self.known:
            value, error = self.made(name, make)
            if error is not None:
                raise RuntimeError(f"{name} failed in another worker: {error}")
            self.known[name] = value
        return self.known[name]

    def made(self, name: str, make: Callable[[], Any]) -> tuple[Any, str | None]:
        path = self.folder / hashlib.sha256(name.encode("utf-8")).hexdigest()[:16]
        try:
            os.close(os.open(path.with_suffix(".lock"), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return self.awaited(name, path)
        try:
            value = make()
        except BaseException as error:
            self.write(path, (None, repr(error)))
            raise
        self.write(path, (value, None))
        return value, None

    def write(self, path: Path, content: tuple[Any, str | None]) -> None:
        part = path.with_suffix(".part")
        part.write_bytes(pickle.dumps(content))
        part.replace(path)  # whole or not at all

    def awaited(self, name: str, path: Path) -> tuple[Any, str | None]:
        deadline = time.monotonic() + LOCK_TIMEOUT
        while not path.exists():
            if time.monotonic() > deadline:
                return None, f"nothing came in {LOCK_TIMEOUT:.0f} s"
            time.sleep(0.05)
        return pickle.loads(path.read_bytes())


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory) -> Path:
    """A folder for this session alone, the same one in every worker."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # each worker has a folder in that of the session
        base = base.parent
    folder = base / "shared by all workers"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def once(shared_folder) -> Once:
    """once("name", make) -> make()'s value, made by one worker for all."""
    return Once(shared_folder)


class StepRun(NamedTuple):
    """A step's main(), run in this process."""

    status: int
    out: str


@pytest.fixture(scope="session")
def step_run(once, request) -> Callable[[Path], StepRun]:
    """step_run(path): the step's status and what it printed, run once in a session."""

    def run(path: Path) -> StepRun:
        def make() -> tuple[int, str]:
            out = io.StringIO()
            with contextlib.ExitStack() as stack:
                stack.enter_context(contextlib.redirect_stdout(out))
                if path.parent == chapters.chapter_folder(37):
                    patch = stack.enter_context(pytest.MonkeyPatch.context())
                    load = request.getfixturevalue("load_real_model")
                    patch.setattr(chapters.load_build(37), "load_model", load)
                    stack.enter_context(drawn_once())
                status = chapters.load_file(path).main()
            return status, out.getvalue()

        return StepRun(*once(f"step {path}", make))

    return run


# ---------------------------------------------------------------- chapters


@pytest.fixture(scope="session")
def gpt() -> ModuleType:
    """Chapter 05's build.py."""
    return chapters.load_build(5)


@pytest.fixture(scope="session")
def modern() -> ModuleType:
    """Chapter 07's build.py."""
    return chapters.load_build(7)


@pytest.fixture(scope="session")
def sparse() -> ModuleType:
    """Chapter 18's build.py."""
    return chapters.load_build(18)


@pytest.fixture(scope="session")
def real() -> ModuleType:
    """Chapter 37's build.py."""
    return chapters.load_build(37)


class LoadOnce:
    """Chapter 37's load_model(file), which fills the model of the packaged file once: whoever asks
    next gets the same one, unless somebody has changed it."""

    def __init__(self):
        self.real = chapters.load_build(37)
        self.load = self.real.load_model
        self.model = None

    def __call__(self, file):
        if file.path != self.real.packaged_weights():
            return self.load(file)
        if self.model is None or self.state() != self.before:
            import torch

            # Whoever asks first may do so in inference mode, and its tensors count no changes.
            with torch.inference_mode(False), drawn_once():
                self.model = self.load(file)
            self.before = self.state()
        return self.model

    def state(self) -> list:
        """Another one when a module was exchanged or a number was written to."""
        modules = [(name, type(module)) for name, module in self.model.named_modules()]
        numbers = [(id(p), p.data_ptr(), p._version) for p in self.model.parameters()]
        return modules + numbers


@pytest.fixture(scope="session")
def load_real_model() -> LoadOnce:
    return LoadOnce()


drawn: dict[tuple, Any] = {}  # by what is drawn and its size


@contextlib.contextmanager
def drawn_once() -> Iterator[None]:
    """Within it, a large Linear or Embedding starts from the numbers of the first one of its shape.

    For chapter 37: to draw the 163 million that the file replaces takes as long as to read a text.
    """
    import torch

    def from_the_first(draw: Callable) -> Callable:
        def reset_parameters(module) -> None:
            key = draw, module.weight.shape
            small = module.weight.numel() < LARGE
            if small or module.weight.is_meta or getattr(module, "bias", None) is not None:
                draw(module)
                return
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                if key not in drawn:
                    torch.manual_seed(1)
                    draw(module)
                    drawn[key] = module.weight.clone()
                module.weight.copy_(drawn[key])

        return reset_parameters

    with pytest.MonkeyPatch.context() as patch:
        for kind in (torch.nn.Linear, torch.nn.Embedding):
            patch.setattr(kind, "reset_parameters", from_the_first(kind.reset_parameters))
        yield


@pytest.fixture
def large_drawn_once() -> Iterator[None]:
    with drawn_once():
        yield


@pytest.fixture(scope="session")
def patient() -> Callable:
    """patient(path): the healthy patient of seed 1 of a break_it.py; patient(path, name): the same
    after the sabotage of that name. Each is trained once in a worker."""
    known = {}

    def made(path: Path, name: str | None = None):
        if (path, name) not in known:
            case = chapters.load_file(path).CASE
            if name is None:
                size = (READ[case.chapter],) if case.chapter in READ else ()
                known[path, name] = case.healthy(1, *size)
            else:
                damage = next(s for s in case.sabotages if s.name == name).damage
                known[path, name] = damage(made(path))
        return known[path, name]

    return made


@pytest.fixture(scope="session")
def examined(once, patient):
    """What all instruments of a break_it.py read: examined(path) of the healthy patient of seed 1,
    examined(path, name) after the sabotage of that name. Each is examined once in a session."""

    def readings(path: Path, name: str | None = None) -> dict[str, Reading]:
        def make() -> dict[str, Reading]:
            case = chapters.load_file(path).CASE
            with drawn_once() if case.chapter == 37 else contextlib.nullcontext():
                return examine(case, patient(path, name))

        return once(f"{path} {name}", make)

    return readings


# ---------------------------------------------------------------- scripts


def script(folder: Path, path: Path, *flags: str, **environment: str) -> tuple[int, str, str]:
    """Run a script by its path from `folder`: (status, stdout, stderr)."""
    done = subprocess.run(
        [sys.executable, *ENCODING_ERRORS, str(path), *flags],
        cwd=folder,
        env={**os.environ, "PYTHONIOENCODING": "utf-8", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def here(monkeypatch):
    """Train in this process, for tests that look at numbers and files: a worker process needs
    seconds to import torch."""

    def run_jobs(function, context, jobs, n_workers, on_report):
        for job in jobs:
            report = lambda *content, job=job: on_report(job, *content)
            yield job, function(context, job, report, 0)

    monkeypatch.setattr(runs, "run_jobs", run_jobs)


@pytest.fixture
def forked(monkeypatch):
    """Workers are forked from a process that has imported torch once. In a run each is a new
    interpreter, whose import of torch takes longer than all that these tests ask of it."""
    if "forkserver" in multiprocessing.get_all_start_methods():
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch._dynamo", "shared.runs"])
        monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)


@pytest.fixture
def run_here(tmp_path, monkeypatch):
    """run_script without a new interpreter, which needs seconds to import torch: for what a script
    refuses or prints, not for what it does to processes."""

    def run(path: Path, *flags: str) -> tuple[int, str, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [str(path), *flags])
        monkeypatch.setattr(sys, "path", list(sys.path))
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            with pytest.raises(SystemExit) as stop:
                runpy.run_path(str(path), run_name="__main__")
        return stop.value.code, out.getvalue(), err.getvalue()

    return run


@pytest.fixture
def run_script(tmp_path):
    """Run a script by its path, from a directory that isn't its own, as a person would:
    (status, stdout, stderr)."""
    return lambda path, *flags, **environment: script(tmp_path, path, *flags, **environment)
