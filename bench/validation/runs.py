"""Published rows as runs that can be predicted: the configuration each comes to, and what had to be assumed.

Every assumption is written down here, and `EXCLUSION_REASONS` says of every other source why it cannot be used.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from bench.config.compose import compose_config
from bench.config.grid import parse_grids
from bench.config.run_config import RunConfig, build_run_config
from bench.records.published import GB, PUBLISHED_CSV, PublishedLine, read_published_lines

SPEED, ALLOCATED, ACTIVE, RESERVED = "TFLOPS", "allocated", "active", "reserved"
TOKENS = "tokens/s"
"""What is compared: TFLOPS per GPU counting recomputation, tokens per second and GPU, or peaks of memory in GB (10^9
bytes)."""

TUNED_GPU_COUNTS = (8, 128)
"""GPU counts whose rows constants were chosen on; all others were left out of that."""

MPT_SHAPES = {
    "125m": (768, 12, 12),
    "350m": (1024, 24, 16),
    "760m": (1536, 24, 12),
    "1b": (2048, 24, 16),
    "3b": (2560, 32, 20),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 48, 56),
    "70b": (8192, 80, 64),
}
"""Width, layers and heads. With 50,368 tokens, learned positions and biases these have exactly the parameters that the
table prints."""


def _read_sweep_settings(sweep: str) -> dict[str, str]:
    """What all runs of a file under ``conf/sweep`` have in common, without how they are timed."""
    (grid,) = parse_grids(sweep, compose_config({"sweep": sweep})["sweep"])
    return {key: value for key, value in grid.fixed.items() if not key.startswith("measurement.")}


PAPER_SWEEPS = {"minGPT-175B": "gpt_175b_scale", "T5-11B": "t5_11b_scale"}
"""The sweeps of the paper's large runs (section 5.4): their files state what the paper says, and what it leaves open.
minGPT drops out one element of ten (its default), T5 is taken without dropout, as no formula for its TFLOPS is given
that could tell."""

PAPER_OVERRIDES = {
    model: {"hardware": "a100_80gb", "gpus_per_node": "8", **_read_sweep_settings(sweep)}
    for model, sweep in PAPER_SWEEPS.items()
}

FSDP_PAPER_OVERRIDES = {
    key: value
    for key, value in PAPER_OVERRIDES["T5-11B"].items()
    if PAPER_OVERRIDES["minGPT-175B"].get(key) == value and key != "precision.mixing"
}
"""What its GPT and its T5 have in common; FSDP1 casts parameters unless asked otherwise, and DDP cannot."""

LLM_FOUNDRY_OVERRIDES = {
    "model": "mpt_7b",
    "precision": "bf16",
    "strategy": "fsdp1",
    "strategy.backward_prefetch": "post",
    "gpus_per_node": "8",
    "optimizer.implementation": "for_loop",
}
"""Composer's defaults: BACKWARD_POST, the rate limiter on, gradients reduced after every micro-batch (its
`ddp_sync_context` does nothing for FSDP). ``mixed_precision: DEFAULT`` reduces in fp32, PURE in bf16; both keep
parameters and optimizer state in fp32 (composer/trainer/mosaic_fsdp_utils.py, get_mixed_precision)."""

LLM_FOUNDRY_HARDWARE_OVERRIDES = {
    "a100": {
        "hardware.speeds.links.node_gb_s": "200",
        "hardware.speeds.attention.forward": "0.60",
        "hardware.speeds.attention.backward": "0.45",
        "hardware.speeds.attention.half_width": "64",
    },
    "h100": {
        "hardware.speeds.attention.forward": "0.50",
        "hardware.speeds.attention.backward": "0.35",
        "hardware.speeds.attention.half_width": "128",
    },
}
"""Its A100 clusters have 1600 Gb/s between nodes. Its attention is FlashAttention of 2022, in Triton: 25 to 40 % of the
peak on A100 (arXiv:2307.08691), at head dimension 128 two thirds of the asymptotic shares here; on H100 fitted."""

LLM_FOUNDRY_2024_GPU_COUNTS = (128, 256, 512)
"""H100 counts of llm-foundry's sweep of 2024, which asks for forward prefetch and BACKWARD_PRE
(https://github.com/mosaicml/llm-foundry/blob/4a6d4e6b4033fc052115fa2b3331e3e1de99f7b6/scripts/train/benchmarking/sweep.py)."""

EXCLUSION_REASONS = {
    "fsdp_paper Figure 6(a), 611M and 2.28B": "GPU count, batch, sequence length and precision are not stated",
    "fsdp_paper Figure 6(b), prefetch on": "the same runs as Figure 7(b), batch 1",
    "fsdp_paper Figure 7(b), batch 2 at 128 GPUs": "the allocator retries: degraded, shown, not counted",
    "fsdp_paper Figure 6(c)": "sequence length, precision and checkpointing are not stated; only its shape is compared",
    "fsdp_paper Figures 7(a), 8(a)": "no dimension of the model (DHEN) is stated: shown, not counted",
    "fsdp_paper Figure 8(c)": "memory unexplained by the paper's own numbers: shown, not counted",
    "llm_foundry, amp_fp8": "layers of TransformerEngine; the suite's FP8 is torchao's",
    "megatron_sc21, ZeRO-3": (
        "another implementation (DeepSpeed of 2021): shown, not counted. Its step takes as long on 1536 GPUs as on "
        "768, so the network decides; all adapters of a node would be 4 times faster, one adapter agrees (above)"
    ),
    "megatron_sc21, PTD; megatron_*; nanotron_best_configs; llama3_paper; opt_paper": (
        "tensor and pipeline parallelism at once, which the suite does not do, or batches that are not stated; degrees "
        "of tensor parallelism alone are compared (above)"
    ),
    "bigscience_zero1": (
        "tensor and pipeline parallelism; ZeRO-1 against ZeRO-0 is compared for the part of one GPU (above). Optimizer "
        "state and communication explain neither 12 % of the time nor 35 GB of 1.9 billion parameters"
    ),
    "pytorch_blog_fsdp_intro, GPT-175B": (
        "a batch of 20 per GPU, as it is read, does not fit; speed alone is compared (above)"
    ),
    "pytorch_blog_fsdp_intro, GPT-1T; medium_fsdp_1t_aws": (
        "activations offloaded as well, which the suite does not do, and batches or networks that are not stated"
    ),
    "pytorch_blog_fsdp_aws_t5": "multipliers, and models or batches that are not stated",
    "pytorch_blog_ibm_t5": "scaling efficiency relative to a run that is not stated",
    "pytorch_blog_float8_fsdp2": "batches and checkpointing were tuned, and are not stated",
    "torchtitan_asynctp_2025, but for Llama 3 70B in bf16": (
        "tensor parallelism that overlaps with its communication, or FP8 in divided layers, which the suite does not "
        "do; of Llama 3 8B 8 GPUs share 12 sequences, no whole number for each"
    ),
    "torchtitan_405b_2024": "8 GPUs share 2 sequences, no whole number for each",
    "torchtitan_h200_2025": "compiled with FP8 of torchao, which is not needed for this page; the length is not stated",
    "ultrascale_dp_scaling": "the model is not stated",
    "zero_paper": (
        "Table 1, section 7 and the theoretical sizes of Table 2 are arithmetic; all other rows divide layers as well, "
        "but for those that are compared (above): what fits, and ZeRO-2's speed at 13B"
    ),
    "ddp_paper, torchtitan_fsdp_doc": "claims without a configuration",
}
"""Which rows are not compared, and why."""


@dataclass(frozen=True)
class PublishedCase:
    """One published number and the run that should come to it."""

    source: str
    figure_or_table: str
    """Figure or table."""
    label: str
    settings: tuple[tuple[str, str], ...]
    """Overrides, as on the command line."""
    quantity: str
    published_value: float
    is_tuned: bool
    """Whether constants were chosen with it in sight."""
    is_counted: bool = True
    """Whether it enters the means; else it is shown."""
    uncertainty: float = 0.0
    extra_bytes: float = 0.0
    """Memory that those who measured held all the time, and this suite does not."""

    @property
    def config(self) -> RunConfig:
        return build_published_config(self.settings)


def build_published_config(settings: tuple[tuple[str, str], ...]) -> RunConfig:
    """The run that overrides come to."""
    return build_run_config(compose_config({"mode": "predict", **dict(settings)}))


def load_cases(path: str | Path = PUBLISHED_CSV) -> list[PublishedCase]:
    """Every usable number, in the order of the file."""
    parsed_cases = [_parse_case(row) for row in read_published_lines(path)]
    return [case for case in parsed_cases if case is not None]


def load_published_rows(source: str, metric: str, figure_or_table: str = "") -> list[PublishedLine]:
    """What a source says, in one of its figures or tables, or in all of them."""
    return [
        row
        for row in read_published_lines(PUBLISHED_CSV)
        if (row["source_key"], row["metric"]) == (source, metric) and row["figure_or_table"].startswith(figure_or_table)
    ]


def _parse_case(row: PublishedLine) -> PublishedCase | None:
    parse_row = {
        "fsdp_paper": _parse_fsdp_paper,
        "llm_foundry": _parse_llm_foundry,
        "megatron_sc21": _parse_megatron_zero_3,
    }.get(row["source_key"])
    return parse_row(row) if parse_row else None


def _parse_fsdp_paper(row: PublishedLine) -> PublishedCase | None:
    figure = row["figure_or_table"]
    if figure not in ("Figure 6(a)", "Figure 6(b)", "Figure 7(b)", "Figure 7(c)", "Figure 8(b)", "Figure 8(c)"):
        return None
    if row["model"] not in PAPER_OVERRIDES or (figure == "Figure 6(b)" and "prefetch on" in row["sharding"]):
        return None
    quantities = {
        "tflops_per_gpu": SPEED,
        "peak_memory_allocated": ALLOCATED,
        "peak_memory_active": ACTIVE,
        "peak_memory_reserved": RESERVED,
    }
    is_gpt = "GPT" in row["model"]
    settings = {
        **PAPER_OVERRIDES[row["model"]],
        # Of Figure 6(a) neither is stated: 64 GPUs and batch 8 are where Figure 7(c) has the same number.
        "gpus": row["gpu_count"] or "64",
        "batch_size_per_gpu": row["batch_size_per_gpu"] or ("1" if is_gpt else "8"),
    }
    if "prefetch off" in row["sharding"]:
        settings["strategy.backward_prefetch"] = "none"
    if "hybrid" in row["sharding"]:
        settings["strategy.sharding_factor"] = "node"
    is_allocator_cliff = figure == "Figure 7(b)" and settings["gpus"] == "128" and settings["batch_size_per_gpu"] == "2"
    is_counted = figure != "Figure 8(c)" and not is_allocator_cliff
    return _build_case(row, settings, quantities[row["metric"]], float(row["value"]), is_counted=is_counted)


def _parse_llm_foundry(row: PublishedLine) -> PublishedCase | None:
    if row["metric"] != "tokens_per_second_per_gpu" or row["precision"] == "amp_fp8":
        return None
    width, layers, heads = MPT_SHAPES[row["model"].removeprefix("MPT-")]
    accumulation = re.search(r"grad accum (\d+)", row["note"])
    assert accumulation is not None
    settings = {
        **LLM_FOUNDRY_OVERRIDES,
        "model.hidden_size": str(width),
        "model.num_layers": str(layers),
        "model.num_heads": str(heads),
        "model.block_size": row["sequence_length"],
        "hardware": row["gpu"],
        "gpus": row["gpu_count"],
        "batch_size_per_gpu": row["batch_size_per_gpu"],
        "sequence_length": row["sequence_length"],
        "activation_checkpointing": {"full": "full", "no": "none"}[row["activation_checkpointing"]],
        "gradient_accumulation": accumulation[1],
        "gradient_accumulation_sync": "true",
    }
    if "mp_mode PURE" in row["note"]:
        settings["precision.reduce"] = "bf16"
    if row["sharding"] == "shard_grad_op":
        settings["strategy.reshard_after_forward"] = "false"
    settings |= LLM_FOUNDRY_HARDWARE_OVERRIDES[row["gpu"].partition("_")[0]]
    if row["gpu"].startswith("h100") and int(row["gpu_count"]) in LLM_FOUNDRY_2024_GPU_COUNTS:
        settings |= {"strategy.backward_prefetch": "pre", "strategy.forward_prefetch": "true"}
    return _build_case(row, settings, SPEED, float(row["value"]))


def _parse_megatron_zero_3(row: PublishedLine) -> PublishedCase | None:
    if "ZeRO-3" not in row["sharding"]:
        return None
    model_shapes = {"GPT-174.6B": ("12288", "96", "96"), "GPT-529.6B": ("20480", "105", "128")}
    width, layers, heads = model_shapes[row["model"]]
    settings = {
        "model": "gpt_175b",
        "model.vocabulary_size": "51200",
        "model.attention": "eager",
        "model.hidden_size": width,
        "model.num_layers": layers,
        "model.num_heads": heads,
        "hardware": "a100_80gb",
        "hardware.speeds.links.node_gb_s": "200",
        "precision": "fp16",
        "precision.reduce": "fp16",
        "strategy": "fsdp1",
        "gpus": row["gpu_count"],
        "gpus_per_node": "8",
        "batch_size_per_gpu": row["batch_size_per_gpu"],
        "sequence_length": "2048",
        "activation_checkpointing": "full",
    }
    return _build_case(row, settings, SPEED, float(row["value"]), is_counted=False)


def _build_case(
    row: PublishedLine, settings: dict[str, str], quantity: str, value: float, *, is_counted: bool = True
) -> PublishedCase:
    ordered_settings = tuple(settings.items())
    if row["metric"] == "tokens_per_second_per_gpu":
        value = _convert_tokens_to_tflops(build_published_config(ordered_settings), value)
    is_fsdp_paper = row["source_key"] == "fsdp_paper"
    label_parts = [row["model"], f"{settings['gpus']} GPUs", f"batch {settings['batch_size_per_gpu']}"]
    label_parts += [f"length {row['sequence_length']}"] if len(row["sequence_length"]) > 4 else []
    label_parts += [part for part in ("hybrid", "prefetch off") if part in row["sharding"]]
    return PublishedCase(
        source=row["source_key"],
        figure_or_table=row["figure_or_table"].split(" with ")[0],
        label=", ".join(label_parts),
        settings=ordered_settings,
        quantity=quantity,
        published_value=value,
        is_tuned=quantity == SPEED and is_counted and int(settings["gpus"]) in TUNED_GPU_COUNTS,
        is_counted=is_counted,
        uncertainty=float(row["uncertainty"] or 0.0),
        extra_bytes=compute_mask_bytes(build_published_config(ordered_settings))
        if is_fsdp_paper and quantity != SPEED
        else 0.0,
    )


def _convert_tokens_to_tflops(config: RunConfig, tokens_per_second: float) -> float:
    """TFLOPS per GPU counting recomputation, of a rate at which tokens were trained on.

    Since PyTorch 2.1 checkpointing stops short of computing a block's last product again, as the suite's count of
    FLOPs says; before, a whole forward pass was computed again. The sweep of 2024 is taken to be of the first kind, all
    earlier rows of the second. (Predictions stop short, and count so: rates of FLOPs can be compared.)
    """
    flop_count = config.model.count_flops_per_sequence(config.sequence_length)
    flops = flop_count.compute_hardware_flops(config.activation_checkpointing)
    is_2024_sweep = config.hardware.name.startswith("h100") and config.gpus in LLM_FOUNDRY_2024_GPU_COUNTS
    if config.activation_checkpointing == "full" and not is_2024_sweep:
        flops = flop_count.model_flops * 4 // 3
    return flops * tokens_per_second / config.model.count_tokens_per_sequence(config.sequence_length) / 1e12


def compute_mask_bytes(config: RunConfig) -> float:
    """Bytes of the causal masks in fp32 that minGPT keeps, one in every block, and the suite's model does not."""
    return 4 * getattr(config.model, "num_layers", 0) * config.sequence_length**2


def convert_to_gigabytes(size_bytes: float) -> float:
    """Bytes as the paper's memory axes count them."""
    return size_bytes / GB


# --- Constants chosen without one of the sources, to see what they are worth on it.


def _build_overrides(matmul_efficiency: float, memory_efficiency: float, node_efficiency: float) -> dict[str, str]:
    """Overrides of the constants that were fitted."""
    return {
        "hardware.speeds.matmul.efficiency.bf16": f"{matmul_efficiency}",
        "hardware.speeds.memory_efficiency": f"{memory_efficiency}",
        "hardware.speeds.links.node_efficiency": f"{node_efficiency}",
    }


_TUNED_ON_FSDP_PAPER = _build_overrides(matmul_efficiency=0.79, memory_efficiency=0.9, node_efficiency=0.75)
_TUNED_ON_LLM_FOUNDRY = _build_overrides(matmul_efficiency=0.72, memory_efficiency=0.9, node_efficiency=0.9)

OVERRIDES_WITHOUT_SOURCE: dict[str, dict[str, dict[str, str]]] = {
    "llm_foundry": {
        "a100_40gb": _TUNED_ON_FSDP_PAPER,
        "a100_80gb": _TUNED_ON_FSDP_PAPER,
        "h100_80gb": _TUNED_ON_FSDP_PAPER,
    },
    "fsdp_paper": {"a100_80gb": _TUNED_ON_LLM_FOUNDRY},
}
"""By source left out, then by hardware: overrides."""
