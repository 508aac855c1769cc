"""Hydra composition: overrides in, plain values out. The only file that knows Hydra."""

from __future__ import annotations

import copy
import functools
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override, RangeSweep
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bench.core.errors import ImpossibleError, UsageError, invalid_value_error, shorten_text
from bench.core.installation import DATA_FOLDER
from bench.core.plugins import list_installed_conf_folders
from bench.core.typed_config import read_plain_yaml
from bench.hardware.hardware_file import YAML_SUFFIX, hardware_to_dict, read_hardware_file, scale_device_memory

CONF_FOLDER = DATA_FOLDER / "conf"

OWN_CONF_VARIABLE = "BENCH_CONF"
"""Names a folder with options of one's own, laid out as ``conf``."""

HARDWARE_GROUP = "hardware"
"""The group whose option may also be a file anywhere."""

PRESET_FOLDERS = ("price",)
"""Folders of conf with values of a field by name: no groups, since the field takes other values too."""

MEMORY_KEY, DEVICE_MEMORY_KEY = "hardware.memory_gb", "hardware.speeds.outside.device_gib"
"""Set alone, the former changes the latter: memory as sold, and what of it a device reports."""

FIXED_FIELDS = {"precision.name": "precision=NAME, or fields of it"}
"""Fields that say which option was chosen, and so cannot say something else; what to choose instead."""

UNSUPPORTED_OPTIONS = {
    ("precision", "int8"): (
        "precision=int8 is not valid: training in INT8 is not offered, since its 256 evenly spaced values do not span "
        "the range of gradients, what torchao has for it is a prototype, and GPUs that have both are as fast in FP8"
    ),
}
"""What somebody may well ask for, and why there is no such option."""

EXTENSIBLE_GROUPS = ("model", "strategy", "hardware")
"""Groups that take fields of one's own with ``+``: a plug-in's, or the peak of another format."""

FREE_FIELDS = "config"
"""The field of a section that takes what is set of fields that the section does not have."""

INTERPOLATION_PATTERN = re.compile(r"\$\{(?:([A-Za-z_]\w*)(?:\.\w+)*|(oc\.env):[^${}]*)\}")
"""Interpolations that say what they read: a field by its whole key, or the environment."""

MAX_AXIS_VALUES = 100_000
"""Of one axis on a command line."""

MAX_INTERPOLATIONS = 20
"""Of all fields together: each may double what the others come to."""
OPTION_LIST_PATTERN = re.compile(r"""(cluster\.(?:sbatch|srun))=\[(-[^'"\\\[\]]*)\]""")
"""A list of another command's options, none of them in quotes."""

ANY_KEY = "*"
"""What all other interpolations may read."""


@functools.cache
def list_config_groups() -> dict[str, list[str]]:
    """The configuration groups and their options, as the folders under ``conf`` say: the suite's, and for the same
    groups those that installed packages and one's own folder bring."""
    return {
        folder.name: sorted({file.stem for conf in _list_conf_folders() for file in conf.glob(f"{folder.name}/*.yaml")})
        for folder in sorted(CONF_FOLDER.iterdir())
        if folder.is_dir() and folder.name not in PRESET_FOLDERS
    }


@functools.cache
def list_presets(folder: str) -> list[str]:
    """What one of `PRESET_FOLDERS` holds, by name."""
    return sorted({file.stem for conf in _list_conf_folders() for file in conf.glob(f"{folder}/*.yaml")})


def _list_conf_folders() -> tuple[Path, ...]:
    """Where options are: the suite's own, before those of installed packages, before those of one's own folder.

    Raises
    ------
    UsageError
        If there is no folder of one's own where it is said to be.
    """
    folders = (CONF_FOLDER, *list_installed_conf_folders())
    own_folder = os.environ.get(OWN_CONF_VARIABLE)
    if not own_folder:
        return folders
    if not Path(own_folder).is_dir():
        raise UsageError(
            f"{OWN_CONF_VARIABLE}={own_folder} is not valid: choose a folder with folders named as conf's."
        )
    return (*folders, Path(own_folder).absolute())


def find_option_file(group: str, option: str) -> Path:
    """The file of an option: the suite's, or else that of an installed package or of one's own folder."""
    files = [folder / group / f"{option}.yaml" for folder in _list_conf_folders()]
    return next((file for file in files if file.is_file()), files[0])


def parse_overrides(arguments: list[str]) -> list[Override]:
    """Read overrides in Hydra's grammar.

    Raises
    ------
    UsageError
        If one cannot be read, or names an option its group does not have.
    """
    parser = OverridesParser.create()
    overrides = []
    for argument in arguments:
        try:
            override = parser.parse_override(_quote_command_options(argument))
        except (OverrideParseException, HydraException, ValueError, RecursionError):
            override = None
        if override is None or not override.key_or_group or override.package is not None or override.is_force_add():
            shown_argument = shorten_text(repr(argument))
            raise UsageError(f"cannot read {shown_argument}: write key=value, for example gpus=4 or model=t5_small.")
        overrides.append(override)
    for override in overrides:
        _check_overridden_key(override)
        _check_sweep_values(override)
        _check_group_option(override)
    return overrides


def _quote_command_options(argument: str) -> str:
    """An override with the options of ``cluster.sbatch=[--mail-type=END]`` in quotes: Hydra has no bare equals sign."""
    match = OPTION_LIST_PATTERN.fullmatch(argument)
    if match is None:
        return argument
    return f"{match[1]}=[{','.join(repr(option) for option in re.split(r', *(?=-)', match[2]))}]"


def _check_overridden_key(override: Override) -> None:
    """Refuse to remove a field, or to add one that nothing would read."""
    key, (section, _, field) = override.key_or_group, override.key_or_group.partition(".")
    if override.is_delete():
        raise UsageError(f"~{key} is not valid: every field is needed, so choose a value with {key}=value.")
    if key in FIXED_FIELDS:
        raise invalid_value_error(key, override.get_value_string(), FIXED_FIELDS[key])
    if override.is_add() and not (section in EXTENSIBLE_GROUPS and field):
        top_level_fields = list(compose_config({}))
        is_top_level_field = section in top_level_fields and not field
        raise UsageError(
            f"+{key} is not valid: choose {key} without the +."
            if is_top_level_field
            else (
                f"{key} is not a field: choose {', '.join(top_level_fields)}, or +group.field for a group of "
                f"{EXTENSIBLE_GROUPS}."
            )
        )


def _check_sweep_values(override: Override) -> None:
    """Refuse values that cannot be listed, or are too many."""
    values = override.value()
    if isinstance(values, Glob | IntervalSweep):
        raise invalid_value_error(
            override.key_or_group, override.get_value_string(), "the values themselves, with commas"
        )
    if isinstance(values, RangeSweep) and not _count_range_values(values) <= MAX_AXIS_VALUES:
        valid = f"a range of at most {MAX_AXIS_VALUES} values"
        raise invalid_value_error(override.key_or_group, override.get_value_string(), valid)


def _count_range_values(values: RangeSweep) -> float:
    """About how many values a range has, infinity where that cannot be said."""
    try:
        return (float(values.stop or 0) - float(values.start or 0)) / float(values.step)
    except (OverflowError, ZeroDivisionError):
        return math.inf


def _check_group_option(override: Override) -> None:
    if override.key_or_group in list_config_groups():
        for value in list(override.sweep_string_iterator()) if override.is_sweep_override() else [override.value()]:
            _require_group_option(override.key_or_group, str(value))


def _require_group_option(group: str, value: str) -> None:
    """Raise `UsageError` unless a group has an option, or it is a file that describes hardware."""
    hardware_path = _parse_hardware_path(group, value)
    if hardware_path is not None:
        read_hardware_file(hardware_path)
    elif value in list_config_groups()[group]:
        read_plain_yaml(group, find_option_file(group, value))
    else:
        if (group, value) in UNSUPPORTED_OPTIONS:
            raise UsageError(f"{UNSUPPORTED_OPTIONS[group, value]}: choose {', '.join(list_config_groups()[group])}.")
        file_choice = f", or a file that ends in {YAML_SUFFIX}" if group == HARDWARE_GROUP else ""
        raise invalid_value_error(group, value, ", ".join(list_config_groups()[group]) + file_choice)


def _parse_hardware_path(group: str, value: str) -> Path | None:
    """The file that an option names, quoted or not, relative to the current folder; None if it is a name."""
    name = value.strip("'\"")
    return Path(name).absolute() if group == HARDWARE_GROUP and name.endswith(YAML_SUFFIX) else None


def list_override_values(override: Override) -> list[str]:
    """The values an override gives its key, each as it would be typed: several for a sweep."""
    if override.is_sweep_override():
        return [str(value) for value in override.sweep_string_iterator()]
    return [override.get_value_element_as_str()]


class ConfigPart(NamedTuple):
    """One top-level key, with all that decides about its value but the interpolations in it."""

    key: str
    choices: tuple[str, ...] = ()
    """The option of the group and the additions to it, as Hydra takes them."""
    fields: tuple[str, ...] = ()
    """What is set in it, in order."""


def compose_config(settings: Mapping[str, str]) -> dict[str, Any]:
    """The complete configuration for some settings, as plain values.

    Sweeps repeat themselves: of thousands of points only the parts that are new are composed, set and resolved.

    Parameters
    ----------
    settings: mapping
        Key to value, both as typed; later settings win where one contains the other. A key may start with ``+``.

    Raises
    ------
    UsageError
        If a key does not exist or a value cannot be read.
    """
    choices: dict[str, list[str]] = {}
    field_overrides: list[str] = []
    for key, value in settings.items():
        if key in list_config_groups():
            _require_group_option(key, value)
            choices.setdefault(key, []).append(f"{key}={_parse_hardware_path(key, value) or value}")
            continue
        text = f"{key}={value}"
        if key.startswith("+"):
            choices.setdefault(_get_top_level_key(_parse_override(text)), []).append(text)
        else:
            field_overrides.append(text)
    parts = _compose_parts(choices)
    for text in field_overrides:
        override = _parse_override(text)
        section = _get_top_level_key(override)
        if section not in parts or (
            section != override.key_or_group and not isinstance(_compute_part_value(parts[section]), dict)
        ):
            raise UsageError(f"{override.key_or_group} is not a field: choose {', '.join(parts)}.")
        parts[section] = parts[section]._replace(fields=(*parts[section].fields, text))
        _compute_part_value(parts[section])  # what is wrong with the first of several fields is said first
    resolved_values = _resolve_parts(parts)
    return {
        key: _copy_plain_value(resolved_values[key] if key in resolved_values else _compute_part_value(part))
        for key, part in parts.items()
    }


def _copy_plain_value(value: Any) -> Any:
    """`copy.deepcopy` of plain values, in a fifth of its time."""
    if isinstance(value, dict):
        return {key: _copy_plain_value(inner) for key, inner in value.items()}
    return [_copy_plain_value(inner) for inner in value] if isinstance(value, list) else value


@functools.cache
def _parse_override(text: str) -> Override:
    return parse_overrides([text])[0]


def _get_top_level_key(override: Override) -> str:
    return override.key_or_group.partition(".")[0]


@functools.cache
def _compose_choices(choices: tuple[str, ...]) -> dict[str, Any]:
    """What Hydra makes of some choices, in tens of milliseconds: plain values, interpolations unresolved."""
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF_FOLDER), version_base="1.3"):
            return _to_plain_dict(compose("config", overrides=[*choices, *_build_search_path_overrides()]))
    except (HydraException, OmegaConfBaseException) as error:
        raise UsageError(f"{_format_first_line(error)}.") from None


def _build_search_path_overrides() -> list[str]:
    """What has Hydra look for options in the other folders, too, after the suite's."""
    folders = [json.dumps(f"file://{folder}") for folder in _list_conf_folders()[1:]]
    return [f"hydra.searchpath=[{','.join(folders)}]"] if folders else []


_composed_values: dict[ConfigPart, Any] = {}
"""Parts as Hydra composed them. A part depends on no other part's choices: option files choose nothing elsewhere."""


def _compose_parts(choices: Mapping[str, list[str]]) -> dict[str, ConfigPart]:
    """The parts for some choices, before fields are set; those that are new are composed, all at once."""
    parts = {key: ConfigPart(key, tuple(choices.get(key, ()))) for key in _compose_choices(())}
    new_parts = [part for part in parts.values() if part not in _composed_values]
    read_values = {part: _load_hardware_part(part) or _read_option_part(part) for part in new_parts}
    if new_parts:
        new_values = _compose_choices(
            tuple(choice for part in new_parts for choice in part.choices if not read_values[part])
        )
        _composed_values.update({part: read_values[part] or new_values[part.key] for part in new_parts})
    return parts


DEFAULTS_KEY = "defaults"
"""In an option's file: what Hydra is to read besides."""


def _read_option_part(part: ConfigPart) -> dict[str, Any] | None:
    """What the file of an option says, read as Hydra reads it, in a tenth of its time; None where there is more to
    compose: fields are added, or the file names others."""
    if part.key not in list_config_groups() or len(part.choices) != 1 or part.choices[0].startswith("+"):
        return None
    values = read_plain_yaml(part.key, find_option_file(part.key, part.choices[0].partition("=")[2]))
    return None if DEFAULTS_KEY in values else copy.deepcopy(values)


def _load_hardware_part(part: ConfigPart) -> dict[str, Any] | None:
    """What a file says that was chosen for a part, with the additions to it; None where none was."""
    added_fields = [choice for choice in part.choices if choice.startswith("+")]
    chosen_paths = [
        _parse_hardware_path(part.key, choice.partition("=")[2])
        for choice in part.choices
        if choice not in added_fields
    ]
    if not chosen_paths or chosen_paths[0] is None:
        return None
    config = OmegaConf.create({part.key: hardware_to_dict(read_hardware_file(chosen_paths[0]))})
    for override in map(_parse_override, added_fields):
        OmegaConf.update(config, override.key_or_group, override.value(), merge=True, force_add=True)
    values: dict[str, Any] = _to_plain_dict(config)[part.key]
    return values


@functools.cache
def _compute_part_value(part: ConfigPart) -> Any:
    """The value of a part, interpolations unresolved. Shared by all points: never changed, never handed out."""
    if not part.fields:
        return _composed_values[part]
    values = {part.key: copy.deepcopy(_compute_part_value(part._replace(fields=part.fields[:-1])))}
    override = _parse_override(part.fields[-1])
    previous_memory = _get_nested_value(values, MEMORY_KEY)
    _set_nested_value(values, override)
    if override.key_or_group == MEMORY_KEY and not any(
        field.startswith(f"{DEVICE_MEMORY_KEY}=") for field in part.fields
    ):
        scale_device_memory(values[HARDWARE_GROUP], previous_memory)
    return values[part.key]


def _set_nested_value(values: dict[str, Any], override: Override) -> None:
    key = override.key_or_group
    parent_key, _, name = key.rpartition(".")
    parent = _get_nested_value(values, parent_key)
    if isinstance(parent, dict) and name not in parent and FREE_FIELDS in parent:
        parent = parent[FREE_FIELDS]
        parent[name] = None
    if not isinstance(parent, dict) or name not in parent:
        raise _unknown_field_error(values, key)
    if override.is_sweep_override():
        raise invalid_value_error(key, ",".join(list_override_values(override)), "one value")
    if isinstance(parent[name], dict) and not isinstance(override.value(), dict):
        field_names = [f"{key}.{field!s}" for field in parent[name]] or [f"+{key}.name"]
        raise invalid_value_error(
            key, override.get_value_element_as_str(), f"a value for a field of it: {', '.join(field_names)}"
        )
    parent[name] = _merge_values(key, parent[name], override.value())


def _merge_values(key: str, previous_value: Any, value: Any) -> Any:
    """A value, put over the one before it: of sections field by field."""
    if not isinstance(previous_value, dict) or not isinstance(value, dict):
        return value
    for name in value:
        if name not in previous_value:
            raise invalid_value_error(key, name, [f"{key}.{field!s}" for field in previous_value] or "no field of it")
    return {
        **previous_value,
        **{name: _merge_values(f"{key}.{name}", previous_value[name], inner) for name, inner in value.items()},
    }


def _get_nested_value(values: dict[str, Any], key: str) -> Any:
    """What lies under a dotted key, None where nothing does."""
    value: Any = values
    for name in key.split(".") if key else ():
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _unknown_field_error(values: dict[str, Any], key: str) -> UsageError:
    """The error for a field that a part does not have, naming those of the innermost section of its key."""
    name, section = key.rpartition(".")[2], key.rpartition(".")[0]
    while not isinstance(_get_nested_value(values, section), dict):
        section = section.rpartition(".")[0]
    parent = _get_nested_value(values, section)
    field_names = [f"{section}.{field!s}" for field in parent]
    if any(
        name in read_plain_yaml(section, find_option_file(section, option))
        for option in list_config_groups().get(section, [])
    ):
        return ImpossibleError(
            f"{key} is not a field of {section}={parent.get('name')}: choose {', '.join(field_names)}."
        )
    if not field_names:
        return UsageError(f"{key} is not a field: choose +{key} to add it to {section}, which has none.")
    return UsageError(f"{key} is not a field: choose {', '.join(field_names)}.")


def _resolve_parts(parts: Mapping[str, ConfigPart]) -> dict[str, Any]:
    """The values of all parts that hold interpolations (and of those they read)."""
    num_interpolations = sum(_count_interpolations(part) for part in parts.values())
    if num_interpolations > MAX_INTERPOLATIONS:
        raise UsageError(f"The settings hold {num_interpolations} interpolations: choose at most {MAX_INTERPOLATIONS}.")
    keys_read: set[str] = set().union(*(_find_interpolated_keys(part) for part in parts.values()))
    parts_to_resolve = tuple(
        part
        for part in parts.values()
        if ANY_KEY in keys_read or part.key in keys_read or _find_interpolated_keys(part)
    )
    # What is read from elsewhere, the environment say, may change.
    return (
        _resolve_interpolations(parts_to_resolve)
        if keys_read <= parts.keys()
        else _resolve_interpolations.__wrapped__(parts_to_resolve)
    )


@functools.cache
def _find_interpolated_keys(part: ConfigPart) -> frozenset[str]:
    """What the interpolations in a part read: top-level keys, ``oc.env`` or `ANY_KEY`; empty without interpolation."""
    text = json.dumps(_compute_part_value(part))
    keys = [match[1] or match[2] for match in INTERPOLATION_PATTERN.finditer(text)]
    return frozenset(keys if len(keys) == text.count("${") else [ANY_KEY])


@functools.cache
def _count_interpolations(part: ConfigPart) -> int:
    return json.dumps(_compute_part_value(part)).count("${")


@functools.cache
def _resolve_interpolations(parts: tuple[ConfigPart, ...]) -> dict[str, Any]:
    """Parts, by key, with the interpolations in them resolved among each other."""
    try:
        return _to_plain_dict(OmegaConf.create({part.key: _compute_part_value(part) for part in parts}), resolve=True)
    except RecursionError:
        raise UsageError("The settings cannot be resolved: interpolations read one another in a circle.") from None
    except OmegaConfBaseException as error:
        raise UsageError(f"{error.full_key} cannot be resolved: {_format_first_line(error)}.") from None


def _to_plain_dict(config: DictConfig, *, resolve: bool = False) -> dict[str, Any]:
    values = OmegaConf.to_container(config, resolve=resolve)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _format_first_line(error: BaseException) -> str:
    return " ".join(str(error).split("\n")[0].split()).rstrip(".") or type(error).__name__
