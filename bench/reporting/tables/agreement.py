"""Pairs of rows that answer the same question: what was predicted or rehearsed beside what was measured or published.

Published points come with the uncertainty of having been read off a plot; only figures whose runs the paper states well
enough take part (`PaperComparison.is_comparable`).
"""

from __future__ import annotations

from statistics import median
from typing import Any

import pandas as pd

from bench.records.matching import encode_config_key
from bench.records.published import GB
from bench.reporting.paper.comparisons import PAPER_COMPARISONS, TFLOPS, PaperComparison
from bench.reporting.paper.paper import compare_with_paper

SPEED, MEMORY = "speed", "memory"
QUANTITY_UNITS = {SPEED: "hardware TFLOP/s per rank", MEMORY: "peak memory per rank (GB)"}

PAIR_COLUMNS = [
    "quantity", "source", "label", "against", "evidence", "reference", "reference_low", "reference_high", "value",
    "low", "high", "degraded", "world_size", "links",
]  # fmt: skip

REQUIRED_COLUMNS = [
    "time_question", "evidence", "place", "variant", "precision", "heading", "world_size", "degraded",
    "peak_allocated_bytes", "peak_allocated_low_bytes", "peak_allocated_high_bytes", "hardware_tflops_per_gpu",
    "step_time_median_s", "step_time_ci_low_s", "step_time_ci_high_s", "link",
]  # fmt: skip
"""Columns of rows that pairs are made from."""


def build_pairs(table: pd.DataFrame) -> pd.DataFrame:
    """One row per pair of an estimate and what it is held against.

    Parameters
    ----------
    table: DataFrame
        As `bench.reporting.tables.table.prepare_table` makes it.

    Returns
    -------
    DataFrame
        ``quantity`` (`SPEED` or `MEMORY`, in the units of `QUANTITY_UNITS`), ``source`` (figure of the paper, or
        place), ``label`` (the run in words), ``against`` (evidence of the reference: published or measured),
        ``evidence`` (of the estimate), ``reference`` and ``value`` with ``low`` and ``high`` of both, ``degraded``
        (either is), ``world_size``, ``links`` (anchors of the runs of both), ``deviation`` (value against reference, a
        share; above 0 is too fast or too much memory).
    """
    pair_rows = [*_pair_with_published(table), *_pair_with_measured(table)]
    frame = pd.DataFrame(pair_rows, columns=PAIR_COLUMNS)
    return frame.assign(deviation=frame["value"].astype(float) / frame["reference"].astype(float) - 1)


def _pair_with_published(table: pd.DataFrame) -> list[dict[str, Any]]:
    pair_rows: list[dict[str, Any]] = []
    for comparison in PAPER_COMPARISONS:
        if comparison.is_comparable:
            for _, points in compare_with_paper(comparison, table):
                pair_rows += _pair_figure_points(comparison, points)
    return pair_rows


def _pair_figure_points(comparison: PaperComparison, points: pd.DataFrame) -> list[dict[str, Any]]:
    completed_points = points[points["value"].notna() & points["world_size"].notna()]
    merge_columns = ["panel", "series", "world_size", "quantity"]
    published_points, store_points = (
        completed_points[completed_points["evidence"] == "published"],
        completed_points[completed_points["evidence"] != "published"],
    )
    merged_points = store_points.merge(published_points, on=merge_columns, suffixes=("", "_printed"))
    return [
        {
            "quantity": SPEED if row["quantity"] == TFLOPS.short_name else MEMORY,
            "source": comparison.figure,
            "label": f"{comparison.title}: {row['quantity']}, {row['series']}, {int(row['world_size'])} GPUs",
            "against": "published",
            "evidence": row["evidence"],
            "reference": row["value_printed"],
            "reference_low": row["low_printed"],
            "reference_high": row["high_printed"],
            "value": row["value"],
            "low": row["low"],
            "high": row["high"],
            "degraded": bool(row["degraded"] or row["degraded_printed"]),
            "world_size": int(row["world_size"]),
            "links": row["links"],
        }
        for row in merged_points.to_dict("records")
    ]


def _pair_with_measured(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows that ran on all ranks, beside predictions and rehearsals of the same configuration on the same hardware."""
    rows = table[(table["status"] == "ok") & table["time_question"].notna()]
    rows_by_question: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in rows[REQUIRED_COLUMNS].astype(object).where(rows[REQUIRED_COLUMNS].notna(), None).to_dict("records"):
        rows_by_evidence = rows_by_question.setdefault(encode_config_key(row["time_question"]), {})
        rows_by_evidence.setdefault(row["evidence"], []).append({str(name): value for name, value in row.items()})
    pair_rows: list[dict[str, Any]] = []
    for rows_by_evidence in rows_by_question.values():
        measured_rows = rows_by_evidence.pop("measured", [])
        for evidence, evidence_rows in rows_by_evidence.items():
            pair_rows += _pair_repeats(evidence, evidence_rows, measured_rows)
    return pair_rows


def _pair_repeats(
    evidence: str, evidence_rows: list[dict[str, Any]], measured_rows: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Peak memory, and the speed of a prediction: a rehearsal's leaves communication out."""
    columns = {MEMORY: ("peak_allocated_bytes", GB)}
    if evidence == "predicted":
        columns[SPEED] = ("hardware_tflops_per_gpu", 1)
    pair_rows = []
    for quantity, (column, scale) in columns.items():
        reference_values = [row[column] / scale for row in measured_rows if row[column] is not None]
        values = [row[column] / scale for row in evidence_rows if row[column] is not None]
        if not reference_values or not values:
            continue
        first_row, value = measured_rows[0], median(values)
        low, high = _compute_interval(evidence_rows[0], quantity, value)
        pair_rows.append(
            {
                "quantity": quantity,
                "source": first_row["place"],
                "label": f"{first_row['variant']}, {first_row['precision']}, {first_row['heading']}",
                "against": "measured",
                "evidence": evidence,
                "reference": median(reference_values),
                "reference_low": min(reference_values),
                "reference_high": max(reference_values),
                "value": value,
                "low": low,
                "high": high,
                "degraded": quantity == SPEED and any(row["degraded"] for row in measured_rows),
                "world_size": first_row["world_size"],
                "links": tuple(row["link"] for row in (*measured_rows, *evidence_rows)),
            }
        )
    return pair_rows


def _compute_interval(row: dict[str, Any], quantity: str, value: float) -> tuple[float, float]:
    """What a prediction says holds 19 of 20 measurements; else nothing around the value."""
    if quantity == MEMORY and row["peak_allocated_low_bytes"] is not None:
        return row["peak_allocated_low_bytes"] / GB, row["peak_allocated_high_bytes"] / GB
    if quantity == SPEED and row["step_time_ci_high_s"] is not None:
        step_s = row["step_time_median_s"]
        return value * step_s / row["step_time_ci_high_s"], value * step_s / row["step_time_ci_low_s"]
    return value, value


def summarize_pairs(pairs: pd.DataFrame) -> pd.DataFrame:
    """How far off each kind of evidence is, per quantity and source: numbers of pairs and shares.

    Returns
    -------
    DataFrame
        ``quantity``, ``source``, ``against``, ``evidence``, ``pairs``; ``mean`` of absolute deviations, ``worst`` (with
        its sign), ``bias`` (mean of signed ones) and ``inside``, the share of references within the estimate's interval
        (widened by the reference's own); NaN where estimates have none.
    """
    representative_pairs = pairs[~pairs["degraded"].astype(bool)]
    rows = []
    for keys, group in representative_pairs.groupby(["quantity", "source", "against", "evidence"], sort=False):
        errors = group["deviation"].astype(float)
        pairs_with_interval = group[group["high"] > group["low"]]
        is_inside = (pairs_with_interval["low"] <= pairs_with_interval["reference_high"]) & (
            pairs_with_interval["reference_low"] <= pairs_with_interval["high"]
        )
        rows.append(
            {
                **dict(zip(("quantity", "source", "against", "evidence"), keys, strict=True)),
                "pairs": len(group),
                "mean": float(errors.abs().mean()),
                "worst": float(errors.iloc[int(errors.abs().argmax())]),
                "bias": float(errors.mean()),
                "inside": float(is_inside.mean()) if len(pairs_with_interval) else float("nan"),
            }
        )
    return pd.DataFrame(rows, columns=["quantity", "source", "against", "evidence", "pairs", "mean", "worst", "bias",
                                       "inside"])  # fmt: skip


def compute_log_limits(values: pd.DataFrame) -> tuple[float, float]:
    """Ends of a logarithmic axis that holds all values with some room."""
    low, high = float(values.min().min()), float(values.max().max())
    margin = max(high / low, 1.2) ** 0.06
    return low / margin, high * margin
