"""The measurement of one rank: build, warm up, time. It can be read without scrolling."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from bench.measure.clock import step_clock
from bench.measure.memory import OwnWork, Peaks, memory_probe
from bench.measure.profiling import profile_step
from bench.models import Batch
from bench.strategies.stepper import Spans
from bench.training.engine import Engine

Build = Callable[[], tuple[Engine, Sequence[Batch]]]
"""Builds the engine and the micro-batches."""


@dataclass(frozen=True)
class Samples:
    """What one rank measured."""

    step_times_s: list[float]
    """One per timed step."""
    losses: list[float]
    """One per step from the very first, this rank's share of the batch; none on a rank that does not know it."""
    setup_s: float
    """From the start of the rank to the first timed step."""
    skipped_steps: int
    """Timed steps in which fp16 overflowed and the optimizer did nothing."""
    peaks: Peaks
    exposed_communication: float | None
    busy_s: list[float] | None = None
    """Seconds of each timed step in which this rank computed, where its strategy takes note of that."""
    busy_spans_s: Spans | None = None
    """When that was in the first timed step, in seconds from its beginning, if the run is profiled."""


def measure(
    build: Build,
    device: torch.device,
    *,
    started: float,
    warmup_steps: int,
    steps: int,
    profile: bool,
    trace: Path | None,
    own_work: OwnWork,
) -> Samples:
    """Measure one rank. All ranks of a run call this together.

    Parameters
    ----------
    build: callable
        Builds the engine and its micro-batches.
    started: float
        When the rank started, on `time.perf_counter`.
    warmup_steps, steps: int
        Optimizer steps before and during timing.
    profile: bool
        Take one further step, for the profiler.
    trace: Path or None
        Where to write the profiler's trace of it; None on ranks that are not profiled.
    own_work: callable
        Gives a context for work whose memory is not the run's.
    """
    losses: list[torch.Tensor | None] = []
    probe = memory_probe(device, own_work)
    with probe.observe():
        engine, micro_batches = build()
        observed = max(probe.observed_steps, engine.strategy.settling_steps) if probe.observed_steps else 0
        for step in range(observed):
            if step == observed - 1:
                probe.start_steady_step()
            losses.append(engine.step(micro_batches))
    for _ in range(warmup_steps):
        losses.append(engine.step(micro_batches))
    scale_before = engine.scaler.get_scale()
    if dist.is_initialized():
        dist.barrier()
    probe.start_timed_steps()
    engine.stepper.start_timed_steps()
    setup_s = time.perf_counter() - started

    clock = step_clock(device)
    gc.collect()
    gc.disable()
    clock.tick()
    for _ in range(steps):
        losses.append(engine.step(micro_batches))
        clock.tick()
    step_times_s = clock.times_s()
    gc.enable()

    peaks = probe.peaks()
    busy = engine.stepper.busy()
    exposed = None
    if profile and trace is not None:
        exposed = profile_step(lambda: engine.step(micro_batches), device, trace)
    elif profile:
        engine.step(micro_batches)
    return Samples(
        step_times_s=step_times_s,
        losses=[loss.item() for loss in losses if loss is not None],
        setup_s=setup_s,
        skipped_steps=engine.skipped_steps(scale_before),
        peaks=peaks,
        exposed_communication=exposed,
        busy_s=[sum(end - start for start, end in spans) for spans in busy] if busy else None,
        busy_spans_s=busy[0] if busy and profile else None,
    )
