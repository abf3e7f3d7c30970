"""Files that a run leaves behind: written whole or not at all."""

import json
import os
import tempfile
from pathlib import Path

from shared.console import UserError


def claim_folder(folder: Path) -> None:
    """Make the folder and prove that it can be written to. UserError if not: before training, not after."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"can't write to --output-dir {folder}: {error.strerror or error}; name a folder you may write to"
        ) from None


def write_bytes(path: Path, content: bytes) -> None:
    """Replace `path` by `content` in one step: a reader sees the old file or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)  # it was there before the training, but that is a while ago
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)  # mkstemp makes files that only their owner may read
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: object) -> None:
    """Strict JSON, two spaces of indent: infinities and NaN must have become null or a string before."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n")
