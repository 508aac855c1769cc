"""Where the processes of a run find each other: a key-value store, served by a process of its own."""

from __future__ import annotations

import datetime
import signal
from multiprocessing import connection
from types import TracebackType

import torch.distributed as dist

from bench import processes
from bench.rendezvous import LOOPBACK, serve_tcp_store


class RendezvousServer:
    """A `TCPStore` in a child process, while entered, on a port the system chose: no two jobs can share it.

    Whoever opens it has no threads because of it and can fork ranks afterwards, and no rank takes it along when it
    dies.

    Parameters
    ----------
    host: str
        The address of this machine that it listens on.
    """

    port: int

    def __init__(self, host: str = LOOPBACK) -> None:
        self.host = host

    def __enter__(self) -> RendezvousServer:
        mp_context = processes.get_mp_context()
        receiver, sender = mp_context.Pipe(duplex=False)
        self._process = mp_context.Process(
            target=_serve_store, args=(self.host, sender), name="meeting point", daemon=True
        )
        self._process.start()
        sender.close()
        try:
            self.port = receiver.recv()
        except EOFError:
            raise RuntimeError("the store in which ranks find each other could not be opened") from None
        return self

    @property
    def is_open(self) -> bool:
        """Whether it is still there to be asked."""
        return self._process.is_alive()

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.join()


def _serve_store(host: str, port_pipe: connection.Connection) -> None:
    processes.bind_to_parent()
    tcp_store = serve_tcp_store(host)
    port_pipe.send(tcp_store.port)
    while True:
        signal.pause()


def connect_to_rendezvous(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """A client of a meeting point.

    Raises
    ------
    torch.distributed.DistError
        If it cannot be reached within the time, which also bounds every later request.
    """
    return dist.TCPStore(host, port, is_master=False, timeout=datetime.timedelta(seconds=timeout_s))
