"""Files that are there whole or not at all, and readable by everybody who reaches their folder."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

READABLE_MODE = 0o644
"""Temporary files are made for their maker alone."""


def replace_file(path: Path, content: str | bytes) -> None:
    """Put a file in the place of another, or where there is none; text is written as UTF-8.

    Raises
    ------
    OSError
        If it cannot be written; then what was there is still there.
    """
    temporary_path = write_temporary_file(path.parent, content)
    try:
        temporary_path.replace(path)
    except OSError:
        temporary_path.unlink()
        raise


def write_temporary_file(folder: Path, content: str | bytes) -> Path:
    """A new file with a hidden name in a folder, written through to the disk: to be renamed, or linked and removed.

    Raises
    ------
    OSError
        If it cannot be written; then it is not there.
    """
    descriptor, temporary_path = tempfile.mkstemp(dir=folder, prefix=".new-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, READABLE_MODE)
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(descriptor)
    except BaseException:
        os.unlink(temporary_path)
        raise
    return Path(temporary_path)
