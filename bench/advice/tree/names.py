"""The names that readers of course notes meet, each in a line: what it is called here, and when to take it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainingTerm:
    """One name of the field."""

    name: str
    typed_settings: tuple[str, ...]
    """What is typed for it here: alternatives, each one or more settings. Empty where the suite does not offer it."""
    when_to_use: str
    """When to take it."""
    missing_reason: str = ""
    """Why it is not offered."""

    @property
    def settings_text(self) -> str:
        """What is typed."""
        return ", or ".join(self.typed_settings)


TRAINING_TERMS = (
    TrainingTerm("one GPU", ("strategy=single",), "the model fits, and one is fast enough"),
    TrainingTerm(
        "DataParallel",
        ("strategy=data_parallel",),
        "never for speed: one process feeds all GPUs, and the first holds more than the others",
    ),
    TrainingTerm("DDP", ("strategy=ddp",), "a whole copy fits on each GPU"),
    TrainingTerm("ZeRO-1", ("strategy=zero1",), "a copy fits once its optimizer state is divided"),
    TrainingTerm(
        "ZeRO-2, sharded DDP, SHARD_GRAD_OP",
        ("strategy=zero2", "strategy=zero2_fsdp1"),
        "gradients are to be divided too, and whole parameters fit",
    ),
    TrainingTerm(
        "ZeRO-3, FSDP FULL_SHARD", ("strategy=fsdp", "strategy=fsdp1"), "a copy does not fit, the largest layer does"
    ),
    TrainingTerm(
        "hybrid sharding", ("strategy=fsdp strategy.sharding_factor=node",), "a copy fits on the GPUs of a node"
    ),
    TrainingTerm(
        "DeepSpeed ZeRO 0 to 3", ("strategy=deepspeed strategy.stage=N",), "DeepSpeed's own library is wanted"
    ),
    TrainingTerm(
        "CPU offload",
        ("strategy=fsdp strategy.cpu_offload=true", "strategy=deepspeed strategy.offload_optimizer=cpu"),
        "the GPUs together are too small, and time matters less",
    ),
    TrainingTerm("Accelerate, Trainer", ("strategy=accelerate",), "its loop is used: shows what the framework costs"),
    TrainingTerm("Lightning", ("strategy=lightning",), "its loop is used: shows what the framework costs"),
    TrainingTerm(
        "tensor parallelism", ("strategy=tensor_parallel",), "the largest layer does not fit; fast links in the node"
    ),
    TrainingTerm(
        "pipeline parallelism", ("strategy=pipeline",), "a copy does not fit, links are slow, every layer fits"
    ),
    TrainingTerm(
        "naive (vertical) model parallelism", ("strategy=naive_pipeline",), "to see idle GPUs; a pipeline is faster"
    ),
    TrainingTerm("LoRA, QLoRA", ("finetune=lora", "finetune=qlora"), "fine-tuning in a fraction of the memory"),
    TrainingTerm("FP16, BF16, FP8", ("precision=fp16", "precision=bf16", "precision=fp8"), "BF16 where the GPU has it"),
    TrainingTerm(
        "INT8 training",
        (),
        "FP8 is the 8-bit format for training; INT8 is for frozen weights (finetune=qlora finetune.bits=8)",
        "not offered: 256 evenly spaced values do not span the range of gradients, and FP8 is as fast where both exist",
    ),
    TrainingTerm(
        "SyncBatchNorm",
        (),
        "batch normalisation (vision models) with few samples per rank: takes statistics over all ranks",
        "does not matter here: T5 and GPT normalise every token by itself, so ranks share no statistics",
    ),
    TrainingTerm(
        "activation checkpointing", ("activation_checkpointing=full",), "activations do not fit; a third more FLOPs"
    ),
    TrainingTerm("gradient accumulation", ("gradient_accumulation=N",), "a larger batch than fits, or fewer exchanges"),
    TrainingTerm(
        "gradient compression", ("strategy=ddp strategy.communication_hook=bf16",), "DDP waits for the network"
    ),
)
