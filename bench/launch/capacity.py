"""Refuse runs on a CPU that would exhaust the machine, its other programs included, instead of measuring anything."""

from __future__ import annotations

import os

from bench.config import RunConfig
from bench.errors import ImpossibleError

GIB = 2**30


def model_state_bytes(config: RunConfig) -> int:
    """Least memory all ranks that run together have when a backward is over: parameters, gradients, optimizer state.

    Only weights that multiply tokens are counted, from the FLOPs of a single token, so nothing has to be built. Where
    adapters are trained it is these weights alone, which are frozen.
    """
    count = config.model.flops_per_sequence(1)
    weights = (count.blocks_linear + count.outside) // 2
    if config.finetune.name == "full":
        states = config.optimizer.states_per_parameter
        size = config.strategy.state_bytes(config.precision, states, config.gpus)
    else:
        bits = getattr(config.finetune, "bits", 8 * config.precision.parameter_dtype.itemsize)
        size = bits / 8 * config.gpus / config.strategy.factor
    return round(weights * size * config.processes / config.gpus)


def refuse_what_exhausts_this_machine(config: RunConfig, memory_bytes: int | None = None) -> None:
    """Raise `ImpossibleError` if a CPU run's model state alone is larger than this machine's memory.

    A run with a memory limit may try: the limit stops it.
    """
    memory_bytes = memory_bytes or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    share_gib = memory_bytes / GIB / max(1, config.processes)
    limit = config.hardware.memory_limit_bytes
    if limit is not None and limit * config.processes <= memory_bytes:
        return
    needed = model_state_bytes(config)
    if needed > memory_bytes:
        what = "parameters, gradients and optimizer state" if config.finetune.name == "full" else "frozen weights"
        raise ImpossibleError(
            f"model={config.model.name} with gpus={config.gpus} needs at least {needed / GIB:.0f} GiB for {what}, and "
            f"this machine has {memory_bytes / GIB:.0f} GiB: choose a smaller model or "
            f"hardware.memory_limit_gib={share_gib:.1f} or less to see it run out of memory."
        )
