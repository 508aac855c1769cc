"""The ranks of one run on this machine: fork them, watch over them, end them."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import mmap
import multiprocessing
import os
import signal
import sys
import time
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.context import ForkProcess
from pathlib import Path

import torch.distributed as dist

from bench.config import RunConfig
from bench.launch.stop import StopSignal
from bench.rank import Outcome, RankPlace, run_rank
from bench.records.schema import PHASES

GRACE_S = 2.0
"""After a rank failed, how long the others may take to say that they failed too, before they are killed."""

POLL_S = 0.25
"""How often to look for a stop signal while ranks run."""

CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)

PR_SET_PDEATHSIG = 1

_fork = multiprocessing.get_context("fork")


@dataclass
class Rank:
    """A forked rank, the pipe its outcome comes through, and the outcome."""

    number: int
    process: ForkProcess
    pipe: connection.Connection
    last_phase: mmap.mmap
    """One byte shared with the rank: number of the phase it last entered."""
    outcome: Outcome | None = None
    killed: bool = False
    """By us, so that its end says nothing about the run."""

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

    @property
    def crashed(self) -> bool:
        """Whether native code in it ended it."""
        return self.process.exitcode in [-number for number in CRASHES]

    def end(self) -> str:
        """How the process ended, in words."""
        code = self.process.exitcode
        if code is not None and code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"


def start(config: RunConfig, trace: Path, log: Path | None) -> list[Rank]:
    """Fork the ranks, then open the store they meet in: forked before its threads exist."""
    ranks, addresses = [], []
    for number in range(config.gpus):
        address_receiver, address_sender = _fork.Pipe(duplex=False)
        outcome_receiver, outcome_sender = _fork.Pipe(duplex=False)
        place = RankPlace(number, number % config.gpus_per_node, config.gpus)
        last_phase = mmap.mmap(-1, 1)
        process = _fork.Process(
            target=_rank_main,
            args=(config, place, address_receiver, outcome_sender, last_phase, trace, log, os.getpid()),
            name=f"rank {number}",
            daemon=True,
        )
        process.start()
        address_receiver.close()
        outcome_sender.close()
        ranks.append(Rank(number, process, outcome_receiver, last_phase))
        addresses.append(address_sender)
    meeting_point = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for sender in addresses:
        with contextlib.suppress(BrokenPipeError):  # a rank that died already is seen by the watch
            sender.send(meeting_point.port)
        sender.close()
    # Kept alive by the ranks' list, for as long as they run.
    ranks[0].process.meeting_point = meeting_point  # type: ignore[attr-defined]
    return ranks


def _rank_main(
    config: RunConfig,
    place: RankPlace,
    address: connection.Connection,
    outcome: connection.Connection,
    last_phase: mmap.mmap,
    trace: Path,
    log: Path | None,
    parent: int,
) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked to die with it
        os._exit(1)
    for number in (signal.SIGINT, signal.SIGTERM):  # whoever sends them to a whole process group: the host decides
        signal.signal(number, signal.SIG_IGN)
    if log is not None:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
    faulthandler.enable(file=2)  # a crash in native code leaves its stack in the log

    def rendezvous() -> dist.Store:
        return dist.TCPStore("127.0.0.1", address.recv(), is_master=False)

    def note_phase(phase: str) -> None:
        last_phase[0] = PHASES.index(phase)

    result = run_rank(config, place, rendezvous, trace, note_phase)
    outcome.send(result)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not by way of destructors: those of a process group may wait for ranks that are gone.
    os._exit(0 if result.status == "ok" else 1)


def watch(ranks: list[Rank], deadline: float, stop: StopSignal) -> str:
    """Wait until every rank has ended or one failed (`ended`), time is up (`timeout`) or a signal came (`stopped`)."""
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
        waiting = [rank.pipe for rank in ranks if rank.outcome is None]
        connection.wait([*(rank.process.sentinel for rank in running), *waiting], timeout=min(left, POLL_S))


def _let_others_report(ranks: list[Rank]) -> None:
    deadline = time.monotonic() + GRACE_S
    while any(rank.process.is_alive() for rank in ranks) and time.monotonic() < deadline:
        for rank in ranks:
            rank.receive()
        time.sleep(0.02)


def kill(ranks: list[Rank]) -> None:
    """End the ranks that still run, and take what the others sent before they ended."""
    for rank in ranks:
        if rank.process.is_alive():
            rank.killed = True
            rank.process.kill()
    for rank in ranks:
        rank.process.join()
        rank.receive()
