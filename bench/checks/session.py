"""A whole check: every part in turn, its table and its file."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.checks.losses import build_loss_runs, compare_losses
from bench.checks.measurements import (
    build_limited_runs,
    build_peak_runs,
    build_profiled_run,
    check_clock,
    check_memory,
    check_profile,
)
from bench.checks.runs import (
    TOKEN_VARIABLE,
    CheckResult,
    CheckRun,
    check_device_free,
    describe_machine,
    execute_runs,
    read_used_bytes,
)
from bench.core.errors import UsageError, invalid_value_error
from bench.hardware.detect import DetectedDevice
from bench.launch.ranks import StopSignal

FORMAT_VERSION = 1
"""Of the file."""


@dataclass(frozen=True)
class CheckReport:
    results: list[CheckResult]
    rows_by_run: dict[str, Any]
    """The row of every run, by the run's name."""
    duration_s: float
    stop_signal_name: str | None
    """Name of the signal that ended it early."""

    @property
    def has_passed(self) -> bool:
        """Whether nothing failed, and everything that can run did."""
        return not self.stop_signal_name and not any(result.has_failed for result in self.results)

    def to_dict(self) -> dict[str, Any]:
        """As plain values: what the file holds."""
        return {
            "format": FORMAT_VERSION,
            "host": socket.gethostname(),
            "passed": self.has_passed,
            "stopped": self.stop_signal_name,
            "took_s": round(self.duration_s, 1),
            "checks": [result.to_dict() for result in self.results],
            "rows": self.rows_by_run,
        }


def check_machine(device: DetectedDevice, on_progress: Callable[[str], None]) -> CheckReport:
    """Check this machine.

    Parameters
    ----------
    on_progress: callable
        Told what is being done.
    """
    if device.unusable_reason is not None:
        return CheckReport([describe_machine(device)], {}, 0.0, None)
    start_s = time.monotonic()
    token = uuid.uuid4().hex
    used_before = read_used_bytes(device)
    results = [describe_machine(device)]
    runs: dict[str, CheckRun] = {}
    with StopSignal() as stop_signal, tempfile.TemporaryDirectory(prefix="bench-check-") as folder:
        store = Path(folder)
        with _mark_processes(token):
            on_progress("every strategy, without a limit, and under the profiler")
            first_runs = {**build_loss_runs(device), **build_peak_runs(device), "profiled": build_profiled_run(device)}
            runs |= execute_runs(first_runs, device, store, stop_signal)
            if not stop_signal.received:
                on_progress("memory limits")
                runs |= execute_runs(build_limited_runs(device, runs), device, store, stop_signal)
        if not stop_signal.received:
            on_progress("clocks")
            results += compare_losses({name: runs[name] for name in build_loss_runs(device)}, device)
            results += check_memory(device, runs, runs)
            results.append(check_clock(device))
            results += check_profile(device, runs["profiled"], store)
            results.append(check_device_free(device, token, used_before))
        stop_signal_name = stop_signal.received
    rows_by_run = {name: run.record for name, run in runs.items() if run.record is not None}
    return CheckReport(results, rows_by_run, time.monotonic() - start_s, stop_signal_name)


@contextlib.contextmanager
def _mark_processes(token: str) -> Iterator[None]:
    """Have processes that are started within carry a token, by which those that are left are found."""
    os.environ[TOKEN_VARIABLE] = token
    try:
        yield
    finally:
        del os.environ[TOKEN_VARIABLE]


def open_report_file(overrides: list[str]) -> Path:
    """Make the file to write: the one asked for, or one named by host and time.

    Raises
    ------
    UsageError
        On anything but ``output=FILE``, or a file that is there already or cannot be written.
    """
    path_text = f"check-{socket.gethostname()}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    for override in overrides:
        key, _, value = override.partition("=")
        if key != "output" or not value:
            raise UsageError(f"{override!r} is not valid: choose output=FILE.")
        path_text = value
    report_path = Path(path_text)
    try:
        with report_path.open("x"):
            pass
    except OSError as error:
        raise invalid_value_error("output", path_text, f"a new file that can be written ({error.strerror})") from None
    return report_path


def write_report(report: CheckReport, path: Path) -> None:
    """Write what was found as JSON.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report.to_dict(), indent=1, default=str) + "\n")
