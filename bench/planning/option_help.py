"""What can be typed as ``key=value``, in words: every field with its values, every group with its options."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from bench.config.documented_fields import MAIN_FILE, list_documented_fields, read_group_defaults
from bench.config.groups import list_config_groups, list_presets
from bench.config.measurement import Measurement
from bench.config.rehearsal import Rehearsal
from bench.config.run_config import RunConfig
from bench.core.errors import UsageError
from bench.core.option_files import find_option_file
from bench.core.precision import Precision
from bench.core.typed_config import (
    format_override_value,
    get_field_types,
    parse_type_hint,
    read_plain_yaml,
)
from bench.finetune import load_finetune
from bench.hardware import Hardware
from bench.launch.slurm.profile import SlurmProfile
from bench.models import load_family
from bench.optimizers import load_optimizer
from bench.planning.request import ExecutionOptions
from bench.strategies import load_strategy
from bench.tracking.base import load_tracker_class

WIDTH = 110
"""Columns of the help."""


def format_settings_help() -> str:
    """Every field of ``conf/config.yaml`` and every group, with values, defaults and what they mean."""
    hints = {**get_field_types(RunConfig), **get_field_types(ExecutionOptions)}
    hints |= {f"measurement.{name}": hint for name, hint in get_field_types(Measurement).items()}
    hints |= {f"rehearse.{name}": hint for name, hint in get_field_types(Rehearsal).items()}
    lines = ["settings (key=value; the default is in brackets):"]
    for key, default, comment in list_documented_fields(MAIN_FILE):
        values = parse_type_hint(hints[key]).description if key in hints else ""
        lines += _format_entry(f"{key} [{default}]", ": ".join(part for part in (comment, values) if part))
    lines += [
        "",
        "groups (GROUP=OPTION chooses one, GROUP.FIELD=VALUE sets a field of it; the default is in brackets):",
    ]
    defaults = read_group_defaults()
    for group, options in list_config_groups().items():
        lines += _format_entry(f"{group} [{defaults.get(group, '-')}]", ", ".join(options))
    lines += _format_entry("price", "also " + ", ".join(list_presets("price")))
    for group in list_config_groups():
        fields = dict(_describe_group_fields(group))
        if fields:
            lines += ["", f"fields of {group}:"]
            for name, (options_text, values) in fields.items():
                lines += _format_entry(f"{group}.{name}{options_text}", values)
    return "\n".join(lines)


def _describe_group_fields(group: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """Fields of a group's options: the options that have each, where not all do, and the values it takes."""
    options_by_field: dict[str, list[str]] = {}
    values_by_field: dict[str, str] = {}
    options = []
    for option in list_config_groups()[group]:
        values = read_plain_yaml(group, find_option_file(group, option))
        hints = _find_field_types(group, values) if values.get("launcher") != "local" else {}
        options.append(option)
        comments = {key: comment for key, _, comment in list_documented_fields(find_option_file(group, option))}
        for name in hints or values:
            if name in ("name", "family", "launcher", "defaults"):
                continue
            options_by_field.setdefault(name, []).append(option)
            description = parse_type_hint(hints[name]).description if name in hints else ""
            parts = [part for part in (comments.get(name), description) if part]
            values_by_field.setdefault(name, ": ".join(parts) or f"as {format_override_value(values.get(name))}")
    for name, having in options_by_field.items():
        shown = ", ".join(having[:4]) + (f" and {len(having) - 4} more" if len(having) > 4 else "")
        yield name, ("" if len(having) == len(options) else f" ({shown})", values_by_field[name])


def _find_field_types(group: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Types of the fields of an option, as its class declares them; empty where no class does."""
    name = str(values.get("name"))
    loaders: dict[str, Any] = {
        "model": lambda: load_family(str(values.get("family"))),
        "strategy": lambda: load_strategy(name),
        "optimizer": lambda: load_optimizer(name),
        "finetune": lambda: load_finetune(name),
        "tracker": lambda: load_tracker_class(name),
        "precision": lambda: Precision,
        "hardware": lambda: Hardware,
        "cluster": lambda: SlurmProfile,
    }
    try:
        return dict(get_field_types(loaders[group]())) if group in loaders else {}
    except UsageError:  # a plug-in that cannot be imported here
        return {}


def _format_entry(head: str, text: str) -> list[str]:
    """``head`` and what it is, wrapped, the text beginning in one column."""
    first, column = f"  {head}", 34
    gap = first.ljust(column) if len(first) < column - 1 else first + "  "
    wrapped = textwrap.wrap(gap + text, WIDTH, subsequent_indent=" " * column, break_long_words=False)
    return wrapped or [first]
