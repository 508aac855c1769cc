"""The measurement of one rank: build, warm up, time. It can be read without scrolling."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from bench.measure.busyness import CpuLoad, CpuWatch
from bench.measure.clock import step_clock
from bench.measure.collectives import wait_for_gloo_threads
from bench.measure.duration import Agree, warm_up
from bench.measure.gpu import Facts, GpuWatch
from bench.measure.memory import OwnWork, Peaks, memory_probe
from bench.measure.profiling import PROFILED_STEPS, profile_step
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
    warmup_steps: int = 0
    """Steps between construction and the timed ones, without those that were observed."""
    warmup_s: float = 0.0
    cpu_load: CpuLoad | None = None
    """Of the machine, during the timed steps."""
    gpu_states: list[Facts] = field(default_factory=list)
    """Of the rank's GPUs, in the middle and at the end of the timed steps."""


def measure(
    build: Build,
    devices: Sequence[torch.device],
    *,
    started: float,
    warmup_steps: int,
    steps: int,
    min_warmup_s: float,
    min_timed_s: float,
    profile: bool,
    trace: Path | None,
    own_work: OwnWork,
    agree: Agree,
) -> Samples:
    """Measure one rank. All ranks of a run call this together.

    Parameters
    ----------
    build: callable
        Builds the engine and its micro-batches.
    devices: sequence of torch.device
        That this rank drives; it is timed on the first.
    started: float
        When the rank started, on `time.perf_counter`.
    warmup_steps, steps: int
        Optimizer steps before and during timing, at least.
    min_warmup_s, min_timed_s: float
        Seconds that both last, at least.
    profile: bool
        Take further steps, for the profiler.
    trace: Path or None
        Where to write the profiler's trace of it; None on ranks that are not profiled.
    own_work: callable
        Gives a context for work whose memory is not the run's.
    agree: callable
        Gives every rank the number of steps that rank 0 found.
    """
    device = devices[0]
    losses: list[torch.Tensor | None] = []
    probe = memory_probe(devices, own_work)
    with probe.observe():
        engine, micro_batches = build()

        def step() -> None:
            losses.append(engine.step(micro_batches))

        # A strategy that has to be observed for longer warms up for as many steps less: all take the same number.
        unlike = engine.strategy.steps_before_steady
        observed = max(probe.observed_steps, unlike + 1) if probe.observed_steps else 0
        warmup_steps = max(warmup_steps - (observed - probe.observed_steps), unlike - observed)
        for number in range(observed):
            wait_for_gloo_threads()
            if number == observed - 1:
                probe.start_steady_step()
            step()
    cpu_watch = CpuWatch()
    gpu_watch = GpuWatch(devices)
    warm = warm_up(
        step,
        lambda: wait_for(devices),
        agree,
        warmup_steps=warmup_steps,
        steps=steps,
        min_warmup_s=min_warmup_s,
        min_timed_s=min_timed_s,
    )
    scale_before = engine.scaler.get_scale()
    gc.collect()
    gc.disable()
    if dist.is_initialized():
        dist.barrier()
    probe.start_timed_steps()
    engine.stepper.start_timed_steps()
    cpu_watch.start_timed_steps()
    setup_s = time.perf_counter() - started

    clock = step_clock(device)
    clock.tick()
    for number in range(warm.to_time):
        step()
        clock.tick()
        if number == warm.to_time // 2:
            gpu_watch.at_half()
    gpu_states = gpu_watch.at_end()
    step_times_s = clock.times_s()
    cpu_load = cpu_watch.stop()
    gc.enable()

    peaks = probe.peaks()
    busy = engine.stepper.busy()
    skipped_steps = engine.skipped_steps(scale_before)
    exposed = None
    if profile and trace is not None:
        exposed = profile_step(lambda: engine.step(micro_batches), device, trace)
    elif profile:
        for _ in range(PROFILED_STEPS):
            engine.step(micro_batches)
    return Samples(
        step_times_s=step_times_s,
        losses=[loss.item() for loss in losses if loss is not None],
        setup_s=setup_s,
        skipped_steps=skipped_steps,
        peaks=peaks,
        exposed_communication=exposed,
        busy_s=[sum(end - start for start, end in spans) for spans in busy] if busy else None,
        busy_spans_s=busy[0] if busy and profile else None,
        warmup_steps=warm.steps,
        warmup_s=warm.seconds,
        cpu_load=cpu_load,
        gpu_states=gpu_states,
    )


def wait_for(devices: Sequence[torch.device]) -> None:
    """Until they have finished what was launched; a CPU has when it returns."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
