"""What a reader may rely on: the version, types and ranges of a row that was read from a file.

Whoever can write to a store can put anything there, and a row of another version or another tool is found sooner or
later. One that is not as this module says is left out as a whole, with a sentence that names the field and its value;
behind it nothing has to be checked again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from datetime import datetime
from typing import Any

from bench.core.files import NON_FINITE_NUMBERS, format_value
from bench.records.schema import (
    COLUMNS,
    EVIDENCE_KINDS,
    FORMAT_VERSION,
    MIN_STEPS_FOR_INTERVAL,
    MIN_STEPS_FOR_P95,
    OOM_PHASES,
    STATUSES,
    Record,
)

RUN_ID_PATTERN = re.compile(r"^[0-9a-f]{16}\Z")
TRACE_FILE_PATTERN = re.compile(r"^[0-9]+\.trace\.json\.gz\Z")

VOCABULARIES = {"evidence": EVIDENCE_KINDS, "status": STATUSES, "oom_phase": OOM_PHASES}
REQUIRED_COLUMNS = ("run_id", "evidence", "status", "started_at", "attempt")

COLUMNS_OF_AT_LEAST_ONE = frozenset(
    {
        "parameters",
        "sharding_factor",
        "world_size",
        "nodes",
        "batch_size_per_gpu",
        "sequence_length",
        "gradient_accumulation",
    }
)
SIGNED_COLUMNS = frozenset({"seed"})
"""Whole numbers that may be negative; the others are counts."""

POSITIVE_COLUMNS = frozenset(
    {
        "tflops_per_gpu",
        "hardware_tflops_per_gpu",
        "tokens_per_second_per_gpu",
        "step_time_median_s",
        "step_time_p95_s",
        "step_time_ci_low_s",
        "step_time_ci_high_s",
    }
)
MIN_POSITIVE_NUMBER, MAX_NUMBER = 1e-15, 1e15
"""Beyond these no time, rate or share is one; sums and logarithms of what lies between are finite."""

MAX_NESTING_DEPTH = 8
"""Levels of a nested part."""


# Version n -> n + 1. A reader of a later version applies these in order, so old rows stay readable.
UPGRADES: dict[int, Callable[[Record], Record]] = {}


def upgrade_record(record: Record) -> Record:
    """Bring a record of any known format version to `FORMAT_VERSION`.

    Raises
    ------
    ValueError
        If the object is not a record, or was written by a later version of the suite.
    """
    version = record.get("format") if isinstance(record, dict) else None
    if version.__class__ is not int or version < 1:
        raise ValueError("not a record: it has no whole number of at least 1 under 'format'")
    if version > FORMAT_VERSION:
        raise ValueError(f"format {version} is newer than this suite reads ({FORMAT_VERSION})")
    while version < FORMAT_VERSION:
        record = UPGRADES[version](record)
        version += 1
    return record


def check_record(record: Record) -> Record:
    """Bring a row that was read to the current format and check it, with numbers where texts stand for those that JSON
    does not have.

    Raises
    ------
    ValueError
        If it is no record, or of a later version; else naming the field, its value and what is valid.
    """
    record = upgrade_record(record)
    for name, check_column in _RECORD_CHECKS:
        value = record.get(name)
        if value is not None:
            record[name] = check_column(name, value)
    for name in REQUIRED_COLUMNS:
        if record.get(name) is None and not (name == "started_at" and record["evidence"] == "published"):
            raise ValueError(f"{name} is empty")
    if record["status"] == "oom" and record.get("oom_phase") is None:
        raise ValueError("oom_phase is empty, and status=oom")
    _drop_unsupported_intervals(record)
    return record


def _drop_unsupported_intervals(record: Record) -> None:
    """Earlier versions wrote intervals whatever the number of timed steps."""
    timed_steps = [len(rank["step_times_s"]) for rank in record.get("ranks") or [] if rank.get("step_times_s")]
    if timed_steps and min(timed_steps) < MIN_STEPS_FOR_P95:
        record["step_time_p95_s"] = None
        if min(timed_steps) < MIN_STEPS_FOR_INTERVAL:
            record["step_time_ci_low_s"] = record["step_time_ci_high_s"] = None


def _wrong_value_error(name: str, value: object, expected: str) -> ValueError:
    return ValueError(f"{name}={format_value(value)} is not {expected}")


# ---- columns


def _check_text(name: str, value: Any) -> Any:
    if value.__class__ is not str:
        raise _wrong_value_error(name, value, "a text")
    return value


def _check_vocabulary(name: str, value: Any) -> Any:
    if value.__class__ is not str or value not in VOCABULARIES[name]:
        raise _wrong_value_error(name, value, f"one of {', '.join(VOCABULARIES[name])}")
    return value


def _check_run_id(name: str, value: Any) -> Any:
    if value.__class__ is not str or not RUN_ID_PATTERN.match(value):
        raise _wrong_value_error(name, value, "a run's id (16 hexadecimal digits)")
    return value


def _check_boolean(name: str, value: Any) -> Any:
    if value.__class__ is not bool:
        raise _wrong_value_error(name, value, "true or false")
    return value


def _check_integer(name: str, value: Any) -> Any:
    minimum = 1 if name in COLUMNS_OF_AT_LEAST_ONE else -(2**63) if name in SIGNED_COLUMNS else 0
    if value.__class__ is not int or not minimum <= value < 2**63:
        raise _wrong_value_error(
            name, value, "a whole number" + ("" if name in SIGNED_COLUMNS else f" of at least {minimum}")
        )
    return value


def _check_any_number(name: str, value: Any) -> Any:
    value = NON_FINITE_NUMBERS.get(value, value) if value.__class__ is str else value
    if value.__class__ is not float and (value.__class__ is not int or abs(value) > MAX_NUMBER):
        raise _wrong_value_error(name, value, "a number")
    return float(value)


def _check_number(name: str, value: Any) -> Any:
    value = NON_FINITE_NUMBERS.get(value, value) if value.__class__ is str else value
    if value.__class__ not in (float, int):
        raise _wrong_value_error(name, value, "a number")
    if not (
        MIN_POSITIVE_NUMBER <= value <= MAX_NUMBER if name in POSITIVE_COLUMNS else -MAX_NUMBER <= value <= MAX_NUMBER
    ):
        raise _wrong_value_error(
            name, value, "a positive finite number" if name in POSITIVE_COLUMNS else "a finite number"
        )
    return float(value)


def _check_timestamp(name: str, value: Any) -> Any:
    try:
        datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise _wrong_value_error(name, value, "a time as ISO 8601 writes it") from None
    return value


def _check_trace_name(name: str, value: Any) -> Any:
    if value.__class__ is not str or not TRACE_FILE_PATTERN.match(value):
        raise _wrong_value_error(name, value, "the name of a trace beside its row")
    return value


# ---- nested parts


def _check_object(name: str, value: Any) -> Any:
    """A dictionary that is shown as it is, with numbers for the texts that stand for them."""
    if value.__class__ is not dict:
        raise _wrong_value_error(name, value, "an object")
    _check_nested_values(name, value, MAX_NESTING_DEPTH)
    return value


def _check_nested_values(name: str, section: dict[str, Any] | list[Any], remaining_depth: int) -> None:
    if not remaining_depth:
        raise ValueError(f"{name} is nested too deeply")
    for key, value in section.items() if section.__class__ is dict else enumerate(section):  # type: ignore[union-attr]
        kind = value.__class__
        if kind is dict or kind is list:
            _check_nested_values(f"{name}.{key}", value, remaining_depth - 1)
        elif kind is str and value in NON_FINITE_NUMBERS and key != "name":
            section[key] = NON_FINITE_NUMBERS[value]  # type: ignore[index]
        elif kind is int and not -(2**63) <= value < 2**64:
            raise _wrong_value_error(f"{name}.{key}", value, "a number of at most 64 bits")


def _check_fields(name: str, section: dict[str, Any], **checks: Callable[[str, Any], Any]) -> None:
    """Check fields of a section that may be there."""
    for key, check_field in checks.items():
        if section.get(key) is not None:
            section[key] = check_field(f"{name}.{key}", section[key])


def _check_finite(name: str, value: Any) -> Any:
    if value.__class__ not in (float, int) or not -MAX_NUMBER <= value <= MAX_NUMBER:
        raise _wrong_value_error(name, value, "a finite number")
    return value


def _check_count(name: str, value: Any) -> Any:
    if value.__class__ is not int or not 0 <= value < 2**63:
        raise _wrong_value_error(name, value, "a whole number of at least 0")
    return value


def _check_plain_value(name: str, value: Any) -> Any:
    if value.__class__ not in (str, int, float, bool):
        raise _wrong_value_error(name, value, "a plain value")
    return value


def _check_config(name: str, value: Any) -> Any:
    config = _check_object(name, value)
    for part in ("model", "strategy", "precision", "optimizer", "finetune", "hardware", "measurement"):
        if config.get(part) is not None and config[part].__class__ is not dict:
            raise _wrong_value_error(f"{name}.{part}", config[part], "an object")
    _check_fields(
        f"{name}.hardware", config.get("hardware") or {}, memory_gb=_check_finite, cpu_threads=_check_plain_value
    )
    _check_fields(f"{name}.measurement", config.get("measurement") or {}, steps=_check_plain_value)
    return config


def _check_environment(name: str, value: Any) -> Any:
    environment = _check_object(name, value)
    _check_fields(
        name,
        environment,
        topology=_check_text,
        packages=_check_object,
        variables=_check_object,
        devices=_check_object,
        slurm=_check_object,
    )
    for rank, device in (environment.get("devices") or {}).items():
        device_field = f"{name}.devices.{rank}"
        if device.__class__ is not dict:
            raise _wrong_value_error(device_field, device, "an object")
        _check_fields(
            device_field,
            device,
            memory_bytes=_check_finite,
            power_limit_w=_check_finite,
            sm_clock_max_mhz=_check_finite,
            threads=_check_finite,
        )
    return environment


def _check_flops(name: str, value: Any) -> Any:
    flops = _check_object(name, value)
    _check_fields(name, flops, model=_check_flop_count, hardware=_check_flop_count)
    return flops


def _check_flop_count(name: str, value: Any) -> Any:
    if value.__class__ not in (float, int) or not abs(value) < 1e30:
        raise _wrong_value_error(name, value, "a finite number")
    return value


def _check_losses(name: str, value: Any) -> Any:
    return [_check_any_number(name, loss) for loss in _require_list(name, value)]


def _require_list(name: str, value: Any) -> list[Any]:
    if value.__class__ is not list:
        raise _wrong_value_error(name, value, "a list")
    return value  # type: ignore[no-any-return]


def _check_objects(name: str, value: Any) -> Any:
    for index, item in enumerate(_require_list(name, value)):
        _check_object(f"{name}[{index}]", item)
    return value


_NUMBER_TYPES = {float, int}


def _check_times(name: str, value: Any) -> Any:
    times = _require_list(name, value)
    if not set(map(type, times)) <= _NUMBER_TYPES:
        raise ValueError(f"{name} holds something that is not a finite number")
    if times and not (min(times) >= 0 and max(times) <= MAX_NUMBER and all(map(math.isfinite, times))):
        raise _wrong_value_error(
            name, next(seconds for seconds in times if not 0 <= seconds <= MAX_NUMBER), "a time in seconds"
        )
    return times


def _check_step_times(name: str, value: Any) -> Any:
    times = _check_times(name, value)
    if times and not min(times) >= MIN_POSITIVE_NUMBER:
        raise _wrong_value_error(name, min(times), "a positive time in seconds")
    return times


def _check_spans(name: str, value: Any) -> Any:
    for span in _require_list(name, value):
        if len(_check_times(name, span)) != 2:
            raise _wrong_value_error(name, span, "a start and an end in seconds")
    return value


def _check_health(name: str, value: Any) -> Any:
    health = _check_object(name, value)
    _check_text(f"{name}.node", health.get("node"))
    return health


_RANK_FIELD_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "rank": _check_count,
    "host": _check_text,
    "status": _check_text,
    "step_times_s": _check_step_times,
    "busy_s": _check_times,
    "busy_spans_s": _check_spans,
    "setup_s": _check_finite,
    "peak_allocated_bytes": _check_count,
    "peak_reserved_bytes": _check_count,
    "peak_device_used_bytes": _check_count,
    "alloc_retries": _check_count,
    "health": _check_health,
}


def _check_ranks(name: str, value: Any) -> Any:
    for index, rank in enumerate(_require_list(name, value)):
        rank_field = f"{name}[{index}]"
        if rank.__class__ is not dict:
            raise _wrong_value_error(rank_field, rank, "an object")
        for field, check_field in _RANK_FIELD_CHECKS.items():
            if rank.get(field) is not None:
                check_field(f"{rank_field}.{field}", rank[field])
    return value


def _check_prediction(name: str, value: Any) -> Any:
    prediction = _check_object(name, value)
    _check_fields(name, prediction, memory=_check_memory, time=_check_time)
    return prediction


def _check_memory(name: str, value: Any) -> Any:
    memory = _check_object(name, value)
    for field in ("parts_bytes", "allocated_bytes", "reserved_bytes"):
        sizes = _check_object(f"{name}.{field}", memory.get(field, None))
        for part, size in sizes.items():
            _check_finite(f"{name}.{field}.{part}", size)
        if field != "parts_bytes" and "value" not in sizes:
            raise ValueError(f"{name}.{field}.value is missing")
    for field in ("capacity_bytes", "verdict"):
        if field not in memory:
            raise ValueError(f"{name}.{field} is missing")
    _check_fields(
        name, memory, capacity_bytes=_check_finite, verdict=_check_text, phase=_check_text, module=_check_text
    )
    return memory


def _check_time(name: str, value: Any) -> Any:
    time = _check_object(name, value)
    for field, seconds in time.items():
        if field.endswith("_s") and seconds.__class__ is not dict:
            _check_finite(f"{name}.{field}", seconds)
    return time


_CHECKS_BY_DTYPE: dict[str, Callable[[str, Any], Any]] = {
    "string": _check_text,
    "Int64": _check_integer,
    "Float64": _check_number,
    "boolean": _check_boolean,
}

_CHECKS_BY_COLUMN: dict[str, Callable[[str, Any], Any]] = {
    "run_id": _check_run_id,
    **dict.fromkeys(VOCABULARIES, _check_vocabulary),
    "started_at": _check_timestamp,
    "finished_at": _check_timestamp,
    "final_loss": _check_any_number,
    "trace": _check_trace_name,
}

_RECORD_CHECKS: tuple[tuple[str, Callable[[str, Any], Any]], ...] = (
    *((column.name, _CHECKS_BY_COLUMN.get(column.name, _CHECKS_BY_DTYPE[column.dtype])) for column in COLUMNS),
    ("config", _check_config),
    ("requested", _check_object),
    ("effective", _check_object),
    ("environment", _check_environment),
    ("flops", _check_flops),
    ("losses", _check_losses),
    ("prediction", _check_prediction),
    ("ranks", _check_ranks),
    ("concurrent", _check_objects),
    ("source", _check_object),
)
