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

from bench.checks.losses import compare_losses, loss_runs
from bench.checks.machine import VARIABLE, check_free, describe_machine, used_bytes
from bench.checks.memory import check_memory, limited_runs, peak_runs
from bench.checks.result import Result
from bench.checks.runs import Ran, execute
from bench.checks.timing import check_clock, check_profile, profiled_run
from bench.hardware.detect import Device
from bench.launch.stop import StopSignal

FORMAT = 1
"""Of the file."""


@dataclass(frozen=True)
class Checked:
    """What a check found."""

    results: list[Result]
    rows: dict[str, Any]
    """The row of every run, by the run's name."""
    took_s: float
    stopped: str | None
    """Name of the signal that ended it early."""

    @property
    def passed(self) -> bool:
        """Whether nothing failed, and everything that can run did."""
        return not self.stopped and not any(result.failed for result in self.results)

    def to_dict(self) -> dict[str, Any]:
        """As plain values: what the file holds."""
        return {
            "format": FORMAT,
            "host": socket.gethostname(),
            "passed": self.passed,
            "stopped": self.stopped,
            "took_s": round(self.took_s, 1),
            "checks": [result.to_dict() for result in self.results],
            "rows": self.rows,
        }


def check_machine(device: Device, say: Callable[[str], None]) -> Checked:
    """Check this machine.

    Parameters
    ----------
    say: callable
        Told what is being done.
    """
    if device.unusable is not None:
        return Checked([describe_machine(device)], {}, 0.0, None)
    started = time.monotonic()
    token = uuid.uuid4().hex
    before = used_bytes(device)
    results = [describe_machine(device)]
    ran: dict[str, Ran] = {}
    with StopSignal() as stop, tempfile.TemporaryDirectory(prefix="bench-check-") as folder:
        store = Path(folder)
        with _marked(token):
            say("every strategy, without a limit, and under the profiler")
            first = {**loss_runs(device), **peak_runs(device), "profiled": profiled_run(device)}
            ran |= execute(first, device, store, stop)
            if not stop.received:
                say("memory limits")
                ran |= execute(limited_runs(device, ran), device, store, stop)
        if not stop.received:
            say("clocks")
            results += compare_losses({name: ran[name] for name in loss_runs(device)}, device)
            results += check_memory(device, ran, ran)
            results.append(check_clock(device))
            results += check_profile(device, ran["profiled"], store)
            results.append(check_free(device, token, before))
        stopped = stop.received
    rows = {name: run.record for name, run in ran.items() if run.record is not None}
    return Checked(results, rows, time.monotonic() - started, stopped)


@contextlib.contextmanager
def _marked(token: str) -> Iterator[None]:
    """Have processes that are started within carry a token, by which those that are left are found."""
    os.environ[VARIABLE] = token
    try:
        yield
    finally:
        del os.environ[VARIABLE]


def write_file(checked: Checked, file: Path) -> None:
    """Write what was found as JSON.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(checked.to_dict(), indent=1, default=str) + "\n")
