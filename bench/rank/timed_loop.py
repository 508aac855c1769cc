"""The measurement of one rank: build, warm up, time. It can be read without scrolling."""

from __future__ import annotations

import gc
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from bench.models import Batch
from bench.rank.engine import Engine
from bench.rank.machine_load import CpuLoad, CpuLoadProbe, GpuInfo, GpuStateProbe
from bench.rank.memory_probe import MemoryPeaks, UnmeasuredWork, build_memory_probe
from bench.rank.profiler import PROFILED_STEPS, CollectiveCounts, profile_step
from bench.rank.tensor_release import wait_for_gloo_threads
from bench.strategies.stepper import TimeSpans

BuildEngine = Callable[[], tuple[Engine, Sequence[Batch]]]
"""Builds the engine and the micro-batches."""


@dataclass(frozen=True)
class RankSamples:
    step_times_s: list[float]
    """One per timed step: whole periods of the strategy's steps."""
    losses: list[float]
    """One per step from the very first, this rank's share of the batch; none on a rank that does not know it."""
    setup_s: float
    """From the start of the rank to the first timed step."""
    skipped_steps: int
    """Timed steps in which fp16 overflowed and the optimizer did nothing."""
    peaks: MemoryPeaks
    exposed_communication: float | None
    busy_s: list[float] | None = None
    """Seconds of each timed step in which this rank computed, where its strategy takes note of that."""
    busy_spans_s: TimeSpans | None = None
    """When that was in the first timed step, in seconds from its beginning, if the run is profiled."""
    warmup_steps: int = 0
    """Steps between construction and the timed ones, without those that were observed."""
    warmup_s: float = 0.0
    cpu_load: CpuLoad | None = None
    """Of the machine, during the timed steps."""
    gpu_states: list[GpuInfo] = field(default_factory=list)
    """Of the rank's GPUs, in the middle and at the end of the timed steps."""
    collectives: CollectiveCounts | None = None
    """Of the profiled step; None on a rank that was not profiled."""


def measure_rank(
    build_engine: BuildEngine,
    devices: Sequence[torch.device],
    *,
    started_at: float,
    warmup_steps: int,
    steps: int,
    min_warmup_s: float,
    min_timed_s: float,
    profile: bool,
    trace_path: Path | None,
    unmeasured_work: UnmeasuredWork,
    agree_on_steps: AgreeOnSteps,
) -> RankSamples:
    """Measure one rank. All ranks of a run call this together.

    Parameters
    ----------
    build_engine: callable
        Builds the engine and its micro-batches.
    devices: sequence of torch.device
        That this rank drives; it is timed on the first.
    started_at: float
        When the rank started, on `time.perf_counter`.
    warmup_steps, steps: int
        Optimizer steps before and during timing, at least.
    min_warmup_s, min_timed_s: float
        Seconds that both last, at least.
    profile: bool
        Take further steps, for the profiler.
    trace_path: Path or None
        Where to write the profiler's trace of it; None on ranks that are not profiled.
    unmeasured_work: callable
        Gives a context for work whose memory is not the run's.
    agree_on_steps: callable
        Gives every rank the number of steps that rank 0 found.
    """
    device = devices[0]
    losses: list[torch.Tensor | None] = []
    memory_probe = build_memory_probe(devices, unmeasured_work)
    with memory_probe.observe():
        engine, micro_batches = build_engine()

        def step() -> None:
            losses.append(engine.step(micro_batches))

        # A strategy that has to be observed for longer warms up for as many steps less: all take the same number.
        unsteady_steps, period = engine.strategy.steps_before_steady, engine.strategy.step_period
        observed_steps = (
            max(memory_probe.observed_steps - 1, unsteady_steps) + period if memory_probe.observed_steps else 0
        )
        warmup_steps = max(
            0, warmup_steps - (observed_steps - memory_probe.observed_steps), unsteady_steps - observed_steps
        )
        for step_index in range(observed_steps):
            wait_for_gloo_threads()
            if step_index == observed_steps - period:
                memory_probe.start_steady_step()
            step()
    cpu_load_probe = CpuLoadProbe()
    gpu_state_probe = GpuStateProbe(devices)
    warm_up_result = run_warm_up(
        step,
        lambda: synchronize_devices(devices),
        agree_on_steps,
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
    memory_probe.start_timed_steps()
    engine.stepper.start_timed_steps()
    cpu_load_probe.start_timed_steps()
    setup_s = time.perf_counter() - started_at

    clock = build_step_clock(device)
    clock.tick()
    timed_steps = -(-warm_up_result.timed_steps // period) * period
    for step_index in range(timed_steps):
        step()
        clock.tick()
        if step_index == timed_steps // 2:
            gpu_state_probe.start_midpoint_read()
    gpu_states = gpu_state_probe.read_at_end()
    step_times_s = clock.read_step_times_s()
    cpu_load = cpu_load_probe.stop()
    gc.enable()

    peaks = memory_probe.read_peaks()
    busy_spans_s = engine.stepper.collect_busy_spans()
    skipped_steps = engine.count_skipped_steps(scale_before)
    profiled_step = None
    if profile and trace_path is not None:
        profiled_step = profile_step(lambda: engine.step(micro_batches), device, trace_path)
    elif profile:
        for _ in range(PROFILED_STEPS):
            engine.step(micro_batches)
    return RankSamples(
        step_times_s=step_times_s,
        losses=[loss.item() for loss in losses if loss is not None],
        setup_s=setup_s,
        skipped_steps=skipped_steps,
        peaks=peaks,
        exposed_communication=profiled_step.exposed_communication if profiled_step else None,
        busy_s=[sum(end - start for start, end in step_spans) for step_spans in busy_spans_s] if busy_spans_s else None,
        busy_spans_s=busy_spans_s[0] if busy_spans_s and profile else None,
        warmup_steps=warm_up_result.steps,
        warmup_s=warm_up_result.duration_s,
        cpu_load=cpu_load,
        gpu_states=gpu_states,
        collectives=profiled_step.collectives if profiled_step else None,
    )


def synchronize_devices(devices: Sequence[torch.device]) -> None:
    """Until they have finished what was launched; a CPU has when it returns."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


# --- Step times without disturbing the steps.


class StepClock(ABC):
    """Times consecutive steps; nothing is waited for until `read_step_times_s`."""

    @abstractmethod
    def tick(self) -> None:
        """Mark the boundary between two steps: once before the first and once after each."""

    @abstractmethod
    def read_step_times_s(self) -> list[float]:
        """Seconds each step took, once the device has finished them all."""


class CpuStepClock(StepClock):
    """The host's monotonic clock: CPU steps are finished when they return."""

    def __init__(self) -> None:
        self._boundaries_s: list[float] = []

    def tick(self) -> None:
        self._boundaries_s.append(time.perf_counter())

    def read_step_times_s(self) -> list[float]:
        return [after - before for before, after in zip(self._boundaries_s, self._boundaries_s[1:], strict=False)]


class CudaStepClock(StepClock):
    """One event per boundary, recorded in the stream, so that the host can run ahead."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []

    def tick(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._events.append(event)

    def read_step_times_s(self) -> list[float]:
        """Wait for the device once, then read the time between consecutive events."""
        torch.cuda.synchronize(self._device)
        event_pairs = zip(self._events, self._events[1:], strict=False)
        return [before.elapsed_time(after) / 1000 for before, after in event_pairs]


def build_step_clock(device: torch.device) -> StepClock:
    """The clock for a device."""
    return CudaStepClock(device) if device.type == "cuda" else CpuStepClock()


# --- How many steps to warm up and to time, so that both last: clocks and power of a GPU settle in seconds, not steps.

MAX_STEPS_PER_S = 1000
"""Steps shorter than a millisecond are taken to last one: no run takes more steps than this for each second."""

STEP_COUNT_MARGIN = 1.05
"""Steps once warm are a little faster than those that the number is estimated from."""

AgreeOnSteps = Callable[[int], int]
"""What rank 0 says, of what each rank says. All ranks call it together."""


@dataclass(frozen=True)
class WarmUpResult:
    """Steps before timing, and how many to time."""

    steps: int
    duration_s: float
    """From the first to the end of the last, on the host's clock."""
    timed_steps: int


def run_warm_up(
    step: Callable[[], object],
    synchronize: Callable[[], object],
    agree_on_steps: AgreeOnSteps,
    *,
    warmup_steps: int,
    steps: int,
    min_warmup_s: float,
    min_timed_s: float,
) -> WarmUpResult:
    """Take steps until they are `warmup_steps` and have lasted `min_warmup_s`.

    The first `warmup_steps` start libraries, compile and fill the allocator; they count as steps, but neither as
    seconds of warm-up nor for the estimate of a step's time.

    Parameters
    ----------
    synchronize: callable
        Returns once the device has finished all steps.
    min_warmup_s, min_timed_s: float
        With 0 for both nothing is waited for and nothing agreed on.

    Returns
    -------
    WarmUp
        With `steps` to time, or as many more as last `min_timed_s`.
    """
    started_at = time.perf_counter()
    for _ in range(warmup_steps):
        step()
    if not (min_warmup_s or min_timed_s):
        return WarmUpResult(warmup_steps, time.perf_counter() - started_at, steps)
    synchronize()
    steps_taken, elapsed_s, num_steps = warmup_steps, 0.0, 1
    while num_steps:
        round_started_at = time.perf_counter()
        for _ in range(num_steps):
            step()
        synchronize()
        round_s = time.perf_counter() - round_started_at
        steps_taken, elapsed_s = steps_taken + num_steps, elapsed_s + round_s
        step_time_s, num_steps = (
            round_s / num_steps,
            agree_on_steps(count_steps(min_warmup_s - elapsed_s, round_s / num_steps)),
        )
    timed_steps = agree_on_steps(max(steps, count_steps(STEP_COUNT_MARGIN * min_timed_s, step_time_s)))
    return WarmUpResult(steps_taken, time.perf_counter() - started_at, timed_steps)


def count_steps(duration_s: float, step_time_s: float) -> int:
    """Steps that last so long; none for no time."""
    return math.ceil(max(0.0, duration_s) / max(step_time_s, 1 / MAX_STEPS_PER_S))
