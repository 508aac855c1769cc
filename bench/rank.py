"""One rank of one run, from process group to samples: what a launcher starts on every rank."""

from __future__ import annotations

import datetime
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
from bench.measure import environment, oom
from bench.measure.loop import Samples, measure
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
    """
    started = time.perf_counter()
    outcome = Outcome(place.rank, environment.host())
    device = place.device(config.hardware.device)
    limit: MemoryLimit | None = None
    failed_request: Callable[[], int | None] = lambda: None  # noqa: E731

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
        if device.type == "cuda":
            torch.cuda.set_device(device)
            failed_request = oom.watch_cuda_allocations()
        else:
            torch.set_num_threads(config.hardware.cpu_threads)
        outcome.device = environment.device(device)
        if config.rehearsed:
            start_rehearsal(config.gpus)
        else:
            dist.init_process_group(
                backend(device.type),
                store=rendezvous(),
                rank=place.rank,
                world_size=place.world_size,
                timeout=datetime.timedelta(seconds=PROCESS_GROUP_TIMEOUT_S),
                device_id=device if device.type == "cuda" else None,
            )
        limit = MemoryLimit(config.hardware.memory_limit_bytes, device)
        outcome.samples = measure(
            build,
            device,
            started=started,
            warmup_steps=config.measurement.warmup_steps,
            steps=config.measurement.steps,
            profile=config.measurement.profile,
            trace=trace if place.rank == 0 else None,
            own_work=limit.suspended,
        )
    except BaseException as error:
        if limit is not None:
            limit.lift()
        outcome.failed_at = time.time()
        if oom.is_out_of_memory(error):
            outcome.status = "oom"
            outcome.oom_bytes = failed_request() or oom.bytes_asked(error)
        else:
            outcome.status = "error"
        outcome.error = one_line(error)
        traceback.print_exc()
    return outcome


def backend(device: str) -> str:
    """The communication library of a kind of device."""
    return "nccl" if device == "cuda" else "gloo"


def one_line(error: BaseException) -> str:
    """An exception as one readable line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:500]}"
