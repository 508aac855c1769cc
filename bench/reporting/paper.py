"""The FSDP paper's figures as tables: its published points beside the rows of a store that were run as they were.

Only rows of the same model on the same GPU, with the knobs the paper states, stand beside its points; where it states
nothing, `Comparison.note` says what was taken instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from bench.records.published import GB, load_published

HARDWARE = "a100_80gb"
KINDS = ("measured", "predicted")
"""Kinds of evidence that stand beside published points; a rehearsal's speed leaves communication out."""

SAME_SIZE = 0.05
"""Relative difference in parameters up to which a model is the one the paper rounds ("11B" has 11.3)."""

AS_THE_PAPER: Mapping[str, tuple[Any, ...]] = {
    "hardware": (HARDWARE,),
    "evidence": KINDS,
    "status": ("ok", "oom"),
    "strategy": ("ddp", "fsdp1"),
    "gradient_accumulation": (1,),
    "compile": (False,),
    "optimizer": ("adamw",),
    "limit": ("",),
}
FSDP_AS_THE_PAPER: Mapping[str, tuple[Any, ...]] = {
    "reshard_after_forward": (True,),
    "forward_prefetch": (False,),
    "blocks_per_unit": (1,),
    "cpu_offload": (False,),
}
"""Knobs of FSDP1; rows of DDP have none of them."""


@dataclass(frozen=True)
class Quantity:
    """What is drawn: a column of the rows, and how it is named on the axis."""

    column: str
    axis: str
    short: str
    scale: float = 1.0
    low: str | None = None
    high: str | None = None
    """Columns of a prediction's interval; for speed it follows from that of the step time."""


TFLOPS = Quantity("hardware_tflops_per_gpu", "hardware TFLOP/s per GPU (recomputation counted)", "TFLOP/s")
LATENCY = Quantity(
    "step_time_median_s", "seconds per step", "seconds", 1.0, "step_time_ci_low_s", "step_time_ci_high_s"
)
ALLOCATED = Quantity(
    "peak_allocated_bytes",
    "peak allocated per GPU (GB)",
    "allocated",
    GB,
    "peak_allocated_low_bytes",
    "peak_allocated_high_bytes",
)
ACTIVE = Quantity("peak_active_bytes", "peak active per GPU (GB)", "active", GB)
RESERVED = Quantity(
    "peak_reserved_bytes",
    "peak reserved per GPU (GB)",
    "reserved",
    GB,
    "peak_reserved_low_bytes",
    "peak_reserved_high_bytes",
)


@dataclass(frozen=True)
class Comparison:
    """One figure of the paper: which rows belong to it, and what it shows of them."""

    figure: str
    title: str
    setting: str
    """What all points have in common, in words."""
    note: str
    """What must be known to read it rightly: what is inferred, what the text of the paper says otherwise."""
    quantities: tuple[Quantity, ...]
    where: Mapping[str, tuple[Any, ...]]
    """Values of columns that a store's row must have."""
    series: Callable[[pd.Series], str]
    """What a point belongs to: a line, or a lane."""
    panel: Callable[[pd.Series], str] = field(default=lambda row: "")
    """What its panel or group is called."""
    column: Callable[[pd.Series], str] = field(default=lambda row: "")
    """What tells it apart from other points of the same series and evidence."""
    order: tuple[str, ...] = ()
    """Lanes of a panel from top to bottom."""
    ratio: tuple[str, str] | None = None
    """Two series, the first against the second, where that is what the figure is about."""
    needs: Callable[[pd.DataFrame], bool] = field(default=lambda rows: rows["world_size"].nunique() > 1)
    """Whether rows are enough for the figure to say what it says."""
    comparable: bool = True
    """Whether the paper states enough of the runs that single values can be compared, and not just shapes or ratios."""


def _batch(row: pd.Series) -> str:
    return f"batch {row['batch_size_per_gpu']}"


def _prefetch(row: pd.Series) -> str:
    return "backward prefetch off" if row["backward_prefetch"] == "none" else "backward prefetch on"


def _limiter(row: pd.Series) -> str:
    return f"rate limiter {'on' if row['limit_all_gathers'] else 'off'}"


SHARDING = {
    "ddp": "DDP",
    "fsdp1/no_shard": "FSDP, full replication",
    "fsdp1/hybrid_shard": "FSDP, hybrid",
    "fsdp1/full_shard": "FSDP, full shard",
}
SIZES = {"t5_611m": "T5 611M", "t5_2b": "T5 2.28B", "t5_11b": "T5 11.3B"}

BF16 = "bf16 parameters"
"""The paper's mixed precision: FSDP1 casts parameters."""

FULL_SHARD: Mapping[str, tuple[Any, ...]] = {
    **AS_THE_PAPER,
    **FSDP_AS_THE_PAPER,
    "effective_strategy": ("fsdp1/full_shard",),
    "precision": (BF16,),
}
CHECKPOINTED = {"activation_checkpointing": ("full",)}
DEFAULTS = {"backward_prefetch": ("pre",), "limit_all_gathers": (True,)}
GPT = {"model": ("gpt_175b",), "family": ("mingpt",), "sequence_length": (2048,), "batch_size_per_gpu": (1, 2)}
T5 = {"model": ("t5_11b",), "sequence_length": (512,), "batch_size_per_gpu": (8, 16)}
STATED = "FSDP1 full shard · bf16 · checkpointing"

COMPARISONS = (
    Comparison(
        "Figure 6(a)",
        "DDP and FSDP at three sizes of T5",
        "",
        "The paper does not state GPUs, batch, sequence and precision of this figure: those of the rows beside it are "
        "an inference from its numbers (its 11.3B bar is what its Figure 7(c) shows for batch 8 × 512; 15 and 27 "
        "TFLOP/s are little for BF16, so the two small models probably ran in TF32). Its DDP ran out of memory when it "
        "wrapped a model larger than 2.28B. In bf16 either parameters are cast, as the paper says of FSDP, or autocast "
        "mixes, which is all that DDP has: each is to be compared with its own kind.",
        (TFLOPS,),
        {**AS_THE_PAPER, "model": tuple(SIZES), "effective_strategy": tuple(SHARDING)},
        series=lambda row: SHARDING[row["effective_strategy"]],
        panel=lambda row: SIZES[row["model"]],
        column=lambda row: "" if row["evidence"] == "published" else str(row["precision"]),
        order=tuple(SHARDING.values()),
        needs=lambda rows: rows["model"].nunique() > 1 and rows["effective_strategy"].nunique() > 2,
        comparable=False,
    ),
    Comparison(
        "Figure 6(b)",
        "GPT-175B and backward prefetch",
        f"{STATED} · batch 1 × 2048",
        "The paper does not state batch and sequence of this figure; with prefetch its points are those of batch 1 in "
        "its Figure 7(b). Its text says prefetch makes it about 18 % faster, the points say 22 to 23 %.",
        (TFLOPS,),
        {**FULL_SHARD, **CHECKPOINTED, **GPT, "batch_size_per_gpu": (1,), "world_size": (128, 256, 512)}
        | {"backward_prefetch": ("pre", "none"), "limit_all_gathers": (True,)},
        series=_prefetch,
        ratio=("backward prefetch on", "backward prefetch off"),
        needs=lambda rows: rows["backward_prefetch"].nunique() > 1,
    ),
    Comparison(
        "Figure 6(c)",
        "T5-11B and the rate limiter",
        "FSDP1 full shard · bf16 · batch 2 × 512 · 8 GPUs per machine",
        "The paper states batch 2 and the machines, but neither their GPUs nor sequence and precision, nor whether "
        "activations were checkpointed: all that is our choice, and checkpointing is shown both ways. Compare the "
        "ratios rather than the seconds.",
        (LATENCY,),
        {**FULL_SHARD, **T5, "batch_size_per_gpu": (2,), "nodes": (2, 4), "world_size": (16, 32)}
        | {"activation_checkpointing": ("none", "full"), "backward_prefetch": ("pre",)},
        series=_limiter,
        panel=lambda row: f"{row['nodes']} machines",
        column=lambda row: "" if row["evidence"] == "published" else f"checkpointing {row['activation_checkpointing']}",
        order=("rate limiter on", "rate limiter off"),
        ratio=("rate limiter off", "rate limiter on"),
        needs=lambda rows: rows["limit_all_gathers"].nunique() > 1,
        comparable=False,
    ),
    Comparison(
        "Figure 7(b)",
        "GPT-175B over the number of GPUs",
        f"{STATED} · sequence 2048",
        "At 128 GPUs batch 2 exhausts the memory, and the allocator retries: half the speed.",
        (TFLOPS,),
        {**FULL_SHARD, **CHECKPOINTED, **DEFAULTS, **GPT},
        series=_batch,
    ),
    Comparison(
        "Figure 7(c)",
        "T5-11B over the number of GPUs",
        f"{STATED} · sequence 512",
        "Of the decline from 8 to 512 GPUs the text says 7 %; the points say 5.9 % at batch 8 and 3.4 % at batch 16.",
        (TFLOPS,),
        {**FULL_SHARD, **CHECKPOINTED, **DEFAULTS, **T5},
        series=_batch,
    ),
    Comparison(
        "Figure 8(b)",
        "Peak memory of GPT-175B",
        f"{STATED} · sequence 2048",
        "The paper's points were probably rounded to whole GB (10⁹ bytes, as we read them).",
        (ALLOCATED, ACTIVE, RESERVED),
        {**FULL_SHARD, **CHECKPOINTED, **DEFAULTS, **GPT},
        series=_batch,
    ),
    Comparison(
        "Figure 8(c)",
        "Peak memory of T5-11B",
        f"{STATED} · sequence 512",
        "The paper's points were probably rounded to whole GB (10⁹ bytes, as we read them). Over the GPUs they decline "
        "by about 4 bytes per parameter, where Adam with FP32 parameters keeps 16.",
        (ALLOCATED, ACTIVE, RESERVED),
        {**FULL_SHARD, **CHECKPOINTED, **DEFAULTS, **T5},
        series=_batch,
    ),
)


def compare(comparison: Comparison, table: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """The points of a figure: those of the paper and those of a store, once for every setting that is our choice.

    Returns
    -------
    list
        Pairs of the setting in words ("" where the paper states it) and a table: ``panel``, ``series``, ``column``,
        ``world_size``, ``evidence``, ``quantity`` (its short name), ``value`` (NaN where memory ran out), ``low`` and
        ``high`` (uncertainty, interval or range of repeats), ``out_of_memory``, ``degraded``.
    """
    published = _published()
    paper = published[published["source_figure"].str.endswith(comparison.figure)]
    rows = _matching(table, comparison.where, paper)
    found = []
    keys = ["world_size", "workload", "activation_checkpointing"]
    groups = [(comparison.setting, rows)]
    if not comparison.setting:
        groups = [
            (f"{size} GPUs, {workload}, checkpointing {checkpointing}", group)
            for (size, workload, checkpointing), group in rows.groupby(keys, sort=True)
        ]
    for setting, group in groups:
        if len(group) and comparison.needs(group):
            points = pd.concat([_printed(comparison, paper), _observed(comparison, group)], ignore_index=True)
            found.append((setting, points))
    return found


@functools.cache
def _published() -> pd.DataFrame:
    """The paper's rows that state a single number each, or that memory ran out."""
    printed = load_published()
    paper = printed[printed["source_key"] == "fsdp_paper"]
    return paper[(paper["source_provenance"] != "text") | (paper["status"] == "oom")]


def _matching(table: pd.DataFrame, where: Mapping[str, tuple[Any, ...]], paper: pd.DataFrame) -> pd.DataFrame:
    """The rows with the values asked for, of a model of the size the paper prints; a hybrid shards inside a node."""
    fits = pd.Series(True, index=table.index)
    for column, allowed in where.items():
        fits &= _surely(table[column].isin(allowed))
    for column, allowed in FSDP_AS_THE_PAPER.items():
        fits &= _surely(table[column].isin(allowed)) | _surely(table["strategy"] == "ddp")
    inside_a_node = _surely(table["sharding_factor"] * table["nodes"] == table["world_size"])
    fits &= inside_a_node | ~_surely(table["effective_strategy"] == "fsdp1/hybrid_shard")
    sizes = paper.dropna(subset=["parameters"]).groupby("model")["parameters"].median()
    published = table["model"].map(sizes).astype("Float64")
    return table[fits & _surely((table["parameters"] / published - 1).abs() < SAME_SIZE)]


def _surely(truth: pd.Series) -> pd.Series:
    """Where something is true, and not just missing."""
    return truth.astype("boolean").fillna(False).astype(bool)


def _printed(comparison: Comparison, paper: pd.DataFrame) -> pd.DataFrame:
    models = comparison.where["model"]
    points = []
    for _, row in paper[paper["model"].isin(models)].iterrows():
        for quantity in comparison.quantities:
            if pd.isna(row[quantity.column]) and row["status"] != "oom":
                continue
            value = float("nan") if row["status"] == "oom" else float(row[quantity.column]) / quantity.scale
            margin = 0.0 if pd.isna(row["source_uncertainty"]) else float(row["source_uncertainty"])
            if quantity.scale == GB:
                margin = margin or 0.5
            points.append(_point(comparison, row, quantity, value, value - margin, value + margin, False))
    return pd.DataFrame(points)


def _observed(comparison: Comparison, rows: pd.DataFrame) -> pd.DataFrame:
    """One point per configuration: the median of its repeats, or a prediction with its interval."""
    points = []
    same = ["model", "world_size", "batch_size_per_gpu", "effective_strategy", "precision", "evidence"]
    knobs = ["activation_checkpointing", "backward_prefetch", "limit_all_gathers", "sharding_factor"]
    for _, group in rows.groupby([*same, *knobs], dropna=False, sort=False):
        fitted = group[group["status"] == "ok"]
        for quantity in comparison.quantities:
            values = fitted[quantity.column].dropna().astype(float) / quantity.scale
            if fitted.empty:
                value = low = high = float("nan")
            elif values.empty:
                continue
            else:
                value, low, high = values.median(), values.min(), values.max()
            row = (group if fitted.empty else fitted).iloc[0]
            if row["evidence"] == "predicted" and not fitted.empty:
                low, high = _interval(row, quantity, value)
            degraded = bool(fitted["degraded"].fillna(False).any())
            points.append(_point(comparison, row, quantity, value, low, high, degraded))
    return pd.DataFrame(points)


def _interval(row: pd.Series, quantity: Quantity, value: float) -> tuple[float, float]:
    """A prediction's interval, or nothing around its value where it has none."""
    if quantity is TFLOPS:
        ends = [row["step_time_median_s"] / row[name] for name in ("step_time_ci_high_s", "step_time_ci_low_s")]
        return (value, value) if any(pd.isna(end) for end in ends) else (value * ends[0], value * ends[1])
    if quantity.low is None or quantity.high is None or pd.isna(row[quantity.low]):
        return value, value
    return float(row[quantity.low]) / quantity.scale, float(row[quantity.high]) / quantity.scale


def _point(
    comparison: Comparison, row: pd.Series, quantity: Quantity, value: float, low: float, high: float, degraded: bool
) -> dict[str, Any]:
    return {
        "panel": comparison.panel(row),
        "series": comparison.series(row),
        "column": comparison.column(row),
        "world_size": None if pd.isna(row["world_size"]) else int(row["world_size"]),
        "evidence": row["evidence"],
        "quantity": quantity.short,
        "value": value,
        "low": low,
        "high": high,
        "out_of_memory": row["status"] == "oom",
        "degraded": degraded,
    }


def ratios(comparison: Comparison, points: pd.DataFrame) -> dict[tuple[str, str, str, int], float]:
    """The comparison's ratio by panel, evidence, column and world size (0 if not stated); empty if it has none."""
    if comparison.ratio is None:
        return {}
    values: dict[str, dict[tuple[str, str, str, int], float]] = {name: {} for name in comparison.ratio}
    for _, row in points[points["series"].isin(comparison.ratio) & points["value"].notna()].iterrows():
        size = 0 if pd.isna(row["world_size"]) else int(row["world_size"])
        values[row["series"]][row["panel"], row["evidence"], row["column"], size] = float(row["value"])
    above, below = (values[name] for name in comparison.ratio)
    return {key: value / below[key] for key, value in above.items() if key in below}


def deviations(points: pd.DataFrame, kind: str = "predicted") -> Sequence[float]:
    """Relative differences of what was predicted (or measured) from what was published, point by point."""
    ran = points[points["value"].notna() & points["world_size"].notna()]
    keys = ["panel", "series", "world_size", "quantity"]
    mine = ran[ran["evidence"] == kind].merge(ran[ran["evidence"] == "published"], on=keys, suffixes=("", "_published"))
    return list(mine["value"] / mine["value_published"] - 1)
