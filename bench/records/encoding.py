"""A row as JSON text and back, whatever its numbers and texts are.

JSON has no NaN and no infinity. Such a number is written as the text ``"NaN"``, ``"Infinity"`` or ``"-Infinity"``, as
protobuf's JSON mapping does (https://protobuf.dev/programming-guides/json), and read as the number again where a
number stands (`bench.records.checking`).
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping
from typing import Any, BinaryIO

NON_FINITE_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""Texts that stand for numbers."""

MAX_FILE_BYTES = 2**28
"""A file larger than this is no row and is not read into memory."""

MAX_SHOWN_LENGTH = 60
"""Characters of a value that a message shows."""


def encode_record(record: Mapping[str, Any]) -> str:
    """The row as JSON text, ASCII only. Never raises because of a value: what JSON cannot hold is written as text."""
    return _encode_json(record, indent=1)


def encode_line(value: Any) -> str:
    """A row, or a value of one, in one line without spaces, as `encode_record` writes values."""
    return _encode_json(value, separators=(",", ":"))


def _encode_json(value: Any, **options: Any) -> str:
    try:
        text = json.dumps(value, allow_nan=False, **options)
    except (ValueError, TypeError):
        text = json.dumps(_to_json_value(value), allow_nan=False, **options)
    if "\\ud" in text and not _is_unicode(json.loads(text)):
        text = json.dumps(_to_json_value(value), allow_nan=False, **options)
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
