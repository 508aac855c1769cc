"""One rank of one run, from process group to samples: what a launcher starts on every rank."""

from __future__ import annotations

import datetime
import itertools
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.config import RunConfig
from bench.hardware import MemoryLimit
from bench.measure import environment, gpu, nccl, oom
from bench.measure.health import refuse_unhealthy
from bench.measure.loop import Samples, measure
from bench.measure.processors import share_processors
from bench.measure.rehearsal import start_rehearsal
from bench.models import Batch
from bench.training.engine import Engine, build_engine, micro_batches

PROCESS_GROUP_TIMEOUT_S = 3600
"""Beyond any run's own time limit, which whoever started the ranks watches."""


@dataclass(frozen=True)
class RankPlace:
    """Where a rank stands in its run and on its machine."""

    rank: int
    local_rank: int
    world_size: int

    def device(self, kind: str) -> torch.device:
        """The rank's own device: its local rank's among all GPUs of the machine, or the only one it is shown."""
        if kind == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", 0 if torch.cuda.device_count() == 1 else self.local_rank)

    def neighbours(self, per_node: int) -> list[int]:
        """The ranks of its machine, itself included."""
        first = self.rank - self.local_rank
        return list(range(first, min(first + per_node, self.world_size)))


@dataclass
class Outcome:
    """What became of one rank. Plain values, so that it can be sent between processes."""

    rank: int
    host: str
    status: str = "ok"
    """ok, oom or error."""
    samples: Samples | None = None
    device: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    phase: str = "init"
    oom_bytes: int | None = None
    failed_at: float | None = None


def run_rank(
    config: RunConfig,
    place: RankPlace,
    rendezvous: Callable[[], dist.Store],
    trace: Path,
    note_phase: Callable[[str], None] = lambda phase: None,
    *,
    check_node: bool = False,
) -> Outcome:
    """Run one rank from process group to samples. Never raises: what goes wrong is in the outcome.

    Parameters
    ----------
    rendezvous: callable
        Gives the key-value store through which the ranks of this run find each other.
    trace: Path
        Where rank 0 writes the profiler trace, if the configuration asks for one.
    note_phase: callable
        Told as each phase of a step begins, for when the rank does not live to say so.
    check_node: bool
        Check first that the node is as fast as its kind; the run fails if it is not.
    """
    started = time.perf_counter()
    outcome = Outcome(place.rank, environment.host())
    on_gpu = config.hardware.device == "cuda"
    limit: MemoryLimit | None = None
    failed_request: Callable[[], int | None] = lambda: None  # noqa: E731
    network: Callable[[], str | None] = lambda: None  # noqa: E731

    def enter_phase(phase: str) -> None:
        outcome.phase = phase
        note_phase(phase)

    def build() -> tuple[Engine, list[Batch]]:
        engine = build_engine(
            config.trained,
            config.strategy,
            config.precision,
            config.optimizer,
            device=device,
            world_size=config.gpus,
            activation_checkpointing=config.activation_checkpointing,
            compile=config.compile,
            synchronize_every_micro_batch=config.gradient_accumulation_sync,
            seed=config.seed,
            enter_phase=enter_phase,
            rehearsed=config.rehearsed,
            micro_batches=config.gradient_accumulation,
        )
        share, shares = config.strategy.batch_share(place.rank, config.gpus)
        batches = micro_batches(
            config.model,
            num_micro_batches=config.gradient_accumulation,
            batch_size=config.sequences_per_rank,
            sequence_length=config.sequence_length,
            share=share,
            shares=shares,
            device=device,
            seed=config.seed,
        )
        return engine, batches

    try:
        if torch.cuda._is_in_bad_fork():
            raise RuntimeError(
                "this rank was forked from a process that had started CUDA, and cannot use it: something that was "
                "imported there did. Report this as a fault of the suite, with the packages that are installed."
            )
        device = place.device(config.hardware.device)
        driven = config.devices_per_process
        devices = [device] if driven == 1 else [torch.device(device.type, number) for number in range(driven)]
        if on_gpu:
            outcome.device["before"] = [gpu.Gpu(each).use() for each in devices]  # by others: not yet by this process
            torch.cuda.set_device(device)
            failed_request = oom.watch_cuda_allocations()
            network = nccl.watch_network()
        else:
            torch.set_num_threads(config.hardware.cpu_threads)
        store: dist.Store | None = None
        if config.rehearsed:
            start_rehearsal(config.gpus)
        else:
            store = rendezvous()
            dist.init_process_group(
                backend(config),
                store=store,
                rank=place.rank,
                world_size=place.world_size,
                timeout=datetime.timedelta(seconds=PROCESS_GROUP_TIMEOUT_S),
                device_id=device if on_gpu else None,
            )
        if on_gpu:
            share_processors(store, place.rank, place.neighbours(config.processes_per_node))
        outcome.device |= environment.device(devices)
        if check_node and not config.rehearsed:
            refuse_unhealthy(config.hardware, device, host=environment.node(), nodes=config.nodes, facts=outcome.device)
        limit = MemoryLimit(config.hardware.memory_limit_bytes, devices)
        if limit.bytes != config.hardware.memory_limit_bytes:
            outcome.device["memory_limit_bytes"] = limit.bytes
        outcome.samples = measure(
            build,
            devices,
            started=started,
            warmup_steps=config.measurement.warmup_steps,
            steps=config.measurement.steps,
            min_warmup_s=config.measurement.min_warmup_s or 0.0,
            min_timed_s=config.measurement.min_timed_s or 0.0,
            profile=config.measurement.profile,
            trace=trace if place.rank == 0 else None,
            own_work=limit.suspended,
            agree=agreement(store, place.rank),
        )
    except BaseException as error:
        outcome.failed_at = time.time()
        exhausted = limit is not None and limit.lift()
        shortage = oom.out_of_memory(
            error, config.hardware.device, offloads=config.strategy.uses_host, exhausted=exhausted
        )
        if shortage is not None:
            outcome.status = "oom"
            outcome.oom_bytes = oom.bytes_asked(shortage, failed_request())
        else:
            outcome.status = "error"
        outcome.error = one_line(shortage or error)
        allowed = None if limit is None else limit.bytes
        taken = max((gpu.taken_from(before, allowed) for before in outcome.device.get("before", ())), default=0)
        if shortage is not None and taken:
            outcome.status = "error"
            outcome.error = f"while other processes held {taken / 2**30:.1f} GiB of the GPU: {outcome.error}"
        traceback.print_exc()
    outcome.device["torch"] = environment.torch_settings(on_gpu)
    if (name := network()) is not None:
        outcome.device["nccl_network"] = name
    return outcome


def backend(config: RunConfig) -> str:
    """The communication library of a run's devices, and gloo beside it where tensors that were offloaded are reduced:
    NCCL knows none that lie in the machine's memory."""
    if config.hardware.device == "cpu":
        return "gloo"
    return "cpu:gloo,cuda:nccl" if config.strategy.reduces_on_host else "nccl"


def agreement(store: dist.Store | None, rank: int) -> Callable[[int], int]:
    """What rank 0 says of a number, for all ranks, which call this equally often; without a store the own number."""
    asked = itertools.count()

    def agree(number: int) -> int:
        if store is None:
            return number
        key = f"agreed/{next(asked)}"
        if rank == 0:
            store.set(key, str(number))
        return int(store.get(key))

    return agree


def one_line(error: BaseException) -> str:
    """An exception as one readable line, with what it was raised from in the end."""
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    lines = [f"{type(link).__name__}: {' '.join(str(link).split())[:500]}" for link in {error: None, root: None}]
    return " from ".join(lines)
