"""How a candidate and its numbers are called, the same in the table, the details and the advice."""

from __future__ import annotations

from bench.advice.ranking import Row
from bench.config import RunConfig
from bench.planning.grid import Settings
from bench.reporting.labels import number, variant

GIB = 2**30

CHECKPOINTING = {
    "none": "no activation checkpointing",
    "selective": "selective checkpointing",
    "full": "full checkpointing",
}

PARTS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "gathered": "gathered parameters",
    "reduced": "buffers for reducing gradients",
    "temporaries": "temporary results",
}
"""Names of `bench.simulate.prediction.PARTS` in a sentence."""

STATES = ("parameters", "gradients", "optimizer")
"""Parts that grow with the model alone, not with the batch."""


UNSHARDED = " without resharding"
"""Where gathered parameters are kept until backward."""


def strategy(config: RunConfig) -> str:
    """A strategy at its sharding factor: ``DDP``, ``FSDP2 hybrid (F=8)``, ``FSDP2 full shard without resharding``."""
    effective = config.strategy.effective(config.gpus).removesuffix("_offload")
    resharded = effective.replace("hybrid_shard_grad_op", "hybrid_shard").replace("shard_grad_op", "full_shard")
    label = variant(config.strategy.name, resharded, config.strategy.factor, config.gpus).label
    offloaded = config.strategy.offloaded
    offload = f" with {offloaded} offloaded" if offloaded else ""
    return label + (UNSHARDED if resharded != effective else "") + offload


def gib(count: float) -> str:
    """Bytes in GiB, without the unit."""
    return number(count / GIB)


def percent(share: float) -> str:
    """A share as a whole percentage, ``<1 %`` where it is less."""
    rounded = round(100 * share)
    return f"{rounded} %" if rounded or share == 0 else "<1 %"


def of_capacity(row: Row) -> str:
    """``46.1 of 79.2 GiB``: what is predicted to be reserved, of what there is."""
    memory = row.prediction.memory
    capacity = "" if memory.capacity is None else f" of {gib(memory.capacity)}"
    return f"{gib(memory.reserved.value)}{capacity} GiB"


def listing(items: list[str]) -> str:
    """``a, b and c``."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def overrides(settings: Settings) -> list[str]:
    """Settings as typed, in the order they were given."""
    return [f"{key}={value.lower() if value in ('True', 'False') else value}" for key, value in settings.items()]


def untimed(config: RunConfig) -> str:
    """Why no time is predicted for a run."""
    if config.hardware.speeds is None:
        return f"hardware={config.hardware.name} says nothing of its speed"
    name = config.hardware.name
    return f"the machine around the device decides where something is offloaded, and hardware={name} has no host"
