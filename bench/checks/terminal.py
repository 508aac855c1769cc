"""A check as a person sees it."""

from __future__ import annotations

import sys

from rich.console import Console

from bench.checks.result import build_results_table
from bench.checks.session import CheckReport, check_machine
from bench.hardware.detect import DetectedDevice

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
