"""Is memory limited, counted, rehearsed and predicted on this machine as it should be?"""

from __future__ import annotations

import math

from bench.checks.result import NOT_RUN, Result
from bench.checks.runs import SHORT, Ran, configure
from bench.hardware.detect import Device
from bench.simulate.predict import predict

OOM_WITHIN_S = 15.0
"""From the start of a run to the row that says that it ran out of memory."""

AGREES_WITHIN = 0.03
"""Of peaks of memory: rehearsed and predicted against measured."""

FITS, EXHAUSTED = 1.5, 0.5
"""Limits that are tried, as multiples of the peak without a limit."""

MODEL = {
    "cpu": ("model=gpt_mini", "sequence_length=64"),
    "cuda": ("model=gpt_350m", "sequence_length=1024", "precision=bf16"),
}

STEPS = ("batch_size_per_gpu=2", "measurement.steps=2", *SHORT)

PIPELINE = ("strategy=pipeline", "gpus=2", "model.vocabulary_size=32768", "strategy.micro_batches=2")
"""The last of two stages has the output layer, and needs far more memory than the first."""


def peak_runs(device: Device) -> dict[str, tuple[str, ...]]:
    """Runs without a limit: their peaks say which limits to try."""
    size = 2 if device.kind == "cpu" or device.count > 1 else 1
    shared = (*MODEL[device.kind], *STEPS)
    sharded = (*shared, "strategy=fsdp", f"gpus={size}")
    return {
        "measured": sharded,
        "rehearsed": (*sharded, "mode=rehearse"),
        "pipeline": (*shared, *PIPELINE),
    }


def limited_runs(device: Device, peaks: dict[str, Ran]) -> dict[str, tuple[str, ...]]:
    """The same with limits, chosen from the peaks: one that suffices, one that does not, one that one of two ranks
    keeps."""
    asked = peak_runs(device)
    runs = {}
    if not peaks["measured"].error:
        peak = peaks["measured"].row["peak_reserved_bytes"]
        for name, share in (("fits", FITS), ("exhausted", EXHAUSTED)):
            runs[name] = (*asked["measured"], _limit(min(share * peak, device.memory_bytes or math.inf)))
    if not peaks["pipeline"].error:
        per_rank = [rank["peak_reserved_bytes"] for rank in peaks["pipeline"].row["ranks"]]
        runs["one of two"] = (*asked["pipeline"], _limit(sum(per_rank) / 2))
    return runs


def _limit(limit_bytes: float) -> str:
    return f"hardware.memory_limit_gib={limit_bytes / 2**30:.4f}"


def check_memory(device: Device, peaks: dict[str, Ran], limited: dict[str, Ran]) -> list[Result]:
    """Limits that are kept, runs out of memory that say so at once, and peaks that agree."""
    return [
        _check_limit(limited.get("fits")),
        _check_exhausted("out of memory", limited.get("exhausted")),
        _check_exhausted("out of memory on one rank of two", limited.get("one of two"), peaks["pipeline"].reason),
        *_check_peaks(device, peaks),
    ]


def _check_limit(run: Ran | None) -> Result:
    title = "memory limit is kept"
    if run is None:
        return Result(title, NOT_RUN, "the run without a limit has no peak")
    if run.record is None:
        return Result(title, NOT_RUN, run.reason, "ok")
    if run.error:
        return Result.of(title, False, run.error, "ok")
    reserved, limit = run.row["peak_reserved_bytes"], run.row["memory_limit_bytes"]
    return Result.of(title, reserved <= limit, f"{_mib(reserved)} reserved", f"at most {_mib(limit)}")


def _check_exhausted(title: str, run: Ran | None, reason: str = "") -> Result:
    expected = f"oom, within {OOM_WITHIN_S:g} s"
    if run is None or run.record is None:
        why = reason or (run.reason if run else "the run without a limit has no peak")
        return Result(title, NOT_RUN, why, expected)
    passed = run.row["status"] == "oom" and run.took_s <= OOM_WITHIN_S
    phase = f" in {run.row['oom_phase']}" if run.row["status"] == "oom" else f" ({run.row['error']})"
    return Result.of(title, passed, f"{run.row['status']}{phase} after {run.took_s:.1f} s", expected)


def _check_peaks(device: Device, peaks: dict[str, Ran]) -> list[Result]:
    titles = ("peak of memory: rehearsed", "peak of memory: predicted")
    measured, rehearsed = peaks["measured"], peaks["rehearsed"]
    if measured.error:
        return [Result(title, NOT_RUN, f"the measured run: {measured.error}") for title in titles]
    peak = measured.row["peak_allocated_bytes"]
    prediction = predict(configure(device, *peak_runs(device)["measured"]))
    compared = [Result.of(titles[0], False, rehearsed.error, f"{_mib(peak)}, as measured")]
    if not rehearsed.error:
        compared = [_compare(titles[0], rehearsed.row["peak_allocated_bytes"], peak)]
    return [*compared, _compare(titles[1], prediction.memory.allocated.value, peak)]


def _compare(title: str, found: float, measured: float) -> Result:
    off = found / measured - 1
    expected = f"{_mib(measured)}, as measured, within {AGREES_WITHIN:.0%}"
    return Result.of(title, abs(off) <= AGREES_WITHIN, f"{_mib(found)} ({off:+.2%})", expected)


def _mib(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB"
