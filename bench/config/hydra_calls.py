"""What Hydra does: it reads overrides, and composes the options that are chosen. The only file that calls Hydra."""

from __future__ import annotations

import functools
import json
import math
import re
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override, RangeSweep
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bench.config.groups import HARDWARE_GROUP, list_config_groups, require_group_option
from bench.core.errors import UsageError, invalid_value_error, shorten_text, suggest_nearest
from bench.core.option_files import CONF_FOLDER, list_conf_folders
from bench.hardware.derived import LIKE_PREFIX

ESCAPED_LIKE_PREFIX = LIKE_PREFIX.replace(":", "\\:")

FIXED_FIELDS = {"precision.name": "precision=NAME, or fields of it"}
"""Fields that say which option was chosen, and so cannot say something else; what to choose instead."""

EXTENSIBLE_GROUPS = ("model", "strategy", "hardware")
"""Groups that take fields of one's own with ``+``: a plug-in's, or the peak of another format."""

MAX_AXIS_VALUES = 100_000
"""Of one axis on a command line."""

OPTION_LIST_PATTERN = re.compile(r"""(cluster\.(?:sbatch|srun))=\[(-[^'"\\\[\]]*)\]""")
"""A list of another command's options, none of them in quotes."""


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
        top_level_fields = list(compose_choices(()))
        is_top_level_field = section in top_level_fields and not field
        raise UsageError(
            f"+{key} is not valid: choose {key} without the +."
            if is_top_level_field
            else (
                f"{key} is not a field: choose {', '.join(top_level_fields)}, or +group.field for a group of "
                f"{EXTENSIBLE_GROUPS}{suggest_nearest(key, top_level_fields)}."
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
            require_group_option(override.key_or_group, str(value))


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


@functools.cache
def parse_override(text: str) -> Override:
    return parse_overrides([text])[0]


def get_top_level_key(override: Override) -> str:
    return override.key_or_group.partition(".")[0]


@functools.cache
def compose_choices(choices: tuple[str, ...]) -> dict[str, Any]:
    """What Hydra makes of some choices, in tens of milliseconds: plain values, interpolations unresolved."""
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF_FOLDER), version_base="1.3"):
            return to_plain_dict(compose("config", overrides=[*choices, *_build_search_path_overrides()]))
    except (HydraException, OmegaConfBaseException) as error:
        raise UsageError(f"{format_first_line(error)}.") from None


def _build_search_path_overrides() -> list[str]:
    """What has Hydra look for options in the other folders, too, after the suite's."""
    folders = [json.dumps(f"file://{folder}") for folder in list_conf_folders()[1:]]
    return [f"hydra.searchpath=[{','.join(folders)}]"] if folders else []


def to_plain_dict(config: DictConfig, *, resolve: bool = False) -> dict[str, Any]:
    values = OmegaConf.to_container(config, resolve=resolve)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def format_first_line(error: BaseException) -> str:
    return " ".join(str(error).split("\n")[0].split()).rstrip(".") or type(error).__name__
