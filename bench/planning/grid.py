"""Expand grids of settings. Pure functions on keys and values as typed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.errors import UsageError
from bench.typed import as_typed

Settings = dict[str, str]


@dataclass(frozen=True)
class Grid:
    """Settings that stay, axes that vary, and combinations to leave out.

    An axis is a list of alternatives, each some settings: one for a plain axis (``gpus: [1, 2]``), several for a
    linked one (``variant: [{strategy: ddp}, {strategy: fsdp, strategy.sharding_factor: 1}]``).
    """

    fixed: Settings = field(default_factory=dict)
    axes: tuple[tuple[Settings, ...], ...] = ()
    exclude: tuple[Settings, ...] = ()
    memory_gb: tuple[float, float] = (0.0, math.inf)
    """The grid is for devices with at least so much memory, and less than so much."""

    def takes(self, memory_gb: float | None) -> bool:
        """Whether the grid is for a device of so much memory; None if nobody knows how much that is."""
        least, below = self.memory_gb
        return least <= (memory_gb or 0.0) < below

    @property
    def keys(self) -> set[str]:
        """Keys of everything that is set."""
        return {*self.fixed, *(key for axis in self.axes for alternative in axis for key in alternative)}

    @property
    def size(self) -> int:
        """Number of combinations, the excluded ones among them."""
        return math.prod(len(axis) for axis in self.axes)

    def points(self) -> Iterator[Settings]:
        """Every combination, the last axis varying fastest, without the excluded ones."""
        for alternatives in itertools.product(*self.axes):
            point = dict(self.fixed)
            for alternative in alternatives:
                point.update(alternative)
            if not any(all(point.get(key) == value for key, value in left_out.items()) for left_out in self.exclude):
                yield point

    def overridden(self, axes: Mapping[str, Sequence[str]]) -> Grid:
        """The grid with some keys set by the user, each to one or several values.

        A plain axis or fixed setting of that key is replaced. In a linked axis a value that alternatives name
        selects those alternatives; a value that none names is put in place of the key in all of them.
        """
        fixed = {key: value for key, value in self.fixed.items() if key not in axes}
        kept: list[tuple[Settings, ...]] = []
        linked = set()
        for axis in self.axes:
            names = {key for alternative in axis for key in alternative}
            if len(names) == 1 and names <= set(axes):
                continue
            for key in sorted(names & set(axes)):
                axis = _narrowed(axis, key, axes[key])
                linked.add(key)
            kept.append(axis)
        given = [tuple({key: value} for value in values) for key, values in axes.items() if key not in linked]
        return Grid(fixed, (*kept, *given), self.exclude, self.memory_gb)


def _narrowed(axis: Sequence[Settings], key: str, values: Sequence[str]) -> tuple[Settings, ...]:
    """The alternatives of a linked axis for the values given to one of its keys."""
    narrowed = []
    for value in values:
        named = [alternative for alternative in axis if alternative.get(key) == value]
        narrowed += named or [{**alternative, key: value} for alternative in axis]
    return tuple({tuple(sorted(alternative.items())): alternative for alternative in narrowed}.values())


def read_grids(name: str, values: Mapping[str, Any]) -> list[Grid]:
    """The grids of a sweep file.

    Raises
    ------
    UsageError
        If the file is not of the form described in ``conf/sweep/README.md``.
    """
    grids = values.get("grids")
    if not isinstance(grids, list) or not grids:
        raise UsageError(f"sweep={name} has no grids: list at least one under `grids` in conf/sweep/{name}.yaml.")
    return [_read_grid(name, grid) for grid in grids]


def _read_grid(name: str, values: Any) -> Grid:
    values = _mapping(name, "a grid", values)
    unknown = set(values) - {"fixed", "axes", "exclude", "memory_gb"}
    if unknown:
        raise UsageError(f"sweep={name}: a grid has no {sorted(unknown)[0]}: choose fixed, axes, exclude, memory_gb.")
    axes = []
    for key, alternatives in _mapping(name, "axes", values.get("axes") or {}).items():
        if not isinstance(alternatives, list) or not alternatives:
            raise UsageError(f"sweep={name}: axis {key} is not a list of values.")
        axes.append(tuple(_settings(a) if isinstance(a, dict) else {key: as_typed(a)} for a in alternatives))
    exclude = values.get("exclude") or []
    if not isinstance(exclude, list):
        raise UsageError(f"sweep={name}: exclude={exclude} is not a list of combinations.")
    return Grid(
        _settings(_mapping(name, "fixed", values.get("fixed") or {})),
        tuple(axes),
        tuple(_settings(_mapping(name, "a combination to exclude", left_out)) for left_out in exclude),
        _memory_gb(name, values.get("memory_gb") or {}),
    )


def _memory_gb(name: str, values: Any) -> tuple[float, float]:
    values = _mapping(name, "memory_gb", values)
    bounds = (values.get("from", 0), values.get("below", math.inf))
    numbers = all(isinstance(bound, (int, float)) and not isinstance(bound, bool) for bound in bounds)
    if set(values) - {"from", "below"} or not numbers or not 0 <= bounds[0] < bounds[1]:
        raise UsageError(
            f"sweep={name}: memory_gb={values} is not valid: choose {{from: 20, below: 60}}, or one of them."
        )
    return bounds


def _mapping(name: str, part: str, values: Any) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise UsageError(f"sweep={name}: {part} is not a mapping of keys to values, but {values}.")
    return {str(key): value for key, value in values.items()}


def _settings(values: Mapping[str, Any]) -> Settings:
    return {str(key): as_typed(value) for key, value in values.items()}
