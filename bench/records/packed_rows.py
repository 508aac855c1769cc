"""The packed rows of a store: one file, in which values that rows have in common are written once.

    <store>/rows.jsonl

The first line holds the format, its version, ``shared`` (values that every row has unless its line says otherwise, as
nested as in the rows) and ``key_order`` (the order of the keys of every nested part, by its path as a JSON Pointer).
Each further line is a row without its shared values, keys sorted; ``absent`` names the shared values that it does not
have, and ``key_order`` the parts whose keys are in another order.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from bench.core.files import MAX_FILE_BYTES, encode_line, format_value, open_data_file, parse_json
from bench.records.checking import RUN_ID_PATTERN, check_record
from bench.records.schema import Record

UNSHARED_COLUMNS = ("attempt", "run_id")
"""Columns that every line has, so that it says which row it is whatever became of the first one."""


def encode_rows(rows: Sequence[Record], header: PackedHeader | None = None) -> Iterator[str]:
    """The lines of some rows, the first line before them.

    Parameters
    ----------
    rows: sequence of Record
        As they were written, by run_id and attempt.
    header: PackedHeader, optional
        Of these rows' file so far: what it shares stays shared, so that lines of rows that are in the file already stay
        as they are.
    """
    shared = _collect_shared(rows) if header is None else header.shared
    key_order = {} if header is None else {path: list(keys) for path, keys in header.key_order.items()}
    for row in rows:
        _add_key_order(row, "", key_order)
    yield encode_line(
        {
            "format": PACKED_FORMAT,
            "format_version": PACKED_FORMAT_VERSION,
            KEY_ORDER: dict(sorted(key_order.items())),
            "shared": _sort_keys(shared),
        }
    )
    for row in rows:
        other_order: KeyOrder = {}
        _find_other_order(row, "", key_order, other_order)
        absent = sorted(_find_absent(row, shared, ""))
        line = _drop_shared(row, shared)
        line |= ({KEY_ORDER: other_order} if other_order else {}) | ({ABSENT: absent} if absent else {})
        yield encode_line(_sort_keys(line))


def _collect_shared(sections: Sequence[Record], unshared: Collection[str] = UNSHARED_COLUMNS) -> Record:
    """Values that all sections have."""
    shared: Record = {}
    first_section, *other_sections = sections
    for key, value in first_section.items():
        if key in unshared or not all(key in section for section in other_sections):
            continue
        values = [value, *(section[key] for section in other_sections)]
        if all(isinstance(inner, dict) for inner in values):
            inner_shared = _collect_shared(values, ())
            if inner_shared or not any(values):
                shared[key] = inner_shared
        elif all(_is_same(value, other) for other in values):
            shared[key] = value
    return shared


def _find_absent(section: Record, shared: Record, path: str) -> Iterator[str]:
    """Paths of what is shared and a section does not have."""
    for key, value in shared.items():
        if key not in section:
            yield join_path(path, key)
        elif isinstance(value, dict) and isinstance(section[key], dict):
            yield from _find_absent(section[key], value, join_path(path, key))


def _drop_shared(section: Record, shared: Record) -> Record:
    """A section, keys sorted, without values that it shares."""
    remaining: Record = {}
    for key, value in sorted(section.items()):
        if key not in shared:
            remaining[key] = _sort_keys(value)
        elif isinstance(value, dict) and isinstance(shared[key], dict):
            if inner_remaining := _drop_shared(value, shared[key]):
                remaining[key] = inner_remaining
        elif not _is_same(value, shared[key]):
            remaining[key] = _sort_keys(value)
    return remaining


def _is_same(value: Any, other: Any) -> bool:
    """Whether two values are one in JSON: 1, 1.0 and true are three."""
    if value.__class__ is not other.__class__:
        return False
    return encode_line(value) == encode_line(other) if isinstance(value, float | list | dict) else bool(value == other)


def _sort_keys(value: Any) -> Any:
    """Sections with their keys sorted. Lists are values, and stay as they are."""
    return {key: _sort_keys(inner) for key, inner in sorted(value.items())} if isinstance(value, dict) else value


def _add_key_order(section: Record, path: str, key_order: KeyOrder) -> None:
    """Put the keys of a section that are new where it has them: behind the key before."""
    keys = key_order.setdefault(path, [])
    known_keys = set(keys)
    position = 0
    for key, value in section.items():
        if key in known_keys:
            position = keys.index(key) + 1
        else:
            keys.insert(position, key)
            known_keys.add(key)
            position += 1
        if isinstance(value, dict):
            _add_key_order(value, join_path(path, key), key_order)


def _find_other_order(section: Record, path: str, key_order: KeyOrder, other_order: KeyOrder) -> None:
    """Add the keys of parts of a section that are in another order than in `key_order`."""
    if [key for key in key_order[path] if key in section] != list(section):
        other_order[path] = list(section)
    for key, value in section.items():
        if isinstance(value, dict):
            _find_other_order(value, join_path(path, key), key_order, other_order)


# --- The packed rows of a store: one file, in which values that rows have in common are written once.

ROWS_FILE = "rows.jsonl"

PACKED_FORMAT = "fsdp-bench rows"
PACKED_FORMAT_VERSION = 1

KEY_ORDER = "key_order"
"""Field of the first line and of lines of rows: keys of nested parts in their order."""
ABSENT = "absent"
"""Field of lines of rows: paths of shared values that the row does not have."""
RESERVED_FIELDS = (ABSENT, KEY_ORDER)
"""No column of a row may have these names."""

MAX_ATTEMPT = 10**15 - 1

MAX_CACHED_FILES = 4
"""Files kept in memory as they are, for look-ups of single rows."""

FileStamp = tuple[int, int, int, int]

KeyOrder = dict[str, list[str]]
"""Keys of nested parts in their order, by the path of the part."""


@dataclass(frozen=True)
class PackedHeader:
    """What the first line says of all rows."""

    shared: Record
    key_order: KeyOrder


@dataclass(slots=True)
class PackedRow:
    """One line: a row of an attempt."""

    file: PackedRows
    line_number: int
    line: bytes
    values: Record | None = None
    """What the line holds, until it is decoded for the first time: who reads a whole file need not parse it twice."""

    @property
    def location(self) -> str:
        return f"{self.file.path}:{self.line_number}"

    def decode(self) -> Record:
        """The row exactly as it was packed, unchecked.

        Raises
        ------
        ValueError
            If the file's first line or this one is damaged.
        """
        if self.file.header is None:
            raise ValueError("the first line of its file is damaged")
        try:
            section, self.values = self.values if self.values is not None else parse_json(self.line), None
            key_order = {**self.file.header.key_order, **_check_key_order(section.pop(KEY_ORDER, {}))}
            absent = _check_absent(section.pop(ABSENT, []))
            return _merge_shared(section, self.file.header.shared, "", key_order, absent)
        except RecursionError:
            raise ValueError("nested too deeply") from None

    def read(self) -> Record:
        """The row in the current format, checked as `bench.records.read_row` does.

        Raises
        ------
        ValueError
            If it is not a record.
        """
        return check_record(self.decode())


@dataclass
class PackedRows:
    """A file of packed rows."""

    path: str
    stamp: FileStamp | None = None
    """Of the file when it was read."""
    header: PackedHeader | None = None
    """None where there is no file, or its first line is damaged: then no row can be read."""
    rows: dict[str, dict[int, PackedRow]] = field(default_factory=dict)
    """By run_id and attempt, lines that do not hold a record included if they name both."""
    problems: list[str] = field(default_factory=list)
    """A sentence on each line that names no attempt, or one that an earlier line has; or on the whole file."""

    @property
    def readable_rows(self) -> dict[str, dict[int, PackedRow]]:
        """`rows`, none of them if the first line is damaged."""
        return {} if self.header is None else self.rows

    def is_current(self) -> bool:
        """Whether the file is the one that was read."""
        return self.stamp == _get_file_stamp(self.path)

    def list_rows(self) -> Iterator[PackedRow]:
        """Every row, by run_id and attempt."""
        for _, attempts in sorted(self.rows.items()):
            yield from (row for _, row in sorted(attempts.items()))


def open_packed_rows(store: str | os.PathLike[str], *, reads_all: bool = False) -> PackedRows:
    """The packed rows of a store; none where it has no such file.

    Parameters
    ----------
    reads_all: bool
        Every row will be decoded once: nothing is kept for later look-ups.

    Raises
    ------
    PermissionError
        If this account may not read the file.
    """
    path = os.path.join(store, ROWS_FILE)  # noqa: PTH118 (a path as text)
    stamp = _get_file_stamp(path)
    if stamp is None:
        return PackedRows(path)
    try:
        return read_packed_rows(path, stamp, keeps_values=True) if reads_all else _read_packed_rows_once(path, stamp)
    except FileNotFoundError:
        return PackedRows(path)
    except PermissionError:
        raise
    except (OSError, ValueError) as error:
        return PackedRows(path, stamp, problems=[f"{path}: {getattr(error, 'strerror', None) or error}"])


def find_packed_attempts(store: str | os.PathLike[str], run_id: str) -> dict[int, PackedRow]:
    """The packed rows of a run, by attempt.

    Raises
    ------
    PermissionError
        If this account may not read the file.
    """
    return open_packed_rows(store).rows.get(run_id, {})


def _get_file_stamp(path: str) -> FileStamp | None:
    """What tells a file from the one that was there before it was replaced; None where there is none."""
    try:
        status = os.stat(path)  # noqa: PTH116
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:  # a link to itself
        return (0, 0, 0, 0)
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@functools.lru_cache(maxsize=MAX_CACHED_FILES)
def _read_packed_rows_once(path: str, stamp: FileStamp) -> PackedRows:
    return read_packed_rows(path, stamp)


def read_packed_rows(path: str, stamp: FileStamp | None = None, *, keeps_values: bool = False) -> PackedRows:
    """Read a file of packed rows, of whatever name.

    Raises
    ------
    OSError
        If it cannot be read.
    ValueError
        If it is not a regular file.
    """
    packed = PackedRows(path, stamp)
    with open_data_file(path) as file:
        lines = enumerate(iter(lambda: file.readline(MAX_FILE_BYTES), b""), start=1)
        _, first_line = next(lines, (1, b""))
        try:
            packed.header = _parse_header(first_line)
        except (ValueError, RecursionError) as error:
            packed.problems.append(f"{path}:1: {error}; none of its rows can be read")
        for line_number, line in lines:
            try:
                values = parse_json(line)
                run_id, attempt = _get_attempt_key(values)
            except ValueError as error:
                if packed.header is not None:
                    packed.problems.append(f"{path}:{line_number}: {error}")
                continue
            row = PackedRow(packed, line_number, line, values if keeps_values else None)
            earlier_row = packed.rows.setdefault(run_id, {}).setdefault(attempt, row)
            if earlier_row is not row and packed.header is not None:
                packed.problems.append(
                    f"{row.location}: attempt {attempt} of run {run_id} is in line {earlier_row.line_number} already"
                )
    return packed


def _parse_header(line: bytes) -> PackedHeader:
    content = parse_json(line)
    if not isinstance(content, dict) or content.get("format") != PACKED_FORMAT:
        raise ValueError("not the first line of packed rows")
    version = content.get("format_version")
    if version.__class__ is not int or version < 1:
        raise ValueError(f"format_version={format_value(version)} is not a whole number of at least 1")
    if version > PACKED_FORMAT_VERSION:
        raise ValueError(f"format_version {version} is newer than this suite reads ({PACKED_FORMAT_VERSION})")
    shared = content.get("shared")
    if shared.__class__ is not dict:
        raise ValueError(f"shared={format_value(shared)} is not an object")
    return PackedHeader(shared, _check_key_order(content.get(KEY_ORDER)))


def _check_key_order(value: Any) -> KeyOrder:
    if value.__class__ is not dict or not all(
        keys.__class__ is list and all(key.__class__ is str for key in keys) for keys in value.values()
    ):
        raise ValueError(f"{KEY_ORDER}={format_value(value)} is not an object of lists of keys")
    return value  # type: ignore[no-any-return]


def _get_attempt_key(content: Any) -> tuple[str, int]:
    """Run and attempt of a line."""
    run_id, attempt = (content.get("run_id"), content.get("attempt")) if isinstance(content, dict) else (None, None)
    if run_id.__class__ is not str or not RUN_ID_PATTERN.match(run_id):
        raise ValueError(f"run_id={format_value(run_id)} is not a run's id (16 hexadecimal digits)")
    if attempt.__class__ is not int or not 0 <= attempt <= MAX_ATTEMPT:
        raise ValueError(f"attempt={format_value(attempt)} is not a whole number of at least 0")
    return run_id, attempt


def _check_absent(value: Any) -> frozenset[str]:
    if value.__class__ is not list or not all(path.__class__ is str for path in value):
        raise ValueError(f"{ABSENT}={format_value(value)} is not a list of paths")
    return frozenset(value)


def _merge_shared(section: Record, shared: Record, path: str, key_order: KeyOrder, absent: frozenset[str]) -> Record:
    """A part of a row with the values it shares, its keys in their order. What is shared is copied."""
    merged: Record = {}
    for key in chain(key_order.get(path, ()), section, shared):
        if key in merged:
            continue
        if key in section:
            value = section[key]
            if value.__class__ is dict:
                inner_shared = shared.get(key)
                inner_shared = inner_shared if inner_shared.__class__ is dict else {}
                value = _merge_shared(value, inner_shared, join_path(path, key), key_order, absent)
        elif key in shared and not (absent and join_path(path, key) in absent):
            value = shared[key]
            if value.__class__ is dict:
                value = _merge_shared({}, value, join_path(path, key), key_order, absent)
            elif value.__class__ is list:
                value = copy.deepcopy(value)
        else:
            continue
        merged[key] = value
    return merged


def join_path(path: str, key: str) -> str:
    """Path of a nested part, as a JSON Pointer (RFC 6901)."""
    return f"{path}/{key.replace('~', '~0').replace('/', '~1')}" if "~" in key or "/" in key else f"{path}/{key}"
