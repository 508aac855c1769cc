"""Where processes find each other: a key-value store that listens on one address alone, never on all of a machine.

A `TCPStore` asks nobody who they are. By itself it listens on every network of its machine.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import signal
import socket
from collections.abc import Sequence
from multiprocessing import connection
from types import TracebackType

import torch.distributed as dist

from bench.core import processes

LOOPBACK = "127.0.0.1"

UNASSIGNED_ADDRESS = "192.0.2.1"
"""An address that belongs to nobody (RFC 5737): the way there is the default route."""

GLOO_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
"""Environment variable that names the network whose address gloo listens on."""


def serve_tcp_store(address: str, port: int = 0) -> dist.TCPStore:
    """A store that this process serves, on an address of this machine.

    Parameters
    ----------
    port: int
        0 for one that the system chooses: no two runs can share it.

    Raises
    ------
    OSError
        If the address is not this machine's, or the port is taken.
    """
    address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=address_family, backlog=1024)
    port = listener.getsockname()[1]
    return dist.TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def restrict_gloo_to_loopback() -> None:
    """Have gloo, too, listen on no network in this process, whose peers are all on this machine."""
    os.environ.setdefault(GLOO_INTERFACE_VARIABLE, "lo")


def find_address_towards(peer_hosts: Sequence[str]) -> str:
    """This machine's address on the network that it reaches others by; loopback if there are no others.

    Where no name can be resolved it is the address towards everywhere else.
    """
    for peer_host in (*peer_hosts, UNASSIGNED_ADDRESS) if peer_hosts else ():
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp_socket:
            udp_socket.connect((peer_host, 9))  # sends nothing
            return str(udp_socket.getsockname()[0])
    return LOOPBACK


def find_address_of(host: str, peer_hosts: Sequence[str]) -> str:
    """This machine's address that others find under its name, which may be loopback's on this machine itself."""
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(host)
        if not peer_hosts or not ipaddress.ip_address(address).is_loopback:
            return address
    return find_address_towards(peer_hosts)


# --- Where the processes of a run find each other: a key-value store, served by a process of its own.


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
