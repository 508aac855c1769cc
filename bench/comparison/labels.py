"""The words of a comparison: verdicts, quantities, and names of configurations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.core.units import GIB
from bench.records import Record

REGRESSION, IMPROVEMENT, NO_CHANGE, CANNOT_TELL = "regression", "improvement", "no change", "cannot tell"
VERDICTS = (REGRESSION, IMPROVEMENT, NO_CHANGE, CANNOT_TELL)


@dataclass(frozen=True)
class ComparedQuantity:
    """A column that is compared."""

    column: str
    title: str
    unit: str
    worse_direction: int
    """1 where more is worse, -1 where less is."""


STEP_TIME = ComparedQuantity("step_time_median_s", "step time", "s", 1)
TFLOPS = ComparedQuantity("tflops_per_gpu", "TFLOPS per GPU", "TFLOP/s", -1)
ALLOCATED = ComparedQuantity("peak_allocated_bytes", "allocated memory", "bytes", 1)
RESERVED = ComparedQuantity("peak_reserved_bytes", "reserved memory", "bytes", 1)
QUANTITIES = (STEP_TIME, TFLOPS, ALLOCATED, RESERVED)


def name_configurations(records: Sequence[Record], questions: Sequence[Mapping[str, Any]]) -> list[str]:
    """A short name for each configuration, given by one of its rows and by what it asks; no two are the same.

    Where the short names of two configurations are equal, what differs between their questions is added.
    """
    short_names = [_format_short_name(record) for record in records]
    questions_by_name: dict[str, list[Mapping[str, Any]]] = {}
    for name, question in zip(short_names, questions, strict=True):
        questions_by_name.setdefault(name, []).append(question)
    full_names = []
    for name, question in zip(short_names, questions, strict=True):
        same_named = questions_by_name[name]
        differing_paths = {
            path for twin in same_named for path in (*twin, *question) if twin.get(path) != question.get(path)
        }
        assignments = [
            f"{path.rpartition('.')[2]}={_format_plain_value(question.get(path))}" for path in sorted(differing_paths)
        ]
        full_names.append(" ".join([name, *assignments]))
    name_counts = Counter(full_names)
    seen_counts: Counter[str] = Counter()
    for position, name in enumerate(full_names):
        if name_counts[name] > 1:
            seen_counts[name] += 1
            full_names[position] = f"{name} #{seen_counts[name]}"
    return full_names


def _format_short_name(record: Record) -> str:
    """``t5_tiny fsdp/hybrid_shard F=2 fp32 4 ranks batch 4×64``, and what else is set to something uncommon."""
    strategy = record.get("effective_strategy") or record.get("strategy") or "strategy not stated"
    parts = [record.get("model") or "model not stated", strategy]
    factor, world_size = record.get("sharding_factor"), record.get("world_size")
    if factor is not None and world_size is not None and 1 < factor < world_size:
        parts.append(f"F={factor}")
    parts.append(record.get("precision") or "")
    if world_size is not None:
        parts.append(f"{world_size} rank{'' if world_size == 1 else 's'}")
    parts.append(f"batch {record.get('batch_size_per_gpu')}×{record.get('sequence_length')}")
    if (record.get("gradient_accumulation") or 1) > 1:
        parts.append(f"accumulation {record['gradient_accumulation']}")
    if record.get("activation_checkpointing") not in (None, "none"):
        parts.append(f"checkpointing {record['activation_checkpointing']}")
    if record.get("compile"):
        parts.append("compiled")
    if record.get("memory_limit_bytes") is not None:
        parts.append(f"limit {record['memory_limit_bytes'] / GIB:.3g} GiB")
    return " ".join(part for part in parts if part)


def _format_plain_value(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def format_percent(fraction: float, *, signed: bool = True) -> str:
    """``+3.1 %``; one decimal more below 1 %, where that is what matters."""
    if fraction == 0:
        return "0 %"
    digits = 1 if abs(fraction) >= 0.00995 else 2
    if not signed:
        return f"{100 * fraction:.{digits}f}".removesuffix("0").removesuffix(".") + " %"
    return f"{100 * fraction:+.{digits}f} %".replace("-", "−")
