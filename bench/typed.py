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
        raise UsageError(f"{key}.{missing[0]} has no value: give one on the command line or in conf/{key}.")
    if len(values) == len(known) and all(_is_of(hints[name], value) for name, value in values.items()):
        return cls(**values)  # OmegaConf would come to the same, and take milliseconds
    try:
        merged = OmegaConf.merge(OmegaConf.structured(cls), values)
        return OmegaConf.to_object(merged)
    except (ValidationError, ConfigKeyError, MissingMandatoryValue) as error:
        field = (error.full_key or error.key or "").split(".")[0]
        kind = kind_of(hints.get(field, str))
        raise bad_value(f"{key}.{error.full_key or error.key}", values.get(field), kind) from None
    except OmegaConfBaseException as error:
        raise UsageError(f"{key}: {str(error).splitlines()[0]}.") from None


type_hints = functools.cache(typing.get_type_hints)


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
