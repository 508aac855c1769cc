"""Which rows answer one question: does it fit, how long does a step take, and is it the same run, made again.

Pure functions.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from bench.config.run_id import ADDED_FIELD_DEFAULTS, ADDED_KNOB_DEFAULTS, get_added_strategy_knobs
from bench.core.units import GIB
from bench.records.schema import Record

ConfigKey = dict[str, Any]
"""What was asked, as path -> plain value (``strategy.sharding_factor`` -> 8). Equal questions are one question."""

SECTIONS_NOT_IN_KEY = frozenset({"mode", "repeat", "seed", "measurement", "requested", "hardware"})
"""Sections of a configuration that say how the answer was found, or on what: the hardware is looked at apart."""


def build_fit_key(record: Record) -> ConfigKey | None:
    """What is asked when it is asked whether a run fits.

    That is the whole configuration but for how the answer was found, and of the hardware only its kind and how much
    memory there is: the limit if one was set, else what the GPU is sold with. So a run rehearsed on a GPU of 141 GB
    with a limit of 80 GiB, one measured on an A100 of 80 GB and one predicted for it answer the same question. How
    many ranks share a machine is no part of it: sharding factors are resolved.

    Returns
    -------
    dict or None
        None where nothing says how much memory there is, and for rows without a configuration (published ones).
    """
    config_key, memory_gib = _build_config_key(record), get_memory_gib(record)
    if config_key is None or memory_gib is None:
        return None
    config_key.pop("gpus_per_node", None)
    return {**config_key, "device": record.get("device"), "memory_gib": memory_gib}


def build_step_time_key(record: Record) -> ConfigKey | None:
    """What is asked when it is asked how long a step takes: as in `build_fit_key`, and on which hardware.

    Hardware is the same if its description has the same name and leaves a rank the same threads and memory; what the
    description believes of its speeds is no part of the question. Whether the device is really the same is for the
    rows to say (``gpu_name``), since nothing ran for a prediction.

    Returns
    -------
    dict or None
        None for rows without a configuration.
    """
    config_key = _build_config_key(record)
    if config_key is None:
        return None
    hardware = record["config"].get("hardware") or {}
    return {
        **config_key,
        "device": record.get("device"),
        "hardware.name": record.get("hardware"),
        "hardware.cpu_threads": hardware.get("cpu_threads"),
        "hardware.memory_limit_bytes": record.get("memory_limit_bytes"),
    }


def build_run_key(record: Record) -> ConfigKey | None:
    """What is asked by a run that is made again after an upgrade, or on another machine.

    That is the whole configuration but for how the answer was found (repetition, seed, steps that are timed), the kind
    of device and the memory limit. Versions and commit are no part of a configuration. The machine is none either, how
    many ranks share one included: where it differs is for the rows to say.

    Returns
    -------
    dict or None
        None for rows without a configuration (published ones).
    """
    config_key = _build_config_key(record)
    if config_key is None:
        return None
    config_key.pop("gpus_per_node", None)
    return {**config_key, "device": record.get("device"), "memory_limit_bytes": record.get("memory_limit_bytes")}


def get_memory_gib(record: Record) -> float | None:
    """GiB a rank may use: the limit, or what a GPU is sold with (an "80 GB" card counts as 80); None if unknown."""
    limit = record.get("memory_limit_bytes")
    if limit is not None:
        return float(limit / GIB)
    nominal_gb = ((record.get("config") or {}).get("hardware") or {}).get("memory_gb")
    return None if nominal_gb is None else float(nominal_gb)


def encode_config_key(config_key: ConfigKey, *excluded_paths: str) -> str:
    """A question, without some of its paths, as a text that equal questions share."""
    return json.dumps({path: value for path, value in config_key.items() if path not in excluded_paths}, sort_keys=True)


def flatten_config(config: Mapping[str, Any], excluded_names: Collection[str] = ()) -> dict[str, Any]:
    """A nested configuration as path -> plain value, without the fields and sections of some names."""
    values_by_path: dict[str, Any] = {}
    for name, value in config.items():
        if name in excluded_names:
            continue
        if isinstance(value, Mapping):
            values_by_path |= {f"{name}.{path}": inner for path, inner in flatten_config(value, excluded_names).items()}
        else:
            values_by_path[name] = value if value is None or isinstance(value, str | int | float) else json.dumps(value)
    return values_by_path


def _build_config_key(record: Record) -> ConfigKey | None:
    """The configuration, without how the answer was found and without the hardware."""
    config = record.get("config")
    if not config:
        return None
    added_strategy_knobs = {
        f"strategy.{knob}": value for knob, value in get_added_strategy_knobs(config.get("strategy") or {}).items()
    }
    added_knobs = flatten_config(ADDED_KNOB_DEFAULTS, SECTIONS_NOT_IN_KEY)  # which older rows do not have
    return {
        **ADDED_FIELD_DEFAULTS,
        **added_knobs,
        **added_strategy_knobs,
        **flatten_config(config, SECTIONS_NOT_IN_KEY),
    }
