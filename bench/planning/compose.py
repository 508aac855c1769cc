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

from bench.described import read_plain_yaml
from bench.errors import ImpossibleError, UsageError, bad_value, shortened
from bench.hardware.file import ENDING, plain, read_hardware, scale_device_memory

CONF = Path(__file__).resolve().parents[2] / "conf"

HARDWARE = "hardware"
"""The group whose option may also be a file anywhere."""

MEMORY, DEVICE_MEMORY = "hardware.memory_gb", "hardware.speeds.outside.device_gib"
"""Set alone, the former changes the latter: memory as sold, and what of it a device reports."""

FIXED = {"precision.name": "precision=NAME, or fields of it"}
"""Fields that say which option was chosen, and so cannot say something else; what to choose instead."""

NOT_OFFERED = {
    ("precision", "int8"): (
        "precision=int8 is not valid: training in INT8 is not offered, since its 256 evenly spaced values do not span "
        "the range of gradients, what torchao has for it is a prototype, and GPUs that have both are as fast in FP8"
    ),
}
"""What somebody may well ask for, and why there is no such option."""

EXTENSIBLE = ("model", "strategy", "hardware")
"""Groups that take fields of one's own with ``+``: a plug-in's, or the peak of another format."""

INTERPOLATION = re.compile(r"\$\{(?:([A-Za-z_]\w*)(?:\.\w+)*|(oc\.env):[^${}]*)\}")
"""Interpolations that say what they read: a field by its whole key, or the environment."""

MOST_VALUES = 100_000
"""Of one axis on a command line."""

MOST_INTERPOLATIONS = 20
"""Of all fields together: each may double what the others come to."""
LIST_OF_OPTIONS = re.compile(r"""(cluster\.(?:sbatch|srun))=\[(-[^'"\\\[\]]*)\]""")
"""A list of another command's options, none of them in quotes."""

ANYTHING = "*"
"""What all other interpolations may read."""


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
            override = parser.parse_override(_with_options_quoted(argument))
        except (OverrideParseException, HydraException, ValueError, RecursionError):
            override = None
        if override is None or not override.key_or_group or override.package is not None or override.is_force_add():
            read = shortened(repr(argument))
            raise UsageError(f"cannot read {read}: write key=value, for example gpus=4 or model=t5_small.")
        overrides.append(override)
    for override in overrides:
        _check_change(override)
        _check_values(override)
        _check_option(override)
    return overrides


def _with_options_quoted(argument: str) -> str:
    """An override with the options of ``cluster.sbatch=[--mail-type=END]`` in quotes: Hydra has no bare equals sign."""
    match = LIST_OF_OPTIONS.fullmatch(argument)
    if match is None:
        return argument
    return f"{match[1]}=[{','.join(repr(option) for option in re.split(r', *(?=-)', match[2]))}]"


def _check_change(override: Override) -> None:
    """Refuse to remove a field, or to add one that nothing would read."""
    key, (section, _, field) = override.key_or_group, override.key_or_group.partition(".")
    if override.is_delete():
        raise UsageError(f"~{key} is not valid: every field is needed, so choose a value with {key}=value.")
    if key in FIXED:
        raise bad_value(key, override.get_value_string(), FIXED[key])
    if override.is_add() and not (section in EXTENSIBLE and field):
        fields = list(composed({}))
        known = section in fields and not field
        raise UsageError(
            f"+{key} is not valid: choose {key} without the +."
            if known
            else f"{key} is not a field: choose {', '.join(fields)}, or +group.field for a group of {EXTENSIBLE}."
        )


def _check_values(override: Override) -> None:
    """Refuse values that cannot be listed, or are too many."""
    values = override.value()
    if isinstance(values, Glob | IntervalSweep):
        raise bad_value(override.key_or_group, override.get_value_string(), "the values themselves, with commas")
    if isinstance(values, RangeSweep) and not _count(values) <= MOST_VALUES:
        valid = f"a range of at most {MOST_VALUES} values"
        raise bad_value(override.key_or_group, override.get_value_string(), valid)


def _count(values: RangeSweep) -> float:
    """About how many values a range has, infinity where that cannot be said."""
    try:
        return (float(values.stop or 0) - float(values.start or 0)) / float(values.step)
    except (OverflowError, ZeroDivisionError):
        return math.inf


def _check_option(override: Override) -> None:
    if override.key_or_group in groups():
        for value in list(override.sweep_string_iterator()) if override.is_sweep_override() else [override.value()]:
            _require_option(override.key_or_group, str(value))


def _require_option(group: str, value: str) -> None:
    """Raise `UsageError` unless a group has an option, or it is a file that describes hardware."""
    file = _file(group, value)
    if file is not None:
        read_hardware(file)
    elif value in groups()[group]:
        read_plain_yaml(group, CONF / group / f"{value}.yaml")
    else:
        if (group, value) in NOT_OFFERED:
            raise UsageError(f"{NOT_OFFERED[group, value]}: choose {', '.join(groups()[group])}.")
        extra = f", or a file that ends in {ENDING}" if group == HARDWARE else ""
        raise bad_value(group, value, ", ".join(groups()[group]) + extra)


def _file(group: str, value: str) -> Path | None:
    """The file that an option names, quoted or not, relative to the current folder; None if it is a name."""
    name = value.strip("'\"")
    return Path(name).absolute() if group == HARDWARE and name.endswith(ENDING) else None


def values_of(override: Override) -> list[str]:
    """The values an override gives its key, each as it would be typed: several for a sweep."""
    if override.is_sweep_override():
        return [str(value) for value in override.sweep_string_iterator()]
    return [override.get_value_element_as_str()]


class Part(NamedTuple):
    """One top-level key, with all that decides about its value but the interpolations in it."""

    key: str
    choices: tuple[str, ...] = ()
    """The option of the group and the additions to it, as Hydra takes them."""
    fields: tuple[str, ...] = ()
    """What is set in it, in order."""


def composed(settings: Mapping[str, str]) -> dict[str, Any]:
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
    fields: list[str] = []
    for key, value in settings.items():
        if key in groups():
            _require_option(key, value)
            choices.setdefault(key, []).append(f"{key}={_file(key, value) or value}")
            continue
        text = f"{key}={value}"
        if key.startswith("+"):
            choices.setdefault(_section(_override(text)), []).append(text)
        else:
            fields.append(text)
    parts = _composed_parts(choices)
    for text in fields:
        override = _override(text)
        section = _section(override)
        if section not in parts or (section != override.key_or_group and not isinstance(_value(parts[section]), dict)):
            raise UsageError(f"{override.key_or_group} is not a field: choose {', '.join(parts)}.")
        parts[section] = parts[section]._replace(fields=(*parts[section].fields, text))
        _value(parts[section])  # what is wrong with the first of several fields is said first
    resolved = _resolved_parts(parts)
    return {key: _copied(resolved[key] if key in resolved else _value(part)) for key, part in parts.items()}


def _copied(value: Any) -> Any:
    """`copy.deepcopy` of plain values, in a fifth of its time."""
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list) else value


@functools.cache
def _override(text: str) -> Override:
    return parse([text])[0]


def _section(override: Override) -> str:
    return override.key_or_group.partition(".")[0]


@functools.cache
def _compose(choices: tuple[str, ...]) -> dict[str, Any]:
    """What Hydra makes of some choices, in tens of milliseconds: plain values, interpolations unresolved."""
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return _plain(compose("config", overrides=list(choices)))
    except (HydraException, OmegaConfBaseException) as error:
        raise UsageError(f"{_first_line(error)}.") from None


_unset: dict[Part, Any] = {}
"""Parts as Hydra composed them. A part depends on no other part's choices: option files choose nothing elsewhere."""


def _composed_parts(choices: Mapping[str, list[str]]) -> dict[str, Part]:
    """The parts for some choices, before fields are set; those that are new are composed, all at once."""
    parts = {key: Part(key, tuple(choices.get(key, ()))) for key in _compose(())}
    new = [part for part in parts.values() if part not in _unset]
    if new:
        values = _compose(tuple(choice for part in new for choice in part.choices if not _described(part)))
        _unset.update({part: _described(part) or values[part.key] for part in new})
    return parts


def _described(part: Part) -> dict[str, Any] | None:
    """What a file says that was chosen for a part, with the additions to it; None where none was."""
    added = [choice for choice in part.choices if choice.startswith("+")]
    chosen = [_file(part.key, choice.partition("=")[2]) for choice in part.choices if choice not in added]
    if not chosen or chosen[0] is None:
        return None
    config = OmegaConf.create({part.key: plain(read_hardware(chosen[0]))})
    for override in map(_override, added):
        OmegaConf.update(config, override.key_or_group, override.value(), merge=True, force_add=True)
    values: dict[str, Any] = _plain(config)[part.key]
    return values


@functools.cache
def _value(part: Part) -> Any:
    """The value of a part, interpolations unresolved. Shared by all points: never changed, never handed out."""
    if not part.fields:
        return _unset[part]
    values = {part.key: copy.deepcopy(_value(part._replace(fields=part.fields[:-1])))}
    override = _override(part.fields[-1])
    before = _get(values, MEMORY)
    _set(values, override)
    if override.key_or_group == MEMORY and not any(field.startswith(f"{DEVICE_MEMORY}=") for field in part.fields):
        scale_device_memory(values[HARDWARE], before)
    return values[part.key]


def _set(values: dict[str, Any], override: Override) -> None:
    key = override.key_or_group
    parent_key, _, name = key.rpartition(".")
    parent = _get(values, parent_key)
    if not isinstance(parent, dict) or name not in parent:
        raise _no_such_field(values, key)
    if override.is_sweep_override():
        raise bad_value(key, ",".join(values_of(override)), "one value")
    if isinstance(parent[name], dict) and not isinstance(override.value(), dict):
        fields = [f"{key}.{field!s}" for field in parent[name]] or [f"+{key}.name"]
        raise bad_value(key, override.get_value_element_as_str(), f"a value for a field of it: {', '.join(fields)}")
    parent[name] = _merged(key, parent[name], override.value())


def _merged(key: str, before: Any, value: Any) -> Any:
    """A value, put over the one before it: of sections field by field."""
    if not isinstance(before, dict) or not isinstance(value, dict):
        return value
    for name in value:
        if name not in before:
            raise bad_value(key, name, [f"{key}.{field!s}" for field in before] or "no field of it")
    return {**before, **{name: _merged(f"{key}.{name}", before[name], inner) for name, inner in value.items()}}


def _get(values: dict[str, Any], key: str) -> Any:
    """What lies under a dotted key, None where nothing does."""
    value: Any = values
    for name in key.split(".") if key else ():
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _no_such_field(values: dict[str, Any], key: str) -> UsageError:
    """The error for a field that a part does not have, naming those of the innermost section of its key."""
    name, section = key.rpartition(".")[2], key.rpartition(".")[0]
    while not isinstance(_get(values, section), dict):
        section = section.rpartition(".")[0]
    parent = _get(values, section)
    fields = [f"{section}.{field!s}" for field in parent]
    if any(name in read_plain_yaml(section, CONF / section / f"{option}.yaml") for option in groups().get(section, [])):
        return ImpossibleError(f"{key} is not a field of {section}={parent.get('name')}: choose {', '.join(fields)}.")
    if not fields:
        return UsageError(f"{key} is not a field: choose +{key} to add it to {section}, which has none.")
    return UsageError(f"{key} is not a field: choose {', '.join(fields)}.")


def _resolved_parts(parts: Mapping[str, Part]) -> dict[str, Any]:
    """The values of all parts that hold interpolations (and of those they read)."""
    found = sum(_interpolations(part) for part in parts.values())
    if found > MOST_INTERPOLATIONS:
        raise UsageError(f"The settings hold {found} interpolations: choose at most {MOST_INTERPOLATIONS}.")
    reads: set[str] = set().union(*(_reads(part) for part in parts.values()))
    needed = tuple(part for part in parts.values() if ANYTHING in reads or part.key in reads or _reads(part))
    # What is read from elsewhere, the environment say, may change.
    return _resolved(needed) if reads <= parts.keys() else _resolved.__wrapped__(needed)


@functools.cache
def _reads(part: Part) -> frozenset[str]:
    """What the interpolations in a part read: top-level keys, ``oc.env`` or `ANYTHING`; empty without interpolation."""
    text = json.dumps(_value(part))
    names = [match[1] or match[2] for match in INTERPOLATION.finditer(text)]
    return frozenset(names if len(names) == text.count("${") else [ANYTHING])


@functools.cache
def _interpolations(part: Part) -> int:
    return json.dumps(_value(part)).count("${")


@functools.cache
def _resolved(parts: tuple[Part, ...]) -> dict[str, Any]:
    """Parts, by key, with the interpolations in them resolved among each other."""
    try:
        return _plain(OmegaConf.create({part.key: _value(part) for part in parts}), resolve=True)
    except RecursionError:
        raise UsageError("The settings cannot be resolved: interpolations read one another in a circle.") from None
    except OmegaConfBaseException as error:
        raise UsageError(f"{error.full_key} cannot be resolved: {_first_line(error)}.") from None


def _plain(config: DictConfig, *, resolve: bool = False) -> dict[str, Any]:
    values = OmegaConf.to_container(config, resolve=resolve)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _first_line(error: BaseException) -> str:
    return " ".join(str(error).split("\n")[0].split()).rstrip(".") or type(error).__name__
