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

from bench import processes
from bench.config import RunConfig
from bench.launch.stop import StopSignal
from bench.rank import Outcome, RankPlace, run_rank
from bench.records.schema import PHASES
from bench.rendezvous import stay_on_this_machine

GRACE_S = 2.0
"""After a rank failed, how long the others may take to say that they failed too, before they are killed."""

POLL_S = 0.25
"""How often to look for a stop signal while ranks run."""

KILLED_S = 60.0
"""How long a killed rank may take to be gone, before it is left behind: one that hangs in a driver cannot be killed."""

CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)


@dataclass(frozen=True)
class Ended:
    """How one rank of a run ended. Plain values, so that it can be sent between processes."""

    number: int
    outcome: Outcome | None = None
    """What it said itself; None if it did not live to say it."""
    killed: bool = False
    """By us, so that its end says nothing about the run."""
    crashed: bool = False
    """Native code in it ended it."""
    last_phase: str = "init"
    end: str = ""
    """How the process ended, in words."""
    stuck: bool = False
    """It could not be killed."""


@dataclass
class Rank:
    """A started rank, the pipe its outcome comes through, and the outcome."""

    number: int
    process: ForkProcess | ForkServerProcess
    pipe: connection.Connection
    last_phase: MutableSequence[int]
    """One byte shared with the rank: number of the phase it last entered."""
    outcome: Outcome | None = None
    killed: bool = False

    def receive(self) -> None:
        """Take the outcome from the pipe, if it has come."""
        with contextlib.suppress(EOFError, OSError):
            if self.outcome is None and self.pipe.poll():
                self.outcome = self.pipe.recv()

    @property
    def failed(self) -> bool:
        """Whether it ended other than well."""
        ended = not self.process.is_alive()  # asked first: what it sent before it ended is there by now
        self.receive()
        if self.outcome is not None:
            return self.outcome.status != "ok"
        return ended and not self.killed

    def ended(self) -> Ended:
        """How it ended, or that it cannot be ended."""
        if self.process.is_alive():
            stuck = "could not be killed: it hangs in the kernel or in a driver, see dmesg"
            return Ended(self.number, self.outcome, stuck=True, last_phase=PHASES[self.last_phase[0]], end=stuck)
        code = self.process.exitcode or 0
        crashed = code in [-number for number in CRASHES]
        words = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return Ended(self.number, self.outcome, self.killed, crashed, PHASES[self.last_phase[0]], words)


def start(
    config: RunConfig,
    places: Sequence[RankPlace],
    rendezvous: Callable[[], dist.Store],
    trace: Path,
    log: Path | None,
    *,
    on_one_machine: bool,
    check_nodes: bool = False,
) -> list[Rank]:
    """Start a rank for each place.

    Parameters
    ----------
    rendezvous: callable
        Called in each rank, to which it is pickled: gives the store in which all ranks of the run find each other.
    trace, log: Path
        Where rank 0's profiler trace and the ranks' output go; without `log` it stays in this terminal.
    on_one_machine: bool
        All ranks of the run are on this one: nothing of them listens to any other.
    check_nodes: bool
        Have every rank check its node first.
    """
    ranks = []
    context = processes.context()
    for place in places:
        receiver, sender = context.Pipe(duplex=False)
        last_phase = context.RawArray("B", 1)
        process = context.Process(
            target=_rank_main,
            args=(config, place, rendezvous, sender, last_phase, trace, log, on_one_machine, check_nodes),
            name=f"rank {place.rank}",
            daemon=True,
        )
        process.start()
        sender.close()
        ranks.append(Rank(place.rank, process, receiver, last_phase))
    return ranks


def _rank_main(
    config: RunConfig,
    place: RankPlace,
    rendezvous: Callable[[], dist.Store],
    outcome: connection.Connection,
    last_phase: MutableSequence[int],
    trace: Path,
    log: Path | None,
    on_one_machine: bool,
    check_node: bool,
) -> None:
    processes.follow_parent()
    if on_one_machine:
        stay_on_this_machine()
    if log is not None:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
    faulthandler.enable(file=2)  # a crash in native code leaves its stack in the log

    def note_phase(phase: str) -> None:
        last_phase[0] = PHASES.index(phase)

    processes.preload(config.imports)
    result = run_rank(config, place, rendezvous, trace, note_phase, check_node=check_node)
    outcome.send(result)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not by way of destructors: those of a process group may wait for ranks that are gone.
    os._exit(0 if result.status == "ok" else 1)


def watch(ranks: list[Rank], deadline: float, stop: StopSignal, called_off: Callable[[], bool] = lambda: False) -> str:
    """Wait until every rank has ended or one failed.

    Parameters
    ----------
    deadline: float
        On `time.monotonic`.
    called_off: callable
        Asked now and then whether to wait any longer.

    Returns
    -------
    str
        `ended`, `timeout` when time was up first, `stopped` when a signal came, `called off`.
    """
    while True:
        for rank in ranks:
            rank.receive()
        if any(rank.failed for rank in ranks):
            _let_others_report(ranks)
            return "ended"
        running = [rank for rank in ranks if rank.process.is_alive()]
        if not running:
            return "ended"
        left = deadline - time.monotonic()
        if stop.received or left <= 0:
            return "stopped" if stop.received else "timeout"
        if called_off():
            return "called off"
        waiting = [rank.pipe for rank in ranks if rank.outcome is None]
        connection.wait([*(rank.process.sentinel for rank in running), *waiting], timeout=min(left, POLL_S))


def _let_others_report(ranks: list[Rank]) -> None:
    deadline = time.monotonic() + GRACE_S
    while any(rank.process.is_alive() for rank in ranks) and time.monotonic() < deadline:
        for rank in ranks:
            rank.receive()
        time.sleep(0.02)


def kill(ranks: list[Rank]) -> list[Ended]:
    """End the ranks that still run, take what the others sent before they ended, and say how each ended."""
    for rank in ranks:
        if rank.process.is_alive():
            rank.killed = True
            rank.process.kill()
    deadline = time.monotonic() + KILLED_S
    for rank in ranks:
        rank.process.join(max(0.0, deadline - time.monotonic()))
        rank.receive()
        if rank.process.is_alive():
            multiprocessing.process._children.discard(rank.process)  # type: ignore[attr-defined]  # waited for at exit
    return [rank.ended() for rank in ranks]
