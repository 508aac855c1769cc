"""Over which network NCCL communicates, as it says itself when it starts."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

NETWORK = re.compile(r"NCCL INFO Using network (\S.*)")


def watch_network() -> Callable[[], str | None]:
    """Have NCCL write down what it chooses when it starts, unless the user has it write something already.

    NCCL has no function that tells. What it writes once at its start costs the steps nothing.

    Returns
    -------
    Callable
        The network's name (IB, Socket, AWS Libfabric, ...), once there is a communicator; None where nothing was said.
    """
    if "NCCL_DEBUG" in os.environ:
        return lambda: None
    log = os.memfd_create("nccl")  # a file in memory, which goes with this process however it ends
    settings = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT", "NCCL_DEBUG_FILE": f"/proc/self/fd/{log}"}
    os.environ.update(settings)

    def network() -> str | None:
        for variable in settings:
            os.environ.pop(variable, None)
        text = os.pread(log, os.fstat(log).st_size, 0)
        os.close(log)
        return network_in(text.decode(errors="replace"))

    return network


def network_in(log: str) -> str | None:
    """What NCCL's log names; several, where communicators differ, with commas."""
    return ", ".join(sorted({name.strip() for name in NETWORK.findall(log)})) or None
