"""What is asked: the settings that are fixed, those that several values were given for, and how to answer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.errors import UsageError, bad_value, require_choice
from bench.hardware.detect import Device
from bench.paths import require_path
from bench.planning.compose import composed, parse, values_of
from bench.planning.grid import Settings
from bench.planning.request import EXECUTION, description_of

FORMATS = ("table", "json", "csv")
PICTURES = (".png", ".svg", ".json")
"""Endings of a timeline's file: two pictures, and a trace for chrome://tracing and ui.perfetto.dev."""

KNOBS = ("strategy", "precision", "activation_checkpointing", "batch_size_per_gpu", "gradient_accumulation", "compile")
"""Keys and groups that are ranked against each other; others with several values make a table each."""

SHOWN = 20
"""Rows of a table unless asked for more."""


@dataclass(frozen=True)
class Question:
    """A command line of ``bench.predict``, read."""

    fixed: Settings
    """Settings with one value that are no knobs, as typed."""
    tables: dict[str, list[str]]
    """Settings with several values that are no knobs: a table for each combination."""
    knobs: dict[str, list[str]]
    """Values of the knobs that were given; all others are varied."""
    tokens: float | None
    """Tokens to train on in all."""
    details: bool
    timeline: Path | None
    format: str
    top: int | None
    """Most rows of a table, None for all."""

    def sections(self) -> Iterator[Settings]:
        """The settings of every table."""
        for values in itertools.product(*self.tables.values()):
            yield {**self.fixed, **dict(zip(self.tables, values, strict=True))}

    def heading(self, settings: Settings) -> str:
        """What tells a section from the others: ``gpus=16``."""
        keys = self.tables or [key for key in ("model", "gpus") if key in settings]
        return " ".join(f"{key}={settings[key]}" for key in keys) or "the default model"


def read_question(arguments: Sequence[str], own: dict[str, str | None], device: Device) -> Question:
    """Read a command line.

    Parameters
    ----------
    arguments: sequence of str
        Hydra overrides, and ``key=value`` for any key of `own`.
    own: dict
        How to answer (tokens, details, timeline, format, top), None where it was not said as an option.
    device: Device
        This machine's, for ``hardware=auto``.

    Raises
    ------
    UsageError
        On anything that cannot be asked.
    """
    said = dict(own)
    overrides = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if equals and key in own:
            said[key] = value
        else:
            overrides.append(argument)
    given = _given(overrides)
    if "hardware" not in given or given["hardware"] == ["auto"]:
        cluster = composed({key: values[0] for key, values in given.items() if key == "cluster"})["cluster"]
        given["hardware"] = [cluster.get("hardware") or description_of(device)]
    knobs = {key: values for key, values in given.items() if _section(key) in KNOBS}
    return Question(
        fixed={key: values[0] for key, values in given.items() if key not in knobs and len(values) == 1},
        tables={key: values for key, values in given.items() if key not in knobs and len(values) > 1},
        knobs=knobs,
        tokens=_tokens(said.get("tokens")),
        details=_details(said.get("details")),
        timeline=_timeline(said.get("timeline")),
        format=_format(said.get("format")),
        top=_top(said.get("top")),
    )


def _given(overrides: list[str]) -> dict[str, list[str]]:
    """Key to values, as typed: several for ``gpus=8,16`` and for ``gpus=[8,16]``."""
    given: dict[str, list[str]] = {}
    for override in parse(overrides):
        key = override.key_or_group
        if _section(key) in EXECUTION and _section(key) != "cluster":
            raise UsageError(
                f"{key} is no part of a prediction: leave it out, or predict a whole sweep with "
                "python -m bench.sweep sweep=NAME mode=predict."
            )
        if key == "mode" and values_of(override) != ["predict"]:
            raise bad_value("mode", ",".join(values_of(override)), "predict, or leave it out")
        value = override.value()
        values = [str(item) for item in value] if key == "gpus" and isinstance(value, list) else values_of(override)
        if not values:
            raise bad_value(key, "(nothing)", "at least one value")
        given[("+" if override.is_add() else "") + key] = list(dict.fromkeys(values))
    given.pop("mode", None)
    return given


def _section(key: str) -> str:
    return key.lstrip("+").partition(".")[0]


def _tokens(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise bad_value("tokens", text, "a number above 0, for example 300e9")
    return value


def _details(text: str | None) -> bool:
    require_choice("details", text or "false", ("true", "false"))
    return text == "true"


def _timeline(text: str | None) -> Path | None:
    if text is None:
        return None
    path = require_path("timeline", text)
    if path.suffix not in PICTURES:
        raise bad_value("timeline", text or "''", f"a file that ends in {', '.join(PICTURES)}")
    if not path.parent.is_dir():
        raise bad_value("timeline", text, "a file in a folder that exists")
    return path


def _format(text: str | None) -> str:
    require_choice("format", text or "table", FORMATS)
    return text or "table"


def _top(text: str | None) -> int | None:
    if text is None:
        return SHOWN
    if text == "all":
        return None
    if not text.isdecimal() or len(text) > 9 or int(text) < 1:
        raise bad_value("top", text or "''", "a whole number of at least 1, or all")
    return int(text)
