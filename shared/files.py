"""Files that a run leaves behind: written whole or not at all; and a folder that one run holds."""

import contextlib
import errno
import json
import os
import re
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

from shared.console import UserError

LEFTOVER = r"\..+\.(json|pt|png|txt)\.[0-9a-f]{8}"  # the name of a file that is not yet whole


def claim_folder(folder: Path) -> None:
    """Make the folder and prove that it can be written to. UserError if not: before training."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"room for a line")
            file.flush()
    except OSError as error:
        raise UserError(
            f"can't write to --output-dir {folder}: {error.strerror or error}; "
            "name a folder you may write to"
        ) from None


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold the folder for one process. UserError if another holds it; a killed one holds nothing.

    The system keeps the lock and drops it with the process, so a lock file may stay behind.
    """
    with (folder / ".lock").open("w", encoding="utf-8") as file:
        try:
            lock(file.fileno())
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES, errno.EDEADLK):
                yield  # a file system that knows no locks
                return
            raise UserError(
                f"another run is writing to {folder}; wait for it, or name another --output-dir"
            ) from None
        remove_leftovers(folder)
        try:
            yield
        finally:
            remove_leftovers(folder)


def remove_leftovers(folder: Path) -> None:
    """Delete what write_bytes() had in hand in a process that was killed. The folder is held."""
    for path in [*folder.glob(".*"), *folder.glob("runs/.*")]:
        if re.fullmatch(LEFTOVER, path.name):
            path.unlink(missing_ok=True)


def lock(handle: int) -> None:
    """Lock an open file for this process, at once. OSError if another has it."""
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows
        import msvcrt

        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
    else:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def write_bytes(path: Path, content: bytes) -> None:
    """Replace `path` by `content` in one step: a reader sees the old file or the new one.

    OSError, with the path in it, if there is no room or no permission.
    """
    # Named before it is made: a Ctrl-C between the two leaves nothing behind.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)  # it may have gone since the start
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # a full disk says so here at the latest, not after the rename
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror or str(error), str(path)) from None
        raise


def as_unicode(path: str | Path) -> str:
    """A path as text for results, which are UTF-8. A byte of its name that isn't reads as \\xff."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: object) -> None:
    """Strict JSON, two spaces of indent: infinities and NaN must have become null or a string."""
    text = json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    write_text(path, text)


def read_json(path: Path, what: str) -> object:
    """The value in a JSON file. UserError if it can't be read as `what`."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise damaged(path, what) from None


def damaged(path: Path, what: str) -> UserError:
    """The error for a file that is not what it should be."""
    return UserError(f"{path} is not {what}; delete it, or start over with --fresh")
