"""From shapes and sizes to seconds: what the machine that plays a step is told about the hardware's speed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from bench.config import RunConfig
from bench.hardware import Hardware
from bench.precision import Precision
from bench.simulate.cost import kernel_seconds
from bench.simulate.kernels import Floats, Kernels, joined
from bench.simulate.machine import Machine, Pace
from bench.simulate.memory import is_degraded
from bench.simulate.network import Group, collective_seconds
from bench.simulate.prediction import MemoryPrediction, Range, TimePrediction
from bench.simulate.step import Update
from bench.strategies.plan import REPLICAS, SHARDS

TIME_SHARE = 0.10
"""Interval of a step's time, as a share of it."""

OPTIMIZER_PASSES = {("adamw", "fused"): 7, ("adamw", "foreach"): 24, ("adamw", "for_loop"): 24, ("sgd", "fused"): 3}
"""Reads and writes of a tensor of the parameters' size per step. AdamW reads parameter, gradient and two states and
writes all but the gradient; one operation at a time it makes 10 passes, each with operands and result."""

TENSORS_PER_KERNEL = {"fused": 32, "foreach": 8, "for_loop": 1 / 12}
"""Tensors a launch of the optimizer's kernels works on."""


RETRY_S_PER_BYTE = 2.3e-11
"""What the caching allocator needs to give memory back to the device and take as much of it again, per byte asked for,
when it has to retry: all streams stand still meanwhile. Set so that T5-11B on 4 machines is as much slower without the
rate limiter as in Figure 6(c) of the FSDP paper; GPT-175B at batch 2 on 128 GPUs in Figure 7(b) would want half as much
again. That memory is short follows from memory; how slow it is then is a rough number."""


def retrying(pace: Pace) -> Pace:
    """The same rank when every buffer it gathers into or reduces from makes the allocator retry."""
    return dataclasses.replace(pace, retry_s_per_byte=RETRY_S_PER_BYTE)


def pace_of(config: RunConfig) -> Pace:
    """How fast the rank of a run is; a standstill where the hardware's speeds are unknown."""
    hardware, speeds = config.hardware, config.hardware.speeds
    if speeds is None or hardware.memory_bandwidth_gb_s is None:
        return Pace()

    @functools.cache
    def collective(kind: str, size: float, group: str) -> float:
        return collective_seconds(kind, size, group_of(config, group), speeds.links)

    return Pace(
        collective=collective,
        copy_s_per_byte=1 / (hardware.memory_bandwidth_gb_s * 1e9 * speeds.memory_efficiency),
        launch_s=speeds.launch.operator_us * 1e-6,
        hooks_s=speeds.launch.unit_us * 1e-6,
        kernel_s=speeds.launch.kernel_us * 1e-6,
        overlap_loss=speeds.overlap_loss,
    )


def group_of(config: RunConfig, name: str) -> Group:
    """Where the ranks of one of a plan's groups are. Shards are neighbours; replicas are F ranks apart."""
    ranks_per_node = min(config.gpus, config.gpus_per_node)
    factor = config.strategy.factor
    if name == SHARDS:
        inside = min(factor, ranks_per_node)
        return Group(factor, inside, ranks_per_node // inside)
    if name == REPLICAS:
        inside = max(1, ranks_per_node // factor)
        return Group(config.gpus // factor, inside, ranks_per_node // inside)
    return Group(config.gpus, ranks_per_node)


def kernel_times(hardware: Hardware, precision: Precision, kernels: Sequence[Kernels]) -> list[Floats] | list[None]:
    """Seconds of each kernel, None where speeds are unknown."""
    if hardware.speeds is None or hardware.memory_bandwidth_gb_s is None:
        return [None] * len(kernels)
    seconds = kernel_seconds(joined(kernels), hardware, precision)
    return np.split(seconds, np.cumsum([len(each) for each in kernels])[:-1])


def update_of(config: RunConfig, updated: Sequence[int]) -> Update:
    """The optimizer's step over tensors with these numbers of elements."""
    optimizer, itemsize = config.optimizer, config.precision.parameter_dtype.itemsize
    size = sum(updated) * itemsize
    key = (optimizer.name, optimizer.implementation)
    passes = OPTIMIZER_PASSES.get(key, OPTIMIZER_PASSES["sgd", "fused"] + 2 * optimizer.states_per_parameter)
    launches = max(1, round(len(updated) / TENSORS_PER_KERNEL[optimizer.implementation]))
    pace = pace_of(config)
    temporaries = 0.0
    if optimizer.name == "adamw" and optimizer.implementation == "foreach":
        temporaries = size  # the square roots of all second moments at once
    elif optimizer.name == "adamw" and optimizer.implementation == "for_loop":
        temporaries = 2 * max(updated, default=0) * itemsize  # a square root, and its quotient
    return Update(passes * size * pace.copy_s_per_byte + launches * pace.kernel_s, launches, temporaries)


def time_of(config: RunConfig, machine: Machine, memory: MemoryPrediction) -> TimePrediction | None:
    """The time of a played step with its parts, None where speeds are unknown."""
    if config.hardware.speeds is None or config.hardware.memory_bandwidth_gb_s is None:
        return None
    elapsed, spent = machine.elapsed, machine.spent
    degraded = is_degraded(memory)
    parts = {
        "compute": spent["compute"],
        "network": spent["exposed"],
        "optimizer": spent["optimizer"],
        "kernel launches": spent["launch"],
    }
    limited_by = max(parts, key=lambda name: parts[name])
    return TimePrediction(
        step_s=Range(elapsed, elapsed * (1 - TIME_SHARE), elapsed * (1 + TIME_SHARE)),
        compute_s=spent["compute"],
        exposed_communication_s=spent["exposed"],
        optimizer_s=spent["optimizer"],
        bubble_s=elapsed - spent["compute"] - spent["exposed"] - spent["optimizer"],
        communication_s=spent["communication"],
        limited_by="allocator" if degraded else limited_by.replace("optimizer", "memory bandwidth"),
        degraded=degraded,
        timeline=machine.timeline,
    )
