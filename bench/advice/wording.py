"""How a candidate and its numbers are called, the same in the table, the details and the advice."""

from __future__ import annotations

from bench.advice.ranking import RankedCandidate
from bench.config.grid import RunSettings
from bench.config.run_config import RunConfig
from bench.core.presentation import build_variant, format_number
from bench.core.units import GIB

MEMORY_PART_LABELS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "gathered": "gathered parameters",
    "reduced": "buffers for reducing gradients",
    "temporaries": "temporary results",
}
"""Names of `….MEMORY_PARTS` in a sentence."""

MODEL_STATE_PARTS = ("parameters", "gradients", "optimizer")
"""Parts that grow with the model alone, not with the batch."""


NO_RESHARD_SUFFIX = " without resharding"
"""Where gathered parameters are kept until backward."""


def format_strategy(config: RunConfig) -> str:
    """A strategy at its sharding factor: ``DDP``, ``FSDP2 hybrid (F=8)``, ``FSDP2 full shard without resharding``."""
    effective_strategy = config.strategy.describe_effective_strategy(config.gpus).removesuffix("_offload")
    resharded_strategy = effective_strategy.replace("hybrid_shard_grad_op", "hybrid_shard").replace(
        "shard_grad_op", "full_shard"
    )
    label = build_variant(
        config.strategy.name, resharded_strategy, config.strategy.resolved_sharding_factor, config.gpus
    ).label
    offloaded = config.strategy.offloaded_state
    offload_suffix = f" with {offloaded} offloaded" if offloaded else ""
    return label + (NO_RESHARD_SUFFIX if resharded_strategy != effective_strategy else "") + offload_suffix


def format_strategy_name(config: RunConfig) -> str:
    """``fsdp``; of a mesh its degrees and schedule: ``pp4-fsdp16-tp8+1f1b``."""
    effective_strategy = config.strategy.describe_effective_strategy(config.gpus)
    name, _, layout = effective_strategy.partition("/")
    return layout.removesuffix("+sequence") if name == "mesh" else config.strategy.name


def format_accumulation(config: RunConfig) -> str:
    """Micro-batches; ``8 sync`` where gradients are reduced after each."""
    count = config.gradient_accumulation
    return f"{count} sync" if count > 1 and config.gradient_accumulation_sync else str(count)


def format_batch(config: RunConfig) -> str:
    """Sequences per GPU and micro-batch; ``1/8`` where 8 ranks read one together."""
    ranks = config.strategy.num_ranks_per_batch
    return str(config.batch_size_per_gpu) if ranks == 1 else f"{config.batch_size_per_gpu}/{ranks}"


def format_gib(size_bytes: float) -> str:
    """Bytes in GiB, without the unit."""
    return format_number(size_bytes / GIB)


def format_percent(share: float) -> str:
    """A share as a whole percentage, ``<1 %`` where it is less."""
    rounded_percent = round(100 * share)
    return f"{rounded_percent} %" if rounded_percent or share == 0 else "<1 %"


def format_memory_use(candidate: RankedCandidate) -> str:
    """``46.1 of 79.2 GiB``: what is predicted to be reserved, of what there is."""
    memory = candidate.prediction.memory
    capacity_text = "" if memory.capacity is None else f" of {format_gib(memory.capacity)}"
    return f"{format_gib(memory.reserved.value)}{capacity_text} GiB"


def join_items(items: list[str]) -> str:
    """``a, b and c``."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def format_overrides(settings: RunSettings) -> list[str]:
    """Settings as typed, in the order they were given."""
    return [f"{key}={value.lower() if value in ('True', 'False') else value}" for key, value in settings.items()]


def describe_missing_time(config: RunConfig) -> str:
    """Why no time is predicted for a run."""
    if config.hardware.speeds is None:
        return f"hardware={config.hardware.name} says nothing of its speed"
    name = config.hardware.name
    return f"the machine around the device decides where something is offloaded, and hardware={name} has no host"
