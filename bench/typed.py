"""Plain values to dataclasses: each of exactly its type, or one sentence that says what it should have been."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException, ValidationError

from bench.errors import UsageError, bad_value


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
    hints = type_hints(cls)
    known = [field.name for field in dataclasses.fields(cls)]
    for name in values:
        if name not in known:
            raise UsageError(f"{key}.{name} is not a field of {key}: choose {', '.join(known)}.")
    missing = [
        field.name
        for field in dataclasses.fields(cls)
        if field.name not in values
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise UsageError(f"{key}.{missing[0]} has no value: give one on the command line or where {key} is described.")
    nested = {
        name: _nested(f"{key}.{name}", hints[name], value) for name, value in values.items() if _group(hints[name])
    }
    plain = {name: value for name, value in values.items() if name not in nested}
    if len(values) == len(known) and all(_is_of(hints[name], value) for name, value in plain.items()):
        return cls(**plain, **nested)  # OmegaConf would come to the same, and take milliseconds
    try:
        converted: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(_without_groups(cls)), plain))
    except (ValidationError, ConfigKeyError, MissingMandatoryValue) as error:
        path = str(error.full_key or error.key or "")
        field, _, item = path.partition(".")
        kind, value = hints.get(field, str), values.get(field)
        if item and isinstance(value, dict):
            kind, value = typing.get_args(kind)[-1], value.get(item)
        raise bad_value(f"{key}.{path}", value, kind_of(kind)) from None
    except OmegaConfBaseException as error:
        raise UsageError(f"{key}: {str(error).splitlines()[0]}.") from None
    fields = {field.name: getattr(converted, field.name) for field in dataclasses.fields(type(converted))}
    return cls(**fields, **nested)


type_hints = functools.cache(typing.get_type_hints)


def _group(kind: Any) -> Any:
    """The dataclass that a field holds, or may hold; None for a field of plain values."""
    kinds = typing.get_args(kind) or (kind,)
    return next((part for part in kinds if dataclasses.is_dataclass(part)), None)


def _nested(key: str, kind: Any, value: Any) -> Any:
    """The value of a field that holds a dataclass of its own."""
    cls = _group(kind)
    if isinstance(value, dict):
        return typed(key, cls, value)
    if value is None and type(None) in typing.get_args(kind):
        return None
    names = ", ".join(f"{key}.{field.name}" for field in dataclasses.fields(cls))
    raise bad_value(key, value, f"a value for a field of it: {names}")


@functools.cache
def _without_groups(cls: type) -> type:
    """A dataclass with the fields of `cls` that hold plain values, without what `cls` checks."""
    plain = []
    for field in dataclasses.fields(cls):
        hint = type_hints(cls)[field.name]
        if not _group(hint):
            defaults: dict[str, Any] = {"default": field.default, "default_factory": field.default_factory}
            plain.append((field.name, hint, dataclasses.field(**defaults)))
    return dataclasses.make_dataclass(cls.__name__, plain)


def _is_of(kind: Any, value: Any) -> bool:
    """Whether a value is a scalar of exactly this type (or of one of a union), with nothing to convert or resolve."""
    kinds = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    if isinstance(value, str) and ("${" in value or value == "???"):
        return False
    return type(value) in kinds and type(value) in (bool, int, float, str, type(None))


def kind_of(kind: Any) -> str:
    """A type in words, for messages: "a whole number or null"."""
    if typing.get_origin(kind) is list:
        return "a list, each item " + kind_of(typing.get_args(kind)[0]).replace("a name", "text")
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a name", type(None): "null"}
    parts = [names.get(part, getattr(part, "__name__", str(part))) for part in typing.get_args(kind) or (kind,)]
    return " or ".join(parts)
