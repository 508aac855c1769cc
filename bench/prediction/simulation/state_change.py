"""The change that two consecutive passes (blocks, micro-batches) both make to a rank's state, and its extrapolation."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.prediction.simulation.simulated_rank import RankState
from bench.prediction.trace.kernels import FloatArray

TIME_TOLERANCE = 1e-9
"""Of the longest move within a pass: by how much moves that are called equal may differ."""

NUMBER_PATTERN = re.compile(r"(?<!\S)-?\d+(?!\S)")

NamedValues = Mapping[str, tuple[Any, ...]]
"""By name: a number, which may move on, and what stays."""


@functools.lru_cache(maxsize=2**16)
def split_name(name: str) -> tuple[tuple[str, str], int | None]:
    """The words before and after the first number of a name, and the number: of a unit, or of a bucket."""
    match = NUMBER_PATTERN.search(name)
    return ((name, ""), None) if match is None else ((name[: match.start()], name[match.end() :]), int(match[0]))


def join_name(words: tuple[str, str], number: int) -> str:
    """The name that `split_name` has split."""
    return f"{words[0]}{number}{words[1]}"


@dataclass(frozen=True)
class MovingValue:
    """A value that has a name, and how both move on from pass to pass."""

    words: tuple[str, str]
    """Of the name, before and after its number."""
    number: int
    number_step: int
    value: float = 0.0
    step: float = 0.0
    rest: tuple[Any, ...] = ()
    """What stays of the value."""

    @property
    def series(self) -> tuple[tuple[str, str], int]:
        """Equal for all names that this one has in one pass or another."""
        return self.words, self.number % self.number_step if self.number_step else self.number

    def name_after(self, passes: int) -> str:
        """The name, so many passes later."""
        return join_name(self.words, self.number + passes * self.number_step)


@dataclass(frozen=True)
class NamedChange:
    """What a pass changes of values that have names, as the last pass had them."""

    changed: Mapping[str, MovingValue]
    """New, or other than before; these have the same name in every pass."""
    moved: tuple[MovingValue, ...]
    """The same of those whose name has another number in every pass."""
    removed: tuple[MovingValue, ...]

    @property
    def keeps_names(self) -> bool:
        """Whether every pass changes the same names."""
        return not self.moved and not self.removed

    @property
    def steps(self) -> list[float]:
        """By how much numbers change."""
        return [value.step for value in (*self.changed.values(), *self.moved)]

    def extrapolate(self, values: NamedValues, count: int) -> dict[str, tuple[Any, ...]]:
        """The values after so many more passes."""
        later_values = dict(values)
        for name, value in self.changed.items():
            later_values[name] = (value.value + count * value.step, *value.rest)
        for value in self.removed:
            for passes in range(1, min(count, self._lifetimes.get(value.series, count)) + 1):
                later_values.pop(value.name_after(passes), None)
        for value in self.moved:
            for passes in range(max(0, count - self._lifetimes.get(value.series, count)) + 1, count + 1):
                later_values[value.name_after(passes)] = (value.value + passes * value.step, *value.rest)
        return later_values

    @functools.cached_property
    def _lifetimes(self) -> dict[tuple[tuple[str, str], int], int]:
        """Of names that are added and removed again: the passes for which they are there, by their series."""
        removed = {value.series: value.number for value in self.removed if value.number_step}
        return {
            value.series: (value.number - removed[value.series]) // value.number_step
            for value in self.moved
            if value.series in removed
        }


def find_named_change(
    first: NamedValues, second: NamedValues, third: NamedValues, tolerance: float = 0.0
) -> NamedChange | None:
    """What both the pass from the first to the second and that from there to the third change; None if they differ.

    Parameters
    ----------
    tolerance: float
        By how much equal steps of a number may differ.
    """
    changed = [
        [name for name, value in after.items() if name not in before or before[name] != value]
        for before, after in ((first, second), (second, third))
    ]
    removed = [[name for name in before if name not in after] for before, after in ((first, second), (second, third))]
    changed_steps, removed_steps = _find_number_steps(*changed), _find_number_steps(*removed)
    if changed_steps is None or removed_steps is None:
        return None
    same_names, moved = {}, []
    for name in changed[1]:
        words, number = split_name(name)
        number_step = changed_steps[words]
        second_name, first_name = (
            (name, name)
            if number is None
            else (join_name(words, number - number_step), join_name(words, number - 2 * number_step))
        )
        if second_name not in second or first_name not in first:
            return None
        (value, *rest), (second_value, *second_rest), (first_value, *first_rest) = (
            third[name],
            second[second_name],
            first[first_name],
        )
        step = value - second_value
        if not rest == second_rest == first_rest or abs(step - (second_value - first_value)) > tolerance:
            return None
        moving_value = MovingValue(words, number or 0, number_step, value, step, tuple(rest))
        if number_step:
            moved.append(moving_value)
        else:
            same_names[name] = moving_value
    removed_values = [
        MovingValue(words, number or 0, removed_steps[words]) for words, number in map(split_name, removed[1])
    ]
    return NamedChange(same_names, tuple(moved), tuple(removed_values))


def _find_number_steps(names: list[str], later_names: list[str]) -> dict[tuple[str, str], int] | None:
    """By how much the numbers of names that are otherwise alike differ; None if not by the same."""
    if not names and not later_names:
        return {}
    numbers: dict[tuple[str, str], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for position, some_names in enumerate((names, later_names)):
        for name in some_names:
            words, number = split_name(name)
            numbers[words][position].append(number or 0)
    steps = {}
    for words, (some_numbers, later_numbers) in numbers.items():
        differences = {
            later - earlier for earlier, later in zip(sorted(some_numbers), sorted(later_numbers), strict=False)
        }
        if len(some_numbers) != len(later_numbers) or len(differences) != 1:
            return None
        steps[words] = differences.pop()
    return steps


@dataclass(frozen=True)
class StateChange:
    """What a pass changes of a rank."""

    allocations: NamedChange
    events: NamedChange
    sizes: FloatArray
    """Moves of `RankState.sizes`, and below of its other numbers."""
    times: FloatArray
    spent_seconds: FloatArray
    num_levels: int

    @property
    def keeps_names(self) -> bool:
        """Whether every pass changes what has the same names."""
        return self.allocations.keeps_names and self.events.keeps_names

    @property
    def grows(self) -> bool:
        """Whether there are more bytes of anything."""
        return bool(self.sizes.any()) or any(self.allocations.steps)

    @property
    def shrinks(self) -> bool:
        """Whether there are fewer bytes of anything, parts left out: they may give to each other what is held."""
        return bool((self.sizes[: self.num_levels] < 0).any()) or any(step < 0 for step in self.allocations.steps)

    def extrapolate(self, state: RankState, count: int) -> RankState:
        """What comes of `count` more such changes."""
        return dataclasses.replace(
            state,
            allocations=self.allocations.extrapolate(state.allocations, count),
            events=self.events.extrapolate(state.events, count),
            sizes=state.sizes + count * self.sizes,
            times=state.times + count * self.times,
            spent_seconds=state.spent_seconds + count * self.spent_seconds,
        )

    def list_moving_times(self, state: RankState) -> tuple[FloatArray, FloatArray]:
        """Times of a state that what comes next is compared with, and by how much they move, in seconds."""
        events = (*self.events.changed.values(), *self.events.moved)
        return (
            np.array([*state.times, *(event.value for event in events)]),
            np.array([*self.times, *(event.step for event in events)]),
        )


def find_state_change(first: RankState, second: RankState, third: RankState) -> StateChange | None:
    """What each of the two passes between three states changes; None if they differ: bytes exactly, times by more than
    `TIME_TOLERANCE`."""
    if not first.labels == second.labels == third.labels:
        return None
    sizes = third.sizes - second.sizes
    if not np.array_equal(sizes, second.sizes - first.sizes):
        return None
    times, spent_seconds = third.times - second.times, third.spent_seconds - second.spent_seconds
    tolerance = TIME_TOLERANCE * max(times.max(initial=0.0), spent_seconds.max(initial=0.0))
    if (np.abs(times - (second.times - first.times)) > tolerance).any():
        return None
    if (np.abs(spent_seconds - (second.spent_seconds - first.spent_seconds)) > tolerance).any():
        return None
    events = find_named_change(first.events, second.events, third.events, tolerance)
    allocations = find_named_change(first.allocations, second.allocations, third.allocations) if events else None
    if events is None or allocations is None:
        return None
    return StateChange(allocations, events, sizes, times, spent_seconds, third.num_levels)
