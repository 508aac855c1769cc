"""The complete configuration: settings as typed in, plain values out."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bench.config.groups import (
    HARDWARE_GROUP,
    NETWORK_GROUP,
    list_config_groups,
    parse_hardware_path,
    require_group_option,
)
from bench.config.hydra_calls import format_first_line, get_top_level_key, parse_override, to_plain_dict
from bench.config.parts import ConfigPart, compose_parts, compute_part_value
from bench.config.run_id import SharedSection, to_plain_value
from bench.core.errors import UsageError, unknown_field_error
from bench.hardware import interconnect

NODE_SIZE_KEY = "gpus_per_node"

INTERPOLATION_PATTERN = re.compile(r"\$\{(?:([A-Za-z_]\w*)(?:\.\w+)*|(oc\.env):[^${}]*)\}")
"""Interpolations that say what they read: a field by its whole key, or the environment."""

MAX_INTERPOLATIONS = 20
"""Of all fields together: each may double what the others come to."""

ANY_KEY = "*"
"""What all other interpolations may read."""


def compose_config(settings: Mapping[str, str]) -> dict[str, Any]:
    """The complete configuration for some settings, as plain values, which are the caller's own.

    Parameters
    ----------
    settings: mapping
        Key to value, both as typed; later settings win where one contains the other. A key may start with ``+``.

    Raises
    ------
    UsageError
        If a key does not exist or a value cannot be read.
    """
    values: dict[str, Any] = to_plain_value(compose_shared_config(settings))
    return values


def compose_shared_config(settings: Mapping[str, str]) -> dict[str, Any]:
    """As `compose_config`, but for values that are only read: what points have in common is the same object, never
    changed.

    Sweeps repeat themselves: of thousands of points only the parts that are new are composed, set and resolved.
    """
    choices: dict[str, list[str]] = {}
    field_overrides: list[str] = []
    for key, value in settings.items():
        if key in list_config_groups():
            require_group_option(key, value)
            choices.setdefault(key, []).append(f"{key}={parse_hardware_path(key, value) or value}")
            continue
        text = f"{key}={value}"
        if key.startswith("+"):
            choices.setdefault(get_top_level_key(parse_override(text)), []).append(text)
        else:
            field_overrides.append(text)
    parts = compose_parts(choices)
    # hardware's fields are set over the network's links
    for text in sorted(field_overrides, key=lambda text: not text.startswith(f"{NETWORK_GROUP}.")):
        override = parse_override(text)
        section = get_top_level_key(override)
        if section not in parts or (
            section != override.key_or_group and not isinstance(compute_part_value(parts[section]), dict)
        ):
            nested = [f"{key}.{name}" for key, part in parts.items() for name in _list_field_names(part)]
            raise unknown_field_error(override.key_or_group, parts, nested=nested)
        parts[section] = parts[section]._replace(fields=(*parts[section].fields, text))
        if section == HARDWARE_GROUP:
            parts[section] = parts[section]._replace(network=parts[NETWORK_GROUP])
        compute_part_value(parts[section])  # what is wrong with the first of several fields is said first
    parts[HARDWARE_GROUP] = parts[HARDWARE_GROUP]._replace(network=parts[NETWORK_GROUP])
    if NODE_SIZE_KEY not in settings and not any(key.startswith("cluster.") for key in settings):
        parts[NODE_SIZE_KEY] = _follow_node_size(parts)
    resolved_values = _resolve_parts(parts)
    return {
        key: resolved_values[key] if key in resolved_values else _compute_plain_value(part)
        for key, part in parts.items()
    }


@functools.cache
def _compute_plain_value(part: ConfigPart) -> Any:
    return _to_shared_value(compute_part_value(part))


def _to_shared_value(value: Any) -> Any:
    plain_value = to_plain_value(value)
    return SharedSection(plain_value) if isinstance(plain_value, dict) else plain_value


def _list_field_names(part: ConfigPart) -> list[str]:
    value = compute_part_value(part)
    return [str(name) for name in value] if isinstance(value, dict) else []


def _follow_node_size(parts: Mapping[str, ConfigPart]) -> ConfigPart:
    """GPUs per node, of a prediction as the machine is always built: the fewest nodes that are all equally large."""
    part = parts[NODE_SIZE_KEY]
    words = compute_part_value(parts[HARDWARE_GROUP]).get("interconnect")
    node_size = words.get(NODE_SIZE_KEY) if isinstance(words, dict) else None
    gpus = compute_part_value(parts["gpus"])
    if compute_part_value(parts["mode"]) != "predict" or type(node_size) is not int or type(gpus) is not int:
        return part
    if node_size < 1 or gpus < 1:  # refused where they are read
        return part
    size = interconnect.choose_gpus_per_node(gpus, node_size) if gpus > node_size else node_size
    return part._replace(fields=(f"{NODE_SIZE_KEY}={size}",))


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
    text = json.dumps(compute_part_value(part))
    keys = [match[1] or match[2] for match in INTERPOLATION_PATTERN.finditer(text)]
    return frozenset(keys if len(keys) == text.count("${") else [ANY_KEY])


@functools.cache
def _count_interpolations(part: ConfigPart) -> int:
    return json.dumps(compute_part_value(part)).count("${")


@functools.cache
def _resolve_interpolations(parts: tuple[ConfigPart, ...]) -> dict[str, Any]:
    """Parts, by key, with the interpolations in them resolved among each other."""
    try:
        config = OmegaConf.create({part.key: compute_part_value(part) for part in parts})
        return {key: _to_shared_value(value) for key, value in to_plain_dict(config, resolve=True).items()}
    except RecursionError:
        raise UsageError("The settings cannot be resolved: interpolations read one another in a circle.") from None
    except OmegaConfBaseException as error:
        raise UsageError(f"{error.full_key} cannot be resolved: {format_first_line(error)}.") from None
