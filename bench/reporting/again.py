"""How to run a row again: the command line that comes to the same configuration."""

from __future__ import annotations

import functools
import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from bench.identity import SETTLING_S
from bench.records import Record
from bench.records.matching import ADDED, leaves

CONF = Path(__file__).resolve().parents[2] / "conf"

GROUPS = ("model", "strategy", "precision", "optimizer", "finetune", "hardware")
"""Sections of a configuration that are chosen by the name of a file under ``conf``."""

NOT_TYPED = {"hardware": {"sources", "speeds", "gpu_names"}}
"""Parts of a section that nobody types: of what really runs they change nothing."""

PLAIN = re.compile(r"[A-Za-z_][\w./-]*")
"""A text that needs no quotes in Hydra's grammar."""
OPTION = re.compile(r"[\w.-]{1,100}")
"""The name of an option's file."""
NOT_TEXT = {"true", "false", "null", "inf", "nan"}


def command(record: Record) -> str | None:
    """The command that makes an attempt like a row's; None for a row without a configuration.

    What is as the option files under ``conf`` say is left out. A configuration of a model, strategy or hardware that
    has no file there names it all the same: the file is the reader's to supply.
    """
    config = record.get("config")
    if not config:
        return None
    settings = overrides(config, record.get("requested") or {})
    on_a_cluster = record.get("launcher") == "slurm"
    if config.get("mode") == "predict" or on_a_cluster:
        how = ["cluster=slurm"] if on_a_cluster else []
        words = ["python", "-m", "bench.sweep", *settings, *how, "force=true"]
    else:
        words = ["python", "-m", "bench.run", *settings]
    return " ".join(shlex.quote(word) for word in words)


def overrides(config: Mapping[str, Any], requested: Mapping[str, Any]) -> list[str]:
    """What to type for a configuration: the options' names, then every field that is not as they say.

    Parameters
    ----------
    config: mapping
        The complete configuration of a run, as its row has it.
    requested: mapping
        The strategy's knobs as they were asked for, which stand instead of what they were resolved to.
    """
    typed = []
    sections = {**config, **({"strategy": {**config.get("strategy", {}), **requested}} if requested else {})}
    for group in GROUPS:
        section = sections.get(group) or {}
        if section.get("name") and section["name"] != ADDED.get(f"{group}.name"):
            is_file = group == "hardware" and not _option(group, str(section["name"]))
            typed.append(f"{group}={section['name']}{'.yaml' if is_file else ''}")
    defaults = _option("", "config")
    device = str((config.get("hardware") or {}).get("device"))
    settling = {name: seconds.get(device, 0.0) for name, seconds in SETTLING_S.items()}  # what null stands for
    defaults = {**defaults, "measurement": {**defaults.get("measurement", {}), **settling}}
    for key, value in sections.items():
        if key in GROUPS:
            typed += _fields(key, json.dumps(value or {}))
        elif isinstance(value, Mapping):
            typed += [
                f"{key}.{name}={text(inner)}"
                for name, inner in value.items()
                if inner != defaults.get(key, {}).get(name)
            ]
        elif key not in defaults or value != defaults[key]:
            typed.append(f"{key}={text(value)}")
    if "gpus_per_node=8" in typed:  # what every cluster that ships with the suite has
        typed.remove("gpus_per_node=8")
    return typed


@functools.lru_cache(maxsize=4096)
def _fields(group: str, content: str) -> list[str]:
    """The fields of a section, given as JSON, that its option's file says otherwise, or does not have."""
    section = json.loads(content)
    option = _option(group, str(section.get("name")))
    left_out = {"name", *NOT_TYPED.get(group, ())}
    known, found = leaves(option, left_out), leaves(section, left_out)
    if not option:  # nobody here knows its file
        return []
    typed = []
    for path, value in found.items():
        if path in known:
            typed += [] if known[path] == value else [f"{group}.{path}={text(value)}"]
        elif value is not None and ADDED.get(f"{group}.{path}") != value:
            typed.append(f"+{group}.{path}={text(value)}")
    return typed


@functools.cache
def _option(group: str, name: str) -> dict[str, Any]:
    """The option file of this name; empty where there is none."""
    if not OPTION.fullmatch(name):  # a row may say anything
        return {}
    file = CONF / group / f"{name}.yaml"
    return (yaml.safe_load(file.read_text(encoding="utf-8")) or {}) if file.is_file() else {}


def text(value: Any) -> str:
    """A plain value as it is typed after ``key=``; quoted where Hydra would read something else."""
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)
    words = str(value)
    if words.startswith("["):  # a list, as `leaves` writes it
        return words
    plain = PLAIN.fullmatch(words) and words.lower() not in NOT_TEXT
    return words if plain else json.dumps(words, ensure_ascii=False)
