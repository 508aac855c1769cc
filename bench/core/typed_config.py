"""Plain values to dataclasses: each of exactly its type and within its bounds, or one sentence that says what is valid.

What a field takes is declared beside it, and nowhere else::

    steps: Annotated[int, Within(1, 1_000_000)]
    learning_rate: Annotated[float, Within(0, 1e38, exclusive_minimum=True)]
    memory_limit_gib: Annotated[float | None, Within(1e-6, 1e6, unit="GiB")] = None
    compute: Annotated[str, OneOf("fp32", "bf16", "fp16")]
    peak_tflops: dict[Annotated[str, OneOf(*FORMATS)], Annotated[float, Within(1e-6, 1e9)]]

Numbers without a declaration are finite, not negative, and whole ones at least 1. Text is one line of printable
characters unless `TextRule` says otherwise.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bench.core.errors import UsageError, invalid_value_error, unknown_field_error
from bench.core.units import MIB

MISSING_VALUE = "???"
"""What OmegaConf calls a value that somebody still has to give."""


@dataclass(frozen=True)
class Within:
    """The numbers a field takes. No bound admits NaN or infinity."""

    minimum: float
    maximum: float
    exclusive_minimum: bool = False
    """Whether `minimum` itself is left out."""
    exclusive_maximum: bool = False
    """Whether `maximum` itself is."""
    unit: str = ""
    """For the sentence: GiB."""

    def __contains__(self, value: float) -> bool:
        is_above_minimum = self.minimum < value if self.exclusive_minimum else self.minimum <= value
        return is_above_minimum and (value < self.maximum if self.exclusive_maximum else value <= self.maximum)

    def describe_valid(self, kind: type) -> str:
        """What is valid, for a sentence: "a whole number of at least 1 and at most 64"."""
        number_text = ("a whole number" if kind is int else "a number") + (f" of {self.unit}" if self.unit else "")
        lower_bound = f"{'above' if self.exclusive_minimum else 'of at least'} {_format_number(self.minimum)}"
        return (
            f"{number_text} {lower_bound} and {'below' if self.exclusive_maximum else 'at most'} "
            f"{_format_number(self.maximum)}"
        )


@dataclass(frozen=True, init=False)
class OneOf:
    """The values a field takes."""

    choices: tuple[Any, ...]
    description: str | None
    """What is valid, for a sentence; None for every choice by itself."""

    def __init__(self, *choices: Any, description: str | None = None) -> None:
        object.__setattr__(self, "choices", choices)
        object.__setattr__(self, "description", description)


@dataclass(frozen=True)
class TextRule:
    """The text a field takes: one line of printable characters that is not empty, unless said otherwise."""

    description: str = "a name"
    """What is valid, for a sentence."""
    is_multiline: bool = False
    """Whether several lines are valid, and other characters than printable ones."""
    can_be_empty: bool = False
    max_length: int = 4096


DEFAULT_BOUNDS = {int: Within(1, 10**9), float: Within(0, 1e15)}
"""Bounds of numbers that declare none, where nothing else is valid but null."""


def build_dataclass(key: str, cls: type, values: dict[str, Any]) -> Any:
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
    fields, hints = dataclasses.fields(cls), get_field_types(cls)
    field_names = [field.name for field in fields]
    for name in values:
        if name not in field_names:
            raise unknown_field_error(f"{key}.{name}", field_names, f" of {key}")
    for field in fields:
        if field.name not in values and field.default is field.default_factory is dataclasses.MISSING:
            raise UsageError(
                f"{key}.{field.name} has no value: give one on the command line or where {key} is described."
            )
    return cls(**{name: validate_value(f"{key}.{name}", hints[name], value) for name, value in values.items()})


@functools.cache
def get_field_types(cls: type) -> dict[str, Any]:
    """The types of a dataclass's fields, with what is declared beside them."""
    return typing.get_type_hints(cls, include_extras=True)


def validate_value(key: str, hint: Any, value: Any) -> Any:
    """A value as its type hint says; whole numbers become floating-point ones where such are asked for.

    Raises
    ------
    UsageError
        Naming `key`, the value and what is valid.
    """
    if hint is Any:
        return value
    field_type = parse_type_hint(hint)
    if value is None and type(None) in field_type.types:
        return None
    if field_type.section_class is not None:
        if isinstance(value, dict):
            return build_dataclass(key, field_type.section_class, value)
        field_names = ", ".join(f"{key}.{field.name}" for field in dataclasses.fields(field_type.section_class))
        raise invalid_value_error(key, value, f"a value for a field of it: {field_names}")
    if field_type.item_hint is not None and isinstance(value, list):
        return [validate_value(key, field_type.item_hint, item) for item in value]
    if field_type.entry_hints is not None and isinstance(value, dict):
        name_hint, item_hint = field_type.entry_hints
        return {
            validate_value(key, name_hint, name): validate_value(f"{key}.{name}", item_hint, item)
            for name, item in value.items()
        }
    return _validate_scalar(key, field_type, value)


@dataclass(frozen=True)
class FieldType:
    """What a type hint says."""

    types: tuple[type, ...]
    """Of plain values, null among them."""
    bounds: Within | None
    choices: tuple[Any, ...] | None
    choices_description: str | None
    """Instead of every choice by itself."""
    text_rule: TextRule
    section_class: Any
    """The dataclass of a nested section."""
    item_hint: Any
    """Type hint of a list's items."""
    entry_hints: tuple[Any, Any] | None
    """Type hints of a mapping's keys and values."""

    @property
    def description(self) -> str:
        """What is valid, for a sentence: "a whole number of at least 1 and at most 64 or null"."""
        descriptions = []
        for plain_type in self.types:
            if plain_type in (int, float) and self.bounds is not None:
                descriptions.append(self.bounds.describe_valid(plain_type))
            else:
                descriptions.append(self.text_rule.description if plain_type is str else TYPE_DESCRIPTIONS[plain_type])
        if self.choices_description is not None:
            return self.choices_description
        if self.choices is not None:
            descriptions = [format_override_value(choice) for choice in self.choices] + (
                ["null"] if type(None) in self.types else []
            )
            return ", ".join(descriptions)
        if self.item_hint is not None:
            descriptions.insert(
                0, f"a list, each item {parse_type_hint(self.item_hint).description.replace('a name', 'text')}"
            )
        if self.entry_hints is not None:
            descriptions.insert(0, f"names and for each of them {parse_type_hint(self.entry_hints[1]).description}")
        return " or ".join(descriptions)


TYPE_DESCRIPTIONS = {bool: "true or false", int: "a whole number", float: "a number", str: "a name", type(None): "null"}


@functools.cache
def parse_type_hint(hint: Any) -> FieldType:
    declarations = typing.get_args(hint)[1:] if typing.get_origin(hint) is Annotated else ()
    bare_hint = typing.get_args(hint)[0] if declarations else hint
    parts = (
        typing.get_args(bare_hint) if typing.get_origin(bare_hint) in (typing.Union, types.UnionType) else (bare_hint,)
    )
    plain_types = tuple(part for part in parts if part in TYPE_DESCRIPTIONS)
    other_parts = [part for part in parts if part not in plain_types]
    bounds = next((rule for rule in declarations if isinstance(rule, Within)), None)
    non_null_types = [part for part in plain_types if part is not type(None)]
    one_of = next((rule for rule in declarations if isinstance(rule, OneOf)), None)
    choices = None if one_of is None else one_of.choices
    if bounds is None and choices is None and len(non_null_types) == 1:
        bounds = DEFAULT_BOUNDS.get(non_null_types[0])
    return FieldType(
        types=plain_types,
        bounds=bounds,
        choices=choices,
        choices_description=None if one_of is None else one_of.description,
        text_rule=next((rule for rule in declarations if isinstance(rule, TextRule)), TextRule()),
        section_class=next((part for part in other_parts if dataclasses.is_dataclass(part)), None),
        item_hint=next((typing.get_args(part)[0] for part in other_parts if typing.get_origin(part) is list), None),
        entry_hints=next((typing.get_args(part) for part in other_parts if typing.get_origin(part) is dict), None),
    )


def format_override_value(value: Any) -> str:
    """A plain value as it would be typed after ``key=``."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _validate_scalar(key: str, field_type: FieldType, value: Any) -> Any:
    value_type = type(value)
    if value_type in (int, float) and value_type not in field_type.types and field_type.types[:1] == (str,):
        value, value_type = format_override_value(value), str  # an account may be a number
    if value_type not in field_type.types and not (value_type is int and float in field_type.types):
        raise invalid_value_error(key, value, field_type.description)
    if field_type.choices is not None and value not in field_type.choices:
        raise invalid_value_error(key, value, field_type.description, names=field_type.choices)
    if value_type is str:
        if not field_type.text_rule.is_multiline and not value.isprintable():
            raise invalid_value_error(key, value, "printable characters alone")
        if len(value) > field_type.text_rule.max_length:
            raise invalid_value_error(
                key, value, f"{field_type.description}, of at most {field_type.text_rule.max_length} characters"
            )
        if value == MISSING_VALUE or (not value and not field_type.text_rule.can_be_empty):
            raise invalid_value_error(key, value or "(nothing)", field_type.description)
        return value
    if value_type in (int, float) and field_type.bounds is not None and value not in field_type.bounds:
        raise invalid_value_error(key, value, field_type.description)
    return float(value) if value_type is int and int not in field_type.types and float in field_type.types else value


def _format_number(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"


# --- Files that describe something in YAML, looked at before anything is made of them: small, flat, and plain values.

MAX_FILE_BYTES = MIB
MAX_VALUES = 20_000
"""With every alias written out."""
MAX_NESTING_DEPTH = 24
MAX_VALUE_LENGTH = 3000
"""Characters of one value: an integer of more could not be written as text, in whatever base it was given."""

PACKAGE_DIRECTIVE = re.compile(r"\s*#\s*@package\b")


@functools.cache
def read_plain_yaml(field: str, path: Path) -> dict[str, Any]:
    """The fields of a file and their values, interpolations unresolved. Each file is read once: never change them.

    Parameters
    ----------
    field: str
        What is set to the file, for the sentence: ``hardware``.

    Raises
    ------
    UsageError
        If there is no such file, or it holds anything else than a description.
    """
    try:
        if not path.is_file():
            raise _invalid_file_error(field, path, f"a file that exists and ends in {path.suffix}")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise _invalid_file_error(field, path, f"a file of at most {MAX_FILE_BYTES} bytes")
        text = path.read_text(encoding="utf-8")
        if PACKAGE_DIRECTIVE.match(text):
            raise _invalid_file_error(field, path, "a file without # @package: its fields are those of its folder")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if not isinstance(node, yaml.MappingNode):
            raise _invalid_file_error(field, path, "a file that holds fields and their values, as those beside it do")
        if _count_values(node, {}, 0) > MAX_VALUES:
            raise _invalid_file_error(field, path, f"a file of at most {MAX_VALUES} values, aliases written out")
        values = OmegaConf.to_container(OmegaConf.load(path))
        json.dumps(values)
    except UsageError:
        raise
    except RecursionError:
        raise _invalid_file_error(
            field, path, f"a file whose values are nested at most {MAX_NESTING_DEPTH} deep"
        ) from None
    except TypeError:  # YAML has tags for bytes and more
        raise _invalid_file_error(field, path, "a file whose values are text, numbers, true, false or null") from None
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split()).rstrip(".")
        raise _invalid_file_error(field, path, f"a file that holds a description in YAML ({reason})") from None
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _invalid_file_error(field: str, path: Path, expected: str) -> UsageError:
    return UsageError(f"{field}={path} is not valid: choose {expected}.")


def _count_values(node: yaml.Node, counted_nodes: dict[int, int], depth: int) -> int:
    """Values below a node, those below an alias as often as it is used.

    Raises
    ------
    RecursionError
        If they are too deep, as those of a node that holds itself are.
    ValueError
        If one is too long.
    """
    if depth > MAX_NESTING_DEPTH:
        raise RecursionError
    if id(node) not in counted_nodes:
        child_nodes: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            child_nodes = [node_part for pair in node.value for node_part in pair]
        elif isinstance(node, yaml.SequenceNode):
            child_nodes = node.value
        elif len(node.value) > MAX_VALUE_LENGTH:
            raise ValueError(f"a value has more than {MAX_VALUE_LENGTH} characters")
        counted_nodes[id(node)] = 1 + sum(
            _count_values(child_node, counted_nodes, depth + 1) for child_node in child_nodes
        )
    return counted_nodes[id(node)]
