"""Traces, recorded once and remembered, and the scaled traces that are made from them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

from bench.core import processes
from bench.core.progress import track_progress
from bench.hardware import Hardware
from bench.models.base import NONE
from bench.prediction import cache
from bench.prediction.cache import build_cache_key
from bench.prediction.trace.kernels import WIDE_BATCH
from bench.prediction.trace.resized_trace import can_resize, resize_trace
from bench.prediction.trace.scaled_trace import ScaledTrace, build_scaled_trace
from bench.prediction.trace.trace import (
    Trace,
    TraceKey,
    trace_from_plain,
    trace_to_plain,
)
from bench.prediction.trace.traced_blocks import StageTraceKey

MIN_TRACES_FOR_PROCESSES = 4
"""Traces to record from which on it pays to share the work among processes."""


KeyAndSize = tuple[TraceKey | StageTraceKey, int]
"""What is traced, and the batch size."""


def record_trace(key: TraceKey | StageTraceKey, batch_size: int) -> Trace:
    """Of a model, or of one stage of it."""
    from bench.prediction.trace.stage_trace import trace_stage
    from bench.prediction.trace.step_trace import trace_step

    return trace_stage(key, batch_size) if isinstance(key, StageTraceKey) else trace_step(key, batch_size)


def record_traces(key: TraceKey | StageTraceKey, batch_sizes: Sequence[int]) -> dict[int, Trace]:
    """The trace of each batch size: of one wide batch, from which those of others follow where they do."""
    traces: dict[int, Trace] = {}
    sizes_to_derive = [size for size in batch_sizes if size > 1]
    if len(sizes_to_derive) > 1 and can_resize(_get_trace_key(key)):
        wide_trace = record_trace(key, WIDE_BATCH)
        resized_traces = {size: resize_trace(wide_trace, size) for size in sizes_to_derive}
        traces = {size: trace for size, trace in resized_traces.items() if trace is not None}
    return traces | {size: record_trace(key, size) for size in batch_sizes if size not in traces}


def _get_trace_key(key: TraceKey | StageTraceKey) -> TraceKey:
    return key.trace_key if isinstance(key, StageTraceKey) else key


_loaded_traces: dict[KeyAndSize, Trace] = {}

_failed_traces: dict[KeyAndSize, tuple[Exception, TracebackType | None]] = {}
"""What cannot be traced is not tried again for each of the thousand runs that have it."""


def load_traces(needed_traces: list[KeyAndSize]) -> None:
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
    num_recorded = sum(map(len, groups))
    num_workers = min(processes.count_workers(), num_recorded)
    if processes.needs_isolation() or (num_workers > 1 and num_recorded >= MIN_TRACES_FOR_PROCESSES):
        _preload_for_workers([key for key, _ in missing_traces.values()])
        groups = _share_groups(groups, num_workers)
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


TraceGroup = list[tuple[TraceKey | StageTraceKey, tuple[int, ...]]]
"""Traces that one process records, each at some batch sizes."""


def _group_by_shapes(keys_and_sizes: Iterable[KeyAndSize]) -> list[TraceGroup]:
    """Traces that differ in what is checkpointed alone, or in which stage of the model they are of: what an operator
    makes of some shapes is worked out once by each process, and takes as long as the rest of a trace."""
    sizes_by_key: dict[TraceKey | StageTraceKey, list[int]] = {}
    for key, size in keys_and_sizes:
        sizes_by_key.setdefault(key, []).append(size)
    groups: dict[Any, TraceGroup] = {}
    for key, sizes in sizes_by_key.items():
        trace_key = _get_trace_key(key)
        common_key = dataclasses.replace(trace_key, activation_checkpointing=NONE)
        for shared_sizes in [tuple(sizes)] if can_resize(trace_key) else [(size,) for size in sizes]:
            groups.setdefault((type(key), common_key, shared_sizes), []).append((key, shared_sizes))
    return list(groups.values())


def _share_groups(groups: list[TraceGroup], num_workers: int) -> list[TraceGroup]:
    """Where there are fewer groups than workers, each in several parts."""
    num_parts = -(-num_workers // len(groups))
    return [group[part::num_parts] for group in groups for part in range(min(num_parts, len(group)))]


def _record_group(group: TraceGroup) -> dict[KeyAndSize, Trace | Exception]:
    """Each trace, or what was raised instead."""
    from bench.prediction.trace.fake_process_group import keep_process_group

    outcomes: dict[KeyAndSize, Trace | Exception] = {}
    with keep_process_group():
        for key, sizes in group:
            try:
                outcomes |= {(key, size): trace for size, trace in record_traces(key, sizes).items()}
            except Exception as error:  # whatever the model raised
                outcomes |= {(key, size): error for size in sizes}
    return outcomes


def _collect_outcomes(
    groups: list[TraceGroup], outcomes_by_group: Iterable[dict[KeyAndSize, Trace | Exception]]
) -> dict[KeyAndSize, Trace | Exception]:
    outcomes: dict[KeyAndSize, Trace | Exception] = {}
    for group_outcomes in track_progress(outcomes_by_group, len(groups), "tracing"):
        outcomes |= group_outcomes
    return outcomes


def _unwrap_outcome(key_and_size: KeyAndSize, outcome: Trace | Exception) -> Trace:
    if isinstance(outcome, Exception):
        _failed_traces[key_and_size] = outcome, outcome.__traceback__
        raise outcome
    return outcome


def _preload_for_workers(keys: Iterable[TraceKey | StageTraceKey]) -> None:
    """Import what models are built from once, before the processes are forked that build them."""
    families = {_get_trace_key(key).family for key in keys}
    models = sorted({module for family in families for module in family.preload_modules})
    processes.preload_if_forking([*models, "bench.prediction.trace.stage_trace"])


def get_loaded_traces() -> dict[KeyAndSize, Trace]:
    return _loaded_traces


def release_traces() -> None:
    """Have no trace in memory any more, where a file remembers them: those that are needed again are read again."""
    if cache.find_cache_folder() is not None:
        _loaded_traces.clear()
        load_scaled_trace.cache_clear()


def add_loaded_traces(traces: dict[KeyAndSize, Trace]) -> None:
    """Have the traces of another process in memory."""
    _loaded_traces.update(traces)


@functools.lru_cache(maxsize=256)
def load_scaled_trace(key: TraceKey | StageTraceKey, batch_sizes: tuple[int, int]) -> ScaledTrace:
    """The trace at any batch size, from two traces (or one)."""
    load_traces([(key, size) for size in dict.fromkeys(batch_sizes)])
    first, second = (_loaded_traces[key, batch_size] for batch_size in batch_sizes)
    return build_scaled_trace(first, second, batch_sizes, key.num_first_blocks, _get_trace_key(key).block_period)


class HashableHardware:
    """Hardware as far as kernels' times depend on it: compared by its numbers, since it cannot be hashed itself."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self._speed_key = repr((hardware.peak_tflops, hardware.memory_bandwidth_gb_s, hardware.speeds))

    def __hash__(self) -> int:
        return hash(self._speed_key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HashableHardware) and self._speed_key == other._speed_key
