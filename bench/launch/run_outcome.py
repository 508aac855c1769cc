"""What a run as a whole came to, from how each of its ranks ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.config.run_config import RunConfig
from bench.core.units import MIB
from bench.launch.ranks import RankExit
from bench.rank.row import build_measured_columns
from bench.records import Record


def build_outcome_columns(config: RunConfig, rank_exits: Sequence[RankExit]) -> Record:
    """The row's columns that say how a run ended, all of its ranks having ended.

    A rank killed from outside explains the connection errors of the others, unless it was one of those errors that
    ended it (NCCL's watchdog ends its process): the first is told too. Running out of memory explains them
    too, and a crash under a CPU memory limit is taken for it; otherwise the error that came first does.
    """
    unkillable_exits = [rank_exit for rank_exit in rank_exits if rank_exit.unkillable]
    if unkillable_exits:
        return {"status": "error", "error": "; ".join(_describe_exits(unkillable_exits))}
    unreported_exits = [
        rank_exit for rank_exit in rank_exits if rank_exit.outcome is None and not rank_exit.killed_by_launcher
    ]
    failed_outcomes = [
        rank_exit.outcome
        for rank_exit in rank_exits
        if rank_exit.outcome is not None and rank_exit.outcome.status != "ok"
    ]
    failed_outcomes.sort(key=lambda outcome: (outcome.status != "oom", outcome.failed_at or 0.0))
    if failed_outcomes and failed_outcomes[0].status == "oom":
        first_failure = failed_outcomes[0]
        return {
            "status": "oom",
            "oom_phase": first_failure.phase,
            "oom_bytes": first_failure.oom_bytes,
            "oom_rank": first_failure.rank,
            "error": first_failure.error,
        }
    crashed_exits = [rank_exit for rank_exit in unreported_exits if rank_exit.crashed]
    if crashed_exits and config.hardware.device == "cpu" and config.hardware.memory_limit_gib is not None:
        # Native code seldom survives that malloc gives it nothing: not gloo's, and not the profiler's.
        return {
            "status": "oom",
            "oom_phase": crashed_exits[0].last_phase,
            "oom_bytes": None,
            "oom_rank": crashed_exits[0].rank,
            "error": f"rank {crashed_exits[0].rank} {crashed_exits[0].exit_description} under its memory limit, "
            "taken for lack of memory",
        }
    failure_messages = [f"rank {outcome.rank}, {outcome.phase}: {outcome.error}" for outcome in failed_outcomes[:1]]
    if unreported_exits or failure_messages:
        return {"status": "error", "error": "; ".join([*_describe_exits(unreported_exits), *failure_messages])}
    return {
        "status": "ok",
        **build_measured_columns(
            config, [rank_exit.outcome for rank_exit in rank_exits if rank_exit.outcome is not None]
        ),
    }


def _describe_exits(rank_exits: Sequence[RankExit]) -> Iterator[str]:
    """How ranks ended, those that ended alike in one: ``rank 2 (and 3, 4) was killed by SIGKILL``."""
    ranks_by_description: dict[str, list[int]] = {}
    for rank_exit in rank_exits:
        ranks_by_description.setdefault(rank_exit.exit_description, []).append(rank_exit.rank)
    for exit_description, (first_rank, *other_ranks) in ranks_by_description.items():
        others_text = f" (and {', '.join(map(str, other_ranks))})" if other_ranks else ""
        yield f"rank {first_rank}{others_text} {exit_description}"


def describe_outcome(record: Record) -> str:
    """What became of a run, in a few words."""
    if record["status"] == "ok":
        tflops, step_s = record.get("tflops_per_gpu"), record.get("step_time_median_s")
        if tflops is None or step_s is None:
            return "fits; no time is known"
        speed_text = f"{tflops:.1f} TFLOP/s" if tflops >= 1 else f"{tflops * 1000:.1f} GFLOP/s"
        nonfinite_step = record.get("first_nonfinite_loss_step")
        divergence_text = "" if nonfinite_step is None else f", loss not finite from step {nonfinite_step}"
        return f"{step_s * 1000:.1f} ms/step, {speed_text} per rank{divergence_text}"
    if record["status"] == "oom":
        requested_bytes = record.get("oom_bytes")
        return f"out of memory in {record['oom_phase']}" + (
            f", asking for {requested_bytes / MIB:.1f} MiB" if requested_bytes else ""
        )
    return str(record.get("error"))
