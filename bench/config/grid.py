"""Expand grids of settings. Pure functions on keys and values as typed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.core.errors import UsageError
from bench.core.typed_config import format_override_value

RunSettings = dict[str, str]


@dataclass(frozen=True)
class SettingsGrid:
    """Settings that stay, axes that vary, and combinations to leave out.

    An axis is a list of alternatives, each some settings: one for a plain axis (``gpus: [1, 2]``), several for a
    linked one (``variant: [{strategy: ddp}, {strategy: fsdp, strategy.sharding_factor: 1}]``).
    """

    fixed: RunSettings = field(default_factory=dict)
    axes: tuple[tuple[RunSettings, ...], ...] = ()
    exclude: tuple[RunSettings, ...] = ()
    memory_range_gb: tuple[float, float] = (0.0, math.inf)
    """The grid is for devices with at least so much memory, and less than so much."""

    def takes_memory_gb(self, memory_gb: float | None) -> bool:
        """Whether the grid is for a device of so much memory; None if nobody knows how much that is."""
        min_gb, max_gb = self.memory_range_gb
        return min_gb <= (memory_gb or 0.0) < max_gb

    @property
    def keys(self) -> set[str]:
        """Keys of everything that is set."""
        return {*self.fixed, *(key for axis in self.axes for alternative in axis for key in alternative)}

    @property
    def size(self) -> int:
        """Number of combinations, the excluded ones among them."""
        return math.prod(len(axis) for axis in self.axes)

    def iterate_points(self) -> Iterator[RunSettings]:
        """Every combination, the last axis varying fastest, without the excluded ones."""
        for alternatives in itertools.product(*self.axes):
            point = dict(self.fixed)
            for alternative in alternatives:
                point.update(alternative)
            if not any(
                all(point.get(key) == value for key, value in excluded_settings.items())
                for excluded_settings in self.exclude
            ):
                yield point

    def override_axes(self, axes: Mapping[str, Sequence[str]]) -> SettingsGrid:
        """The grid with some keys set by the user, each to one or several values.

        A plain axis or fixed setting of that key is replaced. In a linked axis a value that alternatives name
        selects those alternatives; a value that none names is put in place of the key in all of them.
        """
        fixed = {key: value for key, value in self.fixed.items() if key not in axes}
        kept_axes: list[tuple[RunSettings, ...]] = []
        linked_keys = set()
        for axis in self.axes:
            axis_keys = {key for alternative in axis for key in alternative}
            if len(axis_keys) == 1 and axis_keys <= set(axes):
                continue
            for key in sorted(axis_keys & set(axes)):
                axis = _select_alternatives(axis, key, axes[key])
                linked_keys.add(key)
            kept_axes.append(axis)
        new_axes = [tuple({key: value} for value in values) for key, values in axes.items() if key not in linked_keys]
        return SettingsGrid(fixed, (*kept_axes, *new_axes), self.exclude, self.memory_range_gb)


def _select_alternatives(axis: Sequence[RunSettings], key: str, values: Sequence[str]) -> tuple[RunSettings, ...]:
    """The alternatives of a linked axis for the values given to one of its keys."""
    selected = []
    for value in values:
        matching_alternatives = [alternative for alternative in axis if alternative.get(key) == value]
        selected += matching_alternatives or [{**alternative, key: value} for alternative in axis]
    return tuple({tuple(sorted(alternative.items())): alternative for alternative in selected}.values())


def parse_grids(name: str, values: Mapping[str, Any]) -> list[SettingsGrid]:
    """The grids of a sweep file.

    Raises
    ------
    UsageError
        If the file is not of the form described in ``conf/sweep/README.md``.
    """
    grids = values.get("grids")
    if not isinstance(grids, list) or not grids:
        raise UsageError(f"sweep={name} has no grids: list at least one under `grids` in conf/sweep/{name}.yaml.")
    return [_parse_grid(name, grid) for grid in grids]


def _parse_grid(name: str, values: Any) -> SettingsGrid:
    values = _require_mapping(name, "a grid", values)
    unknown_keys = set(values) - {"fixed", "axes", "exclude", "memory_gb"}
    if unknown_keys:
        raise UsageError(
            f"sweep={name}: a grid has no {sorted(unknown_keys)[0]}: choose fixed, axes, exclude, memory_gb."
        )
    axes = []
    for key, alternatives in _require_mapping(name, "axes", values.get("axes") or {}).items():
        if not isinstance(alternatives, list) or not alternatives:
            raise UsageError(f"sweep={name}: axis {key} is not a list of values.")
        axes.append(
            tuple(
                _parse_settings(alternative)
                if isinstance(alternative, dict)
                else {key: format_override_value(alternative)}
                for alternative in alternatives
            )
        )
    exclude = values.get("exclude") or []
    if not isinstance(exclude, list):
        raise UsageError(f"sweep={name}: exclude={exclude} is not a list of combinations.")
    return SettingsGrid(
        _parse_settings(_require_mapping(name, "fixed", values.get("fixed") or {})),
        tuple(axes),
        tuple(
            _parse_settings(_require_mapping(name, "a combination to exclude", combination)) for combination in exclude
        ),
        _parse_memory_range(name, values.get("memory_gb") or {}),
    )


def _parse_memory_range(name: str, values: Any) -> tuple[float, float]:
    values = _require_mapping(name, "memory_gb", values)
    bounds = (values.get("from", 0), values.get("below", math.inf))
    are_numbers = all(isinstance(bound, (int, float)) and not isinstance(bound, bool) for bound in bounds)
    if set(values) - {"from", "below"} or not are_numbers or not 0 <= bounds[0] < bounds[1]:
        raise UsageError(
            f"sweep={name}: memory_gb={values} is not valid: choose {{from: 20, below: 60}}, or one of them."
        )
    return bounds


def _require_mapping(name: str, part: str, values: Any) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise UsageError(f"sweep={name}: {part} is not a mapping of keys to values, but {values}.")
    return {str(key): value for key, value in values.items()}


def _parse_settings(values: Mapping[str, Any]) -> RunSettings:
    return {str(key): format_override_value(value) for key, value in values.items()}
