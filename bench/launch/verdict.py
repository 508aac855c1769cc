"""What a run as a whole came to, from how each of its ranks ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.config import RunConfig
from bench.launch.ranks import Ended
from bench.records import Record
from bench.row import measured_row


def verdict(config: RunConfig, ranks: Sequence[Ended]) -> Record:
    """The row's columns that say how a run ended, all of its ranks having ended.

    A rank killed from outside explains the connection errors of the others, unless it was one of those errors that
    ended it (NCCL's watchdog ends its process): the first is told too. Running out of memory explains them
    too, and a crash under a CPU memory limit is taken for it; otherwise the error that came first does.
    """
    stuck = [rank for rank in ranks if rank.stuck]
    if stuck:
        return {"status": "error", "error": "; ".join(_by_end(stuck))}
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
            "oom_phase": crashed[0].last_phase,
            "oom_bytes": None,
            "oom_rank": crashed[0].number,
            "error": f"rank {crashed[0].number} {crashed[0].end} under its memory limit, taken for lack of memory",
        }
    said = [f"rank {first.rank}, {first.phase}: {first.error}" for first in failures[:1]]
    if killed or said:
        return {"status": "error", "error": "; ".join([*_by_end(killed), *said])}
    return {"status": "ok", **measured_row(config, [rank.outcome for rank in ranks if rank.outcome is not None])}


def _by_end(ranks: Sequence[Ended]) -> Iterator[str]:
    """How ranks ended, those that ended alike in one: ``rank 2 (and 3, 4) was killed by SIGKILL``."""
    alike: dict[str, list[int]] = {}
    for rank in ranks:
        alike.setdefault(rank.end, []).append(rank.number)
    for end, (first, *others) in alike.items():
        also = f" (and {', '.join(map(str, others))})" if others else ""
        yield f"rank {first}{also} {end}"


def describe(record: Record) -> str:
    """What became of a run, in a few words."""
    if record["status"] == "ok":
        tflops, step_s = record.get("tflops_per_gpu"), record.get("step_time_median_s")
        if tflops is None or step_s is None:
            return "fits; no time is known"
        speed = f"{tflops:.1f} TFLOP/s" if tflops >= 1 else f"{tflops * 1000:.1f} GFLOP/s"
        loss = record.get("first_nonfinite_loss_step")
        diverged = "" if loss is None else f", loss not finite from step {loss}"
        return f"{step_s * 1000:.1f} ms/step, {speed} per rank{diverged}"
    if record["status"] == "oom":
        asked = record.get("oom_bytes")
        return f"out of memory in {record['oom_phase']}" + (f", asking for {asked / 2**20:.1f} MiB" if asked else "")
    return str(record.get("error"))
