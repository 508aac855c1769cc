"""What is asked: the settings that are fixed, those that several values were given for, and how to answer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.config.compose import compose_config, list_override_values, parse_overrides
from bench.config.grid import RunSettings
from bench.core.command_line import require_path
from bench.core.errors import UsageError, invalid_value_error, require_choice
from bench.hardware.detect import DetectedDevice
from bench.planning.request import EXECUTION_KEYS, find_hardware_description

OUTPUT_FORMATS = ("table", "json", "csv")
TIMELINE_SUFFIXES = (".png", ".svg", ".json")
"""Endings of a timeline's file: two pictures, and a trace for chrome://tracing and ui.perfetto.dev."""

KNOB_KEYS = (
    "strategy",
    "precision",
    "activation_checkpointing",
    "batch_size_per_gpu",
    "gradient_accumulation",
    "compile",
)
"""Keys and groups that are ranked against each other; others with several values make a table each."""

DEFAULT_TABLE_ROWS = 20
"""Rows of a table unless asked for more."""


@dataclass(frozen=True)
class AdviceQuestion:
    """A command line of ``bench.predict``, read."""

    fixed_settings: RunSettings
    """Settings with one value that are no knobs, as typed."""
    section_axes: dict[str, list[str]]
    """Settings with several values that are no knobs: a table for each combination."""
    knobs: dict[str, list[str]]
    """Values of the knobs that were given; all others are varied."""
    tokens: float | None
    """Tokens to train on in all."""
    shows_details: bool
    timeline_path: Path | None
    output_format: str
    max_rows: int | None
    """Most rows of a table, None for all."""

    def list_sections(self) -> Iterator[RunSettings]:
        """The settings of every table."""
        for values in itertools.product(*self.section_axes.values()):
            yield {**self.fixed_settings, **dict(zip(self.section_axes, values, strict=True))}

    def format_heading(self, settings: RunSettings) -> str:
        """What tells a section from the others: ``gpus=16``."""
        keys = self.section_axes or [key for key in ("model", "gpus") if key in settings]
        return " ".join(f"{key}={settings[key]}" for key in keys) or "the default model"


def read_question(
    arguments: Sequence[str], option_values: dict[str, str | None], device: DetectedDevice
) -> AdviceQuestion:
    """Read a command line.

    Parameters
    ----------
    arguments: sequence of str
        Hydra overrides, and ``key=value`` for any key of `option_values`.
    option_values: dict
        How to answer (tokens, details, timeline, format, top), None where it was not said as an option.
    device: Device
        This machine's, for ``hardware=auto``.

    Raises
    ------
    UsageError
        On anything that cannot be asked.
    """
    chosen_options = dict(option_values)
    overrides = []
    for argument in arguments:
        key, separator, value = argument.partition("=")
        if separator and key in option_values:
            chosen_options[key] = value
        else:
            overrides.append(argument)
    values_by_key = _parse_overrides(overrides)
    if "hardware" not in values_by_key or values_by_key["hardware"] == ["auto"]:
        cluster_fields = compose_config({key: values[0] for key, values in values_by_key.items() if key == "cluster"})[
            "cluster"
        ]
        values_by_key["hardware"] = [cluster_fields.get("hardware") or find_hardware_description(device)]
    knobs = {key: values for key, values in values_by_key.items() if _extract_group(key) in KNOB_KEYS}
    return AdviceQuestion(
        fixed_settings={
            key: values[0] for key, values in values_by_key.items() if key not in knobs and len(values) == 1
        },
        section_axes={key: values for key, values in values_by_key.items() if key not in knobs and len(values) > 1},
        knobs=knobs,
        tokens=_parse_tokens(chosen_options.get("tokens")),
        shows_details=_parse_details(chosen_options.get("details")),
        timeline_path=_parse_timeline(chosen_options.get("timeline")),
        output_format=_parse_format(chosen_options.get("format")),
        max_rows=_parse_max_rows(chosen_options.get("top")),
    )


def _parse_overrides(overrides: list[str]) -> dict[str, list[str]]:
    """Key to values, as typed: several for ``gpus=8,16`` and for ``gpus=[8,16]``."""
    values_by_key: dict[str, list[str]] = {}
    for override in parse_overrides(overrides):
        key = override.key_or_group
        if _extract_group(key) in EXECUTION_KEYS and _extract_group(key) != "cluster":
            raise UsageError(
                f"{key} is no part of a prediction: leave it out, or predict a whole sweep with "
                "python -m bench.sweep sweep=NAME mode=predict."
            )
        if key == "mode" and list_override_values(override) != ["predict"]:
            raise invalid_value_error("mode", ",".join(list_override_values(override)), "predict, or leave it out")
        value = override.value()
        values = (
            [str(item) for item in value]
            if key == "gpus" and isinstance(value, list)
            else list_override_values(override)
        )
        if not values:
            raise invalid_value_error(key, "(nothing)", "at least one value")
        values_by_key[("+" if override.is_add() else "") + key] = list(dict.fromkeys(values))
    values_by_key.pop("mode", None)
    return values_by_key


def _extract_group(key: str) -> str:
    return key.lstrip("+").partition(".")[0]


def _parse_tokens(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise invalid_value_error("tokens", text, "a number above 0, for example 300e9")
    return value


def _parse_details(text: str | None) -> bool:
    require_choice("details", text or "false", ("true", "false"))
    return text == "true"


def _parse_timeline(text: str | None) -> Path | None:
    if text is None:
        return None
    path = require_path("timeline", text)
    if path.suffix not in TIMELINE_SUFFIXES:
        raise invalid_value_error("timeline", text or "''", f"a file that ends in {', '.join(TIMELINE_SUFFIXES)}")
    if not path.parent.is_dir():
        raise invalid_value_error("timeline", text, "a file in a folder that exists")
    return path


def _parse_format(text: str | None) -> str:
    require_choice("format", text or "table", OUTPUT_FORMATS)
    return text or "table"


def _parse_max_rows(text: str | None) -> int | None:
    if text is None:
        return DEFAULT_TABLE_ROWS
    if text == "all":
        return None
    if not text.isdecimal() or len(text) > 9 or int(text) < 1:
        raise invalid_value_error("top", text or "''", "a whole number of at least 1, or all")
    return int(text)
