"""Published rows as runs that can be predicted: the configuration each comes to, and what had to be assumed.

Every assumption is written down here, and `LEFT_OUT` says of every other source why it cannot be used.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.config import RunConfig, run_config
from bench.planning.compose import composed
from bench.records.published import GB, PUBLISHED

Line = Mapping[str, str]

SPEED, ALLOCATED, ACTIVE, RESERVED = "TFLOPS", "allocated", "active", "reserved"
"""What is compared: TFLOPS per GPU counting recomputation, or peaks of memory in GB (10^9 bytes)."""

TUNED_AT = (8, 128)
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

FSDP_PAPER = {
    "hardware": "a100_80gb",
    "precision": "bf16",
    "precision.reduce": "bf16",
    "strategy": "fsdp1",
    "gpus_per_node": "8",
    "optimizer.implementation": "foreach",
    "optimizer.keep_gradients": "true",
    "activation_checkpointing": "full",
    "model.attention": "eager",
}
"""The paper's large runs (section 5.4), and what it leaves open: gradients reduced in the format of the parameters, as
`MixedPrecision(param_dtype=bfloat16)` does; Adam's default implementation; gradients that `zero_grad` kept and filled
with zeros, as before PyTorch 2.0; attention that materialises its scores, as minGPT and the T5 of transformers did."""

PAPER_MODELS = {
    "minGPT-175B": {"model": "gpt_175b", "model.family": "mingpt", "model.activation": "gelu", "model.dropout": "0.1"},
    "T5-11B": {"model": "t5_11b"},
}
"""minGPT drops out one element of ten (its default), T5 is taken without dropout, as no formula for its TFLOPS is given
that could tell."""

LLM_FOUNDRY = {
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

LLM_FOUNDRY_HARDWARE = {
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

SWEPT_GPUS = (128, 256, 512)
"""H100 counts of llm-foundry's sweep of 2024, which asks for forward prefetch and BACKWARD_PRE
(https://github.com/mosaicml/llm-foundry/blob/4a6d4e6b4033fc052115fa2b3331e3e1de99f7b6/scripts/train/benchmarking/sweep.py)."""

LEFT_OUT = {
    "fsdp_paper Figure 6(a), 611M and 2.28B": "GPU count, batch, sequence length and precision are not stated",
    "fsdp_paper Figure 6(b), prefetch on": "the same runs as Figure 7(b), batch 1",
    "fsdp_paper Figure 7(b), batch 2 at 128 GPUs": "the allocator retries: degraded, shown, not counted",
    "fsdp_paper Figure 6(c)": "sequence length, precision and checkpointing are not stated; only its shape is compared",
    "fsdp_paper Figures 7(a), 8(a)": "a recommendation model (DHEN), which the suite does not have",
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
    "pytorch_blog_float8_fsdp2, torchtitan_asynctp_2025, torchtitan_405b_2024, torchtitan_h200_2025": (
        "models of the Llama 3 family, which the suite does not have; the first also with batches that were tuned and "
        "are not stated"
    ),
    "ultrascale_dp_scaling": "the model is not stated",
    "zero_paper": (
        "Table 1, section 7 and the theoretical sizes of Table 2 are arithmetic; all other rows divide layers as well, "
        "but for those that are compared (above): what fits, and ZeRO-2's speed at 13B"
    ),
    "ddp_paper, torchtitan_fsdp_doc": "claims without a configuration",
}
"""Which rows are not compared, and why."""


@dataclass(frozen=True)
class Case:
    """One published number and the run that should come to it."""

    source: str
    where: str
    """Figure or table."""
    label: str
    settings: tuple[tuple[str, str], ...]
    """Overrides, as on the command line."""
    quantity: str
    published: float
    tuned: bool
    """Whether constants were chosen with it in sight."""
    counted: bool = True
    """Whether it enters the means; else it is shown."""
    uncertainty: float = 0.0
    held_bytes: float = 0.0
    """Memory that those who measured held all the time, and this suite does not."""

    @property
    def config(self) -> RunConfig:
        """The run."""
        return configured(self.settings)


def configured(settings: tuple[tuple[str, str], ...]) -> RunConfig:
    """The run that overrides come to."""
    return run_config(composed({"mode": "predict", **dict(settings)}))


def cases(path: str | Path = PUBLISHED) -> list[Case]:
    """Every usable number, in the order of the file."""
    found = [_case(line) for line in _read(path)]
    return [case for case in found if case is not None]


def lines(source: str, metric: str, where: str = "") -> list[Line]:
    """What a source says, in one of its figures or tables, or in all of them."""
    return [
        line
        for line in _read(PUBLISHED)
        if (line["source_key"], line["metric"]) == (source, metric) and line["figure_or_table"].startswith(where)
    ]


def _read(path: str | Path) -> list[Line]:
    with Path(path).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _case(line: Line) -> Case | None:
    reader = {"fsdp_paper": _fsdp_paper, "llm_foundry": _llm_foundry, "megatron_sc21": _zero_3}.get(line["source_key"])
    return reader(line) if reader else None


def _fsdp_paper(line: Line) -> Case | None:
    figure = line["figure_or_table"]
    if figure not in ("Figure 6(a)", "Figure 6(b)", "Figure 7(b)", "Figure 7(c)", "Figure 8(b)", "Figure 8(c)"):
        return None
    if line["model"] not in PAPER_MODELS or (figure == "Figure 6(b)" and "prefetch on" in line["sharding"]):
        return None
    quantities = {
        "tflops_per_gpu": SPEED,
        "peak_memory_allocated": ALLOCATED,
        "peak_memory_active": ACTIVE,
        "peak_memory_reserved": RESERVED,
    }
    gpt = "GPT" in line["model"]
    settings = {
        **FSDP_PAPER,
        **PAPER_MODELS[line["model"]],
        "sequence_length": "2048" if gpt else "512",
        # Of Figure 6(a) neither is stated: 64 GPUs and batch 8 are where Figure 7(c) has the same number.
        "gpus": line["gpu_count"] or "64",
        "batch_size_per_gpu": line["batch_size_per_gpu"] or ("1" if gpt else "8"),
    }
    if "prefetch off" in line["sharding"]:
        settings["strategy.backward_prefetch"] = "none"
    if "hybrid" in line["sharding"]:
        settings["strategy.sharding_factor"] = "node"
    cliff = figure == "Figure 7(b)" and settings["gpus"] == "128" and settings["batch_size_per_gpu"] == "2"
    counted = figure != "Figure 8(c)" and not cliff
    return _made(line, settings, quantities[line["metric"]], float(line["value"]), counted=counted)


def _llm_foundry(line: Line) -> Case | None:
    if line["metric"] != "tokens_per_second_per_gpu" or line["precision"] == "amp_fp8":
        return None
    width, layers, heads = MPT_SHAPES[line["model"].removeprefix("MPT-")]
    accumulation = re.search(r"grad accum (\d+)", line["note"])
    assert accumulation is not None
    settings = {
        **LLM_FOUNDRY,
        "model.hidden_size": str(width),
        "model.num_layers": str(layers),
        "model.num_heads": str(heads),
        "model.block_size": line["sequence_length"],
        "hardware": line["gpu"],
        "gpus": line["gpu_count"],
        "batch_size_per_gpu": line["batch_size_per_gpu"],
        "sequence_length": line["sequence_length"],
        "activation_checkpointing": {"full": "full", "no": "none"}[line["activation_checkpointing"]],
        "gradient_accumulation": accumulation[1],
        "gradient_accumulation_sync": "true",
    }
    if "mp_mode PURE" in line["note"]:
        settings["precision.reduce"] = "bf16"
    if line["sharding"] == "shard_grad_op":
        settings["strategy.reshard_after_forward"] = "false"
    settings |= LLM_FOUNDRY_HARDWARE[line["gpu"].partition("_")[0]]
    if line["gpu"].startswith("h100") and int(line["gpu_count"]) in SWEPT_GPUS:
        settings |= {"strategy.backward_prefetch": "pre", "strategy.forward_prefetch": "true"}
    return _made(line, settings, SPEED, float(line["value"]))


def _zero_3(line: Line) -> Case | None:
    if "ZeRO-3" not in line["sharding"]:
        return None
    shapes = {"GPT-174.6B": ("12288", "96", "96"), "GPT-529.6B": ("20480", "105", "128")}
    width, layers, heads = shapes[line["model"]]
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
        "gpus": line["gpu_count"],
        "gpus_per_node": "8",
        "batch_size_per_gpu": line["batch_size_per_gpu"],
        "sequence_length": "2048",
        "activation_checkpointing": "full",
    }
    return _made(line, settings, SPEED, float(line["value"]), counted=False)


def _made(line: Line, settings: dict[str, str], quantity: str, value: float, *, counted: bool = True) -> Case:
    ordered = tuple(settings.items())
    if line["metric"] == "tokens_per_second_per_gpu":
        value = _tflops_of_tokens(configured(ordered), value)
    of_paper = line["source_key"] == "fsdp_paper"
    words = [line["model"], f"{settings['gpus']} GPUs", f"batch {settings['batch_size_per_gpu']}"]
    words += [f"length {line['sequence_length']}"] if len(line["sequence_length"]) > 4 else []
    words += [part for part in ("hybrid", "prefetch off") if part in line["sharding"]]
    return Case(
        source=line["source_key"],
        where=line["figure_or_table"].split(" with ")[0],
        label=", ".join(words),
        settings=ordered,
        quantity=quantity,
        published=value,
        tuned=quantity == SPEED and counted and int(settings["gpus"]) in TUNED_AT,
        counted=counted,
        uncertainty=float(line["uncertainty"] or 0.0),
        held_bytes=held_by_masks(configured(ordered)) if of_paper and quantity != SPEED else 0.0,
    )


def _tflops_of_tokens(config: RunConfig, tokens_per_second: float) -> float:
    """TFLOPS per GPU counting recomputation, of a rate at which tokens were trained on.

    Since PyTorch 2.1 checkpointing stops short of computing a block's last product again, as the suite's count of
    FLOPs says; before, a whole forward pass was computed again. The sweep of 2024 is taken to be of the first kind, all
    earlier rows of the second. (Predictions stop short, and count so: rates of FLOPs can be compared.)
    """
    count = config.model.flops_per_sequence(config.sequence_length)
    flops = count.hardware(config.activation_checkpointing)
    of_2024 = config.hardware.name.startswith("h100") and config.gpus in SWEPT_GPUS
    if config.activation_checkpointing == "full" and not of_2024:
        flops = count.model * 4 // 3
    return flops * tokens_per_second / config.model.tokens_per_sequence(config.sequence_length) / 1e12


def held_by_masks(config: RunConfig) -> float:
    """Bytes of the causal masks in fp32 that minGPT keeps, one in every block, and the suite's model does not."""
    return 4 * getattr(config.model, "num_layers", 0) * config.sequence_length**2


def in_gigabytes(size_bytes: float) -> float:
    """Bytes as the paper's memory axes count them."""
    return size_bytes / GB
