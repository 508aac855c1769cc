"""A description of hardware in a file of its own, anywhere: what ``hardware=FILE`` reads and a calibration writes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from pathlib import Path
from typing import Any

import yaml

from bench.core.errors import UsageError
from bench.core.typed_config import build_dataclass, read_plain_yaml
from bench.hardware.description import Hardware

YAML_SUFFIX = ".yaml"
"""Of a value of ``hardware`` that names a file, not a description under ``conf/hardware``."""


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
    values = read_plain_yaml("hardware", path)
    try:
        hardware: Hardware = build_dataclass("hardware", Hardware, values)
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
