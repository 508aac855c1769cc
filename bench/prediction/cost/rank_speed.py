"""From shapes and sizes to seconds: what a simulated rank knows about the hardware's speed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from bench.config.run_config import RunConfig
from bench.core.precision import Precision
from bench.hardware import Hardware
from bench.hardware.speeds import ProcessorOptimizerSpeed
from bench.optimizers import OptimizerConfig, UpdatedTensor
from bench.optimizers.base import TENSORS_PER_UPDATE_KERNEL, MatrixProduct, UpdateCollective
from bench.optimizers.updated_tensor import DIVIDED_DTENSORS, DTENSORS
from bench.prediction.cost.collectives import compute_collective_seconds, compute_send_seconds
from bench.prediction.cost.kernels import REDUCE_INPUT_OPERATOR, compute_kernel_seconds, find_bandwidth_share
from bench.prediction.cost.rank_groups import LayerGroups, build_collective_group
from bench.prediction.prediction import PredictedRange, TimePrediction
from bench.prediction.simulation.device_memory import AllocatorRetries
from bench.prediction.simulation.simulated_rank import RankSpeed, SimulatedRank
from bench.prediction.simulation.step import OptimizerUpdate
from bench.prediction.trace.kernels import MATMUL, OPERAND_FORMATS, FloatArray, KernelArrays, concatenate_kernels
from bench.prediction.trace.trace import SEND, TO_DEVICE, TO_HOST
from bench.prediction.trace.trace_cache import HashableHardware
from bench.strategies.step_plan import REPLICA_GROUP, SHARD_GROUP, RankPlan, StepPlan

TIME_INTERVAL_SHARE = 0.10
"""Interval of a step's time on a calibrated CPU, as a share of it. That of GPUs comes from residuals of published rows
(`bench.prediction.intervals`)."""

OFFLOADED_TIME_INTERVAL_SHARE = 0.30
"""The same where something is offloaded. Speeds of links and of the machine's memory are those of benchmarks, and no
step that uses them was measured by us: a guess, three times as wide."""

CLIPPING_PASSES = 3
"""Reads and writes of all gradients where they are clipped: read for the norm, then read and written."""

DTENSOR_LAUNCHES = 3.3
"""What an operator on a DTensor takes the processor, in launches of one on a plain tensor: measured on a CPU with
torch 2.13, where Muon's step of a matrix, 30 operators, took 1,784 us with DTensors and 537 us without. It counts where
an optimizer takes one tensor after the other; fused and foreach kernels are given many at once."""

NORM_BYTES = 4
"""Of the norm that ranks add up."""

ALLOCATOR_RETRY_S_PER_BYTE = 2.3e-11
"""What the caching allocator needs to give memory back to the device and take as much of it again, per byte asked for,
when it has to retry: all streams stand still meanwhile. Set so that T5-11B on 4 machines is as much slower without the
rate limiter as in Figure 6(c) of the FSDP paper; GPT-175B at batch 2 on 128 GPUs in Figure 7(b) would want half as much
again. That memory is short follows from memory; how slow it is then is a rough number."""


def add_allocator_retries(speed: RankSpeed) -> RankSpeed:
    """The same rank when every buffer it gathers into or reduces from makes the allocator retry."""
    return dataclasses.replace(speed, retry_s_per_byte=ALLOCATOR_RETRY_S_PER_BYTE)


def blend_retries(fast: TimePrediction, slow: TimePrediction, retries: AllocatorRetries) -> TimePrediction:
    """The time of a step in which the allocator retries for a share of its buffers, of two in which it does so for none
    and for all.

    The interval reaches from the fewest retries to the most that are likely.
    """

    def blend(fast_s: float, slow_s: float, share: float) -> float:
        return fast_s + share * (slow_s - fast_s)

    step_s = PredictedRange(
        blend(fast.step_s.value, slow.step_s.value, retries.share),
        blend(fast.step_s.low, slow.step_s.low, retries.low_share),
        blend(fast.step_s.high, slow.step_s.high, retries.high_share),
    )
    degraded = retries.probability > 0.5
    return dataclasses.replace(
        fast,
        step_s=step_s,
        compute_s=blend(fast.compute_s, slow.compute_s, retries.share),
        exposed_communication_s=blend(fast.exposed_communication_s, slow.exposed_communication_s, retries.share),
        optimizer_s=blend(fast.optimizer_s, slow.optimizer_s, retries.share),
        bubble_s=blend(fast.bubble_s, slow.bubble_s, retries.share),
        limited_by="allocator" if degraded else fast.limited_by,
        degraded=degraded,
        retry_probability=retries.probability,
        retry_s=step_s.value - fast.step_s.value,
    )


def build_rank_speed(config: RunConfig) -> RankSpeed:
    """How fast the rank of a run is; a standstill where the hardware's speeds are unknown."""
    hardware, speeds = config.hardware, config.hardware.speeds
    if speeds is None or hardware.memory_bandwidth_gb_s is None or not is_speed_known(hardware, config.precision):
        return RankSpeed()

    copy_s_per_byte = 1 / (hardware.memory_bandwidth_gb_s * 1e9 * speeds.memory_efficiency)
    is_gpu = speeds.processor is None

    @functools.cache
    def compute_seconds(kind: str, size: float, group_name: str) -> float:
        group = build_collective_group(config, group_name)
        if group.num_ranks == 1 and group_name in (SHARD_GROUP, REPLICA_GROUP):
            return _count_lone_rank_bytes(kind, size, config.gpus) * copy_s_per_byte
        return compute_collective_seconds(kind, size, group, speeds.links)

    return RankSpeed(
        collective_seconds=compute_seconds,
        copy_s_per_byte=copy_s_per_byte,
        reduce_input_s_per_byte=copy_s_per_byte
        / (find_bandwidth_share(REDUCE_INPUT_OPERATOR, speeds) if is_gpu else 1.0),
        launch_s=speeds.launch.operator_us * 1e-6,
        is_cpu=not is_gpu,
        unit_hooks_s=speeds.launch.unit_us * 1e-6,
        min_kernel_s=speeds.launch.kernel_us * 1e-6,
        overlap_loss=speeds.overlap_loss,
        records_nccl_stream=speeds.records_nccl_stream,
    )


def _count_lone_rank_bytes(kind: str, size: float, world_size: int) -> float:
    """Bytes that a rank reads and writes in a collective of FSDP2 in which it is alone.

    Its reduce-scatter copies. An all-reduce that averages is a kernel over everything (NCCL's ``oneRankReduce``); one
    that sums, as in a world of one rank, is nothing (``_get_gradient_divide_factors`` in torch 2.13).
    """
    return 0.0 if kind == "all-reduce" and world_size == 1 else 2 * size


def build_hashable_hardware(config: RunConfig) -> HashableHardware:
    """What the times of a run's kernels depend on: a GPU that is alone waits for no other."""
    hardware, speeds = config.hardware, config.hardware.speeds
    if speeds is not None and config.gpus == 1:
        hardware = dataclasses.replace(hardware, speeds=dataclasses.replace(speeds, many_gpus_share=1.0))
    return HashableHardware(hardware)


def is_speed_known(hardware: Hardware, precision: Precision) -> bool:
    """Whether times can be told: everywhere but on hardware without speeds, or a CPU not measured in this format."""
    speeds = hardware.speeds
    if speeds is None or hardware.memory_bandwidth_gb_s is None:
        return False
    return speeds.processor is None or precision.compute in speeds.processor.products.gflops


def build_layer_collective_timer(
    hardware: Hardware,
    precision: Precision,
    groups: LayerGroups,
    transfer_s_per_byte: float = 0.0,
) -> Callable[[str, float, str], float]:
    """Seconds of a collective among ranks that share layers, by kind, bytes and group, and of a copy between device
    and host."""
    speeds, group_by_name = hardware.speeds, dict(groups)
    if speeds is None or not is_speed_known(hardware, precision):
        return lambda kind, size, group: 0.0

    def compute_seconds(kind: str, size: float, group_name: str) -> float:
        if kind in (TO_HOST, TO_DEVICE):
            return size * transfer_s_per_byte
        group = group_by_name[group_name]
        if kind == SEND:  # the slowest link of the ring decides
            is_in_node, concurrent_sends = group.nodes == 1, group.concurrent_groups
            return compute_send_seconds(size, speeds.links, is_in_node=is_in_node, concurrent_sends=concurrent_sends)
        return compute_collective_seconds(kind, size, group, speeds.links)

    return compute_seconds


def compute_seconds_per_segment(
    hardware: Hardware,
    precision: Precision,
    kernels: Sequence[KernelArrays],
    expert_tokens: Sequence[int],
    repetitions: Sequence[int],
) -> list[FloatArray] | list[None]:
    """Seconds of each kernel, None where speeds are unknown.

    Parameters
    ----------
    expert_tokens: sequence of int
        As `compute_kernel_seconds` takes them.
    repetitions: sequence of int
        How often a step runs each segment.
    """
    if not is_speed_known(hardware, precision):
        return [None] * len(kernels)
    counts = np.repeat(np.array(repetitions, dtype=float), [len(arrays) for arrays in kernels])
    seconds = compute_kernel_seconds(concatenate_kernels(kernels), hardware, precision, expert_tokens, counts)
    return np.split(seconds, np.cumsum([len(arrays) for arrays in kernels])[:-1])


def predict_device_update(config: RunConfig, tensors: Sequence[UpdatedTensor]) -> OptimizerUpdate:
    """The optimizer's step over tensors, in its order."""
    optimizer, itemsize = config.optimizer, config.trained_precision.parameter_itemsize
    is_on_cpu = config.hardware.device == "cpu"
    temporary_bytes = optimizer.compute_temporary_bytes(tensors, itemsize, is_on_cpu=is_on_cpu)
    moved_bytes, num_kernels = optimizer.compute_moved_bytes(tensors, itemsize), optimizer.count_kernels(tensors)
    products = optimizer.list_matrix_products(tensors)
    collectives = tuple((collective, SHARD_GROUP) for collective in optimizer.list_collectives(tensors))
    processor = config.hardware.speeds.processor if config.hardware.speeds is not None else None
    product_s = _compute_product_seconds(config, products)
    if processor is not None:
        seconds = _compute_cpu_update_seconds(processor.updates, optimizer, moved_bytes, len(tensors))
        return OptimizerUpdate(seconds + product_s, 0, temporary_bytes, collectives=collectives)
    speed = build_rank_speed(config)
    num_launches = num_kernels + sum(product.count for product in products)
    if config.strategy.updated_tensor_kind in (DTENSORS, DIVIDED_DTENSORS) and num_launches >= len(tensors):
        num_launches = round(num_launches * DTENSOR_LAUNCHES)
    return OptimizerUpdate(
        moved_bytes * speed.copy_s_per_byte + num_kernels * speed.min_kernel_s + product_s,
        num_launches,
        temporary_bytes,
        collectives=collectives,
    )


def _compute_product_seconds(config: RunConfig, products: Sequence[MatrixProduct]) -> float:
    """Seconds of an optimizer's matrix products, which are in bf16."""
    import torch

    if not products or not is_speed_known(config.hardware, config.precision):
        return 0.0
    itemsize = torch.bfloat16.itemsize
    kernels = KernelArrays(
        operators=("mm",) * len(products),
        kinds=np.full(len(products), MATMUL),
        formats=np.full(len(products), OPERAND_FORMATS.index("bf16")),
        dims=np.array([[1, product.m, product.n, product.k, 0] for product in products], dtype=float),
        flops=np.array([2.0 * product.m * product.n * product.k for product in products]),
        bytes_moved=np.array(
            [
                float(itemsize * (product.m * product.k + product.k * product.n + product.m * product.n))
                for product in products
            ]
        ),
        row_bytes=np.zeros(len(products), dtype=np.int64),
    )
    hardware = build_hashable_hardware(config).hardware
    seconds = compute_kernel_seconds(kernels, hardware, dataclasses.replace(config.precision, compute="bf16"))
    return float(seconds @ np.array([product.count for product in products]))


def build_updates_key(optimizer: OptimizerConfig) -> str:
    """What `bench.hardware.speeds.ProcessorOptimizerSpeed` calls an optimizer."""
    return f"{optimizer.name} {optimizer.implementation}"


UNTIMED_UPDATES_KEY = "adamw for_loop"
"""Stands in for optimizers that calibration does not time on a processor: as many bytes a second, and as long for each
tensor."""


def _compute_cpu_update_seconds(
    updates: ProcessorOptimizerSpeed, optimizer: OptimizerConfig, moved_bytes: float, num_tensors: int
) -> float:
    """Seconds of the optimizer's step on a CPU that moves some bytes of so many tensors."""
    key = build_updates_key(optimizer)
    if optimizer.name not in CALIBRATED_OPTIMIZERS:
        key = UNTIMED_UPDATES_KEY
    if key not in updates.gb_s:
        raise ValueError(f"hardware.speeds.processor.updates has no speed for {key}")
    return num_tensors * updates.tensor_us[key] * 1e-6 + moved_bytes / updates.gb_s[key] / 1e9


CALIBRATED_OPTIMIZERS = ("adamw", "sgd")
"""Those whose steps calibration times on a processor."""


def add_clipping(config: RunConfig, plan: RankPlan, update: OptimizerUpdate) -> OptimizerUpdate:
    """The same after gradients were clipped, where they are: their norm is taken, added up among ranks, and scales
    them. Nothing is allocated but the norm of each."""
    if config.gradient_clip_norm is None:
        return update
    speed, numels = build_rank_speed(config), plan.clipped_numels
    moved_bytes = CLIPPING_PASSES * sum(numels) * config.trained_precision.parameter_itemsize
    host = config.hardware.host
    s_per_byte = speed.copy_s_per_byte
    if update.on_host:
        s_per_byte = 0.0 if host is None else host.compute_memory_seconds_per_byte(count_ranks_per_host(config))
    num_kernels = 0 if speed.is_cpu else 2 * max(1, round(len(numels) / TENSORS_PER_UPDATE_KERNEL["fused"]))
    return dataclasses.replace(
        update,
        seconds=update.seconds + moved_bytes * s_per_byte + num_kernels * speed.min_kernel_s,
        num_kernels=update.num_kernels + num_kernels,
        collectives=(
            *((UpdateCollective("all-reduce", NORM_BYTES), group) for group in plan.norm_groups),
            *update.collectives,
        ),
    )


def compute_update_collective_seconds(config: RunConfig, update: OptimizerUpdate) -> float:
    """Seconds of what ranks exchange within the optimizer's step, one after the other."""
    speed = build_rank_speed(config)
    return sum(
        collective.count * speed.collective_seconds(collective.kind, collective.size, group)
        for collective, group in update.collectives
    )


def predict_time(config: RunConfig, counted_ranks: Sequence[tuple[int, SimulatedRank]]) -> TimePrediction | None:
    """The mean time of the simulated steps of a period with its parts, None where speeds are unknown.

    Parameters
    ----------
    counted_ranks: sequence of (int, SimulatedRank)
        How many steps of the period are alike, and the rank after one of them; the last one's timeline is kept.
    """
    if not is_speed_known(config.hardware, config.precision):
        return None
    period = sum(count for count, _ in counted_ranks)
    elapsed_s = sum(count * rank.elapsed_s for count, rank in counted_ranks) / period
    simulated_rank = counted_ranks[-1][1]
    spent_seconds = {
        part: sum(count * rank.spent_seconds[part] for count, rank in counted_ranks) / period
        for part in simulated_rank.spent_seconds
    }
    is_host_link_bound = spent_seconds["transfer"] > 0.5 * spent_seconds["communication"]
    seconds_by_limit = {
        "compute": spent_seconds["compute"],
        "network": 0.0 if is_host_link_bound else spent_seconds["exposed"],
        "host link": spent_seconds["carried"] + (spent_seconds["exposed"] if is_host_link_bound else 0.0),
        "host memory" if simulated_rank.updated_on_host else "memory bandwidth": spent_seconds["optimizer"]
        - spent_seconds["carried"],
        "kernel launches": spent_seconds["launch"],
    }
    interval_share = OFFLOADED_TIME_INTERVAL_SHARE if config.uses_host_memory else find_time_interval_share(config)
    return TimePrediction(
        step_s=PredictedRange(elapsed_s, elapsed_s * (1 - interval_share), elapsed_s * (1 + interval_share)),
        compute_s=spent_seconds["compute"],
        exposed_communication_s=spent_seconds["exposed"],
        optimizer_s=spent_seconds["optimizer"],
        bubble_s=elapsed_s - spent_seconds["compute"] - spent_seconds["exposed"] - spent_seconds["optimizer"],
        communication_s=spent_seconds["communication"],
        limited_by=max(seconds_by_limit, key=lambda name: seconds_by_limit[name]),
        degraded=False,
        timeline=simulated_rank.timeline,
    )


def find_time_interval_share(config: RunConfig) -> float:
    """Interval of a step's time beside that which `bench.prediction.intervals` gives it."""
    return TIME_INTERVAL_SHARE if config.hardware.device == "cpu" else 0.0


# --- What is kept or updated outside of the device, in the machine around it: how long that takes.


def is_host_speed_known(config: RunConfig) -> bool:
    """Whether the time of a run can be told as far as the machine around its devices decides it."""
    return config.hardware.host is not None or not config.uses_host_memory


def add_host_transfers(config: RunConfig, speed: RankSpeed) -> RankSpeed:
    """The same rank, which also exchanges data with its machine's memory while its neighbours do."""
    host = config.hardware.host
    if host is None or not config.uses_host_memory:
        return speed
    return dataclasses.replace(
        speed, transfer_s_per_byte=host.compute_link_seconds_per_byte(count_ranks_per_host(config))
    )


def predict_optimizer_update(config: RunConfig, plan: StepPlan) -> OptimizerUpdate:
    """The clipping of gradients, if they are clipped, and the optimizer's step as the plan has it carried out."""
    return add_clipping(config, plan, _predict_planned_update(config, plan))


def _predict_planned_update(config: RunConfig, plan: StepPlan) -> OptimizerUpdate:
    """The optimizer's step as the plan has it carried out.

    On the host it reads and writes as much as on a device, at the speed of the machine's memory, of which each rank has
    its share: all cores are taken to be at work on it, as many as it needs to be limited by memory. Where parameters
    alone are offloaded, one after the other comes to the device with its gradient, is updated and goes back; the
    copies are not hidden. What the processors copy beside it comes on top.
    """
    host = config.hardware.host
    memory_s_per_byte = 0.0 if host is None else host.compute_memory_seconds_per_byte(count_ranks_per_host(config))
    host_copy_s = plan.host_copy_bytes * memory_s_per_byte
    if plan.updates_on_host:
        moved_bytes = config.optimizer.compute_moved_bytes(
            plan.updated_tensors, config.trained_precision.parameter_itemsize
        )
        return OptimizerUpdate(host_copy_s + moved_bytes * memory_s_per_byte, 0, 0.0, on_host=True)
    whole_update = predict_device_update(config, plan.updated_tensors)
    if plan.updates_tensors_apart:
        updates = [predict_device_update(config, [tensor]) for tensor in plan.updated_tensors]
        whole_update = dataclasses.replace(
            whole_update, temporary_bytes=max(update.temporary_bytes for update in updates)
        )
    if not plan.optimizer_transfer_bytes:
        return dataclasses.replace(whole_update, seconds=whole_update.seconds + host_copy_s)
    largest_tensor = max(plan.updated_tensors, key=lambda tensor: tensor.numel, default=UpdatedTensor((0,)))
    largest_update = predict_device_update(config, [largest_tensor])
    transfer_s_per_byte = add_host_transfers(config, RankSpeed()).transfer_s_per_byte
    num_kernels = max(whole_update.num_kernels, len(plan.updated_tensors))
    itemsize = config.trained_precision.parameter_itemsize
    temporary_bytes = largest_update.temporary_bytes + 2 * largest_tensor.numel * itemsize
    transfer_s = plan.optimizer_transfer_bytes * transfer_s_per_byte
    return OptimizerUpdate(whole_update.seconds + transfer_s, num_kernels, temporary_bytes, transfer_s=transfer_s)


def count_ranks_per_host(config: RunConfig) -> int:
    """Ranks that share a machine's memory and links."""
    return min(config.gpus, config.gpus_per_node)
