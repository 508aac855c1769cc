"""Is memory limited, counted, rehearsed and predicted on this machine as it should be?"""

from __future__ import annotations

import gzip
import json
import math
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from bench.checks.runs import NOT_RUN, SHORT_RUN_SETTINGS, CheckResult, CheckRun, build_check_config
from bench.core.processes import GROUP_SIGNALS, block_signals
from bench.core.units import GIB, MIB
from bench.hardware.detect import DetectedDevice
from bench.prediction.predictor import predict_run

MAX_OOM_DURATION_S = 15.0
"""From the start of a run to the row that says that it ran out of memory."""

PEAK_TOLERANCE = 0.03
"""Of peaks of memory: rehearsed and predicted against measured."""

SUFFICIENT_LIMIT_FACTOR, EXHAUSTED_LIMIT_FACTOR = 1.5, 0.5
"""Limits that are tried, as multiples of the peak without a limit."""

MODEL_SETTINGS = {
    "cpu": ("model=gpt_mini", "sequence_length=64"),
    "cuda": ("model=gpt_350m", "sequence_length=1024", "precision=bf16"),
}

STEP_SETTINGS = ("batch_size_per_gpu=2", "measurement.steps=2", *SHORT_RUN_SETTINGS)

PIPELINE_SETTINGS = ("strategy=pipeline", "gpus=2", "model.vocabulary_size=32768", "strategy.micro_batches=2")
"""The last of two stages has the output layer, and needs far more memory than the first."""


def build_peak_runs(device: DetectedDevice) -> dict[str, tuple[str, ...]]:
    """Runs without a limit: their peaks say which limits to try."""
    world_size = 2 if device.kind == "cpu" or device.count > 1 else 1
    common_settings = (*MODEL_SETTINGS[device.torch_device], *STEP_SETTINGS)
    sharded_settings = (*common_settings, "strategy=fsdp", f"gpus={world_size}")
    return {
        "measured": sharded_settings,
        "rehearsed": (*sharded_settings, "mode=rehearse"),
        "pipeline": (*common_settings, *PIPELINE_SETTINGS),
    }


def build_limited_runs(device: DetectedDevice, peak_runs: dict[str, CheckRun]) -> dict[str, tuple[str, ...]]:
    """The same with limits, chosen from the peaks: one that suffices, one that does not, one that one of two ranks
    keeps."""
    settings_by_run = build_peak_runs(device)
    runs = {}
    if not peak_runs["measured"].error:
        peak_bytes = peak_runs["measured"].row["peak_reserved_bytes"]
        for name, limit_factor in (("fits", SUFFICIENT_LIMIT_FACTOR), ("exhausted", EXHAUSTED_LIMIT_FACTOR)):
            runs[name] = (
                *settings_by_run["measured"],
                _format_limit_setting(min(limit_factor * peak_bytes, device.memory_bytes or math.inf)),
            )
    if not peak_runs["pipeline"].error:
        rank_peaks_bytes = [rank["peak_reserved_bytes"] for rank in peak_runs["pipeline"].row["ranks"]]
        runs["one of two"] = (*settings_by_run["pipeline"], _format_limit_setting(sum(rank_peaks_bytes) / 2))
    return runs


def _format_limit_setting(limit_bytes: float) -> str:
    return f"hardware.memory_limit_gib={limit_bytes / GIB:.4f}"


def check_memory(
    device: DetectedDevice, peak_runs: dict[str, CheckRun], limited_runs: dict[str, CheckRun]
) -> list[CheckResult]:
    """Limits that are kept, runs out of memory that say so at once, and peaks that agree."""
    return [
        _check_limit(limited_runs.get("fits")),
        _check_exhausted("out of memory", limited_runs.get("exhausted")),
        _check_exhausted(
            "out of memory on one rank of two", limited_runs.get("one of two"), peak_runs["pipeline"].reason
        ),
        *_check_peaks(device, peak_runs),
    ]


def _check_limit(run: CheckRun | None) -> CheckResult:
    title = "memory limit is kept"
    if run is None:
        return CheckResult(title, NOT_RUN, "the run without a limit has no peak")
    if run.record is None:
        return CheckResult(title, NOT_RUN, run.reason, "ok")
    if run.error:
        return CheckResult.from_outcome(title, False, run.error, "ok")
    reserved_bytes, limit_bytes = run.row["peak_reserved_bytes"], run.row["memory_limit_bytes"]
    return CheckResult.from_outcome(
        title,
        reserved_bytes <= limit_bytes,
        f"{_format_mib(reserved_bytes)} reserved",
        f"at most {_format_mib(limit_bytes)}",
    )


def _check_exhausted(title: str, run: CheckRun | None, reason: str = "") -> CheckResult:
    expected = f"oom, within {MAX_OOM_DURATION_S:g} s"
    if run is None or run.record is None:
        not_run_reason = reason or (run.reason if run else "the run without a limit has no peak")
        return CheckResult(title, NOT_RUN, not_run_reason, expected)
    passed = run.row["status"] == "oom" and run.duration_s <= MAX_OOM_DURATION_S
    phase_text = f" in {run.row['oom_phase']}" if run.row["status"] == "oom" else f" ({run.row['error']})"
    return CheckResult.from_outcome(
        title, passed, f"{run.row['status']}{phase_text} after {run.duration_s:.1f} s", expected
    )


def _check_peaks(device: DetectedDevice, peak_runs: dict[str, CheckRun]) -> list[CheckResult]:
    titles = ("peak of memory: rehearsed", "peak of memory: predicted")
    measured_run, rehearsed_run = peak_runs["measured"], peak_runs["rehearsed"]
    if measured_run.error:
        return [CheckResult(title, NOT_RUN, f"the measured run: {measured_run.error}") for title in titles]
    peak_bytes = measured_run.row["peak_allocated_bytes"]
    prediction = predict_run(build_check_config(device, *build_peak_runs(device)["measured"]))
    results = [
        CheckResult.from_outcome(titles[0], False, rehearsed_run.error, f"{_format_mib(peak_bytes)}, as measured")
    ]
    if not rehearsed_run.error:
        results = [_compare_peak(titles[0], rehearsed_run.row["peak_allocated_bytes"], peak_bytes)]
    return [*results, _compare_peak(titles[1], prediction.memory.allocated.value, peak_bytes)]


def _compare_peak(title: str, found_bytes: float, measured_bytes: float) -> CheckResult:
    relative_error = found_bytes / measured_bytes - 1
    expected = f"{_format_mib(measured_bytes)}, as measured, within {PEAK_TOLERANCE:.0%}"
    return CheckResult.from_outcome(
        title, abs(relative_error) <= PEAK_TOLERANCE, f"{_format_mib(found_bytes)} ({relative_error:+.2%})", expected
    )


def _format_mib(size_bytes: float) -> str:
    return f"{size_bytes / MIB:,.1f} MiB"


# --- Are steps timed as they pass, and does the profiler see what the device does?

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
            future = pool.submit(time_loop, device.torch_device)
        clock_s, wall_s = future.result()
    relative_error = clock_s / wall_s - 1
    found_text = f"{clock_s:.3f} s by the clock of the steps, {wall_s:.3f} s by the wall's ({relative_error:+.2%})"
    return CheckResult.from_outcome(
        "clock of the steps", abs(relative_error) <= CLOCK_TOLERANCE, found_text, f"within {CLOCK_TOLERANCE:.0%}"
    )


def time_loop(device_kind: str) -> tuple[float, float]:
    """Seconds that a loop of products takes, by the clock that times steps and by the wall's."""
    import torch

    from bench.rank.timed_loop import build_step_clock

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
        *MODEL_SETTINGS[device.torch_device],
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
    row, category = run.row, KERNEL_CATEGORIES[device.torch_device]
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
