"""Execute one run on this machine alone: fork its ranks, watch over them, write its row.

The process that calls `execute` imports torch and the models once and never computes with them. Each run's ranks
are forked from it: fresh processes with a fresh process group, without the seconds of importing. They die with it.
"""

from __future__ import annotations

import functools
import gc
import importlib
import time
from pathlib import Path

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
    OSError
        If the store cannot be written.
    """
    preload(config.imports)
    clear_away_dead(store, config.run_id)
    attempt = Attempt.begin(config, store, {"process": this_process()}, {"launcher": launcher, "sweep": sweep})
    places = [RankPlace(rank, rank % config.gpus_per_node, config.processes) for rank in range(config.processes)]
    ranks: list[Rank] = []
    ended: list[Ended] = []

    def look_around() -> bool:
        attempt.look_around()
        return False

    with MeetingPoint() as meeting:
        try:
            ranks = start(
                config,
                places,
                lambda: connect("127.0.0.1", meeting.port, RENDEZVOUS_TIMEOUT_S),
                attempt.trace,
                attempt.path.with_suffix(".log") if log else None,
            )
            ending = watch(ranks, time.monotonic() + time_limit_s, stop, look_around)
        finally:
            ended = kill(ranks)
    cut_short = {
        "stopped": {"status": "preempted", "error": f"stopped by {stop.received}"},
        "timeout": {"status": "timeout", "error": f"not finished after its time limit of {time_limit_s:g} s"},
    }
    return attempt.finish(ended, cut_short.get(ending))


def clear_away_dead(store: Path, run_id: str) -> None:
    """Write the row of an attempt that a process on this machine began and did not live to finish.

    Whoever calls holds the run's lock, which that process would have, if it lived.
    """
    claim = claims.held(store, run_id)
    if claim is not None and "process" in claim.owner:
        write_lost_row(claim, status="error", error="its job was killed or crashed")
