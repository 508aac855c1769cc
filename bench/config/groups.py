"""The groups of the configuration, and which options each has."""

from __future__ import annotations

import functools
from pathlib import Path

from bench.core.errors import UsageError, invalid_value_error
from bench.core.option_files import CONF_FOLDER, find_option_file, list_options
from bench.core.typed_config import read_plain_yaml
from bench.hardware import interconnect
from bench.hardware.hardware_file import YAML_SUFFIX, parse_likeness, read_base_values, read_hardware_file

HARDWARE_GROUP = "hardware"
"""The group whose option may also be a file anywhere, or ``like:`` another option."""

NETWORK_GROUP = interconnect.GROUP
"""The group whose option replaces links of the hardware, and may be several joined."""

PRESET_FOLDERS = ("price",)
"""Folders of conf with values of a field by name: no groups, since the field takes other values too."""

UNSUPPORTED_OPTIONS = {
    ("precision", "int8"): (
        "precision=int8 is not valid: training in INT8 is not offered, since its 256 evenly spaced values do not span "
        "the range of gradients, what torchao has for it is a prototype, and GPUs that have both are as fast in FP8"
    ),
}
"""What somebody may well ask for, and why there is no such option."""


@functools.cache
def list_config_groups() -> dict[str, list[str]]:
    """The configuration groups and their options, as the folders under ``conf`` say: the suite's, and for the same
    groups those that installed packages and one's own folder bring."""
    return {
        folder.name: list_options(folder.name)
        for folder in sorted(CONF_FOLDER.iterdir())
        if folder.is_dir() and folder.name not in PRESET_FOLDERS
    }


@functools.cache
def list_presets(folder: str) -> list[str]:
    """What one of `PRESET_FOLDERS` holds, by name."""
    return list_options(folder)


def require_group_option(group: str, value: str) -> None:
    """Raise `UsageError` unless a group has an option, or it is a file that describes hardware."""
    hardware_path = parse_hardware_path(group, value)
    likeness = parse_likeness(value) if group == HARDWARE_GROUP else None
    if hardware_path is not None:
        read_hardware_file(hardware_path)
    elif likeness is not None:
        read_base_values(likeness)
    elif group == NETWORK_GROUP:
        interconnect.read_network(value.strip("'\""))
    elif value in list_config_groups()[group]:
        read_plain_yaml(group, find_option_file(group, value))
    else:
        if (group, value) in UNSUPPORTED_OPTIONS:
            raise UsageError(f"{UNSUPPORTED_OPTIONS[group, value]}: choose {', '.join(list_config_groups()[group])}.")
        file_choice = f", a file that ends in {YAML_SUFFIX}, or like:NAME" if group == HARDWARE_GROUP else ""
        options = list_config_groups()[group]
        raise invalid_value_error(group, value, ", ".join(options) + file_choice, names=options)


def parse_hardware_path(group: str, value: str) -> Path | None:
    """The file that an option names, quoted or not, relative to the current folder; None if it is a name."""
    name = value.strip("'\"")
    return Path(name).absolute() if group == HARDWARE_GROUP and name.endswith(YAML_SUFFIX) else None
