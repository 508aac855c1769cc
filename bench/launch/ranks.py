"""The ranks of one run that live on this machine: start them, watch over them, end them."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import importlib
import ipaddress
import multiprocessing.process
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.context import ForkProcess, ForkServerProcess
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from bench.config.run_config import RunConfig
from bench.core import processes
from bench.rank import environment
from bench.rank.coordinates import RankCoordinates
from bench.records.schema import OOM_PHASES

if TYPE_CHECKING:
    import torch.distributed as dist

    from bench.rank.run_rank import RankOutcome

RANK_MODULE = "bench.rank.run_rank"
"""What a rank runs, and what its outcome consists of."""

FAILURE_REPORT_TIMEOUT_S = 2.0
"""After a rank failed, how long the others may take to say that they failed too, before they are killed."""

POLL_INTERVAL_S = 0.25
"""How often to look for a stop signal while ranks run."""

KILL_TIMEOUT_S = 60.0
"""How long a killed rank may take to be gone, before it is left behind: one that hangs in a driver cannot be killed."""

CRASH_SIGNALS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)


@dataclass(frozen=True)
class RankExit:
    """How one rank of a run ended. Plain values, so that it can be sent between processes."""

    rank: int
    outcome: RankOutcome | None = None
    """What it said itself; None if it did not live to say it."""
    host: str = ""
    killed_by_launcher: bool = False
    """By us, so that its end says nothing about the run."""
    crashed: bool = False
    """Native code in it ended it."""
    last_phase: str = "init"
    exit_description: str = ""
    """How the process ended, in words."""
    unkillable: bool = False
    """It could not be killed."""


def preload_for_ranks(config: RunConfig) -> None:
    """Import what the ranks of a run need once, if they will find it because they are forked, and what their outcomes
    consist of: when one has failed, there is no time for it, since the others are soon taken to be stuck."""
    processes.preload_if_forking((RANK_MODULE, *config.modules_to_preload))
    importlib.import_module(RANK_MODULE)


@dataclass
class RankProcess:
    """A started rank, the pipe its outcome comes through, and the outcome."""

    rank: int
    process: ForkProcess | ForkServerProcess
    outcome_pipe: connection.Connection
    last_phase_byte: MutableSequence[int]
    """One byte shared with the rank: number of the phase it last entered."""
    outcome: RankOutcome | None = None
    killed_by_launcher: bool = False

    def receive_outcome(self) -> None:
        """Take the outcome from the pipe, if it has come."""
        with contextlib.suppress(EOFError, OSError):
            if self.outcome is None and self.outcome_pipe.poll():
                self.outcome = self.outcome_pipe.recv()

    @property
    def has_failed(self) -> bool:
        """Whether it ended other than well."""
        has_exited = not self.process.is_alive()  # asked first: what it sent before it ended is there by now
        self.receive_outcome()
        if self.outcome is not None:
            return self.outcome.status != "ok"
        return has_exited and not self.killed_by_launcher

    def describe_exit(self) -> RankExit:
        """How it ended, or that it cannot be ended."""
        host = environment.get_host_name()
        if self.process.is_alive():
            unkillable_text = "could not be killed: it hangs in the kernel or in a driver, see dmesg"
            return RankExit(
                self.rank,
                self.outcome,
                host,
                unkillable=True,
                last_phase=OOM_PHASES[self.last_phase_byte[0]],
                exit_description=unkillable_text,
            )
        exit_code = self.process.exitcode or 0
        crashed = exit_code in [-signal_number for signal_number in CRASH_SIGNALS]
        exit_description = (
            f"was killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"ended with exit code {exit_code}"
        )
        return RankExit(
            self.rank,
            self.outcome,
            host,
            self.killed_by_launcher,
            crashed,
            OOM_PHASES[self.last_phase_byte[0]],
            exit_description,
        )


def start_ranks(
    config: RunConfig,
    rank_coordinates: Sequence[RankCoordinates],
    connect_store: Callable[[], dist.Store],
    trace_path: Path,
    log_path: Path | None,
    *,
    on_one_host: bool,
    check_nodes: bool = False,
) -> list[RankProcess]:
    """Start a rank for each place.

    Parameters
    ----------
    connect_store: callable
        Called in each rank, to which it is pickled: gives the store in which all ranks of the run find each other.
    trace_path, log_path: Path
        Where rank 0's profiler trace and the ranks' output go; without `log_path` it stays in this terminal.
    on_one_host: bool
        All ranks of the run are on this one: nothing of them listens to any other.
    check_nodes: bool
        Have every rank check its node first.
    """
    rank_processes = []
    mp_context = processes.get_mp_context()
    for coordinates in rank_coordinates:
        receiver, sender = mp_context.Pipe(duplex=False)
        last_phase_byte = mp_context.RawArray("B", 1)
        process = mp_context.Process(
            target=_run_rank_process,
            args=(
                config,
                coordinates,
                connect_store,
                sender,
                last_phase_byte,
                trace_path,
                log_path,
                on_one_host,
                check_nodes,
            ),
            name=f"rank {coordinates.rank}",
            daemon=True,
        )
        process.start()
        sender.close()
        rank_processes.append(RankProcess(coordinates.rank, process, receiver, last_phase_byte))
    return rank_processes


def _run_rank_process(
    config: RunConfig,
    coordinates: RankCoordinates,
    connect_store: Callable[[], dist.Store],
    outcome_pipe: connection.Connection,
    last_phase_byte: MutableSequence[int],
    trace_path: Path,
    log_path: Path | None,
    on_one_host: bool,
    check_node: bool,
) -> None:
    from bench.rank.run_rank import run_rank

    processes.bind_to_parent()
    if on_one_host:
        restrict_gloo_to_loopback()
    if log_path is not None:
        descriptor = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
    faulthandler.enable(file=2)  # a crash in native code leaves its stack in the log

    def report_phase(phase: str) -> None:
        last_phase_byte[0] = OOM_PHASES.index(phase)

    processes.preload_modules(config.modules_to_preload)
    rank_outcome = run_rank(config, coordinates, connect_store, trace_path, report_phase, check_node=check_node)
    outcome_pipe.send(rank_outcome)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not by way of destructors: those of a process group may wait for ranks that are gone.
    os._exit(0 if rank_outcome.status == "ok" else 1)


def wait_for_ranks(
    rank_processes: list[RankProcess],
    deadline: float,
    stop: StopSignal,
    should_abort: Callable[[], bool] = lambda: False,
) -> str:
    """Wait until every rank has ended or one failed.

    Parameters
    ----------
    deadline: float
        On `time.monotonic`.
    should_abort: callable
        Asked now and then whether to wait any longer.

    Returns
    -------
    str
        `ended`, `timeout` when time was up first, `stopped` when a signal came, `called off`.
    """
    while True:
        for rank_process in rank_processes:
            rank_process.receive_outcome()
        if any(rank_process.has_failed for rank_process in rank_processes):
            _wait_for_other_reports(rank_processes)
            return "ended"
        running_ranks = [rank_process for rank_process in rank_processes if rank_process.process.is_alive()]
        if not running_ranks:
            return "ended"
        remaining_s = deadline - time.monotonic()
        if stop.received or remaining_s <= 0:
            return "stopped" if stop.received else "timeout"
        if should_abort():
            return "called off"
        pending_pipes = [rank_process.outcome_pipe for rank_process in rank_processes if rank_process.outcome is None]
        connection.wait(
            [*(rank_process.process.sentinel for rank_process in running_ranks), *pending_pipes],
            timeout=min(remaining_s, POLL_INTERVAL_S),
        )


def _wait_for_other_reports(rank_processes: list[RankProcess]) -> None:
    deadline = time.monotonic() + FAILURE_REPORT_TIMEOUT_S
    while any(rank_process.process.is_alive() for rank_process in rank_processes) and time.monotonic() < deadline:
        for rank_process in rank_processes:
            rank_process.receive_outcome()
        time.sleep(0.02)


def kill_ranks(rank_processes: list[RankProcess]) -> list[RankExit]:
    """End the ranks that still run, take what the others sent before they ended, and say how each ended."""
    for rank_process in rank_processes:
        if rank_process.process.is_alive():
            rank_process.killed_by_launcher = True
            rank_process.process.kill()
    deadline = time.monotonic() + KILL_TIMEOUT_S
    for rank_process in rank_processes:
        rank_process.process.join(max(0.0, deadline - time.monotonic()))
        rank_process.receive_outcome()
        if rank_process.process.is_alive():
            multiprocessing.process._children.discard(rank_process.process)  # type: ignore[attr-defined]  # waited for at exit
    return [rank_process.describe_exit() for rank_process in rank_processes]


# --- Where processes find each other: a key-value store that listens on one address alone, never on all of a machine.

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
    import torch.distributed as dist

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
            target=_serve_store, args=(self.host, sender), name="rendezvous server", daemon=True
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
    """A client of a rendezvous server.

    Raises
    ------
    torch.distributed.DistError
        If it cannot be reached within the time, which also bounds every later request.
    """
    import torch.distributed as dist

    return dist.TCPStore(host, port, is_master=False, timeout=datetime.timedelta(seconds=timeout_s))


# --- Ask to stop, by signal: noticed between the things that must not be torn apart, such as writing a row.


class StopSignal:
    """Remembers that one of some signals came, while installed; whoever waits looks at `received`."""

    def __init__(self, *signals: signal.Signals) -> None:
        self._received: str | None = None
        self._signals = signals or (signal.SIGINT, signal.SIGTERM)
        self._previous_handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for signal_number in self._signals:
            self._previous_handlers[signal_number] = signal.signal(signal_number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for signal_number, handler in self._previous_handlers.items():
            signal.signal(signal_number, handler)

    @property
    def received(self) -> str | None:
        """Name of the signal that came first, if one came."""
        return self._received

    def _receive(self, signal_number: int, _frame: FrameType | None) -> None:
        self._received = self._received or signal.Signals(signal_number).name
