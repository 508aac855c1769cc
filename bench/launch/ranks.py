"""The ranks of one run that live on this machine: start them, watch over them, end them."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing.process
import os
import signal
import sys
import time
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.context import ForkProcess, ForkServerProcess
from pathlib import Path

import torch.distributed as dist

from bench.config.run_config import RunConfig
from bench.core import processes
from bench.launch.rendezvous import restrict_gloo_to_loopback
from bench.launch.stop_signal import StopSignal
from bench.rank.run_rank import RankCoordinates, RankOutcome, run_rank
from bench.records.schema import OOM_PHASES

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
    killed_by_launcher: bool = False
    """By us, so that its end says nothing about the run."""
    crashed: bool = False
    """Native code in it ended it."""
    last_phase: str = "init"
    exit_description: str = ""
    """How the process ended, in words."""
    unkillable: bool = False
    """It could not be killed."""


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
        if self.process.is_alive():
            unkillable_text = "could not be killed: it hangs in the kernel or in a driver, see dmesg"
            return RankExit(
                self.rank,
                self.outcome,
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
