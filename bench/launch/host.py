"""Execute one run on this machine alone: start its ranks, watch over them, write its row.

The process that calls `execute` never computes. Each run's ranks are fresh processes with a fresh process group, which
find torch, and where they are forked the models too, imported already. They die with it.
"""

from __future__ import annotations

import functools
import time
from pathlib import Path

from bench import processes
from bench.config import RunConfig
from bench.launch.attempt import Attempt, write_lost_row
from bench.launch.meeting import MeetingPoint, connect
from bench.launch.owners import this_process
from bench.launch.ranks import Ended, Rank, kill, start, watch
from bench.launch.stop import StopSignal
from bench.rank import RankPlace
from bench.records import Record, claims

RENDEZVOUS_TIMEOUT_S = 300.0
"""How long a rank may wait for the others at the process group's start."""


class StuckError(RuntimeError):
    """A rank of a run that has its row could not be killed: it keeps its device, on which nothing can be measured."""

    def __init__(self, label: str, record: Record) -> None:
        super().__init__(f"{record['error']}. Nothing more can be measured on this machine until it is gone.")
        self.label, self.record = label, record


def execute(
    config: RunConfig, store: Path, *, launcher: str, sweep: str, time_limit_s: float, stop: StopSignal, log: bool
) -> Record:
    """Execute one run and write its row, however the run ends. The caller holds the run's lock.

    Parameters
    ----------
    config: RunConfig
        The run.
    store: Path
        Where the row goes.
    launcher, sweep: str
        What starts it, and the name of the sweep that asks: columns of the row.
    time_limit_s: float
        The run is `timeout` when it takes longer, and its processes are gone.
    stop: StopSignal
        When it comes, the ranks are killed and the run is `preempted`.
    log: bool
        Put the ranks' output into a file beside the row; otherwise it stays in this terminal.

    Returns
    -------
    Record
        The row that was written.

    Raises
    ------
    TakenError
        If a job of another launcher has the run.
    StuckError
        If a rank could not be killed, the row being written.
    OSError
        If the store cannot be written.
    """
    processes.prepare(config.imports)
    clear_away_dead(store, config.run_id)
    attempt = Attempt.begin(config, store, {"process": this_process()}, {"launcher": launcher, "sweep": sweep})
    places = [RankPlace(rank, rank % config.gpus_per_node, config.processes) for rank in range(config.processes)]
    ranks: list[Rank] = []
    ended: list[Ended] = []

    with MeetingPoint() as meeting:

        def look_around() -> bool:
            attempt.look_around()
            return not meeting.is_open  # without it ranks would wait for each other for minutes

        try:
            ranks = start(
                config,
                places,
                functools.partial(connect, meeting.host, meeting.port, RENDEZVOUS_TIMEOUT_S),
                attempt.trace,
                attempt.path.with_suffix(".log") if log else None,
                on_one_machine=True,
            )
            ending = watch(ranks, time.monotonic() + time_limit_s, stop, look_around)
        finally:
            ended = kill(ranks)
    cut_short = {
        "stopped": {"status": "preempted", "error": f"stopped by {stop.received}"},
        "called off": {"status": "error", "error": "the store in which its ranks find each other was killed"},
        "timeout": {"status": "timeout", "error": f"not finished after its time limit of {time_limit_s:g} s"},
    }
    stuck = any(rank.stuck for rank in ended)
    record = attempt.finish(ended, None if stuck else cut_short.get(ending))
    if stuck:
        raise StuckError(config.label, record)
    return record


def clear_away_dead(store: Path, run_id: str) -> None:
    """Write the row of an attempt that a process on this machine began and did not live to finish.

    Whoever calls holds the run's lock, which that process would have, if it lived.
    """
    claim = claims.held(store, run_id)
    if claim is not None and "process" in claim.owner:
        write_lost_row(claim, status="error", error="its job was killed or crashed")
