"""Execute one run on this machine: refuse what it cannot, start the ranks, watch over them, write the row.

The process that calls `execute_run` never computes. Each run's ranks are fresh processes with a fresh process group,
which find torch, and where they are forked the models too, imported already. They die with it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from bench import records
from bench.config.run_config import RunConfig
from bench.core.command_line import refuse_unreadable_store
from bench.core.errors import ImpossibleError, invalid_value_error
from bench.core.typed_config import Within, build_dataclass
from bench.core.units import GIB
from bench.hardware import refuse_unsupported
from bench.hardware.detect import DetectedDevice
from bench.launch.attempt import Attempt, describe_this_process, write_lost_row
from bench.launch.ranks import (
    RankExit,
    RankProcess,
    RendezvousServer,
    StopSignal,
    connect_to_rendezvous,
    kill_ranks,
    preload_for_ranks,
    start_ranks,
    wait_for_ranks,
)
from bench.planning.request import SweepRequest
from bench.planning.sweep_plan import compose_run
from bench.rank.coordinates import RankCoordinates
from bench.records import Record, claims
from bench.tracking import NO_TRACKER, TrackerClient

RENDEZVOUS_TIMEOUT_S = 300.0
"""How long a rank may wait for the others at the process group's start."""

POLL_INTERVAL_S = 0.25
"""How often to look whether another sweep still executes the run."""


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
    RunClaimedError
        If a job of another launcher has the run.
    UnkillableRankError
        If a rank could not be killed, the row being written.
    OSError
        If the store cannot be written.
    """
    preload_for_ranks(config)
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


@contextlib.contextmanager
def hold_run_lock(store: Path, run_id: str, stop: StopSignal) -> Iterator[bool]:
    """Hold a run's lock, however long another sweep has it, unless a signal comes; tells whether it had to wait."""
    had_to_wait = False
    while True:
        with records.lock_run(store, run_id, blocking=False) as has_lock:
            if has_lock or stop.received:
                yield had_to_wait
                return
        had_to_wait = True
        time.sleep(POLL_INTERVAL_S)


# --- Which runs this machine can execute.


@dataclass(frozen=True)
class LocalProfile:
    """The fields of ``conf/cluster/local.yaml``."""

    name: str
    launcher: str
    gpus_per_node: Annotated[int, Within(1, 2**17)]
    max_cpu_processes: Annotated[int, Within(1, 4096)]
    time_limit_s: Annotated[float, Within(1, 1e8, unit="seconds")]
    hardware: str | None = None
    """Option of conf/hardware that `hardware=auto` means; null for what this machine has."""


def load_local_profile(cluster: dict[str, Any]) -> LocalProfile:
    """The values of ``conf/cluster/local.yaml``, checked.

    Raises
    ------
    UsageError
        Naming the field, the value and what is valid; also for another cluster than this machine.
    """
    if cluster.get("launcher") != "local":
        raise invalid_value_error("cluster.launcher", cluster.get("launcher"), ["local"])
    profile: LocalProfile = build_dataclass("cluster", LocalProfile, cluster)
    return profile


def check_run_on_host(config: RunConfig, profile: LocalProfile, device: DetectedDevice) -> None:
    """Raise `ImpossibleError` where this machine, whose device that is, cannot execute a run."""
    config.strategy.check_installed()
    config.optimizer.check_installed()
    config.finetune.check_installed()
    refuse_unsupported(config.hardware, device, config.precision, compiling_setting=config.compiling_setting)
    if config.active_nodes > 1:
        raise ImpossibleError(
            f"gpus={config.gpus} needs {config.nodes} machines of {config.gpus_per_node} GPUs, and cluster=local "
            f"is one: choose at most {config.gpus_per_node}."
        )
    if config.hardware.device != "cpu" and config.active_devices > device.count:
        raise ImpossibleError(
            f"gpus={config.gpus} is more than the {device.count} GPU(s) of this machine: "
            f"choose at most {device.count}, or hardware=cpu."
        )
    if config.hardware.device == "cpu" and config.active_processes > profile.max_cpu_processes:
        raise ImpossibleError(
            f"gpus={config.gpus} is more than the {profile.max_cpu_processes} processes this machine runs "
            "on its CPU: choose fewer, or raise cluster.max_cpu_processes."
        )
    if config.hardware.device == "cpu":
        refuse_host_memory_overrun(config)


# --- Refuse runs on a CPU that would exhaust the machine, its other programs included, instead of measuring anything.


def compute_model_state_bytes(config: RunConfig) -> int:
    """Least memory all ranks that run together have when a backward is over: parameters, gradients, optimizer state.

    Only weights that multiply tokens are counted, from the FLOPs of a single token, so nothing has to be built. Where
    adapters are trained it is these weights alone, which are frozen.
    """
    flop_count = config.model.count_flops_per_sequence(1)
    num_weights = (flop_count.blocks_linear + flop_count.outside_blocks) // 2
    if config.finetune.name == "full":
        states_per_parameter = config.optimizer.states_per_parameter
        bytes_per_weight = config.strategy.compute_state_bytes_per_parameter(
            config.precision, states_per_parameter, config.gpus
        )
    else:
        bits = getattr(config.finetune, "bits", 8 * config.precision.parameter_itemsize)
        bytes_per_weight = bits / 8 * config.gpus / config.strategy.num_parameter_shards
    return round(num_weights * bytes_per_weight * config.active_processes / config.gpus)


def refuse_host_memory_overrun(config: RunConfig, memory_bytes: int | None = None) -> None:
    """Raise `ImpossibleError` if a CPU run's model state alone is larger than this machine's memory.

    A run with a memory limit may try: the limit stops it.
    """
    memory_bytes = memory_bytes or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    memory_per_process_gib = memory_bytes / GIB / max(1, config.active_processes)
    limit_bytes = config.hardware.memory_limit_bytes
    if limit_bytes is not None and limit_bytes * config.active_processes <= memory_bytes:
        return
    needed_bytes = compute_model_state_bytes(config)
    if needed_bytes > memory_bytes:
        needed_for = "parameters, gradients and optimizer state" if config.finetune.name == "full" else "frozen weights"
        raise ImpossibleError(
            f"model={config.model.name} with gpus={config.gpus} needs at least {needed_bytes / GIB:.0f} GiB for "
            f"{needed_for}, and "
            f"this machine has {memory_bytes / GIB:.0f} GiB: choose a smaller model or "
            f"hardware.memory_limit_gib={memory_per_process_gib:.1f} or less to see it run out of memory."
        )


# --- Execute exactly one run in this terminal: what ``python -m bench.run`` does.


def compose_single_run(request: SweepRequest, device: DetectedDevice) -> RunConfig:
    """The first run that a request asks for, checked against this machine and its store.

    Raises
    ------
    UsageError
        If it cannot be executed here.
    """
    profile = load_local_profile(request.cluster)
    config = compose_run(request.points[0])
    check_run_on_host(config, profile, device)
    with refuse_unreadable_store(request.store):
        records.list_attempts(request.store, config.run_id)
    return config


def execute_single_run(request: SweepRequest, config: RunConfig) -> Record | None:
    """Execute one run here, whatever is recorded of it, as a new attempt, once no other sweep executes it.

    Returns
    -------
    Record or None
        The row that was written; None if a signal came before the run began.

    Raises
    ------
    RunClaimedError
        If a job of another launcher has the run.
    OSError
        If the store cannot be written.
    """
    with StopSignal() as stop:
        with hold_run_lock(request.store, config.run_id, stop):
            if stop.received:
                print(f"Stopped by {stop.received}.", file=sys.stderr)
                return None
            try:
                record = execute_run(
                    config,
                    request.store,
                    launcher="alone",
                    sweep=request.sweep,
                    time_limit_s=float(request.cluster["time_limit_s"]),
                    stop=stop,
                    log_to_file=False,
                )
            except UnkillableRankError as error:
                print(error, file=sys.stderr)
                record = error.record
        if request.tracker != NO_TRACKER:
            TrackerClient(
                request.tracker,
                request.store,
                lambda line: print(line, file=sys.stderr),
                is_stopping=lambda: stop.received is not None,
            ).send_runs([config.run_id])
        return record
