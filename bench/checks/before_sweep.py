"""The check that comes by itself before the first sweep on a machine's GPUs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import sys
from collections.abc import Callable, Iterable

from rich.console import Console

from bench.checks.runs import build_results_table, read_driver_version
from bench.checks.session import CheckReport, check_machine
from bench.config.run_config import RunConfig
from bench.core.errors import UsageError
from bench.core.installation import read_torch_version
from bench.hardware.detect import DetectedDevice
from bench.prediction.cache import find_cache_folder


def check_machine_once(
    configs: Iterable[RunConfig], device: DetectedDevice, run_check: Callable[[DetectedDevice], CheckReport]
) -> None:
    """Check this machine, unless it passed with these GPUs, this driver and this torch, or no run is on a GPU.

    Parameters
    ----------
    configs: iterable of RunConfig
        What is to be executed on this machine.
    run_check: callable
        Checks a device, and shows what it found.

    Raises
    ------
    UsageError
        If the check fails: nothing that is measured on the machine could be believed.
    KeyboardInterrupt
        If it was stopped: whoever stops a sweep's check stops the sweep.
    """
    if device.kind == "cpu" or all(config.hardware.device == "cpu" for config in configs):
        return
    folder = find_cache_folder()
    passed_path = None if folder is None else folder / "checked.json"
    machine_key = _compute_machine_key(device)
    passed_keys: list[str] = []
    if passed_path is not None:
        with contextlib.suppress(OSError, ValueError, TypeError):
            passed_keys = [entry for entry in json.loads(passed_path.read_text()) if isinstance(entry, str)]
    if machine_key in passed_keys:
        return
    report = run_check(device)
    if report.stop_signal_name:
        raise KeyboardInterrupt
    if not report.has_passed:
        raise UsageError(
            "No run was started, since this machine failed its check (the table above; python -m bench.check repeats "
            "it): choose check=false to start the sweep all the same."
        )
    if passed_path is not None:
        with contextlib.suppress(OSError):  # a check that cannot be remembered comes again
            passed_path.parent.mkdir(parents=True, exist_ok=True)
            passed_path.write_text(json.dumps([*passed_keys, machine_key]) + "\n")


def _compute_machine_key(device: DetectedDevice) -> str:
    """What a check holds for: another GPU, driver or torch wants another one."""
    torch_version = read_torch_version()["__version__"]
    parts = (socket.gethostname(), device.name, device.count, read_driver_version(), torch_version)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


# --- A check as a person sees it.

WIDTH_WITHOUT_TERMINAL = 160


def show_check(device: DetectedDevice) -> CheckReport:
    """Check this machine, saying what is being done, and print the table."""
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH_WITHOUT_TERMINAL)
    report = check_machine(device, lambda message: console.print(f"checking: {message}", markup=False))
    console.print(build_results_table(report.results))
    failed_count = sum(result.has_failed for result in report.results)
    outcome_text = (
        f"stopped by {report.stop_signal_name}"
        if report.stop_signal_name
        else f"{failed_count} failed"
        if failed_count
        else "all passed"
    )
    console.print(f"{len(report.results)} checks in {report.duration_s:.0f} s: {outcome_text}.", markup=False)
    return report
