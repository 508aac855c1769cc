"""Files of a store: open to all who share it, there whole or not at all, numbers of every kind in JSON.

Several people share a store through a Unix group: what one of them makes there, the others can use. Folders and locks
are open to a group where the folder they lie in is, whatever the umask of their maker; rows and claims, which are never
written twice, can be read by all who can reach them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, TextIO

READABLE_MODE = 0o644


def make_folder(path: Path) -> None:
    """Make a folder inside a store, and those above it, open to the same group as the folder it lies in."""
    if path.is_dir():
        return
    make_folder(path.parent)
    with contextlib.suppress(FileExistsError):  # somebody else was faster
        path.mkdir()
        _open_to_group(path, stat.S_IRWXG)


def open_lock(path: Path) -> TextIO:
    """Open a file that is there to be locked, by everybody who may write to its folder.

    Raises
    ------
    OSError
        If it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, READABLE_MODE)
    if is_own_file(path):
        _open_to_group(path, stat.S_IRGRP | stat.S_IWGRP)
    return os.fdopen(descriptor, "r+")


def make_readable(descriptor: int) -> None:
    """Let everybody who reaches a file read it: temporary files are made for their maker alone."""
    os.fchmod(descriptor, READABLE_MODE)


def is_own_file(path: Path) -> bool:
    """Whether a file is this account's, or not there yet."""
    try:
        return path.stat().st_uid == os.geteuid()
    except FileNotFoundError:
        return True


def _open_to_group(path: Path, permissions: int) -> None:
    """Give a path the group of the folder it lies in, and of some permissions those that the folder's group has."""
    folder_status, path_status = path.parent.stat(), path.stat()
    if path_status.st_gid != folder_status.st_gid:
        try:
            os.chown(path, -1, folder_status.st_gid)
        except PermissionError:  # its maker is not of that group, which then is not the one that shares the store
            return
    wanted_mode = stat.S_IMODE(path_status.st_mode) | (folder_status.st_mode & permissions)
    if wanted_mode != stat.S_IMODE(path.stat().st_mode):
        path.chmod(wanted_mode)


# --- Files that are there whole or not at all, and readable by everybody who reaches their folder.


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


def sync_folder(folder: Path) -> None:
    """Write through to the disk which files there are in a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- A row as JSON text and back, whatever its numbers and texts are.
#
# JSON has no NaN and no infinity. Such a number is written as the text "NaN", "Infinity" or "-Infinity", as protobuf's
# JSON mapping does (https://protobuf.dev/programming-guides/json), and read as the number again where a number stands
# (`bench.records.checking`).

NON_FINITE_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""Texts that stand for numbers."""

MAX_FILE_BYTES = 2**28
"""A file larger than this is no row and is not read into memory."""

MAX_SHOWN_LENGTH = 60
"""Characters of a value that a message shows."""


def encode_record(record: Mapping[str, Any]) -> str:
    """The row as JSON text, ASCII only, a column to the line: Python's fast encoder does not know lines. Never raises
    because of a value: what JSON cannot hold is written as text."""
    lines = (f" {_encode_column(name)}: {_encode_column(value)}" for name, value in record.items())
    return "{\n" + ",\n".join(lines) + "\n}"


def encode_line(value: Any) -> str:
    """A row, or a value of one, in one line without spaces, as `encode_record` writes values."""
    return _encode_json(value, _LINE_ENCODER)


_COLUMN_ENCODER = json.JSONEncoder(allow_nan=False)
_LINE_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


def _encode_column(value: Any) -> str:
    return _encode_repeated(value) if type(value) in REPEATED_TYPES else _encode_json(value, _COLUMN_ENCODER)


REPEATED_TYPES = (str, int, bool, type(None))
"""Of values that are alike in many rows, and that are as JSON what they are compared by: 0.0 and -0.0 are not."""


@functools.lru_cache(maxsize=4096, typed=True)
def _encode_repeated(value: str | int | bool | None) -> str:
    return _encode_json(value, _COLUMN_ENCODER)


def _encode_json(value: Any, encoder: json.JSONEncoder) -> str:
    try:
        text = encoder.encode(value)
    except (ValueError, TypeError):
        text = encoder.encode(_to_json_value(value))
    if "\\ud" in text and not _is_unicode(json.loads(text)):
        text = encoder.encode(_to_json_value(value))
    return text


def read_json(path: str | os.PathLike[str]) -> Any:
    """The content of a JSON file.

    Raises
    ------
    OSError
        If the file cannot be read.
    ValueError
        If it is not a regular file, too large, not text, not whole JSON, or nested too deeply.
    """
    with open_data_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_FILE_BYTES:
            raise ValueError(f"larger than {MAX_FILE_BYTES >> 20} MiB")
        return parse_json(file.read())


def open_data_file(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file to read it whole.

    Raises
    ------
    OSError
        If it cannot be opened.
    ValueError
        If it is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would be waited for
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("not a regular file")
    return os.fdopen(descriptor, "rb")


def parse_json(data: bytes) -> Any:
    """The value that a JSON text stands for.

    Raises
    ------
    ValueError
        If it is not text, not whole JSON, or nested too deeply.
    """
    try:
        content = json.loads(data.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"not text: {error}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not whole JSON: {error}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if b"\\u" in data and b"\\ud" in data.lower() and not _is_unicode(content):
        raise ValueError("a text in it is not Unicode (half of a surrogate pair)")
    return content


def format_value(value: object) -> str:
    """A value as a message shows it: JSON, printable, cut where it is long."""
    try:
        text = json.dumps(value)
    except (ValueError, TypeError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= MAX_SHOWN_LENGTH else f"{text[: MAX_SHOWN_LENGTH - 3]}..."


def _is_unicode(content: Any) -> bool:
    """Whether every text of a JSON value can be encoded."""
    try:
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _to_json_value(value: Any) -> Any:
    """The value with everything that JSON cannot hold as text."""
    if isinstance(value, Mapping):
        return {str(_to_json_value(key)): _to_json_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json_value(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, bool | int | float):
        return value
    return str(value).encode(errors="backslashreplace").decode()
