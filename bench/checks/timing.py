"""Are steps timed as they pass, and does the profiler see what the device does?"""

from __future__ import annotations

import gzip
import json
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from bench.checks.memory import MODEL_SETTINGS, STEP_SETTINGS
from bench.checks.result import NOT_RUN, CheckResult
from bench.checks.runs import CheckRun
from bench.core.processes import GROUP_SIGNALS, block_signals
from bench.hardware.detect import DetectedDevice
from bench.rank.timed_loop import build_step_clock

MIN_LOOP_S = 2.0
"""Length of the loop that is timed twice, at least."""

CLOCK_TOLERANCE = 0.02

MATRIX_SIZE = 2048

CALLS_PER_TICK = 10

KERNEL_CATEGORIES = {"cuda": "kernel", "cpu": "cpu_op"}
"""Of the events of a Chrome trace: what the device executed."""


def check_clock(device: DetectedDevice) -> CheckResult:
    """The clock of the steps against the wall's, over a loop of matrix products; in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        with block_signals(*GROUP_SIGNALS):  # Ctrl-C is for whoever started the check
            future = pool.submit(time_loop, device.kind)
        clock_s, wall_s = future.result()
    relative_error = clock_s / wall_s - 1
    found_text = f"{clock_s:.3f} s by the clock of the steps, {wall_s:.3f} s by the wall's ({relative_error:+.2%})"
    return CheckResult.from_outcome(
        "clock of the steps", abs(relative_error) <= CLOCK_TOLERANCE, found_text, f"within {CLOCK_TOLERANCE:.0%}"
    )


def time_loop(device_kind: str) -> tuple[float, float]:
    """Seconds that a loop of products takes, by the clock that times steps and by the wall's."""
    device = torch.device(device_kind)
    matrix = torch.full((MATRIX_SIZE, MATRIX_SIZE), 1 / MATRIX_SIZE, device=device)

    def synchronize() -> None:
        if device_kind == "cuda":
            torch.cuda.synchronize(device)

    torch.mm(matrix, matrix)
    synchronize()
    clock = build_step_clock(device)
    start_s = time.perf_counter()
    clock.tick()
    while time.perf_counter() - start_s < MIN_LOOP_S:
        for _ in range(CALLS_PER_TICK):
            torch.mm(matrix, matrix)
        clock.tick()
        synchronize()  # so that the loop ends when the device is done, not when it has been told
    times_s = clock.read_step_times_s()
    return sum(times_s), time.perf_counter() - start_s


def build_profiled_run(device: DetectedDevice) -> tuple[str, ...]:
    """The settings of a run under the profiler."""
    world_size = 2 if device.kind == "cpu" or device.count > 1 else 1
    return (
        *MODEL_SETTINGS[device.kind],
        *STEP_SETTINGS,
        "strategy=ddp",
        f"gpus={world_size}",
        "measurement.profile=true",
    )


def check_profile(device: DetectedDevice, run: CheckRun, store: Path) -> list[CheckResult]:
    """Kernels in the trace and, where ranks communicate, communication that nothing hides."""
    title = "profiler"
    if run.error:
        return [CheckResult.from_outcome(title, False, run.error, "a trace")]
    row, category = run.row, KERNEL_CATEGORIES[device.kind]
    trace_path = store / row["run_id"] / str(row["trace"])
    events = json.loads(gzip.decompress(trace_path.read_bytes()))["traceEvents"] if row["trace"] else []
    kernel_count = sum(event.get("cat") == category for event in events)
    exposed_share = row["exposed_communication"]
    exposed_text = "unknown" if exposed_share is None else f"{exposed_share:.1%} of the step"
    is_single_rank = row["world_size"] == 1
    return [
        CheckResult.from_outcome(title, kernel_count > 0, f"{kernel_count} {category} events in the trace", "some"),
        CheckResult("profiler: exposed communication", NOT_RUN, "one rank communicates nothing")
        if is_single_rank
        else CheckResult.from_outcome("profiler: exposed communication", bool(exposed_share), exposed_text, "above 0"),
    ]
