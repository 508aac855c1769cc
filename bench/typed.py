"""Plain values to dataclasses: each of exactly its type and within its bounds, or one sentence that says what is valid.

What a field takes is declared beside it, and nowhere else::

    steps: Annotated[int, Within(1, 1_000_000)]
    learning_rate: Annotated[float, Within(0, 1e38, above=True)]
    memory_limit_gib: Annotated[float | None, Within(1e-6, 1e6, unit="GiB")] = None
    compute: Annotated[str, OneOf("fp32", "bf16", "fp16")]
    peak_tflops: dict[Annotated[str, OneOf(*FORMATS)], Annotated[float, Within(1e-6, 1e9)]]

Numbers without a declaration are finite, not negative, and whole ones at least 1. Text is one line of printable
characters unless `Text` says otherwise.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from dataclasses import dataclass
from typing import Annotated, Any

from bench.errors import UsageError, bad_value

MISSING = "???"
"""What OmegaConf calls a value that somebody still has to give."""


@dataclass(frozen=True)
class Within:
    """The numbers a field takes. No bound admits NaN or infinity."""

    least: float
    most: float
    above: bool = False
    """Whether `least` itself is left out."""
    below: bool = False
    """Whether `most` itself is."""
    unit: str = ""
    """For the sentence: GiB."""

    def __contains__(self, number: float) -> bool:
        low = self.least < number if self.above else self.least <= number
        return low and (number < self.most if self.below else number <= self.most)

    def words(self, kind: type) -> str:
        """What is valid, for a sentence: "a whole number of at least 1 and at most 64"."""
        number = ("a whole number" if kind is int else "a number") + (f" of {self.unit}" if self.unit else "")
        low = f"{'above' if self.above else 'of at least'} {_digits(self.least)}"
        return f"{number} {low} and {'below' if self.below else 'at most'} {_digits(self.most)}"


@dataclass(frozen=True, init=False)
class OneOf:
    """The values a field takes."""

    choices: tuple[Any, ...]

    def __init__(self, *choices: Any) -> None:
        object.__setattr__(self, "choices", choices)


@dataclass(frozen=True)
class Text:
    """The text a field takes: one line of printable characters that is not empty, unless said otherwise."""

    words: str = "a name"
    """What is valid, for a sentence."""
    lines: bool = False
    """Whether several lines are valid, and other characters than printable ones."""
    empty: bool = False
    longest: int = 4096


UNDECLARED = {int: Within(1, 10**9), float: Within(0, 1e15)}
"""Bounds of numbers that declare none, where nothing else is valid but null."""


def typed(key: str, cls: type, values: dict[str, Any]) -> Any:
    """An instance of a dataclass from plain values.

    Parameters
    ----------
    key: str
        Name of the section as the user types it: a group.

    Raises
    ------
    UsageError
        Naming the field, the value and what is valid.
    """
    fields, hints = dataclasses.fields(cls), type_hints(cls)
    known = [field.name for field in fields]
    for name in values:
        if name not in known:
            raise UsageError(f"{key}.{name} is not a field of {key}: choose {', '.join(known)}.")
    for field in fields:
        if field.name not in values and field.default is field.default_factory is dataclasses.MISSING:
            raise UsageError(
                f"{key}.{field.name} has no value: give one on the command line or where {key} is described."
            )
    return cls(**{name: checked(f"{key}.{name}", hints[name], value) for name, value in values.items()})


@functools.cache
def type_hints(cls: type) -> dict[str, Any]:
    """The types of a dataclass's fields, with what is declared beside them."""
    return typing.get_type_hints(cls, include_extras=True)


def checked(key: str, hint: Any, value: Any) -> Any:
    """A value as its type hint says; whole numbers become floating-point ones where such are asked for.

    Raises
    ------
    UsageError
        Naming `key`, the value and what is valid.
    """
    kind = kind_of(hint)
    if value is None and type(None) in kind.types:
        return None
    if kind.section is not None:
        if isinstance(value, dict):
            return typed(key, kind.section, value)
        names = ", ".join(f"{key}.{field.name}" for field in dataclasses.fields(kind.section))
        raise bad_value(key, value, f"a value for a field of it: {names}")
    if kind.items is not None and isinstance(value, list):
        return [checked(key, kind.items, item) for item in value]
    if kind.entries is not None and isinstance(value, dict):
        name_hint, item_hint = kind.entries
        return {
            checked(key, name_hint, name): checked(f"{key}.{name}", item_hint, item) for name, item in value.items()
        }
    return _scalar(key, kind, value)


@dataclass(frozen=True)
class Kind:
    """What a type hint says."""

    types: tuple[type, ...]
    """Of plain values, null among them."""
    within: Within | None
    choices: tuple[Any, ...] | None
    text: Text
    section: Any
    """The dataclass of a nested section."""
    items: Any
    """Type hint of a list's items."""
    entries: tuple[Any, Any] | None
    """Type hints of a mapping's keys and values."""

    @property
    def words(self) -> str:
        """What is valid, for a sentence: "a whole number of at least 1 and at most 64 or null"."""
        told = []
        for part in self.types:
            if part in (int, float) and self.within is not None:
                told.append(self.within.words(part))
            else:
                told.append(self.text.words if part is str else NAMES[part])
        if self.choices is not None:
            told = [as_typed(choice) for choice in self.choices] + (["null"] if type(None) in self.types else [])
            return ", ".join(told)
        if self.items is not None:
            told.insert(0, f"a list, each item {kind_of(self.items).words.replace('a name', 'text')}")
        if self.entries is not None:
            told.insert(0, f"names and for each of them {kind_of(self.entries[1]).words}")
        return " or ".join(told)


NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a name", type(None): "null"}


@functools.cache
def kind_of(hint: Any) -> Kind:
    """A type hint, read."""
    said = typing.get_args(hint)[1:] if typing.get_origin(hint) is Annotated else ()
    bare = typing.get_args(hint)[0] if said else hint
    parts = typing.get_args(bare) if typing.get_origin(bare) in (typing.Union, types.UnionType) else (bare,)
    plain = tuple(part for part in parts if part in NAMES)
    others = [part for part in parts if part not in plain]
    within = next((rule for rule in said if isinstance(rule, Within)), None)
    only = [part for part in plain if part is not type(None)]
    choices = next((rule.choices for rule in said if isinstance(rule, OneOf)), None)
    if within is None and choices is None and len(only) == 1:
        within = UNDECLARED.get(only[0])
    return Kind(
        types=plain,
        within=within,
        choices=choices,
        text=next((rule for rule in said if isinstance(rule, Text)), Text()),
        section=next((part for part in others if dataclasses.is_dataclass(part)), None),
        items=next((typing.get_args(part)[0] for part in others if typing.get_origin(part) is list), None),
        entries=next((typing.get_args(part) for part in others if typing.get_origin(part) is dict), None),
    )


def as_typed(value: Any) -> str:
    """A plain value as it would be typed after ``key=``."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _scalar(key: str, kind: Kind, value: Any) -> Any:
    found = type(value)
    if found in (int, float) and found not in kind.types and kind.types[:1] == (str,):
        value, found = as_typed(value), str  # an account may be a number
    if found not in kind.types and not (found is int and float in kind.types):
        raise bad_value(key, value, kind.words)
    if kind.choices is not None and value not in kind.choices:
        raise bad_value(key, value, kind.words)
    if found is str:
        if not kind.text.lines and not value.isprintable():
            raise bad_value(key, value, "printable characters alone")
        if len(value) > kind.text.longest:
            raise bad_value(key, value, f"{kind.words}, of at most {kind.text.longest} characters")
        if value == MISSING or (not value and not kind.text.empty):
            raise bad_value(key, value or "(nothing)", kind.words)
        return value
    if found in (int, float) and kind.within is not None and value not in kind.within:
        raise bad_value(key, value, kind.words)
    return float(value) if found is int and int not in kind.types and float in kind.types else value


def _digits(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"
