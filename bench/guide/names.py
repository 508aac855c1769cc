"""The names that readers of course notes meet, each in a line: what it is called here, and when to take it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Name:
    """One name of the field."""

    name: str
    here: str
    """What is typed here, or why there is none."""
    when: str


NAMES = (
    Name("DataParallel", "strategy=data_parallel", "never for speed: one process feeds all GPUs, the first holds more"),
    Name("DDP", "strategy=ddp", "a whole copy fits on each GPU"),
    Name("ZeRO-1", "strategy=zero1", "a copy fits once its optimizer state is divided"),
    Name("ZeRO-2, sharded DDP, SHARD_GRAD_OP", "strategy=zero2", "gradients are to be divided too"),
    Name("ZeRO-3, FSDP FULL_SHARD", "strategy=fsdp", "a copy does not fit, the largest layer does"),
    Name("hybrid sharding", "strategy=fsdp strategy.sharding_factor=node", "the network between nodes is slow"),
    Name("DeepSpeed ZeRO 0 to 3", "strategy=deepspeed strategy.stage=N", "DeepSpeed's own implementation is wanted"),
    Name(
        "CPU offload",
        "strategy=fsdp strategy.cpu_offload=true; strategy=deepspeed strategy.offload_optimizer=cpu",
        "the GPUs together are too small, and time matters less",
    ),
    Name("Accelerate, Trainer", "strategy=accelerate", "to see what the framework costs"),
    Name("Lightning", "strategy=lightning", "to see what the framework costs"),
    Name("tensor parallelism", "strategy=tensor_parallel", "the largest layer does not fit; fast links within a node"),
    Name("pipeline parallelism", "strategy=pipeline", "slow links, and layers that fit"),
    Name("naive (vertical) model parallelism", "strategy=naive_pipeline", "to see idle GPUs; a pipeline is faster"),
    Name("LoRA, QLoRA", "finetune=lora, finetune=qlora", "fine-tuning in a fraction of the memory"),
    Name(
        "SyncBatchNorm",
        "not here: T5 and GPT normalise each token by itself, so ranks have no statistics to share",
        "batch normalisation (vision) with few samples per rank: makes its statistics those of all ranks",
    ),
    Name("fp16, bf16, fp8", "precision=fp16, bf16, fp8", "bf16 where the GPU has it; fp16 needs loss scaling"),
    Name(
        "INT8 training",
        "not here: 8-bit integers hold too few steps for gradients; INT8 is for inference and frozen weights",
        "frozen weights of 8 bits beside adapters: LoRA",
    ),
    Name("activation checkpointing", "activation_checkpointing=full", "activations do not fit; a third more FLOPs"),
    Name("gradient accumulation", "gradient_accumulation=N", "a larger batch than fits, or fewer exchanges"),
    Name("gradient compression", "strategy=ddp strategy.communication_hook=bf16", "DDP waits for the network"),
)
