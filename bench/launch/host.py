"""Execute one run on this machine: fork its ranks, watch over them, write its row.

The process that calls `execute` imports torch and the models once and never computes with them. Each run's ranks
are forked from it: fresh processes with a fresh process group, without the seconds of importing. They die with it.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import importlib
import time
from pathlib import Path

from bench import records
from bench.config import RunConfig
from bench.launch.ranks import Rank, kill, start, watch
from bench.launch.stop import StopSignal
from bench.records import Record
from bench.records.schema import PHASES
from bench.row import configured_row, environment_row, measured_row, rank_rows


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
        ranks = start(config, trace, log if log_to_file else None)
        ending = watch(ranks, time.monotonic() + time_limit_s, stop)
    finally:
        kill(ranks)
    outcomes = [rank.outcome for rank in ranks if rank.outcome is not None]
    row: Record = {
        **configured_row(config),
        **environment_row(outcomes),
        **verdict(config, ranks, ending, time_limit_s, stop),
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


def verdict(config: RunConfig, ranks: list[Rank], ending: str, time_limit_s: float, stop: StopSignal) -> Record:
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
