"""Traces, recorded once and remembered, and the scaled traces that are made from them."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from bench.core import processes
from bench.core.progress import track_progress
from bench.hardware import Hardware
from bench.models.base import NONE
from bench.prediction import cache
from bench.prediction.cache import build_cache_key
from bench.prediction.trace.fake_process_group import keep_process_group
from bench.prediction.trace.scaled_trace import ScaledTrace, build_scaled_trace
from bench.prediction.trace.stage_trace import StageTraceKey, trace_stage
from bench.prediction.trace.trace import (
    Trace,
    TraceKey,
    trace_from_plain,
    trace_to_plain,
)
from bench.prediction.trace.trace_recorder import trace_step

MIN_TRACES_FOR_PROCESSES = 4
"""Traces from which on it pays to share the work among processes."""


def record_trace(key: TraceKey | StageTraceKey, batch_size: int) -> Trace:
    """Of a model, or of one stage of it."""
    return trace_stage(key, batch_size) if isinstance(key, StageTraceKey) else trace_step(key, batch_size)


_loaded_traces: dict[tuple[TraceKey | StageTraceKey, int], Trace] = {}

_failed_traces: dict[tuple[TraceKey | StageTraceKey, int], tuple[Exception, TracebackType | None]] = {}
"""What cannot be traced is not tried again for each of the thousand runs that have it."""


def load_traces(needed_traces: list[tuple[TraceKey | StageTraceKey, int]]) -> None:
    """Have every trace in memory: those remembered, and the others made anew.

    Raises
    ------
    Exception
        Whatever the model raised, also if that was an earlier time.
    """
    for key_and_size in needed_traces:
        if key_and_size in _failed_traces:
            error, raised_in = _failed_traces[key_and_size]
            raise error.with_traceback(raised_in)  # not the frames of each time it was raised
    missing_traces = {
        build_cache_key(repr(key_and_size), key_and_size[0]): key_and_size
        for key_and_size in needed_traces
        if key_and_size not in _loaded_traces
    }
    for name, plain in cache.read_entries("trace", missing_traces).items():
        _loaded_traces[missing_traces.pop(name)] = trace_from_plain(plain)
    if not missing_traces:
        return
    groups = _group_by_shapes(missing_traces.values())
    num_workers = min(os.cpu_count() or 1, len(groups))
    if processes.needs_isolation() or (num_workers > 1 and len(missing_traces) >= MIN_TRACES_FOR_PROCESSES):
        _preload_for_workers([key for key, _ in missing_traces.values()])
        with processes.open_worker_pool(num_workers) as pool:
            futures = [pool.submit(_record_group, group) for group in groups]
            outcomes = _collect_outcomes(groups, (future.result() for future in futures))
    else:
        outcomes = _collect_outcomes(groups, map(_record_group, groups))
    new_traces = [_unwrap_outcome(key_and_size, outcomes[key_and_size]) for key_and_size in missing_traces.values()]
    _loaded_traces.update(zip(missing_traces.values(), new_traces, strict=True))
    cache.write_entries(
        "trace", {name: trace_to_plain(trace) for name, trace in zip(missing_traces, new_traces, strict=True)}
    )


def _group_by_shapes(
    keys_and_sizes: Iterable[tuple[TraceKey | StageTraceKey, int]],
) -> list[list[tuple[TraceKey | StageTraceKey, int]]]:
    """Traces that differ in what is checkpointed alone, or in which stage of the model they are of: what an operator
    makes of some shapes is worked out once by each process, and takes as long as the rest of a trace."""
    groups: dict[Any, list[tuple[TraceKey | StageTraceKey, int]]] = {}
    for key, size in keys_and_sizes:
        trace_key = key.trace_key if isinstance(key, StageTraceKey) else key
        common_key = dataclasses.replace(trace_key, activation_checkpointing=NONE)
        groups.setdefault((type(key), common_key, size), []).append((key, size))
    return list(groups.values())


def _record_group(group: list[tuple[TraceKey | StageTraceKey, int]]) -> list[Trace | Exception]:
    """Each trace, or what was raised instead."""
    outcomes: list[Trace | Exception] = []
    with keep_process_group():
        for key, size in group:
            try:
                outcomes.append(record_trace(key, size))
            except Exception as error:  # whatever the model raised
                outcomes.append(error)
    return outcomes


def _collect_outcomes(
    groups: list[list[tuple[TraceKey | StageTraceKey, int]]], outcomes_by_group: Iterable[list[Trace | Exception]]
) -> dict[tuple[TraceKey | StageTraceKey, int], Trace | Exception]:
    return {
        key_and_size: outcome
        for group, outcomes in zip(groups, track_progress(outcomes_by_group, len(groups), "tracing"), strict=True)
        for key_and_size, outcome in zip(group, outcomes, strict=True)
    }


def _unwrap_outcome(key_and_size: tuple[TraceKey | StageTraceKey, int], outcome: Trace | Exception) -> Trace:
    if isinstance(outcome, Exception):
        _failed_traces[key_and_size] = outcome, outcome.__traceback__
        raise outcome
    return outcome


def _preload_for_workers(keys: Iterable[TraceKey | StageTraceKey]) -> None:
    """Import what models are built from once, before the processes are forked that build them."""
    families = {(key.trace_key if isinstance(key, StageTraceKey) else key).family for key in keys}
    processes.preload_if_forking(sorted({module for family in families for module in family.preload_modules}))


def get_loaded_traces() -> dict[tuple[TraceKey | StageTraceKey, int], Trace]:
    return _loaded_traces


def add_loaded_traces(traces: dict[tuple[TraceKey | StageTraceKey, int], Trace]) -> None:
    """Have the traces of another process in memory."""
    _loaded_traces.update(traces)


@functools.lru_cache(maxsize=256)
def load_scaled_trace(key: TraceKey | StageTraceKey, batch_sizes: tuple[int, int]) -> ScaledTrace:
    """The trace at any batch size, from two traces (or one)."""
    load_traces([(key, size) for size in dict.fromkeys(batch_sizes)])
    trace_key = key.trace_key if isinstance(key, StageTraceKey) else key
    first, second = (_loaded_traces[key, batch_size] for batch_size in batch_sizes)
    return build_scaled_trace(first, second, batch_sizes, trace_key.block_period)


class HashableHardware:
    """Hardware as far as kernels' times depend on it: compared by its numbers, since it cannot be hashed itself."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self._speed_key = repr((hardware.peak_tflops, hardware.memory_bandwidth_gb_s, hardware.speeds))

    def __hash__(self) -> int:
        return hash(self._speed_key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HashableHardware) and self._speed_key == other._speed_key
