"""A description of hardware in a file of its own, anywhere: what ``hardware=FILE`` reads and a calibration writes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from pathlib import Path
from typing import Any

import yaml

from bench.core.errors import UsageError, invalid_value_error
from bench.core.option_files import find_option_file, list_options
from bench.core.typed_config import build_dataclass, read_plain_yaml
from bench.hardware.derived import LIKE_FIELD, LIKE_PREFIX, derive_hardware_values
from bench.hardware.description import Hardware

YAML_SUFFIX = ".yaml"
"""Of a value of ``hardware`` that names a file, not a description under ``conf/hardware``."""

GROUP = "hardware"

UNDESCRIBED_OPTIONS = ("auto", "cpu", "gpu", "gpu_rocm")
"""Options that describe no kind of GPU, which nothing is like."""

MAX_LIKENESSES = 8
"""Descriptions that may be like one another in a row."""


def read_hardware_values(path: Path, depth: int = 0) -> dict[str, Any]:
    """The fields of a file; where it is like another description, complete with what is derived from that one.

    Raises
    ------
    UsageError
        If there is no such file, or what it is like is no description under ``conf/hardware``.
    """
    values = read_plain_yaml(GROUP, path)
    if LIKE_FIELD not in values:
        return values
    base_name = values[LIKE_FIELD]
    return derive_hardware_values(values, read_base_values(base_name, depth + 1), str(base_name))


def read_base_values(name: Any, depth: int = 0) -> dict[str, Any]:
    """The fields of a description that another one is like.

    Raises
    ------
    UsageError
        If there is none of that name, or it is like itself.
    """
    options = [option for option in list_options(GROUP) if option not in UNDESCRIBED_OPTIONS]
    if name not in options:
        raise invalid_value_error(f"{GROUP}.{LIKE_FIELD}", name, options)
    if depth > MAX_LIKENESSES:
        raise invalid_value_error(f"{GROUP}.{LIKE_FIELD}", name, "a description that is not like itself in the end")
    return read_hardware_values(find_option_file(GROUP, name), depth)


def parse_likeness(value: str) -> str | None:
    """The name in ``like:NAME``; None for any other value of ``hardware``."""
    return value.removeprefix(LIKE_PREFIX) if value.startswith(LIKE_PREFIX) else None


@functools.cache
def read_hardware_file(path: Path) -> Hardware:
    """The description in a file. A command reads each file once, whatever happens to it meanwhile.

    Parameters
    ----------
    path: Path
        Absolute, so that it means the same wherever the command goes.

    Raises
    ------
    UsageError
        If there is no such file, it is no YAML, or a field of it is unknown, missing or of the wrong kind.
    """
    values = read_hardware_values(path)
    try:
        hardware: Hardware = build_dataclass(GROUP, Hardware, values)
    except UsageError as error:
        raise UsageError(f"hardware={path} cannot be used: {error}") from None
    return hardware


def hardware_to_dict(hardware: Hardware) -> dict[str, Any]:
    """A description as plain values: every field, those that a file left out at what that means."""
    return dataclasses.asdict(hardware)


def scale_device_memory(values: dict[str, Any], before_gb: Any) -> None:
    """Have a description whose `memory_gb` was changed report as much more or less of it: the same share of another
    memory. Values are as somebody typed them, so that some may be no numbers, of which nothing follows.
    """
    with contextlib.suppress(KeyError, TypeError, ArithmeticError):
        outside = values["speeds"]["outside"]
        outside["device_gib"] = outside["device_gib"] / before_gb * values["memory_gb"]


def format_hardware_yaml(hardware: Hardware, heading: str) -> str:
    """The text of a file that `read_hardware_file` reads back equal; `heading` becomes a comment at its top."""
    comment = "".join(f"# {line}\n" for line in heading.splitlines())
    return comment + yaml.safe_dump(hardware_to_dict(hardware), sort_keys=False, width=120, allow_unicode=True)
