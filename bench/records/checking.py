"""What a reader may rely on: the types and ranges of a row that was read from a file.

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

from bench.records.encoding import NOT_FINITE, shown
from bench.records.schema import (
    COLUMNS,
    EVIDENCE,
    PHASES,
    STATUSES,
    STEPS_FOR_INTERVAL,
    STEPS_FOR_P95,
    Record,
)

RUN_ID = re.compile(r"^[0-9a-f]{16}\Z")
TRACE_FILE = re.compile(r"^[0-9]+\.trace\.json\.gz\Z")

VOCABULARY = {"evidence": EVIDENCE, "status": STATUSES, "oom_phase": PHASES}
NEEDED = ("run_id", "evidence", "status", "started_at", "attempt")

AT_LEAST_ONE = frozenset(
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
ANY_SIGN = frozenset({"seed"})
"""Whole numbers that may be negative; the others are counts."""

POSITIVE = frozenset(
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
LEAST, MOST = 1e-15, 1e15
"""Beyond these no time, rate or share is one; sums and logarithms of what lies between are finite."""

DEEPEST = 8
"""Levels of a nested part."""


def check(record: Record) -> Record:
    """Check a row that was read, and put numbers where texts stand for those that JSON does not have.

    Raises
    ------
    ValueError
        Naming the field, its value and what is valid.
    """
    for name, expected in _CHECKS:
        value = record.get(name)
        if value is not None:
            record[name] = expected(name, value)
    for name in NEEDED:
        if record.get(name) is None and not (name == "started_at" and record["evidence"] == "published"):
            raise ValueError(f"{name} is empty")
    if record["status"] == "oom" and record.get("oom_phase") is None:
        raise ValueError("oom_phase is empty, and status=oom")
    _drop_what_too_few_steps_say(record)
    return record


def _drop_what_too_few_steps_say(record: Record) -> None:
    """Earlier versions wrote intervals whatever the number of timed steps."""
    steps = [len(rank["step_times_s"]) for rank in record.get("ranks") or [] if rank.get("step_times_s")]
    if steps and min(steps) < STEPS_FOR_P95:
        record["step_time_p95_s"] = None
        if min(steps) < STEPS_FOR_INTERVAL:
            record["step_time_ci_low_s"] = record["step_time_ci_high_s"] = None


def _wrong(name: str, value: object, valid: str) -> ValueError:
    return ValueError(f"{name}={shown(value)} is not {valid}")


# ---- columns


def _text(name: str, value: Any) -> Any:
    if value.__class__ is not str:
        raise _wrong(name, value, "a text")
    return value


def _word(name: str, value: Any) -> Any:
    if value.__class__ is not str or value not in VOCABULARY[name]:
        raise _wrong(name, value, f"one of {', '.join(VOCABULARY[name])}")
    return value


def _run_id(name: str, value: Any) -> Any:
    if value.__class__ is not str or not RUN_ID.match(value):
        raise _wrong(name, value, "a run's id (16 hexadecimal digits)")
    return value


def _truth(name: str, value: Any) -> Any:
    if value.__class__ is not bool:
        raise _wrong(name, value, "true or false")
    return value


def _whole(name: str, value: Any) -> Any:
    least = 1 if name in AT_LEAST_ONE else -(2**63) if name in ANY_SIGN else 0
    if value.__class__ is not int or not least <= value < 2**63:
        raise _wrong(name, value, "a whole number" + ("" if name in ANY_SIGN else f" of at least {least}"))
    return value


def _any_number(name: str, value: Any) -> Any:
    """NaN and infinity included."""
    value = NOT_FINITE.get(value, value) if value.__class__ is str else value
    if value.__class__ is not float and (value.__class__ is not int or abs(value) > MOST):
        raise _wrong(name, value, "a number")
    return float(value)


def _number(name: str, value: Any) -> Any:
    value = NOT_FINITE.get(value, value) if value.__class__ is str else value
    if value.__class__ not in (float, int):
        raise _wrong(name, value, "a number")
    if not (LEAST <= value <= MOST if name in POSITIVE else -MOST <= value <= MOST):
        raise _wrong(name, value, "a positive finite number" if name in POSITIVE else "a finite number")
    return float(value)


def _moment(name: str, value: Any) -> Any:
    try:
        datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise _wrong(name, value, "a time as ISO 8601 writes it") from None
    return value


def _trace(name: str, value: Any) -> Any:
    if value.__class__ is not str or not TRACE_FILE.match(value):
        raise _wrong(name, value, "the name of a trace beside its row")
    return value


# ---- nested parts


def _section(name: str, value: Any) -> Any:
    """A dictionary that is shown as it is, with numbers for the texts that stand for them."""
    if value.__class__ is not dict:
        raise _wrong(name, value, "an object")
    _walk(name, value, DEEPEST)
    return value


def _walk(name: str, section: dict[str, Any] | list[Any], deeper: int) -> None:
    if not deeper:
        raise ValueError(f"{name} is nested too deeply")
    for key, value in section.items() if section.__class__ is dict else enumerate(section):  # type: ignore[union-attr]
        kind = value.__class__
        if kind is dict or kind is list:
            _walk(f"{name}.{key}", value, deeper - 1)
        elif kind is str and value in NOT_FINITE and key != "name":
            section[key] = NOT_FINITE[value]  # type: ignore[index]
        elif kind is int and not -(2**63) <= value < 2**64:
            raise _wrong(f"{name}.{key}", value, "a number of at most 64 bits")


def _of(name: str, section: dict[str, Any], **expected: Callable[[str, Any], Any]) -> None:
    """Check fields of a section that may be there."""
    for key, check_field in expected.items():
        if section.get(key) is not None:
            section[key] = check_field(f"{name}.{key}", section[key])


def _finite(name: str, value: Any) -> Any:
    if value.__class__ not in (float, int) or not -MOST <= value <= MOST:
        raise _wrong(name, value, "a finite number")
    return value


def _count(name: str, value: Any) -> Any:
    if value.__class__ is not int or not 0 <= value < 2**63:
        raise _wrong(name, value, "a whole number of at least 0")
    return value


def _plain(name: str, value: Any) -> Any:
    if value.__class__ not in (str, int, float, bool):
        raise _wrong(name, value, "a plain value")
    return value


def _config(name: str, value: Any) -> Any:
    config = _section(name, value)
    for part in ("model", "strategy", "precision", "optimizer", "finetune", "hardware", "measurement"):
        if config.get(part) is not None and config[part].__class__ is not dict:
            raise _wrong(f"{name}.{part}", config[part], "an object")
    _of(f"{name}.hardware", config.get("hardware") or {}, memory_gb=_finite, cpu_threads=_plain)
    _of(f"{name}.measurement", config.get("measurement") or {}, steps=_plain)
    return config


def _environment(name: str, value: Any) -> Any:
    environment = _section(name, value)
    _of(name, environment, topology=_text, packages=_section, variables=_section, devices=_section, slurm=_section)
    for rank, device in (environment.get("devices") or {}).items():
        where = f"{name}.devices.{rank}"
        if device.__class__ is not dict:
            raise _wrong(where, device, "an object")
        _of(where, device, memory_bytes=_finite, power_limit_w=_finite, sm_clock_max_mhz=_finite, threads=_finite)
    return environment


def _flops(name: str, value: Any) -> Any:
    flops = _section(name, value)
    _of(name, flops, model=_plain_number, hardware=_plain_number)
    return flops


def _plain_number(name: str, value: Any) -> Any:
    if value.__class__ not in (float, int) or not abs(value) < 1e30:
        raise _wrong(name, value, "a finite number")
    return value


def _losses(name: str, value: Any) -> Any:
    return [_any_number(name, loss) for loss in _list(name, value)]


def _list(name: str, value: Any) -> list[Any]:
    if value.__class__ is not list:
        raise _wrong(name, value, "a list")
    return value  # type: ignore[no-any-return]


def _objects(name: str, value: Any) -> Any:
    for number, each in enumerate(_list(name, value)):
        _section(f"{name}[{number}]", each)
    return value


_NUMBERS = {float, int}


def _times(name: str, value: Any) -> Any:
    times = _list(name, value)
    if not set(map(type, times)) <= _NUMBERS:
        raise ValueError(f"{name} holds something that is not a finite number")
    if times and not (min(times) >= 0 and max(times) <= MOST and all(map(math.isfinite, times))):
        raise _wrong(name, next(t for t in times if not 0 <= t <= MOST), "a time in seconds")
    return times


def _step_times(name: str, value: Any) -> Any:
    times = _times(name, value)
    if times and not min(times) >= LEAST:
        raise _wrong(name, min(times), "a positive time in seconds")
    return times


def _spans(name: str, value: Any) -> Any:
    for span in _list(name, value):
        if len(_times(name, span)) != 2:
            raise _wrong(name, span, "a start and an end in seconds")
    return value


def _health(name: str, value: Any) -> Any:
    health = _section(name, value)
    _text(f"{name}.node", health.get("node"))
    return health


_RANK_FIELDS: dict[str, Callable[[str, Any], Any]] = {
    "rank": _count,
    "host": _text,
    "status": _text,
    "step_times_s": _step_times,
    "busy_s": _times,
    "busy_spans_s": _spans,
    "setup_s": _finite,
    "peak_allocated_bytes": _count,
    "peak_reserved_bytes": _count,
    "peak_device_used_bytes": _count,
    "alloc_retries": _count,
    "health": _health,
}


def _ranks(name: str, value: Any) -> Any:
    for number, rank in enumerate(_list(name, value)):
        where = f"{name}[{number}]"
        if rank.__class__ is not dict:
            raise _wrong(where, rank, "an object")
        for field, expected in _RANK_FIELDS.items():
            if rank.get(field) is not None:
                expected(f"{where}.{field}", rank[field])
    return value


def _prediction(name: str, value: Any) -> Any:
    prediction = _section(name, value)
    _of(name, prediction, memory=_memory, time=_time)
    return prediction


def _memory(name: str, value: Any) -> Any:
    memory = _section(name, value)
    for field in ("parts_bytes", "allocated_bytes", "reserved_bytes"):
        sizes = _section(f"{name}.{field}", memory.get(field, None))
        for part, size in sizes.items():
            _finite(f"{name}.{field}.{part}", size)
        if field != "parts_bytes" and "value" not in sizes:
            raise ValueError(f"{name}.{field}.value is missing")
    for field in ("capacity_bytes", "verdict"):
        if field not in memory:
            raise ValueError(f"{name}.{field} is missing")
    _of(name, memory, capacity_bytes=_finite, verdict=_text, phase=_text, module=_text)
    return memory


def _time(name: str, value: Any) -> Any:
    time = _section(name, value)
    for field, seconds in time.items():
        if field.endswith("_s") and seconds.__class__ is not dict:
            _finite(f"{name}.{field}", seconds)
    return time


_BY_DTYPE: dict[str, Callable[[str, Any], Any]] = {
    "string": _text,
    "Int64": _whole,
    "Float64": _number,
    "boolean": _truth,
}

_OWN: dict[str, Callable[[str, Any], Any]] = {
    "run_id": _run_id,
    **dict.fromkeys(VOCABULARY, _word),
    "started_at": _moment,
    "finished_at": _moment,
    "final_loss": _any_number,
    "trace": _trace,
}

_CHECKS: tuple[tuple[str, Callable[[str, Any], Any]], ...] = (
    *((column.name, _OWN.get(column.name, _BY_DTYPE[column.dtype])) for column in COLUMNS),
    ("config", _config),
    ("requested", _section),
    ("effective", _section),
    ("environment", _environment),
    ("flops", _flops),
    ("losses", _losses),
    ("prediction", _prediction),
    ("ranks", _ranks),
    ("concurrent", _objects),
    ("source", _section),
)
