"""The FSDP paper's figures that rows of a store can stand beside: which rows those are, and what they show."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from bench.core.presentation import OPTIONAL_SETTING_FORMATTERS
from bench.records.published import GB

PAPER_HARDWARE = "a100_80gb"
EVIDENCE_KINDS = ("measured", "predicted")
"""Kinds of evidence that stand beside published points; a rehearsal's speed leaves communication out."""

MAX_RELATIVE_SIZE_DIFFERENCE = 0.05
"""Relative difference in parameters up to which a model is the one the paper rounds ("11B" has 11.3)."""

PAPER_FILTERS: Mapping[str, tuple[Any, ...]] = {
    "hardware": (PAPER_HARDWARE,),
    "evidence": EVIDENCE_KINDS,
    "status": ("ok", "oom"),
    "strategy": ("ddp", "fsdp1"),
    "gradient_accumulation": (1,),
    "compile": (False,),
    "optimizer": ("adamw",),
    "limit": ("",),
    **dict.fromkeys(OPTIONAL_SETTING_FORMATTERS, (pd.NA,)),
}
PAPER_FSDP_FILTERS: Mapping[str, tuple[Any, ...]] = {
    "reshard_after_forward": (True,),
    "forward_prefetch": (False,),
    "blocks_per_unit": (1,),
    "cpu_offload": (False,),
}
"""Knobs of FSDP1; rows of DDP have none of them."""


@dataclass(frozen=True)
class PlottedQuantity:
    """What is drawn: a column of the rows, and how it is named on the axis."""

    column: str
    axis_label: str
    short_name: str
    scale: float = 1.0
    low_column: str | None = None
    high_column: str | None = None
    """Columns of a prediction's interval; for speed it follows from that of the step time."""
    short_label: str = ""
    """How the axis of bars is named, which has less room; empty: as the axis of lines."""

    @property
    def bar_label(self) -> str:
        return self.short_label or self.axis_label


TFLOPS = PlottedQuantity(
    "hardware_tflops_per_gpu",
    "hardware TFLOP/s per GPU (recomputation counted)",
    "TFLOP/s",
    short_label="TFLOP/s per GPU,\nrecomputation counted",
)
SAMPLE_RATE = PlottedQuantity("tokens_per_second_per_gpu", "samples per second per GPU", "samples/s")
STEP_TIME = PlottedQuantity(
    "step_time_median_s", "seconds per step", "seconds", 1.0, "step_time_ci_low_s", "step_time_ci_high_s"
)
ALLOCATED = PlottedQuantity(
    "peak_allocated_bytes",
    "peak allocated per GPU (GB)",
    "allocated",
    GB,
    "peak_allocated_low_bytes",
    "peak_allocated_high_bytes",
)
ACTIVE = PlottedQuantity("peak_active_bytes", "peak active per GPU (GB)", "active", GB)
RESERVED = PlottedQuantity(
    "peak_reserved_bytes",
    "peak reserved per GPU (GB)",
    "reserved",
    GB,
    "peak_reserved_low_bytes",
    "peak_reserved_high_bytes",
)


QUANTITY_OF_METRIC = {"p90_qps": SAMPLE_RATE, "peak_memory": ALLOCATED}
"""What metrics of the paper's DHEN stand beside that are in no column of published rows: a percentile of speed, and
memory of a kind that is not named. A sample is a token in rows of DHEN."""


@dataclass(frozen=True)
class PaperComparison:
    """One figure of the paper: which rows belong to it, and what it shows of them."""

    figure: str
    title: str
    setting: str
    """What all points have in common, in words."""
    note: str
    """What must be known to read it rightly: what is inferred, what the text of the paper says otherwise."""
    quantities: tuple[PlottedQuantity, ...]
    row_filters: Mapping[str, tuple[Any, ...]]
    """Values of columns that a store's row must have."""
    get_series: Callable[[pd.Series], str]
    """What a point belongs to: a line, or a lane."""
    get_panel: Callable[[pd.Series], str] = field(default=lambda row: "")
    """What its panel or group is called."""
    get_column: Callable[[pd.Series], str] = field(default=lambda row: "")
    """What tells it apart from other points of the same series and evidence."""
    lane_order: tuple[str, ...] = ()
    """Lanes of a panel from top to bottom."""
    ratio_series: tuple[str, str] | None = None
    """Two series, the first against the second, where that is what the figure is about."""
    has_enough_rows: Callable[[pd.DataFrame], bool] = field(default=lambda rows: rows["world_size"].nunique() > 1)
    """Whether rows are enough for the figure to say what it says."""
    is_comparable: bool = True
    """Whether the paper states enough of the runs that single values can be compared, and not just shapes or ratios."""


def _describe_dhen_sharding(row: pd.Series) -> str:
    return DHEN_SHARDING_LABELS[row["effective_strategy"]]


def _format_batch(row: pd.Series) -> str:
    return f"batch {row['batch_size_per_gpu']}"


def _describe_prefetch(row: pd.Series) -> str:
    return "backward prefetch off" if row["backward_prefetch"] == "none" else "backward prefetch on"


def _describe_rate_limiter(row: pd.Series) -> str:
    return f"rate limiter {'on' if row['limit_all_gathers'] else 'off'}"


PAPER_SHARDING_LABELS = {
    "ddp": "DDP",
    "fsdp1/no_shard": "FSDP, full replication",
    "fsdp1/hybrid_shard": "FSDP, hybrid",
    "fsdp1/full_shard": "FSDP, full shard",
}
PAPER_MODEL_LABELS = {"t5_611m": "T5 611M", "t5_2b": "T5 2.28B", "t5_11b": "T5 11.3B"}

PAPER_PRECISION = "bf16 parameters"
"""The paper's mixed precision: FSDP1 casts parameters."""

FULL_SHARD_FILTERS: Mapping[str, tuple[Any, ...]] = {
    **PAPER_FILTERS,
    **PAPER_FSDP_FILTERS,
    "effective_strategy": ("fsdp1/full_shard",),
    "precision": (PAPER_PRECISION,),
}
CHECKPOINTING_FILTERS = {"activation_checkpointing": ("full",)}
FSDP_DEFAULT_FILTERS = {"backward_prefetch": ("pre",), "limit_all_gathers": (True,)}
GPT_FILTERS = {"model": ("gpt_175b",), "family": ("mingpt",), "sequence_length": (2048,), "batch_size_per_gpu": (1, 2)}
T5_FILTERS = {"model": ("t5_11b",), "sequence_length": (512,), "batch_size_per_gpu": (8, 16)}
DHEN_SHARDING_LABELS = {
    "fsdp1/full_shard": "full shard, RAF",
    "fsdp1/shard_grad_op": "full shard, NRAF",
    "fsdp1/hybrid_shard": "hybrid, RAF",
    "fsdp1/hybrid_shard_grad_op": "hybrid, NRAF",
}
"""RAF: reshard after forward."""
DHEN_FILTERS: Mapping[str, tuple[Any, ...]] = {
    **FULL_SHARD_FILTERS,
    **CHECKPOINTING_FILTERS,
    **FSDP_DEFAULT_FILTERS,
    "model": ("dhen",),
    "batch_size_per_gpu": (1024,),
    "effective_strategy": tuple(DHEN_SHARDING_LABELS),
    "reshard_after_forward": (True, False),
}
DHEN_SETTING = "FSDP1 for the dense part · bf16 · checkpointing · batch 1024"
DHEN_NOTE = (
    "Of DHEN the paper states 768B parameters in tables, 550M in the dense part, and a batch of 1024: that it is a "
    "GPU's, and every dimension of the model, is our choice, so compare the order of the lines and how they fall "
    "rather than their heights. "
)
STATED_SETTING = "FSDP1 full shard · bf16 · checkpointing"

PAPER_COMPARISONS = (
    PaperComparison(
        "Figure 6(a)",
        "DDP and FSDP at three sizes of T5",
        "",
        "The paper does not state GPUs, batch, sequence and precision of this figure: those of the rows beside it are "
        "an inference from its numbers (its 11.3B bar is what its Figure 7(c) shows for batch 8 × 512; 15 and 27 "
        "TFLOP/s are little for BF16, so the two small models probably ran in TF32). Its DDP ran out of memory when it "
        "wrapped a model larger than 2.28B. In bf16 either parameters are cast, as the paper says of FSDP, or autocast "
        "mixes, which is all that DDP has: each is to be compared with its own kind.",
        (TFLOPS,),
        {**PAPER_FILTERS, "model": tuple(PAPER_MODEL_LABELS), "effective_strategy": tuple(PAPER_SHARDING_LABELS)},
        get_series=lambda row: PAPER_SHARDING_LABELS[row["effective_strategy"]],
        get_panel=lambda row: PAPER_MODEL_LABELS[row["model"]],
        get_column=lambda row: "" if row["evidence"] == "published" else str(row["precision"]),
        lane_order=tuple(PAPER_SHARDING_LABELS.values()),
        has_enough_rows=lambda rows: rows["model"].nunique() > 1 and rows["effective_strategy"].nunique() > 2,
        is_comparable=False,
    ),
    PaperComparison(
        "Figure 6(b)",
        "GPT-175B and backward prefetch",
        f"{STATED_SETTING} · batch 1 × 2048",
        "The paper does not state batch and sequence of this figure; with prefetch its points are those of batch 1 in "
        "its Figure 7(b). Its text says prefetch makes it about 18 % faster, the points say 22 to 23 %.",
        (TFLOPS,),
        {
            **FULL_SHARD_FILTERS,
            **CHECKPOINTING_FILTERS,
            **GPT_FILTERS,
            "batch_size_per_gpu": (1,),
            "world_size": (128, 256, 512),
        }
        | {"backward_prefetch": ("pre", "none"), "limit_all_gathers": (True,)},
        get_series=_describe_prefetch,
        ratio_series=("backward prefetch on", "backward prefetch off"),
        has_enough_rows=lambda rows: rows["backward_prefetch"].nunique() > 1,
    ),
    PaperComparison(
        "Figure 6(c)",
        "T5-11B and the rate limiter",
        "FSDP1 full shard · bf16 · batch 2 × 512 · 8 GPUs per machine",
        "The paper states batch 2 and the machines, but neither their GPUs nor sequence and precision, nor whether "
        "activations were checkpointed: all that is our choice, and checkpointing is shown both ways. Compare the "
        "ratios rather than the seconds.",
        (STEP_TIME,),
        {**FULL_SHARD_FILTERS, **T5_FILTERS, "batch_size_per_gpu": (2,), "nodes": (2, 4), "world_size": (16, 32)}
        | {"activation_checkpointing": ("none", "full"), "backward_prefetch": ("pre",)},
        get_series=_describe_rate_limiter,
        get_panel=lambda row: f"{row['nodes']} machines",
        get_column=lambda row: (
            "" if row["evidence"] == "published" else f"checkpointing {row['activation_checkpointing']}"
        ),
        lane_order=("rate limiter on", "rate limiter off"),
        ratio_series=("rate limiter off", "rate limiter on"),
        has_enough_rows=lambda rows: rows["limit_all_gathers"].nunique() > 1,
        is_comparable=False,
    ),
    PaperComparison(
        "Figure 7(a)",
        "DHEN, a recommendation model, over the number of GPUs",
        DHEN_SETTING,
        DHEN_NOTE + "The paper's axis is a percentile of speed (QPS, P90), where rows have the median.",
        (SAMPLE_RATE,),
        DHEN_FILTERS,
        get_series=_describe_dhen_sharding,
        is_comparable=False,
    ),
    PaperComparison(
        "Figure 7(b)",
        "GPT-175B over the number of GPUs",
        f"{STATED_SETTING} · sequence 2048",
        "At 128 GPUs batch 2 exhausts the memory, and the allocator retries: half the speed.",
        (TFLOPS,),
        {**FULL_SHARD_FILTERS, **CHECKPOINTING_FILTERS, **FSDP_DEFAULT_FILTERS, **GPT_FILTERS},
        get_series=_format_batch,
    ),
    PaperComparison(
        "Figure 7(c)",
        "T5-11B over the number of GPUs",
        f"{STATED_SETTING} · sequence 512",
        "Of the decline from 8 to 512 GPUs the text says 7 %; the points say 5.9 % at batch 8 and 3.4 % at batch 16.",
        (TFLOPS,),
        {**FULL_SHARD_FILTERS, **CHECKPOINTING_FILTERS, **FSDP_DEFAULT_FILTERS, **T5_FILTERS},
        get_series=_format_batch,
    ),
    PaperComparison(
        "Figure 8(a)",
        "Peak memory of DHEN",
        DHEN_SETTING,
        DHEN_NOTE + "The paper does not say whether its points are memory that is allocated, active or reserved: they "
        "stand beside what is allocated.",
        (ALLOCATED,),
        DHEN_FILTERS,
        get_series=_describe_dhen_sharding,
        is_comparable=False,
    ),
    PaperComparison(
        "Figure 8(b)",
        "Peak memory of GPT-175B",
        f"{STATED_SETTING} · sequence 2048",
        "The paper's points were probably rounded to whole GB (10⁹ bytes, as we read them).",
        (ALLOCATED, ACTIVE, RESERVED),
        {**FULL_SHARD_FILTERS, **CHECKPOINTING_FILTERS, **FSDP_DEFAULT_FILTERS, **GPT_FILTERS},
        get_series=_format_batch,
    ),
    PaperComparison(
        "Figure 8(c)",
        "Peak memory of T5-11B",
        f"{STATED_SETTING} · sequence 512",
        "The paper's points were probably rounded to whole GB (10⁹ bytes, as we read them). Over the GPUs they decline "
        "by about 4 bytes per parameter, where Adam with FP32 parameters keeps 16.",
        (ALLOCATED, ACTIVE, RESERVED),
        {**FULL_SHARD_FILTERS, **CHECKPOINTING_FILTERS, **FSDP_DEFAULT_FILTERS, **T5_FILTERS},
        get_series=_format_batch,
    ),
)
