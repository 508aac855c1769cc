"""The optional profiled pass: a trace, and how much communication is not hidden behind compute."""

from __future__ import annotations

import gzip
import json
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

Interval = tuple[float, float]

COMMUNICATION = ("nccl", "gloo:", "c10d::", "record_param_comms")

GLOO_ENDS_S = 0.5
"""A thread of gloo notes the end of a collective shortly after its caller went on. By then the profiler must be there,
or the process crashes."""


def profile_step(step: Callable[[], object], device: torch.device, trace: Path) -> float:
    """Profile one step, write its Chrome trace, and return the share of exposed communication.

    Parameters
    ----------
    step: callable
        Runs one step; the device is waited for afterwards.
    trace: Path
        A ``.json.gz`` file to write.
    """
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities) as profiler:
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        else:
            time.sleep(GLOO_ENDS_S)
    with tempfile.TemporaryDirectory(dir=trace.parent, prefix=".trace-") as folder:
        plain = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(plain))
        text = plain.read_bytes()
        packed = Path(folder) / trace.name
        packed.write_bytes(gzip.compress(text))
        packed.rename(trace)
    return exposed_communication(json.loads(text)["traceEvents"], on_gpu=device.type == "cuda")


def exposed_communication(events: Iterable[dict[str, Any]], *, on_gpu: bool) -> float:
    """Share of a step's duration in which communication ran and no computation did.

    Parameters
    ----------
    events: iterable of dict
        Of a Chrome trace; times in microseconds.
    on_gpu: bool
        Look at GPU kernels (else at CPU operators).
    """
    communication: list[Interval] = []
    computation: list[Interval] = []
    for event in events:
        if event.get("ph") != "X" or event.get("cat") not in (("kernel",) if on_gpu else ("cpu_op", "user_annotation")):
            continue
        interval = (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        if any(mark in event["name"] for mark in COMMUNICATION):
            communication.append(interval)
        elif on_gpu or event["name"].startswith("aten::"):
            computation.append(interval)
    everything = communication + computation
    if not everything:
        return 0.0
    duration = max(end for _, end in everything) - min(start for start, _ in everything)
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
