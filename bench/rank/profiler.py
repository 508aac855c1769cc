"""The optional profiled pass: a trace, and how much communication is not hidden behind compute."""

from __future__ import annotations

import gzip
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

TimeInterval = tuple[float, float]

COMMUNICATION_MARKERS = ("nccl", "oneRankReduce", "gloo:", "c10d::", "record_param_comms")
"""In the names of what communicates. NCCL calls its kernel for a reduction within a group of one rank oneRankReduce."""

PEER_COPY_MARKER = "PtoP"
"""In the name of a copy from one GPU to another, which communicates without a kernel."""

HOST_COPY_MARKERS = ("HtoD", "DtoH")
"""In the names of copies between a GPU and its machine: neither communication between ranks nor computation."""

GLOO_COMPLETION_DELAY_S = 0.5
"""A thread of gloo notes the end of a collective shortly after its caller went on. By then the profiler must be there,
or the process crashes."""


PROFILED_STEPS = 2
"""Steps that every rank takes for the profiler: in the first it starts CUPTI, which takes its time, on rank 0 alone."""


COLLECTIVE_SIZES: dict[str, tuple[str, int]] = {
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::broadcast_": ("broadcast", 0),
    "c10d::allgather_": ("all_gather", 1),
    "c10d::_allgather_base_": ("all_gather", 1),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 0),
}
"""Operators that start a collective: what it is called, and which of their arguments is a rank's own: the part that it
gives to an all-gather or gets from a reduce-scatter, else the whole tensor."""

CollectiveCounts = dict[str, dict[str, int]]
"""By collective: how often it was called, and the elements of the tensors that are a rank's own."""


@dataclass(frozen=True)
class ProfiledStep:
    """What the profiler saw in a step of rank 0."""

    exposed_communication: float | None
    """As `compute_exposed_communication`."""
    collectives: CollectiveCounts
    """As `count_collectives`."""


def profile_step(step: Callable[[], object], device: torch.device, trace_path: Path) -> ProfiledStep | None:
    """Take `PROFILED_STEPS` steps, profile the last one, write its Chrome trace.

    Parameters
    ----------
    step: callable
        Runs one step; the device is waited for afterwards.
    trace_path: Path
        A ``.json.gz`` file to write.

    Returns
    -------
    ProfiledStep or None
        None where the trace could not be written or read (a full disk, say), which is said: what was measured before is
        not lost for it.
    """
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else [])
    steps = schedule(wait=0, warmup=PROFILED_STEPS - 1, active=1)
    with profile(activities=activities, schedule=steps, record_shapes=True) as profiler:
        for step_index in range(PROFILED_STEPS):
            if step_index:
                profiler.step()
            step()
            if on_gpu:
                torch.cuda.synchronize(device)
            else:
                time.sleep(GLOO_COMPLETION_DELAY_S)
    try:
        with tempfile.TemporaryDirectory(dir=trace_path.parent, prefix=".trace-") as folder:
            json_path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(json_path))
            trace_json = json_path.read_bytes()
            events = json.loads(trace_json)["traceEvents"]
            profiled = ProfiledStep(compute_exposed_communication(events, on_gpu=on_gpu), count_collectives(events))
            packed_path = Path(folder) / trace_path.name
            packed_path.write_bytes(gzip.compress(trace_json))
            packed_path.rename(trace_path)
    except (OSError, ValueError, MemoryError) as error:
        print(f"The run has no trace: {type(error).__name__}: {error}", file=sys.stderr)
        return None
    return profiled


def count_collectives(events: Iterable[dict[str, Any]]) -> CollectiveCounts:
    """Collectives that a rank starts in a step, whatever algorithm its backend carries them out by.

    Parameters
    ----------
    events: iterable of dict
        Of a Chrome trace with the shapes of operators' arguments.
    """
    counts: CollectiveCounts = {}
    for event in events:
        if event.get("ph") != "X" or event.get("cat") != "cpu_op" or event["name"] not in COLLECTIVE_SIZES:
            continue
        name, position = COLLECTIVE_SIZES[event["name"]]
        shapes = event["args"]["Input Dims"][position]
        tensor_shapes = shapes if shapes and isinstance(shapes[0], list) else [shapes]
        count = counts.setdefault(name, {"calls": 0, "elements": 0})
        count["calls"] += 1
        count["elements"] += sum(math.prod(shape) for shape in tensor_shapes)
    return counts


def compute_exposed_communication(events: Iterable[dict[str, Any]], *, on_gpu: bool) -> float | None:
    """Share of a step's duration in which communication ran and no computation did.

    On a GPU computation is kernels, copies within the device and memory being set; communication is NCCL's kernels and
    copies from GPU to GPU. NCCL's kernels are on the device from when they are launched, also while they wait for ranks
    that are not there yet: waiting for slower ranks is counted as communication.

    Parameters
    ----------
    events: iterable of dict
        Of a Chrome trace; times in microseconds.
    on_gpu: bool
        Look at what ran on the GPU (else at CPU operators).

    Returns
    -------
    float or None
        None where the trace has no kernel of a GPU, or no operator of a CPU: the profiler saw nothing of the step.
    """
    categories = ("kernel", "gpu_memcpy", "gpu_memset") if on_gpu else ("cpu_op", "user_annotation")
    communication: list[TimeInterval] = []
    computation: list[TimeInterval] = []
    others: list[TimeInterval] = []
    has_compute_events = False
    for event in events:
        if event.get("ph") != "X" or event.get("cat") not in categories:
            continue
        name, is_copy = event["name"], event["cat"] == "gpu_memcpy"
        has_compute_events = has_compute_events or event["cat"] in ("kernel", "cpu_op")
        if any(marker in name for marker in COMMUNICATION_MARKERS) or (is_copy and PEER_COPY_MARKER in name):
            intervals = communication
        elif is_copy and any(marker in name for marker in HOST_COPY_MARKERS):
            intervals = others
        elif on_gpu or name.startswith("aten::"):
            intervals = computation
        else:
            continue
        intervals.append((float(event["ts"]), float(event["ts"]) + float(event["dur"])))
    if not has_compute_events:
        return None
    all_intervals = communication + computation + others
    duration = max((end for _, end in all_intervals), default=0) - min((start for start, _ in all_intervals), default=0)
    hidden_us = compute_overlap(communication, computation)
    return (compute_covered_length(communication) - hidden_us) / duration if duration else 0.0


def merge_intervals(intervals: Iterable[TimeInterval]) -> list[TimeInterval]:
    """The union of intervals as disjoint ones, ascending."""
    merged: list[TimeInterval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def compute_covered_length(intervals: Iterable[TimeInterval]) -> float:
    """Length of the union of intervals."""
    return sum(end - start for start, end in merge_intervals(intervals))


def compute_overlap(first: Iterable[TimeInterval], second: Iterable[TimeInterval]) -> float:
    """Length of the time both unions cover."""
    first, second = list(first), list(second)
    return compute_covered_length(first) + compute_covered_length(second) - compute_covered_length([*first, *second])
