"""What is kept or updated outside of the device, in the machine around it: how long that takes."""

from __future__ import annotations

import dataclasses

from bench.config import RunConfig
from bench.simulate import pace
from bench.simulate.machine import Pace
from bench.simulate.step import Update
from bench.strategies.plan import Plan


def is_known(config: RunConfig) -> bool:
    """Whether the time of a run can be told as far as the machine around its devices decides it."""
    return config.hardware.host is not None or not config.strategy.uses_host


def with_transfers(config: RunConfig, speed: Pace) -> Pace:
    """The same rank, which also exchanges data with its machine's memory while its neighbours do."""
    host = config.hardware.host
    if host is None or not config.strategy.uses_host:
        return speed
    return dataclasses.replace(speed, transfer_s_per_byte=host.link_seconds_per_byte(ranks_per_machine(config)))


def update_of(config: RunConfig, plan: Plan) -> Update:
    """The optimizer's step as the plan has it carried out.

    On the host it reads and writes as much as on a device, at the speed of the machine's memory, of which each rank has
    its share: all cores are taken to be at work on it, as many as it needs to be limited by memory. Where parameters
    alone are offloaded, one after the other comes to the device with its gradient, is updated and goes back; the
    copies are not hidden. What the processors copy beside it comes on top.
    """
    host = config.hardware.host
    in_memory = 0.0 if host is None else host.memory_seconds_per_byte(ranks_per_machine(config))
    copied = plan.copied_on_host * in_memory
    if plan.updates_on_host:
        size = sum(plan.updated) * config.precision.parameter_dtype.itemsize
        moved = pace.optimizer_passes(config.optimizer) * size
        return Update(copied + moved * in_memory, 0, 0.0, on_host=True)
    together = pace.update_of(config, plan.updated)
    if not plan.carried:
        return dataclasses.replace(together, seconds=together.seconds + copied)
    largest = max(plan.updated, default=0)
    one = pace.update_of(config, [largest])
    each = with_transfers(config, Pace()).transfer_s_per_byte
    kernels = max(together.kernels, len(plan.updated))
    held = one.temporaries + 2 * largest * config.precision.parameter_dtype.itemsize
    carried_s = plan.carried * each
    return Update(together.seconds + carried_s, kernels, held, carried_s=carried_s)


def ranks_per_machine(config: RunConfig) -> int:
    """Ranks that share a machine's memory and links."""
    return min(config.gpus, config.gpus_per_node)
