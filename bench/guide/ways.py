"""The ways to train that the tree ends at: what each is called and what is typed for it. All of them in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bench.planning.grid import Settings

NODE, NODES, GPUS = "{node}", "{nodes}", "{gpus}"
"""In a value: GPUs of a node, number of nodes, all GPUs."""

FILLING = 4
"""Micro-batches per stage of a pipeline that is to be busy: idle (P - 1) / (4 P + P - 1) of a step, a fifth."""

FILL_GPUS, FILL_NODES = "{micro-batches of gpus}", "{micro-batches of nodes}"
"""In a value: micro-batches that fill a pipeline of as many stages."""


@dataclass(frozen=True)
class Way:
    """One way to train."""

    name: str
    """As the field calls it."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """What is typed for it; NODE, NODES and GPUS are filled in."""
    remark: str = ""
    """What to know before taking it."""

    @property
    def trains_adapters(self) -> bool:
        """Whether it leaves the model's weights as they are."""
        return "finetune" in self.settings

    def filled(self, gpus: int, per_node: int, batch: int | None) -> Settings:
        """The settings for some GPUs, and a batch of so many sequences per GPU; None for one that is to be searched."""
        nodes = -(-gpus // per_node)
        numbers = {NODE: min(gpus, per_node), NODES: nodes, GPUS: gpus}
        numbers |= {FILL_GPUS: _filling(gpus, batch), FILL_NODES: _filling(nodes, batch)}
        values = {name: str(number) for name, number in numbers.items()}
        return {key: values.get(value, value) for key, value in self.settings.items()}


def _filling(stages: int, batch: int | None) -> int:
    """Micro-batches of a pipeline: `FILLING` per stage, or as near to it as divides the sequences of one copy."""
    sequences = stages * (batch or FILLING)
    return max(count for count in range(1, FILLING * stages + 1) if sequences % count == 0)


def _fsdp(**knobs: str) -> dict[str, str]:
    return {"strategy": "fsdp", **{f"strategy.{name}": value for name, value in knobs.items()}}


SINGLE = Way("one process", {"strategy": "single"})
DDP = Way("DDP", {"strategy": "ddp"})
ZERO_1 = Way("ZeRO-1", {"strategy": "zero1"}, "a whole copy of the model, optimizer state divided among the GPUs")
ZERO_2 = Way(
    "ZeRO-2",
    _fsdp(sharding_factor="full", reshard_after_forward="false"),
    "FSDP that keeps gathered parameters from forward to backward",
)
ZERO_3 = Way(
    "ZeRO-3, which is FSDP full shard",
    _fsdp(sharding_factor="full", reshard_after_forward="true"),
    "the model's code stays as it is",
)
HYBRID = Way(
    "hybrid sharding: FSDP within each node",
    _fsdp(sharding_factor="node"),
    "only gradients cross the network between nodes",
)
COMPRESSED = Way(
    "DDP with gradients compressed to bf16",
    {"strategy": "ddp", "strategy.communication_hook": "bf16"},
    "half the bytes; gradients are rounded",
)
TENSOR = Way(
    "tensor parallelism within the node",
    {"strategy": "tensor_parallel", "strategy.degree": NODE},
    "every layer is cut, so the largest may be larger than a GPU; needs fast links and changes to the model",
)
PIPELINE = Way(
    "pipeline parallelism",
    {"strategy": "pipeline", "strategy.stages": GPUS, "strategy.micro_batches": FILL_GPUS},
    "sends activations only; idle at the start and end of a step; a layer must fit on one GPU",
)
PIPELINE_OF_NODES = Way(
    "pipeline parallelism, a stage per node",
    {"strategy": "pipeline", "strategy.stages": NODES, "strategy.micro_batches": FILL_NODES},
    "sends activations only between nodes; idle at the start and end of a step",
)
OFFLOAD_FSDP = Way(
    "ZeRO-3 (FSDP) with parameters and optimizer on the CPU",
    _fsdp(sharding_factor="full", cpu_offload="true"),
    "as fast as the link to the CPU and its optimizer step allow",
)
OFFLOAD_DEEPSPEED = Way(
    "DeepSpeed ZeRO-3 with parameters and optimizer on the CPU",
    {
        "strategy": "deepspeed",
        "strategy.sharding_factor": "stage",
        "strategy.stage": "3",
        "strategy.offload_parameters": "cpu",
        "strategy.offload_optimizer": "cpu",
    },
    "offload_parameters=nvme and strategy.nvme_path=FOLDER where the CPU's memory is too small as well",
)
LORA = Way("LoRA", {"finetune": "lora"}, "for fine-tuning only: trains small adapters, the model's weights stay frozen")
QLORA = Way("QLoRA", {"finetune": "qlora", "finetune.bits": "4"}, "as LoRA, with frozen weights of 4 bits")
