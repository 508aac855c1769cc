"""Execute one run on this machine alone: start its ranks, watch over them, write its row.

The process that calls `execute_run` never computes. Each run's ranks are fresh processes with a fresh process group,
which find torch, and where they are forked the models too, imported already. They die with it.
"""

from __future__ import annotations

import functools
import time
from pathlib import Path

from bench.config.run_config import RunConfig
from bench.core import processes
from bench.launch.attempt import Attempt, describe_this_process, write_lost_row
from bench.launch.ranks import (
    RankExit,
    RankProcess,
    RendezvousServer,
    StopSignal,
    connect_to_rendezvous,
    kill_ranks,
    start_ranks,
    wait_for_ranks,
)
from bench.rank.run_rank import RankCoordinates
from bench.records import Record, claims

RENDEZVOUS_TIMEOUT_S = 300.0
"""How long a rank may wait for the others at the process group's start."""


class UnkillableRankError(RuntimeError):
    """A rank of a run that has its row could not be killed: it keeps its device, on which nothing can be measured."""

    def __init__(self, label: str, record: Record) -> None:
        super().__init__(f"{record['error']}. Nothing more can be measured on this machine until it is gone.")
        self.label, self.record = label, record


def execute_run(
    config: RunConfig,
    store: Path,
    *,
    launcher: str,
    sweep: str,
    time_limit_s: float,
    stop: StopSignal,
    log_to_file: bool,
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
    log_to_file: bool
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
    processes.preload_if_forking(config.modules_to_preload)
    write_dead_attempt_row(store, config.run_id)
    attempt = Attempt.begin(config, store, {"process": describe_this_process()}, {"launcher": launcher, "sweep": sweep})
    rank_coordinates = [
        RankCoordinates(rank, rank % config.gpus_per_node, config.active_processes)
        for rank in range(config.active_processes)
    ]
    rank_processes: list[RankProcess] = []
    rank_exits: list[RankExit] = []

    with RendezvousServer() as rendezvous_server:

        def should_abort() -> bool:
            attempt.note_concurrent_runs()
            return not rendezvous_server.is_open  # without it ranks would wait for each other for minutes

        try:
            rank_processes = start_ranks(
                config,
                rank_coordinates,
                functools.partial(
                    connect_to_rendezvous, rendezvous_server.host, rendezvous_server.port, RENDEZVOUS_TIMEOUT_S
                ),
                attempt.trace_path,
                attempt.row_path.with_suffix(".log") if log_to_file else None,
                on_one_host=True,
            )
            end_reason = wait_for_ranks(rank_processes, time.monotonic() + time_limit_s, stop, should_abort)
        finally:
            rank_exits = kill_ranks(rank_processes)
    abort_outcomes = {
        "stopped": {"status": "preempted", "error": f"stopped by {stop.received}"},
        "called off": {"status": "error", "error": "the store in which its ranks find each other was killed"},
        "timeout": {"status": "timeout", "error": f"not finished after its time limit of {time_limit_s:g} s"},
    }
    has_unkillable_rank = any(rank_exit.unkillable for rank_exit in rank_exits)
    record = attempt.finish(rank_exits, None if has_unkillable_rank else abort_outcomes.get(end_reason))
    if has_unkillable_rank:
        raise UnkillableRankError(config.label, record)
    return record


def write_dead_attempt_row(store: Path, run_id: str) -> None:
    """Write the row of an attempt that a process on this machine began and did not live to finish.

    Whoever calls holds the run's lock, which that process would have, if it lived.
    """
    claim = claims.find_claim(store, run_id)
    if claim is not None and "process" in claim.owner:
        write_lost_row(claim, status="error", error="its job was killed or crashed")
