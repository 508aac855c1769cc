"""What a prediction says: memory with its parts, time with its parts, and how sure it is."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from bench.config.run_id import to_plain_value

FITS, TOO_CLOSE, DOES_NOT_FIT = "fits", "too close to call", "does not fit"

MEMORY_RANGES = ("allocated", "active", "reserved", "device_used", "wanted")
"""Peaks of memory that are predicted with an interval."""

MEMORY_PARTS = ("parameters", "gradients", "optimizer", "activations", "gathered", "reduced", "temporaries")
"""What memory is spent on. `gathered`: parameters gathered from other ranks and the buffers they arrive in; `reduced`:
what gradients are reduced in (buckets, reduce-scatter buffers); `temporaries`: results freed within a block's pass."""


@dataclass(frozen=True)
class PredictedRange:
    """A value with the interval it is expected in 19 times of 20."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class MemoryPrediction:
    """Peaks of one rank in a step after warm-up, in bytes."""

    allocated: PredictedRange
    active: PredictedRange
    reserved: PredictedRange
    device_used: PredictedRange
    """Reserved, and what lies outside the allocator: CUDA context, communicators."""
    wanted: PredictedRange
    """What the caching allocator would reserve if the device had as much as it asks for."""
    parts: dict[str, int]
    """What the peak of `allocated` consists of, per name in `MEMORY_PARTS`."""
    phase: str
    """forward, backward or optimizer: where the peak is."""
    module: str
    """The block, or the part outside the blocks, where the peak is."""
    capacity: int | None
    """Bytes the allocator may use, None where nobody knows."""
    verdict: str | None
    """fits, too close to call or does not fit; None without a capacity."""
    phase_peaks: dict[str, int] = field(default_factory=dict)
    """Peak of allocated memory in each phase: forward, backward, optimizer."""
    others_bytes: int | None = None
    """Peak of allocated memory on each device after the first, where one process drives several and the first, of which
    all else here speaks, needs most."""
    host: int = 0
    """Bytes of the memory of the machine around the device that the rank fills with what is offloaded."""
    host_capacity: int | None = None
    """Its share of that memory, None where nobody knows."""

    initial: int = 0
    """Bytes that are allocated before the first step: parameters, buckets, micro-batches."""
    beside: int = 0
    """Bytes of the capacity that something else may take: libraries on a CPU, on a GPU what the second step holds
    beside what every step does."""

    @property
    def is_host_memory_short(self) -> bool:
        """Whether what is offloaded does not fit where it goes."""
        return self.host_capacity is not None and self.host > self.host_capacity


@dataclass(frozen=True)
class TimelineSpan:
    """Something that occupies a stream for a while."""

    stream: str
    """compute, gather, reduce or replicate (all-reduce across replicas); of a pipeline, ``rank 3``."""
    name: str
    """``forward decoder.block.3``, ``all-gather decoder.block.4``."""
    kind: str
    """forward, backward (with what checkpointing computes again), optimizer, all-gather, reduce-scatter, all-reduce,
    wait, exchange (among ranks that share a layer) or transfer (between the device and its machine's memory)."""
    start_s: float
    end_s: float


@dataclass(frozen=True)
class TimePrediction:
    """One optimizer step of one rank (pipelines: mean over ranks), in seconds. The parts add up to `step_s.value`."""

    step_s: PredictedRange
    compute_s: float
    """Forward, backward and recomputation."""
    exposed_communication_s: float
    """Communication that computation does not hide."""
    optimizer_s: float
    bubble_s: float
    """The device waits for the processor to launch kernels, for the allocator or, in a pipeline, for other stages."""
    communication_s: float
    """All communication, hidden or not; no part of the sum."""
    limited_by: str
    """compute, memory bandwidth, network, kernel launches or allocator; of a pipeline also pipeline bubble; with
    offloading host link (between GPU and memory of its machine) or host memory (its bandwidth, where processors carry
    out the optimizer's step)."""
    degraded: bool
    """Memory is probably so nearly exhausted that the allocator flushes and retries."""
    retry_probability: float = 0.0
    """That it does so in every step."""
    retry_s: float = 0.0
    """Seconds of the step that retries are expected to take: some, times how likely they are. In `bubble_s`."""
    idle_share: float | None = None
    """Of a pipeline: share of the step in which a rank is in no stage and in no optimizer, mean over ranks, as a run
    measures it: waiting for kernels or collectives within a stage does not count. None elsewhere."""
    timeline: tuple[TimelineSpan, ...] = ()
    """Empty unless asked for."""


@dataclass(frozen=True)
class Prediction:
    """Will it fit, and how fast will it be."""

    memory: MemoryPrediction
    time: TimePrediction | None
    """None where the hardware's speed is unknown, or that of the machine around it where something is offloaded."""

    @property
    def status(self) -> str:
        """``oom`` where it surely does not fit, else ``ok``."""
        return "oom" if self.memory.verdict == DOES_NOT_FIT else "ok"


def prediction_to_plain(prediction: Prediction) -> dict[str, Any]:
    """As nested dictionaries: what caches keep, and what rows and scripts are given, under names of their own."""
    plain: dict[str, Any] = to_plain_value(
        prediction
        if prediction.time is None
        else Prediction(prediction.memory, dataclasses.replace(prediction.time, timeline=()))
    )
    if plain["time"] is not None:
        del plain["time"]["timeline"]
    return plain


def prediction_from_plain(plain: dict[str, Any]) -> Prediction:
    """The prediction that `prediction_to_plain` was given."""
    memory_values: dict[str, Any] = {
        name: PredictedRange(**value) if name in MEMORY_RANGES else value for name, value in plain["memory"].items()
    }
    time_prediction = plain["time"] and TimePrediction(
        **{**plain["time"], "step_s": PredictedRange(**plain["time"]["step_s"])}
    )
    return Prediction(MemoryPrediction(**memory_values), time_prediction)
