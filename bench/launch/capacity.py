"""Refuse runs on a CPU that would exhaust the machine, its other programs included, instead of measuring anything."""

from __future__ import annotations

import os

from bench.config import RunConfig
from bench.errors import ImpossibleError

GIB = 2**30


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
        bits = getattr(config.finetune, "bits", 8 * config.precision.parameter_dtype.itemsize)
        bytes_per_weight = bits / 8 * config.gpus / config.strategy.resolved_sharding_factor
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
            f"model={config.model.name} with gpus={config.gpus} needs at least {needed_bytes / GIB:.0f} GiB for {needed_for}, and "
            f"this machine has {memory_bytes / GIB:.0f} GiB: choose a smaller model or "
            f"hardware.memory_limit_gib={memory_per_process_gib:.1f} or less to see it run out of memory."
        )
