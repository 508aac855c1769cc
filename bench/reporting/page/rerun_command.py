"""The command that makes an attempt like a row's."""

from __future__ import annotations

import functools
import json
import re
import shlex
from collections.abc import Mapping
from typing import Any

import yaml

from bench.config.run_id import ADDED_KNOB_DEFAULTS, DEFAULT_SETTLING_S, convert_earlier_strategy
from bench.core.installation import DATA_FOLDER
from bench.records import Record
from bench.records.matching import flatten_config

CONF_DIR = DATA_FOLDER / "conf"

CONFIG_GROUPS = ("model", "strategy", "precision", "optimizer", "finetune", "hardware")
"""Sections of a configuration that are chosen by the name of a file under ``conf``."""

OMITTED_FIELDS = {"hardware": {"sources", "speeds", "gpu_names"}}
"""Parts of a section that nobody types: of what really runs they change nothing."""

HF_OPTION_NAME = "hf"
"""Of the model whose shape a file says."""

UNQUOTED_TEXT = re.compile(r"[A-Za-z_][\w./-]*")
"""A text that needs no quotes in Hydra's grammar."""
OPTION_NAME = re.compile(r"[\w.-]{1,100}")
"""The name of an option's file."""
RESERVED_WORDS = {"true", "false", "null", "inf", "nan"}


def build_rerun_command(record: Record) -> str | None:
    """The command that makes an attempt like a row's; None for a row without a configuration.

    What is as the option files under ``conf`` say is left out. A configuration of a model, strategy or hardware that
    has no file there names it all the same: the file is the reader's to supply.
    """
    config = record.get("config")
    if not config:
        return None
    overrides = list_overrides(config, record.get("requested") or {})
    is_cluster_run = record.get("launcher") == "slurm"
    if config.get("mode") == "predict" or is_cluster_run:
        cluster_arguments = ["cluster=slurm"] if is_cluster_run else []
        arguments = ["python", "-m", "bench.sweep", *overrides, *cluster_arguments, "force=true"]
    else:
        arguments = ["python", "-m", "bench.run", *overrides]
    return " ".join(shlex.quote(argument) for argument in arguments)


def list_overrides(config: Mapping[str, Any], requested: Mapping[str, Any]) -> list[str]:
    """What to type for a configuration: the options' names, then every field that is not as they say.

    Parameters
    ----------
    config: mapping
        The complete configuration of a run, as its row has it.
    requested: mapping
        The strategy's knobs as they were asked for, which stand instead of what they were resolved to.
    """
    overrides = []
    strategy = convert_earlier_strategy({**(config.get("strategy") or {}), **requested})
    sections = {**config, **({"strategy": strategy} if strategy else {})}
    for group in CONFIG_GROUPS:
        section = sections.get(group) or {}
        if group == "model" and section.get("family") == HF_OPTION_NAME:  # which is named after its file
            overrides.append(f"{group}={HF_OPTION_NAME}")
        elif section.get("name") and section["name"] != ADDED_KNOB_DEFAULTS.get(group, {}).get("name"):
            is_hardware_file = group == "hardware" and not _load_option(group, str(section["name"]))
            overrides.append(f"{group}={section['name']}{'.yaml' if is_hardware_file else ''}")
    defaults = _load_option("", "config")
    device = str((config.get("hardware") or {}).get("device"))
    settling_defaults = {
        name: seconds_by_device.get(device, 0.0) for name, seconds_by_device in DEFAULT_SETTLING_S.items()
    }  # what null stands for
    defaults = {**defaults, "measurement": {**defaults.get("measurement", {}), **settling_defaults}}
    defaults["gradient_accumulation"] = 1  # what null stands for where no global batch is asked for
    for key, value in sections.items():
        if key in CONFIG_GROUPS:
            overrides += _list_section_overrides(key, json.dumps(value or {}))
        elif isinstance(value, Mapping):
            section_defaults = dict(defaults[key]) if isinstance(defaults.get(key), dict) else {}
            overrides += [
                f"{key}.{name}={format_override_value(field_value)}"
                for name, field_value in value.items()
                if field_value != section_defaults.get(name)
            ]
        elif key not in defaults or value != defaults[key]:
            overrides.append(f"{key}={format_override_value(value)}")
    if "gpus_per_node=8" in overrides:  # what every cluster that ships with the suite has
        overrides.remove("gpus_per_node=8")
    return overrides


@functools.lru_cache(maxsize=4096)
def _list_section_overrides(group: str, content: str) -> list[str]:
    """The fields of a section, given as JSON, that its option's file says otherwise, or does not have."""
    section = json.loads(content)
    is_from_file = group == "model" and section.get("family") == HF_OPTION_NAME
    option = _load_option(group, HF_OPTION_NAME if is_from_file else str(section.get("name")))
    if is_from_file:
        section |= section.pop("config")  # what the file says, and what was set instead, which are not told apart
    omitted_fields = {"name", *OMITTED_FIELDS.get(group, ())}
    option_values, section_values = flatten_config(option, omitted_fields), flatten_config(section, omitted_fields)
    if not option:  # nobody here knows its file
        return []
    overrides = []
    for path, value in section_values.items():
        if path in option_values:
            overrides += [] if option_values[path] == value else [f"{group}.{path}={format_override_value(value)}"]
        elif is_from_file:
            overrides.append(f"{group}.{path}={format_override_value(value)}")
        elif value is not None and ADDED_KNOB_DEFAULTS.get(group, {}).get(path) != value:
            overrides.append(f"+{group}.{path}={format_override_value(value)}")
    return overrides


@functools.cache
def _load_option(group: str, name: str) -> dict[str, Any]:
    """The option file of this name; empty where there is none."""
    if not OPTION_NAME.fullmatch(name):  # a row may say anything
        return {}
    file = CONF_DIR / group / f"{name}.yaml"
    return (yaml.safe_load(file.read_text(encoding="utf-8")) or {}) if file.is_file() else {}


def format_override_value(value: Any) -> str:
    """A plain value as it is typed after ``key=``; quoted where Hydra would read something else."""
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)
    text = str(value)
    if text.startswith("["):  # a list, as `flatten_config` writes it
        return text
    is_plain = UNQUOTED_TEXT.fullmatch(text) and text.lower() not in RESERVED_WORDS
    return text if is_plain else json.dumps(text, ensure_ascii=False)
