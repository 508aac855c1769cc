"""Traces, made once and remembered, and the reels that are made from them."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import TracebackType

from bench import processes
from bench.hardware import Hardware
from bench.simulate import cache
from bench.simulate.reel import Reel, make_reel
from bench.simulate.stage_tape import StageKey, record_stage
from bench.simulate.tape import TapeKey, Trace, record, trace_from_plain, trace_to_plain
from bench.simulate.version import remembered_as

WORTH_SHARING = 4
"""Traces from which on it pays to share the work among processes."""


def make_trace(key: TapeKey | StageKey, batch_size: int) -> Trace:
    """Of a model, or of one stage of it."""
    return record_stage(key, batch_size) if isinstance(key, StageKey) else record(key, batch_size)


_traces: dict[tuple[TapeKey | StageKey, int], Trace] = {}

_failures: dict[tuple[TapeKey | StageKey, int], tuple[Exception, TracebackType | None]] = {}
"""What cannot be traced is not tried again for each of the thousand runs that have it."""


def prepare_traces(needed: list[tuple[TapeKey | StageKey, int]]) -> None:
    """Have every trace in memory: those remembered, and the others made anew.

    Raises
    ------
    Exception
        Whatever the model raised, also if that was an earlier time.
    """
    for pair in needed:
        if pair in _failures:
            error, raised_in = _failures[pair]
            raise error.with_traceback(raised_in)  # not the frames of each time it was raised
    absent = {remembered_as(repr(pair), pair[0]): pair for pair in needed if pair not in _traces}
    for name, plain in cache.read("trace", absent).items():
        _traces[absent.pop(name)] = trace_from_plain(plain)
    if not absent:
        return
    workers = min(os.cpu_count() or 1, len(absent))
    if processes.work_belongs_apart() or (workers > 1 and len(absent) >= WORTH_SHARING):
        with processes.worker_pool(workers) as pool:
            futures = {pair: pool.submit(make_trace, *pair) for pair in absent.values()}
            made = [_noting_failure(pair, future.result) for pair, future in futures.items()]
    else:
        made = [_noting_failure(pair, functools.partial(make_trace, *pair)) for pair in absent.values()]
    _traces.update(zip(absent.values(), made, strict=True))
    cache.write("trace", {name: trace_to_plain(trace) for name, trace in zip(absent, made, strict=True)})


def _noting_failure(pair: tuple[TapeKey | StageKey, int], make: Callable[[], Trace]) -> Trace:
    try:
        return make()
    except Exception as error:
        _failures[pair] = error, error.__traceback__
        raise


def traces_in_memory() -> dict[tuple[TapeKey | StageKey, int], Trace]:
    """All of them."""
    return _traces


def remember_traces(traces: dict[tuple[TapeKey | StageKey, int], Trace]) -> None:
    """Have the traces of another process in memory."""
    _traces.update(traces)


@functools.lru_cache(maxsize=256)
def reel_of(key: TapeKey | StageKey, batches: tuple[int, int]) -> Reel:
    """What two traces (or one) foretell."""
    prepare_traces([(key, size) for size in dict.fromkeys(batches)])
    return make_reel(_traces[key, batches[0]], _traces[key, batches[1]], batches)


class Speed:
    """Hardware as far as kernels' times depend on it: compared by its numbers, since it cannot be hashed itself."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self._numbers = repr((hardware.peak_tflops, hardware.memory_bandwidth_gb_s, hardware.speeds))

    def __hash__(self) -> int:
        return hash(self._numbers)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Speed) and self._numbers == other._numbers
