"""Hydra composition: overrides in, plain values out. The only file that knows Hydra."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bench.errors import ImpossibleError, UsageError, bad_value

CONF = Path(__file__).resolve().parents[2] / "conf"

EXTENSIBLE = ("model", "strategy", "hardware")
"""Groups that take fields of one's own with ``+``: a plug-in's, or the peak of another format."""


@functools.cache
def groups() -> dict[str, list[str]]:
    """The configuration groups and their options, as the folders under ``conf`` say."""
    return {
        folder.name: sorted(file.stem for file in folder.glob("*.yaml"))
        for folder in sorted(CONF.iterdir())
        if folder.is_dir()
    }


def parse(arguments: list[str]) -> list[Override]:
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
            override = parser.parse_override(argument)
        except (OverrideParseException, HydraException):
            override = None
        if override is None or not override.key_or_group or override.package is not None or override.is_force_add():
            raise UsageError(f"cannot read {argument!r}: write key=value, for example gpus=4 or model=t5_small.")
        overrides.append(override)
    for override in overrides:
        _check_change(override)
        _check_option(override)
    return overrides


def _check_change(override: Override) -> None:
    """Refuse to remove a field, or to add one that nothing would read."""
    key, (section, _, field) = override.key_or_group, override.key_or_group.partition(".")
    if override.is_delete():
        raise UsageError(f"~{key} is not valid: every field is needed, so choose a value with {key}=value.")
    if override.is_add() and not (section in EXTENSIBLE and field):
        fields = list(composed({}))
        known = section in fields and not field
        raise UsageError(
            f"+{key} is not valid: choose {key} without the +."
            if known
            else f"{key} is not a field: choose {', '.join(fields)}, or +group.field for a group of {EXTENSIBLE}."
        )


def _check_option(override: Override) -> None:
    group, options = override.key_or_group, groups().get(override.key_or_group)
    if options is None:
        return
    values = list(override.sweep_string_iterator()) if override.is_sweep_override() else [override.value()]
    for value in values:
        if str(value) not in options:
            raise bad_value(group, value, options)


def values_of(override: Override) -> list[str]:
    """The values an override gives its key, each as it would be typed: several for a sweep."""
    if override.is_sweep_override():
        return [str(value) for value in override.sweep_string_iterator()]
    return [override.get_value_element_as_str()]


def as_text(value: Any) -> str:
    """A plain value as it would be typed after ``key=``."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


@contextmanager
def _hydra() -> Iterator[None]:
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


@functools.lru_cache(maxsize=4096)
def _compose_groups(choices: tuple[str, ...]) -> DictConfig:
    """Compose what a choice of options comes to; Hydra takes tens of milliseconds, so each choice is composed once."""
    try:
        with _hydra():
            return compose("config", overrides=list(choices))
    except (HydraException, OmegaConfBaseException) as error:
        raise UsageError(f"{_first_line(error)}.") from None


def composed(settings: Mapping[str, str]) -> dict[str, Any]:
    """The complete configuration for some settings, as plain values.

    Parameters
    ----------
    settings: mapping
        Key to value, both as typed; later settings win where one contains the other. A key may start with ``+``.

    Raises
    ------
    UsageError
        If a key does not exist or a value cannot be read.
    """
    choices: list[str] = []
    fields: list[str] = []
    for key, value in settings.items():
        if key in groups() and value not in groups()[key]:
            raise bad_value(key, value, groups()[key])
        target = choices if key in groups() or key.startswith("+") else fields
        target.append(f"{key}={value}")
    config = _compose_groups(tuple(sorted(choices))).copy()
    for field in fields:
        _set(config, parse([field])[0])
    try:
        values = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise UsageError(f"{error.full_key} cannot be resolved: {_first_line(error)}.") from None
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _set(config: DictConfig, override: Override) -> None:
    key = override.key_or_group
    parent_key, _, name = key.rpartition(".")
    parent = OmegaConf.select(config, parent_key) if parent_key else config
    if not isinstance(parent, DictConfig) or name not in parent:
        while parent_key and not isinstance(OmegaConf.select(config, parent_key), DictConfig):
            parent_key = parent_key.rpartition(".")[0]
        parent = OmegaConf.select(config, parent_key) if parent_key else config
        fields = [f"{parent_key}.{field!s}" if parent_key else str(field) for field in parent]
        if any(name in composed({parent_key: option})[parent_key] for option in groups().get(parent_key, [])):
            raise ImpossibleError(
                f"{key} is not a field of {parent_key}={parent.get('name')}: choose {', '.join(fields)}."
            )
        if not fields:
            raise UsageError(f"{key} is not a field: choose +{key} to add it to {parent_key}, which has none.")
        raise UsageError(f"{key} is not a field: choose {', '.join(fields)}.")
    section = parent._get_node(name)
    if isinstance(section, DictConfig) and not isinstance(override.value(), dict):
        fields = [f"{key}.{field!s}" for field in section] or [f"+{key}.name"]
        raise bad_value(key, override.get_value_element_as_str(), f"a value for a field of it: {', '.join(fields)}")
    try:
        OmegaConf.update(config, key, override.value(), merge=True)
    except OmegaConfBaseException as error:
        raise bad_value(key, override.get_value_element_as_str(), f"another value ({_first_line(error)})") from None


def _first_line(error: BaseException) -> str:
    return " ".join(str(error).split("\n")[0].split()) or type(error).__name__
