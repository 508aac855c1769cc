"""Published rows of models of the Llama family as runs that can be predicted, and what had to be assumed.

No constant was chosen with these rows in sight; what was, is said in `ASSUMPTIONS`.
"""

from __future__ import annotations

import dataclasses
import re

from bench.records.published import GB, PUBLISHED_CSV, PublishedLine, read_published_lines
from bench.validation.runs import ALLOCATED, TOKENS, PublishedCase

LLAMA_CSV = PUBLISHED_CSV.with_name("llama.csv")

MISTRAL_OVERRIDES = {
    "model": "mistral_7b",
    "hardware": "a100_80gb",
    "activation_checkpointing": "full",
    "optimizer.implementation": "foreach",
}

OPTIMIZER_BOUND_BYTES_PER_PARAMETER = 10.01
"""Bytes per parameter and rank, with what a rank has in bf16, up to which a published peak is that of the optimizer's
step: parameters, gradients, two moments and a temporary as large, 2 bytes each."""

INTERNLM_OVERRIDES = {
    "model": "llama2_7b",
    "model.vocabulary_size": "103168",
    "hardware": "a100_80gb",
    "hardware.speeds.links.node_gb_s": "50",
    "gpus_per_node": "8",
}

INTERNLM_STRATEGIES = {
    "as torch's ZeRO-1, all in bf16": {"strategy": "zero1", "precision": "bf16_pure"},
    "as DeepSpeed's stage 1, fp32 copies": {"strategy": "deepspeed", "strategy.stage": "1", "precision": "bf16"},
}
"""InternEvo is neither; each row is predicted as both, and none is chosen by how near it comes."""

TORCHTITAN_OVERRIDES = {
    "model": "llama3_70b",
    "strategy": "tensor_parallel",
    "strategy.degree": "8",
    "precision": "bf16",
    "hardware": "h100_80gb",
    "hardware.speeds.attention.kernel": "flash2",
    "gpus_per_node": "8",
    "sequence_length": "8192",
    "activation_checkpointing": "full",
}

ASSUMPTIONS = {
    "fms_acceleration_refs (Mistral 7B, Hugging Face's Trainer)": (
        "AdamW as a list of tensors (`foreach`), torch's default there; FSDP1 with BACKWARD_PRE, as the rows say. "
        "`mixed`: on one GPU weights in bf16, with FSDP in fp32, since the rows have 43.5 GB and, on two GPUs, 58.0 GB "
        "allocated after loading. Counted are rows whose published peak is what the optimizer's step takes (10 bytes a "
        "parameter in bf16, 20 in fp32): two amounts, 36.2 and 72.4 GB, so they say nothing about activations. The "
        "others peak in the loss and were run with kernels that compute it otherwise; they are shown, not counted"
    ),
    "internevo_perf (InternLM 7B, ZeRO-1 over all ranks)": (
        "the shape of Llama 2 7B with 103,168 tokens, without the biases of its attention; 4 x 100 Gb/s between nodes: "
        "50 GB/s. InternEvo is an implementation of its own. Each row is predicted as torch's ZeRO-1 and as "
        "DeepSpeed's stage 1; both were tried with the rows in sight, so that the former is nearer is no evidence "
        "that it is right"
    ),
    "torchtitan_asynctp_2025 (Llama 3 70B, bf16, TP 8 x FSDP 32)": (
        "8,192 tokens per sequence; the batch of 16 is that of the 8 ranks that share sequences; not compiled, and "
        "an H100 of 80 GB, where theirs were compiled and had 96 GB of slower memory and 500 W"
    ),
}
"""By source: what its rows leave open, or what the suite does otherwise."""

EXCLUSION_REASONS = {
    "fms_acceleration_refs, LoRA": (
        "the rank of the adapters is not stated; with 16 (read in another version "
        "of the source), the two rows of one GPU without other kernels (34 and 36) were predicted 0.75 and 0.86 % too "
        "low, those of two GPUs with FSDP1 (35 and 37) 8.9 and 10.1 % too low, for a reason that was not found"
    ),
    "fms_acceleration_refs, GPTQ and bitsandbytes": "4-bit weights of other libraries, or bitsandbytes is needed",
    "fms_acceleration_refs, Santacoder": (
        "a miss: the four full fine-tuning rows without other kernels (2 to 5) were predicted 18 to 31 % too high. "
        "Probably the loss: their transformers computes it without casting GPTBigCode's logits to fp32, so in bf16"
    ),
    "fms_acceleration_refs, Granite": (
        "the peak of the device alone, not of the allocator, of sentences whose lengths vary (194 to 279 tokens on "
        "average)"
    ),
    "internevo_perf, optimizer state over one node of several": "the suite's ZeRO-1 divides it among all ranks",
    "internevo_perf, FSDP's memory on 3 to 16 GPUs": "the sequence length is not stated",
    "qwen_readme_profile, ms_swift_benchmark": (
        "memory is summed over GPUs, or sentences are of other lengths than the limit that is stated"
    ),
}
"""Which rows of these models are not compared, and why."""


def load_llama_cases() -> list[PublishedCase]:
    """Every usable number, in the order of the files, once for each way it is predicted."""
    parsers = {
        "fms_acceleration_refs": _parse_mistral,
        "internevo_perf": _parse_internlm,
        "torchtitan_asynctp_2025": _parse_torchtitan,
    }
    lines = [*read_published_lines(LLAMA_CSV), *read_published_lines(PUBLISHED_CSV)]
    return [case for line in lines if line["source_key"] in parsers for case in parsers[line["source_key"]](line)]


def _parse_mistral(line: PublishedLine) -> list[PublishedCase]:
    gpus = int(line["gpu_count"])
    if line["metric"] != "peak_memory_allocated" or "lora" in line["strategy"]:
        return []
    settings = {
        **MISTRAL_OVERRIDES,
        "strategy": "fsdp1" if gpus > 1 else "single",
        "precision": "bf16" if "mixed" in line["precision"] and gpus > 1 else "bf16_pure",
        "gpus": line["gpu_count"],
        "batch_size_per_gpu": line["batch_size_per_gpu"],
        "sequence_length": line["sequence_length"],
    }
    kernels = re.match(r"framework_config (\S+?);", line["note"])
    file = line["source_url"].rpartition("/")[2]
    label = f"Mistral 7B, {line['precision']}, kernels: {kernels[1] if kernels else 'none'}"
    where = f"{file} {line['figure_or_table']}"
    case = _build_case(line, where, label, settings, ALLOCATED, float(line["value"]) / GB)
    return [dataclasses.replace(case, is_counted=_is_bound_by_optimizer(case))]


def _is_bound_by_optimizer(case: PublishedCase) -> bool:
    """Whether a published peak is that of the optimizer's step, which kernels for activations do not change."""
    config = case.config
    itemsize = config.precision.parameter_dtype.itemsize / 2
    rank_parameters = config.model.num_parameters / config.strategy.resolved_sharding_factor
    return case.published_value * GB <= OPTIMIZER_BOUND_BYTES_PER_PARAMETER * itemsize * rank_parameters


def _parse_internlm(line: PublishedLine) -> list[PublishedCase]:
    if "all DP ranks" not in line["sharding"] and line["gpu_count"] != "8":  # the eight ranks of one node are all
        return []
    accumulation = re.match(r"micro_num (\d+)", line["note"])
    assert accumulation is not None
    settings = {
        **INTERNLM_OVERRIDES,
        "gpus": line["gpu_count"],
        "batch_size_per_gpu": line["batch_size_per_gpu"],
        "gradient_accumulation": accumulation[1],
        "sequence_length": line["sequence_length"],
        "activation_checkpointing": {"full": "full", "no": "none"}[line["activation_checkpointing"]],
    }
    return [
        _build_case(
            line, line["figure_or_table"], f"InternLM 7B {name}", {**settings, **strategy}, TOKENS, float(line["value"])
        )
        for name, strategy in INTERNLM_STRATEGIES.items()
    ]


def _parse_torchtitan(line: PublishedLine) -> list[PublishedCase]:
    if (line["model"], line["precision"]) != ("Llama-3-70B", "bf16") or "vanilla" not in line["sharding"]:
        return []
    batch_size = int(line["batch_size_per_gpu"]) // int(TORCHTITAN_OVERRIDES["strategy.degree"])
    settings = {**TORCHTITAN_OVERRIDES, "gpus": line["gpu_count"], "batch_size_per_gpu": str(batch_size)}
    return [_build_case(line, line["figure_or_table"], "Llama 3 70B", settings, TOKENS, float(line["value"]))]


def _build_case(
    line: PublishedLine, where: str, name: str, settings: dict[str, str], quantity: str, value: float
) -> PublishedCase:
    gpus = "1 GPU" if settings["gpus"] == "1" else f"{settings['gpus']} GPUs"
    label = f"{name}, {gpus}, batch {settings['batch_size_per_gpu']}"
    return PublishedCase(line["source_key"], where, label, tuple(settings.items()), quantity, value, is_tuned=False)
