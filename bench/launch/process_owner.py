"""Who executes a run, and whether they still live."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.rank import environment


def describe_this_process() -> dict[str, Any]:
    """This process as the owner of a run."""
    return {"host": environment.get_host_name(), "pid": os.getpid(), "started": _read_start_ticks(os.getpid())}


def get_user_name() -> str:
    """Name of the account that this process runs as, or its number if it has none."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def is_process_alive(owner: Any) -> bool:
    """Whether the process that `describe_this_process` described still runs; one on another machine is taken to.

    What describes no process is none that lives.
    """
    if not isinstance(owner, dict):
        return False
    pid, start_ticks = owner.get("pid"), owner.get("started")
    if type(pid) is not int or type(start_ticks) is not int:
        return False
    return owner.get("host") != environment.get_host_name() or _read_start_ticks(pid) == start_ticks


def describe_owner(owner: Mapping[str, Any]) -> str:
    """Who has a claim, for a sentence: ``job 12_3``, or ``process 7 on node1``."""
    process = owner.get("process")
    if isinstance(process, dict):
        return f"process {process.get('pid')} on {process.get('host')}"
    return f"job {owner.get('job')}"


def _read_start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot: tells it from a later one of the same number."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    stat_fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return None if stat_fields[0] == "Z" else int(stat_fields[19])
