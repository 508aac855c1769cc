"""The check that comes by itself before the first sweep on a machine's GPUs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
from collections.abc import Callable, Iterable

import torch

from bench.checks.machine import driver_version
from bench.checks.session import Checked
from bench.config import RunConfig
from bench.errors import UsageError
from bench.hardware.detect import Device
from bench.simulate.cache import cache_file


def check_once(configs: Iterable[RunConfig], device: Device, check: Callable[[Device], Checked]) -> None:
    """Check this machine, unless it passed with these GPUs, this driver and this torch, or no run is on a GPU.

    Parameters
    ----------
    configs: iterable of RunConfig
        What is to be executed on this machine.
    check: callable
        Checks a device, and shows what it found.

    Raises
    ------
    UsageError
        If the check fails: nothing that is measured on the machine could be believed.
    KeyboardInterrupt
        If it was stopped: whoever stops a sweep's check stops the sweep.
    """
    if device.kind != "cuda" or not any(config.hardware.device == "cuda" for config in configs):
        return
    file = cache_file()
    passed = file.with_name("checked.json") if file else None
    machine = _machine(device)
    known: list[str] = []
    if passed is not None:
        with contextlib.suppress(OSError, ValueError, TypeError):
            known = [entry for entry in json.loads(passed.read_text()) if isinstance(entry, str)]
    if machine in known:
        return
    checked = check(device)
    if checked.stopped:
        raise KeyboardInterrupt
    if not checked.passed:
        raise UsageError(
            "No run was started, since this machine failed its check (the table above; python -m bench.check repeats "
            "it): choose check=false to start the sweep all the same."
        )
    if passed is not None:
        with contextlib.suppress(OSError):  # a check that cannot be remembered comes again
            passed.parent.mkdir(parents=True, exist_ok=True)
            passed.write_text(json.dumps([*known, machine]) + "\n")


def _machine(device: Device) -> str:
    """What a check holds for: another GPU, driver or torch wants another one."""
    parts = (socket.gethostname(), device.name, device.count, driver_version(), torch.__version__)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
