"""Hydra composition: overrides in, plain values out. The only file that knows Hydra."""

from __future__ import annotations

import copy
import functools
import json
import math
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
from bench.core.option_files import (  # noqa: F401 - the folder and its variable belong to what this module is about
    CONF_FOLDER,
    OWN_CONF_VARIABLE,
    find_option_file,
    list_conf_folders,
    list_options,
)
from bench.core.typed_config import read_plain_yaml
from bench.hardware import interconnect
from bench.hardware.derived import LIKE_FIELD, LIKE_PREFIX, derive_hardware_values
from bench.hardware.hardware_file import (
    YAML_SUFFIX,
    hardware_to_dict,
    parse_likeness,
    read_base_values,
    read_hardware_file,
    read_hardware_values,
    scale_device_memory,
)

HARDWARE_GROUP = "hardware"
"""The group whose option may also be a file anywhere, or ``like:`` another option."""

ESCAPED_LIKE_PREFIX = LIKE_PREFIX.replace(":", "\\:")

NETWORK_GROUP = interconnect.GROUP
"""The group whose option replaces links of the hardware, and may be several joined."""

NODE_SIZE_KEY = "gpus_per_node"

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
        folder.name: list_options(folder.name)
        for folder in sorted(CONF_FOLDER.iterdir())
        if folder.is_dir() and folder.name not in PRESET_FOLDERS
    }


@functools.cache
def list_presets(folder: str) -> list[str]:
    """What one of `PRESET_FOLDERS` holds, by name."""
    return list_options(folder)


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
        for value in list_override_values(override) if override.is_sweep_override() else [override.value()]:
            _require_group_option(override.key_or_group, str(value))


def _require_group_option(group: str, value: str) -> None:
    """Raise `UsageError` unless a group has an option, or it is a file that describes hardware."""
    hardware_path = _parse_hardware_path(group, value)
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
        raise invalid_value_error(group, value, ", ".join(list_config_groups()[group]) + file_choice)


def _parse_hardware_path(group: str, value: str) -> Path | None:
    """The file that an option names, quoted or not, relative to the current folder; None if it is a name."""
    name = value.strip("'\"")
    return Path(name).absolute() if group == HARDWARE_GROUP and name.endswith(YAML_SUFFIX) else None


def list_override_values(override: Override) -> list[str]:
    """The values an override gives its key, each as it would be typed: several for a sweep."""
    values = (
        [str(value) for value in override.sweep_string_iterator()]
        if override.is_sweep_override()
        else [override.get_value_element_as_str()]
    )
    if override.key_or_group == HARDWARE_GROUP:  # Hydra writes every colon with a backslash
        return [value.replace(ESCAPED_LIKE_PREFIX, LIKE_PREFIX, 1) for value in values]
    return values


class ConfigPart(NamedTuple):
    """One top-level key, with all that decides about its value but the interpolations in it."""

    key: str
    choices: tuple[str, ...] = ()
    """The option of the group and the additions to it, as Hydra takes them."""
    fields: tuple[str, ...] = ()
    """What is set in it, in order."""
    network: ConfigPart | None = None
    """Of hardware: what replaces its links, before `fields` are set."""

    @property
    def option(self) -> str | None:
        """The option that was chosen, as typed; None for the default."""
        return next((choice.partition("=")[2] for choice in self.choices if not choice.startswith("+")), None)


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
    # hardware's fields are set over the network's links
    for text in sorted(field_overrides, key=lambda text: not text.startswith(f"{NETWORK_GROUP}.")):
        override = _parse_override(text)
        section = _get_top_level_key(override)
        if section not in parts or (
            section != override.key_or_group and not isinstance(_compute_part_value(parts[section]), dict)
        ):
            raise UsageError(f"{override.key_or_group} is not a field: choose {', '.join(parts)}.")
        parts[section] = parts[section]._replace(fields=(*parts[section].fields, text))
        if section == HARDWARE_GROUP:
            parts[section] = parts[section]._replace(network=parts[NETWORK_GROUP])
        _compute_part_value(parts[section])  # what is wrong with the first of several fields is said first
    parts[HARDWARE_GROUP] = parts[HARDWARE_GROUP]._replace(network=parts[NETWORK_GROUP])
    if NODE_SIZE_KEY not in settings and not any(key.startswith("cluster.") for key in settings):
        parts[NODE_SIZE_KEY] = _follow_node_size(parts)
    resolved_values = _resolve_parts(parts)
    return {
        key: _copy_plain_value(resolved_values[key] if key in resolved_values else _compute_part_value(part))
        for key, part in parts.items()
    }


def _follow_node_size(parts: Mapping[str, ConfigPart]) -> ConfigPart:
    """GPUs per node, of a prediction as the machine is always built: the fewest nodes that are all equally large."""
    part = parts[NODE_SIZE_KEY]
    words = _compute_part_value(parts[HARDWARE_GROUP]).get("interconnect")
    node_size = words.get(NODE_SIZE_KEY) if isinstance(words, dict) else None
    gpus = _compute_part_value(parts["gpus"])
    if _compute_part_value(parts["mode"]) != "predict" or type(node_size) is not int or type(gpus) is not int:
        return part
    if node_size < 1 or gpus < 1:  # refused where they are read
        return part
    size = interconnect.choose_gpus_per_node(gpus, node_size) if gpus > node_size else node_size
    return part._replace(fields=(f"{NODE_SIZE_KEY}={size}",))


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
    folders = [json.dumps(f"file://{folder}") for folder in list_conf_folders()[1:]]
    return [f"hydra.searchpath=[{','.join(folders)}]"] if folders else []


_composed_values: dict[ConfigPart, Any] = {}
"""Parts as Hydra composed them. A part depends on no other part's choices: option files choose nothing elsewhere."""


def _compose_parts(choices: Mapping[str, list[str]]) -> dict[str, ConfigPart]:
    """The parts for some choices, before fields are set; those that are new are composed, all at once."""
    parts = {key: ConfigPart(key, tuple(choices.get(key, ()))) for key in _compose_choices(())}
    new_parts = [part for part in parts.values() if part not in _composed_values]
    read_values = {part: _load_part(part) or _read_option_part(part) for part in new_parts}
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


def _load_part(part: ConfigPart) -> dict[str, Any] | None:
    """What was chosen for a part where that is no option that Hydra composes, with the additions to it: hardware in a
    file or like another option, and networks; None for all else."""
    if part.option is None:
        return None
    chosen_values = _load_hardware(part.option) if part.key == HARDWARE_GROUP else None
    if part.key == NETWORK_GROUP:
        chosen_values = interconnect.network_to_dict(interconnect.read_network(part.option))
    if chosen_values is None:
        return None
    config = OmegaConf.create({part.key: chosen_values})
    for override in (_parse_override(choice) for choice in part.choices if choice.startswith("+")):
        OmegaConf.update(config, override.key_or_group, override.value(), merge=True, force_add=True)
    values: dict[str, Any] = _to_plain_dict(config)[part.key]
    return values


def _load_hardware(option: str) -> dict[str, Any] | None:
    """The description in a file, or one like another; None for an option that stands by itself."""
    path, likeness = _parse_hardware_path(HARDWARE_GROUP, option), parse_likeness(option)
    if path is not None:
        return hardware_to_dict(read_hardware_file(path))
    if likeness is not None:
        return derive_hardware_values({}, read_base_values(likeness), likeness)
    file = find_option_file(HARDWARE_GROUP, option)
    return read_hardware_values(file) if LIKE_FIELD in read_plain_yaml(HARDWARE_GROUP, file) else None


@functools.cache
def _compute_part_value(part: ConfigPart) -> Any:
    """The value of a part, interpolations unresolved. Shared by all points: never changed, never handed out."""
    if not part.fields:
        if part.network is None:
            return _composed_values[part]
        without_network = _compute_part_value(part._replace(network=None))
        return interconnect.apply_network(without_network, _compute_part_value(part.network))
    values = {part.key: copy.deepcopy(_compute_part_value(part._replace(fields=part.fields[:-1])))}
    override = _parse_override(part.fields[-1])
    previous_memory = _get_nested_value(values, MEMORY_KEY)
    _set_nested_value(values, override)
    if part.key == HARDWARE_GROUP and part.option is not None and parse_likeness(part.option) is not None:
        return _derive_part_value(part)
    if override.key_or_group == MEMORY_KEY and not any(
        field.startswith(f"{DEVICE_MEMORY_KEY}=") for field in part.fields
    ):
        scale_device_memory(values[HARDWARE_GROUP], previous_memory)
    return values[part.key]


def _derive_part_value(part: ConfigPart) -> dict[str, Any]:
    """Hardware like another option: what does not follow from the fields that were set is the other's."""
    assert part.option is not None
    base_name = parse_likeness(part.option)
    assert base_name is not None
    base_part = ConfigPart(part.key, (f"{part.key}={base_name}",))
    _composed_values.setdefault(base_part, read_base_values(base_name))
    own_values: dict[str, Any] = {}
    for override in map(_parse_override, part.fields):
        *section_names, name = override.key_or_group.split(".")[1:]
        section = own_values
        for section_name in section_names:
            section = section.setdefault(section_name, {})
        section[name] = _merge_values(override.key_or_group, section.get(name), override.value())
    base_values = _compute_part_value(base_part._replace(network=part.network))
    return derive_hardware_values(own_values, base_values, base_name)


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
