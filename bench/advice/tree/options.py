"""The ways to train that the tree ends at: what each is called and what is typed for it. All of them in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bench.config.grid import RunSettings

NODE_GPUS_PLACEHOLDER, NODES_PLACEHOLDER, GPUS_PLACEHOLDER = "{node}", "{nodes}", "{gpus}"
"""In a value: GPUs of a node, number of nodes, all GPUs."""

MICRO_BATCHES_PER_STAGE = 4
"""Micro-batches per stage of a pipeline that is to be busy: idle (P - 1) / (4 P + P - 1) of a step, a fifth."""

GPU_MICRO_BATCHES_PLACEHOLDER, NODE_MICRO_BATCHES_PLACEHOLDER = "{micro-batches of gpus}", "{micro-batches of nodes}"
"""In a value: micro-batches that fill a pipeline of as many stages."""


@dataclass(frozen=True)
class TrainingOption:
    """One way to train."""

    name: str
    """As the field calls it."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """What is typed for it; NODE, NODES and GPUS are filled in."""
    note: str = ""
    """What to know before taking it."""

    @property
    def trains_adapters(self) -> bool:
        """Whether it leaves the model's weights as they are."""
        return "finetune" in self.settings

    def fill_settings(self, gpus: int, gpus_per_node: int, requested_batch: int | None) -> RunSettings:
        """The settings for some GPUs, and a batch of so many sequences per GPU; None for one that is to be searched."""
        nodes = -(-gpus // gpus_per_node)
        number_by_placeholder = {
            NODE_GPUS_PLACEHOLDER: min(gpus, gpus_per_node),
            NODES_PLACEHOLDER: nodes,
            GPUS_PLACEHOLDER: gpus,
        }
        number_by_placeholder |= {
            GPU_MICRO_BATCHES_PLACEHOLDER: _choose_micro_batches(gpus, requested_batch),
            NODE_MICRO_BATCHES_PLACEHOLDER: _choose_micro_batches(nodes, requested_batch),
        }
        text_by_placeholder = {placeholder: str(number) for placeholder, number in number_by_placeholder.items()}
        return {key: text_by_placeholder.get(value, value) for key, value in self.settings.items()}


def _choose_micro_batches(stages: int, requested_batch: int | None) -> int:
    """Micro-batches of a pipeline: `MICRO_BATCHES_PER_STAGE` per stage, or as near to it as divides the sequences of
    one copy."""
    sequences = stages * (requested_batch or MICRO_BATCHES_PER_STAGE)
    return max(count for count in range(1, MICRO_BATCHES_PER_STAGE * stages + 1) if sequences % count == 0)


def _build_fsdp_settings(**knobs: str) -> dict[str, str]:
    return {"strategy": "fsdp", **{f"strategy.{name}": value for name, value in knobs.items()}}


SINGLE_PROCESS = TrainingOption("one process", {"strategy": "single"})
DDP = TrainingOption("DDP", {"strategy": "ddp"})
ZERO_1 = TrainingOption(
    "ZeRO-1", {"strategy": "zero1"}, "a whole copy of the model, optimizer state divided among the GPUs"
)
ZERO_2 = TrainingOption(
    "ZeRO-2",
    _build_fsdp_settings(sharding_factor="full", reshard_after_forward="false"),
    "FSDP that keeps gathered parameters from forward to backward",
)
ZERO_3 = TrainingOption(
    "ZeRO-3, which is FSDP full shard",
    _build_fsdp_settings(sharding_factor="full", reshard_after_forward="true"),
    "the model's code stays as it is",
)
HYBRID_SHARDING = TrainingOption(
    "hybrid sharding: FSDP within each node",
    _build_fsdp_settings(sharding_factor="node"),
    "only gradients cross the network between nodes",
)
COMPRESSED_DDP = TrainingOption(
    "DDP with gradients compressed to bf16",
    {"strategy": "ddp", "strategy.communication_hook": "bf16"},
    "half the bytes; gradients are rounded",
)
TENSOR_PARALLEL = TrainingOption(
    "tensor parallelism within the node",
    {"strategy": "tensor_parallel", "strategy.degree": NODE_GPUS_PLACEHOLDER},
    "every layer is cut, so the largest may be larger than a GPU; needs fast links and changes to the model",
)
PIPELINE = TrainingOption(
    "pipeline parallelism",
    {
        "strategy": "pipeline",
        "strategy.stages": GPUS_PLACEHOLDER,
        "strategy.micro_batches": GPU_MICRO_BATCHES_PLACEHOLDER,
    },
    "sends activations only; idle at the start and end of a step; a layer must fit on one GPU",
)
PIPELINE_OF_NODES = TrainingOption(
    "pipeline parallelism, a stage per node",
    {
        "strategy": "pipeline",
        "strategy.stages": NODES_PLACEHOLDER,
        "strategy.micro_batches": NODE_MICRO_BATCHES_PLACEHOLDER,
    },
    "sends activations only between nodes; idle at the start and end of a step",
)
OFFLOAD_FSDP = TrainingOption(
    "ZeRO-3 (FSDP) with parameters and optimizer on the CPU",
    _build_fsdp_settings(sharding_factor="full", cpu_offload="true"),
    "as fast as the link to the CPU and its optimizer step allow",
)
OFFLOAD_DEEPSPEED = TrainingOption(
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
LORA = TrainingOption(
    "LoRA", {"finetune": "lora"}, "for fine-tuning only: trains small adapters, the model's weights stay frozen"
)
QLORA = TrainingOption("QLoRA", {"finetune": "qlora", "finetune.bits": "4"}, "as LoRA, with frozen weights of 4 bits")
