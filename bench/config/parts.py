"""One top-level key of the configuration at a time: the option that was chosen, and the fields that are set in it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from bench.config.groups import HARDWARE_GROUP, NETWORK_GROUP, list_config_groups, parse_hardware_path
from bench.config.hydra_calls import compose_choices, list_override_values, parse_override, to_plain_dict
from bench.core.errors import ImpossibleError, UsageError, invalid_value_error, unknown_field_error
from bench.core.option_files import find_option_file
from bench.core.typed_config import read_plain_yaml
from bench.hardware import interconnect
from bench.hardware.derived import LIKE_FIELD, SUSTAINED_SHARE, derive_hardware_values, derive_sustained_shares
from bench.hardware.hardware_file import (
    hardware_to_dict,
    parse_likeness,
    read_base_values,
    read_hardware_file,
    read_hardware_values,
    scale_device_memory,
)

MEMORY_KEY, DEVICE_MEMORY_KEY = "hardware.memory_gb", "hardware.speeds.outside.device_gib"
"""Set alone, the former changes the latter: memory as sold, and what of it a device reports."""

POWER_KEY = "hardware.power_w"
"""Set alone, it changes what the device keeps up of its burst speeds."""

FREE_FIELDS = "config"
"""The field of a section that takes what is set of fields that the section does not have."""

DEFAULTS_KEY = "defaults"
"""In an option's file: what Hydra is to read besides."""


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


_composed_values: dict[ConfigPart, Any] = {}
"""Parts as Hydra composed them. A part depends on no other part's choices: option files choose nothing elsewhere."""


def compose_parts(choices: Mapping[str, list[str]]) -> dict[str, ConfigPart]:
    """The parts for some choices, before fields are set; those that are new are composed, all at once."""
    default_parts = _list_default_parts()
    chosen_parts = {key: ConfigPart(key, tuple(texts)) for key, texts in choices.items() if key in default_parts}
    parts = default_parts | chosen_parts
    new_parts = [part for part in parts.values() if part not in _composed_values]
    read_values = {part: _load_part(part) or _read_option_part(part) for part in new_parts}
    if new_parts:
        new_values = compose_choices(
            tuple(choice for part in new_parts for choice in part.choices if not read_values[part])
        )
        _composed_values.update({part: read_values[part] or new_values[part.key] for part in new_parts})
    return parts


@functools.cache
def _list_default_parts() -> dict[str, ConfigPart]:
    """Every top-level key as it is where nothing is chosen, in order. Shared: never changed."""
    return {key: ConfigPart(key) for key in compose_choices(())}


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
    for override in (parse_override(choice) for choice in part.choices if choice.startswith("+")):
        OmegaConf.update(config, override.key_or_group, override.value(), merge=True, force_add=True)
    values: dict[str, Any] = to_plain_dict(config)[part.key]
    return values


def _load_hardware(option: str) -> dict[str, Any] | None:
    """The description in a file, or one like another; None for an option that stands by itself."""
    path, likeness = parse_hardware_path(HARDWARE_GROUP, option), parse_likeness(option)
    if path is not None:
        return hardware_to_dict(read_hardware_file(path))
    if likeness is not None:
        return derive_hardware_values({}, read_base_values(likeness), likeness)
    file = find_option_file(HARDWARE_GROUP, option)
    return read_hardware_values(file) if LIKE_FIELD in read_plain_yaml(HARDWARE_GROUP, file) else None


@functools.cache
def compute_part_value(part: ConfigPart) -> Any:
    """The value of a part, interpolations unresolved. Shared by all points: never changed, never handed out."""
    if not part.fields:
        if part.network is None:
            return _composed_values[part]
        without_network = compute_part_value(part._replace(network=None))
        return interconnect.apply_network(without_network, compute_part_value(part.network))
    previous_values = compute_part_value(part._replace(fields=part.fields[:-1]))
    values = {part.key: copy.deepcopy(previous_values)}
    override = parse_override(part.fields[-1])
    _set_nested_value(values, override)
    if part.key == HARDWARE_GROUP and part.option is not None and parse_likeness(part.option) is not None:
        return _derive_part_value(part)
    if override.key_or_group in (MEMORY_KEY, POWER_KEY):
        _derive_from_field(part, override.key_or_group, values[part.key], previous_values)
    return values[part.key]


def _derive_from_field(part: ConfigPart, key: str, hardware: dict[str, Any], previous: Mapping[str, Any]) -> None:
    """Set what follows from memory or power that was set, unless that was set before."""
    set_names = [parse_override(field).key_or_group for field in part.fields]
    if key == MEMORY_KEY and DEVICE_MEMORY_KEY not in set_names:
        scale_device_memory(hardware, previous["memory_gb"])
    if key == POWER_KEY and not any(SUSTAINED_SHARE in name for name in set_names):
        sources = derive_sustained_shares(hardware, previous)
        hardware["sources"] = {**(hardware.get("sources") or {}), **sources}


def _derive_part_value(part: ConfigPart) -> dict[str, Any]:
    """Hardware like another option: what does not follow from the fields that were set is the other's."""
    assert part.option is not None
    base_name = parse_likeness(part.option)
    assert base_name is not None
    base_part = ConfigPart(part.key, (f"{part.key}={base_name}",))
    _composed_values.setdefault(base_part, read_base_values(base_name))
    own_values: dict[str, Any] = {}
    for override in map(parse_override, part.fields):
        *section_names, name = override.key_or_group.split(".")[1:]
        section = own_values
        for section_name in section_names:
            section = section.setdefault(section_name, {})
        section[name] = _merge_values(override.key_or_group, section.get(name), override.value())
    base_values = compute_part_value(base_part._replace(network=part.network))
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
        return unknown_field_error(key, field_names, f" of {section}={parent.get('name')}", ImpossibleError)
    if not field_names:
        return UsageError(f"{key} is not a field: choose +{key} to add it to {section}, which has none.")
    return unknown_field_error(key, field_names)
