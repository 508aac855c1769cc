"""Change numbers in a description of hardware and leave its comments, its order and all other lines as they are."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

INDENT = 2


def set_values(text: str, values: Mapping[Sequence[str], Any]) -> str:
    """The text of a YAML file with other values at some places, by the keys that lead to each.

    A place that is missing is added at the end of the mapping it belongs to; one whose value is None is taken out.

    Raises
    ------
    ValueError
        If a mapping on the way that holds others is written in one line.
    """
    lines = text.splitlines()
    for path, value in values.items():
        _set_value(lines, list(path), value)
    return "\n".join(lines) + "\n"


def _set_value(lines: list[str], path: list[str], value: Any) -> None:
    start, end, is_set = 0, len(lines), value is not None
    for depth, key in enumerate(path):
        place = _find_key(lines, start, end, depth * INDENT, key)
        is_last = depth == len(path) - 1
        if place is None:
            for missing_key in reversed(path[depth + 1 :]):
                value = {missing_key: value}
            lines[end:end] = _render(key, value, depth * INDENT) if is_set else []
            return
        start, end = place, _find_end(lines, place, end, depth * INDENT)
        if is_last:
            lines[start:end] = _render(key, value, depth * INDENT) if is_set else []
        elif re.fullmatch(r"\s*(#.*)?", lines[start].split(":", 1)[1]):
            start += 1
        elif depth == len(path) - 2:
            mapping = yaml.safe_load("\n".join(lines[start:end]).strip())[key]
            lines[start:end] = _render(key, {**mapping, path[-1]: value}, depth * INDENT)
            return
        else:
            raise ValueError(f"{'.'.join(path[: depth + 1])} is written in one line")


def _find_key(lines: Sequence[str], start: int, end: int, indent: int, key: str) -> int | None:
    pattern = re.compile(rf" {{{indent}}}{re.escape(key)}:(\s|$)")
    return next((index for index in range(start, end) if pattern.match(lines[index])), None)


def _find_end(lines: Sequence[str], start: int, end: int, indent: int) -> int:
    """Behind the last line that is deeper than the one at `start`."""
    for index in range(start + 1, end):
        line = lines[index]
        if line.strip() and len(line) - len(line.lstrip()) <= indent:
            return index
    return end


def _render(key: str, value: Any, indent: int) -> list[str]:
    """A mapping of mappings as a block of one line for each, anything else in one line."""
    space = " " * indent
    if isinstance(value, Mapping) and any(isinstance(item, Mapping) for item in value.values()):
        return [
            f"{space}{key}:",
            *(line for name, item in value.items() for line in _render(name, item, indent + INDENT)),
        ]
    flow = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000).strip()
    return [f"{space}{key}: {flow.removesuffix('...').strip()}"]
