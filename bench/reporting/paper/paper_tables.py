"""Small tables that explain a figure: what the paper's text says of it, what its TFLOPS count, what memory consists of.

Each is a table of words and numbers for people, one row per fact; nothing in them is typed, everything follows from
rows (published ones included).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from bench.core.presentation import (
    GIB,
    MISSING,
    Variant,
    build_variant,
    format_count,
    format_number,
    get_strategy_label,
)
from bench.records import Record
from bench.records.published import load_published
from bench.reporting.paper.comparisons import PAPER_COMPARISONS, PAPER_PRECISION
from bench.reporting.paper.paper import compare_with_paper

# ---- what TFLOPS count


def build_flops_table(table: pd.DataFrame, figures: Sequence[str] = ("Figure 7(b)", "Figure 7(c)")) -> pd.DataFrame:
    """The fastest published point of each figure as hardware and as model TFLOP/s, with HFU and MFU.

    How many FLOPs are computed twice under checkpointing, and the GPU's peak, are taken from rows of the same model
    in `table`; the paper does not give its formula, and is taken to count what is computed again.
    """
    rows = []
    for comparison in PAPER_COMPARISONS:
        if comparison.figure not in figures:
            continue
        for _, points in compare_with_paper(comparison, table):
            fastest_tflops = points[points["evidence"] == "published"]["value"].max()
            model_rows = table[table["model"].isin(comparison.row_filters["model"]) & table["mfu"].notna()]
            model_rows = model_rows[
                (model_rows["activation_checkpointing"] == "full") & (model_rows["precision"] == PAPER_PRECISION)
            ]
            executed_ratio = float((model_rows["hardware_tflops_per_gpu"] / model_rows["tflops_per_gpu"]).median())
            peak_tflops = float((model_rows["tflops_per_gpu"] / model_rows["mfu"]).median())
            rows.append(
                {
                    "Figure": comparison.figure,
                    "Model": comparison.row_filters["model"][0],
                    "Fastest point, TFLOPS": format_number(fastest_tflops, 4),
                    "Peak, TFLOPS": format_number(peak_tflops),
                    "Executed / model FLOPs": format_number(executed_ratio),
                    "HFU": f"{100 * fastest_tflops / peak_tflops:.1f} %",
                    "Model TFLOP/s": format_number(fastest_tflops / executed_ratio, 4),
                    "MFU": f"{100 * fastest_tflops / executed_ratio / peak_tflops:.1f} %",
                    "MFU if nothing was counted twice": f"{100 * fastest_tflops / peak_tflops:.1f} %",
                }
            )
    return pd.DataFrame(rows)


# ---- memory


def build_memory_parts_table(records: Sequence[Record]) -> pd.DataFrame:
    """What the predicted peak of memory consists of, in GiB: a row per predicted record, from small models to large.

    ``Gathered`` are parameters of blocks that a rank holds for the moment, and gradients being reduced; ``Reserved`` is
    what the caching allocator takes for all of it, with what it loses between blocks; ``Device`` is what it can have.
    Numbers of GPUs, batch and precision are shown where they differ.
    """
    predicted_records = [record for record in records if record.get("prediction")]
    rows = [
        {**_describe_record(record), **_format_memory_parts(record["prediction"]["memory"])}
        for record in sorted(predicted_records, key=_build_sort_key)
    ]
    frame = pd.DataFrame(rows)
    return frame.drop(
        columns=[name for name in ("GPUs", "Batch", "Precision") if name in frame and len(set(frame[name])) == 1]
    )


def _describe_record(record: Record) -> dict[str, str]:
    return {
        "Model": f"{record['model']}, {format_count(record['parameters'])}",
        "Strategy": _build_record_variant(record).label,
        "GPUs": str(record["world_size"]),
        "Batch": str(record["batch_size_per_gpu"]),
        "Precision": record["precision"],
    }


def _build_record_variant(record: Record) -> Variant:
    return build_variant(
        *(record[name] for name in ("strategy", "effective_strategy", "sharding_factor", "world_size"))
    )


def _build_sort_key(record: Record) -> tuple[object, ...]:
    return record["parameters"], _build_record_variant(record), record["world_size"], record["batch_size_per_gpu"]


def _format_memory_parts(memory: Mapping[str, Any]) -> dict[str, str]:
    parts_bytes = dict(memory["parts_bytes"])
    sizes_bytes = {
        name.capitalize(): parts_bytes.pop(name, 0) for name in ("parameters", "gradients", "optimizer", "activations")
    }
    sizes_bytes["Gathered"] = parts_bytes.pop("gathered", 0) + parts_bytes.pop("reduced", 0)
    sizes_bytes["Other"] = sum(parts_bytes.values())
    sizes_bytes |= {name.capitalize(): memory[f"{name}_bytes"]["value"] for name in ("allocated", "reserved")}
    formatted_sizes = {name: format_number(size / GIB) for name, size in sizes_bytes.items()}
    capacity = memory["capacity_bytes"]
    return {
        **formatted_sizes,
        "Device": format_number(capacity / GIB) if capacity else MISSING,
        "": memory["verdict"] or "",
    }


# ---- time and communication


def build_step_table(table: pd.DataFrame, *knobs: str) -> pd.DataFrame:
    """Step time and communication not hidden by computation, a row per run; `knobs` are further columns to show."""
    completed_rows = table[(table["status"] == "ok") & table["step_time_median_s"].notna()]
    completed_rows = completed_rows.sort_values(["model", "batch_size_per_gpu", "world_size", *knobs], kind="stable")
    rows = [
        {
            "Model": row["model"],
            "Batch": str(row["batch_size_per_gpu"]),
            "GPUs": str(row["world_size"]),
            **{knob.replace("_", " ").capitalize(): str(row[knob]) for knob in knobs},
            "Evidence": row["evidence"],
            "Step, s": format_number(row["step_time_median_s"]),
            "Not hidden": MISSING if pd.isna(row["exposed_communication"])
            else f"{format_number(100 * row['exposed_communication'], 2)} %",
            "Hardware TFLOP/s": format_number(row["hardware_tflops_per_gpu"]),
            "Reserved, GiB": format_number(
                None if pd.isna(row["peak_reserved_bytes"]) else row["peak_reserved_bytes"] / GIB
            ),
            "Waits for": "" if pd.isna(row["limited_by"]) else row["limited_by"],
            "": "degraded" if row["degraded"] is True else "",
        }
        for row in completed_rows.to_dict("records")
    ]  # fmt: skip
    return pd.DataFrame(rows).drop_duplicates()


def build_time_parts_table(records: Sequence[Record]) -> pd.DataFrame:
    """What the predicted step consists of, in ms: a row per predicted record that has a time, by sharding factor.

    ``Compute``, ``Optimizer``, ``Communication not hidden`` and ``Waiting for the host``, which starts operators late,
    add up to the step; ``Communication`` is all of it, hidden or not.
    """
    part_labels = {
        "compute_s": "Compute",
        "optimizer_s": "Optimizer",
        "exposed_communication_s": "Communication not hidden",
        "bubble_s": "Waiting for the host",
        "communication_s": "Communication",
    }
    rows = []
    for record in sorted(records, key=lambda row: (row["model"], row["strategy"], row["sharding_factor"])):
        time = (record.get("prediction") or {}).get("time")
        if time is None or record["status"] != "ok":
            continue
        rows.append(
            {
                "Model": record["model"],
                "Strategy": get_strategy_label(record["strategy"]),
                "F": str(record["sharding_factor"]),
                "GPUs": str(record["world_size"]),
                "Step": format_number(1e3 * time["step_s"]["value"]),
                **{name: format_number(1e3 * time[part]) for part, name in part_labels.items()},
                "TFLOP/s": format_number(record["tflops_per_gpu"]),
            }
        )
    return pd.DataFrame(rows)


def build_traffic_table(parameters: int, value_bytes: int, world_size: int, per_node: int) -> pd.DataFrame:
    """What each rank sends per step at every sharding factor F, in GB (10^9 bytes).

    Of a copy of M bytes, a group of F ranks gathers the parameters twice (forward and backward) and reduce-scatters the
    gradients: 3 M (F - 1) / F per rank. The R = W / F groups all-reduce their shards' gradients: 2 (M / F) (R - 1) / R.
    At F = 1 and F = W these are what the FSDP paper (arXiv:2304.11277, section 3.2) gives for full replication,
    2 M (W - 1) / W, and for full sharding; for a hybrid inside machines of G it writes 2 M (W - 1) / (G W) across
    machines, a little more than the ring all-reduce counted here.

    Parameters
    ----------
    parameters: int
        Of the whole model.
    value_bytes: int
        Bytes of one gathered parameter or reduced gradient: 2 for BF16.
    world_size: int
        W, a multiple of `per_node` or less than it.
    per_node: int
        Ranks of one machine.
    """
    model_gb = parameters * value_bytes / 1e9
    rows = []
    sharding_factor = 1
    while sharding_factor <= world_size:
        replicas = world_size // sharding_factor
        within_group_gb = 3 * model_gb * (sharding_factor - 1) / sharding_factor
        between_groups_gb = 2 * model_gb / sharding_factor * (replicas - 1) / replicas
        inter_node_gb = [
            within_group_gb if sharding_factor > per_node else 0.0,
            between_groups_gb if world_size > per_node else 0.0,
        ]
        rows.append(
            {
                "F": sharding_factor,
                "Keeps of the states": f"1/{sharding_factor}" if sharding_factor > 1 else "all",
                "Inside a group": format_number(within_group_gb),
                "Between groups": format_number(between_groups_gb),
                "Sent in all": format_number(within_group_gb + between_groups_gb),
                "Of it in rings that leave the machine": format_number(float(np.sum(inter_node_gb))),
            }
        )
        sharding_factor *= 2
    return pd.DataFrame(rows)


# ---- what was printed


def build_published_table(figure: str) -> pd.DataFrame:
    """Every number that one of the FSDP paper's figures or its text gives, as printed, with how it was obtained.

    ``±`` is the uncertainty of a point that was read off a plot; ``How`` says which are (`digitised`).
    """
    published_rows = load_published()
    figure_rows = published_rows[
        (published_rows["source_key"] == "fsdp_paper") & published_rows["source_figure"].str.endswith(figure)
    ]
    rows = [
        {
            "Model": row["source_model"],
            "Sharding": row["source_sharding"],
            "GPUs": _format_or_missing(row["source_gpu_count"]),
            "Machines": _format_or_missing(row["nodes"]),
            "Batch": _format_or_missing(row["batch_size_per_gpu"]),
            "What": row["source_metric"].replace("_", " "),
            "Value": row["source_value"],
            "±": _format_or_missing(row["source_uncertainty"]),
            "Unit": _format_or_missing(row["source_unit"]),
            "How": row["source_provenance"],
        }
        for row in figure_rows.to_dict("records")
    ]
    frame = pd.DataFrame(rows)
    empty_columns = [name for name in frame if (frame[name] == MISSING).all()]
    return frame.drop(columns=empty_columns)


def _format_or_missing(value: object) -> str:
    return MISSING if pd.isna(value) else str(value)  # type: ignore[call-overload]


def build_memory_scaling_table(
    table: pd.DataFrame, figures: Sequence[str] = ("Figure 8(b)", "Figure 8(c)")
) -> pd.DataFrame:
    """How allocated memory depends on the number of GPUs W: a + b / W, fitted to the points of each line.

    What is sharded falls as 1 / W: ``Bytes per parameter`` is b over the model's parameters. ``Stays`` is a.
    """
    rows = []
    for comparison in PAPER_COMPARISONS:
        if comparison.figure not in figures:
            continue
        parameters = float(table[table["model"].isin(comparison.row_filters["model"])]["parameters"].median())
        for _, points in compare_with_paper(comparison, table):
            allocated = points[(points["quantity"] == "allocated") & points["value"].notna()]
            for (series, evidence), series_points in allocated.groupby(["series", "evidence"], sort=False):
                if series_points["world_size"].nunique() < 3:
                    continue
                sharded_gb, constant_gb = np.polyfit(
                    1 / series_points["world_size"].astype(float), series_points["value"].astype(float), 1
                )
                rows.append(
                    {
                        "Figure": comparison.figure,
                        "Model": comparison.row_filters["model"][0],
                        "Line": series,
                        "Evidence": evidence,
                        "Bytes per parameter, sharded": format_number(sharded_gb * 1e9 / parameters, 2),
                        "Stays, GB": format_number(constant_gb),
                    }
                )
    return pd.DataFrame(rows)
