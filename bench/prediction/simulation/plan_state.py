"""What a plan remembers within a step, read from its attributes: plans need not state it themselves."""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum
from types import FunctionType, MethodType
from typing import Any

from bench.prediction.simulation.state_change import NamedChange, NamedValues, find_named_change
from bench.strategies.step_plan import StepPlan

CONTAINERS = frozenset({set, list, dict, deque})

CONSTANTS = (str, int, float, tuple, frozenset, type(None), Enum, type, FunctionType, MethodType)
"""Types of values that do not change in place, beside frozen dataclasses."""


@dataclass(frozen=True)
class PlanState:
    """Attributes of a plan at some time."""

    values: dict[str, Any]

    def find_change(self, first: PlanState, second: PlanState) -> PlanChange | None:
        """What each of the two passes before this state has changed; None if they differ, or where it is not known
        what comes next."""
        if not first.values.keys() == second.values.keys() == self.values.keys():
            return None
        movers: dict[str, Callable[[int], Any]] = {}
        for name, value in self.values.items():
            values = first.values[name], second.values[name], value
            if values[0] == values[1] == values[2]:
                continue
            mover = _find_mover(*values)
            if mover is None:
                return None
            movers[name] = mover
        return PlanChange(movers)


@dataclass(frozen=True)
class PlanChange:
    """What a pass changes of a plan."""

    movers: dict[str, Callable[[int], Any]]
    """By attribute: its value after so many more passes."""

    def apply(self, plan: StepPlan, count: int) -> None:
        """Make the plan what it is after so many more passes."""
        for name, compute_later_value in self.movers.items():
            setattr(plan, name, compute_later_value(count))


def copy_plan_state(plan: StepPlan) -> PlanState | None:
    """The attributes as they are now; None where one of them, or an element of one, could change in place unseen."""
    values = {}
    for name, value in vars(plan).items():
        kind = type(value)
        if kind in CONTAINERS:
            elements: Collection[Any] = value.values() if kind is dict else value
            if not all(map(_is_constant, set(map(type, elements)))):
                return None
            values[name] = value.copy()
        elif _is_constant(kind):  # type: ignore[arg-type]
            values[name] = value
        else:
            return None
    return PlanState(values)


@functools.cache
def _is_constant(kind: type) -> bool:
    is_frozen = dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    return issubclass(kind, CONSTANTS) or is_frozen


def _find_mover(first: Any, second: Any, third: Any) -> Callable[[int], Any] | None:
    """How an attribute moves on that three states have different; None where that is not known."""
    values = (first, second, third)
    if all(type(value) is int or type(value) is float for value in values):
        step = third - second
        return (lambda count: third + count * step) if step == second - first else None
    if all(isinstance(value, str) for value in values):
        find_name = _find_mover({first}, {second}, {third})
        return find_name and (lambda count: next(iter(find_name(count))))
    kind = type(third)
    element_types = {type(element) for value in values for element in value} if kind in (set, list) else set()
    if any(type(value) is not kind for value in values) or element_types not in ({int}, {str}):
        return None
    named_values = [{str(element): (0.0,) for element in value} for value in values]
    if any(len(named) < len(value) for named, value in zip(named_values, values, strict=True)):
        return None
    change = find_named_change(named_values[0], named_values[1], named_values[2])
    if change is None:
        return None
    return functools.partial(_move_elements, change, named_values[2], kind, element_types.pop())


def _move_elements(
    change: NamedChange, named_values: NamedValues, kind: type, element_type: type, count: int
) -> set[Any] | list[Any]:
    return kind(element_type(name) for name in change.extrapolate(named_values, count))  # type: ignore[no-any-return]
