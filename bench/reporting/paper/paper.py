"""The FSDP paper's figures as tables: its published points beside the rows of a store that were run as they were.

Only rows of the same model on the same GPU, with the knobs the paper states, stand beside its points; where it states
nothing, `PaperComparison.note` says what was taken instead.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import pandas as pd

from bench.records.published import GB, load_published
from bench.reporting.paper.comparisons import (
    MAX_RELATIVE_SIZE_DIFFERENCE,
    PAPER_FSDP_FILTERS,
    QUANTITY_OF_METRIC,
    SAMPLE_RATE,
    TFLOPS,
    PaperComparison,
    PlottedQuantity,
)


def compare_with_paper(comparison: PaperComparison, table: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """The points of a figure: those of the paper and those of a store, once for every setting that is our choice.

    Returns
    -------
    list
        Pairs of the setting in words ("" where the paper states it) and a table: ``panel``, ``series``, ``column``,
        ``world_size``, ``evidence``, ``quantity`` (its short name), ``value`` (NaN where memory ran out), ``low`` and
        ``high`` (uncertainty, interval or range of repeats), ``out_of_memory``, ``degraded``, ``links`` (anchors of
        the runs).
    """
    published_rows = _load_paper_rows()
    figure_rows = published_rows[published_rows["source_figure"].str.endswith(comparison.figure)]
    matching_rows = _select_matching_rows(table, comparison.row_filters, figure_rows)
    point_tables = []
    group_columns = ["world_size", "workload", "activation_checkpointing"]
    groups = [(comparison.setting, matching_rows)]
    if not comparison.setting:
        groups = [
            (f"{size} GPUs, {workload}, checkpointing {checkpointing}", group)
            for (size, workload, checkpointing), group in matching_rows.groupby(group_columns, sort=True)
        ]
    for setting, group in groups:
        if len(group) and comparison.has_enough_rows(group):
            points = pd.concat(
                [_build_published_points(comparison, figure_rows), _build_store_points(comparison, group)],
                ignore_index=True,
            )
            point_tables.append((setting, points))
    return point_tables


@functools.cache
def _load_paper_rows() -> pd.DataFrame:
    """The paper's rows that state a single number each, or that memory ran out."""
    published_rows = load_published()
    paper_rows = published_rows[published_rows["source_key"] == "fsdp_paper"].copy()
    for metric, quantity in QUANTITY_OF_METRIC.items():
        is_metric = paper_rows["source_metric"] == metric
        values = pd.to_numeric(paper_rows.loc[is_metric, "source_value"]) * quantity.scale
        paper_rows.loc[is_metric, quantity.column] = values.astype(paper_rows[quantity.column].dtype)
    return paper_rows[(paper_rows["source_provenance"] != "text") | (paper_rows["status"] == "oom")]


def _select_matching_rows(
    table: pd.DataFrame, row_filters: Mapping[str, tuple[Any, ...]], figure_rows: pd.DataFrame
) -> pd.DataFrame:
    """The rows with the values asked for, of a model of the size the paper prints; a hybrid shards inside a node."""
    is_match = pd.Series(True, index=table.index)
    for column, allowed_values in row_filters.items():
        is_match &= _is_true(table[column].isin(allowed_values))
    for column, stated_values in PAPER_FSDP_FILTERS.items():
        is_match &= _is_true(table[column].isin(row_filters.get(column, stated_values))) | _is_true(
            table["strategy"] == "ddp"
        )
    is_inside_node = _is_true(table["sharding_factor"] * table["nodes"] == table["world_size"])
    is_match &= is_inside_node | ~_is_true(table["effective_strategy"].str.startswith("fsdp1/hybrid_shard"))
    published_sizes = figure_rows.dropna(subset=["parameters"]).groupby("model")["parameters"].median()
    published_parameters = table["model"].map(published_sizes).astype("Float64")
    return table[
        is_match & _is_true((table["parameters"] / published_parameters - 1).abs() < MAX_RELATIVE_SIZE_DIFFERENCE)
    ]


def _is_true(values: pd.Series) -> pd.Series:
    """Where something is true, and not just missing."""
    return values.astype("boolean").fillna(False).astype(bool)


def _build_published_points(comparison: PaperComparison, figure_rows: pd.DataFrame) -> pd.DataFrame:
    models = comparison.row_filters["model"]
    points = []
    for _, row in figure_rows[figure_rows["model"].isin(models)].iterrows():
        for quantity in comparison.quantities:
            if pd.isna(row[quantity.column]) and row["status"] != "oom":
                continue
            value = float("nan") if row["status"] == "oom" else float(row[quantity.column]) / quantity.scale
            margin = 0.0 if pd.isna(row["source_uncertainty"]) else float(row["source_uncertainty"])
            if quantity.scale == GB:
                margin = margin or 0.5
            point = _build_point(comparison, row, quantity, value, value - margin, value + margin, False)
            points.append({**point, "links": ()})
    return pd.DataFrame(points)


def _build_store_points(comparison: PaperComparison, rows: pd.DataFrame) -> pd.DataFrame:
    """One point per configuration: the median of its repeats, or a prediction with its interval."""
    points = []
    group_columns = ["model", "world_size", "batch_size_per_gpu", "effective_strategy", "precision", "evidence"]
    knob_columns = ["activation_checkpointing", "backward_prefetch", "limit_all_gathers", "sharding_factor"]
    for _, group in rows.groupby([*group_columns, *knob_columns], dropna=False, sort=False):
        fitted_rows = group[group["status"] == "ok"]
        for quantity in comparison.quantities:
            values = fitted_rows[quantity.column].dropna().astype(float) / quantity.scale
            if fitted_rows.empty:
                value = low = high = float("nan")
            elif values.empty:
                continue
            else:
                value, low, high = values.median(), values.min(), values.max()
            row = (group if fitted_rows.empty else fitted_rows).iloc[0]
            if row["evidence"] == "predicted" and not fitted_rows.empty:
                low, high = _compute_interval(row, quantity, value)
            degraded = bool(fitted_rows["degraded"].fillna(False).any())
            point = _build_point(comparison, row, quantity, value, low, high, degraded)
            points.append({**point, "links": tuple(group["link"])})
    return pd.DataFrame(points)


def _compute_interval(row: pd.Series, quantity: PlottedQuantity, value: float) -> tuple[float, float]:
    """A prediction's interval, or nothing around its value where it has none."""
    if quantity in (TFLOPS, SAMPLE_RATE):
        speed_factors = [
            row["step_time_median_s"] / row[name] for name in ("step_time_ci_high_s", "step_time_ci_low_s")
        ]
        return (
            (value, value)
            if any(pd.isna(factor) for factor in speed_factors)
            else (value * speed_factors[0], value * speed_factors[1])
        )
    if quantity.low_column is None or quantity.high_column is None or pd.isna(row[quantity.low_column]):
        return value, value
    return float(row[quantity.low_column]) / quantity.scale, float(row[quantity.high_column]) / quantity.scale


def _build_point(
    comparison: PaperComparison,
    row: pd.Series,
    quantity: PlottedQuantity,
    value: float,
    low: float,
    high: float,
    degraded: bool,
) -> dict[str, Any]:
    return {
        "panel": comparison.get_panel(row),
        "series": comparison.get_series(row),
        "column": comparison.get_column(row),
        "world_size": None if pd.isna(row["world_size"]) else int(row["world_size"]),
        "evidence": row["evidence"],
        "quantity": quantity.short_name,
        "value": value,
        "low": low,
        "high": high,
        "out_of_memory": row["status"] == "oom",
        "degraded": degraded,
    }
