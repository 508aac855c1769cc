"""The processes that measure collectives: those that torchrun or srun started, or our own on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bench.errors import UsageError
from bench.processes import signals_held
from bench.rendezvous import LOOPBACK, address_of, listening_store, stay_on_this_machine

FIRST_PORT, PORTS = 15000, 15000
"""Where a job step without MASTER_PORT meets: below the ports that Linux hands out itself."""


@dataclass(frozen=True)
class Process:
    """One process of those that communicate, and where they all meet."""

    rank: int
    local_rank: int
    size: int
    meeting: tuple[str, int] | None = None
    """Host and port of the store in which they find each other; None for what torchrun has put in the environment."""
    listen: str | None = None
    """This machine's address if it opens that store itself: nobody has done so for it."""

    def device(self, kind: str) -> torch.device:
        """Its own GPU, be it the only one it is shown or that of its local rank; or the processor."""
        if kind == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", 0 if torch.cuda.device_count() == 1 else self.local_rank)

    def _store(self) -> dist.Store | None:
        if self.meeting is None:
            return None
        host, port = self.meeting
        return listening_store(self.listen, port) if self.listen else dist.TCPStore(host, port, is_master=False)

    @contextmanager
    def communicating(self, device: torch.device) -> Iterator[None]:
        """Within, the default process group is that of all processes."""
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=self._store(),
            rank=self.rank,
            world_size=self.size,
            device_id=device if device.type == "cuda" else None,
        )
        try:
            yield
        finally:
            dist.destroy_process_group()


def started_process() -> Process | None:
    """This process among those that torchrun or srun started with it; None if it was started alone.

    Raises
    ------
    UsageError
        If SLURM cannot say where the job step runs.
    """
    env = os.environ
    if {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= env.keys():
        return Process(int(env["RANK"]), int(env["LOCAL_RANK"]), int(env["WORLD_SIZE"]))
    if int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        rank, size = int(env["SLURM_PROCID"]), int(env["SLURM_STEP_NUM_TASKS"])
        step = int(env["SLURM_JOB_ID"]) * 101 + int(env["SLURM_STEP_ID"])
        port = int(env.get("MASTER_PORT", FIRST_PORT + step % PORTS))
        first, *others = _hosts()
        listen = address_of(first, others) if rank == 0 else None
        return Process(rank, int(env["SLURM_LOCALID"]), size, (first, port), listen)
    return None


def _hosts() -> list[str]:
    """The nodes of the job step, that of rank 0 first: srun numbers tasks from the first node of its step on."""
    nodes = os.environ["SLURM_STEP_NODELIST"]
    try:
        said = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise UsageError(f"SLURM_STEP_NODELIST={nodes} cannot be read with scontrol: {error}.") from None
    return said.stdout.split()


def on_this_machine(ranks: int, work: Callable[..., Any], *arguments: Any) -> Any:
    """Start processes of our own, and give what `work` returns in the first of them.

    Parameters
    ----------
    ranks: int
        How many.
    work: callable
        Called in each with its `Process` and the arguments. All of it is pickled: the processes begin from nothing.

    Raises
    ------
    RuntimeError
        If one of them fails; the others are ended.
    """
    server = listening_store(LOOPBACK)
    results = mp.get_context("spawn").SimpleQueue()
    found, context = [], None
    try:
        with signals_held(signal.SIGINT):
            context = mp.start_processes(
                _begin, (ranks, server.port, results, work, arguments), nprocs=ranks, join=False, start_method="spawn"
            )
        while not context.join(timeout=0.1):  # raises if a process has failed
            if not results.empty():
                found.append(results.get())
    except KeyboardInterrupt:
        for process in context.processes if context else ():
            process.kill()
            process.join()
        raise
    return found[0] if found else results.get()


def _begin(
    rank: int, ranks: int, port: int, results: Any, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    stay_on_this_machine()
    result = work(Process(rank, rank, ranks, (LOOPBACK, port)), *arguments)
    if rank == 0:
        results.put(result)
