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

from bench.core.errors import UsageError
from bench.core.processes import block_signals
from bench.launch.ranks import LOOPBACK, find_address_of, restrict_gloo_to_loopback, serve_tcp_store

FIRST_PORT, PORT_COUNT = 15000, 15000
"""Where a job step without MASTER_PORT meets: below the ports that Linux hands out itself."""


@dataclass(frozen=True)
class CalibrationProcess:
    """One process of those that communicate, and where they all meet."""

    rank: int
    local_rank: int
    world_size: int
    rendezvous_address: tuple[str, int] | None = None
    """Host and port of the store in which they find each other; None for what torchrun has put in the environment."""
    listen_address: str | None = None
    """This machine's address if it opens that store itself: nobody has done so for it."""

    def select_device(self, device_type: str) -> torch.device:
        """Its own GPU, be it the only one it is shown or that of its local rank; or the processor."""
        if device_type == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", 0 if torch.cuda.device_count() == 1 else self.local_rank)

    def _open_store(self) -> dist.Store | None:
        if self.rendezvous_address is None:
            return None
        host, port = self.rendezvous_address
        return (
            serve_tcp_store(self.listen_address, port)
            if self.listen_address
            else dist.TCPStore(host, port, is_master=False)
        )

    @contextmanager
    def init_process_group(self, device: torch.device) -> Iterator[None]:
        """Within, the default process group is that of all processes."""
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=self._open_store(),
            rank=self.rank,
            world_size=self.world_size,
            device_id=device if device.type == "cuda" else None,
        )
        try:
            yield
        finally:
            dist.destroy_process_group()


def find_launched_process() -> CalibrationProcess | None:
    """This process among those that torchrun or srun started with it; None if it was started alone.

    Raises
    ------
    UsageError
        If SLURM cannot say where the job step runs.
    """
    env = os.environ
    if {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= env.keys():
        return CalibrationProcess(int(env["RANK"]), int(env["LOCAL_RANK"]), int(env["WORLD_SIZE"]))
    if int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        rank, world_size = int(env["SLURM_PROCID"]), int(env["SLURM_STEP_NUM_TASKS"])
        step_number = int(env["SLURM_JOB_ID"]) * 101 + int(env["SLURM_STEP_ID"])
        port = int(env.get("MASTER_PORT", FIRST_PORT + step_number % PORT_COUNT))
        first_host, *other_hosts = _list_step_hosts()
        listen_address = find_address_of(first_host, other_hosts) if rank == 0 else None
        return CalibrationProcess(rank, int(env["SLURM_LOCALID"]), world_size, (first_host, port), listen_address)
    return None


def _list_step_hosts() -> list[str]:
    """The nodes of the job step, that of rank 0 first: srun numbers tasks from the first node of its step on."""
    node_list = os.environ["SLURM_STEP_NODELIST"]
    try:
        result = subprocess.run(
            ["scontrol", "show", "hostnames", node_list], capture_output=True, text=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise UsageError(f"SLURM_STEP_NODELIST={node_list} cannot be read with scontrol: {error}.") from None
    return result.stdout.split()


def run_local_processes(world_size: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Start processes of our own, and give what `function` returns in the first of them.

    Parameters
    ----------
    world_size: int
        How many.
    function: callable
        Called in each with its `CalibrationProcess` and the arguments. All of it is pickled: the processes begin from
        nothing.

    Raises
    ------
    RuntimeError
        If one of them fails; the others are ended.
    """
    store = serve_tcp_store(LOOPBACK)
    result_queue = mp.get_context("spawn").SimpleQueue()
    results, process_context = [], None
    try:
        with block_signals(signal.SIGINT):
            process_context = mp.start_processes(
                _run_local_process,
                (world_size, store.port, result_queue, function, arguments),
                nprocs=world_size,
                join=False,
                start_method="spawn",
            )
        while not process_context.join(timeout=0.1):  # raises if a process has failed
            if not result_queue.empty():
                results.append(result_queue.get())
    except KeyboardInterrupt:
        for process in process_context.processes if process_context else ():
            process.kill()
            process.join()
        raise
    return results[0] if results else result_queue.get()


def _run_local_process(
    rank: int, world_size: int, port: int, result_queue: Any, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    restrict_gloo_to_loopback()
    result = function(CalibrationProcess(rank, rank, world_size, (LOOPBACK, port)), *arguments)
    if rank == 0:
        result_queue.put(result)
