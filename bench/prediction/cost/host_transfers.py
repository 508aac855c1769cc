"""What is kept or updated outside of the device, in the machine around it: how long that takes."""

from __future__ import annotations

import dataclasses

from bench.config.run_config import RunConfig
from bench.prediction.cost import rank_speed
from bench.prediction.simulation.simulated_rank import RankSpeed
from bench.prediction.simulation.step import OptimizerUpdate
from bench.strategies.step_plan import StepPlan


def is_host_speed_known(config: RunConfig) -> bool:
    """Whether the time of a run can be told as far as the machine around its devices decides it."""
    return config.hardware.host is not None or not config.strategy.has_offloaded_state


def add_host_transfers(config: RunConfig, speed: RankSpeed) -> RankSpeed:
    """The same rank, which also exchanges data with its machine's memory while its neighbours do."""
    host = config.hardware.host
    if host is None or not config.strategy.has_offloaded_state:
        return speed
    return dataclasses.replace(
        speed, transfer_s_per_byte=host.compute_link_seconds_per_byte(count_ranks_per_host(config))
    )


def predict_optimizer_update(config: RunConfig, plan: StepPlan) -> OptimizerUpdate:
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
        updated_bytes = sum(plan.updated_numels) * config.precision.parameter_dtype.itemsize
        moved_bytes = rank_speed.count_optimizer_passes(config.optimizer) * updated_bytes
        return OptimizerUpdate(host_copy_s + moved_bytes * memory_s_per_byte, 0, 0.0, on_host=True)
    whole_update = rank_speed.predict_device_update(config, plan.updated_numels)
    if not plan.optimizer_transfer_bytes:
        return dataclasses.replace(whole_update, seconds=whole_update.seconds + host_copy_s)
    largest_numel = max(plan.updated_numels, default=0)
    largest_update = rank_speed.predict_device_update(config, [largest_numel])
    transfer_s_per_byte = add_host_transfers(config, RankSpeed()).transfer_s_per_byte
    num_kernels = max(whole_update.num_kernels, len(plan.updated_numels))
    temporary_bytes = largest_update.temporary_bytes + 2 * largest_numel * config.precision.parameter_dtype.itemsize
    transfer_s = plan.optimizer_transfer_bytes * transfer_s_per_byte
    return OptimizerUpdate(whole_update.seconds + transfer_s, num_kernels, temporary_bytes, transfer_s=transfer_s)


def count_ranks_per_host(config: RunConfig) -> int:
    """Ranks that share a machine's memory and links."""
    return min(config.gpus, config.gpus_per_node)
