"""Are steps timed as they pass, and does the profiler see what the device does?"""

from __future__ import annotations

import gzip
import json
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from bench.checks.memory import MODEL, STEPS
from bench.checks.result import NOT_RUN, Result
from bench.checks.runs import Ran
from bench.hardware.detect import Device
from bench.measure.clock import step_clock
from bench.processes import POLITE_SIGNALS, signals_held

LOOP_S = 2.0
"""Length of the loop that is timed twice, at least."""

CLOCKS_AGREE_WITHIN = 0.02

MATRIX = 2048

CALLS_PER_TICK = 10

KERNEL_CATEGORIES = {"cuda": "kernel", "cpu": "cpu_op"}
"""Of the events of a Chrome trace: what the device executed."""


def check_clock(device: Device) -> Result:
    """The clock of the steps against the wall's, over a loop of matrix products; in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        with signals_held(*POLITE_SIGNALS):  # Ctrl-C is for whoever started the check
            timed = pool.submit(time_loop, device.kind)
        clock_s, wall_s = timed.result()
    off = clock_s / wall_s - 1
    found = f"{clock_s:.3f} s by the clock of the steps, {wall_s:.3f} s by the wall's ({off:+.2%})"
    return Result.of("clock of the steps", abs(off) <= CLOCKS_AGREE_WITHIN, found, f"within {CLOCKS_AGREE_WITHIN:.0%}")


def time_loop(kind: str) -> tuple[float, float]:
    """Seconds that a loop of products takes, by the clock that times steps and by the wall's."""
    device = torch.device(kind)
    matrix = torch.full((MATRIX, MATRIX), 1 / MATRIX, device=device)

    def wait() -> None:
        if kind == "cuda":
            torch.cuda.synchronize(device)

    torch.mm(matrix, matrix)
    wait()
    clock = step_clock(device)
    started = time.perf_counter()
    clock.tick()
    while time.perf_counter() - started < LOOP_S:
        for _ in range(CALLS_PER_TICK):
            torch.mm(matrix, matrix)
        clock.tick()
        wait()  # so that the loop ends when the device is done, not when it has been told
    times_s = clock.times_s()
    return sum(times_s), time.perf_counter() - started


def profiled_run(device: Device) -> tuple[str, ...]:
    """The settings of a run under the profiler."""
    size = 2 if device.kind == "cpu" or device.count > 1 else 1
    return (*MODEL[device.kind], *STEPS, "strategy=ddp", f"gpus={size}", "measurement.profile=true")


def check_profile(device: Device, run: Ran, store: Path) -> list[Result]:
    """Kernels in the trace and, where ranks communicate, communication that nothing hides."""
    title = "profiler"
    if run.error:
        return [Result.of(title, False, run.error, "a trace")]
    row, category = run.row, KERNEL_CATEGORIES[device.kind]
    trace = store / row["run_id"] / str(row["trace"])
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"] if row["trace"] else []
    kernels = sum(event.get("cat") == category for event in events)
    share = row["exposed_communication"]
    exposed = "unknown" if share is None else f"{share:.1%} of the step"
    alone = row["world_size"] == 1
    return [
        Result.of(title, kernels > 0, f"{kernels} {category} events in the trace", "some"),
        Result("profiler: exposed communication", NOT_RUN, "one rank communicates nothing")
        if alone
        else Result.of("profiler: exposed communication", bool(share), exposed, "above 0"),
    ]
