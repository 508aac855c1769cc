"""Rows as the lines of a packed file; `bench.records.packed_rows` reads them. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from bench.records.encoding import encode_line
from bench.records.packed_rows import (
    ABSENT,
    KEY_ORDER,
    PACKED_FORMAT,
    PACKED_FORMAT_VERSION,
    KeyOrder,
    PackedHeader,
    join_path,
)
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
