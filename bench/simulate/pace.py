"""From shapes and sizes to seconds: what the machine that plays a step is told about the hardware's speed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from bench.config import RunConfig
from bench.hardware import Hardware
from bench.hardware.processor import Updates
from bench.precision import Precision
from bench.simulate.cost import kernel_seconds
from bench.simulate.kernels import Floats, Kernels, joined
from bench.simulate.machine import Machine, Pace
from bench.simulate.memory import is_degraded
from bench.simulate.network import Group, collective_seconds
from bench.simulate.prediction import MemoryPrediction, Range, TimePrediction
from bench.simulate.step import Update
from bench.strategies.plan import REPLICAS, SHARDS, TENSOR, WORLD
from bench.training.optimizer import OptimizerConfig

TIME_SHARE = 0.10
"""Interval of a step's time, as a share of it."""

OFFLOADED_TIME_SHARE = 0.30
"""The same where something is offloaded. Speeds of links and of the machine's memory are those of benchmarks, and no
step that uses them was measured by us: a guess, three times as wide."""

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
    if speeds is None or hardware.memory_bandwidth_gb_s is None or not is_known(hardware, config.precision):
        return Pace()

    copy_s_per_byte = 1 / (hardware.memory_bandwidth_gb_s * 1e9 * speeds.memory_efficiency)

    @functools.cache
    def collective(kind: str, size: float, name: str) -> float:
        group = group_of(config, name)
        if group.ranks == 1 and name in (SHARDS, REPLICAS):
            return _moved_alone(kind, size, config.gpus) * copy_s_per_byte
        return collective_seconds(kind, size, group, speeds.links)

    return Pace(
        collective=collective,
        copy_s_per_byte=copy_s_per_byte,
        launch_s=speeds.launch.operator_us * 1e-6,
        launches_itself=speeds.processor is not None,
        hooks_s=speeds.launch.unit_us * 1e-6,
        kernel_s=speeds.launch.kernel_us * 1e-6,
        overlap_loss=speeds.overlap_loss,
    )


def _moved_alone(kind: str, size: float, world_size: int) -> float:
    """Bytes that a rank reads and writes in a collective of FSDP2 in which it is alone.

    Its reduce-scatter copies. An all-reduce that averages is a kernel over everything (NCCL's ``oneRankReduce``); one
    that sums, as in a world of one rank, is nothing (``_get_gradient_divide_factors`` in torch 2.13).
    """
    return 0.0 if kind == "all-reduce" and world_size == 1 else 2 * size


def is_known(hardware: Hardware, precision: Precision) -> bool:
    """Whether times can be told: everywhere but on hardware without speeds, or a CPU not measured in this format."""
    speeds = hardware.speeds
    if speeds is None or hardware.memory_bandwidth_gb_s is None:
        return False
    return speeds.processor is None or precision.compute in speeds.processor.products.gflops


def group_of(config: RunConfig, name: str) -> Group:
    """Where the ranks of one of a plan's groups are.

    Ranks that share layers are neighbours, shards of what they have so many ranks apart; replicas are F ranks apart.
    """
    ranks_per_node = min(config.gpus, config.gpus_per_node)
    factor, split = config.strategy.factor, config.strategy.split()
    degree = 1 if split is None else split.degree
    ranks, apart = {
        TENSOR: (degree, 1),
        SHARDS: (factor // degree, degree),
        REPLICAS: (config.gpus // factor, factor),
        WORLD: (config.gpus // degree, degree),
    }[name]
    inside = min(ranks, max(1, ranks_per_node // apart))
    return Group(ranks, inside, ranks_per_node // inside)


def exchange_of(hardware: Hardware, precision: Precision, tensor: Group | None) -> Callable[[str, float], float]:
    """Seconds of a collective, by kind and bytes, among ranks that share layers (None: there are none)."""
    speeds = hardware.speeds
    if tensor is None or speeds is None or not is_known(hardware, precision):
        return lambda kind, size: 0.0
    return lambda kind, size: collective_seconds(kind, size, tensor, speeds.links)


def kernel_times(hardware: Hardware, precision: Precision, kernels: Sequence[Kernels]) -> list[Floats] | list[None]:
    """Seconds of each kernel, None where speeds are unknown."""
    if not is_known(hardware, precision):
        return [None] * len(kernels)
    seconds = kernel_seconds(joined(kernels), hardware, precision)
    return np.split(seconds, np.cumsum([len(each) for each in kernels])[:-1])


def update_of(config: RunConfig, updated: Sequence[int]) -> Update:
    """The optimizer's step over tensors with these numbers of elements, in its order."""
    optimizer, itemsize = config.optimizer, config.precision.parameter_dtype.itemsize
    size = sum(updated) * itemsize
    passes = optimizer_passes(optimizer)
    launches = max(1, round(len(updated) / TENSORS_PER_KERNEL[optimizer.implementation]))
    pace = pace_of(config)
    temporaries = 0.0
    if optimizer.name == "adamw" and optimizer.implementation == "foreach":
        temporaries = size  # the square roots of all second moments at once
    elif optimizer.name == "adamw" and optimizer.implementation == "for_loop":
        # A square root and its quotient; until that is there its variable, `denom` in torch/optim/adam.py of torch
        # 2.13, has the quotient of the tensor before.
        temporaries = max((before + 2 * now for before, now in pairwise((0, *updated))), default=0) * itemsize
    processor = config.hardware.speeds.processor if config.hardware.speeds is not None else None
    if processor is not None:
        return Update(_on_processor(processor.updates, optimizer, size, len(updated)), 0, temporaries)
    return Update(passes * size * pace.copy_s_per_byte + launches * pace.kernel_s, launches, temporaries)


def optimizer_passes(optimizer: OptimizerConfig) -> int:
    """Reads and writes of a tensor of the parameters' size per step."""
    key = (optimizer.name, optimizer.implementation)
    return OPTIMIZER_PASSES.get(key, OPTIMIZER_PASSES["sgd", "fused"] + 2 * optimizer.states_per_parameter)


def updates_key(optimizer: OptimizerConfig) -> str:
    """What `bench.hardware.processor.Updates` calls an optimizer."""
    return f"{optimizer.name} {optimizer.implementation}"


def _on_processor(updates: Updates, optimizer: OptimizerConfig, size: float, tensors: int) -> float:
    """Seconds of the optimizer's step on a CPU over tensors of some bytes in all."""
    key = updates_key(optimizer)
    if key not in updates.gb_s:
        raise ValueError(f"hardware.speeds.processor.updates has no speed for {key}")
    return tensors * updates.tensor_us[key] * 1e-6 + optimizer_passes(optimizer) * size / updates.gb_s[key] / 1e9


def time_of(config: RunConfig, machine: Machine, memory: MemoryPrediction) -> TimePrediction | None:
    """The time of a played step with its parts, None where speeds are unknown."""
    if not is_known(config.hardware, config.precision):
        return None
    elapsed, spent = machine.elapsed, machine.spent
    degraded = is_degraded(memory)
    on_link = spent["transfer"] > 0.5 * spent["communication"]
    parts = {
        "compute": spent["compute"],
        "network": 0.0 if on_link else spent["exposed"],
        "host link": spent["carried"] + (spent["exposed"] if on_link else 0.0),
        "host memory" if machine.updated_on_host else "memory bandwidth": spent["optimizer"] - spent["carried"],
        "kernel launches": spent["launch"],
    }
    share = OFFLOADED_TIME_SHARE if config.strategy.uses_host else TIME_SHARE
    return TimePrediction(
        step_s=Range(elapsed, elapsed * (1 - share), elapsed * (1 + share)),
        compute_s=spent["compute"],
        exposed_communication_s=spent["exposed"],
        optimizer_s=spent["optimizer"],
        bubble_s=elapsed - spent["compute"] - spent["exposed"] - spent["optimizer"],
        communication_s=spent["communication"],
        limited_by="allocator" if degraded else max(parts, key=lambda name: parts[name]),
        degraded=degraded,
        timeline=machine.timeline,
    )
