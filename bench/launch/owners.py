"""Who executes a run, and whether they still live."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from bench.measure import environment


def this_process() -> dict[str, Any]:
    """This process as the owner of a run."""
    return {"host": environment.host(), "pid": os.getpid(), "started": _started(os.getpid())}


def process_lives(owner: dict[str, Any]) -> bool:
    """Whether the process that `this_process` described still runs; one on another machine is taken to."""
    return owner["host"] != environment.host() or _started(owner["pid"]) == owner["started"]


def _started(pid: int) -> int | None:
    """When a process started, in clock ticks since boot: tells it from a later one of the same number."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return None if fields[0] == "Z" else int(fields[19])
