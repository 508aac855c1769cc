"""Where the processes of a run find each other: a key-value store, served by a process of its own."""

from __future__ import annotations

import ctypes
import datetime
import multiprocessing
import os
import signal
from multiprocessing import connection
from types import TracebackType

import torch.distributed as dist

PR_SET_PDEATHSIG = 1

POLITE_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
"""Signals that a terminal or SLURM sends to all processes of a run; only the one that watches over them acts."""

_fork = multiprocessing.get_context("fork")


def follow_parent(parent: int) -> None:
    """Have this forked process die with its parent, and leave polite signals to it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked to die with it
        os._exit(1)
    for number in POLITE_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class MeetingPoint:
    """A `TCPStore` in a child process, while entered, on a port the system chose: no two jobs can share it.

    Whoever opens it has no threads because of it and can fork ranks afterwards, and no rank takes it along when it
    dies.
    """

    port: int

    def __enter__(self) -> MeetingPoint:
        receiver, sender = _fork.Pipe(duplex=False)
        self._server = _fork.Process(target=_serve, args=(sender, os.getpid()), name="meeting point", daemon=True)
        self._server.start()
        sender.close()
        try:
            self.port = receiver.recv()
        except EOFError:
            raise RuntimeError("the store in which ranks find each other could not be opened") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.kill()
        self._server.join()


def _serve(port: connection.Connection, parent: int) -> None:
    follow_parent(parent)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.send(store.port)
    while True:
        signal.pause()


def connect(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """A client of a meeting point.

    Raises
    ------
    torch.distributed.DistError
        If it cannot be reached within the time, which also bounds every later request.
    """
    return dist.TCPStore(host, port, is_master=False, timeout=datetime.timedelta(seconds=timeout_s))
