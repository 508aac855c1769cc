"""A check as a person sees it."""

from __future__ import annotations

import sys

from rich.console import Console

from bench.checks.result import results_table
from bench.checks.session import Checked, check_machine
from bench.hardware.detect import Device

WIDTH_WITHOUT_TERMINAL = 160


def show_check(device: Device) -> Checked:
    """Check this machine, saying what is being done, and print the table."""
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH_WITHOUT_TERMINAL)
    checked = check_machine(device, lambda words: console.print(f"checking: {words}", markup=False))
    console.print(results_table(checked.results))
    failed = sum(result.failed for result in checked.results)
    ended = f"stopped by {checked.stopped}" if checked.stopped else f"{failed} failed" if failed else "all passed"
    console.print(f"{len(checked.results)} checks in {checked.took_s:.0f} s: {ended}.", markup=False)
    return checked
