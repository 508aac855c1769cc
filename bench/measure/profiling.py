"""The optional profiled pass: a trace, and how much communication is not hidden behind compute."""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

Interval = tuple[float, float]

COMMUNICATION = ("nccl", "oneRankReduce", "gloo:", "c10d::", "record_param_comms")
"""In the names of what communicates. NCCL calls its kernel for a reduction within a group of one rank oneRankReduce."""

PEER_COPY = "PtoP"
"""In the name of a copy from one GPU to another, which communicates without a kernel."""

HOST_COPIES = ("HtoD", "DtoH")
"""In the names of copies between a GPU and its machine: neither communication between ranks nor computation."""

GLOO_ENDS_S = 0.5
"""A thread of gloo notes the end of a collective shortly after its caller went on. By then the profiler must be there,
or the process crashes."""


PROFILED_STEPS = 2
"""Steps that every rank takes for the profiler: in the first it starts CUPTI, which takes its time, on rank 0 alone."""


def profile_step(step: Callable[[], object], device: torch.device, trace: Path) -> float | None:
    """Take `PROFILED_STEPS` steps, profile the last one, write its Chrome trace.

    Parameters
    ----------
    step: callable
        Runs one step; the device is waited for afterwards.
    trace: Path
        A ``.json.gz`` file to write.

    Returns
    -------
    float or None
        As `exposed_communication`; None also where the trace could not be written or read (a full disk, say), which is
        said: what was measured before is not lost for it.
    """
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else [])
    with profile(activities=activities, schedule=schedule(wait=0, warmup=PROFILED_STEPS - 1, active=1)) as profiler:
        for number in range(PROFILED_STEPS):
            if number:
                profiler.step()
            step()
            if on_gpu:
                torch.cuda.synchronize(device)
            else:
                time.sleep(GLOO_ENDS_S)
    try:
        with tempfile.TemporaryDirectory(dir=trace.parent, prefix=".trace-") as folder:
            plain = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(plain))
            text = plain.read_bytes()
            exposed = exposed_communication(json.loads(text)["traceEvents"], on_gpu=on_gpu)
            packed = Path(folder) / trace.name
            packed.write_bytes(gzip.compress(text))
            packed.rename(trace)
    except (OSError, ValueError, MemoryError) as error:
        print(f"The run has no trace: {type(error).__name__}: {error}", file=sys.stderr)
        return None
    return exposed


def exposed_communication(events: Iterable[dict[str, Any]], *, on_gpu: bool) -> float | None:
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
    communication: list[Interval] = []
    computation: list[Interval] = []
    others: list[Interval] = []
    seen = False
    for event in events:
        if event.get("ph") != "X" or event.get("cat") not in categories:
            continue
        name, copies = event["name"], event["cat"] == "gpu_memcpy"
        seen = seen or event["cat"] in ("kernel", "cpu_op")
        if any(mark in name for mark in COMMUNICATION) or (copies and PEER_COPY in name):
            kind = communication
        elif copies and any(mark in name for mark in HOST_COPIES):
            kind = others
        elif on_gpu or name.startswith("aten::"):
            kind = computation
        else:
            continue
        kind.append((float(event["ts"]), float(event["ts"]) + float(event["dur"])))
    if not seen:
        return None
    everything = communication + computation + others
    duration = max((end for _, end in everything), default=0) - min((start for start, _ in everything), default=0)
    hidden = overlap(communication, computation)
    return (covered(communication) - hidden) / duration if duration else 0.0


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of intervals as disjoint ones, ascending."""
    result: list[Interval] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((start, end))
    return result


def covered(intervals: Iterable[Interval]) -> float:
    """Length of the union of intervals."""
    return sum(end - start for start, end in merged(intervals))


def overlap(first: Iterable[Interval], second: Iterable[Interval]) -> float:
    """Length of the time both unions cover."""
    first, second = list(first), list(second)
    return covered(first) + covered(second) - covered([*first, *second])
