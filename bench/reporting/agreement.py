"""Pairs of rows that answer the same question: what was predicted or rehearsed beside what was measured or published.

Published points come with the uncertainty of having been read off a plot; only figures whose runs the paper states well
enough take part (`Comparison.comparable`).
"""

from __future__ import annotations

from statistics import median
from typing import Any

import pandas as pd

from bench.records.matching import identity
from bench.records.published import GB
from bench.reporting.paper import COMPARISONS, TFLOPS, Comparison, compare

SPEED, MEMORY = "speed", "memory"
UNITS = {SPEED: "hardware TFLOP/s per rank", MEMORY: "peak memory per rank (GB)"}

COLUMNS = [
    "quantity", "source", "label", "against", "evidence", "reference", "reference_low", "reference_high", "value",
    "low", "high", "degraded", "world_size",
]  # fmt: skip

NEEDED = [
    "time_question", "evidence", "place", "variant", "precision", "heading", "world_size", "degraded",
    "peak_allocated_bytes", "peak_allocated_low_bytes", "peak_allocated_high_bytes", "hardware_tflops_per_gpu",
    "step_time_median_s", "step_time_ci_low_s", "step_time_ci_high_s",
]  # fmt: skip
"""Columns of rows that pairs are made from."""


def pairs(table: pd.DataFrame) -> pd.DataFrame:
    """One row per pair of an estimate and what it is held against.

    Parameters
    ----------
    table: DataFrame
        As `bench.reporting.table.prepare` makes it.

    Returns
    -------
    DataFrame
        ``quantity`` (`SPEED` or `MEMORY`, in the units of `UNITS`), ``source`` (figure of the paper, or place),
        ``label`` (the run in words), ``against`` (evidence of the reference: published or measured), ``evidence`` (of
        the estimate), ``reference`` and ``value`` with ``low`` and ``high`` of both, ``degraded`` (either is),
        ``world_size``, ``deviation`` (value against reference, a share; above 0 is too fast or too much memory).
    """
    found = [*_published(table), *_measured(table)]
    frame = pd.DataFrame(found, columns=COLUMNS)
    return frame.assign(deviation=frame["value"].astype(float) / frame["reference"].astype(float) - 1)


def _published(table: pd.DataFrame) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for comparison in COMPARISONS:
        if comparison.comparable:
            for _, points in compare(comparison, table):
                found += _of_figure(comparison, points)
    return found


def _of_figure(comparison: Comparison, points: pd.DataFrame) -> list[dict[str, Any]]:
    ran = points[points["value"].notna() & points["world_size"].notna()]
    keys = ["panel", "series", "world_size", "quantity"]
    printed, mine = ran[ran["evidence"] == "published"], ran[ran["evidence"] != "published"]
    both = mine.merge(printed, on=keys, suffixes=("", "_printed"))
    return [
        {
            "quantity": SPEED if row["quantity"] == TFLOPS.short else MEMORY,
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
        }
        for row in both.to_dict("records")
    ]


def _measured(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows that ran on all ranks, beside predictions and rehearsals of the same configuration on the same hardware."""
    rows = table[(table["status"] == "ok") & table["time_question"].notna()]
    same: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in rows[NEEDED].astype(object).where(rows[NEEDED].notna(), None).to_dict("records"):
        kinds = same.setdefault(identity(row["time_question"]), {})
        kinds.setdefault(row["evidence"], []).append({str(name): value for name, value in row.items()})
    found: list[dict[str, Any]] = []
    for kinds in same.values():
        measured = kinds.pop("measured", [])
        for kind, part in kinds.items():
            found += _of_runs(kind, part, measured)
    return found


def _of_runs(kind: str, part: list[dict[str, Any]], measured: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Peak memory, and the speed of a prediction: a rehearsal's leaves communication out."""
    columns = {MEMORY: ("peak_allocated_bytes", GB)}
    if kind == "predicted":
        columns[SPEED] = ("hardware_tflops_per_gpu", 1)
    found = []
    for quantity, (column, scale) in columns.items():
        reference = [row[column] / scale for row in measured if row[column] is not None]
        values = [row[column] / scale for row in part if row[column] is not None]
        if not reference or not values:
            continue
        first, value = measured[0], median(values)
        low, high = _interval(part[0], quantity, value)
        found.append(
            {
                "quantity": quantity,
                "source": first["place"],
                "label": f"{first['variant']}, {first['precision']}, {first['heading']}",
                "against": "measured",
                "evidence": kind,
                "reference": median(reference),
                "reference_low": min(reference),
                "reference_high": max(reference),
                "value": value,
                "low": low,
                "high": high,
                "degraded": quantity == SPEED and any(row["degraded"] for row in measured),
                "world_size": first["world_size"],
            }
        )
    return found


def _interval(row: dict[str, Any], quantity: str, value: float) -> tuple[float, float]:
    """What a prediction says holds 19 of 20 measurements; else nothing around the value."""
    if quantity == MEMORY and row["peak_allocated_low_bytes"] is not None:
        return row["peak_allocated_low_bytes"] / GB, row["peak_allocated_high_bytes"] / GB
    if quantity == SPEED and row["step_time_ci_high_s"] is not None:
        step = row["step_time_median_s"]
        return value * step / row["step_time_ci_high_s"], value * step / row["step_time_ci_low_s"]
    return value, value


def summary(found: pd.DataFrame) -> pd.DataFrame:
    """How far off each kind of evidence is, per quantity and source: numbers of pairs and shares.

    Returns
    -------
    DataFrame
        ``quantity``, ``source``, ``against``, ``evidence``, ``pairs``; ``mean`` of absolute deviations, ``worst`` (with
        its sign), ``bias`` (mean of signed ones) and ``inside``, the share of references within the estimate's interval
        (widened by the reference's own); NaN where estimates have none.
    """
    kept = found[~found["degraded"].astype(bool)]
    rows = []
    for keys, group in kept.groupby(["quantity", "source", "against", "evidence"], sort=False):
        errors = group["deviation"].astype(float)
        bounded = group[group["high"] > group["low"]]
        inside = (bounded["low"] <= bounded["reference_high"]) & (bounded["reference_low"] <= bounded["high"])
        rows.append(
            {
                **dict(zip(("quantity", "source", "against", "evidence"), keys, strict=True)),
                "pairs": len(group),
                "mean": float(errors.abs().mean()),
                "worst": float(errors.iloc[int(errors.abs().argmax())]),
                "bias": float(errors.mean()),
                "inside": float(inside.mean()) if len(bounded) else float("nan"),
            }
        )
    return pd.DataFrame(rows, columns=["quantity", "source", "against", "evidence", "pairs", "mean", "worst", "bias",
                                       "inside"])  # fmt: skip


def geometric_ends(values: pd.DataFrame) -> tuple[float, float]:
    """Ends of a logarithmic axis that holds all values with some room."""
    low, high = float(values.min().min()), float(values.max().max())
    room = max(high / low, 1.2) ** 0.06
    return low / room, high * room
