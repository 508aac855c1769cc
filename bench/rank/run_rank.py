"""One rank of one run, from process group to samples: what a launcher starts on every rank."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import re
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.config.run_config import RunConfig
from bench.core import processes
from bench.core.units import GIB
from bench.hardware import MemoryLimit
from bench.models import Batch
from bench.rank import environment, machine_load, out_of_memory
from bench.rank.backend import choose_backend
from bench.rank.coordinates import RankCoordinates
from bench.rank.engine import Engine, build_engine, build_micro_batches
from bench.rank.machine_load import limit_cpu_threads
from bench.rank.rehearsal_group import init_rehearsal_group
from bench.rank.timed_loop import RankSamples, measure_rank

PROCESS_GROUP_TIMEOUT_S = 3600
"""Beyond any run's own time limit, which whoever started the ranks watches."""


@dataclass
class RankOutcome:
    """What became of one rank. Plain values, so that it can be sent between processes."""

    rank: int
    host: str
    status: str = "ok"
    """ok, oom or error."""
    samples: RankSamples | None = None
    device: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    phase: str = "init"
    oom_bytes: int | None = None
    failed_at: float | None = None


def needs_cuda(config: RunConfig) -> bool:
    """Not on a CPU, where a rank also runs if something imported has asked a CUDA build of torch for its devices."""
    return config.hardware.torch_device == "cuda"


def run_rank(
    config: RunConfig,
    coordinates: RankCoordinates,
    connect_store: Callable[[], dist.Store],
    trace_path: Path,
    report_phase: Callable[[str], None] = lambda phase: None,
    *,
    check_node: bool = False,
) -> RankOutcome:
    """Run one rank from process group to samples. Never raises: what goes wrong is in the outcome.

    Parameters
    ----------
    connect_store: callable
        Gives the key-value store through which the ranks of this run find each other.
    trace_path: Path
        Where rank 0 writes the profiler trace, if the configuration asks for one.
    report_phase: callable
        Told as each phase of a step begins, for when the rank does not live to say so.
    check_node: bool
        Check first that the node is as fast as its kind; the run fails if it is not.
    """
    started_at = time.perf_counter()
    outcome = RankOutcome(coordinates.rank, environment.get_host_name())
    on_gpu = config.hardware.torch_device == "cuda"
    memory_limit: MemoryLimit | None = None
    get_failed_request: Callable[[], int | None] = lambda: None  # noqa: E731
    read_network: Callable[[], str | None] = lambda: None  # noqa: E731

    def enter_phase(phase: str) -> None:
        outcome.phase = phase
        report_phase(phase)

    def build_engine_and_batches() -> tuple[Engine, list[Batch]]:
        engine = build_engine(
            config.trained_model,
            config.strategy,
            config.precision,
            config.optimizer,
            device=device,
            world_size=config.gpus,
            activation_checkpointing=config.activation_checkpointing,
            sequence_length=config.sequence_length,
            loss_chunks=config.loss_chunks,
            compiles_loss=config.compiles_loss,
            activation_offload=config.activation_offload,
            compile=config.compile,
            synchronize_every_micro_batch=config.gradient_accumulation_sync,
            seed=config.seed,
            enter_phase=enter_phase,
            rehearsed=config.is_rehearsed,
            num_micro_batches=config.gradient_accumulation,
            gradient_clip_norm=config.gradient_clip_norm,
        )
        share_index, num_shares = config.strategy.find_batch_share(
            config.rehearsed_rank if config.is_rehearsed else coordinates.rank, config.gpus
        )
        batches = build_micro_batches(
            config.model,
            num_micro_batches=config.gradient_accumulation,
            batch_size=config.sequences_per_rank,
            sequence_length=config.sequence_length,
            share_index=share_index,
            num_shares=num_shares,
            device=device,
            seed=config.seed,
        )
        return engine, batches

    try:
        if needs_cuda(config) and torch.cuda._is_in_bad_fork():
            raise RuntimeError(
                "this rank was forked from a process that had started CUDA, and cannot use it: something that was "
                "imported there did. Report this as a fault of the suite, with the packages that are installed."
            )
        device = coordinates.select_device(config.hardware.device)
        num_devices = config.devices_per_process
        devices = [device] if num_devices == 1 else [torch.device(device.type, index) for index in range(num_devices)]
        if on_gpu:
            outcome.device["before"] = [
                machine_load.NvmlGpu(driven_device).read_usage() for driven_device in devices
            ]  # by others: not yet by this process
            torch.cuda.set_device(device)
            get_failed_request = out_of_memory.observe_failed_cuda_allocations()
            read_network = capture_nccl_network()
        else:
            torch.set_num_threads(config.hardware.cpu_threads)
        kv_store: dist.Store | None = None
        if config.is_rehearsed:
            init_rehearsal_group(config.gpus, config.rehearsed_rank)
        else:
            kv_store = connect_store()
            dist.init_process_group(
                choose_backend(config),
                store=kv_store,
                rank=coordinates.rank,
                world_size=coordinates.world_size,
                timeout=datetime.timedelta(seconds=PROCESS_GROUP_TIMEOUT_S),
                device_id=device if on_gpu else None,
            )
        if on_gpu:
            limit_cpu_threads(kv_store, coordinates.rank, coordinates.list_node_ranks(config.processes_per_node))
        outcome.device |= environment.describe_devices(devices)
        if check_node and not config.is_rehearsed:
            environment.refuse_unhealthy_node(
                config.hardware,
                device,
                host=environment.get_node_name(),
                num_nodes=config.nodes,
                device_info=outcome.device,
            )
        if config.expandable_segments:
            torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        limit_bytes = config.hardware.memory_limit_bytes
        if limit_bytes is not None:
            memory_limit = MemoryLimit(limit_bytes, devices)
            if memory_limit.limit_bytes != limit_bytes:
                outcome.device["memory_limit_bytes"] = memory_limit.limit_bytes
        elif not on_gpu:
            processes.keep_freed_memory()
        outcome.samples = measure_rank(
            build_engine_and_batches,
            devices,
            started_at=started_at,
            warmup_steps=config.measurement.warmup_steps,
            steps=config.measurement.steps,
            min_warmup_s=config.measurement.min_warmup_s or 0.0,
            min_timed_s=config.measurement.min_timed_s or 0.0,
            profile=config.measurement.profile,
            trace_path=trace_path if coordinates.rank == 0 else None,
            unmeasured_work=contextlib.nullcontext if memory_limit is None else memory_limit.suspend,
            agree_on_steps=build_agreement(kv_store, coordinates.rank),
        )
    except BaseException as error:
        outcome.failed_at = time.time()
        limit_exhausted = memory_limit is not None and memory_limit.lift()
        oom_error = out_of_memory.find_out_of_memory_error(
            error, config.hardware.device, offloads=config.uses_host_memory, limit_exhausted=limit_exhausted
        )
        if oom_error is not None:
            outcome.status = "oom"
            outcome.oom_bytes = out_of_memory.find_requested_bytes(oom_error, get_failed_request())
        else:
            outcome.status = "error"
        outcome.error = format_error_line(oom_error or error)
        limit_bytes = None if memory_limit is None else memory_limit.limit_bytes
        taken_bytes = max(
            (
                machine_load.compute_taken_bytes(usage_before, limit_bytes)
                for usage_before in outcome.device.get("before", ())
            ),
            default=0,
        )
        if oom_error is not None and taken_bytes:
            outcome.status = "error"
            outcome.error = f"while other processes held {taken_bytes / GIB:.1f} GiB of the GPU: {outcome.error}"
        traceback.print_exc()
    outcome.device["torch"] = environment.read_torch_settings(on_gpu)
    if (network_name := read_network()) is not None:
        outcome.device["nccl_network"] = network_name
    return outcome


def build_agreement(kv_store: dist.Store | None, rank: int) -> Callable[[int], int]:
    """What rank 0 says of a number, for all ranks, which call this equally often; without a store the own number."""
    key_numbers = itertools.count()

    def agree_on_number(number: int) -> int:
        if kv_store is None:
            return number
        key = f"agreed/{next(key_numbers)}"
        if rank == 0:
            kv_store.set(key, str(number))
        return int(kv_store.get(key))

    return agree_on_number


def format_error_line(error: BaseException) -> str:
    """An exception as one readable line, with what it was raised from in the end."""
    root_error = error
    while root_error.__cause__ is not None:
        root_error = root_error.__cause__
    lines = [
        f"{type(linked_error).__name__}: {' '.join(str(linked_error).split())[:500]}"
        for linked_error in {error: None, root_error: None}
    ]
    return " from ".join(lines)


# --- Over which network NCCL communicates, as it says itself when it starts.

NETWORK_PATTERN = re.compile(r"NCCL INFO Using network (\S.*)")


def capture_nccl_network() -> Callable[[], str | None]:
    """Have NCCL write down what it chooses when it starts, unless the user has it write something already.

    NCCL has no function that tells. What it writes once at its start costs the steps nothing.

    Returns
    -------
    Callable
        The network's name (IB, Socket, AWS Libfabric, ...), once there is a communicator; None where nothing was said.
    """
    if "NCCL_DEBUG" in os.environ:
        return lambda: None
    log_descriptor = os.memfd_create("nccl")  # a file in memory, which goes with this process however it ends
    nccl_variables = {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT",
        "NCCL_DEBUG_FILE": f"/proc/self/fd/{log_descriptor}",
    }
    os.environ.update(nccl_variables)

    def read_network() -> str | None:
        for variable in nccl_variables:
            os.environ.pop(variable, None)
        text = os.pread(log_descriptor, os.fstat(log_descriptor).st_size, 0)
        os.close(log_descriptor)
        return parse_network(text.decode(errors="replace"))

    return read_network


def parse_network(log_text: str) -> str | None:
    """What NCCL's log names; several, where communicators differ, with commas."""
    return ", ".join(sorted({name.strip() for name in NETWORK_PATTERN.findall(log_text)})) or None
