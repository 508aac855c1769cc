"""Execute one run on this machine: fork its ranks, watch over them, write its row.

The process that calls `execute` imports torch and the models once and never computes with them. Each run's ranks
are forked from it: fresh processes with a fresh process group, without the seconds of importing. They die with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import functools
import gc
import importlib
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

from bench import records
from bench.config import RunConfig
from bench.launch.stop import StopSignal
from bench.rank import Outcome, RankPlace, run_rank
from bench.records import Record
from bench.records.schema import PHASES
from bench.row import configured_row, environment_row, measured_row, rank_rows

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


@functools.cache
def preload(modules: tuple[str, ...]) -> None:
    """Import what ranks need, so that they find it there when they are forked.

    The garbage collector rests meanwhile, since imports leave nothing to collect, and then leaves the imported
    objects alone for good: neither this process nor the ranks, which share their pages, walk through them again.
    """
    gc.disable()
    try:
        for module in ("torch.distributed.fsdp", "torch.profiler", *modules):
            importlib.import_module(module)
        gc.freeze()
    finally:
        gc.enable()


def execute(
    config: RunConfig, store: Path, *, sweep: str, time_limit_s: float, stop: StopSignal, log_to_file: bool
) -> Record:
    """Execute one run and write its row, however the run ends.

    Parameters
    ----------
    config: RunConfig
        The run.
    store: Path
        Where the row goes.
    sweep: str
        Name of the sweep that asks.
    time_limit_s: float
        The run is `timeout` when it takes longer, and its processes are gone.
    stop: StopSignal
        When it comes, the ranks are killed and the run is `preempted`.
    log_to_file: bool
        Put the ranks' output into a file beside the row; otherwise it stays in this terminal.

    Returns
    -------
    Record
        The row that was written.
    """
    preload(config.model.imports)
    attempt = records.next_attempt(store, config.run_id)
    row_path = records.row_path(store, config.run_id, attempt)
    row_path.parent.mkdir(parents=True, exist_ok=True)
    trace, log = row_path.with_suffix(".trace.json.gz"), row_path.with_suffix(".log")
    started = datetime.datetime.now(datetime.UTC)
    ranks: list[Rank] = []
    try:
        ranks = _start(config, trace, log if log_to_file else None)
        ending = _watch(ranks, time.monotonic() + time_limit_s, stop)
    finally:
        _kill(ranks)
    outcomes = [rank.outcome for rank in ranks if rank.outcome is not None]
    row: Record = {
        **configured_row(config),
        **environment_row(outcomes),
        **_verdict(config, ranks, ending, time_limit_s, stop),
        "sweep": sweep,
        "attempt": attempt,
        "ranks": rank_rows(outcomes),
        "started_at": started.isoformat(timespec="seconds"),
        "finished_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "trace": trace.name if trace.exists() else None,
    }
    records.write(store, row)
    return row


def write_lost_row(config: RunConfig, store: Path, attempt: int, *, sweep: str, error: str) -> None:
    """Write the row of an attempt whose host died under it, unless it had written one."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    row: Record = {
        **configured_row(config),
        **environment_row([]),
        "status": "error",
        "error": error,
        "sweep": sweep,
        "attempt": attempt,
        "started_at": now,
        "finished_at": now,
    }
    with contextlib.suppress(FileExistsError):
        records.write(store, row)


def _start(config: RunConfig, trace: Path, log: Path | None) -> list[Rank]:
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


def _watch(ranks: list[Rank], deadline: float, stop: StopSignal) -> str:
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


def _kill(ranks: list[Rank]) -> None:
    for rank in ranks:
        if rank.process.is_alive():
            rank.killed = True
            rank.process.kill()
    for rank in ranks:
        rank.process.join()
        rank.receive()


def _verdict(config: RunConfig, ranks: list[Rank], ending: str, time_limit_s: float, stop: StopSignal) -> Record:
    """What the run as a whole came to, from how each rank ended.

    A rank killed from outside explains the connection errors of the others; running out of memory explains them
    too, and a crash under a CPU memory limit is taken for it; otherwise the error that came first does.
    """
    if ending == "stopped":
        return {"status": "preempted", "error": f"stopped by {stop.received}"}
    if ending == "timeout":
        return {"status": "timeout", "error": f"not finished after its time limit of {time_limit_s:g} s"}
    killed = [rank for rank in ranks if rank.outcome is None and not rank.killed]
    failures = [rank.outcome for rank in ranks if rank.outcome is not None and rank.outcome.status != "ok"]
    failures.sort(key=lambda outcome: (outcome.status != "oom", outcome.failed_at or 0.0))
    if failures and failures[0].status == "oom":
        first = failures[0]
        return {
            "status": "oom",
            "oom_phase": first.phase,
            "oom_bytes": first.oom_bytes,
            "oom_rank": first.rank,
            "error": first.error,
        }
    crashed = [rank for rank in killed if rank.crashed]
    if crashed and config.hardware.device == "cpu" and config.hardware.memory_limit_gib is not None:
        # Native code seldom survives that malloc gives it nothing: not gloo's, and not the profiler's.
        return {
            "status": "oom",
            "oom_phase": PHASES[crashed[0].last_phase[0]],
            "oom_bytes": None,
            "oom_rank": crashed[0].number,
            "error": f"rank {crashed[0].number} {crashed[0].end()} under its memory limit, taken for lack of memory",
        }
    if killed:
        return {"status": "error", "error": "; ".join(f"rank {rank.number} {rank.end()}" for rank in killed)}
    if failures:
        first = failures[0]
        return {"status": "error", "error": f"rank {first.rank}, {first.phase}: {first.error}"}
    return {"status": "ok", **measured_row(config, [rank.outcome for rank in ranks if rank.outcome is not None])}


def describe(record: Record) -> str:
    """What became of a run, in a few words."""
    if record["status"] == "ok":
        tflops = record["tflops_per_gpu"]
        speed = f"{tflops:.1f} TFLOP/s" if tflops >= 1 else f"{tflops * 1000:.1f} GFLOP/s"
        return f"{record['step_time_median_s'] * 1000:.1f} ms/step, {speed} per rank"
    if record["status"] == "oom":
        asked = record.get("oom_bytes")
        return f"out of memory in {record['oom_phase']}" + (f", asking for {asked / 2**20:.1f} MiB" if asked else "")
    return str(record.get("error"))
