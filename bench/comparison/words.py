"""The words of a comparison: verdicts, quantities, and names of configurations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.records import Record

REGRESSION, IMPROVEMENT, NO_CHANGE, CANNOT_TELL = "regression", "improvement", "no change", "cannot tell"
VERDICTS = (REGRESSION, IMPROVEMENT, NO_CHANGE, CANNOT_TELL)

GIB = 2**30


@dataclass(frozen=True)
class Quantity:
    """A column that is compared."""

    column: str
    title: str
    unit: str
    worse: int
    """1 where more is worse, -1 where less is."""


TIME = Quantity("step_time_median_s", "step time", "s", 1)
TFLOPS = Quantity("tflops_per_gpu", "TFLOPS per GPU", "TFLOP/s", -1)
ALLOCATED = Quantity("peak_allocated_bytes", "allocated memory", "bytes", 1)
RESERVED = Quantity("peak_reserved_bytes", "reserved memory", "bytes", 1)
QUANTITIES = (TIME, TFLOPS, ALLOCATED, RESERVED)


def names(records: Sequence[Record], questions: Sequence[Mapping[str, Any]]) -> list[str]:
    """A short name for each configuration, given by one of its rows and by what it asks; no two are the same.

    Where the short names of two configurations are equal, what differs between their questions is added.
    """
    short = [_short(record) for record in records]
    alike: dict[str, list[Mapping[str, Any]]] = {}
    for name, question in zip(short, questions, strict=True):
        alike.setdefault(name, []).append(question)
    found = []
    for name, question in zip(short, questions, strict=True):
        twins = alike[name]
        paths = {path for twin in twins for path in (*twin, *question) if twin.get(path) != question.get(path)}
        told = [f"{path.rpartition('.')[2]}={_plain(question.get(path))}" for path in sorted(paths)]
        found.append(" ".join([name, *told]))
    again = Counter(found)
    seen: Counter[str] = Counter()
    for position, name in enumerate(found):
        if again[name] > 1:
            seen[name] += 1
            found[position] = f"{name} #{seen[name]}"
    return found


def _short(record: Record) -> str:
    """``t5_tiny fsdp/hybrid_shard F=2 fp32 4 ranks batch 4×64``, and what else is set to something uncommon."""
    how = record.get("effective_strategy") or record.get("strategy") or "strategy not stated"
    words = [record.get("model") or "model not stated", how]
    factor, world_size = record.get("sharding_factor"), record.get("world_size")
    if factor is not None and world_size is not None and 1 < factor < world_size:
        words.append(f"F={factor}")
    words.append(record.get("precision") or "")
    if world_size is not None:
        words.append(f"{world_size} rank{'' if world_size == 1 else 's'}")
    words.append(f"batch {record.get('batch_size_per_gpu')}×{record.get('sequence_length')}")
    if (record.get("gradient_accumulation") or 1) > 1:
        words.append(f"accumulation {record['gradient_accumulation']}")
    if record.get("activation_checkpointing") not in (None, "none"):
        words.append(f"checkpointing {record['activation_checkpointing']}")
    if record.get("compile"):
        words.append("compiled")
    if record.get("memory_limit_bytes") is not None:
        words.append(f"limit {record['memory_limit_bytes'] / GIB:.3g} GiB")
    return " ".join(word for word in words if word)


def _plain(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def percent(fraction: float, *, signed: bool = True) -> str:
    """``+3.1 %``; one decimal more below 1 %, where that is what matters."""
    if fraction == 0:
        return "0 %"
    digits = 1 if abs(fraction) >= 0.00995 else 2
    if not signed:
        return f"{100 * fraction:.{digits}f}".removesuffix("0").removesuffix(".") + " %"
    return f"{100 * fraction:+.{digits}f} %".replace("-", "−")
