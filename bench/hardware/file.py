"""A description of hardware in a file of its own, anywhere: what ``hardware=FILE`` reads and a calibration writes."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bench.errors import UsageError, bad_value
from bench.hardware.description import Hardware
from bench.typed import typed

ENDING = ".yaml"
"""Of a value of ``hardware`` that names a file, not a description under ``conf/hardware``."""


@functools.cache
def read_hardware(path: Path) -> Hardware:
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
    try:
        loaded = OmegaConf.load(path)
    except FileNotFoundError:
        raise bad_value("hardware", path, f"a file that exists and ends in {ENDING}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException) as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split()).rstrip(".")
        raise bad_value("hardware", path, f"a file that holds a description in YAML ({reason})") from None
    values: Any = OmegaConf.to_container(loaded)
    if not isinstance(values, dict):
        raise bad_value("hardware", path, "a file that holds fields and their values, as those under conf/hardware do")
    try:
        hardware: Hardware = typed("hardware", Hardware, {str(key): value for key, value in values.items()})
    except UsageError as error:
        raise UsageError(f"hardware={path} cannot be used: {error}") from None
    return hardware


def plain(hardware: Hardware) -> dict[str, Any]:
    """A description as plain values: every field, those that a file left out at what that means."""
    return dataclasses.asdict(hardware)


def as_yaml(hardware: Hardware, heading: str) -> str:
    """The text of a file that `read_hardware` reads back equal; `heading` becomes a comment at its top."""
    comment = "".join(f"# {line}\n" for line in heading.splitlines())
    return comment + yaml.safe_dump(plain(hardware), sort_keys=False, width=120, allow_unicode=True)
