"""Over which network NCCL communicates, as it says itself when it starts."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

NETWORK_PATTERN = re.compile(r"NCCL INFO Using network (\S.*)")


def capture_nccl_network() -> Callable[[], str | None]:
    """Have NCCL write down what it chooses when it starts, unless the user has it write something already.

    NCCL has no function that tells. What it writes once at its start costs the steps nothing.

    Returns
    -------
    Callable
        The network's name (IB, Socket, AWS Libfabric, ...), once there is a communicator; None where nothing was said.
    """
    if "NCCL_DEBUG" in os.environ:
        return lambda: None
    log_descriptor = os.memfd_create("nccl")  # a file in memory, which goes with this process however it ends
    nccl_variables = {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT",
        "NCCL_DEBUG_FILE": f"/proc/self/fd/{log_descriptor}",
    }
    os.environ.update(nccl_variables)

    def read_network() -> str | None:
        for variable in nccl_variables:
            os.environ.pop(variable, None)
        text = os.pread(log_descriptor, os.fstat(log_descriptor).st_size, 0)
        os.close(log_descriptor)
        return parse_network(text.decode(errors="replace"))

    return read_network


def parse_network(log_text: str) -> str | None:
    """What NCCL's log names; several, where communicators differ, with commas."""
    return ", ".join(sorted({name.strip() for name in NETWORK_PATTERN.findall(log_text)})) or None
