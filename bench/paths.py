"""Paths as somebody typed them: such as can be opened and printed."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from bench.errors import UsageError, invalid_value_error

MIN_FREE_BYTES = 256 * 1024
"""Of the largest rows; a store with less space is refused."""


def require_path(field: str, text: str) -> Path:
    """A path, whether there is something or not.

    Raises
    ------
    UsageError
        If no file could be there: a name is too long, symbolic links lead in a circle.
    """
    try:
        os.stat(text)  # noqa: PTH116 (a path as text)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass
    except (OSError, ValueError) as error:
        raise invalid_value_error(field, text, f"another path ({getattr(error, 'strerror', None) or error})") from None
    return Path(text)


def require_writable_store(store: Path) -> None:
    """Raise `UsageError` unless the store can take a row: its folder, and some disk space."""
    try:
        store.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=store) as file:
            os.posix_fallocate(file.fileno(), 0, MIN_FREE_BYTES)
    except OSError as error:
        reason = error.strerror or str(error)
        raise invalid_value_error("store", store, f"a folder that can be written to ({reason})") from None


def parse_path_argument(text: str) -> Path:
    """For argparse: an argument that is a path."""
    try:
        return require_path("path", text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
